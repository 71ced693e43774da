"""The kinds of points that a file may ask for, a function each; lists make a point for each value."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import torch

from ddlkit import store
from ddlkit.core.collective import COLLECTIVES
from ddlkit.core.units import KIB
from ddlkit.core.workload import Workload
from ddlkit.jobs.clock import Budget
from ddlkit.jobs.launch import MEETING_S, Loopback, launch
from ddlkit.jobs.vitals import TRIES
from ddlkit.lab import Conditions
from ddlkit.lab import network as lab
from ddlkit.measure import collectives as messages_alone
from ddlkit.measure import layers as layer_times
from ddlkit.measure import slowdown, training
from ddlkit.measure.session import CAMPAIGN, Point, Tables, Unavailable, say, table_path
from ddlkit.model import make_plan
from ddlkit.store import machine
from workbook.record import contention, convergence, replay, selection, speed
from workbook.record import estimators as cost_models
from workbook.record import zoo as registry
from workbook.record.campaigns import Grid, lacking, table_cost
from workbook.record.trained import Trained, recorded

LAUNCH_S = 10.0  # starting ranks
IN_LAB_S = 900.0  # in which ranks may always end in a lab
PATIENCE = 3.0  # ranks that take this many times what was estimated are ended
BUILD_S = 2.0  # building a network, moving it to the device, counting its FLOP
WARMTH = 1.2  # times as long as a budget says takes what also warms up
EXPOSED_S = 2.0  # an iteration in the lab
SLOWDOWN = Budget(warmup=0, min_repeats=5, max_repeats=100, max_s=10.0)
DISTINCT_PLANS = 8  # that a network is replayed under, at most

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


KINDS: dict[str, tuple[str, Callable[..., Any]]] = {CAMPAIGN: (CAMPAIGN, Grid)}
"""What points belong to, as "layers", and what makes them of a place and a file's keys; by kind."""


def kind(what: str) -> Callable[[Any], Any]:
    """Return what registers a function as the kind of its name."""

    def register(make: Callable[..., Iterator[Point]]) -> Any:
        KINDS[make.__name__] = what, make
        return make

    return register


def on_gpus(gpus: int, point: Point) -> Point:
    """Return the point, or where there are fewer GPUs than it needs, one that says so."""
    there = torch.cuda.device_count()

    def refuse() -> Tables:
        raise Unavailable(
            f"needs {gpus} GPUs, here {'is 1' if there == 1 else f'are {there}'}"
        )

    return point if there >= gpus else replace(point, measure=refuse, estimate_s=0.0)


def rank_counts(here: Here) -> list[int]:
    """Return two ranks, as in `sharing`, and where there are more GPUs, one on each of them."""
    return sorted({2, torch.cuda.device_count()} - {0, 1}) if here.on_gpu else [2]


@dataclass(frozen=True)
class Ranks:
    """So many ranks, in a place that is made for each measurement, and how they join there."""

    count: int
    place: Callable[[], Any]
    join: Mapping[str, Any]

    @classmethod
    def of(cls, count: int, device: str, link: str = "loopback", **join: Any) -> Ranks:
        """Return ranks that meet to measure a device: what else the machine has is not asked."""
        join |= {
            "backend": "nccl" if device == "cuda" else "gloo",
            "timeout_s": MEETING_S,
        }
        return cls(count, partial(Loopback, name=link), join)

    def run(
        self, job: Any, settings: Any, estimate_s: float, out: Path | None = None
    ) -> Tables:
        """Return the tables that a job leaves on them, also in ``out``."""
        place, how = (
            self.place(),
            dict[str, Any](ranks=self.count, join=self.join, out=out),
        )
        in_lab = not isinstance(place, Loopback)
        how["timeout_s"] = max(IN_LAB_S * in_lab, PATIENCE * estimate_s)
        with place if in_lab else nullcontext():
            return launch(job, settings, place=place, **how)


def ranks_in_lab(count: int, rate: float, delay_s: float = 0.0) -> tuple[Ranks, str]:
    """Return ranks over links of that rate, with a delay emulated ones, and the name of their tables."""
    shape = lab.LabShape(
        count, rate, conditions=Conditions(delay_s) if delay_s else None
    )
    name = f"lab-{shape.name.replace('emulated-', '')}"
    return Ranks(count, partial(lab.Lab, shape), replay.JOIN), name


@kind("drift")
def drift(here: Here, moment: str, side: int, size: Sequence[int]) -> Iterator[Point]:
    """What a session measures before all others, and after them: moments start and end."""
    measure = partial(speed.measure_drift, moment, here.device, side, *size)
    yield Point("drift", f"s{here.session}-{moment}", measure, 4)


