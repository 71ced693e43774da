"""What compute and messages take from each other where both are real, and what DDP's buckets take."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from ddlkit.core.errors import UserError
from ddlkit.core.workload import Floats

NOTHING, MESSAGES, COMPUTE, BUCKETS = "nothing", "messages", "compute", "buckets"
"""What something may have been timed beside, in a table ``slowdown``."""
SLOWDOWN_KEY = ["network", "batch", "ranks", "link"]
DRAWS = 200


@dataclass(frozen=True, eq=False)
class Contention:
    """Slowdowns by a message's size, as of a `Link`, and what buckets take, as of an `Iteration`.

    Between sizes slowdowns are linear in the logarithm; beyond them, those of the nearest.

    bytes : (k,) sizes, increasing; slowdowns : (2, k) of compute beside them, and of them beside compute
    draws : (B, 2, k) of both, from resampled rounds
    """

    bytes: Floats
    slowdowns: Floats
    draws: Floats
    copy_s_per_byte: float = 0.0
    bucket_s: float = 0.0

    @classmethod
    def of(cls, rows: pd.DataFrame, draws: int = DRAWS) -> Contention:
        """Return what the rows of a table ``slowdown`` say, of one network, batch, number of ranks and link.

        Every ratio is of one round; compute is backward, beside which messages travel. Raises UserError where
        the table is of several.
        """
        if len(several := rows[SLOWDOWN_KEY].drop_duplicates()) != 1:
            raise UserError(
                f"slowdown: a table of one network, batch and link, not {len(several)}"
            )
        keys = ["quantity", "beside", "bytes", "messages", "repeat"]
        times = rows.groupby(keys)["seconds"].mean()
        alone = times["backward", NOTHING].droplevel([0, 1])
        beside = times["backward", MESSAGES].droplevel("messages").unstack("repeat")
        both, own = (
            times["message", what].droplevel("messages").unstack("repeat")
            for what in (COMPUTE, NOTHING)
        )
        ratios = np.stack(
            [beside / alone[beside.columns].to_numpy(), both / own]
        )  # (2, k, rounds)
        rounds = ratios.shape[-1]
        drawn = np.random.default_rng(0).integers(0, rounds, (draws, rounds))
        resampled = np.median(ratios[..., drawn], axis=-1).transpose(2, 0, 1)
        slowdowns, draws_of = (
            np.maximum(0.0, x - 1) for x in (np.median(ratios, -1), resampled)
        )
        return cls(beside.index.to_numpy(float), slowdowns, draws_of, *_buckets(rows))

    @classmethod
    def none(cls) -> Contention:
        """Return that of compute and messages which take nothing from each other."""
        return cls(np.ones(1), np.zeros((2, 1)), np.zeros((1, 2, 1)))

    def copying(self, copy_s_per_byte: float) -> Contention:
        """Return the same with copies that were timed by themselves."""
        return replace(self, copy_s_per_byte=copy_s_per_byte)

    def of_messages(self, n_bytes: ArrayLike, drawn: int = 0) -> Floats:
        """Return (2, G) slowdowns of and by messages of (G,) bytes; so many draws of them, (2, drawn, G)."""
        at, known = np.log(np.asarray(n_bytes, float)), np.log(self.bytes)
        right = np.clip(np.searchsorted(known, at), 1, max(1, len(known) - 1))
        values = self.slowdowns
        if drawn:
            chosen = np.random.default_rng(1).integers(0, len(self.draws), drawn)
            values = np.moveaxis(self.draws[chosen], 1, 0)
        if len(known) == 1:
            return np.broadcast_to(values, (*values.shape[:-1], len(at))).copy()
        share = np.clip(
            (at - known[right - 1]) / (known[right] - known[right - 1]), 0.0, 1.0
        )
        return np.asarray(
            values[..., right - 1] * (1 - share) + values[..., right] * share
        )


def _buckets(rows: pd.DataFrame) -> tuple[float, float]:
    """Return seconds a byte to copy gradients, and for each bucket, where every round shows some.

    The latter by DDP whose buckets nobody sends: as many as there are gradients, over one.
    """
    copies = rows[rows["quantity"] == "copy"]
    copy_s = (
        float((copies["seconds"] / copies["bytes"]).median()) if len(copies) else 0.0
    )
    table = rows[rows["beside"] == BUCKETS].pivot_table(
        "seconds", "messages", "repeat", "sum"
    )
    if len(table) < 2:
        return copy_s, 0.0
    each_s = (table.iloc[-1] - table.iloc[0]) / (table.index[-1] - table.index[0])
    return copy_s, float(each_s.median()) if each_s.min() > 0 else 0.0
