"""Figures of the core notebooks: osf's 1, 2, 10 and 11, omgs's 2, rules' gaps; and what was replayed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ddlkit.core.cost import MessageCost
from ddlkit.core.fit import Fit
from ddlkit.core.link import FRAMING
from ddlkit.core.units import KB, format_bytes
from ddlkit.core.workload import Workload
from ddlkit.papers.osf.cluster import FIVE
from ddlkit.report import plots
from ddlkit.report.claims import claimed, paper_table, prose
from ddlkit.report.figures import osf_lab, osf_measured, osf_panels, osf_scaling
from ddlkit.report.plots.style import SOFT, look, theme
from ddlkit.report.source import Source
from ddlkit.store import network_title

ROOM = 30  # times higher a logarithmic axis ends, for the legend
FLOOR_FROM = 2**15
"""Bytes of the smallest message whose floor is drawn."""
SIDES = {"small": "below", "large": "above"}
DENSITY = 0.001
"""Of omgs's figure 2a."""
ADAFUSION = "adafusion:repaired"
SHOWN = ("none", "buffer:100MB", "mg_wfbp", ADAFUSION, "exact")
"""Planners of osf's figure 11."""
AUDITED = ("buffer:25MB", "buffer:100MB", "ddp", "mg_wfbp", ADAFUSION)
HIGHEST = 50
"""Of gaps in percent; a few are larger."""
NODES = 16
"""Of omgs's figure 2b."""


def fig01() -> tuple[Figure, pd.DataFrame, float]:
    """osf's figure 1 with its spans, and how many times as long as forward backward takes by its Eq 4."""
    timelines = osf_scaling.fig01(osf_scaling.setting())
    printed = claimed("osf-eq4-backward")
    figure, axes = plots.canvas(rows=2, height=3.4)
    plots.gantt(axes, timelines)
    exposed = [1e3 * one.exposed_communication_s() for one in timelines.values()]
    found = f"Overlap shortens exposed communication from {exposed[0]:.0f} to {exposed[1]:.1f} ms"
    plots.title(figure, f"{found} (model)")
    spans = pd.concat(one.to_frame().assign(model=name) for name, one in timelines.items())
    computed_s = spans.loc[spans["kind"] == "backward", "end_s"].max()
    paper = look("paper")
    for ax in axes:
        ax.axvline(1e3 * computed_s / (1 + printed), color=paper.color, linestyle=paper.line)
    dotted = f"forward's end in the paper, whose backward takes {printed:g} times as long (Eq 4)"
    axes[-1].set_xlabel(f"time [ms]; dotted: {dotted}")
    return figure, spans.assign(paper_backward_over_forward=printed), printed


def fig02() -> tuple[Figure, pd.DataFrame]:
    """osf's figure 2, with its spans; the paper's example is a buffer of so many tensors."""
    workload, cost, timelines = osf_scaling.fig02()
    tensors = int(prose("osf")["fig02-buffer"])
    figure, axes = plots.canvas(rows=len(timelines), height=4.4)
    named = {name: f"fused in pairs (paper: buffer of {tensors})" for name in [*timelines][1:2]}
    plots.gantt(axes, {named.get(name, name): one for name, one in timelines.items()})
    best = min(timelines, key=lambda name: timelines[name].duration_s)
    plots.title(figure, f"Shortest: {best}, {1e3 * timelines[best].duration_s:.1f} ms (model)")
    spans = pd.concat(one.to_frame().assign(plan=name) for name, one in timelines.items())
    return figure, spans.assign(paper_buffer_tensors=tensors)


def as_replayed(
    tables: Source, network: str, link: str, workers: int
) -> tuple[Workload, pd.DataFrame]:
    """A network's compute as it was replayed over a link, and those replays; if none, its profile's."""
    place = {"origin": "replayed", "network": network, "link": link, "workers": workers}
    runs = tables.table("runs")
    runs = runs[(runs[[*place]] == pd.Series(place)).all(axis=1)]
    if runs.empty:
        return tables.profile(network).workload(), runs
    compute = ["profile_sha256", "dilation"]
    sha256, stretch = runs[compute].iloc[0]
    alike = (runs[compute] == [sha256, stretch]).all(axis=1)
    return tables.workloads()[sha256].scaled(stretch), runs[alike]


