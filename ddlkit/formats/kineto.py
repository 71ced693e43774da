"""What torch.profiler exports (Kineto's Chrome trace): spans, phases, messages and a timeline of training.

Two clocks are in such a file: when the processor launched something, and when the GPU did it. On a GPU
a kernel belongs to the phase that launched it.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, NamedTuple

from ddlkit.core.errors import UserError, shown
from ddlkit.core.timeline import COMMUNICATION, Timeline
from ddlkit.core.units import MOST_WHOLE
from ddlkit.store.files import parse_json

PHASES = ("forward", "backward", "update")
FORWARD, BACKWARD, UPDATE = (f"ddlkit.{kind}" for kind in PHASES)
EVALUATE = "autograd::engine::evaluate_function"
HOW = (
    "record one or more whole iterations (forward, backward and optimizer.step) with "
    "torch.profiler.profile(activities=[CPU, and CUDA on a GPU], record_shapes=True) and export_chrome_trace"
)
MOST_US = 1e18
"""Of instants and times, in microseconds: thirty thousand years."""

_OPTIMIZER, _COPY = "Optimizer.step#", "Memcpy HtoD"
_NCCL = re.compile(
    r"^nccl.*?(AllReduce|AllGather|ReduceScatter|Reduce|Broadcast|SendRecv|AllToAll|$)"
)
_WORDS = re.compile(r"(?<=[a-z])(?=[A-Z])")
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
# As the profiler writes them: C++ names of operators' inputs, c10's names of messages.
_ELEMENT_BYTES = {
    **dict.fromkeys(("double", "long", "long int", "complexfloat"), 8),
    **dict.fromkeys(("float", "int"), 4),
    **dict.fromkeys(("half", "bfloat16", "short", "short int"), 2),
    **dict.fromkeys(("bool", "byte", "char", "signed char", "unsigned char"), 1),
}


class Event(NamedTuple):
    """One span of a trace: times in seconds; ``on_gpu`` for a kernel, not for what launched it.

    category, args : as the profiler has them; thread : of which process and thread, or GPU and stream
    """

    name: str
    start_s: float
    end_s: float
    on_gpu: bool = False
    category: str = ""
    thread: str = ""
    args: Mapping[str, Any] = MappingProxyType({})

    @property
    def at_s(self) -> tuple[float, float]:
        """Start and end, in seconds."""
        return self.start_s, self.end_s

    @property
    def collective(self) -> str:
        """Of a message at work (gloo's span on its own thread, NCCL's kernel): "all_reduce" and others.

        "nccl" where NCCL's kernel does not name its collective, "" for all that is no message.
        """
        if self.name.startswith("gloo:"):
            return self.name.removeprefix("gloo:")
        named = _NCCL.match(self.name) if self.on_gpu else None
        return (_WORDS.sub("_", named[1]).lower() or "nccl") if named else ""

    @property
    def bytes(self) -> int:
        """Size of a message (all-gather: whole output) or of an operator's first input; 0: unknown."""
        if "In msg nelems" in self.args:
            direction = "Out" if self.collective == "all_gather" else "In"
            count = self.args.get(f"{direction} msg nelems", 0)
            return int(count) * element_bytes(self.args.get("dtype", ""))
        return self.elements * element_bytes((self.args.get("Input type") or [""])[0])

    @property
    def elements(self) -> int:
        """Number of elements of an operator's first input; 0 where it is unknown."""
        shape = (self.args.get("Input Dims") or [None])[0]
        known = isinstance(shape, list) and all(isinstance(length, int) for length in shape)
        return math.prod(shape) if known else 0


def element_bytes(kind: str) -> int:
    """Return bytes of one element of a type as the profiler names it; 0 where the name is not known.

    >>> element_bytes("float"), element_bytes("c10::BFloat16"), element_bytes("TensorList")
    (4, 2, 0)
    """
    return _ELEMENT_BYTES.get(str(kind).lower().removeprefix("c10::"), 0)


# -- reading -----------------------------------------------------------------------------------


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value <= MOST_WHOLE


