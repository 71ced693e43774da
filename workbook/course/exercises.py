"""Exercises of a notebook, whose answers are judged by solutions in the folder solutions/.

A notebook calls ``judge = exercises.of("03_predicting_a_step", globals())`` and, for
each exercise in a cell of its own, ``judge(1, answer_1)``. Its solution is the cell
tagged "solution-1" of the notebook of the same name in solutions/. It runs in a copy of
the names of the notebook and sets

``answer_1``    a number, a list of numbers, a function, or a text of three lines, each a
                point with which readers compare their own text
``expected_1``  for a function: another function, mostly of the package, that returns what
                the answer should return
``cases_1``     for a function: the arguments with which both are called
``fault_1``     if many answers are right: a function that returns what is wrong with an
                answer, or "" for a right one
``wrong_1``     at least three plausible wrong answers, except for a text

When the book runs, each exercise is answered by its own solution, and its wrong answers
must be rejected.
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
"""The environment variable that is "1" if exercises are answered by their solutions."""
WRONG = 3
"""The least number of wrong answers with which a solution is tried."""
TOLERANCE = 0.02
"""The relative difference within which a number is right."""


class Solution(NamedTuple):
    """What solutions/ has of one exercise.

    Attributes
    ----------
    hint, explanation : str
        Markdown that is shown after a wrong and after a right answer.
    solution : str
        The code of the solution.
    """

    hint: str
    solution: str
    explanation: str


def read(notebook: str, folder: Path = SOLUTIONS) -> dict[int, Solution]:
    """Return the solutions of a notebook by the number of the exercise.

    Raises
    ------
    KeyError
        If an exercise lacks its hint, its solution or its explanation.
    """
    cells = json.loads(read_text(folder / f"{notebook}.ipynb"))["cells"]
    # The cell with the hint of exercise 1 has the tag "hint-1".
    sources: dict[str, str] = {}
    for cell in cells:
        for tag in cell["metadata"].get("tags", ()):
            sources[tag] = "".join(cell["source"])
    exercises = sorted({int(tag.rpartition("-")[2]) for tag in sources if "-" in tag})
    solutions = {}
    for number in exercises:
        parts = {kind: sources[f"{kind}-{number}"] for kind in Solution._fields}
        solutions[number] = Solution(**parts)
    return solutions


class Judge:
    """Says whether answers to the exercises of a notebook are right.

    Parameters
    ----------
    notebook : str
        The name of the notebook.
    names : dict
        The global names of the notebook.
    folder : Path, optional
        The folder of solutions.
    """

    def __init__(
        self, notebook: str, names: dict[str, Any], folder: Path = SOLUTIONS
    ) -> None:
        self.notebook = notebook
        self.names = names
        self.solutions = read(notebook, folder)

    def __call__(self, number: int, answer: Any) -> None:
        """Print whether an answer is right.

        Parameters
        ----------
        number : int
            The number of the exercise.
        answer : object
            The answer, or None if the reader has not answered yet. If exercises are
            answered by their solutions, None stands for the solution.

        Raises
        ------
        UserError
            If there is no such exercise, or if a solution that answers itself is wrong
            or accepts wrong answers.
        """
        if number not in self.solutions:
            numbers = ", ".join(map(str, self.solutions))
            raise UserError(
                f"{self.notebook} has no exercise {number}: it has {numbers}"
            )
        # When the book runs, solutions are tested by answering their own exercises.
        by_solution = os.environ.get(SOLVED_VARIABLE) == "1"
        if answer is None and not by_solution:
            print(
                f"Exercise {number}: replace None by your answer and run this cell again."
            )
            return
        hint, solution, explanation = self.solutions[number]
        key = self._key(number, solution)
        if answer is None:
            answer = key.answer
        fault = key.refusal(answer)
        if by_solution:
            problem = f"the solution {fault}" if fault else key.weakness()
            if problem:
                raise UserError(f"{self.notebook}: exercise {number}: {problem}")
        if fault:
            reply = f"your answer {fault}; try again.\nHint: {hint}"
        elif isinstance(key.answer, str):
            reply = f"does yours say these three things?\n{key.answer.strip()}"
        else:
            reply = f"right. {explanation}"
        print(f"Exercise {number}: {reply}")

    def _key(self, number: int, solution: str) -> Key:
        """Run a solution in a copy of the notebook's names and return what it sets.

        The names that it sets are those of the fields of `Key` with the number of the exercise,
        such as ``answer_1`` and ``wrong_1``.
        """
        names = dict(self.names)
        exec(solution, names)
        fields = {}
        for field in Key._fields:
            name = f"{field}_{number}"
            if name in names:
                fields[field] = names[name]
        return Key(**fields)


class Key(NamedTuple):
    """What an answer is compared with, as the docstring of the module describes it."""

    answer: Any
    expected: Any = None
    cases: Any = ()
    wrong: Any = ()
    fault: Any = None

    def weakness(self) -> str:
        """Return why the solution judges too little, or an empty string.

        A solution judges too little if it accepts a wrong answer, or if it has too few
        wrong answers to try.
        """
        # No text but an empty one is refused, because readers judge their own text.
        if isinstance(self.answer, str):
            return ""
        if len(self.wrong) < WRONG:
            return f"wrong has fewer than {WRONG} wrong answers"
        for number, answer in enumerate(self.wrong, 1):
            if not self.refusal(answer):
                return f"wrong answer {number} is accepted"
        return ""

    def refusal(self, answer: Any) -> str:
        """Return what is wrong with an answer, as the end of a sentence, or "" if it is right."""
        # Whatever the answer of a reader raises is shown to the reader.
        try:
            return self._fault_of(answer)
        except Exception as error:
            return f"raises {type(error).__name__} ({error})"

    def _fault_of(self, answer: Any) -> str:
        """Return what is wrong with an answer, or raise what the answer raises."""
        # Calls get copies, because the function `fault` may change the answer, and an answer that
        # is a function may change its arguments.
        if self.fault is not None:
            return str(self.fault(copy.deepcopy(answer)))
        # Readers judge their own text, which must only not be empty.
        if isinstance(self.answer, str):
            return "" if str(answer).strip() else "is empty"
        if not callable(self.answer):
            return _difference(numbers(answer), numbers(self.answer), TOLERANCE)
        # The answer is a function, whose results are exact but for rounding.
        for case in self.cases:
            expected = _flat(self.expected(*case))
            returned = _flat(answer(*copy.deepcopy(case)))
            difference = _difference(returned, expected, 1e-9)
            if difference:
                return f"{difference} for {', '.join(map(str, case))[:200]}"
        return ""


def _difference(values: Any, expected: Any, tolerance: float) -> str:
    """Return where numbers differ from expected ones, as the end of a sentence.

    The text is empty if there is no difference.

    Parameters
    ----------
    values : ndarray, shape (k,)
        The numbers of an answer.
    expected : ndarray, shape (n,)
        The right numbers.
    tolerance : float
        The relative difference that is accepted.
    """
    if values.shape != expected.shape:
        return f"has {values.size} of {expected.size} numbers"
    # The absolute tolerance accepts a rounding error where 0 is expected.
    is_close = np.isclose(values, expected, rtol=tolerance, atol=1e-12)
    if is_close.all():
        return ""
    # argmin finds the first False, which is the first number that is not close.
    place = int(np.argmin(is_close))
    side = "high" if values[place] > expected[place] else "low"
    return f"has {values[place]:.4g} at place {place + 1}, which is too {side}"


def numbers(answer: Any) -> Any:
    """Return the numbers of an answer.

    Parameters
    ----------
    answer : object
        A number, a text such as "74%", or a list of these.

    Returns
    -------
    ndarray, shape (k,)
        The numbers, of which percentages are divided by 100.

    Raises
    ------
    ValueError
        If a text is no number, or if a number is not finite.
    """
    texts = [str(value).strip() for value in np.asarray(answer, object).ravel()]
    values = []
    for text in texts:
        divisor = 100 if "%" in text else 1
        values.append(float(text.removesuffix("%")) / divisor)
    if not np.isfinite(values).all():
        raise ValueError(f"{', '.join(texts)[:40]} is not finite")
    return np.array(values)


def _flat(value: Any) -> Any:
    """Return all numbers of an array, or of a tuple of arrays, as one vector."""
    parts = value if isinstance(value, tuple) else (value,)
    return np.concatenate([np.ravel(np.asarray(part, float)) for part in parts])


of = Judge
