"""osf's figures 3 to 9 as panels: of each the numbers with what the paper prints of them, and the drawing.

A drawing takes nothing but the figure's own numbers, so that its CSV holds all that is drawn; ``paper`` and
names that begin so are columns of printed values. Titles state what the numbers say.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddlkit.core.units import GB, MB
from ddlkit.papers.osf import cluster
from ddlkit.papers.osf.breakdown import PHASES
from ddlkit.papers.osf.cluster import REPLACED, WORKERS
from ddlkit.report import plots
from ddlkit.report.claims import claimed
from ddlkit.report.figures import osf_measured, osf_overhead, osf_ranges, osf_scaling
from ddlkit.report.figures.osf_scaling import TWO, Lab, buffer_name
from ddlkit.report.plots.style import WIDTH, look, theme
from ddlkit.store import network_title

LAB = "campaign-osf"
"""The campaign at 1 Gbit/s."""
PLACES = {mark: f"lab, {links}" for mark, links in osf_ranges.LABS.items()}
EXPENSIVE = ", dear start-ups"
"""Behind a network's name in tables: over links with start-ups as expensive as on the cluster."""
LINE = 88
"""Letters in a line of a title."""


@theme()
def _titled(figure: Figure, text: str) -> Figure:
    """The figure with its finding above all panels."""
    said = textwrap.fill(text, LINE, break_on_hyphens=False)
    figure.suptitle(said, x=0.008, ha="left", fontsize=9, fontweight="bold")
    return figure


def spelled(name: str) -> str:
    """A network of a table as figures spell it."""
    plain = name.removesuffix(EXPENSIVE)
    return network_title(plain) + (", expensive start-ups" if plain != name else "")


def _place(name: str) -> tuple[bool, str, int]:
    """Where a network stands among others: expensive start-ups last, a family's by their depth."""
    return EXPENSIVE in name, name[:6], len(name)


def _span(values: pd.Series) -> str:
    """From the least to the largest of relative values, in %."""
    return f"{values.min():+.0%} to {values.max():+.0%}"


def _say(ax: Axes, x: float, y: float, text: str, points: tuple[float, float], **side: str) -> None:
    """What a paper prints, in its colour, so many points from its place."""
    words: dict[str, Any] = {
        "fontsize": 7,
        "color": look("paper").color,
        "va": "center",
        "ha": "center",
    }
    behind = {
        "boxstyle": "square,pad=0.15",
        "facecolor": "white",
        "edgecolor": "none",
        "alpha": 0.85,
    }
    ax.annotate(text, (x, y), points, textcoords="offset points", bbox=behind, **(words | side))


def _legend(figure: Figure, axes: Iterable[Axes], columns: int) -> None:
    """What is named on any of the axes, once, below all panels."""
    named: dict[str, Any] = {}
    for ax in axes:
        named |= dict(zip(*ax.get_legend_handles_labels()[::-1], strict=True))
    figure.legend(named.values(), named, loc="outside lower left", ncols=columns)


# -- scaling factors ---------------------------------------------------------------------------------


def fig03() -> pd.DataFrame:
    """Scaling factors without fusion on the cluster and errors in the lab, beside the printed ranges."""
    model = osf_ranges.over(osf_scaling.fig03, ["network", "quantity"], ["model", "error"])
    labs = [Lab.load(name) for name in ("campaign", LAB)]
    plain = osf_ranges.unfused_in_lab(labs, ring=True)
    frame = osf_ranges.graded(model, plain, osf_ranges.unfused_in_regime())
    first = (frame["network"] == "VGG16") & (frame["quantity"] == "simulated")
    frame["paper"] = np.where(first, claimed("osf-fig08-before"), np.nan)
    for name, (low, high) in osf_ranges.printed_errors().items():
        rows = frame["quantity"] == ("CSF" if name == "CSF" else "OSF printed")
        frame.loc[rows, ["paper_error_low", "paper_error_high"]] = [low / 100, high / 100]
    return frame


