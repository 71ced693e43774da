"""Models as users have them, each with its loss; `tests/test_models.py` measures them."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

X = torch.ones(16, 64)


class Net(nn.Module):
    """Three layers, the middle one checkpointed or not; what it returns is a dict."""

    def __init__(self, width: int = 64, reentrant: bool | None = None) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(64, width), nn.Linear(width, width)
        self.head, self.reentrant = nn.Linear(width, 64), reentrant

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        inner: Any = self.inner
        if self.reentrant is not None:
            inner = functools.partial(checkpoint, inner, use_reentrant=self.reentrant)
        return {"logits": self.head(inner(torch.relu(self.first(x))))}


def with_loss(model: nn.Module, *optimizer: Any, x: Tensor = X) -> tuple[Any, ...]:
    return model, lambda: model(x)["logits"].square().mean(), *optimizer


def dict_outputs(device: torch.device) -> tuple[Any, ...]:
    model = Net().to(device)
    return with_loss(model, torch.optim.AdamW(model.parameters()))


def tied() -> tuple[Any, ...]:
    model = Net()
    model.head.weight = model.first.weight
    return with_loss(model)


def frozen_and_unused() -> tuple[Any, ...]:
    model = Net()
    model.first.requires_grad_(False)
    model.unused = nn.Linear(3, 3)
    return with_loss(model)


def batch_normalized() -> tuple[Any, ...]:
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 8))
    return model, lambda: model(X).square().mean()


def autocast() -> tuple[Any, ...]:
    model, plain = with_loss(Net())
    return model, torch.autocast("cpu", torch.bfloat16)(plain)


def pure_bf16() -> tuple[Any, ...]:
    return with_loss(Net().bfloat16(), x=X.bfloat16())


def several_dtypes() -> tuple[Any, ...]:
    model = Net()
    model.inner.bfloat16()
    model.inner.register_forward_pre_hook(lambda _, inputs: inputs[0].bfloat16())
    model.inner.register_forward_hook(lambda _, __, output: output.float())
    return with_loss(model)


def reentrant() -> tuple[Any, ...]:
    return with_loss(Net(reentrant=True))


def not_reentrant() -> tuple[Any, ...]:
    return with_loss(Net(reentrant=False))


def accumulates_inside() -> tuple[Any, ...]:
    model, plain = with_loss(Net())
    return model, lambda: [plain().backward() for _ in range(4)]


def _compiled(layers: int, backend: str = "aot_eager") -> tuple[Any, ...]:
    """Of 256 KiB each, and so large a batch that nothing but the products takes time."""
    model, x = (
        nn.Sequential(*(nn.Linear(256, 256) for _ in range(layers))),
        torch.ones(2048, 256),
    )
    compiled: Any = torch.compile(model, backend=backend)
    return compiled, lambda: compiled(x).square().mean()


compiled = functools.partial(_compiled, 8)
one_bucket = functools.partial(_compiled, 3)
by_inductor = functools.partial(_compiled, 8, "inductor")


def parts_alone() -> tuple[Any, ...]:
    model = Net()
    return model, lambda: model.head(model.first(X)).sum() + model.inner(X).sum()


def no_scalar() -> tuple[Any, ...]:
    model = Net()
    return model, lambda: model(X)["logits"]


def no_scalar_on_device(device: torch.device) -> tuple[Any, ...]:
    model = Net().to(device)
    return model, lambda: model(X.to(device))["logits"]


def no_parameter() -> tuple[Any, ...]:
    return Net(), lambda: X.sum()


def nothing() -> None: ...


def computed_loss() -> tuple[Any, ...]:
    """A loss that was computed once, in place of a function that computes it."""
    net = Net()
    return net, net(X)["logits"].sum()


def fails_within() -> tuple[Any, ...]:
    return with_loss(Net(), x=X[:, :3])


class Words(nn.Module):
    """A table of 50 rows of 8 numbers, with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(50, 8, sparse=True), nn.Linear(8, 1)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.table(words))


def sparse_gradients() -> tuple[Any, ...]:
    model, words = Words(), torch.tensor([0, 1, 1, 7])
    return model, lambda: model(words).mean()


def two_optimizers() -> tuple[Any, ...]:
    model = Net()
    halves = [torch.optim.SGD(part.parameters()) for part in (model.first, model.head)]
    return with_loss(model, halves)


def optimizers_in_a_row() -> tuple[Any, ...]:
    model = Net()
    halves = [torch.optim.SGD(part.parameters()) for part in (model.first, model.head)]
    return with_loss(model, *halves)


def no_parameters_at_all() -> tuple[Any, ...]:
    model = nn.ReLU()
    return model, lambda: model(X).sum()


def all_frozen() -> tuple[Any, ...]:
    return with_loss(Net().requires_grad_(False))


def on_two_devices() -> tuple[Any, ...]:
    model = Net()
    model.head.to("meta")
    return with_loss(model)


def reads_its_loss() -> tuple[Any, ...]:
    """A loss that cannot be called without values, as many print or log it."""
    model = Net()

    def loss() -> Tensor:
        value = model(X)["logits"].square().mean()
        assert value.item() >= 0
        return value

    return model, loss
