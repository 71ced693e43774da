"""The one way in which text becomes checked columns, and columns become text; errors name file, row, column.

schema.json has the columns of each recorded table, of a "kind check" each, ``but`` those of another kind;
``later`` are defaults of columns that earlier recordings lack, ``aliases`` and ``renamed_values`` old words.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from ddlkit.core.case import Case
from ddlkit.core.errors import UserError, shown
from ddlkit.core.units import LEAST, MOST, MOST_WHOLE

if TYPE_CHECKING:
    from pandas import DataFrame

MOST_COLUMNS = 1_000
"""Of a table: ours have at most 40, people's own a few more than they need."""
MOST_CELLS = 10_000_000
"""Of a table, by its commas and line breaks: read, about a gigabyte."""


def _whole(cell: str) -> int:
    """Return a whole number, also when written as 1e6 or 4.0."""
    number = Decimal(cell)
    if number % 1:
        raise ValueError
    return int(number)


_READ: dict[str, tuple[Callable[[str], Any], Any, str]] = {
    "str": (str, object, "is not text"),
    "int": (_whole, np.int64, "is not a whole number"),
    "float": (float, np.float64, "is not a number"),
    # By decimals: without a rounding of its own.
    "microseconds": (
        lambda cell: float(Decimal(cell).scaleb(-6)),
        np.float64,
        "is not a number",
    ),
    "bool": (
        lambda cell: ("false", "true").index(cell.lower()),
        np.bool_,
        "is not True or False",
    ),
}
_DTYPES = {"str": str, "int": np.int64, "float": np.float64, "bool": np.bool_}
"""What pandas reads a column as, of which it knows the kind."""


@dataclass(frozen=True)
class Sheet:
    """Cells of a file as text, each row with its line number in that file."""

    file: str
    header: tuple[str, ...]
    lines: Sequence[int]
    rows: Sequence[Sequence[str]]

    def fail(self, row: int | None, column: str, problem: str) -> NoReturn:
        """Raise the UserError that names file, row and column; rows count from 0, None: the header."""
        line = 1 if row is None else self.lines[row]
        raise UserError(f"{self.file}: row at line {line}, column {column}: {problem}")


def check_cells(text: str, parted_by: str, file: str) -> None:
    """Refuse a text of more cells, each of which ends in one of ``parted_by``, than can be read."""
    if sum(map(text.count, parted_by)) > MOST_CELLS:
        raise UserError(
            f"{file}: more than {MOST_CELLS} cells: give a part of its rows"
        )


def read_sheet(text: str, file: str) -> Sheet:
    """Return the cells of CSV text, of which there must be some, and as many in each row."""
    check_cells(text, ",\n", file)
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = tuple(name.strip() for name in next(reader))
        numbered = [(reader.line_num, row) for row in reader if row]
    except csv.Error as error:
        raise UserError(
            f"{file}: line {reader.line_num} is not CSV ({error})"
        ) from error
    if not any(header) or len(header) > MOST_COLUMNS:
        problem = (
            f"{len(header)} columns, more than {MOST_COLUMNS}"
            if any(header)
            else "empty"
        )
        raise UserError(
            f"{file}: line 1, the header: {problem}: name the columns that are needed"
        )
    if not numbered:
        raise UserError(
            f"{file}: a header but no rows: truncated file, or nothing was measured"
        )
    sheet = Sheet(file, header, *zip(*numbered, strict=True))
    for at, row in enumerate(sheet.rows):
        if len(row) != len(header):
            problem = f"the row has {len(row)} cells, the header {len(header)}"
            last = header[min(len(row), len(header) - 1)]
            sheet.fail(at, last, f"{problem}: truncated file or stray comma")
    return sheet


