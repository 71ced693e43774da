"""Checks of the claims of `dag`."""

from __future__ import annotations

from ddlkit.papers import dag, networks
from ddlkit.report.claims import Result, check, not_attempted, paper_table, percent, prose


@check("dag-fig01-tasks")
def _tasks() -> Result:
    tasks = dag.iteration_tasks(layers=3, gpus=4)
    return sum(tasks.values()), ", ".join(f"{count} {kind}" for kind, count in tasks.items())


@check("dag-tab4-alexnet")
def _alexnet_parameters() -> Result:
    parameters = int(paper_table("dag", "tab06")["size_bytes"].sum()) // 4
    return (
        parameters / 1e6,
        f"{parameters:,} in Table VI: Caffe's AlexNet with grouped convolutions",
    )


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


@check("dag-storage")
def _storage() -> Result:
    speed = paper_table("dag", "tab02")["storage_bytes_per_s"]
    return float(speed[0] / speed[1]), "1.1 GB/s over 367.30 MB/s"


@check("dag-nvlink")
def _nvlink() -> Result:
    speed = paper_table("dag", "tab02")["connection_bytes_per_s"]
    return float(speed[1] / speed[0]), "95 GB/s over 15 GB/s"


@check("dag-v100-speed")
def _v100_speed() -> Result:
    told = prose("dag")
    k80, v100 = told["fig03-k80-backward"], told["fig03-v100-backward"]
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


not_attempted(
    "dag-fig02-efficiency",
    why="needs K80 GPUs; Fig 2's speedups are not in the text, nor is the size D of the input data",
)
not_attempted(
    "dag-k80-backward",
    "dag-v100-backward",
    why="needs that GPU; whether K80 means the board or one of its two GPUs, and in which "
    "precision the V100 computes, is not stated",
)
not_attempted(
    "dag-k80-communication",
    "dag-v100-communication",
    why="needs 16 GPUs on that network; a ring at wire speed needs at least 0.153 s on 10 and 0.0153 s "
    "on 100 Gbit/s (osf Eq 7, float32), so both are possible; precision is not stated",
)
not_attempted(
    "dag-fig04-alexnet",
    "dag-fig04-googlenet",
    "dag-fig04-resnet50",
    why="needs the authors' traces and both clusters; the speedups, the data size D and which "
    "points the average runs over are not stated",
)
