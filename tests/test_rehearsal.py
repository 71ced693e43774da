"""The half hour on a GPU, rehearsed: the smoke suite of the GPU as a command, on GPUs that are played.

torch.cuda, the driver and nvidia-smi are played by tests/played; ddlkit runs as it is. Nothing here says
how fast a GPU is: only that every point is measured, every table valid, and the figures are drawn.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import smi
from ddlkit import store
from ddlkit.measure.session import MEASURED, UNAVAILABLE
from places import ROOT
from workbook.record import preflight, standin
from workbook.sharing import (
    fig01,
    fig02,
    fig03,
    fig04,
    fig05,
    fig06,
    fig07,
    fig08,
    recordings,
)

PLAYED = ROOT / "tests" / "played"
NVRTC = "libnvrtc.so.13"
PATIENCE_S = 600.0
PLAYED_GPU = {"name": "Played GPU", "memory.total": "8192", "compute_cap": "9.0"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(PATIENCE_S + 100)]


def record(name: str, out: Path, library: Path, *arguments: str) -> tuple[int, str]:
    """Exit status of `python -m workbook record` on a played GPU, and the end of what it printed."""
    around = {
        name: text for name, text in os.environ.items() if name not in preflight.HARMFUL
    }
    # Threads of one operation would wait for each other: several runs share the cores.
    around |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{PLAYED}:{ROOT}"}
    around |= {
        "DDLKIT_COMMIT": "rehearsed",
        "PLAYED_GPUS": "1",
        "LD_LIBRARY_PATH": str(library),
    }
    smi.write(library / "smi", [PLAYED_GPU])
    around["PATH"] = f"{library / 'smi'}:{around['PATH']}"
    command = [
        sys.executable,
        "-m",
        "workbook",
        "record",
        name,
        "--device",
        "cuda",
        "--out",
        str(out),
    ]
    how: Any = {
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
        "env": around,
    }
    ended = subprocess.run(
        [*command, *arguments], timeout=PATIENCE_S, check=False, **how
    )
    return ended.returncode, ended.stdout[-6000:]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory, require_compiler: None) -> Path:
    """The directory of the played driver; of NVRTC, too, where there is no real one beside torch."""
    sys.path.insert(0, str(PLAYED))
    import played_driver

    directory = tmp_path_factory.mktemp("driver")
    beside = Path(str(torch.__file__)).parents[1].glob(f"nvidia/*/lib/{NVRTC}")
    nvrtc = "" if any(beside) else NVRTC
    played_driver.build(directory, standin.SOURCE, standin.OPTIONS, nvrtc=nvrtc)
    return directory


@pytest.fixture(scope="module")
def rehearsed(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the smoke suite left on a played GPU."""
    out = tmp_path_factory.mktemp("rehearsal") / "gpu"
    status, printed = record("smoke", out, library)
    assert status == 0, printed
    return out


def test_every_point_is_measured_and_its_tables_say_that_its_gpu_is_played(
    rehearsed: Path,
) -> None:
    """But for the two that need a second GPU."""
    rows = store.load_table(rehearsed / "outcomes.csv", "outcomes")
    assert len(rows) >= 17
    missing = rows[rows["outcome"] != MEASURED]
    assert set(missing["outcome"]) == {UNAVAILABLE}, missing.to_string()
    assert set(missing["point"]) == {"nccl-p2", "lenet5-b4-p2"}
    tables = [*rehearsed.rglob("*.csv*")]
    assert len(tables) >= 15
    for path in tables:
        frame, stamp = store.load_table(path), store.load_stamp(path)
        assert stamp["machine"]["name"] == "played-gpu"
        assert [gpu["model"] for gpu in stamp["machine"]["gpus"]] == ["Played GPU"]
        if "device" in frame and not path.name.startswith(("vitals", "copies-disk")):
            assert set(frame["device"]) == {"cuda"}, path.name
        if "backend" in frame:
            assert set(frame["backend"]) <= {"nccl", "gloo"}, path.name
    rows = store.load_table(rehearsed / "contention-convolution.csv.gz", "contention")
    beside = rows[rows["communication"] == "standin"]
    assert set(beside["registers"]) == {94} and (beside["shared_bytes"] > 0).all()
    assert (beside["bytes_per_s"] > 0).any()


def test_figures_are_drawn_from_what_was_rehearsed(rehearsed: Path) -> None:
    """However little it is: one network, one round, no default for the stand-in."""
    here = recordings.one_gpu(str(rehearsed))
    assert {"iterations", "kernels"} <= here.keys()
    beside = set(fig03.numbers(here)["panel"])
    assert {"stand-in, full speed", "copy engine"} <= beside
    for figure in (fig01, fig02, fig03, fig04, fig05, fig06, fig07, fig08):
        assert len(figure.numbers(here))


def test_the_preflight_finds_all_well_on_a_played_gpu(
    library: Path, tmp_path: Path
) -> None:
    status, printed = record("gpu", tmp_path, library, "--preflight")
    assert status == 0 and "preflight: all is well" in printed, printed
    for check in (*preflight.CHECKS, *preflight.GPU_CHECKS):
        assert f"check/{check}: measured" in printed
