"""sharing Fig 3: the time of kernels beside messages, over that alone."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from workbook import plots
from workbook.common import places, source
from workbook.common.claims import Result, check, own, paper_table
from workbook.sharing import shown
from workbook.sharing.printed import ROUNDING, figure_rows
from workbook.sharing.recordings import Tables, by_link, summed
from workbook.validate import compare


def _printed() -> pd.DataFrame:
    return figure_rows("fig03").replace("_", " ", regex=True)


def panels(tables: Tables) -> pd.DataFrame:
    """Return `shown.cells` as they are drawn: the paper's kernels share a panel."""
    paper = shown.cells("paper", _printed(), "slowdown", "kernel")
    return pd.concat([paper, *measured(tables)], ignore_index=True)


def measured(tables: Tables) -> list[pd.DataFrame]:
    """Return `shown.cells` of each link, a row a kernel."""
    maps = []
    for link, rows in by_link(tables, "kernels"):
        rows = rows.assign(ratio=rows["kernel_beside_s"] / rows["kernel_alone_s"])
        ratios = summed(rows, ["kernel", "configuration"], "ratio")
        maps.append(shown.cells(link, ratios.sort_values("kernel"), "ratio", "kernel"))
    return maps


def numbers(tables: Tables) -> pd.DataFrame:
    """Return what the figure's CSV holds: each of the paper's kernels is a panel."""
    paper = [
        shown.cells(str(kernel), rows, "slowdown")
        for kernel, rows in _printed().groupby("kernel", sort=False)
    ]
    return shown.as_saved(pd.concat([*paper, *measured(tables)], ignore_index=True))


def draw(tables: Tables) -> Figure:
    """Draw a heat map of the paper, and one of each link."""
    slower = panels(tables)
    figure = plots.heat_maps(
        shown.maps(slower),
        label="time relative to the time alone",
        columns=1,
        height=1.5,
        log=True,
    )
    paper, *ours = shown.largest(slower)
    said = (
        f"During an all-reduce the paper's kernels take up to {paper:.1f} times as long"
    )
    said += "".join(f", and ours up to {ratio:.1f} times as long" for ratio in ours)
    plots.title(figure, said)
    return figure


# -- claims --------------------------------------------------------------------------------------


def slowdowns(blocks: int, threads: int) -> pd.Series:
    """Return each kernel's slowdown beside an all-reduce of a configuration, as printed."""
    rows = paper_table("sharing", "fig03").set_index("kernel")
    return rows.query("blocks == @blocks and threads == @threads")["slowdown"]


@check("sharing-slower-kernels")
def _slower_kernels() -> Result:
    beside = {}
    for machine, each in source.recordings("contention").items():
        rows = compare.slowdowns(each.table("contention")).query(
            "communication == 'gloo'"
        )
        beside[machine] = rows["slowdown"]
    for place in sorted(places.RECORDED.glob("*/sharing*")):
        if (grid := source.Source((place,))).has("sharing_kernels"):
            rows = grid.table("sharing_kernels").eval(
                "ratio = kernel_beside_s / kernel_alone_s"
            )
            medians = rows.groupby(["kernel", "link", "configuration"])[
                "ratio"
            ].median()
            beside[f"{place.parent.name}, {place.name}"] = medians
    ends = ", ".join(
        f"{x.min():.2f} to {x.max():.2f} ({at}; n = {len(x)})"
        for at, x in beside.items()
    )
    note = (
        f"Fig 3, by 1x64 up to {slowdowns(1, 64).max():.2f}; "
        f"processor cores beside a real all-reduce: {ends}"
    )
    return own(slowdowns(2, 256), note)


@check("sharing-fig03-default-min", 0)
@check("sharing-fig03-default-max", -1)
def _kernel_extreme(place: int) -> Result:
    grid = slowdowns(2, 256).sort_values()
    note = f"from the cells of Fig 3: {grid.index[place]}"
    return own([grid.iloc[place] + ROUNDING], note)


@check(
    "sharing-fig03-least",
    "convolution",
    "average_pooling",
    "linear",
    "relu",
    "batch_norm",
)
@check("sharing-fig03-three", "average_pooling", "linear", "relu")
def _kernel_bound(*kernels: str) -> Result:
    grid = slowdowns(1, 64)[list(kernels)]
    ends = " to ".join(f"{end:.1%}" for end in grid.max() + ROUNDING - 1)
    largest = " and ".join(grid.index[grid == grid.max()])
    note = f"the largest, {largest}, prints {grid.max():.2f}, as all from {ends} would"
    return own([100 * (grid.max() + ROUNDING - 1)], note)
