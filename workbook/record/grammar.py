"""Files that say what is to be measured: points, each of a kind of `workbook.record.kinds`, with `KEYS`."""

from __future__ import annotations

import difflib
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, NamedTuple

from ddlkit.core.collective import COLLECTIVES
from ddlkit.core.errors import UserError, shown
from ddlkit.core.plan import PLANNERS, check_text_of_plan
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
"""Takes a value of a file and returns its meaning. Raises ValueError or UserError for a wrong value."""


class Many(NamedTuple):
    """A check for a value or a list of values. The meaning is a list."""

    check: Check


def rule(
    requirement: str, fits: Callable[[Any], bool], make: Check = lambda value: value
) -> Check:
    """Return a check that accepts the values of a file that fit, and returns their meaning.

    Parameters
    ----------
    requirement : str
        What a value must be, as the error says it after "must be".
    fits : callable
        Takes a value and returns whether it fits.
    make : callable, optional
        Takes a value that fits and returns its meaning, such as the bytes of "4KiB". By default the
        meaning is the value itself.

    Returns
    -------
    callable
        The check. It raises ValueError for a value that does not fit.
    """

    def check(value: Any) -> Any:
        if not fits(value):
            raise ValueError(f"must be {requirement}")
        return make(value)

    return check


def whole(least: int) -> Check:
    """Return a check for a whole number from ``least`` to `MOST`."""

    def check(value: Any) -> int:
        # A bool is an int, but no number in a file.
        if type(value) is not int or value < least:
            raise ValueError(f"must be a whole number, {least} or more")
        # The limit is so high that only a slip exceeds it. So no other error names it.
        if value > MOST:
            raise ValueError(f"must be at most {MOST:,}")
        return value

    return check


def number(low: float, high: float) -> Check:
    """Return a check for a number, whole or not, from ``low`` to ``high``, both included."""

    def fits(value: Any) -> bool:
        # A bool is an int, but no number in a file.
        return type(value) in (int, float) and low <= value <= high

    return rule(f"a number from {low:g} to {high:g}", fits)


def text(requirement: str, parse: Check) -> Check:
    """Return a check for a text, whose meaning is what ``parse`` makes of it."""
    return rule(requirement, lambda value: isinstance(value, str), parse)


def one_of(names: Sequence[str]) -> Check:
    """Return a check for one of these words. The error suggests a word that is spelled alike."""
    # An error need not list the empty word, which means the same as a key that is not given.
    listed = " or ".join(name for name in names if name)

    def check(value: Any) -> Any:
        if value in names:
            return value
        # The list has the most similar word, if one is similar enough to be a misspelling.
        similar = difflib.get_close_matches(str(value), names, n=1, cutoff=0.75)
        if similar:
            raise ValueError(f"unknown: did you mean {similar[0]!r}?")
        raise ValueError(f"must be {listed}")

    return check


def budget(value: Any) -> Any:
    """Return the `Budget`, how long to measure, that a mapping of a file describes.

    Raises ValueError for no mapping, an unknown key or a wrong number, and UserError for numbers
    that contradict each other.
    """
    # Needs torch, whose import takes seconds.
    from ddlkit.jobs.clock import Budget

    fields = signature(Budget).parameters
    if not isinstance(value, dict):
        raise ValueError(f"must be a mapping of {', '.join(fields)}")
    for name, given in value.items():
        if name not in fields:
            raise ValueError(f"{name}: unknown key: {_advice_on_key(name, fields)}")
        # Numbers of repeats are whole, as their defaults are. The others count seconds or shares.
        is_count = isinstance(fields[name].default, int)
        if is_count and type(given) is not int:
            raise ValueError(f"{name}: {shown(given)}: must be a whole number")
        if type(given) not in (int, float):
            raise ValueError(f"{name}: {shown(given)}: must be a number")
    return Budget(**value)


def link(value: Any) -> Any:
    """Return the name of the link over which messages are measured, or "" for the machine's own.

    Raises ValueError for a link that is not known.
    """
    # Needs torch, whose import takes seconds.
    from ddlkit.measure.parts import LINKS

    return one_of(("", *LINKS))(value)


