"""What ``ddlkit measure`` records of a machine: a list of points, each saved as soon as it is done.

A point is a few tables under names of its own. One that is already there, whole and of this benchmark
version, is not measured again: an interrupted run goes on where it stopped.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ddlkit import machine, store
from ddlkit.core.cost import MessageCost
from ddlkit.core.errors import UserError
from ddlkit.core.fit import fit
from ddlkit.core.plan import make_plan
from ddlkit.core.units import format_seconds, parse_bits_per_s
from ddlkit.core.workload import LayerProfile
from ddlkit.formats import messages
from ddlkit.papers import networks as published
from ddlkit.run.instruments.clock import Budget
from ddlkit.run.jobs.launch import Loopback, Place, launch
from ddlkit.run.lab import network as lab
from ddlkit.run.lab.replay import calibrate, choose_join, replay
from ddlkit.run.lab.script import PlannedCase, plan_case
from ddlkit.run.measure import convergence
from ddlkit.run.measure.collectives import CollectivesSettings, collectives_job
from ddlkit.run.measure.convergence import Recipe, train
from ddlkit.run.measure.layers import LayersSettings, layers_job, profile_layers
from ddlkit.run.measure.training import TrainingSettings, training_job
from ddlkit.run.nets import registry as networks
from ddlkit.run.sessions.session import Point, Tables

WHAT = ("layers", "collectives", "training", "replay")
BY_NAME = ("convergence", "tensors")
"""Not part of "all": they take minutes, and tell of single networks more than of this machine."""

REPLAY_PLANS = (
    "none", "single", "ddp", "exact", "buffer:1MB", "buffer:4MB", "buffer:25MB", "buffer:100MB",
    "random:1:3", "random:2:6", "random:3:10", "random:4:4",
)  # fmt: skip
DISTINCT_PLANS = 8
TRAINING_PLANS = ("ddp", "single", "exact", "buffer:5MB", "none")


@dataclass(frozen=True)
class Length:
    """How long to measure: batch sizes by network, budgets, repeats.

    training_batch : of the network that is really trained, on as many ranks as TRAINING_RANKS
    replays : networks that are replayed; rounds : how often each of their plans is
    tensors : of each size that a network's tensors have; recipe, seeds : of training to convergence
    """

    batches: Mapping[str, int]
    layers: Budget
    messages: Budget
    tensors: Budget
    lab_collectives: Sequence[str]
    training_plans: Sequence[str]
    training_repeats: int
    training_iterations: int
    replays: Sequence[str]
    rounds: int
    recipe: Recipe
    seeds: Sequence[int]


# As many samples as make one iteration on a core last about as long as its gradients on the lab's link.
BATCHES = {"resnet18": 4, "resnet50": 4, "googlenet": 4, "alexnet": 8, "vgg16": 1}
LENGTHS = {
    "quick": Length(
        batches=BATCHES,
        layers=Budget(warmup=1, min_repeats=3, max_repeats=20, max_s=2.0),
        messages=Budget(warmup=1, min_repeats=2, max_repeats=30, max_s=0.3),
        tensors=Budget(warmup=1, min_repeats=2, max_repeats=20, max_s=0.15),
        lab_collectives=("all_reduce",),
        training_plans=TRAINING_PLANS[:3],
        training_repeats=2,
        training_iterations=2,
        replays=("resnet18", "resnet50", "googlenet"),
        rounds=2,
        recipe=Recipe(epochs=10),
        seeds=(0,),
    ),
    "full": Length(
        batches=BATCHES,
        layers=Budget(warmup=2, min_repeats=10, max_repeats=60, max_s=20.0),
        messages=Budget(warmup=1, min_repeats=5, max_repeats=60, max_s=2.0),
        tensors=Budget(warmup=1, min_repeats=5, max_repeats=60, max_s=1.0),
        lab_collectives=("all_reduce", "all_gather"),
        training_plans=TRAINING_PLANS,
        training_repeats=4,
        training_iterations=5,
        replays=("resnet18", "resnet50", "googlenet", "alexnet"),
        rounds=4,
        recipe=Recipe(),
        seeds=(0, 1),
    ),
}
TRAINING_NETWORK, TRAINING_RANKS, TRAINING_RATE = "resnet18", 2, "500mbit"
REPLAY_RANKS, REPLAY_RATE = 4, "1gbit"
TENSORS_NETWORK = "ResNet101"  # osf Fig 10
TRIES = 3  # of each of its sizes, while the host disturbs


def measure(what: str, length: str, out: Path, batches: Mapping[str, int] | None = None) -> None:
    """Measure every point of ``what``, one of WHAT or BY_NAME, or "all" of WHAT, into ``out``.

    batches : other networks and batch sizes than BATCHES, for "layers" only

    Progress goes to standard error. What needs the lab is left out, in one line, where there is none.
    Raises UserError when a measurement fails; points before it are kept.
    """
    chosen = LENGTHS[length]
    if batches is not None:
        if what != "layers":
            raise UserError(f"networks can be chosen for layers only, not for {what}")
        chosen = replace(chosen, batches=_known(batches))
    with store.Lock(out / ".lock"):
        reason = lab.available()
        if reason and what not in ("layers", *BY_NAME):
            _say(f"no lab, so no shaped collectives, training or replay: {reason}")
        for point in _points(chosen, with_lab=not reason):
            if point.what != what and not (what == "all" and point.what in WHAT):
                continue
            if point.done(out):
                _say(f"{point.name}: already measured")
                continue
            start_s = time.monotonic()
            point.save(out, point.measure(out))
            _say(f"{point.name}: done in {format_seconds(time.monotonic() - start_s)}")


def _known(batches: Mapping[str, int]) -> Mapping[str, int]:
    """The batches, once every name is a network's and every size above zero."""
    for network, batch in batches.items():
        networks.find(network)
        if batch < 1:
            raise UserError(f"{network} at batch {batch}: a batch has at least 1 sample")
    return batches


