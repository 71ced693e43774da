"""Start a job on several ranks of this machine, watch over them, and leave none behind.

Everything measured between ranks is a `Job`: ``ddlkit.run.jobs.worker JOB CONFIG.json`` in every rank, with
torchrun's variables in its environment, so that torchrun itself, or Slurm, starts the very same over
several nodes. Here one process that has imported torch, the zygote, forks them. No torch here.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import pandas as pd

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.run.jobs.job import Job, S
from ddlkit.run.jobs.protocol import (
    ERROR,
    FORK,
    LOST_PEER,
    MISTAKE,
    PROGRESS,
    child_environment,
    ending,
    rank_environment,
    unwinding,
)
from ddlkit.store.files import scratch

LOCALHOST = "127.0.0.1"
LOGS = "rank-logs"
# -u: the last words of a rank that is killed must have left its buffers.
WORKER = [sys.executable, "-u", "-m", "ddlkit.run.jobs.worker"]
POLL_S = 0.05
SETTLE_S = 0.3  # ranks that die of one cause do so within this time
MEETING_S = 20.0  # two ranks of one machine that do not hear of one another for so long never will
GRACE_S = 3.0  # what a process has to end by itself before it is killed
FOR_EVER_S = 1e6

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
        """torchrun's variables, the interface of gloo and NCCL, and ``variables``."""
        interface = "lo0" if sys.platform == "darwin" else "lo"
        numbers = rank_environment(rank, ranks, LOCALHOST, self.port)
        # "=": this interface alone, not all whose names begin so.
        only = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
        return {**numbers, **only, **ON_ONE_MACHINE, **self.variables}

    def namespace(self, rank: int) -> Path | None:
        """Our own."""
        return None

    def lost(self) -> str:
        """Loopback stays."""
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
    """``out``, or a directory that lasts as long as the block."""
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

# Importing torch costs seconds of processor time, in every rank anew: sixteen ranks on two cores would
# spend half a minute on it before the first message. So one process imports it once, and every rank of
# every launch is its child. It ends when our end of the pipe closes, however we end, and its ranks with it.


def _can_fork() -> bool:
    """Whether ended children can be waited for by file descriptor; some kernels only have the name."""
    try:
        with open(os.pidfd_open(os.getpid())) as us, selectors.DefaultSelector() as selector:
            selector.register(us, selectors.EVENT_READ)
    except (AttributeError, OSError):
        return False
    return True


CAN_FORK = _can_fork()
"""Whether this system can do it; elsewhere each rank is a process that imports torch itself."""


class ForkedRank:
    """A forked rank, as `subprocess.Popen` would show it."""

    def __init__(self, zygote: Zygote, pid: int) -> None:
        self._zygote, self.pid = zygote, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit status, negative for a signal; None while it runs."""
        self._zygote.hear(0.0)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit status once it is there. Raises subprocess.TimeoutExpired."""
        while self.returncode is None:
            if not self._zygote.hear(timeout):
                raise subprocess.TimeoutExpired(f"rank {self.pid}", timeout or 0.0)
        return self.returncode


