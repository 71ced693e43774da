"""What each parameter tensor of a network costs in one training iteration, measured without slowing it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from numpy.typing import NDArray
from torch import nn

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.core.workload import LayerProfile
from ddlkit.run.instruments import flops as flop_counting
from ddlkit.run.instruments.clock import Budget, Marks, measure_interleaved, synchronizer
from ddlkit.run.jobs import ranks as peers
from ddlkit.run.nets import registry as networks
from ddlkit.run.sessions.session import ran_out_of_memory

Floats = NDArray[np.float64]
Combine = Callable[[Floats], Floats]

PRECISIONS = ("fp32", "tf32", "bf16")


class Training:
    """A network in training on one fixed batch."""

    def __init__(self, network: str, batch: int, device: torch.device, precision: str) -> None:
        self.model = networks.build(network).to(device)
        self.inputs, self.labels = networks.sample_batch(network, batch, device)
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")
        # Rate 0 is the same arithmetic, but the weights stay put: every repeat computes the same.
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0, momentum=0.9)

    def iterate(self, mark: Callable[[], object]) -> None:
        """One iteration; ``mark`` is called at its start and after forward, backward and update."""
        mark()
        with self.autocast:
            loss = nn.functional.cross_entropy(self.model(self.inputs), self.labels)
        mark()
        loss.backward()
        mark()
        self.optimizer.step()
        self.optimizer.zero_grad()
        mark()

    @contextmanager
    def watched(
        self, on_layer: Callable[[str], object], on_gradient: Callable[[str], object]
    ) -> Iterator[None]:
        """Call back when a layer starts and when a gradient is ready.

        A layer is a module that owns parameters; it goes by its first tensor, usually the weight. Both
        callbacks get the name of a tensor; one that several layers share has the first one's name.
        """
        handles = []
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        for module in self.model.modules():
            own = [names[p] for p in module.parameters(recurse=False) if p.requires_grad]
            if own:
                handles.append(module.register_forward_pre_hook(_hook(on_layer, own[0])))
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                hook = _hook(on_gradient, name)
                handles.append(parameter.register_post_accumulate_grad_hook(hook))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _hook(callback: Callable[[str], object], name: str) -> Callable[..., None]:
    def hook(*_: object) -> None:
        callback(name)

    return hook


@dataclass(frozen=True)
class _Order:
    """What happens in an iteration, in which order.

    starts : (s) first tensor of each layer, as the layers start in the forward pass
    flops : (s,) forward FLOP from each start to the next
    ready : (n) tensors, as their gradients become ready in the backward pass
    """

    starts: tuple[str, ...]
    flops: Floats
    ready: tuple[str, ...]

    @classmethod
    def of(cls, training: Training) -> _Order:
        """Seen in one iteration, which also makes the optimizer allocate its state."""
        starts: list[str] = []
        flops: list[int] = []
        ready: list[str] = []
        borders: list[int] = []
        with flop_counting.counter() as counter:

            def start(tensor: str) -> None:
                starts.append(tensor)
                flops.append(counter.get_total_flops())

            with training.watched(start, ready.append):
                training.iterate(lambda: borders.append(counter.get_total_flops()))
        forward_end = borders[1]
        return cls(tuple(starts), np.diff([*flops, forward_end]).astype(float), tuple(ready))

    def spans(self, seconds: Floats) -> Floats:
        """(s + n,) time from each layer's start to the next, then from each gradient to the next.

        seconds : the marks of a watched iteration. The first layer starts with the iteration.
        """
        s, n = len(self.starts), len(self.ready)
        forward_end = s + 1
        return np.diff(np.delete(seconds[: forward_end + n + 1], 1))

    def by_tensor(self, by_start: Floats) -> Floats:
        """(n,) in forward order from (s,): all of a layer goes to its first tensor."""
        row = {tensor: i for i, tensor in enumerate(reversed(self.ready))}
        shares = np.zeros(len(row))
        np.add.at(shares, [row[tensor] for tensor in self.starts], by_start)
        return shares


def device_named(name: str) -> torch.device:
    """cpu or a CUDA device that is there. Raises UserError for any other name."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"unknown device {name!r}: use cpu or cuda") from None
    if device.type not in ("cpu", "cuda"):
        raise UserError(f"device {name!r} is not supported: use cpu or cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UserError(
            f"device {name!r} is not there: torch sees {torch.cuda.device_count()} GPUs"
        )
    return device


