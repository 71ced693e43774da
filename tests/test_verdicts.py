"""Claims and their checks: transcribed cleanly, computed without looking, judged by tolerance."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gpu_recording
from workbook.common import catalog, claims, places, source, specs
from workbook.dag import settings as dag
from workbook.omgs import claims as omgs
from workbook.osf import fig11
from workbook.osf import settings as osf
from workbook.site import verdicts as papers

CLAIM = claims.Claim(
    "osf-x", "osf", "Section 1", "a number", "=", 2.0, "%", 0.1, "", "", ""
)
values = st.floats(0.01, 1e6)


GATE = Path(__file__).with_name("gate.csv")
"""What came out of every claim before."""


@pytest.fixture(scope="module")
def verdicts() -> pd.DataFrame:
    return papers.evaluate()


@pytest.mark.slow
def test_claims_come_out_as_they_did(verdicts: pd.DataFrame) -> None:
    """A change of the code's form may not move what is said of a paper."""
    before = pd.read_csv(GATE).set_index("id").sort_index()
    now = verdicts.set_index("id").sort_index()
    new = now.loc[now.index.difference(before.index), ["low", "high", "outcome"]]
    rows = new.to_csv(header=False, float_format="%.6g")
    assert new.empty, f"append the new claims to tests/gate.csv:\n{rows}"
    assert before["outcome"].to_dict() == now["outcome"].to_dict()
    for end in ("low", "high"):
        assert before[end].tolist() == pytest.approx(
            now[end].tolist(), rel=1e-5, nan_ok=True
        )


def test_every_claim_has_either_a_check_or_a_reason() -> None:
    listed, without_check = claims.load_claims(), claims.without_check()
    assert {*claims.CHECKS, *without_check.index} == {claim.id for claim in listed}
    assert not {*claims.CHECKS} & {*without_check.index}
    assert {*without_check["outcome"]} == {"open", "not testable here"}
    assert {claim.paper for claim in listed} == {*claims.PAPERS}
    assert {claim.relation for claim in listed} <= {*claims.RELATIONS}
    assert len({claim.id for claim in listed}) == len(listed)
    notebooks = {entry.notebook for entry in catalog.load()}
    assert set(without_check["notebook"]) <= notebooks | {""}


def test_the_claims_that_a_recording_may_move_are_those_that_are_measured(
    verdicts: pd.DataFrame,
) -> None:
    """Of these alone a test asks whether a recording of a GPU moves them."""
    is_measured = verdicts["evidence"] == claims.Evidence.MEASURED
    assert {*verdicts["id"][is_measured]} == gpu_recording.MEASURED_CLAIMS


def test_what_readers_see_is_written_once_and_read_back_unchanged(
    verdicts: pd.DataFrame, tmp_path: Path
) -> None:
    """Every claim has a line, and requirements stand apart from what papers claim."""
    papers.publish(verdicts, tmp_path)
    read = papers.published(tmp_path)
    both = pd.concat(read.values(), ignore_index=True)
    assert sorted(both["id"]) == sorted(verdicts["id"])
    told = pd.DataFrame([papers.told(row) for row in papers.shown(verdicts)])
    by_id = both.set_index("id")
    pd.testing.assert_frame_equal(by_id.loc[told["id"]], told.set_index("id"))
    of_papers = read[papers.FILE]
    assert len(of_papers) == papers.by_paper(of_papers).loc["all", "all"]
    assert not of_papers["id"].str.startswith("pytorch").any()
    assert set(read[papers.REQUIREMENTS_FILE]["outcome"]) <= {"met", "missed"}


# -- lines ----------------------------------------------------------------------------------------


def test_every_claim_has_a_line_that_tells_its_outcome(verdicts: pd.DataFrame) -> None:
    told = claims.lines()["outcome"].to_dict()
    assert told == verdicts.set_index("id")["outcome"].map(str).to_dict()
    published = papers.published(places.REPORTS)
    for lines in published.values():
        for row in lines.itertuples():
            assert row.outcome.lower() in row.sentence.lower(), row.id
            assert (row.sentence, row.how) == tuple(
                claims.lines().loc[row.id, ["sentence", "how"]]
            )


def test_a_line_is_short_and_has_no_field_names() -> None:
    lines = claims.lines()
    words = lines["sentence"].str.split().str.len()
    assert words.max() <= 30, lines.index[words > 30].tolist()
    texts = lines["sentence"] + " " + lines["how"]
    assert not texts.str.contains("_").any()
    for column in ("sentence", "how"):
        assert lines[column].str.endswith(".").all()
    assert not lines["sentence"].duplicated().any()


