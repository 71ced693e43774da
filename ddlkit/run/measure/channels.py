"""NCCL with a given number of blocks and threads, and the proof that it took them.

NCCL reads NCCL_MIN_CTAS, NCCL_MAX_CTAS and NCCL_NTHREADS when it starts, so every setting is measured in
processes of its own. Threads count for its ring and Simple protocol only, which are asked for too. What it
took is read from the kernel that a profiler saw, of the largest message: a small one gets fewer blocks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ddlkit.core.errors import UserError
from ddlkit.core.units import MB
from ddlkit.run.instruments.clock import Budget, chrome_trace, sample_rows
from ddlkit.run.jobs import launch
from ddlkit.run.jobs.job import Tables, job
from ddlkit.run.jobs.launch import Loopback
from ddlkit.run.jobs.rank import Rank
from ddlkit.run.measure.collectives import CheckedCollective, clock_of, measure_size, whole_size
from ddlkit.run.measure.standin import THREADS as THREADS
from ddlkit.run.measure.standin import nccl_threads
from ddlkit.run.sessions.session import Partial

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
