"""Predicted meets measured: every Case predicted from calibration rows, joined on its key, and judged.

The only inputs of a prediction are a layer profile (compute) and a cost fitted to collectives measured on
their own (communication); no row of the runs table takes part in either.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ddlkit.core.case import CASE_COLUMNS, Case
from ddlkit.core.errors import UserError
from ddlkit.core.fit import Fit, fit
from ddlkit.core.iteration import Prediction, no_overlap, perfect_overlap, predict, prediction_draws
from ddlkit.core.link import Link
from ddlkit.core.noise import Noise
from ddlkit.core.plan import FusionPlan
from ddlkit.core.shaping import burst_s, wire_s_per_byte
from ddlkit.core.sparse import Selecting, SparseGather, group_selection_s, with_selection
from ddlkit.core.workload import Workload
from ddlkit.papers.osf.prediction import predict_osf
from ddlkit.run.instruments.processor import STOLEN_LIMIT

OTHERS: dict[str, Callable[..., Prediction]] = {
    "no_overlap": no_overlap,
    "perfect_overlap": perfect_overlap,
    "osf": predict_osf,
}
"""Two trivial models that the overlap model must beat, and the paper's own, where it applies."""
MODELS = ("model", *OTHERS)
RESCALED = "rescaled"
"""The overlap model once more, its compute stretched to what the same run measured without communication.

Between a profile and a run the machine's speed drifts; what error remains here is communication's alone.
"""


Floats = NDArray[np.float64]
STEADY = np.ones(1)
"""Compute that does not scatter: replayed, or not known to."""


@dataclass(frozen=True)
class Calibration:
    """Costs fitted to recorded collectives, their noise, and what their messages share of a shaped link:
    one of each a (link, workers, collective)."""

    fits: Mapping[tuple[str, int, str], Fit]
    noises: Mapping[tuple[str, int, str], Noise]
    links: Mapping[tuple[str, int, str], Link]

    @classmethod
    def of(cls, collectives: pd.DataFrame, form: str = "table") -> Calibration:
        """Fit ``form`` to each link, number of ranks and collective of a collectives table.

        Samples that the machine's host disturbed are left out where the size has others.
        """
        fits, noises, links = {}, {}, {}
        keys = ["link", "ranks", "collective"]
        for (link, ranks, collective), every in undisturbed(collectives).groupby(keys):
            key = str(link), int(ranks), str(collective)
            rows = every[every["in_flight"] == 1]
            sizes, seconds = rows["bytes"].to_numpy(), rows["seconds"].to_numpy()
            fits[key] = fit(
                form,
                sizes,
                seconds,
                collective=key[2],
                workers=key[1],
                algorithm=str(rows["algorithm"].iloc[0]),
            )
            noises[key] = Noise.of(sizes, seconds, rows["session"], rows["messages_per_sample"])
            links[key] = shared_link(every)
        return cls(fits, noises, links)

    def without_credit(self) -> Calibration:
        """The same for links that save nothing while they rest: a message costs what it costs."""
        bare = {key: Link(software=link.software) for key, link in self.links.items()}
        return replace(self, links=bare)

    def of_case(self, case: Case) -> tuple[Fit, Noise, Link]:
        """Those for a case's link and workers. Raises UserError when it was not calibrated."""
        key = (case.link, case.workers, case.collective)
        if key not in self.fits:
            raise UserError(
                f"no calibration for {case.collective} over {case.link} with {case.workers} ranks"
            )
        link = replace(self.links[key], in_flight=case.in_flight)
        return self.fits[key], self.noises[key], link


def shared_link(samples: pd.DataFrame) -> Link:
    """What messages over a link share, by its calibration there; of a link that is not a lab's, no credit."""
    one, rows = samples.iloc[0], samples[samples["in_flight"] == 1]
    software, rate_bits_per_s = software_at_once(samples), float(one["link_bits_per_s"])
    if not (str(one["link"]).startswith("lab:") and rate_bits_per_s):
        return Link(software=software)
    messages_per_sample = rows.groupby("bytes")["messages_per_sample"].first()
    return Link(
        software=software,
        burst_s=burst_s(rate_bits_per_s),
        wire_s_per_byte=wire_s_per_byte(one["collective"], int(one["ranks"]), rate_bits_per_s),
        bytes=messages_per_sample.index.tolist(),
        messages_per_sample=messages_per_sample.tolist(),
    )


