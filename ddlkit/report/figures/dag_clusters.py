"""dag's figures 2 to 4: speedups on its clusters in all settings that fit what it states; in the lab."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from itertools import product

import numpy as np
import pandas as pd

from ddlkit.core.cost import MessageCost
from ddlkit.core.link import ranks_per_node, read_link
from ddlkit.papers.audit import SettingSearch, Stated, settle
from ddlkit.papers.dag import STRATEGIES, IterationTimes, speedup
from ddlkit.papers.dag.cluster import (
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
from ddlkit.papers.dag.graph import Gpus, period_s
from ddlkit.report.claims import claimed, load_claims
from ddlkit.report.figures.osf_lab import Lab

STATEMENTS = {
    "K80 server: best efficiency is 95%": "dag-fig02-efficiency",
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
"""What dag says of Figs 2 and 3, by the quantity that it is about and the claim that transcribes it."""
SPELLED = {"GoogleNet": "GoogLeNet"}
"""The paper's spelling of a network, and its authors', which readers see."""
LAB_NETWORKS = {"alexnet": "AlexNet", "googlenet": "GoogleNet", "resnet50": "ResNet-50"}
LAB = "campaign-dag"
"""Directory of the campaign on two emulated clusters, which examples/campaign_dag.yml describes."""
EMULATED = {0.5e-3: "slow", 0.1e-3: "fast"}
"""Those clusters, by the delay of their links: slow GPUs and links, or both fast."""


def unit(claim: str) -> float:
    """Of a claim's number, in quantities: 0.01 where it is in per cent."""
    return {one.id: 0.01 if one.unit == "%" else 1.0 for one in load_claims()}[claim]


def stated() -> tuple[Stated, ...]:
    """The statements as intervals: what claims.csv accepts."""
    known = {claim.id: claim for claim in load_claims()}
    found = []
    for name, claim in STATEMENTS.items():
        low, high = (unit(claim) * end for end in known[claim].accepted)
        found.append(Stated(name, low, high))
    return tuple(found)


@lru_cache(maxsize=1)
def setting_search() -> SettingSearch:
    """All settings of the grid against ``stated()``."""
    grid = Grid()
    return settle(stated(), grid, quantities(grid.settings()))


@lru_cache(maxsize=1)
def compatible() -> Setting:
    """All settings that agree with the most statements: each field (s,).

    The most central comes first: the one whose efficiencies are nearest to their medians.
    """
    found = setting_search()
    settings = found.grid.at(np.argwhere(found.most()))
    drawn = np.array(
        [np.broadcast_to(bar, settings.varies.shape) for bar in bars(settings).values()]
    )
    off = np.abs(np.log(drawn / np.median(drawn, axis=1, keepdims=True))).sum(axis=0)
    order = np.argsort(off, kind="stable")
    return Setting(**{name: values[order] for name, values in vars(settings).items()})


def central() -> Setting:
    """The most central of the compatible settings, in numbers."""
    return Setting(**{name: float(values[0]) for name, values in vars(compatible()).items()})


def figures() -> pd.DataFrame:
    """dag Figs 2 and 3: a row a bar, at the most central compatible setting and over all.

    Columns figure, cluster, network, framework, gpus, model, model_low, model_high: the speedup over a GPU
    (Fig 2), over a machine of four (Fig 3); paper: what its text has in numbers, NaN elsewhere. That is the
    most of a K80 server's, but where it has JPEG decoded, and "nearly linear" on the K80 cluster.
    """
    settings, rows = compatible(), []
    sizes = {2: [Gpus(1, n) for n in (1, 2, 4)], 3: [Gpus(m, PER_MACHINE) for m in (1, 2, 4)]}
    for figure, cluster, network, framework in product(sizes, CLUSTERS, NETWORKS, STRATEGIES):
        case = cluster, network, framework
        first = settings.iteration_s(*case, sizes[figure][0])
        for gpus in sizes[figure]:
            more = gpus.n / sizes[figure][0].n
            found = np.ravel(more * first / settings.iteration_s(*case, gpus))
            rows.append((figure, *case, gpus.n, found[0], found.min(), found.max()))
    columns = ["figure", "cluster", "network", "framework", "gpus"]
    frame = pd.DataFrame(rows, columns=[*columns, "model", "model_low", "model_high"])
    decoded = (frame["network"] == "AlexNet") & frame["framework"].isin(DECODERS)
    small = frame["network"].isin(SMALL_BATCHES) & frame["framework"].isin(["Caffe-MPI", "MXNet"])
    server = (frame["figure"] == 2) & (frame["gpus"] == PER_MACHINE) & ~decoded
    four = (frame["figure"] == 3) & (frame["gpus"] == MACHINES * PER_MACHINE) & small
    most = PER_MACHINE * unit("dag-fig02-efficiency") * claimed("dag-fig02-efficiency")
    printed = np.select([server, four], [most, claimed("dag-fig03-linear")], np.nan)
    return frame.assign(paper=np.where(frame["cluster"] == "K80", printed, np.nan))


