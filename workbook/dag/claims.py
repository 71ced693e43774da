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
    """Compare sending messages after the backward pass with sending them during it."""
    runs = training.predictions(training.parts()).query("ranks > 1")
    case = [name for name in training.CASE if name != "sends"]
    seconds = runs.set_index([*case, "sends"])["measured_s"].unstack()
    networks = runs["network"].nunique()
    ranks = runs["ranks"].max()
    where = f"real training, {networks} networks, {ranks} ranks at 1 Gbit/s"
    note = f"{where}, the same messages sent after or during backward"
    return measured(seconds["after"] / seconds["during"], note, "measured")
