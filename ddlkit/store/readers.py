"""Layer profiles, timelines and selection times, from recorded tables or users' own.

A file that is wrong raises a ``UserError``. So does a file in which several things
remain to choose from.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from ddlkit.core.cost import FORMS, from_dict
from ddlkit.core.errors import UserError
from ddlkit.core.plan import DDP_BUCKET_BYTES
from ddlkit.core.sparse import SELECTION_FORMS, SelectionCost, SelectionTimes
from ddlkit.core.timeline import Timeline
from ddlkit.core.workload import LayerProfile
from ddlkit.store import files
from ddlkit.store.files import read_json
from ddlkit.store.sheet import (
    SCHEMAS,
    Schema,
    Sheet,
    advice_on_missing_column,
    read_sheet,
)
from ddlkit.store.tables import expand_tables, is_stamped, load_table, refuse_pack

if TYPE_CHECKING:
    from pandas import DataFrame

BYTES_PER_PARAMETER = 4
"""Bytes of a gradient per parameter, in single precision."""

MOST_SPANS = 200_000
"""Spans of a timeline. Recorded ones have thousands, and Perfetto is slow with more."""

PROFILE_KEYS = ("network", "device", "batch", "precision", "ranks", "threads")
"""Columns of a table ``layers`` that distinguish its profiles."""

SELECTOR = "topk_unsorted"
"""The operation of a table ``selection`` that a replay uses when it really selects."""

ADVICE_ON_SELECTION_COST = (
    "give tables of measured times of selection, or a selection cost as docs/commands.md "
    "describes it"
)
"""What to do if a file is no selection cost."""

_ASSUMED_CELLS = {
    "device": "unknown",
    "batch": "1",
    "precision": "fp32",
    "ranks": "1",
    "threads": "0",
    "flops": "0",
    "update_s": "0",
}
"""The cells of columns that a user's profile may lack."""

_PLACEHOLDERS = {"layer": "unknown", "parameters": "1"}
"""Cells of columns that a user's profile may lack, and that follow from other columns.

The schema needs a cell for each. `_users_profile` replaces them at once.
"""


class NoSuchRowsError(UserError):
    """A value that the user asks for, and that no row of a table has.

    Parameters
    ----------
    path : Path or str
        The file of the table, or other words that name it.
    key : str
        The column.
    value : object
        The value that is asked for.
    values : sequence of object
        The values that the column has.
    among : dict of str to object, optional
        To which rows ``values`` belong, as in ``{"ranks": 4}`` for the rows with 4 ranks. By
        default they belong to all rows of the table.
    option : str, optional
        The name of the command's option that chooses a value, without the dashes. By default
        the error names no option.
    not_given : collection of str, optional
        The columns of ``among`` whose value the user did not choose.

    Attributes
    ----------
    key : str
        The column.
    listed : str
        The values that it has, in words.
    """

    def __init__(
        self,
        path: Path | str,
        key: str,
        value: Any,
        values: Sequence[Any],
        among: Mapping[str, Any] = MappingProxyType({}),
        option: str | None = None,
        not_given: Collection[str] = (),
    ) -> None:
        self.key = key
        self.listed = _listed(values)
        flag = f"--{option} " if option else ""
        if among:
            condition = " and ".join(f"{name} {given}" for name, given in among.items())
            choice = self.listed if len(values) == 1 else "one of these"
            message = (
                f"no row with {condition} has {key} {value}: the rows with {condition} have "
                f"{key} {self.listed}: choose {choice}"
            )
            given_keys = [name for name in among if name not in not_given]
            if given_keys:
                message += f", or another value of {' or '.join(given_keys)}"
        elif len(values) == 1:
            message = (
                f"no row with {key} {value}: the rows have {key} {self.listed}: give "
                f"{flag}{self.listed}, or leave {'it' if option else 'the option'} out"
            )
        else:
            choice = f"one of these with {flag.rstrip()}" if flag else "one of these"
            message = f"no row with {key} {value}: the rows have {key} {self.listed}: choose {choice}"
        super().__init__(f"{path}: {message}")


