"""dag's figures: its graph, its clusters in all settings that fit what it states, the lab, real training.

Fixed before any training on pictures was recorded: parts are medians; a prediction is the time between
updates in the middle of the schedule; a case's error is that over the median measured iteration, less 1; the
mean of their absolute values, as dag V-D has it, should be no larger than the largest that dag prints, MOST.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache, partial
from itertools import product
from operator import mul
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddlkit import store
from ddlkit.core.case import Case
from ddlkit.core.errors import UserError
from ddlkit.core.fit import fit
from ddlkit.core.link import ranks_per_node, read_link
from ddlkit.core.timeline import KINDS
from ddlkit.core.workload import Floats
from workbook import plots
from workbook.common import places
from workbook.common.claims import claimed, load_claims
from workbook.common.settings import SettingSearch, Stated, settle
from workbook.dag.cluster import (
    BATCH,
    CLUSTERS,
    DECODERS,
    MACHINES,
    NETWORKS,
    PER_MACHINE,
    SMALL_BATCHES,
    Grid,
    Setting,
    bars,
    quantities,
)
from workbook.dag.equations import STRATEGIES, IterationTimes, Strategy, speedup
from workbook.dag.graph import Gpus, Schedule, period_s, s_sgd, schedule
from workbook.osf.lab import Lab
from workbook.plots.style import INK, SOFT

MOST = 0.094  # AlexNet's mean error in dag V-D
ENDS, ITERATIONS = 5, 20
CASE = ["network", "batch", "ranks", "link", "stored", "ahead", "sends"]
MODEL = ["model", "model_low", "model_high"]
STATEMENTS = {
    "K80 server: good, but AlexNet decoded": "dag-fig02-good",
    "K80 server: decoding spoils AlexNet": "dag-fig02-decoding",
    "one server: K80 scales better": "dag-fig02-k80-over-v100",
    "one server: K80 far better, AlexNet": "dag-fig02-storage",
    "V100 server: reading costs nothing": "dag-fig02-reading",
    "V100 server: messages limit": "dag-fig02-messages",
    "four machines: K80 scales better": "dag-fig03-k80-over-v100",
    "K80 cluster: Caffe-MPI, MXNet linear": "dag-fig03-linear",
    "K80 cluster: none scales AlexNet well": "dag-fig03-alexnet",
    "K80 cluster: TensorFlow is the worst": "dag-fig03-tensorflow",
    "both clusters: Caffe-MPI is the best": "dag-caffe-best",
    "V100 cluster: none scales well": "dag-finding3",
    "V100 cluster: all but Caffe-MPI poor": "dag-fig03-poorly",
}
"""What dag says of Figs 2 and 3, by quantity and claim; not the 95%, for which `varies` is on the grid."""
SPELLED = {
    "GoogleNet": "GoogLeNet"
}  # the paper's spelling of a network, and its authors'
LAB_NETWORKS = {"alexnet": "AlexNet", "googlenet": "GoogleNet", "resnet50": "ResNet-50"}
LAB = "campaign-dag"  # the campaign on two emulated clusters
EMULATED = {0.5e-3: "slow", 0.1e-3: "fast"}  # its clusters, by the delay of their links


def tasks(drawn: Schedule) -> pd.DataFrame:
    """Return a row a task; slack_s: by how much it may be late with everything in this order."""
    graph = drawn.graph
    columns = {
        "task": [f"T{task}" for task in range(graph.n)],
        "kind": np.array(KINDS)[graph.kind],
        "layer": graph.layer,
        "rank": graph.rank,
        "resource": np.array(graph.resources)[graph.resource],
        "start_s": drawn.start_s,
        "end_s": drawn.end_s,
        "slack_s": drawn.bound.slack_s,
        "critical": np.isin(np.arange(graph.n), drawn.critical_path),
    }
    return pd.DataFrame(columns)


def draw_tasks(ax: Axes, schedule: Schedule) -> None:
    """Draw dag Fig 1: a column a step, a row a GPU; circles compute, the critical path is thick."""
    import networkx as nx

    graph, path = schedule.graph, schedule.critical_path
    column, gpus = graph.levels(), int(graph.rank.max()) + 1
    rows = np.where(
        graph.rank < 0, (gpus - 1) / 2, graph.rank
    )  # what is of all, in the middle
    below = pd.Series(column)[(graph.rank < 0) & ~graph.computes]
    rows[below.index] = gpus + below.groupby(below).cumcount()
    place = {task: (float(column[task]), -float(rows[task])) for task in range(graph.n)}
    edges, thin = graph.to_networkx(), {"ax": ax, "node_size": 250, "arrowsize": 6}
    nx.draw_networkx_edges(edges, place, edge_color=SOFT, width=0.5, **thin)
    chain = nx.DiGraph(list(zip(path, path[1:], strict=False)))
    nx.draw_networkx_edges(chain, place, edge_color=INK, width=1.8, **thin)
    for computes, marker, color in ((True, "o", "#f7d154"), (False, "s", "#e8833a")):
        tasks = np.flatnonzero(graph.computes == computes).tolist()
        shape = {
            "node_shape": marker,
            "node_color": color,
            "edgecolors": INK,
            "node_size": 250,
        }
        nx.draw_networkx_nodes(edges, place, tasks, ax=ax, **shape)
    nx.draw_networkx_labels(
        edges, place, {k: f"T{k}" for k in place}, font_size=6, ax=ax
    )
    words = {"io": "read", "h2d": "copy", "all_reduce": "aggregate"}
    for task in np.flatnonzero(graph.rank <= 0).tolist():  # what all do in this column
        (x, y), layer = place[task], int(graph.layer[task])
        kind = KINDS[graph.kind[task]]
        text = words.get(kind, kind) + (f"\nlayer {layer}" if layer >= 0 else "")
        high = y - 0.75 if kind == "all_reduce" else 0.55
        ax.text(x, high, text, ha="center", va="bottom", fontsize=6.5, color=SOFT)
    ax.axis("off")
    ax.margins(0.04, 0.1)


class Parts:
    """What was measured on its own for a network between some ranks, and the runs that it should predict."""

    def __init__(self, pipelines: Path) -> None:
        layers, inputs, collectives = (
            pipelines.with_name(pipelines.name.replace("pipelines", kind, 1))
            for kind in ("layers", "inputs", "collectives")
        )
        self.runs = store.load_table(pipelines, "pipelines")
        self.cores = int(store.load_stamp(pipelines)["machine"]["cpu"]["cores"])
        self.ranks = int(self.runs["ranks"].iloc[0])
        self.profile = store.read_profile(layers)
        self.inputs = store.load_table(inputs, "inputs")
        self._sent = store.load_table(collectives, "collectives")

    def input_s(self, quantity: str, stored: str, ranks: int) -> float:
        """Return median seconds of a batch. Raises UserError where that was not measured."""
        rows = self.inputs.query(
            "quantity == @quantity and stored == @stored and ranks == @ranks"
        )
        if rows.empty:
            what = f"no {quantity} of {stored} by {ranks} ranks"
            raise UserError(f"inputs: {what}: measure input again")
        return float(rows["seconds"].median())

    @cached_property
    def sent_s(self) -> Floats:
        """Return (n,) seconds of each tensor's message, in forward order; nothing of one rank."""
        rows, tensors = self._sent, self.profile.gradient_bytes
        if self.ranks == 1:
            return np.zeros(len(tensors))
        table = fit(
            "table",
            rows["bytes"],
            rows["seconds"],
            draws=0,
            workers=self.ranks,
            algorithm=rows["algorithm"].iloc[0],
        )
        return np.asarray(table.cost(tensors))

    def times(self, stored: str) -> IterationTimes:
        """Return dag Tab I of an iteration; the update is counted with forward, as computing (errata 2)."""
        profile, sent_s = self.profile, self.sent_s
        forward_s = profile.forward_s + np.append(
            profile.update_s, np.zeros(len(sent_s) - 1)
        )
        whole_s = float(forward_s.sum() + profile.backward_s.sum())
        drift = self.input_s("compute", stored, self.ranks) / whole_s
        io_s = self.input_s("read", stored, 1)
        return IterationTimes(
            io_s, 0.0, drift * forward_s, drift * profile.backward_s, sent_s
        )

    def predicted_s(self, stored: str, ahead: int, sends: str) -> float:
        """Return the mean seconds between updates of a case's schedule, one disk for all ranks."""
        strategy = Strategy(
            copies_ahead=ahead > 0,
            reads_ahead=ahead > 0,
            decodes_on_cpu=True,
            sends_during_backward=sends == "during",
            batches_ahead=ahead,
        )
        gpus = Gpus(
            1, self.ranks, decoding="own" if self.cores >= 2 * self.ranks else "trains"
        )
        decode_s, times = self.input_s("decode", stored, self.ranks), self.times(stored)
        graph = s_sgd(times, strategy, gpus, iterations=ITERATIONS, decode_s=decode_s)
        ends_s = schedule(graph).iteration_ends_s[
            ENDS:-ENDS
        ]  # loaders get ahead, and run out
        return float(np.diff(ends_s).mean())


