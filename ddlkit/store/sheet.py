"""Tables with checked columns: from text to a data frame, and back.

All tables are read here, in one way, whether recorded or a user's own. A `Schema` says
which columns a table has, and a `Column` which values are allowed. A mistake raises a
``UserError`` that names the file, the row and the column.

The schemas of recorded tables stand in ``schema.json``. In that file,

* "columns" lists the column names by their kind and check, such as "int positive";
* "but", in a table, lists the columns that have another kind there;
* "later" has the values of columns that earlier recordings lack;
* "aliases" and "renamed_values" have earlier names of columns and values.
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
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from ddlkit.core.case import Case
from ddlkit.core.errors import UserError, shown
from ddlkit.core.units import LEAST, MOST, MOST_WHOLE

if TYPE_CHECKING:
    from pandas import DataFrame

MOST_COLUMNS = 1_000
"""Columns of a table. Recorded tables have at most 40, users' own a few more."""

_PART = "part"
"""The column of a pack of recorded tables, which names the table of each row."""
MOST_COLUMNS_NAMED = 12
"""How many columns of a file an error names."""
MOST_OF_A_NAME = 40
"""How many characters of a column's name an error has."""
_BEGIN_OF_JSON = re.compile(r'\s*(\{\s*"|\[\s*[\[{])')
"""How a document of JSON begins. No line of column names begins in this way."""

MOST_CELLS = 10_000_000
"""Cells of a table, by its commas and line breaks. Reading them takes about 1 GB."""


class _Kind(NamedTuple):
    """How the cells of one kind of column are read.

    Attributes
    ----------
    parse : callable
        Returns the value of a cell, or raises ArithmeticError or ValueError.
    dtype : dtype
        The type of the array of all values.
    problem : str
        What an error says about a cell that ``parse`` refuses.
    """

    parse: Callable[[str], Any]
    dtype: Any
    problem: str


def _whole(cell: str) -> int:
    """Return a whole number, which may be written as 1e6 or 4.0.

    Raises OverflowError for a number beyond 64 bits.
    """
    number = Decimal(cell)
    # Without this, a number of many digits would fail in the next line, as if it were not whole.
    if number.is_finite() and abs(number) >= 2**63:
        raise OverflowError
    if number % 1:
        raise ValueError
    return int(number)


def _seconds_of_microseconds(cell: str) -> float:
    # Decimals are shifted without rounding, so that a time is read to the last bit.
    return float(Decimal(cell).scaleb(-6))


def _truth(cell: str) -> bool:
    """Return whether a cell is "true". Raise ValueError unless it is that or "false"."""
    return ("false", "true").index(cell.lower()) == 1


_KINDS = {
    "str": _Kind(str, object, "is not text"),
    "int": _Kind(_whole, np.int64, "is not a whole number"),
    "float": _Kind(float, np.float64, "is not a number"),
    "microseconds": _Kind(_seconds_of_microseconds, np.float64, "is not a number"),
    "bool": _Kind(_truth, np.bool_, "is not True or False"),
}
# The type as which pandas reads each kind of column. It has none for microseconds that
# are to become seconds.
_PANDAS_DTYPES = {"str": str, "int": np.int64, "float": np.float64, "bool": np.bool_}


@dataclass(frozen=True)
class Sheet:
    """The cells of a file as text.

    Attributes
    ----------
    file : str
        The file, as errors name it.
    header : tuple of str
        The names of the columns.
    lines : sequence of int
        The line number of each row in the file.
    rows : sequence of sequence of str
        The cells of each row.
    """

    file: str
    header: tuple[str, ...]
    lines: Sequence[int]
    rows: Sequence[Sequence[str]]

    def fail(self, row: int | None, column: str, problem: str) -> NoReturn:
        """Raise the error that names file, row and column of a problem.

        Parameters
        ----------
        row : int or None
            The row, counted from 0. None for the header.
        column : str
            The name of the column.
        problem : str
            What is wrong there.

        Raises
        ------
        UserError
            Always.
        """
        place = "header" if row is None else f"row at line {self.lines[row]}"
        raise UserError(f"{self.file}: {place}, column {column}: {problem}")


