"""The half hour on a GPU, rehearsed: the smoke suite of the GPU as a command, on GPUs that are played.

torch.cuda, the driver and nvidia-smi are played by tests/played; ddlkit runs as it is. Nothing here says
how fast a GPU is: only that every point is measured, every table valid, and what only CUDA reaches run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import pytest
import torch

import reach
from ddlkit import store
from ddlkit.report import book, outputs, plots
from ddlkit.report.figures import gpu_own, sharing_measured
from ddlkit.report.source import Source
from ddlkit.run.measure import standin
from ddlkit.run.sessions import preflight
from ddlkit.run.sessions import session as outcomes
from places import ROOT

PLAYED = ROOT / "tests" / "played"
REPORT = ROOT / "build" / "rehearsal.txt"
NVRTC = "libnvrtc.so.13"
GOAL = 0.9
PATIENCE_S = 1000.0

# Why a point may be missing, by the number of GPUs.
REASONS = {1: r"needs 2 GPUs, here is 1", 2: r"(?!)"}

# Statements that no rehearsal runs: their file, how they begin, and why not. There are no others.
PICTURES = ("yield from _copies(", "for how, source in", "copy = partial(source.to", "seconds = measure_on(",
            "labels: dict", 'yield input_rows("h2d"')  # fmt: skip
UNREHEARSED = (
    ("machine.py", "properties = [torch", "GPUs of makers whose driver is not CUDA's"),
    ("machine.py", "return tuple(_gpu(p.name", "GPUs of makers whose driver is not CUDA's"),
    ("channels.py", 'raise Partial({"channels"', "the play gives what is asked: see test_nccl"),
    ("channels.py", "wrong.append(", "the play gives what is asked: see test_nccl"),
    ("channels.py", "continue", "the play gives what is asked: see test_nccl"),
    (
        "channels.py",
        'raise UserError("; ".join(wrong))',
        "the play gives what is asked: see test_nccl",
    ),
    ("channels.py", "return 0, 0", "the played profiler sees all: see test_nccl"),
    ("layers.py", 'return {"issue": issue}', "training on one GPU is always captured in the play"),
    ("layers.py", 'say(f"no graph of an iteration', "the play captures whatever it is given"),
    ("nccl_one_gpu.py", "turns.append(taking", "no kernel takes turns here: see test_nccl_one_gpu"),
    ("nccl_one_gpu.py", "continue", "no kernel takes turns here: see test_nccl_one_gpu"),
    (
        "nccl_one_gpu.py",
        'raise UserError("; "',
        "no kernel takes turns here: see test_nccl_one_gpu",
    ),
    ("sharing_training.py", "raise Unavailable(", "there are GPUs here: see test_sharing_training"),
    (
        "sharing_training.py",
        "raise UserError(",
        "messages end in the play: see test_sharing_training",
    ),
    ("standin.py", "for half in Path(candidate)", "NVRTC of a wheel, which may not be installed"),
    ("standin.py", "ctypes.CDLL(str(half)", "NVRTC of a wheel, which may not be installed"),
    ("engine.py", 'raise UserError("no GPU here', "there are GPUs here: see test_cli"),
    ("preflight.py", 'raise UserError("nvidia-smi does not', "it answers: see test_preflight"),
    ("preflight.py", "if time.monotonic() > give_up", "whether it must be waited for is chance"),
    ("preflight.py", "time.sleep(0.05)", "whether it must be waited for is chance"),
    ("preflight.py", 'raise UserError("nvidia-smi -lms', "it is heard: see test_preflight"),
    ("preflight.py", 'raise UserError(f"torch {torch', "torch sees its GPU, or no test could run"),
    ("preflight.py", 'raise UserError(f"the stand-in runs', "kernels never take turns in the play"),
    ("session.py", "return False", "no fault of a GPU is played: see test_record"),
    ("suites.py", "raise UserError(", "torch sees its GPU, or no test could run"),
    *(("inputs.py", words, "pictures are read by a command of its own") for words in PICTURES),
)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(PATIENCE_S + 100)]


@dataclass(frozen=True)
class Rehearsal:
    """What a run left: its tables, the lines of ddlkit that it reached, and what it said."""

    out: Path
    lines: Path
    log: Path

    @classmethod
    def of(cls, directory: Path, name: str) -> Rehearsal:
        """One that is to come, there."""
        return cls(*(directory / f"{name}{end}" for end in ("", ".lines", ".log")))

    @property
    def said(self) -> str:
        """The end of what it said, for whoever must find out why it failed."""
        return self.log.read_text(errors="replace")[-6000:]


def environment(lines: Path, library: Path | None, gpus: int) -> dict[str, str]:
    """Of a process on that many played GPUs, which notes its lines as all that it starts do."""
    # Threads of one operation would wait for each other: several runs share the cores.
    added = {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{PLAYED}:{ROOT}", "PLAYED_LINES": str(lines)}
    added["PLAYED_PACKAGE"] = str(ROOT / "ddlkit")
    if library:
        added |= {"PLAYED_NCCL": "version=23003", "PLAYED_LOG": os.devnull}
        added |= {"PLAYED_GPUS": str(gpus), "LD_LIBRARY_PATH": str(library)}
    return {**os.environ, "DDLKIT_COMMIT": "rehearsed", **added}


def start(
    made: Rehearsal, library: Path | None, gpus: int, *arguments: str
) -> subprocess.Popen[bytes]:
    """`ddlkit record` on that many played GPUs, in an environment where nothing harms."""
    around = environment(made.lines, library, gpus)
    around["PATH"] = f"{PLAYED / 'bin'}:{around['PATH']}" if library else around["PATH"]
    around = {name: value for name, value in around.items() if name not in preflight.HARMFUL}
    around[preflight.PATIENCE] = (
        "20"  # two cores and other tests are slower than any machine of the day
    )
    suite = ["--suite", "gpu" if gpus else "cpu", "--out", str(made.out)]
    with made.log.open("wb") as log:
        command = [sys.executable, "-m", "ddlkit", "record", *suite, *arguments]
        return subprocess.Popen(command, stdout=log, stderr=log, env=around)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory, require_compiler: None) -> Path:
    """The directory of the played driver; of NVRTC, too, where there is no real one beside torch."""
    sys.path.insert(0, str(PLAYED))
    import played_driver

    directory = tmp_path_factory.mktemp("driver")
    beside = Path(str(torch.__file__)).parents[1].glob(f"nvidia/*/lib/{NVRTC}")
    nvrtc = "" if any(beside) else NVRTC
    played_driver.build(directory, standin.SOURCE, standin.OPTIONS, nvrtc=nvrtc)
    nccl = ["-shared", "-fPIC", "-O3", "-o", str(directory / "libnccl.so.2")]
    subprocess.run(["gcc", *nccl, str(ROOT / "tests" / "played_nccl.c")], check=True)
    return directory


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Rehearsal:
    """The smoke suite of the machine at hand, where nothing is played."""
    made = Rehearsal.of(tmp_path_factory.mktemp("plain"), "gpus0")
    running = {0: start(made, None, 0, "--profile", "smoke", "--budget", "10m")}
    return ended(running, {0: made})[0]


@pytest.fixture(scope="module")
def rehearsed(library: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Rehearsal]:
    """The smoke suite on one and two played GPUs, at the same time."""
    directory = tmp_path_factory.mktemp("rehearsal")
    made = {gpus: Rehearsal.of(directory, f"gpus{gpus}") for gpus in (2, 1)}
    running = {gpus: start(one, library, gpus, "--profile", "smoke") for gpus, one in made.items()}
    return ended(running, made)


def ended(
    running: dict[int, subprocess.Popen[bytes]], made: dict[int, Rehearsal]
) -> dict[int, Rehearsal]:
    """What they have ``made``, once all have ended well; however this ends, none is left."""
    try:
        for gpus, process in running.items():
            assert process.wait(PATIENCE_S) == 0, made[gpus].said
    finally:
        for process in running.values():
            process.kill()
            process.wait()
    return made


@pytest.fixture(scope="module")
def preflown(
    rehearsed: dict[int, Rehearsal], library: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[int, Rehearsal]:
    """Exit status of the preflight on a played GPU; not beside the recordings, as on the day."""
    made = Rehearsal.of(tmp_path_factory.mktemp("preflight"), "preflight")
    return start(made, library, 1, "--preflight").wait(PATIENCE_S), made


def test_smoke_runs_every_code_path_on_the_machine_at_hand(plain: Rehearsal) -> None:
    assert plain.said.splitlines()[-1] == str(plain.out)
    found = store.load_table(plain.out / "outcomes.csv", "outcomes")
    assert set(found["outcome"]) == {outcomes.MEASURED}, plain.said
    tables = [path for path in plain.out.glob("*.csv*") if not path.name.endswith(".json")]
    for path in tables:
        store.load_table(path)
    # Of GPUs only, of the suites quick and full only, of data/specs, of the lab and its foretold campaigns.
    elsewhere = {"channels", "convergence", "tensors", "devices", "networks", "echoes"}
    elsewhere |= {"sparse_convergence", "sparse_training", "inputs", "pipelines", "predicted"}
    elsewhere |= {"sharing_buckets", "sharing_cells", "sharing_copies", "sharing_unsent"}
    elsewhere |= {"contention", "sharing", "throughput", "efficiency"}
    elsewhere |= {"facts"}
    assert {store.load_stamp(path)["schema"] for path in tables} == store.SCHEMAS.keys() - elsewhere
    assert sum(path.stat().st_size for path in plain.out.iterdir()) < 2e6


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


@pytest.mark.parametrize("gpus", [1, 2])
def test_figures_of_sharing_are_drawn_from_what_was_rehearsed(
    rehearsed: dict[int, Rehearsal], gpus: int
) -> None:
    """However little it is: one network, one round, no default for the stand-in."""
    source = Source((rehearsed[gpus].out,))
    beside = sharing_measured.figure3(gpu_own.one_gpu(str(rehearsed[gpus].out)))[1]
    assert {"stand-in, full speed", "stand-in, 1 GB/s", "copy engine"} <= set(beside)
    here = sharing_measured.Recording.of(source)
    figures = [getattr(sharing_measured, f"figure{number}")(here) for number in range(1, 9)]
    assert all(len(figure) for figure in figures)
    assert here.has("control", "iterations", "spans") == (gpus == 2)


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_figure_of_gpus_of_our_own_is_drawn_from_what_was_rehearsed(
    rehearsed: dict[int, Rehearsal], gpus: int
) -> None:
    drawn = gpu_own.panels(Source((rehearsed[gpus].out,)))
    axes = {label for label, _ in drawn.values()}
    assert {"longer than alone [%]", "share of the fastest matrix product [%]"} <= axes
    assert gpu_own.numbers(drawn)["value"].notna().all()
    plt.close(plots.dots_by_heading(drawn))


def test_the_notebook_on_real_gpus_draws_what_was_rehearsed(
    rehearsed: dict[int, Rehearsal], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed into data/recorded, without a change of code."""
    recorded = store.RECORDED.name
    shutil.copytree(store.DATA, tmp_path / "data", ignore=shutil.ignore_patterns(recorded))
    shutil.copytree(rehearsed[2].out, tmp_path / "data" / recorded / "2x-played-gpu")
    shutil.copytree(ROOT / "solutions", tmp_path / "solutions")
    monkeypatch.setenv("DDLKIT_ROOT", str(tmp_path))  # of the kernel
    (notebook,) = chosen = book.notebooks(["12"])
    book.run(chosen, executed=tmp_path, reports=tmp_path / "reports")
    words = (tmp_path / notebook.name).read_text(encoding="utf-8")
    assert '"name": "stderr"' not in words
    assert outputs.is_made("wb-gpu-own", tmp_path / "reports")


