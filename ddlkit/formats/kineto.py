"""What torch.profiler exports (Kineto's Chrome trace), as a layer profile, message times and a timeline.

Two clocks are in such a file: when the processor launched something, and when the GPU did it. On a GPU
a kernel belongs to the phase that launched it. A UserError says what a file lacks, or where it is damaged.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from ddlkit.core.collective import COLLECTIVES
from ddlkit.core.errors import Finding, UserError, shown
from ddlkit.core.timeline import COMMUNICATION, Timeline
from ddlkit.core.units import MOST_WHOLE, format_seconds
from ddlkit.core.workload import Floats, LayerProfile
from ddlkit.formats.contract import ImportOptions, ReadProfile
from ddlkit.store.files import parse_json

PHASES = ("forward", "backward", "update")
FORWARD, BACKWARD, UPDATE = (f"ddlkit.{kind}" for kind in PHASES)
EVALUATE = "autograd::engine::evaluate_function"
ACCUMULATE = "torch::autograd::AccumulateGrad"
HOW = (
    "record whole iterations (forward, backward and optimizer.step) with "
    "torch.profiler.profile(activities=[CPU, and CUDA on a GPU], record_shapes=True)"
)
MOST_US = 1e18  # of instants and times, in microseconds: thirty thousand years
APART = 2.0  # times the shortest: an iteration of another kind

_OPTIMIZER, _COPY = "Optimizer.step#", "Memcpy HtoD"
_NCCL = re.compile(r"(void )?(nccl|rccl|msccl)")
_LAUNCH = re.compile(r"cuda_runtime .*Launch|(?!cuda)\w+_runtime ")
_RECORD, _NAMED = "record_param_comms", "Collective name"
_TOLD = (_NAMED, "In msg nelems", "Out msg nelems", "dtype", "Group size")
# Of what is gathered or coalesced, the first input is only a part.
_MESSAGE = re.compile(f"{_RECORD}$|nccl:(?!.*(gather|coalesced))")
# As the profiler writes them: C++ names of operators' inputs, c10's names of messages.
_ELEMENT_BYTES = {
    **dict.fromkeys(("double", "long", "long int", "complexfloat"), 8),
    **dict.fromkeys(("float", "int"), 4),
    **dict.fromkeys(("half", "bfloat16", "short", "short int"), 2),
    **dict.fromkeys(("bool", "byte", "char", "signed char", "unsigned char"), 1),
}


class Event(NamedTuple):
    """One span of a trace: times in seconds; ``on_gpu`` for a kernel, not for what launched it.

    category, args : as the profiler has them, of a message with what its launch says of sizes
    thread : of the processor, or a GPU's stream; correlated_s : when it was launched, -inf: before the trace
    """

    name: str
    start_s: float
    end_s: float
    on_gpu: bool = False
    category: str = ""
    args: Mapping[str, Any] = MappingProxyType({})
    thread: str = ""
    correlated_s: float | None = None

    @property
    def launched_s(self) -> float:
        """When the processor launched it."""
        return self.start_s if self.correlated_s is None else self.correlated_s

    @property
    def collective(self) -> str:
        """Of gloo's span or NCCL's kernel: one of COMMUNICATION, or "other"; "" of what is no message."""
        if not (
            self.name.startswith("gloo:") or (self.on_gpu and _NCCL.match(self.name))
        ):
            return ""
        said = f"{self.args.get(_NAMED)} {self.name}".lower().replace("_", "")
        for kind, known in COLLECTIVES.items():
            if any(name in said for name in known.names):
                return kind
        return "other"

    @property
    def elements(self) -> int:
        """Number of elements of an operator's first input; 0 where it is unknown."""
        shape = _first(self.args.get("Input Dims"))
        return _count(math.prod(map(_count, shape))) if isinstance(shape, list) else 0

    @property
    def undefined(self) -> bool:
        """Whether the first input of an operator is no tensor, as a gradient that does not exist."""
        return _first(self.args.get("Input type")) == ""

    @property
    def bytes(self) -> int:
        """Size of a message, as its collective counts it, or of an operator's first input; 0: unknown."""
        if "In msg nelems" in self.args:
            known = COLLECTIVES.get(self.collective)
            direction = "Out" if known and known.sized == "output" else "In"
            count, kind = (
                _count(self.args.get(f"{direction} msg nelems")),
                self.args.get("dtype"),
            )
        else:
            count, kind = self.elements, _first(self.args.get("Input type"))
        return count * _ELEMENT_BYTES.get(str(kind).lower().removeprefix("c10::"), 0)

    def number(self, remark: str) -> int | None:
        """Return a number that the profiler notes, by which events belong together."""
        value = self.args.get(remark)
        return value if isinstance(value, int) else None


