"""osf's figures by model: the paper's cluster in all settings that fit its statements equally well.

One setting gives one curve; the paper's text leaves many open. A range goes from the least to the largest
number over the *compatible* settings: VGG-16 at its 0.25, and of the other statements as many as hold
together. What the text says stands in a column ``paper``; most of its figures are pictures without numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ddlkit.core.cost import AlphaBeta, MessageCost
from ddlkit.core.iteration import Iteration, no_overlap, predict
from ddlkit.core.plan import none, single
from ddlkit.core.timeline import Timeline
from ddlkit.core.units import GB, KB, MB
from ddlkit.core.workload import Workload
from ddlkit.model import make_plan
from ddlkit.papers import osf
from ddlkit.papers.audit import SettingSearch, Stated, settle
from ddlkit.papers.osf import breakdown, cluster
from ddlkit.papers.osf.cluster import FIVE, REPLACED, WORKERS, PaperSetting
from ddlkit.report.claims import claimed, load_claims, prose

TWO = ("ResNet101", "VGG16")
WORKER_COUNTS = (1, 2, 4, 8, 16, 32)
BUFFERS = tuple(m * u for u in (KB, MB) for m in (1, 3, 10, 30, 100, 300)) + (GB,)
ANCHOR = "VGG-16: scaling factor"
FIG02_BACKWARD_S = (2e-3, 2e-3, 9e-3, 5e-3)
FIG02_OVERHEAD_S = 4e-3
FIG02_PLANS = {"one by one": "none", "fused in pairs": "cuts:2", "only the first pair": "cuts:2,3"}
FORMULAS = ("CSF", "OSF printed", "OSF repaired")
FIG11_PLANNERS = (
    *("none", "buffer:100MB", "buffer:25MB", "ddp", "mg_wfbp"),
    *("adafusion", "adafusion:repaired", "exact"),
)
RULES = ("adafusion:repaired", "mg_wfbp", "exact")
CONSTANT, RIVAL = "buffer:100MB", "mg_wfbp"
SLOW_RANK = 1.1
"""The unequal workers of the breakdown: one takes 10% longer to compute."""
Numbers = dict[tuple[Any, ...], float]
Phases = Mapping[tuple[Any, ...], Mapping[str, float]]


# -- settings ------------------------------------------------------------------------------------


def stated() -> tuple[Stated, ...]:
    """Return what osf states of its cluster: claims, by the quantities that osf_stated.csv here names.

    Raises KeyError for a claim that there is not.
    """
    table = Path(__file__).with_name("osf_stated.csv")
    known, intervals = {claim.id: claim for claim in load_claims()}, []
    for row in pd.read_csv(table, comment="#").itertuples():
        claim = known[row.claim]
        if not pd.isna(row.tolerance):
            claim = replace(claim, tolerance=row.tolerance)
        low, high = (row.offset + row.unit * end for end in claim.accepted)
        intervals.append(Stated(row.statement, low, high))
    return tuple(intervals)


@lru_cache(maxsize=1)
def setting_search() -> SettingSearch:
    """Return all settings of the default grid against ``stated()``."""
    grid = cluster.Grid()
    return settle(stated(), grid, cluster.quantities(grid))


@lru_cache(maxsize=2)
def compatible(unit: str = "") -> tuple[PaperSetting, ...]:
    """Return every setting that agrees with as many statements as that of the figures, the best first.

    unit : "tensor" or "layer": of these only
    """
    search = setting_search()
    mask = search.most(ANCHOR)
    order = np.argsort(search.miss[mask], kind="stable")
    settings = [search.grid.setting(index) for index in np.argwhere(mask)[order]]
    return tuple(setting for setting in settings if unit in ("", setting.unit))


def setting() -> PaperSetting:
    """Return the setting of the figures: VGG-16 at its 0.25, and of the rest as much as fits together."""
    return compatible()[0]


def over(
    figure: Callable[[PaperSetting], pd.DataFrame],
    keys: Sequence[str],
    values: Sequence[str] = ("model",),
    unit: str = "",
) -> pd.DataFrame:
    """Return a figure at the best compatible setting, each of ``values`` with its range over all of them.

    keys : columns that name a row; unit : as for `compatible`. New columns: ``<value>_low``, ``_high``.
    """
    settings = compatible(unit)
    by_row = pd.concat(map(figure, settings)).groupby(list(keys), sort=False)[list(values)]
    low, high = by_row.min().add_suffix("_low"), by_row.max().add_suffix("_high")
    return figure(settings[0]).join(low, on=list(keys)).join(high, on=list(keys))


# -- scaling factors -----------------------------------------------------------------------------


def _tidy(numbers: Numbers, *keys: str) -> pd.DataFrame:
    """One row per number, its key in columns."""
    return pd.Series(numbers, dtype=float).rename_axis(list(keys)).reset_index(name="model")


def csf_of(workload: Workload, cost: MessageCost) -> float:
    """Return the factor when everything is sent as one message after computation (osf Eq 2)."""
    return no_overlap(Iteration(workload, single(workload), cost)).scaling_factor


def formulas(workload: Workload, cost: MessageCost) -> dict[str, float]:
    """Return the scaling factor without fusion by each of FORMULAS (osf Eqs 2, 3, 8 to 10).

    The paper's iteration has no update; the workload's comes after all else, as in our own model.
    """
    sent_s = cost(workload.bytes[::-1]).tolist()
    times = workload.forward_s, workload.backward_s[::-1].tolist(), sent_s
    alone_s = workload.compute_s - workload.update_s
    overlapped = {
        name: workload.compute_s / (alone_s / osf.osf(*times, first=first) + workload.update_s)
        for name, first in (("OSF printed", 1), ("OSF repaired", 0))
    }
    return {"CSF": csf_of(workload, cost), **overlapped}


def fig01(setting: PaperSetting) -> dict[str, Timeline]:
    """Return replaced VGG-16 by layer: all communication after computation (CSF), and overlapped (OSF)."""
    workload = cluster.workload(REPLACED, setting.compute_s(REPLACED), "layer")
    plans = {"after computation (CSF)": single(workload), "overlapped (OSF)": none(workload)}
    cost = setting.cost()
    return {name: Iteration(workload, plan, cost).timeline() for name, plan in plans.items()}


def fig02() -> tuple[Workload, AlphaBeta, dict[str, Timeline]]:
    """Return four equal tensors; waiting for the second pays, waiting for the last does not.

    Numbers chosen here (the paper draws none): times in ``FIG02_BACKWARD_S``, 4 MB per tensor.
    """
    workload = Workload.from_arrays(2e-3, FIG02_BACKWARD_S, [4 * MB] * len(FIG02_BACKWARD_S))
    slope = float(osf.update_s(1.0, WORKERS, cluster.NETWORK_BYTES_PER_S))
    cost = AlphaBeta(FIG02_OVERHEAD_S, slope, workers=WORKERS, algorithm="ring")
    timelines = {
        name: Iteration(workload, make_plan(spec, workload, cost), cost).timeline()
        for name, spec in FIG02_PLANS.items()
    }
    return workload, cost, timelines


def fig03(setting: PaperSetting) -> pd.DataFrame:
    """Return scaling factors of the five networks at 32 workers without fusion: simulated, and FORMULAS.

    Columns: network, quantity, model, error (over the simulated one).
    """
    factors: Numbers = {}
    cost = setting.cost()
    for network in FIVE:
        workload = setting.workload(network)
        factors[network, "simulated"] = predict(workload, none(workload), cost).scaling_factor
        factors |= {(network, name): value for name, value in formulas(workload, cost).items()}
    frame = _tidy(factors, "network", "quantity")
    simulated = frame.groupby("network")["model"].transform("first")
    return frame.assign(error=frame["model"] / simulated - 1)


def fig04(setting: PaperSetting) -> pd.DataFrame:
    """Return the scaling factor against the buffer: simulated, CSF, OSF_fusion as printed and repaired.

    Columns: network, buffer_bytes, quantity, model.
    """
    factors: Numbers = {}
    cost = setting.cost()
    for network in TWO:
        workload = setting.workload(network)
        one_message = csf_of(workload, cost)
        sizes, backward_s = osf.of_workload(workload)
        for size in BUFFERS:
            arguments = workload.forward_s, sizes, backward_s, cost, size, setting.timeout_s
            factors[network, size, "simulated"] = _fused(network, setting, size)["SF"]
            factors[network, size, "CSF"] = one_message
            factors[network, size, "OSF printed"] = osf.osf_fused(*arguments, literal=True)
            factors[network, size, "OSF repaired"] = osf.osf_fused(*arguments, literal=False)
    return _tidy(factors, "network", "buffer_bytes", "quantity")


def fig06(setting: PaperSetting) -> pd.DataFrame:
    """Return the number of all-reduces and the factor against the buffer at 32 workers (0: no fusion).

    Columns: network, buffer_bytes, quantity, model.
    """
    numbers: Numbers = {
        (network, size, quantity): value
        for network in TWO
        for size in (0, *BUFFERS)
        for quantity, value in _fused(network, setting, size).items()
    }
    return _tidy(numbers, "network", "buffer_bytes", "quantity")


def _fused(network: str, setting: PaperSetting, capacity: int) -> dict[str, float]:
    """Number of messages and scaling factor with a fusion buffer (0: without)."""
    compute_s, cost = setting.compute_s(network), setting.cost()
    fused = cluster.fused(network, compute_s, capacity, setting.timeout_s, setting.unit)
    overhead_s = np.array([cost.alpha_s])
    taken_s = cluster.fused_iteration_s(*fused, overhead_s, cost.beta_s_per_byte)[0]
    return {"all-reduces": float(len(fused[1].ends)), "SF": compute_s / taken_s}


def fig08(setting: PaperSetting) -> pd.DataFrame:
    """Return the factor of VGG-16, as it is and replaced, from 1 to 32 workers without fusion.

    Model "OSF" overlaps, "CSF" sends everything afterwards. Columns: network, workers, quantity, model,
    paper.
    """
    factors: Numbers = {}
    for network in ("VGG16", REPLACED):
        workload = setting.workload(network)
        for workers in WORKER_COUNTS:
            both = 1.0, 1.0
            if workers > 1:
                cost = setting.cost(workers)
                overlapped = predict(workload, none(workload), cost)
                both = overlapped.scaling_factor, csf_of(workload, cost)
            factors[network, workers, "OSF"], factors[network, workers, "CSF"] = both
    frame = _tidy(factors, "network", "workers", "quantity")
    printed = {"VGG16": claimed("osf-fig08-before"), REPLACED: claimed("osf-fig08-after")}
    return frame.assign(paper=frame["network"].map(printed).where(frame["workers"] == WORKERS))


def fig11(setting: PaperSetting) -> pd.DataFrame:
    """Return scaling factors of the five networks by planner, gains over 100 MB, and the most possible."""
    rows: list[dict[str, Any]] = []
    cost = setting.cost()
    for network in FIVE:
        workload = setting.workload(network)
        plans = {name: make_plan(name, workload, cost) for name in FIG11_PLANNERS}
        factor = {
            name: predict(workload, plan, cost).scaling_factor for name, plan in plans.items()
        }
        saved = (len(plans[CONSTANT].ends) - 1) * cost.alpha_s / workload.compute_s
        for name, plan in plans.items():
            rows.append(
                {
                    "network": network,
                    "planner": name,
                    "messages": len(plan.ends),
                    "model": factor[name],
                    "gain_over_100MB": factor[name] / factor[CONSTANT] - 1,
                    "most_possible_gain": osf.largest_fusion_gain(factor[CONSTANT], saved),
                }
            )
    return pd.DataFrame(rows)


def gains(setting: PaperSetting) -> pd.DataFrame:
    """Return figure 11's gain of each of RULES over the constant buffer and over MG-WFBP.

    Columns: planner, over, network, gain.
    """
    wide = fig11(setting).pivot(index="network", columns="planner", values="model").loc[list(FIVE)]
    ratios = {
        (rule, other): wide[rule] / wide[other] - 1
        for rule in RULES
        for other in (CONSTANT, RIVAL)
        if rule != other
    }
    return pd.concat(ratios, names=["planner", "over", "network"]).rename("gain").reset_index()


# -- where communication time goes ---------------------------------------------------------------


def by_phase(keys: list[str], **quantities: Phases) -> pd.DataFrame:
    """Return one row per key and phase, one column per quantity."""
    columns = {name: pd.DataFrame(phases).unstack() for name, phases in quantities.items()}
    return pd.DataFrame(columns).rename_axis([*keys, "phase"]).reset_index()


def shares(seconds: Phases) -> dict[tuple[Any, ...], dict[str, float]]:
    """Return shares of all communication time, by key and phase."""
    whole_s = {key: sum(phases.values()) for key, phases in seconds.items()}
    return {
        key: {phase: value / whole_s[key] for phase, value in phases.items()}
        for key, phases in seconds.items()
    }


def fig05(setting: PaperSetting, slow_rank: float = SLOW_RANK) -> pd.DataFrame:
    """Return communication time by phase against workers without fusion, all equal and one slower.

    Columns: network, workers, slowest, phase, seconds, model (its share), paper.
    """
    seconds = {
        (network, workers, slowest): _phases(setting, network, slowest, workers, 0)
        for network in TWO
        for workers in WORKER_COUNTS[1:]
        for slowest in (1.0, slow_rank)
    }
    keys = ["network", "workers", "slowest"]
    frame = by_phase(keys, seconds=seconds, model=shares(seconds)).assign(paper=math.nan)
    printed = frame[[*keys, "phase"]] == ["ResNet101", WORKERS, 1.0, "ALLREDUCE"]
    frame.loc[printed.all(axis=1), "paper"] = claimed("osf-fig05-allreduce") / 100
    return frame


def fig07(setting: PaperSetting) -> pd.DataFrame:
    """Return communication time by phase against the buffer at 32 workers, all equal and one slower.

    Columns: network, buffer_bytes (0: no fusion), slowest, phase, seconds, model (its share).
    """
    seconds = {
        (network, size, slowest): _phases(setting, network, slowest, WORKERS, size)
        for network in TWO
        for size in (0, *cluster.BUFFERS)
        for slowest in (1.0, SLOW_RANK)
    }
    return by_phase(["network", "buffer_bytes", "slowest"], seconds=seconds, model=shares(seconds))


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
