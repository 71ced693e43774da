"""The site: executed notebooks as pages, the papers' equations, and an index with gallery and verdicts.

Nothing is loaded from a network: images are embedded or copied beside the pages, formulas are MathML,
styles are one file, and there is no script. The pages work from file://.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jinja2
import nbformat
import pandas as pd
from latex2mathml import converter as latex2mathml
from markupsafe import Markup
from nbconvert import HTMLExporter
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath
from pygments.formatters import HtmlFormatter  # type: ignore[import-untyped]

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.report import catalog, equations, outputs, verdicts
from ddlkit.store.files import atomic_write

_REMOTE = re.compile(
    r"<script\b|<(?:img|link|iframe|source|video|audio)\b[^>]*?(?:src|href)\s*=\s*[\"']?(?:https?:)?//[^\s\"'>]*"
    r"|@import|url\(\s*[\"']?(?:https?:)?//[^\s\"')]*",
    re.IGNORECASE,
)

_LIMITS = {"∑", "∏", "max", "min"}
_STACKED = {"msub": "munder", "msup": "mover", "msubsup": "munderover"}
"""Limits of a displayed sum stand below and above it; latex2mathml sets them beside it."""

_FOLDED = """\
{%- extends 'basic/index.html.j2' -%}
{%- block input -%}
<details class="code"><summary>{{ cell.source | first_comment }}</summary>{{ super() }}</details>
{%- endblock input -%}
"""

_PAGE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="style.css">
</head>
<body>
{% set nav -%}
{% if kind == "page" %}<nav>
{% if before %}<a href="{{ before.file }}">← {{ before.title }}</a>{% endif %}
<a href="index.html">Contents</a>
{% if after %}<a href="{{ after.file }}">{{ after.title }} →</a>{% endif %}
</nav>{% endif %}
{%- endset %}
{{ nav }}
<main class="{{ kind }}">
{{ body }}
</main>
{{ nav }}
</body>
</html>
"""

_INDEX = """\
<header>
<h1>What does communication cost?</h1>
<p>Measure a machine, fit small cost models to what was measured, predict how data-parallel training
scales, check the prediction against real runs, and recompute the claims of four papers.
{{ figures | length }} of {{ entries | length }} figures and tables are made so far.</p>
</header>
<h2 id="notebooks">Notebooks</h2>
<ol class="notebooks">
{% for page in pages -%}
<li><a href="{{ page.file }}">{{ page.title }}</a> <span>{{ page.name }}</span></li>
{% endfor -%}
</ol>
{% if summaries -%}
<h2 id="numbers">Key numbers</h2>
<div class="numbers">
{% for name, values in summaries.items() -%}
<table><caption>{{ name }}</caption>
{% for key, value in values.items() -%}
<tr><td>{{ key | replace("_", " ") }}</td><td class="number">{{ value | number }}</td></tr>
{% endfor -%}
</table>
{% endfor -%}
</div>
{% endif -%}
{% if figures -%}
<h2 id="figures">Figures and tables</h2>
<div class="gallery">
{% for entry in figures -%}
<figure id="{{ entry.id }}">
<a href="figures/{{ entry.id }}.png"><img src="figures/{{ entry.id }}.png" alt="{{ entry.caption }}"></a>
<figcaption><b>{{ entry.id }}</b> {{ entry.caption }}
<span class="facts"><span class="grade {{ entry.grade }}">{{ entry.grade }}</span>
{% if entry.notebook in files %}<a href="{{ entry.notebook }}.html">{{ entry.notebook }}</a>{% endif %}
<a href="figures/{{ entry.id }}.csv">numbers</a></span></figcaption>
</figure>
{% endfor -%}
</div>
{% endif -%}
<h2 id="verdicts">Verdicts</h2>
<p>{% for name, count in counts.items() %}{{ count }} {{ name }}{{ ", " if not loop.last }}{% endfor %}.
A claim is reproduced when what is computed here lies within its tolerance of what is printed.</p>
{{ tried }}
<details><summary>{{ counts["not attempted"] }} claims not attempted yet</summary>
{{ untried }}
</details>
<h2 id="equations">From a published number to the code</h2>
<p><a href="equations.html">Each equation and algorithm of the four papers</a>, with the function that is
it: {{ coded }} of {{ equations }} are in the code.</p>
<h2 id="planned">Still to come</h2>
<details><summary>{{ planned | length }} figures and tables</summary>
<table><tr><th>id</th><th>shows</th><th>needs</th><th>grade of truth</th></tr>
{% for entry in planned -%}
<tr><td>{{ entry.id }}</td><td>{{ entry.caption }}</td>
<td>{{ entry.hardware }}</td><td>{{ entry.grade }}</td></tr>
{% endfor -%}
</table></details>
"""

