"""Start a job on several ranks of this machine, watch over them, and leave none behind.

Every rank runs ``ddlkit.run.jobs.worker JOB CONFIG.json``, which torchrun, or Slurm, starts over nodes. Here
multiprocessing's fork server, which has imported torch, forks them. No torch in this module.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from multiprocessing.util import Finalize, get_temp_dir
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import psutil

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.run import jobs
from ddlkit.run.jobs.worker import main_forked
from ddlkit.store.files import scratch

if TYPE_CHECKING:
    from ddlkit.run.jobs.rank import Job, S

LOCALHOST = "127.0.0.1"
LOGS = "rank-logs"
SOCKETS = "/tmp"  # the name of a socket has at most 104 letters, of which TMPDIR may take all
# What the fork server imports, torch among it. None may ask for a GPU, or what is forked could use none.
PRELOADED = ("jobs", "lab.replay", "measure.layers", "measure.training")
POLL_S = 0.05
SETTLE_S = 0.3  # ranks that die of one cause do so within this time
MEETING_S = 20.0  # two ranks of one machine that do not hear of one another for so long never will
GRACE_S = 3.0  # what a process has to end by itself before it is killed

# Ranks of one machine need no network, but NCCL would look for one for a minute, and torch for names of all
# addresses: with no name server, a meeting would take 10 s longer.
ON_ONE_MACHINE = {
    "RES_OPTIONS": "timeout:1 attempts:1",
    "NCCL_NET": "Socket",
    "NCCL_NET_PLUGIN": "none",
    "NCCL_IB_DISABLE": "1",
    "NCCL_RAS_ENABLE": "0",
}


class Place:
    """Where ranks of this machine run, and over which link they talk; ``port`` 0 is any that is free."""

    name: str
    link_bits_per_s = 0.0
    address, port = LOCALHOST, 0

    def environment(self, rank: int, ranks: int) -> dict[str, str]:
        """Return what that rank must find in its environment: here torchrun's variables."""
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        meeting = {"MASTER_ADDR": self.address, "MASTER_PORT": self.port}
        return {name: str(value) for name, value in (numbers | meeting).items()}

    def namespace(self, rank: int) -> Path | None:
        """Return the file of the network namespace that the rank lives in; None for ours."""
        return None

    def lost(self) -> str:
        """Return why its ranks cannot reach one another any more, in one line; empty while they can."""
        return ""


@dataclass(frozen=True)
class Loopback(Place):
    """The loopback interface of this machine, with ``variables`` in the environment of all ranks."""

    port: int = 0
    name: str = "loopback"
    variables: Mapping[str, str] = field(default_factory=dict)

    def environment(self, rank: int, ranks: int) -> dict[str, str]:
        """Return torchrun's variables, the interface of gloo and NCCL, and ``variables``."""
        interface = "lo0" if sys.platform == "darwin" else "lo"
        # "=": this interface alone, not all whose names begin so.
        only = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
        return {**super().environment(rank, ranks), **only, **ON_ONE_MACHINE, **self.variables}


def launch(
    job: Job[S],
    settings: S,
    *,
    ranks: int,
    place: Place,
    join: Mapping[str, Any] | None = None,
    timeout_s: float = 900.0,
    out: Path | None = None,
) -> dict[str, pd.DataFrame]:
    """Run a job to its end, as `run_ranks`; returns the tables that it left, also in ``out``.

    join : arguments of `ddlkit.run.jobs.rank.Rank.join`, e.g. {"backend": "gloo"}
    """
    link = {"link": place.name, "link_bits_per_s": place.link_bits_per_s}
    with workspace(out) as directory:
        config = {"out": str(directory), "join": dict(join or {}), **link, **asdict(settings)}
        run_ranks(job.module, config, ranks=ranks, place=place, timeout_s=timeout_s)
        paths = {name: directory / f"{name}.csv" for name in job.tables}
        return {name: store.load_table(path, name) for name, path in paths.items() if path.exists()}


