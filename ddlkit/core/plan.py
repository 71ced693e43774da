"""Fusion plans: which gradients travel in one message, and the planners that choose."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddlkit.core import units
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
        if not self.ends or any(
            b <= a for a, b in zip(self.starts, self.ends, strict=True)
        ):
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
        raise UserError(
            f"buffer of {capacity_bytes} bytes: a fusion buffer must be above zero"
        )
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


def ddp(workload: Workload, cap_bytes: int = 0) -> FusionPlan:
    """Return PyTorch's buckets: one closes on *reaching* its cap: 1 MiB, then 25; or always ``cap_bytes``.

    >>> ddp(Workload.from_arrays(0.0, [1.0] * 4, [600_000, 600_000, 20_000_000, 9_000_000])).ends
    (2, 4)
    """
    ends, filled, cap = [], 0, cap_bytes or DDP_FIRST_BYTES
    for i, size in enumerate(workload.bytes.tolist()):
        filled += size
        if filled >= cap:
            ends.append(i + 1)
            filled, cap = 0, cap_bytes or DDP_BUCKET_BYTES
    if filled:
        ends.append(workload.n)
    return FusionPlan(f"ddp:{cap_bytes}B" if cap_bytes else "ddp", tuple(ends))


def improved(plan: FusionPlan, seconds: Callable[[FusionPlan], float]) -> FusionPlan:
    """Return a plan that no single move makes faster: a cut more, a cut less, or one moved by a gradient.

    The first move that helps is made, until none does: a local optimum of ``seconds``, whatever these count.
    """
    best, best_s, tried = plan, seconds(plan), -1
    at, moves = 0, 3 * (plan.n - 1)
    while moves and tried < moves:
        cut, kind = divmod(at, 3)
        cuts = {*best.ends[:-1]} ^ {cut + 1}
        if kind and (
            cut + 1 not in best.ends
            or not 0 < (beside := cut + (0, 2)[kind - 1]) < plan.n
        ):
            cuts = set()  # no cut to move, or nowhere to move it
        elif kind:
            cuts |= {beside}
        ends = (*sorted(cuts), plan.n)
        tried += 1
        if (not kind or cuts) and ends != best.ends:
            other = FusionPlan(plan.planner, ends)
            if (other_s := seconds(other)) < best_s:
                best, best_s, tried = other, other_s, 0
        at = (at + 1) % moves
    return best


def exact(workload: Workload, cost: MessageCost) -> FusionPlan:
    """Return the plan with the shortest iteration of all 2**(n-1), for any non-negative cost.

    Dynamic programme over prefixes: E[i], the earliest end of communication of the first i tensors, is the
    minimum over the last group's start j of max(E[j], ready[i]) + cost(bytes of j..i); an earlier E[j] never
    hurts, so keeping the best is enough. O(n**2) time, O(n) memory; of ties, to rounding, the smallest j.
    """
    if cost.selects:
        return _exact_selected(workload, cost)
    n, ready_s = workload.n, workload.ready_s
    earliest, start = np.zeros(n + 1), np.zeros(n + 1, dtype=int)
    rows = max(1, AT_ONCE // n)
    for first in range(0, n, rows):
        price = _of_groups(
            workload, cost, cost.form, range(first, min(first + rows, n))
        )
        for i, row in enumerate(price, start=first + 1):
            ends = np.maximum(earliest[:i], ready_s[i - 1]) + row[:i]
            earliest[i] = ends.min()
            start[i] = np.argmax(ends <= earliest[i] * (1 + ROUNDING))
    cuts = [n]
    while start[cuts[-1]] > 0:
        cuts.append(int(start[cuts[-1]]))
    return FusionPlan(
        "exact", tuple(reversed(cuts)), float(earliest[n]) + workload.update_s
    )


def _exact_selected(workload: Workload, cost: MessageCost) -> FusionPlan:
    """Return the plan of the shortest iteration where messages are selected first."""
    if workload.n > MOST_SELECTED:
        most = (
            f"at most {MOST_SELECTED}: merge those of a layer, or use another planner"
        )
        raise UserError(f"plan exact of {workload.n} tensors that are selected: {most}")
    every = range(workload.n)
    ready_s = np.broadcast_to(workload.ready_s[:, None], (workload.n, workload.n))
    selecting_s = _of_groups(
        workload, cost.selection_s, f"{cost.form} selection", every
    )
    sending_s = _of_groups(workload, cost, cost.form, every)
    ends, least_s = shortest(Groups(ready_s, selecting_s, sending_s))
    return FusionPlan("exact", ends, least_s + workload.update_s)


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
    raise UserError(
        f"the {what} cost is negative at some message size: fit it on smaller messages"
    )


# -- the shortest iteration where a group takes compute time before its message ---------------------
# To select the largest gradients of a group delays all that is computed after it; its message delays all
# that is sent after it. So every prefix of the tensors has a front of cuts, by (seconds selected so far, end
# of the last message). Read from the end, selecting and sending change places, and a suffix has a front,
# too. A prefix (a, b) and a suffix (p, q) make an iteration that ends at max(a + q, b + p): fronts of
# suffixes bound from below what a cut of a prefix can lead to, and the reverse; a plan bounds from above.
# Where a front is long, points close together become one: their corner, for a bound; the most promising one,
# for a plan. Prefixes and suffixes take turns, with more and more points, until the lower bound meets the
# plan.

ROUNDING = 1e-12  # relative difference of two bounds that meet
NARROW, WIDER = (
    32,
    4,
)  # points of the second front, and how many times as many in the next ones


class Groups(NamedTuple):
    """Every group, (n, n): row its last tensor, column its first; ready if nothing was selected before."""

    ready_s: Floats
    selecting_s: Floats
    sending_s: Floats

    def mirrored(self) -> Groups:
        """Return the same from the last tensor to the first: selecting and sending change places."""
        ready_s, selecting_s, sending_s = (
            np.ascontiguousarray(of.T[::-1, ::-1]) for of in self
        )
        return Groups(ready_s, sending_s, selecting_s)

    def after(
        self, last: int, firsts: Ints, times: Ints, one: Floats, other: Floats
    ) -> tuple[Floats, Floats]:
        """Return (m,) both clocks after one more group: each of ``firsts`` stands so many times."""
        ready_s, selecting_s, sending_s = (
            column[last, firsts].repeat(times) for column in self
        )
        now = one + selecting_s
        then = np.maximum(other, ready_s + now)
        then += sending_s
        return now, then

    def end_s(self, ends: tuple[int, ...]) -> float:
        """Return when the last message of a plan has arrived."""
        selected_s, end_s, first = 0.0, 0.0, 0
        for end in ends:
            group = end - 1, first
            selected_s += float(self.selecting_s[group])
            end_s = max(end_s, float(self.ready_s[group]) + selected_s)
            end_s, first = end_s + float(self.sending_s[group]), end
        return end_s


class Front(NamedTuple):
    """Points (one, other), the first rising, the second falling; of a prefix or, mirrored, of a suffix."""

    one: Floats
    other: Floats

    @property
    def corner(self) -> tuple[float, float]:
        """Return the least of both; infinite where there is no point."""
        return (
            (float(self.one[0]), float(self.other[-1]))
            if len(self.one)
            else (np.inf, np.inf)
        )

    def least(self, one: Floats, other: Floats) -> Floats:
        """Return (m,) how early iterations end that go on from here with points of the mirrored problem."""
        turn = (self.one - self.other).searchsorted(one - other)
        late, early = np.empty((2, len(self.one) + 1))
        late[:-1], late[-1], early[1:], early[0] = self.one, np.inf, self.other, np.inf
        return np.minimum(late[turn] + other, early[turn] + one)

    def parts(self, width: int) -> Ints:
        """Return where up to ``width`` parts begin whose points lie close together in one or the other."""
        apart = np.minimum(
            self.one[1:] - self.one[:-1], self.other[:-1] - self.other[1:]
        ).cumsum()
        part = np.minimum(apart * (width / apart[-1]), width - 1).astype(int)
        begins = np.empty(len(self.one), bool)
        begins[0], begins[1], begins[2:] = True, part[0] > 0, part[1:] > part[:-1]
        return begins.nonzero()[0]


START = Front(np.zeros(1), np.full(1, -np.inf))  # nothing selected, nothing sent


def shortest(groups: Groups) -> tuple[tuple[int, ...], float]:
    """Return the group ends of the plan whose last message arrives first, and before when none does."""
    sides, n = (groups, groups.mirrored()), len(groups.ready_s)
    fronts = [[START] * (n + 1)] * 2
    ends: tuple[int, ...] = ()
    end_s, least_s = np.inf, -np.inf
    for side, width, bound in _passes():
        both = fronts[side], fronts[1 - side]
        passed, plan = _fronts(sides[side], *both, end_s, width, bound)
        plan = tuple(n - end for end in (*plan[-2::-1], 0)) if plan and side else plan
        if plan and groups.end_s(plan) < end_s:
            ends, end_s = plan, groups.end_s(plan)
        if bound:
            fronts[side], least_s = passed, max(least_s, passed[n].corner[1])
        if least_s >= end_s * (1 - ROUNDING):
            break
    return ends, min(least_s, end_s)


def _passes() -> Iterator[tuple[int, int, bool]]:
    """Yield which side, of how many points, whether a bound: prefixes and suffixes in turn, without end."""
    yield 0, 1, True
    for power in count():
        width, side = NARROW * WIDER**power, 1 - power % 2
        if not side:
            yield side, width, False
        yield side, width, True


def _fronts(
    groups: Groups,
    prefixes: list[Front],
    rest: list[Front],
    limit_s: float,
    width: int,
    bound: bool,
) -> tuple[list[Front], tuple[int, ...]]:
    """Return (n + 1) fronts of all prefixes, of ``width`` points at most, and a plan they lead to, or ().

    What cannot end by ``limit_s`` is left out. Points that become one become their corner if it is for a
    ``bound``, else that of them which may end first, to which the plan leads.

    prefixes, rest : (n + 1) earlier bounds, of the prefixes, and of those of the mirrored problem
    """
    n = len(rest) - 1
    useful = _useful(groups, prefixes, rest[::-1], limit_s)
    fronts, states = [START], 1
    first, came = np.zeros((2, n * width + 1), np.int64)
    one, other = np.zeros((2, n * width + 1))
    other[0] = -np.inf
    begins_at = np.zeros(n + 1, np.int64)
    points = np.ones(n + 1, np.int64)
    for last in range(n):
        firsts = useful[last].nonzero()[0]
        each = points[firsts]
        among = (begins_at[firsts] - each.cumsum() + each).repeat(each) + np.arange(
            each.sum()
        )
        now, then = groups.after(last, firsts, each, one[among], other[among])
        kept = undominated(now, then)
        ends_s = rest[n - last - 1].least(now[kept], then[kept])
        in_time = ends_s <= limit_s * (1 + ROUNDING)
        kept, ends_s = kept[in_time], ends_s[in_time]
        front = Front(now[kept], then[kept])
        if len(kept) > width:
            begins = front.parts(width)
            lasts = np.append(begins[1:], len(kept)) - 1
            kept = kept[_least_of_each(ends_s, begins)]
            corners = Front(front.one[begins], front.other[lasts])
            front = corners if bound else Front(now[kept], then[kept])
        fronts.append(front)
        new = slice(states, states + len(kept))
        begins_at[last + 1], points[last + 1] = states, len(kept)
        first[new], came[new], (one[new], other[new]) = last + 1, among[kept], front
        states = new.stop
    return fronts, _traced(first[:states], came) if len(fronts[-1].one) else ()


def _least_of_each(values: Floats, begins: Ints) -> Ints:
    """Return (k,) the place of the smallest of ``values`` in each of k parts; of equal ones the last."""
    part = np.repeat(np.arange(len(begins)), np.diff(begins, append=len(values)))
    # What leads to one plan may differ by rounding.
    least = (
        values <= np.minimum.reduceat(values, begins)[part] * (1 + ROUNDING)
    ).nonzero()[0]
    places = np.empty_like(begins)
    places[part[least]] = least
    return places


def _traced(first: Ints, came: Ints) -> tuple[int, ...]:
    """Return group ends on the way to the last state: ``first`` tensor after each, and which it came from."""
    state, ends = len(first) - 1, []
    while first[state]:
        ends.append(int(first[state]))
        state = int(came[state])
    return tuple(reversed(ends))


def undominated(one: Floats, other: Floats) -> Ints:
    """Return which points no other is as good (as small) as in both, by rising ``one``."""
    ordered = one.argsort()
    lowest = np.minimum.accumulate(other[ordered])
    kept = np.ones(len(one), bool)
    kept[1:] = lowest[1:] < lowest[:-1]
    ordered = ordered[kept]
    # Of points that are equal in one, the last that falls is the lowest.
    rising = one[ordered]
    kept = np.ones(len(ordered), bool)
    kept[:-1] = rising[1:] > rising[:-1]
    return np.asarray(ordered[kept])


def _useful(
    groups: Groups, prefixes: list[Front], rest: list[Front], limit_s: float
) -> NDArray[np.bool_]:
    """Return (n, n) whether a group can be in a plan that ends by ``limit_s``, by fronts' corners."""
    one, other = np.array([front.corner for front in prefixes[:-1]]).T
    following, free = np.array([front.corner for front in rest[1:]]).T[..., None]
    now = one + groups.selecting_s
    then = np.maximum(other, groups.ready_s + now) + groups.sending_s
    with np.errstate(
        invalid="ignore"
    ):  # after an empty front and before the end: not useful
        ends_s = np.maximum(then + following, now + free)
    return np.asarray(np.tril(ends_s <= limit_s * (1 + ROUNDING)))


