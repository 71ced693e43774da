"""A job, and this process as one of the ranks that do it.

A job is declared once, as a function that every rank runs. The ranks meet, exchange
numbers, and part.
"""

from __future__ import annotations

import datetime
import hashlib
import os
import signal
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import astuple, dataclass, is_dataclass
from pathlib import Path
from typing import (
    TYPE_CHECKING,
    Any,
    Generic,
    NamedTuple,
    TypeVar,
    cast,
    get_args,
    get_type_hints,
)

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from ddlkit import store
from ddlkit.core.errors import UserError, one_line
from ddlkit.jobs import (
    PARENT,
    PROGRESS,
    assignment,
    note_failure_of_rank,
    scheduled_in_batches,
)
from ddlkit.jobs.vitals import Usage
from ddlkit.store import machine

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Floats = NDArray[np.float64]
S = TypeVar("S", bound="DataclassInstance")
Tables = Mapping[str, pd.DataFrame]
"""New rows by the schema of their table."""
Part = Callable[["Rank", S], Iterable[Tables]]
"""What each rank does in a job."""

SILENT_S = 5.0
"""How long a rank waits for others before it says so, in seconds."""

OF_RANK = ("link", "link_bits_per_s", "temporary_out")
"""Keys of the CONFIG.json of any job whose values become fields of `Rank`."""
KEYS_OF_ANY_JOB = ("out", "join", "imports", *OF_RANK)
"""Keys that the CONFIG.json of any job may have. All others are settings of the job."""
# The module torch.distributed, with a type that mypy does not check. Torch's type stubs
# lack some names of the module.
_untyped_dist: Any = dist
# Earlier versions of torch have other names for these calls, and later ones warn of
# them.
gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


# -- a job -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Job(Generic[S]):
    """A program for every rank.

    Attributes
    ----------
    settings : type
        The dataclass of the job's settings.
    tables : tuple of str
        The names of the tables whose rows the job may yield, such as "collectives". Each
        name is also that of the table's schema, which lists its columns.
    part : callable
        What each rank does. It takes the rank and the settings, and yields new rows by
        the schema of their table, which rank 0 saves.
    """

    settings: type[S]
    tables: tuple[str, ...]
    part: Part[S]

    @property
    def module(self) -> str:
        """Return the module that declares the job, by which ranks find it."""
        return self.part.__module__

    def run(self, me: Rank, settings: S) -> None:
        """Do this rank's part of the job. Rank 0 saves the tables into ``me.out``.

        The function ``part`` yields new rows. Rank 0 saves after each yield, so that a
        job that is ended early leaves what it has measured. If ``me.out`` is temporary,
        the tables are saved only at the end, because the directory would not outlive a
        job that is ended early. So a ``part`` that reads tables of its own earlier rows needs
        a directory that is not temporary.

        Parameters
        ----------
        me : Rank
            This rank. Every rank of the job calls this method.
        settings : dataclass
            The settings of the job.

        Raises
        ------
        UserError
            If the part raises it, or if a table cannot be saved.
        """
        # All rows so far, by the schema of their table.
        tables: dict[str, pd.DataFrame] = {}
        for new_rows in self.part(me, settings):
            for name, frame in new_rows.items():
                earlier = [tables[name]] if name in tables else []
                tables[name] = pd.concat([*earlier, frame], ignore_index=True)
                # Saving replaces the file by one with all rows so far. On other ranks than
                # rank 0, `_save` does nothing.
                if not me.temporary_out:
                    self._save(me, name, tables[name])
        if me.temporary_out:
            for name, table in tables.items():
                self._save(me, name, table)

    def _save(self, me: Rank, name: str, table: pd.DataFrame) -> None:
        """Save a table of the schema ``name``, if this is rank 0."""
        if me.rank == 0:
            store.save_table(table, me.out, name, schema=name, command=sys.argv)

    def read(self, config: Mapping[str, Any]) -> S:
        """Read the job's settings.

        Parameters
        ----------
        config : mapping
            The content of CONFIG.json, the file from which a rank starts.

        Returns
        -------
        dataclass
            The settings.

        Raises
        ------
        UserError
            If a setting is unknown, missing or not valid.
        """
        # The other keys, such as "out" and "join", are those of any job.
        values_of_settings = {
            name: value for name, value in config.items() if name not in KEYS_OF_ANY_JOB
        }
        try:
            return cast(S, _typed(self.settings, values_of_settings))
        except TypeError as error:
            # Python's message begins with the name of the constructor, which the user does
            # not know, as in "Settings.__init__() got an unexpected keyword argument".
            _, _, reason = str(error).rpartition("__init__() ")
            raise UserError(f"job settings: {reason}") from error


