"""cs336: iterations of a GPT-2 XL sized model on two GPUs by bucket size, from those without buckets.

What its programs do, read in their source (damek/cs336-assignment2-systems, 749e968): buckets are filled
with parameters from the last registered one on, and closed before they would exceed their size; one leaves
when the last of its gradients is ready, copied together before. After backward each is waited for in turn,
divided by the ranks and copied back; gradients that travel alone are only divided. The update is an AdamW of
separate operations. The GPUs are not named; that they are A100s of 80 GB on PCIe is inferred from what is
printed: kernels of compute capability 8.0, 51 GB in use, products of two tensors at 1.7 TB/s, and all-reduces
at 21 GB/s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import combinations

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from ddlkit.core import plan
from ddlkit.core.cost import Table
from ddlkit.core.doubt import interval
from ddlkit.core.iteration import group_ends
from ddlkit.core.link import Link
from ddlkit.core.workload import Floats, Workload
from ddlkit.formats import ImportOptions, import_file
from ddlkit.formats.clusters import EXTERNAL, cs336
from ddlkit.report.clusters.rules import Rows, rows
from ddlkit.report.clusters.trials import TRIALS, fitted, root
from ddlkit.store import DATA, datasheet

RULES = ("cs336", "cs336-serial")
GPU = "NVIDIA A100 80GB PCIe"
UPDATE_PASSES = 35
"""Times that the update reads or writes as many bytes as there are gradients: 15 operations on tensors."""
COPY_PASSES = 2
"""Of a copy, and of a division in place: one to read, one to write."""
REGISTERED = (
    *("query", "key", "value", "output"),
    *("up", "down", "gate", "attention_norm", "ff_norm"),
)
"""Layers of a block in the order in which the source registers them."""
CELL = ["batch", "sequence"]
APART = 0.01
"""Measured iterations of two bucket sizes that differ by more are a pair whose order is predicted."""


@cache
def cost() -> Table:
    """What an all-reduce of two GPUs costs."""
    known = cs336.read_all_reduce(EXTERNAL / "cs336" / "all_reduce.csv").query("ranks == 2")
    return Table(known["bytes"].to_numpy(float), known["seconds"].to_numpy(), workers=2)


def passes_s(n_bytes: ArrayLike, passes: float, reached: float = 1.0) -> Floats:
    """Seconds to read or write as many bytes so often, at the share ``reached`` of the datasheet's rate."""
    rate = reached * datasheet(GPU, "memory_bytes_per_s")
    return np.asarray(passes * np.asarray(n_bytes) / rate)


@cache
def messages(sequence: int, bucket_bytes: int) -> Workload:
    """What travels, each message as one tensor in the order in which they leave; computing takes 1 s.

    bucket_bytes : 0 where each gradient travels alone, when it is ready
    """
    options = ImportOptions("cs336_xl", compute_s=1.0, sequence=sequence)
    alone = import_file(DATA / "specs" / "transformers.csv", options=options).profile.workload()
    if not bucket_bytes:
        return alone
    registered = np.array(sorted(range(alone.n), key=lambda i: _place(alone.layer[i])))
    filled = plan.buffer(replace(alone, bytes=alone.bytes[registered]), bucket_bytes)
    buckets = [registered[members] for members in filled.slices]
    leave_s = np.array([alone.ready_s[bucket].max() for bucket in buckets])
    order = np.argsort(leave_s, kind="stable")
    n_bytes = np.array([alone.bytes[bucket].sum() for bucket in buckets])[order]
    gaps_s = np.diff(leave_s[order], prepend=alone.forward_s)
    return Workload.from_arrays(alone.forward_s, gaps_s, n_bytes)


def _place(layer: str) -> tuple[int, int]:
    """Where buckets take it: head and last norm first, then blocks from the last on, words at the end."""
    block, _, kind = layer.partition(".")
    if not kind:
        return (1, 0) if block == "tokens" else (-(10**9), 0)
    return -int(block), -REGISTERED.index(kind)


OURS = {"workbook": (0, 0), "workbook_slowed": (1, 0), "workbook_shared": (1, 1)}
"""Whether a model's slowdown is of computing, and of messages."""
FREE = {"workbook_slowed": 10.0, "workbook_shared": 1.0}
"""Models with a slowdown, and what it is at most."""
MODELS = (*(name for name, one in TRIALS.items() if not one.most and name not in OURS), *OURS)


