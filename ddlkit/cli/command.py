"""What a command is, how its result is printed, and the commands that measure or make links."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ddlkit.core import units
from ddlkit.core.errors import UserError, shown
from ddlkit.jobs import PROGRESS
from ddlkit.jobs.assignment import is_started_by_launcher, ranks_started

Run = Callable[[argparse.Namespace], int | None]
Value = TypeVar("Value")


class Argument(NamedTuple):
    """An argument of a command.

    Attributes
    ----------
    names : tuple of str
        The name of a positional argument, or an option with its dashes.
    options : mapping of str to object
        The keywords of `argparse.ArgumentParser.add_argument`.
    group : str
        The heading under which the help lists the argument.
    """

    names: tuple[str, ...]
    options: Mapping[str, Any]
    group: str = ""


class Command(NamedTuple):
    """A command of a program.

    Attributes
    ----------
    run : callable
        The function that takes the parsed arguments and returns the exit status, or None for 0.
    text : str
        What the command does, in sentences.
    arguments : sequence of Argument
        Its arguments, in the order of its help.
    example : str
        A line for a shell with which the help begins.
    """

    run: Run
    text: str
    arguments: Sequence[Argument]
    example: str = ""


MOST_RANKS = 256
"""The most ranks that a command starts on this machine. Each is a process with torch."""

COMMANDS: dict[str, Command] = {}
"""The commands of ddlkit by name."""


def arg(*names: str, **options: Any) -> Argument:
    """Return an argument from its names and the keywords of argparse."""
    return Argument(names, options)


def flag(name: str, text: str) -> Argument:
    """Return an option without a value, which is either given or not."""
    return arg(name, action="store_true", help=text)


def choice(name: str, *values: str, **options: Any) -> Argument:
    """Return an argument that takes one of several words."""
    return Argument(
        (name,), {"choices": values, "metavar": "|".join(values), **options}
    )


def with_help(argument: Argument, text: str) -> Argument:
    """Return an argument with another help text, for a command where it means more or less."""
    return argument._replace(options={**argument.options, "help": text})


def group(heading: str, *arguments: Argument) -> tuple[Argument, ...]:
    """Return arguments that the help lists under a heading."""
    return tuple(argument._replace(group=heading) for argument in arguments)


def parsed_by(parse: Callable[[str], Value]) -> Callable[[str], Value]:
    """Return a function that parses an argument, for the keyword ``type`` of argparse.

    A UserError of ``parse`` becomes the exception that argparse reports together with the
    name of the option.
    """

    def parse_argument(text: str) -> Value:
        try:
            return parse(text)
        except UserError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse_argument


def whole_number(text: str) -> int:
    """Return the whole number that an argument gives."""
    try:
        return int(text)
    except ValueError:
        problem = f"{shown(text)} is not a whole number"
        raise argparse.ArgumentTypeError(problem) from None


def count(text: str) -> int:
    """Return the whole number of at least 1 that an argument gives."""
    value = whole_number(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is too small: use at least 1")
    return value


def message_sizes(text: str) -> tuple[int, ...]:
    """Return the sizes that an argument lists, in bytes, in ascending order.

    Commas separate the sizes, as in "1MiB,64MiB". A size that is given twice counts once.
    """
    parse = parsed_by(units.parse_bytes)
    sizes = {parse(size) for size in text.split(",")}
    if min(sizes) < 1:
        remedy = "leave out 0" if max(sizes) else "write for example 1MiB"
        raise argparse.ArgumentTypeError(f"a message has at least 1 byte: {remedy}")
    return tuple(sorted(sizes))


def number(text: str, example: str = "0.5 or 0.01") -> float:
    """Return the number that an argument gives. The error for other text has the example."""
    try:
        return float(text)
    except ValueError:
        problem = f"{shown(text)} is not a number: write for example {example}"
        raise argparse.ArgumentTypeError(problem) from None


def seconds(text: str) -> float:
    """Return the seconds that an argument gives, as a plain number or with a unit."""
    # A plain number may also be infinite or below zero. Each command has its own bounds.
    try:
        return float(text)
    except ValueError:
        return parsed_by(units.parse_seconds)(text)


def minutes(text: str) -> float:
    """Return the minutes that an argument gives, as a plain number or with a unit."""
    # A plain number is minutes here. Only a text with a unit is read as seconds.
    try:
        return float(text)
    except ValueError:
        example = "3 (minutes) or 90s"
        return parsed_by(lambda text: units.parse_seconds(text, example))(text) / 60


def budget(text: str) -> float:
    """Return the seconds of --budget, which are a plain number or have a unit."""
    example = "90s or 8m30s"
    return parsed_by(lambda text: units.parse_seconds(text, example))(text)


def collective_name(text: str) -> str:
    """Return the name of a collective that an argument gives."""
    # Imported here, because the module loads numpy, which no help needs.
    from ddlkit.core.collective import find_collective

    return parsed_by(lambda name: find_collective(name).name)(text)


def collective_in_logs(text: str) -> str:
    """Return the name of a collective that an argument gives, also one that only logs have."""
    # Imported here, because the module loads numpy, which no help needs.
    from ddlkit.core.collective import COLLECTIVES, ONLY_IN_LOGS, find_collective

    known = {**COLLECTIVES, **ONLY_IN_LOGS}
    return parsed_by(lambda name: find_collective(name, known).name)(text)


def link_name(text: str) -> str:
    """Return the name of a link that an argument gives, which is part of a file name."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", text):
        raise argparse.ArgumentTypeError(
            f"{shown(text)} is not the name of a link: use letters, digits, dots, hyphens "
            "and underscores, and begin with a letter or digit, as in infiniband"
        )
    return text


def share(text: str) -> float:
    """Return the number above 0 and below 1 that an argument gives."""
    value = number(text)
    if not 0 < value < 1:
        raise argparse.ArgumentTypeError(
            f"{shown(text)} is not above 0 and below 1: write for example 0.8"
        )
    return value


def density(text: str) -> float:
    """Return the number above 0 and up to 1 that an argument gives."""
    value = number(text)
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(
            f"{shown(text)} is not above 0 and at most 1: write for example 0.01"
        )
    return value


def option_of(name: str) -> str:
    """Return the option whose value the parsed arguments have under a name.

    Examples
    --------
    >>> option_of("in_flight")
    '--in-flight'
    """
    return "--" + name.replace("_", "-")