MakePlan = Callable[[Workload, "MessageCost | None", str], FusionPlan]
"""(workload, cost or None, the text after the colon) -> plan"""


PLAIN_LOOK = ("#8f8f8f", "", "-", "")
"""Colour, marker, line and hatch of a planner that has none of its own."""


@dataclass(frozen=True)
class Planner:
    """A planner as it is registered: what makes its plans, how it is written, how it is drawn.

    look : colour, marker, line and hatch; variants : all after the colon, where ``make`` does not read it
    examples : specs, by default its name and variants; where ``make`` reads the text, one with a colon
    """

    name: str
    make: MakePlan
    label: str = ""
    look: tuple[str, str, str, str] = PLAIN_LOOK
    variants: tuple[str, ...] = ()
    examples: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        written = (self.name, *(f"{self.name}:{variant}" for variant in self.variants))
        object.__setattr__(self, "label", self.label or self.name)
        object.__setattr__(self, "examples", self.examples or written)


PLANNERS: dict[str, Planner] = {}
"""Every planner that is registered, by name."""


def planner(
    name: str,
    *,
    label: str = "",
    look: tuple[str, str, str, str] = PLAIN_LOOK,
    variants: tuple[str, ...] = (),
    examples: tuple[str, ...] = (),
) -> Callable[[MakePlan], MakePlan]:
    """Register the decorated function as a planner; label, look, variants and examples as of a `Planner`."""

    def register(make: MakePlan) -> MakePlan:
        PLANNERS[name] = Planner(name, make, label, look, variants, examples)
        return make

    return register


