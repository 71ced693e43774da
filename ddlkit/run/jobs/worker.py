"""What runs in every rank: ``python -m ddlkit.run.jobs.worker JOB CONFIG.json``.

The ranks find each other by RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT, which torchrun
sets, or by Slurm's variables. So one command serves on one machine and over several::

    torchrun --nproc-per-node 2 -m ddlkit.run.jobs.worker collectives config.json

    torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
        -m ddlkit.run.jobs.worker collectives config.json

    # in a Slurm batch script (whole example: examples/slurm_collectives.sh)
    export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) MASTER_PORT=29500
    srun --ntasks-per-node 8 python -m ddlkit.run.jobs.worker collectives config.json

JOB is the module that declares a job; of those in ddlkit.run the last part of the name is enough.

CONFIG.json holds the settings of the job; ``out``, a directory that rank 0 writes its tables to;
``link``, a name for the network; and ``join``, the arguments of `ddlkit.run.jobs.rank.Rank.join`, e.g.
``{"out": "results", "link": "infiniband", "join": {"backend": "nccl"}}``.

A user's mistake is one line and exit status 2. A rank that fails because another one went away says
so by exit status 3.
"""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import sys
import traceback
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import ddlkit.run
from ddlkit.core.errors import UserError
from ddlkit.run.jobs.job import Job
from ddlkit.run.jobs.protocol import ERROR, LOST_PEER, MISTAKE, die_with_parent


def find(name: str) -> Job[Any]:
    """The job that a module declares; its name may be cut down to its last part, or parts.

    Raises UserError where there is no such module or no job in it.
    """
    ours = pkgutil.walk_packages(ddlkit.run.__path__, f"{ddlkit.run.__name__}.")
    whole = next((found.name for found in ours if found.name.endswith(f".{name}")), name)
    try:
        module = importlib.import_module(whole)
    except ModuleNotFoundError as error:
        if not f"{whole}.".startswith(f"{error.name}."):  # something that the module itself needs
            raise
        raise UserError(
            f"unknown job {name!r}: name the module that declares it, e.g. collectives"
        ) from None
    jobs = [one for one in vars(module).values() if isinstance(one, Job) and one.module == whole]
    if not jobs:
        raise UserError(f"unknown job {name!r}: {whole} declares none")
    return jobs[0]


def run(name: str, config: dict[str, Any]) -> None:
    """Join the other ranks, do this rank's part of the job, and leave.

    Rank 0 adds ``out/job.json``: backend, device and threads, which decide how fast the run is.
    """
    from ddlkit.run.jobs.rank import Rank  # torch takes seconds, in which a parent may die

    job, out = find(name), Path(config["out"])
    settings = job.read(config)
    named = {key: config[key] for key in ("link", "link_bits_per_s") if key in config}
    me = replace(Rank.join(**config.get("join", {})), out=out, **named)
    if me.rank == 0:
        out.mkdir(parents=True, exist_ok=True)
        (out / "job.json").write_text(json.dumps(me.describe()))
    job.run(me, settings)
    me.leave()


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


def leave(status: int) -> NoReturn:
    """End this process now: after a failure, threads of gloo and NCCL may wait for peers for ever."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
