"""osf Section 4.2 over whole sets of settings: what any fusion plan can gain over a constant buffer.

The constant buffer waits for its timeout, as in the paper's other figures: with a finite one 100 MB may
mean many messages. The plans that are compared with it wait for nothing in vain.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from itertools import product
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ddlkit.core.cost import AlphaBeta
from ddlkit.core.iteration import predict
from ddlkit.core.plan import make_plan
from ddlkit.core.units import MB
from ddlkit.core.workload import Workload
from ddlkit.papers.osf import cluster
from ddlkit.papers.osf.cluster import BUFFERS, FIVE, UNITS, Floats, Grid, PaperSetting

if TYPE_CHECKING:
    import pandas as pd

CONSTANT = 100 * MB


def least_iteration_s(workload: Workload, cost: AlphaBeta) -> float:
    """No plan is faster: the last tensor leaves after backward, and all bytes after the first gradient."""
    last, whole = workload.bytes[-1:], workload.bytes.sum()
    after_backward = workload.compute_s + float(cost(last)[0])
    after_first = workload.forward_s + workload.backward_s[0] + float(cost(whole))
    return max(after_backward, after_first)


def gains(setting: PaperSetting, network: str) -> dict[str, float]:
    """One network in one setting, by how much iterations get shorter.

    over_constant, over_mg_wfbp : of the best plan at most, over the constant buffer's and over MG-WFBP's;
    constant_over_others : of the constant buffer over the best of no fusion and the other buffers of
    Fig 4, and constant_over_none over no fusion alone; messages : of the constant buffer.
    """
    cost, workload = setting.cost(), setting.workload(network)
    taken = {size: _fused_s(network, setting, size) for size in (0, *BUFFERS)}
    constant_s, messages = taken.pop(CONSTANT)
    least_s = least_iteration_s(workload, cost)
    return {
        "over_constant": constant_s / least_s - 1,
        "over_mg_wfbp": _mg_wfbp_s(network, replace(setting, timeout_s=math.inf)) / least_s - 1,
        "constant_over_others": min(one for one, _ in taken.values()) / constant_s - 1,
        "constant_over_none": taken[0][0] / constant_s - 1,
        "messages": float(messages),
    }


@cache
def _mg_wfbp_s(network: str, setting: PaperSetting) -> float:
    cost, workload = setting.cost(), setting.workload(network)
    return predict(workload, make_plan("mg_wfbp", workload, cost), cost).iteration_s


def _fused_s(network: str, setting: PaperSetting, capacity: int) -> tuple[float, int]:
    """Iteration time and number of messages with a fusion buffer."""
    compute_s, cost = setting.compute_s(network), setting.cost()
    work, plan, waited = cluster.fused(
        network, compute_s, capacity, setting.timeout_s, setting.unit
    )
    overhead = np.array([cost.alpha_s])
    taken = cluster.fused_iteration_s(work, plan, waited, overhead, cost.beta_s_per_byte)
    return float(taken[0]), len(plan.ends)


def over(grid: Grid, wanted: NDArray[np.bool_]) -> pd.DataFrame:
    """``gains`` of all five networks over the ``wanted`` settings of a grid: a row per network and setting.

    Column ``setting`` numbers the settings. A network does not depend on the other family's computing
    time, so that of many settings each is computed once.
    """
    import pandas as pd

    places = np.argwhere(wanted)
    frames = []
    for network in FIVE:
        own = 4 if network.startswith("VGG") else 3
        keys, of_setting = np.unique(places[:, [0, 1, 2, own]], axis=0, return_inverse=True)
        rows = [gains(grid.setting((*key[:3], key[3], key[3])), network) for key in keys]
        found = pd.DataFrame(rows).iloc[of_setting.ravel()].reset_index(drop=True)
        frames.append(found.assign(network=network, setting=np.arange(len(places))))
    return pd.concat(frames, ignore_index=True)


def possible(network: str, grid: Grid) -> Floats:
    """What the best plan can gain at most over the constant buffer, in every setting of a grid.

    Shape as ``grid.shape``, 1 wide along the computing time of the other family.
    """
    own = "vgg16_s" if network.startswith("VGG") else "resnet101_s"
    times = grid.times[own] * cluster.network_flops(network)
    times = times / cluster.network_flops("VGG16" if own == "vgg16_s" else "ResNet101")
    timeouts_s, overheads_s = grid.times["timeout_s"], grid.times["overhead_s"]
    found = np.empty((len(UNITS), len(timeouts_s), len(overheads_s), len(times)))
    slope = PaperSetting(1.0, 1.0, 0.0).cost().beta_s_per_byte
    for (u, unit), (k, timeout_s), (t, compute_s) in product(
        enumerate(UNITS), enumerate(timeouts_s), enumerate(times)
    ):
        fused = cluster.fused(network, float(compute_s), CONSTANT, float(timeout_s), unit)
        taken_s = cluster.fused_iteration_s(*fused, overheads_s, slope)
        least = [least_iteration_s(fused[0], AlphaBeta(float(d), slope)) for d in overheads_s]
        found[u, k, :, t] = taken_s / least - 1
    return np.expand_dims(found, -2 if own == "vgg16_s" else -1)