@theme()
def draw03(frame: pd.DataFrame) -> Figure:
    """Scaling factors and CSF's errors on the cluster, and both formulas' errors in the lab."""
    figure = plt.figure(figsize=(WIDTH, 5.6))
    heights = {"height_ratios": [5, 7]}
    axes = figure.subplot_mosaic([["factor", "error"], ["lab", "lab"]], gridspec_kw=heights)
    by_quantity = {name: rows for name, rows in frame.groupby("quantity", sort=False)}
    csf, names = by_quantity["CSF"], [spelled(name) for name in cluster.FIVE]
    factors = {
        name: (by_quantity[name]["model_low"], by_quantity[name]["model_high"])
        for name in ("simulated", "CSF")
    }
    plots.intervals(axes["factor"], names, factors, label="scaling factor", legend="")
    at = by_quantity["simulated"]["paper"]
    plots.points(axes["factor"], at, np.arange(len(at)), "paper", size=6)
    errors = {"CSF": (100 * csf["error_low"], 100 * csf["error_high"])}
    plots.intervals(axes["error"], names, errors, label="CSF's error [%]", legend="")
    axes["error"].tick_params(labelleft=False)
    lab = frame[frame["grade"] == "lab"]
    order = sorted(dict.fromkeys(lab["network"]), key=_place)
    ends = (100 * lab.groupby("network")[["CSF", "OSF printed"]].agg(["min", "max"])).loc[order]
    drawn = {name: (ends[name, "min"], ends[name, "max"]) for name in ("CSF", "OSF printed")}
    label = "error against the measured scaling factor [%]"
    plots.intervals(axes["lab"], [spelled(name) for name in order], drawn, label=label, legend="")
    for name, hatch in (("CSF", "..."), ("OSF printed", "///")):
        ends_of = by_quantity[name][["paper_error_low", "paper_error_high"]].iloc[0]
        for ax in (axes["lab"], axes["error"])[: 2 if name == "CSF" else 1]:
            for side in (1, -1):
                band = ax.axvspan(*sorted(100 * side * ends_of), zorder=0, linewidth=0, alpha=0.16)
                band.set(color=look(name).color, hatch=hatch)
                band.set_label(f"paper: size of {name.split()[0]}'s error" if side > 0 else "_")
    plots.heading(axes["factor"], "(a) cluster, all settings that fit")
    plots.heading(axes["error"], "(b) CSF against the simulated factor")
    plots.heading(axes["lab"], f"(c) lab, {len(lab)} replayed cases")
    _legend(figure, axes.values(), 3)
    there = lab["network"].str.endswith(EXPENSIVE)
    return _titled(
        figure,
        f"CSF errs by {_span(lab.loc[there, 'CSF'])} with expensive start-ups, "
        f"{_span(lab.loc[~there, 'CSF'])} with cheap ones",
    )


def fig04() -> pd.DataFrame:
    """Scaling factors against the buffer, beside the largest errors that the text prints of ResNet-101."""
    model = osf_ranges.over(osf_scaling.fig04, ["network", "buffer_bytes", "quantity"])
    frame = osf_ranges.graded(model, osf_ranges.fused_in_labs(Lab.load(LAB)))
    for name, claim in (("CSF", "osf-fig04a-csf"), ("OSF printed", "osf-fig04a-osf")):
        rows = (frame["network"] == "ResNet101") & (frame["quantity"] == name)
        frame.loc[rows, "paper_error"] = claimed(claim) / 100
    known = frame["paper_error"].where(frame["quantity"] == "CSF")
    return frame.assign(
        paper_low=frame["model"] / (1 + known), paper_high=frame["model"] / (1 - known)
    )


@theme()
def draw04(frame: pd.DataFrame, formulas: Sequence[str]) -> Figure:
    """Simulated with its range, and by the formulas; measured; what the printed error leaves around CSF."""
    shown = ["simulated", *formulas]
    figure, axes = plots.canvas(columns=2, height=3.3, sharey=True)
    gains = {}
    for ax, (network, rows) in zip(axes, frame.groupby("network", sort=False), strict=False):
        model = rows[rows["grade"] == "model"]
        wide = model.assign(mb=model["buffer_bytes"] / MB).pivot(index="mb", columns="quantity")
        gains[network] = wide["model"].max() / wide["model"].iloc[0] - 1
        if wide["paper_low"].notna().any(axis=None):
            low, high = (wide[f"paper_{end}"]["CSF"] for end in ("low", "high"))
            label = f"paper: SF off CSF by {model['paper_error'].max():.1%} at most"
            ax.fill_between(
                wide.index, low, high, color=look("paper").color, alpha=0.3, lw=0, label=label
            )
        low, high = (wide[f"model_{end}"]["simulated"] for end in ("low", "high"))
        fits = "simulated, settings that fit"
        plots.ribbon(ax, wide.index, low, high, "simulated", shown, label=fits)
        plots.lines(ax, wide["model"][shown], xlabel="buffer [MB]", ylabel="", log="x", legend="")
        _marked(ax, rows[rows["buffer_bytes"] > 0])
        plots.heading(ax, spelled(network))
        ax.set_ylim(0, 1.05)
    axes[0].set_ylabel("scaling factor")
    _legend(figure, axes, 3)
    simulated, printed = (gains["ResNet101"][name] for name in ("simulated", "OSF printed"))
    return _titled(
        figure,
        f"{spelled('ResNet101')}: the best buffer gains {simulated:.0%} as simulated, "
        f"{printed:.0%} by the printed equations",
    )


