"""Training beside the stand-in: every gradient's bytes are sent once, in buckets, and the update waits."""

from __future__ import annotations

import itertools
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from ddlkit import store
from ddlkit.core import plan
from ddlkit.core.errors import UserError
from ddlkit.core.link import bus_factor
from ddlkit.core.units import KIB, MIB
from ddlkit.run.clock import Budget
from ddlkit.run.measure import sharing_training, standin
from ddlkit.run.measure.layers import Training
from ddlkit.run.measure.sharing_training import (
    SendingTraining,
    Setting,
    chunks_of_messages,
    measure_sending,
)
from ddlkit.run.measure.standin import Footprint, read_message
from ddlkit.run.nets import registry as networks

CPU = torch.device("cpu")
TWICE = Budget(warmup=1, min_repeats=2, max_repeats=2)
SLOW = Setting(Footprint(1, 1, 20e6))  # a few milliseconds for a small network


CHUNK_BYTES = 4 * KIB


class PlayedStandIn:
    """Sends as `standin.GpuStandIn` does, at 20 MB/s, one message after the other, by a thread of its own.

    most : chunks of each block, after which a message ends even if it is not whole
    """

    def __init__(self, most: int = 10**9) -> None:
        self.most, self._stream = most, ThreadPoolExecutor(1)
        self._sent: list[Future[None]] = []

    def chunk_bytes(self, threads: int) -> int:
        return CHUNK_BYTES

    def columns(self, footprint: Footprint) -> dict[str, Any]:
        shape = {"blocks": footprint.blocks, "threads": footprint.threads}
        return {**shape, "taken_threads": footprint.threads, "bytes_per_s_asked": 20e6}

    def record(self, blocks: int) -> Tensor:
        return torch.zeros(standin._HEAD + 3 * blocks, dtype=torch.int64)

    def send(self, footprint: Footprint, chunks: int, record: Tensor) -> None:
        self._sent.append(self._stream.submit(self._message, footprint, chunks, record))

    def _message(self, footprint: Footprint, chunks: int, record: Tensor) -> None:
        blocks, sent = footprint.blocks, min(chunks, self.most)
        begin = time.perf_counter_ns()
        time.sleep(sent * blocks * CHUNK_BYTES / 20e6)
        times = [begin] * blocks + [time.perf_counter_ns()] * blocks
        record[standin._HEAD :] = torch.tensor([*times, *[sent] * blocks])

    def join(self) -> None:
        for message in self._sent:
            message.result()
        self._sent = []


def sending_of(training: Training, most: int = 10**9) -> SendingTraining:
    played: Any = PlayedStandIn(most)
    return SendingTraining(training, played)


