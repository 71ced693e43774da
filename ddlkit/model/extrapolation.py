"""A message's cost from the labs that were calibrated, for labs that were not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from ddlkit.core.cost import Stepped
from ddlkit.core.errors import UserError
from ddlkit.core.fit import fit
from ddlkit.core.schedule import Links, Schedule, simulate
from ddlkit.model.calibration import undisturbed

SHARES = np.geomspace(1 / 64, 1.0, 385)
"""Of all cores that a message's software may take: what `join_labs` tries."""
AS_GOOD = 1e-3
"""Mean squared errors of logarithms that differ by less tell nothing."""


def stepped_lab(rows: pd.DataFrame, *, core_share: float = 0.0, delay_s: float = 0.0) -> Stepped:
    """One lab's all-reduces, one in flight, as steps: rows of a table ``collectives``.

    core_share : share of the cores that a rank's software is assumed to take, which one lab cannot tell
    delay_s : known of each link

    Links of a lab save credit while they rest: the longer of software and bytes decides.
    Raises UserError for rows of several labs, of an unknown rate, or of another collective.
    """
    keys = ["collective", "algorithm", "link", "link_bits_per_s", "ranks"]
    labs = rows[keys].drop_duplicates()
    if len(labs) != 1:
        raise UserError(f"{len(labs)} labs to fit as one: choose rows of one link and algorithm")
    lab, kept = labs.iloc[0], undisturbed(rows)
    kept = kept[kept["in_flight"] == 1]
    if not lab["link_bits_per_s"]:
        raise UserError(f"no rate is known of {lab['link']}: it can be carried to no other")
    found: Stepped = fit(
        Stepped.form,
        kept["bytes"],
        kept["seconds"],
        draws=0,
        collective=str(lab["collective"]),
        workers=int(lab["ranks"]),
        algorithm=str(lab["algorithm"]),
        rate_bits_per_s=float(lab["link_bits_per_s"]),
        delay_s=delay_s,
        saves=str(lab["link"]).startswith("lab:"),
        core_share=core_share,
    ).cost
    return found


def join_labs(labs: Sequence[Stepped], cores: int) -> Stepped:
    """One cost of several labs of one machine: carry it to any of them, or to another, by `Stepped.at`.

    Efficiency of the links is the median of the labs'. Software a message is the geometric mean of theirs,
    each divided by how many messages' software follows one another there. The share of the cores is that
    which makes them agree best, and of those as good the one nearest to a whole core: so where one lab is
    all there is, its software is assumed to want a core all the time.

    labs : of any algorithms that are sent alike

    Raises UserError for none.
    """
    if not labs:
        raise UserError("no lab to extrapolate from: calibrate one at least")
    schedules = [Schedule.of(str(lab.algorithm), lab.workers or 0) for lab in labs]
    whole = [
        lab.software_s * schedule.software(lab.core_share)
        for lab, schedule in zip(labs, schedules, strict=True)
    ]
    counts = np.array([[one.software(share) for one in schedules] for share in SHARES])
    alone = np.log(whole) - np.log(counts)
    loss = alone.var(axis=1)
    good = np.flatnonzero(loss <= loss.min() + AS_GOOD)
    best = good[np.argmin(np.abs(np.log(SHARES[good] * cores)))]
    slopes = [one.link_s_per_byte * one.rate_bits_per_s for one in labs]
    first = labs[0]
    return replace(
        first,
        software_s=float(np.exp(alone[best].mean())),
        core_share=float(SHARES[best]),
        link_s_per_byte=float(np.median(slopes)) / first.rate_bits_per_s,
    )


def played_s(cost: Stepped, n_bytes: float, messages: int = 1, burst_s: float = 0.0) -> float:
    """Seconds of each of several messages in a row, played out over links that save up to ``burst_s``.

    What `Stepped` says with one number, whether links save, holds where all of them are busy in every step,
    as a ring's; here each link saves what it rests. Waiting for a core is spread over all messages alike.
    """
    assert cost.workers is not None  # checked when made
    schedule = Schedule.of(str(cost.algorithm), cost.workers)
    software_s = float(cost.terms(0.0).software_s) / schedule.counts.messages
    rates, delays = np.full((2, cost.workers), [[1 / cost.link_s_per_byte], [cost.delay_s]])
    links = Links(rates, delays, software_s, burst_s=burst_s)
    return float(simulate(schedule, links, n_bytes, messages).max()) / messages
