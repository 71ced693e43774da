"""The five cost models of PyTorch 2.13.0 that price collectives and operations.

They are the model after NCCL of Inductor (Eqs 1-3), the sizes from which messages
saturate a link (Eqs 4 and 5), the mesh model of DTensor (Eq 6), the lookup in a profile
(Eq 7) and the roofline of operations (Eq 8). The equations are numbered here, because no
paper numbers them. The constants are those of the source, which
data/papers/pytorch/code.csv lists by file. GPUs are joined by NVLink. Bytes are those of
`ddlkit.core.collective`.

References
----------
pytorch : The PyTorch developers, "PyTorch: cost models of communication in its source",
    version 2.13.0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from ddlkit.core.units import MIB
from ddlkit.core.workload import Floats
from workbook.common.papers import published_code

VERSION = "2.13.0"
ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 2}
"""How often the bytes of each collective go round a ring. A "p2p" takes a single step."""
GPUS = {"V100": "volta", "A100": "ampere", "H100": "hopper", "B200": "blackwell"}
"""The name of each GPU's generation in the source."""
CODE = published_code("pytorch")


@dataclass(frozen=True)
class Group:
    """Ranks with a GPU each, of which several share a node.

    PyTorch assumes that the ranks fill one node after the other.

    Attributes
    ----------
    device : str
        One of GPUS.
    ranks : int
        The number P of ranks.
    per_node : int
        The number of GPUs of a node.

    Examples
    --------
    >>> Group("H100", 16).nodes, Group("H100", 16).steps("all_reduce")
    (2, 30)
    """

    device: str
    ranks: int
    per_node: int = 8

    @property
    def nodes(self) -> int:
        """Return the number of nodes that the ranks fill."""
        # Floor division of the negative number of ranks rounds the quotient up.
        return -(-self.ranks // self.per_node)

    def code(self, name: str, gpu: str = "") -> float:
        """Return a constant of the source for this group.

        Parameters
        ----------
        name : str
            The constant, without the generation of GPUs. A constant whose name begins with
            "cap" also depends on the number of nodes: one, two, or more.
        gpu : str, optional
            The generation of GPUs, one of the values of GPUS. By default that of the
            group's device.
        """
        generation = gpu or GPUS[self.device]
        key = f"{name}-{generation}"
        if name.startswith("cap"):
            # The 3 stands for three nodes and more, as in "cap-ll-volta-3".
            key += f"-{min(self.nodes, 3)}"
        return CODE[key]

    def steps(self, collective: str) -> int:
        """Return the number k of steps that a collective takes on a ring."""
        if collective == "p2p":
            return 1
        return ROUNDS[collective] * (self.ranks - 1)


# -- Eqs 1 to 3: the model after NCCL ------------------------------------------------


def bus_rate(n_bytes: ArrayLike, group: Group, algorithm: str, protocol: str) -> Floats:
    """Return the bus bandwidth of a collective in GB/s (pytorch Eq 1).

    Parameters
    ----------
    n_bytes : array_like
        The size of each message in bytes, of any shape.
    group : Group
        The ranks.
    algorithm : {"ring", "tree"}
        The algorithm of NCCL.
    protocol : {"ll", "ll128", "simple"}
        The protocol of NCCL. "ll" sends a flag with every 4 bytes, "ll128" with every
        120 bytes, and "simple" sends none.

    Returns
    -------
    ndarray, shape of ``n_bytes``
        GB/s. It is 0 for "ll128" between nodes, so that this is never chosen.

    Notes
    -----
    In a node the rate is that of NVLink, else that of the network. The network's rate
    grows with the nodes, and from three nodes on with the size too. A ring with "simple"
    gets all of the rate. Every other combination of algorithm and protocol gets a share of
    the rate, but no more than a cap. With "ll" the source states the cap. With other protocols
    the cap is the number of channels times the rate of one channel.
    """
    rate = _link_rate(n_bytes, group)
    in_one_node = group.nodes == 1
    # The shares here and below are stated in the source, which has them from NCCL.
    if protocol == "ll":
        share = 1 / 2 if algorithm == "ring" else 1 / 3.8
        cap = group.code("cap-ll")
        if not in_one_node:
            # Between nodes the source takes the cap of a V100 for every GPU.
            cap = group.code("cap-ll", "volta")
        return np.minimum(share * rate, cap)
    if protocol == "ll128" and not in_one_node:
        # With a rate of 0, this protocol is never chosen.
        return np.zeros_like(rate)
    variant = f"{algorithm}-{protocol}"
    if variant == "ring-simple":
        return rate
    shares = {"ring-ll128": 120 / 128, "tree-ll128": 7 / 9, "tree-simple": 0.92}
    cap = group.code("channels") * group.code(f"cap-{variant}")
    return np.minimum(shares[variant] * rate, cap)


def _link_rate(n_bytes: ArrayLike, group: Group) -> Floats:
    """Return the rate in GB/s that the links of a group give a message of each size.

    It is the rate before `bus_rate` takes off what an algorithm and a protocol cost.
    """
    n = np.asarray(n_bytes, float)
    if group.nodes == 1:
        return group.code("nvlink") * np.ones_like(n)
    # The efficiency is the share of the network's bandwidth that is reached. It rises linearly
    # from one node to eight nodes, which reach all of it.
    growth = min(1, (group.nodes - 1) / 7)
    efficiency = CODE["efficiency-least"] + CODE["efficiency-gain"] * growth
    rate = group.code("network") * efficiency * np.ones_like(n)
    if group.nodes > 2:
        # Above the size "rails-from", messages use more of a node's network cards, called rails.
        # The source fitted the power to profiles of H100. It does not say why this begins with
        # three nodes.
        rate *= np.maximum(n / CODE["rails-from"], 1) ** CODE["rails-power"]
    return rate


def startup_us(group: Group, collective: str, algorithm: str, protocol: str) -> float:
    """Return the start-up latency of a collective in microseconds (pytorch Eq 1).

    Parameters
    ----------
    group : Group
        The ranks.
    collective : str
        One of ROUNDS, or "p2p".
    algorithm : {"ring", "tree"}
        The algorithm of NCCL.
    protocol : {"ll", "ll128", "simple"}
        The protocol of NCCL.

    Returns
    -------
    float
        l in microseconds.

    Notes
    -----
    l = base + steps within nodes x step over NVLink + steps between nodes x step over
    the network. A tree of P ranks on m nodes has 2 (floor(P / m) - 1) steps within nodes,
    and 2 floor(log2 m) between nodes.
    """
    # Near is within a node over NVLink, and far is between nodes over the network.
    near_us = CODE[f"step-nvlink-{algorithm}-{protocol}"]
    far_us = CODE[f"step-network-{algorithm}-{protocol}"]
    base_us = CODE[f"base-{algorithm}-{protocol}"]
    if group.nodes > 1:
        # Among several nodes, a step within a node takes at least the overhead of the network. In
        # the source, as in NCCL, the overhead of "simple" is three times as large.
        overhead_us = CODE["overhead-network"]
        if protocol == "simple":
            overhead_us = CODE["overhead-simple"]
        near_us = max(near_us, overhead_us)
    if algorithm == "tree":
        within = group.ranks // group.nodes - 1
        between = np.floor(np.log2(group.nodes))
        # The sums pass up the tree to its root, and down again.
        return base_us + 2 * (within * near_us + between * far_us)
    # Those steps of a ring that are not between nodes are within a node. The source counts two
    # rounds between nodes for an all-reduce, and one for any other collective. It does not treat
    # a "p2p" apart, so that ``within`` is negative for its single step from three nodes on.
    rounds_between = 2 if collective == "all_reduce" else 1
    between = rounds_between * (group.nodes - 1)
    within = group.steps(collective) - between
    return base_us + within * near_us + between * far_us


def algorithm_s(
    n_bytes: ArrayLike, group: Group, collective: str, algorithm: str, protocol: str
) -> Floats:
    """Return the time of a collective by one algorithm and protocol (pytorch Eq 1).

    Parameters
    ----------
    n_bytes : array_like
        The size n of each message in bytes, of any shape.
    group : Group
        The ranks.
    collective : str
        One of ROUNDS, or "p2p".
    algorithm : {"ring", "tree"}
        The algorithm of NCCL. A tree is for all-reduces only.
    protocol : {"ll", "ll128", "simple"}
        The protocol of NCCL.

    Returns
    -------
    ndarray, shape of ``n_bytes``
        Seconds, which are infinite for "ll128" between nodes and for a tree of another
        collective than an all-reduce.

    Notes
    -----
    t = l + n / (1000 B), in microseconds

    l is `startup_us`, and B is the bandwidth of the algorithm in GB/s. For a ring, B is
    `bus_rate` times the number of ranks, divided by the number of steps. For a tree, B is
    half of `bus_rate`, corrected by size.

    Source: _inductor/comm_analysis.py, 2.13.0.
    """
    n = np.asarray(n_bytes, float)
    # The rate is 0 for "ll128" between nodes.
    rate = bus_rate(n, group, algorithm, protocol)
    if algorithm == "ring":
        # A rank sends n / ranks bytes in each step, by the source also in the step of a "p2p".
        rate = rate * group.ranks / group.steps(collective)
    else:
        # The source lists a correction for each of 24 powers of two from 64 bytes on. Larger
        # messages are not corrected.
        corrections = [CODE[f"tree-{protocol}-{k}"] for k in range(24)]
        corrections.append(1.0)
        # How often 64 bytes are doubled up to the size, which is the index of its correction.
        doublings = np.floor(np.log2(np.maximum(n // 64, 1)))
        correction = np.array(corrections)[np.minimum(doublings, 24).astype(int)]
        # Only an all-reduce has a tree. The rate of other collectives becomes 0.
        has_tree = collective == "all_reduce"
        # The sums pass up the tree and down again, which halves the rate.
        rate = rate / 2 * correction * has_tree
    # At 1 GB/s, 1000 bytes take a microsecond. A rate of 0, whose time becomes infinite below, is
    # replaced by a tiny one here, so that the division gives no warning.
    sent_us = n / 1e3 / np.maximum(rate, 1e-99)
    took_us = startup_us(group, collective, algorithm, protocol) + sent_us
    return np.where(rate > 0, took_us / 1e6, np.inf)


def nccl_s(n_bytes: ArrayLike, group: Group, collective: str = "all_reduce") -> Floats:
    """Return the time of a collective by Inductor's model after NCCL (pytorch Eq 2).

    Parameters
    ----------
    n_bytes : array_like
        The size of each message in bytes, of any shape.
    group : Group
        The ranks. One rank takes no time.
    collective : str, optional
        One of ROUNDS, or "p2p".

    Returns
    -------
    ndarray, shape of ``n_bytes``
        Seconds.

    Notes
    -----
    t is the least of Eq 1 over algorithms and protocols.

    Source: _inductor/comm_analysis.py, 2.13.0.

    Examples
    --------
    >>> round(1e6 * float(nccl_s(4 * MIB, Group("H100", 8))), 1)
    61.8
    """
    if group.ranks <= 1:
        return np.zeros(np.shape(n_bytes))
    times_s = []
    for algorithm in ("tree", "ring"):
        for protocol in ("ll", "ll128", "simple"):
            time_s = algorithm_s(n_bytes, group, collective, algorithm, protocol)
            times_s.append(time_s)
    return np.min(times_s, axis=0)


def parts(collective: str, ranks: int) -> tuple[int, int]:
    """Return how many times as large a message is as the input and as the output of a rank.

    In an all-gather, for example, each of P ranks puts in 1/P of the message and gets the
    whole message.

    Parameters
    ----------
    collective : str
        One of ROUNDS, or "p2p".
    ranks : int
        The number of ranks.

    Returns
    -------
    input_parts, output_parts : int
        The input is the message divided by ``input_parts``, and the output is the message
        divided by ``output_parts``.
    """
    if collective == "all_gather":
        return ranks, 1
    if collective == "reduce_scatter":
        return 1, ranks
    return 1, 1


def priced_bytes(n_bytes: ArrayLike, ranks: int, collective: str, fx: bool) -> Floats:
    """Return the bytes that PyTorch gives to Eq 2 as the size of a collective (pytorch Eq 3).

    Parameters
    ----------
    n_bytes : array_like
        The size of each message in bytes, of any shape.
    ranks : int
        The number of ranks.
    collective : str
        One of ROUNDS, or "p2p".
    fx : bool
        Whether the collective is in a graph of torch.fx, which counts inputs and outputs.
        Inductor's own graph counts inputs alone.

    Returns
    -------
    ndarray, shape of ``n_bytes``
        Bytes.

    Notes
    -----
    Source: _inductor/comm_analysis.py, 2.13.0.
    """
    input_parts, output_parts = parts(collective, ranks)
    counted_share = 1 / input_parts
    if fx:
        counted_share += 1 / output_parts
    return np.asarray(n_bytes, float) * counted_share


# -- Eqs 4 and 5: sizes that saturate a link -----------------------------------------


def saturation_bytes(group: Group, collective: str, efficiency: float = 0.9) -> int:
    """Return the size from which messages reach a share of the bandwidth (pytorch Eq 4).

    Parameters
    ----------
    group : Group
        The ranks. For one rank the size is 0.
    collective : str
        One of ROUNDS, or "p2p".
    efficiency : float, optional
        The share e of the bandwidth.

    Returns
    -------
    int
        Bytes, at least the least size that the source states.

    Notes
    -----
    n = e / (1 - e) (l + k h) B

    l is a start-up and h a step in seconds, k is the number of steps of a ring, and B is
    the bandwidth in bytes per second.

    Source: _inductor/comm_analysis.py, 2.13.0.
    """
    if group.ranks <= 1:
        return 0
    # Near is within a node, and far is between nodes.
    where = "near" if group.nodes == 1 else "far"
    startup_us = group.code(f"saturation-start-{where}")
    step_us = group.code(f"saturation-step-{where}")
    gb_per_s = group.code(f"saturation-rate-{where}")
    least_bytes = group.code(f"saturation-least-{where}")
    latency_s = (startup_us + group.steps(collective) * step_us) / 1e6
    # With latency L, a message of n bytes takes L + n / B, of which n / B is the share e.
    n_bytes = efficiency / (1 - efficiency) * latency_s * (gb_per_s * 1e9)
    return max(int(n_bytes), int(least_bytes))


def bucket_cap_bytes(group: Group) -> float:
    """Return the size of the buckets of sharded training (pytorch Eq 5).

    Parameters
    ----------
    group : Group
        The ranks.

    Returns
    -------
    float
        Bytes: the size at which an all-gather reaches 90% of the bandwidth by Eq 4, but at
        least 10 MiB and at most 500 MiB.

    Notes
    -----
    Source: _inductor/fx_passes/fsdp.py, 2.13.0.
    """
    saturating = saturation_bytes(group, "all_gather", CODE["cap-efficiency"])
    return float(np.clip(saturating, CODE["cap-least"] * MIB, CODE["cap-most"] * MIB))


# -- Eqs 6 to 8: mesh, profile and roofline ------------------------------------------


def mesh_s(n_bytes: ArrayLike, group: Group, collective: str = "all_reduce") -> Floats:
    """Return the time of a collective along a dimension of a mesh (pytorch Eq 6).

    Parameters
    ----------
    n_bytes : array_like
        The size n of each message in bytes, of any shape.
    group : Group
        The ranks.
    collective : str, optional
        One of ROUNDS. An all-to-all is priced as the all-gather of a shard, with a
        penalty.

    Returns
    -------
    ndarray, shape of ``n_bytes``
        Seconds.

    Notes
    -----
    t = l + k h + (n / 2^30) (k / P) / B

    l is a start-up and h a step in seconds, k is the number of steps, P the number of
    ranks, and B the bandwidth in GB/s. The source counts n in GiB although B is in GB/s.

    Source: distributed/tensor/_collective_utils.py, 2.13.0.
    """
    n = np.asarray(n_bytes, float)
    penalty_us = 0.0
    if collective == "all_to_all":
        collective = "all_gather"
        n = n / group.ranks
        penalty_us = CODE["mesh-penalty"]
    steps = group.steps(collective)
    # Near is within a node, and far is between nodes.
    rate = CODE["mesh-rate-near"]
    step_us = CODE["mesh-step-near"]
    if group.nodes > 1:
        rate = rate * CODE["mesh-rate-share-far"]
        step_us = CODE["mesh-step-far"]
    latency_us = CODE["mesh-base"] + steps * step_us + penalty_us
    return latency_us / 1e6 + n / 2**30 * steps / group.ranks / rate


def profiled_s(
    n_bytes: ArrayLike, seen_bytes: ArrayLike, seen_s: ArrayLike, others: ArrayLike = ()
) -> Floats:
    """Return the time of a collective as looked up in a profile (pytorch Eq 7).

    Parameters
    ----------
    n_bytes : array_like
        The size of each message in bytes, of any shape.
    seen_bytes, seen_s : array_like, shape (m,)
        The bytes and the seconds of the samples in the profile.
    others : array_like, shape (2, o), optional
        The bytes and the seconds of other collectives of the same process group.

    Returns
    -------
    ndarray, shape of ``n_bytes``
        Seconds.

    Notes
    -----
    - A size that the profile has takes as long as its first sample.
    - Between two sizes, log t is linear in log n.
    - Below the smallest size, and from the largest size to twice the largest, t is
      proportional to n, with the bandwidth of the nearest size.
    - Above twice the largest size, t is n divided by the bandwidth of the fastest of the
      process group's five largest messages, whatever their collective.

    Source: _inductor/fx_passes/profile_guided_estimation.py, 2.13.0.
    """
    n = np.asarray(n_bytes, float)
    # A stable order keeps the samples of one size in the order of the profile.
    order = np.argsort(seen_bytes, kind="stable")
    sizes = np.asarray(seen_bytes, float)[order]
    times = np.asarray(seen_s, float)[order]

    near_s = _near_s(n, sizes, times)
    far_above_s = n / _fastest_rate(sizes, times, others)
    is_far_above = n > CODE["profile-reach"] * sizes[-1]
    return np.where(is_far_above, far_above_s, near_s)


def _near_s(n: Floats, sizes: Floats, times: Floats) -> Floats:
    """Return the time of messages up to twice the largest size of a profile, in seconds.

    Parameters
    ----------
    n : ndarray
        The size of each message in bytes.
    sizes, times : ndarray, shape (m,)
        The bytes, in ascending order, and the seconds of the samples in the profile.

    Returns
    -------
    ndarray, shape of ``n``
        Seconds, by the first three cases in the notes of `profiled_s`.
    """
    # The place of the first sample of at least n bytes, and that of the first sample of more than
    # n bytes. The places differ if a sample has the size n.
    first_at_least = np.searchsorted(sizes, n, "left")
    first_above = np.searchsorted(sizes, n, "right")
    is_seen = first_at_least < first_above
    # The place of the last sample of at most n bytes, and that of the first sample of at least n
    # bytes. If n is below or above all sizes, both are the place of the nearest sample. In the
    # sizes 4, 4 and 9, they are 1 and 2 for n = 6, and 1 and 0 for n = 4, which is a seen size.
    lower = np.maximum(first_above - 1, 0)
    upper = np.minimum(first_at_least, len(sizes) - 1)
    is_between = sizes[lower] < sizes[upper]

    # Where n is not between two sizes, the interpolation is not used. The 2 only keeps log_ratio
    # from being 0 there.
    log_ratio = np.log(np.where(is_between, sizes[upper] / sizes[lower], 2))
    # The weight of the upper sample.
    weight = np.where(is_between, np.log(n / sizes[lower]) / log_ratio, 0)
    log_lower_s = np.log(times[lower])
    log_upper_s = np.log(times[upper])
    interpolated = np.exp((1 - weight) * log_lower_s + weight * log_upper_s)

    below_s = times[0] * n / sizes[0]
    above_s = times[-1] * n / sizes[-1]
    extrapolated = np.where(n < sizes[0], below_s, above_s)
    unseen_s = np.where(is_between, interpolated, extrapolated)
    # A seen size takes as long as its first sample, as in PyTorch. This is the sample at ``upper``.
    return np.where(is_seen, times[upper], unseen_s)


def _fastest_rate(sizes: Floats, times: Floats, others: ArrayLike) -> float:
    """Return the bandwidth of the fastest of a process group's largest messages, in bytes/s.

    ``sizes`` and ``times`` are the bytes and the seconds of the samples of one collective, and
    ``others``, of shape (2, o) or empty, has those of the other collectives of the group.
    """
    # An empty ``others`` gets shape (2, 0).
    others = np.reshape(others, (2, -1))
    # The first row has sizes, and the second one times.
    samples = np.hstack([[sizes, times], others])
    all_sizes, all_times = samples
    largest_first = np.argsort(-all_sizes, kind="stable")
    largest = largest_first[: int(CODE["profile-largest"])]
    return np.max(all_sizes[largest] / all_times[largest])


def roofline_s(
    flops: ArrayLike, n_bytes: ArrayLike, peak: float, bytes_per_s: float
) -> Floats:
    """Return the time of an operation by a roofline (pytorch Eq 8).

    Parameters
    ----------
    flops : array_like
        The FLOP f of each operation, of any shape. A multiply-add counts as 2.
    n_bytes : array_like
        The bytes n that each operation moves, of the same shape.
    peak : float
        The peak p of the GPU in FLOP/s, which counts a multiply-add as 2.
    bytes_per_s : float
        The memory bandwidth B in bytes per second.

    Returns
    -------
    ndarray, shape of ``flops``
        Seconds.

    Notes
    -----
    t = max(f/2 / (0.75 p), n / B)

    The source takes 75% of the peak to be attainable. It halves f although p counts a
    multiply-add as 2 as well, so that a large product seems to run at 1.5 times the peak
    (errata, entry 7). The halving is kept as it is in the source.

    Source: utils/_runtime_estimation.py, 2.13.0.
    """
    halved = np.asarray(flops, float) / CODE["roofline-flops"]
    compute_s = halved / (CODE["roofline-share"] * peak)
    memory_s = np.asarray(n_bytes) / bytes_per_s
    return np.maximum(compute_s, memory_s)