def _first(value: Any) -> Any:
    return value[0] if isinstance(value, list) and value else None


def _count(value: Any) -> int:
    return value if isinstance(value, int) and 0 <= value <= MOST_WHOLE else 0


@dataclass(frozen=True)
class KinetoTrace:
    """What torch.profiler saw of some training: spans by start, in seconds from the first.

    source : names the file in errors; device : "cpu", or the GPU's name
    """

    source: str
    events: tuple[Event, ...]
    rank: int = 0
    device: str = "cpu"

    def missing(self, what: str) -> UserError:
        """Return the error that says what this file lacks, and how to record it."""
        return UserError(f"{self.source}: {what}: {HOW}")


def matches(text: str) -> bool:
    """Return whether the file may be JSON; whether that is a Chrome trace, `parse_kineto` says."""
    return text.lstrip().startswith(("{", "["))


def read(text: str, file: str, options: ImportOptions) -> ReadProfile:
    """Return the iterations that were chosen as a profile, and what must be known of their times."""
    profile, findings = layer_profile(parse_kineto(text, file), options.iterations)
    cost = "the profiler's own cost is in all times: compare with an iteration that is not profiled"
    findings.append(Finding("profiler", (), cost))
    if not profile.update_s:
        findings.append(
            Finding("update", (), "no optimizer's step in it: update takes no time")
        )
    return ReadProfile(profile, tuple(findings))


def spans(document: Any, source: str = "trace") -> list[Event]:
    """Return complete spans ("X") of any Chrome trace, by start, in seconds from the first one's start."""
    listed = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(listed, list) or not all(
        isinstance(event, dict) for event in listed
    ):
        raise UserError(
            f"{source}: not a Chrome trace: it has no list traceEvents of objects"
        )
    kept = []
    for number, event in enumerate(listed):
        # The GPU's copy of a marked range, from its first kernel on: the processor's is the one to use.
        copied = ("gpu_user_annotation", "Trace")
        if event.get("ph") == "X" and event.get("cat") not in copied:
            name, ts, dur = (event.get(key) for key in ("name", "ts", "dur"))
            timed = all(
                isinstance(t, int | float) and abs(t) <= MOST_US for t in (ts, dur)
            )
            if not (timed and dur is not None and dur >= 0 and isinstance(name, str)):
                times = f"({shown(name)}): ts {shown(ts)} and dur {shown(dur)} must be microseconds"
                raise UserError(
                    f"{source}: traceEvents[{number}] {times}: export the trace again"
                )
            kept.append(event)
    first_us = min((event["ts"] for event in kept), default=0.0)
    events = [
        Event(
            event["name"],
            (event["ts"] - first_us) / 1e6,
            (event["ts"] - first_us + event["dur"]) / 1e6,
            str(event.get("cat")).lower().removeprefix("gpu_")
            in ("kernel", "memcpy", "memset"),
            str(event.get("cat", "")),
            event["args"] if isinstance(event.get("args"), dict) else {},
            f"{event.get('pid')} {event.get('tid')}",
        )
        for event in kept
    ]
    return sorted(_launched(events), key=lambda event: (event.start_s, -event.end_s))


def _launched(events: Sequence[Event]) -> list[Event]:
    """Return the events with what launched each of them: when, and of messages what, and how large."""
    launches = {e.number("correlation"): e for e in events if not e.on_gpu}
    launches.pop(None, None)
    messages = {
        e.number("correlation") for e in events if e.collective
    } & launches.keys()
    ordered = sorted((launches[n].thread, launches[n].start_s, n) for n in messages)
    args: dict[int | None, dict[str, Any]] = {number: {} for number in messages}
    for operator in sorted(
        events, key=lambda event: event.start_s
    ):  # the innermost is the last
        if not _MESSAGE.match(operator.name):
            continue
        ends = [(operator.thread, at_s) for at_s in (operator.start_s, operator.end_s)]
        inside = ordered[bisect_left(ordered, ends[0]) : bisect_right(ordered, ends[1])]
        if len(inside) == 1:  # of several messages, the sizes of each are unknown
            told = {
                name: value for name, value in operator.args.items() if name in _TOLD
            }
            named = {**operator.args, _NAMED: operator.name}
            args[inside[0][2]] |= told if operator.name == _RECORD else named
    return [
        e._replace(
            correlated_s=launches[number].start_s if number in launches else None,
            args={**args[number], **e.args} if number in args else e.args,
        )
        for e, number in ((event, event.number("correlation")) for event in events)
    ]


