"""Fusion plans: which gradients travel in one message, and the planners that choose.

The gradients of a network become ready one after the other, beginning with the last
layer. A fusion plan cuts this sequence into contiguous groups, and each group is sent
as one message. Few large messages save start-up time, while many small ones start
earlier. A planner makes a plan from a workload and, if it needs one, from the cost of a
message. Planners are registered by name, so that `make_plan` finds them.

References
----------
osf : T. Liu et al., "Modeling and Optimizing the Scaling Performance in Distributed
    Deep Learning Training", WWW 2022.
mg_wfbp : S. Shi, X. Chu and B. Li, "MG-WFBP: Efficient Data Communication for
    Distributed Synchronous SGD Algorithms", INFOCOM 2019, and "MG-WFBP: Merging
    Gradients Wisely for Efficient Communication in Distributed Deep Learning", TPDS
    2021.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import accumulate, chain, cycle, pairwise, product
from typing import Any

import numpy as np

from ddlkit.core import units
from ddlkit.core.cost import MessageCost, NegativeCostError
from ddlkit.core.errors import UserError, shown
from ddlkit.core.fronts import ROUNDING, Groups, shortest
from ddlkit.core.workload import Floats, Ints, Workload

DDP_FIRST_BYTES = units.MIB
"""The size from which DistributedDataParallel of PyTorch sends its first bucket."""
DDP_BUCKET_BYTES = 25 * units.MIB
"""The size from which every later bucket is sent, by default."""

AT_ONCE = 2**20
"""How many groups `exact` prices at a time: 8 MB of seconds."""
MOST_SELECTED = 2_000
"""The most tensors of an exact plan of sparsified gradients.

