"""One iteration of overlapped data-parallel training: in time, as a graph, and over many scenarios at once.

A group is sent when its last gradient is ready and the previous group has been sent; the update follows:

    end[k] = max(end[k-1], ready[k]) + communication[k]            (osf Eq 8 and 9, seen from the iteration)
    end    = max over k of ( ready[k] + communication[k] + ... + communication[last] ), if unrolled
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ddlkit.core.cost import MessageCost
from ddlkit.core.errors import UserError
from ddlkit.core.link import Link, Parts
from ddlkit.core.plan import FusionPlan, undominated
from ddlkit.core.timeline import Timeline
from ddlkit.core.units import MOST
from ddlkit.core.workload import Floats, Ints, Workload

PLAIN = Link()
"""A link on which messages share nothing: each takes what it costs, one after the other."""
IN_CACHE = 4096  # scenarios at a time


@dataclass(frozen=True)
class Prediction:
    """What a model says of one iteration, in seconds; ``communication_s`` is the sum of all messages."""

    iteration_s: float
    compute_s: float
    communication_s: float

    @property
    def exposed_communication_s(self) -> float:
        """Return iteration minus compute."""
        return self.iteration_s - self.compute_s

    @property
    def scaling_factor(self) -> float:
        """Return weak scaling: one worker's iteration over this one (osf Eq 1 per iteration)."""
        return self.compute_s / self.iteration_s


def group_ends(ready_s: Floats, communication_s: Floats) -> Floats:
    """Return (..., G) ends of messages, S[k] + max over j <= k of (ready[j] - S[j-1]); S sums their times."""
    total = np.cumsum(communication_s, axis=-1)
    return total + np.maximum.accumulate(ready_s - (total - communication_s), axis=-1)


