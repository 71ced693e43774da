"""How often the 95% intervals of fits hold what the fits have not seen, log by log of others' all-reduces.

And how often one could expect it: an interval learned from few errors holds 95% only in the mean over logs.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import pandas as pd

from ddlkit.core.doubt import HeldOut
from ddlkit.core.fit import AUTO, fit
from ddlkit.core.workload import Floats
from ddlkit.formats.clusters import EXTERNAL, abci, cs336
from ddlkit.report.clusters import vidur
from ddlkit.report.fits import CALIBRATION, held_intervals

PLACES = ("out_of_place_s", "in_place_s")
LEFT_OUT, OTHERS = "each inner size, left out in turn", "all sizes but 12"

BAND = (0.90, 0.99)
"""Of what it has not seen, a 95% interval should hold a share between these."""


def logs() -> Iterator[tuple[str, Floats, Floats]]:
    """Name, (n,) bytes and (n,) seconds of every log but the dense tables; both places in their rows."""
    for path in sorted((EXTERNAL / "abci").glob("allreduce_*.log.gz")):
        rows = abci.read_all_reduce(path).melt("bytes", PLACES, value_name="seconds")
        name = path.name.removeprefix("allreduce_").removesuffix(".log.gz")
        yield f"abci {name}", rows["bytes"].to_numpy(float), rows["seconds"].to_numpy()
    for ranks, rows in cs336.read_all_reduce(EXTERNAL / "cs336" / "all_reduce.csv").groupby(
        "ranks"
    ):
        yield (
            f"cs336 {ranks} ranks",
            rows["bytes"].to_numpy(float),
            rows["seconds"].to_numpy(),
        )


@cache
def _by_log(every: int) -> pd.DataFrame:
    found = []
    for name, sizes, seconds in logs():
        form = fit(AUTO, sizes, seconds, draws=0).form
        inside = held_intervals(form, sizes, seconds, every)
        inner = np.unique(sizes).size - 2
        ideal = chance_in_turn(inner, len(sizes) // (inner + 2))
        found.append((name, form, LEFT_OUT, int(inside.sum()), inside.size, ideal))
    dense = vidur.judged(vidur.predictions())
    for row in dense.itertuples():
        ideal = chance(CALIBRATION - 2, row.n)
        found.append((f"vidur {row.table}", row.fitted, OTHERS, row.covered, row.n, ideal))
    return pd.DataFrame(found, columns=["log", "form", "asked", "covered", "n", "ideal"])


def by_log(every: int = 1) -> pd.DataFrame:
    """A row per log: the form that AUTO chooses, what is asked, covered of n rows, and an ideal log's chance.

    Of logs with one row a size, or two, each inner size (or every second, third...) is left out of a fit of
    the form that the whole log chose; n is 0 where the sizes are too few for an interval. A dense table is
    calibrated by the twelve sizes of its rule, and asked for all others. ideal : how likely the share covered
    is within BAND, of every inner size, if errors are draws of one law: `chance` or `chance_in_turn`
    """
    return _by_log(every).copy()


# -- what luck allows --------------------------------------------------------------------------

POINTS = 2000
"""Quantiles over which a chance is averaged; or draws where it is simulated."""


def chance(known: int, asked: int, of_mean: bool = False) -> float:
    """How likely an interval of an ideal log holds a share within BAND of ``asked`` rows.

    Of an ideal log all errors, the ``known`` ones and those of rows asked, are independent draws of one law,
    an exponential one of unknown scale; the interval is that of `ddlkit.core.doubt.HeldOut`, or, ``of_mean``,
    made from the known errors' mean, which no interval that is right in the mean can beat by much. The
    share that it holds is random in itself, as the known errors are: of a rank among them a beta law.
    """
    from scipy.stats import beta, binom, gamma

    at = (np.arange(POINTS) + 0.5) / POINTS
    rank = 0.95 * (known + 1)
    if of_mean:
        factor = known * (0.05 ** (-1 / known) - 1)
        held = 1 - np.exp(-factor * gamma(known, scale=1 / known).ppf(at))
    elif rank <= known:
        held = beta(rank, known + 1 - rank).ppf(at)
    else:  # beyond the largest, as far as an exponential law says
        held = 1 - beta(1, known).ppf(at) ** (np.log(0.05) / -np.log1p(known))
    least, most = np.ceil(BAND[0] * asked - 1e-9), np.floor(BAND[1] * asked + 1e-9)
    return float(np.mean(binom.cdf(most, asked, held) - binom.cdf(least - 1, asked, held)))


@cache
def chance_in_turn(sizes: int, rows: int) -> float:
    """As `chance`, simulated, where each of so many ``sizes`` is left out in turn, ``rows`` at each.

    What is asked of one size is known of all others: luck is shared out among them, and little is left.
    """
    random, held = np.random.default_rng(14), []
    for _ in range(POINTS // 10):
        errors = random.exponential(size=(sizes, rows))
        widths = [_width(np.delete(errors, k, axis=0).ravel()) for k in range(sizes)]
        held.append(np.mean(errors <= np.array(widths)[:, None]))
    return float(np.mean([BAND[0] <= share <= BAND[1] for share in held]))


def _width(errors: Floats) -> float:
    return float(HeldOut(np.sort(errors), 1.0, 1.0, 0.0, 0.0).quantile(0.95))
