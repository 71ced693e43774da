"""The owner's end of a process that has imported torch and forks ranks in milliseconds, not seconds.

Importing torch costs seconds of processor time, in every rank anew: sixteen ranks on two cores would
spend half a minute on it before the first message. So one process (`fork_server`) imports it once, and
every rank of every launch is its child. It ends when its owner's end of the pipe closes, however the
owner ends, and its ranks with it. No torch here.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddlkit.core.errors import UserError
from ddlkit.run.jobs.protocol import STARTED, child_environment


def available() -> bool:
    """Whether this system can do it; elsewhere each rank is a process that imports torch itself."""
    return hasattr(os, "pidfd_open")


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
        self._running: dict[int, ForkedRank] = {}
        self._heard = b""
        # A session of its own: Ctrl-C in the terminal reaches only the owner.
        self._process = subprocess.Popen(
            [sys.executable, "-u", "-m", "ddlkit.run.jobs.fork_server"],
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
        """Take in what the zygote says within the time; False if it said nothing."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._reports, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                return False
        said = os.read(self._reports.fileno(), 65536)
        if not said:
            for rank in self._running.values():  # they died with their parent
                rank.returncode = -signal.SIGKILL
            self._running.clear()
            self._process.wait()
            return True
        *lines, self._heard = (self._heard + said).split(b"\n")
        for event, pid, status in map(json.loads, lines):
            if event == STARTED:
                self._newest = self._running[pid] = ForkedRank(self, pid)
            else:
                self._running.pop(pid).returncode = status
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