def check_cells(text: str, separators: str, file: str) -> None:
    """Refuse a text of more cells than can be read.

    Parameters
    ----------
    text : str
        The content of a file.
    separators : str
        The characters that end cells, one after the other, such as a comma and a
        newline.
    file : str
        The file, as errors name it.

    Raises
    ------
    UserError
        If there are more than `MOST_CELLS` cells.
    """
    # Each cell ends with a separator, except perhaps the last one of the text.
    if sum(map(text.count, separators)) > MOST_CELLS:
        raise UserError(
            f"{file}: more than {MOST_CELLS} fields: give a part of its rows"
        )


def columns_in_words(header: Sequence[str]) -> str:
    """Return the names of a table's columns in words, or only the first of many.

    Parameters
    ----------
    header : sequence of str
        The names of all columns.

    Returns
    -------
    str
        The first names, separated by commas, and how many more there are. The end of a long
        name is replaced by "…".

    Examples
    --------
    >>> columns_in_words(["bytes", "rate"])
    'bytes, rate'
    """
    # The first names show what kind of table a file is.
    shortened = [
        name if len(name) <= MOST_OF_A_NAME else f"{name[:MOST_OF_A_NAME]}…"
        for name in header[:MOST_COLUMNS_NAMED]
    ]
    first = ", ".join(shortened)
    n_more = len(header) - MOST_COLUMNS_NAMED
    return f"{first} and {n_more} more" if n_more > 0 else first


def is_json(text: str) -> bool:
    """Return whether a text begins as a document of JSON does, and no table."""
    return _BEGIN_OF_JSON.match(text) is not None


def read_sheet(
    text: str,
    file: str,
    header: Sequence[str] = (),
    likely_cause: str = "a comma is missing or stray",
) -> Sheet:
    r"""Return the cells of CSV text.

    Parameters
    ----------
    text : str
        The content of a file: a header, and at least one row. Empty lines are skipped.
    file : str
        The file, as errors name it.
    header : sequence of str, optional
        The names of the columns of a text that has no header, but rows alone. By default
        the first line is the header.
    likely_cause : str, optional
        What the error for a row with too few or too many fields names as the likely cause,
        if the commas of the text stand for other separators in the file.

    Returns
    -------
    Sheet
        The cells, as many in each row as in the header.

    Raises
    ------
    UserError
        If the text is not such a table, or larger than can be read.

    Examples
    --------
    >>> sheet = read_sheet("bytes, seconds\n1024,2e-5\n\n4096,3e-5\n", "my.csv")
    >>> sheet.header, sheet.lines, sheet.rows[1]
    (('bytes', 'seconds'), (2, 4), ['4096', '3e-5'])
    """
    has_header = not header
    needed = "a CSV table with a header line" if has_header else "a CSV table"
    if is_json(text):
        raise UserError(f"{file}: is JSON, but {needed} is needed here")
    # Commas and line breaks end cells, so their number tells whether a text has too many
    # cells to be read.
    check_cells(text, separators=",\n", file=file)
    # `newline=""` keeps line breaks as they are, and `strict` refuses wrong quotes.
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        if has_header:
            # There is a first line, because an empty file is refused before it is read here.
            header = [name.strip() for name in next(reader)]
        # Each row comes with the number of its line in the file, for error messages. An
        # empty line is an empty row.
        numbered = [(reader.line_num, row) for row in reader if row]
    except csv.Error as error:
        raise UserError(
            f"{file}: line {reader.line_num} is not CSV ({error}): {needed} is needed here"
        ) from error
    _refuse_wrong_header(header, file)
    if not numbered:
        problem = (
            "has a header line but no rows below it" if has_header else "has no rows"
        )
        raise UserError(
            f"{file}: {problem}: the file is truncated, or nothing was measured"
        )
    lines, rows = zip(*numbered, strict=True)
    sheet = Sheet(file=file, header=tuple(header), lines=lines, rows=rows)
    _refuse_ragged(sheet, has_header=has_header, likely_cause=likely_cause)
    return sheet


def _refuse_wrong_header(header: Sequence[str], file: str) -> None:
    """Raise UserError if a header has no names, or more than `MOST_COLUMNS`."""
    problem = ""
    if not any(header):
        problem = "empty"
    elif len(header) > MOST_COLUMNS:
        problem = f"{len(header)} columns, more than {MOST_COLUMNS}"
    if problem:
        raise UserError(
            f"{file}: line 1, the header: {problem}: "
            "write a line with the names of the columns that are needed"
        )


