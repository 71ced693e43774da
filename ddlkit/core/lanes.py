"""Several collectives under way at once: each has a start-up of its own, but they share the link.

gloo's process group carries two by default. A message first takes its start-up, in which the link is free
for others, then moves its bytes at an equal share of the link's rate.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddlkit.core.errors import UserError

Floats = NDArray[np.float64]


def shared_ends(
    ready_s: ArrayLike, startup_s: ArrayLike, wire_s: ArrayLike, in_flight: int = 2
) -> Floats:
    """(G,) end of each message when at most ``in_flight`` are under way, admitted in order.

    ready_s, startup_s, wire_s : (G,) when each may begin, its start-up, and its bytes over the whole rate

    With ``in_flight`` 1 the recursion of `ddlkit.core.simulate`. Raises UserError below 1.
    """
    if in_flight < 1:
        raise UserError(f"{in_flight} messages in flight: at least 1")
    ready, startup, wire = (
        np.array(column, dtype=float)
        for column in np.broadcast_arrays(
            *(np.atleast_1d(column) for column in (ready_s, startup_s, wire_s))
        )
    )
    ends = np.full(len(ready), np.inf)
    moving_at = np.full(len(ready), np.inf)  # when its start-up is over; inf: not admitted yet
    left = wire.copy()
    admitted, now_s = 0, 0.0
    while not np.isfinite(ends).all():
        under_way = np.isfinite(moving_at) & ~np.isfinite(ends)
        if admitted < len(ready) and under_way.sum() < in_flight and ready[admitted] <= now_s:
            moving_at[admitted] = now_s + startup[admitted]
            admitted += 1
            continue
        moving = under_way & (moving_at <= now_s)
        finished = moving & (left <= 0)
        if finished.any():
            ends[finished] = now_s
            continue
        step_s = [moving_at[under_way & ~moving].min(initial=np.inf) - now_s]
        if admitted < len(ready) and under_way.sum() < in_flight:
            step_s.append(ready[admitted] - now_s)
        if moving.any():
            first = np.flatnonzero(moving)[left[moving].argmin()]
            step_s.append(left[first] * moving.sum())
        step = min(step_s)
        if moving.any():
            done = step == step_s[-1]
            left[moving] -= step / moving.sum()
            if done:
                left[first] = 0.0  # not a rounding error short of it
        now_s += step
        # Waiting for a moment must reach it, whatever its last digit.
        waiting = under_way & ~moving & np.isclose(moving_at, now_s, rtol=1e-12, atol=0)
        moving_at[waiting] = now_s
        if admitted < len(ready) and np.isclose(ready[admitted], now_s, rtol=1e-12, atol=0):
            ready[admitted] = now_s
    return ends
