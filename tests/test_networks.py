"""The networks: of published sizes, profiled tensor by tensor, and one line for what cannot be built."""

from __future__ import annotations

import functools
import importlib
import sys
from types import ModuleType
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

from ddlkit.core.errors import UserError
from ddlkit.jobs.clock import Budget
from ddlkit.measure import networks as registry
from ddlkit.measure.layers import profile_layers
from workbook.common import specs
from workbook.record import zoo

PUBLISHED = specs.specs("networks").set_index("name")
ONCE = Budget(warmup=0, min_repeats=1, max_repeats=1)


@functools.cache
def size(name: str) -> tuple[int, int, int]:
    """Parameters, tensors, and FLOP of the forward pass on one sample, counted on shapes alone."""
    with torch.device("meta"):
        network = registry.build(name)
    with torch.no_grad(), registry.flop_counter() as counter:
        network(registry.sample_batch(name, 1, "meta")[0])
    tensors = [parameter.numel() for parameter in network.parameters()]
    return sum(tensors), len(tensors), counter.get_total_flops()


OWN = {"gpt_small", "lstm_small"}
"""Small ones that nobody published."""


def test_own_networks_have_the_parameters_that_their_shapes_say() -> None:
    words, width, units = zoo.TEXT, 256, 320
    block = 4 * (width * width + width) + 2 * 4 * width * width + 5 * width + 4 * width
    gpt = 2 * words * width + zoo.STEPS * width + 4 * block + 2 * width
    lstm = words * units + 2 * (8 * units * units + 8 * units) + units * words + words
    assert size("gpt_small")[:2] == (gpt, 53) and size("lstm_small")[:2] == (lstm, 11)


@pytest.mark.parametrize("name", sorted({*registry.NETWORKS} - OWN))
def test_size_is_the_published_one(name: str) -> None:
    printed, (parameters, tensors, flops) = PUBLISHED.loc[name], size(name)
    assert abs(parameters - printed["parameters"]) <= printed["parameters_within"]
    assert tensors == printed["tensors"]
    if printed["forward_gflops"]:
        assert flops == pytest.approx(1e9 * printed["forward_gflops"], rel=0.02)


def test_what_has_no_published_flops_is_counted_by_hand() -> None:
    products = 2 * (4 * 1500 * (1500 + 1500)) + 1500 * 10_000
    assert size("lstm_ptb")[2] == 35 * 2 * products
    kept = size("vgg16")[2] - 2 * (25088 * 4096 + 4096 * 4096 + 4096 * 1000)
    replaced = kept + 2 * 7 * 7 * (512 * 512 + 512 * 1000)
    assert size("vgg16_replaced")[2] == replaced
    heads = 2 * (4 * 4 * (512 + 528) * 128 + 2 * (2048 * 1024 + 1024 * 1000))
    with_heads = size("googlenet")[2] + heads
    assert size("googlenet_aux")[2] == with_heads
    on_cuda = registry.recurrence_flops((7, 3, 6), [(20, 6), (20, 5), (20,), (20,)])
    assert on_cuda == 2 * 7 * 3 * 20 * (6 + 5)


@pytest.mark.parametrize("name", ["vgg16_cifar", "lstm_ptb", "googlenet_aux", "tied"])
def test_a_profile_holds_every_tensor_and_all_flops(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of 2: the LSTM's fused tensors, a shared one and the stacked heads lose nothing."""

    def language_model() -> nn.Module:  # as built, it takes seconds
        model = zoo.LanguageModel(units=8)
        if name == "tied":
            model.decoder.weight = model.encoder.weight
        return model

    if name in ("lstm_ptb", "tied"):
        small = registry.Network(language_model, registry.find("lstm_ptb").sample)
        monkeypatch.setitem(registry.NETWORKS, name, small)
    profile, _ = profile_layers(name, 2, threads=1, budget=ONCE)
    with torch.device("meta"):
        held = {n: p.numel() for n, p in registry.build(name).named_parameters()}
    assert dict(zip(profile.tensor, profile.parameters, strict=True)) == held
    assert profile.gradient_bytes.sum() == 4 * sum(held.values())
    assert (profile.forward_s >= 0).all() and (profile.backward_s >= 0).all()
    # The size that is kept may be that of the network as published.
    size_now = size.__wrapped__ if name in ("lstm_ptb", "tied") else size
    assert profile.flops.sum() == 2 * size_now(name)[2]
    if name == "vgg16_cifar":
        weight = np.array([tensor.endswith("weight") for tensor in profile.tensor])
        assert ((profile.forward_s > 0) == weight).all()
        assert ((profile.flops > 0) == (weight & (profile.parameters > 1000))).all()


def test_a_batch_is_the_same_at_every_call_and_a_wrong_name_is_answered_with_the_nearest() -> (
    None
):
    (inputs, labels), (again, _) = (
        registry.sample_batch("lenet5", 2) for _ in range(2)
    )
    assert torch.equal(inputs, again)
    network = registry.build("lenet5")
    assert network.training
    assert torch.isfinite(torch.nn.functional.cross_entropy(network(inputs), labels))
    with pytest.raises(
        UserError, match="unknown network 'resnet5': did you mean 'resnet50'"
    ):
        registry.sample_batch("resnet5", 1)


def test_a_network_with_auxiliary_heads_is_built_without_them() -> None:
    with torch.device("meta"):
        network = registry.build("torchvision:inception_v3")
        assert network(torch.empty(2, 3, 224, 224)).shape == (2, 1000)


def test_torchvision_is_imported_beside_a_cpu_torch_and_its_absence_is_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stub = "torchvision._meta_registrations"
    beside = (
        RuntimeError("operator torchvision::nms does not exist"),
        ModuleType("torchvision"),
    )
    absent = ModuleNotFoundError("No module named 'torchvision'")
    monkeypatch.delitem(sys.modules, stub, raising=False)
    monkeypatch.setattr(importlib, "import_module", Mock(side_effect=[*beside, absent]))
    assert registry.import_torchvision() is beside[1]
    assert stub in sys.modules
    with pytest.raises(UserError, match="pip install --no-deps torchvision"):
        registry.build("resnet50")
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(UserError, match=r"^resnet50 needs torchvision; .*ddlkit\[net"):
        registry.require("resnet50")
