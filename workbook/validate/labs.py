"""Where a measured cost ends: between its sizes, and in other labs.

Labs held out, stated before it was computed (2026-11-22): a lab is its link and its ranks; medians of its
sizes are the truth. What should decide at a size, of bytes at the link's rate less framing and the median of
the smallest size: "start-up" where bytes take less than half of that, "bytes" where more than twice, else
"knee". A lab is well predicted where the median of |error| over all sizes is at most 3%.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ddlkit.core.link import FRAMING_BYTES, read_link, wire_s_per_byte
from workbook import plots
from workbook.plots.style import look
from workbook.validate import accuracy
from workbook.validate.rings import held_out_rings, ring_labs

TRIVIAL = ("no_overlap", "perfect_overlap", "model")
WELL = 0.03  # median |error| of a lab that counts as well predicted
ECHO_BYTES = (
    28 + FRAMING_BYTES
)  # around the payload of an echo: IP, ICMP and what a wire counts


def waking(echoes: pd.DataFrame) -> float:
    """Return seconds that an echo takes beyond four delays and its bytes, for each second of delay."""
    alone = echoes[(echoes["operation"] == "echo") & (echoes["at_once"] == 1)]
    medians = (
        alone.groupby(["link", "ranks"])[["seconds", "bytes"]].median().reset_index()
    )
    named = medians["link"].map(read_link)
    delay_s = named.map(lambda link: link.delay_s)
    bytes_s = (
        8
        * 4
        * (medians["bytes"] + ECHO_BYTES)
        / named.map(lambda link: link.rate_bits_per_s)
    )
    beyond_s = medians["seconds"] - 4 * delay_s - bytes_s
    return float(np.polyfit(delay_s[delay_s > 0], beyond_s[delay_s > 0], 1)[0])


def held_out(collectives: pd.DataFrame, cores: int, wake_up: float) -> pd.DataFrame:
    """Return one row per lab and size, each lab predicted from all others of its kind; wake_up : `waking`."""
    labs, frames = ring_labs(collectives), []
    for kind, law in (("tbf", None), ("emulated", wake_up)):
        alike = [lab for lab in labs if lab.kind == (kind, law is not None)]
        for lab, ring in zip(alike, held_out_rings(alike, cores, law), strict=False):
            link, least_s, predicted_s = lab.named, lab.seconds[0], ring(lab.bytes)
            wire = wire_s_per_byte(
                "all_reduce", lab.workers, link.rate_bits_per_s, link.framing
            )
            few, many = lab.bytes * wire < least_s / 2, lab.bytes * wire > 2 * least_s
            decides = np.select([few, many], ["start-up", "bytes"], "knee")
            row = {
                "kind": kind,
                "link": lab.link,
                "ranks": lab.workers,
                "decides": decides,
            }
            row |= {
                "bytes": lab.bytes,
                "measured_s": lab.seconds,
                "predicted_s": predicted_s,
            }
            frames.append(pd.DataFrame({**row, "error": predicted_s / lab.seconds - 1}))
    return pd.concat(frames, ignore_index=True)


def beside_trivial(kinds: Mapping[str, pd.DataFrame]) -> Figure:
    """Return errors of TRIVIAL models on the iteration and on exposed communication, by title of rows."""
    with plots.sheet(
        columns=len(kinds), rows=2, height=5.0, sharex="row", squeeze=False
    ) as (figure, axes):
        for column, (title, rows) in zip(axes.T, kinds.items(), strict=True):
            whats = {"": "iteration", "_exposed": "exposed communication"}
            for ax, (kind, what) in zip(column, whats.items(), strict=True):
                errors = {role: 100 * rows[f"{role}{kind}_error"] for role in TRIVIAL}
                band = ("repeatability", 100 * rows[f"repeatability{kind}"])
                names = [look(plan).label for plan in rows["plan"]]
                plots.dots(
                    ax, names, errors, band=band, legend="", label=f"error, {what} [%]"
                )
            off = rows.filter(regex="_error$").abs().median()
            column[0].set_title(f"{title}: median error {off['model_error']:.1%}")
            ends = "{model_exposed_error:.1%}; {rescaled_exposed_error:.1%}".format(
                **off
            )
            column[1].set_title(f"Exposed: {ends} by own compute")
    return figure


TRAINED = {
    "model": "model",
    "model:without both": "model_alone",
    "line_medians": "line_medians",
    "line_medians:with both": "line_medians_beside",
    "no_overlap": "no_overlap",
}
"""Models of `trained`, and whose errors they are."""


def trained(cases: pd.DataFrame) -> Figure:
    """Return medians by link of absolute paired errors, on the iteration and on what is exposed."""
    much = accuracy.much_exposed(cases)
    parts = {"iteration": (cases, "paired"), "exposed communication": (much, "exposed")}
    with plots.sheet(rows=2, height=5.0) as (figure, axes):
        for ax, (what, (rows, kind)) in zip(axes, parts.items(), strict=True):
            off = (
                100 * rows[[f"{name}_{kind}_error" for name in TRAINED.values()]].abs()
            )
            by = off.set_axis([*TRAINED], axis=1).groupby(rows["link"]).median()
            names = [
                f"{link}: {n} cases" for link, n in rows.groupby("link").size().items()
            ]
            plots.dots(ax, names, by, legend="", label=f"median |error|, {what} [%]")
            knows, blind = off.median().iloc[:2]
            found = f"{knows:.1f}% off with slowdowns and copies, {blind:.1f}% without"
            plots.heading(ax, f"{what.split()[0].capitalize()}: {found}")
    return figure


def by_part(errors: pd.DataFrame, medians: pd.Series) -> Figure:
    """Return a panel per kind of the errors of `held_out`, by what decides; medians : of |error|, by lab."""
    names = {"emulated": "Links with delay", "tbf": "Kernel's rate limit"}
    figure, axes = plots.canvas(len(names), height=2.1, sharey=True)
    for ax, (kind, name) in zip(axes, names.items(), strict=True):
        rows = errors[errors["kind"] == kind].sort_values("decides", kind="stable")
        label = "error of a message's time [%]"
        plots.dots_by_group(ax, rows["decides"], 100 * rows["error"], label=label)
        well = medians.loc[kind] <= WELL
        plots.heading(ax, f"{name}: {well.sum()} of {len(well)} labs within {WELL:.0%}")
    return figure
