"""sharing Fig 7: the parts of an iteration by network, and the times that the text prints."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from workbook import plots
from workbook.common.claims import Result, check, own, prose
from workbook.common.specs import network_title
from workbook.plots.style import SOFT, case_rows, set_log
from workbook.sharing import implied, model
from workbook.sharing.parts import Bars, measured_parts
from workbook.sharing.printed import DEFAULT, throughput
from workbook.sharing.recordings import Tables, by_link
from workbook.sharing.shown import SIMULATED

BATCH = 64
NETWORKS = {
    "alexnet": "AlexNet",
    "vgg16": "VGG-16",
    "vgg19": "VGG-19",
    "vit": "ViT-Base/16",
    "resnet18": "ResNet-18",
    "resnet50": "ResNet-50",
    "resnet101": "ResNet-101",
}
"""The names of the networks in the paper's tables, by those in the ids of prose.csv."""
QUANTITIES = {
    "computation-only": [0],
    "overlap": [1],
    "communication-only": [2],
    "computation": [0, 1],
    "communication": [1, 2],
}
"""Which of `model.PARTS` add up to each time that the text prints."""


def bars(tables: Tables) -> Bars:
    """Return the parts of an iteration by network, simulated and measured on each link.

    Parameters
    ----------
    tables : Tables
        What a machine measured, as `recordings.recorded` returns it.

    Returns
    -------
    Bars
        A table for the simulation and for each link, with two rows for each network: the
        default, then the best configuration.
    """
    # A dict keeps the order of figure 8, and each network once.
    networks = dict.fromkeys(throughput().index.get_level_values("network"))
    cases = {name: (name, BATCH) for name in networks}
    return {SIMULATED: model.with_best(cases), **measured(tables)}


