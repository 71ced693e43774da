"""The program ``python -m workbook``: the commands that only the workbook needs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ddlkit import cli
from ddlkit.cli.command import (
    NAMES_OF_POINTS,
    OUTPUT,
    Argument,
    Command,
    arg,
    choice,
    flag,
    group,
    interrupt_says_kept,
    named_networks,
    refuse_given,
    refuse_impossible_directory,
    refuse_impossible_outputs,
    refuse_unknown_networks,
    session_budget_s,
    session_options,
)
from ddlkit.cli.command import command as any_command
from ddlkit.core.errors import UserError

COMMANDS: dict[str, Command] = {}
"""The commands of the workbook by name."""
command = partial(any_command, register_in=COMMANDS)
PROGRAM = cli.Program(
    "workbook",
    "python -m workbook",
    "Reproduce four papers on the cost of communication in distributed deep learning.",
    COMMANDS,
    example="python -m workbook build --recorded",
)


def _no_directory(option: str, path: Path) -> UserError:
    """Return the error for a path that is no directory.

    ``option`` is how the error calls the path, with the option that names it, if any.
    """
    if path.exists():
        return UserError(f"{option}: is a file: name the directory that holds it")
    return UserError(f"{option}: no such directory: check its name")


def _with_recorded_tables(folder: Path) -> list[Path]:
    """Return which of a folder and its subfolders hold recorded tables, packed or not.

    Other files that end in .csv, as those of figures, have no stamp, and do not count.
    """
    # Imported here, so that other commands start without what measuring needs.
    from ddlkit import store
    from ddlkit.measure.session.engine import with_tables
    from ddlkit.store.tables import is_stamped

    return [
        directory
        for directory in with_tables(folder)
        if any(is_stamped(path) for path in store.list_tables(directory))
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command of the workbook.

    Parameters
    ----------
    argv : sequence of str, optional
        The command and its arguments. By default those of this process.

    Returns
    -------
    int
        The exit status. `ddlkit.cli.main`, which runs the command, describes it.
    """
    return cli.main(argv, PROGRAM)


# -- the report ------------------------------------------------------------------------


@command(
    "Run the notebooks, and build the site and the reports from them.",
    *group(
        "input",
        flag(
            "--recorded",
            "Show only the recordings in data/recorded, and nothing that was measured "
            "on this machine.",
        ),
        arg(
            "--data",
            type=Path,
            metavar="DIRECTORY",
            help="The directory of what was measured on this machine. [default: "
            "build/measured of the clone]",
        ),
        arg(
            "--only",
            metavar="NUMBERS",
            help="Run only the notebooks with these numbers, as in 02,04. [default: "
            "all]",
        ),
    ),
    *group(
        OUTPUT,
        arg(
            "--reports",
            type=Path,
            metavar="DIRECTORY",
            help="The directory for figures, numbers and reports. [default: reports "
            "of the clone with --recorded, else its build/reports]",
        ),
    ),
    example="python -m workbook build --recorded --only 02,04",
)
def build(arguments: argparse.Namespace) -> None:
    """Run the command ``python -m workbook build``, and print the path of the front page.

    Raises
    ------
    UserError
        If options exclude each other, or if a directory is missing, holds no tables, or cannot be
        written.
    """
    # Imported here, so that other commands start without what the site needs.
    from workbook.site import book

    numbers = _notebook_numbers(arguments.only)
    if arguments.recorded and arguments.data is not None:
        raise UserError(
            "--data has no effect with --recorded, which shows nothing that was measured on "
            "this machine: leave one of them out"
        )
    if arguments.data is not None and not arguments.data.is_dir():
        raise UserError(
            f"--data {arguments.data}: is no directory: name the one in which "
            "python -m workbook record wrote its tables"
        )
    # A directory that is named must hold tables. Only without --data is it no error if nothing was
    # measured yet, and then the recordings alone are shown.
    if arguments.data is not None and not _with_recorded_tables(arguments.data):
        raise UserError(
            f"--data {arguments.data}: holds no recorded tables: name the directory in which "
            "python -m workbook record wrote its tables, or give --recorded instead"
        )
    if arguments.reports is not None:
        refuse_impossible_directory("--reports", arguments.reports)
    front_page = book.build(
        recorded=arguments.recorded,
        data=arguments.data,
        reports=arguments.reports,
        only=numbers,
    )
    print(front_page)


def _notebook_numbers(only: str | None) -> list[str]:
    """Return the numbers of the notebooks to run from the value of --only, such as "02,04".

    The list is empty without the option, which stands for all notebooks. Raises UserError if
    the option is given but names no notebook.
    """
    if only is None:
        return []
    # A comma too many, as in "02,", names no notebook.
    numbers = [number.strip() for number in only.split(",") if number.strip()]
    if not numbers:
        raise UserError(
            "--only names no notebook: give numbers as in 02,04, or leave --only out "
            "to run all notebooks"
        )
    return numbers


