"""osf's figures 9 and 10: what real training lost here, and what each form of cost says of real messages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ddlkit.core.cost import MessageCost
from ddlkit.core.errors import UserError
from ddlkit.core.fit import fit, unseen_errors
from ddlkit.core.units import KB
from ddlkit.model.calibration import undisturbed
from ddlkit.papers import networks, osf
from ddlkit.report.claims import claimed, prose

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


def fig09(trained: pd.DataFrame) -> pd.DataFrame:
    """Loss by epoch of each network, seed and set of images, also as a share of ln(classes), a guess's.

    trained : table ``convergence``; of trainings of several lengths the longest. ``paper`` is the printed
    training loss as such a share, in the last epoch of the paper's two networks, where they train.
    """
    trained = trained[trained["epochs"] == trained["epochs"].max()]
    frame = trained[["seed", "epoch", "epochs", "measured_on", "loss", "accuracy"]].copy()
    frame.insert(0, "network", [VARIANTS[name] for name in trained["network"]])
    frame["share_of_guess"] = frame["loss"] / np.log(trained["classes"])
    frame["paper"] = math.nan
    last = (frame["epoch"] == frame["epochs"]) & (frame["measured_on"] == "running")
    for name, claim in (("published", "osf-fig09-before"), ("replaced", "osf-fig09-after")):
        shown = claimed(claim) / math.log(PAPER_CLASSES)
        frame.loc[last & (frame["network"] == name), "paper"] = shown
    return frame.drop(columns="epochs")


def final(frame: pd.DataFrame, value: str = "loss") -> pd.DataFrame:
    """Mean, least and most over the seeds in the last epoch: one row per network, of ``fig09``'s rows."""
    at_the_end = frame[frame["epoch"] == frame["epoch"].max()]
    wide = at_the_end.pivot_table(
        index="network", columns="measured_on", values=value, aggfunc=["mean", "min", "max"]
    )
    return wide.reindex([name for name in VARIANTS.values() if name in wide.index])


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
    """Rows of ``fig10`` by link, of the links on which something is `decided`; of all where nothing is.

    Elsewhere the machine changed between the two runs by more than the models differ: that shows nothing.
    """
    told = decided(frame)
    kept = told.loc[told["decided"] | (not told["decided"].any()), LINK].drop_duplicates()
    return {
        (str(link), int(ranks)): frame[(frame["link"] == link) & (frame["ranks"] == ranks)]
        for link, ranks in kept.itertuples(index=False)
    }


def error_summary(frame: pd.DataFrame) -> pd.DataFrame:
    """Per link and model: median absolute error per tensor below and above the bandwidth-delay product,
    the largest, and the error of all tensors' times together."""

    def summed(rows: pd.DataFrame) -> dict[str, float]:
        one_by_one = rows.loc[rows.index.repeat(rows["tensors"])]
        small = one_by_one["bytes"] < one_by_one["bandwidth_delay_bytes"]
        error = one_by_one["error"].abs()
        return {
            "small": error[small].median(),
            "large": error[~small].median(),
            "all": error.median(),
            "largest": error.max(),
            "sum": one_by_one["model_s"].sum() / one_by_one["measured_s"].sum() - 1,
        }

    keys = [*LINK, "model"]
    found = {key: summed(rows) for key, rows in frame.groupby(keys, sort=False)}
    return pd.DataFrame(found).T.rename_axis(keys)


def decided(frame: pd.DataFrame) -> pd.DataFrame:
    """Per link and side of the bandwidth-delay product: whether these tensors tell Eq 18 from a line.

    frame : of `fig10`. Columns: the best line and its median error per tensor, the better of Eq 18's two and
    its error, how far the two runs differ at sizes that both have, and ``decided``: whether errors differ by
    more.
    """
    summary, rows = error_summary(frame), []
    sides = {"small": frame["bytes"] < frame["bandwidth_delay_bytes"]}
    sides["large"] = ~sides["small"]
    for place, errors in summary.groupby(level=LINK, sort=False):
        here = (frame[LINK] == list(place)).all(axis=1)
        table = errors.droplevel(LINK)
        for side, inside in sides.items():
            of = table[side]
            line = of[list(LINE_MODELS)].idxmin()
            curve = of[["piecewise:BDP", "piecewise"]].idxmin()
            apart = float(frame.loc[here & inside, "repeated"].abs().median())
            row = dict(zip(LINK, place, strict=True)) | {"tensors": side}
            row |= {"line": line, "line_error": of[line], "eq18": curve, "eq18_error": of[curve]}
            rows.append({**row, "runs_differ": apart, "decided": abs(of[line] - of[curve]) > apart})
    return pd.DataFrame(rows)


def below(network: str, size: float) -> float:
    """Share of a network's tensors with fewer bytes (float32) than ``size``."""
    return float(np.mean(4 * np.array(networks.parameters(network)) < size))
