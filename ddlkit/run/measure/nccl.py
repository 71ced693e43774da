"""NCCL with given blocks and threads: how fast it is, what controls it here, and kernels beside it.

NCCL reads NCCL_MIN_CTAS, NCCL_MAX_CTAS and NCCL_NTHREADS when it starts, so every setting is measured in
processes of its own. Threads count for its ring and Simple protocol only, which are asked for too. What it
took is read from the kernel that a profiler saw, of the largest message: a small one gets fewer blocks.
"""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist

from ddlkit.core.errors import UserError
from ddlkit.core.units import MB, MIB
from ddlkit.run.instruments.clock import Budget, chrome_trace, sample_rows
from ddlkit.run.jobs import launch
from ddlkit.run.jobs.job import Tables, job
from ddlkit.run.jobs.launch import Loopback
from ddlkit.run.jobs.rank import Rank
from ddlkit.run.measure.collectives import CheckedCollective, clock_of, measure_size, whole_size
from ddlkit.run.measure.shares import Configuration, nccl_group
from ddlkit.run.measure.standin import nccl_threads
from ddlkit.run.sessions.session import Partial

# -- a message by blocks and threads -------------------------------------------------------------

SIZES = (1 * MB, 25 * MB, 250 * MB)  # 25 MB is what DistributedDataParallel sends (sharing Fig 2)
COLLECTIVE = "all_reduce"
LOG = "nccl.log"  # with the process id behind it
DEFAULT = (0, 0)  # both left to NCCL
_CHANNELS = re.compile(r"\b(\d+) coll channels")


@dataclass(frozen=True)
class ChannelsSettings:
    """What CONFIG.json of the job ``channels`` may hold; see `measure_channels`."""

    blocks: int
    threads: int
    sizes: Sequence[int]
    budget: Budget


def measure_channels(
    settings: Sequence[tuple[int, int]],
    n_ranks: int,
    sizes: Sequence[int],
    budget: Budget,
    timeout_s: float = 60.0,
) -> pd.DataFrame:
    """Measure table ``channels``: all_reduce under each (blocks, threads), on the GPUs of this machine.

    settings : 0 for what is left to NCCL; each is measured in fresh processes, ``timeout_s`` at most
    taken_channels (by NCCL's log), taken_blocks, taken_threads (by the profiler) : 0 if nothing was seen

    Raises Partial, with all that was measured, when a setting failed or did not take effect, and UserError
    when every one failed.
    """
    frames, wrong = [], []
    for blocks, threads in settings:
        asked = ChannelsSettings(blocks, threads, sizes, budget)
        try:
            frames.append(_under(asked, n_ranks, timeout_s))
        except UserError as error:
            wrong.append(f"{blocks}x{threads}: {error}")
            continue
        taken = tuple(frames[-1][["taken_blocks", "taken_threads"]].iloc[0])
        if taken != (blocks or taken[0], nccl_threads(threads) if threads else taken[1]):
            wrong.append(f"{blocks}x{threads}: seen with {taken[0]} blocks of {taken[1]} threads")
    if not frames:
        raise UserError("; ".join(wrong))
    whole = pd.concat(frames, ignore_index=True)
    if wrong:
        raise Partial({"channels": whole}, "; ".join(wrong))
    return whole


def _under(asked: ChannelsSettings, n_ranks: int, timeout_s: float) -> pd.DataFrame:
    with launch.workspace(None) as out:
        place = Loopback(variables=environment(asked.blocks, asked.threads, out))
        how: dict[str, Any] = {"place": place, "timeout_s": timeout_s, "out": out}
        how["join"] = {"timeout_s": launch.MEETING_S}
        table = launch.launch(channels_job, asked, ranks=n_ranks, **how)["channels"]
        log = "".join(path.read_text(errors="replace") for path in out.glob(f"{LOG}*"))
    return table.assign(taken_channels=max(map(int, _CHANNELS.findall(log)), default=0))


def environment(blocks: int, threads: int, out: Path) -> dict[str, str]:
    """Return what NCCL finds in its environment: the setting, and to write down its channels."""
    variables = {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,ENV",
        "NCCL_DEBUG_FILE": str(out / f"{LOG}.%p"),
    }
    if blocks or threads:
        variables |= {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
    asked = {"NCCL_MIN_CTAS": blocks, "NCCL_MAX_CTAS": blocks, "NCCL_NTHREADS": threads}
    return variables | {name: str(count) for name, count in asked.items() if count}


def kernel_shape(trace: Mapping[str, Any]) -> tuple[int, int]:
    """Return (blocks, threads) of NCCL's kernel in a profiler's Chrome trace; (0, 0) if there is none."""
    for event in trace.get("traceEvents", []):
        if event.get("cat") == "kernel" and str(event.get("name", "")).startswith("nccl"):
            shape = event["args"]
            return int(np.prod(shape["grid"])), int(np.prod(shape["block"]))
    return 0, 0


@job(ChannelsSettings, "channels")
def channels_job(me: Rank, settings: ChannelsSettings) -> Iterator[Tables]:
    """Yield one size after the other, after a look at the kernel of the largest."""
    sizes = [whole_size(size, me.world_size) for size in settings.sizes]
    checked = CheckedCollective(me, COLLECTIVE, max(sizes), 0)

    def once() -> None:
        checked.reset()
        checked.run()

    once()
    blocks, threads = kernel_shape(json.loads(chrome_trace(once, me.device)))
    me.say(f"{settings.blocks}x{settings.threads}: seen with {blocks} blocks of {threads} threads")
    for number, size in enumerate(sizes):
        seconds = measure_size(me, COLLECTIVE, size, settings.budget, number, 1)
        labels = {
            "collective": COLLECTIVE,
            "backend": me.backend,
            "link": me.link,
            "ranks": me.world_size,
            "bytes": size,
            "asked_blocks": settings.blocks,
            "asked_threads": settings.threads,
            "taken_channels": 0,
            "taken_blocks": blocks,
            "taken_threads": threads,
            "clock": clock_of(me),
        }
        yield {"channels": sample_rows(labels, seconds)}


# -- what controls it here (sharing Fig 1) -------------------------------------------------------

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
