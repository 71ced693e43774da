"""What each parameter tensor of a network costs in one training iteration, measured without slowing it.

Iterations with and without hooks are run in turn; hooks take marks, for which nobody waits:

* forward: the time from a layer's start to the next layer's start belongs to the layer's first tensor
  (activations, pooling and the loss to the layer before them), and so do its FLOPs (2 per multiply-add).
* backward: the time from one gradient to the next belongs to the latter; the loss's share to the first. Of
  gradients that one operation makes together (a recurrent layer's) the first carries the time.
* update: the optimizer's (SGD with momentum), and clearing the gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from types import SimpleNamespace
from typing import Any

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
from ddlkit.measure.given import Training, known
from ddlkit.measure.session import ran_out_of_memory, say
from ddlkit.model.predictor import HOST_BOUND, issue_share

GRAPH = Budget(
    warmup=1, min_repeats=3, max_repeats=10, max_s=0.2
)  # a floor needs no more
_END, _LAYER, _GRADIENT = "end", "layer", "gradient"


class _Seen:
    """An iteration with hooks: its marks, and what each is: a phase's end, a layer's start, or a gradient."""

    def __init__(self, training: Training, marks: Any) -> None:
        self._marks, self._what = marks, list[tuple[str, str]]()
        with training.watched(
            partial(self._note, _LAYER), partial(self._note, _GRADIENT)
        ):
            training.iterate(partial(self._note, _END, ""))

    def _note(self, what: str, name: str) -> None:
        self._what.append((what, name))
        self._marks.mark()

    def read(self) -> tuple[dict[str, float], dict[str, float], float]:
        """Return seconds of each layer; until each gradient is ready, in that order; of the iteration.

        A layer's are those of the last forward pass, until the next starts; those of one without a gradient
        belong to the one before. A gradient is ready for the last time, counted from when the last backward
        pass begins; in 0 s if before that.
        """
        at = self._marks.seconds()
        ends = [k for k, (what, _) in enumerate(self._what) if what == _END]
        last = {
            name: k for k, (what, name) in enumerate(self._what) if what == _GRADIENT
        }
        order = sorted(last, key=last.__getitem__)
        ready = {name: max(0.0, float(at[last[name]] - at[ends[1]])) for name in order}
        begin = max(k for k in range(ends[1]) if self._what[k][0] != _LAYER)
        starts = [k for k in range(begin + 1, ends[1]) if self._what[k][1] in last]
        names = [self._what[k][1] for k in starts] or order[-1:]
        layers = dict.fromkeys(names, 0.0)
        for name, span in zip(
            names, np.diff(at[[begin, *starts[1:], ends[1]]]), strict=True
        ):
            layers[name] += float(span)
        return layers, ready, float(at[-1])


class _Order:
    """What happens in an iteration, in which order, seen in one that also allocates the optimizer's state.

    starts : (s) first tensor of each layer, as they start, or one for all; flops : (s,) forward FLOP of each
    ready : (n) tensors, as their gradients become ready for the last time
    """

    def __init__(self, training: Training, me: Rank | None) -> None:
        counts = list[float]()
        with nullcontext() if training.compiled else networks.flop_counter() as counter:
            count = counter.get_total_flops if counter else int
            mark, line = lambda: counts.append(count()), lambda: np.array(counts)
            seen = _Seen(training, SimpleNamespace(mark=mark, seconds=line))
        flops, ready, _ = seen.read()
        self.starts, self.ready = list(flops), list(ready)
        if me:
            every = [*training.trained()]
            self.starts, self.ready = (
                _as_rank_0(self.starts, every),
                _as_rank_0(self.ready, every),
            )
        self.flops = np.array([flops.get(name, 0.0) for name in self.starts])

    def spans(self, seen: _Seen) -> Floats:
        """Return (s + n + 1,) seconds of each layer, from each gradient to the next, and of the iteration."""
        layers, ready, whole_s = seen.read()
        forward = [layers.get(name, 0.0) for name in self.starts]
        line = np.maximum.accumulate([ready.get(name, 0.0) for name in self.ready])
        return np.array([*forward, *np.diff(line, prepend=0.0), whole_s])

    def by_tensor(self, by_start: Floats) -> Floats:
        """Return (n,) in forward order from (s,): all of a layer goes to its first tensor."""
        shares = np.zeros(len(self.ready))
        np.add.at(
            shares, [-1 - self.ready.index(tensor) for tensor in self.starts], by_start
        )
        return shares


def _as_rank_0(names: list[str], every: list[str]) -> list[str]:
    """Return the names of rank 0, in its order, each one of ``every``, which ranks have alike."""
    places = {name: place for place, name in enumerate(names)}
    first = peers.everyones([float(places.get(name, -1)) for name in every])[0]
    return [every[k] for k in np.argsort(first) if first[k] >= 0]


@contextmanager
def compute_on(
    what: str,
    device: str | torch.device,
    precision: str = "fp32",
    threads: int | None = None,
) -> Iterator[torch.device]:
    """Compute ``what`` with this many CPU threads and precision ("": torch's own); afterwards as before."""
    place = torch.device(device)
    if precision == "tf32" and place.type != "cuda":
        raise UserError(
            "precision 'tf32' needs a CUDA device: use fp32 or bf16 on the CPU"
        )
    switches: tuple[Any, ...] = (torch.backends.cuda.matmul, torch.backends.cudnn)
    with ExitStack() as before:
        before.callback(torch.set_num_threads, torch.get_num_threads())
        for switch in switches:
            before.callback(setattr, switch, "allow_tf32", switch.allow_tf32)
            switch.allow_tf32 = precision == "tf32" if precision else switch.allow_tf32
        torch.set_num_threads(threads or torch.get_num_threads())
        try:
            yield place
        except (
            MemoryError,
            RuntimeError,
        ) as error:  # torch's CUDA out-of-memory is a RuntimeError
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
    """Return `profile_training` of a network known by name; on a GPU also the times of `_graph`."""
    with compute_on(
        f"{network} at batch {batch} on {device}", device, precision, threads
    ) as place:
        training = known(network, batch, place, precision)
        return profile_training(training, precision, budget, me, as_graph=True)


def profile_training(
    training: Training,
    precision: str,
    budget: Budget | None = None,
    me: Rank | None = None,
    as_graph: bool = False,
) -> tuple[LayerProfile, pd.DataFrame]:
    """Return the profile of one training iteration, tensor by tensor, and its samples as a table.

    me : where all ranks of a job profile at the same time: each step then waits for the slowest of them

    Times are medians, forward and backward each rescaled to that of the iterations without hooks; forward is
    all until the last backward begins. On a GPU "issue" is when the host had asked for all of an unhooked
    iteration; "graph_iteration" as of `_graph`.
    """
    slowest = peers.slowest if me else np.asarray
    order = _Order(training, me)
    retries, disturbed = Retries(2), True
    while disturbed:
        watch = Watch(me.rank if me else 0)
        plain, seen, issue = _measure(training, budget or Budget(), me)
        used = peers.usage_of_all(watch.usage()) if me else watch.usage()
        disturbed = retries.again(used)
    on_gpu = {"issue": issue} if training.device.type == "cuda" else {}
    on_gpu |= _graph(training) if on_gpu and as_graph and not me else {}
    watched = np.array([order.spans(iteration) for iteration in seen])
    phases = _slowest_line(np.diff(plain), slowest)
    spans = _slowest_line(watched[:, :-1], slowest)
    quantities = {
        "hooked_iteration": slowest(watched[:, -1]),
        "unhooked_iteration": phases.sum(axis=1),
        **dict(zip(("forward", "backward", "update"), phases.T, strict=True)),
        **{name: slowest(seconds) for name, seconds in on_gpu.items()},
    }
    labels = {
        "network": training.network,
        "device": training.device.type,
        "batch": training.batch,
    }
    labels |= {"precision": precision, "ranks": me.world_size if me else 1}
    return _profile(training, order, phases, spans), clock.rows_by(
        "quantity", quantities, labels
    )


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
    profile, samples = profile_layers(
        network, batch, device, precision, budget, threads, me
    )
    if (share := issue_share(samples)) > HOST_BOUND:
        say(
            f"{network}, batch {batch}, {precision}: asking for it is {share:.0%} of an iteration"
        )
    how = precision, me.world_size if me else 1, threads or torch.get_num_threads()
    return {"layers": store.profile_frame(profile, *how), "samples": samples}


def _profile(
    training: Training, order: _Order, phases: Floats, spans: Floats
) -> LayerProfile:
    """Return medians of (repeats, 3) phases without hooks, shared out by those of (repeats, s + n) spans."""
    forward_s, backward_s, update_s = np.median(phases, axis=0)
    forward, backward = np.split(np.median(spans, axis=0), [len(order.starts)])
    named = training.trained()
    tensors = tuple(reversed(order.ready))
    return LayerProfile(
        network=training.network,
        device=training.device.type,
        batch=training.batch,
        tensor=tensors,
        layer=tuple(tensor.rpartition(".")[0] or tensor for tensor in tensors),
        parameters=np.array([named[tensor].numel() for tensor in tensors]),
        gradient_bytes=np.array([named[tensor].nbytes for tensor in tensors]),
        forward_s=order.by_tensor(forward * (forward_s / forward.sum())),
        backward_s=(backward * (backward_s / backward.sum()))[::-1],
        flops=order.by_tensor(order.flops),
        update_s=float(update_s),
    )


def _measure(
    training: Training, budget: Budget, me: Rank | None
) -> tuple[Floats, list[_Seen], Floats]:
    """Return (repeats, 4) marks without hooks, (repeats) with hooks, (repeats,) seconds of issuing."""
    device, issue_s = training.device, list[float]()
    plain, watched = list[Marks](), list[_Seen]()

    def run_plain() -> None:
        plain.append(Marks(device))
        start_s = perf_counter()
        training.iterate(plain[-1].mark)
        issue_s.append(perf_counter() - start_s)

    def run_watched() -> None:
        watched.append(_Seen(training, Marks(device)))

    actions = {"plain": run_plain, "watched": run_watched}
    samples = clock.measure_interleaved(
        actions,
        budget,
        synchronize=clock.synchronizer(device),
        agree=peers.agree_all if me else bool,
    )
    repeats = len(samples["plain"])
    marks = np.array([run.seconds() for run in plain[-repeats:]])
    return marks, watched[-repeats:], np.array(issue_s[-repeats:])


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
        seconds = clock.measure_on(training.device, graph.replay, GRAPH)
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
