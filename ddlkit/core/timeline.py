"""Spans of one or more iterations in columns: overlap, exposed communication, export.

A span says that a task ran on a stream of a rank from one time to another. A timeline
has a column for each field of a span. Times are in seconds from the start of the
iteration.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddlkit.core.collective import COLLECTIVES
from ddlkit.core.errors import UserError

COMMUNICATION = tuple(COLLECTIVES)
"""The kinds of spans in which something is sent."""
BEFORE = ("io", "decode", "h2d", "forward", "backward", "sparsify", "negotiate", "wait")
"""The kinds of spans that can come before communication."""
KINDS = (*BEFORE, *COMMUNICATION, "update")
"""All kinds of spans, in the order of an iteration."""
COMPUTE = ("forward", "backward", "sparsify", "update")
"""The kinds of spans in which something is computed."""
ORIGINS = ("simulated", "replayed", "measured", "recorded")
"""Where a span can come from."""

_COLUMN_TYPES: dict[str, type] = {
    "rank": np.int64,
    "iteration": np.int64,
    "group": np.int64,
    "bytes": np.int64,
    "start_s": float,
    "end_s": float,
}
"""The types of columns that are not text."""
NO_GROUP = -1
"""The group of a span that belongs to no group of gradients."""

_DEFAULTS = {"rank": 0, "iteration": 0, "bytes": 0, "group": NO_GROUP}
"""The values of columns that a row leaves out."""


@dataclass(frozen=True, eq=False)
class Timeline:
    """Spans in columns, one array of shape (n,) for each.

    Parameters
    ----------
    task : ndarray of str
        The names of the tasks.
    kind : ndarray of str
        What each task does: a name in KINDS.
    stream : ndarray of str
        Where each task runs. Tasks of one stream usually do not overlap.
    rank, iteration : ndarray of int
        The rank and the iteration of each span, counted from 0.
    group : ndarray of int
        The group of gradients, NO_GROUP where there is none.
    origin : ndarray of str
        Where each span comes from: a name in ORIGINS.
    start_s, end_s : ndarray
        Seconds from the start of the iteration.
    bytes : ndarray of int
        The bytes of the gradient or of the message, 0 where there are none.

    Raises
    ------
    UserError
        If a kind or an origin is unknown, or if a span ends before it starts.

    Examples
    --------
    A message of 3 s begins 1 s before backward ends:

    >>> backward = {"task": "b0", "kind": "backward", "stream": "compute"}
    >>> message = {"task": "c0", "kind": "all_reduce", "stream": "communication"}
    >>> rows = [
    ...     {**backward, "origin": "simulated", "start_s": 0.0, "end_s": 2.0},
    ...     {**message, "origin": "simulated", "start_s": 1.0, "end_s": 4.0},
    ... ]
    >>> timeline = Timeline.from_rows(rows)
    >>> timeline.overlap_s(), timeline.exposed_communication_s()
    (1.0, 2.0)
    """

    task: NDArray[Any]
    kind: NDArray[Any]
    stream: NDArray[Any]
    rank: NDArray[np.int64]
    iteration: NDArray[np.int64]
    group: NDArray[np.int64]
    origin: NDArray[Any]
    start_s: NDArray[np.float64]
    end_s: NDArray[np.float64]
    bytes: NDArray[np.int64]

    def __post_init__(self) -> None:
        for name in COLUMNS:
            column_type = _COLUMN_TYPES.get(name, str)
            column: NDArray[Any] = np.asarray(getattr(self, name), dtype=column_type)
            # A frozen dataclass lets its fields be set only in this way.
            object.__setattr__(self, name, column)
        for name, known in (("kind", KINDS), ("origin", ORIGINS)):
            unknown = sorted(set(getattr(self, name).tolist()) - set(known))
            if unknown:
                raise UserError(
                    f"timeline: unknown {name} {unknown[0]!r}: "
                    f"use one of {', '.join(known)}"
                )
        # The comparison is negated, because NaN fails every comparison and must be
        # wrong.
        wrong = np.flatnonzero(~(self.end_s >= self.start_s))
        if wrong.size:
            task = str(self.task[wrong[0]])
            raise UserError(f"timeline: span {task!r} ends before it starts")

    @classmethod
    def from_rows(cls, rows: Iterable[Mapping[str, Any]]) -> Timeline:
        """Return the timeline with a given row for each span.

        Parameters
        ----------
        rows : iterable of mapping
            The values of each span, by column. By default rank, iteration and bytes are
            0, and the group is NO_GROUP.

        Returns
        -------
        Timeline
            The spans in the order of ``rows``.
        """
        complete = [{**_DEFAULTS, **row} for row in rows]
        return cls.from_columns(
            {name: np.array([row[name] for row in complete]) for name in COLUMNS}
        )

    @classmethod
    def from_columns(cls, columns: Mapping[str, Any]) -> Timeline:
        """Return the timeline with the given columns.

        Parameters
        ----------
        columns : mapping of str to array_like, shape (n,)
            All columns by name, as a pandas DataFrame has them. Columns of other names
            are ignored.

        Returns
        -------
        Timeline
            A span for each element of the columns.
        """
        return cls(
            task=np.asarray(columns["task"]),
            kind=np.asarray(columns["kind"]),
            stream=np.asarray(columns["stream"]),
            rank=np.asarray(columns["rank"]),
            iteration=np.asarray(columns["iteration"]),
            group=np.asarray(columns["group"]),
            origin=np.asarray(columns["origin"]),
            start_s=np.asarray(columns["start_s"]),
            end_s=np.asarray(columns["end_s"]),
            bytes=np.asarray(columns["bytes"]),
        )

    @property
    def n(self) -> int:
        """Return the number of spans."""
        return len(self.task)

    def select(self, mask: NDArray[np.bool_]) -> Timeline:
        """Return the spans where ``mask``, shape (n,), is true."""
        return Timeline.from_columns(
            {name: getattr(self, name)[mask] for name in COLUMNS}
        )

    def spans(self, kinds: Sequence[str]) -> NDArray[np.float64]:
        """Return the times at which a span of ``kinds`` runs.

        Parameters
        ----------
        kinds : sequence of str
            Some of KINDS.

        Returns
        -------
        ndarray, shape (m, 2)
            Starts and ends in seconds, disjoint and increasing.
        """
        chosen = np.isin(self.kind, kinds)
        # Spans of different tasks may overlap, so they are merged.
        return merge(np.column_stack([self.start_s[chosen], self.end_s[chosen]]))

    def busy_s(self, kinds: Sequence[str]) -> float:
        """Return for how many seconds at least one span of ``kinds`` runs."""
        # A row of spans has a start and an end, whose difference is the duration.
        return float(np.diff(self.spans(kinds)).sum())

    def overlap_s(self) -> float:
        """Return for how many seconds compute and communication go on together."""
        # The sum of compute and communication counts the overlap twice, and their union
        # counts it once.
        either_s = self.busy_s((*COMPUTE, *COMMUNICATION))
        return self.busy_s(COMPUTE) + self.busy_s(COMMUNICATION) - either_s

    def exposed_communication_s(self) -> float:
        """Return for how many seconds something is sent while nothing is computed."""
        return self.busy_s(COMMUNICATION) - self.overlap_s()

    @property
    def duration_s(self) -> float:
        """Return the seconds from the first start to the last end."""
        if not self.n:
            return 0.0
        return float(self.end_s.max() - self.start_s.min())

    def to_frame(self) -> Any:
        """Return the columns as a pandas DataFrame."""
        # pandas takes long to import, and nothing else in ddlkit.core needs it.
        import pandas as pd

        return pd.DataFrame({name: getattr(self, name) for name in COLUMNS})

    def to_chrome_trace(self) -> dict[str, Any]:
        """Return a trace that Perfetto and Chrome open.

        Returns
        -------
        dict
            The trace, with a process for each rank and a thread for each stream.
            Iterations follow one another from time 0 on. Spans of one stream that
            overlap are in threads of their own.
        """
        continuous_start_s = self._continuous_start_s()
        # The number of each thread, by its rank, stream and track.
        thread_numbers: dict[tuple[int, str, int], int] = {}
        events = []
        # Spans of one rank and stream that overlap have different tracks, counted from 0.
        for row, track in enumerate(self._tracks(continuous_start_s)):
            thread = (int(self.rank[row]), str(self.stream[row]), track)
            # A new thread gets the next number.
            tid = thread_numbers.setdefault(thread, len(thread_numbers))
            start_s = float(continuous_start_s[row])
            events.append(self._trace_event(row, start_s, tid))

        # Events of metadata, which give each process and each thread its name.
        names = [
            _trace_name("process_name", rank, tid=0, name=f"rank {rank}")
            for rank in np.unique(self.rank).tolist()
        ]
        for (rank, stream, track), tid in thread_numbers.items():
            # Only a stream whose spans overlap has several threads. The second one and
            # all later ones have a number in their names.
            name = f"{stream} {track + 1}" if track else stream
            names.append(_trace_name("thread_name", rank, tid, name))
        return {"traceEvents": [*names, *events], "displayTimeUnit": "ms"}

    def _trace_event(self, row: int, start_s: float, tid: int) -> dict[str, Any]:
        """Return a span as an event of a trace, whose times are in microseconds.

        ``row`` is the number of the span, ``start_s`` its start on the time axis of the
        trace, and ``tid`` the number of its thread.
        """
        # Columns that Perfetto shows if a span is selected.
        details = ("iteration", "group", "bytes", "origin")
        return {
            # The phase X stands for a complete event, which has a start and a duration.
            "ph": "X",
            "name": str(self.task[row]),
            "cat": str(self.kind[row]),
            "ts": start_s * 1e6,
            "dur": float(self.end_s[row] - self.start_s[row]) * 1e6,
            "pid": int(self.rank[row]),
            "tid": tid,
            "args": {name: getattr(self, name)[row].item() for name in details},
        }

    def _continuous_start_s(self) -> NDArray[np.float64]:
        """Return when each span starts if iterations follow one another, shape (n,).

        The result is in seconds from the start of the first iteration, whereas
        ``start_s`` counts from the start of the span's own iteration.
        """
        # All values from here on are by iteration, the lowest number first, until they are
        # looked up for each span.
        by_iteration = self.to_frame().groupby("iteration")
        first_start_s = by_iteration["start_s"].min()
        last_end_s = by_iteration["end_s"].max()
        duration_s = last_end_s - first_start_s
        end_s = duration_s.cumsum()
        # An iteration begins when the one before it ends. The first begins at 0.
        begin_s = end_s.shift(fill_value=0.0)
        # By how much the spans of each iteration move.
        shift_s = begin_s - first_start_s
        shift_of_span_s = shift_s.loc[self.iteration].to_numpy()
        return np.asarray(self.start_s + shift_of_span_s)

    def _tracks(self, continuous_start_s: NDArray[np.float64]) -> list[int]:
        """Return the track of each span, such that spans of a track do not overlap.

        Tracks of a rank and a stream are counted from 0. This is interval partitioning:
        in the order of their starts, spans take the first track that is free, or a new
        track if none is free. ``continuous_start_s`` has the starts of the spans of
        all iterations on one time axis, as `_continuous_start_s` returns them.
        """
        tracks = [0] * self.n
        continuous_end_s = continuous_start_s + (self.end_s - self.start_s)
        # If a span begins in the instant in which another one ends, rounding must not
        # make them overlap. So a track is free an instant before its span ends.
        free_s = continuous_end_s - 1e-12 * np.abs(continuous_end_s)
        # When each track of a rank and a stream is free again.
        free_s_of: dict[tuple[int, str], list[float]] = defaultdict(list)
        # By start, and by end among equal starts: `lexsort` sorts by its last key first.
        for row in np.lexsort((continuous_end_s, continuous_start_s)).tolist():
            # When each track is free again, of the rank and the stream of this span.
            track_free_s = free_s_of[int(self.rank[row]), str(self.stream[row])]
            track = _first_free(track_free_s, float(continuous_start_s[row]))
            if track == len(track_free_s):
                # No track is free, so the span begins a new one.
                track_free_s.append(0.0)
            track_free_s[track] = float(free_s[row])
            tracks[row] = track
        return tracks


COLUMNS = tuple(column.name for column in fields(Timeline))
"""The names of the columns, in order."""


def _first_free(free_s: Sequence[float], start_s: float) -> int:
    """Return the first track that is free at a time, or the next number if none is.

    ``free_s`` has the time from which each track is free, in seconds.
    """
    for track, time_s in enumerate(free_s):
        if time_s <= start_s:
            return track
    return len(free_s)


def _trace_name(what: str, rank: int, tid: int, name: str) -> dict[str, Any]:
    """Return the event that gives a process or a thread of a trace its name.

    ``what`` is "process_name" or "thread_name", and ``tid`` is the number of the thread.
    The phase M stands for metadata.
    """
    return {"ph": "M", "name": what, "pid": rank, "tid": tid, "args": {"name": name}}


def merge(spans: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the union of spans.

    Parameters
    ----------
    spans : ndarray, shape (n, 2)
        The start and the end of each span. The end does not belong to the span.

    Returns
    -------
    ndarray, shape (m, 2)
        Disjoint spans, increasing. Spans that touch are one.

    Examples
    --------
    >>> merge(np.array([[4.0, 5.0], [0.0, 2.0], [1.0, 3.0]])).tolist()
    [[0.0, 3.0], [4.0, 5.0]]
    """
    if not len(spans):
        return np.empty((0, 2))
    ordered = spans[np.argsort(spans[:, 0], kind="stable")]
    start_s = ordered[:, 0]
    # The latest end of each span and of all spans before it.
    reach_s = np.maximum.accumulate(ordered[:, 1])
    # A span begins a new span of the union if it starts after all earlier spans have
    # ended.
    begins_union = np.concatenate([[True], start_s[1:] > reach_s[:-1]])
    # It is the last one in its span of the union if the next span begins a new one.
    ends_union = np.concatenate([begins_union[1:], [True]])
    return np.column_stack([start_s[begins_union], reach_s[ends_union]])
