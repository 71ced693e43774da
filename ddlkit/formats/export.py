"""Plans and costs as PyTorch takes them, in text.

Tests let the installed torch read the text that each function writes.
"""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddlkit.core.collective import find_collective
from ddlkit.core.cost import MessageCost
from ddlkit.core.errors import UserError, shown
from ddlkit.core.iteration import Iteration
from ddlkit.core.units import MIB

TESTED = {"ddp": ("2.11", "2.13"), "inductor": ("2.13",), "profile": ("2.13",)}
"""The releases of torch with which each kind of text is known to work."""

_QUARTER_POWERS = 2.0 ** np.arange(6, 32, 1 / 4)
SIZES = np.unique([1, *np.rint(_QUARTER_POWERS)]).astype(int)
"""Sizes of messages whose times are written, in bytes: 1, and 64 to 3.6 billion."""

ELEMENTS = {"Float": 4, "Half": 2, "BFloat16": 2}
"""Bytes of a number of each type, by the name of the type in a profile."""

TEMPLATE = Path(__file__).with_name("estimate.txt")
"""The module that `inductor` fills in."""


def tested_version(kind: str, version: str | None) -> str:
    """Return the version of torch to write for, if its release is known to read the text.

    Parameters
    ----------
    kind : str
        What to write, a key of `TESTED`.
    version : str or None
        The version that the user wants to write for. None or "" means the installed one.

    Returns
    -------
    str
        The version as it is given or installed, such as "2.13.0".

    Raises
    ------
    UserError
        If the release of that version, such as "2.13", is not among those of `TESTED`, or
        if no version is given and torch is not installed.
    """
    if not version:
        try:
            version = metadata.version("torch")
        except metadata.PackageNotFoundError:
            raise UserError(
                "no torch is installed here: say which is meant by --torch"
            ) from None
    # The first two numbers of a version are its release.
    release = ".".join(version.split(".")[:2])
    known_releases = TESTED[kind]
    if release not in known_releases:
        tried = " or ".join(known_releases)
        raise UserError(
            f"torch {shown(version)}: what --to {kind} writes was tried with torch "
            f"{' and '.join(known_releases)} only, and other releases may not read it: train "
            f"with torch {tried}, and name that release if another one is installed here, as "
            f"in --torch {known_releases[0]}"
        )
    return version


def bucket_caps_mb(group_bytes: Any) -> list[float]:
    """Return the sizes of buckets in MiB, as DDP takes them for its bucket_cap_mb_list.

    Parameters
    ----------
    group_bytes : array_like, shape (G,)
        Bytes of each bucket. DDP closes a bucket as soon as it has the size of its cap, so
        that a bucket's own size is the cap that gives this bucket.

    Returns
    -------
    list of float, length G
        The sizes in MiB.

    Examples
    --------
    >>> bucket_caps_mb([1048576, 5])
    [1.0, 4.76837158203125e-06]
    """
    return [size / MIB for size in np.asarray(group_bytes).tolist()]


def ddp(iteration: Iteration, torch: str) -> str:
    """Return the buckets of an iteration as JSON for DistributedDataParallel (DDP).

    A bucket is a group of gradients that DDP sends as one message.

    Parameters
    ----------
    iteration : Iteration
        The iteration, whose messages are all-reduces.
    torch : str
        The version of torch to write for, which the text names.

    Returns
    -------
    str
        JSON with "torch", "planner" and "bucket_cap_mb_list": sizes in MiB in the order
        in which buckets become ready.

    Raises
    ------
    UserError
        If the messages are of another collective, or if gradients have several types.
    """
    collective = iteration.cost.collective
    if collective != "all_reduce":
        raise UserError(
            f"a cost of {collective}: DDP sends all_reduce: fit a cost of all_reduce"
        )
    if iteration.workload.has_several_types:
        raise UserError(
            "gradients of several types: DDP applies bucket_cap_mb_list to each type "
            "anew, so a list cannot describe this plan: set the parameter bucket_cap_mb of "
            "DistributedDataParallel, which is the size of a bucket of any type, instead"
        )
    document = {
        "torch": torch,
        "planner": iteration.plan.planner,
        "bucket_cap_mb_list": bucket_caps_mb(iteration.group_bytes),
    }
    return json.dumps(document)


