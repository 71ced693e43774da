"""A job in which rank 1 hangs, for `ddlkit.jobs.launch`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import pandas as pd

from ddlkit.jobs.rank import Rank, Tables, job, slowest


@dataclass(frozen=True)
class FaultySettings:
    """Nothing."""


@job(FaultySettings, "drift")
def faulty_job(me: Rank, settings: FaultySettings) -> Iterator[Tables]:
    """Exchange a number, which rank 1 never does."""
    if me.rank == 1:
        time.sleep(1000.0)
    slowest([me.rank])
    yield {"drift": pd.DataFrame()}
