"""What answers a prediction stands behind a fold that the reader opens: in JupyterLab, and on the site.

Only the core notebooks ask for predictions. A fold begins behind a cell that says "**Predict first" and
ends before the next heading, the next such cell, an exercise, or the cell that names the next notebook.
On the site that is one fold. In a notebook's
file it is metadata that JupyterLab knows: the outputs of code are hidden, not the code, and so is text that
answers.

    python -m ddlkit.report.folds [NOTEBOOK ...]     marks them in the files; all notebooks if none is named
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import nbformat

from ddlkit import store

PROMPT = "**Predict first"
NEXT = "**Next:**"
HIDDEN = {"code": "outputs_hidden", "markdown": "source_hidden"}
"""By type of cell, what its metadata calls hidden in JupyterLab."""


def split(source: str) -> list[str]:
    """Markdown, cut before each of its headings.

    >>> split("so it is\\n\\n## Next\\n\\ntext")
    ['so it is', '## Next\\n\\ntext']
    """
    parts: list[list[str]] = [[]]
    fenced = False
    for line in source.splitlines():
        fenced ^= line.lstrip().startswith("```")
        if line.startswith("#") and not fenced and any(map(str.strip, parts[-1])):
            parts.append([])
        parts[-1].append(line)
    return ["\n".join(part).strip("\n") for part in parts]


def answers(cells: Sequence[Any]) -> list[bool]:
    """Whether each cell, cut at headings as `cut` does it, belongs to what answers a prediction."""
    found, asked = [], False
    for cell in cells:
        prose = cell.source if cell.cell_type == "markdown" else ""
        tags = " ".join(cell.metadata.get("tags", ()))
        if prose.startswith(("#", NEXT)) or PROMPT in prose or "exercise-" in tags:
            asked = False
        found.append(asked)
        asked = asked or PROMPT in prose
    return found


def cut(cells: Sequence[Any]) -> list[Any]:
    """The cells, copied; text that answers is a cell of its own, apart from the headings behind it."""
    apart: list[Any] = []
    for cell in cells:
        texts = split(cell.source) if cell.cell_type == "markdown" else [cell.source]
        for number, text in enumerate(texts):
            part = copy.deepcopy(cell)
            part.source = text
            if number and "id" in part:
                part["id"] = f"{cell['id'][:60]}-{number}"
            apart.append(part)
    return apart


def folded(cells: Sequence[Any]) -> list[Any]:
    """`cut`, and metadata "opens" and "closes" at the first and last cell of each fold."""
    parts = cut(cells)
    inside = answers(parts)
    for number, (part, within) in enumerate(zip(parts, inside, strict=True)):
        part.metadata["opens"] = within and not inside[number - 1]
        part.metadata["closes"] = within and not [*inside, False][number + 1]
    return parts


def marked(cells: Sequence[Any]) -> list[Any]:
    """The cells as JupyterLab folds them; text is cut only where an answer ends at a heading within it."""
    found: list[Any] = []
    for cell in cells:
        first, *rest = cut([cell])
        within = answers([*cut(found), first])[-1]
        settings = dict(first.metadata.pop("jupyter", {}))
        settings.pop(HIDDEN.get(cell.cell_type, ""), None)
        if within and cell.cell_type in HIDDEN:
            settings[HIDDEN[cell.cell_type]] = True
        if settings:
            first.metadata["jupyter"] = settings
        found.append(first)
        if rest and within:
            rest[0].source = "\n\n".join(part.source for part in rest)
            rest[0].metadata.pop("jupyter", None)
            found.append(rest[0])
        elif rest:
            first.source = cell.source
    return found


def main(paths: Sequence[str]) -> int:
    """Mark the answers in the files of notebooks."""
    for path in map(Path, paths) if paths else sorted(store.NOTEBOOKS.glob("*.ipynb")):
        notebook = nbformat.read(str(path), as_version=4)
        notebook.cells = marked(notebook.cells)
        nbformat.validate(notebook)
        store.atomic_write_text(path, nbformat.writes(notebook, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
