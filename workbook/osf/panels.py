"""Figures of the core notebooks, osf's first, drawn from their CSVs alone; ``paper...`` is printed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ddlkit.core.cost import MessageCost
from ddlkit.core.fit import Fit
from ddlkit.core.units import KB, MB
from ddlkit.core.workload import Workload
from workbook import plots
from workbook.common.claims import claimed, paper_table, prose
from workbook.common.source import Source
from workbook.common.specs import network_title
from workbook.osf import lab as osf_lab
from workbook.osf import scaling as osf_scaling
from workbook.osf.cluster import FIVE, REPLACED, WORKERS
from workbook.osf.equations import PHASES
from workbook.osf.lab import ADAFUSION, EXPENSIVE, LABS, LINK, buffer_name
from workbook.osf.scaling import CONSTANT, TWO, rows_of
from workbook.plots.style import FAINT, SOFT, look, time_unit

PLACES = {
    "": "cluster (model)",
    **{mark: f"lab, {links}" for mark, links in LABS.items()},
}
NO_FUSION_MB = 3e-4  # on a logarithmic axis of buffers, left of the smallest
DRAWN = [
    "alpha_beta:medians",
    "piecewise:BDP",
    "table",
]  # osf claims something of the first two
SHOWN = [
    "none",
    "buffer:100MB",
    "mg_wfbp",
    ADAFUSION,
    "exact",
    "adafusion",
]  # in figure 11
DENSITY = 0.001  # of omgs's figure 2a
NODES = 16  # of omgs's figure 2b
FLOOR_FROM = 2**15  # bytes of the smallest message whose floor is drawn


def spelled(name: str) -> str:
    """Return a network of a table as figures spell it."""
    plain = name.removesuffix(EXPENSIVE)
    return network_title(plain) + (", expensive start-ups" if plain != name else "")


def _ranges(
    low: pd.DataFrame, high: pd.DataFrame
) -> dict[str, tuple[pd.Series, pd.Series]]:
    """Return both ends of each column in %, as `plots.intervals` takes them."""
    return {str(name): (100 * low[name], 100 * high[name]) for name in low}


def fig01() -> tuple[Figure, pd.DataFrame, float]:
    """Return osf's figure 1 with its spans, and how many times its forward backward takes by its Eq 4."""
    drawn, printed = (
        osf_scaling.fig01(osf_scaling.setting()),
        claimed("osf-eq4-backward"),
    )
    exposed = [1e3 * timeline.exposed_communication_s() for timeline in drawn.values()]
    said = f"Overlap shortens exposed communication from {exposed[0]:.0f} to {exposed[1]:.1f} ms"
    figure, spans = plots.timelines(drawn, "model", f"{said} (model)")
    return figure, spans.assign(paper_backward_over_forward=printed), printed


def fig02() -> tuple[Figure, pd.DataFrame]:
    """Return osf's figure 2, with its spans; the paper's example is a buffer of so many tensors."""
    drawn, tensors = osf_scaling.fig02()[-1], int(prose("osf")["fig02-buffer"])
    best = min(drawn, key=lambda name: drawn[name].duration_s)
    said = f"Shortest: {best}, {1e3 * drawn[best].duration_s:.1f} ms; the paper's buffer: {tensors}"
    figure, spans = plots.timelines(drawn, "plan", f"{said} (model)")
    return figure, spans.assign(paper_buffer_tensors=tensors)


def draw03(frame: pd.DataFrame) -> Figure:
    """Draw both formulas' errors on the cluster, in all settings that fit, and in the lab."""
    formulas, lab = ["CSF", "OSF printed"], frame[frame["grade"] == "lab"]
    wide = frame[frame["grade"] == "model"].pivot(index="network", columns="quantity")
    wide = wide.loc[list(FIVE)].rename(index=lambda name: f"{spelled(name)}, cluster")
    order = sorted(
        dict.fromkeys(lab["network"]), key=lambda n: (EXPENSIVE in n, n[:6], len(n))
    )
    by_network = lab.groupby("network")[formulas]
    low, high = (
        pd.concat(
            [wide[f"error_{end}"][formulas], of_lab.loc[order].rename(index=spelled)]
        )
        for end, of_lab in (("low", by_network.min()), ("high", by_network.max()))
    )
    size = 100 * wide[["paper_error_low", "paper_error_high"]].max()
    printed = {
        n: (size["paper_error_low", n], size["paper_error_high", n]) for n in formulas
    }
    expensive = lab["network"].str.endswith(EXPENSIVE)
    errors = (
        f"{e.min():+.0%} to {e.max():+.0%}" for _, e in lab["CSF"].groupby(~expensive)
    )
    said = "CSF errs by {} with expensive start-ups, {} with cheap ones".format(*errors)
    with plots.sheet(said, height=5.0) as (figure, ax):
        label = (
            "error against the factor simulated on the cluster, measured in the lab [%]"
        )
        words: dict[str, Any] = {"label": label, "printed": printed, "mirrored": True}
        plots.intervals(ax, low.index, _ranges(low, high), **words)
        ax.set_title(
            f"The cluster, {len(lab)} replayed cases; shaded: sizes that the paper prints"
        )
    return figure


