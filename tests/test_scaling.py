"""Scaling to more nodes: laws of the prediction, what is refused, and what is read."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlkit import cli
from ddlkit.core import scaling
from ddlkit.core.errors import UserError
from ddlkit.core.workload import Workload
from ddlkit.formats.kernel_sums import read_kernel_sums
from ddlkit.formats.node_tables import read_node_tables
from ddlkit.formats.steps import read_steps
from ddlkit.model.node_costs import NodeCosts
from ddlkit.model.scaling import (
    COMMUNICATION_BOUND,
    HIDDEN_EVEN_ON_A_BAD_DAY,
    HIDDEN_ONLY_ON_A_QUIET_FABRIC,
    Count,
    scale,
)
from workbook.validate.clusters import EXTERNAL

SECONDS = st.floats(1e-3, 1e3)
SHARES = st.floats(0.0, 4.0)
RATIOS = st.floats(1.0, 16.0)
COUNTS = {(1, 1): 1.0, (4, 1): 1.03, (8, 2): 1.05, (32, 8): 1.1}
"""A step by GPUs and nodes, in seconds."""


def table_of(counts: dict[tuple[int, int], float], **columns: object) -> pd.DataFrame:
    rows = [
        {"gpus": gpus, "nodes": nodes, "job": f"j{gpus}", "step_s": step_s}
        for (gpus, nodes), step_s in counts.items()
    ]
    return pd.DataFrame(rows).assign(**columns)


def all_reduces(
    *nodes: int, smallest: int = 2**10, beta_s: float = 1e-10
) -> pd.DataFrame:
    """Return a table whose times obey the law of all-reduces exactly."""
    rows = []
    for number in nodes:
        for power in range(smallest.bit_length() - 1, 31):
            ranks = 4 * number
            bytes_s = 2**power * 2 * (ranks - 1) / ranks * beta_s
            start_s = 0.0 if power == 30 else 1e-5 * np.log2(number)
            rows.append(("all_reduce", number, ranks, 2**power, bytes_s + start_s))
    return pd.DataFrame(
        rows, columns=["collective", "nodes", "ranks", "bytes", "seconds"]
    )


# -- laws of steps -------------------------------------------------------------------


@given(SECONDS, SHARES, RATIOS, RATIOS)
def test_more_nodes_never_shorten_a_step_and_the_interval_contains_it(
    node_s: float, loss: float, ratio: float, further: float
) -> None:
    anchor_s = node_s * (1 + loss)
    step_s = scaling.step_s(node_s, anchor_s, ratio)
    lower_s, upper_s = scaling.step_interval_s(node_s, anchor_s, ratio)
    assert lower_s <= step_s <= upper_s
    later_s = scaling.step_s(node_s, anchor_s, ratio * further)
    _, later_upper_s = scaling.step_interval_s(node_s, anchor_s, ratio * further)
    tolerance_s = 1e-12 * later_upper_s
    assert later_s >= step_s - tolerance_s
    assert later_upper_s >= upper_s - tolerance_s


@given(SECONDS, st.floats(-0.5, 4.0))
def test_at_the_anchor_the_step_is_the_measured_one(node_s: float, loss: float) -> None:
    anchor_s = node_s * (1 + loss)
    assert scaling.step_s(node_s, anchor_s, 1.0) == pytest.approx(anchor_s, rel=1e-15)


@given(SECONDS, SHARES, RATIOS, st.sampled_from([1e-6, 1e-3, 60.0]))
def test_units_of_time_cancel(
    node_s: float, loss: float, ratio: float, unit: float
) -> None:
    anchor_s = node_s * (1 + loss)
    step_s = scaling.step_s(node_s, anchor_s, ratio)
    other = scaling.step_s(unit * node_s, unit * anchor_s, ratio)
    assert other == pytest.approx(unit * step_s, rel=1e-12)


@given(SECONDS, st.floats(0.0, 1e-4), RATIOS)
def test_a_small_loss_grows_as_the_root_of_the_nodes(
    node_s: float, loss: float, ratio: float
) -> None:
    """The square of the law changes nothing to first order."""
    step_s = scaling.step_s(node_s, node_s * (1 + loss), ratio)
    grown = loss * np.sqrt(ratio)
    assert step_s / node_s - 1 == pytest.approx(grown, rel=2e-3, abs=1e-13)


@given(st.lists(SECONDS, min_size=1, max_size=6), st.integers(1, 40))
def test_the_slowest_of_ranks_lies_between_the_mean_and_the_longest_step(
    steps_s: list[float], ranks: int
) -> None:
    slowest_s = scaling.expected_maximum_s(steps_s, ranks)
    assert np.mean(steps_s) * (1 - 1e-12) <= slowest_s <= max(steps_s) * (1 + 1e-12)
    assert scaling.expected_maximum_s(steps_s, ranks + 1) >= slowest_s * (1 - 1e-12)


def test_the_slowest_of_ranks_is_the_mean_over_all_draws() -> None:
    steps_s = [1.0, 2.0, 5.0]
    draws = np.stack(np.meshgrid(*[steps_s] * 3)).reshape(3, -1)
    expected_s = draws.max(axis=0).mean()
    assert scaling.expected_maximum_s(steps_s, 3) == pytest.approx(expected_s)


# -- laws of collectives -------------------------------------------------------------


def test_a_table_that_obeys_the_law_of_all_reduces_is_continued_by_it() -> None:
    costs = NodeCosts.of(all_reduces(2, 4))
    continued = costs.cost("all_reduce", 64, 256)
    measured = NodeCosts.of(all_reduces(64)).cost("all_reduce", 64, 256)
    np.testing.assert_allclose(continued.seconds, measured.seconds, rtol=1e-12)


def test_a_measured_number_of_nodes_keeps_its_times() -> None:
    times = all_reduces(2, 4, 8)
    cost = NodeCosts.of(times).cost("all_reduce", 4, 16)
    own = times[times["nodes"] == 4]
    assert cost.seconds.tolist() == own["seconds"].tolist()


@given(st.floats(1e-6, 1e-3), st.floats(1e-12, 1e-9), st.sampled_from([1, 2, 4]))
def test_a_ring_of_gathers_is_continued_exactly(
    alpha_s: float, beta_s: float, ratio: int
) -> None:
    """On a ring, a step for each node takes a start and the bytes of a shard."""
    sizes = 2.0 ** np.arange(10, 31)

    def ring_s(n_bytes: np.ndarray, nodes: int) -> np.ndarray:
        return nodes * (alpha_s + beta_s * n_bytes / nodes)

    predicted_s = scaling.gathered_s(sizes, ring_s(sizes, 4), sizes, ratio)
    is_known = np.isfinite(predicted_s)
    assert is_known.sum() == len(sizes) - np.log2(ratio)
    expected_s = ring_s(sizes, 4 * ratio)[is_known]
    np.testing.assert_allclose(predicted_s[is_known], expected_s, rtol=1e-9)


# -- a whole result ------------------------------------------------------------------


def test_counts_that_obey_the_law_are_predicted_exactly() -> None:
    def step_s(nodes: int) -> float:
        return float(np.sqrt(1 + 0.05 * np.sqrt(nodes)))

    counts = {(4, 1): 1.0} | {(4 * n, n): step_s(n) for n in (2, 8)}
    result = scale(table_of(counts), [16, 80])
    assert result.target.step_s == pytest.approx(step_s(80))
    assert result.held_out is not None
    assert result.held_out.relative_error == pytest.approx(0.0, abs=1e-12)
    assert [count.nodes for count in result.counts] == [1, 2, 8, 16, 80]


def test_order_of_rows_and_unit_of_time_change_no_factor() -> None:
    steps = table_of(COUNTS)
    result = scale(steps, 64, wish=0.8)
    shuffled = steps.iloc[::-1].assign(step_s=1e3 * steps["step_s"])
    other = scale(shuffled, 64, wish=0.8)
    factors = [count.scaling_factor for count in result.counts]
    assert [count.scaling_factor for count in other.counts] == pytest.approx(factors)
    assert other.wish and result.wish
    likely_factors = pytest.approx(result.wish.likely_factor_interval)
    assert other.wish.likely_factor_interval == likely_factors
    wishes = [
        replace(wish, likely_factor_interval=None) for wish in (other.wish, result.wish)
    ]
    assert wishes[0] == wishes[1]
    assert other.held_out and result.held_out
    assert other.held_out.relative_error == pytest.approx(
        result.held_out.relative_error
    )


def test_a_result_does_not_change() -> None:
    result = scale(table_of(COUNTS), 64)
    with pytest.raises(FrozenInstanceError):
        result.verdict_on_messages = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("wish", "answer"), [(0.3, "yes"), (0.97, "no"), (0.6, "open")]
)
def test_a_wish_is_answered_only_by_the_whole_interval(
    wish: float, answer: str
) -> None:
    lossy = {(1, 1): 1.0, (4, 1): 1.2, (8, 2): 1.3, (32, 8): 1.5}
    result = scale(table_of(lossy), 16, wish=wish)
    assert result.wish and result.wish.answer == answer
    interval = result.target.scaling_factor_interval
    assert interval is not None
    contains = interval[0] < wish <= interval[1]
    assert contains == (answer == "open")


def test_a_wish_stays_open_while_what_decides_it_has_to_be_repeated() -> None:
    """A slow smallest count makes each scaling factor too large."""
    slow_smallest = {(1, 1): 1.3, (4, 1): 1.0, (8, 2): 1.02, (32, 8): 1.05}
    answered = scale(table_of(slow_smallest | {(1, 1): 0.99}), 16, wish=0.6).wish
    still_open = scale(table_of(slow_smallest), 16, wish=0.6).wish
    assert answered and answered.answer == "yes"
    assert still_open and still_open.answer == "open"


@given(st.floats(1.0, 2.0), st.floats(1.0, 2.0))
def test_a_slower_smaller_count_widens_the_interval_upwards(
    slow_s: float, slower_s: float
) -> None:
    """The prediction starts from the anchor all the same."""

    def target(middle_s: float) -> Count:
        steps = {(1, 1): 0.9, (8, 2): middle_s, (32, 8): 1.1}
        return scale(table_of(steps), 64).target

    less_slow, slower = (target(times_s) for times_s in sorted((slow_s, slower_s)))
    assert less_slow.interval_s and slower.interval_s
    assert slower.step_s == less_slow.step_s
    assert slower.interval_s[0] == less_slow.interval_s[0]
    assert slower.interval_s[1] >= less_slow.interval_s[1]


def test_a_single_job_decides_no_wish_that_is_near_to_it() -> None:
    """Without a second job, another job may differ by a few percent."""
    steps = table_of(COUNTS)
    factor = 1 / COUNTS[32, 8]
    for wish, answer in ((0.96, "yes"), (1.0, "open"), (1.05, "no")):
        asked = scale(steps, 8, wish=wish * factor)
        assert asked.wish and asked.wish.answer == answer


def test_the_most_gpus_on_several_nodes_are_the_anchor() -> None:
    """Many nodes with one GPU each are a smaller placement, and are said to differ."""
    mixed = table_of(COUNTS | {(16, 16): 1.05})
    result = scale(mixed, 64)
    alike = scale(table_of(COUNTS), 64)
    assert (result.anchor.gpus, result.anchor.nodes) == (32, 8)
    assert result.target.step_s == alike.target.step_s
    gpus = [count.gpus for count in result.counts]
    assert gpus == sorted(gpus)
    assert "placement" in {finding.what for finding in result.findings}
    assert "placement" not in {finding.what for finding in alike.findings}


def test_a_job_is_the_mean_of_its_steps_without_the_launch() -> None:
    rows = []
    for (gpus, nodes), step_s in COUNTS.items():
        for number, factor in enumerate((30.0, 0.9, 1.1)):
            rows.append((gpus, nodes, "one", number, factor * step_s))
    columns = ["gpus", "nodes", "job", "step", "step_s"]
    single = pd.DataFrame(rows, columns=columns)
    result = scale(single, 64)
    of_jobs = scale(table_of(COUNTS), 64)
    assert result.target.step_s == pytest.approx(of_jobs.target.step_s)
    assert any(finding.what == "launch" for finding in result.findings)
    assert result.explained.scatter_s == pytest.approx(0.1, rel=1e-6)
    assert of_jobs.explained.scatter_s is None
    reversed_rows = scale(single.iloc[::-1], 64)
    assert reversed_rows.target == result.target


def test_samples_may_be_those_of_a_gpu_or_of_all() -> None:
    steps = table_of(COUNTS)
    target = scale(steps, 64).target
    of_one = scale(steps.assign(samples=8), 64)
    of_all = scale(steps.assign(samples=8 * steps["gpus"]), 64)
    assert of_one.target == of_all.target == target
    understood = [
        [finding for finding in result.findings if finding.what == "samples"]
        for result in (of_one, of_all)
    ]
    assert [len(findings) for findings in understood] == [1, 1]
    assert understood[0] != understood[1]


def test_steps_with_a_part_of_a_batch_are_left_out() -> None:
    whole = table_of(COUNTS, samples=8)
    part = whole.assign(samples=4, step_s=whole["step_s"] / 2)
    steps = pd.concat([whole, whole, whole, part])
    steps["step"] = np.repeat(range(4), len(COUNTS))
    assert scale(steps, 64).target.step_s == pytest.approx(
        scale(whole, 64).target.step_s
    )


def test_a_slow_count_is_to_be_repeated() -> None:
    slow = COUNTS | {(8, 2): 1.3}
    result = scale(table_of(slow), 16)
    (warning,) = (one for one in result.findings if one.what == "warning")
    assert "8 GPUs" in warning.text
    assert not [
        one for one in scale(table_of(COUNTS), 16).findings if one.what == "warning"
    ]


WORKLOAD = Workload.from_arrays(0.3, np.full(20, 0.03), np.full(20, 2**24))
"""320 MiB of gradients in a step of 0.9 s."""


def test_only_what_was_not_given_is_asked_for() -> None:
    """Tables that the user has given are not asked for once more."""
    asked = []
    for tables in (None, all_reduces(1, 2, 4, 8)):
        result = scale(table_of(COUNTS), 64, collectives=tables)
        (finding,) = [f for f in result.findings if f.what == "messages"]
        asked.append("--collectives" in finding.text)
        assert "--profile" in finding.text
    assert asked == [True, False]


@pytest.mark.parametrize(
    ("beta_s", "verdict"),
    [
        (1e-11, HIDDEN_EVEN_ON_A_BAD_DAY),
        (8e-10, HIDDEN_ONLY_ON_A_QUIET_FABRIC),
        (1e-8, COMMUNICATION_BOUND),
    ],
)
def test_the_verdict_is_of_messages_alone(beta_s: float, verdict: str) -> None:
    times = all_reduces(2, 4, 8, beta_s=beta_s)
    result = scale(table_of(COUNTS), 64, workload=WORKLOAD, collectives=times)
    assert result.verdict_on_messages == verdict
    target = result.target
    assert (
        target.only_messages_step_s is not None
        and target.only_messages_bad_day_s is not None
    )
    assert target.only_messages_bad_day_s >= target.only_messages_step_s >= 1.0
    explained = result.explained
    assert explained.messages_at_most_s is not None
    assert explained.unexplained_s <= explained.loss_s


# -- what is refused -----------------------------------------------------------------


def refuse(
    words: str,
    steps: pd.DataFrame | None = None,
    nodes: int = 64,
    *,
    workload: Workload | None = None,
    collectives: pd.DataFrame | None = None,
) -> None:
    given_steps = table_of(COUNTS) if steps is None else steps
    with pytest.raises(UserError, match=words) as caught:
        scale(given_steps, nodes, workload=workload, collectives=collectives)
    assert "\n" not in str(caught.value)


def test_what_cannot_be_predicted_is_refused_with_what_to_measure() -> None:
    refuse("two nodes or more", steps=table_of({(4, 1): 1.0}))
    refuse("two nodes or more", steps=table_of({(1, 1): 1.0, (4, 1): 1.1}))
    refuse("one GPU or one node", steps=table_of({(8, 2): 1.05, (16, 4): 1.06}))
    under_two_counts = {(4, 1): 1.1, (16, 4): 1.2123456, (32, 8): 1.2123456}
    refuse("identical to the digit", steps=table_of(under_two_counts))
    refuse("measure steps on 9 nodes or more", nodes=81)
    refuse(
        "same number of samples per GPU", steps=table_of(COUNTS, samples=[8, 8, 8, 4])
    )
    halved_s = {counts: 1 / counts[0] for counts in COUNTS}
    refuse("fixed batch", steps=table_of(halved_s, samples=256))
    versions = ["2.18.1", "2.18.1", "2.19.3+cuda12.3", "2.19.3"]
    refuse("version of NCCL", steps=table_of(COUNTS, nccl=versions))
    refuse("settings", steps=table_of(COUNTS, settings=["a", "a", "b", ""]))
    twice = pd.concat([table_of(COUNTS)] * 2).assign(step_s=1.23456789)
    twice["job"] = [f"j{number}" for number in range(len(twice))]
    refuse("identical to the digit", steps=twice)
    refuse("fixed batch", table_of({(1, 1): 1.0, (8, 2): 0.2}))
    # Two nodes take little less than one, as with a fixed batch that scales badly.
    refuse("fixed batch", table_of({(8, 1): 1.0, (16, 2): 0.7}, samples=256), 8)
    large = all_reduces(2, 4, 8, smallest=2**29)
    refuse("above the largest bucket", workload=WORKLOAD, collectives=large)
    refuse("above PyTorch's largest bucket", collectives=large)
    refuse("on two nodes or more with 4", collectives=all_reduces(1))
    alone = all_reduces(2, 4, 8).assign(ranks=lambda times: times["nodes"])
    refuse("4 GPUs on each node", collectives=alone)
    gathers = all_reduces(2, 4, 8).assign(collective="all_gather")
    refuse("measure it on 16 nodes", collectives=gathers)
    times = all_reduces(2, 4, 8).assign(nccl="2.19.3", settings="")
    other = table_of(COUNTS, nccl="2.18.1")
    refuse("version of NCCL", steps=other, collectives=times)
    mixed = times.assign(nccl=np.where(times["nodes"] == 8, "2.18.1", "2.19.3"))
    refuse("tables .* version of NCCL", collectives=mixed)
    one_size = all_reduces(2, 4, 8).query("bytes == 2**25")
    refuse("several sizes", workload=WORKLOAD, collectives=one_size)
    ring = times.assign(settings="NCCL_ALGO=Ring")
    refuse("settings", steps=table_of(COUNTS, settings="none"), collectives=ring)


def test_the_count_with_another_number_of_samples_per_gpu_is_named() -> None:
    steps = table_of(COUNTS)
    odd = sorted(set(steps["gpus"]))[1]
    samples = 64 * steps["gpus"]
    refuse(
        f"65 on {odd} GPUs",
        steps.assign(samples=samples.where(steps["gpus"] != odd, 65 * odd)),
    )


def test_equal_times_are_a_copy_unless_they_have_few_digits() -> None:
    rows = table_of(COUNTS)
    # A short time has no more digits than a long one.
    for unit_s in (1.0, 1e-5):
        of_unit = rows.assign(step_s=rows["step_s"] * unit_s)
        rounded = pd.concat([of_unit, of_unit.assign(job=rows["job"] + "again")])
        findings = scale(rounded, 64).findings
        warnings = [one for one in findings if "may be a copy" in one.text]
        assert len(warnings) == len(COUNTS)
    single = pd.concat([rows.assign(step_s=time_s) for time_s in (1.0, 1.01, 1.02)])
    refuse("identical", pd.concat([single, single.assign(job="copy")]))


def test_what_is_not_known_of_the_software_is_said() -> None:
    times = all_reduces(2, 4, 8).assign(nccl="2.19.3+cuda12.3", settings="")
    result = scale(table_of(COUNTS, nccl="2.19.3"), 64, collectives=times)
    said = {one.what for one in result.findings if "not known" in one.text}
    assert "settings" in said and "nccl" not in said


GOOD = "gpus,nodes,job,step_s\n1,1,a,1.0\n8,2,b,1.1\n"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "gpus,nodes,job,step_s\n",
        "gpus,nodes,job,step_s\n1,1,a,1.0\n",
        GOOD.replace("step_s", "seconds"),
        GOOD.replace(",job", ""),
        GOOD.replace("1.1", "0"),
        GOOD.replace("1.1", "-1.1"),
        GOOD.replace("1.1", "nan"),
        GOOD.replace("1.1", ""),
        GOOD.replace("8,2", "1,2"),
        GOOD.replace("8,2", "8.5,2"),
        GOOD.replace("8,2,b,1.1", "8,2,b"),
        GOOD.replace("8,2", "0,2"),
        '{"gpus": 1}',
        "\0",
        GOOD.replace("1.1", "inf"),
        GOOD.replace("1.1", "1e300"),
        GOOD.replace(",", ";"),
        GOOD.replace("gpus", "GPUs").replace("step_s", "Step (s)"),
        GOOD.replace("8,2", "7,2"),
        GOOD.replace("job", "gpus"),
        GOOD.replace(",b,", ",,"),
        GOOD + "1,1,c,1.0,7\n",
    ],
)
def test_a_wrong_table_of_steps_is_one_line(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "steps.csv"
    path.write_text(text)
    assert cli.main(["scale", "--steps", str(path), "--nodes", "4"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and err.startswith("ddlkit: error: ")


@pytest.mark.parametrize("separator", [";", "\t"])
def test_other_separators_than_commas_are_named(separator: str, tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    path.write_text(GOOD.replace(",", separator))
    with pytest.raises(UserError, match="by commas"):
        read_steps(path)


def test_of_steps_in_several_units_the_longest_and_the_shortest_are_named() -> None:
    refuse(
        "job .* on 32 GPUs .* on 1 GPU ", table_of({(1, 1): 1, (8, 2): 9, (32, 8): 200})
    )


def test_a_million_rows_are_read(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    rows = ["1,1,a,1.0"] * 500_000 + ["8,2,b,1.1"] * 500_000
    path.write_text("\n".join(["gpus,nodes,job,step_s", *rows]) + "\n")
    result = scale(read_steps(path), 4)
    assert [count.step_s for count in result.counts[:2]] == pytest.approx([1.0, 1.1])


# -- what is read --------------------------------------------------------------------


def test_nodes_are_counted_by_the_hosts_of_a_log() -> None:
    paths = sorted((EXTERNAL / "abci").glob("allreduce_inter_vnode_*.log.gz"))
    times = read_node_tables(paths)
    counts = times.groupby("nodes")["ranks"].unique().map(list).to_dict()
    assert counts == {nodes: [4 * nodes] for nodes in (2, 4, 8, 16, 32)}


LOG = """# nccl-tests version 2.17.1 nccl-headers=22703 nccl-library=22703
# Collective test starting: all_reduce_perf
#  Rank  0 Group  0 Pid   7 on    node1 device  0 [0x00] NVIDIA A100
#  Rank  1 Group  0 Pid   7 on    node2 device  0 [0x00] NVIDIA A100
#    size   count   type  redop root   time  algbw  busbw #wrong   time  algbw  busbw #wrong
#     (B) (elements)                   (us) (GB/s) (GB/s)          (us) (GB/s) (GB/s)
  1048576  262144  float   sum   -1  100.0  10.49  10.49      0  100.0  10.49  10.49      0
  2097152  524288  float   sum   -1  180.0  11.65  11.65      0  180.0  11.65  11.65      0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 11.0700
