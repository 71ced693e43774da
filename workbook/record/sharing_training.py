"""Training iterations of one process that shares its GPU with messages of its own gradients.

The stand-in (sharing Fig 4 to 8, Tab 2) sends gradients as DistributedDataParallel does. They form buckets by
DDP's rule. A bucket leaves once its last gradient is ready and all buckets before it have left, and the
update waits for all buckets. For every bucket, the stand-in moves what a rank of an all-reduce sends. This
is bucket bytes x 2 (n - 1) / n for n ranks, which do not exist. The paper's proposal to give more to the last
message (sharing 5) is a policy here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import numpy as np
import pandas as pd

from ddlkit.core.collective import COLLECTIVES
from ddlkit.core.errors import UserError
from ddlkit.core.plan import ddp
from ddlkit.core.workload import Workload
from ddlkit.jobs import clock
from ddlkit.jobs.clock import Budget, Floats, Marks
from ddlkit.measure.given import Training, known
from ddlkit.measure.layers import compute_on
from ddlkit.measure.session import Unavailable, say
from ddlkit.measure.training import PRECISION
from ddlkit.model.predictor import HOST_BOUND
from workbook.record.standin import TICK_S, Footprint, GpuStandIn, read_message


@dataclass(frozen=True)
class Setting:
    """How gradients are sent.

    Attributes
    ----------
    footprint : Footprint
        The footprint of every message, or of all but the last one.
    last : Footprint, optional
        The footprint of the last message, if it is another.
    ranks : int
        The number of ranks whose all-reduce is emulated.
    """

    footprint: Footprint
    last: Footprint | None = None
    ranks: int = 2

    @property
    def policy(self) -> str:
        """Return the name of the policy in tables."""
        if self.last is None:
            return "same"
        return f"last_{self.last.blocks}x{self.last.threads}"


# One rank alone sends no bytes, but the host issues as many messages as with several ranks. What that costs
# is then no cost of sharing.
EMPTY = Setting(Footprint(1, 64), ranks=1)
# In bytes/s: no limit, which 0 stands for, and then a limited rate.
RATES = (0.0, 10e9)
# (blocks, threads): corners of the paper's grid, its default of NCCL, and what NCCL takes today.
GRID = ((1, 64), (1, 512), (2, 256), (4, 64), (4, 512), (16, 512))


def sharing_settings(brief: bool) -> list[Setting]:
    """Return the settings of how gradients are sent that are to be compared.

    A footprint is the blocks and threads that a message takes on the GPU, and its rate. There are
    three kinds of settings:

    * all messages of an iteration have the same footprint, without a limit of the rate and at a
      limited rate,
    * the last message has the largest footprint and all others have the smallest one, again without
      a limit and at a limited rate,
    * one setting emulates the all-reduce of 8 ranks, at the limited rate.

    Parameters
    ----------
    brief : bool
        Whether only the smallest footprint is compared as that of all messages.
    """
    settings = []
    for rate in RATES:
        # The first pair of the grid is the smallest, and the last pair is the largest.
        for blocks, threads in GRID[:1] if brief else GRID:
            settings.append(Setting(Footprint(blocks, threads, rate)))
    for rate in RATES:
        smallest = Footprint(*GRID[0], rate)
        largest = Footprint(*GRID[-1], rate)
        settings.append(Setting(smallest, last=largest))
    limited_rate = RATES[-1]
    settings.append(Setting(Footprint(*GRID[0], limited_rate), ranks=8))
    return settings


def chunks_of_messages(sizes: Sequence[float], round_bytes: Sequence[int]) -> list[int]:
    """Return how many chunks each block of the stand-in sends of each message.

    All blocks of a message send equally many whole chunks. A message may therefore send more bytes
    than it has. The messages after it then send fewer.

    Parameters
    ----------
    sizes : sequence of float
        The bytes of each message.
    round_bytes : sequence of int
        For each message, the bytes of a round, in which each of its blocks sends one chunk.
    """
    # The bytes of each message and of all before it.
    total_bytes = np.cumsum(sizes)
    chunks = []
    sent_bytes = 0
    for total, bytes_of_round in zip(total_bytes, round_bytes, strict=True):
        # As many rounds as reach the total. There are none if the messages before have reached it
        # already.
        rounds = max(0, int(np.ceil((total - sent_bytes) / bytes_of_round)))
        chunks.append(rounds)
        sent_bytes += rounds * bytes_of_round
    return chunks


class Incomplete(UserError):
    """A message of an iteration was not sent completely, so that the iteration is no sample."""


class Run:
    """One iteration and the messages that are sent in it, one for each bucket of gradients.

    Parameters
    ----------
    sizes : sequence of int
        The bytes of each bucket.
    setting : Setting
        How the buckets are sent.
    stand_in : GpuStandIn
        What sends them.

    Attributes
    ----------
    footprints : list of Footprint
        The footprint of each message.
    chunks : list of int
        For each message, how many chunks each of its blocks sends.
    n_bytes : int
        The bytes that the rank sends of all messages together.
    records : list of Tensor
        What the kernel of each message writes down.
    marks : Marks
        The start, and the ends of the forward pass, of the backward pass, of waiting and of the update.
    """

    def __init__(
        self, sizes: Sequence[int], setting: Setting, stand_in: GpuStandIn
    ) -> None:
        self.footprints = [setting.footprint] * (len(sizes) - 1)
        # The last message may have a footprint of its own.
        self.footprints.append(setting.last or setting.footprint)
        # In a round, each block of the message sends one chunk.
        round_bytes = [
            footprint.blocks * stand_in.chunk_bytes(footprint.threads)
            for footprint in self.footprints
        ]
        # The bytes that a rank sends of each bucket. With one rank alone they are 0.
        all_reduce = COLLECTIVES["all_reduce"]
        wire_bytes = [all_reduce.wire_bytes(setting.ranks, size) for size in sizes]
        self.chunks = chunks_of_messages(wire_bytes, round_bytes)
        # Each block sends as many chunks as there are rounds.
        self.n_bytes = int(np.dot(self.chunks, round_bytes))
        self.records = [
            stand_in.record(footprint.blocks) for footprint in self.footprints
        ]
        # All records are on the GPU of the training.
        self.marks = Marks(self.records[0].device)

    def columns(self) -> dict[str, float]:
        """Return the columns of table ``sharing`` that follow from marks and records.

        These are the bytes, the rate, the times of communication and the share of them that was
        hidden behind computing. Raises Incomplete if a message was not sent completely.
        """
        messages_s = []
        # By message, how many chunks all its blocks have sent.
        sent_chunks = []
        for record in self.records:
            seconds, chunks = read_message(record)
            messages_s.append(seconds)
            sent_chunks.append(chunks)
        blocks = [footprint.blocks for footprint in self.footprints]
        expected_chunks = np.multiply(self.chunks, blocks)
        if sent_chunks != expected_chunks.tolist():
            # The text names the footprint of the last message, whichever message is incomplete.
            raise Incomplete(
                f"stand-in as {self.footprints[-1]}: sent {sum(sent_chunks)} of "
                f"{expected_chunks.sum()} chunks in the time that a message may take; "
                "ask for a higher rate"
            )
        # The messages follow one another, so that their times add up. Bytes are divided by the
        # time, but the GPU's timer may see none at all.
        communication_s = max(TICK_S, sum(messages_s))
        # The marks are the start, and the ends of the forward pass, the backward pass, waiting and
        # the update.
        _, _, backward_end_s, waited_s, _ = self.marks.seconds().tolist()
        exposed_s = waited_s - backward_end_s
        return {
            "bytes": self.n_bytes,
            "bytes_per_s": self.n_bytes / communication_s,
            "communication_s": communication_s,
            "exposed_communication_s": exposed_s,
            # If waiting takes longer than the messages did, nothing of them was hidden.
            "overlap_share": max(0.0, 1 - exposed_s / communication_s),
        }


class SendingTraining:
    """A network in training whose gradients a stand-in sends.

    Attributes
    ----------
    training : Training
        The training.
    stand_in : GpuStandIn
        What sends the gradients: a kernel that loads the GPU as NCCL's does.
    sizes : list of int
        The bytes of each bucket, in the order in which the buckets leave.
    """

    def __init__(self, training: Training, stand_in: GpuStandIn) -> None:
        self.training = training
        self.stand_in = stand_in
        # One iteration shows the order in which gradients become ready. This list gets the names
        # of their tensors.
        ready: list[str] = []
        # The first function is called when a layer starts, and does nothing. The second one is
        # called when a gradient is ready.
        with training.watched(lambda _: None, ready.append):
            training.iterate()
        parameters = dict(training.model.named_parameters())
        n_bytes = [parameters[tensor].nbytes for tensor in ready]
        # DDP's rule only needs the sizes. The times of the forward pass and of all gradients are 0.
        workload = Workload.from_arrays(0, [0] * len(ready), n_bytes)
        plan = ddp(workload)
        self.sizes: list[int] = plan.group_bytes(workload).tolist()
        # The bucket of each tensor, and the number of tensors of each bucket.
        self._bucket: dict[str, int] = {}
        self._n_tensors: list[int] = []
        for bucket, part in enumerate(plan.slices):
            tensors = ready[part]
            self._n_tensors.append(len(tensors))
            self._bucket.update(dict.fromkeys(tensors, bucket))

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Send gradients when they are ready, and have the update wait, within the block."""
        handle = self.training.optimizer.register_step_pre_hook(self._wait)
        try:
            # Nothing is done when a layer starts.
            with self.training.watched(lambda _: None, self._ready):
                yield
        finally:
            handle.remove()

    def iterate(self, setting: Setting) -> Run:
        """Do one iteration and return it. Must be called within `hooked`."""
        # How many gradients of each bucket are not ready yet.
        self._missing = list(self._n_tensors)
        # The number of the bucket that leaves next.
        self._next = 0
        self._run = Run(self.sizes, setting, self.stand_in)
        # Marks the start, and the ends of both passes and of the update. Before the update, `_wait`
        # adds the end of waiting.
        self.training.iterate(self._run.marks.mark)
        return self._run

    def _ready(self, tensor: str) -> None:
        """Count the gradient of a tensor as ready, and send all buckets that can now be sent.

        Buckets are sent in their order. A bucket that is complete waits for the buckets before it.
        """
        self._missing[self._bucket[tensor]] -= 1
        while self._next < len(self._missing) and self._missing[self._next] == 0:
            self.stand_in.send(
                footprint=self._run.footprints[self._next],
                chunks=self._run.chunks[self._next],
                record=self._run.records[self._next],
            )
            self._next += 1

    def _wait(self, *_: object) -> None:
        """Have the GPU wait for all messages before the update, and mark the end of the wait.

        This is a hook of the optimizer, whose arguments are not used.
        """
        self.stand_in.join()
        self._run.marks.mark()


