"""Places and processes that several tests of multi-rank jobs need."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[1]


class Direct:
    """One process a rank on loopback, started the way a lab starts them."""

    name = "direct"
    link_bits_per_s = 0.0

    def __init__(self, port: int) -> None:
        self.port = port

    def command(self, rank: int, argv: list[str]) -> list[str]:
        """`env` stands for the `ip netns exec` of a lab."""
        return ["env", "DDLKIT_TEST=1", *argv]

    def environment(self, rank: int, ranks: int) -> dict[str, str]:
        """All that a rank needs to find its peers."""
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self.port),
            "GLOO_SOCKET_IFNAME": "lo",
        }


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


def rank_process(pid: int, rank: int) -> psutil.Process | None:
    """The worker of that rank below ``pid``, once it runs."""
    for process in family(pid):
        try:
            if "ddlkit.run.worker" not in process.cmdline()[:5]:
                continue
            if process.environ().get("RANK") == str(rank):
                return process
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return None


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
