"""The site, which loads nothing from a network, and REPRODUCTION.md, from the templates in this folder."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import jinja2
import nbformat
import pandas as pd
import yaml
from latex2mathml import converter as latex2mathml
from nbconvert import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.store.files import atomic_write
from workbook.common import catalog, outputs, places
from workbook.course import exercises
from workbook.plots.style import look
from workbook.site import buckets
from workbook.site import verdicts as papers
from workbook.validate import accuracy

TEMPLATES = jinja2.FileSystemLoader(Path(__file__).parent)

GLOSSARY, EQUATIONS = (
    places.ROOT / "docs" / f"{name}.md" for name in ("GLOSSARY", "EQUATIONS")
)
_LINKED = re.compile(r"\(\.\./(?:docs|reports)/(GLOSSARY|GOALS)\.md")
"""How a notebook links to the glossary and to the goals, which works in JupyterLab too."""

_NUMBERS = re.compile(r'(<a href=")[^"]*(figures/[a-z0-9_-]+\.csv">)')
"""A link from where a notebook works to what was plotted, which lies beside the pages too."""

FOLD = '<details class="answer"><summary>Your prediction is written down? What came out</summary>'


def write(executed: Sequence[Path], folder: Path, reports: Path) -> Path:
    """Write the pages, the figures of ``reports`` beside them, and its two .md; return the start page."""
    entries, pages = catalog.load(), [Page(path) for path in executed]
    figures = [entry for entry in entries if outputs.is_made(entry.id, reports)]
    for entry in figures:
        for source in outputs.figure_files(entry.id, reports):
            atomic_write(folder / "figures" / source.name, source.read_bytes())
    citation = (places.ROOT / "CITATION.cff").read_text(encoding="utf-8")
    judged = papers.published(reports)
    outcomes: dict[str, Any] = {
        "verdicts": judged.to_dict("records"),
        "counts": papers.counts(judged),
    }
    outcomes["summaries"] = outputs.read_summaries(reports)
    store.atomic_write_text(
        reports / "REPRODUCTION.md", _reproduction(reports, outcomes)
    )
    values = outcomes | {
        "pages": pages,
        "entries": entries,
        "figures": figures,
        "planned": [entry for entry in entries if entry not in figures],
        "papers": yaml.safe_load(citation)["references"],
    }
    names = ("index.html", "gallery.html", "verdicts.html", "style.css")
    texts = {name: _render(name, values) for name in names}
    texts |= {"buckets.html": bucket_page(), "glossary.html": document_page(GLOSSARY)}
    store.atomic_write_text(reports / "GOALS.md", _render("goals.md", values))
    texts["equations.html"] = document_page(EQUATIONS)
    texts["goals.html"] = document_page(reports / "GOALS.md")
    for before, page, after in zip(
        [None, *pages], pages, [*pages[1:], None], strict=False
    ):
        texts[page.file] = _render(
            "page.html",
            {
                "body": page.body(),
                "before": before,
                "after": after,
                "title": page.title,
            },
        )
    for name, text in texts.items():
        store.atomic_write_text(folder / name, text)
    return folder / "index.html"


def bucket_page() -> str:
    """Return the page of buckets: one file, with its styles, its script and what it is given."""
    colours = {name: look(name).color for name in buckets.COLOURED}
    return _render("buckets.html", {"cases": buckets.cases(), "colours": colours})


def document_page(path: Path) -> str:
    """Return a page of docs/ or reports/; what is not on the site is not linked to."""
    text = re.sub(
        r"\[([^\]]*)\]\(\.\./[^)]*\)", r"\1", path.read_text(encoding="utf-8")
    )
    title = _first(r"^# (.+)$", text)
    return _render("page.html", {"title": title, "body": _to_html(text)})


def _reproduction(reports: Path, outcomes: Mapping[str, Any]) -> str:
    """Return REPRODUCTION.md: verdicts by evidence, key numbers by notebook, the figures, every claim."""
    made = [entry for entry in catalog.load() if outputs.is_made(entry.id, reports)]
    frames = [pd.read_csv(outputs.figure_files(entry.id, reports)[1]) for entry in made]
    figures = [
        (e, catalog.deviations(e, frame)) for e, frame in zip(made, frames, strict=True)
    ]
    return _render("reproduction.md", {"figures": figures, **outcomes})


def recorded_for(entry: catalog.Entry) -> list[str]:
    """Return the campaigns that a figure is drawn from, of those that have goals or coverage."""
    rows = pd.concat([accuracy.frozen("goals"), accuracy.frozen("coverage")])
    folders = {
        Path(name).parent.name
        for name in entry.inputs
        if name.startswith("data/recorded/")
    }
    return [name for name in rows["campaign"].unique() if name in folders]


def _render(template: str, values: Mapping[str, Any]) -> str:
    """Return a rendered template; a page escapes every value that it does not mark safe."""
    environment = jinja2.Environment(
        loader=TEMPLATES,
        autoescape=template.endswith(".html"),
        undefined=jinja2.StrictUndefined,
    )
    forms = {"number": outputs.format_number, "percent": "{:.1%}".format}
    environment.filters |= {**forms, "duration": format_minutes}
    for function in (accuracy.frozen, accuracy.outcome, recorded_for):
        environment.filters[function.__name__] = function
    blank = {"before": None, "after": None, "body": ""}
    return environment.get_template(template).render({**blank, **values})


def format_minutes(minutes: int) -> str:
    """Return minutes for readers, as in "45 min", "2 h 30" and "3 h"."""
    hours, rest = divmod(minutes, 60)
    return f"{hours} h {rest:02}".removesuffix(" 00") if hours else f"{rest} min"


class Page:
    """One executed notebook: its objective (``line``), minutes to read, and with exercises (0: not said)."""

    def __init__(self, path: Path) -> None:
        self.notebook: Any = nbformat.read(str(path), as_version=4)
        self.name, self.file, self.number = (
            path.stem,
            f"{path.stem}.html",
            path.stem[:2],
        )
        prose = "\n".join(
            c.source for c in self.notebook.cells if c.cell_type == "markdown"
        )
        self.title = _first(r"^#\s+(.+)$", prose) or self.name
        self.core = self.title.endswith("(core)")
        self.line = _first(r"^\* \*\*Objective:\*\* (.+)$", prose)
        self.minutes = int(_first(r"^\* \*\*Time:\*\* (\d+) minutes", prose) or 0)
        self.working = int(
            _first(r"^\* \*\*Time:\*\* \d+ minutes; (\d+) with", prose) or 0
        )

    def body(self) -> str:
        """Return the cells, exercises as hint and solution. Raises UserError for a wrong formula."""
        folded = [bool(cell.metadata.get("jupyter")) for cell in self.notebook.cells]
        around = zip([False, *folded], folded, [*folded[1:], False], strict=False)
        for cell, (before, inside, after) in zip(
            self.notebook.cells, around, strict=True
        ):
            cell.metadata["before"] = FOLD if inside and not before else ""
            cell.metadata["after"] = "</details>" if inside and not after else ""
            cell.metadata["exercise"] = self._exercise(cell)
            cell.metadata["algorithm"] = "def " in cell.source
            cell.metadata.setdefault("alt", f"output of a cell of {self.title}")
        exporter = HTMLExporter(
            template_name="basic",
            template_file="cells.html.j2",
            extra_loaders=[TEMPLATES],
            exclude_input_prompt=True,
            exclude_output_prompt=True,
        )
        comment = r"\A\s*#+ *(.+)$"
        exporter.register_filter(
            "first_comment", lambda source: escape(_first(comment, source) or "code")
        )
        exporter.register_filter("markdown2html", self._markdown)
        return _NUMBERS.sub(r"\1\2", str(exporter.from_notebook_node(self.notebook)[0]))

    def _exercise(self, cell: Any) -> dict[str, str] | None:
        """Return hint, solution and explanation for a cell tagged "exercise-1"."""
        for tag in cell.metadata.get("tags", ()):
            kind, _, number = tag.partition("-")
            if kind == "exercise":
                solution = exercises.read(self.name)[int(number)]
                prose = {
                    k: self._markdown(getattr(solution, k))
                    for k in ("hint", "explanation")
                }
                return {
                    "name": f"exercise {number}",
                    **prose,
                    "solution": solution.solution,
                }
        return None

    def _markdown(self, source: str) -> str:
        try:
            return _to_html(source)
        except ValueError as error:
            raise UserError(
                f"notebook {self.name}: cannot show the formula {error}"
            ) from error


def _to_html(source: str) -> str:
    """Return HTML of Markdown, its formulas MathML. Raises ValueError for one that it cannot show."""
    renderer = _MathML(escape=False, exclude_anchor_links=True)
    source = _LINKED.sub(lambda page: f"({page[1].lower()}.html", source)
    return str(MarkdownWithMath(renderer=renderer).render(source))


def _first(pattern: str, text: str) -> str:
    """Return the first match's group, "" where there is none."""
    match = re.search(pattern, text, re.MULTILINE)
    return match[1].strip() if match else ""


class _MathML(IPythonRenderer):
    """Markdown renderer that turns formulas into MathML, and lets a heading be linked to by its words."""

    def heading(self, text: str, level: int, **_: Any) -> str:
        words = re.sub(r"<[^>]*>|[^\w -]", "", text).strip().lower().replace(" ", "-")
        return f'<h{level} id="{words}">{text}</h{level}>\n'

    def block_math(self, body: str, display: str = "block") -> str:
        """Return a formula as MathML. Raises ValueError for what the converter does not know."""
        text = " ".join(body.split())
        try:
            math = str(latex2mathml.convert(text, xmlns="", display=display))
        except Exception as error:  # its many exceptions have no common base
            raise ValueError(f"{text!r} ({type(error).__name__})") from error
        # What it does not know it passes on as a name.
        if unknown := re.search(r"<mi>([\\{}&](?!#)[^<]*)", math):
            raise ValueError(f"{text!r} (unknown: {unknown[1]})")
        return math

    def inline_math(self, body: str) -> str:
        return self.block_math(body, "inline")

    def latex_environment(self, name: str, body: str) -> str:
        return self.block_math(f"\\begin{{{name}}}{body}\\end{{{name}}}")
