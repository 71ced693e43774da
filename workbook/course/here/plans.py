"""Plans replayed on this machine, each compared with the model's best plan."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from workbook import plots
from workbook.common.source import Source
from workbook.common.specs import link_title, network_title
from workbook.course.example import NETWORK
from workbook.plots.style import Style, case_rows, look
from workbook.validate.compare import paired

BEST = "exact"
DEFAULT = "ddp"
PLACE = ["network", "link", "workers"]
COLUMNS = 3
RECORDED = Style("recorded", "#8f8f8f", "o", hollow=True)
MEASURED_HERE = Style("measured here", "#7a3b9a", "X")
HOW_TO_RUN = (
    "Run ./reproduce.sh, which replays plans and runs this notebook again; "
    "the lab needs Linux and root."
)
NOTHING = f"Nothing was replayed on this machine. {HOW_TO_RUN}"
NOT_COMPARED = (
    "Plans were replayed on this machine, but none that can be compared with the best plan. "
    f"{HOW_TO_RUN}"
)


def compare(recordings: Sequence[Source], here: Source) -> tuple[str, Figure | None]:
    """Compare plans with the best plan, as replayed on this machine and as recorded.

    Parameters
    ----------
    recordings : sequence of Source
        Recorded replays. If several recordings have a plan, the first of them counts.
    here : Source
        The tables of this machine, which may be none.

    Returns
    -------
    sentence : str
        How much longer a step takes under PyTorch's default than under the best plan.
    figure : Figure or None
        The ratio of each plan's step to the best plan's step, here and recorded. None
        if no plan was replayed here together with the best plan.
    """
    if not _was_replayed(here):
        return NOTHING, None
    ratios_here = ratios(here)
    if ratios_here.empty:
        return NOT_COMPARED, None
    recorded = pd.concat([ratios(recording) for recording in recordings])
    recorded = recorded.drop_duplicates([*PLACE, "other"])
    return _sentence(ratios_here, recorded), _figure(ratios_here, recorded)


def ratios(tables: Source) -> pd.DataFrame:
    """Return how long a replayed step takes under each plan, compared with the best plan.

    Rounds that other programs disturbed are left out.

    Parameters
    ----------
    tables : Source
        The tables of one machine.

    Returns
    -------
    DataFrame
        One row for each network, link, number of workers and ``other`` plan. ``ratio`` is
        the median of its step over that of the plan ``exact``, as
        `workbook.validate.compare.paired` returns it. There are no rows if nothing was
        replayed.
    """
    if not tables.has("runs"):
        return paired(pd.DataFrame(columns=PLACE), BEST)
    runs = tables.table("runs")
    # Only plain replays are compared, with dense gradients, no slower worker, and one message at
    # a time.
    is_plain = (
        (runs["density"] == 1) & (runs["straggler"] == 1) & (runs["in_flight"] == 1)
    )
    runs = runs[is_plain & (runs["origin"] == "replayed")]
    # Recordings of older versions do not say what was disturbed.
    if "disturbed" in runs:
        runs = runs[~runs["disturbed"]]
    return paired(runs, BEST)


def _was_replayed(tables: Source) -> bool:
    """Return whether any plan was replayed, be it disturbed or not."""
    if not tables.has("runs"):
        return False
    return bool((tables.table("runs")["origin"] == "replayed").any())


def _sentence(ratios_here: pd.DataFrame, recorded: pd.DataFrame) -> str:
    """Return how much longer a step takes under PyTorch's default, here and recorded."""
    defaults = ratios_here[ratios_here["other"] == DEFAULT]
    if defaults.empty:
        return (
            f"{len(ratios_here)} plans were replayed on this machine, but PyTorch's default "
            "was not among them."
        )
    # The running example comes first, if it was replayed here.
    examples = defaults[defaults["network"] == NETWORK]
    first = defaults.iloc[0]
    if len(examples):
        first = examples.iloc[0]
    sentence = (
        f"Among {first['workers']} workers over {link_title(first['link'])}, a replayed "
        f"step of {network_title(first['network'])} takes {first['ratio']:.2f} times as "
        "long under PyTorch's default as under the best plan"
    )
    # A table with one row selects the same network, link and workers.
    same_case = first[PLACE].to_frame().T
    same_recorded = recorded[recorded["other"] == DEFAULT].merge(same_case)
    if len(same_recorded):
        sentence += f" (recorded: {same_recorded['ratio'].iloc[0]:.2f} times)"
    sentence += "."
    if len(defaults) > 1:
        labs = len(defaults.drop_duplicates(["link", "workers"]))
        cases = "networks" if labs == 1 else "pairs of a network and a lab"
        sentence += (
            f" For the {len(defaults)} {cases} that were replayed here, the ratio is "
            f"between {defaults['ratio'].min():.2f} and {defaults['ratio'].max():.2f}."
        )
    return sentence


def _figure(ratios_here: pd.DataFrame, recorded: pd.DataFrame) -> Figure:
    """Return a figure with a panel for each network and link that was replayed here."""
    # Random plans have no look, by which a row would be named. They are left out.
    is_random = ratios_here["other"].str.startswith("random")
    medians = ratios_here[~is_random].groupby("other")["ratio"].median()
    # The fastest plan is on top.
    plans = [str(plan) for plan in medians.sort_values().index]
    cases = list(ratios_here.groupby(PLACE, sort=False))
    columns = min(COLUMNS, len(cases))
    rows = math.ceil(len(cases) / columns)
    with plots.sheet(
        columns=columns,
        rows=rows,
        height=rows * (1.2 + 0.28 * len(plans)),
        sharex=True,
        sharey=True,
        squeeze=False,
    ) as (figure, axes):
        # The last row may have more axes than cases.
        for ax in axes.flat[len(cases) :]:
            ax.set_visible(False)
        for ax, (case, case_ratios) in zip(axes.flat, cases, strict=False):
            same_recorded = recorded.merge(pd.DataFrame([case], columns=PLACE))
            _draw_panel(ax, plans, same_recorded, case_ratios)
            network, link, workers = case
            plots.heading(ax, network_title(str(network)))
            lab = f"{workers} workers, {link_title(str(link))}"
            ax.set_xlabel(f"step / step of the best plan\n{lab}")
    return figure


def _draw_panel(
    ax: Axes, plans: Sequence[str], recorded: pd.DataFrame, here: pd.DataFrame
) -> None:
    """Draw each plan's step over that of the model's best plan, with a row for each plan.

    ``recorded`` and ``here`` are rows of `ratios`, of one network, link and number of
    workers. Their column ``other`` is the plan.
    """
    row_of = {plan: row for row, plan in enumerate(plans)}
    case_rows(ax, [look(plan).label for plan in plans], reference=1.0)
    # Every panel has numbers on its axis, because the one below may be hidden.
    ax.tick_params(labelbottom=True)
    for style, ratios in ((RECORDED, recorded), (MEASURED_HERE, here)):
        drawn = ratios[ratios["other"].isin(plans)]
        plots.points(ax, drawn["ratio"], drawn["other"].map(row_of), style, size=5)
