"""Replays on this machine, and how far the lesson's prediction is from them."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from ddlkit.core.case import Case
from ddlkit.core.cost import MessageCost
from ddlkit.core.iteration import predict
from ddlkit.core.workload import Workload
from ddlkit.model import Calibration
from ddlkit.model.predictor import plan_of
from workbook import plots
from workbook.common.source import Source
from workbook.common.specs import network_title
from workbook.plots.style import add_legend, case_rows, look, looks
from workbook.validate.accuracy import measured

NOTHING = (
    "Nothing was replayed on this machine over {link} among {workers} workers. "
    "Run ./reproduce.sh, which replays plans and runs this notebook again. "
    "The lab needs Linux and root."
)

COLUMNS = ["network", "plan", "messages", "predicted_s", "replayed_s", "error"]
"""The columns of `signed_errors`."""


def compare(
    recording: Source, here: Source, link: str, workers: int
) -> tuple[str, Figure | None]:
    """Compare predicted steps with steps replayed on this machine and in the recording.

    Each prediction takes the layer times and the message times of the machine on which
    the plan was replayed. Replays that other programs disturbed are left out.

    Parameters
    ----------
    recording : Source
        The tables that the lesson is made from.
    here : Source
        The tables of this machine, which may be none.
    link : str
        The link over which messages were sent.
    workers : int
        The number of workers.

    Returns
    -------
    sentence : str
        The number of replays, the median error, and the plan with the largest error.
    figure : Figure or None
        The error of each plan, here and in the recording. None if nothing was replayed
        here over this link among so many workers.
    """
    errors_here = signed_errors(here, link, workers)
    if errors_here.empty:
        return NOTHING.format(link=link, workers=workers), None
    recorded_errors = signed_errors(recording, link, workers)
    return (
        _sentence(errors_here, recorded_errors, link, workers),
        _figure(errors_here, recorded_errors),
    )


def signed_errors(tables: Source, link: str, workers: int) -> pd.DataFrame:
    """Return the error of the predicted step of each replayed plan.

    Steps are predicted by the recursion that the lesson teaches, `predict`.

    Parameters
    ----------
    tables : Source
        The tables of one machine.
    link : str
        The link over which messages were sent.
    workers : int
        The number of workers.

    Returns
    -------
    DataFrame
        One row for each network and plan, with the columns ``network``, ``plan``,
        ``messages`` (their number), ``predicted_s``, ``replayed_s`` and ``error``
        (the predicted step divided by the replayed one, minus 1). Cases that other programs
        disturbed or the processor limited are left out, and so are cases whose layer profile
        is missing. There are no rows if a table is missing, or if no all-reduce or no replay was
        measured over the link among so many workers.
    """
    no_rows = pd.DataFrame(columns=COLUMNS)
    if not all(tables.has(kind) for kind in ("runs", "layers", "collectives")):
        return no_rows
    # Without draws, costs have no intervals, which no error needs.
    calibration = Calibration.of(tables.table("collectives"), draws=0)
    # A step is predicted from the cost of all-reduces over this link among so many workers.
    if (link, workers, "all_reduce") not in calibration.known:
        return no_rows
    cost = calibration.between(link, workers).cost
    # The layer times of each profile, by the hash of the profile.
    workloads = tables.workloads()
    # `_replays` leaves out the runs that the processor limited.
    runs = _replays(tables.table("runs"), link, workers)
    # A prediction needs the layer times from which the replay was made.
    runs = runs[runs["profile_sha256"].isin(workloads)]
    if runs.empty:
        return no_rows
    # `measured` returns a row for each case, with medians over its iterations, and marks the
    # cases that other programs disturbed.
    cases = measured(runs)
    rows = []
    for measured_case in cases[~cases["marked"]].to_dict("records"):
        rows.append(_row(measured_case, workloads, cost))
    return pd.DataFrame(rows, columns=COLUMNS)


def _row(
    measured_case: dict[str, Any], workloads: dict[str, Workload], cost: MessageCost
) -> dict[str, object]:
    """Return a row of `signed_errors`.

    Parameters
    ----------
    measured_case : dict
        A row that `measured` returns.
    workloads : dict of str to Workload
        The layer times of each profile, by the hash of the profile.
    cost : MessageCost
        The cost of an all-reduce.
    """
    case = Case.from_row(measured_case)
    # The replay slept for the layer times multiplied by the case's dilation.
    workload = workloads[case.profile_sha256].scaled(case.dilation)
    plan = plan_of(case)
    predicted_s = predict(workload, plan, cost).iteration_s
    replayed_s = measured_case["measured_iteration_s"]
    return {
        "network": case.network,
        "plan": case.plan,
        # A plan lists where the gradients of each message end.
        "messages": len(plan.ends),
        "predicted_s": predicted_s,
        "replayed_s": replayed_s,
        "error": predicted_s / replayed_s - 1,
    }


def _replays(runs: pd.DataFrame, link: str, workers: int) -> pd.DataFrame:
    """Return the rows of the table ``runs`` that were replayed over a link among some workers.

    Rows that the processor limited are left out.
    """
    is_replay = (runs["origin"] == "replayed") & ~runs["processor_limited"]
    is_on_link = (runs["link"] == link) & (runs["workers"] == workers)
    return runs[is_replay & is_on_link]


def _sentence(
    errors_here: pd.DataFrame, recorded: pd.DataFrame, link: str, workers: int
) -> str:
    """Return the number of replays, the median errors and the largest error in words.

    Both tables are as `signed_errors` returns them. ``errors_here`` has rows, and ``recorded``
    may have none. Median errors are of absolute errors.
    """
    networks = errors_here["network"].nunique()
    noun = "network" if networks == 1 else "networks"
    worst = errors_here.loc[errors_here["error"].abs().idxmax()]
    sentence = (
        f"{len(errors_here)} plans of {networks} {noun} were replayed on this machine, "
        f"among {workers} workers over {link}. The median error of the prediction is "
        f"{errors_here['error'].abs().median():.1%}"
    )
    if len(recorded):
        sentence += (
            f"; in the recording, it is {recorded['error'].abs().median():.1%} "
            f"for {len(recorded)} plans"
        )
    return (
        f"{sentence}. The largest error is {worst['error']:+.1%}, for "
        f"{network_title(worst['network'])} with the plan {worst['plan']}."
    )


def _figure(errors_here: pd.DataFrame, recorded: pd.DataFrame) -> Figure:
    """Return a figure with a row for each plan that was replayed here.

    The plan with the most messages in any network is on top. Both tables are as `signed_errors`
    returns them. ``recorded`` may have no rows.
    """
    by_messages = errors_here.sort_values("messages", ascending=False, kind="stable")
    # dict.fromkeys keeps the first place of each plan, which has a row for each network.
    plans = list(dict.fromkeys(by_messages["plan"]))
    row_of = {plan: row for row, plan in enumerate(plans)}
    networks = errors_here.groupby("network", sort=False)
    figure, ax = plots.canvas(height=1.2 + 0.28 * len(plans))
    # The reference line is at an error of 0.
    case_rows(ax, [look(plan).label for plan in plans], reference=0.0)
    # Recorded plans that were not replayed here have no row.
    in_both = recorded[recorded["plan"].isin(plans)]
    recorded_label = f"recording, {in_both['network'].nunique()} networks"
    plots.points(
        ax,
        100 * in_both["error"],
        in_both["plan"].map(row_of),
        "measured",
        label=recorded_label,
        size=5,
    )
    # The recording has one style for all networks, and this machine one for each network.
    styles = looks([f"{network_title(str(name))}, here" for name in networks.groups])
    for style, (_, rows) in zip(styles, networks, strict=True):
        plots.points(ax, 100 * rows["error"], rows["plan"].map(row_of), style, size=5)
    ax.set_xlabel("error of the predicted step [%]")
    add_legend(ax, "above")
    return figure
