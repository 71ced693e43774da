"""Messages that may use more or fewer resources of a device: which to give to each of them.

A message that gets more of a device, such as more thread blocks of a GPU, is often sent
sooner, and slows down more the compute that goes on at the same time. Hidden messages
can afford to be slow. The last message cannot.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ddlkit.core.cost import MessageCost
from ddlkit.core.fronts import undominated
from ddlkit.core.link import Link, Parts, overlapped_s
from ddlkit.core.plan import FusionPlan
from ddlkit.core.workload import Floats, Ints, Workload

MOST_STATES = 1000
"""How many states of a prefix `jointly` keeps, spread evenly.

There can be more states than memory holds.
"""


@dataclass(frozen=True, eq=False)
class Resources:
    """One way in which a message can be sent.

    Attributes
    ----------
    name : str
        What the resources are called.
    cost : MessageCost
        The time of a message with these resources while nothing is computed.
    slowdown : float
        How much longer compute takes while such a message is under way: 0.1 is a tenth
        longer.
    message_slowdown : float
        How much longer such a message takes while something is computed.
    """

    name: str
    cost: MessageCost
    slowdown: float = 0.0
    message_slowdown: float = 0.0


@dataclass(frozen=True, eq=False)
class Shared:
    """An iteration whose messages share a device with compute.

    Each message has its own choice of how much of the device it may use.

    Attributes
    ----------
    workload : Workload
        What one iteration computes.
    plan : FusionPlan
        Which gradients share a message. The plan has G groups.
    resources : tuple of Resources, length G
        The resources of each message.
    """

    workload: Workload
    plan: FusionPlan
    resources: tuple[Resources, ...]

    @property
    def iteration_s(self) -> float:
        """Return seconds from the start of forward to the end of the update."""
        # One value for each message: how much longer compute takes while the message is
        # under way, and how much longer the message takes while something is computed.
        slowdowns = [resources.slowdown for resources in self.resources]
        message_slowdowns = [resources.message_slowdown for resources in self.resources]
        link = Link(
            slowdown=np.array(slowdowns), message_slowdown=np.array(message_slowdowns)
        )
        # The resources of a message decide its cost. So each message has another cost,
        # which the link divides into processor time (software) and link time (wire).
        sizes = self.plan.group_bytes(self.workload).tolist()
        software_s = []
        wire_s = []
        for resources, n_bytes in zip(self.resources, sizes, strict=True):
            parts_of_message = link.parts(resources.cost, n_bytes)
            software_s.append(parts_of_message.software_s)
            wire_s.append(parts_of_message.wire_s)
        parts = Parts(np.array(software_s, float), np.array(wire_s, float))
        # The parts are times of a message alone. `play` adds the slowdowns.
        _, ends_s = link.play(self.plan.group_ready_s(self.workload), parts)
        return float(ends_s.max()) + self.workload.update_s


class _States(NamedTuple):
    """The states in which an iteration can be after all messages of a prefix.

    A prefix consists of the gradients that are ready first.

    Attributes
    ----------
    end_s : ndarray, shape (m,)
        When the last message has arrived, in seconds of the clock.
    work_s : ndarray, shape (m,)
        How much has been computed by then, in seconds of undisturbed compute.
    first : ndarray, shape (m,)
        The first gradient of the last message.
    state : ndarray, shape (m,)
        The index of the state before the last message, among the states of the prefix
        that ends before ``first``.
    choice : ndarray, shape (m,)
        The index of the resources that the last message has.
    """

    end_s: Floats
    work_s: Floats
    first: Ints
    state: Ints
    choice: Ints


_UNUSED = np.zeros(1, np.int64)
_NOTHING_SENT = _States(
    end_s=np.zeros(1), work_s=np.zeros(1), first=_UNUSED, state=_UNUSED, choice=_UNUSED
)
"""The only state of the empty prefix: no time has passed, and nothing is computed.

