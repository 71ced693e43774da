"""dag: Tables IV and VI counted anew, and the checks of its claims."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product

import numpy as np
import pandas as pd

from ddlkit.papers import dag, networks, osf
from ddlkit.papers.dag.cluster import (
    CLUSTERS,
    LIKE_RESNET,
    MACHINES,
    NETWORKS,
    PER_MACHINE,
    layer_bytes,
)
from ddlkit.papers.dag.graph import Gpus, s_sgd, schedule
from ddlkit.report.claims import (
    Evidence,
    Result,
    at_least,
    by_model,
    check,
    counted,
    measured,
    over_compatible,
    own,
    paper_table,
    percent,
    prose,
    recomputed,
    settings,
)
from ddlkit.report.figures import dag as figures
from ddlkit.report.figures import dag_clusters
from ddlkit.report.source import open_campaign


def table4() -> pd.DataFrame:
    """dag Tab IV: three networks, counted from their architectures.

    Added: gflop_computed, FLOP of a forward pass on one image (2 a multiply-add) / 1e9.
    """
    frame = paper_table("dag", "tab04")
    names = frame["network"]
    frame = recomputed(frame, parameters_millions=map(_millions, names))
    return frame.assign(gflop_computed=[2 * networks.multiply_adds(name) / 1e9 for name in names])


def table6() -> pd.DataFrame:
    """dag Tab VI: one iteration of AlexNet, layer by layer.

    size_bytes: of Caffe's AlexNet in float32. Added for layers with parameters: forward FLOP of the
    batch over the printed forward time, and bytes over the printed communication time.
    """
    frame = paper_table("dag", "tab06")
    layers = iter(networks.layers("AlexNet"))
    batch = int(paper_table("dag", "tab04").set_index("network")["batch"]["AlexNet"])
    of_rows = [next(layers) if size else networks.Layer((), 0) for size in frame["size_bytes"]]
    flops = pd.Series([2.0 * batch * layer.multiply_adds for layer in of_rows])
    size = frame["size_bytes"].where(flops > 0)
    return recomputed(frame, size_bytes=[4 * sum(layer.tensors) for layer in of_rows]).assign(
        forward_flops_per_s_computed=1e6 * flops.where(flops > 0) / frame["forward_us"],
        communication_bytes_per_s_computed=1e6 * size / frame["communication_us"],
    )


@check("dag-fig01-tasks")
def _tasks() -> Result:
    tasks = dag.iteration_tasks(layers=3, gpus=4)
    return counted(sum(tasks.values()), ", ".join(f"{n} {kind}" for kind, n in tasks.items()))


@check("dag-tab4-alexnet")
def _alexnet_parameters() -> Result:
    parameters = int(paper_table("dag", "tab06")["size_bytes"].sum()) // 4
    note = f"{parameters:,} in Table VI: Caffe's AlexNet with grouped convolutions"
    return own(parameters / 1e6, parameters / 1e6, note)


@check("dag-tab4-resnet50")
def _resnet_parameters() -> Result:
    tensors = networks.layers("ResNet50")
    body = sum(sum(layer.tensors) for layer in tensors[:-1]) / 1e6
    note = f"of the published architecture; without its dense layer {body:.3f} million"
    return counted(_millions("ResNet50"), note)


def _millions(network: str) -> float:
    return sum(networks.parameters(network)) / 1e6


@check("dag-tab4-googlenet")
def _googlenet_parameters() -> Result:
    alone, whole = _millions("GoogLeNet"), _millions("GoogLeNet with heads")
    note = f"{whole:.1f} M with the heads of training: the printed number fits their {4 * whole:.1f} MB"
    return counted(alone, note)


@check("dag-storage", "storage_bytes_per_s", "1.1 GB/s over 367.30 MB/s")
@check("dag-nvlink", "connection_bytes_per_s", "95 GB/s over 15 GB/s")
def _faster(column: str, note: str) -> Result:
    speed = paper_table("dag", "tab02")[column]
    ratio = float(speed.max() / speed.min())
    return own(ratio, ratio, note)


@check("dag-efficiency")
def _efficiency() -> Result:
    printed = paper_table("dag", "tab04").set_index("network")["parameters_millions"]["ResNet-50"]
    low, high = (percent(_infiniband_use(1e6 * (printed + half))) for half in (-0.5, 0.5))
    true = percent(_infiniband_use(sum(networks.parameters("ResNet50"))))
    note = (
        f"gradient bytes of Table IV's {printed:g} M parameters, as rounded, over time and link rate, "
        f"float32; the network's own 25.557 M give {true:.1f}%; neither defined nor its precision stated"
    )
    return own(low, high, note)


def _infiniband_use(parameters: float) -> float:
    seconds = prose("dag")["fig03-v100-communication"]
    rate = float(paper_table("dag", "tab02")["network_bits_per_s"][1]) / 8
    return dag.communication_efficiency(4 * parameters, seconds, rate)


@check("dag-k80-communication", 0)
@check("dag-v100-communication", 1)
def _wire_time(cluster: int) -> Result:
    rate = float(paper_table("dag", "tab02")["network_bits_per_s"][cluster]) / 8
    machines = int(settings("dag")["hardware"]["clusters"][cluster]["machines"])
    size = 4e6 * _millions("ResNet50")
    least, ring = (float(osf.update_s(size, n, rate)) for n in (machines, 4 * machines))
    note = (
        f"no machine of {machines} can send less at wire speed; a ring of 16 GPUs takes {ring:.3g} s; "
        "float32, precision is not stated"
    )
    return at_least(least, note)


OPERATIONS = (2 * 2496, 2 * 640 * 64)
"""A cycle, by data sheets: of a GK210's 2496 lanes; of a V100's 640 Tensor Cores, 64 multiply-adds each."""


@check("dag-k80-peak", 0, 875e6)
@check("dag-v100-peak", 1, 1530e6)
def _peak(cluster: int, boost_hz: float) -> Result:
    clock_hz = settings("dag")["hardware"]["clusters"][cluster]["gpu_clock_hz"]
    ran = OPERATIONS[cluster] * clock_hz / 1e12
    note = (
        f"{OPERATIONS[cluster]:,} operations a cycle at the data sheet's {boost_hz / 1e6:g} MHz with boost; "
        f"boost is off, and at the {clock_hz / 1e6:g} MHz of Section V-A it is {ran:.3g} TFLOP/s"
    )
    return counted(OPERATIONS[cluster] * boost_hz / 1e12, note)


@check("dag-k80-backward", 0)
@check("dag-v100-backward", 1)
def _least_backward(cluster: int) -> Result:
    batch = int(paper_table("dag", "tab04").set_index("network")["batch"]["ResNet-50"])
    clock_hz = settings("dag")["hardware"]["clusters"][cluster]["gpu_clock_hz"]
    flops = 2 * 2.0 * batch * networks.multiply_adds("ResNet50")
    note = (
        f"backward's {flops / 1e12:.3g} TFLOP, twice forward's, at the peak of the stated clock; whether "
        "K80 means the board or one of its two GPUs, and the V100's precision, are not stated"
    )
    return at_least(flops / (OPERATIONS[cluster] * clock_hz), note)


def _by_model(statement: str, claim: str) -> Result:
    search = dag_clusters.setting_search()
    return by_model(search, statement, 1 / dag_clusters.unit(claim))


for _statement, _claim in dag_clusters.STATEMENTS.items():
    check(_claim, _statement, _claim)(_by_model)


def _compatible_note() -> str:
    return over_compatible(dag_clusters.setting_search())


@check("dag-v100-speed")
def _v100_over_k80() -> Result:
    alexnet = dag_clusters.compatible().alexnet_speedup
    note = (
        f"of ResNet-50 {LIKE_RESNET:.3g}, by the printed backward times; of AlexNet {alexnet.min():.3g} to "
        f"{alexnet.max():.3g}, {_compatible_note()}; which network is meant is not stated"
    )
    return Result(Evidence.MODEL, LIKE_RESNET, float(alexnet.max()), note)


@check("dag-finding4")
def _merged() -> Result:
    """All of ResNet-50 in one message against one a layer, 16 V100: the same bytes in how much less time."""
    whole = Gpus(MACHINES, PER_MACHINE)
    start_s, per_byte = dag_clusters.compatible().message("V100", "Caffe-MPI", whole)
    sizes = layer_bytes("ResNet-50")
    ratio = (len(sizes) * start_s + sizes.sum() * per_byte) / (start_s + sizes.sum() * per_byte)
    note = f"ResNet-50 in one message over one a layer, {_compatible_note()}"
    return Result(Evidence.MODEL, float(ratio.min()), float(ratio.max()), note)


@cache
def _periods(framework: str, cluster: str, network: str) -> tuple[float, float, float, float]:
    """Scheduled seconds between updates, of all messages; between updates without them, with two copies."""
    whole = Gpus(MACHINES, PER_MACHINE)
    times, _, _ = dag_clusters.central().times(cluster, network, framework, whole)
    # GPUs are equal: one is scheduled, with the messages of sixteen.
    times = replace(times, io_s=0.0)
    changed = (
        times,
        replace(times, communication_s=np.zeros_like(times.communication_s)),
        replace(times, h2d_s=2 * times.h2d_s),
    )
    taken = [
        schedule(s_sgd(one, dag.strategy(framework), iterations=4)).period_s for one in changed
    ]
    return taken[0], float(times.communication_s.sum()), taken[1], taken[2]


@check("dag-cntk-exposed")
def _cntk_exposed() -> Result:
    shares = []
    for case in product(CLUSTERS, NETWORKS):
        taken_s, sent_s, unsent_s, _ = _periods("CNTK", *case)
        shares.append(percent((taken_s - unsent_s) / sent_s))
    note = "of the graph with CNTK's edges, scheduled; three networks, both clusters"
    return Result(Evidence.MODEL, min(shares), max(shares), note)


@check("dag-h2d-hidden")
def _copy_hidden() -> Result:
    counts = []
    for case in product(CLUSTERS, NETWORKS):
        periods = [_periods(name, *case) for name in dag.STRATEGIES]
        counts.append(sum(one[3] <= one[0] * (1 + 1e-9) for one in periods))
    note = (
        "of the graphs with the four frameworks' edges, scheduled: those whose updates follow each other "
        "no more slowly with copies that take twice as long; three networks, both clusters"
    )
    return Result(Evidence.MODEL, min(counts), max(counts), note)


@check("dag-k80-hidden", "k80")
@check("dag-v100-exposed", "v100")
def _hidden(gpu: str) -> Result:
    said = prose("dag")
    sent_s, backward_s = said[f"fig03-{gpu}-communication"], said[f"fig03-{gpu}-backward"]
    return own(sent_s / backward_s, sent_s / backward_s, f"{sent_s} s over {backward_s} s")


@check("dag-finding2")
def _hiding_pays() -> Result:
    runs = open_campaign().alone.table("runs")
    plain = (runs["density"] == 1) & (runs["straggler"] == 1) & (runs["in_flight"] == 1)
    case = ["network", "batch", "workers", "link", "dilation", "profile_sha256"]
    means = runs[plain].groupby([*case, "plan"])["iteration_s"].mean().unstack()
    ratios = (means["single"] / means["ddp"]).dropna()
    note = (
        f"PyTorch's buckets in {len(ratios)} cases of the lab, 2 to 16 ranks, recorded layer times"
    )
    return measured(ratios, "replayed", note)


@check("dag-fig04-alexnet-most", "AlexNet")
@check("dag-fig04-googlenet-most", "GoogleNet")
@check("dag-fig04-resnet50-most", "ResNet-50")
def _lab_error(network: str) -> Result:
    lab = dag_clusters.fig04_lab()
    mine = lab[lab["network"] == network]
    kept = mine[~mine["limited"]]
    slower = kept[kept["measured"] < 0.99 * kept["workers"]]
    note = (
        f"average of {len(kept)} of {len(mine)} cases of two emulated clusters that replay recorded layer "
        "times, all that the processor cannot have slowed; of those that lose more than a hundredth to "
        f"messages, {percent(slower['error'].abs().mean()):.1f}%"
    )
    return measured([dag_clusters.lab_errors(lab)[network]], "replayed", note)


@check("dag-finding1")
def _frameworks_described() -> Result:
    """Of real training with each framework's switches: how many the graph tells to MOST."""
    errors = figures.by_framework(figures.predictions(figures.parts()))
    note = (
        "PyTorch with the switches of each: pictures as JPEG or not, gradients sent during backward or after "
        f"it; mean errors of {percent(errors.min()):.1f} to {percent(errors.max()):.1f}%, where at most "
        f"{percent(figures.MOST):g}%, the largest that the paper prints, was asked beforehand. No GPU, so "
        "that nothing is copied, and Caffe-MPI and MXNet are alike"
    )
    return measured([float((errors <= figures.MOST).sum())], "measured", note)
