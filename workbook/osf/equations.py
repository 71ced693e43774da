"""The equations of the osf paper: the scaling factor with overlap and tensor fusion.

Layers are in forward order: index 0 is the paper's layer 1, and index n - 1 its layer
n. The backward pass begins with layer n. Superscripts in formulas are the paper's
numbers of layers.

Some equations cannot be meant as they are printed. With ``literal=True`` a function
computes what the paper prints, and with ``literal=False`` what its prose needs:

Eq 13
    The timeout concerns the layer that the buffer waits for, layer i - 1. The time of
    this layer is compared as in Eq 12.
Eq 14
    A full buffer is sent at once, because the size of the next tensor is known before
    its gradient is computed.
Eq 15
    The wait delays the message that waits, and not the message after it.
Eq 7
    A layer that sends nothing takes no time, instead of delta.

References
----------
osf : T. Liu et al., "Modeling and Optimizing the Scaling Performance in Distributed
    Deep Learning Training", WWW 2022.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import ArrayLike

from ddlkit.core.cost import AlphaBeta, MessageCost
from ddlkit.core.iteration import PLAIN, Iteration, Prediction
from ddlkit.core.link import Link
from ddlkit.core.plan import FusionPlan
from ddlkit.core.plan import adafusion as adafusion
from ddlkit.core.plan import fusing_pays as fusing_pays
from ddlkit.core.plan import merged as merged
from ddlkit.core.timeline import COMMUNICATION, Timeline, merge
from ddlkit.core.units import parse_bytes
from ddlkit.core.workload import Floats, Workload

Values = Sequence[float]
Update = Callable[[float], float]
"""The time of one all-reduce in seconds by its bytes (osf Eq 7 or 18)."""

# -- the scaling factor without overlap ----------------------------------------------


def of_workload(workload: Workload) -> tuple[list[float], list[float]]:
    """Return the layers of a workload in the form that the functions below take.

    Parameters
    ----------
    workload : Workload
        One iteration of n tensors, whose arrays are in ready order.

    Returns
    -------
    sizes : list of float, length n
        The bytes of each gradient in forward order.
    backward_s : list of float, length n
        The backward time of each tensor in forward order, in seconds.
    """
    # Forward order is the reverse of ready order.
    sizes = workload.bytes[::-1].astype(float).tolist()
    backward_s = workload.backward_s[::-1].tolist()
    return sizes, backward_s


def scaling_factor(alone_s: float, together_s: float, workers: int) -> float:
    """Return the scaling factor of a number of workers (osf Eq 1).

    Parameters
    ----------
    alone_s : float
        The time T_1 that one worker needs. Any unit of time will do, if both times
        have it.
    together_s : float
        The time T_N that all workers need together.
    workers : int
        The number N of workers.

    Returns
    -------
    float
        The scaling factor, 1 for linear speedup.

    Notes
    -----
    SF = T_1 / (T_N N)

    Examples
    --------
    Eight workers are 6.4 times as fast as one:

    >>> scaling_factor(alone_s=64.0, together_s=10.0, workers=8)
    0.8
    """
    return alone_s / (together_s * workers)


def csf(compute_s: float, communication_s: float) -> float:
    """Return the scaling factor if all communication follows all computation (osf Eq 2).

    Parameters
    ----------
    compute_s : float
        T_comp, the computation of one iteration in seconds.
    communication_s : float
        T_comm, the communication of one iteration in seconds.

    Returns
    -------
    float
        The scaling factor (CSF) by the ratio of communication to computation, from 0 to 1.

    Notes
    -----
    CSF = T_comp / (T_comp + T_comm)

    Examples
    --------
    >>> csf(compute_s=3.0, communication_s=1.0)
    0.75
    """
    return compute_s / (compute_s + communication_s)


def compute_s(
    forward_flops: ArrayLike, batch: int, c: float, flops_per_s: float
) -> float:
    """Return the computation of one iteration in seconds (osf Eqs 4, 5).

    Parameters
    ----------
    forward_flops : array_like, shape (n,)
        The operations C of each layer's forward pass for *one sample*. By Table 1, C is for
        a mini-batch, but then the batch would count twice in the formula below.
    batch : int
        The number M of samples in the mini-batch of a worker.
    c : float
        The share c of its peak rate that the processor reaches.
    flops_per_s : float
        The peak rate pi of the processor, in operations per second.

    Returns
    -------
    float
        T_comp in seconds.

    Notes
    -----
    T_comp = 3 T_forward = sum over i of 3 M C^(i) / (c pi)

    The factor is 3 because the backward pass takes twice as long as the forward pass.
    """
    return 3 * batch * float(np.sum(forward_flops)) / (c * flops_per_s)


# -- overlap without fusion ----------------------------------------------------------


def update_start_s(backward_s: Values, sent_s: Values, first: int = 1) -> Floats:
    """Return when the exchange of each layer starts, without fusion (osf Eq 8).

    Parameters
    ----------
    backward_s : sequence of float, length n
        The backward time t_backward of each layer, in seconds.
    sent_s : sequence of float, length n
        The time t_update(D) of each layer's all-reduce, in seconds.
    first : int, optional
        Where the sum over backward times begins, at j = i + ``first``. Eq 8 prints 1. The
        text before Eq 8, and Eq 15, have 0.

    Returns
    -------
    ndarray, shape (n,)
        The start tau of each layer, in seconds from the end of layer n's backward. Layer n
        comes first in the backward pass.

    Notes
    -----
    tau^(n) = 0, and for every other layer

    tau^(i) = max(tau^(i+1) + t_update(D^(i+1)),
    sum over j = i + 1 to n - 1 of t_backward^(j))
    """
    n = len(backward_s)
    # A list, because single elements of an array are slow.
    start_s = [0.0] * n
    # The index i is that of layer i + 1. Layer n, whose index is n - 1, starts at 0.
    for i in range(n - 2, -1, -1):
        link_free_s = start_s[i + 1] + sent_s[i + 1]
        # The time of layer n, at index n - 1, is not in the sum, because tau counts from the
        # end of its backward.
        computed_s = math.fsum(backward_s[i + first : n - 1])
        start_s[i] = max(link_free_s, computed_s)
    return np.array(start_s)


def overlap_s(backward_s: Values) -> float:
    """Return the time in which computation and communication overlap (osf Eq 10).

    Parameters
    ----------
    backward_s : sequence of float, length n
        The backward time of each layer, in seconds.

    Returns
    -------
    float
        T_overlap in seconds.

    Notes
    -----
    T_overlap = sum over i = 1 to n - 1 of t_backward^(i)

    The time of layer n, the last element, is left out. Its backward comes first, and nothing
    is sent before its gradient is computed.
    """
    return math.fsum(backward_s[:-1])


def osf(forward_s: float, backward_s: Values, sent_s: Values, first: int = 1) -> float:
    """Return the scaling factor with overlap and without fusion (osf Eqs 3, 8-10).

    Parameters
    ----------
    forward_s : float
        The forward time of all layers, in seconds.
    backward_s : sequence of float, length n
        The backward time of each layer, in seconds.
    sent_s : sequence of float, length n
        The time of each layer's all-reduce, in seconds.
    first : int, optional
        The sum of Eq 8 begins at j = i + ``first``: 1 as printed, or 0 as its prose has it.

    Returns
    -------
    float
        The scaling factor with overlap (OSF).

    Notes
    -----
    OSF = T_comp / (T_comp + T_update - T_overlap), where by Eq 9
    T_update = tau^(1) + t_update(D^(1))

    Examples
    --------
    Three equal layers whose messages take no time scale perfectly. As printed, Eq 8
    starts the last message too early, so that the result is above 1:

    >>> float(osf(3.0, [2.0, 2.0, 2.0], [0.0, 0.0, 0.0], first=0))
    1.0
    >>> round(float(osf(3.0, [2.0, 2.0, 2.0], [0.0, 0.0, 0.0])), 3)
    1.286
    """
    computed_s = forward_s + math.fsum(backward_s)
    # Eq 9. Layer 1, whose index is 0, is sent last.
    last_start_s = update_start_s(backward_s, sent_s, first)[0]
    updated_s = last_start_s + sent_s[0]
    return computed_s / (computed_s + updated_s - overlap_s(backward_s))


# -- the time of a message -----------------------------------------------------------


def update_s(
    n_bytes: ArrayLike,
    workers: int,
    bytes_per_s: float,
    *,
    adds_per_s: float = math.inf,
    bytes_per_parameter: int = 4,
    overhead_s: float = 0.0,
) -> Floats:
    """Return the time of a ring all-reduce in seconds (osf Eq 7).

    Parameters
    ----------
    n_bytes : array_like
        The size D of each message in bytes, of any shape.
    workers : int
        The number N of workers.
    bytes_per_s : float
        The bandwidth beta between two workers, in bytes per second.
    adds_per_s : float, optional
        The rate pi of additions per second. By default additions take no time.
    bytes_per_parameter : int, optional
        The size s of one parameter in bytes.
    overhead_s : float, optional
        The overhead delta of one all-reduce, in seconds.

    Returns
    -------
    ndarray, shape of ``n_bytes``
        t_update in seconds. As printed, a message of no bytes still takes delta.

    Notes
    -----
    t_update(D) = 2 (N - 1)/N D / beta + (N - 1)/N D / (s pi) + delta

    Examples
    --------
    >>> float(update_s(1e9, workers=2, bytes_per_s=1e9, overhead_s=0.5))
    1.5
    """
    share = (workers - 1) / workers
    s_per_byte = 2 * share / bytes_per_s + share / (adds_per_s * bytes_per_parameter)
    return s_per_byte * np.asarray(n_bytes, dtype=float) + overhead_s


def ring_from_ends(n_bytes: ArrayLike, seconds: ArrayLike, workers: int) -> AlphaBeta:
    """Fit osf Eq 7 to the smallest and the largest of the measured messages.

    Parameters
    ----------
    n_bytes : array_like, shape (m,)
        The size of each message in bytes. There must be two sizes at least.
    seconds : array_like, shape (m,)
        The measured time of each message, in seconds.
    workers : int
        The number of workers.

    Returns
    -------
    AlphaBeta
        The line through the median time at the smallest size and the median time at the
        largest size.
    """
    sizes = np.asarray(n_bytes, dtype=float)
    times = np.asarray(seconds, dtype=float)
    smallest = sizes.min()
    largest = sizes.max()
    smallest_s = float(np.median(times[sizes == smallest]))
    largest_s = float(np.median(times[sizes == largest]))
    s_per_byte = (largest_s - smallest_s) / float(largest - smallest)
    startup_s = smallest_s - s_per_byte * float(smallest)
    return AlphaBeta(startup_s, s_per_byte, workers=workers, algorithm="ring")


def bandwidth_delay_bytes(cost: AlphaBeta) -> float:
    """Return the bandwidth-delay product of a ring's links (D_Thresh of osf Eq 18).

    Parameters
    ----------
    cost : AlphaBeta
        The time of an all-reduce between N workers. If its ``workers`` are not known, two
        are assumed.

    Returns
    -------
    float
        The product in bytes.

    Notes
    -----
    The product is beta times the round trip, where beta is the rate of a link in bytes/s. By
    Eq 7 without additions, a ring of N workers has beta = 2 (N - 1) / N / cost.beta_s_per_byte,
    and cost.alpha_s is delta, the overhead of an all-reduce.

    The paper gives no delay of a link. A ring all-reduce takes 2 (N - 1) steps, one after the
    other, whose delays add up to delta here. A round trip is two of these delays, and thus
    takes delta / (N - 1).
    """
    workers = cost.workers or 2
    bytes_per_s = 2 * ((workers - 1) / workers) / cost.beta_s_per_byte
    # The round trip takes cost.alpha_s / (workers - 1).
    return bytes_per_s * cost.alpha_s / (workers - 1)


# -- overlap with fusion -------------------------------------------------------------


def buffered_bytes(
    sizes: Values, backward_s: Values, capacity: float, timeout_s: float
) -> Floats:
    """Return how many bytes the fusion buffer holds after each layer (osf Eq 12).

    Parameters
    ----------
    sizes : sequence of float, length n
        The size D of each layer's gradients, in bytes.
    backward_s : sequence of float, length n
        The backward time t_backward of each layer, in seconds.
    capacity : float
        The size Q of the buffer in bytes.
    timeout_s : float
        How long the buffer waits for the next layer, t_timeout, in seconds.

    Returns
    -------
    ndarray, shape (n,)
        The bytes B in the buffer after the backward of each layer.

    Notes
    -----
    B^(n) = D^(n), and for every other layer

    B^(i) = B^(i+1) + D^(i) if B^(i+1) + D^(i) <= Q and t_backward^(i) < t_timeout,

    else B^(i) = D^(i)
    """
    # A list, because single elements of an array are slow. It begins with the "else" of the
    # formula, in which a layer is alone in the buffer. The index i is that of layer i + 1.
    filled = [float(size) for size in sizes]
    for i in range(len(sizes) - 2, -1, -1):
        if filled[i + 1] + sizes[i] <= capacity and backward_s[i] < timeout_s:
            filled[i] += filled[i + 1]
    return np.array(filled)


def sent_bytes(
    sizes: Values,
    backward_s: Values,
    capacity: float,
    timeout_s: float,
    *,
    literal: bool = True,
) -> Floats:
    """Return how many bytes are sent after the backward of each layer (osf Eq 13).

    Parameters
    ----------
    sizes, backward_s, capacity, timeout_s
        As of `buffered_bytes`.
    literal : bool, optional
        Whether to compute Eq 13 as printed, by which some bytes may be lost or sent twice.
        Otherwise it is repaired, as the notes say.

    Returns
    -------
    ndarray, shape (n,)
        The bytes F of the message that leaves after each layer, or 0 if none leaves.

    Notes
    -----
    F^(i) = B^(i) if i = 1 or t_backward^(i) > t_timeout or B^(i) + D^(i-1) > Q,

    else F^(i) = 0. D are the bytes of a layer, Q those that the buffer can hold, and B those
    that it holds after a layer (`buffered_bytes`, Eq 12).

    Repaired, the condition of the timeout is t_backward^(i-1) >= t_timeout. It is about layer
    i - 1, because the buffer waits for this layer. It has >= instead of >, because by Eq 12 a
    layer whose time equals the timeout does not join the layers before it. Their bytes B^(i)
    would be lost if they were not sent.
    """
    filled = buffered_bytes(sizes, backward_s, capacity, timeout_s).tolist()
    sent = np.zeros(len(sizes))
    # The index i is that of layer i + 1, and i - 1 that of the next layer to be computed.
    for i in range(len(sizes)):
        # Layer 1 is the last in the backward pass.
        is_last_computed = i == 0
        if literal:
            timed_out = backward_s[i] > timeout_s
        else:
            timed_out = not is_last_computed and backward_s[i - 1] >= timeout_s
        is_full = not is_last_computed and filled[i] + sizes[i - 1] > capacity
        if is_last_computed or timed_out or is_full:
            sent[i] = filled[i]
    return sent


def wait_s(
    sizes: Values,
    backward_s: Values,
    capacity: float,
    timeout_s: float,
    *,
    literal: bool = True,
) -> Floats:
    """Return how long the gradients of each layer stay in the buffer (osf Eq 14).

    Parameters
    ----------
    sizes, backward_s, capacity, timeout_s
        As of `buffered_bytes`.
    literal : bool, optional
        Whether to compute Eq 14 as printed. Otherwise it is repaired, as the notes say.

    Returns
    -------
    ndarray, shape (n,)
        t_wait of each layer in seconds.

    Notes
    -----
    t_wait^(i) is

    - t_timeout if t_backward^(i-1) > t_timeout,
    - else t_backward^(i-1) if B^(i) + D^(i-1) > Q,
    - else 0.

    D are the bytes of a layer, Q those that the buffer can hold, and B those that it holds
    after a layer (`buffered_bytes`). In the last case layer i - 1 joins layer i in the buffer,
    and no message leaves between them that could wait. The last case also holds for layer 1,
    which waits for no other layer.

    Repaired, a full buffer does not wait, because the size of the next tensor is known before
    its backward pass. The comparison with the timeout is >=, as it is in Eq 12.
    """
    filled = buffered_bytes(sizes, backward_s, capacity, timeout_s).tolist()
    # Layer 1, whose index is 0, waits for no other layer. The index i is that of layer i + 1,
    # and i - 1 that of the layer for which it waits.
    waited_s = np.zeros(len(sizes))
    for i in range(1, len(sizes)):
        next_layer_s = backward_s[i - 1]
        is_full = filled[i] + sizes[i - 1] > capacity
        if literal:
            if next_layer_s > timeout_s:
                waited_s[i] = timeout_s
            elif is_full:
                waited_s[i] = next_layer_s
        elif next_layer_s >= timeout_s and not is_full:
            waited_s[i] = timeout_s
    return waited_s


def fused_start_s(
    sizes: Values,
    backward_s: Values,
    update: Update,
    capacity: float,
    timeout_s: float,
    *,
    literal: bool = True,
) -> Floats:
    """Return when the message after each layer starts, with fusion (osf Eq 15).

    Parameters
    ----------
    sizes, backward_s, capacity, timeout_s
        As of `buffered_bytes`.
    update : callable
        t_update, the time of an all-reduce in seconds by its bytes.
    literal : bool, optional
        Whether to compute Eqs 13 to 15 as printed. Otherwise they are repaired: Eq 15 as the
        notes say, and Eqs 13 and 14 as `sent_bytes` and `wait_s` say.

    Returns
    -------
    ndarray, shape (n,)
        The start tau of the message after each layer, in seconds from the end of layer n's
        backward. Layer n is the first in the backward pass.

    Notes
    -----
    tau^(n) = 0, and for every other layer

    tau^(i) = max(tau^(i+1) + t_update(F^(i+1)) + t_wait^(i+1),
    sum over j = i to n - 1 of t_backward^(j)),

    where F are the bytes of each message (`sent_bytes`).

    Repaired, t_wait^(i+1) is left out, and t_wait^(i) is added to the sum of backward times,
    because a wait delays the message that waits. A layer that sends nothing starts when the
    link is free and takes no time.
    """
    buffer = (sizes, backward_s, capacity, timeout_s)
    waited_s = wait_s(*buffer, literal=literal).tolist()
    sent = sent_bytes(*buffer, literal=literal).tolist()
    if literal:
        # As printed, t_update is also added where nothing is sent. It is then the overhead, if
        # ``update`` has one.
        sent_s = [update(size) for size in sent]
        return _start_as_printed(backward_s, waited_s, sent_s)
    # A layer that sends nothing takes no time.
    is_sent = [size > 0 for size in sent]
    sent_s = [update(size) if size > 0 else 0.0 for size in sent]
    return _start_as_repaired(backward_s, waited_s, sent_s, is_sent)


def _start_as_printed(
    backward_s: Values, waited_s: Sequence[float], sent_s: Sequence[float]
) -> Floats:
    """Return the starts tau of `fused_start_s` by Eq 15 as printed.

    They are in seconds from the end of layer n's backward. Layer n is the first in the backward
    pass. All arguments have one value for each layer, in forward order. ``waited_s`` is t_wait,
    how long the gradients of the layer stay in the buffer (`wait_s`). ``sent_s`` is t_update(F),
    the time of the message after the layer, which has F bytes (`sent_bytes`).

    Notes
    -----
    tau^(n) = 0, and for every other layer

    tau^(i) = max(tau^(i+1) + t_update(F^(i+1)) + t_wait^(i+1),
    sum over j = i to n - 1 of t_backward^(j))
    """
    n = len(backward_s)
    # A list, because single elements of an array are slow.
    start_s = [0.0] * n
    # Index i is that of layer i + 1. Layer n, whose index is n - 1, starts at 0.
    for i in range(n - 2, -1, -1):
        # The index of the next higher layer, which comes right before in the backward pass.
        before = i + 1
        link_free_s = start_s[before] + sent_s[before]
        # The slice ends before layer n, because starts count from the end of its backward.
        # `fsum` rounds only once.
        computed_s = math.fsum(backward_s[i : n - 1])
        start_s[i] = max(link_free_s + waited_s[before], computed_s)
    return np.array(start_s)


def _start_as_repaired(
    backward_s: Values,
    waited_s: Sequence[float],
    sent_s: Sequence[float],
    is_sent: Sequence[bool],
) -> Floats:
    """Return the starts tau of `fused_start_s` by Eq 15 as repaired.

    They are in seconds from the end of layer n's backward. All arguments have one value for
    each layer, in forward order. ``waited_s`` is t_wait: how long the gradients stay in the
    buffer until its timeout, or 0. ``is_sent`` says whether a message leaves after the layer,
    as it does after each timeout, and ``sent_s`` is its time t_update(F), or 0 if none leaves.
    """
    n = len(backward_s)
    # A list, because single elements of an array are slow.
    start_s = [0.0] * n
    # If layer n waits for the timeout, this delays its own message, which is the first. If no
    # message leaves after it, its wait is 0.
    start_s[-1] = waited_s[-1]
    # The index i is that of layer i + 1, and n - 1 that of layer n.
    for i in range(n - 2, -1, -1):
        link_free_s = start_s[i + 1] + sent_s[i + 1]
        # From the end of layer n's backward, whose time is thus not in the sum.
        computed_s = math.fsum(backward_s[i : n - 1])
        if is_sent[i]:
            start_s[i] = max(link_free_s, computed_s + waited_s[i])
        else:
            # Nothing leaves here. The next layer needs to know when the link is free.
            start_s[i] = link_free_s
    return np.array(start_s)


def osf_fused(
    forward_s: float,
    sizes: Values,
    backward_s: Values,
    update: Update,
    capacity: float,
    timeout_s: float = math.inf,
    *,
    literal: bool = True,
) -> float:
    """Return the scaling factor with overlap and tensor fusion (osf Eqs 11, 16).

    Parameters
    ----------
    forward_s : float
        The forward time of all layers, in seconds.
    sizes, backward_s, capacity, timeout_s
        As of `buffered_bytes`. By default the buffer waits for ever.
    update : callable
        t_update, the time of an all-reduce in seconds by its bytes.
    literal : bool, optional
        Whether to compute Eqs 13 to 15 as printed. Otherwise they are repaired, as
        `sent_bytes`, `wait_s` and `fused_start_s` say.

    Returns
    -------
    float
        The scaling factor OSF_fusion.

    Notes
    -----
    OSF_fusion = T_comp / (T_comp + tau^(1) + t_update(F^(1)) - T_overlap)

    By Eq 16, tau^(1) + t_update(F^(1)) is all time of communication. It counts from the end of
    layer n's backward. T_overlap is the backward pass from then on, which T_comp has, too.
    """
    sent = sent_bytes(sizes, backward_s, capacity, timeout_s, literal=literal)
    # Layer 1, whose index is 0, is the last in the backward pass, and is always sent.
    last_message_bytes = float(sent[0])
    start_s = fused_start_s(
        sizes, backward_s, update, capacity, timeout_s, literal=literal
    )
    computed_s = forward_s + math.fsum(backward_s)
    last_message_s = update(last_message_bytes)
    # Eq 16 is ``start_s[0] + last_message_s``, and the whole sum is the denominator of Eq 11.
    iteration_s = computed_s + start_s[0] + last_message_s - overlap_s(backward_s)
    return computed_s / iteration_s


def predict_osf(iteration: Iteration, *, literal: bool = True) -> Prediction:
    """Return what the paper predicts for an iteration (osf Eqs 3, 8-10 and 11-16).

    Parameters
    ----------
    iteration : Iteration
        A workload, its fusion plan and the cost of a message.
    literal : bool, optional
        Whether Eqs 13 to 15, of fusion, are computed as printed, or else repaired. The sum
        of Eq 8 always begins at j = i, as its prose has it, and not at j = i + 1 as printed.

    Returns
    -------
    Prediction
        The iteration in seconds, which is NaN where the paper has no formula. It has
        formulas for all-reduces that are sent one at a time, if the plan is ``none``
        (no fusion), ``single`` (one message) or a constant buffer without a timeout.
    """
    workload = iteration.workload
    # The paper leaves out the update of the weights. Its time is added after all messages.
    computed_s = workload.compute_s - workload.update_s
    factor = _predicted_factor(iteration, literal=literal)
    return Prediction(
        iteration_s=computed_s / factor + workload.update_s,
        compute_s=workload.compute_s,
        communication_s=float(iteration.communication_s.sum()),
    )


def _predicted_factor(iteration: Iteration, *, literal: bool) -> float:
    """Return the scaling factor of `predict_osf`, NaN where the paper has no formula.

    ``literal`` is that of `predict_osf`.
    """
    cost = iteration.cost
    # The paper has all-reduces, of which one at a time is in flight.
    if cost.collective != "all_reduce" or iteration.link.in_flight != 1:
        return math.nan

    def all_reduce_s(n_bytes: float) -> float:
        # This is t_update of the paper. A layer without bytes sends no message.
        return float(cost(n_bytes)) if n_bytes > 0 else 0.0

    sizes, backward_s = of_workload(iteration.workload)
    forward_s = iteration.workload.forward_s
    # Such as "none", or "buffer:25MB", or "buffer:25MB:1ms" with a timeout.
    planner, _, argument = iteration.plan.planner.partition(":")
    if planner == "none":
        sent_s = [all_reduce_s(size) for size in sizes]
        # The sum of Eq 8 begins at j = i, as its prose has it. ``literal`` concerns fusion alone.
        return osf(forward_s, backward_s, sent_s, first=0)
    if planner == "single":
        # A single message is that of a buffer without a limit.
        capacity = math.inf
    elif planner == "buffer" and ":" not in argument:
        capacity = parse_bytes(argument)
    else:
        # Another plan, or a buffer with a timeout.
        return math.nan
    return osf_fused(
        forward_s, sizes, backward_s, all_reduce_s, capacity, literal=literal
    )


# -- bounds --------------------------------------------------------------------------


def largest_fusion_gain(constant_sf: float, saved_overhead: float = 0.0) -> float:
    """Return the largest possible gain over constant fusion (osf Eqs 4, 7 and 11).

    Parameters
    ----------
    constant_sf : float
        T_comp / T_constant, the scaling factor with constant fusion (Eq 11).
    saved_overhead : float, optional
        (k - 1) delta / T_comp, where constant fusion sends k messages, and delta is the
        overhead of a message.

    Returns
    -------
    float
        An upper bound of T_constant / T - 1, over the iterations T of all fusion plans.

    Notes
    -----
    T >= max(T_comp, T_constant - 2/3 T_comp - (k - 1) delta)

    Let b be the time of all bytes on the link.

    - T_constant <= T_comp + k delta + b, which is the time without overlap. This also holds
      with a timeout, because a message that waits for a tensor in vain still leaves before
      the end of the backward pass.
    - T >= T_comp / 3 + delta + b, because any plan begins to send after the forward pass,
      which is a third of T_comp, and sends one message at least.

    By the first line, b >= T_constant - T_comp - k delta. Put into the second line, this gives
    the second term of the maximum.
    """
    # Both iterations are divided by T_comp.
    constant = 1 / constant_sf
    least = max(1.0, constant - 2 / 3 - saved_overhead)
    return constant / least - 1


def largest_scaling_loss(communication_growth: float) -> float:
    """Return the largest relative loss of the scaling factor (osf Eq 3).

    Parameters
    ----------
    communication_growth : float
        By which share communication grows, for example 0.08 for 8%.

    Returns
    -------
    float
        The share that the scaling factor can lose at most. The iteration grows by no larger
        share than its communication, and the factor is T_comp over the iteration.

    Notes
    -----
    1 - 1 / (1 + g), where g is the growth
    """
    return 1 - 1 / (1 + communication_growth)


# -- the phases of the exchange ------------------------------------------------------

PHASES = ("NEGOTIATE", "ALLREDUCE", "WAIT", "MISC")
"""What a rank spends the time on from its first gradient to the end of the last message.

