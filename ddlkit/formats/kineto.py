"""Traces of torch.profiler, as a layer profile, message times and a timeline.

The profiler, whose recorder is called Kineto, exports a Chrome trace: a JSON document
with a list of spans. Such a trace has two clocks. The processor launches work, and a
GPU does the work later. Autograd shows which operators belong to forward, to backward
and to which gradient, but only by the processor's clock. On a GPU, a kernel therefore
belongs to the phase in which the processor launched it, and its time is when the GPU
was busy with it.

Every function that finds something missing or damaged raises a ``UserError`` that names
the file.
"""

from __future__ import annotations

import math
import re
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
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

NEEDED = (
    "give a file that export_chrome_trace of torch.profiler has written, or record one with "
    "ddlkit trace"
)
"""What a user does whose file is no trace of torch.profiler."""

PHASES = ("forward", "backward", "update")

FORWARD = "ddlkit.forward"
BACKWARD = "ddlkit.backward"
UPDATE = "ddlkit.update"
"""Names of ranges with which a training loop may mark the phases of an iteration."""

EVALUATE = "autograd::engine::evaluate_function"
"""The start of the name of a span in which autograd runs a function of backward."""

ACCUMULATE = "torch::autograd::AccumulateGrad"
"""The name of a span in which autograd stores a gradient that is ready."""

HOW_TO_RECORD = (
    "record whole iterations (forward, backward and optimizer.step) with "
    "torch.profiler.profile(activities=[CPU, and CUDA on a GPU], record_shapes=True, "
    "schedule=torch.profiler.schedule(wait=0, warmup=5, active=16, repeat=1)), or let "
    "ddlkit trace record them"
)
MOST_US = 1e18
"""The largest instant or duration that is read, in microseconds."""

MOST_TIMES_SHORTEST = 2.0
"""An iteration is slow if it takes more than this many times as long as the shortest one."""

_OPTIMIZER_STEP = "Optimizer.step#"
HOST_TO_DEVICE = "Memcpy HtoD"
_NCCL_KERNEL = re.compile(r"(void )?(nccl|rccl|msccl)")
# Matched to "category name". On CUDA, a call of the runtime that launches has "Launch"
# in its name; the other calls wait or copy. Of the runtimes of other devices, any call
# counts as a launch.
_LAUNCH_OF_WORK = re.compile(r"cuda_runtime .*Launch|(?!cuda)\w+_runtime ")

_SEQUENCE_NUMBER = "Sequence number"
_COLLECTIVE_NAME = "Collective name"
_RECORD_COMMS = "record_param_comms"
_SIZE_ARGS = (
    _COLLECTIVE_NAME,
    "In msg nelems",
    "Out msg nelems",
    "dtype",
    "Group size",
)
# The first input of an operator that gathers or coalesces is only a part of its
# message, so that the size of the message is unknown.
_MESSAGE_OPERATOR = re.compile(f"{_RECORD_COMMS}$|nccl:(?!.*(gather|coalesced))")


class _ShardedPost(NamedTuple):
    """A collective of sharded parameters, and the names of gloo's spans that send it."""

    collective: str
    spans: tuple[str, ...]


_SHARDED_POSTS = {
    "c10d::_allgather_base_": _ShardedPost("all_gather", ("gloo:all_gather",)),
    "c10d::_reduce_scatter_base_": _ShardedPost(
        "reduce_scatter", ("gloo:all_reduce", "gloo:reduce_scatter")
    ),
}
"""The operators by which FSDP posts messages."""

# The profiler writes C++ names of the types of operators' inputs, and c10's names of
# the types of messages.
_ELEMENT_BYTES = {
    **dict.fromkeys(("double", "long", "long int", "complexfloat"), 8),
    **dict.fromkeys(("float", "int"), 4),
    **dict.fromkeys(("half", "bfloat16", "short", "short int"), 2),
    **dict.fromkeys(("bool", "byte", "char", "signed char", "unsigned char"), 1),
}

# Ranges that were marked on the processor are copied to the GPU's rows, where they
# begin with the first kernel. The range on the processor is the one to use.
_COPIES_OF_RANGES = ("gpu_user_annotation", "Trace")
_GPU_CATEGORIES = ("kernel", "memcpy", "memset")


class Event(NamedTuple):
    """One span of a trace.

    Attributes
    ----------
    name : str
        What ran.
    start_s, end_s : float
        When it ran, in seconds from the start of the first span of the trace.
    on_gpu : bool
        Whether the GPU ran it (a kernel, a copy or a memset). The launch of a kernel is
        a span of the processor.
    category : str
        The profiler's category, such as "cpu_op".
    args : mapping of str to object
        What the profiler notes of the span. For a message on a GPU, it also contains
        what the operator that launched the message notes of its size.
    thread : str
        The thread of the processor, or the stream of the GPU.
    correlated_s : float or None
        When the processor launched the span. None if that is not in the trace, and
        minus infinity if that was before the trace began.
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
        """Return when the span was launched, or else when it started, in seconds."""
        if self.correlated_s is None:
            return self.start_s
        return self.correlated_s

    @property
    def is_launched_before_trace(self) -> bool:
        """Return whether the span was launched before the trace began."""
        return self.correlated_s == -math.inf

    @property
    def collective(self) -> str:
        """Return the collective of a message, such as "all_reduce", or else "".

        A message is a span of gloo or a kernel of NCCL. The result is "other" for a
        message of a collective that `COLLECTIVES` does not have, and "" for a span that
        is no message.
        """
        is_kernel = self.on_gpu and _NCCL_KERNEL.match(self.name)
        if not (is_kernel or self.name.startswith("gloo:")):
            return ""
        # Some kernels of NCCL serve several collectives, and ``args`` has the name of the one
        # that was sent. If there is no such name, that of the span decides. If the two names
        # are of different collectives, the one that comes first in `COLLECTIVES` counts.
        noted_name = self.args.get(_COLLECTIVE_NAME, "")
        # The spellings are in small letters without underscores.
        both_names = f"{noted_name} {self.name}".lower().replace("_", "")
        for name, collective in COLLECTIVES.items():
            if any(spelling in both_names for spelling in collective.names):
                return name
        return "other"

    @property
    def elements(self) -> int:
        """Return the elements of an operator's first input, 0 if they are unknown."""
        shape = _first(self.args.get("Input Dims"))
        return _elements_of_shape(shape) if isinstance(shape, list) else 0

    @property
    def undefined(self) -> bool:
        """Return whether the first input of an operator is no tensor.

        Autograd runs ``ACCUMULATE`` also for a gradient that does not exist.
        """
        return _first(self.args.get("Input type")) == ""

    @property
    def bytes(self) -> int:
        """Return the size of a message, or of an operator's first input, in bytes.

        The size of a message is that of its input or that of its output, whichever is larger:
        the output of an all-gather, for example. An unknown size is 0.
        """
        # The operator record_param_comms has the elements of a message's input and output, under
        # "In msg nelems" and "Out msg nelems". A message may have them, too.
        if "In msg nelems" in self.args:
            collective = COLLECTIVES.get(self.collective)
            # The table `COLLECTIVES` says which of the two is larger. If it does not have the
            # collective, the input counts.
            direction = "In"
            if collective is not None and collective.sized == "output":
                direction = "Out"
            elements = _count_or_zero(self.args.get(f"{direction} msg nelems"))
            dtype = self.args.get("dtype")
        else:
            elements = self.elements
            dtype = _first(self.args.get("Input type"))
        # The profiler writes the type of an input as "c10::Half", for example. If the type
        # is unknown, so is the size, for which 0 stands.
        dtype_name = str(dtype).lower().removeprefix("c10::")
        return elements * _ELEMENT_BYTES.get(dtype_name, 0)

    def identifier(self, arg: str) -> int | None:
        """Return a number in ``args`` that spans share if they belong together.

        Parameters
        ----------
        arg : str
            The name of the number. "correlation" relates a kernel to its launch, and
            "Sequence number" an operator of forward to the function of backward that
            computes its gradient.

        Returns
        -------
        int or None
            The number, or None if the span has no such number.
        """
        value = self.args.get(arg)
        return value if isinstance(value, int) else None


