"""How well a message's cost in one lab is told from other labs: leave one lab out.

Stated before it was computed (2026-11-22). A lab is its ranks and rate; its sizes' medians, of samples that
the host left alone, one message in flight, are the truth; labs of shared nodes and all-gathers are left out.
The error of a size is predicted / median - 1. Its class says what should decide there, of bytes at the
link's rate less framing and the median of the smallest size: "start-up" where bytes take less than half
of that, "bytes" where more than twice, "knee" between. Of a class counts the median of |error|, and the
largest. Terms are judged apart: software at the smallest size, against its median; seconds a byte,
against the lab's own fit. A lab is well predicted where the median of |error| over all sizes is at most 3%.

Three ways, all on one campaign, whose machine was the same:

* own_core: from one lab; ranks never wait for a core, so that a step takes what it takes
* shared_cores: from one lab; each rank's software wants a core all the time: a step grows with the ranks
* others: from all other labs, by which the share of the cores is fitted
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pandas as pd

from ddlkit.core.cost import Stepped
from ddlkit.core.errors import UserError
from ddlkit.core.link import burst_s, wire_s_per_byte
from ddlkit.core.schedule import STEPS
from ddlkit.model.calibration import undisturbed
from ddlkit.model.extrapolation import join_labs, played_s, stepped_lab

BASE = (4, 1e9)
"""Ranks and bit/s of the lab that all others are told from."""
WELL = 0.03
"""Median |error| of a lab that counts as well predicted."""
WAYS = ("own_core", "shared_cores", "others")
Lab = tuple[int, float]


def labs_of(collectives: pd.DataFrame) -> dict[Lab, pd.DataFrame]:
    """Rows of each lab of equal links that all-reduced, by ranks and rate."""
    rows = collectives.query("collective == 'all_reduce' and in_flight == 1 and ranks > 1")
    rows = rows[rows["link"].str.fullmatch(r"lab:\w+bit") & (rows["link_bits_per_s"] > 0)]
    groups = undisturbed(rows).groupby(["ranks", "link_bits_per_s"])
    return {(int(ranks), float(rate)): found for (ranks, rate), found in groups}


def told(labs: Mapping[Lab, pd.DataFrame], cores: int, base: Lab = BASE) -> pd.DataFrame:
    """One row per lab, size and way: both times, the error, its class (``decides``), and the terms' errors.

    The base is told by "others" alone, and a lab by others only where there are two. Raises UserError
    where the base is not there.
    """
    if base not in labs:
        raise UserError(f"no lab of {base[0]} ranks at {base[1]:g} bit/s to extrapolate from")
    return pd.concat([_told(labs, lab, cores, base) for lab in labs], ignore_index=True)


def _told(labs: Mapping[Lab, pd.DataFrame], lab: Lab, cores: int, base: Lab) -> pd.DataFrame:
    measured = labs[lab].groupby("bytes")["seconds"].median()
    sizes, seconds = measured.index.to_numpy(float), measured.to_numpy()
    own, frames = stepped_lab(labs[lab]), []
    bytes_s = sizes * wire_s_per_byte("all_reduce", *lab)
    decides = np.select(
        [bytes_s < seconds[0] / 2, bytes_s > 2 * seconds[0]], ["start-up", "bytes"], "knee"
    )
    for way, cost in _ways(labs, lab, cores, base):
        told = cost.at(workers=lab[0], rate_bits_per_s=lab[1])
        predicted_s = told(sizes)
        columns = {"ranks": lab[0], "rate_bits_per_s": lab[1], "way": way, "decides": decides}
        columns |= {"bytes": sizes, "measured_s": seconds, "predicted_s": predicted_s}
        errors = {
            "error": predicted_s / seconds - 1,
            "software_error": float(told.terms(0.0).software_s) / seconds[0] - 1,
            "slope_error": told.link_s_per_byte / own.link_s_per_byte - 1,
        }
        frames.append(pd.DataFrame({**columns, **errors}))
    return pd.concat(frames)


def _ways(
    labs: Mapping[Lab, pd.DataFrame], lab: Lab, cores: int, base: Lab
) -> Iterator[tuple[str, Stepped]]:
    if lab != base:
        yield "own_core", stepped_lab(labs[base])
        yield "shared_cores", join_labs([stepped_lab(labs[base])], cores)
    yield (
        "others",
        join_labs([stepped_lab(rows) for one, rows in labs.items() if one != lab], cores),
    )


def summary(found: pd.DataFrame) -> pd.DataFrame:
    """One row per way and lab: median and largest |error|, each class's median, and the terms' errors."""
    keys = ["way", "ranks", "rate_bits_per_s"]
    off = found.assign(off=found["error"].abs())
    whole = off.groupby(keys).agg(
        median=("off", "median"),
        largest=("off", "max"),
        software_error=("software_error", "first"),
        slope_error=("slope_error", "first"),
    )
    classes = off.groupby([*keys, "decides"])["off"].median().unstack("decides")
    joined = whole.join(classes.add_prefix("median, ")).reset_index()
    return joined.assign(well=joined["median"] <= WELL)


# -- other algorithms --------------------------------------------------------------------------


def algorithms_told(collectives: pd.DataFrame, cores: int, base: Lab = BASE) -> pd.DataFrame:
    """Messages sent step by step, all told from the ring of one lab: a row per algorithm, lab and size.

    measured_s : median; told_s : by `Stepped`, whose links save wherever they rest or not at all
    played_s : by `played_s`, with the bucket's known burst

    The base itself is left out. Raises UserError where it is not there.
    """
    rows = collectives[collectives["algorithm"].str.startswith(STEPS)]
    of_base = rows.query("algorithm == @STEPS + 'ring'")
    labs = labs_of(of_base)
    if base not in labs:
        raise UserError(
            f"no {STEPS}ring of {base[0]} ranks at {base[1]:g} bit/s to tell others from"
        )
    origin, found = join_labs([stepped_lab(labs[base])], cores), []
    for algorithm, those in rows.groupby("algorithm"):
        for lab, each in labs_of(those).items():
            if (algorithm, lab) == (f"{STEPS}ring", base):
                continue
            carried = origin.at(workers=lab[0], rate_bits_per_s=lab[1], algorithm=str(algorithm))
            for size, samples in each.groupby("bytes"):
                n_bytes, in_a_row = float(size), int(samples["messages_per_sample"].iloc[0])
                row = {"algorithm": algorithm, "ranks": lab[0], "rate_bits_per_s": lab[1]}
                row |= {"bytes": n_bytes, "measured_s": samples["seconds"].median()}
                played = played_s(carried, n_bytes, in_a_row, burst_s(lab[1]))
                found.append({**row, "told_s": carried(n_bytes), "played_s": played})
    return pd.DataFrame(found)


def choices(told: pd.DataFrame, by: str = "played_s") -> pd.DataFrame:
    """Of each lab and size: which algorithm is predicted and which measured as the fastest, and the regret.

    told : as of `algorithms_told`; regret : by how much the former took longer than the latter
    """
    rows = []
    for (ranks, rate, size), each in told.groupby(["ranks", "rate_bits_per_s", "bytes"]):
        picked, best = each.loc[each[by].idxmin()], each.loc[each["measured_s"].idxmin()]
        names = {"predicted": picked["algorithm"], "measured": best["algorithm"]}
        regret = picked["measured_s"] / best["measured_s"] - 1
        rows.append(
            {"ranks": ranks, "rate_bits_per_s": rate, "bytes": size, **names, "regret": regret}
        )
    return pd.DataFrame(rows)
