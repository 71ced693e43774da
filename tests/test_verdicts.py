"""Claims and their checks: transcribed cleanly, computed without looking, judged by tolerance."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.report import catalog, claims, papers
from ddlkit.report.figures import osf_scaling
from ddlkit.report.papers import omgs

HEADER = "id,paper,place,quantity,relation,value,unit,tolerance,condition,figure,errata\n"
CLAIM = claims.Claim("osf-x", "osf", "Section 1", "a number", "=", 2.0, "%", 0.1, "", "", "")
INDEPENDENT = ("measured here", "counted independently")
values = st.floats(0.01, 1e6)


@pytest.fixture(scope="module")
def verdicts() -> pd.DataFrame:
    return papers.evaluate()


def test_every_check_belongs_to_a_claim() -> None:
    known = {claim.id: claim for claim in claims.load_claims()}
    assert set(claims.CHECKS) <= set(known)
    assert all(claim.id.startswith(claim.paper) for claim in known.values())


@pytest.mark.parametrize("paper", claims.PAPERS)
def test_every_claim_has_either_a_check_or_a_reason(paper: str) -> None:
    known = {claim.id for claim in claims.load_claims() if claim.paper == paper}
    waiting = claims.waiting()
    checked, excused = (
        {id for id in ids if id.startswith(paper)} for ids in (claims.CHECKS, waiting.index)
    )
    assert checked | excused == known
    assert not checked & excused
    assert waiting["why"].str.len().gt(10).all()
    planned = {entry.notebook for entry in catalog.load()}
    assert set(waiting["notebook"]) <= planned | {""}


def test_a_marked_claim_names_entries_that_exist() -> None:
    for claim in claims.load_claims():
        text = (store.DATA / "papers" / claim.paper / "errata.md").read_text(encoding="utf-8")
        numbers = re.findall(r"^(?:## )?(\d+)\. ", text, re.MULTILINE)
        assert set(claim.errata.split()) <= set(numbers), claim.id


def errata_of(paper: str) -> dict[str, str]:
    """Number -> verdict, in lower case, of each entry of a paper's errata."""
    text = (store.DATA / "papers" / paper / "errata.md").read_text(encoding="utf-8")
    parts = re.split(r"^(?:## )?(\d+)\. ", text, flags=re.MULTILINE)[1:]
    verdict = re.compile(r"\*(proven|refuted|cannot\s+be\s+decided)", re.IGNORECASE)
    found = (
        (number, verdict.search(body)) for number, body in zip(parts[::2], parts[1::2], strict=True)
    )
    return {number: match[1].split()[0].lower() for number, match in found if match}


def test_verdicts_and_errata_say_the_same(verdicts: pd.DataFrame) -> None:
    """What the paper's own numbers or a count refute is a proven erratum; a refuted one marks what agrees."""
    known = {paper: errata_of(paper) for paper in claims.PAPERS}
    for row in verdicts.itertuples():
        marks = {known[row.paper][number] for number in row.errata.split()}
        certain = row.evidence in ("counted independently", "the paper's own numbers", "bound")
        if certain and row.outcome in ("differs", "contradicted"):
            assert "proven" in marks, row.id
        if marks == {"refuted"}:
            assert row.outcome in ("reproduced", "compatible", "open"), row.id


def test_checks_do_not_depend_on_the_claimed_value(verdicts: pd.DataFrame) -> None:
    shifted = [replace(one, value=3 * one.value + 17) for one in claims.load_claims()]
    found = papers.evaluate(shifted)
    assert found[["id", "low", "high"]].equals(verdicts[["id", "low", "high"]])
    equal = (found["relation"] == "=") & (found["low"] == found["high"])
    assert not found["outcome"][equal].isin(["reproduced", "compatible"]).any()


def test_two_messages_are_compared_with_one_only_where_both_profit_alike() -> None:
    """The lab's shaper lets a sample's first bytes through: samples of unlike length prove nothing there."""
    sizes, messages, seconds = [1, 2, 4, 8], [16, 16, 8, 2], [1.0, 3.0, 5.0, 4.0]
    rows = pd.DataFrame({"bytes": sizes, "messages_per_sample": messages, "seconds": seconds})
    rows = rows.assign(collective="all_gather", link="lab:a", ranks=4)
    assert omgs._doubled(rows, as_many_bytes=True).to_dict() == {2: 6 / 5}
    assert omgs._doubled(rows).to_dict() == {1: 2 / 3, 2: 6 / 5, 4: 10 / 4}


def test_what_osf_states_is_what_its_claims_accept() -> None:
    """One number in one place: a tolerance or a threshold changes in claims.csv, and the search with it."""
    known = {one.id: one for one in claims.load_claims()}
    stated = {one.name: one for one in osf_scaling.stated()}
    low, high = known["osf-fig04b-unchanged"].accepted
    assert stated["VGG-16: change up to 100 MB"].low == pytest.approx(low - 1)
    assert stated["VGG-16: change up to 100 MB"].high == pytest.approx(high - 1)
    assert stated["ResNets: CSF above SF"].low == pytest.approx(0.01)
    assert stated["ResNet-101: CSF below at 100 MB, 1 GB"].low == -math.inf
    table = pd.read_csv(osf_scaling.__file__.replace("scaling.py", "stated.csv"), comment="#")
    assert set(table["claim"]) <= set(known) and table["tolerance"].notna().sum() == 1


