"""Laws of layer-wise traces: read back equal, nothing lost in folding, and Table VI's oddities told."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddlkit.core.errors import UserError
from ddlkit.core.fit import fit
from ddlkit.core.iteration import Iteration, predict
from ddlkit.core.plan import make_plan
from ddlkit.formats.trace import (
    TIMES,
    LayerTrace,
    check_trace,
    format_trace,
    looks_like_one,
    parse_trace,
)
from ddlkit.papers.dag import STRATEGIES
from ddlkit.papers.dag.tasks import schedule
from ddlkit.papers.dag.training import Gpus, s_sgd
from ddlkit.report.figures.dag import scattered
from ddlkit.store import DATA, files

TABLE_VI = DATA / "papers" / "dag" / "tab06.csv"

times = st.floats(1e-9, 1e4) | st.sampled_from([0.0, 1e-7, 0.1, 1 / 3])


@st.composite
def traces(draw: st.DrawFn) -> LayerTrace:
    layers, k = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    sizes = draw(st.lists(st.integers(0, 10**9), min_size=layers, max_size=layers))
    block = st.lists(st.lists(times, min_size=layers, max_size=layers), min_size=k, max_size=k)
    columns = {column: np.array(draw(block)) for column in TIMES}
    return LayerTrace(tuple(f"layer{i}" for i in range(layers)), np.array(sizes), **columns)


def same(one: LayerTrace, other: LayerTrace) -> bool:
    columns = ("n_bytes", *TIMES)
    return one.name == other.name and all(
        np.array_equal(getattr(one, column), getattr(other, column)) for column in columns
    )


def read(path: Path) -> LayerTrace:
    return parse_trace(files.read_text(path), str(path))


@settings(deadline=None)  # the first reading imports pandas
@given(trace=traces())
def test_a_trace_reads_back_equal_to_the_last_bit(trace: LayerTrace) -> None:
    text = format_trace(trace)
    assert looks_like_one(text)
    assert same(parse_trace(text, "t"), trace)
    assert format_trace(parse_trace(text, "t")) == text


def test_table_vi_a_hundred_times_reads_back_with_its_mean_and_spread() -> None:
    """As the files of dag Section VI are: 100 iterations, whose mean is more accurate."""
    one = read(TABLE_VI)
    whole = scattered(one, 100, 0.05)
    found = parse_trace(format_trace(whole), "a hundred")
    assert found.iterations == 100 and same(found, whole)
    for column, spread in found.spread().items():
        mean, true = getattr(found.mean(), column)[0], getattr(one, column)[0]
        timed = true > 0
        # Five standard errors of the mean, and of the spread, of 100 samples that scatter by 5%.
        assert mean[timed] == pytest.approx(true[timed], rel=5 * 0.05 / 10)
        assert spread[timed] / true[timed] == pytest.approx(0.05, rel=5 / np.sqrt(2 * 99))
        assert not spread[~timed].any()
    marked = {finding.what: finding.layers for finding in check_trace(found)}["forward"]
    assert marked == tuple(f"conv{i}" for i in range(1, 6))


@pytest.mark.parametrize("name", ["", "conv 1", "conv,1", "conv\t1"])
def test_a_name_that_the_format_cannot_hold_is_refused(name: str) -> None:
    times_s = [np.ones((1, 1))] * 3
    with pytest.raises(UserError, match="blanks and commas part columns"):
        format_trace(LayerTrace((name,), np.array([4]), *times_s))


@given(traces())
def test_folding_loses_no_time_and_no_byte(trace: LayerTrace) -> None:
    if not len(trace.learnable):
        with pytest.raises(UserError, match="no layer has a gradient"):
            trace.profile("mine")
        return
    mean, first = trace.mean(), int(trace.learnable[0])
    for with_input, start in ((True, 0), (False, first)):
        workload = trace.profile("mine", with_input=with_input).workload()
        assert workload.forward_s == pytest.approx(mean.forward_s[0, start:].sum())
        assert workload.backward_s.sum() == pytest.approx(mean.backward_s[0, start:].sum())
        assert workload.bytes.sum() == trace.n_bytes.sum()
        assert workload.tensor[::-1] == tuple(trace.name[row] for row in trace.learnable)


@given(traces())
def test_mean_and_spread_are_those_of_the_iterations(trace: LayerTrace) -> None:
    spread = trace.spread()
    for column in TIMES:
        rows = getattr(trace, column)
        assert getattr(trace.mean(), column)[0] == pytest.approx(rows.mean(axis=0))
        if trace.iterations == 1:
            assert np.isnan(spread[column]).all()
        else:
            expected = np.sqrt(((rows - rows.mean(axis=0)) ** 2).sum(axis=0) / (len(rows) - 1))
            assert spread[column] == pytest.approx(expected)


@given(traces())
def test_every_trace_can_be_checked(trace: LayerTrace) -> None:
    findings = check_trace(trace)
    assert findings[0].what == "totals"
    assert all(set(finding.layers) <= set(trace.name) for finding in findings)


def test_activations_count_to_the_layer_before_them() -> None:
    profile = parse_trace(
        "0 data 1 0 0 0\n1 a 2 3 4 40\n2 relu 8 16 0 0\n3 b 32 64 5 80", "t"
    ).profile("n")
    assert profile.tensor == ("a", "b")
    assert profile.forward_s * 1e6 == pytest.approx([11, 32])
    assert profile.backward_s * 1e6 == pytest.approx([19, 64])
    assert profile.parameters.tolist() == [10, 20]


# -- Table VI, end to end ----------------------------------------------------------------------


def test_table_vi_from_trace_to_iteration() -> None:
    trace = read(TABLE_VI)
    workload, cost = (
        trace.profile("alexnet-caffe").workload(),
        fit("table", *trace.messages()).cost,
    )
    plan = make_plan("none", workload, cost)
    found = predict(workload, plan, cost)
    assert workload.parameters.sum() == 60_965_224
    assert workload.compute_s == pytest.approx(1.2 + 13.473 + 3.360, abs=1e-3)
    assert found.communication_s == pytest.approx(2.649, abs=1e-3)
    # Taken at its word, all but conv1's message hides behind the backward of conv1 to conv4.
    assert found.exposed_communication_s == pytest.approx(123.424e-6, rel=1e-6)
    assert Iteration(workload, plan, cost).timeline().duration_s == pytest.approx(found.iteration_s)


def test_table_vi_as_a_dag_is_table_vi_simulated() -> None:
    """All 21 layers as tasks, eight messages: the same end as of the eight folded layers."""
    trace = read(TABLE_VI)
    times, plan = trace.training()
    assert (len(times.backward_s), len(plan.ends)) == (21, 8)
    graph = s_sgd(times, STRATEGIES["Caffe-MPI"], Gpus(1, 2), plan=plan, iterations=3)
    found = schedule(graph)
    cost = fit("table", *trace.messages()).cost
    workload = trace.profile("alexnet-caffe", with_input=False).workload()
    alone = predict(workload, make_plan("none", workload, cost), cost)
    assert found.period_s == pytest.approx(alone.iteration_s, rel=1e-9)
    assert found.duration_s == pytest.approx(2 * 1.2 + 3 * alone.iteration_s, rel=1e-9)


def test_table_vi_is_told_to_contradict_itself() -> None:
    found = {(f.what, f.layers): f.text for f in check_trace(read(TABLE_VI))}
    convolutions = tuple(f"conv{i}" for i in range(1, 6))
    assert set(found) == {
        ("totals", ()),
        ("input", ("data",)),
        ("forward", convolutions),
        ("backward", ("drop6",)),
        ("monotone", ("conv4", "fc6")),
        ("waiting", ("conv3", "conv1")),
        ("waiting", ("conv4", "conv2")),
    }
    assert (
        "divided by 10, backward / forward of the whole is 2.23, not 0.25"
        in found["forward", convolutions]
    )
    assert "60965224 parameters" in found["totals", ()]
    assert "365 times forward" in found["backward", ("drop6",)]
    assert "within 12 µs" in found["waiting", ("conv3", "conv1")]


def test_a_trace_without_oddities_is_told_nothing() -> None:
    text = "0 a 100 100 50 400\n1 relu 5 5 0 0\n2 b 100 200 90 800\n"
    assert [finding.what for finding in check_trace(parse_trace(text, "t"))] == ["totals"]
    odd = check_trace(parse_trace("0 a 1 2 0 6\n1 relu 1 1 3 0\n", "t"))
    assert [finding.what for finding in odd] == ["totals", "size", "message", "message"]


# -- mistakes ----------------------------------------------------------------------------------

GOOD = ["Id Name Forward Backward Comm. Size", "0 data 1 0 0 0", "1 a 2 3 4 40", "2 b 5 6 7 80"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([GOOD[0], GOOD[2], GOOD[1], GOOD[3]], "line 2, column id: 1, expected 0"),
        ([*GOOD[:2], GOOD[3], GOOD[2]], "line 3, column id: 2, expected 1"),
        ([*GOOD[:3], "3 b 5 6 7 80"], "line 4, column id: 3, expected 2"),
        ([*GOOD, *GOOD[1:3]], r"line 6, column id: the last iteration ends before layer 2 \(b\)"),
        (
            [*GOOD, *GOOD[1:], "3 c 1 1 1 4"],
            r"line 8, column id: layer 3 \(c\) is not in the first",
        ),
        (
            [*GOOD, "0 data 1 0 0 0", "1 a 2 3 4 44"],
            "line 6, column size: layer a of 44 bytes, but line 3 has",
        ),
        ([*GOOD[:2], "1 a 2 3 4"], "line 3: 5 columns, expected 6"),
        ([*GOOD[:2], "1 a 2 3 4 40 9"], "line 3: 7 columns, expected 6"),
        ([*GOOD[:2], "1 a 2 3 4 -40"], "line 3, column size: '-40' must not be negative"),
        ([*GOOD[:2], "1 a -2 3 4 40"], "line 3, column forward: '-2' must not be negative"),
        ([*GOOD[:2], "1 a 2 x 4 40"], "line 3, column backward: 'x' is not a number"),
        ([*GOOD[:2], "1 a 2 nan 4 40"], "line 3, column backward: 'nan' must be a finite number"),
        ([*GOOD[:2], "1 a 2 inf 4 40"], "line 3, column backward: 'inf' must be a finite number"),
        ([*GOOD[:2], "1 a 2 3 4 40.5"], "line 3, column size: '40.5' is not a whole number"),
        (["Id Name Backward Forward Comm. Size", *GOOD[1:]], "line 1: column 'Backward', expected"),
        (GOOD[:1], "line 1: no layers"),
        ([], "empty"),
    ],
)
def test_a_mistake_names_file_and_line(lines: list[str], message: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.trace"
    path.write_text("\n".join(lines))
    with pytest.raises(
        UserError, match=rf"mine\.trace: .*{message}|mine\.trace: {message}"
    ) as error:
        read(path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "sizes", "seconds", "message"),
    [
        ((), [], [[]], "there must be a layer"),
        (("a",), [-1], [[1.0]], "one size >= 0"),
        (("a",), [1], [[-1.0]], "not a time >= 0"),
        (("a",), [1], [1.0], "has shape"),
    ],
)
def test_a_trace_of_the_wrong_shape_is_refused(
    name: tuple[str, ...], sizes: list[int], seconds: list, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        LayerTrace(name, np.array(sizes, dtype=int), *[np.array(seconds)] * 3)
