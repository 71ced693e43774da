"""Predictions that were written before their runs meet them.

Stated on 2026-11-22, before the first run of ``campaign-links``. A case's truth is the median of its
iterations; cases whose runs the processor may have limited are left out, and counted. Errors are relative,
and absolute values count. The interval is of a single iteration, so single iterations are counted in it.
"Carried" is a model that never saw the lab: its cost comes from other labs' calibrations alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import NamedTuple

import numpy as np
import pandas as pd

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.model.trials import CARRIED, MEASURED, MODELS, OURS
from ddlkit.report.accuracy import labelled, measured
from ddlkit.report.source import Source

ALL = (*MODELS, MEASURED, CARRIED)
"""Every model that a campaign may have foretold its cases by."""
TIMES = {"iteration": "iteration_s", "exposed": "exposed_s"}
WITHIN = 0.05


class Goal(NamedTuple):
    """A number to reach: of joined cases, at most or at least so much."""

    goal: str
    reached: Callable[[pd.DataFrame], float]
    at_most: float = np.inf
    at_least: float = -np.inf


GOALS = (
    Goal("median error, iteration", lambda c: c[f"{OURS}_error"].abs().median(), 0.01),
    Goal("median error, exposed", lambda c: c[f"{OURS}_exposed_error"].abs().median(), 0.03),
    Goal("median error, carried", lambda c: c[f"{CARRIED}_error"].abs().median(), 0.03),
    Goal("cases within 5%", lambda c: c[f"{OURS}_error"].abs().le(WITHIN).mean(), at_least=0.9),
    Goal("interval covers, least", lambda c: c["covered"].sum() / c["runs"].sum(), at_least=0.9),
    Goal("interval covers, most", lambda c: c["covered"].sum() / c["runs"].sum(), at_most=0.99),
)


def joined(campaign: Source) -> pd.DataFrame:
    """One row per case: measured, what each model had said of it, and relative errors.

    Columns as of `accuracy.validate`, for ALL; ``runs`` iterations, of which
    ``covered`` lie in the interval. Raises UserError for a run that this table did not foretell.
    """
    said, runs = campaign.table("predicted"), campaign.table("runs")
    digest = _digest(campaign)
    if others := set(runs["predicted"]) - {digest}:
        raise UserError(f"runs foretold by {sorted(others)}, not by the predictions {digest}")
    wide = said.pivot(index="case", columns=["model", "quantity"], values="seconds")
    found = measured(runs).set_index("case")
    if missing := [*found.index.difference(wide.index)]:
        raise UserError(f"case {missing[0]} was run, and nothing foretold")
    for name in ALL:
        for quantity, column in TIMES.items():
            known = (name, quantity) in wide.columns
            found[f"{name}_{column}"] = wide[name, quantity] if known else np.nan
        found[f"{name}_error"] = found[f"{name}_iteration_s"] / found["measured_iteration_s"] - 1
        exposed_s = found["measured_exposed_communication_s"]
        found[f"{name}_exposed_error"] = found[f"{name}_exposed_s"] / exposed_s - 1
    found["lower_s"], found["upper_s"] = wide[OURS, "lower"], wide[OURS, "upper"]
    inside = runs["iteration_s"].between(
        runs["case"].map(found["lower_s"]), runs["case"].map(found["upper_s"])
    )
    counted = inside.groupby(runs["case"]).agg(covered="sum", runs="size")
    return found.join(counted).reset_index()


class Foretold(NamedTuple):
    """A campaign judged by what was written before its runs.

    Attributes
    ----------
    everything : rows of `joined`, labelled; ``cases``: those that the processor did not limit
    told : of those, as of `verdict`
    when : in a line, how many there are, when they were foretold, and when the first of them was run
    """

    everything: pd.DataFrame
    cases: pd.DataFrame
    told: pd.DataFrame
    when: str


def foretold(campaign: Source) -> Foretold:
    """The campaign, joined and judged; raises UserError as `joined` does."""
    everything = labelled(joined(campaign))
    cases = everything[~everything["processor_limited"]]
    said_at, run_at = written_first(campaign)
    limited, labs = len(everything) - len(cases), cases["lab"].nunique()
    when = (
        f"{len(cases)} cases in {labs} labs, foretold {said_at:%Y-%m-%d %H:%M:%S}, "
        f"first runs complete {run_at:%H:%M:%S} (UTC); the processor limited {limited} more"
    )
    return Foretold(everything, cases, verdict(cases), when)


def _digest(campaign: Source) -> str:
    """How the hash begins of the predictions, as runs carry it."""
    (path,) = store.list_tables(campaign.directories[0], "predicted-*.csv")
    digest = str(store.load_stamp(path)["sha256"])
    runs = campaign.table("runs")["predicted"]
    return digest[: int(runs.str.len().max())]


def written_first(campaign: Source) -> tuple[datetime, datetime]:
    """When the predictions were written, and when the first runs."""
    return campaign.begun("predicted"), campaign.begun("runs")


def verdict(cases: pd.DataFrame) -> pd.DataFrame:
    """One row per goal: wanted, reached by `joined` cases, and whether it holds."""
    rows = []
    for goal in GOALS:
        reached = float(goal.reached(cases))
        most = np.isfinite(goal.at_most)
        wanted = f"at most {goal.at_most:g}" if most else f"at least {goal.at_least:g}"
        holds = goal.at_least <= reached <= goal.at_most
        rows.append({"goal": goal.goal, "wanted": wanted, "reached": reached, "holds": holds})
    return pd.DataFrame(rows)


def ranking(cases: pd.DataFrame, of: str, names: Sequence[str] = ALL) -> pd.DataFrame:
    """One row per model, the best first: median and 90% of its error, and the class where it is worst.

    of : column that says a case's class; ``loses_in``: where its median error is largest, ``loses_to`` the
        model that is best there, ``by`` how far apart they are
    """
    errors = cases[[f"{name}_error" for name in names]].abs().set_axis([*names], axis=1)
    classes = errors.groupby(cases[of]).median()
    rows = []
    for name in names:
        own = errors[name].dropna()
        if own.empty:
            continue
        behind = classes[name] - classes.min(axis=1)
        worst = behind.idxmax()
        row = {"model": name, "cases": len(own), "median": own.median(), "tail": own.quantile(0.9)}
        best = classes.loc[worst].idxmin()
        rows.append({**row, "loses_in": worst, "loses_to": best, "by": behind[worst]})
    return pd.DataFrame(rows).sort_values("median", ignore_index=True)