def _refuse_ragged(sheet: Sheet, *, has_header: bool, likely_cause: str) -> None:
    """Raise UserError for the first row that has not as many fields as the header.

    ``has_header`` is whether the header stands in the file. The error names the
    ``likely_cause``.
    """
    n_columns = len(sheet.header)
    expected = f"but the header has {n_columns}"
    if not has_header:
        expected = f"expected {n_columns} ({', '.join(sheet.header)})"
    for row_number, row in enumerate(sheet.rows):
        if len(row) != n_columns:
            # Any field of the row may be the one that is missing or too many, so the error
            # names no column.
            noun = "field" if len(row) == 1 else "fields"
            raise UserError(
                f"{sheet.file}: row at line {sheet.lines[row_number]}: has {len(row)} "
                f"{noun}, {expected}: the file is truncated, or {likely_cause}: correct "
                "the row"
            )


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Attributes
    ----------
    name : str
        The name in the header.
    kind : str
        "str", "int", "float", "bool", or "microseconds", which are read as seconds.
    check : str
        What is required of the values beyond their kind: "named" (not empty),
        "positive" or "non_negative". Anything else requires nothing.
    default : str or None
        The text of the cells if a file lacks the column. None if a file must not lack
        it.
    renamed_values : mapping of str to str
        The texts of cells in earlier recordings that have another text now, each with
        its present text.
    """

    name: str
    kind: str
    check: str = ""
    default: str | None = None
    renamed_values: Mapping[str, str] = field(default_factory=dict)

    def values(self, sheet: Sheet, *, is_users_own: bool = False) -> np.ndarray:
        """Return the checked values of the column in a sheet that has it.

        Parameters
        ----------
        sheet : Sheet
            The cells of a file.
        is_users_own : bool, optional
            Whether the file is a user's own, in which numbers that are implausibly large
            or small are refused, too.

        Returns
        -------
        ndarray, shape (rows,)
            The values.

        Raises
        ------
        UserError
            For the first cell that cannot be read, else for the first wrong value.
        """
        position = sheet.header.index(self.name)
        cells = [row[position] for row in sheet.rows]
        if self.renamed_values:
            cells = [self.renamed_values.get(cell, cell) for cell in cells]
        values = self._parsed(cells, sheet)
        # For each rule, which of the values break it.
        for is_wrong, rule in self.broken_rules(values, is_users_own=is_users_own):
            if is_wrong.any():
                # argmax returns the first True.
                row = int(np.argmax(is_wrong))
                sheet.fail(row, self.name, f"is {shown(cells[row])}; it {rule}")
        return values

    def _parsed(self, cells: Sequence[str], sheet: Sheet) -> np.ndarray:
        """Return the values in the cells of the column, of shape (rows,).

        Raises UserError, which names the line in ``sheet``, for the first cell that cannot
        be read.
        """
        # How cells of this kind, such as "int", are read.
        kind = _KINDS[self.kind]
        parse = kind.parse
        values = np.empty(len(cells), kind.dtype)
        for row, cell in enumerate(cells):
            try:
                values[row] = parse(cell)
            except OverflowError:
                problem = f"{shown(cell)} is too large: write at most {MOST_WHOLE:g}"
                sheet.fail(row, self.name, problem)
            except (ArithmeticError, ValueError):
                # Decimal raises an ArithmeticError for a cell that is no number. Other types
                # raise ValueError.
                if cell.strip():
                    problem = f"{shown(cell)} {kind.problem}"
                else:
                    problem = f"is empty: {self._advice_if_empty()}"
                sheet.fail(row, self.name, problem)
        return values

    def _advice_if_empty(self) -> str:
        """Return what to do about an empty cell of the column, in words."""
        # A file may only lack columns that have a default.
        if self.default is None:
            return "write its value"
        # A default other than 0 may be a placeholder, which the user should not write. For
        # example, the 1 in the column "parameters" of a user's layer profile is replaced by
        # a number that follows from the bytes of the gradient.
        value = "0" if self.default == "0" else "its value"
        return f"write {value}, or leave the whole column out"

    def default_value(self) -> Any:
        """Return the value of every row if a file lacks the column.

        Returns
        -------
        object
            The default, read as a cell is.

        Raises
        ------
        ValueError
            If a file must not lack the column.
        """
        # The error needs no message: `Schema.read` catches it and lets `Schema.frame` say
        # which column is missing.
        if self.default is None:
            raise ValueError
        # The default is read as the only cell of a table of one row.
        sheet = Sheet(file="", header=(self.name,), lines=(1,), rows=((self.default,),))
        return self.values(sheet)[0]

    def broken_rules(
        self, values: np.ndarray, *, is_users_own: bool
    ) -> Iterator[tuple[np.ndarray, str]]:
        """Yield, for one rule after the other, which values break it.

        Parameters
        ----------
        values : ndarray, shape (rows,)
            Values of the column.
        is_users_own : bool
            Whether they are from a user's own file, to which more rules apply.

        Yields
        ------
        is_wrong : ndarray of bool, shape (rows,)
            Which values break the rule.
        rule : str
            What a value must be, in words that follow "it", such as "must be above zero".
        """
        if self.kind == "str":
            is_printable = np.array([text.isprintable() for text in values], bool)
            yield ~is_printable, "must not have characters that cannot be printed"
            if self.check == "named":
                yield values == "", "must not be empty"
            return
        if values.dtype == np.float64:
            yield ~np.isfinite(values), "must be a finite number"
        if is_users_own and self.kind != "bool":
            yield from self._rules_of_magnitude(values)
        if self.check == "positive":
            yield values <= 0, "must be above zero"
        if self.check == "non_negative":
            yield values < 0, "must not be negative"

    def _rules_of_magnitude(
        self, values: np.ndarray
    ) -> Iterator[tuple[np.ndarray, str]]:
        """Yield which values are implausibly large, and which are implausibly small.

        Products of such numbers would later overflow, or become 0. Each item is a pair as
        `broken_rules` yields it: which of the values break a rule, and the rule in words.
        """
        most = MOST_WHOLE if self.kind == "int" else MOST
        magnitude = np.abs(values)
        yield magnitude > most, f"must be at most {most:g}"
        is_tiny = (magnitude < LEAST) & (magnitude > 0)
        # Columns of positive values are the only ones that refuse 0.
        if self.check == "positive":
            yield is_tiny, f"must be at least {LEAST:g}"
        else:
            yield is_tiny, f"must be 0 or at least {LEAST:g}"


@dataclass(frozen=True)
class Schema:
    """A kind of table.

    Attributes
    ----------
    name : str
        What tables of this kind are called.
    columns : tuple of Column
        The columns, in the order of a file.
    key : tuple of str
        Columns that distinguish the rows: no two rows agree in all of them. Empty if
        rows may agree.
    aliases : tuple of pairs of str
        Earlier names of columns, each with the present name.
    """

    name: str
    columns: tuple[Column, ...]
    key: tuple[str, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of the columns, in the order of a file."""
        return tuple(column.name for column in self.columns)

    def read(self, text: str, file: str, *, exact: bool = True) -> DataFrame:
        """Return the checked table in CSV text.

        Parameters
        ----------
        text : str
            The content of a file.
        file : str
            The file, as errors name it.
        exact : bool, optional
            Whether the file is a recorded table, which must have no other columns. If
            not, it is a user's own file: other columns are ignored, and numbers that are
            implausibly large or small are refused.

        Returns
        -------
        DataFrame
            The columns of the schema.

        Raises
        ------
        UserError
            For the first mistake that is found, or if there are more than `MOST_CELLS` cells.

        Notes
        -----
        Pandas reads much faster than `frame`, but accepts many wrong files and does not
        tell the line of a mistake. Its table is returned only if the text is certainly
        right. Otherwise `frame` reads the text, and says what is wrong if something is.
        """
        # Commas and line breaks end cells, so their number tells whether a text has too
        # many cells to be read.
        check_cells(text, separators=",\n", file=file)
        try:
            return self._read_by_pandas(text, is_users_own=not exact)
        # Any of these says that the text is not certainly right.
        except (KeyError, ValueError, OverflowError):
            return self.frame(read_sheet(text, file), exact=exact)

    def _read_by_pandas(self, text: str, *, is_users_own: bool) -> DataFrame:
        """Return the table in CSV text, read by pandas, which is faster than `frame`.

        With ``is_users_own``, numbers that are implausibly large or small are refused, too.

        Raises KeyError, ValueError or OverflowError unless the text is certainly right. The
        caller then reads the text again with `frame`, whose errors are written for users.
        """
        import pandas as pd

        # A name within quotes keeps its quotes here, and so is no column of the schema.
        first_line, _, _ = text.partition("\n")
        names_in_file = tuple(name.strip() for name in first_line.split(","))
        header = self._current_names(names_in_file)
        # This raises KeyError for a name that is no column of the schema. So `frame` reads
        # all files with further columns.
        dtypes = self._pandas_dtypes(header)
        frame = _parsed_by_pandas(text, header, dtypes)
        # If the first row is longer than the header, pandas uses the first cells of all
        # rows as labels.
        has_labels = not isinstance(frame.index, pd.RangeIndex)
        # No text without rows is right.
        if has_labels or frame.empty:
            raise ValueError
        if not _has_whole_rows(text, len(frame), len(header)):
            raise ValueError
        for column in self.columns:
            if column.name not in header:
                # Without a default this raises ValueError.
                frame[column.name] = column.default_value()
            elif column.renamed_values:
                frame[column.name] = frame[column.name].replace(column.renamed_values)
            self._refuse_broken(column, frame[column.name], is_users_own=is_users_own)
        # No two rows may agree in all columns of the key.
        if self.key and frame.duplicated(list(self.key)).any():
            raise ValueError
        # Most files have the columns in the order of the schema, and need no copy.
        if tuple(frame.columns) == self.names:
            return frame
        return frame[list(self.names)]

    def _pandas_dtypes(self, header: Sequence[str]) -> dict[str, Any]:
        """Return the type in which pandas reads each column of a header, by its name.

        Raises KeyError if the schema has a column of a kind that pandas does not read, or if
        the header has a column that the schema does not have.
        """
        dtypes = {column.name: _PANDAS_DTYPES[column.kind] for column in self.columns}
        return {name: dtypes[name] for name in header}

    @staticmethod
    def _refuse_broken(column: Column, values: Any, *, is_users_own: bool) -> None:
        """Raise ValueError if a value breaks a rule of the column.

        ``values`` is a pandas Series. ``is_users_own`` says whether the values are from a
        user's own file, to which more rules apply.
        """
        # Recorded tables repeat each text many times, so only distinct ones are checked.
        checked = values.unique() if column.kind == "str" else values
        rules = column.broken_rules(np.asarray(checked), is_users_own=is_users_own)
        for is_wrong, _rule_in_words in rules:
            if is_wrong.any():
                # The error needs no message: `Schema.read` catches it and lets
                # `Schema.frame` say which value is wrong.
                raise ValueError

    def frame(self, sheet: Sheet, *, exact: bool = True) -> DataFrame:
        """Return the checked table in the cells of a file.

        Parameters
        ----------
        sheet : Sheet
            The cells.
        exact : bool, optional
            Whether the file is a recorded table, which must have no other columns than
            the schema. If not, it is a user's own file: other columns are ignored, and
            numbers that are implausibly large or small are refused.

        Returns
        -------
        DataFrame
            The columns of the schema.

        Raises
        ------
        UserError
            For the first mistake: in the header, else in the columns one after the
            other, else for the first row whose key an earlier row has.
        """
        from pandas import DataFrame

        # Earlier names of columns are replaced by the present ones.
        sheet = replace(sheet, header=self._current_names(sheet.header))
        self._refuse_wrong_names(sheet, exact=exact)
        self._refuse_other_kind(sheet)
        values = {}
        # A column that the file lacks gets its default, or is a mistake without a default.
        for column in self.columns:
            if column.name in sheet.header:
                values[column.name] = column.values(sheet, is_users_own=not exact)
            elif column.default is not None:
                values[column.name] = column.default_value()
            else:
                advice = advice_on_missing_column(column.name, sheet.header)
                raise UserError(
                    f"{sheet.file}: has no column {column.name}, which "
                    f"{kind_in_words(self.name)} needs: {advice}"
                )
        # The index repeats a default, which is a single value, in every row.
        frame = DataFrame(values, index=range(len(sheet.rows)))
        if self.key:
            self._refuse_duplicate(sheet, frame)
        return frame

    def _refuse_wrong_names(self, sheet: Sheet, *, exact: bool) -> None:
        """Raise UserError for the first name in a header that must not be there.

        That is a name that stands there twice or, if ``exact``, one that the schema does not
        have.
        """
        for position, name in enumerate(sheet.header):
            if name in sheet.header[:position]:
                sheet.fail(row=None, column=name, problem="stands twice in the header")
            if exact and name not in self.names:
                problem = f"not a column of {self.name}"
                sheet.fail(row=None, column=name, problem=problem)

    def _refuse_other_kind(self, sheet: Sheet) -> None:
        """Raise UserError for a sheet that lacks more than half of the needed columns.

        Such a file is probably a table of another kind. A column without a default is
        needed.
        """
        needed = [column.name for column in self.columns if column.default is None]
        missing = [name for name in needed if name not in sheet.header]
        if 2 * len(missing) > len(needed):
            _refuse_other_separator(sheet, needed)
            listed = columns_in_words(sheet.header)
            noun = "column" if len(missing) == 1 else "columns"
            raise UserError(
                f"{sheet.file}: is not {kind_in_words(self.name)}: it lacks the {noun} "
                f"{', '.join(missing)} (its columns are {listed})"
            )

    def _refuse_duplicate(self, sheet: Sheet, frame: DataFrame) -> None:
        """Raise UserError for the first row whose key an earlier row has.

        ``frame`` has the values of ``sheet``, in which the error names the row.
        """
        keys = frame[list(self.key)]
        is_duplicate = keys.duplicated().to_numpy()
        if is_duplicate.any():
            # argmax returns the first True.
            row = int(np.argmax(is_duplicate))
            key_in_words = ", ".join(f"{name} {keys[name][row]}" for name in self.key)
            remedy = "remove one of the two rows"
            # A pack has this column, which says of which table each row is.
            if _PART in sheet.header:
                remedy = (
                    f"this is a pack of several recorded tables: keep the rows of one {_PART}, "
                    "or give the path of one table in the pack as it was recorded"
                )
            # The error has to name one column, but its text has the whole key.
            sheet.fail(
                row,
                self.key[-1],
                f"there is an earlier row of {key_in_words}: {remedy}",
            )

    def _current_names(self, header: tuple[str, ...]) -> tuple[str, ...]:
        """Return a header in which earlier names of columns are replaced by present ones.

        An earlier name stays if the header has the present name as well, because it then
        names another column. For example, "in_flight" was the earlier name of
        "messages_per_sample", and is now the name of another column.
        """
        # The present name for each earlier name.
        current_names = dict(self.aliases)
        # The names in the header that are not earlier names of any column.
        already_current = {name for name in header if name not in current_names}
        renamed = []
        for name in header:
            current_name = current_names.get(name, name)
            # The name itself is current, or another column has its present name.
            if current_name in already_current:
                renamed.append(name)
            else:
                renamed.append(current_name)
        return tuple(renamed)


