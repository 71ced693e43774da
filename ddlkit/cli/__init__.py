"""``ddlkit ...``: one thin command for each station of the spine."""

from __future__ import annotations

import argparse
import contextlib
import errno
import io
import json
import os
import signal
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from ddlkit import __version__
from ddlkit.cli import advising, predicting
from ddlkit.cli.command import COMMANDS, Command
from ddlkit.core.errors import UserError, one_line

assert advising and predicting  # whose imports register their commands

ROOM, FEWER = (
    "make room there, or choose another directory",
    "end other programs, or allow more",
)
LIMITS = {
    **{errno.ENOSPC: ROOM, errno.EDQUOT: ROOM, errno.EROFS: "choose another directory"},
    **{errno.EFBIG: f"{FEWER}: ulimit -f", errno.EMFILE: f"{FEWER}: ulimit -n"},
    **{errno.ENFILE: "end other programs: too many files are open on this machine"},
    **{
        errno.EAGAIN: f"{FEWER}: ulimit -u",
        errno.ENOMEM: "free memory, or ask for less",
    },
}
"""What a machine may be short of, wherever that shows, and what to do."""


@dataclass(frozen=True)
class Program:
    """What `main` runs: a program and its commands.

    name : stands before its messages; called : how it is called in a shell
    moved : where commands went that it had once
    """

    name: str
    called: str
    about: str
    commands: Mapping[str, Command]
    moved: Mapping[str, str] = field(default_factory=dict)


DDLKIT = Program(
    "ddlkit",
    "ddlkit",
    "measure, fit, predict and plan what communication costs in distributed deep learning",
    COMMANDS,
    {
        "book": "python -m workbook build",
        "figures": "python -m workbook figures",
        "record": "python -m workbook record NAME",
        "pack": "python -m workbook pack",
    },
)


def main(argv: Sequence[str] | None = None, program: Program = DDLKIT) -> int:
    """Run one command; a user's mistake, or a machine's limit, is one line on stderr and exit status 2."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(
            errors="backslashreplace"
        )  # a terminal may know ASCII only
    # What arithmetic makes of numbers beyond its range is looked for in the result, by `show`.
    warnings.filterwarnings("ignore", ".* encountered in ", RuntimeWarning)
    if threading.current_thread() is threading.main_thread():
        _end_as_ctrl_c_does()
    try:
        given = sys.argv[1:] if argv is None else argv
        if bare := [
            word[:-3] for word in given if word[:2] == "--" and word[-3:] == "=--"
        ]:
            raise UserError(
                f"{bare[0]}: -- is no value"
            )  # argparse would take it for none
        if given and given[0] in program.moved:
            place = program.moved[given[0]]
            raise UserError(f"{given[0]} is now: {place}, in a clone of the project")
        arguments = _parser(program).parse_args(argv)
        return arguments.run(arguments) or 0
    except UserError as error:
        return _refused(program, error)
    except KeyboardInterrupt as interrupt:
        # Who measured says so: elsewhere there is nothing that could be kept.
        with contextlib.suppress(OSError):
            interrupted = [f"{program.name}: interrupted", *map(str, interrupt.args)]
            print("; ".join(interrupted), file=sys.stderr)
        # An extension may have left word for Python that it end by SIGINT, whatever it was.
        exec("")
        number = (_ended_by or [signal.SIGINT])[0]
        return 128 + (signal.SIGTERM if number == signal.SIGHUP else number)
    except BrokenPipeError:
        # The reader of our output has gone (``| head``): not an error, but flushing again would be.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except MemoryError:
        return _refused(program, f"memory is used up: {LIMITS[errno.ENOMEM]}")
    except OSError as error:
        if error.errno not in LIMITS:
            raise
        words = (error.strerror, error.filename, LIMITS[error.errno])
        return _refused(program, ": ".join(str(word) for word in words if word))
    finally:
        _ended_by.clear()
        while _reminders:
            _reminders.pop().cancel()


def _refused(program: Program, line: object) -> int:
    print(f"{program.name}: error: {line}", file=sys.stderr)
    return 2


def ask(command: str, *files: Any, **options: Any) -> dict[str, Any]:
    """Return what ``ddlkit COMMAND FILES --OPTION VALUE --json`` prints. Raises UserError as that refuses."""
    words = [*command.split(), *map(str, files)]
    for name, value in options.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    page, wrong = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(page), contextlib.redirect_stderr(wrong):
        try:
            arguments = _parser().parse_args([*words, "--json"])
        except SystemExit:
            raise UserError(wrong.getvalue().splitlines()[-1]) from None
        arguments.run(arguments)
    return dict(json.loads(page.getvalue()))


AGAIN_S, AGAIN = 0.5, signal.SIGUSR2
"""So long after an interrupt it comes again, by that signal, if nothing is dealing with it."""
_reminders: list[threading.Timer] = []
_ended_by: list[int] = []
"""The signals that came, first the one that tells the exit status."""


def _end_as_ctrl_c_does() -> None:
    """Let SIGTERM and SIGHUP interrupt as Ctrl-C does, also where SIGINT is ignored; lose no interrupt."""
    for number in (signal.SIGTERM, AGAIN):
        signal.signal(number, _interrupt)
    # SIGINT is ignored in the background of a script; SIGHUP, as the terminal is gone, under nohup.
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    for number, handler in usual.items():
        if signal.getsignal(number) == handler:
            signal.signal(number, _interrupt)


def _interrupt(number: int, _: object) -> None:
    """Raise; Python drops what is raised in a finaliser, and extensions what is beneath them; not this."""
    reminder = threading.Timer(AGAIN_S, os.kill, (os.getpid(), AGAIN))
    reminder.daemon = True
    reminder.start()
    _reminders.append(reminder)
    if number != AGAIN:
        _ended_by.append(number)
    if number != AGAIN or not isinstance(sys.exception(), KeyboardInterrupt):
        raise KeyboardInterrupt


class _Parser(argparse.ArgumentParser):
    """One whose complaint is one line after the usage."""

    def error(self, message: str) -> NoReturn:
        super().error(one_line(message))


def _parser(program: Program = DDLKIT) -> argparse.ArgumentParser:
    parser = _Parser(prog=program.called, description=program.about)
    parser.add_argument("--version", action="version", version=f"ddlkit {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, told in program.commands.items():
        added = commands.add_parser(name, help=told.text, description=told.text)
        added.set_defaults(run=told.run)
        for names, options in told.arguments:
            added.add_argument(*names, **options)
    return parser
