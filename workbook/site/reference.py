"""Which functions and classes of ddlkit the reference of the site explains, by what a user wants to do."""

from __future__ import annotations

from typing import NamedTuple


class Group(NamedTuple):
    """One page of the reference.

    classes, functions : dotted names, as they are imported
    """

    title: str
    summary: str
    classes: tuple[str, ...] = ()
    functions: tuple[str, ...] = ()


GROUPS = {
    "workload": Group(
        "Workloads",
        "What one training iteration computes, and when each gradient is ready.",
        classes=("ddlkit.Workload", "ddlkit.LayerProfile"),
    ),
    "cost": Group(
        "Costs of messages",
        "How long a message of a given size takes, and what messages on one link share.",
        classes=(
            "ddlkit.MessageCost",
            "ddlkit.AlphaBeta",
            "ddlkit.core.cost.Table",
            "ddlkit.core.cost.Piecewise",
            "ddlkit.core.cost.Segments",
            "ddlkit.Link",
        ),
    ),
    "fit": Group(
        "Fitting",
        "From measured messages to a cost, with its uncertainty.",
        classes=(
            "ddlkit.core.fit.Fit",
            "ddlkit.Calibration",
            "ddlkit.model.Communication",
        ),
        functions=(
            "ddlkit.fit",
            "ddlkit.core.fit.held_out_errors",
            "ddlkit.core.fit.interval",
        ),
    ),
    "plan": Group(
        "Plans",
        "Which gradients travel in one message.",
        classes=("ddlkit.FusionPlan",),
        functions=(
            "ddlkit.make_plan",
            "ddlkit.core.plan.none",
            "ddlkit.core.plan.single",
            "ddlkit.core.plan.buffer",
            "ddlkit.core.plan.ddp",
            "ddlkit.core.plan.mg_wfbp",
            "ddlkit.core.plan.exact",
        ),
    ),
    "predict": Group(
        "Predictions",
        "How long an iteration takes, how much communication is exposed, and how sure that is.",
        classes=(
            "ddlkit.Iteration",
            "ddlkit.core.iteration.Prediction",
            "ddlkit.model.Forecast",
            "ddlkit.Case",
            "ddlkit.Timeline",
        ),
        functions=(
            "ddlkit.predict",
            "ddlkit.forecast",
            "ddlkit.core.iteration.no_overlap",
            "ddlkit.core.iteration.perfect_overlap",
        ),
    ),
    "advise": Group(
        "Advice",
        "Which buckets a training should use, and what they gain.",
        classes=(
            "ddlkit.model.advice.Advice",
            "ddlkit.model.advice.Option",
            "ddlkit.model.advice.Gain",
        ),
        functions=("ddlkit.model.advice.measured_gain",),
    ),
    "measure": Group(
        "Measurements",
        "Layers, collectives and training, timed on this machine. These modules need PyTorch.",
        classes=(
            "ddlkit.measure.collectives.CollectivesSettings",
            "ddlkit.measure.training.TrainingSettings",
        ),
        functions=(
            "ddlkit.measure.layers.profile_layers",
            "ddlkit.measure.layers.profile_training",
            "ddlkit.measure.copies.measure_copies",
            "ddlkit.measure.advise.measure_model",
            "ddlkit.jobs.launch.launch",
        ),
    ),
    "read": Group(
        "Files",
        "Profiles, logs and plans that ddlkit or another program wrote.",
        classes=(
            "ddlkit.formats.ImportOptions",
            "ddlkit.formats.Imported",
            "ddlkit.UserError",
        ),
        functions=(
            "ddlkit.read_profile",
            "ddlkit.formats.import_file",
            "ddlkit.formats.read_plan",
            "ddlkit.formats.save_profile",
            "ddlkit.store.load_table",
        ),
    ),
}
"""The pages of the reference, in the order in which a user needs them."""
