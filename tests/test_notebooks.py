"""Every notebook, really run from the recordings: no warning, no failure, the same numbers every time."""

from __future__ import annotations

import difflib
import re
from pathlib import Path

import nbformat
import pytest

from ddlkit import store
from ddlkit.report import book, catalog, site

# All notebooks one after the other; on a busy machine that takes more than a test may by default.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def recording() -> str:
    """The recording that the committed report was made from."""
    return store.list_recorded()[0].name


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory, recording: str) -> Path:
    """A directory with the executed copies of all notebooks and the reports that they wrote."""
    folder = tmp_path_factory.mktemp("book")
    reports = folder / "reports"
    book.run(book.notebooks(), recording, executed=folder, reports=reports)
    return folder


def test_every_table_of_the_papers_is_shown(executed: Path) -> None:
    """As text under its own name: what a page has no number of cannot be checked by its reader."""
    cells = nbformat.read(str(executed / "80_tables.ipynb"), as_version=4).cells
    pages = [out["data"]["text/html"] for cell in cells for out in cell.get("outputs", ())
             if "text/html" in out.get("data", {})]  # fmt: skip
    for entry in catalog.load():
        if entry.notebook == "80_tables":
            assert any(f"<caption>{entry.id}</caption>" in page for page in pages), entry.id


def test_every_notebook_runs_without_a_warning_and_asks_its_exercises(executed: Path) -> None:
    for notebook in book.notebooks():
        cells = nbformat.read(str(executed / notebook.name), as_version=4).cells
        outputs = [output for cell in cells for output in cell.get("outputs", [])]
        assert not [o["text"] for o in outputs if o.get("name") == "stderr"], notebook.name
        said = "".join(o["text"] for o in outputs if o.get("name") == "stdout")
        answered = re.findall(r"^Exercise \d: (?:replace None|right|compare)", said, re.M)
        assert len(answered) == 3, notebook.name


def test_the_same_recording_gives_the_same_numbers(
    executed: Path, tmp_path: Path, recording: str
) -> None:
    chosen = book.notebooks(["40"])
    book.run(chosen, recording, executed=tmp_path, reports=tmp_path / "reports")
    again = sorted((tmp_path / "reports").rglob("*.csv"))
    again += sorted((tmp_path / "reports").rglob("*.json"))
    assert len(again) >= 4
    for path in again:
        first = executed / path.relative_to(tmp_path)
        assert path.read_bytes() == first.read_bytes(), path.name


def test_the_committed_report_is_what_the_notebooks_write(executed: Path) -> None:
    """Compared line by line, and only what differs is shown: the whole would hide the line that does."""
    committed = (store.REPORTS / "REPRODUCTION.md").read_text(encoding="utf-8").splitlines()
    written = site.reproduction(executed / "reports").splitlines()
    assert not [line for line in difflib.unified_diff(committed, written, "committed", "now", n=0)]
