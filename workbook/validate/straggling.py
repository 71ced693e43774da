"""`ddlkit explain` against trainings whose delays are known, and against rules of thumb.

The recorded trainings (`data/straggling`) have delays in iterations of an odd number. The
iterations of an even number are the paired truth: what the same training takes without
the delay. ``python -m workbook.validate.straggling`` judges all of them anew and writes
``data/straggling/judged.csv``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ddlkit.core.cost import MessageCost
from ddlkit.core.fit import fit
from ddlkit.core.plan import ddp
from ddlkit.core.units import MIB
from ddlkit.core.workload import Floats
from ddlkit.formats.messages import read_bytes_seconds
from ddlkit.formats.rank_trace import rank_trace
from ddlkit.formats.trace_stream import read_trace
from ddlkit.model.explanation import Explanation, explanation
from ddlkit.model.other_buckets import Buckets
from ddlkit.model.ranks import TracedTraining, training_of
from ddlkit.store.files import atomic_write_text, own_yaml, read_text
from workbook import plots
from workbook.common.places import DATA
from workbook.plots.style import case_rows, look

FOLDER = DATA / "straggling"
JUDGED = FOLDER / "judged.csv"
LARGE = 0.08
"""An injected delay counts as large from this share of the iteration on."""
LINK_REMEDY = "a link of twice the rate"


def scenarios() -> dict[str, dict[str, Any]]:
    """Return what `data/straggling/scenarios.yml` states of each scenario, by name."""
    stated: dict[str, dict[str, Any]] = own_yaml(read_text(FOLDER / "scenarios.yml"))[
        "scenarios"
    ]
    return stated


def training(folder: Path, startup_s: float = 0.0) -> TracedTraining:
    """Return the training whose ranks were traced into a folder.

    Parameters
    ----------
    folder : Path
        The folder with a trace for each rank.
    startup_s : float, optional
        The start-up of a message in seconds. The default of 0 is for one that is not known.

    Returns
    -------
    TracedTraining
        The traces of all ranks, put together.
    """
    paths = sorted(folder.glob("rank*.json.gz"))
    return training_of([rank_trace(read_trace(path)) for path in paths], startup_s)


def numbers(traced: TracedTraining, remainder: int) -> list[int]:
    """Return the numbers of the odd iterations if ``remainder`` is 1, of the even ones if 0."""
    return [n for n in traced.numbers.tolist() if n % 2 == remainder]


# -- rules of thumb --------------------------------------------------------------------


class Blamed(NamedTuple):
    """What a rule of thumb says: the rank to blame, and what its delay costs.

    ``gain_s`` is in seconds, and not a number for a rule that gives none.
    """

    rank: int
    gain_s: float


def by_sums_of_waits(traced: TracedTraining, judged: np.ndarray) -> Blamed:
    """Blame the rank that waits least in messages, because the others wait for a late rank.

    A message takes longer on a rank that waits in it for others. The wait of a rank is by
    how much the message is longer there than on the rank where it is the shortest. Profilers
    add such waits up over all messages. The gain is the difference between the ranks that
    wait longest and least.

    Parameters
    ----------
    traced : TracedTraining
        A training of R ranks.
    judged : ndarray of bool, shape (I,)
        Which iterations count.
    """
    # Shape (J, R, K): iterations that count, ranks and messages.
    waits_s = _durations_s(traced, judged)
    waits_s -= waits_s.min(axis=1, keepdims=True)
    # Shape (R,): the median iteration of each rank, over all of its messages.
    by_rank_s = np.median(waits_s.sum(axis=2), axis=0)
    return Blamed(int(by_rank_s.argmin()), float(by_rank_s.max() - by_rank_s.min()))


def by_last_arrivals(traced: TracedTraining, judged: np.ndarray) -> Blamed:
    """Blame the rank that posts the most messages last. This rule says nothing of a gain.

    Parameters
    ----------
    traced : TracedTraining
        A training.
    judged : ndarray of bool, shape (I,)
        Which iterations count.
    """
    # Shape (J, R, K): iterations that count, ranks and messages.
    durations_s = _durations_s(traced, judged)
    # The rank that posts a message last waits for nobody, so that the message is the shortest
    # on this rank. There is one such rank for each iteration and message.
    last_rank = durations_s.argmin(axis=1)
    counts = np.bincount(last_rank.ravel(), minlength=traced.schedule.n_ranks)
    return Blamed(int(counts.argmax()), float("nan"))


def by_backward_times(traced: TracedTraining, judged: np.ndarray) -> Blamed:
    """Blame the rank whose backward takes longest.

    Backward as a profiler shows it begins with the end of forward, and ends when its last
    message has ended. The gain is how much longer it takes on this rank than in the median
    of the other ranks.

    Parameters
    ----------
    traced : TracedTraining
        A training.
    judged : ndarray of bool, shape (I,)
        Which iterations count.
    """
    # One row for each rank, one column for each iteration.
    times_s = []
    for trace in traced.traces:
        of_rank_s = []
        for iteration in trace.iterations:
            ended_s = max(m.ended_s for m in iteration.messages if m.in_backward)
            of_rank_s.append(ended_s - iteration.forward_end_s)
        times_s.append(of_rank_s)
    by_rank_s = np.median(np.array(times_s)[:, judged], axis=1)
    rank = int(by_rank_s.argmax())
    others_s = np.delete(by_rank_s, rank)
    return Blamed(rank, float(by_rank_s[rank] - np.median(others_s)))


def _durations_s(traced: TracedTraining, judged: np.ndarray) -> Floats:
    """Return how long messages of backward took on each rank.

    Parameters
    ----------
    traced : TracedTraining
        A training of I iterations on R ranks, with K messages in each backward pass.
    judged : ndarray of bool, shape (I,)
        Which iterations to return. There are J of them.

    Returns
    -------
    ndarray, shape (J, R, K)
        Seconds.
    """
    durations_s = [
        [
            [m.duration_s for m in iteration.messages if m.in_backward]
            for iteration in trace.iterations
        ]
        for trace in traced.traces
    ]
    # From shape (R, J, K) to (J, R, K).
    by_rank: Floats = np.array(durations_s)[:, judged]
    return by_rank.transpose(1, 0, 2)


RULES = {
    "waits": by_sums_of_waits,
    "last": by_last_arrivals,
    "backward": by_backward_times,
}
"""The rules of thumb by the names of their columns.

