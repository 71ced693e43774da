"""A job for tests: messages over two groups of ranks, in one order for all, or in one that hangs."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pandas as pd
import torch
import torch.distributed as dist

from ddlkit.run.jobs.job import Tables, job
from ddlkit.run.jobs.rank import Rank, everyones
from ddlkit.run.measure.shares import Groups, Policy


@dataclass(frozen=True)
class TwoGroupsSettings:
    """``messages`` of a policy of two groups, each rank with pauses of its own.

    crossed : two messages, one over each group, and odd ranks begin with the other's
    """

    policy: str
    messages: int = 2
    crossed: bool = False


@job(TwoGroupsSettings, "facts")
def two_groups_job(me: Rank, settings: TwoGroupsSettings) -> Iterator[Tables]:
    """How many sums are wrong, and how many first messages stood still until the second was posted."""
    groups = Groups(me)
    (policy,) = groups.made([settings.policy])
    both = [groups.of(policy.hidden), groups.of(policy.last)]
    assert Policy.parse(settings.policy).two and both[0] is not both[1]
    chosen, own = random.Random(0), random.Random(me.rank)
    order = [chosen.randrange(2) for _ in range(settings.messages)]
    if settings.crossed:
        order = [me.rank % 2, 1 - me.rank % 2]
    tensors, works, stood = [], [], 0
    for group in order:
        tensors.append(torch.full((50_000,), 1.0))
        works.append(dist.all_reduce(tensors[-1], group=both[group], async_op=True))
        time.sleep(0.3 if settings.crossed else own.uniform(0, 0.01))
        stood += settings.crossed and len(works) == 1 and not works[0].is_completed()
        dist.barrier() if settings.crossed else None
    for work in works:
        work.wait()
    wrong = sum(not bool((tensor == me.world_size).all()) for tensor in tensors)
    values = [str(int(value)) for value in everyones([wrong, stood]).sum(axis=0)]
    facts = {"subject": ["sums", "messages"], "fact": ["wrong", "stood still"], "value": values}
    yield {"facts": pd.DataFrame(facts)}