def fig04() -> pd.DataFrame:
    """dag Fig 4 by model: Caffe-MPI's speedup over one GPU, 1 to 16 GPUs, three networks, both clusters.

    Columns cluster, network, gpus, eq6 (dag Eq 6 as printed, central setting), model, model_low, model_high,
    exposed_share (of the central setting's communication).
    """
    settings, one, rows = compatible(), central(), []
    sizes = [Gpus(1, 1), Gpus(1, 2), Gpus(1, 4), Gpus(2, 4), Gpus(MACHINES, PER_MACHINE)]
    for cluster, network, gpus in product(CLUSTERS, NETWORKS, sizes):
        case = cluster, network, "Caffe-MPI"
        found = gpus.n * settings.iteration_s(*case, Gpus()) / settings.iteration_s(*case, gpus)
        whole_s, exposed_s = one.sent_s(*case, gpus)
        share = exposed_s / whole_s if gpus.n > 1 else np.nan
        ends = float(found[0]), float(found.min()), float(found.max())
        rows.append((cluster, network, gpus.n, eq6(one, cluster, network, gpus), *ends, share))
    columns = ["cluster", "network", "gpus", "eq6", "model", "model_low", "model_high"]
    return pd.DataFrame(rows, columns=[*columns, "exposed_share"])


def eq6(setting: Setting, cluster: str, network: str, gpus: Gpus) -> float:
    """dag Eq 6 as printed, for Caffe-MPI: reading for all N_g GPUs at one machine's rate."""
    case = cluster, network, "Caffe-MPI"
    one_s, copied_s = setting.reads_s(*case, Gpus()), BATCH[network] * setting.copy_s
    alone_s = 1.5 * setting.backward_s(cluster, network)
    together_s = alone_s + setting.sent_s(*case, gpus)[1]
    return speedup(
        lambda y: y * one_s,
        copied_s,
        alone_s,
        together_s,
        machines=gpus.machines,
        gpus_per_machine=gpus.per_machine,
    )


def fig04_lab(campaign: str = LAB) -> pd.DataFrame:
    """dag Fig 4 in the lab: speedup measured, and by the DAG from layers and messages measured on their own.

    Of the paper's networks, every tensor a message, ranks that are equal. Columns cluster (of EMULATED, or
    ""), case ("network, nodes x ranks of each"), network, nodes, per_node, workers, link, measured,
    repeatability (largest difference of repeats), limited (whether the processor, or the host's other
    guests, may have slowed a run), model, error; start_s, what the smallest message takes, and delays_s,
    what of it the links' delays can be: a ring's steps, each a round trip; sent, what a message took in the
    runs over what it took on its own (median).
    """
    frame = pd.DataFrame(_lab_rows(Lab.load(campaign)))
    keys = ["cluster", "network", "workers", "per_node", "link"]
    return frame.sort_values(keys, ascending=[False, True, True, True, True], ignore_index=True)


def _lab_rows(lab: Lab) -> Iterator[dict[str, object]]:
    for case in lab.cases(plain=True):
        if case.plan != "none" or case.network not in LAB_NETWORKS:
            continue
        runs = lab.runs[lab.runs["case"] == case.key]
        measured = case.workers * runs["compute_s"] / runs["iteration_s"]
        workload = lab.workload(case)
        cost, delay_s = lab.calibration.of_case(case).cost, read_link(case.link).delay_s
        times = IterationTimes.of_workload(workload, cost)
        per_node = ranks_per_node(case.link)
        gpus = Gpus.of(case.workers, per_node)
        taken_s = period_s(times, STRATEGIES["Caffe-MPI"], gpus)
        model = case.workers * workload.compute_s / taken_s
        yield {
            "cluster": EMULATED.get(delay_s, ""),
            "case": f"{LAB_NETWORKS[case.network]}, {gpus.machines} x {per_node}",
            "network": LAB_NETWORKS[case.network],
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
            "sent": _sent(lab.spans[lab.spans["case"] == case.key], cost),
        }


def _sent(spans: pd.DataFrame, cost: MessageCost) -> float:
    """What rank 0's messages took over what they cost, the median."""
    mine = spans[(spans["kind"] == "all_reduce") & (spans["rank"] == 0)]
    taken_s = mine["end_s"] - mine["start_s"]
    return float((taken_s / cost(mine["bytes"].to_numpy())).median())


def lab_errors(lab: pd.DataFrame) -> pd.Series:
    """Average error of the prediction in %, by network, over ``fig04_lab``'s cases that nothing limited.

    Stated on 2026-11-22, before the first run of LAB was looked at.
    """
    judged = lab[~lab["limited"]]
    return 100 * judged["error"].abs().groupby(judged["network"]).mean()


def over_linear(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of ``fig04`` or ``fig04_lab`` with their speedups in % of linear ones."""
    count = frame["gpus"] if "gpus" in frame else frame["workers"]
    names = [
        name for name in ("eq6", "model", "model_low", "model_high", "measured") if name in frame
    ]
    return frame.assign(**{name: 100 * frame[name] / count for name in names})


def printed_errors() -> pd.Series:
    """Average error of the prediction in %, by network, as dag V-D states it."""
    return pd.Series(
        {name: claimed(f"dag-fig04-{name.lower().replace('-', '')}") for name in NETWORKS}
    )


def effects() -> pd.DataFrame:
    """A row an effect of STATEMENTS: what the paper allows, and what the model has.

    Columns effect, from, to (of the paper), low, high (over the settings that agree with the most others),
    others (with how many others it can go together), and the shares of all and of the compatible settings in
    which it holds: settings, compatible.
    """
    found = setting_search()
    alone = found.alone().set_index("statement")
    rows = []
    for one in found.stated:
        left = found.without(one.name)
        shares = alone.loc[one.name, "settings"], alone.loc[one.name, "best_settings"]
        rows.append((one.name, one.low, one.high, left.low, left.high, left.with_it, *shares))
    columns = ["effect", "from", "to", "low", "high", "others", "settings", "compatible"]
    return pd.DataFrame(rows, columns=columns)
