"""A job in which rank 1 hangs, for `ddlkit.run.jobs.launch`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import pandas as pd

from ddlkit.run.jobs.job import Tables, job
from ddlkit.run.jobs.rank import Rank, slowest

FOR_EVER_S = 1000.0


@dataclass(frozen=True)
class HangingSettings:
    """There is nothing to say."""


@job(HangingSettings, "drift")
def hanging_job(me: Rank, settings: HangingSettings) -> Iterator[Tables]:
    """Exchange a number, which rank 1 never does."""
    if me.rank == 1:
        time.sleep(FOR_EVER_S)
    slowest([me.rank])
    yield {"drift": pd.DataFrame()}
