"""The files that Sphinx reads: a mirror of the repository, and pages written from data.

A page has the same place as in the repository, so that a link between two files of the
repository is a link between their pages. Files that are no pages are copied if a page
links to them, so that readers can download them.
"""

from __future__ import annotations

import io
import posixpath
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import nbformat
import PIL.Image

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.store.files import atomic_write, own_yaml
from workbook.common import catalog, outputs, places
from workbook.common.papers import PAPERS
from workbook.course import exercises
from workbook.site import lesson
from workbook.site.pages import Page, bucket_page, markdown_cell, render

EXTRA = "_extra"
"""Folder of files that Sphinx copies as they are: the page of buckets, figures and their numbers."""
THUMBNAIL_WIDTH = 400
"""Pixels: as wide as a picture of the gallery is shown at most."""
PARTS = (
    ("The core path", "00", "05"),
    ("The four papers", "06", "10"),
    ("The limits", "11", "13"),
    ("PyTorch's own models", "15", "99"),
    ("For reference", "14", "14"),
)
"""Name of each part of the course, its first and its last notebook."""
REFERENCE = own_yaml(
    Path(__file__).with_name("reference.yml").read_text(encoding="utf-8")
)
"""The pages of the reference by name: title, summary, functions, classes."""
FIRST = (
    "reports/GOALS",
    "reports/REPRODUCTION",
    "docs/INSTALL",
    "docs/commands",
    "docs/recipes",
    "docs/background",
    "docs/GLOSSARY",
    "docs/EQUATIONS",
    "docs/teaching",
    "docs/studies",
    "docs/citing",
)
"""Pages of the repository in the order of the sidebar.

All others follow by name, as pages of the project."""
GENERATED = {
    "index.md": "front_page.md",
    "gallery.md": "gallery.md",
    "verdicts.md": "verdicts.md",
    "reference.md": "reference.md",
}
"""Pages that are written from data, each with its template."""
_LINK = re.compile(
    r"""\]\(\s*<?([^)\s>]+)|^\[[^\]]+\]:\s+(\S+)|(?:href|src)="([^"]+)\"""",
    re.MULTILINE,
)
"""Whatever Markdown links to or shows: inline, by a reference, or in HTML."""


def assemble(
    executed: Sequence[Path],
    folder: Path,
    reports: Path,
    values: Mapping[str, Any],
    notebooks: Sequence[Path],
) -> Path:
    """Write everything that Sphinx reads.

    Parameters
    ----------
    executed : sequence of Path
        Executed copies of notebooks. A notebook without a copy is shown without
        outputs.
    folder : Path
        The directory, which is made anew.
    reports : Path
        The directory with ``REPRODUCTION.md``, ``GOALS.md`` and ``figures/``.
    values : mapping
        What `workbook.site.pages.write_reports` returned.
    notebooks : sequence of Path
        The notebooks as they are stored, in reading order.

    Returns
    -------
    Path
        The directory ``folder``.

    Raises
    ------
    UserError
        If a notebook cannot be shown. The error names it.
    """
    shutil.rmtree(folder, ignore_errors=True)
    # A copy has the name of its notebook.
    copies = {path.name: path for path in executed}
    pages = [Page(copies.get(path.name, path)) for path in notebooks]
    for page in pages:
        picture = picture_of(page.name, values["figures"], reports)
        write_notebook(page, folder, reports, picture)
    # The documents and all files to which they or the notebooks link are copied. The mirror knows
    # what was copied.
    mirror = _mirrored(pages, folder, reports)
    write_figures(values["figures"], folder, reports)
    # The page on which a reader moves buckets is complete HTML, which Sphinx only copies.
    atomic_write(folder / EXTRA / "buckets.html", bucket_page().encode())
    _write_generated(pages, mirror, values)
    return folder


def _mirrored(pages: Sequence[Page], folder: Path, reports: Path) -> Mirror:
    """Copy the documents, the two reports, and all files to which these and notebooks link.

    Parameters
    ----------
    pages : sequence of Page
        The notebooks.
    folder, reports : Path
        The directories, as for `assemble`.

    Returns
    -------
    Mirror
        The record of what was copied, which copies further files on request.
    """
    mirror = Mirror(folder, reports)
    for path in sorted(places.ROOT.glob("docs/*.md")):
        mirror.add(f"docs/{path.name}")
    for name in ("GOALS", "REPRODUCTION"):
        mirror.add(f"reports/{name}.md")
    for page in pages:
        mirror.add_links(f"notebooks/{page.path.name}", _prose(page))
    return mirror