def parsed_name(option: str) -> str:
    """Return the name that the value of an option has among the parsed arguments.

    Examples
    --------
    >>> parsed_name("--in-flight")
    'in_flight'
    """
    return option.removeprefix("--").replace("-", "_")


def refuse_given(
    arguments: argparse.Namespace, names: Iterable[str], reason: str
) -> None:
    """Raise UserError for the first of some options that the user has given.

    Parameters
    ----------
    arguments : argparse.Namespace
        Parsed arguments. Their ``given_names`` are the names of those that the user gave, also
        of those that have their default value.
    names : iterable of str
        Names of options that have no effect here.
    reason : str
        Why they have none: what follows the option in the error.
    """
    for name in names:
        if name in arguments.given_names:
            raise UserError(f"{option_of(name)} {reason}: leave it out")


OUTPUT = "output"
JSON = arg(
    "--json",
    action="store_true",
    help="Print one JSON document instead of lines for a person. The page "
    "docs/commands.md explains its keys.",
)._replace(group=OUTPUT)


def command(
    text: str,
    *arguments: Argument,
    example: str = "",
    register_in: dict[str, Command] = COMMANDS,
) -> Callable[[Run], Run]:
    """Return a decorator that registers a function as the command of its own name.

    The function itself stays as it is.

    Parameters
    ----------
    text : str
        What the command does, in sentences.
    *arguments : Argument
        The arguments of the command, in the order of its help.
    example : str, optional
        A line for a shell with which the help begins.
    register_in : dict of str to Command, optional
        The commands of the program, to which this one is added. By default they are those
        of ddlkit.
    """

    def register(run: Run) -> Run:
        # A trailing underscore avoids a keyword of Python, as in `import_`.
        name = run.__name__.rstrip("_").replace("_", "-")
        register_in[name] = Command(run, text, arguments, example)
        return run

    return register


# ---------------------------------------------------------------- how a result is printed


def show(result: Mapping[str, Any], as_json: bool) -> None:
    """Print the result of a command.

    Parameters
    ----------
    result : mapping of str to object
        The result. With ``as_json`` it must have only values that JSON can express.
    as_json : bool
        Whether to print one JSON document, instead of an aligned line for each value.

    Raises
    ------
    UserError
        If a number of the result is infinite or not a number.
    """
    # This call looks for infinities and NaN, which no result should have, and which JSON cannot
    # express. `default` turns objects such as paths into texts, so that they pass: lines for a
    # person may show them.
    for name, value in result.items():
        try:
            json.dumps(value, allow_nan=False, default=str)
        except ValueError as error:
            raise UserError(
                f"{name} is computed as {shown(value)}, which is no finite number: "
                "check the sizes, times and rates of the input, and their units"
            ) from error
    if as_json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:<32} {_readable(value)}")


