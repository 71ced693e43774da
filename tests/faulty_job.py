"""A job in which rank 1 hangs or fails, for `ddlkit.run.jobs.launch`."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import pandas as pd

from ddlkit.run.jobs.rank import Rank, Tables, job, slowest

FOR_EVER_S = 1000.0
ILLEGAL_ADDRESS = """CUDA error: an illegal memory access was encountered
CUDA kernel errors might be asynchronously reported at some other API call.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""


@dataclass(frozen=True)
class FaultySettings:
    """What rank 1 fails of; "": of nothing, but it hangs."""

    error: str


@job(FaultySettings, "drift")
def faulty_job(me: Rank, settings: FaultySettings) -> Iterator[Tables]:
    """Exchange a number, which rank 1 never does."""
    if me.rank == 1 and settings.error:
        raise RuntimeError(settings.error)
    if me.rank == 1:
        time.sleep(FOR_EVER_S)
    slowest([me.rank])
    yield {"drift": pd.DataFrame()}
