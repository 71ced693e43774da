"""One model: what the command predicts of a recorded case is what the report validates, to the last digit."""

from __future__ import annotations

import argparse
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from ddlkit import cli, store
from ddlkit.core.cost import AlphaBeta
from ddlkit.core.errors import UserError
from ddlkit.core.iteration import predict
from ddlkit.formats import messages
from ddlkit.model import Calibration, Communication, forecast, make_plan
from ddlkit.report import compare
from ddlkit.report.accuracy import validate
from ddlkit.report.doubts import Measured
from ddlkit.report.figures import osf_measured
from ddlkit.report.source import Source
from strategies import random_workload

RECORDINGS = sorted({path.parent for path in store.list_tables(store.RECORDED, "**/runs-*.csv")})
FEW = 4
"""Cases of a lab, from its first to its last: each is predicted by itself."""
WORKLOAD = random_workload(np.random.default_rng(3), 30)


@cache
def collectives(directory: Path) -> dict[Path, pd.DataFrame]:
    """The recorded tables of messages there."""
    return {
        path: store.load_table(path) for path in store.list_tables(directory, "collectives-*.csv")
    }


def calibrated_in(directory: Path, case: dict[str, Any]) -> list[Path]:
    """The recorded tables with the all-reduces of a case's lab."""
    wanted = {"link": case["link"], "ranks": case["workers"], "collective": "all_reduce"}
    return [
        path
        for path, rows in collectives(directory).items()
        if (rows[list(wanted)] == wanted).all(axis=1).any()
    ]


