"""Random workloads, plans and costs for the laws."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from ddlkit.core.cost import AlphaBeta, MessageCost, Table
from ddlkit.core.plan import FusionPlan
from ddlkit.core.strategies import IterationTimes
from ddlkit.core.workload import Workload

times = st.floats(0, 10, allow_nan=False)
positive = st.floats(0.01, 10)


@st.composite
def workloads(draw: st.DrawFn, max_tensors: int = 12) -> Workload:
    n = draw(st.integers(1, max_tensors))
    backward_s = draw(st.lists(times, min_size=n, max_size=n))
    sizes = draw(st.lists(st.integers(1, 10**8), min_size=n, max_size=n))
    return Workload.from_arrays(draw(times), backward_s, sizes, draw(times))


@st.composite
def costs(draw: st.DrawFn) -> MessageCost:
    if draw(st.booleans()):
        return AlphaBeta(draw(st.floats(0, 1)), draw(st.floats(0, 1e-6)))
    seconds = draw(st.lists(st.floats(1e-6, 10), min_size=4, max_size=4))
    return Table(np.array([1e3, 1e5, 1e6, 1e8]), np.sort(seconds))


@st.composite
def plans(draw: st.DrawFn, n: int) -> FusionPlan:
    inner = draw(st.sets(st.integers(1, n - 1))) if n > 1 else set()
    return FusionPlan("drawn", (*sorted(inner), n))


def random_workload(rng: np.random.Generator, n: int) -> Workload:
    """Times and sizes spread over decades, as in real networks."""
    return Workload.from_arrays(
        rng.uniform(0, 1),
        10 ** rng.uniform(-4, 0, n),
        (10 ** rng.uniform(2, 8, n)).astype(int),
        rng.uniform(0, 0.1),
    )


@st.composite
def iterations(draw: st.DrawFn) -> IterationTimes:
    layers = draw(
        st.lists(st.tuples(positive, positive, positive), min_size=1, max_size=6)
    )
    forward, backward, sent = (np.array(column) for column in zip(*layers, strict=True))
    fetched = draw(positive), draw(positive)
    return IterationTimes(*fetched, forward, backward, sent, draw(positive))
