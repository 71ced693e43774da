"""osf's figures 3 to 8 as panels: of each the numbers with what the paper prints of them, and the drawing.

A drawing takes nothing but the figure's own numbers, so that its CSV holds all that is drawn; ``paper`` and
names that begin so are columns of printed values. Titles state what the numbers say.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddlkit.core.units import GB, MB
from ddlkit.papers.osf import PHASES, cluster
from ddlkit.papers.osf.cluster import REPLACED, WORKERS
from ddlkit.report import plots
from ddlkit.report.claims import claimed
from ddlkit.report.figures import osf_lab, osf_scaling
from ddlkit.report.figures.osf_lab import BUFFERED, LAB, LABS, Lab
from ddlkit.report.figures.osf_scaling import TWO
from ddlkit.report.plots.style import look, theme
from ddlkit.report.source import REGIMES, REGIMES_VGG
from ddlkit.store import network_title

PLACES = {mark: f"lab, {links}" for mark, links in LABS.items()}
NO_FUSION_MB = 3e-4
"""Where no fusion stands on a logarithmic axis of buffers in MB: left of the smallest."""
EXPENSIVE = ", dear start-ups"
"""Behind a network's name in tables: over links with start-ups as expensive as on the cluster."""


def spelled(name: str) -> str:
    """Return a network of a table as figures spell it."""
    plain = name.removesuffix(EXPENSIVE)
    return network_title(plain) + (", expensive start-ups" if plain != name else "")


def graded(model: pd.DataFrame, *labs: pd.DataFrame) -> pd.DataFrame:
    """Return rows of the model and of the lab, each named by its grade, one below the other."""
    rows = [model.assign(grade="model"), *(lab.assign(grade="lab") for lab in labs)]
    return pd.concat(rows, ignore_index=True)


def buffer_name(size: float) -> str:
    """Return a buffer as a label, decimal as the paper's seem to be, "none" without one.

    >>> buffer_name(25_000_000), buffer_name(0)
    ('25 MB', 'none')
    """
    units = {"GB": 1e9, "MB": 1e6, "KB": 1e3, "B": 1.0}
    return next((f"{size / one:g} {name}" for name, one in units.items() if size >= one), "none")


def _of(frame: pd.DataFrame, **values: Any) -> pd.DataFrame:
    """Rows in which columns have these values."""
    return frame[(frame[list(values)] == list(values.values())).all(axis=1)]


def say(ax: Axes, x: float, y: float, text: str, points: tuple[float, float], **side: str) -> None:
    """Write what a paper prints, in its colour, so many points from its place."""
    words: dict[str, Any] = {"fontsize": 7, "color": look("paper").color, "va": "center"}
    words["bbox"] = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1}
    ax.annotate(text, (x, y), points, textcoords="offset points", **{"ha": "center"} | words | side)


def legend(figure: Figure, axes: Iterable[Axes], columns: int = 4) -> None:
    """Name what stands on any of the axes, once, below all panels: above them stands the title."""
    named: dict[str, Any] = {}
    for ax in axes:
        named |= dict(zip(*ax.get_legend_handles_labels()[::-1], strict=True))
    figure.legend(named.values(), named, loc="outside lower left", ncols=columns)


# -- scaling factors ---------------------------------------------------------------------------------


def printed_errors() -> dict[str, tuple[float, float]]:
    """Return the least and largest error in % that osf states of each formula (Section 3.2)."""
    ends = {name: f"osf-fig03-{name.lower()}" for name in ("CSF", "OSF")}
    return {name: (claimed(f"{one}-min"), claimed(f"{one}-max")) for name, one in ends.items()}


def fig03() -> pd.DataFrame:
    """Return factors without fusion on the cluster and errors in the lab, beside the printed ranges."""
    model = osf_scaling.over(osf_scaling.fig03, ["network", "quantity"], ["model", "error"])
    plain = osf_lab.unfused([Lab.load("campaign"), Lab.load(LAB)])
    regime = osf_lab.unfused([Lab.load(REGIMES)])
    frame = graded(model, plain, regime.assign(network=regime["network"] + EXPENSIVE))
    first = (frame["network"] == "VGG16") & (frame["quantity"] == "simulated")
    frame["paper"] = np.where(first, claimed("osf-fig08-before"), np.nan)
    for name, (low, high) in printed_errors().items():
        rows = frame["quantity"] == ("CSF" if name == "CSF" else "OSF printed")
        frame.loc[rows, ["paper_error_low", "paper_error_high"]] = [low / 100, high / 100]
    return frame