def count_of(n: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless it is one.

    Examples
    --------
    >>> count_of(1, "rank"), count_of(2, "rank")
    ('1 rank', '2 ranks')
    """
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


MOST_LISTED = 4
"""A list with more numbers than this is printed as its range."""


def _readable(value: Any) -> str:
    """Return a value as a person reads it. A long list of numbers becomes its range."""
    if value is None:
        return "not known"
    # A whole number, such as a size in bytes, may be a float. It is shown with all its
    # digits, which a float below 1e15 holds exactly.
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return f"{value:.0f}"
    if isinstance(value, float):
        return f"{value:.6g}"
    # A text, a whole number, or a collection of other things than numbers.
    if not is_collection_of_numbers(value):
        return str(value)
    if isinstance(value, dict):
        items = [f"{name} {_readable(inner)}" for name, inner in value.items()]
        return ", ".join(items)
    # Only a list or a tuple of numbers is left.
    if len(value) > MOST_LISTED:
        lowest = _readable(min(value))
        highest = _readable(max(value))
        return (
            f"{len(value)} values from {lowest} to {highest} (all of them with --json)"
        )
    # An empty list is "none".
    return ", ".join(map(_readable, value)) or "none"


def is_collection_of_numbers(value: Any) -> bool:
    """Return whether a value is a list or tuple of numbers, or a dictionary of numbers."""
    if isinstance(value, dict):
        value = [*value.values()]
    if not isinstance(value, (list, tuple)):
        return False
    return all(isinstance(inner, (int, float)) for inner in value)


# ---------------------------------------------------------------- ddlkit measure

MODEL_FUNCTION = """The function returns (model, loss) or (model, loss, optimizer),
where loss() does one forward pass and returns the scalar loss. It may have the
parameter device, the device of the rank.
torchvision:resnet50:32 stands for that network at batch size 32, and
torchvision:resnet50 at batch size 4."""
_MODEL = f"""For the part layers: measure your own model, which the function FUNCTION
in FILE.py returns. {MODEL_FUNCTION} This also works in the processes that torchrun
or srun starts. Iterations are timed until the 95%% interval of their median is within
2%%, and for at most the time of --budget. The only other options are --accumulate, --budget
and --out, and an interrupted measurement begins again. The table has the names of the file
and the function, as in layers-mine-net-b1-r1.csv, and replaces an earlier one of that name.
b1 stands for any batch size, because that of your own model is not known."""
MODEL_BUDGET_S = 20.0
"""The default of --budget for a user's own model, which the help of --budget states."""
_PACK = """Also keep the whole recording in the archive FILE.tgz, which is written
anew every 20 s. The archive is whole even if the run is killed. If the directory of
--out is empty, the next run first restores it from the archive, which must be of a directory
of the same name. To unpack it by hand, run tar xzf FILE.tgz."""
_BUDGET = """Begin no measurement that is expected to end later than this time, as in 8m30s
or 90s; without a unit, in seconds. A measurement that has begun may take longer, and is repeated
if other processes disturb it, even beyond this time. The next run continues with the rest.
[default: all is measured{}]"""
_IGNORE_LOAD = """Measure although other processes use the GPU. The file .json beside
every table then records that. Without a GPU the option has no effect."""


NAMES_OF_POINTS = (
    "In names such as resnet50-b4-r2 or loopback-p2, b4 is the batch size, and r2 or p2 the "
    "number of ranks."
)
"""How to read the names of measurements and of their tables, for the help of commands."""


def session_options(
    default_out: str, further_default_budget: str = ""
) -> tuple[Argument, ...]:
    """Return the options of every command that measures.

    Parameters
    ----------
    default_out : str
        The directory into which the tables go by default, as the help names it.
    further_default_budget : str, optional
        What the help adds to the default of --budget.
    """
    return (
        *group(
            "how to measure",
            arg(
                "--budget",
                type=budget,
                metavar="TIME",
                help=_BUDGET.format(further_default_budget),
            ),
            flag(
                "--dry-run",
                "Print what would be measured and about how long that takes, and measure "
                "nothing. The times are rough, and most do not depend on the network. An archive "
                "of --pack is not read.",
            ),
            flag("--ignore-load", _IGNORE_LOAD),
        ),
        *group(
            OUTPUT,
            arg(
                "--out",
                type=Path,
                metavar="DIRECTORY",
                help=f"Write the tables into this directory. [default: {default_out}]",
            ),
            arg("--pack", type=Path, metavar="FILE.tgz", help=_PACK),
        ),
    )


PARTS = ("quick", "layers", "collectives", "slowdown", "copies", "training")
_PARTS = """What to measure: layers (the time of each layer), collectives (the time
of messages by size), slowdown (how much compute and messages slow each other down),
copies (the time of copies in memory), training (iterations under
DistributedDataParallel), or quick (all of these)."""
_SUITES_IN_THE_WORKBOOK = ("full", "cpu", "gpu", "smoke", "all")
IN_THE_WORKBOOK = (
    *_SUITES_IN_THE_WORKBOOK,
    "replay",
    "campaign",
    "convergence",
    "input",
    "estimators",
)
"""What ``python -m workbook record`` measures, and ``ddlkit measure`` once did.

The suites measure all that predictions need, as the part quick does.
"""

LAB_LINKS = """over emulated links of this machine, which needs Linux and root. RATE
is the rate of each link, from 1mbit to 100gbit, and DELAY its delay, of at most 10s, as in
1gbit or 1gbit,2ms. A DELAY without a unit is in seconds."""


@contextlib.contextmanager
def interrupt_says_kept(out: Path | None) -> Iterator[None]:
    """Let an interrupt of the block say whether anything was measured, and where it is.

    Parameters
    ----------
    out : Path or None
        The directory of the tables. None if the user names none and the caller does not know
        the default. Whether anything was measured is then not known either.

    Raises
    ------
    KeyboardInterrupt
        If the block raises it, now with the text as its argument. `ddlkit.cli.main` prints
        that.
    """
    try:
        yield
    except KeyboardInterrupt:
        fact = "nothing was measured yet"
        if out is None:
            fact = "what was measured is kept"
        elif _has_tables(out):
            fact = f"what was measured is kept in {out}"
        raise KeyboardInterrupt(fact) from None


def _has_tables(out: Path) -> bool:
    """Return whether a directory has a table of measurements.

    A session also writes the tables outcomes and vitals, which say how the session went and
    what state the machine was in. They do not count. Hidden files are unfinished.
    """
    names = [path.name for path in out.rglob("*.csv*")]
    return any(not name.startswith((".", "outcomes", "vitals")) for name in names)


@contextlib.contextmanager
def only_command_in(out: Path, me: Any = None) -> Iterator[None]:
    """Keep other commands that measure out of a directory while the block runs.

    Parameters
    ----------
    out : Path
        The directory of --out.
    me : Rank, optional
        This rank, if torchrun or srun started the ranks. Then rank 0 takes the lock for
        all, and all ranks are refused together.

    Raises
    ------
    UserError
        If the directory cannot be written, or if another process holds it.
    """
    # The stack holds the lock until the block of the caller has ended.
    with contextlib.ExitStack() as stack:
        refusal: UserError | None = None
        if me is None or me.rank == 0:
            try:
                _lock_directory(out, stack)
            except UserError as error:
                refusal = error
        if me is not None:
            from ddlkit.jobs.rank import agree_all

            # If rank 0 could not take the lock, all ranks end together. If it ended alone, the
            # others would wait for it. So far only rank 0 can have a refusal, so `agree_all` says
            # whether rank 0 has the lock.
            is_locked = agree_all(refusal is None)
            if not is_locked and me.rank != 0:
                refusal = UserError(f"--out {out}: rank 0 cannot use it")
        if refusal:
            raise refusal
        yield


def _lock_directory(out: Path, stack: contextlib.ExitStack) -> None:
    """Lock the directory of --out until ``stack`` is closed, and make it if need be.

    Raises UserError if the directory cannot be written, or if another process holds it.
    """
    from ddlkit import store

    # A file in the place of the directory is refused here, with advice of its own.
    refuse_impossible_directory("--out", out)
    try:
        stack.enter_context(store.lock(out / ".lock"))
    except UserError as error:
        raise UserError(f"--out {out}: {error}, or name another directory") from None


@command(
    "Measure on this machine what predictions need: layers, messages, and how much "
    "they slow each other down. If a command is interrupted, the measurements that "
    "are complete are kept, and the same command continues with the others, which --dry-run "
    "lists. Under torchrun or srun, the part collectives measures "
    "messages between all ranks of the job, and rank 0 saves them, each collective once it "
    "is complete. It takes no option but --sizes, --minutes, --link and --out there. "
    f"{NAMES_OF_POINTS}",
    *group(
        "what is measured",
        arg("part", metavar="PART", help=_PARTS),
        arg(
            "--networks",
            metavar="NAME:BATCH,...",
            help="For the parts layers, slowdown and training: the networks and their "
            "batch sizes, as in resnet50:32,vgg16:8. A network without a batch size has "
            "the batch size 4. One that is listed twice counts once. [default: resnet50:4]",
        ),
        arg("--model", metavar="FILE.py:FUNCTION", help=_MODEL),
        arg(
            "--accumulate",
            type=count,
            metavar="N",
            default=1,
            help="With --model: the number of batches whose gradients are added up in "
            "an iteration. [default: 1]",
        ),
        arg(
            "--sizes",
            type=message_sizes,
            metavar="SIZE,...",
            help="For the part collectives: the sizes of messages, as in 1MiB,256MiB. Each "
            "is rounded up to a multiple of 4 bytes times the number of ranks. A "
            "table that is in the directory of --out already gets those that it lacks. "
            "[default: 1 KiB to 64 MiB, or to 1 GiB between GPUs, in powers of two]",
        ),
        arg(
            "--ranks",
            type=whole_number,
            metavar="N",
            help="The number of processes that exchange messages, from 2 to "
            f"{MOST_RANKS}, or to 64 with --lab. [default: 2, or one for each GPU]",
        ),
        arg(
            "--lab",
            metavar="RATE[,DELAY]",
            help=f"Send messages {LAB_LINKS} [default: loopback, or what connects the "
            "GPUs]",
        ),
    ),
    *group(
        "the part collectives under torchrun or srun",
        arg(
            "--minutes",
            type=minutes,
            metavar="TIME",
            help="The time for all sizes together: minutes, as in 3, or with a unit, as "
            "in 90s. [default: 3]",
        ),
        arg(
            "--link",
            type=link_name,
            metavar="NAME",
            help="How the table and its file name what joins the ranks, as in infiniband. "
            "The name has letters, digits, dots, hyphens and underscores. [default: "
            "network if there are several nodes, loopback for processors of one node, and "
            "for GPUs of one node nvlink or pcie as nvidia-smi says, or nccl if it does "
            "not say]",
        ),
    ),
    *session_options("measured", further_default_budget=", or 20 s with --model"),
    example="ddlkit measure quick --out mine",
)
def measure(arguments: argparse.Namespace) -> None:
    """Run the command ``ddlkit measure``."""
    _refuse_wrong_part(arguments.part)
    _refuse_options_of_other_parts(arguments)
    # Only a user's own model can accumulate.
    if "accumulate" in arguments.given_names and not arguments.model:
        raise UserError(
            "--accumulate needs --model, for which the part is layers: leave it out, or run "
            "ddlkit measure layers --model FILE.py:FUNCTION --accumulate N"
        )
    if arguments.model:
        _measure_own_model(arguments)
        return
    # torchrun or srun may have started several copies of this command, each a rank.
    n_started = ranks_started(os.environ)
    if n_started > 1:
        _measure_in_job(arguments, n_started)
        return
    _measure_here(arguments)


def _measure_here(arguments: argparse.Namespace) -> None:
    """Measure parts in a session of this machine, which starts its own ranks."""
    _refuse_options_of_a_job(arguments)
    # A wrong lab or name is refused before the imports below load torch, which takes seconds.
    # `_points_of_parts` reads the rate again. A lab has fewer ranks than `ranks_to_start` allows,
    # so it is checked first.
    refuse_impossible_lab(arguments.lab, arguments.ranks)
    # If --ranks is too large for one machine, the error advises to run this command under
    # torchrun. There it measures only the part collectives, even if another part is asked for
    # here.
    program_in_job = "ddlkit measure collectives"
    # 0 stands for the default of `parts.points`: two ranks, or one for each GPU.
    ranks = ranks_to_start(arguments.ranks, default=0, program=program_in_job)
    # A dry run only lists what would be measured, which a machine without lab can do, too.
    if not arguments.dry_run:
        require_lab(arguments.lab)
    networks = named_networks(arguments.networks)
    from ddlkit.measure.session import engine
    from ddlkit.store import machine

    refuse_unknown_networks(networks)
    _refuse_sizes_beyond_memory(arguments.sizes)
    make_points = _points_of_parts(arguments, networks, ranks)
    out = arguments.out or Path("measured")
    refuse_impossible_outputs(out, arguments.pack)
    if arguments.dry_run:
        print(engine.estimate(make_points, out, session_budget_s(arguments)))
        return
    # This call warns the user if torch does not see the GPUs. Its result is not needed, because
    # the points choose the device themselves. In a lab, whose links join processors, GPUs do not
    # matter.
    if not arguments.lab:
        device_of_own_ranks()
    with interrupt_says_kept(out):
        directory = engine.run_session(
            make_points,
            out,
            gpu=bool(machine.describe()["gpus"]),
            budget_s=session_budget_s(arguments),
            pack=arguments.pack,
            ignore_load=arguments.ignore_load,
        )
    print(directory)


def _refuse_sizes_beyond_memory(sizes: Sequence[int] | None) -> None:
    """Raise UserError if a message of --sizes cannot be in the memory of this machine.

    ``sizes`` are in ascending order. None, if the option is not given, is not refused.
    """
    if not sizes:
        return
    from ddlkit.store.machine import describe

    # This memory serves as the limit for messages between GPUs, too. A GPU is assumed to have
    # no more memory than the machine, so a message that is refused fits into no GPU either.
    memory_bytes = describe()["memory_bytes"]
    if sizes[-1] > memory_bytes:
        largest = units.format_bytes(sizes[-1])
        memory = units.format_bytes(memory_bytes)
        raise UserError(
            f"--sizes: a message of {largest} is larger than the memory of this machine, "
            f"{memory}: leave it out"
        )


def _points_of_parts(
    arguments: argparse.Namespace, networks: list[tuple[str, int]], ranks: int
) -> Any:
    """Return the function that lists the points, each one measurement of the session.

    The session calls the function with two arguments that only the session knows: its
    directory and its number. ``networks`` has the name and the batch size of each network of
    --networks.
    """
    from ddlkit.measure import parts

    # The rate is 0 without --lab. An empty tuple of sizes stands for the default sizes.
    rate_bits_per_s, delay_s = lab_rate(arguments.lab)
    return functools.partial(
        parts.points,
        part=arguments.part,
        networks=networks or parts.DEFAULT_NETWORKS,
        ranks=ranks,
        rate_bits_per_s=rate_bits_per_s,
        delay_s=delay_s,
        sizes=arguments.sizes or (),
    )


_OPTIONS_OF_A_JOB = ("minutes", "link")
"""Options that have an effect only if torchrun or srun started the ranks."""


def _refuse_options_of_a_job(arguments: argparse.Namespace) -> None:
    """Raise UserError for an option that has an effect under torchrun or srun only."""
    for name in _OPTIONS_OF_A_JOB:
        if getattr(arguments, name) is None:
            continue
        # If a launcher has started this process, it has started no other one, because this
        # function is not called for several ranks.
        if is_started_by_launcher(os.environ):
            raise UserError(
                f"--{name} has an effect between two or more ranks, and torchrun or srun "
                f"started one process: start more, or leave --{name} out"
            )
        raise UserError(
            f"--{name} has an effect only on the part collectives under torchrun or srun: "
            "leave it out"
        )


_LEAVE_IT_OUT = "leave it out"
_INSTEAD_IN_A_JOB = {
    "ranks": "leave it out, because the processes that were started are the ranks",
    "lab": _LEAVE_IT_OUT,
    "dry_run": _LEAVE_IT_OUT,
    "pack": _LEAVE_IT_OUT,
    "budget": "give --minutes in its place",
    "ignore_load": _LEAVE_IT_OUT,
}
"""What to do about each option that has no effect if torchrun or srun started the ranks."""


def _measure_in_job(arguments: argparse.Namespace, n_started: int) -> None:
    """Measure collectives between all ranks of a job, of which this process is one.

    ``n_started`` is the number of ranks. Raises UserError for any part but collectives, and for
    an option that has no effect in a job.
    """
    _refuse_what_a_job_lacks(arguments, n_started)
    from ddlkit.jobs.rank import joined
    from ddlkit.measure import cluster

    total_minutes = cluster.MINUTES if arguments.minutes is None else arguments.minutes
    if not 0 < total_minutes < math.inf:
        raise UserError(f"--minutes {total_minutes:g}: give a finite time above zero")
    _refuse_sizes_beyond_memory(arguments.sizes)
    out = arguments.out or Path("measured")
    # `me` is this rank. The ranks wait for each other for at most MEETING_S.
    with (
        interrupt_says_kept(out),
        joined(cluster.MEETING_S) as me,
        only_command_in(out, me),
    ):
        # Without --link, the ranks find the name of the link themselves. Without --sizes, they
        # measure the default sizes.
        path = cluster.measure_collectives(
            me,
            out,
            minutes=total_minutes,
            link=arguments.link or "",
            sizes=arguments.sizes or (),
        )
    # Only rank 0 has the table.
    if me.rank == 0:
        print(path)


def _refuse_what_a_job_lacks(arguments: argparse.Namespace, n_started: int) -> None:
    """Raise UserError for a part or an option that ``n_started`` ranks of a job do not have.

    With --model, which measures the layers of the user's model, this function is not called.
    """
    if arguments.part != "collectives":
        raise UserError(
            f"measure {arguments.part}: torchrun or srun started {n_started} processes, "
            "and each would measure this part for itself: start one process, or measure "
            "collectives, or layers with --model"
        )
    refuse_without_effect_in_job(arguments, _INSTEAD_IN_A_JOB)


def refuse_without_effect_in_job(
    arguments: argparse.Namespace, names: Iterable[str]
) -> None:
    """Refuse options that have no effect if torchrun or srun started the ranks.

    Parameters
    ----------
    arguments : argparse.Namespace
        Parsed arguments. An option that is not given is None or False.
    names : iterable of str
        Names of parsed arguments, such as ``"ranks"`` or ``"lab"``.

    Raises
    ------
    UserError
        If one of the options is given.
    """
    for name in names:
        value = getattr(arguments, name)
        # The number 0 is given, too.
        if value is not None and value is not False:
            advice = _INSTEAD_IN_A_JOB[name]
            raise UserError(
                f"{option_of(name)} has no effect under torchrun or srun: {advice}"
            )


def refuse_impossible_outputs(out: Path | None, pack: Path | None = None) -> None:
    """Raise UserError if the directory of --out or the file of --pack cannot be written.

    An option that is not given is None, and is not refused.
    """
    if out is not None:
        refuse_impossible_directory("--out", out)
    if pack is None:
        return
    if not pack.name.endswith((".tgz", ".tar.gz")):
        raise UserError(f"--pack {pack}: name a file that ends in .tgz")
    if pack.is_dir():
        raise UserError(f"--pack {pack}: is a directory: name a file")
    refuse_unwritable("--pack", pack, pack.parent)


def refuse_impossible_directory(option: str, directory: Path) -> None:
    """Refuse a directory that is a file, or in which files cannot be made.

    Parameters
    ----------
    option : str
        The option that names the directory.
    directory : Path
        The directory, which need not exist.

    Raises
    ------
    UserError
        If the path is a file or has the name of one, or if the operating system refuses.
    """
    if directory.exists() and not directory.is_dir():
        raise UserError(
            f"{option} {directory}: is a file, not a directory: name another"
        )
    # Whoever gives such a name expects a single file, and would look for it in vain.
    if not directory.exists() and directory.suffix in (".csv", ".gz", ".json"):
        raise UserError(
            f"{option} {directory}: is the name of a file, but a directory is needed, into "
            f"which several files are written: leave out the ending {directory.suffix}"
        )
    # Here, what is to be written is the directory itself.
    refuse_unwritable(option, path=directory, directory=directory)


def refuse_unwritable(option: str, path: Path, directory: Path) -> None:
    """Refuse a directory in which files cannot be made, or that cannot be made.

    Parameters
    ----------
    option : str
        The option that names ``path``.
    path : Path
        What is to be written.
    directory : Path
        The directory in which ``path`` is, or ``path`` itself if that is a directory.

    Raises
    ------
    UserError
        If the operating system refuses.
    """
    # A directory that does not exist is made in the first of its parents that exists.
    parents = [directory, *directory.absolute().parents]
    existing = next(parent for parent in parents if parent.exists())
    try:
        # A file is made to find out, because permissions do not decide: root may write everywhere
        # but in directories such as /proc. The file has no name, or is removed at once.
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise UserError(
            f"{option} {path}: cannot write into {existing}: {error.strerror}: name "
            "another place"
        ) from None


def refuse_other_than_page(page: Path | None) -> None:
    """Refuse a name for the page of --html that does not end as the names of pages do.

    Parameters
    ----------
    page : Path or None
        The value of --html. None is not refused.

    Raises
    ------
    UserError
        If the name does not end in .html or .htm.
    """
    if page is not None and page.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"--html {page}: name a file that ends in .html")


