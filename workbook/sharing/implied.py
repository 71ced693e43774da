"""What figure 8's throughputs, within their rounding, imply of other printed numbers."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ddlkit.core.workload import Floats
from workbook.common.claims import Evidence, Result, own, prose
from workbook.sharing import equations
from workbook.sharing.printed import DEFAULT, throughput

INCLUDED_PARTS = {
    "computation": (1, 1, 0),
    "communication": (0, 1, 1),
    "overlap": (0, 1, 0),
    "computation-only": (1, 0, 0),
    "communication-only": (0, 0, 1),
}
"""Which parts of an iteration each printed time includes: 1 for each part in it, else 0.

The parts are those of `workbook.sharing.model.PARTS`, in this order: computation only,
overlap, and communication only."""


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
    # Any other configuration stands for itself, such as "1x64".
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
        A configuration such as "1x256", by default the best of figure 8.

    Returns
    -------
    Result
        The least and the largest gain.
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


def possible_times(
    text: str, network: str, batch: int, time: str, configuration: str
) -> Result:
    """Return the range in which a printed time must lie by the other printed numbers.

    A linear program has three unknowns: how long an iteration spends on computation only,
    on overlap, and on communication only. None is negative. Together they take at most the
    longest iteration that figure 8 allows. The other printed times of the iteration are
    sums of them, and hold within their rounding. The range goes from the least to the
    largest value of the time under these constraints.

    Parameters
    ----------
    text : str
        How the ids of the printed times in prose.csv begin, such as "fig05c".
    network : str
        The name of the network in the paper.
    batch : int
        The batch size.
    time : str
        The name of the time whose range is returned, one of the keys of INCLUDED_PARTS.
    configuration : str
        A configuration such as "1x64", "default", or "best".

    Returns
    -------
    Result
        The ends of the range, in milliseconds.
    """
    # SciPy takes long to import.
    from scipy.optimize import linprog

    longest_ms = iteration_ms(network, batch, configuration)[1]
    # Each constraint bounds a sum of the unknowns from above. The first one is that of the
    # iteration, which is the sum of all three.
    sums = [(1, 1, 1)]
    bounds_ms = [longest_ms]
    others = []
    for key, ms in prose("sharing").items():
        # The ids are such as "fig07-vgg16-overlap-best". Some times hold for every
        # configuration, and have none at the end.
        name = key.removeprefix(f"{text}-").removesuffix(f"-{configuration}")
        if key.startswith(text) and name in INCLUDED_PARTS and name != time:
            # The text prints whole milliseconds.
            sums.append(INCLUDED_PARTS[name])
            bounds_ms.append(ms + 0.5)
            # Sums are bounded from above only, so that a lower bound is one of the negative sum.
            sums.append(tuple(-np.array(INCLUDED_PARTS[name])))
            bounds_ms.append(0.5 - ms)
            others.append(f"{ms:.0f} ms of {name}")

    objective = np.array(INCLUDED_PARTS[time])
    least = linprog(objective, sums, bounds_ms)
    # The program minimises. The largest time is the minimum of the negative, negated below.
    most = linprog(-objective, sums, bounds_ms)
    note = f"what fits into an iteration of at most {longest_ms:.1f} ms (Fig 8)"
    if others:
        note += f", with {' and '.join(others)}, half a ms either way"
    # The marginal of the first constraint says how much the solution would change with the
    # length of the iteration. It is 0 if the constraint does not bind.
    if not least.ineqlin.marginals[0] and not most.ineqlin.marginals[0]:
        note += (
            "; Fig 8 does not bind, only that no more overlaps than is computed or sent"
        )
    return replace(own([[least.fun, -most.fun]], note), evidence=Evidence.BOUND)
