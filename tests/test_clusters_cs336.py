"""cs336 by bucket size: blind predictions, buckets as its programs fill them, each recursion in two ways."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlkit.core.cost import AlphaBeta
from ddlkit.core.iteration import Iteration, no_overlap
from ddlkit.core.link import Link
from ddlkit.core.plan import buffer
from ddlkit.core.units import MIB
from ddlkit.core.workload import Workload
from ddlkit.report.clusters import board, cs336
from ddlkit.report.clusters.rules import Rows, rows

ROWS = {rule: rows(rule) for rule in cs336.RULES}
SIZES = (0, MIB, 10 * MIB, 100 * MIB, 1000 * MIB)
BYTES = 7_992_940_800

instances = st.integers(0, 10**6).map(
    lambda seed: (
        np.cumsum(np.random.default_rng(seed).uniform(0, 1, 9)),
        np.random.default_rng(seed + 1).uniform(0, 1, 9),
    )
)


@pytest.mark.parametrize("rule", cs336.RULES)
@pytest.mark.parametrize("name", cs336.MODELS)
def test_predictions_are_blind(rule: str, name: str) -> None:
    found = ROWS[rule]
    hidden = replace(found, test=found.test.assign(iteration_s=np.nan, wait_s=np.nan))
    seen, blind = (cs336.iterations(one, name) for one in (found, hidden))
    said = ["predicted_s", "lower_s", "upper_s", "free"]
    assert np.isfinite(seen["predicted_s"]).all() and seen[said].equals(blind[said])
    assert set(seen["bucket_bytes"]) == set(SIZES[1:]) and len(seen) == 24


def test_the_rules_test_the_same_rows_and_differ_in_what_is_known_of_computing() -> None:
    first, second = ROWS.values()
    shown = [*cs336.CELL, "bucket_bytes", "iteration_s"]
    for part in ("calibrate", "test"):
        one, other = (getattr(found, part)[shown] for found in (first, second))
        assert sorted(one.itertuples(index=False)) == sorted(other.itertuples(index=False))
    assert first.compute.empty and len(second.compute) == 6


# -- what travels ------------------------------------------------------------------------------


@pytest.mark.parametrize("sequence", [128, 512])
def test_whatever_the_buckets_all_bytes_travel_and_computing_is_the_same(sequence: int) -> None:
    every = [cs336.messages(sequence, size) for size in SIZES]
    for work in every:
        assert work.bytes.sum() == BYTES
        assert work.compute_s == pytest.approx(1.0) and work.forward_s == pytest.approx(1 / 3)
    counts = [work.n for work in every]
    assert counts == sorted(counts, reverse=True) and counts[0] == 435


def test_a_bucket_holds_no_more_than_its_size_unless_one_gradient_does() -> None:
    largest = cs336.messages(128, 0).bytes.max()
    for size in SIZES[1:]:
        n_bytes = cs336.messages(128, size).bytes
        assert n_bytes.max() <= max(size, largest)
        # Two that are filled one after the other hold more than one may.
        assert len(n_bytes) <= 2 * BYTES / size + 1


def test_blocks_of_small_buckets_are_as_the_source_fills_them() -> None:
    """By hand: up to 1 MiB the two norms of a block share a bucket, and the last one joins the first two."""
    alone, small = (
        np.unique(cs336.messages(128, size).bytes, return_counts=True) for size in (0, MIB)
    )
    matrices = {10_240_000: 4 * 48, 40_960_000: 3 * 48, 64_000_000: 2}
    assert dict(zip(*alone, strict=True)) == {6400: 97, **matrices}
    assert dict(zip(*small, strict=True)) == {12_800: 47, 19_200: 1, **matrices}


def test_a_bucket_leaves_when_its_last_gradient_is_ready() -> None:
    """Of 1000 MiB the first holds six blocks and a part: none leaves before the gradients in it."""
    alone, large = cs336.messages(256, 0), cs336.messages(256, 1000 * MIB)
    sent = np.cumsum(large.bytes)
    ready = np.cumsum(alone.bytes)
    for at_s, so_far in zip(large.ready_s, sent, strict=True):
        assert ready[np.searchsorted(alone.ready_s, at_s + 1e-12) - 1] >= so_far
    assert large.ready_s[-1] == pytest.approx(alone.ready_s[-1])


# -- computing and messages beside each other --------------------------------------------------


@given(instances, st.integers(1, 4 * 10**6))
def test_models_of_an_iteration_keep_their_order(
    instance: tuple[np.ndarray, np.ndarray], capacity: int
) -> None:
    """Shared to the full nothing is gained by overlap."""
    gaps_s, sizes = np.diff(instance[0], prepend=0.0), np.ceil(instance[1] * 1e6).astype(int) + 1
    work, cost = Workload.from_arrays(0.3, gaps_s, sizes), AlphaBeta(0.01, 1e-6)
    whole = Iteration(work, buffer(work, capacity), cost)
    shared = replace(whole, link=Link(slowdown=1.0, message_slowdown=1.0))
    assert shared.prediction.iteration_s == pytest.approx(no_overlap(whole).iteration_s)


def test_copies_and_update_are_bytes_over_the_datasheets_rate() -> None:
    """Of hardly any computing, all in a row: buckets copy every byte twice more, the rest is divided only."""
    rate = 1935e9
    update_s = 35 * BYTES / rate
    for bucket_bytes, passes in ((0, 2), (100 * MIB, 6)):
        sent_s = cs336.cost()(cs336.messages(128, bucket_bytes).bytes).sum()
        said_s, wait_s = cs336.iteration("no_overlap", 128, bucket_bytes, 1e-9, 0.0)
        assert said_s == pytest.approx(sent_s + update_s + passes * BYTES / rate)
        assert np.isnan(wait_s)
    said_s, wait_s = cs336.iteration("workbook", 128, 0, 50.0, 0.0)
    # So slow a backward hides all but the last message; the divisions follow it.
    hidden = float(cs336.cost()(64_000_000))
    assert wait_s == pytest.approx(2 * BYTES / rate, abs=hidden)
    assert said_s == pytest.approx(50.0 + wait_s + update_s)


# -- calibration -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", cs336.MODELS)
def test_a_configurations_own_computing_meets_its_iteration_without_buckets(name: str) -> None:
    found = ROWS["cs336"]
    free = 0.3 if name in cs336.FREE else np.nan
    said = cs336.told(found, found.calibrate, name, free)[:, 0]
    assert said == pytest.approx(found.calibrate["iteration_s"].to_numpy(), rel=1e-6)


def made(found: Rows, name: str, free: float, compute_s: dict[tuple[int, int], float]) -> Rows:
    """Rows as if the machine followed the model: what is calibrated and what is tested."""
    parts = {}
    for part in ("calibrate", "test"):
        frame = getattr(found, part)
        each = [
            cs336.iteration(name, r.sequence, r.bucket_bytes, compute_s[r.batch, r.sequence], free)
            for r in frame.itertuples()
        ]
        iteration_s, wait_s = np.array(each).T
        parts[part] = frame.assign(iteration_s=iteration_s, wait_s=wait_s)
    return replace(found, **parts)


@pytest.mark.parametrize(("name", "truth"), [("workbook_slowed", 0.21), ("workbook_shared", 0.37)])
def test_a_machine_that_follows_a_model_is_predicted_exactly(name: str, truth: float) -> None:
    """Its slowdown is found in iterations of long computing, which nothing else explains."""
    found = ROWS["cs336-serial"]
    known = cs336.computing(found, name, truth)
    longer = {at: 4 * alone_s for at, alone_s in known.items()}
    more_s = [3 * known[r.batch, r.sequence] for r in found.compute.itertuples()]
    alone = found.compute.assign(iteration_s=found.compute["iteration_s"] + more_s)
    said = cs336.iterations(replace(made(found, name, truth, longer), compute=alone), name)
    assert set(said["free"].round(4)) == {truth}
    assert said["predicted_s"].to_numpy() == pytest.approx(said["measured_s"].to_numpy(), rel=1e-4)


def test_computing_alone_is_what_is_left_of_an_iteration_without_overlap() -> None:
    found = ROWS["cs336-serial"]
    known = cs336.computing(found, "workbook", np.nan)
    division_s = 2 * BYTES / 1935e9
    for row in found.compute.itertuples():
        said_s, _ = cs336.iteration(
            "no_overlap", row.sequence, 0, known[row.batch, row.sequence], 0.0
        )
        # The serial program averages within the all-reduce: it divides nothing.
        assert said_s == pytest.approx(row.iteration_s + division_s)


# -- what is judged ----------------------------------------------------------------------------


def cell(measured: list[float], predicted: list[float]) -> pd.DataFrame:
    n = len(measured)
    return pd.DataFrame(
        {"rule": "r", "model": "m", "batch": 1, "sequence": 1, "bucket_bytes": range(n)}
    ).assign(measured_s=measured, predicted_s=predicted)


def right(*cells: pd.DataFrame) -> tuple[int, float]:
    whole = pd.concat([one.assign(batch=k) for k, one in enumerate(cells)])
    (row,) = cs336.pairs(whole).itertuples()
    return row.pairs, row.right


def test_pairs_that_differ_by_more_than_one_percent_are_judged_by_their_order() -> None:
    assert right(cell([1.0, 1.02, 1.05], [3, 4, 5])) == (3, 1.0)
    assert right(cell([1.0, 1.02, 1.05], [5, 4, 3])) == (3, 0.0)
    assert right(cell([1.0, 1.005, 1.02], [1, 9, 2])) == (2, 0.5)
    # Not right are ties, also but for roundings; and no pair is of two configurations.
    assert right(cell([1.0, 1.5], [2.0, 2.0 * (1 + 1e-12)])) == (1, 0.0)
    assert right(cell([1.0, 1.5], [1, 2]), cell([9.0, 9.0], [2, 1])) == (1, 1.0)
    pairs, share = right(cell([1.0, 1.0], [1, 2]))
    assert pairs == 0 and np.isnan(share)


@given(st.lists(st.floats(0.1, 10), min_size=2, max_size=6), st.floats(0.1, 5))
def test_the_share_of_pairs_knows_the_order_only(measured: list[float], factor: float) -> None:
    """The truth, however stretched, is all right; reversed, all wrong; the order of rows is nothing."""
    exact = cell(measured, [factor * one**3 for one in measured])
    pairs, share = right(exact)
    back, reversed_share = right(cell(measured, [-one for one in measured])[::-1])
    assert back == pairs
    if pairs:
        assert (share, reversed_share) == (1.0, 0.0)


def test_messages_that_are_slowed_down_too_are_needed_where_computing_is_known() -> None:
    """The scoreboard of 24 rows: without overlap and without slowdown every model is off by more than 5%."""
    said = board.SOURCES["cs336"]()
    judged = board.scoreboard(said).set_index(["rule", "model"])
    assert set(judged["n"]) == {24} and set(said["rule"]) == set(cs336.RULES)
    known = judged.loc["cs336-serial"]["median_error"]
    assert known["workbook_shared"] == known.min()
    unslowed = known.drop(["workbook_shared", "workbook_slowed"])
    assert (unslowed > 2 * known["workbook_shared"]).all()


def test_the_goal_of_four_fifths_of_pairs_is_missed_by_one_pair_where_computing_is_inverted() -> (
    None
):
    ordered = cs336.pairs(cs336.predictions()).set_index(["rule", "model"])
    assert set(ordered["pairs"]) == {18}
    # What knows no cost of a message cannot order them.
    for blind in ("compute_only", "dag"):
        assert (ordered["right"].xs(blind, level="model") == 0).all()
    assert ordered["right"]["cs336", "workbook"] == pytest.approx(14 / 18)
    assert (ordered["right"]["cs336-serial"][list(cs336.OURS)] >= 0.8).all()
    assert not set(cs336.FREE) & set(ordered.loc["cs336"].index)


# -- what it hangs on ----------------------------------------------------------------------------


def test_the_fitted_slowdown_hangs_on_the_memorys_rate_and_the_order_of_buckets_does_not() -> None:
    """The slower the memory, the more of a serial iteration is its update, and the less is lost beside."""
    found = cs336.by_memory_rate("workbook_shared", (0.7, 1.0, 1.1)).set_index("reached")
    known = board.SOURCES["cs336"]().query("rule == 'cs336-serial' and model == 'workbook_shared'")
    assert found.loc[1.0, "free"] == known["free"].iloc[0]
    error = known["predicted_s"] / known["measured_s"] - 1
    assert found.loc[1.0, "median_error"] == error.abs().median()
    assert (
        found["free"].is_monotonic_increasing and found["free"].iloc[0] < 0.7 * found["free"][1.0]
    )
    assert found["right"].nunique() == 1


@given(st.integers(1, 40), st.data())
def test_an_interval_of_a_share_holds_it_and_is_the_one_whose_ends_are_just_credible(
    n: int, data: st.DataObject
) -> None:
    right = data.draw(st.integers(0, n))
    low, high = cs336.of_all_pairs(right, n)
    assert 0 <= low <= right / n <= high <= 1
    other = cs336.of_all_pairs(n - right, n)
    assert other == pytest.approx((1 - high, 1 - low))
    if right == n:  # all right: at the lower end that has a chance of 2.5%
        assert low**n == pytest.approx(0.025)


def test_fourteen_of_eighteen_pairs_tell_four_fifths_neither_from_half_nor_from_all() -> None:
    low, high = cs336.of_all_pairs(14, 18)
    assert low < 0.8 < high and 15 / 18 > 0.8 > 14 / 18
    assert low == pytest.approx(0.5236, abs=1e-3) and high == pytest.approx(0.9359, abs=1e-3)


# -- which rule to believe -----------------------------------------------------------------------


def test_computing_that_is_inverted_contradicts_the_serial_iterations_and_the_estimate_meets_them() -> (
    None
):
    """No overlap is in them: with a recursion's inverted computing each takes a fifth more than it took."""
    found = cs336.serial("workbook")
    assert len(found) == 6 and (found["inverted_s"] > 1.2 * found["measured_s"]).all()
    estimate = cs336.computing(ROWS["cs336-serial"], "workbook", 0.0)
    for row in found.itertuples():
        again_s = estimate[row.batch, row.sequence] + cs336.after_backward_s(row.sequence)
        assert again_s == pytest.approx(row.measured_s)


def test_the_order_of_buckets_does_not_hang_on_the_estimate_of_computing() -> None:
    found = cs336.by_computing("workbook", (0.8, 1.0, 1.2)).set_index("longer")["right"]
    known = cs336.pairs(cs336.predictions()).set_index(["rule", "model"])["right"]
    assert found[1.0] == known["cs336-serial", "workbook"]
    assert (found >= 0.8).all()
