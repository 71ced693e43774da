"""Where foretold training and measured training part: by phase of the iteration, and how sure that is.

An iteration ends when the later rank has posted its last bucket, the last message has arrived, all is copied
out, and weights are updated. Spans of all ranks tell these four apart, and the model says each of them.

Fixed before it was computed of networks that are held out (22 November 2026): intervals draw rounds anew, all
cells of a network, batch and link by the same rounds, since they share what computing took there. What a
model without any error would show is how far the drawn cells lie from those that they were drawn of.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ddlkit.core.resources import Shared
from ddlkit.core.workload import Workload
from ddlkit.report.figures.sharing_measured import CELL
from ddlkit.report.figures.sharing_predicted import FITTED_ON, Known, later, shared

KEYS = [*CELL, "configuration"]
PHASES = ("computing", "messages", "copying out", "update")
DRAWS = 400
_SCALES = np.linspace(0.4, 2.5, 8)
"""Of computing, at which iterations are played; between them they are taken as straight."""
Floats = NDArray[np.float64]
Key = tuple[str, int, str, str, str]
"""Of a cell: its KEYS."""


def split(
    spans: pd.DataFrame,
    iterations: pd.DataFrame,
    layers: Mapping[tuple[str, int], Workload],
    known: Known,
    copied: Mapping[str, float],
) -> pd.DataFrame:
    """Every iteration whose spans of two ranks were kept: foretold less measured, by PHASES, over measured.

    Columns: KEYS, held_out, PHASES, mean rank (computing, by the mean of both ranks instead of the later),
    whole (the sum of PHASES), apart (by how much the ranks' last posts differ); shares of the iteration.
    """
    numbered = [*KEYS, "number"]
    first = iterations[(iterations["repeat"] == 0) & (iterations["iteration"] == 0)]
    first = first.assign(number=first.groupby(KEYS).cumcount())
    compute_s = first.set_index(numbered)["compute_s"]
    twice = spans.groupby([*KEYS, "task", "rank"]).cumcount()
    rows = []
    for key, own in spans.assign(number=twice).groupby(numbered, sort=False):
        network, batch, plan, link, configuration, _ = key
        work = layers.get((network, batch))
        if work is None or "-omp" in configuration or key not in compute_s.index:
            continue
        work = work.scaled(compute_s[key] / work.compute_s)
        told = shared(work, plan, configuration, link, known)
        if told is not None:
            told = replace(told, copy_s_per_byte=copied.get(network, 0.0))
            found = _apart(told, _ends(own))
            rows.append({**dict(zip(numbered, key, strict=True)), **found})
    table = pd.DataFrame(rows, columns=[*numbered, *PHASES, "mean rank", "whole", "apart"])
    return table.assign(held_out=~table["network"].isin(FITTED_ON))


class _Ends(NamedTuple):
    """(ranks,) when each has posted its last bucket, its last message, its copies and its update."""

    posted_s: Floats
    arrived_s: Floats
    copied_s: Floats
    done_s: Floats


def _ends(spans: pd.DataFrame) -> _Ends:
    last_s = spans.groupby(["rank", "kind"])["end_s"].max().unstack("kind")
    kinds = ("backward", "all_reduce", "wait", "update")
    return _Ends(*(last_s[kind].to_numpy(float) for kind in kinds))


def _apart(told: Shared, seen: _Ends) -> dict[str, float]:
    starts_s, ends_s = told.played_s
    computed_s = float(told.link.computed_s(told.computing.ready_s[-1:], starts_s, ends_s)[0])
    arrived_s = max(computed_s, float(ends_s.max()))
    update_s = told.workload.update_s
    said = np.array([computed_s, arrived_s, told.iteration_s - update_s, told.iteration_s])
    measured = np.maximum.accumulate([float(column.max()) for column in seen])
    whole_s = measured[-1]
    parts = np.diff(said - measured, prepend=0.0) / whole_s
    return {
        **dict(zip(PHASES, parts.tolist(), strict=True)),
        "mean rank": (computed_s - float(seen.posted_s.mean())) / whole_s,
        "whole": float(parts.sum()),
        "apart": float(np.ptp(seen.posted_s)) / whole_s,
    }


# -- how sure ------------------------------------------------------------------------------------


def foretold(
    cells: pd.DataFrame,
    layers: Mapping[tuple[str, int], Workload],
    known: Known,
    copied: Mapping[str, float],
    share: float = 0.0,
) -> dict[Key, Shared]:
    """Of each of the ``cells`` of `sharing_predicted`, by KEYS, what "copied" says; with a share, "met"."""
    found: dict[Key, Shared] = {}
    for key in cells[KEYS].itertuples(index=False, name=None):
        network, batch, plan, link, configuration = key
        told = shared(layers[network, batch], plan, configuration, link, known)
        if told is not None:
            told = replace(told, copy_s_per_byte=copied.get(network, 0.0))
            found[key] = later(told, share)
    return found


class Sure(NamedTuple):
    """Signed mean and median absolute error, with 95% intervals, and the median that noise alone shows."""

    mean: float
    mean_lower: float
    mean_upper: float
    median: float
    median_lower: float
    median_upper: float
    noise: float


def sure(
    iterations: pd.DataFrame,
    layers: Mapping[tuple[str, int], Workload],
    played: Mapping[Key, Shared],
) -> Sure:
    """How sure the errors of the iterations ``played`` are, by KEYS, of which ``iterations`` has the rounds.

    played : of `foretold`, from ``layers``: scaled to what computing took in the drawn rounds
    """
    columns = ["iteration_s", "compute_s"]
    rounds = iterations.groupby([*KEYS, "repeat"])[columns].mean()
    blocks: dict[tuple[str, int, str], list[tuple[Floats, Floats, Floats]]] = {}
    for key, one in played.items():
        network, batch, _, link, _ = key
        own = rounds.loc[key]
        said_s = np.array([_scaled(one, scale).iteration_s for scale in _SCALES])
        bases = _SCALES * layers[network, batch].compute_s
        cell = (own.to_numpy(float), bases, said_s)
        blocks.setdefault((network, batch, link), []).append(cell)
    rng = np.random.default_rng(0)
    found = _errors(blocks, None)
    drawn = np.array([_errors(blocks, rng) for _ in range(DRAWS)])
    means, medians = drawn.mean(axis=1), np.median(np.abs(drawn), axis=1)
    of_mean, of_median = (np.quantile(one, [0.025, 0.975]).tolist() for one in (means, medians))
    noise = float(np.median(np.abs(drawn - found), axis=1).mean())
    middle = float(np.median(np.abs(found)))
    return Sure(
        float(found.mean()), of_mean[0], of_mean[1], middle, of_median[0], of_median[1], noise
    )


def _scaled(one: Shared, scale: float) -> Shared:
    return replace(one, workload=one.workload.scaled(scale))


def _errors(
    blocks: Mapping[tuple[str, int, str], list[tuple[Floats, Floats, Floats]]],
    rng: np.random.Generator | None,
) -> Floats:
    """(cells,) foretold over measured, less 1; of rounds that are drawn anew for each block, or of all."""
    off = []
    for cells in blocks.values():
        count = min(len(rows) for rows, _, _ in cells)
        taken = slice(None) if rng is None else rng.integers(0, count, count)
        for rows, bases, said_s in cells:
            measured_s, compute_s = np.median(rows[taken], axis=0)
            off.append(np.interp(compute_s, bases, said_s) / measured_s - 1)
    return np.array(off)