Each takes a training, and of each of its iterations whether it is judged."""


# -- the judgement ---------------------------------------------------------------------


def judged_row(name: str, stated: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return what `ddlkit explain` and the rules of thumb say of a scenario, and the truth.

    Parameters
    ----------
    name : str
        The scenario.
    stated : mapping
        What `scenarios` says of it.
    folder : Path
        The folder of its traces.

    Returns
    -------
    dict
        A row of ``judged.csv``. ``right_rank`` and ``right_phase`` are what scenarios.yml wants
        to be named, and ``named_rank`` and ``named_phase`` what `ddlkit explain` names.
        ``odd_s``, ``even_s`` and ``replay_s`` are median iterations: measured with the delay,
        measured without it, and replayed with it.
        ``without_s``, ``gain_s``, ``lower_s`` and ``upper_s`` are what `ddlkit explain`
        predicts without the delay of the right rank. Rules of thumb and remedies have columns
        of their own. Values are None where nothing is named, predicted or to be named.
    """
    traced = training(folder)
    # Iterations of odd numbers have the delay. Those of even numbers are the truth without it.
    odd_numbers = numbers(traced, remainder=1)
    odd = np.isin(traced.numbers, odd_numbers)
    explained = explanation(traced, odd_numbers)
    odd_s = float(np.median(traced.measured_s[odd]))
    even_s = float(np.median(traced.measured_s[~odd]))
    right = stated.get("right") or {}
    named = explained.straggler or {}
    row: dict[str, Any] = {
        "scenario": name,
        "ranks": traced.schedule.n_ranks,
        "delayed_ranks": len({delay["rank"] for delay in stated.get("inject", [])}),
        "right_rank": right.get("rank"),
        "right_phase": right.get("phase"),
        "named_rank": named.get("rank"),
        "named_phase": named.get("phase"),
        "odd_s": odd_s,
        "even_s": even_s,
        "replay_s": explained.replay_s,
        **_without_columns(explained, right.get("rank")),
    }
    for column, rule in RULES.items():
        blamed = rule(traced, odd)
        row[f"{column}_rank"] = blamed.rank
        row[f"{column}_gain_s"] = blamed.gain_s
    row |= _remedy_columns(stated, folder)
    return row


