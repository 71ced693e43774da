"""From measured collectives to what a message costs, how far single messages scatter, and what they share."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pandas as pd

from ddlkit.core.case import Case
from ddlkit.core.cost import MessageCost, Samples
from ddlkit.core.errors import UserError
from ddlkit.core.fit import Fit, fit
from ddlkit.core.iteration import PLAIN
from ddlkit.core.link import FRAMING, STEPS, Link, is_lab, read_link, wire_s_per_byte
from ddlkit.core.sparse import Selecting, SparseGather
from ddlkit.model.noise import Drift, Noise, Sessions

UNFITTED = "alpha_beta:wire"
"""The line that no fit is needed for: the time of the smallest message, and bytes at the link's known rate
less its framing."""
STOLEN_LIMIT = 0.02
"""Share of the cores that a machine's host may take while something is measured."""
LINK = ["link", "ranks", "collective"]
SAMPLED = ("bytes", "seconds", "session", "messages_per_sample")
POOLED = "pooled"
"""What tells how sessions drift, in tables of predictions: all links of a recording (`pooled`)."""


@dataclass(frozen=True, eq=False)
class Communication:
    """All of a prediction that is not compute: what is known of messages between some workers.

    cost : of a message; draws : costs fitted to bootstrap resamples, to say how sure it is
    link : what messages share; noise : how single messages differ from the cost, None: not known
    others : costs of other forms, fitted to the very same samples, by what each was asked as
    """

    cost: MessageCost
    draws: Sequence[MessageCost] = ()
    link: Link = PLAIN
    noise: Noise | None = None
    others: Mapping[str, MessageCost] = field(default_factory=dict)

    def sparse(self, density: float, selecting: Selecting | None = None) -> Communication:
        """Return the same for groups of which only the largest elements are gathered; itself at density 1.

        selecting : what it takes to select them, if the forecast shall add that to compute
        """
        if density == 1.0 and selecting is None:
            return self

        def gathered(dense: MessageCost) -> SparseGather:
            return SparseGather(dense, density, selecting=selecting)

        draws = [gathered(draw) for draw in self.draws]
        others = {form: gathered(other) for form, other in self.others.items()}
        return replace(self, cost=gathered(self.cost), draws=draws, others=others)


@dataclass(frozen=True)
class Calibration:
    """Costs fitted to recorded collectives, their noise, and what their messages share.

    known : by (link, workers, collective)
    """

    known: Mapping[tuple[str, int, str], Communication]

    @classmethod
    def of(
        cls,
        collectives: pd.DataFrame,
        form: str = "table",
        draws: int = 200,
        also: Collection[str] = (),
    ) -> Calibration:
        """Return ``form`` fitted to each link, number of ranks and collective of a collectives table.

        form : as `fit` takes it, or UNFITTED for links whose rate is known
        draws : bootstrap resamples for the intervals; 0 where none is wanted, which is faster
        also : further forms, without draws; UNFITTED is left out of a link whose rate is not known

        Samples that the machine's host disturbed are left out where the size has others.
        Raises UserError for messages that were sent step by step: training's are the library's own.
        """
        stepped = collectives["algorithm"].astype(str).str.startswith(STEPS)
        if stepped.any():
            name = collectives.loc[stepped, "algorithm"].iloc[0]
            raise UserError(f"no calibration of {name}: give it rows of the library's own messages")
        known = {}
        for key, every in by_link(undisturbed(collectives)):
            rows = every[every["in_flight"] == 1]
            fitted = _fitted(rows, form, draws)
            forms = [name for name in also if name != UNFITTED or rows["link_bits_per_s"].all()]
            others = {name: _fitted(rows, name, 0).cost for name in forms}
            noise = Noise.of(*(rows[name] for name in SAMPLED))
            known[key] = Communication(fitted.cost, fitted.draws, shared_link(every), noise, others)
        return cls(known)

    def without_credit(self) -> Calibration:
        """Return the same for links that save nothing while they rest."""
        bare = {
            key: replace(communication, link=Link(software=communication.link.software))
            for key, communication in self.known.items()
        }
        return Calibration(bare)

    def between(
        self, link: str, workers: int, collective: str = "all_reduce", in_flight: int = 1
    ) -> Communication:
        """Return messages over ``link`` among ``workers``. Raises UserError when not calibrated."""
        key = (link, workers, collective)
        if key not in self.known:
            known = "; ".join(f"{what} over {where}, {n} ranks" for where, n, what in self.known)
            asked = f"{collective} over {link} with {workers} ranks"
            raise UserError(f"no calibration for {asked}: there is {known}")
        communication = self.known[key]
        return replace(communication, link=replace(communication.link, in_flight=in_flight))

    def of_case(self, case: Case) -> Communication:
        """Return messages of a case, sparse where it is. Raises UserError when its lab was not calibrated."""
        dense = self.between(case.link, case.workers, case.collective, case.in_flight)
        return dense.sparse(case.density) if case.collective == "all_gather" else dense


