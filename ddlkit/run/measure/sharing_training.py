"""Training iterations of one process beside communication for its own gradients (sharing Fig 4 to 8, Tab 2).

Gradients travel as DistributedDataParallel sends them: in buckets by its rule, each once its last gradient
is ready and all before it have left, one after the other in a stream of their own; the update waits for
them. What travels is the stand-in's kernel: for every bucket it moves what each rank of an all-reduce
sends, bucket bytes x 2 (n - 1) / n of n ranks that are not there.

Faithful: when messages start and in which order, how much they move, and what they take of the GPU. Not
faithful: nothing waits for a peer, and nothing is copied into buckets. At a paced rate the stand-in is a
fair neighbour; at full speed it only bounds what sharing can cost from above.

The paper's proposal, to give the last message more (5 Future work), is a policy here: the last is the one
with the gradient that is ready last. Those that wait behind another keep what they left with.
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
from ddlkit.run.instruments import clock
from ddlkit.run.instruments.clock import Budget, Floats, Marks, measure_interleaved, sample_rows
from ddlkit.run.measure.layers import Training, computing, device_named
from ddlkit.run.measure.standin import TICK_S, Footprint, GpuStandIn, read_message
from ddlkit.run.sessions import Unavailable

COMPUTE, ITERATION, COMMUNICATION = "compute", "iteration", "communication"
"""Quantities of the table: training with empty messages, with whole ones, and these without training."""


@dataclass(frozen=True)
class Setting:
    """How gradients are sent.

    footprint : of every message, but the last one where ``last`` says more; ranks : that are emulated
    """

    footprint: Footprint
    last: Footprint | None = None
    ranks: int = 2

    @property
    def policy(self) -> str:
        """As it appears in tables."""
        return f"last_{self.last.blocks}x{self.last.threads}" if self.last else "same"

    def footprints(self, messages: int) -> list[Footprint]:
        """Of each message."""
        return [self.footprint] * (messages - 1) + [self.last or self.footprint]


NOTHING = Setting(Footprint(1, 64))
"""How messages of no chunks leave: what the host spends on each is not what sharing costs."""
RATES = (0.0, 10e9)
# (blocks, threads): corners of the paper's grid, its default of NCCL, and what NCCL takes today.
GRID = ((1, 64), (1, 512), (2, 256), (4, 64), (4, 512), (16, 512))


def settings(brief: bool) -> list[Setting]:
    """Return what is compared at full speed and paced; ``brief``: one of each sort.

    Equal footprints, then the least for all messages with the most for the last, then more ranks, paced.
    """
    least, most = ([Footprint(*shape, rate) for rate in RATES] for shape in (GRID[0], GRID[-1]))
    equal = itertools.product(RATES, GRID[: 1 if brief else None])
    return [
        *(Setting(Footprint(*shape, rate)) for rate, shape in equal),
        *map(Setting, least, most),
        Setting(least[-1], ranks=8),
    ]


def chunks_of_messages(sizes: Sequence[float], round_bytes: Sequence[int]) -> list[int]:
    """How many chunks each block sends of each message, so that every byte travels with its message, once.

    sizes : bytes of each; round_bytes : that the blocks send with one chunk each, in that message. What
    they send beyond the end of a message is credited to the next.

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
    """One repeat: points in time by the device's clock, and what each message's kernel wrote down.

    marks : start, and end of forward, of backward, of waiting for messages, and of the update; of
        messages alone, start and end
    """

    marks: Marks
    records: Sequence[torch.Tensor]


