"""omgs figure 4 as it was measured: what the lab's replays and real training say is read as it was meant."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest

from ddlkit import store
from ddlkit.papers.omgs.cluster import PARTS, PLANS
from ddlkit.report import source
from ddlkit.report.figures import omgs_breakdown, omgs_measured
from ddlkit.report.source import Source


@cache
def played() -> pd.DataFrame:
    return omgs_measured.replayed(source.open_campaign(name=source.OMGS).alone)


def test_every_algorithm_was_played_on_every_network_and_start_up() -> None:
    """Also those whose plans come out the same; an iteration is the sum of its parts."""
    sparse = played()[played()["algorithm"] != omgs_measured.DENSE]
    counts = sparse.groupby(["startup_s", "network"])["algorithm"].agg(list)
    assert len(counts) == 3 * 4
    assert all(sorted(names) == sorted(PLANS) for names in counts)
    whole = played()[list(omgs_measured.PLAYED)].sum(axis=1)
    np.testing.assert_allclose(whole, played()["iteration"], rtol=1e-9)


def test_the_lab_computes_in_proportion_to_the_papers_cluster() -> None:
    """It computes what the settings do, and start-ups are those that the campaign's file asks for."""
    assert sorted(played()["startup_s"].unique()) == pytest.approx([1.6e-3, 5.4e-3, 22e-3])
    for network, rows in played().groupby("network"):
        whole = rows["forward"] + rows["backward"] + rows["update"]
        wanted = omgs_breakdown.setting(str(network)).compute_s
        np.testing.assert_allclose(whole, wanted, rtol=1e-3)


def test_the_model_lets_no_rule_be_faster_than_the_best_merging() -> None:
    """But for what a link saves while it rests, which planners do not see."""
    sparse = played()[played()["algorithm"] != omgs_measured.DENSE]
    for _, rows in sparse.groupby(["startup_s", "network"]):
        foretold = rows.set_index("algorithm")["predicted"]
        assert foretold["exact"] <= foretold.min() * 1.02


def test_speedups_are_ratios_of_the_same_network_and_start_up() -> None:
    found = omgs_measured.speedups(played())
    one = found.iloc[0]
    rows = played()[(played()["startup_s"] == one["startup_s"])]
    taken = rows[rows["network"] == one["network"]].set_index("algorithm")["iteration"]
    assert one["s1"] == taken["TopK"] / taken["OMGS"]
    assert one["s2"] == taken["MGS"] / taken["OMGS"]
    assert taken[one["fastest"]] == taken[["TopK", "MGS", "OMGS"]].min()


def test_figure_4_has_what_the_paper_prints_beside_every_ratio() -> None:
    found = omgs_measured.fig04(played())
    ours = found[found["algorithm"] == "OMGS"].set_index(["where", "network"])
    printed = omgs_breakdown.printed()
    for where in ("model", "lab"):
        rows = ours.loc[where].loc[printed.index]
        assert rows["s1_paper"].tolist() == printed["s1"].tolist()
        assert rows["s2_paper"].tolist() == printed["s2"].tolist()
        assert rows["less_exposed_paper"].round(2).tolist() == [1.0, 2.0, 2.0, 1.22]
    assert found[found["algorithm"] != "OMGS"][list(omgs_measured.RATIOS)].isna().all(axis=None)
    lab = found[found["where"] == "lab"].set_index(["network", "algorithm"])["exposed"]
    ratio = lab["LSTM-PTB", "TopK"] / lab["LSTM-PTB", "OMGS"]
    assert ours.loc["lab", "LSTM-PTB"]["less_exposed"] == pytest.approx(ratio)
    figure = omgs_measured.draw_fig04(found)
    assert len(figure.axes) == 6
    assert "ResNet-50: gain 0%, printed 31%" in [ax.get_title("left") for ax in figure.axes]
    plt.close(figure)


def training_rows(**columns: object) -> pd.DataFrame:
    phases = ("forward_s", "backward_s", "selection_s", "exposed_communication_s", "scatter_s")
    rows = [
        {"network": "n", "ranks": 2, "plan": plan, "messages": 1, "repeat": repeat, "iteration": k,
         "rank": rank, **dict.fromkeys(phases, 1.0 + rank), "update_s": 1.0,
         "iteration_s": 6.0 + repeat + (0.5 if plan == "exact" else 0.0), **columns}
        for plan in PLANS.values() for repeat in range(2) for k in range(3) for rank in range(2)
    ]  # fmt: skip
    return pd.DataFrame(rows)


def test_training_is_the_mean_of_ranks_and_the_median_of_iterations(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Source, "table", lambda *_: training_rows())
    found = omgs_measured.trained(Source((Path(),)))
    assert found["algorithm"].tolist() == [*PLANS]
    assert (found[list(PARTS)] == 1.5).all(axis=None) and (found["update"] == 2.5).all()
    exact = found.set_index("algorithm").loc["exact"]
    assert (exact["iteration"], exact["least"], exact["most"]) == (7.0, 6.5, 7.5)
    assert found["fastest"].tolist() == [2, 2, 2, 2, 0] and set(found["rounds"]) == {2}


@pytest.mark.parametrize(("slower", "together"), [(2.0, 1.0), (1.0, 2.0), (4.0, 0.5)])
def test_competing_is_told_from_taking_turns(
    monkeypatch: pytest.MonkeyPatch, slower: float, together: float
) -> None:
    rows = pd.DataFrame(
        [
            {"elements": 1000, "operation": f"{name}_{how}", "seconds": seconds}
            for name in ("topk_unsorted", "backward")
            for how, seconds in (("alone", 1.0), ("beside", slower))
            for _ in range(3)
        ]
    )
    monkeypatch.setattr(Source, "table", lambda *_: rows)
    (one,) = omgs_measured.beside(Source((Path(),))).to_dict("records")
    assert one["together"] == pytest.approx(together)
    assert one["selection_slower"] == one["backward_slower_most"] == slower


def test_a_plan_is_the_fastest_only_if_its_slowest_round_is() -> None:
    rows = [
        {
            "network": "n",
            "ranks": ranks,
            "algorithm": name,
            "iteration": took,
            "least": low,
            "most": high,
        }
        for ranks, most in ((2, 1.0), (4, 1.3))
        for name, took, low, high in (("OMGS", 0.9, 0.8, most), ("LAGS", 1.35, 1.2, 1.5))
    ]
    found = pd.DataFrame(rows)
    assert omgs_measured.decided(found) == {("n", 2): "OMGS"}
    assert omgs_measured.behind(found).tolist() == pytest.approx([0.5, 0.5])


def test_what_was_recorded_of_training_is_of_two_and_four_ranks() -> None:
    found = omgs_measured.trained(omgs_measured.recorded())
    assert set(found["ranks"]) == {2, 4} and set(found["algorithm"]) == set(PLANS)
    whole = found[[*omgs_measured.PLAYED]].sum(axis=1)
    assert (whole <= found["iteration"] * 1.1).all()
    assert store.RECORDED in omgs_measured.recorded().directories[0].parents
