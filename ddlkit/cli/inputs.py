"""The inputs of a prediction: their options, and how a profile, a cost and a slowdown are read.

``predict``, ``plan``, ``export``, ``what-if`` and ``advise`` share these options.
"""

from __future__ import annotations

import argparse
import functools
import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddlkit.cli.command import (
    JSON,
    OUTPUT,
    Argument,
    arg,
    choice,
    collective_name,
    count,
    density,
    flag,
    group,
    number,
    option_of,
    refuse_given,
    seconds,
    share,
    whole_number,
    with_help,
)
from ddlkit.cli.converting import ELEMENT
from ddlkit.core.errors import UserError, one_line, shown
from ddlkit.core.units import format_seconds

if TYPE_CHECKING:
    from pandas import DataFrame

    from ddlkit.core.workload import LayerProfile, Workload
    from ddlkit.model import Communication, Forecast


def _rank_count(text: str) -> int:
    """Return the number of ranks that an argument gives, which is at least two."""
    from ddlkit.core.cost import MOST_WORKERS

    ranks = whole_number(text)
    if ranks < 2:
        raise argparse.ArgumentTypeError(
            f"{ranks} is too few, because one rank alone sends nothing: use at least 2"
        )
    if ranks > MOST_WORKERS:
        raise argparse.ArgumentTypeError(
            f"{ranks} is too many: use at most {MOST_WORKERS}"
        )
    return ranks


MEASURED_RANKS = """number of ranks between which the messages were measured. It
chooses rows of the file; if the file does not say, it states the number."""
RANKS = arg(
    "--ranks",
    type=_rank_count,
    metavar="N",
    help=f"The {MEASURED_RANKS} [default: as the file says]",
)
PLACE = choice(
    "--place",
    "in_place",
    "out_of_place",
    help="For a log: whether to use the times of messages whose result overwrites "
    "their input (in_place), or those of the others. [default: both, or in_place if "
    "the two differ by more than repeated times do]",
)
TABLE = arg(
    "--table",
    type=count,
    metavar="N",
    help="For a log with several tables: the number of the table, from 1.",
)

_PLANS = """none (a message for each gradient), single (one message), ddp
(PyTorch's buckets), buffer:25MB (a message ends before it would exceed so many bytes), mg_wfbp
(the rule of MG-WFBP, which merges a gradient if that saves time), cuts:3,40 (messages
end after the 3rd and the 40th gradient that is ready), exact (the plan that is proven
best if compute and messages do not slow each other down), search"""
PLAN_NAMES = f"""{_PLANS} (the best plan that is found where exact is not proven best: with
--slowdown or --copies, over a link that saves up a burst, or with several messages in
flight; otherwise exact). docs/GLOSSARY.md has all names."""
PLAN_NAMES_OF_WHAT_IF = f"""{_PLANS} (the best plan that is found over a link that saves up a
burst; otherwise exact). docs/GLOSSARY.md has all names."""


def assume_ring(option_of_ranks: str) -> Argument:
    """Return the option --assume-ring of a command.

    ``option_of_ranks`` is the option of the command that gives the number of ranks to predict
    for.
    """
    return flag(
        "--assume-ring",
        "Predict for a number of ranks that was not measured, which "
        f"{option_of_ranks} names: fit a start-up and a bandwidth to the measured times, "
        "and extrapolate them to that number by the formula of a ring whose links are "
        "all like the measured ones.",
    )


PROFILE = "layer profile"
MESSAGES = "messages"
TRAINING = "training"
SPARSE = "sparse gradients"

INPUTS = (
    *group(
        PROFILE,
        arg(
            "--profile",
            type=Path,
            metavar="FILE.csv",
            required=True,
            help="The layer profile: the time and the size of each parameter tensor.",
        ),
        arg(
            "--network",
            metavar="NAME",
            help="The network to use, if the profile holds several.",
        ),
        arg(
            "--batch",
            type=count,
            metavar="N",
            help="The batch size to use, if the profile holds several.",
        ),
        arg(
            "--profile-ranks",
            type=count,
            metavar="N",
            help="The number of processes that computed at the same time when the "
            "profile was measured, if the profile holds several.",
        ),
        arg(
            "--forward-s",
            type=seconds,
            metavar="TIME",
            help="The time of the forward pass, for a profile without the column "
            "forward_s: seconds, as in 0.089, or with a unit, as in 89ms.",
        ),
        ELEMENT,
    ),
    *group(
        MESSAGES,
        arg(
            "--collectives",
            type=Path,
            nargs="+",
            metavar="TABLE",
            help="Measured times of messages, from which the cost is calibrated: a "
            "recorded table, a CSV, or a benchmark's log. Give this or --cost.",
        ),
        arg(
            "--cost",
            type=Path,
            metavar="COST.json",
            help="The cost of a message, as ddlkit fit --json prints it. Give this or "
            "--collectives.",
        ),
        arg(
            "--collective",
            type=collective_name,
            metavar="NAME",
            help="The collective that sends the gradients. [default: all_reduce, or "
            "all_gather with --density]",
        ),
        with_help(
            RANKS,
            f"The {MEASURED_RANKS} With --assume-ring, it is the number of ranks to "
            "predict for. [default: as the file says]",
        ),
        arg(
            "--link",
            metavar="NAME",
            help="The link over which the messages were measured, as in lab:1gbit. "
            "The column link of the table has the names. [default: the table's, if it has only one]",
        ),
        PLACE,
        TABLE,
        assume_ring("--ranks"),
        arg(
            "--in-flight",
            type=count,
            metavar="N",
            default=1,
            help="The number of collectives that may be under way at once. They "
            "share the bandwidth of the link, so that the number matters only where "
            "messages queue. Of all plans, only search allows for it. [default: 1]",
        ),
    ),
    *group(
        TRAINING,
        arg(
            "--accumulate",
            type=count,
            metavar="N",
            default=1,
            help="The number of batches whose gradients are added up before they are "
            "sent. [default: 1]",
        ),
        arg(
            "--dilation",
            type=number,
            metavar="FACTOR",
            default=1.0,
            help="Multiply all compute times by this factor. [default: 1]",
        ),
        arg(
            "--slowdown",
            type=Path,
            metavar="TABLE",
            help="A table of ddlkit measure slowdown: how much compute and messages "
            "slow each other down. [default: not at all]",
        ),
        arg(
            "--copies",
            type=Path,
            metavar="TABLE",
            help="A table of ddlkit measure copies: the time to copy gradients into "
            "and out of messages. [default: none]",
        ),
        arg(
            "--copy-s-per-byte",
            type=seconds,
            metavar="TIME",
            default=0.0,
            help="The time to copy a byte of a gradient into a message. Copying it out "
            "again takes as long. The time takes the place of that of --copies: seconds "
            "per byte, as in 1e-10, or with a unit, as in "
            "0.1ns. [default: as --slowdown says, and otherwise 0]",
        ),
    ),
    *group(
        SPARSE,
        arg(
            "--density",
            type=density,
            metavar="SHARE",
            help="The share of the gradients that is selected and sent, above 0 and "
            "at most 1. The messages are then all_gathers. It needs --selection.",
        ),
        arg(
            "--selection",
            type=Path,
            nargs="+",
            metavar="TABLE",
            help="The measured times of selecting gradients, or their cost (JSON, which the page "
            "docs/commands.md describes). "
            "python -m workbook record cpu or gpu, in a clone of the project, measures "
            "such tables. The clone has some already, which this quoted pattern names: "
            "'data/recorded/cpu-2x-amd-epyc-suite/selection-*'.",
        ),
    ),
    JSON,
)
"""The options of a prediction."""

LEVEL = arg(
    "--level",
    type=share,
    metavar="SHARE",
    default=0.95,
    help="The share of single iterations that the interval should contain. [default: "
    "0.95]",
)._replace(group=OUTPUT)


def _optional(argument: Argument) -> Argument:
    """Return an argument that may be left out, and is otherwise the same."""
    return argument._replace(options={**argument.options, "required": False})


OPTIONAL_INPUTS = tuple(
    _optional(argument) if "required" in argument.options else argument
    for argument in INPUTS
    if argument.names != JSON.names
)
"""The options of a prediction, none of them required and without --json."""

UNITS = """Name modules, as in blocks.*,head, or give a size for consecutive layers, as
in size:25MB."""

SHARDED = (
    *group(
        "sharded training",
        choice(
            "--strategy",
            "ddp",
            "fsdp",
            default="ddp",
            help="How the training is parallel: ddp keeps a copy of the model on each "
            "rank, fsdp shards the model by PyTorch's FSDP2. [default: ddp]",
        ),
        arg(
            "--units",
            metavar="SPEC",
            help=f"With --strategy fsdp: which parameters are gathered together. {UNITS}",
        ),
        flag(
            "--no-prefetch",
            "With --strategy fsdp: gather each unit when it is needed, and not before.",
        ),
        flag(
            "--no-reshard",
            "With --strategy fsdp: keep units whole from the forward to the backward "
            "pass.",
        ),
    ),
)
"""The options of sharded training."""

NO_CONTENTION = (
    "compute and messages are assumed not to slow each other down, so that an iteration "
    "may take longer than predicted (by up to 31% in the measurements over loopback that "
    "come with ddlkit): on the machine of the training, let ddlkit measure slowdown write a "
    "table for --slowdown, with as many --ranks as the messages have; for a model of your own, "
    "or ranks on several machines, ddlkit advise --model writes one, which is slowdown.csv in "
    "the directory of its --out"
)
NO_CONTENTION_OF_GRAPH = (
    "compute and messages are assumed not to slow each other down, which no option of "
    "what-if changes: iterations may take longer than simulated"
)
NO_CONTENTION_OF_SHARDS = (
    "compute and messages are assumed not to slow each other down, which no option "
    "changes for --strategy fsdp: iterations may take longer than predicted"
)
NOTE_OF_BURST = (
    "this link saves up a burst while it is idle, which lets the next bytes pass at once: "
    "iteration_s allows for it, but communication_s adds up messages that were measured alone, "
    "each of which found the whole burst"
)
NOTE_OF_BURST_OF_GRAPH = (
    "this link saves up a burst while it is idle, which lets the next bytes pass at once: each "
    "message is simulated as if it found the whole burst, so that iterations may take longer "
    "than simulated (ddlkit predict allows for it)"
)


