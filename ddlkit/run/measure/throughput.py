"""Images per second: whole training iterations in a row, forward to optimizer, on one device."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pandas as pd

from ddlkit.run.instruments.clock import Budget, measure_on, sample_rows
from ddlkit.run.measure.layers import Training, arithmetic, device_named, memory_for
from ddlkit.run.sessions.session import all_or_partial

SHARING_TABLE_2 = ("alexnet", "vgg16", "vgg19", "resnet18", "resnet50", "resnet101", "vit_b_16")
INPUTS = 4  # batches that take turns


def measure_throughput(
    network: str,
    batches: Sequence[int],
    *,
    device: str,
    precision: str,
    iterations: int,
    budget: Budget,
) -> pd.DataFrame:
    """Table ``throughput``: seconds of one iteration, each sample the mean of ``iterations`` in a row.

    Nobody waits for the device between the iterations of a sample, as in training; on CUDA its own
    clock is read before the first and after the last. Images per second are batch / seconds. The data
    lie on the device, a few batches taking turns; reading and copying them is not in it.

    budget : for each batch size

    Raises UserError as `profile_layers` does, and Partial when memory ran out at a batch size: with
    the smaller ones, if there are any.
    """
    return all_or_partial(
        "throughput",
        (
            _one_batch(network, batch, device, precision, iterations, budget)
            for batch in sorted(batches)
        ),
    )


def _one_batch(
    network: str, batch: int, device: str, precision: str, iterations: int, budget: Budget
) -> pd.DataFrame:
    place = device_named(device)
    what = f"{network} at batch {batch} in {precision} on {device}"
    with arithmetic(precision, place, None), memory_for(what):
        training = Training(network, batch, place, precision)
        inputs = itertools.cycle([training.inputs.roll(n, dims=-1) for n in range(INPUTS)])

        def train() -> None:
            for _ in range(iterations):
                training.inputs = next(inputs)
                training.iterate(lambda: None)

        seconds = measure_on(place, train, budget) / iterations
    labels = {
        "network": network,
        "device": place.type,
        "batch": batch,
        "precision": precision,
        "ranks": 1,
        "iterations": iterations,
    }
    return sample_rows(labels, seconds)