@theme()
def draw03(frame: pd.DataFrame) -> Figure:
    """Draw factors and CSF's errors on the cluster, and both formulas' errors in the lab."""
    figure, axes = plots.canvas(rows=3, height=7.2)
    by_quantity = {name: rows for name, rows in frame.groupby("quantity", sort=False)}
    names, csf = [spelled(name) for name in cluster.FIVE], by_quantity["CSF"]
    factors = {
        name: (by_quantity[name]["model_low"], by_quantity[name]["model_high"])
        for name in ("simulated", "CSF")
    }
    plots.intervals(axes[0], names, factors, label="scaling factor", legend="")
    at = by_quantity["simulated"]["paper"]
    plots.points(axes[0], at, np.arange(len(at)), "paper", size=6)
    ends = ["paper_error_low", "paper_error_high"]
    printed = {
        name: tuple(100 * by_quantity[name][ends].iloc[0]) for name in ("CSF", "OSF printed")
    }
    errors = {"CSF": (100 * csf["error_low"], 100 * csf["error_high"])}
    bands, label = {"CSF": printed["CSF"]}, "CSF's error against the simulated factor [%]"
    plots.intervals(axes[1], names, errors, label=label, printed=bands, legend="")
    lab = frame[frame["grade"] == "lab"]
    order = sorted(dict.fromkeys(lab["network"]), key=lambda n: (EXPENSIVE in n, n[:6], len(n)))
    spread = (100 * lab.groupby("network")[[*printed]].agg(["min", "max"])).loc[order]
    drawn = {name: (spread[name, "min"], spread[name, "max"]) for name in printed}
    cases, label = [spelled(name) for name in order], "error against the measured factor [%]"
    plots.intervals(axes[2], cases, drawn, label=label, printed=printed, legend="")
    for ax, name in ((axes[1], "CSF"), (axes[2], "CSF"), (axes[2], "OSF printed")):
        low, high = printed[name]  # sizes, of either sign
        ax.axvspan(-high, -low, color=look(name).color, alpha=0.16, linewidth=0, zorder=0)
    plots.heading(axes[0], "(a) cluster, all settings that fit")
    plots.heading(axes[1], "(b) CSF there; shaded: size of the errors that the paper prints")
    plots.heading(axes[2], f"(c) lab, {len(lab)} replayed cases")
    legend(figure, axes)
    there = lab["network"].str.endswith(EXPENSIVE)
    dear, cheap = (
        f"{errors.min():+.0%} to {errors.max():+.0%}"
        for errors in (lab.loc[there, "CSF"], lab.loc[~there, "CSF"])
    )
    plots.title(figure, f"CSF errs by {dear} with expensive start-ups, {cheap} with cheap ones")
    return figure


def fig04() -> pd.DataFrame:
    """Return factors against the buffer, beside the largest errors that the text prints of ResNet-101."""
    model = osf_scaling.over(osf_scaling.fig04, [*BUFFERED, "quantity"])
    frame = graded(model, osf_lab.fused_in_labs())
    for name, claim in (("CSF", "osf-fig04a-csf"), ("OSF printed", "osf-fig04a-osf")):
        rows = (frame["network"] == "ResNet101") & (frame["quantity"] == name)
        frame.loc[rows, "paper_error"] = claimed(claim) / 100
    known = frame["paper_error"].where(frame["quantity"] == "CSF")
    return frame.assign(
        paper_low=frame["model"] / (1 + known), paper_high=frame["model"] / (1 - known)
    )


