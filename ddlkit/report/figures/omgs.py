"""omgs's figures 1 and 4, its settings by model, its algorithms as measured, and when sparse gradients pay.

Costs are those of the authors' published code; layer times are scanned (`ddlkit.papers.omgs.cluster`). A
setting is *compatible* with a printed time when it is within TOLERANCE of it, with a count when it is equal.

The lab computes as the nearest such setting does, and so much longer as its shortest sparse message is above
the start-up that it stands for: its times over that stretch are those of the paper's cluster, with layers and
selections as this machine has them. Sixteen ranks share two cores here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ddlkit import store
from ddlkit.core.case import Case
from ddlkit.core.cost import AlphaBeta
from ddlkit.core.iteration import Iteration
from ddlkit.core.plan import exact, none, proven
from ddlkit.core.sparse import ELEMENT_BYTES, SparseGather, sparse_timeline
from ddlkit.core.timeline import Timeline
from ddlkit.core.workload import Workload
from ddlkit.model import make_plan
from ddlkit.model.calibration import Calibration
from ddlkit.model.predictor import OURS, computed
from ddlkit.papers import audit, osf
from ddlkit.papers.omgs.cluster import (
    PARTS,
    PLANS,
    Setting,
    most_saved_s,
    planned,
    published_cost,
    published_gather,
    scan,
)
from ddlkit.papers.osf import cluster as osf_cluster
from ddlkit.report import accuracy, plots, source
from ddlkit.report.claims import paper_table, prose
from ddlkit.report.source import Source

TOLERANCE = 0.05
TIMES = ("topk_s", "mgs_s", "omgs_s")
OTHERS = TIMES[:2]
WORKERS = audit.WORKERS
NETWORKS = {
    "vgg16_cifar": "VGG-16",
    "resnet50": "ResNet-50",
    "inception_v4": "Inception-v4",
    "lstm_ptb": "LSTM-PTB",
}
"""Network as recorded -> as the paper calls it."""
DENSE = "dense, exact"
PLAYED = (*PARTS, "update")
KINDS = ("forward", "backward", "sparsify", "all_gather", "update")
"""Spans that look like PLAYED in a figure."""
SHOWN = ("TopK", "MGS", "OMGS", "exact")
"""Algorithms of figure 4 that are drawn: LAGS-SGD takes several times as long; the paper leaves it out."""
RATIOS = {"s1": ", TopK", "s2": ", MGS", "less_exposed": ""}
"""What `fig04` has of OMGS-SGD beside its times, and what stands behind a network's name there."""


def fig01() -> dict[str, Timeline]:
    """Return dense and sparse algorithms on four layers, in ready order: 16 workers, published costs.

    Dense gradients take a ring over a link four times as fast as the paper's, else the first timeline
    would be several times as long as the others.
    """
    sizes = ELEMENT_BYTES * np.array((4_000_000, 4_000_000, 500_000, 500_000))
    workload = Workload.from_arrays(0.03, [0.015] * 4, sizes)
    gather = published_gather(WORKERS)
    dense = AlphaBeta(gather.alpha_s, float(osf.update_s(1.0, WORKERS, 5e8)), workers=WORKERS)
    cost = SparseGather(gather, audit.DENSITY, selecting=audit.SELECTIONS["log"])
    specs = {"TopK-SGD": "single", "LAGS-SGD": "none", "OMGS-SGD": "omgs", "merged best": "exact"}
    plans = {name: make_plan(spec, workload, cost) for name, spec in specs.items()}
    return {
        "P-SGD": Iteration(workload, none(workload), dense).timeline(),
        **{name: sparse_timeline(workload, plan, cost) for name, plan in plans.items()},
    }


def draw_fig01(timelines: Mapping[str, Timeline]) -> Figure:
    """Draw the timelines of `fig01` below each other; titles say how much longer they are than TopK-SGD."""
    whole_s = timelines["TopK-SGD"].duration_s
    named = {
        f"{name}{' on a link 4 times as fast' * (name == 'P-SGD')}: "
        f"{line.duration_s / whole_s - 1:+.0%}": line
        for name, line in timelines.items()
    }
    figure, axes = plots.canvas(rows=len(named), height=6.4)
    plots.gantt(axes, named)
    return figure


# -- settings that the paper leaves open ---------------------------------------------------------


@cache
def printed() -> pd.DataFrame:
    """Return by network: times, ratios and messages of omgs Tabs V and VI, and the density of Tab IV."""
    frame = paper_table("omgs", "tab06").set_index("model")
    frame["messages"] = paper_table("omgs", "tab05").set_index("model")["omgs"]
    return frame.assign(density=paper_table("omgs", "tab04")["density"].to_numpy())


