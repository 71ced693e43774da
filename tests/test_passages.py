"""Computed passages are what their sources say, and the README states only numbers that the data have."""

from __future__ import annotations

import csv
import json
import re
from typing import Any

import pandas as pd
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from ddlkit.core.errors import UserError
from workbook.common import outputs, places, source
from workbook.site import passages
from workbook.validate import accuracy

PROSE = st.text("ab\n #|<>-!", max_size=40)


def marked(name: str, text: str = "") -> str:
    return f"<!-- computed: {name} -->\n{text}<!-- end of {name} -->"


def document(name: str) -> str:
    return (places.ROOT / name).read_text(encoding="utf-8")


# -- marks ----------------------------------------------------------------------------------------


def test_what_is_committed_is_what_is_computed() -> None:
    assert passages.outdated() == []
    enclosed = [
        name
        for file in passages.FILES
        for name in re.findall(r"^<!-- computed: (\S+) -->$", document(file), re.M)
    ]
    assert sorted(enclosed) == sorted(passages.PASSAGES), "each is used once"


@given(before=PROSE, old=PROSE, after=PROSE)
def test_only_what_stands_between_marks_is_replaced(
    before: str, old: str, after: str
) -> None:
    text = f"{before}\n{marked('colab', old + chr(10))}\n{after}"
    filled = passages.filled(text)
    assert filled.startswith(f"{before}\n<!-- computed: colab -->")
    assert filled.endswith(f"<!-- end of colab -->\n{after}")
    assert passages.PASSAGES["colab"]() in filled
    assert passages.filled(filled) == filled


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (marked("tea-leaves"), "nothing computes the passage 'tea-leaves'"),
        ("<!-- computed: colab -->\ntext\n", "no counterpart"),
        ("text\n<!-- end of colab -->\n", "no counterpart"),
        ("<!-- computed: colab -->\n<!-- end of goals-met -->\n", "no counterpart"),
    ],
)
def test_a_wrong_mark_is_refused(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        passages.filled(text)


# -- sources --------------------------------------------------------------------------------------


def stated_minutes() -> dict[str, tuple[int, int]]:
    """Return what the notebooks themselves state: minutes to read, and with the exercises, by number."""
    stated = {}
    for path in places.NOTEBOOKS.glob("*.ipynb"):
        first = "".join(json.loads(path.read_text("utf-8"))["cells"][0]["source"])
        time = re.search(r"\*\*Time:\*\* (\d+) minutes; (\d+) with", first)
        assert time, path
        stated[path.name[:2]] = (int(time[1]), int(time[2]))
    return stated


def hours(minutes: int) -> str:
    return f"{minutes // 60} h {minutes % 60:02}".removesuffix(" 00")


def test_reading_times_are_those_of_the_notebooks() -> None:
    """The table has each notebook's own minutes, and the sums are sums of them."""
    stated = stated_minutes()
    text = passages.PASSAGES["reading-times"]()
    rows = re.findall(r"^\| \[(\d\d) .*?\| (\d+) \| (\d+) \|$", text, re.MULTILINE)
    assert {number: (int(a), int(b)) for number, a, b in rows} == stated
    core = [times for number, times in stated.items() if number <= "05"]
    course = [times for number, times in stated.items() if number != "14"]
    for some in (core, course):
        for total in map(sum, zip(*some, strict=True)):
            assert hours(total) in text
    reading = sum(minutes for minutes, _ in course)
    assert hours(reading) in passages.PASSAGES["course-in-brief"]()


def test_goals_are_counted_over_all_campaigns() -> None:
    """By another way: goals of how much was to be measured, and rows without an outcome, do not count."""
    sizes = re.compile(r"cases|links|cases (with exposed communication|where no) .*")
    with open(places.REPORTS / "goals.csv", encoding="utf-8") as file:
        outcomes = [
            (row["standing"], row["held"])
            for row in csv.DictReader(file)
            if row["held"] and not sizes.fullmatch(row["goal"])
        ]
    met = outcomes.count(("confirmatory", "True"))
    missed = outcomes.count(("confirmatory", "False"))
    assert met and missed
    assert f"{met} of {met + missed} preset" in passages.PASSAGES["goals-met"]()
    of_both = passages.PASSAGES["goals-by-standing"]()
    assert f"Of {len(outcomes)} goals" in of_both
    assert f"{met} were met and {missed} were missed" in of_both


def test_whoever_cites_finds_all_of_the_citation_file() -> None:
    cff = yaml.safe_load(document("CITATION.cff"))
    text = document("docs/citing.md")
    entries = dict(re.findall(r"^@\w+\{(\w+),\n(.*?)^\}", text, re.M | re.S))
    assert f"version = {{{cff['version']}}}" in entries.pop("ddlkit")
    references = {entry["abbreviation"]: entry for entry in cff["references"]}
    assert entries.keys() == references.keys()
    for key, entry in references.items():
        assert entry["title"] in entries[key]
        assert str(entry.get("doi", "")) in entries[key]
        for author in entry["authors"]:
            assert author.get("family-names", author.get("name")) in entries[key]


def test_the_address_of_the_repository_is_one_setting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where CITATION.cff has an address, the cell to copy and the entry to cite have it too."""
    cff = passages.citation()
    assert "repository-code" in cff or "REPOSITORY" in passages.PASSAGES["colab"]()
    address = "https://example.org/ddlkit"
    published = {**cff, "repository-code": address}
    monkeypatch.setattr(passages, "citation", lambda: published)
    assert f"git clone -q {address} ddlkit" in passages.PASSAGES["colab"]()
    assert f"url = {{{address}}}" in passages.PASSAGES["cite-workbook"]()


# -- the README's findings ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def findings() -> list[str]:
    """The numbered findings of the README, each as one line."""
    section = document("README.md").partition("## What was found\n")[2]
    section = section.partition("\n## ")[0]
    found = [
        " ".join(item.split()) for item in re.split(r"^\d\. ", section, flags=re.M)
    ]
    assert len(found) == 5 and not found[0]
    return found[1:]


def percent(value: float) -> str:
    return f"{value:.1%}"


@pytest.fixture(scope="module")
def summaries() -> dict[str, Any]:
    return dict(outputs.read_summaries(places.REPORTS))


def test_the_first_finding_is_of_the_replays(
    findings: list[str], summaries: dict[str, Any]
) -> None:
    replays = summaries["05-is-it-true"]
    assert f"{replays['campaign_cases']} replays" in findings[0]
    assert percent(replays["campaign_median_error"]) in findings[0]


def test_the_second_finding_is_of_real_training(findings: list[str]) -> None:
    """Both models err alike with the slowdowns, and alike without them, to the digits that are printed."""
    every = accuracy.joined(source.open_campaign("", source.TRAINED).alone)
    judged = every[~every["marked"]]
    for cases in (judged, every):
        errors = cases.filter(like="_paired_error").abs().median()
        assert f"{len(cases)} cases" in findings[1]
        for knows in ("beside", "alone"):
            ours = percent(errors[f"model_{knows}_paired_error"])
            line = percent(errors[f"line_medians_{knows}_paired_error"])
            assert ours == line and ours in findings[1]
    assert f"{len(every) - len(judged)} of which" in findings[1]


def test_the_third_finding_is_of_the_advice_that_was_tried(findings: list[str]) -> None:
    tried = pd.read_csv(places.DATA / "advised.csv")
    assert tried["measured"].between(tried["low"], tried["high"]).all()
    apart = (tried["gain"] - tried["measured"]).abs().median()
    assert f"{100 * apart:.0f} percentage point" in findings[2]
    assert f"up to {tried['measured'].max():.0%}" in findings[2]
    half_width = (tried["high"] - tried["low"]).median() / 2
    assert f"{100 * half_width:.0f} points" in findings[2]
    words = {7: "seven", 8: "eight", 9: "nine", 12: "twelve"}
    with_zero = words[int(((tried["low"] < 0) & (tried["high"] > 0)).sum())]
    assert f"{with_zero} of the {words[len(tried)]} also contain zero" in findings[2]
    advised = tried[tried["advised"]]
    surely = words[int((advised["measured_low"] > 0).sum())]
    assert f"{surely} of the {words[len(advised)]} advised changes" in findings[2]


def test_the_fourth_finding_is_of_others_gpus(
    findings: list[str], summaries: dict[str, Any]
) -> None:
    others = summaries["12-real-gpus"]
    words = {4: "four", 6: "six"}
    beaten, networks = others["pollux_norm_beats_workbook"], others["pollux_networks"]
    assert f"{words[beaten]} of Pollux's {words[networks]} networks" in findings[3]
    assert f"{1000 * others['abci_step_s']:.1f} ms" in findings[3]


# -- the studies ----------------------------------------------------------------------------------


def test_the_first_trainings_are_reported_by_the_rule_of_notebook_05(
    summaries: dict[str, Any],
) -> None:
    """Paired and without the training that overlaps nothing; the other median stands there too."""
    numbers = summaries["05-is-it-true"]
    section = document("docs/studies.md").partition("### Replays, and the first")[2]
    section = " ".join(section.partition("\n### ")[0].split())
    median = percent(numbers["training_with_overlap_median_paired_error"])
    largest = percent(numbers["training_with_overlap_max_paired_error"])
    assert f"median paired error is {median}, the largest {largest}" in section
    assert percent(numbers["training_median_error"]) in section
    exposed = percent(numbers["training_with_overlap_median_exposed_error"])
    assert f"{exposed} on the four trainings" in section
