"""osf Figure 3: errors of the formulas CSF and OSF without fusion."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddlkit.core.case import Case
from ddlkit.core.iteration import predict
from ddlkit.core.plan import none
from workbook import plots
from workbook.common import claims
from workbook.common.claims import Result, check, claimed
from workbook.common.source import CAMPAIGN, REGIMES, REGIMES_VGG
from workbook.common.specs import network_title
from workbook.osf import settings
from workbook.osf.cluster import FIVE, PaperSetting, measured_names
from workbook.osf.factors import by_formulas
from workbook.osf.frames import printed_at, rows_of, tidy
from workbook.osf.lab import EQ7, LAB, OTHER_LINES, RELATIVE_MEDIANS, Lab, graded

EXPENSIVE = ", expensive start-ups"
"""What follows the name of a network that was replayed in the regime."""
COLUMNS = {"CSF": "CSF", "OSF": "OSF printed"}
"""What the table calls the formulas of which osf states errors."""
LINES = {
    EQ7: "Eq 7's line through the smallest and the largest",
    OTHER_LINES[0]: "a line through the medians",
    OTHER_LINES[1]: "a line by relative errors",
    OTHER_LINES[2]: "a line by least squares",
    RELATIVE_MEDIANS: "a line by relative errors of the medians",
}
"""The straight lines that osf's start-up and rate can be measured with, in words."""
CAMPAIGNS = (
    CAMPAIGN,
    LAB,
    REGIMES,
    REGIMES_VGG,
    "campaign-dag",
    "cpu-2x-amd-epyc",
)
"""Where there are plain replays without fusion."""


# -- numbers -------------------------------------------------------------------------


def modelled(setting: PaperSetting) -> pd.DataFrame:
    """Return the scaling factors of the five networks at 32 workers, without fusion.

    Parameters
    ----------
    setting : PaperSetting
        The numbers of the cluster that the paper does not state.

    Returns
    -------
    DataFrame
        A row for each ``network`` and ``quantity``, which is "simulated" or one of
        FORMULAS. ``model`` is the scaling factor, and ``error`` its relative difference
        from the simulated one.
    """
    cost = setting.cost()

    def factors(network: str) -> dict[str, float]:
        """Return the scaling factors of a network on the cluster, by quantity."""
        workload = setting.workload(network)
        unfused_plan = none(workload)
        simulated = predict(workload, unfused_plan, cost).scaling_factor
        return {"simulated": simulated, **by_formulas(workload, cost)}

    frame = tidy(factors, {"network": FIVE})
    # `factors` puts the simulated factor before the others of a network.
    simulated = frame.groupby("network")["model"].transform("first")
    return frame.assign(error=frame["model"] / simulated - 1)


# All tables that are asked for fit into the cache: the claims ask for five, one for each of
# LINES over CAMPAIGNS, and the figure for two more.
@lru_cache(maxsize=8)
def in_lab(campaigns: tuple[str, ...], cost_form: str = EQ7) -> pd.DataFrame:
    """Return the errors of the formulas in all plain replays without fusion.

    A plain replay has equal workers and dense gradients, sends one message at a time, and does
    not negotiate the order of messages.

    Parameters
    ----------
    campaigns : tuple of str
        The names of the campaigns.
    cost_form : str, optional
        One of LINES: the straight line from which the formulas take the time of a message.

    Returns
    -------
    DataFrame
        A row for each case: ``network``, ``workers`` and ``link``, the ``measured``
        scaling factor, and a column for each of FORMULAS, which has its relative error.
    """
    rows = []
    for campaign in campaigns:
        lab = Lab.load(campaign)
        for case in lab.cases(plain=True):
            if case.plan == "none":
                rows.append(_case_in_lab(lab, case, cost_form))
    return pd.DataFrame(rows).sort_values(
        ["network", "workers", "link"], ignore_index=True
    )


def _case_in_lab(lab: Lab, case: Case, cost_form: str) -> dict[str, Any]:
    """Return the row of `in_lab` for one case.

    ``cost_form`` is one of LINES: the straight line from which the formulas take the time of
    a message.
    """
    # The mean scaling factor of the repeated iterations.
    measured = lab.rounds(case)["factor"].mean()
    cost = lab.calibration.of_case(case).costs_by_form[cost_form]
    row = {
        "network": case.network,
        "workers": case.workers,
        "link": case.link,
        "measured": measured,
    }
    for formula, factor in by_formulas(lab.workload(case), cost).items():
        row[formula] = factor / measured - 1
    return row


