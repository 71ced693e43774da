"""osf's figures as tables: measured in the lab, beside the cluster by model and what the paper prints.

In the *regime* start-ups and bytes weigh against compute as in the setting that an earlier search found best.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
import pandas as pd

from ddlkit.core.case import Case
from ddlkit.core.errors import UserError
from ddlkit.core.fit import fit, unseen_errors
from ddlkit.core.iteration import predict
from ddlkit.core.timeline import COLUMNS, Timeline
from ddlkit.core.units import GB, KB, KIB, parse_bytes
from ddlkit.core.workload import Workload
from ddlkit.model import make_plan
from ddlkit.model.calibration import Calibration, undisturbed
from ddlkit.model.predictor import plan_of
from workbook.common import networks, places
from workbook.common.claims import claimed, prose
from workbook.common.source import (
    REGIMES,
    REGIMES_VGG,
    Source,
    open_campaign,
    open_source,
)
from workbook.osf import equations as osf
from workbook.osf import scaling as osf_scaling
from workbook.osf.cluster import REPLACED, osf_name
from workbook.osf.equations import breakdown, of_timeline
from workbook.osf.scaling import CONSTANT, RIVAL, TWO, csf_of, printed_at, rows_of
from workbook.validate import compare
from workbook.validate.accuracy import mean_difference

EQ7 = "alpha_beta:ends"  # osf Eq 7: a line, its delta measured on the smallest message
OTHER_LINES = "alpha_beta:medians", "alpha_beta", "alpha_beta:least_squares"
LAB = "campaign-osf"  # the campaign at 1 Gbit/s
BUFFERED = ["network", "buffer_bytes"]
KEYS = ["network", "workers", "buffer_bytes", "slowest"]
MODELS = (
    *("ring_all_reduce", "alpha_beta:medians", "alpha_beta"),
    *("piecewise:BDP", "piecewise", "segments", "table"),
)
"""Costs from samples: osf Eq 7 from both ends, a line through the medians, another by relative error,
osf Eq 18 with its threshold at the bandwidth-delay product, or where it fits best, linear pieces, a table."""
LABS = {
    "measured": "1 Gbit/s",
    "regime": "expensive start-ups",
}  # by the look of their points
EXPENSIVE = ", expensive start-ups"  # behind a network's name in tables
ADAFUSION = "adafusion:repaired"
LINE_MODELS, EQ18_MODELS = list(MODELS[:3]), list(MODELS[3:5])
LINK = ["link", "ranks"]


@dataclass(frozen=True)
class Lab:
    """What a campaign recorded: iterations, spans, compute by its hash, and fitted costs."""

    runs: pd.DataFrame
    spans: pd.DataFrame
    workloads: Mapping[str, Workload]
    calibration: Calibration

    @classmethod
    @lru_cache(maxsize=6)  # fitting its costs takes longer than whatever asks for it
    def load(cls, campaign: str = LAB) -> Lab:
        """Return a campaign, or what a machine's suite replayed, read once. Raises UserError for none."""
        whole = (places.RECORDED / campaign).is_dir()
        opened = open_source(campaign) if whole else open_campaign(name=campaign)
        alone = opened.alone
        calibration = Calibration.of(
            alone.table("collectives"), also=(EQ7, *OTHER_LINES)
        )
        return cls(
            alone.table("runs"),
            alone.table("timeline"),
            opened.workloads(),
            calibration,
        )

    def cases(self, *, negotiated: bool = False, plain: bool = False) -> list[Case]:
        """Return cases with or without a negotiation; ``plain``: equal workers, dense, one in flight."""
        rows = self.runs.drop_duplicates("case").to_dict("records")
        cases = [
            case for case in map(Case.from_row, rows) if case.negotiated == negotiated
        ]
        return [
            c
            for c in cases
            if not plain or c.density == c.straggler == c.in_flight == 1
        ]

    def workload(self, case: Case) -> Workload:
        """Return what a rank of usual speed computes."""
        return self.workloads[case.profile_sha256].scaled(case.dilation)

    def rounds(self, case: Case) -> pd.DataFrame:
        """Return the iterations of a case by their round, each with its scaling factor (osf Eq 1)."""
        runs = self.runs[self.runs["case"] == case.key].set_index("repeat")
        return runs.assign(factor=runs["compute_s"] / runs["iteration_s"])

    def phases(self, case: Case, first: str = "ALLREDUCE") -> pd.DataFrame:
        """Return seconds of each phase on rank 0, one row per repeat; of two at once ``first`` counts."""
        repeats = self.spans[self.spans["case"] == case.key].groupby("repeat")
        columns = [
            {name: rows[name].to_numpy() for name in COLUMNS} for _, rows in repeats
        ]
        return pd.DataFrame(
            [of_timeline(Timeline(**spans), first=first) for spans in columns]
        )


