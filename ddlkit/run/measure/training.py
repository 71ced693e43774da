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
from ddlkit.run.clock import Budget, chrome_trace, measure, measure_on, synchronizer
from ddlkit.run.jobs.rank import Floats, Rank, Tables, everyones, job, slowest
from ddlkit.run.measure.layers import computing
from ddlkit.run.nets import registry as networks
from ddlkit.run.vitals import Usage, processor_times, processor_usage

PRECISION = (
    "fp32"  # as of the profiles that predict it: no TF32, which CUDA's convolutions else take
)
OWN_PLAN = "ddp"  # DistributedDataParallel's own rule: nothing is imposed
COPIES = Budget(warmup=2, min_repeats=20, max_repeats=20, max_s=float("inf"))
WARMUP = 3  # DDP rebuilds its buckets in the second iteration, and reports them in the third

_OPTIONS = inspect.signature(DistributedDataParallel.__init__).parameters
_SYNC_BUFFERS = (  # the later name where both exist
    "forward_sync_buffers" if "forward_sync_buffers" in _OPTIONS else "broadcast_buffers"
)


@dataclass(frozen=True)
class TrainingSettings:
    """Training of ``network`` with ``batch`` samples per rank under each of ``plans``.

    plans : spec -> bytes of each bucket in the order in which gradients become ready. For "ddp" nothing
        is imposed: bytes given there are what DDP's own rule is expected to do, and may be empty.
    repeats, iterations : rounds over all plans, and timed iterations of each plan in a round
    sync_buffers : broadcast the buffers (of batch normalisation) before each forward pass, as DDP does
        by default; a message that belongs to no bucket
    seed, profile_sha256 : go into the Case of every row, and seed the weights

    Raises UserError where there is nothing to measure, or no ``bucket_cap_mb_list`` in torch.
    """

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
    """Train by every plan once per round, without those whose buckets came out otherwise in the first.

    runs : one row per iteration. ``iteration_s`` is that of the slowest rank; ranks start each round
        together, not each iteration. ``compute_s`` is the median iteration of the same round without
        exchanging gradients (``no_sync``), ``exposed_communication_s`` the difference, in which the
        copying of gradients into and out of buckets is included. ``copy_s_per_byte`` is what that takes,
        measured on its own: the gradients copied into one buffer, on all ranks at once.
    buckets : bytes asked and rebuilt. A plan whose buckets came out otherwise keeps its rows here, has
        none in ``runs``, and is reported on standard error.
    timeline : one profiled iteration per plan, on rank 0.

    Note that torch's own DDP has 2 gloo_threads, ours 1. Raises UserError for buckets that do not add up
    to the network's gradients, for ranks that do not hold the same gradients afterwards, and where memory
    runs out.
    """
    with computing(f"training of {settings.network}", me.device, PRECISION):
        yield from _rounds(me, settings)


def _rounds(me: Rank, settings: TrainingSettings) -> Iterator[Tables]:
    """Yield the tables of every plan in every round."""
    torch.manual_seed(settings.seed)
    network = networks.build(settings.network).to(me.device)
    held_bytes = sum(p.nbytes for p in network.parameters() if p.requires_grad)
    _check_plans(settings, held_bytes)
    copying = {"copy_s_per_byte": _copy_s(me, network) / held_bytes, "precision": PRECISION}
    plans = list(settings.plans)
    for repeat in range(settings.repeats):
        for spec in tuple(plans):
            tables = _Block(me, settings, network, spec).measure(repeat)
            if "runs" in tables:
                tables["runs"] = tables["runs"].assign(**copying)
            else:
                plans.remove(spec)
            yield tables
        if not plans:
            raise UserError("training: DDP made other buckets than asked for under every plan")


def _copy_s(me: Rank, network: nn.Module) -> float:
    """Seconds to copy the gradients of ``network`` into one buffer, of the slowest rank."""
    gradients = [torch.zeros_like(p).view(-1) for p in network.parameters() if p.requires_grad]
    sizes = [gradient.numel() for gradient in gradients]
    parts = torch.empty(sum(sizes), device=me.device).split(sizes)

    def copy_all() -> None:
        for part, gradient in zip(parts, gradients, strict=True):
            part.copy_(gradient)

    seconds = measure_on(me.device, copy_all, COPIES, setup=dist.barrier)
    return float(np.median(slowest(seconds)))


def _check_plans(settings: TrainingSettings, held_bytes: int) -> None:
    for spec, sizes in settings.plans.items():
        if sum(sizes) != held_bytes and (sizes or spec != OWN_PLAN):
            raise UserError(
                f"plan {spec!r}: its buckets hold {sum(sizes)} bytes, "
                f"the gradients of {settings.network} {held_bytes}"
            )


def wrap(
    me: Rank, network: nn.Module, sizes: Sequence[int], sync_buffers: bool = False
) -> tuple[DistributedDataParallel, torch.optim.Optimizer]:
    """Return a copy of the network in DDP, and its optimizer.

    sizes : bytes of the buckets that are imposed, in ready order; none leaves them to DDP
    """
    options: dict[str, Any] = {_SYNC_BUFFERS: sync_buffers}
    if sizes:
        # A bucket closes on reaching its cap, so each cap is what the bucket shall hold.
        options["bucket_cap_mb_list"] = [size / MIB for size in sizes]
    model = DistributedDataParallel(
        copy.deepcopy(network),
        device_ids=[me.device.index] if me.device.type == "cuda" else None,
        init_sync=False,  # equal seeds made equal weights
        **options,
    )
    # Rate 0 is the same arithmetic, but the weights stay put: every iteration computes the same.
    return model, torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)


