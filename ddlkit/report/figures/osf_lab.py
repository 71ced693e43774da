"""osf's figures as replayed in the lab: scaling factors, where communication time goes, what planners gain.

A prediction knows the layer profile and the collectives that were measured on their own, nothing of the
runs. Over the lab's link start-ups are cheap; in the *regime* they and bytes weigh against computing as in
the setting that fits the paper's statements best (examples/campaign_regimes.yml).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import pandas as pd

from ddlkit.core.case import Case
from ddlkit.core.iteration import predict
from ddlkit.core.timeline import COLUMNS, Timeline
from ddlkit.core.units import KIB, parse_bytes
from ddlkit.core.workload import Workload
from ddlkit.model import make_plan
from ddlkit.model.calibration import Calibration
from ddlkit.model.predictor import plan_of
from ddlkit.papers.osf import breakdown, of_timeline
from ddlkit.papers.osf.cluster import osf_name
from ddlkit.report import compare
from ddlkit.report.accuracy import mean_difference
from ddlkit.report.figures.osf_scaling import (
    CONSTANT,
    FORMULAS,
    RIVAL,
    RULES,
    TWO,
    by_phase,
    csf_of,
    formulas,
    shares,
)
from ddlkit.report.source import REGIMES, REGIMES_VGG, open_campaign

EQ7 = "alpha_beta:ends"
"""osf Eq 7 as a form of cost: a line, its delta measured directly, on the smallest message."""
LAB = "campaign-osf"
"""The campaign at 1 Gbit/s."""
LABS = {"measured": "1 Gbit/s", "regime": "expensive start-ups"}
"""The lab's two kinds of links by the look of their points: cheap start-ups, and such as on the cluster."""
BUFFERED = ["network", "buffer_bytes"]
KEYS = ["network", "workers", "buffer_bytes", "slowest"]


@dataclass(frozen=True)
class Lab:
    """What a campaign recorded: iterations, spans, compute by its hash, and fitted costs."""

    runs: pd.DataFrame
    spans: pd.DataFrame
    workloads: Mapping[str, Workload]
    calibration: Calibration

    @classmethod
    @lru_cache(maxsize=4)  # fitting its costs takes longer than whatever asks for it
    def load(cls, campaign: str = LAB) -> Lab:
        """Return the recorded campaign, read once. Raises UserError where there is none."""
        opened = open_campaign(name=campaign)
        alone = opened.alone
        calibration = Calibration.of(alone.table("collectives"), also=(EQ7,))
        return cls(alone.table("runs"), alone.table("timeline"), opened.workloads(), calibration)

    def cases(self, *, negotiated: bool = False, plain: bool = False) -> list[Case]:
        """Return the cases with or without a negotiation, in the order of the recording.

        plain : only those in which nothing special was tried: equal workers, dense gradients, one message
            in flight
        """
        rows = self.runs.drop_duplicates("case").to_dict("records")
        cases = [case for case in map(Case.from_row, rows) if case.negotiated == negotiated]
        usual = (1, 1, 1)
        return [c for c in cases if not plain or (c.density, c.straggler, c.in_flight) == usual]

    def workload(self, case: Case) -> Workload:
        """Return what a rank of usual speed computes."""
        return self.workloads[case.profile_sha256].scaled(case.dilation)

    def factors(self, case: Case) -> pd.Series:
        """Return the scaling factor (osf Eq 1) of each iteration of a case, by its round."""
        runs = self.runs[self.runs["case"] == case.key].set_index("repeat")
        return runs["compute_s"] / runs["iteration_s"]

    def measured(self, case: Case) -> dict[str, float]:
        """Return the mean scaling factor of a case, and the largest difference of its iterations."""
        factors = self.factors(case)
        return {"measured": factors.mean(), "repeatability": factors.max() - factors.min()}

    def timelines(self, case: Case) -> Iterator[Timeline]:
        """Yield one per repeat."""
        mine = self.spans[self.spans["case"] == case.key]
        for _, rows in mine.groupby("repeat"):
            yield Timeline(**{name: rows[name].to_numpy() for name in COLUMNS})

    def phases(self, case: Case) -> pd.DataFrame:
        """Return seconds of each phase on rank 0, one row per repeat."""
        return pd.DataFrame([of_timeline(timeline) for timeline in self.timelines(case)])


