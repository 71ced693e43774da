"""The catalog: every figure and table of the papers and of this workbook, listed and checked."""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.report import claims, outputs

COLUMNS = ("paper", "model", "measured")
GRADES = ("gpu", "lab", "loopback", "model", "transcribed")
STATUSES = ("done", "planned")
STATISTICS: dict[str, Callable[[Any], Any]] = {"median": np.median, "max": np.max}

_ID = rf"(?:(?:{'|'.join(claims.PAPERS)})-(?:fig\d\d|tab\d)|wb-[a-z0-9-]+)"
_NOTEBOOK = r"\d\d_[a-z0-9_]+"
_PNG = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class Entry:
    """One figure or table; the fields are explained at the top of data/figures.yml.

    >>> entry = Entry("osf-tab1", "The symbols.", "80_tables", ("paper",), "transcribed")
    >>> entry.paper, entry.is_table, entry.status
    ('osf', True, 'done')

    Raises UserError naming the entry and the field that is wrong.
    """

    id: str
    caption: str
    notebook: str
    columns: tuple[str, ...]
    grade: str
    inputs: tuple[str, ...] = ()
    hardware: str = "any"
    minutes: float = 0
    tolerance: Mapping[str, Mapping[str, float]] | None = None
    claims: tuple[str, ...] = ()
    status: str = "done"

    def __post_init__(self) -> None:
        for field, (is_right, wanted) in _RULES.items():
            value = getattr(self, field)
            if not is_right(value):
                raise UserError(f"catalog entry {self.id}: {field} is {value!r}: must be {wanted}")

    @property
    def paper(self) -> str:
        """The key of the paper that it is of, else "workbook"."""
        paper = self.id.partition("-")[0]
        return paper if paper in claims.PAPERS else "workbook"

    @property
    def is_table(self) -> bool:
        """Whether it is one of the papers' tables."""
        return "-tab" in self.id


def _is_like(pattern: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and bool(re.fullmatch(pattern, value))


def _is_words(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(word, str) for word in value)


def _is_tolerance(tolerance: Any) -> bool:
    if tolerance is None:
        return True
    return isinstance(tolerance, dict) and all(
        isinstance(column, str)
        and isinstance(limits, dict)
        and limits
        and all(k in STATISTICS and isinstance(v, int | float) and v > 0 for k, v in limits.items())
        for column, limits in tolerance.items()
    )


_RULES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "id": (_is_like(_ID), "<paper>-figNN, <paper>-tabN or wb-<name>"),
    "caption": (_is_like(".+"), "a sentence"),
    "notebook": (_is_like(_NOTEBOOK), "NN_name"),
    "columns": (
        lambda v: _is_words(v) and v and set(v) <= set(COLUMNS),
        f"a list of some of {', '.join(COLUMNS)}",
    ),
    "grade": (lambda v: v in GRADES, f"one of {', '.join(GRADES)}"),
    "inputs": (_is_words, "a list of words"),
    "hardware": (_is_like(".+"), 'what it needs, or "any"'),
    "minutes": (lambda v: isinstance(v, int | float) and v >= 0, "a number, 0 or more"),
    "tolerance": (_is_tolerance, "null or column: {median: limit}"),
    "claims": (_is_words, "a list of words"),
    "status": (lambda v: v in STATUSES, f"one of {', '.join(STATUSES)}"),
}


def load(path: Path | None = None) -> tuple[Entry, ...]:
    """The entries of data/figures.yml (or ``path``), in its order. Raises UserError."""
    path = path or store.DATA / "figures.yml"
    try:
        listed = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}: restore the file") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(listed, list) or not listed:
        raise UserError(f"{path}: must be a list of entries")
    entries = [_entry(item, f"{path}, entry {number}") for number, item in enumerate(listed, 1)]
    ids = [entry.id for entry in entries]
    for one in ids:
        if ids.count(one) > 1:
            raise UserError(f"catalog entry {one}: id appears twice: give each its own")
    return tuple(entries)


def _entry(item: Any, where: str) -> Entry:
    """An entry of what YAML read; its fields are checked here, their values by Entry."""
    if not isinstance(item, dict) or not isinstance(item.get("id"), str):
        raise UserError(f"{where}: has no id")
    known = {field.name: field.default is MISSING for field in fields(Entry)}
    for field, is_needed in known.items():
        if is_needed and field not in item:
            raise UserError(f"catalog entry {item['id']}: field {field} is missing")
    unknown = sorted(map(str, item.keys() - known.keys()))
    if unknown:
        raise UserError(
            f"catalog entry {item['id']}: unknown field {unknown[0]}: use {', '.join(known)}"
        )
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in item.items()}
    return Entry(**values)


