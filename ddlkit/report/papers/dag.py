"""dag: Tables IV and VI counted anew, and the checks of its claims."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product

import pandas as pd

from ddlkit.papers import dag, networks, osf
from ddlkit.papers.dag import cluster
from ddlkit.papers.dag.cluster import CLUSTERS, LIKE_RESNET, NETWORKS
from ddlkit.papers.dag.graph import Gpus, s_sgd, schedule
from ddlkit.report import claims
from ddlkit.report.claims import CHECKS, Result, at_least, check, counted, measured, modelled, own
from ddlkit.report.figures import dag as figures
from ddlkit.report.source import open_campaign

OPERATIONS = {"K80": 2 * 2496, "V100": 2 * 640 * 64}
"""A cycle, by data sheets: of a GK210's 2496 lanes; of a V100's 640 Tensor Cores, 64 multiply-adds each."""
CLOCK_HZ = {"K80": 562e6, "V100": 1370e6}  # dag V-A: boost is off
WHOLE = Gpus(cluster.MACHINES, cluster.PER_MACHINE)
K80, V100 = CLUSTERS.values()


def _millions(network: str) -> float:
    return sum(networks.parameters(network)) / 1e6


def table4() -> pd.DataFrame:
    """Return dag Tab IV, counted from architectures, and GFLOP of a forward pass on one image."""
    frame = claims.paper_table("dag", "tab04")
    names = frame["network"]
    gflop = [2 * networks.multiply_adds(name) / 1e9 for name in names]
    frame = claims.recomputed(frame, parameters_millions=map(_millions, names))
    return frame.assign(gflop_computed=gflop)


def table6() -> pd.DataFrame:
    """Return dag Tab VI: one iteration of Caffe's AlexNet in float32, layer by layer.

    Added: forward FLOP of the batch, and bytes, over the printed times of layers with parameters.
    """
    frame = claims.paper_table("dag", "tab06")
    layers = iter(networks.layers("AlexNet"))
    of_rows = [next(layers) if size else networks.Layer((), 0) for size in frame["size_bytes"]]
    flops = pd.Series([2.0 * cluster.BATCH["AlexNet"] * layer.multiply_adds for layer in of_rows])
    size = frame["size_bytes"].where(flops > 0)
    sizes = [4 * sum(layer.tensors) for layer in of_rows]
    return claims.recomputed(frame, size_bytes=sizes).assign(
        forward_flops_per_s_computed=1e6 * flops.where(flops > 0) / frame["forward_us"],
        communication_bytes_per_s_computed=1e6 * size / frame["communication_us"],
    )


@check("dag-k80-peak", "K80", 875e6)
@check("dag-v100-peak", "V100", 1530e6)
def _peak(gpu: str, boost_hz: float) -> Result:
    stated = OPERATIONS[gpu] * CLOCK_HZ[gpu] / 1e12
    note = f"at the data sheet's boost, which is off; {stated:.3g} TFLOP/s at Section V-A's clock"
    return counted(OPERATIONS[gpu] * boost_hz / 1e12, note)


@check("dag-k80-backward", "K80")
@check("dag-v100-backward", "V100")
def _least_backward(gpu: str) -> Result:
    flops = 4.0 * cluster.BATCH["ResNet-50"] * networks.multiply_adds("ResNet50")
    note = (
        "twice forward's operations at the stated clock's peak; the V100's precision is not stated"
    )
    return at_least(flops / (OPERATIONS[gpu] * CLOCK_HZ[gpu]), note)


@check("dag-k80-communication", "K80")
@check("dag-v100-communication", "V100")
def _wire_time(gpu: str) -> Result:
    rate = CLUSTERS[gpu].network_bytes_per_s
    least_s = float(osf.update_s(4e6 * _millions("ResNet50"), cluster.MACHINES, rate))
    return at_least(least_s, "four machines at wire speed; float32, precision is not stated")


def _link_use(millions: float) -> float:
    return 100 * dag.communication_efficiency(4e6 * millions, V100.sent_s, V100.network_bytes_per_s)


CHECKS |= {
    "dag-efficiency": lambda: own(
        [[*map(_link_use, (23.5, 24.5))]],
        "Table IV's 24 M in float32 over time and link rate: not defined",
    ),
    "dag-v100-speed": lambda: modelled(
        (LIKE_RESNET, figures.compatible().alexnet_speedup.max()),
        "ResNet-50's, by the printed backward times, to AlexNet's largest of the compatible settings",
    ),
    "dag-fig01-tasks": lambda: counted(
        sum(dag.iteration_tasks(layers=3, gpus=4).values()), "of one iteration, kind by kind"
    ),
    "dag-tab4-resnet50": lambda: counted(_millions("ResNet50"), "of the published architecture"),
    "dag-tab4-googlenet": lambda: counted(
        _millions("GoogLeNet"),
        "13.4 M with the heads of training: the printed number fits their MB",
    ),
    "dag-tab4-alexnet": lambda: own(
        claims.paper_table("dag", "tab06")["size_bytes"].sum() / 4e6,
        "60,965,224 in Table VI: Caffe's AlexNet with grouped convolutions",
    ),
    "dag-storage": lambda: own(
        K80.storage_bytes_per_s / V100.storage_bytes_per_s, "1.1 GB/s over 367.30 MB/s"
    ),
    "dag-nvlink": lambda: own(
        V100.connection_bytes_per_s / K80.connection_bytes_per_s, "95 GB/s over 15 GB/s"
    ),
    "dag-k80-hidden": lambda: own(K80.sent_s / K80.backward_s, "0.23 s over 0.243 s"),
    "dag-v100-exposed": lambda: own(V100.sent_s / V100.backward_s, "0.0797 s over 0.0625 s"),
}


def _by_model(statement: str, claim: str) -> Result:
    return claims.by_model(figures.setting_search(), statement, 1 / figures.unit(claim))


for _statement, _claim in figures.STATEMENTS.items():
    check(_claim, _statement, _claim)(_by_model)


@check("dag-finding4")
def _merged() -> Result:
    start_s, per_byte = figures.compatible().message("V100", "Caffe-MPI", WHOLE)
    sizes = cluster.layer_bytes("ResNet-50")
    each_s, sent_s = len(sizes) * start_s, sizes.sum() * per_byte
    note = "ResNet-50's layers one by one over all in one message, 16 V100, all compatible settings"
    return modelled((each_s + sent_s) / (start_s + sent_s), note)


@cache
def _periods(framework: str, gpu: str, network: str) -> tuple[float, float, float, float]:
    """Return seconds between scheduled updates, of all messages; between updates without, with two copies."""
    times, _, _ = figures.central().times(gpu, network, framework, WHOLE)
    # GPUs are equal: one is scheduled, with the messages of sixteen.
    times = replace(times, io_s=0.0)
    baseline = replace(times, communication_s=0.0 * times.communication_s)
    taken_s = [
        schedule(s_sgd(changed, dag.strategy(framework), iterations=4)).period_s
        for changed in (times, baseline, replace(times, h2d_s=2 * times.h2d_s))
    ]
    return taken_s[0], float(times.communication_s.sum()), taken_s[1], taken_s[2]


@check("dag-cntk-exposed")
def _cntk_exposed() -> Result:
    periods = [_periods("CNTK", *case) for case in product(CLUSTERS, NETWORKS)]
    shares = [100 * (taken_s - baseline_s) / sent_s for taken_s, sent_s, baseline_s, _ in periods]
    return modelled(shares, "CNTK's graph, scheduled; three networks, both clusters")


@check("dag-h2d-hidden")
def _copy_hidden() -> Result:
    counts = []
    for case in product(CLUSTERS, NETWORKS):
        periods = [_periods(name, *case) for name in dag.STRATEGIES]
        counts.append(sum(twice_s <= taken_s * (1 + 1e-9) for taken_s, _, _, twice_s in periods))
    return modelled(
        counts, "of four scheduled graphs, those that copies of twice the time do not delay"
    )


@check("dag-finding2")
def _hiding_pays() -> Result:
    runs = open_campaign().alone.table("runs")
    plain = runs.query("density == 1 and straggler == 1 and in_flight == 1")
    case = ["network", "batch", "workers", "link", "dilation", "profile_sha256"]
    means = plain.groupby([*case, "plan"])["iteration_s"].mean().unstack()
    ratios = (means["single"] / means["ddp"]).dropna()
    note = f"PyTorch's buckets in {len(ratios)} cases of the lab, 2 to 16 ranks, recorded times"
    return measured(ratios, note, "replayed")


@check("dag-fig04-alexnet-most", "AlexNet")
@check("dag-fig04-googlenet-most", "GoogleNet")
@check("dag-fig04-resnet50-most", "ResNet-50")
def _lab_error(network: str) -> Result:
    lab = figures.fig04_lab()
    alone = ~lab["limited"][lab["network"] == network]
    note = (
        f"average of {alone.sum()} of {len(alone)} cases, all that the processor cannot have slowed"
    )
    return measured(figures.lab_errors(lab)[network], note, "replayed")


@check("dag-finding1")
def _frameworks_described() -> Result:
    errors = figures.by_framework(figures.predictions(figures.parts()))
    note = f"PyTorch with each one's switches, on CPUs; mean errors {errors.min():.1%} to {errors.max():.1%}"
    return measured(float((errors <= figures.MOST).sum()), note, "measured")
