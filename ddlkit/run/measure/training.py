"""Real data-parallel training under an imposed bucket plan: iteration times, buckets, a timeline.

DistributedDataParallel is told where its buckets end (``bucket_cap_mb_list``), and asked afterwards
where they did end.
"""

from __future__ import annotations

import copy
import gc
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

from ddlkit.core.case import Case
from ddlkit.core.errors import UserError
from ddlkit.core.timeline import Timeline
from ddlkit.core.units import MIB, format_seconds
from ddlkit.formats.kineto import BACKWARD, FORWARD, UPDATE, parse_kineto, timeline
from ddlkit.run.instruments import processor
from ddlkit.run.instruments.clock import Budget, chrome_trace, measure, synchronizer
from ddlkit.run.instruments.processor import Usage
from ddlkit.run.jobs.exchange import Floats, everyones, slowest
from ddlkit.run.jobs.job import Tables, job
from ddlkit.run.jobs.launch import launch
from ddlkit.run.jobs.place import Place
from ddlkit.run.jobs.rank import Rank
from ddlkit.run.nets import registry as networks

OWN_PLAN = "ddp"  # DistributedDataParallel's own rule: nothing is imposed
COPIES = Budget(warmup=2, min_repeats=20, max_repeats=20, max_s=float("inf"))
WARMUP = 3  # DDP rebuilds its buckets in the second iteration, and reports them in the third

_OPTIONS = inspect.signature(DistributedDataParallel.__init__).parameters
_SYNC_BUFFERS = (  # the later name where both exist
    "forward_sync_buffers" if "forward_sync_buffers" in _OPTIONS else "broadcast_buffers"
)


def measure_training(
    place: Place,
    n_ranks: int,
    network: str,
    batch: int,
    plans: Mapping[str, Sequence[int]],
    *,
    repeats: int = 2,
    iterations: int = 5,
    sync_buffers: bool = False,
    seed: int = 0,
    profile_sha256: str = "",
    join: Mapping[str, Any] | None = None,
    timeout_s: float = 900.0,
    out: Path | None = None,
) -> dict[str, pd.DataFrame]:
    """Train ``network`` with ``batch`` samples per rank under each plan; tables runs, buckets, timeline.

    plans : spec -> bytes of each bucket in the order in which gradients become ready. For "ddp" nothing
        is imposed: bytes given there are what DDP's own rule is expected to do, and may be empty.
    repeats, iterations : rounds over all plans, and timed iterations of each plan in a round
    sync_buffers : broadcast the buffers (of batch normalisation) before each forward pass, as DDP does
        by default; a message that belongs to no bucket
    seed, profile_sha256 : go into the Case of every row, and seed the weights
    join, out : as of `ddlkit.run.jobs.launch.launch`. Note that torch's DDP has 2 gloo_threads, ours 1.

    runs : one row per iteration. ``iteration_s`` is that of the slowest rank; ranks start each round
        together, not each iteration. ``compute_s`` is the median iteration of the same round without
        exchanging gradients (``no_sync``), ``exposed_communication_s`` the difference, in which the
        copying of gradients into and out of buckets is included. ``copy_s_per_byte`` is what that takes,
        measured on its own: the gradients copied into one buffer, on all ranks at once.
    buckets : bytes asked and rebuilt. A plan whose buckets came out otherwise keeps its rows here, has
        none in ``runs``, and is reported on standard error.
    timeline : one profiled iteration per plan, on rank 0.

    Raises UserError for buckets that do not add up to the network's gradients, ranks that do not hold
    the same gradients afterwards, a torch without ``bucket_cap_mb_list``, and as `launch` does.
    """
    settings = TrainingSettings(
        network,
        batch,
        {spec: [int(size) for size in sizes] for spec, sizes in plans.items()},
        repeats,
        iterations,
        sync_buffers,
        seed,
        profile_sha256,
    )
    return launch(
        training_job,
        settings,
        ranks=n_ranks,
        place=place,
        join=join,
        timeout_s=timeout_s,
        out=out,
    )


# -- in the ranks ------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainingSettings:
    """What CONFIG.json of the job ``training`` may hold; see `measure_training`."""

    network: str
    batch: int
    plans: Mapping[str, Sequence[int]]
    repeats: int = 2
    iterations: int = 5
    sync_buffers: bool = False
    seed: int = 0
    profile_sha256: str = ""

    def __post_init__(self) -> None:
        if not self.plans or self.repeats < 1 or self.iterations < 1:
            raise UserError(
                f"training of {len(self.plans)} plans, {self.repeats} repeats of {self.iterations} "
                "iterations: needs at least one of each"
            )
        if "bucket_cap_mb_list" not in _OPTIONS and set(self.plans) - {OWN_PLAN}:
            raise UserError(
                f"torch {torch.__version__} cannot impose a bucket plan: install torch 2.11 or later, "
                f"or measure the plan {OWN_PLAN!r} only"
            )


