"""Kernels beside a running all-reduce, by what communication may take (sharing 4.2.2, Tab 1, Fig 3).

Both are timed, alone and together: what a kernel loses beside messages, and what these lose beside it. So
many messages are posted that they outlast the kernel, and it is called again and again while they are under
way. All ranks do so at once, as in training. On a GPU the device's own clock must tell: see `contention`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple

import pandas as pd
import torch
import torch.distributed as dist

from ddlkit.core.errors import UserError
from ddlkit.run.jobs.rank import Rank, Tables, job, slowest
from ddlkit.run.measure.contention import Scale, kernels
from ddlkit.run.measure.layers import computing
from ddlkit.run.measure.shared_messages import Volume, one_group_each, turned
from ddlkit.run.measure.shares import Groups, Policy, place_columns

AS_LONG = 2.5  # how long messages last by themselves, over the kernel by itself
LEAST_S = 0.05  # of a kernel, in one call or several: a few slices of the scheduler


@dataclass(frozen=True)
class SharedKernelsSettings:
    """Kernels of `contention.kernels` beside all-reduces under each policy in turn.

    names : of kernels
    message_bytes, parts : of what is sent again and again, so many equal messages of it at once
    repeats : rounds over all; the order of the policies moves on by one each round

    Raises UserError for an unknown kernel, and for a policy that is none or has two groups.
    """

    policies: Sequence[str]
    names: Sequence[str]
    scale: Scale
    message_bytes: int
    parts: int = 4
    repeats: int = 6

    def __post_init__(self) -> None:
        one_group_each(self.policies)
        there = kernels(self.scale)
        if unknown := [name for name in self.names if name not in there]:
            raise UserError(f"unknown kernel {unknown[0]!r}: use one of {', '.join(there)}")
        if self.repeats < 1 or not (self.policies and self.names):
            raise UserError("shared kernels: needs a policy, a kernel and a round at least")


@job(SharedKernelsSettings, "sharing_control", "sharing_kernels")
def shared_kernels_job(me: Rank, settings: SharedKernelsSettings) -> Iterator[Tables]:
    """Yield one kernel after the other, each in all rounds; seconds of the slowest rank.

    Raises UserError on a GPU, where no configuration takes effect, and out of memory.
    """
    groups = Groups(me)
    policies = groups.made(settings.policies)
    yield {"sharing_control": groups.control()}
    for name in settings.names:
        with computing(f"{name} beside all-reduces", me.device), torch.no_grad():
            pair = _Pair(groups, settings, name, policies)
            for repeat in range(settings.repeats):
                rows = [pair.row(policy) for policy in turned(policies, repeat)]
                frame = pd.DataFrame(rows).assign(**place_columns(me), repeat=repeat)
                yield {"sharing_kernels": frame}
        me.say(f"{name}: {settings.repeats} rounds beside {len(policies)} configurations")


class Together(NamedTuple):
    """A kernel and messages at once, on one rank.

    calls : of the kernel that ended while messages were under way, or 1; kernel_s : of one call;
    messages_s : until the last was there; overlap_share : of the kernel's time, in which they were under way
    """

    calls: int
    kernel_s: float
    messages_s: float
    overlap_share: float


def together(start_s: float, calls_s: Sequence[float], messages_s: Sequence[float]) -> Together:
    """Return what was seen, from the ends of calls, one after the other, and of messages, all by one clock.

    >>> together(0.0, [1.0, 2.0, 3.5], [1.5, 3.0])
    Together(calls=2, kernel_s=1.0, messages_s=3.0, overlap_share=1.0)
    >>> together(0.0, [4.0], [1.5, 3.0])
    Together(calls=1, kernel_s=4.0, messages_s=3.0, overlap_share=0.75)
    """
    lasted_s = max(messages_s) - start_s
    calls = max(1, sum(end <= max(messages_s) for end in calls_s))
    kernel_s = (calls_s[calls - 1] - start_s) / calls
    return Together(calls, kernel_s, lasted_s, min(1.0, lasted_s / (calls * kernel_s)))


class _Pair:
    """A kernel and messages on this rank; every rank must call every method alike."""

    def __init__(
        self, groups: Groups, settings: SharedKernelsSettings, name: str, policies: Sequence[Policy]
    ) -> None:
        self._groups = groups
        kernel = kernels(settings.scale)[name]
        self._labels: dict[str, Any] = {"kernel": name, **kernel.columns()}
        self._call = kernel.on(groups.me.device)
        self._call()
        n_bytes, parts = settings.message_bytes, settings.parts
        volume = Volume(groups.me, n_bytes, parts)
        # Every policy has the same work: enough for the fastest messages.
        fastest_s = min(volume.once(groups.of(policy.hidden)) for policy in policies)
        call_s = self._timed(1)
        kernel_s, message_s = slowest([max(LEAST_S, call_s), -fastest_s])
        count = max(1, math.ceil(AS_LONG * kernel_s / -message_s))
        self._calls = max(1, math.ceil(LEAST_S / call_s))
        self._volume = Volume(groups.me, count * n_bytes, count * parts)
        self._labels |= {"message_bytes": self._volume.bytes // count, "messages": count}

    def row(self, policy: Policy) -> dict[str, Any]:
        """Return what one round has of a policy, as columns."""
        group = self._groups.of(policy.hidden)
        dist.barrier()
        alone_s = self._timed(self._calls) / self._calls
        messages_s = self._volume.once(group)
        both = self._together(group)
        times = [alone_s, both.kernel_s, messages_s, both.messages_s]
        *worst, share, calls = slowest([*times, -both.overlap_share, -both.calls]).tolist()
        names = ("kernel_alone_s", "kernel_beside_s", "messages_alone_s", "messages_beside_s")
        seen = {
            **dict(zip(names, worst, strict=True)),
            "overlap_share": -share,
            "calls": -int(calls),
        }
        return {**self._labels, **policy.columns(), **seen}

    def _timed(self, calls: int) -> float:
        start_s = perf_counter()
        for _ in range(calls):
            self._call()
        return perf_counter() - start_s

    def _together(self, group: dist.ProcessGroup) -> Together:
        """Call the kernel again and again as long as messages are under way."""
        dist.barrier()
        start_s = perf_counter()
        works = self._volume.post(group)
        ended = [work.get_future().then(lambda _: perf_counter()) for work in works]
        calls_s: list[float] = []
        while not calls_s or not all(end.done() for end in ended):
            self._call()
            calls_s.append(perf_counter())
        for work in works:
            work.wait()
        self._volume.check()
        return together(start_s, calls_s, [end.wait() for end in ended])
