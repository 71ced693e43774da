"""cs336: iterations of a GPT-2 XL sized model on two GPUs by bucket size, from those without buckets.

By its programs' source (damek/cs336-assignment2-systems, 749e968) buckets are filled with parameters from
the last registered one on, and closed before they would exceed their size; one leaves when the last of its
gradients is ready, copied together before. After backward each is waited for, divided by the ranks and
copied back; gradients that travel alone are only divided. The update is an AdamW of separate operations.
That the GPUs are A100s of 80 GB on PCIe is inferred: kernels of compute capability 8.0, 51 GB in use,
products of two tensors at 1.7 TB/s, all-reduces at 21 GB/s.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from itertools import combinations, product

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from ddlkit.core import plan
from ddlkit.core.cost import Table
from ddlkit.core.iteration import Iteration, group_ends, no_overlap, perfect_overlap
from ddlkit.core.link import Link
from ddlkit.core.units import MIB
from ddlkit.core.workload import Floats, Workload
from ddlkit.formats import ImportOptions, import_file
from ddlkit.papers.dag import IterationTimes, wait_free_iteration_s
from ddlkit.papers.osf import predict_osf
from ddlkit.report.clusters import EXTERNAL, Rows, fitted, inverted_s, rows, table
from ddlkit.store import DATA, datasheet

RULES = ("cs336", "cs336-serial")
UPDATE_PASSES = 35
"""Times that the update reads or writes as many bytes as there are gradients: 15 operations on tensors."""
COPY_PASSES = 2
"""Of a copy, and of a division in place: one to read, one to write."""
REGISTERED = (
    *("query", "key", "value", "output"),
    *("up", "down", "gate", "attention_norm", "ff_norm"),
)
"""Layers of a block in the order in which the source registers them."""
CONFIGURATION = ["batch", "sequence"]
APART = 0.01
"""Measured iterations of two bucket sizes that differ by more are a pair whose order is predicted."""
OTHERS = ("compute_only", "no_overlap", "perfect_overlap", "osf_repaired", "dag")
OURS = {"workbook": (0, 0), "workbook_slowed": (1, 0), "workbook_shared": (1, 1)}
"""Whether a model's slowdown is of compute, and of messages."""
FREE = {"workbook_slowed": 10.0, "workbook_shared": 1.0}
"""Models with a slowdown, and what it is at most."""


@cache
def cost() -> Table:
    """Return what an all-reduce of two GPUs costs; the source's MB are 1024^2 bytes."""
    known = table(EXTERNAL / "cs336" / "all_reduce.csv").query("ranks == 2")
    return Table(MIB * known["mb"].to_numpy(float), known["seconds"].to_numpy(), workers=2)


def passes_s(n_bytes: ArrayLike, passes: float) -> Floats:
    """Return seconds to read or write as many bytes so often, at the datasheet's rate of memory."""
    rate = datasheet("NVIDIA A100 80GB PCIe", "memory_bytes_per_s")
    return np.asarray(passes * np.asarray(n_bytes) / rate)


@cache
def messages(sequence: int, bucket_bytes: int) -> Workload:
    """Return what travels, each message a tensor in the order in which they leave; compute takes 1 s.

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


def iteration(
    name: str, sequence: int, bucket_bytes: int, compute_s: float, free: float
) -> tuple[float, float]:
    """Return iteration and wait in seconds by a model, if forward and backward take ``compute_s`` alone.

    Models of others leave nothing of copies hidden, and tell no wait (NaN). dag knows no buckets.
    """
    bucketed = bucket_bytes > 0 and name != "dag"
    work = messages(sequence, bucket_bytes if bucketed else 0).scaled(compute_s)
    into_s = passes_s(work.bytes, COPY_PASSES * bucketed)
    out_s = passes_s(work.bytes, COPY_PASSES * (1 + bucketed))
    update_s = float(passes_s(work.bytes.sum(), UPDATE_PASSES))
    work = replace(work, backward_s=work.backward_s + into_s)
    if name not in OURS:
        whole = replace(work, update_s=update_s + float(out_s.sum()))
        return _of_others(name, Iteration(whole, plan.none(whole), cost())), np.nan
    of_compute, of_messages = (free if share else 0.0 for share in OURS[name])
    link = Link(slowdown=of_compute, message_slowdown=of_messages)
    starts_s, ends_s = link.play(work.ready_s, link.parts(cost(), work.bytes))
    computed_s = float(link.computed_s(work.ready_s[-1:], starts_s, ends_s)[0])
    done_s = float(group_ends(np.maximum(ends_s, computed_s), out_s)[-1])
    return done_s + update_s, done_s - computed_s


def _of_others(name: str, whole: Iteration) -> float:
    """The iteration in seconds; dag's is Eq 4, with the update that it leaves out."""
    work = whole.workload
    match name:
        case "compute_only":
            return work.compute_s
        case "no_overlap":
            return no_overlap(whole).iteration_s
        case "perfect_overlap":
            return perfect_overlap(whole).iteration_s
        case "osf_repaired":
            return predict_osf(whole, literal=False).iteration_s
    return wait_free_iteration_s(IterationTimes.of_workload(work, whole.cost)) + work.update_s