_OTHER_UNITS = {
    "bytes": ("kb", "mb", "gb", "kib", "mib", "gib", "bits"),
    "s": ("ms", "us", "ns", "min"),
    "seconds": ("ms", "us", "ns", "milliseconds", "microseconds", "nanoseconds"),
}
"""The units that end the names of columns, each with others in which users may write."""


def advice_on_missing_column(name: str, header: Sequence[str]) -> str:
    """Return what to do about a column that a file lacks.

    Parameters
    ----------
    name : str
        The name of the column.
    header : sequence of str
        The names of the columns that the file has.

    Returns
    -------
    str
        The advice: to convert a column of the same quantity in another unit, or otherwise
        to add the column.

    Examples
    --------
    >>> advice_on_missing_column("backward_s", ["tensor", "backward_ms"])
    'convert the column backward_ms to seconds, and rename it backward_s'
    """
    # The name "backward_s" is that of the quantity "backward" in the unit "s". A name
    # such as "seconds" is a unit alone, and has an empty quantity and separator.
    quantity, separator, unit = name.rpartition("_")
    for other_unit in _OTHER_UNITS.get(unit, ()):
        for present in header:
            if present.lower() == f"{quantity}{separator}{other_unit}":
                unit_in_words = "seconds" if unit == "s" else unit
                return (
                    f"convert the column {present} to {unit_in_words}, and rename it "
                    f"{name}"
                )
    listed = columns_in_words(header)
    return (
        f"add it, or rename the column that has its values (the columns of the file are "
        f"{listed})"
    )


