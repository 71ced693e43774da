"""The catalog: complete, validated, checked against what is on disk, and current in reports/FIGURES.md."""

from __future__ import annotations

import pydoc
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import nbformat
import pandas as pd
import pytest
import yaml

from ddlkit.core.cost import FORMS
from ddlkit.core.errors import UserError
from ddlkit.core.plan import PLANNERS
from ddlkit.model.predictor import SEARCH
from workbook import cli
from workbook.common import catalog, claims, outputs, places
from workbook.common.papers import PAPERS
from workbook.site import pages as site

GOOD: dict[str, Any] = {
    "id": "wb-test",
    "caption": "A test.",
    "notebook": "10_test",
    "inputs": [],
    "columns": ["model"],
    "hardware": "any",
    "minutes": 1,
    "grade": "model",
    "tolerance": {"error": {"median": 0.03, "max": 0.1}},
    "status": "done",
}
PNG = b"\x89PNG\r\n\x1a\n"


def load(tmp_path: Path, *items: dict[str, Any]) -> tuple[catalog.Entry, ...]:
    path = tmp_path / "figures.yml"
    path.write_text(yaml.safe_dump(list(items)))
    return catalog.load(path)


@pytest.fixture
def entry(tmp_path: Path) -> catalog.Entry:
    return load(tmp_path, GOOD)[0]


@pytest.fixture
def reports(tmp_path: Path) -> Path:
    """A reports directory in which the entry ``wb-test`` is all right."""
    folder = tmp_path / "reports"
    outputs.write_numbers(
        "wb-test", pd.DataFrame({"error": [0.01, -0.02, 0.05]}), folder
    )
    (folder / "figures" / "wb-test.png").write_bytes(PNG)
    return folder


def test_all_figures_and_tables_of_the_papers_are_listed_once() -> None:
    wanted = []
    for paper in PAPERS.values():
        wanted += [f"{paper.key}-fig{k:02}" for k in range(1, paper.figures + 1)]
        wanted += [f"{paper.key}-tab{k}" for k in range(1, paper.tables + 1)]
    listed = [entry.id for entry in catalog.load()]
    assert sorted(name for name in listed if not name.startswith("wb-")) == sorted(
        wanted
    )
    assert {claim.figure for claim in claims.load_claims()} - {""} <= {*listed}


def test_entries_are_as_the_head_of_their_file_says() -> None:
    for entry in catalog.load():
        assert {*entry.columns} <= {"paper", "model", "measured"} and entry.caption
        assert entry.grade in ("gpu", "lab", "loopback", "model", "transcribed")
        assert (places.NOTEBOOKS / f"{entry.notebook}.ipynb").is_file()


def test_unknown_fields_doubled_ids_and_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="wb-test: colour: unknown field: use id, "):
        load(tmp_path, {**GOOD, "colour": "red"})
    lacking = {key: value for key, value in GOOD.items() if key != "grade"}
    with pytest.raises(UserError, match="wb-test: write also the fields grade$"):
        load(tmp_path, lacking)
    with pytest.raises(UserError, match="wb-test: id appears twice"):
        load(tmp_path, GOOD, GOOD)
    with pytest.raises(UserError, match="cannot read"):
        catalog.load(tmp_path / "none.yml")


@pytest.mark.parametrize(
    ("suffix", "content", "message"),
    [
        ("png", None, "image .*png is missing, or not a PNG"),
        ("csv", None, "CSV .*csv is missing$"),
        ("csv", "", "cannot be read"),
        ("csv", "error\n", "has no row"),
        ("csv", "error\n0.01\n0.2\n", r"max of \|error\| is 0.2, limit 0.1"),
        (
            "csv",
            "error\n-0.05\n0.04\n0.06\n",
            r"median of \|error\| is 0.05, limit 0.03",
        ),
        ("csv", "error\n0.01\nnan\n", "not finite"),
    ],
)
def test_what_a_done_entry_lacks_is_told(
    reports: Path, entry: catalog.Entry, suffix: str, content: str | None, message: str
) -> None:
    path = reports / "figures" / f"wb-test.{suffix}"
    assert catalog.find_problems(reports, [entry]) == []
    path.unlink()
    if content is not None:
        path.write_text(content)
    problems = catalog.find_problems(reports, [entry])
    assert all(line.startswith("wb-test: ") for line in problems)
    assert any(re.search(message, line) for line in problems), problems
    assert catalog.find_problems(reports, [replace(entry, status="planned")]) == []


def test_a_done_entry_needs_its_inputs(reports: Path, entry: catalog.Entry) -> None:
    gone = replace(
        entry, inputs=("data/papers/*/claims.csv", "data/papers/osf/nothing.csv")
    )
    line = "wb-test: input data/papers/osf/nothing.csv matches no file"
    assert catalog.find_problems(reports, [gone]) == [line]


def test_the_committed_page_is_current_and_its_links_lead_somewhere() -> None:
    text = (places.REPORTS / "FIGURES.md").read_text(encoding="utf-8")
    assert text == catalog.document(catalog.load()), (
        "run: python -m workbook figures --write"
    )
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert links and all((places.REPORTS / link).exists() for link in links)


