"""Layer profiles: sums are what was measured without hooks, and each time is with its own tensor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from torch import Tensor, nn

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.jobs import clock as clocks
from ddlkit.jobs import vitals
from ddlkit.jobs.clock import Budget, Marks
from ddlkit.jobs.launch import Loopback, launch
from ddlkit.measure import layers, networks
from ddlkit.measure.given import known
from ddlkit.measure.layers import LayersSettings, layers_job, profile_layers
from ddlkit.measure.session import engine
from places import PATIENCE_S
from test_clock import Simulated
from workbook.record import zoo as zoo

ONCE = Budget(warmup=0, min_repeats=1, max_repeats=1)
FEW = Budget(warmup=1, min_repeats=5, max_repeats=15, max_s=1.0)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Simulated:
    """What is timed takes no time but what is added here: how fast this machine is does not matter."""
    simulated = Simulated()
    monkeypatch.setattr(clocks, "perf_counter", simulated)
    return simulated


class Slow(nn.Module):
    """A layer that takes a known time; without parameters it stands for an activation."""

    def __init__(
        self,
        clock: Simulated,
        forward_s: float,
        backward_s: float,
        *,
        weight: bool = True,
    ) -> None:
        super().__init__()
        self.clock, self.forward_s, self.backward_s = clock, forward_s, backward_s
        self.weight = nn.Parameter(torch.ones(4)) if weight else 1.0

    def forward(self, x: Tensor) -> Tensor:
        self.clock.now += self.forward_s
        out = x * self.weight
        if out.requires_grad:  # not in what checkpointing will compute anew
            out.register_hook(self.goes_back)
        return out

    def goes_back(self, _: Tensor) -> None:
        self.clock.now += self.backward_s


def _enter(monkeypatch: pytest.MonkeyPatch, *modules: nn.Module) -> nn.Sequential:
    """Make these modules, in a row, a network by the name of "mine"."""
    network = nn.Sequential(*modules)

    def sample(n: int, _: object) -> tuple[Tensor, Tensor]:
        return torch.ones(n, 4), torch.zeros(n, dtype=torch.int64)

    mine = networks.Network(lambda: network, sample)
    monkeypatch.setitem(networks.NETWORKS, "mine", mine)
    return network


def test_each_time_is_with_its_own_tensor(
    monkeypatch: pytest.MonkeyPatch, clock: Simulated
) -> None:
    _enter(
        monkeypatch,
        Slow(clock, 0.004, 0.020),
        Slow(clock, 0.012, 0.006),
        Slow(clock, 0.006, 0.007, weight=False),
        Slow(clock, 0.008, 0.010),
    )
    profile, _ = profile_layers("mine", 2, threads=1, budget=FEW)
    assert profile.tensor == ("0.weight", "1.weight", "3.weight")
    # What has no parameters counts to the layer before it, forward and backward.
    assert profile.forward_s == pytest.approx([0.004, 0.018, 0.008])
    assert profile.backward_s == pytest.approx([0.020, 0.013, 0.010])


def test_sums_are_the_unhooked_times_even_if_hooks_are_slow(
    monkeypatch: pytest.MonkeyPatch, clock: Simulated
) -> None:
    mark = Marks.mark

    def slow_mark(self: Marks) -> None:
        clock.now += 0.001
        mark(self)

    monkeypatch.setattr(Marks, "mark", slow_mark)
    profile, samples = profile_layers("lenet5", 4, budget=FEW, threads=1)
    median = samples.groupby("quantity")["seconds"].median()
    assert median["hooked_iteration"] > median["unhooked_iteration"] + 0.005
    assert median["forward"] > 0 and median["backward"] > 0
    assert profile.forward_s.sum() == pytest.approx(median["forward"], rel=1e-9)
    assert profile.backward_s.sum() == pytest.approx(median["backward"], rel=1e-9)
    assert profile.update_s == pytest.approx(median["update"], rel=1e-9)


def test_precision_is_what_is_asked_for_and_as_before_afterwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CUDA's convolutions take TF32 unless they are told not to."""
    seen: list[object] = []
    switches: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)

    def note(_: object, __: object, output: Tensor) -> None:
        seen.extend([output.dtype, *(switch.allow_tf32 for switch in switches)])

    model = _enter(monkeypatch, nn.Linear(4, 3))
    model[0].register_forward_hook(note)
    before = [switch.allow_tf32 for switch in switches]
    for switch in switches:
        switch.allow_tf32 = True
    for precision, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        profile_layers("mine", 2, threads=1, precision=precision, budget=ONCE)
        assert seen[-3:] == [dtype, False, False]
    for switch, was in zip(switches, before, strict=True):
        assert switch.allow_tf32
        switch.allow_tf32 = was


