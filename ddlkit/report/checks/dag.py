"""Checks of the claims of `dag`."""

from __future__ import annotations

from ddlkit.papers import dag, networks
from ddlkit.report.claims import Result, check, paper_table, percent, prose


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
    parameters = sum(networks.parameters("ResNet50"))
    return parameters / 1e6, f"{parameters:,} in the published architecture"


@check("dag-tab4-googlenet")
def _googlenet_parameters() -> Result:
    alone, whole = (
        sum(networks.parameters(name)) / 1e6 for name in ("GoogLeNet", "GoogLeNet with heads")
    )
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
