"""The kinds of points that a file may ask for: what each measures, its name, and about how long it takes.

A kind is a function here, see `ddlkit.run.sessions.grammar`: a new measurement is one more such function.
What measures is imported when a point needs it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import pandas as pd

from ddlkit import machine
from ddlkit.core.link import COLLECTIVES
from ddlkit.core.units import parse_bits_per_s
from ddlkit.model import make_plan
from ddlkit.run.instruments.clock import Budget
from ddlkit.run.jobs.launch import Loopback, launch
from ddlkit.run.sessions.grammar import (
    Batched,
    Delay,
    Plans,
    Rates,
    Seeds,
    Sizes,
    Words,
    kind,
)
from ddlkit.run.sessions.session import Point, Tables, say
from ddlkit.run.sessions.vocabulary import (
    BUILD_S,
    GRAPH_S,
    LAUNCH_S,
    OWN_PLAN,
    PATIENCE,
    USUAL_BYTES,
    Changes,
    Collectives,
    Count,
    Pictures,
    Policies,
    Precisions,
    Recipe,
    Scale,
    Sides,
    Timed,
    Volume,
    Volumes,
    collectives_point,
    iteration_s,
    lab_of,
    measuring,
    meeting,
    on_gpus,
    rank_counts,
    recorded_profile,
    sent,
    timed_s,
)
from ddlkit.run.sessions.vocabulary import Here as Here

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


@kind("contention")
def kernels_beside_messages(here: Here, brief: bool = False) -> Iterator[Point]:
    for name, measure, estimate_s, gpus in measuring("contention").cases(here.device, brief):
        yield on_gpus(gpus, Point("contention", name, measure, estimate_s))


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


@kind("layers")
def layers(
    here: Here, networks: Batched, budget: Timed, precisions: Precisions = ("fp32",)
) -> Iterator[Point]:
    tables_of = measuring("layers").layer_tables
    for precision, (name, batch) in itertools.product(precisions, networks):
        measure = partial(tables_of, name, batch, here.device, precision, budget, None)
        # Each round is one iteration with hooks and one without.
        repeat_s = 2 * iteration_s(name, batch, precision, here.device)
        estimate_s = BUILD_S + timed_s(budget, repeat_s) + GRAPH_S * (here.device == "cuda")
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
    repeat_s = 2 * ranks * iteration_s(name, batch, "fp32", device)
    estimate_s = BUILD_S + LAUNCH_S * (ranks > 1) + timed_s(budget, repeat_s)
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
    """omgs Fig 3, on a core of the processor: constant densities first, seed by seed, then schedules.

    recipe : what differs from each network's own, as {"epochs": 3}
    """
    sparse = measuring("sparse_convergence")
    made = itertools.product(sparse.SCHEDULES, seeds, networks or tuple(sparse.TASKS))
    for schedule, seed, name in made:
        for settings in sparse.trainings(name, seed, recipe, schedule):
            epochs = settings.recipe.epochs
            words = [
                name,
                settings.method.replace("+", "-"),
                f"e{epochs}",
                f"s{seed}",
            ]
            key = "-".join(words if schedule == "constant" else [*words, schedule])
            measure = partial(sparse.train, settings, say=say)
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
    gpus, sizes = here.device == "cuda" and not link, sizes or measuring("collectives").SIZES
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
        how: dict[str, Any] = {"ranks": ranks, "place": Loopback(), "join": meeting(here.device)}
        how |= {"timeout_s": PATIENCE * estimate_s}
        measure = partial(launch, training.training_job, settings, **how)
        tables = training.training_job.tables
        point = Point("training", f"{name}-b{batch}-p{ranks}", measure, estimate_s, tables)
        yield on_gpus(ranks if here.device == "cuda" else 0, point)


@kind("channels")
def nccl_channels(here: Here, blocks: Seeds, budget: Timed, sizes: Sizes = ()) -> Iterator[Point]:
    """NCCL by blocks and threads; 0 blocks leave both to NCCL."""
    channels = measuring("channels")
    sizes = sizes or channels.SIZES
    for ranks, n in itertools.product(rank_counts(here.device), blocks):
        settings = (
            [(n, threads) for threads in measuring("standin").THREADS] if n else [channels.DEFAULT]
        )
        each_s = LAUNCH_S + len(sizes) * budget.max_s
        how: dict[str, Any] = {"sizes": sizes, "budget": budget, "timeout_s": PATIENCE * each_s}
        measure = partial(channels.measure_channels, settings, ranks, **how)
        name = f"p{ranks}-{f'{n}-blocks' if n else 'default'}"
        yield on_gpus(ranks, Point("channels", name, measure, len(settings) * each_s))


# -- sharing resources ---------------------------------------------------------------------------


@kind("controls")
def controls_of_communication(here: Here, sizes: Sizes = ()) -> Iterator[Point]:
    """By what communication can be given more or less, and between GPUs whether that takes effect."""
    controls = measuring("controls")
    yield Point("controls", here.device, controls.offered, 2.0)
    if here.device == "cuda":
        settings = controls.ControlsSettings(size=max(sizes or (controls.SIZE,)))
        how: dict[str, Any] = {"ranks": 2, "place": Loopback(), "join": meeting("cuda")}
        measure = partial(launch, controls.controls_job, settings, timeout_s=60.0, **how)
        yield on_gpus(2, Point("controls", "nccl-p2", measure, 20.0))


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
    on_gpu, ranks = here.device == "cuda", rank_counts(here.device)[-1]
    link = f"lab-p{ranks}-{rate}" if rate else f"{'nccl' if on_gpu else 'loopback'}-p{ranks}"
    estimate_s = LAUNCH_S + work_s

    def measure() -> Tables:
        shares, settings = measuring("shares"), make()
        ring = {shares.NCCL_THREADS: str(threads), "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
        loopback = Loopback(variables=shares.IN_ORDER | (ring if threads else {}))
        with lab_of(ranks, rate, delay) if rate else nullcontext(loopback) as place:
            join = meeting(here.device) | ({} if on_gpu else {"torch_threads": 1})
            how: dict[str, Any] = {"place": place, "join": join, "timeout_s": 60 + 4 * estimate_s}
            return launch(job, settings, ranks=ranks, **how)

    words = (name, link, delay and f"delay{delay}", f"t{threads}" if threads else "")
    tables = [table for table in job.tables if table not in without]
    named = "-".join(filter(None, words))
    return on_gpus(ranks * on_gpu, Point("sharing", named, measure, estimate_s, tables))


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
            workload = recorded_profile(here.out, network, batches[network][0], 2).workload()
            sizes[spec] = make_plan(spec, workload).group_bytes(workload).tolist()
        how = {"repeats": repeats, "iterations": iterations, "empty": empty}
        return module.SharedTrainingSettings(network, batches[network], names, sizes, **how)

    lacks = [] if empty else [module.PERIODS]
    ranks = 1 if here.device == "cuda" else 2  # that share what one could compute with
    everything = itertools.product(batches, rate, _by_process(policies).items())
    for network, bits, (threads, names) in everything:
        each_s = [ranks * iteration_s(network, n, "fp32", here.device) for n in batches[network]]
        sending_s = len(each_s) * _send_s(USUAL_BYTES, bits)
        alone_s = (1 + empty) * bool(empty) * sum(each_s)
        round_s = (1 + iterations) * (sum(each_s) + sending_s) + alone_s
        work_s = 3.0 + repeats * len(plans) * (len(names) + 1) * round_s
        named, make = "-".join(filter(None, (network, name))), partial(settings, network, names)
        how = (module.shared_training_job, make, work_s, bits, delay, threads, lacks)
        yield _sharing(here, named, *how)
