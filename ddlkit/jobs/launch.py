"""Start a job on several ranks of this machine, watch the ranks, and leave none behind.

On several nodes, torchrun or Slurm starts each rank as

    python -m ddlkit.jobs.launch JOB CONFIG.json

On this machine multiprocessing's fork server forks the ranks, because it has imported
torch already. JOB is the module that declares a job, or the module's name within
ddlkit.measure. CONFIG.json holds the settings of the job, the directory in which rank 0
writes tables, the name of the network, and arguments of `ddlkit.jobs.rank.Rank.join`:

    {"out": "results", "link": "infiniband", "join": {}}

Ranks on machines that differ in hardware or software are refused.
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
    from ddlkit.jobs.rank import Job, Rank, S

LOCALHOST = "127.0.0.1"
CONFIG = "config.json"
SOCKETS = "/tmp"
"""Where the fork server's sockets lie.

The name of a socket has at most 104 characters, of which TMPDIR may take all."""
PRELOADED = ["ddlkit.jobs", "ddlkit.jobs.rank"]
"""Modules that the fork server imports once, torch among them, so that no rank has to.

Packages with jobs add their own. No module may use a GPU when it is imported, because
then no forked process could use one."""
IMPORTED: list[str] = []
"""Modules that every rank imports before its job, such as those with networks."""
POLL_S = 0.05
"""Seconds between two checks whether ranks run."""
SETTLE_S = 0.3
"""Seconds within which ranks that die of one cause all die."""
MEETING_S = 20.0
"""Seconds after which two ranks of one machine will never meet."""
GRACE_S = 3.0
"""Seconds that a process has to end by itself before it is killed."""
_PR_SET_NAME = 15

# Ranks of one machine need no network. Without these variables NCCL would look for one
# for a minute. torch looks for the names of all addresses, which without a name server
# would take 10 s for each meeting of ranks.
ON_ONE_MACHINE = {
    "RES_OPTIONS": "timeout:1 attempts:1",
    "NCCL_NET": "Socket",
    "NCCL_NET_PLUGIN": "none",
    "NCCL_IB_DISABLE": "1",
    "NCCL_RAS_ENABLE": "0",
}


class Place:
    """Where ranks of this machine run, and over which link they talk.

    Attributes
    ----------
    name : str
        How tables name the link.
    link_bits_per_s : float
        The rate of the link in bit/s; 0 if it is not known.
    address, port : str, int
        Where ranks meet. Port 0 stands for any port that is free.
    """

    name: str
    link_bits_per_s = 0.0
    address = LOCALHOST
    port = 0

    def environment(self, rank: int, ranks: int, port: int = 0) -> dict[str, str]:
        """Return the variables by which torchrun tells a rank who it is.

        Parameters
        ----------
        rank, ranks : int
            The number of the rank, and how many ranks there are.
        port : int, optional
            A free port, which is used if this place has none of its own.

        Returns
        -------
        dict of str to str
            The values of the variables by their names.
        """
        # All ranks are on this one machine, so the numbers within the machine ("LOCAL")
        # are those among all ranks.
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(ranks),
            "LOCAL_WORLD_SIZE": str(ranks),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port or port),
        }

    def namespace(self, rank: int) -> Path | None:
        """Return the file of a rank's network namespace, None for that of this process.

        A network namespace is a network of Linux that only some processes see. Places
        with an emulated link have one for each rank.

        Parameters
        ----------
        rank : int
            The number of the rank.

        Returns
        -------
        Path or None
        """
        return None

    def lost(self) -> str:
        """Return why ranks cannot reach one another any more, or "" while they can."""
        return ""


@dataclass(frozen=True)
class Loopback(Place):
    """The loopback interface of this machine.

    Attributes
    ----------
    port : int
        Where ranks meet. Port 0 stands for any port that is free.
    name : str
        How tables name the link.
    variables : mapping of str to str
        Further variables in the environment of all ranks.
    """

    port: int = 0
    name: str = "loopback"
    variables: Mapping[str, str] = field(default_factory=dict)

    def environment(self, rank: int, ranks: int, port: int = 0) -> dict[str, str]:
        """Return torchrun's variables, those of gloo and NCCL, and the place's own.

        Parameters
        ----------
        rank, ranks : int
            The number of the rank, and how many ranks there are.
        port : int, optional
            A free port, which is used if this place has none of its own.

        Returns
        -------
        dict of str to str
            The values of the variables by their names. The attribute ``variables`` comes
            last, so that its values replace the others.
        """
        # macOS calls the loopback interface lo0.
        interface = "lo0" if sys.platform == "darwin" else "lo"
        return {
            **super().environment(rank, ranks, port),
            "GLOO_SOCKET_IFNAME": interface,
            # With "=" NCCL takes this interface alone, not all whose names begin so.
            "NCCL_SOCKET_IFNAME": f"={interface}",
            # With these, NCCL looks for no network, and torch hardly waits for a name server.
            **ON_ONE_MACHINE,
            **self.variables,
        }


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
    """Run a job on ranks of this machine until it ends.

    No rank outlives this call, whether it returns or raises.

    Parameters
    ----------
    job : Job
        What each rank does.
    settings : dataclass
        The settings of the job.
    ranks : int
        How many ranks there are.
    place : Place
        Where they run.
    join : mapping, optional
        Arguments of `ddlkit.jobs.rank.Rank.join`, such as {"backend": "gloo"}.
    timeout_s : float, optional
        Seconds after which all ranks are ended, and the call fails.
    out : Path, optional
        A directory into which rank 0 writes tables during the job, so that it holds at
        any time what was measured so far. By default the tables are only returned, and
        no file stays.

    Returns
    -------
    dict of str to DataFrame
        The tables of the job that are in ``out`` at its end, by the names of their schemas.
        A table of which this job has yielded no rows may be there from an earlier job.

    Raises
    ------
    UserError
        If the ranks cannot be started, if one dies, if the link is lost, or if time is
        up. What the ranks printed then stays in ``rank-logs`` below ``out``.
    """
    with workspace(out) as directory:
        logs = directory.resolve() / jobs.LOGS
        # What any job needs, followed by the settings of this job.
        config = {
            "out": str(directory),
            "join": dict(join or {}),
            # Modules that each rank imports first, such as those with networks.
            "imports": IMPORTED,
            "link": place.name,
            "link_bits_per_s": place.link_bits_per_s,
            # Rank 0 saves often into a directory that stays, for the case that the job is
            # ended early, and only at the end into a temporary one.
            "temporary_out": out is None,
            **asdict(settings),
        }
        # An earlier job that failed may have left its logs.
        shutil.rmtree(logs, ignore_errors=True)
        atomic_write_text(logs / CONFIG, json.dumps(config))
        _run_ranks(job.module, logs, ranks, place, timeout_s)
        # After a failure the logs stay, for the user to read.
        shutil.rmtree(logs)
        return _tables_left(job, directory)


def _tables_left(job: Job[Any], directory: Path) -> dict[str, pd.DataFrame]:
    """Return those tables of a job that are in a directory, by their names.

    Others are missing if the job has yielded no rows of theirs.
    """
    tables = {}
    # `job.tables` has the names of all tables of which the job may yield rows. The name of
    # a table is also that of its file and of its schema.
    for name in job.tables:
        path = directory / f"{name}.csv"
        if path.exists():
            tables[name] = store.load_table(path, schema=name)
    return tables


def _run_ranks(
    job: str, logs: Path, ranks: int, place: Place, timeout_s: float
) -> None:
    """Start the ranks of a job, and wait until all are done.

    ``job`` is the module that declares the job. The configuration of the job is in the
    directory ``logs``, in which ranks write their logs. Raises UserError if a rank cannot
    be started or dies, if the link is lost, or if ``timeout_s`` seconds have passed. After
    any error, the ranks that still run are ended.
    """
    processes: list[RankProcess] = []
    # SIGTERM would otherwise end this process at once and leave the ranks behind.
    with jobs.unwinding(signal.SIGTERM):
        try:
            # Ranks meet at this port unless the place has one of its own.
            port = free_port()
            for rank in range(ranks):
                environment = {
                    **jobs.child_environment(),
                    # torch has one thread until the rank joins and sets a number of its own.
                    # The server that forks the ranks has one, too.
                    "OMP_NUM_THREADS": "1",
                    **place.environment(rank, ranks, port),
                }
                process = RankProcess(job, environment, logs, place)
                # The process is listed before it starts, because `finally` ends what is
                # listed, also after an interrupt right after the start.
                processes.append(process)
                process.start()
            # Messages call the job by the last part of its module's name.
            _, _, name = job.rpartition(".")
            _watch(processes, name, place, timeout_s)
        finally:
            end(processes)


@contextlib.contextmanager
def workspace(out: Path | None) -> Iterator[Path]:
    """Give a job a directory to work in.

    Parameters
    ----------
    out : Path or None
        The directory. None stands for a temporary one, which is removed after the block.

    Yields
    ------
    Path
        The directory.
    """
    if out:
        yield Path(out)
        return
    with scratch() as directory:
        yield Path(directory)


# -- ranks that are forked -------------------------------------------------------------


class RankProcess(ForkServerProcess):
    """A rank that the fork server forks. Its `poll` and `wait` are like those of Popen.

    Parameters
    ----------
    job : str
        The module that declares the job.
    environment : dict of str to str
        The environment of the rank.
    logs : Path
        The directory of the rank's log and of the configuration.
    place : Place
        Where the rank runs.

    Attributes
    ----------
    log : Path
        The file of all that the rank prints.
    """

    def __init__(
        self, job: str, environment: dict[str, str], logs: Path, place: Place
    ) -> None:
        self.job = job
        rank = environment["RANK"]
        self.log = logs / f"rank{rank}.log"
        namespace = place.namespace(int(rank))
        # The arguments of `be_forked`, which runs in the forked process.
        arguments = (job, logs / CONFIG, environment, self.log, namespace)
        # A daemon of multiprocessing could have no children of its own.
        super().__init__(target=be_forked, args=arguments, daemon=False)

    def start(self) -> None:
        """Have the fork server fork the rank.

        Signals wait until this process knows the id of the rank. A signal before that
        would end this process and leave a rank that nobody ends.

        Raises
        ------
        UserError
            If the fork server does not start or does not answer.
        """
        # multiprocessing would run the user's main module again in every rank. Therefore
        # an empty module takes the place of the main module for a moment.
        main = sys.modules["__main__"]
        with jobs.deferring(signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            sys.modules["__main__"] = types.ModuleType("__main__")
            try:
                _start_server(self.job)
                super().start()
            except (OSError, EOFError) as error:
                # A fork server that ends before it answers leaves an EOFError without text.
                # It does little but import torch before it answers.
                reason = str(error) or "importing torch failed in the fork server"
                raise UserError(f"ranks cannot be started: {reason}") from error
            finally:
                sys.modules["__main__"] = main

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal, or None while the rank runs."""
        return self.exitcode

    wait = ForkServerProcess.join