def _refuse_wrong_part(part: str) -> None:
    """Raise UserError for a part that ddlkit measure does not measure (any more)."""
    # ddlkit measure once also took further parts, and files that describe a suite of
    # measurements. The workbook, another program of this project, takes them now.
    is_file = part.endswith((".yml", ".yaml", ".json"))
    if is_file or part in IN_THE_WORKBOOK:
        problem = (
            f"ddlkit measure {part} is now: python -m workbook record {part}, in a clone of "
            "the project"
        )
        if part in _SUITES_IN_THE_WORKBOOK:
            problem += (
                "; without one, use ddlkit measure quick, which measures GPUs where there are "
                "some"
            )
        raise UserError(problem)
    if part not in PARTS:
        raise UserError(f"measure {shown(part)}: use one of {', '.join(PARTS)}")


_PARTS_BY_OPTION = {
    "networks": ("quick", "layers", "slowdown", "training"),
    "model": ("layers",),
    "sizes": ("collectives",),
    "ranks": ("quick", "collectives", "slowdown", "training"),
    "lab": ("quick", "collectives", "slowdown", "training"),
}
"""The parts of ``ddlkit measure`` on which an option has an effect."""


def _refuse_options_of_other_parts(arguments: argparse.Namespace) -> None:
    """Raise UserError for an option without an effect on the part that is measured."""
    # With --model, `_measure_own_model` refuses options, with advice about the model.
    if arguments.model:
        return
    for name, parts in _PARTS_BY_OPTION.items():
        if getattr(arguments, name) is not None and arguments.part not in parts:
            raise UserError(
                f"--{name} has no effect on the part {arguments.part}, only on "
                f"{', '.join(parts)}: leave it out"
            )