def parse_kineto(text: str, source: str) -> KinetoTrace:
    """Return the trace in the text of a file of ``export_chrome_trace``; ``source`` names it in errors."""
    try:
        document = parse_json(text)
    except ValueError as error:
        advice = "export it again, if it is long of fewer iterations"
        raise UserError(f"{source}: not read as JSON: {error}: {advice}") from error
    events = spans(document, source)
    known = (e for e in reversed(events) if e.on_gpu and e.correlated_s is not None)
    began_s = {e.thread: e.start_s for e in known}  # each of the GPU's streams
    first_s = min(began_s.values(), default=-math.inf)
    for at, e in enumerate(events):
        if (
            e.on_gpu
            and e.correlated_s is None
            and e.start_s < began_s.get(e.thread, first_s)
        ):
            events[at] = e._replace(correlated_s=-math.inf)
    trace = KinetoTrace(source, tuple(events))
    if not trace.events:
        raise trace.missing("no span at all")
    on_gpu = any(event.on_gpu and not event.collective for event in trace.events)
    # A profiler without a GPU's activities notes no runtime at all, or how it waits for the GPU itself.
    launched = (e for e in events if _LAUNCH.match(f"{e.category} {e.name}"))
    if not on_gpu and (launch := next(launched, None)):
        raise trace.missing(
            f"{launch.name} gives work to a device, but no kernel is in the trace"
        )
    device, rank = "cuda" if on_gpu else "cpu", 0
    match document:
        case {"distributedInfo": {"rank": rank}}:
            pass
    match document:
        case {"deviceProperties": [{"name": str(name)}, *_]} if on_gpu:
            device = name
    return replace(trace, rank=_count(rank), device=device)


class TracedIteration(NamedTuple):
    """Which step of how many, by the processor's clock; free_s: when all launched before was computed."""

    number: int
    steps: int
    events: tuple[Event, ...]  # by launch
    phases: Mapping[str, tuple[float, float]]  # kind -> (start_s, end_s)
    free_s: float

    def launched(self, start_s: float, end_s: float = math.inf) -> list[Event]:
        """Return what the GPU did, messages aside, that was launched from ``start_s`` until ``end_s``."""
        kernels = [e for e in self.events if e.on_gpu and not e.collective]
        return [kernel for kernel in kernels if start_s <= kernel.launched_s < end_s]

    def repeats(self) -> bool:
        """Return whether an operator that has a gradient starts after backward began, outside of it."""
        functions = [e for e in self.events if e.name.startswith(EVALUATE)]
        starts = [e.start_s for e in functions]
        ends = [*accumulate((e.end_s for e in functions), max, initial=-math.inf)]
        outermost = [
            e for e, end_s in zip(functions, ends, strict=False) if e.start_s >= end_s
        ]
        numbers = {e.number("Sequence number") for e in outermost} - {None}
        of_graph = [e for e in self.events if e.number("Sequence number") in numbers]
        begun = ((e, bisect_right(starts, e.start_s)) for e in of_graph)
        return any(at and e.end_s > ends[at] for e, at in begun)

    def gradients_end_s(self) -> float:
        """When the last gradient was ready, on the processor's clock; the end of backward if unknown."""
        end_s = self.phases["backward"][1]
        ends = [
            e.end_s
            for e in self.events
            if e.name.startswith(EVALUATE) and e.end_s <= end_s
        ]
        return max(ends, default=end_s)


