"""Fig 3 of the dag paper: the speedup of four machines over one machine.

The claims are those of Sections I and V-C.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ddlkit.core.taskgraph import Gpus
from workbook.common import networks
from workbook.common.claims import (
    Result,
    at_least,
    by_readings,
    check,
    claimed,
    own,
)
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
    Setting,
    parameter_millions,
)
from workbook.dag.statements import (
    LAYER_WISE,
    OF_FIG03,
    SMALL_BATCHES,
    efficiencies,
    rank,
)
from workbook.osf import equations as osf

SIZES = [Gpus(machines, PER_MACHINE) for machines in (1, 2, MACHINES)]
"""The GPUs of each bar. Speedups are over the first."""
LINEAR = ["Caffe-MPI", "MXNet"]
"""Frameworks that scale nearly linearly on the K80 cluster."""
K80 = CLUSTERS["K80"]
V100 = CLUSTERS["V100"]


def modelled() -> pd.DataFrame:
    """Return the speedup of each bar by the model, as `speedups.modelled`."""
    return speedups.modelled(3, SIZES)


def numbers() -> pd.DataFrame:
    """Return the speedup of each bar by the model and, where stated, by the paper.

    The text states no speedup, but calls two frameworks "nearly linear" on the K80 cluster,
    for two networks. The column ``paper`` has the linear speedup there, which is 4 for four
    machines over one, and NaN elsewhere.
    """
    frame = modelled()
    # SMALL_BATCHES has the names of the two networks, GoogleNet and ResNet-50.
    is_linear = frame["network"].isin(SMALL_BATCHES) & frame["framework"].isin(LINEAR)
    is_all_gpus = frame["gpus"] == MACHINES * PER_MACHINE
    is_stated = (frame["cluster"] == "K80") & is_all_gpus & is_linear
    linear_speedup = claimed("dag-fig03-linear")
    return frame.assign(paper=np.where(is_stated, linear_speedup, np.nan))


def draw(frame: pd.DataFrame) -> Figure:
    """Draw the speedups, a panel for each cluster and network.

    Parameters
    ----------
    frame : DataFrame
        What `numbers` returned.
    """
    return speedups.draw_bars(frame, f"one machine of {PER_MACHINE} GPUs")


def _backward_flops(forward_flops: Sequence[int]) -> int:
    """Return the FLOP of a backward pass by those of the forward pass of each layer.

    The layers are in forward order.
    """
    first, *others = forward_flops
    # Every layer computes the gradient of its weights, which takes as many FLOP as its
    # forward pass. It also computes the gradient of its input, which takes as many again.
    # The first layer does without the latter, because its input is the images.
    return first + 2 * sum(others)


@check("dag-k80-backward", "K80")
@check("dag-v100-backward", "V100")
def _least_backward(gpu: str) -> Result:
    """Return the least time of ResNet-50's backward pass, at the peak rate of a GPU.

    The paper prints a peak rate that its stated clock does not reach. There is a reading
    for each of the two peaks: the printed one, and that of the stated clock.
    """
    # The FLOP of one image, by layer in forward order. A multiply-add is two operations. In
    # ResNet-50 as published, the first 1x1 convolution of a block has the stride.
    layers = networks.layers("resnet50_published")
    forward_flops = [2 * layer.multiply_adds for layer in layers]
    backward_flops = BATCH["ResNet-50"] * _backward_flops(forward_flops)
    forward_gflop = sum(forward_flops) / 1e9
    # The peak of a V100 is that of its Tensor Cores.
    of_units = " of Tensor Cores" if gpu == "V100" else ""
    # The note says how `_backward_flops` counts. The least time holds for convolutions by their
    # definition. There are algorithms that need fewer FLOP, and could take less time.
    note = (
        f"forward's {forward_gflop:.2f} GFLOP (stride in the 1x1) twice, none for images"
        f"; algorithms of fewer could beat it"
    )
    # In FLOP/s. OPERATIONS are those of one cycle, and the paper prints TFLOP/s.
    peaks = {
        f"the stated clock's peak{of_units}": OPERATIONS[gpu] * CLOCK_HZ[gpu],
        f"the printed peak{of_units}": 1e12 * claimed(f"dag-{gpu.lower()}-peak"),
    }
    readings = {}
    for peak, flops_per_s in peaks.items():
        least_s = backward_flops / flops_per_s
        printed_over_least = CLUSTERS[gpu].backward_s / least_s
        at_peak = (
            f"{flops_per_s / 1e12:.3g} TFLOP/s, {least_s:.3g} s; printed are "
            f"{printed_over_least:.2g} times that"
        )
        readings[peak] = at_least(least_s, at_peak)
    return by_readings(readings, note)


@check("dag-k80-communication")
def _wire_time() -> Result:
    n_bytes = 4e6 * parameter_millions("ResNet50")
    least_s = float(osf.update_s(n_bytes, MACHINES, K80.network_bytes_per_s))
    note = "four machines at wire speed; float32, precision is not stated"
    return at_least(least_s, note)


def _link_use_percent(millions: float) -> float:
    """Return the efficiency of the V100 cluster's network in % (dag Section V-C).

    Parameters
    ----------
    millions : float
        How many million float32 parameters are exchanged in the printed time.
    """
    # A float32 parameter has 4 bytes.
    efficiency = dag.communication_efficiency(
        4e6 * millions, V100.sent_s, V100.network_bytes_per_s
    )
    return 100 * efficiency


@check("dag-efficiency")
def _efficiency() -> Result:
    """Return the efficiency in % by the paper's own numbers, within their rounding.

    Printed are 24 million parameters and 0.0797 s. The paper states neither the precision
    of a number nor which bytes count, so that there are three readings.
    """
    # Numbers from 23.5 to 24.5 million round to 24 million, and times from 0.07965 s to 0.07975 s
    # to 0.0797 s. The least efficiency has the longest time. `_link_use_percent` divides by the
    # printed time, so that its result is converted to the two other times.
    low = _link_use_percent(23.5) * 0.0797 / 0.07975
    high = _link_use_percent(24.5) * 0.0797 / 0.07965
    by_parameters = _link_use_percent(parameter_millions("ResNet50"))
    # 12 million float32 numbers have as many bytes as 24 million of 2 bytes each.
    two_byte = _link_use_percent(12)
    # In a ring each of N GPUs, here 16, sends 2 (N - 1) / N times the bytes.
    ring = _link_use_percent(24 * 2 * 15 / 16)
    note = (
        f"the network's own parameters give {by_parameters:.1f}%, gradients of "
        f"2 bytes {two_byte:.1f}%, all that a ring of 16 sends {ring:.1f}%"
    )
    readings = {
        # The pair stands for all numbers between its ends.
        "24 million numbers of 4 bytes": own([(low, high)], note=""),
        "numbers of 2 bytes": own(two_byte, note=""),
        "all bytes that a ring sends": own(ring, note=""),
    }
    return by_readings(readings, note)


@check("dag-v100-communication")
def _v100_communication() -> Result:
    """Return the seconds of communication that follow from the network's printed efficiency.

    Printed are 24 million parameters and 9.6%, which are taken within their rounding. The
    claim is the printed time.
    """
    # The efficiency is c / time, where c depends on the parameters alone, so that the time is
    # c / efficiency. `_link_use_percent` is the efficiency if the time is `V100.sent_s`. So c is
    # `V100.sent_s` times `_link_use_percent`, and would be the same for any other time.
    #
    # Of all numbers that round to the printed ones, the fewest parameters (23.5 million) and the
    # largest efficiency (9.65%) give the shortest time.
    low_s = V100.sent_s * _link_use_percent(23.5) / 9.65
    high_s = V100.sent_s * _link_use_percent(24.5) / 9.55
    percent = _link_use_percent(parameter_millions("ResNet50"))
    by_parameters_s = V100.sent_s * percent / 9.6
    note = f"the network's own parameters give {by_parameters_s:.4f} s"
    return own([[low_s, high_s]], note)


@check("dag-k80-hidden", K80.sent_s / K80.backward_s, "0.23 s over 0.243 s")
@check("dag-v100-exposed", V100.sent_s / V100.backward_s, "0.0797 s over 0.0625 s")
def _sent_over_backward(ratio: float, note: str) -> Result:
    return own(ratio, note)


def _k80_over_v100(of: Setting) -> pd.DataFrame:
    """Return the least efficiency on K80 divided by that on V100 GPUs, by network."""
    # The first level of the columns is the figure.
    efficiency = pd.DataFrame(efficiencies(of))[3]
    return settings.of_each(efficiency["K80"] / efficiency["V100"], "min")


def _ranks_of_caffe_mpi(of: Setting) -> pd.DataFrame:
    """Return the rank of Caffe-MPI among the frameworks, by network and cluster.

    There is a row for each of the settings ``of``.
    """
    # The first level of the columns is the figure. The next three are the cluster, the
    # network and the framework.
    efficiency = pd.DataFrame(efficiencies(of))[3]
    ranks = {}
    for network in NETWORKS:
        for cluster in CLUSTERS:
            ranks[network, cluster] = rank(efficiency[cluster][network], "Caffe-MPI")
    return pd.DataFrame(ranks)


def _best_on_v100(of: Setting) -> pd.DataFrame:
    """Return the largest efficiency of the frameworks on V100 GPUs, by network."""
    return settings.of_each(pd.DataFrame(efficiencies(of))[3]["V100"], "max")


def _best_but_caffe_mpi(of: Setting) -> pd.DataFrame:
    """Return the largest efficiency of the others on V100 GPUs, by network."""
    others = pd.DataFrame(efficiencies(of))[3]["V100"].drop(
        columns="Caffe-MPI", level=1
    )
    return settings.of_each(others, "max")


CASES = {
    "dag-fig03-k80-over-v100": _k80_over_v100,
    "dag-caffe-best": _ranks_of_caffe_mpi,
    "dag-finding3": _best_on_v100,
    "dag-fig03-poorly": _best_but_caffe_mpi,
}
"""The cases of which a claim may have the mean, as `settings.by_model` takes them."""


def _judge_statement(statement: str, claim: str) -> Result:
    # One claim is made "in general", so that only the mean counts.
    in_general = claim == "dag-fig03-k80-over-v100"
    cases = CASES.get(claim)
    return settings.by_model(statement, claim, cases, cases_decide=not in_general)


for _statement, _claim in {**OF_FIG03, LAYER_WISE: "dag-finding4"}.items():
    check(_claim, _statement, _claim)(_judge_statement)
