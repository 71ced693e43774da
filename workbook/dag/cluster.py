"""dag's two clusters (Tables II to IV) by its DAG: what is stated, and what a setting puts for what is not.

Taken: forward is half of backward (five of Table VI's forwards cannot be, errata 9), a layer's share is that
of its FLOP, GoogleNet has its two heads (errata 14), CNTK and TensorFlow read ImageNet's own JPEG files.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, reduce
from statistics import NormalDist
from typing import Any

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
SPELLED = {"GoogleNet": "GoogLeNet"}
"""The paper's spelling of a network -> that of its authors."""
ALEXNET_BACKWARD_S = 3.36214396
"""On a K80: the sum of dag Tab VI's column, with waiting (errata 10)."""
JPEG_BYTES = 110e3
"""Of an image of ImageNet's training set: 138 GB of 1.28 million."""
MEMORY_BYTES_PER_S = 3.5e9
OPERATIONS = {"K80": 2 * 2496, "V100": 2 * 640 * 64}
"""A cycle, by data sheets: of a GK210's 2496 lanes; of a V100's 640 Tensor Cores, 64 multiply-adds each."""
CLOCK_HZ = {"K80": 562e6, "V100": 1370e6}
"""Of dag V-A, where boost is off."""


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
"""How much faster a V100 is than a K80, by ResNet-50's backward."""
LIKE_PEAKS = 125 / 4.37
"""How much faster a V100 is than a K80, by the peaks of dag V-C."""


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
            start_s = self.inside_start_s * (n - 1) / (PER_MACHINE - 1)
            return start_s, wire / self.inside_share
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


def parameter_millions(network: str) -> float:
    """Return how many million parameters a network of `networks` has."""
    return sum(networks.parameters(network)) / 1e6
