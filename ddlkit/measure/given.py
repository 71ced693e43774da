"""A model in training: a network that is known by name, or what a user's file gives."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import inspect
import logging
import os
import random
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.parallel import DistributedDataParallel

from ddlkit import jobs
from ddlkit.core.errors import UserError, one_line, shown
from ddlkit.core.units import format_bytes
from ddlkit.measure import networks
from ddlkit.measure.named import DEFAULT_BATCH
from ddlkit.measure.session import ran_out_of_memory

DDP_OPTIONS = inspect.signature(DistributedDataParallel.__init__).parameters
"""The arguments of DistributedDataParallel, which depend on torch's version."""
SYNC_BUFFERS = "broadcast_buffers"
"""The name of the argument by which DDP sends a model's buffers."""
if "forward_sync_buffers" in DDP_OPTIONS:
    # Later versions of torch have this name, and warn of the other one.
    SYNC_BUFFERS = "forward_sync_buffers"
_HIDDEN_FILES = (str(jobs.PACKAGES / "ddlkit") + os.sep, "<frozen importlib")
"""How the names of files begin whose frames a user's traceback does not show."""


def _nothing() -> None:
    """Do nothing. This takes the place of a callback that nobody needs."""


def dtype_name(tensor: Tensor) -> str:
    """Return the short name of a tensor's type.

    Parameters
    ----------
    tensor : Tensor
        The tensor.

    Returns
    -------
    str

    Examples
    --------
    >>> dtype_name(torch.zeros(1)), dtype_name(torch.zeros(1, dtype=torch.bfloat16))
    ('fp32', 'bf16')
    """
    name = str(tensor.dtype).removeprefix("torch.")
    # "bfloat" comes first, because it contains "float".
    return name.replace("bfloat", "bf").replace("float", "fp")


