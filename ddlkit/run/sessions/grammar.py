"""What is to be measured, as files say it: a list of points, each of a kind, with that kind's arguments.

A kind is a function that `kind` registers: its name stands under "measure", its arguments are the other keys
there, and their types say how these are checked. Campaigns are points, too. No torch here. Every mistake is
a UserError in one line that names file and key.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_type_hints

from ddlkit.core.errors import UserError, shown
from ddlkit.core.units import parse_bits_per_s, parse_bytes, parse_seconds
from ddlkit.model.predictor import planners
from ddlkit.store import files
from ddlkit.store.files import parse_json, parse_yaml

SUITES = Path(__file__).parent / "suites"
DEVICES = ("cpu", "cuda")
CAMPAIGN = "campaign"
DEFAULT_BATCH = 4
MOST = 10**12
"""Of what is counted: bytes, samples of a batch, seeds, elements."""
GONE = {
    "facts": "stamps say what the machine is",
    "efficiency": "peaks and layers are what it was made of",
    "throughput": "measure layers at several batches",
    "disk_copies": "measure input_alone, which reads cold files",
    "nccl_channels": "measure two_ranks_on_one_gpu",
    "copies_by_share": "measure training_by_share with empty: 1",
    "buckets_by_share": "measure training_by_share with plans",
    "echoes_in_lab": "measure collectives_in_lab at 1KiB",
    "planning_again": "measure replays under two plans",
    "sparse_training_in_lab": "measure a campaign with density",
    "calibrated": "predict first: that calibrates each lab twice before its runs",
    "cost": "what a message costs is by the law over emulated links, and by a table else",
    "drift": "how sessions drift is pooled over a campaign's labs",
    "grids": "write points, and measure: campaign above them, as in examples/campaign.yml",
    "repeat": "give a grid of its own more rounds",
    "selection": "recorded times of selecting are waited out",
    "file": "write the campaign's keys here",
    "in_flight": "what several at once take is predicted: ddlkit predict --in-flight",
    "changes": "links no longer change: have a lab of each kind",
    "straggler_spreads": "a straggler is as slow in every iteration: give stragglers",
    "algorithm": "the library's own is measured",
    "unsent": "measure with empty: 1",
    "pipelines": "measure input_alone, and predict by what-if --inputs",
    "selections_beside_backward": "measure selections",
}
"""Kinds and keys of earlier versions, and what to do instead."""

Check = Callable[[Any], Any]


# -- values ------------------------------------------------------------------------------------


def whole(least: int) -> Check:
    """Return a check for a whole number, at least so large and at most MOST."""

    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= MOST:
            raise ValueError(f"must be a whole number, at least {least} and at most {MOST}")
        return value

    return check


def number(low: float, high: float) -> Check:
    """Return a check for a number from ``low`` to ``high``, both included."""

    def check(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ValueError("must be a number")
        if not low <= value <= high:
            raise ValueError(f"must lie between {low:g} and {high:g}")
        return float(value)

    return check


def truth(value: Any) -> bool:
    """Return true or false, whichever it is. Raises ValueError for anything else."""
    if not isinstance(value, bool):
        raise ValueError("must be true or false")
    return value


def one_of(names: Sequence[str]) -> Check:
    """Return a check for one of these words."""

    def check(value: Any) -> str:
        if value not in names:
            replaced = f" ({GONE[value]})" if isinstance(value, str) and value in GONE else ""
            raise ValueError(f"must be {' or '.join(names)}{replaced}")
        return str(value)

    return check


def text_of(parse: Callable[[str], Any], what: str, *, as_written: bool = False) -> Check:
    """Return a check for a text that ``parse`` reads: what it says, or the text ``as_written``."""

    def check(value: Any) -> Any:
        if as_written and value == "":
            return value
        if not isinstance(value, str):
            raise ValueError(f"must be {what}")
        parsed = parse(value)
        return value if as_written else parsed

    return check


def mapping_of(make: Callable[..., Any]) -> Check:
    """Return a check for a mapping of the arguments of ``make``."""

    def check(value: Any) -> Any:
        try:
            return make(**value)
        except TypeError as error:
            names = ", ".join(signature(make).parameters)
            raise ValueError(f"must be a mapping of {names}") from error

    return check


def network(value: Any) -> tuple[str, int]:
    """Return name and batch size of a network, the batch size being optional.

    >>> network("resnet50:8"), network("resnet50")
    (('resnet50', 8), ('resnet50', 4))
    """
    name, separator, batch = str(value).partition(":")
    if not name or (separator and not re.fullmatch("[0-9]{1,9}", batch)):
        raise ValueError("must be a network, with its batch size as in resnet50:4 or without")
    return name, whole(1)(int(batch or DEFAULT_BATCH))


def plan(value: Any) -> str:
    """Return what a planner is called by, as ``"buffer:4MB"``. Raises ValueError for none."""
    if not isinstance(value, str) or value.partition(":")[0] not in planners():
        raise ValueError(f"must be a plan: {', '.join(planners())}")
    return value


def sizes(value: Any) -> tuple[int, ...]:
    """Return bytes of ``"4KiB"``, ``"1KiB..64MiB"`` (each twice the one before), or a list of such.

    >>> sizes("1KiB..4KiB")
    (1024, 2048, 4096)
    """
    if isinstance(value, (list, tuple)):
        return tuple(size for each in value for size in sizes(each))
    if isinstance(value, int):
        return (whole(1)(value),)
    if not isinstance(value, str):
        raise ValueError("must be a size as 4KiB, or a range of doubling sizes as 1KiB..64MiB")
    first, _, last = value.partition("..")
    low, high = parse_bytes(first), parse_bytes(last or first)
    if not 1 <= low <= high:
        raise ValueError("must be at least a byte, and rise from the first size to the last")
    return tuple(low << power for power in range(64) if low << power <= high)


# -- keys --------------------------------------------------------------------------------------


class Key(NamedTuple):
    """What may stand at a key of a file.

    check : turns a value into what is meant, or raises ValueError or UserError
    default : what is meant where nothing stands; without one, the key must be there
    many : whether a list of values may stand there: the result is then a list
    """

    check: Check
    default: Any = ...
    many: bool = False

    def read(self, given: Any, where: str) -> Any:
        """Return what is meant by what stands there. Raises UserError where it is wrong."""
        if given is ...:
            if self.default is ...:
                more = " or a list of them" if self.many else ""
                raise UserError(f"{where}: missing: give one value{more}")
            return self.default
        if not self.many:
            return checked(given, self.check, where)
        listed = given if isinstance(given, (list, tuple)) else [given]
        if not listed and self.default not in ([], ()):
            raise UserError(f"{where}: an empty list: give at least one value")
        return [checked(each, self.check, where) for each in listed]


def checked(value: Any, check: Check, where: str) -> Any:
    """Return what ``check`` makes of the value. Raises UserError for what it raises, and where."""
    try:
        return check(value)
    except (ValueError, UserError) as error:
        raise UserError(f"{where}: {shown(value)}: {error}") from None


def read_keys(given: Mapping[Any, Any], keys: Mapping[str, Key], where: str) -> dict[str, Any]:
    """Return every key of ``keys`` with its checked value. Raises UserError for a wrong or unknown one."""
    for name in given:
        if name not in keys:
            advice = GONE.get(str(name)) or f"use {', '.join(sorted(keys))}"
            raise UserError(f"{where}: {name}: unknown key: {advice}")
    return {name: key.read(given.get(name, ...), f"{where}: {name}") for name, key in keys.items()}


# What an argument's type says of the key of its name.
RATE = text_of(parse_bits_per_s, "a rate with its unit, as 1gbit", as_written=True)
DELAY = text_of(parse_seconds, "a time with its unit, as 2ms", as_written=True)
Words = Annotated[Sequence[str], Key(str, many=True)]
Batched = Annotated[Sequence[tuple[str, int]], Key(network, many=True)]
Plans = Annotated[Sequence[str], Key(plan, many=True)]
Count = Annotated[int, Key(whole(0))]
Counts = Annotated[Sequence[int], Key(whole(1), many=True)]
Seeds = Annotated[Sequence[int], Key(whole(0), many=True)]
Sizes = Annotated[Sequence[int], Key(sizes)]
Rate = Annotated[str, Key(RATE)]
Rates = Annotated[Sequence[str], Key(RATE, many=True)]
Delays = Annotated[Sequence[str], Key(DELAY, many=True)]
_PLAIN = {int: Key(whole(1)), str: Key(str), bool: Key(truth)}


def keys_of(make: Callable[..., Any], skipped: int = 0) -> dict[str, Key]:
    """Return the keys that the arguments of ``make`` are, but for the first ``skipped``."""
    hints, keys = get_type_hints(make, include_extras=True), {}
    for name, parameter in [*signature(make).parameters.items()][skipped:]:
        annotated = getattr(hints[name], "__metadata__", None)
        key = annotated[0] if annotated else _PLAIN[hints[name]]
        default = ... if parameter.default is parameter.empty else parameter.default
        keys[name] = key._replace(default=default)
    return keys


class Kind(NamedTuple):
    """How points are made of what a file says.

    what : they belong to, as "layers"; lab : whether they need one
    keys : of the file; make : called with the place and them, or of campaigns with them alone
    """

    what: str
    lab: bool
    keys: Mapping[str, Key]
    make: Callable[..., Any]


KINDS: dict[str, Kind] = {}


def kind(what: str, *, lab: bool = False) -> Callable[[Any], Any]:
    """Return what registers a function as the kind of its name; after the place, its arguments are keys."""

    def register(make: Callable[..., Iterator[Any]]) -> Any:
        KINDS[make.__name__] = Kind(what, lab, keys_of(make, 1), make)
        return make

    return register


# -- files -------------------------------------------------------------------------------------


def _description(value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("must be a mapping")
    return value


Descriptions = Annotated[Sequence[Mapping[str, Any]], Key(_description, many=True)]


@dataclass(frozen=True)
class Suite:
    """Points, in order of value: what comes first is there when time runs out.

    device : "cpu" or "cuda"; "" for a GPU where there is one
    isolate : whether points run in a child process
    out : default directory in build, or "recorded": one of this machine's in data/recorded
    opening, points, closing : what a session measures before all others, descriptions, and after them
    """

    file: Path
    points: Descriptions
    opening: Descriptions = ()
    closing: Descriptions = ()
    about: str = ""
    device: Annotated[str, Key(one_of(("", *DEVICES)))] = ""
    isolate: bool = False
    out: str = ""

    @property
    def is_campaign(self) -> bool:
        """Whether campaigns are all that it holds."""
        return all(described.get("measure") == CAMPAIGN for described in self.points)

    @property
    def folder(self) -> str:
        """The directory's name in which its tables lie, "campaign-osf" for campaign_osf.yml."""
        words = self.file.stem.lower().replace("_", "-").removeprefix(CAMPAIGN).strip("-")
        return "-".join([CAMPAIGN, *words.split()])


