"""osf's figures in the lab: a measurement made by the model has no error, and the recorded one is whole."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pandas as pd
import pytest

from ddlkit.core.case import Case
from ddlkit.core.cost import AlphaBeta, Table
from ddlkit.core.errors import UserError
from ddlkit.core.iteration import Iteration, predict
from ddlkit.core.plan import FusionPlan, make_plan, none
from ddlkit.core.workload import Workload
from ddlkit.model.calibration import Calibration
from ddlkit.papers import networks, osf
from ddlkit.papers.osf import PHASES, cluster
from ddlkit.report.figures import osf_lab, osf_measured, osf_scaling
from ddlkit.report.figures.osf_lab import Lab
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
    rows = osf_lab.phases(made())
    assert set(rows["buffer_bytes"]) == {0, 25_000_000}
    assert list(rows["phase"]) == [*PHASES, *PHASES]
    # The second repeat takes twice as long: the mean is 1.5 times the model, their difference once.
    assert np.allclose(rows["measured_s"], 1.5 * rows["model_s"], atol=1e-4)
    assert np.allclose(rows["repeatability_s"], rows["model_s"], atol=1e-4)
    for _, part in rows.groupby("buffer_bytes"):
        assert part["measured"].sum() == pytest.approx(1)
        assert np.allclose(part["measured"], part["model"], atol=1e-4)


def test_twins_are_what_was_replayed_both_ways() -> None:
    found = osf_lab.twins(made())
    assert list(found["negotiated"]) == [False, True]
    assert set(found["network"]) == {"ResNet101"}
    assert set(PHASES) <= set(found.columns)
    assert found["iteration_s"].nunique() == 1


# -- ranges over all settings that fit ---------------------------------------------------------

KEYS = ["network", "buffer_bytes", "quantity"]


def test_compatible_settings_are_those_with_the_most_statements_best_first() -> None:
    found = osf_scaling.setting_search()
    settings = osf_scaling.compatible()
    assert len(settings) == found.most(osf_scaling.ANCHOR).sum()
    assert settings[0] == osf_scaling.setting()
    by_unit = [osf_scaling.compatible(unit) for unit in cluster.UNITS]
    assert sum(map(len, by_unit)) == len(settings)
    assert all(
        one.unit == unit for unit, own in zip(cluster.UNITS, by_unit, strict=True) for one in own
    )


def test_formulas_are_exact_where_they_hold() -> None:
    """Without start-ups OSF repaired is the recursion, and CSF is never above it."""
    rng = np.random.default_rng(3)
    for _ in range(20):
        workload = random_workload(rng, 12)
        cost = AlphaBeta(0.0, float(10 ** rng.uniform(-11, -8)))
        found = osf_scaling.formulas(workload, cost)
        simulated = predict(workload, none(workload), cost).scaling_factor
        assert found["OSF repaired"] == pytest.approx(simulated, rel=1e-9)
        assert found["CSF"] <= simulated * (1 + 1e-12)


def test_the_range_of_a_statement_is_that_of_its_figure() -> None:
    """VGG-16's scaling factor, computed for every compatible setting and looked up in the search."""
    low, high = osf_scaling.setting_search().range_of("VGG-16: scaling factor", osf_scaling.ANCHOR)
    frame = osf_scaling.over(osf_scaling.fig03, ["network", "quantity"]).set_index(
        ["network", "quantity"]
    )
    row = frame.loc["VGG16", "simulated"]
    assert (low, high) == pytest.approx((row["model_low"], row["model_high"]), rel=1e-9)


KNOWN_SIZES = tuple(1024 << k for k in range(17))
OWN_SIZES = sorted({4 * count for count in networks.parameters("ResNet101")})


# -- figure 10 ---------------------------------------------------------------------------------


def samples(sizes: tuple[int, ...] | list[int], factor: float = 1.0) -> pd.DataFrame:
    """All-reduces of 4 ranks over a link that is exactly a ring."""
    repeated = np.repeat(sizes, 3)
    seconds = factor * osf.update_s(repeated, 4, 125e6, overhead_s=9e-4)
    columns = {"bytes": repeated, "seconds": seconds, "collective": "all_reduce"}
    return pd.DataFrame({**columns, "link": "lab:1gbit", "ranks": 4, "stolen": 0.0, "in_flight": 1})


def test_a_true_ring_is_predicted_by_all_but_the_logarithm() -> None:
    tensors = samples(OWN_SIZES).assign(network="ResNet101")
    frame = osf_measured.fig10(samples(KNOWN_SIZES), tensors, "ResNet101")
    assert set(frame["model"]) == set(osf_measured.MODELS)
    assert frame["bandwidth_delay_bytes"].iloc[0] == pytest.approx(125e6 * 9e-4 / 3)
    worst = frame.groupby("model")["error"].agg(lambda column: column.abs().max())
    assert worst[list(osf_measured.LINE_MODELS)].max() < 1e-9
    assert worst["piecewise:BDP"] > 0.01
    assert frame["repeated"].abs().max() < 1e-12
    per_tensor = frame[frame["model"] == "alpha_beta"]["tensors"]
    assert per_tensor.sum() == len(networks.parameters("ResNet101"))


def test_forms_are_told_apart_only_where_runs_differ_by_less() -> None:
    """A true ring: on one day the line beats Eq 18 on small tensors, on another nothing is decided."""
    for factor, decided in ((1.0, True), (1.5, False)):
        tensors = samples(OWN_SIZES, factor).assign(network="ResNet101")
        told = osf_measured.decided(osf_measured.fig10(samples(KNOWN_SIZES), tensors, "ResNet101"))
        small = told[told["tensors"] == "small"].iloc[0]
        assert small["line"] in osf_measured.LINE_MODELS and small["decided"] == decided
        assert small["runs_differ"] == pytest.approx(1 - 1 / factor)
        assert (small["line_error"] < small["eq18_error"]) or not decided


def test_a_link_that_was_not_measured_before_is_told() -> None:
    tensors = samples(OWN_SIZES).assign(network="ResNet101", link="lab:2gbit")
    with pytest.raises(UserError, match="no link with all-reduces of ResNet101"):
        osf_measured.fig10(samples(KNOWN_SIZES), tensors, "ResNet101")


def test_no_model_has_seen_the_size_that_it_predicts() -> None:
    known, tensors = samples(KNOWN_SIZES), samples(OWN_SIZES).assign(network="ResNet101")
    poisoned = known["bytes"] == 65536  # in both tables: its time must count for nothing there
    spoiled = known.assign(seconds=known["seconds"].where(~poisoned, 10.0))
    at_it = [
        frame[frame["bytes"] == 65536].set_index("model")["error"]
        for frame in (osf_measured.fig10(part, tensors, "ResNet101") for part in (known, spoiled))
    ]
    pd.testing.assert_series_equal(*at_it)