def _write_generated(
    pages: Sequence[Page], mirror: Mirror, values: Mapping[str, Any]
) -> None:
    """Write the pages of GENERATED and of REFERENCE into the folder of the mirror.

    Parameters
    ----------
    pages : sequence of Page
        The notebooks.
    mirror : Mirror
        The copied documents.
    values : mapping
        What `workbook.site.pages.write_reports` returned.
    """
    # The names of the copied Markdown pages for readers ("documents") and on the project.
    ordered = _ordered(mirror.pages)
    # Templates use these values by name. Each template lists its own at its top.
    given = {
        **values,
        "pages": pages,
        "parts": _parts(pages),
        "documents": ordered["documents"],
        "project": ordered["project"],
        "shown": {page.name for page in pages},
        "claims": _by_paper(values["verdicts"]),
        "groups": REFERENCE,
        # A function of a figure's id, which copies the image and returns Markdown that shows it.
        "figure": mirror.figure,
        # The key numbers of notebooks. If a notebook was not run here, its numbers are those of
        # the published reports.
        "summaries": outputs.read_summaries(places.REPORTS) | values["summaries"],
        "here": measured_here(values["summaries"].get("on-this-machine", {})),
    }
    for name, template in GENERATED.items():
        store.atomic_write_text(mirror.folder / name, render(template, given))
    for name, group in REFERENCE.items():
        text = render("reference_group.md", {"group": group})
        store.atomic_write_text(mirror.folder / "reference" / f"{name}.md", text)


def measured_here(summary: Mapping[str, Any]) -> str:
    """Return a line for the front page on what was measured here, or "" if nothing was.

    Parameters
    ----------
    summary : mapping
        The key numbers that notebook 05 keeps under "on-this-machine": for real trainings
        and for replays, how many cases there are, and the median error of the predictions.
        It is empty if nothing was measured.
    """
    errors = []
    if summary.get("training_cases"):
        error = summary["training_median_paired_error"]
        errors.append(f"{error:.1%} over {summary['training_cases']} real trainings")
    if summary.get("replay_cases"):
        error = summary["replay_median_error"]
        errors.append(f"{error:.1%} over {summary['replay_cases']} replays")
    if not errors:
        return ""
    return (
        f"Measured on this machine, the median error is {' and '.join(errors)} "
        "([how it is judged](notebooks/05_is_it_true.ipynb#on-this-machine))."
    )


def write_notebook(
    page: Page, folder: Path, reports: Path, picture: catalog.Entry | None = None
) -> None:
    """Write a notebook into the folder ``notebooks`` of the directory that Sphinx reads.

    Parameters
    ----------
    page : Page
        The notebook.
    folder, reports : Path
        The directories, as for `assemble`.
    picture : Entry, optional
        The figure whose thumbnail is shown next to the title.

    Raises
    ------
    UserError
        If the notebook cannot be shown. The error names it.
    """
    # A notebook without exercises has no file of solutions.
    solutions = {}
    if (exercises.SOLUTIONS / page.path.name).is_file():
        solutions = exercises.read(page.name)
    try:
        shown = lesson.as_page(page.notebook, solutions, reports / "figures", picture)
    except UserError as error:
        raise UserError(f"notebook {page.path.name}: {error}") from error
    path = folder / "notebooks" / page.path.name
    store.atomic_write_text(path, nbformat.writes(shown) + "\n")


def picture_of(
    notebook: str, figures: Sequence[catalog.Entry], reports: Path
) -> catalog.Entry | None:
    """Return the first figure of a notebook that is no table, or None if there is none.

    Parameters
    ----------
    notebook : str
        The name of the notebook.
    figures : sequence of Entry
        The figures and tables that exist in ``reports``.
    reports : Path
        The directory with ``figures/``.
    """
    for entry in figures:
        # A table of a paper has an id such as "sharing-tab2".
        if entry.notebook != notebook or "-tab" in entry.id:
            continue
        image, _csv_file = outputs.figure_files(entry.id, reports)
        width, height = PIL.Image.open(image).size
        # An image that is much wider than high is a typeset table, even if its id does not say so.
        if height > width / 4:
            return entry
    return None


def write_figures(
    figures: Sequence[catalog.Entry], folder: Path, reports: Path
) -> None:
    """Write figures and their numbers to where pages link, and a thumbnail of each.

    Parameters
    ----------
    figures : sequence of Entry
        The figures and tables that exist in ``reports``.
    folder, reports : Path
        The directories, as for `assemble`.
    """
    for entry in figures:
        image, numbers = outputs.figure_files(entry.id, reports)
        for path in (image, numbers):
            copied = folder / EXTRA / "reports" / "figures" / path.name
            atomic_write(copied, path.read_bytes())
        thumbnail = folder / "thumbnails" / f"{entry.id}-small.png"
        atomic_write(thumbnail, thumbnail_of(image))


def thumbnail_of(image: Path) -> bytes:
    """Return the bytes of a PNG that shows a figure in THUMBNAIL_WIDTH."""
    picture = PIL.Image.open(image).convert("RGB")
    # An image has one row of pixels at least, however wide the figure is.
    height = max(1, round(picture.height * THUMBNAIL_WIDTH / picture.width))
    small = picture.resize((THUMBNAIL_WIDTH, height), PIL.Image.Resampling.LANCZOS)
    written = io.BytesIO()
    # With 64 colours, the file is smaller.
    small.quantize(64).save(written, "PNG", optimize=True)
    return written.getvalue()