def _marked(ax: Axes, rows: pd.DataFrame) -> None:
    """What was measured over each of the lab's links."""
    for mark, label in osf_ranges.LABS.items():
        at = rows[rows["look"] == mark]
        x = osf_ranges.place(at["buffer_bytes"])
        plots.points(ax, x, at["measured"], mark, label=f"measured, {label}", size=7)


def fig06() -> pd.DataFrame:
    """Messages and scaling factor against the buffer, beside the printed change at 1 GB."""
    fused = osf_ranges.fused_in_labs(Lab.load(LAB))
    frame = osf_ranges.graded(osf_ranges.fig06(), fused)
    change = {"ResNet101": "osf-fig06-resnet101", "VGG16": "osf-fig06-vgg16"}
    signed = {
        name: (1 if name == "ResNet101" else -1) * claimed(one) / 100
        for name, one in change.items()
    }
    return frame.assign(paper_change=frame["network"].map(signed).where(frame["paper"].notna()))


def changes(frame: pd.DataFrame, network: str) -> dict[str, float]:
    """What 1 GB changes over no buffer: of figure 6 by model and paper, and as measured over each link."""
    mine = frame[(frame["network"] == network) & (frame["quantity"] != "all-reduces")]
    found = {}
    for name, rows in mine.groupby(mine["look"].fillna("model"), sort=False):
        value = rows.set_index("buffer_bytes")["model" if name == "model" else "measured"]
        if {0, GB} <= set(value.index):
            found[str(name)] = float(value[GB] / value[0] - 1)
    return found | {"paper": float(mine["paper_change"].max(skipna=True))}


@theme()
def draw06(frame: pd.DataFrame) -> Figure:
    """Above the messages, below the factor: model with its range, measured, and the printed change."""
    figure, axes = plots.canvas(columns=2, rows=2, height=4.8, sharex=True)
    for (top, bottom), network in zip(axes.T, TWO, strict=True):
        mine = frame[frame["network"] == network]
        rows = mine[mine["grade"] == "model"]
        rows = rows.assign(place=osf_ranges.place(rows["buffer_bytes"]))
        rows = rows.pivot(index="place", columns="quantity")
        counts, factor = rows["model"][["all-reduces"]], rows.xs("SF", axis=1, level="quantity")
        plots.lines(top, counts, xlabel="", ylabel="all-reduces", log="xy", legend="")
        low, high = factor["model_low"], factor["model_high"]
        fits = "model, settings that fit"
        plots.ribbon(bottom, factor.index, low, high, "model", ["model"], label=fits)
        words = {"xlabel": "buffer [MB]", "ylabel": "scaling factor"}
        plots.lines(bottom, factor[["model"]], **words, log="x", legend="")
        label = "paper: change at 1 GB"
        plots.points(bottom, factor.index, factor["paper"], "paper", label=label, size=7)
        end = factor.dropna(subset="paper").iloc[-1]
        said = f"paper {end['paper_change']:+.0%}"
        _say(bottom, GB / MB, end["paper"], said, (6, -10), ha="right")
        _marked(bottom, mine)
        bottom.margins(y=0.18)
        bottom.set_xticks(
            [osf_ranges.NO_FUSION_MB, 0.01, 1, 100, 1000], ["none", "0.01", "1", "100", "1000"]
        )
        plots.heading(top, spelled(network))
    _legend(figure, axes[1], 3)
    found = changes(frame, "ResNet101")
    return _titled(
        figure,
        f"1 GB against no buffer, {spelled('ResNet101')}: {found['model']:+.0%} by model, measured "
        f"{found['regime']:+.0%} with expensive start-ups and {found['measured']:+.0%} with cheap ones, "
        f"paper {found['paper']:+.0%}",
    )