def iteration(
    name: str,
    sequence: int,
    bucket_bytes: int,
    compute_s: float,
    free: float,
    reached: float = 1.0,
) -> tuple[float, float]:
    """Iteration and wait in seconds by a model, of a forward and backward pass that take ``compute_s`` alone.

    reached : share of the memory's rate, at which copies and the update go
    Models of others leave nothing of copies hidden, and tell no wait (NaN). dag knows no buckets.
    """
    bucketed = bucket_bytes > 0 and name != "dag"
    work = messages(sequence, bucket_bytes if bucketed else 0).scaled(compute_s)
    into_s = passes_s(work.bytes, COPY_PASSES * bucketed, reached)
    out_s = passes_s(work.bytes, COPY_PASSES * (1 + bucketed), reached)
    update_s = float(passes_s(work.bytes.sum(), UPDATE_PASSES, reached))
    work = replace(work, backward_s=work.backward_s + into_s)
    if name not in OURS:
        whole = replace(work, update_s=update_s + float(out_s.sum()))
        return TRIALS[name].iteration_s(whole, plan.none(whole), cost(), free), np.nan
    of_computing, of_messages = (free if share else 0.0 for share in OURS[name])
    link = Link(slowdown=of_computing, message_slowdown=of_messages)
    starts_s, ends_s = link.play(work.ready_s, link.parts(cost(), work.bytes))
    computed_s = float(link.computed_s(work.ready_s[-1:], starts_s, ends_s)[0])
    done_s = float(group_ends(np.maximum(ends_s, computed_s), out_s)[-1])
    return done_s + update_s, done_s - computed_s


def after_backward_s(sequence: int, reached: float = 1.0) -> float:
    """Seconds of every gradient's all-reduce, one after the other, and of the update."""
    alone = messages(sequence, 0)
    update_s = passes_s(alone.bytes.sum(), UPDATE_PASSES, reached)
    return float(cost()(alone.bytes).sum() + update_s)


def computing(
    found: Rows, name: str, free: float, reached: float = 1.0
) -> dict[tuple[int, int], float]:
    """Seconds of forward and backward alone, by batch and sequence.

    Of iterations whose all-reduces come after backward, less those and the update, where the rule has such;
    else those with which the model meets the iteration to calibrate, each configuration's own.
    """
    if len(found.compute):
        beside_s = after_backward_s(int(found.compute["sequence"].iloc[0]), reached)
        return {
            (row.batch, row.sequence): row.iteration_s - beside_s
            for row in found.compute.itertuples()
        }
    return {
        (row.batch, row.sequence): root(
            lambda compute_s, row=row: (
                iteration(name, row.sequence, row.bucket_bytes, compute_s, free, reached)[0]
                - row.iteration_s
            ),
            1e-6,
            row.iteration_s,
            xtol=1e-9,
        )
        for row in found.calibrate.itertuples()
    }


def told(
    found: Rows,
    wanted: pd.DataFrame,
    name: str,
    free: float,
    reached: float = 1.0,
    longer: float = 1.0,
) -> Floats:
    """(wanted rows, 2) iteration and wait by a model, if computing takes so many times ``longer``."""
    alone_s = computing(found, name, free, reached)
    each = [
        iteration(
            name,
            row.sequence,
            row.bucket_bytes,
            longer * alone_s[row.batch, row.sequence],
            free,
            reached,
        )
        for row in wanted.itertuples()
    ]
    return np.array(each)


def free_number(found: Rows, name: str, reached: float = 1.0) -> float:
    """A model's slowdown, which leaves no median signed error of rows to calibrate; NaN if it has none.

    found : with rows to compute: where computing is inverted, every slowdown meets what is shown
    """
    if name not in FREE:
        return np.nan
    shown = found.calibrate
    by_rows = partial(told, found, shown, name)
    return fitted(
        lambda free: by_rows(free, reached)[:, 0], shown["iteration_s"].to_numpy(), FREE[name]
    )


def iterations(found: Rows, name: str, reached: float = 1.0) -> pd.DataFrame:
    """Every row that is tested, by one model; ``free`` is its slowdown.

    The interval is that of the rows to calibrate about the model; NaN where the model meets each of them.
    """
    free = free_number(found, name, reached)
    lower = upper = np.nan
    if len(found.compute):
        shown_s = told(found, found.calibrate, name, free, reached)[:, 0]
        ratio = found.calibrate["iteration_s"] / shown_s
        lower, upper = interval(ratio)
    predicted_s = told(found, found.test, name, free, reached)[:, 0]
    kept = found.test[[*CELL, "bucket_bytes"]]
    said = {"model": name, "measured_s": found.test["iteration_s"], "predicted_s": predicted_s}
    return kept.assign(**said, lower_s=lower * predicted_s, upper_s=upper * predicted_s, free=free)


