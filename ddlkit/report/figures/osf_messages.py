"""osf's figure 10: what each form of cost says of the times of a network's own tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ddlkit.core.cost import MessageCost
from ddlkit.core.errors import UserError
from ddlkit.core.fit import fit, held_out_errors, unseen_errors
from ddlkit.model.calibration import undisturbed
from ddlkit.papers import networks, osf

Floats = NDArray[np.float64]
Maker = Callable[[Floats, Floats], MessageCost]

MODELS = ("ring_all_reduce", "alpha_beta", "piecewise:BDP", "piecewise", "segments", "table")
"""Ways to make a cost from samples, in the order of figures: osf Eq 7 from the two ends, a line, osf Eq 18
with its threshold at the bandwidth-delay product, the same where it fits best, linear pieces, a table."""
LINK = ["link", "ranks"]
FORMS = ("alpha_beta", "piecewise", "segments", "table")


def maker(model: str, workers: int, threshold_bytes: float) -> Maker:
    """What makes a cost of that name, one of MODELS, from samples of all-reduces."""
    if model == "ring_all_reduce":
        return partial(osf.ring_from_ends, workers=workers)
    form = model.replace("BDP", f"{threshold_bytes:.0f}")

    def fitted(sizes: Floats, seconds: Floats) -> MessageCost:
        return fit(form, sizes, seconds, workers=workers, algorithm="ring", draws=0).cost

    return fitted


def fig10(collectives: pd.DataFrame, tensors: pd.DataFrame, network: str) -> pd.DataFrame:
    """Error of each of MODELS at each size that the network's tensors have, over each link.

    collectives : samples to make costs from; tensors : those of another run, which are predicted. No cost
    has seen the size that it predicts. ``tensors`` of the result counts how many have that size;
    ``repeated`` is the relative difference of the two runs at sizes that both have, else NaN.

    Raises UserError when no link has both.
    """
    counts = pd.Series(networks.parameters(network)).mul(4).value_counts()
    tensors = tensors[tensors["network"] == network]
    frames = []
    for place, rows in _all_reduces(tensors).items():
        known = _all_reduces(collectives).get(place)
        if known is None:
            continue
        frames.append(_errors(known, rows).assign(**dict(zip(LINK, place, strict=True))))
    if not frames:
        raise UserError(
            f"no link with all-reduces of {network}'s tensors: run ddlkit measure tensors"
        )
    frame = pd.concat(frames, ignore_index=True)
    frame.insert(0, "tensors", counts.reindex(frame["bytes"]).to_numpy())
    return frame


def _all_reduces(samples: pd.DataFrame) -> dict[tuple[str, int], pd.DataFrame]:
    """All-reduces by link and ranks, without those that the machine's host disturbed."""
    chosen = undisturbed(samples[samples["collective"] == "all_reduce"])
    return {(str(link), int(ranks)): rows for (link, ranks), rows in chosen.groupby(LINK)}


def _errors(known: pd.DataFrame, rows: pd.DataFrame) -> pd.DataFrame:
    """Every model made from ``known``, at the sizes of ``rows``."""
    workers = int(known["ranks"].iloc[0])
    samples = [
        part[name].to_numpy(float) for part in (known, rows) for name in ("bytes", "seconds")
    ]
    ring = osf.ring_from_ends(samples[0], samples[1], workers)
    threshold = osf.bandwidth_delay_bytes(ring)
    before, measured = (part.groupby("bytes")["seconds"].median() for part in (known, rows))
    frames = []
    for model in MODELS:
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


def left_out_by_link(tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Median absolute error on inner sizes left out of the fit: one row per machine, collective and link.

    tables : machine -> table ``collectives``. Links with too few sizes for a form have NaN there.
    """
    keys = ["collective", *LINK]
    rows = []
    for machine, samples in tables.items():
        for place, chosen in samples[samples["ranks"] > 1].groupby(keys):
            errors = {form: _left_out(form, chosen) for form in FORMS}
            rows.append({"machine": machine, **dict(zip(keys, place, strict=True)), **errors})
    return pd.DataFrame(rows)


def _left_out(form: str, samples: pd.DataFrame) -> float:
    try:
        _, error = held_out_errors(form, samples["bytes"].to_numpy(), samples["seconds"].to_numpy())
    except UserError:  # too few sizes
        return math.nan
    return float(np.median(np.abs(error))) if error.size else math.nan


def below(network: str, size: float) -> float:
    """Share of a network's tensors with fewer bytes (float32) than ``size``."""
    return float(np.mean(4 * np.array(networks.parameters(network)) < size))
