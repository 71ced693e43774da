"""omgs's figure 4, measured: replayed by 16 ranks in the lab, and really trained by 2 and 4.

The lab computes as the settings of `omgs_breakdown` do, and so much longer as its shortest sparse message is
above the start-up that it stands for: its times over that stretch are those of the paper's cluster, with
layers and selections as this machine has them. Sixteen ranks share two cores here.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ddlkit import store
from ddlkit.core.case import Case
from ddlkit.core.sparse import SelectionTimes, SparseGather
from ddlkit.core.workload import Workload
from ddlkit.model.calibration import Calibration
from ddlkit.model.predictor import OURS, computed, make_plan
from ddlkit.papers.omgs.cluster import PARTS, PLANS
from ddlkit.report import accuracy, plots, source
from ddlkit.report.claims import prose
from ddlkit.report.figures import omgs_breakdown
from ddlkit.report.source import Source

NETWORKS = {
    "vgg16_cifar": "VGG-16",
    "resnet50": "ResNet-50",
    "inception_v4": "Inception-v4",
    "lstm_ptb": "LSTM-PTB",
}
"""Network as recorded -> as the paper calls it."""
DENSE = "dense, exact"
PLAYED = (*PARTS, "update")
KINDS = (*omgs_breakdown.KINDS, "update")
"""Spans that look like PLAYED in a figure."""
BEFORE = 0
"""The session of a lab's calibration by which it was planned and its time stretched."""


def replayed(campaign: Source) -> pd.DataFrame:
    """Every algorithm on every network and link, in seconds of the paper's cluster.

    Columns: network, algorithm, link, startup_s, messages, PLAYED, iteration; ``predicted`` and
    ``predicted_exposed``, as foretold; repeatability (relative), processor_limited, processor_load; stretch,
    the lab's seconds over these. Where two algorithms find one plan, it was replayed once and stands twice.
    """
    cases, known = accuracy.joined(campaign), campaign.workloads()
    times = campaign.selections()
    planning = campaign.table("collectives")
    costs = Calibration.of(planning[planning["session"] == BEFORE], draws=0)
    sparse = cases[cases["density"] < 1]
    stretches = {
        place: _stretch(rows.iloc[0], known) for place, rows in sparse.groupby(["network", "link"])
    }
    rows = []
    for place, played in cases.groupby(["network", "link"], sort=False):
        row = _parts(played, known, times, stretches[place])
        start_s = costs.of_case(Case.from_row(sparse[sparse["link"] == place[1]].iloc[0]))
        row["startup_s"] = _rounded(start_s.cost.startup_s() / stretches[place])
        rows.append(_by_algorithm(row, known, times, costs))
    frame = pd.concat(rows, ignore_index=True)
    frame["network"] = frame["network"].map(NETWORKS)
    columns = ["network", "algorithm", "link", "startup_s", "messages", *PLAYED, "iteration"]
    said = ["predicted", "predicted_exposed", "repeatability", "processor_limited"]
    order = [*NETWORKS.values()], [*PLANS, DENSE]
    ranks = {"network": order[0].index, "algorithm": order[1].index}
    return frame[[*columns, *said, "processor_load", "stretch"]].sort_values(
        ["startup_s", "network", "algorithm"],
        key=lambda column: column.map(ranks[column.name]) if column.name in ranks else -column,
        ignore_index=True,
    )


def _rounded(seconds: float) -> float:
    """To two digits: a start-up, as a campaign asks for it, less the rounding of a dilation."""
    return float(f"{seconds:.2g}")


def _stretch(row: pd.Series, known: Mapping[str, Workload]) -> float:
    """What a network computes in this lab over what it computes in the paper's setting."""
    workload = known[row["profile_sha256"]].scaled(row["dilation"])
    return workload.compute_s / omgs_breakdown.setting(NETWORKS[row["network"]]).compute_s


def _parts(
    played: pd.DataFrame,
    known: Mapping[str, Workload],
    times: Mapping[str, SelectionTimes],
    stretch: float,
) -> pd.DataFrame:
    """PLAYED, iteration, and what was foretold of them, one row per case of one network and lab.

    Computing was waited out, selections too: what was measured of it is what was exposed.
    """
    rows = []
    for row in played.to_dict("records"):
        case = Case.from_row(row)
        plain = known[case.profile_sha256].scaled(case.dilation)
        whole = computed(case, known, times)
        rows.append(
            {
                **row,
                "messages": len(case.ends.split(";")),
                "forward": plain.forward_s,
                "backward": float(plain.backward_s.sum()),
                "selection": float(whole.backward_s.sum() - plain.backward_s.sum()),
                "exposed": row["measured_exposed_communication_s"],
                "update": plain.update_s,
                "iteration": row["measured_iteration_s"],
                "predicted": row[f"{OURS}_iteration_s"],
                "predicted_exposed": row[f"{OURS}_exposed_s"],
            }
        )
    frame = pd.DataFrame(rows)
    seconds = [*PLAYED, "iteration", "predicted", "predicted_exposed"]
    frame[seconds] = frame[seconds] / stretch
    return frame.assign(stretch=stretch)


