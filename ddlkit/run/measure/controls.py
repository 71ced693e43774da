"""By what communication's resources can be controlled here, and whether it takes effect (sharing Fig 1).

The paper gave NCCL a call of its own. Since then there are variables of the environment, for all that a
process sends, and the options of a communicator; on processors the threads of gloo. What takes effect on a
GPU is read from the kernels that a profiler saw.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist

from ddlkit.core.units import MIB
from ddlkit.run.instruments.clock import chrome_trace
from ddlkit.run.jobs.job import Tables, job
from ddlkit.run.jobs.rank import Rank
from ddlkit.run.measure.channels import kernel_shape
from ddlkit.run.measure.shares import Configuration, nccl_group

OFFERED, ABSENT = "offered", "absent"
HEEDED, IGNORED, UNSEEN = "took effect", "ignored", "no kernel seen"
SIZE = 16 * MIB  # small messages get fewer blocks than they may have
# Variables that NCCL reads, and since which version.
_VARIABLES = {
    "NCCL_NTHREADS": (2, 0),
    "NCCL_ALGO": (2, 0),
    "NCCL_PROTO": (2, 0),
    "NCCL_MIN_CTAS": (2, 17),
    "NCCL_MAX_CTAS": (2, 17),
    "NCCL_LAUNCH_ORDER_IMPLICIT": (2, 26),
}
_OPTIONS = ("min_ctas", "max_ctas", "cga_cluster_size")


def offered() -> pd.DataFrame:
    """Return table ``controls``: what this installation offers, level by level, and why not the rest."""
    gloo = getattr(getattr(dist, "ProcessGroupGloo", None), "_Options", None)
    no_gloo = "" if gloo else f"torch {torch.__version__} has no gloo, or hides its options"
    low, high = partial(os.setpriority, os.PRIO_PROCESS), os.sched_param(1)
    rows = [
        *(("environment", name, _lacks_nccl(since)) for name, since in _VARIABLES.items()),
        *(("communicator", name, _lacks_option(name)) for name in _OPTIONS),
        ("call", "nccl4py NCCLCollConfig", "torch does not pass it on, and nothing here needs it"),
        ("thread", "gloo threads", no_gloo),
        ("thread", "cores", _lacks(lambda id: os.sched_setaffinity(id, os.sched_getaffinity(id)))),
        ("thread", "lower priority", _lacks(lambda id: low(id, 19))),
        (
            "thread",
            "higher priority",
            _lacks(lambda id: os.sched_setscheduler(id, os.SCHED_RR, high)),
        ),
    ]
    return pd.DataFrame(
        _row(level, name, ABSENT if why else OFFERED, why) for level, name, why in rows
    )


def _row(
    level: str,
    control: str,
    outcome: str,
    reason: str = "",
    operation: str = "none",
    asked: int = 0,
    taken: tuple[int, int] = (0, 0),
) -> dict[str, Any]:
    """Return a row; asked, taken : blocks, and blocks and threads, of an operation's kernel."""
    kernel = {"asked_blocks": asked, "taken_blocks": taken[0], "taken_threads": taken[1]}
    labels = {"level": level, "control": control, "operation": operation}
    return {**labels, **kernel, "outcome": outcome, "reason": reason or "none"}


def _lacks_nccl(since: tuple[int, ...]) -> str:
    if not dist.is_nccl_available():
        return f"torch {torch.__version__} has no NCCL"
    version: tuple[int, ...] = torch.cuda.nccl.version()
    there, needed = (".".join(map(str, numbers)) for numbers in (version, since))
    return "" if version[: len(since)] >= since else f"NCCL {there} is older than {needed}"


def _lacks_option(name: str) -> str:
    if why := _lacks_nccl((2, 17)):
        return why
    options: Any = dist.ProcessGroupNCCL.Options()
    there = hasattr(options, "config") and hasattr(options.config, name)
    return "" if there else f"torch {torch.__version__} does not pass it on"


def _lacks(change: Callable[[int], object]) -> str:
    """Return why a thread may not be changed so, as tried on one that does nothing; "" if it may."""
    ended, reason = threading.Event(), ""
    thread = threading.Thread(target=ended.wait)
    thread.start()
    try:
        change(int(thread.native_id or 0))
    except AttributeError:
        reason = "this system has no such call"
    except OSError as error:
        reason = f"not permitted: {error.strerror}"
    ended.set()
    thread.join()
    return reason


@dataclass(frozen=True)
class ControlsSettings:
    """How many blocks to ask for, one after the other; size : bytes of what is sent."""

    blocks: Sequence[int] = (1, 2, 4)
    size: int = SIZE


@job(ControlsSettings, "controls")
def controls_job(me: Rank, settings: ControlsSettings) -> Iterator[Tables]:
    """Yield a row for each number of blocks and operation: what its communicator's kernel was launched with.

    An all-to-all is asked, too: it has been launched with more blocks than a call allowed
    (https://github.com/NVIDIA/nccl/issues/2421).
    """
    tensor = torch.zeros(settings.size // 4, device=me.device)
    other = torch.empty_like(tensor)
    for blocks in settings.blocks:
        group = nccl_group(Configuration.parse(f"b{blocks}"))
        operations = {
            "all_reduce": partial(dist.all_reduce, tensor, group=group),
            "all_to_all": partial(dist.all_to_all_single, other, tensor, group=group),
        }
        rows = [_proof(me, name, blocks, run) for name, run in operations.items()]
        yield {"controls": pd.DataFrame(rows)}


def _proof(me: Rank, operation: str, blocks: int, run: Callable[[], object]) -> dict[str, Any]:
    """Return a row: what the profiler saw of an operation, the second time that it ran."""

    def once() -> None:
        run()
        torch.cuda.synchronize()

    once()
    taken = kernel_shape(json.loads(chrome_trace(once, me.device)))
    outcome = UNSEEN if not taken[0] else HEEDED if taken[0] == blocks else IGNORED
    me.say(f"max_ctas {blocks}: {operation} seen with {taken[0]} blocks of {taken[1]} threads")
    return _row("communicator", "max_ctas", outcome, "", operation, blocks, taken)
