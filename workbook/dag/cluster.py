"""The two clusters of the dag paper (Tables II to IV), as its task graph has them.

Table II gives the rates of the hardware. What the paper leaves out is a `Setting`. In
every setting,

- the forward pass takes half as long as the backward pass, because five of the forward
  times in Table VI cannot be right (errata 9),
- a layer has the share of the time that it has of the FLOP,
- GoogleNet has its two auxiliary heads (errata 14),
- CNTK and TensorFlow read the JPEG files of ImageNet.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from statistics import NormalDist
from typing import Any

import numpy as np

from ddlkit.core.strategies import STRATEGIES
from ddlkit.core.taskgraph import Gpus
from ddlkit.core.workload import Floats, Ints
from workbook.common import networks
from workbook.dag.equations import steady_s
from workbook.osf.equations import update_s

PER_MACHINE = 4
"""The GPUs of a machine."""
MACHINES = 4
"""The machines of a cluster."""
NETWORKS = {"AlexNet": "alexnet", "GoogleNet": "googlenet_aux", "ResNet-50": "resnet50"}
"""The names of the networks in `workbook.common.networks`, by the paper's spelling."""
BATCH = {"AlexNet": 1024, "GoogleNet": 64, "ResNet-50": 32}
"""The images of a GPU in one iteration (Table IV)."""
SPELLED = {"GoogleNet": "GoogLeNet"}
"""The authors' spelling of a network, by the paper's spelling."""
ALEXNET_BACKWARD_S = 3.36214396
"""The backward time of AlexNet on a K80, in seconds.

It is the sum of a column of Table VI, in which waiting counts (errata 10)."""
JPEG_BYTES = 110e3
"""The mean size of an image of ImageNet's training set: 138 GB over 1.28 million."""
MEMORY_BYTES_PER_S = 3.5e9
"""The rate at which a machine reads images that its memory holds."""
OPERATIONS = {"K80": 2 * 2496, "V100": 2 * 640 * 64}
"""The operations of a GPU in one cycle, by the data sheets.

A GK210, one of the two chips of a K80, has 2496 lanes. A V100 has 640 Tensor Cores,
each of 64 multiply-adds."""
CLOCK_HZ = {"K80": 562e6, "V100": 1370e6}
"""The clock of each GPU in Section V-A, where boost is off."""


@dataclass(frozen=True)
class Cluster:
    """What the paper states of a cluster.

    Attributes
    ----------
    connection_bytes_per_s : float
        The rate between the GPUs of a machine (Table II).
    network_bytes_per_s : float
        The rate between machines (Table II).
    storage_bytes_per_s : float
        The rate at which a machine reads its storage (Table II).
    backward_s : float
        The backward pass of ResNet-50, in seconds (Section V-C).
    sent_s : float
        The communication of ResNet-50 between 16 GPUs, in seconds (Section V-C).
    """

    connection_bytes_per_s: float
    network_bytes_per_s: float
    storage_bytes_per_s: float
    backward_s: float
    sent_s: float


CLUSTERS = {
    "K80": Cluster(
        connection_bytes_per_s=15e9,
        network_bytes_per_s=1.25e9,
        storage_bytes_per_s=1.1e9,
        backward_s=0.243,
        sent_s=0.23,
    ),
    "V100": Cluster(
        connection_bytes_per_s=95e9,
        network_bytes_per_s=12.5e9,
        storage_bytes_per_s=367.3e6,
        backward_s=0.0625,
        sent_s=0.0797,
    ),
}
LIKE_RESNET = CLUSTERS["K80"].backward_s / CLUSTERS["V100"].backward_s
"""How many times as fast as a K80 a V100 is, by the backward pass of ResNet-50."""
LIKE_PEAKS = 125 / 4.37
"""How many times as fast as a K80 a V100 is, by the peaks of Section V-C."""


