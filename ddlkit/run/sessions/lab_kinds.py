"""Kinds of points that need a lab: collectives, training and replays there, and campaigns of replays."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pandas as pd

from ddlkit import store
from ddlkit.core.case import AXES, Case
from ddlkit.core.cost import MessageCost
from ddlkit.core.errors import UserError
from ddlkit.core.units import parse_bits_per_s, parse_seconds
from ddlkit.core.workload import LayerProfile
from ddlkit.model import make_plan
from ddlkit.papers import networks as published
from ddlkit.run.jobs.launch import Loopback, Place, launch
from ddlkit.run.lab.conditions import (
    CONGESTION,
    ENGINES,
    Conditions,
    parse_share,
)
from ddlkit.run.lab.network import LabShape
from ddlkit.run.nets import registry
from ddlkit.run.sessions import grammar
from ddlkit.run.sessions.grammar import (
    Batched,
    Counts,
    Delays,
    Key,
    Plans,
    Rate,
    Rates,
    Seeds,
    Sizes,
    kind,
    number,
    one_of,
    text_of,
)
from ddlkit.run.sessions.replays import (
    AFTER,
    BEFORE,
    EXTENTS,
    PREDICTED,
    Inputs,
    LabPoints,
    Request,
    predicted_cases,
    table_cost,
)
from ddlkit.run.sessions.session import Point, Tables
from ddlkit.run.sessions.vocabulary import (
    DISTINCT_PLANS,
    EXPOSED_S,
    LAUNCH_S,
    TRIES,
    Collectives,
    Here,
    Timed,
    collectives_point,
    lab_of,
    measuring,
    meeting,
    recorded,
    recorded_profile,
    sent,
)

# -- the lab -------------------------------------------------------------------------------------


@kind("collectives", lab=True)
def collectives_in_lab(
    here: Here,
    ranks: Counts,
    rate: Rates,
    collectives: Collectives,
    budget: Timed,
    delay: Delays = ("",),
    sizes: Sizes = (),
    messages: int = 16,
    tries: int = 1,
) -> Iterator[Point]:
    """A table for each lab; with a delay, over emulated links. ``messages`` of a sample."""

    def send(workers: int, bits: str, late: str, **how: Any) -> pd.DataFrame:
        with lab_of(workers, bits, late) as place:
            rows: pd.DataFrame = measuring("replay").calibrate(place, **how)
            return rows

    sizes = sizes or measuring("collectives").SIZES
    how: dict[str, Any] = {"budget": budget, "messages_per_sample": messages, "tries": tries}
    for workers, bits, late in itertools.product(ranks, rate, delay):
        name = "-".join(filter(None, (f"lab-p{workers}", bits, late and f"delay{late}")))
        run = partial(send, workers, bits, late, **how)
        yield collectives_point(here, name, workers, run, collectives, sizes, budget.max_s)


@kind("tensors")
def tensors(
    here: Here, network: str, ranks: int, budget: Timed, rate: Rate = ""
) -> Iterator[Point]:
    """All-reduces of each size that a network's tensors have."""
    sizes = sorted({4 * elements for elements in published.parameters(network)})  # float32
    how: dict[str, Any] = {"collectives": ["all_reduce"], "sizes": sizes, "budget": budget}

    def measure() -> pd.DataFrame:
        if rate:
            with lab_of(ranks, rate) as place:
                rows = measuring("replay").calibrate(place, tries=TRIES, **how)
        else:
            rows = sent(ranks, {"place": Loopback(), "join": meeting("cpu")}, tries=TRIES, **how)
        rows.insert(0, "network", network)
        return rows

    link = f"lab-p{ranks}-{rate}" if rate else f"loopback-p{ranks}"
    estimate_s = LAUNCH_S + len(sizes) * budget.max_s
    yield Point("tensors", f"{network.lower()}-{link}", measure, estimate_s)


@kind("training", lab=True)
def training_in_lab(
    here: Here,
    networks: Batched,
    ranks: int,
    rate: Rate,
    plans: Plans,
    repeats: int,
    iterations: int,
) -> Iterator[Point]:
    """Real training under plans made for the profile and the calibration at hand."""
    training = measuring("training")

    def measure(name: str, batch: int) -> Tables:
        profile, cost = recorded_profile(here.out, name, batch, ranks), _cost(here.out, ranks, rate)
        workload, sha256 = profile.workload(), profile.sha256
        made = {spec: make_plan(spec, workload, cost) for spec in plans}
        group_bytes = {spec: plan.group_bytes(workload).tolist() for spec, plan in made.items()}
        settings = training.TrainingSettings(
            name, batch, group_bytes, repeats, iterations, profile_sha256=sha256
        )
        with lab_of(ranks, rate) as place:
            how: dict[str, Any] = {"place": place, "join": measuring("replay").JOIN}
            return launch(training.training_job, settings, ranks=ranks, **how)

    estimate_s = LAUNCH_S + len(plans) * repeats * (iterations + 2) * 2 * EXPOSED_S
    for name, batch in networks:
        key, run = f"training-{name}-p{ranks}-{rate}", partial(measure, name, batch)
        yield Point("training", key, run, estimate_s, tables=training.training_job.tables)


