"""What a command is, and how its result is shown; and the commands that measure, and make links for that."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
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


def command(text: str, *arguments: Argument) -> Callable[[Run], Run]:
    """Return what registers a function as the command of its own name."""

    def register(run: Run) -> Run:
        COMMANDS[run.__name__.rstrip("_").replace("_", "-")] = Command(
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


_MEASURE = """a suite (quick, full, cpu, gpu, smoke), a file of one, or a part of the suite quick:
layers, collectives, slowdown, copies, training, replay, campaign, convergence, input, estimators (what
PyTorch's own cost models say), all (without the last four)"""
_MODEL = """for layers, your own: the function gives (model, loss) or (model, loss, optimizer), where loss()
does one forward pass and returns the scalar; or torchvision:resnet50:32; also under torchrun or srun"""
_PACK = """keep the whole recording in this file, too, every 20 s: a kill at any time leaves it whole, and
the next run goes on from it where the directory is empty; by hand: tar xzf FILE.tgz -C data/recorded"""
_BUDGET = "when to end, as in 8m30s or 90s [when all is measured]"
_SESSION = (
    arg("--budget", type=units.parse_seconds, help=_BUDGET),
    flag("--dry-run", "only say what and how long"),
    arg(
        "--out",
        type=Path,
        help="directory for the tables [build/measured, or data/recorded/...]",
    ),
    arg("--pack", type=Path, metavar="FILE.tgz", help=_PACK),
    flag("--ignore-load", "measure although others use the GPU; every stamp says so"),
)


def _measured(arguments: argparse.Namespace, what: str, **how: Any) -> None:
    from ddlkit.measure.session import engine

    how["budget_s"] = math.inf if arguments.budget is None else arguments.budget
    how |= {
        name: getattr(arguments, name)
        for name in ("out", "dry_run", "pack", "ignore_load")
    }
    try:
        print(engine.measure(what, **how))
    except KeyboardInterrupt:
        raise KeyboardInterrupt("what was measured is kept") from None


@command(
    "measure this machine and record what it shows; goes on where it stopped",
    arg("what", metavar="NAME|FILE", help=_MEASURE),
    arg(
        "--profile",
        choices=("quick", "full"),
        default="quick",
        help="whose part it is [quick]",
    ),
    arg("--networks", help="for layers, with batch sizes: resnet50:32,vgg16:16"),
    arg("--model", metavar="FILE.py:FUNCTION", help=_MODEL),
    arg(
        "--accumulate",
        type=int,
        default=1,
        help="of a model: losses in an iteration [1]",
    ),
    flag(
        "--predict",
        "of a campaign: calibrate its labs, write down what models say; no runs",
    ),
    *_SESSION,
)
def measure(arguments: argparse.Namespace) -> None:
    if arguments.model or arguments.accumulate != 1:
        return _measured_model(arguments)
    networks = arguments.networks.split(",") if arguments.networks else ()
    chosen = {"networks": networks, "predict": arguments.predict}
    _measured(arguments, arguments.what, profile=arguments.profile, **chosen)


def _measured_model(arguments: argparse.Namespace) -> None:
    """Measure the layers of a user's own model. Raises UserError for what does not go with that."""
    others = ("networks", "predict", "dry_run", "pack", "ignore_load")
    if not arguments.model or arguments.what != "layers" or arguments.accumulate < 1:
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


@command(
    "record all that this machine can show: ddlkit measure cpu, gpu or smoke",
    arg("--suite", choices=("gpu", "cpu"), required=True, help="on which device"),
    arg(
        "--profile",
        choices=("standard", "smoke"),
        default="standard",
        help="how much [standard]",
    ),
    flag(
        "--preflight", "measure nothing: check in half a minute that all it needs works"
    ),
    *_SESSION,
)
def record(arguments: argparse.Namespace) -> int | None:
    device = "cuda" if arguments.suite == "gpu" else "cpu"
    if arguments.preflight:
        from workbook.record.preflight import preflight

        return preflight(device)
    name = arguments.suite if arguments.profile == "standard" else arguments.profile
    _measured(arguments, name, device=device)
    return None


@command(
    "pack recorded tables: one file of each kind, each table's own hash kept and verified",
    arg(
        "folder", type=Path, nargs="?", help="of recorded tables [all of data/recorded]"
    ),
)
def pack(arguments: argparse.Namespace) -> None:
    from ddlkit import store
    from ddlkit.measure.session.engine import with_tables
    from ddlkit.store.tables import pack as pack_tables

    folder = arguments.folder or Path("data/recorded")
    if not folder.is_dir():
        raise UserError(f"{folder}: no such directory")
    for directory in with_tables(folder):
        with store.lock(directory / ".lock"):
            pack_tables(directory)
    print(folder)


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
