"""What omgs prints of four networks, and the unstated settings that agree with most of it.

Costs are those of the authors' published code. The times of the layers are scanned by
`workbook.omgs.equations.scan`.
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
"""A setting agrees with a printed time if it differs by at most this share of the time."""
HALF_S = 0.0005
"""Half a unit in the last digit of Table VI, in seconds."""
TIMES = ("topk_s", "mgs_s", "omgs_s")
"""The columns of Table VI with iterations in seconds."""


def tensors(network: str) -> tuple[int, ...]:
    """Return the elements of every tensor of a network of omgs Tab V, in forward order."""
    return networks.parameters(NETWORKS[network])


@cache
def printed() -> pd.DataFrame:
    """Return what omgs prints of each network.

    Returns
    -------
    DataFrame
        By network, the columns of Tab VI, the ``messages`` of OMGS-SGD in Tab V, and the
        ``density`` of Tab IV.
    """
    # The printed column "model" has the names of the networks.
    frame = paper_table("omgs", "tab06").set_index("model")
    frame["messages"] = paper_table("omgs", "tab05").set_index("model")["omgs"]
    # Tab IV has the four networks in the order of Tab VI, but spells one of them
    # "InceptionV4". The densities are therefore taken row by row, not by name.
    return frame.assign(density=paper_table("omgs", "tab04")["density"].to_numpy())


def cost_of(network: str) -> SparseGather:
    """Return the published cost of messages of 16 workers, at the network's density."""
    return published_cost(WORKERS, printed().loc[network, "density"])


@cache
def scanned(network: str) -> pd.DataFrame:
    """Return the iterations of every setting of a network under both rules (`scan`)."""
    topk_s = printed().loc[network, "topk_s"]
    return pd.DataFrame(scan(network, topk_s, cost_of(network)))


def compatible(network: str) -> pd.DataFrame:
    """Return the settings that agree with the most printed times.

    Parameters
    ----------
    network : str
        One of NETWORKS.

    Returns
    -------
    DataFrame
        The rows of `scanned`, the nearest first, with two more columns:

        agree
            With how many of TIMES, within TOLERANCE, the setting agrees.
        far
            The sum over TIMES of |log(time / printed time)|.
    """
    frame = scanned(network)
    stated = printed().loc[network]
    agree = sum((frame[name] / stated[name] - 1).abs() <= TOLERANCE for name in TIMES)
    far = sum(np.log(frame[name] / stated[name]).abs() for name in TIMES)
    agrees_most = agree == agree.max()
    settings = frame.assign(agree=agree, far=far)[agrees_most]
    # Settings that are equally near keep the order of the scan.
    return settings.sort_values("far", kind="stable")


def setting(network: str) -> Setting:
    """Return the setting that agrees with the most printed times, the nearest if several do."""
    # The first row of `compatible` is the nearest.
    nearest = compatible(network).iloc[0]
    return Setting(
        network,
        compute_s=float(nearest["compute_s"]),
        backward=float(nearest["backward"]),
        even=float(nearest["even"]),
        units=int(nearest["units"]),
    )
