"""Fits of logs with one row a size: the form that is chosen, and how far to trust it, on sizes not seen."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddlkit import store
from ddlkit.core import fit as fitting
from ddlkit.core.cost import AlphaBeta, Segments
from ddlkit.core.doubt import TRUSTED, HeldOut, Off, falling, gap
from ddlkit.core.errors import UserError
from ddlkit.core.fit import (
    COUNTS,
    SIMPLE_FIRST,
    THROUGH_ALL,
    choose_form,
    costs_from_dict,
    fit,
    held_out_errors,
)
from ddlkit.core.sparse import SparseGather
from ddlkit.formats import messages
from ddlkit.report import fits

LOGS = sorted((store.ROOT / "data/external/abci").glob("allreduce_*.log.gz"))
COST = AlphaBeta(2e-5, 1e-10, workers=8, collective="all_gather")
DENSE = np.unique(np.geomspace(4, 2**30, 1024).round())


def once(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same, which remembers what it found for equal arguments, arrays among them."""
    found: dict[tuple[object, ...], Any] = {}

    def remembering(*given: Any, **known: Any) -> Any:
        key = tuple(one.tobytes() if isinstance(one, np.ndarray) else repr(one) for one in given)
        if (key, repr(known)) not in found:
            found[key, repr(known)] = function(*given, **known)
        return found[key, repr(known)]

    return remembering


@pytest.fixture(scope="module", autouse=True)
def the_same_rows_are_fitted_once() -> Iterator[None]:
    """To leave out two sizes of a log is the same in either order, alone and among the forms of "auto"."""
    method, fitters = fitting._method, cache(lambda form, columns: once(method(form, columns)[1]))

    def remembering(form: str, columns: int) -> tuple[Any, fitting.Fitter, int]:
        kind, _, least = method(form, columns)
        return kind, fitters(form, columns), least

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fitting, "_method", remembering)
        patch.setattr(fitting, "_unseen", once(fitting._unseen))
        yield


@cache
def log(path: Path, place: str | None = "out_of_place") -> tuple[np.ndarray, np.ndarray]:
    """Sizes and seconds of a log: a row a size, or two where both places are asked for."""
    sizes, seconds, _ = messages.read_bytes_seconds(path, place=place)
    return sizes.astype(float), seconds


