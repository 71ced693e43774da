"""A message's cost from the labs that were calibrated, for labs that were not."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from ddlkit.core.cost import Samples, Stepped, Table
from ddlkit.core.errors import UserError
from ddlkit.core.fit import DRAWS, fit
from ddlkit.core.gloo_ring import GlooRing, ring_s
from ddlkit.core.lablink import Named, read_link
from ddlkit.core.schedule import STEPS, Links, Schedule, simulate
from ddlkit.core.units import KIB
from ddlkit.core.workload import Floats
from ddlkit.model.calibration import (
    Calibration,
    Communication,
    named_link,
    software_at_once,
    undisturbed,
)
from ddlkit.model.noise import NEIGHBOURS, Noise

SHARES = np.geomspace(1 / 64, 1.0, 385)
"""Of all cores that a message's software may take: what `join_labs` tries."""
AS_GOOD = 1e-3
"""Mean squared errors of logarithms that differ by less tell nothing."""


def stepped_lab(rows: pd.DataFrame, *, core_share: float = 0.0) -> Stepped:
    """One lab's all-reduces, one in flight, as steps: rows of a table ``collectives``.

    core_share : share of the cores that a rank's software is assumed to take, which one lab cannot tell

    Delay, and whether a link saves credit while it rests, so that the longer of software and bytes
    decides, are read off its name. Raises UserError for rows of several labs, of another link, or of
    another collective.
    """
    keys = ["collective", "algorithm", "link", "ranks"]
    labs = rows[keys].drop_duplicates()
    if len(labs) != 1:
        raise UserError(f"{len(labs)} labs to fit as one: choose rows of one link and algorithm")
    lab, kept = labs.iloc[0], undisturbed(rows)
    kept, named = kept[kept["in_flight"] == 1], read_link(str(lab["link"]))
    found: Stepped = fit(
        Stepped.form,
        kept["bytes"],
        kept["seconds"],
        draws=0,
        collective=str(lab["collective"]),
        workers=int(lab["ranks"]),
        algorithm=str(lab["algorithm"]),
        rate_bits_per_s=named.rate_bits_per_s,
        delay_s=named.delay_s,
        saves=named.burst_s > 0,
        core_share=core_share,
    ).cost
    return found


def join_labs(labs: Sequence[Stepped], cores: int) -> Stepped:
    """One cost of several labs of one machine: carry it to any of them, or to another, by `Stepped.at`.

    Efficiency of the links is the median of the labs'. Software a message is the geometric mean of theirs,
    each divided by how many messages' software follows one another there. The share of the cores is that
    which makes them agree best, and of those as good the one nearest to a whole core: so where one lab is
    all there is, its software is assumed to want a core all the time.

    labs : of any algorithms that are sent alike

    Raises UserError for none.
    """
    if not labs:
        raise UserError("no lab to extrapolate from: calibrate one at least")
    schedules = [Schedule.of(str(lab.algorithm), lab.workers or 0) for lab in labs]
    whole = [
        lab.software_s * schedule.software(lab.core_share)
        for lab, schedule in zip(labs, schedules, strict=True)
    ]
    counts = np.array([[one.software(share) for one in schedules] for share in SHARES])
    alone = np.log(whole) - np.log(counts)
    loss = alone.var(axis=1)
    good = np.flatnonzero(loss <= loss.min() + AS_GOOD)
    best = good[np.argmin(np.abs(np.log(SHARES[good] * cores)))]
    slopes = [one.link_s_per_byte * one.rate_bits_per_s for one in labs]
    first = labs[0]
    return replace(
        first,
        software_s=float(np.exp(alone[best].mean())),
        core_share=float(SHARES[best]),
        link_s_per_byte=float(np.median(slopes)) / first.rate_bits_per_s,
    )


def played_s(cost: Stepped, n_bytes: float, messages: int = 1, burst_s: float = 0.0) -> float:
    """Seconds of each of several messages in a row, played out over links that save up to ``burst_s``.

    What `Stepped` says with one number, whether links save, holds where all of them are busy in every step,
    as a ring's; here each link saves what it rests. Waiting for a core is spread over all messages alike.
    """
    assert cost.workers is not None  # checked when made
    schedule = Schedule.of(str(cost.algorithm), cost.workers)
    software_s = float(cost.terms(0.0).software_s) / schedule.counts.messages
    rates, delays = np.full((2, cost.workers), [[1 / cost.link_s_per_byte], [cost.delay_s]], float)
    links = Links(rates, delays, software_s, burst_s=burst_s)
    told = str(cost.algorithm).startswith(STEPS)
    return float(simulate(schedule, links, n_bytes, messages, told=told).max()) / messages


