"""How long an all-reduce takes by what communication may take, with nothing beside it (sharing Fig 2)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from time import perf_counter

import pandas as pd
import torch
import torch.distributed as dist

from ddlkit.core.errors import UserError
from ddlkit.run.jobs.rank import Rank, Tables, job, slowest
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
    """So many equal messages of a rank; parts : (count, elements)."""

    def __init__(self, me: Rank, n_bytes: int, count: int) -> None:
        self.parts = torch.ones(count, n_bytes // count // ELEMENT_BYTES)
        self.bytes, self._expected = self.parts.nbytes, float(me.world_size)

    def post(self, group: dist.ProcessGroup) -> list[dist.Work]:
        """Put all of them on their way."""
        return [dist.all_reduce(part, group=group, async_op=True) for part in self.parts]

    def check(self) -> None:
        """Begin anew: sums of sums grow. Raises UserError unless every sum is right."""
        if not bool((self.parts == self._expected).all()):
            raise UserError("shared messages: sums came out wrong: no time is recorded")
        self.parts.fill_(1.0)

    def once(self, group: dist.ProcessGroup) -> float:
        """Return seconds of all of them on this rank, which starts with the others; sums are checked."""
        dist.barrier()
        start_s = perf_counter()
        for work in self.post(group):
            work.wait()
        seconds = perf_counter() - start_s
        self.check()
        return seconds


@job(SharedMessagesSettings, "sharing_control", "sharing_messages")
def shared_messages_job(me: Rank, settings: SharedMessagesSettings) -> Iterator[Tables]:
    """Yield one round after the other; seconds until the last of the messages is there, of the slowest rank.

    Raises UserError for wrong sums, on a GPU, and where no configuration takes effect.
    """
    groups = Groups(me)
    policies = groups.made(settings.policies)
    yield {"sharing_control": groups.control()}
    volumes = {size: Volume(me, *size) for size in settings.messages}
    for policy in policies:  # first messages find connections that are slow to start
        for volume in volumes.values():
            volume.once(groups.of(policy.hidden))
    for repeat in range(settings.repeats):
        order = turned(policies, repeat)
        rows = []
        for (_, parts), volume in volumes.items():
            seconds = [volume.once(groups.of(policy.hidden)) for policy in order]
            for policy, taken_s in zip(order, slowest(seconds), strict=True):
                size = {"bytes": volume.bytes, "parts": parts}
                rows.append({**policy.columns(), **size, "repeat": repeat, "seconds": taken_s})
        yield {"sharing_messages": pd.DataFrame(rows).assign(**place_columns(me))}
    me.say(f"messages: {settings.repeats} rounds of {len(policies)} configurations")
