"""One iteration of overlapped data-parallel training: event by event, and over many scenarios at once.

The model: backward makes gradients ready one after the other; a group is sent when its last gradient is
ready and the previous group has been sent; the update follows the last group. Its only recursion is

    end[k] = max(end[k-1], ready[k]) + communication[k]            (osf Eq 8 and 9, seen from the iteration)

which unrolls to a maximum over the group from which on communication never pauses:

    end = max over k of ( ready[k] + communication[k] + ... + communication[last] )
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddlkit.core.cost import MessageCost
from ddlkit.core.errors import UserError
from ddlkit.core.link import Link, Parts, lane_free_s
from ddlkit.core.plan import FusionPlan, make_plan
from ddlkit.core.timeline import Timeline
from ddlkit.core.workload import Workload

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Prediction:
    """What a model says of one iteration; all in seconds but the scaling factor.

    ``communication_s`` is the sum of all messages; ``exposed_communication_s`` is what training waits for.
    """

    iteration_s: float
    compute_s: float
    communication_s: float

    @property
    def exposed_communication_s(self) -> float:
        """Iteration minus compute."""
        return self.iteration_s - self.compute_s

    @property
    def scaling_factor(self) -> float:
        """Weak scaling: one worker's iteration over this one (osf Eq 1 per iteration)."""
        return self.compute_s / self.iteration_s


def group_times(workload: Workload, plan: FusionPlan, cost: MessageCost) -> tuple[Floats, Floats]:
    """(G,) ready time and (G,) communication time of each group of the plan."""
    communication_s = np.asarray(cost(plan.group_bytes(workload)))
    if not np.all(communication_s >= 0):
        smallest = int(plan.group_bytes(workload)[np.argmin(communication_s)])
        raise UserError(
            f"the {cost.form} cost is negative at {smallest} bytes: fit it on smaller messages"
        )
    return plan.group_ready_s(workload), communication_s


def group_ends(ready_s: Floats, communication_s: Floats) -> Floats:
    """(..., G) end of each group's communication; leading axes are scenarios.

    With S the running sum of communication, end[k] = S[k] + max over j <= k of (ready[j] - S[j-1]).
    """
    total = np.cumsum(communication_s, axis=-1)
    return total + np.maximum.accumulate(ready_s - (total - communication_s), axis=-1)


PLAIN = Link()


def predict(
    workload: Workload, plan: FusionPlan, cost: MessageCost, link: Link = PLAIN
) -> Prediction:
    """The iteration under ``plan`` when every message costs ``cost``.

    link : what messages share beyond it: lanes, and credit that a rested link saves
    """
    ready_s, communication_s = group_times(workload, plan, cost)
    ends_s = _ends(workload, plan, cost, link, ready_s, communication_s)
    end_s = float(_unpacked_s(workload, plan, ends_s))
    return Prediction(end_s + workload.update_s, workload.compute_s, float(communication_s.sum()))


def _unpacked_s(workload: Workload, plan: FusionPlan, ends_s: Floats) -> Floats:
    """(...) when the last message, by ``ends_s`` (..., G), has arrived and is copied out: update begins."""
    if not workload.unpack_s_per_byte:
        return np.asarray(ends_s.max(axis=-1))
    unpack_s = workload.unpack_s_per_byte * plan.group_bytes(workload)
    last_s: Floats = group_ends(ends_s, np.broadcast_to(unpack_s, ends_s.shape))[..., -1]
    return last_s


def message_ends(
    workload: Workload,
    plan: FusionPlan,
    cost: MessageCost,
    link: Link = PLAIN,
    leave_s: Floats | None = None,
) -> Floats:
    """(G,) end of each group's communication over ``link``; ``leave_s``: when each may begin, if not when
    its last gradient is ready."""
    ready_s, communication_s = group_times(workload, plan, cost)
    begin_s = ready_s if leave_s is None else leave_s
    return _ends(workload, plan, cost, link, begin_s, communication_s)


