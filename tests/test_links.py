"""Start-ups over computation, duels of plans and scaling factors, on drawn cases whose answers are known."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from ddlkit.core.gloo_ring import GlooRing
from ddlkit.core.lablink import read_link
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


def test_the_law_is_right_where_messages_follow_it() -> None:
    """Of gloo's own law, a size that was left out is told to rounding; a table runs above it."""
    link, workers = "emulated:500mbit-delay2ms", 4
    slope = 8 / (5e8 * read_link(link).framing)
    truth = GlooRing(2e-4, slope, workers=workers, delay_s=2e-3)
    sizes = np.array([2.0**power for power in (0, 12, 16, 20, 21, 22, 24)])
    rows = pd.DataFrame({"bytes": np.repeat(sizes, 4), "seconds": np.repeat(truth(sizes), 4)})
    rows = rows.assign(link=link, ranks=workers, collective="all_reduce", algorithm="ring")
    rows = rows.assign(in_flight=1, session=0, messages_per_sample=1, stolen=0.0)
    (found,) = links.between_sizes(rows, 2**21).to_dict("records")
    assert abs(found["law_error"]) < 1e-4 < 0.01 < found["table_error"]


def test_labs_are_told_apart_by_what_is_special_about_them() -> None:
    names = ["emulated:1gbit-delay1ms", "emulated:1gbit-delay1ms-loss0.01", "lab:1gbit"]
    names += ["emulated:1gbit-delay1ms-background0.3", "emulated:1gbit-delay1ms-jitter0.1ms"]
    found = links.kinds(pd.DataFrame({"link": names, "workers": [2, 2, 8, 4, 4]}))
    assert list(found) == ["2 workers", "loss", "8 workers", "others' traffic", "jitter"]


def test_what_was_late_is_counted_where_it_was_and_the_kernels_links_are_left_out() -> None:
    runs = pd.DataFrame({"workers": [2, 2, 8, 4], "link_bits_per_s": [1e9, 1e9, 1e9, 1e9]})
    runs["link"] = ["emulated:1gbit-delay1ms"] * 3 + ["lab:1gbit"]
    found = links.lateness(runs.assign(late=[0.01, 0.06, 0.0, 0.9]))
    assert found["workers"].to_list() == [2, 8] and found["iterations"].to_list() == [2, 1]
    assert found["marked"].to_list() == [1, 0] and found["late"].to_list() == [0.06, 0.0]


def test_engines_are_compared_where_both_have_a_size() -> None:
    names = ["lab:1gbit"] * 3 + ["emulated:1gbit-delay0ms"] * 2
    rows = pd.DataFrame({"link": names, "ranks": 2, "link_bits_per_s": 1e9})
    rows = rows.assign(bytes=[8, 8, 64, 8, 16], seconds=[1.0, 3.0, 9.0, 4.0, 5.0])
    (found,) = links.engines(rows).to_dict("records")
    assert found["bytes"] == 8 and found["ratio"] == pytest.approx(4.0 / 2.0)


def echoes(
    link: str, packets: float, seconds: float, echo_s: float, ranks: int = 4
) -> pd.DataFrame:
    """Three echoes by one rank and by all, and all-reduces for whose packets half of the time is worked."""
    rows = pd.DataFrame({"operation": ["echo", "echo", "all_reduce"], "at_once": [1, ranks, ranks]})
    rows = rows.assign(seconds=[echo_s, 2 * echo_s, seconds], packets=[2.0, 8.0, packets])
    rows["processor_s"] = rows["seconds"] / 2 if packets else 0.0
    labels = {"link": link, "link_bits_per_s": 1e9, "ranks": ranks, "bytes": 1000}
    return pd.concat([rows.assign(sample=n, **labels) for n in range(3)])


def test_a_crossing_is_told_apart_into_delay_bytes_and_what_is_beyond() -> None:
    """1,000 bytes are 1,066 on the wire with headers and framing, and pass four links."""
    on_wire_s = 4 * (1000 + 28 + 38) * 8 / 1e9
    table = echoes("emulated:1gbit-delay1ms", 60.0, 0.03, 4e-3 + on_wire_s + 1e-4)
    (found,) = links.crossings(table).to_dict("records")
    assert found["beyond_s"] == pytest.approx(1e-4)
    assert found["step_s"] == pytest.approx(0.03 / 6 - 4e-3)
    assert (found["share"], found["packet_s"]) == pytest.approx((0.5, 0.015 / 60))
    (kernel,) = links.crossings(echoes("lab:1gbit", 0.0, 0.03, 5e-6)).to_dict("records")
    assert kernel["share"] == 0 and np.isnan([kernel["beyond_s"], kernel["packet_s"]]).all()


def both_engines(links_: list[str], trip_s: float) -> pd.DataFrame:
    """Two sizes over each link, of four ranks: the small one six trips."""
    rows = [(link, size) for link in links_ for size in (1024.0, 2.0**26)]
    found = pd.DataFrame(rows, columns=["link", "bytes"]).assign(ranks=4)
    return found.assign(seconds=np.where(found["bytes"] == 1024, 6 * trip_s, 1.0))


def test_both_engines_are_told_by_what_they_count_and_by_words_that_wait() -> None:
    """Without trips framing is all; with them a wire is longer, unless it saves as the bucket does."""
    wire, counted = "emulated:1gbit-delay0ms", "emulated:1gbit-delay0ms-framing14"
    saving = "emulated:1gbit-delay0ms-burst1.048576ms-framing14"
    for trip_s in (1e-9, 5e-4):
        known = both_engines(["lab:1gbit", wire], trip_s)
        labs = both_engines(["lab:1gbit", wire, counted, saving], trip_s).query("bytes > 1e6")
        told = links.ratios_told(links.engines_told(labs, known)).set_index("link")
        framing = told["framing_ratio"]
        assert framing[[counted, saving]].tolist() == pytest.approx([1, 1])
        assert framing[wire] == pytest.approx(1538 / 1514)
        beyond = told["told_ratio"] / framing - 1
        assert beyond[saving] == pytest.approx(0, abs=1e-9)
        assert (beyond[[wire, counted]] > 1e-3).all() == (trip_s > 1e-6)
        assert beyond[wire] == pytest.approx(beyond[counted], abs=1e-3)
        found = links.ratios(told.reset_index(), labs)
        assert len(found) == 3 and (found["measured_ratio"] == 1).all()