def gaps(audit: pd.DataFrame) -> tuple[Figure, pd.DataFrame]:
    """How far the planners AUDITED are from the best plan, by share of instances and by their start-ups.

    audit : of `ddlkit.papers.audit.random_audit`
    """
    wide = 100 * audit.pivot(index="instance", columns="planner", values="gap")[list(AUDITED)]
    index = 100 * (np.arange(len(wide)) + 1) / len(wide)
    shares = pd.DataFrame(np.sort(wide, axis=0), columns=wide.columns, index=index)
    load = audit.groupby("instance")["start_ups_over_compute"].first()
    edges = np.geomspace(0.01, 10, 7)
    bins = pd.cut(load, edges, labels=np.sqrt(edges[1:] * edges[:-1]))
    means = wide.groupby(bins, observed=True).mean()
    figure, axes = plots.canvas(columns=2, height=3.4)
    ylabel = "gap to the best plan, at most [%]"
    plots.lines(axes[0], shares, xlabel="share of networks [%]", ylabel=ylabel, legend="")
    axes[0].set_ylim(0, HIGHEST)
    xlabel = "all start-ups / compute"
    plots.lines(axes[1], means, xlabel=xlabel, ylabel="mean gap [%]", log="x", legend="right")
    near = {
        plan: f"{look(plan).label} on {np.mean(wide[plan] < 1):.0%}" for plan in ("mg_wfbp", "ddp")
    }
    plots.title(
        figure, f"Within 1% of the best plan, of random networks: {', '.join(near.values())}"
    )
    parts = (
        part.rename_axis("value").reset_index().assign(of=of)
        for of, part in (("share_percent", shares), ("start_ups_over_compute", means))
    )
    return figure, pd.concat(parts, ignore_index=True)


def printed_gains() -> dict[str, tuple[float, float]]:
    """Return the least and largest gain of adaFusion in % that osf states, by what it is over."""
    names = {osf_scaling.CONSTANT: "osf-fig11-constant", osf_scaling.RIVAL: "osf-fig11-mgwfbp"}
    return {over: (claimed(f"{name}-min"), claimed(f"{name}-max")) for over, name in names.items()}


def _gains(rows: pd.DataFrame, cases: pd.DataFrame) -> dict[str, tuple[pd.Series, pd.Series]]:
    """Lows and highs in % of every planner, in the order of ``cases``."""
    ends = {str(name): cases.merge(mine, how="left") for name, mine in rows.groupby("planner")}
    return {name: (100 * m["gain_low"], 100 * m["gain_high"]) for name, m in ends.items()}


@theme()
def fig11(campaign: Source) -> tuple[Figure, pd.DataFrame]:
    """Draw osf's figure 11: factors at the best setting, gains over all compatible ones, gains replayed.

    campaign : replays of plans of one network beside each other, over the lab's link
    Returns the figure and its numbers: rows of `osf_scaling.fig11`, then gains with their grade, and what the
    paper prints of adaFusion's in ``paper_gain_low`` and ``paper_gain_high``.
    """
    frame, printed = osf_scaling.fig11(osf_scaling.setting()), printed_gains()
    gains = osf_scaling.over(osf_scaling.gains, ["planner", "over", "network"], ["gain"])
    fast = osf_lab.gains_in_lab(campaign.table("runs"), "buffer:25MB")
    slow = osf_lab.gains_in_regime()
    figure, axes = plots.canvas(columns=2, rows=2, height=6.4)
    networks = [network_title(name) for name in FIVE]
    factors = frame.pivot(index="network", columns="planner", values="model").loc[list(FIVE)]
    alike = {planner: (factors[planner], factors[planner]) for planner in SHOWN}
    plots.intervals(axes[0, 0], networks, alike, label="scaling factor", legend="")
    axes[0, 0].set_xlim(left=0)
    plots.heading(axes[0, 0], "model, best setting")
    for ax, (other, rows) in zip(axes.flat[1:3], gains.groupby("over", sort=False), strict=True):
        label = f"gain over {look(str(other)).label} [%]"
        ranges = _gains(rows, pd.DataFrame({"network": FIVE}))
        names = {"adaFusion": printed[str(other)]}
        plots.intervals(ax, networks, ranges, label=label, printed=names, legend="")
        plots.heading(ax, f"model, {len(osf_scaling.compatible())} settings that fit")
    lab = pd.concat([fast, slow])
    cases = lab[["network", "over"]].drop_duplicates()
    labels = [f"{network_title(one)}, {size[7:]}" for one, size in cases.itertuples(index=False)]
    # adaFusion was replayed as printed only: with the repaired rule before it, it has a look of its own.
    drawn = {ADAFUSION: (np.full(len(cases), np.nan),) * 2, **_gains(lab, cases)}
    plots.intervals(axes[1, 1], labels, drawn, label="gain over that buffer [%]", legend="")
    plots.heading(axes[1, 1], "replayed")
    osf_panels.legend(figure, figure.axes)
    own = gains[(gains["planner"] == ADAFUSION) & (gains["over"] == osf_scaling.CONSTANT)]
    most, least = 100 * own["gain_high"].max(), printed[osf_scaling.CONSTANT][0]
    said = f"adaFusion gains {most:.0f}% over 100 MB at most; the paper prints {least:g}% at least"
    plots.title(figure, said)
    numbers = pd.concat([frame, osf_panels.graded(gains, fast, slow)], ignore_index=True)
    own = (numbers["planner"] == ADAFUSION) & (numbers["grade"] == "model")
    for place, end in enumerate(("low", "high")):
        values = {over: ends[place] / 100 for over, ends in printed.items()}
        numbers[f"paper_gain_{end}"] = numbers["over"].map(values).where(own)
    return figure, numbers


