"""dag: equations of Shi et al., A DAG Model of Synchronous SGD (2018): Eqs 1-6, strategies and counts.

Layers are in forward order: index 0 is the paper's layer 1. All times are of one iteration.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ddlkit.core.cost import MessageCost
from ddlkit.core.errors import UserError
from ddlkit.core.workload import Floats, Workload


@dataclass(frozen=True, eq=False)
class IterationTimes:
    """What one iteration consists of (dag Tab I), in seconds.

    t_io = io_s, t_h2d = h2d_s, t_f^(l) = forward_s, t_b^(l) = backward_s, t_c^(l) = communication_s
    (each (L,); zero on a single GPU), t_u = update_s.
    """

    io_s: float
    h2d_s: float
    forward_s: Floats
    backward_s: Floats
    communication_s: Floats
    update_s: float = 0.0

    @classmethod
    def of_workload(
        cls,
        workload: Workload,
        cost: MessageCost,
        io_s: float = 0.0,
        h2d_s: float = 0.0,
    ) -> IterationTimes:
        """Return a workload's tensors as layers, each sent alone at ``cost``; forward stands at layer 1."""
        backward_s = workload.backward_s[::-1]
        forward_s = np.zeros_like(backward_s)
        forward_s[0] = workload.forward_s
        sent_s = np.asarray(cost(workload.bytes[::-1]))
        return cls(io_s, h2d_s, forward_s, backward_s, sent_s, workload.update_s)

    @property
    def fetch_s(self) -> float:
        """Return t_io + t_h2d."""
        return self.io_s + self.h2d_s

    @property
    def gpu_s(self) -> float:
        """Return t_f + t_b."""
        return float(np.sum(self.forward_s) + np.sum(self.backward_s))


def sgd_iteration_s(times: IterationTimes) -> float:
    """dag Eq 1: fetch, copy, forward, backward and update one after the other, on one GPU."""
    return times.fetch_s + times.gpu_s + times.update_s


def naive_iteration_s(times: IterationTimes) -> float:
    """dag Eq 2: as Eq 1, with every layer's aggregation between backward and update."""
    return sgd_iteration_s(times) + float(np.sum(times.communication_s))


def fetch_hidden_iteration_s(times: IterationTimes) -> float:
    """dag Eq 3: the next batch is fetched and copied meanwhile; t_u is left out as printed."""
    return max(times.fetch_s, times.gpu_s + float(np.sum(times.communication_s)))


def communication_start_s(times: IterationTimes) -> Floats:
    """(L,) tau_c of dag Eq 4: a layer is sent when its gradient is ready and the layer after it is sent."""
    start = np.sum(times.forward_s) + np.cumsum(times.backward_s[::-1])[::-1]
    for layer in range(len(start) - 2, -1, -1):
        free_s = start[layer + 1] + times.communication_s[layer + 1]
        start[layer] = max(start[layer], free_s)
    return np.asarray(start)


def exposed_communication_s(times: IterationTimes) -> float:
    """t_c^no of dag Eq 5: communication that backward does not hide."""
    return (
        float(communication_start_s(times)[0] + times.communication_s[0]) - times.gpu_s
    )


def wait_free_iteration_s(times: IterationTimes) -> float:
    """dag Eq 4: gradients travel during backward: t_f + t_b^(L) + tau_c^(1) - tau_c^(L) + t_c^(1)."""
    start = communication_start_s(times)
    first_to_last = float(start[0] - start[-1] + times.communication_s[0])
    return max(
        times.fetch_s,
        float(np.sum(times.forward_s) + times.backward_s[-1]) + first_to_last,
    )


@dataclass(frozen=True)
class Strategy:
    """What a framework hides behind computation (dag IV-C, V-C): which edges the DAG has.

    reads_ahead : a read does not wait for the update before it; one_buffer : it waits for the copy before it,
        as Eq 3 needs and Fig 1 does not say (errata 3)
    batches_ahead : so many are fetched beside the one that trains; 0: as many as the disk can
    """

    copies_ahead: bool
    sends_during_backward: bool
    decodes_on_cpu: bool
    reads_ahead: bool = True
    one_buffer: bool = False
    batches_ahead: int = 0


