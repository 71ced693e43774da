"""What runs in every rank: ``python -m ddlkit.run.jobs.worker JOB CONFIG.json``.

The ranks find each other by torchrun's variables or by Slurm's (examples/slurm_collectives.sh). JOB is the
module that declares a job; of those in ddlkit.run the last part of the name is enough. CONFIG.json holds the
settings of the job; ``out``, a directory that rank 0 writes its tables to; ``link``, a name for the network;
and ``join``, the arguments of `ddlkit.run.jobs.rank.Rank.join`, e.g.
``{"out": "results", "link": "infiniband", "join": {"backend": "nccl"}}``.

A user's mistake is exit status 2; a rank that fails because another one went away says so by status 3.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import pkgutil
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import ddlkit.run
from ddlkit.core.errors import UserError
from ddlkit.run.jobs.job import Job
from ddlkit.run.jobs.protocol import ERROR, LOST_PEER, MISTAKE, PARENT, die_with_parent
from ddlkit.run.sessions import one_line
from ddlkit.store.files import atomic_write_text

_CLONE_NEWNET = 0x40000000
_PR_SET_NAME = 15


def find(name: str) -> Job[Any]:
    """Return the job that a module declares; its name may be cut down to its last part, or parts.

    Raises UserError where there is no such module or no job in it.
    """
    modules = pkgutil.walk_packages(ddlkit.run.__path__, f"{ddlkit.run.__name__}.")
    whole = next((module.name for module in modules if module.name.endswith(f".{name}")), name)
    try:
        module = importlib.import_module(whole)
    except ModuleNotFoundError as error:
        if not f"{whole}.".startswith(f"{error.name}."):  # something that the module itself needs
            raise
        complaint = f"unknown job {name!r}: name the module that declares it, e.g. collectives"
        raise UserError(complaint) from None
    jobs = [value for value in vars(module).values() if isinstance(value, Job)]
    if declared := [job for job in jobs if job.module == whole]:
        return declared[0]
    raise UserError(f"unknown job {name!r}: {whole} declares none")


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
        atomic_write_text(out / "job.json", json.dumps(me.describe()))
    job.run(me, settings)
    me.leave()


def read_config(path: Path) -> dict[str, Any]:
    """Read the settings from a JSON file. Raises UserError if it cannot be read or has no ``out``."""
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"job settings {path}: {error}") from error
    if not isinstance(config, dict) or "out" not in config:
        raise UserError(f'job settings {path}: needs a JSON object with "out", a directory')
    return config


def main(argv: Sequence[str]) -> int:
    """Do what a rank does; returns its exit status."""
    try:
        if len(argv) != 2:
            raise UserError("usage: python -m ddlkit.run.jobs.worker JOB CONFIG.json")
        run(argv[0], read_config(Path(argv[1])))
    except UserError as error:
        print(f"{ERROR}{error}", file=sys.stderr)
        return MISTAKE
    except Exception as error:
        from torch.distributed import DistError

        traceback.print_exc()
        # CUDA and NCCL explain over several lines, the last of which says nothing.
        print(f"{type(error).__name__}: {one_line(error)}", file=sys.stderr)
        # So NCCL, the store, the negotiation and gloo say that another rank is gone.
        lost = isinstance(error, DistError | ConnectionError) or "gloo/transport" in str(error)
        return LOST_PEER if lost else 1
    return 0


def leave(status: int) -> NoReturn:
    """End this process now: after a failure, threads of gloo and NCCL may wait for peers for ever."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def main_forked(
    argv: Sequence[str], environment: Mapping[str, str], log: str, namespace: str
) -> NoReturn:
    """Be a rank that the fork server has made: in a session, environment, network and log of its own."""
    os.setsid()
    die_with_parent()  # whose number it has left in our environment
    server = os.environ[PARENT]
    with open(log, "wb", buffering=0) as stream:
        for number in (1, 2):
            os.dup2(stream.fileno(), number)
    os.environ.clear()
    os.environ.update({**environment, PARENT: server})
    libc = ctypes.CDLL(None, use_errno=True)
    if sys.platform == "linux":
        libc.prctl(_PR_SET_NAME, f"ddlkit-rank{os.environ.get('RANK', '')}".encode())
    sys.argv = [__name__, *argv]
    try:
        if namespace:
            with open(namespace, "rb") as place:
                if libc.setns(place.fileno(), _CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "cannot enter", namespace)
        status = main(argv)
    except OSError as error:
        print(error, file=sys.stderr)
        status = 1
    leave(status)


if __name__ == "__main__":
    die_with_parent()
    leave(main(sys.argv[1:]))
