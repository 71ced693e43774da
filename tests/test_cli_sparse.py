"""``ddlkit plan`` and ``predict`` of sparsified messages: density, selection, planners, and mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ddlkit import cli
from ddlkit.store import RECORDED, list_tables

GATHER = {"form": "alpha_beta", "alpha_s": 1e-3, "beta_s_per_byte": 8e-9, "workers": 4}
SELECTION = {"form": "log", "gamma_s": 2.2e-10}
HALF = ["--density", "0.5", "--selection", "selection.json"]
PLANS = ("none", "single", "mgs:8192", "omgs", "omgs:theorem", "exact")


@pytest.fixture
def inputs(profile: Path, tmp_path: Path) -> list[str]:
    """A profile of five tensors, an all-gather and a selection cost, as arguments."""
    written = {"gather.json": {**GATHER, "collective": "all_gather"}, "reduce.json": GATHER}
    written["selection.json"] = SELECTION
    for name, described in written.items():
        (tmp_path / name).write_text(json.dumps(described))
    return ["--profile", str(profile), "--cost", f"{tmp_path}/gather.json", "--json"]


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict:
    capsys.readouterr()
    assert cli.main([str(a) for a in arguments]) == 0
    found: dict = json.loads(capsys.readouterr().out)
    return found


def sparse(tmp_path: Path, density: float = 0.001) -> list[str]:
    return ["--density", str(density), "--selection", f"{tmp_path}/selection.json"]


def test_every_planner_can_be_asked_for_and_none_beats_exact(
    inputs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = {}
    for planner in PLANS:
        found = run(capsys, "plan", *inputs, *sparse(tmp_path), "--planner", planner)
        assert found["planner"] == planner
        assert found["warnings"] == []
        taken[planner] = found["iteration_s"]
        predicted = run(capsys, "predict", *inputs, *sparse(tmp_path), "--plan", planner)
        assert predicted["iteration_s"] == found["iteration_s"]
        assert ("no_plan_below_s" in found) == (planner == "exact")
        if planner == "exact":
            assert found["no_plan_below_s"] == pytest.approx(found["iteration_s"], rel=1e-11)
    assert min(taken.values()) == taken["exact"]


def test_selection_is_computed_and_values_and_indices_are_gathered(
    inputs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run(capsys, "predict", *inputs, *sparse(tmp_path), "--plan", "single")
    assert found["selection_s"] == pytest.approx(2.2e-10 * 3.75e6 * 21.838, rel=1e-4)
    assert found["compute_s"] == pytest.approx(0.15 + found["selection_s"])
    gathered = 4 * 4 * 3750  # bytes of 4 workers' values, or of their indices
    assert found["communication_s"] == pytest.approx(2 * (1e-3 + 8e-9 * gathered))
    dense = run(capsys, "predict", *inputs, "--plan", "single")
    assert "selection_s" not in dense


def test_what_selecting_takes_is_read_from_tables_too(
    inputs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    tables = list_tables(RECORDED / "cpu-2x-amd-epyc-suite", "selection-d*.csv.gz")
    answer = run(capsys, "predict", *inputs, "--density", 0.005, "--selection", *tables)
    assert answer["selection_form"] == "table" and answer["selection_s"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--density", "0.001"], "give --density and --selection TABLE together"),
        (["--density", "0", "--selection", "selection.json"], "density 0.0 is not above 0"),
        (["--density", "0.1", "--selection", "gather.json"], "unknown cost form 'alpha_beta'"),
        ([*HALF, "--gradient-bytes", "2"], "4 bytes a parameter"),
        ([*HALF, "--cost", "reduce.json"], "needs the cost of an all_gather"),
    ],
)
def test_a_mistake_is_one_line(
    inputs: list[str],
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = [str(tmp_path / word) if word.endswith("json") else word for word in arguments]
    assert cli.main(["plan", *inputs, *given]) == 2
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1


def test_sparse_messages_are_calibrated_by_the_all_gathers_of_a_table(
    profile: Path, inputs: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """They are gathered, whatever else the table holds."""
    table = RECORDED / "cpu-2x-amd-epyc" / "collectives-lab-p4-1gbit.csv"
    argv = ["predict", "--profile", profile, "--collectives", table, "--ranks", 4, "--json"]
    found = run(capsys, *argv, *sparse(tmp_path, 0.01))
    low, high = found["interval_95_s"]
    assert 0.15 < low <= found["iteration_s"] <= high
    dense = run(capsys, *argv)
    assert found["communication_s"] < dense["communication_s"]
