"""A job, declared once, and this process as one of its ranks: it meets the others, and exchanges numbers."""

from __future__ import annotations

import datetime
import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast, get_args, get_type_hints

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ddlkit import store
from ddlkit.core.errors import UserError, one_line
from ddlkit.jobs import PARENT, PROGRESS
from ddlkit.jobs.vitals import Usage
from ddlkit.store import machine

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Floats = NDArray[np.float64]
S = TypeVar("S", bound="DataclassInstance")
Tables = Mapping[str, pd.DataFrame]
Part = Callable[["Rank", S], Iterable[Tables]]

# What CONFIG.json says to any job; of these OF_RANK become fields of `Rank` as they are.
OF_RANK = ("link", "link_bits_per_s", "temporary_out")
FRAME = ("out", "join", "imports", *OF_RANK)
_torchs: Any = dist  # with what is not in the type stubs
# The later names of two calls: the earlier ones warn where both exist.
gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


@dataclass(frozen=True)
class Job(Generic[S]):
    """A program for every rank.

    settings : dataclass of what its CONFIG.json may hold besides FRAME; tables : that it may leave, by schema
    part : what each rank does. It yields new rows by table, which rank 0 saves, as `run` says
    """

    settings: type[S]
    tables: tuple[str, ...]
    part: Part[S]

    @property
    def module(self) -> str:
        """Return where it is declared, by which ranks find it."""
        return self.part.__module__

    def run(self, me: Rank, settings: S) -> None:
        """Do this rank's part of the job; rank 0 saves its tables into ``me.out``.

        It saves what there is after each yield, so that whoever ends the job keeps what was measured; but
        only at the end where ``me.out`` is temporary, and goes with a job that is ended. A part that reads
        what it yielded before needs an ``out`` that stays.
        """
        tables: dict[str, pd.DataFrame] = {}
        for rows in self.part(me, settings):
            for name, frame in rows.items():
                before = [tables[name]] if name in tables else []
                tables[name] = pd.concat([*before, frame], ignore_index=True)
                if not me.temporary_out:
                    self._save(me, name, tables[name])
        if me.temporary_out:
            for name, table in tables.items():
                self._save(me, name, table)

    def _save(self, me: Rank, name: str, table: pd.DataFrame) -> None:
        if me.rank == 0:
            store.save_table(table, me.out, name, schema=name, command=sys.argv)

    def read(self, config: Mapping[str, Any]) -> S:
        """Read the job's own settings. Raises UserError for one that is unknown or missing."""
        given = {name: value for name, value in config.items() if name not in FRAME}
        try:
            return cast(S, _made(self.settings, given))
        except TypeError as error:
            reason = str(error).rpartition("__init__() ")[2]
            raise UserError(f"job settings: {reason}") from error


def job(settings: type[S], *tables: str) -> Callable[[Part[S]], Job[S]]:
    """Declare a function as what every rank does in a job; it becomes a `Job`, one in each module."""
    return lambda part: Job(settings, tables, part)


def _made(kind: Any, value: Any) -> Any:
    """Return what JSON holds as what a field's type says: dataclasses of objects, tuples of lists."""
    if isinstance(value, list):
        inner = next(iter(get_args(kind)), None)
        return tuple(_made(inner, item) for item in value)
    if is_dataclass(kind) and isinstance(kind, type) and isinstance(value, Mapping):
        hints = get_type_hints(kind)
        return kind(
            **{name: _made(hints.get(name), inside) for name, inside in value.items()}
        )
    return value