def _checked(value: Any, check: Check | Many) -> Any:
    """Return the meaning of a value, or a list of meanings for `Many`.

    Raises UserError for a wrong value. The error names the value.
    """
    # A key of many values takes a single value as well, as if it were a list of one.
    if isinstance(check, Many):
        values = value if isinstance(value, (list, tuple)) else [value]
        if not values:
            raise UserError("[]: an empty list: give at least one value")
        try:
            return [_checked(element, check.check) for element in values]
        except UserError as error:
            # A list may have been meant, but not be written as one.
            if "," not in str(value) or values is value:
                raise
            raise UserError(f"{error} (a list is written as [a, b])") from None
    try:
        return check(value)
    except (ValueError, UserError) as error:
        raise UserError(f"{shown(value)}: {error}") from None


def sizes(value: Any) -> tuple[int, ...]:
    """Return the sizes in bytes that a file gives as a size, a range of sizes or a list of both.

    In a range, each size is twice the size before it, up to the last one at most. Raises ValueError
    or UserError for a wrong value.

    >>> sizes("4KiB")
    (4096,)
    >>> sizes("1KiB..4KiB")
    (1024, 2048, 4096)
    """
    if isinstance(value, list):
        # Without sizes, the default ones would be measured.
        if not value:
            raise ValueError("an empty list: give at least one size")
        return tuple(size for element in value for size in sizes(element))
    if not isinstance(value, str):
        raise ValueError(
            "must be a size as 4KiB, or a range of doubling sizes as 1KiB..64MiB"
        )
    # A single size counts as a range that ends where it begins. Its ``last`` is empty.
    first, _, last = value.partition("..")
    low = parse_bytes(first)
    high = parse_bytes(last or first)
    if not 1 <= low <= high:
        raise ValueError(
            "must be at least a byte, and rise from the first size to the last"
        )
    doubled = []
    size = low
    while size <= high:
        doubled.append(size)
        size *= 2
    return tuple(doubled)


_count = whole(1)
_flag = rule("true or false", lambda value: isinstance(value, bool))
_rates = Many(text("a rate with its unit, as 1gbit", parse_bits_per_s))
_times = Many(text("a time with its unit, as 2ms", parse_seconds))


def _share(value: Any) -> float:
    """Return a share that is written as a number, or as a text with or without a percent sign."""
    if type(value) in (int, float):
        return float(value)
    if not isinstance(value, str):
        raise ValueError("must be a share, as 0.001 or 0.1%")
    return parse_share(value)


_shares = Many(_share)


def _read_plan(spec: str) -> str:
    """Return the name of a plan. Raises UserError if its planner cannot read what follows the colon."""
    check_text_of_plan(spec)
    return spec


_plan = rule(
    f"a plan: {', '.join(PLANNERS)}",
    lambda value: isinstance(value, str) and value.partition(":")[0] in PLANNERS,
    _read_plan,
)


KEYS: dict[str, Check | Many] = {
    # of a suite
    "points": Many(rule("a mapping", lambda value: isinstance(value, dict))),
    **dict.fromkeys(("about", "out", "name"), str),
    "device": one_of(("", "cpu", "cuda")),
    # of drift: before all that a session measures, or after
    "moment": one_of(("start", "end")),
    # of what is measured, and how
    **dict.fromkeys(
        ("isolate", "strict", "by_name", "brief", "copies", "predict"), _flag
    ),
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
    "link": link,
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
) -> dict[str, Any]:
    """Return the checked arguments with which ``make`` can be called.

    Parameters
    ----------
    given : mapping
        The keys and values of a file, or of one of its points.
    make : callable
        The function whose parameters are the keys that may be given. A parameter without a default
        is a key that must be given.
    where : str
        The place in a file, as an error names it.
    skip : int, optional
        How many of the first parameters of ``make`` are no keys, because the program passes them
        itself.

    Returns
    -------
    dict
        By key, the meaning of each value, as its check in `KEYS` returns it. A key that is not
        given is left out, so that ``make`` takes its default.

    Raises
    ------
    UserError
        If a key is unknown or missing, or if a value is wrong.
    """
    parameters = list(signature(make).parameters.values())[skip:]
    keys = {parameter.name: parameter for parameter in parameters}
    for name in given:
        if name not in keys:
            # A point also has the key "measure", which the ``make`` of its kind does not take.
            advice = _advice_on_key(name, [*keys, "measure"])
            raise UserError(f"{where}: {name}: unknown key: {advice}")
    missing = [
        name
        for name, parameter in keys.items()
        if name not in given and parameter.default is Parameter.empty
    ]
    if missing:
        one_is = "the key is missing: add it"
        several_are = "these keys are missing: add them"
        raise UserError(
            f"{where}: {', '.join(missing)}: {one_is if len(missing) == 1 else several_are}, "
            "as in the files of examples/ and workbook/record/suites/"
        )
    return {
        name: _checked_key(given[name], name, where) for name in keys if name in given
    }


