"""Fits of logs with one row a size: the form that is chosen, and how far to trust it, on sizes not seen."""

from __future__ import annotations

import json
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pytest

from ddlkit import store
from ddlkit.core.cost import AlphaBeta, Segments, costs_from_dict, gap
from ddlkit.core.errors import UserError
from ddlkit.core.fit import (
    COUNTS,
    SIMPLE_FIRST,
    THROUGH_ALL,
    fit,
    held_out_errors,
)
from ddlkit.core.sparse import SparseGather
from ddlkit.formats import messages

LOGS = sorted((store.ROOT / "data/external/abci").glob("allreduce_*.log.gz"))
COST = AlphaBeta(2e-5, 1e-10, workers=8, collective="all_gather")


def log(path: Path) -> tuple[np.ndarray, np.ndarray]:
    sizes, seconds, _ = messages.read_bytes_seconds(path, place="out_of_place")
    return sizes.astype(float), seconds


@pytest.mark.parametrize("form", ["segments", "table"])
def test_intervals_hold_beyond_the_sizes_of_real_logs(form: str) -> None:
    """Fitted without the largest, or smallest, sizes of a log, and asked for those, up to 16 times beyond."""
    inside = []
    for path in LOGS:
        sizes, seconds = log(path)
        for kept in (slice(None, -1), slice(None, -4), slice(4, None)):
            seen = np.isin(sizes, sizes[kept])
            low, high = fit(form, sizes[kept], seconds[kept]).interval(sizes[~seen])
            inside += list((low <= seconds[~seen]) & (seconds[~seen] <= high))
    assert len(inside) == 9 * len(LOGS) and np.mean(inside) >= 0.90


def test_of_an_ideal_log_intervals_hold_nearly_all() -> None:
    """Simulated: times scatter about a line by an exponential law, whose mean twelve sizes tell."""
    sizes, at = np.geomspace(2**20, 2**28, 12), np.geomspace(2**20, 2**28, 400)
    held = []
    for seed in range(40):
        random = np.random.default_rng(seed)

        def scattered(where: np.ndarray, random: np.random.Generator = random) -> np.ndarray:
            off = random.exponential(0.03, where.size) * random.choice([-1, 1], where.size)
            return COST(where) * np.exp(off)

        low, high = fit("alpha_beta", sizes, scattered(sizes)).interval(at)
        times = scattered(at)
        held.append(np.mean((low <= times) & (times <= high)))
    assert 0.92 <= np.mean(held) <= 0.99


@pytest.mark.parametrize("path", LOGS[:1], ids=lambda path: path.name.split(".")[0])
def test_auto_takes_the_form_that_does_best_on_sizes_left_out_and_says_why(path: Path) -> None:
    rows = log(path)
    errors = {form: np.median(np.abs(held_out_errors(form, *rows)[1])) for form in SIMPLE_FIRST}
    counted = {form: COUNTS * e if form in THROUGH_ALL else e for form, e in errors.items()}
    chosen = fit("auto", *rows)
    assert counted[chosen.form] <= 1.12 * min(counted.values())
    assert chosen.held_out_error == errors[chosen.form]
    for form, error in errors.items():
        assert f"{'' if form == chosen.form else form + ' '}{error:.2%}" in chosen.why
    same = fit(chosen.form, *rows)
    assert chosen.cost.to_dict() == same.cost.to_dict()
    described = chosen.to_dict()["fit"]
    assert described["why"] == chosen.why
    assert described["median_abs_held_out_error"] == chosen.held_out_error == same.held_out_error
    np.testing.assert_array_equal(chosen.interval(rows[0]), same.interval(rows[0]))


def test_of_forms_that_do_as_well_auto_takes_the_simplest() -> None:
    sizes = np.geomspace(1e3, 1e8, 20)
    assert fit("auto", sizes, COST(sizes)).cost.form == "alpha_beta"
    jump = np.array([2e-5, 5e-4, 5e-4 - 5e6 * 1.5e-9]), np.array([2e-9, 5e-10, 2e-9])
    assert fit("auto", sizes, Segments(np.array([1e5, 5e6]), *jump)(sizes)).form == "segments"


def test_auto_is_the_line_where_no_size_can_be_spared_which_has_no_interval() -> None:
    line = fit("auto", [1e3, 1e4, 1e5], [1.0, 2.0, 3.0])
    assert (line.cost.form, line.draws) == ("alpha_beta", ())
    assert line.why.startswith("too few sizes")
    with pytest.raises(UserError, match="this fit has no interval"):
        line.interval(5e3)
    assert held_out_errors("alpha_beta", [1, 2, 3], [1, 2, 3])[1].size == 0


