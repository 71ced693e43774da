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
    """Compare iterations that send messages after and during the backward pass.

    The cases of real training form pairs, which differ only in when they send. A ratio is the
    iteration of the case that sends after the backward pass, divided by that of the case that
    sends during it.
    """
    # One rank alone sends nothing.
    runs = training.measured_cases(training.parts()).query("ranks > 1")
    other_columns = [name for name in training.CASE if name != "sends"]
    iterations_s = runs.set_index([*other_columns, "sends"])["measured_s"]
    # A row for each pair of cases, with the columns "after" and "during".
    by_sending_s = iterations_s.unstack("sends")
    networks = runs["network"].nunique()
    # All of these cases have the same number of ranks.
    ranks = runs["ranks"].max()
    note = (
        f"real training, {networks} networks, {ranks} ranks at 1 Gbit/s, the same "
        "messages sent after or during backward"
    )
    ratios = by_sending_s["after"] / by_sending_s["during"]
    return measured(ratios, note, grade="measured")