def printed_errors() -> dict[str, tuple[float, float]]:
    """Return the least and the largest error in % of each formula (osf Section 3.2)."""
    return {
        "CSF": (claimed("osf-fig03-csf-min"), claimed("osf-fig03-csf-max")),
        "OSF": (claimed("osf-fig03-osf-min"), claimed("osf-fig03-osf-max")),
    }


def numbers() -> pd.DataFrame:
    """Return the factors on the cluster, the errors in the lab, and the printed errors.

    Returns
    -------
    DataFrame
        The rows of `modelled` in the best setting, with their ranges over all compatible
        settings, and then those of `in_lab`. The column ``grade``, which is "model" or
        "lab", tells them apart. On the link of some replays messages have cheap start-ups, and
        on that of the others expensive ones. In rows of replays with expensive start-ups,
        EXPENSIVE follows the name of the network.

        ``paper`` is the printed factor of VGG-16. ``paper_error_low`` and
        ``paper_error_high`` are the least and the largest size of a formula's error that the
        paper prints. This is one range for all networks, and every row of the formula has it.
    """
    model = settings.over(
        modelled, keys=["network", "quantity"], values=["model", "error"]
    )
    cheap_startups = in_lab((CAMPAIGN, LAB))
    expensive_startups = in_lab((REGIMES,))
    # The figure has rows of their own for networks that were replayed with expensive start-ups.
    names = expensive_startups["network"] + EXPENSIVE
    frame = graded(model, cheap_startups, expensive_startups.assign(network=names))
    # The factor of VGG-16 without fusion is printed with Figure 8. The paper measured it, so
    # that it is compared with the simulated factor, and not with those of the formulas.
    factor = claimed("osf-fig08-before")
    frame["paper"] = printed_at(frame, factor, network="VGG16", quantity="simulated")
    for name, (low, high) in printed_errors().items():
        # The rows of the formula, for every network on the cluster. Rows of the lab have no
        # quantity.
        is_formula = frame["quantity"] == COLUMNS[name]
        # The paper prints %, and all errors of the table are shares of 1.
        frame.loc[is_formula, "paper_error_low"] = low / 100
        frame.loc[is_formula, "paper_error_high"] = high / 100
    return frame


# -- drawing -------------------------------------------------------------------------


def spelled(name: str) -> str:
    """Return a network of this figure's table as the figure spells it."""
    plain = name.removesuffix(EXPENSIVE)
    if plain == name:
        return network_title(plain)
    return network_title(plain) + EXPENSIVE


def draw(frame: pd.DataFrame) -> Figure:
    """Draw the errors of the predicted scaling factors, a panel for CSF and one for OSF.

    Parameters
    ----------
    frame : DataFrame
        What `numbers` returned.
    """
    lab = frame[frame["grade"] == "lab"]
    is_expensive = lab["network"].str.endswith(EXPENSIVE)
    # The title has the errors of CSF with their sign, and that of OSF without it. In rows of
    # the lab, "OSF printed" is the error of OSF by Eq 8 as it is printed.
    largest_cheap = _largest(lab.loc[~is_expensive, "CSF"])
    largest_expensive = _largest(lab.loc[is_expensive, "CSF"])
    largest_osf = lab["OSF printed"].abs().max()
    title = (
        f"In the lab CSF errs by up to {largest_expensive:+.0%} with expensive "
        f"start-ups and {largest_cheap:+.0%} with cheap ones, OSF by up to "
        f"{largest_osf:.0%}"
    )
    sheet = plots.sheet(title, columns=2, height=4.6, sharex=True, sharey=True)
    with sheet as (figure, axes):
        for ax, (name, printed) in zip(axes, printed_errors().items(), strict=True):
            # COLUMNS has what the table calls the formula.
            _draw_errors(ax, frame, COLUMNS[name], printed)
            low, high = printed
            ax.set_title(f"{name}: the paper states {low:g}% to {high:g}%")
    return figure


def _largest(errors: pd.Series) -> float:
    """Return the error of the largest size, with its sign."""
    return float(errors.loc[errors.abs().idxmax()])


def _draw_errors(
    ax: Axes, frame: pd.DataFrame, formula: str, printed: tuple[float, float]
) -> None:
    """Draw the range of a formula's errors, a row for each network and place.

    A network of the lab has the range over all of its cases. A network of the cluster has
    the range over all compatible settings (`workbook.osf.settings.compatible`).

    Parameters
    ----------
    ax : Axes
        Where they are drawn.
    frame : DataFrame
        What `numbers` returned.
    formula : str
        One of the values of COLUMNS.
    printed : (float, float)
        The least and the largest size of the error that the paper prints, in %.
    """
    model = _modelled_errors(frame, formula)
    replayed = _replayed_errors(frame, formula)
    cases = [*model.index, *replayed.index]
    label = "error of the predicted scaling factor [%]"
    # One call would draw both series side by side in each row. No row has both, so that each
    # series has a call of its own, which draws it in the middle of its rows. In the rows of the
    # other series it is NaN, which draws nothing.
    plots.intervals(
        ax,
        cases,
        {"model": _ends_percent(model, cases)},
        label=label,
        printed={"size of the error": printed},
        # The paper prints errors without a sign, so its range is shaded on both sides of 0.
        mirrored=True,
    )
    plots.intervals(
        ax, cases, {"replayed": _ends_percent(replayed, cases)}, label=label
    )


