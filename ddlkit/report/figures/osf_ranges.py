"""What osf's figures say over all settings that fit its statements equally well, and beside the lab.

One setting gives one curve; the paper's text leaves many open. A range here goes from the least to the
largest number over the *compatible* settings: VGG-16 at its 0.25, and of the other statements as many as
hold together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np
import pandas as pd

from ddlkit.core.case import Case
from ddlkit.core.units import GB, MB, parse_bytes
from ddlkit.model import make_plan
from ddlkit.papers.osf.cluster import FIVE, PaperSetting, osf_name
from ddlkit.report import compare
from ddlkit.report.claims import claimed
from ddlkit.report.figures import osf_overhead, osf_scaling
from ddlkit.report.figures.osf_scaling import ANCHOR, EQ7, FORMULAS, Lab, formulas, setting_search
from ddlkit.report.source import REGIMES, REGIMES_VGG

Figure = Callable[[PaperSetting], pd.DataFrame]
RULES = ("adafusion:repaired", "mg_wfbp", "exact")
CONSTANT, RIVAL = "buffer:100MB", "mg_wfbp"


@lru_cache(maxsize=2)
def compatible(unit: str = "") -> tuple[PaperSetting, ...]:
    """Every setting that agrees with as many statements as that of the figures, the best one first.

    unit : "tensor" or "layer": of these only
    """
    found = setting_search()
    mask = found.most(ANCHOR)
    order = np.argsort(found.miss[mask], kind="stable")
    settings = [found.grid.setting(index) for index in np.argwhere(mask)[order]]
    return tuple(one for one in settings if unit in ("", one.unit))


def over(
    figure: Figure, keys: Sequence[str], values: Sequence[str] = ("model",), unit: str = ""
) -> pd.DataFrame:
    """A figure at the best compatible setting, each of ``values`` with its range over all of them.

    keys : columns that name a row; unit : as for `compatible`. New columns: ``<value>_low``, ``_high``.
    """
    settings = compatible(unit)
    by_row = pd.concat(map(figure, settings)).groupby(list(keys), sort=False)[list(values)]
    low, high = by_row.min().add_suffix("_low"), by_row.max().add_suffix("_high")
    return figure(settings[0]).join(low, on=list(keys)).join(high, on=list(keys))


def graded(model: pd.DataFrame, *labs: pd.DataFrame) -> pd.DataFrame:
    """Rows of the model and of the lab, each named by its grade, one below the other."""
    rows = [model.assign(grade="model"), *(lab.assign(grade="lab") for lab in labs)]
    return pd.concat(rows, ignore_index=True)


def printed_errors() -> dict[str, tuple[float, float]]:
    """Smallest and largest error in % that the text states of each formula without fusion (Section 3.2)."""
    ends = ("min", "max")
    found = {
        name: [claimed(f"osf-fig03-{name.lower()}-{end}") for end in ends]
        for name in ("CSF", "OSF")
    }
    return {name: (low, high) for name, (low, high) in found.items()}


def printed_gains() -> dict[str, tuple[float, float]]:
    """Smallest and largest gain of adaFusion in % that the text states (Section 4.2), by what it is over."""
    names = {CONSTANT: "constant", RIVAL: "mgwfbp"}
    found = {over: f"osf-fig11-{name}" for over, name in names.items()}
    return {over: (claimed(f"{name}-min"), claimed(f"{name}-max")) for over, name in found.items()}


# -- beside the lab ------------------------------------------------------------------------------------


def unfused_in_lab(labs: Sequence[Lab], *, ring: bool = False) -> pd.DataFrame:
    """Scaling factors measured without fusion, and the errors of the formulas against them.

    One row per plain replay in which every gradient is a message. The formulas know the layer profile and the
    calibrated messages, nothing of the runs. Columns: network, workers, link, measured, and for each of
    FORMULAS its error.

    ring : with osf Eq 7 through the smallest and the largest message, as the paper has it, not our table
    """
    rows = []
    for lab in labs:
        for case in filter(_plain, lab.cases(negotiated=False)):
            if case.plan != "none":
                continue
            measured = _measured(lab, case)["measured"]
            messages = lab.calibration.of_case(case)
            found = formulas(lab.workload(case), messages.others[EQ7] if ring else messages.cost)
            errors = {name: factor / measured - 1 for name, factor in found.items()}
            place = {"network": case.network, "workers": case.workers, "link": case.link}
            rows.append({**place, "measured": measured, **errors})
    frame = pd.DataFrame(rows, columns=["network", "workers", "link", "measured", *FORMULAS])
    return frame.sort_values(["network", "workers", "link"], ignore_index=True)


def fused_in_lab(lab: Lab, workers: int) -> pd.DataFrame:
    """Scaling factors measured against the buffer, among ``workers`` equal workers.

    Columns: network, buffer_bytes (0: no fusion), measured, repeatability (largest difference of repeats).
    Of cases run with and without a negotiation, that without.
    """
    rows = {}
    for case in (*lab.cases(negotiated=True), *lab.cases(negotiated=False)):
        kind, _, size = case.plan.partition(":")
        if _plain(case) and case.workers == workers and kind in ("none", "buffer"):
            place = osf_name(case.network), parse_bytes(size) if size else 0
            rows[place] = {**dict(zip(BUFFERED, place, strict=True)), **_measured(lab, case)}
    return pd.DataFrame(rows.values()).sort_values(list(BUFFERED), ignore_index=True)


BUFFERED = ("network", "buffer_bytes")
NO_FUSION_MB = 3e-4


def place(buffer_bytes: pd.Series) -> pd.Series:
    """Where a buffer stands on a logarithmic axis, in MB: no fusion left of the smallest."""
    return (buffer_bytes / MB).where(buffer_bytes > 0, NO_FUSION_MB)


def fig06() -> pd.DataFrame:
    """Figure 6 with its ranges over the settings in which a message is a tensor, and what the text prints.

    Columns: network, buffer_bytes, quantity, model, paper, model_low, model_high.
    """
    frame = over(osf_scaling.fig06, (*BUFFERED, "quantity"), unit="tensor")
    return frame.assign(paper=printed_at_1gb(frame))


def printed_at_1gb(figure6: pd.DataFrame) -> pd.Series:
    """Of rows of figure 6: what the printed gain or loss at 1 GB makes of the factor without fusion here."""
    change = {
        "ResNet101": claimed("osf-fig06-resnet101") / 100,
        "VGG16": -claimed("osf-fig06-vgg16") / 100,
    }
    unfused = figure6[(figure6["quantity"] == "SF") & (figure6["buffer_bytes"] == 0)]
    expected = unfused.set_index("network")["model"] * (1 + pd.Series(change))
    at_1gb = (figure6["quantity"] == "SF") & (figure6["buffer_bytes"] == GB)
    return figure6["network"].map(expected).where(at_1gb)


def _plain(case: Case) -> bool:
    """Whether nothing special was tried: equal workers, dense gradients, one message in flight."""
    return case.density == 1 and case.straggler == 1 and case.in_flight == 1


def _measured(lab: Lab, case: Case) -> dict[str, float]:
    """Return the mean scaling factor of a case, and how far its iterations differ."""
    factors = lab.factors(case)
    return {"measured": factors.mean(), "repeatability": factors.max() - factors.min()}


# -- in the regime of the paper's cluster --------------------------------------------------------------


def regime() -> Lab:
    """What was replayed over a link on which start-ups and bytes weigh against computing as on the cluster.

    "As on the cluster" is as in the setting that fits the paper's statements best: see examples/
    campaign_regimes.yml.
    """
    return Lab.load(REGIMES)


def regime_vgg() -> Lab:
    """The same of VGG-16, as published and with its dense layers replaced."""
    return Lab.load(REGIMES_VGG)


def phases_in_regime() -> pd.DataFrame:
    """`osf_overhead.phases` of two networks, four equal workers in the `regime`, not negotiated."""
    found = [osf_overhead.phases(lab, negotiated=False) for lab in (regime(), regime_vgg())]
    rows = pd.concat(found, ignore_index=True)
    rows = rows[rows["network"].isin(osf_scaling.TWO) & (rows["workers"] == 4)]
    return rows.sort_values(["network", "buffer_bytes"], kind="stable", ignore_index=True)


def against_printed() -> pd.DataFrame:
    """What the text states of VGG-16, printed and measured in the `regime`: one row per statement.

    Columns: statement, printed, measured, in the same unit.
    """
    cases = {
        (case.network, case.plan, case.workers): case
        for case in regime_vgg().cases(negotiated=False)
    }
    factor = {key: _measured(regime_vgg(), case)["measured"] for key, case in cases.items()}
    fused, alone = (factor["vgg16", plan, 4] for plan in ("buffer:1GB", "none"))
    spent_s = osf_overhead.totals(phases_in_regime()).set_index(["network", "buffer_bytes"])[
        "measured_s"
    ]
    rows = {
        "scaling factor, 1 GB over none [%]": (
            -claimed("osf-fig06-vgg16"),
            100 * (fused / alone - 1),
        ),
        "communication, 1 GB over none [%]": (
            claimed("osf-fig07-vgg16"),
            100 * (spent_s["VGG16", GB] / spent_s["VGG16", 0] - 1),
        ),
        "scaling factor": (claimed("osf-fig08-before"), alone),
        "scaling factor, layers replaced": (
            claimed("osf-fig08-after"),
            factor["vgg16_replaced", "none", 8],
        ),
    }
    frame = pd.DataFrame.from_dict(rows, orient="index", columns=["printed", "measured"])
    return frame.rename_axis("statement").reset_index()


LABS = {"measured": "1 Gbit/s", "regime": "expensive start-ups"}
"""The lab's two kinds of links by the look of their points: cheap start-ups, and such as on the cluster."""


