"""What runs in every rank: ``python -m ddlkit.run.jobs.worker JOB CONFIG.json``.

The ranks find each other by RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, which torchrun
sets, or by Slurm's variables. So one command serves on one machine and over several::

    torchrun --nproc-per-node 2 -m ddlkit.run.jobs.worker collectives config.json

    torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
        -m ddlkit.run.jobs.worker collectives config.json

    # in a Slurm batch script (whole example: examples/slurm_collectives.sh)
    export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) MASTER_PORT=29500
    srun --ntasks-per-node 8 python -m ddlkit.run.jobs.worker collectives config.json

CONFIG.json holds the settings of the job; ``out``, a directory that rank 0 writes its tables to;
``link``, a name for the network; and ``join``, the arguments of `ddlkit.run.jobs.ranks.join`, e.g.
``{"out": "results", "link": "infiniband", "join": {"backend": "nccl"}}``.

A user's mistake is one line and exit status 2. A rank that fails because another one went away says
so by exit status 3.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddlkit.core.errors import UserError
from ddlkit.run.jobs.protocol import ERROR, LOST_PEER, MISTAKE, die_with_parent

JOBS = {
    "layers": "ddlkit.run.measure.layers:run_job",
    "collectives": "ddlkit.run.measure.collectives:run_job",
    "channels": "ddlkit.run.measure.channels:run_job",
    "contention": "ddlkit.run.measure.contention:run_job",
    "training": "ddlkit.run.measure.training:run_job",
    "replay": "ddlkit.run.lab.replay:run_job",
}


def run(job: str, config: dict[str, Any]) -> None:
    """Join the other ranks, do this rank's part of the job, and leave.

    Rank 0 adds ``out/job.json``: backend, device and threads, which decide how fast the run is.
    """
    from ddlkit.run.jobs import ranks as peers

    if job not in JOBS:
        raise UserError(f"unknown job {job!r}: use one of {', '.join(JOBS)}")
    module, function = JOBS[job].split(":")
    out = Path(config["out"])
    ranks = peers.join(**config.get("join", {}))
    if ranks.rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        (out / peers.JOB_FILE).write_text(json.dumps(ranks.describe()))
    getattr(importlib.import_module(module), function)(ranks, config)
    peers.leave()


def preload(job: str) -> None:
    """Import what a job needs before its ranks are forked; an unknown job is left to `run` to refuse."""
    if job in JOBS:
        importlib.import_module(JOBS[job].split(":")[0])


def read_config(path: Path) -> dict[str, Any]:
    """The settings in a JSON file. Raises UserError if it cannot be read or has no ``out``."""
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"job settings {path}: {error}") from error
    if not isinstance(config, dict) or "out" not in config:
        raise UserError(f'job settings {path}: needs a JSON object with "out", a directory')
    return config


def main(argv: Sequence[str]) -> int:
    """Exit status of this rank."""
    die_with_parent()
    try:
        if len(argv) != 2:
            raise UserError("usage: python -m ddlkit.run.jobs.worker JOB CONFIG.json")
        run(argv[0], read_config(Path(argv[1])))
    except UserError as error:
        print(f"{ERROR}{error}", file=sys.stderr)
        return MISTAKE
    except Exception as error:
        traceback.print_exc()
        return LOST_PEER if _lost_peer(error) else 1
    return 0


def _lost_peer(error: Exception) -> bool:
    """Whether this is how gloo, NCCL, the store or the negotiation say that another rank is gone."""
    from torch.distributed import DistError

    return isinstance(error, DistError | ConnectionError) or (
        isinstance(error, RuntimeError) and "gloo/transport" in str(error)
    )


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stderr.flush()
    # Not sys.exit: after a failure, threads of gloo and NCCL may wait for peers that never answer.
    os._exit(status)