def software_at_once(samples: pd.DataFrame) -> float:
    """How many small messages the processor carries in the time of one, by how much faster they go with
    several in flight than with one; without such samples as many as there are."""
    medians = samples.groupby(["in_flight", "bytes"])["seconds"].median().unstack("in_flight")
    faster = medians.rdiv(medians[1], axis=0).drop(columns=1).median()
    return float(np.clip(faster.max(), 1.0, None)) if len(faster) else math.inf


def undisturbed(collectives: pd.DataFrame) -> pd.DataFrame:
    """Without samples that lost more than STOLEN_LIMIT of the cores, of sizes measured better too."""
    keys = ["link", "ranks", "collective", "in_flight", "bytes"]
    least = collectives.groupby(keys)["stolen"].transform("min")
    lost = collectives["stolen"].gt(STOLEN_LIMIT) & least.le(STOLEN_LIMIT)
    return collectives[~lost]


def measured(runs: pd.DataFrame) -> pd.DataFrame:
    """One row a case: median of its iterations, and how well it repeats.

    repeatability : mean difference between two repeats' medians, relative to the median; likewise
        ``repeatability_exposed`` of exposed communication
    """
    quantities = ["iteration_s", "exposed_communication_s", "compute_s"]
    repeats = runs.groupby(["case", "repeat"])[quantities].median()
    by_case = repeats.groupby("case")
    spread = by_case.agg(_mean_difference) / by_case.median()
    found = by_case.median().add_prefix("measured_")
    found["repeats"] = by_case.size()
    found["repeatability"] = spread["iteration_s"]
    found["repeatability_exposed"] = spread["exposed_communication_s"]
    found["processor_load"] = runs.groupby("case")["processor_load"].median()
    found["stolen"] = runs.groupby("case")["stolen"].max()
    found["copy_s_per_byte"] = runs.groupby("case")["copy_s_per_byte"].median()
    found["processor_limited"] = runs.groupby("case")["processor_limited"].any()
    keys = runs.drop_duplicates("case").set_index("case")[[*CASE_COLUMNS, "origin"]]
    return keys.join(found).reset_index()


def _mean_difference(values: pd.Series) -> float:
    pairs = [abs(a - b) for a, b in combinations(values, 2)]
    return float(np.mean(pairs)) if pairs else float("nan")


def plan_of(case: Case) -> FusionPlan:
    """The plan whose group ends the case carries."""
    return FusionPlan(case.plan, tuple(int(end) for end in case.ends.split(";")))


def computed(
    case: Case, workloads: Mapping[str, Workload], selections: Mapping[str, Selecting]
) -> Workload:
    """What the slowest rank of a case computes, its selections included.

    Raises UserError when the layer profile, or the selection times of a sparse case, are not at hand.
    """
    if case.profile_sha256 not in workloads:
        raise UserError(
            f"case {case.key}: its layer profile {case.profile_sha256[:12]} is not at hand"
        )
    slower = case.dilation * case.straggler
    workload = workloads[case.profile_sha256].scaled(slower)
    if case.collective == "all_gather":
        if case.selection_sha256 not in selections:
            name = case.selection_sha256[:12] or "of a real one"
            raise UserError(f"case {case.key}: selection times {name} are not at hand")
        selecting, plan = selections[case.selection_sha256], plan_of(case)
        selection_s = group_selection_s(workload, plan, case.density, selecting)
        # Only what is waited out can be stretched.
        stretch = slower if case.selection_sha256 else 1.0
        workload = with_selection(workload, plan, stretch * selection_s)
    return workload