def _first(value: Any) -> Any:
    """Return the first element of a list that has one, else None."""
    return value[0] if isinstance(value, list) and value else None


def _count_or_zero(value: Any) -> int:
    """Return a value of a file if it is a possible count, else 0.

    A count is a whole number from 0 to ``MOST_WHOLE``.
    """
    return value if isinstance(value, int) and 0 <= value <= MOST_WHOLE else 0


def _elements_of_shape(shape: Sequence[Any]) -> int:
    """Return how many elements a tensor of some shape has, 0 for a damaged shape."""
    # A length that is no count is 0, and so is then the product.
    return _count_or_zero(math.prod(_count_or_zero(length) for length in shape))


@dataclass(frozen=True)
class KinetoTrace:
    """What torch.profiler saw of some training.

    Attributes
    ----------
    source : str
        The file, as errors name it.
    events : tuple of Event
        Spans in the order of their start.
    rank : int
        The rank of the process that was profiled.
    device : str
        "cpu", or the name of the GPU.
    world_size : int
        How many ranks the training had, 0 if the trace does not say.
    """

    source: str
    events: tuple[Event, ...]
    rank: int = 0
    device: str = "cpu"
    world_size: int = 0

    def missing(self, problem: str) -> UserError:
        """Return the error for a trace that lacks something, with how to record one."""
        return UserError(f"{self.source}: {problem}: {HOW_TO_RECORD}")


def matches(text: str) -> bool:
    """Return whether a file may be JSON, by its first character.

    A trace may be too long to be parsed twice. Therefore only `parse_kineto` finds out
    whether the JSON is a trace.
    """
    return text.lstrip().startswith(("{", "["))


def read(text: str, file: str, options: ImportOptions) -> ReadProfile:
    """Return the layer profile of a trace.

    The option ``iterations`` chooses among the iterations of the trace.

    `ddlkit.formats.contract` describes arguments, result and errors.
    """
    # Only if the user has named the kind of the file can it be of another kind.
    if not matches(text):
        raise UserError(
            f"{file}: is no trace of torch.profiler, which is JSON: give such a trace, or "
            "leave --kind out, so that the kind is recognized"
        )
    # A finding is a remark for the user.
    profile, findings = layer_profile(parse_kineto(text, file), options.iterations)
    overhead = (
        "all times include the overhead of the profiler: "
        "compare with an iteration that is not profiled"
    )
    findings.append(Finding("profiler", text=overhead))
    if not profile.update_s:
        no_update = "the trace has no step of an optimizer: the update takes no time"
        findings.append(Finding("update", text=no_update))
    return ReadProfile(profile, tuple(findings))


# -- From the file to spans ------------------------------------------------------------


def parse_kineto(text: str, source: str) -> KinetoTrace:
    """Return the trace in a file that ``export_chrome_trace`` has written.

    Parameters
    ----------
    text : str
        The content of the file.
    source : str
        The file, as errors name it.

    Returns
    -------
    KinetoTrace
        The spans of the trace.

    Raises
    ------
    UserError
        If the text is not JSON, or for the reasons of `trace_of_document`.
    """
    try:
        document = parse_json(text)
    except ValueError as error:
        advice = (
            "copy the file again, or record it again (fewer iterations if it is long)"
        )
        raise UserError(
            f"{source}: cannot be read as JSON: {error}: {advice}"
        ) from error
    return trace_of_document(document, source)


def trace_of_document(document: Any, source: str) -> KinetoTrace:
    """Return the trace in the parsed JSON of a file that PyTorch's profiler has written.

    Parameters
    ----------
    document : object
        The parsed JSON, an object or a list. The list of entries is removed from an object
        to save memory. Entries that are not needed may have been left out before.
    source : str
        The name of the file in errors.

    Returns
    -------
    KinetoTrace
        The trace with its rank, its device and its number of ranks.

    Raises
    ------
    UserError
        If the document is no Chrome trace, if a span has no name, start or duration, if
        the trace has no span, or if it has launches of kernels but no kernel.
    """
    # Work of the GPU that was launched before the trace began is marked, so that no
    # iteration of the trace counts it.
    events = _mark_launched_before_trace(_spans(document, source))
    trace = KinetoTrace(source, tuple(events))
    if not trace.events:
        raise trace.missing("the trace has no spans")

    # Kernels of NCCL do not count: where a GPU trains, other kernels compute.
    computes_on_gpu = any(event.on_gpu and not event.collective for event in events)
    if not computes_on_gpu:
        _refuse_lost_kernels(trace)
    device = _gpu_name(document) if computes_on_gpu else "cpu"
    return replace(
        trace,
        rank=_rank(document),
        device=device,
        world_size=_world_size(document),
    )


def _refuse_lost_kernels(trace: KinetoTrace) -> None:
    """Raise UserError if a trace without kernels has launches of kernels.

    A profiler that does not record the GPU notes no launches either. Launches without
    any kernel therefore mean that the kernels were lost.
    """
    for event in trace.events:
        # The category tells the runtime of the device, such as "cuda_runtime".
        if _LAUNCH_OF_WORK.match(f"{event.category} {event.name}"):
            problem = "gives work to a device, but no kernel is in the trace"
            raise trace.missing(f"{event.name} {problem}")


def _rank(document: Any) -> int:
    """Return the rank that a trace states, or else 0."""
    match document:
        case {"distributedInfo": {"rank": rank}}:
            return _count_or_zero(rank)
    return 0


def _world_size(document: Any) -> int:
    """Return the number of ranks that a trace states, or else 0."""
    match document:
        case {"distributedInfo": {"world_size": world_size}}:
            return _count_or_zero(world_size)
    return 0


def _gpu_name(document: Any) -> str:
    """Return the name of the first GPU in a trace, or "cuda" if no name is stated."""
    match document:
        case {"deviceProperties": [{"name": str(name)}, *_]}:
            return name
    return "cuda"


def _spans(document: Any, source: str) -> list[Event]:
    """Return the spans of a Chrome trace, the earliest first.

    Spans of a GPU have the instants of their launches, and spans of messages have their
    sizes. Gloo's messages of sharded parameters have their true collectives and sizes, even
    where gloo sends a reduce-scatter as an all-reduce. Times are in seconds from the start
    of the first span.

    The list of entries is taken out of the ``document``, so that a large trace is not
    kept twice. Raises UserError if the document is no Chrome trace, or if a span has no
    name, start or duration.
    """
    entries = _entries_of_spans(document, source)
    # The earliest instant. Without spans, the default is not used.
    first_us = min((entry["ts"] for entry in entries), default=0.0)
    # Each span replaces its entry in the same list, which frees the memory of the entry.
    events: list[Any] = entries
    for k, entry in enumerate(entries):
        events[k] = _event(entry, first_us)
    # Spans of a GPU get their launches, and messages their sizes. The order of the spans
    # does not matter here.
    launched = _with_launches(events)
    # Of spans that start together, the longest contains the others and comes first.
    ordered = sorted(launched, key=lambda event: (event.start_s, -event.end_s))
    # A message of sharded parameters gets its collective and size from the operator that
    # posted it. An operator is matched with the first of gloo's spans that fits, so the spans
    # must be in order.
    return _with_sharded_messages(ordered)