@job(TrainingSettings, "runs", "buckets", "timeline")
def training_job(me: Rank, settings: TrainingSettings) -> Iterator[Tables]:
    """Every plan once per round, without those whose buckets came out otherwise in the first."""
    torch.manual_seed(settings.seed)
    network = networks.build(settings.network).to(me.device)
    _check_plans(settings, network)
    copy_s_per_byte = _copying(me, network)
    refused: set[str] = set()
    for repeat in range(settings.repeats):
        for spec, asked in settings.plans.items():
            if spec in refused:
                continue
            block = _Block(me, settings, network, [] if spec == OWN_PLAN else asked)
            seconds, load = block.train(settings.iterations)
            case = _case(me, settings, spec, block.ends)
            if repeat == 0:
                spans = block.profile().to_frame()
                spans.insert(0, "repeat", repeat)
                spans.insert(0, "case", case.key)
                buckets = _bucket_rows(case, asked, block.buckets)
                yield {"buckets": buckets, "timeline": spans}
                if asked and list(asked) != block.buckets:
                    refused.add(spec)
                    me.say(f"plan {spec} is not measured: asked {asked}, DDP made {block.buckets}")
                    continue
            compute_s = float(np.median(block.compute(settings.iterations)))
            rows = _run_rows(case, repeat, seconds, compute_s, load)
            yield {"runs": rows.assign(copy_s_per_byte=copy_s_per_byte)}
            me.say(
                f"{settings.network}, plan {spec}, {len(block.buckets)} buckets, round {repeat + 1} of "
                f"{settings.repeats}: {format_seconds(float(np.median(seconds)))} an iteration, "
                f"compute alone {format_seconds(compute_s)}"
            )
        if len(refused) == len(settings.plans):
            raise UserError("training: DDP made other buckets than asked for under every plan")


def _copying(me: Rank, network: nn.Module) -> float:
    """Seconds a byte to copy the gradients of ``network`` into one buffer, of the slowest rank."""
    gradients = [torch.zeros_like(p).view(-1) for p in network.parameters() if p.requires_grad]
    sizes = [gradient.numel() for gradient in gradients]
    parts = torch.empty(sum(sizes), device=me.device).split(sizes)

    def copy_all() -> None:
        for part, gradient in zip(parts, gradients, strict=True):
            part.copy_(gradient)

    seconds = measure(copy_all, COPIES, synchronize=synchronizer(me.device), setup=dist.barrier)
    n_bytes = sum(gradient.numel() * gradient.element_size() for gradient in gradients)
    return float(np.median(slowest(seconds))) / n_bytes


def _check_plans(settings: TrainingSettings, network: nn.Module) -> None:
    held = sum(p.numel() * p.element_size() for p in network.parameters() if p.requires_grad)
    for spec, sizes in settings.plans.items():
        if sum(sizes) != held and (sizes or spec != OWN_PLAN):
            raise UserError(
                f"plan {spec!r}: its buckets hold {sum(sizes)} bytes, "
                f"the gradients of {settings.network} {held}"
            )