def _by_algorithm(
    played: pd.DataFrame,
    known: Mapping[str, Workload],
    times: Mapping[str, SelectionTimes],
    costs: Calibration,
) -> pd.DataFrame:
    """The rows of one network and lab, once for each algorithm.

    What found the plan of another is not among them: it is planned again, as before they were played.
    """
    dense, sparse = played[played["density"] == 1], played[played["density"] < 1]
    found = [dense.assign(algorithm=DENSE)]
    case = Case.from_row(sparse.iloc[0])
    selecting, gather = times[case.selection_sha256], costs.of_case(case).cost
    assert isinstance(gather, SparseGather)
    cost = SparseGather(
        gather.gather, case.density, selecting=lambda n, rho: case.dilation * selecting(n, rho)
    )
    workload = known[case.profile_sha256].scaled(case.dilation)
    for algorithm, spec in PLANS.items():
        own = sparse[sparse["plan"] == spec]
        if own.empty:
            ends = ";".join(map(str, make_plan(spec, workload, cost).ends))
            own = sparse[sparse["ends"] == ends]
        found.append(own.assign(algorithm=algorithm))
    return pd.concat(found)


def fig04(frame: pd.DataFrame) -> pd.DataFrame:
    """omgs Fig 4: PLAYED by model at the paper's costs, and as `replayed` at its start-up, in its seconds.

    Columns: where, network, algorithm, messages, PLAYED, iteration, paper (of whole iterations, Tab VI). The
    model leaves the update out, as the paper does.
    """
    model = omgs_breakdown.fig04().assign(where="model", update=0.0)
    lab = frame[frame["startup_s"] == frame["startup_s"].max()].assign(where="lab")
    printed = model.set_index(["network", "algorithm"])["paper"]
    asked = pd.MultiIndex.from_frame(lab[["network", "algorithm"]])
    lab = lab.assign(paper=printed.reindex(asked).to_numpy())
    found = pd.concat([model, lab[model.columns]], ignore_index=True)
    return found.join(_ratios(found), on=["where", "network", "algorithm"])


def _ratios(frame: pd.DataFrame) -> pd.DataFrame:
    """RATIOS of OMGS-SGD by where, network and algorithm, and as omgs Tab VI and Section V-E print them.

    less_exposed : exposed communication of TopK-SGD over its own. Printed is how much shorter it is "about",
        and "very close", here 1, of VGG-16.
    """
    wide = frame.pivot(index=["where", "network"], columns="algorithm")
    ours = {
        "s1": wide["iteration", "TopK"] / wide["iteration", "OMGS"],
        "s2": wide["iteration", "MGS"] / wide["iteration", "OMGS"],
        "less_exposed": wide["exposed", "TopK"] / wide["exposed", "OMGS"],
    }
    said, networks = prose("omgs"), wide.index.get_level_values("network")
    printed = omgs_breakdown.printed()[["s1", "s2"]].reindex(networks).set_axis(wide.index)
    deep = said["fig04-deep"]
    exposed = {"VGG-16": 1.0, "ResNet-50": deep, "Inception-v4": deep}
    exposed["LSTM-PTB"] = 1 / (1 - said["fig04-lstm"] / 100)
    printed["less_exposed"] = networks.map(exposed)
    both = pd.DataFrame(ours).join(printed.add_suffix("_paper"))
    return both.assign(algorithm="OMGS").set_index("algorithm", append=True)


def speedups(frame: pd.DataFrame) -> pd.DataFrame:
    """omgs Tab VI's ratios, measured and foretold: one row per start-up and network.

    s1, s2: OMGS over TopK and MGS; best: exact merging over TopK; fastest: of TopK, MGS and OMGS;
    ``*_predicted`` of s1, s2 and best; resolved: how much a time's repeats differ, at most (relative);
    limited: whether the processor may have slowed one of the three.
    """
    rows = []
    for (startup_s, network), those in frame.groupby(["startup_s", "network"], sort=False):
        one = those.set_index("algorithm")
        row = {"startup_s": startup_s, "network": network}
        for name, column in (("", "iteration"), ("_predicted", "predicted")):
            taken = one[column]
            row[f"s1{name}"] = taken["TopK"] / taken["OMGS"]
            row[f"s2{name}"] = taken["MGS"] / taken["OMGS"]
            row[f"best{name}"] = taken["TopK"] / taken["exact"]
        rivals = one.loc[["TopK", "MGS", "OMGS"]]
        told = {
            "fastest": rivals["iteration"].idxmin(),
            "messages": one.loc["OMGS", "messages"],
            "exact_messages": one.loc["exact", "messages"],
            "resolved": rivals["repeatability"].max(),
            "limited": bool(rivals["processor_limited"].any()),
        }
        rows.append({**row, **told})
    return pd.DataFrame(rows)


