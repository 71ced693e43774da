"""What predictions should reach, set before the data that they are judged on; and what was changed since.

data/goals.yml holds goals and changes with their dates. A judgement is *exploratory* where a goal was set, or
the model, a statistic or the choice of cases changed, after the recording had begun: such numbers suggest,
and only a new recording confirms.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from ddlkit import store
from ddlkit.core.errors import UserError

FILE = store.DATA / "goals.yml"


def largest_error_over_repeatability(cases: pd.DataFrame, floor: float = 0.0) -> float:
    """The largest, over all cases, of the error over twice what the case itself repeats to.

    floor : what no case is believed to repeat to better than: two repeats may agree by chance
    """
    beyond = cases["model_error"].abs() / (2 * cases["repeatability"].clip(lower=floor))
    return float(beyond.max())


STATISTICS: dict[str, Callable[[pd.DataFrame], float]] = {
    "median_error": lambda cases: float(cases["model_error"].abs().median()),
    "median_exposed_error": lambda cases: float(cases["model_exposed_error"].abs().median()),
    "largest_error_over_repeatability": largest_error_over_repeatability,
    "coverage": lambda cases: float(cases["inside"].mean()),
}
"""What a goal may ask of `accuracy.labelled` cases."""


@dataclass(frozen=True)
class Goal:
    """One number to reach: a statistic of all cases, at most or at least a value, set at a time."""

    goal: str
    statistic: str
    set_at: datetime
    at_most: float | None = None
    at_least: float | None = None

    def holds(self, reached: float) -> bool:
        """Whether what was reached is enough."""
        low = self.at_least is None or reached >= self.at_least
        return low and (self.at_most is None or reached <= self.at_most)


@dataclass(frozen=True)
class Change:
    """Something that can move the numbers: ``of`` is "model", "statistic" or "cases"."""

    at: datetime
    of: str
    what: str


@dataclass(frozen=True)
class Goals:
    """All goals, and all changes in their order."""

    goals: tuple[Goal, ...]
    changes: tuple[Change, ...]

    def since(self, recorded: datetime) -> list[str]:
        """Why a recording begun at that time only explores: one line each; none where it confirms."""
        late = [one for one in self.goals if one.set_at >= recorded]
        reasons = [f"goals set since: {', '.join(one.goal for one in late)}"] if late else []
        changed = [one for one in self.changes if one.at >= recorded]
        return [*reasons, *(f"{one.of} changed since: {one.what}" for one in changed)]

    def judged(self, cases: pd.DataFrame, recorded: datetime) -> pd.DataFrame:
        """One row per goal: wanted, reached on `accuracy.labelled` cases, holds, and its standing.

        recorded : when the recording of these cases was begun
        """
        standing = "exploratory" if self.since(recorded) else "confirmatory"
        rows = []
        for goal in self.goals:
            reached = STATISTICS[goal.statistic](cases)
            wanted = goal.at_least if goal.at_most is None else goal.at_most
            word = "at least" if goal.at_most is None else "at most"
            rows.append({"goal": goal.goal, "wanted": f"{word} {wanted:g}", "reached": reached})
            rows[-1] |= {"holds": goal.holds(reached), "standing": standing}
        return pd.DataFrame(rows)


def load(file: Path = FILE) -> Goals:
    """The goals and changes in ``file``. Raises UserError for an entry that is not one, naming it."""
    found = yaml.safe_load(file.read_text(encoding="utf-8"))
    goals = [_read(file, entry, _goal) for entry in found["goals"]]
    changes = [_read(file, entry, _change) for entry in found["changes"]]
    return Goals(tuple(goals), tuple(sorted(changes, key=lambda change: change.at)))


def _read(file: Path, entry: dict[str, Any], make: Callable[[dict[str, Any]], Any]) -> Any:
    try:
        return make(entry)
    except (KeyError, TypeError, ValueError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{file}: {entry}: not a goal or a change: {reason}") from None


def _goal(entry: dict[str, Any]) -> Goal:
    known = dict(entry)
    goal = Goal(set_at=_moment(known.pop("set")), **known)
    if goal.statistic not in STATISTICS or (goal.at_most is None) == (goal.at_least is None):
        raise ValueError(f"one of at_most and at_least, of {', '.join(STATISTICS)}")
    return goal


def _change(entry: dict[str, Any]) -> Change:
    if entry["of"] not in ("model", "statistic", "cases"):
        raise ValueError("of model, statistic or cases")
    return Change(_moment(entry["at"]), entry["of"], entry["what"])


def _moment(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError(f"{text}: without an offset from UTC")
    return moment