@dataclass
class Training:
    """A model in training on data of its own.

    Attributes
    ----------
    network : str
        The name of the network.
    model : Module
        The model.
    loss : callable
        Runs one forward pass, and then either returns the loss or runs backward itself.
    optimizer : Optimizer
        The optimizer.
    batch : int
        The batch size; 1 for a user's own model, whose batch size is not known.
    accumulate : int
        How many batches an iteration has. Only the last one communicates.
    backwards : int
        How many times the loss runs backward itself; 0 if it returns the loss, on which
        backward is then run.
    ddp : DistributedDataParallel, optional
        The wrapper that calls of the model go through, as chosen by `wrap` or `use`.
    user_model : str
        How the user names the model, as in "mine.py:net", which errors repeat; empty for a
        network by name.
    """

    network: str
    model: nn.Module
    loss: Callable[[], Any]
    optimizer: torch.optim.Optimizer
    batch: int = 1
    accumulate: int = 1
    backwards: int = 0
    ddp: DistributedDataParallel | None = None
    user_model: str = ""
    _forward_before_ddp: Callable[..., Any] | None = None

    @property
    def device(self) -> torch.device:
        """Return the device of the first parameter."""
        return next(self.model.parameters()).device

    @property
    def compiled(self) -> bool:
        """Return whether torch.compile made the loss or any module of the model."""
        # torch.compile leaves the first attribute on functions, and the second on modules.
        # The second is None on a module that is not compiled.
        signs = ("_torchdynamo_orig_callable", "_compiled_call_impl")
        for loss_or_module in (self.loss, *self.model.modules()):
            if any(getattr(loss_or_module, sign, None) is not None for sign in signs):
                return True
        return False

    @property
    def precision(self) -> str:
        """Return the types of the gradients, such as "fp32" or "bf16+fp32"."""
        types = {dtype_name(p) for p in self.trained().values()}
        return "+".join(sorted(types))

    @property
    def gradient_bytes(self) -> int:
        """Return the size of all gradients together, in bytes."""
        return sum(p.nbytes for p in self.trained().values())

    def gradient_sum(self) -> float:
        """Return the sum of all elements of the gradients that exist."""
        gradients = [p.grad for p in self.trained().values() if p.grad is not None]
        return float(sum(gradient.double().sum() for gradient in gradients))

    def trained(self) -> dict[str, nn.Parameter]:
        """Return the parameters that need gradients.

        Returns
        -------
        dict of str to Parameter
            Each parameter once, by its name, in the order of definition.
        """
        # torch.compile puts "_orig_mod." into the names of what it wraps. A parameter
        # that several modules share is yielded once, under its first name.
        named = self.model.named_parameters()
        return {
            name.replace("_orig_mod.", ""): p for name, p in named if p.requires_grad
        }

    def try_out(self) -> None:
        """Run a first forward and backward pass, and set ``backwards``.

        Raises
        ------
        UserError
            If the loss neither runs backward nor returns a scalar that needs a
            gradient, or if a gradient is sparse.
        """
        with backward_calls() as calls:
            loss = self.loss()
        self.backwards = calls.count
        if not self.backwards:
            self.refuse_unless_scalar(loss)
            loss.backward()
        self._refuse_sparse_gradients()
        # The gradients of this trial must not add to those of the first iteration.
        self.optimizer.zero_grad()

    def refuse_unless_scalar(self, loss: Any) -> None:
        """Refuse what ``loss()`` returned if no backward pass can start from it.

        Parameters
        ----------
        loss : object
            The value that ``loss()`` returned.

        Raises
        ------
        UserError
            If the value is not a tensor of one element that needs a gradient.
        """
        is_scalar = isinstance(loss, Tensor) and loss.numel() == 1
        if not is_scalar or not loss.requires_grad:
            raise UserError(
                f"{self.user_model or self.network}: loss() returns {_described(loss)}"
            )

    def _refuse_sparse_gradients(self) -> None:
        """Raise UserError if a parameter has a sparse gradient after a backward pass.

        DDP sends a sparse gradient in a message of its own, by an all-gather of the
        rows of all ranks. The number of rows depends on the batch. So the message is
        neither as large as the parameter, nor an all-reduce, nor part of a bucket of a
        plan.
        """
        for name, p in self.trained().items():
            if p.grad is not None and p.grad.layout != torch.strided:
                raise UserError(
                    f"{self.user_model or self.network}: the gradient of {name} is sparse: DDP sends "
                    f"{_sent_of_sparse(p.grad)} in a message of its own, not the "
                    f"{format_bytes(p.nbytes)} of the parameter, and no plan covers "
                    "such messages: make the gradient dense (sparse=False)"
                )

    def iterate(self, mark: Callable[[], object] = _nothing) -> None:
        """Run an iteration: forward and backward of each batch, then the update.

        Parameters
        ----------
        mark : callable, optional
            Called at the start of the iteration, before and after the last backward
            pass, and at the end.

        Raises
        ------
        UserError
            If the loss does not run backward as often as when it was tried.
        """
        mark()
        # A loss that does not run backward itself has one pass for each batch.
        backward_passes = self.accumulate * max(1, self.backwards)
        # `backward_calls` calls `mark` before and after the last pass.
        with backward_calls(mark, last=backward_passes) as calls:
            for batch in range(self.accumulate):
                # Only the last batch exchanges gradients between ranks.
                is_last_batch = batch == self.accumulate - 1
                with self._exchange_if(is_last_batch):
                    loss = self.loss()
                    if not self.backwards:
                        loss.backward()
        if calls.count != backward_passes:
            raise UserError(
                f"{self.user_model or self.network}: loss() must run backward as often each time"
            )
        self.optimizer.step()
        self.optimizer.zero_grad()
        mark()

    def _exchange_if(self, is_last_batch: bool) -> AbstractContextManager[None]:
        """Return a context in which the backward pass exchanges gradients, or adds them up.

        Gradients add up without exchange until the last batch of an iteration. Without
        DDP nothing is ever exchanged.
        """
        if self.ddp is None or is_last_batch:
            return nullcontext()
        without_exchange: AbstractContextManager[None] = self.ddp.no_sync()
        return without_exchange

    @contextmanager
    def watched(
        self, on_layer: Callable[[str], None], on_gradient: Callable[[str], None]
    ) -> Iterator[None]:
        """Call back when a layer starts and when a gradient is ready, within the block.

        Parameters
        ----------
        on_layer : callable
            Gets the name of the first tensor of a layer that starts. It is never called
            for compiled models, because hooks would make torch compile them anew.
        on_gradient : callable
            Gets the name of a tensor whose gradient is ready. It is called several
            times for a gradient that is accumulated.
        """
        # Leaving the stack removes all hooks.
        with ExitStack() as hooks:
            if not self.compiled:
                for layer, first_tensor in self._layers():
                    hook = _hook(on_layer, first_tensor)
                    hooks.enter_context(layer.register_forward_pre_hook(hook))
            for name, p in self.trained().items():
                hook = _hook(on_gradient, name)
                hooks.enter_context(p.register_post_accumulate_grad_hook(hook))
            yield

    def _layers(self) -> Iterator[tuple[nn.Module, str]]:
        """Yield each layer, and the name of its first trained tensor.

        A layer is a module that has trained parameters of its own.
        """
        names_by_parameter = {p: name for name, p in self.trained().items()}
        for module in self.model.modules():
            own_names = [
                names_by_parameter[p]
                for p in module.parameters(recurse=False)
                if p in names_by_parameter
            ]
            if own_names:
                yield module, own_names[0]

    def without_gradient(self) -> list[str]:
        """Run an iteration, and return which trained tensors get no gradient in it.

        Returns
        -------
        list of str
            Names of tensors, in the order of definition.
        """
        with_gradient: set[str] = set()
        with self.watched(on_layer=lambda _: None, on_gradient=with_gradient.add):
            self.iterate()
        return [name for name in self.trained() if name not in with_gradient]

    def wrap(
        self, *, synchronize: bool = False, **options: Any
    ) -> DistributedDataParallel:
        """Have all calls of the model go through DistributedDataParallel from now on.

        Parameters
        ----------
        synchronize : bool, optional
            Whether rank 0 sends its first weights, and its buffers before each forward
            pass, as DDP does by default. Otherwise it sends neither, and equal seeds have
            to make the first weights equal.
        **options
            Arguments of DistributedDataParallel.

        Returns
        -------
        DistributedDataParallel
            The wrapped model.
        """
        # An earlier `wrap` has made the model's forward call its DDP. The new DDP must call
        # the model's own forward, and not that DDP. So the own forward is remembered at the
        # first `wrap`, and put back at each later one.
        if self._forward_before_ddp is None:
            self._forward_before_ddp = self.model.forward
        self.model.forward = self._forward_before_ddp
        # DDP takes the id of the device of a model on a GPU, and None for the CPU.
        device_ids = None
        if self.device.type == "cuda":
            device_ids = [self.device.index]
        fixed_options: dict[str, Any] = {
            "device_ids": device_ids,
            "init_sync": synchronize,
            # The key is "broadcast_buffers", or its name in later versions of torch.
            SYNC_BUFFERS: synchronize,
        }
        # DDP wraps this module, which keeps the forward that the model has now.
        inside = _Inside(self.model)
        ddp = DistributedDataParallel(inside, **fixed_options, **options)
        # From here on the model's forward calls this DDP.
        return self.use(ddp)

    def use(self, ddp: DistributedDataParallel) -> DistributedDataParallel:
        """Choose the wrapper that all calls of the model go through from now on.

        Parameters
        ----------
        ddp : DistributedDataParallel
            A wrapper that `wrap` returned earlier. All other wrappers stay idle.

        Returns
        -------
        DistributedDataParallel
            The argument ``ddp``.
        """
        self.ddp = ddp
        # A user's loss calls the model, and knows nothing of DDP. So the model's forward
        # is made to call DDP. DDP in turn calls the module `_Inside` that it wraps, which
        # kept the model's own forward.
        self.model.forward = ddp.__call__
        return ddp