class SeveralValuesError(UserError):
    """A column with several values, where the user has to choose one.

    Parameters
    ----------
    path : Path or str
        The file of the table, or other words that name it.
    key : str
        The column.
    values : sequence of object
        The values that the column has.
    option : str or None
        The name of the command's option that chooses one of them, without the dashes.
        None if there is no such option.

    Attributes
    ----------
    key : str
        The column.
    without_option : str
        The error for a command that has no such option.
    """

    def __init__(
        self, path: Path | str, key: str, values: Sequence[Any], option: str | None
    ) -> None:
        self.key = key
        problem = f"{path}: has several values of {key} ({_listed(values)})"
        self.without_option = (
            f"{problem}: keep the rows of one of them, or correct the value where it is "
            "wrong"
        )
        if option is None:
            super().__init__(self.without_option)
        else:
            super().__init__(f"{problem}: choose one with --{option}")


class NoForwardError(UserError):
    """A user's profile that lacks the times of the forward pass.

    Parameters
    ----------
    file : str
        The file, as errors name it.
    header : sequence of str
        The names of its columns.

    Attributes
    ----------
    without_option : str
        The error for a command that has no option --forward-s.
    """

    def __init__(self, file: str, header: Sequence[str]) -> None:
        problem = f"{file}: has no column forward_s, the time of the forward pass of each tensor"
        advice = advice_on_missing_column("forward_s", header)
        self.without_option = f"{problem}: {advice}"
        super().__init__(
            f"{problem}: give the time of the whole pass with --forward-s, or {advice}"
        )


def choose(
    frame: DataFrame,
    keys: tuple[str, ...],
    wanted: dict[str, Any],
    path: Path | str,
    absent: Collection[str] = (),
    options: Mapping[str, str] = MappingProxyType({}),
    not_given: Collection[str] = (),
) -> tuple[DataFrame, dict[str, Any]]:
    """Choose the rows of a table that have one value in each of some columns.

    Parameters
    ----------
    frame : DataFrame
        The table.
    keys : tuple of str
        The columns. Those that the table lacks are ignored.
    wanted : dict of str to object
        The value that each column must have. If a value is None, or if a column has no
        entry, the column must have a single value. An entry, even None, also says that
        the command has an option --COLUMN to choose a value, which errors then mention.
    path : Path or str
        The file of the table, or other words by which errors name where the rows are from.
    absent : collection of str, optional
        The columns that the file lacks, which the table fills with assumed values.
    options : dict of str to str, optional
        The name of the option, without the dashes, of each column whose option has another
        name than the column.
    not_given : collection of str, optional
        The columns whose wanted value is a default, and not the user's. Errors do not advise
        to choose another one.

    Returns
    -------
    rows : DataFrame
        The rows that have the wanted value, or else the single one, in each column.
    chosen : dict of str to object
        The value that these rows have in each of the columns, in the order of ``keys``.

    Raises
    ------
    UserError
        If no row has a wanted value, or if a column has several values and none of them
        is wanted.
    """
    table = frame
    chosen: dict[str, Any] = {}
    present = [key for key in keys if key in frame.columns]
    # One column after the other narrows the table, so that a column may have several
    # values in the table and only one in the rows that are left. Columns with a wanted
    # value come first, so that an error lists only values that go with all wanted ones.
    with_value = [key for key in present if wanted.get(key) is not None]
    without_value = [key for key in present if wanted.get(key) is None]
    for key in [*with_value, *without_value]:
        option = options.get(key, key)
        values = frame[key].drop_duplicates().tolist()
        value = wanted.get(key)
        if value is None:
            # Only columns with an entry, even None, have an option of the command.
            has_option = key in wanted
            value = _only_value(values, key, path, option if has_option else None)
        elif value not in values and key in absent:
            # The file lacks the column, and the assumed value is not the wanted one.
            raise UserError(
                f"{path}: has no column {key}, so that {_listed(values)} is assumed: add "
                f"the column with {value}, or leave --{option} out"
            )
        elif value not in values:
            # Values that no row has together with the other wanted values would be refused, too,
            # so the error lists only values of rows that have these.
            others = {name: wanted[name] for name in with_value if name != key}
            fitting = _rows_with(table, others)
            if fitting.empty:
                # The other values do not go together. The error is then only about the value of
                # this column, and those that were chosen before.
                fitting = frame
                others = {name: chosen[name] for name in others if name in chosen}
            values = fitting[key].drop_duplicates().tolist()
            # Values by which no row is left out do not matter, and the error leaves them out.
            narrowing = {
                name: given
                for name, given in others.items()
                if table[name].nunique() > 1
            }
            # If the whole table has the same values, its error needs no condition.
            values_of_table = table[key].drop_duplicates().tolist()
            raise NoSuchRowsError(
                path,
                key,
                value,
                values,
                among={} if values == values_of_table else narrowing,
                option=options.get(key),
                not_given=not_given,
            )
        chosen[key] = value
        frame = frame[frame[key] == value]
    return frame, {key: chosen[key] for key in present}


