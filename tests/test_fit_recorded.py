"""Fits of what was recorded: the same numbers as when it was judged, in descriptions of a few pages."""

from __future__ import annotations

import json
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from ddlkit import store
from ddlkit.core.fit import SIMPLE_FIRST, costs_from_dict, fit
from ddlkit.formats import messages

KEYS = ["link", "ranks", "collective"]
KEPT = pd.read_csv(Path(__file__).with_name("recorded_fits.csv"))
LOGS = sorted((store.ROOT / "data/external/abci").glob("allreduce_*.log.gz"))
MOST_BYTES = 50_000
FOUND = store.list_tables(store.RECORDED, "**/collectives*.csv")
TABLES = [
    path.relative_to(store.RECORDED).as_posix()
    for _, of_one in groupby(FOUND, key=lambda path: path.parent)
    for path in dict.fromkeys(itemgetter(0, -1)([*of_one]))
    if path.parent.name != "labs-alike"
]
"""The first and the last of each campaign: all were recorded alike. Of labs-alike, two sizes fit nothing."""
Recorded = list[tuple[str, tuple[Any, ...], pd.DataFrame]]


@pytest.fixture(scope="module")
def recorded() -> Recorded:
    """Name of a recorded table, link, ranks and collective, and their rows that were sent one by one."""
    found: Recorded = []
    for name in dict.fromkeys([*TABLES, *KEPT["table"]]):
        frame = store.load_table(store.RECORDED / name, "collectives")
        alone = frame[(frame["ranks"] > 1) & (frame["in_flight"] == 1)]
        found += [(name, key, rows) for key, rows in alone.groupby(KEYS)]
    return found


@pytest.mark.parametrize("table", KEPT["table"].unique())
def test_recorded_calibrations_are_fitted_as_when_they_were_judged(
    table: str, recorded: Recorded
) -> None:
    """recorded_fits.csv was written by the program of 2026-11-22 before pieces could join."""
    for name, key, rows in recorded:
        if name != table:
            continue
        at = np.geomspace(rows["bytes"].min(), rows["bytes"].max(), 7)[[0, 3, 6]]
        wanted = KEPT[(KEPT["table"] == name) & (KEPT[KEYS] == list(key)).all(axis=1)]
        assert len(wanted) == 4
        for numbers in wanted.itertuples(index=False):
            found = fit(numbers.form, rows["bytes"], rows["seconds"], draws=20)
            computed = np.concatenate([found.cost(at), *found.interval(at)])
            np.testing.assert_allclose(computed, numbers[5:], rtol=1e-9, err_msg=str(numbers[:5]))


@pytest.mark.parametrize("table", TABLES)
def test_the_fits_of_a_recorded_table_have_short_descriptions(
    table: str, recorded: Recorded
) -> None:
    longest = max(recorded, key=lambda one: one[2]["bytes"].nunique())[:2]
    for name, key, rows in recorded:
        if name != table:
            continue
        forms = [*SIMPLE_FIRST, "auto"] if (name, key) == longest else ["segments", "table"]
        for form in forms:
            description = fit(form, rows["bytes"], rows["seconds"]).to_dict()
            text = json.dumps(description)
            assert len(text) < MOST_BYTES, (key, form)
            cost, draws = costs_from_dict(json.loads(text))
            assert len(draws) == 200
            size = min(1e6, float(rows["bytes"].max()))  # beyond what was measured nothing is asked
            low, high = np.quantile([draw(size) for draw in draws], [0.025, 0.975])
            assert 0.2 * cost(size) < low <= high < 5 * cost(size)


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.name.split(".")[0])
def test_the_fit_of_a_log_has_a_short_description_that_says_each_thing_once(path: Path) -> None:
    sizes, seconds, _ = messages.read_bytes_seconds(path)
    for form in SIMPLE_FIRST:
        description = fit(form, sizes, seconds).to_dict()
        assert len(json.dumps(description)) < MOST_BYTES
        names = [*description, *description["fit"], *description["fit"]["held_out"]]
        twice = {name for name in names if names.count(name) > 1}
        assert twice <= {"form", "draws"}  # of the cost, and as it was asked for
        edges = description["fit"]["from_bytes"], description["fit"]["to_bytes"]
        assert edges == (sizes.min(), sizes.max())
        assert not any("first_bytes" in name for name in names)
