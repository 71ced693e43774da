"""Laws of the fits: they recover the truth they were drawn from, and say how sure they are."""

from __future__ import annotations

import json
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ddlkit import cli, store
from ddlkit.core.cost import (
    AlphaBeta,
    Chords,
    MessageCost,
    Piecewise,
    Segments,
    Table,
    costs_from_dict,
    gap,
)
from ddlkit.core.errors import UserError
from ddlkit.core.fit import (
    DISCOUNT_THROUGH_ALL,
    SIMPLE_FIRST,
    THROUGH_ALL,
    fit,
    held_out_errors,
    least_sizes_to_hold_out,
    unseen_errors,
)
from ddlkit.core.pieces import LINES
from ddlkit.core.sparse import SparseGather
from ddlkit.formats import messages
from ddlkit.model import fits
from workbook.common import places
from workbook.validate import clusters

SIZES = np.geomspace(1024, 64 * 2**20, 17).round()
TRUTHS: dict[str, MessageCost] = {
    "alpha_beta": AlphaBeta(1e-3, 8e-9),
    "piecewise": Piecewise(3e5, 2e-4, -1e-3, 8e-9, 1e-4),
    "segments": Segments(
        *map(np.array, ([3e5, 9e6], [1e-4, 3e-3, 3e-2], [2e-8, 9e-9, 7e-9]))
    ),
    "table": Table(SIZES, 1e-3 + 8e-9 * SIZES),
    "chords": Chords(SIZES, 1e-3 + 8e-9 * SIZES),
}


