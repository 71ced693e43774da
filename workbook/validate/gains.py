"""Gains of bucket plans over PyTorch's default, as predicted and as measured."""

from __future__ import annotations

from typing import Any

import pandas as pd

from ddlkit.core.case import Case
from ddlkit.model import Calibration
from ddlkit.model.advice import DEFAULT, WORTH, Advice, measured_gain
from workbook.common import places
from workbook.common.source import Source

PLACE = ["network", "link"]
INTERVALS = ["gain", "low", "high", "measured", "measured_low", "measured_high"]
"""The predicted gain and the ends of its interval, then the measured ones."""


def of_campaign(campaign: Source) -> pd.DataFrame:
    """Return the gain of the plan that would have been advised, for each network and link.

    Only plans that were trained are considered. The predicted interval is one for the
    measured gain, so it contains the noise of rounds and what the model misses.

    Parameters
    ----------
    campaign : Source
        A campaign of real training, in which each round trained under every plan in
        turn.

    Returns
    -------
    DataFrame
        One row for each pair of a network and a link. The columns are ``network``,
        ``link``, ``plan``, ``advised`` (whether a change is advised) and those of
        `INTERVALS`, as shares of a step under PyTorch's default.
    """
    profiles = campaign.workloads()
    scatter = campaign.compute_scatter()
    calibration = Calibration.of(
        campaign.table("collectives"), slowdown=campaign.table("slowdown")
    )
    rows = []
    for (network, link), runs in campaign.table("runs").groupby(PLACE):
        # The runs of a pair differ in their plans alone. All have the profile of the first.
        case = Case.from_row(runs.iloc[0].to_dict())
        profile = case.profile_sha256
        workload = profiles[profile].accumulated(case.accumulate)
        communication = calibration.of_case(case)
        advice = Advice.of(workload, communication, scatter[profile])
        gains = _gains(advice, runs)
        rows.append({"network": network, "link": link, **gains})
    return pd.DataFrame(rows)


def _gains(advice: Advice, runs: pd.DataFrame) -> dict[str, Any]:
    """Return ``plan``, ``advised`` and INTERVALS of one pair of a network and a link.

    Parameters
    ----------
    advice : Advice
        The plans, ranked by their prediction.
    runs : DataFrame
        The iterations of the pair.
    """
    rounds = _seconds_of_rounds(runs, advice)
    best = next(
        option
        for option in advice.ranked
        if option.name != DEFAULT and option.name in rounds
    )
    # Every cell of rounds is the median of so many iterations.
    iterations = len(runs) // rounds.size
    predicted = advice.gain(best, len(rounds), iterations)
    measured = measured_gain(rounds, best.name)
    # The rule of the advice looks at the interval of the costs alone.
    least_gain, _ = advice.gain(best).interval
    shares = [
        predicted.share,
        *predicted.interval,
        measured.share,
        *measured.interval,
    ]
    return {
        "plan": best.name,
        "advised": least_gain >= WORTH,
        **dict(zip(INTERVALS, shares, strict=True)),
    }


def _seconds_of_rounds(runs: pd.DataFrame, advice: Advice) -> pd.DataFrame:
    """Return the median iteration of each round (a row) and plan (a column, by the advice's name)."""
    seconds = runs.pivot_table(
        index="repeat", columns="ends", values="iteration_s", aggfunc="median"
    )
    # Runs list the ends of a plan's buckets. The advice may have another name for the same
    # plan.
    names = {
        ";".join(map(str, option.iteration.plan.ends)): option.name
        for option in advice.ranked
    }
    return seconds.rename(columns=names)


def after_goals() -> pd.DataFrame:
    """Return the pairs of a network and a link that `ddlkit advise` met after goals had been set.

    Returns
    -------
    DataFrame
        The rows of data/advised.csv, which have the columns of `of_campaign` and more.
    """
    return pd.read_csv(places.DATA / "advised.csv")
