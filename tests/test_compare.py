"""Machines side by side: numbers that follow from the tables and mean the same on each of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.core.link import busbw
from ddlkit.report import compare, source
from ddlkit.report.source import Source


def save(directory: Path, schema: str, point: str, frame: pd.DataFrame) -> None:
    store.save_table(frame, directory, f"{schema}-{point}", schema=schema, command=["test"])


def contention(alone_s: float, beside_s: float) -> pd.DataFrame:
    same = {"kernel": "relu", "shape": "4", "dtype": "float32", "device": "cpu", "ranks": 1}
    taken = "taken_blocks", "taken_threads", "registers", "shared_bytes", "cluster", "fifo_bytes"
    none = dict.fromkeys(taken, 0)
    rows = [
        {"communication": "none", "blocks": 0, "threads": 0, "overlap_share": 0.0, "s": alone_s},
        {
            "communication": "standin",
            "blocks": 2,
            "threads": 1,
            "overlap_share": 1.0,
            "s": beside_s,
        },
    ]
    frames = [
        pd.DataFrame({**same, **none, **row, "sample": range(3), "seconds": row["s"]})
        for row in rows
    ]
    table = pd.concat(frames, ignore_index=True).drop(columns="s")
    return table.assign(bytes_per_s_asked=0.0, bytes_per_s=1e9)


def test_slowdown_is_beside_over_alone() -> None:
    (row,) = compare.slowdowns(contention(0.5, 0.8)).to_dict("records")
    assert row["slowdown"] == pytest.approx(1.6)
    assert (row["blocks"], row["overlap_share"]) == (2, 1.0)


def test_c_is_the_achieved_over_the_largest_measured_rate(tmp_path: Path) -> None:
    where = {"device": "cpu", "precision": "fp32", "kernel": "product"}
    seconds = {64: 2 * 64**3 / 1e9, 128: 2 * 128**3 / 4e9}
    rows = [{**where, "side": n, "sample": 0, "seconds": t} for n, t in seconds.items()]
    save(tmp_path, "peaks", "cpu", pd.DataFrame(rows))
    recorded = store.load_table(
        next(source.default_recording().glob("layers-resnet18*r1.csv")), "layers"
    )
    save(tmp_path, "layers", "resnet18", recorded)
    (row,) = compare.layer_speeds({"here": Source((tmp_path,))}, "resnet18").to_dict("records")
    assert row["c"] == pytest.approx(row["gflops"] * 1e9 / 4e9)
    flops = 3 * recorded["flops"].sum()
    compute_s = recorded["forward_s"].sum() + recorded["backward_s"].sum()
    assert row["gflops"] == pytest.approx(flops / compute_s / 1e9)
    assert row["samples_per_s"] < row["batch"] / compute_s


def test_bus_bandwidth_is_that_of_the_collective() -> None:
    recording = Source((source.default_recording(),))
    table = compare.bus_bandwidths({"there": recording}, {"1 MiB": 2**20, "3 B": 3})
    samples = recording.table("collectives")
    for row in table.to_dict("records"):
        same = samples[["link", "ranks", "collective"]] == [
            row["link"],
            row["ranks"],
            row["collective"],
        ]
        seconds = samples[same.all(axis=1) & (samples["bytes"] == 2**20)]["seconds"].median()
        expected = busbw(row["collective"], row["ranks"], 2**20, seconds) * 8 / 1e9
        assert row["1 MiB"] == pytest.approx(expected)
        assert np.isnan(row["3 B"])


def test_machines_are_those_that_hold_the_kind(tmp_path: Path) -> None:
    save(
        tmp_path,
        "peaks",
        "cpu",
        pd.DataFrame(
            {
                **{"device": ["cpu"], "precision": "fp32", "kernel": "product"},
                **{"side": 8, "sample": 0, "seconds": 1.0},
            }
        ),
    )
    assert "here" in source.machines("peaks", str(tmp_path))
    assert "here" not in source.machines("layers", str(tmp_path))
    assert set(source.machines("runs", str(tmp_path))) <= {
        path.name for path in store.list_recorded()
    }
    with pytest.raises(UserError, match="no table of nonsense anywhere"):
        source.machines("nonsense", str(tmp_path))