@dataclass(frozen=True, eq=False)
class Iteration:
    """A workload whose gradients are sent in the G groups of a plan, each message at a cost, over a link.

    copy_s_per_byte : to copy each gradient into its message when it is ready, and out of it once it has
        arrived, one message after the other: what PyTorch's DDP does with its buckets
    bucket_s : what it takes for each message beside its bytes, when its last gradient is ready
    leave_s : (G,) when each message may leave, where that is not when its last gradient is ready
    """

    workload: Workload
    plan: FusionPlan
    cost: MessageCost
    link: Link = PLAIN
    copy_s_per_byte: float = 0.0
    leave_s: Floats | None = None
    bucket_s: float = 0.0
    group_bytes: Ints = field(init=False, repr=False)  # (G,) size of each message

    def __post_init__(self) -> None:
        for taken_s, what in (
            (self.copy_s_per_byte, "a byte"),
            (self.bucket_s, "a bucket"),
        ):
            if not 0 <= taken_s <= MOST:
                raise UserError(f"copies of {taken_s} s {what}: must be at least 0")
        object.__setattr__(self, "group_bytes", self.plan.group_bytes(self.workload))

    @cached_property
    def tensor_ready_s(self) -> Floats:
        """Return (n,) when each gradient is ready, and in its message."""
        if not (self.copy_s_per_byte or self.bucket_s):
            return self.workload.ready_s
        packing_s = self.copy_s_per_byte * self.workload.bytes
        packing_s[np.array(self.plan.ends) - 1] += self.bucket_s
        return self.workload.forward_s + np.cumsum(self.workload.backward_s + packing_s)

    @cached_property
    def ready_s(self) -> Floats:
        """Return (G,) when the last gradient of each group is ready."""
        return self.tensor_ready_s[np.array(self.plan.ends) - 1]

    @cached_property
    def communication_s(self) -> Floats:
        """Return (G,) what each message costs."""
        return self._checked_s(self.cost)

    @cached_property
    def played_s(self) -> tuple[Floats, Floats]:
        """Return (G,) when each message begins, and (G,) when it has arrived."""
        begin_s = self.ready_s if self.leave_s is None else self.leave_s
        if self.link.plain:
            ends_s = group_ends(begin_s, self.communication_s)
            # A later rounding of the cumulative sums must not make a message begin before it is ready.
            return np.maximum(begin_s, np.append(0.0, ends_s[:-1])), ends_s
        return self.link.play(begin_s, self.link.parts(self.cost, self.group_bytes))

    @cached_property
    def prediction(self) -> Prediction:
        """Return its times; what copies take counts as exposed communication."""
        iteration_s = float(self._unpacked_s(self.played_s[1])) + self.workload.update_s
        return Prediction(
            iteration_s, self.workload.compute_s, float(self.communication_s.sum())
        )

    def draws(
        self,
        costs: Sequence[MessageCost],
        scatter: ArrayLike = 1.0,
        slower: ArrayLike = 1.0,
        slowed: Floats | None = None,
    ) -> Floats:
        """Return (B,) iterations by draws of the cost, with factors on messages (B, G) and compute (B,).

        slowed : (2, B, G) draws of both slowdowns of the link, where they are drawn too
        """
        if not costs:
            return np.empty(0)
        stretch, factors = (
            np.asarray(slower, dtype=float),
            np.asarray(scatter, dtype=float),
        )
        ready_s = self.ready_s * stretch[..., None]
        link = self.link
        if slowed is not None:
            link = replace(link, slowdown=slowed[0], message_slowdown=slowed[1])
        if link.plain:
            rule_s = np.array([self._checked_s(cost) for cost in costs])
            ends_s = group_ends(ready_s, rule_s * factors)
        else:
            each = [link.parts(cost, self.group_bytes) for cost in costs]
            parts = Parts(
                *(np.stack(part) * factors for part in zip(*each, strict=True))
            )
            ends_s = link.play(ready_s, parts)[1]
        return self._unpacked_s(ends_s) + self.workload.update_s * stretch

    def timeline(self) -> Timeline:
        """Return the iteration as spans: forward, backward per tensor, one message per group, update."""
        names = ("task", "kind", "stream", "start_s", "end_s", "group", "bytes")
        rows = (dict(zip(names, span, strict=True)) for span in self._spans())
        return Timeline.from_rows({"origin": "simulated", **row} for row in rows)

    def edges(self) -> list[tuple[str, str, float]]:
        """Return (task, next, duration) of a graph whose longest path it is. UserError for shared links."""
        if (
            not self.link.plain
            or self.copy_s_per_byte
            or self.bucket_s
            or self.leave_s is not None
        ):
            raise UserError(
                "graph of an iteration: one message after the other only, no copies"
            )
        work, last = self.workload, len(self.plan.ends) - 1
        edges = [("start", "forward", 0.0), ("forward", "b0", work.forward_s)]
        edges += [
            (f"b{i}", f"b{i + 1}", float(work.backward_s[i])) for i in range(work.n - 1)
        ]
        for group, end in enumerate(self.plan.ends):
            edges.append((f"b{end - 1}", f"c{group}", float(work.backward_s[end - 1])))
            following = f"c{group + 1}" if group < last else "update"
            edges.append((f"c{group}", following, float(self.communication_s[group])))
        return [*edges, ("update", "end", work.update_s)]

    def _checked_s(self, cost: MessageCost) -> Floats:
        communication_s = np.asarray(cost(self.group_bytes))
        if not np.all(communication_s >= 0):
            where = f"at {self.group_bytes[np.argmin(communication_s)]} bytes"
            raise UserError(
                f"the {cost.form} cost is negative {where}: fit it on smaller messages"
            )
        return communication_s

    def _unpacked_s(self, ends_s: Floats) -> Floats:
        """Return (...) when the last message, by ``ends_s`` (..., G), has been copied out."""
        if not self.copy_s_per_byte:
            return np.asarray(ends_s.max(axis=-1))
        unpack_s = np.broadcast_to(
            self.copy_s_per_byte * self.group_bytes, ends_s.shape
        )
        return np.asarray(group_ends(ends_s, unpack_s)[..., -1])

    def _spans(self) -> Iterator[tuple[object, ...]]:
        end_s = self.workload.forward_s
        yield "forward", "forward", "compute", 0.0, end_s, -1, 0
        shown_s = self.tensor_ready_s
        if self.link.slows:
            shown_s = self.link.computed_s(shown_s, *self.played_s)
        for group, members in enumerate(self.plan.slices):
            for i in range(members.start, members.stop):
                begin_s, end_s = end_s, float(shown_s[i])
                name, n_bytes = (
                    f"backward {self.workload.tensor[i]}",
                    int(self.workload.bytes[i]),
                )
                yield name, "backward", "compute", begin_s, end_s, group, n_bytes
        kind, (starts_s, ends_s) = self.cost.collective, self.played_s
        for group, n_bytes in enumerate(self.group_bytes):
            start_s = float(starts_s[group])
            # A later rounding of the cumulative sums must not make a span end before it starts.
            end_s = max(start_s, float(ends_s[group]))
            yield (
                f"{kind} {group}",
                kind,
                "communication",
                start_s,
                end_s,
                group,
                int(n_bytes),
            )
        if self.workload.update_s:
            begin_s = float(self._unpacked_s(ends_s))
            yield (
                "update",
                "update",
                "compute",
                begin_s,
                begin_s + self.workload.update_s,
                -1,
                0,
            )


