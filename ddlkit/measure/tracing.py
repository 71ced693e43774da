"""Traces of a model in data-parallel training, one file for each rank.

The model is trained under DistributedDataParallel as its user would train it: with
DDP's default options, and with gloo or NCCL as torch sets them up. `torch.profiler`
records whole iterations. ``ddlkit explain`` reads the files.
"""

from __future__ import annotations

import contextlib
import gzip
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, schedule

from ddlkit.core.errors import UserError
from ddlkit.jobs.clock import Pace
from ddlkit.jobs.rank import Rank, Tables, agree_all, job
from ddlkit.measure.advise import loaded_together
from ddlkit.measure.given import Training, missing_gradients
from ddlkit.measure.layers import compute_on
from ddlkit.store.files import replace, scratch

MEETING_S = 300.0
"""Seconds until all ranks must have built the model."""
COMPRESSION = 9
"""The level of gzip. A trace is written once, and is then kept and sent around."""


@dataclass(frozen=True)
class TracingSettings:
    """The settings of the job.

    Attributes
    ----------
    model : str
        The model, as `ddlkit.measure.given.load` takes it.
    directory : str
        Where each rank writes its file.
    iterations : int
        How many iterations are recorded.
    warmup : int
        How many iterations precede the recorded ones, and are not recorded.
    """

    model: str
    directory: str
    iterations: int
    warmup: int


@job(TracingSettings)
def tracing_job(me: Rank, settings: TracingSettings) -> Iterator[Tables]:
    """Train a model under DDP, and write the profiler's trace of this rank.

    Parameters
    ----------
    me : Rank
        This rank.
    settings : TracingSettings
        The model, and how much is recorded.

    Yields
    ------
    mapping of str to DataFrame
        Nothing. The job leaves traces and no tables.

    Raises
    ------
    UserError
        If the model cannot be loaded or trained on any rank, if a parameter gets no
        gradient, if the loss does not call the model itself, and if a file cannot be
        written.
    """
    notes: list[str] = []
    # An empty precision leaves the settings that the user's own code has made.
    with compute_on(settings.model, me.device, precision=""):
        training = loaded_together(settings.model, accumulate=1, me=me, notes=notes)
        _refuse_unused_parameters(training, settings.model)
        # As in a user's own training, DDP sends the first weights and the buffers of rank 0,
        # and gloo has two threads, where the ranks of this library have one by default.
        training.wrap(synchronize=True, process_group=process_group_of_users(me))
        # This iteration shows whether DDP takes part at all. The profiler's warm-up
        # follows.
        training.iterate()
        _refuse_without_ddp(training, settings.model)
        for note in notes:
            me.say(note)
        me.say(
            f"training {training.network} for {settings.warmup + settings.iterations} iterations: "
            f"{settings.warmup} to warm up, then {settings.iterations} that are recorded"
        )
        # All iterations are alike, so their numbers are ignored.
        trace_iterations(
            lambda _: training.iterate(),
            Path(settings.directory),
            me,
            iterations=settings.iterations,
            warmup=settings.warmup,
        )
    # A job has to be a generator, even if it yields no table.
    yield from ()


def process_group_of_users(me: Rank) -> dist.ProcessGroup | None:
    """Return the process group that a user's own training would have.

    The default group of this library's ranks has one gloo thread. The new group that is
    made here has the two threads of torch's default, as a user's gloo has, so that two
    messages may share the link. Between GPUs there is no such difference.

    Parameters
    ----------
    me : Rank
        This rank. All ranks must call this function together.

    Returns
    -------
    ProcessGroup or None
        A new group of all ranks, or None with NCCL. DDP uses the default group for None.
    """
    if me.backend != "gloo":
        return None
    # The type stubs of torch do not say what this function returns.
    group: Any = dist.new_group(backend="gloo")
    return group


def _refuse_unused_parameters(training: Training, model: str) -> None:
    """Raise UserError if a parameter gets no gradient: DDP would wait for it for ever.

    ``model`` is the model as the user names it, for the error message.
    """
    unused = training.without_gradient()
    if unused:
        raise UserError(
            f"{model}: {missing_gradients(unused)} (by default DDP waits for the gradients "
            "of all parameters)"
        )


def _refuse_without_ddp(training: Training, model: str) -> None:
    """Raise UserError if the loss has not called the model, and so has not used DDP.

    ``model`` is the model as the user names it, for the error message.
    """
    # `Training.wrap` puts the model into a module that notes whether the loss calls it.
    ddp: Any = training.ddp
    if not ddp.module.called:
        raise UserError(
            f"{model}: loss() does not call the model itself, so that DDP sends nothing: "
            "call the model in loss()"
        )