@kind("peaks")
def matrix_products(
    here: Here, precisions: Sequence[str], sides: Sequence[int], budget: Budget
) -> Iterator[Point]:
    measure = partial(speed.measure_peaks, here.device, precisions, sides, budget)
    estimate_s = 1 + 1.5 * budget.max_s * len(precisions) * len(sides)
    yield Point("peaks", here.device, measure, estimate_s)


@kind("copies")
def memory_copies(
    here: Here, budget: Budget, sizes: Sequence[int] = speed.SIZES
) -> Iterator[Point]:
    measure = partial(speed.measure_copies, here.device, sizes, budget)
    estimate_s = 3 + (5 if here.on_gpu else 1) * len(sizes) * budget.max_s
    yield Point("copies", here.device, measure, estimate_s)


@kind("input")
def input_alone(
    here: Here, budget: Budget, width: int, height: int, batch: int, side: int
) -> Iterator[Point]:
    """Reading and decoding, each with nothing else going on."""
    measure = partial(
        speed.measure_inputs, here.out, (width, height), batch, side, budget
    )
    name, estimate_s = f"alone-{here.device}", 3 + 12 * budget.max_s
    yield Point("input", name, measure, estimate_s, ["inputs"], folder="input")


@kind("estimators")
def cost_models_of_torch(here: Here) -> Iterator[Point]:
    """What the installed PyTorch's own cost models say, by its version."""
    name = f"torch-{torch.__version__.partition('+')[0]}"
    yield Point("estimators", name, cost_models.measure_estimators)


@kind("selection")
def selections(here: Here, brief: bool = False) -> Iterator[Point]:
    for case in selection.cases(here.device, brief):
        yield Point("selection", *case)


@kind("contention")
def kernels_beside_messages(
    here: Here, brief: bool = False, copies: bool = False
) -> Iterator[Point]:
    """Or beside copies of a copy engine."""
    for case in contention.cases(here.device, brief, copies):
        yield Point("contention", *case)


@kind("layers")
def layers(
    here: Here,
    networks: Networks,
    budget: Budget,
    precisions: Sequence[str] = ("fp32",),
    ranks: Sequence[int] = (),
) -> Iterator[Point]:
    """Alone; or on all cores, by so many ranks at the same time, of which one needs no launch."""
    for name, _ in networks:
        registry.find(name)
    for count, precision, (name, batch) in product(ranks or [0], precisions, networks):
        cores = machine.cores() if count else None
        how = (name, batch, here.device, precision, budget, cores)
        measure: Callable[[], Any] = partial(layer_times.layer_tables, *how)
        if count > 1:
            settings = layer_times.LayersSettings({name: batch}, budget=budget)
            where: dict[str, Any] = {"ranks": count, "place": Loopback()}
            measure = partial(launch, layer_times.layers_job, settings, **where)
        estimate_s = BUILD_S + LAUNCH_S * (count > 1) + WARMTH * budget.max_s
        key = f"{name}-b{batch}-" + (f"r{count}" if count else precision)
        yield Point("layers", key, measure, estimate_s, ["layers", "samples"])


@kind("sharing")
def training_beside_messages(
    here: Here, networks: Networks, budget: Budget, brief: bool = False
) -> Iterator[Point]:
    measure, compared = training.measure_sharing, training.sharing_settings(brief)
    for name, batch in networks:
        run = partial(measure, here.device, name, batch, compared, budget)
        estimate_s = 2 * BUILD_S + WARMTH * budget.max_s
        yield Point("sharing", f"{name}-b{batch}-fp32", run, estimate_s)


@kind("convergence")
def convergences(here: Here, epochs: int, seeds: Sequence[int]) -> Iterator[Point]:
    """All networks of one seed before the next seed."""
    how: dict[str, Any] = {
        "device": here.device,
        "threads": machine.cores(),
        "say": say,
    }
    for seed, name in product(seeds, convergence.NETWORKS):
        measure = partial(
            convergence.train, name, seed, convergence.Recipe(epochs), **how
        )
        yield Point("convergence", f"{name}-e{epochs}-s{seed}", measure, 5.0 * epochs)


@kind("convergence")
def sparse_convergences(
    here: Here, seeds: Sequence[int], epochs: int = 0
) -> Iterator[Point]:
    """omgs Fig 3, on a core of the processor, seed by seed; epochs : in place of each network's own."""
    for seed, name in product(seeds, convergence.TASKS):
        _, recipe = convergence.TASKS[name]
        recipe = replace(recipe, epochs=epochs or recipe.epochs)
        for method in convergence.plans(name):
            key = f"{name}-{method.replace('+', '-')}-e{recipe.epochs}-s{seed}"
            measure = partial(convergence.train_sparse, name, method, seed, recipe)
            yield Point(
                "convergence", key, measure, 4.0 * recipe.epochs, ["sparse_convergence"]
            )


