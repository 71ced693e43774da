"""The shortest iteration where a group takes compute time before its message: a choice between two clocks.

To select the largest gradients of a group delays all that is computed after it; its message delays all that
is sent after it. A cut of the first tensors leaves behind (seconds selected so far, end of the last message),
and is better for sure only if it is as good in both: so every prefix has a front of cuts. Read from the end,
selecting and sending change places, and a suffix has a front of (seconds sent, end of the last message on a
free link, if nothing was selected before).

A prefix (a, b) and a suffix (p, q) make an iteration that ends at max(a + q, b + p). So fronts of suffixes
bound from below what a cut of a prefix can lead to, and the reverse; a plan bounds from above. Where a front
is long, points close together become one: their corner, for a bound; the most promising one, for a plan.
Prefixes and suffixes take turns, with more and more points, until the lower bound meets the plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddlkit.core.workload import Floats, Ints

ROUNDING = 1e-12  # relative difference of two bounds that meet
NARROW, WIDER = 32, 4  # points of the second front, and how many times as many in the next ones


class Groups(NamedTuple):
    """Every group, (n, n): row its last tensor, column its first; ready if nothing was selected before."""

    ready_s: Floats
    selecting_s: Floats
    sending_s: Floats

    def mirrored(self) -> Groups:
        """Return the same from the last tensor to the first: selecting and sending change places."""
        ready_s, selecting_s, sending_s = (np.ascontiguousarray(of.T[::-1, ::-1]) for of in self)
        return Groups(ready_s, sending_s, selecting_s)

    def after(
        self, last: int, firsts: Ints, times: Ints, one: Floats, other: Floats
    ) -> tuple[Floats, Floats]:
        """Return (m,) both clocks after one more group: each of ``firsts`` stands so many times."""
        ready_s, selecting_s, sending_s = (column[last, firsts].repeat(times) for column in self)
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
        return (float(self.one[0]), float(self.other[-1])) if len(self.one) else (np.inf, np.inf)

    def least(self, one: Floats, other: Floats) -> Floats:
        """Return (m,) how early iterations end that go on from here with points of the mirrored problem."""
        turn = (self.one - self.other).searchsorted(one - other)
        late, early = np.empty((2, len(self.one) + 1))
        late[:-1], late[-1], early[1:], early[0] = self.one, np.inf, self.other, np.inf
        return np.minimum(late[turn] + other, early[turn] + one)

    def parts(self, width: int) -> Ints:
        """Return where up to ``width`` parts begin whose points lie close together in one or the other."""
        apart = np.minimum(self.one[1:] - self.one[:-1], self.other[:-1] - self.other[1:]).cumsum()
        part = np.minimum(apart * (width / apart[-1]), width - 1).astype(int)
        begins = np.empty(len(self.one), bool)
        begins[0], begins[1], begins[2:] = True, part[0] > 0, part[1:] > part[:-1]
        return begins.nonzero()[0]


START = Front(np.zeros(1), np.full(1, -np.inf))  # nothing selected, nothing sent


def best(groups: Groups) -> tuple[tuple[int, ...], float]:
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
        among = (begins_at[firsts] - each.cumsum() + each).repeat(each) + np.arange(each.sum())
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
    least = (values <= np.minimum.reduceat(values, begins)[part] * (1 + ROUNDING)).nonzero()[0]
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
    with np.errstate(invalid="ignore"):  # after an empty front and before the end: not useful
        ends_s = np.maximum(then + following, now + free)
    return np.asarray(np.tril(ends_s <= limit_s * (1 + ROUNDING)))
