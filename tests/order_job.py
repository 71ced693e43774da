"""A job whose ranks note which messages FSDP2 sends, in their order."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import sharded

from ddlkit.jobs.rank import Rank, Tables, job

SEEN = "seen.json"


@dataclass(frozen=True)
class OrderSettings:
    """How to train, once for each of several networks."""

    trainings: Sequence[sharded.Settings]


@job(OrderSettings)
def order_job(me: Rank, settings: OrderSettings) -> Iterator[Tables]:
    """Train one iteration of each under FSDP2; rank 0 writes (collective, bytes) of every message to SEEN."""
    seen = []
    for training in settings.trainings:
        (units,) = training.units.values()
        trained = sharded.Sharded(me, training, units)
        trained.iterate()
        seen.append(trained.seen)
    if me.rank == 0:
        (me.out / SEEN).write_text(json.dumps(seen))
    yield {}
