"""cs336: iterations of a GPT-2 XL sized model on two GPUs by bucket size, from those without buckets.

By its programs' source (damek/cs336-assignment2-systems, 749e968) buckets are filled with parameters from
the last registered one on, and closed before they would exceed their size; one leaves when the last of its
gradients is ready, copied together before. After backward each is waited for, divided by the ranks and
copied back; gradients that travel alone are only divided. The update is an AdamW of separate operations.
That the GPUs are A100s of 80 GB on PCIe is inferred: kernels of compute capability 8.0, 51 GB in use,
products of two tensors at 1.7 TB/s, all-reduces at 21 GB/s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import combinations

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
from ddlkit.report import clusters
from ddlkit.report.clusters import EXTERNAL, Rows, inverted_s, rows, table
from ddlkit.store import DATA, datasheet

RULES = ("cs336", "cs336-serial")
UPDATE_PASSES = 35
"""Times that the update reads or writes as many bytes as there are gradients: 15 operations on tensors."""
COPY_PASSES = 2
"""Of a copy, and of a division in place: one to read, one to write."""
REGISTERED = ["query", "key", "value", "output", "up", "down", "gate"] + [
    "attention_norm",
    "ff_norm",
]
"""Layers of a block in the order in which the source registers them."""
CONFIGURATION = ["batch", "sequence"]
APART = 0.01
"""Measured iterations of two bucket sizes that differ by more are a pair whose order is predicted."""
OTHERS: dict[str, Callable[[Iteration], float]] = {
    "compute_only": lambda whole: whole.workload.compute_s,
    "no_overlap": lambda whole: no_overlap(whole).iteration_s,
    "perfect_overlap": lambda whole: perfect_overlap(whole).iteration_s,
    "osf_repaired": lambda whole: predict_osf(whole, literal=False).iteration_s,
    "dag": lambda whole: (
        whole.workload.update_s  # which Eq 4 leaves out
        + wait_free_iteration_s(IterationTimes.of_workload(whole.workload, whole.cost))
    ),
}
"""Models of others: an iteration in seconds."""
OURS = {"workbook": (0, 0), "workbook_slowed": (1, 0), "workbook_shared": (1, 1)}
"""Whether a model's slowdown is of compute, and of messages."""
MODELS = dict.fromkeys((*OTHERS, *OURS), 0.0) | {"workbook_slowed": 10.0, "workbook_shared": 1.0}
"""All models, and what the slowdown of those that have one is at most."""


@cache
def cost() -> Table:
    """Return what an all-reduce of two GPUs costs; the source's MB are 1024^2 bytes."""
    timed = table(EXTERNAL / "cs336" / "all_reduce.csv").query("ranks == 2")
    return Table(MIB * timed["mb"].to_numpy(float), timed["seconds"].to_numpy(), workers=2)


def passes_s(n_bytes: ArrayLike, passes: float) -> Floats:
    """Return seconds to read or write as many bytes so often, at the datasheet's rate of memory."""
    return np.asarray(passes * np.asarray(n_bytes) / _memory_bytes_per_s())


@cache
def _memory_bytes_per_s() -> float:
    return datasheet("NVIDIA A100 80GB PCIe", "memory_bytes_per_s")


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


def iteration_s(
    name: str, sequence: int, bucket_bytes: int, compute_s: float, free: float = 0.0
) -> float:
    """Return an iteration in seconds by a model, if forward and backward take ``compute_s`` alone.

    Models of others leave nothing of copies hidden. dag knows no buckets.
    """
    bucketed = bucket_bytes > 0 and name != "dag"
    work = messages(sequence, bucket_bytes if bucketed else 0).scaled(compute_s)
    into_s = passes_s(work.bytes, COPY_PASSES * bucketed)
    out_s = passes_s(work.bytes, COPY_PASSES * (1 + bucketed))
    update_s = float(passes_s(work.bytes.sum(), UPDATE_PASSES))
    work = replace(work, backward_s=work.backward_s + into_s)
    if name in OTHERS:
        whole = replace(work, update_s=update_s + float(out_s.sum()))
        return OTHERS[name](Iteration(whole, plan.none(whole), cost()))
    of_compute, of_messages = (free if share else 0.0 for share in OURS[name])
    link = Link(slowdown=of_compute, message_slowdown=of_messages)
    starts_s, ends_s = link.play(work.ready_s, link.parts(cost(), work.bytes))
    computed_s = float(link.computed_s(work.ready_s[-1:], starts_s, ends_s)[0])
    return float(group_ends(np.maximum(ends_s, computed_s), out_s)[-1]) + update_s


def after_backward_s(sequence: int) -> float:
    """Return seconds of every gradient's all-reduce, one after the other, and of the update."""
    alone = messages(sequence, 0)
    return float(cost()(alone.bytes).sum() + passes_s(alone.bytes.sum(), UPDATE_PASSES))


def computing(parts: Rows, name: str, free: float) -> dict[tuple[int, int], float]:
    """Return seconds of forward and backward alone, by batch and sequence.

    Of iterations whose all-reduces come after backward, less those and the update, where the rule has such;
    else inverted: with which the model meets the iteration to calibrate, each configuration's own.
    """
    if len(parts.compute):
        return {
            (row.batch, row.sequence): row.iteration_s - after_backward_s(row.sequence)
            for row in parts.compute.itertuples()
        }
    inverted = {}
    for row in parts.calibrate.itertuples():
        model = partial(iteration_s, name, row.sequence, row.bucket_bytes, free=free)
        inverted[row.batch, row.sequence] = inverted_s(model, row.iteration_s)
    return inverted


def predicted_s(parts: Rows, target: pd.DataFrame, name: str, free: float) -> Floats:
    """Return (target rows,) iterations by a model."""
    alone_s = computing(parts, name, free)
    at = target[[*CONFIGURATION, "bucket_bytes"]].itertuples(index=False)
    return np.array([iteration_s(name, t, b, alone_s[n, t], free) for n, t, b in at])


def predictions() -> pd.DataFrame:
    """Return the rules' test rows by every model, with batch, sequence, bucket_bytes and ``free``."""
    return clusters.predictions(RULES, MODELS, predicted_s, [*CONFIGURATION, "bucket_bytes"])


def serial(name: str) -> pd.DataFrame:
    """Return measured_s and inverted_s of iterations whose all-reduces come after backward.

    inverted_s : by the compute that makes a model, one without a free number, meet the iteration without
    buckets. No overlap is in it that could be wrong.
    """
    alone_s, measured = computing(rows("cs336"), name, 0.0), rows("cs336-serial").compute
    inverted = [
        alone_s[row.batch, row.sequence] + after_backward_s(row.sequence)
        for row in measured.itertuples()
    ]
    return pd.DataFrame({"measured_s": measured["iteration_s"].to_numpy(), "inverted_s": inverted})


def pairs(predicted: pd.DataFrame) -> pd.DataFrame:
    """Return, by rule and model, how many pairs of bucket sizes there are, and the share ordered right.

    A pair is of one configuration and measured more than `APART` apart; a tie, but for roundings, is wrong.
    """
    judged = []
    for (rule, model), mine in predicted.groupby(["rule", "model"], sort=False):
        right = []
        for _, sizes in mine.groupby(CONFIGURATION):
            for low, high in combinations(sizes.sort_values("measured_s").itertuples(), 2):
                if high.measured_s > (1 + APART) * low.measured_s:
                    right.append(high.predicted_s > (1 + 1e-9) * low.predicted_s)
        judged.append((rule, model, len(right), float(np.mean(right)) if right else np.nan))
    return pd.DataFrame(judged, columns=["rule", "model", "pairs", "right"])