def test_the_command_lists_checks_and_writes(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    reports: Path,
) -> None:
    monkeypatch.setattr(places, "DATA", tmp_path)
    monkeypatch.setattr(places, "REPORTS", reports)
    load(tmp_path, GOOD)
    assert catalog.command(check=True) == 1
    printed = capsys.readouterr().out
    assert printed.startswith(
        "1 entries, 1 of them marked done in the catalog, 1 problem; how long the "
        "notebooks take to read, and whether they show warnings, was not checked"
    )
    assert catalog.command(write=True) == 0
    assert catalog.command(check=True) == 0
    load(tmp_path, {**GOOD, "minutes": 2})
    assert catalog.command(check=True) == 1


@pytest.mark.parametrize(
    "words", ["figures --check --reports", "build --only 00 --data", "pack"]
)
def test_a_directory_without_what_is_read_from_it_is_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str
) -> None:
    # A CSV without a stamp was not recorded.
    (tmp_path / "own.csv").write_text("a\n1\n")
    assert cli.main([*words.split(), str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path) in line


def test_what_excludes_an_option_is_not_advised(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["figures", "--write", "--reports", str(places.REPORTS)]) == 2
    assert "add --check" not in capsys.readouterr().err


@pytest.mark.parametrize("words", [["record", ""], ["campaign", ""]])
def test_what_a_command_needs_is_not_to_be_left_out(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    said = capsys.readouterr().err
    assert "is empty: write it" in said and "leave" not in said


V4 = nbformat.v4


def put_out(**data: str) -> Any:
    """A cell that displays this, by kind."""
    kinds = {kind.replace("_", "/"): value for kind, value in data.items()}
    return V4.new_code_cell("x", outputs=[V4.new_output("display_data", data=kinds)])


@pytest.mark.parametrize(
    ("cell", "counts"),
    [
        (V4.new_markdown_cell("three words here"), {"words": 3}),
        (
            put_out(text_html="<figure><img><figcaption>a b</figcaption></figure>"),
            {"figures": 1},
        ),
        (put_out(image_png="abc", text_plain="<Figure>"), {"figures": 1}),
        (put_out(text_html="<table><caption>one two</caption></table>"), {"tables": 1}),
        (
            put_out(
                text_html="<details><summary>a b</summary>\n<table></table></details>"
            ),
            {},
        ),
        (
            put_out(text_html="<div><b>Two</b> words</div>"),
            {"words": 2, "sentences": 1},
        ),
        (V4.new_code_cell("print('not run')"), {}),
    ],
)
def test_minutes_are_counted_in_what_a_reader_sees(
    cell: Any, counts: dict[str, int]
) -> None:
    assert {what: n for what, n in catalog.count_shown([cell]).items() if n} == counts


def test_a_notebook_that_takes_longer_than_it_says_or_warns_is_told(
    tmp_path: Path,
) -> None:
    warning = V4.new_code_cell(
        "x", outputs=[V4.new_output("stream", name="stderr", text="no")]
    )
    title = V4.new_markdown_cell(
        "# T\n\n* **Time:** 3 minutes; 9 with the exercises " + "w " * 100
    )
    exercises = [
        V4.new_markdown_cell(text) for text in ("## Exercises", "w " * 999, "**Next:**")
    ]
    path = tmp_path / "03_a.ipynb"
    notebook = V4.new_notebook(cells=[title, warning, *exercises])
    path.write_text(nbformat.writes(notebook), encoding="utf-8")
    problems = catalog.find_long([path])
    assert problems == [
        "03_a takes 4.0 minutes to read, 3.5 are allowed",
        "03_a prints a warning",
    ]


def test_the_glossary_names_every_planner_form_and_grade_and_nothing_else() -> None:
    rows = re.findall(
        r"^\| `([^`]+)`", site.GLOSSARY.read_text(encoding="utf-8"), re.MULTILINE
    )
    forms = {*FORMS, *(entry.grade for entry in catalog.load())}
    plans = {*PLANNERS, SEARCH}
    assert plans | forms == {re.split(r"[:`]", name)[0] for name in rows}


def test_each_equation_of_the_papers_has_a_function_that_cites_it() -> None:
    text = site.EQUATIONS.read_text(encoding="utf-8")
    row = re.compile(
        r"^\| (?!equation \|)(.*?) \| .* \| (.*) \| (.*) \|$", re.MULTILINE
    )
    tables = dict(re.findall(r"^## `(\w+)`.*?$(.*?)(?=^## |\Z)", text, re.M | re.S))
    for paper in PAPERS:
        listed = claims.paper_table(paper, "equations")["equation"].tolist()
        assert listed == [equation for equation, _, _ in row.findall(tables[paper])]
    for equation, names, _ in row.findall(text):
        for name in re.findall(r"`(.+?)`", names):
            words = " ".join(
                (getattr(pydoc.locate(name), "__doc__", None) or "").split()
            )
            spans = [
                range(int(a), int(b or a) + 1)
                for a, b in re.findall(r"(\d+)(?:-(\d+))?", words)
            ]
            number = re.sub(r"\D.*|\D", "", equation.partition(" ")[2])
            assert equation in words or any(int(number) in span for span in spans), (
                equation,
                name,
            )
