"""This process as one rank of a job: it meets the others by NCCL or our gloo, exchanges numbers, parts."""

from __future__ import annotations

import datetime
import errno
import ipaddress
import os
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ddlkit import machine
from ddlkit.core.errors import UserError
from ddlkit.run.jobs.protocol import PROGRESS
from ddlkit.run.sessions import one_line

Floats = NDArray[np.float64]

# The later names of two calls: the earlier ones warn where both exist.
gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

PRIORITY_CHECKS = 20  # barriers that must pass soon after gloo's threads are raised


@dataclass(frozen=True)
class Rank:
    """This process as one of ``world_size`` ranks.

    gloo_threads : how many collectives gloo carries at once; torch's own default is 2, and then two
        share the link. 1 carries them one after the other, as NCCL does. 0 without gloo.
    raised_threads : gloo threads that preempt computation (see `raise_priority_of_gloo`); 0 if none
    out : where rank 0 leaves the job's results
    link, link_bits_per_s : the network as it appears in tables, and the rate it is shaped to, 0 if not
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    backend: str
    gloo_threads: int
    torch_threads: int
    raised_threads: int = 0
    out: Path = Path()
    link: str = "unnamed"
    link_bits_per_s: float = 0.0

    @classmethod
    def join(
        cls,
        backend: str | None = None,
        *,
        timeout_s: float = 60.0,
        gloo_threads: int = 1,
        torch_threads: int = 0,
        raise_priority: bool = False,
        on_gpu: bool | None = None,
    ) -> Rank:
        """Meet the other ranks named in the environment (torchrun's, or Slurm's variables).

        backend : "gloo", "nccl", or None for NCCL where every rank of this node has a GPU, else gloo
        timeout_s : for the meeting and for every collective after it
        torch_threads : computing threads of this rank; 0 shares the node's cores among its ranks
        on_gpu : whether the tensors lie on a GPU: by default with NCCL only. gloo then copies through
            the host; ranks share the GPUs there are

        Raises UserError for an incomplete environment, a port that is taken, and peers that do not come.
        """
        rank, world_size = _number("RANK", "SLURM_PROCID"), _number("WORLD_SIZE", "SLURM_NTASKS")
        local_rank = _number("LOCAL_RANK", "SLURM_LOCALID", str(rank))
        neighbours = _number("LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", str(world_size))
        backend, device = _choose(backend, on_gpu, local_rank, neighbours)
        torch.set_num_threads(torch_threads or max(1, machine.cores() // neighbours))
        _meet(rank, world_size, backend, device, timeout_s, gloo_threads)
        carrying, threads = gloo_threads if backend == "gloo" else 0, torch.get_num_threads()
        raise_priority &= carrying > 0
        raised = raise_priority_of_gloo(carrying) if raise_priority else 0
        me = cls(rank, world_size, local_rank, device, backend, carrying, threads, raised)
        if raise_priority and not raised:
            me.say("gloo's threads keep their priority: raising it was not allowed, or not helpful")
        return me

    def leave(self) -> None:
        """Part from the others once all have come this far."""
        dist.barrier()
        dist.destroy_process_group()

    def say(self, message: str) -> None:
        """Print a line of progress on standard error, from rank 0 only; `launch` shows it to the user."""
        if self.rank == 0:
            print(f"{PROGRESS}{message}", file=sys.stderr, flush=True)

    def describe(self) -> dict[str, Any]:
        """Return what of this decides how fast a run is, for a JSON file beside its results."""
        names = ("world_size", "backend", "gloo_threads", "torch_threads", "raised_threads")
        return {"device": str(self.device), **{name: getattr(self, name) for name in names}}


def _number(name: str, slurm: str, default: str = "") -> int:
    text = os.environ.get(name) or os.environ.get(slurm) or default
    if not text.isdecimal():
        missing = f"{name} is {text or 'not set'} in this rank's environment"
        raise UserError(f"{missing}: start ranks with torchrun, srun or ddlkit.run.jobs.launch")
    return int(text)


def _choose(
    asked: str | None, on_gpu: bool | None, local_rank: int, neighbours: int
) -> tuple[str, torch.device]:
    """Return the backend, and where this rank's tensors lie."""
    if torch.cuda._is_in_bad_fork():
        used = "this rank was forked from a process that had used a GPU, so it can use none"
        raise UserError(f"{used}: what a job imports must leave torch.cuda alone")
    gpus = torch.cuda.device_count()
    if asked not in (None, "gloo", "nccl"):
        raise UserError(f"unknown backend {asked!r}: use gloo or nccl")
    if asked == "nccl" and gpus < neighbours:
        there = f"{neighbours} ranks on this node, {gpus} GPUs"
        raise UserError(f"nccl needs a GPU for each rank: {there}; use gloo")
    backend = asked or ("nccl" if 0 < neighbours <= gpus else "gloo")
    if not (backend == "nccl" if on_gpu is None else on_gpu):
        return backend, torch.device("cpu")
    if not gpus:
        raise UserError("tensors on a GPU were asked for, but torch sees none: use on_gpu false")
    return backend, torch.device("cuda", local_rank % gpus)


