"""A job whose ranks are left with gradients of their own, for `ddlkit.run.jobs.launch`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
import torch

from ddlkit.run.jobs.rank import Rank, Tables, job
from ddlkit.run.measure.training import imposed
from ddlkit.run.nets.given import Training
from faulty_job import FaultySettings
from given_models import Net, X


@job(FaultySettings, "drift")
def apart_job(me: Rank, settings: FaultySettings) -> Iterator[Tables]:
    """Train by DDP, which is told to leave one tensor out, on other samples in each rank."""
    model: Any = Net()
    x = X * (1 + me.rank)
    model._ddp_params_and_buffers_to_ignore = ["head.bias"]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    imposed(Training("apart", model, lambda: model(x)["logits"].square().mean(), optimizer))
    yield {"drift": pd.DataFrame()}