def _entries_of_spans(document: Any, source: str) -> list[dict[str, Any]]:
    """Return the entries of a Chrome trace that are spans, and take all entries out of it.

    The document then no longer refers to the entries, so that the caller can free the
    memory of each.

    Raises UserError if the document is no Chrome trace, or if a span has no name, start
    or duration.
    """
    spans = []
    for number, entry in enumerate(_taken_entries(document, source)):
        # Entries of other phases than "X", which stands for spans, are left out. They are
        # instants, for example. So are the copies of a range of the processor that the profiler
        # adds to the rows of the GPU.
        if entry.get("ph") != "X" or entry.get("cat") in _COPIES_OF_RANGES:
            continue
        if not _has_name_and_times(entry):
            name = shown(entry.get("name"))
            start = shown(entry.get("ts"))
            duration = shown(entry.get("dur"))
            problem = f"({name}): ts {start} and dur {duration} must be microseconds"
            raise UserError(
                f"{source}: traceEvents[{number}] {problem}: record the trace again"
            )
        spans.append(entry)
    return spans


def _taken_entries(document: Any, source: str) -> list[dict[str, Any]]:
    """Return all entries of a Chrome trace, after taking their list out of the document.

    As long as the document has the list, the memory of no entry can be freed. A Chrome trace
    is an object with a list "traceEvents" of entries, or only the list.
    Raises UserError if the document is neither, or if an entry is no object.
    """
    entries = document
    if isinstance(document, dict):
        entries = document.pop("traceEvents", None)
    is_list = isinstance(entries, list)
    if not is_list or not all(isinstance(entry, dict) for entry in entries):
        raise UserError(
            f"{source}: is no Chrome trace, because it has no list traceEvents of "
            f"objects: {NEEDED}"
        )
    return entries


def _has_name_and_times(entry: Mapping[str, Any]) -> bool:
    """Return whether a span has a name, a start and a duration that is not negative.

    Start and duration, in microseconds, may be at most ``MOST_US``.
    """
    if not isinstance(entry.get("name"), str):
        return False
    for key in ("ts", "dur"):
        value = entry.get(key)
        # The comparison is False also for a value that is not a number (NaN).
        if not (isinstance(value, int | float) and abs(value) <= MOST_US):
            return False
    return bool(entry["dur"] >= 0)


def _event(entry: Mapping[str, Any], first_us: float) -> Event:
    """Return an entry of a Chrome trace as a span.

    Times become seconds after ``first_us``, the microseconds at which the trace starts.
    """
    category = str(entry.get("cat", ""))
    start_us = entry["ts"] - first_us
    args = entry.get("args")
    # Some profilers write "gpu_memcpy", and others "Memcpy" or "memcpy".
    gpu_category = category.lower().removeprefix("gpu_")
    # Long traces have few threads. Their names are interned, so that all spans of a thread
    # share one string.
    return Event(
        name=entry["name"],
        start_s=start_us / 1e6,
        end_s=(start_us + entry["dur"]) / 1e6,
        on_gpu=gpu_category in _GPU_CATEGORIES,
        category=category,
        args=args if isinstance(args, dict) and args else MappingProxyType({}),
        thread=sys.intern(f"{entry.get('pid')} {entry.get('tid')}"),
    )


def _with_launches(events: Sequence[Event]) -> list[Event]:
    """Return all spans, those of a GPU with the instants of their launches.

    These instants are in ``correlated_s``. Messages on a GPU also get their sizes, as far as
    their operators note them. A span of a GPU and its launch on the processor have the same
    correlation number.
    """
    # By their correlation numbers, the spans of the processor that launch work.
    launches = {}
    for event in events:
        correlation = event.identifier("correlation")
        if correlation is not None and not event.on_gpu:
            launches[correlation] = event
    # The arguments that tell the size of each message, by its correlation number.
    size_args = _size_args(events, launches)
    with_launches = []
    for event in events:
        correlation = event.identifier("correlation")
        # Both the kernel and its launch on the processor have the number, and both get the
        # instant and the sizes. On the launch these have no effect: the instant is its own
        # start, and nobody reads the sizes of a span that is no message.
        if correlation is not None and correlation in launches:
            event = event._replace(correlated_s=launches[correlation].start_s)
            if correlation in size_args:
                # If the kernel and its operator both note an argument, that of the kernel
                # counts.
                event = event._replace(args={**size_args[correlation], **event.args})
        with_launches.append(event)
    return with_launches


def _with_sharded_messages(events: list[Event]) -> list[Event]:
    """Return the spans, with the true collectives and sizes of gloo's sharded messages.

    Sharded parameters are divided among the ranks, one shard each. Gloo's span of an
    all-gather has only the shard of a rank as its input, and gloo sends a reduce-scatter
    as an all-reduce, so neither span tells what the message is. The operator that posted
    the message (handed it to gloo) does: its inputs are the shard and the whole.

    ``events`` are in the order of their start. Each operator describes the first of gloo's
    spans that may send its collective, has one of its sizes, ends after the operator has
    begun, and is not described by an operator before it.
    """
    described = list(events)
    # The positions of gloo's spans for which no operator has been found yet.
    unmatched = [k for k, event in enumerate(events) if event.name.startswith("gloo:")]
    for post in events:
        # The collective of the operator, and the names of gloo's spans for it. None if the
        # span is no operator that posts a sharded message.
        sharded = _SHARDED_POSTS.get(post.name)
        sizes = _elements_of_inputs(post)
        if sharded is None or len(sizes) < 2:
            continue
        # The first two inputs are the whole and the shard, in either order. The whole is
        # the larger one.
        whole = max(sizes[:2])
        shard = min(sizes[:2])
        for k in unmatched:
            span = events[k]
            is_alike = span.name in sharded.spans and span.elements in (whole, shard)
            # A message that was over before the operator began is an earlier one.
            if is_alike and span.end_s > post.start_s:
                described[k] = _described_as(span, sharded.collective, whole, shard)
                unmatched.remove(k)
                break
    return described


def _described_as(span: Event, collective: str, whole: int, shard: int) -> Event:
    """Return gloo's span of a message of sharded parameters, with its sizes.

    ``whole`` and ``shard`` are the elements of all ranks together, and of one rank.
    """
    # The input of a reduce-scatter is the whole, and its output the shard. Those of an
    # all-gather are the other way round.
    sends_whole = collective == "reduce_scatter"
    sizes = {
        _COLLECTIVE_NAME: collective,
        "In msg nelems": whole if sends_whole else shard,
        "Out msg nelems": shard if sends_whole else whole,
        "dtype": _first(span.args.get("Input type")),
    }
    return span._replace(name=f"gloo:{collective}", args={**span.args, **sizes})


def _elements_of_inputs(operator: Event) -> list[int]:
    """Return the number of elements of each input of an operator that is a tensor."""
    shapes = operator.args.get("Input Dims")
    if not isinstance(shapes, list):
        return []
    # An input that is no tensor, such as a number, has an empty shape.
    return [
        _elements_of_shape(shape)
        for shape in shapes
        if isinstance(shape, list) and shape
    ]


