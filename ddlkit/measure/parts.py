"""What `ddlkit measure` can measure, a function for each part: each yields the points of a session.

A point is measured on its own and resumed on its own. Lists make a point for each value.
"""

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
from ddlkit.core.plan import make_plan
from ddlkit.core.units import KIB
from ddlkit.core.workload import Workload
from ddlkit.jobs.clock import Budget
from ddlkit.jobs.launch import MEETING_S, Loopback, launch
from ddlkit.lab import Conditions
from ddlkit.lab import network as lab
from ddlkit.measure import collectives as messages_alone
from ddlkit.measure import copies, slowdown, training
from ddlkit.measure import layers as layer_times
from ddlkit.measure import networks as networks_by_name
from ddlkit.measure.session import Point, PointList, Tables, Unavailable, table_path
from ddlkit.store import machine

LAUNCH_S = 10.0  # starting ranks
IN_LAB_S = 900.0  # in which ranks may always end in a lab
PATIENCE = 3.0  # ranks that take this many times what was estimated are ended
BUILD_S = 2.0  # building a network, moving it to the device, counting its FLOP
WARMTH = 1.2  # times as long as a budget says takes what also warms up
EXPOSED_S = 2.0  # an iteration in the lab
SLOWDOWN = Budget(warmup=0, min_repeats=5, max_repeats=100, max_s=10.0)

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
    def of(
        cls,
        count: int,
        device: str,
        link: str = "loopback",
        *,
        on_gpu: bool | None = None,
    ) -> Ranks:
        """Return ranks that meet to measure a device: what else the machine has is not asked.

        on_gpu : whether tensors lie on a GPU, as of `Rank.join`; None leaves it to that
        """
        join: dict[str, Any] = {
            "backend": "nccl" if device == "cuda" else "gloo",
            "timeout_s": MEETING_S,
        }
        if on_gpu is not None:
            join["on_gpu"] = on_gpu
        return cls(count, partial(Loopback, name=link), join)

    def run(
        self, job: Any, settings: Any, estimate_s: float, out: Path | None = None
    ) -> Tables:
        """Return the tables that a job leaves on them, also in ``out``."""
        place = self.place()
        in_lab = not isinstance(place, Loopback)
        with place if in_lab else nullcontext():
            return launch(
                job,
                settings,
                ranks=self.count,
                place=place,
                join=self.join,
                timeout_s=max(IN_LAB_S * in_lab, PATIENCE * estimate_s),
                out=out,
            )


def ranks_in_lab(count: int, rate: float, delay_s: float = 0.0) -> tuple[Ranks, str]:
    """Return ranks over links of that rate, with a delay emulated ones, and the name of their tables."""
    shape = lab.LabShape(
        count, rate, conditions=Conditions(delay_s) if delay_s else None
    )
    name = f"lab-{shape.name.replace('emulated-', '')}"
    return Ranks(count, partial(lab.Lab, shape), {"backend": "gloo"}), name


def layers(
    here: Here,
    networks: Networks,
    budget: Budget,
    precisions: Sequence[str] = ("fp32",),
    ranks: Sequence[int] = (),
) -> Iterator[Point]:
    """Alone; or on all cores, by so many ranks at the same time, of which one needs no launch."""
    for name, _ in networks:
        networks_by_name.find(name)
    for count, precision, (name, batch) in product(ranks or [0], precisions, networks):
        cores = machine.cores() if count else None
        how = (name, batch, here.device, precision, budget, cores)
        measure: Callable[[], Any] = partial(layer_times.layer_tables, *how)
        if count > 1:
            settings = layer_times.LayersSettings({name: batch}, budget=budget)
            measure = partial(
                launch,
                layer_times.layers_job,
                settings,
                ranks=count,
                place=Loopback(),
            )
        estimate_s = BUILD_S + LAUNCH_S * (count > 1) + WARMTH * budget.max_s
        key = f"{name}-b{batch}-" + (f"r{count}" if count else precision)
        yield Point("layers", key, measure, estimate_s, ["layers", "samples"])


