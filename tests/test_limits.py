"""What a file may stand for: documents, numbers, lines and outputs stay within what can be held and meant."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlkit import cli, store
from ddlkit.core import plan
from ddlkit.core.cost import Table
from ddlkit.core.errors import MOST_CHARACTERS, UserError, one_line
from ddlkit.core.workload import Workload
from ddlkit.store import files
from fuzzing import SPANS

TRACED = "0 conv 20 40 50 4000\n1 fc 10 25 70 8000\n"


@given(st.integers(2, 9), st.integers(2, 9))
def test_an_alias_counts_as_all_that_it_stands_for(width: int, levels: int) -> None:
    pairs = zip(range(levels - 1), range(1, levels), strict=True)
    lines = [f"{to}: &a{to} [{','.join([f'*a{of}'] * width)}]" for of, to in pairs]
    text = "\n".join([f"0: &a0 [{','.join('x' * width)}]", *lines])
    values = (
        sum(1 + sum(width**k for k in range(level + 2)) for level in range(levels)) + 1
    )
    if values <= files.MOST_YAML_VALUES:
        assert len(files.parse_yaml(text)) == levels
    else:
        with pytest.raises(ValueError, match="with its aliases"):
            files.parse_yaml(text)


@given(st.text(st.characters(), max_size=3000) | st.text("a\n\x1b\u2028", min_size=500))
def test_an_error_is_one_printable_line_whatever_is_put_into_it(text: str) -> None:
    said = str(UserError(text))
    assert said.isprintable() and len(said) <= MOST_CHARACTERS + 40
    assert one_line(said) == said or len(said) > MOST_CHARACTERS
    if text.isprintable() and len(text) <= MOST_CHARACTERS:
        assert said == text


COST = Table(np.array([1e3, 1e5, 1e7]), np.array([1e-3, 2e-3, 8e-2]))


def workload(n: int, seed: int = 0) -> Workload:
    draw = np.random.default_rng(seed)
    return Workload.from_arrays(
        0.1, draw.exponential(1e-3, n), draw.integers(1, 10**6, n)
    )


@given(st.integers(1, 40), st.integers(1, 200), st.integers(0, 1000))
def test_the_best_plan_does_not_depend_on_how_many_groups_are_priced_at_a_time(
    n: int, at_once: int, seed: int
) -> None:
    whole = plan.exact(workload(n, seed), COST)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "AT_ONCE", at_once)
        parts = plan.exact(workload(n, seed), COST)
    assert (parts.ends, parts.least_s) == (whole.ends, whole.least_s)


def test_no_output_takes_the_place_of_a_recorded_table_or_of_its_stamp(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frame = pd.read_csv(io.StringIO(SPANS))
    recorded = store.save_table(
        frame, tmp_path, "timeline-x", schema="timeline", command=["test"]
    )
    own, trace = tmp_path / "own.csv", tmp_path / "trace.txt"
    own.write_text(SPANS)
    trace.write_text(TRACED)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for argv in (
        ["timeline", own, "--out", recorded.with_suffix(".json")],
        ["import", trace, "--out", recorded],
        ["timeline", recorded, "--out", recorded],
    ):
        assert cli.main([str(word) for word in argv]) == 2
        line = capsys.readouterr().err
        reason = "is what is read" if recorded in argv[:2] else "is a recorded table"
        assert reason in line and line.count("\n") == 1
    assert {path: path.read_bytes() for path in before} == before
