"""How often the 95% intervals of fits hold what the fits have not seen, log by log of others' all-reduces."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pandas as pd

from ddlkit.core.fit import AUTO, fit
from ddlkit.core.workload import Floats
from ddlkit.formats.clusters import EXTERNAL, abci, cs336
from ddlkit.report.clusters import vidur
from ddlkit.report.fits import held_intervals

PLACES = ("out_of_place_s", "in_place_s")
LEFT_OUT, OTHERS = "each inner size, left out in turn", "all sizes but 12"


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
        found.append((name, form, LEFT_OUT, int(inside.sum()), inside.size))
    dense = vidur.judged(vidur.predictions())
    for row in dense.itertuples():
        found.append((f"vidur {row.table}", row.fitted, OTHERS, row.covered, row.n))
    return pd.DataFrame(found, columns=["log", "form", "asked", "covered", "n"])


def by_log(every: int = 1) -> pd.DataFrame:
    """A row per log: the form that AUTO chooses, what is asked, and covered of n rows.

    Of logs with one row a size, or two, each inner size (or every second, third...) is left out of a fit of
    the form that the whole log chose; n is 0 where the sizes are too few for an interval. A dense table is
    calibrated by the twelve sizes of its rule, and asked for all others.
    """
    return _by_log(every).copy()
