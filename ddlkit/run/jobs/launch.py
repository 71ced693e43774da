"""Start a job on several ranks of this machine, watch over them, and leave none behind.

Everything measured between ranks is a `Job`: ``ddlkit.run.jobs.worker JOB CONFIG.json`` in every rank, with
torchrun's variables in its environment, so that torchrun itself, or Slurm, starts the very same over
several nodes. Here multiprocessing's fork server, which has imported torch, forks them. No torch here.
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
from typing import Any, Protocol

import pandas as pd
import psutil

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.run.jobs.job import Job, S
from ddlkit.run.jobs.protocol import (
    ERROR,
    LOST_PEER,
    MISTAKE,
    PROGRESS,
    child_environment,
    deferring,
    ending,
    rank_environment,
    unwinding,
)
from ddlkit.store.files import scratch

LOCALHOST = "127.0.0.1"
LOGS = "rank-logs"
SOCKETS = "/tmp"  # the name of a socket has at most 104 letters, of which TMPDIR may take all
SERVER = "ddlkit.run.jobs.server"  # not imported here: it is for the fork server alone
POLL_S = 0.05
SETTLE_S = 0.3  # ranks that die of one cause do so within this time
MEETING_S = 20.0  # two ranks of one machine that do not hear of one another for so long never will
GRACE_S = 3.0  # what a process has to end by itself before it is killed
FOR_EVER_S = 1e6
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

# Ranks of one machine talk by NVLink, PCIe or shared memory, but NCCL looks for a network all the same: it
# prefers any interface to loopback, tries one without a route 34 times, for a minute, and loads what plug-ins
# and InfiniBand drivers there are. Its RAS threads open a port that nobody asks. And torch asks for the name
# of every address: where loopback has none and no name server answers, a meeting would take 10 s longer.
ON_ONE_MACHINE = {
    "RES_OPTIONS": "timeout:1 attempts:1",
    "NCCL_NET": "Socket",
    "NCCL_NET_PLUGIN": "none",
    "NCCL_IB_DISABLE": "1",
    "NCCL_RAS_ENABLE": "0",
}


class Place(Protocol):
    """Where ranks run and over which link they talk."""

    @property
    def name(self) -> str:
        """The link as it appears in tables: "loopback", "lab:1gbit"."""

    @property
    def link_bits_per_s(self) -> float:
        """Rate that the link is shaped to; 0 if it is not."""

    def environment(self, rank: int, ranks: int) -> dict[str, str]:
        """What that rank must find in its environment: see `rank_environment`; port 0 is any free one."""

    def namespace(self, rank: int) -> Path | None:
        """File of the network namespace that the rank lives in; None for this process's own."""

    def lost(self) -> str:
        """Why its ranks cannot reach one another any more, in one line; empty while they can."""


@dataclass(frozen=True)
class Loopback:
    """All ranks on this machine, over its loopback interface, with ``variables`` in their environment."""

    port: int = 0
    name: str = "loopback"
    link_bits_per_s: float = 0.0
    variables: Mapping[str, str] = field(default_factory=dict)

    def environment(self, rank: int, ranks: int) -> dict[str, str]:
        """Return torchrun's variables, the interface of gloo and NCCL, and ``variables``."""
        interface = "lo0" if sys.platform == "darwin" else "lo"
        numbers = rank_environment(rank, ranks, LOCALHOST, self.port)
        # "=": this interface alone, not all whose names begin so.
        only = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
        return {**numbers, **only, **ON_ONE_MACHINE, **self.variables}

    def namespace(self, rank: int) -> Path | None:
        """Return None: ranks live in our own."""

    def lost(self) -> str:
        """Return nothing: loopback stays."""
        return ""


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
    """Run a job on ``ranks`` ranks to its end; returns the tables that it left.

    ::

        settings = CollectivesSettings(sizes=[1024, 4 * MIB])
        table = launch(collectives_job, settings, ranks=2, place=Loopback())["collectives"]

    join : arguments of `ddlkit.run.jobs.rank.Rank.join`, e.g. {"gloo_threads": 2}
    out : where the tables are also left, each as soon as there is something of it

    Raises UserError as `run_ranks` does.
    """
    link = {"link": place.name, "link_bits_per_s": place.link_bits_per_s}
    with workspace(out) as directory:
        config = {"out": str(directory), "join": dict(join or {}), **link, **asdict(settings)}
        run_ranks(job.module, config, ranks=ranks, place=place, timeout_s=timeout_s)
        paths = {name: directory / f"{name}.csv" for name in job.tables}
        left = {name: path for name, path in paths.items() if path.exists()}
        return {name: store.load_table(path, name) for name, path in left.items()}