# What collectives can show where there is one device is labelled as a link of its own.
_LINKS: dict[str, Callable[[str], Ranks]] = {
    "loopback-p2": lambda device: Ranks.of(2, "cpu"),
    "one-rank": lambda device: Ranks.of(1, device, "one-rank"),
    "gloo-cuda-p2": lambda device: Ranks.of(2, "cpu", "host", on_gpu=True),
}


@kind("collectives")
def collectives(
    here: Here,
    budget: Budget,
    link: str = "",
    collectives: Sequence[str] = tuple(COLLECTIVES),
    sizes: Sequence[int] = messages_alone.SIZES,
    ranks: Sequence[int] = (2,),
    rate: Sequence[float] = (),
    delay: Sequence[float] = (0.0,),
    messages: int = 16,
    tries: int = 1,
    apart: float = 0.0,
) -> Iterator[Point]:
    """In labs, by one of _LINKS, or as devices are joined, what is lacking; apart : starts of ranks [s]."""
    estimate_s = LAUNCH_S + len(collectives) * len(sizes) * budget.max_s
    in_lab = {"messages_per_sample": messages, "tries": tries} if rate else {}
    how: dict[str, Any] = {"apart_s": apart, **in_lab}

    def left(name: str, members: Ranks) -> dict[tuple[int, ...], list[str]]:
        """Return collectives by the sizes that they still lack."""
        path = table_path(here.out, "collectives", name)
        rows = store.load_table(path) if store.has_table(path) else pd.DataFrame()
        by_sizes: dict[tuple[int, ...], list[str]] = {}
        for each in collectives:
            by_sizes.setdefault(lacking(rows, each, sizes, members.count), []).append(
                each
            )
        return {lacks: names for lacks, names in by_sizes.items() if lacks}

    def measure(name: str, members: Ranks) -> pd.DataFrame:
        frames = []
        for lacks, names in left(
            name, members
        ).items():  # in one launch, if all lack the same
            settings = messages_alone.CollectivesSettings(names, lacks, budget, **how)
            tables = members.run(messages_alone.collectives_job, settings, estimate_s)
            frames.append(tables["collectives"])
        return pd.concat(frames, ignore_index=True)

    places = {link: _LINKS[link](here.device)} if link else {}
    joined = () if link or rate else rank_counts(here)
    for count in joined:
        places[f"{'nccl' if here.on_gpu else 'loopback'}-p{count}"] = Ranks.of(
            count, here.device
        )
    for count, bits, delay_s in product(ranks, rate, delay):
        members, name = ranks_in_lab(count, bits, delay_s)
        places[name] = members
    for name, members in places.items():
        missing, run = partial(left, name, members), partial(measure, name, members)
        point = Point("collectives", name, run, estimate_s, left=missing)
        yield on_gpus(members.count * (here.on_gpu and bool(joined)), point)


SMALL_BYTES = 64 * KIB  # a message that is all start-up


@kind("slowdown")
def slowdowns(
    here: Here,
    networks: Networks,
    ranks: Sequence[int] = (2,),
    rate: Sequence[float] = (0.0,),
    delay: Sequence[float] = (0.0,),
    budget: Budget = SLOWDOWN,
) -> Iterator[Point]:
    """Compute beside messages of DDP's buckets: the smallest, the largest, and one that is all start-up."""

    def measure(members: Ranks, name: str, batch: int) -> Tables:
        sizes = bucket_sizes(name)
        few = sorted({min(SMALL_BYTES, sizes[0]), sizes[0], sizes[-1]})
        settings = slowdown.SlowdownSettings(
            name, batch, few, budget.max_s, budget.min_repeats
        )
        return members.run(slowdown.slowdown_job, settings, estimate_s)

    estimate_s = LAUNCH_S + BUILD_S + 3 * budget.max_s
    for count, bits, delay_s, (name, batch) in product(ranks, rate, delay, networks):
        members, key = place_of(here, count, bits, delay_s)
        run = partial(measure, members, name, batch)
        point = Point("slowdown", f"{name}-b{batch}-{key}", run, estimate_s)
        yield on_gpus(count * (here.on_gpu and not bits), point)


