"""osf's figures 5, 7 and 8 in the lab: each measured number beside what was predicted of it.

A prediction knows the layer profile and the collectives that were measured on their own, nothing of the
runs. Columns ``model`` and ``measured`` are of one unit; ``repeatability`` is how far repeats of the same
case differ, in that unit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from ddlkit.core.case import Case
from ddlkit.core.cost import MessageCost
from ddlkit.core.iteration import Iteration, no_overlap, predict
from ddlkit.core.link import Link
from ddlkit.core.plan import single
from ddlkit.core.timeline import COLUMNS, COMMUNICATION, Timeline
from ddlkit.core.units import KIB, parse_bytes
from ddlkit.core.workload import Workload
from ddlkit.model.calibration import Calibration
from ddlkit.model.predictor import plan_of
from ddlkit.papers.osf.breakdown import PHASES, breakdown, of_timeline
from ddlkit.papers.osf.cluster import osf_name
from ddlkit.report.source import Source, campaign_dir

CAMPAIGN = "osf"


@dataclass(frozen=True)
class Lab:
    """What the campaign recorded: iterations, spans, compute by its hash, and fitted costs."""

    runs: pd.DataFrame
    spans: pd.DataFrame
    workloads: Mapping[str, Workload]
    calibration: Calibration

    def cases(self) -> list[Case]:
        """Every case, in the order of the recording."""
        return [Case.from_row(row) for row in self.runs.drop_duplicates("case").to_dict("records")]

    def workload(self, case: Case) -> Workload:
        """What a rank of usual speed computes."""
        return self.workloads[case.profile_sha256].scaled(case.dilation)

    def cost(self, case: Case) -> MessageCost:
        """Of one message, as calibrated on that link with so many workers."""
        cost: MessageCost = self.calibration.of_case(case).cost
        return cost

    def link(self, case: Case) -> Link:
        """What its messages share."""
        return self.calibration.of_case(case).link

    def timelines(self, case: Case) -> Iterator[Timeline]:
        """One a repeat."""
        mine = self.spans[self.spans["case"] == case.key]
        for _, rows in mine.groupby("repeat"):
            yield Timeline(**{name: rows[name].to_numpy() for name in COLUMNS})


def load(campaign: str = CAMPAIGN) -> Lab:
    """The recorded campaign. Raises UserError where there is none."""
    directory = campaign_dir(campaign)
    own = Source((directory,))
    # Profiles that the machine had already are not the campaign's own.
    workloads = Source((directory, directory.parent)).workloads()
    calibration = Calibration.of(own.table("collectives"))
    return Lab(own.table("runs"), own.table("timeline"), workloads, calibration)


def predicted_phases(lab: Lab, case: Case) -> dict[str, float]:
    """Seconds of each phase of a negotiated case.

    An agreement is taken to be as quick as the smallest message that was calibrated: everyone must have
    heard from everyone.
    """
    cost = lab.cost(case)
    return breakdown(
        lab.workload(case),
        plan_of(case),
        cost,
        slowest=case.straggler,
        negotiate_s=float(cost(KIB)),
        link=lab.link(case),
    )


def phases(lab: Lab) -> pd.DataFrame:
    """One row a negotiated case and phase, of rank 0: seconds, and shares of the communication time.

    Columns: network, workers, buffer_bytes (0: no fusion), slowest, phase, model_s, measured_s,
    repeatability_s, model, measured.
    """
    rows = []
    for case in lab.cases():
        if not case.negotiated:
            continue
        seen = pd.DataFrame([of_timeline(timeline) for timeline in lab.timelines(case)])
        model, measured = predicted_phases(lab, case), seen.mean()
        where = {
            "network": osf_name(case.network),
            "workers": case.workers,
            "buffer_bytes": _buffer_bytes(case),
            "slowest": case.straggler,
        }
        rows += [
            {
                **where,
                "phase": phase,
                "model_s": model[phase],
                "measured_s": measured[phase],
                "repeatability_s": _spread(seen[phase]),
                "model": model[phase] / sum(model.values()),
                "measured": measured[phase] / measured.sum(),
            }
            for phase in PHASES
        ]
    return pd.DataFrame(rows)


def _buffer_bytes(case: Case) -> int:
    name, _, size = case.plan.partition(":")
    return parse_bytes(size) if name == "buffer" else 0


def _spread(values: pd.Series) -> float:
    """Mean difference of two repeats; NaN for a single one."""
    found = values.to_numpy()
    apart = np.abs(found[:, None] - found)[np.triu_indices(len(found), 1)]
    return float(apart.mean()) if len(apart) else float("nan")


def totals(rows: pd.DataFrame) -> pd.DataFrame:
    """Of rows of `phases`: one a case, communication time in all and its relative error."""
    keys = ["network", "workers", "buffer_bytes", "slowest"]
    found = rows.groupby(keys)[["model_s", "measured_s"]].sum()
    return found.assign(error=found["model_s"] / found["measured_s"] - 1).reset_index()


def side_by_side(rows: pd.DataFrame, by: str) -> pd.DataFrame:
    """Phases in columns, for stacked bars: of each value of ``by`` the model's row and, beside it, the lab's.

    Labels are short, since bars may be many: the value, its unit below it, and "lab" under the second.
    """
    found = [
        part.set_index("phase")[column].rename(label)
        for value, part in rows.groupby(by, sort=False)
        for label, column in ((str(value).replace(" ", "\n"), "model_s"), ("lab", "measured_s"))
    ]
    return pd.DataFrame(found)[list(PHASES)]


def agreements(lab: Lab) -> pd.DataFrame:
    """How long an agreement takes where all workers are equal, from rank 0's report to its answer.

    One row a case: network, workers, buffer_bytes, model_s (of each), and medians of those asked for
    on an idle and on a busy link: idle_s, busy_s, NaN where there are none.
    """
    rows = []
    for case in lab.cases():
        if not case.negotiated or case.straggler > 1:
            continue
        asked: dict[str, list[float]] = {"idle_s": [], "busy_s": []}
        for timeline in lab.timelines(case):
            mine = timeline.select(timeline.rank == 0)
            messages = mine.spans(COMMUNICATION)
            spans = mine.select(mine.kind == "negotiate")
            for start_s, end_s in zip(spans.start_s.tolist(), spans.end_s.tolist(), strict=True):
                busy = np.any((messages[:, 0] < start_s) & (start_s < messages[:, 1]))
                asked["busy_s" if busy else "idle_s"].append(end_s - start_s)
        rows.append(
            {
                "network": osf_name(case.network),
                "workers": case.workers,
                "buffer_bytes": _buffer_bytes(case),
                "model_s": float(lab.cost(case)(KIB)),
                **{name: float(pd.Series(times).median()) for name, times in asked.items()},
            }
        )
    return pd.DataFrame(rows)


def twins(lab: Lab) -> pd.DataFrame:
    """Cases that were replayed with and without a negotiation, two rows each.

    Columns: network, workers, slowest, negotiated, iteration_s (mean), repeatability_s, and measured
    seconds of each phase on rank 0.
    """
    rows = []
    cases = lab.cases()
    plain = {_but_negotiated(case) for case in cases if not case.negotiated}
    both = {_but_negotiated(case) for case in cases if case.negotiated} & plain
    for case in cases:
        if _but_negotiated(case) not in both:
            continue
        iterations_s = lab.runs.loc[lab.runs["case"] == case.key, "iteration_s"]
        seen = pd.DataFrame([of_timeline(timeline) for timeline in lab.timelines(case)])
        rows.append(
            {
                "network": osf_name(case.network),
                "workers": case.workers,
                "slowest": case.straggler,
                "negotiated": case.negotiated,
                "iteration_s": iterations_s.mean(),
                "repeatability_s": _spread(iterations_s),
                **seen.mean(),
            }
        )
    keys = ["network", "workers", "slowest", "negotiated"]
    return pd.DataFrame(rows).sort_values(keys, ignore_index=True)


def _but_negotiated(case: Case) -> tuple[object, ...]:
    return case.network, case.workers, case.ends, case.straggler, case.dilation


def fig08(lab: Lab) -> pd.DataFrame:
    """Scaling factor (osf Eq 1) of VGG-16, as it is and replaced, without fusion or negotiation.

    Columns: network, workers, measured, repeatability, model (overlapped), csf (osf Eq 2), error,
    processor_limited.
    """
    rows = []
    for case in lab.cases():
        if (
            case.negotiated
            or case.plan != "none"
            or case.network not in ("vgg16", "vgg16_replaced")
        ):
            continue
        runs = lab.runs[lab.runs["case"] == case.key]
        factors = runs["compute_s"] / runs["iteration_s"]
        workload, cost = lab.workload(case), lab.cost(case)
        model = predict(workload, plan_of(case), cost, lab.link(case)).scaling_factor
        rows.append(
            {
                "network": osf_name(case.network),
                "workers": case.workers,
                "measured": factors.mean(),
                "repeatability": _spread(factors),
                "model": model,
                "csf": no_overlap(Iteration(workload, single(workload), cost)).scaling_factor,
                "error": model / factors.mean() - 1,
                "processor_limited": bool(runs["processor_limited"].any()),
            }
        )
    return pd.DataFrame(rows).sort_values(["network", "workers"], ignore_index=True)
