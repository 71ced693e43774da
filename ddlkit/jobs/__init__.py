"""Ranks on this machine: how they are started, watched and ended, and how they talk.

This module has what ranks and the process that starts them agree on. When a process
with `FORKS` in its environment imports this module, the process becomes the fork server
of ranks. Therefore nothing here takes long to import.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

PROGRESS = "ddlkit: "
"""A line of rank 0 that begins so is shown to the user."""
ERROR = "ddlkit: error: "
MISTAKE = 2
"""The exit status after a mistake of the user."""
LOST_PEER = 3
"""The exit status of a rank that fails because another rank is gone."""
PARENT = "DDLKIT_PARENT"
"""In the environment: the id of the process without which this one must not live."""
FORKS = "DDLKIT_FORKS"
"""In the environment of the fork server alone."""
LOGS = "rank-logs"
"""The directory in which ranks write what they print, within that of their measurements."""
PACKAGES = Path(__file__).resolve().parents[2]
"""The directory that holds this package."""
ONE_BY_ONE = ("CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS")
"""Variables that make a GPU run kernels one by one, so that nothing overlaps."""
_CLONE_NEWNET = 0x40000000
_PR_SET_PDEATHSIG = 1


def how_it_ended(status: int) -> str:
    """Return in words how a process ended.

    Parameters
    ----------
    status : int
        The exit status, negative for a signal.

    Returns
    -------
    str
        The end of a sentence whose subject is the process.

    Examples
    --------
    >>> how_it_ended(1), how_it_ended(-9)
    ('ended with exit status 1', 'was killed by SIGKILL')
    >>> how_it_ended(-40)
    'was killed by signal 40'
    """
    if status < 0:
        try:
            name = signal.Signals(-status).name
        except ValueError:
            # Python names no real-time signals but the first and the last one.
            name = f"signal {-status}"
        return f"was killed by {name}"
    return f"ended with exit status {status}"


def child_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment of a child process that measures.

    Parameters
    ----------
    environment : mapping of str to str, optional
        The environment to copy. By default it is that of this process.

    Returns
    -------
    dict of str to str
        A copy of the environment with three changes. This package can be imported. `PARENT`
        has the id of this process, so that the child can end when this process does
        (`die_with_parent`). The variables of `ONE_BY_ONE`, with which nothing would overlap
        on a GPU, are left out.
    """
    child = {
        name: value for name, value in environment.items() if name not in ONE_BY_ONE
    }
    # The first directory counts, so the child imports this copy of the package.
    python_path = str(PACKAGES)
    if environment.get("PYTHONPATH"):
        python_path += os.pathsep + environment["PYTHONPATH"]
    child["PYTHONPATH"] = python_path
    child[PARENT] = str(os.getpid())
    return child


def enter_namespace(namespace: str) -> None:
    """Move this process into a network namespace, a network that only some processes see.

    Parameters
    ----------
    namespace : str
        The path of the file by which Linux names the namespace.

    Raises
    ------
    OSError
        If the namespace does not exist or may not be entered.
    """
    with open(namespace, "rb") as file:
        # setns, a call of the C library, returns 0 if it works, and else sets errno.
        # The flag says that the file must be one of a network namespace.
        failed = ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET)
        if failed:
            raise OSError(ctypes.get_errno(), "cannot enter", namespace)


def die_with_parent(parent: int = 0) -> None:
    """Have the kernel kill this process when its parent dies.

    If the parent has died already, this process ends at once. On systems other than
    Linux nothing happens.

    Parameters
    ----------
    parent : int, optional
        The id of the parent. The default, 0, stands for the value of `PARENT` in the
        environment or, if that variable is not set, for the present parent.
    """
    if sys.platform != "linux":
        return
    parent = parent or int(os.environ.get(PARENT, os.getppid()))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    # If the parent died before the call of prctl, the kernel does not kill this process.
    # But then this process has been given another parent.
    if os.getppid() != parent:
        os._exit(1)


# -- how the kernel schedules a rank ---------------------------------------------------


