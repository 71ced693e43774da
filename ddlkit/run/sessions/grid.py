"""What a campaign asks for: a file of grids, read and checked, as wishes grouped by lab. No torch here."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddlkit.core.errors import UserError
from ddlkit.core.units import parse_bits_per_s
from ddlkit.model.planning import planners
from ddlkit.run.lab.network import LabShape

LENGTHS = ("quick", "full")
SELECTIONS = ("recorded", "real")
DEFAULT_BATCH = 4
BALANCED = (
    "balanced"  # compute takes as long as one message of everything, at each number of workers
)


@dataclass(frozen=True)
class Wish:
    """A Case whose lab has not been calibrated yet, so that its plan and its dilation are open."""

    network: str
    batch: int
    plan: str
    density: float
    straggler: float
    compute_s: float | None = None  # of an iteration in the lab; None: as long as communication
    negotiated: bool = False
    in_flight: int = 1


@dataclass(frozen=True)
class Campaign:
    """What is asked, case by case.

    rounds : repeats of every case
    calibration : one of LENGTHS: how long labs are calibrated, and networks profiled that were not yet
    selection : one of SELECTIONS: how selection passes in a replay of sparse cases
    labs : wishes by lab, in the file's order
    """

    file: Path
    rounds: int
    calibration: str
    selection: str
    labs: Mapping[LabShape, tuple[Wish, ...]]

    @property
    def name(self) -> str:
        """The file's, without what it ends on."""
        return self.file.stem


def read(file: Path) -> Campaign:
    """The campaign that a YAML (or JSON) file describes.

    Top-level keys: ``rounds``, ``calibration``, ``selection``, and ``grids``, a list. Each grid is the
    product of its lists: networks, workers, rates, ranks_per_node, intra_rates, plans, density,
    stragglers, compute_s, negotiated, in_flight. A grid's key that stands at the top level holds for all
    grids that do not have it.

    Raises UserError in one line that names file and key.
    """
    described = _parsed(file)
    _check_keys(described, {*_SINGLE, *_GRID, "grids"}, str(file))
    shared = {key: value for key, value in described.items() if key in _GRID}
    grids = described.get("grids", [{}])
    if not isinstance(grids, list) or not grids or not all(isinstance(g, dict) for g in grids):
        raise UserError(f"{file}: grids: must be a list of mappings, at least one")
    labs: dict[LabShape, dict[Wish, None]] = {}
    for number, grid in enumerate(grids):
        where = f"{file}: grids[{number}]"
        _check_keys(grid, set(_GRID), where)
        for setting, wish in _product({**shared, **grid}, where):
            labs.setdefault(setting, {})[wish] = None
    single = {
        key: _value(described.get(key, default), check, f"{file}: {key}")
        for key, (default, check) in _SINGLE.items()
    }
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", file.stem):
        raise UserError(
            f"{file}: the file's name names the campaign: use letters, digits and dashes"
        )
    return Campaign(file, labs={lab: tuple(wishes) for lab, wishes in labs.items()}, **single)


