"""omgs Fig 3: what networks learn with sparsified gradients in real training.

The score was fixed before anything was recorded. The score of a training, after its last
epoch, is the share of held-out images that are classified correctly or, for a text,
1/perplexity. The score of a network and a method is the mean over seeds.
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
"""The methods as tables and the figure call them, by their names in recordings."""
TEXT = "lstm_sentences"
LEARNED = {
    "vgg16_cifar_eighth": "VGG-16, an eighth as wide",
    "resnet20_half": "ResNet-20, half as wide",
    TEXT: "LSTM, 2 x 64 units",
}
"""The networks as tables and the figure call them, by their names in recordings."""
SEEDS = 3
"""A network is judged as soon as every method has this number of seeds."""
TEXT_FROM_EPOCH = 5
"""The first epoch of the text that is drawn. Its perplexity is far larger before."""


def measured(trained: pd.DataFrame | None = None) -> pd.DataFrame:
    """Return the held-out scores by network, method, machine, seed and epoch.

    Parameters
    ----------
    trained : DataFrame, optional
        The table ``sparse_convergence``, by default that of every machine.

    Returns
    -------
    DataFrame
        A row for each epoch of each training. Of a network's trainings only those with the
        most epochs count (`_one_method_a_row`). ``network``, ``method``, ``machine``, ``seed``
        and ``epoch`` name the row. The other columns are:

        score
            The accuracy, or 1/perplexity for a text.
        measure, value
            What is drawn, "held-out accuracy" or "held-out perplexity", and its value.
        messages, ends
            The number of messages, and a text that says after how many gradients, in the order
            in which they become ready, each message ends, as in "3;8". It is empty for dense
            training.
        sends
            How often a parameter's gradient has been sent so far, as a mean over all parameters.
            It is NaN if the density changes by a schedule.

    Raises
    ------
    UserError
        If no sparsified training is recorded.
    """
    if trained is None:
        machines = source.recordings("sparse_convergence").values()
        tables = [machine.table("sparse_convergence") for machine in machines]
        trained = pd.concat(tables)
    rows = _one_method_a_row(trained)
    if rows.empty:
        raise UserError("no sparsified training: run ddlkit measure convergence")

    # Whether the density is the same in all epochs.
    is_constant = rows["schedule"] == "constant"
    is_text = rows["network"] == TEXT
    names = rows["method"].map(TITLES)
    # The loss of a text is the logarithm of its perplexity.
    perplexity = np.exp(rows["loss"])
    inverse_perplexity = np.exp(-rows["loss"])
    columns = {
        "network": rows["network"].map(LEARNED),
        "method": names.where(is_constant, names + ", " + rows["schedule"]),
        # A table that was passed in may lack this column.
        "machine": rows.get("machine", ""),
        "seed": rows["seed"],
        "epoch": rows["epoch"],
        "score": inverse_perplexity.where(is_text, rows["accuracy"]),
        "measure": is_text.map(
            {True: "held-out perplexity", False: "held-out accuracy"}
        ),
        "value": perplexity.where(is_text, rows["accuracy"]),
        "messages": rows["messages"],
        "ends": rows["ends"],
        "sends": _sends(rows).where(is_constant),
    }
    return _in_order(pd.DataFrame(columns))


def _sends(rows: pd.DataFrame) -> pd.Series:
    """Return how often a parameter has been sent by the end of each row's epoch, on average.

    All that the ranks have sent together is divided by the number of parameters. The density
    of the row is taken to be that of all epochs.
    """
    # A batch is that of all ranks together. An epoch leaves out images that do not fill one.
    steps = rows["epoch"] * (rows["images"] // rows["batch"])
    # In each step, every rank sends ``selected`` of the parameters.
    return steps * rows["ranks"] * rows["selected"] / rows["parameters"]


def _one_method_a_row(trained: pd.DataFrame) -> pd.DataFrame:
    """Return the held-out rows of each network's longest trainings, with one method a row.

    A training counts for every method whose plan it has: a row of "lags+exact" becomes
    two. A training with a schedule of densities counts for OMGS-SGD only.
    """
    most_epochs = trained.groupby("network")["epochs"].transform("max")
    is_longest = trained["epochs"] == most_epochs
    rows = trained[is_longest & (trained["measured_on"] == "held_out")]
    rows = rows.assign(method=rows["method"].str.split("+"))
    rows = rows.explode("method", ignore_index=True)
    # With the schedule "constant" the density is the same in all epochs.
    return rows[(rows["schedule"] == "constant") | (rows["method"] == "omgs")]


def _in_order(frame: pd.DataFrame) -> pd.DataFrame:
    """Return rows in the order of LEARNED and of TITLES, methods with a schedule last.

    LEARNED has the names of the networks, and TITLES those of the methods.
    """
    # The name of a method with a schedule of densities, such as "OMGS, ...", has no title.
    scheduled = sorted(set(frame["method"]) - set(TITLES.values()))
    networks = list(LEARNED.values())
    methods = [*TITLES.values(), *scheduled]
    ordered = frame.assign(
        network_order=frame["network"].map(networks.index),
        method_order=frame["method"].map(methods.index),
    )
    keys = ["network_order", "method_order", "machine", "seed", "epoch"]
    ordered = ordered.sort_values(keys, ignore_index=True)
    return ordered.drop(columns=["network_order", "method_order"])


def numbers(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of `measured` of the networks that have been trained often enough.

    A network counts if every method of TITLES was trained from at least SEEDS seeds. Of such
    a network, methods with a schedule of densities are kept, too, if they have as many
    seeds.

    Parameters
    ----------
    frame : DataFrame
        What `measured` returned.
    """
    n_seeds = frame.groupby(["network", "method"])["seed"].transform("nunique")
    with_enough_seeds = frame[n_seeds >= SEEDS]
    is_titled = with_enough_seeds["method"].isin(TITLES.values())
    n_methods = with_enough_seeds[is_titled].groupby("network")["method"].nunique()
    complete_networks = n_methods[n_methods == len(TITLES)].index
    is_complete = with_enough_seeds["network"].isin(complete_networks)
    return with_enough_seeds[is_complete].reset_index(drop=True)


