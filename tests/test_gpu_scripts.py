"""The two scripts for a GPU, rehearsed on a processor: they end early and loudly, and may be killed."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

import played_gpu
import smi
from ddlkit import cli, store
from ddlkit.core import units
from ddlkit.measure.named import network_of
from ddlkit.measure.session import engine
from places import ROOT, alive, family, wait_for
from workbook.cli import PROGRAM
from workbook.record import grammar
from workbook.record.needs import IMAGE_S

CHECK = ROOT / "examples" / "gpu_check.sh"
RECORD = ROOT / "examples" / "gpu_record.sh"
NOTING = f"""\
#!/bin/bash
if [[ $1 == -c ]]; then
  [[ -z $LACKING || "$*" != *$LACKING* ]] || exec echo "$LACKING"
  exec {sys.executable} "$@"
fi
echo "$*" >> "$NOTED"
[[ -z $HANG || "$*" != *$HANG* ]] || exec sleep 600
[[ -z $FAIL || "$*" != *${{FAIL% *}}* ]] || exit "${{FAIL#* }}"
"""
"""Plays python, but for the scripts' own lines of Python, which the real one runs.

It notes its words. It says of the package LACKING that it is not installed, sleeps at words that hold
HANG, and ends as FAIL says at words that hold its first one.
"""
MEASURING = f"""\
#!{sys.executable}
import os
import sys
if sys.argv[1] == "-c":
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
from workbook import cli
import faulty_points
from ddlkit.measure.session import engine
from workbook.record import recording
recording.points = faulty_points.long
recording.partial = lambda make, **_: make
engine.PACK_PERIOD_S = float(os.environ["PACK_PERIOD_S"])
sys.exit(cli.main([*sys.argv[3:], "--device", "cpu"]))
"""
"""Plays python -m workbook: the command is ours, and the points are those of a test."""
REHEARSING = f"""\
#!{sys.executable}
import os
import sys
words = sys.argv[1:]
if words[0] == "examples/yardstick.py":
    words = ["-c", "import played_gpu; played_gpu.look_at_yardstick()"]
elif words[:2] == ["-m", "workbook"]:
    words = [word for word in words if word not in ("--device", "cuda")]
    words += ["--device", "cpu"]
    if "--preflight" not in words:
        words[3] = os.environ["POINTS"]
os.execv(sys.executable, [sys.executable, *words])
"""
"""Is python on a machine without a GPU: the processor is measured, at the points of a file."""
POINTS = """\
{
  "about": "Two small points.", "isolate": true, "strict": true, "out": "rehearsal",
  "points": [
    {"measure": "drift", "moment": "start", "side": 16, "size": "4KiB"},
    {"measure": "matrix_products", "precisions": ["fp32"], "sides": [16],
     "budget": {"warmup": 1, "min_repeats": 2, "max_repeats": 3, "max_s": 0.1}}
  ]
}
"""
STEPS = ["packages", "yardstick", "preflight", "smoke", "tests"]
ISSUE_S = 0.01
"""About how long a host takes to issue an iteration of a small network."""


def played(directory: Path, program: str) -> str:
    """A program in the place of python."""
    (directory / "python").write_text(program)
    (directory / "python").chmod(0o755)
    return str(directory / "python")


def run(script: Path, *words: object, **environment: str) -> int:
    """The exit status of a script, which leaves no temporary files."""
    return ended(script, *words, **environment).returncode


def ended(
    script: Path, *words: object, **environment: str
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable, **environment}
    argv = [str(script), *map(str, words)]
    with TemporaryDirectory() as temporary:
        environment["TMPDIR"] = temporary
        completed = subprocess.run(
            argv, env=environment, capture_output=True, text=True
        )
        assert not [*Path(temporary).iterdir()]
    return completed


def changed(script: Path, directory: Path, **replaced: str) -> Path:
    """A copy of a script and its beginning, in which lines that begin with a text are others."""
    examples = directory / "examples"
    examples.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / "examples" / "gpu_begin.sh", examples)
    copy = Path(shutil.copy(script, examples))
    text = copy.read_text()
    for beginning, line in replaced.items():
        text, count = re.subn(f"^{beginning}.*$", line, text, flags=re.MULTILINE)
        assert count == 1
    copy.write_text(text)
    return copy


def packed(archive: Path, into: Path) -> set[str]:
    """The names of the tables in an archive, each of which is whole."""
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir(parents=True)
    subprocess.run(["tar", "xzf", archive, "-C", into], check=True)
    tables = {path for path in into.rglob("*.csv*")}
    assert all(len(store.load_table(path).columns) for path in tables)
    return {path.name for path in tables}


def steps(log: Path) -> list[str]:
    """The steps that a check has begun."""
    return re.findall(r"^gpu_check: (\w+), about", log.read_text(), re.MULTILINE)


@pytest.fixture
def noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of what the python of a check is asked for; there is an nvidia-smi, too."""
    smi.install(tmp_path / "bin", monkeypatch)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    around = {"NOTED": str(tmp_path / "noted"), "FAIL": "", "HANG": "", "LACKING": ""}
    for name, value in around.items():
        monkeypatch.setenv(name, value)
    return tmp_path / "noted"