The search for such a plan needs six arrays of all groups.
"""


@dataclass(frozen=True)
class FusionPlan:
    """A partition of n gradients into G contiguous groups, each sent as one message.

    Parameters
    ----------
    planner : str
        The name of the planner, with its arguments.
    ends : tuple of int, length G
        The exclusive end of each group in the order in which gradients become ready.
        Ends increase, and the last one is n.
    least_s : float, optional
        For a plan that is proven to be the best: no iteration is shorter at the cost
        for which the plan was made, if messages are sent one at a time. In seconds.
    order : tuple of int, length n, optional
        The gradients in the order in which they fill the groups, if that is not the
        order in which they become ready. A gradient is given by its index in ready
        order, and ``ends`` counts along ``order``. An empty order, the default, stands
        for the ready order. Gradients of several types need an order, because a group of
        one type may pass over gradients of another one.

    Raises
    ------
    UserError
        If there is no group, if a group is empty, or if ``order`` does not have every
        gradient once.

    Examples
    --------
    The first gradient travels alone, the other two together:

    >>> workload = Workload.from_arrays(3.0, [2.0, 2.0, 2.0], n_bytes=[100, 200, 300])
    >>> plan = FusionPlan("by hand", (1, 3))
    >>> plan.group_bytes(workload).tolist(), plan.group_ready_s(workload).tolist()
    ([100, 500], [5.0, 9.0])
    """

    planner: str
    ends: tuple[int, ...]
    least_s: float | None = field(default=None, compare=False)
    order: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        # Not strict, because `starts` always begins with 0, even if there is no end.
        bounds = zip(self.starts, self.ends, strict=False)
        if not self.ends or any(start >= end for start, end in bounds):
            raise UserError(
                f"plan {shown(self.planner)}: the numbers of the gradients after which "
                f"messages end must increase from above 0: they are {shown(self.ends)}"
            )
        if self.order and sorted(self.order) != list(range(self.n)):
            raise UserError(
                f"plan {self.planner!r}: the order {shown(self.order)} must have each "
                f"of {self.n} gradients once"
            )

    @property
    def n(self) -> int:
        """Return the number of gradients."""
        return self.ends[-1]

    @property
    def starts(self) -> tuple[int, ...]:
        """Return the first gradient of each group."""
        # A group begins where the group before it ends.
        return (0, *self.ends[:-1])

    @property
    def slices(self) -> list[slice]:
        """Return the gradients of each group, in ready order.

        Raises
        ------
        UserError
            If the plan has an order of its own. Then `members` has the gradients.
        """
        ends = self.ends_in_ready_order
        starts = (0, *ends[:-1])
        return [slice(start, end) for start, end in zip(starts, ends, strict=True)]

    @property
    def ends_in_ready_order(self) -> tuple[int, ...]:
        """Return ``ends``, if groups are contiguous in ready order.

        Raises
        ------
        UserError
            If the plan has an order of its own.
        """
        if self.order:
            raise UserError(
                f"plan {self.planner!r} keeps gradients of several types apart, so its "
                "messages have no contiguous gradients, as is needed here"
            )
        return self.ends

    @property
    def members(self) -> list[Ints]:
        """Return the gradients of each group as indices in ready order.

        The list has an array for each group.
        """
        order = np.array(self.order or range(self.n))
        # The last end is the end of the array, where nothing is cut.
        return np.split(order, self.ends[:-1])

    @property
    def last_needed(self) -> Ints:
        """Return the last gradient for which each message has to wait, shape (G,).

        Messages are posted in the order of their groups. So a message waits for the
        last gradient of its own group and of all groups before.
        """
        # In ready order, the last gradient of a message is the last one that it needs.
        if not self.order:
            return np.array(self.ends) - 1
        # The largest index of each group, because indices count in ready order.
        last_of_group = np.maximum.reduceat(np.array(self.order), self.starts)
        # The running maximum is the last gradient of a group and all groups before it.
        return np.maximum.accumulate(last_of_group)

    def group_bytes(self, workload: Workload) -> Ints:
        """Return the size of each message in bytes, shape (G,).

        Raises
        ------
        UserError
            If the workload has another number of gradients than the plan, or if a
            message would hold gradients of several types.
        """
        if self.n != workload.n:
            raise UserError(
                f"plan {self.planner!r} is for {self.n} tensors, but the layer profile has "
                f"{workload.n}: make the plan for this profile"
            )
        if workload.has_several_types:
            self._refuse_mixed_types(workload)
        sizes = workload.bytes
        if self.order:
            sizes = sizes[list(self.order)]
        # The sum over each group, from its start to the start of the next group.
        return np.add.reduceat(sizes, self.starts)

    def _refuse_mixed_types(self, workload: Workload) -> None:
        """Raise UserError if a message would hold gradients of several types."""
        for message, gradients in enumerate(self.members):
            types = sorted({workload.dtype[i] for i in gradients})
            if len(types) > 1:
                raise UserError(
                    f"plan {self.planner!r}: message {message} would hold gradients of "
                    f"several types ({', '.join(types)}), which DDP never mixes: use "
                    "the plan none (which what-if takes, too), ddp or ddp:25MiB"
                )

    def group_ready_s(self, workload: Workload) -> Floats:
        """Return when each message is ready to be sent, in seconds, shape (G,)."""
        return workload.ready_s[self.last_needed]

    def forward_groups(self) -> list[list[int]]:
        """Return the gradients of each group as indices in forward order, from 0.

        Groups, and the gradients of a group, stay in the order in which they are sent.
        The indices therefore decrease, unless gradients of several types are kept apart.
        """
        # Forward order is the reverse of ready order.
        last = self.n - 1
        return [(last - gradients).tolist() for gradients in self.members]

    def to_dict(self, iteration_s: float | None = None) -> dict[str, Any]:
        """Return the plan as JSON-ready values.

        Parameters
        ----------
        iteration_s : float, optional
            The predicted iteration in seconds, which is written with the plan.

        Returns
        -------
        dict
            The planner, the gradients of each group as indices in forward order, and
            ``iteration_s``.
        """
        return {
            "planner": self.planner,
            "groups": self.forward_groups(),
            "iteration_s": iteration_s,
        }


# -- plans by size -----------------------------------------------------------------


def none(workload: Workload) -> FusionPlan:
    """Return the plan in which every gradient travels alone.

    Parameters
    ----------
    workload : Workload
        The gradients.

    Returns
    -------
    FusionPlan
        A message for each gradient, in the order in which they become ready.
    """
    # Each gradient is a group, so the exclusive ends of the groups are 1, 2, and so on to n.
    ends = tuple(range(1, workload.n + 1))
    return FusionPlan("none", ends)


def single(workload: Workload) -> FusionPlan:
    """Return the plan in which all gradients travel in one message after backward.

    Parameters
    ----------
    workload : Workload
        The gradients.

    Returns
    -------
    FusionPlan
        One message of all gradients.
    """
    return FusionPlan("single", (workload.n,))


def _refuse_wrong_buffer(capacity_bytes: int, timeout_s: float) -> None:
    """Raise UserError if the capacity or the timeout of a buffer is not above zero."""
    if capacity_bytes <= 0:
        raise UserError(
            f"buffer of {capacity_bytes} bytes: a fusion buffer must be above zero"
        )
    # The comparison is negated, so that NaN is refused, too.
    if not timeout_s > 0:
        raise UserError(f"buffer timeout is {timeout_s} s: must be above zero")


def buffer(
    workload: Workload, capacity_bytes: int, name: str = "", timeout_s: float = math.inf
) -> FusionPlan:
    """Return the plan of a buffer that is sent before it would overflow.

    This is Eq 12 of "osf" (Liu et al. 2022).

    Parameters
    ----------
    workload : Workload
        What one iteration computes, in ready order.
    capacity_bytes : int
        The size that no group exceeds, unless a single gradient does.
    name : str, optional
        The name of the planner. By default (""), it is "buffer:" and the capacity.
    timeout_s : float, optional
        The buffer is also sent if the backward pass of the next gradient takes this
        long or longer. By default the buffer waits for any time.

    Returns
    -------
    FusionPlan
        The messages of the buffer.

    Raises
    ------
    UserError
        If the capacity or the timeout is not above zero.

    Examples
    --------
    >>> workload = Workload.from_arrays(0.0, [1.0, 1.0, 1.0], n_bytes=[60, 60, 40])
    >>> buffer(workload, 100).ends
    (1, 3)
    """
    _refuse_wrong_buffer(capacity_bytes, timeout_s)
    backward_s = workload.backward_s.tolist()
    ends = []
    filled_bytes = 0
    for i, n_bytes in enumerate(workload.bytes.tolist()):
        # If gradient i would overflow the buffer, or if it is awaited for too long, the buffer
        # is sent before it, and gradient i begins the next group. An empty buffer is not sent.
        overflows = filled_bytes + n_bytes > capacity_bytes
        times_out = backward_s[i] >= timeout_s
        if filled_bytes and (overflows or times_out):
            ends.append(i)
            filled_bytes = 0
        filled_bytes += n_bytes
    return FusionPlan(name or f"buffer:{capacity_bytes}", (*ends, workload.n))


def ddp(workload: Workload, cap_bytes: int = 0) -> FusionPlan:
    """Return the buckets of PyTorch's DistributedDataParallel.

    Parameters
    ----------
    workload : Workload
        What one iteration computes, in ready order.
    cap_bytes : int, optional
        The cap of every bucket. By default (0), the caps are those of PyTorch: 1 MiB
        for the first bucket and 25 MiB for the rest.

    Returns
    -------
    FusionPlan
        The buckets, each of which is a message.

    Notes
    -----
    A bucket is closed by the gradient with which it *reaches* its cap. A bucket can
    therefore be larger than its cap, unlike a fusion buffer (`buffer`).

    A bucket holds gradients of one type. The buckets of each type are filled on their
    own, each type beginning with the cap of the first bucket. Buckets are sent in the
    order in which they are closed. Buckets that are still open after the last gradient
    follow, in reverse of the order in which their types first occurred. PyTorch takes
    them from an ``std::unordered_map``, which has this order where PyTorch is built
    with GCC.

    Examples
    --------
    >>> sizes = [600_000, 600_000, 20_000_000, 9_000_000]
    >>> ddp(Workload.from_arrays(0.0, [1.0] * 4, sizes)).ends
    (2, 4)
    """
    buckets = _filled_buckets(workload, cap_bytes)
    name = f"ddp:{cap_bytes}B" if cap_bytes else "ddp"
    # The end of a bucket is the number of gradients in it and all buckets before.
    ends = tuple(accumulate(len(gradients) for gradients in buckets))
    order = tuple(chain.from_iterable(buckets))
    # A plan in ready order, as with a single type, states no order of its own.
    if order == tuple(range(workload.n)):
        return FusionPlan(name, ends)
    return FusionPlan(name, ends, order=order)


def _filled_buckets(workload: Workload, cap_bytes: int) -> list[list[int]]:
    """Return the gradients of each bucket of `ddp`, in the order in which buckets are sent.

    Gradients are numbers in ready order. ``cap_bytes`` is the cap of every bucket, or 0
    for the caps of PyTorch.
    """
    buckets: list[list[int]] = []
    # The open bucket of each type.
    open_buckets: dict[str, _OpenBucket] = {}
    for i, n_bytes in enumerate(workload.bytes.tolist()):
        # A workload that states no types has gradients of one type, here "".
        dtype = workload.dtype[i] if workload.dtype else ""
        if dtype not in open_buckets:
            open_buckets[dtype] = _OpenBucket(cap_bytes or DDP_FIRST_BYTES)
        bucket = open_buckets[dtype]
        bucket.gradients.append(i)
        bucket.bytes += n_bytes
        if bucket.bytes >= bucket.limit_bytes:
            buckets.append(bucket.gradients)
            # A new bucket takes the place of the old one, so that the dictionary keeps
            # the order in which types first occurred.
            open_buckets[dtype] = _OpenBucket(cap_bytes or DDP_BUCKET_BYTES)
    # PyTorch sends the buckets that are still open last, in reverse order of types.
    for bucket in reversed(open_buckets.values()):
        if bucket.gradients:
            buckets.append(bucket.gradients)
    return buckets


@dataclass
class _OpenBucket:
    """A bucket of `ddp` that is not closed yet.

    Attributes
    ----------
    limit_bytes : int
        The size from which the bucket is closed.
    bytes : int
        The size so far.
    gradients : list of int
        The gradients in the bucket, by their index in ready order.
    """

    limit_bytes: int
    bytes: int = 0
    gradients: list[int] = field(default_factory=list)


# -- plans by search ---------------------------------------------------------------


def improved(plan: FusionPlan, seconds: Callable[[FusionPlan], float]) -> FusionPlan:
    """Return a plan that no single change of a cut makes faster: a local optimum.

    Parameters
    ----------
    plan : FusionPlan
        Where the search begins: a plan in ready order, without an ``order`` of its own.
    seconds : callable
        Returns the iteration of a plan in seconds, or anything else to be minimized.

    Returns
    -------
    FusionPlan
        A plan of the same planner that is at least as fast.

    Notes
    -----
    A change adds a cut between two gradients, removes one, or moves one by a gradient.
    The first change that makes the plan faster is made. The search ends when every
    change has been tried in vain.

    Examples
    --------
    The fewer groups, the faster:

    >>> improved(FusionPlan("any", (1, 2, 4)), lambda plan: len(plan.ends)).ends
    (4,)
    """
    best = plan
    best_s = seconds(plan)
    # A change is a cut and a shift. The shift 0 adds the cut if the plan lacks it, and
    # removes the cut otherwise. The shifts -1 and 1 move the cut by one gradient.
    changes = list(product(range(1, plan.n), (0, -1, 1)))
    # How many changes were tried since the plan last became faster.
    tried_in_vain = 0
    for cut, shift in cycle(changes):
        if tried_in_vain == len(changes):
            break
        tried_in_vain += 1
        ends = _with_a_change(best.ends, cut, shift)
        if ends is None:
            continue  # the cut cannot be moved in this plan
        candidate = FusionPlan(plan.planner, ends)
        candidate_s = seconds(candidate)
        if candidate_s < best_s:
            best = candidate
            best_s = candidate_s
            tried_in_vain = 0
    return best


def _with_a_change(
    ends: tuple[int, ...], cut: int, shift: int
) -> tuple[int, ...] | None:
    """Return the ends of the groups if one cut between two groups is changed.

    Parameters
    ----------
    ends : tuple of int
        The exclusive end of each group.
    cut : int
        The number of gradients before the cut.
    shift : {0, -1, 1}
        By how many gradients the cut is moved. With 0 the cut is added if the plan does
        not have it, and removed if it does.

    Returns
    -------
    tuple of int or None
        The exclusive end of each group after the change. A cut that is moved onto its
        neighbour is lost, so there is one group fewer. None if the plan has no such cut
        to be moved, or if the moved cut would not lie between two gradients.
    """
    # The last end is the end of the network, and is no cut between two groups.
    n = ends[-1]
    cuts = set(ends[:-1])
    if shift == 0:
        # The symmetric difference removes a cut that is there, and adds one that is not.
        added_or_removed = cuts ^ {cut}
        return (*sorted(added_or_removed), n)
    moved = cut + shift
    if cut not in cuts or not 0 < moved < n:
        return None
    # If another cut lies there already, the set has it once, and two groups are merged.
    return (*sorted(cuts - {cut} | {moved}), n)


def exact(workload: Workload, cost: MessageCost) -> FusionPlan:
    """Return the plan with the shortest iteration of all 2**(n-1) plans.

    Parameters
    ----------
    workload : Workload
        What one iteration computes, n gradients in ready order.
    cost : MessageCost
        The time of a message. It may have any form that is nowhere negative, also one
        with jumps, and may select the largest gradients first.

    Returns
    -------
    FusionPlan
        The plan. Its ``least_s`` is the proven minimum.

    Raises
    ------
    UserError
        If the cost is negative at some size, or if a plan with selection has more than
        MOST_SELECTED tensors.

    Notes
    -----
    This is a dynamic programme over prefixes. Let E[i] be the earliest time at which
    the first i gradients can have been communicated, with E[0] = 0. The last of their
    groups has the gradients j to i - 1, counted from 0, for some j < i. The j gradients
    before have been communicated at E[j]. Hence

        E[i] = min over j < i of  max(E[j], ready[i-1]) + cost(bytes of j to i-1).

    An earlier E[j] never makes a later message end later, so it is enough to know the
    best plan of each prefix. This takes O(n**2) time and O(n) memory. If several plans
    are equally fast up to rounding, the plan with the smallest j is taken.

    If the cost selects gradients first, one number for each prefix is not enough. Each
    prefix then has a Pareto front (`ddlkit.core.fronts`).

    Examples
    --------
    >>> from ddlkit.core.cost import AlphaBeta
    >>> workload = Workload.from_arrays(3.0, [2.0, 2.0, 2.0], n_bytes=[100, 100, 100])
    >>> plan = exact(workload, AlphaBeta(alpha_s=1.5, beta_s_per_byte=0.02))
    >>> plan.ends, plan.least_s
    ((1, 3), 14.5)
    """
    if cost.selects:
        return _exact_with_selection(workload, cost)
    n = workload.n
    ready_s = workload.ready_s
    # E of the notes: the earliest end of each prefix, by its number of gradients.
    earliest_s = np.zeros(n + 1)
    # The first gradient of the last group in the best plan of each prefix.
    last_group_start = np.zeros(n + 1, dtype=int)
    for last, costs_by_first_s in enumerate(_costs_by_last_gradient(workload, cost)):
        end = last + 1
        # When the last group starts and arrives, for each possible first gradient of it.
        start_s = np.maximum(earliest_s[:end], ready_s[last])
        arrived_s = start_s + costs_by_first_s
        least_s = arrived_s.min()
        earliest_s[end] = least_s
        # Processors sum in different orders, so times that ought to be equal may differ
        # in the last digit. With the margin ROUNDING they count as equal on every
        # processor, and `argmax` takes the first of them.
        ties = arrived_s <= least_s * (1 + ROUNDING)
        last_group_start[end] = np.argmax(ties)
    iteration_s = float(earliest_s[n]) + workload.update_s
    return FusionPlan("exact", _traced_ends(last_group_start), least_s=iteration_s)


def _traced_ends(last_group_start: Ints) -> tuple[int, ...]:
    """Return the exclusive ends of the groups of the best plan of all gradients.

    ``last_group_start``, shape (n + 1,), has for each prefix, by its number of gradients,
    the first gradient of the last group in the best plan of the prefix.
    """
    # Follow the groups from the last one back to the first, which begins with gradient 0.
    # A group ends where the next one begins.
    end = len(last_group_start) - 1
    ends = []
    while end > 0:
        ends.append(end)
        end = int(last_group_start[end])
    return tuple(reversed(ends))


def _costs_by_last_gradient(workload: Workload, cost: MessageCost) -> Iterator[Floats]:
    """Yield for each gradient the costs of all groups that end with this gradient.

    For gradient i, this is an array of shape (i + 1,) in seconds. Its element j is the
    cost of the group from gradient j to gradient i.
    """
    n = workload.n
    # The costs of all n**2 groups may not fit into memory. So about AT_ONCE costs are
    # computed at a time, those of all groups that end with one of a few last gradients.
    lasts_at_once = max(1, AT_ONCE // n)
    for begin in range(0, n, lasts_at_once):
        lasts = range(begin, min(begin + lasts_at_once, n))
        costs_s = _group_times_s(workload, cost, name="a message", lasts=lasts)
        for last, costs_by_first_s in zip(lasts, costs_s, strict=True):
            # A group cannot begin after its last gradient.
            yield costs_by_first_s[: last + 1]


def _exact_with_selection(workload: Workload, cost: MessageCost) -> FusionPlan:
    """Return the plan with the shortest iteration if gradients are sparsified.

    Only the largest elements of each group are sent. To select them takes compute time,
    which delays all later gradients.
    """
    n = workload.n
    # The search needs several arrays of n x n numbers.
    if n > MOST_SELECTED:
        raise UserError(
            f"plan exact of {n} tensors that are selected: at most {MOST_SELECTED}: "
            "merge the tensors of a layer, or use another planner"
        )
    lasts = range(n)
    # Each array has a row for each last gradient of a group, and a column for each first
    # one. When a group is ready depends on its last gradient only. Both `cost` and its
    # `selection_s` are functions that return the seconds of messages of some sizes.
    groups = Groups(
        ready_s=np.broadcast_to(workload.ready_s[:, None], (n, n)),
        selecting_s=_group_times_s(
            workload, cost.selection_s, name="the selection", lasts=lasts
        ),
        sending_s=_group_times_s(workload, cost, name="a message", lasts=lasts),
    )
    ends, communicated_s = shortest(groups)
    # The search ends with the last message, after which the update follows.
    return FusionPlan("exact", ends, communicated_s + workload.update_s)


def _group_times_s(
    workload: Workload, seconds: Callable[[Floats], Any], name: str, lasts: range
) -> Floats:
    """Return the time of every group whose last gradient is one of ``lasts``.

    Parameters
    ----------
    workload : Workload
        What one iteration computes, n gradients in ready order.
    seconds : callable
        Returns the time of groups in seconds, from their sizes in bytes.
    name : str
        What takes this time, as errors name it.
    lasts : range
        The last gradients of the groups.

    Returns
    -------
    ndarray, shape (len(lasts), n)
        Times in seconds, with a row for each last gradient and a column for each first
        one. A time is 0 where the first gradient comes after the last one.

    Raises
    ------
    UserError
        If a time is negative.
    """
    # The bytes of all gradients before each gradient, and last the bytes of all.
    bytes_before = np.concatenate([[0.0], np.cumsum(workload.bytes)])
    # One row for each last gradient, and one column for each first one.
    last = np.array(lasts)[:, None]
    first = np.arange(workload.n)
    sizes = bytes_before[last + 1] - bytes_before[first]
    is_group = first <= last
    times_s = np.zeros(sizes.shape)
    times_s[is_group] = seconds(sizes[is_group])
    if not np.all(times_s >= 0):
        row_and_column = np.unravel_index(np.argmin(times_s), times_s.shape)
        raise NegativeCostError(name, sizes[row_and_column])
    return times_s


# -- the register ------------------------------------------------------------------

MakePlan = Callable[[Workload, "MessageCost | None", str], FusionPlan]
"""A function that returns a plan.

