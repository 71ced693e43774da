"""Training iterations of one process beside communication for its own gradients (sharing Fig 4 to 8, Tab 2).

Gradients travel as DistributedDataParallel sends them: in buckets by its rule, each once its last gradient
is ready and all before it have left; the update waits for them. For every bucket the stand-in's kernel moves
what each rank of an all-reduce sends: bucket bytes x 2 (n - 1) / n of n ranks that are not there. The paper's
proposal, to give the last message more (5 Future work), is a policy here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch

from ddlkit.core.errors import UserError
from ddlkit.core.link import bus_factor
from ddlkit.core.plan import ddp
from ddlkit.core.workload import Workload
from ddlkit.run import clock
from ddlkit.run.clock import Budget, Marks
from ddlkit.run.measure.layers import Training, compute_on
from ddlkit.run.measure.standin import TICK_S, Footprint, GpuStandIn, read_message
from ddlkit.run.sessions import Unavailable

COMPUTE, ITERATION, COMMUNICATION = "compute", "iteration", "communication"
"""Quantities of the table: training with empty messages, with whole ones, and these without training."""


@dataclass(frozen=True)
class Setting:
    """How gradients are sent: footprint : of every message, or all but the ``last``; ranks : emulated."""

    footprint: Footprint
    last: Footprint | None = None
    ranks: int = 2

    @property
    def policy(self) -> str:
        """Return its name in tables."""
        return f"last_{self.last.blocks}x{self.last.threads}" if self.last else "same"

    def footprints(self, messages: int) -> list[Footprint]:
        """Return that of each message."""
        return [self.footprint] * (messages - 1) + [self.last or self.footprint]


# Messages of no chunks: what the host spends on each is not what sharing costs.
EMPTY = Setting(Footprint(1, 64), ranks=1)
RATES = (0.0, 10e9)
# (blocks, threads): corners of the paper's grid, its default of NCCL, and what NCCL takes today.
GRID = ((1, 64), (1, 512), (2, 256), (4, 64), (4, 512), (16, 512))


def settings(brief: bool) -> list[Setting]:
    """Return equal footprints, the last with more, and more ranks; ``brief``: few."""
    least, most = ([Footprint(*shape, rate) for rate in RATES] for shape in (GRID[0], GRID[-1]))
    equal = itertools.product(RATES, GRID[: 1 if brief else None])
    return [
        *(Setting(Footprint(*shape, rate)) for rate, shape in equal),
        *map(Setting, least, most),
        Setting(least[-1], ranks=8),
    ]


def chunks_of_messages(sizes: Sequence[float], round_bytes: Sequence[int]) -> list[int]:
    """Return how many chunks each block sends of each message: every byte travels with its message, once.

    round_bytes : that the blocks send with one chunk each; what exceeds a message is credited to the next

    >>> chunks_of_messages([25, 4, 31], [10, 10, 10])
    [3, 0, 3]
    """
    chunks, owed = [], 0.0
    for size, each in zip(sizes, round_bytes, strict=True):
        owed += size
        chunks.append(max(0, int(np.ceil(owed / each))))
        owed -= chunks[-1] * each
    return chunks


class Run(NamedTuple):
    """One repeat, and what each message's kernel wrote down.

    marks : start, ends of forward, backward, waiting and update; of messages alone, start and end
    """

    marks: Marks
    records: Sequence[torch.Tensor]


class SendingTraining:
    """A network in training whose gradients a stand-in sends; sizes : (buckets,) bytes, as they leave."""

    def __init__(self, training: Training, stand_in: GpuStandIn) -> None:
        self.training, self.stand_in = training, stand_in
        ready: list[str] = []
        with training.watched(lambda _: None, ready.append):
            training.iterate(lambda: None)
        named = dict(training.model.named_parameters())
        n_bytes = [named[tensor].nbytes for tensor in ready]
        plan = ddp(workload := Workload.from_arrays(0, [0] * len(ready), n_bytes))
        self.sizes: list[int] = plan.group_bytes(workload).tolist()
        parts = [ready[part] for part in plan.slices]
        self._bucket = {tensor: k for k, part in enumerate(parts) for tensor in part}
        self._tensors = [len(part) for part in parts]
        self._start(EMPTY)

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Have gradients leave when they are ready, and the update wait for them."""
        with ExitStack() as hooks:
            hooks.enter_context(self.training.watched(lambda _: None, self._ready))
            handle = self.training.optimizer.register_step_pre_hook(self._wait)
            hooks.callback(handle.remove)
            yield

    def iterate(self, setting: Setting) -> Run:
        """Do one iteration, within `hooked`."""
        run = self._start(setting)
        self.training.iterate(run.marks.mark)
        return run

    def send_all(self, setting: Setting) -> Run:
        """Send all messages, one after the other, without an iteration."""
        run = self._start(setting)
        run.marks.mark()
        for bucket in range(len(self.sizes)):
            self._send(bucket)
        self._wait()
        return run

    def chunks(self, setting: Setting) -> tuple[list[int], list[int]]:
        """Return (buckets,) chunks that each block sends, and bytes of a chunk of all blocks together."""
        footprints = setting.footprints(len(self.sizes))
        each = [at.blocks * self.stand_in.chunk_bytes(at.threads) for at in footprints]
        factor = bus_factor("all_reduce", setting.ranks)  # 0 of one rank, which sends nothing
        return chunks_of_messages([factor * size for size in self.sizes], each), each

    def _start(self, setting: Setting) -> Run:
        """Prepare whatever must be there before the clock starts."""
        self._missing, self._next = list(self._tensors), 0
        self._footprints, (self._chunks, _) = (
            setting.footprints(len(self.sizes)),
            self.chunks(setting),
        )
        records = [self.stand_in.record(footprint.blocks) for footprint in self._footprints]
        self._run = Run(Marks(self.training.labels.device), records)
        return self._run

    def _ready(self, tensor: str) -> None:
        """Send, in the order of the buckets, whatever is whole now that this gradient is ready."""
        self._missing[self._bucket[tensor]] -= 1
        while self._next < len(self._missing) and not self._missing[self._next]:
            self._send(self._next)
            self._next += 1

    def _send(self, bucket: int) -> None:
        record = self._run.records[bucket]
        self.stand_in.send(self._footprints[bucket], self._chunks[bucket], record)

    def _wait(self, *_: object) -> None:
        self.stand_in.join()
        self._run.marks.mark()


