"""From measured collectives to what a message costs, how far single messages scatter, and what they share."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from ddlkit.core.case import Case
from ddlkit.core.cost import MessageCost, Samples
from ddlkit.core.errors import UserError
from ddlkit.core.fit import fit
from ddlkit.core.iteration import PLAIN
from ddlkit.core.link import Link, burst_s, wire_s_per_byte
from ddlkit.core.sparse import SparseGather
from ddlkit.model.noise import Noise

STOLEN_LIMIT = 0.02
"""Share of the cores that a machine's host may take while something is measured."""


@dataclass(frozen=True, eq=False)
class Communication:
    """What is known of messages between a number of workers: all of a prediction that is not compute.

    cost : of a message; draws : costs fitted to bootstrap resamples, to say how sure it is
    link : what messages share; noise : how single messages differ from the cost, None: not known
    """

    cost: MessageCost
    draws: Sequence[MessageCost] = ()
    link: Link = PLAIN
    noise: Noise | None = None

    def sparse(self, density: float) -> Communication:
        """The same for groups of which only the largest elements are gathered; as it is at density 1."""
        if density == 1.0:
            return self
        draws = [SparseGather(draw, density) for draw in self.draws]
        return replace(self, cost=SparseGather(self.cost, density), draws=draws)


@dataclass(frozen=True)
class Calibration:
    """Costs fitted to recorded collectives, their noise, and what their messages share.

    known : by (link, workers, collective)
    """

    known: Mapping[tuple[str, int, str], Communication]

    @classmethod
    def of(cls, collectives: pd.DataFrame, form: str = "table", draws: int = 200) -> Calibration:
        """Fit ``form`` to each link, number of ranks and collective of a collectives table.

        draws : bootstrap resamples for the intervals; 0 where none is wanted, which is faster

        Samples that the machine's host disturbed are left out where the size has others.
        """
        known = {}
        keys = ["link", "ranks", "collective"]
        for (link, ranks, collective), every in undisturbed(collectives).groupby(keys):
            key = str(link), int(ranks), str(collective)
            rows = every[every["in_flight"] == 1]
            sizes, seconds = rows["bytes"].to_numpy(), rows["seconds"].to_numpy()
            per_sample = rows.groupby("bytes")["messages_per_sample"].first()
            found = fit(
                form,
                sizes,
                seconds,
                collective=key[2],
                workers=key[1],
                algorithm=str(rows["algorithm"].iloc[0]),
                samples=Samples(per_sample.index.to_numpy(float), per_sample.to_numpy(float)),
                draws=draws,
            )
            noise = Noise.of(sizes, seconds, rows["session"], rows["messages_per_sample"])
            known[key] = Communication(found.cost, found.draws, shared_link(every), noise)
        return cls(known)

    def without_credit(self) -> Calibration:
        """The same for links that save nothing while they rest: a message costs what it costs."""
        bare = {
            key: replace(one, link=Link(software=one.link.software))
            for key, one in self.known.items()
        }
        return Calibration(bare)

    def between(
        self, link: str, workers: int, collective: str = "all_reduce", in_flight: int = 1
    ) -> Communication:
        """Messages over ``link`` among ``workers``. Raises UserError when that was not calibrated."""
        key = (link, workers, collective)
        if key not in self.known:
            known = "; ".join(f"{what} over {where}, {n} ranks" for where, n, what in self.known)
            raise UserError(
                f"no calibration for {collective} over {link} with {workers} ranks: there is {known}"
            )
        found = self.known[key]
        return replace(found, link=replace(found.link, in_flight=in_flight))

    def of_case(self, case: Case) -> Communication:
        """Messages of a case, sparse where it is. Raises UserError when its lab was not calibrated."""
        dense = self.between(case.link, case.workers, case.collective, case.in_flight)
        return dense.sparse(case.density) if case.collective == "all_gather" else dense


def shared_link(samples: pd.DataFrame) -> Link:
    """What messages over a link share, by its calibration; no credit for a link that is not a lab's."""
    one, software = samples.iloc[0], software_at_once(samples)
    rate_bits_per_s = float(one["link_bits_per_s"])
    if not (str(one["link"]).startswith("lab:") and rate_bits_per_s):
        return Link(software=software)
    return Link(
        software=software,
        burst_s=burst_s(rate_bits_per_s),
        wire_s_per_byte=wire_s_per_byte(one["collective"], int(one["ranks"]), rate_bits_per_s),
    )


def software_at_once(samples: pd.DataFrame) -> float:
    """How many small messages the processor carries in the time of one; infinite where nothing shows it.

    Read off how much faster small messages go with several in flight than with one.
    """
    medians = samples.groupby(["in_flight", "bytes"])["seconds"].median().unstack("in_flight")
    faster = medians.rdiv(medians[1], axis=0).drop(columns=1).median()
    return float(np.clip(faster.max(), 1.0, None)) if len(faster) else math.inf


def undisturbed(collectives: pd.DataFrame) -> pd.DataFrame:
    """What a cost may be fitted to: messages, between ranks that had their cores.

    One rank alone sends nothing. Samples that lost more than STOLEN_LIMIT of the cores are left out of
    sizes that were measured better too.
    """
    collectives = collectives[collectives["ranks"] > 1]
    keys = ["link", "ranks", "collective", "in_flight", "bytes"]
    least = collectives.groupby(keys)["stolen"].transform("min")
    lost = collectives["stolen"].gt(STOLEN_LIMIT) & least.le(STOLEN_LIMIT)
    return collectives[~lost]
