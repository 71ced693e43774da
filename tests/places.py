"""Places and processes that several tests of multi-rank jobs need."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]


@contextmanager
def listening() -> Iterator[int]:
    """A port on which someone else listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def free_port() -> int:
    """A port on which nobody listens."""
    with listening() as port:
        return port


def family(pid: int) -> list[psutil.Process]:
    """Every process below ``pid``."""
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def ranks_below(pid: int) -> list[psutil.Process]:
    """The ranks that were forked below ``pid``."""
    found = []
    for process in family(pid):
        with suppress(psutil.NoSuchProcess):
            if process.name().startswith("ddlkit-rank"):
                found.append(process)
    return found


def wait_for(condition: Callable[[], bool], timeout_s: float = 30.0) -> bool:
    """Whether the condition came true in time."""
    give_up = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > give_up:
            return False
        time.sleep(0.02)
    return True


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that still run (a zombie does not)."""
    return [p for p in processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
