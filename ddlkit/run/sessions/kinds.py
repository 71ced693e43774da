"""The kinds of points that a suite may hold: what each measures, its name, and about how long it takes.

A kind is a function here: its name is what the suite's file says under "measure", its arguments are the
other keys there, and their types say how these are checked. A new measurement is one more such function.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_type_hints

import pandas as pd
import torch

from ddlkit import machine, store
from ddlkit.core.cost import MessageCost
from ddlkit.core.errors import UserError
from ddlkit.core.fit import fit
from ddlkit.core.link import COLLECTIVES
from ddlkit.core.units import parse_bits_per_s, parse_bytes, parse_seconds
from ddlkit.core.workload import LayerProfile
from ddlkit.model import make_plan
from ddlkit.papers import networks as published
from ddlkit.run.instruments.clock import Budget
from ddlkit.run.jobs.job import Job, S
from ddlkit.run.jobs.launch import MEETING_S, Loopback, Place, launch
from ddlkit.run.lab.conditions import parse
from ddlkit.run.lab.network import Lab, LabShape
from ddlkit.run.lab.replay import MESSAGES_PER_SAMPLE, calibrate, choose_join, replay
from ddlkit.run.lab.script import PlannedCase, plan_case
from ddlkit.run.measure import (
    contention,
    controls,
    inputs,
    nccl_one_gpu,
    selection,
    sharing_training,
    sparse_convergence,
    speed,
)
from ddlkit.run.measure.collectives import SIZES, CollectivesSettings, collectives_job
from ddlkit.run.measure.convergence import NETWORKS, Recipe, train
from ddlkit.run.measure.layers import PRECISIONS, LayersSettings, layer_tables, layers_job
from ddlkit.run.measure.shared_kernels import SharedKernelsSettings, shared_kernels_job
from ddlkit.run.measure.shared_messages import SharedMessagesSettings, shared_messages_job
from ddlkit.run.measure.shared_training import PERIODS, SharedTrainingSettings, shared_training_job
from ddlkit.run.measure.shares import Policy
from ddlkit.run.measure.sparse_convergence import TASKS
from ddlkit.run.measure.training import OWN_PLAN, TrainingSettings, training_job
from ddlkit.run.sessions import reader
from ddlkit.run.sessions.reader import Key, count, number, one_of, whole
from ddlkit.run.sessions.session import Point, Tables, Unavailable, say, table_path

DISTINCT_PLANS = 8
LAUNCH_S = 10.0  # starting ranks
PATIENCE = 3.0  # ranks that take this many times what was estimated are ended
BUILD_S = 2.0  # building a network, moving it to the device, counting its FLOP
GRAPH_S = 0.4  # an iteration as a CUDA graph
TRIES = 3  # of each size, while the host disturbs

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
_USUAL_BYTES = 45e6  # of a network's gradients
_EXPOSED_S = 2.0  # an iteration in the lab: computation about as long as communication


# -- what a file may say -------------------------------------------------------------------------


class Here(NamedTuple):
    """Where a session measures: the device, the number that marks its own tables, and the directory."""

    device: str
    session: int
    out: Path


Maker = Callable[..., Iterator[Point]]


class Kind(NamedTuple):
    """How to make points of what a suite says.

    what : they belong to; lab : whether they need one; keys : of the file, each an argument of ``make``
    """

    what: str
    lab: bool
    keys: Mapping[str, Key]
    make: Maker


KINDS: dict[str, Kind] = {}


def _mapping_of(make: Callable[..., Any]) -> reader.Check:
    """A check for a mapping of the arguments of ``make``."""

    def check(value: Any) -> Any:
        try:
            return make(**value)
        except TypeError as error:
            raise ValueError(
                f"must be a mapping of {', '.join(signature(make).parameters)}"
            ) from error

    return check


def _policy(value: Any) -> str:
    """Who may take how much, as it is written."""
    return Policy.parse(str(value)).name


def _volume(value: Any) -> tuple[int, int]:
    """Bytes and parts of "25MB in 4"; of one size in one part, without them.

    >>> _volume("25MB in 4"), _volume("1KiB")
    ((25000000, 4), (1024, 1))
    """
    size, _, parts = str(value).partition(" in ")
    return parse_bytes(size), int(parts or 1)


def _sides(value: Any) -> dict[str, list[int]]:
    if not isinstance(value, dict) or not value.keys() <= set(PRECISIONS):
        raise ValueError(f"must be a mapping of {', '.join(PRECISIONS)} to sides of matrices")
    return {precision: [count(side) for side in sides] for precision, sides in value.items()}


def _changes(value: Any) -> dict[str, Any]:
    """Some fields of a recipe, as they are written."""
    _mapping_of(Recipe)(value)
    return dict(value)


def _rate(value: Any) -> str:
    """A rate as it is written; "" for none."""
    return str(value) if value == "" or reader.rate(value) else ""


def _delay(value: Any) -> str:
    """A delay of each link as it is written; "" for a link that has a rate and nothing else."""
    if value and not isinstance(value, str):
        raise ValueError("must be a time with its unit, as 2ms")
    return str(value) if value == "" or parse_seconds(value) >= 0 else ""


Batched = Annotated[Sequence[tuple[str, int]], Key(reader.network, many=True)]
Precisions = Annotated[Sequence[str], Key(one_of(PRECISIONS), many=True)]
Collectives = Annotated[Sequence[str], Key(one_of(tuple(COLLECTIVES)), many=True)]
Plans = Annotated[Sequence[str], Key(reader.plan, many=True)]
Names = Annotated[Sequence[str], Key(str, many=True)]
Counts = Annotated[Sequence[int], Key(count, many=True)]
Numbers = Annotated[Sequence[float], Key(number(0, 1e9), many=True)]
Share = Annotated[float, Key(number(1e-9, 1))]
Sizes = Annotated[Sequence[int], Key(reader.sizes)]
Sides = Annotated[dict[str, list[int]], Key(_sides)]
Rate = Annotated[str, Key(_rate)]
Rates = Annotated[Sequence[str], Key(_rate, many=True)]
Delays = Annotated[Sequence[str], Key(_delay, many=True)]
Policies = Annotated[Sequence[str], Key(_policy, many=True)]
Volume = Annotated[tuple[int, int], Key(_volume)]
Volumes = Annotated[Sequence[tuple[int, int]], Key(_volume, many=True)]
KernelScale = Annotated[contention.Scale, Key(_mapping_of(contention.Scale))]
Density = Annotated[float, Key(number(0, 1))]
Changes = Annotated[dict[str, Any], Key(_changes)]
Pictures = Annotated[inputs.Shape, Key(_mapping_of(inputs.Shape))]
_PLAIN = {
    **{int: Key(count), str: Key(str), bool: Key(reader.truth)},
    **{Budget: Key(_mapping_of(Budget)), Recipe: Key(_mapping_of(Recipe))},
}


def kind(what: str, *, lab: bool = False) -> Callable[[Maker], Maker]:
    """Register a function as the kind of its own name; its arguments are the keys."""

    def register(make: Maker) -> Maker:
        keys = {}
        hints = get_type_hints(make, include_extras=True)
        for name, parameter in list(signature(make).parameters.items())[1:]:
            annotated = getattr(hints[name], "__metadata__", None)
            key = annotated[0] if annotated else _PLAIN[hints[name]]
            if parameter.default is not parameter.empty:
                key = key._replace(default=parameter.default)
            keys[name] = key
        KINDS[make.__name__] = Kind(what, lab, keys, make)
        return make

    return register


def best_device() -> str:
    """Where to measure if nothing is said: "cuda" where torch sees a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def _on_gpus(gpus: int, point: Point) -> Point:
    """The point, or where there are fewer GPUs than it needs, one that says so."""
    there = torch.cuda.device_count()

    def refuse() -> Tables:
        raise Unavailable(f"needs {gpus} GPUs, here {'is 1' if there == 1 else f'are {there}'}")

    return point if there >= gpus else replace(point, measure=refuse, estimate_s=0.0)


