"""Real DistributedDataParallel on two ranks: the buckets are the ones asked for, times are told apart."""

from __future__ import annotations

import functools

import numpy as np
import pandas as pd
import pytest

from ddlkit.core.case import Case
from ddlkit.core.timeline import Timeline
from ddlkit.jobs import LOGS
from ddlkit.jobs.clock import Budget
from ddlkit.jobs.launch import Loopback, launch
from ddlkit.measure.layers import profile_layers
from ddlkit.measure.training import TrainingSettings, training_job
from workbook.record import zoo as zoo  # makes lenet5 known to the ranks, too


@functools.cache
def ready_bytes(network: str) -> list[int]:
    """Bytes of each gradient, in the order in which they become ready."""
    once = Budget(warmup=1, min_repeats=1, max_repeats=1)
    profile, _ = profile_layers(network, 1, threads=1, budget=once)
    return [int(size) for size in profile.workload().bytes]


NETWORK, BATCH = "lenet5", 16


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pd.DataFrame]:
    """One launch on two ranks under four plans, one of which no DDP can follow."""
    sizes = ready_bytes(NETWORK)
    plans = {
        "none": sizes,
        "single": [sum(sizes)],
        "cuts:3,7": [sum(sizes[:3]), sum(sizes[3:7]), sum(sizes[7:])],
        "impossible": [20, sum(sizes) - 20],  # ends inside the first tensor
    }
    out = tmp_path_factory.mktemp("training")
    settings = TrainingSettings(NETWORK, BATCH, plans, repeats=2, iterations=2)
    tables = launch(training_job, settings, ranks=2, place=Loopback(), out=out)
    assert not (out / LOGS).exists()
    return tables


def test_the_buckets_are_those_asked_for_and_a_plan_that_came_out_otherwise_is_not_timed(
    measured: dict[str, pd.DataFrame],
) -> None:
    assert set(measured["runs"]["plan"]) == {"none", "single", "cuts:3,7"}
    grouped = (
        measured["buckets"].groupby(["case", "source"])["bytes"].agg(list).unstack()
    )
    followed = grouped.index.isin(measured["runs"]["case"])
    assert (grouped["asked"] == grouped["rebuilt"]).tolist() == followed.tolist()
    assert set(grouped["rebuilt"].map(sum)) == {sum(ready_bytes(NETWORK))}
    (other,) = grouped[~followed].to_dict("records")
    assert other["asked"][0] == 20 and other["rebuilt"][0] == ready_bytes(NETWORK)[0]


def test_runs_are_rows_of_their_case(measured: dict[str, pd.DataFrame]) -> None:
    runs = measured["runs"]
    assert len(runs) == 3 * 2 * 2
    # Drift of the machine meets all plans alike: each round goes through all of them.
    assert runs["repeat"].is_monotonic_increasing
    assert (runs.groupby("repeat")["plan"].nunique() == 3).all()
    for row in runs.to_dict("records"):
        assert Case.from_row(row).key == row["case"]
    ends = dict(runs[["plan", "ends"]].drop_duplicates().to_numpy().tolist())
    assert ends["single"] == "10" and ends["cuts:3,7"] == "3;7;10"
    assert ends["none"] == ";".join(map(str, range(1, 11)))
    first = runs.iloc[0]
    assert (first["kind"], first["link"], first["workers"]) == (
        "training",
        "loopback",
        2,
    )
    assert (first["batch"], first["origin"]) == (BATCH, "measured")
    assert set(runs["precision"]) == {"fp32"}
    assert np.allclose(
        runs["exposed_communication_s"],
        runs["iteration_s"] - runs["compute_s"],
        atol=1e-12,
    )
    assert (runs["processor_load"] > 0).all(), "two ranks were computing"


def test_the_profiled_iteration_shows_every_bucket(
    measured: dict[str, pd.DataFrame],
) -> None:
    spans = measured["timeline"]
    for case in measured["runs"]["case"].unique():
        timeline = Timeline.from_rows(spans[spans["case"] == case].to_dict("records"))
        rebuilt = measured["buckets"].query("case == @case and source == 'rebuilt'")[
            "bytes"
        ]
        messages = timeline.select(timeline.kind == "all_reduce")
        assert messages.bytes.tolist() == rebuilt.tolist()
        assert messages.group.tolist() == list(range(len(rebuilt)))
        assert (messages.start_s[1:] >= messages.end_s[:-1] - 1e-5).all()
        assert {"forward", "backward", "update"} <= set(timeline.kind.tolist())
        assert timeline.start_s.min() == 0.0
        backward = timeline.select(timeline.kind == "backward")
        assert messages.start_s[0] >= backward.start_s[0]
