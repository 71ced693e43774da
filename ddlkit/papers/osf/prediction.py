"""What the paper's formula says of an iteration under a plan, where it says anything."""

from __future__ import annotations

import math

from ddlkit.core.iteration import Iteration, Prediction
from ddlkit.core.units import parse_bytes
from ddlkit.papers.osf import of_workload, osf, osf_fused


def predict_osf(iteration: Iteration) -> Prediction:
    """The iteration by OSF (osf Eqs 3, 8-10; i as Eq 8's prose has it) or OSF_fusion (Eqs 11-16, printed).

    Of a plan without fusion, with one message, or with a constant buffer and no timeout. For other
    plans the paper has no formula: the times are NaN. The update comes after, as in our own model.
    """
    workload, cost = iteration.workload, iteration.cost
    sizes, backward_s = of_workload(workload)
    planner, _, argument = iteration.plan.planner.partition(":")

    def update(n_bytes: float) -> float:
        return float(cost(n_bytes)) if n_bytes > 0 else 0.0

    if planner == "none":
        factor = osf(workload.forward_s, backward_s, [update(size) for size in sizes], first=0)
    elif planner == "single" or (planner == "buffer" and ":" not in argument):
        capacity = math.inf if planner == "single" else parse_bytes(argument)
        factor = osf_fused(workload.forward_s, sizes, backward_s, update, capacity)
    else:
        factor = math.nan
    sent_s = float(iteration.communication_s.sum())
    alone_s = workload.compute_s - workload.update_s
    return Prediction(alone_s / factor + workload.update_s, workload.compute_s, sent_s)
