"""The kinds of points that a file may ask for: what each measures, its name, and about how long it takes.

A kind is a function here, or in `ddlkit.run.sessions.lab_kinds` where ranks share something: a new
measurement is one more such function. What measures is imported when a point needs it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pandas as pd
import torch

from ddlkit import machine, store
from ddlkit.core.errors import UserError
from ddlkit.core.link import COLLECTIVES
from ddlkit.core.units import parse_bits_per_s
from ddlkit.core.workload import LayerProfile
from ddlkit.run.instruments.clock import Budget
from ddlkit.run.jobs.launch import MEETING_S, Loopback, launch
from ddlkit.run.lab.conditions import parse as parse_conditions
from ddlkit.run.lab.network import Lab, LabShape
from ddlkit.run.sessions.grammar import (
    Batched,
    Key,
    Seeds,
    Sizes,
    Words,
    kind,
    mapping_of,
    one_of,
    whole,
)
from ddlkit.run.sessions.session import Point, Tables, Unavailable, say, table_path

OWN_PLAN = "ddp"  # DDP's own rule for buckets
LAUNCH_S = 10.0  # starting ranks
PATIENCE = 3.0  # ranks that take this many times what was estimated are ended
BUILD_S = 2.0  # building a network, moving it to the device, counting its FLOP
GRAPH_S = 0.4  # an iteration as a CUDA graph

# GFLOP of a forward pass on one image, to know how long a point will take.
_GFLOP = {
    **{"lenet5": 0.001, "alexnet": 1.4, "googlenet": 3.0, "vgg16": 31.0, "vgg19": 39.3},
    **{"resnet18_64": 0.3, "resnet50_64": 0.7, "googlenet_64": 0.25},
    **{"vgg16_cifar": 0.63, "squeezenet1_1": 0.7},
    **{"resnet18": 3.6, "resnet50": 8.2, "resnet101": 15.7, "resnet152": 23.1, "vit_b_16": 35.1},
}
_OTHER_GFLOP = 10.0
# FLOP/s that networks reach, cautiously: on an H200, and on two cores.
_RATE = {"fp32": 25e12, "tf32": 80e12, "bf16": 150e12}
_CPU_RATE = 80e9


class Here(NamedTuple):
    """Where a session measures: the device, the number that marks its own tables, and the directory."""

    device: str
    session: int
    out: Path

    @property
    def on_gpu(self) -> bool:
        """Whether GPUs are measured."""
        return self.device == "cuda"


def measuring(name: str) -> Any:
    """Return the module that measures that, imported now: most need torch."""
    return import_module(f"ddlkit.run.{name if '.' in name else f'measure.{name}'}")


# -- what a kind's arguments may be ---


def made(module: str, attribute: str) -> Callable[[Any], Any]:
    """Return a check for a mapping of the arguments of a class that measures."""
    return lambda value: mapping_of(getattr(measuring(module), attribute))(value)


def _sides(value: Any) -> dict[str, list[int]]:
    if not isinstance(value, dict) or not value.keys() <= set(_RATE):
        raise ValueError(f"must be a mapping of {', '.join(_RATE)} to sides of matrices")
    return {precision: [whole(1)(side) for side in sides] for precision, sides in value.items()}


Timed = Annotated[Budget, Key(mapping_of(Budget))]
Precisions = Annotated[Sequence[str], Key(one_of(tuple(_RATE)), many=True)]
Collectives = Annotated[Sequence[str], Key(one_of(tuple(COLLECTIVES)), many=True)]
Sides = Annotated[dict[str, list[int]], Key(_sides)]
Recipe = Annotated[Any, Key(made("convergence", "Recipe"))]
Pictures = Annotated[Any, Key(made("inputs", "Shape"))]
Changes = Annotated[dict[str, Any], Key(mapping_of(dict))]

# -- what points are made of ---


def best_device() -> str:
    """Return where to measure if nothing is said: "cuda" where torch sees a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def on_gpus(gpus: int, point: Point) -> Point:
    """Return the point, or where there are fewer GPUs than it needs, one that says so."""
    there = torch.cuda.device_count()

    def refuse() -> Tables:
        raise Unavailable(f"needs {gpus} GPUs, here {'is 1' if there == 1 else f'are {there}'}")

    return point if there >= gpus else replace(point, measure=refuse, estimate_s=0.0)


