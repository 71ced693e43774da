"""omgs's figure 3: what networks learn from dense and from sparsified gradients, and what can be told apart.

What is compared was fixed before anything was recorded. The score of a training is that of what it never saw,
after its last epoch: the share that is right or, for a text, 1/perplexity, the mean probability of the right
word. Of a network and method it is the mean over seeds, and the spread is the largest less the smallest. Two
methods whose means differ by no more than the larger of their spreads are undecided, and so are those that
were trained with fewer than two seeds.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ddlkit.core.errors import UserError
from ddlkit.report import plots, source

LABELS = {
    "dense": "dense",
    "topk": "TopK",
    "lags": "LAGS",
    "omgs": "OMGS",
    "exact": "exact merging",
}
"""Method as recorded -> as in figures, in their order; a schedule stands behind its method."""
NETWORKS = {
    "vgg16_cifar_eighth": "VGG-16, an eighth as wide",
    "resnet20_half": "ResNet-20, half as wide",
    "lstm_sentences": "LSTM, 2 x 64 units",
}
"""Network as recorded -> as in figures, in their order."""
TEXT = "lstm_sentences"
SEEDS = 3
"""With so many of every method a network is judged, and not before."""
TEXT_FROM = 5
"""First epoch of a text that is drawn: before, perplexity is far above all that follows."""


def fig03(trained: pd.DataFrame | None = None) -> pd.DataFrame:
    """Return held-out scores by epoch of each network, method and seed; of several lengths the longest.

    trained : table ``sparse_convergence``, of every machine that has one by default. A training that serves
    several methods, whose plans are the same, stands here once for each; one with a schedule is omgs's.
    ``value`` is what is drawn; ``sends``: how often, so far, each element would have been sent if all were
    sent equally often; NaN with a schedule.
    """
    if trained is None:
        machines = source.recordings("sparse_convergence").values()
        tables = [machine.table("sparse_convergence") for machine in machines]
        trained = pd.concat(tables, ignore_index=True)
    longest = trained.groupby("network")["epochs"].transform("max")
    rows = trained[(trained["epochs"] == longest) & (trained["measured_on"] == "held_out")]
    rows = rows.assign(method=rows["method"].str.split("+")).explode("method", ignore_index=True)
    rows = rows[(rows["schedule"] == "constant") | (rows["method"] == "omgs")]
    if rows.empty:
        raise UserError("no sparsified training: run ddlkit measure convergence")
    constant, text = rows["schedule"] == "constant", rows["network"] == TEXT
    names, steps = rows["method"].map(LABELS), rows["epoch"] * (rows["images"] // rows["batch"])
    sends = steps * rows["ranks"] * rows["selected"] / rows["parameters"]
    frame = pd.DataFrame(
        {
            "network": rows["network"].map(NETWORKS),
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
    )
    schedules = sorted({*frame["method"]} - {*LABELS.values()})
    names = [*NETWORKS.values(), *LABELS.values(), *schedules]
    order = {name: place for place, name in enumerate(names)}
    return frame.sort_values(
        ["network", "method", "machine", "seed", "epoch"],
        key=lambda column: column.map(order) if column.name in ("network", "method") else column,
        ignore_index=True,
    )


def complete(frame: pd.DataFrame) -> pd.DataFrame:
    """Return of `fig03` the networks of which every method has SEEDS seeds, and those methods alone."""
    seeds = frame.groupby(["network", "method"])["seed"].nunique().unstack(fill_value=0)
    whole = seeds.reindex(columns=[*LABELS.values()], fill_value=0).ge(SEEDS).all(axis=1)
    rows = pd.MultiIndex.from_frame(frame[["network", "method"]])
    enough = seeds.stack().reindex(rows).ge(SEEDS).to_numpy()
    return frame[enough & frame["network"].map(whole).to_numpy()].reset_index(drop=True)


def final(frame: pd.DataFrame) -> pd.DataFrame:
    """Return per network and method: seeds, mean score after the last epoch, its spread, plan, sends."""
    last = frame[frame["epoch"] == frame.groupby("network")["epoch"].transform("max")]
    grouped = last.groupby(["network", "method"], sort=False)
    scores = grouped["score"].agg(seeds="size", mean="mean", least="min", most="max")
    scores = scores.assign(spread=scores["most"] - scores["least"])
    return scores.join(grouped[["ends", "sends"]].first())


def ratios(frame: pd.DataFrame) -> pd.Series:
    """Return OMGS's score over that of dense training of the same network, machine and seed."""
    last = frame[frame["epoch"] == frame.groupby("network")["epoch"].transform("max")]
    runs = ["network", "machine", "seed"]
    wide = last.pivot(index=runs, columns="method", values="score")
    over_dense: Any = wide[LABELS["omgs"]] / wide[LABELS["dense"]]
    return over_dense.dropna()


def draw_fig03(frame: pd.DataFrame) -> Figure:
    """Draw omgs Fig 3 of what is `complete`: a panel a network; titles have OMGS-SGD's score over dense's.

    After the last epoch, and each at its best epoch.
    """
    networks = [str(name) for name in frame["network"].unique()]
    figure, axes = plots.canvas(columns=len(networks), height=3.4, squeeze=False)
    of_omgs = ratios(frame).groupby(level="network").mean()
    epochs = frame.groupby(["network", "method", "epoch"])["score"].mean()
    best = epochs.groupby(["network", "method"]).max().unstack()
    peaks = best[LABELS["omgs"]] / best[LABELS["dense"]]
    how: dict[str, Any] = {"x": "epoch", "y": "value", "series": "method", "center": "mean"}
    for ax, network in zip(axes[0], networks, strict=True):
        rows = frame[frame["network"] == network]
        measure = str(rows["measure"].iloc[0])
        chosen = rows[rows["epoch"] >= TEXT_FROM] if "perplexity" in measure else rows
        plots.samples(ax, chosen, legend="", percent=100, **how)
        ax.set_ylabel(measure)
        plots.heading(ax, f"{network}\nOMGS: {of_omgs[network]:.0%}, best {peaks[network]:.0%}")
    plots.shared_legend(figure)
    return figure
