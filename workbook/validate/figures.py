"""Figures of prediction errors.

They are wb-lab-errors, wb-validate-training, wb-training-campaign, wb-lab-extrapolation
and wb-advice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddlkit.model.calibration import TRAINING
from workbook import plots
from workbook.common.specs import link_title, network_title
from workbook.plots.style import INK, SOFT, case_rows, look, looks
from workbook.validate.accuracy import sends_one_message
from workbook.validate.labs import WELL
from workbook.validate.rivals import BARE, LINE, LINE_BESIDE, OURS

ERROR = "predicted / measured - 1 [%]"


# -- wb-lab-errors -------------------------------------------------------------------


class _Kind(NamedTuple):
    """Cases of one kind, which share the rows of `every_case`.

    Attributes
    ----------
    name : str
        The number of cases and their kind, in words.
    cases : DataFrame
        The cases.
    error : str
        The error that is drawn, "error" or "paired_error". The column of a model's errors has
        the name of the model before it.
    """

    name: str
    cases: pd.DataFrame
    error: str


def every_case(
    replays: pd.DataFrame,
    training: pd.DataFrame,
    campaign: pd.DataFrame,
    live: pd.DataFrame,
) -> Figure:
    """Draw the error of every case by our model, and by a model without overlap.

    Errors of real training are paired: what a model predicts for exposed communication
    is added to the compute time that was measured around the run.

    Parameters
    ----------
    replays : DataFrame
        Cases, as `accuracy.labelled` returns them.
    training : DataFrame
        Cases of real training, as `accuracy.labelled` returns them. Those whose plan has one
        message are left out, because they overlap nothing and test no model of overlap.
    campaign : DataFrame
        All cases of the campaign of real training, as `accuracy.joined` returns them. Its
        plans with one message are drawn, too.
    live : DataFrame
        Cases of quiet live runs, as `accuracy.live` returns them. What a model without
        overlap predicts for them was not kept.
    """
    training = training[~sends_one_message(training)]
    is_trained = live["kind"] == TRAINING
    live_replays = live[~is_trained]
    live_trainings = live[is_trained]
    # The column "error" of live trainings is a paired error, too, because their recorded
    # prediction already has the compute time that was measured around the run.
    kinds = [
        _Kind(f"{len(replays)} replays", replays, "error"),
        _Kind(f"{len(live_replays)} live replays", live_replays, "error"),
        _Kind(f"{len(training)} trainings", training, "paired_error"),
        _Kind(f"{len(campaign)} trainings, campaign", campaign, "paired_error"),
        _Kind(f"{len(live_trainings)} live trainings", live_trainings, "error"),
    ]
    models = {OURS: "our model", "no_overlap": "no overlap"}
    # Errors by the name of the row.
    rows = {}
    styles = []
    for model, name in models.items():
        for kind in kinds:
            column = f"{model}_{kind.error}"
            # Only our model has errors of live runs.
            if column in kind.cases:
                rows[f"{kind.name}, {name}"] = kind.cases[column]
                styles.append(look(model))
    medians = [errors.abs().median() for errors in rows.values()]
    # Our model has a row of every kind, in their order: recorded and live replays, then
    # trainings. The other model has none of live runs.
    our_replays, _, *our_trainings = medians[: len(kinds)]
    other_replays, *other_trainings = medians[len(kinds) :]
    figure, ax = plots.canvas(height=4.2)
    label = f"error of the step time, {ERROR}"
    plots.error_rows(ax, rows, label=label, styles=styles)
    # A line between the rows of the two models.
    ax.axhline(len(kinds) - 0.5, color=SOFT, linewidth=0.8)
    plots.title(
        figure,
        f"Our model errs by {our_replays:.1%} on recorded replays and by "
        f"{min(our_trainings):.1%} to {max(our_trainings):.1%} on real training, a model "
        f"without overlap by {other_replays:.0%} and by {min(other_trainings):.0%} to "
        f"{max(other_trainings):.0%}",
    )
    return figure


# -- wb-validate-training ------------------------------------------------------------

TRIVIAL = {
    "perfect_overlap": "perfect\noverlap",
    "model": "our\nmodel",
    "no_overlap": "no\noverlap",
}
"""Two trivial models and ours, whose errors are drawn, and their names above the markers."""

PLANS = {
    "ddp": "PyTorch's default",
    "exact": "best plan",
    "none": "one message per gradient",
    "single": "one message for all",
}
"""How plans are named beside their rows; others by their look."""


def training_errors(cases: pd.DataFrame) -> Figure:
    """Draw paired errors of real training by our model and by two trivial models.

    A paired error is the exposed communication that a model predicts less the measured one,
    which is the measured step without its compute, as a share of the measured step. The
    grey band around 0 shows how far exposed communication differs between rounds. A plan with one
    message overlaps nothing, so that it tests no model of overlap. Its row is the last one
    of its network and link, and grey.

    Parameters
    ----------
    cases : DataFrame
        Cases of real training, as `accuracy.labelled` returns them.
    """
    one_message = sends_one_message(cases)
    cases = cases.assign(one_message=one_message)
    cases = cases.sort_values(["network", "link", "one_message"], kind="stable")
    names, rows = _rows_by_network_and_link(cases)
    cases = cases.set_axis(rows)
    # Only plans with several messages test a model of overlap.
    tested = cases[~cases["one_message"]]

    # TRIVIAL has our model, too, between the two trivial ones.
    columns = {f"{model}_paired_error": model for model in TRIVIAL}
    errors = 100 * cases[[*columns]].rename(columns=columns)
    # The rows of titles get no errors. Errors of plans with one message are drawn in grey
    # below.
    shown = errors.loc[tested.index].reindex(range(len(names)))
    repeats = 100 * paired_repeatability(cases).reindex(range(len(names)))
    figure, ax = plots.canvas(height=1.5 + 0.28 * len(names))
    label = f"paired error of the step time, {ERROR}"
    plots.dots(
        ax, names, shown, band=("repeatability", repeats), legend="", label=label
    )
    untested = errors.drop(tested.index)
    for model in TRIVIAL:
        grey = replace(look(model), color="#b5b5b5")
        plots.points(ax, untested[model], untested.index, grey, size=4.5)
    _name_models(ax, errors.iloc[0], row=rows[0])
    _weigh_names(ax, cases)

    ours = tested["model_paired_error"].abs()
    theirs = tested[["no_overlap_paired_error", "perfect_overlap_paired_error"]]
    plots.title(
        figure,
        f"On the plans that overlap, our model errs by {_span(ours)}, and a model with no "
        f"overlap or with perfect overlap by {_span(theirs.abs().stack())}",
    )
    return figure


def _rows_by_network_and_link(cases: pd.DataFrame) -> tuple[list[str], list[int]]:
    """Return the names of all rows of the figure, and the row number of each case.

    Each network and link has a row with its title, and below it a row for each of its cases,
    which is named by the plan. The ``cases`` are sorted by network and link.
    """
    names: list[str] = []
    rows: list[int] = []
    for (network, link), runs in cases.groupby(["network", "link"], sort=False):
        names.append(f"{network_title(network)}, {link_title(link)}:")
        for plan in runs["plan"]:
            rows.append(len(names))
            names.append(PLANS.get(plan, look(plan).label))
    return names, rows


def paired_repeatability(cases: pd.DataFrame) -> pd.Series:
    """Return how far two rounds differ in exposed communication, as a share of the step.

    Parameters
    ----------
    cases : DataFrame
        Cases, as `accuracy.labelled` returns them.
    """
    exposed_s = cases["measured_exposed_communication_s"]
    exposed_share = exposed_s / cases["measured_iteration_s"]
    # The repeatability in the table is a share of exposed communication.
    return cases["repeatability_exposed"] * exposed_share


def _name_models(ax: Axes, errors: pd.Series, row: int) -> None:
    """Name our model and the two trivial ones above their markers in a row, in place of a legend.

    All three are in TRIVIAL. ``errors`` are those of the row by model, in per cent.
    """
    for model, name in TRIVIAL.items():
        named = ax.text(errors[model], row - 0.35, name, ha="center", va="bottom")
        named.set(color=INK, linespacing=0.95)


def _weigh_names(ax: Axes, cases: pd.DataFrame) -> None:
    """Set the titles of networks in bold, and the names of plans with one message in grey.

    The index of ``cases`` has their rows.
    """
    for row, name in enumerate(ax.get_yticklabels()):
        # The row of a title has no case.
        if row not in cases.index:
            name.set_fontweight("bold")
        elif cases.loc[row, "one_message"]:
            name.set_color(SOFT)


def _span(shares: pd.Series) -> str:
    """Return the least and the largest of some shares in per cent, as "2 to 3%"."""
    return f"{100 * shares.min():.0f} to {shares.max():.0%}"


# -- wb-training-campaign ------------------------------------------------------------

ROWS_BY_SLOWDOWNS = {
    "our model,\nwith slowdowns": (OURS, OURS),
    "straight line,\nwith slowdowns": (LINE, LINE_BESIDE),
    "our model,\nwithout": (f"{OURS}:without", BARE),
    "straight line,\nwithout": (f"{LINE}:without", LINE),
}
"""The rows of the figure, from top to bottom, by the name next to the row.