def _meet(
    rank: int, world_size: int, backend: str, device: torch.device, timeout_s: float, threads: int
) -> None:
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not (address and port):
        needed = "export address and a free port of rank 0's node"
        raise UserError(f"MASTER_ADDR or MASTER_PORT is not set: {needed}")
    nccl = backend == "nccl"
    timeout = datetime.timedelta(seconds=timeout_s)
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if nccl else register_gloo(threads, device),
            timeout=timeout,
            rank=rank,
            world_size=world_size,
            device_id=device if nccl else None,
            store=_store(rank, world_size, address, int(port), timeout),
        )
        dist.barrier()
    except (RuntimeError, OSError) as error:
        if "EADDRINUSE" in str(error) or getattr(error, "errno", 0) == errno.EADDRINUSE:
            taken = f"port {port} on {address} is taken by another program"
            raise UserError(f"{taken}: choose another port") from error
        met = f"ranks did not meet at {address} port {port}"
        raise UserError(f"{met}: {one_line(error)}") from error


def _store(rank: int, ranks: int, address: str, port: int, timeout: datetime.timedelta) -> Any:
    """Return where ranks meet: rank 0 listens at that address alone, torch's own store at every one there is.

    None leaves it to torch: where torchrun has a store, and under a host's name, which may be another
    address on each node. Raises OSError for a port that is taken.
    """
    try:
        version = ipaddress.ip_address(address).version
    except ValueError:
        return None
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return None
    how: dict[str, Any] = {"world_size": ranks, "is_master": not rank, "timeout": timeout}
    if not rank:
        family = socket.AF_INET6 if version == 6 else socket.AF_INET
        try:
            how["master_listen_fd"] = socket.create_server((address, port), family=family).detach()
        except OSError as error:
            # An address that is not here is another machine's, through which ranks reach this one.
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    torchs: Any = dist  # its store is not in the type stubs
    return torchs.TCPStore(address, port, **how)


# -- exchange of numbers: as float64 tensors, nothing is pickled; all ranks must call alike --------


def everyones(values: Sequence[float] | Floats) -> Floats:
    """Return ``values`` (any shape) of every rank, stacked: (world_size, ...)."""
    home = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    mine = torch.as_tensor(np.asarray(values, dtype=np.float64)).to(home)
    flat = mine.new_empty(dist.get_world_size() * mine.numel())
    gather_single(flat, mine.reshape(-1).contiguous())
    stacked: Floats = flat.cpu().numpy().reshape(dist.get_world_size(), *mine.shape)
    return stacked


def everyones_texts(text: str, most: int = 1024) -> list[str]:
    """Return ``text`` of every rank, up to ``most`` bytes of it."""
    mine = text.encode()[:most].ljust(most)
    rows = everyones(np.frombuffer(mine, dtype=np.uint8).astype(float))
    return [bytes(row.astype(np.uint8)).decode(errors="ignore").rstrip() for row in rows]


