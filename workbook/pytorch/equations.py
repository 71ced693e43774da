"""pytorch: the five cost models of PyTorch 2.13.0 that price collectives and operations, in NumPy.

Numbered here, as no paper does; constants are those of its source (data/papers/pytorch/code.csv, by file).
GPUs are joined by NVLink. Bytes are those of `core.link`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from ddlkit.core.link import message_parts
from ddlkit.core.units import MIB
from ddlkit.core.workload import Floats
from workbook.common.papers import published_code

VERSION = "2.13.0"
ROUNDS = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 2}
"""How often a ring goes round, by collective; of "p2p" it takes one step in all."""
GPUS = {"V100": "volta", "A100": "ampere", "H100": "hopper", "B200": "blackwell"}
"""What the source calls each."""
CODE = published_code("pytorch")


@dataclass(frozen=True)
class Group:
    """Ranks, a GPU each, of which so many share a node: PyTorch takes them to fill one after the other."""

    device: str
    ranks: int
    per_node: int = 8

    @property
    def nodes(self) -> int:
        """Return how many nodes hold them."""
        return -(-self.ranks // self.per_node)

    def code(self, name: str, gpu: str = "") -> float:
        """Return a constant of its GPU, or of another; of a cap that of so many nodes."""
        nodes = f"-{min(self.nodes, 3)}" if name.startswith("cap") else ""
        return CODE[f"{name}-{gpu or GPUS[self.device]}{nodes}"]

    def steps(self, collective: str) -> int:
        """Return the steps of a ring."""
        return 1 if collective == "p2p" else ROUNDS[collective] * (self.ranks - 1)


def bus_rate(n_bytes: ArrayLike, group: Group, algorithm: str, protocol: str) -> Floats:
    """Return the bus rate of pytorch Eq 1, in GB/s; 0: "ll128" between nodes, which is not tried.

    NVLink in a node; else the network, by nodes and size. "ll" sends a flag with every 4 bytes, "ll128" with
    every 120, "simple" none.
    """
    n, how, alone = (
        np.asarray(n_bytes, float),
        f"{algorithm}-{protocol}",
        group.nodes == 1,
    )
    rate = group.code("nvlink" if alone else "network") * np.ones_like(n)
    if not alone:
        full = min(1, (group.nodes - 1) / 7)
        rate *= CODE["efficiency-least"] + CODE["efficiency-gain"] * full
    if group.nodes > 2:
        rate *= np.maximum(n / CODE["rails-from"], 1) ** CODE["rails-power"]
    if protocol == "ll":
        share = 1 / 2 if algorithm == "ring" else 1 / 3.8
        return np.minimum(share * rate, group.code("cap-ll", "" if alone else "volta"))
    if how == "ring-simple" or (protocol == "ll128" and not alone):
        return rate * (protocol == "simple")
    share = {"ring-ll128": 120 / 128, "tree-ll128": 7 / 9, "tree-simple": 0.92}[how]
    return np.minimum(share * rate, group.code("channels") * group.code(f"cap-{how}"))


def startup_us(group: Group, collective: str, algorithm: str, protocol: str) -> float:
    """Return the latency of pytorch Eq 1 in microseconds: the base, then steps in nodes and between them."""
    near, far = (
        CODE[f"step-{link}-{algorithm}-{protocol}"] for link in ("nvlink", "network")
    )
    if group.nodes > 1:
        near = max(
            near,
            CODE["overhead-simple" if protocol == "simple" else "overhead-network"],
        )
    if algorithm == "tree":
        inside, between = group.ranks // group.nodes - 1, np.floor(np.log2(group.nodes))
        return CODE[f"base-tree-{protocol}"] + 2 * (inside * near + between * far)
    crossed = (2 if collective == "all_reduce" else 1) * (group.nodes - 1)
    inside = group.steps(collective) - crossed
    return CODE[f"base-ring-{protocol}"] + inside * near + crossed * far


def algorithm_s(
    n_bytes: ArrayLike, group: Group, collective: str, algorithm: str, protocol: str
) -> Floats:
    """pytorch Eq 1: t = l + n / (1000 B), an algorithm with a protocol (_inductor/comm_analysis.py, 2.13.0).

    Symbols: t = the result in s, there in us; l = `startup_us`; n = n_bytes; B = `bus_rate` times
    ranks/steps of a ring, half of a tree, which is corrected by size. Infinite where it is not tried.
    """
    n = np.asarray(n_bytes, float)
    rate = bus_rate(n, group, algorithm, protocol)
    if algorithm == "ring":
        rate = rate * group.ranks / group.steps(collective)
    else:
        shares = np.array([CODE[f"tree-{protocol}-{k}"] for k in range(24)] + [1.0])
        power = np.minimum(np.floor(np.log2(np.maximum(n // 64, 1))), 24).astype(int)
        rate = rate / 2 * shares[power] * (collective == "all_reduce")
    took_us = startup_us(group, collective, algorithm, protocol) + n / 1e3 / np.maximum(
        rate, 1e-99
    )
    return np.where(rate > 0, took_us / 1e6, np.inf)


def nccl_s(n_bytes: ArrayLike, group: Group, collective: str = "all_reduce") -> Floats:
    """pytorch Eq 2: least of Eq 1 over algorithms and protocols, in s (_inductor/comm_analysis.py, 2.13.0).

    >>> round(1e6 * float(nccl_s(4 * MIB, Group("H100", 8))), 1)
    61.8
    """
    if group.ranks <= 1:
        return np.zeros(np.shape(n_bytes))
    tried = [
        (how, flag) for how in ("tree", "ring") for flag in ("ll", "ll128", "simple")
    ]
    return np.min(
        [algorithm_s(n_bytes, group, collective, *how) for how in tried], axis=0
    )


def priced_bytes(n_bytes: ArrayLike, ranks: int, collective: str, fx: bool) -> Floats:
    """pytorch Eq 3: bytes at which a collective is priced by Eq 2 (_inductor/comm_analysis.py, 2.13.0).

    fx : in a graph of torch.fx all inputs and outputs; in Inductor's own (False) the inputs alone
    """
    inside, outside = message_parts(collective, ranks)
    return np.asarray(n_bytes, float) * (1 / inside + fx / outside)


def saturation_bytes(group: Group, collective: str, efficiency: float = 0.9) -> int:
    """pytorch Eq 4: n = e/(1 - e) (l + k h) B, at least a floor (_inductor/comm_analysis.py, 2.13.0).

    Symbols: e = efficiency; l = start-up, h = a step, in us; k = steps of a ring; B = bandwidth.
    """
    if group.ranks <= 1:
        return 0
    place = "near" if group.nodes == 1 else "far"
    names = (
        f"saturation-{name}-{place}" for name in ("start", "step", "rate", "least")
    )
    start, step, rate, least = map(group.code, names)
    latency_s = (start + group.steps(collective) * step) / 1e6
    return max(
        int(efficiency / (1 - efficiency) * latency_s * (rate * 1e9)), int(least)
    )


def bucket_cap_bytes(group: Group) -> float:
    """pytorch Eq 5: Eq 4 of an all-gather, from 10 to 500 MiB (_inductor/fx_passes/fsdp.py, 2.13.0)."""
    wanted = saturation_bytes(group, "all_gather", CODE["cap-efficiency"])
    return float(np.clip(wanted, CODE["cap-least"] * MIB, CODE["cap-most"] * MIB))


def mesh_s(n_bytes: ArrayLike, group: Group, collective: str = "all_reduce") -> Floats:
    """pytorch Eq 6: t = l + k h + (n/2^30) (k/P) / B (distributed/tensor/_collective_utils.py, 2.13.0).

    Symbols: l, h = a start-up and a step, in us; k = steps, P = ranks; B = bandwidth in GB/s; t = the result
    in s. An all-to-all is an all-gather of a shard, and a penalty.
    """
    penalty, n = 0.0, np.asarray(n_bytes, float)
    if collective == "all_to_all":
        collective, n, penalty = "all_gather", n / group.ranks, CODE["mesh-penalty"]
    far, steps = group.nodes > 1, group.steps(collective)
    rate = CODE["mesh-rate-near"] * (CODE["mesh-rate-share-far"] if far else 1)
    latency_us = (
        CODE["mesh-base"]
        + steps * CODE[f"mesh-step-{'far' if far else 'near'}"]
        + penalty
    )
    return latency_us / 1e6 + n / 2**30 * steps / group.ranks / rate


def profiled_s(
    n_bytes: ArrayLike, seen_bytes: ArrayLike, seen_s: ArrayLike, others: ArrayLike = ()
) -> Floats:
    """pytorch Eq 7: time looked up in a profile (_inductor/fx_passes/profile_guided_estimation.py, 2.13.0).

    A size that was seen takes what its first sample took; between two sizes log t is linear in log n; beyond
    them t is proportional to n from the nearest; above twice the largest it is n over the bandwidth of the
    fastest among the five largest messages of the group, whatever their collective.

    seen_bytes, seen_s : (s,) samples; others : (2, o) bytes and seconds of other collectives of the group
    """
    n, order = np.asarray(n_bytes, float), np.argsort(seen_bytes, kind="stable")
    x, y = (np.asarray(values, float)[order] for values in (seen_bytes, seen_s))
    first, after = np.searchsorted(x, n, "left"), np.searchsorted(x, n, "right")
    low, high = np.maximum(after - 1, 0), np.minimum(first, len(x) - 1)
    inside = x[low] < x[high]
    share = np.where(
        inside, np.log(n / x[low]) / np.log(np.where(inside, x[high] / x[low], 2)), 0
    )
    between = np.exp((1 - share) * np.log(y[low]) + share * np.log(y[high]))
    nearest = np.where(n < x[0], y[0] * n / x[0], y[-1] * n / x[-1])
    result = np.where(first < after, y[high], np.where(inside, between, nearest))
    sizes, times = np.hstack([[x, y], np.reshape(others, (2, -1))])
    largest = np.argsort(-sizes, kind="stable")[: int(CODE["profile-largest"])]
    fastest = np.max(sizes[largest] / times[largest])
    return np.where(n > CODE["profile-reach"] * x[-1], n / fastest, result)


def roofline_s(
    flops: ArrayLike, n_bytes: ArrayLike, peak: float, bytes_per_s: float
) -> Floats:
    """pytorch Eq 8: t = max(f/2 / (0.75 p), n/B), in s (utils/_runtime_estimation.py, 2.13.0).

    Symbols: f = flops, p = peak in FLOP/s, both 2 a multiply-add; n = n_bytes moved, B = bytes_per_s.
    """
    counted = np.asarray(flops, float) / CODE["roofline-flops"]
    return np.maximum(
        counted / (CODE["roofline-share"] * peak), np.asarray(n_bytes) / bytes_per_s
    )
