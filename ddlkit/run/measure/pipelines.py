"""Training that reads its pictures from disk, with and without what hides reading, decoding and sending.

Everything a prediction needs is measured on its own before, by the same ranks on the same cores: layers with
nothing to read and nothing sent, messages with nothing else going on, reading, decoding.

A rank computes on one core with one thread. What prepares its batches has a core of its own where there are
two for each rank; else it has the rank's, and computing has that much less of it. gloo's threads are bound
nowhere.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import psutil
import torch
import torch.distributed as dist
from torch import nn

from ddlkit import machine
from ddlkit.core.errors import UserError
from ddlkit.run.instruments.clock import Action, Budget, Floats, measure, synchronizer
from ddlkit.run.instruments.usage import processor_times, processor_usage
from ddlkit.run.jobs.job import Tables, job
from ddlkit.run.jobs.rank import Rank, agree_all, everyones, slowest
from ddlkit.run.measure.collectives import CollectivesSettings, collectives_job
from ddlkit.run.measure.inputs import (
    AHEAD,
    STORED,
    Shape,
    Stored,
    can_be_cold,
    disk_bytes,
    input_rows,
    loader,
    pin_to,
    read,
)
from ddlkit.run.measure.layers import computing, layer_tables
from ddlkit.run.nets import registry as networks
from ddlkit.store.files import scratch

SENDS = ("after", "during")
"""When gradients are sent: after all of backward, or each as soon as it is ready."""
ALONE = "nothing"
"""What one rank sends."""
WARMUP = 1 + AHEAD  # iterations until a loader is as far ahead as it will be
BATCHES = 3  # different ones in the files
SAMPLES = 1000  # more than a round has of any part
LEAST = 0.9  # of a batch's bytes that must come from the disk for a read to be cold


@dataclass(frozen=True)
class PipelineSettings:
    """Training of ``network`` with ``batch`` pictures of ``shape`` a rank, stored in ``directory``.

    rounds, iterations : rounds over all cases, and timed iterations of each in a round
    budget : for each part that is measured on its own, in each round
    messages_per_sample : of messages, as `CollectivesSettings` has it

    Raises UserError where there is nothing to measure.
    """

    network: str
    batch: int
    directory: str
    shape: Shape = Shape(1024, 768)
    rounds: int = 3
    iterations: int = 3
    budget: Budget = Budget(warmup=1, min_repeats=3, max_repeats=8, max_s=2.0)
    messages_per_sample: int = 4

    def __post_init__(self) -> None:
        if min(self.batch, self.rounds, self.iterations) < 1:
            raise UserError(
                f"training in {self.rounds} rounds of {self.iterations} iterations of {self.batch} pictures: "
                "needs at least one of each"
            )


class Case(NamedTuple):
    """How pictures are stored, how many batches are made ahead (0: none), and when gradients are sent."""

    stored: str
    ahead: int
    sends: str


def cases(ranks: int) -> list[Case]:
    """All of them; one rank sends nothing."""
    sends = SENDS if ranks > 1 else (ALONE,)
    return [Case(*one) for one in itertools.product(STORED, (0, AHEAD), sends)]


def cores(rank: int, ranks: int) -> tuple[int, int]:
    """The core that a rank computes on, and the one on which its batches are prepared ahead."""
    own = (
        sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(ranks))
    )
    return own[rank % len(own)], own[(ranks + rank if len(own) >= 2 * ranks else rank) % len(own)]


@job(PipelineSettings, "layers", "samples", "collectives", "inputs", "pipelines")
def pipeline_job(me: Rank, settings: PipelineSettings) -> Iterator[Tables]:
    """Layers and messages, then round by round each part alone and all cases: drift meets both alike.

    layers, samples, collectives : as those jobs give them; a message for each size that a tensor has. One
        rank's say what a call costs by itself
    inputs : read, by one rank and by all at once; decode, and compute (an iteration on a batch that is there,
        with nothing sent), by all at once; of the slowest
    pipelines : a row an iteration, of the slowest rank: from asking for a batch to the end of the update

    Raises UserError where nothing can be read cold, and where memory or room runs out.
    """
    torch.set_num_threads(1)
    core, helper = cores(me.rank, me.world_size)
    pin_to(core)
    if not can_be_cold():
        raise UserError("no cold reads: this system cannot drop a file from its page cache")
    network, budget = settings.network, settings.budget
    taken(settings, me.device)  # or nothing is measured at all
    yield layer_tables(network, settings.batch, str(me.device), "fp32", budget, 1, me)
    with (
        computing(f"training of {network}", me.device),
        scratch(settings.directory) as place,
    ):
        run = _Run(me, settings, place, helper)
        yield from run.messages()
        for repeat in range(settings.rounds):
            for stored in STORED:
                yield {"inputs": run.parts(stored, repeat)}
            for case in cases(me.world_size):
                yield {"pipelines": run.case(case, repeat)}
            me.say(f"{network}: {repeat + 1} of {settings.rounds} rounds")


def taken(settings: PipelineSettings, device: torch.device) -> tuple[int, int, torch.Tensor]:
    """Channels and side of the pictures that the network takes, and a label for each of a batch.

    Raises UserError for a network of anything else.
    """
    inputs, labels = networks.sample_batch(settings.network, settings.batch, device)
    if inputs.ndim != 4 or len(labels) != settings.batch or inputs.shape[1] > 3:
        raise UserError(f"{settings.network} takes no pictures with a label each: choose another")
    return inputs.shape[1], inputs.shape[-1], labels


class _Run:
    """A rank's network, and its pictures in both forms."""

    def __init__(self, me: Rank, settings: PipelineSettings, place: Path, helper: int) -> None:
        channels, side, labels = taken(settings, me.device)
        self.me, self.settings, self.helper = me, settings, helper
        self.sent: list[dist.Work] = []
        torch.manual_seed(0)
        self.network = networks.build(settings.network).to(me.device)
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=0.0, momentum=0.9)
        self.labels, made = labels, partial(Stored, shape=settings.shape, cold=True)
        made = partial(made, side=side, channels=channels)
        (mine := place / f"rank{me.rank}").mkdir()
        count = BATCHES * settings.batch
        self.data = {stored: made(mine, stored, count=count) for stored in STORED}

    # -- each part alone -----------------------------------------------------------------------

    def messages(self) -> Iterator[Tables]:
        """All-reduces of each size that a gradient has."""
        sizes = sorted({p.nbytes for p in self.network.parameters()})
        how: dict[str, Any] = {"messages_per_sample": self.settings.messages_per_sample}
        budget = Budget(warmup=1, min_repeats=5, max_repeats=8, max_s=0.2)
        asked = CollectivesSettings(["all_reduce"], sizes, budget, **how)
        yield from collectives_job.part(self.me, asked)

    def parts(self, stored: str, repeat: int) -> pd.DataFrame:
        """Reading, decoding and computing a batch in one round: table ``inputs``."""
        data, batch = self.data[stored], self.settings.batch
        rows = partial(input_rows, batch=batch, stored=stored, n_bytes=data.batch_bytes(batch))
        held = [read(path, cold=True) for path in data.paths[:batch]]
        frames = []
        for ranks in sorted({1, self.me.world_size}):
            from_disk: list[float] = []
            act = partial(self._read, data, from_disk) if self.me.rank < ranks else _nothing
            seconds = self._together(act)
            share = everyones(from_disk[-len(seconds) :] or [0.0] * len(seconds))[0]
            share = share / data.batch_bytes(batch)
            frames.append(rows("read", "cold files", seconds, ranks=ranks, from_disk=share))
        images = torch.stack([data.prepared(one) for one in held]).to(self.me.device)
        alone: dict[str, Action] = {
            "decode": lambda: [data.prepared(one) for one in held],
            "compute": lambda: self._compute(images, ALONE),
        }
        for quantity, action in alone.items():
            seconds = self._together(action)
            frames.append(rows(quantity, "one core", seconds, ranks=self.me.world_size))
        found = pd.concat(frames, ignore_index=True)
        return found.assign(sample=found["sample"] + SAMPLES * repeat)

    def _read(self, data: Stored, from_disk: list[float]) -> None:
        before = disk_bytes()
        for path in data.paths[: self.settings.batch]:
            read(path, cold=True)
        from_disk.append(float(disk_bytes() - before))

    def _together(self, act: Action) -> Floats:
        """Seconds of the slowest rank, all starting at once."""
        budget = self.settings.budget
        return slowest(measure(act, budget, setup=dist.barrier, agree=agree_all))

    # -- all of it -----------------------------------------------------------------------------

    def case(self, case: Case, repeat: int) -> pd.DataFrame:
        """One case in one round: table ``pipelines``."""
        settings, iterations = self.settings, WARMUP + self.settings.iterations
        wanted, workers = iterations + WARMUP, 1 if case.ahead else 0
        on_gpu = self.me.device.type == "cuda"
        made = loader(
            self.data[case.stored], settings.batch, wanted, workers, pin=on_gpu, core=self.helper
        )
        taking, taken, from_disk = iter(made), np.empty(iterations), np.empty(iterations)
        with self._sending(case.sends):
            for at in range(iterations):
                if at in (0, WARMUP):
                    dist.barrier()
                    begun, own_s, start_s = (
                        processor_times(),
                        own_processor_s(),
                        perf_counter(),
                    )
                taken[at], from_disk[at] = self._iterate(taking, case.sends)
            own_s = float(everyones([own_processor_s() - own_s]).sum())
            used = processor_usage(begun, processor_times())
            spent = own_s / (perf_counter() - start_s) / machine.cores()
        del taking
        labels = {
            **{"network": settings.network, "device": self.me.device.type, "batch": settings.batch},
            **{"ranks": self.me.world_size, "link": self.me.link, **case._asdict()},
            **{"link_bits_per_s": self.me.link_bits_per_s, "repeat": repeat},
            **{
                "processor_load": used.busy,
                "stolen": used.stolen,
                "others": max(0.0, used.busy - spent),
            },
        }
        shares = slowest(from_disk[WARMUP:]) / self.data[case.stored].batch_bytes(settings.batch)
        own = {"iteration": range(settings.iterations), "iteration_s": slowest(taken[WARMUP:])}
        return pd.DataFrame({**labels, **own, "from_disk": shares})

    @contextmanager
    def _sending(self, sends: str) -> Iterator[None]:
        """Send each gradient as soon as it is ready, where that is asked for."""
        with ExitStack() as hooks:
            for parameter in self.network.parameters() if sends == "during" else ():
                hook = parameter.register_post_accumulate_grad_hook(self._send)
                hooks.callback(hook.remove)
            yield

    def _send(self, parameter: torch.Tensor) -> None:
        """Begin to add up its gradient over all ranks."""
        self.sent.append(dist.all_reduce(parameter.grad, async_op=True))

    def _iterate(self, taking: Iterator[Sequence[torch.Tensor]], sends: str) -> tuple[float, float]:
        """Seconds from asking for a batch to the end of the update, and bytes that came from the disk."""
        start_s = perf_counter()
        images, from_disk = next(taking)
        self._compute(images.to(self.me.device, non_blocking=True), sends)
        return perf_counter() - start_s, float(from_disk.sum())

    def _compute(self, images: torch.Tensor, sends: str) -> None:
        """Forward, backward, what is sent, and the update."""
        loss = nn.functional.cross_entropy(self.network(images), self.labels)
        loss.backward()
        if sends == "after":
            for parameter in reversed(list(self.network.parameters())):
                self._send(parameter)
        while self.sent:
            self.sent.pop(0).wait()
        self.optimizer.step()
        self.optimizer.zero_grad()
        synchronizer(self.me.device)()


def own_processor_s() -> float:
    """What this process and its workers have spent of processors so far."""
    me = psutil.Process()
    times = [one.cpu_times() for one in (me, *me.children(recursive=True))]
    return float(sum(one.user + one.system for one in times))


def _nothing() -> None:
    """What a rank does while another is measured."""
