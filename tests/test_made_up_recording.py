"""Notebooks show a GPU's recording beside the processor's without change: tried with one that is made up.

It is made from the recorded tables of a processor, as if a GPU were FASTER times as fast, in a directory of
the test's own. Machine, directory and model say that it is made up; it is never data.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import nbformat
import pandas as pd
import pytest

from ddlkit import store
from ddlkit.report import book, compare
from ddlkit.report.source import Source, open_sharing
from test_sharing_gpu import beside_stand_in, kernels_beside

FASTER = 10.0
NAME, MODEL = "made-up-gpu", "Made-up GPU"
PAIR = "made-up-gpus"
"""Another machine, which has several of them."""
KINDS = ("layers", "samples", "peaks", "selection", "contention", "copies", "collectives")
SHARED = ("control", "messages", "copies", "iterations", "spans", "cells")
"""Tables of training that shares a machine with its messages; kernels beside them a GPU has in contention."""
BLOCKS = {"t2-free-normal": "b0", "t1-free-nice10": "b1", "t1-free-normal": "b2", "t2-free-raised": "b4",
          "t1-free-nice10+t2-free-raised": "b1+b0"}  # fmt: skip
"""Which configuration of NCCL is made of one of gloo."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def made_up(frame: pd.DataFrame, kind: str) -> pd.DataFrame:
    """The rows as if they were a GPU's."""
    found = frame.replace({"device": {"cpu": "cuda"}}) if "device" in frame else frame.copy()
    times = found.columns.intersection(["seconds", "forward_s", "backward_s", "update_s"])
    found[times] /= FASTER
    if "bytes_per_s" in found:
        found["bytes_per_s"] *= FASTER
    for column in found.columns.intersection(["backend", "communication"]):
        found[column] = found[column].replace({"gloo": "nccl"})
    if kind == "samples":  # a GPU's tell how long the host was busy, too
        issue = found[found["quantity"] == "unhooked_iteration"].assign(quantity="issue")
        found = pd.concat([found, issue.assign(seconds=issue["seconds"] / 2)], ignore_index=True)
    return found


@pytest.fixture(scope="module")
def processor() -> str:
    """The recording that the committed report was made from."""
    return store.list_recorded()[0].name


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, processor: str) -> Path:
    """A tree with all recorded data, and that of the GPU that is made up."""
    root = tmp_path_factory.mktemp("tree")
    shutil.copytree(store.DATA, root / "data")
    shutil.copytree(store.ROOT / "solutions", root / "solutions")
    gpu = {"model": MODEL, "driver": "", "memory_bytes": 0, "compute_capability": ""}
    suite = store.RECORDED / f"{processor}-suite"
    for path in sorted(
        path for kind in KINDS for path in store.list_tables(suite, f"{kind}-*.csv*")
    ):
        kind = path.name.partition("-")[0]
        machine = store.load_stamp(path)["machine"] | {"name": NAME, "gpus": [gpu]}
        how = {"schema": kind, "command": ["made up from", path.name], "machine": machine}
        name = path.name.replace("-cpu", "-cuda")
        frame = made_up(store.load_table(path, kind), kind)
        store.save_table(frame, root / "data" / "recorded" / NAME, name, **how)
    add_shared(root / "data" / "recorded" / PAIR, machine | {"name": PAIR})
    return root


def add_shared(directory: Path, machine: dict[str, Any]) -> None:
    """Training between GPUs and on one, as if a processor's threads had been blocks."""
    how: dict[str, Any] = {"command": ["made up from", "sharing"], "machine": machine}
    source = open_sharing()
    assert source is not None
    schemas = ("layers", *(f"sharing_{kind}" for kind in SHARED))
    for path in sorted(
        path
        for one in schemas
        for path in store.list_tables(source.directories[0], f"{one}-*.csv*")
    ):
        schema = path.name.partition("-")[0]
        frame = made_up(store.load_table(path, schema), schema)
        if "network" in frame:
            frame["network"] = frame["network"].str.removesuffix("_64")
        if "configuration" in frame:
            frame = frame[frame["configuration"].isin(list(BLOCKS))].replace(
                {"configuration": BLOCKS}
            )
        if len(frame):
            store.save_table(frame, directory, path.name, schema=schema, **how)
    kernels = [kernels_beside("standin", 1, 64), kernels_beside("nccl", 2, 0)]
    for schema, frame in (("sharing", beside_stand_in()), ("contention", pd.concat(kernels))):
        store.save_table(frame, directory, f"{schema}-made-up", schema=schema, **how)


