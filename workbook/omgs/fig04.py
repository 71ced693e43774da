"""omgs Fig 4: the parts of an iteration, by model at the paper's costs and as replayed.

The lab computes as the nearest setting does, but slower by a stretch. The stretch is the
shortest sparse message of the lab divided by the start-up that it stands for. The lab's times
divided by the stretch are those of the paper's cluster.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

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
    """Return the parts of iterations at the `setting` of each network, by the model.

    A `setting` has the unstated numbers with which the times are nearest to the printed ones.

    Returns
    -------
    DataFrame
        A row for each network and algorithm, where OMGS-SGD has two: by Algorithm 1
        ("OMGS") and by the rule of the published code ("OMGS code"). The columns
        ``messages``, PARTS and ``iteration`` are by model, and ``paper`` is the printed
        iteration, or NaN. Times are in seconds.
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
            # The paper prints one time of OMGS-SGD, so that both of its rules have the
            # column "omgs_s". LAGS-SGD and exact merging have no column.
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
    """Return the replays of every algorithm and network at the longest start-up of a message.

    The iterations were replayed over several links with different start-ups. The longest is
    that of the paper's cluster.

    Parameters
    ----------
    campaign : Source
        The campaign that replays the iterations.

    Returns
    -------
    DataFrame
        A row for each network and algorithm, with the number of ``messages``, and with the
        times PLAYED, the ``iteration`` and its prediction (``predicted``). Times are in seconds
        of the paper's cluster. If the lab computes k times as long as that cluster, they are
        the times of the lab divided by k. Two more columns say how far a row can be trusted:

        repeatability
            The mean absolute difference between the iterations of two rounds, as a share
            of the iteration.
        processor_limited
            Whether in any round the processor, instead of the link, may have set the
            pace.
    """
    # A caller may change the copy, and the table in the cache stays as it is.
    return _measured(campaign).copy()