@cache
def _predictions() -> pd.DataFrame:
    parts = {rule: rows(rule) for rule in RULES}
    each = [
        iterations(found, name).assign(rule=rule)
        for rule, found in parts.items()
        for name in MODELS
        if len(found.compute) or name not in FREE
    ]
    return pd.concat(each, ignore_index=True)


def predictions() -> pd.DataFrame:
    """Of the rules' test rows by every model, as `board.SOURCES` says; with batch, sequence, bucket."""
    return _predictions().copy()


def by_memory_rate(name: str, shares: Sequence[float]) -> pd.DataFrame:
    """What hangs on the memory's rate, which nobody measured: a row per share of the datasheet's.

    Columns reached, free (the model's fitted slowdown), median_error and bias on the tested rows, right (as
    of `pairs`); under the rule that estimates computing.
    """
    found, each = rows("cs336-serial"), []
    for reached in shares:
        said = iterations(found, name, reached).assign(rule="cs336-serial")
        error = said["predicted_s"] / said["measured_s"] - 1
        ordered = pairs(said)["right"].iloc[0]
        each.append((reached, said["free"].iloc[0], error.abs().median(), error.median(), ordered))
    return pd.DataFrame(each, columns=["reached", "free", "median_error", "bias", "right"])


def serial(name: str) -> pd.DataFrame:
    """Iterations whose all-reduces come after backward: measured, and with the computing that is inverted.

    Columns batch, sequence, measured_s, inverted_s: what each would take by the computing that makes a model,
    one without a free number, meet the iteration without buckets. No overlap is in it that could be wrong.
    """
    alone_s = computing(rows("cs336"), name, 0.0)
    known = rows("cs336-serial").compute[[*CELL, "iteration_s"]].reset_index(drop=True)
    inverted_s = [
        alone_s[row.batch, row.sequence] + after_backward_s(row.sequence)
        for row in known.itertuples()
    ]
    return known.rename(columns={"iteration_s": "measured_s"}).assign(inverted_s=inverted_s)


def by_computing(name: str, longer: Sequence[float]) -> pd.DataFrame:
    """Columns longer, right: share of `pairs` ordered right if computing takes so many times the estimate."""
    found = rows("cs336-serial")
    kept = found.test[[*CELL, "bucket_bytes"]].assign(measured_s=found.test["iteration_s"])
    free, each = free_number(found, name), []
    for times in longer:
        said = kept.assign(
            predicted_s=told(found, found.test, name, free, longer=times)[:, 0],
            rule="cs336-serial",
            model=name,
        )
        each.append((times, pairs(said)["right"].iloc[0]))
    return pd.DataFrame(each, columns=["longer", "right"])


def of_all_pairs(right: int, n: int, level: float = 0.95) -> tuple[float, float]:
    """Clopper and Pearson's interval of a share of which ``right`` of n pairs were seen, as if independent.

    Pairs of one configuration share an iteration, so what they say is less than of as many by themselves.
    """
    from scipy.stats import beta

    tail = (1 - level) / 2
    low = float(beta.ppf(tail, right, n - right + 1)) if right else 0.0
    high = float(beta.ppf(1 - tail, right + 1, n - right)) if right < n else 1.0
    return low, high


def _sign(one_s: float, other_s: float) -> int:
    """Which is longer; 0 where only roundings tell them apart."""
    return 0 if np.isclose(one_s, other_s, rtol=1e-9, atol=0) else int(np.sign(one_s - other_s))


def pairs(predicted: pd.DataFrame) -> pd.DataFrame:
    """Pairs of bucket sizes of one configuration that differ, as measured: right is their share ordered so.

    One row per rule and model. The larger iteration is more than `APART` above the smaller; a tie is wrong.
    """
    judged = []
    for (rule, model), mine in predicted.groupby(["rule", "model"], sort=False):
        right = [
            _sign(one.predicted_s, other.predicted_s) == _sign(one.measured_s, other.measured_s)
            for _, cell in mine.groupby(CELL)
            for one, other in combinations(cell.itertuples(), 2)
            if max(one.measured_s, other.measured_s)
            > (1 + APART) * min(one.measured_s, other.measured_s)
        ]
        judged.append((rule, model, len(right), float(np.mean(right)) if right else np.nan))
    return pd.DataFrame(judged, columns=["rule", "model", "pairs", "right"])