def after_backward_s(sequence: int) -> float:
    """Return seconds of every gradient's all-reduce, one after the other, and of the update."""
    alone = messages(sequence, 0)
    return float(cost()(alone.bytes).sum() + passes_s(alone.bytes.sum(), UPDATE_PASSES))


def computing(known: Rows, name: str, free: float) -> dict[tuple[int, int], float]:
    """Return seconds of forward and backward alone, by batch and sequence.

    Of iterations whose all-reduces come after backward, less those and the update, where the rule has such;
    else inverted: with which the model meets the iteration to calibrate, each configuration's own.
    """
    if len(known.compute):
        return {
            (row.batch, row.sequence): row.iteration_s - after_backward_s(row.sequence)
            for row in known.compute.itertuples()
        }
    inverted = {}
    for row in known.calibrate.itertuples():
        model = partial(_with_compute, name, row.sequence, row.bucket_bytes, free)
        inverted[row.batch, row.sequence] = inverted_s(model, row.iteration_s)
    return inverted


def _with_compute(
    name: str, sequence: int, bucket_bytes: int, free: float, compute_s: float
) -> float:
    return iteration(name, sequence, bucket_bytes, compute_s, free)[0]


def predicted_s(known: Rows, target: pd.DataFrame, name: str, free: float) -> Floats:
    """Return (target rows,) iterations by a model."""
    alone_s = computing(known, name, free)
    at = zip(target["batch"], target["sequence"], target["bucket_bytes"], strict=True)
    return np.array([iteration(name, t, b, alone_s[n, t], free)[0] for n, t, b in at])


def predictions() -> pd.DataFrame:
    """Return the rules' test rows by every model, with batch, sequence, bucket_bytes and ``free``.

    A slowdown is fitted where compute is known: where it is inverted, every slowdown meets what is shown.
    """
    each = []
    for rule, name in product(RULES, (*OTHERS, *OURS)):
        known, free = rows(rule), np.nan
        if name in FREE:
            if known.compute.empty:
                continue
            by_free = partial(predicted_s, known, known.calibrate, name)
            free = fitted(by_free, known.calibrate["iteration_s"].to_numpy(), FREE[name])
        kept = known.test[[*CONFIGURATION, "bucket_bytes"]]
        times = {"measured_s": known.test["iteration_s"]}
        times |= {"predicted_s": predicted_s(known, known.test, name, free)}
        each.append(kept.assign(model=name, **times, free=free, rule=rule))
    return pd.concat(each, ignore_index=True)


def serial(name: str) -> pd.DataFrame:
    """Return measured_s and inverted_s of iterations whose all-reduces come after backward.

    inverted_s : by the compute that makes a model, one without a free number, meet the iteration without
    buckets. No overlap is in it that could be wrong.
    """
    alone_s = computing(rows("cs336"), name, 0.0)
    known = rows("cs336-serial").compute.reset_index(drop=True)
    inverted_s = [
        alone_s[row.batch, row.sequence] + after_backward_s(row.sequence)
        for row in known.itertuples()
    ]
    return pd.DataFrame({"measured_s": known["iteration_s"], "inverted_s": inverted_s})


def pairs(predicted: pd.DataFrame) -> pd.DataFrame:
    """Return, by rule and model, how many pairs of bucket sizes there are, and the share ordered right.

    A pair is of one configuration and measured more than `APART` apart; a tie, but for roundings, is wrong.
    """
    judged = []
    for (rule, model), mine in predicted.groupby(["rule", "model"], sort=False):
        right = []
        for _, sizes in mine.groupby(CONFIGURATION):
            for one, other in combinations(sizes.sort_values("measured_s").itertuples(), 2):
                if other.measured_s > (1 + APART) * one.measured_s:
                    right.append(other.predicted_s > (1 + 1e-9) * one.predicted_s)
        judged.append((rule, model, len(right), float(np.mean(right)) if right else np.nan))
    return pd.DataFrame(judged, columns=["rule", "model", "pairs", "right"])
