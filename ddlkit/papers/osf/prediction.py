"""What the paper's formula says of an iteration under a plan, where it says anything."""

from __future__ import annotations

import math

from ddlkit.core.cost import MessageCost
from ddlkit.core.iteration import Prediction, group_times
from ddlkit.core.plan import FusionPlan
from ddlkit.core.units import parse_bytes
from ddlkit.core.workload import Workload
from ddlkit.papers.osf import of_workload, osf, osf_fused


def predict_osf(workload: Workload, plan: FusionPlan, cost: MessageCost) -> Prediction:
    """The iteration by OSF (osf Eqs 3, 8-10; i as Eq 8's prose has it) or OSF_fusion (Eqs 11-16, printed).

    Of a plan without fusion, with one message, or with a constant buffer and no timeout. For other
    plans the paper has no formula: the times are NaN. The update comes after, as in our own model.
    """
    communication_s = float(group_times(workload, plan, cost)[1].sum())
    sizes, backward_s = of_workload(workload)
    planner, _, argument = plan.planner.partition(":")

    def update(n_bytes: float) -> float:
        return float(cost(n_bytes)) if n_bytes > 0 else 0.0

    if planner == "none":
        factor = osf(workload.forward_s, backward_s, [update(size) for size in sizes], first=0)
    elif planner == "single" or (planner == "buffer" and ":" not in argument):
        capacity = math.inf if planner == "single" else parse_bytes(argument)
        factor = osf_fused(workload.forward_s, sizes, backward_s, update, capacity)
    else:
        factor = math.nan
    alone_s = workload.compute_s - workload.update_s
    return Prediction(alone_s / factor + workload.update_s, workload.compute_s, communication_s)
