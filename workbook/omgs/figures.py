"""omgs's figures 1, 3 and 4, its settings by model, and its algorithms as replayed.

Costs are those of the authors' published code, layer times are scanned (`workbook.omgs.equations`). The
lab computes as the nearest setting does, stretched as its shortest sparse message is over the start-up that
it stands for: its times over that stretch are those of the paper's cluster.

Of figure 3, fixed before anything was recorded: a training's score is the share of held-out images that is
right or, for a text, 1/perplexity, after its last epoch; of a network and method, the mean over seeds.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ddlkit.core.case import Case
from ddlkit.core.cost import AlphaBeta
from ddlkit.core.errors import UserError
from ddlkit.core.iteration import Iteration
from ddlkit.core.plan import none
from ddlkit.core.sparse import ELEMENT_BYTES, SparseGather, sparse_timeline
from ddlkit.core.timeline import Timeline
from ddlkit.core.workload import Workload
from ddlkit.model import make_plan
from ddlkit.model.calibration import Calibration
from ddlkit.model.predictor import computed
from workbook import plots
from workbook.common import settings as audit
from workbook.common import source
from workbook.common.claims import paper_table, prose
from workbook.common.source import Source
from workbook.omgs.equations import (
    PARTS,
    PLANS,
    Setting,
    most_saved_s,
    planned,
    published_cost,
    scan,
)
from workbook.osf import equations as osf
from workbook.validate import accuracy
from workbook.validate.rivals import OURS

TOLERANCE = 0.05  # within which a printed time agrees with a setting
TIMES = ("topk_s", "mgs_s", "omgs_s")
WORKERS = audit.WORKERS
NETWORKS = {"vgg16_cifar": "VGG-16", "resnet50": "ResNet-50"}
NETWORKS |= {"inception_v4": "Inception-v4", "lstm_ptb": "LSTM-PTB"}
DENSE = "dense, exact"
PLAYED = (*PARTS, "update")
KINDS = (
    "forward",
    "backward",
    "sparsify",
    "all_gather",
    "update",
)  # spans that look like PLAYED
SHOWN = (
    "TopK",
    "MGS",
    "OMGS",
    "exact",
)  # in figure 4; LAGS-SGD takes several times as long


def fig01() -> dict[str, Timeline]:
    """Return algorithms on four layers, 16 workers, published costs; dense on a link 4 times as fast."""
    sizes = ELEMENT_BYTES * np.array((4_000_000, 4_000_000, 500_000, 500_000))
    workload = Workload.from_arrays(0.03, [0.015] * 4, sizes)
    cost = replace(published_cost(WORKERS, audit.DENSITY), selecting=audit.SELECTION)
    slope = float(osf.update_s(1.0, WORKERS, 5e8))
    dense = AlphaBeta(cost.gather.startup_s(), slope, workers=WORKERS)
    specs = {
        "TopK-SGD": "single",
        "LAGS-SGD": "none",
        "OMGS-SGD": "omgs",
        "merged best": "exact",
    }
    lines = {"P-SGD": Iteration(workload, none(workload), dense).timeline()}
    for name, spec in specs.items():
        lines[name] = sparse_timeline(workload, make_plan(spec, workload, cost), cost)
    return lines


@cache
def printed() -> pd.DataFrame:
    """Return by network: times, ratios and messages of omgs Tabs V and VI, and the density of Tab IV."""
    frame = paper_table("omgs", "tab06").set_index("model")
    frame["messages"] = paper_table("omgs", "tab05").set_index("model")["omgs"]
    return frame.assign(density=paper_table("omgs", "tab04")["density"].to_numpy())


def cost_of(network: str) -> SparseGather:
    """Return the cost of 16 workers' messages on 1 Gbit/s, as published, at the network's density."""
    return published_cost(WORKERS, printed().loc[network, "density"])


@cache
def scanned(network: str) -> pd.DataFrame:
    """Return every setting of a network under both rules (`scan`)."""
    return pd.DataFrame(
        scan(network, printed().loc[network, "topk_s"], cost_of(network))
    )


def compatible(network: str) -> pd.DataFrame:
    """Return settings that agree with as many printed times as any does, the nearest first."""
    frame, stated = scanned(network), printed().loc[network]
    agree = sum((frame[name] / stated[name] - 1).abs() <= TOLERANCE for name in TIMES)
    far = sum(np.log(frame[name] / stated[name]).abs() for name in TIMES)
    most = agree == agree.max()
    return (
        frame[most]
        .assign(agree=agree[most], far=far[most])
        .sort_values("far", kind="stable")
    )


def savings() -> pd.DataFrame:
    """Return what OMGS-SGD saves of TopK-SGD's iteration: as printed, and the most that costs allow, in s."""
    frame = printed().assign(saved_s=lambda rows: rows["topk_s"] - rows["omgs_s"])
    for name, count in frame["messages"].items():
        units, cost = scanned(name)["units"].unique(), cost_of(name)
        most_s = max(most_saved_s(name, cost, int(count), each) for each in units)
        frame.loc[name, "most_saved_s"] = most_s
    return frame[["saved_s", "most_saved_s"]]


