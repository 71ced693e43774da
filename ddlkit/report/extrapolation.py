"""How well a message's cost in one lab is told from other labs: leave one lab out.

Stated before it was computed (2026-11-22). A lab is its link and its ranks; its sizes' medians, of samples
that the host left alone, one message in flight, are the truth; labs of unequal or lossy links and
all-gathers are left out. The error of a size is predicted / median - 1. Its class says what should decide
there, of bytes at the link's rate less framing and the median of the smallest size: "start-up" where bytes
take less than half of that, "bytes" where more than twice, "knee" between. A lab is well predicted where
the median of |error| over all sizes is at most 3%.

Terms are judged apart: a step of the smallest size, less what its round trips are delayed; the round trip,
by two labs that differ in delay alone; and the time of a byte between the two largest sizes.

gloo's own ring is told two ways: "one", from one lab alone, and "others", from all other labs of its kind
(`ddlkit.model.extrapolation.Rings`). Messages that are sent step by step are told from the ring of one lab.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from ddlkit.core.errors import UserError
from ddlkit.core.gloo_ring import ring_s
from ddlkit.core.lablink import read_link
from ddlkit.core.link import wire_s_per_byte
from ddlkit.core.schedule import ALGORITHMS, STEPS
from ddlkit.model.calibration import undisturbed
from ddlkit.model.extrapolation import (
    EQUAL,
    SCATTER,
    RingLab,
    Rings,
    carried_to,
    join_labs,
    played_s,
    ring_at,
    ring_labs,
    stepped_lab,
)

WELL = 0.03
"""Median |error| of a lab that counts as well predicted."""
WAYS = ("one", "others")
DRAWN = 2000
"""Messages that an interval is of."""
KEYS = ["kind", "link", "ranks"]
Lab = tuple[str, int]
"""Link and ranks."""
BASES: Sequence[Lab] = (("lab:1gbit", 4), ("emulated:500mbit-delay0.5ms", 4))
"""Labs from which all others of their kind are told by the way "one"."""


def told(collectives: pd.DataFrame, cores: int, bases: Sequence[Lab] = BASES) -> pd.DataFrame:
    """One row per lab of equal links, size and way: both times, the error, what decides, and the terms.

    kind : "tbf", "emulated", or "no delay" of an emulated link without any
    software_s, delay_s, bytes_s : of what is predicted

    A base is told by "others" alone, and a lab by others only where there are two of its kind. Raises
    UserError where there is no lab.
    """
    labs = ring_labs(collectives)
    if not labs:
        raise UserError("no lab of equal links to extrapolate from: record examples/labs.yml")
    frames = []
    for kind in dict.fromkeys(map(_kind, labs)):
        rings = Rings([lab for lab in labs if _kind(lab) == kind], cores)
        base = [lab for lab in rings.labs if (lab.link, lab.workers) in bases]
        for number, lab in enumerate(rings.labs):
            if base and lab is not base[0]:
                frames.append(_compared(lab, Rings(base[:1], cores).values, "one"))
            if len(rings.labs) > 1:
                frames.append(_compared(lab, rings.left_out[number], "others"))
    return pd.concat(frames, ignore_index=True)


def _kind(lab: RingLab) -> str:
    named = lab.named
    return named.engine if named.engine == "tbf" or named.delay_s else "no delay"


def _compared(lab: RingLab, values: np.ndarray, way: str) -> pd.DataFrame:
    named, seconds = lab.named, lab.seconds
    wire = wire_s_per_byte("all_reduce", lab.workers, named.rate_bits_per_s, named.framing)
    bytes_s = lab.bytes * wire
    decides = np.select(
        [bytes_s < seconds[0] / 2, bytes_s > 2 * seconds[0]], ["start-up", "bytes"], "knee"
    )
    ring = ring_at(values, lab.link, lab.workers)
    predicted_s = ring(lab.bytes)
    known = {"way": way, "kind": _kind(lab), "link": lab.link, "ranks": lab.workers}
    known |= {"rate_bits_per_s": named.rate_bits_per_s, "link_delay_s": named.delay_s}
    times = {"bytes": lab.bytes, "measured_s": seconds, "predicted_s": predicted_s}
    errors = {"error": predicted_s / seconds - 1, "decides": decides}
    return pd.DataFrame({**known, **times, **errors, **ring.terms(lab.bytes)._asdict()})


def summary(found: pd.DataFrame) -> pd.DataFrame:
    """One row per way and lab: median and largest |error|, each class's median, and terms by themselves.

    measured_step_s, predicted_step_s : a step of the smallest size less its round trip's delays, 4 a step
    byte_error : of the seconds a byte, between the two largest sizes

    found : as of `told`
    """
    rows = []
    for (way, *lab), each in found.groupby(["way", *KEYS]):
        each, off = each.sort_values("bytes"), each["error"].abs()
        first, steps = each.iloc[0], 2 * (int(lab[-1]) - 1)
        row = {"way": way, **dict(zip(KEYS, lab, strict=True))}
        row |= {"median": off.median(), "largest": off.max(), "startup_error": first["error"]}
        for what in ("measured", "predicted"):
            row[f"{what}_step_s"] = first[f"{what}_s"] / steps - 4 * first["link_delay_s"]
        more = each[["measured_s", "predicted_s"]].diff().iloc[-1]
        row["byte_error"] = more["predicted_s"] / more["measured_s"] - 1
        medians = off.groupby(each["decides"]).median()
        rows.append({**row, **medians.add_prefix("median, ")})
    table = pd.DataFrame(rows)
    return table.assign(well=table["median"] <= WELL)


def round_trips(collectives: pd.DataFrame) -> pd.DataFrame:
    """What delay adds, on its own: each lab against the one of the same ranks and rate with least delay.

    measured, predicted : of the smallest size, in delays of one link for each step of the ring; a step's
    one way would be 2, its round trip is 4
    """
    labs = [lab for lab in ring_labs(collectives) if _kind(lab) == "emulated"]
    labs.sort(key=lambda lab: lab.named.delay_s)
    rows = []
    for lab in labs:
        alike = [
            one
            for one in labs
            if (one.workers, one.named.rate_bits_per_s) == (lab.workers, lab.named.rate_bits_per_s)
        ]
        if (least := alike[0]) is lab:
            continue
        longer_s = lab.named.delay_s - least.named.delay_s
        steps = 2 * (lab.workers - 1)
        row = {"link": lab.link, "than": least.link, "ranks": lab.workers}
        delays = (lab.seconds[0] - least.seconds[0]) / (steps * longer_s)
        rows.append({**row, "measured": delays, "predicted": 4.0})
    return pd.DataFrame(rows)


def confirmed(fresh: pd.DataFrame, known: pd.DataFrame, cores: int) -> pd.DataFrame:
    """Labs that were measured afterwards, told from those that were known: a row per lab and size.

    off : size of the error of the median; inside : whether the interval of 95% of messages holds it

    Raises UserError where there is no lab of equal links.
    """
    labs = ring_labs(fresh)
    if not labs:
        raise UserError("no lab of equal links to confirm by: record examples/labs_fresh.yml")
    told, frames = carried_to(known, [(lab.link, lab.workers) for lab in labs], cores=cores), []
    for lab in labs:
        there = told.between(lab.link, lab.workers)
        assert there.noise is not None  # of several labs
        factors, predicted_s = there.noise.factors(lab.bytes, DRAWN), there.cost(lab.bytes)
        low_s, high_s = np.quantile(factors, [0.025, 0.975], axis=0) * predicted_s
        inside = (low_s <= lab.seconds) & (lab.seconds <= high_s)
        row = {
            "link": lab.link,
            "ranks": lab.workers,
            "bytes": lab.bytes,
            "measured_s": lab.seconds,
        }
        row |= {"predicted_s": predicted_s, "low_s": low_s, "high_s": high_s, "inside": inside}
        frames.append(pd.DataFrame({**row, "off": np.abs(predicted_s / lab.seconds - 1)}))
    return pd.concat(frames, ignore_index=True)


# -- a term that echoes tell ----------------------------------------------------------------------


def waking(crossed: pd.DataFrame) -> tuple[float, float]:
    """What a round trip takes beyond delay and bytes, by echoes: seconds, and seconds for each of delay.

    A line by least squares over emulated links with delay. crossed : as of `links.crossings`
    """
    delayed = crossed[crossed["delay_s"] > 0]
    slope, first_s = np.polyfit(delayed["delay_s"], delayed["beyond_s"], 1)
    return float(first_s), float(slope)


def with_waking(collectives: pd.DataFrame, line: tuple[float, float]) -> pd.DataFrame:
    """Emulated labs told from all others, once more, with two changes: a row per lab with its ``median``.

    A round trip takes besides what `waking` says, which no fit sees; and no software waits for a core, as
    ranks wait for packets. Asked after the labs were seen: it explores.
    """
    labs = [lab for lab in ring_labs(collectives) if _kind(lab) == "emulated"]
    rows = []
    for lab in labs:
        others = [one for one in labs if one is not lab]
        off = np.abs(_woken_s(lab, _fit_woken(others, line), line) / lab.seconds - 1)
        rows.append({"link": lab.link, "ranks": lab.workers, "median": float(np.median(off))})
    return pd.DataFrame(rows)


def _woken_s(lab: RingLab, values: np.ndarray, line: tuple[float, float]) -> np.ndarray:
    """(s,) seconds of a lab's sizes; ``values``: logarithms of a trip's software, and of bytes' time."""
    named, (software_s, over) = lab.named, np.exp(values)
    beyond_s = line[0] + line[1] * named.delay_s
    return ring_s(
        lab.bytes,
        lab.workers,
        software_s=software_s,
        link_s_per_byte=over * 8 / (named.rate_bits_per_s * named.framing),
        core_share=0.0,
        delay_s=named.delay_s + beyond_s / 4,
        burst_s=named.burst_s,
    )


