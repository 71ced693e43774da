"""From measured collectives to what a message costs, how far single messages scatter, and what they share."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from ddlkit.core.case import Case
from ddlkit.core.collective import STEPS
from ddlkit.core.cost import AlphaBeta, MessageCost, Samples
from ddlkit.core.errors import UserError
from ddlkit.core.fit import Fit, fit
from ddlkit.core.iteration import PLAIN
from ddlkit.core.lab_links import FRAMING, is_lab, read_link, wire_s_per_byte
from ddlkit.core.link import Link
from ddlkit.core.sparse import Selecting, SparseGather
from ddlkit.core.workload import Floats
from ddlkit.model.contention import SLOWDOWN_KEY, Contention

UNFITTED = "alpha_beta:wire"
"""The line without a fit: the smallest message's time, and bytes at the link's rate less its framing."""
STOLEN_LIMIT = 0.02  # share of the cores that a machine's host may take while something is measured
OTHERS_LIMIT = 0.1  # and that other programs may take
TRAINING = "training"  # the kind of a case whose compute is real
LINK = ["link", "ranks", "collective"]


@dataclass(frozen=True, eq=False)
class Communication:
    """All of a prediction that is not compute: what is known of messages between some workers.

    draws : costs fitted to bootstrap resamples; noise : how single messages differ from the cost, if known
    others : costs of other forms, fitted to the very same samples, by form
    contention : what messages and compute take from each other, where compute is real and this is known
    """

    cost: MessageCost
    draws: Sequence[MessageCost] = ()
    link: Link = PLAIN
    noise: Noise | None = None
    others: Mapping[str, MessageCost] = field(default_factory=dict)
    contention: Contention | None = None

    def sparse(
        self, density: float, selecting: Selecting | None = None
    ) -> Communication:
        """Return the same where the largest are gathered; selecting : its times, if they are compute."""
        if density == 1.0 and selecting is None:
            return self

        def gathered(dense: MessageCost) -> SparseGather:
            return SparseGather(dense, density, selecting=selecting)

        draws = [gathered(draw) for draw in self.draws]
        others = {form: gathered(other) for form, other in self.others.items()}
        return replace(self, cost=gathered(self.cost), draws=draws, others=others)


@dataclass(frozen=True)
class Calibration:
    """Costs fitted to recorded collectives, noise and links.

    known : by (link, workers, collective); contention : by network, batch, number of ranks and link
    """

    known: Mapping[tuple[str, int, str], Communication]
    contention: Mapping[tuple[str, int, int, str], Contention] = field(
        default_factory=dict
    )

    @classmethod
    def of(
        cls,
        collectives: pd.DataFrame,
        form: str = "table",
        draws: int = 200,
        also: Collection[str] = (),
        slowdown: pd.DataFrame | None = None,
    ) -> Calibration:
        """Return ``form`` fitted to each link, number of ranks and collective of a collectives table.

        form : as `fit` takes it; draws : bootstrap resamples
        also : further forms, without draws; or UNFITTED, for links whose rate is known
        slowdown : rows of tables ``slowdown``; cases that really train are predicted with what they say

        Raises UserError for messages that were sent step by step: training's are the library's own.
        """
        stepped = collectives["algorithm"].astype(str).str.startswith(STEPS)
        if stepped.any():
            name = collectives.loc[stepped, "algorithm"].iloc[0]
            raise UserError(
                f"no calibration of {name}: give it rows of the library's own messages"
            )
        known = {}
        for (link, ranks, collective), every in undisturbed(collectives).groupby(LINK):
            rows = every[every["in_flight"] == 1]
            fitted = _fitted(rows, form, draws)
            others = {
                name: _fitted(rows, name, 0).cost for name in also if name != UNFITTED
            }
            if UNFITTED in also and rows["link_bits_per_s"].all():
                others[UNFITTED] = _unfitted(rows)
            sampled = rows[["bytes", "seconds", "session", "messages_per_sample"]]
            noise = Noise.of(*sampled.to_numpy(float).T)
            shared = shared_link(every)
            communication = Communication(
                fitted.cost, fitted.draws, shared, noise, others
            )
            known[str(link), int(ranks), str(collective)] = communication
        beside: dict[tuple[str, int, int, str], Contention] = {}
        if slowdown is not None:
            groups = slowdown.groupby(SLOWDOWN_KEY)
            beside = {key: Contention.of(rows, max(1, draws)) for key, rows in groups}
        return cls(known, beside)

    def without_burst_tokens(self) -> Calibration:
        """Return the same for links that save nothing while they rest."""
        bare = {
            k: replace(c, link=Link(software=c.link.software))
            for k, c in self.known.items()
        }
        return replace(self, known=bare)

    def between(
        self,
        link: str,
        workers: int,
        collective: str = "all_reduce",
        in_flight: int = 1,
    ) -> Communication:
        """Return messages over ``link`` among ``workers``. Raises UserError when not calibrated."""
        key = (link, workers, collective)
        if key not in self.known:
            listed = "; ".join(
                f"{what} over {where}, {n} ranks" for where, n, what in self.known
            )
            wanted = f"{collective} over {link} with {workers} ranks"
            raise UserError(f"no calibration for {wanted}: there is {listed}")
        communication = self.known[key]
        return replace(
            communication, link=replace(communication.link, in_flight=in_flight)
        )

    def of_case(self, case: Case) -> Communication:
        """Return messages of a case, sparse where it is. Raises UserError when its lab was not calibrated."""
        dense = self.between(case.link, case.workers, case.collective, case.in_flight)
        if case.kind == TRAINING:
            of = case.network, case.batch, case.workers, case.link
            dense = replace(dense, contention=self.contention.get(of))
        return dense.sparse(case.density) if case.sparse else dense


def _fitted(rows: pd.DataFrame, form: str, draws: int) -> Fit[MessageCost]:
    """Return ``form`` fitted to one link's messages of one collective, sent one by one."""
    per_sample = rows.groupby("bytes")["messages_per_sample"].first()
    samples = Samples(per_sample.index.to_numpy(float), per_sample.to_numpy(float))
    of = _Messages.of(rows)
    return fit(
        form,
        rows["bytes"],
        rows["seconds"],
        draws,
        collective=of.collective,
        workers=of.workers,
        algorithm=of.algorithm,
        samples=samples,
    )


