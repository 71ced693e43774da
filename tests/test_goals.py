"""Goals are set before the data: how they are judged, and what was frozen of every recorded campaign."""

from __future__ import annotations

import hashlib
import json
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.report import accuracy, source
from ddlkit.report.accuracy import LINKS_GOALS, Change, Goal, Goals, load_goals

NOON = datetime(2026, 1, 1, 12, tzinfo=timezone.utc)
HOUR = timedelta(hours=1)
GOALS, COVERAGE = (
    pd.read_csv(store.ROOT / "reports" / name, keep_default_na=False, dtype=str)
    for name in ("goals.csv", "coverage.csv")
)
FROZEN = {
    "goals": (124, "2f04302eb2c8e532dc117767361dc2ee191744c62810a4ae0bab8c5f8f17f697"),
    "coverage": (57, "8d96164e4db6f825510b71127113b5480aedc7de1f00eafea8126fa79b59e51a"),
}
"""Rows of v0.2-studies (docs/studies.md), and their hash without the column ``state``."""
LEFT = "at v0.2-studies"


def cases(error: float = 0.001, n: int = 40) -> pd.DataFrame:
    columns = {"model_error": error, "model_exposed_error": 3 * error, "repeatability": 0.01}
    return pd.DataFrame({"case": range(n), **columns, "inside": np.arange(n) % 20 > 0})


def test_goals_are_judged_by_what_was_reached() -> None:
    assert load_goals().judged(cases(), NOON)["holds"].all()
    bad = load_goals().judged(cases(0.5).assign(inside=False), NOON).set_index("goal")["holds"]
    assert not bad["median error, iteration"] and not bad["interval covers, least"]
    assert bad["interval covers, most"]


def test_the_largest_over_the_cases_is_the_largest() -> None:
    """Not that of the case with the largest error: a small one may be far beyond its repeatability."""
    drawn = cases().assign(model_error=np.linspace(0.001, 0.04, 40))
    drawn["repeatability"] = np.where(np.arange(40) == 0, 1e-5, 1.0)
    assert accuracy.largest_error_over_repeatability(drawn) == pytest.approx(50)


@pytest.mark.parametrize(
    ("set_at", "changed_at", "standing"),
    [
        (NOON - HOUR, NOON - HOUR, "confirmatory"),
        (NOON + HOUR, NOON - HOUR, "exploratory"),
        (NOON - HOUR, NOON + HOUR, "exploratory"),
    ],
)
def test_what_came_after_the_recording_makes_it_exploratory(
    set_at: datetime, changed_at: datetime, standing: str
) -> None:
    goal = Goal("g", "median_error", 0.02, set_at=set_at)
    known = Goals((goal,), (Change(changed_at, "model", "a term"),))
    assert set(known.judged(cases(), NOON)["standing"]) == {standing}
    assert bool(known.since(NOON)) == (standing == "exploratory")


def test_the_campaign_only_explores_and_the_judgement_says_why() -> None:
    reasons = load_goals().since(source.open_campaign("").alone.begun("runs"))
    assert any("Student's t" in reason for reason in reasons)
    assert any(reason.startswith("goals set since") for reason in reasons)


@pytest.mark.parametrize(
    "entry",
    [
        {"goal": "g", "statistic": "median_error", "set": "2026-01-01T00:00:00+00:00"},
        {"goal": "g", "statistic": "skill", "at_most": 1, "set": "2026-01-01T00:00:00+00:00"},
        {"goal": "g", "statistic": "median_error", "at_most": 1, "set": "2026-01-01"},
        {"goal": "g", "statistic": "median_error", "at_most": 1},
    ],
)
def test_an_entry_that_is_no_goal_is_told(tmp_path: Path, entry: dict[str, object]) -> None:
    file = tmp_path / "goals.yml"
    file.write_text(yaml.safe_dump({"goals": [entry], "changes": []}))
    with pytest.raises(UserError, match="not a goal or a change"):
        load_goals(file)


# -- what was frozen -----------------------------------------------------------------------------