@contextlib.contextmanager
def workspace(out: Path | None) -> Iterator[Path]:
    """Give ``out``, or a directory that lasts as long as the block."""
    with contextlib.nullcontext(out) if out else scratch() as directory:
        yield Path(directory)


def run_ranks(
    job: str, config: Mapping[str, Any], *, ranks: int, place: Place, timeout_s: float
) -> None:
    """Run `ddlkit.run.jobs.worker` with ``job`` and ``config``, any JSON object, in every rank to its end.

    Their standard error goes to ``rank-logs`` in ``config["out"]``, which stays only when the job failed.

    Raises UserError, in one line, when a rank dies (all others are then ended at once), when the job
    takes longer than ``timeout_s``, when the port is taken, and where this machine does not reach itself.
    No rank outlives this call or process.
    """
    out = Path(config["out"])
    logs = out / LOGS
    config_file = logs / "config.json"
    group = _Group([job, str(config_file.resolve())], ranks, place, logs)
    if ranks < 1:
        raise UserError(f"{ranks} ranks for job {group.job}: ask for at least 1")
    try:
        shutil.rmtree(logs, ignore_errors=True)
        logs.mkdir(parents=True)
        config_file.write_text(json.dumps(config))
    except OSError as error:
        complaint = f"cannot write to {out}: {error.strerror}: choose another directory"
        raise UserError(complaint) from error
    with unwinding(signal.SIGTERM):
        try:
            group.start()
            group.watch(timeout_s)
        finally:
            end(group.processes)
    shutil.rmtree(logs)


# -- ranks that are forked -----------------------------------------------------------------------


class RankProcess(ForkServerProcess):
    """A rank that the fork server forks, as `subprocess.Popen` would show it.

    Importing torch costs seconds of processor time: the server does it once, for every rank of every launch.
    """

    def __init__(
        self, argv: Sequence[str], environment: Mapping[str, str], log: Path, namespace: Path | None
    ) -> None:
        super().__init__(daemon=False)  # ranks may have children: workers that load data
        self._asked = (argv, dict(environment), str(log), str(namespace or ""))

    def start(self) -> None:
        """Have it forked. A signal waits until this process knows of it, or nobody would end it."""
        with deferring(*ENDING), _without_main():
            super().start()

    def run(self) -> None:
        """Be the rank, in its own process."""
        from ddlkit.run.jobs.worker import main_forked

        main_forked(*self._asked)

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while it runs."""
        return self.exitcode

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit status once it is there. Raises subprocess.TimeoutExpired."""
        self.join(timeout)
        if self.exitcode is None:
            raise subprocess.TimeoutExpired(f"rank {self.pid}", timeout or 0.0)
        return self.exitcode


def start_server() -> None:
    """Start the fork server where there is none, and wait until it has imported torch.

    It dies with the thread that started it, as the kernel counts parents, and is started anew by the next.
    Raises UserError where it cannot be started.
    """
    _keep_sockets()
    forkserver.set_forkserver_preload([SERVER])
    before = dict(os.environ)
    try:
        with deferring(*ENDING), _without_main():
            masked = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
            # One thread each: read when torch is loaded; each rank sets its own number.
            _set_environment({**child_environment(), "OMP_NUM_THREADS": "1"})
            try:
                forkserver.ensure_running()
            finally:
                _set_environment(before)
                signal.pthread_sigmask(signal.SIG_SETMASK, masked)
            probe = ForkServerProcess()
        with _without_main():
            probe.start()  # does nothing, but only once the imports are done: here signals do not wait
        probe.join()
    except (OSError, EOFError) as error:
        why = str(error) or "importing torch failed in the fork server"
        raise UserError(f"ranks cannot be started: {why}") from error