_KINDS_IN_WORDS = {
    "collectives": "a table of message times",
    "copies": "a table of copy times",
    "inputs": "a table of input times",
    "layers": "a layer profile",
    "selection": "a table of selection times",
    "slowdown": "a table of slowdowns",
    "timeline": "a recorded timeline",
}
"""The kinds of tables that options of commands take, in words."""


def _refuse_other_separator(sheet: Sheet, needed: Sequence[str]) -> None:
    """Raise UserError for a sheet whose columns are separated by semicolons or tabs.

    Its header is then a single cell, which names columns that are ``needed``.
    """
    if len(sheet.header) > 1:
        return
    for separator, in_words in ((";", "semicolons"), ("\t", "tabs")):
        names = [name.strip() for name in sheet.header[0].split(separator)]
        if len(names) > 1 and set(names) & set(needed):
            raise UserError(
                f"{sheet.file}: its columns are separated by {in_words}: separate them by commas"
            )


def kind_in_words(kind: str) -> str:
    """Return what a kind of table is called in messages.

    Parameters
    ----------
    kind : str
        The name of a schema, such as "layers". Schemas of files that other programs write
        may have a phrase with an article as their name, such as "a layer-wise trace".

    Returns
    -------
    str
        A phrase such as "a layer profile".
    """
    # A name that begins with an article is a phrase already.
    if kind.startswith(("a ", "the ")):
        return kind
    return _KINDS_IN_WORDS.get(kind, f"a table of {kind}")


