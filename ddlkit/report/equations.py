"""From a published equation to the code that is it, found in docstrings without importing anything.

``python -m ddlkit.report.equations`` writes docs/EQUATIONS.md anew.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

import ddlkit
from ddlkit import store
from ddlkit.papers import load
from ddlkit.report.claims import PAPERS, paper_table

PACKAGE = Path(ddlkit.__file__).parent
PAGE = PACKAGE.parent / "docs" / "EQUATIONS.md"
ROOMS = ("core", "papers", "run")
"""Where the formulas and algorithms are; what reports on them only names them."""
CITATION = ["paper", "equation", "function", "sentence", "place"]

_NUMBERS = r"\d+(?:(?:-|, | and | or | to )\d+)*"
_ONE = rf"(?:(?:Eq|Algorithm|Theorem)s? {_NUMBERS}|\d(?:\.\d)+, \w+ equation)"
_CITED = re.compile(rf"(?:\b({'|'.join(PAPERS)}) )?\b({_ONE}(?:(?:, | and |; ){_ONE})*)")


def citations(package: Path = PACKAGE) -> pd.DataFrame:
    """Return paper, equation, function, sentence and place (file:line) of functions that are equations.

    The first sentence of such a docstring cites it in full, as in "osf Eq 12" (in a paper's own module also
    without the paper): at its start, in brackets, after a comma or colon, or as "of ...".
    """
    rows = []
    for path in (path for room in ROOMS for path in sorted((package / room).rglob("*.py"))):
        file = path.relative_to(package.parent)
        module = ".".join(file.with_suffix("").parts).removesuffix(".__init__")
        of_paper = next((part for part in file.with_suffix("").parts if part in PAPERS), "")
        for name, node in _documented(ast.parse(path.read_text(encoding="utf-8")), module):
            text = " ".join((ast.get_docstring(node) or "").split())
            first = re.split(r"(?<=\.) ", text, maxsplit=1)[0]
            for key in dict.fromkeys(_cited(first, of_paper)):
                rows.append(
                    (*key, name, first.replace("`", ""), f"{file.as_posix()}:{node.lineno}")
                )
    return pd.DataFrame(rows, columns=CITATION)


def index(package: Path = PACKAGE) -> pd.DataFrame:
    """Return a row per equation and function, in the papers' order; equations without code have "-".

    Columns: those of `citations`, and what the equation ``defines``, in our words.
    """
    listed = [paper_table(paper, "equations").assign(paper=paper) for paper in PAPERS]
    every = pd.concat(listed, ignore_index=True)[["paper", "equation", "defines"]]
    return every.merge(citations(package), how="left", on=["paper", "equation"]).fillna("-")


def counts(listed: pd.DataFrame) -> tuple[int, int]:
    """Return for how many equations of an `index` some function is it, and how many there are."""
    names = listed.groupby(["paper", "equation"])["function"].first()
    return int((names != "-").sum()), len(names)


def markdown(listed: pd.DataFrame) -> str:
    """Return the equations of an `index` as a page: what each is, and the functions that are it."""
    parts = [
        "# From a published equation to the code",
        "Made from docstrings by `python -m ddlkit.report.equations`; a test fails when it is stale. "
        "{} of {} equations and algorithms are in the code.".format(*counts(listed)),
    ]
    for paper in load().values():
        lines = ["| equation | what it is | function | file |", "|---|---|---|---|"]
        rows = listed[listed["paper"] == paper.key]
        for (equation, defines), cited in rows.groupby(["equation", "defines"], sort=False):
            first = cited["function"].str.contains(paper.key)
            functions = pd.concat([cited[first], cited[~first]]).query("function != '-'")
            files = functions["place"].str.rpartition(":")[0].unique()
            names = "<br>".join(f"`{name}`" for name in functions["function"])
            links = "<br>".join(f"[{file}](../{file})" for file in files)
            lines.append(f"| {equation} | {defines} | {names or '-'} | {links or '-'} |")
        parts += [f"## `{paper.key}`: {paper.title}", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def _documented(node: ast.AST, prefix: str) -> Iterator[tuple[str, ast.FunctionDef | ast.ClassDef]]:
    """Yield functions, classes and methods with their dotted names, none inside a function."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.ClassDef):
            name = f"{prefix}.{child.name}"
            yield name, child
            if isinstance(child, ast.ClassDef):
                yield from _documented(child, name)


def _cited(text: str, of_paper: str) -> list[tuple[str, str]]:
    """Return (paper, equation) that a sentence is, mere remarks left out; by their paper's name, if any is.

    Without a paper before it, an equation is that of the paper last named, at first of ``of_paper``.
    """
    paper, keys = of_paper, []
    for match in _CITED.finditer(text):
        paper = match[1] or paper
        stands = bool(re.search(r"(?:^|[(,:] ?|\bof )$", text[: match.start()]))
        for cited in re.findall(_ONE, match[2]):
            keys += [((paper, each), bool(match[1]), stands) for each in _expanded(cited)]
    named = any(by_name for _, by_name, _ in keys)
    return [key for key, by_name, stands in keys if stands and (by_name if named else of_paper)]


def _expanded(citation: str) -> list[str]:
    """Return Eq 3, Eq 8, Eq 9 and Eq 10 for "Eqs 3, 8-10"."""
    kind, _, numbers = citation.partition(" ")
    if not kind[0].isalpha():
        return [citation]
    spans = [re.findall(r"\d+", part) for part in re.split(", | and | or ", numbers)]
    every = [n for span in spans for n in range(int(span[0]), int(span[-1]) + 1)]
    return [f"{kind.removesuffix('s')} {number}" for number in every]


if __name__ == "__main__":
    store.atomic_write_text(PAGE, markdown(index()))
    print(PAGE.relative_to(PACKAGE.parent))