def iterations(trace: KinetoTrace, chosen: Sequence[int] = ()) -> list[TracedIteration]:
    """Return steps with a backward, or those chosen: ProfilerStep marks, else between ends of the update."""
    by_launch = sorted(trace.events, key=lambda event: event.launched_s)
    times_s = [event.launched_s for event in by_launch]
    windows = [
        (e.start_s, e.end_s) for e in trace.events if e.name.startswith("ProfilerStep#")
    ]
    if not windows:
        ends = [e.end_s for e in trace.events if _mark(e) == "update"]
        ends = ends or [e.end_s for e in trace.events if e.name.startswith(_OPTIMIZER)]
        windows = [
            *zip([0.0, *sorted(ends)[:-1]], sorted(ends) or [math.inf], strict=True)
        ]
    computed = [
        e.on_gpu and not (e.collective or e.name.startswith(_COPY)) for e in by_launch
    ]
    ends_s = np.where(computed, [e.end_s for e in by_launch], -math.inf)
    free_s = np.maximum.accumulate([-math.inf, *ends_s])
    traced: list[TracedIteration] = []
    for number, (start_s, end_s) in enumerate(windows):
        first = bisect_left(times_s, start_s)
        events = tuple(by_launch[first : bisect_left(times_s, end_s)])
        phases = _phases(events)
        if {"forward", "backward"} <= phases.keys():
            traced.append(
                TracedIteration(number, len(windows), events, phases, free_s[first])
            )
    if not traced:
        old = any(event.name == ACCUMULATE for event in trace.events)
        why = "of a PyTorch before 1.12, or a part of a trace" if old else "inference?"
        marks = f"events of autograd ({EVALUATE}) with numbers, or ranges {FORWARD} and {BACKWARD}"
        raise trace.missing(
            f"no step of {len(windows)} has both passes ({why}): needs {marks}"
        )
    numbers = [iteration.number for iteration in traced]
    for number in sorted(set(chosen) - set(numbers)):
        raise UserError(
            f"{trace.source}: --iterations {number}: there are {_listed(numbers)}"
        )
    return [
        iteration for iteration in traced if iteration.number in (chosen or numbers)
    ]


def _listed(numbers: Sequence[int]) -> str:
    """Return rising numbers as --iterations takes them: 0,2-5."""
    runs = np.split(np.array(numbers), np.flatnonzero(np.diff(numbers) > 1) + 1)
    return ",".join(
        f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs
    )


def _mark(event: Event) -> str:
    """Return the phase that the event marks, if any."""
    kind = event.name.removeprefix("ddlkit.")
    return kind if kind in PHASES and not event.on_gpu else ""


def _phases(events: Sequence[Event]) -> dict[str, tuple[float, float]]:
    """Return phases as marked, else by the first operator with a gradient, autograd and the optimizer."""
    phases = {}
    functions = [e for e in events if e.name.startswith(EVALUATE)]
    steps = [e for e in events if e.name.startswith(_OPTIMIZER)]
    if functions:
        begin_s, update_s = (
            functions[0].start_s,
            steps[0].start_s if steps else math.inf,
        )
        numbers = {e.number("Sequence number") for e in functions} - {None}
        of_graph = [e for e in events if e.number("Sequence number") in numbers]
        starts = [
            e.start_s
            for e in of_graph
            if e.category == "cpu_op" and e.start_s < begin_s
        ]
        if starts:
            phases["forward"] = min(starts), begin_s
        # Backward waits for messages; their own threads may still tidy up when the wait has ended.
        sent = [
            e for e in events if e.collective and not e.on_gpu and e.start_s < update_s
        ]
        phases["backward"] = (
            begin_s,
            max(min(e.end_s, update_s) for e in (*functions, *sent)),
        )
    if steps:
        phases["update"] = steps[0].start_s, steps[-1].end_s
    return phases | {
        _mark(e): (e.start_s, e.end_s) for e in reversed(events) if _mark(e)
    }


