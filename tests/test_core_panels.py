"""Figures of the core notebooks: what the papers print stands in them, and a replay is of its own layers."""

from __future__ import annotations

import pytest

from ddlkit.core.iteration import predict
from ddlkit.model import Calibration, make_plan
from ddlkit.papers import audit
from ddlkit.report import source
from ddlkit.report.figures import core_panels, osf_measured
from ddlkit.report.source import Source
from test_figures_osf import KNOWN_SIZES, OWN_SIZES, samples

RECORDING = Source((source.default_recording(),))


def test_a_replay_is_predicted_from_the_compute_that_was_waited_out() -> None:
    workload, runs = core_panels.as_replayed(RECORDING, "googlenet", "lab:1gbit", 4)
    cost = Calibration.of(RECORDING.table("collectives"), draws=0).between("lab:1gbit", 4).cost
    taken_s = runs[runs["plan"] == "ddp"]["iteration_s"].median()
    assert workload.compute_s == pytest.approx(runs["compute_s"].median())
    told_s = predict(workload, make_plan("ddp", workload), cost).iteration_s
    assert told_s == pytest.approx(taken_s, rel=0.02)


def test_without_a_replay_compute_is_as_profiled() -> None:
    workload, runs = core_panels.as_replayed(RECORDING, "googlenet", "no link", 4)
    assert runs.empty and workload.compute_s == RECORDING.profile("googlenet").workload().compute_s


def test_where_nothing_is_decided_every_link_is_drawn_beside_the_printed_threshold() -> None:
    tensors = samples(OWN_SIZES, 1.5).assign(network="ResNet101")
    frame = osf_measured.fig10(samples(KNOWN_SIZES), tensors, "ResNet101")
    assert list(osf_measured.repeatable(frame)) == [("lab:1gbit", 4)]
    assert (frame["paper_bandwidth_delay_bytes"] == 45_000).all()
    (ax,) = core_panels.fig10(frame).axes
    assert "paper: BDP 45 KB" in ax.get_legend_handles_labels()[1]


def test_gaps_are_sorted_and_never_negative() -> None:
    _, numbers = core_panels.gaps(audit.random_audit(audit.dense_draw, audit.DENSE, 20))
    gaps = numbers[numbers["of"] == "share_percent"][[*core_panels.AUDITED]]
    assert (gaps.diff().dropna() >= 0).all(axis=None) and (gaps >= -1e-9).all(axis=None)


def test_what_osf_claims_stands_beside_the_gains_of_its_rule() -> None:
    campaign = source.open_campaign("", source.BEST).alone
    _, numbers = core_panels.fig11(campaign)
    told = numbers.dropna(subset="paper_gain_low")
    assert set(told["planner"]) == {core_panels.ADAFUSION} and set(told["grade"]) == {"model"}
    assert set(told["paper_gain_low"]) == {0.322, 0.09} and len(told) == 10
