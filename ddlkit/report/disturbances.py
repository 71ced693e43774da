"""Disturbed iterations as they were foretold and as they came, and what planning again gains.

The statistic, fixed before the recording: the error of a case is foretold median over measured, less 1;
it is inside if the measured median lies in the interval of single iterations; and it fails if it is outside,
or off by more than FAILS. Iterations of a straggler at random are held against the foretold distribution: the
largest distance of the two distribution functions, and its critical value (two samples, 5%).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from ddlkit.core.case import Case
from ddlkit.core.errors import UserError
from ddlkit.core.lablink import read_link
from ddlkit.core.units import parse_bits_per_s, parse_seconds
from ddlkit.core.workload import Workload
from ddlkit.model.calibration import Calibration
from ddlkit.model.disturbed import DRAWS, Disturbance, Foretold, foretell
from ddlkit.model.predictor import plan_of
from ddlkit.model.replanning import AGAIN, KEPT, KNEW
from ddlkit.report.accuracy import mean_difference

FAILS = 0.05
CRITICAL = 1.358
"""Of Kolmogorov and Smirnov, for 5%: times the root of (n + m) / (n m)."""
DUEL = (KEPT, AGAIN, KNEW)
"""Cases of the duel of plans, by whose plan they have."""
MENDED_DRAWS = 40
MANY = 2000
"""Draws of a distribution that is compared as a whole."""


CONGESTION = ("reno", "cubic", "bbr")


@dataclass(frozen=True)
class Background:
    """Others' traffic of a recorded case: its share of a link, and how long it lasted and rested in turns."""

    load: float
    on_s: float = 0.0
    off_s: float = 0.0


@dataclass(frozen=True)
class Change:
    """What a link did otherwise from ``at_s`` on in a recorded case; what is None stayed."""

    at_s: float
    rate_bits_per_s: float | None = None
    loss: float | None = None
    jitter_s: float | None = None
    background: Background | None = None
    ranks: tuple[int, ...] = ()


def parse_changes(text: str) -> tuple[Change, ...]:
    """Read the changes of a recorded case: ``"0s:rate=250mbit,rank=3;0.3s:loss=1%"``."""
    return tuple(map(_parse_change, filter(None, text.split(";"))))


def _parse_change(text: str) -> Change:
    at, _, said = text.partition(":")
    values = dict(part.split("=") for part in said.split(","))
    share, _, turns = values.get("background", "").partition(":")
    on_s, off_s = map(parse_seconds, turns.split("/")) if turns else (0.0, 0.0)
    return Change(
        parse_seconds(at),
        parse_bits_per_s(values["rate"]) if "rate" in values else None,
        _share(values["loss"]) if "loss" in values else None,
        parse_seconds(values["jitter"]) if "jitter" in values else None,
        Background(_share(share), on_s, off_s) if share else None,
        (int(values["rank"]),) if "rank" in values else (),
    )


def _share(text: str) -> float:
    return float(f"{text.removesuffix('%')}e-2" if text.endswith("%") else text)


def disturbance_of(case: Case) -> Disturbance:
    """What a case over an emulated link says of its disturbance, as the model takes it.

    A change of one rank's rate counts as one of all: a ring waits for its slowest link. Others' traffic, loss
    and jitter hold for the whole iteration, from whenever in it they begin.
    """
    link, rate = read_link(case.link), case.link_bits_per_s
    changes = parse_changes(case.changes)
    shares = {0.0: 1.0}
    known: dict[str, float] = {"loss": link.loss, "jitter_s": link.jitter_s}
    for change in changes:
        if change.rate_bits_per_s is not None:
            shares[change.at_s] = change.rate_bits_per_s / rate
        if share := change.background:
            known |= {"load": share.load, "on_s": share.on_s, "off_s": share.off_s}
        for name in ("loss", "jitter_s"):
            value = getattr(change, name)
            known[name] = known[name] if value is None else value
    control = next((one for one in CONGESTION if one in case.link.split("-")), CONGESTION[0])
    return Disturbance(
        at_s=tuple(shares),
        shares=tuple(shares.values()),
        round_trip_s=4 * link.delay_s,
        rate_bits_per_s=rate,
        congestion=control,
        straggler=case.straggler,
        spread=case.straggler_spread,
        **known,
    )