def fig08() -> pd.DataFrame:
    """Scaling factors of VGG-16 as published and replaced, beside what two places of the text print."""
    model = osf_scaling.fig08(osf_scaling.setting())
    labs = {"measured": Lab.load(LAB), "regime": osf_ranges.regime_vgg()}
    rows = [osf_scaling.fig08_lab(lab).assign(look=mark) for mark, lab in labs.items()]
    frame = osf_ranges.graded(model, *rows)
    replaced = (frame["network"] == REPLACED) & frame["paper"].notna()
    return frame.assign(paper_section_1=np.where(replaced, claimed("osf-fig08-intro"), np.nan))


@theme()
def draw08(frame: pd.DataFrame) -> Figure:
    """By workers: the cluster by model, and the lab over both links, measured and by model."""
    figure, axes = plots.canvas(columns=3, height=3.4, sharey=True)
    lab = frame[frame["grade"] == "lab"].rename(columns={"model": "OSF", "csf": "CSF"})
    lab = lab.melt(["network", "workers", "look", "measured"], ["OSF", "CSF"], "quantity", "model")
    places = {"the paper's cluster (model)": frame[frame["grade"] == "model"]}
    places |= {name: lab[lab["look"] == mark] for mark, name in PLACES.items()}
    for ax, (name, rows) in zip(axes, places.items(), strict=True):
        wide = rows.pivot(index="workers", columns=["network", "quantity"], values="model")
        wide = wide[[(n, q) for n in ("VGG16", REPLACED) for q in ("OSF", "CSF")]]
        wide.columns = [f"{spelled(network)}, {quantity}" for network, quantity in wide]
        plots.lines(ax, wide, xlabel="workers", ylabel="", log="x", legend="")
        at = rows.drop_duplicates(["network", "workers"])
        if "paper" in at:
            plots.points(
                ax, at["workers"], at["paper"], "paper", label="paper, Section 4.1", size=7
            )
            plots.points(
                ax, at["workers"], at["paper_section_1"], "paper", label="paper, Section 1", size=4
            )
            for column, points in {"paper": -10, "paper_section_1": 10}.items():
                for x, y in at.dropna(subset=column)[["workers", column]].itertuples(index=False):
                    _say(ax, x, y, f"{y:g}", (0, points if y > 0.5 else 10))
        else:
            plots.points(ax, at["workers"], at["measured"], "measured", size=8)
        ax.set_xticks(wide.index, wide.index)
        ax.set_ylim(0, 1.05)
        plots.heading(ax, name)
    axes[0].set_ylabel("scaling factor")
    _legend(figure, axes, 4)
    end = frame[(frame["network"] == REPLACED) & frame["paper"].notna()].set_index("quantity")
    return _titled(
        figure,
        f"{spelled(REPLACED)}, {WORKERS} workers: {end['model']['OSF']:.2f} with overlap, "
        f"{end['model']['CSF']:.2f} by CSF; paper {end['paper'].iloc[0]:g} and "
        f"{end['paper_section_1'].iloc[0]:g}",
    )


PICTURES = {
    "running": "while training",
    "training": "training images",
    "held_out": "held-out images",
}
"""Sets of images by the name that tables have."""


def fig09(trained: pd.DataFrame) -> pd.DataFrame:
    """Losses of table ``convergence``, beside the printed ones, also as they are printed."""
    frame = osf_measured.fig09(trained)
    printed = {"published": claimed("osf-fig09-before"), "replaced": claimed("osf-fig09-after")}
    return frame.assign(paper_loss=frame["network"].map(printed).where(frame["paper"].notna()))


NAMES = {
    "published": "original",
    "replaced": "replaced",
    "published, no dropout": "original without dropout",
}
"""Networks of figure 9 as they are shown."""
LEAST = 0.001
"""A smaller loss is no number worth telling."""