def _prose(page: Page) -> str:
    cells = page.notebook.cells
    return "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown")


def _parts(pages: Sequence[Page]) -> list[dict[str, Any]]:
    """Return the parts of the course that have a notebook.

    Each part has its ``name``, its ``pages``, and the ``minutes`` that these take to read.
    ``pages`` are all notebooks.
    """
    parts = []
    # Numbers of notebooks are texts of two digits, which compare as numbers do.
    for name, first, last in PARTS:
        of_part = [page for page in pages if first <= page.number <= last]
        minutes = sum(page.minutes for page in of_part)
        if of_part:
            parts.append({"name": name, "pages": of_part, "minutes": minutes})
    return parts


def _by_paper(verdicts: Sequence[Mapping[str, str]]) -> dict[str, list[Any]]:
    """Return the verdicts of each of PAPERS by its key.

    The id of a claim begins with the key of its paper and a dash.
    """
    grouped: dict[str, list[Any]] = {paper: [] for paper in PAPERS}
    for verdict in verdicts:
        grouped[verdict["id"].partition("-")[0]].append(verdict)
    return grouped


def _ordered(documents: Collection[str]) -> dict[str, list[str]]:
    """Return the names of pages in the order of the sidebar, without their ending.

    Parameters
    ----------
    documents : collection of str
        The names of Markdown pages.

    Returns
    -------
    dict of str to list of str
        ``documents`` are the pages for readers in the order of FIRST, and ``project`` all
        other pages by name.
    """
    names = sorted(name.removesuffix(".md") for name in documents)
    return {
        "documents": [name for name in FIRST if name in names],
        "project": [name for name in names if name not in FIRST],
    }


class Mirror:
    """Copies of files of the repository, at the same places in another folder.

    Parameters
    ----------
    folder : Path
        Where the copies are written.
    reports : Path
        The directory that takes the place of ``reports/``, as far as it has a file.

    Attributes
    ----------
    pages, files : set of str
        The names of the Markdown pages, and of all files, that were copied.
    """

    def __init__(self, folder: Path, reports: Path) -> None:
        self.folder = folder
        self.reports = reports
        self.pages: set[str] = set()
        self.files: set[str] = set()

    def add(self, name: str) -> None:
        """Copy a file and, if it is a Markdown page, also what the page links to.

        Parameters
        ----------
        name : str
            The path from the root of the repository. If there is no such file, nothing
            is copied.
        """
        source = self.source(name)
        if source is None or name in self.files:
            return
        # Pages may link to each other. A file that is noted first is not copied again.
        self.files.add(name)
        target = self.folder / name
        atomic_write(target, source.read_bytes())
        if target.suffix == ".md":
            self.pages.add(name)
            self.add_links(name, source.read_text(encoding="utf-8"))

    def add_links(self, name: str, text: str) -> None:
        """Copy the files that a page links to.

        Notebooks are not copied, because `write_notebook` writes them.

        Parameters
        ----------
        name : str
            The path of the page from the root of the repository, from which its links start.
        text : str
            The Markdown of the page.
        """
        for link in links(text):
            target = posixpath.normpath(posixpath.join(posixpath.dirname(name), link))
            if not target.startswith("notebooks/"):
                self.add(target)

    def figure(self, figure: str) -> str:
        """Return Markdown for the front page that shows a figure with its caption and grade.

        The image is copied, too. ``figure`` is the id of a figure in the catalog.
        """
        # Each id is in the catalog once.
        (entry,) = [entry for entry in catalog.load() if entry.id == figure]
        image = f"reports/figures/{figure}.png"
        self.add(image)
        caption = " ".join(entry.caption.split())
        options = [f":alt: {caption}", ":figclass: result"]
        # The gallery only has figures of this build.
        if outputs.is_made(figure, self.reports):
            options.append(f":target: gallery.html#{figure}")
        words = f"{markdown_cell(caption)} [{entry.grade}]{{.grade}}"
        return "\n".join([f":::{{figure}} {image}", *options, "", words, ":::", ""])

    def source(self, name: str) -> Path | None:
        """Return the file to copy for a path from the root of the repository, or None.

        A file in ``reports/`` is that of this build, if this build has it. None means that
        there is no such file in the repository.
        """
        parts = PurePosixPath(name).parts
        # A link with ".." can lead out of the repository. The root itself has no parts.
        if not parts or ".." in parts:
            return None
        path = places.ROOT / name
        if parts[0] == "reports":
            of_this_build = self.reports.joinpath(*parts[1:])
            if of_this_build.is_file():
                path = of_this_build
        return path if path.is_file() else None


def links(text: str) -> Iterator[str]:
    """Yield the paths that Markdown links to, but no links to the web or the page itself."""
    for match in _LINK.finditer(text):
        # Each kind of link has a group of its own, of which one has matched.
        target = next(filter(None, match.groups()))
        # A link within the page has only what follows the "#".
        path, _, _ = target.partition("#")
        if path and "://" not in path and not path.startswith(("mailto:", "data:")):
            yield path