@command(
    "List the figures and tables of the catalog, or check them.",
    *group(
        "what to do (by default, list)",
        flag(
            "--check",
            "Fail if a figure has no image or no CSV, if the catalog does not say how far "
            "its numbers may differ when they are computed again, if "
            "reports/FIGURES.md is not current, or if an executed notebook shows a warning or "
            "takes too long to read.",
        ),
        flag("--write", "Write the list into reports/FIGURES.md of the clone."),
    ),
    *group(
        "input",
        arg(
            "--reports",
            type=Path,
            metavar="DIRECTORY",
            help="With --check: the directory that holds figures/. [default: reports of "
            "the clone]",
        ),
    ),
    example="python -m workbook figures --check",
)
def figures(arguments: argparse.Namespace) -> int:
    """Run the command ``python -m workbook figures``.

    Returns
    -------
    int
        The exit status, 1 if --check finds a problem and otherwise 0.

    Raises
    ------
    UserError
        If options exclude each other, or if --reports names no directory with figures.
    """
    from workbook.common import catalog

    if arguments.check and arguments.write:
        raise UserError("--check and --write exclude each other: leave one out")
    if arguments.reports and not arguments.reports.is_dir():
        raise _no_directory(f"--reports {arguments.reports}", arguments.reports)
    if arguments.reports and not (arguments.reports / "figures").is_dir():
        raise UserError(
            f"--reports {arguments.reports}: has no folder figures: name the directory in which "
            "python -m workbook build wrote its reports"
        )
    if arguments.reports and not arguments.check:
        # The options --check and --write exclude each other.
        advice = "leave it out" if arguments.write else "leave it out, or add --check"
        raise UserError(f"--reports has an effect with --check only: {advice}")
    return catalog.command(
        check=arguments.check, write=arguments.write, reports=arguments.reports
    )


@command(
    "Compute the numbers in README.md and docs/ anew. The passages that have them are "
    "enclosed in marks.",
    *group(
        "what to do (by default, write)",
        flag("--check", "Change nothing, and fail if a file is not current."),
    ),
    example="python -m workbook texts --check",
)
def texts(arguments: argparse.Namespace) -> int:
    """Run the command ``python -m workbook texts``.

    Returns
    -------
    int
        The exit status, 1 if --check finds a file that is not current and otherwise 0.
    """
    from workbook.site import passages

    if not arguments.check:
        # The names of the files that have changed.
        written = passages.write()
        for name in written:
            print(f"wrote {name}")
        if not written:
            print("all numbers in README.md and docs/ were current already")
        return 0
    # The names of the files that are not current. None is changed.
    outdated = passages.outdated()
    for name in outdated:
        print(
            f"python -m workbook texts: {name} is not current: "
            "run python -m workbook texts",
            file=sys.stderr,
        )
    if outdated:
        return 1
    print("all numbers in README.md and docs/ are current")
    return 0


# -- recordings ------------------------------------------------------------------------

_NAME = """What to measure: a suite, a part of a suite, straggling, or a file that lists
measurements, as examples/labs.yml does (the command campaign does the same with a file).
The suites are quick (a machine in about
four minutes), full (larger networks, with more repeats), cpu (a processor without emulated
links), gpu (one GPU in eight minutes), gpu-long (what gpu leaves out), and smoke (a few small
measurements, as a test). The parts are layers (the time of each layer), collectives (the time of
messages), slowdown (how much layers and messages slow each other down), copies (the time
of copying gradients into buckets), training (iterations of data-parallel training),
replay (iterations whose layers sleep as long as they were measured to compute), campaign
(replays in emulated networks), convergence (training until the loss no longer falls),
input (reading and decoding of pictures), estimators (PyTorch's own cost models), and all.
Of the suite quick, all stands for layers, collectives, slowdown, training and replay of a few
networks. The other suites also measure drift (the speed of the processor or GPU at the start and at
the end, where s1 is the first session), peaks (products of matrices), selection (how long it
takes to find the largest of many gradients, d1000 among 1000), and on GPUs contention and
sharing (kernels and training next to a stand-in for messages). straggling is traces of trainings
with known delays. It is written into data/straggling, takes no option but --out, and begins anew if it was
interrupted."""
STRAGGLING = "straggling"
_PREDICT = """Measure the messages of the emulated links and write down what the models
predict, before anything is replayed or trained. No case is run."""


def _session_options(predict: str, default_out: str) -> tuple[Argument, ...]:
    """Return the options of commands that measure for a long time.

    These are the commands record and campaign. Besides --predict, they have the options of
    every command that measures, such as --out and --budget.

    Parameters
    ----------
    predict : str
        The help of --predict.
    default_out : str
        The default of --out, as the help words it.
    """
    return (
        *group("how to measure", flag("--predict", predict)),
        *session_options(default_out),
    )


