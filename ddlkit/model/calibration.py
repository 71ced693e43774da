"""From measured collectives to what a message costs, how far single messages scatter, and what they share.

Noise has two kinds: a single message scatters about the median of its size, and all messages of a session
drift together, as its own sessions tell (`Noise`), or better all links of a recording (`Drift`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from ddlkit.core.case import Case
from ddlkit.core.cost import MessageCost, Samples
from ddlkit.core.errors import UserError
from ddlkit.core.fit import Fit, fit
from ddlkit.core.iteration import PLAIN
from ddlkit.core.link import FRAMING, STEPS, Link, is_lab, read_link, wire_s_per_byte
from ddlkit.core.sparse import Selecting, SparseGather
from ddlkit.core.workload import Floats

UNFITTED = "alpha_beta:wire"
"""The line without a fit: the smallest message's time, and bytes at the link's rate less its framing."""
STOLEN_LIMIT = 0.02  # share of the cores that a machine's host may take while something is measured
LINK = ["link", "ranks", "collective"]
POOLED = "pooled"  # in tables of predictions: drift by all links of a recording


@dataclass(frozen=True, eq=False)
class Communication:
    """All of a prediction that is not compute: what is known of messages between some workers.

    draws : costs fitted to bootstrap resamples; noise : how single messages differ from the cost, if known
    others : costs of other forms, fitted to the very same samples, by form
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
    """Costs fitted to recorded collectives, noise and links; known : by (link, workers, collective)."""

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

        form : as `fit` takes it, or UNFITTED for links whose rate is known; draws : bootstrap resamples
        also : further forms, without draws; UNFITTED is left out of a link whose rate is not known

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
            sampled = rows[["bytes", "seconds", "session", "messages_per_sample"]]
            noise = Noise.of(*sampled.to_numpy(float).T)
            known[key] = Communication(fitted.cost, fitted.draws, shared_link(every), noise, others)
        return cls(known)

    def without_credit(self) -> Calibration:
        """Return the same for links that save nothing while they rest."""
        items = self.known.items()
        return Calibration({k: replace(c, link=Link(software=c.link.software)) for k, c in items})

    def between(
        self, link: str, workers: int, collective: str = "all_reduce", in_flight: int = 1
    ) -> Communication:
        """Return messages over ``link`` among ``workers``. Raises UserError when not calibrated."""
        key = (link, workers, collective)
        if key not in self.known:
            listed = "; ".join(f"{what} over {where}, {n} ranks" for where, n, what in self.known)
            wanted = f"{collective} over {link} with {workers} ranks"
            raise UserError(f"no calibration for {wanted}: there is {listed}")
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
    medians = samples.groupby(["in_flight", "bytes"])["seconds"].median().unstack("in_flight")
    faster = medians.rdiv(medians[1], axis=0).drop(columns=1).median()
    return float(np.clip(faster.max(), 1.0, None)) if len(faster) else math.inf


def undisturbed(collectives: pd.DataFrame) -> pd.DataFrame:
    """Return rows of messages, less samples that lost STOLEN_LIMIT of the cores if the size has others."""
    collectives = collectives[collectives["ranks"] > 1]
    least = collectives.groupby([*LINK, "in_flight", "bytes"])["stolen"].transform("min")
    lost = collectives["stolen"].gt(STOLEN_LIMIT) & least.le(STOLEN_LIMIT)
    return collectives[~lost]


def pooled(calibration: Calibration, collectives: pd.DataFrame) -> Calibration:
    """Return the same calibration with the drift that all links of a recording tell."""
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


NEIGHBOURS = 4.0
"""Sizes up to this many times smaller or larger inform one size's drift."""
KNEE = (1.5, 3.0)
"""A size's time over the smallest one's: below, bytes take less than half of a start-up; above, over two."""