def _start_server(job: str) -> None:
    """Start the fork server, unless it runs already.

    The server imports torch and the module ``job``, so that no rank has to. It also forks
    the ranks of later jobs, which import the modules of their jobs themselves. The server
    dies with the thread that started it, because Linux takes this thread for the parent.
    """
    # The server listens at a socket in a file, whose name has at most 104 characters.
    _shorten_socket_names()
    forkserver.set_forkserver_preload([*PRELOADED, job])
    # The server inherits the environment of this process, and `multiprocessing` lets
    # nobody pass another one. Therefore the variables are set here for a moment.
    environment_before = dict(os.environ)
    os.environ.update(jobs.child_environment())
    # torch in the server reads this number when it is loaded. Each rank later sets a
    # number of its own.
    os.environ["OMP_NUM_THREADS"] = "1"
    # `ddlkit.jobs` reads this variable when the server imports it, and then lets the
    # server die with its parent.
    os.environ[jobs.FORKS] = "1"
    try:
        forkserver.ensure_running()
    finally:
        # Neither this process nor its other children may keep the variables.
        os.environ.clear()
        os.environ.update(environment_before)


@functools.cache
def _shorten_socket_names() -> None:
    """Give multiprocessing's sockets a directory with a short name, once for this process.

    The name of a socket has at most 104 characters, and the usual directory, TMPDIR, may
    have a long name. If this process is killed, the next launch removes the directory.
    """
    # `scratch` makes a directory that lasts as long as a `with` block. None stands for
    # TMPDIR.
    directory = scratch(SOCKETS if os.access(SOCKETS, os.W_OK) else None)
    # The directory is needed until this process ends. So there is no `with` block: the
    # context is entered here and left at the exit.
    keep_until_exit = contextlib.ExitStack()
    path = keep_until_exit.enter_context(directory)
    atexit.register(keep_until_exit.close)
    # multiprocessing looks here for the directory of its sockets.
    process: Any = current_process()
    process._config["tempdir"] = str(path)