def _rows_with(table: DataFrame, values: Mapping[str, Any]) -> DataFrame:
    """Return the rows of a table that have given values in the columns ``values``."""
    for name, value in values.items():
        table = table[table[name] == value]
    return table


def _only_value(
    values: Sequence[Any], key: str, path: Path | str, option: str | None
) -> Any:
    """Return the only one of the values of a column, or raise SeveralValuesError."""
    if len(values) > 1:
        raise SeveralValuesError(path, key, values, option)
    return values[0]


MOST_LISTED = 6
"""The most values of a column that an error lists."""


def _listed(values: Sequence[Any]) -> str:
    """Return the first of some values as a list in words, and how many more there are."""
    words = [str(value) for value in values[:MOST_LISTED]]
    n_more = len(values) - len(words)
    if n_more:
        words.append(f"and {n_more} more")
    return ", ".join(words)


# -- Layer profiles --------------------------------------------------------------------


def read_profile(
    path: Path | str,
    network: str | None = None,
    batch: int | None = None,
    *,
    forward_s: float | None = None,
    assumed: list[str] | None = None,
    device: str | None = None,
    precision: str | None = None,
    ranks: int | None = None,
    threads: int | None = None,
) -> LayerProfile:
    """Return the layer profile in a table ``layers``.

    Parameters
    ----------
    path : Path or str
        A recorded table, or a user's own CSV. The latter needs only the columns tensor,
        gradient_bytes, backward_s and forward_s.
    network : str, optional
        The network to choose, if the table has several. By default the table must have
        only one. The same holds for each other column in which a value can be chosen.
    batch : int, optional
        The batch size to choose.
    forward_s : float, optional
        Seconds of the whole forward pass, in place of the column of that name.
    assumed : list of str, optional
        A list to which this function adds a phrase, such as "batch = 1", for each column
        that a user's CSV lacks.
    device, precision : str, optional
        The device and the precision to choose.
    ranks, threads : int, optional
        The number of ranks and of threads to choose.

    Returns
    -------
    LayerProfile
        The profile.

    Raises
    ------
    UserError
        If the table is wrong, or has no such profile or several.
    """
    path = Path(path)
    # A time of forward that the caller states replaces the column.
    frame, assumptions = _layers(path, needs_forward=forward_s is None)
    if assumed is not None:
        assumed.extend(assumptions)
    # Commands have an option for each of these columns. If a column has an entry here, even
    # None, errors of `choose` advise this option.
    wanted = {"network": network, "batch": batch, "ranks": ranks}
    # Commands have no option for these, so they have no entry unless they are given.
    without_option = {"device": device, "precision": precision, "threads": threads}
    for key, value in without_option.items():
        if value is not None:
            wanted[key] = value
    # An assumption is a phrase such as "batch = 1". Each names a column that the file
    # lacks. If another value is wanted in such a column, the error of `choose` advises to
    # add the column to the file.
    absent = {phrase.partition(" = ")[0] for phrase in assumptions}
    # The option for the ranks of a profile is --profile-ranks, because --ranks chooses the
    # ranks between which messages were measured.
    frame, chosen = choose(
        frame, PROFILE_KEYS, wanted, path, absent, options={"ranks": "profile-ranks"}
    )
    if forward_s is not None:
        frame = _with_forward(frame, forward_s)
    _refuse_wrong_times(frame, path)
    return LayerProfile(
        network=chosen["network"],
        device=chosen["device"],
        batch=chosen["batch"],
        tensor=tuple(frame["tensor"]),
        layer=tuple(frame["layer"]),
        parameters=frame["parameters"].to_numpy(),
        gradient_bytes=frame["gradient_bytes"].to_numpy(),
        forward_s=frame["forward_s"].to_numpy(),
        backward_s=frame["backward_s"].to_numpy(),
        flops=frame["flops"].to_numpy(),
        # All rows have the same time of the update.
        update_s=float(frame["update_s"].iloc[0]),
        dtype=_types_of(frame),
    )