class _Messages(NamedTuple):
    """What a cost of messages holds for."""

    collective: str
    workers: int
    algorithm: str

    @classmethod
    def of(cls, rows: pd.DataFrame) -> _Messages:
        """Return what the rows, which are of one collective on one link, say."""
        first = rows.iloc[0]
        collective, algorithm = str(first["collective"]), str(first["algorithm"])
        return cls(collective, int(first["ranks"]), algorithm)


def _unfitted(rows: pd.DataFrame) -> AlphaBeta:
    """Return the smallest message's time, and bytes at the link's rate."""
    of, rate_bits_per_s = _Messages.of(rows), float(rows["link_bits_per_s"].iloc[0])
    framing = _framing(str(rows["link"].iloc[0]))
    wire_s = wire_s_per_byte(of.collective, of.workers, rate_bits_per_s, framing)
    smallest_s = float(rows["seconds"][rows["bytes"] == rows["bytes"].min()].median())
    return AlphaBeta(
        smallest_s,
        wire_s,
        collective=of.collective,
        workers=of.workers,
        algorithm=of.algorithm,
    )


def shared_link(samples: pd.DataFrame) -> Link:
    """Return what messages over a link share, by its calibration; tokens where, by its name, it saves any."""
    first, software = samples.iloc[0], software_at_once(samples)
    link, collective, ranks = (
        str(first["link"]),
        str(first["collective"]),
        int(first["ranks"]),
    )
    rate_bits_per_s = float(first["link_bits_per_s"])
    saved_s = read_link(link).burst_s if is_lab(link) and rate_bits_per_s else 0.0
    if not saved_s:
        return Link(software=software)
    wire_s = wire_s_per_byte(collective, ranks, rate_bits_per_s, _framing(link))
    return Link(software=software, burst_s=saved_s, wire_s_per_byte=wire_s)


def _framing(link: str) -> float:
    """Return the share of what a link carries that is a message's own bytes."""
    return read_link(link).framing if is_lab(link) else FRAMING


def software_at_once(samples: pd.DataFrame) -> float:
    """Return how many small messages the processor carries in the time of one; infinite if not known."""
    medians = (
        samples.groupby(["in_flight", "bytes"])["seconds"].median().unstack("in_flight")
    )
    faster = medians.rdiv(medians[1], axis=0).drop(columns=1).median()
    return float(np.clip(faster.max(), 1.0, None)) if len(faster) else math.inf


def undisturbed(collectives: pd.DataFrame) -> pd.DataFrame:
    """Return rows of messages, less samples that lost too much of the cores, if the size has others."""
    collectives = collectives[collectives["ranks"] > 1]
    lost = collectives["stolen"].gt(STOLEN_LIMIT)
    if "others" in collectives:
        lost |= collectives["others"].gt(OTHERS_LIMIT)
    every = lost.groupby([collectives[name] for name in (*LINK, "in_flight", "bytes")])
    return collectives[~lost | every.transform("all")]