def _hook(callback: Callable[[str], None], tensor: str) -> Callable[..., None]:
    """Return a hook for torch that calls back with the name of a tensor.

    What torch passes to the hook is ignored.
    """

    def hook(*_: Any) -> None:
        callback(tensor)

    return hook


def _sent_of_sparse(gradient: Tensor) -> str:
    """Return in words how much of a sparse gradient DDP sends."""
    # Other sparse layouts, such as sparse_csr, have no indices and values like these.
    if gradient.layout != torch.sparse_coo:
        return "an unknown part"
    # Gloo and NCCL add up the entries of equal rows before they send.
    added_up = gradient.coalesce()
    indices = added_up.indices()  # shape (1, rows) for the gradient of an embedding
    n_bytes = indices.nbytes + added_up.values().nbytes
    return f"{format_bytes(n_bytes)} (indices and values of {indices.shape[1]} rows)"


class _Inside(nn.Module):
    """The module that DDP wraps: it calls a model's forward, without the model's hooks.

    A call of the model runs the model's hooks, and then its forward, which is DDP. The
    hooks must not run a second time when DDP calls the model's own forward.

    Attributes
    ----------
    module : Module
        The model, whose parameters DDP finds here.
    called : bool
        Whether DDP has ever called this module. Some losses call parts of a model only.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.module = model
        self.called = False
        self._forward = model.forward

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        """Note that DDP has called this module, and run the model's own forward."""
        self.called = True
        return self._forward(*arguments, **keywords)


