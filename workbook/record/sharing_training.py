"""Training iterations of one process that shares its GPU with messages of its own gradients.

Beside the stand-in (sharing Fig 4 to 8, Tab 2) gradients travel as DistributedDataParallel sends them: in
buckets by its rule, each once its last gradient is ready and all before it have left; the update waits for
them. For every bucket the stand-in moves what each rank of an all-reduce sends: bucket bytes x 2 (n - 1) / n
of n ranks that are not there. The paper's proposal, to give the last message more (5), is a policy here.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd

from ddlkit.core.collective import COLLECTIVES
from ddlkit.core.errors import UserError
from ddlkit.core.plan import ddp
from ddlkit.core.workload import Workload
from ddlkit.jobs import clock
from ddlkit.jobs.clock import Budget, Marks
from ddlkit.measure.given import Training, known
from ddlkit.measure.layers import compute_on
from ddlkit.measure.session import Unavailable
from ddlkit.measure.training import PRECISION
from workbook.record.standin import TICK_S, Footprint, GpuStandIn, read_message


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


# Messages of no chunks: what the host spends on each is not what sharing costs.
EMPTY = Setting(Footprint(1, 64), ranks=1)
RATES = (0.0, 10e9)
# (blocks, threads): corners of the paper's grid, its default of NCCL, and what NCCL takes today.
GRID = ((1, 64), (1, 512), (2, 256), (4, 64), (4, 512), (16, 512))


def sharing_settings(brief: bool) -> list[Setting]:
    """Return equal footprints, the last with more, and more ranks; ``brief``: few."""
    least, most = (
        [Footprint(*shape, rate) for rate in RATES] for shape in (GRID[0], GRID[-1])
    )
    equal = itertools.product(RATES, GRID[: 1 if brief else None])
    alike = (Setting(Footprint(*shape, rate)) for rate, shape in equal)
    return [*alike, *map(Setting, least, most), Setting(least[-1], ranks=8)]


def chunks_of_messages(sizes: Sequence[float], round_bytes: Sequence[int]) -> list[int]:
    """Return each block's chunks of each message; what exceeds one is credited to the next."""
    ends = np.cumsum(sizes)
    chunks, sent = [], 0
    for end, each in zip(ends, round_bytes, strict=True):
        chunks.append(max(0, int(np.ceil((end - sent) / each))))
        sent += chunks[-1] * each
    return chunks


class Run:
    """One repeat, and what is sent in it: by which footprint, chunks of each block, and what a kernel wrote.

    marks : start, ends of forward, backward, waiting and update
    """

    def __init__(
        self, sizes: Sequence[int], setting: Setting, stand_in: GpuStandIn
    ) -> None:
        self.footprints = [setting.footprint] * (len(sizes) - 1)
        self.footprints.append(setting.last or setting.footprint)
        each = [at.blocks * stand_in.chunk_bytes(at.threads) for at in self.footprints]
        # One rank alone sends nothing: 0 bytes.
        all_reduce = COLLECTIVES["all_reduce"]
        sent = [all_reduce.wire_bytes(setting.ranks, size) for size in sizes]
        self.chunks = chunks_of_messages(sent, each)
        self.n_bytes = int(np.dot(self.chunks, each))
        self.records = [
            stand_in.record(footprint.blocks) for footprint in self.footprints
        ]
        self.marks = Marks(self.records[0].device)

    def seen(self) -> dict[str, float]:
        """Return columns of what marks and records say. Raises UserError where a message is not whole."""
        spans_s, sent = zip(*map(read_message, self.records), strict=True)
        whole = np.multiply(self.chunks, [at.blocks for at in self.footprints])
        if list(sent) != whole.tolist():
            raise UserError(
                f"stand-in as {self.footprints[-1]}: sent {sum(sent)} of {whole.sum()} chunks "
                "in the time that a message may take; ask for a higher rate"
            )
        communication_s = max(TICK_S, sum(spans_s))
        _, _, backward_s, waited_s, _ = self.marks.seconds().tolist()
        exposed_s = waited_s - backward_s
        return {
            "bytes": self.n_bytes,
            "bytes_per_s": self.n_bytes / communication_s,
            "communication_s": communication_s,
            "exposed_communication_s": exposed_s,
            "overlap_share": max(0.0, 1 - exposed_s / communication_s),
        }