"""
SHORT = """bytes,seconds,gpus,num_nodes,nccl
1048576,1e-4,2,2,2.27.3
2097152,1.8e-4,2,2,2.27.3
1048576,2e-4,8,8,2.27.3
"""


def test_a_log_and_a_table_of_the_same_times_are_read_alike(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text(LOG)
    table = tmp_path / "table.csv"
    table.write_text(SHORT)
    times = read_node_tables([log, table])
    of_log = times[times["file"] == str(log)].drop_duplicates().drop(columns="file")
    of_table = times[(times["file"] == str(table)) & (times["nodes"] == 2)]
    of_table = of_table.drop(columns="file")
    assert of_log.to_numpy().tolist() == of_table.to_numpy().tolist()
    assert set(times["nccl"]) == {"2.27.3"}


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace("on    node1 device", "at").replace(
            "on    node2", ""
        ),
        lambda text: "bytes,seconds\n1024,1e-4\n",
        lambda text: "bytes,seconds,ranks\n1024,1e-4,2\n",
        lambda text: "bytes,seconds,nodes\n1024,1e-4,2\n",
        lambda text: "bytes,seconds,ranks,nodes\n1024,1e-4,2,0\n",
        lambda text: "nothing of the kind\n",
        lambda text: "",
    ],
)
def test_a_wrong_table_of_collectives_is_one_line(
    change: Callable[[str], str], tmp_path: Path
) -> None:
    path = tmp_path / "table"
    path.write_text(change(LOG))
    with pytest.raises(UserError, match="table") as caught:
        read_node_tables([path])
    assert "\n" not in str(caught.value)


def test_a_named_collective_chooses_in_a_table(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    tables = [all_reduces(2), all_reduces(2).assign(collective="all_gather")]
    pd.concat(tables).to_csv(path, index=False)
    chosen = read_node_tables([path], collective="all_gather")
    assert len(chosen) == len(tables[1])
    assert set(chosen["collective"]) == {"all_gather"}
    assert set(read_node_tables([path])["collective"]) == {"all_reduce", "all_gather"}
    with pytest.raises(UserError, match="not of reduce_scatter"):
        read_node_tables([path], collective="reduce_scatter")


def test_all_missing_columns_of_a_table_of_collectives_are_named(
    tmp_path: Path,
) -> None:
    path = tmp_path / "table.csv"
    for header, missing in (
        ("bytes,seconds,ranks,note", {"nodes"}),
        ("bytes,seconds,note,hosts", {"ranks"}),
        ("bytes,seconds,note,remark", {"nodes", "ranks"}),
    ):
        path.write_text(f"{header}\n1024,1e-4,2,2\n")
        with pytest.raises(UserError) as caught:
            read_node_tables([path])
        assert {*re.findall(r"no column (\w+)", str(caught.value))} == missing


def test_collectives_that_are_not_predicted_are_named_as_in_the_file(
    tmp_path: Path,
) -> None:
    path = tmp_path / "table.csv"
    unpredicted = all_reduces(2).assign(collective="all_to_all")
    unpredicted.to_csv(path, index=False)
    for collective in (None, "all_reduce"):
        with pytest.raises(UserError, match="all_to_all") as caught:
            read_node_tables([path], collective=collective)
        # No value of this option would help.
        assert "--collective" not in str(caught.value)
    pd.concat([all_reduces(2), unpredicted]).to_csv(path, index=False)
    with pytest.raises(UserError, match="all_to_all.* all_reduce by --collective"):
        read_node_tables([path])
    chosen = read_node_tables([path], collective="all_reduce")
    assert set(chosen["collective"]) == {"all_reduce"}


def test_a_cut_log_is_replaced_by_a_table_with_all_columns(tmp_path: Path) -> None:
    path = tmp_path / "log.txt"
    cut, _, _ = LOG.partition("# Avg")
    path.write_text(cut)
    with pytest.raises(UserError, match="bytes, seconds, ranks and nodes"):
        read_node_tables([path])


def test_a_cell_of_a_table_of_collectives_may_contain_a_comma(tmp_path: Path) -> None:
    path = tmp_path / "table.csv"
    path.write_text('bytes,seconds,ranks,nodes,note\n1024,1e-4,16,2,"a, b"\n')
    assert read_node_tables([path])["seconds"].tolist() == [1e-4]


KERNELS = """Processing [report.sqlite] with [cuda_gpu_kern_sum.py]...

Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Name
60.0,6000000,10,600000.0,600000.0,500000,700000,1.0,"void gemm<float, 4>(int, int)"
30.0,3000000,20,150000.0,150000.0,100000,900000,1.0,"ncclDevKernel_AllReduce_Sum_f32_RING_LL(x<4096>)"
10.0,1000000,5,200000.0,200000.0,190000,210000,1.0,ncclKernel_AllReduce_TREE_LL_Sum_float(ncclDevComm*)
"""


def test_sums_of_kernels_bound_what_messages_explain(tmp_path: Path) -> None:
    path = tmp_path / "sums.csv"
    path.write_text(KERNELS)
    kernels = read_kernel_sums(path)
    assert kernels["collective"].tolist() == ["", "all_reduce", "all_reduce"]
    assert kernels["shape"].tolist() == ["", "ring", "tree"]
    result = scale(table_of(COUNTS), 64, kernels=kernels, kernel_steps=2)
    assert result.explained.messages_at_most_s == pytest.approx(4e-3 / 2)
    for wrong in ("", "Instances,Name\n1,a\n", KERNELS.replace("6000000", "-6")):
        path.write_text(wrong)
        with pytest.raises(UserError, match=r"sums\.csv"):
            read_kernel_sums(path)


@pytest.mark.parametrize("column", ["Total Time (ns)", "Instances", "Min (ns)", "Name"])
def test_an_error_about_sums_of_kernels_names_the_column_of_the_file(
    column: str, tmp_path: Path
) -> None:
    path = tmp_path / "sums.csv"
    path.write_text(KERNELS.replace(column, "other"))
    with pytest.raises(UserError, match=re.escape(f"no column {column}")):
        read_kernel_sums(path)
    if column != "Name":
        table = pd.read_csv(io.StringIO(KERNELS), skiprows=2)
        table.assign(**{column: "a"}).to_csv(path, index=False)
        with pytest.raises(UserError, match=re.escape(f"column {column}: ")):
            read_kernel_sums(path)


@pytest.mark.parametrize("loss_s", [2.5e-6, 3e-3, 0.3, 30.0])
def test_two_times_that_are_compared_have_one_unit_and_as_many_decimals(
    loss_s: float,
) -> None:
    steps = table_of({(1, 1): 100 * loss_s, (8, 2): 101 * loss_s})
    kernels = pd.DataFrame({"collective": ["all_reduce"], "total_s": [1.06 * loss_s]})
    result = scale(steps, 4, kernels=kernels)
    (text,) = [f.text for f in result.findings if "faster network" in f.text]
    times = re.findall(r"\d+(?:\.(\d+))? (n?µ?m?s)\b", text)
    assert len(times) == 2
    (decimals, unit), (other_decimals, other_unit) = times
    assert unit == other_unit and len(decimals) == len(other_decimals)


# -- the command ---------------------------------------------------------------------


def test_the_command_and_the_function_say_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    steps = table_of(COUNTS, samples=8, nccl="2.27.3")
    steps.to_csv("steps.csv", index=False)
    times = all_reduces(2, 4, 8).assign(nccl="2.27.3")
    times.to_csv("times.csv", index=False)
    printed = cli.ask(
        "scale",
        steps="steps.csv",
        collectives=["times.csv"],
        nodes=[16, 64],
        wish=0.8,
        plot="out.png",
    )
    result = scale(
        read_steps("steps.csv"),
        [16, 64],
        collectives=read_node_tables(["times.csv"]),
        wish=0.8,
    )
    assert printed == json.loads(json.dumps(result.to_dict()))
    assert Path("out.png").read_bytes().startswith(b"\x89PNG")
    assert printed["interval_level"] == scaling.NOMINAL
    keys = {"gpus", "nodes", "step_s", "interval_s", "scaling_factor", "measured"}
    assert all(keys <= {*count} for count in printed["counts"])
    assert cli.main(["scale", "--steps", "steps.csv", "--nodes", "64"]) == 0


def test_errors_name_the_file_and_no_option_that_the_command_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    table_of(COUNTS).to_csv("steps.csv", index=False)
    all_reduces(2, 4, 8).to_csv("times.csv", index=False)
    Path("profile.csv").write_text("tensor,gradient_bytes,backward_s\na,4000,0.1\n")
    Path("log.txt").write_text(LOG + LOG)
    no_messages = [line for line in KERNELS.splitlines(True) if "nccl" not in line]
    Path("sums.csv").write_text("".join(no_messages))
    for options, file in (
        ("--collectives times.csv --profile profile.csv", "profile.csv"),
        ("--collectives log.txt", "log.txt"),
        ("--kernels sums.csv", "sums.csv"),
    ):
        words = f"scale --steps steps.csv --nodes 64 {options}"
        assert cli.main(words.split()) == 2
        error = capsys.readouterr().err
        assert file in error and error.count("\n") == 1
        assert not re.search("--(forward-s|table)", error)


@pytest.mark.parametrize(
    "words",
    [
        "--nodes 0",
        "--nodes 64 --wish 1.5",
        "--nodes 64 --plot out.pdf",
        "--nodes 64 --plot steps.png",
        "--nodes 64 --profile a.csv --trace b.json",
        "--nodes 64 --profile a.csv",
        "--nodes 64 --trace b.json",
        "--nodes 64 --batch 4",
        "--nodes 64 --collective all_reduce",
        "--nodes 64 --kernel-steps 4",
        "--nodes 64 --collectives absent.log",
    ],
)
def test_options_that_make_no_sense_are_refused(
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    table_of(COUNTS).to_csv("steps.png", index=False)
    assert cli.main(["scale", "--steps", "steps.png", *words.split()]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["steps.png"]


@pytest.mark.parametrize(
    "text",
    [
        "tensor,parameters,flops\nconv,1000000,1e9\n",
        "name,layers,d_model,heads,d_ff,vocabulary\nsmall,2,64,4,256,1000\n",
    ],
)
def test_a_trace_without_times_is_refused_with_what_the_command_takes(
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    table_of(COUNTS).to_csv("steps.csv", index=False)
    all_reduces(2, 4, 8).to_csv("times.csv", index=False)
    Path("trace.csv").write_text(text)
    words = "--steps steps.csv --nodes 16 --collectives times.csv --trace trace.csv"
    assert cli.main(["scale", *words.split()]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "ddlkit import" in error and "--profile" in error


@pytest.mark.parametrize("factor", [1000.0, 0.001])
def test_a_job_in_another_unit_is_refused_by_its_name(factor: float) -> None:
    table = table_of(COUNTS)
    table.loc[2, "step_s"] *= factor
    with pytest.raises(UserError, match=r"job j8 .*seconds"):
        scale(table, 16)


@pytest.mark.parametrize("factor", [1.0, 1e3])
def test_steps_that_are_all_in_another_unit_are_warned_of(
    factor: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "steps.csv"
    table_of({count: factor * step_s for count, step_s in COUNTS.items()}).to_csv(path)
    assert cli.main(["scale", "--steps", str(path), "--nodes", "16"]) == 0
    warned = [line for line in capsys.readouterr().err.splitlines() if "step_s" in line]
    assert len(warned) == (factor > 1)
    assert all(f"--steps {path}" in line for line in warned)


def test_tables_of_one_node_are_refused_as_such() -> None:
    """They have as many GPUs on the node as the training, so that these do not differ."""
    costs = NodeCosts.of(all_reduces(1))
    with pytest.raises(UserError, match="1 node alone"):
        costs.with_per_node(4)


def test_jobs_on_the_smallest_count_are_no_factor_above_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One of several jobs is always faster than their median, which says nothing of more GPUs."""
    steps = tmp_path / "steps.csv"
    steps.write_text(
        "gpus,nodes,job,step_s\n"
        "1,1,a,0.500\n1,1,b,0.510\n"
        "8,2,c,0.560\n8,2,d,0.571\n16,4,e,0.602\n"
    )
    assert cli.main(["scale", "--steps", str(steps), "--nodes", "20", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["counts"][0]["scaling_factor_interval"][1] > 1.005
    assert not [
        finding for finding in result["findings"] if "above 1," in finding["text"]
    ]
