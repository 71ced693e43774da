"""What is to be measured, read from a file and checked: suites of points, and campaigns, grids of cases.

No torch here. Every mistake is a UserError in one line that names file and key.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ddlkit.core.case import AXES, Case
from ddlkit.core.errors import UserError, shown
from ddlkit.core.units import parse_bits_per_s, parse_bytes, parse_seconds
from ddlkit.model.calibration import POOLED
from ddlkit.model.predictor import planners
from ddlkit.model.rings import COSTS, LAW
from ddlkit.run.lab.conditions import (
    CONGESTION,
    ENGINES,
    Conditions,
    parse_background,
    parse_share,
)
from ddlkit.run.lab.network import LabShape
from ddlkit.store import files
from ddlkit.store.files import parse_json, parse_yaml

SUITES = Path(__file__).parent / "suites"
DEVICES = ("cpu", "cuda")
CALIBRATIONS = ("quick", "dense", "medium", "full")
SELECTIONS = ("recorded",)
# Sessions of a lab's calibration: one before its replays and one after them, or both before.
CALIBRATED = ("around", "before")
DEFAULT_BATCH = 4
# Compute takes as long as one message of everything, at each number of workers.
BALANCED = "balanced"
# Compute is not stretched by what the lab's messages take.
NATURAL = "natural"
Check = Callable[[Any], Any]


# -- values ------------------------------------------------------------------------------------


MOST = 10**12
"""Of what is counted: bytes, seconds of all cases, samples of a batch, seeds, elements."""
MOST_ITERATIONS = 20_000
"""Of a campaign: each takes a tenth of a second at least, most of them seconds; the largest here asks for a
thousand. More are a slip in a grid, which is the product of its lists."""


def whole(least: int) -> Callable[[Any], int]:
    """A check for a whole number, at least so large and at most MOST."""

    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST:
            raise ValueError(f"must be a whole number, at least {least} and at most {MOST}")
        return value

    return check


count = whole(1)


def changes(value: Any) -> str:
    """What changes of an emulated link in each iteration, as ``"0s:rate=250mbit;0.3s:loss=1%"``."""
    if not isinstance(value, str):
        raise ValueError("must be changes, as 0s:rate=250mbit;0.3s:loss=1%")
    if value:
        raise ValueError("must be empty: links no longer change, have a lab of each kind")
    return value


def number(low: float, high: float) -> Check:
    """A check for a number from ``low`` to ``high``, both included."""

    def check(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError("must be a number")
        if not low <= value <= high:
            raise ValueError(f"must lie between {low:g} and {high:g}")
        return float(value)

    return check


def truth(value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def one_of(names: Sequence[str]) -> Check:
    """A check for one of these words."""

    def check(value: Any) -> str:
        if value not in names:
            raise ValueError(f"must be {' or '.join(names)}")
        return str(value)

    return check


def network(value: Any) -> tuple[str, int]:
    """Name and batch size of a network as a file has it, the batch size being optional.

    >>> network("resnet50:8"), network("resnet50")
    (('resnet50', 8), ('resnet50', 4))
    """
    name, separator, batch = str(value).partition(":")
    if not name or (separator and not re.fullmatch("[0-9]{1,9}", batch)):
        raise ValueError("must be a network, with its batch size as in resnet50:4 or without")
    return name, count(int(batch or DEFAULT_BATCH))


def plan(value: Any) -> str:
    """What a planner is called by, as ``"buffer:4MB"``."""
    if not isinstance(value, str) or value.partition(":")[0] not in planners():
        raise ValueError(f"must be a plan: {', '.join(planners())}")
    return value


def rate(value: Any) -> float:
    """Bits per second of ``"1gbit"``."""
    found: float = _parsed_by(parse_bits_per_s, "a rate with its unit, as 1gbit")(value)
    return found


def seconds(value: Any) -> float:
    """Seconds of ``"2ms"``."""
    found: float = _parsed_by(parse_seconds, "a time with its unit, as 2ms")(value)
    return found


def _parsed_by(parse: Callable[[str], Any], what: str) -> Check:
    """A check for a text that ``parse`` reads."""

    def check(value: Any) -> Any:
        if not isinstance(value, str):
            raise ValueError(f"must be {what}")
        return parse(value)

    return check


def sizes(value: Any) -> tuple[int, ...]:
    """Bytes of ``"4KiB"``, of ``"1KiB..64MiB"`` (each size twice the one before), or of a list of such.

    >>> sizes("1KiB..4KiB")
    (1024, 2048, 4096)
    """
    if isinstance(value, (list, tuple)):
        return tuple(size for one in value for size in sizes(one))
    if isinstance(value, int):
        return (count(value),)
    if not isinstance(value, str):
        raise ValueError("must be a size as 4KiB, or a range of doubling sizes as 1KiB..64MiB")
    first, _, last = value.partition("..")
    low, high = parse_bytes(first), parse_bytes(last or first)
    if not 1 <= low <= high:
        raise ValueError("must be at least a byte, and rise from the first size to the last")
    return tuple(low << power for power in range(64) if low << power <= high)


def _compute_s(value: Any) -> float | None:
    if isinstance(value, str) and value != BALANCED:
        raise ValueError(f"must be seconds, or {BALANCED}")
    return None if value == BALANCED else number(1e-3, 1e3)(value)


def _startup_s(value: Any) -> float | None:
    return None if value == NATURAL else seconds(value)


# -- keys --------------------------------------------------------------------------------------


class Key(NamedTuple):
    """What may stand at a key of a file.

    check : turns a value into what is meant, or raises ValueError or UserError
    default : what is checked where nothing stands; without one, the key must be there
    many : whether a list of values may stand there: the result is then a list
    """

    check: Check
    default: Any = ...
    many: bool = False

    def read(self, given: Any, where: str) -> Any:
        """What is meant by what stands there. Raises UserError where it is wrong."""
        if given is ...:
            more = " or a list of them" if self.many else ""
            raise UserError(f"{where}: missing: give one value{more}")
        if not self.many:
            return checked(given, self.check, where)
        listed = given if isinstance(given, (list, tuple)) else [given]
        if not listed and self.default != []:
            raise UserError(f"{where}: an empty list: give at least one value")
        return [checked(one, self.check, where) for one in listed]


def read_keys(
    described: Mapping[Any, Any],
    keys: Mapping[str, Key],
    where: str,
    also: Collection[str] = (),
) -> dict[str, Any]:
    """Every key of ``keys`` with its checked value.

    Raises UserError for a wrong one, and for one that is unknown, with a hint at those of ``also``, too.
    """
    for name in described:
        if name not in keys:
            known = ", ".join(sorted({*keys, *also}))
            raise UserError(f"{where}: {name}: unknown key: use {known}")
    return {
        name: key.read(described.get(name, key.default), f"{where}: {name}")
        for name, key in keys.items()
    }


def checked(value: Any, check: Check, where: str) -> Any:
    """What ``check`` makes of the value; what it raises, with where it stands."""
    try:
        return check(value)
    except (ValueError, UserError) as error:
        raise UserError(f"{where}: {shown(value)}: {error}") from None


def _field(check: Check, default: Any = ..., *, many: bool = False) -> Any:
    """A field of a dataclass that a file gives, with the key that it is read by."""
    return field(metadata={"key": Key(check, default, many)})


def _keys_of(described: type) -> dict[str, Key]:
    """The keys of a dataclass that a file gives."""
    return {one.name: one.metadata["key"] for one in fields(described) if one.metadata}


# -- files -------------------------------------------------------------------------------------


def _description(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict) or "measure" not in value:
        raise ValueError('must be a mapping with the key "measure"')
    return value


@dataclass(frozen=True)
class Suite:
    """Points of a machine, in order of value: what comes first is there when time runs out.

    device : "cpu" or "cuda"; "" for a GPU where there is one
    isolate : whether points run in a child process
    out : default directory in build, or "recorded": one of this machine's in data/recorded
    opening, points, closing : descriptions of points, as `ddlkit.run.sessions.suites` reads them
    """

    file: Path
    about: str = _field(str, "")
    device: str = _field(one_of(("", *DEVICES)), "")
    isolate: bool = _field(truth, False)
    out: str = _field(str, "measured")
    opening: Sequence[Mapping[str, Any]] = _field(_description, [], many=True)
    points: Sequence[Mapping[str, Any]] = _field(_description, many=True)
    closing: Sequence[Mapping[str, Any]] = _field(_description, [], many=True)


class CaseRequest(NamedTuple):
    """A case whose lab has not been calibrated yet, so that its link, its plan and its dilation are open.

    case : as far as it is known; its ``plan`` is what a planner is called by
    compute_s : of an iteration; None: as long as communication
    startup_s : what a sparse message takes at least where ``compute_s`` is computed: the lab, where it takes
        longer, computes longer in proportion. None: ``compute_s`` is that of the lab
    """

    case: Case
    compute_s: float | None
    startup_s: float | None = None


class Repeats(NamedTuple):
    """Cases of a campaign that are replayed more often than all: enough to tell what a case repeats to."""

    cases: int
    rounds: int


def repeats(value: Any) -> Repeats:
    """How many cases, over all labs, get how many rounds; none for an empty mapping.

    >>> repeats({"cases": 20, "rounds": 5})
    Repeats(cases=20, rounds=5)
    """
    if value == {}:
        return Repeats(0, 0)
    if not isinstance(value, dict) or set(value) != set(Repeats._fields):
        raise ValueError("must be a mapping as {cases: 20, rounds: 5}")
    return Repeats(**{name: count(given) for name, given in value.items()})


@dataclass(frozen=True)
class Campaign:
    """What is asked, case by case.

    labs : requests by lab, in the file's order
    rounds : repeats of every case
    repeat : some cases that get more rounds
    calibrated : one of CALIBRATED: when, that is whether predictions can wait for all of it
    cost : one of COSTS: what a message costs over emulated links; a table over all others
    drift : POOLED: all labs together tell how far a run may lie from the calibration
    calibration : one of CALIBRATIONS: how long labs are calibrated, and networks measured that were not yet
    selection : one of SELECTIONS: how selection passes in a replay of sparse cases
    """

    file: Path
    labs: Mapping[LabShape, tuple[CaseRequest, ...]]
    rounds: int = _field(count, 2)
    calibration: str = _field(one_of(CALIBRATIONS), "full")
    selection: str = _field(one_of(SELECTIONS), "recorded")
    repeat: Repeats = _field(repeats, {})
    calibrated: str = _field(one_of(CALIBRATED), "around")
    cost: str = _field(one_of(COSTS), LAW)
    drift: str = _field(one_of((POOLED,)), POOLED)

    @property
    def repeated(self) -> dict[LabShape, int]:
        """How many cases of each lab get the rounds of ``repeat``: in proportion to what is asked of it."""
        sizes = [len(requests) for requests in self.labs.values()]
        ends = [self.repeat.cases * sum(sizes[: k + 1]) // sum(sizes) for k in range(len(sizes))]
        return {
            lab: end - start for lab, start, end in zip(self.labs, [0, *ends], ends, strict=False)
        }

    @property
    def folder(self) -> str:
        """The directory's name in which its tables lie, "campaign-osf" for campaign_osf.yml."""
        words = self.file.stem.lower().replace("_", "-").removeprefix("campaign").strip("-")
        return "-".join(["campaign", *words.split()])