def place_of(
    here: Here, count: int, bits: float, delay_s: float = 0.0
) -> tuple[Ranks, str]:
    """Return ranks as devices are joined, or in a lab where there is a rate, and their name in tables."""
    if bits:
        members, name = ranks_in_lab(count, bits, delay_s)
        return members, name.removeprefix("lab-")
    return Ranks.of(
        count, here.device
    ), f"p{count}-{'nccl' if here.on_gpu else 'loopback'}"


def bucket_sizes(network: str) -> list[int]:
    """Return bytes of DDP's buckets of a network, from the smallest to the largest."""
    with torch.device("meta"):
        sizes = [
            p.nbytes for p in registry.build(network).parameters() if p.requires_grad
        ]
    work = Workload.from_arrays(0.0, [0.0] * len(sizes), sizes[::-1])
    return sorted(make_plan("ddp", work).group_bytes(work).tolist())


@kind("training")
def trainings(
    here: Here,
    networks: Networks,
    repeats: int,
    iterations: int,
    ranks: Sequence[int] = (),
    rate: Sequence[float] = (0.0,),
    delay: Sequence[float] = (0.0,),
    plans: Sequence[str] = (training.OWN_PLAN,),
    accumulate: int = 1,
    predict: bool = False,
) -> Iterator[Point]:
    """Training on several ranks as DDP itself sends; under plans or in labs, for what is measured there.

    predict : whether models say before the first of all such points what its cases will take
    """
    each_s = accumulate * EXPOSED_S / (10 if here.on_gpu else 2)
    estimate_s = (
        LAUNCH_S + len(plans) * (repeats * 3 * iterations + training.WARMUP) * each_s
    )

    def measure(members: Ranks, at: Trained | None, name: str, batch: int) -> Tables:
        group_bytes: Mapping[str, Sequence[int]] = {training.OWN_PLAN: []}
        how: dict[str, Any] = {"accumulate": accumulate}
        if at:
            how |= {"profile_sha256": at.profile.sha256, "predicted": at.predicted_by()}
            group_bytes = at.group_bytes()
        settings = training.TrainingSettings(
            name, batch, group_bytes, repeats, iterations, **how
        )
        return members.run(training.training_job, settings, estimate_s)

    places = product(ranks or rank_counts(here), rate, delay, networks)
    for count, bits, delay_s, (name, batch) in places:
        members, place = place_of(here, count, bits, delay_s)
        at, key = None, f"{name}-b{batch}-p{count}"
        if bits or [*plans] != [training.OWN_PLAN]:
            key = f"training-{name}-{place}"
            kind = f"lab-{place}" if bits else f"{place.partition('-')[2]}-p{count}"
            of = f"{name}-b{batch}-{place}", name, batch, count, here.device
            at = Trained(here.out, kind, *of, plans, accumulate)
        run, tables = (
            partial(measure, members, at, name, batch),
            training.training_job.tables,
        )
        asked = (key, at) if predict and at else None
        point = Point("training", key, run, estimate_s, tables, predicted=asked)
        yield on_gpus(count * (here.on_gpu and not bits), point)


@kind("replay")
def replays(
    here: Here,
    networks: Networks,
    ranks: Sequence[int],
    rate: Sequence[float],
    plans: Sequence[str],
    rounds: int,
) -> Iterator[Point]:
    """Yield replays of the profiles and the calibration at hand, under DISTINCT_PLANS plans of each."""

    def measure(members: Ranks, lab_name: str) -> Tables:
        rows = store.load_table(recorded(here.out, "collectives", lab_name))
        cost, cases = (
            table_cost(rows[rows["collective"] == "all_reduce"], members.count),
            [],
        )
        with members.place() as place:
            for name, batch in networks:
                profile = store.read_profile(
                    recorded(here.out, "layers", f"{name}-b{batch}-r1")
                )
                planned = (
                    replay.plan_case(profile, spec, cost, place) for spec in plans
                )
                distinct = {case.plan.ends: case for case in planned}
                cases += [*distinct.values()][:DISTINCT_PLANS]
            played = replay.replay(place, members.count, cases, rounds, tries=TRIES)
        return {
            "runs": played.runs,
            "timeline": played.timeline[played.timeline["rank"] == 0],
        }

    estimate_s = LAUNCH_S + len(networks) * DISTINCT_PLANS * rounds * EXPOSED_S
    for count, bits in product(ranks, rate):
        members, lab_name = ranks_in_lab(count, bits)
        name, run = (
            f"replay-{lab_name.removeprefix('lab-')}",
            partial(measure, members, lab_name),
        )
        yield Point("replay", name, run, estimate_s, ["runs", "timeline"])
