"""dag: equations of Shi et al., A DAG Model of Synchronous SGD (2018): Eqs 1-6 and counts.

Layers are in forward order: index 0 is the paper's layer 1. All times are of one iteration. The graph itself
is `ddlkit.core.taskgraph`; its tasks' times and the frameworks' edges are in `ddlkit.core.strategies`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ddlkit.core.strategies import IterationTimes, Strategy
from ddlkit.core.taskgraph import Gpus
from ddlkit.core.workload import Floats


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


def period_s(
    times: IterationTimes,
    strategy: Strategy,
    gpus: Gpus,
    *,
    decode_s: float = 0.0,
) -> float:
    """Return seconds from update to update of equal GPUs' schedule in the long run: dag Eq 5 repaired.

    Symbols as in `ddlkit.core.taskgraph.s_sgd`, every layer a message. Only where reads run ahead of updates
    and copies (reads_ahead, not one_buffer or batches_ahead) and decoding is on a machine's processor.
    """
    sent_s = exposed_communication_s(times)
    if not strategy.sends_during_backward:
        sent_s = float(np.sum(times.communication_s))
    readers = gpus.n if gpus.shared_disk else gpus.per_machine
    busy_s = times.gpu_s + sent_s + times.update_s
    decoding_s = decode_s * gpus.per_machine
    return float(
        steady_s(readers * times.io_s, decoding_s, times.h2d_s, busy_s, strategy)
    )


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
