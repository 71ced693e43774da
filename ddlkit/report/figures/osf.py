"""The numbers of osf's figures, by model: one pure function a figure, one tidy row a plotted number.

Column ``paper`` holds what the paper's text says and is empty where it prints only a picture. Unless a
setting is given, it is the compromise that the search finds (``setting()``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pandas as pd

from ddlkit.core.cost import AlphaBeta
from ddlkit.core.iteration import Iteration, no_overlap, predict
from ddlkit.core.plan import make_plan, none, single
from ddlkit.core.timeline import Timeline
from ddlkit.core.units import GB, KB, MB
from ddlkit.core.workload import Workload
from ddlkit.papers import osf
from ddlkit.papers.osf import cluster
from ddlkit.papers.osf.breakdown import breakdown
from ddlkit.papers.osf.cluster import FIVE, REPLACED, WORKERS, PaperSetting, SettingSearch, Stated
from ddlkit.report.claims import claimed, prose

TWO = ("ResNet101", "VGG16")
ANCHOR = "VGG-16: scaling factor"
WORKER_COUNTS = (1, 2, 4, 8, 16, 32)
BUFFERS = tuple(m * u for u in (KB, MB) for m in (1, 3, 10, 30, 100, 300)) + (GB,)
FIG11_PLANNERS = (
    "none", "buffer:100MB", "buffer:25MB", "ddp", "mg_wfbp", "adafusion", "adafusion:repaired", "exact",
)  # fmt: skip
VISIBLE = 0.01
"""Relative difference below which two bars of a picture cannot be told apart."""
SLOW_RANK = 1.1
"""The unequal workers of the breakdown: one takes 10% longer to compute."""


def stated() -> tuple[Stated, ...]:
    """What osf states of its cluster, each with the tolerance of its claim; "higher" is by 1% or more."""
    about = {
        ANCHOR: ("osf-fig08-before", 1.0, 0.10),
        "VGG-16 replaced: scaling factor": ("osf-fig08-after", 1.0, 0.05),
        "VGG-16: loss at 1 GB": ("osf-fig06-vgg16", 0.01, 0.25),
        "VGG-16: communication at 1 GB": ("osf-fig07-vgg16", 0.01, 0.25),
        "ResNet-101: gain at 1 GB": ("osf-fig06-resnet101", 0.01, 0.25),
        "ResNet-101: ALLREDUCE share": ("osf-fig05-allreduce", 0.01, 0.10),
        "ResNet-101: largest CSF error": ("osf-fig04a-csf", 0.01, 0.25),
        "five: smallest CSF error": ("osf-fig03-csf-min", 0.01, 0.25),
        "five: largest CSF error": ("osf-fig03-csf-max", 0.01, 0.25),
    }
    ordered = {
        "VGG-16: change up to 100 MB": (-0.05, 0.05),
        "ResNet-101: 100 MB over 1 GB": (VISIBLE, math.inf),
        "ResNet-101: CSF above at 1 KB, 1 MB": (VISIBLE, math.inf),
        "ResNet-101: CSF below at 100 MB, 1 GB": (-math.inf, -VISIBLE),
        "ResNets: CSF above SF": (VISIBLE, math.inf),
    }
    values = [Stated.about(n, claimed(id) * unit, tol) for n, (id, unit, tol) in about.items()]
    return (*values, *(Stated(name, *limits) for name, limits in ordered.items()))


@lru_cache(maxsize=1)
def setting_search() -> SettingSearch:
    """All settings of the default grid against ``stated()``."""
    return cluster.search(stated())


@lru_cache(maxsize=1)
def setting() -> PaperSetting:
    """The setting of the figures: VGG-16 at its 0.25, and of the rest as much as fits together."""
    return setting_search().best(ANCHOR)


def fig01(chosen: PaperSetting | None = None) -> dict[str, Timeline]:
    """Replaced VGG-16 by layer: all communication after computation (CSF), and overlapped (OSF)."""
    chosen = chosen or setting()
    compute_s = chosen.compute_s(REPLACED)
    workload = cluster.workload(REPLACED, compute_s, "layer")
    plans = {"after computation (CSF)": single(workload), "overlapped (OSF)": none(workload)}
    return {
        name: Iteration(workload, plan, chosen.cost()).timeline() for name, plan in plans.items()
    }


FIG02_BACKWARD_S = (2e-3, 2e-3, 9e-3, 5e-3)
FIG02_BYTES = (4 * MB, 4 * MB, 4 * MB, 4 * MB)
FIG02_PLANS = {"one by one": "none", "fused in pairs": "cuts:2", "only the first pair": "cuts:2,3"}


def fig02(overhead_s: float = 4e-3) -> tuple[Workload, AlphaBeta, dict[str, Timeline]]:
    """Four equal tensors; waiting for the second pays, waiting for the last does not.

    Numbers chosen here (the paper draws none): times in ``FIG02_BACKWARD_S``, 4 MB a tensor.
    """
    workload = Workload.from_arrays(2e-3, FIG02_BACKWARD_S, FIG02_BYTES)
    slope = float(osf.update_s(1.0, WORKERS, cluster.NETWORK_BYTES_PER_S))
    cost = AlphaBeta(overhead_s, slope, workers=WORKERS, algorithm="ring")
    plans = {name: make_plan(spec, workload, cost) for name, spec in FIG02_PLANS.items()}
    return (
        workload,
        cost,
        {name: Iteration(workload, p, cost).timeline() for name, p in plans.items()},
    )


def fig03(chosen: PaperSetting | None = None) -> pd.DataFrame:
    """Scaling factor of the five networks at 32 workers without fusion: simulated, CSF, OSF."""
    chosen = chosen or setting()
    rows = []
    for network in FIVE:
        workload, cost = chosen.workload(network), chosen.cost()
        simulated = predict(workload, none(workload), cost).scaling_factor
        sent = cost(workload.bytes[::-1]).tolist()
        arguments = workload.forward_s, workload.backward_s[::-1].tolist(), sent
        models = {
            "simulated": simulated,
            "CSF": no_overlap(Iteration(workload, single(workload), cost)).scaling_factor,
            "OSF printed": osf.osf(*arguments),
            "OSF repaired": osf.osf(*arguments, first=0),
        }
        for model, value in models.items():
            error = value / simulated - 1
            rows.append({"network": network, "quantity": model, "model": value, "error": error})
    return pd.DataFrame(rows).assign(paper=math.nan)


def fig04(
    chosen: PaperSetting | None = None,
    buffers: Sequence[int] = BUFFERS,
    networks: Iterable[str] = TWO,
) -> pd.DataFrame:
    """Scaling factor against the buffer: simulated, CSF, and OSF_fusion as printed and repaired."""
    chosen = chosen or setting()
    rows = []
    for network in networks:
        workload, cost = chosen.workload(network), chosen.cost()
        one_message = no_overlap(Iteration(workload, single(workload), cost)).scaling_factor
        sizes, backward = workload.bytes[::-1].tolist(), workload.backward_s[::-1].tolist()
        for size in buffers:
            fused = {
                name: osf.osf_fused(
                    workload.forward_s,
                    sizes,
                    backward,
                    cost,
                    size,
                    chosen.timeout_s,
                    literal=literal,
                )
                for name, literal in (("OSF printed", True), ("OSF repaired", False))
            }
            values = {"simulated": _fused(network, chosen, size)["sf"], "CSF": one_message, **fused}
            rows += [
                {"network": network, "buffer_bytes": size, "quantity": name, "model": value}
                for name, value in values.items()
            ]
    return pd.DataFrame(rows).assign(paper=math.nan)


def _fused(network: str, chosen: PaperSetting, capacity: int) -> dict[str, float]:
    """Scaling factor, iteration and number of messages with a fusion buffer (0: without)."""
    compute_s, cost = chosen.compute_s(network), chosen.cost()
    workload, plan, waited = cluster.fused(
        network, compute_s, capacity, chosen.timeout_s, chosen.unit
    )
    overhead = np.array([cost.alpha_s])
    taken = cluster.fused_iteration_s(workload, plan, waited, overhead, cost.beta_s_per_byte)[0]
    return {"sf": compute_s / taken, "iteration_s": float(taken), "messages": len(plan.ends)}


def fig05(
    chosen: PaperSetting | None = None, networks: Iterable[str] = TWO, slow_rank: float = SLOW_RANK
) -> pd.DataFrame:
    """Communication time by phase against workers without fusion, all equal and one slower."""
    chosen = chosen or setting()
    rows: list[dict[str, Any]] = []
    for network in networks:
        workload = chosen.workload(network)
        for workers in WORKER_COUNTS[1:]:
            for slowest in (1.0, slow_rank):
                found = breakdown(
                    workload,
                    none(workload),
                    chosen.cost(workers),
                    slowest=slowest,
                    negotiate_s=agreement_s(),
                )
                rows += _phases({"network": network, "workers": workers, "slowest": slowest}, found)
    frame = pd.DataFrame(rows).assign(paper=math.nan)
    told = (frame["network"] == "ResNet101") & (frame["workers"] == WORKERS)
    told &= (frame["phase"] == "ALLREDUCE") & (frame["slowest"] == 1.0)
    frame.loc[told, "paper"] = claimed("osf-fig05-allreduce") / 100
    return frame


def fig07(
    chosen: PaperSetting | None = None,
    buffers: Sequence[int] = (0, *cluster.BUFFERS),
    networks: Iterable[str] = TWO,
) -> pd.DataFrame:
    """Communication time by phase against the buffer at 32 workers, all equal and one slower."""
    chosen = chosen or setting()
    rows: list[dict[str, Any]] = []
    for network in networks:
        for size in buffers:
            workload, plan, waited = cluster.fused(
                network, chosen.compute_s(network), size, chosen.timeout_s, chosen.unit
            )
            for slowest in (1.0, SLOW_RANK):
                found = breakdown(
                    workload,
                    plan,
                    chosen.cost(),
                    waited_s=waited,
                    slowest=slowest,
                    negotiate_s=agreement_s(),
                )
                where = {"network": network, "buffer_bytes": size, "slowest": slowest}
                rows += _phases(where, found)
    return pd.DataFrame(rows).assign(paper=math.nan)


def agreement_s() -> float:
    """One round trip to the coordinator: the paper's bandwidth-delay product over its link rate."""
    return prose("osf")["fig10-bdp"] * KB / cluster.NETWORK_BYTES_PER_S


