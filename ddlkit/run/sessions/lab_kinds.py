"""Kinds of points whose ranks share the links of a lab; and what controls communication."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from ddlkit import store
from ddlkit.core.cost import MessageCost
from ddlkit.core.workload import LayerProfile
from ddlkit.model import make_plan
from ddlkit.papers import networks as published
from ddlkit.run.jobs.launch import Loopback, Place, launch
from ddlkit.run.sessions import grammar, kinds
from ddlkit.run.sessions.kinds import Here, measuring
from ddlkit.run.sessions.replays import table_cost
from ddlkit.run.sessions.session import Point, Tables

DISTINCT_PLANS = 8
EXPOSED_S = 2.0  # an iteration in the lab: computation about as long as communication
TRIES = 3  # of each size, while the host disturbs

# -- the lab -------------------------------------------------------------------------------------


@grammar.kind("collectives", lab=True)
def collectives_in_lab(
    here: Here,
    ranks: grammar.Counts,
    rate: grammar.Rates,
    collectives: kinds.Collectives,
    budget: kinds.Timed,
    delay: grammar.Delays = ("",),
    sizes: grammar.Sizes = (),
    messages: int = 16,
    tries: int = 1,
) -> Iterator[Point]:
    """A table for each lab; with a delay, over emulated links. ``messages`` of a sample."""

    def send(workers: int, bits: str, late: str, **how: Any) -> pd.DataFrame:
        with kinds.lab_of(workers, bits, late) as place:
            rows: pd.DataFrame = measuring("lab.replay").calibrate(place, **how)
            return rows

    sizes = sizes or measuring("collectives").SIZES
    how: dict[str, Any] = {"budget": budget, "messages_per_sample": messages, "tries": tries}
    for workers, bits, late in itertools.product(ranks, rate, delay):
        name = "-".join(filter(None, (f"lab-p{workers}", bits, late and f"delay{late}")))
        run = partial(send, workers, bits, late, **how)
        yield kinds.collectives_point(here, name, workers, run, collectives, sizes, budget.max_s)


@grammar.kind("tensors")
def tensors(
    here: Here, network: str, ranks: int, budget: kinds.Timed, rate: grammar.Rate = ""
) -> Iterator[Point]:
    """All-reduces of each size that a network's tensors have."""
    sizes = sorted({4 * elements for elements in published.parameters(network)})  # float32
    how: dict[str, Any] = {"collectives": ["all_reduce"], "sizes": sizes, "budget": budget}

    def measure() -> pd.DataFrame:
        if rate:
            with kinds.lab_of(ranks, rate) as place:
                rows = measuring("lab.replay").calibrate(place, tries=TRIES, **how)
        else:
            rows = kinds.sent(
                ranks, {"place": Loopback(), "join": kinds.meeting("cpu")}, tries=TRIES, **how
            )
        rows.insert(0, "network", network)
        return rows

    link = f"lab-p{ranks}-{rate}" if rate else f"loopback-p{ranks}"
    estimate_s = kinds.LAUNCH_S + len(sizes) * budget.max_s
    yield Point("tensors", f"{network.lower()}-{link}", measure, estimate_s)


@grammar.kind("training", lab=True)
def training_in_lab(
    here: Here,
    networks: grammar.Batched,
    ranks: int,
    rate: grammar.Rate,
    plans: grammar.Plans,
    repeats: int,
    iterations: int,
) -> Iterator[Point]:
    """Real training under plans made for the profile and the calibration at hand."""
    training = measuring("training")

    def measure(name: str, batch: int) -> Tables:
        profile, cost = (
            kinds.recorded_profile(here.out, name, batch, ranks),
            _cost(here.out, ranks, rate),
        )
        workload = profile.workload()
        made = {spec: make_plan(spec, workload, cost) for spec in plans}
        group_bytes = {spec: plan.group_bytes(workload).tolist() for spec, plan in made.items()}
        asked = (name, batch, group_bytes, repeats, iterations)
        settings = training.TrainingSettings(*asked, profile_sha256=profile.sha256)
        with kinds.lab_of(ranks, rate) as place:
            how: dict[str, Any] = {"place": place, "join": measuring("lab.replay").JOIN}
            return launch(training.training_job, settings, ranks=ranks, **how)

    estimate_s = kinds.LAUNCH_S + len(plans) * repeats * (iterations + 2) * 2 * EXPOSED_S
    for name, batch in networks:
        key, run = f"training-{name}-p{ranks}-{rate}", partial(measure, name, batch)
        yield Point("training", key, run, estimate_s, training.training_job.tables)


@grammar.kind("replay", lab=True)
def replays(
    here: Here,
    networks: grammar.Batched,
    ranks: int,
    rate: grammar.Rate,
    plans: grammar.Plans,
    rounds: int,
) -> Iterator[Point]:
    """Replays of the profiles and the calibration at hand."""

    def measure() -> Tables:
        cost = _cost(here.out, ranks, rate)
        profiles = [kinds.recorded_profile(here.out, name, batch, 1) for name, batch in networks]
        with kinds.lab_of(ranks, rate) as place:
            cases = [one for each in profiles for one in replay_cases(each, plans, cost, place)]
            played = measuring("lab.replay").replay(place, ranks, cases, rounds)
        return {"runs": played.runs, "timeline": played.timeline[played.timeline["rank"] == 0]}

    estimate_s = kinds.LAUNCH_S + len(networks) * DISTINCT_PLANS * rounds * EXPOSED_S
    name = f"replay-p{ranks}-{rate}"
    yield Point("replay", name, measure, estimate_s, ["runs", "timeline"])


def replay_cases(
    profile: LayerProfile, plans: Sequence[str], cost: MessageCost, place: Place
) -> list[Any]:
    """Return the profile under DISTINCT_PLANS plans, computing as long as one message of everything."""
    plan_case = measuring("lab.script").plan_case
    planned = [plan_case(profile, spec, cost, place) for spec in plans]
    return list({case.plan.ends: case for case in planned}.values())[:DISTINCT_PLANS]


def _cost(out: Path, ranks: int, rate: str) -> MessageCost:
    """Return the cost of all-reduces in the lab, by their measured table."""
    rows = store.load_table(kinds.recorded(out, "collectives", f"lab-p{ranks}-{rate}"))
    return table_cost(rows[rows["collective"] == "all_reduce"], ranks)


@grammar.kind("controls")
def controls_of_communication(here: Here) -> Iterator[Point]:
    """By what communication can be given more or less."""
    yield Point("controls", here.device, measuring("contention").offered, 2.0)
