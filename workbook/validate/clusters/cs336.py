"""cs336: iterations of a GPT-2 XL sized model on two GPUs by bucket size, from those without buckets.

By its source (damek/cs336-assignment2-systems, 749e968) buckets take parameters from the last registered one
on, and leave, copied together, when the last gradient is ready. After backward each is waited for, divided
by the ranks and copied back; gradients that travel alone are only divided. That the GPUs are A100s of 80 GB
on PCIe is inferred: kernels of compute capability 8.0, 51 GB in use, all-reduces at 21 GB/s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from ddlkit.core import plan
from ddlkit.core.cost import Table
from ddlkit.core.iteration import Iteration, group_ends, no_overlap, perfect_overlap
from ddlkit.core.link import Link
from ddlkit.core.strategies import IterationTimes
from ddlkit.core.units import MIB
from ddlkit.core.workload import Floats, Workload
from ddlkit.formats import ImportOptions, import_file
from workbook.common.places import DATA
from workbook.common.specs import datasheet
from workbook.dag.equations import wait_free_iteration_s
from workbook.osf.equations import predict_osf
from workbook.validate import clusters
from workbook.validate.clusters import EXTERNAL, Rows, table

RULES = ("cs336", "cs336-serial")
UPDATE_PASSES = 35
"""Times that the update, an AdamW of 15 operations, reads or writes as many bytes as there are gradients."""
COPY_PASSES = 2  # of a copy, and of a division in place: one to read, one to write
REGISTERED = [
    "query",
    "key",
    "value",
    "output",
    "up",
    "down",
    "gate",
    "attention_norm",
    "ff_norm",
]
"""Layers of a block, in the order in which the source registers them."""
CONFIGURATION = ["batch", "sequence", "bucket_bytes"]
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
MODELS = dict.fromkeys((*OTHERS, *OURS), 0.0) | {
    "workbook_slowed": 10.0,
    "workbook_shared": 1.0,
}
"""All models, and what the slowdown of those that have one is at most."""


@cache
def cost() -> Table:
    """Return what an all-reduce of two GPUs costs; the source's MB are 1024^2 bytes."""
    timed = table(EXTERNAL / "cs336" / "all_reduce.csv").query("ranks == 2")
    return Table(
        MIB * timed["mb"].to_numpy(float), timed["seconds"].to_numpy(), workers=2
    )


_datasheet = cache(datasheet)


def passes_s(n_bytes: ArrayLike, passes: float) -> Floats:
    """Return seconds to read or write as many bytes so often, at the datasheet's rate of memory."""
    rate = _datasheet("NVIDIA A100 80GB PCIe", "memory_bytes_per_s")
    return np.asarray(passes * np.asarray(n_bytes) / rate)


@cache
def messages(sequence: int, bucket_bytes: int) -> Workload:
    """Return messages as tensors in the order in which they leave, of 1 s of compute; 0: no buckets."""
    options = ImportOptions("cs336_xl", compute_s=1.0, sequence=sequence)
    alone = import_file(
        DATA / "specs" / "transformers.csv", options=options
    ).profile.workload()
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
    """Return a layer's place in buckets: head and last norm, then blocks from the last on, then words."""
    block, _, kind = layer.partition(".")
    if not kind:
        return (1, 0) if block == "tokens" else (-(10**9), 0)
    return -int(block), -REGISTERED.index(kind)


def iteration_s(
    name: str, sequence: int, bucket_bytes: int, compute_s: float, free: float = 0.0
) -> float:
    """Return an iteration by a model; others' hide no copy after backward, and dag knows no buckets."""
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


def compute_times(parts: Rows, name: str, free: float) -> dict[tuple[int, int], float]:
    """Return seconds of forward and backward alone, by batch and sequence.

    Where the rule has iterations whose all-reduces come after backward, those less all-reduces and update;
    else inverted: with which the model meets the iteration to calibrate.
    """
    alone_s = {}
    for row in parts.compute.itertuples():
        sent = messages(row.sequence, 0).bytes
        after_s = float(cost()(sent).sum() + passes_s(sent.sum(), UPDATE_PASSES))
        alone_s[row.batch, row.sequence] = row.iteration_s - after_s
    for row in parts.calibrate.itertuples() if parts.compute.empty else ():
        model = partial(iteration_s, name, row.sequence, row.bucket_bytes, free=free)
        alone_s[row.batch, row.sequence] = clusters.fitted(
            model, row.iteration_s, row.iteration_s, least=1e-6
        )
    return alone_s


def predicted_s(parts: Rows, target: pd.DataFrame, name: str, free: float) -> Floats:
    """Return (target rows,) iterations by a model."""
    alone_s = compute_times(parts, name, free)
    at = target[CONFIGURATION].itertuples(index=False)
    return np.array([iteration_s(name, t, b, alone_s[n, t], free) for n, t, b in at])


def predictions() -> pd.DataFrame:
    """Return the rules' test rows by every model, with batch, sequence, bucket_bytes and ``free``."""
    return clusters.predictions(RULES, MODELS, predicted_s, CONFIGURATION)
