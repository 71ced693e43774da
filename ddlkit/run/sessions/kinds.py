"""The kinds of points that a file may ask for: what each measures, its name, and about how long it takes.

A kind is a function here: a new measurement is one more such function. Arguments that are lists make a point
for each value. What measures is imported when a point needs it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch

from ddlkit import machine, store
from ddlkit.core.cost import MessageCost
from ddlkit.core.errors import UserError
from ddlkit.core.link import COLLECTIVES
from ddlkit.core.units import parse_bits_per_s
from ddlkit.core.workload import LayerProfile
from ddlkit.model import make_plan
from ddlkit.papers import networks as published
from ddlkit.run import vitals
from ddlkit.run.clock import Budget
from ddlkit.run.jobs.launch import MEETING_S, Loopback, Place, launch
from ddlkit.run.lab import network as lab
from ddlkit.run.lab import parse as parse_conditions
from ddlkit.run.sessions import CAMPAIGN, Kind, Point, Tables, Unavailable, table_path
from ddlkit.run.sessions.campaigns import Grid, table_cost

OWN_PLAN = "ddp"  # DDP's own rule for buckets
DISTINCT_PLANS = 8
LAUNCH_S = 10.0  # starting ranks
PATIENCE = 3.0  # ranks that take this many times what was estimated are ended
BUILD_S = 2.0  # building a network, moving it to the device, counting its FLOP
WARMTH = 1.2  # times as long as a budget says takes what also warms up
EXPOSED_S = 2.0  # an iteration in the lab: compute about as long as communication

Networks = Sequence[tuple[str, int]]
"""Names and batch sizes."""


class Here(NamedTuple):
    """Where a session measures: the device, the number that marks its own tables, and the directory."""

    device: str
    session: int
    out: Path

    @property
    def on_gpu(self) -> bool:
        """Return whether GPUs are measured."""
        return self.device == "cuda"


KINDS: dict[str, Kind] = {CAMPAIGN: Kind(CAMPAIGN, Grid)}


def kind(what: str) -> Callable[[Any], Any]:
    """Return what registers a function as the kind of its name."""

    def register(make: Callable[..., Iterator[Point]]) -> Any:
        KINDS[make.__name__] = Kind(what, make)
        return make

    return register


# -- what points are made of ---------------------------------------------------------------------


def measuring(name: str) -> Any:
    """Return the module that measures that, imported now: most need torch."""
    return import_module(f"ddlkit.run.{name if '.' in name else f'measure.{name}'}")


def on_gpus(gpus: int, point: Point) -> Point:
    """Return the point, or where there are fewer GPUs than it needs, one that says so."""
    there = torch.cuda.device_count()

    def refuse() -> Tables:
        raise Unavailable(f"needs {gpus} GPUs, here {'is 1' if there == 1 else f'are {there}'}")

    return point if there >= gpus else replace(point, measure=refuse, estimate_s=0.0)


def rank_counts(device: str) -> list[int]:
    """Return two ranks, as in `sharing`, and where there are more GPUs, one on each of them."""
    return sorted({2, torch.cuda.device_count()} - {0, 1}) if device == "cuda" else [2]


def meeting(device: str) -> dict[str, Any]:
    """Return how ranks meet that measure a device: what else the machine has is not asked."""
    return {"backend": "nccl" if device == "cuda" else "gloo", "timeout_s": MEETING_S}


def lab_of(ranks: int, rate: str, delay: str = "") -> lab.Lab:
    """Return a lab; with a delay, its links are emulated."""
    conditions = parse_conditions({"delay": delay}) if delay else None
    return lab.Lab(lab.LabShape(ranks, parse_bits_per_s(rate), conditions=conditions))


def launched(
    job: Any,
    settings: Any,
    ranks: int,
    make: Callable[[], Any],
    join: Mapping[str, Any],
    estimate_s: float,
) -> Tables:
    """Return what ranks measure in a place that is made for it: a lab, which comes up, or loopback."""
    place, how = make(), dict[str, Any](ranks=ranks, join=join)
    if isinstance(place, Loopback):
        return launch(job, settings, place=place, timeout_s=PATIENCE * estimate_s, **how)
    with place:
        return launch(job, settings, place=place, **how)


def collectives_point(
    here: Here,
    name: str,
    ranks: int,
    make: Callable[[], Any],
    join: Mapping[str, Any],
    collectives: Sequence[str],
    sizes: Sequence[int],
    budget: Budget,
    **settings: Any,
) -> Point:
    """Return the point of a table of collectives, to which what it lacks of these sizes is added."""
    path, module = table_path(here.out, "collectives", name), measuring("collectives")
    estimate_s = LAUNCH_S + len(collectives) * len(sizes) * budget.max_s

    def missing() -> dict[tuple[int, ...], list[str]]:
        """Collectives by the sizes that they still lack."""
        rows = store.load_table(path) if store.has_table(path) else None
        there = set() if rows is None else {*zip(rows["collective"], rows["bytes"], strict=True)}
        lacking: dict[tuple[int, ...], list[str]] = {}
        for collective in collectives:
            left = [n for n in sizes if (collective, module.whole_size(n, ranks)) not in there]
            lacking.setdefault(tuple(left), []).append(collective)
        return {left: names for left, names in lacking.items() if left}

    def measure() -> pd.DataFrame:
        frames = []
        for left, names in missing().items():
            asked = module.CollectivesSettings(names, left, budget, **settings)
            how = (ranks, make, join, estimate_s)
            frames.append(launched(module.collectives_job, asked, *how)["collectives"])
        return pd.concat(frames, ignore_index=True)

    return Point("collectives", name, measure, estimate_s, is_done=lambda: not missing())


def recorded(out: Path, schema: str, name: str) -> Path:
    """Return a table that other points gave. Raises UserError where it is not there."""
    path = table_path(out, schema, name)
    if not store.has_table(path):
        raise UserError(f"{path} is missing: run ddlkit measure {schema} --out {out} first")
    return path


def recorded_profile(out: Path, name: str, batch: int, ranks: int) -> LayerProfile:
    """Return the layers of a network that other points gave. Raises UserError as `recorded`."""
    return store.read_profile(recorded(out, "layers", f"{name}-b{batch}-r{ranks}"))


def recorded_cost(out: Path, ranks: int, rate: str) -> MessageCost:
    """Return the cost of all-reduces in a lab, by its measured table. Raises UserError as `recorded`."""
    rows = store.load_table(recorded(out, "collectives", f"lab-p{ranks}-{rate}"))
    return table_cost(rows[rows["collective"] == "all_reduce"], ranks)


# -- this machine --------------------------------------------------------------------------------


@kind("drift")
def drift(here: Here, moment: str, side: int, size: Sequence[int]) -> Iterator[Point]:
    """What a session measures before all others, and after them: moments start and end."""
    measure = partial(measuring("speed").measure_drift, moment, here.device, side, *size)
    yield Point("drift", f"s{here.session}-{moment}", measure, 4)


@kind("peaks")
def matrix_products(
    here: Here, precisions: Sequence[str], sides: Sequence[int], budget: Budget
) -> Iterator[Point]:
    measure = partial(measuring("speed").measure_peaks, here.device, precisions, sides, budget)
    estimate_s = 1 + 1.5 * budget.max_s * len(precisions) * len(sides)
    yield Point("peaks", here.device, measure, estimate_s)


@kind("copies")
def memory_copies(here: Here, budget: Budget, sizes: Sequence[int] = ()) -> Iterator[Point]:
    speed = measuring("speed")
    sizes = sizes or speed.SIZES
    measure = partial(speed.measure_copies, here.device, sizes, budget)
    estimate_s = 3 + (5 if here.on_gpu else 1) * len(sizes) * budget.max_s
    yield Point("copies", here.device, measure, estimate_s)


@kind("input")
def input_alone(
    here: Here, budget: Budget, width: int, height: int, batch: int, side: int
) -> Iterator[Point]:
    """Reading and decoding, each with nothing else going on."""
    what = ((width, height), batch, side, budget)
    measure = partial(measuring("speed").measure_inputs, here.out, *what)
    name, estimate_s = f"alone-{here.device}", 3 + 12 * budget.max_s
    yield Point("input", name, measure, estimate_s, ["inputs"], folder="input")


@kind("selection")
def selections(here: Here, brief: bool = False) -> Iterator[Point]:
    for name, measure, estimate_s in measuring("selection").cases(here.device, brief):
        yield Point("selection", name, measure, estimate_s)


@kind("contention")
def kernels_beside_messages(here: Here, brief: bool = False) -> Iterator[Point]:
    for name, measure, estimate_s in measuring("contention").cases(here.device, brief):
        yield Point("contention", name, measure, estimate_s)


@kind("contention")
def kernels_beside_copies(here: Here, brief: bool = False) -> Iterator[Point]:
    cases = measuring("contention").cases(here.device, brief, copies=True)
    for name, measure, estimate_s in cases:
        yield Point("contention", name, measure, estimate_s)


@kind("one_gpu")
def two_ranks_on_one_gpu(here: Here, brief: bool = False) -> Iterator[Point]:
    """NCCL itself where there is one GPU; what it refuses for being too old takes no time."""
    one_gpu = measuring("nccl_one_gpu")
    pairs, settings = one_gpu.case(brief)
    measure = partial(one_gpu.measure_on_one_gpu, pairs, settings)
    estimate_s = 0.0 if one_gpu.unavailable() else 30.0 * len(pairs)
    yield Point("one_gpu", "nccl-one-gpu", measure, estimate_s, ["contention"])


# -- networks ------------------------------------------------------------------------------------


@kind("layers")
def layers(
    here: Here,
    networks: Networks,
    budget: Budget,
    precisions: Sequence[str] = ("fp32",),
    ranks: Sequence[int] = (),
) -> Iterator[Point]:
    """Alone; or on all cores, by so many ranks at the same time, of which one needs no launch."""
    module = measuring("layers")
    for count, precision, (name, batch) in product(ranks or [0], precisions, networks):
        cores = machine.cores() if count else None
        how = (name, batch, here.device, precision, budget, cores)
        measure: Callable[[], Any] = partial(module.layer_tables, *how)
        if count > 1:
            settings = module.LayersSettings({name: batch}, budget=budget)
            measure = partial(launch, module.layers_job, settings, ranks=count, place=Loopback())
        estimate_s = BUILD_S + LAUNCH_S * (count > 1) + WARMTH * budget.max_s
        key = f"{name}-b{batch}-" + (f"r{count}" if count else precision)
        yield Point("layers", key, measure, estimate_s, ["layers", "samples"])


@kind("sharing")
def training_beside_messages(
    here: Here, networks: Networks, budget: Budget, brief: bool = False
) -> Iterator[Point]:
    beside = measuring("training")
    for name, batch in networks:
        compared = beside.sharing_settings(brief)
        measure = partial(beside.measure_sharing, here.device, name, batch, compared, budget)
        estimate_s = 2 * BUILD_S + WARMTH * budget.max_s
        yield Point("sharing", f"{name}-b{batch}-fp32", measure, estimate_s)


@kind("convergence")
def convergences(here: Here, epochs: int, seeds: Sequence[int]) -> Iterator[Point]:
    """All networks of one seed before the next seed."""
    convergence = measuring("convergence")
    how = {"device": here.device, "threads": machine.cores()}
    for seed, name in product(seeds, convergence.NETWORKS):
        measure = partial(convergence.train, name, seed, convergence.Recipe(epochs), **how)
        yield Point("convergence", f"{name}-e{epochs}-s{seed}", measure, 5.0 * epochs)


@kind("convergence")
def sparse_convergences(here: Here, seeds: Sequence[int], epochs: int = 0) -> Iterator[Point]:
    """omgs Fig 3, on a core of the processor, seed by seed; epochs : in place of each network's own."""
    convergence = measuring("convergence")
    for seed, name in product(seeds, convergence.TASKS):
        _, recipe = convergence.TASKS[name]
        recipe = replace(recipe, epochs=epochs or recipe.epochs)
        for method in convergence.plans(name):
            key = f"{name}-{method.replace('+', '-')}-e{recipe.epochs}-s{seed}"
            measure = partial(convergence.train_sparse, name, method, seed, recipe)
            yield Point("convergence", key, measure, 4.0 * recipe.epochs, ["sparse_convergence"])