def _checked_key(value: Any, name: str, where: str) -> Any:
    """Return the meaning of a key's value, as its check in `KEYS` returns it.

    Raises UserError for a wrong value. The error names the place ``where`` in the file, and the
    key.
    """
    try:
        return _checked(value, KEYS[name])
    except UserError as error:
        raise UserError(f"{where}: {name}: {error}") from None


def _advice_on_key(name: object, keys: Collection[str]) -> str:
    """Return advice on an unknown key: the most similar of the known ``keys``, or all of them."""
    # At most one key, and none if no key is similar enough to be meant.
    similar = difflib.get_close_matches(str(name), sorted(keys), n=1, cutoff=0.75)
    if similar:
        return f"did you mean {similar[0]!r}?"
    return f"use {', '.join(sorted(keys))}"


@dataclass(frozen=True)
class Suite:
    """A file of points.

    Attributes
    ----------
    file : Path
        The file.
    points : sequence of ChainMap
        The keys and values of each point, the most valuable point first. The first of its maps
        has the point's own keys, and the second one those of all points.
    about : str
        What a reader should know of the suite.
    device : str
        "cpu" or "cuda", or empty for the device of this machine.
    isolate : bool
        Whether each point is measured by a process of its own.
    out : str
        The name of a directory in build, or "recorded" for one in data/recorded. Empty for the
        default.
    strict : bool
        Whether a recording of the suite fails if one of its points fails.
    """

    file: Path
    points: Sequence[ChainMap[str, Any]]
    about: str = ""
    device: str = ""
    isolate: bool = False
    out: str = ""
    strict: bool = False

    @property
    def is_campaign(self) -> bool:
        """Return whether all points are campaigns."""
        return all(described.get("measure") == CAMPAIGN for described in self.points)

    @property
    def folder(self) -> str:
        """Return the name of the directory of a campaign's tables.

        For a file campaign_osf.yml, the name is "campaign-osf".
        """
        words = self.file.stem.replace("_", "-")
        return words if words.startswith(CAMPAIGN) else f"{CAMPAIGN}-{words}"


def read(
    name: str | Path, parts: Sequence[str] = (), others: Sequence[str] = ()
) -> Suite:
    """Return the suite of that name, or the one that a YAML or JSON file describes.

    A suite is a list of points, which say what is measured. A key of the file that is no attribute
    of `Suite` holds for all points that lack the key.

    Parameters
    ----------
    name : str or Path
        The name of a suite, or a file.
    parts : sequence of str, optional
        The parts of a suite that the user may name instead, such as "layers". The caller handles
        them. They are only listed by the error for an unknown name.
    others : sequence of str, optional
        What else the user may name instead. This is only listed by the same error.

    Raises
    ------
    UserError
        If there is no such suite or file, or if the file is wrong.
    """
    file = _file_of(name, parts, others)
    given = _parsed(file)
    # Keys of the suite itself, and keys that hold for its points.
    attributes = signature(Suite).parameters
    of_suite = {key: value for key, value in given.items() if key in attributes}
    of_points = {key: value for key, value in given.items() if key not in attributes}
    _check_keys_of_points(of_points, file)
    # The first parameter of `Suite` is the file itself, which is no key in the file.
    arguments = read_keys(of_suite, Suite, str(file), skip=1)
    # A point's own keys come first, so that they replace those of the file.
    arguments["points"] = [
        ChainMap(described, of_points) for described in arguments["points"]
    ]
    return Suite(file, **arguments)


def _file_of(name: str | Path, parts: Sequence[str], others: Sequence[str]) -> Path:
    """Return the file of the suite of that name, or the file that the name itself is.

    Raises UserError if a name without an ending is no suite. The error then lists the suites, and
    what else the user may name: ``parts`` of a suite, and ``others``.
    """
    suites = {path.stem: path for path in SUITES.glob("*.json")}
    if str(name) in suites:
        return suites[str(name)]
    file = Path(name)
    if file.suffix:
        return file
    if file.is_dir():
        raise UserError(f"{name}: is a directory: name a file .yml or .json in it")
    similar = difflib.get_close_matches(str(name), [*suites, *parts, *others], n=1)
    advice = f"did you mean {similar[0]!r}? Otherwise " if similar else ""
    advice += f"use {', '.join(sorted(suites))}"
    if parts:
        advice += f", a part of a suite ({', '.join(parts)})"
    if others:
        advice += f", {', '.join(others)}"
    raise UserError(f"{name}: no such suite: {advice}, or a file .yml or .json")


