"""gloo with a chosen number of threads, and these threads ahead of computation on their cores."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddlkit.core.errors import UserError
from ddlkit.run.jobs.exchange import agree_any

PRIORITY_CHECKS = 20  # barriers that must pass soon after gloo's threads are raised


def register(threads: int, device: torch.device) -> str:
    """Make gloo with ``threads`` threads known to torch; returns the name of that backend.

    It serves tensors of the CPU, and those of ``device``. Each thread has connections of its own, so that
    messages in flight together meet on the link only. (torch's own default gives its two threads one
    set of connections, for which they then have to wait, too.)

    torch ignores the options given to `init_process_group` for gloo, but lets a backend be registered
    whose maker is ours. Interfaces come from GLOO_SOCKET_IFNAME, as gloo itself does it.
    """
    if threads < 1:
        raise UserError(f"gloo_threads {threads}: at least 1 must carry the collectives")
    gloo: Any = dist.ProcessGroupGloo  # its options are not in the type stubs
    served = sorted({"cpu", device.type})
    name = "_".join(["ddlkit", f"gloo{threads}", *served])

    def make(wanted: Any, _: object) -> Any:
        options = gloo._Options()
        options._threads = threads
        options._timeout = wanted.timeout
        interfaces = [text for text in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if text]
        options._devices = [
            gloo.create_device(interface=interface) for interface in interfaces * threads
        ] or [gloo.create_default_device() for _ in range(threads)]
        return gloo(wanted.store, wanted.group_rank, wanted.group_size, options)

    if not hasattr(dist.Backend, name.upper()):
        dist.Backend.register_backend(name, make, extended_api=True, devices=served)
    return name


def raise_priority(carrying: int, deadline_s: float = 10.0) -> int:
    """Let gloo's threads preempt everything else on their cores (SCHED_RR); returns how many.

    carrying : how many of them carry messages; each has another at its sockets

    With more ranks than cores, messages wait for a time slice: milliseconds in place of tens of
    microseconds. Only gloo's own threads are raised: a whole process would stop overlapping. It is
    done after a barrier, since raised threads have been seen to hang the start, and taken back on
    every rank, with 0 returned, if any rank may not (no root) or if a few barriers take longer than
    ``deadline_s``.

    Not SCHED_FIFO: gloo's thread at the sockets only *tries* to lock a connection, and polls again at once
    while a thread that carries a message holds it. Raised alike, and with more of them than cores, pollers
    would keep the holder from its core for ever; in turns, they end with a slice.
    """
    if sys.platform != "linux":
        return 0
    dist.barrier()
    threads = threads_here(at_least=2 * carrying)
    watchdog = threading.Timer(deadline_s, _schedule, (threads, os.SCHED_OTHER, 0))
    watchdog.daemon = True
    watchdog.start()
    raised = _schedule(threads, os.SCHED_RR, 1)
    for _ in range(PRIORITY_CHECKS):
        dist.barrier()
    in_time = watchdog.is_alive()
    watchdog.cancel()
    if agree_any(not (raised and in_time)):
        _schedule(threads, os.SCHED_OTHER, 0)
        return 0
    return len(threads)


def threads_here(at_least: int = 0, patience_s: float = 2.0) -> list[int]:
    """Ids of this process's threads that gloo named.

    A thread names itself once it runs: on a busy machine, ``at_least`` that number are waited for.
    """
    give_up = time.monotonic() + patience_s
    while True:
        tasks = sorted(Path("/proc/self/task").iterdir())
        found = [int(task.name) for task in tasks if "gloo" in (task / "comm").read_text()]
        if len(found) >= at_least or time.monotonic() > give_up:
            return found
        time.sleep(0.005)


def _schedule(threads: list[int], policy: int, priority: int) -> bool:
    """Whether all ``threads`` could be given that scheduling."""
    try:
        for thread in threads:
            os.sched_setscheduler(thread, policy, os.sched_param(priority))
    except PermissionError:
        return False
    return True