# -- the check -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fail", "status", "begun"),
    [
        (" 0", 0, STEPS),
        ("yardstick 3", 3, STEPS[:2]),
        ("--preflight 2", 2, STEPS[:3]),  # no GPU at all
        ("smoke 1", 1, STEPS[:4]),
        ("gpu 1", 1, STEPS[:3]),  # the first whose words have it
    ],
)
def test_a_check_ends_at_the_first_step_that_fails_and_says_so(
    noted: Path, tmp_path: Path, fail: str, status: int, begun: list[str]
) -> None:
    out = tmp_path / "out"
    assert run(CHECK, out, PYTHON=played(tmp_path, NOTING), FAIL=fail) == status
    log = out / "check.log"
    assert steps(log) == begun
    assert ("FAILED at" in log.read_text()) == bool(status)
    assert ("all is well" in log.read_text()) == (not status)
    assert re.search(r"^pandas==\d", log.read_text(), re.MULTILINE)
    for call in noted.read_text().splitlines():
        words = call.split()
        if "workbook" in words[:2]:
            asked = cli._parser(PROGRAM).parse_args(words[2:])
            assert (asked.name, asked.device) in {("gpu", None), ("smoke", "cuda")}
            assert asked.preflight or asked.pack == out / "smoke.tgz"
        if words[-1].endswith(".py") and "pytest" in words:
            assert words[-1] == "tests/test_contention.py", "what may hang comes last"
    assert "driver" in (out / "topology.txt").read_text()


def test_a_check_needs_nvidia_smi_and_one_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for script in (CHECK, RECORD):
        assert run(script) == run(script, tmp_path, "more") == 2
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    if shutil.which("nvidia-smi") is None:
        assert run(CHECK, tmp_path / "out") == 1
        assert "FAILED at nvidia-smi" in (tmp_path / "out" / "check.log").read_text()


@pytest.mark.parametrize("script", [CHECK, RECORD])
@pytest.mark.parametrize(
    ("commit", "reason"),
    [
        ("", "FAILED because .* export DDLKIT_COMMIT"),
        ("mine", "DDLKIT_COMMIT is 'mine'"),
    ],
)
def test_without_a_commit_nothing_begins(
    noted: Path, tmp_path: Path, script: Path, commit: str, reason: str
) -> None:
    git = tmp_path / "bin" / "git"
    git.write_text("#!/bin/false\n")
    git.chmod(0o755)
    python = played(tmp_path, NOTING)
    done = ended(script, tmp_path / "out", PYTHON=python, DDLKIT_COMMIT=commit)
    assert done.returncode == 2
    assert re.search(reason, done.stdout)
    assert not noted.exists()