@dataclass(frozen=True)
class Rank:
    """This process as one of ``world_size`` ranks; ``out`` is where rank 0 leaves the job's results.

    temporary_out : whether ``out`` lasts only until whoever started the ranks has read the results
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    backend: str
    torch_threads: int
    out: Path = Path()
    link: str = "unnamed"
    link_bits_per_s: float = 0.0
    temporary_out: bool = False

    @classmethod
    def join(
        cls,
        backend: str | None = None,
        *,
        timeout_s: float = 60.0,
        torch_threads: int = 0,
        on_gpu: bool | None = None,
    ) -> Rank:
        """Meet the other ranks that torchrun's or Slurm's variables name. Raises UserError.

        backend : "gloo", "nccl", or None for NCCL where every rank of this node has a GPU, else gloo
        timeout_s : for the meeting and each collective; torch_threads : 0 shares the cores of the node
        on_gpu : whether tensors lie on a GPU, by default with NCCL only: gloo then copies through the host
        """
        rank, world_size = (
            _number("RANK", "SLURM_PROCID"),
            _number("WORLD_SIZE", "SLURM_NTASKS"),
        )
        local_rank = _number("LOCAL_RANK", "SLURM_LOCALID", str(rank))
        neighbours = _number(
            "LOCAL_WORLD_SIZE", "SLURM_NTASKS_PER_NODE", str(world_size)
        )
        backend, device = _choose(backend, on_gpu, local_rank, neighbours)
        torch.set_num_threads(torch_threads or max(1, machine.cores() // neighbours))
        _meet(rank, world_size, backend, device, datetime.timedelta(seconds=timeout_s))
        return cls(
            rank, world_size, local_rank, device, backend, torch.get_num_threads()
        )

    def leave(self) -> None:
        """Part from the others once all have come this far."""
        dist.barrier()
        dist.destroy_process_group()

    def say(self, message: str) -> None:
        """Print a line of progress on standard error, from rank 0 only; `launch` shows it to the user."""
        if self.rank == 0:
            print(f"{PROGRESS}{message}", file=sys.stderr, flush=True)


@contextmanager
def joined(timeout_s: float) -> Iterator[Rank]:
    """Be one of the ranks that torchrun's or Slurm's variables count; where that is one or none, alone.

    timeout_s : as of `Rank.join`. Raises UserError like that
    """
    if (os.environ.get("WORLD_SIZE") or os.environ.get("SLURM_NTASKS") or "1") != "1":
        me = Rank.join(timeout_s=timeout_s)
    else:
        local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        _, device = _choose(None, None, local_rank, 1)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group("gloo", store=_torchs.HashStore(), rank=0, world_size=1)
        me = Rank(0, 1, local_rank, device, "gloo", torch.get_num_threads())
    try:
        yield me
        dist.barrier()  # until all have come this far
    finally:
        dist.destroy_process_group()


def _number(name: str, slurm: str, default: str = "") -> int:
    text = os.environ.get(name) or os.environ.get(slurm) or default
    if not text.isdecimal():
        missing = f"{name} is {text or 'not set'} in this rank's environment"
        raise UserError(
            f"{missing}: start ranks with torchrun, srun or ddlkit.jobs.launch"
        )
    return int(text)


def _choose(
    wanted: str | None, on_gpu: bool | None, local_rank: int, neighbours: int
) -> tuple[str, torch.device]:
    """Return the backend, and where this rank's tensors lie."""
    gpus = torch.cuda.device_count()
    if wanted not in (None, "gloo", "nccl"):
        raise UserError(f"unknown backend {wanted!r}: use gloo or nccl")
    if wanted == "nccl" and gpus < neighbours:
        there = f"{neighbours} ranks on this node, {gpus} GPUs"
        raise UserError(f"nccl needs a GPU for each rank: {there}; use gloo")
    backend = wanted or ("nccl" if 0 < neighbours <= gpus else "gloo")
    if not (backend == "nccl" if on_gpu is None else on_gpu):
        return backend, torch.device("cpu")
    if not gpus:
        raise UserError("tensors are to lie on a GPU, but torch sees none")
    return backend, torch.device("cuda", local_rank % gpus)


def _meet(
    rank: int,
    ranks: int,
    backend: str,
    device: torch.device,
    timeout: datetime.timedelta,
) -> None:
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not (address and port):
        needed = "export address and a free port of rank 0's node"
        raise UserError(f"MASTER_ADDR or MASTER_PORT is not set: {needed}")
    how: dict[str, Any] = {"rank": rank, "world_size": ranks, "timeout": timeout}
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if backend == "nccl":
            how["device_id"] = device
        else:
            backend = _one_thread_gloo(device)
        if PARENT in os.environ:  # else torchrun or Slurm has a store
            at: dict[str, Any] = {
                "world_size": ranks,
                "is_master": not rank,
                "timeout": timeout,
            }
            if not rank:  # listens at that address alone, as torch's own would not
                at["master_listen_fd"] = socket.create_server(
                    (address, int(port))
                ).detach()
            how["store"] = _torchs.TCPStore(address, int(port), **at)
        dist.init_process_group(backend, **how)
        dist.barrier()
    except (RuntimeError, OSError) as error:
        met = f"ranks did not meet at {address} port {port}: {one_line(str(error))}"
        raise UserError(f"{met}; choose another port if that is taken") from error


def _one_thread_gloo(device: torch.device) -> str:
    """Make gloo with one thread known to torch, so that collectives follow one another; return its name."""
    gloo = _torchs.ProcessGroupGloo
    name = f"ddlkit_gloo_{device.type}"

    def make(wanted: Any, _: object) -> Any:
        options = gloo._Options()
        options._threads, options._timeout = 1, wanted.timeout
        interfaces = filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))
        chosen = [gloo.create_device(interface=interface) for interface in interfaces]
        options._devices = chosen or [gloo.create_default_device()]
        return gloo(wanted.store, wanted.group_rank, wanted.group_size, options)

    if not hasattr(dist.Backend, name.upper()):
        served = sorted({"cpu", device.type})
        dist.Backend.register_backend(name, make, extended_api=True, devices=served)
    return name


# -- exchange of numbers: as float64 tensors, nothing is pickled; all ranks must call alike --------


def everyones(values: Sequence[float] | Floats) -> Floats:
    """Return ``values`` (any shape) of every rank, stacked: (world_size, ...)."""
    home = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    mine = torch.as_tensor(np.asarray(values, dtype=np.float64)).to(home)
    flat = mine.new_empty(dist.get_world_size() * mine.numel())
    gather_single(flat, mine.reshape(-1).contiguous())
    return np.asarray(flat.cpu()).reshape(dist.get_world_size(), *mine.shape)


def slowest(values: Sequence[float] | Floats) -> Floats:
    """Return the elementwise maximum of ``values`` (any shape) over all ranks."""
    return np.max(everyones(values), axis=0)


def usage_of_all(used: Usage) -> Usage:
    """Return how the machine fared, by what every rank says of itself: the same on all."""
    return Usage.of_ranks(everyones(astuple(used)))


def agree_all(flag: bool) -> bool:
    """Return whether every rank says yes, the same on all: a measurement that others take part in ends so."""
    return not slowest([not flag]).any()
