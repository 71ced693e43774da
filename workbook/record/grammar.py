"""What is to be measured, as files say it: points, each of a kind of `workbook.record.kinds`, with KEYS."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, NamedTuple

from ddlkit.core.collective import COLLECTIVES
from ddlkit.core.errors import UserError, shown
from ddlkit.core.plan import PLANNERS
from ddlkit.core.units import parse_bits_per_s, parse_bytes, parse_seconds
from ddlkit.lab import ENGINES, parse_share
from ddlkit.measure.named import network_of
from ddlkit.measure.session import Point, PointList, say
from ddlkit.store import files

SUITES = Path(__file__).parent / "suites"
PRECISIONS = ("fp32", "tf32", "bf16")
EXTENTS = ("quick", "dense", "full")  # how long a campaign calibrates its labs
CAMPAIGN = "campaign"  # the kind of point that is a grid of replays in labs
MOST = 10**12  # of what is counted: bytes, samples of a batch, seeds, elements

Check = Callable[[Any], Any]
"""Returns what is meant by what stands in a file. Raises ValueError or UserError for what cannot be."""


class Many(NamedTuple):
    """A value, or a list of values, each of which is checked; they come as a list."""

    check: Check


def rule(
    what: str, fits: Callable[[Any], bool], make: Check = lambda value: value
) -> Check:
    """Return a check for a value that fits, which gives what ``make`` makes of it."""

    def check(value: Any) -> Any:
        if not fits(value):
            raise ValueError(f"must be {what}")
        return make(value)

    return check


def whole(least: int) -> Check:
    """Return a check for a whole number, at least so large and at most MOST."""
    what = f"a whole number, at least {least} and at most {MOST}"
    return rule(what, lambda value: type(value) is int and least <= value <= MOST)


def number(low: float, high: float) -> Check:
    """Return a check for a number from ``low`` to ``high``, both included."""
    what = f"a number from {low:g} to {high:g}"
    return rule(
        what, lambda value: type(value) in (int, float) and low <= value <= high
    )


def text(what: str, parse: Check) -> Check:
    """Return a check for a text, which gives what it is parsed to."""
    return rule(what, lambda value: isinstance(value, str), parse)


def one_of(names: Sequence[str]) -> Check:
    """Return a check for one of these words."""
    return rule(" or ".join(names), lambda value: value in names)


def budget(value: Any) -> Any:
    """Return how long to measure, of a mapping: a `Budget`. Raises ValueError or UserError."""
    from ddlkit.jobs.clock import Budget  # which needs torch

    try:
        return Budget(**value)
    except TypeError:
        keys = ", ".join(signature(Budget).parameters)
        raise ValueError(f"must be a mapping of {keys}") from None


def _checked(value: Any, check: Check | Many) -> Any:
    """Return what a value means. Raises UserError that names it."""
    if isinstance(check, Many):
        listed = value if isinstance(value, (list, tuple)) else [value]
        if not listed:
            raise UserError("[]: an empty list: give at least one value")
        return [_checked(each, check.check) for each in listed]
    try:
        return check(value)
    except (ValueError, UserError) as error:
        raise UserError(f"{shown(value)}: {error}") from None


def sizes(value: Any) -> tuple[int, ...]:
    """Return bytes of ``"4KiB"``, ``"1KiB..64MiB"`` (each twice the one before), or a list of such.

    >>> sizes("1KiB..4KiB")
    (1024, 2048, 4096)
    """
    if isinstance(value, list):
        return tuple(size for each in value for size in sizes(each))
    if not isinstance(value, str):
        raise ValueError(
            "must be a size as 4KiB, or a range of doubling sizes as 1KiB..64MiB"
        )
    first, _, last = value.partition("..")
    low, high = parse_bytes(first), parse_bytes(last or first)
    if not 1 <= low <= high:
        raise ValueError(
            "must be at least a byte, and rise from the first size to the last"
        )
    return tuple(low << power for power in range(64) if low << power <= high)


_count, _flag = whole(1), rule("true or false", lambda value: isinstance(value, bool))
_rates = Many(text("a rate with its unit, as 1gbit", parse_bits_per_s))
_times = Many(text("a time with its unit, as 2ms", parse_seconds))
_shares = Many(text("a share, as 0.1%", parse_share))
_plan = rule(
    f"a plan: {', '.join(PLANNERS)}",
    lambda value: isinstance(value, str) and value.partition(":")[0] in PLANNERS,
)


KEYS: dict[str, Check | Many] = {
    # of a suite
    "points": Many(rule("a mapping", lambda value: isinstance(value, dict))),
    **dict.fromkeys(("about", "out", "name", "link"), str),
    "device": one_of(("", "cpu", "cuda")),
    "moment": one_of(
        ("start", "end")
    ),  # of drift: before all that a session measures, or after
    # of what is measured, and how
    **dict.fromkeys(("isolate", "by_name", "brief", "copies", "predict"), _flag),
    **dict.fromkeys(
        ("batch", "side", "width", "height", "messages", "tries", "epochs"), _count
    ),
    **dict.fromkeys(("repeats", "iterations", "rounds", "accumulate"), _count),
    **dict.fromkeys(("training_images", "held_out_images"), _count),
    **dict.fromkeys(("ranks", "workers", "sides"), Many(_count)),
    **dict.fromkeys(("size", "sizes"), sizes),
    "networks": Many(network_of),
    "seeds": Many(whole(0)),
    "plans": Many(_plan),
    "precisions": Many(one_of(PRECISIONS)),
    "collectives": Many(one_of(tuple(COLLECTIVES))),
    "budget": budget,
    # of labs, and of the cases of a campaign
    **dict.fromkeys(("rate", "rates"), _rates),
    **dict.fromkeys(("delay", "delays"), _times),
    "apart": text("a time with its unit, as 2ms", parse_seconds),
    "losses": _shares,
    "calibration": one_of(EXTENTS),
    "engines": Many(one_of(ENGINES)),
    "density": Many(number(1e-6, 1)),
    "stragglers": Many(number(1, 100)),
}


def read_keys(
    given: Mapping[Any, Any], make: Callable[..., Any], where: str, skip: int = 0
) -> Any:
    """Return the checked arguments of ``make`` but for the first ``skip``. Raises UserError."""
    keys, read = dict([*signature(make).parameters.items()][skip:]), {}
    for name in given:
        if name not in keys:
            raise UserError(
                f"{where}: {name}: unknown key: use {', '.join(sorted(keys))}"
            )
    for name, key in keys.items():
        if name in given:
            try:
                read[name] = _checked(given[name], KEYS[name])
            except UserError as error:
                raise UserError(f"{where}: {name}: {error}") from None
        elif key.default is Parameter.empty:
            raise UserError(f"{where}: {name}: missing: give a value")
    return read


@dataclass(frozen=True)
class Suite:
    """Points, most valuable first. out : directory in build, or "recorded": one in data/recorded"""

    file: Path
    points: Sequence[Mapping[str, Any]]
    about: str = ""
    device: str = ""
    isolate: bool = False
    out: str = ""

    @property
    def is_campaign(self) -> bool:
        """Return whether campaigns are all that it holds."""
        return all(described.get("measure") == CAMPAIGN for described in self.points)

    @property
    def folder(self) -> str:
        """Return the name of the directory of its tables, "campaign-osf" for campaign_osf.yml."""
        words = self.file.stem.replace("_", "-")
        return words if words.startswith(CAMPAIGN) else f"{CAMPAIGN}-{words}"


def read(name: str | Path) -> Suite:
    """Return what a YAML or JSON file says, or the suite of that name. Raises UserError where it is wrong.

    A key that is none of Suite's holds for all points that do not have it.
    """
    suites, file = {path.stem: path for path in SUITES.glob("*.json")}, Path(name)
    if str(name) in suites:
        file = suites[str(name)]
    elif not file.suffix:
        advice = f"use {', '.join(sorted(suites))}, or a file .yml or .json"
        raise UserError(f"{name}: no such suite: {advice}")
    given, keys = _parsed(file), signature(Suite).parameters
    shared = {key: value for key, value in given.items() if key not in keys}
    stated = {key: value for key, value in given.items() if key in keys}
    stated = read_keys(stated, Suite, str(file), 1)
    stated["points"] = [{**shared, **described} for described in stated["points"]]
    return Suite(file, **stated)


def _parsed(file: Path) -> dict[str, Any]:
    """Return the mapping that the file holds."""
    is_json, text = file.suffix == ".json", files.read_text(file)
    try:
        given = files.parse_json(text) if is_json else files.parse_yaml(text)
    except ImportError:
        advice = "install it, or write the file as JSON (.json)"
        raise UserError(f"{file}: reading YAML needs PyYAML: {advice}") from None
    except ValueError as error:
        raise UserError(
            f"{file}: is not {'JSON' if is_json else 'YAML'}: {error}"
        ) from None
    if not isinstance(given, dict) or "points" not in given:
        raise UserError(f"{file}: must be a mapping with points")
    return given


class Described(NamedTuple):
    """What may be said of any points. device : "" for every one; by_name : whether "all" lacks them"""

    measure: str
    about: str = ""
    device: str = ""
    by_name: bool = False


def points(
    *,
    out: Path,
    session: int,
    name: str,
    part: str = "all",
    device: str = "",
    networks: Sequence[str] = (),
    predict: bool = False,
) -> PointList:
    """Return the points of the suite of that name, or in that file.

    part : what of it, "all" or what points belong to, as "layers"; device : in place of the suite's own
    networks : in place of its own, of layers only; predict : the cases of campaigns, and replay none

    Raises UserError for a wrong file or network, and when a GPU is wanted and torch sees none.
    """
    import torch

    from ddlkit.lab import network as lab
    from ddlkit.measure.parts import Here
    from workbook.record.campaigns import Grid, campaign, labs_of

    suite = read(name)
    if networks and part != "layers":
        raise UserError(f"networks can be chosen for layers only, not for {part}")
    device = device or suite.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if device == "cuda" and not torch.cuda.is_available():
        advice = "install a CUDA build that fits the driver, or give --device cpu"
        raise UserError(f"torch {torch.__version__} sees no GPU: {advice}")
    made: list[Point] = []
    grids: list[Grid] = []
    for where, what, make, arguments in _wanted(suite, part, device, networks):
        try:
            if make is Grid:
                grids.append(Grid(**arguments))
            elif any(arguments.get("rate", ())) and (reason := lab.available()):
                say(f"no lab, so no {what} there: {reason}")
            else:
                made += make(Here(device, session, out), **arguments)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None
    made = with_predictions(made, out, predict)
    if predict and not (
        suite.is_campaign or any(point.what == "predicted" for point in made)
    ):
        raise UserError(
            f"--predict: {suite.file} is no campaign: only its cases are predicted"
        )
    if grids:
        made += campaign(labs_of(grids, out, str(suite.file), device), predict)
    body = {point.key: point for point in made if point.what != "drift"}
    drifts = {
        point.name.rpartition("-")[2]: [point]
        for point in made
        if point.what == "drift"
    }
    return PointList([*body.values()], drifts.get("start", []), drifts.get("end", []))


def with_predictions(points: Sequence[Point], out: Path, predict: bool) -> list[Point]:
    """Return the points with a table of what models say before the first that asks; to predict, none such."""
    from workbook.record.trained import predicted_trainings

    asking = [point for point in points if point.predicted]
    if not asking:
        return [*points]
    measure = partial(predicted_trainings, [point.predicted for point in asking], out)
    table = Point("predicted", "cases", measure, 1.0 * len(asking))
    first = points.index(asking[0])
    return [
        *points[:first],
        table,
        *(p for p in points[first:] if not (predict and p.predicted)),
    ]


def _wanted(
    suite: Suite, part: str, device: str, networks: Sequence[str]
) -> Iterator[tuple[str, str, Callable[..., Any], dict[str, Any]]]:
    """Yield where, KINDS' two and checked arguments of what the suite has of that part on the device.

    networks : in place of those of layers by one rank, and nothing else then
    """
    from workbook.record.kinds import KINDS

    KEYS["measure"] = one_of(list(KINDS))
    for position, described in enumerate(suite.points):
        where = f"{suite.file}: points[{position}]"
        common = {
            key: value for key, value in described.items() if key in Described._fields
        }
        of_any = Described(**read_keys(common, Described, where))
        what, make = KINDS[of_any.measure]
        special = {key: value for key, value in described.items() if key not in common}
        arguments = read_keys(special, make, where, int(what != CAMPAIGN))
        wanted = not of_any.by_name if part == "all" else part == what
        if networks:
            wanted &= arguments.get("ranks", [1]) == [1]
            arguments["networks"] = [_checked(each, network_of) for each in networks]
        if wanted and of_any.device in ("", device):
            yield where, what, make, arguments
