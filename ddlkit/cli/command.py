"""What a command is, and how its result is shown; and the commands that measure, and make links for that."""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ddlkit.core import units
from ddlkit.core.errors import UserError, shown

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


JSON = flag("--json", "print JSON")


def command(
    text: str, *arguments: Argument, register_in: dict[str, Command] = COMMANDS
) -> Callable[[Run], Run]:
    """Return what registers a function as the command of its own name, here of ddlkit."""

    def register(run: Run) -> Run:
        register_in[run.__name__.rstrip("_").replace("_", "-")] = Command(
            run, text, arguments
        )
        return run

    return register


def show(result: dict[str, Any], as_json: bool) -> None:
    """Print a result as one JSON document, or as aligned lines for a person; refuse a number that is none."""
    for name, value in result.items():
        try:
            json.dumps(value, allow_nan=False, default=str)
        except ValueError as error:
            advice = "check sizes, times, rates and their units"
            raise UserError(f"{name} comes out as {shown(value)}: {advice}") from error
    lines = [f"{name:<32} {_shown(value)}" for name, value in result.items()]
    print(json.dumps(result) if as_json else "\n".join(lines))


def _shown(value: Any) -> str:
    """Return a value as a person reads it: lists of many numbers by their range; None: not known."""
    if value is None:
        return "not known"
    if isinstance(value, float):
        return f"{value:.6g}"
    if not is_numbers(value):
        return str(value)
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(number)}" for name, number in value.items())
    if len(value) > 4:
        return f"{len(value)} from {_shown(min(value))} to {_shown(max(value))} (--json: all)"
    return ", ".join(map(_shown, value)) or "none"


def is_numbers(value: Any) -> bool:
    """Return whether it is a list of numbers, or numbers by name."""
    inner = value.values() if isinstance(value, dict) else value
    return isinstance(value, (dict, list)) and all(
        isinstance(x, (int, float)) for x in inner
    )


_MODEL = """for layers, your own: the function gives (model, loss) or (model, loss, optimizer), where loss()
does one forward pass and returns the scalar; or torchvision:resnet50:32; also under torchrun or srun"""
_PACK = """keep the whole recording in this file, too, every 20 s: a kill at any time leaves it whole, and
the next run goes on from it where the directory is empty; by hand: tar xzf FILE.tgz"""
_BUDGET = "when to end, as in 8m30s or 90s [when all is measured]"


def session_options(default_out: str) -> tuple[Argument, ...]:
    """Return the options of every command that measures; its tables go to ``default_out``."""
    return (
        arg("--budget", type=units.parse_seconds, help=_BUDGET),
        flag("--dry-run", "only say what and how long"),
        arg("--out", type=Path, help=f"directory for the tables [{default_out}]"),
        arg("--pack", type=Path, metavar="FILE.tgz", help=_PACK),
        flag(
            "--ignore-load", "measure although others use the GPU; every stamp says so"
        ),
    )


PARTS = ("quick", "layers", "collectives", "slowdown", "copies", "training")
_PARTS = """layers (time of each layer), collectives (time of messages by size), slowdown (what compute and
messages take from each other), copies (time of copies in memory), training (iterations under
DistributedDataParallel), or quick (all of these)"""
IN_THE_WORKBOOK = (
    *("full", "cpu", "gpu", "smoke", "all"),
    *("replay", "campaign", "convergence", "input", "estimators"),
)
"""What `python -m workbook record` measures."""