def refuse_unknown_networks(networks: Sequence[tuple[str, int]]) -> None:
    """Raise UserError, which names --networks, for a name that no network has."""
    from ddlkit.measure.networks import require

    for name, _ in networks:
        try:
            require(name)
        except UserError as error:
            raise UserError(f"--networks {name}: {error}") from None


def session_budget_s(arguments: argparse.Namespace) -> float:
    """Return the seconds after which a session starts nothing new, infinite by default."""
    return math.inf if arguments.budget is None else float(arguments.budget)


def lab_rate(text: str | None) -> tuple[float, float]:
    """Return the rate and the delay of the links that --lab asks for.

    Parameters
    ----------
    text : str or None
        The value of --lab, as in "1gbit" or "1gbit,2ms".

    Returns
    -------
    rate_bits_per_s : float
        The rate in bits per second, 0 without a lab.
    delay_s : float
        The delay in seconds, 0 if the text names none.

    Raises
    ------
    UserError
        If the text is no rate, or its second part no time, or if no lab has such links.
    """
    if not text:
        return 0.0, 0.0
    from ddlkit.lab import Conditions, refuse_impossible_rate

    rate, _, delay = text.partition(",")
    try:
        delay_s = units.parse_seconds(delay) if delay else 0.0
        rate_bits_per_s = units.parse_bits_per_s(rate)
        refuse_impossible_rate(rate_bits_per_s)
        # The conditions refuse a delay that no lab has.
        Conditions(delay_s)
    except UserError as error:
        raise UserError(f"--lab {text}: {error}") from None
    return rate_bits_per_s, delay_s


