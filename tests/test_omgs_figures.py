"""omgs's settings, its figure 4 as measured, and its figure 3 as judged."""

from __future__ import annotations

from functools import cache

import numpy as np
import pandas as pd
import pytest

from ddlkit.core.errors import UserError
from workbook.common import source
from workbook.omgs import fig03, fig04, settings
from workbook.omgs.tables import at_papers_startup


def test_compatible_settings_agree_with_as_many_times_as_any() -> None:
    every, stated = settings.scanned("LSTM-PTB"), settings.printed().loc["LSTM-PTB"]
    off = (every[[*settings.TIMES]] / stated[[*settings.TIMES]].astype(float) - 1).abs()
    most = (off <= settings.TOLERANCE).sum(axis=1)
    best = settings.compatible("LSTM-PTB")
    assert sorted(best.index) == most.index[most == most.max()].tolist()
    assert best["agree"].eq(most.max()).all() and best["far"].is_monotonic_increasing


@cache
def played() -> pd.DataFrame:
    return fig04.measured(source.open_campaign(name=source.OMGS).alone)


def test_the_lab_computes_in_proportion_to_the_papers_cluster() -> None:
    whole = played()[list(fig04.PLAYED)].sum(axis=1)
    np.testing.assert_allclose(whole, played()["iteration"], rtol=1e-9)
    for network, rows in played().groupby("network"):
        computed_s = rows["forward"] + rows["backward"] + rows["update"]
        np.testing.assert_allclose(
            computed_s, settings.setting(str(network)).compute_s, rtol=1e-3
        )


def test_figure_4_has_what_the_paper_prints_beside_every_ratio() -> None:
    frame = fig04.numbers(played())
    ours = frame[frame["algorithm"] == "OMGS"].set_index(["where", "network"])
    printed = settings.printed()
    for where in ("model", "lab"):
        rows = ours.loc[where].loc[printed.index]
        assert rows["s1_paper"].tolist() == printed["s1"].tolist()
        assert rows["s2_paper"].tolist() == printed["s2"].tolist()
        assert rows["less_exposed_paper"].round(2).tolist() == [1.0, 2.0, 2.0, 1.22]
    lab = frame[frame["where"] == "lab"].set_index(["network", "algorithm"])
    topk, sparse = (lab.loc[("LSTM-PTB", name)] for name in ("TopK", "OMGS"))
    assert sparse["less_exposed"] == pytest.approx(topk["exposed"] / sparse["exposed"])
    speedups = at_papers_startup().loc["LSTM-PTB"]
    assert sparse["s1"] == speedups["s1"] == topk["iteration"] / sparse["iteration"]
    assert speedups["fastest"] == "OMGS"


def made_up(scores: dict[str, list[float]]) -> pd.DataFrame:
    """Trainings that end with these scores, by method, one a seed."""
    rows = [
        (method, seed, epoch, epoch * score / 2)
        for method, seeds in scores.items()
        for seed, score in enumerate(seeds)
        for epoch in (0, 1, 2)
    ]
    frame = pd.DataFrame(rows, columns=["method", "seed", "epoch", "accuracy"])
    return frame.assign(
        **{
            "network": "resnet20_half",
            "schedule": "constant",
            "measured_on": "held_out",
        },
        **{
            "epochs": 2,
            "loss": 1.0,
            "images": 64,
            "batch": 32,
            "ranks": 4,
            "parameters": 1000,
        },
        **{"selected": 10, "messages": 1, "ends": frame["method"]},
    )


@pytest.mark.parametrize(
    ("short", "judged"),
    [({}, 5), ({"omgs": [0.8, 0.8]}, 0), ({"exact": []}, 0), ({"dense": [0.9] * 4}, 5)],
)
def test_a_network_is_judged_when_every_method_has_three_seeds(
    short: dict[str, list[float]], judged: int
) -> None:
    every = {name: [0.7, 0.8, 0.9] for name in fig03.TITLES}
    warm = made_up({"omgs": [0.9, 0.9]}).assign(schedule="warm-up")
    both = pd.concat([made_up({**every, **short}), warm])
    kept = fig03.numbers(fig03.measured(both))
    assert kept["method"].nunique() == judged  # a schedule of two seeds is not shown


def test_scores_are_means_over_seeds_with_their_spread() -> None:
    """A training that serves two methods counts for both."""
    frame = fig03.measured(
        made_up({"dense": [0.9, 0.8], "topk": [0.82, 0.8], "omgs+exact": [0.5, 0.45]})
    )
    scores = fig03.final(frame)
    assert scores["mean"].tolist() == pytest.approx([0.85, 0.81, 0.475, 0.475])
    assert scores["spread"].tolist() == pytest.approx([0.1, 0.02, 0.05, 0.05])
    assert scores["seeds"].tolist() == [2] * 4
    assert fig03.ratios(frame).tolist() == pytest.approx([0.5 / 0.9, 0.45 / 0.8])
    assert scores["sends"].to_list()[1:] == pytest.approx([0.16] * 3)
    with pytest.raises(UserError, match="no sparsified training"):
        fig03.measured(made_up({"dense": [1.0]}).iloc[:0])
