"""Start a job on several ranks of this machine, watch over them, and leave none behind; and be such a rank.

Every rank is ``python -m ddlkit.jobs.launch JOB CONFIG.json``, which torchrun or Slurm starts over
nodes; here multiprocessing's fork server, which has imported torch, forks it. JOB is the module that declares
a job, of ddlkit.measure its name. CONFIG.json holds the job's settings, where rank 0 writes tables, the
network's name, and arguments of `Rank.join`: {"out": "results", "link": "infiniband", "join": {}}.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import importlib
import importlib.util
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import traceback
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import forkserver
from multiprocessing.context import ForkServerProcess
from multiprocessing.process import current_process
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import pandas as pd
import psutil

from ddlkit import jobs, store
from ddlkit.core.errors import UserError, one_line
from ddlkit.store.files import atomic_write_text, scratch

if TYPE_CHECKING:
    from ddlkit.jobs.rank import Job, S

LOCALHOST = "127.0.0.1"
LOGS, CONFIG = "rank-logs", "config.json"
SOCKETS = (
    "/tmp"  # the name of a socket has at most 104 letters, of which TMPDIR may take all
)
# What the fork server imports, torch among it. None may ask for a GPU, or what is forked could use none.
PRELOADED = ["ddlkit.jobs", "ddlkit.jobs.rank"]
"""Modules that the fork server imports once, so that no rank has to: packages with jobs add their own."""
IMPORTED: list[str] = []
"""Modules that every rank imports before its job, such as those that register networks by name."""
POLL_S = 0.05
SETTLE_S = 0.3  # ranks that die of one cause do so within this time
MEETING_S = 20.0  # two ranks of one machine that do not hear of one another for so long never will
_PR_SET_NAME = 15
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

    def environment(self, rank: int, ranks: int, port: int = 0) -> dict[str, str]:
        """Return torchrun's variables, as that rank must find them; port : one that is free."""
        numbers = {
            "RANK": rank,
            "LOCAL_RANK": rank,
            "WORLD_SIZE": ranks,
            "LOCAL_WORLD_SIZE": ranks,
        }
        meeting = {"MASTER_ADDR": self.address, "MASTER_PORT": self.port or port}
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

    def environment(self, rank: int, ranks: int, port: int = 0) -> dict[str, str]:
        """Return torchrun's variables, the interface of gloo and NCCL, and ``variables``."""
        interface = "lo0" if sys.platform == "darwin" else "lo"
        # "=": this interface alone, not all whose names begin so.
        only = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}
        numbers = super().environment(rank, ranks, port)
        return {**numbers, **only, **ON_ONE_MACHINE, **self.variables}


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
    """Run a job in every rank to its end, which none outlives; returns its tables, also left in ``out``.

    out : holds at any time what was measured so far; None: tables are written once, to be returned
    join : arguments of `ddlkit.jobs.rank.Rank.join`, e.g. {"backend": "gloo"}

    Raises UserError when a rank dies, and when time is up: what ranks wrote stays in ``rank-logs``.
    """
    with workspace(out) as directory:
        logs = directory.resolve() / LOGS
        link = {"link": place.name, "link_bits_per_s": place.link_bits_per_s}
        config = {
            "out": str(directory),
            "join": dict(join or {}),
            "imports": IMPORTED,
            **link,
            "temporary_out": out is None,
            **asdict(settings),
        }
        shutil.rmtree(logs, ignore_errors=True)
        atomic_write_text(logs / CONFIG, json.dumps(config))
        processes: list[RankProcess] = []
        with jobs.unwinding(signal.SIGTERM):
            try:
                port = free_port()
                for rank in range(ranks):
                    environment = {**jobs.child_environment(), "OMP_NUM_THREADS": "1"}
                    environment |= place.environment(rank, ranks, port)
                    processes.append(RankProcess(job.module, environment, logs, place))
                    processes[-1].start()
                _watch(processes, job.module.rpartition(".")[2], place, timeout_s)
            finally:
                end(processes)
        shutil.rmtree(logs)
        paths = {name: directory / f"{name}.csv" for name in job.tables}
        return {
            name: store.load_table(path, name)
            for name, path in paths.items()
            if path.exists()
        }


@contextlib.contextmanager
def workspace(out: Path | None) -> Iterator[Path]:
    """Give ``out``, or a directory that lasts as long as the block."""
    with contextlib.nullcontext(out) if out else scratch() as directory:
        yield Path(directory)