def _without_columns(
    explained: Explanation, rank: int | None
) -> dict[str, float | None]:
    """Return what is predicted without the delay of a rank, as columns of ``judged.csv``.

    The prediction is that of `ddlkit explain`. The rank is the one that is right to name, even
    if `ddlkit explain` names another one. All values are None if no rank is to be named, or if
    `ddlkit explain` lists no time that was lost by the rank.
    """
    if rank is not None:
        for cause in explained.causes:
            # A rank has at most one cause.
            if cause.rank == rank:
                lower_s, upper_s = cause.gain_interval_s
                return {
                    "without_s": cause.iteration_without_s,
                    "gain_s": cause.gain_s,
                    "lower_s": lower_s,
                    "upper_s": upper_s,
                }
    return dict.fromkeys(("without_s", "gain_s", "lower_s", "upper_s"))


def _remedy_columns(stated: Mapping[str, Any], folder: Path) -> dict[str, float | None]:
    """Return what the iteration of a scenario takes with its remedy, recorded and predicted.

    A remedy is a faster link or another size of buckets. It is predicted from the traces of the
    training without the remedy, with and without a reference: the cost of messages, as timed
    outside of the training on the same link without the remedy.

    Parameters
    ----------
    stated : mapping
        What `scenarios` says of the scenario.
    folder : Path
        The folder of its traces.

    Returns
    -------
    dict of str to float or None
        Seconds. ``remedy_s`` is recorded with the remedy, ``remedy_with_s`` is predicted with
        the reference, and ``remedy_alone_s`` from the traces alone. All are None if the
        scenario has no remedy, and a prediction is None where `ddlkit explain` refuses it.
    """
    if not stated.get("remedy"):
        return {"remedy_s": None, "remedy_with_s": None, "remedy_alone_s": None}
    # A second recording, with the remedy.
    recorded = training(folder / "remedy")
    sizes, seconds, _ = read_bytes_seconds(
        folder / "collectives.csv", collective="all_reduce", ranks=stated["ranks"]
    )
    # No interval is asked for, so that the reference needs no draws.
    reference = fit("table", sizes, seconds, draws=0, workers=stated["ranks"]).cost
    # Messages that were under way together shared the link, but not during their start-ups. How
    # long each takes alone can only be told if the start-up is known. A fit may give a negative
    # start-up, which no message has.
    startup_s = max(0.0, reference.startup_s())
    with_startup = training(folder, startup_s)
    return {
        "remedy_s": float(np.median(recorded.measured_s)),
        "remedy_with_s": _predicted_s(stated, with_startup, cost=reference),
        "remedy_alone_s": _predicted_s(stated, training(folder), cost=None),
    }


def _predicted_s(
    stated: Mapping[str, Any], traced: TracedTraining, cost: MessageCost | None
) -> float | None:
    """Return what the iteration takes with the remedy of a scenario, None if refused.

    Parameters
    ----------
    stated : mapping
        What `scenarios` says of the scenario, which has a remedy.
    traced : TracedTraining
        The training without the remedy.
    cost : MessageCost or None
        The cost of messages as timed outside of the training on the same link, None without
        such times.
    """
    explained = explanation(traced, reference=cost)
    # `ddlkit explain` itself predicts the remedy of a faster link, or leaves it out.
    if "link" in stated["remedy"]:
        for remedy in explained.remedies:
            if remedy.setting == LINK_REMEDY:
                return remedy.iteration_with_s
        return None
    # The other remedy is another size of buckets, which are replayed with the cost. The prediction
    # is refused without a cost, or if the trace does not tell the buckets of the training.
    if cost is None:
        return None
    buckets = Buckets.of(traced, cost)
    if buckets is None:
        return None
    plan = ddp(buckets.workload, round(stated["remedy"]["bucket_cap_mb"] * MIB))
    every_iteration = np.ones(len(traced.numbers), dtype=bool)
    gains_s = buckets.gains_s(plan, every_iteration)
    return explained.iteration_s - float(np.median(gains_s))


def judge() -> pd.DataFrame:
    """Judge all recorded scenarios anew, and return a `judged_row` for each."""
    rows = []
    for name, stated in scenarios().items():
        rows.append(judged_row(name, stated, FOLDER / name))
    return pd.DataFrame(rows)