def _is_lists(value: Any) -> bool:
    """Whether it is a list, of lengths of at most so many elements together where it tells those."""
    shapes = (
        [shape for shape in value if isinstance(shape, list)] if isinstance(value, list) else []
    )
    lengths = [[n for n in shape if not isinstance(n, list)] for shape in shapes]
    counted = all(all(map(_is_count, n)) and _is_count(math.prod(n)) for n in lengths)
    return isinstance(value, list) and counted


_CAN_BE: Mapping[str, Callable[[Any], bool]] = {
    "In msg nelems": _is_count,
    "Out msg nelems": _is_count,
    "Input Dims": _is_lists,
    "Input type": lambda value: isinstance(value, list),
    "Sequence number": lambda value: not isinstance(value, dict | list),
    "correlation": lambda value: not isinstance(value, dict | list),
}
"""What is read of the profiler's remarks on an event, and whether a value can be that."""


@dataclass(frozen=True)
class KinetoTrace:
    """What torch.profiler saw of some training: spans by start, in seconds from the first.

    source : names the file in errors; device : "cpu", or what the GPU is called
    """

    source: str
    events: tuple[Event, ...]
    rank: int = 0
    device: str = "cpu"

    @property
    def kernels(self) -> list[Event]:
        """What the GPU computed or copied; messages are none of it."""
        return [event for event in self.events if event.on_gpu and not event.collective]

    def missing(self, what: str) -> UserError:
        """Return the error that says what this file lacks, and how to record it."""
        return UserError(f"{self.source}: {what}: {HOW}")


def spans(document: Any, source: str = "trace") -> list[Event]:
    """Return complete spans ("X") of any Chrome trace, by start, in seconds from the first one's start.

    Raises UserError for another document, and for a span without name or with times that cannot be.
    """
    listed = document.get("traceEvents") if isinstance(document, dict) else None
    if not isinstance(listed, list):
        raise UserError(f"{source}: not a Chrome trace: it has no list traceEvents")
    kept = []
    for number, event in enumerate(listed):
        # The GPU's copy of a marked range, from its first kernel on: the processor's is the one to use.
        copied = ("gpu_user_annotation", "Trace")
        if isinstance(event, dict) and event.get("ph") == "X" and event.get("cat") not in copied:
            _check(event, f"{source}: traceEvents[{number}]")
            kept.append(event)
    first_us = min((event["ts"] for event in kept), default=0.0)
    events = [
        Event(
            event["name"],
            (event["ts"] - first_us) / 1e6,
            (event["ts"] - first_us + event["dur"]) / 1e6,
            event.get("cat") in _ON_GPU,
            str(event.get("cat", "")),
            f"{event.get('pid')}/{event.get('tid')}",
            event["args"] if isinstance(event.get("args"), dict) else {},
        )
        for event in kept
    ]
    return sorted(events, key=lambda event: (event.start_s, -event.end_s))


def _check(event: dict[str, Any], where: str) -> None:
    """Raise a UserError for a span that the profiler does not write so."""
    name: Any = event.get("name")
    ts, dur = (event.get(key) for key in ("ts", "dur"))
    where += f" ({name if isinstance(name, str) else shown(name)})"
    timed = all(isinstance(t, int | float) and abs(t) <= MOST_US for t in (ts, dur))
    if not (timed and dur is not None and dur >= 0 and isinstance(name, str)):
        times = f"ts {shown(ts)} and dur {shown(dur)} must be microseconds"
        raise UserError(f"{where}: {times}: export the trace again")
    args = event.get("args")
    args = args if isinstance(args, dict) else {}
    for remark, can_be in _CAN_BE.items():
        if remark in args and not can_be(args[remark]):
            raise UserError(f"{where}: {remark} is {shown(args[remark])}: export the trace again")


def parse_kineto(text: str, source: str) -> KinetoTrace:
    """Return the trace in the text of a file of ``export_chrome_trace``; ``source`` names it in errors.

    Raises UserError for a text that is no JSON, no Chrome trace, damaged, or without any span.
    """
    try:
        document = parse_json(text)
    except ValueError as error:
        raise UserError(f"{source}: is not JSON ({error}): truncated? export it again") from error
    trace = KinetoTrace(source, tuple(spans(document, source)))
    if not trace.events:
        raise trace.missing("no span at all")
    rank, name = 0, "cuda"
    match document.get("distributedInfo"):
        case {"rank": rank}:
            pass
    match document.get("deviceProperties"):
        case [{"name": name}, *_]:
            pass
    if not (_is_count(rank) and isinstance(name, str)):
        raise UserError(f"{source}: rank {shown(rank)} of device {shown(name)}: export it again")
    return replace(trace, rank=rank, device=name if trace.kernels else "cpu")


