"""Checks of the tables and numbers that a user gives to `ddlkit.scale`.

The readers in `ddlkit.formats` check files. A user of the Python function may give any DataFrame,
so each column that is used is checked here, and a wrong value is one line that names it.
"""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np

from ddlkit.core.collective import find_collective
from ddlkit.core.errors import UserError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from pandas import DataFrame, Series


def checked_nodes(nodes: Any) -> list[int]:
    """Return the numbers of nodes to predict for, in ascending order and without repeats.

    Parameters
    ----------
    nodes : int or sequence of int
        What the user gives.

    Returns
    -------
    list of int
        The numbers. A whole number may be given as a float.

    Raises
    ------
    UserError
        If one of them is no whole number of at least 1, or if there are none.

    Examples
    --------
    >>> checked_nodes([16, 4, 4.0])
    [4, 16]
    """
    # A single number becomes a list, and so does a text, which is refused below.
    given: list[Any] = [nodes]
    if not isinstance(nodes, str):
        given = list(np.atleast_1d(nodes))
    for number in given:
        if not _is_whole(number) or number < 1:
            raise UserError(f"nodes: {number} is no whole number of at least 1")
    if not given:
        raise UserError("nodes: give at least one number of nodes")
    return sorted({int(number) for number in given})


def checked_wish(wish: Any) -> float | None:
    """Return the wished scaling factor, None if there is none.

    A scaling factor is the time of a step on the fewest GPUs, divided by the time of a step on
    more GPUs.

    Parameters
    ----------
    wish : float or None
        What the user gives.

    Returns
    -------
    float or None
        The factor.

    Raises
    ------
    UserError
        If the factor is no number above 0 and below 1.
    """
    if wish is None:
        return None
    if not _is_number(wish) or not 0 < wish < 1:
        raise UserError(f"wish is {wish}: give a scaling factor above 0 and below 1")
    return float(wish)


def checked_kernel_steps(kernel_steps: Any) -> int:
    """Return the number of steps in which traced kernels ran.

    Parameters
    ----------
    kernel_steps : int
        What the user gives.

    Returns
    -------
    int
        The number.

    Raises
    ------
    UserError
        If it is no whole number of at least 1.
    """
    if not _is_whole(kernel_steps) or kernel_steps < 1:
        raise UserError(
            f"kernel_steps is {kernel_steps}: give a whole number of at least 1"
        )
    return int(kernel_steps)


def checked_steps(steps: DataFrame) -> DataFrame:
    """Return a copy of the step times with numbers where numbers belong.

    Parameters
    ----------
    steps : DataFrame
        The columns ``gpus``, ``nodes``, ``job`` and ``step_s``, and perhaps ``step``, ``samples``,
        ``nccl`` and ``settings``. A job is one run of the training. A row is a step, or the mean
        step of a job.

    Returns
    -------
    DataFrame
        The same rows, numbered from 0. A part of a node counts as one node.

    Raises
    ------
    UserError
        If a column is missing, or for the first value that is wrong.
    """
    table = _checked_table(steps, "the steps", ("gpus", "nodes", "job", "step_s"))
    if not len(table):
        raise UserError("there are no steps: measure one GPU and several nodes")
    # An optional column without any value is left out.
    table = _without_empty(table, ("step", "samples", "nccl", "settings"))
    whole = "a whole number of at least 1"
    values = {
        "gpus": _numbers(table["gpus"], "the steps", whole, least=1, is_whole=True),
        "nodes": _numbers(
            table["nodes"],
            "the steps",
            "a whole number, 0 for a part of a node",
            least=0,
            is_whole=True,
        ),
        "step_s": _numbers(table["step_s"], "the steps", "a time above zero"),
    }
    if "step" in table:
        values["step"] = _numbers(
            table["step"],
            "the steps",
            "the number of a step",
            least=0,
            is_whole=True,
        )
    if "samples" in table:
        values["samples"] = _numbers(
            table["samples"], "the steps", "a number of samples above zero"
        )
    # A part of a node may be written as 0 nodes, and counts as one node.
    values["nodes"] = np.maximum(values["nodes"], 1)
    texts = _texts(table, "the steps", ("job", "nccl", "settings"))
    table = table.assign(**values, **texts)
    _refuse_empty_nodes(table)
    return table


def _refuse_empty_nodes(steps: DataFrame) -> None:
    """Raise UserError for the first step on fewer GPUs than nodes.

    Each node of a training has at least one GPU.
    """
    has_empty_nodes = (steps["gpus"] < steps["nodes"]).to_numpy()
    if not has_empty_nodes.any():
        return
    # The first wrong row, as True is greater than False.
    row = steps.iloc[int(np.argmax(has_empty_nodes))]
    noun = "GPU" if row["gpus"] == 1 else "GPUs"
    raise UserError(
        f"job {row['job']} has {row['gpus']} {noun} on {row['nodes']} nodes, fewer than one "
        "on each: correct the columns gpus and nodes"
    )


def checked_times(collectives: DataFrame) -> DataFrame:
    """Return a copy of the times of collectives with numbers where numbers belong.

    Parameters
    ----------
    collectives : DataFrame
        The columns of `ddlkit.formats.node_tables.COLUMNS`, of which ``nccl``, ``settings`` and
        ``file`` may be missing. ``file`` is not checked.

    Returns
    -------
    DataFrame
        The same rows, numbered from 0.

    Raises
    ------
    UserError
        If a column is missing, or for the first value that is wrong.
    """
    what = "the times of collectives"
    table = _checked_table(
        collectives, what, ("collective", "nodes", "ranks", "bytes", "seconds")
    )
    if not len(table):
        raise UserError(f"{what} are none: leave them out, or measure some")
    # An optional column without any value is left out.
    table = _without_empty(table, ("nccl", "settings"))
    texts = _texts(table, what, ("collective", "nccl", "settings"))
    for name in texts["collective"].unique():
        find_collective(name)  # raises UserError for a name that it does not know
    whole = "a whole number of at least 1"
    return table.assign(
        nodes=_numbers(table["nodes"], what, whole, least=1, is_whole=True),
        ranks=_numbers(table["ranks"], what, whole, least=1, is_whole=True),
        bytes=_numbers(table["bytes"], what, "a size above zero"),
        seconds=_numbers(table["seconds"], what, "a time above zero"),
        **texts,
    )


