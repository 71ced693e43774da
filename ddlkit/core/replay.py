"""The iterations of all ranks replayed, with whatever is changed in them.

A rank of data-parallel training computes, posts a message, computes on, and at last waits
for its messages. A message starts when the *last* rank has posted it, and it ends for all
ranks at once. So two operations are enough to play a training again: a rank adds the
seconds that it works, and a message takes the maximum over ranks. This is a recursion in
the max-plus algebra. It has no parameter to fit: what each rank works, and what each
message takes once all ranks have posted it, are read from traces.

To ask what a cause costs, change the work or the messages, and play again. The answer
differs from a sum of waiting times, because a rank that no longer waits for one rank may
have to wait for another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddlkit.core.errors import UserError
from ddlkit.core.link import Link, Parts
from ddlkit.core.timeline import Timeline
from ddlkit.core.workload import Floats

PHASES = ("input", "forward", "backward", "update")
"""The phases of an iteration, in their order."""
POST = "post"
WAIT = "wait"
MARK = "mark"
"""What a rank does at the end of a segment of work: nothing, where it is a mark."""

MOST_CORRECTIONS = 30
"""After how many corrections `alone_s` stops, and takes the last one as it is."""
CLOSE_ENOUGH_S = 1e-6
"""`alone_s` also stops if all messages of a replay end this close to when they should."""


class Segment(NamedTuple):
    """A stretch of work of every rank, and what the rank does at its end.

    Attributes
    ----------
    phase : str
        The phase to which the work belongs: a name in `PHASES`.
    action : str
        `POST` posts a message, `WAIT` waits until a message has ended, and `MARK` does
        nothing.
    message : int
        The number of that message within the iteration. It is -1 for a mark.
    """

    phase: str
    action: str
    message: int = -1


def _refuse_wrong_values(values_s: Floats, name: str, shape: tuple[int, ...]) -> None:
    """Raise UserError unless values of messages are finite and have a given shape.

    ``name`` says what the values are: "start-up" or "lag".
    """
    if values_s.shape != shape:
        raise UserError(
            f"a schedule has the {name} of its messages in the shape "
            f"{values_s.shape}, but {shape} is needed"
        )
    if not np.isfinite(values_s).all():
        raise UserError(f"a schedule: every {name} must be finite")


@dataclass(frozen=True, eq=False)
class Schedule:
    """What all ranks do in some iterations, one after the other.

    Parameters
    ----------
    segments : tuple of Segment
        What every rank does in every iteration. Messages are posted in their order.
    work_s : ndarray, shape (I, R, S)
        How long each of R ranks works in each of S segments of I iterations, in seconds.
    message_s : ndarray, shape (I, K)
        How long each of K messages takes by itself once all ranks have posted it, in
        seconds.
    first_start_s : ndarray, shape (R,)
        When each rank starts its first iteration, in seconds.
    in_flight : int, optional
        How many messages may be under way at once. They share the link equally.
    startup_s : ndarray, shape (I, K), optional
        How much of ``message_s`` is start-up, in which a message does not use the link.
        By default none is.
    rooted : tuple of int, optional
        The numbers of messages that only rank 0 sends, as in a broadcast. A rank other than
        rank 0 waits for rank 0 alone. These messages do not share the link.
    root_waits : bool, optional
        Whether rank 0 waits in ``rooted`` messages for all other ranks. By default it goes on
        as soon as it has posted them, as with NCCL, which stores small messages on the way. With
        Gloo it waits, because Gloo hands the bytes of rank 0 over to ranks that are ready.
    lag_s : ndarray, shape (I, R, K), optional
        How long after the end of a message each rank that waits for it goes on, in seconds.
        A negative lag is an earlier end on this rank. By default there is none. The lags of
        messages in ``rooted`` do not count.

    Raises
    ------
    UserError
        If an array has another shape, or a time is negative or not finite.

    Examples
    --------
    Two ranks compute for 3 s and 5 s, send one message of 2 s, and wait for it. The first
    rank waits for the second:

    >>> segments = (Segment("backward", POST, 0), Segment("backward", WAIT, 0))
    >>> schedule = Schedule(
    ...     segments,
    ...     work_s=np.array([[[3.0, 0.0], [5.0, 0.0]]]),
    ...     message_s=np.array([[2.0]]),
    ...     first_start_s=np.zeros(2),
    ... )
    >>> schedule.replay().iteration_s.tolist()
    [7.0]
    """

    segments: tuple[Segment, ...]
    work_s: Floats
    message_s: Floats
    first_start_s: Floats
    in_flight: int = 1
    startup_s: Floats | None = None
    rooted: tuple[int, ...] = ()
    lag_s: Floats | None = None
    root_waits: bool = False

    def __post_init__(self) -> None:
        n_iterations, n_ranks, n_segments = self.work_s.shape
        n_messages = sum(segment.action == POST for segment in self.segments)
        if n_segments != len(self.segments):
            raise UserError(
                f"a schedule of {len(self.segments)} segments has the work of "
                f"{n_segments}"
            )
        if self.message_s.shape != (n_iterations, n_messages):
            raise UserError(
                f"a schedule of {n_iterations} iterations with {n_messages} messages "
                f"has times of messages of shape {self.message_s.shape}"
            )
        # Start-ups and lags may be left out. A lag may be negative, a start-up may not.
        if self.startup_s is not None:
            shape = (n_iterations, n_messages)
            _refuse_wrong_values(self.startup_s, "start-up", shape)
        if self.lag_s is not None:
            _refuse_wrong_values(self.lag_s, "lag", (n_iterations, n_ranks, n_messages))
        if self.startup_s is not None and (self.startup_s < 0).any():
            raise UserError("a schedule: every start-up must not be below 0")
        if self.first_start_s.shape != (n_ranks,):
            raise UserError(
                f"a schedule of {n_ranks} ranks has {self.first_start_s.size} starts"
            )
        for times_s in (self.work_s, self.message_s):
            if not (np.isfinite(times_s) & (times_s >= 0)).all():
                raise UserError("a schedule: every time must be finite and not below 0")
        if not np.isfinite(self.first_start_s).all():
            raise UserError("a schedule: every start must be finite")

    @property
    def lags_s(self) -> Floats:
        """Return the lag of each rank behind each message, shape (I, R, K), in seconds."""
        if self.lag_s is None:
            return np.zeros((*self.work_s.shape[:2], self.message_s.shape[1]))
        return self.lag_s

    @property
    def n_ranks(self) -> int:
        """Return the number of ranks."""
        return self.work_s.shape[1]

    def with_work(self, work_s: Floats) -> Schedule:
        """Return the schedule with other work, shape (I, R, S), in seconds."""
        return replace(self, work_s=work_s)

    @property
    def startups_s(self) -> Floats:
        """Return how much of each message is start-up, shape (I, K), in seconds."""
        if self.startup_s is None:
            return np.zeros_like(self.message_s)
        # A message that is made shorter has no more start-up than time.
        return np.minimum(self.startup_s, self.message_s)

    def with_messages(
        self, message_s: Floats, startup_s: Floats | None = None
    ) -> Schedule:
        """Return the schedule with other times of messages.

        Parameters
        ----------
        message_s : ndarray, shape (I, K)
            The times in seconds.
        startup_s : ndarray, shape (I, K), optional
            How much of them is start-up. By default it is as much as before.

        Returns
        -------
        Schedule
        """
        if startup_s is None:
            startup_s = self.startup_s
        return replace(self, message_s=message_s, startup_s=startup_s)

    def without_messages(self, removed: NDArray[np.bool_]) -> Schedule:
        """Return the schedule without some messages and the waits for them.

        Parameters
        ----------
        removed : ndarray, shape (K,)
            Whether each message is removed.

        Returns
        -------
        Schedule
            The work of all ranks is the same. The messages that stay keep their times and
            their lags, and are numbered anew.
        """
        # For each message that stays, its number among those that stay.
        new_number = np.cumsum(~removed) - 1
        segments = []
        for segment in self.segments:
            if segment.action in (POST, WAIT) and removed[segment.message]:
                # The work of the segment stays, so a mark takes the place of its action.
                segments.append(Segment(segment.phase, MARK))
            elif segment.action in (POST, WAIT):
                number = int(new_number[segment.message])
                segments.append(segment._replace(message=number))
            else:
                segments.append(segment)
        rooted = tuple(int(new_number[k]) for k in self.rooted if not removed[k])
        return replace(
            self,
            segments=tuple(segments),
            message_s=self.message_s[:, ~removed],
            startup_s=self.startups_s[:, ~removed],
            lag_s=self.lags_s[:, :, ~removed],
            rooted=rooted,
        )

    def replay(self) -> Replay:
        """Return when all ranks do everything, in a clock that all ranks share.

        Returns
        -------
        Replay
            The instants at which iterations start and messages are posted and end.

        Notes
        -----
        Let t be the time of a rank. A segment of work w moves it to t + w. A post of
        message k at t makes the message ready at the maximum of t over ranks. A wait for
        message k moves t to the maximum of t and the end of k plus the lag of this rank. A
        wait for a message in ``rooted`` ends as the class describes.
        """
        n_iterations, n_ranks, _ = self.work_s.shape
        n_messages = self.message_s.shape[1]
        # For a link, a message consists of processor time (software) and link time (wire).
        # The start-up does not use the link, and is passed as the processor time.
        software_s = self.startups_s
        wire_s = self.message_s - software_s
        lags_s = self.lags_s
        starts_s = np.empty((n_iterations + 1, n_ranks))
        posted_s = np.empty((n_iterations, n_ranks, n_messages))
        ends_s = np.empty((n_iterations, n_messages))
        starts_s[0] = self.first_start_s
        for i in range(n_iterations):
            # On each rank, an iteration starts when the one before it has ended. The call
            # also fills in the rows of posted_s and ends_s.
            starts_s[i + 1] = self._play_iteration(
                self.work_s[i],
                Parts(software_s[i], wire_s[i]),
                lag_s=lags_s[i],
                start_s=starts_s[i],
                posted_s=posted_s[i],
                ends_s=ends_s[i],
            )
        return Replay(starts_s, posted_s, ends_s)

    def _play_iteration(
        self,
        work_s: Floats,
        parts: Parts,
        lag_s: Floats,
        start_s: Floats,
        posted_s: Floats,
        ends_s: Floats,
    ) -> Floats:
        """Return when each rank ends an iteration, and fill in two arrays on the way.

        Parameters
        ----------
        work_s : ndarray, shape (R, S)
            How long each rank works in each segment, in seconds.
        parts : Parts
            The start-up (``software_s``) and the link time (``wire_s``) of each of the K
            messages.
        lag_s : ndarray, shape (R, K)
            How long after the end of a message each rank that waits for it goes on, in seconds.
        start_s : ndarray, shape (R,)
            When each rank starts, in seconds.
        posted_s : ndarray, shape (R, K)
            Is filled in: when each rank posts each message.
        ends_s : ndarray, shape (K,)
            Is filled in: when each message ends.

        Returns
        -------
        ndarray, shape (R,)
            In seconds.
        """
        # Work is added to this copy in place, and ``start_s`` stays as it is.
        now_s = start_s.copy()
        n_posted = 0
        # A message that is posted later may share the link with an earlier one. The ends
        # of all messages are therefore computed anew at the first wait after a post.
        ends_are_current = False
        for s, segment in enumerate(self.segments):
            now_s += work_s[:, s]
            # After its work, a segment posts message k or waits for it. A segment that ends
            # with a mark does neither.
            k = segment.message
            if segment.action == POST:
                # Messages are posted in the order of their numbers, so those posted so far
                # are the first ``n_posted``.
                posted_s[:, k] = now_s
                n_posted += 1
                ends_are_current = False
            elif segment.action == WAIT:
                if not ends_are_current:
                    ends_s[:n_posted] = self._ends_s(posted_s[:, :n_posted], parts)
                    ends_are_current = True
                if k in self.rooted:
                    # Only rank 0 sends this message, and each other rank has it at a time of
                    # its own. `ends_s` says only when the last rank has it.
                    message_s = parts.software_s[k] + parts.wire_s[k]
                    may_go_on_s = self._rooted_may_go_on_s(posted_s[:, k], message_s)
                else:
                    may_go_on_s = ends_s[k] + lag_s[:, k]
                now_s = np.maximum(now_s, may_go_on_s)
        return now_s

    def _ends_s(self, posted_s: Floats, parts: Parts) -> Floats:
        """Return when the messages that have been posted so far end, shape (P,).

        ``posted_s``, shape (R, P), is when each rank posts each of these P messages, and
        ``parts`` has the times of all messages of the iteration. A message that only rank 0
        sends (`rooted`) ends when the last rank has received it. The other ranks may go on
        earlier, as `_rooted_may_go_on_s` computes.
        """
        n_posted = posted_s.shape[1]
        # A message that all ranks send is ready when the last rank has posted it. A rooted
        # message can reach a rank when rank 0 and this rank have posted it, and so it can
        # reach the last rank when all ranks have.
        ready_s = posted_s.max(axis=0)
        software_s = parts.software_s[:n_posted]
        wire_s = parts.wire_s[:n_posted]
        if not self.rooted:
            return self._ends_on_link_s(ready_s, Parts(software_s, wire_s))
        # Messages of `rooted`, such as broadcasts, do not share the link. Once they are ready,
        # they take the time that they take alone.
        ends_s = ready_s + software_s + wire_s
        # All others share the link, and the ends that were computed above are replaced.
        sharing = [k for k in range(n_posted) if k not in self.rooted]
        if sharing:
            on_link = Parts(software_s[sharing], wire_s[sharing])
            ends_s[sharing] = self._ends_on_link_s(ready_s[sharing], on_link)
        return np.asarray(ends_s)

    def _ends_on_link_s(self, ready_s: Floats, parts: Parts) -> Floats:
        """Return when messages that share the link end, in seconds, in the shape of ``ready_s``."""
        # The clock of a link begins at 0, and the times of ranks may be below 0.
        origin_s = ready_s.min()
        link = Link(in_flight=self.in_flight)
        _, ends_s = link.play(ready_s - origin_s, parts)
        return np.asarray(ends_s + origin_s)

    def _rooted_may_go_on_s(self, posted_s: Floats, message_s: float) -> Floats:
        """Return when each rank that waits for a message of rank 0 may go on, shape (R,).

        Only rank 0 sends the message, as in a broadcast, so the others wait for rank 0 alone.
        Ranks post the message at ``posted_s``, shape (R,), and it takes ``message_s``. All
        times are in seconds.
        """
        # A rank other than rank 0 has the bytes ``message_s`` after both rank 0 and the rank
        # itself have posted the message.
        may_go_on_s = np.maximum(posted_s, posted_s[0]) + message_s
        if self.root_waits:
            # Rank 0 goes on when the last of the other ranks has the bytes. A single rank
            # has no others, and goes on at once.
            may_go_on_s[0] = may_go_on_s[1:].max(initial=posted_s[0])
        else:
            # Rank 0 goes on as soon as it has posted the message.
            may_go_on_s[0] = posted_s[0]
        return may_go_on_s

    def timeline(self, i: int) -> Timeline:
        """Return what all ranks do in an iteration, in a clock that they share.

        Parameters
        ----------
        i : int
            The iteration, counted from 0.

        Returns
        -------
        Timeline
            The work of each phase, the waits, and the messages. Times are in seconds from
            the start of the first rank. The input counts as "io".
        """
        replay = self.replay()
        origin_s = replay.starts_s[i].min()
        # All times from here on are seconds from the start of the first rank.
        start_s = replay.starts_s[i] - origin_s
        posted_s = replay.posted_s[i] - origin_s
        ends_s = replay.ends_s[i] - origin_s
        instants = self._instants(i, start_s, posted_s, ends_s)
        rows = []
        for rank in range(self.n_ranks):
            rows += self._rows_of_compute_stream(rank, instants)
            rows += _message_rows(rank, posted_s, ends_s)
        # Spans that last for no time are left out.
        return Timeline.from_rows(row for row in rows if row["end_s"] > row["start_s"])

    def _instants(
        self, i: int, start_s: Floats, posted_s: Floats, ends_s: Floats
    ) -> list[_Instants]:
        """Return when the ranks work and wait in each segment of iteration ``i``.

        Ranks start the iteration at ``start_s``, shape (R,). Rank r posts message k at
        ``posted_s[r, k]``, and the message ends at ``ends_s[k]``. All times are in seconds
        of one clock, which is also the clock of the result.
        """
        lags_s = self.lags_s[i]
        instants = []
        now_s = start_s
        for s, segment in enumerate(self.segments):
            worked_s = now_s + self.work_s[i, :, s]
            # A rank goes on when its work ends, unless the segment ends with a wait.
            waited_s = worked_s
            if segment.action == WAIT:
                k = segment.message
                if k in self.rooted:
                    # Only rank 0 sends this message, and each other rank has it at a time of
                    # its own. `ends_s` says only when the last rank has it.
                    message_s = self.message_s[i, k]
                    may_go_on_s = self._rooted_may_go_on_s(posted_s[:, k], message_s)
                else:
                    may_go_on_s = ends_s[k] + lags_s[:, k]
                waited_s = np.maximum(worked_s, may_go_on_s)
            instants.append(
                _Instants(start_s=now_s, work_end_s=worked_s, wait_end_s=waited_s)
            )
            now_s = waited_s
        return instants

    def _rows_of_compute_stream(
        self, rank: int, instants: Sequence[_Instants]
    ) -> list[dict[str, Any]]:
        """Return the work and the waits of a rank in an iteration, as rows of a timeline.

        ``instants`` has when ranks work and wait in each segment.
        """
        # Waits are in the same stream as the work. Messages are in another one.
        stream = "compute"
        rows = []
        for segment, of_ranks in zip(self.segments, instants, strict=True):
            start_s = of_ranks.start_s[rank]
            work_end_s = of_ranks.work_end_s[rank]
            wait_end_s = of_ranks.wait_end_s[rank]
            phase = segment.phase
            # In a timeline the input has the kind "io". The names of all other phases are
            # kinds, too.
            kind = "io" if phase == "input" else phase
            rows.append(_row(rank, phase, kind, stream, start_s, work_end_s))
            if segment.action == WAIT:
                task = f"wait for message {segment.message}"
                rows.append(_row(rank, task, "wait", stream, work_end_s, wait_end_s))
        return rows


class _Instants(NamedTuple):
    """When each rank does a segment of an iteration, in arrays of shape (R,), in seconds.

    Attributes
    ----------
    start_s : ndarray, shape (R,)
        When each rank starts to work.
    work_end_s : ndarray, shape (R,)
        When its work ends.
    wait_end_s : ndarray, shape (R,)
        When it has also waited. Without a wait, this is when its work ends.
    """

    start_s: Floats
    work_end_s: Floats
    wait_end_s: Floats


def _message_rows(rank: int, posted_s: Floats, ends_s: Floats) -> list[dict[str, Any]]:
    """Return the messages of an iteration as a rank has them, as rows of a timeline.

    ``posted_s``, shape (R, K), is when each of R ranks posts each of K messages, and
    ``ends_s``, shape (K,), is when each message ends, in seconds.
    """
    rows = []
    for k, end_s in enumerate(ends_s):
        row = _row(
            rank,
            task=f"message {k}",
            # A timeline has no kind for a broadcast, which counts as an all-reduce.
            kind="all_reduce",
            stream="communication",
            # A message starts when the last rank has posted it.
            start_s=posted_s[:, k].max(),
            end_s=end_s,
        )
        # Each rank has a row for the message. The group, which is the same in all these rows, shows
        # that they belong together.
        rows.append({**row, "group": k})
    return rows


def _row(
    rank: int, task: str, kind: str, stream: str, start_s: float, end_s: float
) -> dict[str, Any]:
    """Return a span of a replayed timeline, by the columns of a `Timeline`."""
    return {
        "rank": rank,
        "task": task,
        "kind": kind,
        "stream": stream,
        "start_s": start_s,
        "end_s": end_s,
        "origin": "replayed",
    }


@dataclass(frozen=True, eq=False)
class Replay:
    """When the ranks of a `Schedule` do everything.

    Attributes
    ----------
    starts_s : ndarray, shape (I + 1, R)
        When each rank starts each iteration, and at last when it has ended all of them.
    posted_s : ndarray, shape (I, R, K)
        When each rank posts each message.
    ends_s : ndarray, shape (I, K)
        When each message ends. A message that only rank 0 sends ends here when the last
        rank has received it.
    """

    starts_s: Floats
    posted_s: Floats
    ends_s: Floats

    @property
    def iteration_s(self) -> Floats:
        """Return how long iterations take until their last rank ends, shape (I,).

        Notes
        -----
        With E_i as the instant at which the last rank ends iteration i, that iteration
        takes E_i - E_(i-1). A rank that is late after its last message, in the update,
        makes the other ranks wait in the next iteration only. Its delay counts in the
        iteration in which it is late, because this rank ends it late.
        """
        # A rank starts an iteration when it ends the one before it. So these are E_(i-1) for
        # each iteration, and at last the end of the last iteration.
        last_start_s = self.starts_s.max(axis=1)
        return np.asarray(np.diff(last_start_s))


def alone_s(
    starts_s: Floats, ends_s: Floats, startup_s: Floats, in_flight: int
) -> Floats:
    """Return how long messages that shared a link would have taken alone.

    Parameters
    ----------
    starts_s, ends_s : ndarray, shape (K,)
        When each message of an iteration was under way, in seconds.
    startup_s : ndarray, shape (K,)
        How much of each message is start-up, which is not shared, in seconds.
    in_flight : int
        How many messages were under way at most.

    Returns
    -------
    ndarray, shape (K,)
        Seconds. Messages of these times that start at ``starts_s`` and share a link, at
        most ``in_flight`` at once, end at ``ends_s``.

    Notes
    -----
    Without start-up, each message gets 1/n of every interval in which n are under way, and
    the sum is its time alone. With start-up, the messages are replayed, and the times
    on the link are corrected until the messages end when they should, but at most
    MOST_CORRECTIONS times.

    Examples
    --------
    The second message was under way for 2 s, one of them together with the first one:

    >>> alone_s(np.array([0.0, 3.0]), np.array([4.0, 5.0]), np.zeros(2), in_flight=2).tolist()
    [3.5, 1.5]
    """
    own_share_s = _own_share_s(starts_s, ends_s)
    # A message cannot have more start-up than time.
    startup_s = np.minimum(startup_s, ends_s - starts_s)
    if not startup_s.any():
        return own_share_s

    # The start-up is passed as processor time (software), which messages on this link do not
    # share: by default, any number of them can use the processor at once.
    link = Link(in_flight=in_flight)
    # The clock of a link begins at 0.
    origin_s = starts_s.min()
    # A first guess of the times on the link, which is corrected below. It can be too short,
    # because the shares count start-up as if it used the link, too. Where the start-up
    # exceeds the whole share of a message, the guess is 0.
    wire_s = np.maximum(own_share_s - startup_s, 0.0)
    for _ in range(MOST_CORRECTIONS):
        parts = Parts(software_s=startup_s, wire_s=wire_s)
        _, replayed_ends_s = link.play(starts_s - origin_s, parts)
        missed_s = (ends_s - origin_s) - replayed_ends_s
        # Only half of what is missing is added. If two messages share the link, each of
        # them also delays the other, and with all of it both would overshoot.
        wire_s = np.maximum(wire_s + missed_s / 2, 0.0)
        if np.abs(missed_s).max() < CLOSE_ENOUGH_S:
            break
    return np.asarray(wire_s + startup_s)


def _own_share_s(starts_s: Floats, ends_s: Floats) -> Floats:
    """Return how much time of a shared link each message gets, shape (K,), in seconds.

    Message k is under way from ``starts_s[k]`` to ``ends_s[k]``, in seconds. While n
    messages are under way, each of them gets 1/n of the time.
    """
    # Knots are the times at which a message starts or ends. Between two knots the set of
    # messages under way does not change.
    knots_s = np.unique(np.concatenate([starts_s, ends_s]))
    # One row for each interval between two knots, and one column for each message.
    begin_s = knots_s[:-1, None]
    under_way = (starts_s <= begin_s) & (begin_s < ends_s)
    # In an interval without any message, 1 avoids a division by 0. No message counts this
    # interval.
    n_sharing = np.maximum(under_way.sum(axis=1), 1)
    # The sum over the intervals in which a message is under way, for each message.
    return np.asarray((np.diff(knots_s) / n_sharing) @ under_way)
