"""The one way in which text becomes checked columns, and columns become text.

Which columns each recorded table has is said in schema.json beside this module. There, names of columns
stand under their "kind check"; a table's ``but`` are columns that it has of another kind, ``later`` the
defaults of columns that earlier recordings lack. ``aliases`` are earlier names of columns, ``renamed_values``
earlier values.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import numpy as np

from ddlkit.core.case import Case
from ddlkit.core.errors import UserError
from ddlkit.core.units import LEAST, MOST, MOST_WHOLE

if TYPE_CHECKING:
    from pandas import DataFrame

Kind = Literal["str", "int", "float", "bool", "microseconds"]
Check = Literal["", "named", "positive", "non_negative", "finite"]

MOST_COLUMNS = 1_000
"""Of a table: ours have at most 40, people's own a few more than they need."""
MOST_CELLS = 10_000_000
"""Of a table, by its commas and line breaks: read, about a gigabyte."""

_BOOLS = {"True": True, "False": False, "true": True, "false": False}
_QUOTED = re.compile(r'"[^"\n]*"')


def _whole(cell: str) -> int:
    """Return a whole number, also when written as 1e6 or 4.0."""
    try:
        return int(cell)
    except ValueError:
        number = float(cell)
        if not number.is_integer():
            raise
        return int(number)


def _seconds(cell: str) -> float:
    """Return microseconds as seconds, without a rounding of their own."""
    return float(Decimal(cell).scaleb(-6))


_READ: dict[str, tuple[Callable[[str], Any], Any, str]] = {
    "str": (str, object, "is not text"),
    "int": (_whole, np.int64, "is not a whole number"),
    "float": (float, np.float64, "is not a number"),
    "microseconds": (_seconds, np.float64, "is not a number"),
    "bool": (_BOOLS.__getitem__, np.bool_, "is not True or False"),
}


@dataclass(frozen=True)
class Sheet:
    """Cells of a file as text, each row with its line number in that file."""

    file: str
    header: tuple[str, ...]
    lines: tuple[int, ...]
    rows: tuple[Sequence[str], ...]

    def cells(self, name: str) -> list[str]:
        """Return one column, top to bottom."""
        at = self.header.index(name)
        return [row[at] for row in self.rows]

    def fail(self, row: int | None, column: str, problem: str) -> NoReturn:
        """Raise the UserError that names file, row and column; rows count from 0, None: the header."""
        line = 1 if row is None else self.lines[row]
        raise UserError(f"{self.file}: row at line {line}, column {column}: {problem}")


def read_sheet(text: str, file: str) -> Sheet:
    """Return the cells of CSV text. Raises UserError for no rows, or a row of another length.

    >>> sheet = read_sheet("bytes,seconds\\n8,1e-3\\n", "mine.csv")
    >>> sheet.lines, sheet.rows
    ((2,), (['8', '1e-3'],))
    """
    check_cells(text, ",\n", file)
    lines, rows = [], []
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = tuple(name.strip() for name in next(reader))
        if not any(header) or len(header) > MOST_COLUMNS:
            what = f"{len(header)} columns, more than {MOST_COLUMNS}" if any(header) else "empty"
            raise UserError(f"{file}: line 1, the header: {what}: name the columns that are needed")
        for row in reader:
            if row and len(row) != len(header):
                last = header[min(len(row), len(header) - 1)]
                raise UserError(
                    f"{file}: row at line {reader.line_num}, column {last}: the row has {len(row)} "
                    f"cells, the header {len(header)}: truncated file or stray comma"
                )
            if row:
                lines.append(reader.line_num)
                rows.append(row)
    except csv.Error as error:
        raise UserError(f"{file}: line {reader.line_num} is not CSV ({error})") from error
    if not rows:
        raise UserError(f"{file}: a header but no rows: truncated file, or nothing was measured")
    return Sheet(file, header, tuple(lines), tuple(rows))


def check_cells(text: str, parted_by: str, file: str) -> None:
    """Raise a UserError for a text of more cells than can be read: each ends in one of ``parted_by``."""
    if sum(map(text.count, parted_by)) > MOST_CELLS:
        raise UserError(f"{file}: more than {MOST_CELLS} cells: give a part of its rows")


