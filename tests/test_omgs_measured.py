"""omgs figure 4 as it was measured: what the lab's replays say is read as it was meant."""

from __future__ import annotations

from functools import cache

import numpy as np
import pandas as pd
import pytest

from ddlkit.papers.omgs.cluster import PLANS
from ddlkit.report import source
from ddlkit.report.figures import omgs_breakdown, omgs_measured


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
    over = omgs_measured.over_topk(played())[one["network"]]
    assert over.loc[1e3 * one["startup_s"], "OMGS"] == pytest.approx(1 / one["s1"])