def _parsed_by_pandas(
    text: str, header: Sequence[str], dtypes: Mapping[str, Any]
) -> DataFrame:
    """Return CSV text as pandas reads it, with the names of ``header`` for columns.

    ``dtypes`` has the type of each column by its name.
    """
    import pandas as pd

    # Before version 3.1, pandas by default reads some floats with an error in the last
    # digit.
    options: dict[str, Any] = {}
    major, minor, *_ = pd.__version__.split(".")
    if (int(major), int(minor)) < (3, 1):
        options["float_precision"] = "round_trip"
    # Pandas refuses 1e30 as a whole number. Numpy would also warn about it.
    with np.errstate(invalid="ignore"):
        return pd.read_csv(
            io.StringIO(text),
            # The first line has names, which those of ``header`` replace.
            header=0,
            names=list(header),
            dtype=dict(dtypes),
            # An empty cell is an empty text, and not a missing value.
            na_filter=False,
            # Read the whole file at once, and not in chunks.
            low_memory=False,
            **options,
        )


_QUOTED_CELL = re.compile(r'(^|,)"(?:[^"\n]|"")*"(?=,|\r?$)', re.MULTILINE)
"""A cell within quotes. The first group is the comma before it, "" in the first cell."""


def _has_whole_rows(text: str, rows: int, columns: int) -> bool:
    """Return whether CSV text certainly has ``rows`` rows of ``columns`` cells each.

    Pandas, which has read the text already, refuses a row that is too long, but fills up
    one that is too short. So a short row leaves the text with too few commas, and no long
    row makes up for them. Pandas also accepts wrong quotes, as in ``"a"b``, which
    `read_sheet` refuses. The text is therefore trusted only if quotes enclose whole cells,
    and if it has exactly the commas of a header and full rows outside of quoted cells.
    """
    # The text without its quoted cells, whose commas separate nothing. The first group of
    # the pattern, the comma before such a cell, stays.
    unquoted = text
    if '"' in text:
        unquoted = _QUOTED_CELL.sub(r"\1", text)
    # A quote that is left does not enclose a whole cell.
    if '"' in unquoted:
        return False
    # Each line has one comma less than cells.
    rows_and_header = rows + 1
    return unquoted.count(",") == rows_and_header * (columns - 1)


