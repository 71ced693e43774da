"""What docs/teaching.md tells a teacher is so: minutes, and the answers of its sheets."""

from __future__ import annotations

import re

import pytest

from ddlkit import store
from ddlkit.core.cost import AlphaBeta
from ddlkit.core.iteration import Prediction, predict
from ddlkit.core.workload import Workload
from ddlkit.model.predictor import make_plan
from ddlkit.report import book, catalog
from ddlkit.report.site import Page, buckets, format_minutes

TEXT = (store.ROOT / "docs" / "teaching.md").read_text(encoding="utf-8")
CASES = buckets.cases()


def told(name: str, spec: str) -> Prediction:
    case = CASES[name]
    times = case["forward_s"], case["backward_s"], case["bytes"]
    workload = Workload.from_arrays(*times, update_s=case["update_s"])
    cost = AlphaBeta(**case["wire"])
    return predict(workload, make_plan(spec, workload, cost), cost)


def test_minutes_are_those_of_the_notebooks() -> None:
    cells = re.findall(r"^\| (\d\d) .*? \| (\d+) \| (\d+) \|", TEXT, re.M)
    rows = {number: (int(reading), int(working)) for number, reading, working in cells}
    pages = map(Page, book.notebooks())
    assert rows == {page.number: (page.minutes, page.working) for page in pages}


def test_the_sums_are_those_of_the_table_and_the_readme_states_them() -> None:
    rows = re.findall(r"^\| \d\d .*? \| (\d+) \| (\d+) \| (\w+)", TEXT, re.M)
    for chosen in (rows, [row for row in rows if row[2] == "core"]):
        reading, working = (format_minutes(sum(int(row[at]) for row in chosen)) for at in (0, 1))
        assert f"takes {reading}, with the exercises {working}" in " ".join(TEXT.split())
    readme = " ".join((store.ROOT / "README.md").read_text(encoding="utf-8").split())
    pages = [Page(path) for path in book.notebooks()]
    core = sum(page.minutes for page in pages if page.core)
    read = sum(page.minutes for page in pages if page.number != catalog.REFERENCE)
    assert f"core path ({core} minutes)" in readme and f": all in {format_minutes(read)}." in readme


@pytest.mark.parametrize(
    ("spec", "iteration_s", "exposed_s"),
    [("none", 12.5, 3.5), ("single", 15.5, 6.5), ("cuts:2,3", 14.0, 5.0)],
)
def test_the_toy_of_sheet_1(spec: str, iteration_s: float, exposed_s: float) -> None:
    step = told("toy", spec)
    assert step.iteration_s == pytest.approx(iteration_s)
    assert step.exposed_communication_s == pytest.approx(exposed_s)
    assert f"{iteration_s:g} s" in TEXT and f"{exposed_s:g} s" in TEXT


def test_googlenet_of_sheet_2() -> None:
    for spec in ("ddp", "mg_wfbp", "exact"):
        assert f"{told('googlenet', spec).iteration_s * 1000:.0f} ms" in TEXT
    apart = told("resnet50", "ddp").iteration_s / told("resnet50", "exact").iteration_s - 1
    assert f"the two are {apart:.1%}\napart" in TEXT
    case = CASES["googlenet"]
    last = sum(case["bytes"][case["ends"][-2] :]) / sum(case["bytes"])
    assert last > 0.8, "GoogLeNet's last bucket holds nearly everything"