@command(
    "Measure what the figures of the workbook need, and record it. An interrupted "
    f"recording continues where it stopped. {NAMES_OF_POINTS}",
    *group(
        "what is measured",
        arg("name", metavar="NAME|FILE", help=_NAME),
        choice(
            "--suite",
            "quick",
            "full",
            help="For a part of a suite: the suite to which the part belongs. "
            "[default: quick]",
        ),
        choice(
            "--device",
            "cpu",
            "cuda",
            help="The device that is measured. [default: as the suite says]",
        ),
        arg(
            "--networks",
            metavar="NAME:BATCH,...",
            help="For the part layers: the networks and their batch sizes, as in "
            "resnet50:32,vgg16:16. [default: those of the suite]",
        ),
    ),
    *group(
        "how to measure",
        flag(
            "--preflight",
            "Measure nothing, and check in half a minute that the device and the installed "
            "packages work here, and that tables can be written. What NAME needs besides, such as "
            "emulated links, is not checked. The only other option is --device.",
        ),
    ),
    *_session_options(
        f"With the file of a campaign: {_PREDICT[0].lower()}{_PREDICT[1:]}",
        "a directory in data/recorded of the clone for the suites cpu, gpu and gpu-long, and for "
        "a file whose entries all have 'measure: campaign'; else a directory in build/ of the "
        "clone; --dry-run prints the directory",
    ),
    example="python -m workbook record cpu --dry-run",
)
def record(arguments: argparse.Namespace) -> int | None:
    """Run the command ``python -m workbook record``.

    Returns
    -------
    int or None
        With --preflight, the exit status: 0 if all checks passed, and otherwise 1. Without it
        None, which stands for success.

    Raises
    ------
    UserError
        If the name with --preflight is unknown, if --preflight cannot tell which device is checked, or
        as `_record` does.
    """
    if not arguments.preflight:
        print(_record(arguments))
        return None
    from workbook.record.preflight import preflight

    if arguments.name == STRAGGLING:
        raise UserError(f"--preflight has no effect on {STRAGGLING}: leave it out")
    refuse_given(
        arguments,
        [
            "suite",
            "networks",
            "predict",
            "out",
            "budget",
            "dry_run",
            "pack",
            "ignore_load",
        ],
        "has no effect with --preflight, which measures nothing",
    )
    from workbook.record import recording

    # Refuses an unknown name.
    suite = recording.suite_of(arguments.name)
    # The suites of a single device. For any other name, --device must say which one is checked.
    devices = {"cpu": "cpu", "gpu": "cuda", "gpu-long": "cuda"}
    device = arguments.device or devices.get(arguments.name)
    if device is None:
        raise UserError(
            "--preflight: say which device is checked: add --device cpu or --device cuda"
        )
    return preflight(device, recording.remedy_without_gpu(suite))


def _record(arguments: argparse.Namespace) -> Path | str:
    """Measure what the arguments name, and return the directory of the tables.

    With --dry-run, nothing is measured, and what would be measured is returned in words.

    Raises
    ------
    UserError
        If an option has no effect on what is measured, names no network, or names a directory
        or file that cannot be written, or as `workbook.record.recording.record` does.
    """
    # If the name is straggling, it is no suite, and has a function of its own.
    if arguments.name == STRAGGLING:
        return _record_straggling(arguments)
    from workbook.record import recording

    if arguments.suite and arguments.name not in recording.PARTS:
        raise UserError(
            f"--suite has no effect on {arguments.name}, only on one part of a suite, "
            "such as layers: leave it out"
        )
    refuse_impossible_outputs(arguments.out, arguments.pack)
    # A wrong name is refused here, where the error can name the option.
    _refuse_networks(arguments.networks)
    # `record` takes each network as the user wrote it, such as "resnet50:32".
    names = []
    if arguments.networks:
        names = [name.strip() for name in arguments.networks.split(",")]
    # If the user interrupts, a message says where the tables are that were already measured.
    with interrupt_says_kept(arguments.out):
        directory_or_plan = recording.record(
            arguments.name,
            suite=arguments.suite or "quick",
            # "" leaves the choice to the suite.
            device=arguments.device or "",
            out=arguments.out,
            dry_run=arguments.dry_run,
            networks=names,
            predict=arguments.predict,
            budget_s=session_budget_s(arguments),
            pack=arguments.pack,
            ignore_load=arguments.ignore_load,
        )
    return directory_or_plan


def _refuse_networks(text: str | None) -> None:
    """Raise UserError if the value of --networks, such as "resnet50:32", is wrong.

    None stands for an option that is not given.
    """
    networks = named_networks(text)
    if networks:
        # Importing the zoo, the module of the papers' networks, makes their names known.
        from workbook.record import zoo

        assert zoo  # so that no linter takes the import for an unused one
    refuse_unknown_networks(networks)


