"""One model: what the command predicts of a recorded case is what the report validates, to the last digit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ddlkit import cli, store
from ddlkit.core.cost import AlphaBeta
from ddlkit.core.errors import UserError
from ddlkit.core.iteration import predict
from ddlkit.formats import messages
from ddlkit.model import Calibration, Communication, forecast, make_plan
from ddlkit.report.accuracy import validate
from ddlkit.report.source import Source
from strategies import random_workload

RECORDINGS = sorted({path.parent for path in store.list_tables(store.RECORDED, "**/runs-*.csv")})
WORKLOAD = random_workload(np.random.default_rng(3), 30)


@pytest.mark.parametrize("directory", RECORDINGS, ids=lambda path: path.name)
def test_the_command_predicts_what_the_report_validates(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of each recording's last lab the case in the middle."""
    recording = Source(tuple(dict.fromkeys((directory, directory.parent))))
    runs = Source((directory,)).table("runs")
    runs = runs[(runs["kind"] == "replay") & (runs["collective"] == "all_reduce")]
    runs = runs[runs["profile_sha256"].isin(recording.workloads())]  # others' profiles have left
    labs = runs[runs["straggler"] == 1].groupby(["link", "workers"])["case"].unique()
    some = [cases[len(cases) // 2] for cases in labs.iloc[-1:]]
    measured = Source((directory,)).table("collectives")
    cases = validate(
        runs[runs["case"].isin(some)], recording.workloads(), Calibration.of(measured)
    ) if some else pd.DataFrame()  # fmt: skip
    files = [
        path for place in recording.directories for path in store.list_tables(place, "layers-*.csv")
    ]
    profiles = {store.read_profile(path).sha256: path for path in files}
    for case in cases.to_dict("records"):
        tables = [
            path
            for path in store.list_tables(directory, "collectives-*.csv")
            if ((rows := store.load_table(path))["link"].eq(case["link"])
                & rows["ranks"].eq(case["workers"]) & rows["collective"].eq("all_reduce")).any()
        ]  # fmt: skip
        words = ["--profile", profiles[case["profile_sha256"]], "--ranks", case["workers"]]
        words += ["--collectives", *tables]
        words += ["--link", case["link"], "--plan", f"cuts:{case['ends']}"]
        words += ["--dilation", case["dilation"], "--in-flight", case["in_flight"]]
        words += ["--copy-s-per-byte", case["copy_s_per_byte"]]
        assert cli.main(["predict", *map(str, words), "--json"]) == 0
        answer = json.loads(capsys.readouterr().out)
        assert answer["iteration_s"] == case["model_iteration_s"]
        assert answer["exposed_communication_s"] == case["model_exposed_s"]
        assert answer["compute_s"] == case["predicted_compute_s"]
        assert answer["interval_95_s"] == [case["lower_s"], case["upper_s"]]


def table(ranks: int = 4) -> pd.DataFrame:
    rng, sizes = np.random.default_rng(0), np.repeat(np.geomspace(1e3, 1e8, 9), 5)
    known = {"link": "lab:1gbit", "ranks": ranks, "collective": "all_reduce", "algorithm": "ring"}
    known |= {"session": 0, "messages_per_sample": 1, "in_flight": 1, "stolen": 0.0}
    seconds = (1e-3 + 8e-9 * sizes) * np.exp(rng.normal(0, 0.02, sizes.size))
    return pd.DataFrame({"bytes": sizes, "seconds": seconds, "link_bits_per_s": 0.0, **known})


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
    assert forecast(WORKLOAD, plan, sure).interval_s is None and sure.sparse(1.0) is sure


def test_one_rank_alone_is_never_fitted(tmp_path: Path) -> None:
    """It sends nothing; NCCL does not even start a kernel. What is known without it is known with it."""
    alone = table(1).assign(link="one-rank")
    known, expected = (
        Calibration.of(rows, draws=0).known for rows in (pd.concat([alone, table(4)]), table(4))
    )
    assert [*known] == [*expected] == [("lab:1gbit", 4, "all_reduce")]
    sizes = np.geomspace(1e3, 1e8)
    both = [one["lab:1gbit", 4, "all_reduce"].cost(sizes) for one in (known, expected)]
    assert np.array_equal(*both) and not Calibration.of(alone).known
    path = tmp_path / "alone.csv"
    alone.astype({"bytes": int}).to_csv(path, index=False)
    with pytest.raises(UserError, match="alone.csv: one rank sends no messages"):
        messages.read_bytes_seconds(path)


@pytest.mark.parametrize(
    ("words", "refusal"),
    [
        ([], "give --collectives TABLE to calibrate from, or --cost"),
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
    Path("several.csv").write_text("bytes,seconds,ranks\n8,1,2\n16,2,2\n8,1,4\n16,2,4\n")
    Path("cost.json").write_text(json.dumps(AlphaBeta(1.0, 1.0, workers=4).to_dict()))
    assert cli.main(["predict", "--profile", "profile.csv", *words]) == 2
    assert refusal in capsys.readouterr().err