def samples(
    truth: MessageCost, noise: float, repeats: int = 9, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    sizes = np.repeat(SIZES, repeats)
    return sizes, truth(sizes) * np.exp(
        np.random.default_rng(seed).normal(0, noise, sizes.size)
    )


@pytest.mark.parametrize("form", SIMPLE_FIRST)
def test_exact_data_give_the_exact_cost_and_json_keeps_the_draws_of_scattered_ones(
    form: str,
) -> None:
    exact = fit(form, *samples(TRUTHS[form], 0.0), draws=2)
    np.testing.assert_allclose(exact.cost(SIZES), TRUTHS[form](SIZES), rtol=1e-6)
    assert np.abs(exact.relative_residuals).max() < 1e-6
    noisy = fit(form, *samples(TRUTHS[form], 0.05), workers=4, draws=5)
    cost, draws = costs_from_dict(json.loads(json.dumps(noisy.to_dict())))
    np.testing.assert_array_equal(cost(SIZES), noisy.cost(SIZES))
    read, kept = ([draw(1e6) for draw in many] for many in (draws, noisy.draws))
    assert read == kept
    assert cost.workers == 4


def test_intervals_of_repeats_hold_the_truth_as_often_as_they_should() -> None:
    inside, truth_s = [], TRUTHS["alpha_beta"](SIZES)
    for seed in range(60):
        line = fit(
            "alpha_beta", *samples(TRUTHS["alpha_beta"], 0.01, 25, seed), draws=100
        )
        lower, upper = line.interval(SIZES)
        inside.append((lower <= truth_s) & (truth_s <= upper))
    assert 0.90 <= np.mean(inside) <= 0.99


def test_lines_are_what_their_names_say() -> None:
    sizes, seconds = samples(TRUTHS["segments"], 0.05)
    medians = np.array([np.median(seconds[sizes == size]) for size in SIZES])
    costs = {
        how: fit(f"alpha_beta:{how}", sizes, seconds, draws=0).cost for how in LINES
    }
    for how in LINES:
        exact = fit(f"alpha_beta:{how}", *samples(TRUTHS["alpha_beta"], 0.0), draws=2)
        for line in (exact.cost, *exact.draws):
            assert (line.alpha_s, line.beta_s_per_byte) == pytest.approx(
                (1e-3, 8e-9), rel=1e-6
            )
    assert costs["ends"](SIZES[[0, -1]]) == pytest.approx(medians[[0, -1]])
    slope, start = np.polyfit(SIZES, medians, 1)
    assert costs["medians"].alpha_s == pytest.approx(max(start, 0.0))
    off = {how: cost(sizes) - seconds for how, cost in costs.items()}
    assert min(off, key=lambda how: np.sum(off[how] ** 2)) == "least_squares"
    assert min(off, key=lambda how: np.sum((off[how] / seconds) ** 2)) == "relative"
    bare = fit("alpha_beta", sizes, seconds, draws=0).cost
    assert bare.to_dict() == costs["relative"].to_dict()


def test_a_given_threshold_is_kept_and_the_found_one_is_no_worse() -> None:
    data = samples(TRUTHS["piecewise"], 0.05)
    fits = [fit(f"piecewise{at}", *data, draws=0) for at in ("", ":3e5", ":8KiB")]
    losses = [float(np.sum(each.relative_residuals**2)) for each in fits]
    assert losses[0] <= losses[1] * (1 + 1e-9) < losses[2]
    assert fits[2].cost.to_dict()["threshold_bytes"] == 8192
    assert held_out_errors("piecewise:3e5", *data).errors.size == SIZES.size - 2


def test_another_run_is_predicted_by_costs_that_have_not_seen_the_size() -> None:
    seen, truth = list[set[float]](), TRUTHS["alpha_beta"]

    def make(sizes: np.ndarray, seconds: np.ndarray) -> MessageCost:
        seen.append(set(sizes))
        return fit("alpha_beta", sizes, seconds, draws=0).cost

    others = np.repeat([SIZES[3], 5000.0, SIZES[8], 3e8], 3)
    sizes, errors = unseen_errors(
        make, samples(truth, 0.0), (others, 2 * truth(others))
    )
    assert sizes.tolist() == sorted(set(others))
    np.testing.assert_allclose(errors, -0.5, rtol=1e-6)
    assert seen == [set(SIZES) - {size} for size in sizes]


@pytest.mark.parametrize(
    ("form", "sizes", "seconds", "message"),
    [
        (
            "alpha_beta",
            [1, 1, 1],
            [1, 2, 3],
            "at least 3 different sizes, but these times have only 1",
        ),
        ("alpha_beta", [1, 2, 3], [1, 0, 3], "row 1: time is 0"),
        ("alpha_beta", [0, 2, 3], [1, 2, 3], "row 0: size is 0"),
        ("alpha_beta", [1, 2], [1, 2, 3], "2 sizes but 3 times"),
        ("piecewise", [1, 2, 3, 4], [1, 2, 3, 4], "at least 5 different sizes"),
        ("spline", [1, 2, 3], [1, 2, 3], "unknown cost form 'spline'"),
        ("segments:2KB", [1, 2, 3], [1, 2, 3], "write segments alone"),
        (
            "alpha_beta:nan",
            [1, 2, 3],
            [1, 2, 3],
            "use alpha_beta:relative, alpha_beta:least_squares",
        ),
        (
            "piecewise:2",
            [1, 2, 3, 4, 5],
            [1, 2, 3, 4, 5],
            "1 size was measured below 2 B",
        ),
    ],
)
def test_degenerate_data_are_refused(
    form: str, sizes: list, seconds: list, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        fit(form, sizes, seconds)


def test_twelve_sizes_tell_dense_tables_to_one_percent_within_intervals_of_three_errors() -> (
    None
):
    """95% of the rows would need intervals of five times the error: NCCL's outliers are many errors away."""
    dense = clusters.judged(clusters.dense_predictions())
    assert dense["median"].median() <= 0.0103 and dense["median"].min() < 0.004
    assert (
        dense["below_25_mib"].median() <= 0.016 and dense["below_25_mib"].max() <= 0.031
    )
    assert (dense["half_width"] / dense["median"]).median() <= 3
    assert dense["covered"].sum() / dense["n"].sum() >= 0.87


KEYS = ["link", "ranks", "collective"]
KEPT = pd.read_csv(Path(__file__).with_name("recorded_fits.csv"))


def recorded(name: str) -> pd.DataFrame:
    """Rows of a recorded table that were sent one by one."""
    frame = store.load_table(places.RECORDED / name, "collectives")
    return frame[(frame["ranks"] > 1) & (frame["in_flight"] == 1)]


@pytest.mark.parametrize("table", KEPT["table"].unique())
def test_recorded_calibrations_are_fitted_as_when_they_were_judged(table: str) -> None:
    """recorded_fits.csv was written by the program of 2026-11-22: fits and draws of repeats stay."""
    for key, rows in recorded(table).groupby(KEYS):
        at = np.geomspace(rows["bytes"].min(), rows["bytes"].max(), 7)[[0, 3, 6]]
        wanted = KEPT[(KEPT["table"] == table) & (KEPT[KEYS] == list(key)).all(axis=1)]
        assert len(wanted) == 4
        for numbers in wanted.itertuples(index=False):
            fitted = fit(numbers.form, rows["bytes"], rows["seconds"], draws=20)
            computed = np.concatenate([fitted.cost(at), *fitted.interval(at)])
            np.testing.assert_allclose(
                computed, numbers[5:], rtol=1e-9, err_msg=str(numbers[:5])
            )


LOGS = sorted((places.ROOT / "data/external/abci").glob("allreduce_*.log.gz"))
COST = AlphaBeta(2e-5, 1e-10, workers=8, collective="all_gather")


def log(path: Path) -> tuple[np.ndarray, np.ndarray]:
    sizes, seconds, _ = messages.read_bytes_seconds(path, place="out_of_place")
    return sizes.astype(float), seconds


@pytest.mark.parametrize(
    ("form", "least"), [("auto", 0.9), ("table", 0.92), ("alpha_beta", 0.95)]
)
def test_intervals_hold_a_size_that_the_fit_has_not_seen(
    form: str, least: float, request: pytest.FixtureRequest
) -> None:
    """On twelve nccl-tests logs, every eleventh inner size held out, and with --long every fourth."""
    step = 4 if request.config.getoption("--long") else 11
    inside = []
    for sizes, seconds in map(log, LOGS):
        for k in range(1, len(sizes) - 1, step):
            kept = np.arange(len(sizes)) != k
            low_s, high_s = fit(form, sizes[kept], seconds[kept]).interval(sizes[k])
            inside.append(low_s <= seconds[k] <= high_s)
    assert least <= np.mean(inside)


@pytest.mark.parametrize("form", ["segments", "table"])
def test_intervals_hold_beyond_the_sizes_of_real_logs(form: str) -> None:
    """Fitted without the largest, or smallest, sizes of a log, and asked for those, up to 16 times beyond."""
    inside = []
    for sizes, seconds in map(log, LOGS):
        for kept in (slice(None, -1), slice(None, -4), slice(4, None)):
            seen = np.isin(sizes, sizes[kept])
            low, high = fit(form, sizes[kept], seconds[kept]).interval(sizes[~seen])
            inside += list((low <= seconds[~seen]) & (seconds[~seen] <= high))
    assert len(inside) == 9 * len(LOGS) and np.mean(inside) >= 0.90


def test_auto_takes_the_form_that_does_best_on_sizes_left_out_and_is_read_back() -> (
    None
):
    rows, at = log(LOGS[0]), np.array([1.0, 1e6, 1e9])
    errors = {
        form: np.median(np.abs(held_out_errors(form, *rows)[1]))
        for form in SIMPLE_FIRST
    }
    counted = {
        form: DISCOUNT_THROUGH_ALL * e if form in THROUGH_ALL else e
        for form, e in errors.items()
    }
    chosen = fit("auto", *rows, workers=16)
    assert counted[chosen.form] <= 1.12 * min(counted.values())
    assert chosen.held_out_error == errors[chosen.form]
    for form, error in errors.items():
        assert f"{form} {100 * error:.3g}%" in chosen.why
        assert f"{100 * counted[form]:.3g}%" in chosen.why
    same = fit(chosen.form, *rows, workers=16)
    assert chosen.cost.to_dict() == same.cost.to_dict()
    described = chosen.to_dict()["fit"]
    assert described["why_this_form"] == chosen.why
    assert (
        described["median_abs_held_out_error"]
        == chosen.held_out_error
        == same.held_out_error
    )
    np.testing.assert_array_equal(chosen.interval(rows[0]), same.interval(rows[0]))
    text = json.dumps(chosen.to_dict())
    cost, draws = costs_from_dict(json.loads(text))
    np.testing.assert_array_equal(
        [draw(at) for draw in draws], [d(at) for d in chosen.draws]
    )
    assert len(text) < 50_000 and {draw.workers for draw in draws} == {
        cost.workers
    } == {16}
    gathers = fit("table", *rows, workers=4, collective="all_gather").draws
    assert SparseGather(gathers[0], 0.01)(1e6) != SparseGather(gathers[1], 0.01)(1e6)


def test_of_forms_that_do_as_well_auto_takes_the_simplest() -> None:
    sizes = np.geomspace(1e3, 1e8, 20)
    assert fit("auto", sizes, COST(sizes)).cost.form == "alpha_beta"
    jump = np.array([2e-5, 5e-4, 5e-4 - 5e6 * 1.5e-9]), np.array([2e-9, 5e-10, 2e-9])
    assert (
        fit("auto", sizes, Segments(np.array([1e5, 5e6]), *jump)(sizes)).form
        == "segments"
    )
    # Where no size can be spared it is the line, which has no interval.
    line = fit("auto", [1e3, 1e4, 1e5], [1.0, 2.0, 3.0])
    assert (line.cost.form, line.draws) == ("alpha_beta", ())
    assert line.why.startswith("too few sizes")
    with pytest.raises(UserError, match="this fit has no interval"):
        line.interval(5e3)
    assert held_out_errors("alpha_beta", [1, 2, 3], [1, 2, 3])[1].size == 0


def least_loss(
    sizes: np.ndarray, seconds: np.ndarray, straight: str, minimum: int
) -> float:
    """Of pieces straight in these ("l": logarithm of the size, "s": size), every cut tried by polyfit."""
    grid, losses = np.unique(sizes), []
    for cuts in combinations(
        range(minimum, grid.size - minimum + 1), len(straight) - 1
    ):
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
    assert loss == pytest.approx(
        least_loss(sizes, seconds, straight, minimum), rel=1e-9
    )


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
    assert held_out is not None and held_out.gap_power == 2
    few, many = (
        fit("chords", sizes[::step], seconds[::step], draws=0).cost for step in (2, 1)
    )
    ratio = held_out.log_error(3e6, few) / held_out.log_error(3e6, many)
    assert ratio == pytest.approx(4)


WHOLE = {
    "at_bytes": [1.0, 2.0],
    "normalized_log_errors": [0.1, 0.1],
    "growth_below": 0,
    "growth_above": 0,
    "gap_power": 0,
}


@pytest.mark.parametrize(
    "damaged",
    [
        {"held_out": 3},
        {"held_out": {**WHOLE, "normalized_log_errors": ["a", 1]}},
        {"held_out": {**WHOLE, "at_bytes": [2.0, 1.0]}},
        {"held_out": {**WHOLE, "below": -1}},
        {"draws": 3},
        {"draws": [{"alpha_s": "a"}]},
    ],
)
def test_damaged_and_older_draws_are_refused(damaged: dict) -> None:
    with pytest.raises(
        UserError, match="draws are not what ddlkit fit writes: fit again"
    ):
        costs_from_dict({**COST.to_dict(), "fit": damaged})


def test_a_comparison_holds_what_the_fits_say_and_the_command_prints_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = log(LOGS[0])
    compared, same = (
        fits.compare(*rows, "alpha_beta:ends", workers=16),
        fit("auto", *rows),
    )
    assert (
        list(compared.table.index)
        == [*SIMPLE_FIRST, "alpha_beta:ends"]
        == list(compared.fits)
    )
    assert (compared.chosen, compared.why) == (same.form, same.why)
    monkeypatch.chdir(tmp_path)
    words = (
        f"fit {LOGS[0]} --compare --form alpha_beta:ends --place out_of_place --json"
    )
    assert cli.main(words.split()) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (
        Path(answer["drawing"]).is_file() and answer["chosen_form"] == compared.chosen
    )
    for form, row in compared.table.iterrows():
        at, errors, _ = held_out_errors(str(form), *rows)
        off = np.abs(errors)
        assert row["held_out_sizes"] == len(at) == 22
        assert row["median_error"] == np.median(off) and row["worst_error"] == off.max()
        assert (compared.fits[str(form)].draws != ()) == (form == compared.chosen)
        assert answer["forms"][form]["median_error"] == pytest.approx(
            row["median_error"]
        )


@pytest.mark.parametrize("form", SIMPLE_FIRST)
def test_sizes_are_held_out_from_the_stated_number_of_sizes_on(form: str) -> None:
    needed = least_sizes_to_hold_out(form)
    for count in (needed - 1, needed):
        sizes = 1024.0 * 4.0 ** np.arange(count)
        held_out = held_out_errors(form, sizes, 1e-3 + 1e-8 * sizes)
        assert (held_out.sizes.size > 0) == (count == needed)


def test_a_comparison_of_too_few_sizes_is_refused_and_a_form_left_out_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = 1024 * 4 ** np.arange(4)
    table = pd.DataFrame({"bytes": sizes, "seconds": 1e-3 + 1e-8 * sizes})
    table[:3].to_csv("three.csv", index=False)
    table.to_csv("four.csv", index=False)
    assert cli.main(["fit", "three.csv", "--compare"]) == 2
    assert "three.csv: forms are compared" in capsys.readouterr().err
    assert [path.name for path in tmp_path.glob("*.png")] == []
    assert cli.main(["fit", "four.csv", "--compare", "--json"]) == 0
    (warning,) = json.loads(capsys.readouterr().out)["warnings"]
    assert "piecewise" in warning and "at least 6 different sizes" in warning


@pytest.mark.parametrize(
    ("sizes", "of_each"),
    [
        ([2**20], False),
        ([2**20] * 3, True),
        ([2**20, 2**21], False),
        ([2, 2**20], False),
    ],
)
def test_a_size_that_several_messages_have_is_not_taken_for_their_sum(
    sizes: list[int], of_each: bool
) -> None:
    measured = fits.Measured.of([1024, 4096], "nccl")
    (doubt,) = fits.doubts("cuda", measured, sizes)
    assert ("1 MiB each" in doubt) == of_each