def _buffer(case: Case) -> tuple[str, int] | None:
    """Return the network as osf writes it and the buffer's bytes, 0 without; None for another plan."""
    kind, _, size = case.plan.partition(":")
    if kind not in ("none", "buffer"):
        return None
    return osf_name(case.network), parse_bytes(size) if size else 0


@lru_cache(maxsize=4)
def unfused(campaigns: tuple[str, ...], line: str = EQ7) -> pd.DataFrame:
    """Return scaling factors measured without fusion, and errors of FORMULAS with a line against them."""
    rows, labs = [], map(Lab.load, campaigns)
    for lab, case in [(each, case) for each in labs for case in each.cases(plain=True)]:
        if case.plan == "none":
            measured, cost = (
                lab.rounds(case)["factor"].mean(),
                lab.calibration.of_case(case).others,
            )
            factors = osf_scaling.formulas(lab.workload(case), cost[line])
            place = {
                "network": case.network,
                "workers": case.workers,
                "link": case.link,
            }
            errors = {name: factor / measured - 1 for name, factor in factors.items()}
            rows.append({**place, "measured": measured, **errors})
    return pd.DataFrame(rows).sort_values(
        ["network", "workers", "link"], ignore_index=True
    )


def fused(lab: Lab) -> pd.DataFrame:
    """Return factors measured against the buffer, four workers; of cases run both ways, negotiated."""
    rows = {}
    for case in (*lab.cases(plain=True), *lab.cases(negotiated=True, plain=True)):
        if case.workers == 4 and (place := _buffer(case)):
            factors = lab.rounds(case)["factor"]
            rows[place] = {"measured": factors.mean(), "repeatability": np.ptp(factors)}
    return pd.DataFrame(rows).T.rename_axis(BUFFERED).sort_index().reset_index()


def replaced(lab: Lab) -> pd.DataFrame:
    """Return scaling factors (osf Eq 1) of VGG-16 in the lab, as it is and replaced, without fusion."""
    rows = []
    for case in lab.cases():
        if case.plan == "none" and case.network in ("vgg16", "vgg16_replaced"):
            rounds, workload = lab.rounds(case), lab.workload(case)
            messages, measured = lab.calibration.of_case(case), rounds["factor"].mean()
            model = predict(
                workload, plan_of(case), messages.cost, messages.link
            ).scaling_factor
            row = {
                "network": osf_name(case.network),
                "workers": case.workers,
                "measured": measured,
            }
            row |= {"repeatability": mean_difference(rounds["factor"]), "model": model}
            row |= {
                "csf": csf_of(workload, messages.cost),
                "error": model / measured - 1,
            }
            rows.append(
                {**row, "processor_limited": bool(rounds["processor_limited"].any())}
            )
    return pd.DataFrame(rows).sort_values(["network", "workers"], ignore_index=True)


