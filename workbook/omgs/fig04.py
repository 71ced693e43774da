"""omgs Fig 4: the parts of an iteration, by model at the paper's costs and as replayed.

The lab computes as the nearest setting does, but slower by a stretch. The stretch is the
shortest sparse message of the lab over the start-up that it stands for. The lab's times
over the stretch are those of the paper's cluster.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddlkit.core.case import Case
from ddlkit.core.cost import MessageCost
from ddlkit.core.sparse import Selecting, SparseGather
from ddlkit.core.workload import Floats, Workload
from ddlkit.model import make_plan
from ddlkit.model.calibration import Calibration
from ddlkit.model.predictor import workload_of_case
from workbook import plots
from workbook.common import claims
from workbook.common.claims import Result, check, own, prose
from workbook.common.papers import published_code
from workbook.common.source import Source
from workbook.omgs.code_costs import LEFT, OpenCase, topk_parts, unstated
from workbook.omgs.equations import LSTM, NETWORKS, PARTS, PLANS, planned
from workbook.omgs.settings import (
    HALF_S,
    RESNET,
    cost_of,
    printed,
    setting,
    tensors,
)
from workbook.validate import accuracy
from workbook.validate.audit import DENSITY
from workbook.validate.rivals import OURS

LAB_NETWORKS = {
    "vgg16_cifar": "VGG-16",
    "resnet50": "ResNet-50",
    "inception_v4": "Inception-v4",
    "lstm_ptb": "LSTM-PTB",
}
"""The networks as the paper spells them, by their names in recordings."""
DENSE = "dense, exact"
PLAYED = (*PARTS, "update")
"""The parts of a replayed iteration."""
KINDS = ("forward", "backward", "sparsify", "all_gather", "update")
"""The spans of a timeline in whose colours PLAYED are drawn."""
SHOWN = ("TopK", "MGS", "OMGS", "exact")
"""The algorithms that are drawn. LAGS-SGD takes several times as long."""


@cache
def modelled() -> pd.DataFrame:
    """Return the parts of iterations at the nearest `setting` of each network.

    Returns
    -------
    DataFrame
        A row a network and algorithm, OMGS-SGD by both rules. The columns ``messages``,
        PARTS and ``iteration`` are by model, and ``paper`` is the printed iteration, if
        there is one. Times are in seconds.
    """
    planners = {
        "TopK": PLANS["TopK"],
        "LAGS": PLANS["LAGS"],
        "MGS": PLANS["MGS"],
        "OMGS": PLANS["OMGS"],
        "OMGS code": "omgs:code",
        "exact": PLANS["exact"],
    }
    rows = []
    for network, stated in printed().iterrows():
        nearest = setting(str(network))
        cost = cost_of(str(network))
        for algorithm, planner in planners.items():
            # The paper prints one time of OMGS-SGD, which both rules are compared with.
            column = f"{algorithm.split()[0].lower()}_s"
            rows.append(
                {
                    "network": network,
                    "algorithm": algorithm,
                    **planned(nearest, planner, cost),
                    "paper": stated.get(column, np.nan),
                }
            )
    frame = pd.DataFrame(rows).astype({"messages": int})
    return frame[["network", "algorithm", "messages", *PARTS, "iteration", "paper"]]


# -- the replays of the lab ----------------------------------------------------------


def measured(campaign: Source) -> pd.DataFrame:
    """Return the replays of every algorithm and network at the longest start-up.

    Parameters
    ----------
    campaign : Source
        The campaign that replays the iterations.

    Returns
    -------
    DataFrame
        A row a network and algorithm, with the number of ``messages``, and with the times
        PLAYED, the ``iteration`` and its prediction (``predicted``) in seconds of the
        paper's cluster. Two more columns say how far a row can be trusted:

        repeatability
            The mean absolute difference between the iterations of two rounds, as a share
            of the iteration.
        processor_limited
            Whether in any round the processor, instead of the link, may have set the
            pace.
    """
    return _measured(campaign).copy()


@cache
def _measured(campaign: Source) -> pd.DataFrame:
    """Return what `measured` does, which takes seconds, computed once."""
    # The campaign was planned by the costs of its first session.
    first_session = campaign.table("collectives").query("session == 0")
    # The costs are needed without intervals, and thus without random draws.
    costs = Calibration.of(first_session, draws=0)
    by_link = accuracy.joined(campaign).groupby(["network", "link"], sort=False)
    workloads = campaign.workloads()
    selections = campaign.selections()
    tables = []
    for _, played in by_link:
        tables.append(_by_algorithm(played, costs, workloads, selections))
    frame = pd.concat(tables)
    # Every network was replayed at the same start-ups, which `_by_algorithm` rounds, so
    # that equal start-ups are equal numbers.
    frame = frame[frame["startup_s"] == frame["startup_s"].max()]

    names = [*LAB_NETWORKS.values(), *PLANS, DENSE]
    order = {name: number for number, name in enumerate(names)}
    rows = frame.sort_values(
        ["network", "algorithm"], key=lambda column: column.map(order)
    )
    columns = ["network", "algorithm", "messages", *PLAYED, "iteration"]
    columns += ["predicted", "repeatability", "processor_limited"]
    return rows[columns].reset_index(drop=True)


def _by_algorithm(
    played: pd.DataFrame,
    costs: Calibration,
    workloads: Mapping[str, Workload],
    selections: Mapping[str, Selecting],
) -> pd.DataFrame:
    """Return the rows of `measured` of one network and link.

    Parameters
    ----------
    played : DataFrame
        The replays of the network over the link.
    costs : Calibration
        The costs by which the campaign was planned.
    workloads, selections : mapping
        The workloads and the selection times of the campaign, by their hash.

    Returns
    -------
    DataFrame
        A replay has a row for each algorithm whose plan it has. The column ``startup_s``
        has the start-up on the paper's cluster in seconds.
    """
    # Sparse replays of one network and link differ only in their plans. Any of them says which
    # profile, selection and dilation they have.
    sparse_case = Case.from_row(played[played["density"] < 1].iloc[0])
    network = LAB_NETWORKS[played["network"].iloc[0]]
    lab_workload = workloads[sparse_case.profile_sha256]
    workload = lab_workload.scaled(sparse_case.dilation)
    stretch = workload.compute_s / setting(network).compute_s
    gather = costs.of_case(sparse_case).cost
    assert isinstance(gather, SparseGather)
    # Two digits are those of the start-up that the campaign asks for. The others come
    # from rounding the dilation.
    startup_s = float(f"{gather.startup_s() / stretch:.2g}")

    # The ends of a plan's groups are joined with semicolons.
    n_messages = played["ends"].str.count(";") + 1
    times_s = _replayed_s(played, workload, workloads, selections)
    replays = played.assign(
        **{name: lab_s / stretch for name, lab_s in times_s.items()}
    )
    replays = replays.assign(
        network=network,
        startup_s=startup_s,
        messages=n_messages,
    )

    selection = selections[sparse_case.selection_sha256]
    cost = replace(
        gather,
        density=sparse_case.density,
        selecting=lambda n, rho: sparse_case.dilation * selection(n, rho),
    )
    sparse = replays[replays["density"] < 1]
    tables = [replays[replays["density"] == 1].assign(algorithm=DENSE)]
    for algorithm, planner in PLANS.items():
        rows = _replays_of_planner(sparse, planner, workload, cost)
        tables.append(rows.assign(algorithm=algorithm))
    return pd.concat(tables)


def _replayed_s(
    played: pd.DataFrame,
    workload: Workload,
    workloads: Mapping[str, Workload],
    selections: Mapping[str, Selecting],
) -> dict[str, float | Floats | pd.Series]:
    """Return the times of replays in seconds of the lab.

    Parameters
    ----------
    played : DataFrame
        The replays.
    workload : Workload
        The iteration that all replays have but for their selections.
    workloads, selections : mapping
        The workloads and the selection times of the campaign, by their hash.

    Returns
    -------
    dict of str to float, ndarray or Series
        PLAYED, "iteration" and "predicted", each of all replays or of one a row.
    """
    backward_s = float(workload.backward_s.sum())
    # The lab computes a selection as a part of the backward pass.
    with_selection_s = []
    for row in played.to_dict("records"):
        computing = workload_of_case(Case.from_row(row), workloads, selections)
        with_selection_s.append(computing.backward_s.sum())
    return {
        "forward": workload.forward_s,
        "backward": backward_s,
        "selection": np.array(with_selection_s) - backward_s,
        "exposed": played["measured_exposed_communication_s"],
        "update": workload.update_s,
        "iteration": played["measured_iteration_s"],
        "predicted": played[f"{OURS}_iteration_s"],
    }


def _replays_of_planner(
    replays: pd.DataFrame, planner: str, workload: Workload, cost: MessageCost
) -> pd.DataFrame:
    """Return the replays with the plan of a planner.

    If several planners make the same plan, it was played once, under the name of one.
    """
    rows = replays[replays["plan"] == planner]
    if not rows.empty:
        return rows
    plan = make_plan(planner, workload, cost)
    ends = ";".join(str(end) for end in plan.ends)
    return replays[replays["ends"] == ends]


# -- the figure ----------------------------------------------------------------------


def numbers(frame: pd.DataFrame) -> pd.DataFrame:
    """Return what the figure's CSV holds.

    Parameters
    ----------
    frame : DataFrame
        The replays, as `measured` returns them.

    Returns
    -------
    DataFrame
        The rows of `modelled`, then those of ``frame``. The column ``where`` is "model" or
        "lab". The rows of OMGS-SGD have three more ratios:

        s1, s2
            The iteration of TopK-SGD, and that of MGS-SGD, over that of OMGS-SGD.
        less_exposed
            The exposed communication of TopK-SGD over that of OMGS-SGD.
        s1_paper, s2_paper, less_exposed_paper
            What Tab VI and Section V-E print of these.
    """
    # The model has no update of the weights.
    model = modelled().assign(where="model", update=0.0)
    lab = frame.assign(where="lab")
    paper_s = model.set_index(["network", "algorithm"])["paper"]
    replayed = pd.MultiIndex.from_frame(lab[["network", "algorithm"]])
    lab = lab.assign(paper=paper_s.reindex(replayed).to_numpy())
    both = pd.concat([model, lab[model.columns]], ignore_index=True)

    # The ratios compare algorithms, so that each needs a column.
    wide = both.pivot(index=["where", "network"], columns="algorithm")
    iteration_s = wide["iteration"]
    exposed_s = wide["exposed"]
    ratios = pd.DataFrame(
        {
            "s1": iteration_s["TopK"] / iteration_s["OMGS"],
            "s2": iteration_s["MGS"] / iteration_s["OMGS"],
            "less_exposed": exposed_s["TopK"] / exposed_s["OMGS"],
        }
    )
    networks = wide.index.get_level_values("network")
    stated = printed()[["s1", "s2"]].reindex(networks).set_axis(wide.index)
    stated["less_exposed"] = networks.map(_stated_less_exposed())
    rows = ratios.join(stated.add_suffix("_paper")).assign(algorithm="OMGS")
    return both.join(
        rows.set_index("algorithm", append=True), on=["where", "network", "algorithm"]
    )


def _stated_less_exposed() -> dict[str, float]:
    """Return by network the exposed communication of TopK-SGD over that of OMGS-SGD.

    The ratios are those that Section V-E states.
    """
    stated = prose("omgs")
    return {
        # The text says "very close".
        "VGG-16": 1.0,
        # The text says by how many per cent OMGS-SGD's is smaller.
        "LSTM-PTB": 1 / (1 - stated["fig04-lstm"] / 100),
        # The text gives one "about" for both.
        "ResNet-50": stated["fig04-deep"],
        "Inception-v4": stated["fig04-deep"],
    }


def draw(frame: pd.DataFrame) -> Figure:
    """Draw the parts of iterations, modelled, replayed and printed.

    Parameters
    ----------
    frame : DataFrame
        What `numbers` returned.
    """
    in_lab = frame[frame["where"] == "lab"]
    # A gain is the ratio of two iterations less 1, so that gains differ as ratios do.
    differences = 100 * (in_lab["s1"] - in_lab["s1_paper"]).abs()
    message = (
        f"The replayed gain of OMGS-SGD over TopK-SGD differs from the printed gain by "
        f"{differences.min():.0f} to {differences.max():.0f} percentage points"
    )
    by_network = frame.groupby("network", sort=False)
    with plots.sheet(message, columns=2, rows=2, height=6.0) as (figure, axes):
        for ax, (network, rows) in zip(axes.flat, by_network, strict=True):
            _draw_network(ax, str(network), rows)
    return figure


def _draw_network(ax: Axes, network: str, rows: pd.DataFrame) -> None:
    """Draw two stacked bars for each of SHOWN, and the printed iteration over them.

    ``rows`` are those of `numbers` of one network.
    """
    bars = pd.MultiIndex.from_product(
        [SHOWN, ("model", "lab")], names=["algorithm", "where"]
    )
    by_bar = rows.set_index(bars.names).reindex(bars)
    # A column has the colour of the kind of span that it is named after. Both bars of a
    # pair have the name of their algorithm.
    parts = by_bar[list(PLAYED)].set_axis(KINDS, axis=1).droplevel("where")
    plots.bars(
        ax,
        parts,
        label="iteration [s]",
        stacked=True,
        legend="",
        pairs="left: model, right: replayed",
    )
    # Both bars of a pair have the same printed time, which is drawn between them: bars are
    # at 0, 1, 2, ..., and a pair at 0 and 1.
    paper_s = by_bar["paper"].to_numpy()[::2]
    between = 2 * np.arange(len(SHOWN)) + 0.5
    plots.points(ax, between, paper_s, "paper", size=6)
    replayed = by_bar.loc[("OMGS", "lab")]
    gain = replayed["s1"] - 1
    stated_gain = replayed["s1_paper"] - 1
    ax.set_title(f"{network}: gains {gain:.1%}, printed {stated_gain:.1%}")


# -- claims --------------------------------------------------------------------------


def less_exposed_s(network: str, elements: float = 0) -> Floats:
    """Return by how much OMGS-SGD's exposed communication is less than TopK-SGD's.

    Parameters
    ----------
    network : str
        One of NETWORKS.
    elements : float, optional
        The number of gradients of all layers, for an LSTM with another number of hidden
        units. 0 stands for those of ``network``.

    Returns
    -------
    ndarray, shape (2,)
        The least and the most seconds. Both are the difference of the iterations in
        Table VI, with its rounding, less what OMGS-SGD saves by selecting.

    Notes
    -----
    Selecting saves the most, gamma d log2 n, if all n messages are equally large. It
    saves nothing if one of them has all elements.
    """
    stated = printed().loc[network]
    gamma_s = published_code("omgs")["gamma"]
    difference_s = stated["topk_s"] - stated["omgs_s"]
    # Each of the two times may be off by half a unit of its last digit.
    saved_s = difference_s + np.array([-2, 2]) * HALF_S
    most_by_selecting_s = (
        gamma_s * (elements or sum(tensors(network))) * math.log2(stated["messages"])
    )
    return saved_s - [most_by_selecting_s, 0]


def _in_words(case: OpenCase) -> str:
    """Return the units of the LSTM, if it is one, and the all-gathers of a message."""
    gathers = "one gather" if case.gathers == 1 else "both"
    if case.units:
        return f"{case.units:,} units, {gathers}"
    return gathers


@check("omgs-fig04-lstm", LSTM, 0, 100)
@check("omgs-fig04-vgg16", "VGG-16", 1, -1)
def _less_exposed(network: str, start: float, scale: float) -> Result:
    """Compare the exposed communication of OMGS-SGD with that of TopK-SGD.

    The result is ``start + scale * share``. The share is the reduction of the exposed
    communication over the time of all that TopK-SGD sends, which nothing hides. The result
    is the reduction in per cent for a start of 0 and a scale of 100, and the ratio of
    OMGS-SGD's exposed communication to TopK-SGD's for 1 and -1.
    """
    note = (
        "what Table VI saves, less what selecting may, over TopK-SGD's sending by the "
        "code"
    )
    spans = []
    for case in unstated(network):
        ends_s = less_exposed_s(network, sum(case.tensor_elements))
        # A negative scale turns the ends round.
        span = np.sort(start + scale * ends_s / case.sending_s)
        spans.append(span)
        note += f"; {_in_words(case)} {span[0]:.3g} to {span[1]:.3g}"
    if network == LSTM:
        note += (
            "; others, the code's 1,500 units and both gathers among them, leave no "
            "time to compute"
        )
    return claims.by_cases(spans, note)


@check("omgs-fig04-selection")
def _selection_share() -> Result:
    """Return TopK-SGD's selection over computing for the network with the largest ratio.

    The result has an interval for each `OpenCase` of the LSTM. It is an interval because
    Table VI leaves several times for computing (OFF), and because another network may have
    the largest ratio instead.
    """
    images = defaultdict[str, list[float]](list)
    lstm = {}
    for network in NETWORKS:
        for case in unstated(network):
            shares = case.selecting_s / case.compute_s
            if network == LSTM:
                lstm[_in_words(case)] = shares.tolist()
            else:
                images[network].extend(shares)
    ranges = [_range_in_words(name, shares) for name, shares in images.items()]
    for name, shares in lstm.items():
        # Without anything else in an iteration, Table VI's time holds exactly, which is the
        # middle one of the three factors OFF. If the smallest factor leaves no time, two
        # shares are left, of which this one is the larger.
        exactly = sorted(shares)[len(shares) // 2]
        text = _range_in_words(f"{LSTM} of {name}", shares)
        ranges.append(f"{text}, without anything else {exactly:.2f}")
    at_section_1 = topk_parts(RESNET, 1)[0] / claims.claimed("omgs-computing")
    note = (
        f"over {LEFT} with one gather or both: {'; '.join(ranges)}; 1,500 units, the "
        f"code's, or 1,750 and both leave no time; {RESNET} {at_section_1:.2f} at Section "
        "I's computing time"
    )
    largest = max(images.values(), key=max)
    spans = []
    for shares in lstm.values():
        # The maximum over networks is at least the larger one of two lower ends.
        low = max(min(shares), min(largest))
        spans.append((low, max(*shares, *largest)))
    return claims.by_cases(spans, note)


def _range_in_words(name: str, shares: Sequence[float]) -> str:
    """Return a name and the range of its shares."""
    return f"{name} {min(shares):.2f} to {max(shares):.2f}"


def _exposed_by_code(gathers: int) -> str:
    """Return what TopK-SGD sends of ResNet-50 at the code's costs, for a note.

    ``gathers`` is how many all-gathers a message takes. The computing time is what Table
    VI leaves if all that is sent is exposed.
    """
    selecting_s, sending_s = topk_parts(RESNET, gathers)
    compute_s = printed().loc[RESNET, "topk_s"] - (selecting_s + sending_s)
    return f"{compute_s:.2f} s of computing leave {sending_s:.3f} s"


@check("omgs-fig04-deep", True)
@check("omgs-computing", False)
def _identity(is_exposed: bool) -> Result:
    """Judge two claims about ResNet-50 by one identity (omgs Eq 4).

    The iteration of TopK-SGD is computing, selecting and exposed communication. The claims
    are about the exposed communication of TopK-SGD over that of OMGS-SGD, and about the
    computing time. Each follows from the other and from Table VI. Every number is taken
    at both ends of its rounding.

    Parameters
    ----------
    is_exposed : bool
        Whether the first of the two claims is judged, else the second.
    """
    ends = np.array([-1, 1])
    stated = printed().loc[RESNET]
    stated_compute_s = claims.claimed("omgs-computing")
    less_s = less_exposed_s(RESNET)
    selecting_s, _ = topk_parts(RESNET, 2)
    # The ends of `less_exposed_s` differ by the time that selecting may save and, because two
    # times were rounded both ways, by four halves of a unit.
    most_by_selecting_s = np.ptp(less_s) - 4 * HALF_S
    # All combinations of the ends, each array with an axis for each of the four numbers.
    topk_s, omgs_s, compute_s, by_selecting_s = np.meshgrid(
        stated["topk_s"] + HALF_S * ends,
        stated["omgs_s"] + HALF_S * ends,
        # The computing time is printed to hundredths of a second.
        stated_compute_s + 0.005 * ends,
        [0, most_by_selecting_s],
    )
    exposed_s = topk_s - selecting_s - compute_s
    less_exposed_grid_s = topk_s - omgs_s - by_selecting_s
    if is_exposed:
        values = exposed_s / (exposed_s - less_exposed_grid_s)
        other_claim = "computing"
    else:
        # A fifth axis, before the four others, has the ends of what "about" may mean.
        stated_ratio = claims.claimed("omgs-fig04-deep")
        ratio = stated_ratio * (1 + 0.2 * ends[:, None, None, None, None])
        values = topk_s - selecting_s - less_exposed_grid_s * ratio / (ratio - 1)
        other_claim = "fig04-deep, within 20%"

    note = (
        f"{RESNET}, {stated_compute_s} s of computing: "
        f"exposed {np.min(exposed_s):.3f} to {np.max(exposed_s):.3f} s, less by "
        f"{np.min(less_s):.3f} to {np.max(less_s):.3f} s; one identity with "
        f"omgs-{other_claim}, by the code's gamma without Eq 10's density (with it neither "
        f"holds); at the code's start-up and rate {_exposed_by_code(2)} exposed (with one "
        f"gather {_exposed_by_code(1)}), less than is saved: there neither holds"
    )
    within = [(float(values.min()), float(values.max()))]
    if not is_exposed:
        return own(within, note)
    # Eq 10 has the density as a factor, so that next to nothing is left of selecting, and
    # of what OMGS-SGD saves of it.
    with_density_s = topk_s - DENSITY * selecting_s - compute_s
    less_with_density_s = topk_s - omgs_s - DENSITY * by_selecting_s
    by_eq10 = with_density_s / (with_density_s - less_with_density_s)
    readings = {
        "the code's gamma without the density": own(within, ""),
        "Eq 10, with the density": own([(by_eq10.min(), by_eq10.max())], ""),
    }
    return claims.by_readings(readings, note)
