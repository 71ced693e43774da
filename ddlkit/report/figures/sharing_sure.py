"""How far foretold training lies from measured training, and how sure that is: by rounds that are drawn anew.

All cells of a block, which is a network at one batch and link, are drawn by the same rounds: they share what
computing took there. What a model without any error would show is told by the halves of each cell, its even
rounds and its odd ones: half of what their errors differ by scatters as an error of all rounds does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

DRAWS = 400
Floats = NDArray[np.float64]


Taken = Sequence[int] | slice
"""Which rounds."""


class Rounds(NamedTuple):
    """Of one cell what was measured, and what it is foretold from: medians of both, each by itself.

    measured_s : (rounds,) iterations; base_s : (rounds, samples) of what they are foretold from
    at_s, said_s : (n,) rising bases, and the iteration foretold from each; straight between them
    """

    measured_s: Floats
    base_s: Floats
    at_s: Floats
    said_s: Floats

    def error(self, taken: Taken = slice(None)) -> float:
        """Foretold over measured, less 1, of these rounds."""
        whole_s = np.interp(float(np.median(self.base_s[taken])), self.at_s, self.said_s)
        return float(whole_s / np.median(self.measured_s[taken]) - 1)


class Pairs(NamedTuple):
    """Of one cell what was measured in each round, and foretold from the round's own base; both (rounds,)."""

    measured_s: Floats
    said_s: Floats

    def error(self, taken: Taken = slice(None)) -> float:
        """Foretold over measured, less 1: the median over these rounds."""
        return float(np.median(self.said_s[taken] / self.measured_s[taken]) - 1)


class Sure(NamedTuple):
    """Signed mean and median absolute error, with 95% intervals, and the median that noise alone shows.

    Rounds that are drawn anew scatter more than those that they are drawn of. So the median's interval lies
    too high: it says where medians of drawn rounds fall, not how small the model's own error may be.
    """

    cells: int
    mean: float
    mean_lower: float
    mean_upper: float
    median: float
    median_lower: float
    median_upper: float
    noise: float


def sure(blocks: Sequence[Sequence[Rounds | Pairs]]) -> Sure:
    """How sure the errors of these cells are, block by block."""
    cells = [cell for block in blocks for cell in block]
    found = np.array([cell.error() for cell in cells])
    even, odd = (np.array([cell.error(slice(k, None, 2)) for cell in cells]) for k in (0, 1))
    rng = np.random.default_rng(0)
    drawn = np.array([_drawn(blocks, rng) for _ in range(DRAWS)])
    means, medians = drawn.mean(axis=1), np.median(np.abs(drawn), axis=1)
    of_mean, of_median = (np.quantile(one, [0.025, 0.975]).tolist() for one in (means, medians))
    return Sure(
        cells=len(found),
        mean=float(found.mean()),
        mean_lower=of_mean[0],
        mean_upper=of_mean[1],
        median=float(np.median(np.abs(found))),
        median_lower=of_median[0],
        median_upper=of_median[1],
        noise=float(np.median(np.abs(even - odd)) / 2),
    )


def _drawn(blocks: Sequence[Sequence[Rounds | Pairs]], rng: np.random.Generator) -> Floats:
    off = []
    for block in blocks:
        count = min(len(cell.measured_s) for cell in block)
        taken = rng.integers(0, count, count).tolist()
        off += [cell.error(taken) for cell in block]
    return np.array(off)
