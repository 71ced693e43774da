"""gloo's ring law (`ddlkit.core.link`) fitted to labs: to one lab's own sizes, and for other labs.

*Own law*: a table runs straight from one size to the next, gloo's ring does not. So the law is fitted to the
lab's own medians, and what it misses there is kept, smoothed over neighbouring sizes, as single medians
scatter. How far it may be off between sizes is told by holding sizes out. (Chosen on ``campaign-links``.)

*Transfer*: all labs of a machine fit one law together, and it predicts labs that were never measured. Over
emulated links with a delay, echoes tell a term besides: a rank that has slept longer is slower to wake.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from ddlkit.core.cost import Samples, Table
from ddlkit.core.errors import UserError
from ddlkit.core.link import STEPS, GlooRing, Named, read_link, ring_s
from ddlkit.core.units import KIB
from ddlkit.core.workload import Floats
from ddlkit.model.calibration import (
    SAMPLED,
    Calibration,
    Communication,
    by_link,
    named_link,
    software_at_once,
    undisturbed,
)
from ddlkit.model.noise import NEIGHBOURS, Noise
from ddlkit.model.predictor import OWN

EQUAL = re.compile(r"lab:[\w.]+bit|emulated:[\w.]+bit-delay[\d.]+ms(-burst[\d.]+ms)?")
"""Links that are all alike, have a rate and a delay, and lose nothing: what `Rings` transfers from and to."""
SCATTER = 0.03
"""Relative error of a lab's median that is nothing special: beside it, what is believed beforehand counts."""
DELAYED = ("emulated", True)
"""Engine of a link, and whether it has a delay: those over which ranks sleep, and wake."""
GRID: Floats = np.exp2(np.arange(8.0, 30.25, 0.25))
OWN_GRID: Floats = np.exp2(np.arange(8.0, 30.01, 1 / 16))
"""Bytes at which costs are computed; between them they are interpolated."""
NOISE_SIZES: Floats = KIB * np.exp2(np.arange(20.0))
DRAWS = 200


class RingLab(NamedTuple):
    """One calibrated lab: what its link is, and of each size the median.

    ratios : of each size, single samples over it, as single messages scatter
    drift : deviation of its sessions' logarithms, mean over sizes; 0 for a single one
    """

    link: str
    workers: int
    bytes: Floats
    seconds: Floats
    ratios: tuple[Floats, ...] = ()
    drift: float = 0.0

    @property
    def named(self) -> Named:
        """Return what its link's name says."""
        return read_link(self.link)


def ring_labs(rows: pd.DataFrame) -> list[RingLab]:
    """Return labs of equal links in which gloo's own all-reduce was calibrated, one message in flight.

    rows : of a table ``collectives``; what is of other links, algorithms or collectives is held out
    """
    rows = rows[~rows["algorithm"].astype(str).str.startswith(STEPS)]
    rows = rows.query("collective == 'all_reduce' and algorithm == 'ring' and in_flight == 1")
    rows = undisturbed(rows[rows["link"].str.fullmatch(EQUAL)])
    if "session" not in rows:
        rows = rows.assign(session=0)
    labs = []
    for (link, ranks), lab in rows.groupby(["link", "ranks"]):
        medians = lab.groupby("bytes")["seconds"].median()
        noise = Noise.of(*(lab[name] for name in SAMPLED))
        sizes, seconds = medians.index.to_numpy(float), medians.to_numpy()
        drift = float(np.sqrt(np.mean(noise.drift**2)))
        labs.append(RingLab(str(link), int(ranks), sizes, seconds, noise.ratios, drift))
    return labs