def _modelled_errors(frame: pd.DataFrame, formula: str) -> pd.DataFrame:
    """Return the range of a formula's errors for each network of the cluster.

    ``frame`` is what `numbers` returned. The columns are ``min`` and ``max``, and the index has
    the names that are drawn.
    """
    rows = rows_of(frame, grade="model", quantity=formula).set_index("network")
    errors = rows.loc[list(FIVE), ["error_low", "error_high"]]
    errors = errors.set_axis(["min", "max"], axis=1)
    errors.index = [f"{spelled(name)}, cluster" for name in errors.index]
    return errors


def _replayed_errors(frame: pd.DataFrame, formula: str) -> pd.DataFrame:
    """Return the range of a formula's errors for each network of the lab.

    ``frame`` is what `numbers` returned. The columns are ``min`` and ``max``, and the index has
    the names that are drawn.
    """
    # A row of the lab has the error of each formula in a column of its name.
    lab = frame[frame["grade"] == "lab"]
    errors = lab.groupby("network")[formula].agg(["min", "max"])
    names = sorted(errors.index, key=_order_in_figure)
    return errors.loc[names].rename(index=spelled)


def _order_in_figure(name: str) -> tuple[bool, str, int]:
    """Return the key by which the networks of the lab are sorted.

    Networks with cheap start-ups come first, and those with expensive start-ups last. Within
    each of these parts, the first six letters put the networks of a family together, and then
    the length of the name puts ResNet-50 before ResNet-101.
    """
    family = name[:6]
    return EXPENSIVE in name, family, len(name)


def _ends_percent(
    errors: pd.DataFrame, cases: Sequence[str]
) -> tuple[pd.Series, pd.Series]:
    """Return the least and the largest error of each case in %, NaN if it has no error."""
    percent = 100 * errors.reindex(cases)
    return percent["min"], percent["max"]


# -- claims --------------------------------------------------------------------------

check(
    "osf-fig03-csf-min", "five networks: smallest size of CSF's error, no buffer", 100
)(settings.by_model)
check(
    "osf-fig03-csf-max", "five networks: largest size of CSF's error, no buffer", 100
)(settings.by_model)
check("osf-fig03-resnets", "three ResNets: CSF's error, no buffer", 1, 1)(
    settings.by_model
)


@check("osf-fig03-reduction")
def _osf_error_reduction() -> Result:
    """Return by how many % OSF reduces the error of CSF, from the printed errors.

    The reduction is 1 - OSF's error / CSF's error. The paper does not say which error of CSF
    belongs to the largest error of OSF, so that the least and the largest error of CSF give
    the ends of an interval. Each printed error may differ from the true one by half of its
    last digit, which makes the interval wider.
    """
    # Numbers that the text of the paper prints, by name. These are in %.
    printed = claims.prose("osf")
    least_csf = printed["fig03-csf-error-min"]
    largest_csf = printed["fig03-csf-error-max"]
    largest_osf = printed["fig03-osf-error-max"]
    # CSF's least error is printed as a whole number, which is off by at most 0.5, and the
    # others with one decimal.
    largest_ratio = (largest_osf + 0.05) / (least_csf - 0.5)
    least_ratio = (largest_osf - 0.05) / (largest_csf + 0.05)
    # The interval may pair the errors of two different networks. The note says what speaks
    # against a large reduction of one network's error. VGG-16 is the one network of which the
    # paper compares both errors, and calls them comparable, but this is with fusion. By Fig 4b,
    # fusion hardly changes VGG-16's factor, so that its errors may be comparable without it, too.
    note = (
        f"OSF errs by up to {largest_osf}%, and CSF by up to {largest_csf}%. Their ratio "
        "is a reduction of one network's error only if both errors are of the same "
        "network. With fusion, Section 3.2 calls the two errors of VGG-16 comparable, "
        "which is almost no reduction (in Fig 4b the factor is almost unchanged from "
        "1 KB on)"
    )
    reductions = [100 * (1 - largest_ratio), 100 * (1 - least_ratio)]
    # A single interval, whose ends are the least and the largest reduction.
    return claims.own([reductions], note)


