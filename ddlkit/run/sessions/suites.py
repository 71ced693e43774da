"""What ``ddlkit record`` measures, in order of value: what comes first is there when time runs out."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from ddlkit import store
from ddlkit.core.bandwidth import KNOWN
from ddlkit.core.errors import UserError
from ddlkit.core.units import KIB, MIB
from ddlkit.run.instruments import vitals
from ddlkit.run.instruments.clock import Budget
from ddlkit.run.jobs.launch import Loopback, launch
from ddlkit.run.measure import contention, selection
from ddlkit.run.measure.channels import BLOCKS, DEFAULT, THREADS, measure_channels
from ddlkit.run.measure.channels import SIZES as CHANNEL_SIZES
from ddlkit.run.measure.collectives import CollectivesSettings, collectives_job
from ddlkit.run.measure.copies import DISK_SIZES, measure_copies, measure_disk
from ddlkit.run.measure.copies import SIZES as COPY_SIZES
from ddlkit.run.measure.layers import profile_layers
from ddlkit.run.measure.peaks import efficiency, measure_drift, measure_peaks
from ddlkit.run.measure.throughput import SHARING_TABLE_2, measure_throughput
from ddlkit.run.measure.training import OWN_PLAN, TrainingSettings, training_job
from ddlkit.run.sessions.session import Plan, Point, Tables, Unavailable

Profile = tuple[str, int, str]  # network, batch, precision
Measure = Callable[[Path], Tables]

# GFLOP of a forward pass on one image, to tell how long a point will take.
_GFLOP = {
    **{"lenet5": 0.001, "alexnet": 1.4, "googlenet": 3.0, "vgg16": 31.0, "vgg19": 39.3},
    **{"resnet18": 3.6, "resnet50": 8.2, "resnet101": 15.7, "resnet152": 23.1, "vit_b_16": 35.1},
}
# FLOP/s that networks reach, cautiously: on an H200, and on two cores.
_RATE = {
    **{("cuda", "fp32"): 25e12, ("cuda", "tf32"): 80e12, ("cuda", "bf16"): 150e12},
    **{("cpu", "fp32"): 80e9, ("cpu", "bf16"): 80e9},
}
_BUILD_S = 2.0  # building a network, moving it to the device, counting its FLOP
_LAUNCH_S = 10.0  # starting ranks
_ONE_MACHINE_BYTES = 64 * MIB


@dataclass(frozen=True)
class Extent:
    """How much of everything is measured, and how long.

    profiles : layer profiles in three groups: before all else, among the rest, at the end
    peaks : sides of the matrices by precision; drift : side of a matrix, bytes of a copy
    throughput : batch sizes by network; iterations : that make one sample of it
    training : batch a rank by network, of training on several ranks
    channels : (blocks, threads) of NCCL, in groups that are measured together
    """

    profiles: tuple[Sequence[Profile], Sequence[Profile], Sequence[Profile]]
    layers: Budget
    peaks: Mapping[str, Sequence[int]]
    peak: Budget
    drift: tuple[int, int]
    copies: Sequence[int]
    disk: Sequence[int]
    copy: Budget
    throughput: Mapping[str, Sequence[int]]
    iterations: int
    block: Budget
    messages: Sequence[int]
    message: Budget
    training: Mapping[str, int]
    repeats: int
    channels: Sequence[Sequence[tuple[int, int]]]
    channel_sizes: Sequence[int]


def session_plan(suite: str, profile: str, session: int) -> Plan:
    """The points of ``suite`` (gpu or cpu) at the length of ``profile`` (standard or smoke).

    session : number that tells this run's own tables from those of earlier runs

    Raises UserError when a GPU is wanted and torch sees none.
    """
    if suite == "gpu" and not torch.cuda.is_available():
        raise UserError(
            f"torch {torch.__version__} sees no GPU: install a CUDA build that fits the driver, "
            "or use --suite cpu"
        )
    device = "cuda" if suite == "gpu" else "cpu"
    extent = _EXTENTS[device, profile]
    facts = Point("facts", f"s{session}", ["facts"], lambda _: {"facts": vitals.facts()}, 3)
    derived = Point(
        "efficiency",
        f"s{session}",
        ["efficiency"],
        lambda out: {"efficiency": efficiency(out)},
        1,
    )
    return Plan(
        opening=[facts, _drift("start", device, session, extent)],
        body=list(_body(device, profile == "smoke", extent)),
        closing=[_drift("end", device, session, extent), derived],
    )


def _body(device: str, smoke: bool, extent: Extent) -> Iterator[Point]:
    yield _peaks(device, extent)
    before, among, at_the_end = extent.profiles
    yield from (_layers(profile, device, extent) for profile in before)
    yield from selection.points(device, smoke)
    yield from contention.points(device, smoke)
    yield from _copies(device, extent)
    yield from _several_ranks(device, extent)
    yield from (_layers(profile, device, extent) for profile in among)
    for precision in ("fp32", "bf16"):
        for network, batches in extent.throughput.items():
            yield _throughput(network, batches, precision, device, extent)
    if not smoke:  # which has run this code already
        yield from _alone(device, extent)
    yield from (_layers(profile, device, extent) for profile in at_the_end)
    if device == "cuda":
        yield from _channels(extent)


# -- points of one device ----------------------------------------------------------------------


def _peaks(device: str, extent: Extent) -> Point:
    def run(_: Path) -> Tables:
        frames = [
            measure_peaks(device, [precision], sides, extent.peak)
            for precision, sides in extent.peaks.items()
        ]
        return {"peaks": pd.concat(frames, ignore_index=True)}

    estimate_s = 1 + 1.5 * extent.peak.max_s * sum(map(len, extent.peaks.values()))
    return Point("peaks", device, ["peaks"], run, estimate_s)


def _drift(moment: str, device: str, session: int, extent: Extent) -> Point:
    def run(_: Path) -> Tables:
        return {"drift": measure_drift(moment, device, *extent.drift)}

    return Point("drift", f"s{session}-{moment}", ["drift"], run, 4)


def _layers(profile: Profile, device: str, extent: Extent) -> Point:
    network, batch, precision = profile

    def run(_: Path) -> Tables:
        found, samples = profile_layers(
            network, batch, device=device, precision=precision, budget=extent.layers
        )
        frame = store.profile_frame(found, precision, ranks=1, threads=torch.get_num_threads())
        return {"layers": frame, "samples": samples}

    # Each round is one iteration with hooks and one without.
    timed_s = _timed_s(extent.layers, 2 * _iteration_s(network, batch, precision, device))
    name = f"{network}-b{batch}-{precision}"
    return Point("layers", name, ["layers", "samples"], run, _BUILD_S + timed_s)


def _throughput(
    network: str, batches: Sequence[int], precision: str, device: str, extent: Extent
) -> Point:
    def run(_: Path) -> Tables:
        frame = measure_throughput(
            network,
            batches,
            device=device,
            precision=precision,
            iterations=extent.iterations,
            budget=extent.block,
        )
        return {"throughput": frame}

    samples_s = [
        extent.iterations * _iteration_s(network, batch, precision, device) for batch in batches
    ]
    estimate_s = sum(_BUILD_S / 2 + _timed_s(extent.block, sample_s) for sample_s in samples_s)
    return Point("throughput", f"{network}-{precision}", ["throughput"], run, estimate_s)


def _iteration_s(network: str, batch: int, precision: str, device: str) -> float:
    return 3e9 * _GFLOP[network] * batch / _RATE[device, precision]


def _timed_s(budget: Budget, repeat_s: float) -> float:
    """About how long a measurement of something that takes ``repeat_s`` goes on."""
    longest_s = min(budget.max_s, budget.max_repeats * repeat_s)
    return budget.warmup * repeat_s + max(longest_s, budget.min_repeats * repeat_s)


def _copies(device: str, extent: Extent) -> Iterator[Point]:
    kinds = 5 if device == "cuda" else 1
    yield Point(
        "copies",
        device,
        ["copies"],
        lambda _: {"copies": measure_copies(device, extent.copies, extent.copy)},
        3 + kinds * len(extent.copies) * extent.copy.max_s,
    )
    yield Point(
        "copies",
        "disk",
        ["copies"],
        lambda out: {"copies": measure_disk(out, extent.disk, extent.copy)},
        3 + 2 * len(extent.disk) * extent.copy.max_s,
    )


# -- points of several ranks -------------------------------------------------------------------


def _rank_counts(device: str) -> list[int]:
    """Two ranks, as in `sharing`, and where there are more GPUs, one on each of them."""
    return sorted({2, torch.cuda.device_count()} - {0, 1}) if device == "cuda" else [2]


def _several_ranks(device: str, extent: Extent) -> Iterator[Point]:
    """Collectives by size, and the training that they serve: NCCL between GPUs, gloo between CPUs."""
    for ranks in _rank_counts(device):
        gpus = ranks if device == "cuda" else 0
        name = f"nccl-p{ranks}" if gpus else f"loopback-p{ranks}"
        yield _messages(name, ranks, extent.messages, extent, gpus=gpus)
        for network, batch in extent.training.items():
            yield _training(network, batch, ranks, extent, gpus)


def _alone(device: str, extent: Extent) -> Iterator[Point]:
    """What collectives can tell where there is one device, labelled as a link of its own."""
    sizes = [size for size in extent.messages if size <= _ONE_MACHINE_BYTES]
    yield _messages("one-rank", 1, sizes, extent, link="one-rank")
    if device == "cuda":
        yield _messages(
            "gloo-cuda-p2",
            2,
            sizes,
            extent,
            collectives=["all_reduce"],
            link="host",
            join={"backend": "gloo", "on_gpu": True},
        )


def _messages(
    name: str,
    ranks: int,
    sizes: Sequence[int],
    extent: Extent,
    *,
    collectives: Sequence[str] = KNOWN,
    link: str = "loopback",
    gpus: int = 0,
    join: Mapping[str, Any] | None = None,
) -> Point:
    def run(_: Path) -> Tables:
        settings = CollectivesSettings(collectives, sizes, extent.message)
        place = Loopback(name=link)
        return launch(collectives_job, settings, ranks=ranks, place=place, join=join)

    estimate_s = _LAUNCH_S + len(collectives) * len(sizes) * extent.message.max_s
    return _with_gpus(gpus, Point("collectives", name, ["collectives"], run, estimate_s))


def _training(network: str, batch: int, ranks: int, extent: Extent, gpus: int) -> Point:
    def run(_: Path) -> Tables:
        settings = TrainingSettings(
            network, batch, {OWN_PLAN: []}, extent.repeats, 2 * extent.iterations
        )
        return launch(training_job, settings, ranks=ranks, place=Loopback())

    device = "cuda" if gpus else "cpu"
    iterations = extent.repeats * (4 * extent.iterations + 5)  # half of them without exchange
    estimate_s = _LAUNCH_S + 2 * iterations * _iteration_s(network, batch, "fp32", device)
    name = f"{network}-b{batch}-p{ranks}"
    return _with_gpus(gpus, Point("training", name, list(training_job.tables), run, estimate_s))


def _channels(extent: Extent) -> Iterator[Point]:
    """NCCL by blocks and threads."""
    for ranks in _rank_counts("cuda"):
        for settings in extent.channels:
            blocks = settings[0][0]
            run = functools.partial(_measured_channels, settings, ranks, extent)
            name = f"p{ranks}-{f'{blocks}-blocks' if blocks else 'default'}"
            estimate_s = len(settings) * (
                _LAUNCH_S + len(extent.channel_sizes) * extent.message.max_s
            )
            point = Point("channels", name, ["channels"], run, estimate_s)
            yield _with_gpus(ranks, point)


def _measured_channels(
    settings: Sequence[tuple[int, int]], ranks: int, extent: Extent, _: Path
) -> Tables:
    return {
        "channels": measure_channels(
            settings, ranks, sizes=extent.channel_sizes, budget=extent.message
        )
    }


def _with_gpus(needed: int, point: Point) -> Point:
    """The point, or where there are fewer GPUs one that says so when it is to be measured."""
    here = torch.cuda.device_count()

    def refuse(_: Path) -> Tables:
        raise Unavailable(f"needs {needed} GPUs, here {'is 1' if here == 1 else f'are {here}'}")

    if here >= needed:
        return point
    return Point(point.what, point.name, point.tables, refuse, 0.0)


# -- extents -----------------------------------------------------------------------------------


def _profiles(
    batches: Mapping[str, Sequence[int]], precisions: Sequence[str]
) -> tuple[list[Profile], list[Profile], list[Profile]]:
    """Four networks of the papers at their first batch size; then all networks at it; then the rest."""
    main = ("resnet50", "resnet101", "vgg16", "alexnet")
    before = [(network, batches[network][0], p) for network in main for p in ("fp32", "bf16")]
    everything = [
        (network, sizes[0], precision)
        for precision in precisions
        for network, sizes in batches.items()
    ]
    among = [profile for profile in everything if profile not in before]
    at_the_end = [
        (network, batch, precision)
        for precision in precisions
        for network, sizes in batches.items()
        for batch in sizes[1:]
    ]
    return before, among, at_the_end


def _grid(blocks: Iterable[int]) -> list[list[tuple[int, int]]]:
    return [[DEFAULT], *([(count, threads) for threads in THREADS] for count in blocks)]


_PAPERS = (32, 16, 64, 128)
_SMOKE_SIZES = (4 * KIB, 64 * KIB)
_CPU = Extent(
    profiles=_profiles(
        {
            "resnet50": (4, 16),
            "resnet101": (4,),
            "vgg16": (1, 4),
            "alexnet": (8, 32),
            "resnet18": (4, 16),
            "googlenet": (4, 16),
            "vgg19": (1,),
            "vit_b_16": (2,),
            "resnet152": (2,),
        },
        ("fp32", "bf16"),
    ),
    layers=Budget(warmup=1, min_repeats=5, max_repeats=40, max_s=8.0),
    peaks={"fp32": (1024, 2048, 4096), "bf16": (1024, 2048, 4096)},
    peak=Budget(warmup=1, min_repeats=3, max_repeats=10, max_s=2.0),
    drift=(1024, 64 * MIB),
    copies=COPY_SIZES,
    disk=DISK_SIZES,
    copy=Budget(warmup=1, min_repeats=5, max_repeats=30, max_s=0.5),
    throughput={
        name: (4,) if name.startswith(("vgg", "vit")) else (4, 16) for name in SHARING_TABLE_2
    },
    iterations=2,
    block=Budget(warmup=1, min_repeats=2, max_repeats=5, max_s=4.0),
    messages=tuple(KIB << power for power in range(17)),
    message=Budget(warmup=1, min_repeats=5, max_repeats=50, max_s=0.5),
    training={"resnet18": 4},
    repeats=2,
    channels=[[DEFAULT]],
    channel_sizes=CHANNEL_SIZES,
)
_GPU = Extent(
    profiles=_profiles(
        {
            "resnet50": _PAPERS,
            "resnet101": _PAPERS,
            "vgg16": _PAPERS,
            "alexnet": (128, 16, 32, 64, 1024),
            "resnet18": (*_PAPERS, 256),
            "googlenet": (64, 16, 32, 128),
            "vgg19": _PAPERS,
            "vit_b_16": _PAPERS,
            "resnet152": _PAPERS,
        },
        ("fp32", "bf16", "tf32"),
    ),
    layers=Budget(warmup=2, min_repeats=5, max_repeats=40, max_s=2.5),
    peaks={
        "fp32": (4096, 8192),
        "tf32": (4096, 8192, 16384),
        "bf16": (4096, 8192, 16384),
    },
    peak=Budget(warmup=2, min_repeats=5, max_repeats=20, max_s=1.0),
    drift=(8192, 1024 * MIB),
    copies=COPY_SIZES,
    disk=DISK_SIZES,
    copy=Budget(warmup=1, min_repeats=5, max_repeats=30, max_s=0.4),
    throughput=dict.fromkeys(SHARING_TABLE_2, (16, 32, 64, 128)),
    iterations=5,
    block=Budget(warmup=1, min_repeats=3, max_repeats=10, max_s=1.0),
    messages=tuple(KIB << power for power in range(21)),
    message=Budget(warmup=1, min_repeats=5, max_repeats=30, max_s=0.5),
    training=dict.fromkeys(SHARING_TABLE_2, 32),
    repeats=3,
    channels=_grid(BLOCKS),
    channel_sizes=CHANNEL_SIZES,
)
_ONCE = Budget(warmup=1, min_repeats=2, max_repeats=3, max_s=0.1)


def _smoke(precisions: Sequence[str]) -> Extent:
    """Every point once, on the smallest of everything."""
    return Extent(
        profiles=(
            [("lenet5", 4, "fp32")],
            [("lenet5", 4, precision) for precision in precisions[1:]],
            [("lenet5", 8, "fp32")],
        ),
        layers=_ONCE,
        peaks=dict.fromkeys(precisions, (64, 128)),
        peak=_ONCE,
        drift=(128, MIB),
        copies=_SMOKE_SIZES,
        disk=_SMOKE_SIZES,
        copy=_ONCE,
        throughput={"lenet5": (4, 8)},
        iterations=2,
        block=_ONCE,
        messages=_SMOKE_SIZES,
        message=_ONCE,
        training={"lenet5": 4},
        repeats=1,
        channels=[[DEFAULT]],
        channel_sizes=_SMOKE_SIZES,
    )


_EXTENTS = {
    ("cpu", "standard"): _CPU,
    ("cuda", "standard"): _GPU,
    ("cpu", "smoke"): _smoke(("fp32", "bf16")),
    ("cuda", "smoke"): _smoke(("fp32", "bf16", "tf32")),
}