def fit_rings(labs: Sequence[RingLab], cores: int, waking: float | None = None) -> Floats:
    """Return (3,) logarithms that all labs together say, each lab counting alike.

    They are of software, in seconds of a round trip; of bytes' time over the rate's; and of the share of
    all cores that a rank's software takes. Least squares of logarithms, in which a few sizes that are far
    off count less. Raises UserError for no lab.

    waking : seconds that a round trip takes besides for each second of one link's delay. Ranks that sleep
        leave the cores to others, so with it no software waits, and the share does nothing. None: ranks
        wake at once, and wait for a core
    """
    from scipy.optimize import least_squares

    if not labs:
        raise UserError("no lab to extrapolate from: calibrate one at least")
    counts = [lab.bytes.size for lab in labs]
    sizes = np.concatenate([lab.bytes for lab in labs])
    seconds = np.concatenate([lab.seconds for lab in labs])
    alike = np.repeat([count**-0.5 for count in counts], counts) * np.sqrt(sizes.size / len(labs))
    rings = [asdict(ring_of(np.zeros(3), lab.named, lab.workers, waking)) for lab in labs]
    known = {name: np.repeat([ring[name] for ring in rings], counts) for name in rings[0]}
    first = labs[0]
    step_s = float(first.seconds[0]) / (2 * (first.workers - 1)) - 4 * first.named.delay_s
    software, share = np.log(max(2e-5, step_s)), -np.log(cores)

    def off(values: Floats) -> Floats:
        software_s, over, of_cores = np.moveaxis(np.exp(values), -1, 0)[..., None]
        fitted = {"software_s": software_s, "core_share": of_cores * (waking is None)}
        fitted["link_s_per_byte"] = over * known["link_s_per_byte"]
        predicted_s = ring_s(sizes, **{**known, **fitted})
        misses = np.log(predicted_s / seconds) * alike / SCATTER
        # Labs of one number of ranks do not tell the share: it may well be off by a factor of e.
        return np.concatenate([misses, values[..., 2:] - share], axis=-1)

    def slopes(values: Floats) -> Floats:
        step = 1e-5 * np.eye(3)
        return np.asarray((off(values + step) - off(values - step)).T / 2e-5)

    # Whether ranks wait for cores at all is no small step: from both sides.
    starts = [(software, 0.0, share), (software, 0.0, share - np.log(8))]
    how: Any = {"bounds": ([-20, -0.5, -6], [0, 0.5, 0]), "loss": "soft_l1"}
    fits = [least_squares(off, np.array(start), slopes, **how) for start in starts]
    return np.asarray(min(fits, key=lambda fit: fit.cost).x)


def ring_of(values: Floats, named: Named, workers: int, waking: float | None = None) -> GlooRing:
    """Return the ring of `fit_rings`'s values over links of that rate and delay, whatever else they do."""
    software_s, over, share = np.exp(values).tolist()
    return GlooRing(
        software_s,
        over * 8 / (named.rate_bits_per_s * named.framing),
        workers,
        delay_s=named.delay_s * (1 + (waking or 0.0) / 4),
        burst_s=named.burst_s,
        core_share=share * (waking is None),
    )


# -- a lab's own law -------------------------------------------------------------------------------

LAW, TABLE = "law", "table"
SMOOTH = 0.25
"""Of the misses of a size's two neighbours each, in its own; the rest is its own."""
LEAST_SIZES = 5
"""Of a calibration that a law of three numbers is fitted to and judged by."""


@dataclass(frozen=True, eq=False)
class OwnLaw:
    """gloo's law as one lab's medians say it.

    lab : with its medians; cores : of the machine; ring : the law fitted to them
    """

    lab: RingLab
    cores: int
    ring: GlooRing

    @classmethod
    def of(cls, lab: RingLab, cores: int) -> OwnLaw:
        """Return the law fitted to a lab's medians."""
        return cls(lab, cores, ring_of(fit_rings([lab], cores), lab.named, lab.workers))

    def seconds(self, n_bytes: Floats) -> Floats:
        """Return seconds of messages of ``n_bytes`` (k,): the law, and what it misses."""
        missed = smoothed(np.log(self.lab.seconds / self.ring(self.lab.bytes)))
        return np.asarray(self.ring(n_bytes) * np.exp(self._between(n_bytes, missed)))

    def _between(self, n_bytes: Floats, values: Floats) -> Floats:
        """Return values at the sizes, straight in the logarithm of bytes between them, constant beyond."""
        return np.interp(np.log(n_bytes), np.log(self.lab.bytes), values)

    def held_out_errors(self) -> Floats:
        """Return (s,) error at each size, as a logarithm, when all others tell it; ends as neighbours."""
        count = self.lab.bytes.size
        errors = np.zeros(count)
        for k in range(1, count - 1):
            kept = np.arange(count) != k
            others = self.lab._replace(bytes=self.lab.bytes[kept], seconds=self.lab.seconds[kept])
            predicted_s = OwnLaw.of(others, self.cores).seconds(self.lab.bytes[k : k + 1])
            errors[k] = float(np.log(predicted_s[0] / self.lab.seconds[k]))
        errors[[0, -1]] = errors[[1, -2]]
        return errors

    def draws(self, medians: Floats, samples: Samples) -> Iterator[Table]:
        """Yield costs of resampled medians (d, s), each off as far as sizes held out are."""
        from scipy.stats import t as student

        lack = np.sqrt(smoothed(self.held_out_errors() ** 2))
        degrees = max(1, self.lab.bytes.size - 3)
        random = np.random.default_rng(0)
        off = student.ppf(random.uniform(size=medians.shape), degrees) * lack
        moved = np.log(medians / self.lab.seconds)
        for lacking, resampled in zip(off, moved, strict=True):
            factor = np.exp(self._between(OWN_GRID, lacking + smoothed(resampled)))
            yield self.cost(samples, factor)

    def cost(self, samples: Samples, factor: Floats | float = 1.0) -> Table:
        """Return what a message costs, computed at OWN_GRID, times a factor of each size there."""
        how: Any = {"workers": self.lab.workers, "algorithm": "ring", "samples": samples}
        return Table(OWN_GRID, self.seconds(OWN_GRID) * factor, **how)