def cost_of(network: str) -> SparseGather:
    """Return the cost of 16 workers' messages on 1 Gbit/s, as published, at the network's density."""
    return published_cost(WORKERS, printed().loc[network, "density"])


@cache
def scanned(network: str) -> pd.DataFrame:
    """Return every setting of a network under both rules (`cluster.scan`)."""
    return pd.DataFrame(scan(network, printed().loc[network, "topk_s"], cost_of(network)))


def compatible(network: str, with_: Sequence[str] = TIMES) -> pd.DataFrame:
    """Return settings that agree with as many of these statements as any does, the nearest first."""
    frame, stated = scanned(network), printed().loc[network]
    agree = sum((frame[name] / stated[name] - 1).abs() <= TOLERANCE for name in with_)
    far = sum(np.log(frame[name] / stated[name]).abs() for name in TIMES)
    most = agree == agree.max()
    return frame[most].assign(agree=agree[most], far=far[most]).sort_values("far", kind="stable")


def savings() -> pd.DataFrame:
    """Return by network what OMGS-SGD saves of TopK-SGD's iteration.

    saved_s : as printed; most_saved_s : the most that any layer times allow at the published costs, with as
    many messages as printed; most_speedup : s1 with that saved
    """
    rows = {}
    for network, stated in printed().iterrows():
        cost, units = cost_of(str(network)), scanned(str(network))["units"].unique()
        bound = partial(most_saved_s, str(network), cost, int(stated["messages"]))
        most_s, topk_s = max(bound(each) for each in units), stated["topk_s"]
        speedup = topk_s / (topk_s - most_s) if topk_s > most_s else math.inf
        rows[network] = (topk_s - stated["omgs_s"], most_s, speedup)
    columns = ["saved_s", "most_saved_s", "most_speedup"]
    return pd.DataFrame.from_dict(rows, orient="index", columns=columns)


def setting(network: str) -> Setting:
    """Return the compatible setting that is nearest to the printed times."""
    best = compatible(network).iloc[0]
    numbers = {name: float(best[name]) for name in ("compute_s", "backward", "even")}
    return Setting(network, **numbers, units=int(best["units"]))


@cache
def modelled() -> pd.DataFrame:
    """Return seconds of PARTS by algorithm at `setting`, and what the paper prints of whole iterations.

    Columns: network, algorithm, messages, PARTS, iteration, paper. OMGS by both rules.
    """
    rows = []
    for network, stated in printed().iterrows():
        chosen, cost = setting(str(network)), cost_of(str(network))
        for algorithm in ("TopK", "LAGS", "MGS", "OMGS", "OMGS code", "exact"):
            parts = planned(chosen, {**PLANS, "OMGS code": "omgs:code"}[algorithm], cost)
            paper_s = stated.get(f"{algorithm.split()[0].lower()}_s", np.nan)
            rows.append({"network": network, "algorithm": algorithm, **parts, "paper": paper_s})
    frame = pd.DataFrame(rows).astype({"messages": int})
    return frame[["network", "algorithm", "messages", *PARTS, "iteration", "paper"]]


# -- replayed in the lab -------------------------------------------------------------------------


def replayed(campaign: Source) -> pd.DataFrame:
    """Return every algorithm on every network and link, in seconds of the paper's cluster.

    Columns: network, algorithm, link, startup_s, messages, PLAYED, iteration; predicted (before it was
    played); repeatability (relative), processor_limited. Where two algorithms find one plan, it was
    replayed once and stands twice.
    """
    planning = campaign.table("collectives")  # of the first session, by which it was planned
    costs = Calibration.of(planning[planning["session"] == 0], draws=0)
    groups = accuracy.joined(campaign).groupby(["network", "link"], sort=False)
    frame = pd.concat([_of_lab(played, campaign, costs) for _, played in groups])
    columns = ["network", "algorithm", "link", "startup_s", "messages", *PLAYED, "iteration"]
    order = {name: place for place, name in enumerate([*NETWORKS.values(), *PLANS, DENSE])}
    return frame[[*columns, "predicted", "repeatability", "processor_limited"]].sort_values(
        ["startup_s", "network", "algorithm"],
        key=lambda column: -column if column.name == "startup_s" else column.map(order),
        ignore_index=True,
    )