@cache
def _measured(campaign: Source) -> pd.DataFrame:
    """Return the table of `measured`, computed once because it takes seconds."""
    # The campaign was planned by the costs of its first session.
    first_session = campaign.table("collectives").query("session == 0")
    # The costs are needed without intervals, and thus without random draws.
    costs = Calibration.of(first_session, draws=0)
    replays = accuracy.joined(campaign)
    workloads = campaign.workloads()
    selections = campaign.selections()
    tables = []
    for _, played in replays.groupby(["network", "link"], sort=False):
        tables.append(_by_algorithm(played, costs, workloads, selections))
    frame = pd.concat(tables)
    # Every network was replayed at the same start-ups, of which the longest is that of the
    # paper's cluster. `_by_algorithm` rounds them, so that equal ones are equal numbers.
    frame = frame[frame["startup_s"] == frame["startup_s"].max()]

    # Networks and algorithms have different names, so that one order is enough for both
    # columns.
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
        A replay has a row for each algorithm whose plan it has, because algorithms with
        equal plans share one replay. Times are in seconds of the paper's cluster, and the
        column ``startup_s`` has the start-up of a message there.
    """
    # Sparse replays of one network and link differ only in their plans, so that any of them
    # has the profile, the selection and the dilation of all. Dense replays, where there are
    # some, have the same profile and dilation.
    sparse_case = Case.from_row(played[played["density"] < 1].iloc[0])
    network = LAB_NETWORKS[played["network"].iloc[0]]
    # The lab computed ``dilation`` times as long as the recorded workload, and ``stretch``
    # times as long as the paper's cluster. So all times of the lab are divided by the stretch.
    recorded_workload = workloads[sparse_case.profile_sha256]
    lab_workload = recorded_workload.scaled(sparse_case.dilation)
    stretch = lab_workload.compute_s / setting(network).compute_s
    gather = costs.of_case(sparse_case).cost
    assert isinstance(gather, SparseGather)
    # The stretch is not exact, because the dilation was rounded to four digits. So the
    # start-ups of the networks over one link differ slightly. Two digits of them are equal.
    startup_s = float(f"{gather.startup_s() / stretch:.2g}")

    lab_times_s = _replayed_s(played, lab_workload, workloads, selections)
    times_s = {name: lab_s / stretch for name, lab_s in lab_times_s.items()}
    replays = played.assign(
        **times_s,
        network=network,
        startup_s=startup_s,
        # The ends of a plan's messages are joined with semicolons.
        messages=played["ends"].str.count(";") + 1,
    )

    # A plan that several algorithms share was played once, under the name of one of them.
    # For the others it is made anew by this cost, and found by its messages.
    selection = selections[sparse_case.selection_sha256]
    cost = _planning_cost(sparse_case, gather, selection)
    sparse = replays[replays["density"] < 1]
    # Dense replays, of which there may be none, are one more algorithm.
    dense = replays[replays["density"] == 1]
    tables = [dense.assign(algorithm=DENSE)]
    for algorithm, planner in PLANS.items():
        rows = _replays_of_planner(sparse, planner, lab_workload, cost)
        tables.append(rows.assign(algorithm=algorithm))
    return pd.concat(tables)


def _planning_cost(
    case: Case, gather: SparseGather, selection: Selecting
) -> SparseGather:
    """Return the cost by which the lab planned the messages of a sparse replay.

    ``gather`` is the cost of a message, and ``selection`` the recorded time of a selection,
    which the lab dilated as all computing of the case.
    """

    def dilated_s(n: Any, density: float) -> Any:
        return case.dilation * selection(n, density)

    return replace(gather, density=case.density, selecting=dilated_s)


def _replayed_s(
    played: pd.DataFrame,
    workload: Workload,
    workloads: Mapping[str, Workload],
    selections: Mapping[str, Selecting],
) -> dict[str, float | Floats | pd.Series]:
    """Return the times of replays as they passed in the lab, in seconds.

    Parameters
    ----------
    played : DataFrame
        The replays.
    workload : Workload
        What all replays compute in the lab, without the selections.
    workloads, selections : mapping
        The workloads and the selection times of the campaign, by their hash.

    Returns
    -------
    dict of str to float, ndarray or Series
        The keys are the five parts PLAYED of an iteration, "iteration", and its prediction
        "predicted". A number holds for all replays, and an array or Series has a number
        for each row of ``played``.
    """
    backward_s = float(workload.backward_s.sum())
    # The lab computes a selection as a part of the backward pass.
    backward_with_selection_s = []
    for row in played.to_dict("records"):
        computing = workload_of_case(Case.from_row(row), workloads, selections)
        backward_with_selection_s.append(computing.backward_s.sum())
    return {
        "forward": workload.forward_s,
        "backward": backward_s,
        "selection": np.array(backward_with_selection_s) - backward_s,
        "exposed": played["measured_exposed_communication_s"],
        "update": workload.update_s,
        "iteration": played["measured_iteration_s"],
        "predicted": played[f"{OURS}_iteration_s"],
    }


def _replays_of_planner(
    replays: pd.DataFrame, planner: str, workload: Workload, cost: MessageCost
) -> pd.DataFrame:
    """Return the replays with the plan of a planner.

    If several planners make equal plans for ``workload`` and ``cost``, the plan was played
    once, under the name of one of them.
    """
    rows = replays[replays["plan"] == planner]
    if not rows.empty:
        return rows
    # The plan was played under another name, and is found by the ends of its messages.
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
        "lab". The rows of OMGS-SGD by Algorithm 1 also have ratios, and all others NaN:

        s1, s2
            The iterations of TopK-SGD and of MGS-SGD, each divided by that of OMGS-SGD.
        less_exposed
            The exposed communication of TopK-SGD divided by that of OMGS-SGD.
        s1_paper, s2_paper, less_exposed_paper
            The same ratios as Tab VI and Section V-E print them.
    """
    # The model has no update of the weights.
    model = modelled().assign(where="model", update=0.0)
    lab = frame.assign(where="lab")
    # A replay has the printed time of the same network and algorithm in `modelled`.
    paper_s = model.set_index(["network", "algorithm"])["paper"]
    replayed = pd.MultiIndex.from_frame(lab[["network", "algorithm"]])
    lab = lab.assign(paper=paper_s.reindex(replayed).to_numpy())
    both = pd.concat([model, lab[model.columns]], ignore_index=True)

    # The ratios belong to the rows of OMGS-SGD by Algorithm 1.
    ratios = _ratios(both).assign(algorithm="OMGS")
    return both.join(
        ratios.set_index("algorithm", append=True),
        on=["where", "network", "algorithm"],
    )