def iteration_s(name: str, batch: int, precision: str, device: str) -> float:
    """Return about how many seconds an iteration computes."""
    rate = _RATE[precision] if device == "cuda" else _CPU_RATE
    return 3e9 * _GFLOP.get(name, _OTHER_GFLOP) * batch / rate


def timed_s(budget: Budget, repeat_s: float) -> float:
    """Return about how long a measurement of something that takes ``repeat_s`` goes on."""
    longest_s = min(budget.max_s, budget.max_repeats * repeat_s)
    return budget.warmup * repeat_s + max(longest_s, budget.min_repeats * repeat_s)


def rank_counts(device: str) -> list[int]:
    """Return two ranks, as in `sharing`, and where there are more GPUs, one on each of them."""
    return sorted({2, torch.cuda.device_count()} - {0, 1}) if device == "cuda" else [2]


def meeting(device: str) -> dict[str, Any]:
    """Return how ranks meet that measure a device: what else the machine has is not asked."""
    return {"backend": "nccl" if device == "cuda" else "gloo", "timeout_s": MEETING_S}


def lab_of(ranks: int, rate: str, delay: str = "") -> Lab:
    """Return a lab; with a delay, its links are emulated."""
    conditions = parse_conditions({"delay": delay}) if delay else None
    return Lab(LabShape(ranks, parse_bits_per_s(rate), conditions=conditions))


def launched(
    here: Here, what: str, name: str, job: Any, settings: Any, ranks: int, estimate_s: float
) -> Point:
    """Return the point of a job's tables, by ranks that meet over loopback, or each on its GPU."""
    how: dict[str, Any] = {"place": Loopback(), "join": meeting(here.device)}
    how |= {"timeout_s": PATIENCE * estimate_s}
    measure = partial(launch, job, settings, ranks=ranks, **how)
    return on_gpus(ranks * here.on_gpu, Point(what, name, measure, estimate_s, job.tables))


def sent(ranks: int, how: Mapping[str, Any], **settings: Any) -> pd.DataFrame:
    """Return rows of collectives that ranks measure who are started ``how``."""
    module = measuring("collectives")
    settings_of_job = module.CollectivesSettings(**settings)
    return launch(module.collectives_job, settings_of_job, ranks=ranks, **how)["collectives"]


def collectives_point(
    here: Here,
    name: str,
    ranks: int,
    send: Callable[..., pd.DataFrame],
    collectives: Sequence[str],
    sizes: Sequence[int],
    max_s: float,
) -> Point:
    """Return the point of a table of collectives, to which what it lacks of these sizes is added.

    send : measures ``collectives`` at ``sizes``, and gives rows of that table
    """
    path = table_path(here.out, "collectives", name)
    whole_size = measuring("collectives").whole_size

    def missing() -> dict[tuple[int, ...], list[str]]:
        """Collectives by the sizes that they still lack."""
        rows = store.load_table(path) if store.has_table(path) else None
        there = set() if rows is None else {*zip(rows["collective"], rows["bytes"], strict=True)}
        lacking: dict[tuple[int, ...], list[str]] = {}
        for collective in collectives:
            left = [n for n in sizes if (collective, whole_size(n, ranks)) not in there]
            lacking.setdefault(tuple(left), []).append(collective)
        return {left: names for left, names in lacking.items() if left}

    def measure() -> pd.DataFrame:
        rows = [send(collectives=names, sizes=left) for left, names in missing().items()]
        return pd.concat(rows, ignore_index=True)

    estimate_s = LAUNCH_S + len(collectives) * len(sizes) * max_s
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


