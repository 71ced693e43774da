"""Replay of sharded training: the program of an iteration, with real collectives and compute waited out.

As in `ddlkit.run.lab.replay` ranks sleep instead of computing, and every value that comes is checked.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist

from ddlkit.model.sharded import COMPUTE, ELEMENT_BYTES, GATHER, POST, Program
from ddlkit.run.jobs import rank as peers
from ddlkit.run.jobs.rank import Rank, Tables, job
from ddlkit.run.lab.replay import HEAD_START_S, sleep_until
from ddlkit.run.vitals import Retries, Usage, Watch


@dataclass(frozen=True)
class Script:
    """A program to play, of (do, what) and (collective, bytes); labels : columns of its rows."""

    labels: Mapping[str, Any]
    steps: Sequence[tuple[str, float]]
    messages: Sequence[tuple[str, int]]

    @classmethod
    def of(cls, program: Program, labels: Mapping[str, Any]) -> Script:
        """Return what a rank needs of a program."""
        return cls(labels, program.steps, [(each[0], each[2]) for each in program.messages])


@dataclass(frozen=True)
class ShardedReplay:
    """Scripts, each played once a round, and again while others disturb it, ``tries`` times at most."""

    scripts: Sequence[Script]
    rounds: int
    tries: int = 1


@job(ShardedReplay, "sharded")
def sharded_replay_job(me: Rank, settings: ShardedReplay) -> Iterator[Tables]:
    """Yield a row per script and round: ``seconds`` of the slowest rank."""
    retries = Retries(settings.rounds * len(settings.scripts) // 4)
    for repeat in range(settings.rounds):
        for script in settings.scripts:
            for left in reversed(range(settings.tries)):
                seconds, used = _iterate(me, script)
                if not (left and retries.again(used)):
                    break
            row = {
                **script.labels,
                **place_of(me),
                "origin": "replayed",
                "quantity": "iteration",
                "repeat": repeat,
            }
            row |= {"sample": 0, "seconds": seconds, **state(used)}
            yield {"sharded": pd.DataFrame([row])}


def place_of(me: Rank) -> dict[str, Any]:
    """Return which link a rank talks over, as columns."""
    return {"link": me.link, "link_bits_per_s": me.link_bits_per_s}


def state(used: Usage) -> dict[str, Any]:
    """Return how the machine fared, as columns."""
    names = ("stolen", "others", "disturbed")
    return {**{name: getattr(used, name) for name in names}, "processor_limited": used.limited}


def _iterate(me: Rank, script: Script) -> tuple[float, Usage]:
    """Return seconds of an iteration that all ranks start at once, and how the machine fared."""
    n, mine = me.world_size, me.rank + 1.0
    pairs = []  # what comes, and what is sent
    for collective, n_bytes in script.messages:
        part = -(-n_bytes // (ELEMENT_BYTES * n))
        whole, own = torch.full((n * part,), mine), torch.full((part,), mine)
        pairs.append((whole, own) if collective == GATHER else (own, whole))
    watch, works = Watch(me.rank), dict[int, dist.Work]()
    start_s = now_s = float(peers.slowest([time.perf_counter()])[0]) + HEAD_START_S
    sleep_until(start_s)
    for do, what in script.steps:
        k = int(what)
        if do == COMPUTE:
            now_s += what
            sleep_until(now_s)
        elif do == POST:
            gathers = script.messages[k][0] == GATHER
            post = peers.gather_single if gathers else peers.scatter_single
            works[k] = post(*pairs[k], async_op=True)
        elif not works[k].is_completed():
            works[k].wait()
            now_s = time.perf_counter()
    end_s = max(now_s, time.perf_counter())
    used = peers.usage_of_all(watch.usage())
    for (collective, _), (come, _) in zip(script.messages, pairs, strict=True):
        ranks = torch.arange(1.0, n + 1)[:, None] if collective == GATHER else n * (n + 1) / 2
        if not bool((come.view(n if collective == GATHER else 1, -1) == ranks).all()):
            raise RuntimeError(f"replay of {script.labels}: wrong values of {collective}")
    return float(peers.slowest([end_s - start_s])[0]), used