def _ends(
    workload: Workload,
    plan: FusionPlan,
    cost: MessageCost,
    link: Link,
    ready_s: Floats,
    communication_s: Floats,
) -> Floats:
    if link.plain:
        return group_ends(ready_s, communication_s)
    return link.ends(ready_s, link.parts(cost, plan.group_bytes(workload)))


def no_overlap(workload: Workload, plan: FusionPlan, cost: MessageCost) -> Prediction:
    """Trivial model: all of the plan's communication after all computation (CSF, osf Eq 2)."""
    communication_s = float(group_times(workload, plan, cost)[1].sum())
    return Prediction(workload.compute_s + communication_s, workload.compute_s, communication_s)


def perfect_overlap(workload: Workload, plan: FusionPlan, cost: MessageCost) -> Prediction:
    """Trivial model: communication hides behind computation, or computation behind communication."""
    communication_s = float(group_times(workload, plan, cost)[1].sum())
    return Prediction(max(workload.compute_s, communication_s), workload.compute_s, communication_s)


def predict_spec(workload: Workload, spec: str, cost: MessageCost) -> tuple[FusionPlan, Prediction]:
    """The plan that ``spec`` names for this workload and cost, and its prediction."""
    plan = make_plan(spec, workload, cost)
    return plan, predict(workload, plan, cost)


def prediction_draws(
    workload: Workload,
    plan: FusionPlan,
    costs: Sequence[MessageCost],
    scatter: ArrayLike = 1.0,
    link: Link = PLAIN,
    slower: ArrayLike = 1.0,
) -> Floats:
    """(B,) iteration times, one a bootstrap draw of the cost.

    scatter : (B, G) factors by which single messages differ from what they cost as a rule; without it
        the draws tell how sure the rule is, with it what a single iteration may show
    link : as for `predict`; slower : (B,) factors on all compute, likewise of a single iteration
    """
    if not costs:
        return np.empty(0)
    stretch, factors = np.asarray(slower, dtype=float), np.asarray(scatter, dtype=float)
    ready_s = plan.group_ready_s(workload) * stretch[..., None]
    if link.plain:
        rule_s = np.array([group_times(workload, plan, cost)[1] for cost in costs])
        ends_s = group_ends(ready_s, rule_s * factors)
    else:
        each = [link.parts(cost, plan.group_bytes(workload)) for cost in costs]
        parts = Parts(*(np.stack(part) * factors for part in zip(*each, strict=True)))
        ends_s = link.ends(ready_s, parts)
    return _unpacked_s(workload, plan, ends_s) + workload.update_s * stretch


def simulate(
    workload: Workload, plan: FusionPlan, cost: MessageCost, link: Link = PLAIN
) -> Timeline:
    """The iteration as spans: forward, backward per tensor, one message per group, update."""
    rows = _rows(workload, plan, cost, link)
    return Timeline.from_rows({**row, "origin": "simulated"} for row in rows)


def _rows(
    workload: Workload, plan: FusionPlan, cost: MessageCost, link: Link
) -> Iterator[dict[str, object]]:
    ends_s = message_ends(workload, plan, cost, link)
    starts_s = np.maximum(plan.group_ready_s(workload), lane_free_s(ends_s, link.in_flight))
    message = "all_gather" if cost.collective == "all_gather" else "all_reduce"
    yield {
        "task": "forward",
        "kind": "forward",
        "stream": "compute",
        "start_s": 0.0,
        "end_s": workload.forward_s,
    }
    begin_s = workload.forward_s
    for group, members in enumerate(plan.slices):
        for i in range(members.start, members.stop):
            end_s = float(workload.ready_s[i])
            span = {
                "task": f"backward {workload.tensor[i]}",
                "kind": "backward",
                "stream": "compute",
                "group": group,
            }
            yield {**span, "start_s": begin_s, "end_s": end_s, "bytes": int(workload.bytes[i])}
            begin_s = end_s
    for group, n_bytes in enumerate(plan.group_bytes(workload)):
        span = {
            "task": f"{message} {group}",
            "kind": message,
            "stream": "communication",
            "group": group,
        }
        # A later rounding of the cumulative sums must not make a span end before it starts.
        end_s = max(float(starts_s[group]), float(ends_s[group]))
        yield {**span, "start_s": float(starts_s[group]), "end_s": end_s, "bytes": int(n_bytes)}
    if not workload.update_s:
        return
    last_s = float(_unpacked_s(workload, plan, ends_s))
    update = {"task": "update", "kind": "update", "stream": "compute", "start_s": last_s}
    yield {**update, "end_s": last_s + workload.update_s}