@theme()
def draw09(frame: pd.DataFrame) -> Figure:
    """Loss by epoch on three sets of images; the paper's two printed losses where they belong."""
    widths = {"width_ratios": [1.5, 1, 1]}
    figure, axes = plots.canvas(columns=3, height=3.2, sharey=True, gridspec_kw=widths)
    epochs = frame["epoch"].max()
    for ax, (images, title) in zip(axes, PICTURES.items(), strict=True):
        rows = frame[frame["measured_on"] == images].copy()
        printed = rows.dropna(subset="paper").drop_duplicates("network")
        rows["network"] = rows["network"].map(NAMES)
        value = {"x": "epoch", "y": "share_of_guess", "series": "network"}
        plots.samples(ax, rows, **value, center="mean", percent=100, legend="")
        for place, row in enumerate(printed.sort_values("paper").to_dict("records")):
            style = look("paper")
            ax.axhline(row["paper"], color=style.color, linestyle=style.line, linewidth=1)
            said = f"paper, {NAMES[row['network']]}: {row['paper_loss']:g}"
            _say(ax, 1.05 * epochs, row["paper"], said, (0, 7 if place else -7), ha="left")
            ax.set_xlim(right=1.75 * epochs)
            ax.set_xticks([tick for tick in ax.get_xticks() if 0 <= tick <= epochs])
        plots.heading(ax, title)
        ax.set_ylabel("loss / ln(classes)" if ax is axes[0] else "")
    _legend(figure, axes, 3)
    losses = osf_measured.final(frame, "share_of_guess")["mean", "running"]
    ends = {name: losses[key] for key, name in NAMES.items() if key in losses}
    shown = {
        name: f"{value:.2g}" if value > LEAST else f"below {LEAST}" for name, value in ends.items()
    }
    said = ", ".join(f"{name} {value}" for name, value in shown.items())
    return _titled(figure, f"Loss while training after {epochs} epochs, over ln(classes): {said}")


# -- where time goes ---------------------------------------------------------------------------------


def fig05(slow_rank: float) -> pd.DataFrame:
    """Communication time by phase against workers: the cluster by model with the printed share, the lab."""
    model = osf_overhead.fig05(osf_scaling.setting(), slow_rank=slow_rank)
    phases = osf_overhead.phases(Lab.load(LAB))
    both = [model.assign(grade="model"), phases[phases["buffer_bytes"] == 0].assign(grade="lab")]
    return pd.concat(both, ignore_index=True)


@theme()
def draw05(frame: pd.DataFrame) -> Figure:
    """Shares: the cluster with equal workers and with a slower one, and the lab, model beside measured."""
    figure, axes = plots.canvas(columns=2, rows=3, height=7.0, sharey=True)
    model = frame[frame["grade"] == "model"]
    slow = model["slowest"].max()
    for column, network in enumerate(TWO):
        for row, slowest in enumerate((1.0, slow)):
            ax, rows = axes[row, column], _of(model, network=network, slowest=slowest)
            wide = rows.pivot(index="workers", columns="phase", values="model")[list(PHASES)]
            plots.bars(ax, 100 * wide, label="", stacked=True, legend="")
            for workers, paper in rows.dropna(subset="paper")[["workers", "paper"]].itertuples(
                index=False
            ):
                place = list(wide.index).index(workers)
                plots.points(ax, [place], [100 * paper], "paper", label="paper", size=6)
                _say(ax, place, 100 * paper, f"paper {paper:.0%}", (0, -11))
            equal = "equal workers" if slowest == 1 else f"one takes {slowest:g} x"
            plots.heading(ax, f"{spelled(network)}, cluster (model), {equal}")
            ax.set_xlabel("workers")
        rows = _of(frame, grade="lab", network=network).sort_values(["slowest", "workers"])
        names = rows["workers"].astype(str) + np.where(rows["slowest"] > 1, " slow", "")
        ax = axes[2, column]
        _paired(ax, rows.assign(name=names), {"model": "model", "measured": "lab"})
        ax.set_xlabel(f"workers; {ax.get_xlabel()}")
        plots.heading(ax, f"{spelled(network)}, {PLACES['measured']}")
    for ax in axes[:, 0]:
        ax.set_ylabel("share of communication [%]")
    _legend(figure, axes[:1].flat, 5)
    shares = _of(model, network="ResNet101", slowest=slow, phase="NEGOTIATE").set_index("workers")[
        "model"
    ]
    first, last = shares.index[[0, -1]]
    return _titled(
        figure,
        f"{spelled('ResNet101')} by model, one worker takes {slow:g} times as long: NEGOTIATE is "
        f"{shares[first]:.0%} of communication among {first} workers, {shares[last]:.0%} among {last}",
    )


