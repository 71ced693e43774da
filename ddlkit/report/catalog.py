"""The catalog: every figure and table of the papers and of this workbook, listed and checked."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.report import claims, outputs

PAPERS = (*claims.PAPERS, "workbook")
COLUMNS = ("paper", "model", "measured")
GRADES = ("gpu", "lab", "loopback", "model", "transcribed")
STATUSES = ("done", "planned")
STATISTICS: dict[str, Callable[[Any], Any]] = {"median": np.median, "max": np.max}

BEGIN, END = "<!-- figures:begin -->", "<!-- figures:end -->"

_ID = re.compile(r"(?:(osf|sharing|dag|omgs)-(?:fig\d\d|tab\d)|wb-[a-z0-9-]+)")
_NOTEBOOK = re.compile(r"\d\d_[a-z0-9_]+")
_PNG = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class Entry:
    """One figure or table; the fields are explained at the top of data/figures.yml.

    Raises UserError naming the entry and the field that is wrong.
    """

    id: str
    paper: str
    caption: str
    notebook: str
    inputs: tuple[str, ...]
    columns: tuple[str, ...]
    hardware: str
    minutes: float
    grade: str
    tolerance: Mapping[str, Mapping[str, float]] | None
    claims: tuple[str, ...]
    status: str

    def __post_init__(self) -> None:
        named = _ID.fullmatch(self.id)
        self._require(named is not None, "id", "<paper>-figNN, <paper>-tabN or wb-<name>")
        paper = (named and named[1]) or "workbook"
        self._require(self.paper == paper, "paper", paper)
        self._require(bool(self.caption), "caption", "a sentence")
        self._require(bool(_NOTEBOOK.fullmatch(self.notebook)), "notebook", "NN_name")
        self._require(set(self.columns) <= set(COLUMNS), "columns", f"some of {', '.join(COLUMNS)}")
        self._require(bool(self.columns), "columns", "not empty")
        self._require(bool(self.hardware), "hardware", 'what it needs, or "any"')
        self._require(self.minutes >= 0, "minutes", "0 or more")
        self._require(self.grade in GRADES, "grade", f"one of {', '.join(GRADES)}")
        self._require(self.status in STATUSES, "status", f"one of {', '.join(STATUSES)}")
        self._require(_is_tolerance(self.tolerance), "tolerance", "null or column: {median: limit}")

    def _require(self, right: bool, field: str, wanted: str) -> None:
        if not right:
            found = getattr(self, field)
            raise UserError(f"catalog entry {self.id}: {field} is {found!r}: must be {wanted}")

    @property
    def is_table(self) -> bool:
        """Whether it is one of the papers' tables."""
        return "-tab" in self.id


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
    entries = tuple(
        _entry(item, f"{path}, entry {number}") for number, item in enumerate(listed, 1)
    )
    seen: set[str] = set()
    for entry in entries:
        if entry.id in seen:
            raise UserError(f"catalog entry {entry.id}: id appears twice: give each its own")
        seen.add(entry.id)
    return entries


_TYPES: dict[str, tuple[type, ...]] = {
    "inputs": (list,),
    "columns": (list,),
    "claims": (list,),
    "minutes": (int, float),
    "tolerance": (dict, type(None)),
}


def _entry(item: Any, where: str) -> Entry:
    """An entry of what YAML read; the types are checked here, the values by Entry."""
    if not isinstance(item, dict) or not isinstance(item.get("id"), str):
        raise UserError(f"{where}: has no id")
    name = f"catalog entry {item['id']}"
    wanted = [field.name for field in fields(Entry)]
    for field in wanted:
        if field not in item:
            raise UserError(f"{name}: field {field} is missing")
        types = _TYPES.get(field, (str,))
        if not isinstance(item[field], types):
            raise UserError(f"{name}: {field} is {item[field]!r}: must be a {types[0].__name__}")
        if types == (list,) and not all(isinstance(part, str) for part in item[field]):
            raise UserError(f"{name}: {field} is {item[field]!r}: must be a list of words")
    unknown = sorted(set(map(str, item)) - set(wanted))
    if unknown:
        raise UserError(f"{name}: unknown field {unknown[0]}: use {', '.join(wanted)}")
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in item.items()}
    return Entry(**values)


def _is_tolerance(tolerance: Any) -> bool:
    return tolerance is None or all(
        isinstance(column, str)
        and isinstance(limits, dict)
        and limits
        and all(k in STATISTICS and isinstance(v, int | float) and v > 0 for k, v in limits.items())
        for column, limits in tolerance.items()
    )


