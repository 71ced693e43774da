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
"""Which of computation alone, both at once, and communication alone a printed time has."""


def iteration_ms(network: str, batch: int, name: str) -> Floats:
    """Return the shortest and the longest iteration that figure 8's images per s allow.

    name : a configuration, "default", or "best"
    """
    row = throughput().loc[(network, batch)]
    images = row[{"default": DEFAULT, "best": row.idxmax()}.get(name, name)]
    return np.array(
        [1e3 * equations.iteration_s(batch, images + half) for half in (0.5, -0.5)]
    )


def gain(network: str, batch: int, configuration: str = "") -> Result:
    """Return the gain over the default, in per cent, within figure 8's rounding.

    It is that of the best configuration, if none is named.
    """
    row = throughput().loc[(network, batch)]
    name = configuration or str(row.idxmax())
    ends = [100 * end for end in equations.gain_range(row[name], row[DEFAULT])]
    saved = " to ".join(f"{end / (100 + end):.1%}" for end in ends)
    note = (
        f"from Fig 8: {network}, batch {batch}, {name} (best: {row.idxmax()}); "
        f"as time saved {saved}"
    )
    return own([ends], note)


def time_left(
    text: str, network: str, batch: int, part: str, configuration: str
) -> Result:
    """Return what is left for one of PARTS, in ms, by all that is printed of an iteration.

    An iteration by figure 8 is not outlasted by its parts, and its other times are
    printed.

    text : with which the ids of these times begin in prose.csv, such as "fig05c"
    configuration : a configuration, "default", or "best"
    """
    from scipy.optimize import linprog

    longest_ms = iteration_ms(network, batch, configuration)[1]
    sums, most_ms = [(1, 1, 1)], [longest_ms]
    given = list[str]()
    for key, ms in prose("sharing").items():
        name = key.removeprefix(f"{text}-").removesuffix(f"-{configuration}")
        if key.startswith(text) and name in PARTS and name != part:
            sums += [PARTS[name], tuple(-np.array(PARTS[name]))]
            most_ms += [ms + 0.5, 0.5 - ms]
            given += [f"{ms:.0f} ms of {name}"]
    wanted = np.array(PARTS[part])
    ends = [linprog(sign * wanted, sums, most_ms) for sign in (1, -1)]
    beside = f", with {' and '.join(given)}, half a ms either way" if given else ""
    note = f"what fits into an iteration of at most {longest_ms:.1f} ms (Fig 8){beside}"
    if not any(end.ineqlin.marginals[0] for end in ends):
        note += (
            "; Fig 8 does not bind, only that no more overlaps than is computed or sent"
        )
    return replace(own([[ends[0].fun, -ends[1].fun]], note), evidence=Evidence.BOUND)
