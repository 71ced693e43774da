"""osf Eqs 11-17: tensor fusion with a buffer and a timeout, and adaFusion's condition.

``literal=True`` is what the paper prints. ``literal=False`` is what its prose needs:

    Eq 13   the timeout concerns the layer that is waited for, i - 1, and its comparison is Eq 12's
    Eq 14   a full buffer leaves at once: the next tensor's size is known before it is computed
    Eq 15   the wait delays a message's own start, not the next message's
    Eq 7    a layer that sends nothing takes no time, not delta
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from ddlkit.papers.osf.scaling import overlap_s

Floats = NDArray[np.float64]
Update = Callable[[float], float]
"""Bytes -> seconds of one all-reduce (osf Eq 7 or 18)."""


def buffered_bytes(
    sizes: Sequence[float], backward_s: Sequence[float], capacity: float, timeout_s: float
) -> Floats:
    """osf Eq 12: (n,) B, bytes in the buffer once layer i's tensors are in it.

    Symbols: D = sizes, t_backward = backward_s, both (n,); Q = capacity in bytes, timeout = timeout_s.
    """
    filled = np.array(sizes, dtype=float)
    for i in range(len(sizes) - 2, -1, -1):
        if filled[i + 1] + sizes[i] <= capacity and backward_s[i] < timeout_s:
            filled[i] += filled[i + 1]
    return filled


def sent_bytes(
    sizes: Sequence[float],
    backward_s: Sequence[float],
    capacity: float,
    timeout_s: float,
    *,
    literal: bool = True,
) -> Floats:
    """osf Eq 13: (n,) F, bytes sent after layer i's backward; symbols as Eq 12.

    Printed, the timeout is compared with layer i's own backward time, so bytes may be lost or sent
    twice; repaired, with that of layer i - 1, and F always sums to D.
    """
    filled = buffered_bytes(sizes, backward_s, capacity, timeout_s)
    sent = np.zeros(len(sizes))
    for i in range(len(sizes)):
        late = backward_s[i] > timeout_s if literal else i > 0 and backward_s[i - 1] >= timeout_s
        if i == 0 or late or filled[i] + sizes[i - 1] > capacity:
            sent[i] = filled[i]
    return sent


def wait_s(
    sizes: Sequence[float],
    backward_s: Sequence[float],
    capacity: float,
    timeout_s: float,
    *,
    literal: bool = True,
) -> Floats:
    """osf Eq 14: (n,) t_wait, how long layer i's tensors stay in the buffer before they leave.

    Printed, a full buffer still waits for the layer that no longer fits; repaired, it does not.
    """
    filled = buffered_bytes(sizes, backward_s, capacity, timeout_s)
    waited = np.zeros(len(sizes))
    for i in range(1, len(sizes)):
        full = filled[i] + sizes[i - 1] > capacity
        if literal:
            late = backward_s[i - 1] > timeout_s
            waited[i] = timeout_s if late else backward_s[i - 1] if full else 0.0
        elif not full and backward_s[i - 1] >= timeout_s:
            waited[i] = timeout_s
    return waited


def fused_start_s(
    sizes: Sequence[float],
    backward_s: Sequence[float],
    update: Update,
    capacity: float,
    timeout_s: float,
    *,
    literal: bool = True,
) -> Floats:
    """osf Eq 15: (n,) tau, start of layer i's transfer, counted from the end of layer n's backward.

    Symbols: t_update = update, F and t_wait as Eqs 13 and 14.
    """
    arguments = sizes, backward_s, capacity, timeout_s
    waited = wait_s(*arguments, literal=literal)
    sent = sent_bytes(*arguments, literal=literal)
    taken = [update(size) if literal or size > 0 else 0.0 for size in sent.tolist()]
    n = len(sizes)
    start = np.zeros(n)
    if not literal:
        start[-1] = waited[-1]
    for i in range(n - 2, -1, -1):
        free, computed = start[i + 1] + taken[i + 1], math.fsum(backward_s[i : n - 1])
        if literal:
            start[i] = max(free + waited[i + 1], computed)
        else:  # where nothing leaves, tau only carries on when the link is free
            start[i] = max(free, computed + waited[i]) if sent[i] > 0 else free
    return start


def osf_fused(
    forward_s: float,
    sizes: Sequence[float],
    backward_s: Sequence[float],
    update: Update,
    capacity: float,
    timeout_s: float = math.inf,
    *,
    literal: bool = True,
) -> float:
    """osf Eqs 11, 16: OSF_fusion = T_comp / (T_comp + tau^(1) + t_update(F^(1)) - T_overlap).

    Symbols: T_comp = forward_s + all backward_s; sizes, update, capacity, timeout_s as Eqs 12-15.
    """
    arguments = sizes, backward_s, capacity, timeout_s
    first = float(sent_bytes(*arguments, literal=literal)[0])
    start = fused_start_s(sizes, backward_s, update, capacity, timeout_s, literal=literal)
    compute = forward_s + math.fsum(backward_s)
    return compute / (compute + start[0] + update(first) - overlap_s(backward_s))


def fusing_pays(update: Update, buffered: float, size: float, waited_s: float) -> bool:
    """osf Eq 17, adaFusion: whether layer i's tensors join the buffer.

    Symbols: B^(i+1) = buffered and D^(i) = size in bytes, t_wait = waited_s, t_update = update.
    Printed, t_wait carries the index i; what the buffer waits for is layer i's own backward,
    which is the wait of layer i + 1. Under Eq 7 the sizes cancel: fuse if t_wait < delta.
    """
    return update(buffered + size) + waited_s < update(buffered) + update(size)


def adafusion_messages(
    sizes: Sequence[float],
    backward_s: Sequence[float],
    update: Update,
    *,
    capacity: float = math.inf,
    timeout_s: float = math.inf,
    literal: bool = True,
) -> tuple[float, ...]:
    """Message sizes, in sending order, when osf Eq 17 decides layer by layer from the last one.

    Printed: t_wait^(i) of Eq 14 for the given buffer and timeout. Repaired: layer i's backward time.
    """
    waited = wait_s(sizes, backward_s, capacity, timeout_s, literal=True) if literal else backward_s
    messages, buffered = [], float(sizes[-1])
    for i in range(len(sizes) - 2, -1, -1):
        if fusing_pays(update, buffered, sizes[i], waited[i]):
            buffered += sizes[i]
        else:
            messages.append(buffered)
            buffered = float(sizes[i])
    return (*messages, buffered)