# -- several ranks -------------------------------------------------------------------------------

# What collectives can show where there is one device is labelled as a link of its own.
_LINKS: dict[str, tuple[int, Callable[[], Loopback], dict[str, Any]]] = {
    "loopback-p2": (2, Loopback, meeting("cpu")),
    "one-rank": (1, partial(Loopback, name="one-rank"), {}),  # joins as its device does
    "gloo-cuda-p2": (2, partial(Loopback, name="host"), {"backend": "gloo", "on_gpu": True}),
}


@kind("collectives")
def collectives(
    here: Here,
    budget: Budget,
    link: str = "",
    collectives: Sequence[str] = tuple(COLLECTIVES),
    sizes: Sequence[int] = (),
    ranks: Sequence[int] = (2,),
    rate: Sequence[str] = ("",),
    delay: Sequence[str] = ("",),
    messages: int = 16,
    tries: int = 1,
) -> Iterator[Point]:
    """By one of _LINKS, or in labs, or else as devices are joined: GPUs by NCCL, processors by gloo.

    delay : of a lab's links, which are then emulated; messages : of a sample there
    """
    sizes = sizes or measuring("collectives").SIZES
    asked = (collectives, sizes, budget)
    if any(rate):
        for workers, bits, late in product(ranks, rate, delay):
            name = "-".join(filter(None, (f"lab-p{workers}", bits, late and f"delay{late}")))
            where = (name, workers, partial(lab_of, workers, bits, late))
            join = measuring("lab.replay").JOIN
            how: dict[str, Any] = {"messages_per_sample": messages, "tries": tries}
            yield collectives_point(here, *where, join, *asked, **how)
        return
    gpus = here.on_gpu and not link
    links = {link: _LINKS[link]} if link else {}
    for count in rank_counts(here.device) if not link else ():
        links[f"nccl-p{count}" if gpus else f"loopback-p{count}"] = (count, Loopback, {})
    for name, (count, place, join) in links.items():
        point = collectives_point(here, name, count, place, meeting(here.device) | join, *asked)
        yield on_gpus(count * gpus, point)