def collectives(samples: pd.DataFrame, medians: pd.DataFrame) -> Figure:
    """All-reduce times by size in bands of their samples and, over links of known rate, busbw over that rate.

    medians : of each series (link and ranks) and size, with busbw over the rate, and floor_s, the time at it
    """
    figure, axes = plots.canvas(columns=2, height=3.2)
    ordered = samples.sort_values("series")
    plots.samples(axes[0], ordered, x="bytes", series="series", unit="ms", legend="")
    limited = medians.dropna()
    if len(limited):
        for _, rows in limited[limited["bytes"] >= FLOOR_FROM].groupby("series"):
            floor = {"color": SOFT, "linewidth": 0.8, "label": "floor, with headers"}
            axes[0].plot(rows["bytes"], 1e3 * rows["floor_s"], **floor)
        shares = 100 * limited.pivot(index="bytes", columns="series", values="busbw_over_rate")
        label = "busbw over rate [%]"
        plots.lines(axes[1], shares, xlabel="message size", ylabel=label, log="b", legend="")
        axes[1].axhline(100 * FRAMING, color=SOFT, linewidth=0.8)
        largest = f"{format_bytes(shares.index[-1])} reach {shares.iloc[-1].min():.0f}%"
        plots.heading(axes[1], f"{largest} of the rate")
    plots.heading(axes[0], "A small message costs a start-up")
    plots.shared_legend(figure)
    return figure


def fig10(frame: pd.DataFrame) -> Figure:
    """Errors of the forms DRAWN by size, a panel per link of `osf_measured.repeatable`; frame : of its fig10.

    A heading says on which side of the bandwidth-delay product Eq 18 beats every line.
    """
    links, sides = osf_measured.repeatable(frame), osf_measured.decided(frame)
    sides = sides[sides["decided"] & (sides["eq18_error"] < sides["line_error"])]
    figure, axes = plots.canvas(len(links), height=3.6, sharey=True, squeeze=False)
    for ax, ((link, ranks), rows) in zip(axes.flat, links.items(), strict=True):
        errors = 100 * rows.pivot(index="bytes", columns="model", values="error")
        runs = 100 * rows.groupby("bytes")["repeated"].first().abs().dropna()
        plots.ribbon(ax, runs.index, -runs, runs, "table", ["table"], label="two runs differ")
        ylabel = "error on the held-out size [%]" if ax is axes[0, 0] else ""
        own = errors[list(osf_measured.DRAWN)]
        plots.lines(ax, own, xlabel="message size", ylabel=ylabel, log="b", legend="")
        here, printed = (rows[f"{name}bandwidth_delay_bytes"].iloc[0] for name in ("", "paper_"))
        ax.axvline(here, color=SOFT, linewidth=0.8, label="BDP here")
        paper = look("paper")
        name = f"paper: BDP {printed / KB:g} KB"
        ax.axvline(printed, color=paper.color, linestyle=paper.line, label=name)
        won = sides.loc[(sides["link"] == link) & (sides["ranks"] == ranks), "tensors"]
        found = (
            f"Eq 18 better {' and '.join(SIDES[side] for side in won)} BDP"
            if len(won)
            else "undecided"
        )
        plots.heading(ax, f"{link}, {ranks}: {found}")
    plots.shared_legend(figure)
    return figure