# -- this machine --------------------------------------------------------------------------------


@kind("drift")
def drift(here: Here, moment: str, side: int, size: Sizes) -> Iterator[Point]:
    measure = partial(measuring("speed").measure_drift, moment, here.device, side, *size)
    yield Point("drift", f"s{here.session}-{moment}", measure, 4)


@kind("peaks")
def matrix_products(here: Here, sides: Sides, budget: Timed) -> Iterator[Point]:
    def measure() -> pd.DataFrame:
        peaks = partial(measuring("speed").measure_peaks, here.device, budget=budget)
        return pd.concat([peaks([name], many) for name, many in sides.items()], ignore_index=True)

    estimate_s = 1 + 1.5 * budget.max_s * sum(map(len, sides.values()))
    yield Point("peaks", here.device, measure, estimate_s)


@kind("copies")
def memory_copies(here: Here, budget: Timed, sizes: Sizes = ()) -> Iterator[Point]:
    speed = measuring("speed")
    sizes = sizes or speed.SIZES
    measure = partial(speed.measure_copies, here.device, sizes, budget)
    estimate_s = 3 + (5 if here.on_gpu else 1) * len(sizes) * budget.max_s
    yield Point("copies", here.device, measure, estimate_s)


@kind("input")
def input_alone(
    here: Here, budget: Timed, pictures: Pictures, batch: int, side: int
) -> Iterator[Point]:
    """Reading, decoding, a loader's workers and copying, each with nothing else going on."""
    inputs = measuring("inputs")
    measure = partial(inputs.measure_inputs, here.device, here.out, pictures, batch, side, budget)
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
    name, measure, estimate_s = measuring("contention").copy_case(here.device, brief)
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
    here: Here, networks: Batched, budget: Timed, precisions: Precisions = ("fp32",)
) -> Iterator[Point]:
    tables_of = measuring("layers").layer_tables
    for precision, (name, batch) in itertools.product(precisions, networks):
        measure = partial(tables_of, name, batch, here.device, precision, budget, None)
        # Each round is one iteration with hooks and one without.
        repeat_s = 2 * iteration_s(name, batch, precision, here.device)
        estimate_s = BUILD_S + timed_s(budget, repeat_s) + GRAPH_S * here.on_gpu
        key = f"{name}-b{batch}-{precision}"
        yield Point("layers", key, measure, estimate_s, ["layers", "samples"])


@kind("layers")
def layers_by_ranks(here: Here, networks: Batched, ranks: int, budget: Timed) -> Iterator[Point]:
    """On all cores, by ``ranks`` ranks at the same time; one needs no launch."""
    layers = measuring("layers")
    for name, batch in networks:
        if ranks == 1:
            cores = machine.cores()
            measure = partial(layers.layer_tables, name, batch, here.device, "fp32", budget, cores)
        else:
            settings = layers.LayersSettings({name: batch}, budget=budget)
            measure = partial(launch, layers.layers_job, settings, ranks=ranks, place=Loopback())
        repeat_s = 2 * ranks * iteration_s(name, batch, "fp32", here.device)
        estimate_s = BUILD_S + LAUNCH_S * (ranks > 1) + timed_s(budget, repeat_s)
        key = f"{name}-b{batch}-r{ranks}"
        yield Point("layers", key, measure, estimate_s, ["layers", "samples"])


@kind("sharing")
def training_beside_messages(
    here: Here,
    networks: Batched,
    budget: Timed,
    precisions: Precisions = ("fp32",),
    brief: bool = False,
) -> Iterator[Point]:
    beside = measuring("sharing_training")
    compared = beside.settings(brief)
    for precision, (name, batch) in itertools.product(precisions, networks):
        how: dict[str, Any] = {"device": here.device, "precision": precision}
        measure = partial(beside.measure_sharing, name, batch, compared, budget, **how)
        # Each round is an iteration without messages, one by each setting, and its messages alone.
        repeat_s = 1.2 * (1 + len(compared)) * iteration_s(name, batch, precision, here.device)
        estimate_s = 2 * BUILD_S + timed_s(budget, repeat_s)
        yield Point("sharing", f"{name}-b{batch}-{precision}", measure, estimate_s)