@kind("tensors")
def tensors(
    here: Here, network: str, ranks: Sequence[int], budget: Budget, rate: Sequence[str] = ("",)
) -> Iterator[Point]:
    """All-reduces of each size that a network's tensors have; with a rate, in the lab."""
    module = measuring("collectives")
    sizes = sorted({4 * elements for elements in published.parameters(network)})  # float32
    estimate_s = LAUNCH_S + len(sizes) * budget.max_s

    def measure(workers: int, bits: str) -> pd.DataFrame:
        place = partial(lab_of, workers, bits) if bits else Loopback
        join = measuring("lab.replay").JOIN if bits else meeting("cpu")
        each = 16 if bits else 1
        settings = module.CollectivesSettings(
            ["all_reduce"], sizes, budget, each, tries=vitals.TRIES
        )
        how = (workers, place, join, estimate_s)
        rows = launched(module.collectives_job, settings, *how)["collectives"]
        rows.insert(0, "network", network)
        return rows

    for workers, bits in product(ranks, rate):
        link = f"lab-p{workers}-{bits}" if bits else f"loopback-p{workers}"
        run = partial(measure, workers, bits)
        yield Point("tensors", f"{network.lower()}-{link}", run, estimate_s)


@kind("training")
def trainings(
    here: Here,
    networks: Networks,
    repeats: int,
    iterations: int,
    ranks: Sequence[int] = (),
    rate: Sequence[str] = ("",),
    plans: Sequence[str] = (OWN_PLAN,),
) -> Iterator[Point]:
    """Training on several ranks as DDP itself sends; or in labs, under plans for what is measured there."""
    module = measuring("training")
    each_s = EXPOSED_S / (10 if here.on_gpu else 1)
    estimate_s = LAUNCH_S + len(plans) * repeats * 2 * (iterations + 2) * each_s

    def measure(count: int, bits: str, name: str, batch: int) -> Tables:
        place: Callable[[], Any] = partial(lab_of, count, bits) if bits else Loopback
        join = measuring("lab.replay").JOIN if bits else meeting(here.device)
        group_bytes: dict[str, Sequence[int]] = {OWN_PLAN: []}
        sha256 = ""
        if bits:
            profile = recorded_profile(here.out, name, batch, count)
            workload, cost = profile.workload(), recorded_cost(here.out, count, bits)
            made = {spec: make_plan(spec, workload, cost) for spec in plans}
            group_bytes = {spec: plan.group_bytes(workload).tolist() for spec, plan in made.items()}
            sha256 = profile.sha256
        asked = (name, batch, group_bytes, repeats, iterations)
        settings = module.TrainingSettings(*asked, profile_sha256=sha256)
        return launched(module.training_job, settings, count, place, join, estimate_s)

    for count, bits, (name, batch) in product(ranks or rank_counts(here.device), rate, networks):
        key = f"training-{name}-p{count}-{bits}" if bits else f"{name}-b{batch}-p{count}"
        run, tables = partial(measure, count, bits, name, batch), module.training_job.tables
        point = Point("training", key, run, estimate_s, tables)
        yield on_gpus(count * (here.on_gpu and not bits), point)