def _size_args(
    events: Sequence[Event], launches: Mapping[int, Event]
) -> dict[int, dict[str, Any]]:
    """Return the arguments that tell the size of each message, by its correlation number.

    A message is a kernel of NCCL here. It does not always have these arguments, but the
    operator during which it was launched has them. ``launches`` has the launch of each
    correlation number. A message whose operator is not in the trace has an empty dict in the
    result.
    """
    # The correlation numbers of all messages whose launch is in the trace.
    message_correlations = set()
    for event in events:
        correlation = event.identifier("correlation")
        if correlation is not None and correlation in launches and event.collective:
            message_correlations.add(correlation)
    # Sorted by thread and then by instant, as `_launched_during` needs them.
    launches_of_messages = sorted(
        _MessageLaunch(
            launches[correlation].thread, launches[correlation].start_s, correlation
        )
        for correlation in message_correlations
    )
    args: dict[int, dict[str, Any]] = {
        correlation: {} for correlation in message_correlations
    }

    # Several nested operators may have launched one message, and their arguments are merged. Of
    # an argument that several of them have, the value of the innermost operator counts. This
    # one starts last, so the operators are merged in the order of their start.
    operators = [event for event in events if _MESSAGE_OPERATOR.match(event.name)]
    for operator in sorted(operators, key=lambda event: event.start_s):
        launched = _launched_during(operator, launches_of_messages)
        # If an operator launches several messages, how much each of them sends is
        # unknown.
        if len(launched) == 1:
            args[launched[0].correlation].update(_size_args_of_operator(operator))
    return args


class _MessageLaunch(NamedTuple):
    """On which thread and when a message was launched, and its correlation number."""

    thread: str
    start_s: float
    correlation: int


def _launched_during(
    operator: Event, launches: Sequence[_MessageLaunch]
) -> Sequence[_MessageLaunch]:
    """Return those of the ``launches`` of messages that an operator has made.

    They are the launches on its thread from its start (inclusive) to its end (exclusive).
    ``launches`` are sorted by thread and then by instant, so that these are neighbours.
    """
    # A pair of a thread and an instant sorts before all launches of this thread at or after this
    # instant, because a tuple sorts before a longer one that begins with it.
    first = bisect_left(launches, (operator.thread, operator.start_s))
    behind_last = bisect_left(launches, (operator.thread, operator.end_s))
    return launches[first:behind_last]


def _size_args_of_operator(operator: Event) -> dict[str, Any]:
    """Return what an operator tells of its message, as arguments that `Event` reads.

    They tell the collective of the message, and its size or the shape and type of the input.
    """
    # Any other operator, such as nccl:all_reduce, has the collective in its name only, which is
    # added to its arguments. The size follows from its arguments "Input Dims" and "Input type".
    if operator.name != _RECORD_COMMS:
        return {**operator.args, _COLLECTIVE_NAME: operator.name}
    # record_param_comms has arguments for the collective and for the sizes of input and
    # output. Its "Input Dims" must be left out, because the input of a collective that
    # gathers is only one rank's part of the message.
    return {name: value for name, value in operator.args.items() if name in _SIZE_ARGS}


def _mark_launched_before_trace(events: Sequence[Event]) -> list[Event]:
    """Return all spans, those that were launched before the trace began marked as such.

    The mark is minus infinity as the instant of the launch. Only spans of a GPU get it. A
    stream works in the order of launches. What it does before its first span whose launch
    is in the trace was therefore launched before the trace. ``events`` are in the order
    of their start.
    """
    # When each stream starts its first span whose launch is in the trace.
    first_known_s: dict[str, float] = {}
    for event in events:
        # The thread of a span of a GPU is its stream.
        if event.on_gpu and event.correlated_s is not None:
            first_known_s.setdefault(event.thread, event.start_s)
    # A stream may have no such span. What it does before the first such span of any other
    # stream is then taken for launched before the trace. If no stream has such a span, no
    # span is marked, because none starts before the default, minus infinity.
    earliest_s = min(first_known_s.values(), default=-math.inf)
    marked = []
    for event in events:
        is_unknown = event.on_gpu and event.correlated_s is None
        if is_unknown and event.start_s < first_known_s.get(event.thread, earliest_s):
            event = event._replace(correlated_s=-math.inf)
        marked.append(event)
    return marked


# -- From spans to iterations ----------------------------------------------------------


class TracedIteration(NamedTuple):
    """One training iteration in a trace.

    Attributes
    ----------
    number : int
        Which step of the trace this is, counted from 0.
    steps_in_trace : int
        How many steps the whole trace has, with or without a backward pass.
    events : tuple of Event
        Spans in the order in which the processor launched them.
    phases : mapping of str to tuple of float
        When each phase starts and ends by the processor's clock, in seconds.
    free_s : float
        When the GPU had computed all that was launched before this iteration, in
        seconds.
    """

    number: int
    steps_in_trace: int
    events: tuple[Event, ...]
    phases: Mapping[str, tuple[float, float]]
    free_s: float

    def kernels(
        self, start_s: float = -math.inf, end_s: float = math.inf
    ) -> list[Event]:
        """Return the GPU's work other than messages that was launched between two instants.

        Parameters
        ----------
        start_s, end_s : float, optional
            From when (inclusive) until when (exclusive) the work was launched, in
            seconds. By default, all work of the iteration is returned.

        Returns
        -------
        list of Event
            Kernels, copies and memsets in the order of their launches.
        """
        return [
            event
            for event in self.events
            if event.on_gpu
            and not event.collective
            and start_s <= event.launched_s < end_s
        ]

    def repeats_forward(self) -> bool:
        """Return whether operators of forward run between functions of backward, or after them.

        This is so where gradients of several batches are summed up. Activation
        checkpointing also runs operators of forward again, but inside a function of
        backward.

        An operator belongs to forward if a function of backward computes its gradient.
        Operators of an optimizer, for example, do not belong to it. The result is True if
        an operator of forward begins after the first function of backward has begun, and
        does not lie inside a function of backward.
        """
        # The functions of backward, a span for each, in the order in which they start.
        functions = [e for e in self.events if e.name.startswith(EVALUATE)]
        starts_s = [function.start_s for function in functions]
        # latest_end_s[k] is when the last of the first k functions ends. It has one
        # element more than there are functions: with k = 0, minus infinity.
        function_ends_s = (function.end_s for function in functions)
        latest_end_s = list(accumulate(function_ends_s, max, initial=-math.inf))
        # Spans with one of these numbers are the operators of forward, and the functions
        # of backward themselves.
        numbers_of_forward = _numbers_of_forward(functions)
        for event in self.events:
            if event.identifier(_SEQUENCE_NUMBER) not in numbers_of_forward:
                continue
            # How many functions had begun when the event began, itself included if it is
            # a function.
            n_begun = bisect_right(starts_s, event.start_s)
            # If the event ends later than the last of these functions, none of them contains
            # it. Otherwise this last one does, because it began no later. An event that is a
            # function is one of them itself, and so is never outside.
            is_outside = event.end_s > latest_end_s[n_begun]
            has_backward_begun = n_begun > 0
            if has_backward_begun and is_outside:
                return True
        return False

    def gradients_end_s(self) -> float:
        """Return when the last gradient was ready by the processor's clock, in seconds.

        The last gradient was ready when the last of autograd's functions of backward ended.
        If the trace has no spans of such functions, the result is the end of backward.
        """
        _, backward_end_s = self.phases["backward"]
        # The user may have marked a backward that ends before autograd's last function.
        # Functions that end after the mark are left out.
        ends_s = [
            event.end_s
            for event in self.events
            if event.name.startswith(EVALUATE) and event.end_s <= backward_end_s
        ]
        return max(ends_s, default=backward_end_s)


def _numbers_of_forward(functions: Sequence[Event]) -> set[int]:
    """Return the sequence numbers of the operators whose gradients backward computes.

    Autograd gives an operator of forward and its function of backward the same sequence
    number. Each thread counts such numbers for itself. ``functions`` has the functions of
    backward, in the order in which they start.
    """
    numbers = set()
    # When the last of the functions so far ends.
    latest_end_s = -math.inf
    for function in functions:
        # A function inside another one belongs to operators that checkpointing has run
        # again in backward's thread. It is left out, because its number can by chance be
        # that of an unrelated operator of the main thread.
        is_inside_another = function.start_s < latest_end_s
        number = function.identifier(_SEQUENCE_NUMBER)
        if number is not None and not is_inside_another:
            numbers.add(number)
        latest_end_s = max(latest_end_s, function.end_s)
    return numbers


