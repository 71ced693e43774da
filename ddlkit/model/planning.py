"""Plans by name, whoever's planner it is."""

from __future__ import annotations

from ddlkit import papers
from ddlkit.core import plan
from ddlkit.core.cost import MessageCost
from ddlkit.core.plan import PLANNERS, FusionPlan, Planner
from ddlkit.core.workload import Workload


def planners() -> dict[str, Planner]:
    """Every planner by its name: ours, and those of the papers."""
    papers.load()
    return PLANNERS


def make_plan(spec: str, workload: Workload, cost: MessageCost | None = None) -> FusionPlan:
    """The plan that ``spec`` names, by our own planners or by those of the papers.

    Planners see what a message costs, not what messages share: they plan as if messages went one after
    the other over a link that saves nothing while it rests. Predict what comes out with the link.

    Raises UserError for an unknown planner, or one that needs a cost when none is given.

    >>> toy = Workload.from_arrays(1.0, [1.0, 1.0, 1.0], [1_000_000, 3_000_000, 20_000_000])
    >>> make_plan("buffer:4MB", toy).ends
    (2, 3)
    """
    papers.load()
    return plan.make_plan(spec, workload, cost)
