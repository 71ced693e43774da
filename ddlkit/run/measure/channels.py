"""NCCL with a given number of blocks and threads, and the proof that it took them.

NCCL reads these from its environment when it starts (NCCL_MIN_CTAS, NCCL_MAX_CTAS, NCCL_NTHREADS), so
every setting is measured in processes of its own. Threads count for its ring and Simple protocol
only, which are therefore asked for too. What it took is read from two witnesses: NCCL's log, which
names every variable that it heeds and its channels, and the profiler, which sees grid and block of
the kernel itself. That one is of the largest message: a small one gets fewer blocks, and then fewer threads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ddlkit.core.errors import UserError
from ddlkit.core.units import MB, format_bytes, format_seconds
from ddlkit.run.instruments.clock import Budget, chrome_trace, sample_rows
from ddlkit.run.jobs import launch
from ddlkit.run.jobs.job import Job, Tables, job
from ddlkit.run.jobs.launch import Loopback
from ddlkit.run.jobs.rank import Rank
from ddlkit.run.measure.collectives import (
    CheckedCollective,
    clock_of,
    measure_size,
    whole_size,
)
from ddlkit.run.measure.standin import nccl_threads
from ddlkit.run.sessions.session import Partial

SIZES = (1 * MB, 25 * MB, 250 * MB)  # 25 MB is what DistributedDataParallel sends (sharing Fig 2)
BLOCKS, THREADS = (1, 2, 3, 4, 8, 16, 32), (64, 128, 256, 512)
COLLECTIVE = "all_reduce"
LOG = "nccl.log"  # with the process id behind it
DEFAULT = (0, 0)  # both left to NCCL

_HEEDED = re.compile(r"(NCCL_\w+) set by environment to (\d+)")
_CHANNELS = re.compile(r"\b(\d+) coll channels")


def measure_channels(
    settings: Sequence[tuple[int, int]],
    n_ranks: int,
    sizes: Sequence[int],
    budget: Budget,
    timeout_s: float = 60.0,
) -> pd.DataFrame:
    """Table ``channels``: all_reduce under each (blocks, threads), on the GPUs of this machine.

    settings : 0 for what is left to NCCL; each is measured in fresh processes, ``timeout_s`` at most
    taken_channels, taken_blocks, taken_threads : what the witnesses saw, 0 if they saw nothing

    Raises as `measure_settings` does, also for a setting that did not take effect.
    """

    def measure_one(blocks: int, threads: int) -> pd.DataFrame:
        own = ChannelsSettings(blocks, threads, sizes, budget)
        frame, log = launch_under(channels_job, own, n_ranks, timeout_s)
        heeded, taken_channels = read_log(log)
        for name, asked in (("NCCL_MAX_CTAS", blocks), ("NCCL_NTHREADS", threads)):
            if asked and taken_channels and heeded.get(name) != asked:
                raise UserError(f"NCCL did not heed {name}={asked}: its log does not name it")
        frame = frame.assign(taken_channels=taken_channels)
        _check_shape(frame, blocks, threads)
        return frame

    return measure_settings("channels", settings, measure_one)


def _check_shape(frame: pd.DataFrame, blocks: int, threads: int) -> None:
    """Raise Partial where the profiler did not see what was asked for, or nothing at all."""
    taken = (int(frame["taken_blocks"].iloc[0]), int(frame["taken_threads"].iloc[0]))
    asked = (blocks or taken[0], nccl_threads(threads) if threads else taken[1])
    if taken != asked:
        raise Partial({"channels": frame}, f"seen with {taken[0]} blocks of {taken[1]} threads")


def measure_settings(
    table: str,
    settings: Iterable[tuple[int, int]],
    measure_one: Callable[[int, int], pd.DataFrame],
) -> pd.DataFrame:
    """What ``measure_one`` gives of each (blocks, threads), one below the other, whichever fail.

    Raises Partial, with all that was measured, when some failed, and UserError when every one did.
    """
    frames, wrong = [], []
    for blocks, threads in settings:
        try:
            frames.append(measure_one(blocks, threads))
        except UserError as error:
            wrong.append(f"{blocks}x{threads}: {error}")
            frames += error.tables.values() if isinstance(error, Partial) else ()
    if not frames:
        raise UserError("; ".join(wrong))
    whole = pd.concat(frames, ignore_index=True)
    if wrong:
        raise Partial({table: whole}, "; ".join(wrong))
    return whole


def launch_under(
    job: Job[Any], settings: Any, n_ranks: int, timeout_s: float, out: Path | None = None
) -> tuple[pd.DataFrame, str]:
    """The table of a job under the blocks and threads of its ``settings``, and NCCL's log."""
    with launch.workspace(out) as out:
        place = Loopback(variables=environment(settings.blocks, settings.threads, out))
        how: dict[str, Any] = {"place": place, "timeout_s": timeout_s, "out": out}
        how["join"] = {"timeout_s": launch.MEETING_S}
        tables = launch.launch(job, settings, ranks=n_ranks, **how)
        log = "".join(path.read_text(errors="replace") for path in out.glob(f"{LOG}*"))
    return tables[job.tables[0]], log