@dataclass(frozen=True)
class Setting:
    """The numbers that the paper leaves out.

    Each field is a number, or an array that broadcasts with the arrays of the others.
    The methods return numbers or arrays of the broadcast shape.

    Attributes
    ----------
    stored_bytes
        The size of an image as Caffe-MPI and MXNet read it.
    nfs_bytes_per_s
        The rate of the file server for all K80 machines together. One machine alone
        reads 1.1 GB/s by Table II.
    disk_bytes_per_s
        The rate of a V100 machine. It is that of its SSD, or higher if memory helps.
    decoded_per_s
        The JPEG images that a K80 machine decodes per second.
    gold_faster
        How many times as many images a V100 machine decodes.
    copy_s
        The copy of one image to a GPU, in seconds.
    alexnet_backward_s
        The backward pass of AlexNet on a K80, in seconds.
    alexnet_speedup
        How many times as fast as a K80 a V100 computes AlexNet.
    googlenet_rate
        The FLOP/s of GoogleNet divided by those of ResNet-50.
    ethernet_start, infiniband_start
        ResNet-50's messages take longer than the wire needs. This is the share of the
        excess that is paid per message. The rest is paid per byte.
    inside_share
        The rate between the GPUs of a machine divided by that of their connection.
    inside_start_s
        The start-up of a message between the four GPUs of a machine, in seconds.
    mxnet_slower
        How many times as long as NCCL MXNet's messages take over InfiniBand.
    grpc_slower
        How many times as long as NCCL TensorFlow's messages between machines take.
    varies
        The relative standard deviation of the compute time from GPU to GPU. All GPUs
        wait for the slowest one.
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
        """Return the backward pass of one batch on the slowest of n GPUs, in seconds.

        The slowest of n normally distributed times is expected near the quantile
        (n - 3/8) / (n + 1/4), which is Blom's approximation. For n = 1 this is the mean.

        Parameters
        ----------
        cluster, network : str
            Keys of CLUSTERS and of NETWORKS.
        n : int, optional
            The number of GPUs.
        """
        quantile = (n - 3 / 8) / (n + 1 / 4)
        # `varies` is the standard deviation divided by the mean.
        slowest_over_mean = 1.0 + self.varies * NormalDist().inv_cdf(quantile)
        # The time of AlexNet on a K80 is a field of the setting.
        if network == "AlexNet":
            faster = self.alexnet_speedup if cluster == "V100" else 1.0
            return self.alexnet_backward_s * slowest_over_mean / faster
        # The times of the other networks follow from the stated time of ResNet-50.
        rate_over_resnet = self.googlenet_rate if network == "GoogleNet" else 1.0
        mean_s = like_resnet_s(cluster, network) / rate_over_resnet
        return mean_s * slowest_over_mean

    def message(self, cluster: str, framework: str, gpus: Gpus) -> tuple[Any, Any]:
        """Return the cost of a message, a ring all-reduce between all GPUs.

        The arguments are those of `iteration_s`.

        Returns
        -------
        start_s : float or ndarray
            The start-up of a message in seconds.
        s_per_byte : float or ndarray
            The seconds that each byte takes.
        """
        # One GPU sends nothing.
        if gpus.n == 1:
            return 0.0, 0.0
        if gpus.machines == 1:
            return self._message_in_machine(cluster, gpus.n)
        # How many times as long as a message of NCCL a message takes.
        slower: Any = 1.0
        if framework == "TensorFlow":
            # TensorFlow sends messages between machines by gRPC instead of NCCL.
            slower = self.grpc_slower
        elif framework == "MXNet" and cluster == "V100":
            # MXNet is slower over InfiniBand alone, which connects the V100 machines.
            # On the K80 machines the paper calls its speedup nearly linear.
            slower = self.mxnet_slower
        return self._message_between_machines(cluster, gpus.n, slower)

    def _message_in_machine(self, cluster: str, n: int) -> tuple[Any, Any]:
        """Return the start-up and the seconds per byte between n GPUs of a machine."""
        rate = CLUSTERS[cluster].connection_bytes_per_s
        # A ring all-reduce of one byte at the full rate of the connection.
        wire_s_per_byte = float(update_s(1.0, n, rate))
        # `inside_start_s` is that of PER_MACHINE GPUs. The number of steps of a ring, and
        # with it the start-up, is proportional to n - 1.
        start_s = self.inside_start_s * (n - 1) / (PER_MACHINE - 1)
        # The GPUs reach only this share of the rate.
        s_per_byte = wire_s_per_byte / self.inside_share
        return start_s, s_per_byte

    def _message_between_machines(
        self, cluster: str, n: int, slower: Any
    ) -> tuple[Any, Any]:
        """Return the start-up and the seconds per byte of a message between n GPUs.

        A message takes ``slower`` times as long as one of NCCL. For NCCL the paper states
        the time of all messages of ResNet-50 between 16 GPUs. This time exceeds that of
        the wire, which is the time of a ring all-reduce at the full rate of the network. The
        excess is divided between start-ups and bytes.
        """
        stated = CLUSTERS[cluster]
        rate = stated.network_bytes_per_s
        all_gpus = MACHINES * PER_MACHINE
        # ResNet-50 sends a message for each layer.
        resnet_bytes = layer_bytes("ResNet-50")
        messages = len(resnet_bytes)
        # `update_s` is the time of a ring all-reduce.
        wire_s = float(update_s(resnet_bytes.sum(), all_gpus, rate))
        excess_s = stated.sent_s - wire_s

        # The share of the excess that the start-ups take.
        start_share = self.infiniband_start
        if cluster == "K80":
            start_share = self.ethernet_start
        start_of_all_gpus_s = start_share * excess_s / messages
        # The number of steps of a ring, and with it the start-up, is proportional to n - 1.
        start_s = start_of_all_gpus_s * (n - 1) / (all_gpus - 1)
        # The bytes take the rest of the excess, besides the time of the wire.
        slower_than_wire = 1 + (1 - start_share) * excess_s / wire_s
        wire_s_per_byte = float(update_s(1.0, n, rate))
        return slower * start_s, slower * slower_than_wire * wire_s_per_byte

    def sent_and_exposed_s(
        self, cluster: str, network: str, framework: str, gpus: Gpus
    ) -> tuple[Any, Any]:
        """Return the communication of an iteration, with one message for each layer.

        The arguments are those of `iteration_s`.

        Returns
        -------
        sent_s : float or ndarray
            The time of all messages in seconds.
        exposed_s : float or ndarray
            How much of ``sent_s`` the backward pass does not hide, in seconds (t_c^no of
            dag Eq 5).
        """
        start_s, s_per_byte = self.message(cluster, framework, gpus)
        backward_s = self.backward_s(cluster, network, gpus.n)
        # Gradients are ready in the order of the backward pass, the last layer first.
        n_bytes = layer_bytes(network)[::-1]
        # The share of the backward pass after which each gradient is ready.
        ready_share = np.cumsum(layer_shares(network)[::-1])
        # The bytes of each message together with those of all later messages.
        bytes_left = np.cumsum(n_bytes[::-1])[::-1]
        messages = len(n_bytes)

        # Times count from the end of the backward pass. For every message k, communication
        # ends at its end_s or later: message k waits for its gradient, and all later
        # messages follow it. Communication ends at the largest end_s, because messages wait
        # for nothing else.
        exposed_s: Any = -np.inf
        for k, share in enumerate(ready_share):
            # Gradients are ready before the backward pass ends, so that this is negative,
            # or 0 for the last one.
            ready_s = (share - 1) * backward_s
            start_ups_s = (messages - k) * start_s
            end_s = ready_s + start_ups_s + bytes_left[k] * s_per_byte
            exposed_s = np.maximum(exposed_s, end_s)
        sent_s = messages * start_s + bytes_left[0] * s_per_byte
        return sent_s, exposed_s

    def reads_s(self, cluster: str, network: str, framework: str, gpus: Gpus) -> Any:
        """Return how long all machines read the batches of an iteration, in seconds.

        The machines read side by side. The arguments are those of `iteration_s`.
        """
        image_bytes = self.stored_bytes
        # Frameworks that decode on the CPU read JPEG files.
        if STRATEGIES[framework].decodes_on_cpu:
            image_bytes = JPEG_BYTES
        # ``rate`` is that of all machines together, in bytes per second.
        if cluster == "K80":
            # Several machines together read as many times as fast as one alone, but at most at
            # `nfs_bytes_per_s`, the rate of all machines. One alone reads at the stated rate, or
            # at its share of the rate of all if this share is higher. Of the scanned rates, only
            # that of files in memory is so high.
            stated_rate = CLUSTERS["K80"].storage_bytes_per_s
            rate_alone = np.maximum(stated_rate, self.nfs_bytes_per_s / MACHINES)
            rate = np.minimum(self.nfs_bytes_per_s, gpus.machines * rate_alone)
        else:
            # Each V100 machine has a disk of its own.
            rate = gpus.machines * self.disk_bytes_per_s
        return gpus.n * BATCH[network] * image_bytes / rate

    def decode_s(self, cluster: str, network: str) -> Any:
        """Return the seconds to decode one GPU's batch, if a framework decodes."""
        faster = self.gold_faster if cluster == "V100" else 1.0
        return BATCH[network] / (self.decoded_per_s * faster)

    def iteration_s(
        self, cluster: str, network: str, framework: str, gpus: Gpus, without: str = ""
    ) -> Any:
        """Return the time from one update to the next, in seconds (dag Eq 5 repaired).

        Unlike in Eq 5, reads and copies work side by side, decoding counts, and a framework
        that does not copy ahead of time waits for the copy.

        Parameters
        ----------
        cluster, network, framework : str
            Keys of CLUSTERS, of NETWORKS and of `ddlkit.core.strategies.STRATEGIES`.
        gpus : Gpus
            The machines and their GPUs.
        without : {"", "reading", "sending"}, optional
            Which part takes no time. By default every part takes its time.
        """
        strategy = STRATEGIES[framework]
        all_sent_s, exposed_s = self.sent_and_exposed_s(
            cluster, network, framework, gpus
        )
        # The GPU waits for all messages, or only for what the backward pass does not hide.
        waits_s = exposed_s if strategy.sends_during_backward else all_sent_s
        if without == "sending":
            waits_s = 0.0
        reads_s = self.reads_s(cluster, network, framework, gpus)
        if without == "reading":
            reads_s = 0.0
        # The forward pass takes half as long as the backward pass.
        compute_s = 1.5 * self.backward_s(cluster, network, gpus.n)
        # The processor of a machine decodes the batches of all its GPUs.
        decoding_s = gpus.per_machine * self.decode_s(cluster, network)
        h2d_s = BATCH[network] * self.copy_s
        busy_s = compute_s + waits_s
        return steady_s(reads_s, decoding_s, h2d_s, busy_s, strategy)


def like_resnet_s(cluster: str, network: str) -> float:
    """Return the backward pass of a batch in seconds, at the FLOP/s of ResNet-50."""
    multiply_adds = {}
    for name, batch in BATCH.items():
        multiply_adds[name] = batch * networks.multiply_adds(NETWORKS[name])
    resnet_s = CLUSTERS[cluster].backward_s
    return resnet_s * multiply_adds[network] / multiply_adds["ResNet-50"]


@cache
def layer_bytes(network: str) -> Ints:
    """Return the bytes of each layer's gradients, in forward order, shape (L,)."""
    layers = networks.layers(NETWORKS[network])
    # The gradients are float32.
    return np.array([4 * sum(layer.tensors) for layer in layers])


@cache
def layer_shares(network: str) -> Floats:
    """Return each layer's share of the network's FLOP, in forward order, shape (L,)."""
    layers = networks.layers(NETWORKS[network])
    multiply_adds = np.array([layer.multiply_adds for layer in layers], dtype=float)
    return multiply_adds / multiply_adds.sum()


def parameter_millions(network: str) -> float:
    """Return how many million parameters a network of `workbook.common.networks` has."""
    return sum(networks.parameters(network)) / 1e6
