"""osf's figures 5 and 7: where communication time goes, on the paper's cluster and in the lab.

A prediction of the lab knows the layer profile and the collectives that were measured on their own, nothing
of the runs. ``repeatability_s`` is the mean difference of two repeats.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pandas as pd

from ddlkit.core.case import Case
from ddlkit.core.units import KB, KIB, parse_bytes
from ddlkit.model.predictor import plan_of
from ddlkit.papers.osf import cluster
from ddlkit.papers.osf.breakdown import breakdown, of_timeline
from ddlkit.papers.osf.cluster import WORKERS, PaperSetting, osf_name
from ddlkit.report.accuracy import mean_difference
from ddlkit.report.claims import claimed, prose
from ddlkit.report.figures.osf_scaling import TWO, WORKER_COUNTS, Lab

SLOW_RANK = 1.1
"""The unequal workers of the breakdown: one takes 10% longer to compute."""
KEYS = ["network", "workers", "buffer_bytes", "slowest"]
Phases = Mapping[tuple[Any, ...], Mapping[str, float]]


def _by_phase(keys: list[str], **found: Phases) -> pd.DataFrame:
    """One row per key and phase, one column per quantity."""
    columns = {name: pd.DataFrame(phases).unstack() for name, phases in found.items()}
    return pd.DataFrame(columns).rename_axis([*keys, "phase"]).reset_index()


def _shares(found: Phases) -> dict[tuple[Any, ...], dict[str, float]]:
    return {
        key: {phase: seconds / sum(phases.values()) for phase, seconds in phases.items()}
        for key, phases in found.items()
    }


def fig05(setting: PaperSetting, slow_rank: float = SLOW_RANK) -> pd.DataFrame:
    """Communication time by phase against workers without fusion, all equal and one slower.

    Columns: network, workers, slowest, phase, seconds, model (its share), paper.
    """
    found = {
        (network, workers, slowest): _phases(setting, network, slowest, workers, 0)
        for network in TWO
        for workers in WORKER_COUNTS[1:]
        for slowest in (1.0, slow_rank)
    }
    keys = ["network", "workers", "slowest"]
    frame = _by_phase(keys, seconds=found, model=_shares(found)).assign(paper=math.nan)
    printed = frame[[*keys, "phase"]] == ["ResNet101", WORKERS, 1.0, "ALLREDUCE"]
    frame.loc[printed.all(axis=1), "paper"] = claimed("osf-fig05-allreduce") / 100
    return frame


def fig07(setting: PaperSetting) -> pd.DataFrame:
    """Communication time by phase against the buffer at 32 workers, all equal and one slower.

    Columns: network, buffer_bytes (0: no fusion), slowest, phase, seconds, model (its share).
    """
    found = {
        (network, size, slowest): _phases(setting, network, slowest, WORKERS, size)
        for network in TWO
        for size in (0, *cluster.BUFFERS)
        for slowest in (1.0, SLOW_RANK)
    }
    keys = ["network", "buffer_bytes", "slowest"]
    return _by_phase(keys, seconds=found, model=_shares(found))


def _phases(
    setting: PaperSetting, network: str, slowest: float, workers: int, buffer_bytes: int
) -> dict[str, float]:
    """An agreement takes one round trip to the coordinator: bandwidth-delay product over link rate."""
    workload, plan, waited_s = cluster.fused(
        network, setting.compute_s(network), buffer_bytes, setting.timeout_s, setting.unit
    )
    agreed_s = prose("osf")["fig10-bdp"] * KB / cluster.NETWORK_BYTES_PER_S
    cost = setting.cost(workers)
    return breakdown(workload, plan, cost, waited_s=waited_s, slowest=slowest, negotiate_s=agreed_s)


def _key(case: Case) -> tuple[str, int, int, float]:
    """The values of KEYS."""
    name, _, size = case.plan.partition(":")
    buffer_bytes = parse_bytes(size) if name == "buffer" else 0
    return osf_name(case.network), case.workers, buffer_bytes, case.straggler


def phases(lab: Lab, *, negotiated: bool = True) -> pd.DataFrame:
    """One row per case and phase, of rank 0: seconds, and shares of the communication time.

    negotiated : of these cases; else of those in which a message leaves as soon as it is complete

    Plans are a buffer's, or none. An agreement is taken to be as quick as the smallest message that was
    calibrated: everyone must have heard from everyone. Columns: network, workers, buffer_bytes (0: no
    fusion), slowest, phase, model_s, measured_s, repeatability_s (NaN where one repeat's spans were kept),
    model, measured.
    """
    model, measured, apart = {}, {}, {}
    for case in lab.cases(negotiated=negotiated):
        if case.plan.partition(":")[0] not in ("none", "buffer"):
            continue
        key, messages = _key(case), lab.calibration.of_case(case)
        sent, cost = plan_of(case), messages.cost
        agreed_s = float(cost(KIB)) if negotiated else 0.0
        model[key] = breakdown(
            lab.workload(case),
            sent,
            cost,
            slowest=case.straggler,
            negotiate_s=agreed_s,
            link=messages.link,
        )
        seen = _seen(lab, case)
        measured[key], apart[key] = seen.mean().to_dict(), seen.agg(mean_difference).to_dict()
    seconds = {"model_s": model, "measured_s": measured, "repeatability_s": apart}
    return _by_phase(KEYS, **seconds, model=_shares(model), measured=_shares(measured))


def _seen(lab: Lab, case: Case) -> pd.DataFrame:
    """Seconds of each phase on rank 0, one row per repeat."""
    return pd.DataFrame([of_timeline(timeline) for timeline in lab.timelines(case)])


def totals(rows: pd.DataFrame) -> pd.DataFrame:
    """Communication time in all and its relative error, one row per case of `phases`."""
    found = rows.groupby(KEYS)[["model_s", "measured_s"]].sum()
    return found.assign(error=found["model_s"] / found["measured_s"] - 1).reset_index()


def twins(lab: Lab) -> pd.DataFrame:
    """Cases that were replayed with and without a negotiation, two rows each.

    Columns: network, workers, slowest, negotiated, iteration_s (mean), repeatability_s, and measured
    seconds of each phase on rank 0.
    """
    asked, plain = (
        {replace(case, negotiated=False).key: case for case in lab.cases(negotiated=negotiated)}
        for negotiated in (True, False)
    )
    rows = []
    for case in (found[alike] for alike in asked if alike in plain for found in (plain, asked)):
        iterations_s = lab.runs.loc[lab.runs["case"] == case.key, "iteration_s"]
        rows.append(
            {
                "network": osf_name(case.network),
                "workers": case.workers,
                "slowest": case.straggler,
                "negotiated": case.negotiated,
                "iteration_s": iterations_s.mean(),
                "repeatability_s": mean_difference(iterations_s),
                **_seen(lab, case).mean(),
            }
        )
    keys = ["network", "workers", "slowest", "negotiated"]
    return pd.DataFrame(rows).sort_values(keys, ignore_index=True)
