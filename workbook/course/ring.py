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

    In a first round of ranks - 1 steps pieces are summed up. In a second round of as many steps
    the finished pieces, which are the sums of all ranks, are passed on.

    Parameters
    ----------
    ranks : int
        The number of ranks, at least 2. Each rank cuts its vector into as many pieces as
        there are ranks.

    Returns
    -------
    DataFrame
        One row for each step and sending rank. Steps, ranks and pieces count from 0.
        The columns are ``step``, ``rank`` (the sender), ``to`` (its right neighbour),
        ``piece``, ``summed`` (of how many ranks the sent piece is the sum) and ``adds``.
        If ``adds`` is true, the neighbour adds the piece to its own one, or else it replaces
        its own one.

    Examples
    --------
    >>> passes(2).query("rank == 0")
       step  rank  to  piece  summed   adds
    0     0     0   1      0       1   True
    2     1     0   1      1       2  False
    """
    rows = []
    # summed[rank, piece] is of how many ranks the piece on this rank is the sum. At first each
    # piece is the rank's own, which counts as the sum of one rank.
    summed = np.ones((ranks, ranks), dtype=int)
    for step in range(COLLECTIVES["all_reduce"].steps(ranks)):
        before = summed.copy()
        # Pieces are added in the first round, and replaced in the second.
        adds = step < ranks - 1
        for rank in range(ranks):
            # The last rank sends to rank 0.
            to = (rank + 1) % ranks
            # In step 0 each rank sends the piece of its own number. In each later step it sends
            # the piece that it received in the step before. The number of this piece is one lower
            # than that of the piece that it sent in the step before.
            piece = (rank - step) % ranks
            # All ranks send at the same time, so that each sends what it had before the step.
            passed = int(before[rank, piece])
            kept = int(before[to, piece]) if adds else 0
            summed[to, piece] = passed + kept
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
        For each step the numbers before it, and at last the numbers after the last step.
    """
    # At first each piece is the rank's own, which counts as the sum of one rank.
    state = np.ones((ranks, ranks), dtype=int)
    states = [state]
    for _, rows in passed.groupby("step"):
        # The arrays of earlier steps stay as they are.
        state = state.copy()
        for row in rows.itertuples():
            # ``summed`` is what the sender had before the step, so that the order of the rows
            # of one step does not matter.
            if row.adds:
                state[row.to, row.piece] += row.summed
            else:
                state[row.to, row.piece] = row.summed
        states.append(state)
    return states


def draw(ranks: int = 4) -> Figure:
    """Draw a ring all-reduce.

    There is a panel for the start of each step, and one for the end of each round. A round has
    ranks - 1 steps.

    Parameters
    ----------
    ranks : int
        The number of ranks, at least 2.

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
    steps_of_round = ranks - 1
    # Each row has a panel for each step of its round, and one more for the end.
    figure, axes = plots.canvas(columns=ranks, rows=2, height=4.4, squeeze=False)
    rounds = ((0, "add"), (steps_of_round, "replace"))
    for row, (first_step, action) in enumerate(rounds):
        for column in range(steps_of_round):
            step = first_step + column
            _draw_pieces(axes[row, column], states[step])
            _draw_arrows(axes[row, column], passed[passed["step"] == step], ranks)
            plots.heading(axes[row, column], f"Step {step}: {action}")
        steps_done = first_step + steps_of_round
        _draw_pieces(axes[row, -1], states[steps_done])
        plots.heading(axes[row, -1], f"After {steps_done} steps")
    # The left panels name the pieces, and the lower panels say that columns are ranks.
    for ax in axes[:, 0]:
        ax.set_yticks(range(ranks), [f"piece {piece}" for piece in range(ranks)])
    for ax in axes[1]:
        ax.set_xlabel("rank")
    # The bytes that a rank sends, divided by the bytes of its vector: 2 (ranks - 1) / ranks.
    factor = COLLECTIVES["all_reduce"].bus_factor(ranks)
    steps = 2 * steps_of_round
    plots.title(
        figure,
        f"In {steps} steps each rank passes on {steps} pieces: {factor:g} times its vector",
    )
    return figure


def _draw_pieces(ax: Axes, summed: NDArray[np.int_]) -> None:
    """Draw a square for each piece on each rank, in colour if it is finished.

    The piece on a rank is a sum over some ranks, and ``summed[rank, piece]`` is their number. It
    is finished if it is the sum over all ranks. In the drawing a column is a rank, and a row a
    piece.
    """
    ranks = len(summed)
    color_of_finished = look("model").color
    for rank in range(ranks):
        for piece in range(ranks):
            number = int(summed[rank, piece])
            is_finished = number == ranks
            # The middle of the square is at (rank, piece).
            corner = (rank - SIDE / 2, piece - SIDE / 2)
            square = Rectangle(corner, SIDE, SIDE, linewidth=0)
            square.set(color=color_of_finished if is_finished else FAINT)
            ax.add_patch(square)
            text = ax.text(rank, piece, str(number), ha="center", va="center")
            text.set(color="white" if is_finished else INK, fontsize=8)
    # The axis leaves room at both sides for the arrows out of the last rank into the first.
    ax.set_xlim(-0.8, ranks - 0.2)
    # The axis runs downwards, with piece 0 on top.
    ax.set_ylim(ranks - 0.45, -0.55)
    ax.set_xticks(range(ranks), [str(rank) for rank in range(ranks)])
    # `draw` names the pieces where the panel is the first of its row.
    ax.set_yticks([])
    ax.set_aspect("equal")
    ax.grid(visible=False)
    ax.tick_params(length=0)
    for spine in ax.spines.values():
        spine.set_visible(False)


def _draw_arrows(ax: Axes, passed: pd.DataFrame, ranks: int) -> None:
    """Draw an arrow for each piece that is passed on, from a rank to its right neighbour.

    The last rank sends to the first one. One arrow leads from it towards the right edge of
    the panel, and another one from the left edge to the first rank.

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

    def draw_arrow(start: float, end: float, piece: int) -> None:
        """Draw an arrow in the row of a piece, as an annotation without text."""
        ax.annotate("", xy=(end, piece), xytext=(start, piece), arrowprops=arrow)

    for row in passed.itertuples():
        # Squares are 1 apart. Arrows begin and end 0.22 from the middle of a square, so that
        # they leave its number free. At the edges of the panel, which are 0.8 from the middle
        # of the nearest square (`_draw_pieces`), they end and begin at 0.72, just inside.
        if row.rank < ranks - 1:
            draw_arrow(row.rank + 0.22, row.to - 0.22, row.piece)
        else:
            draw_arrow(row.rank + 0.22, row.rank + 0.72, row.piece)
            draw_arrow(-0.72, -0.22, row.piece)
