"""osf's figures 9 and 10: what real training lost here, and what each form of cost says of real messages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from numpy.typing import NDArray

from ddlkit.core.cost import MessageCost
from ddlkit.core.errors import UserError
from ddlkit.core.fit import fit, unseen_errors
from ddlkit.core.units import KB
from ddlkit.model.calibration import undisturbed
from ddlkit.papers import networks, osf
from ddlkit.report import plots
from ddlkit.report.claims import claimed, prose
from ddlkit.report.figures.osf_panels import legend, say
from ddlkit.report.plots.style import look, theme

Floats = NDArray[np.float64]
Maker = Callable[[Floats, Floats], MessageCost]

MODELS = (
    "ring_all_reduce",
    "alpha_beta:medians",
    "alpha_beta",
    "piecewise:BDP",
    "piecewise",
    "segments",
    "table",
)
"""Ways to make a cost from samples, in the order of figures: osf Eq 7 from the two ends, a line by least
squares through the medians, another by relative error, osf Eq 18 with its threshold at the bandwidth-delay
product, the same where it fits best, linear pieces, a table."""
LINE_MODELS = ("ring_all_reduce", "alpha_beta:medians", "alpha_beta")
DRAWN = ("alpha_beta:medians", "piecewise:BDP", "table")
"""The claim's two forms, each as it should be, and what knows every other size."""
LINK = ["link", "ranks"]
PAPER_CLASSES = 1000
"""Of ImageNet, on which the paper trains."""
VARIANTS = {
    "vgg16_eighth": "published",
    "vgg16_eighth_replaced": "replaced",
    "vgg16_eighth_no_dropout": "published, no dropout",
}
"""Network as recorded -> name in figures."""
PICTURES = {
    "running": "while training",
    "training": "training images",
    "held_out": "held-out images",
}
"""Sets of images by the name that tables have."""
LEAST = 0.001
"""A smaller loss is no number worth telling."""


def fig09(trained: pd.DataFrame) -> pd.DataFrame:
    """Return loss by epoch of each network, seed and set of images, also over ln(classes), a guess's.

    trained : table ``convergence``; of trainings of several lengths the longest. ``paper_loss`` is the
    printed loss in training, in the last epoch of the paper's two networks, ``paper`` such a share of it.
    """
    trained = trained[trained["epochs"] == trained["epochs"].max()]
    frame = trained[["seed", "epoch", "measured_on", "loss", "accuracy"]].copy()
    frame.insert(0, "network", trained["network"].map(VARIANTS))
    frame["share_of_guess"] = frame["loss"] / np.log(trained["classes"])
    printed = {"published": claimed("osf-fig09-before"), "replaced": claimed("osf-fig09-after")}
    last = (frame["epoch"] == trained["epochs"]) & (frame["measured_on"] == "running")
    stated = frame["network"].map(printed).where(last)
    return frame.assign(paper=stated / math.log(PAPER_CLASSES), paper_loss=stated)


@theme()
def draw09(frame: pd.DataFrame) -> Figure:
    """Draw loss by epoch on three sets of images; the paper's two printed losses where they belong."""
    widths = {"width_ratios": [1.5, 1, 1]}
    figure, axes = plots.canvas(columns=3, height=3.2, sharey=True, gridspec_kw=widths)
    epochs = frame["epoch"].max()
    frame = frame.assign(network=frame["network"].str.replace("published", "original"))
    for ax, (images, title) in zip(axes, PICTURES.items(), strict=True):
        rows = frame[frame["measured_on"] == images]
        value = {"x": "epoch", "y": "share_of_guess", "series": "network"}
        plots.samples(ax, rows, **value, center="mean", percent=100, legend="")
        printed = rows.dropna(subset="paper").drop_duplicates("network").sort_values("paper")
        for place, row in enumerate(printed.to_dict("records")):
            style = look("paper")
            ax.axhline(row["paper"], color=style.color, linestyle=style.line, linewidth=1)
            said = f"paper, {row['network']}: {row['paper_loss']:g}"
            say(ax, 1.05 * epochs, row["paper"], said, (0, 7 if place else -7), ha="left")
            ax.set_xlim(right=1.75 * epochs)
            ax.set_xticks([tick for tick in ax.get_xticks() if 0 <= tick <= epochs])
        plots.heading(ax, title)
        ax.set_ylabel("loss / ln(classes)" if ax is axes[0] else "")
    legend(figure, axes)
    last = frame[(frame["epoch"] == epochs) & (frame["measured_on"] == "running")]
    means = last.groupby("network", sort=False)["share_of_guess"].mean()
    said = ", ".join(f"{name} {f'{m:.2g}' if m > LEAST else '~0'}" for name, m in means.items())
    plots.title(figure, f"Loss while training after {epochs} epochs, over ln(classes): {said}")
    return figure


def maker(model: str, workers: int, threshold_bytes: float) -> Maker:
    """What makes a cost of that name, one of MODELS, from samples of all-reduces."""
    if model == "ring_all_reduce":
        return partial(osf.ring_from_ends, workers=workers)
    form = model.replace("BDP", f"{threshold_bytes:.0f}")
    options: dict[str, Any] = {"workers": workers, "algorithm": "ring", "draws": 0}
    return lambda sizes, seconds: fit(form, sizes, seconds, **options).cost


