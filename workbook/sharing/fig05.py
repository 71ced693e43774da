"""sharing Fig 5: timelines of ResNet-18 under the default, the best, and few resources."""

from __future__ import annotations

import re
from collections.abc import Mapping

import pandas as pd
from matplotlib.figure import Figure

from ddlkit.core.timeline import Timeline
from workbook import plots
from workbook.common.claims import check, prose
from workbook.sharing import implied, model
from workbook.sharing.printed import DEFAULT, RESNET
from workbook.sharing.recordings import (
    Tables,
    by_link,
    default_of,
    least_first,
    of_cell,
    one_group,
    resnet_gains,
)
from workbook.sharing.shown import readable

ROLES = ("default", "best", "starved")
"""The default configuration, the best, and the one with the fewest resources."""
Group = dict[str, Timeline]
"""The timelines of ROLES, each named by the machine or link, role and configuration."""


def timelines(tables: Tables) -> list[Group]:
    """Return the simulated timelines, and those measured on each link.

    Parameters
    ----------
    tables : Tables
        What a machine measured, as `recordings.recorded` returns it.
    """
    return [simulated(), *measured(tables)]


def simulated() -> Group:
    """Return the timelines of the paper's GPUs by the model, one for each of ROLES."""
    # In the model "both", compute and messages slow each other down.
    fitted = model.fitted("both")
    network, batch = RESNET
    group = {}
    # By figure 4, 1x256 is the best configuration. 1x64 has the fewest resources.
    for role, name in zip(ROLES, (DEFAULT, "1x256", "1x64"), strict=True):
        iteration = fitted.iteration(network, batch, name)
        group[f"V100S, {role}: {name}"] = iteration.timeline()
    return group


def measured(tables: Tables) -> list[Group]:
    """Return the timelines of each link on which all ROLES were recorded.

    The best configuration is the one with the largest gain in the odd rounds, as in figures
    6 and 7, which then show its even rounds. Emulated links are left out by choice.

    Parameters
    ----------
    tables : Tables
        What a machine measured, as `recordings.recorded` returns it.
    """
    if "spans" not in tables:
        return []
    groups = []
    # Iterations choose the configurations, and spans have their timelines.
    for link, rows in by_link(tables, "iterations"):
        odd_rounds = rows[rows["repeat"] % 2 == 1]
        # As in the paper, all messages of an iteration have the same resources. Configurations
        # with other resources for the last message are left out.
        gains = one_group(resnet_gains(odd_rounds))
        if link.startswith("emulated") or gains.empty:
            continue
        configurations = _configuration_of_role(gains)
        # All gains are of one network, batch, plan and link, so that any row says which spans
        # belong to them.
        spans = of_cell(tables["spans"], gains.iloc[0])
        # Each configuration has the timeline of the first session in which it was recorded.
        by_configuration = _first_timelines(spans)
        # The link is left out unless spans were kept of the configurations of all roles.
        if set(configurations.values()) <= by_configuration.keys():
            group = {
                f"{link}, {role}: {name}": by_configuration[name]
                for role, name in configurations.items()
            }
            groups.append(group)
    return groups


def _configuration_of_role(gains: pd.DataFrame) -> dict[str, str]:
    """Return the configuration of each of ROLES, in their order.

    ``gains`` has a row for each configuration, with its ``gain`` over the default.
    """
    return {
        "default": default_of(gains),
        "best": gains.loc[gains["gain"].idxmax(), "configuration"],
        # The one with the fewest resources.
        "starved": min(gains["configuration"], key=least_first),
    }


def _first_timelines(spans: pd.DataFrame) -> dict[str, Timeline]:
    """Return the timeline of each configuration in the first session that has it.

    ``spans`` has a row for each task of a timeline, of one network, batch, plan and link.
    """
    # A timeline has each task of a rank once. If it comes again, it is of a later session.
    first = spans.drop_duplicates(["configuration", "task", "rank"])
    return {
        name: Timeline.from_columns(rows)
        for name, rows in first.groupby("configuration")
    }