def smoothed(values: Floats) -> Floats:
    """Return (s,) a size's own value and SMOOTH of each of its neighbours'; an end is its own neighbour.

    >>> smoothed(np.array([0.0, 4.0, 0.0])).tolist()
    [1.0, 2.0, 1.0]
    """
    beyond = np.concatenate([values[:1], values, values[-1:]])
    return np.asarray(SMOOTH * (beyond[:-2] + beyond[2:]) + (1 - 2 * SMOOTH) * values)


def by_law(calibration: Calibration, collectives: pd.DataFrame, cores: int) -> Calibration:
    """Return the same calibration with messages by the law, wherever it has something to say.

    That is gloo's own all-reduce over emulated links, of LEAST_SIZES or more. There the table stays too, as
    the cost that models on trial take for measured.

    collectives : the rows that it was fitted to; cores : of the machine
    """
    known = dict(calibration.known)
    rows = undisturbed(collectives[collectives["in_flight"] == 1])
    for key, own in by_link(rows):
        stepped = own["algorithm"].astype(str).str.startswith(STEPS).any()
        ring = key[2] == "all_reduce" and not stepped and key[0].startswith("emulated:")
        if key in known and ring and own["bytes"].nunique() >= LEAST_SIZES:
            known[key] = _by_own_law(known[key], own, cores)
    return Calibration(known)


def _by_own_law(table: Communication, rows: pd.DataFrame, cores: int) -> Communication:
    """Return one lab by the law; noise and link as they are."""
    groups = [(float(n), own["seconds"].to_numpy()) for n, own in rows.groupby("bytes")]
    sizes = np.array([n for n, _ in groups])
    seconds = np.array([np.median(own) for _, own in groups])
    link, workers = rows["link"].iloc[0], int(rows["ranks"].iloc[0])
    law = OwnLaw.of(RingLab(link, workers, sizes, seconds), cores)
    random, draws = np.random.default_rng(0), len(table.draws) and DRAWS
    medians = [np.median(random.choice(own, (draws, own.size)), axis=1) for _, own in groups]
    messages = rows.groupby("bytes")["messages_per_sample"].first()
    samples = Samples(sizes, messages.to_numpy(float))
    drawn = tuple(law.draws(np.stack(medians, axis=1), samples)) if draws else ()
    others = {**table.others, OWN: table.cost}
    return replace(table, cost=law.cost(samples), draws=drawn, others=others)


