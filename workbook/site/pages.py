"""What pages of the site are written from: notebooks, templates and two reports.

``REPRODUCTION.md`` and ``GOALS.md`` are published in ``reports/``, and are also pages of the site.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import nbformat
import pandas as pd
import yaml

from ddlkit import store
from workbook.common import catalog, outputs, places
from workbook.plots.style import look
from workbook.site import buckets, verdicts
from workbook.validate import accuracy

TEMPLATES = jinja2.FileSystemLoader(Path(__file__).parent)
GLOSSARY = places.ROOT / "docs" / "GLOSSARY.md"
EQUATIONS = places.ROOT / "docs" / "EQUATIONS.md"


class Page:
    """One notebook, and what its first cell says about it.

    Parameters
    ----------
    path : Path
        The notebook.

    Attributes
    ----------
    notebook : NotebookNode
        Its content.
    name, number : str
        The name of its file without the ending, and the two digits of the name.
    title, line : str
        Its title and its objective.
    core : bool
        Whether it belongs to the core path.
    minutes, working : int
        The minutes that it takes to read, and to read with its exercises. They are 0 if they
        are not stated.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notebook: Any = nbformat.read(str(path), as_version=4)
        self.name = path.stem
        self.number = path.stem[:2]
        cells = [cell for cell in self.notebook.cells if cell.cell_type == "markdown"]
        prose = "\n".join(cell.source for cell in cells)
        self.title = _first(r"^#\s+(.+)$", prose) or self.name
        self.core = self.title.endswith("(core)")
        # Objective and time are items of the list below the title, such as
        # "* **Time:** 13 minutes; 25 with the exercises".
        self.line = _first(r"^\* \*\*Objective:\*\* (.+)$", prose)
        self.minutes = int(_first(r"^\* \*\*Time:\*\* (\d+) minutes", prose) or 0)
        working = _first(r"^\* \*\*Time:\*\* \d+ minutes; (\d+) with", prose)
        self.working = int(working or 0)

    @property
    def short_title(self) -> str:
        """Return the title without the mark of a core notebook."""
        return self.title.removesuffix("(core)").strip()


def write_reports(reports: Path) -> dict[str, Any]:
    """Write ``REPRODUCTION.md`` and ``GOALS.md`` into a reports directory.

    Parameters
    ----------
    reports : Path
        The reports directory, which already has figures and key numbers.

    Returns
    -------
    dict
        The values that templates of pages are given: ``verdicts`` and their ``counts`` by
        paper, ``requirements`` and how many of them were met (``requirements_met``), the key
        numbers of notebooks (``summaries``), all ``entries`` of the catalog, those among
        them that are ``figures`` of these reports and those that are not (``planned``), and
        ``papers``, the references of CITATION.cff.
    """
    # Verdicts on the papers' claims, and outcomes of requirements of PyTorch's cost models.
    tables = verdicts.published(reports)
    judged = tables[verdicts.FILE]
    required = tables[verdicts.REQUIREMENTS_FILE]
    citation = (places.ROOT / "CITATION.cff").read_text(encoding="utf-8")
    entries = catalog.load()
    figures = [entry for entry in entries if outputs.is_made(entry.id, reports)]
    values = {
        "verdicts": judged.to_dict("records"),
        "counts": verdicts.by_paper(judged),
        "requirements": required.to_dict("records"),
        "requirements_met": int((required["outcome"] == "met").sum()),
        "summaries": outputs.read_summaries(reports),
        "entries": entries,
        "figures": figures,
        "planned": [entry for entry in entries if entry not in figures],
        "papers": yaml.safe_load(citation)["references"],
    }
    # In this page, each of the ``figures`` comes with its deviations.
    reproduction = render("reproduction.md", values | _deviations(reports, figures))
    store.atomic_write_text(reports / "REPRODUCTION.md", reproduction)
    store.atomic_write_text(reports / "GOALS.md", render("goals.md", values))
    return values