def _fitted(rows: pd.DataFrame, form: str, draws: int) -> Fit[MessageCost]:
    """Return ``form`` fitted to one link's messages of one collective, sent one by one."""
    collective, workers = str(rows["collective"].iloc[0]), int(rows["ranks"].iloc[0])
    if form == UNFITTED:
        rate_bits_per_s = float(rows["link_bits_per_s"].iloc[0])
        if not rate_bits_per_s:
            raise UserError(f"no rate is known of {rows['link'].iloc[0]}: {UNFITTED} needs one")
        framing = _framing(str(rows["link"].iloc[0]))
        wire_s = wire_s_per_byte(collective, workers, rate_bits_per_s, framing)
        form = f"alpha_beta:{wire_s!r}"
    per_sample = rows.groupby("bytes")["messages_per_sample"].first()
    return fit(
        form,
        rows["bytes"],
        rows["seconds"],
        collective=collective,
        workers=workers,
        algorithm=str(rows["algorithm"].iloc[0]),
        samples=Samples(per_sample.index.to_numpy(float), per_sample.to_numpy(float)),
        draws=draws,
    )


def shared_link(samples: pd.DataFrame) -> Link:
    """Return what messages over a link share, by its calibration; tokens where, by its name, it saves any."""
    first, software = samples.iloc[0], software_at_once(samples)
    link, collective, ranks = str(first["link"]), str(first["collective"]), int(first["ranks"])
    return named_link(link, collective, ranks, float(first["link_bits_per_s"]), software)


def named_link(
    link: str, collective: str, ranks: int, rate_bits_per_s: float, software: float = math.inf
) -> Link:
    """Return the same, where it is known how many messages' software the processor does at once."""
    saved_s = read_link(link).burst_s if is_lab(link) and rate_bits_per_s else 0.0
    if not saved_s:
        return Link(software=software)
    wire_s = wire_s_per_byte(collective, ranks, rate_bits_per_s, _framing(link))
    return Link(software=software, burst_s=saved_s, wire_s_per_byte=wire_s)


def _framing(link: str) -> float:
    """Return the share of what a link carries that is a message's own bytes."""
    return read_link(link).framing if is_lab(link) else FRAMING


def software_at_once(samples: pd.DataFrame) -> float:
    """Return how many small messages the processor carries in the time of one; infinite if nothing tells.

    Read off how much faster small messages go with several in flight than with one.
    """
    medians = samples.groupby(["in_flight", "bytes"])["seconds"].median().unstack("in_flight")
    faster = medians.rdiv(medians[1], axis=0).drop(columns=1).median()
    return float(np.clip(faster.max(), 1.0, None)) if len(faster) else math.inf


def undisturbed(collectives: pd.DataFrame) -> pd.DataFrame:
    """Return rows that a cost may be fitted to: messages, between ranks that had their cores.

    One rank alone sends nothing. Samples that lost more than STOLEN_LIMIT of the cores are held out of
    sizes that were measured better too.
    """
    collectives = collectives[collectives["ranks"] > 1]
    least = collectives.groupby([*LINK, "in_flight", "bytes"])["stolen"].transform("min")
    lost = collectives["stolen"].gt(STOLEN_LIMIT) & least.le(STOLEN_LIMIT)
    return collectives[~lost]


def pooled(calibration: Calibration, collectives: pd.DataFrame) -> Calibration:
    """Return the same calibration with the drift that all links tell; costs and scatter stay.

    collectives : all rows of the recording, also of links that the calibration does not know
    """
    rows = undisturbed(collectives[collectives["in_flight"] == 1])
    links = {key: Sessions.of(own) for key, own in by_link(rows)}
    drift, known = Drift.of([*links.values()]), dict(calibration.known)
    for key, communication in known.items():
        if communication.noise is not None and key in links:
            noise = drift.noise(communication.noise, links[key])
            known[key] = replace(communication, noise=noise)
    return Calibration(known)


def by_link(rows: pd.DataFrame) -> Iterator[tuple[tuple[str, int, str], pd.DataFrame]]:
    """Yield each link, number of ranks and collective, and the rows of these three."""
    for (link, ranks, collective), own in rows.groupby(LINK):
        yield (str(link), int(ranks), str(collective)), own