def test_what_is_not_installed_ends_a_check_or_costs_its_tests(
    noted: Path, tmp_path: Path
) -> None:
    python = played(tmp_path, NOTING)
    done = ended(CHECK, tmp_path / "out", PYTHON=python, LACKING="torchvision")
    assert done.returncode == 2 and not noted.exists()
    assert "these packages are not installed: torchvision" in done.stdout
    done = ended(CHECK, tmp_path / "out", PYTHON=python, LACKING="hypothesis")
    assert done.returncode == 0
    assert "SKIPPED the tests" in done.stdout and "installed: hypothesis" in done.stdout
    assert steps(tmp_path / "out" / "check.log") == STEPS[:-1]


def test_a_machine_that_draws_no_topology_is_checked_all_the_same(
    noted: Path, tmp_path: Path
) -> None:
    (tmp_path / "bin" / "nvidia-smi").write_text("#!/bin/bash\n[[ $1 == -q ]]\n")
    done = ended(CHECK, tmp_path / "out", PYTHON=played(tmp_path, NOTING))
    assert done.returncode == 0
    assert "WARNING: nvidia-smi topo -m fails" in done.stdout


def test_a_step_that_hangs_is_ended_after_twice_its_time(
    noted: Path, tmp_path: Path
) -> None:
    line = "step 1 yardstick examples/yardstick.py"
    script = changed(CHECK, tmp_path / "tree", **{"step 40 yardstick": line})
    python = played(tmp_path, NOTING)
    done = ended(script, tmp_path / "out", PYTHON=python, HANG="yardstick")
    assert done.returncode == 128 + signal.SIGALRM
    assert "yardstick was ended, because it took more than 2 s" in done.stdout
    assert "FAILED at yardstick" in done.stdout