def parts(place: Path | None = None) -> dict[str, Parts]:
    """Return all that was measured of training with pictures in a folder, else the first recorded one."""
    machines = sorted(
        places.RECORDED.glob("*"), key=lambda at: (at != places.recorded_dir(), at)
    )
    for folder in [place] if place else [machine / "input" for machine in machines]:
        if tables := store.list_tables(folder, "pipelines-*.csv"):
            return {path.stem.partition("-")[2]: Parts(path) for path in tables}
    where = place or places.RECORDED
    raise UserError(
        f"no training with pictures in {where}: run python -m workbook record input --out mine"
    )


def predictions(measured: Mapping[str, Parts]) -> pd.DataFrame:
    """Return a row a case: measured_s (median), predicted_s, and error, the second over the first less 1."""
    tables = []
    for part in measured.values():
        cases = part.runs.groupby(CASE, sort=False)["iteration_s"].median()
        rows = cases.rename("measured_s").reset_index()
        settings = rows[["stored", "ahead", "sends"]].itertuples(index=False)
        tables.append(
            rows.assign(predicted_s=[part.predicted_s(*case) for case in settings])
        )
    return pd.concat(tables, ignore_index=True).eval(
        "error = predicted_s / measured_s - 1"
    )


def by_framework(table: pd.DataFrame) -> pd.Series:
    """Return mean absolute error by framework: of cases of several ranks that read and send as it does."""
    ahead = table[(table["ranks"] > 1) & (table["ahead"] == table["ahead"].max())]
    means = (
        ahead["error"]
        .abs()
        .groupby([ahead["stored"] == "jpeg", ahead["sends"] == "during"])
    )
    does = {
        name: (s.decodes_on_cpu, s.sends_during_backward)
        for name, s in STRATEGIES.items()
    }
    return pd.Series(
        {name: means.mean().get(edges, np.nan) for name, edges in does.items()}
    )