def least_loss(sizes: np.ndarray, seconds: np.ndarray, straight: str, minimum: int) -> float:
    """Of pieces straight in these ("l": logarithm of the size, "s": size), every cut tried by polyfit."""
    grid, losses = np.unique(sizes), []
    for cuts in combinations(range(minimum, grid.size - minimum + 1), len(straight) - 1):
        bounds = (0, *cuts, grid.size)
        if min(np.diff(bounds)) < minimum:
            continue
        loss = 0.0
        for what, (start, end) in zip(straight, pairwise(bounds), strict=True):
            inside = (sizes >= grid[start]) & (sizes <= grid[end - 1])
            x = np.log2(sizes[inside]) if what == "l" else sizes[inside] / grid[end - 1]
            line = np.polyfit(x, seconds[inside], 1, w=1 / seconds[inside])
            loss += float(np.sum((np.polyval(line, x) / seconds[inside] - 1) ** 2))
        losses.append(loss)
    return min(losses)


@pytest.mark.parametrize(
    ("form", "straight", "minimum"), [("piecewise", "ls", 2), ("segments", "sss", 3)]
)
@pytest.mark.parametrize("seed", range(3))
def test_breakpoints_by_sums_are_those_of_trying_every_one(
    form: str, straight: str, minimum: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    distinct = np.unique(np.exp(random.uniform(2, 20, 9 + seed)).round())
    sizes = np.repeat(distinct, 1 + seed % 3)
    jump = np.where(sizes > 1e5, 1e-4, 0.0)
    seconds = (1e-5 + 1e-9 * sizes + jump) * np.exp(random.normal(0, 0.05, sizes.size))
    loss = float(np.sum(fit(form, sizes, seconds, draws=0).relative_residuals ** 2))
    assert loss == pytest.approx(least_loss(sizes, seconds, straight, minimum), rel=1e-9)


def test_errors_of_one_range_of_sizes_do_not_widen_the_others() -> None:
    """A line that bends at one place, through a table of twelve sizes: wide there, narrow elsewhere."""
    sizes = np.geomspace(2**20, 2**28, 12)
    bent = COST(sizes) * np.where(np.arange(12) == 8, 1.5, 1.0)
    low, high = fit("chords", sizes, bent).interval(sizes[[2, 8]])
    width = np.log(high / low)
    assert width[1] > 10 * width[0] > 0


def test_a_gap_is_how_far_apart_the_nearest_two_sizes_lie_and_twice_as_far_is_four_times_off() -> (
    None
):
    known = np.array([1.0, 2.0, 16.0])
    around = gap(known, [0.1, 1, 1.5, 2, 3, 16, 99])
    np.testing.assert_allclose(around, np.log([2, 2, 2, 2, 8, 8, 8]))
    sizes, seconds = log(LOGS[0])
    held_out = fit("chords", sizes, seconds).held_out
    assert held_out is not None and held_out.apart == 2
    few, many = (fit("chords", sizes[::step], seconds[::step], draws=0).cost for step in (2, 1))
    ratio = held_out.log_error(3e6, few) / held_out.log_error(3e6, many)
    assert ratio == pytest.approx(4)


def test_a_fit_with_its_held_out_errors_is_read_back_from_json() -> None:
    sizes, seconds = log(LOGS[0])
    fitted = fit("auto", sizes, seconds, workers=16)
    description = fitted.to_dict()
    assert len(json.dumps(description)) < 50_000
    cost, draws = costs_from_dict(json.loads(json.dumps(description)))
    np.testing.assert_array_equal(cost(sizes), fitted.cost(sizes))
    at = np.array([1.0, 1e6, 1e9])
    read, kept = (np.array([draw(at) for draw in many]) for many in (draws, fitted.draws))
    np.testing.assert_allclose(read, kept, rtol=1e-3)
    assert {draw.workers for draw in draws} == {16}
    gathers = fit("table", sizes, seconds, workers=4, collective="all_gather").draws
    assert SparseGather(gathers[0], 0.01)(1e6) != SparseGather(gathers[1], 0.01)(1e6)


WHOLE = {"at_bytes": [1.0, 2.0], "log_errors": [0.1, 0.1], "below": 0, "above": 0, "apart": 0}


@pytest.mark.parametrize(
    "held_out",
    [
        3,
        {**WHOLE, "log_errors": ["a", 1]},
        {**WHOLE, "at_bytes": [2.0, 1.0]},
    ],
)
def test_damaged_and_older_held_out_errors_are_refused(held_out: object) -> None:
    with pytest.raises(UserError, match="held_out.*fit again"):
        costs_from_dict({**COST.to_dict(), "fit": {"held_out": held_out}})


@pytest.mark.parametrize(
    "draws",
    [3, {"count": 2}, {"count": 2, "alpha_s": [], "beta_s_per_byte": []}, {"count": "a"}],
)
def test_damaged_draws_are_refused(draws: object) -> None:
    with pytest.raises(UserError, match="draws"):
        costs_from_dict({**COST.to_dict(), "fit": {"draws": draws}})