@dataclass(frozen=True)
class Column:
    """One column of kind str, int, float, bool or microseconds; check: named, positive, non_negative or none.

    default : cell text where a file leaves the column out; None if it may not
    today : earlier words of cells, and what they are called now
    """

    name: str
    kind: str
    check: str = ""
    default: str | None = None
    today: Mapping[str, str] = field(default_factory=dict)

    def values(self, sheet: Sheet, *, own: bool = False) -> np.ndarray:
        """Return (rows,) checked values; of somebody's ``own`` file such as can be computed with, too."""
        at = sheet.header.index(self.name)
        cells = [row[at] for row in sheet.rows]
        if self.today:
            cells = [self.today.get(cell, cell) for cell in cells]
        read, dtype, problem = _READ[self.kind]
        values, row = np.empty(len(cells), dtype), 0
        try:
            for row, cell in enumerate(cells):
                values[row] = read(cell)
        except (ArithmeticError, ValueError):
            wrong = (
                f"{shown(cells[row])} {problem}" if cells[row].strip() else "is empty"
            )
            sheet.fail(row, self.name, wrong)
        for broken, problem in self.broken(values, own):
            if broken.any():
                row = int(np.argmax(broken))
                sheet.fail(row, self.name, f"{shown(cells[row])} {problem}")
        return values

    def default_value(self) -> Any:
        """Return what a file means that leaves the column out. Raises ValueError where it may not."""
        if self.default is None:
            raise ValueError
        return self.values(Sheet("", (self.name,), (1,), ((self.default,),)))[0]

    def broken(self, values: np.ndarray, own: bool) -> Iterator[tuple[np.ndarray, str]]:
        """Yield (rows,) which values are wrong, and why, one pair per rule."""
        if self.kind == "str":
            printable = np.fromiter(map(str.isprintable, values), bool, len(values))
            yield ~printable, "has an unprintable character"
            if self.check == "named":
                yield values == "", "must not be empty"
            return
        if values.dtype == np.float64:
            yield ~np.isfinite(values), "must be a finite number"
        if own and self.kind != "bool":
            most = MOST_WHOLE if self.kind == "int" else MOST
            size = np.abs(values)
            yield size > most, f"is beyond {most:g}: nobody means that"
            yield (size < LEAST) & (size > 0), f"is not 0 but below {LEAST:g}"
        if self.check == "positive":
            yield values <= 0, "must be above zero"
        if self.check == "non_negative":
            yield values < 0, "must not be negative"