def phases(
    lab: Lab, *, negotiated: bool = True, first: str = "ALLREDUCE"
) -> pd.DataFrame:
    """Return one row per case and phase, of rank 0: seconds, and shares of the communication time."""
    tables = {}
    for case in lab.cases(negotiated=negotiated):
        if place := _buffer(case):
            messages, measured = lab.calibration.of_case(case), lab.phases(case, first)
            how: dict[str, Any] = {"slowest": case.straggler, "link": messages.link}
            how["negotiate_s"] = (
                float(messages.cost(KIB)) if negotiated else 0.0
            )  # the smallest
            model = breakdown(lab.workload(case), plan_of(case), messages.cost, **how)
            columns = {"model_s": pd.Series(model), "measured_s": measured.mean()}
            table = pd.DataFrame(columns).assign(
                repeatability_s=measured.agg(mean_difference)
            )
            for name in ("model", "measured"):
                table[name] = table[f"{name}_s"] / table[f"{name}_s"].sum()
            tables[place[0], case.workers, place[1], case.straggler] = table
    return pd.concat(tables, names=[*KEYS, "phase"]).reset_index()


def gains_in_regime() -> pd.DataFrame:
    """Return measured gains of figure 11's planners over the constant buffer, in the regime, by rounds."""
    lab, rows = Lab.load(REGIMES), []
    cases = pd.Series(lab.cases(plain=True))
    for network, mine in cases.groupby(
        [osf_name(case.network) for case in cases], sort=False
    ):
        first, factors = mine.iloc[0], {c.plan: lab.rounds(c)["factor"] for c in mine}
        names, cost = (
            {c.ends: c.plan for c in mine},
            lab.calibration.of_case(first).cost,
        )
        for rule in dict.fromkeys(("adafusion", *osf_scaling.RULES)):
            ends = ";".join(map(str, make_plan(rule, lab.workload(first), cost).ends))
            name = (
                rule if rule in factors else names.get(ends, CONSTANT)
            )  # another case's plan
            if name != CONSTANT:
                gain = factors[name] / factors[CONSTANT] - 1
                row = {
                    "network": network,
                    "planner": rule,
                    "over": CONSTANT,
                    "gain": gain.mean(),
                }
                rows.append({**row, "gain_low": gain.min(), "gain_high": gain.max()})
    return pd.DataFrame(rows)


def gains_in_lab(runs: pd.DataFrame) -> pd.DataFrame:
    """Return measured gains of planners over a buffer of 25 MB, with the 95% interval over the rounds."""
    rules = RIVAL, "exact"
    pairs = pd.concat(
        [compare.paired(runs, rule).assign(planner=rule) for rule in rules]
    )
    pairs = pairs.query("other == 'buffer:25MB'").rename(columns={"other": "over"})
    ends = {"gain": "ratio", "gain_low": "lower", "gain_high": "upper"}
    gains = pairs.assign(**{name: pairs[end] - 1 for name, end in ends.items()})
    return gains[["network", "planner", "over", *ends]].reset_index(drop=True)


def fig09(trained: pd.DataFrame) -> pd.DataFrame:
    """Return loss by epoch of the longest trainings; share_of_guess : over ln(classes), a guess's loss."""
    trained = trained[trained["epochs"] == trained["epochs"].max()]
    frame = trained[["seed", "epoch", "measured_on", "loss", "accuracy"]].copy()
    names = {
        "": "published",
        "_replaced": "replaced",
        "_no_dropout": "published, no dropout",
    }
    frame.insert(
        0, "network", trained["network"].str.removeprefix("vgg16_eighth").map(names)
    )
    frame["share_of_guess"] = frame["loss"] / np.log(trained["classes"])
    printed = {
        "published": claimed("osf-fig09-before"),
        "replaced": claimed("osf-fig09-after"),
    }
    last = (frame["epoch"] == trained["epochs"]) & (frame["measured_on"] == "running")
    stated = frame["network"].map(printed).where(last)
    return frame.assign(paper=stated / math.log(1000), paper_loss=stated)


