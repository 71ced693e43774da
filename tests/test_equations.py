"""The way from an equation to its code: every citation is found, and none leads to nowhere."""

from __future__ import annotations

import re
from pathlib import Path

import pandas as pd
import pytest

from ddlkit.report import equations
from ddlkit.report.claims import PAPERS


@pytest.fixture(scope="module")
def listed() -> pd.DataFrame:
    return equations.index()


def cited(folder: Path, modules: dict[str, str]) -> pd.DataFrame:
    """What is cited in a package that holds these modules by file name."""
    for name, text in modules.items():
        path = folder / "kit" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return equations.citations(folder / "kit")


def function(docstring: str) -> str:
    return f'def f() -> None:\n    """{docstring}"""\n'


def test_the_index_has_every_equation_and_every_citation_once(listed: pd.DataFrame) -> None:
    numbers = {paper: set(rows["equation"]) for paper, rows in listed.groupby("paper")}
    assert set(numbers) == set(PAPERS)
    for paper, last in (("osf", 18), ("dag", 6), ("omgs", 25)):
        assert {f"Eq {n}" for n in range(1, last + 1)} <= numbers[paper]
    assert not listed.isna().any().any()
    key = ["paper", "equation", "function"]
    assert not listed.duplicated(key).any()
    every, in_index = equations.citations(), set(map(tuple, listed[key].to_numpy()))
    assert len(every) > 10 and set(map(tuple, every[key].to_numpy())) <= in_index
    (update,) = listed[listed["function"] == "ddlkit.papers.osf.update_s"].to_dict("records")
    assert (update["paper"], update["equation"]) == ("osf", "Eq 7")
    file, _, line = update["place"].partition(":")
    source = (equations.PACKAGE.parent / file).read_text().splitlines()
    assert source[int(line) - 1].startswith("def update_s")


@pytest.mark.parametrize(
    ("docstring", "numbers"),
    [
        ("A sum (osf Eqs 3, 8-9 and 11).", [f"Eq {n}" for n in (3, 8, 9, 11)]),
        ("osf Algorithm 1 and Eq 7, literally.", ["Algorithm 1", "Eq 7"]),
        ("A bound under osf Eqs 4, 7 and 11.", []),
        ("osf 4.4.1, first equation: a\n    ratio.", ["4.4.1, first equation"]),
        ("osf Eq\n    3: a line is broken.", ["Eq 3"]),
        ("Eq 3 of nobody, and osf Tab 2.", []),
    ],
)
def test_citations_are_read_as_they_are_written(
    tmp_path: Path, docstring: str, numbers: list[str]
) -> None:
    rows = cited(tmp_path, {"core/x.py": function(docstring)})
    assert rows[["paper", "equation"]].to_numpy().tolist() == [["osf", n] for n in numbers]


def test_places_and_papers_of_modules_methods_and_packages(tmp_path: Path) -> None:
    """A paper's own module need not name it; what reports on a formula is none."""
    method = '    def cost(self) -> None:\n        """dag Eq 6: speedup."""\n'
    modules = {
        "papers/dag/__init__.py": f"class A:\n{method}",
        "papers/omgs/more.py": function("The gain by case (Eq 21). More in Eq 22."),
        "report/page.py": function("dag Eq 4: not a formula's home."),
    }
    rows = cited(tmp_path, modules)[["paper", "equation", "function", "place"]].to_numpy().tolist()
    frame = equations.index(tmp_path / "kit")
    assert equations.counts(frame) == (2, len(frame))
    assert (frame["function"] == "-").sum() == len(frame) - 2
    assert rows == [
        ["dag", "Eq 6", "kit.papers.dag.A.cost", "kit/papers/dag/__init__.py:2"],
        ["omgs", "Eq 21", "kit.papers.omgs.more.f", "kit/papers/omgs/more.py:1"],
    ]


def test_the_committed_page_is_the_docstrings(listed: pd.DataFrame) -> None:
    page = equations.PAGE.read_text(encoding="utf-8")
    assert page == equations.markdown(listed), "run python -m ddlkit.report.equations"
    links = re.findall(r"\]\(([^)]+)\)", page)
    assert links and all((equations.PAGE.parent / link).is_file() for link in links)