# -- gloo's own ring, from all labs of a machine -------------------------------------------------

EQUAL = re.compile(r"lab:[\w.]+bit|emulated:[\w.]+bit-delay[\d.]+ms(-burst[\d.]+ms)?")
"""Links that are all alike, have a rate and a delay, and lose nothing: what `Rings` carries from and to."""
SCATTER = 0.03
"""Relative error of a lab's median that is nothing special: beside it, what is believed beforehand counts."""
BELIEVED_FAR = 1.0
"""By how much, as a logarithm, the share of the cores may well differ from one core's: labs of one number of
ranks do not tell it."""
DELAYED = ("emulated", True)
"""Engine of a link, and whether it has a delay: those that `Law` may say more of."""
GRID: Floats = np.exp2(np.arange(8.0, 30.25, 0.25))
"""Bytes at which a carried cost is computed; between them it is interpolated."""
NOISE_SIZES: Floats = KIB * np.exp2(np.arange(20.0))


class Law(NamedTuple):
    """What is known of gloo's ring beside the three numbers that are fitted.

    waking : seconds that a round trip takes besides, for each second of one link's delay: as echoes tell,
        who has slept longer is slower to wake. It passes four delays of a link
    waits : whether ranks' software waits for a core, by a share that is fitted; else none does, as ranks that
        wait for packets leave the cores to others
    """

    waking: float = 0.0
    waits: bool = True

    def delay_s(self, named: Named) -> float:
        """A quarter of what a round trip over such links takes beyond software and bytes."""
        return named.delay_s * (1 + self.waking / 4)


WAITING = Law()
"""Ranks wait for cores and wake at once: what campaigns were foretold with, and links without delay are."""


class RingLab(NamedTuple):
    """One calibrated lab: what its link is, and of each size the median.

    ratios : of each size, single samples over it, as single messages scatter
    drift : deviation of its sessions' logarithms, mean over sizes; 0 for a single one
    """

    link: str
    workers: int
    bytes: Floats
    seconds: Floats
    ratios: tuple[Floats, ...]
    drift: float

    @property
    def named(self) -> Named:
        """What its link's name says."""
        return read_link(self.link)


def ring_labs(rows: pd.DataFrame) -> list[RingLab]:
    """Labs of equal links in which gloo's own all-reduce was calibrated, one message in flight.

    rows : of a table ``collectives``; what is of other links, algorithms or collectives is left out
    """
    rows = rows[~rows["algorithm"].astype(str).str.startswith(STEPS)]
    rows = rows.query("collective == 'all_reduce' and algorithm == 'ring' and in_flight == 1")
    rows = undisturbed(rows[rows["link"].str.fullmatch(EQUAL)])
    if "session" not in rows:
        rows = rows.assign(session=0)
    labs = []
    for (link, ranks), lab in rows.groupby(["link", "ranks"]):
        medians = lab.groupby("bytes")["seconds"].median()
        columns = ("bytes", "seconds", "session", "messages_per_sample")
        noise = Noise.of(*(lab[name] for name in columns))
        sizes, seconds = medians.index.to_numpy(float), medians.to_numpy()
        drift = float(np.sqrt(np.mean(noise.drift**2)))
        labs.append(RingLab(str(link), int(ranks), sizes, seconds, noise.ratios, drift))
    return labs


class _Points:
    """All labs' sizes side by side, and what does not depend on what is fitted."""

    def __init__(self, labs: Sequence[RingLab], law: Law) -> None:
        def each(values: Iterable[float]) -> Floats:
            counts = [lab.bytes.size for lab in labs]
            return np.repeat(np.array(list(values), float), counts)

        self.bytes = np.concatenate([lab.bytes for lab in labs])
        self.seconds = np.concatenate([lab.seconds for lab in labs])
        self.weight = each(lab.bytes.size**-0.5 for lab in labs) * np.sqrt(
            self.bytes.size / len(labs)
        )
        self.workers = each(lab.workers for lab in labs)
        named = [lab.named for lab in labs]
        self.waits, self.delay_s = law.waits, each(map(law.delay_s, named))
        self.burst_s = each(one.burst_s for one in named)
        self.wire_s = each(8 / (one.rate_bits_per_s * one.framing) for one in named)

    def told_s(self, values: Floats) -> Floats:
        """(..., n) by (..., 3) logarithms: software, bytes' time over the rate's, share of the cores."""
        software_s, over, share = np.moveaxis(np.exp(values), -1, 0)[..., None]
        return ring_s(
            self.bytes,
            self.workers,
            software_s=software_s,
            link_s_per_byte=over * self.wire_s,
            core_share=share * self.waits,
            delay_s=self.delay_s,
            burst_s=self.burst_s,
        )


