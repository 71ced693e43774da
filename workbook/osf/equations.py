"""osf: equations of Liu et al., Modeling and Optimizing the Scaling Performance (WWW 2022).

Layers are in forward order: index 0 is the paper's layer 1. ``literal=True`` is what the paper prints;
``literal=False`` is what its prose needs:

    Eq 13   the timeout concerns the layer that is waited for, i - 1, and its comparison is Eq 12's
    Eq 14   a full buffer leaves at once: the next tensor's size is known before it is computed
    Eq 15   the wait delays a message's own start, not the next message's
    Eq 7    a layer that sends nothing takes no time, not delta
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
"""Bytes -> seconds of one all-reduce (osf Eq 7 or 18)."""


def of_workload(workload: Workload) -> tuple[list[float], list[float]]:
    """Return a workload's (sizes in bytes, backward times) in forward order, as used below."""
    return workload.bytes[::-1].astype(float).tolist(), workload.backward_s[
        ::-1
    ].tolist()


def scaling_factor(alone_s: float, together_s: float, workers: int) -> float:
    """osf Eq 1: SF = T_1 / (T_N N); any unit of time, as long as both share it."""
    return alone_s / (together_s * workers)


def csf(compute_s: float, communication_s: float) -> float:
    """osf Eq 2: the scaling factor when communication (T_comm) follows all computation (T_comp)."""
    return compute_s / (compute_s + communication_s)


def compute_s(
    forward_flops: ArrayLike, batch: int, c: float, flops_per_s: float
) -> float:
    """osf Eqs 4, 5: T_comp = 3 T_forward = sum over layers of 3 M C / (c pi).

    Symbols: C = forward_flops, (n,) of *one sample* (Table 1 says of a mini-batch; then M would
    count twice), M = batch, c = c, pi = flops_per_s.
    """
    return 3 * batch * float(np.sum(forward_flops)) / (c * flops_per_s)


def update_start_s(backward_s: Values, sent_s: Values, first: int = 1) -> Floats:
    """osf Eq 8: (n,) start of every layer's update, counted from the end of layer n's backward.

    Symbols: t_backward = backward_s, t_update(D) = sent_s, (n,). The sum over the backward times starts at
    j = i + ``first``: 1 as printed, 0 as its prose and Eq 15 have it.
    """
    n = len(backward_s)
    start = [0.0] * n  # an array is slow one by one
    for i in range(n - 2, -1, -1):
        computed = math.fsum(backward_s[i + first : n - 1])
        start[i] = max(start[i + 1] + sent_s[i + 1], computed)
    return np.array(start)


def overlap_s(backward_s: Values) -> float:
    """osf Eq 10: T_overlap, the backward time of all layers but the last."""
    return math.fsum(backward_s[:-1])


def osf(forward_s: float, backward_s: Values, sent_s: Values, first: int = 1) -> float:
    """osf Eqs 3, 8-10: T_comp / (T_comp + T_update - T_overlap); ``first`` as in update_start_s."""
    compute = forward_s + math.fsum(backward_s)
    updated = update_start_s(backward_s, sent_s, first)[0] + sent_s[0]  # Eq 9
    return compute / (compute + updated - overlap_s(backward_s))


def update_s(
    n_bytes: ArrayLike,
    workers: int,
    bytes_per_s: float,
    *,
    adds_per_s: float = math.inf,
    bytes_per_parameter: int = 4,
    overhead_s: float = 0.0,
) -> Floats:
    """osf Eq 7: time of a ring all-reduce of ``n_bytes`` (any shape), element by element.

    Symbols: D = n_bytes, N = workers, beta = bytes_per_s, pi = adds_per_s, s = bytes_per_parameter,
    delta = overhead_s. As printed, nothing to send still costs delta.
    """
    share = (workers - 1) / workers
    per_byte = 2 * share / bytes_per_s + share / (adds_per_s * bytes_per_parameter)
    return per_byte * np.asarray(n_bytes, dtype=float) + overhead_s


def ring_from_ends(n_bytes: ArrayLike, seconds: ArrayLike, workers: int) -> AlphaBeta:
    """osf Eq 7 with beta and delta by the medians of the smallest and the largest of (n,) messages."""
    sizes, times = np.asarray(n_bytes, dtype=float), np.asarray(seconds, dtype=float)
    ends = sizes.min(), sizes.max()
    first_s, last_s = (float(np.median(times[sizes == end])) for end in ends)
    slope = (last_s - first_s) / float(ends[1] - ends[0])
    return AlphaBeta(
        first_s - slope * float(ends[0]), slope, workers=workers, algorithm="ring"
    )