# -- iterations and phases ---------------------------------------------------------------------


class TracedIteration(NamedTuple):
    """One iteration of a trace, and its phases on the processor's clock: kind -> (start_s, end_s).

    events : by launch, which is also when a span on the processor starts; launched_s : the same, times
    """

    events: tuple[Event, ...]
    launched_s: tuple[float, ...]
    phases: Mapping[str, tuple[float, float]]

    @property
    def kernels(self) -> list[tuple[float, Event]]:
        """When each of the GPU's spans but messages was launched, and the span."""
        pairs = zip(self.launched_s, self.events, strict=True)
        return [(t, event) for t, event in pairs if event.on_gpu and not event.collective]

    def gradients_end_s(self) -> float:
        """When the last gradient was ready, on the processor's clock; the end of backward if unknown."""
        end_s = self.phases["backward"][1]
        ends = [e.end_s for e in self.events if e.name.startswith(EVALUATE) and e.end_s <= end_s]
        return max(ends, default=end_s)


def iterations(trace: KinetoTrace) -> list[TracedIteration]:
    """Return the trace cut at ProfilerStep marks, else at ends of the update; the rest is left out.

    Phases are the ranges that record_function marked "ddlkit.forward", "ddlkit.backward" and
    "ddlkit.update" (or without "ddlkit."). Where these are missing, forward starts with the first
    operator that has a gradient, backward is autograd's, and update the optimizer's step.

    Raises UserError when an iteration has no backward.
    """
    launches = {
        event.args["correlation"]: event.start_s
        for event in trace.events
        if not event.on_gpu and "correlation" in event.args
    }
    # A kernel begins, on the processor's clock, when it is launched.
    launched = [(launches.get(e.args.get("correlation"), e.start_s), e) for e in trace.events]
    launched.sort(key=lambda pair: pair[0])
    times_s = [at_s for at_s, _ in launched]
    found: list[TracedIteration] = []
    for start_s, end_s in _windows(trace.events):
        inside = slice(bisect_left(times_s, start_s), bisect_left(times_s, end_s))
        events = tuple(event for _, event in launched[inside])
        phases = _phases(events)
        if "forward" not in phases or "backward" not in phases:
            marks = (
                f"no events of autograd ({EVALUATE}: ...) and no ranges {FORWARD} and {BACKWARD}"
            )
            raise trace.missing(f"iteration {len(found)}: {marks}")
        found.append(TracedIteration(events, tuple(times_s[inside]), phases))
    return found


def _windows(events: Sequence[Event]) -> list[tuple[float, float]]:
    steps = [e.at_s for e in events if e.name.startswith("ProfilerStep#")]
    ends = [e.end_s for e in events if _mark(e) == "update"]
    ends = ends or [e.end_s for e in events if e.name.startswith(_OPTIMIZER)]
    ends = sorted(ends) or [math.inf]
    return steps or list(zip([-math.inf, *ends[:-1]], ends, strict=True))


def _mark(event: Event) -> str:
    """The phase that the event marks, if any."""
    kind = event.name.removeprefix("ddlkit.")
    return kind if kind in PHASES and not event.on_gpu else ""


def _phases(events: Sequence[Event]) -> dict[str, tuple[float, float]]:
    phases = {}
    functions = [e for e in events if e.name.startswith(EVALUATE)]
    steps = [e for e in events if e.name.startswith(_OPTIMIZER)]
    if functions:
        begin_s, update_s = functions[0].start_s, steps[0].start_s if steps else math.inf
        numbers = {e.args.get("Sequence number") for e in functions} - {None}
        starts = [
            outer.start_s
            for inner, outer in with_outermost(e for e in events if e.category == "cpu_op")
            if inner.args.get("Sequence number") in numbers and inner.start_s < begin_s
        ]
        if starts:
            phases["forward"] = min(starts), begin_s
        # Backward waits for messages; their own threads may still tidy up when the wait has ended.
        sent = [e for e in events if e.collective and not e.on_gpu and e.start_s < update_s]
        phases["backward"] = begin_s, max(min(e.end_s, update_s) for e in (*functions, *sent))
    if steps:
        phases["update"] = steps[0].start_s, steps[-1].end_s
    return phases | {_mark(e): e.at_s for e in reversed(events) if _mark(e)}


