"""The figure wb-ring: which piece each rank of a ring passes on in each step of an all-reduce."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from ddlkit.core.collective import COLLECTIVES
from workbook import plots
from workbook.plots.style import FAINT, INK, look

SIDE = 0.84
"""The side of the square of one piece on one rank, where ranks are 1 apart."""


def passes(ranks: int) -> pd.DataFrame:
    """Return which piece each rank passes on in each step of a ring all-reduce.

    Parameters
    ----------
    ranks : int
        The number of ranks, at least 2. Each of them cuts its vector into as many
        pieces.

    Returns
    -------
    DataFrame
        One row for each step and sending rank; steps, ranks and pieces count from 0.
        The columns are ``step``, ``rank``, ``to`` (the right neighbour), ``piece``,
        ``summed`` (of how many ranks the piece is the sum) and ``adds`` (whether the
        neighbour adds the piece to its own instead of replacing its own).

    Examples
    --------
    >>> passes(2).query("rank == 0")
       step  rank  to  piece  summed   adds
    0     0     0   1      0       1   True
    2     1     0   1      1       2  False
    """
    rows = []
    summed = np.ones((ranks, ranks), dtype=int)
    for step in range(COLLECTIVES["all_reduce"].steps(ranks)):
        before = summed.copy()
        # In the first round of ranks - 1 steps pieces are added, in the second they are replaced.
        adds = step < ranks - 1
        for rank in range(ranks):
            to = (rank + 1) % ranks
            piece = (rank - step) % ranks
            # All ranks send at the same time, so that each sends what it had before the step.
            passed = int(before[rank, piece])
            summed[to, piece] = passed
            if adds:
                summed[to, piece] += before[to, piece]
            rows.append(
                {
                    "step": step,
                    "rank": rank,
                    "to": to,
                    "piece": piece,
                    "summed": passed,
                    "adds": adds,
                }
            )
    return pd.DataFrame(rows)


def _summed_before(passed: pd.DataFrame, ranks: int) -> list[NDArray[np.int_]]:
    """Return of how many ranks each piece is the sum, before each step and at the end.

    Parameters
    ----------
    passed : DataFrame
        The rows of `passes`.
    ranks : int
        The number of ranks.

    Returns
    -------
    list of ndarray, shape (ranks, pieces)
        One array more than there are steps.
    """
    state = np.ones((ranks, ranks), dtype=int)
    states = [state]
    for _, rows in passed.groupby("step"):
        state = state.copy()
        for row in rows.itertuples():
            if row.adds:
                state[row.to, row.piece] += row.summed
            else:
                state[row.to, row.piece] = row.summed
        states.append(state)
    return states


def draw(ranks: int = 4) -> Figure:
    """Draw a ring all-reduce.

    There is a panel for the start of each step, and one for the end of each round.

    Parameters
    ----------
    ranks : int
        The number of ranks.

    Returns
    -------
    Figure
        The top row is the round in which pieces are added, the bottom row the round in
        which finished pieces are passed on. A column of a panel is a rank, a row a
        piece, and the number in a square says of how many ranks the piece is the sum.
        An arrow is a piece that is passed on.
    """
    passed = passes(ranks)
    states = _summed_before(passed, ranks)
    steps = ranks - 1
    figure, axes = plots.canvas(columns=ranks, rows=2, height=4.4, squeeze=False)
    for row, first in enumerate((0, steps)):
        for column in range(steps):
            step = first + column
            _draw_pieces(axes[row, column], states[step])
            _draw_arrows(axes[row, column], passed[passed["step"] == step], ranks)
            action = "add" if row == 0 else "replace"
            plots.heading(axes[row, column], f"Step {step}: {action}")
        _draw_pieces(axes[row, steps], states[first + steps])
        plots.heading(axes[row, steps], f"After {first + steps} steps")
    for ax in axes[:, 0]:
        ax.set_yticks(range(ranks), [f"piece {piece}" for piece in range(ranks)])
    for ax in axes[1]:
        ax.set_xlabel("rank")
    factor = COLLECTIVES["all_reduce"].bus_factor(ranks)
    plots.title(
        figure,
        f"In {2 * steps} steps each rank passes on {2 * steps} pieces: {factor:g} times its vector",
    )
    return figure


def _draw_pieces(ax: Axes, summed: NDArray[np.int_]) -> None:
    """Draw a square for each piece on each rank, in colour if it is finished.

    ``summed`` has the number of ranks of which the piece (column) on a rank (row) is the sum. A
    piece is finished if it is the sum of all ranks.
    """
    ranks = len(summed)
    finished = look("model").color
    for rank in range(ranks):
        for piece in range(ranks):
            number = int(summed[rank, piece])
            done = number == ranks
            corner = (rank - SIDE / 2, piece - SIDE / 2)
            square = Rectangle(corner, SIDE, SIDE, linewidth=0)
            square.set(color=finished if done else FAINT)
            ax.add_patch(square)
            text = ax.text(rank, piece, str(number), ha="center", va="center")
            text.set(color="white" if done else INK, fontsize=8)
    ax.set_xlim(-0.8, ranks - 0.2)
    # The axis runs downwards, with piece 0 on top.
    ax.set_ylim(ranks - 0.45, -0.55)
    ax.set_xticks(range(ranks), [str(rank) for rank in range(ranks)])
    ax.set_yticks([])
    ax.set_aspect("equal")
    ax.grid(visible=False)
    ax.tick_params(length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)


def _draw_arrows(ax: Axes, passed: pd.DataFrame, ranks: int) -> None:
    """Draw an arrow for each piece that is passed on.

    The arrow from the last rank leads out of the panel and in again at the first rank.

    Parameters
    ----------
    ax : Axes
        The axes, on which a rank is a column and a piece a row.
    passed : DataFrame
        The rows of `passes` for one step.
    ranks : int
        The number of ranks.
    """
    color = look("measured").color
    arrow = {"arrowstyle": "-|>", "color": color, "linewidth": 1.2}
    arrow |= {"shrinkA": 0, "shrinkB": 0, "mutation_scale": 9}
    for row in passed.itertuples():
        out = (row.rank + 0.22, row.piece)
        if row.rank < ranks - 1:
            ax.annotate("", (row.to - 0.22, row.piece), out, arrowprops=arrow)
        else:
            ax.annotate("", (row.rank + 0.72, row.piece), out, arrowprops=arrow)
            inwards = (-0.22, row.piece)
            ax.annotate("", inwards, (-0.72, row.piece), arrowprops=arrow)
