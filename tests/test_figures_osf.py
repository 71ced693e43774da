"""osf's figures in the lab: a measurement made by the model has no error, and the recorded one is whole."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pandas as pd
import pytest

from ddlkit import store
from ddlkit.core.case import Case
from ddlkit.core.cost import Table
from ddlkit.core.iteration import Iteration, predict
from ddlkit.core.plan import FusionPlan, make_plan
from ddlkit.core.workload import Workload
from ddlkit.model.calibration import Calibration
from ddlkit.papers.osf.breakdown import PHASES
from ddlkit.report.figures import osf_overhead, osf_scaling
from ddlkit.report.figures.osf_scaling import Lab
from strategies import random_workload

SIZES = np.geomspace(1e2, 1e9, 15)
COST = Table(SIZES, 1e-9 * SIZES, workers=4)
"""Without a start-up, so that an agreement takes next to no time."""
WORKLOAD = random_workload(np.random.default_rng(0), 20)
DILATION = 3.0


def case(network: str, spec: str, *, negotiated: bool) -> tuple[Case, FusionPlan, Workload]:
    slow = WORKLOAD.scaled(DILATION)
    plan = make_plan(spec, slow)
    ends = ";".join(map(str, plan.ends))
    link = ("lab:1gbit", 1e9)
    asked = Case("replay", network, "cpu", 1, 4, *link, "all_reduce", spec, ends,
                 dilation=DILATION, profile_sha256="abc", negotiated=negotiated)  # fmt: skip
    return asked, plan, slow


def made() -> Lab:
    """Two repeats of cases that go as the model says; of the second, all takes twice as long."""
    known = {"link": "lab:1gbit", "ranks": 4, "collective": "all_reduce", "algorithm": "ring"}
    sizes = {
        "bytes": SIZES,
        "seconds": COST(SIZES),
        "session": 0,
        "messages_per_sample": 1,
        "in_flight": 1,
        "stolen": 0.0,
        "link_bits_per_s": 0.0,
    }
    wanted = [("resnet101", "none", True), ("resnet101", "buffer:25MB", True)]
    wanted += [
        ("resnet101", "none", False),
        ("vgg16", "none", False),
        ("vgg16_replaced", "none", False),
    ]
    runs, spans = [], []
    for network, spec, negotiated in wanted:
        asked, plan, slow = case(network, spec, negotiated=negotiated)
        found = predict(slow, plan, COST)
        timeline = Iteration(slow, plan, COST).timeline().to_frame()
        for repeat in range(2):
            times = {"iteration_s": found.iteration_s, "compute_s": found.compute_s}
            key = {"case": asked.key, "repeat": repeat}
            runs.append({**asdict(asked), **key, **times, "processor_limited": False})
            stretched = timeline.assign(start_s=timeline["start_s"] * (1 + repeat),
                                        end_s=timeline["end_s"] * (1 + repeat))  # fmt: skip
            spans.append(stretched.assign(**key))
    calibration = Calibration.of(pd.DataFrame({**sizes, **known}))
    return Lab(pd.DataFrame(runs), pd.concat(spans), {"abc": WORKLOAD}, calibration)


def test_a_measurement_made_by_the_model_has_its_phases() -> None:
    rows = osf_overhead.phases(made())
    assert set(rows["buffer_bytes"]) == {0, 25_000_000}
    assert list(rows["phase"]) == [*PHASES, *PHASES]
    # The second repeat takes twice as long: the mean is 1.5 times the model, their difference once.
    assert np.allclose(rows["measured_s"], 1.5 * rows["model_s"], atol=1e-4)
    assert np.allclose(rows["repeatability_s"], rows["model_s"], atol=1e-4)
    for _, part in rows.groupby("buffer_bytes"):
        assert part["measured"].sum() == pytest.approx(1)
        assert np.allclose(part["measured"], part["model"], atol=1e-4)
    assert np.allclose(osf_overhead.totals(rows)["error"], 1 / 1.5 - 1, atol=1e-4)


def test_scaling_factors_made_by_the_model_have_no_error() -> None:
    found = osf_scaling.fig08_lab(made())
    assert list(found["network"]) == ["VGG16", "VGG16 replaced"]
    assert found["error"].abs().max() < 1e-9 and found["repeatability"].max() == 0
    assert (found["csf"] <= found["model"] + 1e-12).all()


def test_twins_are_what_was_replayed_both_ways() -> None:
    found = osf_overhead.twins(made())
    assert list(found["negotiated"]) == [False, True]
    assert set(found["network"]) == {"ResNet101"}
    assert set(PHASES) <= set(found.columns)
    assert found["iteration_s"].nunique() == 1


@pytest.mark.skipif(
    not store.list_tables(store.RECORDED, "*/campaign-osf/runs-*.csv"),
    reason="campaign_osf is not recorded yet",
)
class TestRecorded:
    """Laws that no measurement may break, on the recorded campaign."""

    @pytest.fixture(scope="class")
    @classmethod
    def recorded(cls) -> Lab:
        return Lab.load()

    def test_iterations_are_not_shorter_than_computing(self, recorded: Lab) -> None:
        assert (recorded.runs["iteration_s"] >= recorded.runs["compute_s"]).all()
        assert (recorded.runs.groupby("case")["repeat"].nunique() >= 2).all()

    def test_phases_fill_the_communication_time(self, recorded: Lab) -> None:
        rows = osf_overhead.phases(recorded)
        assert (rows[["model_s", "measured_s"]] >= 0).all(axis=None)
        keys = ["network", "workers", "buffer_bytes", "slowest"]
        assert np.allclose(rows.groupby(keys)[["model", "measured"]].sum(), 1)

    def test_a_slow_worker_holds_up_what_is_ready(self, recorded: Lab) -> None:
        """By the laws of negotiation: no message of rank 0 leaves before the slow rank has its part."""
        for case in recorded.cases(negotiated=True):
            ready_s = case.straggler * recorded.workload(case).ready_s
            for timeline in recorded.timelines(case):
                messages = timeline.select((timeline.kind == "all_reduce") & (timeline.rank == 0))
                ends = [int(end) for end in case.ends.split(";")]
                assert (messages.start_s >= ready_s[np.array(ends) - 1] - 1e-9).all()

    def test_replacing_the_dense_layers_helps(self, recorded: Lab) -> None:
        wide = osf_scaling.fig08_lab(recorded).pivot(
            index="workers", columns="network", values="measured"
        )
        both = wide.dropna()
        assert len(both) >= 2
        assert (both["VGG16 replaced"] > both["VGG16"]).all()
        assert (wide.dropna(how="all") <= 1).where(wide.notna(), True).all(axis=None)
