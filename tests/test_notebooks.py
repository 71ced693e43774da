"""Every notebook, really run from the recordings: no warning, no failure, the same numbers every time."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest

from conftest import Executed
from ddlkit.report import book, catalog

# On a busy machine a notebook takes longer than a test may by default.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.mark.parametrize("notebook", book.notebooks(), ids=lambda path: path.stem)
def test_a_notebook_runs_without_a_warning_and_asks_its_exercises(
    notebook: Path, executed: Executed
) -> None:
    cells = nbformat.read(str(executed([notebook]) / notebook.name), as_version=4).cells
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    assert not [o["text"] for o in outputs if o.get("name") == "stderr"]
    said = "".join(o["text"] for o in outputs if o.get("name") == "stdout")
    answered = re.findall(r"^Exercise \d: (?:replace None|right|compare)", said, re.M)
    assert len(answered) == 3


def test_every_table_of_the_papers_is_shown(executed: Executed) -> None:
    """As text under its own name: what a page has no number of cannot be checked by its reader."""
    cells = nbformat.read(
        str(executed(book.notebooks(["80"])) / "80_tables.ipynb"), as_version=4
    ).cells
    pages = [out["data"]["text/html"] for cell in cells for out in cell.get("outputs", ())
             if "text/html" in out.get("data", {})]  # fmt: skip
    for entry in catalog.load():
        if entry.notebook == "80_tables":
            assert any(f"<caption>{entry.id}</caption>" in page for page in pages), entry.id


def test_the_same_recording_gives_the_same_numbers(
    executed: Executed, tmp_path: Path, recording: str
) -> None:
    chosen = book.notebooks(["40"])
    before = executed(chosen)
    book.run(chosen, recording, executed=tmp_path, reports=tmp_path / "reports")
    again = sorted((tmp_path / "reports").rglob("*.csv"))
    again += sorted((tmp_path / "reports").rglob("*.json"))
    assert len(again) >= 4
    for path in again:
        first = before / path.relative_to(tmp_path)
        assert path.read_bytes() == first.read_bytes(), path.name
