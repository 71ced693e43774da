"""What torch.profiler exports (Kineto's Chrome trace): spans, phases, messages and a timeline of training.

Two clocks are in such a file: when the processor launched something, and when the GPU did it. On a GPU
a kernel belongs to the phase that launched it.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
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

_OPTIMIZER = "Optimizer.step#"
_NCCL = re.compile(
    r"^nccl.*?(AllReduce|AllGather|ReduceScatter|Reduce|Broadcast|SendRecv|AllToAll|$)"
)
_WORDS = re.compile(r"(?<=[a-z])(?=[A-Z])")
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_NOTHING: Mapping[str, Any] = MappingProxyType({})

# As the profiler writes them: C++ names of operators' inputs, c10's names of messages.
_ELEMENT_BYTES = {
    **dict.fromkeys(("double", "long", "long int", "complexfloat"), 8),
    **dict.fromkeys(("float", "int"), 4),
    **dict.fromkeys(("half", "bfloat16", "short", "short int"), 2),
    **dict.fromkeys(("bool", "byte", "char", "signed char", "unsigned char"), 1),
}


MOST_US = 1e18
"""Of instants and times, in microseconds: thirty thousand years."""


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and 0 <= value <= MOST_WHOLE


def _is_lists(value: Any) -> bool:
    """Whether it is a list, of lengths of at most so many elements together where it tells those."""
    if not isinstance(value, list):
        return False
    lengths = [
        [n for n in one if not isinstance(n, list)] for one in value if isinstance(one, list)
    ]
    return all(all(map(_is_count, one)) and _is_count(math.prod(one)) for one in lengths)


def _is_plain(value: Any) -> bool:
    return not isinstance(value, (dict, list))


_READ_OF_ARGS: Mapping[str, Callable[[Any], bool]] = {
    "In msg nelems": _is_count,
    "Out msg nelems": _is_count,
    "Input Dims": _is_lists,
    "Input type": lambda value: isinstance(value, list),
    "Sequence number": _is_plain,
    "correlation": _is_plain,
}
"""What is read of the profiler's remarks on an event, and whether a value can be that."""


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
    args: Mapping[str, Any] = _NOTHING

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
        found = _NCCL.match(self.name) if self.on_gpu else None
        return (_WORDS.sub("_", found.group(1)).lower() or "nccl") if found else ""

    @property
    def bytes(self) -> int:
        """Size of a message (all-gather: whole output) or of an operator's first input; 0: unknown."""
        if "In msg nelems" in self.args:
            direction = "Out" if self.collective == "all_gather" else "In"
            count = self.args.get(f"{direction} msg nelems", 0)
            return int(count) * element_bytes(self.args.get("dtype", ""))
        kind = self.args.get("Input type") or [""]
        return self.elements * element_bytes(kind[0])

    @property
    def elements(self) -> int:
        """Number of elements of an operator's first input; 0 where it is unknown."""
        shape = (self.args.get("Input Dims") or [None])[0]
        known = isinstance(shape, list) and all(isinstance(length, int) for length in shape)
        return math.prod(shape) if known else 0


def element_bytes(kind: str) -> int:
    """Bytes of one element of a type as the profiler names it; 0 where the name is not known.

    >>> element_bytes("float"), element_bytes("c10::BFloat16"), element_bytes("TensorList")
    (4, 2, 0)
    """
    return _ELEMENT_BYTES.get(str(kind).lower().removeprefix("c10::"), 0)


# -- reading -----------------------------------------------------------------------------------


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
        """The error that says what this file lacks, and how to record it."""
        return UserError(f"{self.source}: {what}: {HOW}")


def spans(document: Any, source: str = "trace") -> list[Event]:
    """Complete spans ("X") of any Chrome trace, by start, in seconds from the first one's start.

    Raises UserError for another document, and for a span without name or with times that cannot be.
    """
    listed = document.get("traceEvents") if isinstance(document, dict) else None
    if not isinstance(listed, list):
        raise UserError(f"{source}: not a Chrome trace: it has no list traceEvents")
    found = []
    for number, event in enumerate(listed):
        # The GPU's copy of a marked range, from its first kernel on: the processor's is the one to use.
        copied = ("gpu_user_annotation", "Trace")
        if not isinstance(event, dict) or event.get("ph") != "X" or event.get("cat") in copied:
            continue
        times: list[Any] = [event.get(name) for name in ("ts", "dur")]
        name = event.get("name")
        where = (
            f"{source}: traceEvents[{number}] ({name if isinstance(name, str) else shown(name)})"
        )
        good = all(isinstance(t, (int, float)) and abs(t) <= MOST_US for t in times)
        if not (good and times[1] >= 0 and isinstance(name, str)):
            ts, dur = map(shown, times)
            raise UserError(
                f"{where}: ts {ts} and dur {dur} must be microseconds: export the trace again"
            )
        _check_args(event.get("args"), where)
        found.append(event)
    first_us = min((event["ts"] for event in found), default=0.0)
    events = [
        Event(
            event["name"],
            (event["ts"] - first_us) / 1e6,
            (event["ts"] - first_us + event["dur"]) / 1e6,
            event.get("cat") in _ON_GPU,
            str(event.get("cat", "")),
            f"{event.get('pid')}/{event.get('tid')}",
            event["args"] if isinstance(event.get("args"), dict) else _NOTHING,
        )
        for event in found
    ]
    return sorted(events, key=lambda event: (event.start_s, -event.end_s))


