"""Forms side by side: what the comparison says is what the fits do, on other people's logs too."""

from __future__ import annotations

import json
import re
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pytest
from PIL import Image

from ddlkit import cli, store
from ddlkit.core.cost import AlphaBeta, Segments
from ddlkit.core.errors import UserError
from ddlkit.core.fit import SIMPLE_FIRST, fit, held_out_errors
from ddlkit.core.units import MIB
from ddlkit.formats import messages
from ddlkit.report import fits, plots

LOGS = sorted((store.ROOT / "data/external/abci").glob("allreduce_*.log.gz"))
COST = AlphaBeta(2e-5, 1e-10)
DENSE = np.arange(1, 1025) * MIB


def log(path: Path) -> tuple[np.ndarray, np.ndarray]:
    sizes, seconds, _ = messages.read_bytes_seconds(path, place="out_of_place")
    return sizes.astype(float), seconds


def asked(capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    capsys.readouterr()
    status = cli.main([str(word) for word in words])
    return status, *capsys.readouterr()


# -- a calibration by twelve sizes ---------------------------------------------------------------


def test_a_calibration_takes_twelve_sizes_from_end_to_end() -> None:
    chosen = fits.calibration_sizes(DENSE)
    assert len(chosen) == fits.CALIBRATION == 12
    assert set(chosen) <= set(DENSE) and {chosen[0], chosen[-1]} == {DENSE[0], DENSE[-1]}
    wanted = np.geomspace(DENSE[0], DENSE[-1], 12)
    assert np.all(np.abs(chosen - wanted) <= 0.5 * MIB + 1)
    assert fits.calibration_sizes([8, 4, 8, 2]).tolist() == [2, 4, 8]


@pytest.mark.parametrize("form", SIMPLE_FIRST)
def test_it_is_judged_where_it_was_not_fitted_and_right_where_the_truth_is_its_own(
    form: str,
) -> None:
    at, errors = fits.calibrated_errors(form, DENSE, COST(DENSE))
    assert set(at) == set(DENSE) - set(fits.calibration_sizes(DENSE))
    if form not in ("piecewise:joined", "piecewise", "table", "curve"):
        assert np.abs(errors).max() < 1e-6
    cost = fit(form, *(c[np.isin(DENSE, at, invert=True)] for c in (DENSE, COST(DENSE))), draws=0)
    np.testing.assert_allclose(errors, cost.cost(at) / COST(at) - 1, atol=1e-12)


def dense_like_nccl(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """1,024 sizes of a collective that changes its protocol once, 1% noise: made up, for want of a log."""
    truth = Segments(
        np.array([4.0, 48.0]) * MIB,
        np.array([4e-5, 9e-5, 9e-5 + 48 * MIB * 1e-12]),
        np.array([1.2e-11, 7e-12, 6e-12]),
    )
    noise = np.random.default_rng(seed).normal(0, 0.01, DENSE.size)
    return DENSE, truth(DENSE) * np.exp(noise)


@pytest.mark.parametrize("seed", range(4))
def test_auto_reaches_the_goals_on_a_dense_table_that_it_can_reach_them_on(seed: int) -> None:
    at, errors = fits.calibrated_errors("auto", *dense_like_nccl(seed))
    off = np.abs(errors)
    assert np.median(off) <= 1.5 * fits.GOAL  # noise alone is 0.7%, of the sizes and of the fit
    assert np.median(off[at < fits.SMALL_TO]) <= fits.GOAL_SMALL


def test_no_log_of_others_is_dense_from_end_to_end() -> None:
    """Vidur's tables are dense (test_clusters_vidur), but end before 1 GiB as these do."""
    for path in LOGS:
        sizes = np.unique(log(path)[0])
        inside = sizes[(sizes >= fits.DENSE_FROM) & (sizes <= fits.DENSE_TO)]
        assert len(inside) < fits.DENSE_SIZES and sizes.max() < fits.DENSE_TO


def test_auto_calibrates_real_logs_as_well_as_any_one_form() -> None:
    """Half of each log's 24 sizes predict the others, over 4 times from one to the next.

    The goal of 1% is missed: by less than any form that would be taken for all of them misses it, by more
    than 5%.
    """
    medians = {
        form: [np.median(np.abs(fits.calibrated_errors(form, *log(path))[1])) for path in LOGS]
        for form in (*SIMPLE_FIRST, "auto")
    }
    over_logs = {form: float(np.median(of)) for form, of in medians.items()}
    assert over_logs["auto"] <= 1.05 * min(over_logs.values())
    assert max(medians["auto"]) <= fits.GOAL_SMALL
    assert fits.GOAL < over_logs["auto"] < 0.025


def test_what_is_missed_of_the_goals_is_said() -> None:
    missed = fits.against_goals(*log(LOGS[0]))
    median = np.median(np.abs(fits.calibrated_errors("auto", *log(LOGS[0]))[1]))
    assert f"at the other 12 by {median:.2%} (goal 1%: missed)" in missed
    assert "below 25 MiB" in missed and "which this is not" in missed
    held = fits.against_goals(DENSE, COST(DENSE))
    assert held.count("held") == 2 and "missed" not in held and "which this is not" not in held
    assert fits.against_goals(DENSE[:12], COST(DENSE[:12])).startswith("12 sizes are too few")


# -- the comparison ------------------------------------------------------------------------------


def test_a_comparison_holds_what_the_fits_say() -> None:
    rows = log(LOGS[0])
    found = fits.compare(*rows, "alpha_beta:ends", workers=16)
    assert list(found.table.index) == [*SIMPLE_FIRST, "alpha_beta:ends"] == list(found.fits)
    same = fit("auto", *rows, workers=16)
    assert (found.chosen, found.why) == (same.form, same.why)
    np.testing.assert_array_equal(
        found.fits[found.chosen].interval(rows[0]), same.interval(rows[0])
    )
    for form, row in found.table.iterrows():
        at, errors = held_out_errors(str(form), *rows)
        off = np.abs(errors)
        assert row["sizes"] == len(at) == 22
        assert row["median"] == np.median(off) and row["worst"] == off.max()
        assert row["median_below_25_mib"] == np.median(off[at < 25 * MIB])
        assert row["median_from_1_mib"] == np.median(off[at >= MIB])
        unmet, errors = fits.calibrated_errors(str(form), *rows)
        assert row.iloc[-3] == np.median(np.abs(errors)) and row.iloc[-1] == np.abs(errors).max()
        assert row.iloc[-2] == np.median(np.abs(errors[unmet < 25 * MIB]))
        assert (found.fits[str(form)].draws != ()) == (form == found.chosen)


def test_a_comparison_of_few_sizes_leaves_open_what_they_do_not_tell() -> None:
    sizes = np.array([1e3, 1e4, 1e5, 1e6])
    found = fits.compare(sizes, COST(sizes))
    assert set(found.fits) == {"alpha_beta", "segments", "segments:joined", "table", "curve"} | {
        "segments:jump",
        "chords",
    }
    assert found.table.loc["piecewise", ["sizes"]].item() == 0
    assert np.isnan(found.table.loc["piecewise", "median"])
    assert found.table["median_of_12_sizes"].isna().all()
    with pytest.raises(UserError, match="at least 5 distinct sizes"):
        fits.compare(sizes, COST(sizes), "piecewise:8KiB")


def test_forms_are_drawn_with_their_times_and_their_errors() -> None:
    sizes, seconds = log(LOGS[0])
    found = fits.compare(sizes, seconds)
    off = {form: (one.sizes, one.errors()) for form, one in found.unseen.items()}
    figure = plots.cost_forms(found.fits, off, found.chosen)
    above, below = figure.axes
    drawn = {str(line.get_label()): line for line in above.lines}
    assert len(drawn) == len(SIMPLE_FIRST) + 1
    measured = drawn["measured, median"]
    shown_at = np.asarray(measured.get_xydata(), dtype=float)
    np.testing.assert_allclose(shown_at, np.column_stack([sizes, seconds * 1e3]))
    (thick,) = (line for name, line in drawn.items() if name.endswith("(chosen)"))
    x, y = np.asarray(thick.get_xydata()).T
    np.testing.assert_allclose(y / 1e3, found.fits[found.chosen].cost(x), rtol=1e-12)
    assert thick.get_linewidth() == max(line.get_linewidth() for line in above.lines)
    shown = {tuple(np.asarray(line.get_ydata()).round(9)) for line in below.lines}
    for _, errors in off.values():
        assert tuple(np.maximum(100 * np.abs(errors), 0.1).round(9)) in shown
    assert "held-out" in below.get_ylabel() and "all-reduce time" in above.get_ylabel()
    plt.close(figure)


def test_the_command_compares_prints_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    status, out, said = asked(capsys, "fit", LOGS[0], "--compare")
    assert (status, said) == (0, "")
    default = Path("allreduce_inter_anode_job02-fits.png")
    assert f"drawn {default}" in re.sub(" +", " ", out)
    with Image.open(default) as image:
        assert image.size[0] > 800
    found = fits.compare(*messages.read_bytes_seconds(LOGS[0])[:2])
    for form, row in found.table.iterrows():
        (line,) = (line for line in out.splitlines() if line.startswith(f"{form} "))
        assert f"{row['median']:.2%}" in line and f"{row['worst']:.2%}" in line
    assert found.why in out
    status, out, _ = asked(
        capsys,
        "fit",
        LOGS[0],
        "--compare",
        "--json",
        "--draw",
        "a.png",
        "--form",
        "alpha_beta:ends",
    )
    told = json.loads(out)
    assert (told["chosen"], told["drawn"], Path("a.png").is_file()) == (found.chosen, "a.png", True)
    assert told["forms"].keys() == {*SIMPLE_FIRST, "alpha_beta:ends"}
    assert told["forms"]["table"]["median"] == pytest.approx(found.table.loc["table", "median"])
    first = Path("a.png").read_bytes()
    asked(capsys, "fit", LOGS[0], "--compare", "--draw", "a.png", "--form", "alpha_beta:ends")
    assert Path("a.png").read_bytes() == first


def test_a_drawing_without_a_comparison_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, said = asked(capsys, "fit", LOGS[0], "--draw", tmp_path / "a.png")
    assert (status, out) == (2, "") and "give both" in said and said.count("\n") == 1
