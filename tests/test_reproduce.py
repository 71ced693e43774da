"""reproduce.sh, run in small clones whose active environment has a stand-in for `ddlkit`."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from places import PATIENCE_S, alive

ROOT = Path(__file__).resolve().parent.parent
UNWANTED = ("CONDA_PREFIX", "PYTHONPATH", "PYTHONPYCACHEPREFIX")
TOOLS = ["awk", "bash", "cat", "cut", "dirname", "mkdir", "rm", "sleep", "tail"]


@dataclass(frozen=True)
class Clone:
    """A folder with reproduce.sh and what it reads; `environment` satisfies the pins."""

    path: Path
    environment: Path

    def workbook_does(self, script: str) -> None:
        """Stage commands note their arguments, then run the shell `script`."""
        command = self.environment / "bin" / "ddlkit"
        command.write_text(f'#!/bin/sh\necho "$*" >> "{self.path}/calls"\n{script}\n')
        command.chmod(0o755)
        # python -m workbook, run in this folder, becomes that script
        program = f"import os, sys\nos.execv({str(command)!r}, [sys.argv[0], *sys.argv[1:]])\n"
        (self.path / "workbook" / "__main__.py").write_text(program)

    def variables(self, **changes: str) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if k not in UNWANTED}
        return {**kept, "VIRTUAL_ENV": str(self.environment), **changes}

    def run(
        self, *arguments: str, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        how: dict[str, Any] = {"cwd": self.path, "env": self.variables(**variables)}
        how |= {"capture_output": True, "text": True, "timeout": PATIENCE_S}
        return subprocess.run(["bash", "reproduce.sh", *arguments], **how)

    def calls(self) -> list[str]:
        return (self.path / "calls").read_text().splitlines()


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    path, environment = tmp_path / "clone", tmp_path / "environment"
    for package in ("ddlkit", "workbook"):
        (path / package).mkdir(parents=True)
    (path / "notebooks").mkdir()
    for name in ("10_a", "40_d", "90_z"):
        (path / "notebooks" / f"{name}.ipynb").touch()
    for name in ("reproduce.sh", "requirements.txt", "ddlkit/__init__.py"):
        shutil.copy(ROOT / name, path / name)
    venv.create(environment, with_pip=False, symlinks=True)
    variables = {"base": str(environment), "platbase": str(environment)}
    own_packages = Path(sysconfig.get_path("purelib", vars=variables))
    paths = [str(path), sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    (own_packages / "clone.pth").write_text("\n".join(paths))
    made = Clone(path, environment)
    made.workbook_does("echo done")
    return made


def wait_for(path: Path) -> list[str]:
    """Words of a file that another process is about to write, once its line is whole."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        if path.exists() and path.read_text().endswith("\n"):
            return path.read_text().split()
        time.sleep(0.02)
    raise AssertionError(f"{path.name} did not appear")


@pytest.mark.parametrize(
    "words", ["--fast", "--recorded --full", "test --full", "--only 41"]
)
def test_wrong_arguments_are_one_line(clone: Clone, words: str) -> None:
    done = clone.run(*words.split())
    assert done.returncode == 2 and done.stdout == ""
    assert len(done.stderr.splitlines()) == 1 and done.stderr.startswith(
        "reproduce.sh: "
    )


MEASURE = "record all --suite full --out build/measured-full"
BOOK = "build --data build/measured-full --reports build/reports --only 10,40"


@pytest.mark.parametrize(
    ("words", "calls"),
    [
        ("--full --only 10,40", [MEASURE, BOOK]),
        ("--only 90 --recorded", ["build --recorded --only 90"]),
    ],
)
def test_stages_run_in_order_in_the_active_environment(
    clone: Clone, words: str, calls: list[str]
) -> None:
    done = clone.run(*words.split())
    assert (done.returncode, done.stderr, clone.calls()) == (0, "", calls)
    first, *stages, last = done.stdout.splitlines()
    assert str(clone.environment) in first and last.split()[0] == "total"
    begun, ended = stages[::2], stages[1::2]
    expected = ["02-measure", "03-book"][-len(calls) :]
    for lines in (begun, ended):
        assert [line.split()[0] for line in lines] == expected
    logs = [f"build/logs/{name}.log" for name in expected]
    assert all(log in line for log, line in zip(logs, begun, strict=True))
    assert not (clone.path / ".venv").exists()


def test_a_failing_stage_is_one_line_and_stops_the_run(clone: Clone) -> None:
    message = r"50%%\r\033[31mddlkit: error: no such link: ib9\033[0m\n\n"
    clone.workbook_does(f"echo working; printf '{message}' >&2; exit 2")
    done = clone.run()
    assert done.returncode == 2
    assert done.stderr == (
        "reproduce.sh: stage 02-measure failed (exit status 2): "
        "ddlkit: error: no such link: ib9 [log: build/logs/02-measure.log]\n"
    )
    assert (
        (clone.path / "build/logs/02-measure.log").read_text().startswith("working\n")
    )
    assert len(clone.calls()) == 1


