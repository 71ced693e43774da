"""Start ranks, watch over them, and let them talk; here, what they and who starts them agree on.

A process with FORKS in its environment becomes the fork server of ranks by this import, so nothing is heavy.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NoReturn

PROGRESS = "ddlkit: "  # a line of rank 0 that begins so is shown to the user
ERROR = "ddlkit: error: "
MISTAKE, LOST_PEER = 2, 3  # exit statuses: a user's mistake; another rank went first
PARENT = "DDLKIT_PARENT"  # pid without which a process must not live
FORKS = "DDLKIT_FORKS"
PACKAGES = Path(__file__).resolve().parents[2]
# What has a GPU run one kernel after the other, beside which nothing can be measured.
ONE_BY_ONE = ("CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS")
_CLONE_NEWNET, _PR_SET_PDEATHSIG = 0x40000000, 1


def ending(status: int) -> str:
    """Return how a process came to an end with that exit status; negative: the signal that killed it."""
    if status < 0:
        return f"was killed by {signal.Signals(-status).name}"
    return f"ended with exit status {status}"


def child_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return ``environment`` for a process that imports this ddlkit, dies with us, and leaves GPUs free."""
    kept = {
        name: value for name, value in environment.items() if name not in ONE_BY_ONE
    }
    paths = [str(PACKAGES), environment.get("PYTHONPATH", "")]
    ours = {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        PARENT: str(os.getpid()),
    }
    return {**kept, **ours}


def enter(namespace: str) -> None:
    """Live in that network namespace from now on. Raises OSError."""
    with open(namespace, "rb") as place:
        if ctypes.CDLL(None, use_errno=True).setns(place.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "cannot enter", namespace)


def die_with_parent(parent: int = 0) -> None:
    """Have the kernel kill this process when its parent dies, or now if it has died already (Linux)."""
    if sys.platform != "linux":
        return
    parent = parent or int(os.environ.get(PARENT, os.getppid()))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)


def _in_main_thread() -> bool:
    """Return whether this thread is the one that gets signals, and may say who handles them."""
    return threading.current_thread() is threading.main_thread()


def trap(*numbers: int) -> list[int]:
    """Let signals that nobody handles end this process by way of every ``finally``; return which did."""
    free = [
        n
        for n in numbers
        if _in_main_thread() and signal.getsignal(n) is signal.SIG_DFL
    ]
    for number in free:
        signal.signal(number, _leave)
    return free


@contextmanager
def unwinding(*numbers: int) -> Iterator[None]:
    """Unwind on signals within the block, as by `trap`; those that others take over meanwhile stay theirs."""
    ours = trap(*numbers)
    try:
        yield
    finally:
        for number in ours:
            if _in_main_thread() and signal.getsignal(number) is _leave:
                signal.signal(number, signal.SIG_DFL)


@contextmanager
def deferring(*numbers: int) -> Iterator[None]:
    """Keep signals waiting until the block is over; in the main thread, which alone is ever cut short."""
    arrived: list[int] = []
    heard = [n for n in numbers if signal.getsignal(n) not in (None, signal.SIG_IGN)]
    before = {number: signal.getsignal(number) for number in heard if _in_main_thread()}
    for number in before:
        signal.signal(number, lambda which, frame: arrived.append(which))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in dict.fromkeys(arrived):
            signal.raise_signal(number)


if os.environ.pop(FORKS, ""):
    die_with_parent()
    os.environ[PARENT] = str(os.getpid())  # of the ranks
    os.setsid()  # Ctrl-C in the terminal, and its end, reach only the launcher
    signal.signal(signal.SIGINT, signal.SIG_IGN)