class BackwardCalls:
    """A replacement of ``torch.autograd.backward`` that counts the calls of an iteration.

    Only the last call is marked, because it alone counts as the backward pass of the
    iteration: if gradients of several batches are accumulated, ranks exchange them in no
    earlier call.

    Parameters
    ----------
    mark : callable
        Called before and after the last call, for example to note the time.
    last : int
        The number of the last call, counted from 1; 0 if no call is to be marked.

    Attributes
    ----------
    count : int
        How many calls there were, without those within another call.
    """

    def __init__(self, mark: Callable[[], object], last: int) -> None:
        autograd: Any = torch.autograd
        self.count = 0
        self._mark = mark
        self._last = last
        self._torchs_backward = autograd.backward
        self._inside = False

    def __call__(self, *arguments: Any, **keywords: Any) -> None:
        """Run backward, and count the call unless it is within another one."""
        if self._inside:
            # Reentrant checkpointing computes a segment anew during a backward pass,
            # and runs backward through the segment.
            self._torchs_backward(*arguments, **keywords)
            return
        self.count += 1
        # The marks show when the last call begins and ends. Earlier calls count as part of what
        # precedes the backward pass.
        mark = self._mark if self.count == self._last else _nothing
        mark()
        self._inside = True
        try:
            self._torchs_backward(*arguments, **keywords)
        finally:
            self._inside = False
        mark()


