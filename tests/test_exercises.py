"""Exercises are judged by solutions that lie apart, which say right only what is right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pytest

from ddlkit.core.errors import UserError
from workbook.common import places
from workbook.course import exercises
from workbook.course.exercises import Judge, Key

SOLVED = sorted(exercises.SOLUTIONS.glob("*.ipynb"))


def written(folder: Path, code: str) -> Path:
    """A folder with the solution of the one exercise of a notebook "nn"."""
    cells = []
    for kind, source in (
        ("hint", "look"),
        ("solution", code),
        ("explanation", "so it is"),
    ):
        make = (
            nbformat.v4.new_code_cell
            if kind == "solution"
            else nbformat.v4.new_markdown_cell
        )
        cells.append(make(source, metadata={"tags": [f"{kind}-1"]}))
    notebook = nbformat.v4.new_notebook(cells=cells)
    (folder / "nn.ipynb").write_text(nbformat.writes(notebook), encoding="utf-8")
    return folder


MANY_RIGHT = """
answer_1 = [1.0, 3.0]
def fault_1(given):
    a, b = given
    return "" if a < b else "does not rise"
"""
FUNCTION = """
def answer_1(a, b):
    return a + b, [b, b]
expected_1 = answer_1
cases_1 = [(np.arange(3.0), 1.0), (np.ones(2), 2.0)]
"""
RIGHT = "Exercise 1: right. so it is\n"


@pytest.mark.parametrize(
    ("solution", "answer", "words"),
    [
        ("answer_1 = two / 4", "50%", RIGHT),
        ("answer_1 = two / 4", [np.float32(0.505)], RIGHT),
        ("answer_1 = two / 4", None, "replace None"),
        (
            "answer_1 = two / 4",
            0.52,
            "0.52 at place 1, which is too high; try again.\nHint: look\n",
        ),
        ("answer_1 = two / 4", "45%", "too low"),
        ("answer_1 = [1.0, two]", 1.0, "has 1 of 2 numbers"),
        ("answer_1 = [1.0, two]", [1, 3], "3 at place 2, which is too high"),
        ("answer_1 = [1.0, two]", (1, "2"), RIGHT),
        ("answer_1 = 'one\\ntwo'", " ", "is empty"),
        ("answer_1 = 'one\\ntwo'", "so", "things?\none\ntwo\n"),
        (FUNCTION, lambda a, b: (a + b, [b, b]), RIGHT),
        (FUNCTION, lambda a, b: (a + b, [b, 1.1 * b]), "too high for [0. 1. 2.], 1.0"),
        (FUNCTION, lambda a, b: a - b, "has 3 of 5 numbers"),
        (FUNCTION, lambda a, b: a / [], "raises ValueError"),
        (MANY_RIGHT, [2, 9], RIGHT),
        (MANY_RIGHT, [2, 1], "your answer does not rise"),
    ],
)
def test_an_answer_is_judged_by_its_kind(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    solution: str,
    answer: Any,
    words: str,
) -> None:
    Judge("nn", {"np": np, "two": 2.0}, written(tmp_path, solution))(1, answer)
    assert words in capsys.readouterr().out


@pytest.mark.parametrize(
    "wrong", ["1.2 s", True, {}, float("nan"), "1e999", [1, "x"], b"1"]
)
def test_what_is_no_number_is_refused_in_words(wrong: Any) -> None:
    assert Key(1.0).refusal(wrong)


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"cannot read .*nn\.ipynb"):
        exercises.read("nn", tmp_path)
    with pytest.raises(UserError, match="has no exercise 2: it has 1"):
        Judge("nn", {}, written(tmp_path, "answer_1 = 1"))(2, 1.0)


@pytest.mark.parametrize(
    ("solution", "words"),
    [
        (f"{FUNCTION}expected_1 = lambda a, b: a", "the solution has 5 of"),
        ("answer_1 = 2.0\nwrong_1 = [1.0, 3.0]", "has fewer than 3 wrong answers"),
        ("answer_1 = 2.0\nwrong_1 = [1.0, 3.0, 2.01]", "wrong answer 3 is accepted"),
    ],
)
def test_where_the_book_runs_a_wrong_solution_or_a_weak_checker_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, solution: str, words: str
) -> None:
    monkeypatch.setenv(exercises.SOLVED_VARIABLE, "1")
    Judge("nn", {}, written(tmp_path, "answer_1 = 2.0\nwrong_1 = [1.0, 3.0, 4.0]"))(
        1, None
    )
    with pytest.raises(UserError, match=f"exercise 1: .*{words}"):
        Judge("nn", {"np": np}, written(tmp_path, solution))(1, None)


@pytest.mark.parametrize("path", SOLVED, ids=lambda path: path.stem)
def test_solutions_are_of_a_notebook_that_asks_for_each(path: Path) -> None:
    cells = json.loads((places.NOTEBOOKS / path.name).read_text(encoding="utf-8"))[
        "cells"
    ]
    tags = [tag for cell in cells for tag in cell["metadata"].get("tags", ())]
    asked = [tag for tag in tags if tag.startswith("exercise-")]
    assert asked == [f"exercise-{number}" for number in exercises.read(path.stem)]
