"""Scaling to more nodes: what scattered jobs, short tables and odd inputs lead to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddlkit import cli, show
from ddlkit.core import scaling
from ddlkit.core.errors import UserError
from ddlkit.core.workload import Workload
from ddlkit.formats.steps import read_steps
from ddlkit.model.node_costs import NodeCosts
from ddlkit.model.scaling import HIDDEN, NOT_KNOWN, Count, Scaling, scale

COUNTS = {(1, 1): 1.0, (4, 1): 1.03, (8, 2): 1.05, (32, 8): 1.1}
"""A step by GPUs and nodes, in seconds."""
WORKLOAD = Workload.from_arrays(0.3, np.full(20, 0.03), np.full(20, 2**24))
"""320 MiB of gradients in a step of 0.9 s, in buckets of at most 32 MiB."""


def table_of(counts: dict[tuple[int, int], float], **columns: object) -> pd.DataFrame:
    """Return a table with one job for each count."""
    rows = [
        {"gpus": gpus, "nodes": nodes, "job": f"j{gpus}", "step_s": step_s}
        for (gpus, nodes), step_s in counts.items()
    ]
    return pd.DataFrame(rows).assign(**columns)


GOOD_STEPS = table_of(COUNTS)
"""Steps from which up to 80 nodes are predicted."""


def jobs_of(counts: dict[tuple[int, int], list[float]]) -> pd.DataFrame:
    """Return a table with several jobs for each count."""
    rows = []
    for (gpus, nodes), means_s in counts.items():
        for number, step_s in enumerate(means_s):
            rows.append((gpus, nodes, f"j{number}", step_s))
    return pd.DataFrame(rows, columns=["gpus", "nodes", "job", "step_s"])


def all_reduces(
    *nodes: int, sizes: tuple[int, int] = (10, 30), per_node: int = 4, **columns: object
) -> pd.DataFrame:
    """Return times of all-reduces of powers of two, up to and with the last one."""
    rows = []
    for number in nodes:
        ranks = per_node * number
        for power in range(sizes[0], sizes[1] + 1):
            bytes_s = 2**power * 2 * (ranks - 1) / ranks * 1e-10
            start_s = 1e-5 * (1 + np.log2(number))
            rows.append(("all_reduce", number, ranks, 2**power, start_s + bytes_s))
    names = ["collective", "nodes", "ranks", "bytes", "seconds"]
    return pd.DataFrame(rows, columns=names).assign(**columns)


def refused(
    *,
    steps: Any = GOOD_STEPS,
    nodes: Any = 64,
    workload: Workload | None = None,
    collectives: Any = None,
    kernels: Any = None,
    kernel_steps: Any = 1,
    wish: Any = None,
) -> str:
    """Return the one line by which `scale` refuses its arguments."""
    with pytest.raises(UserError) as caught:
        scale(
            steps,
            nodes,
            workload=workload,
            collectives=collectives,
            kernels=kernels,
            kernel_steps=kernel_steps,
            wish=wish,
        )
    text = str(caught.value)
    assert "\n" not in text
    return text


def found(result: Scaling, what: str) -> list[str]:
    """Return the texts of the findings of a kind."""
    return [finding.text for finding in result.findings if finding.what == what]


def count_on(result: Scaling, nodes: int) -> Count:
    (count,) = (count for count in result.counts if count.nodes == nodes)
    return count


# -- wishes and the scatter of jobs --------------------------------------------------


def test_a_factor_that_is_missed_on_the_anchor_is_missed_on_more_nodes() -> None:
    """The interval keeps its rule, although a step is no shorter on more nodes."""
    jobs = {(1, 1): [0.1], (40, 10): [0.2, 0.2004, 0.1997]}
    result = scale(jobs_of(jobs), 100, wish=0.8)
    interval = result.target.scaling_factor_interval
    assert interval and interval[1] > 0.8
    assert result.wish and result.wish.answer == "no"
    # On the anchor the factor is 0.5, so a wish near it is not answered by the anchor.
    near = scale(jobs_of(jobs), 100, wish=0.5)
    assert near.wish and near.wish.answer == "open"


@given(st.floats(1.0, 3.0), st.floats(0.05, 0.95), st.integers(3, 20))
def test_a_single_job_on_the_anchor_may_be_slow_by_chance(
    anchor_s: float, wish: float, nodes: int
) -> None:
    """The answer is no if the anchor misses the wish clearly, and never yes by the anchor."""
    steps = table_of({(1, 1): 1.0, (8, 2): anchor_s})
    result = scale(steps, nodes, wish=wish)
    assert result.wish
    if wish > 1.031 / anchor_s:
        assert result.wish.answer == "no"
    if wish < 0.97 / anchor_s:
        interval = result.target.scaling_factor_interval
        assert interval
        is_missed = interval[1] < wish
        assert (result.wish.answer == "no") == is_missed


def test_the_interval_carries_the_scatter_of_the_anchors_jobs() -> None:
    scattered = jobs_of({(1, 1): [200.0], (8, 2): [220.0, 301.0, 420.0]})
    result = scale(scattered, [4, 16])
    for count in (count_on(result, 4), result.target):
        assert count.interval_s
        ratio = count.nodes / 2
        for job_s in (220.0, 301.0, 420.0):
            likely_s = float(scaling.step_s(200.0, job_s, ratio))
            assert count.interval_s[0] <= likely_s <= count.interval_s[1]
    # Jobs that agree change nothing.
    agreeing = jobs_of({(1, 1): [200.0], (8, 2): [300.0, 301.0, 302.0]})
    single = jobs_of({(1, 1): [200.0], (8, 2): [301.0]})
    assert scale(agreeing, 4).target == scale(single, 4).target


def test_an_answer_that_depends_on_one_of_scattered_jobs_is_open() -> None:
    """The median of the jobs alone would answer."""
    for scattered in (
        {(1, 1): [1.0], (8, 2): [1.1, 1.6, 1.61]},
        {(1, 1): [0.6, 1.0, 1.4], (8, 2): [1.1]},
    ):
        usual = {count: [float(np.median(s))] for count, s in scattered.items()}
        for nodes in (2, 4):
            by_median = scale(jobs_of(usual), nodes, wish=0.8).wish
            by_jobs = scale(jobs_of(scattered), nodes, wish=0.8).wish
            assert by_jobs and by_jobs.answer == "open"
            if scattered[8, 2] != [1.1]:
                assert by_median and by_median.answer == "no"


def test_the_range_of_jobs_is_on_the_screen_and_in_the_drawing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = jobs_of({(1, 1): [0.2], (8, 2): [0.22, 0.301, 0.42]})
    path = tmp_path / "steps.csv"
    steps.to_csv(path, index=False)
    assert cli.main(["scale", "--steps", str(path), "--nodes", "8"]) == 0
    (row,) = (
        line for line in capsys.readouterr().out.splitlines() if " 3 jobs" in line
    )
    assert "220 ms to 420 ms" in row and "(0.48 to 0.91)" in row

    from matplotlib.figure import Figure

    ax = Figure().subplots()
    show.scaling_factors(ax, scale(steps, 8))
    drawn = {
        tuple(np.round(segment[:, 1], 2))
        for lines in ax.collections
        for segment in getattr(lines, "get_segments", list)()
    }
    assert (0.48, 0.91) in drawn


@given(st.floats(1.0, 1.6), st.floats(0.0, 0.3), st.floats(0.0, 0.3))
def test_a_single_job_on_the_anchor_scatters_as_jobs_on_other_counts(
    anchor_s: float, half_range: float, more: float
) -> None:
    """The interval contains what follows if this job was as fast or as slow as others were."""

    def scattered(share: float) -> Scaling:
        smaller = {(1, 1): [1.0], (4, 1): [1 - share, 1.0, 1 + share]}
        return scale(jobs_of({**smaller, (8, 2): [anchor_s]}), [8], wish=0.8)

    result = scattered(half_range)
    interval = result.target.interval_s
    assert interval
    for job_s in (anchor_s / (1 + half_range), anchor_s * (1 + half_range)):
        likely_s = float(scaling.step_s(1.0, job_s, 4.0))
        assert interval[0] * (1 - 1e-9) <= likely_s <= interval[1] * (1 + 1e-9)
    # More scatter narrows nothing, and answers nothing that was open.
    wider = scattered(min(half_range + more, 0.5))
    assert wider.target.interval_s
    assert wider.target.interval_s[0] <= interval[0] * (1 + 1e-12)
    assert wider.target.interval_s[1] >= interval[1] * (1 - 1e-12)
    assert wider.wish and result.wish
    assert wider.wish.answer in ("open", result.wish.answer)


@pytest.mark.parametrize(("anchor_s", "answer"), [(1.05, "yes"), (1.4, "no")])
def test_the_scatter_of_smaller_counts_keeps_a_wish_open(
    anchor_s: float, answer: str
) -> None:
    """It does not matter which count has the several jobs."""
    single = {(1, 1): [1.0], (4, 1): [1.0], (8, 2): [anchor_s]}
    alone = scale(jobs_of(single), 4, wish=0.8).wish
    assert alone and alone.answer == answer
    scattered = {**single, (4, 1): [0.7, 1.0, 1.3]}
    for nodes in (2, 4):
        wish = scale(jobs_of(scattered), nodes, wish=0.8).wish
        assert wish and wish.answer == "open"


@pytest.mark.parametrize("jobs_s", [[1.02], [0.95, 1.02, 1.06], [0.81, 1.0, 1.19]])
def test_the_proposed_measurement_narrows_the_interval_as_it_says(
    jobs_s: list[float],
) -> None:
    """One job that measures what was predicted leaves the interval that was announced."""
    steps = jobs_of({(1, 1): [1.0], (4, 1): jobs_s, (8, 2): [1.2]})
    before = scale(steps, 16)
    (text,) = found(before, "measure")
    announced = int(text.split("\u00b1")[2].split("%")[0])
    proposed = int(text.split(" nodes")[0].split()[-1])
    predicted_s = scale(steps, proposed).target.step_s
    measured = jobs_of({(4 * proposed, proposed): [predicted_s]})
    after = scale(pd.concat([steps, measured]), 16).target
    assert after.interval_s
    half_width_s = (after.interval_s[1] - after.interval_s[0]) / 2
    assert round(100 * half_width_s / after.step_s) == announced


def test_one_job_is_to_be_repeated_where_other_jobs_scatter_most() -> None:
    steps = jobs_of({(1, 1): [1.0], (4, 1): [0.6, 1.0, 1.4], (8, 2): [1.05]})
    (text,) = found(scale(steps, 4), "measure")
    assert "2 nodes" in text


@given(st.floats(1.0, 1.6), st.floats(0.0, 0.5), st.sampled_from([4, 16]))
def test_the_drawing_ends_at_the_printed_interval(
    anchor_s: float, share: float, nodes: int
) -> None:
    """The band contains the prediction on each number of nodes."""
    steps = {(1, 1): [1.0], (4, 1): [1 - share, 1.0, 1 + share], (8, 2): [anchor_s]}
    result = scale(jobs_of(steps), nodes)
    curves = show.scaling_curves(result)
    assert (curves["lower"] <= curves["predicted"] * (1 + 1e-12)).all()
    assert (curves["upper"] >= curves["predicted"] * (1 - 1e-12)).all()
    last = curves.iloc[-1]
    drawn = (last["lower"], last["upper"])
    assert drawn == pytest.approx(result.target.scaling_factor_interval)
    assert last["predicted"] == pytest.approx(result.target.scaling_factor)


def test_an_interval_above_the_factor_on_fewer_nodes_is_explained() -> None:
    lossy = {(1, 1): 1.0, (8, 2): 1.4}
    result = scale(table_of(lossy), 8)
    interval = result.target.scaling_factor_interval
    assert interval and interval[1] > result.anchor.scaling_factor
    (text,) = found(result, "factor")
    assert "2 nodes" in text
    # What was measured has no such interval.
    assert not found(scale(table_of(lossy), 2), "factor")


def test_the_scatter_of_ranks_explains_at_most_the_loss() -> None:
    rows = [
        (1, 1, "one", number, step_s)
        for number, step_s in enumerate([3.0, 1.0, 2.0, 3.0])
    ]
    rows += [(8, 2, "two", number, 2.1) for number in range(4)]
    steps = pd.DataFrame(rows, columns=["gpus", "nodes", "job", "step", "step_s"])
    explained = scale(steps, 4).explained
    assert explained.loss_s == pytest.approx(0.1)
    assert explained.scatter_s == pytest.approx(explained.loss_s)
    assert explained.unexplained_s == pytest.approx(0.0, abs=1e-12)


# -- counts between measured ones ----------------------------------------------------


@given(st.integers(0, 50), st.integers(0, 50), st.integers(2, 29))
def test_a_count_between_measured_ones_is_interpolated(
    first_ms: int, second_ms: int, nodes: int
) -> None:
    """It lies between its neighbours, does not fall, and meets the measured counts."""
    first_s = 1.0
    middle_s = first_s + first_ms / 1e3
    last_s = round(middle_s + second_ms / 1e3, 3)
    steps = table_of({(4, 1): first_s, (40, 10): middle_s, (120, 30): last_s})
    result = scale(steps, range(1, 31))
    assert [count.nodes for count in result.counts] == [*range(1, 31)]
    times = [count.step_s for count in result.counts]
    assert np.all(np.diff(times) >= -1e-12)
    count = count_on(result, nodes)
    if not count.measured:
        assert count.interpolated and count.interval_s
        below_s, above_s = (first_s, middle_s) if nodes < 10 else (middle_s, last_s)
        assert count.interval_s[0] < below_s and count.interval_s[1] > above_s
        assert below_s <= count.step_s <= above_s


def test_of_an_interpolated_count_the_count_itself_is_to_be_measured() -> None:
    result = scale(table_of(COUNTS), 4)
    (measure,) = found(result, "measure")
    assert "4 nodes" in measure
    (between,) = found(result, "evidence")
    (beyond,) = found(scale(table_of(COUNTS), 16), "evidence")
    assert between != beyond
    # A smallest count with more GPUs than the target has no smaller neighbour.
    few = scale(table_of({(8, 1): 1.0, (4, 4): 1.1}), 2)
    assert few.counts[0].interpolated and 1.0 <= few.counts[0].step_s <= 1.1


@given(st.floats(0.02, 0.6), st.floats(0.01, 0.6), st.floats(0.3, 0.99))
def test_a_wish_between_measured_counts_is_limited_by_both(
    smaller_loss: float, further_loss: float, wish: float
) -> None:
    """A factor that fewer nodes miss clearly is missed, and one that more nodes meet is met."""
    smaller_s = 1 + smaller_loss
    larger_s = smaller_s + further_loss
    steps = table_of({(1, 1): 1.0, (8, 2): smaller_s, (32, 8): larger_s})
    result = scale(steps, 4, wish=wish)
    assert result.wish
    if wish > 1.031 / smaller_s:
        assert result.wish.answer == "no"
    elif wish < 0.97 / larger_s:
        assert result.wish.answer == "yes"
    elif 0.972 / larger_s < wish < 1.029 / smaller_s:
        assert result.wish.answer == "open"


@given(st.floats(0.972, 1.028))
def test_one_job_on_the_smallest_count_decides_no_wish_that_is_near_to_it(
    near: float,
) -> None:
    """Several jobs on the count that is asked for tell nothing of the scatter on the smallest one."""
    wish = 0.8
    asked_s = near / wish
    jobs = {(8, 1): [1.0], (32, 4): [asked_s, asked_s * 1.0001]}
    result = scale(jobs_of(jobs), 4, wish=wish)
    assert result.wish and result.wish.answer == "open"
    clear = scale(jobs_of(jobs | {(32, 4): [1.4, 1.401]}), 4, wish=wish)
    assert clear.wish and clear.wish.answer == "no"


@pytest.mark.parametrize("scatter", [0.0, 0.01, 0.019, 0.021, 0.025, 0.029, 0.04])
def test_more_scatter_of_other_jobs_answers_no_further_wish(scatter: float) -> None:
    """One job on the smallest count may differ by 3%, however little other jobs do."""
    jobs = {
        (8, 1): [1.0],
        (16, 2): [1.1 * (1 - scatter), 1.1, 1.1 * (1 + scatter)],
        (32, 4): [1.218 * (1 - scatter), 1.218],
    }
    answered = scale(jobs_of(jobs), 4, wish=0.8).wish
    assert answered and answered.answer == "open"


@given(st.floats(0.01, 0.99), st.lists(st.floats(0.95, 1.05), min_size=1, max_size=3))
def test_the_smallest_count_meets_each_wish(wish: float, jobs_s: list[float]) -> None:
    """Its scaling factor is 1 by definition, however much its jobs scatter."""
    jobs = {(8, 1): [round(job_s, 3) for job_s in jobs_s], (32, 4): [1.1]}
    result = scale(jobs_of(jobs), 1, wish=wish)
    assert result.wish and result.wish.answer == "yes"


@given(
    st.floats(0.01, 0.99),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.lists(st.floats(1.0, 1.3), min_size=5, max_size=5, unique=True),
)
def test_the_likely_range_of_the_factor_decides_the_wish(
    factor: float, nodes: int, steps_s: list[float]
) -> None:
    jobs = {(8, 1): steps_s[:2], (16, 2): steps_s[2:4], (64, 8): steps_s[4:]}
    wish = scale(jobs_of(jobs), nodes, wish=factor).wish
    assert wish
    if wish.likely_factor_interval is None:
        # A count that decides the answer has to be measured again.
        assert wish.answer == "open"
        return
    lowest, highest = wish.likely_factor_interval
    assert lowest <= highest
    assert (wish.answer == "yes") == (lowest >= factor)
    assert (wish.answer == "no") == (highest < factor)


def test_neighbours_that_contradict_each_other_answer_no_wish() -> None:
    contradictory = {(1, 1): 1.0, (8, 2): 1.6, (32, 8): 1.1}
    for wish in (0.7, 0.8, 0.9):
        answered = scale(table_of(contradictory), 4, wish=wish).wish
        assert answered and answered.answer == "open"


# -- messages ------------------------------------------------------------------------


@settings(deadline=None)
@given(
    st.lists(st.floats(1e-6, 1e-2), min_size=14, max_size=14).map(sorted),
    st.lists(st.floats(1e-6, 1e-2), min_size=14, max_size=14).map(sorted),
    st.integers(4, 64),
    st.floats(1.0, 2.0**25),
)
def test_messages_are_not_shorter_on_more_nodes(
    two_s: list[float], four_s: list[float], nodes: int, n_bytes: float
) -> None:
    """This holds where a table is continued above its largest size, too."""
    times = all_reduces(2, 4, sizes=(10, 23)).assign(seconds=[*two_s, *four_s])
    costs = NodeCosts.of(times).continued_to(2.0**25)
    before_s = costs.cost("all_reduce", nodes, 4 * nodes)(n_bytes)
    after_s = costs.cost("all_reduce", nodes + 1, 4 * nodes + 4)(n_bytes)
    assert after_s >= before_s * (1 - 1e-12)


@settings(deadline=None)
@given(st.lists(st.floats(1e-6, 1e-2), min_size=3, max_size=3).map(sorted))
def test_messages_between_two_tables_are_no_longer_than_on_more_nodes(
    startups_s: list[float],
) -> None:
    """The times of the tables may grow by less than the law of more nodes."""
    tables = []
    for nodes, start_s in zip((2, 4, 8), startups_s, strict=True):
        times = all_reduces(nodes, sizes=(10, 25))
        tables.append(times.assign(seconds=times["seconds"] + start_s))
    result = scale(
        table_of(COUNTS),
        range(2, 17),
        workload=WORKLOAD,
        collectives=pd.concat(tables),
    )
    for name in ("only_messages_step_s", "only_messages_bad_day_s"):
        times_s = [getattr(count, name) for count in result.counts if count.nodes > 1]
        assert np.all(np.diff(times_s) >= -1e-12)


def test_a_table_that_ends_far_below_the_largest_bucket_is_refused() -> None:
    short = all_reduces(2, 4, 8, sizes=(10, 17))
    text = refused(workload=WORKLOAD, collectives=short)
    assert "128 KiB" in text and "32 MiB" in text
    long = scale(table_of(COUNTS), 64, workload=WORKLOAD, collectives=all_reduces(2, 8))
    assert not found(long, "messages")
    # A quarter of the bucket is as far as a table is continued, which is said.
    quarter = all_reduces(2, 8, sizes=(10, 23))
    continued = scale(table_of(COUNTS), 64, workload=WORKLOAD, collectives=quarter)
    assert "32 MiB" in found(continued, "messages")[0]
    assert continued.verdict_on_messages == long.verdict_on_messages
    assert continued.target.only_messages_step_s == pytest.approx(
        long.target.only_messages_step_s, rel=0.02
    )
    refused(workload=WORKLOAD, collectives=all_reduces(2, 8, sizes=(10, 22)))
    # Without gradients, the times of the sizes in the table are known all the same.
    alone = scale(table_of(COUNTS), 64, collectives=short)
    assert "128 KiB" in found(alone, "messages")[0]


def test_messages_that_take_longer_than_the_measured_step_are_said() -> None:
    times = all_reduces(2, 8)
    fits = scale(table_of(COUNTS), 64, workload=WORKLOAD, collectives=times)
    slow = times.assign(seconds=100 * times["seconds"])
    contradicts = scale(table_of(COUNTS), 64, workload=WORKLOAD, collectives=slow)
    assert not found(fits, "warning")
    (warning,) = found(contradicts, "warning")
    assert "8 nodes" in warning


def test_one_node_has_no_bad_day_and_no_time_from_several_nodes() -> None:
    steps = table_of({(4, 1): 1.0, (8, 2): 1.05, (32, 8): 1.1})
    several = all_reduces(2, 4, 8)
    without = scale(steps, 1, workload=WORKLOAD, collectives=several)
    assert without.counts[0].only_messages_step_s is None
    assert without.counts[1].only_messages_step_s is not None
    assert without.verdict_on_messages == NOT_KNOWN and without.collectives == ()
    both = pd.concat([all_reduces(1), several])
    known = scale(steps, 1, workload=WORKLOAD, collectives=both)
    assert (
        known.counts[0].only_messages_step_s == known.counts[0].only_messages_bad_day_s
    )
    assert known.collectives[0].seconds == known.collectives[0].bad_day_s
    assert known.verdict_on_messages == HIDDEN
    with pytest.raises(UserError, match="one node"):
        NodeCosts.of(several).cost("all_reduce", 1, 4)


def test_other_numbers_of_gpus_on_a_node_have_no_time_of_messages() -> None:
    steps = table_of(COUNTS | {(16, 16): 1.05})
    times = all_reduces(2, 4, 8)
    result = scale(steps, 64, workload=WORKLOAD, collectives=times)
    assert count_on(result, 16).only_messages_step_s is None
    assert count_on(result, 8).only_messages_step_s is not None


def test_hosts_with_several_numbers_of_gpus_are_listed_as_they_are() -> None:
    uneven = all_reduces(3).assign(ranks=8)
    assert "8 GPUs on 3 nodes" in refused(collectives=uneven)


def test_gradients_need_a_table_of_all_reduces() -> None:
    gathers = all_reduces(16, 32).assign(collective="all_gather")
    result = scale(table_of(COUNTS), 64, workload=WORKLOAD, collectives=gathers)
    assert any("all_reduce" in text for text in found(result, "messages"))
    assert result.verdict_on_messages == NOT_KNOWN


# -- kernels -------------------------------------------------------------------------


def kernels_of(total_s: float, collective: str = "all_reduce") -> pd.DataFrame:
    return pd.DataFrame({"collective": ["", collective], "total_s": [9.0, total_s]})


def test_sums_of_kernels_are_of_nccl_and_fit_into_a_step() -> None:
    assert "NCCL" in refused(kernels=kernels_of(1.0, collective=""))
    assert "kernel_steps" in refused(kernels=kernels_of(5.0))
    fits = scale(table_of(COUNTS), 64, kernels=kernels_of(5.0), kernel_steps=10)
    assert fits.explained.kernels_s == pytest.approx(0.5)
    assert not found(fits, "warning")
    few = scale(table_of(COUNTS), 64, kernels=kernels_of(5.0), kernel_steps=2)
    assert len(found(few, "warning")) == 1


def test_measured_kernels_bound_messages_beside_tables_and_gradients() -> None:
    times = all_reduces(2, 8)
    by_tables = scale(GOOD_STEPS, 64, workload=WORKLOAD, collectives=times).explained
    both = scale(
        GOOD_STEPS,
        64,
        workload=WORKLOAD,
        collectives=times,
        kernels=kernels_of(0.04),
    )
    assert both.explained.messages_s == by_tables.messages_s
    assert both.explained.messages_at_most_s == both.explained.kernels_s == 0.04
    assert by_tables.messages_at_most_s != 0.04 and by_tables.kernels_s is None
    assert any("40 ms" in text for text in found(both, "messages"))


# -- single steps --------------------------------------------------------------------


def single_steps(first_number: int, factors: list[float]) -> pd.DataFrame:
    """Return steps of each count that are its usual step times some factors."""
    rows = []
    for (gpus, nodes), step_s in COUNTS.items():
        for number, factor in enumerate(factors, start=first_number):
            rows.append((gpus, nodes, "one", number, factor * step_s))
    return pd.DataFrame(rows, columns=["gpus", "nodes", "job", "step", "step_s"])


def test_a_row_with_the_number_of_a_first_step_is_a_launch() -> None:
    assert "further steps" in refused(steps=single_steps(0, [30.0]))
    # A count that was measured is not lost without a word.
    later = single_steps(0, [30.0, 1.0])
    for gpus, nodes in COUNTS:
        is_count = (later["gpus"] == gpus) & (later["nodes"] == nodes)
        steps = later[~is_count | (later["step"] == 0)]
        text = refused(steps=steps)
        assert text.startswith(f"{gpus} GPU") and "further steps" in text
    # A job of such a row alone leaves the count to other jobs.
    steps = table_of(COUNTS, step=7)
    launch = table_of({(32, 8): 33.0}, step=0).assign(job="launch")
    result = scale(pd.concat([steps, launch]), 64)
    assert result.target == scale(table_of(COUNTS), 64).target
    assert found(result, "launch")


@given(st.integers(1, 40))
def test_a_row_for_each_rank_changes_no_step(n_ranks: int) -> None:
    """Each row of the first step is a launch, and no others are left out."""
    steps = single_steps(0, [30.0, 0.9, 1.1, 5.0, 1.0, 0.95])
    of_ranks = pd.concat([steps] * n_ranks)
    one = scale(steps, 16)
    several = scale(of_ranks, 16)
    assert found(several, "launch") == found(one, "launch")
    times = [[count.step_s for count in result.counts] for result in (one, several)]
    assert times[1] == pytest.approx(times[0])
    assert several.explained.scatter_s == pytest.approx(one.explained.scatter_s)


@given(st.integers(1, 8), st.integers(1, 8))
def test_the_scatter_grows_only_with_ranks_beyond_the_smallest_count(
    per_node: int, nodes: int
) -> None:
    """A step on several GPUs is already that of the slowest one."""
    usual_s = [1.0, 1.2, 0.9, 1.1]
    rows = []
    for own_nodes, factor in ((1, 1.0), (nodes + 1, 2.0)):
        gpus = own_nodes * per_node
        for number, step_s in enumerate([9.0, *usual_s]):
            rows.append((gpus, own_nodes, "a", number, factor * step_s))
    columns = ["gpus", "nodes", "job", "step", "step_s"]
    result = scale(pd.DataFrame(rows, columns=columns), 10)
    slowest_s = scaling.expected_maximum_s(usual_s, nodes + 1)
    expected_s = slowest_s - np.mean(usual_s)
    assert result.explained.scatter_s == pytest.approx(expected_s)


def test_a_copy_is_named_with_its_own_count() -> None:
    steps = table_of({(8, 1): 0.512345, (16, 2): 0.512345})
    text = refused(steps=steps, nodes=4)
    assert "8 GPUs" in text.replace("16 GPUs", "") and "16 GPUs" in text


def test_a_recording_that_begins_late_keeps_its_first_step() -> None:
    late = scale(single_steps(500, [1.2, 0.9, 0.9]), 64)
    assert late.anchor.step_s == pytest.approx(1.1)
    assert not found(late, "launch")
    early = scale(single_steps(0, [1.2, 0.9, 0.9]), 64)
    assert early.anchor.step_s == pytest.approx(0.99)
    assert found(early, "launch")


def test_steps_may_be_numbered_from_0_or_from_1() -> None:
    """A job that begins at 1 where others begin at 0 has no launch."""
    expected = scale(single_steps(0, [30.0, 0.9, 1.1]), 64).target
    assert scale(single_steps(1, [30.0, 0.9, 1.1]), 64).target == expected
    mixed = single_steps(0, [30.0, 0.9, 1.1])
    is_left_out = (mixed["nodes"] > 1) & (mixed["step"] == 0)
    assert scale(mixed[~is_left_out], 64).target == expected
    # One row with the number 1 is no launch.
    rows = single_steps(0, [30.0, 1.0])
    assert scale(rows[rows["step"] == 1], 64).target == expected


@pytest.mark.parametrize("n_usual", [1, 2, 7])
def test_a_slow_second_step_is_left_out(n_usual: int) -> None:
    steps = single_steps(0, [30.0, 20.0, *[1.0] * n_usual])
    result = scale(steps, 64)
    assert result.anchor.step_s == pytest.approx(1.1)
    assert len(found(result, "launch")) == 2
    # Later slow steps may be part of every training. They are kept, and said.
    later = scale(single_steps(0, [30.0, *[1.0] * 9, 11.0]), 64)
    assert later.anchor.step_s == pytest.approx(2.2)
    assert len(found(later, "launch")) == 2


# -- inputs from Python --------------------------------------------------------------


ALL_COLUMNS = table_of(COUNTS, samples=8, nccl="2.27.3", settings="none", step=9)


def changed(column: str, value: object) -> pd.DataFrame:
    """Return a table of steps with another value in its second row."""
    values = [*ALL_COLUMNS[column]]
    values[1] = value
    return ALL_COLUMNS.assign(**{column: pd.Series(values, dtype=object)})


def test_a_dataframe_with_all_columns_is_taken() -> None:
    for column in ALL_COLUMNS:
        scale(changed(column, ALL_COLUMNS[column][1]), 64)


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("step_s", "1.03"),
        ("step_s", None),
        ("step_s", float("inf")),
        ("step_s", True),
        ("step_s", pd.NA),
        ("step_s", pd.Timedelta("1s")),
        ("job", None),
        ("job", float("nan")),
        ("samples", float("nan")),
        ("samples", 0),
        ("nccl", float("nan")),
        ("settings", None),
        ("gpus", 4.5),
        ("gpus", -4),
        ("gpus", float("nan")),
        ("gpus", "four"),
        ("nodes", 1.5),
        ("nodes", -1),
        ("nodes", 5),
        ("step", -1),
        ("step", 0.5),
    ],
)
def test_a_wrong_value_of_a_dataframe_is_one_line(column: str, value: object) -> None:
    assert column in refused(steps=changed(column, value))


@pytest.mark.parametrize("column", ["step", "samples", "nccl", "settings"])
@pytest.mark.parametrize("missing", [None, float("nan"), pd.NA])
def test_a_column_without_any_value_is_as_if_it_were_left_out(
    column: str, missing: object
) -> None:
    steps = ALL_COLUMNS.assign(**{column: [missing] * len(ALL_COLUMNS)})
    expected = scale(ALL_COLUMNS.drop(columns=column), 64)
    assert scale(steps, 64).to_dict() == expected.to_dict()


@pytest.mark.parametrize("column", ["step", "samples", "nccl", "settings"])
def test_a_column_of_empty_cells_is_as_if_the_file_lacked_it(
    column: str, tmp_path: Path
) -> None:
    path = tmp_path / "steps.csv"
    ALL_COLUMNS.assign(**{column: ""}).to_csv(path, index=False)
    result = scale(read_steps(path), 64)
    expected = scale(ALL_COLUMNS.drop(columns=column), 64)
    assert result.to_dict() == expected.to_dict()
    # Another mistake in such a file is still refused.
    wrong = ALL_COLUMNS.assign(**{column: "", "step_s": -1.0})
    wrong.to_csv(path, index=False)
    with pytest.raises(UserError, match="step_s"):
        read_steps(path)


@pytest.mark.parametrize("column", ["step", "samples"])
def test_a_number_that_only_some_rows_have_is_missing_in_the_others(
    column: str, tmp_path: Path
) -> None:
    path = tmp_path / "steps.csv"
    cells = ["", *["1"] * (len(ALL_COLUMNS) - 1)]
    ALL_COLUMNS.assign(**{column: cells}).to_csv(path, index=False)
    with pytest.raises(UserError, match=f"line 2, column {column}") as caught:
        read_steps(path)
    # 0 would be the number of the launch.
    assert "write 0" not in str(caught.value)


@pytest.mark.parametrize("column", ["step_s", "gpus", "nodes", "step", "samples"])
def test_a_refused_number_is_shown_as_its_user_wrote_it(column: str) -> None:
    """A user of pandas did not write the type of numpy that holds the number."""
    for kind in (float, np.int64, object):
        values = np.array([1, -3, 1, 1], dtype=kind)
        text = refused(steps=ALL_COLUMNS.assign(**{column: values}))
        assert column in text and "-3" in text and "np." not in text


def test_each_finding_of_the_document_has_the_keys_of_other_commands() -> None:
    findings = scale(table_of(COUNTS), 64).to_dict()["findings"]
    assert findings
    assert all(one.keys() == {"what", "layers", "text"} for one in findings)


def test_names_may_be_of_any_type() -> None:
    """Numbers and texts beside each other would not sort."""
    named = GOOD_STEPS.assign(job=pd.Series([7, "b", 2.5, (1, 2)]), nccl=2.27)
    times = all_reduces(2, 8).assign(nccl=2.27)
    assert scale(named, 64, collectives=times).target == scale(GOOD_STEPS, 64).target
    refused(collectives=times.assign(collective=[["all_reduce"]] * len(times)))


def test_other_wrong_arguments_are_one_line() -> None:
    for nodes in (10.7, 0, -1, "ten", float("nan"), [], [4, 2.5], None, True):
        assert "nodes" in refused(nodes=nodes)
    for wish in (float("nan"), "0.8", 1.0, 0):
        assert "wish" in refused(wish=wish)
    for number in (0, 1.5, "two", None):
        assert "kernel_steps" in refused(kernel_steps=number)
    refused(steps=None)
    refused(steps=table_of(COUNTS).to_dict())
    refused(steps=table_of(COUNTS).drop(columns="job"))
    refused(steps=table_of(COUNTS).head(0))
    twice = pd.concat([table_of(COUNTS), table_of(COUNTS)[["gpus"]]], axis=1)
    refused(steps=twice)
    times = all_reduces(2, 4, 8)
    for wrong in (
        times.drop(columns="ranks"),
        times.assign(collective="all_to_none"),
        times.assign(seconds="fast"),
        times.assign(bytes=0),
        times.assign(nodes=2.5),
        times.assign(nccl=[None, *["2.27.3"] * (len(times) - 1)]),
        times.head(0),
        "times.csv",
    ):
        refused(collectives=wrong)
    for wrong in (
        kernels_of(1.0).drop(columns="total_s"),
        kernels_of(-1.0),
        kernels_of(1.0).assign(total_s="long"),
        kernels_of(1.0).assign(collective=None),
        [],
    ):
        refused(kernels=wrong)


def test_whole_numbers_may_be_written_as_others() -> None:
    result = scale(table_of(COUNTS), 16)
    steps = table_of(COUNTS).astype({"gpus": float, "nodes": "Int64"})
    same: list[Any] = [16.0, np.int64(16), [16], np.array([16]), (16, 16)]
    for nodes in same:
        assert scale(steps, nodes).counts == result.counts


# -- what the screen says ------------------------------------------------------------


def test_a_measurement_that_narrows_nothing_is_not_proposed() -> None:
    """Proposed numbers of nodes are the anchor's times a power of two."""
    for nodes in range(9, 81):
        (text,) = found(scale(table_of(COUNTS), nodes), "measure")
        proposed = int(text.split(" nodes")[0].split()[-1])
        assert proposed == nodes or (proposed < nodes and proposed in (16, 32, 64))
        if "\u00b1" in text:
            now, then = (int(part.split("%")[0]) for part in text.split("\u00b1")[1:])
            assert then < now