def checked_kernels(kernels: DataFrame) -> DataFrame:
    """Return a copy of the total times of traced kernels, with numbers where numbers belong.

    Parameters
    ----------
    kernels : DataFrame
        The columns ``collective`` ("" for a kernel that is not of NCCL) and ``total_s``, the
        seconds of all runs of a kernel.

    Returns
    -------
    DataFrame
        The same rows, numbered from 0.

    Raises
    ------
    UserError
        If a column is missing, for the first value that is wrong, or if no kernel is of NCCL.
    """
    what = "the sums of kernels"
    table = _checked_table(kernels, what, ("collective", "total_s"))
    table = table.assign(
        total_s=_numbers(table["total_s"], what, "a time of at least 0", least=0.0),
        **_texts(table, what, ("collective",)),
    )
    if not (table["collective"] != "").any():
        raise UserError(
            f"{what} have no kernel of NCCL, whose names begin with nccl: trace a training on "
            "several nodes, with its collectives"
        )
    return table


def _is_whole(number: Any) -> bool:
    """Return whether a value is a whole number. NaN and texts are none."""
    if not _is_number(number) or not np.isfinite(float(number)):
        return False
    return float(number) % 1 == 0


def _is_number(value: Any) -> bool:
    """Return whether a value is a real number. A truth value is none."""
    return isinstance(value, Real) and not isinstance(value, bool | np.bool_)


def _checked_table(table: Any, what: str, columns: Sequence[str]) -> DataFrame:
    """Return a copy of a table with rows numbered from 0, if it has some columns once each.

    ``what`` is how an error calls the table.
    """
    import pandas as pd

    if not isinstance(table, pd.DataFrame):
        raise UserError(f"{what} are a {type(table).__name__}: give a DataFrame")
    for column in columns:
        if column not in table:
            raise UserError(f"{what} have no column {column}: add it")
    if not table.columns.is_unique:
        raise UserError(f"{what} have two columns of one name: leave one out")
    return table.reset_index(drop=True)


def _without_empty(table: DataFrame, columns: Sequence[str]) -> DataFrame:
    """Return a table without those of some optional columns in which no row has a value.

    Such a column tells as little as one that is left out. A table that is put together from
    several sources may have one.
    """
    empty = [name for name in columns if name in table and table[name].isna().all()]
    return table.drop(columns=empty) if empty else table


def _numbers(
    column: Series,
    what: str,
    required: str,
    *,
    least: float | None = None,
    is_whole: bool = False,
) -> NDArray[Any]:
    """Return the numbers of a column, or raise UserError for the first that is wrong.

    Parameters
    ----------
    column : Series
        The values.
    what : str
        How an error calls the table.
    required : str
        What an error says that each value must be.
    least : float, optional
        The least number. By default all numbers above zero are taken.
    is_whole : bool, optional
        Whether only whole numbers are taken.

    Returns
    -------
    ndarray, shape (n,)
        The numbers, as integers if ``is_whole`` and otherwise as floats.

    Raises
    ------
    UserError
        If a value is missing, is infinite, is no number, or is not one that is taken.
    """
    numbers = column
    # The kind is a letter of numpy. Columns of the kinds i, u and f have integers or
    # floats alone. In any other column, values that are no numbers become missing. A
    # text is wrong even if it looks like a number.
    if column.dtype.kind not in "iuf":
        numbers = column.where(column.map(_is_number).to_numpy(bool))
    values = numbers.to_numpy(float, na_value=np.nan)
    # Missing values are NaN here, which is not finite.
    is_right = np.isfinite(values)
    if least is None:
        is_right &= values > 0
    else:
        is_right &= values >= least
    if is_whole:
        is_right &= values % 1 == 0
    if not is_right.all():
        # The first row that is not right, as False is less than True.
        row = int(np.argmin(is_right))
        if isinstance(column.iloc[row], str):
            required += ", as a number and not as a text"
        raise UserError(
            f"{what}: the column {column.name} has {_shown(column.iloc[row])} in row {row}, counted "
            f"from 0: give {required}"
        )
    return values.astype(np.int64 if is_whole else np.float64)


def _shown(value: Any) -> str:
    """Return a value of a table as an error shows it: a number by its digits, a text in quotes."""
    if isinstance(value, np.generic):
        # A number of numpy is written as a number of Python.
        value = value.item()
    return repr(value)


def _texts(table: DataFrame, what: str, columns: Sequence[str]) -> dict[str, Series]:
    """Return columns of names as texts, or raise UserError if a name is missing.

    A name may be a number, which becomes a text. Columns that the table lacks are left
    out. ``what`` is how an error calls the table.
    """
    texts = {}
    for column in columns:
        if column not in table:
            continue
        is_missing = table[column].isna().to_numpy()
        if is_missing.any():
            # The first row without a value.
            row = int(np.argmax(is_missing))
            raise UserError(
                f"{what}: the column {column} has no value in row {row}, counted from 0: give a "
                "text"
            )
        texts[column] = table[column].astype(str)
    return texts