Each has a role, whose look it is drawn in, and the model whose errors it shows. The two
rows with measured slowdowns come first, then the two without."""


def with_and_without_slowdowns(cases: pd.DataFrame) -> Figure:
    """Draw paired errors of real training by two costs of messages, with and without slowdowns.

    The costs are that of our model and a straight line. Slowdowns are how much messages and
    compute slow each other down. A paired error is that of a prediction with the measured
    compute time.

    Parameters
    ----------
    cases : DataFrame
        Cases, as `accuracy.trained` returns them.
    """
    rows = {
        name: cases[f"{model}_paired_error"]
        for name, (_, model) in ROWS_BY_SLOWDOWNS.items()
    }
    styles = looks([role for role, _ in ROWS_BY_SLOWDOWNS.values()])
    figure, ax = plots.canvas(height=3.2)
    label = f"error of the step time, {ERROR}"
    plots.error_rows(ax, rows, label=label, styles=styles)
    # Rows are at 0 to 3. The line separates the two rows with slowdowns, which come first,
    # from the two without.
    ax.axhline(1.5, color=SOFT, linewidth=0.8)
    medians = [errors.abs().median() for errors in rows.values()]
    ours_with, line_with, ours_without, line_without = medians
    plots.title(
        figure,
        f"With measured slowdowns the median error is {ours_with:.1%} for our model and "
        f"{line_with:.1%} for a straight line; without them it is {ours_without:.1%} and "
        f"{line_without:.1%}",
    )
    return figure


# -- wb-lab-extrapolation ------------------------------------------------------------

KINDS = {"emulated": "Links with a delay", "tbf": "Links without a delay"}
"""Kinds of labs, and the headings of their panels."""

DECIDES = {
    "start-up": "start-up decides",
    "knee": "both count",
    "bytes": "bytes decide",
}
"""What decides how long a message takes, and the names of the rows."""


def labs_left_out(errors: pd.DataFrame, medians: pd.Series) -> Figure:
    """Draw errors of messages in labs that were left out of the fit that predicts them.

    There is a panel for each of KINDS. Its rows are by what decides the time of a message, its
    start-up, its bytes or both (DECIDES).

    Parameters
    ----------
    errors : DataFrame
        Errors, as `labs.held_out` returns them.
    medians : Series
        Medians of the absolute errors, by kind and lab. Labs with a median of at most WELL
        count as predicted.
    """
    figure, axes = plots.canvas(columns=2, height=2.6, sharex=True, sharey=True)
    for ax, (kind, heading) in zip(axes, KINDS.items(), strict=True):
        own = errors[errors["kind"] == kind].set_index("decides")["error"]
        # With a list of labels, pandas returns a series even for a single error.
        rows = {name: own[[decides]] for decides, name in DECIDES.items()}
        plots.error_rows(ax, rows, label="error of a message's time [%]")
        plots.heading(ax, heading)
    counts = {}
    for kind in KINDS:
        well = medians.loc[kind] <= WELL
        counts[kind] = f"{well.sum()} of {len(well)}"
    plots.title(
        figure,
        f"Of the labs that were left out, {counts['emulated']} are predicted within "
        f"{WELL:.0%} where links have a delay, and {counts['tbf']} where they have none",
    )
    return figure


# -- wb-advice -----------------------------------------------------------------------

UNCHANGED_STEP = 0.45
"""The distance of rows of pairs for which no change is advised. Other rows are 1 apart."""

TOP = -0.6
"""The upper limit of both panels, which leaves space above the first row at 0."""

OWN_TITLES = {
    "gpt_small": "small GPT",
    "models-decoder": "decoder",
    "models-embedded": "large embedding",
}
"""Names of the workbook's own networks, two of them from examples/models.py, in words."""