def setting(network: str) -> Setting:
    """Return the compatible setting that is nearest to the printed times."""
    best = compatible(network).iloc[0]
    return Setting(
        network,
        compute_s=float(best["compute_s"]),
        backward=float(best["backward"]),
        even=float(best["even"]),
        units=int(best["units"]),
    )


@cache
def modelled() -> pd.DataFrame:
    """Return seconds of PARTS by algorithm at `setting`, OMGS by both rules; paper: whole iterations."""
    rows = []
    for network, stated in printed().iterrows():
        chosen, cost = setting(str(network)), cost_of(str(network))
        for algorithm in ("TopK", "LAGS", "MGS", "OMGS", "OMGS code", "exact"):
            parts = planned(
                chosen, {**PLANS, "OMGS code": "omgs:code"}[algorithm], cost
            )
            paper_s = stated.get(f"{algorithm.split()[0].lower()}_s", np.nan)
            rows.append(
                {"network": network, "algorithm": algorithm, **parts, "paper": paper_s}
            )
    frame = pd.DataFrame(rows).astype({"messages": int})
    return frame[["network", "algorithm", "messages", *PARTS, "iteration", "paper"]]


def replayed(campaign: Source) -> pd.DataFrame:
    """Return every algorithm on every network at the longest start-up, in seconds of the paper's cluster."""
    planning = campaign.table(
        "collectives"
    )  # of the first session, by which it was planned
    costs = Calibration.of(planning[planning["session"] == 0], draws=0)
    groups = accuracy.joined(campaign).groupby(["network", "link"], sort=False)
    frame = pd.concat([_of_lab(played, campaign, costs) for _, played in groups])
    frame = frame[frame["startup_s"] == frame["startup_s"].max()]
    order = {
        name: place for place, name in enumerate([*NETWORKS.values(), *PLANS, DENSE])
    }
    rows = frame.sort_values(
        ["network", "algorithm"], key=lambda names: names.map(order)
    )
    columns = ["network", "algorithm", "messages", *PLAYED, "iteration"]
    columns += ["predicted", "repeatability", "processor_limited"]
    return rows[columns].reset_index(drop=True)


