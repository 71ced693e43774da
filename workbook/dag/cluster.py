"""dag's two clusters (Tables II to IV) by its DAG: what is stated, a grid over what is not, and Figs 2 and 3.

Taken: forward is half of backward (five of Table VI's forwards cannot be, errata 9), a layer's share is that
of its FLOP, GoogleNet has its two heads (errata 14), CNTK and TensorFlow read ImageNet's own JPEG files.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial, reduce
from itertools import product
from statistics import NormalDist
from typing import Any, ClassVar

import numpy as np

from ddlkit.core.strategies import STRATEGIES
from ddlkit.core.taskgraph import Gpus
from ddlkit.core.workload import Floats, Ints
from workbook.common import networks
from workbook.dag.equations import steady_s
from workbook.osf.equations import update_s

PER_MACHINE, MACHINES = 4, 4
NETWORKS = {"AlexNet": "alexnet", "GoogleNet": "googlenet_aux", "ResNet-50": "resnet50"}
BATCH = {"AlexNet": 1024, "GoogleNet": 64, "ResNet-50": 32}
ALEXNET_BACKWARD_S = (
    3.36214396  # on a K80: the sum of dag Tab VI's column, with waiting (errata 10)
)
JPEG_BYTES = 110e3  # of an image of ImageNet's training set: 138 GB of 1.28 million
MEMORY_BYTES_PER_S = 3.5e9


@dataclass(frozen=True)
class Cluster:
    """A column of dag Tab II, and ResNet-50's backward and communication among 16 GPUs there (dag V-C)."""

    connection_bytes_per_s: float
    network_bytes_per_s: float
    storage_bytes_per_s: float
    backward_s: float
    sent_s: float


CLUSTERS = {
    "K80": Cluster(15e9, 1.25e9, 1.1e9, 0.243, 0.23),
    "V100": Cluster(95e9, 12.5e9, 367.3e6, 0.0625, 0.0797),
}
LIKE_RESNET = CLUSTERS["K80"].backward_s / CLUSTERS["V100"].backward_s
LIKE_PEAKS = 125 / 4.37  # how much faster a V100 is than a K80, by the peaks of dag V-C