def unit(claim: str) -> float:
    """Return a claim's unit in quantities: 0.01 where it is in per cent."""
    return {each.id: 0.01 if each.unit == "%" else 1.0 for each in load_claims()}[claim]


@lru_cache(maxsize=1)
def setting_search() -> SettingSearch:
    """Return all settings of the grid against the statements, as intervals that claims.csv accepts."""
    accepted, grid = {claim.id: claim.accepted for claim in load_claims()}, Grid()
    stated = (
        Stated(name, *(unit(claim) * end for end in accepted[claim]))
        for name, claim in STATEMENTS.items()
    )
    return settle(tuple(stated), grid, quantities(grid.settings()))


@lru_cache(maxsize=1)
def compatible() -> Setting:
    """Return all settings that agree with the most statements, each field (s,), nearest to medians first."""
    search = setting_search()
    settings = search.grid.at(np.argwhere(search.most()))
    drawn = np.array([settings.varies * 0 + bar for bar in bars(settings).values()])
    off = np.abs(np.log(drawn / np.median(drawn, axis=1, keepdims=True))).sum(axis=0)
    order = np.argsort(off, kind="stable")
    return replace(
        settings, **{name: values[order] for name, values in vars(settings).items()}
    )


def central() -> Setting:
    """Return the most central of the compatible settings, in numbers."""
    every = compatible()
    return replace(
        every, **{name: float(values[0]) for name, values in vars(every).items()}
    )


def _speedups(
    case: Sequence[str], gpus: Gpus, over: Gpus
) -> tuple[float, float, float]:
    """Return speedup over a smaller machine at the central setting, the least and the most of all."""
    settings = compatible()
    cluster, network, framework = case
    each_s = [
        settings.iteration_s(cluster, network, framework, size) for size in (over, gpus)
    ]
    each = np.ravel(gpus.n / over.n * (each_s[0] / each_s[1]))
    return float(each[0]), float(each.min()), float(each.max())


