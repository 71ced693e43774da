"""osf's figures 3, 4, 6 and 8: scaling factors by network, fusion buffer and workers.

Column ``paper`` holds what the paper's text says and is empty where it prints only a picture.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd

from ddlkit.core.iteration import Iteration, no_overlap, predict
from ddlkit.core.plan import none, single
from ddlkit.model.predictor import plan_of
from ddlkit.papers import osf
from ddlkit.papers.osf import cluster
from ddlkit.papers.osf.cluster import FIVE, REPLACED, WORKERS, PaperSetting, osf_name
from ddlkit.report.claims import claimed
from ddlkit.report.figures.osf_inputs import (
    BUFFERS,
    TWO,
    WORKER_COUNTS,
    Lab,
    mean_difference,
)

Numbers = dict[tuple[Any, ...], float]


def _tidy(found: Numbers, *keys: str) -> pd.DataFrame:
    """One row per number, its key in columns; the paper prints none."""
    numbers = pd.Series(found, dtype=float).rename_axis(list(keys))
    return numbers.reset_index(name="model").assign(paper=math.nan)


def fig03(setting: PaperSetting) -> pd.DataFrame:
    """Scaling factor of the five networks at 32 workers without fusion: simulated, CSF, OSF.

    Columns: network, quantity, model, error (over the simulated one), paper.
    """
    found: Numbers = {}
    cost = setting.cost()
    for network in FIVE:
        workload = setting.workload(network)
        sent = cost(workload.bytes[::-1]).tolist()
        arguments = workload.forward_s, workload.backward_s[::-1].tolist(), sent
        found[network, "simulated"] = predict(workload, none(workload), cost).scaling_factor
        found[network, "CSF"] = no_overlap(
            Iteration(workload, single(workload), cost)
        ).scaling_factor
        found[network, "OSF printed"] = osf.osf(*arguments)
        found[network, "OSF repaired"] = osf.osf(*arguments, first=0)
    frame = _tidy(found, "network", "quantity")
    simulated = frame.groupby("network")["model"].transform("first")
    frame.insert(3, "error", frame["model"] / simulated - 1)
    return frame


def fig04(setting: PaperSetting) -> pd.DataFrame:
    """Scaling factor against the buffer: simulated, CSF, and OSF_fusion as printed and repaired.

    Columns: network, buffer_bytes, quantity, model, paper.
    """
    found: Numbers = {}
    cost = setting.cost()
    for network in TWO:
        workload = setting.workload(network)
        one_message = no_overlap(Iteration(workload, single(workload), cost)).scaling_factor
        sizes, backward = workload.bytes[::-1].tolist(), workload.backward_s[::-1].tolist()
        for size in BUFFERS:
            arguments = workload.forward_s, sizes, backward, cost, size, setting.timeout_s
            found[network, size, "simulated"] = _fused(network, setting, size)["SF"]
            found[network, size, "CSF"] = one_message
            found[network, size, "OSF printed"] = osf.osf_fused(*arguments, literal=True)
            found[network, size, "OSF repaired"] = osf.osf_fused(*arguments, literal=False)
    return _tidy(found, "network", "buffer_bytes", "quantity")


def fig06(setting: PaperSetting) -> pd.DataFrame:
    """Number of all-reduces and scaling factor against the buffer at 32 workers (0: no fusion).

    Columns: network, buffer_bytes, quantity, model, paper.
    """
    found: Numbers = {
        (network, size, quantity): value
        for network in TWO
        for size in (0, *BUFFERS)
        for quantity, value in _fused(network, setting, size).items()
    }
    return _tidy(found, "network", "buffer_bytes", "quantity")


def _fused(network: str, setting: PaperSetting, capacity: int) -> dict[str, float]:
    """Number of messages and scaling factor with a fusion buffer (0: without)."""
    compute_s, cost = setting.compute_s(network), setting.cost()
    workload, plan, waited = cluster.fused(
        network, compute_s, capacity, setting.timeout_s, setting.unit
    )
    overhead = np.array([cost.alpha_s])
    taken = cluster.fused_iteration_s(workload, plan, waited, overhead, cost.beta_s_per_byte)[0]
    return {"all-reduces": float(len(plan.ends)), "SF": compute_s / taken}


def fig08(setting: PaperSetting) -> pd.DataFrame:
    """Scaling factor of VGG-16, as it is and replaced, from 1 to 32 workers without fusion.

    Model "OSF" overlaps, "CSF" sends everything afterwards. Columns: network, workers, quantity, model,
    paper.
    """
    found: Numbers = {}
    for network in ("VGG16", REPLACED):
        workload = setting.workload(network)
        for workers in WORKER_COUNTS:
            factors = 1.0, 1.0
            if workers > 1:
                cost = setting.cost(workers)
                overlapped = predict(workload, none(workload), cost)
                afterwards = no_overlap(Iteration(workload, single(workload), cost))
                factors = overlapped.scaling_factor, afterwards.scaling_factor
            found[network, workers, "OSF"], found[network, workers, "CSF"] = factors
    frame = _tidy(found, "network", "workers", "quantity")
    for network, claim in (("VGG16", "osf-fig08-before"), (REPLACED, "osf-fig08-after")):
        here = (frame["network"] == network) & (frame["workers"] == WORKERS)
        frame.loc[here, "paper"] = claimed(claim)
    return frame


def fig08_lab(lab: Lab) -> pd.DataFrame:
    """Scaling factor (osf Eq 1) of VGG-16 in the lab, as it is and replaced, without fusion.

    A prediction knows the layer profile and the collectives that were measured on their own, nothing of
    the runs. Columns: network, workers, measured, repeatability (mean difference of two repeats), model
    (overlapped), csf (osf Eq 2), error, processor_limited.
    """
    rows = []
    for case in lab.cases(negotiated=False):
        if case.plan != "none" or case.network not in ("vgg16", "vgg16_replaced"):
            continue
        runs = lab.runs[lab.runs["case"] == case.key]
        factors = runs["compute_s"] / runs["iteration_s"]
        workload, messages = lab.workload(case), lab.calibration.of_case(case)
        all_at_the_end = Iteration(workload, single(workload), messages.cost)
        model = predict(workload, plan_of(case), messages.cost, messages.link).scaling_factor
        rows.append(
            {
                "network": osf_name(case.network),
                "workers": case.workers,
                "measured": factors.mean(),
                "repeatability": mean_difference(factors),
                "model": model,
                "csf": no_overlap(all_at_the_end).scaling_factor,
                "error": model / factors.mean() - 1,
                "processor_limited": bool(runs["processor_limited"].any()),
            }
        )
    return pd.DataFrame(rows).sort_values(["network", "workers"], ignore_index=True)