def _of_lab(played: pd.DataFrame, campaign: Source, costs: Calibration) -> pd.DataFrame:
    """Rows of `replayed` of one network and link: those of a plan stand under each of its algorithms.

    What found the plan of another was not played: it is planned again, as before they were played.
    """
    row = played[played["density"] < 1].iloc[0]
    case, network = Case.from_row(row), NETWORKS[row["network"]]
    workload = campaign.workloads()[case.profile_sha256].scaled(case.dilation)
    stretch = workload.compute_s / setting(network).compute_s
    gather, times = costs.of_case(case).cost, campaign.selections()[case.selection_sha256]
    assert isinstance(gather, SparseGather)
    cost = SparseGather(
        gather.gather, case.density, selecting=lambda n, rho: case.dilation * times(n, rho)
    )
    # Two digits: a start-up as a campaign asks for it, less the rounding of a dilation.
    startup_s = float(f"{gather.startup_s() / stretch:.2g}")
    whole = _parts(played, campaign, stretch).assign(network=network, startup_s=startup_s)
    sparse = whole[whole["density"] < 1]
    named = [whole[whole["density"] == 1].assign(algorithm=DENSE)]
    for algorithm, spec in PLANS.items():
        rows = sparse[sparse["plan"] == spec]
        if rows.empty:
            ends = ";".join(map(str, make_plan(spec, workload, cost).ends))
            rows = sparse[sparse["ends"] == ends]
        named.append(rows.assign(algorithm=algorithm))
    return pd.concat(named)


def _parts(played: pd.DataFrame, campaign: Source, stretch: float) -> pd.DataFrame:
    """PLAYED, iteration, and what was predicted of it, one row per case, over the lab's stretch.

    Computing was waited out, selections too: what was measured of it is what was exposed.
    """
    known, times = campaign.workloads(), campaign.selections()
    rows = []
    for row in played.to_dict("records"):
        case = Case.from_row(row)
        plain = known[case.profile_sha256].scaled(case.dilation)
        backward_s = float(plain.backward_s.sum())
        seconds = {
            "forward": plain.forward_s,
            "backward": backward_s,
            "selection": float(computed(case, known, times).backward_s.sum() - backward_s),
            "exposed": row["measured_exposed_communication_s"],
            "update": plain.update_s,
            "iteration": row["measured_iteration_s"],
            "predicted": row[f"{OURS}_iteration_s"],
        }
        messages = len(case.ends.split(";"))
        rows.append({**row, "messages": messages, **{k: s / stretch for k, s in seconds.items()}})
    return pd.DataFrame(rows)


def speedups(frame: pd.DataFrame) -> pd.DataFrame:
    """Return omgs Tab VI's ratios as measured: one row per start-up and network.

    s1, s2: OMGS over TopK and MGS; best: exact merging over TopK; fastest: of TopK, MGS and OMGS;
    resolved: how much a time's repeats differ, at most (relative); limited: whether the processor may have
    slowed one of the three.
    """
    place, three = ["startup_s", "network"], ["TopK", "MGS", "OMGS"]
    wide = frame.pivot(index=place, columns="algorithm")
    took = wide["iteration"]
    columns = {
        "s1": took["TopK"] / took["OMGS"],
        "s2": took["MGS"] / took["OMGS"],
        "best": took["TopK"] / took["exact"],
        "fastest": took[three].idxmin(axis=1),
        "messages": wide["messages", "OMGS"].astype(int),
        "resolved": wide["repeatability"][three].max(axis=1),
        "limited": wide["processor_limited"][three].any(axis=1),
    }
    order = pd.MultiIndex.from_frame(frame[place].drop_duplicates())
    return pd.DataFrame(columns).reindex(order).reset_index()


@cache
def at_papers_startup() -> pd.DataFrame:
    """Return `speedups` at the longest start-up of the recorded campaign, the paper's; by network."""
    frame = speedups(replayed(source.open_campaign(name=source.OMGS).alone))
    return frame[frame["startup_s"] == frame["startup_s"].max()].set_index("network")


def fig04(frame: pd.DataFrame) -> pd.DataFrame:
    """Return omgs Fig 4: PLAYED by model at the paper's costs, and as `replayed` at its start-up.

    Columns: where, network, algorithm, messages, PLAYED, iteration, paper (of whole iterations, Tab VI). The
    model leaves the update out, as the paper does.
    """
    model = modelled().assign(where="model", update=0.0)
    lab = frame[frame["startup_s"] == frame["startup_s"].max()].assign(where="lab")
    stated = model.set_index(["network", "algorithm"])["paper"]
    target = pd.MultiIndex.from_frame(lab[["network", "algorithm"]])
    lab = lab.assign(paper=stated.reindex(target).to_numpy())
    both = pd.concat([model, lab[model.columns]], ignore_index=True)
    return both.join(_ratios(both), on=["where", "network", "algorithm"])


