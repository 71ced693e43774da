"""The catalog of figures and tables, listed and checked; and how long executed notebooks take to read."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.store.files import own_yaml
from workbook.common import outputs, places

_HEAD = Path(__file__).with_name("figures.head.md").read_text(encoding="utf-8")
MOST_OWN = 18
"""Figures of the workbook's own, at most."""
BEGIN, PACE = 3.0, {"words": 0.006, "figures": 1.9, "tables": 1.3, "sentences": 0.32}
"""Minutes that every notebook takes, and that a word, figure, table and printed sentence take."""
LIMIT_MINUTES = 25.0
"""A notebook takes at most so many minutes to read."""
LONGER = {"06": 31.0, "09": 33.0, "10": 30.0, "14": 33.0}
"""The notebooks that may take longer, and their minutes."""
COURSE_MINUTES, CORE_MINUTES = 300.0, 90.0
"""Minutes that reading all notebooks may take, and reading the core path."""
CORE_NUMBERS = ("00", "01", "02", "03", "04", "05")
REFERENCE = "14"
"""The notebook in which numbers are looked up: it does not count among those that are read."""
_FOLDED = re.compile(r"<details>.*?</details>", re.DOTALL)


# -- figures and tables ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """One figure or table; the fields are explained at the top of data/figures.yml."""

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
    """Return the entries of data/figures.yml (or ``path``). Raises UserError for a wrong field or id."""
    path, entries = path or places.DATA / "figures.yml", dict[str, Entry]()
    for item in own_yaml(store.files.read_text(path)):
        lists = {
            name: tuple(value)
            for name, value in item.items()
            if isinstance(value, list)
        }
        try:
            entry = Entry(**{**item, **lists})
        except TypeError as error:
            raise UserError(f"{path}, {item.get('id')}: {error}") from error
        if entries.setdefault(entry.id, entry) is not entry:
            raise UserError(f"{path}, {entry.id}: id appears twice: give each its own")
    return tuple(entries.values())


def find_problems(reports: Path, entries: Sequence[Entry]) -> list[str]:
    """Return what is wrong with entries that are done, one line each; empty when all is well."""
    done = [entry for entry in entries if entry.status == "done"]
    lines = [
        f"{entry.id}: {line}" for entry in done for line in _missing(entry, reports)
    ]
    own = sum(entry.id.startswith("wb-") for entry in done)
    return lines + [f"{own} figures of the workbook's own, limit {MOST_OWN}"] * (
        own > MOST_OWN
    )


def _missing(entry: Entry, reports: Path) -> list[str]:
    inputs = [name for name in entry.inputs if not store.list_tables(places.ROOT, name)]
    lines = [f"input {name} matches no file" for name in inputs]
    image, numbers = outputs.figure_files(entry.id, reports)
    if not image.is_file() or not image.read_bytes().startswith(b"\x89PNG\r\n\x1a\n"):
        lines.append(f"image {image} is missing, or not a PNG")
    try:
        frame = pd.read_csv(numbers)
    except (OSError, ValueError) as error:
        return [*lines, f"CSV {numbers} cannot be read: {error}"]
    lines += [f"CSV {numbers} has no row"] * frame.empty
    return lines + [line for line, holds in deviations(entry, frame) if not holds]


def deviations(entry: Entry, frame: pd.DataFrame) -> list[tuple[str, bool]]:
    """Return (sentence, within its limit) for each statistic of the entry's tolerance, from its CSV."""
    sentences = []
    for column, limits in (entry.tolerance or {}).items():
        values = pd.to_numeric(
            frame.get(column, pd.Series([None])), errors="coerce"
        ).abs()
        for statistic, limit in limits.items():
            value = float(values.agg(statistic, skipna=False))
            shown = outputs.format_number(value) or "not finite"
            words = f"{statistic} of |{column}| is {shown}, limit {limit:g}"
            sentences.append((words, value <= limit))
    return sentences


# -- minutes of notebooks -------------------------------------------------------------------------