@dataclass(frozen=True)
class Setting:
    """What the paper leaves out. Each field is a number, or an array that broadcasts with the others.

    stored_bytes : an image as Caffe-MPI and MXNet read it
    nfs_bytes_per_s : of all K80 machines together; one alone, 1.1 GB/s by Table II
    disk_bytes_per_s : of a machine of the V100 cluster, its SSD's or more from memory
    decoded_per_s : JPEG images by a machine with K80; gold_faster : of one with V100 over that
    copy_s : one image to a GPU; alexnet_backward_s : of a K80; alexnet_speedup : of a V100 over that
    googlenet_rate : FLOP/s of GoogleNet over those of ResNet-50
    ethernet_start, infiniband_start : of ResNet-50's time beyond the wire's, the share paid by message
    inside_share, inside_start_s : rate over the connection's, start-up, among the GPUs of a machine
    mxnet_slower, grpc_slower : MXNet's messages over InfiniBand, TensorFlow's between machines, over NCCL's
    varies : standard deviation of computing from GPU to GPU; all wait for the slowest
    """

    stored_bytes: Any
    nfs_bytes_per_s: Any
    disk_bytes_per_s: Any
    decoded_per_s: Any
    gold_faster: Any
    copy_s: Any
    alexnet_backward_s: Any
    alexnet_speedup: Any
    googlenet_rate: Any
    ethernet_start: Any
    infiniband_start: Any
    inside_share: Any
    inside_start_s: Any
    mxnet_slower: Any
    grpc_slower: Any
    varies: Any

    def backward_s(self, cluster: str, network: str, n: int = 1) -> Any:
        """Return seconds of one GPU's batch; of the slowest of ``n``, expected (Blom's approximation)."""
        slowest = 1.0 + self.varies * NormalDist().inv_cdf((n - 0.375) / (n + 0.25))
        if network == "AlexNet":
            faster = self.alexnet_speedup if cluster == "V100" else 1.0
            return self.alexnet_backward_s * slowest / faster
        rate = self.googlenet_rate if network == "GoogleNet" else 1.0
        return like_resnet_s(cluster, network) / rate * slowest

    def message(self, cluster: str, framework: str, gpus: Gpus) -> tuple[Any, Any]:
        """Return start-up in seconds, and seconds a byte, of a message that all GPUs add up in a ring."""
        stated, n = CLUSTERS[cluster], gpus.n
        if n == 1:
            return 0.0, 0.0
        if gpus.machines == 1:
            wire = float(update_s(1.0, n, stated.connection_bytes_per_s))
            return self.inside_start_s * (n - 1) / (
                PER_MACHINE - 1
            ), wire / self.inside_share
        most, resnet = MACHINES * PER_MACHINE, layer_bytes("ResNet-50")
        share = self.ethernet_start if cluster == "K80" else self.infiniband_start
        wire_s = float(update_s(resnet.sum(), most, stated.network_bytes_per_s))
        over_s = stated.sent_s - wire_s
        start_s = share * over_s / len(resnet) * (n - 1) / (most - 1)
        by_rate = 1 + (1 - share) * over_s / wire_s
        slower = {("MXNet", "V100"): self.mxnet_slower}.get((framework, cluster), 1.0)
        slower = self.grpc_slower if framework == "TensorFlow" else slower
        wire = float(update_s(1.0, n, stated.network_bytes_per_s))
        return slower * start_s, slower * by_rate * wire

    def sent_s(
        self, cluster: str, network: str, framework: str, gpus: Gpus
    ) -> tuple[Any, Any]:
        """Return what all messages take, and how much of it backward does not hide (t_c^no of dag Eq 5)."""
        start_s, per_byte = self.message(cluster, framework, gpus)
        n_bytes, shares = layer_bytes(network)[::-1], layer_shares(network)[::-1]
        left = np.cumsum(n_bytes[::-1])[::-1]
        backward_s = self.backward_s(cluster, network, gpus.n)
        ways = (
            (ready - 1) * backward_s + (len(left) - k) * start_s + left[k] * per_byte
            for k, ready in enumerate(np.cumsum(shares))
        )
        return len(left) * start_s + left[0] * per_byte, reduce(np.maximum, ways)

    def reads_s(self, cluster: str, network: str, framework: str, gpus: Gpus) -> Any:
        """Return seconds until all machines have read an iteration's batches, which they do side by side."""
        stored = (
            JPEG_BYTES if STRATEGIES[framework].decodes_on_cpu else self.stored_bytes
        )
        together = gpus.machines * self.disk_bytes_per_s
        if cluster == "K80":
            alone = np.maximum(
                CLUSTERS["K80"].storage_bytes_per_s, self.nfs_bytes_per_s / MACHINES
            )
            together = np.minimum(self.nfs_bytes_per_s, gpus.machines * alone)
        return gpus.n * BATCH[network] * stored / together

    def decode_s(self, cluster: str, network: str) -> Any:
        """Return seconds of one GPU's batch, where a framework decodes."""
        faster = self.gold_faster if cluster == "V100" else 1.0
        return BATCH[network] / (self.decoded_per_s * faster)

    def iteration_s(
        self, cluster: str, network: str, framework: str, gpus: Gpus, without: str = ""
    ) -> Any:
        """Time between updates (dag Eq 5 repaired); ``without`` "reading" or "sending" that is for free."""
        strategy, batch = STRATEGIES[framework], BATCH[network]
        whole_s, exposed_s = self.sent_s(cluster, network, framework, gpus)
        sent_s = exposed_s if strategy.sends_during_backward else whole_s
        reads_s = self.reads_s(cluster, network, framework, gpus)
        compute_s = 1.5 * self.backward_s(cluster, network, gpus.n)
        return steady_s(
            0.0 * reads_s if without == "reading" else reads_s,
            gpus.per_machine * self.decode_s(cluster, network),
            batch * self.copy_s,
            compute_s + (0.0 if without == "sending" else sent_s),
            strategy,
        )