@planner(
    "buffer",
    look=("#e0a000", "o", "-.", "..."),
    examples=("buffer:25MB", "buffer:64MB:5ms"),
)
def _buffer(workload: Workload, cost: MessageCost | None, text: str) -> FusionPlan:
    size, _, timeout = text.partition(":")
    if re.fullmatch(r"[0-9.]+", size) and 0 < float(size) < units.KIB:
        meant = f"buffer:{size}MB, or buffer:{size}B if bytes are meant"
        raise UserError(
            f"plan {shown(f'buffer:{text}')}: a buffer of {size} bytes: write {meant}"
        )
    timeout_s = units.parse_seconds(timeout) if timeout else math.inf
    return buffer(workload, units.parse_bytes(size), f"buffer:{text}", timeout_s)


@planner(
    "cuts",
    label="given cuts",
    look=("#8f8f8f", "P", "--", "|||"),
    examples=("cuts:3,40",),
)
def _cuts(workload: Workload, cost: MessageCost | None, text: str) -> FusionPlan:
    if not re.fullmatch("[0-9]{1,9}([,;:][0-9]{1,9})*", text):
        raise UserError(
            f"plan {shown(f'cuts:{text}')}: must be whole numbers, as in cuts:3,40"
        )
    ends = [int(part) for part in re.split("[,;:]", text)]
    ends += [workload.n] * (ends[-1] != workload.n)
    return FusionPlan(f"cuts:{text}", tuple(ends))


