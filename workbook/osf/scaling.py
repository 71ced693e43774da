"""osf's figures by model, over *compatible* settings: VGG-16 at its 0.25, and most other statements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import product
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
from workbook.common.claims import claimed, load_claims, prose
from workbook.common.settings import SettingSearch, Stated, settle
from workbook.osf import cluster
from workbook.osf import equations as osf
from workbook.osf.cluster import FIVE, REPLACED, WORKERS, PaperSetting
from workbook.osf.equations import breakdown

TWO = ("ResNet101", "VGG16")
WORKER_COUNTS = (1, 2, 4, 8, 16, 32)
BUFFERS = tuple(m * u for u in (KB, MB) for m in (1, 3, 10, 30, 100, 300)) + (GB,)
ANCHOR = "VGG-16: scaling factor"
FORMULAS = ("CSF", "OSF printed", "OSF repaired")
FIG11_PLANNERS = (
    *("none", "buffer:100MB", "buffer:25MB", "ddp", "mg_wfbp"),
    *("adafusion", "adafusion:repaired", "exact"),
)
RULES = ("adafusion:repaired", "mg_wfbp", "exact")
CONSTANT, RIVAL = "buffer:100MB", "mg_wfbp"
SLOW_RANK = (
    1.1  # of the unequal workers of the breakdown: one takes 10% longer to compute
)


def rows_of(frame: pd.DataFrame, **values: Any) -> pd.DataFrame:
    """Return the rows in which columns have these values."""
    return frame[(frame[list(values)] == list(values.values())).all(axis=1)]


def printed_at(frame: pd.DataFrame, number: float, **values: Any) -> pd.Series:
    """Return a printed number in the rows in which columns have these values, else NaN."""
    return pd.Series(number, rows_of(frame, **values).index, float).reindex(frame.index)


def stated() -> tuple[Stated, ...]:
    """Return what osf states of its cluster: claims, by the quantities that stated.csv here names."""
    claims, intervals = {claim.id: claim for claim in load_claims()}, []
    for row in pd.read_csv(
        Path(__file__).with_name("stated.csv"), comment="#"
    ).itertuples():
        low, high = (row.offset + row.unit * end for end in claims[row.claim].accepted)
        intervals.append(Stated(row.statement, low, high))
    return tuple(intervals)


@lru_cache(maxsize=4)
def setting_search(
    of_fig4: int = WORKERS, of_fig8: tuple[int, int] = (0, 0)
) -> SettingSearch:
    """Return all settings of the default grid against ``stated()``, by a reading of Figs 4a and 8."""
    grid = cluster.Grid()
    return settle(stated(), grid, cluster.quantities(grid, of_fig4, of_fig8))


@lru_cache(maxsize=1)
def compatible() -> tuple[PaperSetting, ...]:
    """Return every setting that agrees with as many statements as that of the figures, the best first."""
    search = setting_search()
    mask = search.most(ANCHOR)
    order = np.argsort(search.miss[mask], kind="stable")
    return tuple(map(search.grid.setting, np.argwhere(mask)[order]))


def setting() -> PaperSetting:
    """Return the setting of the figures."""
    return compatible()[0]


def over(
    figure: Callable[[PaperSetting], pd.DataFrame],
    keys: Sequence[str],
    values: Sequence[str] = ("model",),
    unit: str = "",
) -> pd.DataFrame:
    """Return a figure at the best compatible setting, its ``values`` with ``_low`` and ``_high`` over all."""
    settings = [each for each in compatible() if unit in ("", each.unit)]
    by_row = pd.concat(map(figure, settings)).groupby(list(keys), sort=False)[
        list(values)
    ]
    low, high = by_row.min().add_suffix("_low"), by_row.max().add_suffix("_high")
    return figure(settings[0]).join(low, on=list(keys)).join(high, on=list(keys))


def _tidy(
    of: Callable[..., dict[str, float]],
    cases: Mapping[str, Sequence[Any]],
    name: str = "quantity",
    value: str = "model",
) -> pd.DataFrame:
    """Return a row for each of the cases and each number that ``of`` a case has a ``name``."""
    numbers = {
        (*case, k): v for case in product(*cases.values()) for k, v in of(*case).items()
    }
    rows = pd.Series(numbers, dtype=float).rename_axis([*cases, name])
    return rows.reset_index(name=value)


def csf_of(workload: Workload, cost: MessageCost) -> float:
    """Return the factor when everything is sent as one message after computation (osf Eq 2)."""
    return no_overlap(Iteration(workload, single(workload), cost)).scaling_factor


def formulas(workload: Workload, cost: MessageCost) -> dict[str, float]:
    """Return the scaling factor without fusion by each of FORMULAS (osf Eqs 2, 3, 8 to 10)."""
    sent_s = cost(workload.bytes[::-1]).tolist()
    times = workload.forward_s, workload.backward_s[::-1].tolist(), sent_s
    alone_s = workload.compute_s - workload.update_s
    printed, repaired = (
        workload.compute_s
        / (alone_s / osf.osf(*times, first=first) + workload.update_s)
        for first in (1, 0)
    )
    return {
        "CSF": csf_of(workload, cost),
        "OSF printed": printed,
        "OSF repaired": repaired,
    }


def fig01(setting: PaperSetting) -> dict[str, Timeline]:
    """Return replaced VGG-16 by layer: all communication after computation (CSF), and overlapped (OSF)."""
    workload = cluster.workload(REPLACED, setting.compute_s(REPLACED), "layer")
    plans = {
        "after computation (CSF)": single(workload),
        "overlapped (OSF)": none(workload),
    }
    cost = setting.cost()
    return {
        name: Iteration(workload, plan, cost).timeline() for name, plan in plans.items()
    }


def fig02() -> tuple[Workload, AlphaBeta, dict[str, Timeline]]:
    """Return four equal tensors, numbers chosen here: waiting for the second pays, for the last not."""
    workload = Workload.from_arrays(2e-3, (2e-3, 2e-3, 9e-3, 5e-3), [4 * MB] * 4)
    slope = float(osf.update_s(1.0, WORKERS, cluster.NETWORK_BYTES_PER_S))
    cost = AlphaBeta(4e-3, slope, workers=WORKERS, algorithm="ring")
    specs = {
        "one by one": "none",
        "fused in pairs": "cuts:2",
        "only the first pair": "cuts:2,3",
    }
    plans = {name: make_plan(spec, workload, cost) for name, spec in specs.items()}
    drawn = {
        name: Iteration(workload, plan, cost).timeline() for name, plan in plans.items()
    }
    return workload, cost, drawn


def fig03(setting: PaperSetting) -> pd.DataFrame:
    """Return scaling factors of the five networks at 32 workers without fusion: simulated, and FORMULAS."""
    cost = setting.cost()

    def factors(network: str) -> dict[str, float]:
        workload = setting.workload(network)
        simulated = predict(workload, none(workload), cost).scaling_factor
        return {"simulated": simulated, **formulas(workload, cost)}

    frame = _tidy(factors, {"network": FIVE})
    simulated = frame.groupby("network")["model"].transform("first")
    return frame.assign(error=frame["model"] / simulated - 1)


def fig04(setting: PaperSetting) -> pd.DataFrame:
    """Return the scaling factor against the buffer: simulated, CSF, OSF_fusion as printed and repaired."""
    cost = setting.cost()

    def factors(network: str, size: int) -> dict[str, float]:
        workload = setting.workload(network)
        tensors, backward_s = osf.of_workload(workload)
        case = workload.forward_s, tensors, backward_s, cost, size, setting.timeout_s
        return {
            "simulated": _fused(setting, network, size)["SF"],
            "CSF": csf_of(workload, cost),
            "OSF printed": osf.osf_fused(*case, literal=True),
            "OSF repaired": osf.osf_fused(*case, literal=False),
        }

    return _tidy(factors, {"network": TWO, "buffer_bytes": BUFFERS})


def fig06(setting: PaperSetting) -> pd.DataFrame:
    """Return the number of all-reduces and the factor against the buffer at 32 workers (0: no fusion)."""
    return _tidy(
        partial(_fused, setting), {"network": TWO, "buffer_bytes": (0, *BUFFERS)}
    )


def _with_buffer(setting: PaperSetting, network: str, capacity: int) -> Any:
    """Return workload, plan and waits with a fusion buffer (0: without)."""
    compute_s = setting.compute_s(network)
    return cluster.fused(network, compute_s, capacity, setting.timeout_s, setting.unit)


def _fused(setting: PaperSetting, network: str, capacity: int) -> dict[str, float]:
    """Return the number of messages, and the scaling factor, with a fusion buffer (0: without)."""
    (workload, plan, waited_s), cost = (
        _with_buffer(setting, network, capacity),
        setting.cost(),
    )
    link = np.array([cost.alpha_s]), cost.beta_s_per_byte
    taken_s = cluster.fused_iteration_s(workload, plan, waited_s, *link)[0]
    return {
        "all-reduces": float(len(plan.ends)),
        "SF": setting.compute_s(network) / taken_s,
    }


def fig08(setting: PaperSetting) -> pd.DataFrame:
    """Return the factor of VGG-16, as it is and replaced, from 1 to 32 workers without fusion."""

    def factors(network: str, workers: int) -> dict[str, float]:
        if workers == 1:
            return {"OSF": 1.0, "CSF": 1.0}
        workload, cost = setting.workload(network), setting.cost(workers)
        return {
            "OSF": predict(workload, none(workload), cost).scaling_factor,
            "CSF": csf_of(workload, cost),
        }

    frame = _tidy(factors, {"network": ("VGG16", REPLACED), "workers": WORKER_COUNTS})
    printed = {
        "VGG16": claimed("osf-fig08-before"),
        REPLACED: claimed("osf-fig08-after"),
    }
    return frame.assign(
        paper=frame["network"].map(printed).where(frame["workers"] == WORKERS)
    )


def fig11(setting: PaperSetting) -> pd.DataFrame:
    """Return scaling factors of the five networks by planner, gains over 100 MB, and the most possible."""
    tables, cost = {}, setting.cost()
    for network in FIVE:
        workload = setting.workload(network)
        plans = {name: make_plan(name, workload, cost) for name in FIG11_PLANNERS}
        factors = {
            name: predict(workload, p, cost).scaling_factor for name, p in plans.items()
        }
        messages = {name: len(plan.ends) for name, plan in plans.items()}
        table = pd.DataFrame({"messages": messages, "model": factors})
        saved = (messages[CONSTANT] - 1) * cost.alpha_s / workload.compute_s
        most = osf.largest_fusion_gain(factors[CONSTANT], saved)
        gain = table["model"] / factors[CONSTANT] - 1
        tables[network] = table.assign(gain_over_100MB=gain, most_possible_gain=most)
    return pd.concat(tables, names=["network", "planner"]).reset_index()


def gains(setting: PaperSetting) -> pd.DataFrame:
    """Return figure 11's gain of each of RULES over the constant buffer and over MG-WFBP."""
    wide = (
        fig11(setting)
        .pivot(index="network", columns="planner", values="model")
        .loc[list(FIVE)]
    )
    pairs = [
        (rule, other) for rule in RULES for other in (CONSTANT, RIVAL) if rule != other
    ]
    ratios = {(rule, other): wide[rule] / wide[other] - 1 for rule, other in pairs}
    return (
        pd.concat(ratios, names=["planner", "over", "network"])
        .rename("gain")
        .reset_index()
    )