# -- this machine --------------------------------------------------------------------------------


@kind("drift")
def drift(here: Here, moment: str, side: int, size: Sizes) -> Iterator[Point]:
    measure = partial(speed.measure_drift, moment, here.device, side, *size)
    yield Point("drift", f"s{here.session}-{moment}", measure, 4)


@kind("peaks")
def matrix_products(here: Here, sides: Sides, budget: Budget) -> Iterator[Point]:
    def measure() -> pd.DataFrame:
        pairs = sides.items()
        frames = (speed.measure_peaks(here.device, [one], many, budget) for one, many in pairs)
        return pd.concat(frames, ignore_index=True)

    estimate_s = 1 + 1.5 * budget.max_s * sum(map(len, sides.values()))
    yield Point("peaks", here.device, measure, estimate_s)


@kind("copies")
def memory_copies(here: Here, budget: Budget, sizes: Sizes = speed.SIZES) -> Iterator[Point]:
    measure = partial(speed.measure_copies, here.device, sizes, budget)
    ways = 5 if here.device == "cuda" else 1
    yield Point("copies", here.device, measure, 3 + ways * len(sizes) * budget.max_s)


INPUT = "input"
"""Folder of all that is measured of the input: beside other tables, not among them."""


@kind("input")
def input_alone(
    here: Here, budget: Budget, pictures: Pictures, batch: int, side: int
) -> Iterator[Point]:
    """Reading, decoding, a loader's workers and copying, each with nothing else going on."""
    asked = inputs.Alone(pictures, batch, side)
    measure = partial(inputs.measure_inputs, here.device, here.out, asked, budget)
    estimate_s = 3 + 12 * budget.max_s
    yield Point("input", f"alone-{here.device}", measure, estimate_s, ["inputs"], INPUT)