# -- watched, and ended ----------------------------------------------------------------


def _watch(
    processes: Sequence[RankProcess], job: str, place: Place, timeout_s: float
) -> None:
    """Wait until all ranks are done, and show the progress that rank 0 prints.

    ``processes`` are in the order of ranks. ``job`` is the name of the job, for messages.
    Raises UserError if a rank dies, if the link is lost, or if time is up.
    """
    log = processes[0].log
    # How many lines of the log have been searched for progress.
    lines_read = 0
    give_up_s = time.monotonic() + timeout_s
    while True:
        # None while a rank runs, 0 once it has done its part, and any other number once
        # it has died.
        statuses = [process.poll() for process in processes]
        if all(status == 0 for status in statuses):
            break
        # Only a number other than 0 is true.
        died = any(statuses)
        if died:
            # The cause may be that the process of an emulated link was killed. Ranks
            # fail as soon as the link's devices vanish, and the process is gone a
            # moment later. So `place.lost` is asked only after a while.
            time.sleep(SETTLE_S)
        # The reason in words, or "" while the ranks can reach one another.
        lost = place.lost()
        if lost:
            raise UserError(f"{lost} (in job {job} on {len(processes)} ranks)")
        if died:
            raise UserError(_why_ranks_died(processes, f"job {job}"))
        if time.monotonic() > give_up_s:
            raise UserError(
                f"job {job} on {len(processes)} ranks over {place.name} was not done after "
                f"{timeout_s:g} s and was ended ({_last_of_rank_0(log)}): run it again while "
                "nothing else uses this machine"
            )
        time.sleep(POLL_S)
        lines_read = _show_progress(log, lines_read)
    # What rank 0 has printed since the log was last read.
    _show_progress(log, lines_read)