def _by_buffer(frame: pd.DataFrame, shown: list[str], said: str) -> Figure:
    """Draw factors by the buffer: modelled, the first with its range, measured, and what is printed."""
    mb = (frame["buffer_bytes"] / MB).where(frame["buffer_bytes"] > 0, NO_FUSION_MB)
    with plots.sheet(said, columns=len(TWO), height=3.4) as (figure, axes):
        for ax, network in zip(axes, TWO, strict=True):
            rows = rows_of(frame.assign(mb=mb), network=network)
            wide = rows[rows["grade"] == "model"].pivot(index="mb", columns="quantity")
            ends = wide["model_low"][shown[:1]], wide["model_high"][shown[:1]]
            words: dict[str, Any] = {
                "xlabel": "buffer [MB]",
                "ylabel": "scaling factor",
            }
            plots.lines(
                ax, wide["model"][shown], ends=ends, **words, log="x", legend=""
            )
            for mark, links in LABS.items():
                at = rows[rows["look"] == mark]
                plots.points(
                    ax, at["mb"], at["measured"], mark, label=f"measured, {links}"
                )
            if "paper" in wide:
                plots.points(ax, wide.index, wide["paper"][shown[0]], "paper")
            else:
                low, high = wide["paper_low"]["CSF"], wide["paper_high"]["CSF"]
                shape = {"color": look("paper").color, "alpha": 0.3, "linewidth": 0}
                ax.fill_between(
                    wide.index, low, high, label="paper: as far from CSF", **shape
                )
            ticks = {
                NO_FUSION_MB: "none",
                0.01: "0.01",
                1: "1",
                100: "100",
                1000: "1000",
            }
            ax.set_xticks([*ticks], ticks.values())
            ax.set_title(spelled(network))
    return figure


def draw04(frame: pd.DataFrame, formulas: Sequence[str]) -> Figure:
    """Draw simulated, the formulas, measured; what the printed error leaves around CSF."""
    wide = rows_of(frame, network="ResNet101").pivot_table(
        "model", "buffer_bytes", "quantity"
    )
    gains = wide[["simulated", "OSF printed"]].max() / wide.iloc[0] - 1
    said = "{simulated:.0%} as simulated, {OSF printed:.0%} by the printed equations"
    said = f"ResNet-101: the best buffer gains {said.format(**gains)}"
    return _by_buffer(frame, ["simulated", *formulas], said)


def draw06(frame: pd.DataFrame) -> Figure:
    """Draw the factor: by model with its range, measured, and what the printed change makes of it."""
    said = (
        "1 GB against no buffer, ResNet-101: {model:+.0%} by model, measured {regime:+.0%} with expensive "
        "start-ups and {measured:+.0%} with cheap ones, paper {paper:+.0%}"
    ).format(**osf_lab.changes(frame, "ResNet101"))
    return _by_buffer(frame.replace({"quantity": {"SF": "model"}}), ["model"], said)