def figures() -> pd.DataFrame:
    """Return dag Figs 2 and 3, a row a bar: speedups over a GPU (Fig 2), over a machine of four (Fig 3).

    model_low, model_high : over all compatible settings; paper : what its text has in numbers, else NaN: the
        most of a K80 server's, but where it has JPEG decoded, and "nearly linear" on the K80 cluster
    """
    sizes = {
        2: [Gpus(1, n) for n in (1, 2, 4)],
        3: [Gpus(m, PER_MACHINE) for m in (1, 2, 4)],
    }
    rows = [
        (figure, *case, gpus.n, *_speedups(case, gpus, sizes[figure][0]))
        for figure, *case in product(sizes, CLUSTERS, NETWORKS, STRATEGIES)
        for gpus in sizes[figure]
    ]
    columns = ["figure", "cluster", "network", "framework", "gpus"]
    frame = pd.DataFrame(rows, columns=[*columns, *MODEL])
    decoded = (frame["network"] == "AlexNet") & frame["framework"].isin(DECODERS)
    small = frame["network"].isin(SMALL_BATCHES) & frame["framework"].isin(
        ["Caffe-MPI", "MXNet"]
    )
    server = (frame["figure"] == 2) & (frame["gpus"] == PER_MACHINE) & ~decoded
    four = (frame["figure"] == 3) & (frame["gpus"] == MACHINES * PER_MACHINE) & small
    most = PER_MACHINE * unit("dag-fig02-efficiency") * claimed("dag-fig02-efficiency")
    printed = np.select([server, four], [most, claimed("dag-fig03-linear")], np.nan)
    return frame.assign(paper=np.where(frame["cluster"] == "K80", printed, np.nan))


def fig04() -> pd.DataFrame:
    """Return dag Fig 4 by model: Caffe-MPI's speedup over one GPU, 1 to 16 GPUs, both clusters.

    eq6 : dag Eq 6 as printed, central setting; exposed_share : of that setting's communication
    """
    setting, rows = central(), []
    sizes = [
        Gpus(1, 1),
        Gpus(1, 2),
        Gpus(1, 4),
        Gpus(2, 4),
        Gpus(MACHINES, PER_MACHINE),
    ]
    for cluster, network, gpus in product(CLUSTERS, NETWORKS, sizes):
        case = cluster, network, "Caffe-MPI"
        whole_s, exposed_s = setting.sent_s(*case, gpus)
        share = exposed_s / whole_s if gpus.n > 1 else np.nan
        alone_s, read_s = (
            1.5 * setting.backward_s(cluster, network),
            setting.reads_s(*case, Gpus()),
        )
        times = BATCH[network] * setting.copy_s, alone_s, alone_s + exposed_s
        eq6 = speedup(
            partial(mul, read_s),
            *times,
            machines=gpus.machines,
            gpus_per_machine=gpus.per_machine,
        )
        rows.append(
            (cluster, network, gpus.n, eq6, *_speedups(case, gpus, Gpus()), share)
        )
    columns = ["cluster", "network", "gpus", "eq6", *MODEL, "exposed_share"]
    return pd.DataFrame(rows, columns=columns)


def fig04_lab() -> pd.DataFrame:
    """Return dag Fig 4 in the lab: speedup measured, and by the DAG from layers and messages on their own.

    limited : whether the processor may have slowed a run; delays_s : of start_s, in a ring's round trips
    sent : what rank 0's messages took over what they cost (median)
    """
    lab = Lab.load(LAB)
    cases = [case for case in lab.cases(plain=True) if case.plan == "none"]
    frame = pd.DataFrame(
        _lab_row(lab, case) for case in cases if case.network in LAB_NETWORKS
    )
    keys = ["cluster", "network", "workers", "per_node", "link"]
    return frame.sort_values(
        keys, ascending=[False, True, True, True, True], ignore_index=True
    )


def _lab_row(lab: Lab, case: Case) -> dict[str, object]:
    """Return one case's row of `fig04_lab`."""
    runs = lab.runs[lab.runs["case"] == case.key]
    measured = case.workers * runs["compute_s"] / runs["iteration_s"]
    workload, cost = lab.workload(case), lab.calibration.of_case(case).cost
    per_node, delay_s = ranks_per_node(case.link), read_link(case.link).delay_s
    gpus, times = (
        Gpus.of(case.workers, per_node),
        IterationTimes.of_workload(workload, cost),
    )
    model = (
        case.workers
        * workload.compute_s
        / period_s(times, STRATEGIES["Caffe-MPI"], gpus)
    )
    spans = lab.spans[lab.spans["case"] == case.key]
    sent = spans[(spans["kind"] == "all_reduce") & (spans["rank"] == 0)]
    network = LAB_NETWORKS[case.network]
    return {
        "cluster": EMULATED.get(delay_s, ""),
        "case": f"{network}, {gpus.machines} x {per_node}",
        "network": network,
        "nodes": gpus.machines,
        "per_node": per_node,
        "workers": case.workers,
        "link": case.link,
        "measured": measured.mean(),
        "repeatability": measured.max() - measured.min(),
        "limited": bool(runs["processor_limited"].any()),
        "model": model,
        "error": model / measured.mean() - 1,
        "start_s": float(cost(np.ones(1))[0]),
        "delays_s": 2 * (case.workers - 1) * 4 * delay_s,
        "sent": float(
            ((sent["end_s"] - sent["start_s"]) / cost(sent["bytes"])).median()
        ),
    }