def test_a_line_has_only_numbers_of_its_claim_and_its_check(
    verdicts: pd.DataFrame,
) -> None:
    """With other recordings, a written number that is no longer computed is found."""
    lines = claims.lines()
    for row in papers.shown(verdicts):
        for text in lines.loc[row["id"], ["sentence", "how"]]:
            assert not papers.unsupported_numbers(row, text), row["id"]


def test_a_line_of_another_outcome_only_has_the_numbers(verdicts: pd.DataFrame) -> None:
    row = papers.shown(verdicts[verdicts["id"] == "osf-tab2-vgg16-size"])[0]
    written = papers.told(row)["sentence"]
    turned = papers.told({**row, "outcome": "differs"})
    assert turned["sentence"] != written and row["printed"] in turned["sentence"]


# -- rules ----------------------------------------------------------------------------------------


def test_what_is_repeated_is_judged_by_another_line(verdicts: pd.DataFrame) -> None:
    """A sentence, or an equation of printed numbers, has one line that counts."""
    repeats = claims.repeats()
    outcomes = verdicts.set_index("id")["outcome"]
    assert repeats.index.is_unique and set(repeats["why"]) <= {"sentence", "identity"}
    assert not set(repeats.index) & set(repeats["judged_by"])
    assert set(outcomes[repeats.index]) == {"not testable here"}
    for judged_by in repeats["judged_by"]:
        assert outcomes[judged_by] not in ("not testable here", "open")
    told = claims.lines()["sentence"]
    for claim, judged_by in repeats["judged_by"].items():
        assert judged_by in told[claim]


@given(values, values, values)
def test_a_bound_that_excludes_nothing_supports_nothing(
    value: float, low: float, width: float
) -> None:
    """Only a bound that begins above zero can be met by merit; any can be missed."""
    claim = replace(CLAIM, value=value, tolerance=0.0)
    bounds = (
        replace(claims.at_most(low, "b"), spans=np.array([[0.0, low]])),
        claims.at_most(low, "b"),
    )
    for bound in bounds:
        outcome = claim.verdict(bound).outcome
        assert outcome == ("contradicted" if value > low else "not testable here")
    above = replace(claims.at_least(low, "b"), spans=np.array([[low, low + width]]))
    expected = low <= value <= low + width
    if not math.isclose(value, low) and not math.isclose(value, low + width):
        assert claim.verdict(above).outcome == (
            "compatible" if expected else "contradicted"
        )


def test_no_bound_that_begins_at_zero_is_called_compatible(
    verdicts: pd.DataFrame,
) -> None:
    bounds = verdicts[(verdicts["evidence"] == "bound") & (verdicts["low"] <= 0)]
    assert len(bounds)
    assert not (bounds["outcome"] == "compatible").any()


@given(values, st.floats(0, 0.5), st.lists(values, min_size=1, max_size=4))
def test_readings_that_disagree_leave_a_sentence_undecided(
    value: float, tolerance: float, seen: list[float]
) -> None:
    """Whatever the evidence, a sentence has an outcome only if all readings give it."""
    claim = replace(CLAIM, value=value, tolerance=tolerance)
    for evidence in (claims.own, claims.counted):
        readings = {str(k): evidence(number, "") for k, number in enumerate(seen)}
        alone = {claim.verdict(result).outcome for result in readings.values()}
        together = claim.verdict(claims.by_readings(readings)).outcome
        assert together == (alone.pop() if len(alone) == 1 else "undecided")


@given(values, st.lists(values, min_size=1, max_size=6))
def test_a_range_over_cases_is_no_range_of_uncertainty(
    value: float, seen: list[float]
) -> None:
    """A number between the cases agrees with none of them, and half of them must agree."""
    claim = replace(CLAIM, value=value, tolerance=0.1)
    agrees = [claim.accepted[0] <= number <= claim.accepted[1] for number in seen]
    share = sum(agrees) / len(agrees)
    expected = "contradicted" if not share else "undecided"
    if share >= 0.5:
        expected = "compatible"
    assert claim.verdict(claims.by_cases(seen, "")).outcome == expected


