"""osf's figure 9: the loss of VGG-16 as published and with replaced layers, really trained here."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd

from ddlkit.papers import networks
from ddlkit.report.claims import claimed

PAPER_CLASSES = 1000
"""Of ImageNet, on which the paper trains."""
VARIANTS = {
    "vgg16_eighth": "published",
    "vgg16_eighth_replaced": "replaced",
    "vgg16_eighth_no_dropout": "published, no dropout",
}
"""Network as recorded -> name in figures."""


def fig09(trained: pd.DataFrame) -> pd.DataFrame:
    """Loss by epoch of each network, seed and set of images, also as a share of ln(classes), a guess's.

    trained : table ``convergence``; of trainings of several lengths the longest. ``paper`` is the printed
    training loss as such a share, in the last epoch of the paper's two networks, where they train.
    """
    trained = trained[trained["epochs"] == trained["epochs"].max()]
    frame = trained[["seed", "epoch", "epochs", "measured_on", "loss", "accuracy"]].copy()
    frame.insert(0, "network", [VARIANTS[name] for name in trained["network"]])
    frame["share_of_guess"] = frame["loss"] / np.log(trained["classes"])
    frame["paper"] = math.nan
    last = (frame["epoch"] == frame["epochs"]) & (frame["measured_on"] == "running")
    for name, claim in (("published", "osf-fig09-before"), ("replaced", "osf-fig09-after")):
        shown = claimed(claim) / math.log(PAPER_CLASSES)
        frame.loc[last & (frame["network"] == name), "paper"] = shown
    return frame.drop(columns="epochs")


def final(frame: pd.DataFrame, value: str = "loss") -> pd.DataFrame:
    """Mean, least and most over the seeds in the last epoch: a row a network, of ``fig09``'s rows."""
    at_the_end = frame[frame["epoch"] == frame["epoch"].max()]
    wide = at_the_end.pivot_table(
        index="network", columns="measured_on", values=value, aggfunc=["mean", "min", "max"]
    )
    return wide.reindex([name for name in VARIANTS.values() if name in wide.index])


def parameter_shares(trained: pd.DataFrame) -> pd.DataFrame:
    """Parameters of each network, and the share of its dense layers, beside VGG-16's as published."""
    counts = trained.groupby("network", sort=False)[["parameters", "dense_parameters"]].first()
    counts.index = pd.Index([VARIANTS[name] for name in counts.index])
    layers = networks.layers("VGG16")
    dense, whole = (sum(sum(one.tensors) for one in part) for part in (layers[-3:], layers))
    counts.loc["VGG-16 of the paper"] = [whole, dense]
    return counts.assign(dense_share=counts["dense_parameters"] / counts["parameters"])