Its arguments are a workload, a cost or None, and the text after the colon.
"""


@dataclass(frozen=True)
class Planner:
    """An entry of the register of planners.

    Attributes
    ----------
    name : str
        The part of a plan's name before the colon, such as "buffer" in "buffer:25MB".
    make : callable
        Makes a plan from a workload, a cost or None, and the text after the colon.
    variants : tuple of str
        All texts that may stand after the colon, if ``make`` does not read the text
        itself.
    examples : tuple of str
        Names of plans, by default the name alone and with each variant. If ``make``
        reads the text after the colon, one example has a colon.
    read : callable, optional
        Reads the text after the colon, as ``make`` does, and raises UserError if it is
        wrong. So a plan can be checked before there is a workload.
    """

    name: str
    make: MakePlan
    variants: tuple[str, ...] = ()
    examples: tuple[str, ...] = ()
    read: Callable[[str], object] | None = None

    def __post_init__(self) -> None:
        if not self.examples:
            with_variants = [f"{self.name}:{variant}" for variant in self.variants]
            # A frozen dataclass lets its fields be set only in this way.
            object.__setattr__(self, "examples", (self.name, *with_variants))

    def takes(self, text: str) -> bool:
        """Return whether the text may stand after the colon of a plan's name.

        The empty text stands for a name without a colon.
        """
        if not text or text in self.variants:
            return True
        if self.variants:
            return False
        # Without variants, an example with a colon shows that ``make`` reads the text
        # itself. Then ``make`` also refuses what it cannot read.
        return any(":" in example for example in self.examples)


PLANNERS: dict[str, Planner] = {}
"""Every planner that is registered, by its name."""


def planner(
    name: str,
    *,
    variants: tuple[str, ...] = (),
    examples: tuple[str, ...] = (),
    read: Callable[[str], object] | None = None,
) -> Callable[[MakePlan], MakePlan]:
    """Register the decorated function as a planner.

    Parameters
    ----------
    name : str
        The part of a plan's name before the colon, such as "buffer" in "buffer:25MB".
    variants : tuple of str, optional
        All texts that may stand after the colon, such as "repaired" in
        "adafusion:repaired". Without variants, the function reads the text itself if an
        example has a colon, and otherwise no text may follow the name.
    examples : tuple of str, optional
        Names of plans, by default the name alone and with each variant.
    read : callable, optional
        Reads the text after the colon, and raises UserError if it is wrong.

    Returns
    -------
    callable
        A decorator that returns the function unchanged.
    """

    def register(make: MakePlan) -> MakePlan:
        """Enter the decorated function, and return the function itself."""
        PLANNERS[name] = Planner(name, make, variants, examples, read)
        return make

    return register


def needed_cost(cost: MessageCost | None, planner: str) -> MessageCost:
    """Return the cost that a planner needs.

    ``cost`` is returned as it is. Raises UserError if it is None. The error names the
    planner ``planner``.
    """
    if cost is None:
        raise UserError(
            f"planner {planner!r} needs a message cost: give --cost, or in Python the "
            "argument cost"
        )
    return cost


def refuse_unknown_plan(name: str, *further: str) -> None:
    """Raise UserError if no planner has the given name.

    Parameters
    ----------
    name : str
        The name of a plan, without a colon and what follows it.
    *further : str
        Names of plans that the caller makes without a planner. The error offers them, too.
        The caller has made sure that ``name`` is none of them.

    Raises
    ------
    UserError
        If no planner has the name.
    """
    if name in PLANNERS:
        return
    # Each planner is shown by its first example, because some need a text after the colon.
    examples = [known.examples[0] for known in PLANNERS.values()]
    # "buffer=25MB" has an equals sign where a colon is needed.
    word, equals, _ = name.lower().partition("=")
    similar = difflib.get_close_matches(word, [*PLANNERS, *further], n=1)
    listed = ", ".join([*examples, *further])
    advice = f"use a name such as {listed} (docs/GLOSSARY.md explains the names)"
    if similar:
        example = _example_of_plan(similar[0], with_text=bool(equals))
        # The text of an example is hardly the one that the user wants.
        meant = f"a plan such as {example}" if ":" in example else example
        advice = f"did you mean {meant}? Otherwise {advice}"
    raise UserError(f"plan {shown(name)}: unknown: {advice}")


def _example_of_plan(name: str, *, with_text: bool) -> str:
    """Return a plan of a planner as a user can write it, with a text after a colon if possible.

    A name without a planner, and one whose examples have no such text, is returned as it is.
    """
    if name not in PLANNERS:
        return name
    examples = PLANNERS[name].examples
    with_colon = [example for example in examples if ":" in example]
    if with_text and with_colon:
        return with_colon[0]
    return examples[0]


def check_text_of_plan(spec: str) -> None:
    """Raise UserError if a plan has an unknown name, or a text that its planner cannot read.

    Whether the plan fits a workload, such as one with fewer gradients than the text says, is
    found only when the plan is made.

    Parameters
    ----------
    spec : str
        The name of a plan, for some of them with a text after a colon.
    """
    name, _, text = spec.partition(":")
    refuse_unknown_plan(name)
    chosen_planner = PLANNERS[name]
    if not chosen_planner.takes(text):
        usable = " or ".join(chosen_planner.examples)
        raise UserError(f"plan {shown(spec)}: write {usable}")
    if chosen_planner.read:
        chosen_planner.read(text)


def make_plan(
    spec: str, workload: Workload, cost: MessageCost | None = None
) -> FusionPlan:
    """Return the plan with a given name.

    Parameters
    ----------
    spec : str
        The name of a planner, for some of them with a text after a colon: "none",
        "buffer:64MB:5ms", "cuts:3,40".
    workload : Workload
        What one iteration computes.
    cost : MessageCost, optional
        The time of a message, which some planners need.

    Returns
    -------
    FusionPlan
        The plan. Its `planner` may spell the name in another way, as "ddp:1048576B" for
        "ddp:1MiB".

    Raises
    ------
    UserError
        If no planner has this name, if the planner does not take the text, or if it
        needs a cost.

    Examples
    --------
    >>> workload = Workload.from_arrays(0.0, [1.0, 1.0, 1.0], n_bytes=[100, 100, 100])
    >>> make_plan("none", workload).ends, make_plan("cuts:2", workload).ends
    ((1, 2, 3), (2, 3))
    """
    check_text_of_plan(spec)
    name, _, text = spec.partition(":")
    return PLANNERS[name].make(workload, cost, text)


def _read_buffer(text: str) -> tuple[int, float]:
    """Return the bytes and the timeout in seconds of a buffer, from a text such as "64MB:5ms".

    The timeout may be missing, and is infinite then. Raises UserError for a wrong text.
    """
    size, _, timeout = text.partition(":")
    if not size:
        raise UserError("plan 'buffer': give the size of the buffer, as in buffer:25MB")
    # Whoever writes buffer:25 means megabytes. A buffer of so few bytes would send
    # every gradient alone.
    if units.is_small_number(size):
        raise UserError(
            f"plan {shown(f'buffer:{text}')}: a buffer of {size} bytes: write "
            f"buffer:{size}MB, or buffer:{size}B if bytes are meant"
        )
    capacity_bytes = units.parse_bytes(size)
    timeout_s = units.parse_seconds(timeout) if timeout else math.inf
    _refuse_wrong_buffer(capacity_bytes, timeout_s)
    return capacity_bytes, timeout_s


@planner("buffer", examples=("buffer:25MB", "buffer:64MB:5ms"), read=_read_buffer)
def _buffer(workload: Workload, cost: MessageCost | None, text: str) -> FusionPlan:
    """Return the plan of a buffer, whose size and timeout are in ``text``: "64MB:5ms".

    No ``cost`` is needed.
    """
    capacity_bytes, timeout_s = _read_buffer(text)
    return buffer(
        workload,
        capacity_bytes=capacity_bytes,
        name=f"buffer:{text}",
        timeout_s=timeout_s,
    )


def _read_cuts(text: str) -> list[int]:
    """Return the numbers of tensors after which groups end, from a text such as "3,40".

    Raises UserError for another text.
    """
    # More than nine digits are certainly too many tensors, and `int` refuses thousands
    # of digits. Numbers may be separated by commas, by semicolons as in tables, where they
    # separate the ends of messages, and by colons as in the plan "random:7:12".
    if not re.fullmatch("[0-9]{1,9}([,;:][0-9]{1,9})*", text):
        raise UserError(
            f"plan {shown(f'cuts:{text}')}: write the whole numbers of the gradients "
            "after which messages end, as in cuts:3,40"
        )
    ends = [int(number) for number in re.split("[,;:]", text)]
    if ends[0] < 1 or any(end >= later for end, later in pairwise(ends)):
        raise UserError(
            f"plan {shown(f'cuts:{text}')}: the numbers must be in increasing order, from 1 on"
        )
    return ends


@planner("cuts", examples=("cuts:3,40",), read=_read_cuts)
def _cuts(workload: Workload, cost: MessageCost | None, text: str) -> FusionPlan:
    """Return the plan whose groups end after given numbers of tensors.

    ``text`` lists these numbers, as in "3,40". No ``cost`` is needed.
    """
    ends = _read_cuts(text)
    if ends[-1] > workload.n:
        raise UserError(
            f"plan {shown(f'cuts:{text}')}: {ends[-1]} is too large, because there are only "
            f"{workload.n} gradients: use numbers from 1 to {workload.n}"
        )
    # The last group ends with the last tensor, which the user need not write.
    if ends[-1] != workload.n:
        ends.append(workload.n)
    return FusionPlan(f"cuts:{text}", tuple(ends))


def _read_random(text: str) -> tuple[int, int]:
    """Return the seed and the number of messages of a random plan, from a text such as "7:12".

    Raises UserError for another text.
    """
    # At most nine digits each, because `int` refuses thousands of them. As in the plan
    # `cuts`, a comma or a semicolon separates numbers as well as a colon.
    numbers = re.fullmatch("([0-9]{1,9})[,;:]([0-9]{1,9})", text)
    # There is at least one message.
    if not numbers or int(numbers[2]) < 1:
        # Without a text, the name that the user wrote may have no colon.
        written = f"random:{text}".rstrip(":")
        raise UserError(
            f"plan {shown(written)}: write random:SEED:MESSAGES with a whole number from 0 and "
            "one from 1, as in random:7:12"
        )
    return int(numbers[1]), int(numbers[2])


@planner("random", examples=("random:7:12",), read=_read_random)
def _random(workload: Workload, cost: MessageCost | None, text: str) -> FusionPlan:
    """Return a plan drawn at random, to test a model on plans that nobody chooses.

    ``text`` has the seed and the number of messages, as in "7:12". No ``cost`` is needed.
    """
    seed, n_groups = _read_random(text)
    if n_groups > workload.n:
        raise UserError(
            f"plan {shown(f'random:{text}')}: the layer profile has {workload.n} gradients, "
            f"so the number of messages must be from 1 to {workload.n}"
        )
    rng = np.random.default_rng(seed)
    # Between G groups there are G - 1 cuts.
    possible_cuts = np.arange(1, workload.n)
    cuts = rng.choice(possible_cuts, n_groups - 1, replace=False)
    ends = (*sorted(cuts.tolist()), workload.n)
    return FusionPlan(f"random:{seed}:{n_groups}", ends)


@planner("none")
def _none(workload: Workload, cost: MessageCost | None, text: str) -> FusionPlan:
    """Return the plan `none`, which needs neither a cost nor a text."""
    return none(workload)


@planner("single")
def _single(workload: Workload, cost: MessageCost | None, text: str) -> FusionPlan:
    """Return the plan `single`, which needs neither a cost nor a text."""
    return single(workload)


def _read_ddp(text: str) -> int | None:
    """Return the bytes of the cap of a bucket, None for PyTorch's caps, from a text such as "25MiB".

    Raises UserError for a wrong text.
    """
    if not text:
        return None
    # Whoever writes ddp:25 means mebibytes, the unit of DDP's bucket_cap_mb.
    if units.is_small_number(text):
        raise UserError(
            f"plan {shown(f'ddp:{text}')}: a bucket of {text} bytes: write ddp:{text}MiB, "
            f"or ddp:{text}B if bytes are meant"
        )
    return units.parse_bytes(text)


@planner("ddp", examples=("ddp", "ddp:25MiB"), read=_read_ddp)
def _ddp(workload: Workload, cost: MessageCost | None, text: str) -> FusionPlan:
    """Return the plan `ddp`. ``text`` is the cap of a bucket, "" for PyTorch's caps."""
    cap_bytes = _read_ddp(text)
    if cap_bytes is None:
        return ddp(workload)
    return ddp(workload, cap_bytes=cap_bytes)


