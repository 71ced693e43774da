"""Messages over a link that does not have its whole rate all the time.

A message that takes T alone, of which the link is busy for w, takes T + w (1/s - 1) where the link has a
share s of its rate. Software and bytes alternate step by step, so that where the share changes under way,
what is left of the message is left of both.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from ddlkit.core.errors import UserError
from ddlkit.core.iteration import group_ends
from ddlkit.core.workload import Floats


@dataclass(frozen=True)
class Pace:
    """The share of a link's rate that messages get: ``shares[k]`` from ``at_s[k]`` on; the first from 0.

    Raises UserError for times that do not begin at 0 or do not increase, and shares that are not above 0.

    >>> Pace((0.0, 2.0), (1.0, 0.5)).ends([0.0], [4.0], [4.0]).tolist()
    [6.0]
    """

    at_s: tuple[float, ...] = (0.0,)
    shares: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        rising = all(b > a for a, b in zip(self.at_s, self.at_s[1:], strict=False))
        if len(self.at_s) != len(self.shares) or self.at_s[:1] != (0.0,) or not rising:
            raise UserError(f"pace: shares {self.shares} at {self.at_s} s: one each, from 0 s on")
        if not all(0 < share < np.inf for share in self.shares):
            raise UserError(f"pace: shares {self.shares}: above 0, and finite")

    def ends(self, ready_s: ArrayLike, alone_s: ArrayLike, wire_s: ArrayLike) -> Floats:
        """(G,) end of each message, one after the other, none before it is ready.

        alone_s : (G,) of each with the whole rate; wire_s : (G,) for which the link is busy then
        """
        ready, alone, wire = (np.asarray(one, float) for one in (ready_s, alone_s, wire_s))
        slow = np.array([alone + wire * (1 / share - 1) for share in self.shares])
        if len(self.at_s) == 1:
            return group_ends(ready, slow[0])
        ends, now_s, edges = np.empty(ready.shape), 0.0, (*self.at_s[1:], np.inf)
        for group, begin_s in enumerate(ready.tolist()):
            now_s, left = max(now_s, begin_s), 1.0
            while left > 0:
                piece = bisect_right(self.at_s, now_s) - 1
                whole_s, rest_s = float(slow[piece, group]), edges[piece] - now_s
                if left * whole_s <= rest_s:
                    now_s, left = now_s + left * whole_s, 0.0
                else:
                    now_s, left = edges[piece], left - rest_s / whole_s
            ends[group] = now_s
        return ends


def in_turns(low: float, on_s: float, off_s: float, phase_s: float, until_s: float) -> Pace:
    """A share ``low`` for ``on_s``, then the whole rate for ``off_s``, and so on, until a time at least.

    phase_s : how far into such a turn time 0 is
    """
    period_s = on_s + off_s
    begun_s = -(phase_s % period_s)
    edges, shares = [], []
    while begun_s < until_s:
        edges += [begun_s, begun_s + on_s]
        shares += [low, 1.0]
        begun_s += period_s
    first = bisect_right(edges, 0.0) - 1
    return Pace((0.0, *edges[first + 1 :]), tuple(shares[first:]))
