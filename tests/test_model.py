"""One model: what the command predicts of a recorded case is what the report validates, to the last digit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ddlkit import cli, store
from ddlkit.core.cost import AlphaBeta
from ddlkit.core.fit import interval
from ddlkit.core.iteration import predict
from ddlkit.model import Calibration, Communication, forecast, make_plan, predictor
from ddlkit.model.calibration import PRIOR_DRIFT, Noise
from strategies import random_workload
from workbook.common import places
from workbook.common.source import Source
from workbook.validate.accuracy import validate

RECORDINGS = sorted(
    {path.parent for path in store.list_tables(places.RECORDED, "**/runs-*.csv")}
)
WORKLOAD = random_workload(np.random.default_rng(3), 30)


@pytest.mark.parametrize("directory", RECORDINGS, ids=lambda path: path.name)
def test_the_command_predicts_what_the_report_validates(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of each recording's last lab the case in the middle."""
    recording = Source(tuple(dict.fromkeys((directory, directory.parent))))
    runs = Source((directory,)).table("runs")
    runs = runs[(runs["kind"] == "replay") & (runs["collective"] == "all_reduce")]
    runs = runs[
        runs["profile_sha256"].isin(recording.workloads())
    ]  # others' profiles have left
    labs = runs[runs["straggler"] == 1].groupby(["link", "workers"])["case"].unique()
    some = [cases[len(cases) // 2] for cases in labs.iloc[-1:]]
    measured = Source((directory,)).table("collectives")
    cases = validate(
        runs[runs["case"].isin(some)], recording.workloads(), Calibration.of(measured)
    ) if some else pd.DataFrame()  # fmt: skip
    files = [
        path
        for place in recording.directories
        for path in store.list_tables(place, "layers-*.csv")
    ]
    profiles = {store.read_profile(path).sha256: path for path in files}
    for case in cases.to_dict("records"):
        link, ranks = case["link"], case["workers"]
        lab = f"link == '{link}' and ranks == {ranks} and collective == 'all_reduce'"
        tables = store.list_tables(directory, "collectives-*.csv")
        tables = [path for path in tables if len(store.load_table(path).query(lab))]
        words = [
            "--profile",
            profiles[case["profile_sha256"]],
            "--ranks",
            ranks,
            "--link",
            link,
        ]
        words += ["--collectives", *tables, "--plan", f"cuts:{case['ends']}"]
        words += ["--dilation", case["dilation"], "--in-flight", case["in_flight"]]
        words += ["--copy-s-per-byte", case["copy_s_per_byte"]]
        assert cli.main(["predict", *map(str, words), "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert answer["iteration_s"] == case["model_iteration_s"]
        assert answer["exposed_communication_s"] == case["model_exposed_s"]
        assert answer["compute_s"] == case["predicted_compute_s"]
        assert answer["iteration_interval_s"] == [case["lower_s"], case["upper_s"]]


def table(ranks: int = 4) -> pd.DataFrame:
    rng, sizes = np.random.default_rng(0), np.repeat(np.geomspace(1e3, 1e8, 9), 5)
    known = {
        "link": "lab:1gbit",
        "ranks": ranks,
        "collective": "all_reduce",
        "algorithm": "ring",
    }
    known |= {"session": 0, "messages_per_sample": 1, "in_flight": 1, "stolen": 0.0}
    seconds = (1e-3 + 8e-9 * sizes) * np.exp(rng.normal(0, 0.02, sizes.size))
    return pd.DataFrame(
        {"bytes": sizes, "seconds": seconds, "link_bits_per_s": 0.0, **known}
    )


def test_a_forecast_holds_its_prediction_and_more_noise_makes_it_wider() -> None:
    known = Calibration.of(table()).between("lab:1gbit", 4)
    plan = make_plan("ddp", WORKLOAD)
    found = forecast(WORKLOAD, plan, known)
    assert found.prediction == predict(WORKLOAD, plan, known.cost)
    lower_s, upper_s = found.interval_s or (np.nan, np.nan)
    assert lower_s <= found.prediction.iteration_s <= upper_s
    scatter = np.linspace(0.8, 1.25, 50)
    for wider in (
        forecast(WORKLOAD, plan, known, compute_scatter=scatter),
        forecast(WORKLOAD, plan, known, level=0.99),
    ):
        assert wider.interval_s is not None
        assert wider.interval_s[0] < lower_s and wider.interval_s[1] > upper_s
    copied = forecast(WORKLOAD, plan, known, copy_s_per_byte=1e-9).prediction
    assert copied.exposed_communication_s > found.prediction.exposed_communication_s
    sure = Communication(AlphaBeta(1e-3, 1e-9, workers=4))
    assert (
        forecast(WORKLOAD, plan, sure).interval_s is None and sure.sparse(1.0) is sure
    )


TWO = np.repeat([1e3, 1e6], 4)
SECONDS = np.concatenate([[0.9, 1.0, 1.0, 1.2], [2.0, 2.0, 2.0, 2.0]])


def test_compute_scatters_about_one_as_iterations_alone_do() -> None:
    seconds = {"unhooked_iteration": [0.2, 0.1, 0.4], "issue": [0.09, 9.0, 0.09]}
    samples = pd.DataFrame([(name, s) for name in seconds for s in seconds[name]])
    samples.columns = ["quantity", "seconds"]
    assert predictor.scatter_of(samples).tolist() == [1.0, 0.5, 2.0]
    assert predictor.issue_share(samples) == pytest.approx(0.45)
    assert 0.45 < predictor.HOST_BOUND < 1, "a share"


def test_single_messages_scatter_as_the_samples_of_the_nearest_size() -> None:
    noise = Noise.of(TWO, SECONDS)
    factors = noise.factors([10.0, 9e4, 1e6, 1e9], draws=400)
    assert factors.shape == (400, 4)
    assert np.all(noise.drift >= PRIOR_DRIFT[2]), (
        "of one session: as labs drift between two"
    )
    still = replace(noise, drift=np.zeros(2)).factors([10.0, 9e4, 1e6, 1e9], draws=400)
    seen = np.unique(still[:, 0])  # below the first size: as there, around their mean
    assert seen == pytest.approx(np.array([0.9, 1.0, 1.2]) / 1.025)
    assert np.all(still[:, 1:] == 1)


def test_a_mean_of_several_messages_scatters_less_than_one_by_the_root() -> None:
    one = np.random.default_rng(0).normal(1, 0.05, (2000, 16))
    drawn = Noise.of(1e3, one.mean(axis=1), messages_per_sample=16).factors(
        [1e3], draws=4000
    )
    assert drawn.mean() == pytest.approx(1, abs=0.005)
    assert drawn.std() == pytest.approx(0.05, rel=0.1)


def test_the_next_session_lies_within_the_interval_as_often_as_it_says(
    request: pytest.FixtureRequest,
) -> None:
    """Two sessions tell little of their own drift; a normal interval would cover 75% in place of 95%."""
    trials = 400 if request.config.getoption("--long") else 200
    rng = np.random.default_rng(3)
    inside = 0
    for _ in range(trials):
        sessions = np.exp(rng.normal(0, 0.05, 3))
        noise = Noise.of(1e3, np.repeat(sessions[:2], 3), np.repeat([0, 1], 3))
        middle = np.sqrt(sessions[0] * sessions[1])
        lower, upper = interval(noise.factors([1e3], 1000)) * middle
        inside += lower <= sessions[2] <= upper
    assert 0.91 <= inside / trials <= 0.98


def test_all_messages_of_a_draw_drift_together_and_a_lacking_size_as_its_neighbours() -> (
    None
):
    noise = Noise.of(np.tile(TWO, 2), [*SECONDS, *1.1 * SECONDS], np.repeat([0, 1], 8))
    factors = noise.factors([1e6, 1e6, 1e6], draws=200)
    assert np.all(factors == factors[:, :1]) and factors.std() > 0.05
    lacking = Noise.of(
        [1e3, 2e3, 1e9, 1e3, 2e3], [1.0, 1.0, 1.0, 1.2, 1.1], [0, 0, 0, 1, 1]
    )
    assert np.all(lacking.drift > 0)
    assert lacking.drift[2] == pytest.approx(lacking.drift[0]), (
        "far from all: as they do on average"
    )
