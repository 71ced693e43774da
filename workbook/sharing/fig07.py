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
"""By what ids in prose.csv call a network: what the paper's tables call it."""
QUANTITIES = {
    **{part.replace(" ", "-"): [k] for k, part in enumerate(model.PARTS)},
    "computation": [0, 1],
    "communication": [1, 2],
}
"""By what the text calls a time: which of `model.PARTS` it adds up."""


def bars(tables: Tables) -> Bars:
    """Return parts of an iteration by network: simulated, and of each link as measured."""
    networks = dict.fromkeys(throughput().index.get_level_values("network"))
    simulated = model.with_best({name: (name, BATCH) for name in networks})
    return {SIMULATED: simulated} | measured(tables)


def measured(tables: Tables) -> dict[str, pd.DataFrame]:
    """Return bars of each link, at the middle one of each network's batches."""
    every: dict[str, pd.DataFrame] = {}
    for link, rows in by_link(tables, "iterations"):
        batches = tables["iterations"].groupby("network")["batch"].unique()
        middle = batches.map(lambda each: sorted(each)[len(each) // 2])
        chosen = rows[rows["batch"] == rows["network"].map(middle)]
        every |= measured_parts(link, chosen, "network")
    return every


def printed() -> pd.DataFrame:
    """Return every time that the text gives, in ms, beside the model.

    AlexNet's time of computation only, which is said of both configurations, stands twice.
    """
    every = prose("sharing")
    alone = "fig07-alexnet-computation-only"
    every = {f"{alone}-{which}": every[alone] for which in ("default", "best")} | every
    rows = []
    for key, value in every.items():
        if words := re.fullmatch(r"fig07-([a-z0-9]+)-(.+)-(default|best)", key):
            network, quantity = NETWORKS[words[1]], words[2]
            name = DEFAULT if words[3] == "default" else model.best(network, BATCH)
            parts_s = np.array(model.parts_s(network, BATCH, name))
            model_ms = sum(1e3 * parts_s[QUANTITIES[quantity]])
            rows.append((network, name, quantity, value, model_ms))
    return pd.DataFrame(
        rows, columns=["network", "configuration", "quantity", "paper", "model"]
    )


def numbers(tables: Tables) -> pd.DataFrame:
    """Return what the figure's CSV holds: bars, and what the text prints of the paper's."""
    table = pd.concat(bars(tables), names=["where", "case"]).reset_index()
    times = printed()
    cases = times["network"] + ", " + times["configuration"]
    wide = times.assign(case=cases).pivot(
        index="case", columns="quantity", values="paper"
    )
    wide = wide.add_prefix("printed ").add_suffix(" [ms]")
    of_paper = table["case"].where(table["where"] == SIMULATED)
    return pd.concat([table, wide.reindex(of_paper).reset_index(drop=True)], axis=1)


def draw() -> Figure:
    """Draw each printed time and the model's, by default and best configuration."""
    times = printed()
    off = (times["model"] / times["paper"] - 1).abs().median()
    said = (
        f"Half of the {len(times)} times by the model are within {off:.0%} of the times "
        "that the paper prints"
    )
    times["case"] = times["network"].map(network_title) + ", "
    times["case"] += times["quantity"].str.replace("-", " ")
    is_default = times["configuration"] == DEFAULT
    panels = {
        f"NCCL's default, {DEFAULT}": times[is_default],
        "Best configuration of figure 8": times[~is_default],
    }
    cases = list(dict.fromkeys(times["case"]))
    with plots.sheet(said, columns=2, height=3.8, sharex=True, sharey=True) as (
        figure,
        axes,
    ):
        for ax, (name, rows) in zip(axes, panels.items(), strict=True):
            _draw_times(ax, cases, rows.set_index("case").loc[cases])
            plots.heading(ax, name)
        set_log(axes[0], "x")
    return figure


def _draw_times(ax: Axes, cases: Sequence[str], times: pd.DataFrame) -> None:
    """Draw a row a case: the printed time, the model's, and a line from one to the other."""
    places = range(len(cases))
    case_rows(ax, cases, None)
    ax.hlines(places, times["paper"], times["model"], color=SOFT, linewidth=1)
    for role in ("paper", "model"):
        plots.points(ax, times[role], places, role, size=6)
    ax.set_xlabel("time in an iteration [ms]")


# -- claims --------------------------------------------------------------------------------------

check("sharing-fig07-vgg16", "VGG-16", 64)(implied.gain)

BOUNDED = {
    "alexnet": ("computation", "communication"),
    "vgg16": ("overlap", "communication-only"),
    "vit": ("computation",),
    "resnet18": ("communication",),
    "resnet50": ("communication",),
    "resnet101": ("communication",),
}
"""Printed times that figure 8 and the others bound, by network."""


def _check_bound(claim: str, short: str, part: str, configuration: str) -> None:
    given = f"fig07-{short}", NETWORKS[short], BATCH, part, configuration
    check(claim, *given)(implied.time_left)


for _short, _bounded in BOUNDED.items():
    for _part in _bounded:
        for _which in ("default", "best"):
            _id = f"sharing-fig07-{_short}-{_part}-{_which}"
            _check_bound(_id, _short, _part, _which)
_check_bound(
    "sharing-fig07-alexnet-computation-only", "alexnet", "computation-only", "best"
)


@check("sharing-fig07-vgg19-computation-only-default", "best", 1)
@check("sharing-fig07-vgg19-computation-only-best", "default", -1)
def _same_communication(other: str, sign: int) -> Result:
    default, best = (
        implied.iteration_ms("VGG-19", BATCH, which) for which in ("default", "best")
    )
    least, most = default - best[::-1] + [-0.5, 0.5]
    other_ms = prose("sharing")[f"fig07-vgg19-computation-only-{other}"]
    note = (
        f"communication is the same, so from {other_ms:.0f} ms by Fig 8's iterations, "
        "one identity of both"
    )
    return own([(other_ms + sign * least, other_ms + sign * most)], note)
