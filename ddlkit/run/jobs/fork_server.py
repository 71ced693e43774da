"""The process that `zygote` starts: it imports what jobs need, computes nothing, and forks the ranks."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import selectors
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from ddlkit.core.errors import UserError
from ddlkit.run.jobs import worker
from ddlkit.run.jobs.protocol import ENDED, PARENT, STARTED

_CLONE_NEWNET = 0x40000000
_PR_SET_NAME = 15


def main() -> None:
    """Serve requests from standard input until it closes."""
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
                    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    _report(owner, ENDED, pid, status)
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
                _report(owner, STARTED, pid, None)


def preload(job: str) -> None:
    """Import what a job needs before its ranks are forked; an unknown job is left to them to refuse."""
    with contextlib.suppress(UserError):
        worker.find(job)


def _report(fd: int, event: str, pid: int, status: int | None) -> None:
    os.write(fd, json.dumps([event, pid, status]).encode() + b"\n")


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