@planner("random", look=("#c4c4c4", "X", ":", "---"), examples=("random:7:12",))
def _random(workload: Workload, cost: MessageCost | None, text: str) -> FusionPlan:
    """Return cuts drawn at random: plans that no planner would choose, to test a model with."""
    numbers = re.fullmatch("([0-9]{1,9})[,;:]([0-9]{1,9})", text)
    if not numbers:
        spec = shown(f"random:{text}")
        raise UserError(f"plan {spec}: write random:SEED:GROUPS, whole numbers from 0")
    seed, groups = map(int, numbers.groups())
    if not 1 <= groups <= workload.n:
        raise UserError(
            f"random plan of {groups} groups: the workload has {workload.n} tensors"
        )
    inner = np.random.default_rng(seed).choice(
        np.arange(1, workload.n), groups - 1, replace=False
    )
    return FusionPlan(f"random:{seed}:{groups}", (*sorted(inner.tolist()), workload.n))


planner("none", look=("#b3568a", "v", "-", "\\\\\\"))(
    lambda workload, *_: none(workload)
)
planner("single", look=("#1b1b1b", "s", "--", ""))(
    lambda workload, *_: single(workload)
)
planner(
    "ddp", label="DDP", look=("#009e73", "D", ":", "///"), examples=("ddp", "ddp:25MiB")
)(lambda workload, _, text: ddp(workload, units.parse_bytes(text) if text else 0))
planner("exact", look=("#00588f", "*", "-", "xxx"))(
    lambda workload, cost, text: exact(workload, needed_cost(cost, "exact"))
)


