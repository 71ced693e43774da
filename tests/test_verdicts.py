"""Claims and their checks: transcribed cleanly, computed without looking, judged by tolerance."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.report import catalog, claims, papers

HEADER = "id,paper,place,quantity,value,unit,tolerance,condition,figure\n"
CLAIM = claims.Claim("osf-x", "osf", "Section 1", "a number", 2.0, "%", 0.1, "", "")


def test_all_four_papers_have_attempted_claims() -> None:
    frame = papers.evaluate()
    tried = frame[frame["verdict"] != "not attempted"]
    assert len(tried) >= 12
    assert set(tried["paper"]) == set(claims.PAPERS)
    assert sum(papers.counts(frame).values()) == len(frame)
    assert (tried["note"].str.len() > 0).all()
    assert tried["computed"].notna().all()


def test_every_check_belongs_to_a_claim_and_every_claim_to_the_catalog() -> None:
    known = {claim.id: claim for claim in claims.load_claims()}
    assert set(claims.CHECKS) <= set(known)
    listed = {entry.id: set(entry.claims) for entry in catalog.load()}
    for claim in known.values():
        assert claim.id.startswith(claim.paper)
        assert not claim.figure or claim.id in listed[claim.figure]
    assert {id for ids in listed.values() for id in ids} == {
        c.id for c in known.values() if c.figure
    }


@pytest.mark.parametrize("paper", claims.PAPERS)
def test_every_claim_has_either_a_check_or_a_reason(paper: str) -> None:
    known = {claim.id for claim in claims.load_claims() if claim.paper == paper}
    reasons = claims.reasons()
    checked, excused = (
        {id for id in ids if id.startswith(paper)} for ids in (claims.CHECKS, reasons)
    )
    assert checked | excused == known
    assert not checked & excused
    assert all(reasons[id] for id in excused)


def test_checks_do_not_depend_on_the_claimed_value() -> None:
    printed = claims.load_claims()
    shifted = papers.evaluate([replace(claim, value=3 * claim.value + 17) for claim in printed])
    assert shifted["computed"].equals(papers.evaluate(printed)["computed"])
    assert not shifted["verdict"].eq("reproduced").any()


def test_known_results() -> None:
    frame = papers.evaluate().set_index("id")
    expected = {
        "osf-sf-example": (0.9, "reproduced"),
        "osf-eq8-limit": (9 / 7, "differs"),
        "osf-fig11-constant-max": (200 / 3, "differs"),
        "osf-below-bdp": (66.2, "differs"),
        "sharing-best-gain": (17.18, "reproduced"),
        "dag-efficiency": (9.636, "reproduced"),
        "dag-tab4-alexnet": (60.965224, "reproduced"),
        "omgs-tab5-mgs-resnet50": (53, "reproduced"),
        "omgs-tab6-s2-lstm": (1.04367, "differs"),
    }
    for claim, (computed, verdict) in expected.items():
        assert frame.loc[claim, "computed"] == pytest.approx(computed, rel=1e-3), claim
        assert frame.loc[claim, "verdict"] == verdict, claim
    assert "237 s" in frame.loc["omgs-gamma", "note"]


def test_all_28_gains_of_sharing_table_2_follow_from_figure_8_within_rounding() -> None:
    rows = claims.paper_table("sharing", "fig08")
    grid = rows.filter(regex=r"^\d+x\d+$")
    best, default = grid.max(axis=1), grid["2x256"]
    least = 100 * ((best - 0.5) / (default + 0.5) - 1) - 0.05
    most = 100 * ((best + 0.5) / (default - 0.5) - 1) + 0.05
    assert len(rows) == 28
    assert rows["speedup_percent"].between(least, most).all()


def test_dag_table_6_is_the_grouped_alexnet() -> None:
    sizes = claims.paper_table("dag", "tab06")["size_bytes"]
    shapes = [(96, 3 * 121), (256, 48 * 25), (384, 256 * 9), (384, 192 * 9), (256, 192 * 9)]
    shapes += [(4096, 9216), (4096, 4096), (1000, 4096)]
    assert sizes[sizes > 0].tolist() == [4 * (out * inputs + out) for out, inputs in shapes]


@given(st.floats(0.01, 1e6), st.floats(0, 0.5), st.floats(-1, 1))
def test_verdict_is_the_tolerance(value: float, tolerance: float, shift: float) -> None:
    claim = replace(CLAIM, value=value, tolerance=tolerance)
    computed = value * (1 + shift)
    verdict = claim.verdict(computed)
    if abs(abs(shift) - tolerance) > 1e-9:
        assert (verdict == "reproduced") == (abs(shift) < tolerance)
    assert claim.verdict(None) == "not attempted"
    assert claim.verdict(value) == "reproduced"


def test_a_check_that_fails_to_compute_is_not_a_reproduction() -> None:
    assert CLAIM.verdict(math.nan) == "differs"


def test_markdown_names_every_claim_with_attempted_ones_first() -> None:
    frame = papers.evaluate()
    lines = papers.markdown(frame).splitlines()
    assert len(lines) == len(frame) + 2
    assert {line.split(" | ")[0].lstrip("| ") for line in lines[2:]} == set(frame["id"])
    untried = ["not attempted" in line for line in lines[2:]]
    assert untried == sorted(untried)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("osf-a,osf,Section 1,a,fast,%,0.1,,", "line 2, column value: 'fast' is not a number"),
        ("osf-a,osf,Section 1,a,1,%,nan,,", "line 2, column tolerance: 'nan'"),
        ("osf-a,osf,Section 1,a,-1,%,0.1,,", "line 2, column value: '-1'"),
        ("osf-a,osf,,a,1,%,0.1,,", "line 2, column place: '' must not be empty"),
        ("osf-a,dag,Section 1,a,1,%,0.1,,", "line 2, column paper: is 'dag'"),
        ("osf-a,osf,Section 1,a,1,%,0.1", "line 2, column condition: the row has 7"),
        ("osf-a,osf,Section 1,a,1,%,0.1,,,x", "line 2, column figure: the row has 10"),
        (
            "osf-a,osf,S,a,1,%,0.1,,\nosf-a,osf,S,a,1,%,0.1,,",
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
