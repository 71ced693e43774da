"""What a campaign measured and what was predicted, in lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd

from ddlkit.core.units import format_seconds
from ddlkit.model.calibration import TRAINING
from workbook.common.source import Source
from workbook.validate.accuracy import REPEATS_WITHIN, joined, judge, labelled

MOST_CASES = 12
"""How many cases have a line of their own. The others are only counted."""


def compared(directory: Path) -> Iterator[str]:
    """Yield lines that compare the runs of a campaign with their predictions.

    Parameters
    ----------
    directory : Path
        The directory of the campaign's tables.

    Yields
    ------
    str
        When the predictions were made; for replays and for real training apart, their
        median error and how many measured iterations lie in their interval; and the cases
        with the largest errors. There is no line if no run can be predicted from the
        tables.

    Raises
    ------
    UserError
        If the tables are damaged, or if the runs name other predictions than those of the
        directory.
    """
    source = Source((directory,))
    if not source.has("runs"):
        return
    if source.has("predicted"):
        when = "The predictions were written before the runs."
        cases = labelled(joined(source))
        # Marked cases are listed, but not counted in the medians. `joined` marks disturbed
        # cases, and those that the processor limited are added. `judge` below marks both.
        cases["marked"] |= cases["processor_limited"]
    else:
        when = (
            "The predictions were made now, from the layers and messages that were measured "
            "with the runs. With --predict they are written before."
        )
        cases = judge(measurements=source, profiles=source, marked=True)
    # `judge` returns the bare runs if no run has a layer profile.
    if "model_iteration_s" not in cases:
        return
    # A run whose layer profile or message times are missing has no prediction.
    cases = cases[cases["model_iteration_s"].notna()]
    if cases.empty:
        return
    yield when

    is_training = cases["kind"] == TRAINING
    # A machine drifts between a profile and a training, which says nothing of messages.
    # So trainings are predicted with the compute time that they measured themselves.
    cases = cases.assign(
        error=cases["model_error"].where(~is_training, cases["model_paired_error"])
    )
    yield from _summaries(cases)
    yield from _largest_errors(cases)


def _summaries(cases: pd.DataFrame) -> Iterator[str]:
    """Yield a line for replays and one for trainings, and one if some cases are not counted.

    ``error`` is the relative error by which a case is judged. Cases that are ``marked`` are
    not counted.
    """
    counted = cases[~cases["marked"]]
    replays = counted[counted["kind"] != TRAINING]
    if len(replays):
        yield _summary("replays", replays)
    trainings = counted[counted["kind"] == TRAINING]
    if len(trainings):
        yield _summary("trainings, given their measured compute time", trainings)
    n_marked = len(cases) - len(counted)
    if n_marked:
        yield (
            f"{n_marked} of {len(cases)} cases are not counted, for the reasons below. To "
            "measure them again, run the campaign into another --out while nothing else uses "
            "the machine. If the processor still limits a case, use slower links or fewer "
            "workers."
        )


def _largest_errors(cases: pd.DataFrame) -> Iterator[str]:
    """Yield a heading, and a line for each of the `MOST_CASES` cases with the largest errors.

    ``error`` is the relative error by which a case is judged. Marked cases are listed, too.
    """
    by_error = cases.reindex(cases["error"].abs().sort_values(ascending=False).index)
    shown = by_error.head(MOST_CASES)
    heading = "cases, by the size of their error"
    if len(shown) < len(cases):
        heading = f"the {len(shown)} of {len(cases)} cases with the largest errors"
    yield f"{heading}:"
    for _, case in shown.iterrows():
        yield f"  {_line_of_case(case)}"


def _summary(name: str, cases: pd.DataFrame) -> str:
    """Return the median error of some cases and their coverage, in words."""
    median_error = float(cases["error"].abs().median())
    n_inside = int(cases["inside"].sum())
    return (
        f"{name}: median error of the predicted iteration {median_error:.1%}; the measured "
        f"iteration lies in its predicted interval in {n_inside} of {len(cases)} cases"
    )


def _line_of_case(case: Any) -> str:
    """Return in words what was measured and predicted of a case, which is a row of a table.

    The printed prediction is the one that ``error`` judges. For replays it is
    ``model_iteration_s``. For trainings it has the measured compute time instead of the
    predicted one.
    """
    what = f"{case.network}:{case.batch} {case.plan}, {case.workers} ranks over {case.link}"
    predicted_s = case.model_iteration_s
    if case.kind == TRAINING:
        # Rebuilt from its error, which is relative to the measured iteration.
        predicted_s = case.measured_iteration_s * (1 + case.error)
    # If a training has ``contention``, the interval is that of the rebuilt prediction, because
    # `labelled` has moved it by measured less predicted compute time. Otherwise the interval is
    # that of ``model_iteration_s``.
    lower, upper = format_seconds(case.lower_s), format_seconds(case.upper_s)
    line = (
        f"{what}: measured {format_seconds(case.measured_iteration_s)}, predicted "
        f"{format_seconds(predicted_s)} ({lower} to {upper}), error {case.error:+.1%}"
    )
    if case.marked:
        line += f", not counted because {_why_marked(case)}"
    return line


def _why_marked(case: Any) -> str:
    """Return in words why a marked case is not counted."""
    reasons = []
    if case.repeatability > REPEATS_WITHIN:
        reasons.append(f"its rounds differ by {case.repeatability:.0%}")
    if case.processor_limited:
        reasons.append("the processor may have set its pace in place of the link")
    # A case that is marked for neither reason is marked because of other programs.
    if not reasons:
        reasons.append("other programs disturbed it")
    return " and ".join(reasons)
