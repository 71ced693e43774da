"""What figure 8's throughputs, within their rounding, imply of other printed numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ddlkit.core.workload import Floats
from workbook.common.claims import Evidence, Result, own, prose
from workbook.sharing import equations
from workbook.sharing.printed import DEFAULT, throughput

PARTS = {
    "computation": (1, 1, 0),
    "communication": (0, 1, 1),
    "overlap": (0, 1, 0),
    "computation-only": (1, 0, 0),
    "communication-only": (0, 0, 1),
}
"""Which parts of an iteration each printed time has.

The parts are computation alone, both at once, and communication alone."""


def iteration_ms(network: str, batch: int, configuration: str) -> Floats:
    """Return the shortest and the longest iteration that figure 8 allows.

    Parameters
    ----------
    network : str
        The name of the network in the paper.
    batch : int
        The batch size.
    configuration : str
        A configuration, "default", or "best".

    Returns
    -------
    ndarray, shape (2,)
        Milliseconds. Figure 8 rounds images per second to whole numbers.
    """
    row = throughput().loc[(network, batch)]
    named = {"default": DEFAULT, "best": row.idxmax()}
    images_per_s = row[named.get(configuration, configuration)]
    shortest_s = equations.iteration_s(batch, images_per_s + 0.5)
    longest_s = equations.iteration_s(batch, images_per_s - 0.5)
    return np.array([1e3 * shortest_s, 1e3 * longest_s])


def gain(network: str, batch: int, configuration: str = "") -> Result:
    """Return the gain over the default within the rounding of figure 8, in per cent.

    Parameters
    ----------
    network : str
        The name of the network in the paper.
    batch : int
        The batch size.
    configuration : str, optional
        A configuration, by default the best.
    """
    row = throughput().loc[(network, batch)]
    best = str(row.idxmax())
    name = configuration or best
    percents = [100 * end for end in equations.gain_range(row[name], row[DEFAULT])]
    # A gain of g in throughput saves g / (1 + g) of the time.
    saved = " to ".join(f"{percent / (100 + percent):.1%}" for percent in percents)
    note = (
        f"from Fig 8: {network}, batch {batch}, {name} (best: {best}); "
        f"as time saved {saved}"
    )
    return own([percents], note)


def time_left(
    text: str, network: str, batch: int, part: str, configuration: str
) -> Result:
    """Return which times a part of an iteration can have by all that is printed of it.

    The parts cannot add up to more than the iteration of figure 8, and the other printed
    times hold within their rounding. The least and the largest time are the solutions of
    two linear programs in the three parts.

    Parameters
    ----------
    text : str
        How the ids of the printed times in prose.csv begin, such as "fig05c".
    network : str
        The name of the network in the paper.
    batch : int
        The batch size.
    part : str
        Which of PARTS.
    configuration : str
        A configuration, "default", or "best".

    Returns
    -------
    Result
        A bound, in milliseconds.
    """
    # SciPy takes long to import.
    from scipy.optimize import linprog

    longest_ms = iteration_ms(network, batch, configuration)[1]
    # Each sum of the parts is at most as long as its bound.
    sums = [(1, 1, 1)]
    bounds_ms = [longest_ms]
    others = []
    for key, ms in prose("sharing").items():
        name = key.removeprefix(f"{text}-").removesuffix(f"-{configuration}")
        if key.startswith(text) and name in PARTS and name != part:
            sums.append(PARTS[name])
            bounds_ms.append(ms + 0.5)
            # The lower bound is an upper bound of the negative.
            sums.append(tuple(-np.array(PARTS[name])))
            bounds_ms.append(0.5 - ms)
            others.append(f"{ms:.0f} ms of {name}")

    objective = np.array(PARTS[part])
    least = linprog(objective, sums, bounds_ms)
    most = linprog(-objective, sums, bounds_ms)
    note = f"what fits into an iteration of at most {longest_ms:.1f} ms (Fig 8)"
    if others:
        note += f", with {' and '.join(others)}, half a ms either way"
    # The marginal of the first sum is 0 if the iteration's length does not matter.
    if not least.ineqlin.marginals[0] and not most.ineqlin.marginals[0]:
        note += (
            "; Fig 8 does not bind, only that no more overlaps than is computed or sent"
        )
    return replace(own([[least.fun, -most.fun]], note), evidence=Evidence.BOUND)
