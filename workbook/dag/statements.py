"""What dag states of Figs 2 and 3 (V-C, I), as quantities that can be computed of a setting."""

from __future__ import annotations

from functools import partial, reduce
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
"""Efficiencies that differ by less, relatively, have one rank."""
DECODERS = [name for name, strategy in STRATEGIES.items() if strategy.decodes_on_cpu]
SMALL_BATCHES = ("GoogleNet", "ResNet-50")
LAYER_WISE = "V100 cluster: messages by layer over one"
"""In time, ResNet-50's."""
Efficiencies = dict[tuple[int, str, str, str], Any]
"""Of a bar in a figure: (number of the figure, cluster, network, framework) -> a number, or an array."""

OF_FIG02 = {
    "K80 machine: all scale well, but CNTK and TensorFlow on AlexNet": "dag-fig02-good",
    "K80 machine: CNTK and TensorFlow scale worse on AlexNet than the others": "dag-fig02-decoding",
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
"""What dag says of Figs 2 and 3, by quantity and claim; not the 95%, for which `varies` is on the grid."""

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
    """Return a table whose column ``statement`` is replaced by GPUs, networks and effect."""
    words = [IN_WORDS[statement] for statement in table["statement"]]
    columns = pd.DataFrame(words, columns=["GPUs", "networks", "effect"])
    columns.index = table.index
    return columns.join(table.drop(columns="statement"))


def efficiencies(setting: Setting) -> Efficiencies:
    """Return all 48 efficiencies: of four GPUs over one (dag Fig 2), of four machines over one (Fig 3)."""
    sizes = {2: (Gpus(), Gpus(1, PER_MACHINE)), 3: (Gpus(1, 4), Gpus(MACHINES, 4))}
    return {
        (figure, *case): setting.iteration_s(*case, few)
        / setting.iteration_s(*case, many)
        for figure, (few, many) in sizes.items()
        for case in product(CLUSTERS, NETWORKS, STRATEGIES)
    }


def quantities(setting: Setting) -> dict[str, Any]:
    """Return what the paper states (dag V-C, I), by name: numbers, or the setting's arrays."""
    efficiency = efficiencies(setting)
    return {
        **_one_server(efficiency),
        **_four_machines(efficiency),
        "V100 machine: reading takes no extra time": _most(
            slower(setting, "reading").values()
        ),
        "V100 machine: messages take extra time": _slower_by_messages(setting),
        LAYER_WISE: _layer_wise_over_one(setting),
    }


def _slower_by_messages(setting: Setting) -> Any:
    """Return the lesser of two networks' mean over the frameworks."""
    waits = slower(setting, "sending")
    each = ([waits[network, name] for name in STRATEGIES] for network in SMALL_BATCHES)
    return _least(reduce(np.add, of) / len(of) for of in each)


def _layer_wise_over_one(setting: Setting) -> Any:
    """Return the time of all of ResNet-50's messages over that of one with as many bytes."""
    gpus, sizes = Gpus(MACHINES, PER_MACHINE), layer_bytes("ResNet-50")
    start_s, per_byte = setting.message("V100", "Caffe-MPI", gpus)
    sent_s = sizes.sum() * per_byte
    return (len(sizes) * start_s + sent_s) / (start_s + sent_s)


def _means(
    efficiency: Efficiencies, figure: int, cluster: str, *networks: str
) -> dict[str, Any]:
    """Return each framework's mean over the networks."""
    return {
        name: reduce(
            np.add,
            [efficiency[figure, cluster, network, name] for network in networks],
        )
        / len(networks)
        for name in STRATEGIES
    }


_least = partial(reduce, np.minimum)
_most = partial(reduce, np.maximum)


def _one_server(efficiency: Efficiencies) -> dict[str, Any]:
    k80, v100 = (
        {
            case: efficiency[(2, cluster, *case)]
            for case in product(NETWORKS, STRATEGIES)
        }
        for cluster in CLUSTERS
    )
    slow = {("AlexNet", name): k80["AlexNet", name] for name in DECODERS}
    means, fast = (_means(efficiency, 2, cluster, *NETWORKS) for cluster in CLUSTERS)
    return {
        "K80 machine: best efficiency is 95%": _most(k80.values()),
        "K80 machine: all scale well, but CNTK and TensorFlow on AlexNet": _least(
            k80[case] for case in k80.keys() - slow
        ),
        "K80 machine: CNTK and TensorFlow scale worse on AlexNet than the others": _most(
            slow.values()
        )
        / _least(k80["AlexNet", name] for name in STRATEGIES if name not in DECODERS),
        "one machine: K80 scales better than V100": _least(
            means[name] / fast[name] for name in STRATEGIES
        ),
        "one machine: K80 scales far better than V100 on AlexNet": _least(
            k80["AlexNet", name] / v100["AlexNet", name] for name in STRATEGIES
        ),
    }


def slower(setting: Setting, what: str) -> dict[tuple[str, str], Any]:
    """Return how much longer SMALL_BATCHES take on four V100 by reading, or by sending, by framework."""
    keys, gpus = [*product(SMALL_BATCHES, STRATEGIES)], Gpus(1, PER_MACHINE)
    cases = {case: ("V100", *case, gpus) for case in keys}
    return {
        name: setting.iteration_s(*case) / setting.iteration_s(*case, without=what)
        for name, case in cases.items()
    }


def _four_machines(efficiency: Efficiencies) -> dict[str, Any]:
    """Return the rest; here too what is said of no network is taken of a framework's mean."""
    k80, v100 = (_means(efficiency, 3, cluster, *NETWORKS) for cluster in CLUSTERS)
    nearly = product(SMALL_BATCHES, ["Caffe-MPI", "MXNet"])
    poor = (value for name, value in v100.items() if name != "Caffe-MPI")
    return {
        "both clusters: K80 scales better than V100": _least(
            k80[name] / v100[name] for name in STRATEGIES
        ),
        "K80 cluster: Caffe-MPI and MXNet scale nearly linearly": MACHINES
        * _least(efficiency[(3, "K80", *case)] for case in nearly),
        "K80 cluster: no framework scales well on AlexNet": _most(
            _means(efficiency, 3, "K80", "AlexNet").values()
        ),
        "K80 cluster: TensorFlow scales worst on ResNet-50": rank(
            _means(efficiency, 3, "K80", "ResNet-50"), "TensorFlow"
        ),
        "both clusters: Caffe-MPI scales best": _most(
            rank(means, "Caffe-MPI") for means in (k80, v100)
        ),
        "V100 cluster: no framework scales well": _most(v100.values()),
        "V100 cluster: all but Caffe-MPI scale poorly": _most(poor),
    }


def rank(efficiency: Any, name: str) -> Any:
    """Return 1 plus how many frameworks scale better."""
    own = efficiency[name] * (1 + TIED)
    others = (np.asarray(value) for other, value in efficiency.items() if other != name)
    return 1.0 + reduce(np.add, [(other > own).astype(np.int8) for other in others])


def unit(claim: str) -> float:
    """Return a claim's unit in quantities: 0.01 where it is in per cent."""
    return {each.id: 0.01 if each.unit == "%" else 1.0 for each in load_claims()}[claim]