def _check_keys_of_points(of_points: Mapping[str, Any], file: Path) -> None:
    """Raise UserError if a file gives all its points an unknown key, or a wrong value of a key.

    The keys are checked before the points are read, so that the error names the file and not the
    first point. A key without a check in `KEYS` is checked later, with each point.
    """
    # The keys of the suite stand next to these keys in the file, so that an unknown key may be one
    # of them, misspelt. "measure" is not in `KEYS` yet: `_wanted` adds it.
    known = {*signature(Suite).parameters, *KEYS, "measure"}
    for key in of_points:
        if key not in known:
            raise UserError(f"{file}: {key}: unknown key: {_advice_on_key(key, known)}")
    for key, value in of_points.items():
        if key in KEYS:
            # The meaning of the value is not kept. It is read again with each point.
            _checked_key(value, key, str(file))


def _parsed(file: Path) -> dict[str, Any]:
    """Return the mapping that a file of points holds, read as JSON or, for other endings, as YAML.

    Raises UserError if the file holds no mapping with the key "points".
    """
    content = files.read_text(file)
    language = "JSON" if file.suffix == ".json" else "YAML"
    parsers = {"JSON": files.parse_json, "YAML": files.parse_yaml}
    try:
        given = parsers[language](content)
    except ImportError:
        # Only YAML needs a package.
        advice = "install it, or write the file as JSON (.json)"
        raise UserError(f"{file}: reading YAML needs PyYAML: {advice}") from None
    except ValueError as error:
        raise UserError(f"{file}: is not {language}: {error}") from None
    if not isinstance(given, dict) or "points" not in given:
        raise UserError(
            f"{file}: does not list measurements: write {language} with a list named points, "
            "as in examples/labs.yml (timed messages) or examples/campaign.yml (trainings)"
        )
    return given


class Described(NamedTuple):
    """The keys that a point of any kind may have in a file. Each kind has keys of its own besides.

    Attributes
    ----------
    measure : str
        The kind of the point.
    about : str
        What a reader should know of the point.
    device : str
        The only device on which the point is measured, or empty for every device.
    by_name : bool
        Whether the point is measured only if its part is asked for, and not with "all".
    """

    measure: str
    about: str = ""
    device: str = ""
    by_name: bool = False


class _Wanted(NamedTuple):
    """A point of a suite that is to be measured, with what is needed to make it.

    Attributes
    ----------
    where : str
        The place in the file, as an error names it.
    part : str
        What the point belongs to, such as "layers".
    make : callable
        Makes the points of the session, or `campaigns.Grid`.
    arguments : dict
        The checked arguments of ``make``.
    in_lab : bool
        Whether the point needs a lab.
    """

    where: str
    part: str
    make: Callable[..., Any]
    arguments: dict[str, Any]
    in_lab: bool


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
    """Return the points of a suite for a session, each a measurement with tables of its own.

    Parameters
    ----------
    out : Path
        The directory of the session.
    session : int
        The number of the session, which is part of the names of some tables.
    name : str
        The name of the suite, or its file.
    part : str, optional
        What the points belong to, such as "layers". By default all parts.
    device : str, optional
        "cpu" or "cuda", in place of the suite's own.
    networks : sequence of str, optional
        Networks in place of the suite's own. Only the part "layers" can be measured of them.
    predict : bool, optional
        Whether the cases of campaigns and of trainings are only predicted, and not measured.

    Raises
    ------
    UserError
        If the file or a network is wrong, if a GPU is asked for and torch sees none, if all points
        need a lab and none is available, and if there is nothing to predict.
    """
    import torch

    from workbook.record.campaigns import campaign, labs_of

    suite = read(name)
    # Whether the file says the device. The user decides first, then the suite, then what torch sees.
    is_of_file = not device and bool(suite.device)
    torch_device = "cuda" if torch.cuda.is_available() else "cpu"
    device = device or suite.device or torch_device
    if device == "cuda" and torch_device != "cuda":
        asked, remedy = "", "give --device cpu"
        if is_of_file:
            asked, remedy = f"{suite.file}: device: cuda: ", "write device: cpu"
        raise UserError(
            f"{asked}torch {torch.__version__} sees no GPU: install a CUDA build that fits the "
            f"driver, or {remedy}"
        )
    wanted = [*_wanted(suite, part, device, networks)]
    if not wanted:
        raise _nothing_wanted(suite, part, device)
    # A grid describes many points of a campaign at once, which `campaign` makes below.
    listed, grids = _points_and_grids(wanted, device, session, out)
    # If points of trainings ask for predictions, one more point predicts them. If ``predict`` is
    # true, it takes the place of those that ask.
    listed = with_predictions(listed, out, predict)
    has_predictions = any(point.what == "predicted" for point in listed)
    # A campaign can always be predicted: `campaign` then adds a point for it.
    if predict and not (grids or has_predictions):
        raise _nothing_to_predict(suite.file, part)
    if grids:
        listed += campaign(labs_of(grids, out, str(suite.file), device), predict)
    return _ordered(listed)


