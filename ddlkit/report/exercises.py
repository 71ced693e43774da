"""Exercises of a notebook: answers are judged by solutions that lie apart from it, in solutions/.

A notebook says ``judge = exercises.of("03_predicting_a_step", globals())`` and, for each exercise in a cell
of its own, ``judge(1, answer_1)``. A solution, in the cell tagged "solution-1" of the notebook of that name,
runs in a copy of the notebook's names and sets

``answer_1``    a number, a list of numbers, a function, or three points, a line each (readers compare)
``expected_1``  of a function: another one, mostly the package's, that gives what it should
``cases_1``     of a function: the arguments with which both are called
``tolerance_1`` the relative difference that is right, 2% where it is not said
``fault_1``     where many answers are right: a function that says what is wrong with one, "" of a right one
``wrong_1``     at least three plausible wrong answers, but of a text

Where the book runs, each exercise is answered by its own solution, and its wrong answers must be refused.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.store.files import read_text

SOLUTIONS = store.ROOT / "solutions"
SOLVED_VARIABLE = "DDLKIT_EXERCISES_SOLVED"
"""Set where exercises are answered by their own solutions."""
WRONG = 3
"""Wrong answers that a checker is tried with, at least."""
HINT_AFTER = 2
"""Wrong tries before the hint."""
_NUMBER = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*(%?)", re.IGNORECASE)


class Solution(NamedTuple):
    """What solutions/ holds of one exercise: Markdown, code, Markdown."""

    hint: str
    solution: str
    explanation: str


def read(notebook: str, folder: Path = SOLUTIONS) -> dict[int, Solution]:
    """Return the solutions of a notebook by exercise. Raises KeyError for one that is not whole."""
    sources: dict[str, str] = {}
    for cell in json.loads(read_text(folder / f"{notebook}.ipynb"))["cells"]:
        sources |= dict.fromkeys(cell["metadata"].get("tags", ()), "".join(cell["source"]))
    numbers = sorted({int(tag.rpartition("-")[2]) for tag in sources if "-" in tag})
    tags = {number: [f"{kind}-{number}" for kind in Solution._fields] for number in numbers}
    return {number: Solution(*map(sources.__getitem__, kinds)) for number, kinds in tags.items()}


class Malformed(str):
    """The end of a sentence: why something is no answer, which is not counted as a try."""


class Judge:
    """Says whether answers to a notebook's exercises are right; counts the wrong ones."""

    def __init__(self, notebook: str, names: dict[str, Any], folder: Path = SOLUTIONS) -> None:
        self.notebook, self.names = notebook, names
        self.solutions, self.wrong = read(notebook, folder), Counter[int]()

    def __call__(self, number: int, answer: Any) -> None:
        """Print what to say to ``answer``; None asks for one. Raises UserError for an unknown exercise."""
        if number not in self.solutions:
            numbers = ", ".join(map(str, self.solutions))
            raise UserError(f"{self.notebook} has no exercise {number}: it has {numbers}")
        by_solution = os.environ.get(SOLVED_VARIABLE) == "1"
        if answer is None and not by_solution:
            print(f"Exercise {number}: replace None by your answer and run this cell again.")
            return
        names = dict(self.names)
        exec(self.solutions[number].solution, names)
        key = Key(**{n: names[f"{n}_{number}"] for n in Key._fields if f"{n}_{number}" in names})
        fault = key.refusal(key.answer if answer is None else answer)
        if by_solution and (why := f"the solution {fault}" if fault else key.weakness()):
            raise UserError(f"{self.notebook}: exercise {number}: {why}")
        print(f"Exercise {number}: {self._reply(number, key, fault)}")

    def _reply(self, number: int, key: Key, fault: str) -> str:
        solution = self.solutions[number]
        if isinstance(fault, Malformed):
            return f"your answer {fault}."
        if fault:
            self.wrong[number] += 1
            hint = f"\nHint: {solution.hint}" if self.wrong[number] >= HINT_AFTER else ""
            return f"your answer {fault}; try again.{hint}"
        if isinstance(key.answer, str):
            return f"does yours say these three things?\n{key.answer.strip()}"
        if callable(key.answer) or key.fault is not None:  # one of many that are right
            return f"right. {solution.explanation}"
        values = ", ".join(f"{value:.4g}" for value in np.atleast_1d(key.answer))
        return f"right ({values}). {solution.explanation}"


