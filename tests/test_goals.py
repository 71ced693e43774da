"""Goals are set before the data, and the history of the repository is asked whether they were."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import yaml

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.report import accuracy, goals, source
from ddlkit.report.goals import Change, Goal, Goals

MODEL = ("ddlkit/core", "ddlkit/model", "ddlkit/report/accuracy.py")
STATISTICS = "ddlkit/report/goals.py"
KEPT = store.DATA / "predicted"
SAID = ["model_iteration_s", "model_exposed_s", "lower_s", "upper_s"]
NOON = datetime(2026, 1, 1, 12, tzinfo=timezone.utc)
HOUR = timedelta(hours=1)


def cases(error: float = 0.001, n: int = 40) -> pd.DataFrame:
    columns = {"model_error": error, "model_exposed_error": 3 * error, "repeatability": 0.01}
    return pd.DataFrame({"case": range(n), **columns, "inside": np.arange(n) % 20 > 0})


def test_goals_are_judged_by_what_was_reached() -> None:
    known = goals.load()
    good = known.judged(cases(), NOON).set_index("goal")
    assert good["holds"].all()
    bad = known.judged(cases(0.5).assign(inside=False), NOON).set_index("goal")
    assert not bad.loc["median error, iteration", "holds"]
    assert not bad.loc["interval covers, least", "holds"]
    assert bad.loc["interval covers, most", "holds"]


def test_the_largest_over_the_cases_is_the_largest() -> None:
    """Not that of the case with the largest error: a small one may be far beyond its repeatability."""
    found = cases().assign(model_error=np.linspace(0.001, 0.04, 40))
    found["repeatability"] = np.where(np.arange(40) == 0, 1e-5, 1.0)
    beyond = found["model_error"] / (2 * found["repeatability"])
    assert goals.largest_error_over_repeatability(found) == beyond.max() == pytest.approx(50)
    assert goals.largest_error_over_repeatability(found, floor=1e-3) == pytest.approx(0.5)
    drawn = np.random.default_rng(0).permutation(40)
    assert goals.largest_error_over_repeatability(found.iloc[drawn]) == beyond.max()


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
    known = Goals(
        (Goal("g", "median_error", set_at, at_most=0.02),), (Change(changed_at, "model", "a term"),)
    )
    assert set(known.judged(cases(), NOON)["standing"]) == {standing}
    assert bool(known.since(NOON)) == (standing == "exploratory")


def test_the_present_campaign_only_explores_and_the_judgement_says_why() -> None:
    begun = source.open_campaign("").alone.begun("runs")
    reasons = goals.load().since(begun)
    assert any("Student's t" in reason for reason in reasons)
    assert any(reason.startswith("goals set since") for reason in reasons)


def test_repeatability_is_told_by_twenty_cases_of_five_rounds() -> None:
    runs = source.open_campaign("", source.REPEATS).alone.table("runs")
    assert len(accuracy.often_repeated(runs)) >= 20
    met = source.open_campaign("").alone.table("runs")
    assert not set(runs.loc[runs["plan"].str.startswith("random"), "plan"]) & set(met["plan"])


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
        goals.load(file)


# -- what the history says ---------------------------------------------------------------------


def git(root: Path, *words: str, at: datetime | None = None) -> str:
    when = at.isoformat() if at else ""
    dates = {"GIT_AUTHOR_DATE": when, "GIT_COMMITTER_DATE": when} if at else {}
    asked = ["git", "-C", str(root), *words]
    return subprocess.run(
        asked, capture_output=True, text=True, check=True, env={**os.environ, **dates}
    ).stdout


def commits(root: Path, since: datetime, *paths: str, until: str = "HEAD") -> list[str]:
    asked = ("log", "--format=%h", f"--since={since.isoformat()}", until, "--", *paths)
    return git(root, *asked).split()


def unconfirmed(root: Path, begun: datetime) -> list[str]:
    """Why the history does not confirm goals for a recording begun at that time; empty if it does."""
    before = f"--before={begun.isoformat()}"
    earlier = git(root, "log", "-1", "--format=%H", before, "--", "data/goals.yml").strip()
    stood = git(root, "show", f"{earlier}:data/goals.yml") if earlier else "goals: []"
    now = yaml.safe_load((root / "data/goals.yml").read_text())["goals"]
    new = [one["goal"] for one in now if one not in yaml.safe_load(stood)["goals"]]
    since = commits(root, begun, *MODEL, STATISTICS)
    return [*(f"goal {name}" for name in new), *(f"commit {one}" for one in since)]


@pytest.fixture
def repository(tmp_path: Path) -> Callable[..., Path]:
    """A function: writes files, and commits them at a time."""

    def commit(at: datetime, **files: str) -> Path:
        if not (tmp_path / ".git").exists():
            git(tmp_path, "init", "-q")
            git(tmp_path, "config", "user.name", "a")
            git(tmp_path, "config", "user.email", "a@b")
        for name, text in files.items():
            path = tmp_path / {"goals": "data/goals.yml", "model": "ddlkit/core/cost.py"}[name]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        git(tmp_path, "add", "-A")
        git(tmp_path, "commit", "-qm", "c", at=at)
        return tmp_path

    return commit


def test_history_tells_a_goal_that_was_moved_after_the_data(
    repository: Callable[..., Path],
) -> None:
    text = "goals: [{goal: g, at_most: 0.02}]"
    root = repository(NOON - HOUR, goals=text, model="1")
    assert unconfirmed(root, NOON) == []
    assert unconfirmed(root, NOON - 2 * HOUR) != []
    root = repository(NOON + HOUR, goals=text.replace("0.02", "0.04"))
    assert unconfirmed(root, NOON) == ["goal g"]
    root = repository(NOON + 2 * HOUR, goals=text, model="2")
    assert [reason[:6] for reason in unconfirmed(root, NOON)] == ["commit"]


@pytest.mark.parametrize("name", [source.CAMPAIGN, source.REPEATS])
def test_what_counts_as_confirmed_is_confirmed_by_the_history(name: str) -> None:
    """Of every recorded campaign: no goal, statistic or model that is newer than what it judges."""
    if not (store.ROOT / ".git").exists():
        pytest.skip("no history here: not a clone")
    if git(store.ROOT, "rev-parse", "--is-shallow-repository").strip() == "true":
        pytest.skip("the history here is shallow")
    known = goals.load()
    recorded = [path for path in store.RECORDED.glob(f"*/{name}") if [*path.glob("runs-*.csv")]]
    assert recorded
    for directory in recorded:
        begun = source.Source((directory,)).begun("runs")
        said, shown = known.since(begun), unconfirmed(store.ROOT, begun)
        if (KEPT / f"{name}.csv").exists():
            harmless = unmoved(name, begun)
            shown = [one for one in shown if one not in harmless]
        assert said or not shown, f"{directory}: {shown}: enter it in data/goals.yml"


def unmoved(name: str, begun: datetime) -> list[str]:
    """Commits after which the model says of a campaign what it said when that was recorded.

    data/predicted holds that; no commit may have touched the model between the recording and the table.
    """
    table = KEPT / f"{name}.csv"
    (added,) = git(store.ROOT, "log", "--diff-filter=A", "--format=%h", "--", str(table)).split()
    assert not commits(store.ROOT, begun, *MODEL, until=added), "the model was touched first"
    then, now = pd.read_csv(table, index_col="case")[SAID], predicted(name)[SAID]
    if then.index.equals(now.index) and np.allclose(then, now, rtol=1e-9, atol=0):
        return [f"commit {one}" for one in commits(store.ROOT, begun, *MODEL)]
    return []


def predicted(name: str) -> pd.DataFrame:
    """What the model says of a recorded campaign, by case."""
    campaign = source.open_campaign("", name)
    own = accuracy.calibrated(campaign.alone.table("collectives"))
    runs = campaign.alone.table("runs")
    said = accuracy.validate(runs, campaign.workloads(), own, campaign.selections())
    return said.set_index("case").sort_index()
