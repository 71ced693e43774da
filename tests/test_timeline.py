"""Laws of timelines: unions, overlap, exposed communication, and the trace that Perfetto opens."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlkit.core.errors import UserError
from ddlkit.core.timeline import COLUMNS, Timeline, merge

spans = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=30)


def timeline(compute: list[tuple[int, int]], messages: list[tuple[int, int]]) -> Timeline:
    rows = [("backward", s) for s in compute] + [("allreduce", s) for s in messages]
    return Timeline.from_rows(
        {
            "task": f"{kind} {i}",
            "kind": kind,
            "stream": kind,
            "origin": "simulated",
            "start_s": a,
            "end_s": a + d,
        }
        for i, (kind, (a, d)) in enumerate(rows)
    )


def ticks(of: list[tuple[int, int]]) -> set[int]:
    return {t for start, length in of for t in range(start, start + length)}


@given(spans, spans)
def test_busy_overlap_and_exposed_count_the_ticks(compute: list, messages: list) -> None:
    if not compute and not messages:
        return
    line = timeline(compute, messages)
    assert line.busy_s(("backward",)) == len(ticks(compute))
    assert line.overlap_s() == len(ticks(compute) & ticks(messages))
    assert line.exposed_communication_s() == len(ticks(messages) - ticks(compute))


@given(spans)
def test_merged_spans_are_disjoint_and_sorted(of: list) -> None:
    union = merge(np.array([(a, a + d) for a, d in of], dtype=float).reshape(-1, 2))
    assert np.all(union[1:, 0] > union[:-1, 1])
    assert np.sum(union[:, 1] - union[:, 0]) == len(ticks(of))


def test_breakdown_adds_up() -> None:
    parts = timeline([(0, 4)], [(2, 5)]).breakdown()
    assert parts == {
        "backward": 4,
        "allreduce": 5,
        "overlap": 2,
        "exposed_communication": 3,
        "iteration": 7,
    }


def test_chrome_trace_keeps_every_span() -> None:
    line = timeline([(0, 4)], [(2, 5)])
    events = json.loads(json.dumps(line.chrome_trace()))["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    assert [(e["ts"], e["dur"]) for e in complete] == [(0, 4e6), (2e6, 5e6)]
    assert {e["args"]["name"] for e in events if e["ph"] == "M"} == {"backward", "allreduce"}


def test_frame_and_concat_keep_the_columns() -> None:
    line = timeline([(0, 4)], [(2, 5)])
    twice = Timeline.concat([line, line])
    assert list(twice.to_frame().columns) == list(COLUMNS)
    assert twice.n == 2 * line.n
    assert twice.select(twice.kind == "allreduce").n == 2


def test_wrong_spans_are_refused() -> None:
    with pytest.raises(UserError, match="ends before it starts"):
        timeline([(0, -1)], [])
    row = {
        "task": "x",
        "kind": "thinking",
        "stream": "s",
        "origin": "simulated",
        "start_s": 0,
        "end_s": 1,
    }
    with pytest.raises(UserError, match="unknown kind 'thinking'"):
        Timeline.from_rows([row])