@contextlib.contextmanager
def workspace(out: Path | None) -> Iterator[Path]:
    """Give ``out``, or a directory that lasts as long as the block."""
    with contextlib.nullcontext(out) if out else scratch() as directory:
        yield Path(directory)


def run_ranks(
    job: str, config: Mapping[str, Any], *, ranks: int, place: Place, timeout_s: float
) -> None:
    """Run `ddlkit.run.jobs.worker` with ``job`` and ``config`` in every rank to its end; none outlives it.

    Raises UserError when a rank dies, and when time is up: what ranks wrote stays in ``rank-logs``.
    """
    logs = Path(config["out"]).resolve() / LOGS
    try:
        shutil.rmtree(logs, ignore_errors=True)
        logs.mkdir(parents=True)
        (logs / "config.json").write_text(json.dumps(config))
    except OSError as error:
        complaint = f"cannot write to {config['out']}: {error.strerror}: choose another directory"
        raise UserError(complaint) from error
    processes: list[RankProcess] = []
    with jobs.unwinding(signal.SIGTERM):
        try:
            port = str(free_port())
            for rank in range(ranks):
                environment = {**jobs.child_environment(), "OMP_NUM_THREADS": "1"}
                environment |= place.environment(rank, ranks)
                if environment["MASTER_PORT"] == "0":
                    environment["MASTER_PORT"] = port
                argv, log = [job, str(logs / "config.json")], logs / f"rank{rank}.log"
                processes.append(RankProcess(argv, environment, log, place.namespace(rank)))
                processes[-1].start()
            _watch(processes, job.rpartition(".")[2], place, timeout_s)
        finally:
            end(processes)
    shutil.rmtree(logs)


# -- ranks that are forked -----------------------------------------------------------------------