def lab_errors(lab: pd.DataFrame) -> pd.Series:
    """Return mean error of the prediction in %, by network, of ``fig04_lab``'s cases that nothing limited."""
    judged = lab[~lab["limited"]]
    return 100 * judged["error"].abs().groupby(judged["network"]).mean()


def printed_errors() -> pd.Series:
    """Return mean error of the prediction in %, by network, as dag V-D states it."""
    claims = {name: f"dag-fig04-{name.lower().replace('-', '')}" for name in NETWORKS}
    return pd.Series(claims).map(claimed)


def draw(bars: pd.DataFrame) -> Figure:
    """Draw Fig 2 or 3, rows of `figures`: a line over all settings, a marker at the most central one."""
    rows = bars[bars["gpus"] > bars["gpus"].min()].replace({"network": SPELLED})
    names, most = list(rows["framework"].unique()), rows["gpus"].max()
    over = "one GPU" if most == PER_MACHINE else f"one machine of {PER_MACHINE} GPUs"
    best = rows[rows["gpus"] == most].groupby("cluster")["model"].agg(["min", "max"])
    spans = ", ".join(
        f"{row.Index} {row.min:.2f} to {row.max:.2f}" for row in best.itertuples()
    )
    said = f"Speedups of 4: {spans}; the paper's, {rows['paper'].max():g} at most"
    with plots.sheet(said, columns=3, rows=2, height=4.3, sharex=True, sharey=True) as (
        figure,
        axes,
    ):
        panels = rows.groupby(["cluster", "network"], sort=False)
        for ax, ((cluster, network), panel) in zip(axes.flat, panels, strict=True):
            ends, sizes = ["model_low", "model_high", "model"], panel.groupby("gpus")
            ranges = {
                f"{n} GPUs": tuple(of[end] for end in ends)
                for n, of in reversed([*sizes])
            }
            plots.intervals(ax, names, ranges, label=f"speedup over {over}")
            paper = panel.loc[panel["gpus"] == most, "paper"]
            plots.points(ax, paper, np.arange(len(names)) + 0.17, "paper", size=5)
            ax.set(title=f"{network}, {cluster}", xlim=(0, 4.3), xticks=range(5))
            ax.label_outer()
    return figure


def draw04(model: pd.DataFrame, lab: pd.DataFrame) -> Figure:
    """Draw Fig 4 by model and measured; a line is the paper's mean error about the prediction."""
    printed, off = (
        errors.rename(SPELLED) for errors in (printed_errors(), lab_errors(lab))
    )
    upper, lower = (table.replace({"network": SPELLED}) for table in (model, lab))
    lower["case"] = lower["case"].str.partition(", ")[2].str.replace(" ", "")
    errors = (f"{errors.min():.1f} to {errors.max():.1f}%" for errors in (off, printed))
    said = "Replayed in the lab: {} off in the mean; the paper prints {}".format(
        *errors
    )
    with plots.sheet(said, columns=len(printed), rows=2, height=5.4) as (figure, axes):
        for above, below, network in zip(*axes, printed.index, strict=True):
            wide = upper[upper["network"] == network].pivot(
                index="gpus", columns="cluster"
            )
            wide = wide.rename(columns={"K80": "slow", "V100": "fast"})
            drawn, low, high = (
                100 * wide[end].div(wide.index, axis=0) for end in MODEL
            )
            linear = "speedup over linear [%]"
            plots.lines(
                above,
                drawn,
                ends=(low, high),
                xlabel="GPUs",
                ylabel=linear,
                log="x",
                legend="",
            )
            above.set_xticks(wide.index, wide.index)
            above.set(title=f"{network}, model", ylim=(0, 112))
            rows = lower[lower["network"] == network]
            wide = rows.pivot(index="case", columns="cluster").loc[
                rows["case"].unique()
            ]
            predicted, measured = (
                100 * wide[k] / wide["workers"] for k in ("model", "measured")
            )
            measured, share = (
                measured.mask(wide["limited"].astype(bool)),
                printed[network] / 100,
            )
            ranges = {
                role: (times * (1 - share), times * (1 + share), measured[role])
                for role, times in predicted.items()
            }
            plots.intervals(below, wide.index, ranges, label=linear, reference=100)
            below.set_title(f"lab {off[network]:.1f}% off, paper {printed[network]:g}%")
        axes[1, 0].set_ylabel("lab: nodes x ranks of each")
    return figure
