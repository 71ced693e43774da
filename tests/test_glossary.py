"""The glossary names what the code knows, and every link to it lands."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ddlkit import store
from ddlkit.core import sparse
from ddlkit.core.cost import FORMS
from ddlkit.model.predictor import planners
from ddlkit.report import catalog, site

TEXT = site.GLOSSARY.read_text(encoding="utf-8")
NAMED = {re.split(r"[:`]", found)[0] for found in re.findall(r"^\| `([^`]+)`", TEXT, re.MULTILINE)}


def test_it_names_every_planner_form_and_grade_and_nothing_else() -> None:
    grades = {entry.grade for entry in catalog.load()}
    forms = {*FORMS, sparse.SparseGather.form}
    assert {*planners(), *forms, *grades} == NAMED


@pytest.mark.parametrize(
    "notebook", sorted((store.ROOT / "notebooks").glob("[01]*.ipynb")), ids=lambda p: p.stem
)
def test_links_of_notebooks_land_on_a_heading(notebook: Path) -> None:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    text = "".join("".join(cell["source"]) for cell in cells)
    page = site.glossary_page()
    for target in re.findall(re.escape(site.LINKED) + r"#([^)]*)\)", text):
        assert f'id="{target}"' in page, target


def test_links_within_it_land_on_a_heading() -> None:
    page = site.glossary_page()
    targets = re.findall(r'href="#([^"]*)"', page)
    assert targets
    for target in targets:
        assert f'id="{target}"' in page, target
