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
        unless the best plan and another one were replayed here undisturbed.
    """
    if not _was_replayed(here):
        return NOTHING, None
    ratios_here = ratios(here)
    # There is nothing to compare if, for example, other programs disturbed all replays.
    if ratios_here.empty:
        return NOT_COMPARED, None
    # Of rows with the same network, link, workers and plan, the first one is kept.
    recorded = pd.concat([ratios(recording) for recording in recordings])
    recorded = recorded.drop_duplicates([*PLACE, "other"])
    return _sentence(ratios_here, recorded), _figure(ratios_here, recorded)


def ratios(tables: Source) -> pd.DataFrame:
    """Return how long a replayed step takes under each plan, compared with the best plan.

    The best plan is the one that the model finds, "exact". Steps that other programs
    disturbed are left out.

    Parameters
    ----------
    tables : Source
        The tables of one machine.

    Returns
    -------
    DataFrame
        One row for each network, link, number of ``workers`` and ``other`` plan, as
        `workbook.validate.compare.paired` returns it. ``ratio`` is this plan's step divided by
        the step of the best plan, as the median over rounds. There are no rows unless the
        best plan and another one were replayed.
    """
    if not tables.has("runs"):
        # Without runs, the result has the same columns and no rows.
        return paired(pd.DataFrame(columns=PLACE), BEST)
    runs = tables.table("runs")
    # Only plain replays are compared. All elements of the gradients are sent (a density of 1),
    # no worker is slower than the others (a straggler takes 1 times as long), and one message
    # is under way at a time.
    is_plain = (
        (runs["density"] == 1) & (runs["straggler"] == 1) & (runs["in_flight"] == 1)
    )
    runs = runs[is_plain & (runs["origin"] == "replayed")]
    # Recordings of older versions do not say which steps were disturbed.
    if "disturbed" in runs:
        runs = runs[~runs["disturbed"]]
    return paired(runs, BEST)


def _was_replayed(tables: Source) -> bool:
    """Return whether any plan was replayed, be it disturbed or not."""
    if not tables.has("runs"):
        return False
    return bool((tables.table("runs")["origin"] == "replayed").any())


def _sentence(ratios_here: pd.DataFrame, recorded: pd.DataFrame) -> str:
    """Return in words how many times as long a step takes under PyTorch's default.

    Both tables are as `ratios` returns them: the column ``other`` is a plan, and ``ratio`` is the
    step under this plan divided by the step under the model's best plan. ``ratios_here`` has rows,
    and ``recorded`` has at most one row for each network, link, number of workers and plan.
    """
    defaults = ratios_here[ratios_here["other"] == DEFAULT]
    if defaults.empty:
        return (
            f"{len(ratios_here)} plans were replayed on this machine, but PyTorch's default "
            "was not among them."
        )
    # The sentence is about the network of the running example, if it was replayed here.
    examples = defaults[defaults["network"] == NETWORK]
    chosen = defaults.iloc[0] if examples.empty else examples.iloc[0]
    sentence = (
        f"Among {chosen['workers']} workers over {link_title(chosen['link'])}, a replayed "
        f"step of {network_title(chosen['network'])} takes {chosen['ratio']:.2f} times as "
        "long under PyTorch's default as under the best plan"
    )
    # The merge keeps the recorded row with the same network, link and workers, if any.
    same_case = chosen[PLACE].to_frame().T
    same_recorded = recorded[recorded["other"] == DEFAULT].merge(same_case)
    if len(same_recorded):
        sentence += f" (recorded: {same_recorded['ratio'].iloc[0]:.2f} times)"
    sentence += "."
    if len(defaults) > 1:
        sentence += f" {_range_sentence(defaults)}"
    return sentence


def _range_sentence(defaults: pd.DataFrame) -> str:
    """Return the range of the ratios of all replays of PyTorch's default in words.

    ``defaults`` has a row for each network, link and number of workers.
    """
    # A lab is some workers and their link. In a single lab, each row is another network.
    labs = len(defaults.drop_duplicates(["link", "workers"]))
    cases = "networks" if labs == 1 else "pairs of a network and a lab"
    return (
        f"For the {len(defaults)} {cases} that were replayed here, the ratio is "
        f"between {defaults['ratio'].min():.2f} and {defaults['ratio'].max():.2f}."
    )


def _shown_plans(ratios_here: pd.DataFrame) -> list[str]:
    """Return the plans that are drawn, that with the least median ratio first.

    ``ratios_here`` is as `ratios` returns it: its column ``other`` is a plan, and ``ratio`` is
    the step under this plan divided by the step under the model's best plan. Random plans, such as
    "random:1:3", are left out. They test the model, and no planner would choose them.
    """
    is_random = ratios_here["other"].str.startswith("random")
    medians = ratios_here[~is_random].groupby("other")["ratio"].median()
    return [str(plan) for plan in medians.sort_values().index]


def _figure(ratios_here: pd.DataFrame, recorded: pd.DataFrame) -> Figure:
    """Return a figure with a panel for each network, link and number of workers replayed here.

    Both tables are as `ratios` returns them.
    """
    # All panels have the same rows, with the first plan on top.
    plans = _shown_plans(ratios_here)
    # Each case has its network, link and workers, and its rows of the table.
    cases = list(ratios_here.groupby(PLACE, sort=False))
    # At most COLUMNS panels stand side by side.
    columns = min(COLUMNS, len(cases))
    rows = math.ceil(len(cases) / columns)
    # In inches: 1.2 for the heading and the axis of a panel, and 0.28 for each plan.
    panel_height = 1.2 + 0.28 * len(plans)
    # `sheet` adds a legend of all panels at the end.
    with plots.sheet(
        columns=columns,
        rows=rows,
        height=rows * panel_height,
        sharex=True,
        sharey=True,
        squeeze=False,
    ) as (figure, axes):
        # The last row of panels may have more axes than there are cases left.
        for ax in axes.flat[len(cases) :]:
            ax.set_visible(False)
        for ax, (case, case_ratios) in zip(axes.flat, cases, strict=False):
            # The merge keeps the recorded rows of this case.
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
    """Draw how many times as long as under the model's best plan a step takes under each plan.

    Each of the ``plans`` has a row, from top to bottom. ``recorded`` and ``here`` are rows of
    `ratios` for one network, link and number of workers, in which ``other`` is the plan. A plan
    that one of these tables lacks has no marker of that table.
    """
    row_of = {plan: row for row, plan in enumerate(plans)}
    # At the reference line, a plan is as fast as the best one.
    case_rows(ax, [look(plan).label for plan in plans], reference=1.0)
    # Panels of one column share an axis, whose numbers only the lowest panel would have.
    # Every panel gets them, because the lowest one may be hidden.
    ax.tick_params(labelbottom=True)
    for style, ratios in ((RECORDED, recorded), (MEASURED_HERE, here)):
        # Random plans, and plans that were only recorded, have no row.
        drawn = ratios[ratios["other"].isin(plans)]
        plots.points(ax, drawn["ratio"], drawn["other"].map(row_of), style, size=5)
