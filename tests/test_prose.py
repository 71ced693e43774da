"""Words of notebooks: numbers that a cell can compute are printed by it, and "Next" is what comes next."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import nbformat
import pytest

from ddlkit.report import book, folds

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
GIVEN = {
    "00_start_here": {"1.5": "2(P-1)/P of four"},
    "12_collectives": {"95.6%": "what TCP's headers leave: 1448 of 1514 bytes"},
    "33_fusion": {"32%": "claimed", "150%": "claimed"},
    "34_sparsification": {"0.001": "density", "0.03": "density", "0.001%": "smallest drawn",
                          "5.4": "start-up at 4 workers", "1.6": "start-up in the lab"},
    "38_sparse_training": {"0.001": "density"},
    "40_validate": {"100%": "what perfect overlap misses of what is exposed"},
    "41_lab": {"95.6%": "what TCP's headers leave", "1.3": "start-ups over computing", "1%": "axis",
               "90%": "processor-limited from", "2%": "stolen from"},
    "42_where_it_fails": {"99%": "a goal"},
    "44_disturbances": {"5%": "a case fails from"},
    "46_where_the_lab_ends": {"90%": "processor-limited from"},
    "61_sizes": {"1%": "a goal", "5%": "a goal", "99%": "most that an interval should hold"},
    "62_bucket_sizes": {"1%": "a tie within"},
}  # fmt: skip
"""By notebook, numbers that were set before any data, and what each is: constants, limits, goals."""
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

    Known are the literals of the notebook's own code, parameters among them, and GIVEN.
    """
    cells = nbformat.read(str(path), as_version=4).cells
    code = "\n".join(cell.source for cell in cells if cell.cell_type == "code")
    literals = {*re.findall(r"\d+\.\d+", code)}
    known = literals | {f"{one}%" for one in literals} | {*GIVEN.get(path.stem, ()), LEVEL}
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


def test_what_is_given_is_still_said() -> None:
    for path in NOTEBOOKS:
        text = path.read_text(encoding="utf-8")
        assert not [number for number in GIVEN.get(path.stem, ()) if number not in text], path.stem
    assert {*GIVEN} <= {path.stem for path in NOTEBOOKS}


@pytest.mark.parametrize(("path", "following"), [*pairwise(NOTEBOOKS)], ids=lambda path: path.stem)
def test_next_is_where_the_arrow_leads(path: Path, following: Path) -> None:
    """First the next notebook; another one beside it for those who take the short way."""
    last = nbformat.read(str(path), as_version=4).cells[-1].source
    assert last.startswith(folds.NEXT)
    assert re.findall(r"\]\((\w+\.ipynb)\)", last)[0] == following.name
