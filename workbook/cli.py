"""``python -m workbook ...``: one thin command for what only the workbook does."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ddlkit import cli
from ddlkit.cli.command import (
    Command,
    arg,
    flag,
    keeping,
    session_budget_s,
    session_options,
)
from ddlkit.cli.command import command as any_command
from ddlkit.core.errors import UserError

COMMANDS: dict[str, Command] = {}
command = partial(any_command, register_in=COMMANDS)
PROGRAM = cli.Program(
    "workbook",
    "python -m workbook",
    "reproduce four papers on communication cost in distributed deep learning",
    COMMANDS,
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command of the workbook as `ddlkit.cli.main` does those of ddlkit."""
    return cli.main(argv, PROGRAM)


@command(
    "run the notebooks and build the report",
    flag("--recorded", "only from data/recorded"),
    arg("--data", type=Path, help="measured tables [build/measured]"),
    arg(
        "--reports",
        type=Path,
        help="for figures [reports with --recorded, else build/reports]",
    ),
    arg("--only", default="", help="notebooks by number: 02,04"),
)
def build(arguments: argparse.Namespace) -> None:
    from workbook.site import book

    page = book.build(
        recorded=arguments.recorded,
        data=arguments.data,
        reports=arguments.reports,
        only=[number for number in arguments.only.split(",") if number],
    )
    print(page)


@command(
    "list or check the catalog of figures and tables",
    flag("--check", "fail on a missing image, CSV or tolerance"),
    flag("--write", "write reports/FIGURES.md"),
    arg("--reports", type=Path, help="directory that holds figures/ [reports]"),
)
def figures(arguments: argparse.Namespace) -> int:
    from workbook.common import catalog

    return catalog.command(
        check=arguments.check, write=arguments.write, reports=arguments.reports
    )


@command(
    "compute the numbers in README.md and docs/ anew, where marks enclose them",
    flag("--check", "change nothing: fail where a file is not current"),
)
def texts(arguments: argparse.Namespace) -> int:
    from workbook.site import passages

    if arguments.check:
        names = passages.outdated()
        for name in names:
            print(
                f"python -m workbook texts: {name} is not current: "
                "run python -m workbook texts",
                file=sys.stderr,
            )
        return int(bool(names))
    for name in passages.write():
        print(name)
    return 0


_NAME = """a suite (quick, full, cpu, gpu, smoke), a file of points, or a part of the suite quick: layers,
collectives, slowdown, copies, training, replay, campaign, convergence, input, estimators (what PyTorch's own
cost models say), all (without copies and the last three)"""
_PREDICT = (
    "of a campaign: calibrate its labs and write down what models say, without runs"
)


@command(
    "measure a suite of the papers and record it; goes on where it stopped",
    arg("name", metavar="NAME|FILE", help=_NAME),
    arg(
        "--profile",
        choices=("quick", "full"),
        default="quick",
        help="whose part it is [quick]",
    ),
    arg("--device", choices=("cpu", "cuda"), help="on which device [the suite's]"),
    arg("--networks", help="for layers, with batch sizes: resnet50:32,vgg16:16"),
    flag("--predict", _PREDICT),
    flag(
        "--preflight", "measure nothing: check in half a minute that all it needs works"
    ),
    *session_options("build/measured, or data/recorded/..."),
)
def record(arguments: argparse.Namespace) -> int | None:
    if arguments.preflight:
        from workbook.record.preflight import preflight

        devices = {"cpu": "cpu", "gpu": "cuda"}
        device = arguments.device or devices.get(arguments.name)
        if device is None:
            raise UserError("--preflight: name a suite, cpu or gpu, or give --device")
        return preflight(device)
    _recorded(arguments)
    return None


def _recorded(arguments: argparse.Namespace) -> None:
    from workbook.record import recording

    networks = arguments.networks.split(",") if arguments.networks else ()
    with keeping():
        made = recording.record(
            arguments.name,
            profile=arguments.profile,
            device=arguments.device or "",
            out=arguments.out,
            dry_run=arguments.dry_run,
            networks=networks,
            predict=arguments.predict,
            budget_s=session_budget_s(arguments),
            pack=arguments.pack,
            ignore_load=arguments.ignore_load,
        )
    print(made)


@command(
    "replay the cases of a campaign in labs (root, Linux); goes on where it stopped",
    arg("name", metavar="FILE", help="a file of points, as examples/campaign.yml"),
    flag("--predict", _PREDICT),
    *session_options("build/measured, or data/recorded/..."),
)
def campaign(arguments: argparse.Namespace) -> None:
    arguments.profile = "quick"
    arguments.device = None
    arguments.networks = None
    _recorded(arguments)


@command(
    "pack recorded tables: one file of each kind, each table's own hash kept and verified",
    arg(
        "folder", type=Path, nargs="?", help="of recorded tables [all of data/recorded]"
    ),
)
def pack(arguments: argparse.Namespace) -> None:
    from ddlkit import store
    from ddlkit.measure.session.engine import with_tables
    from ddlkit.store import tables
    from workbook.common import places

    folder = arguments.folder or places.RECORDED
    if not folder.is_dir():
        raise UserError(f"{folder}: no such directory")
    for directory in with_tables(folder):
        with store.lock(directory / ".lock"):
            tables.pack(directory)
    print(folder)
