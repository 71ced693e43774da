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

DENSE = "dense"
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
    "vgg16_cifar_eighth-cifar10": "VGG-16, an eighth as wide, CIFAR-10",
    "resnet20_half-cifar10": "ResNet-20, half as wide, CIFAR-10",
    "lstm_sentences-ptb": "LSTM, 2 x 64 units, PTB",
}
"""Network as recorded -> as in figures, in their order; behind a dash the real data that it was fed with."""
TEXTS = ("lstm_sentences", "lstm_sentences-ptb")
SEEDS = 3
"""With so many of every method a network is judged, and not before."""
UNDECIDED, SAME = "undecided", "the same training"


def recorded() -> pd.DataFrame:
    """Table ``sparse_convergence`` of every machine that has one."""
    found = source.recordings("sparse_convergence").values()
    return pd.concat([one.table("sparse_convergence") for one in found], ignore_index=True)


def fig03(trained: pd.DataFrame) -> pd.DataFrame:
    """Held-out score by epoch of each network, method and seed; of trainings of several lengths the longest.

    trained : table ``sparse_convergence``. A training that serves several methods, whose plans are the same,
    stands here once for each; one with a schedule is omgs's. ``value`` is what is drawn; ``sends``: how
    often, so far, each element would have been sent if all were sent equally often; NaN with a schedule.
    """
    longest = trained.groupby("network")["epochs"].transform("max")
    rows = trained[(trained["epochs"] == longest) & (trained["measured_on"] == "held_out")]
    rows = rows.assign(method=rows["method"].str.split("+")).explode("method", ignore_index=True)
    constant = rows["schedule"] == "constant"
    rows, constant = (one[constant | (rows["method"] == "omgs")] for one in (rows, constant))
    names = rows["method"].map(LABELS)
    text = rows["network"].isin(TEXTS)
    steps = rows["epoch"] * (rows["images"] // rows["batch"])
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
            "sends": (steps * rows["ranks"] * rows["selected"] / rows["parameters"]).where(
                constant
            ),
        }
    )
    if frame.empty:
        raise UserError("no sparsified training: run ddlkit measure convergence")
    order = [*NETWORKS.values()], [*dict.fromkeys(_ordered(frame["method"]))]
    keys = {"network": order[0].index, "method": order[1].index}
    return frame.sort_values(
        ["network", "method", "machine", "seed", "epoch"],
        key=lambda column: column.map(keys[column.name]) if column.name in keys else column,
        ignore_index=True,
    )


def _ordered(methods: pd.Series) -> list[str]:
    """Distinct methods, as in LABELS, those with a schedule behind those without."""
    known = [*LABELS.values()]
    return sorted(
        methods.unique(), key=lambda name: ("," in name, known.index(name.partition(",")[0]))
    )


def complete(frame: pd.DataFrame) -> pd.DataFrame:
    """Of `fig03` the networks of which every method was trained with SEEDS seeds, and those methods alone."""
    seeds = frame.groupby(["network", "method"])["seed"].nunique().unstack(fill_value=0)
    whole = seeds.reindex(columns=[*LABELS.values()], fill_value=0).ge(SEEDS).all(axis=1)
    rows = pd.MultiIndex.from_frame(frame[["network", "method"]])
    enough = seeds.stack().reindex(rows).ge(SEEDS).to_numpy()
    return frame[enough & frame["network"].map(whole).to_numpy()].reset_index(drop=True)


def waiting(frame: pd.DataFrame) -> dict[str, str]:
    """Of `fig03` the networks that are not judged yet: how many of the trainings that it takes there are.

    Wanted are SEEDS of every method, and of every schedule that is there.
    """
    judged, found = set(complete(frame)["network"]), {}
    for network, rows in frame[~frame["network"].isin(judged)].groupby("network", sort=False):
        there = rows[["method", "seed"]].drop_duplicates()
        wanted = SEEDS * len({*LABELS.values(), *there["method"]})
        found[str(network)] = f"{len(there)} of {wanted} trainings"
    return found


