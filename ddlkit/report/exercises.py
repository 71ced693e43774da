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

_NUMBER = re.compile(r"([+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)\s*(%?)", re.IGNORECASE)


class Solution(NamedTuple):
    """What solutions/ holds of one exercise: Markdown, code, Markdown."""

    hint: str
    solution: str
    explanation: str


def read(notebook: str, folder: Path | None = None) -> dict[int, Solution]:
    """The solutions of a notebook, by exercise. Raises UserError where one is missing or told twice."""
    path = (folder or SOLUTIONS) / f"{notebook}.ipynb"
    if not path.is_file():
        raise UserError(f"no solutions of {notebook}: expected {path}")
    parts: dict[int, dict[str, str]] = {}
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        for tag in cell["metadata"].get("tags", ()):
            kind, _, number = tag.rpartition("-")
            if kind not in KINDS or not number.isdigit():
                continue
            if kind in parts.setdefault(int(number), {}):
                raise UserError(f"{path}: two cells are tagged {tag}")
            parts[int(number)][kind] = "".join(cell["source"])
    for number, found in sorted(parts.items()):
        if missing := [kind for kind in KINDS if kind not in found]:
            raise UserError(f"{path}: exercise {number} has no cell tagged {missing[0]}-{number}")
    return {number: Solution(**found) for number, found in sorted(parts.items())}


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
        """By exercise."""
        return read(self.notebook, self.folder)

    def __call__(self, number: int, answer: Any) -> None:
        """Print what to say to ``answer``; None asks for one. Raises UserError for an unknown exercise."""
        if number not in self.solutions:
            known = ", ".join(map(str, self.solutions))
            raise UserError(f"{self.notebook} has no exercise {number}: it has {known}")
        solved = os.environ.get(SOLVED_VARIABLE) == "1"
        if answer is None and not solved:
            print(f"Exercise {number}: replace None by your answer and run this cell again.")
            return
        key = self._key(number)
        answer = key.answer if answer is None else answer
        fault = key.fault(answer)
        if solved:
            self._try(number, key, fault)
        print(f"Exercise {number}: {self._said(number, key, fault)}")

    def _try(self, number: int, key: Key, fault: str) -> None:
        """Raise UserError where the solution is refused, or a wrong answer is not."""
        where = f"{self.notebook}: exercise {number}"
        if fault:
            raise UserError(f"{where}: the solution {fault}")
        if isinstance(key.answer, str):
            if len(key.points) != WRONG:
                raise UserError(f"{where}: give three points to compare with, a line each")
            return
        if len(key.wrong) < WRONG:
            raise UserError(f"{where}: wrong_{number} has fewer than {WRONG} wrong answers")
        for place, wrong in enumerate(key.wrong, 1):
            if not key.fault(wrong):
                raise UserError(f"{where}: wrong answer {place} is accepted")

    def _key(self, number: int) -> Key:
        names = dict(self.names)
        exec(self.solutions[number].solution, names)
        said = {kind: names.get(f"{kind}_{number}") for kind in ("expected", "cases", "tolerance")}
        wrong, refuses = names.get(f"wrong_{number}", ()), names.get(f"fault_{number}")
        return Key(names[f"answer_{number}"], refuses=refuses, wrong=wrong, **said)

    def _said(self, number: int, key: Key, fault: str) -> str:
        own = self.solutions[number]
        if isinstance(key.answer, str) and not fault:
            return "\n".join(["does yours say these three things?", *key.points])
        if not fault:
            return f"right{key.shown}. {own.explanation}"
        if isinstance(fault, Malformed):
            return f"your answer {fault}."
        self.wrong[number] = self.wrong.get(number, 0) + 1
        hint = f"\nHint: {own.hint}" if self.wrong[number] >= HINT_AFTER else ""
        return f"your answer {fault}; try again.{hint}"


class Malformed(str):
    """The end of a sentence: why something is no answer, which is not counted as a try."""