def digest(entry: dict[str, Any]) -> str:
    """SHA-256 of an entry as JSON without spaces, its keys in order."""
    text = json.dumps(entry, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def holds(wanted: str, reached: float) -> bool:
    """Whether a goal is reached, by the words of the table."""
    word, _, limit = wanted.rpartition(" ")
    at = float(limit)
    return {
        "at most": reached <= at,
        "at least": reached >= at,
        "within": abs(reached) <= at,
        "below": reached < at,
        "above": reached > at,
    }[word]


@pytest.mark.parametrize("name", FROZEN)
def test_nothing_that_was_frozen_changes_or_disappears(name: str) -> None:
    """Campaigns recorded later add rows below; what left the reading path keeps its rows."""
    rows, sha256 = FROZEN[name]
    first = {"goals": GOALS, "coverage": COVERAGE}[name].head(rows).drop(columns="state")
    assert hashlib.sha256(first.to_csv(index=False).encode()).hexdigest() == sha256


def test_goals_are_those_that_were_frozen() -> None:
    entries = yaml.safe_load((store.DATA / "goals.yml").read_text(encoding="utf-8"))["goals"]
    of_file = GOALS["campaign"].isin([source.CAMPAIGN, source.REPEATS])
    assert set(GOALS.loc[of_file, "goal_sha256"]) == {digest(entry) for entry in entries}
    for row in GOALS[~of_file].itertuples():
        assert row.goal_sha256 == digest({"goal": row.goal, "wanted": row.wanted})
    links = GOALS.loc[GOALS["campaign"] == source.LINKS, ["goal", "wanted"]]
    stated = {(goal.goal, goal.wanted) for goal in LINKS_GOALS}
    assert stated <= {*links.itertuples(index=False, name=None)}


def test_predictions_are_those_that_were_frozen() -> None:
    there = {
        path.stem: store.sha256_file(path) for path in (store.DATA / "predicted").glob("*.csv")
    }
    for path in store.list_tables(store.RECORDED, "*/*/predicted-*.csv"):
        there[path.parent.name] = store.load_stamp(path)["sha256"]
    said = GOALS[GOALS["prediction_sha256"] != ""]
    assert {*there} <= {*said["campaign"]}
    for row in said.itertuples():
        assert there.get(row.campaign) in {row.prediction_sha256, None if row.state else ""}


def test_what_was_wanted_and_reached_says_what_held() -> None:
    asked = GOALS[GOALS["wanted"] != "as it comes"]
    held = [holds(row.wanted, float(row.reached)) for row in asked.itertuples()]
    assert held == (asked["held"] == "True").to_list()
    assert {*asked["held"]} == {"True", "False"}
    assert {*GOALS.loc[GOALS["wanted"] == "as it comes", "held"]} == {""}
    assert (GOALS["n"].astype(int) > 0).all() and {*GOALS["state"]} <= {"", LEFT}


def test_what_confirms_was_committed_before_its_first_run() -> None:
    assert {*GOALS["standing"]} == {"confirmatory", "exploratory"}
    confirms = GOALS[GOALS["standing"] == "confirmatory"]
    committed, run = (pd.to_datetime(confirms[f"{what}_at"]) for what in ("committed", "first_run"))
    assert (committed < run).all()


def test_every_interval_says_how_often_it_held() -> None:
    reached, n = COVERAGE["reached"].astype(float), COVERAGE["n"].astype(int)
    assert reached.between(0, 1).all() and (n > 0).all()
    assert np.allclose(reached * n, (reached * n).round(), atol=1e-2), "a share of n"
    assert {*COVERAGE["replayed_or_real"]} <= {"replayed", "real"}
    assert COVERAGE["nominal"].astype(float).between(0, 1, inclusive="neither").all()
    assert (COVERAGE["median_half_width"].replace("", "1").astype(float) > 0).all()
    assert {*COVERAGE["state"]} <= {"", LEFT}


def test_the_model_says_of_the_confirming_cases_what_was_kept() -> None:
    campaign = source.open_campaign("", source.REPEATS)
    own = accuracy.calibrated(campaign.alone.table("collectives"))
    runs = campaign.alone.table("runs")
    now = accuracy.validate(runs, campaign.workloads(), own, campaign.selections())
    then = pd.read_csv(store.DATA / "predicted" / f"{source.REPEATS}.csv", index_col="case")
    now = now.set_index("case").loc[then.index, then.columns]
    assert np.allclose(then, now, rtol=1e-9, atol=0)