def _of_lab(played: pd.DataFrame, campaign: Source, costs: Calibration) -> pd.DataFrame:
    """Return rows of `replayed` of one network and link: those of a plan under each of its algorithms."""
    row = played[played["density"] < 1].iloc[0]
    case, network = Case.from_row(row), NETWORKS[row["network"]]
    workloads, selections = campaign.workloads(), campaign.selections()
    workload = workloads[case.profile_sha256].scaled(case.dilation)
    stretch = workload.compute_s / setting(network).compute_s
    gather, times = costs.of_case(case).cost, selections[case.selection_sha256]
    assert isinstance(gather, SparseGather)
    cost = replace(
        gather,
        density=case.density,
        selecting=lambda n, rho: case.dilation * times(n, rho),
    )
    backward_s = float(workload.backward_s.sum())
    cases = map(Case.from_row, played.to_dict("records"))
    computed_s = [
        computed(each, workloads, selections).backward_s.sum() for each in cases
    ]
    seconds = {
        "forward": workload.forward_s,
        "backward": backward_s,
        "selection": np.array(computed_s) - backward_s,
        "exposed": played["measured_exposed_communication_s"],
        "update": workload.update_s,
        "iteration": played["measured_iteration_s"],
        "predicted": played[f"{OURS}_iteration_s"],
    }
    # Two digits: a start-up as a campaign asks for it, less the rounding of a dilation.
    startup_s = float(f"{gather.startup_s() / stretch:.2g}")
    messages = played["ends"].str.count(";") + 1
    whole = played.assign(**{name: each / stretch for name, each in seconds.items()})
    whole = whole.assign(network=network, startup_s=startup_s, messages=messages)
    sparse = whole[whole["density"] < 1]
    named = [whole[whole["density"] == 1].assign(algorithm=DENSE)]
    for algorithm, spec in PLANS.items():
        rows = sparse[sparse["plan"] == spec]
        if rows.empty:  # its plan is another's, which was played once
            ends = ";".join(map(str, make_plan(spec, workload, cost).ends))
            rows = sparse[sparse["ends"] == ends]
        named.append(rows.assign(algorithm=algorithm))
    return pd.concat(named)


def speedups(frame: pd.DataFrame) -> pd.DataFrame:
    """Return by network omgs Tab VI's ratios of `replayed`: s1, s2: OMGS over TopK and MGS.

    best: exact merging over TopK; fastest: of three; resolved: how much repeats differ, at most (relative)
    """
    wide, three = (
        frame.pivot(index="network", columns="algorithm"),
        ["TopK", "MGS", "OMGS"],
    )
    took = wide["iteration"]
    columns = {
        "s1": took["TopK"] / took["OMGS"],
        "s2": took["MGS"] / took["OMGS"],
        "best": took["TopK"] / took["exact"],
        "fastest": took[three].idxmin(axis=1),
        "messages": wide["messages", "OMGS"].astype(int),
        "resolved": wide["repeatability"][three].max(axis=1),
    }
    return pd.DataFrame(columns).loc[frame["network"].unique()]


@cache
def at_papers_startup() -> pd.DataFrame:
    """Return `speedups` of the recorded campaign."""
    return speedups(replayed(source.open_campaign(name=source.OMGS).alone))


def fig04(frame: pd.DataFrame) -> pd.DataFrame:
    """Return omgs Fig 4: PLAYED by model at the paper's costs, and as `replayed` at its start-up.

    s1, s2 : iterations over OMGS-SGD's; less_exposed : exposed communication of TopK-SGD over its own
    ``_paper`` : of Tab VI and Section V-E, which prints "about", and "very close", here 1, of VGG-16
    """
    model = modelled().assign(where="model", update=0.0)
    lab = frame.assign(where="lab")
    stated = model.set_index(["network", "algorithm"])["paper"]
    target = pd.MultiIndex.from_frame(lab[["network", "algorithm"]])
    lab = lab.assign(paper=stated.reindex(target).to_numpy())
    both = pd.concat([model, lab[model.columns]], ignore_index=True)
    wide = both.pivot(index=["where", "network"], columns="algorithm")
    ratios = {
        "s1": wide["iteration", "TopK"] / wide["iteration", "OMGS"],
        "s2": wide["iteration", "MGS"] / wide["iteration", "OMGS"],
        "less_exposed": wide["exposed", "TopK"] / wide["exposed", "OMGS"],
    }
    networks, stated = wide.index.get_level_values("network"), prose("omgs")
    exposed = {"VGG-16": 1.0, "LSTM-PTB": 1 / (1 - stated["fig04-lstm"] / 100)}
    exposed |= dict.fromkeys(("ResNet-50", "Inception-v4"), stated["fig04-deep"])
    table = printed()[["s1", "s2"]].reindex(networks).set_axis(wide.index)
    table["less_exposed"] = networks.map(exposed)
    rows = (
        pd.DataFrame(ratios).join(table.add_suffix("_paper")).assign(algorithm="OMGS")
    )
    return both.join(
        rows.set_index("algorithm", append=True), on=["where", "network", "algorithm"]
    )


