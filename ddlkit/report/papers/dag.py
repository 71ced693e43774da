"""dag: Tables IV and VI counted anew, and the checks of its claims."""

from __future__ import annotations

import pandas as pd

from ddlkit.papers import dag, networks
from ddlkit.report.claims import Result, check, paper_table, percent, prose, recomputed


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


def table6_totals() -> pd.DataFrame:
    """What dag Tab VI adds up to: quantity, value, unit; the data layer is no computation."""
    frame = table6()
    computed = frame[frame["name"] != "data"]
    forward_s, backward_s, sent_s = (
        float(computed[f"{name}_us"].sum()) / 1e6
        for name in ("forward", "backward", "communication")
    )
    convolutions = computed["name"].str.startswith("conv")
    shortened_s = forward_s - 0.9e-6 * float(computed["forward_us"][convolutions].sum())
    rates = computed["forward_flops_per_s_computed"] * computed["forward_us"] / 1e6
    flops = float(rates.sum())
    rows = [
        ("forward", forward_s, "s"),
        ("backward", backward_s, "s"),
        ("communication", sent_s, "s"),
        ("parameters", float(frame["size_bytes"].sum()) / 4, "1"),
        ("backward over forward", backward_s / forward_s, "1"),
        ("forward rate", flops / forward_s, "FLOP/s"),
        ("backward over forward, convolutions' forward / 10", backward_s / shortened_s, "1"),
        ("forward rate, convolutions' forward / 10", flops / shortened_s, "FLOP/s"),
    ]
    return pd.DataFrame(rows, columns=["quantity", "value", "unit"])


@check("dag-fig01-tasks")
def _tasks() -> Result:
    tasks = dag.iteration_tasks(layers=3, gpus=4)
    return sum(tasks.values()), ", ".join(f"{count} {kind}" for kind, count in tasks.items())


@check("dag-tab4-alexnet")
def _alexnet_parameters() -> Result:
    parameters = int(paper_table("dag", "tab06")["size_bytes"].sum()) // 4
    note = f"{parameters:,} in Table VI: Caffe's AlexNet with grouped convolutions"
    return parameters / 1e6, note


@check("dag-tab4-resnet50")
def _resnet_parameters() -> Result:
    note = f"{sum(networks.parameters('ResNet50')):,} in the published architecture"
    return _millions("ResNet50"), note


def _millions(network: str) -> float:
    return sum(networks.parameters(network)) / 1e6


@check("dag-tab4-googlenet")
def _googlenet_parameters() -> Result:
    alone, whole = _millions("GoogLeNet"), _millions("GoogLeNet with heads")
    note = f"{whole:.1f} M with the heads of training: the printed number fits their {4 * whole:.1f} MB"
    return alone, note


@check("dag-storage", "storage_bytes_per_s", "1.1 GB/s over 367.30 MB/s")
@check("dag-nvlink", "connection_bytes_per_s", "95 GB/s over 15 GB/s")
def _faster(column: str, note: str) -> Result:
    speed = paper_table("dag", "tab02")[column]
    return float(speed.max() / speed.min()), note


@check("dag-v100-speed")
def _v100_speed() -> Result:
    said = prose("dag")
    k80, v100 = said["fig03-k80-backward"], said["fig03-v100-backward"]
    return k80 / v100, f"{k80} s over {v100} s, the backward times of Section V-C"


@check("dag-efficiency")
def _efficiency() -> Result:
    printed_millions = paper_table("dag", "tab04").set_index("network")["parameters_millions"]
    printed = _infiniband_use(1e6 * float(printed_millions["ResNet-50"]))
    counted = _infiniband_use(sum(networks.parameters("ResNet50")))
    note = (
        f"gradient bytes of Table IV's 24 M parameters over time and link rate, float32; with "
        f"25.557 M {percent(counted):.1f}%; the paper does not define it or state the precision"
    )
    return percent(printed), note


def _infiniband_use(parameters: float) -> float:
    seconds = prose("dag")["fig03-v100-communication"]
    rate = float(paper_table("dag", "tab02")["network_bits_per_s"][1]) / 8
    return dag.communication_efficiency(4 * parameters, seconds, rate)