def write_sheet(frame: DataFrame, schema: Schema, file: str) -> str:
    """Return a table as CSV text.

    Parameters
    ----------
    frame : DataFrame
        The table. Columns that have a default in the schema may be missing.
    schema : Schema
        The kind of table.
    file : str
        The file that will be written, as errors name it.

    Returns
    -------
    str
        The text, with the columns in the order of the schema and floats to the last digit.

    Raises
    ------
    UserError
        If the text would be refused when it is read back.
    """
    names = [name for name in schema.names if name in frame.columns]
    # Columns that the schema does not have are written, too, and then refused below.
    names += [name for name in frame.columns if name not in names]
    # `tolist` gives Python's floats, which are written to the last digit.
    columns = [frame[name].tolist() for name in names]
    out = io.StringIO(newline="")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(names)
    writer.writerows(zip(*columns, strict=True))
    text = out.getvalue()
    # Raises UserError if the text is not a table of this schema.
    schema.read(text, file)
    return text


def _schema(name: str, table: dict[str, Any], shared: dict[str, Any]) -> Schema:
    """Return the schema of a table as schema.json describes it.

    Parameters
    ----------
    name : str
        The name of the schema, such as "layers".
    table : dict
        The entry of this schema in the file.
    shared : dict
        The whole file, with all that several schemas share.

    Returns
    -------
    Schema
        The schema. What ``table`` says about a column replaces what ``shared`` says.
    """
    columns = _listed_columns(table, shared)
    # The first columns of some tables are the fields of `Case`, which says what was run.
    if table.get("starts_with_case"):
        of_case = [_case_column(case_field) for case_field in fields(Case)]
        columns = [*of_case, *columns]
    names = {column.name for column in columns}
    # Only the earlier names of this table's own columns.
    aliases = tuple(
        (earlier, current)
        for earlier, current in shared["aliases"].items()
        if current in names
    )
    key = tuple(table.get("key", "").split())
    return Schema(name, tuple(columns), key, aliases)