def measure_sharing(
    network: str, batch: int, compared: Sequence[Setting], budget: Budget
) -> pd.DataFrame:
    """Return table ``sharing`` of one network on a GPU, with times of single iterations.

    A setting says how gradients are sent by the stand-in, a kernel that loads the GPU as NCCL's
    does. Iterations by each of the settings ``compared``, and iterations that send nothing, are
    measured in turn within the budget.

    Column ``seconds`` has the times of iterations by the device's own clock. In rows of quantity
    "compute", all messages are issued as in other rows, but they have no bytes. Column
    ``communication_s`` has the time in which messages were under way, and
    ``exposed_communication_s`` the time from the end of the backward pass to the update.
    ``overlap_share`` is the share of ``communication_s`` that is not exposed.
    """
    with compute_on(f"{network} at batch {batch} beside the stand-in", "cuda") as gpu:
        training = known(network, batch, gpu, PRECISION)
        sending = SendingTraining(training, GpuStandIn())
        rows = measure_sending(sending, compared, budget)
    return rows.assign(
        network=network, device=gpu.type, batch=batch, precision=PRECISION
    )


def measure_sending(
    sending: SendingTraining, compared: Sequence[Setting], budget: Budget
) -> pd.DataFrame:
    """Return the rows of `measure_sharing` without the columns that name the training.

    Two things are left out: iterations with a message that was not sent completely, and settings
    under which the host needs most of an iteration to issue it, because their times are those of
    the host.

    Parameters
    ----------
    sending : SendingTraining
        The training.
    compared : sequence of Setting
        The settings. They are compared with `EMPTY`, whose messages have no bytes.
    budget : Budget
        How long to measure all of them.

    Returns
    -------
    DataFrame
        A row for each iteration: its ``quantity`` ("compute" or "iteration"), the columns that
        say how messages were sent (``ranks``, ``policy`` and those of `_NO_MESSAGES`), ``sample``,
        the number of its round, and ``seconds``.

    Raises
    ------
    Unavailable
        If the host needs most of an iteration even without messages.
    UserError
        If nothing is left of any setting.
    """
    # By setting, all its iterations, and the seconds in which the host issued each of them.
    runs: dict[Setting, list[Run]] = {setting: [] for setting in (EMPTY, *compared)}
    issued_s: dict[Setting, list[float]] = {setting: [] for setting in runs}

    def iterate(setting: Setting) -> Marks:
        begun_s = perf_counter()
        run = sending.iterate(setting)
        issued_s[setting].append(perf_counter() - begun_s)
        runs[setting].append(run)
        return run.marks

    with sending.hooked():
        samples = clock.measure_interleaved(
            {setting: partial(iterate, setting) for setting in runs},
            budget,
            synchronize=clock.synchronizer(sending.training.device),
        )
    # On a CPU the host computes itself, so that issuing always takes all of an iteration.
    on_gpu = sending.training.device.type == "cuda"
    frames = []
    for setting, seconds in samples.items():
        # Runs of the warm-up come first, and are no samples.
        n_samples = len(seconds)
        sample_runs = runs[setting][-n_samples:]
        issue_s = issued_s[setting][-n_samples:]
        # If `EMPTY` itself is bound by the host, this raises.
        if on_gpu and is_host_bound(issue_s, seconds, setting):
            continue
        if setting == EMPTY:
            frames.append(_none_sent(setting, seconds))
        else:
            frames.append(_sent_rows(sending, setting, sample_runs, seconds))
    whole = pd.concat(frames, ignore_index=True)
    # Only the rows of `EMPTY` are of quantity "compute".
    if set(whole["quantity"]) == {"compute"}:
        raise UserError("no setting is left of which a message was sent completely")
    return whole


