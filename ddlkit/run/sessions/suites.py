"""The points of a suite: what its file says, made into what measures; campaigns, too."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

import torch

from ddlkit.core.case import AXES, Case
from ddlkit.core.errors import UserError
from ddlkit.core.units import parse_bits_per_s, parse_seconds
from ddlkit.run.lab import (
    ENGINES,
    Conditions,
    parse_share,
)
from ddlkit.run.lab import network as lab
from ddlkit.run.lab.network import LabShape
from ddlkit.run.nets import registry
from ddlkit.run.sessions import lab_kinds
from ddlkit.run.sessions.grammar import (
    CAMPAIGN,
    DEVICES,
    KINDS,
    Batched,
    Counts,
    Key,
    Kind,
    Plans,
    Seeds,
    Suite,
    checked,
    keys_of,
    network,
    number,
    one_of,
    read,
    read_keys,
    text_of,
    truth,
)
from ddlkit.run.sessions.kinds import Here, best_device
from ddlkit.run.sessions.replays import (
    AFTER,
    BEFORE,
    EXTENTS,
    PREDICTED,
    Inputs,
    LabPoints,
    Request,
    predicted_cases,
)
from ddlkit.run.sessions.session import Point, PointList, say

assert lab_kinds  # whose import registers its kinds, and those of `kinds`

BALANCED, NATURAL = "balanced", "natural"
"""Compute as long as one message of everything; compute that start-ups do not stretch."""
MOST_ITERATIONS = 20_000
"""Of a campaign: each takes seconds; more are a slip in a grid, which is the product of its lists."""


# -- campaigns ---


def _or(word: str, check: Any) -> Any:
    """Return a check for a word, which gives None, or for what ``check`` takes."""
    return lambda value: None if value == word else check(value)


_seconds = text_of(parse_seconds, "a time with its unit, as 2ms")
Bits = Annotated[
    Sequence[float], Key(text_of(parse_bits_per_s, "a rate with its unit, as 1gbit"), many=True)
]
Times = Annotated[Sequence[float], Key(_seconds, many=True)]
Shares = Annotated[Sequence[float], Key(text_of(parse_share, "a share, as 0.1%"), many=True)]
Loads = Annotated[Sequence[Any], Key(text_of(parse_share, "a load, as 40%"), many=True)]
Computing = Annotated[Any, Key(_or(BALANCED, number(1e-3, 1e3)), many=True)]
Startups = Annotated[Any, Key(_or(NATURAL, _seconds), many=True)]


@dataclass(frozen=True)
class Grid:
    """Cases of a campaign: the product of its lists, each field's several values.

    networks, plans, and from ``density`` on : of a case, as its fields are
    workers, rates, ranks_per_node, intra_rates : of a lab; engines : tbf, or emulated links, which alone
        have delays, jitters, losses and backgrounds
    compute_s : of an iteration; balanced: as long as communication
    startups : what a sparse message takes at least where ``compute_s`` is computed: the lab, where it takes
        longer, computes longer in proportion. natural: ``compute_s`` is that of the lab
    rounds : repeats of each case; calibration : how long labs are calibrated, one of EXTENTS
    name : of the directory below the session's in which tables lie, campaign-NAME; "": the session's own
    """

    networks: Batched
    workers: Counts
    rates: Bits
    plans: Plans
    ranks_per_node: Counts = (1,)
    intra_rates: Bits = ()
    engines: Annotated[Sequence[str], Key(one_of(ENGINES), many=True)] = (ENGINES[0],)
    delays: Times = (0.0,)
    jitters: Times = (0.0,)
    losses: Shares = (0.0,)
    backgrounds: Loads = (parse_share("0%"),)
    compute_s: Computing = (None,)
    startups: Startups = (None,)
    density: Annotated[Sequence[float], Key(number(1e-6, 1), many=True)] = (1.0,)
    stragglers: Annotated[Sequence[float], Key(number(1, 100), many=True)] = (1.0,)
    negotiated: Annotated[Sequence[bool], Key(truth, many=True)] = (False,)
    seeds: Seeds = (0,)
    rounds: int = 2
    calibration: Annotated[str, Key(one_of(tuple(EXTENTS)))] = "full"
    name: str = ""

    def __post_init__(self) -> None:
        lists = [value for value in vars(self).values() if isinstance(value, (list, tuple))]
        cases = math.prod(len(values) or 1 for values in lists)
        if cases * self.rounds > MOST_ITERATIONS:
            raise UserError(
                f"{cases} cases, the product of its lists: {cases * self.rounds} iterations with their "
                f"rounds, at most {MOST_ITERATIONS}: shorten a list, or ask for fewer rounds"
            )
        if None in self.compute_s and any(self.startups):
            raise UserError("startups: give compute_s, too: what is computed beside one")
        list(self.shapes())  # each can be

    def shapes(self) -> Iterator[LabShape]:
        """Yield its labs. Raises UserError for one that cannot be."""
        emulated = (self.delays, self.jitters, self.losses, self.backgrounds)
        every = list(itertools.starmap(Conditions, itertools.product(*emulated)))
        if ENGINES[0] in self.engines and every != [Conditions()]:
            raise UserError("delays and the like: only links of engines: emulated have these")
        links: list[Conditions | None] = []
        for engine in self.engines:
            links += every if engine != ENGINES[0] else [None]
        labs = itertools.product(self.workers, self.rates, self.ranks_per_node, links)
        for workers, rate, per_node, conditions in labs:
            if workers < 2:
                raise UserError("workers: one worker alone sends nothing: use at least 2")
            for intra in (self.intra_rates or (0.0,)) if per_node > 1 else (0.0,):
                yield LabShape(workers, rate, per_node, intra, conditions)

    def requests(self) -> Iterator[Request]:
        """Yield what it asks of each of its labs."""
        axes = {
            name: getattr(self, axis.key) for name, axis in AXES.items() if hasattr(self, axis.key)
        }
        given = (self.networks, self.plans, self.compute_s, self.startups, *axes.values())
        for (name, batch), spec, compute_s, startup_s, *rest in itertools.product(*given):
            varied = dict(zip(axes, rest, strict=True))
            collective = "all_gather" if varied["density"] < 1 else "all_reduce"
            case = Case("replay", name, "", batch, 0, "", 0.0, collective, spec, "", **varied)
            yield Request(case, compute_s, startup_s)


KINDS[CAMPAIGN] = Kind(CAMPAIGN, True, keys_of(Grid), Grid)


def campaign(here: Here, grids: Sequence[Grid], file: str, predict: bool) -> Iterator[Point]:
    """Yield all points, lab by lab; to predict, only what predictions are made of, and then these.

    Raises UserError for an unknown network and a plan that a network cannot have.
    """
    if len({(grid.calibration, grid.name) for grid in grids}) > 1:
        raise UserError(f"{file}: calibration, name: must be the same in all its grids")
    labs: dict[LabShape, dict[Request, int]] = {}
    for grid in grids:
        for shape, request in itertools.product(grid.shapes(), list(grid.requests())):
            asked = labs.setdefault(shape, {})
            asked[request] = max(grid.rounds, asked.get(request, 0))
    for name in dict.fromkeys(name for grid in grids for name, _ in grid.networks):
        try:
            registry.find(name)
        except UserError as error:
            raise UserError(f"{file}: networks: {error}") from None
    folder = f"{CAMPAIGN}-{grids[0].name}" if grids[0].name else ""
    inputs = Inputs(EXTENTS[grids[0].calibration], here.out, folder, file)
    every = [LabPoints(shape, asked, inputs) for shape, asked in labs.items()]
    for each in every:
        yield from inputs.points(each.asked)
        yield from each.calibrations(BEFORE)
        if not predict:
            yield each.replay_point()
            yield from each.calibrations(AFTER)
    if predict:
        for each in every:
            yield from each.calibrations(AFTER)
        measure = partial(predicted_cases, every)
        yield Point("predicted", PREDICTED, measure, 1.0 * len(every), folder=folder)


# -- suites ---

# What every description of points may say besides what is the kind's own.
_COMMON = {
    "measure": Key(one_of(list(KINDS))),
    "about": Key(str, ""),  # why, for who reads the file
    "device": Key(one_of(("", *DEVICES)), ""),  # where it is measured: everywhere, if it is ""
    "by_name": Key(truth, False),  # not part of "all"
}


def points(
    *,
    out: Any,
    session: int,
    name: str,
    part: str = "all",
    device: str = "",
    networks: Sequence[str] = (),
    predict: bool = False,
) -> PointList:
    """Return the points of the suite of that name, or in that file.

    part : what of it, "all" or what points belong to, as "layers"
    device : in place of the suite's own; networks : in place of its own, of layers only, as "resnet50:32"
    predict : of campaigns: calibrate their labs and predict their cases, and replay none

    Raises UserError for a wrong file or network, and when a GPU is wanted and torch sees none.
    """
    instead = {"networks": [_batched(text, part) for text in networks]} if networks else {}
    suite = read(name)
    if predict and not suite.is_campaign:
        raise UserError(f"--predict: {suite.file} is no campaign: only its cases are predicted")
    device = device or suite.device or best_device()
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError(
            f"torch {torch.__version__} sees no GPU: install a CUDA build that fits the driver, "
            "or use --suite cpu"
        )
    here = Here(device, session, out)
    lists = []
    for section in ("points", "opening", "closing"):
        made: dict[str, Point] = {}
        for point in _made(suite, section, here, part, instead, predict):
            made.setdefault(point.key, point)
        lists.append(list(made.values()))
    return PointList(*lists)


def _batched(text: str, part: str) -> tuple[str, int]:
    """Return name and batch size of a network that the user wants instead of the suite's."""
    if part != "layers":
        raise UserError(f"networks can be chosen for layers only, not for {part}")
    if ":" not in text:
        raise UserError(f"networks {text!r}: write batch sizes, too, as in resnet50:32,vgg16:16")
    named: tuple[str, int] = checked(text, network, "networks")
    registry.find(named[0])
    return named


