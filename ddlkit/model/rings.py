"""gloo's ring law (`ddlkit.core.link`) fitted to labs: to one lab's own sizes, and to all for another.

*Own law*: fitted to the lab's medians; what it misses is kept, smoothed over neighbouring sizes. *Transfer*:
all labs of a machine fit one law, which predicts a lab that they have not seen.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from ddlkit.core.cost import DRAWS, Samples, Table
from ddlkit.core.link import STEPS, GlooRing, Named, read_link
from ddlkit.core.workload import Floats
from ddlkit.model.calibration import Calibration, Communication, by_link, undisturbed
from ddlkit.model.predictor import OWN

EQUAL = re.compile(r"lab:[\w.]+bit|emulated:[\w.]+bit-delay[\d.]+ms(-burst[\d.]+ms)?")
SCATTER = 0.03  # relative error of a lab's median, beside which prior beliefs count
OWN_GRID: Floats = np.exp2(np.arange(8.0, 30.01, 1 / 16))  # bytes at which costs are computed


class RingLab(NamedTuple):
    """One calibrated lab: what its link is, and of each size (s,) the median."""

    link: str
    workers: int
    bytes: Floats
    seconds: Floats

    @property
    def named(self) -> Named:
        """Return what its link's name says."""
        return read_link(self.link)

    @property
    def kind(self) -> tuple[str, bool]:
        """Return its link's engine, and whether it has a delay."""
        return self.named.engine, self.named.delay_s > 0


def ring_labs(rows: pd.DataFrame) -> list[RingLab]:
    """Return labs of equal links in which gloo's own all-reduce was calibrated, one message in flight."""
    rows = rows[~rows["algorithm"].astype(str).str.startswith(STEPS)]
    rows = rows.query("collective == 'all_reduce' and algorithm == 'ring' and in_flight == 1")
    rows = undisturbed(rows[rows["link"].str.fullmatch(EQUAL)])
    labs = []
    for (link, ranks), lab in rows.groupby(["link", "ranks"]):
        medians = lab.groupby("bytes")["seconds"].median()
        sizes, seconds = medians.index.to_numpy(float), medians.to_numpy()
        labs.append(RingLab(str(link), int(ranks), sizes, seconds))
    return labs


def fit_rings(labs: Sequence[RingLab], cores: int, waking: float | None = None) -> Floats:
    """Return (3,) logarithms that all labs together say, each lab counting alike.

    They are of software, in seconds of a round trip; of bytes' time over the rate's; and of the share of all
    cores that a rank's software takes.

    waking : seconds that a round trip takes besides for each second of one link's delay; then no software
        waits for a core, as ranks sleep. None: ranks wake at once
    """
    from scipy.optimize import least_squares

    counts = [lab.bytes.size for lab in labs]
    sizes = np.concatenate([lab.bytes for lab in labs])
    seconds = np.concatenate([lab.seconds for lab in labs])
    alike = np.repeat([count**-0.5 for count in counts], counts) * np.sqrt(sizes.size / len(labs))
    rings = [vars(ring_of(np.zeros(3), lab.named, lab.workers, waking)) for lab in labs]
    known = {name: np.repeat([ring[name] for ring in rings], counts) for name in rings[0]}
    first = labs[0]
    step_s = float(first.seconds[0]) / (2 * (first.workers - 1)) - 4 * first.named.delay_s
    software, share = np.log(max(2e-5, step_s)), -np.log(cores)

    def off(values: Floats) -> Floats:
        software_s, over, of_cores = np.moveaxis(np.exp(values), -1, 0)[..., None]
        fitted = {"software_s": software_s, "core_share": of_cores * (waking is None)}
        fitted["link_s_per_byte"] = over * known["link_s_per_byte"]
        predicted_s = GlooRing(**{**known, **fitted})(sizes)
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


LAW, TABLE = "law", "table"  # what a lab's cost is: gloo's law fitted to its medians, or these
SMOOTH, LEAST_SIZES = 0.25, 5


@dataclass(frozen=True, eq=False)
class OwnLaw:
    """gloo's law (``ring``) as one lab's medians say it; cores : of the machine."""

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
    """Return (s,) a size's own value and SMOOTH of each of its neighbours'; an end is its own neighbour."""
    beyond = np.concatenate([values[:1], values, values[-1:]])
    return np.asarray(SMOOTH * (beyond[:-2] + beyond[2:]) + (1 - 2 * SMOOTH) * values)


def by_law(calibration: Calibration, collectives: pd.DataFrame, cores: int) -> Calibration:
    """Return the same calibration with messages by the law, where it applies; the table stays as OWN.

    That is gloo's own all-reduce over emulated links, of LEAST_SIZES or more. cores : of the machine
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


def held_out_rings(
    labs: Sequence[RingLab], cores: int, waking: float | None = None
) -> list[GlooRing]:
    """Return each lab's ring as all others say; none for a single lab. waking : as of `fit_rings`"""
    rings = []
    for lab in labs if len(labs) > 1 else ():
        others = [other for other in labs if other is not lab]
        rings.append(ring_of(fit_rings(others, cores, waking), lab.named, lab.workers, waking))
    return rings