# -- ranks that are forked -----------------------------------------------------------------------


class RankProcess(ForkServerProcess):
    """A rank that the fork server forks, as `subprocess.Popen` would show it."""

    def __init__(
        self, job: str, environment: dict[str, str], logs: Path, place: Place
    ) -> None:
        self.job = job
        self.log = logs / f"rank{environment['RANK']}.log"
        namespace = place.namespace(int(environment["RANK"]))
        arguments = (job, logs / CONFIG, environment, self.log, namespace)
        super().__init__(
            target=be_forked, args=arguments, daemon=False
        )  # it may have children

    def start(self) -> None:
        """Have it forked. A signal waits until this process knows of it, or nobody would end it."""
        main = sys.modules["__main__"]  # which multiprocessing would run in every rank
        with jobs.deferring(signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            sys.modules["__main__"] = types.ModuleType("__main__")
            try:
                _start_server(self.job)
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


def _start_server(job: str) -> None:
    """Start the fork server, which dies with the thread that started it, where there is none.

    job : module of the first job. The server imports it, and torch with it, once, so that no rank has to.
    """
    _keep_sockets()
    forkserver.set_forkserver_preload([*PRELOADED, job])
    before = dict(os.environ)
    # One thread each: read when torch is loaded; each rank sets its own number.
    os.environ.update(
        {**jobs.child_environment(), "OMP_NUM_THREADS": "1", jobs.FORKS: "1"}
    )
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


@functools.cache
def _keep_sockets() -> None:
    """Have multiprocessing's sockets under a short name, which the next launch sweeps if we are killed."""
    directory = scratch(SOCKETS if os.access(SOCKETS, os.W_OK) else None)
    process: Any = current_process()
    process._config["tempdir"] = str(directory.__enter__())
    atexit.register(directory.__exit__, None, None, None)


# -- watched, and ended ------------------------------------------------------------------------


def _watch(
    processes: Sequence[RankProcess], job: str, place: Place, timeout_s: float
) -> None:
    """Return when all ranks are done; raise UserError when one dies or time is up."""
    ranks, log = len(processes), processes[0].log
    shown, give_up = 0, time.monotonic() + timeout_s
    while (
        any(statuses := [process.poll() for process in processes]) or None in statuses
    ):
        if any(statuses):
            time.sleep(
                SETTLE_S
            )  # a killed link takes its devices along before its process is gone
        if lost := place.lost():
            raise UserError(f"{lost} (job {job}, {ranks} ranks)")
        if any(statuses):
            raise UserError(_verdict(processes, f"job {job}"))
        if time.monotonic() > give_up:
            late = (
                f"on {ranks} ranks over {place.name} was not done after {timeout_s:g} s"
            )
            last = f"last line of rank 0: {_last_line(log)}"
            raise UserError(f"job {job} {late} and was ended; {last}")
        time.sleep(POLL_S)
        shown = _show_progress(log, shown)
    _show_progress(log, shown)


def _verdict(processes: Sequence[RankProcess], job: str) -> str:
    """Return in one line which rank died first of all, or was waited for in vain."""
    polled = [process.poll() for process in processes]
    deaths = {rank: status for rank, status in enumerate(polled) if status}
    # Ranks follow one another within milliseconds: those that lost a peer are not the cause.
    first = min(
        deaths, key=lambda rank: (deaths[rank] == jobs.LOST_PEER, deaths[rank] >= 0)
    )
    line, of_all, status = (
        _last_line(processes[first].log),
        f"of {len(processes)}",
        deaths[first],
    )
    silent = [rank for rank, status in enumerate(polled) if status is None]
    if status == jobs.LOST_PEER and silent:
        states = {
            each.pid: each.info["status"] for each in psutil.process_iter(["status"])
        }
        stopped = [
            n for n in silent if states.get(processes[n].pid) == psutil.STATUS_STOPPED
        ]
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
        raise UserError(
            f"no rank is started: {why}; as root: ip link set lo up"
        ) from error
    return port


def end(processes: Sequence[subprocess.Popen[Any] | RankProcess]) -> None:
    """End every process that still runs, and its group, kindly first; wait until it has."""
    for number, patience_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, None)):
        running = [
            process for process in processes if process.pid and process.poll() is None
        ]
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


def _lines(log: Path) -> list[str]:
    return log.read_text(errors="replace").split("\n") if log.exists() else [""]