def needed_cost(cost: MessageCost | None, planner: str) -> MessageCost:
    """Return the cost itself. Raises UserError when there is none."""
    if cost is None:
        raise UserError(f"planner {planner!r} needs a message cost: give --cost")
    return cost


def make_plan(
    spec: str, workload: Workload, cost: MessageCost | None = None
) -> FusionPlan:
    """Return the plan that ``spec`` names, as "none", "buffer:64MB:5ms" or "cuts:3,40"; else UserError."""
    name, _, text = spec.partition(":")
    if name not in PLANNERS:
        raise UserError(
            f"unknown planner {shown(name)}: use one of {', '.join(PLANNERS)}"
        )
    chosen = PLANNERS[name]
    free_text = not chosen.variants and any(
        ":" in example for example in chosen.examples
    )
    if text and not free_text and text not in chosen.variants:
        raise UserError(f"plan {shown(spec)}: write {' or '.join(chosen.examples)}")
    return chosen.make(workload, cost, text)


# ---------------------------------------------------------------- planners by a rule


JoinRule = Callable[[int, float, float], bool]
"""(next tensor, bytes of the group so far, when that group could start [s]) -> whether it joins."""


def merged(
    name: str, workload: Workload, cost: MessageCost, joins: JoinRule
) -> FusionPlan:
    """Return the plan of a rule that decides, tensor by tensor, whether it joins the group."""
    sizes = workload.bytes.tolist()
    ready_s = workload.ready_s.tolist()
    ends: list[int] = []
    link_free_s = 0.0
    group_bytes = float(sizes[0])
    for tensor in range(1, workload.n):
        start_s = max(link_free_s, ready_s[tensor - 1])
        if joins(tensor, group_bytes, start_s):
            group_bytes += sizes[tensor]
        else:
            ends.append(tensor)
            link_free_s = start_s + cost(group_bytes)
            group_bytes = float(sizes[tensor])
    return FusionPlan(name, (*ends, workload.n))


