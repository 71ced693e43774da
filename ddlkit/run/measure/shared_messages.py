"""How long an all-reduce takes by what communication may take, with nothing beside it (sharing Fig 2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist

from ddlkit.core.errors import UserError
from ddlkit.run.instruments.clock import synchronizer
from ddlkit.run.jobs.job import Tables, job
from ddlkit.run.jobs.rank import Rank, slowest
from ddlkit.run.measure.shares import Groups, Policy, place_columns

ELEMENT_BYTES = 4


@dataclass(frozen=True)
class SharedMessagesSettings:
    """All-reduces of each of ``messages``, under each policy in turn.

    messages : (bytes, parts): so many equal messages, posted at once, hold so many bytes together. More
        threads than one help only where there are several
    repeats : rounds over all; the order of the policies moves on by one each round

    Raises UserError for messages without elements, and for a policy that is none or has two groups.
    """

    policies: Sequence[str]
    messages: Sequence[tuple[int, int]]
    repeats: int = 6

    def __post_init__(self) -> None:
        if self.repeats < 1 or not (self.policies and self.messages):
            raise UserError("shared messages: needs a policy, a message and a round at least")
        for n_bytes, parts in self.messages:
            if parts < 1 or n_bytes < parts * ELEMENT_BYTES:
                raise UserError(f"shared messages: {n_bytes} bytes do not make {parts} messages")
        one_group_each(self.policies)


def one_group_each(policies: Sequence[str]) -> None:
    """Raise UserError for a policy that is none, or has two groups."""
    if two := [name for name in policies if Policy.parse(name).two]:
        raise UserError(f"policy {two[0]!r}: such a message is carried by one group: name one")


def turned(policies: Sequence[Policy], repeat: int) -> list[Policy]:
    """Return the policies in the order of that round, which moves on by one from round to round."""
    shift = repeat % len(policies)
    return [*policies[shift:], *policies[:shift]]


class Volume:
    """So many equal messages of a rank.

    parts : (count, elements)
    """

    def __init__(self, me: Rank, n_bytes: int, count: int) -> None:
        elements = n_bytes // count // ELEMENT_BYTES
        self._start = torch.ones(count, elements, device=me.device)
        self.parts = self._start.clone()
        self._expected = float(me.world_size)
        self.bytes = self.parts.nbytes

    def reset(self) -> None:
        """As before: sums of sums grow."""
        self.parts.copy_(self._start)

    def post(self, group: dist.ProcessGroup) -> list[dist.Work]:
        """All of them on their way."""
        return [dist.all_reduce(part, group=group, async_op=True) for part in self.parts]

    def check(self) -> None:
        """Raise UserError unless every sum is right."""
        if not bool((self.parts == self._expected).all()):
            raise UserError("shared messages: sums came out wrong: no time is recorded")


@job(SharedMessagesSettings, "sharing_control", "sharing_messages")
def shared_messages_job(me: Rank, settings: SharedMessagesSettings) -> Iterator[Tables]:
    """One round after the other; seconds until the last of the messages is there, of the slowest rank.

    Raises UserError for wrong sums, and where no configuration takes effect.
    """
    groups = Groups(me)
    policies = groups.made(settings.policies)
    yield {"sharing_control": groups.control()}
    if not policies:
        raise UserError(f"shared messages: {next(iter(groups.why.values()))}")
    volumes = {one: Volume(me, *one) for one in settings.messages}
    for policy in policies:  # first messages find connections that are slow to start
        for volume in volumes.values():
            once(me, volume, groups.of(policy.hidden))
    for repeat in range(settings.repeats):
        order = turned(policies, repeat)
        rows: list[dict[str, Any]] = []
        for (_, parts), volume in volumes.items():
            seconds = [once(me, volume, groups.of(policy.hidden)) for policy in order]
            for policy, taken_s in zip(order, slowest(seconds), strict=True):
                labels = {**place_columns(me), **policy.columns()}
                size = {"bytes": volume.bytes, "parts": parts}
                rows.append({**labels, **size, "repeat": repeat, "seconds": taken_s})
        yield {"sharing_messages": pd.DataFrame(rows)}
    me.say(f"messages: {settings.repeats} rounds of {len(policies)} configurations")


def once(me: Rank, volume: Volume, group: dist.ProcessGroup) -> float:
    """Seconds of all messages of a volume on this rank, which starts with the others; sums are checked."""
    volume.reset()
    wait = synchronizer(me.device)
    wait()
    dist.barrier()
    wait()
    start_s = perf_counter()
    for work in volume.post(group):
        work.wait()
    wait()
    seconds = perf_counter() - start_s
    volume.check()
    return seconds