@kind("replay")
def replays(
    here: Here,
    networks: Networks,
    ranks: Sequence[int],
    rate: Sequence[str],
    plans: Sequence[str],
    rounds: int,
) -> Iterator[Point]:
    """Replays of the profiles and the calibration at hand."""

    def measure(workers: int, bits: str) -> Tables:
        cost = recorded_cost(here.out, workers, bits)
        profiles = [recorded_profile(here.out, name, batch, 1) for name, batch in networks]
        with lab_of(workers, bits) as place:
            cases = [case for each in profiles for case in replay_cases(each, plans, cost, place)]
            played = measuring("lab.replay").replay(place, workers, cases, rounds)
        return {"runs": played.runs, "timeline": played.timeline[played.timeline["rank"] == 0]}

    estimate_s = LAUNCH_S + len(networks) * DISTINCT_PLANS * rounds * EXPOSED_S
    for workers, bits in product(ranks, rate):
        name, run = f"replay-p{workers}-{bits}", partial(measure, workers, bits)
        yield Point("replay", name, run, estimate_s, ["runs", "timeline"])


def replay_cases(
    profile: LayerProfile, plans: Sequence[str], cost: MessageCost, place: Place
) -> list[Any]:
    """Return the profile under DISTINCT_PLANS plans, computing as long as one message of everything."""
    plan_case = measuring("lab.replay").plan_case
    planned = [plan_case(profile, spec, cost, place) for spec in plans]
    return list({case.plan.ends: case for case in planned}.values())[:DISTINCT_PLANS]