class _Block:
    """One plan in one round: a fresh copy of the network, wrapped and warmed up."""

    def __init__(self, me: Rank, settings: TrainingSettings, network: nn.Module, spec: str) -> None:
        gc.collect()  # the last block's reducer goes with a cycle of references, and its memory
        self.me, self.settings, self.spec, self.asked = me, settings, spec, settings.plans[spec]
        sizes = () if spec == OWN_PLAN else self.asked
        self.model, self.optimizer = wrap(me, network, sizes, settings.sync_buffers)
        inputs, self.labels = networks.sample_batch(settings.network, settings.batch, me.device)
        self.inputs = inputs.roll(me.rank, dims=-1)  # other data on every rank
        self.synchronize = synchronizer(me.device)
        for _ in range(WARMUP):
            self._iterate()
        log = self.model._get_ddp_logging_data()
        self.buckets = [int(text) for text in log["rebuilt_bucket_sizes"].split(",")]
        tensors = [len(text.split()) for text in log["rebuilt_per_bucket_param_indices"].split(",")]
        self.case = Case(
            kind="training",
            network=settings.network,
            device=me.device.type,
            batch=settings.batch,
            workers=me.world_size,
            link=me.link,
            link_bits_per_s=me.link_bits_per_s,
            collective="all_reduce",
            plan=spec,
            ends=";".join(str(int(end)) for end in np.cumsum(tensors)),
            seed=settings.seed,
            profile_sha256=settings.profile_sha256,
        )

    def measure(self, repeat: int) -> dict[str, pd.DataFrame]:
        """Rows of this round; in the first also of the buckets, which may be all there is to measure."""
        seconds, used = self._timed()
        check_equal_gradients(self.optimizer)
        tables = {}
        if repeat == 0:
            tables["buckets"] = self._bucket_rows()
            key = pd.DataFrame({"case": [self.case.key], "repeat": [repeat]})
            tables["timeline"] = key.merge(self.profile().to_frame(), how="cross")
            if self.asked and list(self.asked) != self.buckets:
                made = f"asked {self.asked}, DDP made {self.buckets}"
                self.me.say(f"plan {self.spec} is not measured: {made}")
                return tables
        with self.model.no_sync():  # when no gradients are exchanged
            compute_s = float(np.median(self._timed()[0]))
        tables["runs"] = pd.DataFrame(
            {
                **asdict(self.case),
                "case": self.case.key,
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
        )
        self.me.say(
            f"{self.settings.network}, plan {self.spec}, {len(self.buckets)} buckets, round "
            f"{repeat + 1} of {self.settings.repeats}: {format_seconds(float(np.median(seconds)))} an "
            f"iteration, compute alone {format_seconds(compute_s)}"
        )
        return tables

    def profile(self) -> Timeline:
        """One iteration as this rank saw it; all ranks profile, so that all are equally slow."""
        dist.barrier()
        trace = chrome_trace(lambda: self._iterate(self.synchronize), self.me.device)
        seen = timeline(parse_kineto(trace, "profile of an iteration"), self.buckets)
        messages = int(np.sum(seen.kind == "all_reduce"))
        if messages != len(self.buckets):
            self.me.say(f"the profiler saw {messages} all-reduces of {len(self.buckets)} buckets")
        return seen

    def _bucket_rows(self) -> pd.DataFrame:
        made = {"asked": self.asked, "rebuilt": self.buckets}
        rows = [(n, size, source) for source, sizes in made.items() for n, size in enumerate(sizes)]
        return pd.DataFrame(rows, columns=["bucket", "bytes", "source"]).assign(case=self.case.key)

    def _timed(self) -> tuple[Floats, Usage]:
        """Return seconds of each iteration, of the slowest rank, and how the cores were used meanwhile."""
        n = self.settings.iterations
        exactly = Budget(0, n, n, max_s=float("inf"), relative_halfwidth=0.0)
        dist.barrier()
        watch = processor_times()
        seconds = measure(self._iterate, exactly, synchronize=self.synchronize)
        used = processor_usage(watch, processor_times())
        return slowest(seconds), Usage(*slowest([used.busy, used.stolen]).tolist())

    def _iterate(self, settle: Callable[[], object] = lambda: None) -> None:
        """One iteration; ``settle`` ends each phase when the device has done its work."""
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


def check_equal_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Raise UserError unless all ranks have trained with the same gradients.

    The optimizer's momentum is a sum of averaged gradients: equal on all ranks to the last bit.
    """
    momenta = [state["momentum_buffer"] for state in optimizer.state.values()]
    sums = everyones([float(momentum.double().sum()) for momentum in momenta])
    if not np.isfinite(sums).all() or (sums != sums[0]).any():
        raise UserError("training: ranks hold different gradients: no time is recorded")