_VERDICTS = """\
<table class="verdicts">
<tr><th>claim</th><th>quantity</th><th>printed</th><th>computed</th><th>verdict</th><th>note</th></tr>
{% for row in rows -%}
<tr id="claim-{{ row.id }}"><td>{{ row.id }}<br><small>{{ row.place }}</small></td>
<td>{{ row.quantity }}{% if row.condition %}<br><small>{{ row.condition }}</small>{% endif %}</td>
<td class="number">{{ row.value | quantity(row.unit) }}</td>
<td class="number">{{ row.computed | quantity(row.unit) }}</td>
<td><span class="verdict {{ row.verdict | replace(" ", "-") }}">{{ row.verdict }}</span></td>
<td>{{ row.note }}</td></tr>
{% endfor -%}
</table>
"""

_EQUATIONS = """\
<h1>From a published number to the code</h1>
<p>Every numbered equation and algorithm of the four papers, what it defines in our words, and the function
that is it; {{ coded }} of {{ total }} are in the code. Below stand, in grey, functions that only name it.
Found in the docstrings, so what is not cited there is not here.</p>
{% for paper, rows in papers.items() -%}
<h2 id="{{ paper }}">{{ paper }}</h2>
<table class="equations">
<tr><th>equation</th><th>defines</th><th>code</th></tr>
{% for equation, found in rows.items() -%}
<tr><td>{{ equation }}</td><td>{{ found[0].defines }}</td><td>
{%- for row in found -%}
{%- if row.role == "is" -%}
<p><code>{{ row.function }}</code> <small>{{ row.place }}</small><br>{{ row.sentence }}</p>
{%- elif row.role == "names" -%}
<p><small>{{ row.function }}, {{ row.place }}</small></p>
{%- else -%}
-
{%- endif -%}
{%- endfor -%}
</td></tr>
{% endfor -%}
</table>
{% endfor -%}
"""