def job(settings: type[S], *tables: str) -> Callable[[Part[S]], Job[S]]:
    """Declare a function as what every rank does in a job.

    A module declares at most one job, so the name of the module also names the job.

    Parameters
    ----------
    settings : type
        The dataclass of the job's settings.
    *tables : str
        The names of the tables whose rows the job may yield, such as "collectives". Each
        name is also that of the table's schema, which lists its columns.

    Returns
    -------
    callable
        A decorator, which turns the function into a `Job`.
    """

    def declare(part: Part[S]) -> Job[S]:
        """Return the job in which every rank runs a function."""
        return Job(settings, tables, part)

    return declare


def _typed(annotation: Any, value: Any) -> Any:
    """Convert a value that was read from JSON to the type of a dataclass's field.

    ``annotation`` is the type annotation of the field. An object of JSON becomes a
    dataclass if the annotation is one, and a list becomes a tuple. All other values are
    returned as they are. Raises TypeError if an object has a key that is no field of the
    dataclass, or lacks a field that has no default.
    """
    if isinstance(value, list):
        # The type of the items, as int is for Sequence[int]. None stands for a type that
        # is not stated, so that the items are returned as they are.
        item_annotation = next(iter(get_args(annotation)), None)
        return tuple(_typed(item_annotation, item) for item in value)
    # A dataclass itself, as opposed to an instance of one.
    is_dataclass_type = is_dataclass(annotation) and isinstance(annotation, type)
    if is_dataclass_type and isinstance(value, Mapping):
        # The type of each field by its name. An unknown key has none, and the constructor
        # below refuses it.
        hints = get_type_hints(annotation)
        fields = {
            name: _typed(hints.get(name), value_of_field)
            for name, value_of_field in value.items()
        }
        return annotation(**fields)
    return value


