"""Kinds of points whose ranks share something: the links of a lab, or cores and GPUs with what they send."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pandas as pd

from ddlkit import store
from ddlkit.core.cost import MessageCost
from ddlkit.core.units import parse_bits_per_s, parse_bytes
from ddlkit.core.workload import LayerProfile
from ddlkit.model import make_plan
from ddlkit.papers import networks as published
from ddlkit.run.jobs.launch import Loopback, Place, launch
from ddlkit.run.sessions import grammar, kinds
from ddlkit.run.sessions.kinds import Here, made, measuring
from ddlkit.run.sessions.replays import table_cost
from ddlkit.run.sessions.session import Point, Tables

DISTINCT_PLANS = 8
EXPOSED_S = 2.0  # an iteration in the lab: computation about as long as communication
TRIES = 3  # of each size, while the host disturbs
_GRADIENTS_BYTES = 45e6  # of a usual network

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


# -- sharing resources ---------------------------------------------------------------------------


def _volume(value: Any) -> tuple[int, int]:
    """Return bytes and parts of "25MB in 4"; of one size in one part, without them.

    >>> _volume("25MB in 4"), _volume("1KiB")
    ((25000000, 4), (1024, 1))
    """
    size, _, parts = str(value).partition(" in ")
    return parse_bytes(size), int(parts or 1)


def _policy(value: Any) -> str:
    return str(measuring("shares").Policy.parse(str(value)).name)


Policies = Annotated[Sequence[str], grammar.Key(_policy, many=True)]
Volume = Annotated[tuple[int, int], grammar.Key(_volume)]
Volumes = Annotated[Sequence[tuple[int, int]], grammar.Key(_volume, many=True)]
Scale = Annotated[Any, grammar.Key(made("contention", "Scale"))]


@grammar.kind("controls")
def controls_of_communication(here: Here) -> Iterator[Point]:
    """By what communication can be given more or less."""
    yield Point("controls", here.device, measuring("controls").offered, 2.0)


def _sharing(
    name: str,
    job: Any,
    make: Callable[[], Any],
    work_s: float,
    rate: str = "",
    without: Sequence[str] = (),
) -> Point:
    """Return a point of two ranks that share a machine's cores with what they send.

    make : the settings, once what they need is measured; work_s : without starting anything
    rate : of the link; without one, ranks talk by loopback; without : tables that these settings leave out
    """
    estimate_s, link = kinds.LAUNCH_S + work_s, f"lab-p2-{rate}" if rate else "loopback-p2"

    def measure() -> Tables:
        settings, join = make(), kinds.meeting("cpu") | {"torch_threads": 1}
        with kinds.lab_of(2, rate) if rate else nullcontext(Loopback()) as place:
            how: dict[str, Any] = {"place": place, "join": join, "timeout_s": 60 + 4 * estimate_s}
            return launch(job, settings, ranks=2, **how)

    tables = [table for table in job.tables if table not in without]
    return Point("sharing", f"{name}-{link}", measure, estimate_s, tables)


def _send_s(n_bytes: float, rate: str) -> float:
    """Return about how long an all-reduce between two ranks takes."""
    return 8 * n_bytes / (parse_bits_per_s(rate) if rate else 2e10)


@grammar.kind("sharing")
def messages_by_share(
    here: Here,
    policies: Policies,
    messages: Volumes,
    name: str = "alone",
    repeats: int = 6,
    rate: grammar.Rates = ("",),
) -> Iterator[Point]:
    """All-reduces alone, by what communication may take."""
    module = measuring("shared_messages")
    make = partial(module.SharedMessagesSettings, policies, messages, repeats)
    for bits in rate:
        all_s = sum(_send_s(n_bytes, bits) for n_bytes, _ in messages)
        work_s = 2.0 + 1.3 * repeats * len(policies) * all_s
        yield _sharing(name, module.shared_messages_job, make, work_s, bits)


_STARVED = 50
"""Times as long as another takes a configuration whose messages computing keeps from their cores."""


@grammar.kind("sharing")
def kernels_by_share(
    here: Here,
    policies: Policies,
    kernels: grammar.Words,
    scale: Scale,
    message: Volume,
    name: str = "beside",
    repeats: int = 6,
    rate: grammar.Rates = ("",),
) -> Iterator[Point]:
    """Kernels beside all-reduces, by what communication may take; on processors."""
    module = measuring("shared_kernels")
    make = partial(module.SharedKernelsSettings, policies, kernels, scale, *message, repeats)
    rows = sum(_STARVED if "idle" in policy else 1 for policy in policies)
    for bits in rate:
        each_s = 0.2 + 2.5 * max(0.15, _send_s(message[0], bits))
        work_s = 2.0 + repeats * rows * len(kernels) * each_s
        yield _sharing(name, module.shared_kernels_job, make, work_s, bits)


@grammar.kind("sharing")
def training_by_share(
    here: Here,
    networks: grammar.Batched,
    policies: Policies,
    name: str = "",
    repeats: int = 6,
    iterations: int = 2,
    empty: grammar.Count = 0,
    rate: grammar.Rates = ("",),
    plans: grammar.Plans = (kinds.OWN_PLAN,),
) -> Iterator[Point]:
    """Training, by what communication may take: a table for each network, link and name."""
    module, batches = measuring("shared_training"), dict[str, list[int]]()
    for network, batch in networks:
        batches.setdefault(network, []).append(batch)

    def settings(network: str) -> Any:
        sizes: dict[str, Sequence[int]] = {spec: [] for spec in plans}
        for spec in set(plans) - {kinds.OWN_PLAN}:
            workload = kinds.recorded_profile(here.out, network, batches[network][0], 2).workload()
            sizes[spec] = make_plan(spec, workload).group_bytes(workload).tolist()
        how = {"repeats": repeats, "iterations": iterations, "empty": empty}
        return module.SharedTrainingSettings(network, batches[network], policies, sizes, **how)

    job, lacks = module.shared_training_job, () if empty else (module.PERIODS,)
    for network, bits in itertools.product(batches, rate):
        each_s = [2 * kinds.iteration_s(network, n, "fp32", "cpu") for n in batches[network]]
        sending_s = len(each_s) * _send_s(_GRADIENTS_BYTES, bits)
        round_s = (1 + iterations) * (sum(each_s) + sending_s)
        round_s += (1 + empty) * bool(empty) * sum(each_s)
        work_s = 3.0 + repeats * len(plans) * (len(policies) + 1) * round_s
        named, make = "-".join(filter(None, (network, name))), partial(settings, network)
        yield _sharing(named, job, make, work_s, bits, lacks)
