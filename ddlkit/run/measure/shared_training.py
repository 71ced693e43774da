"""Real data-parallel training while communication may take more or less (sharing Fig 4 to 8, and 5).

DistributedDataParallel hands its buckets to a hook of ours, which sends each over the group of ranks whose
configuration is on trial (`ddlkit.run.measure.shares`). So one copy of a network serves all of them, and
they are changed between iterations, in turn.

Two groups cannot deadlock here. DDP hands over buckets in the order of their numbers, on every rank, and the
hook refuses any other; each group carries what it is given in that order. So whichever message comes first
of those that are not complete, every rank has posted it, or will without waiting for another, and on every
rank nothing stands before it in its group. Groups of NCCL have kernels that may keep one another from the
multiprocessors: there the order of launches must be the same, too, and is (NCCL_LAUNCH_ORDER_IMPLICIT).
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddlkit.core.errors import UserError
from ddlkit.core.link import turn_s
from ddlkit.core.timeline import COMMUNICATION, Timeline
from ddlkit.core.units import MIB
from ddlkit.run.instruments.clock import synchronizer
from ddlkit.run.instruments.vitals import processor_times, processor_usage
from ddlkit.run.jobs.job import Tables, job
from ddlkit.run.jobs.rank import Floats, Rank, agree_all, everyones, slowest
from ddlkit.run.measure.layers import computing
from ddlkit.run.measure.shared_messages import turned
from ddlkit.run.measure.shares import Groups, Policy, computing_with, place_columns
from ddlkit.run.measure.training import OWN_PLAN, PRECISION, WARMUP, check_equal_gradients
from ddlkit.run.nets import registry as networks
from ddlkit.run.sessions.session import ran_out_of_memory

SPANS, PERIODS = "sharing_spans", "sharing_periods"
Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class SharedTrainingSettings:
    """Training of ``network`` at each batch, under each plan and policy, in turn.

    policies : names of `shares.Policy`
    plans : spec -> bytes of each bucket in the order in which gradients become ready; nothing is imposed
        for "ddp", whose bytes may be empty
    repeats, iterations : rounds over all, and timed iterations of each in a round, after one that is not
    empty : timed iterations before each policy that send one number for each bucket, after one that is not

    Raises UserError where there is nothing to measure, and for a policy that is none.
    """

    network: str
    batches: Sequence[int]
    policies: Sequence[str]
    plans: Mapping[str, Sequence[int]] = field(default_factory=lambda: {OWN_PLAN: []})
    repeats: int = 6
    iterations: int = 2
    empty: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (self.batches and self.policies and self.plans) or self.repeats < 1:
            raise UserError("shared training: needs a batch, a policy, a plan and a round at least")
        if self.iterations < 1 or self.empty < 0:
            raise UserError("shared training: needs an iteration in each round at least")
        for policy in self.policies:
            Policy.parse(policy)


@job(
    SharedTrainingSettings,
    *("sharing_control", "sharing_iterations", SPANS, PERIODS),
)
def shared_training_job(me: Rank, settings: SharedTrainingSettings) -> Iterator[Tables]:
    """Every batch, plan and policy once in a round; the order of the policies moves on by one each round.

    sharing_control : what became of each configuration
    sharing_iterations : an iteration of the rank that was slowest in it. ``backward_s`` ends with the last
        bucket's post, ``compute_s`` is the median iteration of the round without exchange
    sharing_spans : the first timed iteration of each, of all ranks
    sharing_periods : seconds from one iteration to the next, mean of all ranks: with empty messages just
        before, and with whole ones. The slowest rank's own is longer: who begins late waits less.
        ``first_post_s`` ends, among empty ones, when the last rank has posted its first bucket

    What does not fit into memory, and plans of which DDP makes other buckets, are said and left out. Raises
    UserError where nothing at all can be measured, and for ranks that hold different gradients.
    """
    with computing(f"shared training of {settings.network}", me.device, PRECISION):
        yield from _Trial(me, settings).run()


# -- one iteration -----------------------------------------------------------------------------


class Clock:
    """Points in time along a device's work: of a GPU by its events, which nobody waits for."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"

    def now(self) -> Any:
        """This point; on a GPU of the stream that is current."""
        if not self._on_gpu:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream())
        return event

    def seconds(self, start: Any, point: Any) -> float:
        """From one to the other, once the device has got there."""
        return float(start.elapsed_time(point) / 1e3 if self._on_gpu else point - start)


