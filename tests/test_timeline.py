"""Laws of timelines: unions, overlap, exposed communication, and the trace that Perfetto opens."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlkit.core.errors import UserError
from ddlkit.core.timeline import Timeline

spans = st.lists(st.tuples(st.integers(0, 50), st.integers(0, 20)), max_size=30)


def timeline(compute: list[tuple[int, int]], messages: list[tuple[int, int]]) -> Timeline:
    rows = [("backward", s) for s in compute] + [("all_reduce", s) for s in messages]
    names = ("task", "kind", "stream", "origin", "start_s", "end_s")
    spans = ((f"{kind} {a}", kind, kind, "simulated", a, a + d) for kind, (a, d) in rows)
    return Timeline.from_rows(dict(zip(names, span, strict=True)) for span in spans)


@st.composite
def timelines(draw: st.DrawFn) -> Timeline:
    """Spans of two ranks, two streams and several iterations, some before 0, some at the same time."""
    rows = draw(
        st.lists(st.tuples(*[st.integers(0, 1)] * 3, st.integers(-9, 30), st.integers(0, 9)))
    )
    names = ("task", "kind", "stream", "rank", "iteration", "origin", "start_s", "end_s")
    spans = []
    for number, (stream, rank, iteration, start, length) in enumerate(rows):
        kind = "backward" if stream else "all_reduce"
        of_rank = f"task {number}", kind, f"s{stream}", rank, iteration, "simulated"
        span = dict(zip(names, (*of_rank, start / 7, (start + length) / 7), strict=True))
        spans.append(span | {"group": number, "bytes": number})
    return Timeline.from_rows(spans)


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


@given(timelines())
def test_chrome_trace_holds_every_span_once_one_at_a_time_in_a_thread(line: Timeline) -> None:
    trace = json.loads(json.dumps(line.to_chrome_trace()))
    heads = [event for event in trace["traceEvents"] if event["ph"] == "M"]
    names = {(e["name"], e["pid"], e["tid"]): e["args"]["name"] for e in heads}
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(events) + len(names) == len(trace["traceEvents"])
    assert [event["name"] for event in events] == line.task.tolist()
    assert [event["cat"] for event in events] == line.kind.tolist()
    assert [event["dur"] for event in events] == pytest.approx((line.end_s - line.start_s) * 1e6)
    assert not events or min(event["ts"] for event in events) == 0
    busy: dict[tuple[int, int], float] = {}
    for row, event in sorted(enumerate(events), key=lambda e: (e[1]["ts"], e[1]["dur"])):
        place = (event["pid"], event["tid"])
        assert names[("process_name", event["pid"], 0)] == f"rank {line.rank[row]}"
        assert names[("thread_name", *place)].split()[0] == line.stream[row]
        for name in ("bytes", "group", "origin"):
            assert event["args"][name] == getattr(line, name)[row]
        assert event["ts"] >= busy.get(place, 0.0) - 1e-3
        busy[place] = event["ts"] + event["dur"]


def test_wrong_spans_are_refused() -> None:
    with pytest.raises(UserError, match="ends before it starts"):
        timeline([(0, -1)], [])
    row = {"task": "x", "kind": "thinking", "stream": "s", "origin": "simulated"}
    with pytest.raises(UserError, match="unknown kind 'thinking'"):
        Timeline.from_rows([{**row, "start_s": 0, "end_s": 1}])
