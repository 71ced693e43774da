"""Real training that models foretold: the table comes first, runs carry its hash, every model is in it."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from ddlkit import cli, store
from ddlkit.core.case import Case
from ddlkit.core.cost import AlphaBeta, Table
from ddlkit.core.errors import UserError
from ddlkit.model import Calibration, Communication, forecast, forecast_case, make_plan
from ddlkit.model.contention import Contention
from strategies import random_workload
from workbook.common import source
from workbook.common.source import Source
from workbook.record.campaigns import DIGITS
from workbook.record.recording import record
from workbook.validate import accuracy
from workbook.validate.rivals import OURS, REAL_MODELS, real_times

BUDGET = {"warmup": 1, "min_repeats": 2, "max_repeats": 3, "max_s": 0.1}
NETWORKS: dict[str, Any] = {"networks": "lenet5:64", "ranks": 2}
POINTS = [
    {"measure": "layers", **NETWORKS, "budget": BUDGET},
    {"measure": "collectives", "link": "loopback-p2", "sizes": "1KiB..4MiB", "budget": BUDGET,
     "collectives": "all_reduce"},
    {"measure": "slowdowns", **NETWORKS, "budget": BUDGET},
    {"measure": "trainings", **NETWORKS, "plans": ["ddp", "none", "single"], "repeats": 2,
     "iterations": 2, "accumulate": 2, "predict": True},
]  # fmt: skip


@pytest.mark.slow
def test_predictions_come_before_their_runs_and_runs_say_which(tmp_path: Path) -> None:
    file, out = tmp_path / "mine.json", tmp_path / "out"
    file.write_text(json.dumps({"device": "cpu", "points": POINTS}))
    record(str(file), out=out, predict=True)
    said = store.load_table(out / "predicted-cases.csv", "predicted")
    assert not [*out.glob("runs-*")]
    assert set(said["model"]) <= set(REAL_MODELS)
    record(str(file), out=out)
    runs = store.load_table(out / "runs-training-lenet5-p2-loopback.csv", "runs")
    digest = store.load_stamp(out / "predicted-cases.csv")["sha256"]
    assert set(runs["predicted"]) == {digest[:DIGITS]} and set(runs["accumulate"]) == {
        2
    }
    assert set(runs["case"]) <= set(said["case"]) and set(runs["plan"]) == {
        "ddp",
        "none",
    }, "single is what ddp does with so few bytes"
    cases = accuracy.joined(Source((out,)))
    paired_s = cases["model_exposed_s"] + cases["measured_compute_s"]
    took_s = cases["measured_exposed_communication_s"] + cases["measured_compute_s"]
    expected = (paired_s - took_s) / cases["measured_iteration_s"]
    assert np.allclose(cases["model_paired_error"], expected)
    assert (cases["runs"] == 4).all() and cases["covered"].between(0, 4).all()
    (out / "predicted-cases.csv").unlink()
    with pytest.raises(UserError, match="a prediction comes before its runs"):
        record(str(file), out=out)


def test_what_form_and_term_bring_is_told_apart() -> None:
    """Ours with both parts is ours; without any, all rivals of one cost agree with what they always said."""
    sizes, rng = np.geomspace(1e3, 1e8, 9), np.random.default_rng(3)
    cost = Table(sizes, 1e-4 + 2e-9 * sizes, workers=2)
    term = np.array([[0.5, 0.2], [0.1, 0.4]])
    beside = Contention(np.array([1e4, 1e7]), term, term[None], 2e-10, 1e-5)
    work, line = random_workload(rng, 30), AlphaBeta(1e-4, 2e-9, workers=2)
    known = Communication(cost, contention=beside)
    real = forecast(work, make_plan("ddp", work), known)
    others = dict.fromkeys(["alpha_beta:medians"], line)
    said = real_times(real, others)
    bare = forecast(
        work, real.iteration.plan, replace(known, contention=None)
    ).prediction
    assert said["model_alone"][0] == bare.iteration_s
    assert said["model_alone"][0] < said[OURS][0]
    # The truth is a line: form brings nothing, the term does.
    assert said["line_medians"][0] < said["line_medians_beside"][0]
    assert said["line_medians_beside"][0] == pytest.approx(said[OURS][0], rel=1e-4)
    limits = [
        said[name][0] for name in ("perfect_overlap", "model_alone", "no_overlap")
    ]
    assert limits == sorted(limits)


CAMPAIGN = source.open_campaign("", source.TRAINED).alone


@functools.cache
def known() -> Calibration:
    """What the campaign measured of messages, which all levels share."""
    slowdown = CAMPAIGN.table("slowdown")
    return Calibration.of(CAMPAIGN.table("collectives"), slowdown=slowdown)


@functools.cache
def cases_of_campaign() -> pd.DataFrame:
    return accuracy.trained(CAMPAIGN).set_index("case")


@functools.cache
def recorded(level: float) -> pd.DataFrame:
    """The campaign's unmarked cases, predicted anew from its tables: ends of the interval at that level."""
    workloads, scatter = CAMPAIGN.workloads(), CAMPAIGN.compute_scatter()
    cases = cases_of_campaign().copy()
    for key, row in cases.iterrows():
        case = Case.from_row(row.to_dict())
        forecast = forecast_case(
            case,
            workloads,
            known(),
            compute_scatter=scatter[case.profile_sha256],
            level=level,
            compute_drift=0.0,  # of which that campaign knew nothing
        )
        point_s, ends_s = (
            forecast.prediction.iteration_s,
            forecast.interval_s or (0.0, 0.0),
        )
        assert point_s == row["model_iteration_s"], "to the last digit"
        cases.loc[key, ["lower_s", "upper_s"]] = ends_s
    return cases