def with_outermost(operators: Iterable[Event]) -> Iterator[tuple[Event, Event]]:
    """Yield each event, by start, with the outermost one of its thread that it lies in (itself, if none)."""
    outermost: dict[str, Event] = {}
    for event in operators:
        outer = outermost.get(event.thread)
        if outer is None or event.start_s >= outer.end_s:
            outer = outermost[event.thread] = event
        yield event, outer


# -- timeline and messages ---------------------------------------------------------------------


def timeline(trace: KinetoTrace, buckets: Sequence[int] = ()) -> Timeline:
    """Return all iterations, each from its first forward instant on, as this rank saw them.

    CPU: one span per phase. Backward ends with the last gradient; then this rank waits for the last
    all-reduce, and copies. GPU: one span per kernel, of the phase that launched it. Messages other than
    all-reduce and all-gather are left out.
    buckets : if given, the bytes of each message; the k-th all-reduce is that of the k-th bucket if
        there are as many, else of none. If not, messages are numbered and say their bytes themselves.

    Raises UserError as ``iterations`` does.
    """
    rows = []
    for number, iteration in enumerate(iterations(trace)):
        computing = _kernel_spans if iteration.kernels else _phase_spans
        origin_s = iteration.phases["forward"][0]
        spans = [*_other_spans(iteration.events, buckets), *computing(iteration)]
        for task, kind, stream, (start_s, end_s), more in sorted(spans, key=lambda span: span[3]):
            row = {"task": task, "kind": kind, "stream": stream, "origin": "measured", **more}
            row |= {"iteration": number, "rank": trace.rank}
            rows.append({**row, "start_s": start_s - origin_s, "end_s": end_s - origin_s})
    return Timeline.from_rows(rows)


Span = tuple[str, str, str, tuple[float, float], dict[str, int]]
"""Task, kind, stream, start and end in seconds, and other columns of a timeline."""


def _other_spans(events: Sequence[Event], buckets: Sequence[int]) -> Iterator[Span]:
    """Messages, and what loads and copies batches."""
    for kind in COMMUNICATION:
        messages = sorted((e for e in events if e.collective == kind), key=lambda e: e.start_s)
        known = kind == "all_reduce" and len(messages) == len(buckets)
        for number, event in enumerate(messages):
            group = number if known or not buckets else -1
            size = {"group": group, "bytes": buckets[number] if known else event.bytes}
            yield f"{kind} {number}", kind, "communication", event.at_s, size
    for event in events:
        if event.name.startswith("enumerate(DataLoader)"):
            yield "load", "io", "input", event.at_s, {}
        if event.on_gpu and event.name.startswith(_COPY):
            yield "copy", "h2d", "input", event.at_s, {}


def _phase_spans(iteration: TracedIteration) -> list[Span]:
    last_s = iteration.gradients_end_s()
    start_s, end_s = iteration.phases["backward"]
    phases = {**iteration.phases, "backward": (start_s, last_s)}
    if end_s > last_s:
        phases["wait"] = last_s, end_s
    return [(kind, kind, "compute", at_s, {}) for kind, at_s in phases.items()]


def _kernel_spans(iteration: TracedIteration) -> list[Span]:
    return [
        (kernel.name, kind, "compute", kernel.at_s, {})
        for kind, (start_s, end_s) in iteration.phases.items()
        for launched_s, kernel in iteration.kernels
        if start_s <= launched_s < end_s and not kernel.name.startswith(_COPY)
    ]


def message_times(trace: KinetoTrace, collective: str = "all_reduce") -> list[tuple[int, float]]:
    """Return (bytes, seconds) of each message of known size; it may wait for other ranks in it."""
    return [
        (event.bytes, event.end_s - event.start_s)
        for event in trace.events
        if event.collective == collective and event.bytes and event.end_s > event.start_s
    ]