def test_steps_that_shrink_are_warned_of_unless_samples_are_known() -> None:
    shrinking = {(1, 1): 1.0, (8, 2): 0.95, (32, 8): 0.9}
    warned = found(scale(table_of(shrinking), 16), "warning")
    known = found(scale(table_of(shrinking, samples=8), 16), "warning")
    assert sum("fixed batch" in text for text in warned) == 1
    assert not any("fixed batch" in text for text in known)
    assert scale(table_of(COUNTS), 16).findings
    assert not found(scale(table_of(COUNTS), 16), "warning")


@given(st.floats(0.0, 0.5))
def test_advice_names_a_gain_that_is_seen(loss: float) -> None:
    """Two factors that are printed alike are no gain."""
    anchor_s = round(1.0 + loss, 4)
    result = scale(table_of({(1, 1): 1.0, (8, 2): anchor_s}), 4)
    factor = result.target.scaling_factor
    for text in found(result, "helps"):
        assert f"instead of {factor:.2f}" in text
        assert f"scaling factor {factor:.2f}" not in text
    if loss > 0.05:
        assert found(result, "helps")


def test_a_factor_above_one_is_explained() -> None:
    above = scale(table_of({(1, 1): 1.0, (8, 2): 0.99}), 4)
    assert above.target.scaling_factor > 1 and found(above, "factor")
    below = scale(table_of({(1, 1): 1.0, (8, 2): 1.6}), 2)
    assert not found(below, "factor")