_WORDS_OF_ASSUMED = {
    "batch = 1": "a batch of 1 sample",
    "device = unknown": "an unknown device",
    "flops = 0": "no FLOP counts",
    "layer = its tensor": "a layer for each tensor",
    "parameters = gradient_bytes / 4": "a parameter for every 4 bytes of gradients",
    "precision = fp32": "precision fp32",
    "ranks = 1": "one process that computed while the profile was measured (this is "
    "--profile-ranks, and not --ranks)",
    "threads = 0": "an unknown number of threads",
    "update_s = 0": "an update that takes no time",
}
"""What is assumed for a column that a profile lacks, in words."""


def print_remarks(notes: Iterable[str], warnings: Iterable[str]) -> None:
    """Print each note and then each warning as one line on standard error."""
    for note in notes:
        print(f"ddlkit: note: {one_line(note)}", file=sys.stderr)
    print_warnings(warnings)


def _note_of_assumed(file: Path, assumed: Sequence[str]) -> str:
    """Return in words what is assumed for the columns that a profile lacks.

    Each of ``assumed`` is a phrase such as "batch = 1", as `store.read_profile` gives it.
    """
    columns = ", ".join(phrase.partition(" = ")[0] for phrase in assumed)
    # A phrase that has no words of its own only loses its equals sign.
    values = ", ".join(
        _WORDS_OF_ASSUMED.get(phrase, phrase.replace(" = ", " ")) for phrase in assumed
    )
    noun = "column" if len(assumed) == 1 else "columns"
    return f"{file} lacks the {noun} {columns}; this is assumed: {values}"


def print_warnings(lines: Iterable[str]) -> None:
    """Print each warning as one line on standard error."""
    for line in lines:
        print(f"ddlkit: warning: {one_line(line)}", file=sys.stderr)


# ---------------------------------------------------------------- a prediction


def forecast_of(
    arguments: argparse.Namespace,
    spec: str,
    level: float = 0.95,
    notes: list[str] | None = None,
) -> tuple[Forecast, list[str], LayerProfile, Communication]:
    """Return what the model predicts for the inputs of a command.

    Parameters
    ----------
    arguments : argparse.Namespace
        The values of `INPUTS`.
    spec : str
        The plan, which says which gradients share a message: a name as `PLAN_NAMES` explains
        them, or a file ``*.json`` of ``ddlkit plan``.
    level : float, optional
        The share of single iterations that the interval should contain.
    notes : list of str, optional
        A list to which the notes on the inputs are added. If it is given, neither notes nor
        warnings are printed here: the caller first checks its other arguments, and then calls
        `print_remarks`. By default both are printed here.

    Returns
    -------
    forecast : Forecast
        The prediction with its interval.
    warnings : list of str
        Why the prediction may be wrong.
    profile : LayerProfile
        The layers.
    communication : Communication
        The cost of messages, and what slows them down.

    Raises
    ------
    UserError
        If the inputs are wrong or do not go together.
    """
    from ddlkit.core.cost import NegativeCostError
    from ddlkit.model import forecast

    printed_here = notes is None
    notes = [] if notes is None else notes
    warnings: list[str] = []
    _refuse_wrong_dilation(arguments.dilation)
    _refuse_wrong_options_of_selection(arguments)
    _refuse_wrong_copies(arguments)
    # This refuses a recorded table of a kind that its option does not take.
    refuse_other_kinds(arguments)
    # The functions that read inputs add to `notes` and `warnings`.
    profile = _read_profile(arguments, notes, warnings)
    workload = workload_of(arguments, profile)
    # `fitted_messages` has the sizes and the devices of the messages whose times were fitted.
    communication, fitted_messages = read_communication(arguments, warnings)
    # With --density, only a share of the gradients is selected and sent, by an all-gather in
    # place of the all-reduce. Selection comes before contention, which slows down the
    # messages that are really sent.
    communication = _with_selection(arguments, communication, workload)
    communication = _with_contention(arguments, communication, profile, warnings, notes)
    try:
        predicted = forecast(
            workload,
            _plan_of(arguments, spec, workload, communication),
            communication,
            copy_s_per_byte=arguments.copy_s_per_byte,
            level=level,
        )
        # Times of messages are computed when they are first asked for. If one of them is
        # negative, this raises the error here.
        _ = predicted.iteration.communication_s
    except NegativeCostError as error:
        origin = (
            arguments.cost or f"--collectives {_listed_files(arguments.collectives)}"
        )
        raise UserError(f"{origin}: {error}") from error
    if communication.link.burst_s:
        notes += _notes_of_burst(arguments)
    warnings += _doubts_of_cost(predicted.iteration, profile.device, fitted_messages)
    warnings += _doubts_of_proof(arguments, spec, predicted.iteration)
    # Notes are printed only now that all inputs are known to be right, because they would
    # distract from an error below them.
    if printed_here:
        print_remarks(notes, warnings)
    return predicted, warnings, profile, communication


def workload_of(arguments: argparse.Namespace, profile: LayerProfile) -> Workload:
    """Return what an iteration computes, without the selections of gradients.

    Parameters
    ----------
    arguments : argparse.Namespace
        The values of `INPUTS`.
    profile : LayerProfile
        The layers, as `forecast_of` returns them.

    Returns
    -------
    Workload
        The compute times of the profile, changed as --dilation and --accumulate say.
    """
    # The option --dilation is a factor on all compute times. With --accumulate, an iteration
    # computes several batches, and sends their added gradients once.
    workload = profile.workload()
    return workload.scaled(arguments.dilation).accumulated(arguments.accumulate)


def _notes_of_burst(arguments: argparse.Namespace) -> list[str]:
    """Return notes on the printed times that assume a whole burst of the link for each message.

    A link that a token bucket limits saves up a burst while it is idle, which is a number of
    bytes that may later pass at once. A message that is measured alone finds the whole burst.
    In an iteration, earlier messages may have used it up.
    """
    if _is_what_if(arguments):
        return [NOTE_OF_BURST_OF_GRAPH]
    # The time of an iteration allows for the burst. Of all commands, only predict also prints
    # the sum of the times of all messages.
    if arguments.command == "predict":
        return [NOTE_OF_BURST]
    return []


def _doubts_of_cost(iteration: Any, device: str, fitted_messages: Any) -> list[str]:
    """Return warnings that the cost of messages may not hold for a predicted iteration.

    ``device`` is that of the layer profile. ``fitted_messages`` is the `Measured` with the
    sizes and the devices of the messages to which the cost was fitted.
    """
    from ddlkit.model.fits import doubts

    warnings = []
    cost = iteration.cost
    # If ``selects``, a part of the gradients is selected, and only this part is sent, always by
    # all_gather. Such a cost needs no warning.
    if cost.collective != "all_reduce" and not cost.selects:
        warnings.append(
            f"the cost is of {cost.collective}, but DistributedDataParallel sends gradients by "
            "all_reduce: fit a cost of all_reduce, unless your training sends them by "
            f"{cost.collective}"
        )
    # ``group_bytes`` are the bytes of the gradients of each message, of which a message of selected
    # gradients sends only a part, by two collectives. The cost was fitted to sizes of collectives,
    # so these are compared.
    collective_bytes = cost.collective_bytes(iteration.group_bytes)
    return [*warnings, *doubts(device, fitted_messages, collective_bytes)]


def _doubts_of_proof(
    arguments: argparse.Namespace, spec: str, iteration: Any
) -> list[str]:
    """Return why a plan that is called exact may not be the best for the inputs of a command.

    ``spec`` is the name of the plan of ``iteration``. The result is empty for the plan of
    another planner than exact, and if the command chose the planner itself.
    """
    option = _option_of_planner(arguments, spec)
    # `least_s` is the time that no plan can undercut, which only the planner exact gives.
    if iteration.plan.least_s is None or option is None:
        return []
    advice = f"try {option} search"
    doubts = []
    if arguments.slowdown or arguments.copies:
        doubts.append(
            f"the plan exact is proven best without contention only: {advice}"
        )
    if arguments.in_flight > 1:
        doubts.append(
            "the plan exact is proven best only for messages that are sent one after "
            f"the other, and not for {arguments.in_flight} in flight: {advice}"
        )
    if iteration.link.burst_s:
        doubts.append(
            "the plan exact is proven best only for links that save up no burst while they "
            f"are idle: {advice}"
        )
    return doubts


def _plan_of(
    arguments: argparse.Namespace, spec: str, workload: Any, communication: Any
) -> Any:
    """Return the plan that a file ``*.json`` holds, or that a planner makes.

    ``spec`` is the file or the name of the planner, which makes a plan for ``workload`` and
    ``communication``. Raises UserError if there is no such plan, or if it does not fit the
    gradients of ``workload``. The error names the file, or the option by which the user chose
    the planner.
    """
    from ddlkit.core.cost import NegativeCostError
    from ddlkit.core.plan import PLANNERS
    from ddlkit.model.predictor import SEARCH, plan_with_contention

    if spec.endswith(".json"):
        return _plan_in_file(spec, workload)
    try:
        # Planners that know contention, such as `search`, take it into account.
        return plan_with_contention(spec, workload, communication)
    except NegativeCostError:
        # The cost is wrong, and not the plan.
        raise
    except UserError as error:
        option = _option_of_planner(arguments, spec)
        # If no option gave the name, the command chose the planner itself.
        if option is None:
            raise
        planner = spec.partition(":")[0]
        is_known = planner in PLANNERS or planner == SEARCH
        if not is_known and Path(spec).is_file():
            raise UserError(
                f"{option} {spec}: the name of a file with a plan must end in .json: rename it"
            ) from None
        # The error names the plan, as in "plan 'x': ...". The option replaces these words.
        problem = re.sub(r"^plan (['\"]).*?\1: ", "", str(error))
        if not is_known:
            problem += ", or a file *.json that ddlkit plan --json wrote"
        raise UserError(f"{option} {shown(spec)}: {problem}") from error