NEIGHBOURS = 4.0
"""Sizes up to this many times smaller or larger inform one size's drift."""
PRIOR_BYTES = (1e4, 1e5, 1e6, 1e7)
PRIOR_DRIFT, PRIOR_DEGREES = (0.021, 0.012, 0.0096, 0.0059), 30.0
"""Of messages about so large in one session: the median deviation between the two of each recorded lab,
over the root of two; linear in log bytes in between."""


@dataclass(frozen=True, eq=False)
class Noise:
    """The noise of one collective over one link: messages scatter, all of a session drift together.

    bytes : (s,) measured sizes, increasing; ratios : of each, what messages take over their mean, so that
        iterations by draws lie around the one by medians, however many messages it has
    drift : (s,) standard deviation of the logarithm of a session's median; of a single session that of its
        halves, and that between the sessions of recorded labs: PRIOR_DRIFT
    degrees : (s,) degrees of freedom behind it
    """

    bytes: Floats
    ratios: tuple[Floats, ...]
    drift: Floats
    degrees: Floats

    @classmethod
    def of(
        cls,
        n_bytes: ArrayLike,
        seconds: ArrayLike,
        session: ArrayLike = 0,
        messages_per_sample: ArrayLike = 1,
    ) -> Noise:
        """Return the noise of samples, (n,) each, which are means of ``messages_per_sample`` messages."""
        columns = np.broadcast_arrays(n_bytes, seconds, session, messages_per_sample)
        rows = pd.DataFrame(
            np.ravel(columns).reshape(4, -1).T, columns=["n", "s", "at", "of"]
        )
        rows = rows.sort_values("at", kind="stable")
        medians = rows.groupby(["at", "n"])["s"]
        scatter = 1 + (rows["s"] / medians.transform("median") - 1) * np.sqrt(
            rows["of"]
        )
        by_size = scatter.clip(lower=0.0).groupby(rows["n"])
        ratios = tuple(ratio.to_numpy() / ratio.mean() for _, ratio in by_size)
        single = rows["at"].nunique() == 1
        turn = rows.groupby(["at", "n"]).cumcount() * 2 // medians.transform("size")
        parts = (
            rows["s"]
            .groupby([turn if single else rows["at"], rows["n"]])
            .median()
            .unstack()
        )
        sizes = parts.columns.to_numpy(float)
        drift, degrees = _own_drift(sizes, np.log(parts.to_numpy()))
        if single:
            prior = np.interp(np.log(sizes), np.log(PRIOR_BYTES), PRIOR_DRIFT)
            drift, degrees = np.hypot(drift, prior), np.full(len(sizes), PRIOR_DEGREES)
        return cls(sizes, ratios, drift, degrees)

    def factors(
        self, n_bytes: ArrayLike, draws: int, seed: int = 0, scatter: bool = True
    ) -> Floats:
        """Return (draws, k) factors on messages of (k,) bytes: each scatters, and all of a draw drift."""
        from scipy.stats import t as student

        inside = np.log(
            np.clip(np.asarray(n_bytes, float), self.bytes[0], self.bytes[-1])
        )
        nearest = np.abs(np.log(self.bytes)[:, None] - inside).argmin(axis=0)
        random = np.random.default_rng(seed)
        drifted = student.ppf(random.uniform(size=(draws, 1)), self.degrees[nearest])
        factors = np.exp(drifted * self.drift[nearest])
        for index in np.unique(nearest) if scatter else ():
            chosen = nearest == index
            factors[:, chosen] *= random.choice(
                self.ratios[index], (draws, int(chosen.sum()))
            )
        return factors


def _own_drift(sizes: Floats, medians: Floats) -> tuple[Floats, Floats]:
    """Return (s,) how far a new session lies from the mean of those there were, and its degrees.

    medians : (sessions, s) logarithms, NaN where a session lacks a size. A size that fewer than two
        sessions have drifts as its neighbours do; without any such neighbour, as the sizes do on average
    """
    known = np.isfinite(medians).sum(axis=0)
    often = known > 1
    if not often.any():
        return np.zeros(len(sizes)), np.ones(len(sizes))
    variance = np.zeros(len(sizes))
    variance[often] = np.nanvar(medians[:, often], axis=0, ddof=1) * (
        1 + 1 / known[often]
    )
    apart = np.abs(np.log(sizes)[:, None] - np.log(sizes))
    near = (apart <= np.log(NEIGHBOURS) * (1 + 1e-9)) & often
    count = near.sum(axis=1)
    around = np.divide(
        (near * variance).sum(axis=1), count, where=count > 0, out=np.zeros(len(sizes))
    )
    degrees = near @ np.maximum(0, known - 1)
    drift = np.sqrt(np.where(count > 0, around, variance[often].mean()))
    return drift, np.where(count > 0, degrees, (known[often] - 1).sum()).astype(float)