@pytest.mark.fault(
    fault="a stage of reproduce.sh is killed",
    injected="a stage that sends itself SIGKILL",
    holds="one line names the stage; status 137",
)
def test_a_stage_that_is_killed_is_one_line(clone: Clone) -> None:
    clone.workbook_does("echo at work; kill -KILL $$")
    done = clone.run("--recorded")
    assert done.returncode == 137
    assert len(done.stderr.splitlines()) == 1 and "03-book" in done.stderr


@pytest.mark.parametrize("by", ["terminal", "signal"])
@pytest.mark.fault(
    fault="two runs of reproduce.sh at once, and Ctrl-C",
    injected="a second run beside the first; then Ctrl-C at the terminal, or SIGINT to the "
    "script alone",
    holds="the second is refused and names the first; Ctrl-C ends every process and frees the lock",
)
def test_an_interrupt_ends_every_process_and_frees_the_lock(
    clone: Clone, by: str
) -> None:
    """A second run is refused while the first is at work, and works once that is stopped."""
    started = clone.path / "started"
    clone.workbook_does(f'sleep 60 & echo $PPID $$ $! > "{started}"; wait')
    command = ["bash", "reproduce.sh"]
    if by == "terminal":
        command = [sys.executable, "-c", f"import pty; pty.spawn({command})"]
    pipe = subprocess.PIPE
    how: dict[str, Any] = {
        "cwd": clone.path,
        "env": clone.variables(),
        "start_new_session": True,
    }
    first = subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, **how
    )
    assert first.stdin is not None
    try:
        processes = [psutil.Process(int(word)) for word in wait_for(started)]
        second = clone.run()
        assert second.returncode == 1
        assert (
            len(second.stderr.splitlines()) == 1
            and f"(pid {processes[0].pid})" in second.stderr
        )
        assert alive(processes) == processes
        if by == "terminal":
            first.stdin.write(b"\x03")
            first.stdin.flush()
        else:
            first.send_signal(signal.SIGINT)
        printed, _ = first.communicate(timeout=PATIENCE_S)
    finally:
        first.kill()
    assert b"reproduce.sh: interrupted; the same command goes on from here" in printed
    assert by == "terminal" or first.returncode == 130
    assert not alive(processes)
    clone.workbook_does("echo done")
    assert clone.run().returncode == 0


QUICK_VENV = """\
#!/bin/sh
if [ "$1 $2" != "-m venv" ]; then exec {python} "$@"; fi
{python} "$@" --without-pip --symlinks
for packages in .venv/lib/python*/site-packages; do
  echo {packages} >"$packages/pip.pth"
done
"""
"""Plays a Python whose environments have the pip of the tests. To install another takes 5 s."""


@pytest.mark.fault(
    fault="the environment cannot be set up, or lost something since it was",
    injected="a pinned package that no index has, in an environment that was sealed as whole",
    holds="it is made again; one line says what failed; the half environment does not count as one",
)
def test_an_environment_that_lacks_a_pin_is_made_again_and_counts_only_when_whole(
    clone: Clone, tmp_path: Path
) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    played = tools / "python3.11"
    packages = sysconfig.get_path("purelib")
    played.write_text(QUICK_VENV.format(python=sys.executable, packages=packages))
    played.chmod(0o755)
    path = f"{tools}:{os.environ['PATH']}"
    pins = "no-such-package-of-ours==0.0\n"
    (clone.path / "requirements.txt").write_text(pins)
    venv.create(clone.path / ".venv", with_pip=False, symlinks=True)
    sealed = f"{hashlib.sha256(pins.encode()).hexdigest()} {platform.python_version()} {clone.path}"
    (clone.path / ".venv/ready").write_text(f"{sealed}\n")
    done = clone.run(PATH=path, PIP_NO_INDEX="1", PIP_FIND_LINKS="")
    assert "lacks no-such-package-of-ours==0.0" in done.stdout
    assert done.returncode != 0
    assert (
        len(done.stderr.splitlines()) == 1 and "stage 01-set-up failed" in done.stderr
    )
    assert "no-such-package-of-ours" in done.stderr
    assert (
        not (clone.path / ".venv/ready").exists()
        and not (clone.path / "calls").exists()
    )


@pytest.mark.fault(
    fault="no Python",
    injected="a PATH with nothing but the shell's tools",
    holds="one line says what is needed",
)
def test_without_a_python_it_says_what_is_missing(clone: Clone, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in TOOLS:
        (tools / name).symlink_to(str(shutil.which(name)))
    done = clone.run(PATH=str(tools))
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1 and "Python 3.11 or newer" in done.stderr


def test_the_package_that_python_lacks_has_its_version(
    clone: Clone, tmp_path: Path
) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    played = tools / "python3.11"
    played.write_text(
        f'#!/bin/bash\n[[ $2 != *ensurepip* ]] || exit 1\nexec {sys.executable} "$@"\n'
    )
    played.chmod(0o755)
    (clone.path / "requirements.txt").write_text("no-such-package-of-ours==0.0\n")
    done = clone.run(PATH=f"{tools}:{os.environ['PATH']}")
    assert done.returncode == 1
    version = ".".join(platform.python_version_tuple()[:2])
    assert f"(python{version}-venv on " in done.stderr