def fig10(
    collectives: pd.DataFrame,
    tensors: pd.DataFrame,
    network: str,
    models: Sequence[str] = MODELS,
) -> pd.DataFrame:
    """Error of each of ``models`` at each size that the network's tensors have, over each link.

    collectives : samples to make costs from; tensors : those of another run, which are predicted. No cost
    has seen the size that it predicts. ``tensors`` of the result counts how many have that size;
    ``repeated`` is the relative difference of the two runs at sizes that both have, else NaN;
    ``paper_bandwidth_delay_bytes`` is the paper's threshold.

    Raises UserError when no link has both.
    """
    counts = pd.Series(networks.parameters(network)).mul(4).value_counts()
    tensors = tensors[tensors["network"] == network]
    known = _all_reduces(collectives)
    frames = [
        _errors(known[place], rows, models).assign(link=place[0], ranks=place[1])
        for place, rows in _all_reduces(tensors).items()
        if place in known
    ]
    if not frames:
        raise UserError(f"no link with all-reduces of {network}: run ddlkit measure tensors")
    frame = pd.concat(frames, ignore_index=True)
    frame.insert(0, "tensors", counts.reindex(frame["bytes"]).to_numpy())
    return frame.assign(paper_bandwidth_delay_bytes=KB * prose("osf")["fig10-bdp"])


def _all_reduces(samples: pd.DataFrame) -> dict[tuple[str, int], pd.DataFrame]:
    """All-reduces by link and ranks, without those that the machine's host disturbed."""
    chosen = undisturbed(samples[samples["collective"] == "all_reduce"])
    return {(str(link), int(ranks)): rows for (link, ranks), rows in chosen.groupby(LINK)}


def _errors(known: pd.DataFrame, rows: pd.DataFrame, models: Sequence[str]) -> pd.DataFrame:
    """Return errors of every model made from ``known``, at the sizes of ``rows``."""
    workers = int(known["ranks"].iloc[0])
    samples = [
        part[name].to_numpy(float) for part in (known, rows) for name in ("bytes", "seconds")
    ]
    ring = osf.ring_from_ends(samples[0], samples[1], workers)
    threshold = osf.bandwidth_delay_bytes(ring)
    before, measured = (part.groupby("bytes")["seconds"].median() for part in (known, rows))
    frames = []
    for model in models:
        sizes, errors = unseen_errors(maker(model, workers, threshold), samples[:2], samples[2:])
        columns = {
            "model": model,
            "bytes": sizes.astype(int),
            "measured_s": measured.to_numpy(),
            "model_s": (1 + errors) * measured.to_numpy(),
            "error": errors,
            "repeated": (before.reindex(measured.index) / measured - 1).to_numpy(),
            "bandwidth_delay_bytes": threshold,
        }
        frames.append(pd.DataFrame(columns))
    return pd.concat(frames, ignore_index=True)


def repeatable(frame: pd.DataFrame) -> dict[tuple[str, int], pd.DataFrame]:
    """Return rows of ``fig10`` by link, of the links on which something is `decided`; of all if nothing is.

    Elsewhere the machine changed between the two runs by more than the models differ: that shows nothing.
    """
    told = decided(frame)
    kept = told.loc[told["decided"] | (not told["decided"].any()), LINK].drop_duplicates()
    by_link = dict(iter(frame.groupby(LINK)))
    return {tuple(place): by_link[tuple(place)] for place in kept.itertuples(index=False)}


def decided(frame: pd.DataFrame) -> pd.DataFrame:
    """Return per link and side of the bandwidth-delay product whether its tensors tell Eq 18 from a line.

    frame : of `fig10`. Columns: the best line and its median error per tensor, the better of Eq 18's two and
    its error, how far the two runs differ at sizes that both have, and ``decided``: whether errors differ by
    more.
    """
    rows: list[dict[str, Any]] = []
    small = (frame["bytes"] < frame["bandwidth_delay_bytes"]).map({True: "small", False: "large"})
    sides = frame.assign(side=small, error=frame["error"].abs(), apart=frame["repeated"].abs())
    for place, of_link in sides.groupby(LINK, sort=False):
        for side in ("small", "large"):
            mine = of_link[of_link["side"] == side]
            each = mine.loc[mine.index.repeat(mine["tensors"])].groupby("model")["error"].median()
            line, curve = (
                each[[*LINE_MODELS]].idxmin(),
                each[["piecewise:BDP", "piecewise"]].idxmin(),
            )
            apart = float(mine["apart"].median())
            row = dict(zip(LINK, place, strict=True)) | {"tensors": side, "line": line}
            row |= {"line_error": each[line], "eq18": curve, "eq18_error": each[curve]}
            differ = abs(each[line] - each[curve]) > apart
            rows.append({**row, "runs_differ": apart, "decided": differ})
    return pd.DataFrame(rows)


def below(network: str, size: float) -> float:
    """Return the share of a network's tensors with fewer bytes (float32) than ``size``."""
    return float(np.mean(4 * np.array(networks.parameters(network)) < size))
