"""The half hour on a GPU, rehearsed: the smoke suite of the GPU as a command, on GPUs that are played.

torch.cuda, the driver and nvidia-smi are played by tests/played; ddlkit runs as it is. Nothing here says how
fast a GPU is: only that every point is measured, every table valid, and every line that only CUDA reaches run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

import reach
from ddlkit import store
from ddlkit.run.measure import standin
from ddlkit.run.sessions import session as outcomes
from places import ROOT

PLAYED = ROOT / "tests" / "played"
REPORT = ROOT / "build" / "rehearsal.txt"
GOAL = 0.9
PATIENCE_S = 280.0

# Why a point may be missing, by the number of GPUs.
REASONS = {1: r"needs 2 GPUs, here is 1", 2: r"(?!)"}

# Lines that the rehearsal need not run, and why, by what stands in them. All others must be run, or count.
UNREHEARSED = {
    r"^raise |^return f\".* is in use by others": "somebody's mistake, or a fault",
    r"^(found|complaint) = f?\"|^complaint = next": "the words of a mistake or a fault",
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@dataclass(frozen=True)
class Rehearsal:
    """What a run left: its tables, the lines of ddlkit that it reached, and what it said."""

    out: Path
    lines: Path
    log: Path

    @property
    def said(self) -> str:
        """The end of what it said, for whoever must find out why it failed."""
        return self.log.read_text(errors="replace")[-6000:]


def start(
    directory: Path, name: str, arguments: Sequence[str], library: Path | None, gpus: int
) -> tuple[subprocess.Popen[bytes], Rehearsal]:
    """A command of ddlkit on that many played GPUs, all of whose processes note their lines."""
    made = Rehearsal(directory / name, directory / f"{name}.lines", directory / f"{name}.log")
    # Threads would wait for each other: two runs share the cores, and the kernel's own threads.
    extra = {"PLAYED_LINES": str(made.lines), "PLAYED_PACKAGE": str(ROOT / "ddlkit")}
    extra |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{PLAYED}:{ROOT}"}
    if library:
        paths = f"{PLAYED / 'bin'}:{os.environ['PATH']}", str(library)
        extra |= {"PLAYED_GPUS": str(gpus), "PATH": paths[0], "LD_LIBRARY_PATH": paths[1]}
    command = [sys.executable, "-m", "ddlkit", *arguments, "--out", str(made.out)]
    with made.log.open("wb") as log:
        environment = {**os.environ, **extra}
        return subprocess.Popen(command, stdout=log, stderr=log, env=environment), made


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory, require_compiler: None) -> Path:
    """The directory of the played driver; of NVRTC, too, where there is no real one beside torch."""
    sys.path.insert(0, str(PLAYED))
    import played_driver

    directory = tmp_path_factory.mktemp("driver")
    found = [*Path(standin.torch.__file__).parents[1].glob("nvidia/*/lib/libnvrtc.so.13")]
    nvrtc = "" if found else "libnvrtc.so.13"
    played_driver.build(directory, standin.SOURCE, standin.OPTIONS, nvrtc=nvrtc)
    return directory


@pytest.fixture(scope="module")
def rehearsed(library: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Rehearsal]:
    """The smoke suite on no, one and two played GPUs, at the same time."""
    directory = tmp_path_factory.mktemp("rehearsal")
    smoke = ("record", "--profile", "smoke", "--suite")
    running = {
        gpus: start(directory, f"gpus{gpus}", (*smoke, suite), library if gpus else None, gpus)
        for gpus, suite in ((2, "gpu"), (1, "gpu"), (0, "cpu"))
    }
    try:
        for process, made in running.values():
            assert process.wait(PATIENCE_S) == 0, made.said
    finally:
        for process, _ in running.values():
            process.kill()
            process.wait()
    return {gpus: made for gpus, (_, made) in running.items()}


@pytest.mark.parametrize("gpus", [1, 2])
def test_every_point_of_the_smoke_suite_is_measured_on_played_gpus(
    rehearsed: dict[int, Rehearsal], gpus: int
) -> None:
    found = store.load_table(rehearsed[gpus].out / "outcomes.csv", "outcomes")
    assert len(found) >= 22
    missing = found[found["outcome"] != outcomes.MEASURED]
    for row in missing.itertuples():
        told = f"{row.what}/{row.point}: {row.outcome}, {row.reason}\n{rehearsed[gpus].said}"
        assert row.outcome == outcomes.UNAVAILABLE, told
        assert re.search(REASONS[gpus], str(row.reason)), told


@pytest.mark.parametrize("gpus", [1, 2])
def test_every_table_is_valid_and_says_that_its_gpu_is_played(
    rehearsed: dict[int, Rehearsal], gpus: int
) -> None:
    paths = sorted(rehearsed[gpus].out.rglob("*.csv*"))
    tables = [path for path in paths if not path.name.endswith(".json")]
    assert len(tables) >= 18
    for path in tables:
        frame, stamp = store.load_table(path), store.load_stamp(path)
        assert stamp["machine"]["name"] == ("played-gpu" if gpus == 1 else f"{gpus}x-played-gpu")
        assert [gpu["model"] for gpu in stamp["machine"]["gpus"]] == ["Played GPU"] * gpus
        if "device" in frame and not path.name.startswith(("vitals", "copies-disk")):
            assert set(frame["device"]) == {"cuda"}, path.name
        if "backend" in frame:
            assert set(frame["backend"]) <= {"nccl", "gloo"}, path.name


def test_the_kernel_beside_which_others_run_is_the_stand_in_itself(
    rehearsed: dict[int, Rehearsal],
) -> None:
    for gpus in (1, 2):
        rows = store.load_table(rehearsed[gpus].out / "contention-convolution.csv.gz", "contention")
        beside = rows[rows["communication"] == "standin"]
        assert set(beside["registers"]) == {94} and (beside["shared_bytes"] > 0).all()
        assert (beside["bytes_per_s"] > 0).any()
        assert set(beside.loc[beside["blocks"] % standin.CLUSTER == 0, "cluster"]) == {4}
    rows = store.load_table(rehearsed[2].out / "contention-nccl-b1.csv.gz", "contention")
    assert (rows.loc[rows["communication"] == "nccl", "taken_threads"] == 160).all()


def test_what_only_cuda_reaches_is_rehearsed(rehearsed: dict[int, Rehearsal]) -> None:
    package = ROOT / "ddlkit"
    files = [*sorted((package / "run").rglob("*.py")), package / "machine.py"]
    without = reach.read_lines(rehearsed[0].lines)
    reached = reach.read_lines(rehearsed[1].lines)
    for file, numbers in reach.read_lines(rehearsed[2].lines).items():
        reached.setdefault(file, set()).update(numbers)
    only = [
        one for one in reach.cuda_only(files) if not one.lines & without.get(one.file, set())
    ]
    assert len(only) > 150, "the search for CUDA's lines finds too few: is it out of date?"
    ran = {one for one in only if one.lines & reached.get(one.file, set())}
    report = [f"{len(ran)} of {len(only)} statements that only CUDA reaches were rehearsed.", ""]
    for one in only:
        reason = next((why for words, why in UNREHEARSED.items() if re.search(words, one.text)), "?")
        note = "" if one in ran else f"   <- not run: {reason}"
        where = f"{one.file.relative_to(ROOT)}:{one.line}"
        report.append(f"{'ran' if one in ran else '-':<4} {where:<45} {one.text}{note}")
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text("\n".join(report) + "\n")
    left = "\n".join(line for line in report if line.startswith("-"))
    assert len(ran) >= GOAL * len(only), f"{report[0]}\n{left}"


MISUSES = {
    "two devices": "torch.ones(2, device='cuda') + torch.ones(2)",
    "NumPy": "torch.ones(2, device='cuda').numpy()",
    "no such GPU": "torch.ones(2, device='cuda:1')",
    "no timing": "a, b = E(), E(); a.record(); b.record(); C.synchronize(); a.elapsed_time(b)",
    "not recorded": "a, b = E(enable_timing=True), E(enable_timing=True); a.elapsed_time(b)",
    "not waited": "a = E(enable_timing=True); a.record(); a.elapsed_time(a)",
    "replay before capture": "C.CUDAGraph().replay()",
    "wait within a capture": "g = C.CUDAGraph()\nwith C.graph(g): C.synchronize()",
    "no stream": "C.Stream().wait_stream(7)",
    "a number for an address": "cuda.cuModuleLoadData(byref(c_void_p()), 1 << 40)",
    "a wide number": "cuda.cuFuncSetAttribute(c_void_p(), 8, 1 << 40)",
    "too many threads": "s._send.launch(1, 1024, [])",
    "a cluster that does not divide": "s._send.launch(3, 64, [], 0, 2)",
    "a whole number for a real one": "s._send.launch(4, 64, [s.a, s.b, s.c, 9, 9, 5, 9, record])",
    "a null address": "s._gate.launch(1, 1, [torch.ones(0, device='cuda'), 2, 0, 0, 0, 0])",
    "a fork": "torch.ones(1, device='cuda'); pid = os.fork()\n"
    "if not pid:\n    try: torch.ones(1, device='cuda'); os._exit(0)\n    except RuntimeError: os._exit(9)\n"
    "assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0",
}
PREFACE = """
import os, torch
from ctypes import *
from ddlkit.run.measure.standin import GpuStandIn
C, E, cuda = torch.cuda, torch.cuda.Event, CDLL("libcuda.so.1")
s = GpuStandIn(1 << 20)
record = s._record(0)
s._gate.launch(1, 1, [record, 2, 0, 0, 0, 0])
assert record[2] > 0
refused = []
"""


def test_what_a_real_gpu_refuses_the_played_one_refuses(library: Path, tmp_path: Path) -> None:
    parts = [PREFACE]
    for name, misuse in MISUSES.items():
        body = "\n".join(f"    {line}" for line in misuse.splitlines())
        parts.append(f"try:\n{body}\nexcept Exception:\n    refused.append({name!r})")
    script = "\n".join([*parts, "print('|'.join(refused))"])
    environment = {**os.environ, "PYTHONPATH": f"{PLAYED}:{ROOT}", "PLAYED_GPUS": "1"}
    environment |= {"LD_LIBRARY_PATH": str(library)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.strip().split("|")) == set(MISUSES), done.stderr
