"""Laws of layer-wise traces: read back equal, nothing lost in folding, and Table VI's oddities told."""

from __future__ import annotations

from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlkit.core.errors import UserError
from ddlkit.core.fit import fit
from ddlkit.core.iteration import predict
from ddlkit.core.plan import make_plan
from ddlkit.core.strategies import STRATEGIES
from ddlkit.core.taskgraph import Gpus, s_sgd, schedule
from ddlkit.formats import import_file
from ddlkit.formats.layer_trace import (
    LayerTrace,
    check_trace,
    matches,
    parse_trace,
)
from ddlkit.store import files
from workbook.common.places import DATA

TABLE_VI = DATA / "papers" / "dag" / "tab06.csv"
TIMES = ("forward_s", "backward_s", "communication_s")

times = st.floats(1e-9, 1e4) | st.sampled_from([0.0, 1e-7, 0.1, 1 / 3])


@st.composite
def traces(draw: st.DrawFn) -> LayerTrace:
    layers, k = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    sizes = draw(st.lists(st.integers(0, 10**9), min_size=layers, max_size=layers))
    block = st.lists(
        st.lists(times, min_size=layers, max_size=layers), min_size=k, max_size=k
    )
    return LayerTrace(
        tuple(f"layer{i}" for i in range(layers)),
        np.array(sizes),
        forward_s=np.array(draw(block)),
        backward_s=np.array(draw(block)),
        communication_s=np.array(draw(block)),
    )


def read(path: Path) -> LayerTrace:
    return parse_trace(files.read_text(path), str(path))


def written(trace: LayerTrace) -> str:
    """The trace as a file, times in decimals of microseconds that say them exactly."""
    blocks = np.moveaxis(np.array([getattr(trace, column) for column in TIMES]), 0, -1)
    lines = ["Id\tName\tForward\tBackward\tComm.\tSize"]
    for times_s in blocks:
        for row, (name, size) in enumerate(zip(trace.name, trace.n_bytes, strict=True)):
            cells = [
                f"{Decimal(repr(float(time))).scaleb(6):f}" for time in times_s[row]
            ]
            lines.append("\t".join((str(row), name, *cells, str(size))))
    return "\n".join(lines) + "\n"


@given(trace=traces())
def test_a_trace_reads_back_equal_to_the_last_bit_and_can_be_checked(
    trace: LayerTrace,
) -> None:
    text = written(trace)
    assert matches(text)
    again = parse_trace(text, "t")
    assert again.name == trace.name
    for column in ("n_bytes", *TIMES):
        assert np.array_equal(getattr(again, column), getattr(trace, column))
    if trace.n_bytes.any():
        findings = list(check_trace(trace))
        assert findings[0].what == "totals"
        assert all(set(finding.layers) <= set(trace.name) for finding in findings)


@given(traces())
def test_folding_loses_no_time_and_no_byte(trace: LayerTrace) -> None:
    if not trace.n_bytes.any():
        with pytest.raises(UserError, match="no layer has a gradient"):
            trace.profile("mine")
        return
    forward_s, backward_s, _ = (getattr(trace, column).mean(axis=0) for column in TIMES)
    first = int(trace.learnable[0])
    for with_input, start in ((True, 0), (False, first)):
        workload = trace.profile("mine", with_input=with_input).workload()
        assert workload.forward_s == pytest.approx(forward_s[start:].sum())
        assert workload.backward_s.sum() == pytest.approx(backward_s[start:].sum())
        assert workload.bytes.sum() == trace.n_bytes.sum()
        assert workload.tensor[::-1] == tuple(
            trace.name[row] for row in trace.learnable
        )


def test_a_trace_without_gradients_is_refused_by_its_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.trace"
    path.write_text("\n".join([*GOOD[:2], "1 a 2 3 4 0"]))
    with pytest.raises(UserError, match=r"mine\.trace: no layer has a gradient"):
        import_file(path)


def test_empty_lines_before_a_trace_change_nothing() -> None:
    for text in ("Id Name Forward Backward Comm. Size\n0 a 2 3 4 40", "0 a 2 3 4 40"):
        assert matches(f"\n\n{text}")
        assert parse_trace(f"\n\n{text}", "t").n_bytes.tolist() == [40]


def test_activations_count_to_the_layer_before_them() -> None:
    text = "0 data 1 0 0 0\n1 a 2 3 4 40\n2 relu 8 16 0 0\n3 b 32 64 5 80"
    profile = parse_trace(text, "t").profile("n")
    assert profile.tensor == ("a", "b")
    assert profile.forward_s * 1e6 == pytest.approx([11, 32])
    assert profile.backward_s * 1e6 == pytest.approx([19, 64])
    assert profile.parameters.tolist() == [10, 20]


