"""What each parameter tensor of a network costs in one training iteration, measured without slowing it.

Iterations with and without hooks are run in turn; hooks take marks, for which nobody waits:

* forward: the time from a layer's start to the next layer's start belongs to the layer's first tensor
  (activations, pooling and the loss to the layer before them), and so do its FLOPs (2 per multiply-add).
* backward: the time from one gradient to the next belongs to the latter; the loss's share to the first. Of
  gradients that one operation makes together (a recurrent layer's) the first carries the time.
* update: SGD with momentum, and clearing the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from time import perf_counter, sleep
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import nn

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.core.workload import LayerProfile
from ddlkit.model.predictor import HOST_BOUND, issue_share
from ddlkit.run import clock
from ddlkit.run.clock import Budget, Marks
from ddlkit.run.jobs import rank as peers
from ddlkit.run.jobs.rank import Floats, Rank, Tables, job
from ddlkit.run.nets import registry as networks
from ddlkit.run.sessions import ran_out_of_memory, say
from ddlkit.run.vitals import RETRY_S, TRIES, Watch

GRAPH = Budget(warmup=1, min_repeats=3, max_repeats=10, max_s=0.2)  # a floor needs no more


class Training:
    """A network in training on one fixed batch; model : in its place, as it is wrapped to be trained."""

    def __init__(
        self, network: str, batch: int, device: torch.device, precision: str, model: Any = None
    ) -> None:
        self.model: nn.Module = model or networks.build(network).to(device)
        self.inputs, self.labels = networks.sample_batch(network, batch, device)
        self.autocast = torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")
        # Rate 0 is the same arithmetic, but the weights stay put: every repeat computes the same.
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0, momentum=0.9)

    def iterate(self, mark: Callable[[], object] = lambda: None) -> None:
        """Do an iteration; ``mark`` is called at its start and after forward, backward and update."""
        mark()
        with self.autocast:
            loss = nn.functional.cross_entropy(self.model(self.inputs), self.labels)
        mark()
        loss.backward()
        mark()
        self.optimizer.step()
        self.optimizer.zero_grad()
        mark()

    def accumulate(self) -> None:
        """Do forward and backward, whose gradients add up to those that there are."""
        with self.autocast:
            loss = nn.functional.cross_entropy(self.model(self.inputs), self.labels)
        loss.backward()

    @contextmanager
    def watched(
        self, on_layer: Callable[[str], None], on_gradient: Callable[[str], None]
    ) -> Iterator[None]:
        """Call back with the name of a starting layer's first tensor, and of one whose gradient is ready."""
        names = {p: name for name, p in self.model.named_parameters() if p.requires_grad}
        with ExitStack() as hooks:
            for module in self.model.modules():
                for p in [p for p in module.parameters(recurse=False) if p in names][:1]:
                    before = module.register_forward_pre_hook(lambda *_, at=names[p]: on_layer(at))
                    hooks.enter_context(before)
            for p, name in names.items():
                after = p.register_post_accumulate_grad_hook(lambda _, at=name: on_gradient(at))
                hooks.enter_context(after)
            yield


class _Order:
    """What happens in an iteration, in which order, seen in one that also allocates the optimizer's state.

    starts : (s) first tensor of each layer, as they start; flops : (s,) forward FLOP from each to the next
    ready : (n) tensors, as their gradients become ready
    """

    def __init__(self, training: Training) -> None:
        self.starts, self.ready = list[str](), list[str]()
        flops, borders = list[int](), list[int]()
        with networks.flop_counter() as counter:

            def start(tensor: str) -> None:
                self.starts.append(tensor)
                flops.append(counter.get_total_flops())

            with training.watched(start, self.ready.append):
                training.iterate(lambda: borders.append(counter.get_total_flops()))
        self.flops = np.diff([*flops, borders[1]]).astype(float)

    def spans(self, seconds: Floats) -> Floats:
        """Return (s + n,) times from each layer's start to the next, then from each gradient to the next."""
        return np.diff(np.delete(seconds[: len(self.starts) + len(self.ready) + 2], 1))

    def by_tensor(self, by_start: Floats) -> Floats:
        """Return (n,) in forward order from (s,): all of a layer goes to its first tensor."""
        shares = np.zeros(len(self.ready))
        np.add.at(shares, [-1 - self.ready.index(tensor) for tensor in self.starts], by_start)
        return shares