def dense(repeats: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """A thousand sizes of a cost with a jump, as noisy as a log."""
    sizes = np.repeat(DENSE, repeats)
    noise = np.random.default_rng(0).normal(0, 0.02, sizes.size)
    return sizes, (1e-5 + 1e-9 * sizes + 3e-4 * (sizes > 1e6)) * np.exp(noise)


SLOW = ("auto", "piecewise", "piecewise:joined", "segments", "segments:joined", "segments:jump")
EVERY = dict.fromkeys(SLOW, 4)
"""Of these forms every fourth size, of others every second, is left out and fitted without."""


def inside(form: str, path: Path, place: str | None) -> list[bool]:
    """Of inner sizes of a log: whether its times are in the interval of the fit that has not seen it."""
    return fits.held_intervals(form, *log(path, place), EVERY.get(form, 2)).tolist()


@pytest.mark.parametrize(
    ("form", "place"),
    [
        *((form, "out_of_place") for form in (*SIMPLE_FIRST, "auto")),
        ("table", None),
    ],
)
def test_intervals_cover_sizes_of_real_logs_that_the_fit_has_not_seen(
    form: str, place: str | None
) -> None:
    """Of all logs together 90 to 99%; of none so few that chance (once in 1000) would not do it."""
    assert len(LOGS) == 12
    covered = {path.name: inside(form, path, place) for path in LOGS}
    assert 0.90 <= np.mean(sum(covered.values(), [])) <= 0.99
    (n,) = {len(one) for one in covered.values()}
    assert n == -(-22 // EVERY.get(form, 2)) * (1 if place else 2)
    fewest = {6: 3, 11: 7, 22: 17, 44: 36}[n]  # fewer of n at 95%: less than 0.1%
    assert min(sum(one) for one in covered.values()) >= fewest, {
        name: f"{sum(one)} of {n}" for name, one in covered.items()
    }


@pytest.mark.parametrize("form", ["segments", "table"])
def test_intervals_hold_beyond_the_sizes_of_real_logs(form: str) -> None:
    """Fitted without the largest, or smallest, sizes of a log, and asked for those, up to 16 times beyond."""
    found = []
    for path in LOGS:
        sizes, seconds = log(path)
        for kept in (slice(None, -1), slice(None, -4), slice(4, None)):
            there = np.isin(sizes, sizes[kept])
            low, high = fit(form, sizes[kept], seconds[kept]).interval(sizes[~there])
            found += list((low <= seconds[~there]) & (seconds[~there] <= high))
    assert len(found) == 9 * len(LOGS) and np.mean(found) >= 0.90


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.name.split(".")[0])
def test_auto_takes_the_form_that_does_best_on_sizes_left_out_and_says_why(path: Path) -> None:
    rows = log(path)
    errors = {form: np.median(np.abs(held_out_errors(form, *rows)[1])) for form in SIMPLE_FIRST}
    counted = {form: COUNTS * e if form in THROUGH_ALL else e for form, e in errors.items()}
    found = fit("auto", *rows)
    assert counted[found.form] <= 1.12 * min(counted.values())
    assert found.form == choose_form(errors)
    assert found.held_out_error == errors[found.form]
    for form, error in errors.items():
        assert f"{'' if form == found.form else form + ' '}{error:.2%}" in found.why
    same = fit(found.form, *rows)
    assert found.cost.to_dict() == same.cost.to_dict()
    described = found.to_dict()["fit"]
    assert described["why"] == found.why
    assert described["median_abs_held_out_error"] == found.held_out_error == same.held_out_error
    np.testing.assert_array_equal(found.interval(rows[0]), same.interval(rows[0]))


def test_of_forms_that_do_as_well_auto_takes_the_simplest() -> None:
    sizes = np.geomspace(1e3, 1e8, 20)
    assert fit("auto", sizes, COST(sizes)).cost.form == "alpha_beta"
    bent = Segments(np.array([1e5]), np.array([2e-5, 1e-5]), np.array([1e-10, 2e-10]))
    assert fit("auto", sizes, bent(sizes)).form == "segments:joined"
    jump = np.array([2e-5, 5e-4, 5e-4 - 5e6 * 1.5e-9]), np.array([2e-9, 5e-10, 2e-9])
    assert fit("auto", sizes, Segments(np.array([1e5, 5e6]), *jump)(sizes)).form == "segments:jump"


def test_auto_is_the_line_where_no_size_can_be_spared_which_has_no_interval() -> None:
    found = fit("auto", [1e3, 1e4, 1e5], [1.0, 2.0, 3.0])
    assert (found.cost.form, found.draws) == ("alpha_beta", ())
    assert found.why.startswith("too few sizes")
    with pytest.raises(UserError, match="this fit has no interval"):
        found.interval(5e3)
    assert held_out_errors("alpha_beta", [1, 2, 3], [1, 2, 3])[1].size == 0


# -- breakpoints ---------------------------------------------------------------------------------


def least_loss(sizes: np.ndarray, seconds: np.ndarray, straight: str, minimum: int) -> float:
    """Of pieces straight in these ("l": logarithm of the size, "s": size), every cut tried by polyfit."""
    grid, losses = np.unique(sizes), []
    for cuts in combinations(range(minimum, grid.size - minimum + 1), len(straight) - 1):
        bounds = (0, *cuts, grid.size)
        if min(np.diff(bounds)) < minimum:
            continue
        loss = 0.0
        for what, (start, end) in zip(straight, pairwise(bounds), strict=True):
            here = (sizes >= grid[start]) & (sizes <= grid[end - 1])
            x = np.log2(sizes[here]) if what == "l" else sizes[here] / grid[end - 1]
            line = np.polyfit(x, seconds[here], 1, w=1 / seconds[here])
            loss += float(np.sum((np.polyval(line, x) / seconds[here] - 1) ** 2))
        losses.append(loss)
    return min(losses)


@pytest.mark.parametrize(
    ("form", "straight", "minimum"), [("piecewise", "ls", 2), ("segments", "sss", 3)]
)
@pytest.mark.parametrize("seed", range(12))
def test_breakpoints_by_sums_are_those_of_trying_every_one(
    form: str, straight: str, minimum: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    distinct = np.unique(np.exp(random.uniform(2, 20, 9 + seed % 6)).round())
    sizes = np.repeat(distinct, 1 + seed % 3)
    jump = np.where(sizes > 1e5, 1e-4, 0.0)
    seconds = (1e-5 + 1e-9 * sizes + jump) * np.exp(random.normal(0, 0.05, sizes.size))
    loss = float(np.sum(fit(form, sizes, seconds, draws=0).relative_residuals ** 2))
    pieces = straight if sizes.size and distinct.size >= minimum * len(straight) else straight[:2]
    assert loss == pytest.approx(least_loss(sizes, seconds, pieces, minimum), rel=1e-9)


@pytest.mark.parametrize("form", SIMPLE_FIRST)
def test_a_thousand_sizes_have_a_short_description(form: str) -> None:
    found = fit(form, *dense())
    assert len(json.dumps(found.to_dict())) < 50_000
    assert len(found.draws) == 200


def test_the_jump_is_found_among_a_thousand_sizes() -> None:
    found = fit("segments", *dense(), draws=0).cost
    assert isinstance(found, Segments)
    nearest = found.breaks_bytes[np.argmin(np.abs(np.log(found.breaks_bytes / 1e6)))]
    assert nearest == pytest.approx(1e6, rel=0.03)


# -- what is left open ---------------------------------------------------------------------------


def test_intervals_widen_beyond_the_fitted_sizes_the_further_the_more() -> None:
    sizes, seconds = log(LOGS[0])
    found = fit("auto", sizes, seconds)
    for beyond in (sizes[-1] * np.array([1, 2, 8, 64]), sizes[0] / np.array([1, 1.5, 2, 4])):
        low, high = found.interval(beyond)
        assert np.all(np.diff(high / low) > 0)


@pytest.mark.parametrize("form", ["segments", "chords"])
def test_intervals_follow_one_power_of_the_size_and_of_what_is_apart_around_it(form: str) -> None:
    sizes, seconds = log(LOGS[0])
    found = fit(form, sizes, seconds)
    assert found.held_out
    inside = np.geomspace(sizes[0], sizes[-1], 97)
    around = gap(sizes, inside) ** found.held_out.apart
    for draw in found.draws[::50]:
        off = np.log(draw(inside) / found.cost(inside))
        scaled = off * inside**found.held_out.falls / around
        np.testing.assert_allclose(scaled, scaled[0], rtol=1e-6)
        assert scaled[0] != 0
    assert (found.held_out.apart > 0) == (form == "chords"), "only of forms that neighbours decide"


@pytest.mark.parametrize("power", [-0.6, 0.0, 0.4])
def test_the_power_with_which_errors_fall_is_found_and_half_of_it_trusted(power: float) -> None:
    random = np.random.default_rng(0)
    sizes = np.geomspace(1e3, 1e9, 400)
    found = [falling(sizes, random.exponential(size=sizes.size) * sizes**-power) for _ in range(5)]
    assert np.median(found) == pytest.approx(TRUSTED * power, abs=0.02)
    assert falling(sizes * 7, sizes**-power) == falling(sizes, 3 * sizes**-power)
    assert falling(sizes, 0 * sizes) == falling(np.full(5, 8.0), np.arange(5.0)) == 0


def test_a_gap_is_how_far_apart_the_nearest_two_sizes_lie() -> None:
    known = np.array([1.0, 2.0, 16.0])
    np.testing.assert_allclose(
        gap(known, [0.1, 1, 1.5, 2, 3, 16, 99]), np.log([2, 2, 2, 2, 8, 8, 8])
    )


@pytest.mark.parametrize("falls", [0.0, 0.3])
def test_of_an_ideal_log_intervals_hold_as_often_as_the_law_says(falls: float) -> None:
    """Simulated: times scatter about a line, by one law whose width falls with the size; 95% in the mean."""
    sizes, at = np.geomspace(2**20, 2**28, 12), np.geomspace(2**20, 2**28, 400)
    held = []
    for seed in range(40):
        random = np.random.default_rng(seed)
        off = lambda where: random.exponential(0.03, where.size) * (where / 2**20) ** -falls  # noqa: B023, E731
        sign = lambda where: random.choice([-1, 1], where.size)  # noqa: B023, E731
        calibrated = COST(sizes) * np.exp(sign(sizes) * off(sizes))
        low, high = fit("alpha_beta", sizes, calibrated).interval(at)
        times = COST(at) * np.exp(sign(at) * off(at))
        held.append(np.mean((low <= times) & (times <= high)))
    assert 0.92 <= np.mean(held) <= 0.99


def test_two_rows_a_size_are_still_too_few_for_resamples_and_four_are_not() -> None:
    sizes, seconds = log(LOGS[0])
    for repeats, held_out in ((1, True), (3, True), (4, False)):
        found = fit("table", np.repeat(sizes, repeats), np.repeat(seconds, repeats), draws=4)
        assert (found.held_out is not None) == held_out
        assert len(found.draws) == 4


def test_a_fit_with_its_held_out_errors_is_read_back_from_json() -> None:
    sizes, seconds = log(LOGS[0])
    found = fit("auto", sizes, seconds, workers=16)
    cost, draws = costs_from_dict(json.loads(json.dumps(found.to_dict())))
    np.testing.assert_array_equal(cost(sizes), found.cost(sizes))
    at = np.array([1.0, 1e6, 1e9])
    read, kept = (np.array([draw(at) for draw in many]) for many in (draws, found.draws))
    np.testing.assert_allclose(read, kept, rtol=1e-3)
    assert {draw.workers for draw in draws} == {16}


@pytest.mark.parametrize(
    "held_out", [3, {}, {"log_errors": []}, {"log_errors": ["a"]}, {"log_errors": [-0.1]}]
)
def test_damaged_held_out_errors_are_refused(held_out: object) -> None:
    edges = {"from_bytes": 1.0, "to_bytes": 2.0}
    damaged = {"below": 0.1, "above": 0.1, **held_out} if isinstance(held_out, dict) else held_out
    with pytest.raises(UserError, match="held_out"):
        costs_from_dict({**COST.to_dict(), "fit": {**edges, "held_out": damaged}})


@pytest.mark.parametrize(
    "draws",
    [3, {"count": 2}, {"count": 2, "alpha_s": [], "beta_s_per_byte": []}, {"count": "a"}],
)
def test_damaged_draws_are_refused(draws: object) -> None:
    with pytest.raises(UserError, match="draws"):
        costs_from_dict({**COST.to_dict(), "fit": {"draws": draws}})


def test_an_off_cost_is_off_by_its_factor_and_stands_for_the_same_collective() -> None:
    off = Off(COST, np.log(1.5), 1e3, 1e6, 0.1, 0.2)
    assert off(1e3) == pytest.approx(1.5 * COST(1e3)) and off(1e6) == pytest.approx(1.5 * COST(1e6))
    assert off(np.e * 1e6) == pytest.approx(1.5 * np.exp(0.2) * COST(np.e * 1e6))
    assert off(1e3 / np.e) == pytest.approx(1.5 * np.exp(0.1) * COST(1e3 / np.e))
    assert SparseGather(off, 0.01)(1e6) == pytest.approx(1.5 * SparseGather(COST, 0.01)(1e6))
    again, _ = costs_from_dict(json.loads(json.dumps(off.to_dict())))
    table = fit("chords", [1e3, 1e5, 1e6], [1.0, 2.0, 9.0], draws=0).cost
    both = Off(table, np.log(1.5), 1e3, 1e6, 0.1, 0.2, falls=0.5, apart=1.0)
    assert both(1e4) == pytest.approx(1.5 ** (10**-0.5 * np.log(100)) * table(1e4))
    assert both(3e5) == pytest.approx(1.5 ** (300**-0.5 * np.log(10)) * table(3e5))
    assert costs_from_dict(json.loads(json.dumps(both.to_dict())))[0](3e5) == both(3e5)
    with pytest.raises(UserError, match="has no sizes: apart must be 0"):
        Off(COST, 0.1, 1e3, 1e6, 0.1, 0.2, apart=0.4)
    assert again(3e7) == off(3e7) and again.workers == 8


@pytest.mark.parametrize("n", [1, 2, 19, 200])
def test_quantiles_of_held_out_errors_rise_through_the_errors_and_beyond(n: int) -> None:
    errors = np.sort(np.random.default_rng(n).exponential(size=n))
    held_out = HeldOut(errors, 1.0, 2.0, 0.0, 0.0)
    np.testing.assert_allclose(held_out.quantile(np.arange(1, n + 1) / (n + 1)), errors)
    assert np.all(np.diff(held_out.quantile(np.linspace(0, 0.999, 500))) >= 0)
    assert held_out.quantile(0.9999) > errors[-1]


def test_a_draw_starts_up_as_its_cost_does_however_far_below_the_sizes() -> None:
    """What a message's software takes is not the doubt about sizes that nobody measured."""
    sizes, seconds = log(LOGS[0])
    large = sizes >= 2**20
    found = fit("table", sizes[large], seconds[large])
    one_by_one = [draw.startup_s() / found.cost.startup_s() for draw in found.draws]
    inside = found.draws[0](sizes[large]) / found.cost(sizes[large])
    assert one_by_one[0] == pytest.approx(inside[0], rel=1e-9)
    assert max(one_by_one) < 3 and min(one_by_one) > 1 / 3