# What collectives can show where there is one device is labelled as a link of its own.
_LINKS: dict[str, Callable[[str], Ranks]] = {
    "loopback-p2": lambda device: Ranks.of(2, "cpu"),
    "one-rank": lambda device: Ranks.of(1, device, "one-rank"),
    "gloo-cuda-p2": lambda device: Ranks.of(2, "cpu", "host", on_gpu=True),
}


def collectives(
    here: Here,
    budget: Budget,
    link: str = "",
    collectives: Sequence[str] = tuple(COLLECTIVES),
    sizes: Sequence[int] = messages_alone.SIZES,
    ranks: Sequence[int] = (),
    rate: Sequence[float] = (),
    delay: Sequence[float] = (0.0,),
    messages: int = 16,
    tries: int = 1,
    apart: float = 0.0,
) -> Iterator[Point]:
    """In labs, by one of _LINKS, or as devices are joined, what is lacking; apart : starts of ranks [s]."""
    estimate_s = LAUNCH_S + len(collectives) * len(sizes) * budget.max_s

    def left(name: str, members: Ranks) -> dict[tuple[int, ...], list[str]]:
        """Return collectives by the sizes that they still lack."""
        path = table_path(here.out, "collectives", name)
        rows = store.load_table(path) if store.has_table(path) else pd.DataFrame()
        by_sizes: dict[tuple[int, ...], list[str]] = {}
        for each in collectives:
            by_sizes.setdefault(
                messages_alone.lacking(rows, each, sizes, members.count), []
            ).append(each)
        return {lacks: names for lacks, names in by_sizes.items() if lacks}

    def measure(name: str, members: Ranks) -> pd.DataFrame:
        frames = []
        for lacks, names in left(
            name, members
        ).items():  # in one launch, if all lack the same
            settings = messages_alone.CollectivesSettings(
                names,
                lacks,
                budget,
                messages_per_sample=messages if rate else 1,
                tries=tries if rate else 1,
                apart_s=apart,
            )
            tables = members.run(messages_alone.collectives_job, settings, estimate_s)
            frames.append(tables["collectives"])
        return pd.concat(frames, ignore_index=True)

    places = {link: _LINKS[link](here.device)} if link else {}
    joined = () if link or rate else ranks or rank_counts(here)
    for count in joined:
        places[f"{'nccl' if here.on_gpu else 'loopback'}-p{count}"] = Ranks.of(
            count, here.device
        )
    for count, bits, delay_s in product(ranks or (2,), rate, delay):
        members, name = ranks_in_lab(count, bits, delay_s)
        places[name] = members
    for name, members in places.items():
        missing, run = partial(left, name, members), partial(measure, name, members)
        point = Point("collectives", name, run, estimate_s, left=missing)
        yield on_gpus(members.count * (here.on_gpu and bool(joined)), point)


SMALL_BYTES = 64 * KIB  # a message that is all start-up


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
            p.nbytes
            for p in networks_by_name.build(network).parameters()
            if p.requires_grad
        ]
    work = Workload.from_arrays(0.0, [0.0] * len(sizes), sizes[::-1])
    return sorted(make_plan("ddp", work).group_bytes(work).tolist())


def memory_copies(
    here: Here, budget: Budget, sizes: Sequence[int] = copies.SIZES
) -> Iterator[Point]:
    measure = partial(copies.measure_copies, here.device, sizes, budget)
    estimate_s = 3 + (5 if here.on_gpu else 1) * len(sizes) * budget.max_s
    yield Point("copies", here.device, measure, estimate_s)


def training_estimate_s(
    here: Here, plans: int, repeats: int, iterations: int, accumulate: int
) -> float:
    """Return how long training on several ranks is expected to take, in seconds."""
    iteration_s = accumulate * EXPOSED_S / (10 if here.on_gpu else 2)
    iterations_of_a_plan = repeats * 3 * iterations + training.WARMUP
    return LAUNCH_S + plans * iterations_of_a_plan * iteration_s


