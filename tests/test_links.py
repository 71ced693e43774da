"""Start-ups over computation, duels of plans and scaling factors, on drawn cases whose answers are known."""

from __future__ import annotations

import pandas as pd
import pytest

from ddlkit.report import links

LAB = {"workers": 2, "link": "lab:1gbit", "collective": "all_reduce", "network": "n"}


def cases() -> pd.DataFrame:
    drawn = pd.DataFrame(
        {
            "plan": ["none", "exact", "ddp"],
            "ends": ["1;2;3;4", "2;4", "4"],
            "measured_compute_s": 2.0,
            "measured_iteration_s": [5.0, 4.0, 4.4],
            "model_iteration_s": [5.0, 4.0, 4.8],
            "no_overlap_iteration_s": [6.0, 5.0, 5.0],
            "osf_table_iteration_s": [8.0, float("nan"), 8.0],
            "osf_repaired_table_iteration_s": [5.0, float("nan"), 4.0],
            "repeatability": [0.01, 0.02, 0.03],
        }
    )
    return drawn.assign(**LAB)


def test_start_ups_count_the_smallest_message_once_for_each_message() -> None:
    rows = {"link": "lab:1gbit", "ranks": 2, "collective": "all_reduce", "in_flight": 1}
    messages = pd.DataFrame({"bytes": [8, 8, 8, 64], "seconds": [0.1, 0.2, 0.9, 7.0]}).assign(
        **rows
    )
    assert links.startup_share(cases(), messages).tolist() == pytest.approx([0.4, 0.2, 0.1])


def test_a_duel_is_told_by_what_was_measured_and_foretold() -> None:
    (duel,) = links.duels(cases(), "exact", "ddp").to_dict("records")
    assert (duel["measured"], duel["model"]) == pytest.approx((0.1, 0.2))
    assert duel["repeats"] == 0.03
    assert links.duels(cases(), "exact", "single").empty


def test_a_scaling_factor_is_computation_over_iteration() -> None:
    found = links.scaling(cases(), "n").set_index("plan")
    assert found.loc["exact", ["measured", "model", "no_overlap"]].tolist() == [0.5, 0.5, 0.4]
    assert found["osf_table"].isna().tolist() == [False, True, False]
    assert links.scaling(cases(), "other").empty
