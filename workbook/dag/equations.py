"""The equations of the dag paper: iteration times and speedup of synchronous SGD.

Layers are in forward order: index 0 is the paper's layer 1. All times are of one
iteration. Symbols of the paper: t_io reads a batch, t_h2d copies the batch to the GPU,
t_f and t_b are the forward and the backward pass, t_c is communication, and t_u is the
update. Superscripts are numbers of layers.

The task graph itself is in `ddlkit.core.taskgraph`. The times of its tasks, and which
edges a framework has, are in `ddlkit.core.strategies`.

References
----------
dag : S. Shi, Q. Wang, X. Chu and B. Li, "A DAG Model of Synchronous Stochastic Gradient
    Descent in Distributed Deep Learning", 2018.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ddlkit.core.strategies import IterationTimes, Strategy
from ddlkit.core.taskgraph import Gpus
from ddlkit.core.workload import Floats

# -- iteration times -----------------------------------------------------------------


def sgd_iteration_s(times: IterationTimes) -> float:
    """Return the iteration of one GPU if nothing overlaps (dag Eq 1).

    Parameters
    ----------
    times : IterationTimes
        The parts of one iteration, in seconds.

    Returns
    -------
    float
        The iteration in seconds.

    Notes
    -----
    t_iter = t_io + t_h2d + t_f + t_b + t_u
    """
    # ``fetch_s`` is t_io + t_h2d, and ``gpu_s`` is t_f + t_b.
    return times.fetch_s + times.gpu_s + times.update_s


def naive_iteration_s(times: IterationTimes) -> float:
    """Return the iteration of several GPUs if nothing overlaps (dag Eq 2).

    Parameters
    ----------
    times : IterationTimes
        The parts of one iteration, in seconds.

    Returns
    -------
    float
        The iteration in seconds.

    Notes
    -----
    t_iter = t_io + t_h2d + t_f + t_b + t_c + t_u, where t_c is the sum over layers
    """
    return sgd_iteration_s(times) + float(np.sum(times.communication_s))


def fetch_hidden_iteration_s(times: IterationTimes) -> float:
    """Return the iteration if the GPUs train while the next batch is fetched (dag Eq 3).

    Parameters
    ----------
    times : IterationTimes
        The parts of one iteration, in seconds.

    Returns
    -------
    float
        The iteration in seconds. The update t_u is left out, as printed.

    Notes
    -----
    t_iter = max(t_io + t_h2d, t_f + t_b + t_c)
    """
    # ``fetch_s`` is t_io + t_h2d, and ``gpu_s`` is t_f + t_b.
    return max(times.fetch_s, times.gpu_s + float(np.sum(times.communication_s)))


def communication_start_s(times: IterationTimes) -> Floats:
    """Return when the exchange of each layer's gradients starts, as early as possible.

    Parameters
    ----------
    times : IterationTimes
        The parts of one iteration of L layers, in seconds.

    Returns
    -------
    ndarray, shape (L,)
        tau_c of dag Eq 4, in seconds from the start of the forward pass.

    Notes
    -----
    The exchange of a layer starts when its gradients are ready and the exchange of the
    layer after it has ended:

    tau_c^(l) = max(tau_c^(l+1) + t_c^(l+1), t_f + t_b^(L) + ... + t_b^(l))
    """
    # Gradients are ready after the forward pass and the backward pass of layers L to l.
    ready_s = np.sum(times.forward_s) + np.cumsum(times.backward_s[::-1])[::-1]
    start_s = np.array(ready_s)
    # The last layer, which is sent first, waits for no other exchange.
    last = len(start_s) - 1
    for layer in range(last - 1, -1, -1):
        link_free_s = start_s[layer + 1] + times.communication_s[layer + 1]
        start_s[layer] = max(ready_s[layer], link_free_s)
    return start_s


def exposed_communication_s(times: IterationTimes) -> float:
    """Return the communication that the backward pass does not hide.

    Parameters
    ----------
    times : IterationTimes
        The parts of one iteration, in seconds.

    Returns
    -------
    float
        t_c^no of dag Eq 5, in seconds.

    Notes
    -----
    t_c^no = tau_c^(1) + t_c^(1) - (t_f + t_b)
    """
    # Layer 1, which is at index 0, is sent last. ``gpu_s`` is t_f + t_b.
    end_s = float(communication_start_s(times)[0] + times.communication_s[0])
    return end_s - times.gpu_s


def wait_free_iteration_s(times: IterationTimes) -> float:
    """Return the iteration if gradients are sent during backward (dag Eq 4).

    Parameters
    ----------
    times : IterationTimes
        The parts of one iteration of L layers, in seconds.

    Returns
    -------
    float
        The iteration in seconds. The update t_u is left out, as printed.

    Notes
    -----
    t_iter = max(t_io + t_h2d, t_f + t_b^(L) + tau_c^(1) - tau_c^(L) + t_c^(1))
    """
    start_s = communication_start_s(times)
    # Index -1 is layer L, whose gradients are ready first, and index 0 is layer 1.
    first_ready_s = float(np.sum(times.forward_s) + times.backward_s[-1])
    exchanges_s = float(start_s[0] - start_s[-1] + times.communication_s[0])
    # ``fetch_s`` is t_io + t_h2d.
    return max(times.fetch_s, first_ready_s + exchanges_s)


def iteration_s(times: IterationTimes, strategy: Strategy) -> float:
    """Return the iteration of a framework (dag Eq 5).

    Parameters
    ----------
    times : IterationTimes
        The parts of one iteration, in seconds.
    strategy : Strategy
        What the framework hides behind computation.

    Returns
    -------
    float
        The iteration in seconds. The update t_u is left out, as printed.

    Notes
    -----
    t_iter = max(t_io + t_h2d, t_f + t_b + t_c^no)

    t_c^no is the exposed communication. In a framework that sends nothing during the
    backward pass (CNTK), t_c^no is all communication.

    This holds for a framework that copies a batch to the GPU ahead of time (Caffe-MPI). In
    the others the copy waits for the update (Section IV-C), so that only the read is
    hidden: t_iter = max(t_io, t_h2d + t_f + t_b + t_c^no).
    """
    if strategy.sends_during_backward:
        exposed_s = exposed_communication_s(times)
    else:
        exposed_s = float(np.sum(times.communication_s))
    busy_s = times.gpu_s + exposed_s
    # ``gpu_s`` is t_f + t_b, and ``fetch_s`` is t_io + t_h2d.
    if strategy.copies_ahead:
        return max(times.fetch_s, busy_s)
    return max(times.io_s, times.h2d_s + busy_s)


# -- the steady state of a schedule --------------------------------------------------


def steady_s(
    reads_s: Any, decoding_s: Any, h2d_s: Any, busy_s: Any, strategy: Strategy
) -> Any:
    """Return the time from one update to the next if resources work side by side.

    The resources are the disk, the processor that decodes, and the GPU with its bus. The
    slowest of them sets the pace.

    Parameters
    ----------
    reads_s : float or ndarray
        All reads of one disk for an iteration, in seconds.
    decoding_s : float or ndarray
        The decoding of one machine's batches, in seconds. It does not count for a framework
        that reads decoded samples.
    h2d_s : float or ndarray
        The copy of a batch to its GPU, in seconds.
    busy_s : float or ndarray
        Computation and exposed communication of a GPU, in seconds.
    strategy : Strategy
        What the framework hides behind computation.

    Returns
    -------
    float or ndarray
        The time of the slowest resource, in seconds, of the broadcast shape.
    """
    if not strategy.decodes_on_cpu:
        decoding_s = 0.0
    if strategy.copies_ahead:
        # The bus copies the next batch while the GPU is busy.
        gpu_s = np.maximum(h2d_s, busy_s)
    else:
        # The copy waits for the update, and the forward pass waits for the copy.
        gpu_s = h2d_s + busy_s
    return np.maximum(np.maximum(reads_s, decoding_s), gpu_s)


def period_s(
    times: IterationTimes,
    strategy: Strategy,
    gpus: Gpus,
    *,
    decode_s: float = 0.0,
) -> float:
    """Return the time from one update to the next in the long run.

    This is Eq 5 of "dag" (Shi et al. 2018) repaired: reads and copies work side by side, and
    the time includes the update, decoding, and the copies that wait for the update. The time
    equals the period of the scheduled task graph of `ddlkit.core.taskgraph.s_sgd`, if all GPUs
    are equal and every layer is a message. There are two more conditions:

    - A read waits neither for updates nor for copies: of ``strategy``, ``reads_ahead`` is
      true, ``one_buffer`` is false, and ``batches_ahead`` is 0, which stands for as many
      batches as the disk can read.
    - The processor of a machine decodes: ``gpus.decoding`` is "machine".

    Parameters
    ----------
    times : IterationTimes
        The parts of one iteration, in seconds.
    strategy : Strategy
        What the framework hides behind computation.
    gpus : Gpus
        The machines and their GPUs.
    decode_s : float, optional
        The decoding of one GPU's batch, in seconds.

    Returns
    -------
    float
        The period in seconds.
    """
    if strategy.sends_during_backward:
        exposed_s = exposed_communication_s(times)
    else:
        exposed_s = float(np.sum(times.communication_s))
    # The GPUs that read from one disk.
    readers = gpus.n if gpus.shared_disk else gpus.per_machine
    reads_s = readers * times.io_s
    # The processor of a machine decodes the batches of all its GPUs.
    decoding_s = decode_s * gpus.per_machine
    # ``gpu_s`` is t_f + t_b.
    busy_s = times.gpu_s + exposed_s + times.update_s
    # Disk, processor, bus and GPU work side by side, and the slowest sets the period.
    return float(steady_s(reads_s, decoding_s, times.h2d_s, busy_s, strategy))


# -- speedup and counts --------------------------------------------------------------


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
    """Return the speedup of all GPUs over one, with weak scaling (dag Eq 6).

    Parameters
    ----------
    read_s : callable
        t_io_y, the reading time in seconds if y GPUs *of a machine* read.
    h2d_s : float
        t_h2d, the copy of a batch to its GPU, in seconds.
    alone_s : float
        t_f + t_b of one GPU, in seconds.
    together_s : float
        t_f + t_b + t_c^no of all GPUs, in seconds.
    machines : int
        The number of machines.
    gpus_per_machine : int
        n_g, the number of GPUs of each machine.
    literal : bool, optional
        Whether y is N_g, the number of all GPUs, as the equation prints it. Otherwise y
        is n_g, as the text defines it.

    Returns
    -------
    float
        The speedup S.

    Notes
    -----
    S = N_g max(t_io_1 + t_h2d, t_f + t_b) / max(t_io_y + t_h2d, t_f + t_b + t_c^no),

    where N_g = machines n_g

    Examples
    --------
    Four machines of four GPUs, where each reader adds 0.1 s to a read. As printed, 16
    GPUs read for 1.6 s, which is longer than computing. By the definition 4 GPUs read for
    0.4 s:

    >>> times = {"h2d_s": 0.0, "alone_s": 1.0, "together_s": 1.0}
    >>> speedup(lambda y: 0.1 * y, **times, machines=4, gpus_per_machine=4)
    10.0
    >>> sizes = {"machines": 4, "gpus_per_machine": 4}
    >>> speedup(lambda y: 0.1 * y, **times, **sizes, literal=False)
    16.0
    """
    gpus = machines * gpus_per_machine
    readers = gpus if literal else gpus_per_machine
    one_gpu_s = max(read_s(1) + h2d_s, alone_s)
    all_gpus_s = max(read_s(readers) + h2d_s, together_s)
    return gpus * one_gpu_s / all_gpus_s


def algorithm1_share(samples: float, workers: int) -> float:
    """Return the samples of an iteration for each worker (dag Algorithm 1, line 3).

    Parameters
    ----------
    samples : float
        The samples of one iteration.
    workers : int
        The number N of workers.

    Returns
    -------
    float
        data / N
    """
    return samples / workers


def iteration_tasks(layers: int, gpus: int) -> dict[str, int]:
    """Return how many tasks of each kind one iteration has (dag Fig 1, Section IV-B).

    Parameters
    ----------
    layers : int
        The number L of layers.
    gpus : int
        The number of GPUs.

    Returns
    -------
    dict of str to int
        The number of nodes of the task graph by kind. "io" reads a batch and "h2d" copies
        it to the GPU. All GPUs together exchange the gradients of each layer
        ("all_reduce") and update the weights once.

    Examples
    --------
    >>> sum(iteration_tasks(layers=3, gpus=4).values())
    36
    """
    return {
        "io": gpus,
        "h2d": gpus,
        "forward": layers * gpus,
        "backward": layers * gpus,
        "all_reduce": layers,
        "update": 1,
    }


def communication_efficiency(
    n_bytes: float, seconds: float, bytes_per_s: float
) -> float:
    """Return which share of a link's rate an exchange of gradients reaches (dag V-C).

    Parameters
    ----------
    n_bytes : float
        The size of all gradients in bytes.
    seconds : float
        The time of the exchange in seconds.
    bytes_per_s : float
        The rate of the link in bytes per second.

    Returns
    -------
    float
        The efficiency, from 0 to 1.
    """
    return n_bytes / seconds / bytes_per_s
