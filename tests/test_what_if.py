"""What limits where, how much each kind of task matters, and what an upgrade gains."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddlkit import store
from ddlkit.cli import ask
from ddlkit.core import plan as plans
from ddlkit.core.errors import UserError
from ddlkit.core.plan import FusionPlan
from ddlkit.model import Calibration, forecast
from ddlkit.papers.dag import IterationTimes
from ddlkit.papers.dag.tasks import schedule
from ddlkit.papers.dag.training import Gpus
from ddlkit.report.figures import dag_inputs, what_if
from ddlkit.report.figures.what_if import Setting
from ddlkit.report.source import Source

positive = st.floats(0.01, 10)


@st.composite
def made(draw: st.DrawFn) -> Setting:
    n = draw(st.integers(1, 4))
    column = st.lists(positive, min_size=n, max_size=n).map(np.array)
    forward_s, backward_s, sent_s = (draw(column) for _ in range(3))
    fetched = draw(positive), draw(positive)
    times = IterationTimes(*fetched, forward_s, backward_s, sent_s, draw(positive))
    plan = FusionPlan("none", tuple(range(1, n + 1)))
    return Setting(times, plan, Gpus(), 8, draw(positive), stands_for=3)


@settings(deadline=None, max_examples=15)
@given(made())
def test_one_of_ranks_that_are_alike_stands_for_all(one: Setting) -> None:
    everyone = replace(one, gpus=Gpus(3, 1), stands_for=1)
    alone, together = (schedule(setting.graph()) for setting in (one, everyone))
    assert alone.period_s == pytest.approx(together.period_s)
    assert one.samples_per_s(alone) == pytest.approx(everyone.samples_per_s(together))
    assert one.samples_per_s(alone) == pytest.approx(3 * 8 / alone.period_s)


@settings(deadline=None, max_examples=15)
@given(made(), st.floats(1, 4))
def test_faster_tasks_never_cost_and_slower_ones_never_gain(one: Setting, factor: float) -> None:
    table = what_if.sensitivity(one, factor)
    assert (table["faster_s"] <= table["iteration_s"] * (1 + 1e-9)).all()
    assert (table["iteration_s"] <= table["slower_s"] * (1 + 1e-9)).all()
    assert (
        table["iteration_s"] - table["faster_s"] <= table["total_s"] * (1 - 1 / factor) + 1e-9
    ).all()
    assert (
        table["slower_s"] - table["iteration_s"] <= table["total_s"] * (factor - 1) + 1e-9
    ).all()
    assert (table["slower_s"] - table["faster_s"]).is_monotonic_decreasing
    still = what_if.sensitivity(one, 1.0)
    assert np.array_equal(still["faster_s"], still["slower_s"])


@settings(deadline=None, max_examples=10)
@given(made())
def test_an_upgrade_of_everything_is_worth_its_factor(one: Setting) -> None:
    """And machines of the same kind, with messages that take as long, train on as many more pictures."""
    resources = ["disk", "cpu", "copy", "gpu", "link"]
    more = {"more": replace(one, stands_for=6)}
    table = what_if.upgrades(one, {"all": [(name, 0.5) for name in resources]}, more)
    assert table["upgrade"].tolist() == ["as it is", "all", "more"]
    assert table["gain"].to_numpy() == pytest.approx([1, 2, 2])


def test_our_setting_is_what_the_validated_model_forecasts() -> None:
    """Messages of PyTorch's buckets are larger than most that were measured: a line must hold there."""
    source = Source((store.RECORDED / "cpu-2x-amd-epyc",))
    one = what_if.ours(
        source, "resnet50", "lab:1gbit", 4, dag_inputs.recorded() / "inputs-alone-cpu.csv"
    )
    work = source.profile("resnet50").workload()
    told = Calibration.of(source.table("collectives"), draws=0).between("lab:1gbit", 4)
    forecast_s = forecast(work, plans.ddp(work), told).prediction.iteration_s
    assert schedule(one.graph()).period_s == pytest.approx(forecast_s, rel=0.01)


def test_files_of_ones_own_predict_what_the_recording_does(tmp_path: Path) -> None:
    source = Source((store.RECORDED / "cpu-2x-amd-epyc",))
    mine = what_if.own_files(source, "resnet50", "lab:1gbit", 4, tmp_path)
    found = ask("predict --plan ddp", **mine)
    work = source.profile("resnet50").workload()
    told = Calibration.of(source.table("collectives"), draws=0).between("lab:1gbit", 4)
    expected_s = forecast(work, plans.ddp(work), told).prediction.iteration_s
    assert found["iteration_s"] == pytest.approx(expected_s, rel=2e-3)
    with pytest.raises(UserError, match="unknown plan"):
        ask("predict --plan nonsense", **mine)
    with pytest.raises(UserError, match="unrecognized arguments: --no-such"):
        ask("predict", **mine, no_such=1)


def test_others_clusters_are_limited_by_what_their_numbers_say() -> None:
    """Sixteen readers of one disk; and V100s whose messages their network hides."""
    found = what_if.theirs()
    table = what_if.limits(found).set_index("setting")
    k80, few, many = table.index
    read_s = found[k80].times.io_s
    assert table.loc[k80, "iteration_s"] == pytest.approx(16 * read_s)
    assert table.loc[k80, "limited_by"] == "disk" and table.loc[k80, "gpus"] == 16
    assert table.loc[few, "gpus"] == 4 and table.loc[many, "gpus"] == 128
    assert table.loc[few, "iteration_s"] <= table.loc[many, "iteration_s"]
    assert table[["disk", "gpu", "link"]].sum(axis=1).to_numpy() == pytest.approx(1)