class SendingTraining:
    """A network in training whose gradients a stand-in sends.

    sizes : (buckets,) bytes, in the order in which they leave
    """

    def __init__(self, training: Training, stand_in: GpuStandIn) -> None:
        self.training, self.stand_in = training, stand_in
        self.device = training.labels.device
        ready: list[str] = []
        with training.watched(lambda _: None, ready.append):
            training.iterate(lambda: None)
        named = dict(training.model.named_parameters())
        workload = Workload.from_arrays(0, [0] * len(ready), [named[one].nbytes for one in ready])
        plan = ddp(workload)
        self.sizes: list[int] = plan.group_bytes(workload).tolist()
        parts = [ready[part] for part in plan.slices]
        self._bucket = {tensor: k for k, part in enumerate(parts) for tensor in part}
        self._tensors = [len(part) for part in parts]
        self._start(None)

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Have gradients leave when they are ready, and the update wait for them."""
        with ExitStack() as hooks:
            hooks.enter_context(self.training.watched(lambda _: None, self._ready))
            handle = self.training.optimizer.register_step_pre_hook(self._wait)
            hooks.callback(handle.remove)
            yield

    def iterate(self, setting: Setting | None) -> Run:
        """One iteration, within `hooked`; without a setting its messages are empty."""
        run = self._start(setting)
        self.training.iterate(run.marks.mark)
        return run

    def send_all(self, setting: Setting | None) -> Run:
        """All messages, one after the other, without an iteration."""
        run = self._start(setting)
        run.marks.mark()
        for bucket in range(len(self.sizes)):
            self._send(bucket)
        self._wait()
        return run

    def chunks(self, setting: Setting) -> tuple[list[int], list[int]]:
        """(buckets,) chunks that each block sends, and bytes of these chunks of all blocks together."""
        factor = bus_factor("all_reduce", setting.ranks)
        footprints = setting.footprints(len(self.sizes))
        each = [one.blocks * self.stand_in.chunk_bytes(one.threads) for one in footprints]
        return chunks_of_messages([factor * size for size in self.sizes], each), each

    def _start(self, setting: Setting | None) -> Run:
        """Prepare whatever must be there before the clock starts."""
        self._missing, self._next = list(self._tensors), 0
        count = len(self.sizes)
        self._footprints = (setting or NOTHING).footprints(count)
        self._chunks = self.chunks(setting)[0] if setting else [0] * count
        records = [self.stand_in.record(one.blocks) for one in self._footprints]
        self._run = Run(Marks(self.device), records)
        return self._run

    def _ready(self, tensor: str) -> None:
        """A gradient is ready: whatever is whole leaves, in the order of the buckets."""
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
    network: str,
    batch: int,
    compared: Sequence[Setting],
    budget: Budget,
    *,
    device: str = "cpu",
    precision: str = "fp32",
) -> pd.DataFrame:
    """Table ``sharing``: one network's iterations without messages, and with them by each setting, in turn.

    budget : for all of it together

    ``seconds`` are the device's own: of quantity "compute" with messages of no bytes (as many, so that the
    host issues the same), of
    "iteration" with them, of "communication" the messages alone. bytes : that were sent; bytes_per_s :
    while they were under way; communication_s : the time in which they were; exposed_communication_s :
    from the end of backward to the update; overlap_share : of communication_s, what is not exposed.

    Raises UserError as `profile_layers` does, for a stand-in that does not compile, and for a message that
    did not end.
    """
    if device_named(device).type != "cuda":
        raise Unavailable("no stand-in: needs a GPU; on processors training_by_share")
    with computing(f"{network} at batch {batch} beside the stand-in", device, precision) as place:
        sending = SendingTraining(Training(network, batch, place, precision), GpuStandIn())
        return measure_sending(sending, network, compared, budget, precision)


def measure_sending(
    sending: SendingTraining,
    network: str,
    compared: Sequence[Setting],
    budget: Budget,
    precision: str = "fp32",
) -> pd.DataFrame:
    """Measure the same of a training that is ready."""
    runs: dict[tuple[str, Setting | None], list[Run]] = {(COMPUTE, None): []}
    runs |= {(what, way): [] for way in compared for what in (ITERATION, COMMUNICATION)}

    def once(what: str, setting: Setting | None) -> Marks:
        send = sending.send_all if what == COMMUNICATION else sending.iterate
        run = send(setting)
        runs[what, setting].append(run)
        return run.marks

    with sending.hooked():
        actions = {key: partial(once, *key) for key in runs}
        wait = clock.synchronizer(sending.device)
        samples = measure_interleaved(actions, budget, synchronize=wait)
    place, batch = sending.device.type, len(sending.training.labels)
    labels = {"network": network, "device": place, "batch": batch, "precision": precision}
    frames = []
    for (what, setting), seconds in samples.items():
        kept = runs[what, setting][-len(seconds) :]
        seen = _columns(sending, setting, kept)
        frames.append(sample_rows({**labels, "quantity": what, **seen}, seconds))
    return pd.concat(frames, ignore_index=True)


def _columns(
    sending: SendingTraining, setting: Setting | None, runs: Sequence[Run]
) -> dict[str, Any]:
    """Return columns of one setting: how it sends, and what was seen of each run."""
    columns: dict[str, Any] = {
        **{"ranks": 1, "policy": "none"},
        **dict.fromkeys(("blocks", "threads", "taken_threads", "buckets", "bytes"), 0),
        **dict.fromkeys(("bytes_per_s_asked", "bytes_per_s", "communication_s"), 0.0),
        **dict.fromkeys(("exposed_communication_s", "overlap_share"), 0.0),
    }
    if not setting:
        return columns
    taken = sending.stand_in.columns(setting.footprint)
    columns |= {name: taken[name] for name in taken if name in columns}
    columns |= {"ranks": setting.ranks, "policy": setting.policy, "buckets": len(sending.sizes)}
    seen = [_seen(sending, setting, run) for run in runs]
    return columns | {name: [row[name] for row in seen] for name in seen[0]}


def _seen(sending: SendingTraining, setting: Setting, run: Run) -> dict[str, float]:
    """Return what a run's marks and records say. Raises UserError where a message is not whole."""
    chunks, round_bytes = sending.chunks(setting)
    spans_s, sent = zip(*map(read_message, run.records), strict=True)
    asked = [n * one.blocks for n, one in zip(chunks, setting.footprints(len(chunks)), strict=True)]
    if list(sent) != asked:
        raise UserError(
            f"stand-in as {setting.policy} {setting.footprint}: sent {sum(sent)} of {sum(asked)} chunks "
            "in the time that a message may take; ask for a higher rate"
        )
    n_bytes = int(np.dot(chunks, round_bytes))
    communication_s = max(TICK_S, sum(spans_s))
    at_s: Floats = run.marks.seconds()
    exposed_s = float(at_s[3] - at_s[2] if len(at_s) > 2 else at_s[1])
    return {
        "bytes": n_bytes,
        "bytes_per_s": n_bytes / communication_s,
        "communication_s": communication_s,
        "exposed_communication_s": exposed_s,
        "overlap_share": max(0.0, 1 - exposed_s / communication_s),
    }