def test_the_preflight_finds_all_well_on_a_played_gpu(preflown: tuple[int, Rehearsal]) -> None:
    status, made = preflown
    checks = {check.name for stage in preflight.STAGES for check in stage.checks}
    well = re.findall(r"^ok +\d+\.\d s  ([\w-]+) +\S", made.said, re.MULTILINE)
    assert (status, sorted(well)) == (0, sorted(checks)), made.said


# What each is refused with, and how it is done.
MISUSES = [
    ("all tensors to be on the same device", "torch.ones(2, device='cuda') + torch.ones(2)"),
    ("use Tensor.cpu()", "torch.ones(2, device='cuda').numpy()"),
    ("invalid device ordinal", "torch.ones(2, device='cuda:1')"),
    (
        "without timing",
        "a, b = E(), E(); a.record(); b.record(); C.synchronize(); a.elapsed_time(b)",
    ),
    ("was not recorded", "a = E(enable_timing=True); a.elapsed_time(a)"),
    ("before anybody waited", "a = E(enable_timing=True); a.record(); a.elapsed_time(a)"),
    ("replay before capture", "C.CUDAGraph().replay()"),
    ("while a graph is captured", "with C.graph(C.CUDAGraph()): C.synchronize()"),
    ("wait_stream of 7", "C.Stream().wait_stream(7)"),
    ("record_stream of None", "torch.ones(2, device='cuda').record_stream(None)"),
    ("cuModuleLoadData(", "cuda.cuModuleLoadData(byref(c_void_p()), 1 << 40)"),
    ("cuFuncSetAttribute(", "cuda.cuFuncSetAttribute(c_void_p(), 8, 1 << 40)"),
    ("cuFuncSetAttribute: invalid argument", "s._send.allow_shared(1 << 20)"),
    ("too many resources requested", "s._send.launch(1, 1024, [])"),
    ("cuLaunchKernelEx: invalid argument", "s._send.launch(3, 64, [], 0, 2)"),
    (
        "cuLaunchKernelEx: invalid argument",
        "s._send.launch(4, 64, [s.a, s.b, s.c, 9, 9, 5, 9, record])",
    ),
    ("cuLaunchKernelEx: invalid argument", "s._gate.launch(1, 1, [0, 2, 0, 0, 0, 0])"),
    ("does not compile: ddlkit.cu(1): error: no architecture", "cubin('compute_90')"),
    ("its buffers hold", "s.send(Footprint(640, 640), 1)"),
    ("is not there: torch sees 1 GPUs", "layers.device_named('cuda:1')"),
    ("nccl needs a GPU for each rank", "rank._choose('nccl', None, 0, 2)"),
    (
        "has no two ranks on one GPU",
        "nccl('version=22809'); one.measure_on_one_gpu([(1, 64)], None)",
    ),
    ("Duplicate GPU detected", "nccl('refuse'); one.TwoRanks(one.Nccl(one.library()), gpu, 64)"),
    ("their sums are wrong", "nccl('wrong'); one.TwoRanks(one.Nccl(one.library()), gpu, 64)"),
    (
        "a forked child: 9",
        "torch.ones(1, device='cuda'); pid = os.fork()\n"
        "if not pid:\n"
        "    try: torch.ones(1, device='cuda'); os._exit(0)\n"
        "    except RuntimeError: os._exit(9)\n"
        "raise OSError(f'a forked child: {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}')",
    ),
    ("needs a GPU", "contention.measure_beside_copies('cpu', [], contention.TINY, None)"),
    (
        "on a GPU use contention",
        "next(iter(shared_kernels.shared_kernels_job.part(rank.Rank(0, 1, 0, gpu, 'nccl', 0, 1), None)))",
    ),
    (
        "NCCL_NTHREADS is 0 for this process",
        "raise OSError(shares.cannot(shares.Configuration.parse('b1-t64'), 'nccl'))",
    ),
    ("no NVRTC 7: neither in", "torch.version.cuda = '7.0'; standin._nvrtc.__wrapped__()"),
    (
        "none.so: cannot open",
        "os.environ['DDLKIT_NCCL'] = '/none.so'; one.measure_on_one_gpu([], None)",
    ),
    (
        "gpu0 is in use by others: utilisation 97%",
        f"os.environ.update(PATH='{PLAYED / 'bin'}:' + os.environ['PATH'], PLAYED_LOAD='97')\n"
        "vitals.PATIENCE_S = 0.5\n"
        "preflight.nvidia_smi(here)",
    ),
    (
        "CUDA_VISIBLE_DEVICES: it hides every GPU",
        "os.environ['CUDA_VISIBLE_DEVICES'] = ''; preflight.environment(here)",
    ),
]
PREFACE = """
import os, torch
from ctypes import *
from pathlib import Path
from ddlkit import machine
from ddlkit.run.instruments import vitals
from ddlkit.run.jobs import rank
from ddlkit.run.measure import contention, layers, nccl_one_gpu as one, shared_kernels, shares, standin
from ddlkit.run.sessions import preflight, suites
from ddlkit.run.measure.standin import Footprint, GpuStandIn, cubin
assert machine.name() == "played-gpu", "without nvidia-smi, torch is asked"
assert len(suites.points(out=None, session=1, name="gpu").body) > 100
here = preflight.Here("cuda", Path())
gpu, nccl = torch.device("cuda"), lambda role: os.environ.update(PLAYED_NCCL=role)
C, E, cuda = torch.cuda, torch.cuda.Event, CDLL("libcuda.so.1")
s = GpuStandIn(1 << 20)
record = s.record(0)
s._gate.launch(1, 1, [record, 2, 0, 0, 0, 0])
assert record[2] > 0
refused = 0
"""