def layer_profile(
    trace: KinetoTrace, chosen: Sequence[int] = ()
) -> tuple[LayerProfile, list[Finding]]:
    """Return iterations as one profile, of medians, rescaled to those of the phases; and what is left out.

    Backward of a tensor is the time since the gradient before was accumulated; forward stands with the first.
    """
    each = iterations(trace, chosen)
    ready = [
        [e for e in i.events if e.name == ACCUMULATE and not e.undefined] for i in each
    ]
    if not all(ready):
        raise trace.missing(f"no gradient is accumulated (no event {ACCUMULATE})")
    sizes = [
        [(gradient.elements, gradient.bytes) for gradient in those] for those in ready
    ]
    if not all(n_bytes for those in sizes for _, n_bytes in those):
        lacking = f"no 'Input Dims' and 'Input type' with {ACCUMULATE}"
        raise trace.missing(f"sizes of gradients are missing ({lacking})")
    for iteration, others in zip(each, sizes, strict=True):
        if others != sizes[0]:
            problem = (
                f"other gradients than iteration {each[0].number}, or in another order"
            )
            raise trace.missing(f"iteration {iteration.number} accumulates {problem}")
    times = [
        _times(iteration, those) for iteration, those in zip(each, ready, strict=True)
    ]
    forward_s, backward_s, update_s = zip(*times, strict=True)
    whole_s = np.sum(backward_s, 1)
    findings = _judged(trace, each, forward_s + whole_s + update_s, bool(chosen))
    typical_s = np.median(backward_s, 0)
    elements, n_bytes = np.array(sizes[0][::-1]).T
    names = tuple(f"tensor{row}" for row in range(len(elements)))
    profile = LayerProfile(
        network="",
        device=trace.device,
        batch=1,
        tensor=names,
        layer=names,
        parameters=elements,
        gradient_bytes=n_bytes,
        forward_s=np.eye(len(elements))[0] * np.median(forward_s),
        backward_s=typical_s
        * (np.median(whole_s) / typical_s.sum() if typical_s.any() else 1.0),
        flops=np.zeros(len(elements)),
        update_s=float(np.median(update_s)),
    )
    return profile, findings


def _judged(
    trace: KinetoTrace, each: Sequence[TracedIteration], whole_s: Floats, chosen: bool
) -> list[Finding]:
    """Return what the iterations are, and what is left out; raise UserError for times that cannot be."""
    for iteration, spent_s in zip(each, whole_s.tolist(), strict=True):
        length_s = max(e.end_s for e in iteration.events) - iteration.events[0].start_s
        problem = f"its phases take {format_seconds(spent_s)}, all of it {format_seconds(length_s)}"
        if iteration.repeats():
            problem = (
                "forward runs again after backward began (gradients are summed up?)"
            )
        elif spent_s <= 1.01 * length_s:
            continue
        raise trace.missing(f"iteration {iteration.number}: {problem}")
    slow, numbers = whole_s > APART * whole_s.min(), np.array([i.number for i in each])
    listed = [_listed(numbers[of]) for of in (~slow, slow) if of.any()]
    medians = [
        format_seconds(float(np.median(whole_s[of])))
        for of in (~slow, slow)
        if of.any()
    ]
    kinds = "; ".join(
        f"{of} take {took}" for of, took in zip(listed, medians, strict=True)
    )
    if not chosen and 3 * min(slow.sum(), (~slow).sum()) > len(each):
        problem = (
            f"iterations of two kinds: {kinds}: choose, as by --iterations {listed[0]}"
        )
        raise UserError(f"{trace.source}: {problem}")
    counts = {
        f"of {each[0].steps} steps: without a backward, or not chosen": each[0].steps
        - len(each),
        "gradients: undefined": sum(
            e.undefined for e in each[0].events if e.name == ACCUMULATE
        ),
        "spans of the GPU: launched before the trace": sum(
            e.launched_s < 0 for e in trace.events
        ),
    }
    left_out = [
        Finding("left out", (), f"{n} {text}") for text, n in counts.items() if n
    ]
    return [
        Finding("iterations", (), f"{len(each)} on {trace.device}: {kinds}"),
        *left_out,
    ]


def _times(
    iteration: TracedIteration, ready: Sequence[Event]
) -> tuple[float, Floats, float]:
    """Return forward, backward (n,) in forward order, and update, in seconds."""
    kernels, phases = iteration.launched(-math.inf), iteration.phases
    launched_s = [kernel.launched_s for kernel in kernels]
    ends_s = np.maximum.accumulate([kernel.end_s for kernel in kernels])

    def done(instant_s: float) -> float:
        """When all that was launched until some instant was done; without a GPU, that very instant."""
        if not kernels:
            return instant_s
        before = bisect_right(launched_s, instant_s)
        return float(ends_s[before - 1]) if before else kernels[0].start_s

    def took_s(kind: str) -> float:
        """Return the seconds of a phase: on a GPU, from its first kernel until all launched was done."""
        start_s, end_s = phases[kind]
        starts = [kernel.start_s for kernel in iteration.launched(start_s, end_s)]
        return max(
            done(end_s) - max(iteration.free_s, min(starts, default=done(start_s))), 0.0
        )

    computed_s = done(max(phases["forward"][1], phases["backward"][0]))
    ends = [computed_s, *(done(gradient.end_s) for gradient in ready)]
    backward_s = np.diff(np.maximum.accumulate(ends))[::-1]  # none runs backwards
    return (
        took_s("forward"),
        backward_s,
        took_s("update") if "update" in phases else 0.0,
    )


