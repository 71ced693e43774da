"""The lessons of the course, as their notebooks describe themselves in their first cell."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ddlkit.core.errors import UserError
from workbook.common import places
from workbook.common.catalog import REFERENCE

_TITLE = re.compile(r"^# (.+)$", re.MULTILINE)
_OBJECTIVE = re.compile(r"^\* \*\*Objective:\*\* (.+)$", re.MULTILINE)
_TIME = re.compile(
    r"^\* \*\*Time:\*\* (\d+) minutes; (\d+) with the exercises", re.MULTILINE
)
_CORE = " (core)"


@dataclass(frozen=True)
class Lesson:
    """One notebook: what it teaches, and how long it takes.

    Attributes
    ----------
    name : str
        The stem of the file, as in "03_predicting_a_step".
    title : str
        The heading, without the mark of the core path.
    core : bool
        Whether the notebook belongs to the core path.
    objective : str
        What a reader can do afterwards.
    minutes : int
        How long reading takes.
    minutes_with_exercises : int
        How long reading and the exercises take together.
    """

    name: str
    title: str
    core: bool
    objective: str
    minutes: int
    minutes_with_exercises: int

    @property
    def number(self) -> str:
        """Return the number by which other pages refer to the notebook, as in "03"."""
        return self.name[:2]

    @property
    def reference(self) -> bool:
        """Return whether the notebook is looked up and not read from start to end."""
        return self.number == REFERENCE


def read(path: Path) -> Lesson:
    """Return the lesson of a stored or executed notebook.

    Raises
    ------
    UserError
        Where the first cell lacks the title, the objective or the time.
    """
    notebook = json.loads(path.read_text(encoding="utf-8"))
    first_cell = "".join(notebook["cells"][0]["source"])
    title = _TITLE.search(first_cell)
    objective = _OBJECTIVE.search(first_cell)
    time = _TIME.search(first_cell)
    if title is None or objective is None or time is None:
        raise UserError(
            f"{path}: the first cell needs a title, and lines that begin with "
            "Objective and Time, as in '* **Time:** 12 minutes; 25 with the exercises'"
        )
    return Lesson(
        name=path.stem,
        title=title[1].removesuffix(_CORE),
        core=title[1].endswith(_CORE),
        objective=objective[1],
        minutes=int(time[1]),
        minutes_with_exercises=int(time[2]),
    )


def load() -> list[Lesson]:
    """Return all lessons of the course, in the order of their numbers."""
    return [read(path) for path in sorted(places.NOTEBOOKS.glob("*.ipynb"))]


def reading_time(lessons: Iterable[Lesson]) -> str:
    """Return how long it takes to read lessons, for readers."""
    return format_minutes(sum(lesson.minutes for lesson in lessons))


def working_time(lessons: Iterable[Lesson]) -> str:
    """Return how long lessons take with their exercises, for readers."""
    return format_minutes(sum(lesson.minutes_with_exercises for lesson in lessons))


def format_minutes(minutes: int) -> str:
    """Return minutes for readers.

    Examples
    --------
    >>> format_minutes(45), format_minutes(150), format_minutes(180)
    ('45 min', '2 h 30', '3 h')
    """
    hours, rest = divmod(minutes, 60)
    if hours == 0:
        return f"{rest} min"
    if rest == 0:
        return f"{hours} h"
    return f"{hours} h {rest:02}"