# -- labs that were never measured -----------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Rings:
    """gloo's all-reduce in any lab of equal links, from labs that were calibrated.

    labs : to transfer from; cores : of their machine; software : messages' software that it does at once
    waking : as of `fit_rings`
    """

    labs: Sequence[RingLab]
    cores: int
    software: float = np.inf
    waking: float | None = None

    @classmethod
    def of(cls, rows: pd.DataFrame, link: str, cores: int, waking: float | None = None) -> Rings:
        """Return those most like ``link``, to be transferred to it.

        Those are of its engine, and emulated ones with a delay where it has one: without, a link is as quick
        as the process that it is. Where there is none of them, those of its engine, or else all.

        rows : of a table ``collectives`` of one machine; waking : of emulated links with a delay, no others
        Raises UserError where there is no lab at all.
        """
        labs = ring_labs(rows)
        if not labs:
            what = "calibrate one at least, all_reduce, one message in flight"
            raise UserError(f"no lab of equal links to extrapolate from: {what}")
        kind = kind_of(link)
        kinds = [[lab for lab in labs if kind_of(lab.link)[:n] == kind[:n]] for n in (2, 1, 0)]
        several = [own for _, own in rows.groupby(["link", "ranks"])]
        at_once = min((software_at_once(own) for own in several), default=np.inf)
        return cls(next(filter(None, kinds)), cores, at_once, waking if kind == DELAYED else None)

    @cached_property
    def values(self) -> Floats:
        """What all labs say, (3,) as of `fit_rings`."""
        return fit_rings(self.labs, self.cores, self.waking)

    @cached_property
    def held_out(self) -> list[GlooRing]:
        """Each lab's ring as all others say; none for a single lab."""
        rings = []
        for lab in self.labs if len(self.labs) > 1 else ():
            others = [other for other in self.labs if other is not lab]
            values = fit_rings(others, self.cores, self.waking)
            rings.append(ring_of(values, lab.named, lab.workers, self.waking))
        return rings

    def at(self, link: str, workers: int) -> GlooRing:
        """Return the cost over a link, by its name."""
        return ring_of(self.values, read_link(link), workers, self.waking)

    def between(self, link: str, workers: int) -> Communication:
        """Return all that a forecast needs. Its noise holds the error of being told from other labs.

        That error is the labs' own when each is held out, where bytes, software and delay stand to one
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
        """Return the noise, at NOISE_SIZES, of the lab that ``ring`` is of.

        Each size of each lab counts by how near it is in `_places`, in units of NEIGHBOURS; single messages
        scatter as they do at the nearest.
        """
        places = [_places(self.at(lab.link, lab.workers), lab.bytes) for lab in self.labs]
        squares = [
            np.log(ring(lab.bytes) / lab.seconds) ** 2 + lab.drift**2
            for lab, ring in zip(self.labs, self.held_out, strict=True)
        ]
        ratios, drift, degrees = [], [], []
        for place in _places(ring, NOISE_SIZES).T[:, :, None]:
            far = [((lab - place) ** 2).sum(axis=0) / np.log(NEIGHBOURS) ** 2 for lab in places]
            least = min(float(lab.min()) for lab in far)
            weights = [np.exp((least - lab) / 2) for lab in far]
            each = np.array([lab.sum() for lab in weights])
            both = zip(weights, squares, strict=True)
            drift.append((sum(float(w @ square) for w, square in both) / each.sum()) ** 0.5)
            degrees.append(max(1.0, each.sum() ** 2 / (each**2).sum() - 1))
            pairs = zip(self.labs, far, strict=True)
            kept = [lab.ratios[k] for lab, off in pairs for k in np.flatnonzero(off <= least + 1)]
            ratios.append(np.concatenate(kept))
        return Noise(NOISE_SIZES, tuple(ratios), np.array(drift), np.array(degrees))


def _places(ring: GlooRing, sizes: Floats) -> Floats:
    """Return (2, s) logarithms: of bytes' time over all other; of a round trip's software over its delay."""
    bytes_s = ring.bytes_s(sizes)
    other_s = np.maximum(1e-9, ring(sizes) - bytes_s)
    waits = max(1.0, ring.workers * ring.core_share)
    trip = np.log(max(1e-6, ring.software_s * waits) / max(1e-5, 4 * ring.delay_s))
    return np.stack([np.log(bytes_s / other_s), np.full(sizes.shape, trip)])


def transferred(
    rows: pd.DataFrame, labs: Iterable[tuple[str, int]], cores: int, waking: float | None = None
) -> Calibration:
    """Return gloo's all-reduce in each (link, workers), from labs that were calibrated.

    rows : of a table ``collectives`` of one machine, of any labs; link : as "emulated:500mbit-delay2ms"

    Raises UserError for rows without a lab of equal links, and for a link that is not one.
    """
    known, rings = {}, dict[tuple[str, bool], Rings]()
    for link, workers in labs:
        kind = kind_of(link)
        if kind not in rings:
            rings[kind] = Rings.of(rows, link, cores, waking)
        known[link, workers, "all_reduce"] = rings[kind].between(link, workers)
    return Calibration(known)


def kind_of(link: str) -> tuple[str, bool]:
    """Return a link's engine, and whether it has a delay. Raises UserError for links that are not equal."""
    if not EQUAL.fullmatch(link):
        kind = "equal links that lose nothing, as emulated:500mbit-delay2ms"
        raise UserError(f"no cost can be transferred to {link}: only to {kind}")
    named = read_link(link)
    return named.engine, named.delay_s > 0