@kind("convergence")
def convergences(here: Here, recipe: Recipe, seeds: Seeds) -> Iterator[Point]:
    """All networks of one seed before the next seed."""
    convergence = measuring("convergence")
    how: dict[str, Any] = {"device": here.device, "threads": machine.cores(), "say": say}
    for seed, name in itertools.product(seeds, convergence.NETWORKS):
        measure = partial(convergence.train, name, seed, recipe, **how)
        key = f"{name}-e{recipe.epochs}-s{seed}"
        yield Point("convergence", key, measure, 5.0 * recipe.epochs)


@kind("convergence")
def sparse_convergences(
    here: Here, seeds: Seeds, recipe: Changes, networks: Words = ()
) -> Iterator[Point]:
    """omgs Fig 3, on a core of the processor, seed by seed.

    recipe : what differs from each network's own, as {"epochs": 3}
    """
    sparse = measuring("convergence")
    for seed, name in itertools.product(seeds, networks or tuple(sparse.TASKS)):
        for settings in sparse.trainings(name, seed, recipe):
            epochs, method = settings.recipe.epochs, settings.method.replace("+", "-")
            key = f"{name}-{method}-e{epochs}-s{seed}"
            measure = partial(sparse.train_sparse, settings, say=say)
            yield Point("convergence", key, measure, 4.0 * epochs, ["sparse_convergence"])


# -- several ranks -------------------------------------------------------------------------------


# What collectives can show where there is one device is labelled as a link of its own.
_LINKS: dict[str, tuple[int, Loopback, dict[str, Any]]] = {
    "loopback-p2": (2, Loopback(), meeting("cpu")),
    "one-rank": (1, Loopback(name="one-rank"), {}),  # joins as its device does
    "gloo-cuda-p2": (2, Loopback(name="host"), {"backend": "gloo", "on_gpu": True}),
}


@kind("collectives")
def collectives(
    here: Here,
    budget: Timed,
    link: str = "",
    collectives: Collectives = tuple(COLLECTIVES),
    sizes: Sizes = (),
) -> Iterator[Point]:
    """By one of _LINKS, or else as the devices are joined: by NCCL between GPUs, gloo between CPUs."""
    gpus, sizes = here.on_gpu and not link, sizes or measuring("collectives").SIZES
    links = {link: _LINKS[link]} if link else {}
    for ranks in rank_counts(here.device) if not link else ():
        links[f"nccl-p{ranks}" if gpus else f"loopback-p{ranks}"] = (ranks, Loopback(), {})
    for name, (ranks, place, join) in links.items():
        how: dict[str, Any] = {"place": place, "join": meeting(here.device) | join}
        how |= {"timeout_s": PATIENCE * (LAUNCH_S + len(collectives) * len(sizes) * budget.max_s)}
        send = partial(sent, ranks, how, budget=budget)
        point = collectives_point(here, name, ranks, send, collectives, sizes, budget.max_s)
        yield on_gpus(ranks * gpus, point)


@kind("training")
def trainings(here: Here, networks: Batched, repeats: int, iterations: int) -> Iterator[Point]:
    """Training as DDP itself sends, on several ranks."""
    training = measuring("training")
    rounds = repeats * (2 * iterations + 5)  # half of them without exchange
    for ranks, (name, batch) in itertools.product(rank_counts(here.device), networks):
        settings = training.TrainingSettings(name, batch, {OWN_PLAN: []}, repeats, iterations)
        estimate_s = LAUNCH_S + 2 * rounds * iteration_s(name, batch, "fp32", here.device)
        job, key = training.training_job, f"{name}-b{batch}-p{ranks}"
        yield launched(here, "training", key, job, settings, ranks, estimate_s)
