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


def test_all_four_papers_have_judged_claims(verdicts: pd.DataFrame) -> None:
    judged = verdicts[verdicts["outcome"] != "open"]
    assert set(judged["paper"]) == set(claims.PAPERS)
    assert (verdicts["note"].str.len() > 0).all()
    assert (judged["low"] <= judged["high"]).all()
    assert verdicts.loc[verdicts["outcome"] == "open", ["low", "high"]].isna().all(axis=None)


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


def test_only_what_was_measured_or_counted_reproduces(verdicts: pd.DataFrame) -> None:
    firm = verdicts["evidence"].isin(INDEPENDENT)
    assert set(verdicts["outcome"][firm]) == {"reproduced", "differs"}
    soft = verdicts["outcome"][~firm & (verdicts["evidence"] != "nothing yet")]
    assert set(soft) == {"compatible", "contradicted"}
    assert (verdicts["grade"][verdicts["evidence"] == "measured here"] != "").all()


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


def test_the_papers_main_claims_are_listed() -> None:
    """What the four papers conclude, each on a line of its own, whether or not anything here decides it."""
    known = {claim.id for claim in claims.load_claims()}
    assert len(known) >= 110
    figure7 = {f"sharing-{id}" for id in claims.prose("sharing") if id.startswith("fig07-")}
    assert len(figure7 & known | {"sharing-fig07-vgg16"} & known) == 20
    assert known >= {
        *("omgs-theorem1", "omgs-complexity", "omgs-fig03", "omgs-lstm-over-topk"),
        *("omgs-best-of-all", "omgs-computing"),
        *(f"omgs-tab6-s1-{network}" for network in ("vgg16", "resnet50", "inception", "lstm")),
        *(f"omgs-tab6-s2-{network}" for network in ("vgg16", "resnet50", "inception", "lstm")),
        *("osf-fig10-small", "osf-fig05-negotiate", "osf-fig11-best-buffer", "osf-eq4-backward"),
        *("osf-fig04a-above", "sharing-conclusion-last", "sharing-conclusion-few"),
        *("sharing-fig03-three", "sharing-fig02-2x128", "sharing-threads-fall"),
        *("sharing-intensity-order", "dag-fig03-k80-over-v100", "dag-cntk-exposed"),
        *("dag-fig02-storage", "dag-fig02-reading", "dag-fig03-alexnet", "dag-h2d-hidden"),
        *("dag-caffe-best", "dag-k80-hidden", "dag-v100-exposed", "dag-k80-peak", "dag-v100-peak"),
        *("dag-finding1", "dag-finding2", "dag-finding4"),
    }
    assert "osf-eq8-limit" not in known  # printed nowhere


def test_measured_claims_say_what_the_recordings_say(verdicts: pd.DataFrame) -> None:
    frame = verdicts[verdicts["evidence"] == "measured here"].set_index("id")
    outcomes = frame["outcome"].to_dict()
    assert outcomes == {
        "osf-fig03-osf-most": "reproduced",
        "osf-fig03-csf-least": "reproduced",
        "osf-fig03-reduction-each": "reproduced",
        "osf-fig06-falls": "reproduced",
        "osf-fig06-resnet101": "reproduced",
        "osf-fig05-negotiate": "reproduced",
        "osf-fig05-vgg16": "reproduced",
        "osf-eq4-backward": "differs",
        "osf-fig09-lower": "reproduced",
        "osf-fig09-accuracy": "reproduced",
        "osf-fig10-small": "differs",
        "osf-fig10-all": "differs",
        "sharing-slower-kernels": "reproduced",
        "dag-finding1": "reproduced",
        "dag-finding2": "reproduced",
        "dag-fig04-alexnet-most": "reproduced",
        "dag-fig04-googlenet-most": "reproduced",
        "dag-fig04-resnet50-most": "reproduced",
        "omgs-eq12": "differs",
        "omgs-fig03": "differs",
        "omgs-merged-message": "differs",
        "omgs-best-of-all": "differs",
    }
    assert frame.loc["osf-fig10-small", "low"] < 0.5 < 4 < frame.loc["osf-fig10-small", "high"]
    assert frame.loc["osf-fig03-osf-most", "high"] == pytest.approx(4.40, abs=0.01)
    assert frame.loc["osf-fig03-reduction-each", "low"] == pytest.approx(84.2, abs=0.1)
    assert frame.loc["omgs-fig03", "high"] < 0.98 and "LSTM" in frame.loc["omgs-fig03", "note"]
    assert "15 cases" in frame.loc["dag-finding2", "note"]  # neither sparse, nor with a slow rank


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


