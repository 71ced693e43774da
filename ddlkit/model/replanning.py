"""Planning again: what messages cost now, from the last messages that runs have sent."""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from ddlkit.core.cost import MessageCost, Table
from ddlkit.core.errors import UserError
from ddlkit.core.units import KIB, MIB

SIZES = np.geomspace(KIB, 512 * MIB, 19 * 16 + 1)
"""At which a refitted cost is written down: so dense that a straight line between them is one."""
KEPT, AGAIN, KNEW, WATCHED = "kept", "again", "knew", "watched"
"""Plans: for the other rate; made again from messages at this one; for this rate. And the first, watched."""
APART = 2.0
"""Sizes that differ by less do not tell a start-up from bytes."""


def last_messages(timeline: pd.DataFrame, case: str, iterations: int) -> pd.DataFrame:
    """Columns bytes and seconds: what the messages of a case took in its last so many iterations.

    timeline : rows of the table, of one rank at least; a message begins when it may, so none is counted
        while it waits for the one before

    Raises UserError where there is none.
    """
    mine = timeline[(timeline["case"] == case) & (timeline["stream"] == "communication")]
    first = mine[mine["rank"] == mine["rank"].min()] if "rank" in mine else mine
    last = sorted(first["repeat"].unique())[-iterations:]
    found = first[first["repeat"].isin(last)]
    if found.empty:
        raise UserError(f"case {case}: no message times to plan again from")
    seconds = found["end_s"] - found["start_s"]
    return pd.DataFrame({"bytes": found["bytes"].to_numpy(), "seconds": seconds.to_numpy()})


def refitted(before: MessageCost, n_bytes: ArrayLike, seconds: ArrayLike) -> MessageCost:
    """The cost as the last messages say: (n,) sizes and times, sent under another plan and rate maybe.

    A plan sends few sizes, so the form of the cost is kept, and what messages take longer than before is
    laid on a straight line: a start-up and a time per byte, by least relative squares; of sizes that lie
    within APART of each other, the time per byte alone. Never less than nothing: a cost stays above zero.

    Raises UserError for no message.

    >>> from ddlkit.core.cost import AlphaBeta
    >>> now = refitted(AlphaBeta(1e-3, 1e-8), [1e6, 4e6], [0.041, 0.161])
    >>> round(now(2.0**20), 6)
    0.042943
    """
    sizes, took = np.asarray(n_bytes, float), np.asarray(seconds, float)
    if not sizes.size:
        raise UserError("no message to fit a cost to: let an iteration pass first")
    columns = [np.ones_like(sizes), sizes]
    if sizes.max() < APART * sizes.min():
        columns = columns[1:]
    rows = np.stack(columns, axis=1) / took[:, None]
    more = np.linalg.lstsq(rows, (took - before(sizes)) / took, rcond=None)[0]
    later_s = more[-1] * SIZES + (more[0] if len(more) > 1 else 0.0)
    known = before(SIZES)
    labels = {name: getattr(before, name) for name in ("collective", "workers", "algorithm")}
    return Table(SIZES, np.maximum(known + later_s, 1e-3 * known), **labels)
