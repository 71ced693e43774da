"""What runs in every rank: ``python -m ddlkit.run.jobs.worker JOB CONFIG.json``.

The ranks find each other by torchrun's variables or by Slurm's (examples/slurm_collectives.sh). JOB is the
module that declares a job; of ddlkit.run.measure its name is enough. CONFIG.json holds the settings of the
job; ``out``, a directory that rank 0 writes its tables to; ``link``, a name for the network; and ``join``,
the arguments of `ddlkit.run.jobs.rank.Rank.join`:
``{"out": "results", "link": "infiniband", "join": {"backend": "nccl"}}``.

A user's mistake is exit status 2; a rank that fails because another one went away says so by status 3.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ddlkit.core.errors import UserError
from ddlkit.run.jobs import ERROR, LOST_PEER, MISTAKE, PARENT, die_with_parent, enter
from ddlkit.run.sessions.session import one_line
from ddlkit.store.files import atomic_write_text

if TYPE_CHECKING:  # torch takes seconds, in which a parent may die
    from ddlkit.run.jobs.rank import Job

_PR_SET_NAME = 15


def find(name: str) -> Job[Any]:
    """Return the job that a module declares. Raises UserError where there is none."""
    from ddlkit.run.jobs.rank import Job

    ours = f"ddlkit.run.measure.{name}"
    whole = ours if "." not in name and importlib.util.find_spec(ours) else name
    if not importlib.util.find_spec(whole):
        complaint = "name the module that declares it, e.g. collectives"
        raise UserError(f"unknown job {name!r}: {complaint}")
    for value in vars(importlib.import_module(whole)).values():
        if isinstance(value, Job) and value.module == whole:
            return value
    raise UserError(f"unknown job {name!r}: {whole} declares none")


def run(name: str, path: Path) -> None:
    """Join the other ranks, do this rank's part of the job whose settings are there, and leave.

    Rank 0 adds ``out/job.json``: backend, device and threads, which decide how fast the run is.
    """
    from ddlkit.run.jobs.rank import Rank

    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"job settings {path}: {error}") from error
    if not isinstance(config, dict) or "out" not in config:
        raise UserError(f'job settings {path}: needs a JSON object with "out", a directory')
    job, out = find(name), Path(config["out"])
    settings = job.read(config)
    named = {key: config[key] for key in ("link", "link_bits_per_s") if key in config}
    me = replace(Rank.join(**config.get("join", {})), out=out, **named)
    if me.rank == 0:
        described = {"device": str(me.device), "backend": me.backend}
        described |= {"world_size": me.world_size, "torch_threads": me.torch_threads}
        atomic_write_text(out / "job.json", json.dumps(described))
    job.run(me, settings)
    me.leave()


def main(argv: Sequence[str]) -> int:
    """Do what a rank does; returns its exit status."""
    try:
        if len(argv) != 2:
            raise UserError("usage: python -m ddlkit.run.jobs.worker JOB CONFIG.json")
        run(argv[0], Path(argv[1]))
    except UserError as error:
        print(f"{ERROR}{error}", file=sys.stderr)
        return MISTAKE
    except Exception as error:
        from torch.distributed import DistError

        traceback.print_exc()
        # CUDA and NCCL explain over several lines, the last of which says nothing.
        print(f"{type(error).__name__}: {one_line(error)}", file=sys.stderr)
        # So NCCL, the store and gloo say that another rank is gone.
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
    environment = {**environment, PARENT: os.environ[PARENT]}
    with open(log, "wb", buffering=0) as stream:
        for number in (1, 2):
            os.dup2(stream.fileno(), number)
    os.environ.clear()
    os.environ.update(environment)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, f"ddlkit-rank{environment.get('RANK', '')}".encode())
    sys.argv = [__name__, *argv]
    try:
        if namespace:
            enter(namespace)
        status = main(argv)
    except OSError as error:
        print(error, file=sys.stderr)
        status = 1
    leave(status)


if __name__ == "__main__":
    die_with_parent()
    leave(main(sys.argv[1:]))
