"""A job in which ranks all-reduce floats by a schedule's steps and by the library, and keep both results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ddlkit.core.schedule import Schedule
from ddlkit.run.jobs.job import Tables, job
from ddlkit.run.jobs.rank import Rank
from ddlkit.run.measure.algorithms import SteppedAllReduce


@dataclass(frozen=True)
class SteppedSettings:
    """Which algorithms, and messages of how many floats; fewer than ranks, too."""

    algorithms: Sequence[str]
    elements: Sequence[int]


def drawn(rank: int, elements: int) -> NDArray[np.float32]:
    """(elements,) what a rank contributes."""
    values = np.random.default_rng([rank, elements]).normal(size=elements)
    return values.astype(np.float32)


@job(SteppedSettings)
def stepped_job(me: Rank, settings: SteppedSettings) -> Sequence[Tables]:
    """Twice each, so that the second finds what the first one left; then a file of every rank's results."""
    found: dict[str, Any] = {}
    for elements in settings.elements:
        mine = torch.from_numpy(drawn(me.rank, elements))
        whole = mine.clone()
        dist.all_reduce(whole)
        found[f"library-{elements}"] = whole.numpy()
        for algorithm in settings.algorithms:
            buffer = torch.empty_like(mine)
            stepped = SteppedAllReduce(Schedule.of(algorithm, me.world_size), me.rank, buffer)
            for turn in range(2):
                buffer.copy_(mine)
                stepped()
                found[f"{algorithm}-{elements}-{turn}"] = buffer.numpy().copy()
    np.savez(me.out / f"rank{me.rank}.npz", **found)
    return []
