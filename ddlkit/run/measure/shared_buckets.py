"""What DDP takes for each bucket, and for its bytes, where nobody sends them: few buckets against many."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist

from ddlkit.core.errors import UserError
from ddlkit.run.jobs.job import Tables, job
from ddlkit.run.jobs.rank import Rank, slowest
from ddlkit.run.measure.layers import computing
from ddlkit.run.measure.shared_training import Wrapped
from ddlkit.run.measure.shares import place_columns
from ddlkit.run.measure.training import PRECISION
from ddlkit.run.nets import registry as networks


@dataclass(frozen=True)
class SharedBucketsSettings:
    """The same iterations of ``network`` at a batch, with buckets of at most each of ``caps`` bytes.

    repeats, iterations : rounds over all caps, and timed iterations of each in a round

    Raises UserError where there is nothing to measure.
    """

    network: str
    batch: int
    caps: Sequence[int]
    repeats: int = 6
    iterations: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.caps or min(self.batch, self.repeats, self.iterations, *self.caps) < 1:
            raise UserError("shared buckets: needs a cap, a round and an iteration at least")


@job(SharedBucketsSettings, "sharing_buckets")
def shared_buckets_job(me: Rank, settings: SharedBucketsSettings) -> Iterator[Tables]:
    """All ranks at once, every cap in turn, the order moved on by one each round; by the slowest rank.

    ``alone_backward_s`` and ``alone_s`` end backward and iteration without buckets; ``posted_s``,
    ``backward_s`` and ``bucketed_s`` the last bucket's post, backward and iteration with buckets that nobody
    sends. Medians of a round.
    """
    with computing(f"buckets of {settings.network}", me.device, PRECISION):
        torch.manual_seed(settings.seed)
        network = networks.build(settings.network).to(me.device)
        batch = networks.sample_batch(settings.network, settings.batch, me.device)
        wrapped = {cap: Wrapped(me, network, [cap]) for cap in settings.caps}
        for one in wrapped.values():
            one.warm_up(batch)
        labels = {"network": settings.network, "batch": settings.batch, **place_columns(me)}
        for repeat in range(settings.repeats):
            shift, rows = repeat % len(settings.caps), []
            for cap in (*settings.caps[shift:], *settings.caps[:shift]):
                one = wrapped[cap]
                sizes = {"buckets": len(one.buckets), "bytes": sum(one.buckets)}
                found = _halves(one, batch, settings.iterations, repeat)
                rows.append({**labels, "cap_bytes": cap, **sizes, "repeat": repeat, **found})
            yield {"sharing_buckets": pd.DataFrame(rows)}
            me.say(f"{settings.network}: round {repeat + 1} of {settings.repeats}, buckets")


def _halves(wrapped: Wrapped, batch: Any, iterations: int, repeat: int) -> dict[str, float]:
    """Columns of both halves; which goes first changes from round to round."""
    names = {
        False: ("alone_backward_s", "alone_s"),
        True: ("posted_s", "backward_s", "bucketed_s"),
    }
    found: dict[str, float] = {}
    for bucketed in (False, True) if repeat % 2 else (True, False):
        dist.barrier()
        seconds = slowest(np.median(wrapped.unsent(batch, iterations, bucketed), axis=0))
        found |= dict(zip(names[bucketed], seconds[-len(names[bucketed]) :].tolist(), strict=True))
    return found
