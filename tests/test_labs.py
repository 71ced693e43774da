"""Where a cost ends: labs that follow the law are told by it; disturbances stretch what they say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from ddlkit.core.case import Case
from ddlkit.core.cost import AlphaBeta
from ddlkit.core.errors import UserError
from ddlkit.core.iteration import group_ends
from ddlkit.core.workload import Workload
from ddlkit.model.calibration import Calibration, Communication
from ddlkit.model.noise import Noise
from ddlkit.report import labs, source
from ddlkit.report.labs import Disturbance
from test_rings import LABS, LINK, SIZES, made

ALPHA_S, BETA = 1e-3, 2e-8
COST = AlphaBeta(ALPHA_S, BETA, workers=4, algorithm="ring")
BYTES = np.repeat(np.geomspace(1e4, 4e7, 12), 2)
CALM = Communication(COST, [COST] * 50, noise=Noise.of(BYTES, COST(BYTES), np.tile([0, 1], 12)))
WORK = Workload.from_arrays(0.1, [0.05] * 8, [2_000_000] * 8, update_s=0.01)
CASE = Case("replay", "n", "cpu", 1, 4, "emulated:500mbit-delay0.5ms", 5e8, "all_reduce", "none",
            "1;2;3;4;5;6;7;8")  # fmt: skip


def test_start_ups_count_the_smallest_message_once_for_each_message() -> None:
    lab = {"link": "lab:1gbit", "collective": "all_reduce"}
    messages = pd.DataFrame({"bytes": [8, 8, 8, 64], "seconds": [0.1, 0.2, 0.9, 7.0]})
    cases = pd.DataFrame({"ends": ["1;2;3;4", "2;4", "4"], "measured_compute_s": 2.0})
    share = labs.startup_share(
        cases.assign(**lab, workers=2), messages.assign(**lab, ranks=2, in_flight=1)
    )
    assert share.tolist() == pytest.approx([0.4, 0.2, 0.1])


@pytest.mark.parametrize("woken", [0.0, 0.3])
def test_labs_that_follow_the_law_are_told_by_it(woken: float) -> None:
    """Held out, between sizes where nothing is fitted, and recorded later; slower ones are not."""
    tbf = [("lab:1gbit", 4), ("lab:500mbit", 8), ("lab:1gbit", 2)]
    known = pd.concat([made(LABS, waking=woken), made(tbf)])
    table = labs.held_out(known, 2, woken)
    assert set(table["kind"]) == {"tbf", "emulated"} and len(table) == 8 * SIZES.size
    assert table["error"].abs().groupby([table["kind"], table["link"]]).median().max() < labs.WELL
    one = table[(table["link"] == "lab:500mbit")].sort_values("bytes")
    assert [*dict.fromkeys(one["decides"])] == ["start-up", "knee", "bytes"]
    fresh = made([("emulated:300mbit-delay1ms", 5)], waking=woken)
    (off,) = labs.later_labs(fresh, known, 2, woken).values()
    (slow,) = labs.later_labs(fresh.assign(seconds=2 * fresh["seconds"]), known, 2, woken).values()
    assert off < 0.01 and slow == pytest.approx(0.5, abs=0.01)
    with pytest.raises(UserError, match="no lab of equal links"):
        labs.held_out(known.assign(link="loopback"), 2, woken)
    if not woken:
        exact = made([(LINK, 4)], values=np.log([2e-4, 1.0, 0.1]))
        (row,) = labs.between_sizes(exact, 2**20).to_dict("records")
        assert abs(row["law_error"]) < 1e-3 < 0.01 < row["table_error"]


def test_what_echoes_tell_of_waking_is_found() -> None:
    """A line in the delay, beyond four delays and 1,066 bytes on four links; none without delay."""
    links = [f"emulated:1gbit-delay{ms}ms" for ms in (0, 0.5, 1, 2)]
    delay_s = np.array([9.0, 0.5e-3, 1e-3, 2e-3])
    echo_s = 4 * delay_s + 4 * 1066 * 8 / 1e9 + 1e-4 + 0.05 * delay_s
    rows = pd.DataFrame({"link": links, "seconds": echo_s, "operation": "echo", "at_once": 1})
    assert labs.waking(rows.assign(ranks=4, bytes=1000)) == pytest.approx(0.05, rel=1e-6)


def test_recorded_labs_are_judged_by_what_was_said_before() -> None:
    """Of all twelve, each size that was said; sizes that were rounded further are not it."""
    again = source.open_labs("", source.AGAIN_LABS)
    said, rows = again.table("predicted"), again.table("collectives")
    medians = labs.preregistered_labs(said, rows)
    assert len(medians) == 12 and np.median([*medians.values()]) <= labs.WELL
    far = labs.preregistered_labs(said, rows.assign(bytes=rows["bytes"] * 1.1))
    assert np.isnan([*far.values()]).all()


def test_algorithms_stand_over_the_fastest() -> None:
    rows = made([(LINK, 4)]).assign(algorithm="steps:ring")
    slow = rows.assign(algorithm="steps:direct", seconds=2 * rows["seconds"])
    table = labs.algorithms(pd.concat([rows, slow, made([(LINK, 4)])]), LINK, 4)
    assert table["steps"].to_dict() == {"ring": 6, "direct": 2}
    assert table.loc["ring", SIZES].eq(1).all() and table.loc["direct", SIZES].tolist() == [2] * 8


# -- disturbances ---------------------------------------------------------------------------------


def median_s(share: float = 1.0, loss: float = 0.0, control: str = "reno") -> float:
    disturbance = Disturbance("drawn", "drawn", share, loss, control)
    return float(np.median(labs.predicted_s(CASE, WORK, CALM, disturbance)))


@pytest.mark.parametrize("share", [1.0, 0.5, 0.25])
def test_a_slow_link_stretches_bytes_and_nothing_else(share: float) -> None:
    slow = AlphaBeta(ALPHA_S, BETA / share, workers=4)
    ends_s = group_ends(np.array(WORK.ready_s), np.full(8, slow(2e6)))
    assert median_s(share) == pytest.approx(ends_s[-1] + WORK.update_s)


def test_loss_costs_time_by_the_square_root_law_and_bbr_keeps_its_rate() -> None:
    def rate(loss: float, control: str, round_trip_s: float = 2e-3) -> float:
        return Disturbance("", "", 1.0, loss, control).of_rate(round_trip_s, 5e8)

    assert rate(0.01, "cubic") == pytest.approx(0.151, abs=1e-3)
    assert rate(0.0025, "cubic") == pytest.approx(2 * rate(0.01, "cubic"))
    assert rate(0.01, "cubic", 4e-3) == pytest.approx(rate(0.01, "cubic") / 2)
    assert rate(0.01, "bbr") == 0.99 and rate(0.0, "cubic") == 1
    assert median_s() < median_s(loss=0.01, control="bbr") < median_s(loss=0.01, control="cubic")


def test_a_case_says_its_disturbance() -> None:
    bbr = replace(CASE, link=f"{CASE.link}-bbr")
    names = {
        "": ("none, bbr", 1.0),
        "0s:rate=125mbit,rank=3": ("one link at 1/4", 0.25),
        "0s:rate=250mbit": ("all links at 1/2", 0.5),
        "0s:background=80%": ("others 80%", 0.2),
        "0s:loss=0.1%": ("loss 0.1%, bbr", 1.0),
    }
    for changes, (name, share) in names.items():
        disturbance = labs.disturbance_of(replace(bbr, changes=changes))
        assert disturbance is not None and disturbance.name == name
        assert disturbance.share == pytest.approx(share)
    for other in ("0.3s:rate=250mbit", "0s:background=80%:100ms/100ms", "0s:jitter=0.5ms"):
        assert labs.disturbance_of(replace(bbr, changes=other)) is None


def test_the_reference_is_what_came_before_any_loss_on_each_link() -> None:
    lossy, frames = "0s:loss=1%", []
    for name, changes, took_s in (
        ("cubic", ["", "", lossy, "", lossy, ""], [1.0, 2.0, 9.0, 3.0, 9.0, 1.5]),
        ("bbr", ["", lossy, ""], [4.0, 9.0, 4.0]),
    ):
        rows: dict[str, Any] = {"link": f"{CASE.link}-{name}", "plan": "ddp", "changes": changes}
        frames.append(pd.DataFrame({**rows, "iteration_s": took_s}))
    after = labs.after_loss(pd.concat(frames, ignore_index=True)).set_index("congestion")
    assert after.loc["cubic", "ratio"].to_list() == [2.0, 1.0]
    assert after.loc["cubic", "after"].to_list() == [1, 2] and after.loc["bbr", "ratio"] == 1
    with pytest.raises(UserError, match="record campaign_calm.yml"):
        labs.after_loss(frames[0].head(3))


def test_every_recorded_disturbance_is_judged_and_what_fails_stays() -> None:
    recording = source.open_campaign("", source.DISTURBED)
    runs, rows = recording.alone.table("runs"), recording.alone.table("collectives")
    table = labs.disturbed(runs, recording.workloads(), Calibration.of(rows, draws=50))
    off = table["relative_error"].abs() > labs.FAILS
    assert (table["fails"] == (off | ~table["inside"])).all()
    failed = table[table["fails"]].groupby("kind").size()
    assert failed["loss, cubic"] == 4 and "others" not in failed