def _last_of_rank_0(log: Path) -> str:
    """Return in words what rank 0 has printed last, which is in the file ``log``."""
    line = _last_line(log)
    return f"last line of rank 0: {line}" if line else "rank 0 printed nothing"


def _why_ranks_died(processes: Sequence[RankProcess], job: str) -> str:
    """Return in one line which rank caused the failure of a job, and how.

    At least one rank has died. The cause is the rank that died first, or a rank that does
    not answer and for which the others waited. The result also has the last line that the
    dead rank printed. ``processes`` are in the order of ranks, and ``job`` names the job
    in words, such as "job collectives".
    """
    statuses = [process.poll() for process in processes]
    # A rank that still runs has the status None, and one that has done its part has 0.
    deaths = {rank: status for rank, status in enumerate(statuses) if status}
    first = _first_to_die(deaths)
    status = deaths[first]
    line = _last_line(processes[first].log)
    printed = f"last line: {line}" if line else "it printed nothing"
    of_all = f"of {len(processes)}"
    # If the first rank to die has lost a peer, so have all other dead ranks. If another rank
    # still runs, the cause is that it does not answer.
    running = [rank for rank, status in enumerate(statuses) if status is None]
    if status == jobs.LOST_PEER and running:
        cause = _why_silent(processes, running)
        return f"{cause} in {job}: rank {first} gave up; its last line: {line}"
    if status == jobs.MISTAKE and line.startswith(jobs.ERROR):
        # The rank has printed a UserError, which says all about a mistake of the user.
        # The name of the job would add nothing.
        return f"{line.removeprefix(jobs.ERROR)} (on rank {first} {of_all})"
    ending = jobs.how_it_ended(status)
    return f"rank {first} {of_all} {ending} in {job}; {printed}"


def _why_silent(processes: Sequence[RankProcess], running: Sequence[int]) -> str:
    """Return in words which of the running ranks is silent, as "rank 1 of 2 is stopped".

    ``processes`` are in the order of ranks, and ``running`` are the numbers of those ranks
    that still run, of which there is at least one. The result names one of these.
    """
    # A stopped process (SIGSTOP, or Ctrl-Z) is the likeliest cause of silence.
    for rank in running:
        if _is_stopped(processes[rank].pid):
            return f"rank {rank} of {len(processes)} is stopped"
    return f"rank {running[0]} of {len(processes)} does not answer"


