"""Selectors: exactly the set that torch.topk finds, whatever the numbers; and the table of their times."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.core.units import MIB
from ddlkit.run.instruments import clock
from ddlkit.run.instruments.clock import Budget
from ddlkit.run.measure import selection, selection_beside
from ddlkit.run.sessions.kinds import Here, selections
from ddlkit.run.sessions.session import Partial

GPU = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")],
)
DEVICES = ("cpu", GPU)
SELECTORS = {"topk": selection.topk, **selection.SELECTORS}
ONCE = Budget(warmup=0, min_repeats=1, max_repeats=1)

SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    **selection.DISTRIBUTIONS,
    "equal": lambda x: torch.full_like(x, 0.5),
    "zeros": torch.zeros_like,
    "one": lambda x: (torch.arange(len(x), device=x.device) == len(x) // 2).float(),
    "two values": lambda x: (x > 1).float(),
    "ascending": lambda x: x.sort().values,
    "descending": lambda x: x.sort(descending=True).values,
    "cauchy": lambda x: x / x.roll(7),
    "infinite": lambda x: torch.where(x > 2, float("inf"), x),
    # What a sample sees says little of the rest.
    "late": lambda x: torch.where(torch.arange(len(x), device=x.device) > 0.99 * len(x), 9 + x, x),
    "rows": lambda x: x * (torch.arange(len(x), device=x.device) % 64 == 0),
}


def _small_pieces(patch: pytest.MonkeyPatch) -> None:
    """Let our selectors work on hundreds of elements too, where hypothesis can look into corners."""
    for name, value in (("SMALL", 32), ("MEDIUM", 64), ("GROUP", 8), ("SAMPLE", 32)):
        patch.setattr(selection, name, value)


def _check(selector: selection.Selector, magnitudes: Tensor, ordered: Tensor, k: int) -> None:
    """The laws: k different positions, of all that is above the k-th largest, and else of its equals."""
    positions = selector(magnitudes, k)
    smallest = ordered[-k]
    assert positions.shape == (k,)
    assert torch.zeros_like(magnitudes).index_fill_(0, positions, 1.0).sum(dtype=torch.int64) == k
    found = magnitudes[positions]
    assert found.min() == smallest
    assert (found > smallest).sum() == (magnitudes > smallest).sum()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", selection.SELECTORS)
def test_selects_what_topk_selects(name: str, shape: str, device: str) -> None:
    d = 300_007  # neither round nor a multiple of anything here
    normal = torch.randn(d, generator=torch.Generator(device).manual_seed(1), device=device)
    magnitudes = SHAPES[shape](normal).abs()
    ordered = magnitudes.sort().values
    for k in (1, 30, 300, 3_001, 30_000, d // 2, d):
        _check(selection.SELECTORS[name], magnitudes, ordered, k)


@st.composite
def _few_values(draw: st.DrawFn) -> tuple[Tensor, int]:
    """Up to 400 magnitudes with many ties, in an order of hypothesis's liking, and a k."""
    kinds = draw(st.lists(st.floats(0, 2.0**100, width=32), min_size=1, max_size=6))
    d = draw(st.integers(1, 400))
    which = draw(st.lists(st.integers(0, len(kinds) - 1), min_size=d, max_size=d))
    return torch.tensor([kinds[i] for i in which]), draw(st.integers(1, d))