# -- scaling factors -----------------------------------------------------------------------------


def unfused(labs: Sequence[Lab]) -> pd.DataFrame:
    """Return scaling factors measured without fusion, and the errors of the formulas against them.

    One row per plain replay in which every gradient is a message. The formulas know osf Eq 7 through the
    smallest and the largest calibrated message. Columns: network, workers, link, measured, and for each of
    FORMULAS its error.
    """
    rows = []
    for lab in labs:
        for case in lab.cases(plain=True):
            if case.plan == "none":
                measured = lab.measured(case)["measured"]
                ring = lab.calibration.of_case(case).others[EQ7]
                factors = formulas(lab.workload(case), ring)
                errors = {name: factor / measured - 1 for name, factor in factors.items()}
                place = {"network": case.network, "workers": case.workers, "link": case.link}
                rows.append({**place, "measured": measured, **errors})
    frame = pd.DataFrame(rows, columns=["network", "workers", "link", "measured", *FORMULAS])
    return frame.sort_values(["network", "workers", "link"], ignore_index=True)


def fused(lab: Lab) -> pd.DataFrame:
    """Return scaling factors measured against the buffer, among four equal workers.

    Columns: BUFFERED (0: no fusion), measured, repeatability (largest difference of repeats). Of cases run
    with and without a negotiation, that without.
    """
    rows = {}
    for case in (*lab.cases(negotiated=True, plain=True), *lab.cases(plain=True)):
        kind, _, size = case.plan.partition(":")
        if case.workers == 4 and kind in ("none", "buffer"):
            place = osf_name(case.network), parse_bytes(size) if size else 0
            rows[place] = {**dict(zip(BUFFERED, place, strict=True)), **lab.measured(case)}
    return pd.DataFrame(rows.values()).sort_values(BUFFERED, ignore_index=True)


def fused_in_labs() -> pd.DataFrame:
    """Return `fused` over the lab's link and in the regime; ``look``: a name of LABS."""
    labs = zip(LABS, (LAB, REGIMES), strict=True)
    return pd.concat([fused(Lab.load(name)).assign(look=look) for look, name in labs])


def replaced(lab: Lab) -> pd.DataFrame:
    """Return scaling factors (osf Eq 1) of VGG-16 in the lab, as it is and replaced, without fusion.

    Columns: network, workers, measured, repeatability (mean difference of two repeats), model
    (overlapped), csf (osf Eq 2), error, processor_limited.
    """
    rows = []
    for case in lab.cases():
        if case.plan != "none" or case.network not in ("vgg16", "vgg16_replaced"):
            continue
        factors, runs = lab.factors(case), lab.runs[lab.runs["case"] == case.key]
        workload, messages = lab.workload(case), lab.calibration.of_case(case)
        model = predict(workload, plan_of(case), messages.cost, messages.link).scaling_factor
        rows.append(
            {
                "network": osf_name(case.network),
                "workers": case.workers,
                "measured": factors.mean(),
                "repeatability": mean_difference(factors),
                "model": model,
                "csf": csf_of(workload, messages.cost),
                "error": model / factors.mean() - 1,
                "processor_limited": bool(runs["processor_limited"].any()),
            }
        )
    return pd.DataFrame(rows).sort_values(["network", "workers"], ignore_index=True)


# -- where communication time goes ---------------------------------------------------------------


def phases(lab: Lab, *, negotiated: bool = True) -> pd.DataFrame:
    """Return one row per case and phase, of rank 0: seconds, and shares of the communication time.

    negotiated : of these cases; else of those in which a message leaves as soon as it is complete

    Plans are a buffer's, or none. An agreement is taken to be as quick as the smallest message that was
    calibrated: everyone must have heard from everyone. Columns: KEYS (buffer_bytes 0: no fusion), phase,
    model_s, measured_s, repeatability_s (NaN where one repeat's spans were kept), model, measured.
    """
    model, measured, apart = {}, {}, {}
    for case in lab.cases(negotiated=negotiated):
        kind, _, size = case.plan.partition(":")
        if kind not in ("none", "buffer"):
            continue
        key = osf_name(case.network), case.workers, parse_bytes(size) if size else 0, case.straggler
        messages = lab.calibration.of_case(case)
        model[key] = breakdown(
            lab.workload(case),
            plan_of(case),
            messages.cost,
            slowest=case.straggler,
            negotiate_s=float(messages.cost(KIB)) if negotiated else 0.0,
            link=messages.link,
        )
        seen = lab.phases(case)
        measured[key], apart[key] = seen.mean().to_dict(), seen.agg(mean_difference).to_dict()
    seconds = {"model_s": model, "measured_s": measured, "repeatability_s": apart}
    return by_phase(KEYS, **seconds, model=shares(model), measured=shares(measured))