def advised_gains(before: pd.DataFrame, after: pd.DataFrame) -> Figure:
    """Draw predicted and measured gains of plans over PyTorch's default.

    One panel has the pairs of a network and a link from before goals were set, and the other
    those from after. Rows of pairs for which a change of plan is advised are named. The other
    pairs, whose advice is to keep the default, are drawn closer together below them.

    Parameters
    ----------
    before, after : DataFrame
        Gains as `workbook.validate.gains` returns them.
    """
    figure, axes = plots.canvas(columns=2, height=4.4, sharex=True)
    panels = {"Before goals were set": before, "After goals were set": after}
    for ax, (when, gains) in zip(axes, panels.items(), strict=True):
        _draw_gains(ax, gains)
        plots.heading(ax, f"{when}:\n{_in_interval(gains)} inside")
    # Row numbers grow downwards, so that the lower limit is the larger number. With the limits
    # of the longer panel, rows are equally far apart in both.
    bottom = max(ax.get_ylim()[0] for ax in axes)
    for ax in axes:
        ax.set_ylim(bottom, TOP)
    every = pd.concat(panels.values())
    # Whether each advised change gained time.
    gained = every.loc[every["advised"], "measured"] > 0
    plots.title(
        figure,
        f"{gained.sum()} of {len(gained)} advised changes gained time; "
        f"{_in_interval(every)} gains lie in their predicted intervals",
    )
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower left", ncols=3)
    return figure