@pytest.fixture(scope="module")
def executed(root: Path) -> Path:
    """The notebooks on contention and on real GPUs, run with that tree, and the reports that they wrote."""
    before = os.environ.get("DDLKIT_ROOT")
    os.environ["DDLKIT_ROOT"] = str(root)  # of the kernels
    try:
        book.run(book.notebooks(["10", "12"]), PAIR, executed=root, reports=root / "reports")
    finally:
        os.environ.pop("DDLKIT_ROOT")
        if before:
            os.environ["DDLKIT_ROOT"] = before
    return root


def said(executed: Path, number: str) -> str:
    """All outputs of a notebook."""
    (notebook,) = book.notebooks([number])
    cells = nbformat.read(str(executed / notebook.name), as_version=4).cells
    return "".join(str(output) for cell in cells for output in cell.get("outputs", []))


def test_the_notebook_on_real_gpus_draws_the_made_up_one(executed: Path, processor: str) -> None:
    """As many times as fast in all, it reaches the same share of its fastest product, and is slowed alike."""
    words = said(executed, "12")
    assert "'name': 'stderr'" not in words and "No GPU of our own" not in words
    (numbers,) = (executed / "reports").rglob("wb-gpu-own.csv")
    assert numbers.with_suffix(".png").is_file()
    drawn = pd.read_csv(numbers).set_index(["axis", "case", "series"])["value"]
    suite = Source((store.RECORDED / f"{processor}-suite",))
    shares = drawn.loc["share of the fastest matrix product [%]"]
    own = compare.layer_speeds({"": suite}, "resnet50").query("precision == 'fp32' and ranks == 1")
    assert shares.loc["ResNet-50", "fp32"] == pytest.approx(100 * own["c"].iloc[-1], rel=1e-4)
    slow = compare.slowdowns(suite.table("contention"))
    relu = slow[(slow["kernel"] == "relu") & (slow["communication"] == "gloo")]["slowdown"]
    longer = drawn.loc["longer than alone [%]"]
    assert longer.loc["relu", "nccl"] == pytest.approx(100 * (relu.median() - 1), rel=1e-4)


def test_training_that_shares_a_gpu_fills_the_figures_of_contention(executed: Path) -> None:
    """Between GPUs by NCCL, and on one beside a stand-in."""
    words = said(executed, "10")
    assert "'name': 'stderr'" not in words and "Stand-in, full speed: " in words
    shown = {"sharing-fig02": "stand-in, full speed", "sharing-fig03": "stand-in, full speed",
             "sharing-fig04": "stand-in, 10 GB/s", "sharing-fig08": "stand-in, full speed"}  # fmt: skip
    for figure, panel in shown.items():
        (numbers,) = (executed / "reports").rglob(f"{figure}.csv")
        table = pd.read_csv(numbers)
        assert {panel, "lab:4gbit"} <= set(table["panel"]), figure
        assert len(set(table.loc[table["panel"] == panel, "column"])) > 1, figure


def test_the_recorded_data_know_nothing_of_it(executed: Path) -> None:
    assert (executed / "data" / "recorded" / NAME).is_dir()
    assert not [path for path in store.DATA.rglob("*") if "made-up" in path.name]
    for path in (executed / "data" / "recorded").glob("made-up-*/*.csv*"):
        stamp = store.load_stamp(path)
        assert stamp["machine"]["name"] in (NAME, PAIR) and stamp["command"][0] == "made up from"
