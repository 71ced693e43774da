"""The way from an equation to its code: every citation is found, and none leads to nowhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ddlkit.core.errors import UserError
from ddlkit.report import equations
from ddlkit.report.claims import PAPERS


def made(folder: Path, modules: dict[str, str]) -> Path:
    """A package that holds these modules by file name."""
    for name, text in modules.items():
        path = folder / "kit" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder / "kit"


def function(docstring: str, name: str = "f") -> str:
    return f'def {name}() -> None:\n    """{docstring}"""\n'


def found(folder: Path, docstring: str, module: str = "core/x.py") -> list[tuple[str, str]]:
    cited = equations.citations(made(folder, {module: function(docstring)}))
    return [(one.paper, one.equation) for one in cited]


def test_the_list_is_whole_and_in_our_words() -> None:
    frame = equations.equations()
    numbers = {paper: set(rows["equation"]) for paper, rows in frame.groupby("paper")}
    assert set(numbers) == set(PAPERS)
    for paper, last in (("osf", 18), ("dag", 6), ("omgs", 25)):
        assert {f"Eq {n}" for n in range(1, last + 1)} <= numbers[paper]
    assert {"Algorithm 1", "Algorithm 2", "Theorem 1"} <= numbers["omgs"]
    assert frame["defines"].str.len().between(5, 100).all()


def test_every_citation_in_the_code_is_of_an_equation_that_there_is() -> None:
    known = set(zip(*(equations.equations()[name] for name in ("paper", "equation")), strict=True))
    cited = {(one.paper, one.equation): one.place for one in equations.citations()}
    assert len(cited) > 10
    assert {key: place for key, place in cited.items() if key not in known} == {}


def test_the_index_has_every_equation_once_a_function_and_a_dash_for_none() -> None:
    frame = equations.index()
    assert not frame.isna().any().any()
    assert not frame.duplicated(["paper", "equation", "function"]).any()
    assert equations.count(frame) == len(equations.equations())
    forms = frame[frame["function"] == "ddlkit.papers.osf.update_s"]
    assert forms[["paper", "equation"]].to_numpy().tolist() == [["osf", "Eq 7"]]
    file, _, line = forms["place"].iloc[0].partition(":")
    source = (equations.PACKAGE.parent / file).read_text().splitlines()
    assert source[int(line) - 1].startswith("def update_s")
    assert forms["sentence"].iloc[0].startswith("osf Eq 7: ")


def test_an_equation_without_code_is_a_dash(tmp_path: Path) -> None:
    frame = equations.index(made(tmp_path, {"core/x.py": function("osf Eq 3: a sum.")}))
    rows = frame.set_index(["paper", "equation"])
    assert rows.loc[("osf", "Eq 3"), "function"] == "kit.core.x.f"
    assert equations.coded(frame) == 1
    assert (rows.drop(index=("osf", "Eq 3"))["function"] == "-").all()


@pytest.mark.parametrize(
    ("docstring", "cited"),
    [
        ("A sum (osf Eqs 3, 8-9 and 11).", [f"Eq {n}" for n in (3, 8, 9, 11)]),
        ("osf Algorithm 1 and Eq 7, literally.", ["Algorithm 1", "Eq 7"]),
        ("A sum.\n\n    Bounded by osf Eq 3.", []),
        ("A bound under osf Eqs 4, 7 and 11.", []),
        ("osf Eq 2: as Eq 1 with more.", ["Eq 2"]),
        ("osf 4.4.1, first equation: a\n    ratio.", ["4.4.1, first equation"]),
        ("osf Eq\n    3: a line is broken.", ["Eq 3"]),
        ("Eq 3 of nobody, and osf Tab 2.", []),
    ],
)
def test_citations_are_read_as_they_are_written(
    tmp_path: Path, docstring: str, cited: list[str]
) -> None:
    assert found(tmp_path, docstring) == [("osf", one) for one in cited]


def test_a_papers_own_module_need_not_name_it(tmp_path: Path) -> None:
    text = "The gain by case (Eq 21). More in Eq 22."
    assert found(tmp_path, text, "papers/omgs/merging.py") == [
        ("omgs", "Eq 21"),
    ]


def test_methods_and_nested_packages_have_their_dotted_names(tmp_path: Path) -> None:
    method = '    def cost(self) -> None:\n        """dag Eq 6: speedup."""\n'
    package = made(
        tmp_path,
        {
            "papers/dag/__init__.py": f"class A:\n{method}",
            "papers/dag/more.py": function("dag Eq 5."),
            "report/page.py": function("dag Eq 4: not a formula's home."),
        },
    )
    places = {one.function: one.place for one in equations.citations(package)}
    assert places == {
        "kit.papers.dag.A.cost": "kit/papers/dag/__init__.py:2",
        "kit.papers.dag.more.f": "kit/papers/dag/more.py:1",
    }


def test_a_damaged_list_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "osf").mkdir()
    (tmp_path / "osf" / "equations.csv").write_text("equation,defines\nEq 1,\n")
    with pytest.raises(UserError, match="row at line 2, column defines: '' must not be empty"):
        equations.index(folder=tmp_path)


def test_the_committed_page_is_the_docstrings() -> None:
    page, listed = equations.PAGE.read_text(encoding="utf-8"), equations.index()
    assert page == equations.markdown(listed), "run python -m ddlkit.report.equations"
    links = re.findall(r"\]\(([^)]+)\)", page)
    assert links and all((equations.PAGE.parent / link).is_file() for link in links)