@theme()
def draw04(frame: pd.DataFrame, formulas: Sequence[str]) -> Figure:
    """Draw simulated with its range, the formulas, measured; what the printed error leaves around CSF."""
    shown = ["simulated", *formulas]
    figure, axes = plots.canvas(columns=2, height=3.3, sharey=True)
    gains = {}
    for ax, (network, rows) in zip(axes, frame.groupby("network", sort=False), strict=False):
        model = rows[rows["grade"] == "model"]
        wide = model.assign(mb=model["buffer_bytes"] / MB).pivot(index="mb", columns="quantity")
        gains[network] = wide["model"].max() / wide["model"].iloc[0] - 1
        if wide["paper_low"].notna().any(axis=None):
            label = f"paper: SF off CSF by {model['paper_error'].max():.1%} at most"
            low, high = (wide[f"paper_{end}"]["CSF"] for end in ("low", "high"))
            plots.ribbon(ax, wide.index, low, high, "paper", ["paper"], label=label)
        low, high = (wide[f"model_{end}"]["simulated"] for end in ("low", "high"))
        plots.ribbon(ax, wide.index, low, high, "simulated", shown, label="simulated, all that fit")
        plots.lines(ax, wide["model"][shown], xlabel="buffer [MB]", ylabel="", log="x", legend="")
        _marked(ax, rows[rows["buffer_bytes"] > 0])
        plots.heading(ax, spelled(network))
        ax.set_ylim(0, 1.05)
    axes[0].set_ylabel("scaling factor")
    legend(figure, axes)
    simulated, printed = (gains["ResNet101"][name] for name in ("simulated", "OSF printed"))
    found = f"the best buffer gains {simulated:.0%} as simulated, {printed:.0%} by the printed"
    plots.title(figure, f"{spelled('ResNet101')}: {found} equations")
    return figure


def _in_mb(buffer_bytes: pd.Series) -> pd.Series:
    return (buffer_bytes / MB).where(buffer_bytes > 0, NO_FUSION_MB)


def _marked(ax: Axes, rows: pd.DataFrame) -> None:
    """What was measured over each of the lab's links."""
    for mark, label in LABS.items():
        at = rows[rows["look"] == mark]
        x, name = _in_mb(at["buffer_bytes"]), f"measured, {label}"
        plots.points(ax, x, at["measured"], mark, label=name, size=7)


def fig06() -> pd.DataFrame:
    """Return messages and factor against the buffer, where a message is a tensor, and 1 GB as printed.

    ``paper``: what the printed gain or loss at 1 GB makes of the factor without fusion here.
    """
    model = osf_scaling.over(osf_scaling.fig06, [*BUFFERED, "quantity"], unit="tensor")
    change = {
        "ResNet101": claimed("osf-fig06-resnet101") / 100,
        "VGG16": -claimed("osf-fig06-vgg16") / 100,
    }
    unfused = _of(model, quantity="SF", buffer_bytes=0).set_index("network")["model"]
    at_1gb = (model["quantity"] == "SF") & (model["buffer_bytes"] == GB)
    expected = model["network"].map(unfused * (1 + pd.Series(change)))
    frame = graded(model.assign(paper=expected.where(at_1gb)), osf_lab.fused_in_labs())
    return frame.assign(paper_change=frame["network"].map(change).where(frame["paper"].notna()))


def changes(frame: pd.DataFrame, network: str) -> dict[str, float]:
    """Return what 1 GB changes over no buffer: of figure 6 by model, paper, and measured by link."""
    mine = frame[(frame["network"] == network) & (frame["quantity"] != "all-reduces")]
    changed = {}
    for name, rows in mine.groupby(mine["look"].fillna("model"), sort=False):
        value = rows.set_index("buffer_bytes")["model" if name == "model" else "measured"]
        if {0, GB} <= set(value.index):
            changed[str(name)] = float(value[GB] / value[0] - 1)
    return changed | {"paper": float(mine["paper_change"].max(skipna=True))}


@theme()
def draw06(frame: pd.DataFrame) -> Figure:
    """Draw the messages above, below the factor: model with its range, measured, the printed change."""
    figure, axes = plots.canvas(columns=2, rows=2, height=4.8, sharex=True)
    for (top, bottom), network in zip(axes.T, TWO, strict=True):
        mine = frame[frame["network"] == network]
        rows = mine[mine["grade"] == "model"]
        rows = rows.assign(place=_in_mb(rows["buffer_bytes"]))
        rows = rows.pivot(index="place", columns="quantity")
        counts, factor = rows["model"][["all-reduces"]], rows.xs("SF", axis=1, level="quantity")
        plots.lines(top, counts, xlabel="", ylabel="all-reduces", log="xy", legend="")
        ends = factor["model_low"], factor["model_high"]
        label = "model, settings that fit"
        plots.ribbon(bottom, factor.index, *ends, "model", ["model"], label=label)
        words = {"xlabel": "buffer [MB]", "ylabel": "scaling factor"}
        plots.lines(bottom, factor[["model"]], **words, log="x", legend="")
        label = "paper: change at 1 GB"
        plots.points(bottom, factor.index, factor["paper"], "paper", label=label, size=7)
        end = factor.dropna(subset="paper").iloc[-1]
        said = f"paper {end['paper_change']:+.0%}"
        say(bottom, GB / MB, end["paper"], said, (6, -10), ha="right")
        _marked(bottom, mine)
        bottom.margins(y=0.18)
        names = ["none", "0.01", "1", "100", "1000"]
        bottom.set_xticks([NO_FUSION_MB, 0.01, 1, 100, 1000], names)
        plots.heading(top, spelled(network))
    legend(figure, axes[1])
    gained = {name: f"{change:+.0%}" for name, change in changes(frame, "ResNet101").items()}
    plots.title(
        figure,
        f"1 GB against no buffer, {spelled('ResNet101')}: {gained['model']} by model, measured "
        f"{gained['regime']} with expensive start-ups and {gained['measured']} with cheap ones, "
        f"paper {gained['paper']}",
    )
    return figure