def _say(line: str) -> None:
    print(f"ddlkit: {line}", file=sys.stderr, flush=True)


def _points(length: Length, *, with_lab: bool) -> Iterator[Point]:
    """Every point in an order in which each finds what it needs."""
    for network, batch in length.batches.items():
        yield layers_point(network, batch, 1, length)
    if TRAINING_NETWORK in length.batches:
        yield layers_point(
            TRAINING_NETWORK, length.batches[TRAINING_NETWORK], TRAINING_RANKS, length
        )
    yield from convergence_points(length.recipe, length.seeds)
    yield Point("collectives", "loopback-p2", ["collectives"], lambda out: _loopback(2, length))
    yield _tensors(2, "", length)
    if not with_lab:
        return
    for n_ranks, rate in ((TRAINING_RANKS, TRAINING_RATE), (REPLAY_RANKS, REPLAY_RATE)):
        yield _calibration(n_ranks, rate, length)
        yield _tensors(n_ranks, rate, length)
    yield Point(
        "training",
        f"training-{TRAINING_NETWORK}-p{TRAINING_RANKS}-{TRAINING_RATE}",
        ["runs", "buckets", "timeline"],
        lambda out: _training(out, length),
    )
    yield Point(
        "replay",
        f"replay-p{REPLAY_RANKS}-{REPLAY_RATE}",
        ["runs", "timeline"],
        lambda out: _replay(out, length),
    )


# -- points ------------------------------------------------------------------------------------


def layers_point(network: str, batch: int, n_ranks: int, length: Length) -> Point:
    """A network's layers, profiled by ``n_ranks`` ranks at the same time; one needs no launch."""

    def alone(_: Path) -> Tables:
        threads = machine.cores()
        profile, samples = profile_layers(
            network, batch, device=_device(), budget=length.layers, threads=threads
        )
        _say(f"{network}, batch {batch}: {profile.workload().compute_s:.3f} s an iteration")
        return {"layers": store.profile_frame(profile, "fp32", 1, threads), "samples": samples}

    def together(_: Path) -> Tables:
        settings = LayersSettings({network: batch}, budget=length.layers)
        return launch(layers_job, settings, ranks=n_ranks, place=Loopback(), timeout_s=900)

    run = together if n_ranks > 1 else alone
    return Point("layers", f"{network}-b{batch}-r{n_ranks}", ["layers", "samples"], run)


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _loopback(n_ranks: int, length: Length) -> Tables:
    settings = CollectivesSettings(budget=length.messages)
    return launch(collectives_job, settings, ranks=n_ranks, place=Loopback())


def _calibration(n_ranks: int, rate: str, length: Length) -> Point:
    def run(_: Path) -> Tables:
        with lab.Lab(lab.LabShape(n_ranks, parse_bits_per_s(rate))) as place:
            collectives = length.lab_collectives
            return {
                "collectives": calibrate(place, collectives=collectives, budget=length.messages)
            }

    return Point("collectives", f"lab-p{n_ranks}-{rate}", ["collectives"], run)