def find_problems(reports: Path, entries: Sequence[Entry]) -> list[str]:
    """What is wrong, one line each; empty when all is well.

    Every claim that an entry names must exist. A ``done`` entry needs its inputs, its image, its
    CSV with at least one row, and every statistic of its tolerance within the limit.
    """
    known = {claim.id for claim in claims.load_claims()}
    lines = []
    for entry in entries:
        lines += [f"{entry.id}: no claim {c} in claims.csv" for c in entry.claims if c not in known]
        if entry.status == "done":
            lines += [f"{entry.id}: {line}" for line in _missing(entry, reports)]
    return lines


def _missing(entry: Entry, reports: Path) -> list[str]:
    lines = [f"input {i} matches no file" for i in entry.inputs if not any(store.ROOT.glob(i))]
    image, numbers = outputs.figure_files(entry.id, reports)
    if not image.is_file():
        lines.append(f"image {image} is missing")
    elif image.read_bytes()[:8] != _PNG:
        lines.append(f"image {image} is not a PNG")
    if not numbers.is_file():
        return [*lines, f"CSV {numbers} is missing"]
    try:
        frame = pd.read_csv(numbers)
    except (ValueError, pd.errors.ParserError) as error:
        return [*lines, f"CSV {numbers} cannot be read: {error}"]
    if frame.empty:
        lines.append(f"CSV {numbers} has no row")
    return lines + [line for line, ok in deviations(entry, frame) if not ok]


def deviations(entry: Entry, frame: pd.DataFrame) -> list[tuple[str, bool]]:
    """(sentence, within its limit) for each statistic of the entry's tolerance, from its CSV.

    A column that is missing or has a value that is not finite is out of tolerance.
    """
    found = []
    for column, limits in (entry.tolerance or {}).items():
        if column not in frame:
            found.append((f"column {column} of its tolerance is missing", False))
            continue
        values = np.abs(pd.to_numeric(frame[column], errors="coerce").to_numpy(dtype=float))
        for statistic, limit in limits.items():
            value = float(STATISTICS[statistic](values)) if values.size else float("nan")
            shown = outputs.format_number(value) or "not finite"
            sentence = f"{statistic} of |{column}| is {shown}, limit {limit:g}"
            found.append((sentence, bool(value <= limit)))
    return found


def listing(entries: Sequence[Entry]) -> str:
    """The catalog as lines for a terminal, and a last line of totals."""
    lines = [
        f"{e.id:<22} {e.status:<8} {e.grade:<12} {e.notebook:<18} {e.minutes:>3g} min  {e.hardware:<12} "
        + textwrap.shorten(e.caption, 60, placeholder=" …")
        for e in entries
    ]
    papers = [e for e in entries if e.paper != "workbook"]
    tables, done = sum(e.is_table for e in papers), sum(e.status == "done" for e in entries)
    total = f"{len(papers) - tables} figures and {tables} tables of the papers"
    own = len(entries) - len(papers)
    return "\n".join([*lines, f"{total}, {own} of this workbook; {done} of {len(entries)} done"])


_DOCUMENT = """\
# Figures and tables

Every figure and table of the four papers (`osf`, `sharing`, `dag`, `omgs`; titles in
[CITATION.cff](../CITATION.cff)) and of this workbook (`wb`), generated from
[data/figures.yml](../data/figures.yml) by `ddlkit figures --write`. Minutes are what measuring anew takes;
everything that is done can be drawn from the recordings, which takes seconds.

| figure | shows | notebook | hardware | minutes | grade of truth | status |
|---|---|---|---|--:|---|---|
"""


def document(entries: Sequence[Entry]) -> str:
    """reports/FIGURES.md: figure -> notebook -> hardware -> minutes -> grade of truth -> status."""
    lines = []
    for e in entries:
        done = e.status == "done"
        figure = f"[{e.id}](figures/{e.id}.png)" if done else e.id
        notebook = f"[{e.notebook}](../notebooks/{e.notebook}.ipynb)" if done else e.notebook
        cells = (figure, e.caption, notebook, e.hardware, f"{e.minutes:g}", e.grade, e.status)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    return _DOCUMENT + "".join(lines)


def is_current(entries: Sequence[Entry]) -> bool:
    """Whether reports/FIGURES.md is what the catalog says."""
    path = store.REPORTS / "FIGURES.md"
    return path.is_file() and path.read_text(encoding="utf-8") == document(entries)


def command(*, check: bool = False, write: bool = False, reports: Path | None = None) -> int:
    """``ddlkit figures``: list, check or write reports/FIGURES.md; the exit status.

    Problems go to stderr, one line each, and give status 1.
    """
    entries = load()
    if write:
        store.atomic_write_text(store.REPORTS / "FIGURES.md", document(entries))
        print(store.REPORTS / "FIGURES.md")
    if check:
        problems = find_problems(reports or store.REPORTS, entries)
        if not is_current(entries):
            problems.append("FIGURES.md is not current: run ddlkit figures --write")
        for line in problems:
            print(f"ddlkit figures: {line}", file=sys.stderr)
        done = sum(entry.status == "done" for entry in entries)
        print(f"{len(entries)} entries, {done} done, {len(problems)} problems")
        return 1 if problems else 0
    if not write:
        print(listing(entries))
    return 0