@contextlib.contextmanager
def keeping() -> Iterator[None]:
    """Say of an interrupt that what was measured is kept."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt("what was measured is kept") from None


@command(
    "measure what predictions need of this machine; goes on where it stopped",
    arg("part", metavar="PART", help=_PARTS),
    arg(
        "--networks",
        help="for layers, slowdown, training, with batch sizes: resnet50:32,vgg16:8 [resnet50:4]",
    ),
    arg("--model", metavar="FILE.py:FUNCTION", help=_MODEL),
    arg(
        "--accumulate",
        type=int,
        default=1,
        help="of a model: losses in an iteration [1]",
    ),
    arg("--ranks", type=int, help="how many exchange messages [2, or one a GPU]"),
    arg(
        "--lab",
        metavar="RATE[,DELAY]",
        help="over rate-limited links of this machine (root, Linux), as 1gbit or 1gbit,2ms [none]",
    ),
    *session_options("measured"),
)
def measure(arguments: argparse.Namespace) -> None:
    part = arguments.part
    if part in IN_THE_WORKBOOK or part.endswith((".yml", ".yaml", ".json")):
        raise UserError(f"{part} is now: python -m workbook record {part}, in a clone")
    if part not in PARTS:
        raise UserError(f"measure {shown(part)}: use one of {', '.join(PARTS)}")
    if arguments.model or arguments.accumulate != 1:
        return _measured_model(arguments)
    ranks = arguments.ranks
    if ranks is not None and ranks < 2:
        raise UserError(
            f"--ranks {ranks}: one rank alone sends nothing: use at least 2"
        )
    rate_bits_per_s, delay_s = lab_rate(arguments.lab)
    if not arguments.dry_run:
        require_lab(arguments.lab)
    _named_networks(arguments.networks)  # refused before torch is loaded
    from ddlkit.measure import parts
    from ddlkit.measure.session import engine
    from ddlkit.store import machine

    networks = _named_networks(arguments.networks) or parts.DEFAULT_NETWORKS
    make = functools.partial(
        parts.points,
        part=part,
        networks=networks,
        ranks=ranks or 0,
        rate_bits_per_s=rate_bits_per_s,
        delay_s=delay_s,
    )
    out = arguments.out or Path("measured")
    if arguments.dry_run:
        print(engine.estimate(make, out))
        return
    with keeping():
        made = engine.run_session(
            make,
            out,
            gpu=bool(machine.describe()["gpus"]),
            budget_s=session_budget_s(arguments),
            pack=arguments.pack,
            ignore_load=arguments.ignore_load,
        )
    print(made)


def session_budget_s(arguments: argparse.Namespace) -> float:
    """Return the seconds after which a session starts nothing new."""
    return math.inf if arguments.budget is None else float(arguments.budget)


def lab_rate(text: str | None) -> tuple[float, float]:
    """Return the rate in bit/s and the delay in s of "1gbit" or "1gbit,2ms"; zeros for no lab."""
    if not text:
        return 0.0, 0.0
    rate, _, delay = text.partition(",")
    delay_s = units.parse_seconds(delay) if delay else 0.0
    return units.parse_bits_per_s(rate), delay_s


def require_lab(text: str | None) -> None:
    """Raise UserError where --lab is given and no lab can be made, before anything is measured."""
    if text:
        from ddlkit.lab import network

        if reason := network.lacking():
            raise UserError(f"--lab {text}: {reason}")


def _named_networks(text: str | None) -> list[tuple[str, int]]:
    """Return names and batch sizes of networks that a user lists, as in resnet50:32,vgg16."""
    from ddlkit.measure.named import network_of

    try:
        return [network_of(name) for name in text.split(",")] if text else []
    except ValueError as error:
        raise UserError(f"--networks {text}: {error}") from None


def _measured_model(arguments: argparse.Namespace) -> None:
    """Measure the layers of a user's own model. Raises UserError for what does not go with that."""
    others = ("networks", "ranks", "lab", "dry_run", "pack", "ignore_load")
    if not arguments.model or arguments.part != "layers" or arguments.accumulate < 1:
        raise UserError(
            "--accumulate, at least 1, needs --model, and that goes with layers alone"
        )
    if given := [name for name in others if getattr(arguments, name)]:
        raise UserError(
            f"--{given[0].replace('_', '-')} does not go with --model: leave it out"
        )
    from ddlkit.jobs.clock import Budget
    from ddlkit.measure.advise import measure_model

    budget = Budget(max_s=arguments.budget or 20.0)
    out = arguments.out or Path("measured")
    if result := measure_model(arguments.model, arguments.accumulate, out, budget):
        show(result, as_json=False)


@command("what this machine is", JSON)
def machine(arguments: argparse.Namespace) -> None:
    from ddlkit.store.machine import describe, versions

    show({**describe(), **versions()}, arguments.json)


# Each of an emulated link alone, by the field of the parsed arguments.
_EMULATED = {
    "delay": "of each link: a round trip passes four [0s]",
    "loss": "share of frames that are lost on their way: 0.1%% [0]",
}
_ACTIONS = "make links, list labs, take a lab down, remove dead ones"


@command(
    "a rate-limited network of namespaces (root, Linux)",
    arg("action", choices=("up", "status", "down", "clean"), help=_ACTIONS),
    arg("--ranks", type=int, default=4, help="namespaces, one per rank [4]"),
    arg("--rate", default="1gbit", help="rate of each link, both ways [1gbit]"),
    arg(
        "--engine",
        choices=("tbf", "emulated"),
        default="tbf",
        help="what limits the links [tbf]",
    ),
    *(arg(f"--{name}", help=text) for name, text in _EMULATED.items()),
    arg("--label", default="", help="name of the lab [the first free ddlN]"),
)
def lab(arguments: argparse.Namespace) -> None:
    from ddlkit.lab import network

    label = arguments.label
    if arguments.action == "up":
        made = network.Lab(_lab_shape(arguments), label, persistent=True).up()
        namespaces = " ".join(made.namespaces)
        print(
            f"{made.label}: {made.ranks} ranks over {made.name}; namespaces {namespaces}"
        )
    elif arguments.action == "status":
        for row in network.status():
            state = "up" if row["alive"] else "dead: run ddlkit lab clean"
            print(
                "{label}: {ranks} ranks over {link}, {owner}".format_map(row)
                + f", {state}"
            )
    elif arguments.action == "down":
        for each in [label] if label else [row["label"] for row in network.status()]:
            network.attach(each).down()
            print(f"{each}: down")
    else:
        for each in network.clean():
            print(f"{each}: removed")


def _lab_shape(arguments: argparse.Namespace) -> Any:
    """Return the lab that the arguments of ``lab up`` describe."""
    from ddlkit.lab import LabShape, parse

    given = {
        name: value
        for name in _EMULATED
        if (value := getattr(arguments, name)) is not None
    }
    emulated = arguments.engine == "emulated"
    if given and not emulated:
        raise UserError(
            f"--{[*given][0]} needs --engine emulated: links of tbf have a rate alone"
        )
    rate = units.parse_bits_per_s(arguments.rate)
    return LabShape(arguments.ranks, rate, parse(given) if emulated else None)
