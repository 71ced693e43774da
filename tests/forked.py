"""Start processes of tests from a fork server, which has imported torch and has a single thread.

To import torch takes three seconds of a processor. A fork of this process would also have imported
it, but may wait for ever for threads of torch, of which a fork has none.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from ddlkit.jobs.launch import RankProcess
from places import PATIENCE_S, free_port

RANK_VARIABLES = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "srun": (
        "SLURM_PROCID",
        "SLURM_NTASKS",
        "SLURM_LOCALID",
        "SLURM_NTASKS_PER_NODE",
    ),
}
"""The variables by which a launcher tells a rank who it is."""


class Forked(RankProcess):
    """A process that calls a function, forked by the server that also forks the ranks of jobs.

    Parameters
    ----------
    target : callable
        The function, which another process can import by its name, or a `partial` of one.
    *arguments
        Its arguments, which can be pickled.
    """

    def __init__(self, target: Callable[..., object], *arguments: Any) -> None:
        # The fork server imports the module of the first job, so that no process has to.
        self.job = "ddlkit.measure.collectives"
        ForkServerProcess.__init__(self, target=target, args=arguments, daemon=False)


def two_ranks(
    main: Callable[[], int],
    directory: Path,
    launchers: Sequence[str] = ("torchrun", "torchrun"),
    *,
    on_one_node: bool = False,
) -> tuple[list[int], list[str]]:
    """The exit statuses of two ranks that run a program, and what they print.

    Parameters
    ----------
    main : callable
        The program, which returns its exit status, as `Forked` takes it.
    directory : Path
        Where what the ranks print is written.
    launchers : sequence of str
        Who has started each rank, by its variables.
    on_one_node : bool
        Whether one launcher has started both. Otherwise each is alone on its node.
    """
    meeting = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    logs = [directory / f"said-by-{rank}.log" for rank in range(2)]
    for log in logs:
        # A rank may end before it opens its log.
        log.touch()
    ranks = []
    for rank, launcher in enumerate(launchers):
        if on_one_node:
            values = (str(rank), "2", str(rank), "2")
        else:
            values = (str(rank), "2", "0", "1")
        numbers = dict(zip(RANK_VARIABLES[launcher], values, strict=True))
        environment = {**os.environ, **meeting, **numbers}
        process = Forked(_run_rank, main, environment, logs[rank])
        process.start()
        ranks.append(process)
    for process in ranks:
        process.join(PATIENCE_S)
        process.kill()
        process.join()
    said = [log.read_text(encoding="utf-8") for log in logs]
    for log in logs:
        log.unlink()
    return [process.exitcode or 0 for process in ranks], said


def _run_rank(
    main: Callable[[], int], environment: Mapping[str, str], log: Path
) -> None:
    """Run the program of a rank, whose streams are a file, as a process of its own would."""
    with log.open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    os.environ.clear()
    os.environ.update(environment)
    sys.exit(main())
