"""What compute and all-reduces take from each other: a network beside messages, each alone, and DDP's own part.

All ranks do the same at once, as in training, and what is compared is timed in turn. So many messages of one
size are posted that they outlast an iteration, which is done again and again while they are under way. What
DDP's buckets take is timed where nobody sends them: a hook answers at once.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddlkit.core.units import MIB, format_seconds
from ddlkit.run.clock import Marks, synchronizer
from ddlkit.run.jobs import rank as peers
from ddlkit.run.jobs.rank import Floats, Rank, Tables, job, slowest
from ddlkit.run.measure.layers import Training, compute_on

PRECISION = "fp32"
AS_LONG = 1.6  # how long messages last by themselves, over an iteration by itself
MOST_BYTES = 256 * MIB  # of messages that are posted at once
PHASES = ("forward", "backward", "update")


@dataclass(frozen=True)
class SlowdownSettings:
    """A network at a batch beside messages of these sizes; rounds start until ``max_s`` have passed."""

    network: str
    batch: int
    sizes: Sequence[int]
    max_s: float = 10.0
    min_repeats: int = 4


@job(SlowdownSettings, "slowdown")
def slowdown_job(me: Rank, settings: SlowdownSettings) -> Iterator[Tables]:
    """Rows of all rounds, ``seconds`` of the slowest rank."""
    with compute_on(f"{settings.network} beside all-reduces", me.device, PRECISION):
        torch.manual_seed(0)
        pair = _Pair(me, settings)
        begun_s, repeat = perf_counter(), 0
        while peers.agree_all(repeat < settings.min_repeats) or not peers.agree_all(
            perf_counter() - begun_s >= settings.max_s
        ):
            rows = pair.round()
            place = {"link": me.link, "link_bits_per_s": me.link_bits_per_s, "ranks": me.world_size}
            labels = {"network": settings.network, "batch": settings.batch, "device": me.device.type}
            frame = pd.DataFrame(rows, columns=["quantity", "bytes", "messages", "seconds"])
            frame = frame.groupby(["quantity","bytes"],sort=False).mean().reset_index().astype({"messages":int})
            yield {"slowdown": frame.assign(**labels, **place, backend=me.backend, precision=PRECISION, repeat=repeat)}
            repeat += 1


class _Pair:
    def __init__(self, me: Rank, settings: SlowdownSettings) -> None:
        self.me = me
        self.training = Training(settings.network, settings.batch, me.device, PRECISION)
        model = self.training.model
        n_bytes = sum(p.nbytes for p in model.parameters() if p.requires_grad)
        self.n_bytes = n_bytes
        self.n = sum(p.requires_grad for p in model.parameters())
        self.unsent = {
            "one bucket": Training(settings.network, settings.batch, me.device, PRECISION, _unsent(model, me, [2 * n_bytes / MIB])),
            "all buckets": Training(settings.network, settings.batch, me.device, PRECISION, _unsent(model, me, [1e-6])),
        }
        for t in (self.training, *self.unsent.values()):
            for _ in range(3):
                t.iterate()
        alone_s = float(slowest([sum(self.phases(self.training))])[0])
        self.buffers = {}
        for size in settings.sizes:
            buffer = torch.zeros(size // 4, device=me.device)
            once = max(1, min(8, MOST_BYTES // 4 // size))
            self.messages(size, buffer, once)
            each_s = float(slowest([self.messages(size, buffer, once) / once])[0])
            count = max(2, math.ceil(AS_LONG * alone_s / each_s))
            self.buffers[size] = buffer, count

    def phases(self, training) -> Floats:
        marks = Marks(self.me.device)
        training.iterate(marks.mark)
        return np.diff(marks.seconds())

    def messages(self, size, buffer, count) -> float:
        dist.barrier()
        start_s = perf_counter()
        for work in [dist.all_reduce(buffer, async_op=True) for _ in range(count)]:
            work.wait()
        return perf_counter() - start_s

    def beside(self, buffer, count):
        dist.barrier()
        start_s = perf_counter()
        works = [dist.all_reduce(buffer, async_op=True) for _ in range(count)]
        ended = works[-1].get_future().then(lambda _: perf_counter())
        calls = []
        while not calls or not ended.done():
            calls.append((self.phases(self.training), perf_counter()))
        for work in works:
            work.wait()
        end_s = ended.wait()
        within = [phases for phases, at in calls if at <= end_s] or [calls[0][0]]
        last = calls[max(0,len(within)-1)][1]
        return np.mean(within, axis=0), end_s - start_s, min(1, (end_s - start_s) / (last - start_s)), len(within), len(calls), (calls[-1][1]-end_s)/ (calls[-1][1]-start_s)

    def round(self):
        rows = []
        def add(quantity, n_bytes, count, seconds):
            rows.append((quantity, n_bytes, count, seconds))
        for size, (buffer, count) in self.buffers.items():
            dist.barrier()
            for name, s in zip(PHASES, slowest(self.phases(self.training)), strict=True):
                add(name, 0, 0, s)
            add("message", size, count, slowest([self.messages(size, buffer, count)])[0] / count)
            phases, took_s, share, calls, total, idle = self.beside(buffer, count)
            worst = slowest([*phases, took_s, -share, -calls])
            for name, s in zip(PHASES, worst, strict=False):
                add(f"{name} beside", size, count, s)
            add("message beside", size, count, worst[3] / count)
            add("share", size, -int(worst[5]), -worst[4])
            add("idle", size, total, max(idle,1e-9))
        for name, training in self.unsent.items():
            dist.barrier()
            for phase, s in zip(PHASES, slowest(self.phases(training)), strict=True):
                add(f"{phase}, {name}", self.n_bytes, self.n if name[0]=="a" else 1, s)
        return rows


def _unsent(model: nn.Module, me: Rank, caps) -> DistributedDataParallel:
    wrapped = DistributedDataParallel(copy.deepcopy(model), init_sync=False, bucket_cap_mb_list=caps, forward_sync_buffers=False) if True else None
    def answer(state, bucket):
        f = torch.futures.Future()
        f.set_result(bucket.buffer())
        return f
    wrapped.register_comm_hook(None, answer)
    return wrapped