def _plan_in_file(file: str, workload: Any) -> Any:
    """Return the plan that ``ddlkit plan --json`` wrote into ``file``.

    Raises UserError if the plan is for another number of gradients than ``workload`` has.
    """
    from ddlkit import formats

    plan = formats.read_plan(Path(file))
    try:
        # This call only checks that the plan fits the gradients.
        plan.group_bytes(workload)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
    # Only gradients of several types are sent in another order than they become ready.
    if plan.order and not workload.has_several_types:
        raise UserError(
            f"{file}: its groups must list the tensors from the last, {plan.n - 1}, to the first, "
            "0, because the gradient of the last one is ready first"
        )
    return plan


def _option_of_planner(arguments: argparse.Namespace, planner: str) -> str | None:
    """Return the option that gave the name of a planner, None if no option gave it.

    The option is --plan in some commands and --planner in others.
    """
    for name in ("plan", "planner"):
        if getattr(arguments, name, None) == planner:
            return option_of(name)
    return None


def _refuse_wrong_dilation(dilation: float) -> None:
    """Raise UserError if the factor on compute times is not finite and above zero."""
    if not 0 < dilation < math.inf:
        raise UserError(f"--dilation {dilation:g}: must be finite and above zero")


LONG_COMPUTE_S = 100.0
"""From this time of a forward and a backward pass on, a profile may have another unit."""

SLOWEST_COPY_S_PER_BYTE = 1e-6
"""A copy in memory that takes longer for a byte is slower than any memory."""


def _refuse_wrong_copies(arguments: argparse.Namespace) -> None:
    """Raise UserError for a time of copies that no memory has, or that is given twice."""
    per_byte_s = arguments.copy_s_per_byte
    if not 0 <= per_byte_s <= SLOWEST_COPY_S_PER_BYTE:
        raise UserError(
            f"--copy-s-per-byte {per_byte_s:g}: must be from 0 to "
            f"{SLOWEST_COPY_S_PER_BYTE:g} seconds for each byte, as in 1e-10"
        )
    if arguments.copies:
        # The measured time would replace the given one.
        refuse_given(
            arguments,
            ["copy_s_per_byte"],
            "has no effect with --copies, which has the measured time",
        )


_KIND_BY_OPTION = {
    "profile": "layers",
    "collectives": "collectives",
    "slowdown": "slowdown",
    "copies": "copies",
    "inputs": "inputs",
    "selection": "selection",
}
"""The kind of recorded table that an option takes, by the name of the parsed argument."""


def refuse_other_kinds(arguments: argparse.Namespace) -> None:
    """Raise UserError if an option names a recorded table of another kind than it takes.

    Files that are no recorded tables are checked where they are read.

    Parameters
    ----------
    arguments : argparse.Namespace
        The values of the options of a command, which may lack some of `_KIND_BY_OPTION`.

    Raises
    ------
    UserError
        If there is such an option. If the command has an option that takes the table, the
        error names it, because two options were perhaps interchanged.
    """
    from ddlkit.store.sheet import kind_in_words

    # Options that this command does not have are left out.
    option_by_kind = {
        kind: option_of(name)
        for name, kind in _KIND_BY_OPTION.items()
        if _takes(arguments, name)
    }
    for name, needed in _KIND_BY_OPTION.items():
        for path, kind in _recorded_kinds(arguments, name):
            if kind == needed:
                continue
            belongs_to = ""
            if kind in option_by_kind:
                belongs_to = f", which belongs to {option_by_kind[kind]}"
            raise UserError(
                f"{option_of(name)} {path}: is {kind_in_words(kind)}{belongs_to}: "
                f"give {option_of(name)} {kind_in_words(needed)}, such as {needed}.csv or "
                f"{needed}-NAME.csv"
            )


def _recorded_kinds(
    arguments: argparse.Namespace, name: str
) -> Iterator[tuple[Path, str]]:
    """Yield each recorded table that an option names, with the kind of the table.

    ``name`` is the parsed argument of the option, which may be missing in ``arguments``.
    """
    from ddlkit import store
    from ddlkit.store.tables import is_stamped

    given = getattr(arguments, name, None) or []
    # Some options take several files.
    patterns = given if isinstance(given, list) else [given]
    for path in store.expand_tables(patterns):
        # The stamp is a file next to a recorded table. It names the kind of the table.
        if is_stamped(path):
            yield path, store.load_stamp(path)["schema"]


def _takes(arguments: argparse.Namespace, name: str) -> bool:
    """Return whether a command has the option of a parsed argument.

    The command what-if lacks the options `NOT_IN_THE_GRAPH`, although its parsed arguments
    have the defaults of these options.
    """
    is_left_out = _is_what_if(arguments) and name in NOT_IN_THE_GRAPH
    return hasattr(arguments, name) and not is_left_out


def _refuse_wrong_options_of_selection(arguments: argparse.Namespace) -> None:
    """Raise UserError if an option does not go with --density, or lacks it.

    --density and --selection need each other, and selected gradients are sent by all_gather.
    """
    from ddlkit.core.collective import of_gradients

    if (arguments.density is None) != (arguments.selection is None):
        raise UserError("give --density and --selection together, or neither")
    needed = of_gradients(sparse=True)
    if arguments.density is not None and arguments.collective not in (None, needed):
        raise UserError(
            f"--collective {arguments.collective}: with --density, gradients are sent by "
            f"{needed}: leave --collective out"
        )


def _refuse_second_forward_time(file: Path) -> None:
    """Raise UserError if the profile ``file`` has times of the forward pass.

    The user has given --forward-s, which would state them a second time.
    """
    from ddlkit.store.files import read_text

    header = read_text(file).partition("\n")[0]
    # Some programs write the names of columns in quotes.
    columns = {name.strip().strip('"') for name in header.split(",")}
    if "forward_s" in columns:
        raise UserError(
            f"--forward-s: {file} has its own column forward_s: leave --forward-s out"
        )


def _read_profile(
    arguments: argparse.Namespace, notes: list[str], warnings: list[str]
) -> Any:
    """Return the layer profile, whose gradients have the element size of --gradient-bytes.

    What is assumed for columns that the file lacks, and times that are perhaps not in seconds,
    are added to ``notes``. All other doubts about the file are added to ``warnings``.
    """
    from ddlkit import store

    if arguments.forward_s is not None:
        if not 0 < arguments.forward_s < math.inf:
            raise UserError(
                f"--forward-s {arguments.forward_s:g}: give a finite time above zero"
            )
        _refuse_second_forward_time(arguments.profile)
    # `read_profile` adds what it assumes for each missing column.
    assumed: list[str] = []
    profile = store.read_profile(
        arguments.profile,
        arguments.network,
        arguments.batch,
        forward_s=arguments.forward_s,
        assumed=assumed,
        ranks=arguments.profile_ranks,
    )
    if assumed:
        notes.append(_note_of_assumed(arguments.profile, assumed))
    workload = profile.workload()
    computed_s = workload.forward_s + float(workload.backward_s.sum())
    # Such long times are perhaps in another unit, such as milliseconds.
    if computed_s > LONG_COMPUTE_S:
        checked = "its times are"
        if arguments.forward_s is not None:
            checked = "--forward-s and its times are"
        notes.append(
            f"the forward and the backward pass of {arguments.profile} take "
            f"{computed_s:.3g} s: check that {checked} in seconds"
        )
    warnings += [f"{arguments.profile}: {doubt}" for doubt in profile.doubts()]
    warnings += _warnings_of_slow_host(arguments.profile, profile)
    if arguments.gradient_bytes is None:
        return profile
    return profile.sent_as(arguments.gradient_bytes)


def _warnings_of_slow_host(path: Path, profile: Any) -> list[str]:
    """Return a warning if the host, and not the GPU, decided the times of a profile.

    ``profile`` was read from ``path``. Only a profile that was measured here has a table
    ``samples`` beside it, with the time that the host needs to issue an iteration.
    """
    from ddlkit import store
    from ddlkit.model.predictor import HOST_BOUND, issue_share
    from ddlkit.store.tables import is_stamped

    # Beside a recorded profile layers.csv or layers-NAME.csv, the table is samples.csv or
    # samples-NAME.csv. If the name of the profile lacks "layers", `replace` returns it as it
    # is, and there is no such table. A recorded table has a stamp, which says where its rows
    # come from.
    samples_path = path.with_name(path.name.replace("layers", "samples", 1))
    if samples_path == path or not is_stamped(samples_path):
        return []
    samples = store.load_table(samples_path, "samples")
    is_of_profile = (
        (samples["network"] == profile.network)
        & (samples["batch"] == profile.batch)
        & (samples["device"] == profile.device)
    )
    samples = samples[is_of_profile]
    # The time of issue is measured on GPUs only.
    if "issue" not in set(samples["quantity"]):
        return []
    # The time to issue an iteration, divided by its time on the GPU. If this is near 1, the
    # GPU waits for the host.
    share = issue_share(samples)
    if share <= HOST_BOUND:
        return []
    return [
        f"{path}: the host needs {share:.0%} of an iteration to issue it, so these are "
        "times of the host and not of the GPU: measure a larger batch, or take the "
        "prediction for this host only"
    ]