@given(st.integers(1, 999), st.floats(-1.5, 1.5))
def test_a_number_may_be_rounded_or_cut_off(printed: int, shift: float) -> None:
    claim = replace(CLAIM, value=float(printed), tolerance=0.5 / printed)
    outcome = claim.verdict(claims.rounded_or_cut_off(claims.own(printed + shift, "")))
    if min(abs(shift - end) for end in (-0.5, 0, 0.5, 1)) > 1e-6:
        rounded, cut_off = abs(shift) < 0.5, 0 < shift < 1
        expected = "compatible" if rounded else "contradicted"
        assert outcome.outcome == (expected if rounded == cut_off else "undecided")


def errata_of(paper: str) -> dict[str, str]:
    """Number -> verdict, in lower case or "", of each entry of a paper's errata."""
    text = (places.DATA / "papers" / paper / "errata.md").read_text(encoding="utf-8")
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
        certain = row.evidence in (
            "counted independently",
            "the paper's own numbers",
            "bound",
        )
        if certain and row.outcome in ("differs", "contradicted", "missed"):
            assert "proven" in marks, row.id
        if marks == {"refuted"}:
            assert row.outcome not in ("differs", "contradicted", "missed"), row.id


def test_checks_do_not_depend_on_the_claimed_value(verdicts: pd.DataFrame) -> None:
    shifted = [
        replace(claim, value=3 * claim.value + 17) for claim in claims.load_claims()
    ]
    again = papers.evaluate(shifted)
    assert again[["id", "low", "high"]].equals(verdicts[["id", "low", "high"]])
    equal = (again["relation"] == "=") & (again["low"] == again["high"])
    agreeing = ["reproduced", "compatible", "met"]
    assert not again["outcome"][equal].isin(agreeing).any()


def test_two_messages_are_compared_with_one_only_where_both_profit_alike() -> None:
    """The lab's shaper lets a sample's first bytes through: samples of unlike length prove nothing there."""
    sizes, messages, seconds = [1, 2, 4, 8], [16, 16, 8, 2], [1.0, 3.0, 5.0, 4.0]
    rows = pd.DataFrame(
        {"bytes": sizes, "messages_per_sample": messages, "seconds": seconds}
    )
    rows = rows.assign(collective="all_gather", place="a", link="lab:a", ranks=4)
    assert omgs.doubled(rows, as_many_bytes=True).to_dict() == {
        ("a", "lab:a", 4, 2): 6 / 5
    }
    every = {1: 2 / 3, 2: 6 / 5, 4: 10 / 4}
    assert omgs.doubled(rows).to_dict() == {
        ("a", "lab:a", 4, size): ratio for size, ratio in every.items()
    }


@given(values, st.floats(0, 0.5), st.floats(-1, 1), st.sampled_from(claims.RELATIONS))
def test_a_number_agrees_within_the_tolerance_on_the_side_that_counts(
    value: float, tolerance: float, shift: float, relation: str
) -> None:
    claim = replace(CLAIM, value=value, tolerance=tolerance, relation=relation)
    outcome = claim.verdict(claims.counted(value * (1 + shift), "a count")).outcome
    if abs(abs(shift) - tolerance) > 1e-9:
        off = {"=": abs(shift), "<=": shift, ">=": -shift}[relation]
        assert (outcome == "reproduced") == (off < tolerance)
    assert claim.verdict(claims.own(value, "itself")).outcome == "compatible"


@given(values, st.floats(0, 0.5), st.lists(values, min_size=1, max_size=4))
def test_a_claim_agrees_with_what_was_attained_and_measured_with_all_of_it(
    value: float, tolerance: float, seen: list[float]
) -> None:
    """Values are no range: between two of them nothing was attained, unless a range is given."""
    claim = replace(CLAIM, value=value, tolerance=tolerance)

    def outcome(result: claims.Result) -> str:
        return claim.verdict(result).outcome

    alone = [outcome(claims.counted(each, "alone")) == "reproduced" for each in seen]
    assert (outcome(claims.measured(seen, "all", "recorded")) == "reproduced") == all(
        alone
    )
    assert (outcome(claims.modelled(seen, "each")) == "compatible") == any(alone)
    between = (
        outcome(claims.modelled([(min(seen), max(seen))], "between")) == "compatible"
    )
    assert between == (any(alone) or min(seen) <= value <= max(seen))


@given(values, values)
def test_a_bound_contradicts_only_what_lies_beyond_it(
    value: float, bound: float
) -> None:
    claim = replace(CLAIM, value=value, tolerance=0)
    if not math.isclose(value, bound, rel_tol=1e-9):
        assert (claim.verdict(claims.at_least(bound, "b")).outcome == "compatible") == (
            value > bound
        )
        assert (
            claim.verdict(claims.at_most(bound, "b")).outcome == "contradicted"
        ) == (value > bound)


