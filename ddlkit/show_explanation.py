"""The drawing of an explanation: ranks with their waits, removals, and the replay."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ddlkit.core.errors import UserError
from ddlkit.model.explanation import Explanation
from ddlkit.show import (
    BAR_HEIGHT,
    SOFT,
    THEME,
    WIDTH,
    WRITING_A_PAGE,
    look,
    needs,
    png,
    time_unit,
    write_page,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_RANKS = 16
"""How many ranks are drawn at most: the first ones, and the one for which the others wait."""
WAIT_HATCH = "////"
CULPRIT = "#c14d00"
"""The colour of the frame around what the other ranks wait for."""


def explanation_figure(explanation: Explanation) -> Figure:
    """Return the drawing of an explanation.

    Parameters
    ----------
    explanation : Explanation
        The explanation, of the traces of all ranks.

    Returns
    -------
    Figure
        Three panels from top to bottom. The first has the ranks in a typical iteration. The
        second has the length of the iteration, as measured and after causes such as the
        delays of ranks, start-up latency and limited bandwidth were removed one by one. The
        third has the iterations as measured and as replayed.

    Notes
    -----
    This function changes the global setting "hatch.color" of matplotlib, which would also
    hold for figures that are drawn later. A caller restores it by ``mpl.rc_context``, as
    `write_explanation` does.
    """
    import matplotlib as mpl
    import matplotlib.pyplot as plt

    # Hatches of the theme are white, so that they are seen on bars with a colour. The bars of
    # waits are white, so their hatches are grey. The setting still has to hold when the figure
    # is saved, so it is not restored here.
    mpl.rcParams["hatch.color"] = SOFT
    ranks = _drawn_ranks(explanation)
    # The panel of the ranks, and with it the figure, is higher the more ranks are drawn.
    figure, axes = plt.subplots(
        3,
        1,
        figsize=(WIDTH, 3.6 + 0.3 * len(ranks)),
        height_ratios=[1 + 0.35 * len(ranks), 1.6, 1.6],
        layout="constrained",
    )
    _draw_ranks(axes[0], explanation, ranks)
    _draw_waterfall(axes[1], explanation)
    _draw_replay(axes[2], explanation)
    return figure


def _drawn_ranks(explanation: Explanation) -> list[int]:
    """Return the ranks to draw: the first ones, and the one for which the others wait."""
    ranks = list(range(min(explanation.ranks, MOST_RANKS)))
    # The straggler is the rank for which the others wait, if there is one. If it is not among
    # the first ranks, it takes the place of the last of them.
    if explanation.straggler is not None and explanation.straggler["rank"] not in ranks:
        ranks[-1] = explanation.straggler["rank"]
    return ranks


def _title_of_ranks(explanation: Explanation) -> str:
    """Return a title that says for which rank and phase the other ranks wait, if for any."""
    straggler = explanation.straggler
    if straggler is not None:
        return (
            f"The other ranks wait for {straggler['phase']} of rank {straggler['rank']}"
        )
    # `why_no_straggler` is set if a rank is late, but not clearly or not often enough to be
    # called a straggler. The title at the end of this function would be wrong then.
    if explanation.why_no_straggler:
        return "No rank is a straggler"
    return "No one rank is much slower than the others"


def _draw_ranks(ax: Axes, explanation: Explanation, ranks: Sequence[int]) -> None:
    """Draw what each of some ranks does in a typical iteration, a row for each.

    The phase for which the other ranks wait gets a frame.
    """
    timeline = explanation.timeline
    # `write_explanation` has refused an explanation without a timeline.
    assert timeline is not None
    table = timeline.to_frame()
    scale, unit = time_unit(timeline.duration_s)
    # The rank and the phase for which the other ranks wait, if there is one.
    straggler = explanation.straggler
    # The kinds that have an entry in the legend already. Each kind gets only one.
    in_legend: set[str] = set()
    for row, rank in enumerate(ranks):
        # Waits are spans of this stream, too.
        of_rank = table[(table["rank"] == rank) & (table["stream"] == "compute")]
        for kind, spans in of_rank.groupby("kind", sort=False):
            _draw_bars(
                ax, str(kind), spans, row, scale, has_label=kind not in in_legend
            )
            in_legend.add(str(kind))
        if straggler is not None and straggler["rank"] == rank:
            _outline(ax, of_rank, str(straggler["phase"]), row, scale)
    ax.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    # The axis points down, so that the first rank is on top.
    ax.set_ylim(len(ranks) - 0.5, -0.5)
    ax.tick_params(axis="y", length=0)
    ax.set_xlabel(f"time [{unit}]")
    ax.set_title(_title_of_ranks(explanation))
    ax.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), frameon=False)


def _draw_bars(
    ax: Axes, kind: str, spans: pd.DataFrame, row: int, scale: float, *, has_label: bool
) -> None:
    """Draw the spans of one kind as bars in a row.

    ``scale`` is the number of units of the axis in a second. ``has_label`` says whether
    the bars give the legend an entry. Bars of waits are hatched and have no colour.
    """
    style = look(kind)
    is_wait = kind == "wait"
    starts = spans["start_s"] * scale
    widths = (spans["end_s"] - spans["start_s"]) * scale
    ax.broken_barh(
        list(zip(starts, widths, strict=True)),
        (row - BAR_HEIGHT / 2, BAR_HEIGHT),
        facecolor="white" if is_wait else style.color,
        hatch=WAIT_HATCH if is_wait else "",
        edgecolor=SOFT if is_wait else "white",
        linewidth=0.4,
        label=style.label if has_label else None,
    )


def _spans_before_first_wait(of_rank: pd.DataFrame, phase: str) -> pd.DataFrame:
    """Return the spans of a phase that begin before a rank first waits.

    ``of_rank`` has all spans of the rank. Work after the first wait, such as the copying of
    buckets, can have the same kind as the phase, but is not what the other ranks wait for.
    """
    # A timeline calls the reading of input "io".
    kind = "io" if phase == "input" else phase
    spans = of_rank[of_rank["kind"] == kind]
    waits = of_rank[of_rank["kind"] == "wait"]
    if waits.empty:
        return spans
    return spans[spans["start_s"] < waits["start_s"].min()]


def _outline(
    ax: Axes, of_rank: pd.DataFrame, phase: str, row: int, scale: float
) -> None:
    """Draw a frame around the part of a rank's phase for which the other ranks wait.

    This part ends where the rank itself first waits. Later spans of the kind of the phase,
    such as copies of buckets, keep no other rank waiting. ``of_rank`` has the spans of the
    rank, ``row`` is where they are drawn, and ``scale`` is the number of units of the axis
    in a second. A phase without spans before the first wait gets no frame.
    """
    from matplotlib.patches import Rectangle

    spans = _spans_before_first_wait(of_rank, phase)
    if spans.empty:
        return
    start = spans["start_s"].min() * scale
    width = spans["end_s"].max() * scale - start
    frame = Rectangle(
        (start, row - BAR_HEIGHT / 2),
        width,
        BAR_HEIGHT,
        fill=False,
        edgecolor=CULPRIT,
        linewidth=2.2,
        zorder=5,
    )
    ax.add_patch(frame)


def _draw_waterfall(ax: Axes, explanation: Explanation) -> None:
    """Draw the length of the iteration as causes of this length are removed one by one.

    The first bar is the measured iteration, and each other bar is the iteration after one
    more removal. The hatched part at the right end is what the removal gained.
    """
    scale, unit = time_unit(explanation.iteration_s)
    # The first entry is the measured iteration, without any removal.
    names = ["measured"]
    names += [f"without {name}" for name, _ in explanation.waterfall[1:]]
    lengths = np.array([seconds for _, seconds in explanation.waterfall]) * scale
    rows = np.arange(len(names))
    ax.barh(rows, lengths, color=look("backward").color, height=BAR_HEIGHT)
    # Each row is compared with the row above. The first row, the measured iteration, is
    # compared with itself, so that it gains nothing.
    previous_lengths = np.concatenate([lengths[:1], lengths[:-1]])
    ax.barh(
        rows,
        previous_lengths - lengths,
        left=lengths,
        facecolor="white",
        edgecolor=SOFT,
        hatch=WAIT_HATCH,
        height=BAR_HEIGHT,
        linewidth=0.4,
    )
    for row, length in enumerate(lengths.tolist()):
        middle = length / 2
        ax.text(middle, row, f"{length:.3g}", ha="center", va="center", color="white")
    ax.set_yticks(rows, names)
    # The measured iteration is on top.
    ax.invert_yaxis()
    # A little room keeps the end of the longest bar in sight.
    ax.set_xlim(0, lengths[0] * 1.005)
    ax.set_xlabel(f"iteration [{unit}]")
    ax.set_title(
        "Removed one after the other: what each removal still gains is hatched"
    )


def _draw_replay(ax: Axes, explanation: Explanation) -> None:
    """Draw how long the judged iterations took, as measured and as replayed.

    The judged iterations are those that the explanation is about. The replay computes an
    iteration from the work and the messages of all ranks.
    """
    scale, unit = time_unit(explanation.iteration_s)
    # A row of measured times and one of replayed times, both with an entry per iteration.
    measured, replayed = explanation.each_s * scale
    numbers = np.arange(len(measured))
    ax.plot(numbers, measured, "o", color=SOFT, label="measured")
    ax.plot(
        numbers,
        replayed,
        "x",
        color=look("backward").color,
        markersize=7,
        label="replayed",
    )
    ax.set_ylim(0, max(measured.max(), replayed.max()) * 1.1)
    ax.set_xlabel("judged iteration")
    ax.set_ylabel(f"time [{unit}]")
    error = np.median(np.abs(replayed / measured - 1))
    ax.set_title(f"The replay misses an iteration by {error:.1%} (median)")
    ax.legend(loc="lower right", frameon=False)


def write_explanation(
    explanation: Explanation, lines: Sequence[str], path: Path
) -> None:
    """Write an explanation as a page that needs no network.

    Parameters
    ----------
    explanation : Explanation
        The explanation, of the traces of all ranks.
    lines : sequence of str
        The title, and the lines that a person reads.
    path : Path
        The HTML file to write.

    Raises
    ------
    UserError
        If matplotlib or Jinja2 is not installed, if the file cannot be written, or if
        the explanation is of the trace of one rank.
    """
    needs("the page of an explanation", WRITING_A_PAGE)
    # An explanation of the trace of one rank has no timeline of all ranks.
    if explanation.timeline is None:
        raise UserError("--html draws all ranks: give the traces of all ranks")
    import matplotlib as mpl

    # The block also restores the setting that `explanation_figure` changes.
    with mpl.rc_context(fname=THEME):
        image = png(explanation_figure(explanation))
    write_page(
        lines,
        path,
        image,
        heading="A typical iteration",
        alt="the ranks of a typical iteration, removals one by one, and the replay",
    )
