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

    Replays and real training are judged apart, and real training is judged by paired
    errors. Two kinds of cases are counted and not judged: trainings whose plan sends one
    message, which test no model of overlap, and cases that other programs disturbed or the
    processor limited.

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
        return Judged(NOTHING, None, {})
    # Disturbed cases are marked, so that they can be counted.
    cases = judge(here, here, "table", marked=True)
    if cases.empty:
        return Judged(NOTHING, None, {})
    undisturbed = cases[~cases["marked"]]
    replays = undisturbed[undisturbed["kind"] == REPLAY]
    trainings = undisturbed[undisturbed["kind"] == TRAINING]
    one_message = sends_one_message(trainings)
    singles = int(one_message.sum())
    trainings = trainings[~one_message]
    marked = int(cases["marked"].sum())
    sentence = _sentences(trainings, replays, singles, marked, len(cases))
    numbers = {
        **_training_numbers(trainings),
        **_replay_numbers(replays),
        "single_cases": singles,
        "marked_cases": marked,
        "sentence": sentence,
    }
    recorded_training = recorded_training[~sends_one_message(recorded_training)]
    errors = {
        "trainings,\nrecorded": recorded_training["model_paired_error"],
        "trainings,\nhere": trainings["model_paired_error"],
        "replays,\nrecorded": recorded_replays["model_error"],
        "replays,\nhere": replays["model_error"],
    }
    return Judged(sentence, _figure(errors), numbers)


def _sentences(
    trainings: pd.DataFrame, replays: pd.DataFrame, singles: int, marked: int, n: int
) -> str:
    """Return the errors and the coverage in words.

    Parameters
    ----------
    trainings, replays : DataFrame
        The judged cases.
    singles : int
        The number of trainings with one message, which are not judged.
    marked : int
        The number of cases that other programs disturbed or the processor limited, which
        are not judged.
    n : int
        The number of all cases.
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
    if marked:
        sentences.append(
            f"{marked} of {n} cases were disturbed by other programs or limited by the "
            "processor, and are not judged."
        )
    else:
        sentences.append("No case was disturbed by other programs.")
    return " ".join(sentences)


def _training_numbers(training: pd.DataFrame) -> dict[str, Any]:
    """Return the key numbers of real training, with none if there was no case."""
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
    """Return the key numbers of replays, with none if there was no case."""
    if replays.empty:
        return {}
    return {
        "replay_cases": len(replays),
        "replay_median_error": float(STATISTICS["median_error"](replays)),
        "replay_interval_coverage": float(STATISTICS["coverage"](replays)),
        "replay_half_width_share": float(STATISTICS["half_width_share"](replays)),
    }


def _sentence(kind: str, quantity: str, error: float, cases: pd.DataFrame) -> str:
    """Return what was run, the median error, and how many cases lie in their interval.

    Parameters
    ----------
    kind, quantity : str
        The plural of the kind of run, and the name of the error.
    error : float
        The median error, as a share.
    cases : DataFrame
        The judged cases, at least one.
    """
    noun = kind if len(cases) > 1 else kind.removesuffix("s")
    links = _listed(cases["link"].map(link_title).unique())
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
    """Return names in their order as "a, b and c"."""
    *others, last = names
    if not others:
        return last
    return f"{', '.join(others)} and {last}"


def _figure(errors: dict[str, pd.Series]) -> Figure:
    """Return a figure with a row of points for each kind of run that has cases.

    ``errors`` has relative errors by the kind of run.
    """
    rows = {}
    for name, shares in errors.items():
        if len(shares):
            rows[f"{len(shares)} {name}"] = shares
    figure, ax = plots.canvas(height=0.9 + 0.5 * len(rows))
    plots.error_rows(ax, rows, label=f"error of the step time, {ERROR}")
    return figure