def _fit_woken(labs: Sequence[RingLab], line: tuple[float, float]) -> np.ndarray:
    """Both values by least squares of logarithms, each lab counting alike, as `fit_rings` does it."""
    from scipy.optimize import least_squares

    def off(values: np.ndarray) -> np.ndarray:
        each = [
            np.log(_woken_s(lab, values, line) / lab.seconds) / (SCATTER * lab.bytes.size**0.5)
            for lab in labs
        ]
        return np.concatenate(each)

    found = least_squares(off, [np.log(1e-4), 0.0], bounds=([-20, -0.5], [0, 0.5]), loss="soft_l1")
    return np.asarray(found.x)


# -- other algorithms --------------------------------------------------------------------------


def stepped_labs(collectives: pd.DataFrame) -> dict[tuple[str, str, int], pd.DataFrame]:
    """Rows of each algorithm and lab of equal links whose messages were sent step by step."""
    rows = collectives[collectives["algorithm"].str.startswith(STEPS)]
    rows = rows[rows["link"].str.fullmatch(EQUAL) & (rows["in_flight"] == 1)]
    groups = undisturbed(rows).groupby(["algorithm", "link", "ranks"])
    return {(str(name), str(link), int(ranks)): one for (name, link, ranks), one in groups}


def algorithms_told(
    collectives: pd.DataFrame, cores: int, base: Lab, core_share: float | None = None
) -> pd.DataFrame:
    """Messages sent step by step, all told from the ring of one lab: a row per algorithm, lab and size.

    core_share : of all cores that a rank's software takes, where that is known; else a whole core

    measured_s : median; told_s : by `Stepped`, whose links save wherever they rest or not at all
    played_s : by `played_s`, with what a link saves by its name

    The base itself is left out. Raises UserError where it is not there.
    """
    labs = stepped_labs(collectives)
    known = (f"{STEPS}ring", *base)
    if known not in labs:
        link, ranks = base
        raise UserError(f"no {STEPS}ring of {ranks} ranks over {link} to tell others from")
    origin, rows = join_labs([stepped_lab(labs[known])], cores), []
    if core_share is not None:
        origin = replace(stepped_lab(labs[known], core_share=core_share), core_share=core_share)
    for (name, link, ranks), each in labs.items():
        if (name, link, ranks) == known:
            continue
        named = read_link(link)
        carried = origin.at(
            workers=ranks,
            rate_bits_per_s=named.rate_bits_per_s,
            delay_s=named.delay_s,
            algorithm=name,
        )
        for size, samples in each.groupby("bytes"):
            n_bytes, in_a_row = float(size), int(samples["messages_per_sample"].iloc[0])
            row = {"algorithm": name, "link": link, "ranks": ranks, "bytes": n_bytes}
            row["measured_s"] = samples["seconds"].median()
            played = played_s(carried, n_bytes, in_a_row, named.burst_s)
            rows.append({**row, "told_s": carried(n_bytes), "played_s": played})
    return pd.DataFrame(rows)


