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
Group = dict[str, Timeline]
"""Timelines of ROLES, named by where, role and configuration."""


def timelines(tables: Tables) -> list[Group]:
    """Return timelines of ROLES: simulated, and of each link as measured."""
    return [simulated(), *measured(tables)]


def simulated() -> Group:
    """Return timelines of the paper's GPUs, by the model."""
    fitted = model.fitted("both")
    return {
        f"V100S, {role}: {name}": fitted.iteration(*RESNET, name).timeline()
        for role, name in zip(ROLES, (DEFAULT, "1x256", "1x64"), strict=True)
    }


def measured(tables: Tables) -> list[Group]:
    """Return timelines of each link; the best configuration is that of the odd rounds."""
    groups = []
    for link, rows in by_link(tables, "iterations") if "spans" in tables else ():
        gains = one_group(resnet_gains(rows[rows["repeat"] % 2 == 1]))
        if link.startswith("emulated") or gains.empty:
            continue
        best = gains.loc[gains["gain"].idxmax(), "configuration"]
        ways = default_of(gains), best, min(gains["configuration"], key=least_first)
        first = of_cell(tables["spans"], gains.iloc[0])  # of several sessions
        first = first.drop_duplicates(["configuration", "task", "rank"])
        spans = {
            name: Timeline.from_columns(each)
            for name, each in first.groupby("configuration")
        }
        if {*ways} <= spans.keys():
            pairs = zip(ROLES, ways, strict=True)
            groups.append({f"{link}, {role}: {way}": spans[way] for role, way in pairs})
    return groups


def printed() -> pd.DataFrame:
    """Return what the text gives of figure 5c as rows of a timeline.

    Messages begin so late that they overlap with compute as long as is printed.
    """
    words = ("computation", "communication", "overlap")
    compute_s, sent_s, both_s = (
        prose("sharing")[f"fig05c-{word}"] / 1e3 for word in words
    )
    begin_s = compute_s - both_s
    ends = [(0.0, compute_s), (begin_s, begin_s + sent_s), (begin_s, compute_s)]
    rows = pd.DataFrame(ends, index=words, columns=["start_s", "end_s"])
    same = {"rank": 0, "iteration": 0, "group": -1, "origin": "printed", "bytes": 0}
    rows = rows.assign(task=words, kind=words, stream=words, **same, case="paper: 1x64")
    return rows.assign(printed_s=rows["end_s"] - rows["start_s"])


def numbers(tables: Tables) -> pd.DataFrame:
    """Return what the figure's CSV holds: all timelines, and what the text prints."""
    each = [
        line.to_frame().assign(case=name)
        for group in timelines(tables)
        for name, line in group.items()
    ]
    return pd.concat([*each, printed()])


def draw(tables: Tables) -> Figure:
    """Draw the paper's timelines, and those of the last link."""
    first, *others = timelines(tables)
    groups = [first, *others[-1:]]
    figure, axes = plots.canvas(rows=3 * len(groups), height=3.2 * len(groups))
    for place, group in enumerate(groups):
        plots.gantt(axes[3 * place : 3 * place + 3], _named(group))
    starved, ends_ms = axes[2], 1e3 * printed()[["start_s", "end_s"]].to_numpy()[:2]
    plots.points(
        starved, ends_ms.ravel(), [0, 0, 1, 1], "paper", label="paper's text", size=5
    )
    starved.legend(loc="upper left", bbox_to_anchor=(1, 1), fontsize=8, frameon=False)
    said = (
        "By the model, compute ends earliest and the iteration latest if messages have "
        "the fewest resources"
    )
    plots.title(figure, said)
    return figure


def _named(group: Mapping[str, Timeline]) -> Group:
    """Return a group with names for readers."""
    words = [re.split(r", (?=default|best|starved)|: ", name) for name in group]
    names = [
        f"{readable(where)}, {role}: {readable(way)}" for where, role, way in words
    ]
    return dict(zip(names, group.values(), strict=True))


# -- claims --------------------------------------------------------------------------------------

for _part in ("computation", "communication", "overlap"):
    check(f"sharing-fig05c-{_part}", "fig05c", *RESNET, _part, "1x64")(
        implied.time_left
    )