@planner("exact")
def _exact(workload: Workload, cost: MessageCost | None, text: str) -> FusionPlan:
    """Return the plan `exact`, which needs a cost and no text."""
    return exact(workload, needed_cost(cost, "exact"))


# -- planners by a rule ------------------------------------------------------------

JoinRule = Callable[[int, float, float], bool]
"""A rule that says whether the next gradient joins the group.

Its arguments are the index of the gradient, the bytes of the group so far, and the time
in seconds at which the message of that group could start.
"""


def merged(
    name: str, workload: Workload, cost: MessageCost, joins: JoinRule
) -> FusionPlan:
    """Return the plan of a rule by which each gradient joins the group or does not.

    Parameters
    ----------
    name : str
        The name of the planner.
    workload : Workload
        What one iteration computes, in ready order.
    cost : MessageCost
        The time of a message. A message can start when the message before it has ended.
    joins : JoinRule
        Says whether a gradient joins the group before it. Its arguments are the index
        of the gradient, the bytes of the group, and when the group's message could
        start.

    Returns
    -------
    FusionPlan
        The messages of these groups.
    """
    sizes = workload.bytes.tolist()
    ready_s = workload.ready_s.tolist()
    ends: list[int] = []
    link_free_s = 0.0
    group_bytes = float(sizes[0])
    for tensor in range(1, workload.n):
        # The group so far ends with the gradient before this one, so its message could
        # start when that gradient is ready and the message before it has ended.
        start_s = max(link_free_s, ready_s[tensor - 1])
        if joins(tensor, group_bytes, start_s):
            group_bytes += sizes[tensor]
        else:
            # The group is complete, and this gradient begins the next one.
            ends.append(tensor)
            link_free_s = start_s + cost(group_bytes)
            group_bytes = float(sizes[tensor])
    return FusionPlan(name, (*ends, workload.n))


