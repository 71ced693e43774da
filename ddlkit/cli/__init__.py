"""The program ``ddlkit``: parsing, errors in one line, and interrupts.

The commands themselves are in the modules of this package. Importing a module registers
its commands.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import errno
import io
import json
import os
import re
import signal
import sys
import textwrap
import threading
import traceback
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from ddlkit import __version__, jobs
from ddlkit.cli import advising, explaining, predicting, scaling, tracing
from ddlkit.cli.command import COMMANDS, Argument, Command
from ddlkit.core.errors import UserError, one_line

# These modules are imported because importing them registers their commands.
assert advising and explaining and predicting and scaling and tracing

MAKE_ROOM = "make room there, or choose another directory"
ALLOW_MORE = "end other programs, or raise the limit"
LIMITS = {
    errno.ENOSPC: MAKE_ROOM,
    errno.EDQUOT: MAKE_ROOM,
    errno.EROFS: "choose another directory",
    errno.EFBIG: f"{ALLOW_MORE} with ulimit -f",
    errno.EMFILE: f"{ALLOW_MORE} with ulimit -n",
    errno.ENFILE: "end other programs, because too many files are open on this machine",
    errno.EAGAIN: f"{ALLOW_MORE} with ulimit -u",
    errno.ENOMEM: "free memory, or ask for less",
}
"""What to do if the machine runs out of something, by the error number of the operating system."""

ALLOW_PATH = "choose another path, or allow this user to use it"
WRONG_PATHS = {
    errno.EACCES: ALLOW_PATH,
    errno.EPERM: ALLOW_PATH,
    errno.ELOOP: "choose another path, or mend the links in it",
    errno.ENAMETOOLONG: "choose a shorter path",
    errno.ENOTDIR: "choose a path whose folders are no files",
}
"""What to do if a path cannot be used, by the error number of the operating system."""

HELP_COLUMNS = 78


@dataclass(frozen=True)
class Program:
    """A program with its commands, as `main` runs it.

    Attributes
    ----------
    name : str
        The word before each of its messages.
    called : str
        What a user types in a shell to run it, as in "python -m workbook".
    about : str
        What the program is for, in one sentence.
    commands : mapping of str to Command
        The commands by name.
    moved : mapping of str to str
        For each command that it had once, the command that does this now.
    example : str
        A line for a shell with which the help begins.
    """

    name: str
    called: str
    about: str
    commands: Mapping[str, Command]
    moved: Mapping[str, str] = field(default_factory=dict)
    example: str = ""


DDLKIT = Program(
    name="ddlkit",
    called="ddlkit",
    about="Measure, fit, predict and plan the cost of communication in distributed deep "
    "learning.",
    commands=COMMANDS,
    moved={
        "book": "python -m workbook build",
        "figures": "python -m workbook figures",
        "record": "python -m workbook record NAME",
        "pack": "python -m workbook pack",
    },
    example="ddlkit advise --model mine.py:net",
)


def main(argv: Sequence[str] | None = None, program: Program = DDLKIT) -> int:
    """Run one command of a program.

    Parameters
    ----------
    argv : sequence of str, optional
        The command and its arguments. By default they are those of this process.
    program : Program, optional
        The program whose command is run.

    Returns
    -------
    int
        The exit status: 0 after success, 2 after a mistake of the user or at a limit of the
        machine, 128 plus the number of the signal after an interrupt, 141 if nobody reads the
        output. A command may return a status of its own.

    Notes
    -----
    A mistake of the user, or a limit of the machine, is one line on standard error.

    If this process fails as one of several ranks that torchrun or srun started, it ends at
    once, and this function does not return.
    """
    _prepare_process()
    # A rank that fails sets a flag, because the other ranks may still wait for it. A failure
    # earlier in this process must not end this command, so the flag is cleared.
    jobs.forget_failure_of_rank()
    words = sys.argv[1:] if argv is None else argv
    try:
        status = _status_of(words, program)
    except Exception:
        if not jobs.rank_has_failed():
            raise
        # The usual end of Python would print the same traceback. It would then wait for
        # threads of this rank, which may wait for the other ranks for ever.
        traceback.print_exc()
        # Python would also exit with this status.
        status = 1
    if jobs.rank_has_failed():
        jobs.end_at_once(status)
    return status


def _status_of(words: Sequence[str], program: Program) -> int:
    """Run the command that words give, and return its exit status, as `main` does."""
    try:
        _refuse_dashes_as_value(words)
        _refuse_moved_command(words, program)
        arguments = _parse(words, program)
        with _errors_of_machine():
            # `_fill_subparser` has set `run`, the function of the command. Most commands return
            # None, which means success.
            return arguments.run(arguments) or 0
    except UserError as error:
        return _refused(program, error)
    except KeyboardInterrupt as interrupt:
        _ending.append(True)
        return _interrupted(program, interrupt)
    except BrokenPipeError:
        # The reader of the output has ended (``| head``), which is no error. Python flushes
        # the output once more when it ends, and would fail at the broken pipe.
        _discard_further_output()
        return 128 + signal.SIGPIPE
    except MemoryError:
        return _refused(program, f"memory is used up: {LIMITS[errno.ENOMEM]}")
    finally:
        # This process may run another command later. What is left of this one must not affect
        # it: signals that were received would decide its exit status, and reminders, which are
        # timers that repeat an interrupt, would interrupt it.
        _signals_received.clear()
        while _reminders:
            _reminders.pop().cancel()
        _ending.clear()


@contextlib.contextmanager
def _errors_of_machine() -> Iterator[None]:
    """Turn errors of the operating system that the user can mend into a UserError.

    Such an error is a limit of the machine (`LIMITS`), or a path that cannot be used
    (`WRONG_PATHS`). Any code that looks at a path may raise the latter: in a directory that
    this user may not enter, even the question whether a file exists fails.
    """
    try:
        yield
    except OSError as error:
        if error.errno in LIMITS:
            # An error that is not about a file has no file name. A name may be bytes.
            file = error.filename
            if isinstance(file, bytes):
                file = os.fsdecode(file)
            facts = (error.strerror, file, LIMITS[error.errno])
            line = ": ".join(str(fact) for fact in facts if fact)
            raise UserError(line) from error
        # Without a file name, the error is about no path.
        if error.errno in WRONG_PATHS and error.filename:
            raise UserError(
                f"cannot use {os.fsdecode(error.filename)}: {error.strerror}: "
                f"{WRONG_PATHS[error.errno]}"
            ) from error
        # The user can mend no other error, so its traceback is shown.
        raise


def _discard_further_output() -> None:
    """Let standard output lead nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())