class SendingTraining:
    """A network in training whose gradients a stand-in sends; sizes : (buckets,) bytes, as they leave."""

    def __init__(self, training: Training, stand_in: GpuStandIn) -> None:
        self.training, self.stand_in = training, stand_in
        ready: list[str] = []
        with training.watched(lambda _: None, ready.append):
            training.iterate()
        named = dict(training.model.named_parameters())
        n_bytes = [named[tensor].nbytes for tensor in ready]
        plan = ddp(workload := Workload.from_arrays(0, [0] * len(ready), n_bytes))
        self.sizes: list[int] = plan.group_bytes(workload).tolist()
        parts = [ready[part] for part in plan.slices]
        self._bucket = {tensor: k for k, part in enumerate(parts) for tensor in part}
        self._tensors = [len(part) for part in parts]

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Have gradients leave when they are ready, and the update wait for them."""
        handle = self.training.optimizer.register_step_pre_hook(self._wait)
        with self.training.watched(lambda _: None, self._ready):
            yield
        handle.remove()

    def iterate(self, setting: Setting) -> Run:
        """Do one iteration, within `hooked`."""
        self._missing, self._next = list(self._tensors), 0
        self._run = Run(self.sizes, setting, self.stand_in)
        self.training.iterate(self._run.marks.mark)
        return self._run

    def _ready(self, tensor: str) -> None:
        """Send, in the order of the buckets, whatever is whole now that this gradient is ready."""
        self._missing[self._bucket[tensor]] -= 1
        run = self._run
        while self._next < len(self._missing) and not self._missing[self._next]:
            message = (
                run.footprints[self._next],
                run.chunks[self._next],
                run.records[self._next],
            )
            self.stand_in.send(*message)
            self._next += 1

    def _wait(self, *_: object) -> None:
        self.stand_in.join()
        self._run.marks.mark()


def measure_sharing(
    device: str, network: str, batch: int, compared: Sequence[Setting], budget: Budget
) -> pd.DataFrame:
    """Return table ``sharing``: one network's iterations without messages, and with them by each setting.

    ``seconds`` are the device's own: of quantity "compute" with messages of no bytes (as many, so that the
    host issues the same), of "iteration" with them.
    communication_s : in which messages were under way; exposed_communication_s : from the end of backward to
        the update; overlap_share : of communication_s, what is not exposed
    """
    if device == "cpu":
        raise Unavailable("no stand-in: needs a GPU")
    with compute_on(f"{network} at batch {batch} beside the stand-in", device) as place:
        sending = SendingTraining(known(network, batch, place, PRECISION), GpuStandIn())
        rows = measure_sending(sending, compared, budget)
    return rows.assign(
        network=network, device=place.type, batch=batch, precision=PRECISION
    )


def measure_sending(
    sending: SendingTraining, compared: Sequence[Setting], budget: Budget
) -> pd.DataFrame:
    """Return the same rows of a training that is ready, which they do not name."""
    runs: dict[Setting, list[Run]] = {setting: [] for setting in (EMPTY, *compared)}

    def once(setting: Setting) -> Marks:
        runs[setting].append(sending.iterate(setting))
        return runs[setting][-1].marks

    with sending.hooked():
        actions = {setting: partial(once, setting) for setting in runs}
        wait = clock.synchronizer(sending.training.device)
        samples = clock.measure_interleaved(actions, budget, synchronize=wait)
    frames = []
    for setting, seconds in samples.items():
        columns = {
            "quantity": "compute",
            "ranks": setting.ranks,
            "policy": "none",
            **_NONE,
        }
        if setting != EMPTY:
            taken = sending.stand_in.columns(setting.footprint)
            columns |= {name: taken[name] for name in taken.keys() & columns}
            seen = pd.DataFrame([run.seen() for run in runs[setting][-len(seconds) :]])
            columns |= {"quantity": "iteration", "policy": setting.policy, **seen}
            columns |= {"buckets": len(sending.sizes)}
        frames.append(clock.sample_rows(columns, seconds))
    return pd.concat(frames, ignore_index=True)


_NONE: dict[str, Any] = {
    **dict.fromkeys(("blocks", "threads", "taken_threads", "buckets", "bytes"), 0),
    **dict.fromkeys(("bytes_per_s_asked", "bytes_per_s", "communication_s"), 0.0),
    **dict.fromkeys(("exposed_communication_s", "overlap_share"), 0.0),
}
