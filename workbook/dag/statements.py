"""What the dag paper states of Figs 2 and 3, as quantities that a setting determines.

The statements are in Sections I and V-C. What is said of no single network is taken of
the mean over the networks, for each framework.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from itertools import product
from typing import Any

import numpy as np
import pandas as pd

from ddlkit.core.strategies import STRATEGIES
from ddlkit.core.taskgraph import Gpus
from workbook.common.claims import load_claims
from workbook.dag.cluster import (
    CLUSTERS,
    MACHINES,
    NETWORKS,
    PER_MACHINE,
    Setting,
    layer_bytes,
)

TIED = 0.01
"""Efficiencies that differ by a smaller share have the same rank."""
DECODERS = [name for name, strategy in STRATEGIES.items() if strategy.decodes_on_cpu]
"""The frameworks that decode JPEG images: CNTK and TensorFlow."""
OTHERS = [name for name in STRATEGIES if name not in DECODERS]
"""The frameworks that read decoded images."""
SMALL_BATCHES = ("GoogleNet", "ResNet-50")
"""The networks with small batches, all but AlexNet."""
LAYER_WISE = "V100 cluster: messages by layer over one"
"""The time of all messages of ResNet-50 divided by that of one message with as many bytes."""
Efficiencies = dict[tuple[int, str, str, str], Any]
"""Efficiencies by bar: the number of the figure, cluster, network and framework.

Each is a number or an array over settings."""

OF_FIG02 = {
    "K80 machine: all scale well, but CNTK and TensorFlow on AlexNet": "dag-fig02-good",
    "K80 machine: CNTK and TensorFlow scale worse on AlexNet than the others": (
        "dag-fig02-decoding"
    ),
    "one machine: K80 scales better than V100": "dag-fig02-k80-over-v100",
    "one machine: K80 scales far better than V100 on AlexNet": "dag-fig02-storage",
    "V100 machine: reading takes no extra time": "dag-fig02-reading",
    "V100 machine: messages take extra time": "dag-fig02-messages",
}
OF_FIG03 = {
    "both clusters: K80 scales better than V100": "dag-fig03-k80-over-v100",
    "K80 cluster: Caffe-MPI and MXNet scale nearly linearly": "dag-fig03-linear",
    "K80 cluster: no framework scales well on AlexNet": "dag-fig03-alexnet",
    "K80 cluster: TensorFlow scales worst on ResNet-50": "dag-fig03-tensorflow",
    "both clusters: Caffe-MPI scales best": "dag-caffe-best",
    "V100 cluster: no framework scales well": "dag-finding3",
    "V100 cluster: all but Caffe-MPI scale poorly": "dag-fig03-poorly",
}
STATEMENTS = {**OF_FIG02, **OF_FIG03}
"""The claims about Figs 2 and 3 by the name of their quantity.

