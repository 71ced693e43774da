"""Importing this module registers every check of omgs's claims; here stands what is of no figure or table."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from ddlkit.core.errors import UserError
from ddlkit.core.units import MIB
from workbook.common import source
from workbook.common.claims import Result, at_least, check, counted, measured, own
from workbook.common.papers import published_code
from workbook.omgs import equations as omgs
from workbook.omgs import fig01 as fig01
from workbook.omgs import fig03 as fig03
from workbook.omgs import fig04 as fig04
from workbook.omgs import tables as tables
from workbook.omgs.settings import RESNET, tensors
from workbook.osf import equations as osf
from workbook.validate import audit

RESNET_BYTES = 4 * sum(tensors(RESNET))


@check("omgs-theorem1")
def _theorem1() -> Result:
    three, rules = omgs.COUNTEREXAMPLE, (omgs.find_merged_layers, omgs.merge_by_theorem)
    equal = np.array(
        [float(omgs.merged_iteration_s(three, rule(three))) for rule in rules]
    )
    equal /= omgs.merged_iteration_s(three, omgs.combinations(3)).min()
    audited = audit.random_audit(audit.sparse_draw, ("omgs", "omgs:theorem"), 100)
    gaps = audited.pivot(index="instance", columns="planner", values="gap")
    right, worst = (gaps <= audit.OPTIMAL).mean().tolist(), (1 + gaps.max()).tolist()
    note = (
        f"Algorithm 1 (repaired), Eq 25: three equal layers {equal[0]:.2f}, {equal[1]:.2f}; of {len(gaps)} "
        f"random ones of 2 to 40 layers exact in {right[0]:.0%}, {right[1]:.0%}, at worst {worst[0]:.2f}, "
        f"{worst[1]:.2f}; the largest found, no limit: others have more; erratum 12 has other draws"
    )
    return counted(max(*equal, *worst), note)


@check("omgs-complexity")
def _complexity() -> Result:
    """Loops of lines 2 and 3 over all layers; for each merged l of line 10 over 1 to l, of 12 over all."""
    steps = [
        4 * n + sum(2 * layer + 2 * n for layer in range(2, n + 1)) for n in (256, 512)
    ]
    return counted(
        math.log2(steps[1] / steps[0]),
        "from 256 to 512 layers, all merged, as repaired",
    )


@check("omgs-model-size")
def _model_size() -> Result:
    return counted(RESNET_BYTES / MIB, "float32; MB are MiB")


@check("omgs-dense-communication")
def _dense_communication() -> Result:
    least_s = float(osf.update_s(RESNET_BYTES, 16, 1e9 / 8))
    return at_least(least_s, "a ring at wire speed (osf Eq 7)")


@check("omgs-gamma")
def _gamma() -> Result:
    gamma = published_code("omgs")["gamma"]
    with_density = f"(with it {gamma / audit.DENSITY:.3g})"
    return own(gamma, f"in the authors' code, without Eq 10's density {with_density}")


@check("omgs-eq12")
def _merged_selection() -> Result:
    """Time of selecting from 10^k elements over that from parts of 3, 3, 3 and 1 tenths of them."""
    machines = source.recordings("selection")
    tables = [machine.table("selection") for machine in machines.values()]
    if not tables:
        raise UserError("without its recording of selections")
    rows = pd.concat(tables).query("operation in ('topk_unsorted', 'topk_sorted')")
    keys, sizes = (
        ["machine", "operation", "distribution", "density"],
        [10**k for k in range(4, 9)],
    )
    times = rows.groupby([*keys, "elements"])["seconds"].median().unstack()
    ratios = pd.DataFrame(
        {n: times[n] / (3 * times[3 * n // 10] + times[n // 10]) for n in sizes}
    )
    below = ", ".join(f"{count} at {n:,}" for n, count in (ratios < 1).sum().items())
    note = (
        f"top-k of four layers, 10^4 to 10^8 elements, {len(ratios)} kinds of density, values, order: "
        f"below 1: {below} (CPU of {', '.join(machines)}); under Eq 10 always above 1"
    )
    return measured(ratios.to_numpy().ravel(), note, "recorded")


@check("omgs-merged-message")
def _merged_message() -> Result:
    """The lab's shaper lets a sample's first bytes through, so there two samples must send as many in all."""
    rows = source.everywhere("collectives")
    lab, looped = (rows.query(f"link {sign} 'loopback'") for sign in ("!=", "=="))
    alike, every, loopback = (
        doubled(lab, as_many_bytes=True),
        doubled(lab),
        doubled(looped),
    )
    *_, links, _, sizes = alike.index.levels
    note = (
        f"{', '.join(links)}, 2 or 4 ranks on one of two machines, halves of {sizes.min() / MIB:.0f} "
        f"to {sizes.max() / MIB:.0f} MiB; by Eq 11 always above 1, here {(alike < 1).sum()} below; not "
        f"judged: samples of unlike bytes, as the shaper lets the first through ({every.min():.2f} to "
        f"{every.max():.2g}), and loopback ({loopback.min():.2f} to {loopback.max():.2g})"
    )
    return measured(alike, note, "recorded")


def doubled(rows: pd.DataFrame, *, as_many_bytes: bool = False) -> pd.Series:
    """Return times of two all-gathers over that of one twice as long, by place, link, ranks, bytes."""
    ratios = {}
    for at, times in rows[rows["collective"] == "all_gather"].groupby(
        ["place", "link", "ranks"]
    ):
        by_size = times.groupby("bytes")[["seconds", "messages_per_sample"]].median()
        for n in filter(lambda size: 2 * size in by_size.index, by_size.index):
            single, double = by_size.loc[n], by_size.loc[2 * n]
            twice = single["messages_per_sample"] == 2 * double["messages_per_sample"]
            if twice or not as_many_bytes:
                ratios[(*at, int(n))] = 2 * single["seconds"] / double["seconds"]
    return pd.Series(ratios)