def _first_to_die(deaths: Mapping[int, int]) -> int:
    """Return which rank most likely died first, given the exit status of each dead rank.

    Ranks die within milliseconds of one another, too fast to tell the order. Ranks that
    lost a peer died after another one. Among the others, a rank that a signal killed is
    more likely the first than a rank that ended by itself.
    """

    def unlikeliness(rank: int) -> tuple[bool, bool]:
        """Return a sort key. False sorts before True, so the likeliest comes first."""
        lost_a_peer = deaths[rank] == jobs.LOST_PEER
        # The status of a process that a signal killed is negative.
        ended_without_signal = deaths[rank] >= 0
        return lost_a_peer, ended_without_signal

    # Of equally likely ranks, `min` returns the one that `deaths` has first.
    return min(deaths, key=unlikeliness)


def _is_stopped(pid: int | None) -> bool:
    """Return whether a process is stopped, as by Ctrl-Z.

    The result is False if the process is gone, or if its state may not be read.
    """
    # A process that was started has an id. None is for the type checker only.
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


def free_port() -> int:
    """Return a port of this machine on which nobody listens.

    Returns
    -------
    int
        The number of the port.

    Raises
    ------
    UserError
        If this machine cannot connect to its own loopback address.
    """
    try:
        # For port 0 the system chooses a port that is free.
        with socket.create_server((LOCALHOST, 0)) as server:
            port: int = server.getsockname()[1]
            # Some machines cannot connect to themselves. It is better to find that out
            # here than to have all ranks wait for one another.
            socket.create_connection((LOCALHOST, port), timeout=MEETING_S).close()
    except OSError as error:
        cause = error.strerror or error
        reason = f"this machine does not reach itself at {LOCALHOST} ({cause})"
        raise UserError(
            f"no rank is started: {reason}; as root: ip link set lo up"
        ) from error
    return port


def end(processes: Sequence[subprocess.Popen[Any] | RankProcess]) -> None:
    """End processes and their process groups, and wait until the processes have ended.

    Parameters
    ----------
    processes : sequence of Popen or RankProcess
        The processes. Those that run get SIGTERM. Those that still run `GRACE_S` seconds
        later get SIGKILL.
    """
    _signal_and_wait(processes, signal.SIGTERM, GRACE_S)
    # No process can ignore SIGKILL, so this wait needs no limit.
    _signal_and_wait(processes, signal.SIGKILL, patience_s=None)


def _signal_and_wait(
    processes: Sequence[subprocess.Popen[Any] | RankProcess],
    number: int,
    patience_s: float | None,
) -> None:
    """Send signal ``number`` to all processes that run, and wait until they have ended.

    The waiting takes at most ``patience_s`` seconds for all processes together. If this
    is None, the waiting has no limit.
    """
    # A process that was never started has no id.
    running = [
        process for process in processes if process.pid and process.poll() is None
    ]
    for process in running:
        # Running processes have an id: `or 0` is for the type checker only.
        _signal(int(process.pid or 0), number)
    begun_s = time.monotonic()
    for process in running:
        remaining_s = None
        if patience_s is not None:
            # The limit is for all processes, so waiting for earlier ones has used some.
            remaining_s = max(0.0, begun_s + patience_s - time.monotonic())
        # A Popen raises this exception if its process outlives the limit. A RankProcess
        # only returns.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(remaining_s)


def _signal(pid: int, number: int) -> None:
    """Send a signal to the process group that a process leads, or to the process alone.

    A rank that has just been forked leads no group yet, so the signal goes to the process
    alone. If the process has ended, nothing happens.
    """
    try:
        # The id of a group is that of the process that leads it.
        os.killpg(pid, number)
    except ProcessLookupError:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _lines(log: Path) -> list[str]:
    """Return the lines of a log. The last one is empty, or is still being written."""
    if not log.exists():
        return [""]
    return log.read_text(errors="replace").split("\n")