@kind("selection")
def selections(here: Here, brief: bool = False) -> Iterator[Point]:
    for name, measure, estimate_s in selection.cases(here.device, brief):
        yield Point("selection", name, measure, estimate_s)


@kind("contention")
def kernels_beside_messages(here: Here, brief: bool = False) -> Iterator[Point]:
    for name, measure, estimate_s, gpus in contention.cases(here.device, brief):
        yield _on_gpus(gpus, Point("contention", name, measure, estimate_s))


@kind("contention")
def kernels_beside_copies(here: Here, brief: bool = False) -> Iterator[Point]:
    name, measure, estimate_s, _ = contention.copy_case(here.device, brief)
    yield Point("contention", name, measure, estimate_s)


@kind("one_gpu")
def two_ranks_on_one_gpu(here: Here, brief: bool = False) -> Iterator[Point]:
    """NCCL itself where there is one GPU; what it refuses for being too old takes no time."""
    pairs, settings = nccl_one_gpu.case(brief)
    measure = partial(nccl_one_gpu.measure_on_one_gpu, pairs, settings)
    estimate_s = 0.0 if nccl_one_gpu.unavailable() else 30.0 * len(pairs)
    yield Point("one_gpu", "nccl-one-gpu", measure, estimate_s, tables=["contention"])


# -- networks ------------------------------------------------------------------------------------


def _iteration_s(name: str, batch: int, precision: str, device: str) -> float:
    rate = _RATE[precision] if device == "cuda" else _CPU_RATE
    return 3e9 * _GFLOP.get(name, _OTHER_GFLOP) * batch / rate


def _timed_s(budget: Budget, repeat_s: float) -> float:
    """About how long a measurement of something that takes ``repeat_s`` goes on."""
    longest_s = min(budget.max_s, budget.max_repeats * repeat_s)
    return budget.warmup * repeat_s + max(longest_s, budget.min_repeats * repeat_s)


@kind("layers")
def layers(
    here: Here, networks: Batched, budget: Budget, precisions: Precisions = ("fp32",)
) -> Iterator[Point]:
    for precision in precisions:
        for name, batch in networks:
            measure = partial(layer_tables, name, batch, here.device, precision, budget, None)
            # Each round is one iteration with hooks and one without.
            repeat_s = 2 * _iteration_s(name, batch, precision, here.device)
            estimate_s = BUILD_S + _timed_s(budget, repeat_s) + GRAPH_S * (here.device == "cuda")
            key = f"{name}-b{batch}-{precision}"
            yield Point("layers", key, measure, estimate_s, tables=["layers", "samples"])


@kind("layers")
def layers_by_ranks(here: Here, networks: Batched, ranks: int, budget: Budget) -> Iterator[Point]:
    for name, batch in networks:
        yield layers_point(name, batch, ranks, budget, device=here.device)


