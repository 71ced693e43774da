"""The traces of all ranks of a training, put together into one schedule.

The clocks of ranks differ, and nothing here compares them. A message ends on all ranks at
once, and it takes as long as on the rank that posted it last, which is the rank on which
the message was the shortest.

A schedule divides an iteration into segments of work. Behind each of them a rank posts
a message, waits for one, or goes on to the next phase (`ddlkit.core.replay.Segment`).
Shapes of arrays are written with I iterations, R ranks, S segments and K messages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, NoReturn

import numpy as np

from ddlkit.core.errors import Finding, UserError
from ddlkit.core.replay import MARK, POST, WAIT, Schedule, Segment, alone_s
from ddlkit.core.units import format_seconds
from ddlkit.core.workload import Floats
from ddlkit.formats.rank_trace import Copy, Message, RankIteration, RankTrace

MOST_DRIFT = 500e-6
"""By how many seconds a second the clocks of two machines drift apart at most.

Clocks that follow a time server are corrected by this much at most."""
SHARE_CONTRADICTING = 0.02
"""The share of messages that may contradict one run, because a trace has single faults."""
LEAST_ITERATIONS = 8
"""With fewer iterations than these, no interval can be given."""
NEARBY_ITERATIONS = 4
"""How many iterations before and behind one tell how far clocks are apart in it."""
LEAST_RUNS = 3
"""How often an operator must have run during messages, and how often without any."""
LEAST_KNOWN = 0.5
"""A finding warns if contention is known of less than this share of compute."""


class MessageKind(NamedTuple):
    """What identifies a message on all ranks.

    Attributes
    ----------
    collective : str
        Which collective, such as "all_reduce".
    n_bytes : int
        Its size in bytes.
    in_backward : bool
        Whether it was posted during backward.
    """

    collective: str
    n_bytes: int
    in_backward: bool


@dataclass(frozen=True, eq=False)
class TracedTraining:
    """A training of which all ranks were traced.

    Attributes
    ----------
    traces : tuple of RankTrace
        One for each rank, in the order of ranks.
    schedule : Schedule
        What the ranks do, as `Schedule.replay` plays it again.
    measured_s : ndarray, shape (I,)
        How long each iteration took, from the end of the last rank in the iteration
        before until the end of the last rank in this one, in seconds.
    numbers : ndarray, shape (I,)
        The numbers of the iterations in the traces.
    messages : tuple of Message
        The messages of the first iteration of rank 0.
    copies_s : ndarray, shape (I, R, S)
        How much of each segment of work copies gradients into or out of buckets.
    contention_s : ndarray, shape (I, R, S)
        By how much operators of each segment took longer than by themselves.
    findings : tuple of Finding
        What was left out, and what is unknown.
    """

    traces: tuple[RankTrace, ...]
    schedule: Schedule
    measured_s: Floats
    numbers: np.ndarray
    messages: tuple[Message, ...]
    copies_s: Floats
    contention_s: Floats
    findings: tuple[Finding, ...]

    @property
    def message_bytes(self) -> Floats:
        """Return the size of each message, shape (K,), in bytes."""
        return np.array([m.n_bytes for m in self.messages], dtype=float)


def training_of(
    traces: Sequence[RankTrace],
    startup_s: float = 0.0,
    least_iterations: int = LEAST_ITERATIONS,
) -> TracedTraining:
    """Return the training that ranks have traced.

    Parameters
    ----------
    traces : sequence of RankTrace
        One for each rank, in any order.
    startup_s : float, optional
        The start-up of a message, in which it does not use the link, in seconds. The default of 0
        is for a start-up that is not known.
    least_iterations : int, optional
        How many iterations there must be.

    Returns
    -------
    TracedTraining
        The training, with a schedule of all its iterations.

    Raises
    ------
    UserError
        If a rank is missing or is there twice, if ranks have other iterations or other
        messages than each other, if messages have no sizes or are of several process groups,
        if fewer than ``least_iterations`` iterations have the same messages, or if the traces
        are of different runs.
    """
    ordered = _in_order(traces)
    for trace in ordered:
        _refuse_without_shapes(trace)
    # The first iterations can have other messages than all that follow, and are left out.
    alike, findings = _alike_iterations(ordered, least_iterations)
    # On a CPU, a rank can see that a message has ended, and go on, before the trace notes this
    # end. Such an end is moved back to when the rank went on.
    usable = [_with_seen_ends(trace) for trace in alike]
    _refuse_other_runs(usable)
    # An iteration is divided into segments, each of which is work up to a post, a wait or the
    # end of a phase. In the part ``copies_s`` of this work, gradients are copied into or out of
    # buckets. Both arrays have the shape (I, R, S), for I iterations of R ranks with S segments.
    # Each iteration has K messages.
    segments = _segments(usable)
    work_s, copies_s = _work_s(usable, segments)
    # How long messages took once all ranks had posted them, shape (I, K).
    taken_s = _taken_s(usable)
    # How many messages may be under way at once.
    in_flight = usable[0].in_flight
    # What all ranks did by the clock of the first rank.
    one_clock = _InOneClock.of(usable)
    # When each message ended for all ranks, shape (I, K), and how much later each rank saw
    # it and went on, shape (I, R, K). The lag differs by some tenths of a millisecond between
    # ranks, which counts in short iterations.
    ends_s = one_clock.ends_of_messages_s(taken_s)
    lag_s = one_clock.ended_s - ends_s[:, None, :]
    if in_flight > 1:
        # Messages shared the link, so each has taken longer than it would alone.
        message_s, startups_s = _messages_alone_s(
            one_clock.ready_s, ends_s, startup_s, in_flight
        )
    else:
        message_s = taken_s
        # A message that is shorter than the start-up is nothing but start-up.
        startups_s = np.minimum(startup_s, taken_s)
    # Contention is the time by which messages slow operators down.
    contention_s, unknown_contention = _contention_s(usable, segments, taken_s)
    # Copies and contention are separate parts of the work of a segment. So both together are
    # limited to this work.
    copies_s = np.minimum(copies_s, work_s)
    contention_s = np.minimum(contention_s, work_s - copies_s)
    messages = usable[0].iterations[0].messages
    schedule = Schedule(
        segments,
        work_s,
        message_s,
        first_start_s=one_clock.first_start_s,
        in_flight=in_flight,
        startup_s=startups_s,
        # Rooted messages are those that rank 0 alone sends.
        rooted=_broadcasts_of_buffers(messages, segments),
        lag_s=lag_s,
        # In a broadcast of gloo, rank 0 waits until the other ranks have the bytes. NCCL
        # stores small messages on the way, so that rank 0 goes on at once.
        root_waits=not usable[0].uses_nccl,
    )
    return TracedTraining(
        traces=tuple(usable),
        schedule=schedule,
        measured_s=one_clock.iteration_s,
        numbers=np.array([iteration.number for iteration in usable[0].iterations]),
        messages=messages,
        copies_s=copies_s,
        contention_s=contention_s,
        findings=(*findings, *unknown_contention),
    )


def with_startup(training: TracedTraining, startup_s: float) -> TracedTraining:
    """Return a training whose messages have another start-up.

    Parameters
    ----------
    training : TracedTraining
        The training, in which several messages may share the link.
    startup_s : float
        The start-up of a message in seconds, in which it does not use the link.

    Returns
    -------
    TracedTraining
        The training with other start-ups. If messages share the link, the times that they would
        take alone are computed anew from when they ended in the trace. Otherwise they stay.
    """
    schedule = training.schedule
    if schedule.in_flight == 1:
        # Each message was alone, so its time stays. A message that is shorter than the
        # start-up is nothing but start-up.
        startups_s = np.minimum(startup_s, schedule.message_s)
        return replace(training, schedule=replace(schedule, startup_s=startups_s))
    # The clocks of ranks differ, so all instants are converted to the clock of the first rank.
    one_clock = _InOneClock.of(training.traces)
    # How long each message took once all ranks had posted it, shape (I, K).
    taken_s = _taken_s(training.traces)
    # A message ends this long after it could start on the last rank.
    ends_s = one_clock.ends_of_messages_s(taken_s)
    # ``one_clock.ready_s`` is when the last rank posted each message. From these instants and the
    # ends follows how long each message would take if no other one shared the link with it.
    message_s, startups_s = _messages_alone_s(
        one_clock.ready_s, ends_s, startup_s, schedule.in_flight
    )
    changed = schedule.with_messages(message_s, startups_s)
    return replace(training, schedule=changed)


def _refuse_other_runs(traces: Sequence[RankTrace]) -> None:
    """Raise UserError if a trace cannot be of the same run as the first one.

    A rank has the sum of an all-reduce only after every rank has posted it. Of two
    ranks, neither therefore sees a message end before the other one posts it. The
    messages thus bound from both sides by how much the clock of one rank is ahead of
    the other's. Two runs drift apart, because their iterations take different times,
    and soon no difference of clocks is left that agrees with all messages. The
    difference itself may have any size.
    """
    first, *others = traces
    first_posted_s, first_ended_s = _posts_and_ends_s(first)
    if not first_posted_s.size:
        # All messages are broadcasts, which tell nothing: their root waits for no rank.
        return
    # How long the first rank was traced.
    lasted_s = first_ended_s.max() - first_posted_s.min()
    for other in others:
        other_posted_s, other_ended_s = _posts_and_ends_s(other)
        # Let the clock of the other rank be ahead by a. By the first clock, each message has
        #   other_posted_s - a <= first_ended_s, so that a >= other_posted_s - first_ended_s
        #   first_posted_s <= other_ended_s - a, so that a <= other_ended_s - first_posted_s
        # The largest lower bound and the smallest upper bound count. Quantiles stand for the
        # maximum and the minimum, because a trace has single faults.
        ahead_at_least_s = np.quantile(
            other_posted_s - first_ended_s, 1 - SHARE_CONTRADICTING
        )
        ahead_at_most_s = np.quantile(
            other_ended_s - first_posted_s, SHARE_CONTRADICTING
        )
        # If the lower bound is above the upper one, no difference of clocks agrees with both.
        # The best a lies in the middle and misses both by half of ``apart_s``, as the error says.
        apart_s = ahead_at_least_s - ahead_at_most_s
        # A small ``apart_s`` is no contradiction, because clocks drift apart during a run.
        if apart_s > MOST_DRIFT * lasted_s:
            raise UserError(
                f"{first.source} and {other.source} are of different runs: whatever the "
                "difference of their clocks, a message would end on one rank before the "
                f"other has posted it, by {format_seconds(apart_s / 2)}: give the traces of "
                "one run"
            )


def _posts_and_ends_s(trace: RankTrace) -> tuple[Floats, Floats]:
    """Return when a rank posted its messages and when they ended, in seconds.

    Both arrays have an entry for each message of all iterations. They are for
    `_refuse_other_runs`, to which a message tells something only if it ends after all ranks
    have posted it. Broadcasts are left out, because their root does not wait for the others.
    """
    messages = [
        message
        for iteration in trace.iterations
        for message in iteration.messages
        if message.collective != "broadcast"
    ]
    posted_s = np.array([message.posted_s for message in messages])
    ended_s = np.array([message.ended_s for message in messages])
    return posted_s, ended_s


# -- which iterations and messages -----------------------------------------------------


def _in_order(traces: Sequence[RankTrace]) -> list[RankTrace]:
    """Return the traces in the order of ranks.

    Raises UserError unless each rank is there once.
    """
    by_rank: dict[int, RankTrace] = {}
    for trace in traces:
        # A trace that does not say how many ranks there were has 0 for it.
        if trace.ranks and trace.rank >= trace.ranks:
            raise UserError(
                f"{trace.source}: says that it is of rank {trace.rank} of {trace.ranks} "
                "(distributedInfo), which are counted from 0: record the trace again"
            )
        if trace.rank in by_rank:
            _raise_same_rank(by_rank[trace.rank], trace)
        by_rank[trace.rank] = trace
    _refuse_two_trainings(traces)
    _refuse_missing_ranks(traces)
    return [by_rank[rank] for rank in sorted(by_rank)]


def _raise_same_rank(first: RankTrace, second: RankTrace) -> NoReturn:
    """Raise UserError, because two traces are of the same rank. The error says why."""
    if second.source == first.source:
        raise UserError(f"{second.source}: is given twice: give each trace once")
    # A trace that names no rank counts as one of rank 0. It does not say how many
    # ranks there were, either.
    silent = [trace for trace in (second, first) if trace.rank == trace.ranks == 0]
    if silent:
        raise UserError(
            f"{silent[0].source}: does not say of which rank it is "
            "(distributedInfo), and another trace is of rank 0: start the "
            "profiler after init_process_group"
        )
    raise UserError(
        f"{first.source} and {second.source} are both of rank {second.rank}: give "
        "one trace for each rank"
    )


def _refuse_missing_ranks(traces: Sequence[RankTrace]) -> None:
    """Raise UserError if a rank of the training has no trace. No two traces are of one rank."""
    given = {trace.rank for trace in traces}
    # Most traces say how many ranks there were, and the others have 0 for it. In any case there
    # were more than the largest number of a rank, because ranks are counted from 0.
    expected = max([trace.ranks for trace in traces] + [max(given) + 1])
    # At most eight missing ranks are named. They are among the first ``len(given) + 8`` numbers,
    # of which at most ``len(given)`` have a trace. Further numbers are not tried, because a
    # damaged trace can state a very large number of ranks.
    first_numbers = range(min(expected, len(given) + 8))
    missing = [str(rank) for rank in first_numbers if rank not in given]
    if missing:
        raise UserError(
            f"traces of {len(given)} of {expected} ranks: missing rank "
            f"{', '.join(missing[:8])}: give the traces of all ranks, or that of one rank "
            "alone, which gives only bounds on the time lost to waiting"
        )


def _refuse_two_trainings(traces: Sequence[RankTrace]) -> None:
    """Raise UserError if two traces say that they are of different numbers of ranks."""
    # A trace that does not say how many ranks there were has 0 for it.
    stating = [trace for trace in traces if trace.ranks]
    for trace in stating[1:]:
        if trace.ranks != stating[0].ranks:
            raise UserError(
                f"{stating[0].source} is of a training of {stating[0].ranks} ranks, and "
                f"{trace.source} is of one of {trace.ranks}: give the traces of one "
                "training"
            )


def _message_kinds(iteration: RankIteration) -> list[MessageKind]:
    """Return the kind of each message of an iteration, in the order of their posts."""
    return [
        MessageKind(m.collective, m.n_bytes, m.in_backward) for m in iteration.messages
    ]


def _alike_iterations(
    traces: Sequence[RankTrace], least_iterations: int
) -> tuple[list[RankTrace], list[Finding]]:
    """Return the traces with those iterations only that have the same messages.

    DDP builds its buckets anew after the first iterations, so that these have other
    messages than all that follow. They are left out, and a finding says so. Raises
    UserError if the ranks have other iterations or messages than each other, or if fewer
    than ``least_iterations`` remain.
    """
    _refuse_other_steps(traces)
    _refuse_several_groups(traces)
    # The last iteration is the pattern, because buckets have settled by then.
    last = _message_kinds(traces[0].iterations[-1])
    if not any(kind.in_backward for kind in last):
        raise UserError(
            f"{traces[0].source}: no message is posted during backward: record a "
            "training with DistributedDataParallel on two ranks or more"
        )
    # How many iterations come before the first one that has these messages.
    n_early = 0
    # The loop ends at the last iteration at the latest, whose messages are the pattern.
    while _message_kinds(traces[0].iterations[n_early]) != last:
        n_early += 1
    usable = [replace(trace, iterations=trace.iterations[n_early:]) for trace in traces]
    _refuse_unlike_iterations(usable, last)
    n_left = len(usable[0].iterations)
    if n_left < least_iterations:
        raise UserError(
            f"{traces[0].source}: {n_left} iterations with the same messages: record at "
            f"least {least_iterations}"
        )
    findings = []
    if n_early:
        text = f"the first {n_early} iterations: they have other messages"
        findings.append(Finding("left out", text=text))
    return usable, findings


def _refuse_unlike_iterations(
    traces: Sequence[RankTrace], expected: Sequence[MessageKind]
) -> None:
    """Raise UserError if messages differ between iterations or between ranks.

    The messages of each iteration must be those of ``expected``. They must also have the
    sequence numbers that they have in the same iteration on the first rank. All ranks have
    traced the same iterations.
    """
    first = traces[0]
    for trace in traces:
        pairs = zip(trace.iterations, first.iterations, strict=True)
        for iteration, of_first in pairs:
            _refuse_other_messages(trace, iteration, expected, first)
            _refuse_other_numbers(trace, iteration, of_first)


def _refuse_without_shapes(trace: RankTrace) -> None:
    """Raise UserError if a trace does not say how large its messages of backward are.

    A rank waits for a message, copies its bucket back, and waits for the next one. The sizes
    tell which copies are of which bucket. Without sizes, all copies would seem to be of the
    first bucket, and the waits between them would seem to be work. An iteration without
    copies out of buckets has no work between its waits, and needs no sizes.
    """
    for iteration in trace.iterations:
        for message in iteration.messages:
            has_no_size = message.in_backward and message.elements == 0
            if has_no_size and iteration.copies_back:
                raise UserError(
                    f"{trace.source}: the {message.collective} messages have no sizes: "
                    "record with torch.profiler.profile(..., record_shapes=True), as "
                    "ddlkit trace does"
                )


def _refuse_other_steps(traces: Sequence[RankTrace]) -> None:
    """Raise UserError if a rank has traced other iterations than the first rank."""
    first, *others = traces
    expected = [iteration.step for iteration in first.iterations]
    for trace in others:
        steps = [iteration.step for iteration in trace.iterations]
        if steps != expected:
            raise UserError(
                f"{trace.source} has {len(steps)} iterations (steps {_range(steps)}), and "
                f"{first.source} has {len(expected)} (steps {_range(expected)}): "
                "record the same iterations on all ranks"
            )


def _refuse_several_groups(traces: Sequence[RankTrace]) -> None:
    """Raise UserError if messages are of several process groups.

    Every message of a schedule is one between all ranks.
    """
    groups: set[str] = set()
    for trace in traces:
        for iteration in trace.iterations:
            groups.update(message.group for message in iteration.messages)
    if len(groups) > 1:
        raise UserError(
            f"{traces[0].source}: messages of {len(groups)} process groups: explain reads "
            "a training in which all messages are of one group"
        )


def _range(numbers: Sequence[int]) -> str:
    return f"{numbers[0]} to {numbers[-1]}"


def _refuse_other_messages(
    trace: RankTrace,
    iteration: RankIteration,
    expected: Sequence[MessageKind],
    first: RankTrace,
) -> None:
    """Raise UserError if an iteration has other messages than it should have.

    ``iteration`` is one of ``trace``. ``expected`` are the messages of the last iteration
    of ``first``, the first trace.
    """
    own = _message_kinds(iteration)
    if own == list(expected):
        return
    if len(own) != len(expected):
        raise UserError(
            f"{trace.source}: iteration {iteration.number} has {len(own)} messages, and "
            f"the last one of {first.source} has {len(expected)}: record iterations "
            "that are alike on all ranks"
        )
    for k, (expected_kind, own_kind) in enumerate(zip(expected, own, strict=True)):
        if own_kind != expected_kind:
            raise UserError(
                f"rank {trace.rank} ({trace.source}): message {k} of iteration "
                f"{iteration.number} is {_in_words(own_kind)}, and on rank {first.rank} it is "
                f"{_in_words(expected_kind)}: record iterations that are alike on all ranks"
            )


def _refuse_other_numbers(
    trace: RankTrace, iteration: RankIteration, of_first: RankIteration
) -> None:
    """Raise UserError if messages have other sequence numbers than on the first rank.

    ``iteration`` is one of ``trace``, and ``of_first`` is the same iteration on the first
    rank. NCCL numbers the messages of a process group alike on all ranks. Equal sizes
    can hide that one rank is a message behind. Gloo writes no numbers, for which -1
    stands.
    """
    pairs = zip(iteration.messages, of_first.messages, strict=True)
    for k, (own, first) in enumerate(pairs):
        both_have_numbers = own.sequence >= 0 and first.sequence >= 0
        if both_have_numbers and own.sequence != first.sequence:
            raise UserError(
                f"rank {trace.rank} ({trace.source}): message {k} of iteration "
                f"{iteration.number} has the sequence number {own.sequence}, and on the "
                f"first rank it has {first.sequence}: record the same iterations on all "
                "ranks"
            )


def _in_words(kind: MessageKind) -> str:
    """Return the description of a message for an error."""
    place = "in backward" if kind.in_backward else "outside of backward"
    # Two sizes that differ by a few bytes would be the same in a larger unit.
    return f"{kind.collective} of {kind.n_bytes} bytes {place}"


# -- segments and their work -----------------------------------------------------------


def _segments(traces: Sequence[RankTrace]) -> tuple[Segment, ...]:
    """Return the segments of an iteration, which are the same on every rank.

    A segment is a stretch of work. It ends with the post of a message, with a wait for one, or with
    a mark, at which the rank does neither. A mark ends each phase, and another one ends the compute
    of backward. Behind this compute, a rank waits for the messages of backward. For any other
    message, a rank waits as soon as the message is posted. If several of these other messages are
    posted together, the rank first posts them all.
    """
    # All iterations of all ranks have the same messages, so those of one iteration are taken.
    # `_waited_at_once` finds out from all iterations which messages are posted together.
    iteration = traces[0].iterations[0]
    messages = iteration.messages
    in_backward = [k for k, m in enumerate(messages) if m.in_backward]
    # Any message that is posted between two messages of backward counts as one of backward.
    first = in_backward[0]
    first_of_update = in_backward[-1] + 1
    of_backward = range(first, first_of_update)
    # Messages before backward are posted during the input, and then during forward.
    n_of_input = sum(m.posted_s < iteration.input_end_s for m in messages[:first])
    return (
        *_waited_at_once(traces, range(n_of_input), "input"),
        Segment("input", MARK),
        *_waited_at_once(traces, range(n_of_input, first), "forward"),
        Segment("forward", MARK),
        *(Segment("backward", POST, k) for k in of_backward),
        Segment("backward", MARK),
        # After each wait, the rank copies the bucket of this message back into the
        # gradients. Behind the last wait, it does so in the segment up to the mark.
        *(Segment("backward", WAIT, k) for k in of_backward),
        Segment("backward", MARK),
        *_waited_at_once(traces, range(first_of_update, len(messages)), "update"),
        Segment("update", MARK),
    )


def _broadcasts_of_buffers(
    messages: Sequence[Message], segments: Sequence[Segment]
) -> tuple[int, ...]:
    """Return the numbers of the messages that send DDP's buffers.

    Rank 0 sends them at the beginning of forward. Broadcasts in other phases send other
    things, such as parameters that an optimizer has sharded, and can come from any rank.
    """
    return tuple(
        segment.message
        for segment in segments
        if segment.action == POST
        and segment.phase == "forward"
        and messages[segment.message].collective == "broadcast"
    )


def _waited_at_once(
    traces: Sequence[RankTrace], numbers: range, phase: str
) -> list[Segment]:
    """Return the posts and the waits of messages, in the order in which every rank has them.

    Ranks post a few messages together, and wait for all of these before they post more.
    ``numbers`` are those of the messages. Two messages are posted together if some rank
    posted the second one before the first one had ended: that rank cannot have waited
    between the two. One such rank is enough, because all ranks run the same program.
    """
    segments: list[Segment] = []
    # The numbers of the messages that have been posted and are not waited for yet.
    together: list[int] = []
    for k in numbers:
        # Unless message k is posted together with the one before, ranks first wait for all
        # messages that they have posted so far.
        if together and not _posted_together(traces, k - 1):
            segments += [Segment(phase, WAIT, earlier) for earlier in together]
            together = []
        segments.append(Segment(phase, POST, k))
        together.append(k)
    segments += [Segment(phase, WAIT, earlier) for earlier in together]
    return segments


def _posted_together(traces: Sequence[RankTrace], k: int) -> bool:
    """Return whether some rank posted message k + 1 before message k had ended."""
    for trace in traces:
        for iteration in trace.iterations:
            if iteration.messages[k + 1].posted_s < iteration.messages[k].ended_s:
                return True
    return False


def _work_s(
    traces: Sequence[RankTrace], segments: Sequence[Segment]
) -> tuple[Floats, Floats]:
    """Return how long ranks work, and how much of this time they copy, in seconds.

    Both have the shape (I, R, S). Copies are those of gradients into and out of
    buckets.
    """
    n_iterations = len(traces[0].iterations)
    shape = (n_iterations, len(traces), len(segments))
    work_s = np.zeros(shape)
    copies_s = np.zeros(shape)
    for r, trace in enumerate(traces):
        for i, iteration in enumerate(trace.iterations):
            work_s[i, r], copies_s[i, r] = _work_of_iteration_s(iteration, segments)
    return work_s, copies_s


def _work_of_iteration_s(
    iteration: RankIteration, segments: Sequence[Segment]
) -> tuple[Floats, Floats]:
    """Return how long a rank works in each segment of an iteration, shape (S,).

    A segment is work that ends with an action: the rank posts a message, or waits for one, or
    goes on to the next segment. The second result, of the same shape, is how much of this work
    copies gradients into or out of buckets. Both are in seconds.
    """
    work_s = np.zeros(len(segments))
    copies_s = np.zeros(len(segments))
    # When the bucket of each message has been copied back into the gradients. The rank then
    # begins to wait for the next message of backward, so that the segment before this wait ends.
    copied_until_s = _copied_until_s(iteration)
    ends_s = _ends_of_segments_s(iteration, segments, copied_until_s)
    now_s = iteration.start_s
    for s, segment in enumerate(segments):
        # An end that lies before now stands for a segment without work.
        end_s = max(ends_s[s], now_s)
        work_s[s] = end_s - now_s
        # Copies into buckets run between other work, so they are summed one by one.
        for copy in iteration.copies_into:
            if now_s <= copy.start_s < end_s:
                copies_s[s] += copy.end_s - copy.start_s
        # If a segment holds nothing but copies out of buckets, all its work counts as copies.
        if _only_copies_back(segment, end_s, iteration):
            copies_s[s] = work_s[s]
        now_s = end_s
        # If the rank then waits for a message, the next segment begins when that message
        # has ended.
        if segment.action == WAIT:
            now_s = max(now_s, iteration.messages[segment.message].ended_s)
    return work_s, copies_s


def _only_copies_back(segment: Segment, end_s: float, iteration: RankIteration) -> bool:
    """Return whether all work of a segment copies gradients out of buckets.

    ``end_s`` is when the rank ends this work. One segment of backward ends with the compute
    of backward. In the segments of backward behind it, the rank only waits and copies. The
    result is False for all segments if the trace has no copies out of buckets.
    """
    is_behind_compute = segment.phase == "backward" and end_s > iteration.backward_end_s
    return is_behind_compute and bool(iteration.copies_back)


def _ends_of_segments_s(
    iteration: RankIteration,
    segments: Sequence[Segment],
    copied_until_s: Sequence[float],
) -> list[float]:
    """Return until when a rank works in each segment, in seconds.

    ``copied_until_s`` says when the bucket of each message has been copied back, and is the
    start of the iteration for a message without a copy. A rank begins to wait for a message
    of backward when it has copied the previous bucket. An end that lies before the end of the
    previous segment, such as the start of the iteration, stands for no work.
    """
    # When the marks of each phase are, in their order. Backward has two marks: the end of
    # its compute, and the end of the last copy. An iterator gives them one after the other.
    marks_s = {
        "input": iter([iteration.input_end_s]),
        "forward": iter([iteration.forward_end_s]),
        "backward": iter([iteration.backward_end_s, max(copied_until_s)]),
        "update": iter([iteration.end_s]),
    }
    ends_s = []
    for segment in segments:
        if segment.action == MARK:
            ends_s.append(next(marks_s[segment.phase]))
        elif segment.action == POST:
            ends_s.append(iteration.messages[segment.message].posted_s)
        elif segment.phase == "backward" and segment.message > 0:
            # This wait of backward begins when the bucket of the previous message has been
            # copied back. There is no such copy if the previous message is not of backward.
            ends_s.append(copied_until_s[segment.message - 1])
        else:
            # Before any other wait the rank does no work.
            ends_s.append(iteration.start_s)
    return ends_s


def _copied_until_s(iteration: RankIteration) -> list[float]:
    """Return for each message when its bucket has been copied back, in seconds.

    Where nothing is copied, the result is the start of the iteration, which stands for no
    work.
    """
    until_s = [iteration.start_s] * len(iteration.messages)
    for k, copies in _copies_by_message(iteration).items():
        until_s[k] = copies[-1].end_s
    return until_s


def _copies_by_message(iteration: RankIteration) -> dict[int, list[Copy]]:
    """Return the copies out of the bucket of each message of backward, in their order.

    Buckets are copied back in the order of their messages. The elements of the messages
    therefore tell which copies belong to which bucket. Messages without a copy are left
    out.
    """
    copies_of: dict[int, list[Copy]] = {}
    # The number of elements of the messages so far, and of the copies that belong to them.
    sent = 0
    copied = 0
    remaining = list(iteration.copies_back)
    for k, message in enumerate(iteration.messages):
        if not message.in_backward:
            continue
        sent += message.elements
        # The next copies belong to this message as long as they fit into the elements sent so far.
        while remaining and copied + remaining[0].elements <= sent:
            copy = remaining.pop(0)
            copied += copy.elements
            copies_of.setdefault(k, []).append(copy)
    return copies_of


# -- messages --------------------------------------------------------------------------


def _with_seen_ends(trace: RankTrace) -> RankTrace:
    """Return a trace in which each message ends when the rank has seen its end, or before.

    On a CPU, the thread that moves a message can be stopped by the operating system between
    telling the training that the message has ended and writing this end into the trace. The
    rank would then seem to wait while it works. It has seen the end at the latest when it
    begins to copy the bucket of the message back, or where nothing is copied, when the
    iteration ends. A later end is moved back to this instant, but not before the start of the
    message. The trace of a GPU is returned unchanged.
    """
    # The trace of a GPU has the right ends, because a GPU goes on when the message has ended on its
    # stream.
    if trace.device != "cpu":
        return trace
    iterations = []
    for iteration in trace.iterations:
        latest_s = _copied_from_s(iteration)
        messages = []
        for message, seen_at_latest_s in zip(iteration.messages, latest_s, strict=True):
            seen_s = min(message.ended_s, seen_at_latest_s)
            # A message cannot end before it starts.
            ended_s = max(seen_s, message.started_s)
            messages.append(message._replace(ended_s=ended_s))
        iterations.append(replace(iteration, messages=tuple(messages)))
    return replace(trace, iterations=tuple(iterations))


def _copied_from_s(iteration: RankIteration) -> list[float]:
    """Return for each message when its bucket begins to be copied back, in seconds.

    Where nothing is copied, the result is the end of the iteration.
    """
    from_s = [iteration.end_s] * len(iteration.messages)
    for k, copies in _copies_by_message(iteration).items():
        from_s[k] = copies[0].start_s
    return from_s


def _taken_s(traces: Sequence[RankTrace]) -> Floats:
    """Return how long messages took once all ranks had posted them, shape (I, K).

    That is their time on the rank that posted them last, on which they were the shortest.
    """
    # The shape is (R, I, K). The minimum below is over ranks.
    durations_s = [
        [[m.duration_s for m in iteration.messages] for iteration in trace.iterations]
        for trace in traces
    ]
    shortest_s: Floats = np.min(durations_s, axis=0)
    return shortest_s


class _InOneClock(NamedTuple):
    """What ranks did, in the clock of the first rank, in seconds.

    Attributes
    ----------
    posted_s, started_s, ended_s : ndarray, shape (I, R, K)
        When each rank posted a message, when the message could start on that rank, and
        when it had ended there.
    iteration_starts_s, iteration_ends_s : ndarray, shape (I, R)
        When each rank starts and ends each iteration.
    """

    posted_s: Floats
    started_s: Floats
    ended_s: Floats
    iteration_starts_s: Floats
    iteration_ends_s: Floats

    @classmethod
    def of(cls, traces: Sequence[RankTrace]) -> _InOneClock:
        """Return what the ranks of ``traces`` did.

        How far the clock of a rank is ahead is estimated for each iteration. If the estimate is
        wrong, all that the rank does in the iteration is shifted by the same time, its posts as
        well as the ends that it sees. The lags, from the end of a message to the end that a rank
        sees, take up the shift, so that the replay still agrees with the trace.
        """
        # By the clock of each rank, each of shape (I, R, K).
        posted_s, started_s, ended_s = _instants_of_messages_s(traces)
        # How far the clock of each rank is ahead, shape (I, R), from the ends of messages.
        offsets_s = _ahead_of_first_rank_s(ended_s)
        # The same for all messages of an iteration on a rank, shape (I, R, 1).
        message_offsets_s = offsets_s[:, :, None]
        # Lists of the shape (R, I), which are transposed to (I, R) below.
        own_starts_s = [[i.start_s for i in trace.iterations] for trace in traces]
        own_ends_s = [[i.end_s for i in trace.iterations] for trace in traces]
        return cls(
            posted_s=posted_s - message_offsets_s,
            started_s=started_s - message_offsets_s,
            ended_s=ended_s - message_offsets_s,
            iteration_starts_s=np.transpose(own_starts_s) - offsets_s,
            iteration_ends_s=np.transpose(own_ends_s) - offsets_s,
        )

    @property
    def ready_s(self) -> Floats:
        """Return when the last rank has posted each message, shape (I, K)."""
        return np.asarray(self.posted_s.max(axis=1))

    def ends_of_messages_s(self, taken_s: Floats) -> Floats:
        """Return when each message ends, shape (I, K).

        ``taken_s``, shape (I, K), is how long each message takes, in seconds. This time
        counts from when the message can start on the last rank.
        """
        return np.asarray(self.started_s.max(axis=1) + taken_s)

    @property
    def first_start_s(self) -> Floats:
        """Return when each rank starts, shape (R,). Time 0 is the earliest start."""
        starts_s = self.iteration_starts_s[0]
        return np.asarray(starts_s - starts_s.min())

    @property
    def iteration_s(self) -> Floats:
        """Return how long iterations took, shape (I,), in seconds.

        An iteration lasts from the start of the last rank that starts it to the end of the
        last rank that ends it. A rank that is late in its update ends that iteration late
        and starts the next one late, so that its delay counts only in the iteration of the update.
        """
        last_start_s = self.iteration_starts_s.max(axis=1)
        last_end_s = self.iteration_ends_s.max(axis=1)
        return np.asarray(last_end_s - last_start_s)


def _instants_of_messages_s(traces: Sequence[RankTrace]) -> Floats:
    """Return three instants of each message by the clock of each rank, shape (3, I, R, K).

    The first axis has when the rank posted the message, when the message could start on this
    rank, and when it had ended there, in seconds.
    """
    by_rank = []
    for trace in traces:
        by_iteration = []
        for iteration in trace.iterations:
            by_iteration.append(
                [(m.posted_s, m.started_s, m.ended_s) for m in iteration.messages]
            )
        by_rank.append(by_iteration)
    # The shape of the list is (R, I, K, 3).
    return np.array(by_rank).transpose(3, 1, 0, 2)


def _ahead_of_first_rank_s(ends_s: Floats) -> Floats:
    """Return how far the clock of each rank is ahead in each iteration, shape (I, R).

    ``ends_s``, shape (I, R, K), is when each message ends by the clock of each rank. A
    message ends on all ranks at nearly the same instant. So the clock of a rank is ahead
    of the clock of the first rank by the median difference of their ends, over the
    messages of some iterations.
    """
    # How much later each message ends by the clock of a rank than by that of the first rank.
    differences_s = ends_s - ends_s[:, :1]
    ahead_s = np.empty(ends_s.shape[:2])
    for i in range(len(ends_s)):
        # Clocks drift, so that only iterations nearby count.
        nearby = slice(max(0, i - NEARBY_ITERATIONS), i + NEARBY_ITERATIONS + 1)
        ahead_s[i] = np.median(differences_s[nearby], axis=(0, 2))
    return ahead_s


def _messages_alone_s(
    ready_s: Floats, ends_s: Floats, most_startup_s: float, in_flight: int
) -> tuple[Floats, Floats]:
    """Return how long messages would have taken alone, and their start-ups, in seconds.

    Messages that are under way at the same time share the link, each with an equal part
    of its rate, so that each takes longer than alone. Start-ups use no link and are not
    shared, which is why they must be known.

    All arrays have shape (I, K). ``ready_s`` is when the last rank had posted each
    message, and ``ends_s`` is when the message ended. At most ``in_flight`` messages are
    under way at once. The start-up of a message is ``most_startup_s``, or the whole time
    of a message that takes less.
    """
    messages_alone_s = np.empty_like(ends_s)
    startups_s = np.empty_like(ends_s)
    for i in range(len(ends_s)):
        starts_s = _starts_s(ready_s[i], ends_s[i], in_flight)
        # A message that is shorter than the start-up is nothing but start-up.
        startups_s[i] = np.minimum(most_startup_s, ends_s[i] - starts_s)
        messages_alone_s[i] = alone_s(starts_s, ends_s[i], startups_s[i], in_flight)
    return messages_alone_s, startups_s


def _starts_s(ready_s: Floats, ends_s: Floats, in_flight: int) -> Floats:
    """Return when the messages of one iteration start, shape (K,), in seconds.

    ``ready_s``, shape (K,), is when the last rank had posted each message, and ``ends_s``, shape
    (K,), is when the message ended. A message starts when it is ready and fewer than ``in_flight``
    earlier messages are still under way. The time that a thread needs to turn from one message
    to the next counts as time of the next one.
    """
    # The first ``in_flight`` messages start when they are ready.
    starts_s = ready_s.copy()
    for k in range(in_flight, len(starts_s)):
        # Message k can start once all earlier messages but ``in_flight - 1`` have ended.
        # Of their ends, this is the ``in_flight``-th latest.
        freed_s = np.sort(ends_s[:k])[-in_flight]
        starts_s[k] = max(starts_s[k], freed_s)
    # Ranks see the end of a message at slightly different times, so that a message can
    # seem to end before it starts.
    return np.minimum(starts_s, ends_s)


# -- operators that ran during messages ------------------------------------------------


def _contention_s(
    traces: Sequence[RankTrace], segments: Sequence[Segment], taken_s: Floats
) -> tuple[Floats, list[Finding]]:
    """Return by how much messages slowed the operators of each segment of backward down.

    ``segments`` are those of an iteration, as `_segments` returns them. The first
    result is in seconds, for each iteration, rank and segment, shape (I, R, S). The
    second result has a finding if the slowdown is not known for most of the time that
    operators ran during messages. ``taken_s``, shape (I, K), is how long each of the K
    messages of an iteration took once all ranks had posted it.

    Only operators of backward are considered. For operators of one kind on one rank, which
    compute the same, the median time during messages is compared with the median time without
    a message. A single operator that was delayed for another reason changes neither median.
    Different ranks are not compared, because the slowest rank still computes while messages
    move and the others wait. Its operators run during messages more often, and its slowness
    would seem to be due to messages.
    """
    runs = list(_runs(traces, taken_s))
    slowdowns = _slowdowns(runs)
    n_iterations = len(traces[0].iterations)
    contention_s = np.zeros((n_iterations, len(traces), len(segments)))
    # The time of all operators during messages, and of those whose slowdown is known.
    all_s = 0.0
    known_s = 0.0
    # The index of the first segment of backward.
    first_of_backward = [segment.phase for segment in segments].index("backward")
    for run in runs:
        if not run.is_during_message:
            continue
        all_s += run.duration_s
        # The slowdown is None if operators of this kind ran too few times during messages, or too
        # few times without one.
        slowdown = slowdowns.get((run.rank, run.kind))
        if slowdown is None:
            continue
        known_s += run.duration_s
        iteration = traces[run.rank].iterations[run.iteration]
        segment = first_of_backward + _segment_within_backward(run, iteration)
        contention_s[run.iteration, run.rank, segment] += _lost_s(run, slowdown)
    findings = []
    if all_s and known_s < LEAST_KNOWN * all_s:
        text = (
            "how much messages slow compute down: for "
            f"{1 - known_s / all_s:.0%} of the compute beside messages, no operator of the "
            "same shape ran without a message"
        )
        findings.append(Finding("not known", text=text))
    return contention_s, findings


def _segment_within_backward(run: _Run, iteration: RankIteration) -> int:
    """Return to which segment of backward an operator belongs, counted from 0.

    ``iteration`` is the one in which ``run`` ran. The segments of backward follow one
    another, and each ends with the post of a message. So the number of posts before the
    operator is the number of its segment.
    """
    posted_s = [m.posted_s for m in iteration.messages if m.in_backward]
    return int(np.searchsorted(posted_s, run.start_s))


def _lost_s(run: _Run, slowdown: _Slowdown) -> float:
    """Return how many seconds an operator lost to the messages during which it ran.

    ``slowdown`` is by how much messages usually slow such operators down.
    """
    # An operator that was as quick as without a message loses nothing.
    exceeds_s = max(run.duration_s - slowdown.without_s, 0.0)
    # One that was delayed for another reason loses no more to messages than usual.
    return min(slowdown.longer_s, exceeds_s)


class _Run(NamedTuple):
    """An operator as it ran once, and whether a message was under way meanwhile.

    Attributes
    ----------
    iteration, rank : int
        The index of the iteration, and the rank on which the operator ran.
    kind : int
        A number that operators share if they compute the same from the same shapes.
    start_s, duration_s : float
        When the operator started, by the clock of the rank, and how long it ran.
    is_during_message : bool
        Whether a message was under way at some time while it ran.
    """

    iteration: int
    rank: int
    kind: int
    start_s: float
    duration_s: float
    is_during_message: bool


def _runs(traces: Sequence[RankTrace], taken_s: Floats) -> Iterator[_Run]:
    """Yield each time that an operator of backward ran on any rank.

    ``taken_s``, shape (I, K), is how long each of K messages took in each of I iterations once
    all ranks had posted it.
    """
    for rank, trace in enumerate(traces):
        for i, iteration in enumerate(trace.iterations):
            ends_s = np.array([m.ended_s for m in iteration.messages])
            # A message that waits for another rank moves no bytes and slows nothing. So it
            # counts as under way only from when all ranks had posted it.
            starts_s = ends_s - taken_s[i]
            for operator in iteration.operators:
                # For each of the K messages, whether it and the operator overlap in time.
                overlaps = (starts_s < operator.end_s) & (operator.start_s < ends_s)
                yield _Run(
                    iteration=i,
                    rank=rank,
                    kind=operator.kind,
                    start_s=operator.start_s,
                    duration_s=operator.end_s - operator.start_s,
                    is_during_message=bool(overlaps.any()),
                )


class _Slowdown(NamedTuple):
    """How messages slow down one kind of operator on one rank.

    Attributes
    ----------
    longer_s : float
        By how much its median time during messages is longer, in seconds.
    without_s : float
        Its median time without a message, in seconds.
    """

    longer_s: float
    without_s: float


def _slowdowns(runs: Sequence[_Run]) -> dict[tuple[int, int], _Slowdown]:
    """Return how much longer operators take during messages.

    A key is a rank and a kind of operators (`_Run.kind`). Kinds that ran too few times during
    messages, or too few times without, are left out.
    """
    # A key is the rank, the kind, and whether a message was under way.
    durations_s: dict[tuple[int, int, bool], list[float]] = defaultdict(list)
    for run in runs:
        durations_s[run.rank, run.kind, run.is_during_message].append(run.duration_s)
    slowdowns = {}
    for rank, kind in {(run.rank, run.kind) for run in runs}:
        without_s = durations_s[rank, kind, False]
        during_s = durations_s[rank, kind, True]
        if min(len(without_s), len(during_s)) >= LEAST_RUNS:
            median_s = float(np.median(without_s))
            # Only chance makes an operator quicker during messages.
            longer_s = max(float(np.median(during_s)) - median_s, 0.0)
            slowdowns[rank, kind] = _Slowdown(longer_s, median_s)
    return slowdowns
