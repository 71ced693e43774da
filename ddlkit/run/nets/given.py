"""A model in training, whoever made it: a network of the registry, or what a user's file gives."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import random
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddlkit.core.errors import UserError, one_line, shown
from ddlkit.run import jobs
from ddlkit.run.nets import registry
from ddlkit.run.sessions import ran_out_of_memory

DEFAULT_BATCH = 4  # of torchvision's networks
TORCHVISION = "torchvision"
FORM = "give FILE.py:function, torchvision:NAME or torchvision:NAME:BATCH"
DDP_OPTIONS = inspect.signature(DistributedDataParallel.__init__).parameters
SYNC_BUFFERS = "forward_sync_buffers"  # its later name, where both exist
SYNC_BUFFERS = SYNC_BUFFERS if SYNC_BUFFERS in DDP_OPTIONS else "broadcast_buffers"
_OURS = str(jobs.PACKAGES / "ddlkit" / ""), "<frozen importlib"
GIVES = "must return (model, loss) or (model, loss, optimizer)"


def _nothing() -> None: ...


@dataclass
class Training:
    """A model in training on data of its own.

    loss : does one forward pass and returns the scalar, or runs backward itself, ``backwards`` times
    accumulate : calls of ``loss`` in an iteration, of which the last communicates
    ddp : that calls of the model go through, once `wrap` was asked for it
    """

    network: str
    model: nn.Module
    loss: Callable[[], Any]
    optimizer: torch.optim.Optimizer
    batch: int = 1
    accumulate: int = 1
    backwards: int = 0
    ddp: DistributedDataParallel | None = None

    @property
    def device(self) -> torch.device:
        """Return where its first parameter lies."""
        return next(self.model.parameters()).device

    @property
    def compiled(self) -> bool:
        """Return whether torch.compile made any of it."""
        parts = [self.loss, *self.model.modules()]
        signs = ("_torchdynamo_orig_callable", "_compiled_call_impl")
        return any(getattr(part, sign, None) is not None for part in parts for sign in signs)

    def trained(self) -> dict[str, nn.Parameter]:
        """Return parameters that need gradients by name, each once, in order of definition."""
        named = self.model.named_parameters()
        return {name.replace("_orig_mod.", ""): p for name, p in named if p.requires_grad}

    def try_out(self) -> None:
        """Do a first iteration, and see who runs backward. Raises UserError for a loss that is no scalar."""
        with backward_calls() as calls:
            value = self.loss()
        self.backwards = calls[0]
        if not self.backwards:
            if not isinstance(value, Tensor) or value.numel() != 1:
                what = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
                given = f"{type(value).__name__} {what}".strip()
                raise UserError(f"{self.network}: loss() gives a {given}: it must give a scalar")
            if not value.requires_grad:
                raise UserError(f"{self.network}: loss() depends on no parameter that is trained")
            value.backward()
        self.optimizer.zero_grad()

    def iterate(self, mark: Callable[[], object] = _nothing) -> None:
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
            often = f"ran backward {calls[0]} times in an iteration, {last} before"
            raise UserError(f"{self.network}: loss() {often}: it must do the same each time")
        self.optimizer.step()
        self.optimizer.zero_grad()
        mark()

    @contextmanager
    def watched(
        self, on_layer: Callable[[str], None] | None, on_gradient: Callable[[str], None]
    ) -> Iterator[None]:
        """Call back with the name of a starting layer's first tensor, and of one whose gradient is ready.

        Of what is accumulated or computed anew this happens several times; on_layer : none if compiled.
        """
        names = {p: name for name, p in self.trained().items()}
        with ExitStack() as hooks:
            for module in self.model.modules() if on_layer else ():
                for p in [p for p in module.parameters(recurse=False) if p in names][:1]:
                    start = functools.partial(_first, on_layer, names[p])
                    hooks.enter_context(module.register_forward_pre_hook(start))
            for p, name in names.items():
                after = p.register_post_accumulate_grad_hook(lambda _, at=name: on_gradient(at))
                hooks.enter_context(after)
            yield

    def wrap(self, **options: Any) -> DistributedDataParallel:
        """Have each call of the model go through DistributedDataParallel from now on, and return that."""
        self.ddp = DistributedDataParallel(_Inside(self.model), **options)
        self.model.forward = self.ddp.__call__
        return self.ddp


def _first(call: Callable[[str], None] | None, name: str, *_: object) -> None:
    if call:
        call(name)


class _Inside(nn.Module):
    """What a model computes, without its hooks, which have run by then."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module, self._forward = model, model.forward

    def forward(self, *arguments: Any, **named: Any) -> Any:
        return self._forward(*arguments, **named)


@contextmanager
def backward_calls(mark: Callable[[], object] = _nothing, last: int = 0) -> Iterator[list[int]]:
    """Give the number of times that backward was called, so far; mark before and after the ``last``."""
    plain, calls, inside = torch.autograd.backward, [0], False

    def call(*arguments: Any, **named: Any) -> None:
        nonlocal inside
        if inside:  # reentrant checkpointing computes a segment anew and goes back through it
            return plain(*arguments, **named)
        inside, calls[0] = True, calls[0] + 1
        marks = mark if calls[0] == last else _nothing
        marks()
        try:
            plain(*arguments, **named)
        finally:
            inside = False
        marks()

    places: Any = torch.autograd
    places.backward = call
    try:
        yield calls
    finally:
        places.backward = plain


