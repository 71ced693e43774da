"""Checks of the claims of `dag`."""

from __future__ import annotations

from ddlkit.papers import dag, osf
from ddlkit.report.claims import Result, check, paper_table, percent


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
    parameters = sum(osf.table2_parameters("ResNet50"))
    return parameters / 1e6, f"{parameters:,} in the published architecture"


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
    return 0.243 / 0.0625, "0.243 s over 0.0625 s, the backward times of Section V-C"


@check("dag-efficiency")
def _efficiency() -> Result:
    printed_millions = paper_table("dag", "tab04").set_index("network")["parameters_millions"]
    printed = _infiniband_use(1e6 * float(printed_millions["ResNet-50"]))
    counted = _infiniband_use(sum(osf.table2_parameters("ResNet50")))
    note = f"24 M parameters in 0.0797 s; with 25.557 M {percent(counted):.1f}%"
    return percent(printed), note


def _infiniband_use(parameters: float) -> float:
    rate = float(paper_table("dag", "tab02")["network_bits_per_s"][1]) / 8
    return dag.communication_efficiency(4 * parameters, 0.0797, rate)