def bandwidth_delay_bytes(cost: AlphaBeta) -> float:
    """Return the bandwidth-delay product of a ring's links, which osf Eq 18 takes for D_Thresh.

    By Eq 7 without additions 1 / beta = N cost.beta_s_per_byte / 2(N-1), delta = cost.alpha_s. The paper
    gives only the product; here 2(N-1) messages, one after the other, two a round trip, take delta.
    """
    workers = cost.workers or 2
    bytes_per_s = 2 * ((workers - 1) / workers) / cost.beta_s_per_byte
    return bytes_per_s * cost.alpha_s / (workers - 1)


def buffered_bytes(
    sizes: Values, backward_s: Values, capacity: float, timeout_s: float
) -> Floats:
    """osf Eq 12: (n,) bytes B buffered after each layer; D = sizes, t_backward = backward_s, Q = capacity."""
    filled = [float(size) for size in sizes]  # an array is slow one by one
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
    """osf Eq 13: (n,) F, sent after layer i's backward; symbols as Eq 12; printed, bytes may be lost."""
    filled = buffered_bytes(sizes, backward_s, capacity, timeout_s).tolist()
    sent = np.zeros(len(sizes))
    for i in range(len(sizes)):
        late = (
            backward_s[i] > timeout_s
            if literal
            else i > 0 and backward_s[i - 1] >= timeout_s
        )
        if i == 0 or late or filled[i] + sizes[i - 1] > capacity:
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
    """osf Eq 14: (n,) t_wait, how long layer i's tensors stay in the buffer; symbols as Eq 12."""
    filled = buffered_bytes(sizes, backward_s, capacity, timeout_s).tolist()
    waited = np.zeros(len(sizes))
    for i in range(1, len(sizes)):
        full = filled[i] + sizes[i - 1] > capacity
        if literal:
            late = backward_s[i - 1] > timeout_s
            waited[i] = timeout_s if late else backward_s[i - 1] if full else 0.0
        elif backward_s[i - 1] >= timeout_s and not full:
            waited[i] = timeout_s
    return waited


def fused_start_s(
    sizes: Values,
    backward_s: Values,
    update: Update,
    capacity: float,
    timeout_s: float,
    *,
    literal: bool = True,
) -> Floats:
    """osf Eq 15: (n,) tau, start of layer i's transfer after layer n's backward; t_update = update."""
    arguments = sizes, backward_s, capacity, timeout_s
    waited = wait_s(*arguments, literal=literal).tolist()
    sent = sent_bytes(*arguments, literal=literal).tolist()
    taken = [update(size) if literal or size > 0 else 0.0 for size in sent]
    n = len(sizes)
    start = [0.0] * n
    if not literal:
        start[-1] = waited[-1]
    for i in range(n - 2, -1, -1):
        free, computed = start[i + 1] + taken[i + 1], math.fsum(backward_s[i : n - 1])
        if literal:
            start[i] = max(free + waited[i + 1], computed)
        else:  # where nothing leaves, tau only carries on when the link is free
            start[i] = max(free, computed + waited[i]) if sent[i] > 0 else free
    return np.array(start)


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
    """osf Eqs 11, 16: OSF_fusion = T_comp / (T_comp + tau^(1) + t_update(F^(1)) - T_overlap)."""
    buffer = capacity, timeout_s
    first = float(sent_bytes(sizes, backward_s, *buffer, literal=literal)[0])
    start = fused_start_s(sizes, backward_s, update, *buffer, literal=literal)
    compute = forward_s + math.fsum(backward_s)
    return compute / (compute + start[0] + update(first) - overlap_s(backward_s))


def predict_osf(iteration: Iteration, *, literal: bool = True) -> Prediction:
    """The iteration by OSF (osf Eqs 3, 8-10; i as Eq 8's prose has it) or OSF_fusion (Eqs 11-16).

    NaN where the paper has no formula: it has one for all-reduces, one at a time, of a plan without fusion,
    with one message, or with a constant buffer and no timeout.
    """
    workload, cost = iteration.workload, iteration.cost
    sizes, backward_s = of_workload(workload)
    kind, _, argument = iteration.plan.planner.partition(":")
    covered = cost.collective == "all_reduce" and iteration.link.in_flight == 1

    def update(n_bytes: float) -> float:
        return float(cost(n_bytes)) if n_bytes > 0 else 0.0

    factor = math.nan
    if covered and kind == "none":
        factor = osf(
            workload.forward_s, backward_s, [update(size) for size in sizes], first=0
        )
    elif covered and (kind == "single" or (kind == "buffer" and ":" not in argument)):
        capacity = math.inf if kind == "single" else parse_bytes(argument)
        forward_s = workload.forward_s
        factor = osf_fused(
            forward_s, sizes, backward_s, update, capacity, literal=literal
        )
    sent_s = float(iteration.communication_s.sum())
    alone_s = workload.compute_s - workload.update_s
    return Prediction(alone_s / factor + workload.update_s, workload.compute_s, sent_s)