def schedule_in_batches() -> None:
    """Let the kernel schedule this thread, and threads that it starts, by SCHED_BATCH.

    Nothing happens where the system has no such call or does not allow it.

    Notes
    -----
    Under SCHED_BATCH a thread that wakes up takes no core from another thread. By
    default, gloo's thread would take a core from a thread that holds a lock, and would
    then try again and again to get this lock. On two cores a message of 1 KiB takes from
    0.2 to 4 ms by default, and 0.3 ms under SCHED_BATCH.
    """
    # Only Linux has this call, and not every system allows it.
    with suppress(AttributeError, OSError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


@contextmanager
def scheduled_in_batches() -> Iterator[None]:
    """Call `schedule_in_batches`, and restore this thread's scheduling after the block.

    Threads that the block starts keep SCHED_BATCH.
    """
    # Both stay None where the system has no calls for scheduling or does not allow them.
    policy = None
    parameters = None
    with suppress(AttributeError, OSError):
        policy = os.sched_getscheduler(0)
        parameters = os.sched_getparam(0)
    schedule_in_batches()
    try:
        yield
    finally:
        if policy is not None and parameters is not None:
            # The work of the block is done by now, so a refusal must not raise an error.
            with suppress(OSError):
                os.sched_setscheduler(0, policy, parameters)


# -- the end of a rank -----------------------------------------------------------------

_rank_has_failed = threading.Event()
"""Set once this process has failed as one of several ranks. The others may still wait for it."""


def note_failure_of_rank() -> None:
    """Note that this process has failed as one of several ranks.

    The others may still wait for it. Whoever then ends the process should call `end_at_once`.
    """
    _rank_has_failed.set()


def rank_has_failed() -> bool:
    """Return whether this process has failed as one of several ranks in this command."""
    return _rank_has_failed.is_set()


def forget_failure_of_rank() -> None:
    """Forget that this process has failed as a rank, because it begins another command."""
    _rank_has_failed.clear()


def end_at_once(status: int) -> NoReturn:
    """End this process, which is a rank, without waiting for its threads.

    Threads of gloo and NCCL may wait for other ranks for ever. The usual end of a process
    would wait for them.

    Parameters
    ----------
    status : int
        The exit status.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


# -- signals ---------------------------------------------------------------------------


def _exit_by_signal(number: int, frame: FrameType | None) -> NoReturn:
    """Handle a signal by an exception, which ends the process unless it is caught."""
    # The exit status is the one that a shell reports for a process that a signal ended.
    raise SystemExit(128 + number)


def _in_main_thread() -> bool:
    """Return whether this thread gets signals, and so may set their handlers."""
    return threading.current_thread() is threading.main_thread()


def trap(*numbers: int) -> list[int]:
    """From now on, let signals raise `SystemExit`, so that every ``finally`` runs.

    Only signals that would end the process at once are changed. Signals that have a
    handler or are ignored stay as they are.

    Parameters
    ----------
    *numbers : int
        The signals, such as `signal.SIGTERM`.

    Returns
    -------
    list of int
        The signals whose handler was set. Outside the main thread there are none, because
        only the main thread may set handlers.
    """
    if not _in_main_thread():
        return []
    # SIG_DFL is the default: the signal ends the process at once.
    unhandled = [n for n in numbers if signal.getsignal(n) is signal.SIG_DFL]
    for number in unhandled:
        signal.signal(number, _exit_by_signal)
    return unhandled


@contextmanager
def unwinding(*numbers: int) -> Iterator[None]:
    """Within the block, let signals raise `SystemExit`, so that every ``finally`` runs.

    As in `trap`, only signals that would end the process at once are changed. A handler
    that the block itself sets for a signal stays after the block.

    Parameters
    ----------
    *numbers : int
        The signals, such as `signal.SIGTERM`.
    """
    trapped = trap(*numbers)
    try:
        yield
    finally:
        for number in trapped:
            # If the block ends in another thread than it began in, this thread may set no
            # handler. Any other handler than that of `trap` was set by the block itself.
            if _in_main_thread() and signal.getsignal(number) is _exit_by_signal:
                signal.signal(number, signal.SIG_DFL)


def _handlers_to_replace(numbers: Sequence[int]) -> dict[int, Any]:
    """Return the present handlers, by signal, of those signals that `deferring` keeps waiting.

    These are signals that are not ignored, and whose handlers can be restored.
    """
    handlers = {}
    for number in numbers:
        handler = signal.getsignal(number)
        # A handler that was not set from Python is None and could not be set again.
        if handler not in (None, signal.SIG_IGN):
            handlers[number] = handler
    return handlers


@contextmanager
def deferring(*numbers: int) -> Iterator[None]:
    """Keep signals waiting until the block is over.

    A signal that arrives during the block is handled after it, and only once if it
    arrives several times. In any thread but the main one this does nothing, because
    signals interrupt the main thread only.

    Parameters
    ----------
    *numbers : int
        The signals, such as `signal.SIGINT`. Those that are ignored stay ignored.
    """
    arrived: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        """Handle a signal by only noting that it has arrived."""
        arrived.append(number)

    handlers_before = _handlers_to_replace(numbers) if _in_main_thread() else {}
    for number in handlers_before:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in handlers_before.items():
            signal.signal(number, handler)
        # Each signal that arrived now calls the handler that it had before the block.
        # `dict.fromkeys` drops repeated signals and keeps the order.
        for number in dict.fromkeys(arrived):
            signal.raise_signal(number)


if os.environ.pop(FORKS, ""):
    die_with_parent()
    os.environ[PARENT] = str(os.getpid())  # the parent of all ranks
    # Neither Ctrl-C in the terminal nor the terminal's end reaches the ranks: the
    # launcher alone ends them.
    os.setsid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