def _layers(path: Path, *, needs_forward: bool) -> tuple[DataFrame, list[str]]:
    """Return a table ``layers``, recorded or a user's own, and its assumptions.

    An assumption is a phrase such as "batch = 1", one for each column that a user's CSV
    lacks. Without ``needs_forward``, a user's CSV may also lack the column forward_s,
    which the caller replaces.
    """
    # Only recorded tables have a stamp, which says where their rows come from. They have
    # all columns.
    if is_stamped(path):
        return load_table(path, "layers"), []
    # A pack has the rows of many tables, so it is no user's CSV.
    refuse_pack(path)
    return _users_profile(path, needs_forward=needs_forward)


def _with_forward(frame: DataFrame, forward_s: float) -> DataFrame:
    """Return the rows of a profile with ``forward_s`` as the time of the forward pass.

    The first tensor gets the whole time and the others get 0, because only the sum of
    the column counts for a plan. Raises UserError unless the time is finite and above 0.
    """
    # Written so that NaN, of which every comparison is false, is refused, too.
    if not 0 < forward_s < math.inf:
        raise UserError(f"forward_s is {forward_s}: must be a time above zero")
    others_s = [0.0] * (len(frame) - 1)
    return frame.assign(forward_s=[forward_s, *others_s])


def _refuse_wrong_times(frame: DataFrame, path: Path) -> None:
    """Raise UserError if the rows of one profile have impossible times.

    ``frame`` was read by the schema, which has refused negative numbers and NaN.
    """
    for name in ("forward_s", "backward_s"):
        advice = ""
        if name == "forward_s":
            advice = ", or delete the column and give --forward-s"
        # The sum is 0 only if all times are.
        if not frame[name].sum() > 0:
            raise UserError(
                f"{path}: column {name}: all times are zero: measure the layers again{advice}"
            )
    # Every row repeats the time of the update of the whole model.
    if frame["update_s"].nunique() > 1:
        raise UserError(
            f"{path}: column update_s: differs between rows of one profile: give every row the "
            "time of the update of the whole model"
        )


def _types_of(frame: DataFrame) -> tuple[str, ...]:
    """Return the type of each gradient of a profile, such as "fp32".

    A type that is not known is "" in the table. If there is such a type, the result is ().
    """
    types = tuple(frame["dtype"])
    return types if all(types) else ()