def _deviations(reports: Path, figures: Sequence[catalog.Entry]) -> dict[str, Any]:
    """Return the ``figures`` of REPRODUCTION.md, each with how far its numbers deviate.

    The value is a list of pairs of an entry of the catalog and what `catalog.deviations`
    returns of it: sentences such as "max of |error| is 0.1, limit 0.2", each with whether
    the limit is kept.
    """
    pairs = []
    for entry in figures:
        _image, csv_file = outputs.figure_files(entry.id, reports)
        numbers = pd.read_csv(csv_file)
        pairs.append((entry, catalog.deviations(entry, numbers)))
    return {"figures": pairs}


def bucket_page() -> str:
    """Return the page of buckets, one file with its styles, its script and its networks."""
    colours = {name: look(name).color for name in buckets.COLOURED}
    return render("buckets.html", {"cases": buckets.cases(), "colours": colours})


def recorded_for(entry: catalog.Entry) -> list[str]:
    """Return the campaigns from which a figure is drawn, of those that GOALS.md lists.

    GOALS.md lists campaigns with goals or with the coverage of intervals. The order is that
    of the files goals.csv and coverage.csv, and each campaign is named once.
    """
    listed = [
        *accuracy.frozen("goals")["campaign"],
        *accuracy.frozen("coverage")["campaign"],
    ]
    # An input such as "data/recorded/*/campaign-osf/runs-*.csv" lies in the folder of its
    # campaign.
    recorded = [name for name in entry.inputs if name.startswith("data/recorded/")]
    folders = {Path(name).parent.name for name in recorded}
    return [name for name in dict.fromkeys(listed) if name in folders]


def render(template: str, values: Mapping[str, Any]) -> str:
    """Return a rendered template.

    A template of HTML escapes every value that is not marked as safe. A template that uses
    an unknown name raises an error.

    Parameters
    ----------
    template : str
        The name of its file in workbook/site.
    values : mapping
        The values that the template is given, by name.
    """
    environment = jinja2.Environment(
        loader=TEMPLATES,
        autoescape=template.endswith(".html"),
        undefined=jinja2.StrictUndefined,
    )
    # By the name that templates use, as in {{ share | percent }}.
    environment.filters |= {
        "number": outputs.format_number,
        "percent": "{:.1%}".format,
        "duration": format_minutes,
        "cell": markdown_cell,
        "anchor": heading_anchor,
        "frozen": accuracy.frozen,
        "outcome": accuracy.outcome,
        "recorded_for": recorded_for,
    }
    environment.globals["goal_counts"] = accuracy.goal_counts
    return environment.get_template(template).render(values)


def format_minutes(minutes: int) -> str:
    """Return a number of minutes in hours and minutes.

    >>> format_minutes(45), format_minutes(150), format_minutes(180)
    ('45 min', '2 h 30', '3 h')
    """
    hours, rest = divmod(minutes, 60)
    if not hours:
        return f"{rest} min"
    return f"{hours} h {rest:02}".removesuffix(" 00")


def heading_anchor(heading: str) -> str:
    """Return how a link names a heading, both on the site and on GitHub.

    >>> heading_anchor("clusters, dense tables")
    'clusters-dense-tables'
    """
    return re.sub(r"[^\w -]", "", heading).strip().lower().replace(" ", "-")


def markdown_cell(text: Any) -> str:
    r"""Return Markdown with which a cell of a table shows a text unchanged.

    >>> markdown_cell("2 * |x| < $3, a_b")
    '2 \\* \\|x\\| \\< \\$3, a\\_b'
    """
    return re.sub(r"([\\`*_{}\[\]<>$|#~])", r"\\\1", " ".join(str(text).split()))


def _first(pattern: str, text: str) -> str:
    """Return the group of the first match, or "" if there is none."""
    match = re.search(pattern, text, re.MULTILINE)
    return match[1].strip() if match else ""
