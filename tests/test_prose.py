"""Words of notebooks: numbers that a cell can compute are printed by it, and "Next" is what comes next."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import nbformat
import pytest

from ddlkit import store
from ddlkit.report import book, folds, site

NOTEBOOKS = book.notebooks()
NUMBER = re.compile(r"(?<![\w.])(?:\d+\.\d+%?|\d+%)")
NOT_PROSE = re.compile(
    r"```.*?```|\$\$.*?\$\$|\$[^$\n]*\$|`[^`]*`|\]\([^)]*\)|^\|.*$", re.DOTALL | re.MULTILINE
)
SENTENCE = re.compile(r"(?<=[.?!])\s+(?=[A-Z*(])")
FROM_ELSEWHERE = re.compile(r"record|print|paper|text|stat(?:e|es|ed)\b|claim|errat", re.IGNORECASE)
"""The sentence says where its number is from: a recording, what a paper prints, states or claims."""
BY_HAND = re.compile(r"\d [x+=] \d|\b(?:let|if|when|suppose|up to which)\b", re.IGNORECASE)
"""It computes before the reader's eyes, or supposes."""
LEVEL = "95%"
"""Of every interval in the workbook."""


def sentences(text: str) -> Iterator[str]:
    """Of Markdown without code, formulas, links and tables; none of a prediction or of exercises."""
    text = text.partition("## Exercises")[0]
    for paragraph in re.split(r"\n\s*\n|\n(?=[*#\d])", NOT_PROSE.sub("", text)):
        yield from SENTENCE.split(" ".join(paragraph.partition(folds.PROMPT)[0].split()))


def of_the_data(text: str, known: set[str]) -> list[str]:
    """Sentences with a number that is neither ``known`` nor said to be from elsewhere, or by hand."""
    return [
        sentence
        for sentence in sentences(text)
        if {*NUMBER.findall(sentence)} - known
        and not FROM_ELSEWHERE.search(sentence)
        and not BY_HAND.search(sentence)
    ]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_number_that_a_cell_can_compute_stands_in_no_sentence(path: Path) -> None:
    """Else it contradicts other data that it stands beside: print it, or say which recording or paper has it.

    Known are the literals of the notebook's own code, parameters among them.
    """
    cells = nbformat.read(str(path), as_version=4).cells
    code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    literals = {*re.findall(r"\d+\.\d+", code)}
    known = literals | {f"{one}%" for one in literals} | {LEVEL}
    prose = [cell.source for cell in cells if cell.cell_type == "markdown"]
    assert not [line for text in prose for line in of_the_data(text, known)]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("The model is off by 0.2% in the median.", True),
        ("It takes 1.5 s longer.", True),
        ("In the recording the model is off by 0.2%.", False),
        ("The paper has 8.4%.", False),
        ("One message ends at 9 + 0.5 + 6 = 15.5 s.", False),
        ("If the factor were 0.25, it would last.", False),
        ("| off by | 0.2% |", False),
        ("**Predict first.** Is it 0.5% or 5%?", False),
        ("so it is.\n\n## Exercises\n\n1. **By hand.** A step takes 0.5 s.", False),
        ("`predict(0.5)` says $t = 0.5$; four workers, two links.", False),
    ],
)
def test_which_sentences_state_a_result(text: str, found: bool) -> None:
    assert bool(of_the_data(text, set())) == found


@pytest.mark.parametrize(("path", "following"), [*pairwise(NOTEBOOKS)], ids=lambda path: path.stem)
def test_next_is_where_the_arrow_leads(path: Path, following: Path) -> None:
    """First the next notebook; another one beside it for those who take the short way."""
    last = nbformat.read(str(path), as_version=4).cells[-1].source
    assert last.startswith(folds.NEXT)
    assert re.findall(r"\]\((\w+\.ipynb)\)", last)[0] == following.name


PRIVATE = re.compile(
    r"\b(?:foret(?:ell|old)\w*|frugal|paced|unsent|woken|strangers?|zygote|mended|dear(?:er|est)?"
    r"|travels? together|(?:first|second|third|fourth|fifth) (?:look|grid)|looks? (?:one|two|three|four)"
    r"|steady grid|carried over)\b",
    re.IGNORECASE,
)
"""Words of this project's own for which the field has one: see docs/GLOSSARY.md."""
PAGES = [*NOTEBOOKS, *(store.ROOT / "solutions").glob("*.ipynb"), store.ROOT / "README.md",
         *(store.ROOT / "docs").glob("*.md"), *Path(site.__file__).parent.glob("*.html"),
         store.DATA / "figures.yml"]  # fmt: skip


def seen(cell: Any) -> str:
    """Of a cell, what readers read: the words of code are its strings."""
    if cell.cell_type != "code":
        return str(cell.source)
    tree = ast.parse(re.sub(r"^%.*", "pass", cell.source, flags=re.MULTILINE))
    texts = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
    return "\n".join(text for text in texts if isinstance(text, str))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_readers_meet_the_words_of_the_field(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        text = "\n".join(map(seen, nbformat.reads(text, as_version=4).cells))
    found = [match[0] for match in PRIVATE.finditer(text)]
    assert found == []


OLD = re.compile(
    r"\b(?:00_start_here|10_layers|11_kernels|12_collectives|20_fit|30_timeline|31_dag|32_osf|33_fusion"
    r"|34_sparsification|35_sharing|36_negotiation|37_replaced|38_sparse_training|39_each_message|40_validate"
    r"|41_lab|42_where_it_fails|43_extrapolation|44_disturbances|45_two_clusters|46_where_the_lab_ends"
    r"|50_what_if|60_other_clusters|61_sizes|62_bucket_sizes|80_tables|90_verdicts)\b"
)
"""Notebooks as v0.2-studies has them: CHANGELOG.md and docs/studies.md alone may name them."""


def test_nothing_leads_to_a_notebook_that_is_gone() -> None:
    places = [*(store.ROOT / "ddlkit").rglob("*"), *(store.ROOT / "docs").rglob("*"),
              *(store.ROOT / "examples").glob("*"), *(store.DATA / "papers").rglob("*"),
              *(store.ROOT / "reports").rglob("*.md"), *store.ROOT.glob("*.md"), *PAGES]  # fmt: skip
    kinds = {".py", ".md", ".yml", ".csv", ".html", ".json", ".ipynb", ".sh"}
    allowed = {store.ROOT / "docs" / "studies.md", store.ROOT / "CHANGELOG.md"}
    named = [path for path in places if path.suffix in kinds and path not in allowed
             if OLD.search(path.read_text(encoding="utf-8"))]  # fmt: skip
    assert named == []
