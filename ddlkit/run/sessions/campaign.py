"""A campaign as a file says it: grids of cases, replayed in one lab after the other; see `replays`.

A campaign may be predicted: both calibrations of every lab come first, then one table ``predicted-cases``
with what models say of every case. Each run says by which table it was predicted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from ddlkit.core.case import AXES, Case
from ddlkit.core.errors import UserError
from ddlkit.core.units import parse_bits_per_s, parse_seconds
from ddlkit.run.lab.conditions import (
    CONGESTION,
    ENGINES,
    Background,
    Conditions,
    parse_background,
    parse_changes,
    parse_share,
)
from ddlkit.run.lab.network import LabShape
from ddlkit.run.nets import registry
from ddlkit.run.sessions import grammar
from ddlkit.run.sessions.grammar import (
    Batched,
    Counts,
    Key,
    Plans,
    Seeds,
    kind,
    number,
    one_of,
    text_of,
)
from ddlkit.run.sessions.kinds import Here
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
from ddlkit.run.sessions.session import Point

BALANCED, NATURAL = "balanced", "natural"
"""Compute as long as one message of everything; compute that start-ups do not stretch."""
MOST_ITERATIONS = 20_000
"""Of a campaign: each takes seconds; more are a slip in a grid, which is the product of its lists."""


def _axis(name: str, check: Any = None) -> Key:
    """Return the key of a field of Case, in the range that is declared there."""
    axis = AXES[name]
    return Key(check or number(axis.low, min(axis.high, 1e9)), many=True)


def _or(word: str, check: Any) -> Any:
    """Return a check for a word, which gives None, or for what ``check`` takes."""
    return lambda value: None if value == word else check(value)


def _written(value: Any) -> str:
    return str(
        text_of(parse_changes, "changes, as 0s:rate=250mbit;0.3s:loss=1%", as_written=True)(value)
    )


Bits = Annotated[Sequence[float], Key(text_of(parse_bits_per_s, grammar.RATE), many=True)]
Times = Annotated[Sequence[float], Key(text_of(parse_seconds, grammar.TIME), many=True)]
Loads = Annotated[Sequence[Background], Key(text_of(parse_background, "a load, as 40%"), many=True)]


@dataclass(frozen=True)
class Grid:
    """Cases of a campaign: the product of its lists, each field's several values.

    networks, plans, and from ``density`` on : of a case, as its fields are
    workers, rates, ranks_per_node, intra_rates : of a lab; engines : tbf, or emulated links, which alone
        have delays, jitters, losses, backgrounds and congestions
    compute_s : of an iteration; balanced: as long as communication
    startups : what a sparse message takes at least where ``compute_s`` is computed: the lab, where it takes
        longer, computes longer in proportion. natural: ``compute_s`` is that of the lab
    rounds : repeats of each case; calibration : how long labs are calibrated, one of EXTENTS
    selection : how it passes in a replay of sparse cases: recorded times are waited out, or real
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
    losses: Annotated[Sequence[float], Key(text_of(parse_share, "a share, as 0.1%"), many=True)] = (
        0.0,
    )
    backgrounds: Loads = (Background(0.0),)
    congestions: Annotated[Sequence[str], Key(one_of(CONGESTION), many=True)] = (CONGESTION[0],)
    compute_s: Annotated[Any, Key(_or(BALANCED, number(1e-3, 1e3)), many=True)] = (None,)
    startups: Annotated[Any, Key(_or(NATURAL, text_of(parse_seconds, grammar.TIME)), many=True)] = (
        None,
    )
    density: Annotated[Sequence[float], _axis("density")] = (1.0,)
    stragglers: Annotated[Sequence[float], _axis("straggler")] = (1.0,)
    straggler_spreads: Annotated[Sequence[float], _axis("straggler_spread")] = (0.0,)
    negotiated: Annotated[Sequence[bool], _axis("negotiated", grammar.truth)] = (False,)
    changes: Annotated[Sequence[str], _axis("changes", _written)] = ("",)
    in_flight: Counts = (1,)
    seeds: Seeds = (0,)
    rounds: int = 2
    calibration: Annotated[str, Key(one_of(tuple(EXTENTS)))] = "full"
    selection: Annotated[str, Key(one_of(("recorded", "real")))] = "recorded"
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

    def shapes(self) -> Iterator[LabShape]:
        """Yield its labs. Raises UserError for one that cannot be."""
        emulated = (self.delays, self.jitters, self.losses, self.backgrounds, self.congestions)
        links: list[Conditions | None] = []
        for engine in self.engines:
            names = ("delay_s", "jitter_s", "loss", "background", "congestion")
            every = [
                Conditions(**dict(zip(names, how, strict=True)))
                for how in itertools.product(*emulated)
            ]
            if engine == ENGINES[0] and every != [Conditions()]:
                raise UserError("delays and the like: only links of engines: emulated have these")
            links += every if engine != ENGINES[0] else [None]
        labs = itertools.product(self.workers, self.rates, self.ranks_per_node, links)
        for workers, rate, per_node, conditions in labs:
            if workers < 2:
                raise UserError("workers: one worker alone sends nothing: use at least 2")
            for intra in (self.intra_rates or (0.0,)) if per_node > 1 else (0.0,):
                yield LabShape(workers, rate, per_node, intra, conditions)

    def requests(self) -> Iterator[Request]:
        """Yield what it asks of each of its labs."""
        axes = {name: getattr(self, axis.key) for name, axis in AXES.items()}
        given = (self.networks, self.plans, self.compute_s, self.startups)
        for (name, batch), spec, compute_s, startup_s, *rest in itertools.product(
            *given, *axes.values()
        ):
            varied = dict(zip(axes, rest, strict=True))
            collective = "all_gather" if varied["density"] < 1 else "all_reduce"
            case = Case("replay", name, "", batch, 0, "", 0.0, collective, spec, "", **varied)
            yield Request(case, compute_s, startup_s)


@kind("campaign", lab=True, gathered=Grid)
def campaign(here: Here, grids: Sequence[Grid], file: str, predict: bool) -> Iterator[Point]:
    """All points, lab by lab; to predict, only what predictions are made of, and then these.

    Raises UserError for an unknown network and a plan that a network cannot have.
    """
    if len({(grid.calibration, grid.selection, grid.name) for grid in grids}) > 1:
        raise UserError(f"{file}: calibration, selection, name: must be the same in all its grids")
    labs: dict[LabShape, dict[Request, int]] = {}
    for grid in grids:
        for shape, request in itertools.product(grid.shapes(), list(grid.requests())):
            asked = labs.setdefault(shape, {})
            asked[request] = max(grid.rounds, asked.get(request, 0))
    first = grids[0]
    folder = f"campaign-{first.name}" if first.name else ""
    waits = first.selection == "recorded"
    inputs = Inputs(EXTENTS[first.calibration], waits, here.out, folder, file)
    for network in dict.fromkeys(
        request.case.network for asked in labs.values() for request in asked
    ):
        try:
            registry.find(network)
        except UserError as error:
            raise UserError(f"{file}: networks: {error}") from None
    every = [LabPoints(shape, asked, inputs) for shape, asked in labs.items()]
    for lab in every:
        yield from inputs.points(lab.asked)
        yield from lab.calibrations(BEFORE)
        if not predict:
            yield lab.replay_point()
            yield from lab.calibrations(AFTER)
    if predict:
        for lab in every:
            yield from lab.calibrations(AFTER)
        measure = partial(predicted_cases, every)
        yield Point("predicted", PREDICTED, measure, 1.0 * len(every), folder=inputs.folder)