def trained(tables: Source) -> pd.DataFrame:
    """Iterations of real sparsified training: medians over iterations, of the mean over ranks.

    Networks of many tensors come first.

    Columns: network, ranks, algorithm, messages, PLAYED (update: adding up what came, and the step),
    iteration, least and most of its rounds' medians, rounds, and in how many of them it was the fastest.
    """
    rows = tables.table("sparse_training")
    rows = rows.assign(
        algorithm=rows["plan"].map({spec: name for name, spec in PLANS.items()}),
        update_s=rows["update_s"] + rows["scatter_s"],
    )
    keys = ["network", "ranks", "algorithm"]
    of_ranks = rows.groupby([*keys, "messages", "repeat", "iteration"], sort=False)
    names = {f"{part}_s": part for part in (*PARTS[:3], "update", "iteration")}
    names["exposed_communication_s"] = "exposed"
    means = of_ranks[[*names]].mean().rename(columns=names)
    grouped = means.groupby([*keys, "messages"], sort=False)
    rounds = means.groupby([*keys, "messages", "repeat"], sort=False)["iteration"].median()
    ends = rounds.groupby(level=[*keys, "messages"], sort=False).agg(
        least="min", most="max", rounds="size"
    )
    first = rounds == rounds.groupby(level=["network", "ranks", "repeat"]).transform("min")
    ends["fastest"] = first.groupby(level=[*keys, "messages"], sort=False).sum()
    found = grouped[[*PLAYED, "iteration"]].median().join(ends).reset_index()
    order = {name: place for place, name in enumerate(PLANS)}
    found["place"] = found["algorithm"].map(order)
    found["tensors"] = found.groupby("network")["messages"].transform("max")
    keys, upwards = ["ranks", "tensors", "network", "place"], [True, False, True, True]
    found = found.sort_values(keys, ascending=upwards, ignore_index=True)
    return found.drop(columns=["place", "tensors"])


def beside(tables: Source) -> pd.DataFrame:
    """Selection and a backward pass, each alone and competing for the same cores: one row per size.

    Columns: elements; of either: ``*_s`` alone, ``*_beside_s``, ``*_slower`` (their ratio; ``_least`` and
    ``_most`` over rounds); ``together``: the shares of their own speeds, added up. At 1 they
    might as well take turns; 2 would be cores for both.
    """
    rows = tables.table("selection")
    rows = rows[rows["operation"].str.endswith(("_alone", "_beside"))]
    found = []
    for elements, those in rows.groupby("elements"):
        wide = those.assign(round=those.groupby("operation").cumcount())
        wide = wide.pivot(index="round", columns="operation", values="seconds")
        row: dict[str, float] = {"elements": float(str(elements))}
        for name, operation in (("selection", "topk_unsorted"), ("backward", "backward")):
            alone, both = wide[f"{operation}_alone"], wide[f"{operation}_beside"]
            slower = both / alone
            row |= {f"{name}_s": alone.median(), f"{name}_beside_s": both.median()}
            row |= {f"{name}_slower": slower.median()}
            row |= {f"{name}_slower_least": slower.min(), f"{name}_slower_most": slower.max()}
        shares = [row[f"{name}_s"] / row[f"{name}_beside_s"] for name in ("selection", "backward")]
        found.append({**row, "together": float(np.sum(shares))})
    return pd.DataFrame(found)


@cache
def at_papers_startup() -> pd.DataFrame:
    """`speedups` at the longest start-up of the recorded campaign, the paper's; by network."""
    campaign = source.open_campaign(name=source.OMGS).alone
    found = speedups(replayed(campaign))
    return found[found["startup_s"] == found["startup_s"].max()].set_index("network")


def recorded(data: str = "") -> Source:
    """Real sparsified training, and selection beside a backward pass: in ``data``, else as recorded."""
    return source.open_labs(data, source.SPARSE_TRAINING)


# -- drawn -------------------------------------------------------------------------------------------

SHOWN = ("TopK", "MGS", "OMGS", "exact")
"""Algorithms of figure 4 that are drawn: LAGS-SGD takes several times as long; the paper leaves it out."""
RATIOS = {"s1": ", TopK", "s2": ", MGS", "less_exposed": ""}
"""What `fig04` says of OMGS-SGD beside its times, and what stands behind a network's name there."""