def _nothing_wanted(suite: Suite, part: str, device: str) -> UserError:
    """Return the error for a suite without a point that is to be measured, which says why.

    ``part`` is the part of the suite that is asked for, and ``device`` the device that is measured.
    """
    if part != "all":
        return UserError(
            f"{suite.file}: none of its points belongs to the part {part} on the device {device}: "
            "name another part"
        )
    reasons = []
    if any(described.get("by_name") for described in suite.points):
        reasons.append(
            "a point with by_name: true is measured only as a part of a suite, so leave by_name out"
        )
    if any(
        described.get("device") not in (None, "", device) for described in suite.points
    ):
        reasons.append(
            f"a point with the key device is measured on that device only, and {device} is measured here, "
            "so leave device out of the point"
        )
    return UserError(
        f"{suite.file}: none of its points can be measured: {'; '.join(reasons)}"
    )


def _nothing_to_predict(file: Path, part: str) -> UserError:
    """Return the error for predictions of a part of a suite in which nothing is predicted."""
    # The user names a suite of the workbook without its folder and its ending.
    named = str(file.stem if file.parent == SUITES else file)
    if part != "all":
        named = f"the part {part} of {named}"
    return UserError(
        f"--predict: nothing can be predicted in {named}: leave --predict out, or name "
        "the file of a campaign instead, such as examples/campaign.yml"
    )


def _ordered(listed: Sequence[Point]) -> PointList:
    """Return the points in the order of a session, with those of drift first and last.

    A point of drift is measured at the start and again at the end of a session, to show whether the
    machine became slower. The name of such a point ends with "start" or "end". Of points with the
    same key, only the last one is kept.
    """
    # By key, in the order in which the keys first came.
    body: dict[object, Point] = {}
    drifts: dict[str, list[Point]] = {}
    for point in listed:
        if point.what == "drift":
            moment = point.name.rpartition("-")[2]
            # A later point of the same moment replaces an earlier one.
            drifts[moment] = [point]
        else:
            body[point.key] = point
    return PointList(
        [*body.values()],
        opening=drifts.get("start", []),
        closing=drifts.get("end", []),
    )


def _points_and_grids(
    wanted: Iterable[_Wanted], device: str, session: int, out: Path
) -> tuple[list[Point], list[Any]]:
    """Return the wanted points of a suite, and the grids of its campaigns.

    The points of a grid, which is a product of lists of settings, are not made yet. If no lab is
    available, points in a lab are left out with a message. Raises UserError if all wanted points
    are left out.
    """
    from ddlkit.lab import network as lab
    from ddlkit.measure.parts import Here
    from workbook.record.campaigns import Grid

    listed: list[Point] = []
    grids: list[Grid] = []
    # By the part whose points are left out, what a lab lacks here.
    left_out: dict[str, str] = {}
    for where, part, make, arguments, in_lab in wanted:
        try:
            # If this is the grid of a campaign, its points are made later, with those of all grids.
            if make is Grid:
                grids.append(Grid(**arguments))
                continue
            # What a needed lab lacks, or empty.
            lacking = lab.why_unavailable() if in_lab else ""
            if lacking:
                left_out[part] = lacking
            else:
                listed += make(Here(device, session, out), **arguments)
        except UserError as error:
            # The error of a kind does not know the place in the file.
            raise UserError(f"{where}: {error}") from None
    if left_out:
        parts = ", ".join(left_out)
        # A lab lacks the same for all parts.
        lacking = next(iter(left_out.values()))
        if not listed and not grids:
            raise UserError(f"no {parts} here: {lacking}")
        say(f"left out, because it needs a lab: {parts}: {lacking}")
    return listed, grids


