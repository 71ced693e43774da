"""The inputs of a prediction: their options, and how a profile, a cost and a slowdown are read.

``predict``, ``plan``, ``export``, ``what-if`` and ``advise`` share these options.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from ddlkit.cli.command import (
    JSON,
    OUTPUT,
    Argument,
    arg,
    choice,
    count,
    flag,
    group,
    number,
    share,
    whole_number,
)
from ddlkit.cli.converting import ELEMENT
from ddlkit.core.errors import UserError, one_line

RANKS = arg(
    "--ranks",
    type=whole_number,
    metavar="N",
    help="The number of ranks between which the messages were measured. It chooses "
    "rows of the file; if the file does not say, it states the number. [default: "
    "as the file says]",
)
PLACE = choice(
    "--place",
    "in_place",
    "out_of_place",
    help="For a log: which of its times to use. [default: both, or in_place if the "
    "two differ by more than they scatter]",
)
TABLE = arg(
    "--table",
    type=whole_number,
    metavar="N",
    help="For a log with several tables: the number of the table, from 1.",
)

PLAN_NAMES = """none (a message for each gradient), single (one message), ddp
(PyTorch's buckets), buffer:25MB, mg_wfbp, cuts:3,40 (messages end after the
gradients 3 and 40), exact, search. A wrong name makes the command list all."""

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
            type=whole_number,
            metavar="N",
            help="The batch size to use, if the profile holds several.",
        ),
        arg(
            "--profile-ranks",
            type=whole_number,
            metavar="N",
            help="The number of ranks that computed at once, if the profile holds "
            "several.",
        ),
        arg(
            "--forward-s",
            type=number,
            metavar="SECONDS",
            help="The time of the forward pass in seconds, for a profile without the "
            "column forward_s.",
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
            metavar="NAME",
            help="The collective that sends the gradients. [default: all_reduce, or "
            "all_gather with --density]",
        ),
        RANKS,
        arg(
            "--link",
            metavar="NAME",
            help="The link over which the messages were measured, as in lab:1gbit. "
            "[default: the table's, if it has only one]",
        ),
        PLACE,
        TABLE,
        arg(
            "--in-flight",
            type=count,
            metavar="N",
            default=1,
            help="The number of collectives that may be under way at once. [default: "
            "1]",
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
            type=number,
            metavar="SECONDS",
            default=0.0,
            help="The same time as a number: seconds per byte. [default: 0]",
        ),
    ),
    *group(
        SPARSE,
        arg(
            "--density",
            type=number,
            metavar="SHARE",
            help="The share of the gradients that is selected and sent, from 0 to 1. "
            "The messages are then all_gathers. It needs --selection.",
        ),
        arg(
            "--selection",
            type=Path,
            nargs="+",
            metavar="TABLE",
            help="The measured times of selecting gradients, or their cost (JSON).",
        ),
    ),
    *group(
        OUTPUT,
        arg(
            "--level",
            type=share,
            metavar="SHARE",
            default=0.95,
            help="The share of single iterations that the interval should contain. "
            "[default: 0.95]",
        ),
        JSON,
    ),
)
"""The options of a prediction."""


def _optional(argument: Argument) -> Argument:
    return argument._replace(options={**argument.options, "required": False})


OPTIONAL_INPUTS = tuple(
    _optional(argument) if "required" in argument.options else argument
    for argument in INPUTS
    if argument.names != JSON.names
)
"""The options of a prediction, none of them required and without --json."""

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
            help="With --strategy fsdp: which parameters are gathered together. Name "
            "modules, as in blocks.*,head, or give a size for consecutive "
            "layers, as in size:25MB.",
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

NO_CONTENTION = """compute and messages are assumed not to slow each other down; in
recorded training they cost 0 to 3% more over links up to 1 Gbit/s, and up to 31%
more over loopback: give --slowdown TABLE"""


def print_warnings(lines: Iterable[str]) -> None:
    """Print each warning as one line on standard error."""
    for line in lines:
        print(f"ddlkit: warning: {one_line(line)}", file=sys.stderr)


# ---------------------------------------------------------------- a prediction


def forecast_of(
    arguments: argparse.Namespace, spec: str
) -> tuple[Any, list[str], Any, Any]:
    """Return what the model predicts for the inputs of a command.

    Parameters
    ----------
    arguments : argparse.Namespace
        The values of `INPUTS`.
    spec : str
        The plan: a name as `PLAN_NAMES` explains them, or a file ``*.json`` of ``ddlkit plan``.

    Returns
    -------
    forecast : Forecast
        The prediction with its interval.
    warnings : list of str
        Why the prediction may be wrong. They are also printed on standard error.
    profile : LayerProfile
        The layers.
    communication : Communication
        The cost of messages, and what slows them down.

    Raises
    ------
    UserError
        If the inputs are wrong or do not go together.
    """
    from ddlkit import formats
    from ddlkit.model import forecast
    from ddlkit.model.fits import doubts
    from ddlkit.model.predictor import plan_beside

    profile = _read_profile(arguments)
    workload = profile.workload()
    workload = workload.scaled(arguments.dilation).accumulated(arguments.accumulate)
    warnings: list[str] = []
    communication, fitted_messages = read_communication(arguments, warnings)
    # Selection comes first, because it replaces the all-reduce of the gradients by an
    # all-gather, which is what contention then slows down.
    communication = _with_selection(arguments, communication, workload)
    communication = _with_contention(arguments, communication, profile, warnings)
    if spec.endswith(".json"):
        plan = formats.read_plan(Path(spec))
    else:
        # Planners that know contention, such as `search`, take it into account.
        plan = plan_beside(spec, workload, communication)
    predicted = forecast(
        workload,
        plan,
        communication,
        copy_s_per_byte=arguments.copy_s_per_byte,
        level=arguments.level,
    )
    cost = communication.cost
    # Selected gradients are gathered, so their cost is one of all_gather.
    if cost.collective != "all_reduce" and not cost.selects:
        warnings.append(
            f"the cost is of {cost.collective}, but gradients are sent by all_reduce: "
            "fit a cost of all_reduce"
        )
    message_bytes = cost.collective_bytes(predicted.iteration.group_bytes)
    warnings += doubts(profile.device, fitted_messages, message_bytes)
    print_warnings(warnings)
    return predicted, warnings, profile, communication


def _read_profile(arguments: argparse.Namespace) -> Any:
    """Return the layer profile, with gradients of the size that is sent. Say what is assumed."""
    from ddlkit import store

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
        line = one_line(f"{arguments.profile}: assumed {', '.join(assumed)}")
        print(f"ddlkit: {line}", file=sys.stderr)
    if arguments.gradient_bytes is None:
        return profile
    return profile.sent_as(arguments.gradient_bytes)


# ---------------------------------------------------------------- what messages cost


def read_communication(
    arguments: argparse.Namespace, warnings: list[str]
) -> tuple[Any, Any]:
    """Return what messages cost, from --cost or calibrated from --collectives.

    Parameters
    ----------
    arguments : argparse.Namespace
        The values of `INPUTS`.
    warnings : list of str
        Why the cost may be wrong. The list is added to.

    Returns
    -------
    communication : Communication
        The cost, with draws if they are known.
    measured : Measured
        The sizes that were measured, and the kind of devices.

    Raises
    ------
    UserError
        If both or neither are given, or if the file does not fit the other options.
    """
    if arguments.cost and arguments.collectives:
        raise UserError("--cost and --collectives both give the cost: leave one out")
    if arguments.cost:
        return _cost_from_file(arguments)
    if arguments.collectives:
        return _calibrated(arguments, warnings)
    raise UserError(
        "no cost of messages: give --collectives TABLE to calibrate from, or --cost "
        "COST.json"
    )


def _cost_from_file(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """Return `Communication` with the cost of a JSON file, and the `Measured` of its fit."""
    from ddlkit.core.cost import costs_from_dict
    from ddlkit.core.link import Link
    from ddlkit.model import Communication
    from ddlkit.model.fits import Measured
    from ddlkit.store.files import read_json

    path = arguments.cost
    advice = "write it by ddlkit fit FILE --json, or give FILE to --collectives"
    description = read_json(path, advice)
    try:
        cost, draws = costs_from_dict(description)
        measured = Measured.read(description, cost)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    # With --density the gradients are selected, and `Communication.sparse` checks the
    # collective later. Only --collective asks for one here.
    needed = arguments.collective
    if needed is None and arguments.density is None:
        needed = "all_reduce"
    if needed is not None and cost.collective != needed:
        raise UserError(
            f"{path} is the cost of an {cost.collective}, but the gradients are sent "
            f"by {needed}: fit a cost of {needed}, or give --collective "
            f"{cost.collective}"
        )
    ranks = arguments.ranks
    if cost.workers is None:
        cost = replace(cost, workers=ranks)
    elif ranks is not None and ranks != cost.workers:
        raise UserError(
            f"{path}: a cost of {cost.workers} workers, not {ranks}: --ranks does not "
            "carry a cost to another number of workers: fit one that was measured "
            "there"
        )
    link = Link(in_flight=arguments.in_flight)
    return Communication(cost, draws, link), measured


def _calibrated(arguments: argparse.Namespace, warnings: list[str]) -> tuple[Any, Any]:
    """Return `Communication` fitted to tables, and the `Measured` of their rows."""
    import pandas as pd

    from ddlkit import store
    from ddlkit.core.collective import of_gradients
    from ddlkit.formats.messages import read_collectives
    from ddlkit.model import Calibration
    from ddlkit.model.fits import Measured
    from ddlkit.store.readers import choose

    if arguments.ranks is not None and arguments.ranks < 2:
        raise UserError(
            f"--ranks {arguments.ranks}: one rank alone sends nothing: use at least 2"
        )
    default = of_gradients(sparse=arguments.density is not None)
    required = {
        "collective": arguments.collective or default,
        "ranks": arguments.ranks,
        "link": arguments.link,
    }
    read = functools.partial(
        read_collectives,
        collective=arguments.collective,
        link=arguments.link,
        ranks=arguments.ranks,
        place=arguments.place,
        table=arguments.table,
        notes=warnings,
    )
    paths = store.expand_tables(arguments.collectives)
    all_rows = pd.concat([read(path) for path in paths]).reset_index(drop=True)
    # The rows of one collective, number of ranks and link. The option takes the place of a
    # file's name in error messages.
    rows, chosen = choose(all_rows, tuple(required), required, Path("--collectives"))
    calibrated = Calibration.of(rows).between(
        str(chosen["link"]),
        int(chosen["ranks"]),
        required["collective"],
        in_flight=arguments.in_flight,
    )
    return calibrated, Measured.of(rows["bytes"], *rows["backend"].unique())


def _with_selection(arguments: argparse.Namespace, dense: Any, workload: Any) -> Any:
    """Return communication that selects and gathers a share of the gradients, if asked for."""
    from ddlkit.core.sparse import ELEMENT_BYTES
    from ddlkit.store.readers import read_selection

    if (arguments.density is None) != (arguments.selection is None):
        raise UserError("give --density and --selection TABLE together")
    if arguments.density is None:
        return dense
    if (workload.bytes != ELEMENT_BYTES * workload.parameters).any():
        raise UserError(
            f"--density needs gradients of {ELEMENT_BYTES} bytes a parameter, which "
            f"those of {arguments.profile} are not: leave --gradient-bytes out, or use "
            "another profile"
        )
    selection = read_selection(arguments.selection, arguments.density)
    return dense.sparse(arguments.density, selection)


def _with_contention(
    arguments: argparse.Namespace, messages: Any, profile: Any, warnings: list[str]
) -> Any:
    """Return communication with the contention that --slowdown and --copies describe."""
    from ddlkit.model.contention import Contention
    from ddlkit.store.readers import read_copy_s_per_byte

    if not (arguments.slowdown or arguments.copies):
        print(f"ddlkit: note: {one_line(NO_CONTENTION)}", file=sys.stderr)
        return messages
    contention = Contention.none()
    if arguments.slowdown:
        workers = messages.cost.workers
        contention = _measured_slowdown(arguments, workers, profile, warnings)
    if arguments.copies:
        contention = contention.copying(read_copy_s_per_byte(arguments.copies))
    return replace(messages, contention=contention)


def _measured_slowdown(
    arguments: argparse.Namespace,
    workers: int | None,
    profile: Any,
    warnings: list[str],
) -> Any:
    """Return the `Contention` in the table of --slowdown, and warn if it is of others.

    The table must have rows of this number of workers and of --link. Rows of another
    network, batch or machine are worth a warning only.
    """
    from ddlkit import store
    from ddlkit.model.contention import Contention
    from ddlkit.store.readers import choose

    path = arguments.slowdown
    all_rows = store.load_table(path, "slowdown")
    required = {"ranks": workers, "link": arguments.link}
    keys = ("ranks", "link", "network", "batch")
    rows, chosen = choose(all_rows, keys, required, path)
    for name in ("network", "batch"):
        expected = getattr(profile, name)
        if chosen[name] != expected:
            warnings.append(
                f"{path}: the slowdown was measured with {name} {chosen[name]}, "
                f"but the profile has {expected}"
            )
    stamped = _stamped_tables(arguments, path)
    machines = [store.load_stamp(table)["machine"]["name"] for table in stamped]
    if len(set(machines)) > 1:
        warnings.append(
            f"{path}: the slowdown was measured on {machines[0]}, "
            f"but other tables on {machines[-1]}"
        )
    return Contention.of(rows)


def _stamped_tables(arguments: argparse.Namespace, first: Path) -> list[Path]:
    """Return those of the input tables, ``first`` in front, whose stamp names their machine."""
    from ddlkit import store

    collectives = store.expand_tables(arguments.collectives or [])
    tables = [first, arguments.profile, *collectives]
    return [path for path in tables if store.tables.is_stamped(path)]


# ---------------------------------------------------------------- sharded training

NOT_IN_THE_GRAPH = {
    "slowdown": None,
    "copies": None,
    "density": None,
    "accumulate": 1,
    "copy_s_per_byte": 0.0,
    "in_flight": 1,
}
"""Inputs that the graph of training's tasks does not model, and their defaults."""
_NOT_SHARDED = {
    **NOT_IN_THE_GRAPH,
    "selection": None,
    "cost": None,
    "plan": "ddp",
    "html": None,
}
"""Options that the model of sharded training does not take, and their defaults."""
PREDICTED = (
    "iteration_s",
    "compute_s",
    "communication_s",
    "exposed_communication_s",
    "scaling_factor",
)
"""The attributes of a `Prediction` that commands print."""