def _made(
    suite: Suite, section: str, here: Here, part: str, instead: Mapping[str, Any], predict: bool
) -> Iterator[Point]:
    """Yield the points of a section of the suite that are wanted, and possible here."""
    grids: list[Grid] = []
    for position, described in enumerate(getattr(suite, section)):
        where = f"{suite.file}: {section}[{position}]"
        common = read_keys({k: v for k, v in described.items() if k in _COMMON}, _COMMON, where)
        measured, kind = common["measure"], KINDS[common["measure"]]
        special = {key: value for key, value in described.items() if key not in _COMMON}
        arguments = {**read_keys(special, kind.keys, where), **instead}
        wanted = not common["by_name"] if part == "all" else part == kind.what
        if not wanted or common["device"] not in ("", here.device):
            continue
        if instead and arguments.get("ranks", 1) > 1:
            continue
        needs_lab = (kind.lab and measured != CAMPAIGN) or any(arguments.get("rate", ""))
        if measured == CAMPAIGN:
            try:
                grids.append(Grid(**arguments))
            except UserError as error:
                raise UserError(f"{where}: {error}") from None
        elif needs_lab and (reason := lab.available()):
            say(f"no lab, so no {measured.replace('_', ' ')}: {reason}")
        else:
            yield from kind.make(here, **arguments)
    if grids:
        yield from campaign(here, grids, str(suite.file), predict)