def draw08(frame: pd.DataFrame) -> Figure:
    """Draw factors by workers: the cluster by model, and the lab over both links, measured and by model."""
    lab = frame[frame["grade"] == "lab"].rename(columns={"model": "OSF", "csf": "CSF"})
    lab = lab.melt(
        ["network", "workers", "look", "measured"], ["OSF", "CSF"], "quantity", "model"
    )
    every = pd.concat([frame[frame["grade"] == "model"].fillna({"look": ""}), lab])
    end = rows_of(frame, network=REPLACED, workers=WORKERS).set_index("quantity")
    ours = f"{end['model']['OSF']:.2f} with overlap, {end['model']['CSF']:.2f} by CSF"
    printed = f"paper {end['paper'].iloc[0]:g} and {end['paper_section_1'].iloc[0]:g}"
    said = f"{spelled(REPLACED)}, {WORKERS} workers: {ours}; {printed}"
    with plots.sheet(said, columns=3, height=3.4, sharey=True) as (figure, axes):
        for ax, (mark, place) in zip(axes, PLACES.items(), strict=True):
            rows = rows_of(every, look=mark)
            wide = rows.pivot(
                index="workers", columns=["network", "quantity"], values="model"
            )
            wide = wide[[(n, q) for n in ("VGG16", REPLACED) for q in ("OSF", "CSF")]]
            wide.columns = [
                f"{spelled(network)}, {quantity}" for network, quantity in wide
            ]
            plots.lines(
                ax, wide, xlabel="workers", ylabel="scaling factor", log="x", legend=""
            )
            x, printed = rows["workers"], "paper, Section"
            plots.points(ax, x, rows["paper"], "paper", label=f"{printed} 4.1")
            plots.points(
                ax, x, rows["paper_section_1"], "paper", label=f"{printed} 1", size=4
            )
            plots.points(ax, x, rows["measured"], "measured")
            ax.set_xticks(wide.index, wide.index)
            ax.set_ylim(0, 1.05)
            ax.label_outer()
            ax.set_title(place)
    return figure


def _phases(frame: pd.DataFrame, by: str, label: str, said: str) -> Figure:
    """Draw phases in %, stacked: of each network and ``place``, by model, or beside the measured."""
    places, both = list(dict.fromkeys(frame["place"])), "of each pair: model, lab"
    shape = {"columns": len(TWO), "rows": len(places), "height": 7.0, "sharey": True}
    with plots.sheet(said, **shape) as (figure, axes):
        for ax, (place, network) in zip(axes.flat, product(places, TWO), strict=True):
            rows = rows_of(frame, network=network, place=place)
            names = list(dict.fromkeys(rows["bar"]))
            values = ["model", "measured"][: 1 + rows["measured"].notna().any()]
            tables = rows.pivot(index="bar", columns="phase", values=values)
            bars = [
                tables[value].loc[[name], list(PHASES)]
                for name in names
                for value in values
            ]
            pairs = both if len(values) > 1 else ""
            table = 100 * pd.concat(bars)
            plots.bars(ax, table, label=label, stacked=True, legend="", pairs=pairs)
            printed = 100 * rows.groupby("bar")["paper"].max()[names]
            plots.points(ax, ax.get_xticks(), printed, "paper", size=6)
            ax.set_xlabel("; ".join(filter(None, (by, pairs))))
            ax.set_title(f"{spelled(network)}, {place}")
        for ax in axes[:, 1]:
            ax.set_ylabel("")
    return figure


def draw05(frame: pd.DataFrame) -> Figure:
    """Draw shares: the cluster with equal workers and with a slower one, and the lab beside its model."""
    lab, slow = frame["grade"] == "lab", frame["slowest"] > 1
    cluster = PLACES[""] + np.where(slow, ", one slower", ", equal workers")
    bars = frame["workers"].astype(str) + np.where(lab & slow, " slow", "")
    named = frame.assign(place=np.where(lab, PLACES["measured"], cluster), bar=bars)
    named = named.sort_values(
        ["grade", "slowest", "workers"], ascending=[False, True, True]
    )
    said = "One worker is slower: among few workers NEGOTIATE is most of communication"
    return _phases(named, "workers", "share of communication [%]", said)


def draw07(frame: pd.DataFrame) -> Figure:
    """Draw equal workers over the time without a buffer: the cluster by model; the lab, also measured."""
    frame = frame[frame["slowest"] == 1]
    over = {
        name: frame[f"{name}_over_unfused"] for name in ("model", "measured", "paper")
    }
    over["model"] = over["model"].fillna(frame["seconds_over_unfused"])
    bars, places = (
        frame["buffer_bytes"].map(buffer_name),
        frame["look"].fillna("").map(PLACES),
    )
    said = (
        "A buffer exchanges ALLREDUCE for WAIT: ResNet-101 gains by that, VGG-16 loses"
    )
    named = frame.assign(**over, bar=bars, place=places)
    return _phases(named, "buffer", "communication [% of unfused]", said)