def is_host_bound(issue_s: Sequence[float], seconds: Floats, setting: Setting) -> bool:
    """Return whether the host needs most of an iteration to issue it, and print a line if so.

    Parameters
    ----------
    issue_s : sequence of float
        The time in which the host issued each iteration.
    seconds : ndarray
        The iterations by the clock of the device.
    setting : Setting
        How gradients were sent.

    Raises
    ------
    Unavailable
        If the setting is `EMPTY` and the host needs most of an iteration. No setting can then be
        compared with computing alone.
    """
    # Typical times are divided. Above `HOST_BOUND`, the GPU waits for the host.
    share = float(np.median(issue_s) / np.median(seconds))
    if share <= HOST_BOUND:
        return False
    line = f"the host needs {share:.0%} of an iteration to issue it"
    if setting == EMPTY:
        raise Unavailable(f"{line}: use a larger batch")
    say(f"{setting.footprint}, policy {setting.policy}: not kept, {line}")
    return True


def _none_sent(setting: Setting, seconds: Floats) -> pd.DataFrame:
    """Return the rows of iterations whose messages have no bytes, one for each of ``seconds``.

    They are of quantity "compute", because such an iteration takes the time of computing alone.
    """
    columns = {
        "quantity": "compute",
        "ranks": setting.ranks,
        "policy": "none",
        **_NO_MESSAGES,
    }
    return clock.sample_rows(columns, seconds)


