"""osf's figures 1 to 4, 6, 8 and 11: scaling factors, and what overlapping and fusing gain.

They are made from the paper's cluster in the setting that fits, and from the lab's campaign. What the
paper's text says stands in a column ``paper``; most of its figures are pictures without numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ddlkit.core.case import Case
from ddlkit.core.cost import AlphaBeta, MessageCost
from ddlkit.core.iteration import Iteration, no_overlap, predict
from ddlkit.core.plan import none, single
from ddlkit.core.timeline import COLUMNS, Timeline
from ddlkit.core.units import GB, KB, MB
from ddlkit.core.workload import Workload
from ddlkit.model import make_plan
from ddlkit.model.calibration import Calibration
from ddlkit.model.predictor import plan_of
from ddlkit.papers import osf
from ddlkit.papers.osf import cluster
from ddlkit.papers.osf.cluster import FIVE, REPLACED, WORKERS, PaperSetting, osf_name
from ddlkit.papers.search import SettingSearch, Stated
from ddlkit.report.accuracy import mean_difference
from ddlkit.report.claims import claimed, load_claims
from ddlkit.report.source import open_campaign

TWO = ("ResNet101", "VGG16")
WORKER_COUNTS = (1, 2, 4, 8, 16, 32)
BUFFERS = tuple(m * u for u in (KB, MB) for m in (1, 3, 10, 30, 100, 300)) + (GB,)
ANCHOR = "VGG-16: scaling factor"
FIG02_BACKWARD_S = (2e-3, 2e-3, 9e-3, 5e-3)
FIG02_BYTES = (4 * MB, 4 * MB, 4 * MB, 4 * MB)
FIG02_OVERHEAD_S = 4e-3
FIG02_PLANS = {"one by one": "none", "fused in pairs": "cuts:2", "only the first pair": "cuts:2,3"}
EQ7 = "alpha_beta:ends"
"""osf Eq 7 as a form of cost: a line, its delta measured directly, on the smallest message."""
FORMULAS = ("CSF", "OSF printed", "OSF repaired")
FIG11_PLANNERS = (
    *("none", "buffer:100MB", "buffer:25MB", "ddp", "mg_wfbp"),
    *("adafusion", "adafusion:repaired", "exact"),
)
Numbers = dict[tuple[Any, ...], float]


def stated() -> tuple[Stated, ...]:
    """What osf states of its cluster: claims, by the quantities that osf_stated.csv beside this module names.

    Raises KeyError for a claim that there is not.
    """
    table = Path(__file__).with_name("osf_stated.csv")
    known, found = {claim.id: claim for claim in load_claims()}, []
    for row in pd.read_csv(table, comment="#").itertuples():
        claim = known[row.claim]
        if not pd.isna(row.tolerance):
            claim = replace(claim, tolerance=row.tolerance)
        low, high = (row.offset + row.unit * end for end in claim.accepted)
        found.append(Stated(row.statement, low, high))
    return tuple(found)


@lru_cache(maxsize=1)
def setting_search() -> SettingSearch[cluster.Grid]:
    """All settings of the default grid against ``stated()``."""
    return cluster.search(stated())


@lru_cache(maxsize=1)
def setting() -> cluster.PaperSetting:
    """The setting of the figures: VGG-16 at its 0.25, and of the rest as much as fits together."""
    found = setting_search()
    return found.grid.setting(found.best_index(ANCHOR))


@dataclass(frozen=True)
class Lab:
    """What the campaign recorded: iterations, spans, compute by its hash, and fitted costs."""

    runs: pd.DataFrame
    spans: pd.DataFrame
    workloads: Mapping[str, Workload]
    calibration: Calibration

    @classmethod
    @lru_cache(maxsize=4)  # fitting its costs takes longer than whatever asks for it
    def load(cls, campaign: str = "campaign-osf") -> Lab:
        """The recorded campaign, read once. Raises UserError where there is none."""
        found = open_campaign(name=campaign)
        own = found.alone
        calibration = Calibration.of(own.table("collectives"), also=(EQ7,))
        return cls(own.table("runs"), own.table("timeline"), found.workloads(), calibration)

    def cases(self, *, negotiated: bool) -> list[Case]:
        """The cases with or without a negotiation, in the order of the recording."""
        rows = self.runs.drop_duplicates("case").to_dict("records")
        return [case for case in map(Case.from_row, rows) if case.negotiated == negotiated]

    def workload(self, case: Case) -> Workload:
        """What a rank of usual speed computes."""
        return self.workloads[case.profile_sha256].scaled(case.dilation)

    def factors(self, case: Case) -> pd.Series:
        """Return the scaling factor (osf Eq 1) of each iteration of a case, by its round."""
        runs = self.runs[self.runs["case"] == case.key].set_index("repeat")
        return runs["compute_s"] / runs["iteration_s"]

    def timelines(self, case: Case) -> Iterator[Timeline]:
        """One per repeat."""
        mine = self.spans[self.spans["case"] == case.key]
        for _, rows in mine.groupby("repeat"):
            yield Timeline(**{name: rows[name].to_numpy() for name in COLUMNS})


def buffer_name(size: float) -> str:
    """A buffer as a label, decimal as the paper's seem to be, "none" without one.

    >>> buffer_name(25_000_000), buffer_name(0)
    ('25 MB', 'none')
    """
    for unit, factor in (("GB", GB), ("MB", MB), ("KB", KB)):
        if size >= factor:
            return f"{size / factor:g} {unit}"
    return f"{size:g} B" if size else "none"


def _tidy(found: Numbers, *keys: str) -> pd.DataFrame:
    """One row per number, its key in columns."""
    numbers = pd.Series(found, dtype=float).rename_axis(list(keys))
    return numbers.reset_index(name="model")


def _csf(workload: Workload, cost: MessageCost) -> float:
    """Scaling factor when everything is sent as one message after computation (osf Eq 2)."""
    return no_overlap(Iteration(workload, single(workload), cost)).scaling_factor


def fig01(setting: PaperSetting) -> dict[str, Timeline]:
    """Replaced VGG-16 by layer: all communication after computation (CSF), and overlapped (OSF)."""
    workload = cluster.workload(REPLACED, setting.compute_s(REPLACED), "layer")
    plans = {"after computation (CSF)": single(workload), "overlapped (OSF)": none(workload)}
    cost = setting.cost()
    return {name: Iteration(workload, plan, cost).timeline() for name, plan in plans.items()}


def fig02() -> tuple[Workload, AlphaBeta, dict[str, Timeline]]:
    """Four equal tensors; waiting for the second pays, waiting for the last does not.

    Numbers chosen here (the paper draws none): times in ``FIG02_BACKWARD_S``, 4 MB per tensor.
    """
    workload = Workload.from_arrays(2e-3, FIG02_BACKWARD_S, FIG02_BYTES)
    slope = float(osf.update_s(1.0, WORKERS, cluster.NETWORK_BYTES_PER_S))
    cost = AlphaBeta(FIG02_OVERHEAD_S, slope, workers=WORKERS, algorithm="ring")
    timelines = {
        name: Iteration(workload, make_plan(spec, workload, cost), cost).timeline()
        for name, spec in FIG02_PLANS.items()
    }
    return workload, cost, timelines


def formulas(workload: Workload, cost: MessageCost) -> dict[str, float]:
    """The scaling factor without fusion by each of FORMULAS (osf Eqs 2, 3, 8 to 10).

    The paper's iteration has no update; the workload's comes after all else, as in our own model.
    """
    sent_s = cost(workload.bytes[::-1]).tolist()
    times = workload.forward_s, workload.backward_s[::-1].tolist(), sent_s
    alone_s = workload.compute_s - workload.update_s
    overlapped = {
        name: workload.compute_s / (alone_s / osf.osf(*times, first=first) + workload.update_s)
        for name, first in (("OSF printed", 1), ("OSF repaired", 0))
    }
    return {"CSF": _csf(workload, cost), **overlapped}


def fig03(setting: PaperSetting) -> pd.DataFrame:
    """Scaling factor of the five networks at 32 workers without fusion: simulated, CSF, OSF.

    Columns: network, quantity, model, error (over the simulated one).
    """
    found: Numbers = {}
    cost = setting.cost()
    for network in FIVE:
        workload = setting.workload(network)
        simulated = predict(workload, none(workload), cost).scaling_factor
        for name, factor in {"simulated": simulated, **formulas(workload, cost)}.items():
            found[network, name] = factor
    frame = _tidy(found, "network", "quantity")
    simulated_first = frame.groupby("network")["model"].transform("first")
    frame.insert(3, "error", frame["model"] / simulated_first - 1)
    return frame


def fig04(setting: PaperSetting) -> pd.DataFrame:
    """Scaling factor against the buffer: simulated, CSF, and OSF_fusion as printed and repaired.

    Columns: network, buffer_bytes, quantity, model.
    """
    found: Numbers = {}
    cost = setting.cost()
    for network in TWO:
        workload = setting.workload(network)
        one_message = _csf(workload, cost)
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

    Columns: network, buffer_bytes, quantity, model.
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
                factors = overlapped.scaling_factor, _csf(workload, cost)
            found[network, workers, "OSF"], found[network, workers, "CSF"] = factors
    frame = _tidy(found, "network", "workers", "quantity").assign(paper=math.nan)
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
        factors, limited = lab.factors(case), lab.runs.loc[lab.runs["case"] == case.key]
        workload, messages = lab.workload(case), lab.calibration.of_case(case)
        model = predict(workload, plan_of(case), messages.cost, messages.link).scaling_factor
        rows.append(
            {
                "network": osf_name(case.network),
                "workers": case.workers,
                "measured": factors.mean(),
                "repeatability": mean_difference(factors),
                "model": model,
                "csf": _csf(workload, messages.cost),
                "error": model / factors.mean() - 1,
                "processor_limited": bool(limited["processor_limited"].any()),
            }
        )
    return pd.DataFrame(rows).sort_values(["network", "workers"], ignore_index=True)


def fig11(setting: PaperSetting) -> pd.DataFrame:
    """Scaling factor of the five networks by planner, its gain over 100 MB, and the most possible gain."""
    rows: list[dict[str, Any]] = []
    cost = setting.cost()
    for network in FIVE:
        workload = setting.workload(network)
        plans = {name: make_plan(name, workload, cost) for name in FIG11_PLANNERS}
        factor = {
            name: predict(workload, plan, cost).scaling_factor for name, plan in plans.items()
        }
        constant = factor["buffer:100MB"]
        saved = (len(plans["buffer:100MB"].ends) - 1) * cost.alpha_s / workload.compute_s
        for name, plan in plans.items():
            rows.append(
                {
                    "network": network,
                    "planner": name,
                    "messages": len(plan.ends),
                    "model": factor[name],
                    "gain_over_100MB": factor[name] / constant - 1,
                    "most_possible_gain": osf.largest_fusion_gain(constant, saved),
                }
            )
    return pd.DataFrame(rows)
