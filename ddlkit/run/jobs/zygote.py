"""A process that has imported torch and forks ranks in milliseconds: its owner's end, and its own.

Importing torch costs seconds of processor time, in every rank anew: sixteen ranks on two cores would
spend half a minute on it before the first message. So one process, which runs this module, imports it
once and computes nothing, and every rank of every launch is its child. It ends when its owner's end of
the pipe closes, however the owner ends, and its ranks with it. No torch here before a job needs it.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import selectors
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from ddlkit.core.errors import UserError
from ddlkit.run.jobs import worker
from ddlkit.run.jobs.protocol import PARENT, child_environment

_CLONE_NEWNET = 0x40000000
_PR_SET_NAME = 15


def available() -> bool:
    """Whether this system can do it; elsewhere each rank is a process that imports torch itself."""
    return hasattr(os, "pidfd_open")


# -- the owner's end ---------------------------------------------------------------------------


class ForkedRank:
    """A forked rank, as `subprocess.Popen` would show it."""

    def __init__(self, zygote: Zygote, pid: int) -> None:
        self._zygote, self.pid = zygote, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        self._zygote.hear(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status once it is there. Raises subprocess.TimeoutExpired."""
        while self.returncode is None:
            if not self._zygote.hear(timeout):
                raise subprocess.TimeoutExpired(f"rank {self.pid}", timeout or 0.0)
        return self.returncode


class Zygote:
    """The process, and what it has reported of its ranks."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._ranks: dict[int, ForkedRank] = {}  # those that run
        self._heard = b""
        # A session of its own: Ctrl-C in the terminal reaches only the owner.
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-m", "ddlkit.run.jobs.zygote"],
            # Read when torch is loaded; each rank sets its own number.
            env={**child_environment(), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdin and self._process.stdout
        self._requests, self._reports = self._process.stdin, self._process.stdout

    @property
    def usable(self) -> bool:
        """Whether it lives and is ours: a fork of the owner must not talk to it."""
        return self.owner == os.getpid() and self._process.poll() is None

    def start(
        self, argv: Sequence[str], environment: Mapping[str, str], log: Path, namespace: Path | None
    ) -> ForkedRank:
        """Fork a rank that runs ``ddlkit.run.jobs.worker`` with ``argv``.

        environment : all of it; log : where its output goes; namespace : the network namespace's file
        Raises UserError when the zygote died.
        """
        request = {
            "argv": list(argv),
            "environment": dict(environment),
            "directory": os.getcwd(),
            "log": str(log),
            "namespace": str(namespace) if namespace else "",
        }
        self._newest: ForkedRank | None = None
        with contextlib.suppress(BrokenPipeError):
            self._requests.write(json.dumps(request).encode() + b"\n")
            self._requests.flush()
        while self._newest is None:
            if self._process.poll() is not None:
                raise UserError(
                    "ranks cannot be started: importing torch failed in the process that forks them"
                )
            self.hear(1.0)
        return self._newest

    def hear(self, timeout_s: float | None) -> bool:
        """Take in what the zygote reports within the time; False if that is nothing."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._reports, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                return False
        heard = os.read(self._reports.fileno(), 65536)
        if not heard:
            for rank in self._ranks.values():  # they died with their parent
                rank.returncode = -signal.SIGKILL
            self._ranks.clear()
            self._process.wait()
        *lines, self._heard = (self._heard + heard).split(b"\n")
        for pid, status in map(json.loads, lines):
            if status is None:
                self._newest = self._ranks[pid] = ForkedRank(self, pid)
            else:
                self._ranks.pop(pid).returncode = status
        return True

    def close(self) -> None:
        """End it, and every rank that still runs."""
        if self.owner == os.getpid():
            self._requests.close()
            self._process.wait()
            self._reports.close()


_current: Zygote | None = None


def zygote() -> Zygote:
    """This process's zygote, started at the first call."""
    global _current
    if _current is None or not _current.usable:
        _current = Zygote()
        atexit.register(_current.close)
    return _current


# -- its own end -------------------------------------------------------------------------------


def main() -> None:
    """Serve requests from standard input until it closes; report [pid, exit status or None] of each rank."""
    owner = os.dup(1)
    os.dup2(2, 1)  # nobody but us writes to the owner
    children: dict[int, int] = {}
    with selectors.DefaultSelector() as chooser:
        chooser.register(0, selectors.EVENT_READ)
        while True:
            for key, _ in chooser.select():
                if key.fd in children:
                    pid = children.pop(key.fd)
                    chooser.unregister(key.fd)
                    os.close(key.fd)
                    _report(owner, pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                    continue
                # The owner waits for each answer, so there is never more than one line to read.
                line = sys.stdin.buffer.readline()
                if not line:
                    return
                request = json.loads(line)
                preload(request["argv"][0])
                pid = os.fork()
                if not pid:
                    chooser.close()
                    _live(request, [owner, *children])
                with contextlib.suppress(OSError):
                    os.setpgid(pid, pid)  # here and in the child: whoever is first
                child = os.pidfd_open(pid)
                children[child] = pid
                chooser.register(child, selectors.EVENT_READ)
                _report(owner, pid, None)


def preload(job: str) -> None:
    """Import what a job needs before its ranks are forked; an unknown job is left to them to refuse."""
    with contextlib.suppress(UserError):
        worker.find(job)


def _report(fd: int, pid: int, status: int | None) -> None:
    os.write(fd, json.dumps([pid, status]).encode() + b"\n")


def _live(request: Mapping[str, Any], to_close: Sequence[int]) -> NoReturn:
    """What a rank does from fork to end."""
    status = 1
    try:
        for fd in to_close:
            os.close(fd)
        _settle(request)
        status = worker.main(request["argv"])
    except BaseException:
        traceback.print_exc()
    worker.leave(status)


def _settle(request: Mapping[str, Any]) -> None:
    """Own group, files, environment, directory, name and network."""
    os.setpgid(0, 0)
    with open(request["log"], "wb", buffering=0) as log, open(os.devnull, "rb") as nothing:
        for number, stream in ((0, nothing), (1, log), (2, log)):
            os.dup2(stream.fileno(), number)
    os.environ.clear()
    os.environ.update({**request["environment"], PARENT: str(os.getppid())})
    os.chdir(request["directory"])
    sys.argv = [worker.__name__, *request["argv"]]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NAME, f"ddlkit-rank{os.environ.get('RANK', '')}".encode())
    if request["namespace"]:
        with open(request["namespace"], "rb") as place:
            if libc.setns(place.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "cannot enter", request["namespace"])


if __name__ == "__main__":
    main()