@dataclass(frozen=True)
class Column:
    """One column: numbers are finite whatever the check; text is printable, if ``named`` not empty.

    default : cell text where a user's own file leaves the column out; None if it may not
    later : tables recorded before there was this column may leave it out too
    aliases : (earlier cell, cell) of values that were renamed since
    """

    name: str
    kind: Kind
    check: Check = ""
    default: str | None = None
    later: bool = False
    aliases: tuple[tuple[str, str], ...] = ()

    def values(self, sheet: Sheet, *, own: bool = False) -> np.ndarray:
        """Return (rows,) checked values. Raises UserError naming file, row and column of a wrong cell.

        own : of somebody's own file, whose numbers must be such as can be computed with, too

        >>> sheet = read_sheet("bytes,seconds\\n8,1e-3\\n16,fast\\n", "mine.csv")
        >>> Column("bytes", "int", "positive").values(sheet).tolist()
        [8, 16]
        >>> Column("seconds", "float").values(sheet)
        Traceback (most recent call last):
        ddlkit.core.errors.UserError: mine.csv: row at line 3, column seconds: 'fast' is not a number
        """
        today = dict(self.aliases)
        cells = [today.get(cell, cell) for cell in sheet.cells(self.name)]
        read, dtype, problem = _READ[self.kind]
        values = np.empty(len(cells), dtype)
        for row, cell in enumerate(cells):
            try:
                values[row] = read(cell)
            except (ArithmeticError, ValueError, KeyError):
                wrong = f"{_shown(cell)} {problem}" if cell.strip() else "is empty"
                sheet.fail(row, self.name, wrong)
        for broken, problem in self.broken(values, own):
            if broken.any():
                row = int(np.argmax(broken))
                sheet.fail(row, self.name, f"{_shown(cells[row])} {problem}")
        return values

    def broken(self, values: np.ndarray, own: bool) -> list[tuple[np.ndarray, str]]:
        """Return (rows,) which values are wrong, and why, one entry per rule."""
        if self.kind == "str":
            strange = np.array([not value.isprintable() for value in values])
            rules = [(strange, "has an unprintable character")]
            if self.check == "named":
                rules.append((values == "", "must not be empty"))
            return rules
        rules = [(~np.isfinite(values), "must be a finite number")]
        if own and self.kind != "bool":
            most = MOST_WHOLE if self.kind == "int" else MOST
            size = np.abs(values)
            rules.append((size > most, f"is beyond {most:g}: nobody means that"))
            rules.append(((size < LEAST) & (size > 0), f"is not 0 but below {LEAST:g}"))
        if self.check == "positive":
            rules.append((values <= 0, "must be above zero"))
        if self.check == "non_negative":
            rules.append((values < 0, "must not be negative"))
        return rules


def _shown(cell: str) -> str:
    return repr(cell if len(cell) <= 40 else cell[:37] + "...")


