"""What kinds of points are made of: where a session measures, what files may say, how long things take."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import pandas as pd
import torch

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.core.link import COLLECTIVES
from ddlkit.core.units import parse_bits_per_s, parse_bytes
from ddlkit.core.workload import LayerProfile
from ddlkit.run.instruments.clock import Budget
from ddlkit.run.jobs.launch import MEETING_S, launch
from ddlkit.run.lab.conditions import (
    parse,
)
from ddlkit.run.lab.network import Lab, LabShape
from ddlkit.run.sessions.grammar import (
    Key,
    mapping_of,
    one_of,
    whole,
)
from ddlkit.run.sessions.session import Point, Tables, Unavailable, table_path

_MEASURE = (
    "collectives contention controls convergence inputs layers nccl_one_gpu "
    "selection shared_kernels shared_messages shared_training shares sharing_training "
    "sparse_convergence speed standin training"
)
MODULES = {name: f"ddlkit.run.measure.{name}" for name in _MEASURE.split()}
MODULES |= {"replay": "ddlkit.run.lab.replay", "script": "ddlkit.run.lab.script"}
"""Where what measures stands."""

OWN_PLAN = "ddp"  # DDP's own rule for buckets
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
USUAL_BYTES = 45e6  # of a network's gradients
EXPOSED_S = 2.0  # an iteration in the lab: computation about as long as communication


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


def on_gpus(gpus: int, point: Point) -> Point:
    """Return the point, or where there are fewer GPUs than it needs, one that says so."""
    there = torch.cuda.device_count()

    def refuse() -> Tables:
        raise Unavailable(f"needs {gpus} GPUs, here {'is 1' if there == 1 else f'are {there}'}")

    return point if there >= gpus else replace(point, measure=refuse, estimate_s=0.0)


def iteration_s(name: str, batch: int, precision: str, device: str) -> float:
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
    conditions = parse({"delay": delay}) if delay else None
    return Lab(LabShape(ranks, parse_bits_per_s(rate), conditions=conditions))


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
        rows = (
            store.load_table(path)[["collective", "bytes"]]
            if store.has_table(path)
            else pd.DataFrame()
        )
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


def recorded_profile(out: Path, name: str, batch: int, ranks: int) -> LayerProfile:
    return store.read_profile(recorded(out, "layers", f"{name}-b{batch}-r{ranks}"))


def recorded(out: Path, schema: str, name: str) -> Path:
    """Return a table that other points gave. Raises UserError where it is not there."""
    path = table_path(out, schema, name)
    if not store.has_table(path):
        raise UserError(f"{path} is missing: run ddlkit measure {schema} --out {out} first")
    return path
