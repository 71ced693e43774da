"""The cost of communication in distributed deep learning: measure, fit, predict, validate.

The names of this package, grouped by their purpose:

* workload: ``Workload``, ``LayerProfile``. What one iteration computes.
* cost: ``AlphaBeta``, ``Table``, ``Piecewise``, ``Segments``, ``Link``. What messages cost.
* fit: ``fit``, ``Fit``, ``Calibration``. From measured messages to a cost.
* plan: ``make_plan``, ``FusionPlan``, ``exact``. Which gradients share a message.
* predict: ``predict``, ``forecast``, ``Iteration``. How long an iteration takes.
* advise: ``Advice``, ``Option``, ``Gain``. Which buckets a training should use.
* explain: ``explain``, ``Explanation``. Where the time of a traced training goes.
* measure: ``profile_layers``, ``measure_model``, ``launch``. Timings on this machine.
* read: ``read_profile``, ``read_bytes_seconds``, ``import_file``. Files, also of others.

``ddlkit.GROUPS`` lists all names by group. A name is imported when it is first asked for, so
that importing ddlkit itself takes a moment. What measures needs PyTorch.

Examples
--------
A step of training, on paper: three layers whose gradients become ready one after the other, the
last layer first, and the cost of a message. How long does the step take, and which gradients
should travel together?

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
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

# Editors and type checkers read these imports, which do not run. They repeat _MODULES below.
if TYPE_CHECKING:
    from ddlkit.core.case import Case as Case
    from ddlkit.core.cost import AlphaBeta as AlphaBeta
    from ddlkit.core.cost import MessageCost as MessageCost
    from ddlkit.core.cost import Piecewise as Piecewise
    from ddlkit.core.cost import Segments as Segments
    from ddlkit.core.cost import Table as Table
    from ddlkit.core.errors import UserError as UserError
    from ddlkit.core.fit import Fit as Fit
    from ddlkit.core.fit import fit as fit
    from ddlkit.core.fit import held_out_errors as held_out_errors
    from ddlkit.core.fit import interval as interval
    from ddlkit.core.iteration import Iteration as Iteration
    from ddlkit.core.iteration import Prediction as Prediction
    from ddlkit.core.iteration import no_overlap as no_overlap
    from ddlkit.core.iteration import perfect_overlap as perfect_overlap
    from ddlkit.core.iteration import predict as predict
    from ddlkit.core.link import Link as Link
    from ddlkit.core.plan import FusionPlan as FusionPlan
    from ddlkit.core.plan import buffer as buffer
    from ddlkit.core.plan import ddp as ddp
    from ddlkit.core.plan import exact as exact
    from ddlkit.core.plan import make_plan as make_plan
    from ddlkit.core.plan import mg_wfbp as mg_wfbp
    from ddlkit.core.plan import none as none
    from ddlkit.core.plan import single as single
    from ddlkit.core.timeline import Timeline as Timeline
    from ddlkit.core.workload import LayerProfile as LayerProfile
    from ddlkit.core.workload import Workload as Workload
    from ddlkit.formats import Imported as Imported
    from ddlkit.formats import ImportOptions as ImportOptions
    from ddlkit.formats import import_file as import_file
    from ddlkit.formats import read_plan as read_plan
    from ddlkit.formats import save_profile as save_profile
    from ddlkit.formats.kernel_sums import read_kernel_sums as read_kernel_sums
    from ddlkit.formats.messages import read_bytes_seconds as read_bytes_seconds
    from ddlkit.formats.node_tables import read_node_tables as read_node_tables
    from ddlkit.formats.steps import read_steps as read_steps
    from ddlkit.jobs.launch import launch as launch
    from ddlkit.measure.advise import measure_model as measure_model
    from ddlkit.measure.collectives import CollectivesSettings as CollectivesSettings
    from ddlkit.measure.copies import measure_copies as measure_copies
    from ddlkit.measure.layers import profile_layers as profile_layers
    from ddlkit.measure.layers import profile_training as profile_training
    from ddlkit.measure.training import TrainingSettings as TrainingSettings
    from ddlkit.model import Calibration as Calibration
    from ddlkit.model import Communication as Communication
    from ddlkit.model import Forecast as Forecast
    from ddlkit.model import forecast as forecast
    from ddlkit.model.advice import Advice as Advice
    from ddlkit.model.advice import Gain as Gain
    from ddlkit.model.advice import Option as Option
    from ddlkit.model.advice import measured_gain as measured_gain
    from ddlkit.model.explanation import Cause as Cause
    from ddlkit.model.explanation import Explanation as Explanation
    from ddlkit.model.explanation import Remedy as Remedy
    from ddlkit.model.explanation import explain as explain
    from ddlkit.model.scaling import Scaling as Scaling
    from ddlkit.model.scaling import scale as scale
    from ddlkit.store import load_table as load_table
    from ddlkit.store import read_profile as read_profile

__version__ = "0.3.0"

_MODULES = {
    "workload": {
        "Workload": "ddlkit.core.workload",
        "LayerProfile": "ddlkit.core.workload",
    },
    "cost": {
        "MessageCost": "ddlkit.core.cost",
        "AlphaBeta": "ddlkit.core.cost",
        "Table": "ddlkit.core.cost",
        "Piecewise": "ddlkit.core.cost",
        "Segments": "ddlkit.core.cost",
        "Link": "ddlkit.core.link",
    },
    "fit": {
        "fit": "ddlkit.core.fit",
        "held_out_errors": "ddlkit.core.fit",
        "interval": "ddlkit.core.fit",
        "Fit": "ddlkit.core.fit",
        "Calibration": "ddlkit.model",
        "Communication": "ddlkit.model",
    },
    "plan": {
        "make_plan": "ddlkit.core.plan",
        "none": "ddlkit.core.plan",
        "single": "ddlkit.core.plan",
        "buffer": "ddlkit.core.plan",
        "ddp": "ddlkit.core.plan",
        "mg_wfbp": "ddlkit.core.plan",
        "exact": "ddlkit.core.plan",
        "FusionPlan": "ddlkit.core.plan",
    },
    "predict": {
        "predict": "ddlkit.core.iteration",
        "forecast": "ddlkit.model",
        "scale": "ddlkit.model.scaling",
        "no_overlap": "ddlkit.core.iteration",
        "perfect_overlap": "ddlkit.core.iteration",
        "Iteration": "ddlkit.core.iteration",
        "Prediction": "ddlkit.core.iteration",
        "Forecast": "ddlkit.model",
        "Scaling": "ddlkit.model.scaling",
        "Case": "ddlkit.core.case",
        "Timeline": "ddlkit.core.timeline",
    },
    "advise": {
        "measured_gain": "ddlkit.model.advice",
        "Advice": "ddlkit.model.advice",
        "Option": "ddlkit.model.advice",
        "Gain": "ddlkit.model.advice",
    },
    "explain": {
        "explain": "ddlkit.model.explanation",
        "Explanation": "ddlkit.model.explanation",
        "Cause": "ddlkit.model.explanation",
        "Remedy": "ddlkit.model.explanation",
    },
    "measure": {
        "profile_layers": "ddlkit.measure.layers",
        "profile_training": "ddlkit.measure.layers",
        "measure_copies": "ddlkit.measure.copies",
        "measure_model": "ddlkit.measure.advise",
        "launch": "ddlkit.jobs.launch",
        "CollectivesSettings": "ddlkit.measure.collectives",
        "TrainingSettings": "ddlkit.measure.training",
    },
    "read": {
        "read_profile": "ddlkit.store",
        "read_bytes_seconds": "ddlkit.formats.messages",
        "read_steps": "ddlkit.formats.steps",
        "read_node_tables": "ddlkit.formats.node_tables",
        "read_kernel_sums": "ddlkit.formats.kernel_sums",
        "import_file": "ddlkit.formats",
        "read_plan": "ddlkit.formats",
        "save_profile": "ddlkit.formats",
        "load_table": "ddlkit.store",
        "ImportOptions": "ddlkit.formats",
        "Imported": "ddlkit.formats",
        "UserError": "ddlkit.core.errors",
    },
}
"""The module of each public name, by group."""

GROUPS = {group: tuple(modules) for group, modules in _MODULES.items()}
"""The public names by their purpose, as the reference of the site groups them."""


def _has_torch() -> bool:
    """Return whether PyTorch is installed, without importing it."""
    try:
        return find_spec("torch") is not None
    except ValueError:
        # `find_spec` raises this for an imported module without a specification, such as one
        # that a test made.
        return True


def _public_names() -> list[str]:
    """Return the names in `GROUPS` that can be imported here.

    Where PyTorch is absent, `from ddlkit import *` and help(ddlkit) must not ask for names
    that need it.
    """
    groups = dict(GROUPS)
    if not _has_torch():
        del groups["measure"]
    return [name for names in groups.values() for name in names]


__all__ = _public_names()


# Otherwise type checkers would accept any name.
if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Return a public name, whose module is imported now.

        Python calls this function for names that the package does not have itself.
        """
        for modules in _MODULES.values():
            if name in modules:
                return getattr(import_module(modules[name]), name)
        raise AttributeError(f"module 'ddlkit' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return all names of the package for `dir`, also those not imported yet."""
    return sorted([*globals(), *__all__])