@dataclass(frozen=True)
class Key:
    """What an answer is held against: see the module."""

    answer: Any
    expected: Callable[..., Any] | None = None
    cases: Sequence[tuple[Any, ...]] | None = None
    tolerance: float | None = None
    refuses: Callable[[Any], str] | None = None
    wrong: Sequence[Any] = ()

    @property
    def points(self) -> list[str]:
        """The lines of a text."""
        return [line for line in str(self.answer).splitlines() if line.strip()]

    @property
    def shown(self) -> str:
        """A number or list behind "right"; nothing for a function, nor for one of many right answers."""
        if callable(self.answer) or self.refuses is not None:
            return ""
        return f" ({', '.join(f'{value:.4g}' for value in np.atleast_1d(self.answer))})"

    def fault(self, given: Any) -> str:
        """What is wrong with an answer, as the end of a sentence; empty where it is right."""
        if callable(self.answer) and not callable(given):
            return Malformed("is not a function: write one, and give its name")
        if self.refuses is not None:
            try:
                return self.refuses(copy.deepcopy(given))
            except Exception as error:  # whatever a reader's answer does is said to the reader
                return f"raises {type(error).__name__} ({error})"
        if callable(self.answer):
            return self._fault_of_function(given)
        if isinstance(self.answer, str):
            is_text = isinstance(given, str) and given.strip()
            return "" if is_text else Malformed("is not a text")
        try:
            found = numbers(given)
        except ValueError as error:
            return Malformed(error)
        expected = np.atleast_1d(np.asarray(self.answer, float))
        if found.shape != expected.shape:
            wanted = "one number" if expected.size == 1 else f"a list of {expected.size} numbers"
            has = f"has {found.size} number{'s' * (found.size != 1)}"
            return Malformed(f"{has}: it should be {wanted}")
        return self._difference(found, expected)

    def _difference(self, found: Any, expected: Any) -> str:
        relative = TOLERANCE if self.tolerance is None else self.tolerance
        near = np.isclose(found, expected, rtol=relative, atol=1e-12)
        if near.all():
            return ""
        place = int(np.argmin(near))
        side = "high" if found[place] > expected[place] else "low"
        where = "" if near.size == 1 else f", at place {place + 1},"
        return f"{found[place]:.4g}{where} is too {side}"

    def _fault_of_function(self, given: Any) -> str:
        assert self.expected is not None and self.cases is not None, "a function has both"
        for case in self.cases:
            wanted = _flat(self.expected(*case))
            try:
                found = _flat(given(*copy.deepcopy(case)))
            except Exception as error:  # whatever a reader's function does is said to the reader
                return f"raises {type(error).__name__} ({error}) for {_brief(case)}"
            if found.shape != wanted.shape or not np.allclose(found, wanted, rtol=1e-9):
                return f"gives {_brief(found)} instead of {_brief(wanted)} for {_brief(case)}"
        return ""


def numbers(given: Any) -> Any:
    """(k,) floats of a number, of text as "74%", or of a list of those.

    Raises ValueError with the end of a sentence that says what is wrong.

    >>> numbers("74%").tolist(), numbers([1, "2.5"]).tolist()
    ([0.74], [1.0, 2.5])
    """
    many = given if isinstance(given, list | tuple | np.ndarray) else [given]
    found = []
    for one in np.asarray(many, object).ravel():
        if isinstance(one, bool) or not isinstance(one, int | float | np.number | str):
            raise ValueError(f"is a {type(one).__name__}: give a number")
        if isinstance(one, str):
            match = _NUMBER.fullmatch(one.strip())
            if match is None:
                raise ValueError(
                    f"{one.strip()[:40]!r} is not a number: write 0.74 or 74%, without a unit"
                )
            one = float(match[1]) / (100 if match[2] else 1)
        if not np.isfinite(float(one)):
            raise ValueError(f"is {one}: give a finite number")
        found.append(float(one))
    return np.array(found)


def _flat(value: Any) -> Any:
    """(k,) all numbers of what a function gives, which may be a tuple of arrays."""
    parts = value if isinstance(value, tuple) else (value,)
    return np.concatenate([np.ravel(np.asarray(part, float)) for part in parts])


def _brief(value: Any) -> str:
    with np.printoptions(precision=4, threshold=8):
        if isinstance(value, np.ndarray) and value.size == 1:
            value = value.item()
        text = ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
    return text if len(text) <= 200 else f"{text[:200]}..."


def of(notebook: str, names: dict[str, Any]) -> Judge:
    """The judge of a notebook's exercises; ``names`` is its globals()."""
    return Judge(notebook, names)
