"""A layer profile out of autograd's events in a trace: which gradient was ready when, and of what size."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ddlkit.core.workload import Floats, LayerProfile
from ddlkit.formats.kineto import (
    EVALUATE,
    Event,
    KinetoTrace,
    TracedIteration,
    iterations,
    with_outermost,
)

ACCUMULATE = "torch::autograd::AccumulateGrad"
NO_LAYER = "unmatched"


def layer_profile(trace: KinetoTrace, network: str, *, batch: int = 1) -> LayerProfile:
    """Return the trace's iterations as one layer profile: medians, rescaled to the medians of the phases.

    A gradient is ready when autograd has accumulated it; its backward is the time since the one before.
    On a GPU these are times of the GPU: when all was done that had been launched until then. A layer is
    the outermost operator of forward whose gradients are accumulated; its time runs until the next
    layer's start and stands with its first tensor, as in `ddlkit.run.measure.layers`. The first layer starts
    with forward. The file tells no names: layers are numbered and called by their operator. It tells
    neither network nor batch size, and no FLOP: these are 0.

    Raises UserError that says what is missing and how to record it, and for iterations that differ.
    """
    each = iterations(trace)
    ready = [_gradients(trace, iteration) for iteration in each]
    sizes = [[(gradient.elements, gradient.bytes) for gradient in one] for one in ready]
    for number, others in enumerate(sizes):
        if others != sizes[0]:
            problem = "accumulates other gradients than iteration 0, or in another order"
            raise trace.missing(f"iteration {number} {problem}")
    layer, _ = _layers(each[0])
    times = [_times(iteration, one) for iteration, one in zip(each, ready, strict=True)]
    forward_s, backward_s, update_s = zip(*times, strict=True)
    elements, n_bytes = np.array(sizes[0][::-1]).T
    return LayerProfile(
        network=network,
        device=trace.device,
        batch=batch,
        tensor=tuple(f"{name}.{layer[:row].count(name)}" for row, name in enumerate(layer)),
        layer=layer,
        parameters=elements,
        gradient_bytes=n_bytes,
        forward_s=_typical(np.array(forward_s)),
        backward_s=_typical(np.array(backward_s)),
        flops=np.zeros(len(elements)),
        update_s=float(np.median(update_s)),
    )


def _gradients(trace: KinetoTrace, iteration: TracedIteration) -> list[Event]:
    """Where gradients are accumulated, in that order."""
    ready = [event for event in iteration.events if event.name == ACCUMULATE]
    if not ready:
        raise trace.missing(f"no gradient is accumulated (no event {ACCUMULATE})")
    if any(not gradient.bytes for gradient in ready):
        lacking = f"no 'Input Dims' and 'Input type' with {ACCUMULATE}"
        raise trace.missing(f"sizes of gradients are missing ({lacking})")
    return ready


def _layers(iteration: TracedIteration) -> tuple[tuple[str, ...], dict[int, float]]:
    """The layer's name of each gradient in forward order, and by its first row when each layer started.

    A layer is the outermost operator of forward that made the gradient's node: the one that autograd
    evaluated last before it. Of the operators with the node's sequence number the one that started last made
    it: those before only bear the next number.
    """
    start_s, end_s = iteration.phases["forward"]
    operators = (
        e for e in iteration.events if e.category == "cpu_op" and start_s <= e.start_s < end_s
    )
    maker = {
        inner.args["Sequence number"]: outer
        for inner, outer in with_outermost(operators)
        if "Sequence number" in inner.args
    }
    layers: list[Event | None] = []
    node: dict[str, int | None] = {}  # of each thread, by its number
    for event in iteration.events:
        if event.name == ACCUMULATE:
            layers.insert(0, maker.get(node.get(event.thread)))
        elif event.name.startswith(EVALUATE) and not event.name.endswith(ACCUMULATE):
            node[event.thread] = event.args.get("Sequence number")
    starts = sorted({layer.start_s for layer in layers if layer})
    names, rows = [], dict[int, float]()
    for row, layer in enumerate(layers):
        number = starts.index(layer.start_s) if layer else -1
        names.append(f"{number}.{layer.name.removeprefix('aten::')}" if layer else NO_LAYER)
        if layer and layer.start_s not in rows.values():
            rows[row] = layer.start_s
    return tuple(names), rows


def _times(iteration: TracedIteration, ready: Sequence[Event]) -> tuple[Floats, Floats, float]:
    """Forward and backward in seconds, (n,) each in forward order, and the update's."""
    done, (_, rows) = _clock(iteration), _layers(iteration)
    phases = iteration.phases
    forward_s = np.zeros(len(ready))
    in_order = sorted(rows, key=lambda row: rows[row]) or [0]
    starts = [done(rows[row]) for row in in_order[1:]]
    forward_end_s = phases["forward"][1]
    forward_s[in_order] = _gaps([_begin(iteration, "forward"), *starts, done(forward_end_s)])
    computed_s = done(max(forward_end_s, phases["backward"][0]))
    backward_s = _gaps([computed_s, *(done(gradient.end_s) for gradient in ready)])[::-1]
    update = phases.get("update")
    update_s = _gaps([_begin(iteration, "update"), done(update[1])])[0] if update else 0.0
    return forward_s, backward_s, float(update_s)


def _gaps(instants_s: Sequence[float]) -> Floats:
    """Times from each instant to the next; none runs backwards."""
    return np.diff(np.maximum.accumulate(instants_s))


def _clock(iteration: TracedIteration) -> Callable[[float], float]:
    """When all that was launched until some instant was done; without a GPU, that very instant."""
    kernels = iteration.kernels
    if not kernels:
        return lambda instant_s: instant_s
    launched_s = np.array([at_s for at_s, _ in kernels])
    ends_s = np.maximum.accumulate([kernel.end_s for _, kernel in kernels])

    def done(instant_s: float) -> float:
        before = int(np.searchsorted(launched_s, instant_s, side="right"))
        return float(ends_s[before - 1]) if before else kernels[0][1].start_s

    return done


def _begin(iteration: TracedIteration, kind: str) -> float:
    """When the work of a phase began: on a GPU, its first kernel."""
    start_s, end_s = iteration.phases[kind]
    if not iteration.kernels:
        return start_s
    starts = [kernel.start_s for at_s, kernel in iteration.kernels if start_s <= at_s < end_s]
    return min(starts, default=_clock(iteration)(start_s))


def _typical(rows: Floats) -> Floats:
    """(n,) medians of (k, n) times, rescaled so that they add up to the median of the sums."""
    medians = np.median(rows, axis=0)
    return medians * (np.median(rows.sum(axis=1)) / medians.sum()) if medians.sum() else medians
