"""Predictions beside what was measured: errors of trivial models, errors by start-ups, and by disturbance."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd
from matplotlib.figure import Figure

from ddlkit.report import plots
from ddlkit.report.accuracy import WITHIN
from ddlkit.report.labs import WELL
from ddlkit.report.plots.style import look

ROLES = ("no_overlap", "perfect_overlap", "model")


def beside_trivial(kinds: Mapping[str, pd.DataFrame]) -> Figure:
    """Return errors of ROLES on the iteration and, below, on exposed communication: a column per kind.

    kinds : title -> rows of `accuracy.validate`
    """
    figure, axes = plots.canvas(
        len(kinds), 2, height=5.0, sharex="row", layout="constrained", squeeze=False
    )
    whats = {"": "iteration", "_exposed": "exposed communication"}
    for column, (title, rows) in zip(axes.T, kinds.items(), strict=True):
        for ax, (kind, what) in zip(column, whats.items(), strict=True):
            errors = {role: 100 * rows[f"{role}{kind}_error"] for role in ROLES}
            band = ("repeatability", 100 * rows[f"repeatability{kind}"])
            names = [look(plan).label for plan in rows["plan"]]
            plots.dots(ax, names, errors, band=band, legend="", label=f"error, {what} [%]")
        whole, part, rescaled = (
            rows[f"{name}_error"].abs().median()
            for name in ("model", "model_exposed", "rescaled_exposed")
        )
        plots.heading(column[0], f"{title}: median error {whole:.1%}")
        plots.heading(column[1], f"Exposed: {part:.1%}; {rescaled:.1%} by own compute")
    plots.shared_legend(figure)
    return figure


def by_startups(plain: pd.DataFrame, sets: Mapping[str, pd.DataFrame]) -> Figure:
    """Return errors against how much start-ups weigh: a panel per set, plain links in each.

    plain, sets : cases with a column ``startup_share``
    """
    figure, axes = plots.canvas(len(sets), height=3.0, sharex=True, sharey=True)
    for ax, (name, rows) in zip(axes, sets.items(), strict=True):
        for role, some in {"plain_links": plain, "links_with_delay": rows}.items():
            plots.points(ax, some["startup_share"], 100 * some["model_error"], role, size=3)
        beyond = (rows["model_error"].abs() > WITHIN).sum()
        share = f"{beyond} of {len(rows)} off by more than {WITHIN:.0%}"
        plots.heading(ax, f"{name.capitalize()} set: {share}")
        ax.set(xscale="log", xlabel="start-ups of all messages / compute")
    axes[0].set_ylabel("error, iteration [%]")
    axes[0].legend(loc="lower left")
    return figure


def by_part(errors: pd.DataFrame, medians: pd.Series) -> Figure:
    """Return errors of messages in labs held out, by what decides at their size: a panel per kind.

    errors : of `labs.held_out`; medians : of |error|, by kind and lab
    """
    names = {"emulated": "Links with delay", "tbf": "Kernel's rate limit"}
    figure, axes = plots.canvas(len(names), height=2.1, sharey=True)
    for ax, (kind, name) in zip(axes, names.items(), strict=True):
        rows = errors[errors["kind"] == kind].sort_values("decides", kind="stable")
        label = "error of a message's time [%]"
        plots.dots_by_group(ax, rows["decides"], 100 * rows["error"], label=label)
        well = medians.loc[kind] <= WELL
        plots.heading(ax, f"{name}: {well.sum()} of {len(well)} labs within {WELL:.0%}")
    return figure


def by_disturbance(cases: pd.DataFrame) -> Figure:
    """Return errors of disturbed iterations by kind; cases : of `labs.disturbed`."""
    figure, ax = plots.canvas(height=3.0, layout="constrained")
    kinds = cases["kind"].replace({"none": "undisturbed", "others": "others' traffic"})
    label = "relative error, iteration time [%]"
    plots.dots_by_group(ax, kinds, 100 * cases["relative_error"], label=label)
    failed = kinds[cases["fails"]]
    cubic = failed.str.endswith("cubic").sum()
    plots.heading(ax, f"{len(failed)} of {len(cases)} fail, {cubic} of them with cubic")
    return figure
