"""A process that has imported torch and forks ranks: starting one takes milliseconds, not seconds.

Importing torch costs seconds of processor time, in every rank anew: sixteen ranks on two cores would
spend half a minute on it before the first message. So one process imports it once, never computes, opens
no GPU, and every rank of every launch is its child. It ends when its owner's end of the pipe closes,
however the owner ends, and its ranks with it. No torch in the owner.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import json
import os
import selectors
import signal
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn

from ddlkit.core.errors import UserError
from ddlkit.run.jobs.protocol import PARENT, child_environment

_CLONE_NEWNET = 0x40000000
_PR_SET_NAME = 15
_STARTED, _ENDED = "started", "ended"


def available() -> bool:
    """Whether this system can do it; elsewhere each rank is a process that imports torch itself."""
    return hasattr(os, "pidfd_open")


# -- the owner's side --------------------------------------------------------------------------


class Rank:
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
    """The process, and what it has told of its ranks."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._running: dict[int, Rank] = {}
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

    @property
    def usable(self) -> bool:
        """Whether it lives and is ours: a fork of the owner must not talk to it."""
        return self.owner == os.getpid() and self._process.poll() is None

    def start(
        self, argv: Sequence[str], environment: Mapping[str, str], log: Path, namespace: Path | None
    ) -> Rank:
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
        self._newest: Rank | None = None
        with contextlib.suppress(BrokenPipeError):
            self._pipe(self._process.stdin).write(json.dumps(request).encode() + b"\n")
            self._pipe(self._process.stdin).flush()
        while self._newest is None:
            if self._process.poll() is not None:
                raise UserError(
                    "ranks cannot be started: importing torch failed in the process that forks them"
                )
            self.hear(1.0)
        return self._newest

    def hear(self, timeout_s: float | None) -> bool:
        """Take in what the zygote says within the time; False if it said nothing."""
        pipe = self._pipe(self._process.stdout)
        with selectors.DefaultSelector() as selector:
            selector.register(pipe, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                return False
        said = os.read(pipe.fileno(), 65536)
        if not said:
            for rank in self._running.values():  # they died with their parent
                rank.returncode = -signal.SIGKILL
            self._running.clear()
            self._process.wait()
            return True
        *lines, self._heard = (self._heard + said).split(b"\n")
        for event, pid, status in map(json.loads, lines):
            if event == _STARTED:
                self._newest = self._running[pid] = Rank(self, pid)
            else:
                self._running.pop(pid).returncode = status
        return True

    def close(self) -> None:
        """End it, and every rank that still runs."""
        if self.owner == os.getpid():
            self._pipe(self._process.stdin).close()
            self._process.wait()
            self._pipe(self._process.stdout).close()

    @staticmethod
    def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
        assert stream is not None
        return stream


_current: Zygote | None = None


def zygote() -> Zygote:
    """This process's zygote, started at the first call."""
    global _current
    if _current is None or not _current.usable:
        _current = Zygote()
        atexit.register(_current.close)
    return _current


# -- the zygote's side -------------------------------------------------------------------------


def main() -> None:
    """Serve requests from standard input until it closes."""
    importlib.import_module("ddlkit.run.jobs.ranks")
    told = os.dup(1)
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
                    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    _tell(told, _ENDED, pid, status)
                    continue
                # The owner waits for each answer, so there is never more than one line to read.
                line = sys.stdin.buffer.readline()
                if not line:
                    return
                request = json.loads(line)
                importlib.import_module("ddlkit.run.jobs.worker").preload(request["argv"][0])
                pid = os.fork()
                if not pid:
                    chooser.close()
                    _live(request, [told, *children])
                with contextlib.suppress(OSError):
                    os.setpgid(pid, pid)  # here and in the child: whoever is first
                child = os.pidfd_open(pid)
                children[child] = pid
                chooser.register(child, selectors.EVENT_READ)
                _tell(told, _STARTED, pid, None)


def _tell(fd: int, event: str, pid: int, status: int | None) -> None:
    os.write(fd, json.dumps([event, pid, status]).encode() + b"\n")


def _live(request: Mapping[str, Any], to_close: Sequence[int]) -> NoReturn:
    """What a rank does from fork to end."""
    status = 1
    try:
        for fd in to_close:
            os.close(fd)
        _settle(request)
        status = importlib.import_module("ddlkit.run.jobs.worker").main(request["argv"])
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: after a failure, threads of gloo and NCCL may wait for peers that never answer.
    os._exit(status)


def _settle(request: Mapping[str, Any]) -> None:
    """Own group, files, environment, directory, name and network."""
    os.setpgid(0, 0)
    with open(request["log"], "wb", buffering=0) as log, open(os.devnull, "rb") as nothing:
        for number, stream in ((0, nothing), (1, log), (2, log)):
            os.dup2(stream.fileno(), number)
    os.environ.clear()
    os.environ.update({**request["environment"], PARENT: str(os.getppid())})
    os.chdir(request["directory"])
    sys.argv = ["ddlkit.run.jobs.worker", *request["argv"]]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NAME, f"ddlkit-rank{os.environ.get('RANK', '')}".encode())
    if request["namespace"]:
        with open(request["namespace"], "rb") as place:
            if libc.setns(place.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "cannot enter", request["namespace"])


if __name__ == "__main__":
    main()