class Router:
    """DDP's communication hook: it sends each bucket over the group that the policy has for it.

    empty : whether it sends one number instead, that ranks meet for; it then only says that all is done
    posted, done : points in time, by the bucket's number; sizes : bytes
    """

    def __init__(self, clock: Clock, ranks: int) -> None:
        self._clock, self._ranks = clock, ranks
        self.hidden: dist.ProcessGroup | None = None
        self.last: dist.ProcessGroup | None = None
        self.empty = False
        self.clear()

    def clear(self) -> None:
        """Before each iteration."""
        self.posted: list[Any] = []
        self.done: dict[int, Any] = {}
        self.sizes: list[int] = []

    def hook(self, _: object, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations
        """Of a bucket that is ready, the future of its mean over all ranks."""
        number = bucket.index()
        if number != len(self.posted):
            raise UserError(f"bucket {number} came after {len(self.posted)} others: ranks may hang")
        buffer = bucket.buffer()
        self.sizes.append(buffer.nbytes)
        buffer.div_(self._ranks)
        self.posted.append(self._clock.now())
        if self.empty:
            met = dist.all_reduce(buffer.new_zeros(1), async_op=True)
            return met.get_future().then(lambda _: buffer)
        group = self.last if bucket.is_last() else self.hidden
        work = dist.all_reduce(buffer, group=group, async_op=True)

        def ended(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            self.done[number] = self._clock.now()
            return future.value()[0]

        return work.get_future().then(ended)


class Passage(NamedTuple):
    """An iteration of one rank: seconds from its start; posted_s, done_s : (buckets,)."""

    forward_s: float
    backward_s: float
    end_s: float
    posted_s: Floats
    done_s: Floats

    @classmethod
    def from_array(cls, values: Floats) -> Passage:
        """Whose fields follow one another in an array (3 + 2 buckets,)."""
        posted, done = values[3:].reshape(2, -1)
        forward_s, backward_s, end_s = values[:3].tolist()
        return cls(forward_s, backward_s, end_s, posted, done)

    def timeline(self, rank: int, sizes: Sequence[int], carried: tuple[int, int]) -> Timeline:
        """Its spans. A message is under way from its post, or from when its group has a place for it.

        carried : how many messages at once the groups carry of the hidden ones, and of the last; 0: one
            group carries all, as many as the other number says
        """
        hidden, last = carried
        computed_s = float(self.posted_s[-1]) if len(self.posted_s) else self.backward_s
        free_s = turn_s(self.done_s, hidden or last)
        if hidden and last:
            free_s[-1] = 0.0
        start_s = np.minimum(np.maximum(self.posted_s, free_s), self.done_s)
        spans = [
            ("forward", -1, 0.0, self.forward_s),
            ("backward", -1, self.forward_s, computed_s),
            ("wait", -1, computed_s, self.backward_s),
            ("update", -1, self.backward_s, self.end_s),
        ]
        messages = zip(start_s, self.done_s, strict=True)
        spans += [("all_reduce", k, start, end) for k, (start, end) in enumerate(messages)]
        return Timeline.from_rows(
            {
                "task": kind if group < 0 else f"{kind} {group}",
                "kind": kind,
                "stream": "communication" if group >= 0 else "compute",
                "rank": rank,
                "group": group,
                "origin": "measured",
                "start_s": start,
                "end_s": max(start, end),
                "bytes": sizes[group] if group >= 0 else 0,
            }
            for kind, group, start, end in spans
        )


class Wrapped:
    """A network under one plan, ready to be trained under any policy."""

    def __init__(self, me: Rank, network: nn.Module, asked: Sequence[int]) -> None:
        options = {"bucket_cap_mb_list": [size / MIB for size in asked]} if asked else {}
        self.clock = Clock(me.device)
        self.router = Router(self.clock, me.world_size)
        model: Any = DistributedDataParallel
        self.model = model(
            copy.deepcopy(network),
            device_ids=[me.device.index] if me.device.type == "cuda" else None,
            init_sync=False,  # equal seeds made equal weights
            broadcast_buffers=False,
            **options,
        )
        self.model.register_comm_hook(None, self.router.hook)
        # Rate 0 is the same arithmetic, but the weights stay put: every iteration computes the same.
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0, momentum=0.9)
        self._settle = synchronizer(me.device)
        self.buckets: list[int] = []

    def warm_up(self, batch: Batch) -> None:
        """Have DDP settle on its buckets, which it does after the first iteration."""
        for _ in range(WARMUP):
            self.iterate(batch)
        self.buckets = list(self.router.sizes)

    def iterate(self, batch: Batch) -> list[Any]:
        """One iteration; its start, and the ends of forward, backward and update."""
        now = self.clock.now
        self.router.clear()
        points = [now()]
        loss = nn.functional.cross_entropy(self.model(batch[0]), batch[1])
        points.append(now())
        loss.backward()
        points.append(now())
        self.optimizer.step()
        self.optimizer.zero_grad()
        points.append(now())
        return points

    def passage(self, batch: Batch) -> Floats:
        """(3 + 2 buckets,) the Passage of one iteration, once the device is done."""
        start, *points = self.iterate(batch)
        self._settle()
        done = [self.router.done[number] for number in range(len(self.router.posted))]
        points += [*self.router.posted, *done]
        return np.array([self.clock.seconds(start, point) for point in points])

    def alone(self, batch: Batch, iterations: int) -> float:
        """Return median seconds of an iteration without exchange and buckets, after one that is not timed."""
        with self.model.no_sync():
            rows = [self._ends(batch)[1] for _ in range(1 + iterations)]
        self._forget()
        return float(np.median(rows[1:]))

    def met(self, batch: Batch, iterations: int) -> Floats:
        """Return (iterations, 2) seconds until the first bucket's post, and the end.

        One number is sent for each bucket, after one iteration that is not timed.
        """
        self.router.empty = True
        rows = [self._ends(batch) for _ in range(1 + iterations)]
        self.router.empty = False
        self._forget()
        return np.array(rows[1:])

    def _ends(self, batch: Batch) -> list[float]:
        start, *_, end = self.iterate(batch)
        self._settle()
        first = self.router.posted[0] if self.router.posted else end
        return [self.clock.seconds(start, point) for point in (first, end)]

    def _forget(self) -> None:
        """Set momenta to zero, which are of gradients that are this rank's own."""
        for state in self.optimizer.state.values():
            state["momentum_buffer"].zero_()


# -- all of them in turn -----------------------------------------------------------------------


class _Trial:
    """The rounds of a job on this rank; every rank does alike."""

    def __init__(self, me: Rank, settings: SharedTrainingSettings) -> None:
        self.me, self.settings = me, settings
        self.groups = Groups(me)
        self.policies = self.groups.made(settings.policies)
        self.wrapped: dict[str, Wrapped] = {}
        self.batches: dict[int, Batch] = {}

    def run(self) -> Iterator[Tables]:
        """Yield tables of all rounds, each cell's as soon as it is measured."""
        yield {"sharing_control": self.groups.control()}
        settings = self.settings
        if not self.policies:
            raise UserError(f"shared training: {next(iter(self.groups.why.values()))}")
        self._prepare()
        if not (self.wrapped and self.batches):
            raise UserError(f"shared training of {settings.network}: no batch and plan is possible")
        for repeat in range(settings.repeats):
            for (plan, wrapped), batch in itertools.product(self.wrapped.items(), self.batches):
                alone_s = self._alone(wrapped, batch)
                for policy in turned(self.policies, repeat):
                    yield self._block(plan, batch, policy, repeat, alone_s[policy.hidden.openmp])
                check_equal_gradients(wrapped.optimizer)
            self.me.say(f"{settings.network}: round {repeat + 1} of {settings.repeats}")

    def _prepare(self) -> None:
        """Build, wrap and warm up what fits."""
        settings, me = self.settings, self.me
        torch.manual_seed(settings.seed)
        network = networks.build(settings.network).to(me.device)
        for batch in settings.batches:
            if not self._fits(network, batch):
                me.say(f"{settings.network}: out of memory at batch {batch}, which is left out")
        for plan, asked in settings.plans.items() if self.batches else ():
            wrapped = Wrapped(me, network, asked)
            self._take(wrapped, self.policies[0])
            wrapped.warm_up(next(iter(self.batches.values())))
            if not asked or list(asked) == wrapped.buckets:
                self.wrapped[plan] = wrapped
            else:
                me.say(f"{settings.network}: DDP made other buckets than {plan}, which is left out")

    def _fits(self, network: nn.Module, batch: int) -> bool:
        """Return whether a batch can be trained on, on every rank; then it is kept."""
        fits = True
        try:
            inputs, labels = networks.sample_batch(self.settings.network, batch, self.me.device)
            inputs = inputs.roll(self.me.rank, dims=-1)  # other data on every rank
            nn.functional.cross_entropy(network(inputs), labels).backward()
        except (MemoryError, RuntimeError) as error:
            if not ran_out_of_memory(error):
                raise
            fits = False
        network.zero_grad()
        if fits := agree_all(fits):
            self.batches[batch] = (inputs, labels)
        return fits

    def _labels(self, plan: str, batch: int) -> dict[str, Any]:
        return {
            "network": self.settings.network,
            "batch": batch,
            **place_columns(self.me),
            "plan": plan,
        }

    def _take(self, wrapped: Wrapped, policy: Policy) -> None:
        wrapped.router.hidden = self.groups.of(policy.hidden)
        wrapped.router.last = self.groups.of(policy.last)

    def _alone(self, wrapped: Wrapped, batch: int) -> dict[int, float]:
        """Seconds of an iteration without exchange of the slowest rank, by computing threads."""
        counts = sorted({policy.hidden.openmp for policy in self.policies})
        found = []
        for openmp in counts:
            dist.barrier()
            with computing_with(openmp):
                found.append(wrapped.alone(self.batches[batch], self.settings.iterations))
        return dict(zip(counts, slowest(found).tolist(), strict=True))

    def _block(
        self, plan: str, batch: int, policy: Policy, repeat: int, alone_s: float
    ) -> dict[str, pd.DataFrame]:
        """The iterations of one cell in one round."""
        wrapped, data = self.wrapped[plan], self.batches[batch]
        self._take(wrapped, policy)
        with computing_with(policy.hidden.openmp):
            dist.barrier()
            empty = wrapped.met(data, self.settings.empty) if self.settings.empty else None
            wrapped.iterate(data)  # threads and caches as this policy leaves them
            before = processor_times()
            seen = [wrapped.passage(data) for _ in range(self.settings.iterations)]
            used = processor_usage(before, processor_times())
        everybody = everyones(np.array(seen))  # (ranks, iterations, 3 + 2 buckets)
        busy, stolen = slowest([used.busy, used.stolen]).tolist()
        labels = self._labels(plan, batch) | policy.columns()
        labels |= {"buckets": len(wrapped.buckets), "bytes": sum(wrapped.buckets), "repeat": repeat}
        usage = {"processor_load": busy, "stolen": stolen, "compute_s": alone_s}
        hidden, last = (1 if way.on_gpu else way.threads for way in (policy.hidden, policy.last))
        carried = (hidden if policy.two else 0, last)
        rows = []
        for number, ranks in enumerate(everybody.transpose(1, 0, 2)):
            rank = int(ranks[:, 2].argmax())
            passage = Passage.from_array(ranks[rank])
            times = breakdown(passage, passage.timeline(rank, wrapped.buckets, carried))
            rows.append({**labels, "iteration": number, **times, **usage})
        tables = {"sharing_iterations": pd.DataFrame(rows)}
        if empty is not None:
            first_s, empty_s = everyones(empty).transpose(2, 0, 1)  # each (ranks, iterations)
            means = {"first_post_s": first_s.max(axis=0).mean(), "empty_s": empty_s.mean()}
            means |= {"iteration_s": everybody[:, :, 2].mean()}
            tables[PERIODS] = pd.DataFrame([labels | means])
        if repeat == 0:
            spans = [
                Passage.from_array(one).timeline(rank, wrapped.buckets, carried).to_frame()
                for rank, one in enumerate(everybody[:, 0])
            ]
            named = {**self._labels(plan, batch), "configuration": policy.name}
            cells = pd.DataFrame([named])
            tables[SPANS] = cells.merge(pd.concat(spans, ignore_index=True), how="cross")
        return tables


def breakdown(passage: Passage, spans: Timeline) -> dict[str, float]:
    """Columns that say where an iteration's time went, in seconds."""
    by_kind = dict(zip(spans.kind.tolist(), spans.end_s - spans.start_s, strict=True))
    communication_s = spans.busy_s(COMMUNICATION)
    overlap_s = spans.overlap_s()
    return {
        "iteration_s": passage.end_s,
        "forward_s": passage.forward_s,
        "backward_s": float(by_kind["backward"]),
        "update_s": float(by_kind["update"]),
        "communication_s": communication_s,
        "overlap_s": overlap_s,
        "exposed_communication_s": communication_s - overlap_s,
    }
