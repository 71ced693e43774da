"""A lab's own calibration by gloo's law: what a message costs between the sizes that were measured.

A table runs straight from one size to the next. gloo's ring does not: it cuts messages into segments that
hide each other's round trips (`ddlkit.core.gloo_ring`). So the law's three numbers are fitted to the lab's
own medians, and what it misses there is kept: the logarithms of measured over told, smoothed over
neighbouring sizes, as single medians scatter, and straight between them. Where a link does what the law
knows nothing of, as one that loses packets, that correction carries the cost.

How far it may be off between sizes is told by leaving sizes out: of each inner size, the error of what all
others say. Intervals hold that error, by Student's t with as many degrees as sizes tell it.

Chosen on the campaign ``campaign-links``, which no longer judges it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from ddlkit.core.cost import Samples, Table
from ddlkit.core.gloo_ring import GlooRing
from ddlkit.core.schedule import STEPS
from ddlkit.core.workload import Floats
from ddlkit.model.calibration import Calibration, Communication, undisturbed
from ddlkit.model.extrapolation import RingLab, fit_rings, ring_of
from ddlkit.model.trials import OWN

LAW, TABLE = "law", "table"
COSTS = (LAW, TABLE)
"""What a message costs in a lab that was calibrated: the law fitted to it, or its table of medians."""
SMOOTH = 0.25
"""Of the misses of a size's two neighbours each, in its own; the rest is its own."""
LEAST_SIZES = 5
"""Of a calibration that a law of three numbers is fitted to and judged by."""
GRID: Floats = np.exp2(np.arange(8.0, 30.01, 1 / 16))
"""Bytes at which the cost is computed; between them it is interpolated."""
DRAWS = 200


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
        """Fitted to a lab's medians."""
        return cls(lab, cores, ring_of(fit_rings([lab], cores), lab.named, lab.workers))

    @property
    def missed(self) -> Floats:
        """(s,) logarithms of measured over told, smoothed over neighbouring sizes."""
        return smoothed(np.log(self.lab.seconds / self.ring(self.lab.bytes)))

    def seconds(self, n_bytes: Floats) -> Floats:
        """Of messages of ``n_bytes`` (k,): the law, and what it misses."""
        return np.asarray(self.ring(n_bytes) * np.exp(self._between(n_bytes, self.missed)))

    def _between(self, n_bytes: Floats, values: Floats) -> Floats:
        """Values at the sizes, straight in the logarithm of bytes between them, constant beyond."""
        return np.interp(np.log(n_bytes), np.log(self.lab.bytes), values)

    def left_out(self) -> Floats:
        """(s,) error at each size, as a logarithm, when all others tell it; an end has its neighbour's."""
        count = self.lab.bytes.size
        errors = np.zeros(count)
        for k in range(1, count - 1):
            kept = np.arange(count) != k
            others = self.lab._replace(bytes=self.lab.bytes[kept], seconds=self.lab.seconds[kept])
            told = OwnLaw.of(others, self.cores).seconds(self.lab.bytes[k : k + 1])
            errors[k] = float(np.log(told[0] / self.lab.seconds[k]))
        errors[[0, -1]] = errors[[1, -2]]
        return errors

    def draws(self, medians: Floats, samples: Samples) -> Iterator[Table]:
        """Costs that it may as well be: of resampled medians (d, s), off as far as sizes left out are."""
        from scipy.stats import t as student

        lack = np.sqrt(smoothed(self.left_out() ** 2))
        degrees = max(1, self.lab.bytes.size - 3)
        random = np.random.default_rng(0)
        off = student.ppf(random.uniform(size=medians.shape), degrees) * lack
        moved = np.log(medians / self.lab.seconds)
        base = self.seconds(GRID)
        for one, other in zip(off, moved, strict=True):
            yield self._table(base * np.exp(self._between(GRID, one + smoothed(other))), samples)

    def cost(self, samples: Samples) -> Table:
        """What a message costs, computed at GRID."""
        return self._table(self.seconds(GRID), samples)

    def _table(self, seconds: Floats, samples: Samples) -> Table:
        return Table(GRID, seconds, workers=self.lab.workers, algorithm="ring", samples=samples)


def smoothed(values: Floats) -> Floats:
    """(s,) a size's own value, and SMOOTH of each of its neighbours'; at an end it is its own neighbour.

    >>> smoothed(np.array([0.0, 4.0, 0.0])).tolist()
    [1.0, 2.0, 1.0]
    """
    beyond = np.concatenate([values[:1], values, values[-1:]])
    return np.asarray(SMOOTH * (beyond[:-2] + beyond[2:]) + (1 - 2 * SMOOTH) * values)


def by_law(calibration: Calibration, collectives: pd.DataFrame, cores: int) -> Calibration:
    """The same calibration with messages by the law, wherever it has something to say; all else stays.

    That is gloo's own all-reduce over emulated links, of LEAST_SIZES or more. There the table stays too, as
    the cost that models on trial take for measured.

    collectives : the rows that it was fitted to; cores : of the machine
    """
    known = dict(calibration.known)
    rows = undisturbed(collectives[collectives["in_flight"] == 1])
    for (link, ranks, collective), own in rows.groupby(["link", "ranks", "collective"]):
        key = str(link), int(ranks), str(collective)
        stepped = own["algorithm"].astype(str).str.startswith(STEPS).any()
        ring = collective == "all_reduce" and not stepped and str(link).startswith("emulated:")
        if key in known and ring and own["bytes"].nunique() >= LEAST_SIZES:
            known[key] = _told(known[key], own, cores)
    return Calibration(known)


def _told(table: Communication, rows: pd.DataFrame, cores: int) -> Communication:
    """One lab by the law; noise and link as they are."""
    groups = [(float(n), own["seconds"].to_numpy()) for n, own in rows.groupby("bytes")]
    sizes = np.array([n for n, _ in groups])
    seconds = np.array([np.median(own) for _, own in groups])
    link, workers = str(rows["link"].iloc[0]), int(rows["ranks"].iloc[0])
    law = OwnLaw.of(RingLab(link, workers, sizes, seconds, (), 0.0), cores)
    random, draws = np.random.default_rng(0), len(table.draws) and DRAWS
    medians = [np.median(random.choice(own, (draws, own.size)), axis=1) for _, own in groups]
    messages = rows.groupby("bytes")["messages_per_sample"].first()
    samples = Samples(sizes, messages.to_numpy(float))
    drawn = tuple(law.draws(np.stack(medians, axis=1), samples)) if draws else ()
    return replace(
        table, cost=law.cost(samples), draws=drawn, others={**table.others, OWN: table.cost}
    )


def named_cost(calibration: Calibration, key: tuple[str, int, str]) -> str:
    """Which of COSTS one of its links, numbers of workers and collectives has."""
    return LAW if OWN in calibration.known[key].others else TABLE