def predict(
    workload: Workload, plan: FusionPlan, cost: MessageCost, link: Link = PLAIN
) -> Prediction:
    """Return the times of an `Iteration`, in one call."""
    return Iteration(workload, plan, cost, link).prediction


def no_overlap(iteration: Iteration) -> Prediction:
    """Return the trivial model: all of the plan's communication after all computation (CSF, osf Eq 2)."""
    compute_s, sent_s = (
        iteration.workload.compute_s,
        float(iteration.communication_s.sum()),
    )
    return Prediction(compute_s + sent_s, compute_s, sent_s)


def perfect_overlap(iteration: Iteration) -> Prediction:
    """Return the other one: communication hides behind computation, or computation behind communication."""
    compute_s, sent_s = (
        iteration.workload.compute_s,
        float(iteration.communication_s.sum()),
    )
    return Prediction(max(compute_s, sent_s), compute_s, sent_s)


@dataclass(frozen=True, eq=False)
class LinearScenarios:
    """The iteration as a maximum of linear functions of (1, compute scale, alpha, beta).

    Group k is *critical* when communication never pauses after it; then the iteration takes
    scale * (ready[k] + update) + alpha * (messages from k on) + beta * (bytes from k on): column k of (3, m).
    """

    coefficients: Floats

    @classmethod
    def of(cls, workload: Workload, plan: FusionPlan) -> LinearScenarios:
        """Return the groups' coefficients, of which only corners of their convex hull can be the maximum."""
        from scipy.spatial import ConvexHull, QhullError

        sizes = plan.group_bytes(workload).astype(float)
        messages = np.arange(len(sizes), 0, -1.0)
        compute_s = plan.group_ready_s(workload) + workload.update_s
        points = np.stack([compute_s, messages, np.cumsum(sizes[::-1])[::-1]])
        spread = np.ptp(points, axis=1, keepdims=True)
        unit = (points - points.min(axis=1, keepdims=True)) / np.where(
            spread > 0, spread, 1.0
        )
        try:
            return cls(points[:, np.sort(ConvexHull(unit.T).vertices)])
        except QhullError:  # few, or flat
            return cls(points)

    def iteration_s(
        self, scale: ArrayLike, alpha_s: ArrayLike, beta_s_per_byte: ArrayLike
    ) -> Floats:
        """Return (S,) iteration times for S scenarios, computed IN_CACHE at a time."""
        scenarios = np.stack(
            np.broadcast_arrays(*map(np.atleast_1d, (scale, alpha_s, beta_s_per_byte))),
            axis=1,
        )
        result = np.empty(len(scenarios))
        columns = self.coefficients.T.copy()
        for start in range(0, len(scenarios), IN_CACHE):
            block = scenarios[start : start + IN_CACHE]
            np.max(
                columns @ block.T.astype(float),
                axis=0,
                out=result[start : start + len(block)],
            )
        return result


# -- what a message may take of a machine: more is often sooner done, and slows down compute more ----


@dataclass(frozen=True, eq=False)
class Resources:
    """One way in which a message can be sent: what it costs, and both slowdowns as of a `Link`."""

    name: str
    cost: MessageCost
    slowdown: float = 0.0
    message_slowdown: float = 0.0