def draw09(frame: pd.DataFrame) -> Figure:
    """Draw loss by epoch on three sets of images; the paper's two printed losses where they belong."""
    last = rows_of(frame, epoch=frame["epoch"].max(), measured_on="running")
    means = last.groupby("network", sort=False)["share_of_guess"].mean()
    said = ", ".join(f"{name} {mean:.2g}" for name, mean in means.items())
    said = f"Loss while training after the last epoch, over ln(classes): {said}"
    with plots.sheet(said, columns=3, height=3.2, sharey=True) as (figure, axes):
        for ax, images in zip(axes, ("running", "training", "held_out"), strict=True):
            rows = frame[frame["measured_on"] == images]
            value = {"x": "epoch", "y": "share_of_guess", "series": "network"}
            plots.samples(ax, rows, **value, center="mean", percent=100)
            printed = rows.dropna(subset="paper").drop_duplicates("network")
            for width, row in zip((1, 2), printed.itertuples(), strict=False):
                shape = {
                    "color": look("paper").color,
                    "linestyle": ":",
                    "linewidth": width,
                }
                ax.axhline(
                    row.paper,
                    label=f"paper, {row.network}: {row.paper_loss:g}",
                    **shape,
                )
            ax.set_ylabel("loss / ln(classes)")
            ax.label_outer()
            kind = images.replace("_", "-") + " images"
            ax.set_title({"running": "while training"}.get(images, kind))
    return figure


def fig10(frame: pd.DataFrame) -> Figure:
    """Draw errors of the forms DRAWN by size, on the links on which something is decided, or on all."""
    sides = osf_lab.decided(frame)
    clear = sides[sides["decided"]]
    links = (clear if len(clear) else sides).groupby(LINK).groups
    won = (clear["eq18_error"] < clear["line_error"]).sum()
    said = f"Eq 18 beats every line on {won} of {len(sides)} sides of the bandwidth-delay product (BDP)"
    shape = {"columns": len(links), "height": 3.6, "sharey": True, "squeeze": False}
    with plots.sheet(said, **shape) as (figure, axes):
        for ax, (link, ranks) in zip(axes.flat, links, strict=True):
            rows = rows_of(frame, link=link, ranks=ranks)
            errors = (
                100 * rows.pivot(index="bytes", columns="model", values="error")[DRAWN]
            )
            apart = 100 * rows.groupby("bytes")["repeated"].first().abs().dropna()
            ax.fill_between(
                apart.index, -apart, apart, color=FAINT, label="two runs differ"
            )
            label = "error on the held-out size [%]"
            plots.lines(
                ax, errors, xlabel="message size", ylabel=label, log="b", legend=""
            )
            bdp, printed = rows[
                [f"{of}bandwidth_delay_bytes" for of in ("", "paper_")]
            ].iloc[0]
            ax.axvline(bdp, color=SOFT, linewidth=0.8, label="BDP here")
            ax.axvline(
                printed,
                color=look("paper").color,
                label=f"paper: BDP {printed / KB:g} KB",
            )
            ax.label_outer()
            ax.set_title(f"{link}, {ranks} ranks")
    return figure


def as_replayed(
    tables: Source, network: str, link: str, workers: int
) -> tuple[Workload, pd.DataFrame]:
    """Return a network's compute as replayed over a link, and those replays; if none, its profile's."""
    place = {"origin": "replayed", "network": network, "link": link, "workers": workers}
    runs = rows_of(tables.table("runs"), **place)
    if runs.empty:
        return tables.profile(network).workload(), runs
    compute = runs[["profile_sha256", "dilation"]].iloc[0]
    workload = tables.workloads()[compute["profile_sha256"]]
    return workload.scaled(compute["dilation"]), rows_of(runs, **compute)