def refuse_impossible_lab(lab: str | None, ranks: int | None) -> None:
    """Refuse the lab that --lab and --ranks ask for if no lab is like that.

    Parameters
    ----------
    lab : str or None
        The value of --lab. None or an empty text, for no lab, is not refused.
    ranks : int or None
        The value of --ranks.

    Raises
    ------
    UserError
        If no lab has such links or so many ranks.
    """
    if not lab:
        return
    # This call raises UserError for links that no lab has. Its result is not needed here.
    lab_rate(lab)
    if ranks is None:
        return
    from ddlkit.lab import MAX_RANKS

    # `ranks_to_start` refuses fewer than two ranks, also without a lab.
    if ranks > MAX_RANKS:
        raise UserError(f"--ranks {ranks}: a lab has 2 to {MAX_RANKS} ranks")


def ranks_to_start(ranks: int | None, default: int, program: str) -> int:
    """Return how many ranks to start on this machine, or raise UserError.

    Parameters
    ----------
    ranks : int or None
        The value of --ranks.
    default : int
        What is returned if --ranks is not given. It may be 0 if the caller lets another
        function choose the number.
    program : str
        The command that torchrun can start on several nodes, as in "ddlkit trace".

    Returns
    -------
    int
        The number of ranks.
    """
    if ranks is None:
        return default
    if ranks < 2:
        raise UserError(
            f"--ranks {ranks}: one rank alone sends nothing: use at least 2"
        )
    if ranks > MOST_RANKS:
        raise UserError(
            f"--ranks {ranks}: each is a process of this machine: use at most "
            f"{MOST_RANKS}, or run {program} under torchrun on several nodes"
        )
    return ranks


def print_loading(model: str) -> None:
    """Say on standard error that a model is loaded, which takes seconds without a line.

    ``model`` is the model as the user names it. Nothing is printed on other ranks than rank 0 of
    a job that torchrun or srun started, where every rank calls this function.
    """
    # torchrun sets the first of these variables, and Slurm the second. A process that neither of
    # them started has none.
    rank = os.environ.get("RANK") or os.environ.get("SLURM_PROCID") or "0"
    if rank == "0":
        print(f"ddlkit: loading PyTorch and {model}", file=sys.stderr, flush=True)


def print_starting(ranks: int) -> None:
    """Say on standard error that ranks are started, which takes seconds without a line."""
    print(
        f"ddlkit: starting {ranks} ranks, each of which loads PyTorch", file=sys.stderr
    )


def device_of_own_ranks() -> str:
    """Return the device on which ranks run: ``"cuda"`` if torch sees a GPU, else ``"cpu"``.

    If this machine has GPUs that torch should see and does not, a line on standard error says
    so.
    """
    import torch

    from ddlkit.jobs.rank import hidden_gpus

    if torch.cuda.device_count():
        return "cuda"
    # GPUs that CUDA_VISIBLE_DEVICES hides on purpose do not count.
    unseen_gpus = hidden_gpus()
    if unseen_gpus:
        print(
            f"{PROGRESS}this machine has GPUs ({unseen_gpus}), but torch sees none: ranks run "
            "on processors and talk by gloo",
            file=sys.stderr,
        )
    return "cpu"


def require_lab(text: str | None) -> None:
    """Raise UserError if --lab is given and this machine cannot make links."""
    if not text:
        return
    from ddlkit.lab import network

    # `lacking` says in words what this machine lacks for a lab. It is "" if nothing is lacking.
    lacking = network.lacking()
    if lacking:
        raise UserError(f"--lab {text}: {lacking}")


def require_model_file(spec: str) -> None:
    """Raise UserError if --model names a function of a file that does not exist."""
    # A network of torchvision, such as torchvision:resnet50, has no file.
    file, separator, _ = spec.rpartition(":")
    names_a_file = separator and file.endswith(".py")
    if names_a_file and not Path(file).is_file():
        raise UserError(f"--model {spec}: there is no file {file}")