def _record_straggling(arguments: argparse.Namespace) -> Path:
    """Record trainings with known delays, and return the path of the table of what happened.

    Raises
    ------
    UserError
        If an option is given that has no effect here.
    """
    if arguments.dry_run:
        raise UserError(
            f"--dry-run cannot list {STRAGGLING}: without --dry-run, the recording begins anew "
            "in data/straggling, or in the directory of --out"
        )
    # A file in data/straggling has all settings of these recordings except for their directory.
    refuse_given(
        arguments,
        [
            "suite",
            "device",
            "networks",
            "predict",
            "budget",
            "pack",
            "ignore_load",
        ],
        f"has no effect on {STRAGGLING}",
    )
    refuse_impossible_outputs(arguments.out, None)
    from workbook.record import straggling

    return straggling.record(arguments.out or straggling.SCENARIOS.parent)


@command(
    "Replay or train the cases of a campaign over emulated links, and compare them "
    "with predictions. A campaign is a grid of networks, plans, numbers of workers (ranks) "
    "and rates of links, which a file lists. It needs Linux and root. An interrupted campaign continues "
    "where it stopped.",
    *group(
        "what is measured",
        arg(
            "name",
            metavar="FILE",
            help="The file that lists the cases, as examples/campaign.yml.",
        ),
    ),
    *_session_options(
        _PREDICT,
        "a directory in data/recorded of the clone if every entry of the file has "
        "'measure: campaign', and else build/measured of the clone; --dry-run prints the directory",
    ),
    example="sudo python -m workbook campaign examples/campaign.yml --dry-run",
)
def campaign(arguments: argparse.Namespace) -> None:
    """Run the command ``python -m workbook campaign``.

    Raises
    ------
    UserError
        If the name is that of a suite and no file, or as `_record` does.
    """
    # The name of a file has a suffix, and that of a suite has none.
    if not Path(arguments.name).suffix:
        raise UserError(
            f"campaign {arguments.name}: is no file .yml or .json: name a file that lists "
            "cases, as examples/campaign.yml; suites are measured by python -m workbook "
            "record"
        )
    # `_record` also reads these options of the command record, which this command does not have.
    arguments.suite = None
    arguments.device = None
    arguments.networks = None
    directory_or_plan = _record(arguments)
    if arguments.dry_run:
        print(directory_or_plan)
        return
    if arguments.predict:
        print(
            "The predictions are written. The same command without --predict runs the cases "
            "and compares both."
        )
    else:
        _print_comparison(Path(directory_or_plan))
    print(directory_or_plan)


def _print_comparison(directory: Path) -> None:
    """Print how the runs of a campaign compare with their predictions."""
    from workbook.validate.compared import compared

    try:
        lines = [*compared(directory)]
    except UserError as error:
        # The command has not failed, because the runs were measured all the same.
        lines = [f"The runs cannot be compared with predictions: {error}"]
    for line in lines:
        print(line)


@command(
    "Pack the recorded tables of a folder: all tables of a kind, such as layers, go into "
    "one compressed file in the same folder (into a second one, such as layers.2.csv.gz, if there "
    "is one already), and what is known of their measurement into stamps.jsonl. The single files "
    "are removed once these are written. The tables are still read by their old paths, and each is "
    "compared with the hash that was kept of it.",
    *group(
        "input",
        arg(
            "folder",
            type=Path,
            nargs="?",
            metavar="FOLDER",
            help="The folder of recorded tables. [default: all of data/recorded]",
        ),
    ),
    example="python -m workbook pack data/recorded",
)
def pack(arguments: argparse.Namespace) -> None:
    """Run the command ``python -m workbook pack``.

    Raises
    ------
    UserError
        If there is no such folder, if it holds no tables, or if a table is damaged.
    """
    from ddlkit import store
    from ddlkit.store import tables
    from workbook.common import places

    folder = arguments.folder or places.RECORDED
    if not folder.is_dir():
        raise _no_directory(str(folder), folder)
    # The folder itself and its subfolders, if they hold tables. Each is packed on its own.
    directories = _with_recorded_tables(folder)
    if not directories:
        raise UserError(
            f"{folder}: holds no recorded tables: give a folder into which tables were recorded, "
            "as data/recorded"
        )
    # The paths of the tables that are packed now, without those that were packed before.
    packed = []
    for directory in directories:
        # Only one process at a time can hold the lock of a folder.
        with store.lock(directory / ".lock"):
            packed += tables.pack(directory)
    if not packed:
        print(f"{folder}: no recorded table is left to pack")
        return
    noun = "table" if len(packed) == 1 else "tables"
    print(f"{folder}: packed {len(packed)} {noun}")
