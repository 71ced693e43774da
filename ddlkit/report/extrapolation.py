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

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.core.lablink import read_link
from ddlkit.core.link import wire_s_per_byte
from ddlkit.core.schedule import ALGORITHMS, STEPS
from ddlkit.core.units import parse_bits_per_s, parse_bytes, parse_seconds
from ddlkit.core.workload import Floats
from ddlkit.model.calibration import undisturbed
from ddlkit.model.extrapolation import (
    EQUAL,
    WAITING,
    Law,
    RingLab,
    Rings,
    carried_to,
    join_labs,
    played_s,
    ring_at,
    ring_labs,
    stepped_lab,
)
from ddlkit.report import source
from ddlkit.report.links import crossings
from ddlkit.run.lab.conditions import Conditions
from ddlkit.run.lab.network import LabShape
from ddlkit.store.files import parse_yaml
from ddlkit.store.tables import save_table

WELL = 0.03
"""Median |error| of a lab that counts as well predicted."""
WAYS = ("one", "others")
DRAWN = 2000
"""Messages that an interval is of."""
ROUNDED = 1.05
"""By how much a size may be larger than what was asked, so that all ranks have as many numbers."""
KEYS = ["kind", "link", "ranks"]
Lab = tuple[str, int]
"""Link and ranks."""
BASES: Sequence[Lab] = (("lab:1gbit", 4), ("emulated:500mbit-delay0.5ms", 4))
"""Labs from which all others of their kind are told by the way "one"."""


def told(
    collectives: pd.DataFrame, cores: int, bases: Sequence[Lab] = BASES, law: Law = WAITING
) -> pd.DataFrame:
    """One row per lab of equal links, size and way: both times, the error, what decides, and the terms.

    kind : "tbf", "emulated", or "no delay" of an emulated link without any
    software_s, delay_s, bytes_s : of what is predicted

    A base is told by "others" alone, and a lab by others only where there are two of its kind. ``law`` is of
    emulated links with a delay; others have WAITING. Raises UserError where there is no lab.
    """
    labs = ring_labs(collectives)
    if not labs:
        raise UserError("no lab of equal links to extrapolate from: record examples/labs.yml")
    frames = []
    for kind in dict.fromkeys(map(_kind, labs)):
        by = law if kind == "emulated" else WAITING
        rings = Rings([lab for lab in labs if _kind(lab) == kind], cores, law=by)
        base = [lab for lab in rings.labs if (lab.link, lab.workers) in bases]
        for number, lab in enumerate(rings.labs):
            if base and lab is not base[0]:
                frames.append(_compared(lab, Rings(base[:1], cores, law=by), "one"))
            if len(rings.labs) > 1:
                frames.append(_compared(lab, rings, "others", number))
    return pd.concat(frames, ignore_index=True)


def _kind(lab: RingLab) -> str:
    named = lab.named
    return named.engine if named.engine == "tbf" or named.delay_s else "no delay"


def _compared(lab: RingLab, rings: Rings, way: str, number: int | None = None) -> pd.DataFrame:
    """A lab told by ``rings``; where it is one of them itself, its ``number``, by all others."""
    named, seconds = lab.named, lab.seconds
    values = rings.values if number is None else rings.left_out[number]
    wire = wire_s_per_byte("all_reduce", lab.workers, named.rate_bits_per_s, named.framing)
    bytes_s = lab.bytes * wire
    decides = np.select(
        [bytes_s < seconds[0] / 2, bytes_s > 2 * seconds[0]], ["start-up", "bytes"], "knee"
    )
    ring = ring_at(values, lab.link, lab.workers, rings.law)
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


def confirmed(
    fresh: pd.DataFrame, known: pd.DataFrame, cores: int, law: Law = WAITING
) -> pd.DataFrame:
    """Labs that were measured afterwards, told from those that were known: `against`, by lab and size.

    Raises UserError where there is no lab of equal links.
    """
    labs = ring_labs(fresh)
    if not labs:
        raise UserError("no lab of equal links to confirm by: record examples/labs_fresh.yml")
    sizes = {(lab.link, lab.workers): lab.bytes for lab in labs}
    return against(said_of(sizes, known, cores, law), fresh)


def said_of(
    labs: Mapping[Lab, Floats], known: pd.DataFrame, cores: int, law: Law = WAITING
) -> pd.DataFrame:
    """What is said of labs (sizes in bytes, each (s,)) from those that are known: a row per lab and size.

    Columns: link, ranks, bytes, predicted_s; low_s, high_s, ends of the interval of 95% of messages
    """
    carried, frames = carried_to(known, labs, cores=cores, law=law), []
    for (link, workers), sizes in labs.items():
        there = carried.between(link, workers)
        assert there.noise is not None  # of several labs
        factors, predicted_s = there.noise.factors(sizes, DRAWN), there.cost(sizes)
        low_s, high_s = np.quantile(factors, [0.025, 0.975], axis=0) * predicted_s
        row = {"link": link, "ranks": workers, "bytes": sizes, "predicted_s": predicted_s}
        frames.append(pd.DataFrame({**row, "low_s": low_s, "high_s": high_s}))
    return pd.concat(frames, ignore_index=True)


