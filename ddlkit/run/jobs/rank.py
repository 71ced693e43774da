"""This process as one rank of a job: meeting the others, speaking for them, and parting from them."""

from __future__ import annotations

import datetime
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ddlkit import machine
from ddlkit.core.errors import UserError
from ddlkit.run.jobs import gloo
from ddlkit.run.jobs.protocol import PROGRESS, port_taken


@dataclass(frozen=True)
class Rank:
    """This process as one of ``world_size`` ranks.

    gloo_threads : how many collectives gloo carries at once; torch's own default is 2, and then two
        share the link. 1 carries them one after the other, as NCCL does. 0 without gloo.
    raised_threads : gloo threads that preempt computation (see `gloo.raise_priority`); 0 if none
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
        backend = _backend(backend, neighbours)
        device = _device(local_rank, backend == "nccl" if on_gpu is None else on_gpu)
        torch.set_num_threads(torch_threads or max(1, machine.cores() // neighbours))
        _meet(rank, world_size, backend, device, timeout_s, gloo_threads)
        with_gloo = backend == "gloo"
        me = cls(
            rank,
            world_size,
            local_rank,
            device,
            backend,
            gloo_threads if with_gloo else 0,
            torch.get_num_threads(),
            gloo.raise_priority(gloo_threads) if raise_priority and with_gloo else 0,
        )
        if raise_priority and with_gloo and not me.raised_threads:
            me.say("gloo's threads keep their priority: raising it was not allowed, or not helpful")
        return me

    def leave(self) -> None:
        """Part from the others once all have come this far."""
        dist.barrier()
        dist.destroy_process_group()

    def say(self, message: str) -> None:
        """A line of progress on standard error, from rank 0 only; `launch` shows it to the user."""
        if self.rank == 0:
            print(f"{PROGRESS}{message}", file=sys.stderr, flush=True)

    def describe(self) -> dict[str, Any]:
        """What of this decides how fast a run is, for a JSON file beside its results."""
        names = ("world_size", "backend", "gloo_threads", "torch_threads", "raised_threads")
        return {"device": str(self.device), **{name: getattr(self, name) for name in names}}


def _number(name: str, slurm: str, default: str = "") -> int:
    text = os.environ.get(name) or os.environ.get(slurm) or default
    if not text.isdecimal():
        raise UserError(
            f"{name} is {text or 'not set'} in this rank's environment: start ranks with "
            "torchrun, srun or ddlkit.run.jobs.launch"
        )
    return int(text)


def _backend(asked: str | None, neighbours: int) -> str:
    gpus = torch.cuda.device_count()
    if asked not in (None, "gloo", "nccl"):
        raise UserError(f"unknown backend {asked!r}: use gloo or nccl")
    if asked == "nccl" and gpus < neighbours:
        raise UserError(
            f"nccl needs a GPU a rank: {neighbours} ranks on this node, {gpus} GPUs; use gloo"
        )
    return asked or ("nccl" if 0 < neighbours <= gpus else "gloo")


def _device(local_rank: int, on_gpu: bool) -> torch.device:
    """Where this rank's tensors lie."""
    if not on_gpu:
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if not gpus:
        raise UserError("tensors on a GPU were asked for, but torch sees none: use on_gpu false")
    return torch.device("cuda", local_rank % gpus)


def _meet(
    rank: int, world_size: int, backend: str, device: torch.device, timeout_s: float, threads: int
) -> None:
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not (address and port):
        raise UserError(
            "MASTER_ADDR or MASTER_PORT is not set: export address and a free port of rank 0's node"
        )
    nccl = backend == "nccl"
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if nccl else gloo.register(threads, device),
            timeout=datetime.timedelta(seconds=timeout_s),
            rank=rank,
            world_size=world_size,
            device_id=device if nccl else None,
        )
        dist.barrier()
    except RuntimeError as error:
        if "EADDRINUSE" in str(error):
            raise UserError(port_taken(address, port)) from error
        reason = str(error).splitlines()[0]
        raise UserError(f"ranks did not meet at {address} port {port}: {reason}") from error
