"""sharing Fig 3: the time of kernels during messages, over their time alone."""

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
    """Return the printed numbers, with blanks in the names of the kernels."""
    return figure_rows("fig03").replace("_", " ", regex=True)


def panels(tables: Tables) -> pd.DataFrame:
    """Return `shown.cells` as they are drawn, all of the paper's kernels in a panel."""
    paper = shown.cells("paper", _printed(), "slowdown", "kernel")
    return pd.concat([paper, *measured(tables)], ignore_index=True)


def _with_ratio(kernels: pd.DataFrame) -> pd.DataFrame:
    """Return rows of kernels with ``ratio``, their time during messages divided by that alone."""
    ratio = kernels["kernel_beside_s"] / kernels["kernel_alone_s"]
    return kernels.assign(ratio=ratio)


def measured(tables: Tables) -> list[pd.DataFrame]:
    """Return `shown.cells` of each link, with a kernel in each row."""
    maps = []
    for link, rows in by_link(tables, "kernels"):
        # `summed` returns the median ratio over the rounds, with its 95% interval.
        keys = ["kernel", "configuration"]
        median_ratios = summed(_with_ratio(rows), keys, "ratio").sort_values("kernel")
        maps.append(shown.cells(link, median_ratios, "ratio", "kernel"))
    return maps


def numbers(tables: Tables) -> pd.DataFrame:
    """Return what the figure's CSV holds: a panel for each of the paper's kernels and each link.

    The panel of one of the paper's kernels has a row for each number of blocks, and a column
    for each number of threads. The panel of a link on which kernels were measured is that of
    `measured`, with a row for each kernel.

    Parameters
    ----------
    tables : Tables
        What a machine measured, as `recordings.recorded` returns it.
    """
    paper = [
        shown.cells(str(kernel), rows, "slowdown")
        for kernel, rows in _printed().groupby("kernel", sort=False)
    ]
    return shown.as_saved(pd.concat([*paper, *measured(tables)], ignore_index=True))


def draw(tables: Tables) -> Figure:
    """Draw a heat map of the paper's ratios, and one of those on each link.

    The title has the largest ratio of the paper, and the largest that was measured, if any
    was.

    Parameters
    ----------
    tables : Tables
        What a machine measured, as `recordings.recorded` returns it.
    """
    slowdowns_drawn = panels(tables)
    figure = plots.heat_maps(
        shown.maps(slowdowns_drawn),
        label="time relative to the time alone",
        columns=1,
        height=1.5,
        log=True,
    )
    paper, *ours = shown.largest(slowdowns_drawn)
    message = (
        f"During an all-reduce the paper's kernels take up to {paper:.1f} times as long"
    )
    # ``ours`` is empty without a recording, else it has the largest ratio of all links.
    for ratio in ours:
        message += f", and ours up to {ratio:.1f} times as long"
    plots.title(figure, message)
    return figure


# -- claims --------------------------------------------------------------------------


def slowdowns(blocks: int, threads: int) -> pd.Series:
    """Return the printed slowdown of each kernel during an all-reduce.

    Parameters
    ----------
    blocks, threads : int
        The blocks of the all-reduce, and the threads of each block.

    Returns
    -------
    Series
        By kernel, its time during the all-reduce divided by its time alone: 1.1 is a tenth
        longer.
    """
    rows = paper_table("sharing", "fig03").set_index("kernel")
    return rows.query("blocks == @blocks and threads == @threads")["slowdown"]


@check("sharing-slower-kernels")
def _slower_kernels() -> Result:
    """Return the slowdowns that figure 3 prints for the default configuration, 2x256.

    The note adds the slowdowns of kernels on processor cores, which were measured here.
    """
    ranges = []
    for recording, ratios in _recorded_slowdowns().items():
        ends = f"{ratios.min():.2f} to {ratios.max():.2f}"
        ranges.append(f"{ends} ({recording}; n = {len(ratios)})")
    note = (
        f"Fig 3, by 1x64 up to {slowdowns(1, 64).max():.2f}; "
        f"processor cores beside a real all-reduce: {', '.join(ranges)}"
    )
    return own(slowdowns(blocks=2, threads=256), note)


def _recorded_slowdowns() -> dict[str, pd.Series]:
    """Return the slowdowns of kernels on processors during an all-reduce of gloo.

    Returns
    -------
    dict of str to Series
        By the name of the recording, the slowdown of each kernel in each measured case: 1.1
        is a tenth longer.
    """
    by_recording = {}
    # First the recordings of kernels beside different kinds of communication, of which only
    # gloo's counts. `compare.slowdowns` returns medians.
    for machine, recording in source.recordings("contention").items():
        rows = compare.slowdowns(recording.table("contention"))
        by_gloo = rows.query("communication == 'gloo'")
        # A single GPU has a stand-in beside its kernels, and no all-reduce.
        if len(by_gloo):
            by_recording[machine] = by_gloo["slowdown"]
    # Then the recordings of kernels under a grid of gloo's configurations.
    for directory in sorted(places.RECORDED.glob("*/sharing*")):
        grid = source.Source((directory,))
        if grid.has("sharing_kernels"):
            kernels = _with_ratio(grid.table("sharing_kernels"))
            cells = kernels.groupby(["kernel", "link", "configuration"])
            name = f"{directory.parent.name}, {directory.name}"
            # A case is measured in several rounds.
            by_recording[name] = cells["ratio"].median()
    return by_recording


@check("sharing-fig03-default-min", 0)
@check("sharing-fig03-default-max", -1)
def _kernel_extreme(position: int) -> Result:
    """Return the slowdown of one kernel under the default, within its rounding.

    ``position`` is that of the kernel in ascending order of slowdown: 0 for the least
    slowdown, and -1 for the largest.
    """
    # The default configuration has 2 blocks of 256 threads.
    ascending = slowdowns(blocks=2, threads=256).sort_values()
    note = f"from the cells of Fig 3: {ascending.index[position]}"
    # ROUNDING has the least and the largest error, so that the sum has the ends of an interval.
    return own([ascending.iloc[position] + ROUNDING], note)


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
    """Return by how much the most slowed of some kernels is slowed under 1x64, in per cent.

    The paper states a bound on this number. The result has the least and the largest that the
    rounding of figure 3 allows. ``kernels`` are names in figure 3.
    """
    # A ratio of 1.1 is a slowdown by 10%.
    ratios = slowdowns(blocks=1, threads=64)[list(kernels)]
    largest = ratios.max()
    # ROUNDING has the least and the largest error, so that the sum has the ends of an interval.
    # Every ratio in this interval rounds to the printed one.
    ends_percent = 100 * (largest + ROUNDING - 1)
    ends_listed = " to ".join(f"{percent:.1f}%" for percent in ends_percent)
    names = " and ".join(ratios.index[ratios == largest])
    note = (
        f"the largest, {names}, prints {largest:.2f}, as all from {ends_listed} would"
    )
    return own([ends_percent], note)
