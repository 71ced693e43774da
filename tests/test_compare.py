"""Machines side by side: numbers that follow from the tables and mean the same on each of them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ddlkit import store
from workbook.common import source
from workbook.common.source import Source
from workbook.validate import compare


def save(directory: Path, schema: str, point: str, frame: pd.DataFrame) -> None:
    store.save_table(
        frame, directory, f"{schema}-{point}", schema=schema, command=["test"]
    )


def test_slowdown_is_beside_over_alone() -> None:
    same = {
        "kernel": "relu",
        "device": "cpu",
        "ranks": 1,
        "threads": 1,
        "fifo_bytes": 0,
    }
    same |= {"bytes_per_s_asked": 0.0, "bytes_per_s": 1e9}
    alone = {"communication": "none", "blocks": 0, "overlap_share": 0.0, "seconds": 0.5}
    beside = {
        "communication": "standin",
        "blocks": 2,
        "overlap_share": 1.0,
        "seconds": 0.8,
    }
    rows = pd.DataFrame([{**same, **row} for row in (alone, beside) for _ in range(3)])
    (row,) = compare.slowdowns(rows).to_dict("records")
    assert row["slowdown"] == pytest.approx(1.6)
    assert (row["blocks"], row["overlap_share"]) == (2, 1.0)


def test_c_is_achieved_over_the_largest_measured_rate(tmp_path: Path) -> None:
    where = {"device": "cpu", "precision": "fp32", "kernel": "product", "sample": 0}
    seconds = {64: 2 * 64**3 / 1e9, 128: 2 * 128**3 / 4e9}
    peaks = pd.DataFrame(
        [{**where, "side": n, "seconds": s} for n, s in seconds.items()]
    )
    save(tmp_path, "peaks", "cpu", peaks)
    path = store.list_tables(source.teaching_recording(), "layers-resnet18-*.csv")[0]
    layers = store.load_table(path, "layers")
    save(tmp_path, "layers", path.stem, layers)
    (row,) = compare.steps(Source((tmp_path,))).to_dict("records")
    compute_s = layers["forward_s"].sum() + layers["backward_s"].sum()
    assert row["rate"] == pytest.approx(3 * layers["flops"].sum() / compute_s)
    assert row["c"] == pytest.approx(row["rate"] / 4e9) and row["network"] == "resnet18"


def test_kernels_reach_a_share_of_the_fastest_on_their_machine() -> None:
    """A network that was not profiled has no steps."""
    table = compare.kernel_shares(
        source.recordings("peaks"), ["resnet18", "no such network"]
    )
    assert {*table["unit"]} == {"FLOP/s", "B/s"}
    steps = table[table["kernel"] == "step of ResNet-18"]
    assert table["share"].drop(index=steps.index).between(0, 1, inclusive="right").all()
    assert (
        len(steps) > 0
        and steps["share"].to_list() == (steps["rate"] / steps["peak"]).to_list()
    )
    fastest = table[table["kernel"].str.startswith(("product", "copy"))]
    assert (fastest["rate"] <= fastest["peak"]).all()


def test_pairs_recover_a_ratio_under_drift() -> None:
    factor, rng, rows = 1.1, np.random.default_rng(3), []
    place = {"network": "n", "link": "lab:1gbit", "workers": 4}
    for repeat in range(20):
        drift = 1 + 0.3 * rng.random()
        for plan, scale in (("exact", 1.0), ("ddp", factor)):
            iteration_s = drift * scale * math.exp(rng.normal(0, 0.002))
            rows.append(
                {**place, "plan": plan, "repeat": repeat, "iteration_s": iteration_s}
            )
    (row,) = compare.paired(pd.DataFrame(rows), "exact").to_dict("records")
    assert row["pairs"] == 20 and row["upper"] - row["lower"] < 0.01
    assert row["ratio"] == pytest.approx(factor, rel=0.005)
    assert row["lower"] <= row["ratio"] <= row["upper"]
