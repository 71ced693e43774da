"""The kinds of points that a file may ask for: what each measures, its name, and about how long it takes.

A kind is a function here, see `ddlkit.run.sessions.grammar`: a new measurement is one more such function.
What measures is imported when a point needs it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pandas as pd
import torch

from ddlkit import machine, store
from ddlkit.core.cost import MessageCost
from ddlkit.core.errors import UserError
from ddlkit.core.fit import fit
from ddlkit.core.lablink import FRAMING_BYTES
from ddlkit.core.link import COLLECTIVES
from ddlkit.core.schedule import ALGORITHMS
from ddlkit.core.units import parse_bits_per_s, parse_bytes
from ddlkit.core.workload import LayerProfile
from ddlkit.model import make_plan
from ddlkit.papers import networks as published
from ddlkit.run.instruments.clock import Budget
from ddlkit.run.jobs.launch import MEETING_S, Loopback, Place, launch
from ddlkit.run.lab.conditions import parse
from ddlkit.run.lab.network import Lab, LabShape
from ddlkit.run.sessions.grammar import (
    Batched,
    Counts,
    Delay,
    Delays,
    Key,
    Plans,
    Rate,
    Rates,
    Seeds,
    Share,
    Sizes,
    Words,
    kind,
    mapping_of,
    one_of,
    whole,
)
from ddlkit.run.sessions.session import Point, Tables, Unavailable, say, table_path

_MEASURE = (
    "channels collectives contention controls convergence copies inputs layers nccl_one_gpu "
    "selection selection_beside shared_kernels shared_messages shared_training shares "
    "sharing_training sparse_convergence throughput training"
)
MODULES = {name: f"ddlkit.run.measure.{name}" for name in _MEASURE.split()}
MODULES |= {"replay": "ddlkit.run.lab.replay", "script": "ddlkit.run.lab.script"}
"""Where what measures stands."""

LIBRARY, OWN_PLAN = "library", "ddp"  # the library's own algorithm, and DDP's own rule for buckets
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


class Here(NamedTuple):
    """Where a session measures: the device, the number that marks its own tables, and the directory."""

    device: str
    session: int
    out: Path


def measuring(name: str) -> Any:
    """Return the module that measures that, imported now: most need torch."""
    return import_module(MODULES[name])


def _made(module: str, attribute: str) -> Callable[[Any], Any]:
    """Return a check for a mapping of the arguments of a class that measures."""
    return lambda value: mapping_of(getattr(measuring(module), attribute))(value)


def _volume(value: Any) -> tuple[int, int]:
    """Return bytes and parts of "25MB in 4"; of one size in one part, without them.

    >>> _volume("25MB in 4"), _volume("1KiB")
    ((25000000, 4), (1024, 1))
    """
    size, _, parts = str(value).partition(" in ")
    return parse_bytes(size), int(parts or 1)


def _sides(value: Any) -> dict[str, list[int]]:
    if not isinstance(value, dict) or not value.keys() <= set(_RATE):
        raise ValueError(f"must be a mapping of {', '.join(_RATE)} to sides of matrices")
    return {precision: [whole(1)(side) for side in sides] for precision, sides in value.items()}


Timed = Annotated[Budget, Key(mapping_of(Budget))]
Precisions = Annotated[Sequence[str], Key(one_of(tuple(_RATE)), many=True)]
Collectives = Annotated[Sequence[str], Key(one_of(tuple(COLLECTIVES)), many=True)]
Algorithms = Annotated[Sequence[str], Key(one_of((LIBRARY, *ALGORITHMS)), many=True)]
Sides = Annotated[dict[str, list[int]], Key(_sides)]
Policies = Annotated[
    Sequence[str], Key(lambda value: measuring("shares").Policy.parse(str(value)).name, many=True)
]
Volume = Annotated[tuple[int, int], Key(_volume)]
Volumes = Annotated[Sequence[tuple[int, int]], Key(_volume, many=True)]
Count = Annotated[int, Key(whole(0))]
Scale = Annotated[Any, Key(_made("contention", "Scale"))]
Recipe = Annotated[Any, Key(_made("convergence", "Recipe"))]
Pictures = Annotated[Any, Key(_made("inputs", "Shape"))]
Changes = Annotated[dict[str, Any], Key(mapping_of(dict))]


def best_device() -> str:
    """Return where to measure if nothing is said: "cuda" where torch sees a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def _on_gpus(gpus: int, point: Point) -> Point:
    """Return the point, or where there are fewer GPUs than it needs, one that says so."""
    there = torch.cuda.device_count()

    def refuse() -> Tables:
        raise Unavailable(f"needs {gpus} GPUs, here {'is 1' if there == 1 else f'are {there}'}")

    return point if there >= gpus else replace(point, measure=refuse, estimate_s=0.0)