def layers_point(
    name: str, batch: int, ranks: int, budget: Budget, *, device: str, folder: str = ""
) -> Point:
    """A network's layers, on all cores, by ``ranks`` ranks at the same time; one needs no launch.

    device : of one rank; several take what `launch` gives them
    """
    measure: Callable[[], Tables]
    measure = partial(layer_tables, name, batch, device, "fp32", budget, machine.cores())
    if ranks > 1:
        settings = LayersSettings({name: batch}, budget=budget)
        measure = partial(launch, layers_job, settings, ranks=ranks, place=Loopback())
    repeat_s = 2 * ranks * _iteration_s(name, batch, "fp32", device)
    estimate_s = BUILD_S + LAUNCH_S * (ranks > 1) + _timed_s(budget, repeat_s)
    key = f"{name}-b{batch}-r{ranks}"
    return Point("layers", key, measure, estimate_s, ["layers", "samples"], folder)


@kind("sharing")
def training_beside_messages(
    here: Here,
    networks: Batched,
    budget: Budget,
    precisions: Precisions = ("fp32",),
    brief: bool = False,
) -> Iterator[Point]:
    compared = sharing_training.settings(brief)
    for precision, (name, batch) in itertools.product(precisions, networks):
        how: dict[str, Any] = {"device": here.device, "precision": precision}
        measure = partial(sharing_training.measure_sharing, name, batch, compared, budget, **how)
        # Each round is an iteration without messages, one by each setting, and its messages alone.
        repeat_s = 1.2 * (1 + len(compared)) * _iteration_s(name, batch, precision, here.device)
        estimate_s = 2 * BUILD_S + _timed_s(budget, repeat_s)
        yield Point("sharing", f"{name}-b{batch}-{precision}", measure, estimate_s)


@kind("convergence")
def convergences(here: Here, recipe: Recipe, seeds: Numbers) -> Iterator[Point]:
    """All networks of one seed before the next seed."""
    how: dict[str, Any] = {"device": here.device, "threads": machine.cores(), "say": say}
    for seed in map(int, seeds):
        for name in NETWORKS:
            measure = partial(train, name, seed, recipe, **how)
            key = f"{name}-e{recipe.epochs}-s{seed}"
            yield Point("convergence", key, measure, 5.0 * recipe.epochs)


def _named(schema: str, measure: Callable[[], pd.DataFrame]) -> Tables:
    """The rows, of the table that they are."""
    return {schema: measure()}


@kind("convergence")
def sparse_convergences(
    here: Here, seeds: Numbers, recipe: Changes, networks: Names = tuple(TASKS)
) -> Iterator[Point]:
    """omgs Fig 3, on a core of the processor: constant densities first, seed by seed, then schedules.

    recipe : what differs from each network's own, as {"epochs": 3}
    """
    made = itertools.product(sparse_convergence.SCHEDULES, map(int, seeds), networks)
    for schedule, seed, name in made:
        for settings in sparse_convergence.trainings(name, seed, recipe, schedule):
            epochs = settings.recipe.epochs
            method = settings.method.replace("+", "-")
            words = [name, method, f"e{epochs}", f"s{seed}"]
            key = "-".join(words if schedule == "constant" else [*words, schedule])
            train_it = partial(sparse_convergence.train, settings, say=say)
            measure = partial(_named, "sparse_convergence", train_it)
            yield Point("convergence", key, measure, 4.0 * epochs, ["sparse_convergence"])


# -- several ranks -------------------------------------------------------------------------------


def _rank_counts(device: str) -> list[int]:
    """Two ranks, as in `sharing`, and where there are more GPUs, one on each of them."""
    return sorted({2, torch.cuda.device_count()} - {0, 1}) if device == "cuda" else [2]


def _launched(
    job: Job[S], settings: S, estimate_s: float, **how: Any
) -> Callable[[], dict[str, pd.DataFrame]]:
    """A job on ranks of this machine, which ends whatever happens: one that hangs costs little more."""
    how = {"place": Loopback(), **how, "timeout_s": PATIENCE * estimate_s}
    return partial(launch, job, settings, **how)


def _join(device: str) -> dict[str, Any]:
    """How ranks meet that measure a device: what else the machine has is not asked."""
    return {"backend": "nccl" if device == "cuda" else "gloo", "timeout_s": MEETING_S}


# What collectives can show where there is one device is labelled as a link of its own.
_LINKS: dict[str, tuple[int, Loopback, dict[str, Any]]] = {
    "loopback-p2": (2, Loopback(), _join("cpu")),
    "one-rank": (1, Loopback(name="one-rank"), {}),  # joins as its device does
    "gloo-cuda-p2": (2, Loopback(name="host"), {"backend": "gloo", "on_gpu": True}),
}


