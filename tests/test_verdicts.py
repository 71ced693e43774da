"""Claims and their checks: transcribed cleanly, computed without looking, judged by tolerance."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.report import catalog, claims, papers
from ddlkit.report.figures import osf_scaling
from ddlkit.report.papers import omgs

CLAIM = claims.Claim("osf-x", "osf", "Section 1", "a number", "=", 2.0, "%", 0.1, "", "", "")
values = st.floats(0.01, 1e6)


@pytest.fixture(scope="module")
def verdicts() -> pd.DataFrame:
    return papers.evaluate()


def test_every_claim_has_either_a_check_or_a_reason() -> None:
    listed, waiting = claims.load_claims(), claims.waiting()
    assert {*claims.CHECKS, *waiting.index} == {claim.id for claim in listed}
    assert not {*claims.CHECKS} & {*waiting.index}
    assert all(claim.id.startswith(claim.paper) for claim in listed)
    assert {claim.paper for claim in listed} == {*claims.PAPERS}
    assert {claim.relation for claim in listed} <= {*claims.RELATIONS}
    assert len({claim.id for claim in listed}) == len(listed)
    assert all(claim.place and claim.value + claim.tolerance >= 0 for claim in listed)
    assert waiting["why"].str.len().gt(10).all()
    assert set(waiting["notebook"]) <= {entry.notebook for entry in catalog.load()} | {""}


def errata_of(paper: str) -> dict[str, str]:
    """Number -> verdict, in lower case or "", of each entry of a paper's errata."""
    text = (store.DATA / "papers" / paper / "errata.md").read_text(encoding="utf-8")
    parts = re.split(r"^(?:## )?(\d+)\. ", text, flags=re.MULTILINE)[1:]
    verdict = re.compile(r"\*(proven|refuted|cannot\s+be\s+decided)", re.IGNORECASE)
    matches = [verdict.search(body) for body in parts[1::2]]
    words = [match[1].split()[0].lower() if match else "" for match in matches]
    return dict(zip(parts[::2], words, strict=True))


def test_verdicts_and_errata_say_the_same(verdicts: pd.DataFrame) -> None:
    """What the paper's own numbers or a count refute is a proven erratum; a refuted one marks what agrees."""
    errata = {paper: errata_of(paper) for paper in claims.PAPERS}
    for row in verdicts.itertuples():
        marks = {errata[row.paper][number] for number in row.errata.split()}
        certain = row.evidence in ("counted independently", "the paper's own numbers", "bound")
        if certain and row.outcome in ("differs", "contradicted"):
            assert "proven" in marks, row.id
        if marks == {"refuted"}:
            assert row.outcome in ("reproduced", "compatible", "open"), row.id


def test_checks_do_not_depend_on_the_claimed_value(verdicts: pd.DataFrame) -> None:
    shifted = [replace(claim, value=3 * claim.value + 17) for claim in claims.load_claims()]
    again = papers.evaluate(shifted)
    assert again[["id", "low", "high"]].equals(verdicts[["id", "low", "high"]])
    equal = (again["relation"] == "=") & (again["low"] == again["high"])
    assert not again["outcome"][equal].isin(["reproduced", "compatible"]).any()


def test_two_messages_are_compared_with_one_only_where_both_profit_alike() -> None:
    """The lab's shaper lets a sample's first bytes through: samples of unlike length prove nothing there."""
    sizes, messages, seconds = [1, 2, 4, 8], [16, 16, 8, 2], [1.0, 3.0, 5.0, 4.0]
    rows = pd.DataFrame({"bytes": sizes, "messages_per_sample": messages, "seconds": seconds})
    rows = rows.assign(collective="all_gather", link="lab:a", ranks=4)
    assert omgs.doubled(rows, as_many_bytes=True).to_dict() == {2: 6 / 5}
    assert omgs.doubled(rows).to_dict() == {1: 2 / 3, 2: 6 / 5, 4: 10 / 4}


def test_what_osf_states_is_what_its_claims_accept() -> None:
    """One number in one place: a tolerance or a threshold changes in claims.csv, and the search with it."""
    by_id = {claim.id: claim for claim in claims.load_claims()}
    stated = {statement.name: statement for statement in osf_scaling.stated()}
    low, high = by_id["osf-fig04b-unchanged"].accepted
    change = stated["VGG-16: change up to 100 MB"]
    assert (change.low, change.high) == pytest.approx((low - 1, high - 1))
    assert stated["ResNet-101: CSF below at 100 MB, 1 GB"].low == -math.inf


@given(values, st.floats(0, 0.5), st.floats(-1, 1), st.sampled_from(claims.RELATIONS))
def test_a_number_agrees_within_the_tolerance_on_the_side_that_counts(
    value: float, tolerance: float, shift: float, relation: str
) -> None:
    claim = replace(CLAIM, value=value, tolerance=tolerance, relation=relation)
    outcome = claim.outcome(claims.counted(value * (1 + shift), "a count"))
    if abs(abs(shift) - tolerance) > 1e-9:
        off = {"=": abs(shift), "<=": shift, ">=": -shift}[relation]
        assert (outcome == "reproduced") == (off < tolerance)
    assert claim.outcome(claims.own(value, "itself")) == "compatible"
    assert claim.outcome(None) == "open"


@given(values, st.floats(0, 0.5), st.lists(values, min_size=1, max_size=4))
def test_a_range_need_only_meet_the_print_unless_it_was_measured(
    value: float, tolerance: float, seen: list[float]
) -> None:
    claim = replace(CLAIM, value=value, tolerance=tolerance)
    alone = [claim.outcome(claims.counted(each, "alone")) == "reproduced" for each in seen]
    together = claim.outcome(claims.measured(seen, "all", "recorded"))
    assert (together == "reproduced") == all(alone)
    if any(alone) or min(seen) <= value <= max(seen):
        assert claim.outcome(claims.modelled(seen, "between")) == "compatible"


@given(values, values)
def test_a_bound_contradicts_only_what_lies_beyond_it(value: float, bound: float) -> None:
    claim = replace(CLAIM, value=value, tolerance=0)
    if not math.isclose(value, bound, rel_tol=1e-9):
        assert (claim.outcome(claims.at_least(bound, "b")) == "compatible") == (value > bound)
        assert (claim.outcome(claims.at_most(bound, "b")) == "compatible") == (value < bound)


def test_the_counts_by_evidence_add_up_and_measurements_come_first(verdicts: pd.DataFrame) -> None:
    with pytest.raises(ValueError, match="no NaN"):
        claims.counted([1.0, math.nan], "n")
    table, numbers = papers.counts(verdicts), papers.key_numbers(verdicts)
    assert table.index[0] == "measured here" and table.loc["all", "all"] == len(verdicts)
    assert table.drop(index="all", columns="all").sum().sum() == len(verdicts)
    assert numbers["claims"] == len(verdicts) == sum(numbers.values()) - numbers["claims"]


def test_a_missing_table_is_one_error() -> None:
    with pytest.raises(UserError, match=r"cannot read .*tab99\.csv"):
        claims.paper_table("osf", "tab99")
