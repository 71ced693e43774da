"""A job whose ranks say whether FSDP2 sends what a program has, in that order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pandas as pd
import sharded

from ddlkit.jobs.rank import Rank, Tables, job


@dataclass(frozen=True)
class OrderSettings:
    """How to train, and (collective, bytes) of each message, of which padding may add a hundredth."""

    training: sharded.Settings
    messages: Sequence[tuple[str, int]]


@job(OrderSettings, "drift")
def order_job(me: Rank, settings: OrderSettings) -> Iterator[Tables]:
    """Train one iteration under FSDP2. Raises RuntimeError where its messages are others."""
    (units,) = settings.training.units.values()
    trained = sharded.Sharded(me, settings.training, units)
    trained.iterate()
    seen = trained.seen
    alike = [
        name == said and n_bytes <= size <= 1.01 * n_bytes
        for (said, n_bytes), (name, size) in zip(settings.messages, seen, strict=False)
    ]
    if (
        len(seen) != len(alike)
        or len(alike) != len(settings.messages)
        or not all(alike)
    ):
        raise RuntimeError(f"FSDP2 sent {seen}")
    done = {
        "moment": "end",
        "work": "order",
        "device": "cpu",
        "sample": 0,
        "seconds": 1.0,
    }
    yield {"drift": pd.DataFrame([done])}
