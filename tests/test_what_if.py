"""What limits where, how much each kind of task matters, and what an upgrade gains."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import strategies as st

from ddlkit import store
from ddlkit.cli import ask
from ddlkit.core import plan as plans
from ddlkit.core.errors import UserError
from ddlkit.model import Calibration, forecast
from ddlkit.report.figures import what_if
from ddlkit.report.source import Source

positive = st.floats(0.01, 10)


def test_files_of_ones_own_predict_what_the_recording_does(tmp_path: Path) -> None:
    source = Source((store.RECORDED / "cpu-2x-amd-epyc",))
    mine = what_if.own_files(source, "resnet50", "lab:1gbit", 4, tmp_path)
    found = ask("predict --plan ddp", **mine)
    work = source.profile("resnet50").workload()
    told = Calibration.of(source.table("collectives"), draws=0).between("lab:1gbit", 4)
    expected_s = forecast(work, plans.ddp(work), told).prediction.iteration_s
    assert found["iteration_s"] == pytest.approx(expected_s, rel=2e-3)
    with pytest.raises(UserError, match="unknown plan"):
        ask("predict --plan nonsense", **mine)
    with pytest.raises(UserError, match="unrecognized arguments: --no-such"):
        ask("predict", **mine, no_such=1)
