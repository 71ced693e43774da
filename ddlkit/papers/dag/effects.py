"""What dag says of its Figs 2 and 3 in words, as quantities of a setting of its clusters (dag V-C).

"Efficiency" is a speedup over what it would be if it were linear: of four GPUs over one (Fig 2), of four
machines over one (Fig 3). All are numbers, or arrays where the setting's fields are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import reduce
from itertools import product
from typing import Any

import numpy as np

from ddlkit.papers.dag import STRATEGIES
from ddlkit.papers.dag.cluster import CLUSTERS, MACHINES, NETWORKS, PER_MACHINE, Setting
from ddlkit.papers.dag.training import Gpus

TIED = 0.01
"""Relative: efficiencies that differ by less have one rank; as bars nobody can tell them apart."""
DECODERS = [name for name, strategy in STRATEGIES.items() if strategy.decodes_on_cpu]
OTHERS = [name for name in STRATEGIES if name not in DECODERS]
SMALL_BATCHES = ("GoogleNet", "ResNet-50")
Bars = dict[tuple[int, str, str, str], Any]
"""Efficiency by figure, cluster, network and framework."""


def bars(setting: Setting) -> Bars:
    """All 48 efficiencies of dag Figs 2 and 3."""
    cases = product((2, 3), CLUSTERS, NETWORKS, STRATEGIES)
    return {case: setting.efficiency(*case) for case in cases}


def quantities(setting: Setting) -> dict[str, Any]:
    """What the paper states of both figures, by name."""
    found = bars(setting)
    return {**_one_server(found), **_waiting(setting), **_four_machines(found)}


def _least(values: Iterable[Any]) -> Any:
    return reduce(np.minimum, values)


def _most(values: Iterable[Any]) -> Any:
    return reduce(np.maximum, values)


def _ratios(found: Bars, figure: int, networks: Iterable[str]) -> Any:
    """Least efficiency with K80 over that with V100, of four frameworks."""
    return _least(
        found[figure, "K80", network, name] / found[figure, "V100", network, name]
        for network, name in product(networks, STRATEGIES)
    )


def _one_server(found: Bars) -> dict[str, Any]:
    k80 = {case[2:]: value for case, value in found.items() if case[:2] == (2, "K80")}
    decoding = {("AlexNet", name) for name in DECODERS}
    slow, fast = (
        [k80["AlexNet", name] for name in frameworks] for frameworks in (DECODERS, OTHERS)
    )
    return {
        "K80 server: best efficiency is 95%": _most(k80.values()),
        "K80 server: good, but AlexNet decoded": _least(
            value for case, value in k80.items() if case not in decoding
        ),
        "K80 server: decoding spoils AlexNet": _most(slow) / _least(fast),
        "one server: K80 scales better": _ratios(found, 2, NETWORKS),
        "one server: K80 far better, AlexNet": _ratios(found, 2, ["AlexNet"]),
    }


def _waiting(setting: Setting) -> dict[str, Any]:
    """By how much an iteration of SMALL_BATCHES on four V100 waits for reading, and for messages."""
    whole: dict[str, list[Any]] = {"reading": [], "sending": []}
    for network, name in product(SMALL_BATCHES, STRATEGIES):
        case = "V100", network, name, Gpus(1, PER_MACHINE)
        taken_s = setting.iteration_s(*case)
        for what, slower in whole.items():
            slower.append(taken_s / setting.iteration_s(*case, without=what))
    return {
        "V100 server: reading costs nothing": _most(whole["reading"]),
        "V100 server: messages limit": _least(whole["sending"]),
    }


def _four_machines(found: Bars) -> dict[str, Any]:
    """What is said of no network in particular is taken of a framework's mean over the three."""
    four = {case[1:]: value for case, value in found.items() if case[0] == 3}
    mean = {
        (cluster, name): _mean(four[cluster, network, name] for network in NETWORKS)
        for cluster, name in product(CLUSTERS, STRATEGIES)
    }
    nearly = product(["K80"], SMALL_BATCHES, ["Caffe-MPI", "MXNet"])
    resnet = {name: four["K80", "ResNet-50", name] for name in STRATEGIES}
    best_by_cluster = [{name: mean[cluster, name] for name in STRATEGIES} for cluster in CLUSTERS]
    v100 = best_by_cluster[1]
    return {
        "four machines: K80 scales better": _least(
            mean["K80", name] / mean["V100", name] for name in STRATEGIES
        ),
        "K80 cluster: Caffe-MPI, MXNet linear": MACHINES * _least(four[case] for case in nearly),
        "K80 cluster: none scales AlexNet well": _most(
            four["K80", "AlexNet", name] for name in STRATEGIES
        ),
        "K80 cluster: TensorFlow is the worst": _rank(resnet, "TensorFlow"),
        "both clusters: Caffe-MPI is the best": _most(
            _rank(efficiency, "Caffe-MPI") for efficiency in best_by_cluster
        ),
        "V100 cluster: none scales well": _most(v100.values()),
        "V100 cluster: all but Caffe-MPI poor": _most(
            value for name, value in v100.items() if name != "Caffe-MPI"
        ),
    }


def _mean(values: Iterable[Any]) -> Any:
    listed = list(values)
    return reduce(np.add, listed) / len(listed)


def _rank(efficiency: Mapping[str, Any], name: str) -> Any:
    """1 plus how many frameworks scale better."""
    own = efficiency[name] * (1 + TIED)
    others = (np.asarray(value) for other, value in efficiency.items() if other != name)
    return 1.0 + reduce(np.add, [(other > own).astype(np.int8) for other in others])