@dataclass(frozen=True, eq=False)
class LinearScenarios:
    """The iteration as a maximum of linear functions of (1, compute scale, alpha, beta).

    Group k is *critical* when communication never pauses after it; then the iteration takes
    scale * (ready[k] + update) + alpha * (messages from k on) + beta * (bytes from k on).
    coefficients : (3, m), one column a group that can be critical for some non-negative scenario.
    """

    coefficients: Floats

    @classmethod
    def of(cls, workload: Workload, plan: FusionPlan, *, prune: bool = True) -> LinearScenarios:
        """The groups' coefficients; ``prune`` keeps only corners of their convex hull.

        Only a corner can be the maximum of a linear function, so pruning never changes a prediction.
        """
        sizes = plan.group_bytes(workload).astype(float)
        messages = np.arange(len(sizes), 0, -1.0)
        compute_s = plan.group_ready_s(workload) + workload.update_s
        points = np.stack([compute_s, messages, np.cumsum(sizes[::-1])[::-1]])
        return cls(points[:, _corners(points)] if prune else points)

    def iteration_s(
        self, scale: ArrayLike, alpha_s: ArrayLike, beta_s_per_byte: ArrayLike, out_rows: int = 4096
    ) -> Floats:
        """(S,) iteration times for S scenarios; computed ``out_rows`` at a time to stay in cache."""
        scenarios = np.stack(
            np.broadcast_arrays(*map(np.atleast_1d, (scale, alpha_s, beta_s_per_byte))), axis=1
        )
        result = np.empty(len(scenarios))
        columns = self.coefficients.T.copy()
        for start in range(0, len(scenarios), out_rows):
            block = scenarios[start : start + out_rows]
            np.max(columns @ block.T.astype(float), axis=0, out=result[start : start + len(block)])
        return result


def _corners(points: Floats) -> NDArray[np.int64]:
    """Columns of (3, m) points that are corners of their convex hull (all of them if it is flat)."""
    if points.shape[1] < 5:
        return np.arange(points.shape[1])
    from scipy.spatial import ConvexHull, QhullError

    spread = np.ptp(points, axis=1, keepdims=True)
    unit = (points - points.min(axis=1, keepdims=True)) / np.where(spread > 0, spread, 1.0)
    try:
        return np.sort(ConvexHull(unit.T).vertices).astype(np.int64)
    except QhullError:
        return np.arange(points.shape[1])


def dag_edges(
    workload: Workload, plan: FusionPlan, cost: MessageCost
) -> list[tuple[str, str, float]]:
    """The iteration as a graph: (task, next task, duration of the first); from "start" to "end".

    The longest path from "start" to "end" is the iteration time: an independent way to compute it.
    """
    _, communication_s = group_times(workload, plan, cost)
    edges: list[tuple[str, str, float]] = [
        ("start", "forward", 0.0),
        ("forward", "b0", workload.forward_s),
    ]
    edges += [(f"b{i}", f"b{i + 1}", float(workload.backward_s[i])) for i in range(workload.n - 1)]
    for group, members in enumerate(plan.slices):
        last = members.stop - 1
        edges.append((f"b{last}", f"c{group}", float(workload.backward_s[last])))
        following = f"c{group + 1}" if group + 1 < len(communication_s) else "update"
        edges.append((f"c{group}", following, float(communication_s[group])))
    return [*edges, ("update", "end", workload.update_s)]
