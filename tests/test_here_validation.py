"""The section on this machine of notebook 05: live runs judged by the rule that stands there."""

from __future__ import annotations

import functools
from pathlib import Path

import pandas as pd
import pytest

from ddlkit import store
from workbook.common import source
from workbook.common.source import Source
from workbook.course.here import validation
from workbook.validate import accuracy

RECORDING = source.open_source()
COUNTS = ("training_cases", "replay_cases", "single_cases", "marked_cases")


@functools.cache
def recorded() -> pd.DataFrame:
    """Return the judged cases of the recording that teaches."""
    return accuracy.judge(RECORDING, RECORDING, "table")


def of_kind(kind: str) -> pd.DataFrame:
    return recorded()[recorded()["kind"] == kind]


def compare(here: Source) -> validation.Judged:
    return validation.compare(of_kind("replay"), of_kind("training"), here)


def as_if_measured_here(folder: Path, runs: pd.DataFrame) -> Source:
    """Write runs, with the recorded messages and layers, as if measured on this machine."""
    for kind, rows in (("runs", runs), ("collectives", RECORDING.table("collectives"))):
        rows = rows.drop(columns="machine")
        store.save_table(rows, folder, f"{kind}-a", schema=kind, command=["test"])
    profiles = runs["profile_sha256"].unique()
    for path in store.list_tables(source.teaching_recording(), "layers-*.csv"):
        if store.read_profile(path).sha256 in profiles:
            layers = store.load_table(path, "layers")
            store.save_table(
                layers, folder, path.stem, schema="layers", command=["test"]
            )
    return Source((folder,))


def predicted_runs() -> pd.DataFrame:
    """Return the recorded runs with the step that the model predicts, given their compute."""
    cases = recorded().set_index("case")
    runs = RECORDING.table("runs").assign(disturbed=False, compute_s=float("nan"))
    exposed_s = runs["case"].map(cases["model_exposed_s"])
    compute_s = runs["case"].map(cases["measured_compute_s"])
    return runs.assign(
        compute_s=compute_s,
        iteration_s=compute_s + exposed_s,
        exposed_communication_s=exposed_s,
    )


def test_the_recording_judged_by_itself_has_its_own_errors() -> None:
    judged = compare(RECORDING)
    training = of_kind("training")
    overlapping = training[training["plan"] != "single"]
    numbers = judged.numbers
    assert [numbers[count] for count in COUNTS] == [
        len(overlapping),
        len(of_kind("replay")),
        len(training) - len(overlapping),
        0,
    ]
    paired = overlapping["model_paired_error"].abs().median()
    assert numbers["training_median_paired_error"] == pytest.approx(paired)
    replayed = of_kind("replay")["model_error"].abs().median()
    assert numbers["replay_median_error"] == pytest.approx(replayed)
    assert numbers["replay_interval_coverage"] == of_kind("replay")["inside"].mean()
    assert "ResNet-18" in numbers["training_networks"]
    assert numbers["sentence"] == judged.sentence and judged.figure is not None


def test_where_nothing_was_run_there_are_no_numbers() -> None:
    assert compare(Source(())) == (validation.NOTHING, None, {})


def test_runs_as_the_model_predicts_them_have_no_error(tmp_path: Path) -> None:
    numbers = compare(as_if_measured_here(tmp_path, predicted_runs())).numbers
    for name in ("training_median_paired_error", "replay_median_error"):
        assert numbers[name] == pytest.approx(0, abs=1e-6)
    assert numbers["replay_interval_coverage"] > 0.9
    assert numbers["marked_cases"] == 0 and numbers["single_cases"] == 1


def test_disturbed_cases_are_counted_and_not_judged(tmp_path: Path) -> None:
    runs = predicted_runs()
    spoilt = runs["case"] == of_kind("training").query("plan == 'ddp'")["case"].item()
    runs.loc[spoilt, ["iteration_s", "exposed_communication_s"]] *= 10
    runs.loc[spoilt, "disturbed"] = True
    judged = compare(as_if_measured_here(tmp_path, runs))
    numbers = judged.numbers
    assert numbers["marked_cases"] == 1
    assert numbers["training_cases"] == len(of_kind("training")) - 2
    assert numbers["training_median_paired_error"] == pytest.approx(0, abs=1e-6)
    assert "1 of" in judged.sentence


def test_replays_alone_say_nothing_of_training(tmp_path: Path) -> None:
    runs = predicted_runs()
    here = as_if_measured_here(tmp_path, runs[runs["kind"] == "replay"])
    numbers = compare(here).numbers
    assert numbers["replay_cases"] == len(of_kind("replay"))
    assert not [name for name in numbers if name.startswith("training")]