def _sent_rows(
    sending: SendingTraining, setting: Setting, runs: Sequence[Run], seconds: Floats
) -> pd.DataFrame:
    """Return the rows of iterations whose messages were sent completely.

    A printed line says which iterations are left out. The frame is empty if none is left.

    Parameters
    ----------
    sending : SendingTraining
        The training.
    setting : Setting
        How the messages were sent.
    runs : sequence of Run
        The iterations, one of each round.
    seconds : ndarray, shape (rounds,)
        Their times by the device's own clock.
    """
    # Of all messages but the last one, which may have other blocks and threads. The policy names
    # these, as in "last_16x512".
    of_contention = sending.stand_in.columns(setting.footprint)
    # Table ``contention`` has more columns about footprints than table ``sharing``.
    of_footprint = {
        name: value for name, value in of_contention.items() if name in _NO_MESSAGES
    }
    columns = {
        # All columns about messages are zero at first. The entries below and the samples replace
        # most of these zeros.
        **_NO_MESSAGES,
        **of_footprint,
        "quantity": "iteration",
        "ranks": setting.ranks,
        "policy": setting.policy,
        "buckets": len(sending.sizes),
    }
    sent = []
    # Settings are compared within rounds. A sample therefore has the number of its round, and
    # numbers are missing where an iteration is left out.
    for number, (run, taken_s) in enumerate(zip(runs, seconds, strict=True)):
        try:
            of_run = run.columns()
        except Incomplete as incomplete:
            say(f"round {number} is not kept: {incomplete}")
            continue
        sent.append({**columns, **of_run, "sample": number, "seconds": taken_s})
    return pd.DataFrame(sent)


_NO_MESSAGES: dict[str, Any] = {
    **dict.fromkeys(("blocks", "threads", "taken_threads", "buckets", "bytes"), 0),
    **dict.fromkeys(("bytes_per_s_asked", "bytes_per_s", "communication_s"), 0.0),
    **dict.fromkeys(("exposed_communication_s", "overlap_share"), 0.0),
}
"""The columns of table ``sharing`` about messages, with their values without messages."""
