"""How well forms of a message cost hold on measured times: at sizes left out, and calibrated by a few sizes.

What is asked of a calibration, fixed before it was computed: a table is *dense* if it has DENSE_SIZES sizes
or more between DENSE_FROM and DENSE_TO and reaches both. CALIBRATION of its sizes, the nearest to evenly
spaced ones over the logarithm of the size, both ends among them, are fitted; every other size between them is
predicted. An error is |predicted / median of the times there - 1|. Of each table and form: the median of all
errors, which should be at most GOAL; their median below SMALL_TO, which should be at most GOAL_SMALL; and the
worst, which has no goal. Tables that are not dense are treated alike, from their first size to their last.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike

from ddlkit.core.fit import fit as fit_cost
from ddlkit.core.fit import unseen_errors
from ddlkit.core.units import MIB
from ddlkit.core.workload import Floats

CALIBRATION = 12
DENSE_SIZES, DENSE_FROM, DENSE_TO = 48, 1 * MIB, 1024 * MIB
SMALL_TO = 25 * MIB
"""Below it are the messages that DistributedDataParallel sends of itself."""
GOAL, GOAL_SMALL = 0.01, 0.05


def calibration_sizes(sizes: ArrayLike, count: int = CALIBRATION) -> Floats:
    """Of the distinct ``sizes`` the ``count`` nearest to evenly spaced ones over the logarithm."""
    distinct = np.unique(np.asarray(sizes, dtype=float))
    wanted = np.linspace(*np.log(distinct[[0, -1]]), count)
    nearest = np.abs(np.log(distinct)[:, None] - wanted).argmin(axis=0)
    return np.asarray(distinct[np.unique(nearest)])


def calibrated_errors(form: str, sizes: ArrayLike, seconds: ArrayLike) -> tuple[Floats, Floats]:
    """Sizes that a calibration of a few has not seen, and the signed relative error of the median there.

    form : as `ddlkit.core.fit.fit` takes it; sizes, seconds : (n,) rows, sizes may repeat
    """
    sizes, seconds = np.asarray(sizes, dtype=float), np.asarray(seconds, dtype=float)
    seen = np.isin(sizes, calibration_sizes(sizes))
    at, errors = unseen_errors(
        lambda *rows: fit_cost(form, *rows, draws=0).cost,
        (sizes[seen], seconds[seen]),
        (sizes[~seen], seconds[~seen]),
    )
    return at, errors
