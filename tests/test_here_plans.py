"""The section on this machine of notebook 04: plans compared with the best plan."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.axes import Axes

from ddlkit import store
from workbook.common import source
from workbook.common.source import Source
from workbook.course import example
from workbook.course.here import plans
from workbook.validate import compare

RECORDING = source.open_source()


def save_runs(folder: Path, runs: pd.DataFrame) -> Source:
    """Write runs as if they had been measured on this machine."""
    runs = runs.drop(columns="machine")
    store.save_table(runs, folder, "runs-replay", schema="runs", command=["test"])
    return Source((folder,))


def googlenet_runs() -> pd.DataFrame:
    """Return the recorded replays of the running example."""
    runs = RECORDING.table("runs")
    return runs[(runs["network"] == example.NETWORK) & (runs["origin"] == "replayed")]


def default_ratio(sentence: str) -> float:
    """Return the first ratio that a sentence has."""
    return float(re.findall(r"takes (\d\.\d\d) times", sentence)[0])


def test_the_recording_compared_with_itself_has_its_own_ratios() -> None:
    sentence, figure = plans.compare([RECORDING], RECORDING)
    paired = compare.paired(googlenet_runs(), "exact").set_index("other")["ratio"]
    assert default_ratio(sentence) == pytest.approx(paired["ddp"], abs=0.005)
    assert figure is not None
    for ax in filter(Axes.get_visible, figure.axes):
        recorded, here = (np.sort(line.get_xdata()) for line in ax.get_lines()[1:])
        assert here.size > 0 and np.array_equal(recorded, here)


def test_where_nothing_was_replayed_there_is_no_figure() -> None:
    sentence, figure = plans.compare([RECORDING], Source(()))
    assert figure is None and "./reproduce.sh" in sentence


def test_a_default_that_takes_twice_as_long_is_found(tmp_path: Path) -> None:
    runs = googlenet_runs().copy()
    best_s = runs[runs["plan"] == "exact"].set_index("repeat")["iteration_s"]
    is_default = runs["plan"] == "ddp"
    runs.loc[is_default, "iteration_s"] = 2 * runs["repeat"].map(best_s)
    sentence, figure = plans.compare([RECORDING], save_runs(tmp_path, runs))
    assert default_ratio(sentence) == 2.0 and figure is not None
    assert (
        f"recorded: {default_ratio(plans.compare([Source(())], RECORDING)[0]):.2f}"
        in sentence
    )


def test_disturbed_rounds_are_left_out(tmp_path: Path) -> None:
    runs = googlenet_runs().assign(disturbed=False)
    ratio = default_ratio(
        plans.compare([Source(())], save_runs(tmp_path / "calm", runs))[0]
    )
    spoilt = (runs["plan"] == "ddp") & (runs["repeat"] < 2)
    runs.loc[spoilt, "iteration_s"] *= 10
    runs.loc[spoilt, "disturbed"] = True
    here = save_runs(tmp_path / "disturbed", runs)
    assert default_ratio(plans.compare([Source(())], here)[0]) == pytest.approx(
        ratio, rel=0.05
    )


def test_without_the_best_plan_nothing_is_compared(tmp_path: Path) -> None:
    runs = googlenet_runs()
    here = save_runs(tmp_path, runs[runs["plan"] != "exact"])
    assert plans.compare([RECORDING], here) == (plans.NOT_COMPARED, None)


def test_trainings_alone_are_no_replays(tmp_path: Path) -> None:
    runs = RECORDING.table("runs")
    here = save_runs(tmp_path, runs[runs["origin"] == "measured"])
    assert plans.compare([RECORDING], here) == (plans.NOTHING, None)
