"""A job for tests: messages over two groups of ranks, in one order for all."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pandas as pd
import torch
import torch.distributed as dist

from ddlkit.run.jobs.rank import Rank, Tables, everyones, job
from ddlkit.run.measure.shares import Groups


@dataclass(frozen=True)
class TwoGroupsSettings:
    """``messages`` of a policy of two groups, each rank with pauses of its own."""

    policy: str
    messages: int


@job(TwoGroupsSettings, "facts")
def two_groups_job(me: Rank, settings: TwoGroupsSettings) -> Iterator[Tables]:
    """How many sums are wrong."""
    groups = Groups(me)
    (policy,) = groups.made([settings.policy])
    both = [groups.of(policy.hidden), groups.of(policy.last)]
    assert policy.two and both[0] is not both[1]
    chosen, pauses = random.Random(0), random.Random(me.rank)
    tensors, works = [], []
    for _ in range(settings.messages):
        tensors.append(torch.full((50_000,), 1.0))
        group = both[chosen.randrange(2)]
        works.append(dist.all_reduce(tensors[-1], group=group, async_op=True))
        time.sleep(pauses.uniform(0, 0.01))
    for work in works:
        work.wait()
    wrong = sum(not bool((tensor == me.world_size).all()) for tensor in tensors)
    total = str(int(everyones([wrong]).sum()))
    yield {"facts": pd.DataFrame({"subject": ["sums"], "fact": ["wrong"], "value": [total]})}
