"""The catalog: every figure and table of the papers and of this workbook, listed and checked."""

from __future__ import annotations

import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.report import claims, outputs
from ddlkit.store.files import own_yaml

_STATISTICS: dict[str, Callable[[Any], Any]] = {"median": np.median, "max": np.max}
_SCHEMA = own_yaml(Path(__file__).with_name("figures.schema.yml").read_text(encoding="utf-8"))
_HEAD = Path(__file__).with_name("figures.head.md").read_text(encoding="utf-8")
_PNG = b"\x89PNG\r\n\x1a\n"
MOST_OWN = 18
"""Figures of the workbook's own, at most."""


@dataclass(frozen=True)
class Entry:
    """One figure or table; the fields are explained at the top of data/figures.yml.

    >>> entry = Entry("osf-tab1", "The symbols.", "14_tables_and_verdicts", ("paper",), "transcribed")
    >>> entry.paper, entry.status
    ('osf', 'done')
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
    status: str = "done"

    @property
    def paper(self) -> str:
        """The key of the paper that it is of, else "workbook"."""
        paper = self.id.partition("-")[0]
        return paper if paper in claims.PAPERS else "workbook"


def load(path: Path | None = None) -> tuple[Entry, ...]:
    """The entries of data/figures.yml (or ``path``), in its order. Raises UserError."""
    path = path or store.DATA / "figures.yml"
    entries = [
        _entry(item, f"{path}, entry {number}") for number, item in enumerate(_listed(path), 1)
    ]
    (twice, times), *_ = Counter(entry.id for entry in entries).most_common(1)
    if times > 1:
        raise UserError(f"catalog entry {twice}: id appears twice: give each its own")
    return tuple(entries)


def captions() -> dict[str, tuple[str, str]]:
    """Caption and grade of each entry of data/figures.yml, as they are written: `load` judges entries."""
    listed = _listed(store.DATA / "figures.yml")
    return {item["id"]: (item["caption"], item["grade"]) for item in listed}


def _listed(path: Path) -> list[Any]:
    """What YAML reads there. Raises UserError for anything but a list."""
    try:
        listed = own_yaml(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}: restore the file") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(listed, list) or not listed:
        raise UserError(f"{path}: must be a list of entries")
    return listed


@cache
def _validator() -> Any:
    """Of entries, by the schema."""
    import jsonschema  # takes longer to import than all else here

    return jsonschema.Draft202012Validator(_SCHEMA)


def _entry(item: Any, where: str) -> Entry:
    """An entry of what YAML read, held to the schema. Raises UserError naming the field that is wrong."""
    if not isinstance(item, dict) or not isinstance(item.get("id"), str):
        raise UserError(f"{where}: has no id")
    for error in _validator().iter_errors(item):
        what = error.message
        if error.path:
            field = error.path[0]
            wanted = _SCHEMA["properties"][field]["description"]
            what = f"{field} is {item[field]!r}: must be {wanted}"
        raise UserError(f"catalog entry {item['id']}: {what}")
    values: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in item.items()}
    return Entry(**values)


def find_problems(reports: Path, entries: Sequence[Entry]) -> list[str]:
    """What is wrong, one line each; empty when all is well.

    A ``done`` entry needs its inputs, its image, its CSV with at least one row, and every statistic of its
    tolerance within the limit.
    """
    lines = []
    for entry in entries:
        if entry.status == "done":
            lines += [f"{entry.id}: {line}" for line in _missing(entry, reports)]
    own = sum(entry.paper == "workbook" and entry.status == "done" for entry in entries)
    if own > MOST_OWN:
        lines.append(f"{own} figures of the workbook's own, limit {MOST_OWN}")
    return lines


def _reading(notebooks: Sequence[str]) -> tuple[list[str], str]:
    """What is wrong with the minutes of executed notebooks, and why they could not be checked, if so."""
    from ddlkit.report import minutes  # needs nbformat, as nothing else here

    executed = [store.BUILD / "executed" / f"{name}.ipynb" for name in notebooks]
    if missing := [path.stem for path in executed if not path.is_file()]:
        run = "run ddlkit book --recorded"
        return [], f"; minutes not checked, {len(missing)} notebooks are not executed: {run}"
    return minutes.find_problems(executed), ""


def _missing(entry: Entry, reports: Path) -> list[str]:
    lines = [
        f"input {i} matches no file" for i in entry.inputs if not store.list_tables(store.ROOT, i)
    ]
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
            value = float(_STATISTICS[statistic](values)) if values.size else float("nan")
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
    tables, done = sum("-tab" in e.id for e in papers), sum(e.status == "done" for e in entries)
    total = f"{len(papers) - tables} figures and {tables} tables of the papers"
    own = len(entries) - len(papers)
    return "\n".join([*lines, f"{total}, {own} of this workbook; {done} of {len(entries)} done"])


def document(entries: Sequence[Entry]) -> str:
    """reports/FIGURES.md: figure -> notebook -> hardware -> minutes -> grade of truth -> status."""
    lines = []
    for e in entries:
        done = e.status == "done"
        figure = f"[{e.id}](figures/{e.id}.png)" if done else e.id
        notebook = f"[{e.notebook}](../notebooks/{e.notebook}.ipynb)" if done else e.notebook
        cells = (figure, e.caption, notebook, e.hardware, f"{e.minutes:g}", e.grade, e.status)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n")
    return _HEAD + "".join(lines)


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
        slow, unknown = _reading(sorted({entry.notebook for entry in entries}))
        problems += slow
        if not is_current(entries):
            problems.append("FIGURES.md is not current: run ddlkit figures --write")
        for line in problems:
            print(f"ddlkit figures: {line}", file=sys.stderr)
        done = sum(entry.status == "done" for entry in entries)
        print(f"{len(entries)} entries, {done} done, {len(problems)} problems{unknown}")
        return 1 if problems else 0
    if not write:
        print(listing(entries))
    return 0
