"""osf Figure 9: training loss of VGG-16, as published and with replaced layers."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from workbook import plots
from workbook.common import claims, source
from workbook.common.claims import Result, check, claimed
from workbook.osf.frames import rows_of
from workbook.plots.style import look

NETWORKS = {
    "vgg16_eighth": "published",
    "vgg16_eighth_replaced": "replaced",
    "vgg16_eighth_no_dropout": "published, no dropout",
}
"""The networks that were trained, and what the figure calls them."""
TITLES = {
    "running": "while training",
    "training": "training images",
    "held_out": "held-out images",
}
"""The images on which the loss is measured, and the titles of their panels."""

# -- numbers -------------------------------------------------------------------------


def numbers(trained: pd.DataFrame) -> pd.DataFrame:
    """Return the loss by epoch of the longest trainings, and the printed losses.

    Parameters
    ----------
    trained : DataFrame
        The recorded trainings, which are the table ``convergence`` of a machine: a row for
        each training, epoch and set of images.

    Returns
    -------
    DataFrame
        A row for each network, seed, epoch and set of images, with these columns:

        network
            "published" is VGG-16 as published, "published, no dropout" the same without its
            dropout, and "replaced" VGG-16 with the layers replaced as in the paper and
            without dropout. All are an eighth as wide.
        seed, epoch
            The seed of the training, and the epoch.
        measured_on
            "training", "held_out", or "running" for the images of an epoch while the network
            trains on them.
        loss, accuracy
            The mean loss, and the share of the images that were classified correctly.
        share_of_guess
            The loss divided by ln(classes), the loss of a guess that gives all classes the
            same probability.
        paper, paper_loss
            ``paper_loss`` is the loss that the paper prints, and ``paper`` is this loss
            divided by that of a guess. Both are NaN in rows for which none is printed.
    """
    # ``epochs`` is the number of epochs of a training, and ``epoch`` the one of a row.
    longest = trained[trained["epochs"] == trained["epochs"].max()]
    frame = longest[["seed", "epoch", "measured_on", "loss", "accuracy"]].copy()
    frame.insert(0, "network", longest["network"].map(NETWORKS))
    frame["share_of_guess"] = frame["loss"] / np.log(longest["classes"])
    printed = {
        "published": claimed("osf-fig09-before"),
        "replaced": claimed("osf-fig09-after"),
    }
    # The printed losses are those of training images at the end of the training. They are put
    # next to the loss while training.
    is_last_epoch = frame["epoch"] == longest["epochs"]
    is_stated = is_last_epoch & (frame["measured_on"] == "running")
    printed_loss = frame["network"].map(printed).where(is_stated)
    # The paper trains on ImageNet, which has 1000 classes.
    return frame.assign(paper=printed_loss / math.log(1000), paper_loss=printed_loss)


# -- drawing -------------------------------------------------------------------------


def draw(frame: pd.DataFrame) -> Figure:
    """Draw the loss by epoch, a panel for each set of images.

    Parameters
    ----------
    frame : DataFrame
        What `numbers` returned.
    """
    # "running" is the loss on the images of an epoch while the network trains on them.
    final_running = rows_of(frame, epoch=frame["epoch"].max(), measured_on="running")
    # The means over the seeds.
    means = final_running.groupby("network", sort=False)["share_of_guess"].mean()
    shares = ", ".join(f"{100 * mean:.2g}% ({name})" for name, mean in means.items())
    title = (
        f"Relative to the loss of guessing, the final loss while training is {shares}"
    )
    sheet = plots.sheet(title, columns=3, height=3.2, sharey=True)
    with sheet as (figure, axes):
        for ax, (images, panel_title) in zip(axes, TITLES.items(), strict=True):
            rows = frame[frame["measured_on"] == images]
            plots.samples(
                ax,
                rows,
                x="epoch",
                y="share_of_guess",
                series="network",
                # The line is the mean over the seeds, and the band holds all of them.
                center="mean",
                percent=100,
            )
            _draw_printed(ax, rows)
            ax.set_ylabel("loss / ln(classes)")
            ax.label_outer()
            ax.set_title(panel_title)
    return figure


def _draw_printed(ax: Axes, rows: pd.DataFrame) -> None:
    """Draw a dotted line at each printed loss, the second one thicker.

    ``rows`` are those of `numbers` for one set of images. A line is drawn at ``paper``, the
    printed loss divided by that of a guess. Its label has ``paper_loss``, the printed loss.
    """
    # A row for each network whose loss is printed. All seeds have the same printed loss.
    printed = rows.dropna(subset="paper").drop_duplicates("network")
    # There are two printed losses in the panel of the running loss, and none in the others, in
    # which no line is drawn.
    for width, row in zip((1, 2), printed.itertuples(), strict=False):
        ax.axhline(
            row.paper,
            label=f"paper, {row.network}: {row.paper_loss:g}",
            color=look("paper").color,
            linestyle=":",
            linewidth=width,
        )


# -- claims --------------------------------------------------------------------------

LEARNING = {"running": "while training", "training": "on training images"}
"""The sets of images that the networks learn, as notes call them."""


@check("osf-fig09-lower", "loss", LEARNING)
@check("osf-fig09-accuracy", "accuracy", {"held_out": "held out", **LEARNING})
def _replaced_over_original(measure: str, images: Mapping[str, str]) -> Result:
    """Return the final loss or accuracy with replaced layers, divided by the original's.

    The paper does not say whether the original trains with dropout, or on which images
    the measure is taken. Each combination is a reading.

    Parameters
    ----------
    measure : {"loss", "accuracy"}
        The column of table ``convergence`` that is compared.
    images : mapping of str to str
        The sets of images that count, by their name in the column ``measured_on``, and what
        the note calls each of them.
    """
    # Rows of the sets of images that are keys of ``images``.
    rows = source.everywhere("convergence").query("measured_on in @images")
    # The last epoch of the longest trainings. Shorter trainings have no such epoch.
    final = rows[rows["epoch"] == rows["epochs"].max()]
    final = final.replace({"measured_on": images})
    table = final.pivot(
        index=["measured_on", "seed"], columns="network", values=measure
    )
    # The pivot sorted the columns by their names: "vgg16_eighth", which has dropout,
    # "vgg16_eighth_no_dropout" and "vgg16_eighth_replaced". The new names are for the note.
    table.columns = ["original with dropout", "without", "replaced"]
    seeds = final["seed"].nunique()
    readings = {}
    for original in ("original with dropout", "without"):
        for set_of_images, by_seed in table.groupby(level="measured_on"):
            # A ratio for each seed.
            ratios = by_seed["replaced"] / by_seed[original]
            # The note follows below, for all readings together.
            readings[f"{original}, {set_of_images}"] = claims.measured(
                ratios, note="", grade="recorded", n=seeds
            )
    note = f"after {final['epoch'].max()} epochs, by seed, {_in_words(table)}"
    return claims.by_readings(readings, note)


def _in_words(table: pd.DataFrame) -> str:
    """Return a table's numbers as text, such as "held out: without 0.7 and 0.8, replaced 0.5".

    For each set of images ("held out"), the text lists the networks ("without" dropout,
    "replaced" layers), and for each network its number for each seed. The index of ``table``
    has a set of images and a seed, and its columns are networks.
    """
    parts = []
    for images, by_seed in table.groupby(level="measured_on"):
        networks = []
        for network, values in by_seed.items():
            of_seeds = " and ".join(f"{value:.3g}" for value in values)
            networks.append(f"{network} {of_seeds}")
        parts.append(f"{images}: {', '.join(networks)}")
    return "; ".join(parts)