def fig10(
    collectives: pd.DataFrame,
    tensors: pd.DataFrame,
    network: str,
    models: Sequence[str] = MODELS,
) -> pd.DataFrame:
    """Return the error of each of ``models`` at each size that the network's tensors have, over each link.

    collectives : samples to make costs from; tensors : of another run, predicted, each size unseen
    ``tensors`` of the result counts them; ``repeated`` is the two runs' relative difference
    """
    before = {place: rows for place, rows in _all_reduces(collectives)}
    frames = [
        _errors(before[place], rows, models).assign(
            **dict(zip(LINK, place, strict=True))
        )
        for place, rows in _all_reduces(tensors[tensors["network"] == network])
        if place in before
    ]
    if not frames:
        raise UserError(
            f"no link with all-reduces of {network}: those of v0.2-studies have them"
        )
    frame = pd.concat(frames, ignore_index=True)
    counts = pd.Series(networks.parameters(network)).mul(4).value_counts()
    frame.insert(0, "tensors", counts.reindex(frame["bytes"]).to_numpy())
    return frame.assign(paper_bandwidth_delay_bytes=KB * prose("osf")["fig10-bdp"])


def _all_reduces(samples: pd.DataFrame) -> Any:
    """Return all-reduces by link and ranks, without those that the machine's host disturbed."""
    return undisturbed(samples[samples["collective"] == "all_reduce"]).groupby(LINK)


def _errors(
    seen: pd.DataFrame, rows: pd.DataFrame, models: Sequence[str]
) -> pd.DataFrame:
    """Return errors of every model made from ``seen``, at the sizes of ``rows``."""
    workers, columns = int(seen["ranks"].iloc[0]), ["bytes", "seconds"]
    samples, unseen = (tuple(part[columns].to_numpy(float).T) for part in (seen, rows))
    threshold = osf.bandwidth_delay_bytes(
        osf.ring_from_ends(samples[0], samples[1], workers)
    )
    before, measured = (
        part.groupby("bytes")["seconds"].median() for part in (seen, rows)
    )
    repeated = (before.reindex(measured.index) / measured - 1).to_numpy()

    def made(model: str, sizes: Any, seconds: Any) -> Any:
        if model == "ring_all_reduce":
            return osf.ring_from_ends(sizes, seconds, workers)
        form = model.replace("BDP", f"{threshold:.0f}")
        return fit(
            form, sizes, seconds, workers=workers, algorithm="ring", draws=0
        ).cost

    frames = []
    for model in models:
        sizes, errors = unseen_errors(partial(made, model), samples, unseen)
        frame = pd.DataFrame({"model": model, "bytes": sizes.astype(int)})
        frame["measured_s"] = measured.to_numpy()
        frame["model_s"] = (1 + errors) * measured.to_numpy()
        frames.append(frame.assign(error=errors, repeated=repeated))
    return pd.concat(frames, ignore_index=True).assign(bandwidth_delay_bytes=threshold)


def decided(frame: pd.DataFrame) -> pd.DataFrame:
    """Return per link and side of the BDP if the best line and Eq 18 differ by more than the two runs."""
    small = (frame["bytes"] < frame["bandwidth_delay_bytes"]).map(
        {True: "small", False: "large"}
    )
    sides = frame.assign(
        side=small, error=frame["error"].abs(), apart=frame["repeated"].abs()
    )
    rows: list[dict[str, Any]] = []
    for (link, ranks, side), mine in sides.groupby([*LINK, "side"], sort=False):
        each = (
            mine.loc[mine.index.repeat(mine["tensors"])]
            .groupby("model")["error"]
            .median()
        )
        line, curve = (each[models].idxmin() for models in (LINE_MODELS, EQ18_MODELS))
        row = {
            "link": link,
            "ranks": ranks,
            "tensors": side,
            "runs_differ": mine["apart"].median(),
        }
        row |= {
            "line": line,
            "line_error": each[line],
            "eq18": curve,
            "eq18_error": each[curve],
        }
        rows.append(
            {**row, "decided": abs(each[line] - each[curve]) > row["runs_differ"]}
        )
    return pd.DataFrame(rows)