def fusing_pays(
    update: Callable[[float], float], buffered: float, size: float, waited_s: float
) -> bool:
    """Return whether a layer joins the fusion buffer, by Eq 17 of "osf" (Liu et al. 2022).

    Parameters
    ----------
    update : callable
        The time of a message in seconds by its size in bytes. It is t_update in the paper,
        which calls the exchange of gradients an update of gradients.
    buffered : float
        The bytes in the buffer, B^(i+1) in the paper.
    size : float
        The bytes of layer i, D^(i) in the paper.
    waited_s : float
        The seconds for which the buffer waits for layer i. The paper has t_wait^(i).

    Returns
    -------
    bool
        Whether ``update(buffered + size) + waited_s < update(buffered) +
        update(size)``.

    Notes
    -----
    We take t_wait^(i) for a misprint of t_wait^(i+1). Backward goes from the last layer to
    the first, so the buffer B^(i+1) holds layers down to i+1. It is this buffer that waits,
    and it waits for the backward pass of layer i.
    """
    return update(buffered + size) + waited_s < update(buffered) + update(size)


@planner("adafusion", variants=("repaired",))
def adafusion(workload: Workload, cost: MessageCost | None, variant: str) -> FusionPlan:
    """Return the plan of adaFusion, the planner of the paper "osf" (Liu et al. 2022).

    AdaFusion collects gradients in a buffer, which is sent as one message. By osf Eq 17, a
    gradient joins the buffer if one message of both, and the wait of the buffer for the
    gradient, take less time than a message of each.

    Parameters
    ----------
    workload : Workload
        What one iteration computes, in ready order.
    cost : MessageCost
        The time of a message. Raises UserError if it is None.
    variant : {"", "repaired"}
        With "" the wait is zero, because buffers here have neither a size limit nor a
        timeout, and by the printed equation such a buffer does not wait. With "repaired" the
        buffer waits for the backward pass of the next gradient.

    Returns
    -------
    FusionPlan
        The fused messages.
    """
    message_cost = needed_cost(cost, "adafusion")
    sizes = workload.bytes.astype(float).tolist()
    backward_s = workload.backward_s.tolist()

    def joins(tensor: int, group_bytes: float, start_s: float) -> bool:
        """Return whether a gradient joins the buffer, which holds ``group_bytes``.

        ``start_s``, when the buffer could be sent, plays no part in osf Eq 17.
        """
        waited_s = backward_s[tensor] if variant == "repaired" else 0.0
        return fusing_pays(message_cost, group_bytes, sizes[tensor], waited_s)

    name = f"adafusion:{variant}" if variant else "adafusion"
    # `merged` asks ``joins`` for each gradient in turn.
    return merged(name, workload, message_cost, joins)


