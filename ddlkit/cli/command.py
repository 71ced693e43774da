"""What a command is, and how its result is shown."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ddlkit.core.errors import UserError

Run = Callable[[argparse.Namespace], int | None]
Argument = tuple[tuple[str, ...], dict[str, Any]]


class Command(NamedTuple):
    """What a command does, what its help says, and its arguments as argparse takes them."""

    run: Run
    text: str
    arguments: Sequence[Argument]


COMMANDS: dict[str, Command] = {}


def arg(*names: str, **options: Any) -> Argument:
    """Return an argument of a command."""
    return names, options


def flag(name: str, text: str) -> Argument:
    """Return an argument that is there or not."""
    return arg(name, action="store_true", help=text)


def many(name: str, metavar: str, text: str) -> Argument:
    """Return an argument that may be repeated."""
    return arg(name, action="append", default=[], metavar=metavar, help=f"{text}; may be repeated")


def command(text: str, *arguments: Argument) -> Callable[[Run], Run]:
    """Return what registers a function as the command of its own name."""

    def register(run: Run) -> Run:
        COMMANDS[run.__name__.rstrip("_").replace("_", "-")] = Command(run, text, arguments)
        return run

    return register


FEW = 4
"""So many numbers a person reads one by one; of more, the range tells enough."""


def show(result: dict[str, Any], as_json: bool) -> None:
    """Print a result as one JSON document, or as aligned lines for a person.

    Raises UserError for a number that is none.
    """
    for name, value in result.items():
        _check_finite(name, value)
    lines = [f"{name:<32} {_shown(value)}" for name, value in result.items()]
    print(json.dumps(result) if as_json else "\n".join(lines))


def _check_finite(name: str, value: Any) -> None:
    """Raise a UserError for a number that is infinite or none, anywhere in the value."""
    if isinstance(value, float) and not math.isfinite(value):
        raise UserError(
            f"{name} comes out as {value}: sizes, times or rates that went in are far beyond what can "
            "be: check them and their units"
        )
    if isinstance(value, (dict, list, tuple)):
        for inner in value.values() if isinstance(value, dict) else value:
            _check_finite(name, inner)


def _shown(value: Any) -> str:
    """Return a value as a person reads it: lists of many numbers by their range; None: not known."""
    if value is None:
        return "not known"
    if isinstance(value, float):
        return f"{value:.6g}"
    numbers = (
        list(value.values() if isinstance(value, dict) else value) if is_numbers(value) else []
    )
    if len(numbers) > FEW:
        return f"{len(numbers)} from {_shown(min(numbers))} to {_shown(max(numbers))} (--json: all)"
    if numbers and isinstance(value, dict):
        return ", ".join(f"{name} {_shown(number)}" for name, number in value.items())
    if value in ([], {}):
        return "none"
    return ", ".join(map(_shown, numbers)) if numbers else str(value)


def is_numbers(value: Any) -> bool:
    """Return whether it is a list of numbers, or numbers by name."""
    held = value.values() if isinstance(value, dict) else value
    return isinstance(value, (dict, list)) and all(isinstance(x, (int, float)) for x in held)


JSON = flag("--json", "print JSON")