def test_the_screen_and_the_drawing_word_the_level_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from matplotlib.figure import Figure

    path = tmp_path / "steps.csv"
    table_of(COUNTS).to_csv(path, index=False)
    assert cli.main(["scale", "--steps", str(path), "--nodes", "64"]) == 0
    ax = Figure().subplots()
    show.scaling_factors(ax, scale(table_of(COUNTS), 64))
    (label,) = (text for text in ax.get_legend_handles_labels()[1] if "%" in text)
    assert label in capsys.readouterr().out.splitlines()[0]


def test_an_error_that_rounds_to_zero_has_no_sign(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "steps.csv"
    for shift in (0.9999, 1.0, 1.0001):
        anchor_s = shift * float(scaling.step_s(1.0, 1.05, 4.0))
        table_of({(1, 1): 1.0, (8, 2): 1.05, (32, 8): anchor_s}).to_csv(
            path, index=False
        )
        assert cli.main(["scale", "--steps", str(path), "--nodes", "16"]) == 0
        out = capsys.readouterr().out
        assert "(0.0%)" in out


def test_no_line_of_the_screen_is_wider_than_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The widest rows have a range of jobs and messages alone."""
    monkeypatch.chdir(tmp_path)
    jobs = {(4, 1): [0.2111, 0.2222], (8, 2): [0.2133, 0.2244], (32, 8): [0.25, 0.2777]}
    jobs_of(jobs).to_csv("steps.csv", index=False)
    all_reduces(2, 4, 8).to_csv("times.csv", index=False)
    layers = pd.DataFrame(
        {
            "network": "net",
            "device": "gpu",
            "batch": 8,
            "precision": "fp32",
            "ranks": 1,
            "threads": 1,
            "tensor": [f"layer{number}.weight" for number in range(4)],
            "layer": [f"layer{number}" for number in range(4)],
            "parameters": 2**22,
            "gradient_bytes": 2**24,
            "forward_s": 0.01,
            "backward_s": 0.02,
            "flops": 1e9,
            "update_s": 0.001,
        }
    )
    layers.to_csv("layers.csv", index=False)
    words = "scale --steps steps.csv --nodes 16 64 --wish 0.8 --profile layers.csv"
    assert cli.main([*words.split(), "--collectives", "times.csv"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 100
    # The target has its time with messages alone in the row.
    assert any(line.split()[:2] == ["256", "64"] for line in lines)
