"""Predictions that came before their runs: joined by the case, judged by goals that were stated first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from ddlkit import store
from ddlkit.core.case import Case
from ddlkit.core.errors import UserError
from ddlkit.model.trials import CARRIED, OURS
from ddlkit.report import judged
from ddlkit.report.source import (
    LIMIT,
    LINKS,
    LINKS_AGAIN,
    LINKS_FOURTH,
    LINKS_THIRD,
    REGIMES,
    REGIMES_VGG,
    Source,
)

CASES = [
    Case("replay", "lenet5", "cpu", 4, 2, "lab:1gbit", 1e9, "all_reduce", plan, ends)
    for plan, ends in (("none", "1;2"), ("single", "2"), ("ddp", "1;2;3"))
]
MACHINE = {"name": "drawn"}


def recorded(
    directory: Path,
    factor: float = 1.01,
    digest: str = "",
    repeats: tuple[int, ...] = (2, 2, 2),
    limited: str = "",
) -> Source:
    """A campaign of CASES: iterations of 1 s, 0.5 s exposed, that were said to take factor times that.

    repeats: of each case; limited: the plan whose runs the processor limited
    """
    rows = []
    for case in CASES:
        for model, times in {OURS: factor, CARRIED: 2 * factor}.items():
            rows += [(case.key, model, "iteration", times), (case.key, model, "exposed", times / 2)]
        rows += [(case.key, OURS, "lower", 0.995), (case.key, OURS, "upper", 2.0)]
    said = pd.DataFrame(rows, columns=["case", "model", "quantity", "seconds"])
    how: Any = {"command": ["drawn"], "machine": MACHINE}
    path = store.save_table(said, directory, "predicted-cases", schema="predicted", **how)
    digest = digest or store.load_stamp(path)["sha256"][:12]
    runs = pd.DataFrame(
        {**vars(case), "case": case.key, "repeat": repeat, "iteration_s": 0.99 + 0.02 * repeat}
        | {"processor_limited": case.plan == limited}
        for case, times in zip(CASES, repeats, strict=True)
        for repeat in range(times)
    ).assign(
        **{"origin": "replayed", "iteration": 0, "compute_s": 0.5, "exposed_communication_s": 0.5},
        **{"processor_load": 0.1, "stolen": 0.0, "late": 0.0},
        **{"copy_s_per_byte": 0.0, "precision": "fp32", "predicted": digest},
    )
    store.save_table(runs, directory, "runs-drawn", schema="runs", **how)
    return Source((directory,))


def test_errors_are_of_the_median_and_intervals_of_single_iterations(tmp_path: Path) -> None:
    found = judged.joined(recorded(tmp_path))
    assert found["model_error"].to_numpy() == pytest.approx(np.full(3, 0.01))
    assert found["carried_error"].to_numpy() == pytest.approx(np.full(3, 1.02))
    assert found["model_exposed_error"].to_numpy() == pytest.approx(np.full(3, 0.01))
    assert (found["runs"] == 2).all() and (found["covered"] == 1).all(), (
        "0.99 lies below, 1.01 inside"
    )
    assert found["no_overlap_error"].isna().all(), "which said nothing"


def test_iterations_are_counted_in_their_own_case(tmp_path: Path) -> None:
    found = judged.joined(recorded(tmp_path, repeats=(1, 2, 4))).set_index("case")
    for case, times in zip(CASES, (1, 2, 4), strict=True):
        assert found.loc[case.key, "runs"] == times
        assert found.loc[case.key, "covered"] == times - 1, "only the first, 0.99, lies below"


@pytest.mark.parametrize(("factor", "holds"), [(1.005, True), (1.2, False)])
def test_a_goal_holds_where_it_is_reached(tmp_path: Path, factor: float, holds: bool) -> None:
    told = judged.verdict(judged.joined(recorded(tmp_path, factor))).set_index("goal")["holds"]
    assert told["median error, iteration"] == told["cases within 5%"] == holds
    assert not told["median error, carried"] and not told["interval covers, least"]
    assert told["interval covers, most"]


def test_a_run_that_something_else_foretold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="foretold by .*'0123456789ab'"):
        judged.joined(recorded(tmp_path, digest="0123456789ab"))


def test_what_the_processor_limited_is_told_and_not_judged(tmp_path: Path) -> None:
    found = judged.foretold(recorded(tmp_path, limited="ddp"))
    assert list(found.everything["plan"]) == ["none", "single", "ddp"]
    assert list(found.cases["plan"]) == ["none", "single"]
    assert found.when.startswith("2 cases in 1 labs, foretold")
    assert found.when.endswith("the processor limited 1 more")
    assert list(found.told["holds"]) == list(judged.verdict(found.cases)["holds"])


def test_every_model_is_ranked_and_told_where_it_loses(tmp_path: Path) -> None:
    ranked = judged.ranking(judged.joined(recorded(tmp_path)), "plan")
    assert list(ranked["model"]) == [OURS, CARRIED]
    assert list(ranked["loses_to"]) == [OURS, OURS]
    assert ranked["by"].to_list() == pytest.approx([0.0, 1.01])


FORETOLD = [LINKS, REGIMES, LINKS_AGAIN, LINKS_THIRD, LINKS_FOURTH, REGIMES_VGG, LIMIT]


@pytest.mark.parametrize("name", FORETOLD)
def test_stamps_have_predictions_before_their_runs(name: str) -> None:
    """Of every campaign that counts as predicted; its runs carry the hash of the table (`judged.joined`)."""
    recorded = store.list_tables(store.RECORDED, f"*/{name}/predicted-cases.csv")
    assert recorded
    for path in recorded:
        said_at, run_at = judged.written_first(Source((path.parent,)))
        assert said_at < run_at
        assert len(judged.joined(Source((path.parent,)))) > 0