def draw_fig04(frame: pd.DataFrame) -> Figure:
    """omgs Fig 4 of `fig04`: parts of iterations, and ratios of OMGS-SGD, each beside what is printed."""
    figure, axes = plots.canvas(columns=2, rows=3, height=8.6)
    networks = [str(name) for name in frame["network"].unique()]
    places = pd.MultiIndex.from_product([SHOWN, ("model", "lab")], names=["algorithm", "where"])
    for ax, network in zip(axes.flat, networks, strict=False):
        one = frame[frame["network"] == network].set_index(["algorithm", "where"]).reindex(places)
        parts = one[list(PLAYED)].set_axis(KINDS, axis=1).droplevel("where")
        how: dict[str, Any] = {
            "label": "iteration [s]",
            "pairs": "left: model, right: replayed",
            "legend": "",
        }
        plots.bars(ax, parts, stacked=True, **how)
        printed = one["paper"].to_numpy()[::2]
        plots.points(ax, 2 * np.arange(len(SHOWN)) + 0.5, printed, "paper", size=6)
        found = one.loc[("OMGS", "lab")]
        gain, said = (found[name] - 1 for name in ("s1", "s1_paper"))
        plots.heading(ax, f"{network}: gain {gain:.0%}, printed {said:.0%}")
    asked = (
        frame[frame["algorithm"] == "OMGS"]
        .set_index(["network", "where"])[[name + end for name in RATIOS for end in ("", "_paper")]]
        .unstack()
    )
    labels = "iteration over OMGS-SGD's", "exposed communication, TopK / OMGS"
    for ax, names, label in zip(axes[2], (["s1", "s2"], ["less_exposed"]), labels, strict=True):
        cases = [f"{network}{RATIOS[name]}" for name in names for network in networks]
        roles = {"paper": ("_paper", "model"), "model": ("", "model"), "replayed": ("", "lab")}
        values = {
            role: np.concatenate([asked[name + end, where][networks] for name in names])
            for role, (end, where) in roles.items()
        }
        dots = {role: (one, one) for role, one in values.items()}
        plots.intervals(ax, cases, dots, label=label, reference=1.0, legend="")
        off = np.nanmedian(np.abs(values["replayed"] / values["paper"] - 1))
        plots.heading(ax, f"Median {off:.0%} off the paper")
    plots.shared_legend(figure, axes[0, 0], axes[2, 0])
    return figure


def draw_training(frame: pd.DataFrame) -> Figure:
    """Parts of real iterations of `trained`, a panel a network; titles have LAGS over the fastest plan."""
    networks = frame["network"].unique()
    ranks = sorted(frame["ranks"].unique())
    figure, axes = plots.canvas(columns=2, rows=-(-len(networks) // 2), height=6.0, squeeze=False)
    places = pd.MultiIndex.from_product([PLANS, ranks], names=["algorithm", "ranks"])
    late = behind(frame)
    for ax, network in zip(axes.flat, networks, strict=False):
        one = frame[frame["network"] == network].set_index(["algorithm", "ranks"]).reindex(places)
        parts = one[list(PLAYED)].set_axis(KINDS, axis=1).droplevel("ranks")
        pairs = f"{ranks[0]} and {ranks[1]} ranks" if len(ranks) == 2 else ""
        how: dict[str, Any] = {"label": "iteration [s]", "pairs": pairs}
        rounds = ("shortest to longest round", one["least"], one["most"])
        plots.bars(ax, parts, stacked=True, spread=rounds, legend="", **how)
        shares = " and ".join(f"{late[network, n]:+.0%}" for n in ranks if (network, n) in late)
        plots.heading(ax, f"{store.network_title(network)}: LAGS {shares}")
    plots.shared_legend(figure)
    return figure


def behind(frame: pd.DataFrame, algorithm: str = "LAGS") -> pd.Series:
    """By network and ranks of `trained`, how much longer its iteration is than the fastest plan's."""
    wide = frame.pivot(index=["network", "ranks"], columns="algorithm", values="iteration")
    return (wide[algorithm] / wide.min(axis=1) - 1).dropna()


def decided(frame: pd.DataFrame) -> dict[tuple[str, int], str]:
    """By network and ranks of `trained`, the plan whose slowest round is faster than any round of another."""
    found = {}
    for (network, ranks), rows in frame.groupby(["network", "ranks"]):
        one = rows.set_index("algorithm")
        best = str(one["iteration"].idxmin())
        if one["most"][best] < one["least"].drop(best).min():
            found[str(network), int(ranks)] = best
    return found
