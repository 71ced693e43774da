"""The toy with its numbers to move: what sliders would show is what the package computes."""

from __future__ import annotations

import inspect
import subprocess
import sys
import types
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlkit.core.iteration import predict
from ddlkit.model import make_plan
from ddlkit.report import outputs, sliders

SETTINGS = tuple(
    st.sampled_from([low, first, high]) if name == "buffer_bytes" else st.floats(low, high)
    for name, (_, first, low, high, _) in sliders.RANGES.items()
)


@given(*SETTINGS)
def test_wherever_sliders_stand_the_toy_is_the_packages_and_no_plan_beats_the_best(
    alpha_s: float, beta_s_per_byte: float, compute: float, buffer_bytes: int
) -> None:
    found = sliders.toy(alpha_s, beta_s_per_byte, compute, buffer_bytes)
    assert found.prediction.compute_s == pytest.approx(9 * compute)
    best = predict(found.workload, make_plan("exact", found.workload, found.cost), found.cost)
    assert best.iteration_s <= found.prediction.iteration_s * (1 + 1e-9)
    said = sliders.told(alpha_s, beta_s_per_byte, compute, buffer_bytes)
    assert f"iteration {found.prediction.iteration_s:.2f} s" in said
    assert f"best plan {best.iteration_s:.2f} s" in said


def test_the_sliders_stand_at_the_toy_that_is_worked_out_on_paper() -> None:
    assert [first for _, first, *_ in sliders.RANGES.values()] == [0.5, 0.02, 1.0, 100]
    assert sliders.toy(0.5, 0.02, 1.0, 100).prediction.iteration_s == 12.5
    assert sliders.toy(0.5, 0.02, 1.0, 300).prediction.iteration_s == 15.5


def test_a_book_has_one_line_where_sliders_would_stand(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(outputs.REPORTS_VARIABLE, "elsewhere")
    sliders.show()
    assert capsys.readouterr().out.count("\n") == 1


WITHOUT = """
import sys
sys.modules["ipywidgets"] = None
import IPython
from ddlkit.report import sliders
sliders.show()
"""


def test_without_ipywidgets_it_is_one_line_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(outputs.REPORTS_VARIABLE, raising=False)
    done = subprocess.run([sys.executable, "-c", WITHOUT], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.count("\n") == 1 and "pip install ipywidgets" in done.stdout


def test_there_is_a_slider_for_each_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """ipywidgets is in no environment of the tests: a recorder notes what it is asked for."""
    pytest.importorskip("IPython")
    recorder = types.ModuleType("ipywidgets")
    made: dict[str, Any] = {}
    recorder.FloatSlider = recorder.IntSlider = lambda **told: told  # type: ignore[attr-defined]
    recorder.interact = lambda draw, **given: made.update(given, draw=draw)  # type: ignore[attr-defined]
    monkeypatch.delenv(outputs.REPORTS_VARIABLE, raising=False)
    monkeypatch.setitem(sys.modules, "ipywidgets", recorder)
    sliders.show()
    assert made.pop("draw") is sliders.draw
    assert {*made} == {*inspect.signature(sliders.toy).parameters} == {*sliders.RANGES}
    for name, (said, first, low, high, step) in sliders.RANGES.items():
        told = {"description": said, "value": first, "min": low, "max": high, "step": step}
        assert made[name] == told and low <= first <= high
