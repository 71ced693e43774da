"""osf Figure 9: training loss of VGG-16, as published and with its dense layers replaced."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from workbook import plots
from workbook.common import claims, source
from workbook.common.claims import Result, check, claimed
from workbook.osf.frames import rows_of
from workbook.plots.style import look

# -- numbers -------------------------------------------------------------------------------------


def numbers(trained: pd.DataFrame) -> pd.DataFrame:
    """Return loss by epoch of the longest trainings, beside the printed losses.

    share_of_guess : the loss over ln(classes), the loss of a guess
    """
    trained = trained[trained["epochs"] == trained["epochs"].max()]
    frame = trained[["seed", "epoch", "measured_on", "loss", "accuracy"]].copy()
    names = {
        "": "published",
        "_replaced": "replaced",
        "_no_dropout": "published, no dropout",
    }
    frame.insert(
        0, "network", trained["network"].str.removeprefix("vgg16_eighth").map(names)
    )
    frame["share_of_guess"] = frame["loss"] / np.log(trained["classes"])
    printed = {
        "published": claimed("osf-fig09-before"),
        "replaced": claimed("osf-fig09-after"),
    }
    last = (frame["epoch"] == trained["epochs"]) & (frame["measured_on"] == "running")
    stated = frame["network"].map(printed).where(last)
    return frame.assign(paper=stated / math.log(1000), paper_loss=stated)


# -- drawing -------------------------------------------------------------------------------------


def draw(frame: pd.DataFrame) -> Figure:
    """Draw loss by epoch on three sets of images; the paper's two printed losses where they belong."""
    last = rows_of(frame, epoch=frame["epoch"].max(), measured_on="running")
    means = last.groupby("network", sort=False)["share_of_guess"].mean()
    shares = ", ".join(f"{mean:.2g}% ({name})" for name, mean in (100 * means).items())
    said = (
        f"Relative to the loss of guessing, the final loss while training is {shares}"
    )
    with plots.sheet(said, columns=3, height=3.2, sharey=True) as (figure, axes):
        for ax, images in zip(axes, ("running", "training", "held_out"), strict=True):
            rows = frame[frame["measured_on"] == images]
            plots.samples(
                ax,
                rows,
                x="epoch",
                y="share_of_guess",
                series="network",
                center="mean",
                percent=100,
            )
            printed = rows.dropna(subset="paper").drop_duplicates("network")
            for width, row in zip((1, 2), printed.itertuples(), strict=False):
                shape = {
                    "color": look("paper").color,
                    "linestyle": ":",
                    "linewidth": width,
                }
                ax.axhline(
                    row.paper,
                    label=f"paper, {row.network}: {row.paper_loss:g}",
                    **shape,
                )
            ax.set_ylabel("loss / ln(classes)")
            ax.label_outer()
            kind = images.replace("_", "-") + " images"
            ax.set_title({"running": "while training"}.get(images, kind))
    return figure


# -- claims --------------------------------------------------------------------------------------

LEARNING = {"running": "while training", "training": "on training images"}


@check("osf-fig09-lower", "loss", LEARNING)
@check("osf-fig09-accuracy", "accuracy", {"held_out": "held out", **LEARNING})
def _trained(what: str, places: Mapping[str, str]) -> Result:
    """Compare the replaced network with the original, with and without dropout.

    With which of both the paper trains is not stated.
    """
    rows = source.everywhere("convergence").query("measured_on in @places")
    last = rows[rows["epoch"] == rows["epochs"].max()].replace({"measured_on": places})
    wide = last.pivot(index=["measured_on", "seed"], columns="network", values=what)
    in_order_of_names = ["original with dropout", "without", "replaced"]
    wide.columns = in_order_of_names
    ratios = pd.concat([wide["replaced"] / wide[name] for name in wide.columns[:2]])
    groups = (
        wide.agg(lambda of: of.map("{:.3g}".format)).groupby(level=0).agg(" and ".join)
    )
    each = (
        ", ".join(f"{name} {of}" for name, of in row.items())
        for _, row in groups.iterrows()
    )
    listed = "; ".join(map("{}: {}".format, groups.index, each))
    note = f"after {last['epoch'].max()} epochs, by seed, {listed}"
    return claims.measured(ratios, note, "recorded", n=last["seed"].nunique())
