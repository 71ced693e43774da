"""The glossary names what the code knows, and every link to it lands."""

from __future__ import annotations

import json
import re

from ddlkit import store
from ddlkit.core import sparse
from ddlkit.core.cost import FORMS
from ddlkit.model.predictor import planners
from ddlkit.report import catalog, site


def test_it_names_every_planner_form_and_grade_and_nothing_else() -> None:
    text = site.GLOSSARY.read_text(encoding="utf-8")
    rows = re.findall(r"^\| `([^`]+)`", text, re.MULTILINE)
    grades = {entry.grade for entry in catalog.load()}
    forms = {*FORMS, sparse.SparseGather.form}
    assert {*planners(), *forms, *grades} == {re.split(r"[:`]", name)[0] for name in rows}


def test_links_of_notebooks_and_within_it_land_on_a_heading() -> None:
    page = site.glossary_page()
    targets = re.findall(r'href="#([^"]*)"', page)
    assert targets
    for notebook in (store.ROOT / "notebooks").glob("[01]*.ipynb"):
        cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
        text = "".join("".join(cell["source"]) for cell in cells)
        targets += re.findall(re.escape(site.LINKED) + r"#([^)]*)\)", text)
    for target in targets:
        assert f'id="{target}"' in page, target