# -- this machine --------------------------------------------------------------------------------


@kind("drift")
def drift(here: Here, moment: str, side: int, size: Sizes) -> Iterator[Point]:
    measure = partial(measuring("throughput").measure_drift, moment, here.device, side, *size)
    yield Point("drift", f"s{here.session}-{moment}", measure, 4)


@kind("peaks")
def matrix_products(here: Here, sides: Sides, budget: Timed) -> Iterator[Point]:
    def measure() -> pd.DataFrame:
        peaks = partial(measuring("throughput").measure_peaks, here.device, budget=budget)
        return pd.concat([peaks([name], many) for name, many in sides.items()], ignore_index=True)

    estimate_s = 1 + 1.5 * budget.max_s * sum(map(len, sides.values()))
    yield Point("peaks", here.device, measure, estimate_s)


@kind("copies")
def memory_copies(here: Here, budget: Timed, sizes: Sizes = ()) -> Iterator[Point]:
    copies = measuring("copies")
    measure = partial(copies.measure_copies, here.device, sizes or copies.SIZES, budget)
    ways = 5 if here.device == "cuda" else 1
    estimate_s = 3 + ways * len(sizes or copies.SIZES) * budget.max_s
    yield Point("copies", here.device, measure, estimate_s)


@kind("copies")
def disk_copies(here: Here, budget: Timed, sizes: Sizes = ()) -> Iterator[Point]:
    copies = measuring("copies")
    measure = partial(copies.measure_disk, here.out, sizes or copies.DISK_SIZES, budget)
    yield Point("copies", "disk", measure, 3 + 2 * len(sizes or copies.DISK_SIZES) * budget.max_s)


INPUT = "input"
"""Folder of all that is measured of the input: beside other tables, not among them."""


@kind("input")
def input_alone(
    here: Here, budget: Timed, pictures: Pictures, batch: int, side: int
) -> Iterator[Point]:
    """Reading, decoding, a loader's workers and copying, each with nothing else going on."""
    inputs = measuring("inputs")
    alone = inputs.Alone(pictures, batch, side)
    measure = partial(inputs.measure_inputs, here.device, here.out, alone, budget)
    yield Point("input", f"alone-{here.device}", measure, 3 + 12 * budget.max_s, ["inputs"], INPUT)


@kind("selection")
def selections(here: Here, brief: bool = False) -> Iterator[Point]:
    for name, measure, estimate_s in measuring("selection").cases(here.device, brief):
        yield Point("selection", name, measure, estimate_s)


@kind("selection")
def selections_beside_backward(
    here: Here, networks: Batched, elements: Counts, density: Share, rounds: int = 5
) -> Iterator[Point]:
    """Each size's selection and a network's backward pass, alone and competing for the same cores."""
    beside = measuring("selection_beside").measure_beside_backward
    for (network, batch), size in itertools.product(networks, elements):
        measure = partial(beside, network, batch, size, density, rounds, here.device)
        yield Point("selection", f"beside-{network}-b{batch}-d{size}", measure, 5.0 + 3 * rounds)


@kind("contention")
def kernels_beside_messages(here: Here, brief: bool = False) -> Iterator[Point]:
    for name, measure, estimate_s, gpus in measuring("contention").cases(here.device, brief):
        yield _on_gpus(gpus, Point("contention", name, measure, estimate_s))


@kind("contention")
def kernels_beside_copies(here: Here, brief: bool = False) -> Iterator[Point]:
    name, measure, estimate_s, _ = measuring("contention").copy_case(here.device, brief)
    yield Point("contention", name, measure, estimate_s)


@kind("one_gpu")
def two_ranks_on_one_gpu(here: Here, brief: bool = False) -> Iterator[Point]:
    """NCCL itself where there is one GPU; what it refuses for being too old takes no time."""
    one_gpu = measuring("nccl_one_gpu")
    pairs, settings = one_gpu.case(brief)
    measure = partial(one_gpu.measure_on_one_gpu, pairs, settings)
    estimate_s = 0.0 if one_gpu.unavailable() else 30.0 * len(pairs)
    yield Point("one_gpu", "nccl-one-gpu", measure, estimate_s, tables=["contention"])


