"""Exercises: no answer, a right one, and wrong ones on both sides."""

from __future__ import annotations

from ddlkit.report.outputs import check


def test_an_exercise_tells_right_from_wrong_without_giving_the_answer_away() -> None:
    assert "replace None" in check(1, None, 0.5)
    assert "right" in check(1, 0.505, 0.5)
    assert "too high" in check(2, 0.6, 0.5)
    assert "too low" in check(2, 0.4, 0.5)
    assert "0.5" not in check(3, 0.4, 0.5).replace("0.4", "")