def trainings(
    here: Here,
    networks: Networks,
    repeats: int,
    iterations: int,
    ranks: Sequence[int] = (),
    rate: Sequence[float] = (0.0,),
    delay: Sequence[float] = (0.0,),
    accumulate: int = 1,
) -> Iterator[Point]:
    """Yield training on several ranks as DistributedDataParallel itself sends gradients."""
    estimate_s = training_estimate_s(here, 1, repeats, iterations, accumulate)

    def measure(members: Ranks, name: str, batch: int) -> Tables:
        own_plan: Mapping[str, Sequence[int]] = {training.OWN_PLAN: []}
        settings = training.TrainingSettings(
            name, batch, own_plan, repeats, iterations, accumulate=accumulate
        )
        return members.run(training.training_job, settings, estimate_s)

    counts = ranks or rank_counts(here)
    for count, bits, delay_s, (name, batch) in product(counts, rate, delay, networks):
        members, place = place_of(here, count, bits, delay_s)
        key = f"{name}-b{batch}-p{count}"
        if bits:
            key = f"training-{name}-{place}"
        run = partial(measure, members, name, batch)
        tables = training.training_job.tables
        point = Point("training", key, run, estimate_s, tables)
        yield on_gpus(count * (here.on_gpu and not bits), point)


PARTS = ("layers", "collectives", "slowdown", "copies", "training")
"""Parts that can be asked for by name; "quick" is all of them."""
_ALONE = Budget(warmup=1, min_repeats=3, max_repeats=20, max_s=2.0)
_MESSAGES = Budget(warmup=1, min_repeats=2, max_repeats=30, max_s=0.3)
_COPIES = Budget(warmup=1, min_repeats=3, max_repeats=20, max_s=0.3)
DEFAULT_NETWORKS: Networks = (("resnet50", 4),)


def points(
    *,
    out: Path,
    session: int,
    part: str,
    device: str = "",
    networks: Networks = DEFAULT_NETWORKS,
    ranks: int = 0,
    rate_bits_per_s: float = 0.0,
    delay_s: float = 0.0,
) -> PointList:
    """Return the points of one of `PARTS`, or of all where ``part`` is "quick".

    Parameters
    ----------
    out : directory of the session, which points look into to see what is there
    session : number of the session, by which its own tables are named
    part : "quick" or one of `PARTS`
    device : "cpu" or "cuda"; by default CUDA where torch sees a GPU
    networks : names and batch sizes, for layers, slowdown and training
    ranks : how many ranks exchange messages; by default 2, or one a GPU
    rate_bits_per_s : of links between network namespaces (root, Linux); 0 for loopback or NCCL
    delay_s : of each of these links
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    here = Here(device, session, out)
    counts = [ranks] if ranks else []
    rates = [rate_bits_per_s] if rate_bits_per_s else []
    made: list[Point] = []
    wanted = PARTS if part == "quick" else (part,)
    if {*wanted} & {"layers", "slowdown", "training"}:
        for name, _ in networks:
            networks_by_name.require(name)
    if "collectives" in wanted:
        made += collectives(here, _MESSAGES, ranks=counts, rate=rates, delay=[delay_s])
    if "layers" in wanted:
        made += layers(here, networks, _ALONE, ranks=[1])
    if "copies" in wanted:
        made += memory_copies(here, _COPIES)
    between = counts or rank_counts(here)
    if "slowdown" in wanted:
        made += slowdowns(here, networks, between, rates or [0.0], [delay_s])
    if "training" in wanted:
        made += trainings(
            here,
            networks,
            repeats=2,
            iterations=3,
            ranks=between,
            rate=rates or [0.0],
            delay=[delay_s],
        )
    return PointList(made)