# ---------------------------------------------------------------- what messages cost


def read_communication(
    arguments: argparse.Namespace,
    warnings: list[str],
    *,
    sends_gradients: bool = True,
) -> tuple[Any, Any]:
    """Return what messages cost, from --cost or calibrated from --collectives.

    Parameters
    ----------
    arguments : argparse.Namespace
        The values of `INPUTS`.
    warnings : list of str
        Reasons why the cost may be wrong are added to this list.
    sends_gradients : bool, optional
        Whether the messages send gradients. A cost of another collective than theirs is then
        refused.

    Returns
    -------
    communication : Communication
        The cost, with random draws of it if its uncertainty is known.
    measured : Measured
        The sizes of the messages to which the cost was fitted, and the kind of their devices.

    Raises
    ------
    UserError
        If both or neither of --cost and --collectives are given, or if a file does not fit
        the other options.
    """
    if arguments.cost and arguments.collectives:
        raise UserError("--cost and --collectives both give the cost: leave one out")
    if not (arguments.cost or arguments.collectives):
        raise UserError(
            "no cost of messages: give a table of their times with --collectives, or a "
            "cost with --cost"
        )
    _refuse_unused_choices(arguments)
    if arguments.assume_ring and _ranks_to_predict_for(arguments) is None:
        option = "--gpus" if _is_what_if(arguments) else "--ranks"
        raise UserError(
            f"--assume-ring needs {option}, the number of ranks to predict for"
        )
    if arguments.cost:
        return _cost_from_file(arguments, warnings, sends_gradients=sends_gradients)
    return _calibrated(arguments, warnings)


def _refuse_unused_choices(arguments: argparse.Namespace) -> None:
    """Raise UserError if an option should choose among measured times, but cannot.

    A file of --cost has no times, and logs of other programs name no links.
    """
    if arguments.cost:
        for name in ("place", "table"):
            if getattr(arguments, name) is not None:
                raise UserError(
                    f"--{name} chooses among the times of --collectives, and a --cost "
                    "has none: leave it out"
                )
    # With --slowdown, --link is not refused, because it also chooses rows of that table.
    if arguments.link is None or arguments.slowdown:
        return
    if arguments.cost:
        raise UserError(
            "--link chooses among the times of --collectives, and a --cost has none: "
            "leave it out"
        )
    refuse_link_of_foreign_files(arguments.link, arguments.collectives)


def refuse_link_of_foreign_files(link: str | None, patterns: Sequence[Path]) -> None:
    """Raise UserError if --link is given and no file of message times names links.

    Recorded tables name links, and so does a CSV with the column link. Logs of benchmarks
    do not. A file that cannot be read is refused here, with the error of reading it.
    """
    from ddlkit import store

    if link is None:
        return
    paths = store.expand_tables([*patterns])
    # The error names only the first of several files.
    if not any(_names_links(path) for path in paths):
        raise UserError(
            f"--link {link}: {paths[0]} has no column link, and is no recorded table: "
            "leave --link out"
        )


def _names_links(path: Path) -> bool:
    """Return whether a file of message times says over which link each row was measured."""
    from ddlkit import store
    from ddlkit.formats import size_time_csv

    # A recorded table has a stamp, which says where and how it was measured. Every recorded
    # table of message times has the column link.
    if store.tables.is_stamped(path):
        return True
    # A file into which several recorded tables were packed has an error of its own.
    store.tables.refuse_pack(path)
    return size_time_csv.names_links(store.files.read_text(path))


# ---------------------------------------------------------------- more ranks than measured

RING = "ring"
"""The algorithm of a cost that `MessageCost.at_workers` takes to other numbers of ranks."""
ALGORITHMS_OF_RING = (None, "", RING)
"""The algorithms for which --assume-ring is allowed. None and "" stand for an unknown one."""


def _is_what_if(arguments: argparse.Namespace) -> bool:
    """Return whether the command is what-if, which alone has the option --gpus.

    --gpus is the number of ranks after a change, and --ranks that before the change.
    """
    return hasattr(arguments, "gpus")


def _assumes_ring_of_ranks(arguments: argparse.Namespace) -> bool:
    """Return whether --assume-ring asks for a ring of --ranks ranks.

    Messages between so many ranks need not have been measured. In what-if, the option asks for a
    ring of --gpus ranks instead, and --ranks is a measured number.
    """
    return bool(arguments.assume_ring) and not _is_what_if(arguments)


def _ranks_to_predict_for(arguments: argparse.Namespace) -> int | None:
    """Return the number of ranks for which to predict, None if the user names none."""
    ranks: int | None = arguments.gpus if _is_what_if(arguments) else arguments.ranks
    return ranks


def assumption(is_assumed_ring: bool) -> dict[str, str]:
    """Return what is assumed of a ring that was not measured, as entries of a result.

    The result is empty if the ranks were measured, even with --assume-ring, because then nothing is
    assumed.
    """
    if not is_assumed_ring:
        return {}
    return {"assumed": "a ring whose links are all like the measured ones"}


def as_ring(communication: Any, ranks: int, origin: str, warnings: list[str]) -> Any:
    """Return the communication for a number of ranks that was not measured, assuming a ring.

    Parameters
    ----------
    communication : Communication
        The communication between the ranks that were measured.
    ranks : int
        The number of ranks for which it is returned.
    origin : str
        The file or the option that gives the cost, as errors name it.
    warnings : list of str
        A warning that a ring is assumed is added to this list.

    Returns
    -------
    Communication
        The cost and its draws for a ring between ``ranks`` ranks.

    Raises
    ------
    UserError
        If the cost is not of the form alpha_beta, does not state its number of ranks, has
        a start-up below zero, or holds for another algorithm.
    """
    cost = communication.cost
    _refuse_other_than_ring(cost, ranks, origin)

    # Only the cost of a ring can be taken to another number of ranks, so the cost, and each
    # draw of it, is first declared to be one.
    def between_ranks(cost_or_draw: Any) -> Any:
        return cost_or_draw.by_algorithm(RING).at_workers(ranks)

    warnings.append(
        f"the cost between {ranks} ranks is not taken from measured times: it is that of a ring "
        f"whose links are all like those between {cost.workers} ranks; a tree, or a slower "
        "network between more machines, costs something else, which no interval covers"
    )
    return replace(
        communication,
        cost=between_ranks(cost),
        draws=[between_ranks(draw) for draw in communication.draws],
        is_assumed_ring=True,
        # Costs of other forms, fitted to the same times, are dropped, because only alpha_beta
        # can be taken to another number of ranks.
        costs_by_form={},
    )


def is_perhaps_of_ring(cost: Any) -> bool:
    """Return whether --assume-ring can take a cost to other ranks, or one fitted to its times.

    Parameters
    ----------
    cost : MessageCost
        A cost of any form.

    Returns
    -------
    bool
        False if the messages were sent in another way than a ring, or if the cost is a line
        whose start-up is negative, which is the cost of no ring.
    """
    from ddlkit.core.cost import AlphaBeta

    if cost.algorithm not in ALGORITHMS_OF_RING:
        return False
    return not (isinstance(cost, AlphaBeta) and cost.alpha_s < 0)


def advice_to_assume_ring(cost: Any) -> str:
    """Return in words how to use a cost between other ranks than it was measured for.

    Parameters
    ----------
    cost : MessageCost
        The cost that the user gave by --cost, of which `is_perhaps_of_ring` holds.
    """
    # Of all forms, only a start-up and a bandwidth (alpha_beta) can be taken to another number
    # of ranks.
    if cost.form == "alpha_beta":
        return "to assume a ring, add --assume-ring"
    return f"to assume a ring, {_how_to_fit_line(cost)}, and add --assume-ring"


def _how_to_fit_line(cost: Any) -> str:
    """Return in words how to fit a cost that --assume-ring can take to other ranks.

    The times are those to which ``cost`` was fitted.
    """
    how = "fit the times of its messages anew by ddlkit fit FILE --form alpha_beta --ranks"
    if cost.workers is not None:
        return f"{how} {cost.workers} --json"
    return f"{how} N --json, where N is the number of ranks between which they were measured"


def _refuse_other_than_ring(cost: Any, ranks: int, origin: str) -> None:
    """Raise UserError unless ``cost`` can be taken to ``ranks`` ranks as the cost of a ring.

    ``origin`` is the file or the option that gives the cost, as errors name it.
    """
    from ddlkit.core.cost import AlphaBeta

    # The advice is on fitting a cost in a file. A cost that this command has fitted itself has
    # the form alpha_beta and a number of ranks, and needs no such advice.
    fitting = _how_to_fit_line(cost)
    if not isinstance(cost, AlphaBeta):
        raise UserError(
            f"{origin}: a cost of the form {cost.form} cannot be taken to {ranks} ranks: "
            f"{fitting}"
        )
    if cost.workers is None:
        raise UserError(
            f"{origin}: the cost does not say between how many ranks it holds: {fitting}"
        )
    if cost.algorithm not in ALGORITHMS_OF_RING:
        raise UserError(
            f"{origin}: the messages were sent by {cost.algorithm}, not by a ring: "
            "leave --assume-ring out"
        )
    # The time of a message is alpha_s, the start-up, plus its size divided by the bandwidth.
    # Each step of a ring takes an equal part of the start-up, and no step can take a negative
    # time.
    if cost.alpha_s < 0:
        raise UserError(
            f"{origin}: the line that fits best has a start-up below zero, which no ring "
            "has: measure smaller messages, too"
        )


MOST_MISSED = 0.02
"""Up to this error at any size, a line is as good as the measured times."""