def draw11(numbers: pd.DataFrame) -> Figure:
    """Draw factors at the best setting, gains over all compatible ones with the printed, gains replayed."""
    best = numbers[numbers["grade"].isna()]
    model, lab = rows_of(numbers, grade="model"), rows_of(numbers, grade="lab")
    best = best.assign(gain_low=best["model"], gain_high=best["model"])
    panels = {"scaling factor [%], best setting": best}
    for over, rows in model.groupby("over", sort=False):
        panels[f"gain over {look(str(over)).label} [%], settings that fit"] = rows
    panels["gain over that buffer [%], replayed"] = lab.assign(
        network=lab["network"].map(network_title) + ", " + lab["over"].str[7:]
    )
    rule = rows_of(model, planner=ADAFUSION, over=CONSTANT)[
        ["gain_high", "paper_gain_low"]
    ].max()
    said = (
        "adaFusion gains {:.0%} over 100 MB at most; the paper prints {:.1%} at least"
    )
    said = said.format(*rule)
    with plots.sheet(said, columns=2, rows=2, height=6.4) as (figure, axes):
        for ax, (label, rows) in zip(axes.flat, panels.items(), strict=True):
            wide = rows.pivot(index="network", columns="planner").rename(
                index=network_title
            )
            ends = (
                wide[f"gain_{end}"].reindex(columns=SHOWN) for end in ("low", "high")
            )
            low, high = 100 * rows[["paper_gain_low", "paper_gain_high"]].max()
            printed = {"adaFusion": (low, high)} if low == low else {}
            plots.intervals(
                ax, wide.index, _ranges(*ends), label=label, printed=printed
            )
    return figure


def collectives(samples: pd.DataFrame, medians: pd.DataFrame) -> Figure:
    """Return all-reduce times by size; ``medians`` of link and ranks has the floors."""
    with plots.sheet("A small message costs a start-up, a large one its bytes") as (
        figure,
        ax,
    ):
        plots.samples(ax, samples.sort_values("series"), x="bytes", series="series")
        scale, _ = time_unit(samples["seconds"])
        limited = medians.dropna()
        for _, rows in limited[limited["bytes"] >= FLOOR_FROM].groupby("series"):
            shape = {"color": SOFT, "linewidth": 0.8, "label": "floor, with headers"}
            ax.plot(rows["bytes"], scale * rows["floor_s"], **shape)
    return figure


def omgs_fig02(
    selecting: Mapping[str, Fit],
    gathering: Sequence[Fit[MessageCost]],
    measured: pd.DataFrame,
) -> tuple[Figure, pd.DataFrame, tuple[float, float]]:
    """Return omgs's figure 2, its numbers, and the authors' code's alpha (s) and beta (s/byte)."""
    code = paper_table("omgs", "code").set_index("id")["value"].astype(float)
    few, ring = np.geomspace(1e3, 1e6, 7).round(), gathering[0]
    nodes = ring.cost.workers if f"alpha-{ring.cost.workers}" in code else NODES
    gamma_s = claimed("omgs-gamma") * few * np.log2(few)
    lines = {
        f"code_{n}_s": code[f"alpha-{n}"] + code[f"beta-{n}"] * few
        for n in dict.fromkeys((nodes, NODES))
    }
    paper = {
        "paper:γ, without ρ": gamma_s,
        "paper:γ, with ρ (Eq 10)": DENSITY * gamma_s,
    }
    authors = {
        f"paper:code, {name.split('_')[1]} nodes": 1e3 * s for name, s in lines.items()
    }
    figure, axes = plots.canvas(columns=2, height=3.8)
    for ax, printed_s in zip(axes, (paper, authors), strict=True):
        plots.lines(ax, pd.DataFrame(printed_s, few), xlabel="", ylabel="", legend="")
    plots.cost_fit(axes[0], dict(selecting))
    plots.cost_fit(axes[1], {fit.form: fit for fit in gathering})
    names = (
        f"torch.topk at a density of {DENSITY:g}",
        f"all-gather among {ring.cost.workers}",
    )
    for ax, name in zip(axes, names, strict=True):
        ax.set_ylim(top=30 * ax.get_ylim()[1])  # room for the legend
        plots.heading(ax, name)
    medians = (
        measured.groupby(["elements", "density"])["seconds"].median().reset_index()
    )
    plots.title(figure, "Selecting looks at every element; no formula has its steps")
    gathered = pd.Series(ring.seconds).groupby(ring.sizes).median()
    printed = {"paper_no_density_s": gamma_s, "paper_s": DENSITY * gamma_s}
    parts = [medians, gathered.rename("gather_s").rename_axis("bytes").reset_index()]
    parts += [
        pd.DataFrame({"elements": few, **printed}),
        pd.DataFrame({"bytes": few, **lines}),
    ]
    numbers = pd.concat(parts, ignore_index=True).astype(
        {"elements": "Int64", "bytes": "Int64"}
    )
    return (
        figure,
        numbers,
        (float(code[f"alpha-{nodes}"]), float(code[f"beta-{nodes}"])),
    )