@kind("replay", lab=True)
def replays(
    here: Here, networks: Batched, ranks: int, rate: Rate, plans: Plans, rounds: int
) -> Iterator[Point]:
    """Replays of the profiles and the calibration at hand."""

    def measure() -> Tables:
        cost = _cost(here.out, ranks, rate)
        profiles = [recorded_profile(here.out, name, batch, 1) for name, batch in networks]
        with lab_of(ranks, rate) as place:
            cases = [
                case for profile in profiles for case in replay_cases(profile, plans, cost, place)
            ]
            played = measuring("replay").replay(place, ranks, cases, rounds)
        return {"runs": played.runs, "timeline": played.timeline[played.timeline["rank"] == 0]}

    estimate_s = LAUNCH_S + len(networks) * DISTINCT_PLANS * rounds * EXPOSED_S
    tables = ["runs", "timeline"]
    yield Point("replay", f"replay-p{ranks}-{rate}", measure, estimate_s, tables=tables)


def replay_cases(
    profile: LayerProfile, plans: Sequence[str], cost: MessageCost, place: Place
) -> list[Any]:
    """Return the profile under DISTINCT_PLANS plans, computing as long as one message of everything."""
    planned = [measuring("script").plan_case(profile, spec, cost, place) for spec in plans]
    return list({case.plan.ends: case for case in planned}.values())[:DISTINCT_PLANS]


def _cost(out: Path, ranks: int, rate: str) -> MessageCost:
    """Return the cost of all-reduces in the lab, by their measured table."""
    rows = store.load_table(recorded(out, "collectives", f"lab-p{ranks}-{rate}"))
    return table_cost(rows[rows["collective"] == "all_reduce"], ranks)


# -- campaigns ---

BALANCED, NATURAL = "balanced", "natural"
"""Compute as long as one message of everything; compute that start-ups do not stretch."""
MOST_ITERATIONS = 20_000
"""Of a campaign: each takes seconds; more are a slip in a grid, which is the product of its lists."""


def _or(word: str, check: Any) -> Any:
    """Return a check for a word, which gives None, or for what ``check`` takes."""
    return lambda value: None if value == word else check(value)


Bits = Annotated[Sequence[float], Key(text_of(parse_bits_per_s, grammar.RATE), many=True)]
Times = Annotated[Sequence[float], Key(text_of(parse_seconds, grammar.TIME), many=True)]
Shares = Annotated[Sequence[float], Key(text_of(parse_share, "a share, as 0.1%"), many=True)]
Loads = Annotated[Sequence[Any], Key(text_of(parse_share, "a load, as 40%"), many=True)]
Densities = Annotated[Sequence[float], Key(number(1e-6, 1), many=True)]
Slower = Annotated[Sequence[float], Key(number(1, 100), many=True)]
Spreads = Annotated[Sequence[float], Key(number(0, 3), many=True)]


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
    congestions: Annotated[Sequence[str], Key(one_of(CONGESTION), many=True)] = (CONGESTION[0],)
    compute_s: Annotated[Any, Key(_or(BALANCED, number(1e-3, 1e3)), many=True)] = (None,)
    startups: Annotated[Any, Key(_or(NATURAL, text_of(parse_seconds, grammar.TIME)), many=True)] = (
        None,
    )
    density: Densities = (1.0,)
    stragglers: Slower = (1.0,)
    straggler_spreads: Spreads = (0.0,)
    negotiated: Annotated[Sequence[bool], Key(grammar.truth, many=True)] = (False,)
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
        axes = {
            name: getattr(self, axis.key) for name, axis in AXES.items() if hasattr(self, axis.key)
        }
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
    if len({(grid.calibration, grid.name) for grid in grids}) > 1:
        raise UserError(f"{file}: calibration, name: must be the same in all its grids")
    labs: dict[LabShape, dict[Request, int]] = {}
    for grid in grids:
        for shape, request in itertools.product(grid.shapes(), list(grid.requests())):
            asked = labs.setdefault(shape, {})
            asked[request] = max(grid.rounds, asked.get(request, 0))
    first = grids[0]
    folder = f"campaign-{first.name}" if first.name else ""
    inputs = Inputs(EXTENTS[first.calibration], here.out, folder, file)
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
