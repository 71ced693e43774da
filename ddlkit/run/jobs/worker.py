"""What runs in every rank: ``python -m ddlkit.run.jobs.worker JOB CONFIG.json``.

The ranks find each other by torchrun's variables or by Slurm's. JOB is the module that declares a job; of
ddlkit.run.measure its name is enough. CONFIG.json holds the job's settings, and where rank 0 writes tables, a
name for the network, and arguments of `Rank.join`: {"out": "results", "link": "infiniband", "join": {}}.
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

from ddlkit.core.errors import UserError, one_line
from ddlkit.run.jobs import ERROR, LOST_PEER, MISTAKE, PARENT, die_with_parent, enter
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
        raise UserError(f"unknown job {name!r}: name the module that declares it, e.g. collectives")
    for value in vars(importlib.import_module(whole)).values():
        if isinstance(value, Job) and value.module == whole:
            return value
    raise UserError(f"unknown job {name!r}: {whole} declares none")


def run(name: str, path: Path) -> None:
    """Join the other ranks, do this rank's part of the job whose settings are there, and leave."""
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
    if me.rank == 0:  # what decides how fast the run is
        how = {name: str(getattr(me, name)) for name in ("device", "backend", "torch_threads")}
        atomic_write_text(out / "job.json", json.dumps(how))
    job.run(me, settings)
    me.leave()


def main(argv: Sequence[str]) -> NoReturn:
    """Do what a rank does, and end: threads of gloo and NCCL may wait for peers for ever."""
    status = _status(argv)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _status(argv: Sequence[str]) -> int:
    """Return the exit status: LOST_PEER where a rank fails because another one went away."""
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
        print(f"{type(error).__name__}: {one_line(str(error))}", file=sys.stderr)
        # So NCCL, the store and gloo say that another rank is gone.
        lost = isinstance(error, DistError | ConnectionError) or "gloo/transport" in str(error)
        return LOST_PEER if lost else 1
    return 0


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
    if namespace:
        enter(namespace)
    main(argv)


if __name__ == "__main__":
    die_with_parent()
    main(sys.argv[1:])
