"""Real data-parallel training while communication may take more or less (sharing Fig 4 to 8, and 5).

DistributedDataParallel hands its buckets to a hook of ours, which sends each over the group of ranks whose
configuration is on trial (`ddlkit.run.measure.shares`). So one copy of a network serves all of them, and
they are changed between iterations, in turn.

Two groups cannot deadlock here. DDP hands over buckets in the order of their numbers, on every rank, and the
hook refuses any other; each group carries what it is given in that order. So whichever message comes first
of those that are not complete, every rank has posted it, or will without waiting for another, and on every
rank nothing stands before it in its group.
"""

from __future__ import annotations

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

from ddlkit.core.errors import UserError
from ddlkit.core.link import turn_s
from ddlkit.core.timeline import COMMUNICATION, Timeline
from ddlkit.run.jobs.rank import Floats, Rank, Tables, everyones, job, slowest
from ddlkit.run.measure.layers import computing
from ddlkit.run.measure.shared_messages import turned
from ddlkit.run.measure.shares import Groups, Policy, place_columns
from ddlkit.run.measure.training import OWN_PLAN, PRECISION, WARMUP, check_equal_gradients, wrap
from ddlkit.run.nets import registry as networks
from ddlkit.run.vitals import processor_times, processor_usage

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


@job(SharedTrainingSettings, "sharing_control", "sharing_iterations", SPANS, PERIODS)
def shared_training_job(me: Rank, settings: SharedTrainingSettings) -> Iterator[Tables]:
    """Yield every batch, plan and policy once in a round; the policies' order moves on by one each round.

    sharing_control : what became of each configuration
    sharing_iterations : an iteration of the rank that was slowest in it. ``backward_s`` ends with the last
        bucket's post, ``compute_s`` is the median iteration of the round without exchange
    sharing_spans : the first timed iteration of each, of all ranks
    sharing_periods : seconds from one iteration to the next, mean of all ranks: with empty messages just
        before, and with whole ones. The slowest rank's own is longer: who begins late waits less.
        ``first_post_s`` ends, among empty ones, when the last rank has posted its first bucket

    Plans of which DDP makes other buckets are said and left out. Raises UserError where no plan or
    configuration remains, out of memory, and for ranks that hold different gradients.
    """
    with computing(f"shared training of {settings.network}", me.device, PRECISION):
        trial = _Trial(me, settings)
        yield {"sharing_control": trial.groups.control()}
        for repeat in range(settings.repeats):
            for (plan, wrapped), batch in itertools.product(trial.wrapped.items(), trial.batches):
                yield from trial.rounds(plan, wrapped, batch, repeat)
            me.say(f"{settings.network}: round {repeat + 1} of {settings.repeats}")


# -- one iteration -----------------------------------------------------------------------------


