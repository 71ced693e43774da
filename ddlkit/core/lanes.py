"""Several collectives under way at once: each has a start-up of its own, but they share the link.

gloo's process group carries two by default. A message first takes its start-up, in which the link is free
for others, then moves its bytes at an equal share of the link's rate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddlkit.core.cost import MessageCost
from ddlkit.core.errors import UserError

Floats = NDArray[np.float64]


@dataclass
class _Message:
    """One under way: from ``moves_at_s`` on its bytes move, which take ``left_s`` of the whole link."""

    number: int
    moves_at_s: float
    left_s: float


def shared_ends(
    ready_s: ArrayLike, startup_s: ArrayLike, wire_s: ArrayLike, in_flight: int = 2
) -> Floats:
    """(G,) end of each message when at most ``in_flight`` are under way, admitted in order.

    ready_s, startup_s, wire_s : (G,) when each may begin, its start-up, and its bytes over the whole rate

    With ``in_flight`` 1 the recursion of `ddlkit.core.simulate`. Raises UserError below 1.
    """
    if in_flight < 1:
        raise UserError(f"{in_flight} messages in flight: at least 1")
    columns = np.broadcast_arrays(*map(np.atleast_1d, (ready_s, startup_s, wire_s)))
    ready, startup, wire = (np.asarray(column, dtype=float).tolist() for column in columns)
    ends = np.zeros(len(ready))
    under_way: list[_Message] = []
    admitted, now_s = 0, 0.0
    while admitted < len(ready) or under_way:
        free = admitted < len(ready) and len(under_way) < in_flight
        if free and ready[admitted] <= now_s:
            under_way.append(_Message(admitted, now_s + startup[admitted], wire[admitted]))
            admitted += 1
            continue
        moving = [one for one in under_way if one.moves_at_s <= now_s]
        moments_s = [one.moves_at_s for one in under_way if one.moves_at_s > now_s]
        if free:
            moments_s.append(ready[admitted])
        next_s = min(moments_s, default=math.inf)
        first = min(moving, key=lambda one: one.left_s, default=None)
        ends_s = now_s + first.left_s * len(moving) if first else math.inf
        moved_s = (min(next_s, ends_s) - now_s) / max(len(moving), 1)
        for one in moving:
            one.left_s -= moved_s
        now_s = min(next_s, ends_s)
        if first and ends_s <= next_s:
            ends[first.number] = now_s
            under_way.remove(first)
    return ends


def halves(cost: MessageCost, seconds: ArrayLike) -> tuple[float, Floats]:
    """(start-up, (G,) time on the wire) of messages that take ``seconds`` alone, the first of any size's.

    The start-up is what the smallest message costs: nearly nothing of it is the link's.
    """
    startup_s = float(np.asarray(cost(1.0)))
    return startup_s, np.maximum(0.0, np.asarray(seconds, dtype=float) - startup_s)
