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
        Blocks and threads of the all-reduce, such as "1x64", or "default", or "best" for those
        with the largest throughput in figure 8.

    Returns
    -------
    ndarray, shape (2,)
        The shortest iteration and then the longest, in milliseconds. They differ because
        figure 8 rounds images per second to whole numbers.
    """
    row = throughput().loc[(network, batch)]
    named = {"default": DEFAULT, "best": row.idxmax()}
    # Blocks and threads, such as "1x64", are already the name of a column.
    images_per_s = row[named.get(configuration, configuration)]
    # The largest throughput has the shortest iteration.
    shortest_s = equations.iteration_s(batch, images_per_s + 0.5)
    longest_s = equations.iteration_s(batch, images_per_s - 0.5)
    return np.array([1e3 * shortest_s, 1e3 * longest_s])


def gain(network: str, batch: int, configuration: str = "") -> Result:
    """Return a configuration's gain in throughput over NCCL's default, in per cent.

    Figure 8 prints throughputs as whole numbers, so that the gain is a range.

    Parameters
    ----------
    network : str
        The name of the network in the paper.
    batch : int
        The batch size.
    configuration : str, optional
        Blocks and threads of the all-reduce, such as "1x256". If empty, those with the
        largest throughput in figure 8.

    Returns
    -------
    Result
        The least and the largest gain that the rounding of figure 8 allows.
    """
    row = throughput().loc[(network, batch)]
    best = str(row.idxmax())
    name = configuration or best
    percents = [100 * end for end in equations.gain_range(row[name], row[DEFAULT])]
    # A gain of g in throughput saves g / (1 + g) of the time, where g is percent / 100.
    saved = " to ".join(f"{percent / (100 + percent):.1%}" for percent in percents)
    note = (
        f"from Fig 8: {network}, batch {batch}, {name} (best: {best}); "
        f"as time saved {saved}"
    )
    # One interval of the paper's own numbers, from the least gain to the largest.
    return own([percents], note)


def possible_times(
    text: str, network: str, batch: int, time: str, configuration: str
) -> Result:
    """Return the range in which a printed time must lie by the other printed numbers.

    A linear program has three unknowns: how long an iteration spends on computation only,
    on overlap, and on communication only. Its constraints are that no unknown is negative,
    that together they take at most the longest iteration that figure 8 allows, and that
    each other printed time of the iteration, which is a sum of unknowns, holds within its
    rounding. The range goes from the least to the largest value of ``time`` under these
    constraints.

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
        Blocks and threads of the all-reduce, such as "1x64", or "default", or "best".

    Returns
    -------
    Result
        The ends of the range, in milliseconds.
    """
    # SciPy takes long to import.
    from scipy.optimize import linprog

    longest_ms = iteration_ms(network, batch, configuration)[1]
    # Each constraint bounds a sum of the unknowns from above: a row of ``sums`` has the
    # factors of the three unknowns, and ``bounds_ms`` the bound. The first constraint is that
    # the iteration, the sum of all three, is not longer than figure 8 allows.
    sums = [(1, 1, 1)]
    bounds_ms = [longest_ms]
    others_ms = _stated_ms(text, configuration)
    # The printed value of the time itself is no constraint.
    others_ms.pop(time, None)
    for name, ms in others_ms.items():
        # The text prints whole milliseconds, so that a time is at most ms + 0.5.
        sums.append(INCLUDED_PARTS[name])
        bounds_ms.append(ms + 0.5)
        # The time is at least ms - 0.5, so that its negative is at most 0.5 - ms.
        sums.append(tuple(-np.array(INCLUDED_PARTS[name])))
        bounds_ms.append(0.5 - ms)

    objective = np.array(INCLUDED_PARTS[time])
    # By default, `linprog` minimises, and no unknown is negative.
    least = linprog(objective, sums, bounds_ms)
    # The largest time is the minimum of the negative time, which is negated below.
    most = linprog(-objective, sums, bounds_ms)
    note = f"what fits into an iteration of at most {longest_ms:.1f} ms (Fig 8)"
    if others_ms:
        others = [f"{ms:.0f} ms of {name}" for name, ms in others_ms.items()]
        note += f", with {' and '.join(others)}, half a ms either way"
    # The marginal of the first constraint says how much the solution would change with the
    # longest iteration of figure 8. It is exactly 0 if this constraint does not bind.
    fig8_binds = least.ineqlin.marginals[0] or most.ineqlin.marginals[0]
    if not fig8_binds:
        # The note names figure 8 so far, but neither end of the range depends on it. Both ends
        # follow from the other constraint that "computation only" and "communication only" are
        # not negative, so that the overlap is no longer than computation or communication.
        note += (
            "; Fig 8 does not bind, only that no more overlaps than is computed or sent"
        )
    return replace(own([[least.fun, -most.fun]], note), evidence=Evidence.BOUND)


def _stated_ms(text: str, configuration: str) -> dict[str, float]:
    """Return the printed times of an iteration in ms, by names in INCLUDED_PARTS.

    Parameters
    ----------
    text : str
        How the ids of the printed times in prose.csv begin, such as "fig05c".
    configuration : str
        How the ids of this configuration's times end, such as "best".
    """
    stated_ms = {}
    for key, ms in prose("sharing").items():
        # An id such as "fig07-vgg16-overlap-best" becomes "overlap". If a time holds for all
        # configurations, its id does not end with one.
        name = key.removeprefix(f"{text}-").removesuffix(f"-{configuration}")
        if key.startswith(text) and name in INCLUDED_PARTS:
            stated_ms[name] = ms
    return stated_ms