def graded(model: pd.DataFrame, *labs: pd.DataFrame) -> pd.DataFrame:
    """Return rows of the model and of the lab, each named by its grade, one below the other."""
    rows = [model.assign(grade="model"), *(lab.assign(grade="lab") for lab in labs)]
    return pd.concat(rows, ignore_index=True)


def buffer_name(size: float) -> str:
    """Return a buffer as a label, decimal as the paper's seem to be, "none" without one."""
    units = {"GB": 1e9, "MB": 1e6, "KB": 1e3, "B": 1.0}
    return next(
        (f"{size / unit:g} {name}" for name, unit in units.items() if size >= unit),
        "none",
    )


def _in_labs(
    of: Callable[[Lab], pd.DataFrame], regime: str = REGIMES
) -> list[pd.DataFrame]:
    """Return numbers over the lab's link and in the regime; ``look``: a name of LABS."""
    names = zip(LABS, (LAB, regime), strict=True)
    return [of(Lab.load(campaign)).assign(look=mark) for mark, campaign in names]


def printed_errors() -> dict[str, tuple[float, float]]:
    """Return the least and largest error in % that osf states of each formula (Section 3.2)."""
    return {
        name: (
            claimed(f"osf-fig03-{name.lower()}-min"),
            claimed(f"osf-fig03-{name.lower()}-max"),
        )
        for name in ("CSF", "OSF")
    }


def fig03() -> pd.DataFrame:
    """Return factors without fusion on the cluster and errors in the lab, beside the printed ranges."""
    model = osf_scaling.over(
        osf_scaling.fig03, ["network", "quantity"], ["model", "error"]
    )
    plain = unfused(("campaign", LAB))
    regime = unfused((REGIMES,))
    frame = graded(model, plain, regime.assign(network=regime["network"] + EXPENSIVE))
    first = {"network": "VGG16", "quantity": "simulated"}
    frame["paper"] = printed_at(frame, claimed("osf-fig08-before"), **first)
    for name, (low, high) in printed_errors().items():
        rows = frame["quantity"] == ("CSF" if name == "CSF" else "OSF printed")
        frame.loc[rows, ["paper_error_low", "paper_error_high"]] = [
            low / 100,
            high / 100,
        ]
    return frame


def fig04() -> pd.DataFrame:
    """Return factors against the buffer, beside the largest errors that the text prints of ResNet-101."""
    model = osf_scaling.over(osf_scaling.fig04, [*BUFFERED, "quantity"])
    frame = graded(model, *_in_labs(fused))
    for name, claim in (("CSF", "osf-fig04a-csf"), ("OSF printed", "osf-fig04a-osf")):
        rows = (frame["network"] == "ResNet101") & (frame["quantity"] == name)
        frame.loc[rows, "paper_error"] = claimed(claim) / 100
    of_csf = frame["paper_error"].where(frame["quantity"] == "CSF")
    return frame.assign(
        paper_low=frame["model"] / (1 + of_csf),
        paper_high=frame["model"] / (1 - of_csf),
    )


def fig06() -> pd.DataFrame:
    """Return messages and factor against the buffer; ``paper``: what the printed change makes of ours."""
    model = osf_scaling.over(osf_scaling.fig06, [*BUFFERED, "quantity"], unit="tensor")
    change = {
        "ResNet101": claimed("osf-fig06-resnet101"),
        "VGG16": -claimed("osf-fig06-vgg16"),
    }
    stated = model["network"].map(change) / 100
    unfused = rows_of(model, quantity="SF", buffer_bytes=0).set_index("network")[
        "model"
    ]
    at_1gb = (model["quantity"] == "SF") & (model["buffer_bytes"] == GB)
    expected = (model["network"].map(unfused) * (1 + stated)).where(at_1gb)
    frame = graded(model.assign(paper=expected), *_in_labs(fused))
    return frame.assign(paper_change=stated.where(at_1gb))


