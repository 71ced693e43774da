"""What a link's delay does to an iteration: the share of start-ups, plans against each other, and fusion."""

from __future__ import annotations

import numpy as np
import pandas as pd

from ddlkit.core.gloo_ring import GlooRing, ring_s
from ddlkit.core.lablink import read_link
from ddlkit.model.extrapolation import ring_labs
from ddlkit.model.trials import OURS
from ddlkit.run.instruments.usage import LATE_LIMIT
from ddlkit.run.lab.shaper import size_of

PLACE = ["workers", "link", "network", "compute_s"]


def startup_share(cases: pd.DataFrame, collectives: pd.DataFrame) -> pd.Series:
    """(cases,) what the start-ups of all messages would take one after the other, over the computation.

    cases : of `accuracy.validate` or `judged.joined`; a start-up is the median of the smallest message that
        was calibrated in the case's lab
    """
    one = collectives[collectives["in_flight"] == 1]
    smallest = one.groupby(["link", "ranks", "collective"])["bytes"].transform("min")
    rows = one[one["bytes"] == smallest]
    startup_s = rows.groupby(["link", "ranks", "collective"])["seconds"].median()
    labs = pd.MultiIndex.from_frame(cases[["link", "workers", "collective"]])
    messages = cases["ends"].astype(str).str.count(";") + 1
    share = messages.to_numpy() * startup_s.reindex(labs).to_numpy() / cases["measured_compute_s"]
    return share.rename("startup_share")


def duels(cases: pd.DataFrame, plan: str, other: str) -> pd.DataFrame:
    """One row per lab, network and computation with both plans: how much longer ``other`` takes.

    Columns: PLACE, ``measured`` and ``model``: relative. ``repeats``: how far the cases' repeats differ; a
    smaller difference of plans tells nothing. Where a plan came out like one before it, it was not
    replayed under its own name: such places are left out.
    """
    rounded = cases.assign(compute_s=cases["measured_compute_s"].round(4))
    rows = []
    for place, here in rounded.groupby(PLACE, sort=False):
        own = here.set_index("plan")
        if not {plan, other} <= set(own.index):
            continue
        rival, best = own.loc[other], own.loc[plan]
        row = dict(zip(PLACE, place, strict=True))
        row["measured"] = rival["measured_iteration_s"] / best["measured_iteration_s"] - 1
        row["model"] = rival[f"{OURS}_iteration_s"] / best[f"{OURS}_iteration_s"] - 1
        rows.append({**row, "repeats": max(rival["repeatability"], best["repeatability"])})
    return pd.DataFrame(rows)


def scaling(cases: pd.DataFrame, network: str) -> pd.DataFrame:
    """Scaling factor (osf Eq 1) of a network by plan: measured, foretold by our model and by others.

    Columns: plan, measured, model, no_overlap (osf's CSF), and its OSF as printed and repaired where it has a
    formula
    """
    own = cases[cases["network"] == network]
    found = pd.DataFrame({"plan": own["plan"]})
    found["measured"] = own["measured_compute_s"] / own["measured_iteration_s"]
    for name in (OURS, "no_overlap", "osf_repaired_table", "osf_table"):
        found[name] = own["measured_compute_s"] / own[f"{name}_iteration_s"]
    return found.replace(np.inf, np.nan).reset_index(drop=True)


def between_sizes(collectives: pd.DataFrame, n_bytes: float) -> pd.DataFrame:
    """What a table and gloo's law make of a size that neither knows: a row per lab of equal, steady links.

    Columns: link, ranks, and relative errors at the first size from ``n_bytes`` on. ``table_error``: straight
    in logarithms from the size before it to the one after. ``law_error``: rate and delay as the link's name
    has them, software as the smallest message takes it, nothing fitted.

    collectives : rows of the labs' calibrations
    """
    rows = []
    for lab in ring_labs(collectives):
        named, at = lab.named, int(np.searchsorted(lab.bytes, n_bytes))
        software_s = lab.seconds[0] / (2 * (lab.workers - 1)) - 4 * named.delay_s
        slope = 8 / (named.rate_bits_per_s * named.framing)
        law = GlooRing(software_s, slope, workers=lab.workers, delay_s=named.delay_s)
        sizes, seconds = (np.log(np.delete(each, at)) for each in (lab.bytes, lab.seconds))
        table_s = np.exp(np.interp(np.log(lab.bytes[at]), sizes, seconds))
        row = {"link": lab.link, "ranks": lab.workers, "table_error": table_s / lab.seconds[at] - 1}
        rows.append({**row, "law_error": float(law(lab.bytes[at])) / lab.seconds[at] - 1})
    return pd.DataFrame(rows)


UNSTEADY = {"-jitter": "jitter", "-loss": "loss", "-background": "others' traffic"}
"""What a link's name has where it is not the same all the time."""


def kinds(cases: pd.DataFrame) -> pd.Series:
    """(cases,) what is special about a case's lab: a link that is not steady, else the number of workers."""
    steady = cases["workers"].map("{} workers".format)
    for part, kind in UNSTEADY.items():
        steady = steady.mask(cases["link"].str.contains(part), kind)
    return steady.rename("kind_of_lab")


def lateness(runs: pd.DataFrame) -> pd.DataFrame:
    """What our process carried over emulated links: a row per number of workers and rate of a table ``runs``.

    Columns: workers, link_bits_per_s, iterations; late : the largest share of packets that left it later than
    they were due; marked : iterations in which that is above what counts as in time
    """
    rows = runs[runs["link"].str.startswith("emulated:")]
    rows = rows.assign(marked=rows["late"] > LATE_LIMIT)
    grouped = rows.groupby(["workers", "link_bits_per_s"])
    found = grouped.agg(iterations=("late", "size"), late=("late", "max"), marked=("marked", "sum"))
    return found.reset_index()