def predict_case(
    case: Case,
    workloads: Mapping[str, Workload],
    calibration: Calibration,
    compute_s: float,
    selections: Mapping[str, Selecting] | None = None,
    copy_s_per_byte: float = 0.0,
    compute_scatter: Floats = STEADY,
) -> dict[str, object]:
    """Iteration and exposed communication by every model, and the interval of a single iteration.

    The interval holds three kinds of noise, all of the calibration: how sure the cost is, how single
    messages scatter about it, and how it drifts from session to session; and where compute is real and
    not replayed a fourth, of the profile: how it scatters from iteration to iteration.

    compute_s : measured in the same run; only the RESCALED model uses it
    selections : selection times by the hash that a sparse case carries
    copy_s_per_byte : of gradients into and out of messages, measured on its own; counts as exposed
    compute_scatter : iterations of one worker alone over their median
    """
    workload, plan = computed(case, workloads, selections or {}), plan_of(case)
    copied = workload.copied(copy_s_per_byte)
    fitted, noise, link = calibration.of_case(case)
    cost, draws = fitted.cost, fitted.draws
    if sparse := case.collective == "all_gather":
        cost = SparseGather(cost, case.density)
        draws = tuple(SparseGather(draw, case.density) for draw in draws)
    row: dict[str, object] = {"case": case.key}
    answers = {name: other(workload, plan, cost) for name, other in OTHERS.items()}
    answers["model"] = predict(copied, plan, cost, link)
    for name, found in answers.items():
        row |= {
            f"{name}_iteration_s": found.iteration_s,
            f"{name}_exposed_s": found.iteration_s - workload.compute_s,
        }
    stretched = workload.scaled(compute_s / workload.compute_s).copied(copy_s_per_byte)
    found = predict(stretched, plan, cost, link)
    row |= {f"{RESCALED}_iteration_s": found.iteration_s}
    row |= {f"{RESCALED}_exposed_s": found.iteration_s - compute_s}
    sent_bytes = plan.group_bytes(workload) * (case.density if sparse else 1.0)
    factors = noise.factors(sent_bytes, len(draws))
    slower = np.random.default_rng(0).choice(compute_scatter, len(draws))
    times = prediction_draws(copied, plan, draws, factors, link, slower)
    lower, upper = np.quantile(times, [0.025, 0.975])
    return {**row, "lower_s": lower, "upper_s": upper, "predicted_compute_s": workload.compute_s}


def validate(
    runs: pd.DataFrame,
    workloads: Mapping[str, Workload],
    calibration: Calibration,
    selections: Mapping[str, Selecting] | None = None,
    compute_scatter: Mapping[str, Floats] | None = None,
) -> pd.DataFrame:
    """One row a case: measured, predicted, and signed relative errors.

    ``<model>_error`` is on the iteration, ``<model>_exposed_error`` on exposed communication.
    selections : selection times by the hash that a sparse case carries
    compute_scatter : of profiles by their hash, as `predict_case` takes it; for cases that really train
    """
    found, scatter = measured(runs), compute_scatter or {}
    predicted = pd.DataFrame(
        predict_case(
            Case.from_row(row),
            workloads,
            calibration,
            row["measured_compute_s"],
            selections,
            row["copy_s_per_byte"],
            scatter.get(row["profile_sha256"], STEADY) if row["kind"] == "training" else STEADY,
        )
        for row in found.to_dict("records")
    )
    joined = found.merge(predicted, on="case", validate="one_to_one")
    for name in (*MODELS, RESCALED):
        joined[f"{name}_error"] = joined[f"{name}_iteration_s"] / joined["measured_iteration_s"] - 1
        exposed = joined[f"{name}_exposed_s"] - joined["measured_exposed_communication_s"]
        joined[f"{name}_exposed_error"] = exposed / joined["measured_exposed_communication_s"]
    return joined


def summary(validated: pd.DataFrame) -> dict[str, float]:
    """The figures that a reader asks for first; errors are absolute and relative."""
    size = {name: validated[f"{name}_error"].abs() for name in MODELS}
    exposed = {name: validated[f"{name}_exposed_error"].abs() for name in MODELS}
    inside = validated["measured_iteration_s"].between(validated["lower_s"], validated["upper_s"])
    result = {
        "cases": len(validated),
        "median_error": size["model"].median(),
        "max_error": size["model"].max(),
        "median_exposed_error": exposed["model"].median(),
        "median_exposed_error_rescaled": validated[f"{RESCALED}_exposed_error"].abs().median(),
        "max_exposed_error": exposed["model"].max(),
        "median_repeatability": validated["repeatability"].median(),
        "median_repeatability_exposed": validated["repeatability_exposed"].median(),
        "interval_coverage": inside.mean(),
    }
    for name in OTHERS:
        told = size[name].notna()  # the same cases for both
        if told.any():
            for what, errors in {"": size, "exposed_": exposed}.items():
                ratio = errors[name].median() / errors["model"][told].median()
                result[f"{what}skill_over_{name}"] = ratio
    return {name: float(value) for name, value in result.items()}