def _ranks(cost: MessageCost) -> int:
    """Return the number of ranks of a cost, or raise UserError if it is unknown."""
    if cost.workers is None:
        raise UserError(
            "the cost does not say between how many ranks it was measured: give --ranks"
        )
    return cost.workers


def inductor(cost: MessageCost, torch: str) -> str:
    """Return the text of a Python module that estimates how long a collective takes.

    Inductor, the compiler of PyTorch, calls the function of this module.

    Parameters
    ----------
    cost : MessageCost
        The cost of the collective.
    torch : str
        The version of torch to write for, which the text names.

    Returns
    -------
    str
        Python with a function ``estimate(node, override_size)``, which returns
        milliseconds. Its times are those of the cost at `SIZES`, and lie on straight
        lines between them.

    Raises
    ------
    UserError
        If the number of ranks is unknown.
    """
    collective = find_collective(cost.collective)
    # In a graph, node.args[0] is a rank's input and node is its output. The template
    # needs one that has the size of the whole message. In an all-reduce, both have it.
    whole_message = "node.args[0]" if collective.sized == "input" else "node"
    # Six digits are enough, because a fitted cost is less precise.
    times_ms = tuple(float(f"{1e3 * seconds:.6g}") for seconds in cost(SIZES))
    template = TEMPLATE.read_text(encoding="utf-8")
    return template.format(
        collective=collective.name,
        name=collective.graph_name,
        whole=whole_message,
        ranks=_ranks(cost),
        torch=torch,
        sizes=tuple(SIZES.tolist()),
        times_ms=times_ms,
    )


def profile(cost: MessageCost, torch: str) -> str:
    """Return a profile from which Inductor reads how long a collective takes.

    The file is for Inductor's setting profile_guided_estimations_profile_path.

    Parameters
    ----------
    cost : MessageCost
        The cost of the collective.
    torch : str
        The version of torch to write for, which the text names.

    Returns
    -------
    str
        JSON of a Chrome trace, with one kernel for each size of a message and each type of
        its elements.

    Raises
    ------
    UserError
        If the number of ranks is unknown.
    """
    ranks = _ranks(cost)
    collective = find_collective(cost.collective)
    # A rank's input is the whole message (1 part) or one of `ranks` equal parts of it. The
    # same holds for its output.
    input_parts = collective.input_parts(ranks)
    output_parts = collective.output_parts(ranks)
    events = []
    for dtype, element_bytes in ELEMENTS.items():
        elements = _sizes_in_elements(element_bytes, ranks)
        times_s = cost(elements * element_bytes)
        for n_elements, seconds in zip(elements.tolist(), times_s, strict=True):
            args = {
                "Collective name": collective.process_group_name,
                "Group size": ranks,
                "Process Group Ranks": str(list(range(ranks))),
                "In msg nelems": n_elements // input_parts,
                "Out msg nelems": n_elements // output_parts,
                "dtype": dtype,
            }
            # A complete span ("X") of a Chrome trace, whose duration is in microseconds.
            event = {
                "ph": "X",
                "cat": "kernel",
                "name": "nccl",
                "dur": 1e6 * seconds,
                "args": args,
            }
            events.append(event)
    return json.dumps({"torch": torch, "traceEvents": events})


def _sizes_in_elements(element_bytes: int, ranks: int) -> NDArray[np.int64]:
    """Return `SIZES` as numbers of elements that divide into equal parts of the ranks.

    The sizes are rounded down, but to no less than one element for each rank. Sizes that
    become the same number of elements occur once in the result.
    """
    elements_of_rank = np.maximum(SIZES // element_bytes // ranks, 1)
    return np.unique(elements_of_rank) * ranks
