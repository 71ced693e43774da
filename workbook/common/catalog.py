"""The catalog of figures and tables, and how long executed notebooks take to read.

Both are listed and checked by ``python -m workbook figures``.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import pandas as pd

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.store.files import own_yaml
from workbook.common import outputs, places

_HEAD = Path(__file__).with_name("figures.head.md").read_text(encoding="utf-8")
MOST_OWN = 20
"""The largest number of figures of the workbook's own."""
BEGIN = 3.0
"""The minutes that beginning a notebook takes."""
PACE = {"words": 0.006, "figures": 1.9, "tables": 1.3, "sentences": 0.32}
"""The minutes that a word, a figure, a table and a printed sentence take."""
LIMIT_MINUTES = 25.0
"""The minutes that a notebook may take to read."""
LONGER = {"06": 31.0, "09": 33.0, "10": 30.0, "12": 26.0, "14": 33.0}
"""The notebooks that may take longer, and their minutes."""
COURSE_MINUTES = 313.0
"""The minutes that all notebooks together may take."""
CORE_MINUTES = 90.0
"""The minutes that the core path may take."""
CORE_NUMBERS = ("00", "01", "02", "03", "04", "05")
"""The notebooks of the core path."""
REFERENCE = "14"
"""The notebook in which numbers are looked up. It does not count among those that are read."""
_FOLDED = re.compile(r"<details>.*?</details>", re.DOTALL)
_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


# -- figures and tables --------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """One figure or table, with the fields that the top of data/figures.yml explains."""

    id: str
    caption: str
    notebook: str
    columns: tuple[str, ...]
    grade: str
    inputs: tuple[str, ...] = ()
    hardware: str = "any"
    minutes: float = 0
    tolerance: Mapping[str, Mapping[str, float]] | None = None
    status: str = "done"


def load(path: Path | None = None) -> tuple[Entry, ...]:
    """Return the entries of the catalog.

    Parameters
    ----------
    path : Path, optional
        The file of the catalog. By default data/figures.yml.

    Returns
    -------
    tuple of Entry
        The entries in the order of the file.

    Raises
    ------
    UserError
        If an entry has an unknown field or lacks one, or if two entries have one id.
    """
    path = path or places.DATA / "figures.yml"
    entries: dict[str, Entry] = {}
    for item in own_yaml(store.files.read_text(path)):
        fields: dict[str, Any] = {}
        for name, value in item.items():
            # Entries are immutable, so lists become tuples.
            fields[name] = tuple(value) if isinstance(value, list) else value
        _refuse_wrong_fields(fields, f"{path}, {item.get('id')}")
        entry = Entry(**fields)
        if entry.id in entries:
            raise UserError(f"{path}, {entry.id}: id appears twice: give each its own")
        entries[entry.id] = entry
    return tuple(entries.values())


def _refuse_wrong_fields(fields: Mapping[str, Any], where: str) -> None:
    """Raise UserError if an entry has an unknown field or lacks one. ``where`` is its place."""
    known = signature(Entry).parameters
    for name in fields:
        if name not in known:
            raise UserError(f"{where}: {name}: unknown field: use {', '.join(known)}")
    missing = [
        name
        for name, field in known.items()
        if field.default is Parameter.empty and name not in fields
    ]
    if missing:
        raise UserError(f"{where}: write also the fields {', '.join(missing)}")


def find_problems(reports: Path, entries: Sequence[Entry]) -> list[str]:
    """Return what is wrong with the entries that are done.

    Parameters
    ----------
    reports : Path
        The reports directory, which has their images and numbers.
    entries : sequence of Entry
        The entries. Those that are not done are not checked.

    Returns
    -------
    list of str
        One line for each problem.
    """
    done = [entry for entry in entries if entry.status == "done"]
    problems = []
    for entry in done:
        problems += [f"{entry.id}: {problem}" for problem in _problems(entry, reports)]
    # The ids of other figures begin with the abbreviation of a paper.
    n_own = sum(entry.id.startswith("wb-") for entry in done)
    if n_own > MOST_OWN:
        problems.append(f"{n_own} figures of the workbook's own, limit {MOST_OWN}")
    return problems


def _problems(entry: Entry, reports: Path) -> list[str]:
    """Return what is wrong with the inputs, the image and the numbers of one entry."""
    problems = []
    # An input is a pattern of the paths of tables.
    for pattern in entry.inputs:
        if not store.list_tables(places.ROOT, pattern):
            problems.append(f"input {pattern} matches no file")
    image, numbers = outputs.figure_files(entry.id, reports)
    if not image.is_file() or not image.read_bytes().startswith(_PNG_SIGNATURE):
        problems.append(f"image {image} is missing, or not a PNG")
    # Without numbers, nothing else can be checked.
    if not numbers.is_file():
        return [*problems, f"CSV {numbers} is missing"]
    try:
        frame = pd.read_csv(numbers)
    except (OSError, ValueError) as error:
        return [*problems, f"CSV {numbers} cannot be read: {error}"]
    if frame.empty:
        problems.append(f"CSV {numbers} has no row")
    for sentence, is_within in deviations(entry, frame):
        if not is_within:
            problems.append(sentence)
    return problems


