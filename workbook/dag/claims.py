"""The checks of dag's claims. Importing this module registers them all.

The checks of a figure or of a table are in its module. Those that belong to neither are
here.
"""

from __future__ import annotations

from workbook.common.claims import Result, check, measured
from workbook.dag import fig01 as fig01
from workbook.dag import fig02 as fig02
from workbook.dag import fig03 as fig03
from workbook.dag import fig04 as fig04
from workbook.dag import tables as tables
from workbook.dag import training


@check("dag-finding2")
def _hiding_pays() -> Result:
    """Return iterations that send after the backward pass over those that send during it.

    Each ratio is of two cases of real training that differ in nothing else.
    """
    runs = training.measured_cases(training.parts()).query("ranks > 1")
    other_columns = [name for name in training.CASE if name != "sends"]
    iterations_s = runs.set_index([*other_columns, "sends"])["measured_s"]
    # A row for each case, with the columns "after" and "during".
    by_sending_s = iterations_s.unstack("sends")
    networks = runs["network"].nunique()
    ranks = runs["ranks"].max()
    note = (
        f"real training, {networks} networks, {ranks} ranks at 1 Gbit/s, the same "
        "messages sent after or during backward"
    )
    return measured(by_sending_s["after"] / by_sending_s["during"], note, "measured")