def fused_in_labs(lab: Lab) -> pd.DataFrame:
    """`fused_in_lab` of four workers, over the lab's link and in the `regime`; ``look``: a name of LABS."""
    frames = [fused_in_lab(one, 4) for one in (lab, regime())]
    return pd.concat([one.assign(look=look) for look, one in zip(LABS, frames, strict=True)])


def unfused_in_regime() -> pd.DataFrame:
    """`unfused_in_lab` of the `regime` by osf Eq 7; networks are named so that they stand beside others."""
    found = unfused_in_lab([regime()], ring=True)
    return found.assign(network=found["network"] + ", dear start-ups")


def gains_in_regime(lab: Lab, others: Sequence[str] = (CONSTANT, RIVAL)) -> pd.DataFrame:
    """Measured gains of figure 11's planners over others: what a round's two iterations say, rounds apart.

    A planner whose plan is that of another case counts as that one. Columns: network, planner, over, gain,
    gain_low, gain_high.
    """
    rows = []
    for network, cases in _by_network(lab).items():
        factors = {case.plan: lab.factors(case) for case in cases}
        first, names = cases[0], {case.ends: case.plan for case in cases}
        cost = lab.calibration.of_case(first).cost
        for rule in dict.fromkeys(("adafusion", *RULES)):
            plan = make_plan(rule, lab.workload(first), cost)
            known = rule if rule in factors else names.get(";".join(map(str, plan.ends)), "")
            for other in others:
                if known and other not in (rule, known):
                    gain = factors[known] / factors[other] - 1
                    place = {"network": network, "planner": rule, "over": other}
                    ends = {"gain_low": gain.min(), "gain_high": gain.max()}
                    rows.append({**place, "gain": gain.mean(), **ends})
    return pd.DataFrame(rows)