def _misses_of_line(cost: Any, rows: Any) -> list[str]:
    """Return a warning if a line is clearly off the median times of the measured sizes.

    The line is ``cost``: a start-up plus the size over a bandwidth. ``rows`` have the measured
    times.
    """
    medians_s = rows.groupby("bytes")["seconds"].median()
    # A cost gives the seconds of messages of some sizes, here of each measured one.
    predicted_s = cost(medians_s.index.to_numpy())
    errors = abs(predicted_s / medians_s - 1)
    if errors.max() <= MOST_MISSED:
        return []
    return [
        f"the line of --assume-ring misses the measured times by {errors.median():.1%} "
        f"(median of the sizes) and {errors.max():.1%} (worst size)"
    ]


# ---------------------------------------------------------------- costs and tables


def _cost_from_file(
    arguments: argparse.Namespace, warnings: list[str], *, sends_gradients: bool
) -> tuple[Any, Any]:
    """Return the `Communication` with the cost in the JSON file of --cost, and a `Measured`.

    `Measured` has the sizes of the messages to which the cost was fitted, and the devices that sent
    them. Warnings of the fit, and what --assume-ring assumes, are added to ``warnings``.
    ``sends_gradients`` says whether the messages send gradients. If so, a cost of another
    collective than the one that sends them is refused. Otherwise only --collective can exclude a
    cost.
    """
    from ddlkit.core.cost import costs_from_dict
    from ddlkit.core.link import Link
    from ddlkit.model import Communication
    from ddlkit.model.fits import Measured, warnings_of_fit
    from ddlkit.store.files import read_json

    path = arguments.cost
    _refuse_table_as_cost(path)
    advice = "write it by ddlkit fit --json, or give a table of message times with --collectives"
    description = read_json(path, advice)
    try:
        cost, draws = costs_from_dict(description)
        measured = Measured.read(description, cost)
        warnings += warnings_of_fit(description)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    _refuse_other_collective(arguments, cost, sends_gradients=sends_gradients)
    link = Link(in_flight=arguments.in_flight)
    communication = Communication(cost, draws=draws, link=link)
    # With --assume-ring, this computes the cost between --ranks ranks. In what-if, that is done
    # later, and for --gpus ranks.
    return _between_given_ranks(arguments, communication, warnings), measured


def _refuse_table_as_cost(path: Path) -> None:
    """Raise UserError if the file of --cost is a recorded table, loose or packed."""
    from ddlkit import store
    from ddlkit.store.sheet import kind_in_words

    if not store.tables.is_stamped(path):
        return
    kind = store.load_stamp(path)["schema"]
    advice = "give a cost that ddlkit fit --json wrote"
    if kind == "collectives":
        advice = "give it with --collectives"
    elif kind == "layers":
        advice = (
            f"give it with --profile, and {advice.removeprefix('give ')} with --cost"
        )
    raise UserError(f"--cost {path}: is {kind_in_words(kind)}, and no cost: {advice}")


def _between_given_ranks(
    arguments: argparse.Namespace, communication: Any, warnings: list[str]
) -> Any:
    """Return the communication with the cost of --cost, between as many ranks as --ranks says.

    What --assume-ring assumes is added to ``warnings``. Raises UserError if the cost holds
    for another number of ranks and may not be taken to that of --ranks.
    """
    cost = communication.cost
    ranks = arguments.ranks
    # The option --assume-ring takes the cost to --ranks ranks. In what-if, it takes the cost to
    # the --gpus ranks after the change instead. This is done later, and --ranks is checked here
    # as without the option.
    if _assumes_ring_of_ranks(arguments):
        if ranks == cost.workers:
            return communication
        return as_ring(communication, ranks, str(arguments.cost), warnings)
    # A cost that does not say its number of ranks holds for --ranks, if that is given.
    if cost.workers is None:
        return replace(
            communication,
            cost=cost.with_workers(ranks),
            draws=[draw.with_workers(ranks) for draw in communication.draws],
        )
    if ranks is not None and ranks != cost.workers:
        advice = f"fit times between {ranks} ranks"
        if is_perhaps_of_ring(cost):
            advice += f"; {advice_to_assume_ring(cost)}"
        raise UserError(
            f"{arguments.cost}: holds for {cost.workers} ranks, not for {ranks}: {advice}"
        )
    return communication


def _refuse_other_collective(
    arguments: argparse.Namespace, cost: Any, *, sends_gradients: bool
) -> None:
    """Raise UserError if the cost in --cost is not that of the collective that is needed.

    If ``sends_gradients``, this is the collective that sends the gradients. Otherwise any
    collective will do that --collective does not exclude.
    """
    from ddlkit.core.collective import COLLECTIVES

    needed = arguments.collective
    if not sends_gradients:
        if needed not in (None, cost.collective):
            raise UserError(
                f"{arguments.cost} holds a cost of {cost.collective}, and not of {needed}: fit "
                f"a cost of {needed}, or leave --collective out"
            )
        return
    if needed is None:
        # With --density, `_refuse_unless_gathering` checks the collective later.
        if arguments.density is not None:
            return
        needed = "all_reduce"
    if cost.collective != needed:
        advice = f"fit a cost of {needed}"
        # DDP, for which export --to ddp writes, sends gradients by all_reduce only.
        is_for_ddp = getattr(arguments, "to", None) == "ddp"
        if cost.collective in COLLECTIVES and not is_for_ddp:
            advice += (
                f", or give --collective {cost.collective} if your training sends them by "
                f"{cost.collective}"
            )
        raise UserError(
            f"{arguments.cost} holds a cost of {cost.collective}, but the gradients are "
            f"sent by {needed}: {advice}"
        )


def _calibrated(arguments: argparse.Namespace, warnings: list[str]) -> tuple[Any, Any]:
    """Return the `Communication` that is fitted to the files of --collectives, and a `Measured`.

    `Measured` has the sizes of the messages in the files, and the devices that sent them.
    Doubts about the rows, and what --assume-ring assumes, are added to ``warnings``.
    """
    from ddlkit import store
    from ddlkit.core.collective import of_gradients
    from ddlkit.model.fits import Measured, strange_rows

    # all_gather with --density, and otherwise all_reduce.
    default = of_gradients(sparse=arguments.density is not None)
    collective = arguments.collective or default
    paths = store.expand_tables(arguments.collectives)
    all_rows = _rows_of_messages(arguments, paths, warnings)
    # `_chosen_rows` would refuse a missing collective, too, but with an error that does not say
    # that --density needs it.
    if arguments.density is not None:
        _refuse_without_times_of(all_rows, collective)
    # Errors about the rows of all files name the option and its files.
    origin = f"--collectives {_listed_files(arguments.collectives)}"
    # `chosen` maps the columns "collective", "ranks" and "link" to the values of the rows.
    rows, chosen = _chosen_rows(arguments, all_rows, collective, origin)
    # With --assume-ring, the cost is extrapolated to the ranks to predict for, unless messages
    # between these ranks were measured.
    is_extrapolated = arguments.assume_ring and (
        _ranks_to_predict_for(arguments) not in _measured_ranks(all_rows, chosen)
    )
    # Only a start-up and a bandwidth (alpha_beta) can be extrapolated. Otherwise the cost is a
    # table that runs through the measured medians, for which no form has to be chosen.
    form = "alpha_beta" if is_extrapolated else "table"
    calibrated = _fitted_to_rows(arguments, paths, rows, chosen, form)
    # `strange_rows` warns of times that do not depend on the size as usual.
    warnings += strange_rows(rows)
    if is_extrapolated:
        warnings += _misses_of_line(calibrated.cost, rows)
    # What-if needs the cost between the measured ranks, too, and extrapolates it later.
    if is_extrapolated and not _is_what_if(arguments):
        calibrated = as_ring(calibrated, arguments.ranks, origin, warnings)
    # The backends, such as nccl or gloo, tell between which devices messages were sent.
    backends = rows["backend"].unique()
    return calibrated, Measured.of(rows["bytes"], *backends)


def _measured_ranks(all_rows: DataFrame, chosen: Mapping[str, Any]) -> set[int]:
    """Return the numbers of ranks between which a collective was measured over a link.

    ``chosen`` has the collective and the link by the names "collective" and "link".
    """
    is_of_collective = all_rows["collective"] == chosen["collective"]
    is_over_link = all_rows["link"] == chosen["link"]
    return {int(ranks) for ranks in all_rows["ranks"][is_of_collective & is_over_link]}


def measured_between_gpus(
    arguments: argparse.Namespace, warnings: list[str]
) -> Communication | None:
    """Return the communication between --gpus ranks, if --collectives has times of it.

    Parameters
    ----------
    arguments : argparse.Namespace
        The values of the options of what-if.
    warnings : list of str
        Doubts about these times are added to this list, unless it has them already.

    Returns
    -------
    Communication or None
        The communication that is fitted to these times. None if --collectives is not given,
        or if its times of the same collective and link lack this number of ranks.
    """
    from ddlkit import store
    from ddlkit.core.collective import of_gradients
    from ddlkit.model.fits import strange_rows

    if not arguments.collectives:
        return None
    import pandas as pd

    paths = store.expand_tables(arguments.collectives)
    # The doubts about the files are dropped here. They are in `warnings` already, because the
    # same files were read for the cost before the change.
    all_rows = _rows_of_messages(arguments, paths, warnings=[])
    collective = arguments.collective or of_gradients(sparse=False)
    origin = f"--collectives {_listed_files(arguments.collectives)}"
    # `chosen` maps the columns "collective", "ranks" and "link" to the values before the change.
    _, chosen = _chosen_rows(arguments, all_rows, collective, origin)
    # Rows of a file that does not say its number of ranks are never taken for rows between
    # --gpus ranks. They count as measured between --ranks ranks, which is another number.
    if arguments.gpus not in _measured_ranks(all_rows, chosen):
        return None
    # The change to --gpus ranks keeps the collective and the link.
    chosen_after = {**chosen, "ranks": arguments.gpus}
    is_chosen = pd.Series(True, index=all_rows.index)
    for column, value in chosen_after.items():
        is_chosen &= all_rows[column] == value
    rows = all_rows[is_chosen]
    # `strange_rows` warns of times that do not depend on the size as usual.
    doubts = strange_rows(rows)
    warnings += [doubt for doubt in doubts if doubt not in warnings]
    measured: Communication = _fitted_to_rows(
        arguments, paths, rows, chosen_after, form="table"
    )
    return measured