def judged() -> pd.DataFrame:
    """Return the judgement of all scenarios as it is recorded, one row for each."""
    return pd.read_csv(JUDGED)


def seconds_in_messages(traced: TracedTraining, chosen: np.ndarray) -> Floats:
    """Return how long ranks that wait for a late rank are inside messages of backward.

    Parameters
    ----------
    traced : TracedTraining
        A training in which one rank is late.
    chosen : ndarray of bool, shape (I,)
        Which iterations count. There are J of them.

    Returns
    -------
    ndarray, shape (J,)
        Seconds of each iteration. The messages of a rank are added up, and the mean is
        taken over all ranks but the late one.
    """
    # One row for each iteration, one column for each rank.
    by_rank_s = _durations_s(traced, chosen).sum(axis=2)
    # The late rank finds the others waiting, so that it spends least in messages.
    late = np.median(by_rank_s, axis=0).argmin()
    others_s: Floats = np.delete(by_rank_s, late, axis=1).mean(axis=1)
    return others_s


def statistics(judged: pd.DataFrame) -> dict[str, float]:
    """Return the statistics of the goals in data/goals.yml.

    Parameters
    ----------
    judged : DataFrame
        The rows of ``judged.csv``, as `judged_row` returns them. Iterations of odd numbers
        have a delay, and those of even numbers have none: ``odd_s`` and ``even_s`` are their
        measured medians. ``replay_s`` is replayed with the delay, and ``without_s`` is
        predicted without it. ``remedy_s`` is measured with a remedy, such as a faster link.
        It is predicted as ``remedy_alone_s`` from the traces alone, and as ``remedy_with_s``
        from the traces and a reference, the cost of messages outside of the training.

    Returns
    -------
    dict of str to float
        By the names that the comment on ``straggling`` in data/goals.yml explains. Errors
        and shares are relative, and ``false_names`` is a count.
    """
    injected = judged[judged["right_rank"].notna()]
    healthy = judged[judged["right_rank"].isna()]
    with_remedy = judged[judged["remedy_s"].notna()]
    # If two ranks are delayed, the iteration without one delay still has the other one.
    # Iterations without any delay then do not tell how long such an iteration takes.
    single = injected[injected["delayed_ranks"] == 1]
    without_error = (single["without_s"] / single["even_s"] - 1).abs()
    # A delay of which `ddlkit explain` says nothing counts as an infinite error.
    without_error = without_error.fillna(np.inf)
    # What an iteration really gains without the delay.
    truth_s = single["odd_s"] - single["even_s"]
    holds = (single["lower_s"] <= truth_s) & (truth_s <= single["upper_s"])
    return {
        "named": _share_named(injected),
        "false_names": float(healthy["named_rank"].notna().sum()),
        "without_error": float(without_error.median()),
        "without_error_95": float(np.percentile(without_error, 95)),
        "interval_holds": float(holds.mean()),
        "replay_error": float(
            (judged["replay_s"] / judged["odd_s"] - 1).abs().median()
        ),
        "remedy_error": _largest_error(with_remedy, "remedy_with_s"),
        "remedy_error_alone": _largest_error(with_remedy, "remedy_alone_s"),
        "better_than_rivals": _share_better(injected),
    }


def _share_named(injected: pd.DataFrame) -> float:
    """Return the share of large delays whose rank and phase are named rightly.

    They are named by `ddlkit explain` (``named_rank``, ``named_phase``). The right ones are those
    that were delayed on purpose (``right_rank``, ``right_phase``).
    """
    # Iterations of odd numbers have the delay, those of even numbers have not.
    delay_s = injected["odd_s"] - injected["even_s"]
    large = injected[delay_s >= LARGE * injected["odd_s"]]
    # The right phase is "any" if every phase of the right rank may be named.
    is_phase_right = (large["right_phase"] == "any") | (
        large["right_phase"] == large["named_phase"]
    )
    is_right = (large["right_rank"] == large["named_rank"]) & is_phase_right
    return float(is_right.mean())


