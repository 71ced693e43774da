"""Machines side by side: numbers that follow from the tables and mean the same on each of them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ddlkit import store
from ddlkit.report import compare, source
from ddlkit.report.source import Source


def save(directory: Path, schema: str, point: str, frame: pd.DataFrame) -> None:
    store.save_table(frame, directory, f"{schema}-{point}", schema=schema, command=["test"])


def test_slowdown_is_beside_over_alone() -> None:
    same = {"kernel": "relu", "device": "cpu", "ranks": 1, "threads": 1, "fifo_bytes": 0}
    same |= {"bytes_per_s_asked": 0.0, "bytes_per_s": 1e9}
    alone = {"communication": "none", "blocks": 0, "overlap_share": 0.0, "seconds": 0.5}
    beside = {"communication": "standin", "blocks": 2, "overlap_share": 1.0, "seconds": 0.8}
    rows = pd.DataFrame([{**same, **row} for row in (alone, beside) for _ in range(3)])
    (row,) = compare.slowdowns(rows).to_dict("records")
    assert row["slowdown"] == pytest.approx(1.6)
    assert (row["blocks"], row["overlap_share"]) == (2, 1.0)


def test_c_and_a_hosts_share_are_of_each_profile(tmp_path: Path) -> None:
    """Achieved over the largest measured rate; a time to issue is made up for one of two profiles."""
    where = {"device": "cpu", "precision": "fp32", "kernel": "product", "sample": 0}
    seconds = {64: 2 * 64**3 / 1e9, 128: 2 * 128**3 / 4e9}
    peaks = pd.DataFrame([{**where, "side": n, "seconds": s} for n, s in seconds.items()])
    save(tmp_path, "peaks", "cpu", peaks)
    paths = store.list_tables(source.default_recording(), "layers-resnet18-*.csv")
    for path in paths:
        save(tmp_path, "layers", path.stem, store.load_table(path, "layers"))
    speeds = compare.layer_speeds({"here": Source((tmp_path,))}, "resnet18")
    assert len(speeds) == len(paths) > 1 and "issue_share" not in speeds
    layers = store.load_table(paths[0], "layers")
    compute_s = layers["forward_s"].sum() + layers["backward_s"].sum()
    row = speeds.iloc[0]
    assert row["gflop_per_s"] == pytest.approx(3 * layers["flops"].sum() / compute_s / 1e9)
    assert row["c"] == pytest.approx(row["gflop_per_s"] * 1e9 / 4e9)
    assert row["samples_per_s"] < row["batch"] / compute_s
    samples = store.load_table(paths[0].with_name(paths[0].name.replace("layers", "samples")))
    once = samples[samples["quantity"] == "unhooked_iteration"].assign(quantity="issue")
    save(tmp_path, "samples", "one", pd.concat([samples, once.assign(seconds=once["seconds"] / 4)]))
    speeds = compare.layer_speeds({"here": Source((tmp_path,))}, "resnet18")
    assert speeds["issue_share"].dropna().tolist() == [pytest.approx(0.25)]


def test_kernels_reach_a_share_of_the_fastest_on_their_machine() -> None:
    """A step's is c, found another way; a network that was not profiled has none."""
    recorded = source.recordings("peaks")
    table = compare.kernel_shares(recorded, ["resnet18", "no such network"])
    step = table["kernel"] == "step of ResNet-18"
    rows, steps = table[~step], table[step].set_index(["machine", "precision"])["share"]
    assert rows["share"].between(0, 1, inclusive="right").all()
    assert {*rows["unit"]} == {"FLOP/s", "B/s"}
    speeds = compare.layer_speeds(recorded, "resnet18").query("ranks == 1")
    assert len(steps) == len(speeds) > 0
    for row in speeds.to_dict("records"):
        assert steps[row["machine"], row["precision"]] == pytest.approx(row["c"])


@pytest.mark.parametrize(
    ("factor", "verdict"), [(1.1, "worth it"), (1.0, "not worth it"), (0.9, "slower")]
)
def test_pairs_recover_a_ratio_under_drift(factor: float, verdict: str) -> None:
    rng, rows = np.random.default_rng(3), []
    place = {"network": "n", "link": "lab:1gbit", "workers": 4}
    for repeat in range(20):
        drift = 1 + 0.3 * rng.random()
        for plan, scale in (("exact", 1.0), ("ddp", factor)):
            iteration_s = drift * scale * math.exp(rng.normal(0, 0.002))
            rows.append({**place, "plan": plan, "repeat": repeat, "iteration_s": iteration_s})
    (row,) = compare.paired(pd.DataFrame(rows), "exact").to_dict("records")
    assert row["pairs"] == 20 and row["verdict"] == verdict
    assert row["ratio"] == pytest.approx(factor, rel=0.005)
    assert row["lower"] <= row["ratio"] <= row["upper"]