def with_predictions(points: Sequence[Point], out: Path, predict: bool) -> list[Point]:
    """Return the points, with one more that predicts the cases of all that ask for predictions.

    The added point stands before the first point that asks, because a prediction must come before
    its measurement. If no point asks, none is added.

    Parameters
    ----------
    points : sequence of Point
        The points of a session. A point asks for predictions by its attribute ``predicted``.
    out : Path
        The directory of the session.
    predict : bool
        Whether the points that ask for predictions are only predicted, and so left out themselves.
    """
    # These need torch, whose import takes seconds.
    from workbook.record.needs import PREDICTED
    from workbook.record.trained import predicted_trainings

    asking = [point for point in points if point.predicted]
    if not asking:
        return [*points]
    measure = partial(predicted_trainings, [point.predicted for point in asking], out)
    estimate_s = PREDICTED.seconds(len(asking))
    prediction = Point("predicted", "cases", measure, estimate_s)
    first = points.index(asking[0])
    before = points[:first]
    after = points[first:]
    if predict:
        after = [point for point in after if not point.predicted]
    return [*before, prediction, *after]


def _refuse_unknown_key_of_all(
    file: Path,
    point: ChainMap[str, Any],
    keys: Collection[str],
    make: Callable[..., object],
    skip: int,
) -> None:
    """Raise UserError for a key that the file gives to all points, if a point cannot have it.

    Such a key stands above the points, so that the error names the file and no point.

    Parameters
    ----------
    file : Path
        The file.
    point : ChainMap
        The point: its own keys, and then those of all points.
    keys : collection of str
        Those keys of the point that its kind must know, because not all kinds have them.
    make : callable
        The function of the kind, whose parameters are the keys that the kind knows.
    skip : int
        How many of the first parameters of ``make`` are no keys.
    """
    own_keys = point.maps[0]
    known = list(signature(make).parameters)[skip:]
    for key in keys:
        if key not in own_keys and key not in known:
            raise UserError(
                f"{file}: {key}: unknown key of the points: {_advice_on_key(key, known)}"
            )


def _wanted(
    suite: Suite, part: str, device: str, networks: Sequence[str]
) -> Iterator[_Wanted]:
    """Yield the points of a suite that belong to a part and are measured on a device.

    The part "all" has the points of all parts, except for those that are measured ``by_name`` only.
    If ``networks`` are given, the points are those of layers on one rank, and measure these
    networks in place of their own.
    """
    from workbook.record.campaigns import Grid
    from workbook.record.kinds import KINDS
    from workbook.record.needs import NEEDS

    # The kinds are known only here, because to import them needs torch. Their check is therefore
    # added to the global `KEYS` now. A second call adds the same check.
    KEYS["measure"] = one_of(list(KINDS))
    for position, described in enumerate(suite.points):
        where = f"{suite.file}: points[{position}]"
        # The keys that any point may have, and the keys of its kind.
        common = {}
        special = {}
        for key, value in described.items():
            if key in Described._fields:
                common[key] = value
            else:
                special[key] = value
        point = Described(**read_keys(common, Described, where))
        part_of_point, make = KINDS[point.measure]
        # The keys of a kind are the parameters of ``make``. The first parameter is no key but a
        # `Here`, which says where the session measures. Only a `Grid` has no `Here`.
        skip = 0 if make is Grid else 1
        _refuse_unknown_key_of_all(suite.file, described, special, make, skip)
        arguments = read_keys(special, make, where, skip)
        is_of_part = not point.by_name if part == "all" else part == part_of_point
        is_of_device = point.device in ("", device)
        # A point that does not name its ranks has one.
        is_of_one_rank = arguments.get("ranks", [1]) == [1]
        is_wanted = is_of_part and is_of_device and (is_of_one_rank or not networks)
        if networks:
            # The part is "layers", because `recording.record` refuses networks for any other.
            arguments["networks"] = [_checked(name, network_of) for name in networks]
        if is_wanted:
            # Some kinds are in a lab only if they ask for a rate of its links.
            in_lab = NEEDS[point.measure].is_in_lab(arguments.get("rate", ()))
            # Only the links of a lab can be delayed.
            if any(arguments.get("delay", ())) and not in_lab:
                raise UserError(
                    f"{where}: delay: only links that have a rate are delayed: add the key rate, or "
                    "leave delay out"
                )
            yield _Wanted(where, part_of_point, make, arguments, in_lab)
