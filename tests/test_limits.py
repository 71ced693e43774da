"""What a file may stand for: documents, numbers, lines and outputs stay within what can be held and meant."""

from __future__ import annotations

import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlkit import cli, store
from ddlkit.cli.command import show
from ddlkit.core import plan
from ddlkit.core.cost import Table
from ddlkit.core.errors import MOST_CHARACTERS, UserError, one_line
from ddlkit.core.workload import MOST_TENSORS, Workload
from ddlkit.store import files
from fuzzing import SPANS, TIMES

TRACED = "0 conv 20 40 50 4000\n1 fc 10 25 70 8000\n"


# -- documents ---------------------------------------------------------------------------------

leaves = st.none() | st.booleans() | st.integers(-(10**16), 10**16) | st.floats() | st.text()
values = st.recursive(leaves, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))


@given(values)
def test_a_document_within_the_limits_is_read_as_it_was_written(value: object) -> None:
    assert repr(files.parse_json(json.dumps(value))) == repr(json.loads(json.dumps(value)))


@given(st.integers(-(10**40), 10**40))
def test_whole_numbers_that_fit_stay_whole_and_others_are_as_near_as_floats(number: int) -> None:
    for read in (files.parse_json, files.parse_yaml):
        found = read(f"[{number}]")[0]
        inside = len(str(number)) <= files.MOST_DIGITS
        assert type(found) is (int if inside else float)
        assert found == (number if inside else float(number))


@pytest.mark.parametrize("read", [files.parse_json, files.parse_yaml])
def test_as_many_levels_as_may_be_are_read_and_one_more_is_not(read: Any) -> None:
    most = files.MOST_DEPTH
    assert len(read("[" * most + "]" * most)) in (0, 1)
    with pytest.raises(ValueError, match="nested more than"):
        read("[" * (most + 1) + "]" * (most + 1))


@given(st.integers(2, 9), st.integers(2, 9))
def test_an_alias_counts_as_all_that_it_stands_for(width: int, levels: int) -> None:
    pairs = zip(range(levels - 1), range(1, levels), strict=True)
    lines = [f"{to}: &a{to} [{','.join([f'*a{of}'] * width)}]" for of, to in pairs]
    text = "\n".join([f"0: &a0 [{','.join('x' * width)}]", *lines])
    values = sum(1 + sum(width**k for k in range(level + 2)) for level in range(levels)) + 1
    if values <= files.MOST_YAML_VALUES:
        assert len(files.parse_yaml(text)) == levels
    else:
        with pytest.raises(ValueError, match="with its aliases"):
            files.parse_yaml(text)


# -- lines -------------------------------------------------------------------------------------


@given(st.text(st.characters(), max_size=3000) | st.text("a\n\x1b\u2028", min_size=500))
def test_an_error_is_one_printable_line_whatever_is_put_into_it(text: str) -> None:
    said = str(UserError(text))
    assert said.isprintable() and len(said) <= MOST_CHARACTERS + 40
    assert one_line(said) == said or len(said) > MOST_CHARACTERS
    if text.isprintable() and len(text) <= MOST_CHARACTERS:
        assert said == text


# -- numbers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, [1.0, -math.inf], {"a": [math.nan]}])
def test_no_number_that_is_none_is_printed(
    value: object, capsys: pytest.CaptureFixture[str]
) -> None:
    for as_json in (True, False):
        with pytest.raises(UserError, match="taken comes out as"):
            show({"fine": 1.0, "taken": value}, as_json)
    assert capsys.readouterr().out == ""


# -- memory ------------------------------------------------------------------------------------

COST = Table(np.array([1e3, 1e5, 1e7]), np.array([1e-3, 2e-3, 8e-2]))


def workload(n: int, seed: int = 0) -> Workload:
    draw = np.random.default_rng(seed)
    return Workload.from_arrays(0.1, draw.exponential(1e-3, n), draw.integers(1, 10**6, n))


@given(st.integers(1, 40), st.integers(1, 200), st.integers(0, 1000))
def test_the_best_plan_does_not_depend_on_how_many_groups_are_priced_at_a_time(
    n: int, at_once: int, seed: int
) -> None:
    whole = plan.exact(workload(n, seed), COST)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "AT_ONCE", at_once)
        parts = plan.exact(workload(n, seed), COST)
    assert (parts.ends, parts.least_s) == (whole.ends, whole.least_s)


def test_a_table_of_more_tensors_than_can_be_planned_is_refused() -> None:
    with pytest.raises(UserError, match=f"at most {MOST_TENSORS}"):
        workload(MOST_TENSORS + 1)


# -- what is never overwritten -----------------------------------------------------------------


def refused(argv: list[object], capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert cli.main([str(word) for word in argv]) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    return line


def test_no_output_takes_the_place_of_a_recorded_table_or_of_its_stamp(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frame = pd.read_csv(io.StringIO(SPANS))
    recorded = store.save_table(frame, tmp_path, "timeline-x", schema="timeline", command=["test"])
    own, trace = tmp_path / "own.csv", tmp_path / "trace.txt"
    own.write_text(SPANS)
    trace.write_text(TRACED)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    stamp = recorded.with_suffix(".json")
    for target in (recorded, stamp):
        assert "is a recorded table" in refused(["timeline", own, "--out", target], capsys)
    assert "is what is read" in refused(["timeline", recorded, "--out", recorded], capsys)
    assert "is a recorded table" in refused(["import", trace, "--out", recorded], capsys)
    times = tmp_path / "times.csv"
    times.write_text(f"bytes,seconds\n{TIMES}")
    drawn = ["fit", times, "--compare", "--form", "table", "--draw", recorded]
    assert "is a recorded table" in refused(drawn, capsys)
    assert {path: path.read_bytes() for path in before} == before