def test_the_point_lies_in_the_middle_of_its_interval() -> None:
    """Within the 50% interval in nine of ten cases: draws are centred on the fit."""
    cases = recorded(0.5)
    inside = cases["model_iteration_s"].between(cases["lower_s"], cases["upper_s"])
    assert inside.mean() >= 0.9


@pytest.mark.parametrize("level", [0.5, 0.8, 0.95])
def test_coverage_at_several_levels_is_what_was_frozen(level: float) -> None:
    cases, runs = recorded(level), CAMPAIGN.table("runs")
    runs = runs[runs["case"].isin(cases.index)]
    drifted_s = runs["compute_s"] - runs["case"].map(cases["predicted_compute_s"])
    ends_s = (
        runs["case"].map(cases[end]) + drifted_s for end in ("lower_s", "upper_s")
    )
    rows = accuracy.frozen("coverage", source.TRAINED).set_index("nominal")
    reached = runs["iteration_s"].between(*ends_s).mean()
    assert rows.loc[level, "reached"] == pytest.approx(reached, rel=1e-5)
    half = (
        (cases["upper_s"] - cases["lower_s"]) / cases["model_iteration_s"]
    ).median() / 2
    assert float(rows.loc[level, "median_half_width"]) == pytest.approx(half, rel=1e-3)


def test_the_command_predicts_what_the_campaign_did(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Five recorded cases, one on each link, to the last digit."""
    cases = recorded(0.5).groupby("link").sample(1, random_state=0)
    for row in cases.itertuples():
        (place,) = [
            path.name.removeprefix("slowdown-").removesuffix(".csv")
            for path in store.list_tables(CAMPAIGN.directories[0], "slowdown-*")
            if set(store.load_table(path)["link"]) == {row.link}
            and row.network in path.name
        ]
        link = place.partition("-p2-")[2]
        messages = "loopback-p2" if link == "loopback" else f"lab-p2-{link}"
        names = {"--profile": f"layers-{row.network}-b{row.batch}-r2.csv"}
        names |= {
            "--collectives": f"collectives-{messages}.csv",
            "--slowdown": f"slowdown-{place}.csv",
        }
        tables = [
            word
            for flag, name in names.items()
            for word in (flag, str(CAMPAIGN.directories[0] / name))
        ]
        asked = ["--plan", row.plan, "--accumulate", str(row.accumulate), "--json"]
        assert cli.main(["predict", *tables, *asked]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert answer["iteration_s"] == row.model_iteration_s, row
        assert answer["exposed_communication_s"] == row.model_exposed_s, row


def test_the_difference_to_a_rival_is_drawn_by_clusters() -> None:
    """Cases of one cluster share its error: more of them make the interval no narrower."""
    rng = np.random.default_rng(0)
    names = [(f"n{i}", link) for i in range(5) for link in ("a", "b")]
    cases = pd.DataFrame(names, columns=["network", "link"])
    cases["model_paired_error"] = rng.normal(0, 0.01, len(cases))
    cases["rival_paired_error"] = 0.05
    mean, lower, upper = accuracy.difference(cases, "rival")
    assert mean == pytest.approx(cases["model_paired_error"].abs().mean() - 0.05)
    assert lower < mean < upper < 0
    assert accuracy.difference(pd.concat([cases] * 9), "rival") == pytest.approx(
        (mean, lower, upper)
    )
    assert accuracy.difference(cases, "model") == (0, 0, 0)