def _largest_step(medians: pd.DataFrame) -> str:
    """Between which two sizes selecting at DENSITY slows down most, in words."""
    times = medians[np.isclose(medians["density"], DENSITY)].set_index("elements")["seconds"]
    where = times.index.get_loc((times / times.shift()).idxmax())
    before, after = times.index[where - 1 : where + 1]
    ratio = times[after] / times[before]
    return f"{after:,} elements take {ratio:.0f} times as long as {before:,}"


def omgs_fig02(
    selecting: Mapping[str, Fit], gathering: Sequence[Fit[MessageCost]], measured: pd.DataFrame
) -> tuple[Figure, pd.DataFrame, tuple[float, float]]:
    """Selecting and gathering against size, their fits, and what omgs prints of both.

    selecting : at DENSITY, by form; gathering : fits to one link's all-gathers
    measured : samples of selections at several densities

    gamma is read as 2.2e-10 s. alpha and beta stand in the paper's picture alone: here they are its authors'
    code's (data/papers/omgs/code.csv), for as many nodes, where it has those, and for NODES.

    Returns the figure, the numbers drawn, and alpha (s) and beta (s/byte) for as many nodes.
    """
    code = paper_table("omgs", "code").set_index("id")["value"].astype(float)
    few = np.geomspace(1e3, 1e6, 7).round()
    known = gathering[0]
    nodes = known.cost.workers if f"alpha-{known.cost.workers}" in code else NODES
    gamma_s = claimed("omgs-gamma") * few * np.log2(few)
    printed = {"paper_no_density_s": gamma_s, "paper_s": DENSITY * gamma_s}
    lines = {
        f"code_{n}_s": code[f"alpha-{n}"] + code[f"beta-{n}"] * few
        for n in dict.fromkeys((nodes, NODES))
    }
    figure, axes = plots.canvas(columns=2, height=3.8)
    thin = {"color": look("paper").color, "linestyle": look("paper").line, "linewidth": 1.2}
    axes[0].plot(few, gamma_s, label="paper's γ, without ρ", **thin)
    plots.points(
        axes[0], few[3:], DENSITY * gamma_s[3:], "paper", size=4, label="paper's γ, with ρ (Eq 10)"
    )
    plots.cost_fit(axes[0], *selecting.values(), density=DENSITY)
    axes[1].plot(few, 1e3 * lines[f"code_{nodes}_s"], label=f"code, {nodes} nodes", **thin)
    label, of_16_s = f"authors' code, {NODES} nodes", 1e3 * lines[f"code_{NODES}_s"]
    plots.points(axes[1], few, of_16_s, "paper", size=4, label=label)
    plots.cost_fit(axes[1], *gathering, names=[one.form for one in gathering])
    names = f"torch.topk at a density of {DENSITY:g}", f"all-gather among {known.cost.workers}"
    for ax, name in zip(axes, names, strict=True):
        ax.set_ylim(top=ROOM * ax.get_ylim()[1])
        plots.heading(ax, name)
    medians = measured.groupby(["elements", "density"])["seconds"].median().reset_index()
    plots.title(figure, f"No formula has this step: {_largest_step(medians)}")
    gathered = pd.Series(known.seconds).groupby(known.bytes).median()
    parts = [
        medians,
        pd.DataFrame({"bytes": gathered.index, "gather_s": gathered.to_numpy()}),
        pd.DataFrame({"elements": few, **printed}),
        pd.DataFrame({"bytes": few, **lines}),
    ]
    whole = {"elements": "Int64", "bytes": "Int64"}
    numbers = pd.concat(parts, ignore_index=True).astype(whole)
    return figure, numbers, (float(code[f"alpha-{nodes}"]), float(code[f"beta-{nodes}"]))