@kind("collectives")
def collectives(
    here: Here,
    budget: Budget,
    link: str = "",
    collectives: Collectives = tuple(COLLECTIVES),
    sizes: Sizes = SIZES,
) -> Iterator[Point]:
    """By one of _LINKS, or else as the devices are joined: by NCCL between GPUs, gloo between CPUs."""
    gpus, own = here.device == "cuda" and not link, _join(here.device)
    links = {link: _LINKS[link]} if link else {}
    for ranks in _rank_counts(here.device) if not link else ():
        links[f"nccl-p{ranks}" if gpus else f"loopback-p{ranks}"] = (ranks, Loopback(), {})
    estimate_s = LAUNCH_S + len(collectives) * len(sizes) * budget.max_s
    settings = CollectivesSettings(collectives, sizes, budget)
    for name, (ranks, place, join) in links.items():
        how: dict[str, Any] = {"ranks": ranks, "place": place, "join": own | join}
        measure = _launched(collectives_job, settings, estimate_s, **how)
        yield _on_gpus(ranks * gpus, Point("collectives", name, measure, estimate_s))


@kind("training")
def trainings(here: Here, networks: Batched, repeats: int, iterations: int) -> Iterator[Point]:
    """Training as DDP itself sends, on several ranks."""
    rounds = repeats * (2 * iterations + 5)  # half of them without exchange
    for ranks in _rank_counts(here.device):
        for name, batch in networks:
            settings = TrainingSettings(name, batch, {OWN_PLAN: []}, repeats, iterations)
            key = f"{name}-b{batch}-p{ranks}"
            iteration_s = _iteration_s(name, batch, "fp32", here.device)
            estimate_s = LAUNCH_S + 2 * rounds * iteration_s
            join = _join(here.device)
            measure = _launched(training_job, settings, estimate_s, ranks=ranks, join=join)
            point = Point("training", key, measure, estimate_s, training_job.tables)
            yield _on_gpus(ranks if here.device == "cuda" else 0, point)


# -- sharing resources ---------------------------------------------------------------------------


@kind("controls")
def controls_of_communication(here: Here) -> Iterator[Point]:
    """By what communication can be given more or less."""
    yield Point("controls", here.device, controls.offered, 2.0)


def _sharing(
    here: Here,
    name: str,
    job: Job[S],
    make: Callable[[], S],
    each: tuple[str, str],
    work_s: float,
    without: Sequence[str] = (),
) -> Point:
    """A point of two ranks that share a machine's cores with what they send.

    each : rate and delay of the link; without a rate, ranks talk as the devices are joined
    make : the settings, once what they need is measured; work_s : without starting anything
    without : tables that these settings leave out
    """
    rate, delay = each
    link = f"lab-p2-{rate}" if rate else "loopback-p2"
    estimate_s = LAUNCH_S + work_s

    def measure() -> Tables:
        settings = make()
        with _lab(2, rate, delay) if rate else nullcontext(Loopback()) as place:
            how: dict[str, Any] = {"place": place, "join": _join("cpu") | {"torch_threads": 1}}
            return launch(job, settings, ranks=2, timeout_s=60 + 4 * estimate_s, **how)

    named = "-".join(filter(None, (name, link, delay and f"delay{delay}")))
    tables = [name for name in job.tables if name not in without]
    return Point("sharing", named, measure, estimate_s, tables)


_STARVED = 50
"""Times as long as another takes a configuration whose messages computing keeps from their cores: 14 to 52
on two processors."""


def _send_s(n_bytes: float, rate: str) -> float:
    """About how long an all-reduce between two ranks takes."""
    return 8 * n_bytes / (parse_bits_per_s(rate) if rate else 2e10)


@kind("sharing")
def messages_by_share(
    here: Here,
    policies: Policies,
    messages: Volumes,
    name: str = "alone",
    repeats: int = 6,
    rate: Rates = ("",),
) -> Iterator[Point]:
    """All-reduces alone, by what communication may take."""
    for bits in rate:
        make = partial(SharedMessagesSettings, policies, messages, repeats)
        all_s = sum(_send_s(n_bytes, bits) for n_bytes, _ in messages)
        work_s = 2.0 + 1.3 * repeats * len(policies) * all_s
        yield _sharing(here, name, shared_messages_job, make, (bits, ""), work_s)


