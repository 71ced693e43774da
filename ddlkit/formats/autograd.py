"""A layer profile out of autograd's events in a trace: which gradient was ready when, and of what size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ddlkit.core.errors import Finding
from ddlkit.core.timeline import COMMUNICATION
from ddlkit.core.units import format_bytes, format_seconds
from ddlkit.core.workload import Floats, LayerProfile
from ddlkit.formats.kineto import (
    EVALUATE,
    Event,
    KinetoTrace,
    TracedIteration,
    iterations,
    timeline,
    with_outermost,
)

ACCUMULATE = "torch::autograd::AccumulateGrad"
NO_LAYER = "unmatched"


def layer_profile(trace: KinetoTrace, network: str, *, batch: int = 1) -> LayerProfile:
    """The trace's iterations as one layer profile: medians, rescaled to the medians of the phases.

    A gradient is ready when autograd has accumulated it; its backward is the time since the one before.
    On a GPU these are times of the GPU: when all was done that had been launched until then. A layer is
    the outermost operator of forward whose gradients are accumulated; its time runs until the next
    layer's start and stands with its first tensor, as in `ddlkit.run.measure.layers`. The first layer starts
    with forward. The file tells no names: layers are numbered and called by their operator. It tells
    neither network nor batch size, and no FLOP: these are 0.

    Raises UserError that says what is missing and how to record it, and for iterations that differ.
    """
    seen = [_seen(trace, iteration) for iteration in iterations(trace)]
    first = seen[0]
    for number, other in enumerate(seen):
        if other.sizes != first.sizes:
            raise trace.missing(
                f"iteration {number} accumulates other gradients than iteration 0, or in another order"
            )
    parameters, gradient_bytes = np.array(first.sizes).T
    return LayerProfile(
        network=network,
        device=trace.device,
        batch=batch,
        tensor=tuple(
            f"{name}.{first.layer[:row].count(name)}" for row, name in enumerate(first.layer)
        ),
        layer=first.layer,
        parameters=parameters,
        gradient_bytes=gradient_bytes,
        forward_s=_typical(np.array([one.forward_s for one in seen])),
        backward_s=_typical(np.array([one.backward_s for one in seen])),
        flops=np.zeros(len(parameters)),
        update_s=float(np.median([one.update_s for one in seen])),
    )


class _Seen(NamedTuple):
    """One iteration in forward order: layer names, (elements, bytes) of gradients, and times, (n,) each."""

    layer: tuple[str, ...]
    sizes: tuple[tuple[int, int], ...]
    forward_s: Floats
    backward_s: Floats
    update_s: float


def _seen(trace: KinetoTrace, iteration: TracedIteration) -> _Seen:
    ready = _gradients(trace, iteration)
    done = _clock(iteration)
    forward, backward = iteration.phases["forward"], iteration.phases["backward"]
    update = iteration.phases.get("update")
    layers = _layers(iteration)[::-1]
    starts = sorted({layer.start_s for layer in layers if layer})
    rows = [starts.index(layer.start_s) if layer else -1 for layer in layers]
    names = [
        f"{row}.{layer.name.removeprefix('aten::')}" if layer else NO_LAYER
        for row, layer in zip(rows, layers, strict=True)
    ]
    forward_s = np.zeros(len(ready))
    for row, span_s in enumerate(
        _spans([_begin(iteration, "forward"), *map(done, starts[1:]), done(forward[1])])
    ):
        forward_s[rows.index(row) if starts else 0] = span_s
    computed_s = done(max(forward[1], backward[0]))
    return _Seen(
        tuple(names),
        tuple((gradient.elements, gradient.bytes) for gradient in reversed(ready)),
        forward_s,
        _spans([computed_s, *(done(gradient.end_s) for gradient in ready)])[::-1],
        float(_spans([_begin(iteration, "update"), done(update[1])])[0]) if update else 0.0,
    )


def _spans(instants_s: Sequence[float]) -> Floats:
    """Times from each instant to the next; none runs backwards."""
    return np.diff(np.maximum.accumulate(instants_s))


def _gradients(trace: KinetoTrace, iteration: TracedIteration) -> list[Event]:
    """Where gradients are accumulated, in that order."""
    ready = [event for event in iteration.events if event.name == ACCUMULATE]
    if not ready:
        raise trace.missing(f"no gradient is accumulated (no event {ACCUMULATE})")
    if any(not gradient.bytes for gradient in ready):
        raise trace.missing(
            f"sizes of gradients are missing (no 'Input Dims' and 'Input type' with {ACCUMULATE})"
        )
    return ready


def _clock(iteration: TracedIteration) -> Callable[[float], float]:
    """When all that was launched until some instant was done; without a GPU, that very instant."""
    if not iteration.kernels:
        return lambda instant_s: instant_s
    launched_s = np.array([at for at, _ in iteration.kernels])
    ends_s = np.maximum.accumulate([kernel.end_s for _, kernel in iteration.kernels])

    def done(instant_s: float) -> float:
        before = int(np.searchsorted(launched_s, instant_s, side="right"))
        return float(ends_s[before - 1]) if before else iteration.kernels[0][1].start_s

    return done


def _begin(iteration: TracedIteration, kind: str) -> float:
    """When the work of a phase began: on a GPU, its first kernel."""
    start_s, end_s = iteration.phases[kind]
    if not iteration.kernels:
        return start_s
    own = [k.start_s for at, k in iteration.kernels if start_s <= at < end_s]
    return min(own, default=_clock(iteration)(start_s))


def _layers(iteration: TracedIteration) -> list[Event | None]:
    """For each gradient the outermost operator of forward that made its node; None where unknown.

    The node is the one that autograd evaluated last before it. Of the operators with the node's
    sequence number the one that started last made it: those before only bear the next number.
    """
    start_s, end_s = iteration.phases["forward"]
    operators = [
        e for e in iteration.events if e.category == "cpu_op" and start_s <= e.start_s < end_s
    ]
    maker = {
        inner.args["Sequence number"]: outer
        for inner, outer in with_outermost(operators)
        if "Sequence number" in inner.args
    }
    layers = []
    node: dict[str, int | None] = {}  # of each thread, by its number
    for event in iteration.events:
        if event.name == ACCUMULATE:
            layers.append(maker.get(node.get(event.thread)))
        elif event.name.startswith(EVALUATE) and not event.name.endswith(ACCUMULATE):
            node[event.thread] = event.args.get("Sequence number")
    return layers


def _typical(rows: Floats) -> Floats:
    """(n,) medians of (k, n) times, rescaled so that they add up to the median of the sums."""
    medians = np.median(rows, axis=0)
    return medians * (np.median(rows.sum(axis=1)) / medians.sum()) if medians.sum() else medians


# -- what its user should know -----------------------------------------------------------------


def check_profile(trace: KinetoTrace) -> list[Finding]:
    """What the user of such a trace should know; ``what`` is one of

    * iterations: how many, and how long from first forward to last end
    * messages: all-reduces and all-gathers, and those whose size is unknown
    * overlap: computing beside messages on a processor, which slows it
    * other: messages of other kinds, which are left out
    * launches: work of the GPU that nothing is known to have launched
    * update: no optimizer's step
    * profiler: that it takes time itself
    """
    line = timeline(trace)
    parts = [line.select(line.iteration == number) for number in np.unique(line.iteration)]
    durations = [part.duration_s for part in parts]
    shortest, longest = format_seconds(min(durations)), format_seconds(max(durations))
    found = [("iterations", f"{len(parts)} of {shortest} to {longest} on {trace.device}")]
    sent = line.select(np.isin(line.kind, COMMUNICATION))
    if sent.n:
        unknown = int(np.sum(sent.bytes == 0))
        text = f"{sent.n} messages of {format_bytes(int(sent.bytes.sum()))} in all"
        text += f", {unknown} of unknown size: record_shapes=True tells" if unknown else ""
        found.append(("messages", f"{text}; their times include waiting for other ranks"))
        if not trace.kernels:
            both = format_seconds(sum(part.overlap_s() for part in parts))
            text = f"{both} of computing beside messages on the same processor: slower than alone"
            found.append(("overlap", text))
    others = Counter(e.collective for e in trace.events if e.collective not in ("", *COMMUNICATION))
    for kind, count in sorted(others.items()):
        found.append(("other", f"{count} messages ({kind}) are left out"))
    launches = {e.args.get("correlation") for e in trace.events if not e.on_gpu}
    unknown = sum(e.args.get("correlation") not in launches for e in trace.events if e.on_gpu)
    if unknown:
        text = "of the GPU's spans do not say what launched them: taken for when they ran"
        found.append(("launches", f"{unknown} {text}"))
    if not np.any(line.kind == "update"):
        found.append(("update", "no optimizer's step in it: update takes no time"))
    text = "the profiler's own cost is in all times: compare with an iteration that is not profiled"
    return [Finding(what, (), text) for what, text in (*found, ("profiler", text))]