def core_share(collectives: pd.DataFrame, link: str, cores: int) -> float:
    """Of all cores that a rank's software takes, as gloo's own ring tells in all labs like ``link``."""
    return ring_at(Rings.of(collectives, link, cores).values, link, 2).core_share


def choices(told: pd.DataFrame, by: str = "played_s") -> pd.DataFrame:
    """Of each lab and size: which algorithm is predicted and which measured as the fastest, and the regret.

    told : as of `algorithms_told`; regret : by how much the former took longer than the latter
    always : the regret of a ring, whatever the size
    """
    rows = []
    for (link, ranks, size), each in told.groupby(["link", "ranks", "bytes"]):
        picked, best = each.loc[each[by].idxmin()], each.loc[each["measured_s"].idxmin()]
        names = {"predicted": picked["algorithm"], "measured": best["algorithm"]}
        regret = picked["measured_s"] / best["measured_s"] - 1
        ring = each.loc[each["algorithm"] == f"{STEPS}ring", "measured_s"]
        always = float(ring.iloc[0] / best["measured_s"] - 1) if len(ring) else np.nan
        where = {"link": link, "ranks": ranks, "bytes": size}
        rows.append({**where, **names, "regret": regret, "always": always})
    return pd.DataFrame(rows)


def over_fastest(told: pd.DataFrame, link: str, ranks: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Predicted and measured times of a lab over the fastest measured of each size: by size and algorithm.

    told : as of `algorithms_told`
    """
    lab = told[(told["link"] == link) & (told["ranks"] == ranks)]
    least_s = lab.groupby("bytes")["measured_s"].min()
    names = lab["algorithm"].str.removeprefix(STEPS)
    of = lab.assign(algorithm=pd.Categorical(names, list(ALGORITHMS)))
    predicted, measured = (
        of.pivot_table(by, "bytes", "algorithm", observed=True).div(least_s, axis=0)
        for by in ("played_s", "measured_s")
    )
    return predicted.rename(columns=str), measured.rename(columns=str)
