"""The networks: made without downloads, the same at every call, and one line for a wrong name."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest
import torch

from ddlkit.core.errors import UserError
from ddlkit.run.nets import registry


def test_a_batch_goes_through_and_is_the_same_at_every_call() -> None:
    (inputs, labels), (again, _) = (registry.sample_batch("lenet5", 2) for _ in range(2))
    assert torch.equal(inputs, again)
    network = registry.build("lenet5")
    assert network.training
    assert torch.isfinite(torch.nn.functional.cross_entropy(network(inputs), labels))


def test_unknown_name_is_answered_with_the_nearest() -> None:
    for call in (registry.build, lambda name: registry.sample_batch(name, 1)):
        with pytest.raises(UserError, match="unknown network 'resnet5': did you mean 'resnet50'"):
            call("resnet5")


class Importer:
    """Stands in for import_module: fails with these errors first, then gives an empty module."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)

    def __call__(self, name: str) -> ModuleType:
        if self.errors:
            raise self.errors.pop(0)
        return ModuleType(name)


STUB = "torchvision._meta_registrations"


def test_cuda_wheel_beside_a_cpu_torch_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, STUB, raising=False)
    nms = RuntimeError("operator torchvision::nms does not exist")
    monkeypatch.setattr(importlib, "import_module", Importer(nms))
    assert registry.import_torchvision().__name__ == "torchvision"
    assert STUB in sys.modules


def test_absent_torchvision_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = ModuleNotFoundError("No module named 'torchvision'")
    monkeypatch.setattr(importlib, "import_module", Importer(absent))
    with pytest.raises(UserError, match="pip install --no-deps torchvision"):
        registry.build("resnet50")
    assert sum(p.numel() for p in registry.build("lenet5").parameters()) == 61_706
