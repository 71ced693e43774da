"""Pareto fronts of partial plans: the best plan if gradients are selected and sent.

To select the largest gradients of a group takes compute time. The selection of a group
therefore delays everything that is computed after it, and the message of a group delays
everything that is sent after it. With the groups numbered 1 to K in the order in which
they are sent, the last message arrives at

    max over k of  selecting[1] + ... + selecting[k]
                   + ready[k] + sending[k] + ... + sending[K],

where ready[k] is when the last gradient of group k would be ready if nothing were
selected.

A plan of the first tensors, a *prefix* of the network, influences the rest by two
numbers only: the seconds that it selects, and the end of its last message. No other
plan of the prefix should be smaller in both, so each prefix has a Pareto front of such
points. Read from the last tensor to the first, selecting and sending change places, so
each *suffix* has a front, too. A prefix with the point (a, b) and a suffix with the
point (p, q) make an iteration whose last message arrives at max(a + q, b + p). The
fronts of suffixes therefore bound from below where a point of a prefix can lead to, and
the reverse. A complete plan bounds the optimum from above.

A front can have more points than memory holds. Points that lie close together are then
replaced by one. If the front is to be a lower bound, this is their corner, the smallest
value of each coordinate. If a plan is to be found, it is the most promising point.
Prefixes and suffixes take turns, with more and more points, until the lower bound meets
the best plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ddlkit.core.workload import Floats, Ints

ROUNDING = 1e-12
"""The relative difference up to which two times count as equal."""

FEWEST_POINTS = 32
"""The most points of a front in the second pass. The first pass keeps a single one."""
MORE_POINTS = 4
"""How many times as many points each later pass keeps."""

PREFIXES = 0
SUFFIXES = 1
"""The two sides from which the network is read."""


class Groups(NamedTuple):
    """Every group of contiguous tensors, in arrays of shape (n, n).

    The row of a group is its last tensor, and the column is its first tensor.

    Attributes
    ----------
    ready_s : ndarray, shape (n, n)
        When the last gradient of the group is ready if nothing is selected before, in
        seconds.
    selecting_s : ndarray, shape (n, n)
        Compute time of the selection, in seconds.
    sending_s : ndarray, shape (n, n)
        Time of the message, in seconds.
    """

    ready_s: Floats
    selecting_s: Floats
    sending_s: Floats

    def mirrored(self) -> Groups:
        """Return the groups read from the last tensor to the first.

        Code for the first groups of plans then also serves for their last groups. For the
        groups 1 to K of a plan, the last message arrives at

            max over k of  selecting[1] + ... + selecting[k]
                           + ready[k] + sending[k] + ... + sending[K].

        Read from group K to group 1, this is the same formula with selecting and sending
        exchanged.
        """
        # An element [last, first] is the group from tensor `first` to tensor `last`. In
        # reversed order the last tensor of a group becomes its first one, so rows and
        # columns change places (.T), and both count from the other end ([::-1, ::-1]).
        # Contiguous rows are read faster later.
        ready_s, selecting_s, sending_s = (
            np.ascontiguousarray(times_s.T[::-1, ::-1]) for times_s in self
        )
        return Groups(ready_s, selecting_s=sending_s, sending_s=selecting_s)

    def end_s(self, ends: tuple[int, ...]) -> float:
        """Return when the last message of a plan arrives, in seconds.

        ``ends`` has the exclusive end of each group of the plan.
        """
        # The seconds of selection so far, and the end of the last message so far.
        selected_s = 0.0
        arrived_s = 0.0
        first = 0
        for end in ends:
            # The row is the last tensor of the group, and the column is its first one.
            group = (end - 1, first)
            selected_s += float(self.selecting_s[group])
            start_s = max(arrived_s, float(self.ready_s[group]) + selected_s)
            arrived_s = start_s + float(self.sending_s[group])
            first = end
        return arrived_s


class Front(NamedTuple):
    """The Pareto front of a prefix: the points that no other point dominates.

    A point dominates another one if it is at most as large in both coordinates.

    Attributes
    ----------
    selected_s : ndarray, shape (m,)
        Seconds of selection so far, rising. In the mirrored problem, in which the network
        is read from its last tensor to its first, this is the time of messages.
    arrived_s : ndarray, shape (m,)
        When the last message has arrived, in seconds, falling.
    """

    selected_s: Floats
    arrived_s: Floats

    @property
    def corner(self) -> tuple[float, float]:
        """Return the smallest value of each coordinate, infinite without a point."""
        if not len(self.selected_s):
            return np.inf, np.inf
        # The first coordinate rises, and the second one falls.
        return float(self.selected_s[0]), float(self.arrived_s[-1])

    def earliest_end_s(self, selected_s: Floats, arrived_s: Floats) -> Floats:
        """Return the earliest end of an iteration that continues from each given point.

        This front is the one of the suffix, and the points are those of a prefix.

        Parameters
        ----------
        selected_s, arrived_s : ndarray, shape (k,)
            The coordinates (a, b) of points of the prefix.

        Returns
        -------
        ndarray, shape (k,)
            For each point (a, b), the minimum of max(a + q, b + p) over all points
            (p, q) of this front, in seconds. It is infinite if this front is empty.
        """
        a = selected_s
        b = arrived_s
        # In the front of a suffix, selecting and sending have changed places. So p is the time
        # of all messages of the suffix, and q is when its last message would arrive if the
        # prefix selected nothing and left the link free. The selections of the prefix delay
        # each group of the suffix, so the iteration ends at a + q or later. The messages of
        # the suffix follow those of the prefix, so it ends at b + p or later.
        p = self.selected_s
        q = self.arrived_s
        # Along this front, b + p rises and a + q falls. The turn is the first point at which
        # b + p is at least a + q, so that p - q, which rises, is at least a - b. From the turn
        # on, the maximum is b + p, which is least at the turn. Before the turn, the maximum is
        # a + q, which is least at the point just before it. The smaller of the two is returned.
        turn = (p - q).searchsorted(a - b)
        # If b + p is the smaller one at all points, `turn` is one behind the last point, where
        # `p_at_turn` is infinite. If the turn is the first point, none is before it, and
        # `q_before_turn` is infinite. Filling arrays is faster here than `np.append`.
        n_points = len(p)
        p_at_turn = np.empty(n_points + 1)
        p_at_turn[:-1] = p
        p_at_turn[-1] = np.inf
        q_before_turn = np.empty(n_points + 1)
        q_before_turn[0] = np.inf
        q_before_turn[1:] = q
        return np.minimum(p_at_turn[turn] + b, q_before_turn[turn] + a)

    def runs(self, most: int) -> Ints:
        """Return the index of the first point of each of at most ``most`` runs.

        A run is a stretch of neighbouring points that lie close together, so that one point
        can replace them: one of them, or their corner, which has the smallest value of each
        coordinate. The front, which has at least two points, is cut into ``most`` runs of
        equal length. A run without points is left out.

        The length between two neighbours is their difference in the coordinate in which they
        differ less. If their corner replaces them, iterations come out shorter by this length
        at most, because the corner is this far from the nearer one of the two, and in one
        coordinate only. The length of a run is the sum of the lengths between its neighbours.
        If a run has more than two points, its length bounds no such error, and only says how
        close the points lie together.
        """
        # Along the front, selected_s rises and arrived_s falls, so both differences
        # between neighbours are positive.
        steps_s = np.minimum(
            self.selected_s[1:] - self.selected_s[:-1],
            self.arrived_s[:-1] - self.arrived_s[1:],
        )
        # The length from the first point to each later one.
        along_s = steps_s.cumsum()
        # The run in which each point lies. The first point is in run 0. The last one
        # would be in run ``most``, which does not exist.
        runs_along = np.minimum(along_s * (most / along_s[-1]), most - 1)
        run = np.append(0, runs_along.astype(int))
        # A point that lies in another run than the point before it begins a run.
        begins = np.ones(len(self.selected_s), bool)
        begins[1:] = run[1:] > run[:-1]
        return begins.nonzero()[0]


NOTHING_SENT = Front(selected_s=np.zeros(1), arrived_s=np.full(1, -np.inf))
"""The front of the empty prefix: nothing is selected, and no message is sent."""


def shortest(groups: Groups) -> tuple[tuple[int, ...], float]:
    """Return the plan whose last message arrives earliest, with a lower bound as proof.

    This is a branch and bound: passes over all prefixes or suffixes raise the lower
    bound and find better plans, until the bound and the best plan meet.

    Parameters
    ----------
    groups : Groups
        The times of all groups of n tensors.

    Returns
    -------
    ends : tuple of int
        The exclusive end of each group.
    least_s : float
        The lower bound in seconds, which is the proof: no plan has a last message that
        arrives earlier. The update, which follows the last message, does not count.

    Examples
    --------
    Two tensors, ready after 1 s and 2 s. Each group takes 0.1 s to be selected, and 3 s
    to be sent. No group has the last tensor 0 and the first tensor 1, so the 0.0 is not used:

    >>> ready_s = np.array([[1.0, 0.0], [2.0, 2.0]])
    >>> groups = Groups(ready_s, np.full((2, 2), 0.1), np.full((2, 2), 3.0))
    >>> shortest(groups)
    ((2,), 5.1)
    """
    n = len(groups.ready_s)
    # Both lists have an entry for each side: PREFIXES, and SUFFIXES, which are prefixes
    # of the mirrored problem, the network that is read from its last tensor to its first.
    problems = (groups, groups.mirrored())
    # A lower bound for each prefix by its number of tensors. At first this is the
    # loosest one: nothing is selected, and nothing is sent.
    bounds = [[NOTHING_SENT] * (n + 1), [NOTHING_SENT] * (n + 1)]
    best_ends: tuple[int, ...] = ()
    best_s = np.inf
    least_s = -np.inf
    # Passes for a bound and passes for a plan follow each other without end. Each computes
    # the Pareto front of every prefix, or of every suffix, and thins the fronts that have more
    # points than the pass allows. Later passes allow more. Once no front is thinned, the bound
    # and the plan are exact, and meet.
    for this_pass in _passes():
        # The sides are 0 and 1. The bounds of both rule out plans in this pass.
        opposite = 1 - this_pass.side
        fronts, ends = _fronts(
            problems[this_pass.side],
            prefixes=bounds[this_pass.side],
            suffixes=bounds[opposite],
            limit_s=best_s,
            this_pass=this_pass,
        )
        # Without a plan that may be better than the best one so far, there are no ends.
        if ends:
            # In a pass by suffixes, the tensors of the plan are numbered from the last one.
            if this_pass.side == SUFFIXES:
                ends = _mirrored_ends(ends)
            end_s = groups.end_s(ends)
            if end_s < best_s:
                best_ends = ends
                best_s = end_s
        if this_pass.is_lower_bound:
            bounds[this_pass.side] = fronts
            # The front of all n tensors is a lower bound of complete plans. So no last message
            # of a plan arrives before the least ``arrived_s`` of this front.
            _, least_arrived_s = fronts[n].corner
            least_s = max(least_s, least_arrived_s)
        # The lower bound and the best plan meet, up to rounding.
        if least_s >= best_s * (1 - ROUNDING):
            break
    # Rounding can make the lower bound exceed the best plan by a little, although no bound
    # is above the time of a plan.
    return best_ends, min(least_s, best_s)


class _Pass(NamedTuple):
    """One computation of all fronts of a side.

    Attributes
    ----------
    side : {PREFIXES, SUFFIXES}
        The side from which the network is read.
    most : int
        The most points that a front keeps.
    is_lower_bound : bool
        Whether the fronts are to be lower bounds. If so, points that lie close together
        are replaced by their corner, and otherwise by the most promising of them.
    """

    side: int
    most: int
    is_lower_bound: bool


def _passes() -> Iterator[_Pass]:
    """Yield passes without end, by suffixes and prefixes in turn, with ever more points.

    A prefix is the first tensors of the network, and a suffix is the last ones. A pass
    computes the Pareto front of each prefix, or of each suffix. A point of a front has two
    times of a plan of these tensors. For a prefix, they are how long it takes to select the
    largest gradients of its groups, which alone are sent, and when its last message ends. A
    front with more than ``most`` points is cut into ``most`` runs of neighbouring points, and
    a single point replaces each run. In a pass for a bound, this point has the smallest value
    of each time in the run, so no plan of the run is better. In a pass for a plan, it is the
    most promising point of the run, which is that of a real plan.

    After a first cheap bound, turns of suffixes and of prefixes alternate, because the bounds
    of one side rule out points of the other side. Each turn keeps MORE_POINTS times as many
    points as the turn before. A turn of suffixes is a pass for a bound. A turn of prefixes is
    a pass for a plan and then one for a bound. Suffixes need no pass for a plan, because
    the longest suffix and the longest prefix are both the whole network, with the same
    plans.
    """
    # A cheap first bound, for which one point of each front is enough.
    yield _Pass(PREFIXES, most=1, is_lower_bound=True)
    for turn in count():
        side = SUFFIXES if turn % 2 == 0 else PREFIXES
        most = FEWEST_POINTS * MORE_POINTS**turn
        # A better plan rules out more points of later passes, so the pass for a plan comes
        # before the pass for a bound.
        if side == PREFIXES:
            yield _Pass(side, most, is_lower_bound=False)
        yield _Pass(side, most, is_lower_bound=True)


def _mirrored_ends(ends: tuple[int, ...]) -> tuple[int, ...]:
    """Return the ends of a plan if its tensors are numbered from the last to the first."""
    n = ends[-1]
    # The last end is the end of the network, and is no cut between two groups. A cut
    # behind k tensors has n - k tensors before it from the other end.
    cuts = [n - end for end in reversed(ends[:-1])]
    return (*cuts, n)


class _Candidates(NamedTuple):
    """The points to which one more group leads, before any of them is dropped.

    Attributes
    ----------
    selected_s, arrived_s : ndarray, shape (m,)
        The coordinates of each point, as in `Front`, in no order.
    previous : ndarray of int, shape (m,)
        The state (of `_States`) to which the group was added.
    """

    selected_s: Floats
    arrived_s: Floats
    previous: Ints


class _States:
    """The points of the fronts of all prefixes, and how each was reached.

    A point has the two times of a plan of its prefix: how long the largest gradients of its
    groups take to be selected, and when its last message arrives. A state is a point with a
    number. Its values are in arrays by this number, in which the states of a prefix are
    neighbours.

    Parameters
    ----------
    n : int
        The number of tensors.
    most : int
        The most points that a front has.

    Attributes
    ----------
    selected_s, arrived_s : ndarray
        The coordinates of each state, as in `Front`.
    prefix : ndarray of int
        The number of tensors in the prefix of each state.
    previous : ndarray of int
        The state before the last group of each state.
    begin, n_states : ndarray of int, shape (n + 1,)
        The first state of each prefix, and how many states there are.
    count : int
        The number of all states so far.
    """

    def __init__(self, n: int, most: int) -> None:
        # Room for ``most`` points of each of n prefixes, and one of the empty prefix.
        capacity = n * most + 1
        self.selected_s = np.zeros(capacity)
        self.arrived_s = np.zeros(capacity)
        self.prefix = np.zeros(capacity, np.int64)
        self.previous = np.zeros(capacity, np.int64)
        self.begin = np.zeros(n + 1, np.int64)
        self.n_states = np.zeros(n + 1, np.int64)
        self.count = 0
        # No state is before the one of the empty prefix. Its ``previous`` is never read.
        self.add(0, NOTHING_SENT, previous=np.zeros(1, np.int64))

    def add(self, prefix: int, front: Front, previous: Ints) -> None:
        """Add the points of a front as states.

        ``prefix`` is the number of tensors of the prefix. ``front`` may be empty.
        ``previous`` has for each point the state from which it was reached.
        """
        new = slice(self.count, self.count + len(previous))
        self.selected_s[new] = front.selected_s
        self.arrived_s[new] = front.arrived_s
        self.prefix[new] = prefix
        self.previous[new] = previous
        self.begin[prefix] = self.count
        self.n_states[prefix] = len(previous)
        self.count = new.stop

    def indices(self, prefixes: Ints) -> Ints:
        """Return the states of the prefixes, one prefix after the other.

        If two prefixes have the states 5 and 6, and 9, the result is [5, 6, 9].
        """
        n_states = self.n_states[prefixes]
        # The states of a prefix are consecutive numbers, which are at consecutive
        # positions of the result. So a state is its position plus a shift, which is the
        # same for all states of a prefix.
        begin_in_result = n_states.cumsum(dtype=np.int64) - n_states
        shift = self.begin[prefixes] - begin_in_result
        positions = np.arange(n_states.sum(), dtype=np.int64)
        return positions + shift.repeat(n_states)

    def with_one_more_group(
        self, groups: Groups, last: int, firsts: Ints
    ) -> _Candidates:
        """Return the points of plans whose last group is one of several.

        The last group ends with tensor ``last``, and begins with one of the tensors
        ``firsts``. It can follow each state of the prefix that ends before its first tensor,
        and leads to one point from each of these states. ``groups`` has the times of all
        groups, in arrays by last and first tensor.
        """
        # The prefix before the first tensor has as many tensors as this tensor's number.
        previous = self.indices(firsts)
        # The three times of the last group, for each of these states that it follows.
        n_states = self.n_states[firsts]
        ready_s, selecting_s, sending_s = (
            times_s[last, firsts].repeat(n_states) for times_s in groups
        )
        # Without any selection, the group would be ready at `ready_s`. Each selection is
        # compute that delays all later compute, so those of earlier groups count, too. The
        # message of the group also waits for the last message of the state.
        selected_s = self.selected_s[previous] + selecting_s
        arrived_s = np.maximum(self.arrived_s[previous], ready_s + selected_s)
        arrived_s += sending_s
        return _Candidates(selected_s, arrived_s, previous)

    def plan(self) -> tuple[int, ...]:
        """Return the ends of the groups that lead to the state that was added last."""
        state = self.count - 1
        ends = []
        # From the last group back to the first, until the empty prefix, which has 0 tensors.
        while self.prefix[state]:
            ends.append(int(self.prefix[state]))
            state = int(self.previous[state])
        return tuple(reversed(ends))


def _fronts(
    groups: Groups,
    prefixes: Sequence[Front],
    suffixes: Sequence[Front],
    limit_s: float,
    this_pass: _Pass,
) -> tuple[list[Front], tuple[int, ...]]:
    """Return the fronts of all prefixes, and the best plan that is found along the way.

    A prefix is made of a shorter prefix and one more group. Its front is found from the fronts of
    all shorter ones: points are added for each last group, and are dropped if another point is
    better in both coordinates or if no iteration that goes on from them ends in time.

    The two coordinates of a point are `selected_s` and `arrived_s`, as in `Front`: how long a
    plan of the prefix selects gradients, and when its last message arrives. Along a front,
    `selected_s` rises and `arrived_s` falls.

    The function returns the fronts of all suffixes if it is called with ``groups.mirrored()``,
    with the bounds of suffixes as ``prefixes`` and with those of prefixes as ``suffixes``. In the
    meaning of both coordinates, selecting and sending are then exchanged.

    Parameters
    ----------
    groups : Groups
        The times of all groups of n tensors.
    prefixes : sequence of Front, length n + 1
        Lower bounds of the fronts of all prefixes, by the number of tensors. A point of a
        prefix that may lead to the best plan has both coordinates at least as large as some
        point of the bound. The bounds serve to rule out groups.
    suffixes : sequence of Front, length n + 1
        Lower bounds of the fronts of all suffixes, by the number of tensors. They serve to rule
        out groups, and points whose iterations would end too late.
    limit_s : float
        The time of the best plan so far. A point is left out if no iteration that goes
        on from this point ends by then.
    this_pass : _Pass
        How many points a front keeps, and whether the fronts are to be lower bounds.

    Returns
    -------
    fronts : list of Front, length n + 1
        The front of each prefix, by the number of tensors, or a lower bound of it in a pass
        for lower bounds.
    ends : tuple of int
        The plan to which the most promising points lead, empty if no point is left.
    """
    n = len(suffixes) - 1
    # Whether a plan with each group may end by the limit, by last and first tensor.
    useful = _useful(groups, prefixes, suffixes, limit_s)
    fronts = [NOTHING_SENT]
    states = _States(n, this_pass.most)
    for last in range(n):
        # Branch: the last group ends with tensor `last`, and begins at one of the tensors
        # `firsts`.
        firsts = useful[last].nonzero()[0]
        selected_s, arrived_s, previous = states.with_one_more_group(
            groups, last, firsts
        )
        # Bound: drop points that are dominated, and points from which no iteration can
        # end by the limit, up to rounding. `kept` has indices of points.
        kept = undominated(selected_s, arrived_s)
        suffix = suffixes[n - last - 1]
        ends_s = suffix.earliest_end_s(selected_s[kept], arrived_s[kept])
        in_time = ends_s <= limit_s * (1 + ROUNDING)
        kept = kept[in_time]
        front = Front(selected_s[kept], arrived_s[kept])

        # A front with too many points keeps one point for each run of neighbours. In a pass for
        # lower bounds this is a corner, which perhaps no plan reaches. It then gets the plan of
        # the representative of its run, which is the most promising point.
        if len(kept) > this_pass.most:
            front, representatives = _thinned(front, ends_s[in_time], this_pass)
            kept = kept[representatives]
        fronts.append(front)
        states.add(last + 1, front, previous[kept])
    if not len(fronts[-1].selected_s):
        return fronts, ()
    # In the front of all tensors, the best point is the one with the least ``arrived_s``, because
    # no tensor follows. This is the last point of the front. It is the state that was added last,
    # whose plan `states.plan` returns.
    return fronts, states.plan()


def _thinned(front: Front, ends_s: Floats, this_pass: _Pass) -> tuple[Front, Ints]:
    """Return a front of at most ``this_pass.most`` points that replaces a larger one.

    Parameters
    ----------
    front : Front
        The front of m points, which is cut into runs of neighbours.
    ends_s : ndarray, shape (m,)
        The earliest end of an iteration that continues from each point, in seconds.
    this_pass : _Pass
        How many points a front keeps, and whether the front is to be a lower bound.

    Returns
    -------
    thinned : Front
        One point for each run: its corner, the least value of each coordinate, if the front
        is to be a lower bound, and otherwise its most promising point.
    representatives : ndarray of int
        The index of the most promising point of each run, from which an iteration may end
        the earliest. Plans go through this point, also where the front has the corner.
    """
    begins = front.runs(this_pass.most)
    representatives = _smallest_of_each(ends_s, begins)
    if this_pass.is_lower_bound:
        # Along a front, selected_s rises and arrived_s falls. So the corner of a run has the
        # selected_s of its first point and the arrived_s of its last point.
        lasts = np.append(begins[1:], len(front.selected_s)) - 1
        thinned = Front(front.selected_s[begins], front.arrived_s[lasts])
    else:
        # A front for a plan needs points that plans reach, and no plan need reach a corner.
        thinned = Front(
            front.selected_s[representatives], front.arrived_s[representatives]
        )
    return thinned, representatives


def _smallest_of_each(values: Floats, begins: Ints) -> Ints:
    """Return the index of the smallest value in each run.

    Of several smallest values that are equal up to rounding, the last one is taken.

    Parameters
    ----------
    values : ndarray, shape (m,)
        Values that are cut into consecutive runs.
    begins : ndarray of int, shape (r,)
        The index with which each run begins.

    Returns
    -------
    ndarray of int, shape (r,)
        Indices into ``values``.
    """
    # The run to which each value belongs.
    lengths = np.diff(begins, append=len(values))
    run = np.repeat(np.arange(len(begins)), lengths)
    # The least value of each run, with a margin: values that ought to be equal may differ
    # by rounding. So there may be several candidates in a run.
    limits = np.minimum.reduceat(values, begins) * (1 + ROUNDING)
    candidates = (values <= limits[run]).nonzero()[0]
    # Each candidate overwrites the one before it in its run, so the last one remains.
    smallest = np.empty_like(begins)
    smallest[run[candidates]] = candidates
    return smallest


def undominated(first: Floats, second: Floats) -> Ints:
    """Return the Pareto front of points, smaller being better.

    Parameters
    ----------
    first, second : ndarray, shape (m,)
        The two coordinates of each point.

    Returns
    -------
    ndarray of int
        Indices of the points that no other point equals or undercuts in both
        coordinates, in the order of increasing ``first``. Of identical points, one is
        kept.

    Examples
    --------
    >>> undominated(np.array([1.0, 2.0, 3.0]), np.array([5.0, 6.0, 4.0])).tolist()
    [0, 2]
    """
    # In the order of ``first``, only a point whose second coordinate is lower than all
    # before it can be on the front.
    ordered = first.argsort()
    lowest = np.minimum.accumulate(second[ordered])
    lower_than_all_before = np.ones(len(first), bool)
    lower_than_all_before[1:] = lowest[1:] < lowest[:-1]
    ordered = ordered[lower_than_all_before]
    # Of the remaining points with an equal first coordinate, the last one has the lowest
    # second coordinate. It is the one that is followed by a larger first coordinate.
    ordered_first = first[ordered]
    last_of_equals = np.ones(len(ordered), bool)
    last_of_equals[:-1] = ordered_first[1:] > ordered_first[:-1]
    return np.asarray(ordered[last_of_equals])


def _useful(
    groups: Groups,
    prefixes: Sequence[Front],
    suffixes: Sequence[Front],
    limit_s: float,
) -> NDArray[np.bool_]:
    """Return for each group whether a plan with this group may end by ``limit_s``.

    The corner of a front is the smallest value of each coordinate. The corners of the
    fronts of the prefix before the group and of the suffix after it bound from below when
    such a plan ends.

    Parameters
    ----------
    groups : Groups
        The times of all groups of n tensors.
    prefixes, suffixes : sequence of Front, length n + 1
        Lower bounds of the fronts of all prefixes and suffixes, by the number of
        tensors.
    limit_s : float
        The latest end that is of interest, in seconds.

    Returns
    -------
    ndarray of bool, shape (n, n)
        The element [last, first] is for the group from tensor `first` to tensor `last`.
    """
    n = len(suffixes) - 1
    # The corner of the prefix before each first tensor. Both coordinates have the shape (n,).
    corners_before = np.array([front.corner for front in prefixes[:n]])
    before_selected_s, before_arrived_s = corners_before.T
    # After the group that ends with tensor `last`, n - last - 1 tensors remain. In
    # reverse, the corners of suffixes are in the order of `last`, one row for each.
    corners_after = np.array([front.corner for front in suffixes[:n]])[::-1]
    # A suffix is read from its end, so its coordinates are others than those of a prefix. The
    # first one is the time that sending all its messages takes. The second one is when the last
    # of them arrives if nothing is selected or sent before the suffix. Slices keep the shape
    # (n, 1), which is broadcast over the columns.
    after_sending_s = corners_after[:, :1]
    after_arrived_s = corners_after[:, 1:]
    # The coordinates of the prefix that ends with the group: how long it selects, and when
    # its last message arrives.
    selected_s = before_selected_s + groups.selecting_s
    start_s = np.maximum(before_arrived_s, groups.ready_s + selected_s)
    arrived_s = start_s + groups.sending_s
    # An empty front has an infinite corner, and in the empty prefix or suffix the last
    # message arrives at minus infinity. Their sum is not a number, which compares as
    # False, so that such a group counts as not useful.
    with np.errstate(invalid="ignore"):
        # The messages of the suffix follow the last message of the prefix, which gives the
        # first sum. The selections of the prefix delay the arrival of the suffix, which gives
        # the second one.
        ends_s = np.maximum(arrived_s + after_sending_s, selected_s + after_arrived_s)
    # The margin ROUNDING keeps a group whose end equals the limit but for rounding. Where
    # the first tensor comes after the last one, there is no group, and `np.tril` is False.
    return np.asarray(np.tril(ends_s <= limit_s * (1 + ROUNDING)))