def iterations(trace: KinetoTrace, chosen: Sequence[int] = ()) -> list[TracedIteration]:
    """Return the steps of a trace that have a forward and a backward pass.

    Parameters
    ----------
    trace : KinetoTrace
        The trace.
    chosen : sequence of int, optional
        Numbers of the iterations to return, counted from 0 over all steps of the trace.
        By default all are returned.

    Returns
    -------
    list of TracedIteration
        The iterations in the order of the trace.

    Raises
    ------
    UserError
        If no step has both passes, or if an iteration that was chosen does not exist.
    """
    by_launch = sorted(trace.events, key=lambda event: event.launched_s)
    launched_s = [event.launched_s for event in by_launch]
    free_s = _free_s(by_launch)
    steps = _steps(trace)
    traced: list[TracedIteration] = []
    for number, (start_s, end_s) in enumerate(steps):
        # The events of a step were launched from its start (inclusive) to its end
        # (exclusive). They begin at the index ``first``.
        first = bisect_left(launched_s, start_s)
        behind_last = bisect_left(launched_s, end_s)
        events = tuple(by_launch[first:behind_last])
        phases = _phases(events)
        if "forward" in phases and "backward" in phases:
            iteration = TracedIteration(
                number=number,
                steps_in_trace=len(steps),
                events=events,
                phases=phases,
                # When the GPU had computed all events that were launched before this step.
                free_s=free_s[first],
            )
            traced.append(iteration)
    if not traced:
        raise _no_iteration(trace)
    if not chosen:
        return traced
    return _chosen_iterations(traced, chosen, trace.source)


def _free_s(events: Sequence[Event]) -> Floats:
    """Return when the GPU had computed all of the first k events, for each k, in seconds.

    With k = 0 there is no event, for which minus infinity stands. So the result has one
    element more than there are events, which are in the order of their launches.
    """
    # Minus infinity also stands for an event that the GPU does not compute, such as a
    # message or a copy of an input. During these, the GPU can compute something else.
    computed_s = [
        event.end_s if _is_computed_on_gpu(event) else -math.inf for event in events
    ]
    free_s: Floats = np.maximum.accumulate([-math.inf, *computed_s])
    return free_s


def _chosen_iterations(
    traced: Sequence[TracedIteration], chosen: Sequence[int], source: str
) -> list[TracedIteration]:
    """Return the iterations whose numbers the user has chosen.

    Raises UserError for a number that no iteration has.
    """
    numbers = [iteration.number for iteration in traced]
    unknown = sorted(set(chosen) - set(numbers))
    if unknown:
        raise UserError(
            f"{source}: has no iteration {unknown[0]}, for which --iterations asks: it has "
            f"the iterations {_ranges(numbers)}"
        )
    return [iteration for iteration in traced if iteration.number in chosen]


def _is_computed_on_gpu(event: Event) -> bool:
    """Return whether a span is work of the GPU, no message and no copy of an input."""
    return event.on_gpu and not _is_input_copy(event) and not event.collective


def _steps(trace: KinetoTrace) -> list[tuple[float, float]]:
    """Return when each step starts and ends by the processor's clock, in seconds.

    Steps are the spans in which the profiler notes its steps. Without such spans, they
    last from the end of one update to the end of the next one. Updates are those that the
    user has marked or, without marks, the steps that the optimizer notes. Without any of
    these, the whole trace is one step.
    """
    profiler_steps = [
        (event.start_s, event.end_s)
        for event in trace.events
        if event.name.startswith("ProfilerStep#")
    ]
    if profiler_steps:
        return profiler_steps
    updates = [event for event in trace.events if _marked_phase(event) == "update"]
    if not updates:
        updates = [e for e in trace.events if e.name.startswith(_OPTIMIZER_STEP)]
    if not updates:
        return [(0.0, math.inf)]
    # The first step begins with the trace, at 0. Events after the last update belong to no
    # step.
    update_ends_s = sorted(update.end_s for update in updates)
    return list(pairwise([0.0, *update_ends_s]))


def _no_iteration(trace: KinetoTrace) -> UserError:
    """Return the error that says why no step of a trace is an iteration of training."""
    if not any(event.name.startswith("aten::") for event in trace.events):
        return trace.missing(
            "no operator of PyTorch (aten::): a trace of another program, or of the GPU only"
        )
    problem = "no iteration has both a forward and a backward pass"
    # Before PyTorch 1.12, autograd noted that it stores a gradient, but not which function
    # it evaluates. Forward and backward cannot be told apart in such a trace.
    has_gradients = any(event.name == ACCUMULATE for event in trace.events)
    if has_gradients:
        problem += (
            ", because the trace was cut or is of a PyTorch before 1.12, where ranges "
            f"{FORWARD} and {BACKWARD} must mark the passes"
        )
    return trace.missing(problem)


def _ranges(numbers: Sequence[int]) -> str:
    """Return rising numbers as the option --iterations takes them, such as "0,2-5"."""
    # Each run of consecutive numbers becomes one range. A run ends at a number whose next
    # one is larger by more than 1.
    last_of_runs = np.flatnonzero(np.diff(numbers) > 1)
    ranges = []
    for run in np.split(np.array(numbers), last_of_runs + 1):
        ranges.append(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}")
    return ",".join(ranges)


def _marked_phase(event: Event) -> str:
    """Return the phase that a range of the user marks, "" if it marks none."""
    name = event.name.removeprefix("ddlkit.")
    return name if name in PHASES and not event.on_gpu else ""


def _phases(events: Sequence[Event]) -> dict[str, tuple[float, float]]:
    """Return when each phase of a step starts and ends, in seconds.

    A phase that the user has marked lasts as long as the mark. Any other phase follows
    from autograd and the optimizer:

    * Forward lasts from the first operator with a gradient until backward starts.
    * Backward lasts from the first function of autograd to the last function or message,
      or until the update starts, if that is earlier.
    * The update lasts from the first to the last step of the optimizer.

    A phase that cannot be told is left out. All instants are by the processor's clock.
    ``events`` has the spans of one step, in the order in which the processor launched
    them.
    """
    phases: dict[str, tuple[float, float]] = {}
    functions = [event for event in events if event.name.startswith(EVALUATE)]
    updates = [event for event in events if event.name.startswith(_OPTIMIZER_STEP)]
    # When the update starts, which ends backward at the latest. Without an update, infinity.
    update_start_s = updates[0].start_s if updates else math.inf
    if functions:
        backward_start_s = functions[0].start_s
        forward_start_s = _forward_start_s(events, functions)
        # The start of forward is infinite if no operator before backward has a gradient.
        if forward_start_s < backward_start_s:
            phases["forward"] = (forward_start_s, backward_start_s)
        backward_end_s = _backward_end_s(events, functions, update_start_s)
        phases["backward"] = (backward_start_s, backward_end_s)
    if updates:
        phases["update"] = (updates[0].start_s, updates[-1].end_s)
    # If a phase is marked several times, the first mark counts. In reversed order, each
    # mark replaces the one that comes later in the trace.
    for event in reversed(events):
        phase = _marked_phase(event)
        if phase:
            phases[phase] = (event.start_s, event.end_s)
    return phases