def named_networks(text: str | None) -> list[tuple[str, int]]:
    """Return the name and the batch size of each network in ``text``, as in resnet50:32,vgg16.

    Blanks around the networks do not count. A network that is given twice with one batch size
    counts once. The list is empty if ``text`` is None, which stands for an option that is not
    given. Raises UserError if ``text`` names no network, or has a wrong batch size.
    """
    from ddlkit.measure.named import network_of

    if text is None:
        return []
    if not text:
        raise UserError(
            "--networks names no network: give networks as in resnet50:32,vgg16, or "
            "leave --networks out"
        )
    networks = []
    for entry in text.split(","):
        described_network = entry.strip()
        if not described_network:
            raise UserError(
                f"--networks {text}: a network is empty: write it, or leave out its comma"
            )
        try:
            networks.append(network_of(described_network))
        except ValueError as error:
            raise UserError(f"--networks {described_network}: {error}") from None
    # A dictionary keeps the order, and each of its keys once.
    return [*dict.fromkeys(networks)]


def _measure_own_model(arguments: argparse.Namespace) -> None:
    """Measure the layers of a user's own model, write their table, and print totals.

    Raises UserError for options that do not go with --model.
    """
    _refuse_wrong_options_of_model(arguments)
    budget_s = MODEL_BUDGET_S if arguments.budget is None else arguments.budget
    # A time below zero is refused where the option is parsed.
    if budget_s <= 0:
        raise UserError("--budget 0: give a time above zero, as in 20s")
    print_loading(arguments.model)
    from ddlkit.jobs.clock import Budget
    from ddlkit.measure.advise import measure_model

    budget = Budget(max_s=budget_s)
    out = arguments.out or Path("measured")
    refuse_impossible_outputs(out)
    result = measure_model(arguments.model, arguments.accumulate, out, budget)
    # Only rank 0 has a result.
    if result:
        factor = result["timing_overhead_factor"]
        # The factor is printed with an explanation, because its name does not tell what it
        # compares.
        result["timing_overhead_factor"] = (
            f"{factor:.3f} (an iteration in which layers are timed, over one in which they "
            "are not)"
        )
        show(result, as_json=False)


_NOT_WITH_MODEL = (
    "networks",
    "sizes",
    "ranks",
    "lab",
    "dry_run",
    "pack",
    "ignore_load",
    *_OPTIONS_OF_A_JOB,
)
"""Options without an effect on a user's own model, as names of parsed arguments."""


def _refuse_wrong_options_of_model(arguments: argparse.Namespace) -> None:
    """Raise UserError for --model with another part, without its file, or with other options."""
    if arguments.part != "layers":
        raise UserError(
            f"--model works only with ddlkit measure layers, not with ddlkit measure "
            f"{arguments.part}: run ddlkit measure layers --model FILE.py:FUNCTION, or ddlkit "
            "advise --model FILE.py:FUNCTION for advice on buckets"
        )
    require_model_file(arguments.model)
    for name in _NOT_WITH_MODEL:
        value = getattr(arguments, name)
        # An option that is not given is None or False. The number 0 is given, too.
        if value is not None and value is not False:
            raise UserError(
                f"{option_of(name)} has no effect with --model, which measures one model "
                "in this process: leave it out"
            )


# ---------------------------------------------------------------- ddlkit machine, ddlkit lab


@command(
    "Print what this machine is: its processor, memory and GPUs, and the versions of "
    "the software.",
    JSON,
    example="ddlkit machine",
)
def machine(arguments: argparse.Namespace) -> None:
    """Run the command ``ddlkit machine``."""
    from ddlkit.store.machine import describe, versions

    description = {**describe(), **versions()}
    cpu = description["cpu"]
    if arguments.json:
        # `describe` gives 0 if no container limits the cores. The printed JSON has null.
        printed_cpu = {**cpu, "quota_cores": cpu["quota_cores"] or None}
        show({**description, "cpu": printed_cpu}, as_json=True)
        return
    cores = count_of(cpu["cores"], "core")
    quota = "no quota of a container"
    if cpu["quota_cores"]:
        quota = f"a container's quota of {cpu['quota_cores']:g} cores"
    gpus = [gpu["model"] for gpu in description["gpus"]]
    adapters = [_adapter_in_words(adapter) for adapter in description["nics"]]
    variables = [
        f"{name}={value}" for name, value in description["nccl_variables"].items()
    ]
    # These texts replace nested entries of the description, which a person could not read.
    in_words = {
        "cpu": f"{cpu['model']}, {cores}, {quota}",
        "gpus": ", ".join(gpus) or "none",
        "nics": ", ".join(adapters) or "none",
        "nccl_variables": ", ".join(variables) or "none",
    }
    show({**description, **in_words}, as_json=False)


def _adapter_in_words(adapter: Mapping[str, str]) -> str:
    """Return a network adapter with its kind and its rate, as in "eth0 (network, 25000 Mb/s)"."""
    rate = adapter["rate"]
    if rate in ("", "unknown"):
        rate = "rate unknown"
    return f"{adapter['name']} ({adapter['kind']}, {rate})"


EMULATED_OPTIONS = ("delay", "loss")
"""Options of links that only --engine emulated has, as names of parsed arguments."""
_ACTIONS = """up makes a lab, prints the names of its namespaces and ends, while the lab stays
(ip netns exec NAMESPACE PROGRAM runs a program in it); status lists the labs of this machine;
down removes a lab; clean removes only labs that status calls dead: their command was killed,
the process of their emulated links has ended, or one of their namespaces is gone. up, like any
command with --lab, removes dead labs, too."""


def rate_of_lab(text: str) -> float:
    """Return the rate of a lab's links that a text gives, in bit/s, or raise UserError."""
    from ddlkit.lab import refuse_impossible_rate

    rate_bits_per_s = units.parse_bits_per_s(text)
    try:
        refuse_impossible_rate(rate_bits_per_s)
    except UserError as error:
        raise UserError(f"{shown(text)}: {error}") from None
    return rate_bits_per_s