# -- networks ------------------------------------------------------------------------------------


def _iteration_s(name: str, batch: int, precision: str, device: str) -> float:
    rate = _RATE[precision] if device == "cuda" else _CPU_RATE
    return 3e9 * _GFLOP.get(name, _OTHER_GFLOP) * batch / rate


def _timed_s(budget: Budget, repeat_s: float) -> float:
    """Return about how long a measurement of something that takes ``repeat_s`` goes on."""
    longest_s = min(budget.max_s, budget.max_repeats * repeat_s)
    return budget.warmup * repeat_s + max(longest_s, budget.min_repeats * repeat_s)


@kind("layers")
def layers(
    here: Here, networks: Batched, budget: Timed, precisions: Precisions = ("fp32",)
) -> Iterator[Point]:
    tables_of = measuring("layers").layer_tables
    for precision, (name, batch) in itertools.product(precisions, networks):
        measure = partial(tables_of, name, batch, here.device, precision, budget, None)
        # Each round is one iteration with hooks and one without.
        repeat_s = 2 * _iteration_s(name, batch, precision, here.device)
        estimate_s = BUILD_S + _timed_s(budget, repeat_s) + GRAPH_S * (here.device == "cuda")
        key = f"{name}-b{batch}-{precision}"
        yield Point("layers", key, measure, estimate_s, tables=["layers", "samples"])


@kind("layers")
def layers_by_ranks(here: Here, networks: Batched, ranks: int, budget: Timed) -> Iterator[Point]:
    for name, batch in networks:
        yield layers_point(name, batch, ranks, budget, device=here.device)


def layers_point(
    name: str, batch: int, ranks: int, budget: Budget, *, device: str, folder: str = ""
) -> Point:
    """Return a network's layers, on all cores, by ``ranks`` ranks at the same time; one needs no launch.

    device : of one rank; several take what `launch` gives them
    """
    layers = measuring("layers")
    measure = partial(layers.layer_tables, name, batch, device, "fp32", budget, machine.cores())
    if ranks > 1:
        settings = layers.LayersSettings({name: batch}, budget=budget)
        measure = partial(launch, layers.layers_job, settings, ranks=ranks, place=Loopback())
    repeat_s = 2 * ranks * _iteration_s(name, batch, "fp32", device)
    estimate_s = BUILD_S + LAUNCH_S * (ranks > 1) + _timed_s(budget, repeat_s)
    key = f"{name}-b{batch}-r{ranks}"
    return Point("layers", key, measure, estimate_s, ["layers", "samples"], folder)


@kind("sharing")
def training_beside_messages(
    here: Here,
    networks: Batched,
    budget: Timed,
    precisions: Precisions = ("fp32",),
    brief: bool = False,
) -> Iterator[Point]:
    beside = measuring("sharing_training")
    compared = beside.settings(here.device == "cuda", brief)
    for precision, (name, batch) in itertools.product(precisions, networks):
        how: dict[str, Any] = {"device": here.device, "precision": precision}
        measure = partial(beside.measure_sharing, name, batch, compared, budget, **how)
        # Each round is an iteration without messages, one by each setting, and its messages alone.
        repeat_s = 1.2 * (1 + len(compared)) * _iteration_s(name, batch, precision, here.device)
        estimate_s = 2 * BUILD_S + _timed_s(budget, repeat_s)
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
    """omgs Fig 3, on a core of the processor: constant densities first, seed by seed, then schedules.

    recipe : what differs from each network's own, as {"epochs": 3}; networks : on real data where a directory
        of CIFAR-10 or the Penn Treebank stands behind, as "resnet20_half@DIRECTORY"
    """
    sparse = measuring("sparse_convergence")
    made = itertools.product(sparse.SCHEDULES, seeds, networks or tuple(sparse.TASKS))
    for schedule, seed, name in made:
        for settings in sparse.trainings(name, seed, recipe, schedule):
            epochs = settings.recipe.epochs
            words = [
                sparse.label(name),
                settings.method.replace("+", "-"),
                f"e{epochs}",
                f"s{seed}",
            ]
            key = "-".join(words if schedule == "constant" else [*words, schedule])
            measure = partial(sparse.train, settings, say=say)
            yield Point("convergence", key, measure, 4.0 * epochs, ["sparse_convergence"])


