"""Warnings about times that do not follow the size of messages, and what intervals hold."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ddlkit import cli
from ddlkit.core.cost import AlphaBeta
from ddlkit.core.errors import UserError
from ddlkit.core.plan import make_plan
from ddlkit.core.units import KIB, MIB
from ddlkit.core.workload import LayerProfile, Workload
from ddlkit.formats.profiles import save_profile
from ddlkit.model import forecast
from ddlkit.model.calibration import Communication, Noise
from ddlkit.model.contention import Contention
from ddlkit.model.fits import other_unit, strange_times, warnings_of_fit

SIZES = np.array([64, 128, 256, 512, 1024, 2048, 4096]) * KIB
LINE_S = 5e-5 + 2e-11 * SIZES


def test_times_that_follow_the_size_cause_no_warning() -> None:
    noisy_s = LINE_S * np.random.default_rng(0).lognormal(0, 0.05, SIZES.size)
    for seconds in (LINE_S, noisy_s):
        assert not [*strange_times(SIZES, seconds)]
    # The knee of a straight line between coarse sizes is no outlier.
    coarse = np.array([4 * KIB, 64 * KIB, MIB, 16 * MIB, 256 * MIB])
    assert not [*strange_times(coarse, 1e-3 + 1e-9 * coarse, "alpha_beta")]


@pytest.mark.parametrize("factor", [3.0, 0.3])
def test_one_size_far_off_its_neighbours_is_named_with_them(factor: float) -> None:
    seconds = LINE_S.copy()
    seconds[2] *= factor
    (warning,) = strange_times(SIZES, seconds)
    for size in ("256 KiB", "128 KiB", "512 KiB"):
        assert f"{size} takes" in warning
    assert "remove the rows of 256 KiB" in warning


def test_smaller_messages_that_take_longer_are_named_with_larger_ones() -> None:
    seconds = np.array([4.0, 4.2, 1.0, 1.1, 1.2, 1.4, 1.9]) * 1e-3
    first, *_ = strange_times(SIZES, seconds)
    assert "128 KiB takes 4.2 ms, but 256 KiB takes 1 ms" in first


def test_small_messages_that_take_long_may_have_another_unit() -> None:
    (warning,) = other_unit(SIZES, 1e3 * LINE_S * 2)
    assert "64 KiB takes" in warning and "unit" in warning
    assert not other_unit(SIZES, LINE_S) and not other_unit([2 * MIB], [9.0])


def test_a_form_that_is_off_by_a_quarter_at_sizes_left_out_is_told() -> None:
    curved_s = 1e-6 * (SIZES / KIB) ** 2
    (warning,) = strange_times(SIZES, curved_s, "alpha_beta:least_squares")
    assert "alpha_beta:least_squares is off by" in warning and "KiB" in warning


@pytest.fixture
def profile(tmp_path: Path) -> Path:
    ones = np.ones(4, dtype=int)
    names = ("a", "b", "c", "d")
    layers = LayerProfile(
        network="net",
        device="unknown",
        batch=1,
        tensor=names,
        layer=names,
        parameters=65536 * ones,
        gradient_bytes=4 * 65536 * ones,
        forward_s=1e-3 * ones,
        backward_s=2e-3 * ones,
        flops=0.0 * ones,
    )
    path = tmp_path / "profile.csv"
    save_profile(layers, path)
    return path


def test_fit_predict_and_advise_print_the_warning(
    tmp_path: Path, profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seconds = LINE_S.copy()
    seconds[2] *= 3
    times = tmp_path / "times.csv"
    pd.DataFrame({"bytes": SIZES, "seconds": seconds, "ranks": 4}).to_csv(
        times, index=False
    )
    cost = tmp_path / "cost.json"
    capsys.readouterr()
    assert cli.main(["fit", str(times), "--json"]) == 0
    printed = capsys.readouterr()
    assert "256 KiB takes" in printed.err
    cost.write_text(printed.out)
    # A cost keeps the warnings of its fit.
    for source in (["--collectives", str(times)], ["--cost", str(cost)]):
        for command in ("predict", "advise"):
            words = [command, "--profile", str(profile), *source, "--json"]
            assert cli.main(words) == 0
            printed = capsys.readouterr()
            assert "256 KiB takes" in json.loads(printed.out)["warnings"][0]
            assert "warning: 256 KiB takes" in printed.err
            # A note is one line, without any escaped end of a line.
            assert "\\n" not in printed.err


def test_warnings_of_a_cost_that_are_no_texts_are_refused() -> None:
    assert warnings_of_fit({}) == []
    for wrong in ("text", [1], {"a": 1}):
        with pytest.raises(UserError, match="fit the cost again"):
            warnings_of_fit({"fit": {"warnings": wrong}})


def test_an_interval_without_a_measured_contention_says_what_it_holds() -> None:
    work = Workload.from_arrays(0.1, [0.05] * 4, [MIB] * 4)
    costs = [AlphaBeta(1e-4 * factor, 1e-11) for factor in (0.9, 1.0, 1.1)]
    fitted = Communication(costs[1], draws=costs)
    noise = Noise.of(SIZES, LINE_S)
    plan = make_plan("ddp", work)
    measured = Contention(np.ones(1), np.full((2, 1), 0.1), np.full((1, 2, 1), 0.1))
    of_messages = (
        "the scatter and drift of messages and the uncertainty of their fitted cost"
    )
    held = {
        "the uncertainty of the fitted cost of messages": fitted,
        of_messages: replace(fitted, noise=noise),
        f"{of_messages}, and the drift of compute": replace(
            fitted, noise=noise, contention=Contention.none().copying(1e-10)
        ),
    }
    for holds, communication in held.items():
        said, _, missing = forecast(
            work, plan, communication
        ).interval_includes.partition("; ")
        assert said == holds and "contention" in missing
    known = replace(fitted, noise=noise, contention=measured)
    assert forecast(work, plan, known).interval_includes == ""


def test_commands_call_no_interval_95_percent_that_lacks_contention(
    tmp_path: Path, profile: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    times = tmp_path / "times.csv"
    rows = pd.concat(
        [
            pd.DataFrame({"bytes": SIZES, "seconds": LINE_S, "collective": name})
            for name in ("all_reduce", "all_gather", "reduce_scatter")
        ]
    )
    rows.assign(ranks=4).to_csv(times, index=False)
    given = ["--profile", str(profile), "--collectives", str(times)]

    assert cli.main(["advise", *given]) == 0
    printed = capsys.readouterr().out
    assert cli.main(["advise", *given, "--json"]) == 0
    holds = json.loads(capsys.readouterr().out)["interval_includes"].partition(";")[0]
    assert printed.count(holds) >= 2, "each interval and the line on all say the same"
    assert "intervals include only" in printed and "95%" not in printed

    sharded = ["--strategy", "fsdp", "--units", "a,b,c,d"]
    for options in ([], sharded):
        assert cli.main(["predict", *given, *options, "--json"]) == 0
        predicted = json.loads(capsys.readouterr().out)
        assert "contention" in predicted["interval_includes"]
        assert predicted["interval_level"] is None
