"""The commands that fit, predict and plan. None of them measures."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from ddlkit.cli.command import (
    JSON,
    OUTPUT,
    arg,
    choice,
    command,
    flag,
    group,
    is_numbers,
    show,
    whole_number,
)
from ddlkit.cli.inputs import (
    INPUTS,
    NOT_IN_THE_GRAPH,
    OPTIONAL_INPUTS,
    PLACE,
    PLAN_NAMES,
    PREDICTED,
    RANKS,
    SHARDED,
    TABLE,
    forecast_of,
    is_sharded,
    predict_sharded,
    print_warnings,
    read_communication,
)
from ddlkit.core import units
from ddlkit.core.errors import UserError

# ---------------------------------------------------------------- ddlkit fit

_FORMS = """The form of the cost: alpha_beta (a straight line), piecewise, segments,
chords, table, or auto (the form with the smallest error at sizes that it was not
fitted to). Some forms have variants, as in piecewise:45KB. [default: auto]"""


@command(
    "Fit the cost of a message to measured times.",
    *group(
        "input",
        arg(
            "file",
            type=Path,
            metavar="FILE",
            help="The times: a recorded table of collectives, a CSV with the columns "
            "bytes and seconds, or a benchmark's log.",
        ),
        arg(
            "--collective",
            metavar="NAME",
            help="The collective whose times are used, as in all_reduce or "
            "all_gather. It chooses rows of the file; if the file does not say, "
            "it states the collective. [default: as the file says, else "
            "all_reduce]",
        ),
        arg(
            "--link",
            metavar="NAME",
            help="For a recorded table: the link whose times are used, as in "
            "lab:1gbit. [default: the table's, if it has only one]",
        ),
        RANKS,
        PLACE,
        TABLE,
    ),
    *group(
        "fit",
        arg("--form", default="auto", help=_FORMS),
        flag(
            "--compare",
            "Print the errors of all forms at sizes that they were not fitted to, and "
            "draw the forms. Drawing needs the extra ddlkit[plot].",
        ),
    ),
    *group(
        OUTPUT,
        arg(
            "--draw",
            type=Path,
            metavar="FILE.png",
            help="With --compare: write the drawing into this file. [default: the "
            "name of FILE with -fits.png, in this directory]",
        ),
        JSON,
    ),
    example="ddlkit fit nccl-tests.log --json > cost.json",
)
def fit(arguments: argparse.Namespace) -> None:
    """Run the command ``ddlkit fit``."""
    import numpy as np

    from ddlkit.core import fit as fitting
    from ddlkit.formats import messages
    from ddlkit.model import fits

    if arguments.compare:
        from ddlkit.show import DRAWING, needs

        needs("--compare", DRAWING)
    sizes, seconds, facts = messages.read_bytes_seconds(
        arguments.file,
        collective=arguments.collective,
        link=arguments.link,
        ranks=arguments.ranks,
        place=arguments.place,
        table=arguments.table,
    )
    if arguments.compare:
        _compare(arguments, sizes, seconds, facts)
        return
    if arguments.draw:
        raise UserError(
            f"--draw {arguments.draw}: only the forms of --compare are drawn: give both"
        )
    try:
        fitted = fitting.fit(
            arguments.form,
            sizes,
            seconds,
            collective=facts.get("collective") or "all_reduce",
            workers=facts.get("ranks"),
            algorithm=facts.get("algorithm"),
        )
    except UserError as error:
        raise UserError(
            f"{arguments.file}, fitted by --form {arguments.form}: {error}"
        ) from error
    description = fitted.to_dict()
    # The form "auto" has been chosen by this error. For a form that a user names, the error
    # is still to be computed.
    if "median_abs_held_out_error" not in description["fit"]:
        errors = fitting.held_out_errors(fitted.form, sizes, seconds).errors
        # With too few sizes none can be held out.
        median = float(np.median(abs(errors))) if errors.size else None
        description["fit"]["median_abs_held_out_error"] = median
    measured = fits.Measured.of(sizes, facts.get("backend"), facts["source"])
    warnings = [*fits.several_populations(description["fit"])]
    description["fit"] |= measured._asdict()
    description["fit"] |= _place_if_known(facts)
    description["fit"]["warnings"] = warnings
    print_warnings(warnings)
    if arguments.json:
        show(description, as_json=True)
        return
    # What is nested, such as the draws, is for programs.
    for_a_person = {}
    for name, value in {**description, **description["fit"]}.items():
        is_nested = isinstance(value, (list, dict)) and not is_numbers(value)
        if not is_nested:
            for_a_person[name] = value
    show(for_a_person, as_json=False)


def _place_if_known(facts: dict[str, Any]) -> dict[str, Any]:
    """Return ``place`` if the facts of a log have it, and nothing otherwise.

    nccl-tests times each size out of place and in place. ``place`` says which of the two
    times were used.
    """
    return {"place": facts["place"]} if "place" in facts else {}


def _compare(
    arguments: argparse.Namespace, sizes: Any, seconds: Any, facts: dict[str, Any]
) -> None:
    """Print the errors of each form, and draw the forms."""
    from ddlkit.model import fits
    from ddlkit.show import write_cost_forms
    from ddlkit.store import own_output

    further_forms = [] if arguments.form == "auto" else [arguments.form]
    compared = fits.compare(
        sizes,
        seconds,
        *further_forms,
        collective=facts.get("collective") or "all_reduce",
        workers=facts.get("ranks"),
        algorithm=facts.get("algorithm"),
    )
    stem = arguments.file.name.partition(".")[0]
    drawing = arguments.draw or Path(f"{stem}-fits.png")
    own_output(drawing, arguments.file)
    write_cost_forms(compared.fits, compared.chosen, drawing)
    result = {
        "chosen": compared.chosen,
        "why": compared.why,
        "drawn": str(drawing),
        **_place_if_known(facts),
    }
    if arguments.json:
        result["forms"] = json.loads(compared.table.to_json(orient="index"))
    else:
        table = compared.table.rename(columns={"sizes": "held out"}).rename_axis(None)
        print(table.to_string(float_format="{:.2%}".format, na_rep="-"))
        print()
    show(result, arguments.json)


# ---------------------------------------------------------------- ddlkit predict, ddlkit plan

PLAN = arg(
    "--plan",
    default="ddp",
    help=f"Which gradients share a message: {PLAN_NAMES} Or a file *.json that ddlkit "
    "plan --json wrote. [default: ddp]",
)
PLANNER = arg(
    "--planner",
    default="exact",
    help=f"How the plan is chosen: {PLAN_NAMES} [default: exact]",
)


@command(
    "Predict the time of a training iteration from a layer profile and the cost of "
    "messages.",
    *group("plan", PLAN),
    *INPUTS,
    *SHARDED,
    example="ddlkit predict --profile profile.csv --cost cost.json --plan ddp",
)
def predict(arguments: argparse.Namespace) -> None:
    """Run the command ``ddlkit predict``."""
    if is_sharded(arguments):
        resharded, kept_whole = predict_sharded(arguments, arguments.units)
        show(kept_whole if arguments.no_reshard else resharded, arguments.json)
        return
    forecast, warnings, *_ = forecast_of(arguments, arguments.plan)
    iteration = forecast.iteration
    interval_s = forecast.interval_s
    knows_contention = arguments.slowdown or arguments.copies
    result = {
        **{name: getattr(forecast.prediction, name) for name in PREDICTED},
        "interval_s": list(interval_s) if interval_s else None,
        "level": arguments.level,
        "plan": arguments.plan,
        "messages": len(iteration.plan.ends),
        "workers": iteration.cost.workers,
        "contention": _contention(iteration) if knows_contention else None,
    }
    if arguments.density:
        selection_s = iteration.cost.selection_s(iteration.group_bytes)
        result["selection_s"] = float(selection_s.sum())
        result["selection_form"] = iteration.cost.selecting.form
    # A person has read the warnings on standard error.
    if arguments.json:
        result["warnings"] = warnings
    show(result, arguments.json)


def _contention(iteration: Any) -> dict[str, float]:
    """Return the assumed slowdowns, as medians over the messages, and the costs of buckets."""
    import numpy as np

    link = iteration.link
    return {
        "slowdown": float(np.median(link.slowdown)),
        "message_slowdown": float(np.median(link.message_slowdown)),
        "copy_s_per_byte": iteration.copy_s_per_byte,
        "bucket_s": iteration.bucket_s,
    }


@command(
    "Choose which gradients share a message. The plan is made for messages that are "
    "sent one after the other.",
    *group("plan", PLANNER),
    *INPUTS,
    example="ddlkit plan --profile profile.csv --cost cost.json --planner exact "
    "--json > plan.json",
)
def plan(arguments: argparse.Namespace) -> None:
    """Run the command ``ddlkit plan``."""
    forecast, warnings, *_ = forecast_of(arguments, arguments.planner)
    iteration = forecast.iteration
    iteration_s = forecast.prediction.iteration_s
    chosen = iteration.plan
    proof = {}
    if chosen.least_s is not None:
        proof["no_plan_below_s"] = chosen.least_s
        if arguments.slowdown or arguments.copies:
            warning = "the plan exact is proven best without contention only: try "
            "--planner search"
            warnings.append(warning)
            print_warnings([warning])
    if arguments.json:
        description = chosen.to_dict(iteration_s)
        show({**description, **proof, "warnings": warnings}, as_json=True)
        return
    sizes = iteration.group_bytes
    tensors = iteration.workload.tensor
    facts = {
        "planner": chosen.planner,
        "messages": len(sizes),
        "iteration_s": iteration_s,
    }
    show({**facts, **proof}, as_json=False)
    for message, gradients in enumerate(chosen.members):
        first = tensors[gradients[0]]
        last = tensors[gradients[-1]]
        size = units.format_bytes(sizes[message])
        print(f"  {message:>3}  {size:>10}  {first} .. {last}")


# ---------------------------------------------------------------- ddlkit export


@command(
    "Write a plan or a cost in a form that PyTorch reads.",
    *group(
        "what is written",
        choice(
            "--to",
            "ddp",
            "inductor",
            "profile",
            required=True,
            help="ddp writes the buckets of a plan as JSON, with the "
            "bucket_cap_mb_list of DistributedDataParallel. inductor writes a "
            "Python module with the function estimate, for torch.compile's "
            "custom_runtime_estimation. profile writes a trace for its "
            "profile_guided_estimations_profile_path.",
        ),
        arg(
            "--torch",
            metavar="VERSION",
            help="The release of PyTorch that reads the file. [default: the installed "
            "one]",
        ),
    ),
    *group(
        "plan",
        PLANNER._replace(
            options={
                **PLANNER.options,
                "help": f"With --to ddp: how the plan is chosen: {PLAN_NAMES} "
                "[default: exact]",
            }
        ),
    ),
    *group(
        "messages",
        arg(
            "given",
            type=Path,
            nargs="?",
            metavar="COST",
            help="The cost of a message (JSON), as with --cost.",
        ),
    ),
    *OPTIONAL_INPUTS,
    example="ddlkit export --to inductor cost.json > estimate.py",
)
def export(arguments: argparse.Namespace) -> None:
    """Run the command ``ddlkit export``."""
    from ddlkit.formats import export as writers

    arguments.cost = arguments.given or arguments.cost
    version = writers.tested(arguments.to, arguments.torch)
    if arguments.to == "ddp":
        if arguments.profile is None:
            raise UserError(
                "--to ddp needs --profile: give the layers whose gradients are sent"
            )
        forecast, *_ = forecast_of(arguments, arguments.planner)
        print(writers.ddp(forecast.iteration, version))
        return
    writers_of_costs = {"inductor": writers.inductor, "profile": writers.profile}
    write = writers_of_costs[arguments.to]
    warnings: list[str] = []
    communication, _ = read_communication(arguments, warnings)
    print(write(communication.cost, version))
    print_warnings(warnings)


# ---------------------------------------------------------------- ddlkit what-if

ITERATIONS = 10
"""How many iterations of training are simulated."""


@command(
    "Change tasks in the graph of a training, and see how long an iteration then "
    "takes and what limits it. The graph is that of dag Fig 1: reads, copies, layers, "
    "messages and updates.",
    *group(
        "changes (each may be repeated)",
        arg(
            "--scale",
            action="append",
            default=[],
            metavar="WHAT=FACTOR",
            help="Multiply the times of some tasks by a factor, as in all_reduce=0.5. "
            "WHAT is a kind of task, a resource, layer:NUMBER or rank:NUMBER.",
        ),
        arg(
            "--straggler",
            action="append",
            default=[],
            metavar="RANK:FACTOR",
            help="Multiply all compute times of one rank by a factor, as in 3:1.2.",
        ),
        arg(
            "--layer",
            action="append",
            default=[],
            metavar="NAME=FACTOR",
            help="Multiply the time and the bytes of one layer by a factor, as in "
            "fc=0.5.",
        ),
        arg(
            "--gpus",
            type=whole_number,
            metavar="N",
            help="The number of GPUs after the change. The cost must have a form that "
            "can be taken to another number of workers. [default: as before]",
        ),
    ),
    *group(
        "the training",
        arg(
            "--strategy",
            metavar="NAME",
            default="Caffe-MPI",
            help="The framework whose order of tasks is simulated: Caffe-MPI, CNTK, "
            "MXNet or TensorFlow. [default: Caffe-MPI]",
        ),
        arg(
            "--gpus-per-machine",
            type=whole_number,
            metavar="N",
            default=1,
            help="The number of GPUs that share a machine and its disk. [default: 1]",
        ),
        arg(
            "--inputs",
            type=Path,
            metavar="TABLE",
            help="A table of python -m workbook record input: the times of reading "
            "and decoding the input. [default: no input is read]",
        ),
    ),
    *group("plan", PLAN),
    *INPUTS,
    example="ddlkit what-if --profile profile.csv --cost cost.json --scale "
    "all_reduce=0.5",
)
def what_if(arguments: argparse.Namespace) -> None:
    """Run the command ``ddlkit what-if``."""
    from ddlkit.core.iteration import Iteration
    from ddlkit.core.taskgraph import changed, described, schedule

    for name, default in NOT_IN_THE_GRAPH.items():
        if getattr(arguments, name) != default:
            option = "--" + name.replace("_", "-")
            raise UserError(f"{option}: the graph has no task for it: leave it out")
    changes = [_change(text, "=") for text in arguments.scale]
    for text in arguments.straggler:
        rank, factor = _change(text, ":")
        changes.append((f"rank:{rank}", factor))
    layer_factors = dict(_change(text, "=") for text in arguments.layer)

    forecast, warnings, profile, _ = forecast_of(arguments, arguments.plan)
    plan = forecast.iteration.plan
    cost = forecast.iteration.cost
    gpus = cost.workers or 1
    gpus_after = gpus if arguments.gpus is None else arguments.gpus
    if gpus_after < 1:
        raise UserError(f"--gpus {gpus_after}: there must be at least one")
    cost_after = cost if gpus_after == gpus else cost.at_workers(gpus_after)
    profile_after = profile.resized(layer_factors)
    workload_after = profile_after.workload().scaled(arguments.dilation)
    before = Iteration(forecast.iteration.workload, plan, cost)
    after = Iteration(workload_after, plan, cost_after)

    graph = _graph(arguments, before, profile)
    graph_after = changed(_graph(arguments, after, profile_after), changes)
    compared = described(schedule(graph), schedule(graph_after))
    result = {"tasks": graph.n, "longest_path_s": graph.longest_path_s, **compared}
    # `compared` has iteration_s and iteration_s_after. Other facts before and after the change
    # get names of the same kind.
    for suffix, gpu_count in (("", gpus), ("_after", gpus_after)):
        samples = gpu_count * profile.batch
        result[f"gpus{suffix}"] = gpu_count
        result[f"samples_per_s{suffix}"] = samples / result[f"iteration_s{suffix}"]
    if arguments.json:
        result["warnings"] = warnings
    show(result, arguments.json)


def _graph(arguments: argparse.Namespace, iteration: Any, profile: Any) -> Any:
    """Return the tasks of some iterations of training."""
    from ddlkit.core.strategies import strategy
    from ddlkit.core.taskgraph import Gpus, of_iteration
    from ddlkit.store.readers import read_inputs

    input_s: dict[str, float] = {}
    if arguments.inputs:
        input_s = read_inputs(arguments.inputs, profile.batch)
    workers = iteration.cost.workers or 1
    gpus = Gpus.of(workers, arguments.gpus_per_machine, shared_disk=False)
    return of_iteration(
        iteration,
        strategy(arguments.strategy),
        gpus,
        forward_s=profile.forward_s * arguments.dilation,
        iterations=ITERATIONS,
        io_s=input_s.get("io_s", 0.0),
        decode_s=input_s.get("decode_s", 0.0),
        h2d_s=input_s.get("h2d_s", 0.0),
    )


def _change(text: str, separator: str) -> tuple[str, float]:
    """Return what is changed, and the factor on its time."""
    changed, _, factor = text.rpartition(separator)
    # Without a separator the whole text counts as the factor. It is then no number, or
    # nothing says what to change.
    try:
        if not changed:
            raise ValueError
        return changed, float(factor)
    except ValueError:
        raise UserError(
            f"{text!r}: write all_reduce=0.5 to scale, 3:1.2 for a straggler, fc=0.5 "
            "for a layer"
        ) from None