@dataclass(frozen=True, eq=False)
class Shared:
    """An iteration in which every message has resources of its own: ``given``, (G,)."""

    workload: Workload
    plan: FusionPlan
    given: tuple[Resources, ...]

    @property
    def iteration_s(self) -> float:
        """Return seconds from the start of forward to the end of the update."""
        of_each = np.array(
            [(way.slowdown, way.message_slowdown) for way in self.given]
        ).T
        link = Link(slowdown=of_each[0], message_slowdown=of_each[1])
        sizes = self.plan.group_bytes(self.workload).tolist()
        each = [
            link.parts(way.cost, n) for way, n in zip(self.given, sizes, strict=True)
        ]
        parts = Parts(*(np.array(column, float) for column in zip(*each, strict=True)))
        ends_s = link.play(self.plan.group_ready_s(self.workload), parts)[1]
        return float(ends_s.max()) + self.workload.update_s


WAYS = 1000  # kept of a prefix, spread evenly; there can be more than memory holds


class _Front(NamedTuple):
    """Ways to have sent a prefix, (m,), end and work rising; of the last message: first, way, choice."""

    end_s: Floats
    work_s: Floats
    first: Ints
    state: Ints
    choice: Ints


def jointly(
    workload: Workload, choices: Sequence[Resources], plan: FusionPlan | None = None
) -> Shared:
    """Return the shortest iteration of ``plan``, or of all, by the resources that each message could have.

    Dynamic programme over prefixes of the gradients: what the messages of a prefix leave behind is when the
    last has arrived and how far computing has come by then. Ways that are better in one of both are kept,
    WAYS of a prefix at most: the result is the shortest where there were never more.
    """
    n, ready_s = workload.n, workload.ready_s
    total = np.concatenate([[0], np.cumsum(workload.bytes)])
    ends = tuple(range(1, n + 1)) if plan is None else plan.ends
    none, starts = np.zeros(1, np.int64), (0, *ends[:-1])
    fronts = {0: _Front(np.zeros(1), np.zeros(1), none, none, none)}
    for at, end in enumerate(ends):
        firsts = starts[: at + 1] if plan is None else starts[at : at + 1]
        sizes = total[end] - total[list(firsts)]
        costs_s = np.stack([np.asarray(way.cost(sizes), float) for way in choices])
        before = {first: fronts[first] for first in firsts}
        ways = _after(before, ready_s[end - 1], ready_s[-1], costs_s, choices)
        kept = undominated(ways.end_s, -ways.work_s)
        kept = kept[np.linspace(0, len(kept) - 1, min(WAYS, len(kept))).astype(int)]
        fronts[end] = _Front._make(column[kept] for column in ways)
    state = int(np.argmin(fronts[n].end_s))
    cuts, given, end = [], [], n
    while end:
        front = fronts[end]
        cuts.append(end)
        given.append(choices[int(front.choice[state])])
        end, state = int(front.first[state]), int(front.state[state])
    plan = plan or FusionPlan("jointly", tuple(reversed(cuts)))
    return Shared(workload, plan, tuple(reversed(given)))


def _after(
    fronts: Mapping[int, _Front],
    ready_s: float,
    last_s: float,
    costs_s: Floats,
    choices: Sequence[Resources],
) -> _Front:
    """Return every way of every front with one more message, of ``costs_s`` (choices, fronts) alone."""
    counts = [len(front.end_s) for front in fronts.values()]
    end_s, before_s = (
        np.concatenate([front[k] for front in fronts.values()]) for k in (0, 1)
    )
    of = np.arange(len(fronts)).repeat(counts)
    late_s = end_s - before_s
    start_s = np.maximum(end_s, ready_s + late_s)
    work_s = np.minimum(start_s - late_s, last_s)
    slower = np.array([[1 + way.slowdown] for way in choices])
    drag = np.array([[1 + way.message_slowdown] for way in choices])
    beside_s, alone_s = (last_s - work_s) * slower, costs_s[:, of]
    took_s = np.minimum(alone_s * drag, beside_s) + np.maximum(
        0.0, alone_s - beside_s / drag
    )
    done_s = np.where(took_s >= beside_s, last_s, work_s + took_s / slower)
    first, state = (
        np.repeat([*fronts], counts),
        np.concatenate([np.arange(m) for m in counts]),
    )
    columns = start_s + took_s, done_s, first, state, np.arange(len(choices))[:, None]
    return _Front(
        *(np.broadcast_to(column, took_s.shape).ravel() for column in columns)
    )