def phases_in_regime() -> pd.DataFrame:
    """Return `phases` of two networks, four equal workers in the regime, not negotiated."""
    labs = (Lab.load(name) for name in (REGIMES, REGIMES_VGG))
    rows = pd.concat([phases(lab, negotiated=False) for lab in labs], ignore_index=True)
    rows = rows[rows["network"].isin(TWO) & (rows["workers"] == 4)]
    return rows.sort_values(BUFFERED, kind="stable", ignore_index=True)


def twins(lab: Lab) -> pd.DataFrame:
    """Return cases that were replayed with and without a negotiation, two rows each.

    Columns: network, workers, slowest, negotiated, iteration_s (mean), repeatability_s, and measured
    seconds of each phase on rank 0.
    """
    asked, plain = (
        {replace(case, negotiated=False).key: case for case in lab.cases(negotiated=negotiated)}
        for negotiated in (True, False)
    )
    rows: list[dict[str, Any]] = []
    for case in (cases[key] for key in asked if key in plain for cases in (plain, asked)):
        iterations_s = lab.runs.loc[lab.runs["case"] == case.key, "iteration_s"]
        place = {"network": osf_name(case.network), "workers": case.workers}
        how = {"slowest": case.straggler, "negotiated": case.negotiated}
        times = {"iteration_s": iterations_s.mean()}
        times["repeatability_s"] = mean_difference(iterations_s)
        rows.append({**place, **how, **times, **lab.phases(case).mean()})
    keys = ["network", "workers", "slowest", "negotiated"]
    return pd.DataFrame(rows).sort_values(keys, ignore_index=True)


# -- what planners gain --------------------------------------------------------------------------


def gains_in_regime() -> pd.DataFrame:
    """Return measured gains of figure 11's planners over the constant buffer, in the regime.

    What a round's two iterations say, rounds apart. A planner whose plan is that of another case counts as
    that one. Columns: network, planner, over, gain, gain_low, gain_high.
    """
    lab, rows = Lab.load(REGIMES), []
    by_network: dict[str, list[Case]] = {}
    for case in lab.cases(plain=True):
        by_network.setdefault(osf_name(case.network), []).append(case)
    for network, cases in by_network.items():
        factors = {case.plan: lab.factors(case) for case in cases}
        first, names = cases[0], {case.ends: case.plan for case in cases}
        cost = lab.calibration.of_case(first).cost
        for rule in dict.fromkeys(("adafusion", *RULES)):
            ends = make_plan(rule, lab.workload(first), cost).ends
            known = rule if rule in factors else names.get(";".join(map(str, ends)), "")
            if known not in ("", CONSTANT):
                gain = factors[known] / factors[CONSTANT] - 1
                ranges = {"gain": gain.mean(), "gain_low": gain.min(), "gain_high": gain.max()}
                rows.append({"network": network, "planner": rule, "over": CONSTANT, **ranges})
    return pd.DataFrame(rows)


def gains_in_lab(runs: pd.DataFrame, over: str) -> pd.DataFrame:
    """Return measured gains of planners over a constant buffer, with the 95% interval over the rounds.

    runs : in which plans of one network took turns. Columns as of `gains_in_regime`.
    """
    frames = []
    for rule in (RIVAL, "exact"):
        pairs = compare.paired(runs, rule)
        pairs = pairs[pairs["other"] == over]
        ranges = {"gain": "ratio", "gain_low": "lower", "gain_high": "upper"}
        columns = {name: pairs[column] - 1 for name, column in ranges.items()}
        frames.append(pairs[["network"]].assign(planner=rule, over=over, **columns))
    return pd.concat(frames, ignore_index=True)