There is no last message. What describes it is never read, because `_traced_back` stops at
the empty prefix.
"""


def jointly(
    workload: Workload, choices: Sequence[Resources], plan: FusionPlan | None = None
) -> Shared:
    """Return the shortest iteration if each message may choose among several resources.

    Parameters
    ----------
    workload : Workload
        What one iteration computes, n tensors in the order in which their gradients
        become ready.
    choices : sequence of Resources
        The resources among which each message may choose.
    plan : FusionPlan, optional
        Which gradients share a message. By default all plans are tried, too.

    Returns
    -------
    Shared
        The plan, and the resources of each of its messages.

    Notes
    -----
    This is a dynamic programme over prefixes: the gradients that are ready first. Compute
    is slowed down while a message is under way, by as much as the resources of the message
    say. So the messages of a prefix influence the rest of the iteration by two numbers only:
    when the last of them has arrived, and how much has been computed by then. The states on
    the Pareto front of these two are kept, but at most ``MOST_STATES`` for each prefix. The
    result is therefore proven shortest only if no front was larger.
    """
    n = workload.n
    # After how much compute each gradient is ready, in seconds of undisturbed compute.
    ready_s = workload.ready_s
    bytes_before = np.concatenate([[0], np.cumsum(workload.bytes)])
    # Without a plan, a message may end after any gradient.
    ends = plan.ends_in_ready_order if plan is not None else tuple(range(1, n + 1))
    # The states of each prefix, by its number of gradients.
    states = {0: _NOTHING_SENT}
    previous_end = 0
    for end in ends:
        # The first gradients that the last message may have. With a given plan this message
        # begins where the one before it ends. Without a plan it may begin after any prefix.
        firsts = [previous_end] if plan is not None else list(range(end))
        previous_end = end
        sizes = bytes_before[end] - bytes_before[firsts]
        # A row for each choice of resources, and a column for each first gradient.
        costs_s = np.stack(
            [np.asarray(resources.cost(sizes), float) for resources in choices]
        )
        reached = _with_one_more_message(
            before={first: states[first] for first in firsts},
            ready_s=ready_s[end - 1],
            # Compute ends with the last gradient. Messages slow it down only until then.
            last_ready_s=ready_s[-1],
            costs_s=costs_s,
            choices=choices,
        )
        states[end] = _best_states(reached)

    # The best state of all gradients is the one whose last message arrives first.
    best_state = int(np.argmin(states[n].end_s))
    best_ends, choice_of_message = _traced_back(states, n, best_state)
    if plan is None:
        plan = FusionPlan("jointly", tuple(best_ends))
    return Shared(workload, plan, tuple(choices[index] for index in choice_of_message))


def _best_states(reached: _States) -> _States:
    """Return at most MOST_STATES of the states that no other state of ``reached`` beats."""
    # An early end and much computed work are good, and `undominated` takes smaller
    # values to be better, hence the sign.
    front = undominated(reached.end_s, -reached.work_s)
    # If there are too many, keep some of them, evenly spaced from the first to the last.
    spaced = np.linspace(0, len(front) - 1, min(MOST_STATES, len(front)))
    kept = front[spaced.astype(int)]
    return _States._make(values[kept] for values in reached)


def _traced_back(
    states: Mapping[int, _States], end: int, state: int
) -> tuple[list[int], list[int]]:
    """Return the messages that lead to a state.

    Parameters
    ----------
    states : mapping of int to _States
        The states of each prefix, by its number of gradients.
    end, state : int
        The number of gradients of a prefix, and the index of one of its states.

    Returns
    -------
    ends, choices : list of int
        The exclusive end of each message, and the index of the resources that the
        message has, both in the order of sending.
    """
    ends = []
    choices = []
    # From the last message back to the first, until the empty prefix is reached. Each state
    # has the resources of its last message (``choice``), and the state before this message:
    # number ``state`` of the prefix of ``first`` gradients.
    while end:
        states_of_prefix = states[end]
        ends.append(end)
        choices.append(int(states_of_prefix.choice[state]))
        end = int(states_of_prefix.first[state])
        state = int(states_of_prefix.state[state])
    return ends[::-1], choices[::-1]


def _with_one_more_message(
    before: Mapping[int, _States],
    ready_s: float,
    last_ready_s: float,
    costs_s: Floats,
    choices: Sequence[Resources],
) -> _States:
    """Return all states to which one more message leads, with any choice of resources.

    A state says when the last message of a prefix has arrived, and how much has been
    computed by then. A prefix consists of the gradients that are ready first. The message
    begins with the gradient after a prefix.

    There are three kinds of seconds. ``ready_s``, ``last_ready_s``, ``compute_left_s``
    and all names with "work" are amounts of compute, in seconds of undisturbed compute.
    ``costs_s`` and ``alone_s`` are amounts of a message, in seconds of a message that
    compute does not slow down. All other names are seconds of the clock.

    Parameters
    ----------
    before : mapping of int to _States
        The states of each of the P prefixes after which the message may begin, by the
        number of gradients of the prefix, which is the index of the message's first one.
    ready_s : float
        The amount of compute after which the last gradient of the message is ready.
    last_ready_s : float
        The amount of compute after which the last of all gradients is ready.
    costs_s : ndarray, shape (C, P)
        The time of the message alone, by resources and prefix.
    choices : sequence of Resources, length C
        The resources that the message may have.

    Returns
    -------
    _States
        C states for each state of ``before``, one for each of the choices.
    """
    # The states of all prefixes, one prefix after the other. ``counts`` is how many states
    # each prefix has.
    counts = [len(states.end_s) for states in before.values()]
    end_s = np.concatenate([states.end_s for states in before.values()])
    work_before_s = np.concatenate([states.work_s for states in before.values()])
    # The column of ``costs_s`` for each state: that of its prefix.
    column_of_state = np.arange(len(before)).repeat(counts)

    # By how much compute lags behind the clock when the message before ends. If something is
    # left to compute, this is the time by which earlier messages have delayed compute. If
    # nothing is left, ready_s + lag_s is at most end_s, so the message starts at end_s.
    lag_s = end_s - work_before_s
    # The message starts when the one before it has ended and its last gradient is ready.
    start_s = np.maximum(end_s, ready_s + lag_s)
    # Between the two messages nothing slows compute down, so the lag stays as it is. The work
    # at the start is therefore start_s - lag_s, the larger one of work_before_s and ready_s.
    # It can exceed all compute, last_ready_s, only by a rounding error. Hence the minimum.
    work_at_start_s = np.minimum(start_s - lag_s, last_ready_s)

    # From here on there is one row for each choice of resources, and one column for
    # each state of ``before``. The slowdowns have the shape (C, 1).
    slowdown = np.array([[resources.slowdown] for resources in choices])
    message_slowdown = np.array([[resources.message_slowdown] for resources in choices])
    alone_s = costs_s[:, column_of_state]
    compute_left_s = last_ready_s - work_at_start_s
    took_s = overlapped_s(alone_s, compute_left_s, slowdown, message_slowdown)
    # The first gradient of the message after each prefix.
    first_gradients = list(before)
    reached = _States(
        end_s=start_s + took_s,
        work_s=_work_at_end_s(work_at_start_s, last_ready_s, took_s, slowdown),
        first=np.repeat(first_gradients, counts),
        # The index of each state among those of its prefix.
        state=np.concatenate([np.arange(count) for count in counts]),
        choice=np.arange(len(choices))[:, None],
    )
    # Each array is broadcast to one entry for each choice and state, and flattened.
    return _States._make(
        np.broadcast_to(values, took_s.shape).ravel() for values in reached
    )


def _work_at_end_s(
    work_at_start_s: Floats, all_work_s: float, took_s: Floats, slowdown: Floats
) -> Floats:
    """Return how much has been computed when a message ends.

    Amounts of compute are in seconds of undisturbed compute. ``work_at_start_s``, shape
    (m,), is the amount when the message starts in each of m states, and ``all_work_s`` is
    the amount when the last gradient is ready and nothing is left to compute. The message
    takes ``took_s`` seconds of the clock, shape (C, m), with each of C choices of
    resources. ``slowdown``, shape (C, 1), is how much longer compute takes meanwhile. The
    result has the shape (C, m).
    """
    # How long compute would go on after the start of the message if it stayed slowed down.
    until_computed_s = (all_work_s - work_at_start_s) * (1 + slowdown)
    # If the message outlasts compute, all work is done. If both end at once, the sum below
    # could miss this amount by a rounding error, so it is not used there either.
    return np.where(
        took_s >= until_computed_s,
        all_work_s,
        work_at_start_s + took_s / (1 + slowdown),
    )
