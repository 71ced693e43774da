"""What a test of a fault must not leave behind, whatever it broke: one check for all of them."""

from __future__ import annotations

import json
import multiprocessing.util
import os
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from ddlkit.jobs import launch
from ddlkit.lab import network
from places import alive, those

PATIENCE_S = 120.0  # the kernel kills at once; who cleans up has this long, on the busiest machine
TAG = "DDLKIT_TESTED_BY"
"""In the environment of whatever a test starts: by it even an orphan is known as the test's."""
KEPT = "torchinductor_"
"""A folder that torch makes once it has loaded its compiler, and keeps for whoever comes next."""
SERVES = "from multiprocessing."
"""In the command line of what forks the ranks of all tests, and of what tracks its resources."""
HALF = ("*.tmp", ".room", "ddlkit-work-*")


@contextmanager
def none_left(directory: Path) -> Iterator[None]:
    """Fail if the block, which writes into ``directory``, leaves anything that was not there before.

    Processes of its own, namespaces, states and interfaces of labs, locks that are held, temporary files
    (the block has a folder of its own for these), half-written files. What others do beside it is theirs.
    """
    multiprocessing.util.get_temp_dir()  # the fork server's, which is there for later tests too
    # The server passes its environment on to all ranks that it forks. One that is started within
    # the block would still name the folder of temporary files when that is gone.
    launch._start_server("ddlkit.jobs.rank")
    tag = uuid.uuid4().hex
    with (
        tempfile.TemporaryDirectory(prefix="t") as temporary,
        _environment(tag, temporary),
    ):
        Path(temporary).chmod(0o755)  # as /tmp, for tests that go on as another user
        before, known = _places(), _below()
        yield
        give_up = time.monotonic() + PATIENCE_S
        while left := _left(tag, before, known, (directory, Path(temporary))):
            if time.monotonic() > give_up:
                for process in _processes(tag, known):
                    with suppress(psutil.NoSuchProcess):
                        process.kill()
                raise AssertionError(f"left behind: {', '.join(left)}")
            time.sleep(0.02)


@contextmanager
def _environment(tag: str, temporary: str) -> Iterator[None]:
    """Temporary files of the block in a folder of their own, and everything that it starts tagged."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(TAG, tag)
        patch.setenv("TMPDIR", temporary)
        patch.setattr(tempfile, "tempdir", None)
        yield


def _left(
    tag: str,
    before: set[str],
    known: set[psutil.Process],
    directories: tuple[Path, Path],
) -> list[str]:
    processes = [f"process {process.pid}" for process in alive(_processes(tag, known))]
    try:
        files = [path for pattern in HALF for path in directories[0].rglob(pattern)]
        files += [
            path for path in directories[1].iterdir() if not path.name.startswith(KEPT)
        ]
    except (
        FileNotFoundError
    ) as error:  # a folder went while it was looked into: look again
        files = [Path(str(error.filename))]
    held = [f"lock on {path}" for path in _held(directories)]
    return [*processes, *sorted(_places() - before), *map(str, files), *held]


def _serves(process: psutil.Process) -> bool:
    ours = process.ppid() == os.getpid()
    return ours and any(SERVES in word for word in process.cmdline())


def _below() -> set[psutil.Process]:
    below = alive(psutil.Process().children(recursive=True))
    return {*those(lambda process: not _serves(process), below)}


def _processes(tag: str, known: set[psutil.Process]) -> list[psutil.Process]:

    def tagged(process: psutil.Process) -> bool:
        environment = Path(f"/proc/{process.pid}/environ").read_bytes()
        return f"{TAG}={tag}".encode() in environment and not _serves(process)

    return [*{*(_below() - known), *alive(those(tagged, psutil.process_iter()))}]


def _places() -> set[str]:
    """Network interfaces of this machine, and labs that nobody alive but us has up."""
    found = {f"interface {name}" for name in _names(Path("/sys/class/net"))}
    states = {path.stem: path for path in network.STATE.glob("[a-z]*.json")}
    namespaces = {
        name.rpartition("-")[0] for name in _names(network.NAMESPACES) if "-" in name
    }
    for label in namespaces | set(states):
        with suppress(OSError, ValueError, KeyError):
            state = json.loads(states[label].read_text())
            pid, _ = owner = state["needs"][0] if state["owned"] else (0, None)
            if pid != os.getpid() and network._runs(owner):
                continue
        found.add(f"lab {label}")
    return found


def _names(directory: Path) -> list[str]:
    return os.listdir(directory) if directory.is_dir() else []


def _held(directories: tuple[Path, ...]) -> list[Path]:
    words = Path("/proc/locks").read_text().split()
    inodes = {int(word.rpartition(":")[2]) for word in words if word.count(":") == 2}
    paths = [
        path
        for folder in directories
        for path in (folder, *folder.rglob("*"))
        if inodes
    ]
    return [path for path in paths if path.exists() and path.stat().st_ino in inodes]