def fig08() -> pd.DataFrame:
    """Return factors of VGG-16 as published and replaced, beside what two places of the text print."""
    model = osf_scaling.fig08(osf_scaling.setting())
    labs = zip(LABS, (LAB, REGIMES_VGG), strict=True)
    rows = [osf_lab.replaced(Lab.load(name)).assign(look=mark) for mark, name in labs]
    frame = graded(model, *rows)
    replaced = (frame["network"] == REPLACED) & frame["paper"].notna()
    return frame.assign(paper_section_1=np.where(replaced, claimed("osf-fig08-intro"), np.nan))


@theme()
def draw08(frame: pd.DataFrame) -> Figure:
    """Draw factors by workers: the cluster by model, and the lab over both links, measured and by model."""
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
            for column, section, size in (("paper", "4.1", 7), ("paper_section_1", "1", 4)):
                label = f"paper, Section {section}"
                plots.points(ax, at["workers"], at[column], "paper", label=label, size=size)
                for x, y in at.dropna(subset=column)[["workers", column]].itertuples(index=False):
                    say(ax, x, y, f"{y:g}", (0, -10 if y > 0.5 and column == "paper" else 10))
        else:
            plots.points(ax, at["workers"], at["measured"], "measured", size=8)
        ax.set_xticks(wide.index, wide.index)
        ax.set_ylim(0, 1.05)
        plots.heading(ax, name)
    axes[0].set_ylabel("scaling factor")
    legend(figure, axes)
    end = frame[(frame["network"] == REPLACED) & frame["paper"].notna()].set_index("quantity")
    ours = f"{end['model']['OSF']:.2f} with overlap, {end['model']['CSF']:.2f} by CSF"
    paper = f"paper {end['paper'].iloc[0]:g} and {end['paper_section_1'].iloc[0]:g}"
    plots.title(figure, f"{spelled(REPLACED)}, {WORKERS} workers: {ours}; {paper}")
    return figure


# -- where time goes ---------------------------------------------------------------------------------


def _stacks(ax: Axes, rows: pd.DataFrame, column: str, by: str, paper: str, printed: str) -> None:
    """Bars of the cluster's phases in %, and what the paper prints of some, with a sign of ``printed``."""
    wide = rows.pivot(index=by, columns="phase", values=column)[list(PHASES)]
    names = wide.index if by == "workers" else wide.index.map(buffer_name)
    plots.bars(ax, 100 * wide.set_axis(names), label="", stacked=True, legend="")
    stated = rows.dropna(subset=paper).drop_duplicates(by)
    for key, value in stated[[by, paper]].itertuples(index=False):
        place = list(wide.index).index(key)
        plots.points(ax, [place], [100 * value], "paper", label="paper", size=6)
        change = value - 1 if "+" in printed else value
        say(ax, place, 100 * value, f"paper {change:{printed}}", (0, -11))


def _paired(ax: Axes, rows: pd.DataFrame, columns: dict[str, str]) -> None:
    """For each name a pair of stacked bars in %, one for each of two columns, which have names, too."""
    bars = [
        (100 * part.set_index("phase")[column]).rename(name)
        for name, part in rows.groupby("name", sort=False)
        for column in columns
    ]
    pairs = f"of each pair: {', '.join(columns.values())}"
    plots.bars(ax, pd.DataFrame(bars)[list(PHASES)], label="", stacked=True, legend="", pairs=pairs)