def _users_profile(path: Path, *, needs_forward: bool) -> tuple[DataFrame, list[str]]:
    """Return a user's CSV with all columns of ``layers``, and the assumptions.

    An assumption is a phrase such as "batch = 1", one for each column that the file
    lacks. Without ``needs_forward`` the file may also lack the column forward_s. This
    column is then 0 for the caller to replace, and is no assumption. Raises UserError for
    a file that is no such table.
    """
    # The cells of the file as text.
    sheet = read_sheet(files.read_text(path), str(path))
    if needs_forward:
        _refuse_without_forward(sheet)
    # The network gets the name of the file up to its first dot.
    assumed_cells = {
        "network": path.name.partition(".")[0] or "unknown",
        **_ASSUMED_CELLS,
    }
    # What fills the cells of each column that the file lacks. The placeholders are for
    # "layer" and "parameters", which follow from other columns and are replaced below.
    defaults = {**assumed_cells, **_PLACEHOLDERS}
    if not needs_forward:
        defaults["forward_s"] = "0"
    # `exact=False` lets a user's file have further columns, which are ignored.
    frame = _schema_with_defaults(defaults).frame(sheet, exact=False)
    if "layer" not in sheet.header:
        frame["layer"] = frame["tensor"]
    if "parameters" not in sheet.header:
        # The quotient, rounded up: -(-x // y).
        frame["parameters"] = -(-frame["gradient_bytes"] // BYTES_PER_PARAMETER)
    # What the values of each column are, in words, if the file lacks it.
    assumed_in_words = {
        **assumed_cells,
        "layer": "its tensor",
        "parameters": f"gradient_bytes / {BYTES_PER_PARAMETER}",
    }
    phrases = [
        f"{name} = {value}"
        for name, value in assumed_in_words.items()
        if name not in sheet.header
    ]
    return frame, phrases


def _refuse_without_forward(sheet: Sheet) -> None:
    """Raise NoForwardError for a user's profile that lacks the times of forward.

    A file that has times of backward is taken for a profile. A file without them passes here,
    and is refused by the schema.
    """
    if "backward_s" in sheet.header and "forward_s" not in sheet.header:
        raise NoForwardError(sheet.file, sheet.header)


def _schema_with_defaults(defaults: Mapping[str, str]) -> Schema:
    """Return the schema of a table ``layers`` in which more columns may be missing.

    ``defaults`` has, for each of these columns, the text that fills its cells.
    """
    schema = SCHEMAS["layers"]
    # A column without an entry keeps its own default, which may be none.
    columns = [
        replace(column, default=defaults.get(column.name, column.default))
        for column in schema.columns
    ]
    return replace(schema, columns=tuple(columns))


def profile_frame(
    profile: LayerProfile, precision: str = "fp32", ranks: int = 1, threads: int = 0
) -> DataFrame:
    """Return a layer profile as a table ``layers``.

    Parameters
    ----------
    profile : LayerProfile
        The profile.
    precision : str, optional
        The precision in which it was computed.
    ranks : int, optional
        The number of ranks that computed at a time.
    threads : int, optional
        The number of threads of each rank, 0 if it is unknown.

    Returns
    -------
    DataFrame
        One row for each tensor, in forward order. A gradient of unknown type has "".
    """
    from pandas import DataFrame

    # The attributes of a profile have the names of the other columns.
    values = {
        **vars(profile),
        "precision": precision,
        "ranks": ranks,
        "threads": threads,
        "dtype": profile.dtype or [""] * len(profile.tensor),
    }
    # The columns are in the order of the schema. A single value is repeated in each row.
    return DataFrame({name: values[name] for name in SCHEMAS["layers"].names})


def read_copy_s_per_byte(path: Path) -> float:
    """Return the seconds that it takes to copy a byte in memory.

    Parameters
    ----------
    path : Path
        A table ``copies`` of measured times.

    Returns
    -------
    float
        The median over the copies of one size in s/B. The size is the measured one that
        is nearest to the size of a bucket of PyTorch's DistributedDataParallel.

    Raises
    ------
    UserError
        If the table has no copies within a memory.
    """
    rows = load_table(path, "copies")
    # Copies within one memory: of the host ("memcpy"), or of a device ("d2d").
    rows = rows[rows["copy"].isin(["memcpy", "d2d"])]
    if rows.empty:
        raise UserError(f"{path}: no copies in memory: run ddlkit measure copies again")
    sizes = np.unique(rows["bytes"])
    # Sizes are compared by their ratio: half a bucket is as far off as two buckets.
    distances = np.abs(np.log(sizes / DDP_BUCKET_BYTES))
    nearest_rows = rows[rows["bytes"] == sizes[distances.argmin()]]
    return float((nearest_rows["seconds"] / nearest_rows["bytes"]).median())


# -- Timelines -------------------------------------------------------------------------


def read_timeline(
    path: Path, case: str | None = None, repeat: int | None = None
) -> Timeline:
    """Return the timeline in a table ``timeline``.

    Parameters
    ----------
    path : Path
        A recorded table, or a user's own CSV with its columns.
    case : str, optional
        The key of the case to choose, if the table has several. A case is what was run: a
        network, a plan, a number of ranks and so on.
    repeat : int, optional
        The number of the repeat to choose, if the case has several.

    Returns
    -------
    Timeline
        The timeline.

    Raises
    ------
    UserError
        If the table is wrong, or has no such timeline, several, or too many spans.
    """
    # Only recorded tables have a stamp, which says where their rows come from.
    if is_stamped(path):
        frame = load_table(path, "timeline")
    else:
        # A pack holds several tables in one file, so it is no timeline. `exact=False` lets
        # a user's file have further columns, which are ignored.
        refuse_pack(path)
        frame = SCHEMAS["timeline"].read(files.read_text(path), str(path), exact=False)
    if case is None:
        # `choose` would refuse several cases, too, but without what is known of each.
        _refuse_several_cases(frame, path)
    frame, _ = choose(frame, ("case", "repeat"), {"case": case, "repeat": repeat}, path)
    if len(frame) > MOST_SPANS:
        raise UserError(
            f"{path}: {len(frame)} spans in one timeline: at most {MOST_SPANS}"
        )
    return Timeline.from_columns(frame)


def _refuse_several_cases(frame: DataFrame, path: Path) -> None:
    """Raise UserError if a timeline has several cases, with what is known of each case.

    A case is what was run: a network, a plan, a number of ranks and so on. The table
    runs-x.csv beside a recorded table timeline-x.csv.gz describes its cases. Without that
    table nothing is raised here, because nothing is known of the cases but their keys.
    `choose` refuses such a timeline later.
    """
    keys = frame["case"].drop_duplicates().tolist()
    name = path.name.removesuffix(".gz").replace("timeline", "runs", 1)
    runs_path = path.with_name(name)
    if len(keys) < 2 or not is_stamped(runs_path):
        return
    # One row for each case, because the rows of a case agree in what was run.
    runs = load_table(runs_path, "runs").drop_duplicates("case").set_index("case")
    # A case that the table of runs lacks is left out of the list.
    described = []
    for key in keys:
        if key in runs.index:
            run = runs.loc[key]
            facts = f"{run['network']}, plan {run['plan']}, {run['workers']} ranks"
            described.append(f"{key} ({facts})")
    raise UserError(
        f"{path}: has {len(keys)} cases ({_listed(described)}; its column case has all of "
        "them): choose one with --case KEY"
    )


# -- Times of selection ----------------------------------------------------------------


def read_selection_times(path: Path, density: float | None = None) -> SelectionTimes:
    """Return how long it takes to select the largest gradients.

    Parameters
    ----------
    path : Path
        A table ``selection``.
    density : float, optional
        The share of the gradients that is selected. By default the table must have a
        single one.

    Returns
    -------
    SelectionTimes
        Median times of `SELECTOR` by the number of elements.

    Raises
    ------
    UserError
        If the table has no times of `SELECTOR` at that density.
    """
    rows = _selector_rows([path])
    # If the density is None, this refuses a table with several densities.
    rows, _ = choose(rows, ("density",), {"density": density}, path)
    return _median_times(rows, [path])


def read_selection(paths: Sequence[Path], density: float) -> SelectionCost:
    """Return the described or measured cost of selecting the largest gradients.

    Parameters
    ----------
    paths : sequence of Path
        Tables ``selection``, or one file of JSON that describes a cost.
    density : float
        The share of the gradients that will be selected. Tables must have times at
        this density, or at a lower and a higher one.

    Returns
    -------
    SelectionCost
        The cost in the file of JSON, or the median times of the operation `SELECTOR` at
        all densities in the tables.

    Raises
    ------
    UserError
        If a file is wrong, if `SELECTOR` was not measured, or if the density is not
        between those of the tables.
    """
    # One file of JSON is a cost that was described. Anything else is measured times.
    if [path.suffix for path in paths] == [".json"]:
        # The second argument ends the error for a file that is not JSON.
        described = read_json(paths[0], ADVICE_ON_SELECTION_COST)
        if _is_cost_of_messages(described):
            raise UserError(
                f"{paths[0]}: is a cost of messages, and no cost of selection: "
                f"{ADVICE_ON_SELECTION_COST}"
            )
        try:
            return from_dict(described, SELECTION_FORMS, ADVICE_ON_SELECTION_COST)
        except UserError as error:
            raise UserError(f"{paths[0]}: {error}") from error
    # Tables may have several operations that select. Only the rows of `SELECTOR` count.
    tables = expand_tables([*paths])
    rows = _selector_rows(tables)
    # At least one density, because `_selector_rows` refuses tables without such rows.
    measured_densities = sorted(set(rows["density"]))
    if not measured_densities[0] <= density <= measured_densities[-1]:
        listed = ", ".join(f"{value:g}" for value in measured_densities)
        raise UserError(
            f"{paths[0]}: {SELECTOR} was measured at the densities {listed}, not at "
            f"{density:g}: give a density from {measured_densities[0]:g} to "
            f"{measured_densities[-1]:g}, or add a table with times at {density:g}"
        )
    return _median_times(rows, tables)


def _is_cost_of_messages(described: Any) -> bool:
    """Return whether a document of JSON describes the cost of a message, and not of a selection."""
    form = described.get("form") if isinstance(described, dict) else None
    if not isinstance(form, str) or form not in FORMS:
        return False
    # Some forms are those of both costs, but only messages have a collective.
    return form not in SELECTION_FORMS or "collective" in described


def _selector_rows(paths: Sequence[Path]) -> DataFrame:
    """Return the rows of tables ``selection`` in which `SELECTOR` was measured.

    `SELECTOR` selects the largest of some values, and its time depends on how these are
    distributed. Only rows with normally distributed values are returned, because gradients
    are assumed to be normally distributed. Raises UserError if there are no such rows.
    """
    import pandas as pd

    rows = pd.concat([load_table(path, "selection") for path in paths])
    rows = rows[(rows["operation"] == SELECTOR) & (rows["distribution"] == "normal")]
    if rows.empty:
        raise UserError(f"{paths[0]}: {SELECTOR} was not measured")
    return rows


LEAST_SIZES_OF_SELECTION = 2
"""Between so many sizes or more, times of selection are interpolated."""


def _median_times(rows: DataFrame, paths: Sequence[Path]) -> SelectionTimes:
    """Return the median times of the sizes that were measured at every density.

    ``rows`` are those of the tables ``selection`` in ``paths``. A size is a number of elements.
    Raises UserError if there are too few sizes.
    """
    medians = rows.groupby(["density", "elements"])["seconds"].median()
    # A row for each density and a column for each size. A size that was not measured at
    # some density is dropped.
    by_density_and_size = medians.unstack().dropna(axis=1)
    if by_density_and_size.shape[1] < LEAST_SIZES_OF_SELECTION:
        raise UserError(
            f"{paths[0]}: {SELECTOR}, which selects the largest gradients, was measured with "
            f"fewer than {LEAST_SIZES_OF_SELECTION} sizes at every density: add tables of other sizes"
        )
    return SelectionTimes(
        elements=by_density_and_size.columns.to_numpy(float),
        density=by_density_and_size.index.to_numpy(float),
        seconds=by_density_and_size.to_numpy(),
    )


# -- Times of input --------------------------------------------------------------------

INPUTS = {"io_s": "read", "decode_s": "decode", "h2d_s": "h2d"}
"""Tasks of training's graph, each with its quantity in a table ``inputs``."""

AS_TRAINING_DOES = {"read": "cold files", "decode": "one core", "h2d": "pinned"}
"""How training does each quantity of a table ``inputs``, in the column "how".

It reads files that are not in memory yet, decodes on one core, and copies from pinned
memory.
"""


def read_inputs(path: Path, batch: int) -> dict[str, float]:
    """Return how long the input of an iteration takes.

    Parameters
    ----------
    path : Path
        A table ``inputs``.
    batch : int
        The number of JPEGs in an iteration.

    Returns
    -------
    dict of str to float
        Median seconds that an iteration takes to read its input ("io_s"), to decode it
        ("decode_s") and to copy it to the device ("h2d_s"). A task that was not measured
        is left out. The seconds for each picture are assumed not to depend on the batch
        size.

    Raises
    ------
    UserError
        If no task was measured.
    """
    rows = load_table(path, "inputs")
    # A row has the time of one quantity of `INPUTS`, such as "read", for a batch. For "read"
    # and "h2d", only rows of one rank count, because ranks that read or copy at once share
    # a disk or a bus. Ranks that decode share nothing, so their number does not matter.
    rows = rows[(rows["ranks"] == 1) | (rows["quantity"] == "decode")]
    # Only rows count that read, decode or copy in the way in which training does. Each way
    # belongs to one quantity only, so one list of the ways serves for all quantities.
    rows = rows[rows["how"].isin(AS_TRAINING_DOES.values())]
    # Pictures that are stored "raw" need no decoding. The input of training is one JPEG
    # file for each picture.
    rows = rows[rows["stored"] != "raw"]
    # In a row, `batch` pictures took `seconds`.
    seconds_of_one_picture = rows["seconds"] / rows["batch"]
    # The median of each quantity, such as "decode".
    medians_s = seconds_of_one_picture.groupby(rows["quantity"]).median()
    if medians_s.empty:
        raise UserError(
            f"{path}: no reading, decoding or copying: give inputs-alone-*.csv"
        )
    # `INPUTS` has the tasks, such as "decode_s", each with its quantity in the table.
    return {
        task: batch * float(medians_s[quantity])
        for task, quantity in INPUTS.items()
        if quantity in medians_s
    }
