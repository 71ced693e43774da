"""omgs Fig 3: what networks learn with sparsified gradients, really trained.

Fixed before anything was recorded: a training's score is the share of held-out images that is right or, for a
text, 1/perplexity, after its last epoch; of a network and method, the mean over seeds.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ddlkit.core.errors import UserError
from workbook import plots
from workbook.common import source

TITLES = {
    "dense": "dense",
    "topk": "TopK",
    "lags": "LAGS",
    "omgs": "OMGS",
    "exact": "exact merging",
}
TEXT = "lstm_sentences"
LEARNED = {
    "vgg16_cifar_eighth": "VGG-16, an eighth as wide",
    "resnet20_half": "ResNet-20, half as wide",
    TEXT: "LSTM, 2 x 64 units",
}
SEEDS = 3
"""With so many of every method a network is judged, and not before."""


def measured(trained: pd.DataFrame | None = None) -> pd.DataFrame:
    """Return held-out scores by epoch of each network, method and seed; of several lengths the longest.

    trained : table ``sparse_convergence``, by default of every machine
    value : what is drawn; sends : how often, so far, each element would have been sent if all were alike
    """
    if trained is None:
        machines = source.recordings("sparse_convergence").values()
        trained = pd.concat(
            [machine.table("sparse_convergence") for machine in machines]
        )
    longest = trained.groupby("network")["epochs"].transform("max")
    rows = trained[
        (trained["epochs"] == longest) & (trained["measured_on"] == "held_out")
    ]
    rows = rows.assign(method=rows["method"].str.split("+")).explode(
        "method", ignore_index=True
    )
    rows = rows[(rows["schedule"] == "constant") | (rows["method"] == "omgs")]
    if rows.empty:
        raise UserError("no sparsified training: run ddlkit measure convergence")
    constant, text = rows["schedule"] == "constant", rows["network"] == TEXT
    names = rows["method"].map(TITLES)
    steps = rows["epoch"] * (rows["images"] // rows["batch"])
    sends = steps * rows["ranks"] * rows["selected"] / rows["parameters"]
    columns = {
        "network": rows["network"].map(LEARNED),
        "method": names.where(constant, names + ", " + rows["schedule"]),
        "machine": rows.get("machine", ""),
        "seed": rows["seed"],
        "epoch": rows["epoch"],
        "score": np.exp(-rows["loss"]).where(text, rows["accuracy"]),
        "measure": text.map({True: "held-out perplexity", False: "held-out accuracy"}),
        "value": np.exp(rows["loss"]).where(text, rows["accuracy"]),
        "messages": rows["messages"],
        "ends": rows["ends"],
        "sends": sends.where(constant),
    }
    frame = pd.DataFrame(columns)
    schedules = sorted({*frame["method"]} - {*TITLES.values()})
    order = [*LEARNED.values(), *TITLES.values(), *schedules].index
    frame["places"] = [
        *zip(frame["network"].map(order), frame["method"].map(order), strict=True)
    ]
    frame = frame.sort_values(["places", "machine", "seed", "epoch"], ignore_index=True)
    return frame.drop(columns="places")


def numbers(frame: pd.DataFrame) -> pd.DataFrame:
    """Return of `measured` the networks of which every method has SEEDS seeds, and those methods alone."""
    seeds = frame.groupby(["network", "method"])["seed"].transform("nunique")
    kept = frame[seeds >= SEEDS]
    titled = kept[kept["method"].isin(TITLES.values())]
    methods = titled.groupby("network")["method"].nunique()
    whole = methods[methods == len(TITLES)].index
    return kept[kept["network"].isin(whole)].reset_index(drop=True)


def final(frame: pd.DataFrame) -> pd.DataFrame:
    """Return per network and method: seeds, mean score after the last epoch, its spread, plan, sends."""
    grouped = _last(frame).groupby(["network", "method"], sort=False)
    scores = grouped["score"].agg(seeds="size", mean="mean", spread=np.ptp)
    return scores.join(grouped[["ends", "sends"]].first())


def _last(frame: pd.DataFrame) -> pd.DataFrame:
    return frame[frame["epoch"] == frame.groupby("network")["epoch"].transform("max")]


def ratios(frame: pd.DataFrame) -> pd.Series:
    """Return OMGS's score over that of dense training of the same network, machine and seed."""
    runs = ["network", "machine", "seed"]
    wide = _last(frame).pivot(index=runs, columns="method", values="score")
    return (wide["OMGS"] / wide["dense"]).dropna()


def draw(frame: pd.DataFrame) -> Figure:
    """Draw `numbers`; titles have OMGS-SGD's last score over dense's."""
    of_omgs = ratios(frame).groupby(level="network").mean()
    said = (
        f"After the last epoch, the score of OMGS-SGD is {of_omgs.min():.0%} to "
        f"{of_omgs.max():.0%} of the score of dense training"
    )
    with plots.sheet(said, columns=len(of_omgs), height=3.6, squeeze=False) as (
        figure,
        axes,
    ):
        for ax, (network, rows) in zip(
            axes[0], frame.groupby("network", sort=False), strict=True
        ):
            # The text's perplexity is far above before its fifth epoch.
            shown = rows[rows["epoch"] >= 5 * (network == LEARNED[TEXT])]
            plots.samples(
                ax,
                shown,
                x="epoch",
                y="value",
                series="method",
                center="mean",
                percent=100,
            )
            ax.set_ylabel(str(rows["measure"].iloc[0]))
            ax.set_title(f"{network}\nOMGS: {of_omgs[network]:.0%} of dense")
    return figure