def against(said: pd.DataFrame, fresh: pd.DataFrame) -> pd.DataFrame:
    """What was said, with ``measured_s``, the median, of a table ``collectives``, wherever it has one.

    A size that was said is that which was measured, the next multiple of the ranks: at most ROUNDED above.
    off : size of the error; inside : whether the interval holds the median. said : as of `said_of`
    """
    frames = []
    for lab in ring_labs(fresh):
        medians = pd.DataFrame({"bytes": lab.bytes, "measured_s": lab.seconds})
        own = said[(said["link"] == lab.link) & (said["ranks"] == lab.workers)]
        near = pd.merge_asof(own.sort_values("bytes"), medians, on="bytes", direction="forward")
        sizes = lab.bytes[np.searchsorted(lab.bytes, near["bytes"]).clip(max=lab.bytes.size - 1)]
        frames.append(near[sizes <= near["bytes"] * ROUNDED].dropna())
    found = pd.concat(frames, ignore_index=True)
    measured_s = found["measured_s"]
    inside = (found["low_s"] <= measured_s) & (measured_s <= found["high_s"])
    return found.assign(off=(found["predicted_s"] / measured_s - 1).abs(), inside=inside)


# -- labs that were foretold ----------------------------------------------------------------------


QUANTITIES = {"message": "predicted_s", "lower": "low_s", "upper": "high_s"}


def foretell(
    labs: Mapping[Lab, Floats], by: Mapping[str, tuple[pd.DataFrame, Law]], cores: int, out: Path
) -> Path:
    """Write down what is said of labs before they are measured: a table ``predicted``.

    by : models' names, the labs that each tells from, and its law
    """
    every = [
        said_of(labs, known, cores, law).assign(model=name) for name, (known, law) in by.items()
    ]
    said = pd.concat(every).rename(columns={column: name for name, column in QUANTITIES.items()})
    case = said["ranks"].astype(str) + " " + said["link"] + " " + said["bytes"].map("{:.0f}".format)
    rows = said.assign(case=case).melt(["case", "model"], [*QUANTITIES], "quantity", "seconds")
    rows = rows.assign(cost="law", drift="")
    return save_table(rows, out, "predicted-labs", schema="predicted", command=sys.argv)


MODELS = ("waiting", "woken", "waiting, all", "woken, all")
"""By which law labs are foretold, and from which others: those of `source.LABS`, or all recorded."""


def write(plan: Path, out: Path) -> Path:
    """Write down what MODELS say of the labs of a plan (as ``examples/labs_fresh_again.yml``): `foretell`.

    Echoes and all other labs are those recorded on this machine, and whatever is in ``out`` is left out.
    """
    many = source.open_labs("")
    recorded = store.list_tables(store.recorded_dir(), "*/collectives-*.csv")
    known = pd.concat(
        store.load_table(path) for path in recorded if path.parent.resolve() != out.resolve()
    )
    law = woken(crossings(source.open_labs("", source.ECHOES).table("echoes")))
    froms = (many.table("collectives"), known)
    by = dict(zip(MODELS, ((rows, one) for rows in froms for one in (WAITING, law)), strict=True))
    return foretell(planned_labs(plan), by, many.cores("collectives"), out)


def foretold(predicted: pd.DataFrame) -> pd.DataFrame:
    """What `foretell` wrote, as of `said_of`, a row per ``model``, lab and size."""
    wide = predicted.pivot(index=["model", "case"], columns="quantity", values="seconds")
    found = wide.rename(columns=QUANTITIES).reset_index()
    found[["ranks", "link", "bytes"]] = found["case"].str.split(" ", expand=True)
    return found.astype({"ranks": int, "bytes": float}).drop(columns="case")


def verdicts(judged: pd.DataFrame) -> pd.DataFrame:
    """Of each of MODELS its ``labs``, and the ``median`` over them of each lab's median error over sizes.

    well : labs of which that is at most WELL; inside : share of medians in their intervals
    nearer : labs that it told better than the first model did. judged : as of `against`, with ``model``
    """
    labs = judged.groupby(["model", "link", "ranks"])["off"].median().unstack("model")
    found = pd.DataFrame({"labs": labs.count(), "median": labs.median()})
    found["well"] = (labs <= WELL).sum()
    found["inside"] = judged.groupby("model")["inside"].mean()
    found["nearer"] = labs.lt(labs[MODELS[0]], axis=0).sum()
    return found.loc[[*MODELS]].reset_index(names="model")


def planned_labs(plan: Path) -> dict[Lab, Floats]:
    """Labs that a file of points asks for, as ``examples/labs_fresh.yml``, with their sizes in bytes.

    Raises UserError for a file that is no YAML.
    """
    labs: dict[Lab, Floats] = {}
    for one in parse_yaml(plan.read_text())["points"]:
        given = (one[name] for name in ("ranks", "rate", "delay"))
        for ranks, rate, delay in product(
            *(ways if isinstance(ways, list) else [ways] for ways in given)
        ):
            how = Conditions(delay_s=parse_seconds(delay))
            shape = LabShape(ranks, parse_bits_per_s(rate), conditions=how)
            labs[shape.link, ranks] = np.array([parse_bytes(size) for size in one["sizes"]], float)
    return labs


# -- a term that echoes tell ----------------------------------------------------------------------


def waking(crossed: pd.DataFrame) -> tuple[float, float]:
    """What a round trip takes beyond delay and bytes, by echoes: seconds, and seconds for each of delay.

    A line by least squares over emulated links with delay. crossed : as of `links.crossings`
    """
    delayed = crossed[crossed["delay_s"] > 0]
    slope, first_s = np.polyfit(delayed["delay_s"], delayed["beyond_s"], 1)
    return float(first_s), float(slope)


def woken(crossed: pd.DataFrame) -> Law:
    """The law in which a round trip takes what echoes tell, and no software waits for a core.

    Where ranks wait for packets the cores are free. crossed : as of `links.crossings`
    """
    return Law(waking(crossed)[1], waits=False)


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