def fit_rings(labs: Sequence[RingLab], cores: int, law: Law = WAITING) -> Floats:
    """(3,) values as of `_Points.told_s`: those that all labs together say, each lab counting alike.

    Least squares of logarithms, in which a few sizes that are far off count less. Where none waits for cores
    the share stays as believed, and does nothing. Raises UserError for none.
    """
    from scipy.optimize import least_squares

    if not labs:
        raise UserError("no lab to extrapolate from: calibrate one at least")
    points, first = _Points(labs, law), labs[0]
    step_s = float(first.seconds[0]) / (2 * (first.workers - 1)) - 4 * first.named.delay_s
    software, share = np.log(max(2e-5, step_s)), -np.log(cores)

    def off(values: Floats) -> Floats:
        told = np.log(points.told_s(values) / points.seconds) * points.weight / SCATTER
        believed = (values[..., 2:] - share) / BELIEVED_FAR
        return np.concatenate([told, believed], axis=-1)

    def slopes(values: Floats) -> Floats:
        step = 1e-5 * np.eye(3)
        return np.asarray((off(values + step) - off(values - step)).T / 2e-5)

    # Whether ranks wait for cores at all is no small step: from both sides.
    starts = [(software, 0.0, share), (software, 0.0, share - np.log(8))]
    how: Any = {"bounds": ([-20, -0.5, -6], [0, 0.5, 0]), "loss": "soft_l1"}
    found = [least_squares(off, np.array(start), slopes, **how) for start in starts]
    return np.asarray(min(found, key=lambda one: one.cost).x)