def name_of(case: Case) -> str:
    """A disturbance as a reader knows it: "one link at 1/4", "loss 1%, cubic"."""
    found, changes = disturbance_of(case), parse_changes(case.changes)
    if found.loss:
        return f"loss {100 * found.loss:g}%, {found.congestion}"
    if found.jitter_s:
        return f"jitter {1e3 * found.jitter_s:g} ms"
    if found.load:
        turns = f", {1e3 * found.on_s:g} ms on and off" if found.off_s else ""
        return f"others {found.load:.0%}{turns}"
    if found.spread:
        return "straggler at random"
    if found.shares[-1] == 1:
        return "none" if found.congestion == CONGESTION[0] else f"none, {found.congestion}"
    if changes[0].ranks:
        return f"one link at 1/{1 / found.shares[-1]:g}"
    when = "" if len(found.at_s) == 1 else " in mid-iteration"
    return f"all links at 1/{1 / found.shares[-1]:g}{when}"


def foretold(
    case: Case,
    workloads: Mapping[str, Workload],
    calibration: Calibration,
    draws: int,
    *,
    windows: bool = False,
) -> Foretold:
    """A case's iterations under its disturbance, by the calibration of its lab without."""
    workload = workloads[case.profile_sha256].scaled(case.dilation)
    known = calibration.of_case(case)
    return foretell(workload, plan_of(case), known, disturbance_of(case), draws, windows=windows)


def judged(
    runs: pd.DataFrame, workloads: Mapping[str, Workload], calibration: Calibration
) -> pd.DataFrame:
    """One row per disturbance and plan: foretold with its interval, measured, error, inside, fails.

    Cases that differ in their seed alone are one row. ``covered`` is the share of single iterations in the
    interval, ``distance`` that of the distributions with its ``critical`` value, where a straggler is random;
    ``mended_s`` is by windows that are played out, made after the recording, where a law of loss is on trial;
    ``repeatability`` the mean difference of two iterations over their median, where the case is fixed.
    """
    first = runs.drop_duplicates("case").set_index("case")
    cases = {key: Case.from_row(row) for key, row in first.to_dict("index").items()}
    names = runs["case"].map({key: name_of(case) for key, case in cases.items()})
    rows = []
    for (name, plan), own in runs.groupby([names.rename("disturbance"), "plan"], sort=False):
        case = cases[own["case"].iloc[0]]
        random = case.straggler_spread > 0
        told = foretold(case, workloads, calibration, MANY if random else DRAWS)
        took_s, (lower_s, upper_s) = own["iteration_s"].to_numpy(), told.interval_s
        measured_s = float(np.median(took_s))
        row = {"disturbance": name, "plan": plan, "iterations": len(own)}
        row |= {"predicted_s": told.median_s, "lower_s": lower_s, "upper_s": upper_s}
        row |= {"measured_s": measured_s, "relative_error": told.median_s / measured_s - 1}
        row["inside"] = bool(lower_s <= measured_s <= upper_s)
        row["covered"] = float(np.mean((took_s >= lower_s) & (took_s <= upper_s)))
        distance = kolmogorov(took_s, told.seconds) if random else Distance(np.nan, np.nan)
        row |= distance._asdict()
        if disturbance_of(case).windowed:
            mended = foretold(case, workloads, calibration, MENDED_DRAWS, windows=True)
            row["mended_s"], row["mended_error"] = mended.median_s, mended.median_s / measured_s - 1
        spread = np.nan if random else mean_difference(own["iteration_s"]) / measured_s
        row |= {"repeatability": spread, "limited": int(own["processor_limited"].sum())}
        rows.append({**row, "fails": not row["inside"] or abs(row["relative_error"]) > FAILS})
    found = pd.DataFrame(rows)
    order = found.groupby("disturbance", sort=False).ngroup()
    return found.loc[order.sort_values(kind="stable").index].reset_index(drop=True)


def kinds_of(cases: pd.DataFrame) -> pd.Series:
    """(cases,) kind of disturbance of `judged` cases: their names without how strong it is."""
    kinds = cases["disturbance"].str.replace(r"^(loss|none).*, (\w+)$", r"\1, \2", regex=True)
    kinds = kinds.str.replace(r"^(others|jitter) .*", r"\1", regex=True)
    kinds = kinds.str.replace(r"^(one link|all links) at 1/\d+", r"\1 slower", regex=True)
    return kinds.rename("kind")


def by_kind(cases: pd.DataFrame) -> pd.DataFrame:
    """One row per kind of disturbance of `judged` cases: how many, inside, failed, and the errors' range."""
    grouped = cases.groupby(kinds_of(cases), sort=False)
    return grouped.agg(
        cases=("plan", "size"),
        inside=("inside", "sum"),
        fails=("fails", "sum"),
        least=("relative_error", "min"),
        most=("relative_error", "max"),
    ).reset_index()


# -- without loss, before any and after one ----------------------------------------------------


def before_loss(runs: pd.DataFrame) -> pd.DataFrame:
    """Rows of each link before its first iteration with loss; rows stand as they were played."""
    return runs[_lossy(runs).groupby(runs["link"]).cumsum() == 0]


