"""REPRODUCTION.md: what came out, from the figures' numbers, the verdicts and the summaries."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from ddlkit import store
from ddlkit.report import catalog, outputs, verdicts

_HEAD = """\
# What came out

Written by `ddlkit book` from the files beside it: the numbers in `figures/*.csv`, the key numbers in
`summaries/*.json` and the claims in `data/papers`. From the same recordings it comes out the same to
the last digit; it carries no date and no duration for that reason.
"""


def write(reports: Path, entries: Sequence[catalog.Entry] | None = None) -> Path:
    """Write ``<reports>/REPRODUCTION.md``; returns its path."""
    path = reports / "REPRODUCTION.md"
    store.atomic_write_text(path, document(reports, entries))
    return path


def document(reports: Path, entries: Sequence[catalog.Entry] | None = None) -> str:
    """The text: key numbers by notebook, figures that are there, verdicts."""
    entries = catalog.load() if entries is None else entries
    parts = [_HEAD, "## Key numbers\n"]
    parts += [_numbers(name, values) for name, values in outputs.read_summaries(reports).items()]
    parts.append("## Figures and tables\n")
    parts += [_figure(entry, reports) for entry in entries if outputs.is_made(entry.id, reports)]
    evaluated = verdicts.evaluate()
    told = ", ".join(f"{count} {name}" for name, count in verdicts.counts(evaluated).items())
    parts.append(f"## Verdicts\n\nOf {len(evaluated)} claims: {told}.\n")
    parts.append(verdicts.markdown(evaluated))
    return "\n".join(parts)


def _numbers(name: str, values: dict[str, outputs.Number]) -> str:
    rows = "".join(f"| {key} | {outputs.format_number(value)} |\n" for key, value in values.items())
    return f"### {name}\n\n| quantity | value |\n|---|--:|\n{rows}"


def _figure(entry: catalog.Entry, reports: Path) -> str:
    numbers = pd.read_csv(outputs.figure_path(entry.id, ".csv", reports))
    made = f"{entry.caption} Grade of truth: {entry.grade}. [Numbers](figures/{entry.id}.csv)."
    limits = [
        f"{line}{'' if ok else ' (broken)'}" for line, ok in catalog.deviations(entry, numbers)
    ]
    checked = f"Tolerance: {'; '.join(limits)}.\n" if limits else ""
    return f"### {entry.id}\n\n![{entry.id}](figures/{entry.id}.png)\n\n{made}\n{checked}"