def message_table(trace: KinetoTrace) -> tuple[str, Finding]:
    """Return messages of known size as a table (CSV) that ``ddlkit fit`` reads, and how many there are."""
    sent = [event for event in trace.events if event.collective]
    sized = [
        e
        for e in sent
        if e.collective in COMMUNICATION and e.bytes and e.end_s > e.start_s
    ]
    if not sized:
        raise trace.missing(
            f"{len(sent)} messages, none of {', '.join(COMMUNICATION)} with a size"
        )
    rows = [
        (e.bytes, e.end_s - e.start_s, e.collective, e.args.get("Group size"))
        for e in sized
    ]
    columns = 4 if all(_count(ranks) for *_, ranks in rows) else 3
    lines = [("bytes", "seconds", "collective", "ranks"), *rows]
    text = f"{len(sized)} of {len(sent)}: of known size and kind, with the wait for slower ranks"
    table = "".join(",".join(map(str, line[:columns])) + "\n" for line in lines)
    return table, Finding("messages", (), text)


def timeline(trace: KinetoTrace, buckets: Sequence[int] = ()) -> Timeline:
    """Return all iterations, each from its first forward instant on: phases, or a GPU's kernels by phase.

    buckets : bytes of each message: the k-th all-reduce is that of the k-th bucket if there are as many
    """
    rows = []
    for iteration in iterations(trace):
        of = {"origin": "measured", "iteration": iteration.number, "rank": trace.rank}
        origin_s = iteration.phases["forward"][0]
        spans_of = [*_messages(iteration.events, buckets), *_computed(iteration)]
        for span in sorted(spans_of, key=lambda span: (span["start_s"], span["end_s"])):
            times = {name: span[name] - origin_s for name in ("start_s", "end_s")}
            rows.append({**span, **of, **times})
    return Timeline.from_rows(rows)


def _span(
    task: str, kind: str, stream: str, start_s: float, end_s: float
) -> dict[str, Any]:
    return {
        "task": task,
        "kind": kind,
        "stream": stream,
        "start_s": start_s,
        "end_s": end_s,
    }


def _messages(
    events: Sequence[Event], buckets: Sequence[int]
) -> Iterator[dict[str, Any]]:
    for kind in COMMUNICATION:
        messages = sorted(
            (e for e in events if e.collective == kind), key=lambda e: e.start_s
        )
        alike = kind == "all_reduce" and len(messages) == len(buckets)
        for number, event in enumerate(messages):
            span = _span(
                f"{kind} {number}", kind, "communication", event.start_s, event.end_s
            )
            group = number if alike or not buckets else -1
            yield {
                **span,
                "group": group,
                "bytes": buckets[number] if alike else event.bytes,
            }


def _computed(iteration: TracedIteration) -> Iterator[dict[str, Any]]:
    """Yield kernels by phase, and copies; without a GPU phases, and the wait after the last gradient."""
    kernels = iteration.launched(-math.inf)
    for kernel in (kernel for kernel in kernels if kernel.name.startswith(_COPY)):
        yield _span("copy", "h2d", "input", kernel.start_s, kernel.end_s)
    last_s, (start_s, end_s) = iteration.gradients_end_s(), iteration.phases["backward"]
    phases = iteration.phases
    if not kernels:
        phases = {**phases, "backward": (start_s, last_s), "wait": (last_s, end_s)}
    for kind, at_s in phases.items():
        if not kernels and at_s[1] > at_s[0]:
            yield _span(kind, kind, "compute", *at_s)
        for kernel in iteration.launched(*at_s):
            if not kernel.name.startswith(_COPY):
                yield _span(kernel.name, kind, "compute", kernel.start_s, kernel.end_s)
