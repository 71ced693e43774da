"""One executed notebook as a page that works offline: folded code, formulas as MathML, captions."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jinja2
import nbformat
from latex2mathml import converter as latex2mathml
from nbconvert import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath

from ddlkit.core.errors import UserError
from ddlkit.report.catalog import Entry

TEMPLATES = jinja2.FileSystemLoader(Path(__file__).parent)

_REMOTE = re.compile(
    r"<script\b|<(?:img|link|iframe|source|video|audio)\b[^>]*?(?:src|href)\s*=\s*[\"']?(?:https?:)?//[^\s\"'>]*"
    r"|@import|url\(\s*[\"']?(?:https?:)?//[^\s\"')]*",
    re.IGNORECASE,
)

_LIMITS = {"∑", "∏", "max", "min"}
_STACKED = {"msub": "munder", "msup": "mover", "msubsup": "munderover"}
"""Limits of a displayed sum stand below and above it; latex2mathml sets them beside it."""


class Page:
    """One executed notebook: its name, title, what its opening table says of it, and its HTML.

    line : the opening table's row "in short"; minutes : the first number of its row "reading". Empty and
        0 where a notebook has no such row.
    """

    def __init__(self, path: Path) -> None:
        self.notebook: Any = nbformat.read(str(path), as_version=4)
        self.name, self.file, self.number = path.stem, f"{path.stem}.html", path.stem[:2]
        prose = "\n".join(c.source for c in self.notebook.cells if c.cell_type == "markdown")
        self.title = _first(r"^#\s+(.+)$", prose) or self.name
        self.line = _first(r"^\| in short \| (.+) \|$", prose)
        self.minutes = int(_first(r"^\| reading \| (\d+)", prose) or 0)

    def body(self, figures: Sequence[Entry]) -> str:
        """The cells. Those that save one of ``figures`` get its caption as text and for those who cannot see.

        Raises UserError for a formula that cannot be shown offline and for what would load from a network.
        """
        for number, cell in enumerate(self.notebook.cells, 1):
            named = set(re.findall(r"""["']([a-z0-9-]+)["']""", cell.source))
            shown = [entry for entry in figures if entry.id in named]
            cell.metadata["figure"] = None
            if shown and cell.cell_type == "code":
                cell.metadata["alt"] = shown[0].caption
                numbers = f"figures/{shown[0].id}.csv"
                cell.metadata["figure"] = {"grade": shown[0].grade, "numbers": numbers}
            cell.metadata.setdefault("alt", f"output of cell {number} of {self.title}")
        exporter = HTMLExporter(
            template_name="basic",
            template_file="cells.html.j2",
            extra_loaders=[TEMPLATES],
            exclude_input_prompt=True,
            exclude_output_prompt=True,
        )
        exporter.register_filter("first_comment", _first_comment)
        exporter.register_filter("markdown2html", self._markdown)
        body = str(exporter.from_notebook_node(self.notebook)[0])
        if remote := _REMOTE.search(body):
            raise UserError(
                f"notebook {self.name} would load {remote[0][:80]!r}: pages must work offline"
            )
        return body

    def _markdown(self, source: str) -> str:
        """HTML of Markdown whose formulas are MathML."""
        renderer = _MathML(escape=False, exclude_anchor_links=True)
        try:
            return str(MarkdownWithMath(renderer=renderer).render(source))
        except _FormulaError as error:
            raise UserError(f"notebook {self.name}: cannot show the formula {error}") from error


def _first(pattern: str, text: str) -> str:
    found = re.search(pattern, text, re.MULTILINE)
    return found[1].strip() if found else ""


def _first_comment(source: str) -> str:
    """What a folded cell is called: its leading comment, else "code"."""
    first = source.lstrip().partition("\n")[0]
    return escape(first.lstrip("# ").strip() or "code") if first.startswith("#") else "code"


class _FormulaError(Exception):
    """A formula that latex2mathml does not understand; its text is the formula."""


class _MathML(IPythonRenderer):
    """Markdown renderer that turns formulas into MathML, which browsers show without a script."""

    def block_math(self, body: str) -> str:
        return _mathml(body, "block")

    def inline_math(self, body: str) -> str:
        return _mathml(body, "inline")

    def latex_environment(self, name: str, body: str) -> str:
        return _mathml(f"\\begin{{{name}}}{body}\\end{{{name}}}", "block")


def _mathml(formula: str, display: str) -> str:
    text = " ".join(formula.split())
    try:
        math = ElementTree.fromstring(latex2mathml.convert(text, xmlns="", display=display))
    except Exception as error:  # its many exceptions have no common base
        raise _FormulaError(f"{text!r} ({type(error).__name__})") from error
    for element in math.iter():
        # What the converter does not know it passes on as a name.
        if element.tag == "mi" and (element.text or "").startswith(("\\", "{", "}", "&")):
            raise _FormulaError(f"{text!r} (unknown: {element.text})")
        if display == "block" and len(element) and (element[0].text or "") in _LIMITS:
            element.tag = _STACKED.get(element.tag, element.tag)
    return ElementTree.tostring(math, encoding="unicode")