def measure_sharing(
    device: str, network: str, batch: int, compared: Sequence[Setting], budget: Budget
) -> pd.DataFrame:
    """Return table ``sharing``: one network's iterations without messages, and with them by each setting.

    ``seconds`` are the device's own: of quantity "compute" with messages of no bytes (as many, so that the
    host issues the same), of "iteration" with them, of "communication" the messages alone.
    communication_s : in which messages were under way; exposed_communication_s : from the end of backward to
        the update; overlap_share : of communication_s, what is not exposed

    Raises UserError as `profile_layers`, for a stand-in that does not compile, or did not send all.
    """
    if device == "cpu":
        raise Unavailable("no stand-in: needs a GPU")
    with compute_on(f"{network} at batch {batch} beside the stand-in", device) as place:
        sending = SendingTraining(Training(network, batch, place, "fp32"), GpuStandIn())
        rows = measure_sending(sending, compared, budget)
    return rows.assign(network=network, device=place.type, batch=batch, precision="fp32")


def measure_sending(
    sending: SendingTraining, compared: Sequence[Setting], budget: Budget
) -> pd.DataFrame:
    """Return the same rows of a training that is ready, which they do not name."""
    runs: dict[tuple[str, Setting], list[Run]] = {(COMPUTE, EMPTY): []}
    runs |= {(what, way): [] for way in compared for what in (ITERATION, COMMUNICATION)}

    def once(what: str, setting: Setting) -> Marks:
        run = (sending.send_all if what == COMMUNICATION else sending.iterate)(setting)
        runs[what, setting].append(run)
        return run.marks

    with sending.hooked():
        actions = {key: partial(once, *key) for key in runs}
        wait = clock.synchronizer(sending.training.labels.device)
        samples = clock.measure_interleaved(actions, budget, synchronize=wait)
    frames = []
    for (what, setting), seconds in samples.items():
        seen = _columns(sending, setting, runs[what, setting][-len(seconds) :])
        frames.append(clock.sample_rows({"quantity": what, **seen}, seconds))
    return pd.concat(frames, ignore_index=True)


_NONE: dict[str, Any] = {
    **dict.fromkeys(("blocks", "threads", "taken_threads", "buckets", "bytes"), 0),
    **dict.fromkeys(("bytes_per_s_asked", "bytes_per_s", "communication_s"), 0.0),
    **dict.fromkeys(("exposed_communication_s", "overlap_share"), 0.0),
}


def _columns(sending: SendingTraining, setting: Setting, runs: Sequence[Run]) -> dict[str, Any]:
    """Return columns of one setting: how it sends, and what was seen of each run."""
    columns = {"ranks": setting.ranks, "policy": "none", **_NONE}
    if setting == EMPTY:
        return columns
    taken = sending.stand_in.columns(setting.footprint)
    columns |= {name: taken[name] for name in taken.keys() & columns}
    columns |= {"policy": setting.policy, "buckets": len(sending.sizes)}
    seen = pd.DataFrame([_seen(sending, setting, run) for run in runs])
    return columns | seen.to_dict("list")


def _seen(sending: SendingTraining, setting: Setting, run: Run) -> dict[str, float]:
    """Return what a run's marks and records say. Raises UserError where a message is not whole."""
    chunks, round_bytes = sending.chunks(setting)
    spans_s, sent = zip(*map(read_message, run.records), strict=True)
    whole = np.multiply(chunks, [at.blocks for at in setting.footprints(len(chunks))])
    if list(sent) != whole.tolist():
        raise UserError(
            f"stand-in as {setting.policy} {setting.footprint}: sent {sum(sent)} of {whole.sum()} chunks "
            "in the time that a message may take; ask for a higher rate"
        )
    n_bytes = int(np.dot(chunks, round_bytes))
    communication_s = max(TICK_S, sum(spans_s))
    at_s = run.marks.seconds()
    exposed_s = float(at_s[3] - at_s[2] if len(at_s) > 2 else at_s[1])
    return {
        "bytes": n_bytes,
        "bytes_per_s": n_bytes / communication_s,
        "communication_s": communication_s,
        "exposed_communication_s": exposed_s,
        "overlap_share": max(0.0, 1 - exposed_s / communication_s),
    }