@given(values, st.floats(0, 0.5), st.floats(-1, 1), st.sampled_from(claims.RELATIONS))
def test_a_number_agrees_within_the_tolerance_on_the_side_that_counts(
    value: float, tolerance: float, shift: float, relation: str
) -> None:
    claim = replace(CLAIM, value=value, tolerance=tolerance, relation=relation)
    outcome = claim.outcome(claims.counted(value * (1 + shift), "a count"))
    if abs(abs(shift) - tolerance) > 1e-9:
        off = {"=": abs(shift), "<=": shift, ">=": -shift}[relation]
        assert (outcome == "reproduced") == (off < tolerance)
    assert claim.outcome(claims.own(value, value, "itself")) == "compatible"
    assert claim.outcome(None) == "open"


@given(values, st.floats(0, 0.5), st.lists(values, min_size=1, max_size=4))
def test_a_range_need_only_meet_the_print_unless_it_was_measured(
    value: float, tolerance: float, seen: list[float]
) -> None:
    claim = replace(CLAIM, value=value, tolerance=tolerance)
    alone = [claim.outcome(claims.counted(one, "alone")) == "reproduced" for one in seen]
    together = claim.outcome(claims.measured(seen, "recorded", "all"))
    assert (together == "reproduced") == all(alone)
    model = claims.Result(claims.Evidence.MODEL, min(seen), max(seen), "between")
    if any(alone) or min(seen) <= value <= max(seen):
        assert claim.outcome(model) == "compatible"


@given(values, values)
def test_a_bound_contradicts_only_what_lies_beyond_it(value: float, bound: float) -> None:
    claim = replace(CLAIM, value=value, tolerance=0)
    if not math.isclose(value, bound, rel_tol=1e-9):
        assert (claim.outcome(claims.at_least(bound, "b")) == "compatible") == (value > bound)
        assert (claim.outcome(claims.at_most(bound, "b")) == "compatible") == (value < bound)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((claims.Evidence.COUNTED, 2.0, 1.0, "n"), "from 2.0 to 1.0"),
        ((claims.Evidence.COUNTED, math.nan, math.nan, "n"), "no NaN"),
        ((claims.Evidence.COUNTED, 1.0, 1.0, "n", "recorded"), "of grade 'recorded'"),
        ((claims.Evidence.MEASURED, 1.0, 1.0, "n"), "of grade ''"),
    ],
)
def test_a_result_that_says_nothing_is_one_error(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(UserError, match=message):
        claims.Result(*arguments)


def test_the_counts_by_evidence_add_up_and_measurements_come_first(verdicts: pd.DataFrame) -> None:
    table = papers.counts(verdicts)
    assert table.index[0] == "measured here" and table.loc["all", "all"] == len(verdicts)
    inner = table.drop(index="all", columns="all")
    assert inner.sum().sum() == len(verdicts)
    numbers = papers.key_numbers(verdicts)
    assert numbers["claims"] == len(verdicts) == sum(numbers.values()) - numbers["claims"]
    lines = papers.counts_markdown(verdicts).splitlines()
    assert lines[2].startswith("| measured here |") and lines[-1].startswith("| all |")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("osf-a,osf,Section 1,a,=,fast,%,0.1,,,", "line 2, column value: 'fast' is not a number"),
        ("osf-a,osf,Section 1,a,=,1,%,nan,,,", "line 2, column tolerance: 'nan'"),
        ("osf-a,osf,Section 1,a,=,-1,%,0.1,,,", "line 2, column value: '-1'"),
        ("osf-a,osf,,a,=,1,%,0.1,,,", "line 2, column place: '' must not be empty"),
        ("osf-a,dag,Section 1,a,=,1,%,0.1,,,", "line 2, column paper: is 'dag'"),
        ("osf-a,osf,S,a,~,1,%,0.1,,,", "line 2, column relation: is '~': use one of =, <=, >="),
        ("osf-a,osf,Section 1,a,=,1,%,0.1", "line 2, column condition: the row has 8"),
        ("osf-a,osf,Section 1,a,=,1,%,0.1,,,,x", "line 2, column errata: the row has 12"),
        (
            "osf-a,osf,S,a,=,1,%,0.1,,,\nosf-a,osf,S,a,=,1,%,0.1,,,",
            "line 3, column id: repeats the row at line 2",
        ),
    ],
)
def test_a_damaged_claims_file_is_one_error(tmp_path: Path, row: str, message: str) -> None:
    for paper in claims.PAPERS:
        (tmp_path / paper).mkdir()
        (tmp_path / paper / "claims.csv").write_text(
            HEADER + (row + "\n" if paper == "osf" else "")
        )
    with pytest.raises(UserError, match=message):
        claims.load_claims(tmp_path)


def test_missing_files_and_columns_are_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"cannot read .*claims\.csv"):
        claims.load_claims(tmp_path)
    (tmp_path / "osf").mkdir()
    (tmp_path / "osf" / "claims.csv").write_text("id,value\nosf-a,1\n")
    with pytest.raises(UserError, match="column paper: missing"):
        claims.load_claims(tmp_path)
    monkeypatch.setattr(store, "DATA", tmp_path)
    with pytest.raises(UserError, match=r"cannot read .*tab99\.csv"):
        claims.paper_table("osf", "tab99")