def read(name: str | Path) -> Suite | Campaign:
    """The suite or campaign that a YAML or JSON file describes, or the suite of that name.

    Raises UserError for a wrong file, and for a name that is neither a file nor a suite.
    """
    file = Path(name)
    suites = {path.stem: path for path in SUITES.glob("*.json")}
    if str(name) in suites:
        file = suites[str(name)]
    elif not file.suffix:
        known = ", ".join(sorted(suites))
        raise UserError(f"{name}: no such suite: use {known}, or a file .yml or .json")
    described = _parsed(file)
    if "points" in described:
        return Suite(file, **read_keys(described, _keys_of(Suite), str(file)))
    return _campaign(file, described)


def read_campaign(file: Path) -> Campaign:
    """The campaign in ``file``. Raises UserError if there is none."""
    found = read(file)
    if isinstance(found, Suite):
        raise UserError(f"{file}: is a suite of points, not a campaign: it has no grids")
    return found


def _parsed(file: Path) -> dict[str, Any]:
    kind = "JSON" if file.suffix == ".json" else "YAML"
    text = files.read_text(file)
    try:
        found = parse_json(text) if kind == "JSON" else parse_yaml(text)
    except ImportError:
        raise UserError(
            f"{file}: reading YAML needs PyYAML: install it, or write the file as JSON (.json)"
        ) from None
    except ValueError as error:
        raise UserError(f"{file}: is not {kind}: {error}") from None
    if not isinstance(found, dict):
        raise UserError(
            f"{file}: must be a mapping with a list of grids: see examples/campaign.yml"
        )
    return found


