"""sharing Fig 1: what limits a collective, and which limits a machine offers.

The figure is a table, which `workbook.plots.table` typesets.
"""

from __future__ import annotations

import pandas as pd

from workbook.sharing.recordings import Tables

COLUMNS = ["level", "control", "outcome", "reason"]
READ_BACK = {
    "threads": ["taken_threads"],
    "cores": ["taken_cores"],
    "priority": ["taken_policy", "taken_nice"],
}
"""By control, the columns with its values that were read back."""
HEADS = {
    "level": "where it acts",
    "outcome": "on the recorded machine",
    "reason": "why it is absent",
    "read_back": "values reported once the control was set",
}
"""The heads under which columns of `numbers` are shown."""


def numbers(tables: Tables) -> pd.DataFrame:
    """Return the controls that limit a collective.

    Parameters
    ----------
    tables : Tables
        What a machine measured, as `recordings.recorded` returns it.

    Returns
    -------
    DataFrame
        A row for each ``control``, such as "gloo threads", with the ``level`` at which it
        acts, the ``outcome``, which says whether the machine offers it, the ``reason`` why
        not ("none" if it does), and the values that were ``read_back``. Without a recording
        there is a single row that says so, and no column ``read_back``.
    """
    # The table "controls" says which controls a machine offers, and the table "control" has
    # what was read back once each was set. The figure needs both.
    if not {"control", "controls"} <= tables.keys():
        row = {
            "level": "",
            "control": "nothing",
            "outcome": "not recorded",
            "reason": "none",
        }
        return pd.DataFrame([row], columns=COLUMNS)
    table = tables["controls"][COLUMNS]
    # The keys of READ_BACK are words of the controls' names: "gloo threads" has "threads". Of
    # a control without such a word, nothing was read back.
    control = table["control"].str.extract(f"({'|'.join(READ_BACK)})", expand=False)
    return table.assign(read_back=control.map(measured(tables)).fillna(""))


def measured(tables: Tables) -> dict[str, str]:
    """Return the values that were read back once a control was set.

    Parameters
    ----------
    tables : Tables
        What a machine measured, with the table "control".

    Returns
    -------
    dict of str to str
        By the keys of READ_BACK, the different values except "0", separated by semicolons.
    """
    applied = tables["control"].query("outcome == 'applied'")
    values_by_control = {}
    for control, columns in READ_BACK.items():
        # A policy and its nice value together are one value, such as "SCHED_OTHER 10".
        values = set(applied[columns].astype(str).agg(" ".join, axis=1))
        # A number of 0 threads says that no number was read back. "0" is left out for every
        # control, although it is a real value of the cores, the core 0 alone.
        values_by_control[control] = "; ".join(sorted(values - {"0"}))
    return values_by_control


def alike(table: pd.DataFrame) -> pd.DataFrame:
    """Return the table of `numbers` as readers see it.

    Controls that have all other columns in common share a row. The columns have the names of
    HEADS, and a reason "none" is left out.
    """
    common = [name for name in table if name != "control"]
    controls = table.groupby(common, sort=False)["control"].agg(", ".join)
    # The columns get their order in ``table`` back.
    shown = controls.reset_index()[list(table)]
    shown["reason"] = shown["reason"].replace("none", "")
    return shown.rename(columns=HEADS)