def engines(collectives: pd.DataFrame) -> pd.DataFrame:
    """The same links by the kernel's bucket and by our process without delay: a row per lab and size.

    Columns: ranks, link_bits_per_s, bytes, tbf_s and emulated_s (medians), ratio of the latter to the former.
    Sizes and labs that one of them alone has are left out.
    """
    engine = (
        collectives["link"].str.startswith("emulated:").map({True: "emulated_s", False: "tbf_s"})
    )
    keys = ["ranks", "link_bits_per_s", "bytes"]
    medians = collectives.groupby([*keys, engine.rename("engine")])["seconds"].median()
    found = medians.unstack("engine").dropna()[["tbf_s", "emulated_s"]]
    return found.assign(ratio=found["emulated_s"] / found["tbf_s"]).reset_index()


def engines_told(labs: pd.DataFrame, known: pd.DataFrame) -> pd.DataFrame:
    """What gloo's law says of messages over links of both engines: rows (link, ranks, bytes) with ``told_s``.

    Bytes by what each link counts as framing, and round trips by what the smallest message takes in the
    same lab, one for each of its steps; nothing is fitted. An emulated link that is not known has the trips
    of one that counts as a wire does and saves nothing.

    labs : with columns link, ranks, bytes; known : of a table ``collectives``, with the smallest messages
    """
    small = known[known["bytes"] == known["bytes"].min()]
    trips_s = small.groupby(["link", "ranks"])["seconds"].median().to_dict()
    rows = []
    for (link, ranks, n_bytes), _ in labs.groupby(["link", "ranks", "bytes"]):
        named = read_link(str(link))
        alike = (
            str(link)
            if (link, ranks) in trips_s
            else str(link).split("-framing")[0].split("-burst")[0]
        )
        told_s = ring_s(
            n_bytes,
            ranks,
            software_s=trips_s[alike, ranks] / (2 * (ranks - 1)) - 4 * named.delay_s,
            link_s_per_byte=8 / (named.rate_bits_per_s * named.framing),
            core_share=0.0,
            delay_s=named.delay_s,
            burst_s=named.burst_s,
        )
        row = {"link": link, "link_bits_per_s": named.rate_bits_per_s, "ranks": ranks}
        rows.append({**row, "bytes": n_bytes, "told_s": float(told_s), "framing": named.framing})
    return pd.DataFrame(rows)


def ratios_told(told: pd.DataFrame) -> pd.DataFrame:
    """An emulated link over the kernel's of its rate: by the framing alone, and as of `engines_told`.

    Columns: link (the emulated one), ranks, bytes; framing_ratio, told_ratio
    """
    keys, own = ["link_bits_per_s", "ranks", "bytes"], told["link"].str.startswith("emulated:")
    both = told[own].merge(told[~own], on=keys, suffixes=("", "_tbf"))
    both["framing_ratio"] = both["framing_tbf"] / both["framing"]
    both["told_ratio"] = both["told_s"] / both["told_s_tbf"]
    return both[["link", "link_tbf", *keys, "framing_ratio", "told_ratio"]]


def ratios(told: pd.DataFrame, collectives: pd.DataFrame) -> pd.DataFrame:
    """`ratios_told` of such rows, with ``measured_ratio`` of medians, where both were measured."""
    seconds = (
        collectives.groupby(["link", "ranks", "bytes"])["seconds"].median().rename("measured_s")
    )
    found = told.join(seconds, on=["link", "ranks", "bytes"])
    found = found.join(seconds.rename("tbf_s"), on=["link_tbf", "ranks", "bytes"])
    return found.assign(measured_ratio=found["measured_s"] / found["tbf_s"]).dropna()


ECHO_HEADERS_BYTES = 28
"""Of IP and ICMP, before an echo's payload."""


def crossings(echoes: pd.DataFrame) -> pd.DataFrame:
    """Where a small message's time goes: a row per link and number of ranks of a table ``echoes``.

    Columns: link, ranks, delay_s; all_reduce_s, its median; packets, that cross for it; processor_s, what the
    link's process works for them, and share, of the former; packet_s, for each; step_s, of a ring, less the
    four delays of its round trip; beyond_s, what an echo of one rank takes beyond its four delays and its
    bytes on four links: NaN over the kernel's bucket, where bytes pass at once
    """
    rows = []
    for (link, ranks), own in echoes.groupby(["link", "ranks"]):
        named = read_link(str(link))
        medians = own.groupby(["operation", "at_once"]).median(numeric_only=True)
        whole, alone = medians.loc[("all_reduce", ranks)], medians.loc[("echo", 1)]
        row = {"link": link, "ranks": ranks, "delay_s": named.delay_s}
        row |= {"all_reduce_s": whole["seconds"], **whole[["packets", "processor_s"]]}
        row["share"] = whole["processor_s"] / whole["seconds"]
        row["packet_s"] = whole["processor_s"] / whole["packets"] if whole["packets"] else np.nan
        row["step_s"] = whole["seconds"] / (2 * (ranks - 1)) - 4 * named.delay_s
        on_links = 4 * size_of(int(alone["bytes"]) + ECHO_HEADERS_BYTES).bytes
        beyond_s = alone["seconds"] - 4 * named.delay_s - 8 * on_links / named.rate_bits_per_s
        rows.append({**row, "beyond_s": beyond_s if whole["packets"] else np.nan})
    return pd.DataFrame(rows)