_STYLE = """\
:root { --ink: #1b1b1b; --soft: #6f6f6f; --faint: #e4e4e4; --wash: #f7f7f5; --accent: #00588f; }
* { box-sizing: border-box; }
html { font: 16px/1.55 Georgia, "DejaVu Serif", "Times New Roman", serif; color: var(--ink); }
body { margin: 0; background: white; }
main { max-width: 46rem; margin: 0 auto; padding: 1rem 1.25rem 4rem; }
main.index { max-width: 68rem; }
nav { max-width: 46rem; margin: 0 auto; padding: .75rem 1.25rem; display: flex; gap: 1.5rem; }
h1, h2, h3, nav, th, caption, summary, .facts, .notebooks span, .verdict, small {
  font-family: "Helvetica Neue", "DejaVu Sans", Arial, sans-serif; }
nav, small, .facts, summary { font-size: .8rem; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 1.5rem 0 .75rem; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 .75rem; }
h3 { font-size: 1rem; margin: 1.75rem 0 .5rem; }
header p { max-width: 44rem; }
a { color: var(--accent); text-decoration-thickness: 1px; text-underline-offset: 2px; }
img { max-width: 100%; height: auto; display: block; }
pre, code { font: .82rem/1.45 "DejaVu Sans Mono", Menlo, Consolas, monospace; }
pre { margin: .5rem 0; overflow-x: auto; white-space: pre; }
p code, li code, td code { background: var(--wash); padding: .05em .3em; border-radius: 3px; }
table { border-collapse: collapse; font-size: .85rem; line-height: 1.4; margin: .75rem 0; }
caption { text-align: left; font-weight: bold; font-size: .8rem; padding-bottom: .3rem; }
th, td { text-align: left; vertical-align: top; padding: .35rem .9rem .35rem 0; }
tr { border-bottom: 1px solid var(--faint); }
th { font-size: .75rem; color: var(--soft); font-weight: normal; }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
small { color: var(--soft); }
math { font-family: "STIX Two Math", "Cambria Math", "Latin Modern Math", "DejaVu Math TeX Gyre", math; }
math[display="block"] { margin: 1rem 0; }
.dataframe, .dataframe th, .dataframe td { border-width: 0; }
.cell { margin: .75rem 0; }
.output_area { overflow-x: auto; }
.output_png img { margin: .5rem 0; }
details.code { border-left: 2px solid var(--faint); padding-left: .75rem; }
details.code pre { background: var(--wash); padding: .6rem .8rem; }
details.code .highlight { background: none; }
summary { cursor: pointer; color: var(--soft); }
.output_stderr pre { color: var(--soft); }
ol.notebooks { padding-left: 1.25rem; }
ol.notebooks span { color: var(--soft); font-size: .75rem; margin-left: .5rem; }
.equations p { margin: 0 0 .5rem; }
.equations code { overflow-wrap: anywhere; }
.numbers { display: flex; flex-wrap: wrap; gap: .5rem 3rem; align-items: start; }
.gallery { display: grid; grid-template-columns: repeat(auto-fill, minmax(26rem, 1fr)); gap: 2rem 2.5rem; }
figure { margin: 0; }
figure a img { border: 1px solid var(--faint); padding: .5rem; width: 100%; }
figcaption { font-size: .85rem; line-height: 1.45; margin-top: .5rem; }
.facts { display: flex; gap: .9rem; margin-top: .2rem; }
.grade, .verdict { padding: 0 .4rem; border: 1px solid var(--soft); border-radius: 3px;
  font-size: .75rem; white-space: nowrap; }
.verdict.reproduced { border-color: #00664b; color: #00664b; }
.verdict.differs { border-color: #c14d00; color: #c14d00; font-weight: bold; }
.verdict.not-attempted { border-color: var(--faint); color: var(--soft); }
@media (max-width: 32rem) { .gallery { grid-template-columns: 1fr; } .verdicts { font-size: .75rem; } }
"""


def write(
    executed: Sequence[Path],
    folder: Path,
    reports: Path,
    entries: Sequence[catalog.Entry] | None = None,
) -> Path:
    """Write a page a notebook, one of equations, the figures in ``reports`` and the index; returns it.

    Raises UserError naming the notebook for a formula that cannot be shown offline and for output
    that would load something from a network.
    """
    entries = catalog.load() if entries is None else entries
    pages = [_Page(path) for path in executed]
    for number, page in enumerate(pages):
        before = pages[number - 1] if number else None
        after = pages[number + 1] if number + 1 < len(pages) else None
        store.atomic_write_text(folder / page.file, page.html(before, after))
    figures = [entry for entry in entries if _copied(entry, folder, reports)]
    listed = equations.index()
    store.atomic_write_text(folder / "equations.html", _equations(listed))
    store.atomic_write_text(folder / "style.css", _STYLE + _highlighting())
    index = folder / "index.html"
    store.atomic_write_text(
        index, _index(pages, entries, figures, listed, outputs.read_summaries(reports))
    )
    return index


