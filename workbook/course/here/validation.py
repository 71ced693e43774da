"""Predictions judged on this machine, by the rule of notebook 05."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.figure import Figure

from workbook import plots
from workbook.common.source import Source
from workbook.common.specs import link_title, network_title
from workbook.validate.accuracy import STATISTICS, judge, sends_one_message
from workbook.validate.figures import ERROR

TRAINING = "training"
REPLAY = "replay"
NOTHING = (
    "No step was run on this machine. "
    "./reproduce.sh replays and trains on it, which needs Linux and root."
)


class Judged(NamedTuple):
    """What became of the predictions on this machine.

    Attributes
    ----------
    sentence : str
        The errors and the coverage, of real training and of replays apart.
    figure : Figure or None
        The error of every case, here and recorded. None if there was no case to judge.
    numbers : dict
        The key numbers, by name. Empty if nothing was measured here.
    """

    sentence: str
    figure: Figure | None
    numbers: dict[str, Any]


def compare(
    recorded_replays: pd.DataFrame, recorded_training: pd.DataFrame, here: Source
) -> Judged:
    """Judge the predictions of what was replayed and trained on this machine.

    A case is a network and a bucket plan over a link. To judge cases is to compare their
    predicted steps with the measured ones. Replays and real training are judged apart. Real
    training is judged by *paired* errors, of predictions with the compute time that the run
    itself measured. Two kinds of cases are counted and not judged: trainings whose plan sends
    one message, which test no model of overlap, and cases that other programs disturbed or
    the processor limited.

    Parameters
    ----------
    recorded_replays, recorded_training : DataFrame
        Recorded cases, as `workbook.validate.accuracy.judge` returns them.
    here : Source
        The tables of this machine, which may be none.

    Returns
    -------
    Judged
        A sentence, a figure and the key numbers.
    """
    if not here.has("runs"):
        return Judged(sentence=NOTHING, figure=None, numbers={})
    # This machine has both the runs and the layer profiles from which they are predicted. The
    # cost of a message is a table of measured medians, as in the lesson. Cases that are not
    # judged are returned, too, with a mark, so that they can be counted.
    cases = judge(measurements=here, profiles=here, form="table", marked=True)
    # There is no case if no run has its layer profile here.
    if cases.empty:
        return Judged(sentence=NOTHING, figure=None, numbers={})
    unmarked = cases[~cases["marked"]]
    replays = unmarked[unmarked["kind"] == REPLAY]
    trainings = unmarked[unmarked["kind"] == TRAINING]
    is_single = sends_one_message(trainings)
    singles = int(is_single.sum())
    trainings = trainings[~is_single]
    marked = int(cases["marked"].sum())
    sentence = _sentences(trainings, replays, singles, marked, total=len(cases))
    numbers = {
        **_training_numbers(trainings),
        **_replay_numbers(replays),
        "single_cases": singles,
        "marked_cases": marked,
        "sentence": sentence,
    }
    recorded_training = recorded_training[~sends_one_message(recorded_training)]
    # Relative errors by the name of their row in the figure.
    errors = {
        "trainings,\nrecorded": recorded_training["model_paired_error"],
        "trainings,\nhere": trainings["model_paired_error"],
        "replays,\nrecorded": recorded_replays["model_error"],
        "replays,\nhere": replays["model_error"],
    }
    return Judged(sentence=sentence, figure=_figure(errors), numbers=numbers)


def _sentences(
    trainings: pd.DataFrame,
    replays: pd.DataFrame,
    singles: int,
    marked: int,
    total: int,
) -> str:
    """Return the errors and the coverage in words.

    Coverage is the number of cases whose measured step lies in its predicted interval. The error of
    real training is *paired*: the prediction has the compute time that the run itself measured,
    so that it is compared with the measured step of the same run.

    Parameters
    ----------
    trainings, replays : DataFrame
        The judged cases, without trainings that send one message. If a table has no case, the
        text says nothing of it.
    singles : int
        The number of trainings with one message, which are not judged.
    marked : int
        The number of cases that other programs disturbed or the processor limited, which
        are not judged.
    total : int
        The number of all cases, judged or not.

    Returns
    -------
    str
        The sentences on trainings, on trainings with one message, on replays, and on marked
        cases, in this order.
    """
    sentences = []
    if len(trainings):
        error = STATISTICS["paired_median_error"](trainings)
        sentences.append(_sentence("trainings", "paired error", error, trainings))
    if singles:
        sentences.append(
            f"Trainings with one message for all gradients ({singles} here) test no "
            "model of overlap and are left out."
        )
    if len(replays):
        error = STATISTICS["median_error"](replays)
        sentences.append(_sentence("replays", "error", error, replays))
    # If no case is marked, the processor limited none either, but the text need not say so.
    if marked:
        sentences.append(
            f"{marked} of {total} cases were disturbed by other programs or limited by the "
            "processor, and are not judged."
        )
    else:
        sentences.append("No case was disturbed by other programs.")
    return " ".join(sentences)


def _training_numbers(training: pd.DataFrame) -> dict[str, Any]:
    """Return the key numbers of real training by name, or an empty dict without a case.

    Errors, coverages and half-widths are shares: 0.01 is 1%. A *paired* error is that of a
    prediction which has the compute time that the run itself measured. The coverage is the
    share of cases whose measured step lies in its predicted interval. The half-width is half of
    this interval divided by the predicted step, as the median over cases.
    """
    if training.empty:
        return {}
    return {
        "training_cases": len(training),
        "training_median_paired_error": float(
            STATISTICS["paired_median_error"](training)
        ),
        "training_interval_coverage": float(STATISTICS["coverage"](training)),
        "training_half_width_share": float(STATISTICS["half_width_share"](training)),
        "training_networks": _networks(training),
    }


def _replay_numbers(replays: pd.DataFrame) -> dict[str, Any]:
    """Return the key numbers of replays by name, or an empty dict without a case.

    Errors, coverages and half-widths are shares: 0.01 is 1%. The coverage is the share of cases
    whose measured step lies in its predicted interval. The half-width is half of this interval
    divided by the predicted step, as the median over cases.
    """
    if replays.empty:
        return {}
    return {
        "replay_cases": len(replays),
        "replay_median_error": float(STATISTICS["median_error"](replays)),
        "replay_interval_coverage": float(STATISTICS["coverage"](replays)),
        "replay_half_width_share": float(STATISTICS["half_width_share"](replays)),
    }


def _sentence(kind: str, quantity: str, error: float, cases: pd.DataFrame) -> str:
    """Return the median error, what was run, and how many cases lie in their interval.

    Parameters
    ----------
    kind : str
        The plural of the kind of run, "trainings" or "replays".
    quantity : str
        The name of the error, "paired error" or "error".
    error : float
        The median error, as a share.
    cases : DataFrame
        The judged cases, at least one.
    """
    noun = kind if len(cases) > 1 else kind.removesuffix("s")
    links = _listed(cases["link"].map(link_title).unique())
    # The half-width of an interval is a share of the predicted step.
    half_width = STATISTICS["half_width_share"](cases)
    return (
        f"The median {quantity} is {error:.1%} for {len(cases)} {noun} of "
        f"{_networks(cases)} over {links}. The measured step lies in the predicted interval "
        f"in {cases['inside'].sum()} of {len(cases)} cases; the median half-width of the "
        f"intervals is {half_width:.1%}."
    )


def _networks(cases: pd.DataFrame) -> str:
    return _listed(cases["network"].map(network_title).unique())


def _listed(names: Iterable[str]) -> str:
    """Return names, at least one, in their order as "a, b and c"."""
    *others, last = names
    if not others:
        return last
    return f"{', '.join(others)} and {last}"


def _figure(errors: dict[str, pd.Series]) -> Figure:
    """Return a figure with a row of points for each series that has cases.

    ``errors`` has a series of relative errors for each kind of run and machine.
    """
    rows = {}
    for name, shares in errors.items():
        if len(shares):
            # The name of a row begins with the number of its cases.
            rows[f"{len(shares)} {name}"] = shares
    # In inches: 0.9 for the axis and its label, and 0.5 for each row.
    figure, ax = plots.canvas(height=0.9 + 0.5 * len(rows))
    plots.error_rows(ax, rows, label=f"error of the step time, {ERROR}")
    return figure