@dataclass(frozen=True, eq=False)
class Rings:
    """gloo's all-reduce in any lab of equal links, told from labs that were calibrated.

    labs : to tell from; cores : of their machine; software : messages' software that it does at once
    """

    labs: Sequence[RingLab]
    cores: int
    software: float = np.inf
    law: Law = WAITING

    @classmethod
    def of(cls, rows: pd.DataFrame, link: str, cores: int, law: Law = WAITING) -> Rings:
        """To be carried to ``link``: by the labs most like it.

        Those are of its engine, and emulated ones with a delay where it has one: without, a link is as quick
        as the process that it is. Where there is none of them, those of its engine, or else all.

        rows : of a table ``collectives`` of one machine; law : of emulated links with a delay, others have
            WAITING. Raises UserError where there is no lab at all.
        """
        labs = ring_labs(rows)
        if not labs:
            raise UserError(
                "no lab of equal links to extrapolate from: calibrate one at least, all_reduce, one "
                "message in flight"
            )
        kind = _kind(link)
        kinds = [[lab for lab in labs if _kind(lab.link)[:n] == kind[:n]] for n in (2, 1, 0)]
        several = [one for _, one in rows.groupby(["link", "ranks"])]
        at_once = min((software_at_once(one) for one in several), default=np.inf)
        found = next(one for one in kinds if one)
        return cls(found, cores, at_once, law if kind == DELAYED else WAITING)

    @cached_property
    def values(self) -> Floats:
        """What all labs say."""
        return fit_rings(self.labs, self.cores, self.law)

    @cached_property
    def left_out(self) -> list[Floats]:
        """Of each lab, what all others say; none for a single lab."""
        if len(self.labs) < 2:
            return []
        others = [[one for one in self.labs if one is not lab] for lab in self.labs]
        return [fit_rings(labs, self.cores, self.law) for labs in others]

    @cached_property
    def errors(self) -> list[Floats]:
        """Of each lab, (s,) log of told over measured, told from all other labs; none for a single lab."""
        pairs = zip(self.labs, self.left_out, strict=False)
        return [
            np.log(_Points([lab], self.law).told_s(values) / lab.seconds) for lab, values in pairs
        ]

    def at(self, link: str, workers: int) -> GlooRing:
        """The cost over a link, by its name. Raises UserError for one that is not equal and lossless."""
        return ring_at(self.values, link, workers, self.law)

    def between(self, link: str, workers: int) -> Communication:
        """All that a forecast needs. Its noise holds the error of being told from other labs.

        That error is the labs' own when each is left out, where bytes, software and delay stand to one
        another alike, by Student's t with as many degrees as labs count. A single lab tells none.
        """
        ring, named = self.at(link, workers), read_link(link)
        steady = Samples(GRID, np.maximum(1.0, np.minimum(16.0, 2**25 // GRID)))
        cost = Table(GRID, ring(GRID), workers=workers, algorithm="ring", samples=steady)
        shared = named_link(link, "all_reduce", workers, named.rate_bits_per_s, self.software)
        if len(self.labs) < 2:
            return Communication(cost, link=shared)
        return Communication(cost, (cost,) * DRAWS, shared, self._noise(ring))

    def _noise(self, ring: GlooRing) -> Noise:
        """Of NOISE_SIZES of the lab that ``ring`` is of.

        Each size of each lab counts by how near it is in `_places`, in units of NEIGHBOURS; single messages
        scatter as they do at the nearest.
        """
        places = [_places(self.at(lab.link, lab.workers), lab.bytes) for lab in self.labs]
        squares = [
            error**2 + lab.drift**2 for lab, error in zip(self.labs, self.errors, strict=True)
        ]
        ratios, drift, degrees = [], [], []
        for here in _places(ring, NOISE_SIZES).T:
            far = [
                ((one - here[:, None]) ** 2).sum(axis=0) / np.log(NEIGHBOURS) ** 2 for one in places
            ]
            least = min(float(one.min()) for one in far)
            weights = [np.exp((least - one) / 2) for one in far]
            each = np.array([one.sum() for one in weights])
            both = zip(weights, squares, strict=True)
            drift.append((sum(float(w @ square) for w, square in both) / each.sum()) ** 0.5)
            degrees.append(max(1.0, each.sum() ** 2 / (each**2).sum() - 1))
            pairs = zip(self.labs, far, strict=True)
            kept = [lab.ratios[k] for lab, one in pairs for k in np.flatnonzero(one <= least + 1)]
            ratios.append(np.concatenate(kept))
        return Noise(NOISE_SIZES, tuple(ratios), np.array(drift), np.array(degrees))


def _places(ring: GlooRing, sizes: Floats) -> Floats:
    """(2, s) logarithms: of bytes' time over all other; of a round trip's software over its delay."""
    terms = ring.terms(sizes)
    other_s = np.maximum(1e-9, terms.software_s + terms.delay_s)
    waits = max(1.0, (ring.workers or 0) * ring.core_share)
    trip = np.log(max(1e-6, ring.software_s * waits) / max(1e-5, 4 * ring.delay_s))
    return np.stack([np.log(terms.bytes_s / other_s), np.full(sizes.shape, trip)])


def check_equal(link: str) -> None:
    """Raise UserError for a link that no cost can be carried to, by its name."""
    if not EQUAL.fullmatch(link):
        raise UserError(
            f"no cost can be carried to {link}: only to equal links that lose nothing, as "
            "emulated:500mbit-delay2ms"
        )


def ring_at(values: Floats, link: str, workers: int, law: Law = WAITING) -> GlooRing:
    """What `fit_rings` found, over a link. Raises UserError for one that is not of equal, lossless links."""
    check_equal(link)
    return ring_of(values, read_link(link), workers, law)


def ring_of(values: Floats, named: Named, workers: int, law: Law = WAITING) -> GlooRing:
    """What `fit_rings` found, over links of that rate and delay, whatever else they do."""
    software_s, over, share = np.exp(values).tolist()
    return GlooRing(
        software_s,
        over * 8 / (named.rate_bits_per_s * named.framing),
        workers=workers,
        rate_bits_per_s=named.rate_bits_per_s,
        delay_s=law.delay_s(named),
        burst_s=named.burst_s,
        core_share=share * law.waits,
    )


def carried(rows: pd.DataFrame, link: str, workers: int, *, cores: int) -> Communication:
    """gloo's all-reduce over a link that need not have been calibrated, from labs that were.

    rows : of a table ``collectives`` of one machine, of any labs; link : as "emulated:500mbit-delay2ms"

    Raises UserError for rows without a lab of equal links, and for a link that is not one.
    """
    return Rings.of(rows, link, cores).between(link, workers)


def carried_to(
    rows: pd.DataFrame, labs: Iterable[tuple[str, int]], *, cores: int, law: Law = WAITING
) -> Calibration:
    """`carried` to each (link, workers), as a calibration, with which `forecast_case` predicts there."""
    known, rings = {}, dict[tuple[str, bool], Rings]()
    for link, workers in labs:
        kind = _kind(link)
        if kind not in rings:
            rings[kind] = Rings.of(rows, link, cores, law)
        known[link, workers, "all_reduce"] = rings[kind].between(link, workers)
    return Calibration(known)


def _kind(link: str) -> tuple[str, bool]:
    """A lab's link's engine, and whether it has a delay. Raises UserError for links that are not equal."""
    check_equal(link)
    named = read_link(link)
    return named.engine, named.delay_s > 0