class _Page:
    """One executed notebook: its name, title and HTML."""

    def __init__(self, path: Path) -> None:
        self.notebook: Any = nbformat.read(str(path), as_version=4)
        self.name, self.file = path.stem, f"{path.stem}.html"
        prose = "\n".join(c.source for c in self.notebook.cells if c.cell_type == "markdown")
        heading = re.search(r"^#\s+(.+)$", prose, re.MULTILINE)
        self.title = heading[1].strip() if heading else self.name

    def html(self, before: _Page | None, after: _Page | None) -> str:
        """The whole page, with links to its neighbours in reading order."""
        body = Markup(self._body())
        page = _render(_PAGE, title=self.title, kind="page", before=before, after=after, body=body)
        remote = _REMOTE.search(page)
        if remote:
            raise UserError(
                f"notebook {self.name} would load {remote[0][:80]!r}: pages must work offline"
            )
        return page

    def _body(self) -> str:
        for number, cell in enumerate(self.notebook.cells, 1):
            cell.metadata.setdefault("alt", f"output of cell {number} of {self.title}")
        exporter = HTMLExporter(
            template_name="basic",
            template_file="folded.html.j2",
            extra_loaders=[jinja2.DictLoader({"folded.html.j2": _FOLDED})],
            exclude_input_prompt=True,
            exclude_output_prompt=True,
        )
        exporter.register_filter("first_comment", _first_comment)
        exporter.register_filter("markdown2html", self._markdown)
        body, _ = exporter.from_notebook_node(self.notebook)
        return str(body)

    def _markdown(self, source: str) -> str:
        """HTML of Markdown whose formulas are MathML."""
        renderer = _MathML(escape=False, exclude_anchor_links=True)
        try:
            return str(MarkdownWithMath(renderer=renderer).render(source))
        except _FormulaError as error:
            raise UserError(f"notebook {self.name}: cannot show the formula {error}") from error


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


def _first_comment(source: str) -> str:
    """What a folded cell is called: its leading comment, else "code"."""
    first = source.lstrip().partition("\n")[0]
    return escape(first.lstrip("# ").strip() or "code") if first.startswith("#") else "code"


def _copied(entry: catalog.Entry, folder: Path, reports: Path) -> bool:
    """Copy an entry's image and numbers beside the index; False when they are not there."""
    sources = [outputs.figure_path(entry.id, suffix, reports) for suffix in (".png", ".csv")]
    if not all(source.is_file() for source in sources):
        return False
    for source in sources:
        atomic_write(folder / "figures" / source.name, source.read_bytes())
    return True


def _index(
    pages: Sequence[_Page],
    entries: Sequence[catalog.Entry],
    figures: Sequence[catalog.Entry],
    listed: pd.DataFrame,
    summaries: dict[str, dict[str, outputs.Number]],
) -> str:
    evaluated = verdicts.evaluate()
    attempted = evaluated["verdict"] != "not attempted"
    body = _render(
        _INDEX,
        pages=pages,
        files={page.name for page in pages},
        entries=entries,
        figures=figures,
        planned=[entry for entry in entries if entry not in figures],
        summaries=summaries,
        coded=equations.coded(listed),
        equations=equations.count(listed),
        counts=verdicts.counts(evaluated),
        tried=Markup(_render(_VERDICTS, rows=evaluated[attempted].to_dict("records"))),
        untried=Markup(_render(_VERDICTS, rows=evaluated[~attempted].to_dict("records"))),
    )
    return _render(_PAGE, title="ddlkit: what communication costs", kind="index", body=Markup(body))


def _equations(listed: pd.DataFrame) -> str:
    papers = {
        paper: {
            equation: found.to_dict("records")
            for equation, found in rows.groupby("equation", sort=False)
        }
        for paper, rows in listed.groupby("paper", sort=False)
    }
    body = _render(
        _EQUATIONS, papers=papers, coded=equations.coded(listed), total=equations.count(listed)
    )
    title = "From a published number to the code"
    return _render(_PAGE, title=title, kind="page", before=None, after=None, body=Markup(body))


def _render(template: str, **values: Any) -> str:
    """A Jinja template with every value escaped that is not marked safe."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    environment.filters["number"] = outputs.format_number
    environment.filters["quantity"] = outputs.format_quantity
    return environment.from_string(template).render(**values)


def _highlighting() -> str:
    return str(HtmlFormatter(style="tango").get_style_defs(".highlight"))
