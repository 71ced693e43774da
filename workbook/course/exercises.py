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

    Parameters
    ----------
    notebook : str
        The name of the notebook, which its notebook of solutions has, too.
    folder : Path, optional
        The folder of solutions.

    Raises
    ------
    KeyError
        If an exercise lacks its hint, its solution or its explanation.
    """
    cells = json.loads(read_text(folder / f"{notebook}.ipynb"))["cells"]
    # The cell with the hint of exercise 1 has the tag "hint-1". A notebook's file has the
    # text of a cell as a list of lines.
    text_of_tag: dict[str, str] = {}
    for cell in cells:
        for tag in cell["metadata"].get("tags", ()):
            text_of_tag[tag] = "".join(cell["source"])
    numbers_in_tags = [tag.rpartition("-")[2] for tag in text_of_tag if "-" in tag]
    solutions = {}
    # Each number is in three tags, and the set has it once.
    for number in sorted({int(digits) for digits in numbers_in_tags}):
        texts = {kind: text_of_tag[f"{kind}-{number}"] for kind in Solution._fields}
        solutions[number] = Solution(**texts)
    return solutions


def _reply(key: Key, solution: Solution, fault: str) -> str:
    """Return what a reader is told about an answer.

    ``fault`` says what is wrong with the answer, and is "" if nothing is.
    """
    if fault:
        return f"your answer {fault}; try again.\nHint: {solution.hint}"
    if isinstance(key.answer, str):
        # The solution is a text of three points, by which readers judge their own text.
        return f"does yours say these three things?\n{key.answer.strip()}"
    return f"right. {solution.explanation}"


class Judge:
    """Says whether answers to the exercises of a notebook are right.

    Parameters
    ----------
    notebook : str
        The name of the notebook.
    names : dict
        The global names of the notebook, which the code of a solution uses.
    folder : Path, optional
        The folder of solutions.

    Attributes
    ----------
    solutions : dict of int to Solution
        The hint, the solution's code and the explanation, by the number of the exercise.
    """

    def __init__(
        self, notebook: str, names: dict[str, Any], folder: Path = SOLUTIONS
    ) -> None:
        self.notebook = notebook
        self.names = names
        self.solutions = read(notebook, folder)

    def __call__(self, number: int, answer: Any) -> None:
        """Print whether an answer is right, with the hint or the explanation.

        Any answer in words is accepted, unless it is empty. The three points of the solution are
        then printed, and the reader compares them with the answer.

        Parameters
        ----------
        number : int
            The number of the exercise.
        answer : object
            The answer, or None if the reader has not answered yet. If the environment
            variable SOLVED_VARIABLE is "1", exercises are answered by their solutions,
            and None stands for the solution's answer.

        Raises
        ------
        UserError
            If there is no such exercise. If exercises are answered by their solutions,
            also if the answer is wrong, or if `Key.weakness` finds that wrong answers
            would be accepted.
        """
        if number not in self.solutions:
            numbers = ", ".join(map(str, self.solutions))
            raise UserError(
                f"{self.notebook} has no exercise {number}: it has {numbers}"
            )
        # When the book is built, each solution is tested as the answer to its exercise.
        tests_solution = os.environ.get(SOLVED_VARIABLE) == "1"
        if answer is None and not tests_solution:
            print(
                f"Exercise {number}: replace None by your answer and run this cell again."
            )
            return
        solution = self.solutions[number]
        key = self._key(number, solution.solution)
        if answer is None:
            answer = key.answer
        # The fault is "" if the answer is right.
        fault = key.refusal(answer)
        # When the book is built, its notebooks give None as each answer, so that a fault is that of
        # the solution.
        if tests_solution:
            problem = f"the solution {fault}" if fault else key.weakness()
            if problem:
                raise UserError(f"{self.notebook}: exercise {number}: {problem}")
        print(f"Exercise {number}: {_reply(key, solution, fault)}")

    def _key(self, number: int, solution: str) -> Key:
        """Run the code of a solution and return what it sets.

        The code sets some of the fields of `Key`. The name of each ends with the number of the
        exercise, as ``answer_1`` and ``wrong_1`` do. A field that the code does not set has
        its default.
        """
        # The code can use the names of the notebook. It gets a copy of them, so that what it
        # sets stays out of the notebook.
        names = dict(self.names)
        exec(solution, names)
        fields = {}
        for field in Key._fields:
            name = f"{field}_{number}"
            if name in names:
                fields[field] = names[name]
        return Key(**fields)


class Key(NamedTuple):
    """What an answer is compared with, as the code of a solution sets it.

    Attributes
    ----------
    answer : number, list, callable or str
        The solution's own answer. A text has three points, each on a line.
    expected : callable, optional
        If the answer is a function, another function that returns what it should return.
    cases : sequence of tuple
        The arguments with which both functions are called, a tuple for each call.
    wrong : sequence
        Plausible wrong answers, which must be refused.
    fault : callable, optional
        If many answers are right, a function that returns what is wrong with an answer, or ""
        for a right one.
    """

    answer: Any
    expected: Any = None
    cases: Any = ()
    wrong: Any = ()
    fault: Any = None

    def weakness(self) -> str:
        """Return why the solution may accept wrong answers, or an empty string.

        Each of the solution's own wrong answers must be refused, and there must be at least
        WRONG of them. A solution that is a text needs none.
        """
        # Readers judge their own text, so that every text is accepted unless it is empty.
        if isinstance(self.answer, str):
            return ""
        if len(self.wrong) < WRONG:
            return f"wrong has fewer than {WRONG} wrong answers"
        for number, answer in enumerate(self.wrong, 1):
            if not self.refusal(answer):
                return f"wrong answer {number} is accepted"
        return ""

    def refusal(self, answer: Any) -> str:
        """Return what is wrong with an answer, as the end of a sentence, or "" if it is right.

        The subject of the sentence is the answer, as in "your answer is empty".
        """
        # A reader's answer may be of any type, or a function that fails. An error in it, or in
        # the comparison with it, is shown to the reader as its fault.
        try:
            return self._fault_of(answer)
        except Exception as error:
            return f"raises {type(error).__name__} ({error})"

    def _fault_of(self, answer: Any) -> str:
        """Return what is wrong with an answer, or "". Raise what the answer raises.

        The solution decides how an answer is judged: by the function ``fault`` if there is
        one, or else by the type of its own answer.
        """
        if self.fault is not None:
            # The function may change what it is given, and the answer is the reader's.
            return str(self.fault(copy.deepcopy(answer)))
        # If the solution is a text, any text is accepted that is not empty, because readers judge
        # their own text.
        if isinstance(self.answer, str):
            return "" if str(answer).strip() else "is empty"
        # If the solution is no function, it is a number or a list of numbers.
        if not callable(self.answer):
            return _difference(numbers(answer), numbers(self.answer), TOLERANCE)
        # The solution is a function. Each case has the arguments of one call, and results
        # must agree but for rounding errors.
        for case in self.cases:
            expected = _flat(self.expected(*case))
            # The reader's function may change its arguments, so it gets copies.
            returned = _flat(answer(*copy.deepcopy(case)))
            difference = _difference(returned, expected, tolerance=1e-9)
            if difference:
                # The arguments are shown, but long ones are cut.
                return f"{difference} for {', '.join(map(str, case))[:200]}"
        return ""


def _difference(values: Any, expected: Any, tolerance: float) -> str:
    """Return how numbers differ from expected ones, as the end of a sentence.

    The text names the first number that differs, or both lengths if these differ. It is
    empty if there is no difference.

    Parameters
    ----------
    values : ndarray, shape (k,)
        The numbers of an answer.
    expected : ndarray, shape (n,)
        The right numbers.
    tolerance : float
        The accepted difference, relative to the right number.
    """
    if values.shape != expected.shape:
        return f"has {values.size} of {expected.size} numbers"
    # Where 0 is expected, no relative difference is small, so that rounding errors need the
    # absolute tolerance.
    is_close = np.isclose(values, expected, rtol=tolerance, atol=1e-12)
    if is_close.all():
        return ""
    # False is less than True, so argmin finds the first number that is not close.
    first = int(np.argmin(is_close))
    side = "high" if values[first] > expected[first] else "low"
    # Readers count places from 1.
    return f"has {values[first]:.4g} at place {first + 1}, which is too {side}"


def numbers(answer: Any) -> Any:
    """Return the numbers of an answer.

    Parameters
    ----------
    answer : object
        A number, a text such as "74%", or a list of these.

    Returns
    -------
    ndarray, shape (k,)
        The numbers. A percentage is divided by 100, so that "74%" is 0.74.

    Raises
    ------
    ValueError
        If a text is no number, or if a number is not finite.
    """
    # A single number becomes an array of one element.
    texts = [str(value).strip() for value in np.asarray(answer, object).ravel()]
    values = []
    for text in texts:
        divisor = 100 if "%" in text else 1
        values.append(float(text.removesuffix("%")) / divisor)
    if not np.isfinite(values).all():
        # The message quotes no more than 40 characters, because a list may be long.
        raise ValueError(f"{', '.join(texts)[:40]} is not finite")
    return np.array(values)


def _flat(value: Any) -> Any:
    """Return all numbers of an array, or of a tuple of arrays, as one vector."""
    parts = value if isinstance(value, tuple) else (value,)
    return np.concatenate([np.ravel(np.asarray(part, float)) for part in parts])


of = Judge
