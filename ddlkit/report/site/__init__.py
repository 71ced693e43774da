"""The site: a start page, the executed notebooks, the papers' equations and the verdict on every claim.

Nothing is loaded from a network: images are embedded or copied beside the pages, formulas are MathML,
styles are one file, and there is no script. The pages work from file://. Templates lie beside this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd
import yaml

from ddlkit import store
from ddlkit.report import catalog, equations, outputs, verdicts
from ddlkit.report.site.page import TEMPLATES, Page
from ddlkit.store.files import atomic_write

STYLE = Path(__file__).parent / "style.css"


def write(
    executed: Sequence[Path],
    folder: Path,
    reports: Path,
    entries: Sequence[catalog.Entry] | None = None,
) -> Path:
    """Write one page per notebook, equations, verdicts, the start page and the figures in ``reports``.

    Returns the start page. Raises UserError naming the notebook for a formula that cannot be shown
    offline and for output that would load something from a network.
    """
    entries = catalog.load() if entries is None else entries
    pages = [Page(path) for path in executed]
    figures = [entry for entry in entries if outputs.is_made(entry.id, reports)]
    for entry in figures:
        for source in outputs.figure_files(entry.id, reports):
            atomic_write(folder / "figures" / source.name, source.read_bytes())
    listed, evaluated = equations.index(), verdicts.evaluate()
    texts = {"style.css": STYLE.read_text(encoding="utf-8")}
    for before, page, after in zip([None, *pages], pages, [*pages[1:], None], strict=False):
        body = page.body(figures)
        texts[page.file] = _render("page.html", page.title, before=before, after=after, body=body)
    texts["equations.html"] = _equations(listed)
    texts["verdicts.html"] = _render(
        "verdicts.html",
        "The verdict on every claim",
        counts=verdicts.counts(evaluated),
        rows=verdicts.in_order(evaluated).to_dict("records"),
    )
    texts["index.html"] = _render(
        "index.html",
        "ddlkit: what communication costs",
        pages=pages,
        entries=entries,
        figures=figures,
        planned=[entry for entry in entries if entry not in figures],
        summaries=outputs.read_summaries(reports),
        papers=cited_papers(),
        coded=equations.coded(listed),
        equations=equations.count(listed),
    )
    for name, text in texts.items():
        store.atomic_write_text(folder / name, text)
    return folder / "index.html"


def cited_papers(citation: Path | None = None) -> list[dict[str, Any]]:
    """The papers that CITATION.cff (or ``citation``) lists: abbreviation, title, year, names, venue."""
    path = citation or store.ROOT / "CITATION.cff"
    papers = yaml.safe_load(path.read_text(encoding="utf-8"))["references"]
    for paper in papers:
        families = [author["family-names"] for author in paper["authors"]]
        paper["names"] = " and ".join(families) if len(families) < 3 else f"{families[0]} et al."
        paper["venue"] = paper.get("conference", {}).get("name", "")
        paper.setdefault("year", "")
    return list(papers)


def _equations(listed: pd.DataFrame) -> str:
    papers = {
        paper: {
            equation: found.to_dict("records")
            for equation, found in rows.groupby("equation", sort=False)
        }
        for paper, rows in listed.groupby("paper", sort=False)
    }
    counts = {"coded": equations.coded(listed), "total": equations.count(listed)}
    return _render("equations.html", "From a published number to the code", papers=papers, **counts)


def _render(template: str, title: str, **values: Any) -> str:
    """A template with every value escaped that it does not mark safe."""
    environment = jinja2.Environment(
        loader=TEMPLATES, autoescape=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {
        "quantity": outputs.format_quantity,
        "percent": "{:.1%}".format,
        "signed": "{:+.1%}".format,
        "duration": format_minutes,
    }
    around = {"before": None, "after": None}
    return environment.get_template(template).render({**around, **values}, title=title)


def format_minutes(minutes: int) -> str:
    """Minutes for readers.

    >>> format_minutes(45), format_minutes(150), format_minutes(180)
    ('45 min', '2 h 30', '3 h')
    """
    hours, rest = divmod(minutes, 60)
    if not hours:
        return f"{rest} min"
    return f"{hours} h {rest:02}" if rest else f"{hours} h"
