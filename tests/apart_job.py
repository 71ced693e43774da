"""A job whose ranks are left with gradients of their own, for `ddlkit.jobs.launch`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd
import torch

from ddlkit.jobs.rank import Rank, Tables, job
from ddlkit.measure.given import Training
from ddlkit.measure.training import wrap_and_rebuild
from faulty_job import FaultySettings
from given_models import Net, X


@job(FaultySettings, "drift")
def apart_job(me: Rank, settings: FaultySettings) -> Iterator[Tables]:
    """Train by DDP, which does not know of a tensor that is trained all the same, on each rank's samples."""
    model, x = Net(), X * (1 + me.rank)
    late = model.head.bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    def loss() -> Any:
        late.requires_grad_(True)
        return model(x)["logits"].square().mean()

    wrap_and_rebuild(Training("apart", model, loss, optimizer))
    yield {"drift": pd.DataFrame()}