def _last_line(log: Path) -> str:
    return ([line.strip() for line in _lines(log) if line.strip()] or ["(none)"])[-1]


def _show_progress(log: Path, shown: int) -> int:
    """Print the progress in a log behind as many lines; returns how many there are now, all ended."""
    lines = _lines(log)[:-1]
    for line in lines[shown:]:
        if line.startswith(jobs.PROGRESS) and not line.startswith(jobs.ERROR):
            print(line, file=sys.stderr, flush=True)
    return len(lines)


# -- in each rank --------------------------------------------------------------------------------


def be_forked(
    job: str,
    config: Path,
    environment: Mapping[str, str],
    log: Path,
    namespace: Path | None,
) -> NoReturn:
    """Be a rank that the fork server has made: in a session, environment, network and log of its own."""
    os.setsid()
    jobs.die_with_parent()  # whose number it has left in our environment
    environment = {**environment, jobs.PARENT: os.environ[jobs.PARENT]}
    with open(log, "wb", buffering=0) as stream:
        for number in (1, 2):
            os.dup2(stream.fileno(), number)
    os.environ.clear()
    os.environ.update(environment)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(
            _PR_SET_NAME, f"ddlkit-rank{environment['RANK']}".encode()
        )
    sys.argv = [__name__, job, str(config)]
    if namespace:
        jobs.enter(str(namespace))
    be_rank()


def be_rank() -> NoReturn:
    """Do what a rank does, and end: threads of gloo and NCCL may wait for peers for ever.

    None of its threads takes a core from another by waking up (SCHED_BATCH): gloo's loop, once awake, tries
    again and again for the lock that another holds, who meanwhile waits for that core. On two cores a message
    of 1 KiB then takes 0.3 ms, where it takes from 0.2 to 4.
    """
    with contextlib.suppress(
        AttributeError, OSError
    ):  # of Linux only, and not allowed everywhere
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    status = status_of(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def status_of(argv: Sequence[str]) -> int:
    """Do what a rank does; returns its exit status: LOST_PEER where it fails as another one went away."""
    try:
        if len(argv) != 2:
            raise UserError("usage: python -m ddlkit.jobs.launch JOB CONFIG.json")
        _do(argv[0], Path(argv[1]))
    except UserError as error:
        print(f"{jobs.ERROR}{error}", file=sys.stderr)
        return jobs.MISTAKE
    except Exception as error:
        from torch.distributed import DistError

        traceback.print_exc()
        # CUDA and NCCL explain over several lines, the last of which says nothing.
        print(f"{type(error).__name__}: {one_line(str(error))}", file=sys.stderr)
        # So NCCL, the store and gloo say that another rank is gone.
        lost = isinstance(
            error, DistError | ConnectionError
        ) or "gloo/transport" in str(error)
        return jobs.LOST_PEER if lost else 1
    return 0


def _do(name: str, path: Path) -> None:
    """Join the other ranks, do this rank's part of the job whose settings are there, and leave."""
    from ddlkit.jobs.rank import OF_RANK, Rank

    try:
        config = json.loads(path.read_text())
        out = Path(config["out"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        needed = 'needs a JSON object with "out", a directory'
        raise UserError(f"job settings {path}: {needed}: {error}") from error
    for module in config.get("imports", ()):
        importlib.import_module(module)
    job = find(name)
    settings = job.read(config)
    named = {name: config[name] for name in OF_RANK if name in config}
    me = replace(Rank.join(**config.get("join", {})), out=out, **named)
    if me.rank == 0:  # what decides how fast the run is
        how = {
            name: str(getattr(me, name))
            for name in ("device", "backend", "torch_threads")
        }
        atomic_write_text(out / "job.json", json.dumps(how))
    job.run(me, settings)
    me.leave()


def find(name: str) -> Job[Any]:
    """Return the job that a module declares. Raises UserError where there is none."""
    from ddlkit.jobs.rank import Job

    ours = f"ddlkit.measure.{name}"
    whole = ours if "." not in name and importlib.util.find_spec(ours) else name
    if not importlib.util.find_spec(whole):
        raise UserError(
            f"unknown job {name!r}: name the module that declares it, e.g. collectives"
        )
    for value in vars(importlib.import_module(whole)).values():
        if isinstance(value, Job) and value.module == whole:
            return value
    raise UserError(f"unknown job {name!r}: {whole} declares none")


if __name__ == "__main__":
    jobs.die_with_parent()
    be_rank()