@pytest.mark.parametrize("name", selection.SELECTORS)
@given(case=_few_values())
@settings(max_examples=150, deadline=None)
def test_selects_what_topk_selects_among_ties(name: str, case: tuple[Tensor, int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        _small_pieces(patch)
        magnitudes, k = case
        _check(selection.SELECTORS[name], magnitudes, magnitudes.sort().values, k)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", SELECTORS)
@pytest.mark.parametrize("d", [10, 300_007])
@pytest.mark.parametrize("nans", [1, 2, 10])
def test_nan_is_refused_wherever_it_is(name: str, d: int, nans: int, device: str) -> None:
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        magnitudes = torch.randn(d, generator=generator).abs()
        magnitudes[torch.randperm(d, generator=generator)[:nans]] = float("nan")
        with pytest.raises(UserError, match="NaN"):
            SELECTORS[name](magnitudes.to(device), max(1, d // 1000))


@pytest.mark.parametrize("name", SELECTORS)
@pytest.mark.parametrize(("d", "k"), [(5, 0), (5, 6), (5, -1), (300_007, 0), (300_007, 300_008)])
def test_k_is_within_the_elements(name: str, d: int, k: int) -> None:
    with pytest.raises(UserError, match="select"):
        SELECTORS[name](torch.ones(d), k)


@pytest.mark.parametrize("name", selection.SELECTORS)
def test_little_is_left_to_topk(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """At a density of 0.1% torch.topk sees a small part of the elements: that is what makes them fast."""
    d, k = 2**20, 1049
    sizes: list[int] = []
    original: Callable[..., object] = torch.topk

    def counting(x: Tensor, *arguments: object, **options: object) -> object:
        sizes.append(x.numel())
        return original(x, *arguments, **options)

    monkeypatch.setattr(torch, "topk", counting)
    selection.SELECTORS[name](torch.randn(d).abs(), k)
    assert 0 < sum(sizes) < d / 10


def test_table_has_every_operation_once_per_density(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "FLUSH_BYTES", {"cpu": MIB})
    table = selection.measure_selection("cpu", 1_000, (1e-3, 0.1), ONCE)
    assert (table["seconds"] > 0).all()
    counts = table[table["distribution"] == "normal"].groupby("density")["operation"].agg(set)
    ways = {"topk_sorted", "topk_unsorted", *selection.SELECTORS}
    assert counts[1.0] == {"accumulate", "abs"}
    around = {"gather", "zero", *(f"scatter_add_{workers}" for workers in selection.WORKERS)}
    assert counts[1e-3] == counts[0.1] == ways | around
    others = table[table["distribution"] != "normal"]
    assert set(others["distribution"]) == set(selection.DISTRIBUTIONS) - {"normal"}
    assert set(others["operation"]) == ways


def test_operations_do_what_they_are_called() -> None:
    tensors = selection._Tensors(1_000, "normal", torch.device("cpu"), 0)
    gradient, residual = tensors.gradients[0].clone(), tensors.residuals[0].clone()
    actions = {**tensors.dense(), **tensors.select(100), **tensors.exchange(100)}
    actions["accumulate"](0)
    assert torch.equal(tensors.residuals[0], residual + gradient)
    chosen = torch.topk(gradient.abs(), 100).indices
    gathered = actions["gather"](0)
    assert isinstance(gathered, Tensor)
    assert torch.equal(gathered.sort().values, gradient[chosen].sort().values)
    actions["zero"](0)
    assert torch.equal(
        tensors.residuals[0] == 0, torch.zeros(1_000).index_fill_(0, chosen, 1.0) == 1
    )
    before = tensors.residuals[0].clone()
    actions["scatter_add_4"](0)
    touched = int((tensors.residuals[0] != before).sum())
    assert 200 < touched <= 400  # 400 values at random places, some of them the same


def test_what_was_measured_before_memory_ran_out_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def exchange(self: object, k: int) -> selection.Actions:
        if k > 10:
            raise RuntimeError("CUDA out of memory. Tried to allocate")
        return {}

    monkeypatch.setattr(selection._Tensors, "exchange", exchange)
    with pytest.raises(Partial, match="out of memory") as raised:
        selection.measure_selection("cpu", 1_000, (1e-3, 0.1), ONCE)
    assert set(raised.value.tables["selection"]["density"]) == {1.0, 1e-3}


def test_smoke_points_can_be_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "FLUSH_BYTES", {"cpu": MIB})
    for point in selections(Here("cpu", 1, tmp_path), brief=True):
        name, frame = point.what, point.measure()
        path = store.save_table(frame, tmp_path, f"{name}-{point.name}", schema=name, command=[])
        assert np.isfinite(store.load_table(path, "selection")["seconds"]).all()
        assert list(point.schemas) == [name]


def test_full_points_span_the_papers_range() -> None:
    names = [name for name, _, _ in selection.cases("cpu", brief=False)]
    assert names[0] == "d1000" and names[-1] == "d100000000" and len(set(names)) == len(names)


def test_selection_beside_backward_is_measured_alone_and_competing() -> None:
    rows = selection_beside.measure_beside_backward("lenet5", 2, 1000, 0.01, rounds=2)
    assert set(rows["operation"]) == {
        f"{what}_{how}" for what in ("topk_unsorted", "backward") for how in ("alone", "beside")
    }
    assert (rows.groupby("operation").size() == 2).all()
    assert (rows["seconds"] > 0).all()
    assert rows["elements"].eq(1000).all() and rows["density"].eq(0.01).all()


def test_what_fails_beside_is_raised() -> None:
    def fails() -> object:
        raise UserError("the other thread")

    with pytest.raises(UserError, match="the other thread"):
        selection_beside._round(lambda: None, fails)
    with (
        pytest.raises(UserError, match="the other thread"),
        selection_beside._again_and_again(fails) as seconds,
    ):
        while not seconds:
            pass
