"""What each parameter tensor of a network costs in one training iteration.

Hooks on layers and gradients slow an iteration down. Therefore iterations with and
without hooks are run in turn: those without hooks give the times of the phases, and
those with hooks say how a phase is shared among the tensors. A hook only takes a mark,
for which nobody waits.

* Forward: the time from the start of a layer to the start of the next one belongs to
  the first tensor of the layer, and so do its FLOPs (2 per multiply-add). Activations,
  pooling and the loss have no tensors and count to the layer before them.
* Backward: the time from one gradient to the next belongs to the latter, and the
  backward pass of the loss to the first. If one operation makes several gradients
  together, as in a recurrent layer, the first of them carries the time.
* Update: the optimizer's step (SGD with momentum) and the clearing of the gradients.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any, NamedTuple, Protocol

import numpy as np
import pandas as pd
import torch

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.core.workload import LayerProfile
from ddlkit.jobs import clock
from ddlkit.jobs import rank as peers
from ddlkit.jobs.clock import Budget, Marks
from ddlkit.jobs.rank import Floats, Rank, Tables, job
from ddlkit.jobs.vitals import Retries, Watch
from ddlkit.measure import networks
from ddlkit.measure.given import Training, dtype_name, known
from ddlkit.measure.session import ran_out_of_memory, say
from ddlkit.model.predictor import HOST_BOUND, issue_share

# The time of a graph is only a lower bound of an iteration, so few repeats are enough.
GRAPH = Budget(warmup=1, min_repeats=3, max_repeats=10, max_s=0.2)
PRECISION = "fp32"
_PHASE = "a phase begins or ends"
_LAYER = "a layer starts"
_GRADIENT = "a gradient is ready"


# -- one iteration with hooks ----------------------------------------------------------


class _AnyMarks(Protocol):
    """Marks along an iteration: `ddlkit.jobs.clock.Marks` or `_FlopMarks`.

    ``mark`` adds a mark. ``seconds`` returns what each mark holds.
    """

    def mark(self) -> None: ...

    def seconds(self) -> Floats: ...


class _FlopMarks:
    """Marks that hold the FLOPs so far where other marks hold the seconds so far.

    `_HookedIteration` can thus share out FLOPs among tensors as it shares out time.

    Parameters
    ----------
    counter : FlopCounterMode or None
        The running counter of FLOPs. Without a counter all marks hold 0.
    """

    def __init__(self, counter: Any) -> None:
        self._counter = counter
        self._counts: list[int] = []

    def mark(self) -> None:
        """Add a mark that holds the FLOPs so far."""
        flops = 0
        if self._counter:
            flops = self._counter.get_total_flops()
        self._counts.append(flops)

    def seconds(self) -> Floats:
        """Return the FLOPs up to each mark.

        Only the name says seconds. It must be that of the method of `Marks`.
        """
        return np.array(self._counts, float)


class _Shares(NamedTuple):
    """How an iteration with hooks is shared among its tensors.

    All values are seconds, or FLOPs if the marks of the iteration count FLOPs.

    Attributes
    ----------
    layers : dict of str to float
        The last forward pass of each layer, by the name of the first tensor of the
        layer.
    ready : dict of str to float
        When each gradient becomes ready for the last time, counted from the start of
        the last backward pass. The first gradient to become ready comes first.
    whole : float
        The entire iteration.
    """

    layers: dict[str, float]
    ready: dict[str, float]
    whole: float


class _Event(NamedTuple):
    """An event of an iteration with hooks.

    Attributes
    ----------
    kind : str
        `_PHASE`, `_LAYER` or `_GRADIENT`.
    tensor : str
        The name of the gradient's tensor, or of the layer's first one; empty for a phase.
    """

    kind: str
    tensor: str


class _HookedIteration:
    """An iteration with hooks, which `run` runs and `read` shares among its tensors.

    Event number k of ``_events`` has mark number k of ``_marks``, which holds the seconds,
    or the FLOPs, since the first mark.
    """

    def __init__(self, marks: _AnyMarks) -> None:
        self._marks = marks
        self._events: list[_Event] = []

    def run(self, training: Training) -> None:
        """Train for one iteration, and note each event with a mark."""
        # `watched` calls these with the name of a tensor.
        on_layer = partial(self._note, _LAYER)
        on_gradient = partial(self._note, _GRADIENT)
        with training.watched(on_layer, on_gradient):
            training.iterate(partial(self._note, _PHASE, ""))

    def _note(self, kind: str, tensor: str) -> None:
        """Note that an event of this kind, of this tensor, happens now."""
        self._events.append(_Event(kind, tensor))
        self._marks.mark()

    def read(self) -> _Shares:
        """Return how the iteration is shared among its tensors.

        An iteration that accumulates several batches, or whose loss runs backward several
        times, has several forward and backward passes. Only the last backward pass and the
        forward pass before it are shared. All values are seconds, or FLOPs if the marks
        count FLOPs.
        """
        # What has passed from the first mark to each mark. Despite the name of the method
        # these may be FLOPs.
        passed = self._marks.seconds()
        phase_numbers = [
            k for k, event in enumerate(self._events) if event.kind == _PHASE
        ]
        # There are four phase events, however many passes there are: the start of the
        # iteration, the start and the end of the last backward pass, and the end of the
        # iteration.
        backward_begin = phase_numbers[1]
        # When each gradient becomes ready, counted from the start of the last backward
        # pass.
        ready = self._ready(passed, backward_begin)
        # How long the forward pass of each layer takes. If the first tensor of a layer got no
        # gradient, and so is not in `ready`, the time of the layer is added to that of the layer
        # before it.
        layers = self._layers(passed, backward_begin, ready)
        return _Shares(layers, ready, whole=float(passed[-1]))

    def _ready(self, passed: Floats, backward_begin: int) -> dict[str, float]:
        """Return when each gradient is ready, counted from the last backward pass.

        ``passed`` has the seconds, or the FLOPs, from the first mark to each mark.
        ``backward_begin`` is the number of the event at which the last backward pass
        begins.
        """
        # A gradient may become ready several times, if several batches are accumulated
        # or if checkpointing computes a segment anew. Only the last time counts,
        # because a gradient cannot be sent before.
        last_mark: dict[str, int] = {}
        for k, event in enumerate(self._events):
            if event.kind == _GRADIENT:
                last_mark[event.tensor] = k
        ready: dict[str, float] = {}
        # Tensors are sorted by the number of their last mark, which is the order in time.
        for tensor in sorted(last_mark, key=last_mark.__getitem__):
            since_begin = float(passed[last_mark[tensor]] - passed[backward_begin])
            # A gradient that only earlier backward passes compute is ready before the
            # last one begins.
            ready[tensor] = max(0.0, since_begin)
        return ready

    def _layers(
        self, passed: Floats, backward_begin: int, ready: dict[str, float]
    ) -> dict[str, float]:
        """Return how long the last forward pass of each layer takes.

        The keys are the first tensors of the layers. ``passed`` has the seconds, or the
        FLOPs, from the first mark to each mark. ``backward_begin`` is the number of the
        event at which the last backward pass begins. ``ready`` has the tensors in the
        order in which their gradients become ready.
        """
        forward_begin = self._forward_begin(backward_begin)
        # The numbers of the events at which layers start. All events between
        # `forward_begin` and `backward_begin` are such starts. A layer whose first tensor
        # gets no gradient has no row in a profile, so its time counts to the layer before
        # it.
        starts = [
            k
            for k in range(forward_begin + 1, backward_begin)
            if self._events[k].tensor in ready
        ]
        # The first tensor of the layer that starts at each of these events.
        tensors = [self._events[k].tensor for k in starts]
        if not tensors:
            # If no layer was seen to start, as in a compiled model, the first tensor of the
            # model has all of forward. Its gradient is ready last.
            *_, first_tensor = ready
            tensors = [first_tensor]
        # Where the share of each layer begins. The first share begins with forward and not
        # with the first layer, because it has what passes before this layer, too. It is the
        # only share if no start was seen.
        share_begins = [forward_begin, *starts[1:]]
        # Each share ends where the next one begins, and the last one where backward begins.
        boundaries = passed[[*share_begins, backward_begin]]
        layers = dict.fromkeys(tensors, 0.0)
        # A layer that is used several times has the sum of its shares.
        for tensor, share in zip(tensors, np.diff(boundaries), strict=True):
            layers[tensor] += float(share)
        return layers

    def _forward_begin(self, backward_begin: int) -> int:
        """Return the number of the event at which the last forward pass begins.

        ``backward_begin`` is the number of the event at which the last backward pass
        begins. The forward pass begins at the last event that precedes this one and is not
        the start of a layer: the last gradient of an earlier backward pass or, if there is
        no such pass, the start of the iteration.
        """
        event_numbers = range(backward_begin)
        return max(k for k in event_numbers if self._events[k].kind != _LAYER)


@dataclass(frozen=True)
class _Order:
    """The order of an iteration's events, with s layers and n tensors.

    Attributes
    ----------
    first_tensors : list of str, length s
        The first tensor of each layer, in the order in which layers start. A compiled
        model counts as one layer.
    ready : list of str, length n
        The tensors in the order in which their gradients become ready for the last
        time.
    flops : ndarray, shape (s,)
        FLOPs of the forward pass of each layer.
    """

    first_tensors: list[str]
    ready: list[str]
    flops: Floats

    @classmethod
    def of_first_iteration(cls, training: Training, me: Rank | None) -> _Order:
        """Train for a first iteration, and return the order of its events.

        The iteration also allocates the state of the optimizer. ``me`` is this rank if
        all ranks of a job profile at the same time, and None if this process is alone.
        """
        # Operations within compiled code cannot be counted. For a compiled model
        # `counter` is therefore None, and all FLOPs are 0.
        counting = nullcontext() if training.compiled else networks.flop_counter()
        with counting as counter:
            first_iteration = _HookedIteration(_FlopMarks(counter))
            first_iteration.run(training)
        # The marks of this iteration count FLOPs instead of seconds. So `read` shares
        # out FLOPs among the tensors. It names a layer by the first tensor of the
        # layer.
        flop_shares = first_iteration.read()
        first_tensors = list(flop_shares.layers)
        # Only the order of the gradients is needed here.
        ready = list(flop_shares.ready)
        if me:
            # Ranks compare their times tensor by tensor, so all take the order of rank 0.
            # They can send numbers only, which are positions in a list of all names. The
            # list is equal on all ranks.
            all_names = [*training.trained()]
            first_tensors = _as_rank_0(first_tensors, all_names)
            ready = _as_rank_0(ready, all_names)
        # A model may choose its layers at random, so that a rank may lack a layer that
        # rank 0 has. Such a layer has 0 FLOPs here.
        flops = [flop_shares.layers.get(tensor, 0.0) for tensor in first_tensors]
        return cls(first_tensors, ready, np.array(flops))

    def spans(self, iteration: _HookedIteration) -> Floats:
        """Return the spans of an iteration with hooks in seconds, shape (s + n + 1,).

        The first s spans are the forward passes of the layers, in the order of
        ``first_tensors``. Each of the next n spans ends when a gradient becomes ready, in the
        order of ``ready``. The first of these n spans begins with the backward pass, or with
        the last one if there are several, and each later one where the span before it ends.
        The last span of all is the whole iteration.
        """
        # `times.ready` counts from the start of the last backward pass.
        times = iteration.read()
        # A layer or gradient that this iteration did not have counts 0.
        layers_s = [times.layers.get(tensor, 0.0) for tensor in self.first_tensors]
        ready_s = [times.ready.get(tensor, 0.0) for tensor in self.ready]
        # Two gradients that are ready at nearly the same time may swap their order in
        # this iteration. No span may be negative, so the later of two times counts.
        ready_in_order_s = np.maximum.accumulate(ready_s)
        gradients_s = np.diff(ready_in_order_s, prepend=0.0)
        return np.array([*layers_s, *gradients_s, times.whole])

    def by_tensor(self, by_layer: Floats) -> Floats:
        """Return values (s,) by layer as values (n,) by tensor, in forward order.

        The first tensor of a layer has the value of the layer. All others have 0.
        """
        values = np.zeros(len(self.ready))
        # Forward order is the reverse of the order in which gradients become ready.
        last_position = len(self.ready) - 1
        positions = [
            last_position - self.ready.index(tensor) for tensor in self.first_tensors
        ]
        # No two positions are equal, because `first_tensors` has each tensor once:
        # layers that share their first tensor were added up when the iteration was
        # read.
        values[positions] = by_layer
        return values


_NOT_NAMED = -1.0
"""The position of a name that a rank does not have."""


def _as_rank_0(names: list[str], all_names: list[str]) -> list[str]:
    """Return the argument ``names`` of rank 0. All ranks call this function.

    ``all_names`` are equal on all ranks, and contain the ``names`` of each rank. Ranks
    exchange numbers only. So each rank sends, for each of ``all_names``, its position
    in the rank's own ``names``.
    """
    positions = {name: float(position) for position, name in enumerate(names)}
    own_positions = [positions.get(name, _NOT_NAMED) for name in all_names]
    of_rank_0 = peers.everyones(own_positions)[0]
    # Names that rank 0 does not have come first in this order, because `_NOT_NAMED` is
    # negative. They are left out.
    in_order = np.argsort(of_rank_0)
    return [all_names[k] for k in in_order if of_rank_0[k] != _NOT_NAMED]


# -- profiles --------------------------------------------------------------------------


@contextmanager
def compute_on(
    what: str,
    device: str | torch.device,
    precision: str = PRECISION,
    threads: int | None = None,
) -> Iterator[torch.device]:
    """Compute on a device with a precision, and restore torch's settings afterwards.

    Parameters
    ----------
    what : str
        A description of the computation, for error messages.
    device : str or torch.device
        The device.
    precision : str, optional
        ``"tf32"`` lets CUDA use TF32, and any other name forbids it. The autocast of
        ``"bf16"`` is not set here, but by `ddlkit.measure.given.known`. An empty string
        leaves torch's settings as they are.
    threads : int, optional
        The number of CPU threads, by default as many as torch uses already.

    Yields
    ------
    torch.device
        The device.

    Raises
    ------
    UserError
        If TF32 is asked for on the CPU, which has none, and if memory runs out within the
        block.
    """
    torch_device = torch.device(device)
    if precision == "tf32" and torch_device.type != "cuda":
        raise UserError(
            "precision 'tf32' needs a CUDA device: use fp32 or bf16 on the CPU"
        )
    # TF32 has a switch for products of matrices, and another one for convolutions.
    switches: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    # The stack calls each callback when the block ends, also after an exception. Each
    # restores a setting as it is now.
    with ExitStack() as restore:
        restore.callback(torch.set_num_threads, torch.get_num_threads())
        for switch in switches:
            restore.callback(setattr, switch, "allow_tf32", switch.allow_tf32)
            if precision:
                # CUDA's convolutions use TF32 by default.
                switch.allow_tf32 = precision == "tf32"
        torch.set_num_threads(threads or torch.get_num_threads())
        try:
            yield torch_device
        except (MemoryError, RuntimeError) as error:
            # torch raises a RuntimeError when a GPU's memory runs out. Any other
            # RuntimeError is raised as it is.
            if not ran_out_of_memory(error):
                raise
            raise UserError(f"out of memory: {what}; choose a smaller batch") from None


def profile_layers(
    network: str,
    batch: int,
    device: str = "cpu",
    precision: str = PRECISION,
    budget: Budget | None = None,
    threads: int | None = None,
    me: Rank | None = None,
) -> tuple[LayerProfile, pd.DataFrame]:
    """Return the profile of a network that is known by name.

    Parameters
    ----------
    network : str
        The name of the network.
    batch : int
        The batch size.
    device : str, optional
        ``"cpu"`` or ``"cuda"``.
    precision : str, optional
        ``"fp32"``, ``"tf32"`` or ``"bf16"``.
    budget : Budget, optional
        How long to measure.
    threads : int, optional
        The number of CPU threads, by default as many as torch uses already.
    me : Rank, optional
        This rank, if all ranks of a job profile at the same time.

    Returns
    -------
    profile : LayerProfile
        Times in seconds by tensor, in forward order.
    samples : DataFrame
        Table ``samples``. On a GPU, if ``me`` is not given, it also has the quantity
        ``"graph_iteration"``: the iteration as one CUDA graph, which the host does not have
        to issue.

    Raises
    ------
    UserError
        If the network or its batch is not possible, or if memory runs out.

    See Also
    --------
    profile_training : The profile of any model in training.
    """
    what = f"{network} at batch {batch} on {device}"
    with compute_on(what, device, precision, threads) as torch_device:
        training = known(network, batch, torch_device, precision)
        return profile_training(training, precision, budget, me, as_graph=True)


def profile_training(
    training: Training,
    precision: str,
    budget: Budget | None = None,
    me: Rank | None = None,
    as_graph: bool = False,
) -> tuple[LayerProfile, pd.DataFrame]:
    """Return the profile of one training iteration, tensor by tensor.

    Parameters
    ----------
    training : Training
        The model in training.
    precision : str
        The name of the precision in the table. It changes nothing of the computation.
    budget : Budget, optional
        How long to measure, by default as `Budget` has it.
    me : Rank, optional
        This rank, if all ranks of a job profile at the same time. Each step of an
        iteration then ends when the slowest rank has ended it. By default this process
        profiles alone.
    as_graph : bool, optional
        Whether the iteration is also timed as one CUDA graph, on a GPU and if this process
        profiles alone.

    Returns
    -------
    profile : LayerProfile
        Times in seconds by tensor, in forward order.
    samples : DataFrame
        Table ``samples``: a row per repeat of each quantity. On a GPU the quantity
        ``"issue"`` is the time in which the host started all kernels of an iteration
        without hooks.

    Notes
    -----
    Hooks on layers and gradients note when each layer starts and when each gradient is
    ready, and slow an iteration down. So iterations with and without hooks are run in
    turn. Times are medians over the repeats. Those of the tensors are scaled such that
    forward and backward add up to the iterations without hooks. With several batches or
    backward passes in an iteration, forward is all that precedes the last backward
    pass.
    """
    # `peers.slowest` returns the largest value over all ranks of each number. A process
    # that profiles alone keeps its own values.
    slowest: Callable[[Floats], Floats] = peers.slowest if me else np.asarray
    # In which order layers start and gradients become ready, as the spans below have it.
    order = _Order.of_first_iteration(training, me)
    measured = _measure_undisturbed(training, budget or Budget(), me)
    # Shape (repeats, 3). The differences of the four marks of an iteration without hooks
    # are its forward, backward and update. Each ends when the slowest rank has ended it.
    phases = _spans_to_slowest_end(np.diff(measured.marks_s), slowest)
    # Shape (repeats, spans). The last span is the whole iteration, of which the slowest rank
    # counts. The spans before it, those of layers and gradients, follow one another. Like a
    # phase, each of these ends when the slowest rank has ended it.
    hooked = np.array([order.spans(iteration) for iteration in measured.hooked])
    hooked_iterations = hooked[:, -1]
    spans = _spans_to_slowest_end(hooked[:, :-1], slowest)
    quantities = {
        "hooked_iteration": slowest(hooked_iterations),
        "unhooked_iteration": phases.sum(axis=1),
        "forward": phases[:, 0],
        "backward": phases[:, 1],
        "update": phases[:, 2],
    }
    if training.device.type == "cuda":
        quantities["issue"] = slowest(measured.issue_s)
        if as_graph and not me:
            quantities |= _graph(training)  # adds ``graph_iteration``, if any
    labels = {
        "network": training.network,
        "device": training.device.type,
        "batch": training.batch,
        "precision": precision,
        "ranks": _rank_count(me),
    }
    samples = clock.rows_by("quantity", quantities, labels)
    return _profile(training, order, phases, spans), samples


def _rank_count(me: Rank | None) -> int:
    """Return how many ranks profile at the same time."""
    return me.world_size if me else 1


def _profile(
    training: Training, order: _Order, phases: Floats, spans: Floats
) -> LayerProfile:
    """Return the profile of a training from r repeats.

    ``phases`` are seconds of forward, backward and update without hooks, shape (r, 3).
    ``spans`` are the seconds of the s layers' forward passes and of the n gradients, as
    `_Order.spans` returns them but without the whole iteration, shape (r, s + n).
    """
    forward_s, backward_s, update_s = np.median(phases, axis=0)
    span_medians = np.median(spans, axis=0)
    # The s spans of the layers come first, then the n spans of the gradients. Hooks slow
    # an iteration down. So the spans of the layers are scaled to add up to forward
    # without hooks, and those of the gradients to backward without hooks.
    n_layers = len(order.first_tensors)
    layers = span_medians[:n_layers]
    gradients = span_medians[n_layers:]
    layers_s = layers * (forward_s / layers.sum())
    gradients_s = gradients * (backward_s / gradients.sum())
    parameters = training.trained()
    # A profile has tensors in forward order, which is the reverse of the order in which
    # gradients become ready.
    tensors = tuple(reversed(order.ready))
    backward_in_forward_order_s = gradients_s[::-1]
    return LayerProfile(
        network=training.network,
        device=training.device.type,
        batch=training.batch,
        tensor=tensors,
        layer=tuple(_layer_of(tensor) for tensor in tensors),
        parameters=np.array([parameters[tensor].numel() for tensor in tensors]),
        gradient_bytes=np.array([parameters[tensor].nbytes for tensor in tensors]),
        # The first tensor of a layer has all of the layer's time and FLOPs.
        forward_s=order.by_tensor(layers_s),
        backward_s=backward_in_forward_order_s,
        flops=order.by_tensor(order.flops),
        update_s=float(update_s),
        dtype=tuple(dtype_name(parameters[tensor]) for tensor in tensors),
    )


def _layer_of(tensor: str) -> str:
    """Return the name of a tensor's layer, such as "fc1" for the tensor "fc1.weight".

    The tensor of a model that is a single layer has a name without a dot. This name then
    also stands for the layer.
    """
    layer, _, _ = tensor.rpartition(".")
    return layer or tensor


def layer_tables(
    network: str,
    batch: int,
    device: str,
    precision: str,
    budget: Budget,
    threads: int | None,
    me: Rank | None = None,
) -> Tables:
    """Return the tables ``layers`` and ``samples`` of a network that is known by name.

    Parameters
    ----------
    network : str
        The name of the network.
    batch : int
        The batch size.
    device : str
        ``"cpu"`` or ``"cuda"``.
    precision : str
        ``"fp32"``, ``"tf32"`` or ``"bf16"``.
    budget : Budget
        How long to measure.
    threads : int or None
        The number of CPU threads. With None torch keeps its number.
    me : Rank, optional
        This rank, if all ranks of a job profile at the same time.

    Returns
    -------
    mapping of str to DataFrame
        The tables by their schema.

    Raises
    ------
    UserError
        If the network or its batch is not possible, or if memory runs out.
    """
    profile, samples = profile_layers(
        network, batch, device, precision, budget, threads, me
    )
    # The share of an iteration in which the host starts its kernels. Above `HOST_BOUND`, the
    # host and not the GPU decides how long an iteration takes. On the CPU the share is NaN,
    # which is above no number.
    host_share = issue_share(samples)
    if host_share > HOST_BOUND:
        name = f"{network}, batch {batch}, {precision}"
        say(f"{name}: the host needs {host_share:.0%} of an iteration to issue it")
    frame = store.profile_frame(
        profile, precision, _rank_count(me), threads or torch.get_num_threads()
    )
    return {"layers": frame, "samples": samples}


# -- how iterations are timed ----------------------------------------------------------


class _Measured(NamedTuple):
    """What was timed in r repeats.

    Attributes
    ----------
    marks_s : ndarray, shape (r, 4)
        Seconds at the four marks of each iteration without hooks: its start, the start
        and the end of the last backward pass, and its end.
    hooked : list of _HookedIteration, length r
        The iterations with hooks.
    issue_s : ndarray, shape (r,)
        Seconds in which the host issued each iteration without hooks. On a GPU the
        iteration itself may end later.
    """

    marks_s: Floats
    hooked: list[_HookedIteration]
    issue_s: Floats


def _measure_undisturbed(
    training: Training, budget: Budget, me: Rank | None
) -> _Measured:
    """Return a measurement, if possible one that nothing else on the machine disturbed.

    A disturbed measurement is repeated twice at most. The third one is returned in any
    case. On a GPU nothing is repeated, because nobody else uses the GPU and its time is
    expensive. What the host of a virtual machine took of the processor meanwhile can be
    read later in table ``vitals``. ``me`` is None if this process profiles alone.
    """
    retries = Retries(
        most=0 if training.device.type == "cuda" else 2, say=me.say if me else say
    )
    # A process that profiles alone is rank 0.
    rank = me.rank if me else 0
    while True:
        watch = Watch(rank)  # notes how busy the machine is from now on
        measured = _measure(training, budget, me)
        used = watch.usage()
        if me:
            used = peers.usage_of_all(used)
        # `again` is false if nothing disturbed the measurement, or if no repeat is left.
        if not retries.again(used):
            return measured


def _measure(training: Training, budget: Budget, me: Rank | None) -> _Measured:
    """Time iterations without and with hooks in turn, as long as the budget says.

    ``me`` is None if this process profiles alone.
    """
    device = training.device
    unhooked: list[Marks] = []
    hooked: list[_HookedIteration] = []
    issue_s: list[float] = []

    def run_unhooked() -> None:
        """Run an iteration without hooks, and keep its marks and its time of issue."""
        marks = Marks(device)
        unhooked.append(marks)
        start_s = perf_counter()
        # On a GPU this returns when the host has issued all work.
        training.iterate(marks.mark)
        issue_s.append(perf_counter() - start_s)

    def run_hooked() -> None:
        """Run an iteration with hooks, and keep what it noted."""
        iteration = _HookedIteration(Marks(device))
        iteration.run(training)
        hooked.append(iteration)

    print_line = me.say if me else say
    samples = clock.measure_interleaved(
        {"unhooked": run_unhooked, "hooked": run_hooked},
        budget,
        synchronize=clock.synchronizer(device),
        # Ranks end after the same repeat. A process alone decides by itself: `bool` returns
        # its own decision.
        agree=peers.agree_all if me else bool,
        progress=partial(_say_progress, clock.Pace(), print_line, budget),
    )
    # Marks give the times, so only the number of the samples is needed. The lists begin
    # with the repeats that warmed up. `samples` has only the repeats that count.
    repeats = len(samples["unhooked"])
    marks_s = np.array([marks.seconds() for marks in unhooked[-repeats:]])
    return _Measured(marks_s, hooked[-repeats:], np.array(issue_s[-repeats:]))


def _say_progress(
    pace: clock.Pace,
    print_line: Callable[[str], object],
    budget: Budget,
    repeats: int,
    taken_s: float,
) -> None:
    """Print now and then how many iterations are timed, and how long it still takes.

    ``repeats`` is how many repeats are timed, and ``taken_s`` how long they took together.
    """
    if not pace.due():
        return
    if not repeats:
        print_line("warming up: the timing has not begun")
        return
    # The fewest repeats are run even if they take longer than `max_s`.
    repeat_s = taken_s / repeats
    fewest_left_s = (budget.min_repeats - repeats) * repeat_s
    left_s = max(0.0, budget.max_s - taken_s, fewest_left_s)
    # If hardly anything is left, a line is of no use.
    if left_s < 1:
        return
    # Each repeat has one iteration without hooks and one with hooks.
    timed = f"{2 * repeats}"
    if repeats < budget.min_repeats:
        timed = f"{2 * repeats} of at least {2 * budget.min_repeats}"
    print_line(f"{timed} iterations are timed; at most about {left_s:.0f} s are left")


def _spans_to_slowest_end(spans: Floats, slowest: Callable[[Floats], Floats]) -> Floats:
    """Return spans that each end when the last rank has ended the span.

    ``spans`` are seconds that follow one another along the last axis, shape (..., k),
    and so is the result. ``slowest`` returns the largest value over all ranks of each
    number in an array.
    """
    # The slowest rank need not be the same in all spans. The largest durations could
    # add up to more than any rank took, so the ends of spans are compared.
    ends = np.cumsum(spans, axis=-1)
    last_ends = slowest(ends)
    # Each span begins where the one before it ends, and the first one at 0.
    return np.diff(last_ends, prepend=0.0, axis=-1)


def _graph(training: Training) -> dict[str, Floats]:
    """Return the quantity ``graph_iteration``: seconds of iterations as one CUDA graph.

    A CUDA graph is a recording of all kernels of an iteration, which the GPU replays
    without the host. The result is empty if no graph can be captured, because the network
    waits for the GPU within its iteration, or because there is too little memory.
    """
    # Memory of the GPU that is freed during a capture makes the capture fail. So what
    # is garbage already is freed before.
    gc.collect()
    try:
        # CUDA captures no graph on the default stream.
        stream = torch.cuda.Stream()
        graph = torch.cuda.CUDAGraph()
        # Work that is under way on the default stream, such as an update, ends first.
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            # Libraries such as cuBLAS set up their workspaces in a first iteration,
            # which must not happen during the capture.
            training.iterate()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            training.iterate()
        seconds = clock.measure_on(training.device, graph.replay, GRAPH)
    except RuntimeError as error:
        # CUDA explains over several lines. The first one says what is wrong.
        reason = str(error).strip().splitlines()[0]
        say(f"the iteration is not timed as a CUDA graph: {reason}")
        # A capture that fails leaves its stream behind as the current one. It may also spoil
        # the random numbers of this process, which cannot be mended here. An isolated
        # session then goes on in a new process.
        torch.cuda.set_stream(torch.cuda.default_stream())
        return {}
    return {"graph_iteration": seconds}


# -- the job ---------------------------------------------------------------------------


@dataclass(frozen=True)
class LayersSettings:
    """The settings of the job.

    Attributes
    ----------
    networks : mapping of str to int
        The batch size of each network by its name.
    budget : Budget
        How long to measure each network.
    """

    networks: Mapping[str, int]
    budget: Budget = Budget()


@job(LayersSettings, "layers", "samples")
def layers_job(me: Rank, settings: LayersSettings) -> Iterator[Tables]:
    """Profile one network after the other, each on all ranks at the same time.

    Parameters
    ----------
    me : Rank
        This rank.
    settings : LayersSettings
        The networks.

    Yields
    ------
    mapping of str to DataFrame
        Tables ``layers`` and ``samples`` of a network.
    """
    for network, batch in settings.networks.items():
        yield layer_tables(
            network,
            batch,
            device=str(me.device),
            precision=PRECISION,
            budget=settings.budget,
            threads=me.torch_threads,
            me=me,
        )