def _backward_end_s(
    events: Sequence[Event], functions: Sequence[Event], update_start_s: float
) -> float:
    """Return when the last of backward's ``functions`` and messages ends, in seconds.

    Backward also waits for the messages that the processor sends. When this wait is over
    and the update has begun, the threads that send may still tidy up within the spans of
    the messages. Backward therefore ends with the start of the update at the latest.
    ``events`` has the spans of the step, and ``update_start_s`` is infinite if the step
    has no update.
    """
    ends_s = [function.end_s for function in functions]
    for event in events:
        is_message_of_processor = event.collective and not event.on_gpu
        if is_message_of_processor and event.start_s < update_start_s:
            ends_s.append(event.end_s)
    return min(max(ends_s), update_start_s)


def _forward_start_s(events: Sequence[Event], functions: Sequence[Event]) -> float:
    """Return when the first operator with a gradient starts, in seconds.

    Autograd gives an operator the same sequence number as the one of backward's
    ``functions`` that computes its gradient. Backward starts with the first of
    ``functions``. If no operator with a gradient starts before it, the result is infinite.
    ``events`` has the spans of the step.
    """
    sequence_numbers = {function.identifier(_SEQUENCE_NUMBER) for function in functions}
    # Functions without a number have added None.
    sequence_numbers.discard(None)
    starts_s = [
        event.start_s
        for event in events
        if event.category == "cpu_op"
        and event.start_s < functions[0].start_s
        and event.identifier(_SEQUENCE_NUMBER) in sequence_numbers
    ]
    return min(starts_s, default=math.inf)


# -- From iterations to a layer profile ------------------------------------------------


class _GradientSize(NamedTuple):
    """The size of a gradient, in elements and in bytes."""

    elements: int
    n_bytes: int


class _Times(NamedTuple):
    """How long the phases of one iteration take, in seconds.

    ``backward_s`` has the shape (n,): the time of each gradient, in forward order.
    """

    forward_s: float
    backward_s: Floats
    update_s: float


class _AllTimes(NamedTuple):
    """How long the phases of each of k iterations take, in seconds.

    ``forward_s`` and ``update_s`` have the shape (k,). ``backward_s`` has the shape (k, n):
    the time of each of n gradients, in forward order.
    """

    forward_s: Floats
    backward_s: Floats
    update_s: Floats

    @property
    def all_phases_s(self) -> Floats:
        """Return how long all phases of each iteration take together, of shape (k,)."""
        all_phases_s: Floats = (
            self.forward_s + self.backward_s.sum(axis=1) + self.update_s
        )
        return all_phases_s


def layer_profile(
    trace: KinetoTrace, chosen: Sequence[int] = ()
) -> tuple[LayerProfile, list[Finding]]:
    """Return the iterations of a trace as one layer profile.

    Parameters
    ----------
    trace : KinetoTrace
        The trace, with shapes of inputs.
    chosen : sequence of int, optional
        Numbers of the iterations to use. By default all are used.

    Returns
    -------
    profile : LayerProfile
        One row for each of the n gradients, in forward order. A trace does not tell how
        forward divides among them, so the first row has all of its time.
    findings : list of Finding
        The iterations that were used, and things that were left out.

    Raises
    ------
    UserError
        If the trace lacks something that a profile needs, or if iterations differ in
        their gradients or sum up those of several batches. If no iterations are ``chosen``,
        it is also raised if more than a third of them are slow and more than a third are not.
        A slow one takes more than `MOST_TIMES_SHORTEST` times as long as the shortest one.

    Notes
    -----
    The backward time of a gradient is the time from when the gradient before it was ready
    until it was ready itself. The times are medians over the iterations. A sum of medians
    is not the median of sums, so all backward times are then multiplied by one factor that
    makes their sum the median backward time of the iterations.
    """
    used = iterations(trace, chosen)
    # For each iteration, the spans that store its gradients.
    gradients = [_gradients(iteration) for iteration in used]
    # Elements and bytes of each gradient, which are the same in all iterations.
    sizes = _gradient_sizes(trace, used, gradients)
    times = _all_times(used, gradients)
    # This refuses summed gradients and impossible times. `_kinds_of_iterations` refuses a
    # mixture of usual and slow iterations.
    _check_iterations(trace, used, times.all_phases_s)
    findings = [
        _kinds_of_iterations(trace, used, times.all_phases_s, is_chosen=bool(chosen)),
        *_left_out(trace, used),
    ]
    return _median_profile(trace.device, sizes, times), findings


def _all_times(
    used: Sequence[TracedIteration], gradients: Sequence[Sequence[Event]]
) -> _AllTimes:
    """Return the times of the ``used`` iterations.

    ``gradients`` has the result of `_gradients` for each of them.
    """
    times = [
        _times(iteration, iteration_gradients)
        for iteration, iteration_gradients in zip(used, gradients, strict=True)
    ]
    return _AllTimes(
        forward_s=np.array([of_iteration.forward_s for of_iteration in times]),
        backward_s=np.array([of_iteration.backward_s for of_iteration in times]),
        update_s=np.array([of_iteration.update_s for of_iteration in times]),
    )


def _median_profile(
    device: str, sizes: Sequence[_GradientSize], times: _AllTimes
) -> LayerProfile:
    """Return the layer profile that has the median times of some iterations.

    The medians of backward are scaled, so that their sum is the median of whole backwards.
    ``sizes`` are those of the gradients, in the order of readiness.
    ``times.backward_s`` is already in forward order, which is that of the profile.
    """
    # Gradients become ready from the last tensor to the first, so the sizes are reversed.
    # The array has the shape (n, 2), with a column of elements and one of bytes.
    elements, n_bytes = np.array(sizes[::-1]).T
    n = len(elements)
    # A trace does not tell how forward divides among the tensors.
    forward_of_first_s = np.zeros(n)
    forward_of_first_s[0] = np.median(times.forward_s)
    names = tuple(f"tensor{row}" for row in range(n))
    # A trace names neither the network nor the batch size: ``ddlkit import`` adds both. It
    # has no FLOP either, for which 0 stands.
    return LayerProfile(
        network="",
        device=device,
        batch=1,
        tensor=names,
        layer=names,
        parameters=elements,
        gradient_bytes=n_bytes,
        forward_s=forward_of_first_s,
        backward_s=_scaled_median_backward_s(times.backward_s),
        flops=np.zeros(n),
        update_s=float(np.median(times.update_s)),
    )


def _scaled_median_backward_s(backward_s: Floats) -> Floats:
    """Return the median backward time of each gradient, scaled by one factor for all.

    This factor makes the sum of the result the median backward time of the iterations.
    ``backward_s`` has the shape (k, n) for k iterations of n gradients, and the result
    the shape (n,).
    """
    medians_s = np.median(backward_s, axis=0)
    sum_of_medians_s = medians_s.sum()
    # Times that are all zero cannot be scaled.
    if not sum_of_medians_s:
        return medians_s
    median_of_sums_s = np.median(backward_s.sum(axis=1))
    scaled: Floats = medians_s * (median_of_sums_s / sum_of_medians_s)
    return scaled


def _gradients(iteration: TracedIteration) -> list[Event]:
    """Return the spans that store gradients, in the order in which these become ready."""
    return [e for e in iteration.events if e.name == ACCUMULATE and not e.undefined]


def _gradient_sizes(
    trace: KinetoTrace,
    used: Sequence[TracedIteration],
    gradients: Sequence[Sequence[Event]],
) -> list[_GradientSize]:
    """Return the sizes of the gradients, in the order of readiness.

    ``gradients`` has the result of `_gradients` for each of the ``used`` iterations.
    Raises UserError unless all iterations have the same gradients, with known sizes.
    """
    # An iteration without gradients has an empty list.
    if not all(gradients):
        raise trace.missing(f"no gradient is accumulated (no event {ACCUMULATE})")
    # For each iteration, the sizes of its gradients.
    sizes = [
        [_GradientSize(event.elements, event.bytes) for event in iteration_gradients]
        for iteration_gradients in gradients
    ]
    for iteration_sizes in sizes:
        # A size of 0 bytes is unknown.
        if not all(size.n_bytes for size in iteration_sizes):
            problem = f"no 'Input Dims' and 'Input type' with {ACCUMULATE}"
            raise trace.missing(f"sizes of gradients are missing ({problem})")
    for iteration, iteration_sizes in zip(used, sizes, strict=True):
        if iteration_sizes != sizes[0]:
            first = used[0].number
            raise trace.missing(
                f"iteration {iteration.number} accumulates other gradients than "
                f"iteration {first}, or in another order"
            )
    return sizes[0]