# -- campaigns ---------------------------------------------------------------------------------


def _axis_key(name: str) -> Key:
    """What may stand for a field of Case: by its default's type, and the range declared beside it."""
    default = getattr(Case, name)
    low, high = AXES[name].low, AXES[name].high
    by_type = {float: number(low, high), bool: truth, int: whole(int(low)), str: changes}
    return Key(by_type[type(default)], default, many=True)


_REQUEST = {
    "networks": Key(network, many=True),
    "plans": Key(plan, many=True),
    "compute_s": Key(_compute_s, BALANCED, many=True),
    "startups": Key(_startup_s, NATURAL, many=True),
    **{axis.key: _axis_key(name) for name, axis in AXES.items()},
}
# Of emulated links alone, in the order of _FIELDS of their conditions.
_EMULATED = {
    "delays": Key(seconds, "0s", many=True),
    "jitters": Key(seconds, "0s", many=True),
    "losses": Key(_parsed_by(parse_share, "a share, as 0.1%"), "0%", many=True),
    "backgrounds": Key(_parsed_by(parse_background, "a load, as 40%"), "0%", many=True),
    "congestions": Key(one_of(CONGESTION), CONGESTION[0], many=True),
}
_FIELDS = ("delay_s", "jitter_s", "loss", "background", "congestion")
_GRID = {
    "workers": Key(count, many=True),
    "rates": Key(rate, many=True),
    "ranks_per_node": Key(count, 1, many=True),
    "intra_rates": Key(rate, [], many=True),
    "engines": Key(one_of(ENGINES), ENGINES[0], many=True),
    **_EMULATED,
    **_REQUEST,
}


