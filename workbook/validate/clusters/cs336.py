"""cs336: iterations of a model as large as GPT-2 XL on two GPUs, by the size of buckets.

Iterations without buckets calibrate the models. By its source
(damek/cs336-assignment2-systems, 749e968) buckets are filled with parameters from the
last registered one on. A bucket is copied together and sent when its last gradient is
ready. After backward each bucket is waited for, divided by the number of ranks and
copied back. Gradients that are sent alone are only divided.

That the GPUs are A100s of 80 GB on PCIe is inferred from three facts: the kernels are
of compute capability 8.0, 51 GB are in use, and all-reduces reach 21 GB/s.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from ddlkit.core import plan
from ddlkit.core.cost import Table
from ddlkit.core.iteration import Iteration, group_ends, no_overlap, perfect_overlap
from ddlkit.core.link import Link
from ddlkit.core.strategies import IterationTimes
from ddlkit.core.units import MIB
from ddlkit.core.workload import Floats, Ints, Workload
from ddlkit.formats import ImportOptions, import_file
from workbook.common.places import DATA
from workbook.common.specs import datasheet
from workbook.dag.equations import wait_free_iteration_s
from workbook.osf.equations import predict_osf
from workbook.validate import clusters
from workbook.validate.clusters import EXTERNAL, Rows, table

RULES = ("cs336", "cs336-serial")
"""The rules of data/external/rules.yml, by both of which iterations with buckets are predicted.

By both, iterations without buckets calibrate. The second also has iterations whose all-reduces all
follow backward, which show compute alone."""
UPDATE_PASSES = 35
"""How many times the update reads or writes as many bytes as there are gradients.