The efficiency of 95% is not among them, because `Setting.varies` was put on the grid
for its sake."""

SMALL = "GoogLeNet and ResNet-50, each"
ALL = "mean of three"
IN_WORDS = {
    "K80 machine: all scale well, but CNTK and TensorFlow on AlexNet": (
        "K80, one machine",
        "each of the three",
        "every framework has an efficiency of at least 80%, "
        "but CNTK and TensorFlow on AlexNet need not",
    ),
    "K80 machine: CNTK and TensorFlow scale worse on AlexNet than the others": (
        "K80, one machine",
        "AlexNet",
        "CNTK and TensorFlow are at least 10% less efficient than Caffe-MPI and MXNet",
    ),
    "one machine: K80 scales better than V100": (
        "K80 and V100, one machine",
        ALL,
        "every framework is at least as efficient on K80 as on V100",
    ),
    "one machine: K80 scales far better than V100 on AlexNet": (
        "K80 and V100, one machine",
        "AlexNet",
        "every framework is at least 25% more efficient on K80 than on V100",
    ),
    "V100 machine: reading takes no extra time": (
        "V100, one machine",
        SMALL,
        "reading makes an iteration on four GPUs at most 1% longer in every framework",
    ),
    "V100 machine: messages take extra time": (
        "V100, one machine",
        SMALL,
        "messages make an iteration on four GPUs at least 1% longer, "
        "on average over the frameworks",
    ),
    "both clusters: K80 scales better than V100": (
        "K80 and V100, four machines",
        ALL,
        "every framework is at least as efficient on K80 as on V100",
    ),
    "K80 cluster: Caffe-MPI and MXNet scale nearly linearly": (
        "K80, four machines",
        SMALL,
        "Caffe-MPI and MXNet have a speedup of at least 3.6",
    ),
    "K80 cluster: no framework scales well on AlexNet": (
        "K80, four machines",
        "AlexNet",
        "no framework has an efficiency above 90%",
    ),
    "K80 cluster: TensorFlow scales worst on ResNet-50": (
        "K80, four machines",
        "ResNet-50",
        "TensorFlow scales worst",
    ),
    "both clusters: Caffe-MPI scales best": (
        "K80 and V100, four machines",
        ALL,
        "no framework is more than 1% more efficient than Caffe-MPI",
    ),
    "V100 cluster: no framework scales well": (
        "V100, four machines",
        ALL,
        "no framework has an efficiency above 90%",
    ),
    "V100 cluster: all but Caffe-MPI scale poorly": (
        "V100, four machines",
        ALL,
        "CNTK, MXNet and TensorFlow have an efficiency of at most 90%",
    ),
}
"""Each statement for a table: the GPUs, the networks, and the effect with its limit."""


def in_words(table: pd.DataFrame) -> pd.DataFrame:
    """Return a table with GPUs, networks and effect instead of its ``statement``."""
    words = [IN_WORDS[statement] for statement in table["statement"]]
    columns = pd.DataFrame(words, columns=["GPUs", "networks", "effect"])
    columns.index = table.index
    return columns.join(table.drop(columns="statement"))


def efficiencies(setting: Setting) -> Efficiencies:
    """Return the 48 efficiencies: of two figures, 2 clusters, 3 networks and 4 frameworks.

    An efficiency is the speedup over the linear speedup. Fig 2 compares the four GPUs of a
    machine with one GPU. Fig 3 compares four machines with one machine.
    """
    one_gpu = Gpus(1, 1)
    one_machine = Gpus(1, PER_MACHINE)
    all_machines = Gpus(MACHINES, PER_MACHINE)
    # By the number of the figure, the fewer and the more GPUs that it compares.
    sizes = {2: (one_gpu, one_machine), 3: (one_machine, all_machines)}
    by_bar = {}
    for figure, (few, many) in sizes.items():
        # STRATEGIES has the names of the frameworks.
        for case in product(CLUSTERS, NETWORKS, STRATEGIES):
            few_s = setting.iteration_s(*case, few)
            many_s = setting.iteration_s(*case, many)
            # With weak scaling, an iteration takes as long on more GPUs if the speedup is
            # linear.
            by_bar[(figure, *case)] = few_s / many_s
    return by_bar


def quantities(setting: Setting) -> dict[str, Any]:
    """Return the quantities of the paper's statements, by the name of the statement.

    Each is a number, or an array over the settings if the fields of ``setting`` are
    arrays.
    """
    efficiency = efficiencies(setting)
    # By which factor reading makes an iteration longer, by network and framework. The statement
    # is that no factor is much above 1. It holds for all if it holds for the largest.
    slower_by_reading = slower(setting, "reading")
    return {
        **_one_machine(efficiency),
        **_four_machines(efficiency),
        "V100 machine: reading takes no extra time": _largest(
            slower_by_reading.values()
        ),
        "V100 machine: messages take extra time": _slower_by_messages(setting),
        LAYER_WISE: _layer_wise_over_one(setting),
    }


def _least(values: Iterable[Any]) -> Any:
    """Return the least of several numbers or arrays, element by element."""
    return reduce(np.minimum, values)


def _largest(values: Iterable[Any]) -> Any:
    """Return the largest of several numbers or arrays, element by element."""
    return reduce(np.maximum, values)


def _mean(values: Sequence[Any]) -> Any:
    """Return the mean of several numbers or arrays, element by element."""
    return reduce(np.add, values) / len(values)


def _slower_by_messages(setting: Setting) -> Any:
    """Return by which factor messages make an iteration longer on four V100.

    The factor is the mean over the frameworks. The statement is about both networks with
    small batches, so that it must hold for the smaller of their two means.
    """
    factors = slower(setting, "sending")
    means = []
    # The names of the networks, GoogleNet and ResNet-50.
    for network in SMALL_BATCHES:
        means.append(_mean([factors[network, name] for name in STRATEGIES]))
    return _least(means)


def _layer_wise_over_one(setting: Setting) -> Any:
    """Return the time of ResNet-50's messages, one a layer, divided by that of a single message.

    The single message has as many bytes as the others together.
    """
    gpus = Gpus(MACHINES, PER_MACHINE)
    # The cost is that of Caffe-MPI, which sends by NCCL. The paper blames messages by layer for
    # the low use of InfiniBand (9.6%), which it states for NCCL.
    start_s, s_per_byte = setting.message("V100", "Caffe-MPI", gpus)
    n_bytes = layer_bytes("ResNet-50")
    wire_s = n_bytes.sum() * s_per_byte
    messages = len(n_bytes)
    return (messages * start_s + wire_s) / (start_s + wire_s)


def _means(
    efficiency: Efficiencies, figure: int, cluster: str, *networks: str
) -> dict[str, Any]:
    """Return the mean efficiency over some networks, by framework.

    ``figure``, ``cluster`` and ``networks`` are parts of the keys of ``efficiency``.
    """
    means = {}
    for name in STRATEGIES:
        of_networks = [
            efficiency[figure, cluster, network, name] for network in networks
        ]
        means[name] = _mean(of_networks)
    return means


def _one_machine(efficiency: Efficiencies) -> dict[str, Any]:
    """Return the quantities of the statements about the GPUs of one machine."""
    # Efficiencies by network and framework. The first part of a key of ``efficiency`` is
    # the figure, and Fig 2 is about one machine.
    k80 = {}
    v100 = {}
    for case in product(NETWORKS, STRATEGIES):
        k80[case] = efficiency[(2, "K80", *case)]
        v100[case] = efficiency[(2, "V100", *case)]
    k80_means = _means(efficiency, 2, "K80", *NETWORKS)
    v100_means = _means(efficiency, 2, "V100", *NETWORKS)

    # The paper excepts CNTK and TensorFlow on AlexNet, which decoding limits.
    decoding = {("AlexNet", name): k80["AlexNet", name] for name in DECODERS}
    least_not_decoding = _least(k80["AlexNet", name] for name in OTHERS)
    least_of_others = _least(k80[case] for case in k80 if case not in decoding)

    # A statement about every framework must hold for the one with the least ratio.
    k80_over_v100 = _least(k80_means[name] / v100_means[name] for name in STRATEGIES)
    on_alexnet = _least(
        k80["AlexNet", name] / v100["AlexNet", name] for name in STRATEGIES
    )
    return {
        "K80 machine: best efficiency is 95%": _largest(k80.values()),
        "K80 machine: all scale well, but CNTK and TensorFlow on AlexNet": (
            least_of_others
        ),
        # Even the better of both must be worse than the worst of the others.
        "K80 machine: CNTK and TensorFlow scale worse on AlexNet than the others": (
            _largest(decoding.values()) / least_not_decoding
        ),
        "one machine: K80 scales better than V100": k80_over_v100,
        "one machine: K80 scales far better than V100 on AlexNet": on_alexnet,
    }


def slower(setting: Setting, part: str) -> dict[tuple[str, str], Any]:
    """Return by which factor a part makes an iteration longer on four V100 of a machine.

    Parameters
    ----------
    setting : Setting
        One or many settings.
    part : {"reading", "sending"}
        The part. The iteration is compared with one in which the part takes no time.

    Returns
    -------
    dict of (str, str) to float or ndarray
        The factor, at least 1, for each network of SMALL_BATCHES (GoogleNet and ResNet-50)
        and each framework.
    """
    gpus = Gpus(1, PER_MACHINE)
    factors = {}
    for network, framework in product(SMALL_BATCHES, STRATEGIES):
        case = ("V100", network, framework, gpus)
        with_part_s = setting.iteration_s(*case)
        without_part_s = setting.iteration_s(*case, without=part)
        factors[network, framework] = with_part_s / without_part_s
    return factors


def _four_machines(efficiency: Efficiencies) -> dict[str, Any]:
    """Return the quantities of the statements about four machines."""
    # Means over all networks by framework. The first part of a key of ``efficiency`` is the
    # figure, and Fig 3 is about four machines.
    k80 = _means(efficiency, 3, "K80", *NETWORKS)
    v100 = _means(efficiency, 3, "V100", *NETWORKS)
    # A statement about every framework must hold for the one with the least ratio.
    k80_over_v100 = _least(k80[name] / v100[name] for name in STRATEGIES)

    # The paper calls the speedup nearly linear for GoogleNet and ResNet-50, not for AlexNet.
    # SMALL_BATCHES has the names of these two networks.
    least_of_linear = _least(
        efficiency[3, "K80", network, name]
        for network, name in product(SMALL_BATCHES, ["Caffe-MPI", "MXNet"])
    )
    k80_alexnet = _means(efficiency, 3, "K80", "AlexNet")
    k80_resnet = _means(efficiency, 3, "K80", "ResNet-50")
    # A statement about both clusters must hold on the cluster where Caffe-MPI ranks worse.
    worse_rank = np.maximum(rank(k80, "Caffe-MPI"), rank(v100, "Caffe-MPI"))
    all_but_caffe = [value for name, value in v100.items() if name != "Caffe-MPI"]
    return {
        "both clusters: K80 scales better than V100": k80_over_v100,
        # The claim is about the speedup of four machines over one, not the efficiency.
        "K80 cluster: Caffe-MPI and MXNet scale nearly linearly": (
            MACHINES * least_of_linear
        ),
        "K80 cluster: no framework scales well on AlexNet": _largest(
            k80_alexnet.values()
        ),
        "K80 cluster: TensorFlow scales worst on ResNet-50": rank(
            k80_resnet, "TensorFlow"
        ),
        "both clusters: Caffe-MPI scales best": worse_rank,
        "V100 cluster: no framework scales well": _largest(v100.values()),
        "V100 cluster: all but Caffe-MPI scale poorly": _largest(all_but_caffe),
    }


def rank(efficiency: Mapping[str, Any] | pd.DataFrame, name: str) -> Any:
    """Return the rank of a framework: 1 plus how many others scale better.

    Parameters
    ----------
    efficiency : mapping of str to float or ndarray, or DataFrame
        The efficiencies by framework. A DataFrame has a column for each.
    name : str
        The framework.

    Returns
    -------
    float or ndarray
        The rank, in each setting if the efficiencies are arrays.
    """
    # Another framework is better only if its efficiency is higher by more than the share
    # TIED.
    limit = efficiency[name] * (1 + TIED)
    are_better = []
    for other, value in efficiency.items():
        if other != name:
            # The grid has many settings, for which int8 takes little memory.
            are_better.append((np.asarray(value) > limit).astype(np.int8))
    return 1.0 + reduce(np.add, are_better)


def unit(claim: str) -> float:
    """Return the factor that turns a claim's numbers into those of its quantity.

    It is 0.01 if the claim is in per cent, because quantities are plain numbers, and else 1.
    ``claim`` is the id of the claim.
    """
    units = {listed.id: listed.unit for listed in load_claims()}
    return 0.01 if units[claim] == "%" else 1.0