def test_a_check_whose_time_is_up_says_so_where_it_prints(
    noted: Path, tmp_path: Path
) -> None:
    script = changed(CHECK, tmp_path / "tree", limit_s="limit_s=3")
    python = played(tmp_path, NOTING)
    done = ended(script, tmp_path / "out", PYTHON=python, HANG="yardstick")
    assert done.returncode == 128 + signal.SIGTERM
    (line,) = re.findall(r"^gpu_check: STOPPED after \d+ s of 3 s$", done.stdout, re.M)
    assert line in (tmp_path / "out" / "check.log").read_text()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_check_that_is_killed_leaves_no_process(
    noted: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """What it has started is a python that became another program, which the kernel ends."""
    log = tmp_path / "out" / "check.log"
    environment = {
        **os.environ,
        "PYTHON": played(tmp_path, NOTING),
        "HANG": "yardstick",
        "TMPDIR": str(tmp_path),
    }
    argv = [str(CHECK), str(log.parent)]
    with subprocess.Popen(argv, env=environment, stdout=subprocess.DEVNULL) as process:
        assert wait_for(noted.exists)
        assert wait_for(
            lambda: "sleep" in {each.name() for each in family(process.pid)}
        )
        ours = family(process.pid)
        process.send_signal(number)
    assert process.returncode == (-9 if number == signal.SIGKILL else 143)
    assert wait_for(lambda: not alive(ours)), "it leaves processes behind"
    assert ("STOPPED" in log.read_text()) == (number != signal.SIGKILL)


# -- the recording ---------------------------------------------------------------------


@pytest.fixture
def recording(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command that records the points of a test."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests'}")
    monkeypatch.setenv("PYTHON", played(tmp_path, MEASURING))
    monkeypatch.setenv("PACK_PERIOD_S", "0.1")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return [str(RECORD), str(tmp_path / "out")]


def test_a_kill_leaves_a_whole_archive_from_which_the_next_call_goes_on(
    recording: list[str], tmp_path: Path
) -> None:
    archive = tmp_path / "out" / "recording.tgz"
    log = tmp_path / "out" / "record.log"

    def tables() -> set[str]:
        return packed(archive, tmp_path / "look") if archive.exists() else set()

    with subprocess.Popen(recording) as process:
        assert wait_for(lambda: "drift-first.csv" in tables())
        ours = family(process.pid)
        process.kill()
    assert wait_for(lambda: not alive(ours)), "it leaves processes behind"
    there = tables()
    for scratch in tmp_path.glob("gpu_record.*"):
        shutil.rmtree(scratch)
    with subprocess.Popen(recording) as process:
        assert wait_for(lambda: "already measured: " in log.read_text())
        process.terminate()
    assert process.returncode == 143
    assert "already measured: test/first" in log.read_text()
    assert "gpu_record: STOPPED after" in log.read_text()
    assert there <= tables()
    assert {path.name for path in archive.parent.iterdir()} == {archive.name, log.name}
    assert not [*tmp_path.glob("gpu_record.*")]


def test_what_was_measured_after_the_last_pack_is_packed_if_the_process_is_killed(
    recording: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACK_PERIOD_S", "1000")
    archive = tmp_path / "out" / "recording.tgz"

    def measures() -> bool:
        scratch = tmp_path.glob("gpu_record.*")
        return any([*directory.rglob("drift-first.csv")] for directory in scratch)

    with subprocess.Popen(recording) as process:
        assert wait_for(measures)
        before = packed(archive, tmp_path / "look")
        for each in family(process.pid):
            if each.ppid() == process.pid and "--pack" in each.cmdline():
                each.kill()
    assert process.returncode == 128 + signal.SIGKILL
    assert "drift-first.csv" not in before
    assert "drift-first.csv" in packed(archive, tmp_path / "look")
    assert not [*tmp_path.glob("gpu_record.*")]


# -- on a processor --------------------------------------------------------------------


def test_the_yardstick_runs_on_a_processor(
    capsys: pytest.CaptureFixture[str],
) -> None:
    played_gpu.look_at_yardstick()
    said = capsys.readouterr().out
    assert re.search(r"yardstick: \d+ values are out of range", said)
    assert not torch.distributed.is_initialized()


@pytest.mark.rehearsal
@pytest.mark.slow
def test_both_scripts_run_on_a_processor_as_far_as_one_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every line of Python is that of a GPU, but for the device, the points, and what the yardstick times."""
    smi.install(tmp_path / "bin", monkeypatch)
    points = tmp_path / "rehearsal.json"
    points.write_text(POINTS)
    around = {
        "PYTHON": played(tmp_path, REHEARSING),
        "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}:{ROOT / 'examples'}",
        "POINTS": str(points),
    }
    out = tmp_path / "out"
    done = ended(CHECK, out, **around)
    assert done.returncode == 0, done.stdout
    assert steps(out / "check.log") == STEPS
    assert "preflight: all is well" in done.stdout
    assert re.search(r"yardstick: \d+ values are out of range", done.stdout)
    assert re.search(r"\d+ skipped", done.stdout), "the tests that need a GPU"
    assert "peaks-cpu.csv" in packed(out / "smoke.tgz", tmp_path / "look")
    done = ended(RECORD, out, **around)
    assert done.returncode == 0, done.stdout
    assert packed(out / "recording.tgz", tmp_path / "look") >= {"outcomes.csv"}
    assert {path.name for path in out.iterdir()} == {
        *("check.log", "nvidia-smi.txt", "topology.txt", "smoke.tgz"),
        *("record.log", "recording.tgz"),
    }


# -- budgets ---------------------------------------------------------------------------


def budget_in(script: Path, name: str) -> float:
    """The seconds that a script gives to a suite."""
    (text,) = re.findall(rf"record {name} .*--budget (\w+)", script.read_text())
    return units.parse_seconds(text)


def seconds_in(script: Path, name: str) -> int:
    """The value of limit_s or grace_s in a script."""
    (text,) = re.findall(rf"^{name}=(\d+)$", script.read_text(), re.MULTILINE)
    return int(text)


def most_s(script: Path) -> int:
    """The seconds after which a script has been made to end. It looks at the time each second."""
    return seconds_in(script, "limit_s") + seconds_in(script, "grace_s") + 1


BEGIN_S = 5
"""Seconds in which a script looks for packages and learns the machine's name."""
STARTUP_S = 12
"""Seconds of a budget until the first point: nvidia-smi is asked, and a child imports torch."""


def test_the_suite_of_a_gpu_fits_its_budget(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its own estimates, with the time that is kept free for the points that close it."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    listed = grammar.points(out=tmp_path, session=1, name="gpu", device="cuda")
    opening_s, body_s, closing_s = (
        sum(point.estimate_s for point in points)
        for points in (listed.opening, listed.body, listed.closing)
    )
    points = [*listed.opening, *listed.body, *listed.closing]
    assert all(point.estimate_s > 0 for point in points), "one GPU is enough for all"
    budget_s = budget_in(RECORD, "gpu")
    needed_s = STARTUP_S + opening_s + body_s + engine.RESERVE * closing_s
    assert 0.95 * budget_s < needed_s <= budget_s
    # Closing points may run over the budget, after which the tables are packed.
    limit_s = seconds_in(RECORD, "limit_s")
    assert BEGIN_S + budget_s + engine.OVERTIME_S <= limit_s - 10
    assert most_s(RECORD) == 540
    # A small batch is limited by the host, so that larger ones come first.
    sharing = [point.name for point in listed.body if point.what == "sharing"]
    assert sharing[:2] == ["resnet18-b64-fp32", "resnet18-b128-fp32"]


def test_the_steps_of_a_check_fit_its_limit() -> None:
    text = CHECK.read_text()
    planned_s = [int(seconds) for seconds in re.findall(r"^ *step (\d+) ", text, re.M)]
    assert len(planned_s) == len(STEPS)
    assert BEGIN_S + sum(planned_s) <= seconds_in(CHECK, "limit_s")
    assert most_s(CHECK) == 210
    assert budget_in(CHECK, "smoke") <= 80
    # What is lent for fifteen minutes has to start, too, and to idle between both.
    assert most_s(CHECK) + most_s(RECORD) <= 900 - 120


def test_the_smoke_suite_fits_its_step_and_a_gpu_limits_what_it_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the host limited an iteration beside messages, no row of it would be kept."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    listed = grammar.points(out=tmp_path, session=1, name="smoke", device="cuda")
    points = [*listed.opening, *listed.body, *listed.closing]
    needed_s = sum(point.estimate_s for point in [*points, *listed.closing])
    assert needed_s <= budget_in(CHECK, "smoke")
    for described in grammar.read("smoke").points:
        if described["measure"] == "training_beside_messages":
            (described_network,) = described["networks"]
            network, batch = network_of(described_network)
            assert batch * IMAGE_S[network] > 2 * ISSUE_S


def test_all_that_the_short_suite_lacks_is_in_the_long_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)

    def keys(name: str) -> set[str]:
        listed = grammar.points(out=tmp_path, session=1, name=name, device="cuda")
        return {point.key for point in listed.body}

    assert not keys("gpu") & keys("gpu-long"), "nothing is measured twice"
    sharing = {
        f"sharing/{network}-b{batch}-fp32"
        for network in (
            "alexnet",
            "vgg16",
            "vgg19",
            "resnet18",
            "resnet50",
            "resnet101",
        )
        for batch in (16, 32, 64, 128)
    }
    assert sharing <= keys("gpu") | keys("gpu-long")
    assert {"collectives/nccl-p8", "training/resnet50-b32-p8"} <= keys("gpu-long")