def _parsed(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not a text file"
        raise UserError(f"{file}: cannot be read: {reason}") from error
    try:
        if file.suffix == ".json":
            found = json.loads(text)
        else:
            try:
                import yaml
            except ImportError:
                raise UserError(
                    f"{file}: reading YAML needs PyYAML: install it, or write the file as JSON (.json)"
                ) from None
            try:
                found = yaml.safe_load(text)
            except yaml.YAMLError as error:
                mark = getattr(error, "problem_mark", None)
                line = f" at line {mark.line + 1}" if mark else ""
                problem = getattr(error, "problem", None) or "unreadable"
                raise UserError(f"{file}: is not YAML{line}: {problem}") from None
    except ValueError as error:
        raise UserError(f"{file}: is not JSON ({error})") from error
    if not isinstance(found, dict):
        raise UserError(
            f"{file}: must be a mapping with a list of grids: see examples/campaign.yml"
        )
    return found


def _check_keys(described: Mapping[Any, Any], known: set[str], where: str) -> None:
    for key in described:
        if key not in known:
            raise UserError(f"{where}: {key}: unknown key: use {', '.join(sorted(known))}")


# -- values ------------------------------------------------------------------------------------


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError("must be a whole number, at least 1")
    return value


def _number(low: float, high: float) -> Callable[[Any], float]:
    def check(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError("must be a number")
        if not low <= value <= high:
            raise ValueError(f"must lie between {low:g} and {high:g}")
        return float(value)

    return check


def _compute_s(value: Any) -> float | None:
    if isinstance(value, str) and value != BALANCED:
        raise ValueError(f"must be seconds, or {BALANCED}")
    return None if value == BALANCED else _number(1e-3, 1e3)(value)


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def _rate(value: Any) -> float:
    if not isinstance(value, str):
        raise ValueError("must be a rate with its unit, as 1gbit")
    return parse_bits_per_s(value)


def _plan(value: Any) -> str:
    if not isinstance(value, str) or value.partition(":")[0] not in planners():
        raise ValueError(f"must be a plan: {', '.join(planners())}")
    return value


def _network(value: Any) -> tuple[str, int]:
    name, separator, batch = str(value).partition(":")
    if not name or (separator and not batch.isdecimal()):
        raise ValueError("must be a network, with its batch size as in resnet50:4 or without")
    return name, int(batch or DEFAULT_BATCH)


def _one_of(names: Sequence[str]) -> Callable[[Any], str]:
    def check(value: Any) -> str:
        if value not in names:
            raise ValueError(f"must be {' or '.join(names)}")
        return str(value)

    return check


_MISSING = object()
_SINGLE: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "rounds": (2, _count),
    "calibration": ("full", _one_of(LENGTHS)),
    "selection": ("recorded", _one_of(SELECTIONS)),
}
_GRID: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "networks": (_MISSING, _network),
    "workers": (_MISSING, _count),
    "rates": (_MISSING, _rate),
    "ranks_per_node": (1, _count),
    "intra_rates": ([], _rate),
    "plans": (_MISSING, _plan),
    "density": (1.0, _number(1e-6, 1.0)),
    "stragglers": (1.0, _number(1.0, 100.0)),
    "compute_s": (BALANCED, _compute_s),
    "negotiated": (False, _truth),
    "in_flight": (1, _count),
}


_WISHED = ("networks", "plans", "density", "stragglers", "compute_s", "negotiated", "in_flight")
"""Keys of what a Wish holds, in its order."""


def _value(value: Any, check: Callable[[Any], Any], where: str) -> Any:
    try:
        return check(value)
    except (ValueError, UserError) as error:
        raise UserError(f"{where}: {value!r}: {error}") from None


def _product(grid: Mapping[str, Any], where: str) -> list[tuple[LabShape, Wish]]:
    """Every combination of a grid's lists, in their order."""
    values: dict[str, list[Any]] = {}
    for key, (default, check) in _GRID.items():
        given = grid.get(key, default)
        if given is _MISSING:
            raise UserError(f"{where}: {key}: missing: give one value or a list of them")
        listed = given if isinstance(given, list) else [given]
        if not listed and default != []:
            raise UserError(f"{where}: {key}: an empty list: give at least one value")
        values[key] = [_value(one, check, f"{where}: {key}") for one in listed]
    found = []
    labs = itertools.product(values["workers"], values["rates"], values["ranks_per_node"])
    for workers, rate, per_node in labs:
        intra_rates = values["intra_rates"] if per_node > 1 else [0.0]
        if not intra_rates:
            raise UserError(f"{where}: intra_rates: missing: nodes of {per_node} ranks need one")
        for intra_rate in intra_rates:
            shaped = functools.partial(_shape, rate, per_node, intra_rate)
            lab = _value(workers, shaped, f"{where}: workers")
            found += [
                (lab, Wish(network, batch, *rest))
                for (network, batch), *rest in itertools.product(*(values[key] for key in _WISHED))
            ]
    return found


def _shape(rate: float, per_node: int, intra_rate: float, workers: int) -> LabShape:
    if workers < 2:
        raise ValueError("one worker alone sends nothing: use at least 2")
    return LabShape(workers, rate, per_node, intra_rate)