def _set_environment(environment: Mapping[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


@functools.cache
def _keep_sockets() -> None:
    """Have multiprocessing's sockets under a short name that the next launch sweeps if we are killed."""
    place = contextlib.ExitStack()
    directory = place.enter_context(scratch(SOCKETS if os.access(SOCKETS, os.W_OK) else None))
    Finalize(None, place.close, exitpriority=-200)  # after multiprocessing's own at -100
    before, tempfile.tempdir = tempfile.tempdir, str(directory)
    try:
        get_temp_dir()
    finally:
        tempfile.tempdir = before


@contextlib.contextmanager
def _without_main() -> Iterator[None]:
    """Hide the main module: multiprocessing would run a user's script again in every rank."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


# -- ranks as a group of processes -------------------------------------------------------------


@dataclass
class _Group:
    """The processes of the ranks of one job; ``worker`` are the arguments of each."""

    worker: list[str]
    ranks: int
    place: Place
    logs: Path
    processes: list[RankProcess] = field(default_factory=list)

    @property
    def job(self) -> str:
        """Return the job's name as it appears in messages."""
        return self.worker[0].rpartition(".")[2]

    def log(self, rank: int) -> Path:
        """Return where the standard error of a rank goes."""
        return self.logs / f"rank{rank}.log"

    def start(self) -> None:
        """Start every rank; call `end` even if this fails half-way."""
        port = str(free_port())
        start_server()
        for rank in range(self.ranks):
            environment = {**child_environment(), "OMP_NUM_THREADS": "1"}
            environment |= self.place.environment(rank, self.ranks)
            if environment["MASTER_PORT"] == "0":
                environment["MASTER_PORT"] = port
            where = (self.log(rank), self.place.namespace(rank))
            self.processes.append(RankProcess(self.worker, environment, *where))
            self.processes[-1].start()

    def watch(self, timeout_s: float) -> None:
        """Return when all ranks are done; raise UserError when one dies or time is up."""
        shown = 0
        give_up = time.monotonic() + timeout_s
        while any(statuses := [process.poll() for process in self.processes]) or None in statuses:
            if any(statuses):
                time.sleep(
                    SETTLE_S
                )  # a killed link takes its devices along before its process is gone
            if lost := self.place.lost():
                raise UserError(f"{lost} (job {self.job}, {self.ranks} ranks)")
            if any(statuses):
                raise UserError(self._verdict())
            if time.monotonic() > give_up:
                late = f"on {self.ranks} ranks over {self.place.name} was not done after {timeout_s:g} s"
                last = _last_line(self.log(0))
                raise UserError(f"job {self.job} {late} and was ended; last line of rank 0: {last}")
            time.sleep(POLL_S)
            shown = _show_progress(self.log(0), shown)
        _show_progress(self.log(0), shown)

    def _verdict(self) -> str:
        """Return in one line which rank died first of all, or was waited for in vain."""
        polled = [process.poll() for process in self.processes]
        deaths = {rank: status for rank, status in enumerate(polled) if status}
        # Ranks follow one another within milliseconds: those that lost a peer are not the cause.
        first = min(deaths, key=lambda rank: (deaths[rank] == LOST_PEER, deaths[rank] >= 0))
        line, job = _last_line(self.log(first)), f"job {self.job}"
        silent = [rank for rank, status in enumerate(polled) if status is None]
        if deaths[first] == LOST_PEER and silent:
            stopped = [rank for rank in silent if _is_stopped(self.processes[rank].pid)]
            late, how = (stopped or silent)[0], "is stopped" if stopped else "does not answer"
            where = f"rank {late} of {self.ranks} {how} in {job}"
            return f"{where}: rank {first} gave up; its last line: {line}"
        where = f"rank {first} of {self.ranks}"
        if deaths[first] == MISTAKE and line.startswith(ERROR):
            return f"{line.removeprefix(ERROR)} ({where}, {job})"
        return f"{where} {ending(deaths[first])} in {job}; last line: {line}"


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
    started = [process for process in processes if process.pid is not None]
    for number, patience_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, FOR_EVER_S)):
        running = [process for process in started if process.poll() is None]
        for process in running:
            _signal(int(process.pid or 0), number)
        give_up = time.monotonic() + patience_s
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, give_up - time.monotonic()))


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


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "(none)")


def _show_progress(log: Path, shown: int) -> int:
    """Print the progress lines of a log from byte ``shown`` on; returns where the next one begins."""
    if not log.exists() or log.stat().st_size <= shown:
        return shown
    with open(log, "rb") as stream:
        stream.seek(shown)
        complete, newline, _ = stream.read().rpartition(b"\n")
    for line in complete.decode(errors="replace").splitlines():
        if line.startswith(PROGRESS) and not line.startswith(ERROR):
            print(line, file=sys.stderr, flush=True)
    return shown + len(complete) + len(newline)