@pytest.fixture(scope="module")
def refused(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Rehearsal:
    """The misuses, one after the other, in one process without nvidia-smi."""
    parts = [PREFACE]
    for words, misuse in MISUSES:
        tried = "\n".join(f"    {line}" for line in misuse.splitlines())
        parts += ["try:", tried, "except Exception as error:"]
        parts += [f"    assert {words!r} in str(error), error", "    refused += 1"]
    script = "\n".join([*parts, "print(refused, 'refused')"])
    made = Rehearsal.of(tmp_path_factory.mktemp("misuse"), "misuse")
    around = environment(made.lines, library, 1)
    with made.log.open("wb") as log:
        subprocess.run([sys.executable, "-c", script], stdout=log, stderr=log, env=around)
    return made


def test_what_a_real_gpu_refuses_the_played_one_refuses(refused: Rehearsal) -> None:
    assert refused.said.endswith(f"\n{len(MISUSES)} refused\n"), refused.said


def why_not(statement: reach.Statement) -> str:
    """Why the rehearsal does not run it; "" if there is no reason."""
    whys = (
        why
        for name, words, why in UNREHEARSED
        if statement.file.name == name and statement.text.startswith(words)
    )
    return next(whys, "")


def test_what_only_cuda_reaches_is_rehearsed(
    plain: Rehearsal,
    rehearsed: dict[int, Rehearsal],
    preflown: tuple[int, Rehearsal],
    refused: Rehearsal,
) -> None:
    without = reach.read_lines(plain.lines)
    found = reach.cuda_only(ROOT / "ddlkit")
    only = [one for one in found if not one.lines & without.get(one.file, set())]
    assert len(only) > 150, "the search for CUDA's lines finds too few: is it out of date?"
    ran: set[reach.Statement] = set()
    for made in (rehearsed[1], rehearsed[2], preflown[1], refused):
        reached = reach.read_lines(made.lines)
        ran |= {one for one in only if one.lines & reached.get(one.file, set())}
    report = [f"{len(ran)} of {len(only)} statements that only CUDA reaches were rehearsed."]
    for one in only:
        note = "" if one in ran else f"  <- not run: {why_not(one) or 'nobody has said why'}"
        where = f"{one.file.relative_to(ROOT)}:{one.line}"
        report.append(f"{'ran' if one in ran else '-':<4} {where:<45} {one.text}{note}")
    REPORT.parent.mkdir(exist_ok=True)
    REPORT.write_text("\n".join(report) + "\n")
    left = "\n".join(line for line in report if line.startswith("-"))
    assert len(ran) >= GOAL * len(only), f"{report[0]}\n{left}"
    assert all(map(why_not, set(only) - ran)), f"some have no reason:\n{left}"
    used = {why_not(one) for one in only}
    assert {why for *_, why in UNREHEARSED} <= used, "a reason is left for what is no more"