def _check_args(args: Any, where: str) -> None:
    """Raise a UserError for remarks on an event that the profiler does not write so."""
    for name, can_be in _READ_OF_ARGS.items() if isinstance(args, dict) else ():
        if name in args and not can_be(args[name]):
            raise UserError(f"{where}: {name} is {shown(args[name])}: export the trace again")


def parse_kineto(text: str, source: str) -> KinetoTrace:
    """The trace in the text of a file of ``export_chrome_trace``; ``source`` names it in errors.

    Raises UserError for a text that is no JSON, no Chrome trace, damaged, or without any span.
    """
    try:
        document = parse_json(text)
    except ValueError as error:
        raise UserError(f"{source}: is not JSON ({error}): truncated? export it again") from error
    trace = KinetoTrace(source, tuple(spans(document, source)))
    if not trace.events:
        raise trace.missing("no span at all")
    described = document.get("distributedInfo"), document.get("deviceProperties")
    rank = described[0].get("rank", 0) if isinstance(described[0], dict) else 0
    named = described[1][0] if isinstance(described[1], list) and described[1] else None
    name = named.get("name", "cuda") if isinstance(named, dict) else "cuda"
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
    """The trace cut at ProfilerStep marks, else at ends of the update; what is outside is left out.

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
            raise trace.missing(
                f"iteration {len(found)}: no events of autograd ({EVALUATE}: ...) and no ranges "
                f"{FORWARD} and {BACKWARD}"
            )
        found.append(TracedIteration(events, tuple(times_s[inside]), phases))
    return found


def _windows(events: Sequence[Event]) -> list[tuple[float, float]]:
    steps = [e.at_s for e in events if e.name.startswith("ProfilerStep#")]
    if steps:
        return steps
    ends = [e.end_s for e in events if _is_mark(e, "update")]
    ends = ends or [e.end_s for e in events if e.name.startswith(_OPTIMIZER)]
    ends = sorted(ends) or [math.inf]
    return list(zip([-math.inf, *ends[:-1]], ends, strict=True))


def _is_mark(event: Event, kind: str) -> bool:
    return not event.on_gpu and event.name in (kind, f"ddlkit.{kind}")


def _phases(events: Sequence[Event]) -> dict[str, tuple[float, float]]:
    found = {
        kind: next((e.at_s for e in events if _is_mark(e, kind)), None) or find(events)
        for kind, find in _FIND.items()
    }
    return {kind: at_s for kind, at_s in found.items() if at_s}


def _find_forward(events: Sequence[Event]) -> tuple[float, float] | None:
    backward = [e for e in events if e.name.startswith(EVALUATE)]
    has_gradient = {e.args.get("Sequence number") for e in backward} - {None}
    end_s = min((e.start_s for e in backward), default=0.0)
    starts = [
        outer.start_s
        for inner, outer in with_outermost(e for e in events if e.category == "cpu_op")
        if inner.args.get("Sequence number") in has_gradient and inner.start_s < end_s
    ]
    return (min(starts), end_s) if starts else None


def _find_backward(events: Sequence[Event]) -> tuple[float, float] | None:
    """Autograd's functions, and the messages on the processor that they wait for."""
    functions = [e for e in events if e.name.startswith(EVALUATE)]
    if not functions:
        return None
    update_s = (_find_update(events) or (math.inf,))[0]
    messages = [e for e in events if e.collective and not e.on_gpu and e.start_s < update_s]
    # A message's own thread may still tidy up when the wait for it has ended.
    ends = [min(e.end_s, update_s) for e in (*functions, *messages)]
    return functions[0].start_s, max(ends)


def _find_update(events: Sequence[Event]) -> tuple[float, float] | None:
    steps = [e.at_s for e in events if e.name.startswith(_OPTIMIZER)]
    return (steps[0][0], steps[-1][1]) if steps else None