Each moment counts once. ALLREDUCE is the time in which a message is under way. Else
WAIT is the time in which a gradient waits for others in the buffer. Else NEGOTIATE is
the time in which a complete message waits for the slowest rank or for the agreement on
the order. MISC is the rest."""


def breakdown(
    workload: Workload,
    plan: FusionPlan,
    cost: MessageCost,
    *,
    waited_s: Floats | float = 0.0,
    slowest: float = 1.0,
    negotiate_s: float = 0.0,
    link: Link = PLAIN,
) -> dict[str, float]:
    """Return how long each phase of a simulated exchange takes on a rank of usual speed.

    If one rank is slower, the others wait for it, which is NEGOTIATE on a usual rank.

    Parameters
    ----------
    workload : Workload
        What a rank of usual speed computes in one iteration.
    plan : FusionPlan
        Which gradients share a message. The plan has G groups.
    cost : MessageCost
        The time of a message by its size.
    waited_s : float or ndarray, shape (G,), optional
        How long each message waits in vain for one more tensor, in seconds.
    slowest : float, optional
        By which factor the slowest rank computes longer. A message cannot start before its
        last gradient is ready on the slowest rank.
    negotiate_s : float, optional
        How long the ranks take to agree on the order of messages, in seconds.
    link : Link, optional
        What messages share. By default they are sent one after the other.

    Returns
    -------
    dict of str to float
        The seconds of each of `PHASES`.
    """
    # When each message is complete on this rank, and when it may leave: then it is also
    # complete on the slowest rank, has waited for the timeout, and is agreed upon. The slowest
    # rank takes ``slowest`` times as long for everything from the start of the iteration on.
    ready_s = plan.group_ready_s(workload)
    leave_s = slowest * ready_s + waited_s + negotiate_s
    _, end_s = Iteration(workload, plan, cost, link, leave_s=leave_s).played_s
    # ALLREDUCE has all moments in which any message is under way. If a message may leave before
    # the end of the message before it, the moments until this end are already counted. So each
    # message counts from the end of the one before it at the earliest. The first message finds
    # a free link.
    previous_end_s = np.concatenate([[0.0], end_s[:-1]])
    counted_from_s = np.maximum(leave_s, previous_end_s)
    # WAIT begins with the first gradient of each group, and ends when the last one is ready, or
    # with the timeout. What then passes until the message may leave is NEGOTIATE: the lag of
    # the slowest rank, and the agreement.
    first_gradient_s = workload.ready_s[np.array(plan.starts)]
    # Where phases overlap, the earlier one in the dict counts. What no phase covers is MISC.
    phases = {
        "ALLREDUCE": _spans(counted_from_s, end_s),
        "WAIT": _spans(first_gradient_s, ready_s + waited_s),
        "NEGOTIATE": _spans(ready_s + waited_s, leave_s),
    }
    # From the first gradient to the end of the last message.
    total_s = float(end_s[-1] - workload.ready_s[0])
    return _each_moment_once(phases, total_s)


def of_timeline(
    timeline: Timeline, rank: int = 0, first: str = "ALLREDUCE"
) -> dict[str, float]:
    """Return how long each phase of a recorded iteration took on one rank.

    Parameters
    ----------
    timeline : Timeline
        The spans of one iteration.
    rank : int, optional
        The rank whose spans count.
    first : {"ALLREDUCE", "WAIT", "NEGOTIATE"}, optional
        The phase that counts where phases overlap. After it, they count in the order
        ALLREDUCE, WAIT, NEGOTIATE.

    Returns
    -------
    dict of str to float
        The seconds of each of `PHASES`. What no other phase covers is MISC.
    """
    of_rank = timeline.select(timeline.rank == rank)
    # Start and end of the times in which any message is under way, shape (m, 2), in order.
    messages = of_rank.spans(COMMUNICATION)
    backward = of_rank.select(of_rank.kind == "backward")
    # A gradient is ready when its backward ends. The first gradient of a group waits in the
    # buffer until the last one is ready.
    group_first_s = []
    group_last_s = []
    for group in np.unique(backward.group):
        ends_s = backward.end_s[backward.group == group]
        group_first_s.append(ends_s.min())
        group_last_s.append(ends_s.max())
    phases = {
        "ALLREDUCE": messages,
        "WAIT": _spans(np.array(group_first_s), np.array(group_last_s)),
        "NEGOTIATE": of_rank.spans(("negotiate",)),
    }
    # Where phases overlap, the earlier one in the dict counts. ``first`` is put in first, and
    # keeps its place when the dict of all phases repeats it.
    ordered = {first: phases[first], **phases}
    # From the first gradient to the end of the last message.
    total_s = float(messages[-1, 1] - backward.end_s.min())
    return _each_moment_once(ordered, total_s)


def _spans(start_s: Floats, end_s: Floats) -> Floats:
    """Return the start and the end of each span, shape (m, 2).

    A span that would end before it starts is empty.
    """
    return np.column_stack([start_s, np.maximum(start_s, end_s)])


def _each_moment_once(phases: Mapping[str, Floats], total_s: float) -> dict[str, float]:
    """Return the seconds of each phase, in which a moment counts for one phase only.

    Parameters
    ----------
    phases : mapping of str to ndarray, shape (m, 2)
        The start and the end of the spans of each phase, in seconds. A moment counts for the
        first phase of the mapping that covers it.
    total_s : float
        The seconds of all phases together. What no span covers is MISC.

    Returns
    -------
    dict of str to float
        The seconds of each of `PHASES`.
    """
    lengths_s = {}
    # The union of the spans of all phases so far. A phase has the time by which its spans make
    # this union longer.
    earlier_s = 0.0
    covered = np.empty((0, 2))
    for phase, spans in phases.items():
        covered = merge(np.concatenate([covered, spans]))
        covered_s = float(np.sum(covered[:, 1] - covered[:, 0]))
        lengths_s[phase] = covered_s - earlier_s
        earlier_s = covered_s
    lengths_s["MISC"] = total_s - earlier_s
    # Rounding can leave a phase a little below zero.
    return {phase: max(lengths_s[phase], 0.0) for phase in PHASES}