def slowest(values: Sequence[float] | Floats) -> Floats:
    """Return the elementwise maximum of ``values`` (any shape) over all ranks."""
    largest: Floats = everyones(values).max(axis=0)
    return largest


def agree_all(flag: bool) -> bool:
    """Return whether every rank says yes, the same on all: a measurement that others take part in ends so."""
    return not slowest([not flag]).any()


# -- gloo with a chosen number of threads, ahead of computation on their cores -------------------


def register_gloo(threads: int, device: torch.device) -> str:
    """Make gloo with ``threads`` threads known to torch; returns the name of that backend.

    It serves tensors of the CPU and of ``device``. Each thread has connections of its own, so that messages
    in flight together meet on the link only. (torch's own two threads wait for one set of connections, too.)
    torch ignores the options given to `init_process_group` for gloo, but lets a backend be registered whose
    maker is ours. Interfaces come from GLOO_SOCKET_IFNAME, as gloo itself does it.
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
        chosen = [gloo.create_device(interface=name) for name in interfaces * threads]
        options._devices = chosen or [gloo.create_default_device() for _ in range(threads)]
        return gloo(wanted.store, wanted.group_rank, wanted.group_size, options)

    if not hasattr(dist.Backend, name.upper()):
        dist.Backend.register_backend(name, make, extended_api=True, devices=served)
    return name


def raise_priority_of_gloo(carrying: int, deadline_s: float = 10.0) -> int:
    """Let gloo's threads preempt everything else on their cores (SCHED_RR); returns how many.

    carrying : how many of them carry messages; each has another at its sockets

    With more ranks than cores, messages wait for a time slice: milliseconds in place of tens of
    microseconds. Only gloo's own threads are raised: a whole process would stop overlapping. It is
    done after a barrier, since raised threads have been seen to hang the start.

    Not SCHED_FIFO: gloo's thread at the sockets only *tries* to lock a connection, and polls again at once
    while a thread that carries a message holds it. Raised alike, and with more of them than cores, pollers
    would keep the holder from its core for ever; in turns, they end with a slice.
    """
    if sys.platform != "linux":
        return 0
    dist.barrier()
    threads = threads_here(at_least=2 * carrying)
    return len(threads) if hasten(threads, deadline_s=deadline_s) else 0


def hasten(
    threads: Sequence[int], group: dist.ProcessGroup | None = None, deadline_s: float = 10.0
) -> bool:
    """Let these threads, which carry the messages of ``group``, preempt all else; whether they now do.

    Every rank must call it. It is taken back on each if any may not (no root), or if a few barriers take
    longer than ``deadline_s``.
    """
    watchdog = threading.Timer(deadline_s, _schedule, (threads, os.SCHED_OTHER, 0))
    watchdog.daemon = True
    watchdog.start()
    raised = _schedule(threads, os.SCHED_RR, 1)
    for _ in range(PRIORITY_CHECKS):
        dist.barrier(group=group)
    in_time = watchdog.is_alive()
    watchdog.cancel()
    if agree_all(raised and in_time):
        return True
    _schedule(threads, os.SCHED_OTHER, 0)
    return False


def threads_here(at_least: int = 0) -> list[int]:
    """Return the ids of this process's threads that gloo named.

    A thread names itself once it runs: on a busy machine, ``at_least`` that number are waited for.
    """
    give_up = time.monotonic() + 2
    while True:
        tasks = sorted(Path("/proc/self/task").iterdir())
        threads = [int(task.name) for task in tasks if "gloo" in (task / "comm").read_text()]
        if len(threads) >= at_least or time.monotonic() > give_up:
            return threads
        time.sleep(0.005)


def _schedule(threads: Sequence[int], policy: int, priority: int) -> bool:
    """Return whether all ``threads`` could be given that scheduling."""
    try:
        for thread in threads:
            os.sched_setscheduler(thread, policy, os.sched_param(priority))
    except PermissionError:
        return False
    return True
