"""By what communication's resources can be controlled here, and whether it takes effect (sharing Fig 1).

The paper gave NCCL a call of its own. Since then there are three levels, each for less than the one before:
variables of the environment, for all that a process sends; the options of a communicator; the configuration
of one call, which torch does not pass on, but NVIDIA's package nccl4py does. On processors the threads of
gloo are what can be controlled.

What takes effect on a GPU is read from the kernels that a profiler saw. An all-to-all is asked, too: it has
been launched with more blocks than a call allowed (https://github.com/NVIDIA/nccl/issues/2421).
"""

from __future__ import annotations

import importlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
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

ENVIRONMENT, COMMUNICATOR, CALL, THREAD = LEVELS = ("environment", "communicator", "call", "thread")
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
    """Table ``controls``: what this installation offers, level by level, and why not the rest."""
    rows = [
        *((ENVIRONMENT, name, _lacks_nccl(since)) for name, since in _VARIABLES.items()),
        *((COMMUNICATOR, name, _lacks_option(name)) for name in _OPTIONS),
        (CALL, "nccl4py NCCLCollConfig", lacks_call()),
        (THREAD, "gloo threads", _lacks_gloo()),
        (THREAD, "cores", _lacks(lambda id: os.sched_setaffinity(id, os.sched_getaffinity(id)))),
        (THREAD, "lower priority", _lacks(lambda id: os.setpriority(os.PRIO_PROCESS, id, 19))),
        (THREAD, "higher priority", _lacks(_raise_it)),
    ]
    return pd.DataFrame(
        _row(level, name, OFFERED if not why else ABSENT, why) for level, name, why in rows
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
    """A row of the table; asked, taken : blocks, and blocks and threads, of an operation's kernel."""
    kernel = {"asked_blocks": asked, "taken_blocks": taken[0], "taken_threads": taken[1]}
    found = {"level": level, "control": control, "operation": operation, **kernel}
    return {**found, "outcome": outcome, "reason": reason or "none"}


# -- what is there -----------------------------------------------------------------------------


def _lacks_nccl(since: tuple[int, ...]) -> str:
    if not dist.is_nccl_available():
        return f"torch {torch.__version__} has no NCCL"
    version: tuple[int, ...] = torch.cuda.nccl.version()
    here, needed = (".".join(map(str, one)) for one in (version, since))
    return "" if version[: len(since)] >= since else f"NCCL {here} is older than {needed}"


def _lacks_option(name: str) -> str:
    if why := _lacks_nccl((2, 17)):
        return why
    options: Any = dist.ProcessGroupNCCL.Options()
    here = hasattr(options, "config") and hasattr(options.config, name)
    return "" if here else f"torch {torch.__version__} does not pass it on"


def nccl4py() -> ModuleType | None:
    """NVIDIA's package, if it is there and its library can be loaded."""
    try:
        return importlib.import_module("nccl.core")
    except (ImportError, OSError, RuntimeError):
        return None


def lacks_call() -> str:
    """Why no single call can be configured; "" where one can."""
    module = nccl4py()
    if module is None:
        return "nccl4py is not installed, or finds no NCCL: nothing here needs it"
    return "" if hasattr(module, "NCCLCollConfig") else "this nccl4py is older than NCCL 2.32"


def _lacks_gloo() -> str:
    options = getattr(getattr(dist, "ProcessGroupGloo", None), "_Options", None)
    return "" if options else f"torch {torch.__version__} has no gloo, or hides its options"


def _raise_it(thread: int) -> None:
    os.sched_setscheduler(thread, os.SCHED_RR, os.sched_param(1))


def _lacks(change: Callable[[int], object]) -> str:
    """Why a thread may not be changed so, as tried on one that does nothing; "" if it may."""
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


# -- what takes effect between GPUs ------------------------------------------------------------


@dataclass(frozen=True)
class ControlsSettings:
    """How many blocks to ask for, one after the other; size : bytes of what is sent."""

    blocks: Sequence[int] = (1, 2, 4)
    size: int = SIZE


@job(ControlsSettings, "controls")
def controls_job(me: Rank, settings: ControlsSettings) -> Iterator[Tables]:
    """A row for each number of blocks, level and operation: what its kernel was launched with.

    Of the levels that can be changed within a process: communicators, and calls where nccl4py is there. How
    NCCL takes its environment is measured in processes of their own, in the table ``channels``.
    """
    tensor = torch.zeros(settings.size // 4, device=me.device)
    for blocks in settings.blocks:
        group = nccl_group(Configuration.parse(f"b{blocks}"))
        other = torch.empty_like(tensor)
        operations = {
            "all_reduce": partial(dist.all_reduce, tensor, group=group),
            "all_to_all": partial(dist.all_to_all_single, other, tensor, group=group),
        }
        rows = [
            _proof(me, COMMUNICATOR, "max_ctas", name, blocks, run)
            for name, run in operations.items()
        ]
        yield {"controls": pd.DataFrame(rows)}
    if not lacks_call():
        yield {"controls": pd.DataFrame(_calls(me, settings.blocks, tensor))}


def _proof(
    me: Rank, level: str, control: str, operation: str, blocks: int, run: Callable[[], object]
) -> dict[str, Any]:
    """A row: what the profiler saw of an operation, the second time that it ran."""

    def once() -> None:
        run()
        torch.cuda.synchronize()

    once()
    taken = kernel_shape(json.loads(chrome_trace(once, me.device)))
    outcome = UNSEEN if not taken[0] else HEEDED if taken[0] == blocks else IGNORED
    me.say(f"{control} {blocks}: {operation} seen with {taken[0]} blocks of {taken[1]} threads")
    return _row(level, control, outcome, "", operation, blocks, taken)


def _calls(me: Rank, blocks: Sequence[int], tensor: torch.Tensor) -> list[dict[str, Any]]:
    """Rows of single calls, over a communicator of nccl4py's own."""
    nccl: Any = nccl4py()
    name = [nccl.get_unique_id() if me.rank == 0 else None]
    dist.broadcast_object_list(name)
    communicator = nccl.Communicator.init(nranks=me.world_size, rank=me.rank, unique_id=name[0])
    rows = []
    for count in blocks:
        config = nccl.NCCLCollConfig(min_ctas=count, max_ctas=count)

        def run(config: Any = config) -> None:
            communicator.allreduce(tensor, tensor, nccl.SUM, config=config)

        rows.append(_proof(me, CALL, "nccl4py max_ctas", "all_reduce", count, run))
    communicator.destroy()
    return rows