def deviations(entry: Entry, frame: pd.DataFrame) -> list[tuple[str, bool]]:
    """Return how far the numbers of an entry deviate from what they should be.

    Parameters
    ----------
    entry : Entry
        The entry. Its tolerance has limits by column and statistic, as in
        ``{"error": {"max": 0.1}}``: the largest absolute value of the column "error" may be
        at most 0.1.
    frame : DataFrame
        The numbers of its CSV file.

    Returns
    -------
    list of (str, bool)
        For each statistic a sentence, and whether the statistic is within its limit.
    """
    sentences = []
    for column, limits in (entry.tolerance or {}).items():
        # A missing column counts as one NaN, and so does a cell that is no number.
        cells = frame.get(column, pd.Series([None]))
        absolute = pd.to_numeric(cells, errors="coerce").abs()
        for statistic, limit in limits.items():
            # With a NaN, the statistic is NaN, which is within no limit.
            value = float(absolute.agg(statistic, skipna=False))
            shown = outputs.format_number(value) or "not finite"
            sentence = f"{statistic} of |{column}| is {shown}, limit {limit:g}"
            sentences.append((sentence, value <= limit))
    return sentences


# -- minutes of notebooks ------------------------------------------------------------


def count_shown(cells: Sequence[Any]) -> Counter[str]:
    """Count what executed cells show to a reader.

    Neither code nor exercises count, nor does folded output, which is looked up and not
    read.

    Parameters
    ----------
    cells : sequence of NotebookNode
        The cells of a notebook.

    Returns
    -------
    Counter
        How many "words", "figures", "tables" and "sentences" (printed lines) are shown.
    """
    counts: Counter[str] = Counter()
    in_exercises = False
    for cell in cells:
        # Of cells of code, only their outputs count.
        text = cell.source if cell.cell_type == "markdown" else ""
        if "## Exercises" in text:
            in_exercises = True
        # After the exercises, the last cell names the next notebook.
        if text.startswith("**Next:**"):
            in_exercises = False
        if in_exercises:
            continue
        counts["words"] += len(text.split())
        for output in cell.get("outputs", ()):
            counts += _count_output(output)
    return counts


def _count_output(output: Any) -> Counter[str]:
    """Count what one output of a cell shows, as `count_shown` does."""
    data = output.get("data", {})
    page = _FOLDED.sub("", str(data.get("text/html", "")))
    has_figure = "<figure" in page or "image/png" in data
    tables = page.count("<table")
    # What a cell prints is in "text", and what it displays is in "data".
    printed = str(output.get("text", "") or data.get("text/markdown", ""))
    if not printed and not has_figure and not tables:
        # HTML that is neither a figure nor a table counts as text, without its tags.
        printed = re.sub(r"<[^>]*>", "", page)
    lines = [line for line in printed.splitlines() if line.strip()]
    return Counter(
        words=len(printed.split()),
        figures=int(has_figure),
        tables=tables,
        # "sentences" are printed lines, each of which costs time beyond its words.
        sentences=len(lines),
    )


def find_long(executed: Sequence[Path]) -> list[str]:
    """Return which executed notebooks take too long to read, and which show a warning.

    Parameters
    ----------
    executed : sequence of Path
        The executed notebooks.

    Returns
    -------
    list of str
        One line for each problem. A notebook takes too long if it takes longer than it
        may, or longer than it states. The course, which is all notebooks but REFERENCE, and
        its core path, which is those of CORE_NUMBERS, have limits of their own. A notebook
        shows a warning if one of its cells printed on standard error.
    """
    import nbformat

    minutes: dict[str, float] = {}
    problems = []
    for path in executed:
        # The name of a notebook begins with its number of two digits.
        number = path.stem[:2]
        cells = nbformat.read(str(path), as_version=4).cells
        minutes[number] = _minutes(cells)
        limit = _limit_minutes(number, cells[0].source)
        if minutes[number] > limit:
            problems.append(
                f"{path.stem} takes {minutes[number]:.1f} minutes to read, "
                f"{limit:g} are allowed"
            )
        if _has_warning(cells):
            problems.append(f"{path.stem} prints a warning")
    return problems + _find_long_paths(minutes)


def _find_long_paths(minutes: Mapping[str, float]) -> list[str]:
    """Return a line for each of the course and its core path that takes too long to read.

    ``minutes`` has the time of each notebook by its number of two digits.
    """
    problems = []
    course = sum(minutes[number] for number in minutes if number != REFERENCE)
    if course > COURSE_MINUTES:
        problems.append(_too_long("the course", course, COURSE_MINUTES))
    core = sum(minutes[number] for number in minutes if number in CORE_NUMBERS)
    if core > CORE_MINUTES:
        problems.append(_too_long("the core path", core, CORE_MINUTES))
    return problems