def count_shown(cells: Sequence[Any]) -> Counter[str]:
    """Count words, figures, tables and printed lines ("sentences") in executed cells, but of exercises.

    What is folded is looked up and not read: it does not count.
    """
    counts: Counter[str] = Counter()
    exercises = False
    for cell in cells:
        text = cell.source if cell.cell_type == "markdown" else ""
        exercises = (exercises or "## Exercises" in text) and not text.startswith(
            "**Next:**"
        )
        if exercises:
            continue
        counts["words"] += len(text.split())
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            page = _FOLDED.sub("", str(data.get("text/html", "")))
            figure, tables = (
                "<figure" in page or "image/png" in data,
                page.count("<table"),
            )
            counts += Counter(figures=int(figure), tables=tables)
            printed = str(output.get("text", "") or data.get("text/markdown", ""))
            if not printed and not figure and not tables:
                printed = re.sub(r"<[^>]*>", "", page)
            counts["words"] += len(printed.split())
            counts["sentences"] += sum(
                bool(line.strip()) for line in printed.splitlines()
            )
    return counts


def find_long(executed: Sequence[Path]) -> list[str]:
    """Return where executed notebooks take longer to read than they may or say, one line each."""
    import nbformat

    minutes_of = {}
    problems = []
    for path in executed:
        number = path.stem[:2]
        cells = nbformat.read(str(path), as_version=4).cells
        counts = count_shown(cells)
        minutes = BEGIN + sum(PACE[kind] * count for kind, count in counts.items())
        minutes_of[number] = minutes
        limit = LONGER.get(number, LIMIT_MINUTES)
        stated = re.search(
            r"^\* \*\*Time:\*\* (\d+) minutes", cells[0].source, re.MULTILINE
        )
        if stated:
            limit = min(limit, int(stated[1]) + 0.5)  # whole minutes are stated
        if minutes > limit:
            problems.append(
                f"{path.stem} takes {minutes:.1f} minutes to read, {limit:g} are allowed"
            )
        outputs_of_cells = [
            output for cell in cells for output in cell.get("outputs", ())
        ]
        if any(output.get("name") == "stderr" for output in outputs_of_cells):
            problems.append(f"{path.stem} prints a warning")
    read = sum(minutes_of[number] for number in minutes_of if number != REFERENCE)
    core = sum(minutes_of[number] for number in minutes_of if number in CORE_NUMBERS)
    for name, minutes, most in (
        ("the course", read, COURSE_MINUTES),
        ("the core path", core, CORE_MINUTES),
    ):
        if minutes > most:
            problems.append(
                f"{name} takes {minutes:.0f} minutes to read, {most:g} are allowed"
            )
    return problems


# -- the command ----------------------------------------------------------------------------------


def document(entries: Sequence[Entry]) -> str:
    """Return reports/FIGURES.md: figure -> notebook -> hardware -> minutes -> grade of truth -> status."""
    lines = []
    for e in entries:
        figure, notebook = e.id, e.notebook
        if e.status == "done":
            figure = f"[{figure}](figures/{figure}.png)"
            notebook = f"[{notebook}](../notebooks/{notebook}.ipynb)"
        cells = (
            figure,
            e.caption,
            notebook,
            e.hardware,
            f"{e.minutes:g}",
            e.grade,
            e.status,
        )
        lines.append(
            "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |\n"
        )
    return _HEAD + "".join(lines)


def command(
    *, check: bool = False, write: bool = False, reports: Path | None = None
) -> int:
    """List, check or write reports/FIGURES.md; return the status, 1 for problems (a line each on stderr)."""
    entries, page = load(), places.REPORTS / "FIGURES.md"
    if write:
        store.atomic_write_text(page, document(entries))
        print(page)
    if not check:
        if not write:
            columns = [
                "id",
                "status",
                "grade",
                "notebook",
                "minutes",
                "hardware",
                "caption",
            ]
            print(
                pd.DataFrame(entries)[columns].to_string(index=False, max_colwidth=40)
            )
        return 0
    problems = find_problems(reports or places.REPORTS, entries)
    if not page.is_file() or page.read_text(encoding="utf-8") != document(entries):
        problems.append(
            "FIGURES.md is not current: run python -m workbook figures --write"
        )
    executed = {
        places.BUILD / "executed" / f"{entry.notebook}.ipynb" for entry in entries
    }
    unknown, missing = "", sum(not path.is_file() for path in executed)
    if missing:
        advice = "run python -m workbook build --recorded"
        unknown = (
            f"; minutes not checked, {missing} notebooks are not executed: {advice}"
        )
    else:
        problems += find_long(sorted(executed))
    for line in problems:
        print(f"python -m workbook figures: {line}", file=sys.stderr)
    done = sum(entry.status == "done" for entry in entries)
    print(f"{len(entries)} entries, {done} done, {len(problems)} problems{unknown}")
    return int(bool(problems))