class Tied(nn.Module):
    """A parameter that two layers share, one that the loss does not see, and one that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.second.weight = self.first.weight
        self.unused = nn.Linear(64, 64)
        self.frozen = nn.Linear(64, 64).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.frozen(self.first(x)))


def training_of(network: str, monkeypatch: pytest.MonkeyPatch) -> Training:
    """One of a registered network, or of Tied."""

    def inputs(n: int, _: object) -> tuple[Tensor, Tensor]:
        return torch.ones(n, 64), torch.zeros(n, dtype=torch.int64)

    monkeypatch.setitem(networks.NETWORKS, "tied", networks.Network(Tied, inputs))
    torch.manual_seed(0)
    return Training(network, 2, CPU, "fp32")


def gradient_bytes(training: Training) -> int:
    """Bytes that one backward pass leaves."""
    nn.functional.cross_entropy(training.model(training.inputs), training.labels).backward()
    found = sum(p.grad.nbytes for p in training.model.parameters() if p.grad is not None)
    training.optimizer.zero_grad()
    return found


# -- how much is sent --------------------------------------------------------------------------

messages = st.lists(st.tuples(st.integers(0, 10**9), st.integers(1, 10**7)), min_size=1)


@given(messages)
def test_every_byte_travels_with_its_message_and_once(asked: list[tuple[int, int]]) -> None:
    sizes, each = map(list, zip(*asked, strict=True))
    chunks = chunks_of_messages(sizes, each)
    surplus = np.cumsum(np.multiply(chunks, each)) - np.cumsum(sizes)
    assert (surplus >= 0).all(), "a message left bytes behind"
    assert (surplus < max(each)).all(), "something was sent twice"


@pytest.mark.parametrize("network", ["lenet5", "tied"])
@pytest.mark.parametrize("ranks", [2, 8])
def test_an_iteration_sends_all_gradients_by_its_records(
    network: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = training_of(network, monkeypatch)
    expected = bus_factor("all_reduce", ranks) * gradient_bytes(training)
    sending = sending_of(training)
    with sending.hooked():
        for footprint in (Footprint(1, 1), Footprint(3, 1)):
            run = sending.iterate(Setting(footprint, ranks=ranks))
            sent_bytes = CHUNK_BYTES * sum(read_message(record)[1] for record in run.records)
            assert expected <= sent_bytes < expected + footprint.blocks * CHUNK_BYTES


def test_buckets_are_those_of_ddp() -> None:
    training = Training("resnet18", 1, CPU, "fp32")
    sending = sending_of(training)
    sizes = sending.sizes
    assert sum(sizes) == sum(p.nbytes for p in training.model.parameters())
    assert MIB <= sizes[0] < sizes[1] and sizes[1] >= 25 * MIB and len(sizes) == 3


# -- when it is sent ---------------------------------------------------------------------------


def spans_s(records: list[Tensor]) -> list[tuple[float, float]]:
    """Begin and end of each message, by `time.perf_counter`."""
    blocks = [np.reshape(record.tolist()[standin._HEAD :], (3, -1)) for record in records]
    return [(begins.min() / 1e9, ends.max() / 1e9) for begins, ends, _ in blocks]


def test_the_update_waits_and_messages_leave_one_after_the_other_when_they_are_ready(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sharing_training, "ddp", plan.none)
    training = training_of("lenet5", monkeypatch)
    sending = sending_of(training)
    assert len(sending.sizes) == 10
    began_s: list[float] = []
    training.optimizer.register_step_post_hook(lambda *_: began_s.append(time.perf_counter()))
    ready_s: list[float] = []
    note = training.watched(lambda _: None, lambda _: ready_s.append(time.perf_counter()))
    with note, sending.hooked():
        run = sending.iterate(SLOW)
    spans = spans_s(list(run.records))
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    assert all(at < begin for at, (begin, _) in zip(ready_s, spans, strict=True))
    assert spans[-1][1] < began_s[0]
    start, _, backward, waited, update = run.marks.seconds()
    assert start == 0 <= backward < waited < update
    # 247 kB at 20 MB/s: the last chunk too takes its time.
    assert sum(end - begin for begin, end in spans) > 0.99 * sum(sending.sizes) / 20e6


# -- policies and rows -------------------------------------------------------------------------


def test_the_table_can_be_saved_and_agrees_with_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = [SLOW, Setting(Footprint(1, 1, 20e6), Footprint(2, 1, 20e6), ranks=8)]
    sending = sending_of(training_of("lenet5", monkeypatch))
    table = measure_sending(sending, "lenet5", compared, TWICE)
    path = store.save_table(table, tmp_path, "sharing-x", schema="sharing", command=[])
    rows = store.load_table(path, "sharing")
    assert rows.groupby("quantity").size().to_dict() == {
        **{"compute": 2, "iteration": 4, "communication": 4}
    }
    sent = rows[rows["quantity"] != "compute"]
    assert (sent["bytes_per_s"] * sent["communication_s"]).to_numpy() == pytest.approx(
        sent["bytes"]
    )
    assert (sent["bytes_per_s"] <= 20e6 * 1.001).all()
    alone = sent[sent["quantity"] == "communication"]
    assert (alone["seconds"] >= alone["communication_s"]).all()
    assert (alone["overlap_share"] == 0).all()
    beside = sent[sent["quantity"] == "iteration"]
    assert (beside["seconds"] > beside["exposed_communication_s"]).all()
    assert set(rows["policy"]) == {"none", "same", "last_2x1"}


def test_a_message_that_does_not_end_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    sending = sending_of(training_of("lenet5", monkeypatch), most=1)
    with pytest.raises(UserError, match=r"sent \d+ of \d+ chunks in the time"):
        measure_sending(sending, "lenet5", [SLOW], TWICE)