def like_resnet_s(cluster: str, network: str) -> float:
    """Return what backward of a batch takes at the FLOP/s of ResNet-50."""
    work = {
        name: BATCH[name] * networks.multiply_adds(NETWORKS[name]) for name in BATCH
    }
    return CLUSTERS[cluster].backward_s * work[network] / work["ResNet-50"]


@cache
def layer_bytes(network: str) -> Ints:
    """Return (L,) bytes of gradients in single precision, forward order."""
    return np.array(
        [4 * sum(layer.tensors) for layer in networks.layers(NETWORKS[network])]
    )


@cache
def layer_shares(network: str) -> Floats:
    """Return (L,) shares of the network's FLOP, forward order."""
    flops = np.array(
        [layer.multiply_adds for layer in networks.layers(NETWORKS[network])], float
    )
    return flops / flops.sum()


_NFS, _DISK = (CLUSTERS[name].storage_bytes_per_s for name in ("K80", "V100"))
_SCANNED = {
    "stored_bytes": (3 * 224.0**2, 3 * 256.0**2, 4 * 3 * 224.0**2),  # bytes, or floats
    "nfs_bytes_per_s": (_NFS, MACHINES * _NFS, MACHINES * MEMORY_BYTES_PER_S),
    "disk_bytes_per_s": (
        _DISK,
        np.sqrt(_DISK * MEMORY_BYTES_PER_S),
        MEMORY_BYTES_PER_S,
    ),
    "decoded_per_s": (500.0, 1000.0, 2000.0, 8000.0),
    "gold_faster": (1.0, 2.0),
    "copy_s": (1e-5, 1.6e-4),  # 150 KB at 15 GB/s to 602 KB at 3.8 GB/s
    "alexnet_backward_s": np.geomspace(
        like_resnet_s("K80", "AlexNet"), ALEXNET_BACKWARD_S, 3
    ),
    "alexnet_speedup": np.geomspace(LIKE_RESNET, LIKE_PEAKS, 3),
    "googlenet_rate": (0.7, 1.0),
    "ethernet_start": (0.0, 1.0),
    "infiniband_start": (0.0, 1.0),
    "inside_share": (0.1, 0.3, 1.0),
    "inside_start_s": (1e-5, 1e-4, 3e-4, 1e-3),
    "mxnet_slower": (1.0, 2.0, 4.0),
    "grpc_slower": (1.0, 3.0, 8.0),
    "varies": (0.0, 0.02, 0.05, 0.1),
}


class Grid:
    """Every combination of ``free``, the scanned numbers by field of `Setting`; shape : how many of each.

    A first grid, without ``varies`` and ``gold_faster`` and with MXNet slower on Ethernet too, agreed with
    half of what the paper states; these were added then.
    """

    free: ClassVar[Mapping[str, Floats]] = {
        name: np.asarray(v) for name, v in _SCANNED.items()
    }
    shape: ClassVar[tuple[int, ...]] = tuple(
        len(values) for values in _SCANNED.values()
    )

    def settings(self) -> Setting:
        """Return all at once: each field an array along its own axis."""
        return Setting(**dict(zip(self.free, np.ix_(*self.free.values()), strict=True)))

    def at(self, places: Ints) -> Setting:
        """Return those at (s, axes) places of the grid: each field (s,)."""
        columns = zip(self.free.items(), np.asarray(places).T, strict=True)
        return Setting(**{name: values[where] for (name, values), where in columns})


TIED = 0.01  # efficiencies that differ by less, relatively, have one rank
DECODERS = [name for name, strategy in STRATEGIES.items() if strategy.decodes_on_cpu]
SMALL_BATCHES = ("GoogleNet", "ResNet-50")
LAYER_WISE = "V100 cluster: messages by layer over one"  # in time, ResNet-50's
Bars = dict[tuple[int, str, str, str], Any]


