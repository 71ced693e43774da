"""The cost of communication in distributed deep learning: measure, fit, predict, validate.

A step of training, on paper: three layers whose gradients become ready one after the other, last layer
first, and what a message costs. How long does the step take, and which gradients should travel together?

>>> from ddlkit import AlphaBeta, Workload, make_plan, predict
>>> workload = Workload.from_arrays(
...     forward_s=3.0, backward_s=[2.0, 2.0, 2.0], n_bytes=[100, 100, 100]
... )
>>> cost = AlphaBeta(alpha_s=1.5, beta_s_per_byte=0.02)
>>> for spec in ("none", "single", "exact"):
...     plan = make_plan(spec, workload, cost)
...     step = predict(workload, plan, cost)
...     print(spec, plan.ends, step.iteration_s, step.exposed_communication_s)
none (1, 2, 3) 15.5 6.5
single (3,) 16.5 7.5
exact (1, 3) 14.5 5.5

Names are imported when they are first asked for: importing ddlkit costs next to nothing.
"""

from importlib import import_module
from typing import Any

__version__ = "0.3.0"

_HOMES = {
    "AlphaBeta": "ddlkit.core.cost",
    "Calibration": "ddlkit.model",
    "Case": "ddlkit.core.case",
    "FusionPlan": "ddlkit.core.plan",
    "Iteration": "ddlkit.core.iteration",
    "LayerProfile": "ddlkit.core.workload",
    "Link": "ddlkit.core.link",
    "MessageCost": "ddlkit.core.cost",
    "Timeline": "ddlkit.core.timeline",
    "UserError": "ddlkit.core.errors",
    "Workload": "ddlkit.core.workload",
    "fit": "ddlkit.core.fit",
    "forecast": "ddlkit.model",
    "make_plan": "ddlkit.model",
    "predict": "ddlkit.core.iteration",
    "read_profile": "ddlkit.store",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ddlkit' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