def _check_iterations(
    trace: KinetoTrace, used: Sequence[TracedIteration], all_phases_s: Floats
) -> None:
    """Raise UserError for an iteration whose times would make no sense.

    These are iterations that sum up gradients of several batches, and iterations whose
    phases take longer together than the whole iteration. ``all_phases_s`` has, for each
    iteration, the seconds of its phases together.
    """
    for iteration, phases_s in zip(used, all_phases_s.tolist(), strict=True):
        if iteration.repeats_forward():
            raise UserError(
                f"{trace.source}: iteration {iteration.number}: forward runs again after "
                "backward began, as where the gradients of several batches are summed up: "
                "record steps without gradient accumulation, with optimizer.step after "
                "each backward pass"
            )
        # The events are in the order of their launches. So the first one also starts first:
        # it starts when it is launched, and nothing starts before its launch. But the last event
        # need not end last.
        first_launched = iteration.events[0]
        last_end_s = max(event.end_s for event in iteration.events)
        whole_s = last_end_s - first_launched.start_s
        # A hundredth more is allowed, because the instants in a trace are rounded.
        if phases_s > 1.01 * whole_s:
            raise trace.missing(
                f"iteration {iteration.number}: its phases take "
                f"{format_seconds(phases_s)}, all of it {format_seconds(whole_s)}"
            )


def _kinds_of_iterations(
    trace: KinetoTrace,
    used: Sequence[TracedIteration],
    all_phases_s: Floats,
    *,
    is_chosen: bool,
) -> Finding:
    """Return a remark for the user on how long slow and usual iterations compute.

    ``all_phases_s`` has, for each iteration, the seconds of its phases together, without the
    waits for messages. ``is_chosen`` says whether the user has chosen the iterations.

    An iteration is slow if it takes more than ``MOST_TIMES_SHORTEST`` times as long as the
    shortest one. A few slow iterations, such as the first one of a training, hardly change
    a median. UserError is raised if the rarer of the two kinds has more than a third of
    the iterations, unless the user has chosen them.
    """
    numbers = np.array([iteration.number for iteration in used])
    # Masks over the iterations. The shortest iteration is always a usual one.
    slow = all_phases_s > MOST_TIMES_SHORTEST * all_phases_s.min()
    usual = ~slow
    listed = _kind_in_words(numbers[usual].tolist(), all_phases_s[usual])
    if slow.any():
        listed += f"; {_kind_in_words(numbers[slow].tolist(), all_phases_s[slow])}"
    n_of_rarer = min(slow.sum(), usual.sum())
    if not is_chosen and 3 * n_of_rarer > len(used):
        advice = f"choose, as by --iterations {_ranges(numbers[usual])}"
        raise UserError(f"{trace.source}: iterations of two kinds: {listed}: {advice}")
    noun = "iteration" if len(used) == 1 else "iterations"
    return Finding("iterations", text=f"{len(used)} {noun} on {trace.device}: {listed}")


def _kind_in_words(numbers: Sequence[int], seconds: Floats) -> str:
    """Return how long iterations of one kind compute, in words.

    ``numbers`` and ``seconds`` have the number and the time of each of these iterations.
    """
    median = format_seconds(float(np.median(seconds)))
    if len(numbers) == 1:
        return f"number {numbers[0]} computes for {median}"
    return f"numbers {_ranges(numbers)} compute for {median} each (median)"


def _left_out(trace: KinetoTrace, used: Sequence[TracedIteration]) -> Iterator[Finding]:
    """Yield remarks for the user on what a profile of ``used`` iterations leaves out."""
    # All iterations have the same gradients, so the first iteration stands for all.
    first = used[0]
    # Autograd runs the function that stores gradients also for those that do not exist.
    n_undefined = sum(e.undefined for e in first.events if e.name == ACCUMULATE)
    n_early = sum(event.is_launched_before_trace for event in trace.events)
    n_steps = first.steps_in_trace
    n_unused = n_steps - len(used)
    if n_unused:
        yield _finding_left_out(
            f"{n_unused} of {n_steps} steps: without a backward, or not chosen"
        )
    if n_undefined:
        yield _finding_left_out(f"{n_undefined} gradients: undefined")
    if n_early:
        yield _finding_left_out(
            f"{n_early} spans of the GPU: launched before the trace"
        )


def _finding_left_out(text: str) -> Finding:
    """Return the finding for a part of a trace that its profile leaves out."""
    return Finding(what="left out", text=text)


def _times(iteration: TracedIteration, gradients: Sequence[Event]) -> _Times:
    """Return how long forward, backward of each gradient and the update take.

    ``gradients`` has the spans that store gradients, in the order of readiness. A gradient
    is ready when all work is done that the processor had launched until its span ended.
    """
    # `work.done_s` returns when all work launched until an instant was done.
    work = _Work(iteration)
    phases = iteration.phases
    _, forward_end_s = phases["forward"]
    backward_start_s, _ = phases["backward"]
    # The time of the first gradient begins when all work is done that was launched until
    # forward ends or backward starts, whichever is later. Backward may start later if the user
    # has marked both phases, and the gap between them then counts for neither. Forward may end
    # later if the user has marked backward only: without a mark, forward ends when autograd's
    # first function starts, and the mark of backward may begin before this function.
    instants_s = [work.done_s(max(forward_end_s, backward_start_s))]
    for gradient in gradients:
        instants_s.append(work.done_s(gradient.end_s))
    # No gradient counts as ready before the one that was stored before it.
    ready_s = np.maximum.accumulate(instants_s)
    return _Times(
        forward_s=work.took_s("forward"),
        # Gradients come in ready order, and a profile lists layers in forward order.
        backward_s=np.diff(ready_s)[::-1],
        update_s=work.took_s("update") if "update" in phases else 0.0,
    )


class _Work:
    """When the work of an iteration is done, by a GPU or else by the processor.

    Of a GPU, ``kernels`` are in the order of their launches.
    """

    def __init__(self, iteration: TracedIteration) -> None:
        self.iteration = iteration
        self.kernels = iteration.kernels()
        self.launched_s = [kernel.launched_s for kernel in self.kernels]
        # latest_end_s[k] is when the GPU is done with kernels 0 to k, on all streams.
        self.latest_end_s = np.maximum.accumulate([k.end_s for k in self.kernels])

    def done_s(self, instant_s: float) -> float:
        """Return when all work was done that had been launched until ``instant_s``.

        The result is in seconds. Without a GPU, the work is done at that instant. Callers
        subtract two results from each other, to tell how long the work between two instants took.
        """
        if not self.kernels:
            return instant_s
        n_launched = bisect_right(self.launched_s, instant_s)
        if n_launched == 0:
            # All instants before the first launch have the same result, so that the time between
            # two of them counts as no work.
            return self.kernels[0].start_s
        # The latest end of all kernels so far, which need not be that of the last one.
        return float(self.latest_end_s[n_launched - 1])

    def took_s(self, phase: str) -> float:
        """Return the seconds from the first kernel of a phase until all its work was done.

        The phase does not begin before the GPU had done the work of earlier iterations. A
        kernel of the phase may start before that on another stream, but the time until then
        counts for the earlier iteration already.
        """
        # A phase is a span of the processor's time. Its kernels are those that were launched
        # in this span, whenever the GPU ran them.
        start_s, end_s = self.iteration.phases[phase]
        launched = self.iteration.kernels(start_s, end_s)
        # A phase without kernels begins when the work launched before it is done. Without a
        # GPU, this is at ``start_s``, so the phase takes as long as the span.
        first_start_s = min(
            (kernel.start_s for kernel in launched), default=self.done_s(start_s)
        )
        # `free_s` is when the GPU had done all that was launched before this iteration.
        begin_s = max(self.iteration.free_s, first_start_s)
        # The work of earlier iterations may end after all work of this one that was launched
        # until ``end_s``, for example if the phase has no kernels. The phase then takes no time.
        return max(self.done_s(end_s) - begin_s, 0.0)


