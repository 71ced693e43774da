"""Selection that competes with the backward pass for the cores, beside each of the two alone.

Where gradients are selected while others are still computed, both take longer. Here one thread selects from
tensors of random numbers, again and again, while another one trains a network; then each runs alone. The
phases take turns, so that a machine that slows down slows all of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pandas as pd
import torch
from torch.nn import functional

from ddlkit.core.sparse import selected
from ddlkit.run.instruments import clock
from ddlkit.run.measure.layers import computing
from ddlkit.run.measure.selection import topk
from ddlkit.run.nets import registry
from ddlkit.store.readers import SELECTOR

Step = Callable[[], object]
ALONE, BESIDE = "alone", "beside"
BACKWARD = "backward"
LEAST_STEPS, LEAST_S = 2, 0.3
"""Of either in each phase: one short selection behind a backward pass would find nothing in the caches."""


def measure_beside_backward(
    network: str, batch: int, elements: int, density: float, rounds: int, device: str = "cpu"
) -> pd.DataFrame:
    """Table ``selection``: seconds of one selection and of one backward pass, alone and beside the other.

    Operations: SELECTOR and "backward", each with _alone and _beside. A round is one phase of each: the
    selection alone, the backward pass alone, both; its row is a phase's mean. Raises UserError for an
    unknown network, and where memory runs out.
    """
    what = f"selecting from {elements} elements beside {network}"
    with computing(what, device) as place:
        select, step = _selecting(elements, density, place), _training(network, batch, place)
        found: dict[str, list[float]] = {}
        for number in range(rounds + 1):
            for name, seconds in _round(select, step).items():
                if number:  # the first round warms up
                    found.setdefault(name, []).append(seconds)
        labels = {
            "device": place.type,
            "dtype": "float32",
            "threads": torch.get_num_threads() if place.type == "cpu" else 0,
            "elements": elements,
            "density": density,
            "distribution": "normal",
        }
        samples = {name: np.array(seconds) for name, seconds in found.items()}
        return clock.rows_by("operation", samples, labels)


def _round(select: Step, step: Step) -> dict[str, float]:
    """Mean seconds of each operation in the three phases of a round."""
    found = {f"{SELECTOR}_{ALONE}": _phase(select), f"{BACKWARD}_{ALONE}": _phase(step)}
    with _again_and_again(step) as passes:
        selections: list[float] = []
        while len(passes) < LEAST_STEPS or len(selections) < LEAST_STEPS:
            selections.append(_timed(select))
    return {
        **found,
        f"{SELECTOR}_{BESIDE}": float(np.mean(selections)),
        f"{BACKWARD}_{BESIDE}": float(np.mean(passes[:-1] or passes)),  # the last one ends alone
    }


def _phase(action: Step) -> float:
    """Mean seconds of the action over a phase; its cost is that of the calls, however short they are."""
    steps, start = 0, time.perf_counter()
    while steps < LEAST_STEPS or time.perf_counter() - start < LEAST_S:
        action()
        steps += 1
    return (time.perf_counter() - start) / steps


def _timed(action: Step) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


@contextmanager
def _again_and_again(action: Step) -> Iterator[list[float]]:
    """Seconds of each time that another thread has run the action by now; what it raises is raised here."""
    seconds: list[float] = []
    failed: list[BaseException] = []
    stopped = threading.Event()

    def run() -> None:
        try:
            while not stopped.is_set():
                seconds.append(_timed(action))
        except BaseException as error:
            failed.append(error)
            seconds.extend([np.nan] * LEAST_STEPS)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield seconds
    finally:
        stopped.set()
        thread.join()
    if failed:
        raise failed[0]


def _selecting(elements: int, density: float, place: torch.device) -> Step:
    magnitudes = torch.randn(elements, device=place).abs()
    k = selected(elements, density)
    return lambda: topk(magnitudes, k).cpu()


def _training(network: str, batch: int, place: torch.device) -> Step:
    """Forward once, then only the backward pass of it again and again: the graph is kept."""
    generator = torch.Generator().manual_seed(0)
    inputs, labels = registry.find(network).sample(batch, generator)
    loss = functional.cross_entropy(
        registry.build(network).to(place)(inputs.to(place)), labels.to(place)
    )

    def step() -> object:
        loss.backward(retain_graph=True)
        return loss.item()

    return step