def _last_line(log: Path) -> str:
    """Return the last line of a log that is not blank, or "" if there is none."""
    lines = [line.strip() for line in _lines(log) if line.strip()]
    return lines[-1] if lines else ""


def _show_progress(log: Path, n_read: int) -> int:
    """Print the lines of progress in a log that follow its first ``n_read`` lines.

    A line of progress begins with `ddlkit.jobs.PROGRESS`. The log's other lines are not
    printed.

    Returns
    -------
    int
        How many whole lines the log has, for ``n_read`` of the next call.
    """
    # The last item of `_lines` is what follows the last newline: nothing, or a line that
    # has not ended yet.
    lines = _lines(log)[:-1]
    for line in lines[n_read:]:
        # An error begins like progress, but the launcher reports it itself.
        if line.startswith(jobs.PROGRESS) and not line.startswith(jobs.ERROR):
            print(line, file=sys.stderr, flush=True)
    return len(lines)


# -- in each rank ----------------------------------------------------------------------


def be_forked(
    job: str,
    config: Path,
    environment: Mapping[str, str],
    log: Path,
    namespace: Path | None,
) -> NoReturn:
    """Do what a rank does in its job, in a process that the fork server has just forked.

    The process ends within this function.

    Parameters
    ----------
    job : str
        The module that declares the job.
    config : Path
        The file of the job's settings.
    environment : mapping of str to str
        The environment of the rank.
    log : Path
        The file of all that the rank prints.
    namespace : Path or None
        The file of the rank's network namespace. None stands for that of this process.
    """
    # The rank leads a process group of its own. So its children end, too, when the launcher
    # ends the group by its function `end`.
    os.setsid()
    # The variable `PARENT`, which this process has inherited, has the id of the fork
    # server. So the rank dies with the fork server.
    jobs.die_with_parent()
    # ``environment`` has the launcher's id in `PARENT`. The id of the fork server, the true
    # parent, replaces it. From now on only whether the variable is set matters: it tells
    # `Rank.join` and `_check_and_record_facts` that `launch` started this rank.
    environment = {**environment, jobs.PARENT: os.environ[jobs.PARENT]}
    _print_into(log)
    os.environ.clear()
    os.environ.update(environment)
    if sys.platform == "linux":
        # Tools such as top then show the process by this name.
        name = f"ddlkit-rank{environment['RANK']}"
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode())
    # `be_rank` reads these arguments, as it does in a process that torchrun starts.
    sys.argv = [__name__, job, str(config)]
    if namespace:
        jobs.enter_namespace(str(namespace))
    be_rank()


def be_rank() -> NoReturn:
    """Do what a rank does in its job, which `sys.argv` names, and end this process."""
    jobs.schedule_in_batches()
    jobs.end_at_once(status_of(sys.argv[1:]))


def _print_into(log: Path) -> None:
    """Let this process print into a file from now on, and C libraries in it as well."""
    with open(log, "wb", buffering=0) as stream:
        # C libraries print to the file descriptors of standard output (1) and standard
        # error (2), so these are redirected. They stay open after the block.
        for standard_stream in (1, 2):
            os.dup2(stream.fileno(), standard_stream)


def status_of(argv: Sequence[str]) -> int:
    """Do what a rank does in its job, and return the exit status of its process.

    Parameters
    ----------
    argv : sequence of str
        Two arguments: the module of the job, and the file of its settings.

    Returns
    -------
    int
        0 if the job was done, `ddlkit.jobs.MISTAKE` after a mistake of the user,
        `ddlkit.jobs.LOST_PEER` if the rank failed because another rank was gone, and 1
        after any other failure.
    """
    try:
        if len(argv) != 2:
            raise UserError("usage: python -m ddlkit.jobs.launch JOB CONFIG.json")
        job, path_of_settings = argv
        _do_job(job, Path(path_of_settings))
    except UserError as error:
        print(f"{jobs.ERROR}{error}", file=sys.stderr)
        return jobs.MISTAKE
    except Exception as error:
        traceback.print_exc()
        # The launcher shows the last line of the log. The messages of CUDA and NCCL
        # have several lines, of which the last one explains nothing. So the error is
        # printed again in one line.
        print(f"{type(error).__name__}: {one_line(str(error))}", file=sys.stderr)
        return jobs.LOST_PEER if _says_peer_is_gone(error) else 1
    return 0