def _phases(where: Mapping[str, Any], found: Mapping[str, float]) -> list[dict[str, Any]]:
    total = sum(found.values())
    return [
        {**where, "phase": phase, "seconds": seconds, "model": seconds / total}
        for phase, seconds in found.items()
    ]


def fig06(
    chosen: PaperSetting | None = None,
    buffers: Sequence[int] = (0, *BUFFERS),
    networks: Iterable[str] = TWO,
) -> pd.DataFrame:
    """Number of all-reduces and scaling factor against the buffer at 32 workers (0: no fusion)."""
    chosen = chosen or setting()
    rows: list[dict[str, Any]] = []
    for network in networks:
        for size in buffers:
            found = _fused(network, chosen, size)
            for quantity, value in (("all-reduces", found["messages"]), ("SF", found["sf"])):
                where = {"network": network, "buffer_bytes": size, "quantity": quantity}
                rows.append({**where, "model": float(value)})
    return pd.DataFrame(rows).assign(paper=math.nan)


def fig08(chosen: PaperSetting | None = None) -> pd.DataFrame:
    """Scaling factor of VGG-16, as it is and replaced, from 1 to 32 workers without fusion.

    Model "OSF" overlaps, "CSF" sends everything afterwards.
    """
    chosen = chosen or setting()
    told = {
        ("VGG16", WORKERS): claimed("osf-fig08-before"),
        (REPLACED, WORKERS): claimed("osf-fig08-after"),
    }
    rows: list[dict[str, Any]] = []
    for network in ("VGG16", REPLACED):
        workload = chosen.workload(network)
        for workers in WORKER_COUNTS:
            values = {"OSF": 1.0, "CSF": 1.0}
            if workers > 1:
                cost = chosen.cost(workers)
                values = {
                    "OSF": predict(workload, none(workload), cost).scaling_factor,
                    "CSF": no_overlap(Iteration(workload, single(workload), cost)).scaling_factor,
                }
            rows += [
                {
                    "network": network,
                    "workers": workers,
                    "quantity": name,
                    "model": value,
                    "paper": told.get((network, workers), math.nan),
                }
                for name, value in values.items()
            ]
    return pd.DataFrame(rows)