def _fitted_to_rows(
    arguments: argparse.Namespace,
    paths: Iterable[Path],
    rows: DataFrame,
    chosen: Mapping[str, Any],
    form: str,
) -> Any:
    """Return the `Communication` that is fitted to message times in ``paths``.

    ``rows`` are the messages of one collective, number of ranks and link, which ``chosen``
    has by the names "collective", "ranks" and "link". ``form`` is the form of the cost. Errors
    of the fit name the files.
    """
    from ddlkit.model import Calibration

    try:
        calibration = Calibration.of(rows, form=form)
    except UserError as error:
        raise UserError(f"{' and '.join(map(str, paths))}: {error}") from error
    # A calibration may have costs of several links and numbers of ranks. Here it has one.
    return calibration.between(
        str(chosen["link"]),
        int(chosen["ranks"]),
        str(chosen["collective"]),
        in_flight=arguments.in_flight,
    )


def _listed_files(paths: Sequence[Path]) -> str:
    """Return the first of some files, and how many more there are, in words."""
    if len(paths) == 1:
        return str(paths[0])
    return f"{paths[0]} and {len(paths) - 1} more"


def _rows_of_messages(
    arguments: argparse.Namespace, paths: Iterable[Path], warnings: list[str]
) -> DataFrame:
    """Return the message times in the files of --collectives, one below the other.

    Doubts about the files are added to ``warnings``.
    """
    import pandas as pd

    from ddlkit.formats.messages import read_collectives

    # With --assume-ring, --ranks is the number to predict for. It need not have been measured,
    # and says nothing about the files.
    ranks_in_files = None if _assumes_ring_of_ranks(arguments) else arguments.ranks
    frames = []
    for path in paths:
        frame = read_collectives(
            path,
            collective=arguments.collective,
            link=arguments.link,
            ranks=ranks_in_files,
            place=arguments.place,
            table=arguments.table,
            # What `read_collectives` notes are doubts about the file, which are warnings here.
            notes=warnings,
            if_ranks_unknown=_how_to_state_ranks(arguments, path),
            if_collective_unnamed=arguments.collective or "all_reduce",
        )
        warnings += _doubts_of_unit(path, frame)
        frames.append(frame)
    return pd.concat(frames).reset_index(drop=True)


def _how_to_state_ranks(arguments: argparse.Namespace, path: Path) -> str:
    """Return how to say between how many ranks the times in a file were measured, in words."""
    # In what-if, the number to predict for is --gpus.
    if not _assumes_ring_of_ranks(arguments):
        return "give their number with --ranks"
    reason = (
        "because with --assume-ring the option --ranks is the number to predict for"
    )
    # Only this strategy takes no --cost.
    if getattr(arguments, "strategy", None) == "fsdp":
        return f"give a CSV with the columns collective, bytes, seconds and ranks, {reason}"
    return (
        f"{reason}, first run ddlkit fit {path} --form alpha_beta --ranks N --json > cost.json, "
        "where N is the number of ranks between which they were measured, and then give --cost "
        "cost.json in place of --collectives"
    )


def _doubts_of_unit(path: Path, messages: DataFrame) -> list[str]:
    """Return a warning if message times in a file are perhaps not in seconds.

    ``messages`` are the rows of the file in ``path``. Times are doubted if they are so long
    that their unit may be another one.
    """
    from ddlkit import store
    from ddlkit.model.fits import other_unit

    # A recorded table has no other unit than seconds.
    if store.tables.is_stamped(path):
        return []
    doubts = other_unit(messages["bytes"], messages["seconds"])
    return [f"{path}: {doubt}" for doubt in doubts]


def _chosen_rows(
    arguments: argparse.Namespace, all_rows: Any, collective: str, origin: str
) -> tuple[Any, Any]:
    """Return the rows of one collective, number of ranks and link, and a dictionary of these.

    The keys of the dictionary are "collective", "ranks" and "link". Errors name ``origin``, the
    file or the option that gives ``all_rows``.
    """
    from ddlkit.store.readers import choose

    # Each column must have the value that is given here. If none is given, it must have a
    # single value.
    required = {
        "collective": collective,
        "ranks": arguments.ranks,
        "link": arguments.link,
    }
    # Without --collective, the collective is a default.
    not_given = () if arguments.collective else ("collective",)
    if _assumes_ring_of_ranks(arguments):
        # If no row is between --ranks ranks, the cost is computed from rows between another
        # number of ranks. This number is chosen among the rows of one collective and link.
        rows_of_link, _ = choose(
            all_rows, ("collective", "link"), required, origin, not_given=not_given
        )
        measured_ranks = rows_of_link["ranks"]
        required["ranks"] = _ranks_to_start_from(measured_ranks, arguments.ranks)
    try:
        return choose(all_rows, tuple(required), required, origin, not_given=not_given)
    except UserError as error:
        # The advice to add --assume-ring is only given if a number of ranks is required that no
        # row has. In what-if the option would not help, because --ranks is the measured number
        # there. Nor does it help if the messages were not sent by a ring.
        is_measured = (all_rows["ranks"] == required["ranks"]).any()
        rows_of_collective = all_rows[all_rows["collective"] == collective]
        is_of_ring = rows_of_collective["algorithm"].isin(ALGORITHMS_OF_RING).all()
        if required["ranks"] is None or is_measured or _is_what_if(arguments):
            raise
        if not is_of_ring:
            raise
        raise UserError(
            f"{error}, or add --assume-ring for the cost of a ring"
        ) from None


def _refuse_without_times_of(rows: Any, collective: str) -> None:
    """Raise UserError if no row is of ``collective``, which sends gradients with --density."""
    measured = rows["collective"].unique().tolist()
    if collective not in measured:
        raise UserError(
            f"--collectives: --density sends gradients by {collective}, but the times are "
            f"of {' and '.join(measured)}: give times of {collective}, or add "
            f"--collective {collective} if the file does not say of what they are"
        )


def _ranks_to_start_from(measured: Any, ranks: int) -> int:
    """Return the measured number of ranks from which the cost for ``ranks`` is computed.

    The result is ``ranks`` if that number was measured. Otherwise it is the largest number
    in ``measured``, because its messages crossed the most links.
    """
    measured_counts = {int(rank_count) for rank_count in measured}
    return ranks if ranks in measured_counts else max(measured_counts)


def _with_selection(arguments: argparse.Namespace, dense: Any, workload: Any) -> Any:
    """Return communication in which a share --density of the gradients is gathered.

    ``dense`` is the communication of whole gradients, which is returned without --density.
    Raises UserError if the gradients of ``workload`` have another element size than fp32.
    """
    from ddlkit.core.sparse import ELEMENT_BYTES
    from ddlkit.store.readers import read_selection

    if arguments.density is None:
        return dense
    # Selected gradients are modelled as values in fp32, each with an index of 4 bytes.
    if (workload.bytes != ELEMENT_BYTES * workload.parameters).any():
        raise UserError(
            f"--density needs gradients of {ELEMENT_BYTES} bytes a parameter, which "
            f"those of {arguments.profile} are not: leave --gradient-bytes out, or use "
            "another profile"
        )
    _refuse_unless_gathering(arguments, dense.cost)
    # The cost of selecting this share of the gradients.
    selection = read_selection(arguments.selection, arguments.density)
    return dense.sparse(arguments.density, selection)


def _refuse_unless_gathering(arguments: argparse.Namespace, cost: Any) -> None:
    """Raise UserError unless ``cost`` is that of an all-gather between a known number of ranks."""
    from ddlkit.core.collective import of_gradients

    needed = of_gradients(sparse=True)
    origin = arguments.cost or "--collectives"
    # Only a cost of --cost can be of another collective. From --collectives, the times of the
    # needed one were chosen.
    if cost.collective != needed:
        raise UserError(
            f"{origin}: holds a cost of {cost.collective}, but --density sends gradients by "
            f"{needed}: give a cost of {needed}, which ddlkit fit --collective {needed} fits"
        )
    if cost.workers is None:
        raise UserError(
            f"{origin}: does not say between how many ranks the cost holds, on which the bytes of "
            "an all_gather depend: give their number with --ranks"
        )


def _with_contention(
    arguments: argparse.Namespace,
    messages: Any,
    profile: Any,
    warnings: list[str],
    notes: list[str],
) -> Any:
    """Return communication with the contention that --slowdown and --copies describe.

    Contention is how much compute and messages slow each other down, and what copies of
    gradients cost. ``messages`` is the communication without contention, which is returned if
    neither option is given. Without --slowdown, a note that compute and messages are assumed
    not to slow each other down is added to ``notes``. Doubts about the slowdown are added to
    ``warnings``, as when it is of another network or device than the layers of ``profile``.
    """
    from ddlkit.model.contention import Contention
    from ddlkit.store.readers import read_copy_s_per_byte

    if not arguments.slowdown:
        note = NO_CONTENTION
        # What-if simulates a graph of tasks, and has no option --slowdown that the note could
        # name.
        if _is_what_if(arguments):
            note = NO_CONTENTION_OF_GRAPH
        notes.append(note)
    if not (arguments.slowdown or arguments.copies):
        return messages
    refuse_other_than_recorded(
        "--slowdown", arguments.slowdown, "ddlkit measure slowdown"
    )
    refuse_other_than_recorded("--copies", arguments.copies, "ddlkit measure copies")
    contention = Contention.none()
    if arguments.slowdown:
        workers = messages.cost.workers
        contention = _measured_slowdown(arguments, workers, profile, warnings)
        # A table of --slowdown may also have the time of copies, which then holds.
        if contention.copy_s_per_byte:
            refuse_given(
                arguments,
                ["copy_s_per_byte"],
                f"has no effect with --slowdown {arguments.slowdown}, which has the measured "
                "time",
            )
    if arguments.copies:
        # This time replaces that of the table of --slowdown.
        contention = contention.copying(read_copy_s_per_byte(arguments.copies))
    return replace(messages, contention=contention)


