"""Words of notebooks: the field's, not this project's own; "Next" is what comes next."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import nbformat

from ddlkit import store
from ddlkit.report import book, site

NOTEBOOKS = book.notebooks()


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


def test_readers_meet_the_words_of_the_field() -> None:
    found = {}
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".ipynb":
            text = "\n".join(map(seen, nbformat.reads(text, as_version=4).cells))
        found[path.name] = [match[0] for match in PRIVATE.finditer(text)]
    assert {name: words for name, words in found.items() if words} == {}
