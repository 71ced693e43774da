"""What a message costs in the lab, under the scheduling that a replay has there, and how near the wire.

The same threads and the same priority as in a replay: with more ranks than cores both decide how long
a small message takes, and a cost measured otherwise predicts another machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from ddlkit.core.bandwidth import bus_factor
from ddlkit.core.errors import UserError
from ddlkit.run.instruments.clock import Budget
from ddlkit.run.jobs.launch import launch
from ddlkit.run.lab.network import Lab
from ddlkit.run.lab.replay import replay_join
from ddlkit.run.measure.collectives import BUDGET, SIZES, CollectivesSettings, collectives_job

MESSAGES_PER_SAMPLE = 16  # small messages are posted together, as a replay posts its groups


def calibrate(
    lab: Lab,
    sizes: Sequence[int] = SIZES,
    *,
    collectives: Sequence[str] = ("all_reduce",),
    budget: Budget = BUDGET,
    raise_priority: bool = True,
    in_flight: int = 1,
    tries: int = 1,
    timeout_s: float = 600.0,
    out: Path | None = None,
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
        join=replay_join(raise_priority, in_flight),
        timeout_s=timeout_s,
        out=out,
    )
    return tables["collectives"]


def wire_efficiency(samples: pd.DataFrame) -> pd.DataFrame:
    """Columns collective, link, ranks, bytes, seconds (median), efficiency; one row a size.

    efficiency : time that the payload needs at the shaped rate over the time it took. Each link must
        carry ``bus_factor(collective, ranks)`` times the message in each direction. Sizes below the
        burst of the shaper (128 KiB at 1 Gbit/s) may exceed 1.

    Raises UserError for samples of a link that is not shaped.
    """
    if not (samples["link_bits_per_s"] > 0).all():
        raise UserError(
            "wire efficiency: the samples are of a link without a rate; measure in a lab"
        )
    keys = ["collective", "link", "link_bits_per_s", "ranks", "bytes"]
    table = samples.groupby(keys, sort=True)["seconds"].median().reset_index()
    on_the_wire = [
        bus_factor(collective, ranks)
        for collective, ranks in zip(table["collective"], table["ranks"], strict=True)
    ]
    ideal_s = table["bytes"] * on_the_wire * 8 / table["link_bits_per_s"]
    return table.assign(efficiency=ideal_s / table["seconds"]).drop(columns="link_bits_per_s")