def _ratios(both: pd.DataFrame) -> pd.DataFrame:
    """Return the ratios of `numbers` by ``where`` and ``network``, and the printed ones.

    ``both`` has the rows of the model and of the lab.
    """
    # The ratios compare algorithms, so that each algorithm needs a column.
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
    # The printed ratios of a network are the same in the rows of the model and of the lab.
    networks = wide.index.get_level_values("network")
    stated = printed()[["s1", "s2"]].reindex(networks).set_axis(wide.index)
    stated["less_exposed"] = networks.map(_stated_less_exposed())
    return ratios.join(stated.add_suffix("_paper"))


def _stated_less_exposed() -> dict[str, float]:
    """Return by network the ratio of exposed communication that Section V-E states.

    It is that of TopK-SGD divided by that of OMGS-SGD.
    """
    # The numbers of the text by their id.
    stated = prose("omgs")
    return {
        # The text says "very close".
        "VGG-16": 1.0,
        # The text says by how many per cent the time of OMGS-SGD is shorter.
        "LSTM-PTB": 1 / (1 - stated["fig04-lstm"] / 100),
        # The text gives one number for both very deep networks.
        "ResNet-50": stated["fig04-deep"],
        "Inception-v4": stated["fig04-deep"],
    }


def draw(frame: pd.DataFrame) -> Figure:
    """Draw the parts of modelled and replayed iterations, and the printed iterations.

    Parameters
    ----------
    frame : DataFrame
        What `numbers` returned.
    """
    in_lab = frame[frame["where"] == "lab"]
    # A gain is the ratio ``s1`` less 1, so that gains differ by as much as ratios. Rows of
    # other algorithms than OMGS-SGD have NaN, which `min` and `max` ignore.
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
    """Draw a pair of stacked bars for each of SHOWN, and a point at the printed iteration.

    ``rows`` are those of `numbers` of one network. The bars of a pair are the model and the
    lab.
    """
    bars = pd.MultiIndex.from_product(
        [SHOWN, ("model", "lab")], names=["algorithm", "where"]
    )
    by_bar = rows.set_index(bars.names).reindex(bars)
    # The columns get the names of kinds of spans, whose colours they are drawn in. Both
    # bars of a pair have the name of their algorithm.
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
    # The gain of OMGS-SGD over TopK-SGD.
    replayed = by_bar.loc[("OMGS", "lab")]
    gain = replayed["s1"] - 1
    stated_gain = replayed["s1_paper"] - 1
    ax.set_title(f"{network}: gains {gain:.1%}, printed {stated_gain:.1%}")


# -- claims --------------------------------------------------------------------------


def less_exposed_s(network: str, elements: float = 0) -> Floats:
    """Return by how many seconds OMGS-SGD exposes less communication than TopK-SGD.

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
        The least and the most seconds that the rounding of Table VI allows.

    Notes
    -----
    An iteration consists of the forward pass, the backward pass, selecting, and exposed
    communication. Both algorithms have the same forward and backward pass, which cancel in the
    difference of their iterations in Table VI. So OMGS-SGD exposes less by this difference,
    less the time by which it selects faster.
    """
    stated = printed().loc[network]
    difference_s = stated["topk_s"] - stated["omgs_s"]
    # Each of the two iterations may be off by half a unit of its last digit.
    least_difference_s = difference_s - 2 * HALF_S
    most_difference_s = difference_s + 2 * HALF_S
    # OMGS-SGD selects no faster than TopK-SGD if one of its messages has all elements.
    most_faster_s = _most_faster_selecting_s(network, elements)
    return np.array([least_difference_s - most_faster_s, most_difference_s])