def fig05(setting: PaperSetting, slow_rank: float) -> pd.DataFrame:
    """Return communication time by phase against workers without fusion, all equal and one slower."""
    case = {"network": TWO, "workers": WORKER_COUNTS[1:], "slowest": (1.0, slow_rank)}
    frame = _shares(
        lambda network, workers, slow: _phases(setting, network, slow, workers), case
    )
    place = {
        "network": "ResNet101",
        "workers": WORKERS,
        "slowest": 1.0,
        "phase": "ALLREDUCE",
    }
    return frame.assign(
        paper=printed_at(frame, claimed("osf-fig05-allreduce") / 100, **place)
    )


def fig07(setting: PaperSetting) -> pd.DataFrame:
    """Return communication time by phase against the buffer at 32 workers, all equal and one slower."""
    sizes = (0, *cluster.BUFFERS)
    case = {"network": TWO, "buffer_bytes": sizes, "slowest": (1.0, SLOW_RANK)}
    return _shares(
        lambda name, size, slow: _phases(setting, name, slow, WORKERS, size), case
    )


def _shares(
    of: Callable[..., dict[str, float]], case: Mapping[str, Sequence[Any]]
) -> pd.DataFrame:
    """Return seconds of each phase in each case, and as ``model`` its share of all communication."""
    frame = _tidy(of, case, "phase", "seconds")
    return frame.assign(
        model=frame["seconds"] / frame.groupby([*case])["seconds"].transform("sum")
    )


def _phases(
    setting: PaperSetting, network: str, slowest: float, workers: int, size: int = 0
) -> dict[str, float]:
    """Return seconds of each phase; an agreement takes one round trip to the coordinator."""
    workload, plan, waited_s = _with_buffer(setting, network, size)
    agreed_s = prose("osf")["fig10-bdp"] * KB / cluster.NETWORK_BYTES_PER_S
    how = {"waited_s": waited_s, "slowest": slowest, "negotiate_s": agreed_s}
    return breakdown(workload, plan, setting.cost(workers), **how)