class RankProcess(ForkServerProcess):
    """A rank that the fork server forks, as `subprocess.Popen` would show it."""

    def __init__(
        self, argv: Sequence[str], environment: Mapping[str, str], log: Path, namespace: Path | None
    ) -> None:
        arguments = (argv, dict(environment), str(log), str(namespace or ""))
        super().__init__(target=main_forked, args=arguments, daemon=False)  # it may have children
        self.log = log

    def start(self) -> None:
        """Have it forked. A signal waits until this process knows of it, or nobody would end it."""
        main = sys.modules["__main__"]  # which multiprocessing would run in every rank
        with jobs.deferring(signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            sys.modules["__main__"] = types.ModuleType("__main__")
            try:
                _start_server()
                super().start()
            except (OSError, EOFError) as error:
                why = str(error) or "importing torch failed in the fork server"
                raise UserError(f"ranks cannot be started: {why}") from error
            finally:
                sys.modules["__main__"] = main

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while it runs."""
        return self.exitcode

    wait = ForkServerProcess.join


def _start_server() -> None:
    """Start the fork server, which dies with the thread that started it, where there is none."""
    _keep_sockets()
    forkserver.set_forkserver_preload([f"ddlkit.run.{module}" for module in PRELOADED])
    before = dict(os.environ)
    # One thread each: read when torch is loaded; each rank sets its own number.
    os.environ.update({**jobs.child_environment(), "OMP_NUM_THREADS": "1", jobs.FORKS: "1"})
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


_held = contextlib.ExitStack()  # a forked child that forgets its finalizers must not lose it


@functools.cache
def _keep_sockets() -> None:
    """Have multiprocessing's sockets under a short name that the next launch sweeps if we are killed."""
    directory = _held.enter_context(scratch(SOCKETS if os.access(SOCKETS, os.W_OK) else None))
    Finalize(None, _held.close, exitpriority=-200)  # after multiprocessing's own at -100
    before, tempfile.tempdir = tempfile.tempdir, str(directory)
    try:
        get_temp_dir()
    finally:
        tempfile.tempdir = before


# -- watched, and ended ------------------------------------------------------------------------


def _watch(processes: Sequence[RankProcess], job: str, place: Place, timeout_s: float) -> None:
    """Return when all ranks are done; raise UserError when one dies or time is up."""
    ranks, log = len(processes), processes[0].log
    shown, give_up = 0, time.monotonic() + timeout_s
    while any(statuses := [process.poll() for process in processes]) or None in statuses:
        if any(statuses):
            time.sleep(SETTLE_S)  # a killed link takes its devices along before its process is gone
        if lost := place.lost():
            raise UserError(f"{lost} (job {job}, {ranks} ranks)")
        if any(statuses):
            raise UserError(_verdict(processes, f"job {job}"))
        if time.monotonic() > give_up:
            late = f"on {ranks} ranks over {place.name} was not done after {timeout_s:g} s"
            last = f"last line of rank 0: {_last_line(log)}"
            raise UserError(f"job {job} {late} and was ended; {last}")
        time.sleep(POLL_S)
        shown = _show_progress(log, shown)
    _show_progress(log, shown)


def _verdict(processes: Sequence[RankProcess], job: str) -> str:
    """Return in one line which rank died first of all, or was waited for in vain."""
    polled = dict(enumerate(process.poll() for process in processes))
    deaths = {rank: status for rank, status in polled.items() if status}
    # Ranks follow one another within milliseconds: those that lost a peer are not the cause.
    first = min(deaths, key=lambda rank: (deaths[rank] == jobs.LOST_PEER, deaths[rank] >= 0))
    line, of_all, status = _last_line(processes[first].log), f"of {len(processes)}", deaths[first]
    silent = [rank for rank, status in polled.items() if status is None]
    if status == jobs.LOST_PEER and silent:
        stopped = [rank for rank in silent if _is_stopped(processes[rank].pid)]
        how = "is stopped" if stopped else "does not answer"
        late = f"rank {(stopped or silent)[0]} {of_all} {how} in {job}"
        return f"{late}: rank {first} gave up; its last line: {line}"
    if status == jobs.MISTAKE and line.startswith(jobs.ERROR):
        return f"{line.removeprefix(jobs.ERROR)} (rank {first} {of_all}, {job})"
    return f"rank {first} {of_all} {jobs.ending(status)} in {job}; last line: {line}"


def free_port() -> int:
    """Return a port of this machine that nobody listens on; UserError where it cannot reach itself."""
    try:
        with socket.create_server((LOCALHOST, 0)) as server:
            port: int = server.getsockname()[1]
            socket.create_connection((LOCALHOST, port), timeout=MEETING_S).close()
    except OSError as error:
        why = f"this machine does not reach itself at {LOCALHOST} ({error.strerror or error})"
        raise UserError(f"no rank is started: {why}; as root: ip link set lo up") from error
    return port


def end(processes: Sequence[subprocess.Popen[Any] | RankProcess]) -> None:
    """End every process that still runs, and its group, kindly first; wait until it has."""
    for number, patience_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, None)):
        running = [process for process in processes if process.pid and process.poll() is None]
        for process in running:
            _signal(int(process.pid or 0), number)
        begun_s = time.monotonic()
        for process in running:
            rest_s = patience_s and max(0.0, begun_s + patience_s - time.monotonic())
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(rest_s)


def _signal(pid: int, number: int) -> None:
    """Send a signal to the group of a process, or to it alone where it leads none yet."""
    for send in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError):
            send(pid, number)
            return


def _is_stopped(pid: int | None) -> bool:
    with contextlib.suppress(psutil.Error):
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    return False


def _lines(log: Path) -> list[str]:
    return log.read_text(errors="replace").split("\n") if log.exists() else []


def _last_line(log: Path) -> str:
    return next(filter(None, map(str.strip, reversed(_lines(log)))), "(none)")


def _show_progress(log: Path, shown: int) -> int:
    """Print the progress in a log behind as many lines; returns how many there are now, all ended."""
    lines = _lines(log)[:-1]
    for line in lines[shown:]:
        if line.startswith(jobs.PROGRESS) and not line.startswith(jobs.ERROR):
            print(line, file=sys.stderr, flush=True)
    return len(lines)