def final(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the scores after the last epoch.

    Parameters
    ----------
    frame : DataFrame
        What `numbers` returned.

    Returns
    -------
    DataFrame
        By network and method: the number of trainings as ``seeds``, the ``mean`` of the
        score, and its ``spread`` (largest less least) over them. ``ends`` and ``sends`` are
        those of `measured`: where the messages of the plan end, and how often a parameter was
        sent in the whole training, on average.
    """
    grouped = _last(frame).groupby(["network", "method"], sort=False)
    scores = grouped["score"].agg(seeds="size", mean="mean", spread=np.ptp)
    # The plan, and thus what is sent, does not depend on the seed.
    return scores.join(grouped[["ends", "sends"]].first())


def _last(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of each network's last epoch."""
    last_epoch = frame.groupby("network")["epoch"].transform("max")
    return frame[frame["epoch"] == last_epoch]


def ratios(frame: pd.DataFrame) -> pd.Series:
    """Return the score of OMGS-SGD divided by the score of dense training.

    The ratios are those after the last epoch, by network, machine and seed.

    Parameters
    ----------
    frame : DataFrame
        What `numbers` returned.
    """
    training = ["network", "machine", "seed"]
    scores = _last(frame).pivot(index=training, columns="method", values="score")
    # On a machine, a seed may have been trained with only one of both methods. Its ratio is
    # NaN.
    return (scores["OMGS"] / scores["dense"]).dropna()


def draw(frame: pd.DataFrame) -> Figure:
    """Draw the learning curves, a panel for each network.

    The headings say the score of OMGS-SGD over that of dense training, after the last epoch.

    Parameters
    ----------
    frame : DataFrame
        What `numbers` returned.
    """
    mean_ratios = ratios(frame).groupby(level="network").mean()
    message = (
        f"After the last epoch, the score of OMGS-SGD is {mean_ratios.min():.0%} to "
        f"{mean_ratios.max():.0%} of the score of dense training"
    )
    by_network = frame.groupby("network", sort=False)
    sheet = plots.sheet(message, columns=len(mean_ratios), height=3.6, squeeze=False)
    with sheet as (figure, axes):
        for ax, (network, rows) in zip(axes[0], by_network, strict=True):
            # The perplexity of earlier epochs would stretch the axis.
            if network == LEARNED[TEXT]:
                rows = rows[rows["epoch"] >= TEXT_FROM_EPOCH]
            plots.samples(
                ax,
                rows,
                x="epoch",
                y="value",
                series="method",
                # A line is the mean over seeds, and its band holds all of them.
                center="mean",
                percent=100,
            )
            ax.set_ylabel(str(rows["measure"].iloc[0]))
            ax.set_title(f"{network}\nOMGS: {mean_ratios[network]:.0%} of dense")
    return figure