def _by_network(lab: Lab) -> dict[str, list[Case]]:
    """The lab's plain cases by osf's name of their network."""
    found: dict[str, list[Case]] = {}
    for case in filter(_plain, lab.cases(negotiated=False)):
        found.setdefault(osf_name(case.network), []).append(case)
    return found


# -- figure 11, and what would settle it ---------------------------------------------------------------


def gains(setting: PaperSetting) -> pd.DataFrame:
    """Figure 11's gain of each of RULES over the constant buffer and over MG-WFBP.

    Columns: planner, over, network, gain.
    """
    wide = (
        osf_scaling.fig11(setting)
        .pivot(index="network", columns="planner", values="model")
        .loc[list(FIVE)]
    )
    found = {
        (rule, other): wide[rule] / wide[other] - 1
        for rule in RULES
        for other in (CONSTANT, RIVAL)
        if rule != other
    }
    return pd.concat(found, names=["planner", "over", "network"]).rename("gain").reset_index()


def by_planner(gained: pd.DataFrame) -> dict[str, tuple[pd.Series, pd.Series]]:
    """Lows and highs in % of every planner, network by network, as `plots.intervals` takes them."""
    return {
        planner: (100 * rows["gain_low"], 100 * rows["gain_high"])
        for planner, rows in gained.groupby("planner", sort=False)
    }


def gains_in_lab(runs: pd.DataFrame) -> pd.DataFrame:
    """Measured gains of the planners over a constant buffer, with the 95% interval over the rounds.

    runs : in which plans of one network took turns. Columns: network, planner, over, gain, gain_low,
    gain_high.
    """
    frames = []
    for rule in (RIVAL, "exact"):
        found = compare.paired(runs, rule)
        found = found[found["other"].str.startswith("buffer")]
        ranges = {"gain": "ratio", "gain_low": "lower", "gain_high": "upper"}
        columns = {name: found[column] - 1 for name, column in ranges.items()}
        frames.append(found[["network"]].assign(planner=rule, over=found["other"], **columns))
    return pd.concat(frames, ignore_index=True)