@command(
    "Make rate-limited links between network namespaces of this machine. This needs "
    "Linux and root. Commands with --lab make a lab of their own, and need no lab of this "
    "command.",
    *group(
        "what to do",
        choice(
            "action", "up", "status", "down", "clean", metavar="ACTION", help=_ACTIONS
        ),
    ),
    *group(
        "the lab",
        arg(
            "--ranks",
            type=whole_number,
            metavar="N",
            help="The number of namespaces, one for each rank, from 2 to 64. [default: 4]",
        ),
        arg(
            "--label",
            metavar="NAME",
            default="",
            help="For up and down: the name of the lab, a small letter, followed by at most "
            "15 small letters and digits. With down, all labs if it is not given. [default: "
            "the first free ddlN]",
        ),
    ),
    *group(
        "the links",
        arg(
            "--rate",
            type=parsed_by(rate_of_lab),
            help="The rate of each link in either direction, from 1mbit to 100gbit, as in "
            "200mbit. [default: 1gbit]",
        ),
        choice(
            "--engine",
            "tbf",
            "emulated",
            help="What limits the links: tbf is the token bucket filter of Linux; "
            "emulated is a process of ddlkit that also delays and drops packets. "
            "[default: tbf]",
        ),
        arg(
            "--delay",
            metavar="TIME",
            help="With --engine emulated: the delay of each link, of at most 10s, as in 250us. A "
            "round trip passes four links. A time without a unit is in seconds. [default: "
            "0s]",
        ),
        arg(
            "--loss",
            metavar="SHARE",
            help="With --engine emulated: the share of frames that get lost, at most "
            "50%%, as in 0.1%%. [default: 0]",
        ),
    ),
    example="sudo ddlkit lab up --ranks 2 --rate 1gbit",
)
def lab(arguments: argparse.Namespace) -> None:
    """Run the command ``ddlkit lab``."""
    _refuse_options_of_other_actions(arguments)
    if arguments.action == "up":
        _make_lab(arguments)
    elif arguments.action == "status":
        _print_labs()
    elif arguments.action == "down":
        _remove_labs(arguments.label)
    else:
        _clean_labs()


def _make_lab(arguments: argparse.Namespace) -> None:
    """Make the lab that the arguments of ``lab up`` describe, and print what it has."""
    from ddlkit.lab import network

    shape = _lab_shape(arguments)
    # A persistent lab stays when this command ends.
    new_lab = network.Lab(shape, arguments.label, persistent=True)
    # `up` would remove dead labs without a word. They are removed here to tell the user.
    for label in network.clean():
        print(f"ddlkit: {label} was dead and is removed", file=sys.stderr)
    new_lab.up()
    namespaces = " ".join(new_lab.namespaces)
    ranks = count_of(new_lab.ranks, "rank")
    print(f"{new_lab.label}: {ranks} over {new_lab.name}; namespaces {namespaces}")


def _print_labs() -> None:
    """Print a line for each lab of this machine: its state, ranks and link, and its owner."""
    from ddlkit.lab import network

    rows = network.status()
    for row in rows:
        # The number of ranks is 0 if the file that describes the lab is damaged.
        ranks = "an unknown number of ranks"
        if row["ranks"]:
            ranks = count_of(row["ranks"], "rank")
        what_it_has = f"{ranks} over {row['link']}"
        owner = row["owner"]
        # A persistent lab belongs to no process, and stays until the user removes it.
        if owner == "persistent":
            owner = "until ddlkit lab down"
        if row["alive"]:
            print(f"{row['label']}: up: {what_it_has}, {owner}")
        else:
            # The owner of a dead lab may have ended, so it is left out.
            print(f"{row['label']}: dead: {what_it_has}: run ddlkit lab clean")
    if not rows:
        print("no labs are up")


def _remove_labs(label: str) -> None:
    """Remove the lab of a label, or all labs if the label is empty."""
    from ddlkit.lab import network

    labels = [row["label"] for row in network.status()]
    if label:
        labels = [label]
    # `attach` refuses a label that no lab has.
    for label_to_remove in labels:
        network.attach(label_to_remove).down()
        print(f"{label_to_remove}: down")
    if not labels:
        print("no labs are up")


def _clean_labs() -> None:
    """Remove dead labs, and print their labels."""
    from ddlkit.lab import network

    labels = network.clean()
    for label in labels:
        print(f"{label}: removed")
    if not labels:
        print("nothing is left of labs whose process has ended")


_OPTIONS_OF_UP = ("ranks", "rate", "engine", "delay", "loss")
"""Options that describe a new lab, as names of parsed arguments."""


def _refuse_options_of_other_actions(arguments: argparse.Namespace) -> None:
    """Raise UserError for an option without an effect on the action of ``ddlkit lab``."""
    # An option that is not given is None, but --label is empty then.
    action = arguments.action
    if action != "up":
        for name in _OPTIONS_OF_UP:
            if getattr(arguments, name) is not None:
                raise UserError(
                    f"--{name} has no effect on lab {action}, only on lab up: leave it "
                    "out"
                )
    if arguments.label and action not in ("up", "down"):
        raise UserError(
            f"--label has no effect on lab {action}, only on lab up and lab down: leave "
            "it out"
        )


def _lab_shape(arguments: argparse.Namespace) -> Any:
    """Return the `LabShape` that the arguments of ``lab up`` describe."""
    from ddlkit.lab import MAX_RANKS, LabShape, parse

    # These defaults are not given to argparse, so that None shows that an option is not given.
    # Other actions refuse a given option.
    ranks = 4 if arguments.ranks is None else arguments.ranks
    rate_bits_per_s = 1e9 if arguments.rate is None else arguments.rate
    if not 2 <= ranks <= MAX_RANKS:
        raise UserError(f"--ranks {ranks}: a lab has 2 to {MAX_RANKS} ranks")
    conditions = _link_conditions(arguments)
    if arguments.engine == "emulated":
        # The engine also runs without conditions: only the rate is then limited.
        return LabShape(ranks, rate_bits_per_s, conditions=parse(conditions))
    if conditions:
        first_option = next(iter(conditions))
        raise UserError(
            f"--{first_option} needs --engine emulated: the engine tbf limits only the rate "
            "of a link"
        )
    # None stands for the engine tbf.
    return LabShape(ranks, rate_bits_per_s, conditions=None)


def _link_conditions(arguments: argparse.Namespace) -> dict[str, str]:
    """Return the given ones of --delay and --loss by name, as the user writes them.

    Raises UserError, which names the option, for a value that is no delay or no loss.
    """
    from ddlkit.lab import parse

    conditions = {}
    for name in EMULATED_OPTIONS:
        value = getattr(arguments, name)
        if value is None:
            continue
        # Each condition is parsed alone, so that an error names its option.
        try:
            parse({name: value})
        except UserError as error:
            raise UserError(f"--{name} {value}: {error}") from None
        conditions[name] = value
    return conditions