def read(name: str | Path) -> Suite:
    """Return what a YAML or JSON file says, or the suite of that name.

    A key that is none of Suite's holds for all points that do not have it.

    Raises UserError for a wrong file, and for a name that is neither a file nor a suite.
    """
    suites, file = {path.stem: path for path in SUITES.glob("*.json")}, Path(name)
    if str(name) in suites:
        file = suites[str(name)]
    elif not file.suffix:
        names = ", ".join(sorted(suites))
        raise UserError(f"{name}: no such suite: use {names}, or a file .yml or .json")
    given, keys = _parsed(file), keys_of(Suite, 1)
    if "grids" in given or "points" not in given:
        old = "grids" if "grids" in given else "points"
        raise UserError(f"{file}: {old}: {'gone' if old in given else 'missing'}: {GONE['grids']}")
    shared = {key: value for key, value in given.items() if key not in keys}
    said = {key: value for key, value in given.items() if key in keys}
    suite = Suite(file, **read_keys(said, keys, str(file)))
    points = [{**shared, **described} for described in suite.points]
    suite = Suite(**{**vars(suite), "points": points})
    if suite.is_campaign and not re.fullmatch(r"[A-Za-z0-9_.-]+", file.stem):
        raise UserError(f"{file}: its name is the campaign's: use letters, digits and dashes")
    return suite


def _parsed(file: Path) -> dict[str, Any]:
    """Return the mapping that the file holds."""
    parse, language = (parse_json, "JSON") if file.suffix == ".json" else (parse_yaml, "YAML")
    text = files.read_text(file)
    try:
        given = parse(text)
    except ImportError:
        advice = "install it, or write the file as JSON (.json)"
        raise UserError(f"{file}: reading YAML needs PyYAML: {advice}") from None
    except ValueError as error:
        raise UserError(f"{file}: is not {language}: {error}") from None
    if not isinstance(given, dict):
        raise UserError(
            f"{file}: must be a mapping with a list of points: see examples/campaign.yml"
        )
    return dict(given)
