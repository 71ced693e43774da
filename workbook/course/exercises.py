"""Exercises of a notebook: answers are judged by solutions that lie apart from it, in solutions/.

A notebook says ``judge = exercises.of("03_predicting_a_step", globals())`` and, for each exercise in a cell
of its own, ``judge(1, answer_1)``. A solution, in the cell tagged "solution-1" of the notebook of that name,
runs in a copy of the notebook's names and sets

``answer_1``    a number, a list of numbers, a function, or three points, a line each (readers compare)
``expected_1``  of a function: another one, mostly the package's, that gives what it should
``cases_1``     of a function: the arguments with which both are called
``fault_1``     where many answers are right: a function that says what is wrong with one, "" of a right one
``wrong_1``     at least three plausible wrong answers, but of a text

Where the book runs, each exercise is answered by its own solution, and its wrong answers must be refused.
"""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ddlkit.core.errors import UserError
from ddlkit.store.files import read_text
from workbook.common import places

SOLUTIONS = places.ROOT / "solutions"
SOLVED_VARIABLE = "DDLKIT_EXERCISES_SOLVED"
"""Set where exercises are answered by their own solutions."""
WRONG = 3
"""Wrong answers that a checker is tried with, at least."""
TOLERANCE = 0.02
"""Relative difference within which a number is right."""


class Solution(NamedTuple):
    """What solutions/ holds of one exercise: Markdown, code, Markdown."""

    hint: str
    solution: str
    explanation: str


def read(notebook: str, folder: Path = SOLUTIONS) -> dict[int, Solution]:
    """Return the solutions of a notebook by exercise. Raises KeyError for one that is not whole."""
    sources: dict[str, str] = {}
    for cell in json.loads(read_text(folder / f"{notebook}.ipynb"))["cells"]:
        sources |= dict.fromkeys(
            cell["metadata"].get("tags", ()), "".join(cell["source"])
        )
    numbers = sorted({int(tag.rpartition("-")[2]) for tag in sources if "-" in tag})
    tags = {
        number: [f"{kind}-{number}" for kind in Solution._fields] for number in numbers
    }
    return {
        number: Solution(*map(sources.__getitem__, kinds))
        for number, kinds in tags.items()
    }


class Judge:
    """Says whether answers to a notebook's exercises are right."""

    def __init__(
        self, notebook: str, names: dict[str, Any], folder: Path = SOLUTIONS
    ) -> None:
        self.notebook, self.names, self.solutions = (
            notebook,
            names,
            read(notebook, folder),
        )

    def __call__(self, number: int, answer: Any) -> None:
        """Print what to say to ``answer``; None asks for one. Raises UserError for an unknown exercise."""
        if number not in self.solutions:
            numbers = ", ".join(map(str, self.solutions))
            raise UserError(
                f"{self.notebook} has no exercise {number}: it has {numbers}"
            )
        by_solution = os.environ.get(SOLVED_VARIABLE) == "1"
        if answer is None and not by_solution:
            print(
                f"Exercise {number}: replace None by your answer and run this cell again."
            )
            return
        hint, solution, explanation = self.solutions[number]
        names = dict(self.names)
        exec(solution, names)
        key = Key(
            **{
                n: names[f"{n}_{number}"]
                for n in Key._fields
                if f"{n}_{number}" in names
            }
        )
        wrong = key.refusal(key.answer if answer is None else answer)
        if by_solution and (
            why := f"the solution {wrong}" if wrong else key.weakness()
        ):
            raise UserError(f"{self.notebook}: exercise {number}: {why}")
        reply = f"right. {explanation}"
        if wrong:
            reply = f"your answer {wrong}; try again.\nHint: {hint}"
        elif isinstance(key.answer, str):
            reply = f"does yours say these three things?\n{key.answer.strip()}"
        print(f"Exercise {number}: {reply}")


class Key(NamedTuple):
    """What an answer is held against: see the module."""

    answer: Any
    expected: Any = None
    cases: Any = ()
    wrong: Any = ()
    fault: Any = None

    def weakness(self) -> str:
        """Return why the solution judges too little: a wrong answer is accepted, or too few are tried."""
        if isinstance(self.answer, str):
            return ""
        if len(self.wrong) < WRONG:
            return f"wrong has fewer than {WRONG} wrong answers"
        accepted = [
            place
            for place, answer in enumerate(self.wrong, 1)
            if not self.refusal(answer)
        ]
        return f"wrong answer {accepted[0]} is accepted" if accepted else ""

    def refusal(self, given: Any) -> str:
        """Return what is wrong with an answer, as the end of a sentence; empty where it is right."""
        try:
            if self.fault is not None:
                return str(self.fault(copy.deepcopy(given)))
            if isinstance(self.answer, str):
                return "" if str(given).strip() else "is empty"
            if not callable(self.answer):
                return _difference(numbers(given), numbers(self.answer), TOLERANCE)
            for case in self.cases:
                wanted, values = (
                    _flat(self.expected(*case)),
                    _flat(given(*copy.deepcopy(case))),
                )
                if difference := _difference(values, wanted, 1e-9):
                    return f"{difference} for {', '.join(map(str, case))[:200]}"
        except (
            Exception
        ) as error:  # whatever a reader's answer does is said to the reader
            return f"raises {type(error).__name__} ({error})"
        return ""


def _difference(values: Any, wanted: Any, tolerance: float) -> str:
    """Return where numbers (k,) differ from those (n,) that are wanted, as the end of a sentence."""
    if values.shape != wanted.shape:
        return f"has {values.size} of {wanted.size} numbers"
    (far,) = np.nonzero(~np.isclose(values, wanted, rtol=tolerance, atol=1e-12))
    if not far.size:
        return ""
    side = "high" if values[far[0]] > wanted[far[0]] else "low"
    return f"has {values[far[0]]:.4g} at place {far[0] + 1}, which is too {side}"


def numbers(given: Any) -> Any:
    """Return (k,) floats of a number, of text as "74%", or of a list of those. Raises ValueError."""
    texts = [str(value).strip() for value in np.asarray(given, object).ravel()]
    values = [
        float(text.removesuffix("%")) / (100 if "%" in text else 1) for text in texts
    ]
    if not np.isfinite(values).all():
        raise ValueError(f"{', '.join(texts)[:40]} is not finite")
    return np.array(values)


def _flat(value: Any) -> Any:
    parts = value if isinstance(value, tuple) else (value,)
    return np.concatenate([np.ravel(np.asarray(part, float)) for part in parts])


of = Judge