def _share_better(injected: pd.DataFrame) -> float:
    """Return the share of delays of which `ddlkit explain` is better than all three rules of thumb.

    A gain is the number of seconds by which an iteration is predicted to be shorter without the
    delay.
    `ddlkit explain` is better than sums of waits and than times of backward if its gain errs less.
    It is better than last arrivals, which state no gain, unless that rule alone names the right
    rank.
    """
    # Iterations of odd numbers have the delay, those of even numbers have not.
    truth_s = injected["odd_s"] - injected["even_s"]
    # A delay without a gain by `ddlkit explain` counts as an infinite error.
    error_s = (injected["gain_s"] - truth_s).abs().fillna(np.inf)
    waits_error_s = (injected["waits_gain_s"] - truth_s).abs()
    backward_error_s = (injected["backward_gain_s"] - truth_s).abs()
    is_last_wrong = injected["last_rank"] != injected["right_rank"]
    is_named_rightly = injected["named_rank"] == injected["right_rank"]
    # This is false only if last arrivals alone name the right rank.
    is_better_than_last = is_named_rightly | is_last_wrong
    is_better = (
        (error_s < waits_error_s) & (error_s < backward_error_s) & is_better_than_last
    )
    return float(is_better.mean())


def _largest_error(judged: pd.DataFrame, column: str) -> float:
    """Return the largest relative error of a column of predicted iterations with remedies.

    Predictions that `ddlkit explain` refused are NaN and do not count. If all are, the result is 0.
    """
    errors = (judged[column] / judged["remedy_s"] - 1).abs().dropna()
    return float(errors.max()) if len(errors) else 0.0


def explained(name: str) -> Explanation:
    """Return the explanation of a recorded scenario, of its odd iterations."""
    traced = training(FOLDER / name)
    return explanation(traced, numbers(traced, 1))


# -- wb-explain ------------------------------------------------------------------------

TITLES = {
    "forward": "forward",
    "backward_first": "backward,\nbefore the first bucket",
    "backward_middle": "backward,\nmiddle",
    "backward_last": "backward,\nbefore the last bucket",
    "loader": "data loader",
    "update": "update",
    "throughout": "all layers",
    "small": "backward, small",
    "real": "backward,\nreal compute",
}
"""How the scenarios with one delayed rank are named beside their rows."""


def gains(judged: pd.DataFrame) -> Figure:
    """Draw what iterations gain without the delay of one rank.

    There are the measured gain, the gain that `ddlkit explain` replays, with its interval, and
    the gains that two rules of thumb state.

    Parameters
    ----------
    judged : DataFrame
        The rows of ``judged.csv``.
    """
    # Only scenarios with one delayed rank, in the order of TITLES.
    shown = judged.set_index("scenario").loc[[*TITLES]]
    rows = np.arange(len(shown))
    # Iterations of odd numbers have the delay, those of even numbers have not. The difference
    # is what an iteration gains without the delay.
    truth_ms = 1e3 * (shown["odd_s"] - shown["even_s"])
    replayed_ms = 1e3 * shown["gain_s"]
    figure, ax = plots.canvas(height=1.4 + 0.42 * len(shown))
    case_rows(ax, [TITLES[name] for name in shown.index], reference=0.0)
    model = look("model")
    ax.hlines(
        rows,
        1e3 * shown["lower_s"],
        1e3 * shown["upper_s"],
        color=model.color,
        linewidth=4,
        alpha=0.35,
        label="interval",
    )
    plots.points(ax, replayed_ms, rows, replace(model, label="replayed"), size=5)
    # Rules of thumb have no looks. They are drawn in those of two models, under their own names.
    rules = {
        "waits_gain_s": replace(look("no_overlap"), label="sums of waits"),
        "backward_gain_s": replace(look("line_medians"), label="times of backward"),
    }
    for column, style in rules.items():
        plots.points(ax, 1e3 * shown[column], rows, style, size=5)
    plots.points(ax, truth_ms, rows, look("measured"), size=5)
    ax.set_xlabel("gain without the delay [ms an iteration]")
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    error_ms = (replayed_ms - truth_ms).abs().median()
    most_times = (1e3 * shown["waits_gain_s"] / truth_ms).max()
    plots.title(
        figure,
        f"Replayed without the delay, iterations gain what was measured within "
        f"{error_ms:.1f} ms (median); sums of waits say up to {most_times:.1f} times as much",
    )
    return figure


if __name__ == "__main__":
    atomic_write_text(JUDGED, judge().to_csv(index=False, float_format="%.6g"))
    print(JUDGED)
