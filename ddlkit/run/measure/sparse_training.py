"""Where an iteration of sparsified training spends its time: real training, imposed plans (omgs Fig 4).

Selection runs among the backward pass, so the time of backward is what the pass took without the selections
in it. Exposed is how long the computing thread waits for messages after all of that.
"""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
from torch import nn

from ddlkit.core.errors import UserError
from ddlkit.core.plan import FusionPlan
from ddlkit.core.sparse import SelectionTimes
from ddlkit.run.instruments import clock
from ddlkit.run.instruments.clock import Budget
from ddlkit.run.jobs.job import Tables, job
from ddlkit.run.jobs.rank import Floats, Rank, everyones
from ddlkit.run.measure.layers import computing
from ddlkit.run.measure.selection import threshold
from ddlkit.run.measure.sparse_exchange import SparseExchange
from ddlkit.run.nets import registry as networks

WARMUP = 3
SIZES = (1_000, 30_000, 1_000_000)  # elements whose selection is timed to plan with
PHASES = (
    "forward_s",
    "backward_s",
    "selection_s",
    "exposed_communication_s",
    "scatter_s",
    "update_s",
)
"""What an iteration consists of, in order; backward and selection take turns."""


@dataclass(frozen=True)
class SparseTrainingSettings:
    """Training of ``network`` with ``batch`` samples per rank under each of ``plans``, sparsified.

    plans : spec -> ends of its groups; order : names of the tensors in ready order, () for the last one first
    repeats, iterations : rounds over all plans, and timed iterations of each plan in a round

    Raises UserError where there is nothing to measure.
    """

    network: str
    batch: int
    density: float
    plans: Mapping[str, Sequence[int]]
    order: tuple[str, ...] = ()
    repeats: int = 2
    iterations: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.plans or self.repeats < 1 or self.iterations < 1:
            raise UserError(
                f"sparsified training of {len(self.plans)} plans, {self.repeats} repeats of "
                f"{self.iterations} iterations: needs at least one of each"
            )


@job(SparseTrainingSettings, "sparse_training")
def sparse_training_job(me: Rank, settings: SparseTrainingSettings) -> Iterator[Tables]:
    """Every plan once per round: one row per iteration and rank 0 to P - 1, as each rank saw it.

    ``compute_s`` is the median iteration of the same round without selecting and sending (`no_sync`), on that
    rank. Ranks start each iteration together. Raises UserError, on every rank, as `SparseExchange`.
    """
    with computing(f"sparsified training of {settings.network}", me.device, "fp32"):
        torch.manual_seed(settings.seed)
        network = networks.build(settings.network).to(me.device)
        for repeat in range(settings.repeats):
            for spec, ends in settings.plans.items():
                gc.collect()  # the last block's optimizer is a cycle of references
                block = _Block(me, settings, network, FusionPlan(spec, tuple(ends)))
                rows = block.measure(repeat)
                del block
                yield {"sparse_training": rows}