@contextmanager
def backward_calls(
    mark: Callable[[], object] = _nothing, last: int = 0
) -> Iterator[BackwardCalls]:
    """Count the backward passes within the block.

    Parameters
    ----------
    mark : callable, optional
        Called before and after backward pass number ``last``.
    last : int, optional
        The number of that pass; 0 for none.

    Yields
    ------
    BackwardCalls
        The count so far.
    """
    calls = BackwardCalls(mark, last)
    # Tensor.backward looks up torch.autograd.backward at each call. So calls of
    # Tensor.backward count, too.
    with patch.object(torch.autograd, "backward", calls):
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
    """Return a network that is known by name, in training on one random batch.

    Parameters
    ----------
    network : str
        The name of the network.
    batch : int
        The batch size.
    device : torch.device
        The device.
    precision : str, optional
        ``"bf16"`` computes forward and loss under autocast, and backward in the types
        that autocast chose. Any other value changes nothing here: `compute_on` in
        `ddlkit.measure.layers` sets the precision of torch for all computations.
    model : Module, optional
        An instance of the network to train. By default a new one is built.
    rank : int, optional
        The number of this rank. All ranks draw the same random inputs. Each shifts them by
        its number along the last axis, so that gradients differ between ranks.

    Returns
    -------
    Training

    Raises
    ------
    UserError
        If the network or the batch is not possible.
    """
    trained = model or networks.build(network).to(device)
    inputs, labels = networks.sample_batch(network, batch, device)
    inputs = inputs.roll(rank, dims=-1)
    autocast = torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")

    def loss() -> Tensor:
        with autocast:
            return nn.functional.cross_entropy(trained(inputs), labels)

    return Training(
        network=network,
        model=trained,
        loss=loss,
        optimizer=_sgd(trained),
        batch=batch,
    )


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return SGD with momentum at rate 0.

    An update computes as much as at any other rate, but the weights do not change. So
    all repeats of an iteration compute the same.
    """
    return torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)


def load(user_model: str, device: torch.device, notes: list[str]) -> Training:
    """Return the model in training that a user names.

    If the user names a function, it is called once, after the seeds of all random
    numbers are set. It gets ``device=`` if it has such a parameter. No file is written.

    Parameters
    ----------
    user_model : str
        ``"FILE.py:function"``, or a network as ``"torchvision:NAME[:BATCH]"``.
    device : torch.device
        The device.
    notes : list of str
        A list to which remarks on the model are appended.

    Returns
    -------
    Training

    Raises
    ------
    UserError
        If there is no such function, if the function fails (its traceback is printed
        before), if its result is neither (model, loss) nor (model, loss, optimizer),
        if no parameter is trained, or if the model is on several devices.
    """
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    # None if the user names a function, as in "FILE.py:function".
    torchvision_match = _TORCHVISION.fullmatch(user_model)
    if torchvision_match:
        batch = int(torchvision_match["batch"] or DEFAULT_BATCH)
        training = known(torchvision_match["with_prefix"], batch, device)
        # `known` needs the prefix "torchvision:". Tables name the network without it.
        return replace(training, network=torchvision_match["without_prefix"])
    function = _function_of_user(user_model)
    with errors_of_user_code(user_model):
        result = _call_with_device(function, device)
    return _training_from_result(result, user_model, notes)


_TORCHVISION = re.compile(
    r"(?P<with_prefix>torchvision:(?P<without_prefix>\w+))(?::(?P<batch>\d{1,9}))?"
)
"""A network of torchvision and its batch size, as a user gives them for a model."""


def check(user_model: str) -> None:
    """Refuse a model that certainly cannot be trained, before ranks are started.

    The user's function and its loss are called with fake tensors, which have shapes and
    no values. So nothing is computed, and a model of any size takes seconds.

    Parameters
    ----------
    user_model : str
        The model, as `load` takes it.

    Raises
    ------
    UserError
        If the file or the function does not exist, if the function's result cannot be
        trained, and if the loss neither runs backward nor returns a scalar that needs a
        gradient. What cannot be seen without values is not refused.
    """
    # None if the user names a function, as in "FILE.py:function".
    torchvision_match = _TORCHVISION.fullmatch(user_model)
    if torchvision_match:
        networks.require(torchvision_match["with_prefix"])
        return
    _check_function(_function_of_user(user_model), user_model)


def _check_function(function: Callable[..., Any], user_model: str) -> None:
    """Raise UserError if what a user's function returns certainly cannot be trained.

    The function and its loss are called with fake tensors, which have shapes and no values.
    ``user_model`` is the model as the user names it.
    """
    # Real tensors are allowed, too, because the user's file was imported before, and may hold
    # some, such as a batch.
    fake_tensors = FakeTensorMode(allow_non_fake_inputs=True)
    # The command prints its result on standard output, which must hold nothing else. So
    # what the user's code prints goes to standard error.
    prints_to_stderr = contextlib.redirect_stdout(sys.stderr)
    with prints_to_stderr, _without_torch_log(), _modules_stay(), fake_tensors:
        try:
            result = _call_with_device(function, torch.device("cpu"))
        except (Exception, SystemExit):
            # The cause may be that tensors have no values, so nothing is refused. If the cause
            # is a mistake, or a call of sys.exit, the ranks will show it with its traceback.
            return
        training = _training_from_result(result, user_model, notes=[])
        # Compiling takes long, and compiled code does not accept fake tensors.
        if training.compiled:
            return
        # `_training_from_result` has checked that the result is (model, loss) or
        # (model, loss, optimizer). The user's own loss is called and not
        # `training.loss`, which would print the traceback of an exception.
        loss = result[1]
        try:
            with backward_calls() as calls:
                value = loss()
        except (Exception, SystemExit):
            # The cause may again be that tensors have no values.
            return
        # A loss that has run backward itself may return anything.
        if not calls.count:
            training.refuse_unless_scalar(value)


@contextlib.contextmanager
def _modules_stay() -> Iterator[None]:
    """Let `nn.Module.to` change nothing, neither the device of a module nor its precision.

    torch cannot move a module of fake tensors, and raises RuntimeError. All fake tensors are on the
    processor anyway. A loss that needs another precision may now fail. That does no harm, because
    the check which runs the loss on fake tensors refuses no model for such a failure.
    """
    module_class: Any = nn.Module
    move = module_class.to

    def stay(module: nn.Module, *_: Any, **__: Any) -> nn.Module:
        """Take the place of `nn.Module.to`, and move nothing."""
        return module

    module_class.to = stay
    try:
        yield
    finally:
        module_class.to = move


def _function_of_user(user_model: str) -> Callable[..., Any]:
    """Return the function that a user names as ``"FILE.py:function"``.

    Raises UserError if there is none, or if it needs a parameter other than ``device``.
    """
    file, _, name = user_model.rpartition(":")
    module = _imported(file, user_model)
    function = getattr(module, name, None)
    if not callable(function):
        raise UserError(
            f"{file} has no function {shown(name)}{_functions_in_words(module)}"
        )
    # A model is callable, too, and may be named by mistake.
    if isinstance(function, nn.Module):
        raise UserError(
            f"{user_model} is a model: name a function that returns (model, loss)"
        )
    _refuse_needed_parameters(function, user_model)
    return cast(Callable[..., Any], function)


def _refuse_needed_parameters(function: Callable[..., Any], user_model: str) -> None:
    """Raise UserError if a user's function needs a parameter other than ``device``."""
    # Parameters such as *args and **kwargs have no default, and may stay empty.
    may_stay_empty = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    for name, parameter in inspect.signature(function).parameters.items():
        is_needed = (
            parameter.default is inspect.Parameter.empty
            and parameter.kind not in may_stay_empty
        )
        if is_needed and name != "device":
            raise UserError(
                f"{user_model} needs the parameter {shown(name)}: give it a default value, or "
                "write a function that needs no parameter but device"
            )