@dataclass(frozen=True)
class Schema:
    """A kind of table. No two rows agree in all columns of ``key`` (no key: rows may repeat).

    aliases : (earlier name, name) of columns that were renamed since, where the header lacks that name
    """

    name: str
    columns: tuple[Column, ...]
    key: tuple[str, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Return the column names in file order."""
        return tuple(column.name for column in self.columns)

    def read(self, text: str, file: str, *, exact: bool = True) -> DataFrame:
        """Return the checked table of CSV text, ``exact`` and errors as of `frame`.

        pandas reads what has no mistake; where there may be one, `frame` looks at each cell.
        """
        check_cells(text, ",\n", file)
        header = tuple(name.strip() for name in text.partition("\n")[0].split(","))
        frame = self._parsed(text, self._today(header), exact)
        return self.frame(read_sheet(text, file), exact=exact) if frame is None else frame

    def _parsed(self, text: str, header: tuple[str, ...], exact: bool) -> DataFrame | None:
        """Return the table that pandas reads under this header; None where `frame` could say another."""
        import pandas as pd

        kinds = {column.name: column.kind for column in self.columns}
        known = all(name in kinds for name in header) if exact else len(header) <= MOST_COLUMNS
        if not known or len({*header}) < len(header) or "microseconds" in kinds.values():
            return None
        types = {"int": np.int64, "float": np.float64}
        try:
            with np.errstate(invalid="ignore"):
                frame = pd.read_csv(
                    io.StringIO(text),
                    header=0,
                    names=list(header),
                    dtype={name: types.get(kinds.get(name, ""), str) for name in header},
                    na_filter=False,
                    low_memory=False,
                    **({} if pd.__version__ >= "3.1" else {"float_precision": "round_trip"}),
                )
        except (ValueError, OverflowError):  # a row that is too long, or a cell of another kind
            return None
        bare = _QUOTED.sub("", text) if '"' in text else text
        if frame.empty or '"' in bare or bare.count(",") != (len(frame) + 1) * (len(header) - 1):
            return None
        return self._checked(frame, exact)

    def _checked(self, frame: DataFrame, exact: bool) -> DataFrame | None:
        """Return the table with its defaults in the schema's order; None where a rule is broken."""
        for column in self.columns:
            if column.name not in frame:
                if column.default is None or (exact and not column.later):
                    return None
                one = Sheet("", (column.name,), (1,), ((column.default,),))
                frame[column.name] = np.repeat(column.values(one), len(frame))
            elif column.kind in ("str", "bool"):  # of few different cells each
                distinct = frame[column.name].unique().astype(object)
                sheet = Sheet(
                    "", (column.name,), (1,) * len(distinct), tuple((c,) for c in distinct)
                )
                try:
                    today = column.values(sheet)
                except UserError:
                    return None
                if column.kind == "bool" or (today != distinct).any():
                    values = dict(zip(distinct, today, strict=True))
                    frame[column.name] = frame[column.name].map(values)
            elif any(
                bad.any() for bad, _ in column.broken(frame[column.name].to_numpy(), not exact)
            ):
                return None
        frame = frame if (*frame.columns,) == self.names else frame[list(self.names)]
        return None if self.key and frame.duplicated(list(self.key)).any() else frame

    def frame(self, sheet: Sheet, *, exact: bool = True) -> DataFrame:
        """Return the checked table. Not ``exact``, somebody's own: other columns are ignored, defaults
        stand in. For a column that came ``later``, its default stands in for either.

        Raises UserError naming file, row and column of the first mistake.
        """
        from pandas import DataFrame

        sheet = replace(sheet, header=self._today(sheet.header))
        for name, times in Counter(sheet.header).items():
            if times > 1:
                sheet.fail(None, name, "stands twice in the header")
            if exact and name not in self.names:
                sheet.fail(None, name, f"not a column of {self.name}")
        values = {}
        for column in self.columns:
            if column.name in sheet.header:
                values[column.name] = column.values(sheet, own=not exact)
            elif column.default is None or (exact and not column.later):
                found = ", ".join(sheet.header)[:200]
                sheet.fail(None, column.name, f"missing; the columns are {found}")
            else:
                rows = ((column.default,),) * len(sheet.rows)
                filled = Sheet(sheet.file, (column.name,), sheet.lines, rows)
                values[column.name] = column.values(filled)
        frame = DataFrame(values)
        self._check_key(sheet, frame[list(self.key)])
        return frame

    def _today(self, header: tuple[str, ...]) -> tuple[str, ...]:
        """Return today's names of the columns under that header."""
        names = {old: new for old, new in self.aliases if old in header}
        taken = {*header} - {*names}
        return tuple(
            name if names.get(name, name) in taken else names.get(name, name) for name in header
        )

    def _check_key(self, sheet: Sheet, keys: DataFrame) -> None:
        for row in np.flatnonzero(keys.duplicated())[:1] if self.key else ():
            first = sheet.lines[int(np.argmax((keys == keys.iloc[row]).all(axis=1)))]
            same = ", ".join(f"{name} {keys[name][row]}" for name in self.key)
            sheet.fail(row, self.key[-1], f"repeats the row at line {first} ({same})")


def write_sheet(frame: DataFrame, schema: Schema, file: str) -> str:
    """Return CSV text of a table, floats to the last digit, checked by reading it back.

    Raises UserError naming file, row and column of the first mistake.
    """
    known = [name for name in schema.names if name in frame.columns]
    names = known + [str(name) for name in frame.columns if name not in schema.names]
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(names)
    writer.writerows(zip(*(frame[name].tolist() for name in names), strict=True))
    schema.read(out.getvalue(), file)
    return out.getvalue()


# -- the recorded tables -----------------------------------------------------------------------

_CASE = {
    axis.name: Column(
        axis.name,
        axis.type,  # type: ignore[arg-type]
        axis.metadata.get("check", ""),
        default=str(axis.default) if axis.metadata.get("later") else None,
        later=axis.metadata.get("later", False),
    )
    for axis in fields(Case)
}


def _columns(groups: dict[str, str]) -> dict[str, Column]:
    """Return columns by name, from names by "kind check"."""
    columns: dict[str, Column] = {}
    for group, names in groups.items():
        kind, _, check = group.partition(" ")
        columns |= {name: Column(name, kind, check) for name in names.split()}  # type: ignore[arg-type]
    return columns


def _came_later(columns: dict[str, Column], defaults: dict[str, str]) -> dict[str, Column]:
    """Return the columns, of which some have a default for tables that are older than they."""
    later = {
        name: replace(columns[name], default=default, later=True)
        for name, default in defaults.items()
    }
    return columns | later


def _schemas(described: dict[str, Any]) -> dict[str, Schema]:
    known = _came_later(_columns(described["columns"]), described["later"])
    for name, values in described["renamed_values"].items():
        known[name] = replace(known[name], aliases=tuple(values.items()))
    schemas = {}
    for name, table in described["tables"].items():
        case = _CASE if table.get("starts_with_case") else {}
        own = known | _columns(table.get("but", {})) | case
        own = _came_later(own, table.get("later", {}))
        columns = tuple(own[column] for column in (*case, *table["columns"].split()))
        key, names = tuple(table.get("key", "").split()), {column.name for column in columns}
        aliases = [(old, new) for old, new in described["aliases"].items() if new in names]
        schemas[name] = Schema(name, columns, key, tuple(aliases))
    return schemas


SCHEMAS = _schemas(json.loads(Path(__file__).with_name("schema.json").read_text(encoding="utf-8")))


def schema_named(name: str) -> Schema:
    """Return the schema of that name. Raises UserError listing the known ones."""
    if name not in SCHEMAS:
        raise UserError(f"unknown schema {name!r}: use one of {', '.join(SCHEMAS)}")
    return SCHEMAS[name]