@check("osf-fig03-osf-most", "100 * osf", False)
@check("osf-fig03-csf-least", "100 * csf", True)
def _errors_in_lab(expression: str, least_is_worst: bool) -> Result:
    """Return errors in % of all replays without fusion, of which each of LINES is a reading.

    The paper says that the start-up "can be measured directly", but not on which
    messages. Each of LINES is a straight line by which the start-up may have been
    measured.

    Parameters
    ----------
    expression : str
        The value in %, such as "100 * osf", by the sizes ``osf`` and ``csf`` of the relative
        errors of OSF and CSF.
    least_is_worst : bool
        Whether the claim is one of "at least", for which the least value is the worst.
        Otherwise it is one of "at most", and the largest value is the worst.
    """
    readings = {}
    for cost_form, line in LINES.items():
        readings[line] = _error_in_lab(cost_form, expression, least_is_worst)
    note = "all plain replays without fusion; how messages are measured is not stated"
    return claims.by_readings(readings, note)


def _error_in_lab(cost_form: str, expression: str, least_is_worst: bool) -> Result:
    """Return errors, or reductions of errors, of all replays without fusion in %.

    Parameters
    ----------
    cost_form : str
        One of LINES: the straight line from which the formulas take the time of a message.
    expression : str
        The value in %, such as "100 * (1 - osf / csf)", by the sizes ``osf`` and ``csf`` of
        the relative errors of OSF and CSF.
    least_is_worst : bool
        Whether the claim is one of "at least", for which the least value is the worst.
        Otherwise it is one of "at most", and the largest value is the worst.

    Returns
    -------
    Result
        The values of all replays. The note has the worst three of them.
    """
    ranked = _ranked_errors(cost_form, expression, least_is_worst)
    # The worst value is the first. The ranked values keep the index of `in_lab`, which finds
    # their case.
    worst = in_lab(CAMPAIGNS, cost_form).loc[ranked.index[0]]
    next_worst = ", ".join(f"{value:.3g}" for value in ranked[1:3])
    note = (
        f"the worst is {ranked.iloc[0]:.3g}% ({worst['network']}, {worst['workers']} x "
        f"{worst['link']}), then {next_worst}%"
    )
    return claims.measured(ranked, note, "replayed")


@check("osf-fig03-reduction-each")
def _reduction_in_lab() -> Result:
    """Return by how many % OSF reduces the error of CSF in replays.

    The sentence of Section 3.2, by which OSF "reduces the estimation error", has two readings:
    the error of each case, or the largest error of all cases.
    """
    # The paper claims a reduction of at least 83.8%. The replay with the least reduction is thus
    # the one that is the worst for the claim.
    of_each = _error_in_lab(EQ7, "100 * (1 - osf / csf)", least_is_worst=True)
    # The ranking of errors begins with the largest.
    largest_osf = _ranked_errors(EQ7, "100 * osf", least_is_worst=False).iloc[0]
    largest_csf = _ranked_errors(EQ7, "100 * csf", least_is_worst=False).iloc[0]
    of_largest = claims.measured(
        100 * (1 - largest_osf / largest_csf),
        f"{largest_osf:.3g}% against {largest_csf:.3g}%",
        "replayed",
    )
    return claims.by_readings(
        {"of each error": of_each, "of the largest error": of_largest},
        f"all plain replays without fusion; messages by {LINES[EQ7]}",
    )


def _ranked_errors(cost_form: str, expression: str, least_is_worst: bool) -> pd.Series:
    """Return a value for each replay of a network of Table 2, the worst first.

    Parameters
    ----------
    cost_form : str
        One of LINES: the straight line from which the formulas take the time of a message.
    expression : str
        The value, such as "100 * (1 - osf / csf)", by the sizes ``osf`` and ``csf`` of the
        relative errors of OSF and CSF.
    least_is_worst : bool
        Whether the claim is one of "at least", for which the least value is the worst.
        Otherwise it is one of "at most", and the largest value is the worst.

    Returns
    -------
    Series
        The values, with the index of `in_lab`.
    """
    cases = in_lab(CAMPAIGNS, cost_form)
    cases = cases[cases["network"].isin(measured_names())]
    # The claims are about OSF, which is computed by Eq 8 as it is printed.
    errors = pd.DataFrame(
        {"osf": cases["OSF printed"].abs(), "csf": cases["CSF"].abs()}
    )
    # Ascending order puts the least value first, and descending order the largest one.
    return errors.eval(expression).sort_values(ascending=least_is_worst)