@contextmanager
def compute_on(
    what: str, device: str | torch.device, precision: str = "fp32", threads: int | None = None
) -> Iterator[torch.device]:
    """Compute ``what`` with this precision and this many CPU threads; afterwards as before."""
    place = torch.device(device)
    if precision == "tf32" and place.type != "cuda":
        raise UserError("precision 'tf32' needs a CUDA device: use fp32 or bf16 on the CPU")
    switches: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    with ExitStack() as before:
        before.callback(torch.set_num_threads, torch.get_num_threads())
        for switch in switches:
            before.callback(setattr, switch, "allow_tf32", switch.allow_tf32)
            switch.allow_tf32 = precision == "tf32"
        torch.set_num_threads(threads or torch.get_num_threads())
        try:
            yield place
        except (MemoryError, RuntimeError) as error:  # torch's CUDA out-of-memory is a RuntimeError
            if not ran_out_of_memory(error):
                raise
            raise UserError(f"out of memory: {what}; choose a smaller batch") from None


def _slowest_line(spans: Floats, slowest: Callable[[Floats], Floats]) -> Floats:
    """Return (..., k) spans of the time line on which each point is that of the last rank to reach it."""
    ends = np.cumsum(spans, axis=-1)
    return np.diff(slowest(ends.ravel()).reshape(ends.shape), prepend=0.0, axis=-1)


def profile_layers(
    network: str,
    batch: int,
    device: str = "cpu",
    precision: str = "fp32",
    budget: Budget | None = None,
    threads: int | None = None,
    me: Rank | None = None,
) -> tuple[LayerProfile, pd.DataFrame]:
    """Return the profile of one training iteration, tensor by tensor, and its samples as a table.

    me : where all ranks of a job profile at the same time: each step then waits for the slowest of them

    Times are medians, forward and backward each rescaled to that of the iterations without hooks. On a GPU
    "issue" is when the host had asked for all of an unhooked iteration; "graph_iteration" as of `_graph`.
    """
    slowest = peers.slowest if me else np.asarray
    with compute_on(f"{network} at batch {batch} on {device}", device, precision, threads) as place:
        training = Training(network, batch, place, precision)
        order = _Order(training)
        for _ in range(TRIES):
            watch = Watch(me.rank if me else 0)
            plain, watched, issue = _measure(training, budget or Budget(), me)
            used = peers.usage_of_all(watch.usage()) if me else watch.usage()
            if not used.disturbed:
                break
            sleep(RETRY_S)
        on_gpu = {"issue": issue} if place.type == "cuda" else {}
        on_gpu |= _graph(training) if on_gpu and not me else {}
    phases = _slowest_line(np.diff(plain), slowest)
    spans = _slowest_line(np.array([order.spans(marks) for marks in watched]), slowest)
    quantities = {
        "hooked_iteration": slowest(watched[:, -1]),
        "unhooked_iteration": phases.sum(axis=1),
        **dict(zip(("forward", "backward", "update"), phases.T, strict=True)),
        **{name: slowest(seconds) for name, seconds in on_gpu.items()},
    }
    labels = {"network": network, "device": place.type, "batch": batch, "precision": precision}
    samples = clock.rows_by("quantity", quantities, {**labels, "ranks": me.world_size if me else 1})
    return _profile(network, training, order, phases, spans), samples


