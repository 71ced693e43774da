"""How long executed notebooks take to read, and whether the course keeps within its limits."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import nbformat

PACE = {"words": 0.006, "figures": 1.9, "tables": 1.3, "sentences": 0.32}
"""Minutes that a word, figure, table and printed sentence take, as notebooks were read."""
BEGIN = 3.0
"""Minutes that every notebook takes besides."""
ROUNDED = 0.5
"""By which a notebook may take longer than it says, which is in whole minutes."""
LIMIT, COURSE, LINES = 25.0, 285.0, 1200
"""Minutes of one notebook, minutes of all that are read, lines of code of all."""
LONGER = {"10": 30.0, "14": 30.0}
"""Notebooks that may take longer than LIMIT."""
REFERENCE = "14"
"""The notebook that is looked up, not read: its minutes are not summed."""


def counts(cells: Sequence[Any]) -> Counter[str]:
    """Words, figures, tables and printed sentences in executed cells, exercises left out.

    A line that is printed is a sentence. Words of captions belong to their figure or table.
    """
    found: Counter[str] = Counter()
    for cell in _read(cells):
        if cell.cell_type == "markdown":
            found["words"] += len(cell.source.split())
            continue
        for output in cell.get("outputs", ()):
            page = str(output.get("data", {}).get("text/html", ""))
            image = "<figure" in page or "image/png" in output.get("data", {})
            found["figures"] += image
            found["tables"] += page.count("<table")
            said = _said(output, page if not image and "<table" not in page else "")
            found["words"] += len(said.split())
            found["sentences"] += sum(bool(line.strip()) for line in said.splitlines())
    return found


def _read(cells: Sequence[Any]) -> Iterable[Any]:
    """All cells but those from the heading of the exercises to the last cell, which says what comes next."""
    inside = False
    for cell in cells:
        if cell.cell_type == "markdown" and cell.source.startswith("**Next:**"):
            inside = False
        if cell.cell_type == "markdown" and "## Exercises" in cell.source:
            inside = True
        if not inside:
            yield cell


def _said(output: Any, page: str) -> str:
    """Text that an output shows: printed, or displayed as Markdown or as a box of HTML."""
    if "text" in output:
        return str(output["text"])
    return str(output.get("data", {}).get("text/markdown", "")) or re.sub(r"<[^>]*>", "", page)


def expected_minutes(cells: Sequence[Any]) -> float:
    """What reading executed cells takes at the PACE of all notebooks."""
    found = counts(cells)
    return BEGIN + sum(PACE[what] * n for what, n in found.items())


def code_lines(cells: Sequence[Any]) -> int:
    """Lines of code that are neither blank nor part of an import, nor parameters that the book put in."""
    total = 0
    for cell in cells:
        given = "injected-parameters" in cell.metadata.get("tags", ())
        if cell.cell_type == "code" and not given:
            lines = {n for n, line in enumerate(cell.source.splitlines(), 1) if line.strip()}
            for part in ast.walk(ast.parse(cell.source)):
                if isinstance(part, ast.Import | ast.ImportFrom):
                    lines -= {*range(part.lineno, (part.end_lineno or part.lineno) + 1)}
            total += len(lines)
    return total


def find_problems(executed: Sequence[Path]) -> list[str]:
    """Where executed notebooks take longer than they may, one line each; empty when all is well."""
    minutes, lines, problems = {}, 0, []
    for path in executed:
        cells = nbformat.read(str(path), as_version=4).cells
        minutes[path.stem] = expected_minutes(cells)
        lines += code_lines(cells)
        limit = LONGER.get(path.stem[:2], LIMIT)
        if minutes[path.stem] > limit:
            problems.append(f"{path.stem} takes {minutes[path.stem]:.1f} minutes, limit {limit:g}")
        said = re.search(r"^\* \*\*Time:\*\* (\d+) minutes", cells[0].source, re.MULTILINE)
        if said and minutes[path.stem] > int(said[1]) + ROUNDED:
            problems.append(f"{path.stem} takes {minutes[path.stem]:.1f} minutes, says {said[1]}")
    course = sum(value for name, value in minutes.items() if not name.startswith(REFERENCE))
    if course > COURSE:
        problems.append(f"the notebooks take {course:.0f} minutes, limit {COURSE:g}")
    if lines > LINES:
        problems.append(f"the notebooks have {lines} lines of code, limit {LINES}")
    return problems