_FIND = {"forward": _find_forward, "backward": _find_backward, "update": _find_update}


def with_outermost(operators: Iterator[Event] | Sequence[Event]) -> Iterator[tuple[Event, Event]]:
    """Each event, by start, with the outermost one of its thread that it lies in (itself, if none)."""
    outermost: dict[str, Event] = {}
    for event in operators:
        outer = outermost.get(event.thread)
        if outer is None or event.start_s >= outer.end_s:
            outer = outermost[event.thread] = event
        yield event, outer


# -- timeline and messages ---------------------------------------------------------------------


def timeline(trace: KinetoTrace, buckets: Sequence[int] = ()) -> Timeline:
    """All iterations, each from its first forward instant on, as this rank saw them.

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
        events, origin_s = iteration.events, iteration.phases["forward"][0]
        spans = [*_message_spans(events, buckets), *_loading_spans(events), *computing(iteration)]
        for span in spans:
            span["start_s"] -= origin_s
            span["end_s"] -= origin_s
        known = {"origin": "measured", "iteration": number, "rank": trace.rank}
        rows += [{**span, **known} for span in sorted(spans, key=lambda span: span["start_s"])]
    return Timeline.from_rows(rows)


_CONVOLUTION = re.compile(r"^aten::(\w+_)?conv(olution|\dd)?$")


def batch_sizes(trace: KinetoTrace) -> list[int]:
    """Samples in each iteration, by the input of its first convolution; none where no shape tells it.

    Raises UserError as ``iterations`` does.
    """
    found = []
    for iteration in iterations(trace):
        start_s, end_s = iteration.phases["forward"]
        forward = (e for e in iteration.events if start_s <= e.start_s < end_s and not e.on_gpu)
        convolutions = (e for e in forward if _CONVOLUTION.match(e.name))
        first = min(convolutions, key=lambda e: (e.start_s, -e.end_s), default=None)
        shapes = first.args.get("Input Dims") if first else None
        match shapes:
            # Of an input without the axis of samples the weight has one axis more.
            case [[int(samples), *_] as data, list(weight), *_] if len(data) == len(weight) > 2:
                found += [samples] if samples > 0 else []
    return found


def message_times(trace: KinetoTrace, collective: str = "all_reduce") -> list[tuple[int, float]]:
    """(bytes, seconds) of each message whose size is known, in order. It may wait for other ranks in it."""
    return [
        (event.bytes, event.end_s - event.start_s)
        for event in trace.events
        if event.collective == collective and event.bytes and event.end_s > event.start_s
    ]


def _span(
    task: str, kind: str, at: tuple[float, float], stream: str = "compute", **more: int
) -> dict[str, Any]:
    """A row of the timeline, ``at`` start and end in seconds."""
    span = {"task": task, "kind": kind, "stream": stream, "start_s": at[0], "end_s": at[1]}
    return {**span, **more}


def _message_spans(events: Sequence[Event], buckets: Sequence[int]) -> Iterator[dict[str, Any]]:
    for kind in COMMUNICATION:
        messages = sorted((e for e in events if e.collective == kind), key=lambda e: e.start_s)
        known = kind == "all_reduce" and len(messages) == len(buckets)
        for number, event in enumerate(messages):
            group = number if known or not buckets else -1
            n_bytes = buckets[number] if known else event.bytes
            name = f"{kind} {number}"
            yield _span(name, kind, event.at_s, "communication", group=group, bytes=n_bytes)


def _loading_spans(events: Sequence[Event]) -> Iterator[dict[str, Any]]:
    for event in events:
        if event.name.startswith("enumerate(DataLoader)"):
            yield _span("load", "io", event.at_s, "input")
        if event.on_gpu and event.name.startswith("Memcpy HtoD"):
            yield _span("copy", "h2d", event.at_s, "input")


def _phase_spans(iteration: TracedIteration) -> list[dict[str, Any]]:
    last_s = iteration.gradients_end_s()
    start_s, end_s = iteration.phases["backward"]
    phases = {**iteration.phases, "backward": (start_s, last_s)}
    if end_s > last_s:
        phases["wait"] = last_s, end_s
    return [_span(kind, kind, at_s) for kind, at_s in phases.items()]


def _kernel_spans(iteration: TracedIteration) -> list[dict[str, Any]]:
    return [
        _span(kernel.name, kind, kernel.at_s)
        for kind, (start_s, end_s) in iteration.phases.items()
        for launched_s, kernel in iteration.kernels
        if start_s <= launched_s < end_s and not kernel.name.startswith("Memcpy HtoD")
    ]
