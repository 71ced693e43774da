"""What docs/ tells is so: the glossary's names and links, a teacher's minutes and answers."""

from __future__ import annotations

import pydoc
import re

import pytest

from ddlkit import store
from ddlkit.core import sparse
from ddlkit.core.cost import FORMS, AlphaBeta
from ddlkit.core.iteration import Prediction, predict
from ddlkit.core.workload import Workload
from ddlkit.model.predictor import make_plan, planners
from ddlkit.report import book, catalog, claims, site
from ddlkit.report.site import buckets

GLOSSARY = site.GLOSSARY.read_text(encoding="utf-8")
TEACHING = (store.ROOT / "docs" / "teaching.md").read_text(encoding="utf-8")
CASES = buckets.cases()


def test_the_glossary_names_every_planner_form_and_grade_and_nothing_else() -> None:
    rows = re.findall(r"^\| `([^`]+)`", GLOSSARY, re.MULTILINE)
    grades = {entry.grade for entry in catalog.load()}
    forms = {*FORMS, sparse.SparseGather.form}
    assert {*planners(), *forms, *grades} == {re.split(r"[:`]", name)[0] for name in rows}


def test_links_to_the_glossary_land_on_a_heading() -> None:
    page = site.document_page(site.GLOSSARY)
    targets = re.findall(r'href="#([^"]*)"', page)
    for notebook in book.notebooks():
        text = notebook.read_text(encoding="utf-8")
        targets += re.findall(re.escape(site.LINKED) + r"#([^)]*)\)", text)
    assert targets and [name for name in targets if f'id="{name}"' not in page] == []


def test_each_equation_of_the_papers_has_a_function_that_cites_it() -> None:
    text, rows = site.EQUATIONS.read_text(encoding="utf-8"), []
    for paper, table in re.findall(r"^## `(\w+)`.*?$(.*?)(?=^## |\Z)", text, re.M | re.S):
        for equation, names, files in re.findall(
            r"^\| (\S.*?) \| .* \| (.*) \| (.*) \|$", table, re.M
        ):
            rows += [(paper, equation, names, files)] * equation.startswith(
                ("Eq", "Alg", "The", "4")
            )
    for paper in claims.PAPERS:
        listed = claims.paper_table(paper, "equations")["equation"].tolist()
        assert listed == [equation for key, equation, *_ in rows if key == paper]
    for _, equation, names, files in rows:
        for name in re.findall(r"`(.+?)`", names):
            words = " ".join((getattr(pydoc.locate(name), "__doc__", None) or "").split())
            spans = [
                range(int(a), int(b or a) + 1) for a, b in re.findall(r"(\d+)(?:-(\d+))?", words)
            ]
            number = re.sub(r"\D.*|\D", "", equation.partition(" ")[2])
            assert equation in words or any(int(number) in span for span in spans), (equation, name)
        for file in re.findall(r"\]\(\.\./(.+?)\)", files):
            assert (store.ROOT / file).is_file()


def test_minutes_are_those_of_the_notebooks() -> None:
    cells = re.findall(r"^\| (\d\d) .*? \| (\d+) \| (\d+) \|", TEACHING, re.M)
    rows = {number: (int(reading), int(working)) for number, reading, working in cells}
    pages = [site.Page(path) for path in book.notebooks()]
    assert rows == {page.number: (page.minutes, page.working) for page in pages}
    for chosen in (pages, [page for page in pages if page.core]):
        reading, working = (
            site.format_minutes(sum(getattr(page, name) for page in chosen))
            for name in ("minutes", "working")
        )
        assert f"takes {reading}, with the exercises {working}" in " ".join(TEACHING.split())


def told(name: str, spec: str) -> Prediction:
    case = CASES[name]
    times = case["forward_s"], case["backward_s"], case["bytes"]
    workload = Workload.from_arrays(*times, update_s=case["update_s"])
    cost = AlphaBeta(**case["wire"])
    return predict(workload, make_plan(spec, workload, cost), cost)


@pytest.mark.parametrize(
    ("spec", "iteration_s", "exposed_s"),
    [("none", 12.5, 3.5), ("single", 15.5, 6.5), ("cuts:2,3", 14.0, 5.0)],
)
def test_the_answers_of_a_teachers_sheets(spec: str, iteration_s: float, exposed_s: float) -> None:
    step = told("toy", spec)
    assert step.iteration_s == pytest.approx(iteration_s)
    assert step.exposed_communication_s == pytest.approx(exposed_s)
    assert f"{iteration_s:g} s" in TEACHING and f"{exposed_s:g} s" in TEACHING
    for planner in ("ddp", "mg_wfbp", "exact"):
        assert f"{told('googlenet', planner).iteration_s * 1000:.0f} ms" in TEACHING
    apart = told("resnet50", "ddp").iteration_s / told("resnet50", "exact").iteration_s - 1
    assert f"the two are {apart:.1%}\napart" in TEACHING
