"""Machines side by side: numbers that follow from the tables and mean the same on each of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlkit import store
from ddlkit.core.errors import UserError
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


@given(st.floats(0.1, 1), st.floats(0.1, 1), st.floats(0.01, 3), st.floats(1.0, 5.0))
def test_training_slows_down_while_a_message_is_under_way(
    before_s: float, after_s: float, message_s: float, slowdown: float
) -> None:
    """A message leaves while some of backward is left, which then goes on ``slowdown`` times slower."""
    overlap_s = min(message_s, after_s * slowdown)
    exposed_s = message_s - overlap_s
    rest_s = after_s - overlap_s / slowdown
    table = sharing(before_s + after_s, before_s + message_s + rest_s, message_s, exposed_s)
    (row,) = compare.shared_training(table).to_dict("records")
    assert row["compute_s"] == before_s + after_s
    assert row["overlap_s"] == pytest.approx(overlap_s, abs=1e-9)
    assert row["slowdown"] == pytest.approx(slowdown, rel=1e-6)


def test_training_beside_which_nothing_ran_has_no_slowdown() -> None:
    (alone,) = compare.shared_training(sharing(1.0, 1.5, 0.5, 0.5)).to_dict("records")
    assert alone["overlap_s"] == 0 and np.isnan(alone["slowdown"])
    (still,) = compare.shared_training(sharing(1.0, 1.5, 0.5, 0.0)).to_dict("records")
    assert still["slowdown"] == np.inf


def sharing(
    compute_s: float, iteration_s: float, message_s: float, exposed_s: float
) -> pd.DataFrame:
    """A table of one setting, whose samples are alike."""
    own = {"network": "made-up", "device": "cpu", "batch": 4, "precision": "fp32"}
    counts = "blocks", "threads", "taken_threads", "bytes_per_s_asked", "buckets", "bytes"
    seen = "bytes_per_s", "communication_s", "exposed_communication_s", "overlap_share"
    none = {"ranks": 1, "policy": "none", **dict.fromkeys((*counts, *seen), 0)}
    sent = {"ranks": 2, "policy": "same", **dict.fromkeys(counts, 1), "communication_s": message_s}
    rows = [
        {**none, "quantity": "compute", "seconds": compute_s},
        {**none, **sent, "quantity": "communication", "seconds": message_s},
        {
            **{**none, **sent, "quantity": "iteration", "seconds": iteration_s},
            "exposed_communication_s": exposed_s,
        },
    ]
    frames = [pd.DataFrame({**own, **row, "sample": range(3)}) for row in rows]
    return pd.concat(frames, ignore_index=True)


def test_c_is_the_achieved_over_the_largest_measured_rate(tmp_path: Path) -> None:
    where = {"device": "cpu", "precision": "fp32", "kernel": "product"}
    seconds = {64: 2 * 64**3 / 1e9, 128: 2 * 128**3 / 4e9}
    rows = [{**where, "side": n, "sample": 0, "seconds": t} for n, t in seconds.items()]
    save(tmp_path, "peaks", "cpu", pd.DataFrame(rows))
    recorded = store.load_table(
        store.list_tables(source.default_recording(), "layers-resnet18*r1.csv")[0], "layers"
    )
    save(tmp_path, "layers", "resnet18", recorded)
    (row,) = compare.layer_speeds({"here": Source((tmp_path,))}, "resnet18").to_dict("records")
    assert row["c"] == pytest.approx(row["gflop_per_s"] * 1e9 / 4e9)
    flops = 3 * recorded["flops"].sum()
    compute_s = recorded["forward_s"].sum() + recorded["backward_s"].sum()
    assert row["gflop_per_s"] == pytest.approx(flops / compute_s / 1e9)
    assert row["samples_per_s"] < row["batch"] / compute_s
    assert "issue_share" not in row


def test_share_of_an_iteration_that_a_host_needs_stands_beside_its_speed(tmp_path: Path) -> None:
    """Of each profile its own: made up here for one of two recorded on a processor."""
    there = source.default_recording()
    paths = store.list_tables(there, "layers-resnet18-*.csv")
    for path in paths:
        save(tmp_path, "layers", path.stem, store.load_table(path, "layers"))
        samples = path.with_name(path.name.replace("layers", "samples"))
        rows = store.load_table(samples, "samples")
        if path == paths[0]:
            once = rows[rows["quantity"] == "unhooked_iteration"].assign(quantity="issue")
            rows = pd.concat([rows, once.assign(seconds=once["seconds"] / 4)])
        save(tmp_path, "samples", path.stem, rows)
    found = compare.layer_speeds({"here": Source((tmp_path,))}, "resnet18")
    assert len(found) == len(paths) > 1
    assert found["issue_share"].dropna().tolist() == [pytest.approx(0.25)]


def test_kernels_reach_a_share_of_the_fastest_on_their_machine() -> None:
    """A step's is c, found another way; a network that was not profiled has none."""
    recorded = source.recordings("peaks")
    found = compare.kernel_shares(recorded, ["resnet18", "no such network"])
    rows = found[~found["kernel"].str.startswith("step")]
    assert rows["share"].between(0, 1, inclusive="right").all() and {*rows["unit"]} == {
        "FLOP/s",
        "B/s",
    }
    steps = found[found["kernel"] == "step of ResNet-18"].set_index(["machine", "precision"])[
        "share"
    ]
    speeds = compare.layer_speeds(recorded, "resnet18").query("ranks == 1")
    assert len(steps) == len(found) - len(rows) == len(speeds) > 0
    for row in speeds.to_dict("records"):
        assert steps[row["machine"], row["precision"]] == pytest.approx(row["c"])


def test_a_gpus_peak_is_its_datasheets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Source, "gpu", lambda self, kind: "NVIDIA A100-SXM4-40GB")
    real = Source.table
    monkeypatch.setattr(Source, "table", lambda self, kind: real(self, kind).assign(device="cuda"))
    shares = compare.kernel_shares(source.recordings("peaks"), [])
    found = shares.set_index(["precision", "unit"])["peak"]
    assert found["bf16", "FLOP/s"].unique().tolist() == [312e12]
    assert found["copies", "B/s"].unique().tolist() == [1555e9]


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
