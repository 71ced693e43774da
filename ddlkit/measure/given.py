"""A model in training, whoever made it: a network that is known by name, or what a user's file gives."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import os
import random
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddlkit import jobs
from ddlkit.core.errors import UserError, one_line, shown
from ddlkit.measure import networks
from ddlkit.measure.session import ran_out_of_memory

DDP_OPTIONS = inspect.signature(DistributedDataParallel.__init__).parameters
SYNC_BUFFERS = "forward_sync_buffers"  # its later name, where both exist
SYNC_BUFFERS = SYNC_BUFFERS if SYNC_BUFFERS in DDP_OPTIONS else "broadcast_buffers"
_OURS = str(jobs.PACKAGES / "ddlkit") + os.sep, "<frozen importlib"


@dataclass
class Training:
    """A model in training on data of its own.

    loss : does one forward pass and returns the scalar, or runs backward itself, ``backwards`` times
    accumulate : calls of ``loss`` in an iteration, of which the last communicates
    ddp : that calls of the model go through, once `wrap` was asked for it; of several, as `use` says
    """

    network: str
    model: nn.Module
    loss: Callable[[], Any]
    optimizer: torch.optim.Optimizer
    batch: int = 1
    accumulate: int = 1
    backwards: int = 0
    ddp: DistributedDataParallel | None = None
    _plain: Callable[..., Any] | None = None

    @property
    def device(self) -> torch.device:
        """Return where its first parameter lies."""
        return next(self.model.parameters()).device

    @property
    def compiled(self) -> bool:
        """Return whether torch.compile made any of it."""
        signs = ("_torchdynamo_orig_callable", "_compiled_call_impl")
        parts = (self.loss, *self.model.modules())
        return any(
            getattr(part, sign, None) is not None for part in parts for sign in signs
        )

    @property
    def precision(self) -> str:
        """Return the types of its gradients, as in "fp32" or "bf16+fp32"."""
        types = {str(p.dtype).removeprefix("torch.") for p in self.trained().values()}
        return "+".join(sorted(types)).replace("bfloat", "bf").replace("float", "fp")

    @property
    def gradient_bytes(self) -> int:
        """Return the size of all gradients together."""
        return sum(p.nbytes for p in self.trained().values())

    def gradient_sum(self) -> float:
        """Return the sum of all gradients that are there."""
        there = [p.grad for p in self.trained().values() if p.grad is not None]
        return float(sum(gradient.double().sum() for gradient in there))

    def trained(self) -> dict[str, nn.Parameter]:
        """Return parameters that need gradients by name, each once, in order of definition."""
        named = self.model.named_parameters()
        return {
            name.replace("_orig_mod.", ""): p for name, p in named if p.requires_grad
        }

    def try_out(self) -> None:
        """Do a first iteration, and see who runs backward. Raises UserError for a loss that is no scalar."""
        with backward_calls() as calls:
            value = self.loss()
        self.backwards = calls[0]
        if not self.backwards:
            if getattr(value, "numel", int)() != 1 or not value.requires_grad:
                what = getattr(value, "shape", type(value).__name__)
                needed = "it must give a scalar that depends on trained parameters"
                raise UserError(f"{self.network}: loss() gives {what}: {needed}")
            value.backward()
        self.optimizer.zero_grad()

    def iterate(self, mark: Callable[[], object] = lambda: None) -> None:
        """Do an iteration; ``mark`` is called at its start, around the last backward pass, and at its end.

        Raises UserError where the loss runs backward more or less often than it did when it was tried out.
        """
        mark()
        last = self.accumulate * max(1, self.backwards)
        with backward_calls(mark, last) as calls:
            for left in reversed(range(self.accumulate)):
                with self.ddp.no_sync() if self.ddp and left else nullcontext():
                    loss = self.loss()
                    if not self.backwards:
                        loss.backward()
        if calls[0] != last:
            raise UserError(
                f"{self.network}: loss() must run backward as often each time"
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        mark()

    @contextmanager
    def watched(
        self, on_layer: Callable[[str], None], on_gradient: Callable[[str], None]
    ) -> Iterator[None]:
        """Call back with the name of a starting layer's first tensor, and of one whose gradient is ready.

        What is accumulated or computed anew comes several times; layers of what is compiled never do: hooks
        on them would have it compiled anew.
        """
        names = {p: name for name, p in self.trained().items()}
        with ExitStack() as hooks:
            for module in () if self.compiled else self.model.modules():
                for p in [p for p in module.parameters(recurse=False) if p in names][
                    :1
                ]:
                    before = module.register_forward_pre_hook(
                        lambda *_, at=names[p]: on_layer(at)
                    )
                    hooks.enter_context(before)
            for p, name in names.items():
                after = p.register_post_accumulate_grad_hook(
                    lambda _, at=name: on_gradient(at)
                )
                hooks.enter_context(after)
            yield

    def wrap(self, **options: Any) -> DistributedDataParallel:
        """Have each call of the model go through DistributedDataParallel from now on, and return that.

        No buffers are sent, nor first weights, which equal seeds make equal.
        """
        self._plain = self._plain or self.model.forward
        self.model.forward = self._plain
        gpu = [self.device.index] if self.device.type == "cuda" else None
        ours: dict[str, Any] = {
            "device_ids": gpu,
            "init_sync": False,
            SYNC_BUFFERS: False,
        }
        return self.use(DistributedDataParallel(_Inside(self.model), **ours, **options))

    def use(self, ddp: DistributedDataParallel) -> DistributedDataParallel:
        """Have calls go through this one of several that were made by `wrap`: the others stay idle."""
        self.ddp = ddp
        self.model.forward = ddp.__call__
        return ddp


class _Inside(nn.Module):
    """What a model computes, without its hooks, which have run by then; called : whether it ever was."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module, self._forward, self.called = model, model.forward, False

    def forward(self, *arguments: Any, **named: Any) -> Any:
        self.called = True
        return self._forward(*arguments, **named)


