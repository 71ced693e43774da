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
so by exit status 3. With ``--fork`` alone it is the process that forks the ranks of `launch`.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import pkgutil
import selectors
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import ddlkit.run
from ddlkit.core.errors import UserError
from ddlkit.run.jobs.job import Job
from ddlkit.run.jobs.protocol import ERROR, FORK, LOST_PEER, MISTAKE, PARENT, die_with_parent
from ddlkit.run.sessions.session import one_line
from ddlkit.store.files import atomic_write_text

MODULE = "ddlkit.run.jobs.worker"
_CLONE_NEWNET = 0x40000000
_PR_SET_NAME = 15


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
        complaint = f"unknown job {name!r}: name the module that declares it, e.g. collectives"
        raise UserError(complaint) from None
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
        atomic_write_text(out / "job.json", json.dumps(me.describe()))
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


# -- a process that forks ranks ------------------------------------------------------------------


def serve() -> None:
    """Be the zygote: fork a rank for each line of JSON on standard input, until that closes.

    It imports torch once and computes nothing. Reports [pid, exit status or None] of each rank.
    """
    zygote, owner = os.getpid(), os.dup(1)
    os.dup2(2, 1)  # nobody but us writes to the owner
    children: dict[int, int] = {}

    def report(pid: int, status: int | None) -> None:
        os.write(owner, json.dumps([pid, status]).encode() + b"\n")

    with selectors.DefaultSelector() as chooser:
        chooser.register(0, selectors.EVENT_READ)
        while True:
            for key, _ in chooser.select():
                if pid := children.pop(key.fd, 0):
                    chooser.unregister(key.fd)
                    os.close(key.fd)
                    report(pid, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                    continue
                # The owner waits for each answer, so there is never more than one line to read.
                line = sys.stdin.buffer.readline()
                if not line:
                    return
                request = json.loads(line)
                preload(request["argv"][0])
                pid = os.fork()
                if not pid:
                    status = 1
                    try:
                        die_with_parent(zygote)
                        chooser.close()
                        _settle(request, [owner, *children])
                        status = main(request["argv"])
                    except BaseException:
                        traceback.print_exc()
                    leave(status)
                with contextlib.suppress(OSError):
                    os.setpgid(pid, pid)  # here and in the child: whoever is first
                child = os.pidfd_open(pid)
                children[child] = pid
                chooser.register(child, selectors.EVENT_READ)
                report(pid, None)


def preload(job: str) -> None:
    """Import what a job needs before its ranks are forked; an unknown job is left to them to refuse."""
    with contextlib.suppress(UserError):
        find(job)


def _settle(request: Mapping[str, Any], to_close: Sequence[int]) -> None:
    """Own group, files, environment, directory, name and network."""
    for fd in to_close:
        os.close(fd)
    os.setpgid(0, 0)
    with open(request["log"], "wb", buffering=0) as log, open(os.devnull, "rb") as nothing:
        for number, stream in ((0, nothing), (1, log), (2, log)):
            os.dup2(stream.fileno(), number)
    os.environ.clear()
    os.environ.update({**request["environment"], PARENT: str(os.getppid())})
    os.chdir(request["directory"])
    sys.argv = [MODULE, *request["argv"]]
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_NAME, f"ddlkit-rank{os.environ.get('RANK', '')}".encode())
    if request["namespace"]:
        with open(request["namespace"], "rb") as place:
            if libc.setns(place.fileno(), _CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "cannot enter", request["namespace"])


if __name__ == "__main__":
    if sys.argv[1:] == [FORK]:
        serve()
    else:
        leave(main(sys.argv[1:]))
