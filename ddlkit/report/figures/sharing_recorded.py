"""Real training that was recorded before sharing was looked at, with and without its term.

Two sessions trained ResNet-18 on two ranks, one over 500 Mbit/s between namespaces, one over loopback; and
one measured kernels beside a running all-reduce over loopback. What computing loses is taken in proportion to
the bytes that are moved: at 500 Mbit/s a twelfth of what it is beside an all-reduce at full speed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from ddlkit import store
from ddlkit.core.case import CASE_COLUMNS, Case
from ddlkit.core.cost import Table
from ddlkit.core.iteration import Iteration
from ddlkit.core.link import LARGE
from ddlkit.model.predictor import forecast_case, make_plan
from ddlkit.report import accuracy, compare
from ddlkit.report.source import Source

LAB, LOOPBACK = "cpu-2x-amd-epyc", "cpu-2x-amd-epyc-suite"
"""Recordings of one kind of machine: training in the lab; training over loopback and kernels beside it."""


def in_all() -> pd.DataFrame:
    """ResNet-18 on two ranks: measured, and by the validated model with and without the term; a row a plan.

    Columns: link, plan, measured_s, none, term (s), slowdown, message_slowdown. Computing is scaled to what
    the same run took without communication.
    """
    return pd.DataFrame([*_in_lab(), _over_loopback()])


def _in_lab() -> Iterator[dict[str, object]]:
    own = Source((store.RECORDED / LAB,))
    calibration, runs = accuracy.calibrated(own.table("collectives"), draws=0), own.table("runs")
    for case in accuracy.measured(runs[runs["kind"] == "training"]).to_dict("records"):
        named = Case(**{name: case[name] for name in CASE_COLUMNS})
        copied = case["copy_s_per_byte"]
        said = forecast_case(named, own.workloads(), calibration, copy_s_per_byte=copied).iteration
        yield _both(case, said, _term(case["link_bits_per_s"] / 8))


def _over_loopback() -> dict[str, object]:
    own = Source((store.RECORDED / LOOPBACK,))
    (case,) = accuracy.measured(own.table("runs")).to_dict("records")
    work = own.profile(case["network"]).workload()
    said = Iteration(work, make_plan(case["plan"], work), _free_cost())
    return _both(case, said, _term(np.inf))


def _free_cost() -> Table:
    """An all-reduce of two ranks over loopback, alone."""
    rows = Source((store.RECORDED / LOOPBACK,)).table("collectives")
    rows = rows[(rows["collective"] == "all_reduce") & (rows["ranks"] == 2)]
    medians = rows.groupby("bytes")["seconds"].median()
    return Table(medians.index.to_numpy(float), medians.to_numpy())


def _term(bytes_per_s: float) -> tuple[float, float]:
    """Slowdown of computing beside messages of that many bytes a second, and of messages beside it."""
    rows = Source((store.RECORDED / LOOPBACK,)).table("contention")
    rows = rows[(rows["ranks"] == 2) & rows["communication"].isin(["none", "gloo"])]
    found = compare.slowdowns(rows)
    moved = found["bytes_per_s"].median()
    free = LARGE / float(_free_cost()(LARGE))
    of_computing = (found["slowdown"].median() - 1) * min(1.0, bytes_per_s / moved)
    return max(0.0, of_computing), max(0.0, free / moved - 1)


def _both(case: dict[str, Any], said: Iteration, slowed: tuple[float, float]) -> dict[str, object]:
    stretch = case["measured_compute_s"] / said.workload.compute_s
    bare = replace(said, workload=said.workload.scaled(stretch))
    of_computing, of_messages = slowed
    link = replace(bare.link, slowdown=of_computing, message_slowdown=of_messages)
    return {
        "link": case["link"],
        "plan": case["plan"],
        "measured_s": case["measured_iteration_s"],
        "none": bare.prediction.iteration_s,
        "term": replace(bare, link=link).prediction.iteration_s,
        "slowdown": of_computing,
        "message_slowdown": of_messages,
    }