class Zygote:
    """The process, and what it has reported of its ranks."""

    def __init__(self) -> None:
        self.owner = os.getpid()
        self._ranks: dict[int, ForkedRank] = {}  # those that run
        self._heard = b""
        # A session of its own: Ctrl-C in the terminal reaches only the owner.
        self._process = subprocess.Popen(
            [*WORKER, FORK],
            # Read when torch is loaded; each rank sets its own number.
            env={**child_environment(), "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdin and self._process.stdout
        self._requests, self._reports = self._process.stdin, self._process.stdout

    @property
    def usable(self) -> bool:
        """Whether it lives and is ours: a fork of the owner must not talk to it."""
        return self.owner == os.getpid() and self._process.poll() is None

    def start(
        self, argv: list[str], environment: dict[str, str], log: Path, namespace: Path | None
    ) -> ForkedRank:
        """Fork a worker whose output goes to ``log``. Raises UserError when the zygote died."""
        request = {"argv": argv, "environment": environment, "directory": os.getcwd()}
        request |= {"log": str(log), "namespace": str(namespace or "")}
        self._newest: ForkedRank | None = None
        try:
            with contextlib.suppress(BrokenPipeError):
                self._requests.write(json.dumps(request).encode() + b"\n")
                self._requests.flush()
            while self._newest is None:
                if self._process.poll() is not None:
                    raise UserError(
                        "ranks cannot be started: importing torch failed in their zygote"
                    )
                self.hear(1.0)
        except BaseException:  # the rank may be on its way, and nobody would know it
            self._process.kill()
            self._process.wait()
            raise
        return self._newest

    def hear(self, timeout_s: float | None) -> bool:
        """Take in what the zygote reports within the time; False if that is nothing."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._reports, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                return False
        heard = os.read(self._reports.fileno(), 65536)
        if not heard:
            for rank in self._ranks.values():  # they died with their parent
                rank.returncode = -signal.SIGKILL
            self._ranks.clear()
            self._process.wait()
        *lines, self._heard = (self._heard + heard).split(b"\n")
        for pid, status in map(json.loads, lines):
            if status is None:
                self._newest = self._ranks[pid] = ForkedRank(self, pid)
            else:
                self._ranks.pop(pid).returncode = status
        return True

    def close(self) -> None:
        """End it, and every rank that still runs."""
        if self.owner == os.getpid():
            with contextlib.suppress(BrokenPipeError):
                self._requests.close()
            self._process.wait()
            self._reports.close()


_current: Zygote | None = None


def zygote() -> Zygote:
    """This process's zygote, started at the first call."""
    global _current
    if _current is None or not _current.usable:
        _current = Zygote()
        atexit.register(_current.close)
    return _current


# -- ranks as a group of processes -------------------------------------------------------------

Process = subprocess.Popen[bytes] | ForkedRank
"""A process that carries a rank."""


@dataclass
class _Group:
    """The processes that carry the ranks of one job; ``worker`` are the arguments of each."""

    worker: list[str]
    ranks: int
    place: Place
    logs: Path
    processes: list[Process] = field(default_factory=list)

    @property
    def job(self) -> str:
        """As it appears in messages."""
        return self.worker[0].rpartition(".")[2]

    def log(self, rank: int) -> Path:
        """Where the standard error of a rank goes."""
        return self.logs / f"rank{rank}.log"

    def start(self) -> None:
        """Start every rank; call `end` even if this fails half-way."""
        port = str(free_port())
        for rank in range(self.ranks):
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            environment |= self.place.environment(rank, self.ranks)
            if environment["MASTER_PORT"] == "0":
                environment["MASTER_PORT"] = port
            self.processes.append(self._start(rank, environment))

    def _start(self, rank: int, environment: dict[str, str]) -> Process:
        """A rank in a session of its own: Ctrl-C in the terminal reaches only us."""
        if CAN_FORK:
            namespace = self.place.namespace(rank)
            return zygote().start(self.worker, environment, self.log(rank), namespace)
        with open(self.log(rank), "wb") as stream:
            return subprocess.Popen(
                [*WORKER, *self.worker],
                env=child_environment(environment),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=stream,
                start_new_session=True,
            )

    def watch(self, timeout_s: float) -> None:
        """Return when all ranks are done; raise UserError when one dies or time is up."""
        shown = 0
        give_up = time.monotonic() + timeout_s
        while any(statuses := [process.poll() for process in self.processes]) or None in statuses:
            if lost := self.place.lost():
                raise UserError(f"{lost} (job {self.job}, {self.ranks} ranks)")
            if any(statuses):
                time.sleep(SETTLE_S)
                raise UserError(self._verdict())
            if time.monotonic() > give_up:
                late = f"on {self.ranks} ranks over {self.place.name} was not done after {timeout_s:g} s"
                last = _last_line(self.log(0))
                raise UserError(f"job {self.job} {late} and was ended; last line of rank 0: {last}")
            time.sleep(POLL_S)
            shown = _show_progress(self.log(0), shown)
        _show_progress(self.log(0), shown)

    def _verdict(self) -> str:
        """One line on the rank that died first of all, as far as can be known."""
        polled = enumerate(process.poll() for process in self.processes)
        deaths = {rank: status for rank, status in polled if status}
        # Ranks follow one another within milliseconds: those that lost a peer are not the cause.
        first = min(deaths, key=lambda rank: (deaths[rank] == LOST_PEER, deaths[rank] >= 0))
        line = _last_line(self.log(first))
        where = f"rank {first} of {self.ranks}"
        if deaths[first] == MISTAKE and line.startswith(ERROR):
            return f"{line.removeprefix(ERROR)} ({where}, job {self.job})"
        return f"{where} {ending(deaths[first])} in job {self.job}; last line: {line}"


def free_port() -> int:
    """A port of this machine that nobody listens on; raises UserError where it cannot reach itself."""
    try:
        with socket.create_server((LOCALHOST, 0)) as server:
            port: int = server.getsockname()[1]
            socket.create_connection((LOCALHOST, port), timeout=MEETING_S).close()
    except OSError as error:
        why = f"this machine does not reach itself at {LOCALHOST} ({error.strerror or error})"
        raise UserError(f"no rank is started: {why}; as root: ip link set lo up") from error
    return port


def end(processes: Sequence[Process]) -> None:
    """End every process that still runs, and its group, kindly first; wait until it has."""
    for number, patience_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, FOR_EVER_S)):
        running = [process for process in processes if process.poll() is None]
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        give_up = time.monotonic() + patience_s
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, give_up - time.monotonic()))


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