def check(reports: Path, entries: Sequence[Entry] | None = None) -> list[str]:
    """What is wrong, a line each; empty when all is well.

    Every claim that an entry names must exist. A ``done`` entry needs its inputs, its image, its
    CSV with at least one row, and every statistic of its tolerance within the limit.
    """
    known = {claim.id for claim in claims.load_claims()}
    lines = []
    for entry in load() if entries is None else entries:
        lines += [f"{entry.id}: no claim {c} in claims.csv" for c in entry.claims if c not in known]
        if entry.status == "done":
            lines += [f"{entry.id}: {line}" for line in _missing(entry, reports)]
    return lines


def _missing(entry: Entry, reports: Path) -> list[str]:
    lines = [f"input {i} matches no file" for i in entry.inputs if not any(store.ROOT.glob(i))]
    image = outputs.figure_path(entry.id, ".png", reports)
    if not image.is_file():
        lines.append(f"image {image} is missing")
    elif image.read_bytes()[:8] != _PNG:
        lines.append(f"image {image} is not a PNG")
    numbers = outputs.figure_path(entry.id, ".csv", reports)
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
    """The catalog as aligned lines for a terminal, and a last line of totals."""
    rows = [("id", "status", "grade", "notebook", "min", "hardware", "caption")]
    for e in entries:
        caption = e.caption if len(e.caption) <= 60 else e.caption[:59] + "…"
        rows.append((e.id, e.status, e.grade, e.notebook, f"{e.minutes:g}", e.hardware, caption))
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    lines = [
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    papers = [e for e in entries if e.paper != "workbook"]
    done = sum(e.status == "done" for e in entries)
    tables = sum(e.is_table for e in papers)
    total = f"{len(papers) - tables} figures and {tables} tables of the papers"
    own = len(entries) - len(papers)
    return "\n".join([*lines, f"{total}, {own} of this workbook; {done} of {len(entries)} done"])


def markdown_table(entries: Sequence[Entry]) -> str:
    """The README's table: figure -> notebook -> hardware -> minutes -> grade of truth -> status."""
    lines = [
        "| figure | shows | notebook | hardware | minutes | grade of truth | status |",
        "|---|---|---|---|--:|---|---|",
    ]
    for e in entries:
        done = e.status == "done"
        figure = f"[{e.id}](reports/figures/{e.id}.png)" if done else e.id
        notebook = f"[{e.notebook}](notebooks/{e.notebook}.ipynb)" if done else e.notebook
        cells = (figure, e.caption, notebook, e.hardware, f"{e.minutes:g}", e.grade, e.status)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def splice(text: str, block: str) -> str:
    """``text`` with ``block`` between its two markers. Raises UserError unless each is there once."""
    for marker in (BEGIN, END):
        if text.count(marker) != 1:
            raise UserError(
                f"README: marker {marker} appears {text.count(marker)} times: must be once"
            )
    head, _, rest = text.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not end:
        raise UserError(f"README: {END} stands before {BEGIN}: exchange them")
    return f"{head}{BEGIN}\n{block.strip()}\n{END}{tail}"


def is_current(readme: Path | None = None, entries: Sequence[Entry] | None = None) -> bool:
    """Whether the README's table is what the catalog says. Raises UserError as ``splice``."""
    text = _read(readme)
    return splice(text, markdown_table(load() if entries is None else entries)) == text


def update_readme(readme: Path | None = None, entries: Sequence[Entry] | None = None) -> bool:
    """Write the table into the README; True if that changed it. Raises UserError as ``splice``."""
    text = _read(readme)
    new = splice(text, markdown_table(load() if entries is None else entries))
    if new != text:
        store.atomic_write_text(readme or store.ROOT / "README.md", new)
    return new != text


def _read(readme: Path | None) -> str:
    path = readme or store.ROOT / "README.md"
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}: restore the file") from error


def command(*, check: bool = False, readme: bool = False, reports: Path | None = None) -> int:
    """``ddlkit figures``: list, check or write the README's table; the exit status.

    Problems go to stderr, a line each, and give status 1.
    """
    entries = load()
    if readme:
        print(
            "README.md: updated" if update_readme(entries=entries) else "README.md: already current"
        )
    if check:
        return _report(_problems(reports or store.REPORTS, entries), entries)
    if not readme:
        print(listing(entries))
    return 0


def _problems(reports: Path, entries: Sequence[Entry]) -> list[str]:
    stale = (
        []
        if is_current(entries=entries)
        else ["README.md: its table is not current: run with --readme"]
    )
    return check(reports, entries) + stale


def _report(problems: Sequence[str], entries: Sequence[Entry]) -> int:
    for line in problems:
        print(f"ddlkit figures: {line}", file=sys.stderr)
    done = sum(entry.status == "done" for entry in entries)
    print(f"{len(entries)} entries, {done} done, {len(problems)} problems")
    return 1 if problems else 0
