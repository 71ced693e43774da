"""Faults that belong to no single room: full disks, killed runs, odd places, what neighbours may do."""

from __future__ import annotations

import json
import os
import random
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest

import fault_table
import faulty_points
from ddlkit import cli, store
from ddlkit.core.errors import UserError
from ddlkit.jobs import launch
from ddlkit.jobs.launch import Loopback
from ddlkit.lab import network
from ddlkit.lab.network import Lab, LabShape
from ddlkit.measure.session import Origin
from ddlkit.store import files
from places import PATIENCE_S, ROOT, alive, ranks_below, wait_for
from test_book import write as write_notebook
from test_launch import run_endless
from test_reproduce import Clone, clone
from test_reproduce import wait_for as words_of
from workbook.site import book

__all__ = ["clone"]
TRIALS = int(os.environ.get("DDLKIT_FAULT_TRIALS", "1"))
"""How often random moments are tried; more by hand, with the same law."""
FULL = "mount -t tmpfs -o size=256k none {0} && "
FILL = "(cat /dev/zero >{0}/filler) 2>/dev/null; "


def run(
    argv: Sequence[str], environment: dict[str, str] | None = None, cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    paths = {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests")])}
    environment = {**os.environ, **paths} if environment is None else environment
    return subprocess.run(
        argv,
        env=environment,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def only_line(done: subprocess.CompletedProcess[str], status: int = 2) -> str:
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    (line,) = [
        text for text in done.stderr.splitlines() if text.startswith("ddlkit: error: ")
    ]
    return line.removeprefix("ddlkit: error: ")


def as_command(body: str, before: str = "") -> list[str]:
    """A program that does what ``body`` defines as `command` in the place of one of ours, in a folder."""
    parts = [
        "import sys",
        "from pathlib import Path",
        "from ddlkit import cli",
        "from ddlkit.cli.command import COMMANDS, Command",
        "here = Path(sys.argv[1])",
        body,
        "def begun(arguments):",
        '    (here / "begun").touch()',
        "    command(arguments)",
        'COMMANDS["machine"] = Command(begun, "", ())',
        before,
        'sys.exit(cli.main(["machine"]))',
    ]
    return [sys.executable, "-c", "\n".join(parts)]


# -- disks ---------------------------------------------------------------------------------------

SAVE = """
import faulty_points
from ddlkit.core.errors import UserError
from ddlkit.measure.session import Origin
from ddlkit.store.files import lock, scratch
def command(arguments):
    frame = faulty_points.drift()["drift"]
    Origin(machine={}).save(here / "drift-a.csv", frame, "drift")
    filler = open(here / "filler", "ab", buffering=0)
    try:
        while filler.write(bytes(4096)): pass
    except OSError: pass
    try: Origin(machine={}).save(here / "drift-b.csv", frame, "drift")
    except UserError as error: print(error)
    try:
        with lock(here / "lock"): pass
    except UserError as error: print(error)
    with scratch(here) as place: (place / "x").write_bytes(bytes(9999))
"""


@pytest.mark.fault(
    fault="the disk with the tables is full",
    injected="a small tmpfs, filled up, then a table, a lock and a temporary file are written",
    holds="one line each says what is full and where; the table that was there is whole, no half of another",
)
@pytest.mark.lab
def test_a_full_disk_is_one_line_and_damages_nothing(
    tmp_path: Path, require_lab: None
) -> None:
    where = tmp_path / "full"
    where.mkdir()
    shell = f'{FULL.format(where)} "$@"; status=$?; ls -A {where} >&2; exit $status'
    done = run(
        ["unshare", "--mount", "bash", "-c", shell, "sh", *as_command(SAVE), str(where)]
    )
    for line, told in zip(done.stdout.splitlines(), ("write", "lock"), strict=True):
        assert line.startswith(f"cannot {told} {where}/")
        assert "No space left on device" in line and "free space" in line
    assert only_line(done).startswith(f"No space left on device: {where}/ddlkit-work-")
    left = done.stderr.splitlines()[1:]
    assert left == ["begun", "drift-a.csv", "drift-a.json", "filler", "lock"]


@pytest.mark.fault(
    fault="build/ is full",
    injected="a small tmpfs in the place of build/, filled up by the stage",
    holds="reproduce.sh says in one line that it is full, and where",
)
@pytest.mark.fault(
    fault="build/ is read-only",
    injected="a read-only mount in its place",
    holds="reproduce.sh says so in one line",
)
@pytest.mark.lab
def test_a_build_that_is_full_or_read_only_is_one_line(
    clone: Clone, require_lab: None
) -> None:
    build = clone.path / "build"
    build.mkdir()
    clone.workbook_does(f"{FILL.format(build)} exit 1")
    script = f"{FULL.format(build)} exec bash reproduce.sh --recorded"
    done = run(
        ["unshare", "--mount", "bash", "-c", script], clone.variables(), clone.path
    )
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert (
        line.startswith("reproduce.sh: ")
        and f"{build} is full: make room there" in line
    )
    shutil.rmtree(build)
    build.mkdir()
    script = f"mount -t tmpfs -o ro none {build} && exec bash reproduce.sh --recorded"
    done = run(
        ["unshare", "--mount", "bash", "-c", script], clone.variables(), clone.path
    )
    assert (done.returncode, done.stderr) == (
        1,
        f"reproduce.sh: cannot write to {build}\n",
    )


# -- damaged files ---------------------------------------------------------------------------------


@pytest.mark.fault(
    fault="recorded files are truncated, swapped or have a wrong hash",
    injected="each in turn, to table or stamp; also a stamp whose values are of another kind",
    holds="refused in one line that names the file, when read and when a session would go on",
)
@pytest.mark.parametrize(
    "damage", ["truncated", "swapped", {"sha256": "0" * 64}, {"schema": []}]
)
def test_damaged_tables_are_refused_in_one_line(damage: Any, tmp_path: Path) -> None:
    a, b = tmp_path / "drift-a.csv", tmp_path / "drift-b.csv"
    for path in (a, b):
        Origin(machine={}).save(path, faulty_points.drift(path.stem)["drift"], "drift")
    if isinstance(damage, dict):
        stamp = json.loads(a.with_suffix(".json").read_text())
        a.with_suffix(".json").write_text(json.dumps({**stamp, **damage}))
    else:
        a.write_bytes(b.read_bytes() if damage == "swapped" else a.read_bytes()[:-5])
    with pytest.raises(UserError, match="drift-a") as caught:
        store.load_table(a)
    assert "\n" not in str(caught.value)


# -- runs that are killed --------------------------------------------------------------------------


@pytest.mark.fault(
    fault="reproduce.sh is killed",
    injected="SIGKILL to the script while a stage and a child of the stage are at work",
    holds="the stage and its child end; the next run waits for that and takes over",
)
def test_a_killed_run_takes_its_stage_along(clone: Clone) -> None:
    started = clone.path / "started"
    clone.workbook_does(f'sleep 60 & echo $PPID $$ $! > "{started}"; wait')
    first = subprocess.Popen(["bash", "reproduce.sh"], cwd=clone.path, env=clone.variables(),
                             stdout=subprocess.DEVNULL, start_new_session=True)  # fmt: skip
    processes = [psutil.Process(int(word)) for word in words_of(started)]
    first.kill()
    first.wait()
    clone.workbook_does("echo done")
    assert clone.run("--recorded").returncode == 0, "the next run takes over"
    assert not alive(processes)


@pytest.mark.fault(
    fault="the launcher is ended while ranks start",
    injected="SIGTERM at a random moment after the first request for a rank; more by DDLKIT_FAULT_TRIALS",
    holds="one line, status 128 and the signal, no traceback from the process that forks them",
)
@pytest.mark.parametrize("trial", range(TRIALS))
def test_ranks_that_were_about_to_start_are_not_missed(
    trial: int, tmp_path: Path
) -> None:
    argv = [
        sys.executable,
        "-m",
        "ddlkit",
        "measure",
        "collectives",
        "--out",
        str(tmp_path),
    ]
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    how: Any = {"stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    process = subprocess.Popen(argv, env=environment, **how)
    assert wait_for(
        lambda: any(tmp_path.glob("ddlkit-work-*/files/rank-logs/config.json"))
    )
    time.sleep(random.Random(trial).uniform(0.0, 2.0))
    process.send_signal(signal.SIGTERM)
    printed = process.communicate(timeout=PATIENCE_S)[1]
    assert process.returncode == 128 + signal.SIGTERM and "Traceback" not in printed
    # No table is there, as the next line checks, and nothing may be said to be kept.
    last = printed.splitlines()[-1]
    assert last.startswith("ddlkit: interrupted; ") and "kept" not in last
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


STAGES = {
    "02-measure": """
from ddlkit.measure.session.engine import run_session
import faulty_points
def command(arguments):
    run_session(faulty_points.steady, here / "out", isolate=True)
""",
    "03-book": """
from workbook.site import book
def command(arguments):
    book.run([here / "10_a.ipynb"], executed=here / "e", reports=here / "r", inputs=())
""",
}


def staged(clone: Clone, stage: str) -> list[str]:
    """Let a clone of the project do at that stage what the project does, in small: how it is run then."""
    (clone.path / "requirements.txt").write_text("")
    write_notebook(
        clone.path / "10_a.ipynb", [("code", "import time\ntime.sleep(0.2)")] * 9
    )
    paths = shlex.quote(os.pathsep.join([str(ROOT), str(ROOT / "tests")]))
    argv = shlex.join([*as_command(STAGES[stage]), str(clone.path)])
    clone.workbook_does(f"exec env PYTHONSAFEPATH=1 PYTHONPATH={paths} {argv}")
    return [] if stage == "02-measure" else ["--recorded"]


@pytest.mark.fault(
    fault="a stage of reproduce.sh is ended at a random moment",
    injected="SIGINT, and SIGTERM, to the script at a random moment of measuring and of the book; more by "
    "DDLKIT_FAULT_TRIALS",
    holds="one line, status 130 or 143, no traceback; whole tables only; the next run takes over",
)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_can_be_ended_at_any_moment(stage: str, clone: Clone) -> None:
    chance, arguments = random.Random(stage), staged(clone, stage)
    argv = ["bash", "reproduce.sh", *arguments]
    how: dict[str, Any] = {"cwd": clone.path, "env": clone.variables(), "text": True}
    how |= {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    log, begun = clone.path / f"build/logs/{stage}.log", clone.path / "begun"
    for number, word in TRIALS * [
        (signal.SIGINT, "interrupted"),
        (signal.SIGTERM, "terminated"),
    ]:
        begun.unlink(missing_ok=True)
        process = subprocess.Popen(argv, **how)
        assert wait_for(begun.exists, 300)
        time.sleep(chance.uniform(0.0, 1.5))
        process.send_signal(number)
        printed = process.communicate(timeout=300)[1]
        ended = (
            128 + number,
            f"reproduce.sh: {word}; the same command goes on from here\n",
        )
        assert (process.returncode, printed) in [ended, (0, "")]
        assert "Traceback" not in log.read_text()
        for path in clone.path.glob("out/*.csv"):
            store.load_table(path)
    clone.workbook_does("echo done")
    done = clone.run(*arguments)
    assert (done.stderr, done.returncode) == ("", 0)
    with (
        files.scratch()
    ):  # the next command makes one, too: that sweeps what killed owners left
        pass


@pytest.mark.fault(
    fault="a rank is stopped",
    injected="SIGSTOP to rank 1 of 2 at work",
    holds="the other gives up after its timeout; both are ended, the stopped one too; one line names it",
)
def test_a_stopped_rank_ends_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch, "GRACE_S", 0.2)
    stopped: list[psutil.Process] = []

    class Stopping(Loopback):
        """Stops rank 1 as soon as ranks are watched and have met."""

        def lost(self) -> str:
            if not stopped and (tmp_path / "job.json").exists():
                stopped.append(ranks_below(os.getpid())[1])
                stopped[0].suspend()
            return ""

    told = "^rank 1 of 2 is stopped in job collectives: rank 0"
    with pytest.raises(UserError, match=told) as caught:
        run_endless(tmp_path, Stopping(), join={"timeout_s": 3.0})
    assert "\n" not in str(caught.value) and stopped and not alive(stopped)


@pytest.mark.fault(
    fault="a process that had temporary files is killed",
    injected="SIGKILL to the owner of a temporary directory, another owner beside it alive",
    holds="the next who makes one removes that of the dead, and leaves the other's and foreign folders",
)
def test_directories_of_the_dead_are_swept(tmp_path: Path) -> None:
    code = (
        "import sys, time; from pathlib import Path; from ddlkit.store.files import scratch\n"
        "with scratch(Path(sys.argv[1])) as place: print(place, flush=True); time.sleep(60)"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    owners = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        for _ in "ab"
    ]
    dead, living = (
        Path(owner.stdout.readline().strip()) for owner in owners if owner.stdout
    )
    owners[0].kill()
    owners[0].wait()
    foreign = tmp_path / files.SCRATCH.rstrip("-")
    foreign.mkdir()
    with files.scratch(tmp_path) as mine:
        assert not dead.exists() and living.exists() and mine.exists()
    assert not mine.exists() and foreign.exists()
    for owner in owners:
        owner.kill()
        owner.communicate()
    with files.scratch(tmp_path):
        assert not living.exists()


# -- kernels, descriptors, memory ------------------------------------------------------------------

FEW = "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (24, 2**12))"
DIES = "import os, sys\nif 'ipykernel_launcher' in sys.orig_argv: os._exit(3)\n"


@pytest.mark.fault(
    fault="a kernel dies at its start, or there are few file descriptors",
    injected="a kernel that ends at once; no more than 24 open files allowed",
    holds="one line that names the notebook or the limit, and what may help",
)
def test_a_kernel_that_does_not_start_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_notebook(tmp_path / "10_a.ipynb", [("code", "print(1)")])
    done = run([*as_command(STAGES["03-book"], FEW), str(tmp_path)])
    line = only_line(done)
    assert "24 open files are allowed, " in line and line.endswith(
        ": run ulimit -n 128 first"
    )
    (tmp_path / "sitecustomize.py").write_text(DIES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with pytest.raises(
        UserError, match=r"10_a.ipynb: its kernel did not start: .*exit status 3"
    ):
        book.run(
            [tmp_path / "10_a.ipynb"],
            executed=tmp_path / "e",
            reports=tmp_path,
            inputs=(),
        )


@pytest.mark.fault(
    fault="memory is used up in a command",
    injected="no more than 64 MiB above what is used already, and a file of 100 MB",
    holds="one line that says so",
)
def test_low_memory_is_one_line(tmp_path: Path) -> None:
    code = (
        "import resource, sys; from pathlib import Path; import numpy, pandas\n"
        "from ddlkit import cli; from ddlkit.formats import messages\n"
        "used = int(Path('/proc/self/statm').read_text().split()[0]) * resource.getpagesize()\n"
        "resource.setrlimit(resource.RLIMIT_AS, (used + 2**26, used + 2**26))\n"
        "sys.exit(cli.main(['fit', sys.argv[1]]))"
    )
    times = tmp_path / "times.csv"
    with open(times, "wb") as file:
        file.write(b"bytes,seconds\n1000,0.5\n")
        file.truncate(10**8)
    assert "memory is used up" in only_line(
        run([sys.executable, "-c", code, str(times)])
    )


# -- the lab ---------------------------------------------------------------------------------------


@pytest.mark.fault(
    fault="no root",
    injected="another user's effective id",
    holds="a lab is refused in one line",
)
@pytest.mark.lab
def test_without_root_a_lab_is_one_line(require_lab: None, tmp_path: Path) -> None:
    os.seteuid(65534)
    try:
        with pytest.raises(UserError, match="^the lab needs root"):
            Lab(LabShape(2, 1e9)).up()
        assert network.why_unavailable.__wrapped__() == network.NEEDS_ROOT
    finally:
        os.seteuid(0)


@pytest.mark.fault(
    fault="no ip, no tc, or a tc that hangs",
    injected="a PATH without them; a tc that sleeps",
    holds="one line names the program; nothing of the lab is left",
)
@pytest.mark.lab
@pytest.mark.parametrize(
    ("missing", "told"),
    [
        ("ip", "^the lab needs ip "),
        ("tc", "^the lab needs tc "),
        ("hangs", "tc -n .*did not end within 2 s"),
    ],
)
def test_a_lab_without_its_tools_is_one_line(
    missing: str,
    told: str,
    tmp_path: Path,
    require_lab: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(network, "DEADLINE_S", 2.0)
    there = {} if missing == "ip" else {"ip": f'exec {shutil.which("ip")} "$@"'}
    there |= {"tc": f"exec {shutil.which('sleep')} 60"} if missing == "hangs" else {}
    for name, script in there.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    with monkeypatch.context() as patch, pytest.raises(UserError, match=told) as caught:
        patch.setenv("PATH", str(tmp_path))
        Lab(LabShape(2, 1e9)).up()
    assert "\n" not in str(caught.value)


@pytest.mark.fault(
    fault="the state of a lab is empty, ownerless or damaged",
    injected="such a file among the states, and a namespace of that lab",
    holds="status shows it as dead, down says what to do, clean and the next lab remove it",
)
@pytest.mark.lab
@pytest.mark.parametrize("text", ["", '{"owner": {"pid": 1}}'])
def test_a_damaged_state_is_a_dead_lab(
    text: str, tmp_path: Path, require_lab: None, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Among states of its own: what other labs of this machine are doing is not to be looked at."""
    monkeypatch.setattr(network, "STATE", tmp_path)
    label = f"bad{os.getpid()}"
    subprocess.run(["ip", "netns", "add", f"{label}-rank0"], check=True)
    try:
        (tmp_path / f"{label}.json").write_text(text)
        assert cli.main(["lab", "status"]) == 0
        ranks = "an unknown number of ranks"
        shown = f"{label}: dead: {ranks} over an unknown link: run ddlkit lab clean"
        assert shown in capsys.readouterr().out
        assert cli.main(["lab", "down", "--label", label]) == 2
        assert (
            f"the state of lab {label} is damaged: remove it by"
            in capsys.readouterr().err
        )
        assert network.clean() == [label]
        assert not (network.NAMESPACES / f"{label}-rank0").exists()
        (tmp_path / f"{label}.json").write_text(text)
        with Lab(LabShape(1, 1e9), f"after{os.getpid()}"):
            assert [row["alive"] for row in network.status()] == [True]
    finally:
        subprocess.run(
            ["ip", "netns", "del", f"{label}-rank0"], stderr=subprocess.DEVNULL
        )


# -- odd environments and folders ------------------------------------------------------------------

ASCII = {
    "LC_ALL": "C",
    "PYTHONUTF8": "0",
    "PYTHONCOERCECLOCALE": "0",
    "PYTHONIOENCODING": "ascii",
}
DUMB = {"TERM": "dumb", "COLUMNS": "1", "LINES": "0"}
ODD = {
    "ASCII on a dumb terminal": {**os.environ, **ASCII, **DUMB, "HOME": "/nowhere"},
    "nothing but a PATH": {"PATH": os.environ["PATH"]},
}


@pytest.mark.fault(
    fault="an odd environment",
    injected="ASCII for everything on a dumb terminal of one column and a wrong HOME; nothing but a PATH",
    holds="commands say what they say elsewhere, where need be with escaped letters",
)
@pytest.mark.parametrize("odd", ODD)
def test_odd_environments_change_nothing(odd: str, tmp_path: Path) -> None:
    times = tmp_path / "times.csv"
    rows = [f"{1000 * 2**n},{1e-5 + 1e-6 * 2**n}\n" for n in range(9)]
    times.write_text("".join(["bytes,seconds\n", *rows]))
    code = (
        "import sys; from ddlkit import cli; from ddlkit.core.units import format_seconds as f\n"
        "sys.exit(cli.main(['fit', sys.argv[1]]) or print(f(5e-6)))"
    )
    done = run(
        [sys.executable, "-c", code, str(times)], {**ODD[odd], "PYTHONPATH": str(ROOT)}
    )
    assert (done.returncode, done.stderr) == (0, "")
    *lines, last = done.stdout.splitlines()
    assert last == ("5 \\xb5s" if "ASCII" in odd else "5 µs")
    assert any(line.startswith("alpha_s") for line in lines)


ODD_FOLDER = "two  spaces, ünïcode Ελλ 数, quote'\"$x;*" + 40 * "/deeper" + "/-dash"


@pytest.mark.fault(
    fault="an odd folder",
    injected="spaces, Unicode, quotes, wild cards, a dash, hundreds of letters in its path; symbolic links",
    holds="ranks start, tables are written and read, reproduce.sh builds beside itself, not beside a link",
)
def test_odd_folders_change_nothing(tmp_path: Path, clone: Clone) -> None:
    real, away = tmp_path / "real", tmp_path / "elsewhere"
    for directory in (real / ODD_FOLDER, away):
        directory.mkdir(parents=True)
    (tmp_path / "link").symlink_to(real)
    folder = tmp_path / "link" / ODD_FOLDER
    Origin(machine={}).save(
        folder / "drift-a.csv", faulty_points.drift()["drift"], "drift"
    )
    assert len(store.load_table(folder / "drift-a.csv")) == 1

    class Met(Loopback):
        """Is lost as soon as the ranks have met, which ends them."""

        def lost(self) -> str:
            return "the ranks met" if (folder / "o" / "job.json").exists() else ""

    with pytest.raises(UserError, match="^the ranks met"):
        run_endless(folder / "o", Met())
    moved = folder / "clone"
    shutil.copytree(clone.path, moved)
    (paths,) = clone.environment.rglob("clone.pth")
    paths.write_text(paths.read_text().replace(str(clone.path), str(moved)))
    (away / "go.sh").symlink_to(os.path.relpath(moved / "reproduce.sh", away.resolve()))
    done = run(["bash", str(away / "go.sh"), "--recorded"], clone.variables(), away)
    assert (done.returncode, done.stderr) == (0, "")
    assert (moved / "build/logs/03-book.log").exists()
    assert [path.name for path in away.iterdir()] == ["go.sh"]


# -- hostile neighbours ----------------------------------------------------------------------------


@pytest.mark.fault(
    fault="somebody else may write into the folder",
    injected="links to a victim's file under every name that a writer of ours was known to use",
    holds="the victim's file is as before: names are random, and no link is followed",
)
def test_no_planted_link_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (victim := tmp_path / "victim").write_text("precious")
    (shared := tmp_path / "shared").mkdir()
    for name in (".x.csv.planted.tmp", "y.csv", "z.csv", ".lock"):
        (shared / name).symlink_to(victim)
    files.atomic_write_text(shared / "y.csv", "ours")
    assert (shared / "y.csv").read_text() == "ours" and not (
        shared / "y.csv"
    ).is_symlink()
    with (
        pytest.raises(UserError, match="cannot lock .*lock: "),
        store.lock(shared / ".lock"),
    ):
        pass
    with pytest.raises(
        UserError, match="cannot write .*z.csv: Too many levels of symbolic links"
    ):
        files.append_text(shared / "z.csv", "ours")
    monkeypatch.setattr(secrets, "token_hex", lambda n: "planted")
    with pytest.raises(UserError, match="File exists"):
        files.atomic_write_text(shared / "x.csv", "ours")
    assert victim.read_text() == "precious"


def listening_at(process: psutil.Process) -> list[str]:
    listing = run(
        ["nsenter", "-t", str(process.pid), "-n", "ss", "-ltnpH"]
    ).stdout.splitlines()
    mine = [line.split()[3] for line in listing if f"pid={process.pid}," in line]
    return [at.rpartition(":")[0] for at in mine]


LISTENING = [
    (Loopback(), {launch.LOCALHOST}),
    pytest.param(
        Lab(LabShape(2, 1e9)), {"10.77.0.1", "10.77.0.2"}, marks=pytest.mark.lab
    ),
]


@pytest.mark.fault(
    fault="a neighbour on the network reaches what listens",
    injected="a list of all listening sockets of two ranks at work on loopback, and in a lab",
    holds="every one listens at 127.0.0.1 alone, or at the lab's own address of the rank",
)
@pytest.mark.parametrize(("place", "own"), LISTENING)
def test_ranks_listen_at_their_own_address_alone(
    place: Loopback | Lab, own: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:  # fmt: skip
    if isinstance(place, Lab):
        request.getfixturevalue("require_lab")
    found: list[str] = []

    def look(_: object) -> str:
        if not (tmp_path / "job.json").exists():
            return ""
        found.extend(
            at for rank in ranks_below(os.getpid()) for at in listening_at(rank)
        )
        return "seen"

    monkeypatch.setattr(type(place), "lost", look)
    up: AbstractContextManager[object] = (
        place if isinstance(place, Lab) else nullcontext()
    )
    with up, pytest.raises(UserError, match="^seen"):
        run_endless(tmp_path, place)
    assert len(found) >= 3, "the store, and gloo of each rank"
    assert set(found) <= own, "nowhere else"


# -- the tests themselves --------------------------------------------------------------------------


@pytest.mark.fault(
    fault="tests run in another order, and twice",
    injected="two files of tests, each test twice, in an order of chance",
    holds="all pass: none needs another before it, none leaves anything to the next",
)
def test_tests_pass_in_any_order_and_twice(tmp_path: Path) -> None:
    argv = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--shuffle=7",
    ]
    twice = 2 * ("tests/test_workload.py", "tests/test_ring.py")
    done = run([*argv, f"--basetemp={tmp_path / 'p'}", "--keep-duplicates", *twice])
    assert done.returncode == 0, done.stdout[-2000:]


def test_the_page_says_what_the_marks_say() -> None:
    marks = fault_table.marks()
    assert len({mark.fault for mark in marks}) == len(marks) >= 25
    assert all(mark.fault and mark.injected and mark.holds for mark in marks)
    assert fault_table.PAGE.read_text(encoding="utf-8") == fault_table.page(marks)