def _prepare_process() -> None:
    """Set how this process prints, warns and reacts to signals."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # The terminal may know ASCII only. Other characters are then printed as escapes.
        sys.stdout.reconfigure(errors="backslashreplace")
    # numpy warns of overflows and divisions by zero in these words, as in "overflow encountered
    # in exp". These warnings are not needed: `show` refuses a result that is infinite or NaN.
    warnings.filterwarnings("ignore", ".* encountered in ", RuntimeWarning)
    # Python allows handlers of signals to be set in the main thread only.
    if threading.current_thread() is threading.main_thread():
        _install_interrupt_handlers()


def _refuse_dashes_as_value(words: Sequence[str]) -> None:
    """Raise UserError for "--option=--", which argparse takes for an option without a value."""
    for word in words:
        if word.startswith("--") and word.endswith("=--"):
            option = word.removesuffix("=--")
            raise UserError(f"{option}: -- is not a value: write a value after the =")


def _refuse_moved_command(words: Sequence[str], program: Program) -> None:
    """Raise UserError, with the new command, for a command that a program had once."""
    if words and words[0] in program.moved:
        new_command = program.moved[words[0]]
        raise UserError(f"{words[0]} is now: {new_command}, in a clone of the project")


def _refused(program: Program, line: object) -> int:
    """Print an error in one line, and return the exit status for that."""
    print(f"{program.name}: error: {line}", file=sys.stderr)
    return 2


def _interrupted(program: Program, interrupt: KeyboardInterrupt) -> int:
    """Print that the command was interrupted, and return the exit status for that.

    As in a shell, the status is 128 plus the number of the first signal. SIGHUP, which a
    closing terminal sends, counts as SIGTERM, because both ask the command to end.
    """
    # A command that keeps what it measured says so in the arguments of the exception.
    facts = [f"{program.name}: interrupted", *map(str, interrupt.args)]
    # Standard error may lead to a terminal that has closed.
    with contextlib.suppress(OSError):
        print("; ".join(facts), file=sys.stderr)
    # A KeyboardInterrupt that passes through code run by `exec` or by a C extension from text
    # sets a flag of the interpreter. Python then ends the process by SIGINT, and not with the
    # status that is returned here. Running any text, even an empty one, clears the flag.
    exec("")
    # The exception may have another cause than a signal that `_interrupt` recorded. It then
    # counts as Ctrl-C.
    number = _signals_received[0] if _signals_received else signal.SIGINT
    if number == signal.SIGHUP:
        number = signal.SIGTERM
    return 128 + number


def ask(command: str, *files: Any, **options: Any) -> dict[str, Any]:
    """Return what a command prints with ``--json``, as a dictionary.

    Parameters
    ----------
    command : str
        The command and, if need be, some of its words, as in "advise --no-prefetch".
    *files : path_like
        The positional arguments of the command.
    **options : object
        Options with their values: ``plan="ddp"`` stands for ``--plan ddp``, and
        ``profile_ranks=4`` for ``--profile-ranks 4``. A list gives several values, as in
        ``collectives=["ag.log", "rs.log"]``. True gives an option without a value, and an
        option whose value is False or None is left out.

    Returns
    -------
    dict
        The JSON document that the command prints.

    Raises
    ------
    UserError
        If the command refuses its input, if a path cannot be used, or at a limit of the
        machine.
    """
    words = [*command.split(), *map(str, files)]
    if not words:
        raise UserError(
            "ask: name a command, as in ask('predict', profile='profile.csv')"
        )
    for name, value in options.items():
        # The first word is the name of the command.
        words += _option_words(name, value, repeatable=_repeatable(words[0]))
    printed = io.StringIO()
    # What the command prints on standard error is for a person, and is dropped.
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(io.StringIO()):
        arguments = _parse([*words, "--json"])
        with _errors_of_machine():
            arguments.run(arguments)
    return dict(json.loads(printed.getvalue()))


def _option_words(name: str, value: Any, repeatable: Collection[str]) -> list[str]:
    """Return the words of a command line that give an option its value or values.

    There are no words for False and None, and only the option for True. ``repeatable`` has
    the options that must be repeated before each of several values.
    """
    option = "--" + name.replace("_", "-")
    if value is None or value is False:
        return []
    if value is True:
        return [option]
    values = [str(value)]
    if isinstance(value, (list, tuple)):
        values = [str(item) for item in value]
    # An option such as --collectives takes several values at once.
    if option not in repeatable:
        return [option, *values]
    # An option such as --scale takes one value, and may be given several times.
    words: list[str] = []
    for one_value in values:
        words += [option, one_value]
    return words


def _repeatable(command: str) -> set[str]:
    """Return the options of a command that may be given several times, with their dashes."""
    repeatable: set[str] = set()
    # The parser refuses an unknown command later.
    if command not in COMMANDS:
        return repeatable
    for argument in COMMANDS[command].arguments:
        if argument.options.get("action") == "append":
            repeatable.update(argument.names)
    return repeatable


# ---------------------------------------------------------------- interrupts

REMIND_AFTER_S = 0.5
REMINDER = signal.SIGUSR2
"""The signal that repeats an interrupt after REMIND_AFTER_S, unless it is being handled."""
_reminders: list[threading.Timer] = []
_signals_received: list[int] = []
"""The signals that interrupted the command. The first one decides the exit status."""
_ending: list[bool] = []
"""Not empty while an interrupted command ends, after it has cleaned up."""


def _install_interrupt_handlers() -> None:
    """Let `_interrupt` handle Ctrl-C, SIGTERM, SIGHUP and `REMINDER` in this process.

    SIGTERM and SIGHUP then interrupt a command as Ctrl-C does. `REMINDER` is a signal that
    `_interrupt` sends to this process a while later. It raises KeyboardInterrupt again, because
    Python drops the first one if it is raised in a finaliser, for example.
    """
    # These two are always handled: a command is hardly ever started with SIGTERM ignored, and
    # only this program sends the reminder.
    for number in (signal.SIGTERM, REMINDER):
        signal.signal(number, _interrupt)
    # A script lets its background processes ignore SIGINT, and nohup lets a command ignore
    # SIGHUP. A signal that is ignored in this way stays ignored, so that these two are
    # handled only if they have the handler of a usual process.
    usual_handlers = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGHUP: signal.SIG_DFL,
    }
    for number, handler in usual_handlers.items():
        if signal.getsignal(number) == handler:
            signal.signal(number, _interrupt)


def _interrupt(number: int, _: object) -> None:
    """Raise KeyboardInterrupt for the signal ``number``, and send a reminder after a while.

    The exception may get lost: Python drops an exception that is raised in a finaliser, and
    an extension may drop one that is raised in Python code that it calls. The reminder, a
    signal of this process to itself, therefore raises it again, unless an interrupt is being
    handled by then. Each reminder sends the next one, until the command ends. While an
    interrupted command ends, signals do nothing: it has cleaned up, and only prints its last line.
    """
    if _ending:
        return
    timer = threading.Timer(REMIND_AFTER_S, os.kill, (os.getpid(), REMINDER))
    # The timer must not keep the process alive until it has sent the reminder.
    timer.daemon = True
    timer.start()
    # The list serves to cancel the reminders when the command ends.
    _reminders.append(timer)
    # A signal from outside interrupts at once.
    if number != REMINDER:
        _signals_received.append(number)
        raise KeyboardInterrupt
    # While an interrupt is being handled, a reminder must not interrupt the cleaning up.
    _, being_handled, _ = sys.exc_info()
    if not isinstance(being_handled, KeyboardInterrupt):
        raise KeyboardInterrupt


# ---------------------------------------------------------------- parsing


MOST_NAMED_CHOICES = 4
"""So many choices of an argument are all named in an error."""


def _unknown_choice(match: re.Match[str]) -> str:
    """Return the error for an argument whose value is not one of its choices.

    It says what to use instead. The groups of ``match`` are the name of the argument, its
    value in quotes, and the choices in quotes, separated by commas.
    """
    name, value, quoted_choices = match.groups()
    choices = [choice.strip(" '") for choice in quoted_choices.split(",")]
    similar = difflib.get_close_matches(value.strip("'"), choices, n=1)
    advice = f"use one of {', '.join(choices)}"
    # A guess helps where there are many choices. A few are all named instead.
    if similar and len(choices) > MOST_NAMED_CHOICES:
        advice = f"did you mean {similar[0]!r}?"
    # argparse treats the commands as the choices of an argument with this name.
    if name == "COMMAND":
        return f"there is no command {value}: {advice}"
    return f"{name} {value}: {advice}"


def _rephrased(message: str) -> str:
    """Return an error message of argparse in the words of this program, in one line."""
    # Most messages begin as in "argument --plan: expected one argument".
    problem = one_line(message).removeprefix("argument ")
    # For the word --json=yes: "argument --json: ignored explicit argument 'yes'".
    problem = re.sub(
        r"ignored explicit argument '(.*)'$",
        r"takes no value: leave =\1 out",
        problem,
    )
    # "ambiguous option: --m could match --model, --minutes". The option may have a value, as in
    # --m=3.
    ambiguous = re.fullmatch(r"ambiguous option: ([^=\s]*).* could match (.*)", problem)
    if ambiguous:
        option, matches = ambiguous.groups()
        *others, last = matches.split(", ")
        return f"{option} is ambiguous: write {', '.join(others)} or {last}"
    # "argument --to: invalid choice: 'x' (choose from 'ddp', 'inductor')".
    return re.sub(
        r"^(.*): invalid choice: (.*) \(choose from (.*)\)$",
        _unknown_choice,
        problem,
    )


class _Parser(argparse.ArgumentParser):
    """A parser that raises UserError for a wrong word, and names the help to read."""

    command = ""
    """The name of the command that is parsed, "" for the words before a command."""
    example = ""
    """A line for a shell that calls the command."""

    stored: frozenset[str] = frozenset()
    """The names of the arguments of which a value was stored in this parse."""

    def parse_known_args(  # type: ignore[override]
        self, args: Any = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Return the parsed arguments, and the words that are none."""
        self.stored = frozenset()
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Raise UserError with the ``message`` of argparse in the words of this program."""
        problem = _rephrased(message)
        # "the following arguments are required: --profile". Any other message lacks these
        # words, and `separator` is then empty.
        _, separator, missing = problem.partition("arguments are required: ")
        if separator:
            problem = f"{self.command or self.prog} needs {missing}"
            if self.example:
                problem += f", as in: {self.example}"
        elif self.command:
            problem = f"{self.command} {problem}"
        raise UserError(f"{problem} (see {self.prog} --help)")


class _StoreOnce(argparse.Action):
    """Stores the value of an argument, and refuses an option that is given twice.

    By itself, argparse would drop the first value without a word.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Store ``values``, for which argparse calls the action."""
        assert isinstance(parser, _Parser)
        if self.dest in parser.stored:
            remedy = "leave one out"
            if self.nargs == "+" or _takes_list(self.metavar):
                remedy = f"write all its values after one {self.option_strings[0]}"
            if _takes_list(self.metavar):
                remedy += ", separated by commas"
            parser.error(f"{self.option_strings[0]} is given twice: {remedy}")
        parser.stored |= {self.dest}
        setattr(namespace, self.dest, values)


def _takes_list(metavar: Any) -> bool:
    """Return whether an option takes a list with commas, as its metavar such as SIZE,... says."""
    return str(metavar).endswith(",...")


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """A formatter of helps that breaks no option or path at a hyphen.

    Otherwise "--assume-ring" could stand on two lines, where nobody can search or copy it.
    """

    def _split_lines(self, text: str, width: int) -> list[str]:
        """Return the help of an argument in lines of at most ``width`` columns."""
        one_line = " ".join(text.split())
        return textwrap.wrap(
            one_line, width, break_on_hyphens=False, break_long_words=False
        )


def _parse(words: Sequence[str], program: Program = DDLKIT) -> argparse.Namespace:
    """Return the parsed words of a command.

    ``given_names`` of the result are the names of the arguments that the words give. Commands
    refuse an option without an effect even if the user gives its default value. Raises
    UserError for a word that the command does not take.
    """
    # This comes first, because argparse would complain of other things before it reports an
    # unknown option.
    _refuse_unknown_option(words, program)
    _refuse_empty_value(words, program)
    parser = _parser(program)
    # `unknown` can still have words too many, and options with a single dash.
    arguments, unknown = parser.parse_known_args(words)
    if unknown:
        advice = _advice_on_extra_word(unknown[0], words, program)
        raise _no_such_argument(unknown[0], arguments.command, program, advice=advice)
    # A parser without defaults returns only the arguments that are given in ``words``.
    only_given, _ = _parser(program, with_defaults=False).parse_known_args(words)
    arguments.given_names = frozenset(vars(only_given))
    return arguments


def _refuse_unknown_option(words: Sequence[str], program: Program) -> None:
    """Raise UserError for the first option in ``words`` that their command does not have.

    argparse reports an unknown option last. Before that, it would complain that the option
    which was misspelt is missing, or take the value of the unknown option as another argument.
    """
    # The help is printed whatever else the words are. Without any word, argparse has the better
    # message.
    if not words or {"-h", "--help"}.intersection(words):
        return
    command = words[0]
    # Options that stand before a command are those of the program, also with a single dash.
    if command.startswith("-"):
        name, _, _ = command.partition("=")
        options = ["--help", "--version"]
        if not any(option.startswith(name) for option in options):
            raise _no_such_argument(name, "", program, options)
        return
    # With an unknown command, argparse has the better message.
    if command not in program.commands:
        return
    options = ["--help"]
    for argument in program.commands[command].arguments:
        options += [name for name in argument.names if name.startswith("--")]
    for word in words[1:]:
        # What follows two dashes alone is no option.
        if word == "--":
            return
        # An option may be given its value in the same word, as in --plan=ddp.
        name, _, _ = word.partition("=")
        # argparse also takes the beginning of an option, such as --prof for --profile.
        is_known = any(option.startswith(name) for option in options)
        if word.startswith("--") and not is_known:
            raise _no_such_argument(name, command, program, options)


def _refuse_empty_value(words: Sequence[str], program: Program) -> None:
    """Raise UserError for an empty word, and for an option with nothing after its "=".

    An unset variable of a shell is such a word. As a path, it would mean the current directory. The
    error offers to leave the argument out only if the command does not need it.
    """
    if words and words[0] == "":
        raise UserError("the command is empty: write it")
    for position, word in enumerate(words):
        previous = words[position - 1] if position else ""
        if word == "":
            option = previous if previous.startswith("--") else ""
        elif word.startswith("--") and word.endswith("="):
            option = word.removesuffix("=")
        else:
            continue
        called = f"{words[0]} {option}" if option else words[0]
        problem = "its value is empty" if option else "an argument is empty"
        remedy = "write it"
        if not _is_required(option, position, words, program):
            remedy += f", or leave {option or 'it'} out"
        raise UserError(f"{called}: {problem}: {remedy}")


def _is_required(
    option: str, position: int, words: Sequence[str], program: Program
) -> bool:
    """Return whether a command needs an option, or else the argument at a position of ``words``.

    ``option`` is "" if the word at the position is no value of an option. It is then taken to be
    needed if it is the first argument of a command that needs one, because any later word may
    be one too many.
    """
    for argument in _arguments_of(words[0], program):
        is_positional = not argument.names[0].startswith("-")
        if option and any(name.startswith(option) for name in argument.names):
            return bool(argument.options.get("required"))
        # Of the files of one argument, one may be left out if there are others.
        if not option and is_positional:
            n_values = argument.options.get("nargs")
            needs_this_word = n_values is None or (n_values == "+" and len(words) == 2)
            return needs_this_word and position == 1
    return False


def _arguments_of(command: str, program: Program) -> Sequence[Argument]:
    """Return the arguments of a command, none if the program does not have the command."""
    if command not in program.commands:
        return ()
    return program.commands[command].arguments


def _advice_on_extra_word(extra: str, words: Sequence[str], program: Program) -> str:
    """Return what to do about a word that a command does not take, "" if nobody can tell.

    ``words`` are the command and all words after it.
    """
    if words[:2] == ["lab", "down"] and not extra.startswith("-"):
        return f"did you mean --label {extra}?"
    # An option may be given its value in the same word, as in --sizes=1MiB.
    single_words: list[str] = []
    for word in words:
        single_words += word.split("=", 1) if word.startswith("--") else [word]
    # The word may be the second value of a list, as in --sizes 1MiB 2MiB.
    for argument in _arguments_of(words[0], program):
        if not _takes_list(argument.options.get("metavar")):
            continue
        name = argument.names[0]
        for option, value, word in zip(
            single_words, single_words[1:], single_words[2:], strict=False
        ):
            # The option may be given by its beginning, such as --si.
            is_this_option = len(option) > 2 and name.startswith(option)
            if is_this_option and word == extra:
                values = f"{value.rstrip(',')},{extra}"
                return f"write the values of {name} with commas and without blanks, as in {values}"
    return ""


def _no_such_argument(
    word: str,
    command: str,
    program: Program,
    options: Sequence[str] = (),
    advice: str = "",
) -> UserError:
    """Return the error for a word that a command does not take.

    ``command`` is "" for a word before the command. If the word is similar to one of
    ``options``, the error asks whether that is meant. Otherwise it gives the ``advice``.
    """
    problem = f"{command} has no argument {one_line(word)}"
    called = f"{program.called} {command}"
    if not command:
        problem = (
            f"{program.called} has no argument {one_line(word)} before the command"
        )
        called = program.called
    # The dashes, which all options share, would make any two short options similar.
    names = [option.removeprefix("--") for option in options]
    similar = difflib.get_close_matches(word.removeprefix("--"), names, n=1)
    if similar:
        advice = f"did you mean --{similar[0]}?"
    if advice:
        problem += f": {one_line(advice)}"
    return UserError(f"{problem} (see {called} --help)")


def _parser(
    program: Program = DDLKIT, *, with_defaults: bool = True
) -> argparse.ArgumentParser:
    """Return the parser of a program, with a subparser for each command.

    Without defaults, the namespace of parsed arguments lacks each argument that the
    command line does not give.
    """
    parser = _Parser(
        prog=program.called,
        description=_description(program.about, program.example),
        formatter_class=_HelpFormatter,
    )
    parser.add_argument(
        "--version",
        action="version",
        version=f"ddlkit {__version__}",
        help="print the version of ddlkit",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name, command in program.commands.items():
        # The list of all commands has the first sentence of each.
        first_sentence = command.text.partition(". ")[0].rstrip(".")
        subparser = commands.add_parser(
            name,
            help=f"{first_sentence}.",
            usage=_usage(f"{program.called} {name}", command),
            description=_description(command.text, command.example),
            # `_description` has broken its lines, so argparse must not fill them anew.
            formatter_class=_HelpFormatter,
        )
        _fill_subparser(subparser, name, command, with_defaults=with_defaults)
    return parser


def _fill_subparser(
    subparser: _Parser, name: str, command: Command, *, with_defaults: bool
) -> None:
    """Add the arguments of a command to its parser, and what its errors and `main` need.

    Without defaults, the namespace of parsed arguments lacks each argument that the
    command line does not give.
    """
    # By default argparse takes -5 as a value, but -5s as an option. No option here
    # begins with a digit, so by this pattern both are values. The option to which such
    # a value is given can then refuse it with a message of its own.
    subparser._negative_number_matcher = re.compile(r"-\.?\d")
    # An option that is given twice is refused. argparse looks up the action that stores a value
    # under "store", or under None if an argument names no action, so both are replaced.
    for action in (None, "store"):
        subparser.register("action", action, _StoreOnce)
    # Error messages begin with the name of the command.
    subparser.command = name
    subparser.example = command.example
    # `main` calls `run` with the parsed arguments.
    subparser.set_defaults(run=command.run, command=name)
    _add_arguments(subparser, command.arguments, with_defaults=with_defaults)


def _add_arguments(
    parser: argparse.ArgumentParser,
    arguments: Sequence[Argument],
    *,
    with_defaults: bool,
) -> None:
    """Add the arguments of a command to its parser, under their headings.

    Without defaults, the namespace of parsed arguments lacks each argument that the
    command line does not give.
    """
    # Arguments with the same heading share a group. Its heading would be printed again if
    # it were added to the parser twice.
    groups: dict[str, argparse._ArgumentGroup] = {}
    for argument in arguments:
        parser_or_group: Any = parser
        if argument.group:
            if argument.group not in groups:
                groups[argument.group] = parser.add_argument_group(argument.group)
            parser_or_group = groups[argument.group]
        options = dict(argument.options)
        # By this default, the namespace lacks an argument that is not given.
        if not with_defaults:
            options["default"] = argparse.SUPPRESS
        parser_or_group.add_argument(*argument.names, **options)


def _usage(called: str, command: Command) -> str:
    """Return a line with the arguments that a command requires, for the head of its help."""
    words = [_usage_word(argument) for argument in command.arguments]
    required_words = [word for word in words if word]
    usage = " ".join([called, *required_words, "[options]"])
    # argparse formats this text by the operator %.
    return usage.replace("%", "%%")


def _usage_word(argument: Argument) -> str:
    """Return how an argument stands in the usage, "" for an option that may be left out.

    What may be left out stands in brackets, as in "FILE [FILE ...]" for one file or several.
    """
    name = argument.names[0]
    # Without a metavar, argparse also writes the value of an option as its name in capitals.
    values = argument.options.get("metavar") or name.lstrip("-").upper()
    if argument.options.get("nargs") == "+":
        values = f"{values} [{values} ...]"
    is_positional = not name.startswith("-")
    if is_positional:
        return f"[{values}]" if argument.options.get("nargs") == "?" else values
    return f"{name} {values}" if argument.options.get("required") else ""


def _description(text: str, example: str) -> str:
    """Return the head of a help: the example, and what the command does."""
    text = textwrap.fill(text, HELP_COLUMNS, break_on_hyphens=False)
    return f"example:\n  {example}\n\n{text}" if example else text