def refuse_other_than_recorded(option: str, path: Path | None, program: str) -> None:
    """Raise UserError if an option that needs a recorded table names another file.

    Parameters
    ----------
    option : str
        The option, as in "--copies".
    path : Path or None
        The value of the option. None is not refused. A path that is no file is not refused
        here, but where it is read.
    program : str
        The command that writes such tables.

    Raises
    ------
    UserError
        If the file has no stamp.
    """
    from ddlkit.store.tables import is_stamped, refuse_pack

    if path is None or not path.is_file() or is_stamped(path):
        return
    # A file into which several recorded tables were packed has an error of its own.
    refuse_pack(path)
    raise UserError(
        f"{option} {path}: is not a recorded table, because no file .json of its name is "
        f"beside it: give the table that {program} wrote, with its .json"
    )


CLEARLY_LONGER = 1.2
"""A warning is given if compute takes this many times as long on all ranks as in a profile."""


def _measured_slowdown(
    arguments: argparse.Namespace,
    workers: int | None,
    profile: Any,
    warnings: list[str],
) -> Any:
    """Return the `Contention` in the table of --slowdown.

    The table must have rows with ``workers`` ranks and the link of --link. If ``workers`` is
    None, its rows must all have the same number of ranks. Without --link, they must all have
    the same link. Doubts are added to ``warnings``, as when the rows are of another network,
    batch or machine than ``profile``.
    """
    from ddlkit.model.contention import Contention

    rows = _rows_of_slowdown(arguments, workers)
    warnings += _doubts_of_slowdown(
        arguments.slowdown, rows, profile, arguments.dilation
    )
    warnings += _other_machines_than_of_slowdown(arguments)
    return Contention.of(rows)


def _rows_of_slowdown(arguments: argparse.Namespace, workers: int | None) -> DataFrame:
    """Return the rows of the table of --slowdown for ``workers`` ranks and the link of --link.

    All rows have the same number of ranks, link, network and batch. Raises UserError if
    there are no such rows, or if the table has several values where none is required.
    """
    from ddlkit import store
    from ddlkit.store.readers import NoSuchRowsError, choose

    path = arguments.slowdown
    all_rows = store.load_table(path, "slowdown")
    required = {"ranks": workers, "link": arguments.link}
    # The rows must have one network and one batch, whichever these are.
    keys = ("ranks", "link", "network", "batch")
    try:
        rows, _ = choose(all_rows, keys, required, path)
    except NoSuchRowsError as error:
        # With --cost, --link chooses rows of this table only.
        if error.key == "link" and not arguments.cost:
            raise UserError(
                f"--slowdown {path}: was measured over the link {error.listed}, but the messages "
                f"over {arguments.link}: measure the slowdown over {arguments.link}, or leave "
                "--slowdown out"
            ) from error
        if error.key != "ranks":
            raise
        # The error says that the number of ranks is that of the messages, because the user may
        # not have given --ranks.
        raise UserError(
            f"--slowdown {path}: was measured with ranks {error.listed}, but the messages "
            f"are between {workers}: run ddlkit measure slowdown --ranks {workers}, or leave "
            "--slowdown out"
        ) from error
    return rows


def _doubts_of_slowdown(
    path: Path, rows: DataFrame, profile: Any, dilation: float
) -> list[str]:
    """Return warnings if a slowdown may not be that of the training in a profile.

    They are given if the slowdown is of another device, network or batch, or else if its compute
    took clearly longer. Such a slowdown is not refused, because it may still be close. ``rows`` are
    those of the table in ``path``, which have one network and one batch. ``dilation`` is the
    factor on all compute times of the profile.
    """
    of_other_training = [
        *_doubts_of_slowdown_device(path, rows, profile),
        *_doubts_of_slowdown_network(path, rows, profile),
    ]
    # Compute is compared only if the training is the same, because another device, network or
    # batch explains why compute takes another time.
    return of_other_training or _doubts_of_slowdown_compute(
        path, rows, profile, dilation
    )


def _doubts_of_slowdown_compute(
    path: Path, rows: DataFrame, profile: Any, dilation: float
) -> list[str]:
    """Return a warning if compute alone takes clearly longer in ``rows`` than in a profile.

    A table of slowdowns has the compute of all ranks at once. A profile is often that of one
    rank, which has all cores of a machine for itself. ``dilation`` is the factor of --dilation
    on the times of the profile.
    """
    from ddlkit.model.contention import NOTHING

    phases = rows["quantity"].isin(["forward", "backward", "update"])
    alone = rows[phases & (rows["beside"] == NOTHING)]
    # Each phase counts with its median over the rounds, and the phases follow one another.
    of_ranks_s = float(alone.groupby("quantity")["seconds"].median().sum())
    of_profile_s = float(profile.forward_s.sum() + profile.backward_s.sum())
    of_profile_s = dilation * (of_profile_s + float(profile.update_s))
    factor = of_ranks_s / of_profile_s
    if factor < CLEARLY_LONGER:
        return []
    # `of_profile_s` has the given dilation already, which the advised one replaces.
    advised_dilation = dilation * factor
    return [
        f"{path}: forward, backward and update took {format_seconds(of_ranks_s)} on all ranks "
        f"at once, but {format_seconds(of_profile_s)} in the profile, from which the iteration is "
        "predicted. Ranks that share the cores of a machine compute more slowly than one: "
        f"multiply all compute by --dilation {advised_dilation:.3g}, or use a profile that was "
        "measured on as many ranks"
    ]


def _doubts_of_slowdown_device(path: Path, rows: DataFrame, profile: Any) -> list[str]:
    """Return a warning if the slowdown in ``rows`` is of another device than a profile."""
    device = str(rows["device"].iloc[0])
    both_known = {device, profile.device}.isdisjoint({"", "unknown"})
    # Users shorten the names of GPUs, as in "H200" for "NVIDIA H200".
    of_slowdown, of_profile = device.lower(), str(profile.device).lower()
    if not both_known or of_slowdown in of_profile or of_profile in of_slowdown:
        return []
    return [
        f"{path}: the slowdown was measured on the device {device}, but the profile on "
        f"{profile.device}, where compute and messages slow each other down by another amount: "
        "measure both on the same devices"
    ]


def _doubts_of_slowdown_network(path: Path, rows: DataFrame, profile: Any) -> list[str]:
    """Return a warning if the slowdown in ``rows`` is of another network or batch."""
    network = rows["network"].iloc[0]
    batch = rows["batch"].iloc[0]
    if network != profile.network:
        return [
            f"{path}: the slowdown was measured with the network {network}, but "
            f"the profile is of {profile.network}: measure it with that network, or with "
            "ddlkit advise --model for a model of your own"
        ]
    if batch != profile.batch:
        return [
            f"{path}: the slowdown was measured with the batch size {batch}, but "
            f"the profile with {profile.batch}: measure it with that batch size"
        ]
    return []


def _other_machines_than_of_slowdown(arguments: argparse.Namespace) -> list[str]:
    """Return a warning for each input table of another machine than the table of --slowdown.

    Only tables that have a stamp name their machine. The slowdown of another machine is not
    refused, because it may still be close.
    """
    from ddlkit import store

    path = arguments.slowdown
    machine = store.load_stamp(path)["machine"]["name"]
    warnings = []
    for other in _stamped_inputs(arguments):
        other_machine = store.load_stamp(other)["machine"]["name"]
        if other_machine != machine:
            warnings.append(
                f"{path}: the slowdown was measured on {machine}, but {other} on "
                f"{other_machine}"
            )
    return warnings


def _stamped_inputs(arguments: argparse.Namespace) -> list[Path]:
    """Return the profile and the tables of messages, as far as they have a stamp.

    The stamp is a file next to a recorded table, which names the machine of the table.
    """
    from ddlkit import store

    collectives = store.expand_tables(arguments.collectives or [])
    tables = [arguments.profile, *collectives]
    return [path for path in tables if store.tables.is_stamped(path)]


# ---------------------------------------------------------------- sharded training

NOT_IN_THE_GRAPH = (
    "slowdown",
    "copies",
    "density",
    "accumulate",
    "copy_s_per_byte",
    "in_flight",
    "selection",
)
"""Inputs that the graph of training's tasks does not model, as names of parsed arguments."""
_NOT_SHARDED = (*NOT_IN_THE_GRAPH, "plan", "html")
"""Options that the model of sharded training does not take."""
PREDICTED = (
    "iteration_s",
    "compute_s",
    "communication_s",
    "exposed_communication_s",
    "scaling_factor",
)
"""The attributes of a `Prediction` that commands print."""


NO_INTERVAL = "nothing: the cost has no interval"
"""What an interval holds if there is none, in words."""


def is_sharded(arguments: argparse.Namespace) -> bool:
    """Return whether sharded training is asked for.

    Raises
    ------
    UserError
        If an option of sharded training is given without ``--strategy fsdp``.
    """
    if arguments.strategy == "fsdp":
        return True
    for name in ("units", "no_prefetch", "no_reshard"):
        # The command advise has no --no-reshard.
        if getattr(arguments, name, False):
            option = option_of(name)
            # Only the command advise has --model, with which buckets are measured.
            if getattr(arguments, "model", None):
                raise UserError(
                    f"{option} is only for --strategy fsdp, which takes no --model: leave "
                    f"{option} out"
                )
            raise UserError(
                f"{option} is only for --strategy fsdp: give that as well, or leave "
                f"{option} out"
            )
    return False