def fusing_pays(
    update: Callable[[float], float], buffered: float, size: float, waited_s: float
) -> bool:
    """osf Eq 17, adaFusion: whether layer i's tensors join the buffer.

    Symbols: B^(i+1) = buffered and D^(i) = size in bytes, t_wait = waited_s, t_update = update. Printed,
    t_wait has the index i; the buffer waits for layer i's own backward, t_wait^(i+1).
    """
    return update(buffered + size) + waited_s < update(buffered) + update(size)


@planner(
    "adafusion",
    label="adaFusion",
    variants=("repaired",),
    look=("#d55e00", "h", ":", "+++"),
)
def adafusion(workload: Workload, cost: MessageCost | None, text: str) -> FusionPlan:
    """osf Eq 17 tensor by tensor; printed, its wait is zero without buffer limit and timeout."""
    known = needed_cost(cost, "adafusion")
    sizes = workload.bytes.astype(float).tolist()
    backward_s = workload.backward_s.tolist()

    def joins(tensor: int, group_bytes: float, start_s: float) -> bool:
        waited_s = backward_s[tensor] if text else 0.0
        return fusing_pays(known, group_bytes, sizes[tensor], waited_s)

    return merged(f"adafusion:{text}" if text else "adafusion", workload, known, joins)


@planner(
    "mg_wfbp", label="MG-WFBP", variants=("osf",), look=("#7fc4ee", "^", "--", "\\\\\\")
)
def mg_wfbp(workload: Workload, cost: MessageCost | None, text: str) -> FusionPlan:
    """Merge while ready - tau_c < a: the next gradient is ready before this message's start-up would be over.

    tau_c is the message's earliest start, a the start-up, or what merging saves (Shi, Chu and Li, INFOCOM
    2019; TPDS 2021). "osf" (Section 4.2): while the next backward is shorter than the message and a start-up.
    """
    known = needed_cost(cost, "mg_wfbp")
    ready_s = workload.ready_s.tolist()
    sizes = workload.bytes.astype(float).tolist()
    backward_s = workload.backward_s.tolist()

    def published(tensor: int, group_bytes: float, start_s: float) -> bool:
        until_ready_s = ready_s[tensor] - start_s
        return fusing_pays(known, group_bytes, sizes[tensor], until_ready_s)

    def described(tensor: int, group_bytes: float, start_s: float) -> bool:
        size = sizes[tensor]
        start_up_s = known(group_bytes) + known(size) - known(group_bytes + size)
        return bool(backward_s[tensor] < known(group_bytes) + start_up_s)

    if text:
        return merged("mg_wfbp:osf", workload, known, described)
    return merged("mg_wfbp", workload, known, published)
