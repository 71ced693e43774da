"""One iteration of overlapped data-parallel training.

The gradients of an iteration are sent in groups, one message per group. A message
starts when the last gradient of its group is ready and the message before it has ended.
The update follows the last message. With ``communication[k]`` the time of message k,
this is the recursion of osf Eq 8 and 9, seen from one iteration instead of from one
layer:

    end[k] = max(end[k-1], ready[k]) + communication[k]

Unrolled, the last message ends at the maximum over k of

    ready[k] + communication[k] + ... + communication[last]

References
----------
osf : T. Liu et al., "Modeling and Optimizing the Scaling Performance in Distributed
    Deep Learning Training", WWW 2022.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ddlkit.core.cost import MessageCost, NegativeCostError
from ddlkit.core.errors import UserError
from ddlkit.core.link import Link, Parts
from ddlkit.core.plan import FusionPlan
from ddlkit.core.timeline import NO_GROUP, Timeline
from ddlkit.core.units import MOST
from ddlkit.core.workload import Floats, Ints, Workload

PLAIN = Link()
"""A link on which messages share nothing.

Each message takes what it costs, one after the other.
"""


@dataclass(frozen=True)
class Prediction:
    """What a model predicts for one iteration.

    Attributes
    ----------
    iteration_s : float
        Seconds from the start of forward to the end of the update.
    compute_s : float
        Seconds of forward, backward and update without any communication.
    communication_s : float
        The sum of the times of all messages, in seconds.

    Examples
    --------
    >>> step = Prediction(iteration_s=0.5, compute_s=0.4, communication_s=0.3)
    >>> round(step.exposed_communication_s, 3), round(step.scaling_factor, 3)
    (0.1, 0.8)
    """

    iteration_s: float
    compute_s: float
    communication_s: float

    @property
    def exposed_communication_s(self) -> float:
        """Return the part of the iteration in which nothing is computed, in seconds."""
        return self.iteration_s - self.compute_s

    @property
    def scaling_factor(self) -> float:
        """Return the weak-scaling efficiency (Eq 1 of "osf", Liu et al. 2022).

        This is the iteration of a single worker, divided by this iteration.
        """
        return self.compute_s / self.iteration_s


def group_ends(ready_s: Floats, communication_s: Floats) -> Floats:
    """Return when each message ends if the messages are sent one after the other.

    Parameters
    ----------
    ready_s : ndarray, shape (..., G)
        When each message may start, in seconds. Leading axes are scenarios.
    communication_s : ndarray, shape (..., G)
        The time of each message, in seconds.

    Returns
    -------
    ndarray, shape (..., G)
        The end of each message, in seconds.

    Notes
    -----
    A message starts when it is ready and the message before it has ended:

        end[k] = max(end[k-1], ready[k]) + communication[k].

    With S as the running sum of ``communication_s``, this recursion has the solution

        end[k] = S[k] + max over j <= k of (ready[j] - S[j-1]),

    which needs no loop over messages.

    Examples
    --------
    >>> group_ends(np.array([1.0, 2.0, 9.0]), np.array([3.0, 3.0, 3.0])).tolist()
    [4.0, 7.0, 12.0]
    """
    # S[k] and S[k-1] of the notes, for each message k.
    sums_s = np.cumsum(communication_s, axis=-1)
    sums_before_s = sums_s - communication_s
    # The running maximum is the maximum over all j <= k.
    return sums_s + np.maximum.accumulate(ready_s - sums_before_s, axis=-1)


@dataclass(frozen=True, eq=False)
class Iteration:
    """A workload whose gradients are sent in the groups of a plan over a link.

    Parameters
    ----------
    workload : Workload
        The n tensors of the network, in the order in which their gradients become
        ready.
    plan : FusionPlan
        Which gradients share a message. The plan has G groups.
    cost : MessageCost
        The time of a message of a given size.
    link : Link, optional
        What messages share beyond their cost. By default they share nothing.
    copy_s_per_byte : float, optional
        Seconds per byte to copy a gradient into its message when the gradient is ready,
        and as many to copy it out once the message has arrived. Messages are copied out
        one after the other. PyTorch's DistributedDataParallel copies in this way into
        its buckets and out of them.
    leave_s : ndarray, shape (G,), optional
        When each message may start, in seconds, if that is not when its last gradient
        is ready.
    bucket_s : float, optional
        Seconds of compute that each message takes whatever its size, when its last
        gradient is ready.

    Attributes
    ----------
    group_bytes : ndarray, shape (G,)
        The size of each message in bytes.

    Raises
    ------
    UserError
        If ``copy_s_per_byte`` or ``bucket_s`` is negative or too large to be a time.

    Examples
    --------
    Three layers, each with a backward of 2 s and a gradient of 100 bytes, and one
    message for each:

    >>> from ddlkit.core.cost import AlphaBeta
    >>> layers = Workload.from_arrays(forward_s=3, backward_s=[2, 2, 2], n_bytes=[100] * 3)
    >>> cost = AlphaBeta(alpha_s=0.5, beta_s_per_byte=0.02)
    >>> step = Iteration(layers, FusionPlan("none", (1, 2, 3)), cost)
    >>> step.ready_s.tolist(), step.prediction.iteration_s
    ([5.0, 7.0, 9.0], 12.5)
    """

    workload: Workload
    plan: FusionPlan
    cost: MessageCost
    link: Link = PLAIN
    copy_s_per_byte: float = 0.0
    leave_s: Floats | None = None
    bucket_s: float = 0.0
    group_bytes: Ints = field(init=False, repr=False)

    def __post_init__(self) -> None:
        durations = ((self.copy_s_per_byte, "a byte"), (self.bucket_s, "a bucket"))
        for duration_s, unit in durations:
            # NaN fails every comparison, and is refused, too.
            if not 0 <= duration_s <= MOST:
                raise UserError(f"copies of {duration_s} s {unit}: must be at least 0")
        # A frozen dataclass lets its fields be set only in this way.
        object.__setattr__(self, "group_bytes", self.plan.group_bytes(self.workload))

    @property
    def _packs(self) -> bool:
        """Return whether it takes compute to put gradients into their messages.

        This is the time to copy each byte, or the fixed time of each message, or both.
        """
        return bool(self.copy_s_per_byte or self.bucket_s)

    @cached_property
    def tensor_ready_s(self) -> Floats:
        """Return when each gradient is ready and in its message, in seconds, shape (n,)."""
        if not self._packs:
            return self.workload.ready_s
        # After the backward of each gradient, compute copies it into its message.
        packing_s = self.copy_s_per_byte * self.workload.bytes
        # The fixed time of a message follows the last gradient that the message needs. If a
        # plan keeps gradients of several types apart, several messages may wait for the same
        # gradient. Unlike +=, `np.add.at` then adds the time of each message.
        np.add.at(packing_s, self.plan.last_needed, self.bucket_s)
        return self.workload.forward_s + np.cumsum(self.workload.backward_s + packing_s)

    @cached_property
    def ready_s(self) -> Floats:
        """Return when each message has all that it waits for, in seconds, shape (G,)."""
        return self.tensor_ready_s[self.plan.last_needed]

    @cached_property
    def communication_s(self) -> Floats:
        """Return the cost of each message in seconds, shape (G,)."""
        return self._message_costs_s(self.cost)

    @cached_property
    def played_s(self) -> tuple[Floats, Floats]:
        """Return when each message starts and ends on the link, two arrays of shape (G,).

        All times are in seconds.
        """
        # When each message may start at the earliest: ``leave_s``, if it is given.
        may_start_s = self.ready_s if self.leave_s is None else self.leave_s
        if not self.link.plain:
            # Several messages may be under way at once, a message may be faster after a rest
            # of the link, or messages and compute may slow each other down. `Link.play` needs
            # the processor time and the link time of each message for this.
            parts = self.link.parts(self.cost, self.group_bytes)
            return self.link.play(may_start_s, parts)
        # On a plain link, messages follow one another, and each takes what it costs.
        ends_s = group_ends(may_start_s, self.communication_s)
        # The link is free for a message when the message before it has ended.
        link_free_s = np.append(0.0, ends_s[:-1])
        # A message starts when it may start and the link is free. The end less the cost would
        # be the same but for rounding, by which a start could come out before the message is
        # ready.
        starts_s = np.maximum(may_start_s, link_free_s)
        return starts_s, ends_s

    @cached_property
    def prediction(self) -> Prediction:
        """Return the times of the iteration. Copies count as exposed communication."""
        _, message_ends_s = self.played_s
        # The update starts when the last message has arrived and has been copied out.
        update_start_s = float(self._last_copied_out_s(message_ends_s))
        return Prediction(
            iteration_s=update_start_s + self.workload.update_s,
            # This is compute without copies, so the time of copies counts as exposed.
            compute_s=self.workload.compute_s,
            communication_s=float(self.communication_s.sum()),
        )

    def draws(
        self,
        costs: Sequence[MessageCost],
        message_factors: ArrayLike = 1.0,
        compute_factors: ArrayLike = 1.0,
        slowdowns: Floats | None = None,
    ) -> Floats:
        """Return the time of the iteration for each of B draws of what is uncertain.

        Each message may start when its last gradient is ready. Draws ignore ``leave_s``,
        because no caller that sets it asks for draws.

        Parameters
        ----------
        costs : sequence of MessageCost, length B
            Draws of the cost of a message.
        message_factors : array_like, shape (B, G), optional
            Factors on the time of each message in each draw.
        compute_factors : array_like, shape (B,), optional
            The factor on all compute times in each draw.
        slowdowns : ndarray, shape (2, B, G), optional
            Draws of the two slowdowns of the link: of compute by messages, and of
            messages by compute. By default ``link`` states both.

        Returns
        -------
        ndarray, shape (B,)
            Iterations in seconds. Without any draw the array is empty.
        """
        if not costs:
            return np.empty(0)
        compute_factors = np.asarray(compute_factors, dtype=float)
        message_factors = np.asarray(message_factors, dtype=float)
        # One row for each draw, and one column for each message. `group_ends` and
        # `Link.play` compute all rows at once. A single factor for all draws gives one
        # row, which is broadcast below.
        ready_s = self.ready_s * compute_factors[..., None]
        link = self.link
        if slowdowns is not None:
            of_compute, of_messages = slowdowns
            link = replace(link, slowdown=of_compute, message_slowdown=of_messages)
        if link.plain:
            # Messages follow one another, and each takes what it costs.
            costs_s = np.array([self._message_costs_s(cost) for cost in costs])
            ends_s = group_ends(ready_s, costs_s * message_factors)
        else:
            # Messages share the link or the processor with one another, or the device with
            # compute. `play` says how long they take then.
            parts = self._drawn_parts(link, costs)
            # The factor of a message applies to both of its parts.
            drawn_parts = Parts(
                parts.software_s * message_factors, parts.wire_s * message_factors
            )
            _, ends_s = link.play(ready_s, drawn_parts)
        update_s = self.workload.update_s * compute_factors
        return self._last_copied_out_s(ends_s) + update_s

    def _drawn_parts(self, link: Link, costs: Sequence[MessageCost]) -> Parts:
        """Return the processor time and the link time of each message by each of B costs.

        Both are in seconds, and have the shape (B, G).
        """
        parts_of_draw = [link.parts(cost, self.group_bytes) for cost in costs]
        return Parts(
            software_s=np.stack([parts.software_s for parts in parts_of_draw]),
            wire_s=np.stack([parts.wire_s for parts in parts_of_draw]),
        )

    def timeline(self) -> Timeline:
        """Return the iteration as spans of forward, backward, messages and update.

        There is a span for the backward of each tensor, and one for each message.
        """
        # The fields of a span are columns of a timeline.
        rows = [{"origin": "simulated", **span._asdict()} for span in self._spans()]
        return Timeline.from_rows(rows)

    def edges(self) -> list[tuple[str, str, float]]:
        """Return the iteration as a graph of tasks whose longest path is the iteration.

        Returns
        -------
        list of (str, str, float)
            Edges: a task, the task that follows it, and the duration of the first one
            in seconds. The backward of gradient i is the task "b{i}", and message k is
            the task "c{k}". The other tasks are "forward" and "update", and "start" and
            "end", which take no time.

        Raises
        ------
        UserError
            If the link is not plain (`Link.plain`), if gradients are copied into messages,
            or if messages start at times of their own. The graph cannot express that.
        """
        self.refuse_if_not_a_graph()
        workload = self.workload
        edges = [("start", "forward", 0.0), ("forward", "b0", workload.forward_s)]
        # Each backward follows the one before it.
        for i in range(workload.n - 1):
            edges.append((f"b{i}", f"b{i + 1}", float(workload.backward_s[i])))
        ends = self.plan.ends_in_ready_order
        last_group = len(ends) - 1
        # A message follows the backward of its last gradient and the message before it.
        # The update follows the last message.
        for group, end in enumerate(ends):
            last_tensor = end - 1
            following = "update" if group == last_group else f"c{group + 1}"
            backward_s = float(workload.backward_s[last_tensor])
            message_s = float(self.communication_s[group])
            edges.append((f"b{last_tensor}", f"c{group}", backward_s))
            edges.append((f"c{group}", following, message_s))
        edges.append(("update", "end", workload.update_s))
        return edges

    def _message_costs_s(self, cost: MessageCost) -> Floats:
        """Return the cost of each message in seconds, shape (G,).

        Raises UserError if the cost of a message is negative.
        """
        costs_s = np.asarray(cost(self.group_bytes))
        if not np.all(costs_s >= 0):
            n_bytes = self.group_bytes[np.argmin(costs_s)]
            raise NegativeCostError("a message", n_bytes)
        return costs_s

    def refuse_if_not_a_graph(self) -> None:
        """Raise an error if the iteration cannot be expressed as a graph of tasks.

        Raises
        ------
        UserError
            If the link is not plain: several messages may be under way at once, a message
            may be faster after a rest of the link, or messages and compute may slow each
            other down. It is also raised if ``copy_s_per_byte`` or ``bucket_s`` is above 0,
            or if ``leave_s`` is given.
        """
        # In the graph, each message starts when its last gradient is ready and the message
        # before it has ended, and takes what it costs. No task of the graph stands for the
        # compute of ``copy_s_per_byte`` and ``bucket_s``, which puts gradients into messages.
        has_own_starts = self.leave_s is not None
        if not self.link.plain or self._packs or has_own_starts:
            raise UserError(
                "graph of an iteration: one message after the other only, no copies"
            )

    def _last_copied_out_s(self, ends_s: Floats) -> Floats:
        """Return when the last message has been copied out of its bucket.

        Parameters
        ----------
        ends_s : ndarray, shape (..., G)
            When each message ends, in seconds. Leading axes are scenarios.

        Returns
        -------
        ndarray, shape (...)
            Seconds for each scenario. Without scenarios this is a scalar array.
        """
        if not self.copy_s_per_byte:
            return np.asarray(ends_s.max(axis=-1))
        # Every scenario has the same copies.
        copies_s = np.broadcast_to(
            self.copy_s_per_byte * self.group_bytes, ends_s.shape
        )
        # Copies follow one another as messages do: a copy starts when its message has
        # arrived and the copy before it has ended. So the last copy ends last.
        copy_ends_s = group_ends(ends_s, copies_s)
        return np.asarray(copy_ends_s[..., -1])

    def _spans(self) -> Iterator[_Span]:
        """Yield the spans of forward, of each backward, of each message and of the update.

        An update that takes no time has no span.
        """
        workload = self.workload
        yield _Span(
            task="forward",
            kind="forward",
            stream="compute",
            start_s=0.0,
            end_s=workload.forward_s,
        )
        yield from self._backward_spans()
        yield from self._message_spans()
        if workload.update_s:
            # The update starts when all messages have been copied out of their buckets.
            _, ends_s = self.played_s
            start_s = float(self._last_copied_out_s(ends_s))
            yield _Span(
                task="update",
                kind="update",
                stream="compute",
                start_s=start_s,
                end_s=start_s + workload.update_s,
            )

    def _backward_spans(self) -> Iterator[_Span]:
        """Yield the span of the backward of each tensor, in ready order."""
        workload = self.workload
        # ``members`` has the gradients of each group. Spans need the group of each gradient.
        group_of_gradient = np.empty(workload.n, int)
        for group, gradients in enumerate(self.plan.members):
            group_of_gradient[gradients] = group
        backward_ends_s = self._backward_ends_s()
        # The first backward follows forward.
        start_s = workload.forward_s
        for i, group in enumerate(group_of_gradient.tolist()):
            end_s = float(backward_ends_s[i])
            yield _Span(
                task=f"backward {workload.tensor[i]}",
                kind="backward",
                stream="compute",
                start_s=start_s,
                end_s=end_s,
                group=group,
                bytes=int(workload.bytes[i]),
            )
            # The next backward starts when this one ends.
            start_s = end_s

    def _backward_ends_s(self) -> Floats:
        """Return when the backward of each tensor ends, which includes its copy, shape (n,).

        The copy brings the gradient into its message. The times are in seconds from the
        start of forward.
        """
        # These would be the ends if no message slowed compute down.
        undisturbed_ends_s = self.tensor_ready_s
        if not self.link.slows:
            return undisturbed_ends_s
        message_starts_s, message_ends_s = self.played_s
        return self.link.computed_s(
            undisturbed_ends_s, message_starts_s, message_ends_s
        )

    def _message_spans(self) -> Iterator[_Span]:
        """Yield the span of each message, in the order of sending."""
        starts_s, ends_s = self.played_s
        kind = self.cost.collective
        for group, n_bytes in enumerate(self.group_bytes.tolist()):
            start_s = float(starts_s[group])
            yield _Span(
                task=f"{kind} {group}",
                kind=kind,
                stream="communication",
                start_s=start_s,
                # The ends in `played_s` come from `group_ends`, whose cumulative sums are
                # rounded. Without this maximum, a message that takes hardly any time could
                # end slightly before its start.
                end_s=max(start_s, float(ends_s[group])),
                group=group,
                bytes=n_bytes,
            )


class _Span(NamedTuple):
    """A span of an iteration, by the columns of a `Timeline`."""

    task: str
    kind: str
    stream: str
    start_s: float
    end_s: float
    group: int = NO_GROUP
    bytes: int = 0


def predict(
    workload: Workload, plan: FusionPlan, cost: MessageCost, link: Link = PLAIN
) -> Prediction:
    """Return the predicted times of one iteration.

    Parameters
    ----------
    workload : Workload
        What one iteration computes, tensor by tensor.
    plan : FusionPlan
        Which gradients share a message.
    cost : MessageCost
        The time of a message of a given size.
    link : Link, optional
        What messages share beyond their cost. By default they share nothing.

    Returns
    -------
    Prediction
        The iteration, its compute and its communication, in seconds.

    Raises
    ------
    UserError
        If the plan does not fit the workload, or if the cost of a message is negative.

    See Also
    --------
    Iteration : The same iteration with its timeline and draws of its uncertainty.

    Examples
    --------
    One message for all three gradients starts when the last one is ready, after 9 s:

    >>> from ddlkit.core.cost import AlphaBeta
    >>> layers = Workload.from_arrays(forward_s=3, backward_s=[2, 2, 2], n_bytes=[100] * 3)
    >>> predict(layers, FusionPlan("single", (3,)), AlphaBeta(0.5, 0.02)).iteration_s
    15.5
    """
    return Iteration(workload, plan, cost, link).prediction


def no_overlap(iteration: Iteration) -> Prediction:
    """Return the prediction of a model without overlap.

    The iteration is compute plus communication. The scaling factor of this model is the CSF,
    for "C2C-based Scaling Factor", of the paper "osf" (Liu et al. 2022, Eq 2).

    Parameters
    ----------
    iteration : Iteration
        The iteration, whose plan decides the messages and thus their total time.

    Returns
    -------
    Prediction
        The sum of compute and of all messages, in seconds.
    """
    compute_s = iteration.workload.compute_s
    communication_s = float(iteration.communication_s.sum())
    return Prediction(
        iteration_s=compute_s + communication_s,
        compute_s=compute_s,
        communication_s=communication_s,
    )


def perfect_overlap(iteration: Iteration) -> Prediction:
    """Return the prediction of a model with perfect overlap.

    The iteration is the longer one of compute and communication.

    Parameters
    ----------
    iteration : Iteration
        The iteration, whose plan decides the messages and thus their total time.

    Returns
    -------
    Prediction
        The longer one of compute and of all messages, in seconds.
    """
    compute_s = iteration.workload.compute_s
    communication_s = float(iteration.communication_s.sum())
    return Prediction(
        iteration_s=max(compute_s, communication_s),
        compute_s=compute_s,
        communication_s=communication_s,
    )
