"""The commands that fit, predict and plan. None of them measures."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddlkit.cli.command import (
    JSON,
    OUTPUT,
    Argument,
    arg,
    choice,
    collective_in_logs,
    command,
    flag,
    group,
    is_collection_of_numbers,
    parsed_name,
    refuse_given,
    show,
    whole_number,
    with_help,
)
from ddlkit.cli.inputs import (
    INPUTS,
    LEVEL,
    MESSAGES,
    NO_INTERVAL,
    NOT_IN_THE_GRAPH,
    OPTIONAL_INPUTS,
    PLACE,
    PLAN_NAMES,
    PLAN_NAMES_OF_WHAT_IF,
    PREDICTED,
    RANKS,
    SHARDED,
    TABLE,
    advice_to_assume_ring,
    as_ring,
    assume_ring,
    assumption,
    forecast_of,
    is_perhaps_of_ring,
    is_sharded,
    measured_between_gpus,
    predict_sharded,
    print_remarks,
    print_warnings,
    read_communication,
    refuse_link_of_foreign_files,
    refuse_other_than_recorded,
)
from ddlkit.core import units
from ddlkit.core.errors import UserError, shown

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from pandas import DataFrame

# ---------------------------------------------------------------- ddlkit fit

FORMS_IN_WORDS = {
    "alpha_beta": "a straight line",
    "piecewise": "a curve in the logarithm of the size below a limit, and a straight "
    "line above it",
    "segments": "several straight lines",
    "chords": "straight lines between the measured sizes",
    "table": "straight lines in the logarithms of size and time between the measured "
    "sizes",
}
"""What each form of a cost is, as a person reads it."""

_LISTED_FORMS = ", ".join(f"{form} ({text})" for form, text in FORMS_IN_WORDS.items())
_FORMS = f"""The form of the cost: {_LISTED_FORMS}, or auto (the simplest form whose error
at sizes left out of its fit is close to the smallest error; the errors of chords and table count a
quarter, because they pass through every size, and a size left out doubles the distance between its
neighbours). The limit of piecewise may be given, as in piecewise:45KB. [default: auto]"""


MESSAGE_FORMATS = """a CSV with columns bytes, seconds, a log of nccl-tests, rccl-tests,
OSU or Intel MPI Benchmarks, JSON of nccl-tests -J, CSV of rccl-tests, JSON lines of
NCCL Inspector, a table of all_reduce_bench.py, a log of DeepSpeed's communication
benchmark, a log of Ascend's hccl_test, or a log of nccom-test of AWS Neuron"""