class Key(NamedTuple):
    """What an answer is held against: see the module."""

    answer: Any
    expected: Any = None
    cases: Any = ()
    tolerance: float = 0.02
    wrong: Any = ()
    fault: Any = None

    def weakness(self) -> str:
        """Return why the solution judges too little: a wrong answer is accepted, or too few are tried."""
        if isinstance(self.answer, str):
            points = [line for line in self.answer.splitlines() if line.strip()]
            return "" if len(points) == WRONG else "give three points to compare with, a line each"
        if len(self.wrong) < WRONG:
            return f"wrong has fewer than {WRONG} wrong answers"
        accepted = [place for place, answer in enumerate(self.wrong, 1) if not self.refusal(answer)]
        return f"wrong answer {accepted[0]} is accepted" if accepted else ""

    def refusal(self, given: Any) -> str:
        """Return what is wrong with an answer, as the end of a sentence; empty where it is right."""
        if callable(self.answer) and not callable(given):
            return Malformed("is not a function: write one, and give its name")
        if isinstance(self.answer, str) and self.fault is None:
            return "" if str(given).strip() else Malformed("is not a text")
        try:
            if self.fault is not None:
                return str(self.fault(copy.deepcopy(given)))
            if callable(self.answer):
                return self._fault_function(given)
        except Exception as error:  # whatever a reader's answer does is said to the reader
            return f"raises {type(error).__name__} ({error})"
        return self._fault_numbers(given)

    def _fault_numbers(self, given: Any) -> str:
        try:
            values = numbers(given)
        except ValueError as error:
            return Malformed(error)
        right = np.atleast_1d(np.asarray(self.answer, float))
        if values.shape != right.shape:
            return Malformed(f"has {values.size} of {right.size} numbers")
        near = np.isclose(values, right, rtol=self.tolerance, atol=1e-12)
        if near.all():
            return ""
        place = int(np.argmin(near))
        side = "high" if values[place] > right[place] else "low"
        where = "" if near.size == 1 else f", at place {place + 1},"
        return f"{values[place]:.4g}{where} is too {side}"

    def _fault_function(self, given: Any) -> str:
        for case in self.cases:
            wanted, values = _flat(self.expected(*case)), _flat(given(*copy.deepcopy(case)))
            if values.shape != wanted.shape or not np.allclose(values, wanted, rtol=1e-9):
                with np.printoptions(precision=4, threshold=8):
                    what = f"gives {values} instead of {wanted} for "
                    return what + ", ".join(map(str, case))[:200]
        return ""


def numbers(given: Any) -> Any:
    """Return (k,) floats of a number, of text as "74%", or of a list of those.

    Raises ValueError with the end of a sentence that says what is wrong.

    >>> numbers("74%").tolist(), numbers([1, "2.5"]).tolist()
    ([0.74], [1.0, 2.5])
    """
    values = []
    many = given if isinstance(given, list | tuple | np.ndarray) else [given]
    for value in np.asarray(many, object).ravel():
        if isinstance(value, bool) or not isinstance(value, int | float | np.number | str):
            raise ValueError(f"is a {type(value).__name__}: give a number")
        match = _NUMBER.fullmatch(str(value).strip())
        number = float(match[1]) / (100 if match[2] else 1) if match else np.nan
        if not np.isfinite(number):
            text = repr(value).strip()[:40]
            raise ValueError(f"{text} is not a finite number: write 0.74 or 74%, without a unit")
        values.append(number)
    return np.array(values)


def _flat(value: Any) -> Any:
    parts = value if isinstance(value, tuple) else (value,)
    return np.concatenate([np.ravel(np.asarray(part, float)) for part in parts])


of = Judge
