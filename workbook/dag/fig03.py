"""dag Fig 3: speedups of four machines over one of them, and what Sections I and V-C say of that."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ddlkit.core.taskgraph import Gpus
from workbook.common import networks
from workbook.common.claims import Result, at_least, check, claimed, own
from workbook.dag import equations as dag
from workbook.dag import settings, speedups
from workbook.dag.cluster import (
    BATCH,
    CLOCK_HZ,
    CLUSTERS,
    MACHINES,
    NETWORKS,
    OPERATIONS,
    PER_MACHINE,
    parameter_millions,
)
from workbook.dag.statements import LAYER_WISE, OF_FIG03, SMALL_BATCHES, rank
from workbook.osf import equations as osf

SIZES = [Gpus(machines, PER_MACHINE) for machines in (1, 2, MACHINES)]
LINEAR = ["Caffe-MPI", "MXNet"]
"""Frameworks that scale nearly linearly on the K80 cluster."""
K80, V100 = CLUSTERS["K80"], CLUSTERS["V100"]


def modelled() -> pd.DataFrame:
    """Return a row a bar: the speedup over one machine at the central setting, and over all compatible."""
    return speedups.modelled(3, SIZES)


def numbers() -> pd.DataFrame:
    """Return the `modelled` bars; paper : what its text has in numbers, else NaN.

    That is "nearly linear" on the K80 cluster.
    """
    frame = modelled()
    linear = frame["network"].isin(SMALL_BATCHES) & frame["framework"].isin(LINEAR)
    whole = frame["gpus"] == MACHINES * PER_MACHINE
    told = (frame["cluster"] == "K80") & whole & linear
    return frame.assign(paper=np.where(told, claimed("dag-fig03-linear"), np.nan))


def draw(frame: pd.DataFrame) -> Figure:
    """Draw `numbers`."""
    return speedups.draw_bars(frame, f"one machine of {PER_MACHINE} GPUs")


@check("dag-k80-backward", "K80")
@check("dag-v100-backward", "V100")
def _least_backward(gpu: str) -> Result:
    first, *others = (
        2 * each.multiply_adds for each in networks.layers("resnet50_published")
    )
    # The first layer has no gradient of the images to compute.
    flops = BATCH["ResNet-50"] * (first + 2 * sum(others))
    least_s = flops / (OPERATIONS[gpu] * CLOCK_HZ[gpu])
    printed = f"printed are {CLUSTERS[gpu].backward_s / least_s:.2g} times that"
    note = f"forward's {(first + sum(others)) / 1e9:.2f} GFLOP (stride in the 1x1) twice, none for images"
    peak = "the stated clock's peak" + " of Tensor Cores" * (gpu == "V100")
    note += f", at {peak}; algorithms of fewer could beat it"
    return at_least(least_s, f"{note}; {printed}")


@check("dag-k80-communication")
def _wire_time() -> Result:
    sent = 4e6 * parameter_millions("ResNet50"), MACHINES, K80.network_bytes_per_s
    least_s = float(osf.update_s(*sent))
    return at_least(
        least_s, "four machines at wire speed; float32, precision is not stated"
    )


def _link_use(millions: float) -> float:
    return 100 * dag.communication_efficiency(
        4e6 * millions, V100.sent_s, V100.network_bytes_per_s
    )


@check("dag-efficiency")
def _efficiency() -> Result:
    return own(
        [[_link_use(23.5) * 0.0797 / 0.07975, _link_use(24.5) * 0.0797 / 0.07965]],
        f"the network's own parameters give {_link_use(parameter_millions('ResNet50')):.1f}%, gradients of "
        f"2 bytes {_link_use(12):.1f}%, all that a ring of 16 sends {_link_use(24 * 2 * 15 / 16):.1f}%",
    )


@check("dag-v100-communication")
def _v100_communication() -> Result:
    alone_s = V100.sent_s * _link_use(parameter_millions("ResNet50")) / 9.6
    return own(
        [[V100.sent_s * _link_use(23.5) / 9.65, V100.sent_s * _link_use(24.5) / 9.55]],
        f"the network's own parameters give {alone_s:.4f} s",
    )


@check("dag-k80-hidden", K80.sent_s / K80.backward_s, "0.23 s over 0.243 s")
@check("dag-v100-exposed", V100.sent_s / V100.backward_s, "0.0797 s over 0.0625 s")
def _sent_over_backward(ratio: float, note: str) -> Result:
    return own(ratio, note)


def _cases(claim: str) -> pd.DataFrame | None:
    """Return the cases behind a claim's mean in the compatible settings, if it is one."""
    efficiency = settings.compatible_efficiencies()[3]
    k80, v100 = efficiency["K80"], efficiency["V100"]
    if claim == "dag-fig03-k80-over-v100":
        return settings.of_each(k80 / v100, "min")
    if claim == "dag-caffe-best":
        ranks = {
            (network, cluster): rank(efficiency[cluster][network], "Caffe-MPI")
            for network in NETWORKS
            for cluster in CLUSTERS
        }
        return pd.DataFrame(ranks)
    if claim == "dag-finding3":
        return settings.of_each(v100, "max")
    if claim == "dag-fig03-poorly":
        return settings.of_each(v100.drop(columns="Caffe-MPI", level=1), "max")
    return None


def _stated(statement: str, claim: str) -> Result:
    """Judge by the mean alone where the paper speaks "in general"."""
    in_general = claim == "dag-fig03-k80-over-v100"
    return settings.by_model(
        statement, claim, _cases(claim), judged_one_by_one=not in_general
    )


for _statement, _claim in {**OF_FIG03, LAYER_WISE: "dag-finding4"}.items():
    check(_claim, _statement, _claim)(_stated)