@command(
    "Fit the cost of a message to measured times.",
    *group(
        "input",
        arg(
            "file",
            type=Path,
            metavar="FILE",
            help=f"The times: a recorded table of collectives, {MESSAGE_FORMATS}.",
        ),
        arg(
            "--collective",
            type=collective_in_logs,
            metavar="NAME",
            help="The collective whose times are used, as in all_reduce or "
            "all_gather. It chooses rows of the file; if the file does not say, "
            "it states the collective. [default: the file's, if it has only one, "
            "or all_reduce if it names none]",
        ),
        arg(
            "--link",
            metavar="NAME",
            help="For a recorded table: the link whose times are used, as in "
            "lab:1gbit. The column link of the table has the names. [default: the "
            "table's, if it has only one]",
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
    from ddlkit.formats import messages

    _refuse_wrong_comparison(arguments)
    refuse_link_of_foreign_files(arguments.link, [arguments.file])
    # `facts` has what is known of the messages, such as their collective, if the file or an
    # option says it.
    sizes, seconds, facts = messages.read_bytes_seconds(
        arguments.file,
        collective=arguments.collective,
        link=arguments.link,
        ranks=arguments.ranks,
        place=arguments.place,
        table=arguments.table,
    )
    if arguments.compare:
        _compare_forms(arguments, sizes, seconds, facts)
        return
    fitted = _fitted(arguments, sizes, seconds, facts)
    description = _description_of_fit(fitted, sizes, seconds, facts)
    print_warnings(description["fit"]["warnings"])
    if arguments.json:
        show(description, as_json=True)
    else:
        show(_fit_in_words(description, fitted, facts), as_json=False)


def _fitted(
    arguments: argparse.Namespace,
    sizes: NDArray[np.int64],
    seconds: NDArray[np.float64],
    facts: dict[str, Any],
) -> Any:
    """Return the `Fit` of the form of --form to message times. Errors name file and form.

    ``sizes`` (bytes) and ``seconds`` have shape (n,), for n messages. ``facts`` are what
    `read_bytes_seconds` knows of the messages.
    """
    from ddlkit.core import fit as fitting

    try:
        return fitting.fit(
            arguments.form,
            sizes,
            seconds,
            # By default the messages count as all-reduces, which send gradients.
            collective=facts.get("collective") or "all_reduce",
            workers=facts.get("ranks"),
            algorithm=facts.get("algorithm"),
        )
    except UserError as error:
        raise UserError(
            f"{arguments.file}, fitted by --form {arguments.form}: {error}"
        ) from error


def _fit_in_words(
    description: dict[str, Any], fitted: Any, facts: dict[str, Any]
) -> dict[str, Any]:
    """Return the entries of a fitted cost that a person reads.

    ``description`` is what `_description_of_fit` returns for ``fitted`` and ``facts``. Its
    entries on the fit are put among the others.
    """
    readable = _without_nested({**description, **description["fit"]})
    if not facts.get("collective"):
        readable["collective"] += " (assumed, because the file names none)"
    # `fitted.form` may have a limit, as in "piecewise:45KB". `cost.form` has none.
    readable["form"] = f"{fitted.form} ({FORMS_IN_WORDS[fitted.cost.form]})"
    return readable


def _description_of_fit(
    fitted: Any,
    sizes: NDArray[np.int64],
    seconds: NDArray[np.float64],
    facts: dict[str, Any],
) -> dict[str, Any]:
    """Return a fitted cost as a dictionary, whose entry "fit" says how good the fit is.

    ``sizes`` (bytes) and ``seconds`` have shape (n,), for n messages. ``facts`` are what
    `read_bytes_seconds` knows of the messages, such as their source, the format of the file.
    """
    from ddlkit.model import fits

    description: dict[str, Any] = fitted.to_dict()
    about_fit = description["fit"]
    # `fit` computes this error to choose a form for "auto", and the description then has
    # it. If the user names a form, the error is computed here.
    if "median_abs_held_out_error" not in about_fit:
        median_error = _median_held_out_error(fitted.form, sizes, seconds)
        about_fit["median_abs_held_out_error"] = median_error
    # The backend and the source tell between which devices the messages were sent.
    measured = fits.Measured.of(sizes, facts.get("backend"), facts["source"])
    # This warns if the cost was probably fitted to several kinds of messages.
    warnings = [*fits.several_populations(about_fit)]
    # A recorded table has no other unit than seconds.
    if facts["source"] != "recorded":
        warnings += fits.other_unit(sizes, seconds)
    # `strange_times` warns of times that do not depend on the size as usual.
    warnings += fits.strange_times(sizes, seconds, fitted.form)
    # `burst_left_out` warns if the link saves up a burst while it is idle, which this cost leaves
    # out. The name of the link is "" if it is not known.
    warnings += fits.burst_left_out(facts.get("link") or "")
    about_fit |= measured._asdict()
    about_fit |= _place_if_known(facts)
    about_fit["warnings"] = warnings
    return description


def _refuse_wrong_comparison(arguments: argparse.Namespace) -> None:
    """Raise UserError if options of ``ddlkit fit`` do not go with --compare, or need it."""
    from ddlkit.core.fit import SIMPLE_FIRST

    if arguments.draw and not arguments.compare:
        raise UserError(
            f"--draw {arguments.draw}: only the forms of --compare are drawn: give both"
        )
    if arguments.draw and arguments.draw.suffix.lower() != ".png":
        raise UserError(f"--draw {arguments.draw}: name a file that ends in .png")
    if not arguments.compare:
        return
    # SIMPLE_FIRST has the names of all forms, which --compare compares by itself. Only a form
    # with a given limit between its two parts, such as piecewise:45KB, is a further one. The
    # default "auto" is no form.
    if arguments.form in SIMPLE_FIRST:
        raise UserError(
            f"--form {arguments.form} has no effect with --compare, which compares that "
            "form anyway: leave it out"
        )
    from ddlkit.show import DRAWING, needs

    # --compare draws the forms even without --draw. If nothing can be drawn, this is refused now,
    # and not after the forms have been fitted.
    needs("--compare", DRAWING)


def _median_held_out_error(
    form: str, sizes: NDArray[np.int64], seconds: NDArray[np.float64]
) -> float | None:
    """Return the median relative error of a form at sizes that it is not fitted to.

    The result is None if there are too few sizes to hold one out.
    """
    import numpy as np

    from ddlkit.core import fit as fitting

    errors = fitting.held_out_errors(form, sizes, seconds).errors
    return float(np.median(abs(errors))) if errors.size else None


def _without_nested(description: dict[str, Any]) -> dict[str, Any]:
    """Return the entries that a person can read: texts, numbers and lists of numbers.

    What is nested deeper is for programs, such as the costs that were drawn to show how
    uncertain the fitted one is.
    """
    readable = {}
    for name, value in description.items():
        is_nested = isinstance(value, (list, dict)) and not is_collection_of_numbers(
            value
        )
        if not is_nested:
            readable[name] = value
    return readable


def _place_if_known(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the entry "place" of the facts of a log alone, or no entry if they lack it.

    nccl-tests times each size out of place and in place. "place" says which of the two times
    were used.
    """
    return {"place": facts["place"]} if "place" in facts else {}


def _compare_forms(
    arguments: argparse.Namespace,
    sizes: NDArray[np.int64],
    seconds: NDArray[np.float64],
    facts: dict[str, Any],
) -> None:
    """Print the held-out relative errors of each form, and draw the forms in a file.

    ``sizes`` (bytes) and ``seconds`` have shape (n,), for n messages. ``facts`` are what
    `read_bytes_seconds` knows of the messages: perhaps their collective, number of ranks
    and algorithm, and whether they were timed in place.
    """
    from ddlkit.model import fits
    from ddlkit.show import write_cost_forms
    from ddlkit.store import own_output

    # `compare` takes all forms by itself, but finds the limit between the two parts of the form
    # piecewise from the times. The user may add a form with a limit, as in piecewise:45KB.
    further_forms = [] if arguments.form == "auto" else [arguments.form]
    try:
        compared = fits.compare(
            sizes,
            seconds,
            *further_forms,
            # A file that names no collective counts as one of all_reduce, which sends gradients.
            collective=facts.get("collective") or "all_reduce",
            workers=facts.get("ranks"),
            algorithm=facts.get("algorithm"),
        )
    except UserError as error:
        raise UserError(f"{arguments.file}: {error}") from error
    # The name of the file up to its first dot, as in "times" of times.csv.gz.
    stem = arguments.file.name.partition(".")[0]
    drawing = arguments.draw or Path(f"{stem}-fits.png")
    # The drawing must replace neither the file of times nor a recorded table.
    own_output(drawing, arguments.file)
    write_cost_forms(compared.fits, compared.chosen, drawing)
    result = {
        "chosen_form": compared.chosen,
        "why_this_form": compared.why,
        "drawing": str(drawing),
        **_place_if_known(facts),
    }
    warnings = _forms_not_compared(compared.table)
    # `strange_times` warns of times that do not depend on the size as usual.
    warnings += fits.strange_times(sizes, seconds, compared.chosen)
    print_warnings(warnings)
    if arguments.json:
        result["warnings"] = warnings
        # The table of errors has a row for each form. `to_json` writes the NaN of an error
        # that is not known as null, which `loads` reads as None.
        result["forms"] = json.loads(compared.table.to_json(orient="index"))
    else:
        _print_errors_of_forms(compared.table)
    show(result, arguments.json)


def _forms_not_compared(errors: DataFrame) -> list[str]:
    """Return a warning for each form for which there are too few sizes to leave one out.

    ``errors`` has a row for each form, as in `ddlkit.model.fits.Comparison`.
    """
    from ddlkit.core.fit import least_sizes_to_hold_out

    left_out = errors.index[errors["held_out_sizes"] == 0]
    return [
        f"{form} is not compared, which takes at least {least_sizes_to_hold_out(form)} "
        "different sizes"
        for form in left_out
    ]


def _print_errors_of_forms(errors: DataFrame) -> None:
    """Print the held-out relative errors, with a row for each form of the cost of messages.

    The names of columns are printed with spaces, and an error that is not known as "-".
    """
    # The name of the index would be printed in a line of its own.
    table = errors.rename_axis(None)
    table.columns = table.columns.str.replace("_", " ")
    print("errors at sizes that are left out of the fit, one at a time:")
    print(table.to_string(float_format="{:.2%}".format, na_rep="-"))
    print()


# ---------------------------------------------------------------- ddlkit predict, ddlkit plan


_PLAN_FILE = "Or a file *.json that ddlkit plan --json wrote."
"""What may be given in place of the name of a plan."""


def _which_plan(names: str) -> str:
    """Return the help of --plan of a command, which takes plans of these names."""
    return f"Which gradients share a message: {names} {_PLAN_FILE} [default: ddp]"


PLAN = arg("--plan", default="ddp", help=_which_plan(PLAN_NAMES))
PLANNER = arg(
    "--planner",
    default="exact",
    help=f"How the plan is chosen: {PLAN_NAMES} {_PLAN_FILE} [default: exact]",
)


@command(
    "Predict the time of a training iteration from a layer profile and the cost of "
    "messages.",
    *group("plan", PLAN),
    *INPUTS,
    *SHARDED,
    LEVEL,
    example="ddlkit predict --profile profile.csv --cost cost.json --plan ddp",
)
def predict(arguments: argparse.Namespace) -> None:
    """Run the command ``ddlkit predict``."""
    if is_sharded(arguments):
        _show_sharded_prediction(arguments)
        return
    forecast, warnings, _profile, communication = forecast_of(
        arguments, arguments.plan, arguments.level
    )
    iteration = forecast.iteration
    interval_s = forecast.interval_s
    # With --copies alone, the facts of contention have the measured time of copies, and factors
    # of 1 for slowdowns, which were not measured.
    has_contention = arguments.slowdown or arguments.copies
    result = {
        **{name: getattr(forecast.prediction, name) for name in PREDICTED},
        "iteration_interval_s": list(interval_s) if interval_s else None,
        **_interval_facts(forecast, arguments.level),
        "plan": arguments.plan,
        "message_count": len(iteration.plan.ends),
        "ranks": iteration.cost.workers,
        "contention": _contention_facts(iteration) if has_contention else None,
        **assumption(communication.is_assumed_ring),
    }
    if arguments.density:
        result |= _selection_facts(iteration)
    # `forecast_of` has printed the warnings on standard error, where a person reads them.
    if arguments.json:
        result["warnings"] = warnings
    else:
        _put_in_words(result, advice_on_contention="add --slowdown")
        # If no level is known for the interval, this entry says which causes of scatter it
        # includes. Otherwise the entry is None, for which a person needs no line.
        if result["interval_includes"] is None:
            del result["interval_includes"]
        result["contention"] = _contention_in_words(result["contention"])
    show(result, arguments.json)


def _selection_facts(iteration: Any) -> dict[str, Any]:
    """Return the time to select gradients in an iteration, and the form of its cost.

    With --density, each message selects a share of its gradients before it is sent, and the
    cost of ``iteration`` is a `SparseGather`.
    """
    cost = iteration.cost
    # The seconds that each message takes to select its gradients.
    selection_s = cost.selection_s(iteration.group_bytes)
    return {
        "selection_s": float(selection_s.sum()),
        "selection_form": cost.selecting.form,
    }


def _show_sharded_prediction(arguments: argparse.Namespace) -> None:
    """Print the prediction for training with --strategy fsdp."""
    if ";" in (arguments.units or ""):
        raise UserError(
            f"--units {shown(arguments.units)}: give one way to make units: ddlkit "
            "advise compares several, which ; separates"
        )
    # One way to make units gives two predictions, for the two ways of FSDP's
    # reshard_after_forward.
    warnings: list[str] = []
    resharded, kept_whole = predict_sharded(
        arguments, arguments.units, warnings=warnings
    )
    result = kept_whole if arguments.no_reshard else resharded
    if arguments.json:
        result["warnings"] = warnings
    else:
        # The share of single iterations in the interval is not known, because the model has no
        # contention. The words that are printed in place of the share say so, and that no option
        # adds contention.
        no_option = f"no option of --strategy {arguments.strategy} adds it"
        _put_in_words(result, advice_on_contention=no_option)
    show(result, arguments.json)


def _put_in_words(result: dict[str, Any], advice_on_contention: str) -> None:
    """Replace numbers in ``result`` that need words when a person reads the prediction.

    ``advice_on_contention`` says what to do if contention was not measured, so that the
    interval leaves it out.
    """
    seconds = result["communication_s"]
    result["communication_s"] = f"{seconds:.6g} (if nothing else runs)"
    result["interval_level"] = _level_in_words(result, advice_on_contention)


def _level_in_words(result: dict[str, Any], advice_on_contention: str) -> str:
    """Return the level of a predicted interval, or why there is none, in words.

    The level is the share of single iterations that should lie in the interval.
    ``advice_on_contention`` says what to do if contention was not measured.
    """
    if result["interval_level"] is not None:
        return f"{result['interval_level']:.4g} of single iterations"
    if result["iteration_interval_s"] is None:
        return "none, because there is no interval"
    return (
        "none, because the interval leaves out contention, which was not measured: "
        f"{advice_on_contention}"
    )


def _contention_in_words(contention: dict[str, float] | None) -> str | None:
    """Return in words what `_contention_facts` returns.

    None stands for contention that was not measured, and is returned as it is.
    """
    if contention is None:
        return None
    slowdown = (
        f"compute takes {contention['compute_factor']:.3g} times as long beside messages, "
        f"messages take {contention['message_factor']:.3g} times as long beside compute"
    )
    # Without --slowdown, no slowdown is known. That of measured messages is never exactly 1.
    if contention["compute_factor"] == contention["message_factor"] == 1:
        slowdown = "compute and messages are assumed not to slow each other down"
    return (
        f"{slowdown}, copies take {contention['copy_s_per_byte']:.3g} s a byte, and each bucket "
        f"costs {contention['bucket_s']:.3g} s besides"
    )


def _interval_facts(forecast: Any, level: float) -> dict[str, Any]:
    """Return which iterations the predicted interval should contain, as entries of a result.

    Contention is how much compute and messages slow each other down. If it was measured, the
    interval includes all causes of scatter. "interval_level" is then the share of single
    iterations that should lie in the interval, and "interval_includes" is None. Otherwise this
    share is not known, and "interval_level" is None. Then "interval_includes" says in words which
    causes the interval includes and which it lacks, or that there is no interval.
    """
    if not forecast.interval_s:
        return {"interval_level": None, "interval_includes": NO_INTERVAL}
    # The text says what the interval includes and lacks. It is empty if contention was measured.
    if forecast.interval_includes:
        return {"interval_level": None, "interval_includes": forecast.interval_includes}
    return {"interval_level": level, "interval_includes": None}


def _contention_facts(iteration: Any) -> dict[str, float]:
    """Return how compute and messages slow each other down, and what buckets cost.

    The factors say how many times as long compute and messages take while the other is under
    way, as medians over the messages. The costs are the seconds of copies for each byte, and
    the further seconds for each bucket.
    """
    import numpy as np

    # A slowdown depends on the size of the message, so the link has one for each message. A
    # slowdown of 0.1 makes times a tenth longer.
    link = iteration.link
    return {
        "compute_factor": 1 + float(np.median(link.slowdown)),
        "message_factor": 1 + float(np.median(link.message_slowdown)),
        "copy_s_per_byte": iteration.copy_s_per_byte,
        "bucket_s": iteration.bucket_s,
    }


@command(
    "Choose which gradients share a message. The plan is made for messages that are "
    "sent one after the other, except with --planner search and --in-flight.",
    *group("plan", PLANNER),
    *INPUTS,
    example="ddlkit plan --profile profile.csv --cost cost.json --planner exact "
    "--json > plan.json",
)
def plan(arguments: argparse.Namespace) -> None:
    """Run the command ``ddlkit plan``."""
    forecast, warnings, _profile, communication = forecast_of(
        arguments, arguments.planner
    )
    iteration = forecast.iteration
    iteration_s = forecast.prediction.iteration_s
    chosen = iteration.plan
    facts: dict[str, Any] = {}
    # The planner "exact" also gives the time that no plan can undercut. Others give None. With
    # several messages in flight, start-ups overlap, and a burst lets bytes pass at once. In both
    # cases an iteration may take less than this time.
    is_bound = arguments.in_flight == 1 and not iteration.link.burst_s
    if chosen.least_s is not None and is_bound:
        facts["lower_bound_s"] = chosen.least_s
    facts |= assumption(communication.is_assumed_ring)
    if arguments.json:
        description = chosen.to_dict(iteration_s)
        show({**description, **facts, "warnings": warnings}, as_json=True)
        return
    summary = {
        "planner": chosen.planner,
        "message_count": len(chosen.members),
        "iteration_s": iteration_s,
    }
    show({**summary, **facts}, as_json=False)
    _print_messages(iteration)


def _print_messages(iteration: Any) -> None:
    """Print a line for each message: its number, size, and first and last tensor."""
    print(
        "messages in the order in which they are sent, and their first and last tensor:"
    )
    tensors = iteration.workload.tensor
    sizes = iteration.group_bytes
    # `members` has the indices of the gradients in each message.
    for message, gradients in enumerate(iteration.plan.members):
        first = tensors[gradients[0]]
        last = tensors[gradients[-1]]
        size = units.format_bytes(sizes[message])
        print(f"  {message:>3}  {size:>10}  {first} .. {last}")


# ---------------------------------------------------------------- ddlkit export


# DDP selects no gradients, and the other two formats hold the cost of a message alone.
_NOT_EXPORTED = ("density", "selection")
_INPUTS_OF_EXPORT = tuple(
    with_help(
        argument,
        "The collective whose cost is used. [default: all_reduce; with --to inductor or "
        "profile, that of the cost in --cost]",
    )
    if argument.names[0] == "--collective"
    else argument
    for argument in OPTIONAL_INPUTS
    if parsed_name(argument.names[0]) not in _NOT_EXPORTED
)
"""The options of a prediction that export takes."""
_OPTIONS_BESIDE_MESSAGES = tuple(
    parsed_name(argument.names[0])
    for argument in _INPUTS_OF_EXPORT
    if argument.group != MESSAGES
)
"""Options of a prediction, as names of parsed arguments, without those of its messages."""


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
            "Python module with the function estimate, for torch.compile's option "
            "custom_runtime_estimation. profile writes a trace for torch.compile's option "
            "profile_guided_estimations_profile_path. ddp needs --profile and the cost of "
            "messages, and the other two need the cost of messages alone.",
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
        with_help(
            PLANNER,
            f"With --to ddp: how the plan is chosen: {PLAN_NAMES} {_PLAN_FILE} [default: exact]",
        ),
    ),
    *group(
        "messages",
        arg(
            "positional_cost",
            type=Path,
            nargs="?",
            metavar="COST",
            help="The cost of a message, as ddlkit fit --json prints it. It is another "
            "way to give --cost.",
        ),
    ),
    *_INPUTS_OF_EXPORT,
    example="ddlkit export --to inductor cost.json > estimate.py",
)
def export(arguments: argparse.Namespace) -> None:
    """Run the command ``ddlkit export``."""
    from ddlkit.formats import export as writers

    _set_left_out_options_to_defaults(arguments, _NOT_EXPORTED)
    if arguments.positional_cost and arguments.cost:
        raise UserError(
            "the cost is given twice, as COST and with --cost: leave one out"
        )
    arguments.cost = arguments.positional_cost or arguments.cost
    # The release of PyTorch that reads the file. An untested one is refused.
    version = writers.tested_version(arguments.to, arguments.torch)
    if arguments.to == "ddp":
        _export_plan(arguments, version)
        return
    # The other two write the cost of a message, for which only options of messages matter. Of
    # these, --in-flight is about the link, and not about the cost.
    refuse_given(
        arguments,
        ["planner", "in_flight", *_OPTIONS_BESIDE_MESSAGES],
        f"has no effect on --to {arguments.to}, which writes the cost of a message alone",
    )
    writers_of_costs = {"inductor": writers.inductor, "profile": writers.profile}
    write = writers_of_costs[arguments.to]
    warnings: list[str] = []
    communication, _ = read_communication(arguments, warnings, sends_gradients=False)
    print(write(communication.cost, version))
    print_warnings(warnings)


def _export_plan(arguments: argparse.Namespace, version: str) -> None:
    """Print the buckets of a plan as JSON for a release of PyTorch, and what they gain."""
    from ddlkit.formats import export as writers

    if arguments.profile is None:
        # Whoever has left out both inputs learns it at once.
        has_cost = arguments.cost or arguments.collectives
        also = (
            ""
            if has_cost
            else ", and the cost of messages with --cost or --collectives"
        )
        raise UserError(
            f"--to ddp needs --profile: give the layers whose gradients are sent{also}"
        )
    notes: list[str] = []
    forecast, warnings, *_ = forecast_of(arguments, arguments.planner, notes=notes)
    # This may refuse the plan, so nothing is printed before.
    exported = writers.ddp(forecast.iteration, version)
    # PyTorch's default plan has a forecast of its own, because contention depends on the
    # messages of a plan. Its notes are those above, so they are dropped.
    default, *_ = forecast_of(arguments, "ddp", notes=[])
    notes.append(_gain_over_default(forecast.iteration, default.iteration))
    print_remarks(notes, warnings)
    print(exported)


LEAST_GAIN_PRINTED = 0.0005
"""Gains below this are printed as 0.0%."""


def _gain_over_default(iteration: Any, default: Any) -> str:
    """Return in words how much shorter or longer ``iteration`` is than ``default``.

    ``iteration`` has the buckets of the list that is exported for PyTorch. ``default`` is the
    iteration of the same training with PyTorch's default buckets.
    """
    default_s = default.prediction.iteration_s
    iteration_s = iteration.prediction.iteration_s
    # The gain is negative if the iteration is longer with the exported list of buckets.
    gain = 1 - iteration_s / default_s
    default_in_words = units.format_seconds(default_s)
    # Times in three digits could differ although their difference is printed as 0.0%.
    if abs(gain) < LEAST_GAIN_PRINTED:
        return (
            "the list is predicted to make an iteration as long as PyTorch's default, "
            f"{default_in_words}"
        )
    change = "longer" if gain < 0 else "shorter"
    return (
        f"the list is predicted to make an iteration {abs(gain):.1%} {change}: "
        f"{units.format_seconds(iteration_s)} an iteration, {default_in_words} under "
        "PyTorch's default; ddlkit advise says whether that is more than the error"
    )


# ---------------------------------------------------------------- ddlkit what-if

ITERATIONS = 10
"""How many iterations of training are simulated."""


_OPTIONS_IN_THE_GRAPH = tuple(
    argument
    for argument in INPUTS
    if parsed_name(argument.names[0]) not in NOT_IN_THE_GRAPH
)
"""The options of a prediction that the graph of training's tasks models."""

_HELP_OF_WHAT_IF = {
    # --assume-ring takes its number of ranks from --gpus in this command.
    "--ranks": RANKS.options["help"],
    "--assume-ring": assume_ring("--gpus").options["help"],
    # Gradients are not selected, because the options for this are missing.
    "--collective": "The collective that sends the gradients. [default: all_reduce]",
}
"""The help of options that mean less in what-if than in a prediction."""


def _with_help_of_what_if(argument: Argument) -> Argument:
    """Return an option of a prediction with its help in what-if."""
    option = argument.names[0]
    return with_help(argument, _HELP_OF_WHAT_IF.get(option, argument.options["help"]))


@command(
    "Change tasks in the graph of a training, and see how long an iteration then "
    "takes and what limits it. The tasks are reads of the input, copies to the GPU, "
    "layers, messages and updates.",
    *group(
        "changes (--scale, --straggler and --layer may be repeated)",
        arg(
            "--scale",
            action="append",
            default=[],
            metavar="WHAT=FACTOR",
            help="Multiply the times of some tasks by a factor, as in all_reduce=0.5. "
            "WHAT is a kind of task: io (reading the input), h2d (copying it to the GPU), "
            "forward, backward, update or all_reduce (the collective that is sent), with or without "
            "the underscore. Or it "
            "is a resource: disk, cpu (which has tasks only with --inputs, under a framework that "
            "decodes pictures), copy, gpu (or compute) or link. Or it is rank:NUMBER (the "
            "forward and the backward pass of a rank, counted from 0), or layer:NUMBER (what "
            "the layer computes, and the "
            "message that its gradient completes; layers are the rows of the profile, "
            "numbered from 1 in forward order).",
        ),
        arg(
            "--straggler",
            action="append",
            default=[],
            metavar="RANK:FACTOR",
            help="Multiply the times of the forward and the backward pass of one rank by a factor, as "
            "in 3:1.2. The update is a single task of all ranks together, which --scale update=1.2 "
            "changes.",
        ),
        arg(
            "--layer",
            action="append",
            default=[],
            metavar="NAME=FACTOR",
            help="Multiply the size of one layer by a factor, as in fc=0.5: both its "
            "compute time and the bytes of its gradients. Factors of the same layer are multiplied.",
        ),
        arg(
            "--gpus",
            type=whole_number,
            metavar="N",
            help="The number of GPUs after the change. It needs --assume-ring if the messages were "
            "not measured between so many ranks. [default: as before]",
        ),
    ),
    *group(
        "the training",
        arg(
            "--framework",
            metavar="NAME",
            default="Caffe-MPI",
            help="The framework whose order of tasks is simulated: Caffe-MPI, CNTK, "
            "MXNet or TensorFlow. All but CNTK send gradients during backward, as "
            "DistributedDataParallel does. CNTK and TensorFlow decode pictures, and the others "
            "read pictures that are decoded already. [default: Caffe-MPI]",
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
            help="The measured times of reading and decoding the input, a table that "
            "python -m workbook record input writes in a clone of the project. The times of "
            "decoding count under a framework that decodes pictures only. "
            "[default: no input is read]",
        ),
    ),
    *group("plan", with_help(PLAN, _which_plan(PLAN_NAMES_OF_WHAT_IF))),
    *map(_with_help_of_what_if, _OPTIONS_IN_THE_GRAPH),
    example="ddlkit what-if --profile profile.csv --cost cost.json --scale "
    "all_reduce=0.5",
)
def what_if(arguments: argparse.Namespace) -> None:
    """Run the command ``ddlkit what-if``."""
    from ddlkit.core.taskgraph import effect_of_change, schedule

    _set_left_out_options_to_defaults(arguments, NOT_IN_THE_GRAPH)
    # --scale and --straggler change tasks of the graph. --layer changes the profile, from
    # which the graph after the change is made.
    changes = _changes_of_tasks(arguments)
    layer_factors = _factors_of_layers(arguments.layer)
    _refuse_unknown_framework(arguments.framework)
    _refuse_gpu_count(arguments.gpus)
    # The error names the command that records such tables, which only a clone of the project has.
    refuse_other_than_recorded(
        "--inputs", arguments.inputs, program="python -m workbook record input"
    )
    notes: list[str] = []
    forecast, warnings, profile, communication = forecast_of(
        arguments, arguments.plan, notes=notes
    )
    _refuse_types_apart(arguments, forecast.iteration.plan)
    cost = forecast.iteration.cost
    # The tasks of one rank are simulated for a cost that does not state a number of ranks.
    gpus = cost.workers or 1
    gpus_after = gpus if arguments.gpus is None else arguments.gpus
    if not cost.workers:
        notes.append(
            "the cost of messages does not say between how many ranks they were sent, so that "
            "ranks and samples_per_s are not known: give --ranks"
        )
    _refuse_unknown_stragglers(
        arguments.straggler, ranks=gpus_after, ranks_of_cost=cost.workers
    )
    _refuse_partly_filled_machines(
        arguments.gpus_per_machine, cost.workers, arguments.gpus
    )
    communication_after = communication
    if gpus_after != gpus:
        communication_after = _between_gpus_after(arguments, communication, warnings)
    # An unknown layer of --layer is refused here, before the graphs are made.
    try:
        profile_after = profile.resized(layer_factors)
    except UserError as error:
        raise UserError(f"--layer: {error}") from error
    graph = _unchanged_graph(arguments, forecast.iteration, profile)
    graph_after = _changed_graph(
        arguments,
        profile_after,
        forecast.iteration.plan,
        communication_after.cost,
        changes,
    )
    compared = effect_of_change(schedule(graph), schedule(graph_after))
    if not (changes or layer_factors or gpus_after != gpus):
        notes.append(
            "nothing is changed, so that the values after the change are those before it: "
            "give --scale, --straggler, --layer or --gpus"
        )
    notes += _notes_of_first_layer(arguments, profile, changes)
    notes += _notes_of_inputs(arguments, profile.batch)
    notes += _notes_of_idle_changes(arguments, graph, changes)
    # Remarks are printed when nothing can be refused any more. An error would be hidden
    # among them.
    print_remarks(notes, warnings)
    result = {
        "simulated_iterations": ITERATIONS,
        "simulated_tasks": _tasks_of_all_ranks(graph, gpus),
        "simulated_longest_chain_s": graph.longest_path_s,
        **_resources_in_words(compared),
        **assumption(communication_after.is_assumed_ring),
        "batch": profile.batch,
        **_throughputs(
            compared, profile.batch, cost.workers, arguments.gpus or cost.workers
        ),
    }
    if arguments.json:
        result["warnings"] = warnings
    elif profile.batch == 1:
        # The profile of a user's own model always has a batch of 1.
        result["batch"] = "1 (or not known)"
    show(result, arguments.json)


def _set_left_out_options_to_defaults(
    arguments: argparse.Namespace, left_out: Sequence[str]
) -> None:
    """Set those options of a prediction that a command leaves out to their defaults.

    The prediction that the command makes needs a value of each option. ``left_out`` has the
    names of the parsed arguments of those that the command leaves out.
    """
    for argument in INPUTS:
        name = parsed_name(argument.names[0])
        if name in left_out:
            setattr(arguments, name, argument.options.get("default"))


def _throughputs(
    compared: dict[str, Any], batch: int, gpus: int | None, gpus_after: int | None
) -> dict[str, Any]:
    """Return the numbers of ranks and the samples per second, before and after the change.

    ``compared`` is the result of `effect_of_change`, from which the times of iterations are
    taken. The names of entries after the change end in "_after", as in ``compared``. Both
    entries are None for a number of ranks that is not known.
    """
    result: dict[str, Any] = {}
    for suffix, gpu_count in (("", gpus), ("_after", gpus_after)):
        samples_per_s = None
        if gpu_count is not None:
            # Each rank has a GPU, and a batch of its own in an iteration.
            samples_per_s = gpu_count * batch / compared[f"iteration_s{suffix}"]
        result[f"ranks{suffix}"] = gpu_count
        result[f"samples_per_s{suffix}"] = samples_per_s
    return result


def _unchanged_graph(
    arguments: argparse.Namespace, iteration: Any, profile: Any
) -> Any:
    """Return the task graph of a training before all changes, when all its ranks are alike.

    ``iteration`` is the predicted one. If it has a link that messages share, or copies of
    buckets, these are left out here, because a graph has no tasks for them.
    """
    from ddlkit.core.iteration import Iteration

    simple_iteration = Iteration(iteration.workload, iteration.plan, iteration.cost)
    return _graph(arguments, simple_iteration, profile, changed_ranks=set())


def _factors_of_layers(texts: Sequence[str]) -> dict[str, float]:
    """Return the factor on the size of each layer that --layer names.

    ``texts`` are the values of the option. The factors of a repeated layer are multiplied, as
    those of repeated tasks of --scale are.
    """
    factors: dict[str, float] = {}
    for text in texts:
        name, factor = _change(text, "--layer")
        factors[name] = factors.get(name, 1.0) * factor
    return factors


def _notes_of_first_layer(
    arguments: argparse.Namespace, profile: Any, changes: Sequence[tuple[str, float]]
) -> list[str]:
    """Return a note if single layers change, but their forward times are not known.

    --forward-s gives the time of the whole forward pass, which ``profile`` then has as that of
    its first layer. ``changes`` are names of tasks, each with the factor on its times.
    """
    changes_layers = any(what.startswith("layer") for what, _ in changes)
    if arguments.forward_s is None or not (arguments.layer or changes_layers):
        return []
    return [
        "--forward-s gives no forward time of a single layer, so that the whole forward pass "
        f"counts as that of the first layer, {profile.layer[0]}: a change of this layer changes "
        "all of it, and a change of another layer changes none of it"
    ]


def _notes_of_inputs(arguments: argparse.Namespace, batch: int) -> list[str]:
    """Return notes if times of the input, or the sharing of a disk, have no effect."""
    from ddlkit.core.strategies import STRATEGIES, strategy
    from ddlkit.store.readers import read_inputs

    if not arguments.inputs:
        if arguments.gpus_per_machine == 1:
            return []
        return [
            f"--gpus-per-machine {arguments.gpus_per_machine} has no effect without --inputs, "
            "because the GPUs of a machine share only its disk and its processor, which then "
            "do nothing"
        ]
    has_decoding = "decode_s" in read_inputs(arguments.inputs, batch)
    if not has_decoding or strategy(arguments.framework).decodes_on_cpu:
        return []
    decoding = [name for name, known in STRATEGIES.items() if known.decodes_on_cpu]
    return [
        f"the times of decoding in {arguments.inputs} have no effect, because --framework "
        f"{arguments.framework} reads pictures that are decoded already, unlike "
        f"{' and '.join(decoding)}"
    ]


def _notes_of_idle_changes(
    arguments: argparse.Namespace, graph: Any, changes: Sequence[tuple[str, float]]
) -> list[str]:
    """Return a note for each change of tasks that take no time in ``graph``.

    ``graph`` is the task graph before the changes. ``changes`` are names of tasks, each with
    the factor on its times.
    """
    from ddlkit.core.taskgraph import tasks_named

    notes = []
    for what, factor in changes:
        # A change of a rank always has an effect, because every rank computes. The graph may
        # lack the rank, because before the changes one machine stands for all.
        if what.startswith("rank"):
            continue
        # A mask of the tasks that `what` stands for.
        is_changed = tasks_named(graph, what)
        if not graph.duration_s[is_changed].any():
            reasons = _why_idle(arguments, graph, is_changed)
            notes.append(
                f"--scale {what}={factor:g} has no effect, because its tasks take no time "
                f"before the change: {reasons}"
            )
    return notes


_TASKS_OF_INPUT = {
    "io": "reading",
    "decode": "decoding",
    "h2d": "copying to the GPU",
}
"""What each kind of task does with the input, in words."""


def _why_idle(
    arguments: argparse.Namespace, graph: Any, tasks: NDArray[np.bool_]
) -> str:
    """Return why some tasks of a graph take no time, in words.

    ``tasks`` is a mask of the tasks of ``graph``.
    """
    from ddlkit.core.timeline import KINDS

    reasons = []
    # Each kind of task occurs once in the set.
    for code in sorted(set(graph.kind[tasks].tolist())):
        kind = KINDS[code]
        if kind in _TASKS_OF_INPUT and not arguments.inputs:
            reason = f"{_TASKS_OF_INPUT[kind]} has times with --inputs only"
        elif kind in _TASKS_OF_INPUT:
            reason = f"{arguments.inputs} has no times of {_TASKS_OF_INPUT[kind]}"
        elif kind == "update":
            reason = (
                f"{arguments.profile} has no time of the update, in a column update_s"
            )
        elif kind in ("forward", "backward"):
            reason = f"{arguments.profile} has no time of {kind} for them"
        else:
            reason = "the cost of messages gives them no time"
        reasons.append(reason)
    return ", and ".join(reasons)


def _resources_in_words(compared: dict[str, Any]) -> dict[str, Any]:
    """Return the effect of a change, with "compute" as the name of the resource gpu.

    The resource may also be a processor. ``compared`` is the result of `effect_of_change`.
    """
    in_words = {"gpu": "compute"}
    result = dict(compared)
    for suffix in ("", "_after"):
        limit = result[f"limited_by{suffix}"]
        result[f"limited_by{suffix}"] = in_words.get(limit, limit)
        shares = result[f"shares_of_critical_path{suffix}"]
        result[f"shares_of_critical_path{suffix}"] = {
            in_words.get(resource, resource): share
            for resource, share in shares.items()
        }
    return result


def _changes_of_tasks(arguments: argparse.Namespace) -> list[tuple[str, float]]:
    """Return what --scale and --straggler change, each with the factor on its times.

    Tasks are named as `ddlkit.core.taskgraph.changed` takes them. Those of a straggler are
    its forward and its backward pass, as in "rank:3".
    """
    changes = []
    for text in arguments.scale:
        task, factor = _change(text, "--scale")
        # The printed result calls the resource gpu "compute", so users may write this, too.
        changes.append(("gpu" if task == "compute" else task, factor))
    for text in arguments.straggler:
        rank, factor = _change(text, "--straggler")
        changes.append((f"rank:{rank}", factor))
    return changes


def _changed_graph(
    arguments: argparse.Namespace,
    profile: Any,
    plan: Any,
    cost: Any,
    changes: Sequence[tuple[str, float]],
) -> Any:
    """Return the task graph of a training after all changes.

    ``profile`` is already changed by --layer, and ``cost`` by --gpus. ``plan`` is that before
    all changes, and is kept. ``changes`` are those that --scale and --straggler ask for: names
    of tasks, each with a factor on their times. They are made in the graph.
    """
    from ddlkit.core.iteration import Iteration
    from ddlkit.core.taskgraph import changed

    # --dilation is a factor on all compute times, and no change: the graph of the training
    # without changes, with which this one is compared, has the same factor.
    workload = profile.workload().scaled(arguments.dilation)
    # In a graph, one machine stands for all that are alike. A machine with a changed rank
    # must be in the graph by itself, so that `changed` finds the rank.
    graph = _graph(
        arguments,
        Iteration(workload, plan, cost),
        profile,
        changed_ranks=_ranks_in(changes),
    )
    try:
        return changed(graph, changes)
    except UserError as error:
        # Ranks of --straggler, and all factors, were checked before, so the name of a task in
        # --scale is wrong.
        raise UserError(f"--scale: {error}") from error


MOST_TASKS = 2_000_000
"""The most tasks of a graph. Their schedule takes about a minute and 1 GB."""


def _refuse_gpu_count(gpus: int | None) -> None:
    """Raise UserError if --gpus is given, and is below 2 or above the largest number."""
    from ddlkit.core.cost import MOST_WORKERS

    if gpus is None:
        return
    if gpus < 2:
        raise UserError(
            f"--gpus {gpus}: too few, because one GPU alone sends nothing: use at least 2"
        )
    if gpus > MOST_WORKERS:
        raise UserError(f"--gpus {gpus}: use at most {MOST_WORKERS}")


def _refuse_types_apart(arguments: argparse.Namespace, plan: Any) -> None:
    """Raise UserError if a plan keeps gradients of several types apart.

    The graph of tasks has no message that passes over a gradient between two others.
    """
    if plan.order:
        raise UserError(
            f"--plan {arguments.plan}: keeps the several types of gradients of "
            f"{arguments.profile} apart, so that messages pass over gradients in between, which "
            "what-if does not simulate: give --plan none, which sends each gradient alone"
        )


def _refuse_unknown_framework(name: str) -> None:
    """Raise UserError if --framework names no framework that is known."""
    from ddlkit.core.strategies import STRATEGIES

    if name.lower() not in {known.lower() for known in STRATEGIES}:
        raise UserError(
            f"--framework {shown(name)}: unknown: use one of {', '.join(STRATEGIES)}"
        )


def _refuse_unknown_stragglers(
    stragglers: Sequence[str], ranks: int, ranks_of_cost: int | None
) -> None:
    """Raise UserError if --straggler names a rank that does not exist.

    ``ranks`` is the number of ranks after the change: that of --gpus, or else
    ``ranks_of_cost``, or else 1. ``ranks_of_cost`` is None if the cost states no number.
    """
    for text in stragglers:
        rank, _ = _change(text, "--straggler")
        # Ranks are counted from 0.
        if rank.isdecimal() and int(rank) < ranks:
            continue
        advice = f"the ranks are 0 to {ranks - 1}"
        # If the cost does not say between how many ranks its messages were sent, one rank is
        # assumed, which the user can correct by --ranks. This advice is left out with --gpus, which
        # gives the number of ranks after the change.
        if ranks_of_cost is None and ranks == 1:
            advice = (
                "the cost does not say between how many ranks it holds: give --ranks"
            )
        raise UserError(f"--straggler {text}: there is no rank {shown(rank)}: {advice}")


def _refuse_partly_filled_machines(
    per_machine: int, gpus: int | None, gpus_after: int | None
) -> None:
    """Raise UserError if GPUs cannot be divided into machines of --gpus-per-machine.

    ``gpus`` is the number before the change, None if the cost does not say it. ``gpus_after``
    is that of --gpus, None if it stays.
    """
    if per_machine < 1:
        raise UserError(f"--gpus-per-machine {per_machine}: use at least 1")
    if per_machine > 1 and gpus is None:
        raise UserError(
            f"--gpus-per-machine {per_machine}: the cost does not say between how many ranks it "
            "holds: give --ranks"
        )
    # The numbers before and after the change, or one number if it does not change.
    counts = [count for count in dict.fromkeys((gpus, gpus_after)) if count is not None]
    divisor = " and ".join(map(str, counts))
    if len(counts) > 1:
        divisor = f"both {divisor}"
    for count in counts:
        if count % per_machine:
            raise UserError(
                f"--gpus-per-machine {per_machine}: {count} GPUs cannot be divided into "
                f"machines of {per_machine}: use a divisor of {divisor}"
            )


def _between_gpus_after(
    arguments: argparse.Namespace, communication: Any, warnings: list[str]
) -> Any:
    """Return the communication after the change to --gpus ranks.

    ``communication`` is that before the change. Measured times between --gpus ranks are taken, if
    the files of --collectives have them. Otherwise, with --assume-ring, the cost before the change
    is taken to --gpus ranks as that of a ring, and ``warnings`` says so. Raises UserError if
    there are no such times and --assume-ring is not given.
    """
    measured_after = measured_between_gpus(arguments, warnings)
    if measured_after is not None:
        return measured_after
    cost = communication.cost
    gpus = arguments.gpus
    # A cost of another form has to be fitted anew, with the number of ranks.
    if cost.workers is None and cost.form == "alpha_beta":
        assuming = "" if arguments.assume_ring else ", and add --assume-ring"
        raise UserError(
            f"--gpus {gpus}: the cost of {arguments.cost} does not say between how many ranks its "
            f"messages were measured: give this number with --ranks{assuming}"
        )
    if arguments.assume_ring:
        # Errors name where the cost is from.
        origin = str(arguments.cost or "--collectives")
        return as_ring(communication, gpus, origin, warnings)
    measured = f"{cost.workers or 'an unknown number of'} ranks"
    if arguments.cost:
        advice = f"give --collectives with times between {measured} and between {gpus}"
        if is_perhaps_of_ring(cost):
            advice = advice_to_assume_ring(cost)
        raise UserError(
            f"--gpus {gpus}: the cost of {arguments.cost} holds for {measured}: {advice}"
        )
    files = " and ".join(map(str, arguments.collectives))
    advice = f"give times between {gpus}, too"
    if is_perhaps_of_ring(cost):
        advice = f"add --assume-ring, which takes them to {gpus} as the cost of a ring"
    raise UserError(
        f"--gpus {gpus}: the times that are taken from {files} are between {measured}: {advice}"
    )


def _ranks_in(changes: Sequence[tuple[str, float]]) -> set[int]:
    """Return the numbers of the ranks that ``changes`` name, as in rank:3.

    A change is the name of what changes, and a factor. Most name no rank.
    """
    ranks = set()
    for changed_tasks, _ in changes:
        # A user of --scale may also write "rank 3".
        match = re.fullmatch(r"rank[: ]\s*(?P<rank>\d+)\s*", changed_tasks)
        if match:
            ranks.add(int(match["rank"]))
    return ranks


def _machines_to_simulate(machines: int, changed_machines: set[int]) -> list[int]:
    """Return the numbers of the machines that have to be simulated, in order.

    There are ``machines`` machines, numbered from 0. Ranks whose times are equal do equal tasks
    at equal times, and every message waits for all ranks. One machine without a change
    therefore stands for all such machines.
    """
    # The last machine is always simulated, because the error about a rank that does not exist
    # names the ranks up to the largest one in the graph.
    simulated = {machines - 1}
    # If a changed rank does not exist, neither does its machine, which is left out here.
    simulated |= {machine for machine in changed_machines if machine < machines}
    for machine in range(machines):
        if machine not in simulated:
            # The first machine that is not simulated yet stands for all others. So machine 0 is
            # always simulated: it is changed, or the last, or added here. Its rank 0 is needed
            # by `_tasks_of_all_ranks`.
            simulated.add(machine)
            break
    return sorted(simulated)


def _tasks_of_all_ranks(graph: Any, gpus: int) -> int:
    """Return how many tasks a graph would have if each of ``gpus`` ranks were simulated.

    The graph may have only some of the ranks, which stand for the others. Rank 0 is one of
    them.
    """
    from ddlkit.core.taskgraph import ALL_RANKS

    # Tasks that all ranks do together, such as messages, are in the graph once.
    tasks_of_all = int((graph.rank == ALL_RANKS).sum())
    # Every rank does as many tasks by itself as rank 0.
    tasks_of_rank_0 = int((graph.rank == 0).sum())
    return tasks_of_all + gpus * tasks_of_rank_0


def _graph(
    arguments: argparse.Namespace,
    iteration: Any,
    profile: Any,
    changed_ranks: set[int],
) -> Any:
    """Return the task graph of `ITERATIONS` iterations of training.

    The graph has the machines of ``changed_ranks``, one unchanged machine that stands for
    all others, and the last machine (see `_machines_to_simulate`). The ranks in the graph keep
    the numbers that they have among all ranks. The option --dilation is a factor on all
    compute times. The backward of ``iteration`` already has this factor, and the forward of
    ``profile`` gets it here.
    """
    from ddlkit.core.strategies import strategy
    from ddlkit.core.taskgraph import Gpus, of_iteration
    from ddlkit.store.readers import read_inputs

    # Seconds of reading, decoding and copying the input of a batch, by name.
    input_s: dict[str, float] = {}
    if arguments.inputs:
        input_s = read_inputs(arguments.inputs, profile.batch)
    workers = iteration.cost.workers or 1
    per_machine = arguments.gpus_per_machine
    machines = Gpus.of(workers, per_machine).machines
    changed_machines = {rank // per_machine for rank in changed_ranks}
    simulated_machines = _machines_to_simulate(machines, changed_machines)
    # Each machine reads its input from a disk of its own.
    simulated_gpus = Gpus(
        machines=len(simulated_machines), per_machine=per_machine, shared_disk=False
    )
    _refuse_too_many_tasks(simulated_gpus.n, layers=len(profile.forward_s))
    # This graph numbers the simulated ranks from 0 without gaps.
    graph = of_iteration(
        iteration,
        strategy(arguments.framework),
        simulated_gpus,
        forward_s=profile.forward_s * arguments.dilation,
        iterations=ITERATIONS,
        io_s=input_s.get("io_s", 0.0),
        decode_s=input_s.get("decode_s", 0.0),
        h2d_s=input_s.get("h2d_s", 0.0),
    )
    return _with_numbers_of_ranks(graph, simulated_machines, per_machine)


def _refuse_too_many_tasks(ranks: int, layers: int) -> None:
    """Raise UserError if the graph of ``ranks`` simulated ranks would be too large.

    Only ranks that differ are simulated: those of each changed machine, and those of one
    machine that stands for all others. Fewer changes, or smaller machines, make them fewer.
    """
    # A rank reads, decodes and copies its input, which are three tasks, and computes each
    # layer forward and backward. Messages and the update do not count, because they are in the
    # graph once for all ranks.
    tasks = ranks * (2 * layers + 3) * ITERATIONS
    if tasks > MOST_TASKS:
        raise UserError(
            f"{ranks} different ranks would do {tasks} tasks, more than {MOST_TASKS}: "
            "change fewer ranks, or lower --gpus-per-machine"
        )


def _with_numbers_of_ranks(
    graph: Any, machines: Sequence[int], per_machine: int
) -> Any:
    """Return a graph whose ranks have the numbers that they have among all ranks.

    ``graph`` has the ranks of some ``machines`` alone, with ``per_machine`` ranks each, and
    numbers them from 0 without gaps.
    """
    import numpy as np

    from ddlkit.core.taskgraph import ALL_RANKS

    # The sum has a row for each machine and a column for each of its ranks, and `ravel` puts
    # the rows one after the other.
    first_ranks = per_machine * np.array(machines)
    rank_numbers = (first_ranks[:, None] + np.arange(per_machine)).ravel()
    # `graph.rank` has the rank of each task, and ALL_RANKS for tasks that all ranks do together,
    # which keep this value. As an index ALL_RANKS, which is -1, picks the last of `rank_numbers`,
    # but `where` does not use the number that is picked.
    numbers = np.where(graph.rank == ALL_RANKS, ALL_RANKS, rank_numbers[graph.rank])
    return replace(graph, rank=numbers)


_PATTERNS = {
    "--scale": "a kind of task and a factor, as in all_reduce=0.5",
    "--straggler": "the number of a rank and a factor, as in 3:1.2",
    "--layer": "the name of a layer and a factor, as in fc=0.5",
}
"""How the value of an option that changes a training is written."""


def _change(text: str, option: str) -> tuple[str, float]:
    """Return what an option changes, and the factor of the change.

    ``text`` is the value of the option, such as "fc=0.5", or "3:1.2" for --straggler.
    """
    separator = ":" if option == "--straggler" else "="
    # Names of layers may contain the separator, so the last one counts. Without a separator
    # the whole text is `factor_text`, and `changed` is empty.
    changed, _, factor_text = text.rpartition(separator)
    try:
        if not changed:
            raise ValueError
        factor = float(factor_text)
    except ValueError:
        raise UserError(f"{option} {text}: write {_PATTERNS[option]}") from None
    # A layer of size 0 would have a gradient without bytes.
    if option == "--layer" and not 0 < factor < math.inf:
        raise UserError(f"{option} {text}: the factor must be finite and above 0")
    if not 0 <= factor < math.inf:
        raise UserError(f"{option} {text}: the factor must be finite and at least 0")
    return changed, factor