@dataclass(frozen=True, eq=False)
class Noise:
    """The noise of one collective over one link.

    bytes : (s,) measured sizes, increasing; ratios : of each, what messages take over their session's median
    drift : (s,) standard deviation of the logarithm of a session's median; 0 for a single session
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
        """Return the noise of samples, (n,) each; a session need not have every size.

        messages_per_sample : of which a sample is the mean; a single one scatters more, by the root
        """
        columns = np.broadcast_arrays(n_bytes, seconds, session, messages_per_sample)
        rows = pd.DataFrame(np.ravel(columns).reshape(4, -1).T, columns=["n", "s", "at", "of"])
        rows = rows.sort_values("at", kind="stable")
        medians = rows.groupby(["at", "n"])["s"]
        scatter = 1 + (rows["s"] / medians.transform("median") - 1) * np.sqrt(rows["of"])
        by_size = scatter.clip(lower=0.0).groupby(rows["n"])
        by_session = medians.median().unstack()
        sizes = by_session.columns.to_numpy(float)
        ratios = tuple(ratio.to_numpy() for _, ratio in by_size)
        return cls(sizes, ratios, *_own_drift(sizes, np.log(by_session.to_numpy())))

    def factors(self, n_bytes: ArrayLike, draws: int, seed: int = 0) -> Floats:
        """Return (draws, k) factors by which messages of ``n_bytes`` (k,) differ from their cost.

        Each message scatters by itself; the drift of a draw, by Student's t, meets all of its messages.
        """
        from scipy.stats import t as student

        inside = np.log(np.clip(np.asarray(n_bytes, float), self.bytes[0], self.bytes[-1]))
        nearest = np.abs(np.log(self.bytes)[:, None] - inside).argmin(axis=0)
        random = np.random.default_rng(seed)
        drifted = student.ppf(random.uniform(size=(draws, 1)), self.degrees[nearest])
        factors = np.exp(drifted * self.drift[nearest])
        for index in np.unique(nearest):
            chosen = nearest == index
            factors[:, chosen] *= random.choice(self.ratios[index], (draws, int(chosen.sum())))
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
    variance[often] = np.nanvar(medians[:, often], axis=0, ddof=1) * (1 + 1 / known[often])
    apart = np.abs(np.log(sizes)[:, None] - np.log(sizes))
    near = (apart <= np.log(NEIGHBOURS) * (1 + 1e-9)) & often
    count = near.sum(axis=1)
    around = np.divide(
        (near * variance).sum(axis=1), count, where=count > 0, out=np.zeros(len(sizes))
    )
    degrees = near @ np.maximum(0, known - 1)
    drift = np.sqrt(np.where(count > 0, around, variance[often].mean()))
    return drift, np.where(count > 0, degrees, (known[often] - 1).sum()).astype(float)


class Sessions(NamedTuple):
    """What one link's sessions say; decides : (s,) where a size's time stands to KNEE: 0, 1 or 2.

    variance : (s,) of a session's mean logarithm; NaN where fewer than two sessions have the size
    """

    sessions: int
    bytes: Floats
    decides: np.ndarray
    variance: Floats

    @classmethod
    def of(cls, rows: pd.DataFrame) -> Sessions:
        """Return it of rows of one link, number of ranks and collective, one message in flight."""
        logs = rows.assign(log=np.log(rows["seconds"]))
        means = logs.groupby(["bytes", "session"])["log"].mean()
        medians = rows.groupby("bytes")["seconds"].median()
        over = (medians / medians.iloc[0]).to_numpy()
        sizes = medians.index.to_numpy(float)
        variance = means.groupby("bytes").var().to_numpy(float)
        return cls(rows["session"].nunique(), sizes, np.searchsorted(KNEE, over), variance)


@dataclass(frozen=True)
class Drift:
    """The variance of a session, by what decides (start-up, bytes or both), (3,), and the degrees behind it.

    Sizes of one session drift together, so they count once. Nothing is taken off for single samples' scatter:
    samples of one size follow one another within a second, and say little of what comes a minute later.
    """

    variance: Floats
    degrees: float

    @classmethod
    def of(cls, links: Sequence[Sessions]) -> Drift:
        """Return it with each link counting alike. Where none says anything, all that is said counts."""
        means = np.full((len(links), len(KNEE) + 1), np.nan)
        for row, link in enumerate(links):
            for column in range(means.shape[1]):
                chosen = link.variance[(link.decides == column) & np.isfinite(link.variance)]
                means[row, column] = chosen.mean() if chosen.size else np.nan
        known = np.isfinite(means)
        sums, counts = np.where(known, means, 0.0).sum(axis=0), known.sum(axis=0)
        whole = sums.sum() / max(1, counts.sum())
        by = np.divide(sums, counts, where=counts > 0, out=np.full(len(sums), whole))
        tells = known.any(axis=1)
        degrees = sum(link.sessions - 1 for link, does in zip(links, tells, strict=True) if does)
        return cls(by, float(degrees))

    def noise(self, own: Noise, link: Sessions) -> Noise:
        """Return a link's noise with this drift; its own stays where all links have no more degrees."""
        deviation = np.sqrt(self.variance[link.decides] * (1 + 1 / link.sessions))
        better = self.degrees > own.degrees
        drift = np.where(better, deviation, own.drift)
        return replace(own, drift=drift, degrees=np.where(better, self.degrees, own.degrees))