The update is an AdamW of 15 operations."""
COPY_PASSES = 2
"""The same for a copy, and for a division in place: one read and one write."""
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
"""The layers of a block, in the order in which the source registers them."""
CONFIGURATION = ["batch", "sequence", "bucket_bytes"]


# -- models --------------------------------------------------------------------------


def _no_overlap_s(iteration: Iteration) -> float:
    return no_overlap(iteration).iteration_s


def _perfect_overlap_s(iteration: Iteration) -> float:
    return perfect_overlap(iteration).iteration_s


def _osf_repaired_s(iteration: Iteration) -> float:
    return predict_osf(iteration, literal=False).iteration_s


def _dag_s(iteration: Iteration) -> float:
    times = IterationTimes.of_workload(iteration.workload, iteration.cost)
    # dag Eq 4 leaves out the update.
    return iteration.workload.update_s + wait_free_iteration_s(times)


OTHERS: dict[str, Callable[[Iteration], float]] = {
    "compute_only": lambda iteration: iteration.workload.compute_s,
    "no_overlap": _no_overlap_s,
    "perfect_overlap": _perfect_overlap_s,
    "osf_repaired": _osf_repaired_s,
    "dag": _dag_s,
}
"""The models of others. Each returns the seconds of an iteration."""


class _Slows(NamedTuple):
    """Whether compute and messages are slowed by the other in one of our models.

    How much is the slowdown, the only free number of a model.
    """

    compute: bool
    messages: bool


OURS = {
    "workbook": _Slows(compute=False, messages=False),
    "workbook_slowed": _Slows(compute=True, messages=False),
    "workbook_shared": _Slows(compute=True, messages=True),
}
"""Our models."""
MODELS = {
    **dict.fromkeys((*OTHERS, *OURS), 0.0),
    "workbook_slowed": 10.0,
    "workbook_shared": 1.0,
}
"""All models with the largest slowdown that is looked for, or 0 for a model without one."""


# -- what is known of the machine and of the network ---------------------------------


@cache
def cost() -> Table:
    """Return the measured time of an all-reduce of two GPUs, by its size."""
    timed = table(EXTERNAL / "cs336" / "all_reduce.csv").query("ranks == 2")
    # A MB of the source has 1024^2 bytes.
    sizes = MIB * timed["mb"].to_numpy(float)
    return Table(sizes, timed["seconds"].to_numpy(), workers=2)


_datasheet = cache(datasheet)


def passes_s(n_bytes: ArrayLike, passes: float) -> Floats:
    """Return the seconds to read or write some bytes ``passes`` times.

    The result has the shape of ``n_bytes``.
    """
    # The peak rate of the GPU's memory.
    bytes_per_s = _datasheet("NVIDIA A100 80GB PCIe", "memory_bytes_per_s")
    return np.asarray(passes * np.asarray(n_bytes) / bytes_per_s)


@cache
def messages(sequence: int, bucket_bytes: int) -> Workload:
    """Return the messages of the model in the order in which they are sent.

    Parameters
    ----------
    sequence : int
        The length of a sequence in tokens.
    bucket_bytes : int
        The size of buckets, or 0 for messages of single gradients.

    Returns
    -------
    Workload
        One tensor for each message, with the bytes of the message. A message is a bucket or
        a single gradient. The forward and the backward pass together take 1 s, which
        `iteration_s` scales.
    """
    options = ImportOptions(network="cs336_xl", compute_s=1.0, sequence=sequence)
    imported = import_file(DATA / "specs" / "transformers.csv", options=options)
    gradients = imported.profile.workload()
    if not bucket_bytes:
        return gradients
    buckets = _buckets(gradients, bucket_bytes)
    # A bucket is sent when its last gradient is ready. The buckets may be ready in another
    # order than that in which they are filled.
    sent_s = np.array([gradients.ready_s[bucket].max() for bucket in buckets])
    n_bytes = np.array([gradients.bytes[bucket].sum() for bucket in buckets])
    order = np.argsort(sent_s, kind="stable")
    # A workload has the time of backward between each tensor and the one before it. The first
    # gap begins with the end of forward.
    gaps_s = np.diff(sent_s[order], prepend=gradients.forward_s)
    return Workload.from_arrays(gradients.forward_s, gaps_s, n_bytes[order])


def _buckets(gradients: Workload, bucket_bytes: int) -> list[Ints]:
    """Return the gradients of each bucket, by their positions in ``gradients``.

    The ``gradients`` are in the order of backward. Buckets of ``bucket_bytes`` are filled in
    another order, with the parameters from the last registered one on.
    """
    from_last_registered = sorted(
        range(gradients.n),
        key=lambda position: _order_in_buckets(gradients.layer[position]),
    )
    in_buckets = np.array(from_last_registered)
    # `plan.buffer` takes gradients in the order of a workload, of which it needs only the sizes.
    sizes_in_buckets = replace(gradients, bytes=gradients.bytes[in_buckets])
    filled = plan.buffer(sizes_in_buckets, bucket_bytes)
    return [in_buckets[members] for members in filled.slices]


def _order_in_buckets(layer: str) -> tuple[int, int]:
    """Return a key that sorts layers in the order in which they fill buckets.

    The order is the reverse of that in which the source registers layers. First are the head
    and the last norm, then the blocks from the last to the first, and then the embedding of
    tokens. The name of a layer in a block is the number of the block and the kind, such as
    "3.query".
    """
    # Of a layer outside the blocks, the whole name is in ``block``, and ``kind`` is empty.
    block, _, kind = layer.partition(".")
    if kind:
        return -int(block), -REGISTERED.index(kind)
    # The keys of blocks begin with 0 or a negative number. So the embedding with 1 comes after
    # all blocks, and the head and the last norm with a very low number before them.
    if block == "tokens":
        return 1, 0
    # The head and the last norm have the same key. Sorting leaves them in the order of backward.
    return -(10**9), 0


# -- iterations ----------------------------------------------------------------------


def iteration_s(
    name: str,
    sequence: int,
    bucket_bytes: int,
    compute_s: float,
    slowdown: float = 0.0,
) -> float:
    """Return the predicted seconds of an iteration.

    In our models, buckets that have arrived are copied back while others are on their way.
    In the models of others, all copying back follows backward and communication, as a
    part of the update. "dag" always sends single gradients, because its equations know
    no buckets. Copies, divisions and the update take the time of their passes over the
    memory: each pass reads or writes all bytes once.

    Parameters
    ----------
    name : str
        One of MODELS.
    sequence : int
        The length of a sequence in tokens.
    bucket_bytes : int
        The size of buckets, or 0 without buckets.
    compute_s : float
        The seconds of forward and backward alone.
    slowdown : float, optional
        How much longer compute takes while a message is under way, and a message while
        compute goes on, each relative to its time alone: 0.1 is a tenth longer. `OURS`
        says which of the two a model counts. The models of others ignore the slowdown.
    """
    if name == "dag":
        bucket_bytes = 0
    workload = messages(sequence, bucket_bytes).scaled(compute_s)
    # A gradient that is sent alone is divided by the number of ranks in place. The division
    # reads and writes each byte once, as a copy does, and so takes COPY_PASSES. With buckets,
    # gradients are also copied in before they are sent, and copied out after the division.
    if bucket_bytes:
        passes_before = COPY_PASSES
        passes_after = 2 * COPY_PASSES
    else:
        passes_before = 0
        passes_after = COPY_PASSES
    copy_in_s = passes_s(workload.bytes, passes_before)
    divide_and_copy_s = passes_s(workload.bytes, passes_after)
    update_s = float(passes_s(workload.bytes.sum(), UPDATE_PASSES))
    workload = replace(workload, backward_s=workload.backward_s + copy_in_s)
    if name in OTHERS:
        after_backward_s = update_s + float(divide_and_copy_s.sum())
        whole = replace(workload, update_s=after_backward_s)
        # Each tensor of the workload is a message already, so that the plan fuses none.
        return OTHERS[name](Iteration(whole, plan.none(whole), cost()))

    slows = OURS[name]
    link = Link(
        slowdown=slowdown if slows.compute else 0.0,
        message_slowdown=slowdown if slows.messages else 0.0,
    )
    return _last_copied_s(workload, link, divide_and_copy_s) + update_s


def _last_copied_s(workload: Workload, link: Link, divide_and_copy_s: Floats) -> float:
    """Return when the last message has been divided by the number of ranks and copied back.

    The result is in seconds from the start of the iteration. A message is copied back from its
    bucket to the gradients. A gradient that was sent alone is only divided.

    Parameters
    ----------
    workload : Workload
        The messages in the order in which they are sent.
    link : Link
        How much compute and messages slow each other down.
    divide_and_copy_s : ndarray
        The seconds to divide and copy back each message.
    """
    # The time that the all-reduce of each message takes by the measured table, in two parts: the
    # time of the processor and that of the link.
    message_parts = link.parts(cost(), workload.bytes)
    # When each message starts and ends. Messages follow one another.
    starts_s, ends_s = link.play(workload.ready_s, message_parts)
    # When the gradients of each message have been computed, if messages slow compute down.
    # Backward ends with the last ones.
    computed_s = link.computed_s(workload.ready_s, starts_s, ends_s)
    backward_end_s = computed_s[-1]
    # Messages are divided and copied back one after another, each once backward and the
    # message itself have ended.
    arrived_s = np.maximum(ends_s, backward_end_s)
    copied_s = group_ends(arrived_s, divide_and_copy_s)
    return float(copied_s[-1])


def compute_times(
    parts: Rows, name: str, slowdown: float
) -> dict[tuple[int, int], float]:
    """Return the seconds of forward and backward alone, by batch and sequence.

    A rule of data/external/rules.yml says what measured iterations serve for. Some rules have
    iterations in which no all-reduce overlaps with compute, because all of them follow backward.
    Under these rules, compute is such an iteration less its all-reduces and its update. Under
    other rules, compute is fitted so that the model predicts the iterations that calibrate.

    Parameters
    ----------
    parts : Rows
        The rows of a rule. Its part ``compute`` has the iterations without overlap. They
        have each batch and sequence once, and so do those that calibrate.
    name : str
        The model with which compute is fitted.
    slowdown : float
        The slowdown of the model, as `iteration_s` takes it.
    """
    compute_s = {}
    for row in parts.compute.itertuples():
        # These iterations send single gradients.
        n_bytes = messages(row.sequence, bucket_bytes=0).bytes
        all_reduces_s = cost()(n_bytes).sum()
        update_s = passes_s(n_bytes.sum(), UPDATE_PASSES)
        after_s = float(all_reduces_s + update_s)
        compute_s[row.batch, row.sequence] = row.iteration_s - after_s
    if not parts.compute.empty:
        return compute_s
    for row in parts.calibrate.itertuples():
        # The predicted iteration as a function of its compute.
        predict_s = partial(
            iteration_s, name, row.sequence, row.bucket_bytes, slowdown=slowdown
        )
        # Compute takes at most the whole iteration, and more than no time at all.
        compute_s[row.batch, row.sequence] = clusters.fitted(
            predict_s, row.iteration_s, most=row.iteration_s, least=1e-6
        )
    return compute_s


def predicted_s(
    parts: Rows, target: pd.DataFrame, name: str, slowdown: float
) -> Floats:
    """Return the predicted iterations of n target rows in seconds, shape (n,).

    Parameters
    ----------
    parts : Rows
        The rows of a rule of data/external/rules.yml, of which some calibrate the model.
    target : DataFrame
        The rows to predict.
    name : str
        The model.
    slowdown : float
        The slowdown of the model, as `iteration_s` takes it. Models without one ignore it.
    """
    # If the rule has no rows of compute alone, compute is fitted so that this model with this
    # slowdown predicts the rows that calibrate.
    compute_s = compute_times(parts, name, slowdown)
    iterations_s = []
    for row in target[CONFIGURATION].itertuples(index=False):
        alone_s = compute_s[row.batch, row.sequence]
        iterations_s.append(
            iteration_s(name, row.sequence, row.bucket_bytes, alone_s, slowdown)
        )
    return np.array(iterations_s)


def predictions() -> pd.DataFrame:
    """Return the iterations with buckets, as predicted by every model and both of RULES.

    Both rules calibrate models on iterations without buckets and test them on those with
    buckets. They differ in how compute is found: from the iterations without buckets, or from
    further ones whose all-reduces all follow backward.

    Returns
    -------
    DataFrame
        The columns CONFIGURATION, and then those of `workbook.validate.clusters.predictions`.
    """
    return clusters.predictions(RULES, MODELS, predicted_s, CONFIGURATION)
