"""omgs's unstated settings: what it prints of four networks, and the settings that agree with most of that.

Costs are those of the authors' published code, layer times are scanned (`workbook.omgs.equations.scan`).
"""

from __future__ import annotations

from functools import cache

import numpy as np
import pandas as pd

from ddlkit.core.sparse import SparseGather
from workbook.common import networks
from workbook.common.claims import paper_table
from workbook.omgs.equations import NETWORKS, Setting, published_cost, scan
from workbook.validate import audit

RESNET = "ResNet-50"
WORKERS = audit.WORKERS
TOLERANCE = 0.05
"""Within which a printed time agrees with a setting."""
HALF_S = 0.0005
"""Half a digit of Table VI."""
TIMES = ("topk_s", "mgs_s", "omgs_s")


def tensors(network: str) -> tuple[int, ...]:
    """Return elements of every tensor of a network of omgs Tab V, in forward order."""
    return networks.parameters(NETWORKS[network])


@cache
def printed() -> pd.DataFrame:
    """Return by network: times, ratios and messages of omgs Tabs V and VI, and the density of Tab IV."""
    frame = paper_table("omgs", "tab06").set_index("model")
    frame["messages"] = paper_table("omgs", "tab05").set_index("model")["omgs"]
    return frame.assign(density=paper_table("omgs", "tab04")["density"].to_numpy())


def cost_of(network: str) -> SparseGather:
    """Return the cost of 16 workers' messages on 1 Gbit/s, as published, at the network's density."""
    return published_cost(WORKERS, printed().loc[network, "density"])


@cache
def scanned(network: str) -> pd.DataFrame:
    """Return every setting of a network under both rules (`scan`)."""
    return pd.DataFrame(
        scan(network, printed().loc[network, "topk_s"], cost_of(network))
    )


def compatible(network: str) -> pd.DataFrame:
    """Return settings that agree with as many printed times as any does, the nearest first."""
    frame, stated = scanned(network), printed().loc[network]
    agree = sum((frame[name] / stated[name] - 1).abs() <= TOLERANCE for name in TIMES)
    far = sum(np.log(frame[name] / stated[name]).abs() for name in TIMES)
    most = agree == agree.max()
    found = frame[most].assign(agree=agree[most], far=far[most])
    return found.sort_values("far", kind="stable")


def setting(network: str) -> Setting:
    """Return the compatible setting that is nearest to the printed times."""
    best = compatible(network).iloc[0]
    numbers = {name: float(best[name]) for name in ("compute_s", "backward", "even")}
    return Setting(network, **numbers, units=int(best["units"]))