STRATEGIES = {
    "Caffe-MPI": Strategy(
        copies_ahead=True, sends_during_backward=True, decodes_on_cpu=False
    ),
    "CNTK": Strategy(
        copies_ahead=False, sends_during_backward=False, decodes_on_cpu=True
    ),
    "MXNet": Strategy(
        copies_ahead=False, sends_during_backward=True, decodes_on_cpu=False
    ),
    "TensorFlow": Strategy(
        copies_ahead=False, sends_during_backward=True, decodes_on_cpu=True
    ),
}


def strategy(framework: str) -> Strategy:
    """Return a framework's entry in STRATEGIES, in any spelling. Raises UserError for another one."""
    for name, edges in STRATEGIES.items():
        if name.lower() == framework.lower():
            return edges
    raise UserError(
        f"no strategy of {framework!r} is known: use one of {', '.join(STRATEGIES)}"
    )


def iteration_s(times: IterationTimes, strategy: Strategy) -> float:
    """dag Eq 5, and what its Section IV-C makes of it for the other frameworks.

    t_c^no is the exposed part, or all where nothing is sent during backward (CNTK). max(t_io + t_h2d, ...)
    holds where the copy runs ahead; else it waits for the update, so that only the read is hidden.
    """
    whole_s = float(np.sum(times.communication_s))
    exposed_s = (
        exposed_communication_s(times) if strategy.sends_during_backward else whole_s
    )
    busy = times.gpu_s + exposed_s
    if strategy.copies_ahead:
        return max(times.fetch_s, busy)
    return max(times.io_s, times.h2d_s + busy)


def steady_s(
    reads_s: Any, decoding_s: Any, h2d_s: Any, busy_s: Any, strategy: Strategy
) -> Any:
    """Return seconds from update to update: reads, decoding, copies and GPUs work side by side."""
    decoding_s = decoding_s if strategy.decodes_on_cpu else 0.0
    gpu_s = np.maximum(h2d_s, busy_s) if strategy.copies_ahead else h2d_s + busy_s
    return np.maximum(np.maximum(reads_s, decoding_s), gpu_s)


def speedup(
    read_s: Callable[[int], float],
    h2d_s: float,
    alone_s: float,
    together_s: float,
    *,
    machines: int,
    gpus_per_machine: int,
    literal: bool = True,
) -> float:
    """dag Eq 6: speedup S of N_g = machines x gpus_per_machine GPUs over one, weak scaling.

    Symbols: t_io_y = read_s(y), the reading time with y GPUs *a machine*; t_f + t_b = alone_s,
    t_f + t_b + t_c^no = together_s. Printed, y = N_g; by the definition of y it is n_g.
    """
    gpus = machines * gpus_per_machine
    reading = read_s(gpus if literal else gpus_per_machine)
    return gpus * max(read_s(1) + h2d_s, alone_s) / max(reading + h2d_s, together_s)


def algorithm1_share(samples: float, workers: int) -> float:
    """dag Algorithm 1, line 3: samples that each worker gets of an iteration's ``samples``."""
    return samples / workers


def iteration_tasks(layers: int, gpus: int) -> dict[str, int]:
    """Return tasks of one S-SGD iteration by kind: the nodes of dag Fig 1 (Section IV-B)."""
    each = {
        "io": gpus,
        "h2d": gpus,
        "forward": layers * gpus,
        "backward": layers * gpus,
    }
    return {**each, "all_reduce": layers, "update": 1}


def communication_efficiency(
    n_bytes: float, seconds: float, bytes_per_s: float
) -> float:
    """Return the share of the link's rate at which ``n_bytes`` of gradients were exchanged (dag V-C)."""
    return n_bytes / seconds / bytes_per_s
