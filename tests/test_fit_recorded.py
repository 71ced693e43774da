"""Fits of what was recorded: the same numbers as when it was judged, in descriptions of a few pages."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ddlkit import store
from ddlkit.core.fit import fit

KEYS = ["link", "ranks", "collective"]
KEPT = pd.read_csv(Path(__file__).with_name("recorded_fits.csv"))


def recorded(name: str) -> pd.DataFrame:
    """Rows of a recorded table that were sent one by one."""
    frame = store.load_table(store.RECORDED / name, "collectives")
    return frame[(frame["ranks"] > 1) & (frame["in_flight"] == 1)]


@pytest.mark.parametrize("table", KEPT["table"].unique())
def test_recorded_calibrations_are_fitted_as_when_they_were_judged(table: str) -> None:
    """recorded_fits.csv was written by the program of 2026-11-22: fits and draws of repeats stay."""
    for key, rows in recorded(table).groupby(KEYS):
        at = np.geomspace(rows["bytes"].min(), rows["bytes"].max(), 7)[[0, 3, 6]]
        wanted = KEPT[(KEPT["table"] == table) & (KEPT[KEYS] == list(key)).all(axis=1)]
        assert len(wanted) == 4
        for numbers in wanted.itertuples(index=False):
            fitted = fit(numbers.form, rows["bytes"], rows["seconds"], draws=20)
            computed = np.concatenate([fitted.cost(at), *fitted.interval(at)])
            np.testing.assert_allclose(computed, numbers[5:], rtol=1e-9, err_msg=str(numbers[:5]))