def _ratios(frame: pd.DataFrame) -> pd.DataFrame:
    """RATIOS of OMGS-SGD by where, network and algorithm, and as omgs Tab VI and Section V-E print them.

    less_exposed : exposed communication of TopK-SGD over its own. Printed is how much shorter it is "about",
        and "very close", here 1, of VGG-16.
    """
    wide = frame.pivot(index=["where", "network"], columns="algorithm")
    ours = {
        "s1": wide["iteration", "TopK"] / wide["iteration", "OMGS"],
        "s2": wide["iteration", "MGS"] / wide["iteration", "OMGS"],
        "less_exposed": wide["exposed", "TopK"] / wide["exposed", "OMGS"],
    }
    networks, deep = wide.index.get_level_values("network"), prose("omgs")["fig04-deep"]
    stated = printed()[["s1", "s2"]].reindex(networks).set_axis(wide.index)
    exposed = {"VGG-16": 1.0, "ResNet-50": deep, "Inception-v4": deep}
    exposed["LSTM-PTB"] = 1 / (1 - prose("omgs")["fig04-lstm"] / 100)
    stated["less_exposed"] = networks.map(exposed)
    both = pd.DataFrame(ours).join(stated.add_suffix("_paper"))
    return both.assign(algorithm="OMGS").set_index("algorithm", append=True)


def draw_fig04(frame: pd.DataFrame) -> Figure:
    """Draw omgs Fig 4 of `fig04`: parts of iterations, and ratios of OMGS-SGD, beside what is printed."""
    figure, axes = plots.canvas(columns=2, rows=3, height=8.6)
    networks = [str(name) for name in frame["network"].unique()]
    places = pd.MultiIndex.from_product([SHOWN, ("model", "lab")], names=["algorithm", "where"])
    pairs = "left: model, right: replayed"
    for ax, network in zip(axes.flat, networks, strict=False):
        rows = frame[frame["network"] == network].set_index(["algorithm", "where"]).reindex(places)
        parts = rows[list(PLAYED)].set_axis(KINDS, axis=1).droplevel("where")
        plots.bars(ax, parts, stacked=True, label="iteration [s]", pairs=pairs, legend="")
        paper_s = rows["paper"].to_numpy()[::2]
        plots.points(ax, 2 * np.arange(len(SHOWN)) + 0.5, paper_s, "paper", size=6)
        gain, stated = (rows.loc[("OMGS", "lab"), name] - 1 for name in ("s1", "s1_paper"))
        plots.heading(ax, f"{network}: gain {gain:.0%}, printed {stated:.0%}")
    ours = frame[frame["algorithm"] == "OMGS"].set_index(["network", "where"])
    ratios = ours[[name + end for name in RATIOS for end in ("", "_paper")]].unstack()
    labels = "iteration over OMGS-SGD's", "exposed communication, TopK / OMGS"
    for ax, names, label in zip(axes[2], (["s1", "s2"], ["less_exposed"]), labels, strict=True):
        cases = [f"{network}{RATIOS[name]}" for name in names for network in networks]
        roles = {"paper": ("_paper", "model"), "model": ("", "model"), "replayed": ("", "lab")}
        values = {
            role: np.concatenate([ratios[name + end, where][networks] for name in names])
            for role, (end, where) in roles.items()
        }
        dots = {role: (each, each) for role, each in values.items()}
        plots.intervals(ax, cases, dots, label=label, reference=1.0, legend="")
        off = np.nanmedian(np.abs(values["replayed"] / values["paper"] - 1))
        plots.heading(ax, f"Median {off:.0%} off the paper")
    plots.shared_legend(figure, axes[0, 0], axes[2, 0])
    return figure


# -- really trained ------------------------------------------------------------------------------