# -- several ranks -------------------------------------------------------------------------------


def _rank_counts(device: str) -> list[int]:
    """Return two ranks, as in `sharing`, and where there are more GPUs, one on each of them."""
    return sorted({2, torch.cuda.device_count()} - {0, 1}) if device == "cuda" else [2]


def _join(device: str) -> dict[str, Any]:
    """Return how ranks meet that measure a device: what else the machine has is not asked."""
    return {"backend": "nccl" if device == "cuda" else "gloo", "timeout_s": MEETING_S}


# What collectives can show where there is one device is labelled as a link of its own.
_LINKS: dict[str, tuple[int, Loopback, dict[str, Any]]] = {
    "loopback-p2": (2, Loopback(), _join("cpu")),
    "one-rank": (1, Loopback(name="one-rank"), {}),  # joins as its device does
    "gloo-cuda-p2": (2, Loopback(name="host"), {"backend": "gloo", "on_gpu": True}),
}


def _collectives_point(
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
        rows = store.load_table(path)[["collective", "bytes"]] if path.exists() else pd.DataFrame()
        there = set(rows.itertuples(index=False, name=None))
        lacking: dict[tuple[int, ...], list[str]] = {}
        for collective in collectives:
            left = tuple(
                size for size in sizes if (collective, whole_size(size, ranks)) not in there
            )
            lacking.setdefault(left, []).append(collective)
        return {left: names for left, names in lacking.items() if left}

    def measure() -> pd.DataFrame:
        rows = [send(collectives=names, sizes=left) for left, names in missing().items()]
        return pd.concat(rows, ignore_index=True)

    estimate_s = LAUNCH_S + len(collectives) * len(sizes) * max_s
    return Point("collectives", name, measure, estimate_s, is_done=lambda: not missing())


def _by(algorithm: str, name: str) -> str:
    """Return the name of a table, with the algorithm where it is not the library's own."""
    return name if algorithm == LIBRARY else f"{name}-{algorithm.replace('_', '-')}"


@kind("collectives")
def collectives(
    here: Here,
    budget: Timed,
    link: str = "",
    collectives: Collectives = tuple(COLLECTIVES),
    sizes: Sizes = (),
    algorithm: Algorithms = (LIBRARY,),
) -> Iterator[Point]:
    """By one of _LINKS, or else as the devices are joined: by NCCL between GPUs, gloo between CPUs."""
    gpus, sizes = here.device == "cuda" and not link, sizes or measuring("collectives").SIZES
    links = {link: _LINKS[link]} if link else {}
    for ranks in _rank_counts(here.device) if not link else ():
        links[f"nccl-p{ranks}" if gpus else f"loopback-p{ranks}"] = (ranks, Loopback(), {})
    for (name, (ranks, place, join)), by in itertools.product(links.items(), algorithm):
        how: dict[str, Any] = {"place": place, "join": _join(here.device) | join}
        how |= {"timeout_s": PATIENCE * (LAUNCH_S + len(collectives) * len(sizes) * budget.max_s)}
        send = partial(_send, ranks, how, budget=budget, algorithm=by)
        point = _collectives_point(
            here, _by(by, name), ranks, send, collectives, sizes, budget.max_s
        )
        yield _on_gpus(ranks * gpus, point)


def _send(ranks: int, how: Mapping[str, Any], **settings: Any) -> pd.DataFrame:
    """Return rows of collectives that ranks measure who are started ``how``."""
    module = measuring("collectives")
    settings_of_job = module.CollectivesSettings(**settings)
    return launch(module.collectives_job, settings_of_job, ranks=ranks, **how)["collectives"]


@kind("training")
def trainings(here: Here, networks: Batched, repeats: int, iterations: int) -> Iterator[Point]:
    """Training as DDP itself sends, on several ranks."""
    training = measuring("training")
    rounds = repeats * (2 * iterations + 5)  # half of them without exchange
    for ranks, (name, batch) in itertools.product(_rank_counts(here.device), networks):
        settings = training.TrainingSettings(name, batch, {OWN_PLAN: []}, repeats, iterations)
        estimate_s = LAUNCH_S + 2 * rounds * _iteration_s(name, batch, "fp32", here.device)
        how: dict[str, Any] = {"ranks": ranks, "place": Loopback(), "join": _join(here.device)}
        how |= {"timeout_s": PATIENCE * estimate_s}
        measure = partial(launch, training.training_job, settings, **how)
        tables = training.training_job.tables
        point = Point("training", f"{name}-b{batch}-p{ranks}", measure, estimate_s, tables)
        yield _on_gpus(ranks if here.device == "cuda" else 0, point)


@kind("channels")
def nccl_channels(here: Here, blocks: Seeds, budget: Timed, sizes: Sizes = ()) -> Iterator[Point]:
    """NCCL by blocks and threads; 0 blocks leave both to NCCL."""
    channels = measuring("channels")
    sizes = sizes or channels.SIZES
    for ranks, n in itertools.product(_rank_counts(here.device), blocks):
        settings = [(n, threads) for threads in channels.THREADS] if n else [channels.DEFAULT]
        each_s = LAUNCH_S + len(sizes) * budget.max_s
        how: dict[str, Any] = {"sizes": sizes, "budget": budget, "timeout_s": PATIENCE * each_s}
        measure = partial(channels.measure_channels, settings, ranks, **how)
        name = f"p{ranks}-{f'{n}-blocks' if n else 'default'}"
        yield _on_gpus(ranks, Point("channels", name, measure, len(settings) * each_s))


# -- sharing resources ---------------------------------------------------------------------------


@kind("controls")
def controls_of_communication(here: Here, sizes: Sizes = ()) -> Iterator[Point]:
    """By what communication can be given more or less, and between GPUs whether that takes effect."""
    controls = measuring("controls")
    yield Point("controls", here.device, controls.offered, 2.0)
    if here.device == "cuda":
        settings = controls.ControlsSettings(size=max(sizes or (controls.SIZE,)))
        how: dict[str, Any] = {"ranks": 2, "place": Loopback(), "join": _join("cuda")}
        measure = partial(launch, controls.controls_job, settings, timeout_s=60.0, **how)
        yield _on_gpus(2, Point("controls", "nccl-p2", measure, 20.0))


def _sharing(
    here: Here,
    name: str,
    job: Any,
    make: Callable[[], Any],
    work_s: float,
    rate: str = "",
    delay: str = "",
    threads: int = 0,
    without: Sequence[str] = (),
) -> Point:
    """Return a point of ranks that share a machine's cores, or its GPUs, with what they send.

    make : the settings, once what they need is measured; work_s : without starting anything
    rate, delay : of the link; without a rate, ranks talk as the devices are joined
    threads : of each block of NCCL, which takes them from its environment; without : tables that these
        settings leave out
    """
    on_gpu, ranks = here.device == "cuda", _rank_counts(here.device)[-1]
    link = f"lab-p{ranks}-{rate}" if rate else f"{'nccl' if on_gpu else 'loopback'}-p{ranks}"
    estimate_s = LAUNCH_S + work_s

    def measure() -> Tables:
        shares, settings = measuring("shares"), make()
        ring = {shares.NCCL_THREADS: str(threads), "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
        loopback = Loopback(variables=shares.IN_ORDER | (ring if threads else {}))
        with _lab(ranks, rate, delay) if rate else nullcontext(loopback) as place:
            join = _join(here.device) | ({} if on_gpu else {"torch_threads": 1})
            how: dict[str, Any] = {"place": place, "join": join, "timeout_s": 60 + 4 * estimate_s}
            return launch(job, settings, ranks=ranks, **how)

    words = (name, link, delay and f"delay{delay}", f"t{threads}" if threads else "")
    tables = [table for table in job.tables if table not in without]
    named = "-".join(filter(None, words))
    return _on_gpus(ranks * on_gpu, Point("sharing", named, measure, estimate_s, tables))


def _by_process(policies: Sequence[str]) -> dict[int, list[str]]:
    """Return policies that one process can try, by the threads of NCCL that its environment must say."""
    together: dict[int, list[str]] = {}
    for name in policies:
        hidden = measuring("shares").Policy.parse(name).hidden
        together.setdefault(hidden.threads if hidden.on_gpu else 0, []).append(name)
    return together


_STARVED = 50
"""Times as long as another takes a configuration whose messages computing keeps from their cores: 14 to 52
on two processors."""


def _send_s(n_bytes: float, rate: str) -> float:
    """Return about how long an all-reduce between two ranks takes."""
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
    module = measuring("shared_messages")
    for bits, (threads, names) in itertools.product(rate, _by_process(policies).items()):
        make = partial(module.SharedMessagesSettings, names, messages, repeats)
        all_s = sum(_send_s(n_bytes, bits) for n_bytes, _ in messages)
        work_s = 2.0 + 1.3 * repeats * len(names) * all_s
        job = module.shared_messages_job
        yield _sharing(here, name, job, make, work_s, bits, threads=threads)


@kind("sharing")
def kernels_by_share(
    here: Here,
    policies: Policies,
    kernels: Words,
    scale: Scale,
    message: Volume,
    name: str = "beside",
    repeats: int = 6,
    rate: Rates = ("",),
) -> Iterator[Point]:
    """Kernels beside all-reduces, by what communication may take; on processors."""
    module = measuring("shared_kernels")
    make = partial(module.SharedKernelsSettings, policies, kernels, scale, *message, repeats)
    for bits in rate:
        each_s = 0.2 + 2.5 * max(0.15, _send_s(message[0], bits))
        starved = sum("idle" in policy for policy in policies)
        rows = len(policies) + (_STARVED - 1) * starved
        work_s = 2.0 + repeats * rows * len(kernels) * each_s
        yield _sharing(here, name, module.shared_kernels_job, make, work_s, bits)


@kind("sharing")
def training_by_share(
    here: Here,
    networks: Batched,
    policies: Policies,
    name: str = "",
    repeats: int = 6,
    iterations: int = 2,
    unsent: Count = 0,
    empty: Count = 0,
    rate: Rates = ("",),
    delay: Delay = "",
    plans: Plans = (OWN_PLAN,),
) -> Iterator[Point]:
    """Training, by what communication may take: a table for each network, link and name."""
    module, batches = measuring("shared_training"), dict[str, list[int]]()
    for network, batch in networks:
        batches.setdefault(network, []).append(batch)

    def settings(network: str, names: Sequence[str]) -> Any:
        sizes: dict[str, Sequence[int]] = {spec: [] for spec in plans}
        for spec in set(plans) - {OWN_PLAN}:
            workload = _profile(here.out, network, batches[network][0], 2).workload()
            sizes[spec] = make_plan(spec, workload).group_bytes(workload).tolist()
        counts = repeats, iterations, unsent, empty
        return module.SharedTrainingSettings(network, batches[network], names, sizes, *counts)

    lacks = [table for table, n in ((module.UNSENT, unsent), (module.PERIODS, empty)) if not n]
    ranks = 1 if here.device == "cuda" else 2  # that share what one could compute with
    everything = itertools.product(batches, rate, _by_process(policies).items())
    for network, bits, (threads, names) in everything:
        each_s = [ranks * _iteration_s(network, n, "fp32", here.device) for n in batches[network]]
        sending_s = len(each_s) * _send_s(_USUAL_BYTES, bits)
        alone_s = sum(1 + count for count in (unsent, empty) if count) * sum(each_s)
        round_s = (1 + iterations) * (sum(each_s) + sending_s) + alone_s
        work_s = 3.0 + repeats * len(plans) * (len(names) + 1) * round_s
        named, make = "-".join(filter(None, (network, name))), partial(settings, network, names)
        how = (module.shared_training_job, make, work_s, bits, delay, threads, lacks)
        yield _sharing(here, named, *how)


# -- the lab -------------------------------------------------------------------------------------


def _lab(ranks: int, rate: str, delay: str = "", **more: Any) -> Lab:
    """Return a lab, with a delay of emulated links; ``more``: what else these do, as `conditions.parse`."""
    conditions = parse({"delay": delay, **more}) if delay else None
    return Lab(LabShape(ranks, parse_bits_per_s(rate), conditions=conditions))


@kind("collectives", lab=True)
def collectives_in_lab(
    here: Here,
    ranks: Counts,
    rate: Rates,
    collectives: Collectives,
    budget: Timed,
    algorithm: Algorithms = (LIBRARY,),
    delay: Delays = ("",),
    sizes: Sizes = (),
    messages: int = 16,
    tries: int = 1,
    framing: int = FRAMING_BYTES,
    burst: Delay = "0s",
) -> Iterator[Point]:
    """A table for each lab and algorithm; with a delay, over emulated links. ``messages`` of a sample.

    framing, burst : of emulated links, as `conditions.Conditions` has them
    """

    def send(workers: int, bits: str, late: str, **how: Any) -> pd.DataFrame:
        with _lab(workers, bits, late, framing=framing, burst=burst) as place:
            rows: pd.DataFrame = measuring("replay").calibrate(place, **how)
            return rows

    sizes = sizes or measuring("collectives").SIZES
    how: dict[str, Any] = {"budget": budget, "messages_per_sample": messages, "tries": tries}
    said = parse({"framing": framing, "burst": burst}).name.partition("-")[2]
    for workers, bits, late, by in itertools.product(ranks, rate, delay, algorithm):
        words = (f"lab-p{workers}", bits, late and f"delay{late}", late and said)
        name = _by(by, "-".join(filter(None, words)))
        run = partial(send, workers, bits, late, algorithm=by, **how)
        yield _collectives_point(here, name, workers, run, collectives, sizes, budget.max_s)


@kind("tensors")
def tensors(
    here: Here, network: str, ranks: int, budget: Timed, rate: Rate = ""
) -> Iterator[Point]:
    """All-reduces of each size that a network's tensors have."""
    sizes = sorted({4 * elements for elements in published.parameters(network)})  # float32
    how: dict[str, Any] = {"collectives": ["all_reduce"], "sizes": sizes, "budget": budget}

    def measure() -> pd.DataFrame:
        if rate:
            with _lab(ranks, rate) as place:
                rows = measuring("replay").calibrate(place, tries=TRIES, **how)
        else:
            rows = _send(ranks, {"place": Loopback(), "join": _join("cpu")}, tries=TRIES, **how)
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
        profile, cost = _profile(here.out, name, batch, ranks), _cost(here.out, ranks, rate)
        workload, sha256 = profile.workload(), profile.sha256
        made = {spec: make_plan(spec, workload, cost) for spec in plans}
        group_bytes = {spec: plan.group_bytes(workload).tolist() for spec, plan in made.items()}
        settings = training.TrainingSettings(
            name, batch, group_bytes, repeats, iterations, profile_sha256=sha256
        )
        with _lab(ranks, rate) as place:
            how: dict[str, Any] = {"place": place, "join": measuring("replay").choose_join()}
            return launch(training.training_job, settings, ranks=ranks, **how)

    estimate_s = LAUNCH_S + len(plans) * repeats * (iterations + 2) * 2 * _EXPOSED_S
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
        profiles = [_profile(here.out, name, batch, 1) for name, batch in networks]
        with _lab(ranks, rate) as place:
            cases = [
                case for profile in profiles for case in replay_cases(profile, plans, cost, place)
            ]
            played = measuring("replay").replay(place, ranks, cases, rounds)
        return {"runs": played.runs, "timeline": played.timeline[played.timeline["rank"] == 0]}

    estimate_s = LAUNCH_S + len(networks) * DISTINCT_PLANS * rounds * _EXPOSED_S
    tables = ["runs", "timeline"]
    yield Point("replay", f"replay-p{ranks}-{rate}", measure, estimate_s, tables=tables)


def replay_cases(
    profile: LayerProfile, plans: Sequence[str], cost: MessageCost, place: Place
) -> list[Any]:
    """Return the profile under DISTINCT_PLANS plans, computing as long as one message of everything."""
    planned = [measuring("script").plan_case(profile, spec, cost, place) for spec in plans]
    return list({case.plan.ends: case for case in planned}.values())[:DISTINCT_PLANS]


def _profile(out: Path, name: str, batch: int, ranks: int) -> LayerProfile:
    return store.read_profile(_measured(out, "layers", f"{name}-b{batch}-r{ranks}"))


def _cost(out: Path, ranks: int, rate: str) -> MessageCost:
    """Return the cost of all-reduces in the lab, by their measured table."""
    rows = store.load_table(_measured(out, "collectives", f"lab-p{ranks}-{rate}"))
    return table_cost(rows[rows["collective"] == "all_reduce"], ranks)


def table_cost(rows: pd.DataFrame, workers: int) -> MessageCost:
    """Return the cost of one collective, by its rows of a table ``collectives``."""
    labels = {name: rows[name].iloc[0] for name in ("collective", "algorithm")}
    return fit("table", rows["bytes"], rows["seconds"], workers=workers, draws=0, **labels).cost


def _measured(out: Path, schema: str, name: str) -> Path:
    """Return a table that other points gave. Raises UserError where it is not there."""
    path = table_path(out, schema, name)
    if not path.exists():
        raise UserError(f"{path} is missing: run ddlkit measure {schema} --out {out} first")
    return path