def environment(blocks: int, threads: int, out: Path) -> dict[str, str]:
    """What NCCL finds in its environment: the setting, and to write down what it heeds."""
    variables = {
        "NCCL_DEBUG": "INFO",
        "NCCL_DEBUG_SUBSYS": "INIT,ENV",
        "NCCL_DEBUG_FILE": str(out / f"{LOG}.%p"),
    }
    if blocks or threads:
        variables |= {"NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
    asked = {"NCCL_MIN_CTAS": blocks, "NCCL_MAX_CTAS": blocks, "NCCL_NTHREADS": threads}
    return variables | {name: str(count) for name, count in asked.items() if count}


def read_log(text: str) -> tuple[dict[str, int], int]:
    """Variables that NCCL's log says it heeds, and its channels for collectives; {} and 0 if none."""
    channels = [int(number) for number in _CHANNELS.findall(text)]
    return {name: int(value) for name, value in _HEEDED.findall(text)}, max(channels, default=0)


def kernel_shape(trace: Mapping[str, Any]) -> tuple[int, int]:
    """(blocks, threads) of NCCL's kernel in a profiler's Chrome trace; (0, 0) if there is none."""
    for event in trace.get("traceEvents", []):
        if event.get("cat") == "kernel" and str(event.get("name", "")).startswith("nccl"):
            shape = event["args"]
            return int(np.prod(shape["grid"])), int(np.prod(shape["block"]))
    return 0, 0


# -- in the ranks ------------------------------------------------------------------------------


@dataclass(frozen=True)
class ChannelsSettings:
    """What CONFIG.json of the job ``channels`` may hold; see `measure_channels`."""

    blocks: int
    threads: int
    sizes: Sequence[int]
    budget: Budget


@job(ChannelsSettings, "channels")
def channels_job(me: Rank, settings: ChannelsSettings) -> Iterator[Tables]:
    """One size after the other, after a look at the kernel of the largest."""
    sizes = [whole_size(size, me.world_size) for size in settings.sizes]
    blocks, threads = _seen(me, max(sizes))
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
        me.say(
            f"{settings.blocks}x{settings.threads} (seen {blocks}x{threads}): {format_bytes(size)} "
            f"in {format_seconds(float(np.median(seconds)))}"
        )
        yield {"channels": sample_rows(labels, seconds)}


def _seen(me: Rank, size: int) -> tuple[int, int]:
    """(blocks, threads) of the kernel of one all-reduce of that size, as the profiler saw it."""
    checked = CheckedCollective(me, COLLECTIVE, size, 0)

    def once() -> None:
        checked.reset()
        checked.run()

    once()
    return kernel_shape(json.loads(chrome_trace(once, me.device)))
