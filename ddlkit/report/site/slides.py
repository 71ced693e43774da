"""A notebook as slides: its questions, predictions, formulas, code, figures, small tables, what was learned.

A slide is a section of a page that fills the screen: space and the arrows go on, and printing gives a page
each. Nothing is written for them: they are the executed notebook without its prose.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Sequence
from typing import Any

from ddlkit.report import folds

KEPT = ("#", "**Question.**", "$$", "|", "1. ", "* ")
"""How paragraphs begin that are kept; so are those that ask for a prediction."""
MOST_ROWS = 12
"""A longer table is for the page."""
WHOLE = ("## What was learned", "## Exercises")


def of(cells: Sequence[Any]) -> list[list[Any]]:
    """Cells of each slide, copied: text first, and a question before the figure that answers it."""
    slides: list[list[Any]] = []
    whole = False
    for cell in folds.cut(cells):
        if cell.cell_type == "markdown":
            whole = cell.source.startswith(WHOLE)
            for part in _texts(cell):
                if part.source.startswith("#") or not slides:
                    slides.append([])
                slides[-1].append(part)
        elif shown := _shown(cell, whole):
            if not slides or len(slides[-1]) > 1 or folds.PROMPT in slides[-1][-1].source:
                slides.append([*_title(slides)])
            slides[-1].append(shown)
    return [slide for slide in slides if _says_something(slide)]


def _texts(cell: Any) -> Iterator[Any]:
    """What is kept of a text, as one cell or none."""
    paragraphs = re.split(r"\n\s*\n", cell.source)
    if not cell.source.startswith(WHOLE):
        paragraphs = [one for one in paragraphs if one.startswith(KEPT) or folds.PROMPT in one]
    if paragraphs:
        part = copy.deepcopy(cell)
        part.source = "\n\n".join(paragraphs)
        yield part


def _shown(cell: Any, whole: bool) -> Any:
    """The cell with the figures, code and small tables that it put out, or all it did; None without."""
    kept = [one for one in cell.get("outputs", ()) if whole or _seen(one.get("data", {}))]
    if not kept or "exercise-" in " ".join(cell.metadata.get("tags", ())):
        return None
    part = copy.deepcopy(cell)
    part.outputs = kept
    part.metadata["code"] = part.metadata["algorithm"] = False
    return part


def _seen(data: Any) -> bool:
    page = str(data.get("text/html", ""))
    small = 0 < page.count("<tr") <= MOST_ROWS and "<details" not in page
    return small or "<figure" in page or "image/png" in data or "text/markdown" in data


def _title(slides: Sequence[Sequence[Any]]) -> Iterator[Any]:
    """The heading of the last slide, in bold, for one that goes on with it."""
    first = slides[-1][0] if slides and slides[-1] else None
    if first is not None and first.source.startswith(("#", "**")):
        title = copy.deepcopy(first)
        title["id"] = f"{first['id'][:50]}-{len(slides)}"
        title.source = f"**{first.source.partition(chr(10))[0].strip('#* ')}**"
        yield title


def _says_something(slide: Sequence[Any]) -> bool:
    """Whether there is more to it than a heading."""
    return len(slide) > 1 or "\n" in slide[0].source.strip()