def after_loss(runs: pd.DataFrame) -> pd.DataFrame:
    """One row per iteration without loss that followed one with it, over the same connections.

    Columns: congestion; plan; after : how many iterations, from 1; measured_s; usual_s : the median of the
    plan's iterations before any loss; ratio : of the two. Raises UserError where none followed.
    """
    usual_s = before_loss(runs).groupby(["link", "plan"])["iteration_s"].median()
    rows = []
    for link, own in runs.groupby("link", sort=False):
        lossy = _lossy(own).to_numpy()
        follows = own[~lossy & (lossy.cumsum() > 0)]
        control = disturbance_of(Case.from_row(own.iloc[0].to_dict())).congestion
        for after, one in enumerate(follows.to_dict("records"), 1):
            usual, took_s = float(usual_s[link, one["plan"]]), one["iteration_s"]
            row = {"congestion": control, "plan": one["plan"], "after": after}
            rows.append({**row, "measured_s": took_s, "usual_s": usual, "ratio": took_s / usual})
    if not rows:
        raise UserError("no iteration without loss follows one with it: record campaign_calm.yml")
    return pd.DataFrame(rows)


def _lossy(runs: pd.DataFrame) -> pd.Series:
    """(rows,) whether packets were lost at random."""
    return runs["changes"].astype(str).str.contains("loss=")


class Distance(NamedTuple):
    """The largest distance of two distribution functions, and what it exceeds in 5% of equal ones."""

    distance: float
    critical: float


def kolmogorov(one: ArrayLike, other: ArrayLike) -> Distance:
    """The distance of two samples, (n,) and (m,).

    >>> round(kolmogorov([1.0, 2.0], [3.0, 4.0, 5.0]).distance, 3)
    1.0
    """
    first, second = np.sort(np.ravel(one)), np.sort(np.ravel(other))
    both = np.concatenate([first, second])
    shares = [np.searchsorted(x, both, side="right") / len(x) for x in (first, second)]
    n, m = len(first), len(second)
    return Distance(
        float(np.abs(shares[0] - shares[1]).max()), CRITICAL * np.sqrt((n + m) / (n * m))
    )


# -- planning again ----------------------------------------------------------------------------


def replanned(
    runs: pd.DataFrame,
    workloads: Mapping[str, Workload],
    calibration: Calibration,
    draws: int = 2000,
) -> pd.DataFrame:
    """One row per rate and plan, "kept" and "again", against the plan that knew; ratios of iteration times.

    Columns: rate_bits_per_s, plan, messages, measured_s, predicted_s and, over the plan that knew in the same
    round, ``ratio`` with its 95% interval ``lower`` to ``upper``, and ``predicted_ratio``.
    """
    rows, chance = [], np.random.default_rng(0)
    for _, own in runs[runs["plan"].isin(DUEL)].groupby("changes", sort=False):
        times = own.pivot_table(index="repeat", columns="plan", values="iteration_s")
        cases = {
            row["plan"]: Case.from_row(row)
            for row in own.drop_duplicates("case").to_dict("records")
        }
        told = {name: _at_rate(case, workloads, calibration) for name, case in cases.items()}
        for name, case in cases.items():
            ratio = (times[name] / times[KNEW]).to_numpy()
            drawn = np.median(chance.choice(ratio, (draws, len(ratio))), axis=1)
            lower, upper = np.quantile(drawn, [0.025, 0.975])
            row = {"rate_bits_per_s": _rate(case), "plan": name}
            row |= {"messages": case.ends.count(";") + 1, "measured_s": float(times[name].median())}
            row |= {"predicted_s": told[name], "ratio": float(np.median(ratio)), "lower": lower}
            row |= {"upper": upper, "predicted_ratio": told[name] / told[KNEW]}
            rows.append({**row, "relative_error": told[name] / row["measured_s"] - 1})
    return pd.DataFrame(rows)


def _rate(case: Case) -> float:
    """At which a case's iterations pass."""
    changes = parse_changes(case.changes)
    return changes[-1].rate_bits_per_s or 0.0 if changes else case.link_bits_per_s


def _at_rate(case: Case, workloads: Mapping[str, Workload], calibration: Calibration) -> float:
    """Foretold by the calibration of the lab that has the case's rate all the time."""
    engine, _, rest = case.link.partition(":")
    others = rest.partition("-")[2]
    same = [
        link
        for link, workers, _ in calibration.known
        if workers == case.workers
        and link.startswith(f"{engine}:")
        and link.partition("-")[2] == others
        and parse_bits_per_s(link.partition(":")[2].partition("-")[0]) == _rate(case)
    ]
    known = calibration.between(same[0], case.workers)
    workload = workloads[case.profile_sha256].scaled(case.dilation)
    return foretell(workload, plan_of(case), known, Disturbance()).median_s
