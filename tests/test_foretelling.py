"""What is written down before runs: by gloo's law and by the table, each under its own name."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from ddlkit import store
from ddlkit.model import Calibration
from ddlkit.model.predictor import MEASURED, OURS
from ddlkit.model.rings import LAW, TABLE
from ddlkit.report.accuracy import joined
from ddlkit.report.source import LINKS, Source
from ddlkit.run.sessions import campaign
from ddlkit.run.sessions.campaign_inputs import Inputs
from ddlkit.run.sessions.foretelling import carried_from, foretell
from ddlkit.run.sessions.reader import read_campaign
from places import ROOT

(RECORDED,) = store.RECORDED.glob(f"*/{LINKS}")
"""The campaign on which the law was chosen; its cases were foretold by the table."""
LAB = "p4-emulated-500mbit-delay1ms"


@pytest.fixture
def points(monkeypatch: pytest.MonkeyPatch) -> campaign._LabPoints:
    """One of its labs, as recorded."""
    monkeypatch.setattr(store, "recorded_dir", lambda: RECORDED.parent)
    found = read_campaign(ROOT / "examples" / "campaign_links.yml")
    (shape,) = [shape for shape in found.labs if shape.name == LAB]
    return campaign._LabPoints(shape, found.labs[shape], Inputs(found, RECORDED.parent, LINKS))


def told(points: campaign._LabPoints, cost: str) -> pd.DataFrame:
    rows = foretell(
        points.planned(),
        points.calibration.rows(),
        cost,
        Calibration({}),
        points.inputs.selection_times,
    )
    assert set(rows.loc[rows["model"] == OURS, "cost"]) == {cost}
    return rows.set_index(["case", "model", "quantity"])["seconds"]


def test_by_the_table_a_lab_is_foretold_as_it_was(points: campaign._LabPoints) -> None:
    was = store.load_table(RECORDED / "predicted-cases.csv", "predicted")
    assert set(was["cost"]) == {""}, "nobody wrote then which it was"
    now = told(points, TABLE)
    then = was.set_index(["case", "model", "quantity"])["seconds"].reindex(now.index)
    pd.testing.assert_series_equal(now, then, rtol=1e-9)


def test_by_the_law_only_ours_changes_and_comes_closer(points: campaign._LabPoints) -> None:
    law, table = told(points, LAW), told(points, TABLE)
    ours = law.xs(OURS, level="model")
    pd.testing.assert_series_equal(law.xs(MEASURED, level="model"), table.xs(OURS, level="model"))
    both = [one.drop([OURS, MEASURED], level="model", errors="ignore") for one in (law, table)]
    pd.testing.assert_series_equal(*both)
    cases = joined(Source((RECORDED,))).set_index("case")
    here = cases.loc[ours.index.unique("case")]
    error = ours.xs("iteration", level="quantity") / here["measured_iteration_s"] - 1
    assert error.abs().median() < here["model_error"].abs().median() / 2
    low, high = (ours.xs(end, level="quantity") for end in ("lower", "upper"))
    assert here["measured_iteration_s"].between(low, high).all()


def test_nothing_is_carried_where_nothing_was_recorded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, points: campaign._LabPoints
) -> None:
    monkeypatch.setattr(store, "recorded_dir", lambda: tmp_path)
    assert carried_from(tmp_path, points.shape).known == {}
