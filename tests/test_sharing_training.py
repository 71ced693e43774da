"""Training beside the stand-in: every gradient's bytes are sent once, in buckets, and the update waits."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable
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
from ddlkit.core.collective import COLLECTIVES
from ddlkit.core.errors import UserError
from ddlkit.core.units import KIB, MIB
from ddlkit.jobs.clock import Budget
from ddlkit.measure import networks
from ddlkit.measure.given import known
from ddlkit.measure.session import Unavailable
from workbook.record import sharing_training as training_module
from workbook.record import standin
from workbook.record import zoo as zoo
from workbook.record.sharing_training import (
    SendingTraining,
    Setting,
    chunks_of_messages,
    measure_sending,
)
from workbook.record.standin import Footprint, read_message

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


class Tied(nn.Module):
    """A parameter that two layers share, one that the loss does not see, and one that is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.unused, self.frozen = (
            nn.Linear(64, 64) for _ in range(4)
        )
        self.second.weight = self.first.weight
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.frozen(self.first(x)))


@pytest.fixture
def sending_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., SendingTraining]:
    """Make the training of a registered network, or of Tied, beside a played stand-in."""

    def inputs(n: int, _: object) -> tuple[Tensor, Tensor]:
        return torch.ones(n, 64), torch.zeros(n, dtype=torch.int64)

    monkeypatch.setitem(networks.NETWORKS, "tied", networks.Network(Tied, inputs))

    def make(network: str, most: int = 10**9) -> SendingTraining:
        stand_in: Any = PlayedStandIn(most)
        return SendingTraining(known(network, 2, torch.device("cpu")), stand_in)

    return make


@given(st.lists(st.tuples(st.integers(0, 10**9), st.integers(1, 10**7)), min_size=1))
def test_every_byte_travels_with_its_message_and_once(
    asked: list[tuple[int, int]],
) -> None:
    sizes, each = map(list, zip(*asked, strict=True))
    chunks = chunks_of_messages(sizes, each)
    surplus = np.cumsum(np.multiply(chunks, each)) - np.cumsum(sizes)
    assert (surplus >= 0).all(), "a message left bytes behind"
    assert (surplus < max(each)).all(), "something was sent twice"


@pytest.mark.parametrize(
    "network", ["tied", pytest.param("resnet18", marks=pytest.mark.rehearsal)]
)
def test_an_iteration_sends_all_gradients_by_its_records(
    network: str, sending_of: Any
) -> None:
    sending = sending_of(network)
    assert all(size >= MIB for size in sending.sizes[:-1]), "buckets are those of DDP"
    training = sending.training
    training.loss().backward()
    n_bytes = sum(
        p.grad.nbytes for p in training.model.parameters() if p.grad is not None
    )
    training.optimizer.zero_grad()
    with sending.hooked():
        for blocks, ranks in ((1, 2), (3, 8)):
            run = sending.iterate(Setting(Footprint(blocks, 1), ranks=ranks))
            sent_bytes = CHUNK_BYTES * sum(
                read_message(record)[1] for record in run.records
            )
            expected = COLLECTIVES["all_reduce"].bus_factor(ranks) * n_bytes
            assert expected <= sent_bytes < expected + blocks * CHUNK_BYTES


def test_the_update_waits_and_messages_leave_one_after_the_other_when_they_are_ready(
    sending_of: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(training_module, "ddp", plan.none)
    sending = sending_of("lenet5")
    training = sending.training
    began_s: list[float] = []
    training.optimizer.register_step_post_hook(
        lambda *_: began_s.append(time.perf_counter())
    )
    ready_s: list[float] = []
    note = training.watched(
        lambda _: None, lambda _: ready_s.append(time.perf_counter())
    )
    with note, sending.hooked():
        run = sending.iterate(SLOW)
    blocks = [
        np.reshape(record.tolist()[standin._HEAD :], (3, -1)) for record in run.records
    ]
    spans = [(begins.min() / 1e9, ends.max() / 1e9) for begins, ends, _ in blocks]
    assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(spans))
    assert all(at < begin for at, (begin, _) in zip(ready_s, spans, strict=True))
    assert spans[-1][1] < began_s[0]
    start, _, backward, waited, update = run.marks.seconds()
    assert start == 0 <= backward < waited < update


def test_the_table_can_be_saved_and_agrees_with_itself(
    sending_of: Any, tmp_path: Path
) -> None:
    compared = [SLOW, Setting(Footprint(1, 1, 20e6), Footprint(2, 1, 20e6), ranks=8)]
    where = {"network": "lenet5", "device": "cpu", "batch": 2, "precision": "fp32"}
    rows = measure_sending(sending_of("lenet5"), compared, TWICE).assign(**where)
    store.save_table(rows, tmp_path, "sharing-x", schema="sharing", command=[])
    assert rows.groupby("quantity").size().to_dict() == {"compute": 2, "iteration": 4}
    assert set(rows["policy"]) == {"none", "same", "last_2x1"}
    sent = rows[rows["quantity"] != "compute"]
    assert sent.eval("bytes_per_s * communication_s").tolist() == pytest.approx(
        sent["bytes"]
    )
    assert (sent["bytes_per_s"] <= 20e6 * 1.001).all()
    assert (sent["seconds"] > sent["exposed_communication_s"]).all()
    hidden_s = sent["communication_s"] - sent["exposed_communication_s"]
    shared_s = sent["overlap_share"] * sent["communication_s"]
    assert shared_s.tolist() == pytest.approx(hidden_s.clip(lower=0).tolist())


def test_a_message_that_was_not_sent_costs_its_iteration_and_not_the_network(
    sending_of: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    with pytest.raises(UserError, match="no setting is left of which a message"):
        measure_sending(sending_of("lenet5", most=1), [SLOW], TWICE)
    assert re.search(r"round 0 is not kept: .*sent \d+ of \d+", capsys.readouterr().err)
    whole = training_module.Run.columns
    read: list[training_module.Run] = []

    def second_fails(run: training_module.Run) -> dict[str, float]:
        read.append(run)
        if len(read) == 2:
            raise training_module.Incomplete("sent 1 of 2 chunks")
        return whole(run)

    monkeypatch.setattr(training_module.Run, "columns", second_fails)
    thrice = Budget(warmup=0, min_repeats=3, max_repeats=3)
    rows = measure_sending(sending_of("lenet5"), [SLOW], thrice)
    sent = rows[rows["quantity"] == "iteration"]
    assert sent["sample"].tolist() == [0, 2]


def test_settings_that_the_host_limits_are_not_kept(capsys: Any) -> None:
    iterations_s = np.array([1.0, 1.0, 1.1])
    host_bound = training_module.is_host_bound
    assert not host_bound([0.5, 0.6, 0.7], iterations_s, SLOW)
    assert host_bound([0.93, 0.95, 0.97], iterations_s, SLOW)
    assert "the host needs 95% of an iteration" in capsys.readouterr().err
    with pytest.raises(Unavailable, match="use a larger batch"):
        host_bound([0.93, 0.95, 0.97], iterations_s, training_module.EMPTY)
