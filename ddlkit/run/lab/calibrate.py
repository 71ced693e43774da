"""What a message costs in the lab, under the scheduling that a replay has there.

The same threads and the same priority as in a replay: with more ranks than cores both decide how long
a small message takes, and a cost measured otherwise predicts another machine.
"""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from ddlkit.run.instruments.clock import Budget
from ddlkit.run.jobs.launch import launch
from ddlkit.run.lab.network import Lab
from ddlkit.run.lab.replay import choose_join
from ddlkit.run.measure.collectives import BUDGET, SIZES, CollectivesSettings, collectives_job

MESSAGES_PER_SAMPLE = 16  # small messages are posted together, as a replay posts its groups


def calibrate(
    lab: Lab,
    sizes: Sequence[int] = SIZES,
    *,
    collectives: Sequence[str] = ("all_reduce",),
    budget: Budget = BUDGET,
    in_flight: int = 1,
    tries: int = 1,
    timeout_s: float = 600.0,
) -> pd.DataFrame:
    """Table ``collectives`` of all ranks of the lab; ``budget`` is for each size.

    in_flight : messages carried at once; tries : as for `ddlkit.run.measure.collectives.CollectivesSettings`

    Raises UserError when a value comes out wrong or a rank dies.
    """
    settings = CollectivesSettings(collectives, sizes, budget, MESSAGES_PER_SAMPLE, tries=tries)
    tables = launch(
        collectives_job,
        settings,
        ranks=lab.ranks,
        place=lab,
        join=choose_join(in_flight),
        timeout_s=timeout_s,
    )
    return tables["collectives"]