def _says_peer_is_gone(error: Exception) -> bool:
    """Return whether a rank failed with this error because another rank was gone."""
    # The launcher imports this module, too, and needs no torch, which loads slowly.
    from torch.distributed import DistError

    # NCCL and the store by which ranks meet raise these exceptions.
    if isinstance(error, DistError | ConnectionError):
        return True
    # gloo raises a RuntimeError that names a source file of gloo.
    return "gloo/transport" in str(error)


def _do_job(name: str, path: Path) -> None:
    """Join the other ranks, do this rank's part of the job, and leave.

    ``name`` is the module that declares the job, and ``path`` the file of its settings.
    Raises UserError after a mistake of the user, such as ranks on machines that differ.
    """
    from ddlkit.jobs.rank import OF_RANK, Rank

    config = _read_config(path)
    # The job may need what these modules add when they are imported, such as networks.
    for module in config.get("imports", ()):
        importlib.import_module(module)
    job = find_job(name)
    settings = job.read(config)
    joined = Rank.join(**config.get("join", {}))
    # `OF_RANK` names the fields that the environment of a rank does not say, such as the
    # link. The launcher has written those that it knows into the file.
    fields_of_rank = {key: config[key] for key in OF_RANK if key in config}
    me = replace(joined, out=Path(config["out"]), **fields_of_rank)
    # This raises UserError before anything is measured on machines that differ.
    _check_and_record_facts(me)
    job.run(me, settings)
    me.leave()


def _check_and_record_facts(me: Rank) -> None:
    """Record, next to the tables of a job, what their times depend on.

    All ranks call this function, and rank 0 writes the file. If torchrun or Slurm started
    the ranks, they compare their machines, and all raise UserError if these differ.
    """
    from ddlkit.jobs.machines import shared_facts

    # Ranks that `launch` starts have `PARENT`, and are all on this machine, which the stamp
    # of each table describes. Those that torchrun or Slurm started may be on several
    # machines. These must be alike, because a stamp can only describe one kind.
    started_by_others = jobs.PARENT not in os.environ
    machine_facts = shared_facts(me) if started_by_others else {}
    if me.rank == 0:
        facts = {
            **machine_facts,
            "device": str(me.device),
            "backend": str(me.backend),
            "torch_threads": str(me.torch_threads),
        }
        atomic_write_text(me.out / "job.json", json.dumps(facts))


def _read_config(path: Path) -> dict[str, Any]:
    """Return the settings of a job and of its ranks from a file.

    Raises UserError if the file cannot be read, or has no "out", the directory for the
    tables of the job.
    """
    try:
        config: dict[str, Any] = json.loads(path.read_text())
        # This fails if "out" is missing or is no text.
        Path(config["out"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        needed = 'needs a JSON object with "out", a directory'
        raise UserError(f"job settings {path}: {needed}: {error}") from error
    return config


def find_job(name: str) -> Job[Any]:
    """Return the job that a module declares.

    Parameters
    ----------
    name : str
        The module, or its name within ddlkit.measure.

    Returns
    -------
    Job
        The job, of which a module declares one at most.

    Raises
    ------
    UserError
        If there is no such module, or if it declares no job.
    """
    from ddlkit.jobs.rank import Job

    module = _module_of_job(name)
    try:
        spec = importlib.util.find_spec(module)
    except ModuleNotFoundError:
        # The package that should hold the module does not exist, either.
        spec = None
    if spec is None:
        raise UserError(
            f"unknown job {name!r}: name the module that declares it, e.g. collectives"
        )
    for value in vars(importlib.import_module(module)).values():
        # A module may also import the job of another module, which is not meant.
        if isinstance(value, Job) and value.module == module:
            return value
    raise UserError(f"unknown job {name!r}: {module} declares none")


def _module_of_job(name: str) -> str:
    """Return the full name of a module that is named in full or within ddlkit.measure."""
    if "." in name:
        return name
    module_of_library = f"ddlkit.measure.{name}"
    if importlib.util.find_spec(module_of_library):
        return module_of_library
    # A name without a dot that is none of this library's is a module of the user.
    return name


if __name__ == "__main__":
    jobs.die_with_parent()
    be_rank()