@contextmanager
def arithmetic(precision: str, device: torch.device, threads: int | None) -> Iterator[None]:
    """Compute with this precision and this many CPU threads; afterwards as before."""
    if precision not in PRECISIONS:
        raise UserError(f"unknown precision {precision!r}: use {', '.join(PRECISIONS)}")
    if precision == "tf32" and device.type != "cuda":
        raise UserError("precision 'tf32' needs a CUDA device: use fp32 or bf16 on the CPU")
    if threads is not None and threads < 1:
        raise UserError(f"{threads} threads: must be at least 1")
    switches: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [switch.allow_tf32 for switch in switches]
    threads_before = torch.get_num_threads()
    for switch in switches:
        switch.allow_tf32 = precision == "tf32"
    torch.set_num_threads(threads or threads_before)
    try:
        yield
    finally:
        for switch, allowed in zip(switches, before, strict=True):
            switch.allow_tf32 = allowed
        torch.set_num_threads(threads_before)


@contextmanager
def memory_for(what: str) -> Iterator[None]:
    """Running out of memory is a mistake of the user: one line."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:  # torch's CUDA out-of-memory is a RuntimeError
        if not ran_out_of_memory(error):
            raise
        raise UserError(f"out of memory: {what}; choose a smaller batch") from None


def _slowest_line(spans: Floats, slowest: Combine) -> Floats:
    """(..., k) consecutive spans of the time line on which each point is that of the last rank to reach it.

    A synchronous step waits for whoever comes last, at every point anew; the slowest time of each span
    by itself would add up to more than any rank takes.
    """
    ends = np.cumsum(spans, axis=-1)
    return np.diff(slowest(ends.ravel()).reshape(ends.shape), prepend=0.0, axis=-1)


def _alone(values: Floats) -> Floats:
    """The slowest of one rank."""
    return values


def profile_layers(
    network: str,
    batch: int,
    *,
    device: str = "cpu",
    precision: str = "fp32",
    budget: Budget | None = None,
    threads: int | None = None,
    ranks: int = 1,
    slowest: Combine = _alone,
    agree: Callable[[bool], bool] | None = None,
) -> tuple[LayerProfile, pd.DataFrame]:
    """Time forward, backward and update of one training iteration, tensor by tensor.

    Iterations with and without hooks are run in turn. Hooks take a mark (CPU: the clock; CUDA: an event,
    nobody waits) when a layer starts and when a gradient has been accumulated:

    * forward: the time from a layer's start to the next layer's start belongs to the layer, so that
      activations, pooling and the like count to the layer before them, and the loss to the last one;
      of its tensors the first, usually the weight, carries it all, and the layer's FLOPs (2 per
      multiply-add).
    * backward: the time from one gradient to the next belongs to the latter; the loss's share to the
      first. The profile's order is the exact reverse of the order in which gradients became ready, the
      one that DistributedDataParallel fills its buckets in. It is forward order by layer; within a
      convolution or a normalisation the bias stands before the weight, whose gradient comes first.
      Gradients that one operation makes together (a recurrent layer's) are ready together: the first
      to be accumulated carries the time, the others none.
    * update: SGD with momentum, and clearing the gradients.

    Medians over the repeats, forward and backward each rescaled to the median of the iterations without
    hooks: the sums of the profile are the medians in the samples.

    budget, threads : how long, and with how many CPU threads (None: torch's default)
    ranks, slowest, agree : how many ranks profile at this same time, how they find the elementwise
        slowest of an array, and how they agree to stop; with these, the profile is that of a step which
        always waits for the slowest rank

    Returns the profile, and the samples as a table: one row a quantity (hooked_iteration,
    unhooked_iteration, forward, backward, update) and repeat. Raises UserError for an unknown network,
    device or precision, a batch or thread count below 1, and when memory runs out.
    """
    place = device_named(device)
    what = f"{network} at batch {batch} on {device}"
    with arithmetic(precision, place, threads), memory_for(what):
        training = Training(network, batch, place, precision)
        order = _Order.of(training)
        plain, watched = _measure(training, place, budget or Budget(), agree)
        sizes = {n: (p.numel(), p.element_size()) for n, p in training.model.named_parameters()}

    phases = _slowest_line(np.diff(plain), slowest)
    spans = _slowest_line(np.array([order.spans(marks) for marks in watched]), slowest)
    forward_s, backward_s, update_s = np.median(phases, axis=0)
    forward, backward = np.split(np.median(spans, axis=0), [len(order.starts)])
    tensors = order.ready[::-1]
    parameters = np.array([sizes[tensor][0] for tensor in tensors])
    profile = LayerProfile(
        network=network,
        device=place.type,
        batch=batch,
        tensor=tensors,
        layer=tuple(tensor.rpartition(".")[0] or tensor for tensor in tensors),
        parameters=parameters,
        gradient_bytes=parameters * [sizes[tensor][1] for tensor in tensors],
        forward_s=order.by_tensor(forward * (forward_s / forward.sum())),
        backward_s=(backward * (backward_s / backward.sum()))[::-1],
        flops=order.by_tensor(order.flops),
        update_s=float(update_s),
    )
    quantities = {
        "hooked_iteration": slowest(watched[:, -1]),
        "unhooked_iteration": phases.sum(axis=1),
        "forward": phases[:, 0],
        "backward": phases[:, 1],
        "update": phases[:, 2],
    }
    frames = [
        pd.DataFrame({"quantity": quantity, "sample": np.arange(len(seconds)), "seconds": seconds})
        for quantity, seconds in quantities.items()
    ]
    return profile, _labelled(pd.concat(frames, ignore_index=True), profile, precision, ranks)


def _measure(
    training: Training,
    device: torch.device,
    budget: Budget,
    agree: Callable[[bool], bool] | None,
) -> tuple[Floats, Floats]:
    """(repeats, 4) marks of iterations without hooks, (repeats, 4 + s + n) marks of those with."""
    runs: dict[str, list[Marks]] = {"plain": [], "watched": []}

    def plain() -> None:
        marks = Marks(device)
        training.iterate(marks.mark)
        runs["plain"].append(marks)

    def watched() -> None:
        marks = Marks(device)
        with training.watched(lambda _: marks.mark(), lambda _: marks.mark()):
            training.iterate(marks.mark)
        runs["watched"].append(marks)

    samples = measure_interleaved(
        {"plain": plain, "watched": watched},
        budget,
        synchronize=synchronizer(device),
        agree=agree,
    )
    seconds = {
        name: np.array([marks.seconds() for marks in runs[name][-len(kept) :]])
        for name, kept in samples.items()
    }
    return seconds["plain"], seconds["watched"]


def _labelled(
    frame: pd.DataFrame, profile: LayerProfile, precision: str, ranks: int
) -> pd.DataFrame:
    """The frame with the columns in front that say what was measured."""
    labels = {
        "network": profile.network,
        "device": profile.device,
        "batch": profile.batch,
        "precision": precision,
        "ranks": ranks,
    }
    for position, (name, value) in enumerate(labels.items()):
        frame.insert(position, name, value)
    return frame


def run_job(ranks: peers.Ranks, config: dict[str, Any]) -> None:
    """Job ``layers``: profile networks on every rank at the same time, as they will train.

    config : ``networks`` (name -> batch), ``out`` (directory), and optionally ``precision``, ``budget``
        (fields of Budget), ``threads`` (of each rank; else as the rank has joined)

    Rank 0 writes the tables ``layers`` and ``samples`` into ``out``, anew after every network, so that
    what is measured outlives a later failure. Raises UserError like `profile_layers`.
    """
    precision = config.get("precision", "fp32")
    threads = config.get("threads", ranks.torch_threads)
    tables: dict[str, list[pd.DataFrame]] = {"layers": [], "samples": []}
    for network, batch in config["networks"].items():
        profile, samples = profile_layers(
            network,
            batch,
            device=str(ranks.device),
            precision=precision,
            budget=Budget(**config.get("budget", {})),
            threads=threads,
            ranks=ranks.world_size,
            slowest=peers.slowest,
            # Stop when all are content: while one still measures, the others must load the machine.
            agree=lambda done: not peers.agree_any(not done),
        )
        peers.say(f"{network}, batch {batch}: {profile.workload().compute_s:.3f} s an iteration")
        tables["layers"].append(store.profile_frame(profile, precision, ranks.world_size, threads))
        tables["samples"].append(samples)
        if ranks.rank == 0:
            for name, frames in tables.items():
                table = pd.concat(frames, ignore_index=True)
                store.save_table(table, Path(config["out"]), name, schema=name, command=sys.argv)