def _call_with_device(function: Callable[..., Any], device: torch.device) -> Any:
    """Call a user's function, with the device if it takes one, and return its result."""
    if "device" in inspect.signature(function).parameters:
        return function(device=device)
    return function()


def _functions_in_words(module: ModuleType) -> str:
    """Return the names of a user's functions, for an error about another name.

    Only those count that the file defines itself. The text is empty if there are none.
    """
    names = [
        name
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    if not names:
        return ""
    listed = ", ".join(names[:_MOST_FUNCTIONS])
    if len(names) > _MOST_FUNCTIONS:
        listed += f" and {len(names) - _MOST_FUNCTIONS} more"
    if len(names) == 1:
        return f": its only function is {listed}"
    return f": its functions are {listed}"


_MOST_FUNCTIONS = 6
"""The most functions of a user's file that an error names."""


def _imported(file: str, user_model: str) -> ModuleType:
    """Import a user's file, and return its module.

    ``user_model`` is the model as the user names it, for the error message. Raises
    UserError if the file does not exist, is not Python, or fails when it is run.
    """
    # With this prefix, a user's file torch.py does not take the place of torch.
    name = f"given_{Path(file).stem}"
    # How Python imports the file. It is None if the suffix is not one of Python's.
    spec = importlib.util.spec_from_file_location(name, file)
    is_file = Path(file).is_file()
    if Path(file).suffix == ".py" and not is_file:
        raise UserError(f"model {shown(user_model)}: there is no file {file}")
    # What is no network of torchvision must be a file of Python.
    if not is_file or spec is None or spec.loader is None:
        raise UserError(
            f"model {shown(user_model)}: name a file and its function, as in mine.py:net, "
            "or a network and its batch, as in torchvision:resnet50:32"
        )
    module = importlib.util.module_from_spec(spec)
    # An import statement also registers a module before it runs the module.
    sys.modules[name] = module
    # The folder stays in the path, because modules that lie next to the file may be
    # imported as late as in the loss.
    sys.path.insert(0, str(Path(file).resolve().parent))
    # Nothing may be written next to a user's file, such as __pycache__.
    sys.dont_write_bytecode = True
    with errors_of_user_code(file):
        spec.loader.exec_module(module)
    return module


def _refuse_optimizer(optimizer: object, user_model: str) -> None:
    """Raise UserError unless the third value of a user's function is an optimizer.

    ``user_model`` is how the user names the function.
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise UserError(
            f"{user_model}: the third value is a {type(optimizer).__name__}, but it must be "
            "an optimizer of torch: return one optimizer for all parameters"
        )


def _training_from_result(result: Any, user_model: str, notes: list[str]) -> Training:
    """Return the result of a user's function as a model in training.

    ``user_model`` is how the user names the function. Remarks are added to ``notes``.
    Raises UserError if the result cannot be trained.
    """
    _refuse_result(result, user_model)
    # The third value, the optimizer, may be left out.
    model, users_loss, *optimizers = result
    _refuse_parameters(model, user_model)
    # A user may also return None in the place of an optimizer.
    optimizer = optimizers[0] if optimizers else None
    if optimizer is None:
        notes.append("no optimizer is given, so SGD with momentum is used")
        optimizer = _sgd(model)
    _refuse_optimizer(optimizer, user_model)

    # `wraps` also copies the attributes by which `Training.compiled` recognizes a loss
    # that torch.compile has made.
    @functools.wraps(users_loss)
    def loss() -> Any:
        with errors_of_user_code(user_model):
            return users_loss()

    file, _, function = user_model.rpartition(":")
    return Training(
        network=f"{Path(file).stem}-{function}",
        model=model,
        loss=loss,
        optimizer=optimizer,
        user_model=user_model,
    )


def missing_gradients(names: Sequence[str]) -> str:
    """Return in words which parameters get no gradient, and what to do about it.

    Parameters
    ----------
    names : sequence of str
        The names of the parameters, at least one.

    Returns
    -------
    str
        The words, to which a caller adds why every parameter needs a gradient.

    Examples
    --------
    >>> missing_gradients(["head.bias"])
    'the parameter head.bias gets no gradient: set requires_grad=False on it, or use it in the loss'
    """
    if len(names) == 1:
        return (
            f"the parameter {names[0]} gets no gradient: set requires_grad=False on it, or "
            "use it in the loss"
        )
    return (
        f"{len(names)} parameters get no gradient, such as {names[0]}: set "
        "requires_grad=False on them, or use them in the loss"
    )


def _described(loss: Any) -> str:
    """Return in words why no backward pass can start from what ``loss()`` has returned.

    The words end with what ``loss()`` should return.
    """
    if not isinstance(loss, Tensor):
        what = "None" if loss is None else f"a {type(loss).__name__}"
        return f"{what}: return the scalar loss tensor itself, without .item()"
    if loss.numel() != 1:
        shape = tuple(loss.shape)
        return f"a tensor of shape {shape}: return a scalar tensor, such as its mean"
    # What remains is a scalar from which no backward pass can start.
    return (
        "a scalar that depends on no trained parameter: compute it from the model, without "
        ".detach() or torch.no_grad()"
    )


def _refuse_result(result: Any, user_model: str) -> None:
    """Raise UserError unless a result is (model, loss) or (model, loss, any value).

    Whether the third value is an optimizer is checked by the caller.
    """
    # Whatever is no tuple counts as a single value.
    items = result if isinstance(result, tuple) else (result,)
    # Several optimizers are a likely mistake, which gets a message of its own.
    if len(items) > 3 and isinstance(items[-1], torch.optim.Optimizer):
        raise UserError(
            f"{user_model} returns {len(items) - 2} values after the loss: give one "
            "optimizer for all parameters"
        )
    # A loss that the function has computed already cannot be computed anew in each step.
    if len(items) in (2, 3) and isinstance(items[1], torch.Tensor):
        raise UserError(
            f"{user_model}: the second value is a tensor: return a function loss() that "
            "does one forward pass and returns the scalar loss"
        )
    is_valid = (
        len(items) in (2, 3) and isinstance(items[0], nn.Module) and callable(items[1])
    )
    if not is_valid:
        needed = "(model, loss) or (model, loss, optimizer)"
        raise UserError(
            f"{user_model} must return {needed}, but returns {_types_of(result)}"
        )


def _types_of(result: Any) -> str:
    """Return in words of which types a result is that is not (model, loss)."""
    if result is None:
        return "None"
    if not isinstance(result, tuple):
        return f"a {type(result).__name__}"
    types = ", ".join(type(item).__name__ for item in result)
    return f"({types})"


@contextmanager
def _without_torch_log() -> Iterator[None]:
    """Keep torch from logging a traceback of its own for each operator that fails.

    That happens on fake tensors. If the cause is a mistake of the user, the ranks show it
    later, once and without torch's inner frames.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled = log.disabled
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = was_disabled


def _refuse_parameters(model: nn.Module, user_model: str) -> None:
    """Raise UserError if no parameter is trained, or if devices differ."""
    if not any(p.requires_grad for p in model.parameters()):
        raise UserError(
            f"{user_model}: no parameter of the model needs a gradient, so that nothing "
            "is trained: set requires_grad=True on those to be trained"
        )
    devices = sorted({str(p.device) for p in model.parameters()})
    if len(devices) > 1:
        raise UserError(
            f"{user_model}: parameters are on {' and '.join(devices)}: each rank trains "
            "on one device: move the whole model there"
        )


@contextmanager
def errors_of_user_code(what: str) -> Iterator[None]:
    """Turn what a user's code raises into a UserError, after printing the traceback.

    The traceback has no frames of this library.

    Parameters
    ----------
    what : str
        A description of the code, with which the error message begins.

    Raises
    ------
    UserError
        If the block raises an exception. A UserError and an exception that says that
        memory ran out are raised as they are.
    """
    try:
        yield
    # A user's code may call sys.exit, which raises SystemExit.
    except (Exception, SystemExit) as error:
        if isinstance(error, UserError) or ran_out_of_memory(error):
            raise
        report = traceback.TracebackException.from_exception(error)
        # A user looks for the mistake in the user's own code.
        frames = [
            frame
            for frame in report.stack
            if not frame.filename.startswith(_HIDDEN_FILES)
        ]
        report.stack = traceback.StackSummary.from_list(frames)
        sys.stderr.writelines(report.format())
        where = _line_of_user(frames)
        # `from None`, because the traceback of the cause is printed already.
        raise UserError(
            f"{what}: {type(error).__name__}: {one_line(str(error))}{where}"
        ) from None


def _line_of_user(frames: Sequence[traceback.FrameSummary]) -> str:
    """Return which line of the user's own code was the last one to run, or nothing.

    Frames of installed packages, such as those of torch, are not the user's. Neither are
    those without a file, whose name may be "<string>".
    """
    # The outermost call comes first. So the search for the line that ran last begins at the end.
    for frame in reversed(frames):
        is_installed = "site-packages" in Path(frame.filename).parts
        if not is_installed and Path(frame.filename).is_file():
            return f" (line {frame.lineno} of {Path(frame.filename).name})"
    return ""
