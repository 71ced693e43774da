"""Every notebook, really run from the recordings: no warning, no failure, the same numbers every time."""

from __future__ import annotations

import re
from html import escape, unescape
from pathlib import Path

import nbformat
import pytest

from conftest import Executed
from ddlkit.report import book, catalog, minutes
from ddlkit.report.plots import shown
from ddlkit.report.plots.style import FAMILIES

# On a busy machine a notebook takes longer than a test may by default.
REFERENCE, TABLES = minutes.REFERENCE, "14_tables_and_verdicts"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("notebook", book.notebooks(), ids=lambda path: path.stem)
def test_a_notebook_runs_without_a_warning_and_asks_its_exercises(
    notebook: Path, executed: Executed
) -> None:
    cells = nbformat.read(str(executed([notebook]) / notebook.name), as_version=4).cells
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    assert not [o["text"] for o in outputs if o.get("name") == "stderr"]
    said = "".join(o["text"] for o in outputs if o.get("name") == "stdout")
    answered = re.findall(r"^Exercise \d: (?:replace None|right|does yours)", said, re.M)
    assert 2 <= len(answered) <= 3


def test_every_table_of_the_papers_is_shown(executed: Executed) -> None:
    """As text under its own name: what a page has no number of cannot be checked by its reader."""
    cells = nbformat.read(
        str(executed(book.notebooks([REFERENCE])) / f"{TABLES}.ipynb"), as_version=4
    ).cells
    pages = [out["data"]["text/html"] for cell in cells for out in cell.get("outputs", ())
             if "text/html" in out.get("data", {})]  # fmt: skip
    for entry in catalog.load():
        if "-tab" in entry.id:
            told = f"<caption>{escape(entry.caption)} "
            assert any(told in page and f"{entry.id}.csv" in page for page in pages), entry.id


@pytest.mark.parametrize("notebook", book.notebooks(), ids=lambda path: path.stem)
def test_a_number_in_a_table_has_a_unit_and_few_digits(notebook: Path, executed: Executed) -> None:
    """Whole numbers count something. One with a fraction has a unit in its column's head or beside it, or a
    head by which it is known to have none (report/plots/columns.yml), and at most four significant digits.
    """
    cells = nbformat.read(str(executed([notebook]) / notebook.name), as_version=4).cells
    pages = [out["data"].get("text/html", "") for cell in cells for out in cell.get("outputs", ())
             if "data" in out]  # fmt: skip
    tables = re.findall(r"<table.*?</table>", "".join(pages), re.DOTALL)
    found = [line for table in tables for line in undeclared(table)]
    assert not found, f"name a unit in the head, or in report/plots/columns.yml: {found}"


def undeclared(table: str) -> list[str]:
    """Columns of which a number has no unit or too many digits, each with the number."""
    heads: dict[int, list[str]] = {}
    for place, span, head in re.findall(
        r'<th[^>]*class="col_heading level\d+ col(\d+)"(?: colspan="(\d+)")?\s*>([^<]*)<', table
    ):
        for column in range(int(place), int(place) + int(span or 1)):
            heads.setdefault(column, []).append(unescape(head))
    levels = [unescape(one) for one in re.findall(r'class="index_name level\d+" *>([^<]*)<', table)]
    found: dict[str, str] = {}
    placed = [
        (line, *cell)
        for line in table.split("<tr>")
        for cell in re.findall(r'class="data row\d+ col(\d+)"[^>]*>([^<]*)<', line)
    ]
    for row, column, text in placed:
        names = heads.get(int(column), []) + levels
        beside = re.findall(r">([^<]*[a-z][^<]*)</t[dh]>", row)
        known = any(shown.column(unescape(name))[1] for name in names + beside)
        known = known or any(name in family for name in names for family in FAMILIES.values())
        bare = re.fullmatch(r"[+-]?\d*\.\d+(e[+-]?\d+)?", text)
        if shown.digits(text) > 4 or (bare and not known):
            found.setdefault(" / ".join(names[:2]), f"{' / '.join(names)}: {text}")
    return list(found.values())


def test_the_same_recording_gives_the_same_numbers(
    executed: Executed, tmp_path: Path, recording: str
) -> None:
    chosen = book.notebooks(["05"])
    before = executed(chosen)
    book.run(chosen, recording, executed=tmp_path, reports=tmp_path / "reports")
    again = sorted((tmp_path / "reports").rglob("*.csv"))
    again += sorted((tmp_path / "reports").rglob("*.json"))
    assert len(again) >= 3
    for path in again:
        first = before / path.relative_to(tmp_path)
        assert path.read_bytes() == first.read_bytes(), path.name
