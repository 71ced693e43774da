"""Every kind of points that a suite may ask for is measured once, at its smallest; every part starts."""

from __future__ import annotations

import inspect
import itertools
import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import workbook.cli
from ddlkit import cli, store
from ddlkit.cli import command
from ddlkit.core.collective import COLLECTIVES
from ddlkit.core.errors import UserError
from ddlkit.jobs.clock import Budget
from ddlkit.measure import parts
from ddlkit.measure.needs import Gpus
from ddlkit.measure.session import Point, Unavailable
from places import ROOT
from workbook.record import grammar, needs, recording
from workbook.record.kinds import KINDS
from workbook.record.recording import record

Described = dict[str, Any]
BRIEF = {"warmup": 0, "min_repeats": 2, "max_repeats": 2, "max_s": 0.05}
NETWORK = "lenet5:2"
LAB = {"ranks": 2, "rate": "1gbit"}
FEW = {"epochs": 1, "seeds": [0], "training_images": 32, "held_out_images": 8}
LAYERS = {"measure": "layers", "networks": NETWORK, "budget": BRIEF}
MESSAGES = {
    "measure": "collectives",
    "sizes": ["4KiB", "64KiB", "1MiB"],
    "collectives": "all_reduce",
    "budget": BRIEF,
}
BESIDE = {"measure": "slowdowns", "networks": NETWORK, "budget": BRIEF}
TRAINING = {"networks": NETWORK, "repeats": 1, "iterations": 1}

SMALLEST: dict[str, tuple[Described, set[str]]] = {
    "drift": ({"moment": "start", "side": 64, "size": "64KiB"}, {"drift"}),
    "matrix_products": (
        {"precisions": ["fp32"], "sides": [64], "budget": BRIEF},
        {"peaks"},
    ),
    "memory_copies": ({"sizes": ["4KiB"], "budget": BRIEF}, {"copies"}),
    "input_alone": (
        {"batch": 2, "side": 32, "width": 64, "height": 48, "budget": BRIEF},
        {"inputs"},
    ),
    "cost_models_of_torch": ({}, {"estimators"}),
    "selections": ({"brief": True}, {"selection"}),
    "layers": ({**LAYERS, "ranks": 1}, {"layers", "samples"}),
    "collectives": (MESSAGES, {"collectives"}),
    "slowdowns": (BESIDE, {"slowdown"}),
    "trainings": (TRAINING, {"buckets", "runs", "timeline"}),
    "convergences": (FEW, {"convergence"}),
    "sparse_convergences": (FEW, {"sparse_convergence"}),
    "replays": (
        {**LAB, "networks": NETWORK, "plans": ["single"], "rounds": 1},
        {"runs", "timeline"},
    ),
    "campaign": (
        {
            "networks": NETWORK,
            "workers": 2,
            "rates": "1gbit",
            "plans": ["single"],
            "rounds": 1,
            "calibration": "quick",
        },
        {"collectives", "layers", "runs", "samples", "timeline"},
    ),
}
"""By kind, what a file says of the smallest such point, and the tables that it leaves."""
GPU: dict[str, Described] = {
    "kernels_beside_messages": {"brief": True},
    "training_beside_messages": {"networks": NETWORK, "brief": True, "budget": BRIEF},
}
"""Kinds that need a GPU."""
IN_LABS = ("replays", "campaign")
BEFORE_REPLAYS: list[Described] = [{**LAYERS, "ranks": 1}, {**MESSAGES, **LAB}]
"""The points that give what a replay reads."""


def written(directory: Path, *points: Described) -> str:
    file = directory / "asked.json"
    file.write_text(json.dumps({"points": points}))
    return str(file)


def measured(
    directory: Path, capsys: pytest.CaptureFixture[str], *points: Described
) -> Path:
    """Where the points were measured in one recording, each of them to its end."""
    out = directory / "out"
    with pytest.MonkeyPatch.context() as patch:
        # Ranks may start slowly: others may hold the processor.
        patch.setattr(parts, "PATIENCE", 20 * parts.PATIENCE)
        record(written(directory, *points), device="cpu", out=out)
    said = capsys.readouterr().err
    (done,) = re.findall(r"(\d+) of (\d+) measurements? done$", said, re.MULTILINE)
    assert int(done[0]) == int(done[1]) >= len(points), said
    return out