# -- Messages and timelines ------------------------------------------------------------


def message_table(trace: KinetoTrace) -> tuple[str, Finding]:
    """Return the messages of a trace as a table that ``ddlkit fit`` reads.

    Parameters
    ----------
    trace : KinetoTrace
        The trace.

    Returns
    -------
    table : str
        CSV with the columns bytes, seconds and collective, and ranks if all messages
        tell their number. The times include the wait for slower ranks.
    finding : Finding
        How many of the messages are in the table.

    Raises
    ------
    UserError
        If no message has a known size and collective.
    """
    messages = [event for event in trace.events if event.collective]
    # ``ddlkit fit`` knows only the collectives in `COMMUNICATION`, and refuses a size or a time
    # of 0. A size of 0 also stands for an unknown one.
    usable = [
        event
        for event in messages
        if event.collective in COMMUNICATION
        and event.bytes
        and event.end_s > event.start_s
    ]
    if not usable:
        raise UserError(
            f"{trace.source}: holds no {' or '.join(COMMUNICATION)} with a size, which "
            "--messages needs: record on two ranks or more, with record_shapes=True"
        )
    text = (
        f"{len(usable)} of {len(messages)}: "
        "of known size and kind, with the wait for slower ranks"
    )
    return _csv_of_messages(usable), Finding("messages", text=text)


def _csv_of_messages(messages: Sequence[Event]) -> str:
    """Return messages as CSV with the columns that `message_table` describes."""
    header = ["bytes", "seconds", "collective"]
    all_tell_ranks = all(
        _count_or_zero(event.args.get("Group size")) for event in messages
    )
    if all_tell_ranks:
        header.append("ranks")
    lines = [",".join(header)]
    for event in messages:
        cells = [event.bytes, event.end_s - event.start_s, event.collective]
        if all_tell_ranks:
            cells.append(event.args["Group size"])
        lines.append(",".join(map(str, cells)))
    return "\n".join(lines) + "\n"


def timeline(trace: KinetoTrace, buckets: Sequence[int] = ()) -> Timeline:
    """Return the iterations of a trace as a timeline.

    Parameters
    ----------
    trace : KinetoTrace
        The trace.
    buckets : sequence of int, optional
        Bytes of each bucket of gradients, in the order of sending. If an iteration has as
        many all-reduces as there are buckets, the k-th of them sends the k-th bucket.
        Otherwise, and by default, messages have the sizes that the trace has.

    Returns
    -------
    Timeline
        Spans of messages and of compute. With a GPU, compute is its kernels, each of the
        kind of its phase, and otherwise it is whole phases. Times are in seconds from the
        start of forward of each iteration.

    Raises
    ------
    UserError
        If no step of the trace has a forward and a backward pass.
    """
    rows = []
    for iteration in iterations(trace):
        origin_s, _ = iteration.phases["forward"]
        spans = [*_messages(iteration.events, buckets), *_computed(iteration)]
        spans.sort(key=lambda span: (span["start_s"], span["end_s"]))
        for span in spans:
            row = {
                **span,
                "start_s": span["start_s"] - origin_s,
                "end_s": span["end_s"] - origin_s,
                "origin": "measured",
                "iteration": iteration.number,
                "rank": trace.rank,
            }
            rows.append(row)
    return Timeline.from_rows(rows)


def _messages(
    events: Sequence[Event], buckets: Sequence[int]
) -> Iterator[dict[str, Any]]:
    """Yield the messages of an iteration as spans of a timeline.

    ``buckets`` are the bytes of each bucket of gradients, empty if they are unknown. The
    group of a span is the number of its bucket in the order of sending. Times are those
    of the trace, in seconds.
    """
    for collective in COMMUNICATION:
        messages = [event for event in events if event.collective == collective]
        messages.sort(key=lambda event: event.start_s)
        sends_buckets = collective == "all_reduce" and len(messages) == len(buckets)
        # If there are more or fewer messages than buckets, or if they are of another
        # collective, it is unknown which message has which gradients. Without buckets, each
        # message is taken for a group of its own among those of its collective. Messages of
        # two collectives can have the same number.
        is_group_unknown = len(buckets) > 0 and not sends_buckets
        for number, event in enumerate(messages):
            span = _span(
                f"{collective} {number}",
                kind=collective,
                stream="communication",
                start_s=event.start_s,
                end_s=event.end_s,
            )
            # In a timeline, group -1 means that a message is of no known group.
            span["group"] = -1 if is_group_unknown else number
            span["bytes"] = buckets[number] if sends_buckets else event.bytes
            yield span


def _computed(iteration: TracedIteration) -> Iterator[dict[str, Any]]:
    """Yield the compute and the copies of an iteration as spans of a timeline.

    Copies of the input count whenever they were launched. Other work of the GPU counts if
    it was launched in a phase, and has the kind of this phase. Times are those of the
    trace, in seconds.
    """
    # Without work of a GPU, the processor has computed.
    if not iteration.kernels():
        yield from _computed_by_processor(iteration)
        return
    for kernel in iteration.kernels():
        if _is_input_copy(kernel):
            yield _span(
                "copy",
                kind="h2d",
                stream="input",
                start_s=kernel.start_s,
                end_s=kernel.end_s,
            )
    for phase, (start_s, end_s) in iteration.phases.items():
        for kernel in iteration.kernels(start_s, end_s):
            if not _is_input_copy(kernel):
                yield _span(
                    kernel.name,
                    kind=phase,
                    stream="compute",
                    start_s=kernel.start_s,
                    end_s=kernel.end_s,
                )


def _is_input_copy(event: Event) -> bool:
    """Return whether a span is a copy from the host to the GPU, as of an input."""
    return event.name.startswith(HOST_TO_DEVICE)


def _computed_by_processor(iteration: TracedIteration) -> Iterator[dict[str, Any]]:
    """Yield the phases of an iteration as spans of a timeline, for compute without a GPU.

    Backward is divided: it computes until the last gradient is ready, and then waits for
    messages. Spans of no length are left out. Times are those of the trace, in seconds.
    """
    backward_start_s, backward_end_s = iteration.phases["backward"]
    gradients_end_s = iteration.gradients_end_s()
    phases = {
        **iteration.phases,
        "backward": (backward_start_s, gradients_end_s),
        "wait": (gradients_end_s, backward_end_s),
    }
    for phase, (start_s, end_s) in phases.items():
        if end_s > start_s:
            yield _span(
                phase, kind=phase, stream="compute", start_s=start_s, end_s=end_s
            )


def _span(
    task: str, *, kind: str, stream: str, start_s: float, end_s: float
) -> dict[str, Any]:
    """Return a row of a timeline with the columns that every span has.

    ``task`` is its name, ``kind`` the phase or the collective, and ``stream`` what it
    occupies: compute, communication or input.
    """
    return {
        "task": task,
        "kind": kind,
        "stream": stream,
        "start_s": start_s,
        "end_s": end_s,
    }