def _minutes(cells: Sequence[Any]) -> float:
    """Return the minutes that the cells of a notebook take to read."""
    counts = count_shown(cells)
    return BEGIN + sum(PACE[kind] * count for kind, count in counts.items())


def _limit_minutes(number: str, first_cell: str) -> float:
    """Return the minutes that a notebook may take, by its number and its first cell.

    A line of the first cell states how many minutes the notebook takes.
    """
    limit = LONGER.get(number, LIMIT_MINUTES)
    stated = re.search(r"^\* \*\*Time:\*\* (\d+) minutes", first_cell, re.MULTILINE)
    if not stated:
        return limit
    # Stated minutes are rounded, so that up to half a minute more agrees with them.
    return min(limit, int(stated[1]) + 0.5)


def _has_warning(cells: Sequence[Any]) -> bool:
    """Return whether any cell printed on standard error."""
    for cell in cells:
        for output in cell.get("outputs", ()):
            if output.get("name") == "stderr":
                return True
    return False


def _too_long(name: str, minutes: float, limit: float) -> str:
    return f"{name} takes {minutes:.0f} minutes to read, {limit:g} are allowed"


# -- the command ---------------------------------------------------------------------


def document(entries: Sequence[Entry]) -> str:
    """Return reports/FIGURES.md, a table with a row for each entry.

    The columns are the figure, its caption, notebook, hardware, minutes, grade of truth
    and status.
    """
    lines = []
    for entry in entries:
        figure = entry.id
        notebook = entry.notebook
        # The files of an entry that is not done may not exist, so there is no link to them.
        if entry.status == "done":
            figure = f"[{figure}](figures/{figure}.png)"
            notebook = f"[{notebook}](../notebooks/{notebook}.ipynb)"
        cells = [
            figure,
            entry.caption,
            notebook,
            entry.hardware,
            f"{entry.minutes:g}",
            entry.grade,
            entry.status,
        ]
        # A bar would end the cell of a Markdown table.
        escaped = [cell.replace("|", "\\|") for cell in cells]
        lines.append(f"| {' | '.join(escaped)} |\n")
    return _HEAD + "".join(lines)


def command(
    *, check: bool = False, write: bool = False, reports: Path | None = None
) -> int:
    """List, check or write reports/FIGURES.md.

    Parameters
    ----------
    check : bool, optional
        Whether to check the catalog, the page, and how many minutes notebooks take to
        read. Problems are printed on standard error, one line each.
    write : bool, optional
        Whether to write the page, which is done before a check. Without ``check`` and
        ``write``, entries are listed.
    reports : Path, optional
        The directory whose figures are checked. By default reports.

    Returns
    -------
    int
        The exit status, 1 if there are problems.
    """
    entries = load()
    page = places.REPORTS / "FIGURES.md"
    if write:
        store.atomic_write_text(page, document(entries))
        print(page)
    if check:
        return _check(entries, page, reports or places.REPORTS)
    if not write:
        _list(entries)
    return 0


def _list(entries: Sequence[Entry]) -> None:
    """Print a line for each entry."""
    # The fields that are printed, in order, and their headings.
    headings = {
        "id": "id",
        "status": "status",
        "grade": "kind of truth",
        "notebook": "notebook",
        "minutes": "minutes to make",
        "hardware": "hardware",
        "caption": "caption",
    }
    table = pd.DataFrame(entries)[[*headings]].rename(columns=headings)
    print(table.to_string(index=False, max_colwidth=40))


def _check(entries: Sequence[Entry], page: Path, reports: Path) -> int:
    """Print the problems of the catalog and a summary, and return the exit status.

    ``page`` is the path of FIGURES.md, and ``reports`` the directory of the figures. The
    exit status is 1 if there are problems. Notebooks are checked only if all of them were
    executed.
    """
    problems = find_problems(reports, entries)
    if not page.is_file() or page.read_text(encoding="utf-8") != document(entries):
        problems.append(
            "FIGURES.md is not current: run python -m workbook figures --write"
        )
    notebooks = sorted({entry.notebook for entry in entries})
    executed = [places.BUILD / "executed" / f"{name}.ipynb" for name in notebooks]
    missing = sum(not path.is_file() for path in executed)
    not_checked = ""
    if missing:
        not_checked = (
            "; how long the notebooks take to read, and whether they show warnings, was not "
            "checked, because "
            f"{missing} of them are not in build/executed: "
            "run python -m workbook build --recorded to check them too"
        )
    else:
        problems += find_long(executed)
    for problem in problems:
        print(f"python -m workbook figures: {problem}", file=sys.stderr)
    done = sum(entry.status == "done" for entry in entries)
    noun = "problem" if len(problems) == 1 else "problems"
    print(
        f"{len(entries)} entries, {done} of them marked done in the catalog, "
        f"{len(problems)} {noun}{not_checked}"
    )
    return 1 if problems else 0