@pytest.mark.parametrize(
    ("second", "outcome"),
    [((9, 1), "compatible"), ((1, 1), "undecided"), ((9, 9), "compatible")],
)
def test_half_of_the_settings_must_agree_by_every_reading(
    second: tuple[int, int], outcome: str
) -> None:
    for first, expected in (
        ((9, 9), outcome),
        ((1, 1), "contradicted" if second[0] == 1 else "undecided"),
    ):
        judge = fig11._by_reading(
            pd.DataFrame({"one": first, "another": second}), ""
        ).judge
        assert judge and judge(5, 6).outcome == expected


def test_the_counts_by_evidence_add_up_and_measurements_come_first(
    verdicts: pd.DataFrame,
) -> None:
    for values in ([1.0, math.nan], []):
        with pytest.raises(ValueError, match="without numbers"):
            claims.counted(values, "n")
    of_papers = verdicts[verdicts["paper"] != claims.REQUIREMENTS]
    table, numbers = papers.counts(of_papers), papers.key_numbers(verdicts)
    n_claims = len(of_papers)
    assert table.index[0] == "measured here" and table.loc["all", "all"] == n_claims
    assert table.drop(index="all", columns="all").sum().sum() == n_claims
    assert numbers["claims"] == n_claims == sum(numbers.values()) - n_claims


def test_a_claim_that_cannot_be_judged_says_so_and_the_others_are_judged(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    by_id = {claim.id: claim for claim in claims.load_claims()}
    example = by_id["osf-sf-example"]
    odd = replace(example, id="dag-nvlink", relation="about")
    nowhere = replace(example, id="osf-nowhere")
    hearsay: Any = "hearsay"
    unknown = partial(claims._result, hearsay, 528.0, "by word of mouth")
    monkeypatch.setitem(claims.CHECKS, "osf-tab2-vgg16-size", unknown)
    monkeypatch.setitem(
        claims.CHECKS, "dag-storage", lambda: specs.network_named("no such")
    )
    monkeypatch.setattr(source, "recordings", lambda _: {})
    papers._cells.cache_clear()
    raising = (
        by_id["dag-storage"],
        odd,
        nowhere,
        by_id["osf-tab2-vgg16-size"],
        by_id["omgs-eq12"],
    )
    listed = [*raising, example]
    judged = papers.evaluate(listed).set_index("id")
    papers._cells.cache_clear()
    lines = capsys.readouterr().err.splitlines()
    assert judged["outcome"].to_dict() == dict.fromkeys(judged.index, "open") | {
        "osf-sf-example": "compatible"
    }
    assert [line.split(": ")[0] for line in lines] == [
        f"claim {claim.id}" for claim in raising
    ]
    assert "'about': write one of =, <=, >=" in lines[1] and "'hearsay'" in lines[3]
    assert "without its recording" in lines[4]


def test_what_flips_with_half_a_step_is_undecided_and_all_else_as_the_table_has_it(
    verdicts: pd.DataFrame,
) -> None:
    """The table, written by a slow test, is of these claims and grids; each note says by what it stands."""
    table, flips = (
        claims.halved(),
        {*claims.halved().query("outcome != halved")["claim"]},
    )
    for paper, free in (("osf", osf.Grid().free), ("dag", dag.Grid.free)):
        rows = verdicts[verdicts["paper"] == paper].query(
            "evidence.str.startswith('model')"
        )
        of_paper = table[table["claim"].isin(rows["id"])]
        assert {*of_paper["claim"]} == {*rows["id"]} and {*of_paper["axis"]} == {*free}
    by_id, on_grid = verdicts.set_index("id"), table.groupby("claim")["outcome"].first()
    for name, outcome in on_grid.items():
        if name in claims.repeats().index:
            continue
        assert by_id.loc[name, "outcome"] == ("undecided" if name in flips else outcome)
    for name in flips:
        assert f"{on_grid[name]} on the grid, but" in (note := by_id.loc[name, "note"])
        assert "hold together" in note and "settings that meet the most" in note


def test_a_statement_that_holds_nowhere_says_so_and_how_many_others_hold() -> None:
    factor = claims.by_model(osf.setting_search(), "VGG-16: scaling factor")
    assert factor.judge is not None
    outcome, note = factor.judge(7, 8)
    assert (
        outcome == "contradicted"
        and "at most 9 hold together, it holds nowhere;" in note
    )
