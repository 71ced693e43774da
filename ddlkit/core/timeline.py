"""Spans of one or more iterations in columns: breakdown, overlap, exposed communication, export."""

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
BEFORE = ("io", "decode", "h2d", "forward", "backward", "sparsify", "negotiate", "wait")
KINDS = (*BEFORE, *COMMUNICATION, "update")
COMPUTE = ("forward", "backward", "sparsify", "update")
ORIGINS = ("simulated", "replayed", "measured", "recorded")
_WHOLE = ("rank", "iteration", "group", "bytes")
_DTYPES = {**dict.fromkeys(_WHOLE, np.int64), "start_s": float, "end_s": float}


@dataclass(frozen=True, eq=False)
class Timeline:
    """One array (n,) a column; seconds from the iteration's start; ``group`` is -1 where none applies."""

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
            column = np.asarray(getattr(self, name), dtype=_DTYPES.get(name, str))
            object.__setattr__(self, name, column)
        for name, names in (("kind", KINDS), ("origin", ORIGINS)):
            for unknown in sorted(set(getattr(self, name).tolist()) - set(names))[:1]:
                use = f"use one of {', '.join(names)}"
                raise UserError(f"timeline: unknown {name} {unknown!r}: {use}")
        late = np.flatnonzero(~(self.end_s >= self.start_s))
        if late.size:
            raise UserError(
                f"timeline: span {str(self.task[late[0]])!r} ends before it starts"
            )

    @classmethod
    def from_rows(cls, rows: Iterable[Mapping[str, Any]]) -> Timeline:
        """Return a timeline of mappings; rank, iteration and bytes default to 0, group to -1."""
        listed = [
            {**{"rank": 0, "iteration": 0, "bytes": 0, "group": -1}, **row}
            for row in rows
        ]
        return cls.from_columns(
            {name: np.array([row[name] for row in listed]) for name in COLUMNS}
        )

    @classmethod
    def from_columns(cls, columns: Mapping[str, Any]) -> Timeline:
        """Return the timeline of a table, or of arrays (n,) by name; others than COLUMNS are ignored."""
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
        """Return the spans where ``mask`` (n,) is true."""
        return Timeline.from_columns(
            {name: getattr(self, name)[mask] for name in COLUMNS}
        )

    def spans(self, kinds: Sequence[str]) -> NDArray[np.float64]:
        """Return the (m, 2) disjoint, sorted union of the spans of ``kinds``."""
        chosen = np.isin(self.kind, kinds)
        return merge(np.column_stack([self.start_s[chosen], self.end_s[chosen]]))

    def busy_s(self, kinds: Sequence[str]) -> float:
        """Return seconds during which at least one span of ``kinds`` runs."""
        return float(np.diff(self.spans(kinds)).sum())

    def overlap_s(self) -> float:
        """Return seconds during which something computes and something is sent."""
        either_s = self.busy_s((*COMPUTE, *COMMUNICATION))
        return self.busy_s(COMPUTE) + self.busy_s(COMMUNICATION) - either_s

    def exposed_communication_s(self) -> float:
        """Return seconds of communication while nothing computes: what training waits for."""
        return self.busy_s(COMMUNICATION) - self.overlap_s()

    @property
    def duration_s(self) -> float:
        """Return seconds from the first start to the last end."""
        return float(self.end_s.max() - self.start_s.min()) if self.n else 0.0

    def to_frame(self) -> Any:
        """Return the columns as a pandas DataFrame."""
        import pandas as pd

        return pd.DataFrame({name: getattr(self, name) for name in COLUMNS})

    def to_chrome_trace(self) -> dict[str, Any]:
        """Return what Perfetto opens: a process a rank, a thread a stream; iterations from 0 on, in µs."""
        by_iteration = self.to_frame().groupby("iteration")
        first_s, last_s = by_iteration["start_s"].min(), by_iteration["end_s"].max()
        shift_s = (last_s - first_s).cumsum().shift(fill_value=0.0) - first_s
        start_s = self.start_s + shift_s.loc[self.iteration].to_numpy()
        threads: dict[tuple[int, str, int], int] = {}
        spans: list[dict[str, Any]] = []
        for row, track in enumerate(self._tracks(start_s)):
            rank, took_s = int(self.rank[row]), self.end_s[row] - self.start_s[row]
            tid = threads.setdefault((rank, str(self.stream[row]), track), len(threads))
            span = {"ph": "X", "name": str(self.task[row]), "cat": str(self.kind[row])}
            times = {"ts": float(start_s[row]) * 1e6, "dur": float(took_s) * 1e6}
            named = ("iteration", "group", "bytes", "origin")
            args = {name: getattr(self, name)[row].item() for name in named}
            spans.append({**span, **times, "pid": rank, "tid": tid, "args": args})
        names = [
            ("process_name", r, 0, f"rank {r}") for r in np.unique(self.rank).tolist()
        ]
        for (rank, stream, track), tid in threads.items():
            names.append(
                ("thread_name", rank, tid, f"{stream} {track + 1}" if track else stream)
            )
        metadata = [
            {"ph": "M", "name": what, "pid": rank, "tid": tid, "args": {"name": name}}
            for what, rank, tid, name in names
        ]
        return {"traceEvents": [*metadata, *spans], "displayTimeUnit": "ms"}

    def _tracks(self, start_s: NDArray[np.float64]) -> list[int]:
        """Return n numbers: spans of one rank, stream and track do not overlap; tracks count from 0."""
        tracks = [0] * self.n
        end_s = start_s + (self.end_s - self.start_s)
        # Where one ends and the next begins in the same instant, rounding must not part them.
        over_s = end_s - 1e-12 * np.abs(end_s)
        busy_s: dict[tuple[int, str], list[float]] = defaultdict(list)
        for row in np.lexsort((end_s, start_s)).tolist():
            until_s = busy_s[int(self.rank[row]), str(self.stream[row])]
            free = (k for k, end in enumerate(until_s) if end <= start_s[row])
            tracks[row] = next(free, len(until_s))
            until_s[tracks[row] : tracks[row] + 1] = [float(over_s[row])]
        return tracks


COLUMNS = tuple(column.name for column in fields(Timeline))


def merge(spans: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the (m, 2) disjoint, sorted union of (n, 2) half-open spans."""
    if not len(spans):
        return np.empty((0, 2))
    ordered = spans[np.argsort(spans[:, 0], kind="stable")]
    reach = np.maximum.accumulate(ordered[:, 1])
    first = np.concatenate([[True], ordered[1:, 0] > reach[:-1]])
    return np.column_stack(
        [ordered[first, 0], reach[np.concatenate([first[1:], [True]])]]
    )