def _listed_columns(table: dict[str, Any], shared: dict[str, Any]) -> list[Column]:
    """Return the columns that the entry of a table in schema.json lists by name.

    ``shared`` is the whole file. What ``table`` says about a column replaces what
    ``shared`` says.
    """
    # The kind of each column and what is checked, such as "int positive".
    kinds = _kinds_by_name(shared["columns"])
    # Some columns have another kind in this table.
    kinds |= _kinds_by_name(table.get("but", {}))
    # The cells of columns that earlier recordings lack.
    defaults = {**shared["later"], **table.get("later", {})}
    columns = []
    for name in table["columns"].split():
        # Without a check, as in "float", the check is "".
        kind, _, check = kinds[name].partition(" ")
        columns.append(
            Column(
                name=name,
                kind=kind,
                check=check,
                default=defaults.get(name),
                renamed_values=shared["renamed_values"].get(name, {}),
            )
        )
    return columns


def _kinds_by_name(names_by_kind: dict[str, str]) -> dict[str, str]:
    """Return the kind and check of each column, such as "int positive", by its name.

    ``names_by_kind`` has for each kind and check the names of its columns, separated by
    spaces.
    """
    kinds = {}
    for kind, names in names_by_kind.items():
        kinds.update(dict.fromkeys(names.split(), kind))
    return kinds


def _case_column(case_field: Any) -> Column:
    """Return the column of a field of the dataclass `Case`, given as `fields` returns it.

    A field with "later" in its metadata is younger than some recordings, which lack its
    column. Only such a column has a default, which fills its cells in these recordings.
    """
    default = None
    if case_field.metadata.get("later"):
        default = str(case_field.default)
    return Column(
        name=case_field.name,
        # Annotations in the module of `Case` are texts, such as "int", which are also kinds.
        kind=str(case_field.type),
        check=case_field.metadata.get("check", ""),
        default=default,
    )


_DESCRIBED = json.loads(
    Path(__file__).with_name("schema.json").read_text(encoding="utf-8")
)
SCHEMAS = {
    name: _schema(name, table, _DESCRIBED)
    for name, table in _DESCRIBED["tables"].items()
}
"""The schemas of all recorded tables, by name."""


def schema_named(name: str) -> Schema:
    """Return the schema of a kind of recorded table.

    Parameters
    ----------
    name : str
        One of `SCHEMAS`.

    Returns
    -------
    Schema
        The schema.

    Raises
    ------
    UserError
        If there is no schema of that name.
    """
    if name not in SCHEMAS:
        raise UserError(f"unknown schema {name!r}: use one of {', '.join(SCHEMAS)}")
    return SCHEMAS[name]
