"""Exercises of a notebook: answers are judged by solutions that lie apart from it, in solutions/.

A notebook says ``judge = exercises.of("03_predicting_a_step", globals())`` and, for each exercise in a
cell of its own, ``judge(1, answer_1)``. Its solutions are a notebook of the same name, whose cells are
tagged "hint-1", "solution-1" and "explanation-1". A solution runs in a copy of the notebook's names and sets

``answer_1``    a number, a list of numbers, a function, or three points, a line each (readers compare)
``expected_1``  of a function: another one, mostly the package's, that gives what it should
``cases_1``     of a function: the arguments with which both are called
``tolerance_1`` the relative difference that is right, 2% where it is not said
``fault_1``     where many answers are right: a function that says what is wrong with one, "" of a right one
``wrong_1``     at least three plausible wrong answers, but of a text

Where the workbook itself is run (`ddlkit.report.book`), each exercise is answered by its own solution, and by
its wrong answers, which must be refused. What is no answer at all, as a text for a number, is no try.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ddlkit import store
from ddlkit.core.errors import UserError

SOLUTIONS = store.ROOT / "solutions"
SOLVED_VARIABLE = "DDLKIT_EXERCISES_SOLVED"
"""Set where exercises are answered by their own solutions."""
TOLERANCE = 0.02
WRONG = 3
"""Wrong answers that a checker is tried with, at least."""
HINT_AFTER = 2
"""Wrong tries before the hint."""
KINDS = ("hint", "solution", "explanation")
PROSE = ("hint", "explanation")

_NUMBER = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*(%?)", re.IGNORECASE)


class Solution(NamedTuple):
    """What solutions/ holds of one exercise: Markdown, code, Markdown."""

    hint: str
    solution: str
    explanation: str


def read(notebook: str, folder: Path | None = None) -> dict[int, Solution]:
    """Return the solutions of a notebook by exercise. Raises UserError where one is missing or told twice."""
    path = (folder or SOLUTIONS) / f"{notebook}.ipynb"
    if not path.is_file():
        raise UserError(f"no solutions of {notebook}: expected {path}")
    sources: dict[str, str] = {}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        for tag in cell["metadata"].get("tags", ()):
            if tag in sources:
                raise UserError(f"{path}: two cells are tagged {tag}")
            sources[tag] = "".join(cell["source"])
    numbers = sorted(
        {int(n) for n in re.findall(rf"\b(?:{'|'.join(KINDS)})-(\d+)", str([*sources]))}
    )
    for tag in (f"{kind}-{number}" for number in numbers for kind in KINDS):
        if tag not in sources:
            raise UserError(f"{path}: exercise {tag.partition('-')[2]} has no cell tagged {tag}")
    return {n: Solution(*(sources[f"{kind}-{n}"] for kind in KINDS)) for n in numbers}


@dataclass
class Judge:
    """Says whether answers to a notebook's exercises are right; counts the wrong ones.

    notebook : its name without the suffix; names : what it knows, as globals() gives it
    """

    notebook: str
    names: dict[str, Any]
    folder: Path | None = None
    wrong: dict[int, int] = field(default_factory=dict)

    @cached_property
    def solutions(self) -> dict[int, Solution]:
        """Return them by exercise."""
        return read(self.notebook, self.folder)

    def __call__(self, number: int, answer: Any) -> None:
        """Print what to say to ``answer``; None asks for one. Raises UserError for an unknown exercise."""
        if number not in self.solutions:
            numbers = ", ".join(map(str, self.solutions))
            raise UserError(f"{self.notebook} has no exercise {number}: it has {numbers}")
        solved = os.environ.get(SOLVED_VARIABLE) == "1"
        if answer is None and not solved:
            print(f"Exercise {number}: replace None by your answer and run this cell again.")
            return
        key = self._key(number)
        answer = key.answer if answer is None else answer
        fault = key.fault(answer)
        if solved and (why := f"the solution {fault}" if fault else key.weakness()):
            raise UserError(f"{self.notebook}: exercise {number}: {why}")
        print(f"Exercise {number}: {self._reply(number, key, fault)}")

    def _key(self, number: int) -> Key:
        names = dict(self.names)
        exec(self.solutions[number].solution, names)
        set_to: dict[str, Any] = {
            name: names.get(f"{name}_{number}") for name in ("expected", "cases")
        }
        tolerance = names.get(f"tolerance_{number}", TOLERANCE)
        set_to |= {
            "fault_of": names.get(f"fault_{number}"),
            "wrong": names.get(f"wrong_{number}", ()),
        }
        return Key(names[f"answer_{number}"], tolerance=tolerance, **set_to)

    def _reply(self, number: int, key: Key, fault: str) -> str:
        solution = self.solutions[number]
        if isinstance(key.answer, str) and not fault:
            return f"does yours say these three things?\n{key.answer.strip()}"
        if not fault:
            return f"right{key.shown}. {solution.explanation}"
        if isinstance(fault, Malformed):
            return f"your answer {fault}."
        self.wrong[number] = self.wrong.get(number, 0) + 1
        hint = f"\nHint: {solution.hint}" if self.wrong[number] >= HINT_AFTER else ""
        return f"your answer {fault}; try again.{hint}"


class Malformed(str):
    """The end of a sentence: why something is no answer, which is not counted as a try."""


class Key(NamedTuple):
    """What an answer is held against: see the module."""

    answer: Any
    expected: Callable[..., Any] | None = None
    cases: Sequence[tuple[Any, ...]] | None = None
    fault_of: Callable[[Any], str] | None = None
    tolerance: float = TOLERANCE
    wrong: Sequence[Any] = ()

    @property
    def shown(self) -> str:
        """Return a number or list behind "right"; nothing of a function, nor of one of many right answers."""
        if callable(self.answer) or self.fault_of is not None:
            return ""
        return f" ({', '.join(f'{value:.4g}' for value in np.atleast_1d(self.answer))})"

    def weakness(self) -> str:
        """Return why the solution judges too little: a wrong answer is accepted, or too few are tried."""
        if isinstance(self.answer, str):
            points = [line for line in self.answer.splitlines() if line.strip()]
            return "" if len(points) == WRONG else "give three points to compare with, a line each"
        if len(self.wrong) < WRONG:
            return f"wrong has fewer than {WRONG} wrong answers"
        accepted = [place for place, answer in enumerate(self.wrong, 1) if not self.fault(answer)]
        return f"wrong answer {accepted[0]} is accepted" if accepted else ""

    def fault(self, given: Any) -> str:
        """Return what is wrong with an answer, as the end of a sentence; empty where it is right."""
        if callable(self.answer) and not callable(given):
            return Malformed("is not a function: write one, and give its name")
        if self.fault_of is not None:
            try:
                return self.fault_of(copy.deepcopy(given))
            except Exception as error:  # whatever a reader's answer does is said to the reader
                return f"raises {type(error).__name__} ({error})"
        if callable(self.answer):
            return self._fault_of_function(given)
        if isinstance(self.answer, str):
            is_text = isinstance(given, str) and given.strip()
            return "" if is_text else Malformed("is not a text")
        return self._fault_of_numbers(given)

    def _fault_of_numbers(self, given: Any) -> str:
        try:
            values = numbers(given)
        except ValueError as error:
            return Malformed(error)
        wanted = np.atleast_1d(np.asarray(self.answer, float))
        if values.shape != wanted.shape:
            should = "one number" if wanted.size == 1 else f"a list of {wanted.size} numbers"
            has = f"has {values.size} number{'s' * (values.size != 1)}"
            return Malformed(f"{has}: it should be {should}")
        near = np.isclose(values, wanted, rtol=self.tolerance, atol=1e-12)
        if near.all():
            return ""
        place = int(np.argmin(near))
        side = "high" if values[place] > wanted[place] else "low"
        where = "" if near.size == 1 else f", at place {place + 1},"
        return f"{values[place]:.4g}{where} is too {side}"

    def _fault_of_function(self, given: Any) -> str:
        assert self.expected is not None and self.cases is not None, "a function has both"
        for case in self.cases:
            wanted = _flat(self.expected(*case))
            try:
                values = _flat(given(*copy.deepcopy(case)))
            except Exception as error:  # whatever a reader's function does is said to the reader
                return f"raises {type(error).__name__} ({error}) for {_brief(case)}"
            if values.shape != wanted.shape or not np.allclose(values, wanted, rtol=1e-9):
                return f"gives {_brief(values)} instead of {_brief(wanted)} for {_brief(case)}"
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
        if isinstance(value, str):
            match = _NUMBER.fullmatch(value.strip())
            if match is None:
                advice = "write 0.74 or 74%, without a unit"
                raise ValueError(f"{value.strip()[:40]!r} is not a number: {advice}")
            value = float(match[1]) / (100 if match[2] else 1)
        if not np.isfinite(float(value)):
            raise ValueError(f"is {value}: give a finite number")
        values.append(float(value))
    return np.array(values)


def _flat(value: Any) -> Any:
    """Return (k,) all numbers of what a function gives, which may be a tuple of arrays."""
    parts = value if isinstance(value, tuple) else (value,)
    return np.concatenate([np.ravel(np.asarray(part, float)) for part in parts])


def _brief(value: Any) -> str:
    """Return a value in at most 200 letters."""
    with np.printoptions(precision=4, threshold=8):
        text = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def of(notebook: str, names: dict[str, Any]) -> Judge:
    """Return the judge of a notebook's exercises; ``names`` is its globals()."""
    return Judge(notebook, names)