@given(arrays(float, (3, 5), elements=st.floats(0, 10)))
def test_spans_to_slowest_end_waits_for_the_last_rank_at_every_point(
    spans: np.ndarray,
) -> None:
    latest = spans.cumsum(axis=1).max(axis=0)
    line = layers._spans_to_slowest_end(spans[0], lambda ends: np.maximum(ends, latest))
    assert line.cumsum() == pytest.approx(latest)


def test_two_ranks_profile_at_the_same_time(tmp_path: Path) -> None:
    settings = LayersSettings({"lenet5": 8}, Budget(1, max_repeats=8, max_s=1.0))
    launch(
        layers_job,
        settings,
        ranks=2,
        place=Loopback(),
        join={"torch_threads": 1},
        timeout_s=PATIENCE_S,
        out=tmp_path,
    )
    profile = store.read_profile(tmp_path / "layers.csv", ranks=2, threads=1)
    samples = store.load_table(tmp_path / "samples.csv", "samples")
    median = samples.groupby("quantity")["seconds"].median()
    assert set(samples["ranks"]) == {2}
    assert len(profile.tensor) == 10
    phases = [profile.forward_s.sum(), profile.backward_s.sum(), profile.update_s]
    assert phases == pytest.approx(
        median[["forward", "backward", "update"]].to_list(), rel=1e-9
    )


@pytest.mark.parametrize(
    ("batch", "precision", "line"),
    [
        (0, "fp32", "batch 0 of lenet5"),
        (10**12, "fp32", "out of memory: lenet5 at batch 1000000000000 on cpu"),
        (2, "tf32", "precision 'tf32' needs a CUDA device"),
    ],
)
def test_a_mistake_is_one_line(batch: int, precision: str, line: str) -> None:
    with pytest.raises(UserError, match=f"^{line}.*$"):
        profile_layers("lenet5", batch, precision=precision, budget=ONCE)


def test_an_iteration_that_cannot_be_a_graph_costs_only_that(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse() -> None:
        raise RuntimeError(
            "CUDA error: operation not permitted when stream is capturing\nmore"
        )

    monkeypatch.setattr(torch.cuda, "Stream", refuse)
    monkeypatch.setattr(torch.cuda, "default_stream", lambda: "default")
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    assert not layers._graph(known("lenet5", 2, torch.device("cpu")))
    assert capsys.readouterr().err.endswith("when stream is capturing\n")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_is_timed_by_its_own_clock() -> None:
    profile, samples = profile_layers("vit_b_16", 8, "cuda", "bf16", FEW)
    median = samples.groupby("quantity")["seconds"].median()
    assert median["issue"] > 0 and median["graph_iteration"] > 0
    assert profile.backward_s.sum() == pytest.approx(median["backward"], rel=1e-9)


# -- what a processor can show of a GPU --------------------------------------------------


def test_a_capture_that_fails_gives_the_default_stream_back_and_spends_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in torch 2.11, a failed capture leaves its stream current and random numbers broken."""
    current = ["default"]
    broken = []

    @contextmanager
    def failing_capture(graph: object, stream: str) -> Iterator[None]:
        current[0] = stream
        broken.append("random numbers")
        raise RuntimeError("operation not permitted when stream is capturing\nmore")
        yield

    def rand(size: int, device: str) -> None:
        if broken:
            raise RuntimeError("Offset increment outside graph capture")

    stream = SimpleNamespace(wait_stream=lambda other: None)
    for name, stand_in in {
        "Stream": lambda: stream,
        "stream": nullcontext,
        "CUDAGraph": object,
        "graph": failing_capture,
        "synchronize": lambda: None,
        "is_initialized": lambda: True,
        "empty_cache": lambda: None,
        "current_stream": lambda: current[0],
        "default_stream": lambda: "default",
        "set_stream": lambda other: current.__setitem__(0, other),
    }.items():
        monkeypatch.setattr(torch.cuda, name, stand_in)
    monkeypatch.setattr(torch, "rand", rand)
    training: Any = SimpleNamespace(device=torch.device("cpu"), iterate=lambda: None)
    assert engine._gpu_is_usable()
    assert layers._graph(training) == {}
    assert current == ["default"]
    assert not engine._gpu_is_usable(), "the next point gets another process"


@pytest.mark.parametrize(("device", "measured"), [("cpu", 3), ("cuda", 1)])
def test_what_a_host_disturbs_is_measured_again_on_a_processor_only(
    device: str, measured: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    disturbed = vitals.Usage(busy=1.0, stolen=0.5)
    watch = SimpleNamespace(usage=lambda: disturbed)
    calls: list[object] = []
    monkeypatch.setattr(vitals, "RETRY_S", 0.0)
    monkeypatch.setattr(layers, "Watch", lambda rank: watch)
    monkeypatch.setattr(layers, "_measure", lambda *words: calls.append(words))
    training: Any = SimpleNamespace(device=torch.device(device))
    layers._measure_undisturbed(training, Budget(), None)
    assert len(calls) == measured
