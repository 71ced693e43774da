"""sharing Fig 1: what limits a collective, and what a machine offers of it.

It is a table, which `plots.table` typesets.
"""

from __future__ import annotations

import pandas as pd

from workbook.sharing.recordings import Tables

COLUMNS = ["level", "control", "outcome", "reason"]
SEEN = {
    "threads": ["taken_threads"],
    "cores": ["taken_cores"],
    "priority": ["taken_policy", "taken_nice"],
}
"""The columns in which a control is read back."""
HEADS = {
    "level": "where it acts",
    "outcome": "on the recorded machine",
    "reason": "why it is absent",
    "read_back": "values reported once the control was set",
}
"""The columns of `numbers`, and the heads under which they are shown."""


def numbers(tables: Tables) -> pd.DataFrame:
    """Return what limits a collective, at which level, whether it is offered, what was read back."""
    if not {"control", "controls"} <= tables.keys():
        return pd.DataFrame([["", "nothing", "not recorded", "none"]], columns=COLUMNS)
    table, seen = tables["controls"][COLUMNS], measured(tables)
    control = table["control"].str.extract(f"({'|'.join(SEEN)})", expand=False)
    return table.assign(read_back=control.map(seen).fillna(""))


def measured(tables: Tables) -> dict[str, str]:
    """Return what was read back of each control once it was set."""
    rows = tables["control"].query("outcome == 'applied'")
    return {
        word: "; ".join(
            sorted(set(rows[columns].astype(str).agg(" ".join, axis=1)) - {"0"})
        )
        for word, columns in SEEN.items()
    }


def alike(table: pd.DataFrame) -> pd.DataFrame:
    """Return `numbers` as they are shown: controls that are alike in all else share a row.

    The heads of the columns are words for readers, and a reason "none" is left out.
    """
    same = [name for name in table if name != "control"]
    controls = table.groupby(same, sort=False)["control"].agg(", ".join)
    shown = controls.reset_index()[[*table]]
    shown["reason"] = shown["reason"].replace("none", "")
    return shown.rename(columns=HEADS)