def bars(setting: Setting) -> Bars:
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
    efficiency = bars(setting)
    values = {**_one_server(efficiency), **_four_machines(efficiency)}
    start_s, per_byte = setting.message(
        "V100", "Caffe-MPI", Gpus(MACHINES, PER_MACHINE)
    )
    sizes = layer_bytes("ResNet-50")
    sent_s = sizes.sum() * per_byte
    values["V100 server: reading costs nothing"] = _most(
        slower(setting, "reading").values()
    )
    waits = slower(setting, "sending")
    each = ([waits[network, name] for name in STRATEGIES] for network in SMALL_BATCHES)
    values["V100 server: messages limit"] = _least(
        reduce(np.add, of) / len(of) for of in each
    )
    return {**values, LAYER_WISE: (len(sizes) * start_s + sent_s) / (start_s + sent_s)}


def _means(bars: Bars, figure: int, cluster: str, *networks: str) -> dict[str, Any]:
    """Return each framework's mean over the networks."""
    return {
        name: reduce(
            np.add, [bars[figure, cluster, network, name] for network in networks]
        )
        / len(networks)
        for name in STRATEGIES
    }


_least, _most = partial(reduce, np.minimum), partial(reduce, np.maximum)


def _one_server(bars: Bars) -> dict[str, Any]:
    k80, v100 = (
        {case: bars[(2, cluster, *case)] for case in product(NETWORKS, STRATEGIES)}
        for cluster in CLUSTERS
    )
    slow = {("AlexNet", name): k80["AlexNet", name] for name in DECODERS}
    means, fast = (_means(bars, 2, cluster, *NETWORKS) for cluster in CLUSTERS)
    return {
        "K80 server: best efficiency is 95%": _most(k80.values()),
        "K80 server: good, but AlexNet decoded": _least(
            k80[case] for case in k80.keys() - slow
        ),
        "K80 server: decoding spoils AlexNet": _most(slow.values())
        / _least(k80["AlexNet", name] for name in STRATEGIES if name not in DECODERS),
        "one server: K80 scales better": _least(
            means[name] / fast[name] for name in STRATEGIES
        ),
        "one server: K80 far better, AlexNet": _least(
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


def _four_machines(bars: Bars) -> dict[str, Any]:
    """Return the rest; here too what is said of no network is taken of a framework's mean."""
    k80, v100 = (_means(bars, 3, cluster, *NETWORKS) for cluster in CLUSTERS)
    nearly = product(SMALL_BATCHES, ["Caffe-MPI", "MXNet"])
    poor = (value for name, value in v100.items() if name != "Caffe-MPI")
    return {
        "four machines: K80 scales better": _least(
            k80[name] / v100[name] for name in STRATEGIES
        ),
        "K80 cluster: Caffe-MPI, MXNet linear": MACHINES
        * _least(bars[(3, "K80", *case)] for case in nearly),
        "K80 cluster: none scales AlexNet well": _most(
            _means(bars, 3, "K80", "AlexNet").values()
        ),
        "K80 cluster: TensorFlow is the worst": rank(
            _means(bars, 3, "K80", "ResNet-50"), "TensorFlow"
        ),
        "both clusters: Caffe-MPI is the best": _most(
            rank(efficiency, "Caffe-MPI") for efficiency in (k80, v100)
        ),
        "V100 cluster: none scales well": _most(v100.values()),
        "V100 cluster: all but Caffe-MPI poor": _most(poor),
    }


def rank(efficiency: Any, name: str) -> Any:
    """Return 1 plus how many frameworks scale better."""
    own = efficiency[name] * (1 + TIED)
    others = (np.asarray(value) for other, value in efficiency.items() if other != name)
    return 1.0 + reduce(np.add, [(other > own).astype(np.int8) for other in others])