@dataclass(frozen=True)
class Schema:
    """A kind of table, of whose rows no two agree in all of ``key``, if any; aliases: (old name, name)."""

    name: str
    columns: tuple[Column, ...]
    key: tuple[str, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Return the column names in file order."""
        return tuple(column.name for column in self.columns)

    def read(self, text: str, file: str, *, exact: bool = True) -> DataFrame:
        """Return the checked table of CSV text: pandas', or where that may have a mistake that of `frame`."""
        check_cells(text, ",\n", file)
        try:
            return self._parsed(text, own=not exact)
        except (KeyError, ValueError, OverflowError):
            return self.frame(read_sheet(text, file), exact=exact)

    def _parsed(self, text: str, own: bool) -> DataFrame:
        """Return the table that pandas reads. Raises an error without a word where something may be wrong."""
        import pandas as pd

        header = self._today(
            tuple(name.strip() for name in text.partition("\n")[0].split(","))
        )
        dtypes = {column.name: _DTYPES[column.kind] for column in self.columns}
        dtype: Any = {name: dtypes[name] for name in header}
        precise: Any = (
            {} if pd.__version__ >= "3.1" else {"float_precision": "round_trip"}
        )
        how = {
            "header": 0,
            "names": [*header],
            "na_filter": False,
            "low_memory": False,
            **precise,
        }
        with np.errstate(invalid="ignore"):
            frame = pd.read_csv(io.StringIO(text), dtype=dtype, **how)
        bare = re.sub(r'"[^"\n]*"', "", text) if '"' in text else text
        if (
            frame.empty
            or '"' in bare
            or bare.count(",") != (len(frame) + 1) * (len(header) - 1)
        ):
            raise ValueError
        for column in self.columns:
            if column.name not in header:
                frame[column.name] = column.default_value()
            elif column.today:
                frame[column.name] = frame[column.name].replace(column.today)
            values = (
                frame[column.name].unique()
                if column.kind == "str"
                else frame[column.name]
            )
            if any(
                broken.any() for broken, _ in column.broken(np.asarray(values), own)
            ):
                raise ValueError
        if self.key and frame.duplicated([*self.key]).any():
            raise ValueError
        return frame if (*frame.columns,) == self.names else frame[[*self.names]]

    def frame(self, sheet: Sheet, *, exact: bool = True) -> DataFrame:
        """Return the checked table. Not ``exact``, somebody's own: other columns are ignored."""
        from pandas import DataFrame

        sheet = replace(sheet, header=self._today(sheet.header))
        for at, name in enumerate(sheet.header):
            if name in sheet.header[:at]:
                sheet.fail(None, name, "stands twice in the header")
            if exact and name not in self.names:
                sheet.fail(None, name, f"not a column of {self.name}")
        values = {}
        for column in self.columns:
            if column.name in sheet.header:
                values[column.name] = column.values(sheet, own=not exact)
            elif column.default is None:
                there = ", ".join(sheet.header)[:200]
                sheet.fail(None, column.name, f"missing; the columns are {there}")
            else:
                values[column.name] = column.default_value()
        frame = DataFrame(values, range(len(sheet.rows)))
        keys = frame[[*self.key]]
        for row in np.flatnonzero(keys.duplicated())[:1] if self.key else ():
            same = ", ".join(f"{name} {keys[name][row]}" for name in self.key)
            sheet.fail(row, self.key[-1], f"there is an earlier row of {same}")
        return frame

    def _today(self, header: tuple[str, ...]) -> tuple[str, ...]:
        """Return today's names of the columns under that header."""
        names = {old: new for old, new in self.aliases if old in header}
        taken = {*header} - {*names}
        return tuple(
            name if names.get(name) in {None, *taken} else names[name]
            for name in header
        )


def write_sheet(frame: DataFrame, schema: Schema, file: str) -> str:
    """Return CSV text of a table, floats to the last digit, checked by reading it back."""
    names = [name for name in schema.names if name in frame.columns]
    names += [name for name in frame.columns if name not in names]
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(names)
    writer.writerows(zip(*(frame[name].tolist() for name in names), strict=True))
    schema.read(out.getvalue(), file)
    return out.getvalue()


def _schema(name: str, table: dict[str, Any], shared: dict[str, Any]) -> Schema:
    """Return the schema of one table as schema.json describes it, with what it shares with others."""
    groups = [*shared["columns"].items(), *table.get("but", {}).items()]
    kinds = {
        name: kind.partition(" ") for kind, names in groups for name in names.split()
    }
    defaults = shared["later"] | table.get("later", {})
    columns = []
    for axis in fields(Case) if table.get("starts_with_case") else ():
        default = str(axis.default) if axis.metadata.get("later") else None
        columns.append(
            Column(axis.name, str(axis.type), axis.metadata.get("check", ""), default)
        )
    for column in table["columns"].split():
        kind, _, check = kinds[column]
        today = shared["renamed_values"].get(column, {})
        columns.append(Column(column, kind, check, defaults.get(column), today))
    names = {column.name for column in columns}
    aliases = tuple(
        (old, new) for old, new in shared["aliases"].items() if new in names
    )
    return Schema(name, tuple(columns), tuple(table.get("key", "").split()), aliases)


_DESCRIBED = json.loads(
    Path(__file__).with_name("schema.json").read_text(encoding="utf-8")
)
SCHEMAS = {
    name: _schema(name, table, _DESCRIBED)
    for name, table in _DESCRIBED["tables"].items()
}


def schema_named(name: str) -> Schema:
    """Return the schema of that name; a UserError lists all."""
    if name not in SCHEMAS:
        raise UserError(f"unknown schema {name!r}: use one of {', '.join(SCHEMAS)}")
    return SCHEMAS[name]
