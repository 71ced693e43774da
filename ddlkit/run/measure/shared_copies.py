"""What DDP takes for buckets that nobody sends: its hooks, and copies of gradients into buckets and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
import torch.distributed as dist

from ddlkit.core.errors import UserError
from ddlkit.core.units import format_seconds
from ddlkit.run.jobs.job import Tables, job
from ddlkit.run.jobs.rank import Rank, slowest
from ddlkit.run.measure.layers import computing
from ddlkit.run.measure.shared_training import Wrapped
from ddlkit.run.measure.shares import place_columns
from ddlkit.run.measure.training import PRECISION
from ddlkit.run.nets import registry as networks

COLUMNS = ("alone_s", "bucketed_s")


@dataclass(frozen=True)
class SharedCopiesSettings:
    """Iterations of ``network`` at each batch, with buckets and without; nothing is ever sent.

    repeats, iterations : rounds over all batches, and timed iterations of each in a round

    Raises UserError where there is nothing to measure.
    """

    network: str
    batches: Sequence[int]
    repeats: int = 6
    iterations: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.batches or min(self.repeats, self.iterations) < 1:
            raise UserError("shared copies: needs a batch, a round and an iteration at least")


@job(SharedCopiesSettings, "sharing_copies")
def shared_copies_job(me: Rank, settings: SharedCopiesSettings) -> Iterator[Tables]:
    """All ranks at once; seconds of an iteration by the slowest rank, median of a round.

    ``alone_s`` has neither buckets nor messages; ``bucketed_s`` has DDP's buckets, filled, divided by the
    ranks, handed to a hook that sends nothing, and copied back.
    """
    with computing(f"buckets of {settings.network}", me.device, PRECISION):
        torch.manual_seed(settings.seed)
        wrapped = Wrapped(me, networks.build(settings.network).to(me.device), ())
        data = {n: networks.sample_batch(settings.network, n, me.device) for n in settings.batches}
        wrapped.warm_up(next(iter(data.values())))
        labels = {"network": settings.network, **place_columns(me)}
        labels |= {"buckets": len(wrapped.buckets), "bytes": sum(wrapped.buckets)}
        for repeat in range(settings.repeats):
            rows = []
            for n, batch in data.items():
                found = _pair(wrapped, batch, settings.iterations, repeat)
                rows.append({**labels, "batch": n, "repeat": repeat, **found})
            yield {"sharing_copies": pd.DataFrame(rows)}
            more_s = sum(row["bucketed_s"] - row["alone_s"] for row in rows) / len(rows)
            taken = format_seconds(max(0.0, more_s))
            me.say(f"{settings.network}: round {repeat + 1}, buckets take {taken}")


def _pair(wrapped: Wrapped, batch: Any, iterations: int, repeat: int) -> dict[str, float]:
    """Both columns; which goes first changes from round to round."""
    found = {}
    for name in COLUMNS if repeat % 2 else reversed(COLUMNS):
        dist.barrier()
        found[name] = wrapped.alone(batch, iterations, bucketed=name == "bucketed_s")
    values = slowest([found[name] for name in COLUMNS]).tolist()
    return dict(zip(COLUMNS, values, strict=True))
