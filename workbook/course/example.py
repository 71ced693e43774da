"""The running example of the course: GoogLeNet on four workers over a link of 1 Gbit/s.

Notebooks 00, 03, 04, 05 and 13 and the page on which a reader moves buckets use the
same layers, the same messages and therefore the same numbers. All of them come from the
recording that teaches.
"""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from ddlkit.core.cost import MessageCost
from ddlkit.core.iteration import predict
from ddlkit.core.workload import Workload
from ddlkit.model import Calibration, make_plan
from workbook.common import source

NETWORK = "googlenet"
LINK = "lab:1gbit"
WORKERS = 4
PLANS = ("none", "ddp", "buffer:4MB", "single", "exact")
PROFILED = "as profiled"
RESCALED = "as rescaled for replays"


@dataclass(frozen=True)
class Example:
    """The layers of the running example, and what its messages cost.

    Attributes
    ----------
    profiled : Workload
        The network's layers as one worker was timed.
    rescaled : Workload
        The same layers, with all compute times multiplied by one factor. Replays sleep
        for these times. The factor makes compute take about as long as one message of
        all gradients, because there bucket plans matter most.
    cost : MessageCost
        The time of an all-reduce among four workers over the link, as a table of
        measured medians.
    """

    profiled: Workload
    rescaled: Workload
    cost: MessageCost

    def table(self) -> pd.DataFrame:
        """Return the predicted iteration of each plan, for compute as profiled and as rescaled.

        Returns
        -------
        DataFrame
            One row for each pair of compute and plan. The columns are ``compute``
            (PROFILED or RESCALED), ``plan`` (one of PLANS), ``messages`` (their number),
            ``compute_s``, ``iteration_s``, ``exposed_s`` (communication that compute does
            not hide) and ``over_best`` (the iteration divided by that of the best plan).
            Times are in seconds.
        """
        rows = []
        for compute, workload in ((PROFILED, self.profiled), (RESCALED, self.rescaled)):
            # "exact" makes the plan with the shortest predicted iteration.
            best_plan = make_plan("exact", workload, self.cost)
            best_s = predict(workload, best_plan, self.cost).iteration_s
            for name in PLANS:
                plan = make_plan(name, workload, self.cost)
                prediction = predict(workload, plan, self.cost)
                rows.append(
                    {
                        "compute": compute,
                        "plan": name,
                        # A plan lists where the gradients of each message end.
                        "messages": len(plan.ends),
                        "compute_s": float(workload.compute_s),
                        "iteration_s": float(prediction.iteration_s),
                        "exposed_s": float(prediction.exposed_communication_s),
                        "over_best": float(prediction.iteration_s / best_s),
                    }
                )
        return pd.DataFrame(rows)

    def iteration_s(self, plan: str, compute: str = PROFILED) -> float:
        """Return the predicted iteration of one plan of `table`, in seconds.

        ``plan`` is one of PLANS, and ``compute`` is PROFILED or RESCALED.

        Raises
        ------
        KeyError
            If the table has no such plan or no such compute.
        """
        rows = self.table().set_index(["compute", "plan"])
        return float(rows.loc[(compute, plan), "iteration_s"])


def load() -> Example:
    """Return the running example, made from the recording that teaches.

    All lessons are made from this recording. Its layers were also rescaled, that is, all
    compute times were multiplied by one factor, for the campaign of replays source.BEST.

    Examples
    --------
    >>> example = load()
    >>> [round(1e3 * example.iteration_s(plan)) for plan in ("ddp", "exact")]  # milliseconds
    [694, 555]
    """
    recording = source.open_source()
    # Without draws, costs have no intervals, which the example does not need.
    calibration = Calibration.of(recording.table("collectives"), draws=0)
    campaign = source.open_campaign(name=source.BEST)
    # The second result has the replays themselves, of which only the layers are needed.
    rescaled, _ = source.as_replayed(campaign, NETWORK, LINK, WORKERS)
    return Example(
        profiled=recording.profile(NETWORK).workload(),
        rescaled=rescaled,
        cost=calibration.between(LINK, WORKERS).cost,
    )