class _Block:
    """One plan in one round: a fresh copy of the network, warmed up."""

    def __init__(
        self, me: Rank, settings: SparseTrainingSettings, network: nn.Module, plan: FusionPlan
    ) -> None:
        self.me, self.settings, self.plan = me, settings, plan
        self.model = copy.deepcopy(network)
        self.settle = _stream(me.device)
        order = settings.order or None
        self.exchange = SparseExchange(
            self.model, plan, settings.density, order=order, settle=self.settle
        )
        inputs, self.labels = networks.sample_batch(settings.network, settings.batch, me.device)
        self.inputs = inputs.roll(me.rank, dims=-1)  # other data on every rank
        # Rate 0 is the same arithmetic, but the weights stay put: every iteration computes the same.
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0, momentum=0.9)

    def measure(self, repeat: int) -> pd.DataFrame:
        """Rows of this round, of all ranks."""
        alone = [sum(self._alone()) for _ in range(WARMUP + self.settings.iterations)][WARMUP:]
        self.optimizer.zero_grad()
        taken = [self._iterate() for _ in range(WARMUP + self.settings.iterations)][WARMUP:]
        self.exchange.close()  # hooks hold the network where no collector sees it
        mine = np.array([[*phases, float(np.median(alone))] for phases in taken])
        frames = [self._rows(repeat, rank, rows) for rank, rows in enumerate(everyones(mine))]
        frame = pd.concat(frames, ignore_index=True)
        medians = {name: 1e3 * float(frame[name].median()) for name in (*PHASES, "compute_s")}
        told = ", ".join(
            f"{name.rpartition('_')[0]} {value:.1f}" for name, value in medians.items()
        )
        self.me.say(f"{self.settings.network}, {self.plan.planner}: [ms] {told}")
        return frame

    def _rows(self, repeat: int, rank: int, rows: Floats) -> pd.DataFrame:
        settings, me = self.settings, self.me
        labels: dict[str, Any] = {
            "network": settings.network,
            "device": me.device.type,
            "batch": settings.batch,
            "plan": self.plan.planner,
            "ends": ";".join(map(str, self.plan.ends)),
            "density": settings.density,
            "messages": len(self.plan.ends),
            "ranks": me.world_size,
            "backend": me.backend,
            "link": me.link,
            "link_bits_per_s": me.link_bits_per_s,
            "threads": me.torch_threads,
            "repeat": repeat,
            "iteration": np.arange(len(rows)),
            "rank": rank,
        }
        phases = {name: rows[:, place] for place, name in enumerate(PHASES)}
        whole = {"iteration_s": rows[:, -2], "compute_s": rows[:, -1]}
        return pd.DataFrame({**labels, **phases, **whole})

    def _alone(self) -> tuple[float, float, float]:
        """Forward, backward and update without exchange."""
        with self.exchange.no_sync():
            marks = self._pass()
        self.optimizer.zero_grad()
        return marks[1] - marks[0], marks[2] - marks[1], self._update()

    def _iterate(self) -> tuple[float, ...]:
        """Seconds of each of PHASES, and of the whole."""
        dist.barrier()
        start_s, middle_s, end_s = self._pass()
        self.exchange.finish()
        spans = self.exchange.spans
        took = {kind: sum(s.end_s - s.start_s for s in spans if s.kind == kind) for kind in _KINDS}
        inside = sum(
            s.end_s - s.start_s for s in spans if s.kind == "sparsify" and s.end_s <= end_s
        )
        backward_s = end_s - middle_s - inside
        waits = (middle_s - start_s, backward_s, took["sparsify"], took["wait"], took["scatter"])
        update_s = self._update()
        return (*waits, update_s, time.perf_counter() - start_s)

    def _pass(self) -> tuple[float, float, float]:
        """When forward began, ended, and backward ended."""
        self.settle()
        start_s = time.perf_counter()
        loss = nn.functional.cross_entropy(self.model(self.inputs), self.labels)
        self.settle()
        middle_s = time.perf_counter()
        loss.backward()
        self.settle()
        return start_s, middle_s, time.perf_counter()

    def _update(self) -> float:
        start_s = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.settle()
        return time.perf_counter() - start_s


_KINDS = ("sparsify", "wait", "scatter")


def _stream(device: torch.device) -> Callable[[], object]:
    """What to call so that computation is done, while messages may be under way."""
    if device.type == "cuda":
        return torch.cuda.current_stream(device).synchronize
    return lambda: None


def selection_here(device: str, density: float, threads: int) -> SelectionTimes:
    """What our selector takes on this device at one density: the median of a few tries at a few sizes."""
    seconds = []
    with computing("selecting", device, threads=threads) as place:
        for size in SIZES:
            magnitudes = torch.randn(size, device=place).abs()
            k = max(1, round(density * size))
            tries = clock.measure_on(
                place, partial(threshold, magnitudes, k), Budget(2, 7, 7, max_s=5.0)
            )
            seconds.append(float(np.median(tries)))
    return SelectionTimes(np.array(SIZES, float), np.array([density]), np.array([seconds]))