def draw_fig04(frame: pd.DataFrame) -> Figure:
    """Draw omgs Fig 4 of `fig04`: parts of iterations, by model and replayed, beside what is printed."""
    places = pd.MultiIndex.from_product(
        [SHOWN, ("model", "lab")], names=["algorithm", "where"]
    )
    ours = frame[frame["where"] == "lab"]
    off = 100 * (ours["s1"] - ours["s1_paper"]).abs()
    said = f"OMGS-SGD's gain over TopK: replays are {off.min():.0f} to {off.max():.0f} points off the paper"
    with plots.sheet(said, columns=2, rows=2, height=6.0) as (figure, axes):
        for ax, (network, own) in zip(
            axes.flat, frame.groupby("network", sort=False), strict=True
        ):
            rows = own.set_index(places.names).reindex(places)
            parts = rows[list(PLAYED)].set_axis(KINDS, axis=1).droplevel(1)
            plots.bars(
                ax,
                parts,
                label="iteration [s]",
                stacked=True,
                legend="",
                pairs="left: model, right: replayed",
            )
            paper_s = rows["paper"].to_numpy()[::2]
            plots.points(ax, 2 * np.arange(len(SHOWN)) + 0.5, paper_s, "paper", size=6)
            gain, stated = (
                rows.loc[("OMGS", "lab"), name] - 1 for name in ("s1", "s1_paper")
            )
            ax.set_title(f"{network}: gain {gain:.0%}, printed {stated:.0%}")
    return figure


TITLES = {"dense": "dense", "topk": "TopK", "lags": "LAGS", "omgs": "OMGS"}
TITLES["exact"] = "exact merging"
TEXT = "lstm_sentences"
LEARNED = {"vgg16_cifar_eighth": "VGG-16, an eighth as wide"}
LEARNED |= {"resnet20_half": "ResNet-20, half as wide", TEXT: "LSTM, 2 x 64 units"}
SEEDS = 3  # with so many of every method a network is judged, and not before


def fig03(trained: pd.DataFrame | None = None) -> pd.DataFrame:
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
        raise UserError(
            "no sparsified training: run python -m workbook record convergence"
        )
    constant, text = rows["schedule"] == "constant", rows["network"] == TEXT
    names, steps = (
        rows["method"].map(TITLES),
        rows["epoch"] * (rows["images"] // rows["batch"]),
    )
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


def complete(frame: pd.DataFrame) -> pd.DataFrame:
    """Return of `fig03` the networks of which every method has SEEDS seeds, and those methods alone."""
    kept = frame[
        frame.groupby(["network", "method"])["seed"].transform("nunique") >= SEEDS
    ]
    constant = (
        kept[kept["method"].isin(TITLES.values())]
        .groupby("network")["method"]
        .nunique()
    )
    whole = constant[constant == len(TITLES)].index
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


def draw_fig03(frame: pd.DataFrame) -> Figure:
    """Draw omgs Fig 3 of what is `complete`; titles have OMGS-SGD's last score over dense's."""
    of_omgs = ratios(frame).groupby(level="network").mean()
    with plots.sheet(columns=len(of_omgs), height=3.4, squeeze=False) as (figure, axes):
        for ax, (network, rows) in zip(
            axes[0], frame.groupby("network", sort=False), strict=True
        ):
            shown = rows[
                rows["epoch"] >= 5 * (network == LEARNED[TEXT])
            ]  # before, far above
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