def fig05(slow_rank: float) -> pd.DataFrame:
    """Return communication time by phase and workers: the cluster by model, the printed share, the lab."""
    model = osf_scaling.fig05(osf_scaling.setting(), slow_rank=slow_rank)
    phases = osf_lab.phases(Lab.load(LAB))
    return graded(model, phases[phases["buffer_bytes"] == 0])


@theme()
def draw05(frame: pd.DataFrame) -> Figure:
    """Draw shares: the cluster with equal workers and with a slower one, and the lab beside its model."""
    figure, axes = plots.canvas(columns=2, rows=3, height=7.0, sharey=True)
    model = frame[frame["grade"] == "model"]
    slow = model["slowest"].max()
    for column, network in enumerate(TWO):
        for ax, slowest in zip(axes[:, column], (1.0, slow), strict=False):
            rows = _of(model, network=network, slowest=slowest)
            _stacks(ax, rows, "model", "workers", "paper", ".0%")
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
    legend(figure, axes[0])
    shares = _of(model, network="ResNet101", slowest=slow, phase="NEGOTIATE")
    first, *_, last = shares.set_index("workers")["model"].items()
    plots.title(
        figure,
        f"One worker takes {slow:g} times as long: NEGOTIATE is {first[1]:.0%} of "
        f"{spelled('ResNet101')}'s communication among {first[0]}, {last[1]:.0%} among {last[0]} (model)",
    )
    return figure


def fig07() -> pd.DataFrame:
    """Return communication time by phase and buffer, also over what it takes without, as printed."""
    model = osf_scaling.fig07(osf_scaling.setting())
    phases = osf_lab.phases(Lab.load(LAB))
    four = phases[phases["workers"] == 4].sort_values("buffer_bytes", kind="stable")
    labs = {"measured": four, "regime": osf_lab.phases_in_regime()}
    rows = [
        lab.assign(buffer=lab["buffer_bytes"].map(buffer_name), look=mark)
        for mark, lab in labs.items()
    ]
    frame = graded(model, *rows)
    case = [frame[name].fillna("") for name in ("grade", "look", "network", "slowest")]
    for column in ("seconds", "model_s", "measured_s"):
        whole = frame[column].where(frame["buffer_bytes"] == 0).groupby(case).transform("sum")
        frame[f"{column.removesuffix('_s')}_over_unfused"] = frame[column] / whole
    at_1gb = (frame["network"] == "VGG16") & (frame["buffer_bytes"] == GB)
    grown = 1 + claimed("osf-fig07-vgg16") / 100
    stated = at_1gb & (frame["look"] != "measured")
    return frame.assign(paper_over_unfused=np.where(stated, grown, np.nan))


@theme()
def draw07(frame: pd.DataFrame) -> Figure:
    """Draw equal workers over the time without a buffer: the cluster by model; the lab, also measured."""
    figure, axes = plots.canvas(columns=2, rows=3, height=7.0, sharey=True)
    frame = frame[frame["slowest"] == 1]
    frame = frame.assign(name=frame["buffer_bytes"].map(buffer_name))
    grown = {}
    for column, network in enumerate(TWO):
        rows = _of(frame, grade="model", network=network)
        whole = rows.groupby("buffer_bytes")["seconds_over_unfused"].sum()
        grown[network] = f"{whole.iloc[-1] - 1:+.0%} ({spelled(network)}"
        paper = "paper_over_unfused"
        top = axes[0, column]
        _stacks(top, rows, "seconds_over_unfused", "buffer_bytes", paper, "+.0%")
        plots.heading(top, f"{spelled(network)}, cluster (model)")
        for ax, (mark, place) in zip(axes[1:, column], PLACES.items(), strict=True):
            rows = _of(frame, look=mark, network=network)
            _paired(ax, rows, {"model_over_unfused": "model", "measured_over_unfused": "lab"})
            plots.heading(ax, f"{spelled(network)}, {place}")
            if rows[paper].notna().any():
                plots.points(ax, [ax.get_xticks()[-1]], [100 * rows[paper].max()], "paper", size=6)
    for ax in axes[:, 0]:
        ax.set_ylabel("communication [% of unfused]")
    legend(figure, axes[0])
    plots.title(
        figure,
        f"A buffer exchanges ALLREDUCE for WAIT: 1 GB changes communication on the cluster by "
        f"{grown['ResNet101']}) and {grown['VGG16']}; paper {frame[paper].max() - 1:+.0%})",
    )
    return figure