@planner("mg_wfbp", variants=("osf",))
def mg_wfbp(workload: Workload, cost: MessageCost | None, variant: str) -> FusionPlan:
    """Return the plan of MG-WFBP, which merges a gradient if that saves time.

    Parameters
    ----------
    workload : Workload
        What one iteration computes, in ready order.
    cost : MessageCost
        The time of a message. Raises UserError if it is None.
    variant : {"", "osf"}
        With "" the rule is the one that the authors of MG-WFBP published. With "osf" it
        is the rule that the paper "osf" (Liu et al. 2022) describes in Section 4.2.

    Returns
    -------
    FusionPlan
        The merged messages.

    Notes
    -----
    In both rules, a is the time that merging saves. For a group of g bytes and a gradient
    of s bytes it is cost(g) + cost(s) - cost(g + s). If the cost is a straight line, this
    is its start-up time.

    By the published rule, a gradient joins if ready - tau_c < a. Here tau_c is the earliest
    start of the group's message, so that the group waits for less time than merging saves.
    By the rule that osf describes, a gradient joins if its backward is shorter than the
    group's message plus a.
    """
    message_cost = needed_cost(cost, "mg_wfbp")
    ready_s = workload.ready_s.tolist()
    sizes = workload.bytes.astype(float).tolist()
    backward_s = workload.backward_s.tolist()

    def joins_as_published(tensor: int, group_bytes: float, start_s: float) -> bool:
        """Return whether ready - tau_c < a, where tau_c is ``start_s``."""
        # `fusing_pays` says whether cost(g + s) + waited < cost(g) + cost(s), which is the
        # same as waited < a.
        waited_s = ready_s[tensor] - start_s
        return fusing_pays(message_cost, group_bytes, sizes[tensor], waited_s)

    def joins_as_described(tensor: int, group_bytes: float, start_s: float) -> bool:
        """Return whether the gradient's backward is shorter than the message plus a."""
        size = sizes[tensor]
        message_s = message_cost(group_bytes)
        # This is a, the time that merging saves.
        saved_s = message_s + message_cost(size) - message_cost(group_bytes + size)
        return bool(backward_s[tensor] < message_s + saved_s)

    if variant == "osf":
        return merged("mg_wfbp:osf", workload, message_cost, joins_as_described)
    return merged("mg_wfbp", workload, message_cost, joins_as_published)