def fig11(
    chosen: PaperSetting | None = None, planners: Sequence[str] = FIG11_PLANNERS
) -> pd.DataFrame:
    """Scaling factor of the five networks by planner, its gain over 100 MB, and the most possible gain."""
    chosen = chosen or setting()
    rows: list[dict[str, Any]] = []
    for network in FIVE:
        workload, cost = chosen.workload(network), chosen.cost()
        plan = make_plan("buffer:100MB", workload, cost)
        constant = predict(workload, plan, cost)
        saved = (len(plan.ends) - 1) * cost.alpha_s / workload.compute_s
        bound = osf.largest_fusion_gain(constant.scaling_factor, saved)
        for planner in planners:
            fusion = make_plan(planner, workload, cost)
            found = predict(workload, fusion, cost)
            gain = found.scaling_factor / constant.scaling_factor - 1
            rows.append(
                {
                    "network": network,
                    "planner": planner,
                    "messages": len(fusion.ends),
                    "model": found.scaling_factor,
                    "gain_over_100MB": gain,
                    "most_possible_gain": bound,
                }
            )
    return pd.DataFrame(rows).assign(paper=math.nan)


def gain_region(gains: Sequence[float], factors: Sequence[float]) -> pd.DataFrame:
    """Least (k - 1) delta over T_comp that allows each gain, by the constant plan's scaling factor."""
    rows = [
        {
            "gain": gain,
            "scaling_factor": sf,
            "saved_overhead": osf.least_overhead_for_gain(gain, sf),
        }
        for gain in gains
        for sf in factors
    ]
    return pd.DataFrame(rows).replace(math.inf, math.nan)


def workers_name(network: str, slowest: float) -> str:
    """A panel of the breakdown: "VGG16, equal workers", "VGG16, one takes 1.1 x"."""
    return f"{network}, " + ("equal workers" if slowest == 1 else f"one takes {slowest:g} x")


def buffer_name(size: float) -> str:
    """A buffer as a label, decimal as the paper's seem to be: "1 KB"; "none" for 0."""
    for unit, factor in (("GB", GB), ("MB", MB), ("KB", KB)):
        if size >= factor:
            return f"{size / factor:g} {unit}"
    return f"{size:g} B" if size else "none"
