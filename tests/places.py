"""Places and processes that several tests of multi-rank jobs need."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from ddlkit.core.case import Case
from ddlkit.core.plan import make_plan
from ddlkit.core.units import KIB
from ddlkit.core.workload import Workload
from ddlkit.jobs.launch import Place
from ddlkit.lab.network import Lab
from workbook.record.replay import PlannedCase

ROOT = Path(__file__).parents[1]
PATIENCE_S = 120.0
"""How long to wait for what comes at once: others may hold the processor. No test measures with it."""
TINY = Workload.from_arrays(0.02, [0.01] * 6, [256 * KIB] * 5 + [1022], update_s=0.01)


def planned(
    spec: str, place: Place, workload: Workload = TINY, **fields: Any
) -> PlannedCase:
    """A replay of the workload by two ranks, or as the further fields of its case say."""
    plan = make_plan(spec, workload)
    ends = ";".join(map(str, plan.ends))
    link = (place.name, place.link_bits_per_s)
    collective = "all_gather" if fields.get("density", 1.0) < 1 else "all_reduce"
    case = Case("replay", "tiny", "made", 1, 2, *link, collective, spec, ends)
    return PlannedCase(replace(case, **fields), workload, plan)


@contextmanager
def listening() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def free_port() -> int:
    with listening() as port:
        return port


def family(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def ranks_below(pid: int) -> list[psutil.Process]:
    def is_rank(process: psutil.Process) -> bool:
        # Until it runs a program, a child of a rank has the name of the rank.
        parent = process.parent()
        of_rank = parent is not None and parent.name().startswith("ddlkit-rank")
        return process.name().startswith("ddlkit-rank") and not of_rank

    return those(is_rank, family(pid))


def those(
    wanted: Callable[[psutil.Process], bool], processes: Iterable[psutil.Process]
) -> list[psutil.Process]:
    """Processes that are wanted, of those that are still there."""
    found = []
    for process in processes:
        with suppress(psutil.Error, OSError):
            if wanted(process):
                found.append(process)
    return found


def wait_for(condition: Callable[[], bool], timeout_s: float = PATIENCE_S) -> bool:
    give_up = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > give_up:
            return False
        time.sleep(0.02)
    return True


def alive(processes: list[psutil.Process]) -> list[psutil.Process]:
    """Those that still run (a zombie does not)."""
    zombie = psutil.STATUS_ZOMBIE
    return those(lambda each: each.is_running() and each.status() != zombie, processes)


def sent_by(lab: Lab) -> dict[str, int]:
    """Sums over the ranks' outgoing links since ``up``: bytes (framing included), drops."""
    told = []
    for name in lab.namespaces[:-1]:
        argv = ["tc", "-n", name, "-s", "-j", "qdisc", "show", "dev", "eth0"]
        told += json.loads(subprocess.run(argv, capture_output=True, check=True).stdout)
    return {key: sum(qdisc[key] for qdisc in told) for key in ("bytes", "drops")}
