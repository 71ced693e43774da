"""Numbers of the last table of notebook 13 that no goal and no other notebook has."""

from __future__ import annotations

import pandas as pd
import pytest

from ddlkit.core.case import Case
from ddlkit.model import Calibration
from ddlkit.model.predictor import forecast_case
from workbook.common import source


@pytest.fixture(scope="module")
def two_at_once() -> pd.DataFrame:
    """Replays of GoogLeNet with a message for each gradient, two of them under way at once."""
    runs = source.open_campaign().alone.table("runs")
    return runs.query("network == 'googlenet' and plan == 'none' and in_flight == 2")


@pytest.fixture(scope="module")
def messages(two_at_once: pd.DataFrame) -> pd.DataFrame:
    """Message times of their lab, one at a time and two at a time."""
    rows = source.open_campaign().alone.table("collectives")
    place = two_at_once[["link", "workers"]].iloc[0]
    return rows[(rows["link"] == place["link"]) & (rows["ranks"] == place["workers"])]


def test_messages_at_once_need_a_calibration_at_once(
    two_at_once: pd.DataFrame, messages: pd.DataFrame
) -> None:
    """Timed one at a time, small messages seem to start for free: the step is predicted too short."""
    case = Case.from_row(two_at_once.iloc[0].to_dict())
    workloads = source.open_campaign().workloads()
    measured_s = two_at_once["iteration_s"].median()
    errors = []
    for rows in (messages[messages["in_flight"] == 1], messages):
        calibration = Calibration.of(rows, draws=0)
        step = forecast_case(case, workloads, calibration).iteration
        errors.append(step.prediction.iteration_s / measured_s - 1)
    one_at_a_time, both = errors
    assert len(step.plan.ends) == 173
    assert one_at_a_time == pytest.approx(-0.08, abs=0.005)
    assert one_at_a_time < both < 0