def layer_tables(
    network: str,
    batch: int,
    device: str,
    precision: str,
    budget: Budget,
    threads: int | None,
    me: Rank | None = None,
) -> Tables:
    """Return tables ``layers`` and ``samples`` of `profile_layers`."""
    profile, samples = profile_layers(network, batch, device, precision, budget, threads, me)
    if (share := issue_share(samples)) > HOST_BOUND:
        say(f"{network}, batch {batch}, {precision}: asking for it is {share:.0%} of an iteration")
    how = precision, me.world_size if me else 1, threads or torch.get_num_threads()
    return {"layers": store.profile_frame(profile, *how), "samples": samples}


def _profile(
    network: str, training: Training, order: _Order, phases: Floats, spans: Floats
) -> LayerProfile:
    """Return medians of (repeats, 3) phases without hooks, shared out by those of (repeats, s + n) spans."""
    forward_s, backward_s, update_s = np.median(phases, axis=0)
    forward, backward = np.split(np.median(spans, axis=0), [len(order.starts)])
    named = dict(training.model.named_parameters())
    tensors = tuple(reversed(order.ready))
    return LayerProfile(
        network=network,
        device=training.labels.device.type,
        batch=len(training.inputs),
        tensor=tensors,
        layer=tuple(tensor.rpartition(".")[0] or tensor for tensor in tensors),
        parameters=np.array([named[tensor].numel() for tensor in tensors]),
        gradient_bytes=np.array([named[tensor].nbytes for tensor in tensors]),
        forward_s=order.by_tensor(forward * (forward_s / forward.sum())),
        backward_s=(backward * (backward_s / backward.sum()))[::-1],
        flops=order.by_tensor(order.flops),
        update_s=float(update_s),
    )


def _measure(training: Training, budget: Budget, me: Rank | None) -> tuple[Floats, Floats, Floats]:
    """Return (repeats, 4) marks without hooks, (repeats, 4 + s + n) with, (repeats,) seconds of issuing."""
    device, issue_s = training.labels.device, list[float]()
    plain, watched = list[Marks](), list[Marks]()

    def run_plain() -> None:
        plain.append(Marks(device))
        start_s = perf_counter()
        training.iterate(plain[-1].mark)
        issue_s.append(perf_counter() - start_s)

    def run_watched() -> None:
        watched.append(marks := Marks(device))
        with training.watched(lambda _: marks.mark(), lambda _: marks.mark()):
            training.iterate(marks.mark)

    how: Any = {"synchronize": clock.synchronizer(device), "agree": peers.agree_all if me else bool}
    actions = {"plain": run_plain, "watched": run_watched}
    repeats = len(clock.measure_interleaved(actions, budget, **how)["plain"])
    marks = [np.array([run.seconds() for run in runs[-repeats:]]) for runs in (plain, watched)]
    return marks[0], marks[1], np.array(issue_s[-repeats:])


def _graph(training: Training) -> dict[str, Floats]:
    """Return seconds of iterations as one CUDA graph, which no host has to ask for; where one can be made.

    None can of a network that waits for the GPU within, or where its own memory is not there.
    """
    try:
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # where libraries make themselves at home first
            training.iterate()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            training.iterate()
        seconds = clock.measure_on(training.labels.device, graph.replay, GRAPH)
    except RuntimeError as error:
        say(f"no graph of an iteration: {str(error).strip().splitlines()[0]}")
        return {}
    return {"graph_iteration": seconds}


@dataclass(frozen=True)
class LayersSettings:
    """What CONFIG.json of the job may hold: batch by network, and how long for each."""

    networks: Mapping[str, int]
    budget: Budget = Budget()


@job(LayersSettings, "layers", "samples")
def layers_job(me: Rank, settings: LayersSettings) -> Iterator[Tables]:
    """Profile one network after the other, each on all ranks at the same time, as they train."""
    how = str(me.device), "fp32", settings.budget, me.torch_threads, me
    for network, batch in settings.networks.items():
        yield layer_tables(network, batch, *how)