def largest_fusion_gain(constant_sf: float, saved_overhead: float = 0.0) -> float:
    """Return the most that T_constant / T - 1 is over all fusion plans, under osf Eqs 4, 7 and 11.

    constant_sf : T_comp / T_constant (Eq 11); saved_overhead : (k - 1) delta / T_comp, of k constant messages

    T >= max(T_comp, T_constant - 2/3 T_comp - (k - 1) delta): with b the time of all bytes, the constant plan
    takes at most T_comp + k delta + b, as without overlap, and no plan sends before forward is over, a third
    of T_comp, nor less than delta + b. What waits in vain for a tensor still leaves before backward ends.
    """
    constant = 1 / constant_sf
    return constant / max(1.0, constant - 2 / 3 - saved_overhead) - 1


def largest_scaling_loss(communication_growth: float) -> float:
    """Return the most that SF can fall, relatively, by osf Eq 3 when communication grows."""
    return 1 - 1 / (1 + communication_growth)


PHASES = ("NEGOTIATE", "ALLREDUCE", "WAIT", "MISC")
"""Each moment from a rank's first gradient to the last message's end counts once: a message is on its way,
else a gradient waits for others, else a complete message for the slowest rank or the agreement, else MISC."""


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
    """Return seconds of each phase for a rank of usual speed, simulated, messages one by one.

    A message leaves when its last gradient is ready on the slowest rank (``slowest`` times slower) and
    its order has been agreed on (``negotiate_s``), after ``waited_s`` (G,) in vain for one more tensor.
    """
    ready_s = plan.group_ready_s(workload)
    leave_s = slowest * ready_s + waited_s + negotiate_s
    end_s = Iteration(workload, plan, cost, link, leave_s=leave_s).played_s[1]
    begin_s = np.maximum(leave_s, np.concatenate([[0.0], end_s[:-1]]))
    first_s = workload.ready_s[np.array(plan.starts)]
    phases = {
        "ALLREDUCE": _spans(begin_s, end_s),
        "WAIT": _spans(first_s, ready_s + waited_s),
        "NEGOTIATE": _spans(ready_s + waited_s, leave_s),
    }
    return _each_moment_once(phases, float(end_s[-1] - workload.ready_s[0]))


def of_timeline(
    timeline: Timeline, rank: int = 0, first: str = "ALLREDUCE"
) -> dict[str, float]:
    """Return seconds of each phase for that rank, read off one iteration; of two at once ``first`` counts."""
    mine = timeline.select(timeline.rank == rank)
    messages, backward = mine.spans(COMMUNICATION), mine.select(mine.kind == "backward")
    ends = [
        backward.end_s[backward.group == group] for group in np.unique(backward.group)
    ]
    buffered = _spans(
        np.array([end.min() for end in ends]), np.array([end.max() for end in ends])
    )
    phases = {
        "ALLREDUCE": messages,
        "WAIT": buffered,
        "NEGOTIATE": mine.spans(("negotiate",)),
    }
    ordered = {first: phases[first], **phases}
    return _each_moment_once(ordered, float(messages[-1, 1] - backward.end_s.min()))


def _spans(start_s: Floats, end_s: Floats) -> Floats:
    return np.column_stack([start_s, np.maximum(start_s, end_s)])


def _each_moment_once(phases: Mapping[str, Floats], total_s: float) -> dict[str, float]:
    """Return the length of each phase less what earlier ones cover; MISC is what remains of ``total_s``."""
    lengths_s, covered_s, seen = {}, 0.0, np.empty((0, 2))
    for phase, spans in phases.items():
        seen = merge(np.concatenate([seen, spans]))
        length_s = float(np.sum(seen[:, 1] - seen[:, 0]))
        lengths_s[phase], covered_s = length_s - covered_s, length_s
    lengths_s["MISC"] = total_s - covered_s
    return {phase: max(lengths_s[phase], 0.0) for phase in PHASES}