def _campaign(file: Path, described: dict[str, Any]) -> Campaign:
    """A campaign. Top-level keys: ``rounds``, ``calibration``, ``selection``, ``repeat``, and ``grids``, a
    list.

    Each grid is the product of its lists, which are those of _GRID. A grid's key that stands at the top
    level holds for all grids that do not have it.
    """
    shared = {key: value for key, value in described.items() if key in _GRID}
    rest = {key: value for key, value in described.items() if key not in {*_GRID, "grids"}}
    single = read_keys(rest, _keys_of(Campaign), str(file), also={*_GRID, "grids"})
    grids = described.get("grids", [{}])
    if not isinstance(grids, list) or not grids or not all(isinstance(g, dict) for g in grids):
        raise UserError(f"{file}: grids: must be a list of mappings, at least one")
    labs: dict[LabShape, dict[CaseRequest, None]] = {}
    iterations = 0
    for position, grid in enumerate(grids):
        where = f"{file}: grids[{position}]"
        values = read_keys({**shared, **grid}, _GRID, where)
        cases = math.prod(len(values[key]) or 1 for key in _GRID)
        iterations += cases * max(single["rounds"], single["repeat"].rounds)
        if iterations > MOST_ITERATIONS:
            raise UserError(
                f"{where}: {cases} cases, the product of its lists: {iterations} iterations with their "
                f"rounds, at most {MOST_ITERATIONS} of all grids: shorten a list, or ask for fewer rounds"
            )
        for shape in _shapes(values, where):
            labs.setdefault(shape, {}).update(dict.fromkeys(_requests(values, where)))
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", file.stem):
        raise UserError(
            f"{file}: the file's name names the campaign: use letters, digits and dashes"
        )
    return Campaign(file, labs={lab: tuple(asked) for lab, asked in labs.items()}, **single)


def _shapes(values: Mapping[str, list[Any]], where: str) -> list[LabShape]:
    """Every lab of a grid, in the order of its lists."""
    found: list[LabShape] = []
    for workers, rate_bits_per_s, per_node, how in itertools.product(
        values["workers"], values["rates"], values["ranks_per_node"], _conditions(values, where)
    ):
        intra_rates = values["intra_rates"] if per_node > 1 else [0.0]
        if not intra_rates:
            raise UserError(f"{where}: intra_rates: missing: nodes of {per_node} ranks need one")
        for intra_rate in intra_rates:
            shape = partial(_shape, rate_bits_per_s, per_node, intra_rate, how)
            found.append(checked(workers, shape, f"{where}: workers"))
    return found


def _conditions(values: Mapping[str, list[Any]], where: str) -> list[Conditions | None]:
    """Every kind of link of a grid; None for those of tbf, of which nothing but a rate can be asked."""
    found: list[Conditions | None] = []
    for engine in values["engines"]:
        if engine == "tbf":
            asked = [
                name for name, key in _EMULATED.items() if values[name] != key.read(key.default, "")
            ]
            if asked:
                raise UserError(f"{where}: {asked[0]}: only links of engines: emulated have these")
            found.append(None)
            continue
        for given in itertools.product(*(values[name] for name in _EMULATED)):
            try:
                found.append(Conditions(**dict(zip(_FIELDS, given, strict=True))))
            except UserError as error:
                raise UserError(f"{where}: {error}") from None
    return found


def _shape(
    rate_bits_per_s: float,
    per_node: int,
    intra_rate: float,
    conditions: Conditions | None,
    workers: int,
) -> LabShape:
    if workers < 2:
        raise ValueError("one worker alone sends nothing: use at least 2")
    return LabShape(workers, rate_bits_per_s, per_node, intra_rate, conditions)


def _requests(values: Mapping[str, list[Any]], where: str) -> list[CaseRequest]:
    """Every combination of what a grid asks of each of its labs."""
    if None in values["compute_s"] and any(values["startups"]):
        raise UserError(f"{where}: startups: give compute_s, too: what is computed beside one")
    found = []
    every = itertools.product(*(values[key] for key in _REQUEST))
    for (name, batch), spec, compute_s, startup_s, *axes in every:
        varied = dict(zip(AXES, axes, strict=True))
        collective = "all_gather" if varied["density"] < 1 else "all_reduce"
        case = Case("replay", name, "", batch, 0, "", 0.0, collective, spec, "", **varied)
        found.append(CaseRequest(case, compute_s, startup_s))
    return found
