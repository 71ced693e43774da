"""The drawn ring is an all-reduce, and its arrows are what each rank passes on."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.patches import Rectangle
from matplotlib.text import Annotation

from ddlkit.core.collective import COLLECTIVES
from workbook.course import ring

RANKS = (2, 3, 4, 7)
ALL_REDUCE = COLLECTIVES["all_reduce"]


@pytest.mark.parametrize("ranks", RANKS)
def test_passing_the_listed_pieces_sums_the_vectors_on_every_rank(ranks: int) -> None:
    vectors = np.random.default_rng(ranks).normal(size=(ranks, ranks, 3))
    held = vectors.copy()
    for _, rows in ring.passes(ranks).groupby("step"):
        before = held.copy()
        for row in rows.itertuples():
            own = before[row.to, row.piece] if row.adds else 0
            held[row.to, row.piece] = own + before[row.rank, row.piece]
    np.testing.assert_allclose(held, np.broadcast_to(vectors.sum(axis=0), held.shape))


@pytest.mark.parametrize("ranks", RANKS)
def test_each_rank_sends_one_piece_to_its_right_in_each_step(ranks: int) -> None:
    passed = ring.passes(ranks)
    assert (passed["to"] == (passed["rank"] + 1) % ranks).all()
    assert (passed.groupby(["step", "rank"]).size() == 1).all()
    sent = passed.groupby("rank").size()
    assert (sent == ALL_REDUCE.pieces_sent(ranks)).all()
    assert passed["step"].nunique() == ALL_REDUCE.steps(ranks)


@pytest.mark.parametrize("ranks", RANKS)
def test_a_piece_is_replaced_only_by_a_finished_one(ranks: int) -> None:
    passed = ring.passes(ranks)
    replaced = passed[~passed["adds"]]
    assert len(replaced) == ranks * (ranks - 1)
    assert (replaced["summed"] == ranks).all()


@pytest.mark.parametrize("ranks", (2, 4))
def test_the_figure_has_a_square_for_each_piece_and_an_arrow_for_each_pass(
    ranks: int,
) -> None:
    figure = ring.draw(ranks)
    *_, last = figure.axes
    arrows = [each for each in last.texts if isinstance(each, Annotation)]
    assert arrows == []
    assert {each.get_text() for each in last.texts} == {str(ranks)}
    for ax in figure.axes:
        squares = [each for each in ax.patches if type(each) is Rectangle]
        assert len(squares) == ranks**2
    drawn = [
        each for ax in figure.axes for each in ax.texts if isinstance(each, Annotation)
    ]
    passed = ring.passes(ranks)
    leaves = (passed["rank"] == ranks - 1).sum()  # drawn as one arrow out and one in
    assert len(drawn) == len(passed) + leaves
    plt.close(figure)