def predict_sharded(
    arguments: argparse.Namespace, *specs: str, warnings: list[str] | None = None
) -> list[dict[str, Any]]:
    """Return predictions of sharded training.

    Parameters
    ----------
    arguments : argparse.Namespace
        The values of `INPUTS`, `SHARDED` and `LEVEL`.
    *specs : str
        Ways to divide the model into units, whose parameters are gathered together, as
        --units takes them. The first one must not be empty.
    warnings : list of str, optional
        A list to which the warnings are added. They are printed on standard error, too.

    Returns
    -------
    list of dict
        Two predictions for each way, in this order: resharded after the forward pass, and
        kept whole.

    Raises
    ------
    UserError
        If an option does not go with sharded training, or if an input is wrong.
    """
    from ddlkit.model.sharded import Sharding

    _refuse_options_of_ddp(arguments)
    # ddlkit predict passes the value of --units as it is, which is None without the option.
    if not specs[0]:
        # Whoever has left out both options learns it at once.
        also = "" if arguments.collectives else ", and --collectives as well"
        raise UserError(
            "--strategy fsdp needs --units: name modules, as in blocks.*, or give a "
            f"size, as in size:25MB{also}"
        )
    notes: list[str] = []
    _refuse_wrong_dilation(arguments.dilation)
    # This refuses a recorded table of a kind that its option does not take.
    refuse_other_kinds(arguments)
    warnings = [] if warnings is None else warnings
    # The functions that read inputs add to `notes` and `warnings`.
    profile = _read_profile(arguments, notes, warnings)
    shardings = {spec: Sharding.of(profile, spec) for spec in specs}
    unit_bytes: dict[str, list[int]] = {}
    for spec, sharding in shardings.items():
        # A unit without parameters sends no message.
        unit_bytes[spec] = [size for size in sharding.bytes if size]
    communications = _communication_by_collective(
        arguments, profile.device, unit_bytes, warnings
    )
    rows = []
    for spec, reshard in product(specs, (True, False)):
        # The option --dilation is a factor on all compute times.
        sharding = shardings[spec].scaled(arguments.dilation)
        row = _prediction_of_sharding(arguments, sharding, communications, reshard)
        rows.append({"units": spec, "unit_count": len(unit_bytes[spec]), **row})
    print_remarks([*notes, NO_CONTENTION_OF_SHARDS], warnings)
    return rows


def _prediction_of_sharding(
    arguments: argparse.Namespace,
    sharding: Any,
    communications: Mapping[str, Any],
    reshard: bool,
) -> dict[str, Any]:
    """Return the row of `predict_sharded` for a `Sharding`, without "units" and "unit_count".

    ``communications`` has what messages of each collective cost. ``reshard`` says whether
    ranks shard the parameters again after the forward pass.
    """
    from ddlkit.model.sharded import INTERVAL_HOLDS, SENT, forecast

    # This program is the list of what every rank does in an iteration, in order.
    program = sharding.program(prefetch=not arguments.no_prefetch, reshard=reshard)
    predicted, interval_s = forecast(program, communications, arguments.level)
    compute_s = predicted.compute_s
    communication_s = predicted.communication_s
    return {
        "reshard": reshard,
        **{name: getattr(predicted, name) for name in PREDICTED},
        "iteration_interval_s": list(interval_s) if interval_s else None,
        # This entry is the share of real iterations that the interval should contain. It is not
        # known, because the model of sharded training has no contention: --level is the share
        # of draws alone.
        "interval_level": None,
        "interval_includes": INTERVAL_HOLDS if interval_s else NO_INTERVAL,
        "no_overlap_s": compute_s + communication_s,
        "perfect_overlap_s": max(compute_s, communication_s),
        "message_count": len(program.messages),
        # `SENT` has the collectives that FSDP sends. `_refuse_different_ranks` has made sure
        # that their costs are between equally many ranks, so the first one tells the number.
        "ranks": communications[SENT[0]].cost.workers,
        "most_gathered_bytes": sharding.most_gathered_bytes(reshard=reshard),
        "contention": None,
        **assumption(any(sent.is_assumed_ring for sent in communications.values())),
    }


def _communication_by_collective(
    arguments: argparse.Namespace,
    device: str,
    unit_bytes: Mapping[str, Sequence[int]],
    warnings: list[str],
) -> dict[str, Any]:
    """Return the cost of messages of each collective that sharded training sends.

    ``device`` is that of the profile. ``unit_bytes`` has the bytes of each unit, for each
    way to make units. Doubts about the costs are added to ``warnings``. Each of them
    names the collectives to which it applies.
    """
    from ddlkit.model.fits import doubts_of_devices, doubts_of_units
    from ddlkit.model.sharded import SENT

    communications = {}
    # Both collectives often have the same doubt, which is then printed once, with the names of
    # both.
    collectives_by_doubt: dict[str, list[str]] = {}
    # FSDP sends the collectives of SENT: it gathers parameters, and scatters gradients.
    tables = _tables_by_collective(arguments, SENT)
    for collective in SENT:
        # The cost of each collective is read as if --collective named it, and
        # --collectives named the tables that have it.
        with_collective = argparse.Namespace(**vars(arguments))
        with_collective.collective = collective
        with_collective.collectives = tables[collective]
        doubts: list[str] = []
        # `measured` has the sizes and the devices of the messages whose times were fitted.
        communication, measured = read_communication(with_collective, doubts)
        communications[collective] = communication
        doubts += doubts_of_devices(device, measured)
        doubts += doubts_of_units(measured, unit_bytes)
        for doubt in doubts:
            collectives_by_doubt.setdefault(doubt, []).append(collective)
    _refuse_different_ranks(communications)
    for doubt, collectives in collectives_by_doubt.items():
        warnings.append(f"{' and '.join(collectives)}: {doubt}")
    return communications


def _tables_by_collective(
    arguments: argparse.Namespace, collectives: Sequence[str]
) -> dict[str, list[Path]]:
    """Return for each of ``collectives`` the files of --collectives that have times of it.

    Benchmarks write a log for each collective, so a log usually has times of one. A recorded
    table has times of several. A table with times of none of ``collectives`` is left out.

    Raises
    ------
    UserError
        If a log is of none of the collectives, or if one of them has no times in any file.
    """
    from ddlkit import store
    from ddlkit.formats.messages import read_collectives

    patterns = arguments.collectives or []
    if not patterns:
        raise UserError(
            "--strategy fsdp needs --collectives: give tables or logs with times of "
            f"{' and '.join(collectives)}"
        )
    # With --assume-ring, --ranks is the number to predict for, which a table need not have.
    ranks = None if arguments.assume_ring else arguments.ranks
    tables: dict[str, list[Path]] = {collective: [] for collective in collectives}
    for path in store.expand_tables(patterns):
        # `_collectives_in` calls `read` with a file and a collective.
        read = functools.partial(
            read_collectives,
            ranks=ranks,
            place=arguments.place,
            table=arguments.table,
            if_ranks_unknown=_how_to_state_ranks(arguments, path),
        )
        for collective in _collectives_in(path, collectives, read):
            tables[collective].append(path)
    for collective, paths in tables.items():
        if not paths:
            listed = ", ".join(map(str, patterns))
            raise UserError(
                f"--collectives {listed}: no times of {collective}: "
                f"{_how_to_give_times(collectives)}"
            )
    return tables


def _collectives_in(
    path: Path, collectives: Sequence[str], read: Callable[..., Any]
) -> list[str]:
    """Return those of some collectives of which a table or a log has times.

    ``read`` returns the rows of a file, and raises UserError for a log of another
    collective than the one that it is called for. So a log is refused for all collectives but
    its own. Only if it is refused for every one of ``collectives``, the UserError is raised here.
    """
    found = []
    errors = []
    for collective in collectives:
        try:
            rows = read(path, collective=collective)
        except UserError as error:
            errors.append(error)
            continue
        # A recorded table has rows of several collectives, perhaps not of this one.
        if (rows["collective"] == collective).any():
            found.append(collective)
    # If the file is refused for each collective, the first error stands for all.
    if len(errors) == len(collectives):
        # Errors that differ are about the collective.
        if len(set(map(str, errors))) > 1:
            raise UserError(f"{errors[0]}: {_how_to_give_times(collectives)}")
        raise errors[0]
    return found


def _how_to_give_times(collectives: Sequence[str]) -> str:
    """Return in words which times --strategy fsdp needs, for an error."""
    return f"--strategy fsdp sends {' and '.join(collectives)}, so give a table or a log of each"


def _refuse_different_ranks(communications: Mapping[str, Any]) -> None:
    """Raise UserError if the costs of two collectives are between different ranks."""
    ranks_by_collective = {
        collective: communication.cost.workers
        for collective, communication in communications.items()
    }
    if len(set(ranks_by_collective.values())) > 1:
        listed = " and ".join(
            f"of {collective} between {ranks} ranks"
            for collective, ranks in ranks_by_collective.items()
        )
        raise UserError(
            f"--collectives: the times are {listed}: give times between the same ranks"
        )


def _refuse_options_of_ddp(arguments: argparse.Namespace) -> None:
    """Raise UserError for an option that the model of sharded training does not take."""
    if arguments.cost:
        raise UserError(
            "--strategy fsdp takes no --cost, because it sends two collectives: give "
            "tables or logs of both to --collectives"
        )
    # These calls refuse an option even if its default value is given.
    refuse_given(
        arguments,
        ["collective"],
        "has no effect with --strategy fsdp, which sends all_gather and reduce_scatter",
    )
    refuse_given(
        arguments,
        _NOT_SHARDED,
        "has no effect with --strategy fsdp",
    )