class Router:
    """DDP's communication hook: it sends each bucket over the group that the policy has for it.

    empty : whether it sends one number instead, that ranks meet for; it then only says that all is done
    posted, done : points in time, by the bucket's number; sizes : bytes
    """

    def __init__(self, ranks: int) -> None:
        self._ranks, self.empty = ranks, False
        self.hidden: dist.ProcessGroup | None = None
        self.last: dist.ProcessGroup | None = None
        self.clear()

    def clear(self) -> None:
        """Forget what was posted, before each iteration."""
        self.posted: list[float] = []
        self.done: dict[int, float] = {}
        self.sizes: list[int] = []

    def hook(self, _: object, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations
        """Return, of a bucket that is ready, the future of its mean over all ranks."""
        number = bucket.index()
        if number != len(self.posted):
            raise UserError(f"bucket {number} came after {len(self.posted)} others: ranks may hang")
        buffer = bucket.buffer()
        self.sizes.append(buffer.nbytes)
        buffer.div_(self._ranks)
        self.posted.append(perf_counter())
        if self.empty:
            met = dist.all_reduce(buffer.new_zeros(1), async_op=True)
            return met.get_future().then(lambda _: buffer)
        group = self.last if bucket.is_last() else self.hidden
        work = dist.all_reduce(buffer, group=group, async_op=True)

        def ended(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            self.done[number] = perf_counter()
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
        """Return that whose fields follow one another in an array (3 + 2 buckets,)."""
        return cls(*values[:3].tolist(), *values[3:].reshape(2, -1))

    def timeline(self, rank: int, sizes: Sequence[int], carried: tuple[int, int]) -> Timeline:
        """Return its spans. A message is under way from its post, or from when its group has a place for it.

        carried : how many messages at once the groups carry of the hidden ones, and of the last; 0: one
            group carries all, as many as the other number says
        """
        hidden, last = carried
        free_s = turn_s(self.done_s, hidden or last)
        if hidden and last:
            free_s[-1] = 0.0
        start_s = np.minimum(np.maximum(self.posted_s, free_s), self.done_s)
        computed_s = float(self.posted_s[-1]) if len(self.posted_s) else self.backward_s
        ends = (0.0, self.forward_s, computed_s, self.backward_s, self.end_s)
        kinds = ("forward", "backward", "wait", "update")
        spans = [
            (kind, -1, *both) for kind, both in zip(kinds, itertools.pairwise(ends), strict=True)
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


def breakdown(passage: Passage, spans: Timeline) -> dict[str, float]:
    """Return columns that say where an iteration's time went, in seconds."""
    by_kind = dict(zip(spans.kind.tolist(), spans.end_s - spans.start_s, strict=True))
    communication_s, overlap_s = spans.busy_s(COMMUNICATION), spans.overlap_s()
    return {
        "iteration_s": passage.end_s,
        "forward_s": passage.forward_s,
        "backward_s": float(by_kind["backward"]),
        "update_s": float(by_kind["update"]),
        "communication_s": communication_s,
        "overlap_s": overlap_s,
        "exposed_communication_s": communication_s - overlap_s,
    }


class Wrapped:
    """A network under one plan, ready to be trained under any policy."""

    def __init__(self, me: Rank, network: nn.Module, asked: Sequence[int]) -> None:
        self.router = Router(me.world_size)
        self.model, self.optimizer = wrap(me, network, asked)
        self.model.register_comm_hook(None, self.router.hook)
        self.buckets: list[int] = []

    def warm_up(self, batch: Batch) -> None:
        """Have DDP settle on its buckets, which it does after the first iteration."""
        for _ in range(WARMUP):
            self.passage(batch)
        self.buckets = list(self.router.sizes)

    def passage(self, batch: Batch) -> Floats:
        """Return (3 + 2 buckets,) the Passage of one iteration."""
        self.router.clear()
        start_s = perf_counter()
        loss = nn.functional.cross_entropy(self.model(batch[0]), batch[1])
        ends_s = [perf_counter()]
        loss.backward()
        ends_s.append(perf_counter())
        self.optimizer.step()
        self.optimizer.zero_grad()
        ends_s.append(perf_counter())
        done_s = [self.router.done[number] for number in sorted(self.router.done)]
        return np.array([*ends_s, *self.router.posted, *done_s]) - start_s

    def alone(self, batch: Batch, iterations: int) -> float:
        """Return median seconds of an iteration without exchange and buckets, after one that is not timed."""
        with self.model.no_sync():
            ends_s = [self.passage(batch)[2] for _ in range(1 + iterations)]
        self._forget()
        return float(np.median(ends_s[1:]))

    def met(self, batch: Batch, iterations: int) -> Floats:
        """Return (iterations, 2) seconds until the first bucket's post, and the end.

        One number is sent for each bucket, after one iteration that is not timed.
        """
        self.router.empty = True
        rows = [self.passage(batch)[[3, 2]] for _ in range(1 + iterations)]
        self.router.empty = False
        self._forget()
        return np.array(rows[1:])

    def _forget(self) -> None:
        """Set momenta to zero, which are of gradients that are this rank's own."""
        for state in self.optimizer.state.values():
            state["momentum_buffer"].zero_()


# -- all of them in turn -----------------------------------------------------------------------


class _Trial:
    """What is trained in the rounds of a job on this rank; every rank does alike."""

    def __init__(self, me: Rank, settings: SharedTrainingSettings) -> None:
        self.me, self.settings, self.groups = me, settings, Groups(me)
        self.policies = self.groups.made(settings.policies)
        torch.manual_seed(settings.seed)
        network = networks.build(settings.network)
        self.batches: dict[int, Batch] = {}
        for batch in settings.batches:
            inputs, labels = networks.sample_batch(settings.network, batch, me.device)
            self.batches[batch] = inputs.roll(me.rank, dims=-1), labels  # other data on every rank
        self.wrapped: dict[str, Wrapped] = {}
        for plan, asked in settings.plans.items():
            wrapped = Wrapped(me, network, asked)
            self._take(wrapped, self.policies[0])
            wrapped.warm_up(next(iter(self.batches.values())))
            if not asked or list(asked) == wrapped.buckets:
                self.wrapped[plan] = wrapped
            else:
                me.say(f"{settings.network}: DDP made other buckets than {plan}, which is left out")
        if not self.wrapped:
            raise UserError(f"shared training of {settings.network}: no plan is possible")

    def rounds(self, plan: str, wrapped: Wrapped, batch: int, repeat: int) -> Iterator[Tables]:
        """Yield the tables of one plan and batch in one round, policy by policy."""
        dist.barrier()
        alone_s = wrapped.alone(self.batches[batch], self.settings.iterations)
        columns = {"repeat": repeat, "compute_s": float(slowest([alone_s])[0])}
        place = place_columns(self.me)
        cell = {"network": self.settings.network, "batch": batch, **place, "plan": plan}
        for policy in turned(self.policies, repeat):
            yield self._block(wrapped, self.batches[batch], policy, cell, columns)
        check_equal_gradients(wrapped.optimizer)

    def _take(self, wrapped: Wrapped, policy: Policy) -> None:
        wrapped.router.hidden = self.groups.of(policy.hidden)
        wrapped.router.last = self.groups.of(policy.last)

    def _block(
        self,
        wrapped: Wrapped,
        data: Batch,
        policy: Policy,
        cell: Mapping[str, Any],
        columns: Mapping[str, Any],
    ) -> dict[str, pd.DataFrame]:
        """Return the tables of one policy in one round; ``columns``: its ``repeat`` and ``compute_s``."""
        self._take(wrapped, policy)
        dist.barrier()
        empty = wrapped.met(data, self.settings.empty) if self.settings.empty else None
        wrapped.passage(data)  # threads and caches as this policy leaves them
        before = processor_times()
        seen = [wrapped.passage(data) for _ in range(self.settings.iterations)]
        used = processor_usage(before, processor_times())
        everybody = everyones(np.array(seen))  # (ranks, iterations, 3 + 2 buckets)
        busy, stolen = slowest([used.busy, used.stolen]).tolist()
        labels = {**cell, **policy.columns(), "repeat": columns["repeat"]}
        labels |= {"buckets": len(wrapped.buckets), "bytes": sum(wrapped.buckets)}
        usage = {**columns, "processor_load": busy, "stolen": stolen}
        carried = (policy.hidden.threads if policy.two else 0, policy.last.threads)
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
        if columns["repeat"] == 0:
            spans = [
                Passage.from_array(values).timeline(rank, wrapped.buckets, carried).to_frame()
                for rank, values in enumerate(everybody[:, 0])
            ]
            named = pd.DataFrame([{**cell, "configuration": policy.name}])
            tables[SPANS] = named.merge(pd.concat(spans, ignore_index=True), how="cross")
        return tables