# -- a rank ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Rank:
    """A rank: this process as one of several that do a job.

    Attributes
    ----------
    rank, world_size : int
        The number of this rank, and how many ranks there are.
    local_rank : int
        The number of this rank among those of its node.
    device : torch.device
        Where the tensors of this rank lie.
    backend : str
        ``"gloo"`` or ``"nccl"``.
    torch_threads : int
        The number of CPU threads.
    out : Path
        Where rank 0 leaves the tables of the job.
    link : str
        How tables name the link between the ranks, such as "loopback" or "lab:1gbit".
    link_bits_per_s : float
        The rate of the link in bit/s; 0 if it is not known.
    temporary_out : bool
        Whether ``out`` lasts only until the process that started the ranks has read the
        tables.
    """

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    backend: str
    torch_threads: int
    out: Path = Path()
    link: str = "unnamed"
    link_bits_per_s: float = 0.0
    temporary_out: bool = False

    @classmethod
    def join(
        cls,
        backend: str | None = None,
        *,
        timeout_s: float = 60.0,
        torch_threads: int = 0,
        on_gpu: bool | None = None,
    ) -> Rank:
        """Meet the other ranks, and return this process as one of them.

        The environment of torchrun, Slurm or `ddlkit.jobs.launch` says which rank this is.

        Parameters
        ----------
        backend : str, optional
            ``"gloo"`` or ``"nccl"``. The default is NCCL if this rank sees GPUs, and gloo
            otherwise.
        timeout_s : float, optional
            Seconds that the meeting and each collective may take.
        torch_threads : int, optional
            The number of CPU threads; 0, the default, for an equal share of the node's
            cores.
        on_gpu : bool, optional
            Whether tensors lie on a GPU. By default, only those of NCCL do. gloo copies
            tensors of a GPU through the host.

        Returns
        -------
        Rank
            This process as one of the ranks, all of which have met.

        Raises
        ------
        UserError
            If the environment is incomplete, if the backend is unknown, if the rank sees
            too few GPUs or none of those that the node has, or if the ranks do not meet.
        """
        numbers = assignment.numbers(os.environ)
        backend, device = _backend_and_device(backend, on_gpu, numbers)
        # At least 1, because a node may have more ranks than cores.
        cores_of_rank = max(1, machine.cores() // numbers.ranks_on_node)
        torch.set_num_threads(torch_threads or cores_of_rank)
        timeout = datetime.timedelta(seconds=timeout_s)
        # `ddlkit.jobs.launch` watches and ends the ranks that it starts. A rank of another launcher
        # may wait in vain for one that was never started.
        waiting: AbstractContextManager[None] = nullcontext()
        if PARENT not in os.environ:
            waiting = _waiting(numbers, timeout_s)
        with waiting:
            _meet(numbers.rank, numbers.world_size, backend, device, timeout)
        return cls(
            rank=numbers.rank,
            world_size=numbers.world_size,
            local_rank=numbers.local_rank,
            device=device,
            backend=backend,
            torch_threads=torch.get_num_threads(),
        )

    def leave(self) -> None:
        """Part from the other ranks once all have come this far.

        The process can then join again.
        """
        dist.barrier()
        dist.destroy_process_group()

    def say(self, message: str) -> None:
        """Print a line of progress, which `ddlkit.jobs.launch` shows to the user.

        Parameters
        ----------
        message : str
            The line. Only rank 0 prints it.
        """
        if self.rank == 0:
            print(f"{PROGRESS}{message}", file=sys.stderr, flush=True)


@contextmanager
def joined(timeout_s: float) -> Iterator[Rank]:
    """Be one of the ranks that torchrun or Slurm started, or the only rank.

    Parameters
    ----------
    timeout_s : float
        Seconds that the meeting of the ranks and each collective may take.

    Yields
    ------
    Rank
        This rank. At the end of the block it waits for all other ranks. If the block
        fails and there are several ranks, nobody waits, and the process should end by
        `ddlkit.jobs.end_at_once`.

    Raises
    ------
    UserError
        If the environment is incomplete, if the node has too few GPUs, or if the ranks
        do not meet.
    """
    # A single rank sends no messages, so its scheduling does not matter.
    if assignment.ranks_started(os.environ) == 1:
        with _left_after(_join_alone()) as me:
            yield me
        return
    # `scheduled_in_batches` sets the policy by which the kernel schedules this thread. The
    # threads of gloo inherit the policy, so it is set before the ranks meet.
    with scheduled_in_batches(), _left_after(Rank.join(timeout_s=timeout_s)) as me:
        yield me


@contextmanager
def _left_after(me: Rank) -> Iterator[Rank]:
    """Let a rank leave the process group at the end of the block.

    If the block fails, a rank that is the only one leaves, too. One of several ranks then
    does not leave, but notes its failure for whoever ends the process.
    """
    try:
        yield me
        # This stands within `try`, because leaving fails if another rank is gone.
        me.leave()
    except BaseException:
        if me.world_size == 1:
            # There is no other rank for which this could wait.
            dist.destroy_process_group()
        else:
            # The other ranks may be in a collective that this rank has left. NCCL would
            # wait for them for ever if the process group were destroyed here.
            note_failure_of_rank()
        raise


def _join_alone() -> Rank:
    """Return this process as the only rank, in a process group of its own.

    The rank uses a GPU if there is one. Its group needs no address or port.
    """
    # The only rank has the number 0. If LOCAL_RANK is set to another number nevertheless,
    # it chooses the GPU, as it does for one of several ranks.
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cpu")
    gpus = torch.cuda.device_count()
    if gpus:
        device = torch.device("cuda", assignment.gpu_of(local_rank, gpus))
        torch.cuda.set_device(device)
    # The backend is always gloo, also on a GPU, because nothing is sent. The store, in
    # which ranks find each other, is one in the memory of this process.
    dist.init_process_group(
        "gloo", store=_untyped_dist.HashStore(), rank=0, world_size=1
    )
    return Rank(
        rank=0,
        world_size=1,
        local_rank=local_rank,
        device=device,
        backend="gloo",
        torch_threads=torch.get_num_threads(),
    )


def _backend_and_device(
    backend: str | None, on_gpu: bool | None, numbers: assignment.Numbers
) -> tuple[str, torch.device]:
    """Return the backend of a rank, and the device of its tensors.

    If ``backend`` is None, it becomes NCCL if this rank sees GPUs, and gloo otherwise. If
    ``on_gpu`` is None, the tensors of NCCL lie on a GPU, and those of gloo on the CPU.
    ``numbers`` are those of this rank. Raises UserError if the backend is unknown, or if
    the rank sees too few GPUs. For NCCL, a rank must see as many GPUs as the node has ranks,
    unless Slurm may have given each rank GPUs of its own. If a rank sees no GPU although the
    node has some (hidden GPUs), gloo is only taken if ``backend`` asks for it.
    """
    gpus = torch.cuda.device_count()
    backend = assignment.choose_backend(
        backend,
        numbers.ranks_on_node,
        gpus,
        by_slurm=numbers.by_slurm,
        hidden_gpus=hidden_gpus(),
    )
    if on_gpu is None:
        on_gpu = backend == "nccl"
    if not on_gpu:
        return backend, torch.device("cpu")
    if not gpus:
        raise UserError("tensors are to lie on a GPU, but torch sees none")
    return backend, torch.device("cuda", assignment.gpu_of(numbers.local_rank, gpus))


def hidden_gpus() -> int:
    """Return how many GPUs this node has although torch unexpectedly sees none.

    The result is 0 if torch sees a GPU, or if CUDA_VISIBLE_DEVICES hides all GPUs on
    purpose.
    """
    if torch.cuda.device_count():
        return 0
    if assignment.hides_gpus(os.environ.get("CUDA_VISIBLE_DEVICES")):
        return 0
    return machine.gpus_of_node()


@contextmanager
def _waiting(numbers: assignment.Numbers, timeout_s: float) -> Iterator[None]:
    """Say that a rank waits for others if the block takes long, and let signals end the wait.

    ``numbers`` are those of this rank. One rank of each node prints the line, after
    `SILENT_S`. The ranks wait for at most ``timeout_s``.
    """
    address, port = _meeting_point()
    line = (
        f"{PROGRESS}waiting until all {numbers.world_size} ranks meet at {address}, port {port}, "
        f"for at most {timeout_s:g} s"
    )
    timer = threading.Timer(
        SILENT_S, print, args=[line], kwargs={"file": sys.stderr, "flush": True}
    )
    # The timer must not keep the process alive until it has printed the line.
    timer.daemon = True
    if numbers.local_rank == 0:
        timer.start()
    try:
        with _ended_by_signals():
            yield
    finally:
        timer.cancel()


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Let the signals that interrupt this process end it at once while the block runs.

    Python calls a handler only once the function of torch that is running returns. A rank that
    waits for others in such a function would otherwise outlive the signal.
    """
    handlers: dict[signal.Signals, Any] = {}
    # Python allows handlers of signals to be set in the main thread only.
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            handler = signal.getsignal(number)
            # A signal that is ignored, as SIGHUP under nohup, stays ignored.
            if callable(handler):
                handlers[number] = signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _meet(
    rank: int,
    ranks: int,
    backend: str,
    device: torch.device,
    timeout: datetime.timedelta,
) -> None:
    """Make the process group of all ranks, and wait until all are in it.

    ``rank`` is the number of this rank, ``ranks`` how many there are, and ``device`` the
    device of this rank's tensors. Raises UserError if the environment has no address to
    meet at, if the ranks do not meet within ``timeout``, or if NCCL finds two ranks on
    one GPU.
    """
    address, port = _meeting_point()
    options: dict[str, Any] = {"rank": rank, "world_size": ranks, "timeout": timeout}
    try:
        if device.type == "cuda":
            torch.cuda.set_device(device)
        if backend == "nccl":
            # With this option NCCL connects the ranks now, and not in a collective
            # later.
            options["device_id"] = device
        else:
            # This is gloo with one thread, by the name under which it is registered. Two
            # collectives of torch's own gloo, which has two threads, would share the link.
            backend = _one_thread_gloo(device)
        # Ranks find each other by a store, a small server of keys and values.
        if PARENT in os.environ:
            # If `ddlkit.jobs.launch` has started the ranks, no store exists yet, and this
            # one listens at a single address. Otherwise torch makes the store, or uses the
            # one that torchrun serves.
            options["store"] = _store(rank, ranks, address, int(port), timeout)
        dist.init_process_group(backend, **options)
        # No rank goes on before all have come this far.
        dist.barrier()
    except (RuntimeError, OSError) as error:
        raise UserError(_why_not_met(error, address, port)) from error


def _meeting_point() -> tuple[str, str]:
    """Return the address and the port at which ranks meet, from the environment.

    Raises UserError if the environment lacks one of them.
    """
    address = os.environ.get("MASTER_ADDR")
    port = os.environ.get("MASTER_PORT")
    if not (address and port):
        problem = "MASTER_ADDR or MASTER_PORT is not set"
        remedy = (
            "set MASTER_ADDR to the address of rank 0's node and MASTER_PORT to a free port "
            "of it"
        )
        # Without these variables it was srun that started the ranks.
        if os.environ.get("RANK") and os.environ.get("WORLD_SIZE"):
            problem += ", although RANK and WORLD_SIZE are"
            remedy = f"start ranks with torchrun, or {remedy}"
        raise UserError(f"{problem}: {remedy}")
    return address, port


def _why_not_met(error: Exception, address: str, port: str) -> str:
    """Return in one line why ranks did not meet, and what the user can do about it.

    ``error`` is what torch raised when the ranks were to meet at ``address`` and ``port``.
    """
    reason = one_line(str(error))
    # NCCL's complaint about a shared GPU has these words. They may follow a long text
    # of torch, which `reason` cuts, so the whole text is searched.
    if "duplicate gpu" in str(error).lower():
        return (
            "two ranks have the same GPU: start one rank for each GPU, and let Slurm "
            "give each task its own (--gpus-per-task=1) or all GPUs of the node "
            f"(--gpus-per-node): {reason}"
        )
    return (
        f"ranks did not meet at {address} port {port}: {reason}; "
        "choose another port if that is taken"
    )


def _store(
    rank: int, ranks: int, address: str, port: int, timeout: datetime.timedelta
) -> Any:
    """Return the store by which ranks find each other.

    The store is a small server of keys and values, which rank 0 runs at ``address`` and
    ``port``. All other ranks connect to it. ``ranks`` is how many ranks there are.
    """
    options: dict[str, Any] = {
        "world_size": ranks,
        "is_master": rank == 0,
        "timeout": timeout,
    }
    if rank == 0:
        # If torch opened the socket, it would listen at all addresses of the machine. This
        # socket listens at one address only.
        server = socket.create_server((address, port))
        # torch takes over the file descriptor, so Python must not close it.
        options["master_listen_fd"] = server.detach()
    return _untyped_dist.TCPStore(address, port, **options)


def _gloo_devices() -> list[Any]:
    """Return the network interfaces that gloo uses, which gloo calls devices.

    The environment variable GLOO_SOCKET_IFNAME lists their names. Without the variable,
    gloo chooses one. torch reads the variable when it makes its built-in backend "gloo", but
    not for the backend that `_one_thread_gloo` registers.
    """
    gloo = _untyped_dist.ProcessGroupGloo
    listed = os.environ.get("GLOO_SOCKET_IFNAME", "")
    interfaces = [interface for interface in listed.split(",") if interface]
    if not interfaces:
        return [gloo.create_default_device()]
    return [gloo.create_device(interface=interface) for interface in interfaces]


def _one_thread_gloo(device: torch.device) -> str:
    """Register gloo with one thread as a backend of torch, and return its name.

    The backend is for tensors on the CPU and on ``device``. Its collectives follow one
    another, as NCCL's do. With torch's own gloo, which has two threads, two collectives
    would share the link.
    """
    gloo = _untyped_dist.ProcessGroupGloo
    name = f"ddlkit_gloo_{device.type}"

    def make(group: Any, _: object) -> Any:
        """Return a gloo process group with one thread.

        torch calls this function with what it knows of the process group (``group``), and
        with options of the backend, which are not used here.
        """
        options = gloo._Options()
        # With the two threads of torch's own gloo, two collectives would share the link.
        options._threads = 1
        options._timeout = group.timeout
        # torch chooses network interfaces only for its built-in backends.
        options._devices = _gloo_devices()
        return gloo(group.store, group.group_rank, group.group_size, options)

    # torch never forgets a backend, and refuses to register its name again. It keeps
    # the backend as an attribute, whose name is that of the backend in capitals.
    if not hasattr(dist.Backend, name.upper()):
        device_types = sorted({"cpu", device.type})
        # With `extended_api`, torch calls `make` with two arguments.
        dist.Backend.register_backend(
            name, make, extended_api=True, devices=device_types
        )
    return name


# -- exchange of numbers ---------------------------------------------------------------

# Numbers travel as float64 tensors, so that nothing is pickled. All ranks must call
# these functions in the same order.


def everyones(values: Sequence[float] | Floats) -> Floats:
    """Return the values of every rank, which all ranks exchange by an all-gather.

    Parameters
    ----------
    values : array_like
        This rank's values. All ranks have arrays of the same shape.

    Returns
    -------
    ndarray, shape (world_size, ...)
        The values of each rank, in the order of ranks. Each has the shape of ``values``.
    """
    # NCCL sends from the memory of a GPU only, and gloo from that of the host.
    device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    own_values = torch.as_tensor(np.asarray(values, dtype=np.float64)).to(device)
    world_size = dist.get_world_size()
    # The collective joins flat tensors one behind the other.
    gathered = own_values.new_empty(world_size * own_values.numel())
    gather_single(gathered, own_values.reshape(-1).contiguous())
    return np.asarray(gathered.cpu()).reshape(world_size, *own_values.shape)


def slowest(values: Sequence[float] | Floats) -> Floats:
    """Return the elementwise maximum of values over all ranks.

    If the values are times, each element is the time of the rank that was slowest there.

    Parameters
    ----------
    values : array_like
        This rank's values. All ranks have arrays of the same shape.

    Returns
    -------
    ndarray
        An array of the shape of ``values``.
    """
    return np.max(everyones(values), axis=0)


def usage_of_all(used: Usage) -> Usage:
    """Return how the machine was used while something was measured, from all ranks.

    Parameters
    ----------
    used : Usage
        The usage as this rank saw it.

    Returns
    -------
    Usage
        The same value on all ranks.
    """
    # One row for each rank, with the fields of its usage as numbers.
    usage_of_ranks = everyones(astuple(used))
    return Usage.of_ranks(usage_of_ranks)


def agree_all(flag: bool) -> bool:
    """Return whether a flag is set on every rank.

    By this, all ranks end a measurement together. Otherwise some ranks would wait for ever
    in a collective that others do not call.

    Parameters
    ----------
    flag : bool
        This rank's flag.

    Returns
    -------
    bool
        The same value on all ranks.
    """
    flags = everyones([float(flag)])
    return bool(flags.all())


def everyones_text(text: str) -> list[str]:
    """Return the text of every rank, in the order of ranks.

    Parameters
    ----------
    text : str
        This rank's text. Texts may have different lengths.

    Returns
    -------
    list of str
    """
    # Ranks exchange float64 numbers only, which hold any byte exactly.
    own_bytes = np.frombuffer(text.encode(), dtype=np.uint8)
    # The largest length over all ranks.
    longest = int(slowest([len(own_bytes)])[0])
    # No byte of UTF-8 is 255, so this value can fill up the shorter texts. At least one
    # number is sent, even if all texts are empty.
    padded = np.full(max(1, longest), 255.0)
    padded[: len(own_bytes)] = own_bytes
    texts: list[str] = []
    for row in everyones(padded):
        bytes_of_rank = row[row != 255].astype(np.uint8).tobytes()
        texts.append(bytes_of_rank.decode())
    return texts


@contextmanager
def failing_together() -> Iterator[None]:
    """Let all ranks raise the UserError that the block raises on rank 0.

    Rank 0 alone reads and writes tables. If rank 0 left the job alone after a mistake of
    the user, all others would wait for it in their next collective. Every rank runs the
    block, and waits for the others at its end. A UserError of another rank is raised on that
    rank alone.

    Raises
    ------
    UserError
        If the block raises it on rank 0 or on this rank.
    """
    failure: UserError | None = None
    try:
        yield
    except UserError as error:
        failure = error
    # The text of each rank is empty if the block did not fail there.
    complaints = everyones_text(str(failure or ""))
    complaint_of_rank_0 = complaints[0]
    if failure:
        raise failure
    if complaint_of_rank_0:
        raise UserError(complaint_of_rank_0)


class Layout(NamedTuple):
    """How the ranks of a job are spread over nodes.

    Attributes
    ----------
    nodes : int
        How many nodes there are.
    ranks_per_node : int
        How many ranks a node has. If nodes differ, it is the largest number.
    """

    nodes: int
    ranks_per_node: int


def layout() -> Layout:
    """Return how the ranks of this job are spread over nodes.

    All ranks call this function. Nodes are told apart by an identity that each rank reads
    on its own node. The numbers that a launcher such as torchrun gives to nodes would not
    do, because two launchers may run on one node.
    """
    # Only a hash of the identity leaves the node, so that no table can ever name the
    # node.
    node = hashlib.sha256(machine.identity().encode()).hexdigest()
    ranks_of_node = Counter(everyones_text(node))
    return Layout(len(ranks_of_node), max(ranks_of_node.values()))