def is_sharded(arguments: argparse.Namespace) -> bool:
    """Return whether sharded training is asked for.

    Raises
    ------
    UserError
        If an option of sharded training is given without ``--strategy fsdp``.
    """
    if arguments.strategy == "fsdp":
        return True
    if arguments.units or arguments.no_prefetch or arguments.no_reshard:
        raise UserError(
            "--units, --no-prefetch and --no-reshard are of --strategy fsdp: give that"
        )
    return False


def predict_sharded(arguments: argparse.Namespace, *specs: str) -> list[dict[str, Any]]:
    """Return predictions of sharded training.

    Parameters
    ----------
    arguments : argparse.Namespace
        The values of `INPUTS` and `SHARDED`.
    *specs : str
        Ways to make units, as --units takes them.

    Returns
    -------
    list of dict
        Two predictions for each way: resharded after the forward pass, and kept whole.

    Raises
    ------
    UserError
        If an option does not go with sharded training, or if an input is wrong.
    """
    from ddlkit.model.fits import doubts
    from ddlkit.model.sharded import SENT, Sharding, forecast

    _refuse_options_of_ddp(arguments)
    if not specs[0]:
        raise UserError(
            "--strategy fsdp needs --units: name modules, as in blocks.*, or give a "
            "size, as in size:25MB"
        )
    profile = _read_profile(arguments)
    warnings: list[str] = []
    communications = {}
    for collective in SENT:
        # The cost of each collective is read as if --collective named it.
        with_collective = argparse.Namespace(**vars(arguments))
        with_collective.collective = collective
        communication, measured = read_communication(with_collective, warnings)
        communications[collective] = communication
        warnings += doubts(profile.device, measured, _message_bytes(profile, specs))
    rows = []
    for spec, reshard in product(specs, (True, False)):
        sharding = Sharding.of(profile, spec).scaled(arguments.dilation)
        program = sharding.program(prefetch=not arguments.no_prefetch, reshard=reshard)
        predicted, interval_s = forecast(program, communications, arguments.level)
        compute_s = predicted.compute_s
        communication_s = predicted.communication_s
        rows.append(
            {
                "units": spec,
                "reshard": reshard,
                **{name: getattr(predicted, name) for name in PREDICTED},
                "interval_s": interval_s,
                "level": arguments.level,
                "no_overlap_s": compute_s + communication_s,
                "perfect_overlap_s": max(compute_s, communication_s),
                "messages": len(program.messages),
                "workers": communications[SENT[0]].cost.workers,
                "gathered_bytes": sharding.gathered_bytes(reshard=reshard),
            }
        )
    # Both collectives may cause the same warning.
    print_warnings(dict.fromkeys(warnings))
    return rows


def _message_bytes(profile: Any, specs: Sequence[str]) -> list[float]:
    """Return the sizes of the messages that units send, in bytes."""
    from ddlkit.model.sharded import Sharding

    sizes: list[float] = []
    for spec in specs:
        # A unit without parameters sends no message.
        sizes += [size for size in Sharding.of(profile, spec).bytes if size]
    return sizes


def _refuse_options_of_ddp(arguments: argparse.Namespace) -> None:
    for name, default in _NOT_SHARDED.items():
        if getattr(arguments, name, default) != default:
            option = "--" + name.replace("_", "-")
            raise UserError(
                f"--strategy fsdp takes no {option}: leave it out; "
                "the messages are those of --collectives"
            )
