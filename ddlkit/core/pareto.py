"""The shortest iteration where a group takes compute time before its message: a choice between two clocks.

To select the largest gradients of a group delays all that is computed after it; its message delays all that
is sent after it. What a cut of the first tensors leaves behind is the pair

    (seconds selected so far, end of the last message)

and of two cuts one is better for sure only if it is as good in both. So every prefix has a front of cuts that
none is better than, and the best plan ends one of the last prefix. Read from the end, with what is selected
and what is sent changing places, the problem is the same again, and a suffix has a front of

    (seconds sent, end of the last message on a link that is free, if nothing was selected before).

A prefix (a, b) and a suffix (p, q) make an iteration that ends at max(a + q, b + p). So fronts of suffixes
bound from below what a cut of a prefix can lead to, and those of prefixes the cuts of suffixes; a known plan
bounds from above. Fronts grow with the tensors, at worst exponentially. Where one is long, points that lie
close together become one: their corner, which none of them is below, for a bound from below; the most
promising of them for a plan. Both are repeated with more points until the lower bound meets the plan.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddlkit.core.workload import Floats, Ints

ROUNDING = 1e-12
"""Relative difference of two bounds that meet."""
NARROW, WIDER = 16, 4
"""How many points the first fronts have, and how many times as many the next ones, and those of plans."""


class Best(NamedTuple):
    """A plan and its certificate: this one ends at ``end_s``, and no plan ends before ``least_s``.

    ends : exclusive end of each group; the two times differ by rounding only
    """

    ends: tuple[int, ...]
    end_s: float
    least_s: float


class Groups(NamedTuple):
    """Every group that there could be, (n, n): row its last tensor, column its first; above, nothing counts.

    ready_s : when its last gradient is ready if nothing was selected before
    selecting_s, sending_s : what it takes on the compute stream, and then on the link
    """

    ready_s: Floats
    selecting_s: Floats
    sending_s: Floats

    def mirrored(self) -> Groups:
        """The same from the last tensor to the first: selecting and sending change places."""
        ready_s, selecting_s, sending_s = (np.ascontiguousarray(one.T[::-1, ::-1]) for one in self)
        return Groups(ready_s, sending_s, selecting_s)

    def end_s(self, ends: tuple[int, ...]) -> float:
        """When the last message of a plan has arrived."""
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
        """The least of both; infinite where there is no point."""
        return (float(self.one[0]), float(self.other[-1])) if len(self.one) else (np.inf, np.inf)

    def least(self, one: Floats, other: Floats) -> Floats:
        """(m,) how early iterations end that go on from ``self`` with the points of the mirrored problem."""
        turn = np.searchsorted(self.one - self.other, one - other)
        ends = np.append(self.one, np.inf)[turn] + other
        return np.minimum(ends, np.append(np.inf, self.other)[turn] + one)

    def parts(self, width: int) -> Ints:
        """Where up to ``width`` parts begin whose points lie close together: in one, or in the other."""
        if len(self.one) <= width:
            return np.arange(len(self.one))
        apart = np.minimum(np.diff(self.one), -np.diff(self.other)).cumsum()
        part = np.append(0, np.minimum(apart / apart[-1] * width, width - 1).astype(int))
        return np.flatnonzero(np.append(True, np.diff(part)))


START = Front(np.zeros(1), np.full(1, -np.inf))
"""Nothing selected, nothing sent."""


def best(groups: Groups) -> Best:
    """The plan whose last message arrives first, of all 2**(n-1), with its certificate."""
    back, n = groups.mirrored(), len(groups.ready_s)
    unknown = [START] * (n + 1)
    before, ends = _fronts(groups, unknown, unknown, np.inf, 1)
    after, _ = _fronts(back, unknown, before, np.inf, 1)
    end_s, width = groups.end_s(ends), NARROW
    while (least_s := max(before[n].corner[1], after[n].corner[1])) < end_s * (1 - ROUNDING):
        before, _ = _fronts(groups, before, after, end_s, width)
        after, _ = _fronts(back, after, before, end_s, width)
        width *= WIDER
        _, found = _fronts(groups, before, after, end_s, width, bound=False)
        if found and groups.end_s(found) < end_s:
            ends, end_s = found, groups.end_s(found)
    return Best(ends, end_s, min(least_s, end_s))


def _fronts(
    groups: Groups,
    known: list[Front],
    rest: list[Front],
    limit_s: float,
    width: int,
    *,
    bound: bool = True,
) -> tuple[list[Front], tuple[int, ...]]:
    """(n + 1) fronts of all prefixes with ``width`` points at most, and the plan that they lead to.

    What cannot end by ``limit_s`` is left out; where that is all, the plan is ().

    known, rest : (n + 1) earlier bounds, of the prefixes, and of those of the mirrored problem
    bound : whether points that become one become their corner, else the one that may end first
    """
    n = len(rest) - 1
    useful = _useful(groups, known, rest[::-1], limit_s)
    fronts, states = [START], 1
    first, came = np.zeros((2, n * width + 1), np.int64)
    one, other = np.zeros((2, n * width + 1))
    other[0] = -np.inf
    for last in range(n):
        among = np.flatnonzero(useful[last, first[:states]])
        begun = first[among]
        now = one[among] + groups.selecting_s[last, begun]
        start_s = np.maximum(other[among], groups.ready_s[last, begun] + now)
        then = start_s + groups.sending_s[last, begun]
        ends_s = rest[n - last - 1].least(now, then)
        kept = np.flatnonzero(ends_s <= limit_s * (1 + ROUNDING))
        kept = kept[_undominated(now[kept], then[kept])]
        begins = Front(now[kept], then[kept]).parts(width)
        chosen = kept[_least_of_each(ends_s[kept], begins)]
        lasts = kept[np.append(begins, len(kept))[1:] - 1]
        corners = Front(now[kept[begins]], then[lasts])
        fronts.append(corners if bound else Front(now[chosen], then[chosen]))
        new = slice(states, states + len(chosen))
        first[new], came[new], (one[new], other[new]) = last + 1, among[chosen], fronts[-1]
        states = new.stop
    return fronts, _traced(first[:states], came) if len(fronts[-1].one) else ()


def _least_of_each(values: Floats, begins: Ints) -> Ints:
    """(k,) the place of the smallest of ``values`` in each of k parts; of equal ones the last."""
    if not begins.size:
        return begins
    part = np.repeat(np.arange(len(begins)), np.diff(np.append(begins, len(values))))
    # What leads to one plan may differ by rounding.
    least = np.flatnonzero(values <= np.minimum.reduceat(values, begins)[part] * (1 + ROUNDING))
    places = np.empty_like(begins)
    places[part[least]] = least
    return places


def _traced(first: Ints, came: Ints) -> tuple[int, ...]:
    """Group ends on the way to the last state: ``first`` tensor after each, and which it came from."""
    state, ends = len(first) - 1, []
    while first[state]:
        ends.append(int(first[state]))
        state = int(came[state])
    return tuple(reversed(ends))


def _undominated(one: Floats, other: Floats) -> Ints:
    """Which points no other is as good as in both, by rising ``one``."""
    ordered = np.argsort(one)
    lowest = np.minimum.accumulate(other[ordered])
    falls = np.flatnonzero(np.diff(lowest, prepend=np.inf) < 0)
    # Of points that are equal in one, the last that falls is the lowest.
    rises = np.diff(one[ordered[falls]], append=np.inf) > 0
    return np.asarray(ordered[falls[rises]])


def _useful(
    groups: Groups, known: list[Front], rest: list[Front], limit_s: float
) -> NDArray[np.bool_]:
    """(n, n) whether a group can be in a plan that ends by ``limit_s``, by the corners of all fronts."""
    one, other = np.array([front.corner for front in known[:-1]]).T
    following, free = np.array([front.corner for front in rest[1:]]).T[..., None]
    now = one + groups.selecting_s
    then = np.maximum(other, groups.ready_s + now) + groups.sending_s
    with np.errstate(invalid="ignore"):  # after an empty front and before the end: not useful
        ends_s = np.maximum(then + following, now + free)
    return np.asarray(np.tril(ends_s <= limit_s * (1 + ROUNDING)))
