"""Fusion plans: which gradients travel in one message, and the planners that choose."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ddlkit.core import pareto, units
from ddlkit.core.cost import MessageCost
from ddlkit.core.errors import UserError, shown
from ddlkit.core.workload import Floats, Ints, Workload


@dataclass(frozen=True)
class FusionPlan:
    """A partition of the tensors into contiguous groups, in ready order.

    ends : exclusive end of each group, increasing; the last one is the number of tensors
    least_s : of a plan proven the best: no iteration is shorter at its cost, one message at a time
    """

    planner: str
    ends: tuple[int, ...]
    least_s: float | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        if not self.ends or any(b <= a for a, b in zip(self.starts, self.ends, strict=True)):
            ends = f"group ends {self.ends[:6]}..."
            raise UserError(f"plan {self.planner!r}: {ends} must increase from above 0")

    @property
    def n(self) -> int:
        """Return the number of tensors."""
        return self.ends[-1]

    @property
    def starts(self) -> tuple[int, ...]:
        """Return the first tensor of each group."""
        return (0, *self.ends[:-1])

    @property
    def slices(self) -> list[slice]:
        """Return the tensors of each group, in ready order."""
        return [slice(a, b) for a, b in zip(self.starts, self.ends, strict=True)]

    def group_bytes(self, workload: Workload) -> Ints:
        """Return (G,) bytes of each group. Raises UserError when the plan is of another workload."""
        if self.n != workload.n:
            sizes = f"{self.n} tensors, the workload has {workload.n}"
            raise UserError(f"plan {self.planner!r} is of {sizes}")
        return np.add.reduceat(workload.bytes, self.starts)

    def group_ready_s(self, workload: Workload) -> Floats:
        """Return (G,) the time at which the last gradient of each group is ready."""
        return workload.ready_s[np.array(self.ends) - 1]

    def forward_groups(self) -> list[list[int]]:
        """Return groups and members in ready order, each tensor by its index in forward order from 0."""
        return [[self.n - 1 - i for i in range(s.start, s.stop)] for s in self.slices]

    def to_dict(self, iteration_s: float | None = None) -> dict[str, Any]:
        """Return it JSON-ready: planner, groups in forward-order indices, predicted iteration."""
        groups = self.forward_groups()
        return {"planner": self.planner, "groups": groups, "iteration_s": iteration_s}


def none(workload: Workload) -> FusionPlan:
    """Return the plan in which every gradient travels alone."""
    return FusionPlan("none", tuple(range(1, workload.n + 1)))


def single(workload: Workload) -> FusionPlan:
    """Return the plan of one message after backward."""
    return FusionPlan("single", (workload.n,))


def buffer(
    workload: Workload, capacity_bytes: int, name: str = "", timeout_s: float = math.inf
) -> FusionPlan:
    """Return groups that close before they exceed the buffer (osf Eq 12), or ``timeout_s`` would pass."""
    if capacity_bytes <= 0:
        raise UserError(f"buffer of {capacity_bytes} bytes: a fusion buffer must be above zero")
    if not timeout_s > 0:
        raise UserError(f"buffer timeout is {timeout_s} s: must be above zero")
    ends, filled = [], 0
    backward_s = workload.backward_s.tolist()
    for i, size in enumerate(workload.bytes.tolist()):
        if filled and (filled + size > capacity_bytes or backward_s[i] >= timeout_s):
            ends.append(i)
            filled = 0
        filled += size
    return FusionPlan(name or f"buffer:{capacity_bytes}", (*ends, workload.n))


DDP_FIRST_BYTES, DDP_BUCKET_BYTES = units.MIB, 25 * units.MIB


def ddp(workload: Workload) -> FusionPlan:
    """Return PyTorch's buckets: one closes on *reaching* its cap, 1 MiB for the first, 25 MiB after.

    >>> ddp(Workload.from_arrays(0.0, [1.0] * 4, [600_000, 600_000, 20_000_000, 9_000_000])).ends
    (2, 4)
    """
    ends, filled, cap = [], 0, DDP_FIRST_BYTES
    for i, size in enumerate(workload.bytes.tolist()):
        filled += size
        if filled >= cap:
            ends.append(i + 1)
            filled, cap = 0, DDP_BUCKET_BYTES
    if filled:
        ends.append(workload.n)
    return FusionPlan("ddp", tuple(ends))


def exact(workload: Workload, cost: MessageCost) -> FusionPlan:
    """Return the plan with the shortest iteration of all 2**(n-1), for any non-negative cost.

    Dynamic programme over prefixes: E[i], the earliest end of communication of the first i tensors, is the
    minimum over the last group's start j of max(E[j], ready[i]) + cost(bytes of j..i); an earlier E[j] never
    hurts, so keeping the best is enough. O(n**2) time, O(n) memory; of equal ones the smallest j.
    """
    if cost.selects:
        plan, least_s = proven(workload, cost)
        return replace(plan, least_s=least_s)
    n, ready_s = workload.n, workload.ready_s
    earliest, start = np.zeros(n + 1), np.zeros(n + 1, dtype=int)
    rows = max(1, AT_ONCE // n)
    for first in range(0, n, rows):
        price = _of_groups(workload, cost, cost.form, range(first, min(first + rows, n)))
        for i, row in enumerate(price, start=first + 1):
            ends = np.maximum(earliest[:i], ready_s[i - 1]) + row[:i]
            start[i] = np.argmin(ends)
            earliest[i] = ends[start[i]]
    cuts = [n]
    while start[cuts[-1]] > 0:
        cuts.append(int(start[cuts[-1]]))
    least_s = float(earliest[n]) + workload.update_s
    return FusionPlan("exact", tuple(reversed(cuts)), least_s)


def proven(workload: Workload, cost: MessageCost) -> tuple[FusionPlan, float]:
    """Return the plan of the shortest iteration where messages are selected first, and its proven seconds."""
    if workload.n > MOST_SELECTED:
        most = f"at most {MOST_SELECTED}: merge those of a layer, or use another planner"
        raise UserError(f"plan exact of {workload.n} tensors that are selected: {most}")
    every = range(workload.n)
    ready_s = np.broadcast_to(workload.ready_s[:, None], (workload.n, workload.n))
    selecting_s = _of_groups(workload, cost.selection_s, f"{cost.form} selection", every)
    sending_s = _of_groups(workload, cost, cost.form, every)
    ends, least_s = pareto.best(pareto.Groups(ready_s, selecting_s, sending_s))
    return FusionPlan("exact", ends), least_s + workload.update_s


AT_ONCE = 2**20  # groups priced at a time: 8 MB of seconds
MOST_SELECTED = 2_000  # tensors whose groups are all held in memory, six times: 200 MB


def _of_groups(
    workload: Workload, seconds: Callable[[Floats], Any], what: str, lasts: range
) -> Floats:
    """Return (len(lasts), n) ``seconds`` by bytes, of the group from each first tensor to a last one."""
    total = np.concatenate([[0.0], np.cumsum(workload.bytes)])
    rows, columns = np.tril_indices(len(lasts), lasts.start, workload.n)
    price = np.zeros((len(lasts), workload.n))
    price[rows, columns] = seconds(total[rows + lasts.start + 1] - total[columns])
    if np.all(price >= 0):
        return price
    raise UserError(f"the {what} cost is negative at some message size: fit it on smaller messages")


MakePlan = Callable[[Workload, "MessageCost | None", str], FusionPlan]
"""(workload, cost or None, the text after the colon) -> plan"""


@dataclass(frozen=True)
class Planner:
    """A planner as it is registered: what makes its plans, how it is written, how it is drawn.

    look : colour, marker, line and hatch; variants : all after the colon, where ``make`` does not read it
    examples : specs, by default its name and variants; where ``make`` reads the text, one with a colon
    """

    name: str
    make: MakePlan
    label: str = ""
    look: tuple[str, str, str, str] = ("#8f8f8f", "", "-", "")
    variants: tuple[str, ...] = ()
    examples: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        written = (self.name, *(f"{self.name}:{variant}" for variant in self.variants))
        object.__setattr__(self, "label", self.label or self.name)
        object.__setattr__(self, "examples", self.examples or written)


PLANNERS: dict[str, Planner] = {}
"""Every planner that is registered, by name."""


def planner(name: str, **drawn: Any) -> Callable[[MakePlan], MakePlan]:
    """Register the decorated function as a planner; ``drawn`` : label, look, ... of a `Planner`."""

    def register(make: MakePlan) -> MakePlan:
        PLANNERS[name] = Planner(name, make, **drawn)
        return make

    return register


def _integers(text: str, spec: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(";", ",").replace(":", ",").split(",")]
    except ValueError:
        right = "must be whole numbers, as in cuts:3,40 or random:7:12"
        raise UserError(f"plan {shown(spec)}: {shown(text)} {right}") from None


@planner("buffer", look=("#e0a000", "o", "-.", "..."), examples=("buffer:25MB", "buffer:64MB:5ms"))
def _buffer(workload: Workload, cost: MessageCost | None, text: str) -> FusionPlan:
    size, _, timeout = text.partition(":")
    timeout_s = units.parse_seconds(timeout) if timeout else math.inf
    return buffer(workload, units.parse_bytes(size), f"buffer:{text}", timeout_s)


@planner("cuts", label="given cuts", look=("#8f8f8f", "P", "--", "|||"), examples=("cuts:3,40",))
def _cuts(workload: Workload, cost: MessageCost | None, text: str) -> FusionPlan:
    ends = _integers(text, f"cuts:{text}")
    ends += [workload.n] * (ends[-1] != workload.n)
    return FusionPlan(f"cuts:{text}", tuple(ends))


@planner("random", look=("#c4c4c4", "X", ":", "---"), examples=("random:7:12",))
def _random(workload: Workload, cost: MessageCost | None, text: str) -> FusionPlan:
    """Return cuts drawn at random: plans that no planner would choose, to test a model with."""
    numbers = _integers(text, f"random:{text}")
    if len(numbers) != 2 or numbers[0] < 0:
        raise UserError(f"plan 'random:{text}': write random:SEED:GROUPS, whole numbers from 0")
    seed, groups = numbers
    if not 1 <= groups <= workload.n:
        raise UserError(f"random plan of {groups} groups: the workload has {workload.n} tensors")
    inner = np.random.default_rng(seed).choice(np.arange(1, workload.n), groups - 1, replace=False)
    return FusionPlan(f"random:{seed}:{groups}", (*sorted(inner.tolist()), workload.n))


planner("none", look=("#b3568a", "v", "-", "\\\\\\"))(lambda workload, *_: none(workload))
planner("single", look=("#1b1b1b", "s", "--", ""))(lambda workload, *_: single(workload))
planner("ddp", label="DDP", look=("#009e73", "D", ":", "///"))(lambda workload, *_: ddp(workload))
planner("exact", look=("#00588f", "*", "-", "xxx"))(
    lambda workload, cost, text: exact(workload, needed_cost(cost, "exact"))
)


def needed_cost(cost: MessageCost | None, planner: str) -> MessageCost:
    """Return the cost itself. Raises UserError when there is none."""
    if cost is None:
        raise UserError(f"planner {planner!r} needs a message cost: give --cost")
    return cost


def make_plan(spec: str, workload: Workload, cost: MessageCost | None = None) -> FusionPlan:
    """Return the plan that ``spec`` names, as "none", "buffer:64MB:5ms" or "cuts:3,40"; else UserError."""
    name, _, text = spec.partition(":")
    if name not in PLANNERS:
        raise UserError(f"unknown planner {shown(name)}: use one of {', '.join(PLANNERS)}")
    chosen = PLANNERS[name]
    free_text = not chosen.variants and any(":" in example for example in chosen.examples)
    if text and not free_text and text not in chosen.variants:
        raise UserError(f"plan {shown(spec)}: write {' or '.join(chosen.examples)}")
    return chosen.make(workload, cost, text)