def test_table_vi_from_trace_to_iteration_and_as_a_dag() -> None:
    """All 21 layers as tasks, eight messages: the same end as of the eight folded layers."""
    trace = read(TABLE_VI)
    sent = trace.learnable
    cost = fit("table", trace.n_bytes[sent], trace.communication_s[0, sent]).cost
    workload = trace.profile("alexnet-caffe").workload()
    predicted = predict(workload, make_plan("none", workload, cost), cost)
    assert workload.parameters.sum() == 60_965_224
    assert workload.compute_s == pytest.approx(1.2 + 13.473 + 3.360, abs=1e-3)
    assert predicted.communication_s == pytest.approx(2.649, abs=1e-3)
    # Taken at its word, all but conv1's message hides behind the backward of conv1 to
    # conv4.
    assert predicted.exposed_communication_s == pytest.approx(123.424e-6, rel=1e-6)
    times, plan = trace.iteration_times_and_plan()
    assert (len(times.backward_s), len(plan.ends)) == (21, 8)
    scheduled = schedule(
        s_sgd(times, STRATEGIES["Caffe-MPI"], Gpus(1, 2), plan=plan, iterations=3)
    )
    workload = trace.profile("alexnet-caffe", with_input=False).workload()
    alone = predict(workload, make_plan("none", workload, cost), cost)
    assert scheduled.period_s == pytest.approx(alone.iteration_s, rel=1e-9)
    assert scheduled.duration_s == pytest.approx(
        2 * 1.2 + 3 * alone.iteration_s, rel=1e-9
    )


def test_table_vi_is_told_to_contradict_itself_and_a_sound_trace_nothing() -> None:
    findings = {finding.what: finding for finding in check_trace(read(TABLE_VI))}
    assert set(findings) == {"totals", "forward"}
    assert findings["forward"].layers == tuple(f"conv{i}" for i in range(1, 6))
    assert f"{4 * 60965224} bytes" in findings["totals"].text
    text = "0 a 100 100 50 400\n1 relu 5 5 0 0\n2 b 100 200 90 800\n"
    assert [finding.what for finding in check_trace(parse_trace(text, "t"))] == [
        "totals"
    ]


GOOD = [
    "Id Name Forward Backward Comm. Size",
    "0 data 1 0 0 0",
    "1 a 2 3 4 40",
    "2 b 5 6 7 80",
]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([GOOD[0], GOOD[2], GOOD[1], GOOD[3]], "line 2, column id: 1, expected 0"),
        (
            [*GOOD, *GOOD[1:3]],
            r"line 6, column id: the last iteration ends before layer 2 \(b\)",
        ),
        ([*GOOD[1:], *GOOD[1:], "3 c 1 1 1 4"], "line 7, column id: 3, expected 0"),
        (
            [*GOOD, "0 data 1 0 0 0", "1 a 2 3 4 44"],
            "line 6, column size: a of 44 .* line 3 has",
        ),
        (
            [*GOOD, "0 data 1 0 0 0", "1 c 2 3 4 40"],
            "line 6, column name: c of 40 .* line 3 has",
        ),
        (
            [*GOOD[:3], "2 b c 5 6 7 80"],
            "line 4: has 7 fields, .* a name has a blank",
        ),
        (["layer,name", "0,a"], "no layer-wise trace: its first line is 'layer,name'"),
        (
            [*GOOD[:2], "1 a 2 3 4"],
            "line 3: has 5 fields, but the header has 6",
        ),
        # Without a header, and with empty lines before the rows.
        ([*GOOD[1:3], "2 b 5 6 7"], r"line 3: has 5 fields, expected 6 \(id, name,"),
        (["", "", GOOD[1], "1 a 2 3 4"], "line 4: has 5 fields, expected 6"),
        (["", "", "0 data 1 0 0"], "line 3: has 5 fields, expected 6"),
        (["", "Id Name Forward Backward", "0 a 1 2"], "line 2: 4 columns, expected 6"),
        (['{"traceEvents": [', '{"ph": "X"}', "]}"], "is JSON, but a layer-wise trace"),
        ([*GOOD[:2], "1 a 2 x 4 40"], "line 3, column backward: 'x' is not a number"),
        (
            ["Id Name Backward Forward Comm. Size", *GOOD[1:]],
            "line 1: column 'Backward', expected .* id, name, forward, backward, comm, size",
        ),
    ],
)
def test_a_mistake_names_file_and_line(
    lines: list[str], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "mine.trace"
    path.write_text("\n".join(lines))
    with pytest.raises(UserError, match=rf"^[^\n]*mine\.trace: [^\n]*{message}[^\n]*$"):
        read(path)