def printed() -> pd.DataFrame:
    """Return what the text says of figure 5c, as rows of a timeline.

    The text prints the times of computation, communication and their overlap at 1x64, but
    not when communication begins. The rows let it begin so late that the overlap is as
    printed.

    Returns
    -------
    DataFrame
        A row for each of "computation", "communication" and "overlap", with the columns of
        `Timeline.to_frame`, the name ``case``, and ``printed_s``, the printed time.
    """
    # The text prints milliseconds.
    stated = prose("sharing")
    computation_s = stated["fig05c-computation"] / 1e3
    communication_s = stated["fig05c-communication"] / 1e3
    overlap_s = stated["fig05c-overlap"] / 1e3
    begin_s = computation_s - overlap_s
    spans = {
        "computation": (0.0, computation_s),
        "communication": (begin_s, begin_s + communication_s),
        "overlap": (begin_s, computation_s),
    }
    rows = pd.DataFrame.from_dict(spans, orient="index", columns=["start_s", "end_s"])
    # The table of a timeline needs the other columns, too. A group of -1 is no bucket.
    rows = rows.assign(
        task=rows.index,
        kind=rows.index,
        stream=rows.index,
        rank=0,
        iteration=0,
        group=-1,
        origin="printed",
        bytes=0,
        case="paper: 1x64",
    )
    return rows.assign(printed_s=rows["end_s"] - rows["start_s"])


def numbers(tables: Tables) -> pd.DataFrame:
    """Return what the figure's CSV holds: all timelines, and what the text prints.

    Parameters
    ----------
    tables : Tables
        What a machine measured, as `recordings.recorded` returns it.
    """
    frames = []
    # A group has the three timelines of the model or of one link.
    for group in timelines(tables):
        for name, timeline in group.items():
            frames.append(timeline.to_frame().assign(case=name))
    return pd.concat([*frames, printed()])


def draw(tables: Tables) -> Figure:
    """Draw the simulated timelines of the paper's GPUs, and those of the last link by name.

    Points mark when computation and communication begin and end by the paper's text.

    Parameters
    ----------
    tables : Tables
        What a machine measured, as `recordings.recorded` returns it.
    """
    simulation, *measurements = timelines(tables)
    # If there are several links, the figure shows a single one by choice, the last. They are in the
    # order of their names, so that "lab:4gbit" is shown rather than "lab:1gbit".
    groups = [simulation, *measurements[-1:]]
    n_roles = len(ROLES)
    figure, axes = plots.canvas(rows=n_roles * len(groups), height=3.2 * len(groups))
    for number, group in enumerate(groups):
        # A group has three axes, one for each of ROLES.
        first = n_roles * number
        plots.gantt(axes[first : first + n_roles], _for_readers(group))

    # The text prints times of the configuration with the fewest resources. The first group,
    # the simulated one, has its axes first.
    starved = axes[ROLES.index("starved")]
    ends_s = printed().loc[["computation", "communication"], ["start_s", "end_s"]]
    ends_ms = 1e3 * ends_s.to_numpy()
    # The axes have a row 0 for computation, and a row 1 for communication. Each has two points,
    # its start and its end.
    heights = [0, 0, 1, 1]
    plots.points(
        starved, ends_ms.ravel(), heights, "paper", label="paper's text", size=5
    )
    starved.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8, frameon=False)
    plots.title(
        figure,
        "By the model, compute ends earliest and the iteration latest if messages have "
        "the fewest resources",
    )
    return figure


def _for_readers(group: Mapping[str, Timeline]) -> Group:
    """Return a group with the names that readers know."""
    renamed = {}
    for name, timeline in group.items():
        # A name is "<where>, <role>: <configuration>". There may be more commas in <where>, so
        # that the name is cut at the comma before a role, and at the colon.
        where, role, configuration = re.split(r", (?=default|best|starved)|: ", name)
        title = f"{readable(where)}, {role}: {readable(configuration)}"
        renamed[title] = timeline
    return renamed


# -- claims --------------------------------------------------------------------------

for _time in ("computation", "communication", "overlap"):
    check(f"sharing-fig05c-{_time}", "fig05c", *RESNET, _time, "1x64")(
        implied.possible_times
    )