def _tensors(n_ranks: int, rate: str, length: Length) -> Point:
    """All-reduces of TENSORS_NETWORK's tensors, over a link of the lab or, without a rate, loopback."""
    sizes = sorted({4 * count for count in published.parameters(TENSORS_NETWORK)})  # float32

    def run(_: Path) -> Tables:
        if rate:
            with lab.Lab(lab.LabShape(n_ranks, parse_bits_per_s(rate))) as place:
                found = calibrate(place, sizes, budget=length.tensors, tries=TRIES)
        else:
            settings = CollectivesSettings(["all_reduce"], sizes, length.tensors, tries=TRIES)
            tables = launch(collectives_job, settings, ranks=n_ranks, place=Loopback())
            found = tables["collectives"]
        found.insert(0, "network", TENSORS_NETWORK)
        return {"tensors": found}

    place_name = f"lab-p{n_ranks}-{rate}" if rate else f"loopback-p{n_ranks}"
    return Point("tensors", f"{TENSORS_NETWORK.lower()}-{place_name}", ["tensors"], run)


def convergence_points(recipe: Recipe, seeds: Sequence[int]) -> Iterator[Point]:
    """A point a network and seed, all networks of one seed before the next seed."""

    def point(network: str, seed: int) -> Point:
        def run(_: Path) -> Tables:
            found = train(
                network, seed, recipe, device=_device(), threads=machine.cores(), say=_say
            )
            return {"convergence": found}

        name = f"{network}-e{recipe.epochs}-s{seed}"
        return Point("convergence", name, ["convergence"], run)

    return (point(network, seed) for seed in seeds for network in convergence.NETWORKS)


def _training(out: Path, length: Length) -> Tables:
    """Real training under plans made for the profile and the calibration at hand."""
    batch = length.batches[TRAINING_NETWORK]
    profile = _profile(out, TRAINING_NETWORK, batch, TRAINING_RANKS)
    cost = _cost(out, TRAINING_RANKS, TRAINING_RATE)
    workload = profile.workload()
    plans = {spec: make_plan(spec, workload, cost) for spec in length.training_plans}
    with lab.Lab(lab.LabShape(TRAINING_RANKS, parse_bits_per_s(TRAINING_RATE))) as place:
        settings = TrainingSettings(
            TRAINING_NETWORK,
            batch,
            {spec: plan.group_bytes(workload).tolist() for spec, plan in plans.items()},
            repeats=length.training_repeats,
            iterations=length.training_iterations,
            profile_sha256=profile.sha256,
        )
        join = choose_join()
        return launch(training_job, settings, ranks=TRAINING_RANKS, place=place, join=join)


def _replay(out: Path, length: Length) -> Tables:
    cost = _cost(out, REPLAY_RANKS, REPLAY_RATE)
    with lab.Lab(lab.LabShape(REPLAY_RANKS, parse_bits_per_s(REPLAY_RATE))) as place:
        cases = [
            case
            for network in length.replays
            for case in replay_cases(
                _profile(out, network, length.batches[network], 1), cost, place
            )
        ]
        found = replay(place, REPLAY_RANKS, cases, length.rounds)
    return {"runs": found.runs, "timeline": found.timeline[found.timeline["rank"] == 0]}


def replay_cases(profile: LayerProfile, cost: MessageCost, place: Place) -> list[PlannedCase]:
    """The profile under DISTINCT_PLANS different plans, compute as long as one message of everything."""
    asked = [plan_case(profile, spec, cost, place) for spec in REPLAY_PLANS]
    distinct = {one.plan.ends: one for one in asked}
    return list(distinct.values())[:DISTINCT_PLANS]


# -- what earlier points left ------------------------------------------------------------------


def _profile(out: Path, network: str, batch: int, n_ranks: int) -> LayerProfile:
    path = out / f"layers-{network}-b{batch}-r{n_ranks}.csv"
    if not path.exists():
        raise UserError(f"{path} is missing: run ddlkit measure layers --out {out} first")
    return store.read_profile(path)


def _cost(out: Path, n_ranks: int, rate: str) -> MessageCost:
    """The measured table of all-reduce times in the lab."""
    path = out / f"collectives-lab-p{n_ranks}-{rate}.csv"
    if not path.exists():
        raise UserError(f"{path} is missing: run ddlkit measure collectives --out {out} first")
    sizes, seconds, known = messages.read_bytes_seconds(path, collective="all_reduce")
    algorithm = known.get("algorithm")
    return fit("table", sizes, seconds, workers=n_ranks, algorithm=algorithm, draws=0).cost