def final(frame: pd.DataFrame) -> pd.DataFrame:
    """Per network and method: seeds, mean score after the last epoch, spread over seeds, messages, sends."""
    last = frame[frame["epoch"] == frame.groupby("network")["epoch"].transform("max")]
    grouped = last.groupby(["network", "method"], sort=False)
    found = grouped["score"].agg(seeds="size", mean="mean", least="min", most="max")
    return found.assign(
        spread=found["most"] - found["least"],
        messages=grouped["messages"].first(),
        sends=grouped["sends"].first(),
    )


def compared(frame: pd.DataFrame) -> pd.DataFrame:
    """Every two methods of a network: how much better the first is, and whether that can be told.

    Columns: network, first, second, difference (of mean scores), spread (the larger of both), told (which one
    is better, "undecided", or "the same training" where both have one plan).
    """
    scores, rows = final(frame), []
    ends = frame.groupby(["network", "method"])["ends"].first()
    for network in frame["network"].unique():
        methods = scores.loc[network].index
        for number, first in enumerate(methods):
            for second in methods[number + 1 :]:
                one, other = (scores.loc[(network, name)] for name in (first, second))
                difference = float(one["mean"] - other["mean"])
                spread = float(max(one["spread"], other["spread"]))
                told = first if difference > 0 else second
                if abs(difference) <= spread or min(one["seeds"], other["seeds"]) < 2:
                    told = UNDECIDED
                if _same(ends, network, first, second):
                    told = SAME
                rows.append((network, first, second, difference, spread, told))
    names = ["network", "first", "second", "difference", "spread", "told"]
    return pd.DataFrame(rows, columns=names)


def _same(ends: pd.Series, network: str, first: str, second: str) -> bool:
    plans = ends[(network, first)], ends[(network, second)]
    return plans[0] == plans[1] and "," not in first + second


def ratios(frame: pd.DataFrame, method: str = "OMGS") -> pd.Series:
    """Score of a method over that of dense training of the same network, machine and seed."""
    last = frame[frame["epoch"] == frame.groupby("network")["epoch"].transform("max")]
    runs = ["network", "machine", "seed"]
    wide = last.pivot(index=runs, columns="method", values="score")
    found: Any = wide[method] / wide[LABELS[DENSE]]
    return found.dropna()


TEXT_FROM = 5
"""First epoch of a text that is drawn: before, perplexity is far above all that follows."""


def draw_fig03(frame: pd.DataFrame) -> Figure:
    """omgs Fig 3 of what is `complete`: a panel a network, whose title has OMGS-SGD's score over dense's.

    After the last epoch, and each at its best epoch.
    """
    networks = [str(name) for name in frame["network"].unique()]
    figure, axes = plots.canvas(columns=len(networks), height=3.4, squeeze=False)
    of_omgs = ratios(frame).groupby(level="network").mean()
    epochs = frame.groupby(["network", "method", "epoch"])["score"].mean()
    best = epochs.groupby(["network", "method"]).max().unstack()
    peaks = best[LABELS["omgs"]] / best[LABELS[DENSE]]
    for ax, network in zip(axes[0], networks, strict=True):
        rows = frame[frame["network"] == network]
        measure = str(rows["measure"].iloc[0])
        chosen = rows[rows["epoch"] >= TEXT_FROM] if "perplexity" in measure else rows
        how: dict[str, Any] = {
            "x": "epoch",
            "y": "value",
            "series": "method",
            "center": "mean",
            "percent": 100,
        }
        plots.samples(ax, chosen, legend="", **how)
        ax.set_ylabel(measure)
        plots.heading(ax, f"{network}\nOMGS: {of_omgs[network]:.0%}, best {peaks[network]:.0%}")
    plots.shared_legend(figure)
    return figure