def _of(frame: pd.DataFrame, **values: Any) -> pd.DataFrame:
    """Rows in which columns have these values."""
    return frame[(frame[list(values)] == list(values.values())).all(axis=1)]


def _paired(ax: Axes, rows: pd.DataFrame, columns: dict[str, str]) -> None:
    """For each name a pair of stacked bars in %, one for each of two columns, which have names, too."""
    bars = [
        (100 * part.set_index("phase")[column]).rename(name)
        for name, part in rows.groupby("name", sort=False)
        for column in columns
    ]
    pairs = f"of each pair: {', '.join(columns.values())}"
    plots.bars(ax, pd.DataFrame(bars)[list(PHASES)], label="", stacked=True, legend="", pairs=pairs)


def fig07() -> pd.DataFrame:
    """Communication time by phase against the buffer, also over what it takes without, as printed."""
    model = osf_overhead.fig07(osf_scaling.setting())
    phases = osf_overhead.phases(Lab.load(LAB))
    four = phases[phases["workers"] == 4].sort_values("buffer_bytes", kind="stable")
    labs = {"measured": four, "regime": osf_ranges.phases_in_regime()}
    rows = [
        lab.assign(buffer=lab["buffer_bytes"].map(buffer_name), look=mark)
        for mark, lab in labs.items()
    ]
    frame = osf_ranges.graded(model, *rows).reset_index(drop=True)
    case = [frame[name].fillna("") for name in ("grade", "look", "network", "slowest")]
    for column in ("seconds", "model_s", "measured_s"):
        whole = frame[column].where(frame["buffer_bytes"] == 0).groupby(case).transform("sum")
        frame[f"{column.removesuffix('_s')}_over_unfused"] = frame[column] / whole
    printed = (
        (frame["network"] == "VGG16")
        & (frame["buffer_bytes"] == GB)
        & (frame["look"] != "measured")
    )
    grown = 1 + claimed("osf-fig07-vgg16") / 100
    return frame.assign(paper_over_unfused=np.where(printed, grown, np.nan))


@theme()
def draw07(frame: pd.DataFrame) -> Figure:
    """Equal workers, over the time without a buffer: the cluster by model; the lab, model and measured."""
    figure, axes = plots.canvas(columns=2, rows=3, height=7.0, sharey=True)
    frame = frame[frame["slowest"] == 1]
    frame = frame.assign(name=frame["buffer_bytes"].map(buffer_name))
    grown = {}
    for column, network in enumerate(TWO):
        rows = _of(frame, grade="model", network=network)
        values = {"columns": "phase", "values": "seconds_over_unfused"}
        wide = rows.pivot(index="buffer_bytes", **values)[list(PHASES)]
        grown[network] = wide.sum(axis=1).iloc[-1] - 1
        plots.bars(
            axes[0, column],
            100 * wide.set_axis(rows["name"].unique()),
            label="",
            stacked=True,
            legend="",
        )
        plots.heading(axes[0, column], f"{spelled(network)}, cluster (model)")
        drawn = [rows]
        for ax, (mark, place) in zip(axes[1:, column], PLACES.items(), strict=True):
            rows = _of(frame, look=mark, network=network)
            both = {"model_over_unfused": "model", "measured_over_unfused": "lab"}
            _paired(ax, rows, both)
            plots.heading(ax, f"{spelled(network)}, {place}")
            drawn.append(rows)
        for ax, rows in zip(axes[:, column], drawn, strict=True):
            paper = rows["paper_over_unfused"].max()
            if np.isfinite(paper):
                place = ax.get_xticks()[-1]
                plots.points(ax, [place], [100 * paper], "paper", label="paper", size=6)
                _say(ax, place, 100 * paper, f"paper {paper - 1:+.0%}", (0, 11))
    for ax in axes[:, 0]:
        ax.set_ylabel("communication [% of unfused]")
    _legend(figure, axes[0], 5)
    return _titled(
        figure,
        f"A buffer exchanges ALLREDUCE for WAIT: 1 GB changes communication on the cluster by "
        f"{grown['ResNet101']:+.0%} ({spelled('ResNet101')}) and {grown['VGG16']:+.0%} "
        f"({spelled('VGG16')}; paper {frame['paper_over_unfused'].max() - 1:+.0%})",
    )