@kind("sharing")
def kernels_by_share(
    here: Here,
    policies: Policies,
    kernels: Names,
    scale: KernelScale,
    message: Volume,
    name: str = "beside",
    repeats: int = 6,
    rate: Rates = ("",),
) -> Iterator[Point]:
    """Kernels beside all-reduces, by what communication may take; on processors."""
    settings = SharedKernelsSettings(policies, kernels, scale, *message, repeats)
    for bits in rate:
        each_s = 0.2 + 2.5 * max(0.15, _send_s(message[0], bits))
        starved = sum("idle" in policy for policy in policies)
        rows = len(policies) + (_STARVED - 1) * starved
        work_s = 2.0 + repeats * rows * len(kernels) * each_s
        yield _sharing(here, name, shared_kernels_job, lambda: settings, (bits, ""), work_s)


@kind("sharing")
def training_by_share(
    here: Here,
    networks: Batched,
    policies: Policies,
    name: str = "",
    repeats: int = 6,
    iterations: int = 2,
    empty: Annotated[int, Key(whole(0))] = 0,
    rate: Rates = ("",),
    delay: Annotated[str, Key(_delay)] = "",
    plans: Plans = (OWN_PLAN,),
) -> Iterator[Point]:
    """Training, by what communication may take: a table for each network, link and name."""
    batches: dict[str, list[int]] = {}
    for network, batch in networks:
        batches.setdefault(network, []).append(batch)

    def settings(network: str) -> SharedTrainingSettings:
        sizes: dict[str, Sequence[int]] = {spec: [] for spec in plans}
        if set(plans) - {OWN_PLAN}:
            workload = _profile(here.out, network, batches[network][0], 2).workload()
            made = {spec: make_plan(spec, workload) for spec in plans if spec != OWN_PLAN}
            sizes |= {spec: plan.group_bytes(workload).tolist() for spec, plan in made.items()}
        counts = repeats, iterations, empty
        return SharedTrainingSettings(network, batches[network], policies, sizes, *counts)

    for network, bits in itertools.product(batches, rate):
        computing_s = [2 * _iteration_s(network, n, "fp32", "cpu") for n in batches[network]]
        sending_s = len(computing_s) * _send_s(_USUAL_BYTES, bits)
        each = repeats * len(plans) * (len(policies) + 1)
        alone_s = (1 + empty) * bool(empty) * sum(computing_s)
        work_s = 3.0 + each * ((1 + iterations) * (sum(computing_s) + sending_s) + alone_s)
        make = partial(settings, network)
        named = "-".join(filter(None, (network, name)))
        lacks = [] if empty else [PERIODS]
        yield _sharing(here, named, shared_training_job, make, (bits, delay), work_s, lacks)


# -- the lab -------------------------------------------------------------------------------------


def _lab(ranks: int, rate: str, delay: str = "") -> Lab:
    """With a delay, its links are emulated."""
    conditions = parse({"delay": delay}) if delay else None
    return Lab(LabShape(ranks, parse_bits_per_s(rate), conditions=conditions))


def _send(ranks: int, rate: str, delay: str = "", **how: Any) -> pd.DataFrame:
    """Collectives over a link of the lab or, without a rate, over loopback."""
    if not rate:
        settings = CollectivesSettings(**how)
        how = {"place": Loopback(), "join": _join("cpu")}
        return launch(collectives_job, settings, ranks=ranks, **how)["collectives"]
    with _lab(ranks, rate, delay) as place:
        return calibrate(place, **how)


@kind("collectives", lab=True)
def collectives_in_lab(
    here: Here,
    ranks: Counts,
    rate: Rates,
    collectives: Collectives,
    budget: Budget,
    delay: Delays = ("",),
    sizes: Sizes = SIZES,
    messages: int = MESSAGES_PER_SAMPLE,
    tries: int = 1,
) -> Iterator[Point]:
    """A table for each lab; with a delay, over emulated links. ``messages`` of a sample."""
    how: dict[str, Any] = {"collectives": collectives, "budget": budget, "sizes": sizes}
    how |= {"messages_per_sample": messages, "tries": tries}
    estimate_s = LAUNCH_S + len(collectives) * len(sizes) * budget.max_s
    for workers, bits, late in itertools.product(ranks, rate, delay):
        name = f"lab-p{workers}-{bits}" + (f"-delay{late}" if late else "")
        measure = partial(_send, workers, bits, late, **how)
        yield Point("collectives", name, measure, estimate_s)


