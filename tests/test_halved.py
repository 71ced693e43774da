"""Outcomes of modelled claims do not hang on how finely a grid was scanned, but where the table says so.

Each axis of a grid gets the middles between its values, one axis at a time: all at once would be billions
of settings. ``pytest --long tests/test_halved.py --write`` writes data/halved.csv anew.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd
import pytest

from workbook.common import claims, places
from workbook.dag import settings as dag
from workbook.osf import settings as osf
from workbook.site import verdicts as verdicts  # registers the checks


def halved(values: Any) -> Any:
    """Middles put in: in ratio where both ends are above 0, and none before one without end."""
    values = np.asarray(values, float)
    low, high = values[:-1], values[1:]
    middles = np.where((low > 0) & (high > 0), np.sqrt(low * high), (low + high) / 2)
    return np.unique(np.append(values, middles[np.isfinite(middles)]))


def axes() -> Iterator[tuple[str, str, type, dict[str, Any]]]:
    """Paper, axis, its grid, and the grid's axes with half the step of that one."""
    whole: dict[str, tuple[type, Mapping[str, Any]]] = {
        "osf": (osf.Grid, osf.Grid().free),
        "dag": (dag.Grid, dag.Grid.free),
    }
    for paper, (grid, free) in whole.items():
        for name, values in free.items():
            yield paper, name, grid, {**free, name: halved(values)}


def outcomes(paper: str) -> dict[str, str]:
    """Outcome of each claim of a paper that a model judges, everything computed anew."""
    ours = ("ddlkit.", "workbook.")
    for name in [name for name in sys.modules if name.startswith(ours)]:
        for value in list(vars(sys.modules[name]).values()):
            if hasattr(value, "cache_clear"):
                value.cache_clear()
    results = {
        claim: claims.CHECKS[claim.id]()
        for claim in claims.load_claims()
        if claim.paper == paper and claim.id in claims.CHECKS
    }
    model = claims.Evidence.MODEL
    judged = {
        c.id: c.verdict(result)
        for c, result in results.items()
        if result.evidence is model
    }
    return {name: str(verdict.outcome) for name, verdict in judged.items()}


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_half_the_step_of_a_grid_changes_what_the_table_says(
    request: pytest.FixtureRequest,
) -> None:
    if not request.config.getoption("--long"):
        pytest.skip("needs --long")
    # Without the module of verdicts no check would be registered, and nothing compared.
    assert claims.CHECKS
    rows, base = [], {paper: outcomes(paper) for paper in ("osf", "dag")}
    for paper, axis, grid, free in axes():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(grid, "free", free)
            if paper == "dag":
                patch.setattr(grid, "shape", tuple(map(len, free.values())))
            now = outcomes(paper)
        rows += [(name, axis, base[paper][name], now[name]) for name in now]
    table = pd.DataFrame(rows, columns=["claim", "axis", "outcome", "halved"])
    if request.config.getoption("--write"):
        table.to_csv(places.DATA / "halved.csv", index=False)
    pd.testing.assert_frame_equal(table, claims.halved())