@contextmanager
def backward_calls(
    mark: Callable[[], object] = lambda: None, last: int = 0
) -> Iterator[list[int]]:
    """Give the number of times that backward was called, so far; mark before and after the ``last``."""
    torchs: Any = torch.autograd
    plain, calls, inside = torchs.backward, [0], [False]

    def call(*arguments: Any, **named: Any) -> None:
        if inside[
            0
        ]:  # reentrant checkpointing computes a segment anew and goes back through it
            return plain(*arguments, **named)
        calls[0] += 1
        around = mark if calls[0] == last else bool
        around()
        inside[0] = True
        try:
            plain(*arguments, **named)
        finally:
            inside[0] = False
        around()

    with patch.object(torchs, "backward", call):
        yield calls


def known(
    network: str,
    batch: int,
    device: torch.device,
    precision: str = "fp32",
    *,
    model: nn.Module | None = None,
    rank: int = 0,
) -> Training:
    """Return a network that is known by name, or a model in its place, in training on one batch.

    rank : whose data are other ones. Raises UserError as `networks.sample_batch`.
    """
    made = model or networks.build(network).to(device)
    inputs, labels = networks.sample_batch(network, batch, device)
    inputs = inputs.roll(rank, dims=-1)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")

    def loss() -> Tensor:
        with autocast:
            return nn.functional.cross_entropy(made(inputs), labels)

    return Training(network, made, loss, _sgd(made), batch)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return SGD at rate 0, the same arithmetic, but the weights stay put: every repeat computes the same."""
    return torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)


def load(given: str, device: torch.device, notes: list[str]) -> Training:
    """Return what "FILE.py:function" gives for a device, or a network, by "torchvision:NAME[:BATCH]".

    The function is called once, after seeds are set, with device= if it has such a parameter; what should be
    known of the result is added to ``notes``. No file is written. Raises UserError where it cannot be
    called, after the user's own traceback, or gives anything but (model, loss) or (model, loss, optimizer).
    """
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    if match := re.fullmatch(r"(torchvision:(\w+))(?::(\d{1,9}))?", given):
        return replace(known(match[1], int(match[3] or 4), device), network=match[2])
    file, _, name = given.rpartition(":")
    spec = importlib.util.spec_from_file_location(f"given_{Path(file).stem}", file)
    if not (spec and spec.loader and Path(file).is_file()):
        raise UserError(
            f"model {shown(given)}: give FILE.py:function or torchvision:NAME:BATCH"
        )
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    # For good: what it imports beside itself may come as late as in the loss.
    sys.path.insert(0, str(Path(file).resolve().parent))
    sys.dont_write_bytecode = True
    with theirs(file):
        spec.loader.exec_module(module)
    if not callable(function := getattr(module, name, None)):
        raise UserError(f"{file} has no function {shown(name)}")
    with theirs(given):
        takes = inspect.signature(function).parameters
        made = function(**({"device": device} if "device" in takes else {}))
    model, plain_loss, *optimizers = (
        made if isinstance(made, tuple) and made[1:] else (made, None)
    )
    optimizer = optimizers[0] if optimizers else None
    if not (
        isinstance(model, nn.Module) and callable(plain_loss) and len(optimizers) < 2
    ):
        needed = "(model, loss) or (model, loss, optimizer)"
        raise UserError(f"{given} must return {needed}, gave {shown(made)}")
    notes += [] if optimizer else ["no optimizer is given: SGD with momentum"]

    @functools.wraps(plain_loss)  # with the signs of torch.compile
    def loss() -> Any:
        with theirs(given):
            return plain_loss()

    return Training(f"{Path(file).stem}-{name}", model, loss, optimizer or _sgd(model))


@contextmanager
def theirs(what: str) -> Iterator[None]:
    """Turn what a user's code raises into a UserError, after their traceback, in which no frame is ours."""
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, UserError) or ran_out_of_memory(error):
            raise
        told = traceback.TracebackException.from_exception(error)
        frames = [frame for frame in told.stack if not frame.filename.startswith(_OURS)]
        told.stack = traceback.StackSummary.from_list(frames)
        sys.stderr.writelines(told.format())
        raise UserError(
            f"{what}: {type(error).__name__}: {one_line(str(error))}"
        ) from None