def changes(frame: pd.DataFrame, network: str) -> dict[str, float]:
    """Return what 1 GB changes over no buffer: of figure 6 by model, paper, and measured by link."""
    rows = frame[(frame["network"] == network) & (frame["quantity"] != "all-reduces")]
    factors = rows.assign(factor=rows["measured"].fillna(rows["model"]))
    wide = factors.pivot_table("factor", rows["look"].fillna("model"), "buffer_bytes")
    return {**(wide[GB] / wide[0] - 1).dropna(), "paper": rows["paper_change"].max()}


def fig08() -> pd.DataFrame:
    """Return factors of VGG-16 as published and replaced, beside what two places of the text print."""
    frame = graded(
        osf_scaling.fig08(osf_scaling.setting()), *_in_labs(replaced, REGIMES_VGG)
    )
    stated = printed_at(frame, claimed("osf-fig08-intro"), network=REPLACED)
    return frame.assign(paper_section_1=stated.where(frame["paper"].notna()))


def fig05(slow_rank: float) -> pd.DataFrame:
    """Return communication time by phase and workers: the cluster by model, the printed share, the lab."""
    model = osf_scaling.fig05(osf_scaling.setting(), slow_rank=slow_rank)
    return graded(model, rows_of(phases(Lab.load(LAB)), buffer_bytes=0))


def fig07() -> pd.DataFrame:
    """Return communication time by phase and buffer, also over what it takes without, as printed."""
    slow = [phases(Lab.load(name), negotiated=False) for name in (REGIMES, REGIMES_VGG)]
    regime = pd.concat(slow, ignore_index=True)
    regime = regime[regime["network"].isin(TWO)]
    labs = {"measured": phases(Lab.load(LAB)), "regime": regime}
    rows = [
        lab[lab["workers"] == 4]
        .sort_values("buffer_bytes" if mark == "measured" else BUFFERED, kind="stable")
        .assign(buffer=lab["buffer_bytes"].map(buffer_name), look=mark)
        for mark, lab in labs.items()
    ]
    frame = graded(osf_scaling.fig07(osf_scaling.setting()), *rows)
    case = [frame[name].fillna("") for name in ("grade", "look", "network", "slowest")]
    for column in ("seconds", "model_s", "measured_s"):
        whole = (
            frame[column]
            .where(frame["buffer_bytes"] == 0)
            .groupby(case)
            .transform("sum")
        )
        frame[f"{column.removesuffix('_s')}_over_unfused"] = frame[column] / whole
    grown = 1 + claimed("osf-fig07-vgg16") / 100
    stated = printed_at(frame, grown, network="VGG16", buffer_bytes=GB)
    return frame.assign(paper_over_unfused=stated.where(frame["look"] != "measured"))


def fig11(campaign: Source) -> pd.DataFrame:
    """Return rows of `osf_scaling.fig11`, then gains over all settings that fit, and replayed, by grade."""
    gains = osf_scaling.over(
        osf_scaling.gains, ["planner", "over", "network"], ["gain"]
    )
    labs = gains_in_lab(campaign.table("runs")), gains_in_regime()
    frame = osf_scaling.fig11(osf_scaling.setting())
    numbers = pd.concat([frame, graded(gains, *labs)], ignore_index=True)
    stated = (numbers["planner"] == ADAFUSION) & (numbers["grade"] == "model")
    claims = {CONSTANT: "osf-fig11-constant", RIVAL: "osf-fig11-mgwfbp"}
    for name, end in (("low", "min"), ("high", "max")):
        printed = {
            over: claimed(f"{claim}-{end}") / 100 for over, claim in claims.items()
        }
        numbers[f"paper_gain_{name}"] = numbers["over"].map(printed).where(stated)
    return numbers
