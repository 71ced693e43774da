"""From a published equation to the code that is it, found in docstrings without importing anything.

``python -m ddlkit.report.equations`` writes docs/EQUATIONS.md anew.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pandas as pd

import ddlkit
from ddlkit import store
from ddlkit.papers import load
from ddlkit.report.claims import PAPERS, transcribed_sheet

PACKAGE = Path(ddlkit.__file__).parent
PAGE = PACKAGE.parent / "docs" / "EQUATIONS.md"
ROOMS = ("core", "papers", "run")
"""Where the formulas and algorithms are; what reports on them only names them."""

_SCHEMA = store.Schema(
    "equations",
    tuple(store.Column(name, "str", "named") for name in ("equation", "defines")),
    key=("equation",),
)

_NUMBERS = r"\d+(?:(?:-|, | and | or | to )\d+)*"
_ONE = rf"(?:(?:Eq|Algorithm|Theorem)s? {_NUMBERS}|\d(?:\.\d)+, \w+ equation)"
_CITED = re.compile(rf"(?:\b({'|'.join(PAPERS)}) )?\b({_ONE}(?:(?:, | and |; ){_ONE})*)")


class Citation(NamedTuple):
    """A function or class that is an equation: the first sentence of its docstring cites it in full.

    As in "osf Eq 12" (in a paper's own module also without the paper): at its start, in brackets, after a
    comma or colon, or as "of ...". place : file below the package's parent, and line
    """

    paper: str
    equation: str
    function: str
    sentence: str
    place: str


def equations(folder: Path | None = None) -> pd.DataFrame:
    """The papers' equations and algorithms: paper, equation, defines (in our words).

    Raises UserError when an equations.csv below ``folder`` (data/papers by default) is damaged or missing.
    """
    frames = [
        _SCHEMA.frame(transcribed_sheet(paper, "equations", folder)).assign(paper=paper)
        for paper in PAPERS
    ]
    return pd.concat(frames, ignore_index=True)[["paper", "equation", "defines"]]


def citations(package: Path = PACKAGE) -> list[Citation]:
    """Every citation in docstrings of functions and classes, by file and line."""
    return [
        citation
        for room in ROOMS
        for path in sorted((package / room).rglob("*.py"))
        for citation in _of_module(path, package.parent)
    ]


def index(package: Path = PACKAGE, folder: Path | None = None) -> pd.DataFrame:
    """One row per equation and function, in the papers' order; equations without code have "-".

    Columns: paper, equation, defines, function, sentence, place. Raises UserError as `equations`.
    """
    cited = pd.DataFrame(citations(package), columns=Citation._fields)
    return equations(folder).merge(cited, how="left", on=["paper", "equation"]).fillna("-")


def count(listed: pd.DataFrame) -> int:
    """How many equations an `index` holds."""
    return len(listed.groupby(["paper", "equation"]))


def coded(listed: pd.DataFrame) -> int:
    """For how many equations of an `index` some function is it."""
    return count(listed[listed["function"] != "-"])


def markdown(listed: pd.DataFrame) -> str:
    """The equations of an `index` as a page: what each is, and the functions that are it."""
    parts = [
        "# From a published equation to the code",
        "Made from docstrings by `python -m ddlkit.report.equations`; a test fails when it is stale. "
        f"{coded(listed)} of {count(listed)} equations and algorithms are in the code.",
    ]
    for paper in load().values():
        lines = ["| equation | what it is | function | file |", "|---|---|---|---|"]
        rows = listed[listed["paper"] == paper.key]
        for (equation, defines), found in rows.groupby(["equation", "defines"], sort=False):
            functions = found[found["function"] != "-"].sort_values(
                "function", key=lambda names: ~names.str.contains(paper.key), kind="stable"
            )
            files_of = functions["place"].str.rpartition(":")[0].unique()
            names = "<br>".join(f"`{name}`" for name in functions["function"])
            links = "<br>".join(f"[{file}](../{file})" for file in files_of)
            lines.append(f"| {equation} | {defines} | {names or '-'} | {links or '-'} |")
        parts += [f"## `{paper.key}`: {paper.title}", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


def _of_module(path: Path, root: Path) -> Iterator[Citation]:
    file = path.relative_to(root)
    parts = file.with_suffix("").parts
    own = next((part for part in parts if part in PAPERS), "")
    module = ".".join(parts).removesuffix(".__init__")
    for name, node in _documented(ast.parse(path.read_text(encoding="utf-8")), module):
        text = " ".join((ast.get_docstring(node) or "").split())
        first = re.split(r"(?<=\.) ", text, maxsplit=1)[0]
        cited = list(_cited(first, own))
        in_full = [citation for citation in cited if citation[1]] or (cited if own else [])
        for key in dict.fromkeys(key for key, _, stands in in_full if stands):
            yield Citation(*key, name, first.replace("`", ""), f"{file.as_posix()}:{node.lineno}")


Documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def _documented(node: ast.AST, prefix: str) -> Iterator[tuple[str, Documented]]:
    """Functions, classes and methods with their dotted names; what is inside a function is its own."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Documented):
            name = f"{prefix}.{child.name}"
            yield name, child
            if isinstance(child, ast.ClassDef):
                yield from _documented(child, name)


def _cited(text: str, own: str) -> Iterator[tuple[tuple[str, str], bool, bool]]:
    """(paper, equation); whether the paper stands before it; whether it is no mere remark.

    Without a paper before it, an equation is that of the paper last named, at first of ``own``.
    """
    paper = own
    for match in _CITED.finditer(text):
        paper = match[1] or paper
        stands = bool(re.search(r"(?:^|[(,:] ?|\bof )$", text[: match.start()]))
        for one in re.finditer(_ONE, match[2]) if paper else ():
            for equation in _expanded(one[0]):
                yield (paper, equation), bool(match[1]), stands


def _expanded(citation: str) -> list[str]:
    """ "Eqs 3, 8-10" is Eq 3, Eq 8, Eq 9 and Eq 10."""
    kind, _, numbers = citation.partition(" ")
    if not kind[0].isalpha():
        return [citation]
    spans = [re.findall(r"\d+", part) for part in re.split(", | and | or ", numbers)]
    return [
        f"{kind.removesuffix('s')} {number}"
        for span in spans
        for number in range(int(span[0]), int(span[-1]) + 1)
    ]


if __name__ == "__main__":
    store.atomic_write_text(PAGE, markdown(index()))
    print(PAGE.relative_to(PACKAGE.parent))