def measured(tables: Tables) -> dict[str, pd.DataFrame]:
    """Return the bars of each link, with a case for each network.

    Parameters
    ----------
    tables : Tables
        What a machine measured, as `recordings.recorded` returns it.

    Returns
    -------
    dict of str to DataFrame
        `Bars` of the links that have any, by names such as "here, lab:1gbit". A network is
        shown at a single batch: the middle one of those at which it was trained on any link,
        and of two in the middle the larger one.
    """
    by_place: dict[str, pd.DataFrame] = {}
    if "iterations" not in tables:
        return by_place
    # By network, all its batches, and the middle one of them.
    batches = tables["iterations"].groupby("network")["batch"].unique()
    middle = batches.map(lambda sizes: sorted(sizes)[len(sizes) // 2])
    for link, rows in by_link(tables, "iterations"):
        chosen = rows[rows["batch"] == rows["network"].map(middle)]
        # A link adds its own entry, or none if it has fewer than two networks.
        by_place |= measured_parts(link, chosen, by="network")
    return by_place


def printed() -> pd.DataFrame:
    """Return every time that the text prints of figure 7, with that of the model.

    Returns
    -------
    DataFrame
        A row for each printed time, with its ``network``, ``configuration`` (such as
        "2x256") and ``quantity`` (one of the keys of QUANTITIES), and the times by the
        ``paper`` and by the ``model`` in milliseconds.
    """
    rows = []
    for key, number in _stated_numbers().items():
        words = re.fullmatch(
            r"fig07-(?P<network>[a-z0-9]+)-(?P<quantity>.+)-(?P<which>default|best)",
            key,
        )
        # If an id lacks these words, such as "fig07-batch", its number is no time of figure 7.
        if not words:
            continue
        network = NETWORKS[words["network"]]
        configuration = DEFAULT
        if words["which"] == "best":
            # The best configuration by figure 8.
            configuration = model.best(network, BATCH)
        rows.append(
            {
                "network": network,
                "configuration": configuration,
                "quantity": words["quantity"],
                # All times of figure 7 are printed in milliseconds.
                "paper": number,
                "model": _model_ms(network, configuration, words["quantity"]),
            }
        )
    return pd.DataFrame(rows)


def _stated_numbers() -> dict[str, float]:
    """Return all numbers of the paper's prose by their id, with two more times of figure 7.

    Times are in milliseconds. There are also other numbers, such as ratios and per cents.

    Of AlexNet, the text prints one "computation only" time, in which nothing is sent. It holds
    for both configurations. Here, each of them has an id with this time.
    """
    stated = prose("sharing")
    for_both_ms = stated["fig07-alexnet-computation-only"]
    return {
        "fig07-alexnet-computation-only-default": for_both_ms,
        "fig07-alexnet-computation-only-best": for_both_ms,
        **stated,
    }


def _model_ms(network: str, configuration: str, quantity: str) -> float:
    """Return a time of QUANTITIES by the model, the sum of some of three parts, in ms."""
    parts_s = np.array(model.parts_s(network, BATCH, configuration))
    return sum(1e3 * parts_s[QUANTITIES[quantity]])


def numbers(tables: Tables) -> pd.DataFrame:
    """Return what the figure's CSV holds.

    There is a row for each bar. The simulated bars also have the printed times, in columns
    such as "printed overlap [ms]".

    Parameters
    ----------
    tables : Tables
        What a machine measured, as `recordings.recorded` returns it.
    """
    table = pd.concat(bars(tables), names=["where", "case"]).reset_index()
    times = printed()
    # The names of cases are as in `model.with_best`, such as "VGG-16, 3x64".
    times["case"] = times["network"] + ", " + times["configuration"]
    # A row for each case, and a column for each quantity.
    wide = times.pivot(index="case", columns="quantity", values="paper")
    wide = wide.add_prefix("printed ").add_suffix(" [ms]")
    # `reindex` returns one row for each bar, in the order of ``table``: the printed times of the
    # bar's case, or NaN if the bar is not a simulated one.
    simulated_case = table["case"].where(table["where"] == SIMULATED)
    printed_of_bars = wide.reindex(simulated_case).reset_index(drop=True)
    return pd.concat([table, printed_of_bars], axis=1)


def draw() -> Figure:
    """Draw each time that the text prints, and the model's.

    A panel has the times under the default, and another one those under the best
    configuration of figure 8. A row of a panel is a network and a quantity.
    """
    times = printed()
    median_error = (times["model"] / times["paper"] - 1).abs().median()
    message = (
        f"Half of the {len(times)} times by the model are within {median_error:.0%} of the "
        "times that the paper prints"
    )
    titles = times["network"].map(network_title)
    times["case"] = titles + ", " + times["quantity"].str.replace("-", " ")
    # Each case comes twice, once for each configuration, but makes a single row.
    cases = list(dict.fromkeys(times["case"]))
    is_default = times["configuration"] == DEFAULT
    panels = {
        f"NCCL's default, {DEFAULT}": times[is_default],
        "Best configuration of figure 8": times[~is_default],
    }
    sheet = plots.sheet(message, columns=2, height=3.8, sharex=True, sharey=True)
    with sheet as (figure, axes):
        for ax, (name, rows) in zip(axes, panels.items(), strict=True):
            # Both panels have the cases in the same order, and therefore the same rows.
            _draw_times(ax, cases, rows.set_index("case").loc[cases])
            plots.heading(ax, name)
        # Both panels share their horizontal axis.
        set_log(axes[0], "x")
    return figure


def _draw_times(ax: Axes, cases: Sequence[str], times: pd.DataFrame) -> None:
    """Draw the printed and the modelled time of each case, and a line between them."""
    heights = range(len(cases))
    case_rows(ax, cases, None)
    ax.hlines(heights, times["paper"], times["model"], color=SOFT, linewidth=1)
    for role in ("paper", "model"):
        plots.points(ax, times[role], heights, role, size=6)
    ax.set_xlabel("time in an iteration [ms]")


# -- claims --------------------------------------------------------------------------

check("sharing-fig07-vgg16", "VGG-16", 64)(implied.gain)

BOUNDED = {
    "alexnet": ("computation", "communication"),
    "vgg16": ("overlap", "communication-only"),
    "vit": ("computation",),
    "resnet18": ("communication",),
    "resnet50": ("communication",),
    "resnet101": ("communication",),
}
"""The printed times that figure 8 and the other printed times bound, by network."""


def _check_bound(claim: str, network: str, time: str, configuration: str) -> None:
    """Register the check of a printed time. ``network`` is one of the keys of NETWORKS."""
    text = f"fig07-{network}"
    register = check(claim, text, NETWORKS[network], BATCH, time, configuration)
    register(implied.possible_times)


for _network, _times in BOUNDED.items():
    for _time in _times:
        for _configuration in ("default", "best"):
            _id = f"sharing-fig07-{_network}-{_time}-{_configuration}"
            _check_bound(_id, _network, _time, _configuration)
_check_bound(
    "sharing-fig07-alexnet-computation-only", "alexnet", "computation-only", "best"
)


@check("sharing-fig07-vgg19-computation-only-default", "best", 1)
@check("sharing-fig07-vgg19-computation-only-best", "default", -1)
def _same_communication(known: str, sign: int) -> Result:
    """Return VGG-19's "computation only" time of one configuration, from that of the other.

    "Computation only" is the part of an iteration in which nothing is sent. The text says that
    both configurations have the same communication. Their "computation only" times therefore
    differ by as much as their iterations, which figure 8 has.

    Parameters
    ----------
    known : {"default", "best"}
        The configuration whose printed "computation only" time is used. The time of the other
        one is returned.
    sign : {1, -1}
        1 if the best is known: its iteration is the shorter one, so that the difference of
        the iterations is added. -1 if the default is known.
    """
    # Each array has the shortest and then the longest iteration that figure 8 allows. The
    # least difference is the shortest default less the longest best, so that the order of the
    # best is reversed.
    default_ms = implied.iteration_ms("VGG-19", BATCH, "default")
    best_ms = implied.iteration_ms("VGG-19", BATCH, "best")
    differences_ms = default_ms - best_ms[::-1]
    # The printed time of the known configuration is rounded to a whole millisecond, which
    # widens the range by half a millisecond at each end.
    least_ms, most_ms = differences_ms + [-0.5, 0.5]
    known_ms = prose("sharing")[f"fig07-vgg19-computation-only-{known}"]
    # The "identity" is that the two "computation only" times differ by as much as the iterations.
    # The claims about both times follow from it.
    note = (
        f"communication is the same, so from {known_ms:.0f} ms by Fig 8's iterations, "
        "one identity of both"
    )
    # `own` sorts the ends of the interval, which come the other way round with sign -1.
    ends_ms = (known_ms + sign * least_ms, known_ms + sign * most_ms)
    return own([ends_ms], note)