def trained(rows: pd.DataFrame) -> pd.DataFrame:
    """Return iterations of real sparsified training: medians over iterations, of the mean over ranks.

    rows : table ``sparse_training``. Networks of many tensors come first.

    Columns: network, ranks, algorithm, messages, PLAYED (update: adding up what came, and the step),
    iteration, least and most of its rounds' medians, rounds, and in how many of them it was the fastest.
    """
    rows = rows.assign(
        algorithm=rows["plan"].map({spec: name for name, spec in PLANS.items()}),
        update_s=rows["update_s"] + rows["scatter_s"],
    )
    keys = ["network", "ranks", "algorithm", "messages"]
    names = {f"{part}_s": part for part in (*PARTS[:3], "update", "iteration")}
    names["exposed_communication_s"] = "exposed"
    of_ranks = rows.groupby([*keys, "repeat", "iteration"], sort=False)
    means = of_ranks[[*names]].mean().rename(columns=names)
    rounds = means.groupby([*keys, "repeat"], sort=False)["iteration"].median()
    ends = rounds.groupby(level=keys, sort=False).agg(least="min", most="max", rounds="size")
    first = rounds == rounds.groupby(level=["network", "ranks", "repeat"]).transform("min")
    ends["fastest"] = first.groupby(level=keys, sort=False).sum()
    medians = means.groupby(keys, sort=False)[[*PLAYED, "iteration"]].median()
    frame = medians.join(ends).reset_index()
    frame["place"] = frame["algorithm"].map({name: place for place, name in enumerate(PLANS)})
    frame["tensors"] = frame.groupby("network")["messages"].transform("max")
    order, upwards = ["ranks", "tensors", "network", "place"], [True, False, True, True]
    frame = frame.sort_values(order, ascending=upwards, ignore_index=True)
    return frame.drop(columns=["place", "tensors"])


def draw_training(frame: pd.DataFrame) -> Figure:
    """Draw parts of real iterations of `trained`, a panel a network; titles: LAGS over the fastest plan."""
    ranks, late = sorted(frame["ranks"].unique()), behind(frame)
    places = pd.MultiIndex.from_product([PLANS, ranks], names=["algorithm", "ranks"])
    pairs = f"{ranks[0]} and {ranks[1]} ranks" if len(ranks) == 2 else ""
    figure, axes = plots.canvas(columns=2, rows=-(-frame["network"].nunique() // 2), height=6.0)
    for ax, (network, rows) in zip(axes.flat, frame.groupby("network", sort=False), strict=False):
        rows = rows.set_index(["algorithm", "ranks"]).reindex(places)
        parts = rows[list(PLAYED)].set_axis(KINDS, axis=1).droplevel("ranks")
        spread = ("shortest to longest round", rows["least"], rows["most"])
        how: dict[str, Any] = {"label": "iteration [s]", "pairs": pairs, "spread": spread}
        plots.bars(ax, parts, stacked=True, legend="", **how)
        shares = " and ".join(f"{late[network, n]:+.0%}" for n in ranks if (network, n) in late)
        plots.heading(ax, f"{store.network_title(str(network))}: LAGS {shares}")
    plots.shared_legend(figure)
    return figure


def behind(frame: pd.DataFrame) -> pd.Series:
    """Return by network and ranks of `trained` how much longer LAGS takes than the fastest plan, relative."""
    wide = frame.pivot(index=["network", "ranks"], columns="algorithm", values="iteration")
    return (wide["LAGS"] / wide.min(axis=1) - 1).dropna()


def decided(frame: pd.DataFrame) -> dict[tuple[str, int], str]:
    """Return by network and ranks the plan whose slowest round is faster than any round of another."""
    fastest = {}
    for (network, ranks), rows in frame.groupby(["network", "ranks"]):
        best, *others = rows.sort_values("iteration").to_dict("records")
        if best["most"] < min(other["least"] for other in others):
            fastest[str(network), int(ranks)] = best["algorithm"]
    return fastest


# -- sparse against dense ------------------------------------------------------------------------


def against_dense(bits_per_s: float) -> dict[str, float]:
    """Return seconds of an iteration of the paper's ResNet-50, each in its best fusion, on such a link.

    "dense", and sparse by how selecting goes: "log" or "scan". The dense all-reduce is a ring of WORKERS, so
    is each of the two all-gathers; steps start alike, as the paper's do.
    """
    workload = osf_cluster.workload("ResNet50", prose("omgs")["resnet50-computing"])
    start_s = published_gather(WORKERS).alpha_s
    per_byte = 8 * (WORKERS - 1) / WORKERS / bits_per_s
    dense = AlphaBeta(2 * start_s, 2 * per_byte, workers=WORKERS)
    gather = AlphaBeta(start_s, per_byte, collective="all_gather", workers=WORKERS)
    seconds = {"dense": audit.iteration_s(workload, exact(workload, dense), dense)}
    for selection in ("log", "scan"):
        how = audit.SELECTIONS[selection]
        sparse = SparseGather(gather, audit.DENSITY, selecting=how)
        seconds[selection] = proven(workload, sparse)[1]
    return seconds