# -- of the registry, and of a user --------------------------------------------------------------


def known(
    network: str,
    batch: int,
    device: torch.device,
    precision: str = "fp32",
    *,
    model: nn.Module | None = None,
    rank: int = 0,
) -> Training:
    """Return a network of the registry in training, on one batch that each rank has by other columns.

    model : in place of a new one; the rate of SGD is 0, which is the same arithmetic, but the weights stay
    put: every repeat computes the same. Raises UserError as `registry.sample_batch`.
    """
    made = model or registry.build(network).to(device)
    inputs, labels = registry.sample_batch(network, batch, device)
    return _training(network, made, inputs.roll(rank, dims=-1), labels, precision)


def _training(
    network: str, model: nn.Module, inputs: Tensor, labels: Tensor, precision: str = "fp32"
) -> Training:
    autocast = torch.autocast(inputs.device.type, torch.bfloat16, enabled=precision == "bf16")

    def loss() -> Tensor:
        with autocast:
            return nn.functional.cross_entropy(model(inputs), labels)

    return Training(network, model, loss, plain_sgd(model), len(inputs))


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return SGD with momentum, at rate 0."""
    return torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)


def load(given: str, device: torch.device, notes: list[str]) -> Training:
    """Return what "FILE.py:function" gives for a device, or a network by "torchvision:NAME", not tried out.

    The function is called once, after seeds are set, with device= if it has such a parameter; what should be
    known of the result is added to ``notes``. No file is written. Raises UserError where it cannot be
    called, or gives anything but (model, loss) or (model, loss, optimizer), after the user's own traceback.
    """
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    file, separator, name = given.rpartition(":")
    if given.startswith(f"{TORCHVISION}:"):
        return _of_torchvision(given, device)
    if not (separator and file and name):
        raise UserError(f"model {shown(given)}: {FORM}")
    function = _function(Path(file), name)
    named = {"device": device} if "device" in inspect.signature(function).parameters else {}
    with theirs(given):
        made = function(**named)
    parts = made if isinstance(made, tuple) else ()
    kinds: tuple[Any, ...] = (nn.Module, Callable, torch.optim.Optimizer)
    fits = [isinstance(part, kind) for part, kind in zip(parts, kinds, strict=False)]
    if len(parts) not in (2, 3) or not all(fits):
        raise UserError(f"{given} {GIVES}, gave {shown(made)}")
    model, plain_loss, *optimizers = parts

    @functools.wraps(plain_loss)
    def loss() -> Any:
        with theirs(given):
            return plain_loss()

    if not any(p.requires_grad for p in model.parameters()):
        raise UserError(f"{given}: the model has no parameter that is trained")
    notes += [] if optimizers else ["no optimizer is given: SGD with momentum"]
    optimizer = optimizers[0] if optimizers else plain_sgd(model)
    return Training(f"{Path(file).stem}-{name}", model, loss, optimizer)


def _of_torchvision(given: str, device: torch.device) -> Training:
    _, name, batch, *more = [*given.split(":"), str(DEFAULT_BATCH)]
    if not (name and batch.isdecimal() and len(batch) < 10 and int(batch)) or len(more) > 1:
        raise UserError(f"model {shown(given)}: {FORM}")
    network = registry.of_torchvision(name)
    inputs, labels = network.sample(int(batch), torch.Generator().manual_seed(0))
    model = network.build().train().to(device)
    return _training(name, model, inputs.to(device), labels.to(device))


def _function(file: Path, name: str) -> Callable[..., Any]:
    """Return a function of a file that is imported as Python would run it. Raises UserError."""
    spec = importlib.util.spec_from_file_location(f"given_{file.stem}", file)
    if spec is None or spec.loader is None or not file.is_file():
        raise UserError(f"{file}: no such file: {FORM}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    # For good: what it imports beside itself may come as late as in the loss.
    sys.path.insert(0, str(file.resolve().parent))
    sys.dont_write_bytecode = True
    with theirs(str(file)):
        spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        there = ", ".join(_functions(module)) or "none"
        raise UserError(f"{file} has no function {shown(name)}: it has {there}")
    return function


def _functions(module: ModuleType) -> list[str]:
    own = inspect.getmembers(module, inspect.isfunction)
    return [name for name, function in own if function.__module__ == module.__name__]


@contextmanager
def theirs(what: str) -> Iterator[None]:
    """Turn what a user's code raises into a UserError, after their traceback, in which no frame is ours."""
    try:
        yield
    except UserError:
        raise
    except (Exception, SystemExit) as error:
        if ran_out_of_memory(error):
            raise
        told = traceback.TracebackException.from_exception(error)
        seen = [frame for frame in told.stack if not frame.filename.startswith(_OURS)]
        told.stack = traceback.StackSummary.from_list(seen)
        sys.stderr.writelines(told.format())
        raise UserError(f"{what}: {type(error).__name__}: {one_line(str(error))}") from None
