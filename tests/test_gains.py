"""Gains of advised plans: how they are measured, and how the figure of notebook 13 counts them."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any, cast

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from hypothesis import given, settings
from hypothesis import strategies as st

from ddlkit.model.advice import measured_gain
from workbook.common import places
from workbook.validate import figures, gains

SHARES = st.floats(-0.3, 0.3)


@st.composite
def pairs(draw: st.DrawFn) -> pd.DataFrame:
    """Some pairs of a network and a link, of which at least one is advised and one is not."""
    advised = [True, False, *draw(st.lists(st.booleans(), max_size=6))]
    rows = []
    for is_advised in advised:
        gain = draw(SHARES)
        low, high = gain - 0.05, gain + 0.05
        rows.append(
            ("resnet18", "lab:1gbit", is_advised, gain, low, high, draw(SHARES))
        )
    columns = ["network", "link", "advised", "gain", "low", "high", "measured"]
    return pd.DataFrame(rows, columns=columns)


@settings(max_examples=15)  # a figure each
@given(pairs(), pairs())
def test_the_figure_names_advised_changes_and_counts_all_pairs(
    before: pd.DataFrame, after: pd.DataFrame
) -> None:
    figure = figures.advised_gains(before, after)
    every = pd.concat([before, after])
    advised = every[every["advised"]]
    inside = sum(
        low <= m <= high
        for low, m, high in every[["low", "measured", "high"]].to_numpy()
    )
    numbers = [int(n) for n in re.findall(r"\d+", figure.get_suptitle())]
    assert numbers == [sum(advised["measured"] > 0), len(advised), inside, len(every)]
    for ax, of in zip(figure.axes, (before, after), strict=True):
        named = [label.get_text() for label in ax.get_yticklabels()]
        assert len(named) == of["advised"].sum() + 1
        drawn = np.concatenate([line.get_xdata() for line in ax.lines[1:]])
        shown = np.concatenate([of["gain"], of["measured"]])
        np.testing.assert_allclose(np.sort(drawn), np.sort(100 * shown))
    plt.close(figure)


def test_rounds_are_medians_under_the_names_of_the_advice() -> None:
    """A plan has the name that the advice gives it, and a round the median of its iterations."""
    runs = pd.DataFrame(
        {
            "repeat": np.repeat(np.arange(6), 6),
            "ends": ["2;4"] * 3 * 6 + ["4"] * 3 * 6,
            "iteration_s": np.tile([1.0, 2.0, 9.0], 12),
        }
    )
    runs["repeat"] = np.tile(np.repeat(np.arange(6), 3), 2)
    runs.loc[runs["ends"] == "4", "iteration_s"] *= 0.9

    def option(name: str, *ends: int) -> Any:
        plan = SimpleNamespace(ends=ends)
        return SimpleNamespace(name=name, iteration=SimpleNamespace(plan=plan))

    advice = SimpleNamespace(ranked=[option("exact", 4), option("ddp", 2, 4)])
    rounds = gains._seconds_of_rounds(runs, cast("Any", advice))
    assert {*rounds.columns} == {"exact", "ddp"} and len(rounds) == 6
    assert (rounds["ddp"] == 2.0).all()
    assert measured_gain(rounds, "exact").share == np.median(1 - rounds["exact"] / 2.0)


def test_what_was_tried_after_goals_has_the_columns_of_the_campaign() -> None:
    tried = gains.after_goals()
    shown = pd.read_csv(places.REPORTS / "figures" / "wb-advice.csv")
    shown = shown.rename(columns={"model": "gain"})
    columns = [*gains.PLACE, "plan", "advised", *gains.INTERVALS]
    assert {*columns} <= {*tried.columns} and {*columns} <= {*shown.columns}
    assert (tried["low"] <= tried["gain"]).all() and (
        tried["gain"] <= tried["high"]
    ).all()
