"""Real data-parallel training under an imposed bucket plan: iteration times, buckets, a timeline."""

from __future__ import annotations

import copy
import gc
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, astuple, dataclass
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
from ddlkit.core.units import MIB, format_seconds
from ddlkit.formats.kineto import BACKWARD, FORWARD, UPDATE, parse_kineto, timeline
from ddlkit.run.clock import Budget, chrome_trace, measure, measure_on, synchronizer
from ddlkit.run.jobs.rank import Floats, Rank, Tables, everyones, job, slowest
from ddlkit.run.measure.layers import compute_on
from ddlkit.run.nets import registry as networks
from ddlkit.run.vitals import Usage, processor_times, processor_usage

# As of the profiles that predict it: no TF32, which CUDA's convolutions else take.
PRECISION = "fp32"
OWN_PLAN = "ddp"  # DistributedDataParallel's own rule: nothing is imposed
COPIES = Budget(warmup=2, min_repeats=20, max_repeats=20, max_s=float("inf"))
WARMUP = 3  # DDP rebuilds its buckets in the second iteration, and reports them in the third

_OPTIONS = inspect.signature(DistributedDataParallel.__init__).parameters
_SYNC_BUFFERS = "forward_sync_buffers"  # its later name, where both exist
_SYNC_BUFFERS = _SYNC_BUFFERS if _SYNC_BUFFERS in _OPTIONS else "broadcast_buffers"


@dataclass(frozen=True)
class TrainingSettings:
    """Training with ``batch`` samples per rank under each plan, ``iterations`` in each round.

    plans : spec -> bytes of each bucket in ready order, none for "ddp", by which nothing is imposed

    Raises UserError where torch cannot impose one.
    """

    network: str
    batch: int
    plans: Mapping[str, Sequence[int]]
    repeats: int = 2
    iterations: int = 5
    profile_sha256: str = ""

    def __post_init__(self) -> None:
        if "bucket_cap_mb_list" not in _OPTIONS and set(self.plans) - {OWN_PLAN}:
            advice = f"install torch 2.11 or later, or measure the plan {OWN_PLAN!r} only"
            raise UserError(f"torch {torch.__version__} cannot impose a bucket plan: {advice}")


@job(TrainingSettings, "runs", "buckets", "timeline")
def training_job(me: Rank, settings: TrainingSettings) -> Iterator[Tables]:
    """Train by every plan once per round, without those whose buckets came out otherwise in the first.

    runs : a row per iteration, of the slowest rank. ``compute_s`` is the median of the same round without
        exchanging gradients (``no_sync``), ``exposed_communication_s`` the difference, copies of gradients
        into and out of buckets included; ``copy_s_per_byte`` is what these take on their own
    buckets : bytes asked and rebuilt; timeline : one profiled iteration per plan, on rank 0

    Raises UserError where DDP follows no plan, for ranks that hold other gradients, and out of memory.
    """
    with compute_on(f"training of {settings.network}", me.device, PRECISION):
        torch.manual_seed(0)
        network = networks.build(settings.network).to(me.device)
        copying = {"copy_s_per_byte": _copy_s_per_byte(me, network), "precision": PRECISION}
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


def _copy_s_per_byte(me: Rank, network: nn.Module) -> float:
    """Return seconds a byte to copy the gradients of ``network`` into one buffer, of the slowest rank."""
    gradients = [torch.zeros_like(p).view(-1) for p in network.parameters() if p.requires_grad]
    sizes = [gradient.numel() for gradient in gradients]
    whole = torch.empty(sum(sizes), device=me.device)

    def copy_all() -> None:
        for part, gradient in zip(whole.split(sizes), gradients, strict=True):
            part.copy_(gradient)

    seconds = measure_on(me.device, copy_all, COPIES, setup=dist.barrier)
    return float(np.median(slowest(seconds))) / whole.nbytes


class _Block:
    """One plan in one round: a fresh copy of the network, wrapped and warmed up."""

    def __init__(self, me: Rank, settings: TrainingSettings, network: nn.Module, spec: str) -> None:
        gc.collect()  # the last block's reducer goes with a cycle of references, and its memory
        self.me, self.settings, self.spec, self.asked = me, settings, spec, settings.plans[spec]
        options: dict[str, Any] = {_SYNC_BUFFERS: False}
        if spec != OWN_PLAN:
            # A bucket closes on reaching its cap, so each cap is what the bucket shall hold.
            options["bucket_cap_mb_list"] = [size / MIB for size in self.asked]
        self.model = DistributedDataParallel(
            copy.deepcopy(network),
            device_ids=[me.device.index] if me.device.type == "cuda" else None,
            init_sync=False,  # equal seeds made equal weights
            **options,
        )
        # Rate 0 is the same arithmetic, but the weights stay put: every iteration computes the same.
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0, momentum=0.9)
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
            profile_sha256=settings.profile_sha256,
        )

    def measure(self, repeat: int) -> dict[str, pd.DataFrame]:
        """Return rows of this round; in the first also of the buckets, which may be all there is."""
        seconds, used = self._timed()
        check_equal_gradients(self.optimizer)
        tables = {}
        if repeat == 0:
            tables = {"buckets": self._bucket_rows(), "timeline": self._profile()}
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
        iteration, alone = map(format_seconds, (float(np.median(seconds)), compute_s))
        times = f"{iteration} an iteration, compute alone {alone}"
        turn = f"round {repeat + 1} of {self.settings.repeats}"
        self.me.say(f"{self.settings.network}, plan {self.spec}, {turn}: {times}")
        return tables

    def _profile(self) -> pd.DataFrame:
        """Return spans of one iteration as this rank saw it; all ranks profile, so all are equally slow."""
        dist.barrier()
        trace = chrome_trace(lambda: self._iterate(self.synchronize), self.me.device)
        seen = timeline(parse_kineto(trace, "profile of an iteration"), self.buckets)
        messages = int(np.sum(seen.kind == "all_reduce"))
        if messages != len(self.buckets):
            self.me.say(f"the profiler saw {messages} all-reduces of {len(self.buckets)} buckets")
        return pd.DataFrame({"case": [self.case.key], "repeat": 0}).merge(seen.to_frame(), "cross")

    def _bucket_rows(self) -> pd.DataFrame:
        sizes = {"asked": self.asked, "rebuilt": self.buckets}
        rows = [(n, size, source) for source in sizes for n, size in enumerate(sizes[source])]
        return pd.DataFrame(rows, columns=["bucket", "bytes", "source"]).assign(case=self.case.key)

    def _timed(self) -> tuple[Floats, Usage]:
        """Return seconds of each iteration, of the slowest rank, and how the cores were used meanwhile."""
        n = self.settings.iterations
        exactly = Budget(0, n, n, max_s=float("inf"), relative_halfwidth=0.0)
        dist.barrier()
        watch = processor_times()
        seconds = measure(self._iterate, exactly, synchronize=self.synchronize)
        used = processor_usage(watch, processor_times())
        return slowest(seconds), Usage(*slowest(astuple(used)).tolist())

    def _iterate(self, settle: Callable[[], object] = lambda: None) -> None:
        """Do one iteration; ``settle`` ends each phase when the device has done its work."""
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
    """Raise UserError unless momentum, a sum of averaged gradients, is the same on all ranks, to the bit."""
    momenta = [state["momentum_buffer"] for state in optimizer.state.values()]
    sums = everyones([float(momentum.double().sum()) for momentum in momenta])
    if not np.isfinite(sums).all() or (sums != sums[0]).any():
        raise UserError("training: ranks hold different gradients: no time is recorded")
