"""Selectors: exactly the set that torch.topk finds, whatever the numbers; and the table of their times."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.core.units import MIB
from ddlkit.jobs import clock
from ddlkit.measure.parts import Here
from workbook.record import selection
from workbook.record.kinds import selections

GPU = pytest.param(
    "cuda",
    marks=[
        pytest.mark.gpu,
        pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    ],
)
SHAPES: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x,
    "ties": lambda x: (4 * x).round() / 4,
    "sparse": lambda x: x * (x.roll(1) > 3.1),  # 0.1% are not zero
    "zeros": torch.zeros_like,
    "infinite": lambda x: torch.where(x > 2, float("inf"), x),
    "rows": lambda x: x * (torch.arange(len(x), device=x.device) % 64 == 0),
}


def _check(magnitudes: Tensor, ordered: Tensor, k: int) -> None:
    """The laws: k different positions, of all that is above the k-th largest, and else of its equals."""
    positions = selection.tournament(magnitudes, k)
    smallest = ordered[-k]
    assert positions.shape == (k,)
    assert (
        torch.zeros_like(magnitudes)
        .index_fill_(0, positions, 1.0)
        .sum(dtype=torch.int64)
        == k
    )
    chosen = magnitudes[positions]
    assert chosen.min() == smallest
    assert (chosen > smallest).sum() == (magnitudes > smallest).sum()


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("shape", SHAPES)
def test_selects_what_topk_selects(shape: str, device: str) -> None:
    d = 100_003  # neither round nor a multiple of anything here
    normal = torch.randn(
        d, generator=torch.Generator(device).manual_seed(1), device=device
    )
    magnitudes = SHAPES[shape](normal).abs()
    ordered = magnitudes.sort().values
    for k in (1, 30, 300, 3_001, d // 2, d):
        _check(magnitudes, ordered, k)


def test_numbers_without_order_are_refused() -> None:
    for d in (10, 100_003):
        magnitudes = torch.randn(d).abs()
        magnitudes[d // 3] = float("nan")
        with pytest.raises(UserError, match="NaN"):
            selection.tournament(magnitudes, max(1, d // 1000))


def test_points_have_every_way_at_every_density(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock, "FLUSH_BYTES", {"cpu": MIB})
    for point in selections(Here("cpu", 1, tmp_path), brief=True):
        table = point.measure()
        store.save_table(table, tmp_path, point.name, schema="selection", command=[])
        assert (table["seconds"] > 0).all()
        ways = table.groupby("density")["operation"].agg(set)
        assert ways.to_dict() == {1e-3: {*selection.WAYS}, 0.1: {*selection.WAYS}}