def _in_interval(gains: pd.DataFrame) -> str:
    """Return how many measured gains lie in their predicted intervals, as "19 of 20"."""
    inside = gains["measured"].between(gains["low"], gains["high"])
    return f"{inside.sum()} of {len(gains)}"


def _draw_gains(ax: Axes, gains: pd.DataFrame) -> None:
    """Draw one panel of `advised_gains`.

    First are the pairs for which a change is advised, then the others. In each of the two
    groups, the largest predicted gain is on top.
    """
    gains = gains.sort_values("gain", ascending=False)
    advised = gains[gains["advised"]]
    unchanged = gains[~gains["advised"]]
    # The gap of 0.3 separates the two groups.
    first_unchanged = len(advised) + 0.3
    unchanged_rows = [
        first_unchanged + UNCHANGED_STEP * row for row in range(len(unchanged))
    ]

    # `case_rows` draws the line at 0 and sets up the axes. It is given no names, because
    # some rows share one.
    case_rows(ax, [], reference=0.0)
    # Each row with an advised change has a name. The other rows share one, in the middle of them.
    names = [_pair_title(pair) for pair in advised[["network", "link"]].to_numpy()]
    middle = sum(unchanged_rows) / len(unchanged_rows)
    names.append(f"keep the default:\n{len(unchanged)} other pairs")
    ax.set_yticks([*range(len(advised)), middle], names)
    # Row numbers grow downwards.
    ax.set_ylim(unchanged_rows[-1] + 0.6, TOP)
    ax.grid(False, axis="y")

    _draw_pairs(ax, advised, range(len(advised)), color=look("model").color)
    # Matplotlib leaves labels that begin with an underscore out of the legend. The legend
    # therefore names each marker once, as it looks in the rows of advised changes.
    _draw_pairs(ax, unchanged, unchanged_rows, color=SOFT, prefix="_")
    ax.set_xlabel("gain over PyTorch's default [%]")


def _draw_pairs(
    ax: Axes,
    gains: pd.DataFrame,
    rows: Sequence[float],
    *,
    color: str,
    prefix: str = "",
) -> None:
    """Draw the predicted gain, its interval and the measured gain of each pair, in per cent.

    Parameters
    ----------
    ax : Axes
        The axes.
    gains : DataFrame
        The pairs of a network and a link.
    rows : sequence of float
        The height at which each pair is drawn.
    color : str
        The colour of predictions.
    prefix : str, optional
        What the labels of the legend begin with. With "_", matplotlib leaves them out.
    """
    low = 100 * gains["low"]
    high = 100 * gains["high"]
    bars = ax.hlines(rows, low, high, color=color, linewidth=4, alpha=0.35)
    bars.set_label(prefix + "predicted interval")
    predicted = replace(look("model"), color=color, label=prefix + "predicted")
    plots.points(ax, 100 * gains["gain"], rows, predicted, size=4)
    measured = replace(look("measured"), label=prefix + "measured")
    plots.points(ax, 100 * gains["measured"], rows, measured, size=4)


def _pair_title(pair: tuple[str, str]) -> str:
    """Return a network and a link as they stand beside a row, as in "GoogLeNet, 1 Gbit/s"."""
    network, link = pair
    network = OWN_TITLES.get(network) or network_title(network)
    link = link_title(link).replace(" with", ",").removesuffix(" delay")
    return f"{network}, {link}"