def few_of_each_lab(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs of FEW cases of every lab."""
    cases = runs.drop_duplicates("case").groupby(["link", "workers"])["case"]
    few = [one.iloc[np.linspace(0, len(one) - 1, FEW).astype(int)] for _, one in cases]
    return runs[runs["case"].isin(pd.concat(few))]


@pytest.mark.parametrize("directory", RECORDINGS, ids=lambda path: path.name)
def test_the_command_predicts_what_the_report_validates(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    calibrate = cli._calibrated
    labs: dict[tuple[object, ...], tuple[Communication, Measured]] = {}

    def calibrate_once(arguments: argparse.Namespace) -> tuple[Communication, Measured]:
        """The command's own, for hundreds of cases of a few labs."""
        lab = (arguments.link, arguments.ranks, arguments.in_flight)
        if lab not in labs:
            labs[lab] = calibrate(arguments)
        return labs[lab]

    monkeypatch.setattr(cli, "_calibrated", calibrate_once)
    recording = Source(tuple(dict.fromkeys((directory, directory.parent))))
    runs = Source((directory,)).table("runs")
    runs = runs[(runs["kind"] == "replay") & (runs["collective"] == "all_reduce")]
    runs = runs[runs["straggler"] == 1]
    if runs.empty:
        pytest.skip(f"{directory.name} holds no dense replay")
    measured = Source((directory,)).table("collectives")
    runs = few_of_each_lab(runs)
    found = validate(runs, recording.workloads(), Calibration.of(measured))
    files = [
        path for place in recording.directories for path in store.list_tables(place, "layers-*.csv")
    ]
    profiles = {store.read_profile(path).sha256: path for path in files}
    tables = {
        lab: calibrated_in(directory, rows.iloc[0].to_dict())
        for lab, rows in found.groupby(["link", "workers"])
    }
    for case in found.to_dict("records"):
        words = ["--profile", profiles[case["profile_sha256"]], "--ranks", case["workers"]]
        words += ["--collectives", *tables[case["link"], case["workers"]], "--link", case["link"]]
        words += ["--dilation", case["dilation"], "--in-flight", case["in_flight"]]
        words += ["--copy-s-per-byte", case["copy_s_per_byte"], "--plan", f"cuts:{case['ends']}"]
        assert cli.main(["predict", *map(str, words), "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert answer["iteration_s"] == case["model_iteration_s"]
        assert answer["exposed_communication_s"] == case["model_exposed_s"]
        assert answer["compute_s"] == case["predicted_compute_s"]
        assert answer["interval_95_s"] == [case["lower_s"], case["upper_s"]]


def table(ranks: int = 4, seed: int = 0) -> pd.DataFrame:
    rng, sizes = np.random.default_rng(seed), np.repeat(np.geomspace(1e3, 1e8, 9), 5)
    known = {"link": "lab:1gbit", "ranks": ranks, "collective": "all_reduce", "algorithm": "ring"}
    known |= {"session": 0, "messages_per_sample": 1, "in_flight": 1, "stolen": 0.0}
    seconds = (1e-3 + 8e-9 * sizes) * np.exp(rng.normal(0, 0.02, sizes.size))
    return pd.DataFrame({"bytes": sizes, "seconds": seconds, "link_bits_per_s": 0.0, **known})


def test_a_forecast_holds_its_prediction_and_more_noise_makes_it_wider() -> None:
    communication = Calibration.of(table()).between("lab:1gbit", 4)
    plan = make_plan("ddp", WORKLOAD)
    found = forecast(WORKLOAD, plan, communication)
    assert found.prediction == predict(WORKLOAD, plan, communication.cost)
    assert found.interval_s is not None
    lower_s, upper_s = found.interval_s
    assert lower_s <= found.prediction.iteration_s <= upper_s
    scatter = np.linspace(0.8, 1.25, 50)
    wider = forecast(WORKLOAD, plan, communication, compute_scatter=scatter).interval_s
    assert wider is not None and wider[0] < lower_s and wider[1] > upper_s
    copied = forecast(WORKLOAD, plan, communication, copy_s_per_byte=1e-9).prediction
    assert copied.exposed_communication_s > found.prediction.exposed_communication_s


def test_a_cost_without_draws_has_no_interval_and_density_one_is_dense() -> None:
    communication = Communication(AlphaBeta(1e-3, 1e-9, workers=4))
    assert forecast(WORKLOAD, make_plan("none", WORKLOAD), communication).interval_s is None
    assert communication.sparse(1.0) is communication


@pytest.mark.parametrize("sizes", [3, 45])
def test_one_rank_alone_is_never_fitted(sizes: int, tmp_path: Path) -> None:
    """It sends nothing; NCCL does not even start a kernel. What is known without it is known with it."""
    alone = table(1).assign(link="one-rank").head(sizes)
    known = Calibration.of(pd.concat([alone, table(4)]), draws=0).known
    assert set(known) == {("lab:1gbit", 4, "all_reduce")}
    expected = Calibration.of(table(4), draws=0).known
    sizes_bytes = np.geomspace(1e3, 1e8)
    found, wanted = (
        one["lab:1gbit", 4, "all_reduce"].cost(sizes_bytes) for one in (known, expected)
    )
    assert np.array_equal(found, wanted)
    assert not Calibration.of(alone).known
    assert compare.terms(alone).empty
    assert osf_measured.left_out_by_link({"here": alone}).empty
    path = tmp_path / "alone.csv"
    alone.astype({"bytes": int}).to_csv(path, index=False)
    with pytest.raises(UserError, match="alone.csv: one rank sends no messages"):
        messages.read_bytes_seconds(path)


def test_what_was_not_calibrated_is_refused_with_what_was() -> None:
    measured = Calibration.of(pd.concat([table(4), table(2)]))
    with pytest.raises(
        UserError, match="with 8 ranks: there is all_reduce over lab:1gbit, 2 ranks"
    ):
        measured.between("lab:1gbit", 8)


@pytest.mark.parametrize(
    ("spec", "needs"), [("mg_wfbp", True), ("adafusion", True), ("ddp", False), ("exact", True)]
)
def test_every_planner_is_known_without_importing_its_paper(spec: str, needs: bool) -> None:
    assert make_plan(spec, WORKLOAD, AlphaBeta(1e-3, 1e-9)).n == WORKLOAD.n
    if needs:
        with pytest.raises(UserError, match="needs a message cost"):
            make_plan(spec, WORKLOAD)


def test_a_users_own_two_small_tables_are_enough(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile, times = tmp_path / "mine.csv", tmp_path / "times.csv"
    profile.write_text("tensor,gradient_bytes,backward_s\na,4000000,1\nb,8000000,2\n")
    times.write_text("bytes,seconds\n1000000,1\n100000000,100\n")
    inputs = ["--profile", str(profile), "--forward-s", "3", "--collectives", str(times)]
    assert cli.main(["predict", *inputs, "--ranks", "4", "--plan", "none", "--json"]) == 0
    told = capsys.readouterr()
    # The last layer's 8 MB leave at 5 s and take 8, the first layer's 4 MB follow.
    assert json.loads(told.out)["iteration_s"] == pytest.approx(5 + 8 + 4)
    assert "assumed network = mine" in told.err and "batch = 1" in told.err
    assert cli.main(["plan", *inputs, "--ranks", "4", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["iteration_s"] == pytest.approx(17)


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        ([], "give --collectives TABLE to calibrate from, or --cost"),
        (["--collectives", "own.csv", "--cost", "cost.json"], "give --collectives TABLE"),
        (["--collectives", "own.csv"], "does not say how many ranks there were: give --ranks"),
        (["--collectives", "several.csv"], "several values of ranks (2, 4): choose one by ranks"),
        (["--collectives", "several.csv", "--ranks", "8"], "no row with ranks 8: it has 2, 4"),
        (["--cost", "cost.json", "--ranks", "8"], "a cost of 4 workers, not 8"),
    ],
)
def test_what_to_calibrate_from_must_be_clear(
    words: list[str],
    refusal: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("profile.csv").write_text("tensor,gradient_bytes,forward_s,backward_s\na,4,1,1\n")
    Path("own.csv").write_text("bytes,seconds\n8,1\n16,2\n")
    Path("several.csv").write_text("bytes,seconds,ranks\n8,1,2\n16,2,2\n8,1,4\n16,2,4\n")
    cost = AlphaBeta(1.0, 1.0, workers=4).to_dict()
    Path("cost.json").write_text(json.dumps(cost))
    assert cli.main(["predict", "--profile", "profile.csv", *words]) == 2
    assert refusal in capsys.readouterr().err