class _Block:
    """One plan in one round: a fresh copy of the network, wrapped and warmed up."""

    def __init__(
        self, me: Rank, settings: TrainingSettings, network: nn.Module, asked: Sequence[int]
    ) -> None:
        gc.collect()  # the last block's reducer goes with a cycle of references, and its memory
        self.me = me
        options: dict[str, Any] = {_SYNC_BUFFERS: settings.sync_buffers}
        if asked:
            # A bucket closes on reaching its cap, so each cap is what the bucket shall hold.
            options["bucket_cap_mb_list"] = [size / MIB for size in asked]
        self.model = DistributedDataParallel(
            copy.deepcopy(network),
            device_ids=[me.device.index] if me.device.type == "cuda" else None,
            init_sync=False,  # equal seeds made equal weights
            **options,
        )
        inputs, self.labels = networks.sample_batch(settings.network, settings.batch, me.device)
        self.inputs = inputs.roll(me.rank, dims=-1)  # other data on every rank
        # Rate 0 is the same arithmetic, but the weights stay put: every iteration computes the same.
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0, momentum=0.9)
        self.synchronize = synchronizer(me.device)
        for _ in range(WARMUP):
            self._iterate()
        log = self.model._get_ddp_logging_data()
        self.buckets = [int(text) for text in log["rebuilt_bucket_sizes"].split(",")]
        tensors = [len(text.split()) for text in log["rebuilt_per_bucket_param_indices"].split(",")]
        self.ends = [int(end) for end in np.cumsum(tensors)]

    def train(self, iterations: int) -> tuple[Floats, Usage]:
        """(iterations,) seconds of the slowest rank, and the processor's load meanwhile (0..1)."""
        seconds, load = self._timed(iterations)
        self._check_equal_gradients()
        return seconds, load

    def compute(self, iterations: int) -> Floats:
        """(iterations,) seconds of the slowest rank when no gradients are exchanged."""
        with self.model.no_sync():
            return self._timed(iterations)[0]

    def profile(self) -> Timeline:
        """One iteration as this rank saw it; all ranks profile, so that all are equally slow."""
        dist.barrier()
        trace = chrome_trace(lambda: self._iterate(self.synchronize), self.me.device)
        seen = timeline(parse_kineto(trace, "profile of an iteration"), self.buckets)
        messages = int(np.sum(seen.kind == "all_reduce"))
        if messages != len(self.buckets):
            self.me.say(f"the profiler saw {messages} all-reduces of {len(self.buckets)} buckets")
        return seen

    def _timed(self, iterations: int) -> tuple[Floats, Usage]:
        """Seconds of each iteration, of the slowest rank, and how the cores were used meanwhile."""
        exactly = Budget(0, iterations, iterations, max_s=float("inf"), relative_halfwidth=0.0)
        dist.barrier()
        before = processor.reading()
        seconds = measure(self._iterate, exactly, synchronize=self.synchronize)
        used = processor.usage(before, processor.reading())
        return slowest(seconds), Usage(*slowest([used.busy, used.stolen]).tolist())

    def _iterate(self, settle: Callable[[], object] | None = None) -> None:
        """One iteration; ``settle`` ends each phase when the device has done its work."""
        settle = settle or (lambda: None)
        with record_function(FORWARD):
            loss = nn.functional.cross_entropy(self.model(self.inputs), self.labels)
            settle()
        with record_function(BACKWARD):
            loss.backward()
            settle()
        with record_function(UPDATE):
            self.optimizer.step()
            self.optimizer.zero_grad()
            settle()

    def _check_equal_gradients(self) -> None:
        """The optimizer's momentum is a sum of averaged gradients: equal on all ranks to the last bit."""
        momenta = [state["momentum_buffer"] for state in self.optimizer.state.values()]
        sums = everyones([float(momentum.double().sum()) for momentum in momenta])
        if not np.isfinite(sums).all() or (sums != sums[0]).any():
            raise UserError(
                "training: ranks hold different gradients after an all-reduce: no time is recorded"
            )


# -- rows --------------------------------------------------------------------------------------


def _case(me: Rank, settings: TrainingSettings, spec: str, ends: Sequence[int]) -> Case:
    return Case(
        kind="training",
        network=settings.network,
        device=me.device.type,
        batch=settings.batch,
        workers=me.world_size,
        link=me.link,
        link_bits_per_s=me.link_bits_per_s,
        collective="all_reduce",
        plan=spec,
        ends=";".join(map(str, ends)),
        seed=settings.seed,
        profile_sha256=settings.profile_sha256,
    )


def _run_rows(
    case: Case, repeat: int, seconds: Floats, compute_s: float, used: Usage
) -> pd.DataFrame:
    columns = {
        **asdict(case),
        "case": case.key,
        "origin": "measured",
        "repeat": repeat,
        "iteration": np.arange(len(seconds)),
        "iteration_s": seconds,
        "compute_s": compute_s,
        "exposed_communication_s": seconds - compute_s,
        "processor_load": used.busy,
        "processor_limited": used.limited,
        "stolen": used.stolen,
    }
    return pd.DataFrame(columns)


def _bucket_rows(case: Case, asked: Sequence[int], rebuilt: Sequence[int]) -> pd.DataFrame:
    rows = [
        {"case": case.key, "bucket": number, "bytes": size, "source": source}
        for source, sizes in (("asked", asked), ("rebuilt", rebuilt))
        for number, size in enumerate(sizes)
    ]
    return pd.DataFrame(rows)