def test_about_is_never_taken_to_the_last_digit() -> None:
    known = claims.load_claims()
    vague = [one for one in known if re.search('"about"|~', one.condition)]
    assert len(vague) >= 15
    assert min(one.tolerance for one in vague) >= 0.05


def test_known_results(verdicts: pd.DataFrame) -> None:
    frame = verdicts.set_index("id")
    expected = {
        "osf-sf-example": (0.9, 0.9, "compatible"),
        "osf-fig06-vgg16": (-math.inf, 7.834, "contradicted"),
        "osf-fig08-after": (0.809, 0.978, "contradicted"),
        "osf-fig11-constant-max": (-math.inf, 47.5, "contradicted"),
        "osf-fig11-constant-min": (-math.inf, 1.565, "contradicted"),
        "osf-below-bdp": (0, 66.2, "compatible"),
        "dag-k80-peak": (4.368, 4.368, "reproduced"),
        "dag-k80-communication": (0.12267, math.inf, "compatible"),
        "osf-fig03-reduction": (-12.667, 83.927, "compatible"),
        "osf-fig05-allreduce": (-math.inf, 100, "compatible"),
        "osf-vgg16-one-layer": (65.53, 73.28, "compatible"),
        "omgs-theorem1": (1.28, 1.28, "differs"),
        "omgs-deep-over-mgs": (2.716, 2.719, "contradicted"),
        "sharing-intensity-order": (6, 6, "contradicted"),
        "osf-fig03-csf-min": (0.2067, 32.2, "compatible"),
        "sharing-best-gain": (16.51, 17.85, "compatible"),
        "sharing-fig06-batch16": (4.109, 4.333, "contradicted"),
        "dag-efficiency": (9.435, 9.837, "compatible"),
        "dag-fig02-decoding": (1.0, 1.0006, "contradicted"),
        "dag-fig02-messages": (1.001, 1.003, "contradicted"),
        "dag-fig03-alexnet": (0.939, 0.987, "contradicted"),
        "dag-fig02-efficiency": (90.5, 100, "compatible"),
        "dag-fig03-linear": (3.74, 3.947, "compatible"),
        "dag-cntk-exposed": (100, 100, "compatible"),
        "dag-h2d-hidden": (1, 1, "compatible"),
        "dag-k80-backward": (0.18657, math.inf, "compatible"),
        "dag-tab4-resnet50": (25.557, 25.557, "differs"),
        "omgs-dense-communication": (1.533, math.inf, "compatible"),
        "omgs-tab5-mgs-resnet50": (53, 53, "reproduced"),
        "omgs-computing": (0.4176, 0.4842, "contradicted"),
        "omgs-deep-over-topk": (1, 1, "contradicted"),
        "omgs-tab6-s2-lstm": (1.0426, 1.0448, "contradicted"),
    }
    for claim, (low, high, outcome) in expected.items():
        assert frame.loc[claim, "low"] == pytest.approx(low, rel=1e-3), claim
        assert frame.loc[claim, "high"] == pytest.approx(high, rel=1e-3), claim
        assert frame.loc[claim, "outcome"] == outcome, claim


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


def test_markdown_names_every_claim_the_strongest_evidence_first(verdicts: pd.DataFrame) -> None:
    lines = papers.markdown(verdicts).splitlines()
    assert len(lines) == len(verdicts) + 2
    assert [line.split(" | ")[0].lstrip("| ") for line in lines[2:]] == verdicts["id"].tolist()
    order = [str(one) for one in claims.Evidence]
    places = [order.index(evidence) for evidence in verdicts["evidence"]]
    assert places == sorted(places)


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