def tables_of(out: Path) -> set[str]:
    """The schemas of all tables there, each of which has rows, and times above zero."""
    schemas = set[str]()
    for path in store.list_tables(out, "**/*.csv*"):
        schema = path.name.partition("-")[0].partition(".")[0]
        rows = store.load_table(path, schema)
        assert len(rows) > 0, path.name
        if "seconds" in rows:
            assert rows["seconds"].sum() > 0, path.name
        schemas.add(schema)
    return schemas - {"outcomes"}


def test_every_kind_has_a_row_in_the_table_of_needs() -> None:
    """And the page that explains it to users has the same table."""
    assert needs.NEEDS.keys() >= KINDS.keys()
    assert needs.table() in (ROOT / "docs" / "INSTALL.md").read_text()


@pytest.mark.parametrize("kind", [*KINDS])
def test_what_the_machine_lacks_for_a_kind_is_named(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = needs.NEEDS[kind]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    point = Point("any", "point", dict, 7.0)
    assert row.offer(point, on_gpu=True, ranks=4) is point
    with_gpus = row.gpus in (Gpus.ONE, Gpus.EACH_RANK)
    assert bool(row.lacking(on_gpu=True, ranks=5)) == (row.gpus is Gpus.EACH_RANK)
    assert bool(row.lacking(on_gpu=False)) == (row.gpus is Gpus.ONE)
    assert not row.lacking(on_gpu=True, ranks=5, in_lab=True)
    if with_gpus:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
        refused = row.offer(point, on_gpu=True, ranks=2)
        assert refused.estimate_s == 0.0 and refused.key == point.key
        with pytest.raises(Unavailable, match="^needs .*, and there are 0 to measure"):
            refused.measure()
    if row.packages or row.needs_network:
        monkeypatch.setattr("ddlkit.measure.needs.find_spec", lambda module: None)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
        network = "resnet18" if row.needs_network else ""
        package = "torchvision" if row.needs_network else "pillow"
        assert f"needs {package}" in row.lacking(on_gpu=True, network=network)


def test_every_kind_has_its_smallest_point() -> None:
    assert SMALLEST.keys() | GPU.keys() == KINDS.keys()
    assert not SMALLEST.keys() & GPU.keys()


@pytest.mark.slow
def test_every_kind_leaves_the_tables_of_its_smallest_point(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one recording, as a suite asks for them: no table is left by two of these kinds."""
    smallest = {kind: SMALLEST[kind] for kind in SMALLEST if kind not in IN_LABS}
    points = [
        {**described, "measure": kind} for kind, (described, _) in smallest.items()
    ]
    expected = [schema for _, schemas in smallest.values() for schema in schemas]
    assert len({*expected}) == len(expected)
    assert tables_of(measured(tmp_path, capsys, *points)) == {*expected}


@pytest.mark.slow
@pytest.mark.lab
@pytest.mark.usefixtures("require_lab")
def test_replays_and_training_in_a_lab_follow_what_is_measured_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training = {**TRAINING, **LAB, "measure": "trainings", "plans": ["ddp", "single"]}
    replays, tables = SMALLEST["replays"]
    out = measured(
        tmp_path,
        capsys,
        *BEFORE_REPLAYS,
        {**LAYERS, "ranks": 2},
        {**replays, "measure": "replays"},
        training,
    )
    assert tables <= tables_of(out)
    kinds = set[str]()
    for path in store.list_tables(out, "runs-*.csv*"):
        kinds |= {*store.load_table(path, "runs")["kind"]}
    assert kinds == {"replay", "training"}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != grammar.CAMPAIGN])
def test_the_arguments_of_a_point_fit_the_function_that_measures(
    kind: str, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr("ddlkit.lab.network.why_unavailable", lambda: "")
    if kind in GPU and device == "cpu":
        pytest.skip("there is nothing to measure without a GPU")
    described = GPU[kind] if kind in GPU else SMALLEST[kind][0]
    file = written(tmp_path, {**described, "measure": kind})
    listed = grammar.points(out=tmp_path, session=1, name=file, device=device)
    points = [*listed.opening, *listed.body, *listed.closing]
    assert points
    for point in points:
        assert isinstance(point.measure, partial) or kind == "cost_models_of_torch"
        if isinstance(point.measure, partial):
            made = point.measure
            inspect.signature(made.func).bind(*made.args, **made.keywords)


SUITES = sorted(path.stem for path in grammar.SUITES.glob("*.json"))


@pytest.mark.parametrize(
    ("part", "options"),
    [
        *itertools.product(
            recording.PARTS, (["--suite", "quick"], ["--suite", "full"])
        ),
        # A suite says itself how long it measures, and takes no other.
        *((suite, []) for suite in SUITES),
    ],
)
def test_every_part_of_a_recording_starts(
    part: str,
    options: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    argv = ["record", part, "--dry-run", "--out", str(tmp_path), *options]
    on_gpu = part in ("gpu", "gpu-long") and not torch.cuda.is_available()
    status = workbook.cli.main(argv)
    said = capsys.readouterr()
    if on_gpu:
        assert status and "no GPU" in said.err and said.err.count("\n") == 1
    elif "the lab " not in said.err:
        assert not status and re.search(
            r"^0 of [1-9]\d* measurements? done", said.out, re.M
        )


def test_all_of_a_suite_lacks_what_is_by_name() -> None:
    """Copies can be asked for; a recording of all else does not grow by them."""
    for suite in ("quick", "full"):
        whole, copies = (
            str(record(part, suite=suite, out=Path("none"), dry_run=True))
            for part in ("all", "copies")
        )
        assert "copies/" not in whole and copies.startswith("copies/")


@pytest.mark.parametrize("part", command.PARTS)
def test_every_part_of_a_measurement_starts(
    part: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not cli.main(["measure", part, "--dry-run", "--out", str(tmp_path)])
    said = capsys.readouterr().out
    assert re.search(r"^0 of [1-9]\d* measurements? done", said, re.M)


@pytest.mark.parametrize("rate_bits_per_s", [0.0, 1e9])
def test_every_network_and_batch_is_a_measurement_of_its_own(
    rate_bits_per_s: float, tmp_path: Path
) -> None:
    networks = [("resnet18", 1), ("resnet18", 2), ("vgg16", 1)]
    keys: list[str] = []
    for part in ("layers", "slowdown", "training"):
        points = parts.points(
            out=tmp_path,
            session=1,
            part=part,
            device="cpu",
            networks=networks,
            rate_bits_per_s=rate_bits_per_s,
        )
        keys += [point.key for point in points.body]
    assert len({*keys}) == len(keys) == 3 * len(networks)


def test_a_network_that_is_given_twice_counts_once() -> None:
    default_batch = "resnet18,vgg16:2, resnet18:4,resnet18:2 ,vgg16:2"
    assert command.named_networks(default_batch) == [
        ("resnet18", 4),
        ("vgg16", 2),
        ("resnet18", 2),
    ]


def test_precisions_of_several_ranks_are_refused(tmp_path: Path) -> None:
    """Their tables are named by the number of ranks, so that one would replace the other."""
    here = parts.Here("cpu", 1, tmp_path)
    points = parts.layers(
        here, [("lenet5", 4)], Budget(), precisions=("fp32", "bf16"), ranks=(2,)
    )
    with pytest.raises(UserError, match="leave out either the precisions or the num"):
        next(iter(points))


def test_collectives_are_measured_at_the_sizes_that_are_asked_for(
    tmp_path: Path,
) -> None:
    sizes = (1024, 1 << 28)
    points = parts.points(
        out=tmp_path, session=1, part="collectives", device="cpu", sizes=sizes
    )
    measured = [point for point in points.body if isinstance(point, Point)]
    assert measured
    for point in measured:
        assert point.left is not None
        assert point.left() == {sizes: [*COLLECTIVES]}