def _most_faster_selecting_s(network: str, elements: float = 0) -> float:
    """Return the most seconds by which OMGS-SGD can select faster than TopK-SGD.

    TopK-SGD selects from all d elements in gamma d log2 d. If the n messages of OMGS-SGD are
    equally large, it selects in gamma d log2 (d / n), which is the least. The difference is
    gamma d log2 n. The arguments are those of `less_exposed_s`.
    """
    gamma_s = published_code("omgs")["gamma"]
    all_elements = elements or sum(tensors(network))
    messages = printed().loc[network, "messages"]
    return float(gamma_s * all_elements * math.log2(messages))


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

    `less_exposed_s` returns by how many seconds OMGS-SGD exposes less. TopK-SGD exposes all the
    time in which it sends. The former divided by the latter is called the share here. The
    result is ``start + scale * share``, an interval for each `OpenCase`:

    - With a start of 0 and a scale of 100 it is the share in per cent.
    - With a start of 1 and a scale of -1 it is the exposed communication of OMGS-SGD divided
      by that of TopK-SGD.
    """
    note = (
        "what Table VI saves, less what selecting may, over TopK-SGD's sending by the "
        "code"
    )
    spans = []
    for case in unstated(network):
        least_and_most_s = less_exposed_s(network, sum(case.tensor_elements))
        # With a negative scale the larger end comes first.
        span = np.sort(start + scale * least_and_most_s / case.sending_s)
        spans.append(span)
        note += f"; {_in_words(case)} {span[0]:.3g} to {span[1]:.3g}"
    # Where selecting and sending take all of TopK-SGD's printed iteration, `unstated` has no
    # case. Of all networks, this concerns the LSTM alone.
    if network == LSTM:
        note += (
            "; others, the code's 1,500 units and both gathers among them, leave no "
            "time to compute"
        )
    return claims.by_cases(spans, note)


@check("omgs-fig04-selection")
def _selection_share() -> Result:
    """Return TopK-SGD's selection divided by computing, for the network with the largest ratio.

    A network has several ratios, because each of the factors OFF on TopK-SGD's time in
    Table VI leaves another time for computing. The result has an interval for each
    `OpenCase` of the LSTM: all values that the largest ratio of the four networks may take.
    """
    # The ratios of the networks for images by network, and those of the LSTM by case.
    images = defaultdict[str, list[float]](list)
    lstm = {}
    for network in NETWORKS:
        for case in unstated(network):
            ratios = case.selecting_s / case.compute_s
            if network == LSTM:
                lstm[_in_words(case)] = ratios.tolist()
            else:
                images[network].extend(ratios)
    # Of the networks for images, VGG-16 has both the largest ratio and the largest of the
    # least ratios, so that the others do not count.
    largest_of_images = max(images.values(), key=max)
    spans = []
    for ratios in lstm.values():
        # The larger ratio of the two networks is at least the larger one of their least
        # ratios.
        low = max(min(ratios), min(largest_of_images))
        high = max(*ratios, *largest_of_images)
        spans.append((low, high))
    return claims.by_cases(spans, _selection_note(images, lstm))


def _selection_note(
    images: Mapping[str, Sequence[float]], lstm: Mapping[str, Sequence[float]]
) -> str:
    """Return the note of `_selection_share`, the range of the ratios of each network.

    The ratios are TopK-SGD's selection divided by computing. ``images`` has them by network,
    and ``lstm`` by case.
    """
    ranges = [_range_in_words(name, ratios) for name, ratios in images.items()]
    for name, ratios in lstm.items():
        # The ratio at TopK-SGD's time as Table VI prints it, which is the factor 1 of OFF. A
        # larger factor leaves more time to compute, and gives a smaller ratio. So the order of
        # the ratios is that of the factors 1.05, 1 and 0.95. The last of them is missing if the
        # factor 0.95 leaves no time to compute. The index is 1 with two ratios and with three.
        as_printed = sorted(ratios)[len(ratios) // 2]
        text = _range_in_words(f"{LSTM} of {name}", ratios)
        # This ratio holds if an iteration has no parts but computing, selecting and sending.
        ranges.append(f"{text}, without anything else {as_printed:.2f}")
    # How long TopK-SGD selects does not depend on the number of all-gathers.
    resnet_selecting_s, _ = topk_parts(RESNET, gathers=1)
    at_section_1 = resnet_selecting_s / claims.claimed("omgs-computing")
    # The text has two numbers of units written out, with which `unstated` has no case of both
    # all-gathers: 1,500 units, which are those of the code, and 1,750.
    return (
        f"over {LEFT} with one gather or both: {'; '.join(ranges)}; 1,500 units, the "
        f"code's, or 1,750 and both leave no time; {RESNET} {at_section_1:.2f} at Section "
        "I's computing time"
    )


def _range_in_words(name: str, ratios: Sequence[float]) -> str:
    """Return a name and the range of its ratios."""
    return f"{name} {min(ratios):.2f} to {max(ratios):.2f}"


def _exposed_by_code(gathers: int) -> str:
    """Return how much communication TopK-SGD exposes at the code's costs, in words.

    The network is ResNet-50, and ``gathers`` is how many all-gathers a message takes. The
    code says how long selecting and sending take, and computing takes the rest of the iteration
    in Table VI. Nothing overlaps, so that all of the sending is exposed.
    """
    selecting_s, sending_s = topk_parts(RESNET, gathers)
    compute_s = printed().loc[RESNET, "topk_s"] - (selecting_s + sending_s)
    # What computing and selecting leave of the iteration is exactly the sending.
    return f"{compute_s:.2f} s of computing leave {sending_s:.3f} s"


class _DeepTimes(NamedTuple):
    """Times of ResNet-50 in the paper, at both ends of the rounding of each.

    By omgs Eq 4, the iteration of TopK-SGD is the sum of computing, selecting and exposed
    communication. So each of two claims about ResNet-50 follows from the other and from
    Table VI: the one about the computing time, and the one about the ratio of TopK-SGD's
    exposed communication to that of OMGS-SGD.

    Attributes
    ----------
    topk_s, omgs_s : ndarray, shape (2, 2, 2, 2)
        The iterations of TopK-SGD and of OMGS-SGD, in seconds. The arrays have all
        combinations of the two ends of each of the four times, with an axis for each time.
    compute_s : ndarray, shape (2, 2, 2, 2)
        The computing time, in seconds.
    saved_by_selecting_s : ndarray, shape (2, 2, 2, 2)
        The least and the most by which OMGS-SGD selects faster than TopK-SGD, in seconds.
    selecting_s : float
        How long TopK-SGD selects by the code, in seconds.
    """

    topk_s: Floats
    omgs_s: Floats
    compute_s: Floats
    saved_by_selecting_s: Floats
    selecting_s: float

    @classmethod
    def of_paper(cls) -> _DeepTimes:
        """Return the printed times, with the costs of selecting by the code."""
        stated = printed().loc[RESNET]
        # How long TopK-SGD selects does not depend on the number of all-gathers.
        selecting_s, _ = topk_parts(RESNET, gathers=2)
        ends = np.array([-1, 1])
        topk_s, omgs_s, compute_s, saved_by_selecting_s = np.meshgrid(
            stated["topk_s"] + HALF_S * ends,
            stated["omgs_s"] + HALF_S * ends,
            # The computing time is printed to hundredths of a second.
            claims.claimed("omgs-computing") + 0.005 * ends,
            # OMGS-SGD selects no faster if one of its messages has all elements.
            [0, _most_faster_selecting_s(RESNET)],
        )
        return cls(topk_s, omgs_s, compute_s, saved_by_selecting_s, selecting_s)

    def exposed_s(self, factor: float = 1) -> Floats:
        """Return the exposed communication of TopK-SGD in seconds.

        A selection takes ``factor`` times as long as by the code.
        """
        return self.topk_s - factor * self.selecting_s - self.compute_s

    def reduction_s(self, factor: float = 1) -> Floats:
        """Return by how many seconds OMGS-SGD exposes less communication than TopK-SGD.

        A selection takes ``factor`` times as long as by the code.
        """
        return self.topk_s - self.omgs_s - factor * self.saved_by_selecting_s

    def exposed_ratio(self, factor: float = 1) -> Floats:
        """Return the exposed communication of TopK-SGD divided by that of OMGS-SGD.

        A selection takes ``factor`` times as long as by the code.
        """
        exposed_s = self.exposed_s(factor)
        return exposed_s / (exposed_s - self.reduction_s(factor))

    def note(self, other_claim: str) -> str:
        """Return a note on one of the two claims, which names the other one.

        The note says how much communication TopK-SGD exposes, and by how much less OMGS-SGD
        exposes. The claims are one identity, because each follows from the other. Both need
        selections that take gamma d log2 d, as in the code, and fail if the density is a
        further factor, as in Eq 10. Both also fail at the code's start-up and rate, where
        TopK-SGD exposes less than OMGS-SGD is to save, which is impossible.
        """
        exposed_s = self.exposed_s()
        less_s = less_exposed_s(RESNET)
        # In the code, a message takes two all-gathers.
        with_both = _exposed_by_code(gathers=2)
        with_one = _exposed_by_code(gathers=1)
        return (
            f"{RESNET}, {claims.claimed('omgs-computing')} s of computing: "
            f"exposed {np.min(exposed_s):.3f} to {np.max(exposed_s):.3f} s, less by "
            f"{np.min(less_s):.3f} to {np.max(less_s):.3f} s; one identity with "
            f"omgs-{other_claim}, by the code's gamma without Eq 10's density (with it "
            f"neither holds); at the code's start-up and rate {with_both} exposed "
            f"(with one gather {with_one}), less than is saved: there neither "
            "holds"
        )


@check("omgs-computing")
def _deep_computing() -> Result:
    """Return the computing time of ResNet-50 that follows from the ratio in Section V-E.

    The ratio is the exposed communication of TopK-SGD divided by that of OMGS-SGD.
    """
    times = _DeepTimes.of_paper()
    # The text says "about", which is taken to mean within 20%. Shape (2, 1, 1, 1, 1), of
    # which the last four axes are those of the arrays in `_DeepTimes`.
    about = 1 + 0.2 * np.array([-1, 1])[:, None, None, None, None]
    ratio = claims.claimed("omgs-fig04-deep") * about
    # If TopK-SGD exposes x seconds of communication, and OMGS-SGD y seconds less
    # (`reduction_s`), the ratio is x / (x - y), so that x = y ratio / (ratio - 1).
    exposed_s = times.reduction_s() * ratio / (ratio - 1)
    # By Eq 4, computing takes what selecting and x leave of TopK-SGD's iteration.
    computing_s = times.topk_s - times.selecting_s - exposed_s
    within = [(float(computing_s.min()), float(computing_s.max()))]
    return own(within, times.note(other_claim="fig04-deep, within 20%"))


@check("omgs-fig04-deep")
def _deep_exposed() -> Result:
    """Return ResNet-50's exposed communication by TopK-SGD divided by that by OMGS-SGD."""
    times = _DeepTimes.of_paper()
    ratios = {
        # In the code, a selection from d elements takes gamma d log2 d.
        "the code's gamma without the density": times.exposed_ratio(),
        # Eq 10 has the density as a further factor. Selecting then takes almost no time, and
        # OMGS-SGD saves almost none by selecting faster.
        "Eq 10, with the density": times.exposed_ratio(factor=DENSITY),
    }
    readings = {}
    # The values are those at both ends of the range from which each printed time was rounded.
    for reading, values in ratios.items():
        readings[reading] = own([(float(values.min()), float(values.max()))], "")
    # Where one of this claim and that of the computing time holds, the other holds as well: the
    # one follows from the other by Eq 4 (`_deep_computing`).
    return claims.by_readings(readings, times.note(other_claim="computing"))