@kind("tensors")
def tensors(
    here: Here, network: str, ranks: int, budget: Budget, rate: Rate = ""
) -> Iterator[Point]:
    """All-reduces of each size that a network's tensors have."""
    sizes = sorted({4 * elements for elements in published.parameters(network)})  # float32
    how: dict[str, Any] = {"collectives": ["all_reduce"], "sizes": sizes, "budget": budget}

    def measure() -> pd.DataFrame:
        found = _send(ranks, rate, tries=TRIES, **how)
        found.insert(0, "network", network)
        return found

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

    def measure(name: str, batch: int) -> Tables:
        profile, cost = _profile(here.out, name, batch, ranks), _cost(here.out, ranks, rate)
        workload = profile.workload()
        made = {spec: make_plan(spec, workload, cost) for spec in plans}
        group_bytes = {spec: plan.group_bytes(workload).tolist() for spec, plan in made.items()}
        settings = TrainingSettings(
            name, batch, group_bytes, repeats, iterations, profile_sha256=profile.sha256
        )
        with _lab(ranks, rate) as place:
            return launch(training_job, settings, ranks=ranks, place=place, join=choose_join())

    estimate_s = LAUNCH_S + len(plans) * repeats * (iterations + 2) * 2 * _EXPOSED_S
    for name, batch in networks:
        key, run = f"training-{name}-p{ranks}-{rate}", partial(measure, name, batch)
        yield Point("training", key, run, estimate_s, tables=training_job.tables)


@kind("replay", lab=True)
def replays(
    here: Here, networks: Batched, ranks: int, rate: Rate, plans: Plans, rounds: int
) -> Iterator[Point]:
    """Replays of the profiles and the calibration at hand."""

    def measure() -> Tables:
        cost = _cost(here.out, ranks, rate)
        profiles = [_profile(here.out, name, batch, 1) for name, batch in networks]
        with _lab(ranks, rate) as place:
            cases = [case for one in profiles for case in replay_cases(one, plans, cost, place)]
            found = replay(place, ranks, cases, rounds)
        return {"runs": found.runs, "timeline": found.timeline[found.timeline["rank"] == 0]}

    estimate_s = LAUNCH_S + len(networks) * DISTINCT_PLANS * rounds * _EXPOSED_S
    tables = ["runs", "timeline"]
    yield Point("replay", f"replay-p{ranks}-{rate}", measure, estimate_s, tables=tables)


def replay_cases(
    profile: LayerProfile, plans: Sequence[str], cost: MessageCost, place: Place
) -> list[PlannedCase]:
    """The profile under DISTINCT_PLANS different plans, compute as long as one message of everything."""
    asked = [plan_case(profile, spec, cost, place) for spec in plans]
    distinct = {one.plan.ends: one for one in asked}
    return list(distinct.values())[:DISTINCT_PLANS]


def _profile(out: Path, name: str, batch: int, ranks: int) -> LayerProfile:
    return store.read_profile(_measured(out, "layers", f"{name}-b{batch}-r{ranks}"))


def _cost(out: Path, ranks: int, rate: str, collective: str = "all_reduce") -> MessageCost:
    """The measured table of a collective's times in the lab."""
    rows = store.load_table(_measured(out, "collectives", f"lab-p{ranks}-{rate}"))
    return table_cost(rows[rows["collective"] == collective], ranks)


def table_cost(rows: pd.DataFrame, workers: int) -> MessageCost:
    """The cost of one collective, by its rows of a table ``collectives``."""
    labels = {name: rows[name].iloc[0] for name in ("collective", "algorithm")}
    return fit("table", rows["bytes"], rows["seconds"], workers=workers, draws=0, **labels).cost


def _measured(out: Path, schema: str, name: str) -> Path:
    """A table that other points gave. Raises UserError where it is not there."""
    path = table_path(out, schema, name)
    if not store.has_table(path):
        raise UserError(f"{path} is missing: run ddlkit measure {schema} --out {out} first")
    return path
