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
    """Return the gain of the best predicted plan, for each network and link.

    Only plans that were trained are considered, and not PyTorch's default, over which the
    gain is counted. The predicted interval is for the gain that is measured. It therefore
    allows for the noise of rounds and for the error of the model.

    Parameters
    ----------
    campaign : Source
        A campaign of real training, in which each round trained under every plan in
        turn.

    Returns
    -------
    DataFrame
        One row for each pair of a network and a link. The columns are ``network``,
        ``link``, ``plan``, ``advised`` (whether a change to the plan is advised) and those
        of `INTERVALS`, as shares of a step under PyTorch's default.
    """
    # Both are by the hash of the layer profile. ``scatter`` has the times of successive iterations,
    # divided by their median, from which the advice draws the noise of compute.
    profiles = campaign.workloads()
    scatter = campaign.compute_scatter()
    calibration = Calibration.of(
        campaign.table("collectives"), slowdown=campaign.table("slowdown")
    )
    rows = []
    for (network, link), runs in campaign.table("runs").groupby(PLACE):
        # The runs of a pair differ in their plans alone, so that the first run stands for all.
        case = Case.from_row(runs.iloc[0].to_dict())
        profile = case.profile_sha256
        # With gradient accumulation, a step has several forward and backward passes.
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
        The plans, ranked by their predicted gains.
    runs : DataFrame
        The measured iterations of the pair under several plans.
    """
    # The median iteration of each round (rows) under each plan that was trained (columns).
    medians_s = _seconds_of_rounds(runs, advice)
    n_rounds, n_plans = medians_s.shape
    trained = [option for option in advice.ranked if option.name in medians_s.columns]
    # The plan with the largest predicted gain over the default.
    best = next(option for option in trained if option.name != DEFAULT)
    # Each median is over the same number of iterations.
    iterations = len(runs) // (n_rounds * n_plans)
    predicted = advice.gain(best, rounds=n_rounds, iterations_per_round=iterations)
    measured = measured_gain(medians_s, best.name)
    # Without a number of rounds, this is the interval of the gain in the long run, by which a
    # change is advised. It has no noise of a measurement, and is narrower.
    least_gain, _ = advice.gain(best).interval
    low, high = predicted.interval
    measured_low, measured_high = measured.interval
    return {
        "plan": best.name,
        "advised": least_gain >= WORTH,
        "gain": predicted.share,
        "low": low,
        "high": high,
        "measured": measured.share,
        "measured_low": measured_low,
        "measured_high": measured_high,
    }


def _seconds_of_rounds(runs: pd.DataFrame, advice: Advice) -> pd.DataFrame:
    """Return the median iteration of each round and plan in seconds.

    Rounds are rows. Columns are the names that the advice gives to the plans.
    """
    seconds = runs.pivot_table(
        index="repeat", columns="ends", values="iteration_s", aggfunc="median"
    )
    # The columns are so far the ends of a plan's buckets, such as "3;7;9". By these ends a plan
    # of the runs is found in the advice, which may have another name for it.
    names = {
        ";".join(map(str, option.iteration.plan.ends)): option.name
        for option in advice.ranked
    }
    return seconds.rename(columns=names)


def after_goals() -> pd.DataFrame:
    """Return the gains of the pairs of a network and a link that were tried after goals were set.

    `ddlkit advise` was given these pairs.

    Returns
    -------
    DataFrame
        The rows of data/advised.csv, which have the columns of `of_campaign` and more.
    """
    return pd.read_csv(places.DATA / "advised.csv")