def trace_iterations(
    iterate: Callable[[int], object],
    directory: Path,
    me: Rank,
    *,
    iterations: int,
    warmup: int,
) -> None:
    """Record iterations with `torch.profiler`, and write this rank's file.

    Parameters
    ----------
    iterate : callable
        Runs an iteration. It takes the number of the iteration, from 0, which is also
        the number in the name of the iteration's span, ``ProfilerStep#``.
    directory : Path
        Where the file ``rankN.json.gz`` is written.
    me : Rank
        This rank. All ranks call this function together.
    iterations : int
        How many iterations are recorded.
    warmup : int
        How many iterations precede the recorded ones, and are not recorded.

    Raises
    ------
    UserError
        If the file of any rank cannot be written.
    """
    activities = [ProfilerActivity.CPU]
    if me.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    # With `repeat=1` the profiler goes once through warm-up and recording. Otherwise the
    # last call of `step` would begin a second round, and discard what is recorded.
    steps = schedule(wait=0, warmup=warmup, active=iterations, repeat=1)
    progress = _Progress(me, iterations, warmup)
    # Readers of a trace need shapes to find which copy belongs to which message.
    with profile(activities=activities, schedule=steps, record_shapes=True) as profiler:
        for number in range(warmup + iterations):
            iterate(number)
            # A line of progress counts to the span of this iteration. It takes some
            # microseconds, and comes seldom.
            progress.say_if_due(n_done=number + 1)
            profiler.step()  # ends the span of this iteration, and begins the next one
    me.say("writing the traces")
    _write_trace(profiler, directory, me)


class _Progress:
    """Prints now and then how many iterations of a recording are done.

    ``_last_said_s`` is when the last line was printed, and ``_n_last_said`` how many
    iterations were done by then. Before the first line, they are those of the beginning.
    """

    def __init__(self, me: Rank, iterations: int, warmup: int) -> None:
        self._me = me
        self._iterations = iterations
        self._warmup = warmup
        self._pace = Pace()
        self._last_said_s = time.monotonic()
        self._n_last_said = 0

    def say_if_due(self, n_done: int) -> None:
        """Print a line if one is due, unless all iterations are done.

        ``n_done`` is the number of iterations so far, with those that warm up.
        """
        n_left = self._warmup + self._iterations - n_done
        if not n_left or not self._pace.due():
            return
        now_s = time.monotonic()
        # Recorded iterations take longer than those before, so only the iterations since the
        # last line tell how long one takes.
        iteration_s = (now_s - self._last_said_s) / (n_done - self._n_last_said)
        self._last_said_s = now_s
        self._n_last_said = n_done
        done = f"{n_done} of {self._warmup} iterations to warm up are done"
        if n_done > self._warmup:
            n_recorded = n_done - self._warmup
            done = f"{n_recorded} of {self._iterations} iterations are recorded"
        self._me.say(f"{done}; about {n_left * iteration_s:.0f} s are left")


def _write_trace(profiler: profile, directory: Path, me: Rank) -> None:
    """Write the trace of this rank as rankN.json.gz, if all ranks can write theirs.

    All ranks call this function together. If the file of one cannot be written, every rank
    raises an exception, and no file appears. Traces that an earlier recording on more ranks
    left are removed at the end.
    """
    name = f"rank{me.rank}.json"
    failure: OSError | UserError | None = None
    # The temporary folder is removed when the stack ends.
    with contextlib.ExitStack() as stack:
        # The file is written into a temporary folder, and moved only when all are written.
        try:
            directory.mkdir(parents=True, exist_ok=True)
            folder = stack.enter_context(scratch(directory))
            uncompressed = folder / name
            packed = folder / f"{name}.gz"
            profiler.export_chrome_trace(str(uncompressed))
            _pack(uncompressed, packed)
        except (OSError, UserError) as error:
            failure = error
        # All ranks ask together. If a rank raised its failure before, the others would wait
        # for it.
        all_written = agree_all(failure is None)
        if failure:
            raise failure
        if not all_written:
            raise UserError(f"{directory}: another rank could not write its trace")
        replace(packed, directory / packed.name)
    _remove_traces_of_absent_ranks(directory, me)


def _remove_traces_of_absent_ranks(directory: Path, me: Rank) -> None:
    """Remove traces of ranks that this recording does not have.

    An earlier recording on more ranks has left them. Rank 0 removes them for all.
    """
    if me.rank != 0:
        return
    own = {f"rank{rank}.json.gz" for rank in range(me.world_size)}
    for path in directory.glob("rank*.json.gz"):
        if path.name not in own:
            path.unlink()


def _pack(uncompressed: Path, packed: Path) -> None:
    """Compress a file piece by piece, because a trace may have a gigabyte."""
    # A gzip file holds a time of modification. With 0 in its place, the same trace always
    # gives the same file.
    with (
        uncompressed.open("rb") as source,
        gzip.GzipFile(packed, "wb", compresslevel=COMPRESSION, mtime=0) as target,
    ):
        shutil.copyfileobj(source, target)
