"""Data-parallel training iterations under an imposed bucket plan, or under DDP's own rule."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
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
from ddlkit.core.units import format_seconds
from ddlkit.formats.export import bucket_caps_mb
from ddlkit.formats.kineto import BACKWARD, FORWARD, UPDATE, parse_kineto, timeline
from ddlkit.jobs import clock
from ddlkit.jobs.clock import Budget
from ddlkit.jobs.rank import Floats, Rank, Tables, everyones, job, slowest, usage_of_all
from ddlkit.jobs.vitals import Retries, Usage, Watch
from ddlkit.measure import networks
from ddlkit.measure.given import DDP_OPTIONS, Training, known
from ddlkit.measure.layers import compute_on
from ddlkit.store import machine

# As of the profiles that predict it: no TF32, which CUDA's convolutions else take.
PRECISION = "fp32"
OWN_PLAN = "ddp"  # DistributedDataParallel's own rule: nothing is imposed
COPIES = Budget(warmup=2, min_repeats=20, max_repeats=20, max_s=float("inf"))
WARMUP = (
    3  # DDP rebuilds its buckets in the second iteration, and reports them in the third
)


@dataclass(frozen=True)
class TrainingSettings:
    """Training by each plan; plans : bytes of each bucket in ready order, none for "ddp", DDP's own rule.

    accumulate : batches whose gradients are sent once; predicted : how the hash begins of the table that did
    """

    network: str
    batch: int
    plans: Mapping[str, Sequence[int]]
    repeats: int = 2
    iterations: int = 5
    profile_sha256: str = ""
    accumulate: int = 1
    predicted: str = ""

    def __post_init__(self) -> None:
        if "bucket_cap_mb_list" not in DDP_OPTIONS and set(self.plans) - {OWN_PLAN}:
            advice = (
                f"install torch 2.11 or later, or measure the plan {OWN_PLAN!r} only"
            )
            raise UserError(
                f"torch {torch.__version__} cannot impose a bucket plan: {advice}"
            )


@job(TrainingSettings, "runs", "buckets", "timeline")
def training_job(me: Rank, settings: TrainingSettings) -> Iterator[Tables]:
    """Train by every plan once per round, without those whose buckets came out otherwise in the first.

    runs : a row per iteration, of the slowest rank. ``compute_s`` is the median of iterations just before
        and just after, without exchange (``no_sync``); ``exposed_communication_s`` the difference, copies of
        gradients into and out of buckets included; ``copy_s_per_byte`` is what these take alone
    buckets : bytes asked and rebuilt; timeline : one profiled iteration per plan, on rank 0
    """
    if me.device.type == "cpu" and me.world_size > machine.cores() and "lab" in me.link:
        shared = f"{me.world_size} ranks on {machine.cores()} cores"
        raise UserError(
            f"training: {shared} would take turns, which nothing predicts: use fewer"
        )
    with compute_on(f"training of {settings.network}", me.device, PRECISION):
        torch.manual_seed(0)
        network = networks.build(settings.network).to(me.device)
        copying = {
            "copy_s_per_byte": copy_s_per_byte(me, network),
            "precision": PRECISION,
        }
        retries = Retries()
        blocks = {
            spec: _Block(me, settings, network, spec, retries)
            for spec in settings.plans
        }
        for repeat in range(settings.repeats):
            for spec, block in tuple(blocks.items()):
                tables = block.measure(repeat)
                if "runs" in tables:
                    tables["runs"] = tables["runs"].assign(
                        **copying, predicted=settings.predicted
                    )
                else:
                    del blocks[spec]
                yield tables
            if not blocks:
                raise UserError(
                    "training: DDP made other buckets than asked for under every plan"
                )


def copy_s_per_byte(me: Rank, network: nn.Module) -> float:
    """Return seconds a byte to copy the gradients of ``network`` into one buffer, of the slowest rank."""
    sizes = [p.nbytes for p in network.parameters() if p.requires_grad]
    raw: Any = {"dtype": torch.uint8, "device": me.device}  # of whatever types they are
    gradients, whole = (
        [torch.zeros(n, **raw) for n in sizes],
        torch.empty(sum(sizes), **raw),
    )

    def copy_all() -> None:
        for part, gradient in zip(whole.split(sizes), gradients, strict=True):
            part.copy_(gradient)

    seconds = clock.measure_on(me.device, copy_all, COPIES, setup=dist.barrier)
    return float(np.median(slowest(seconds))) / len(whole)


def imposed(
    training: Training, sizes: Sequence[int] = ()
) -> tuple[DistributedDataParallel, list[int], list[int]]:
    """Wrap a training, buckets of so many bytes asked for or by DDP's own rule; return it, bytes and tensors.

    It trains until DDP has made them. Raises UserError unless all ranks then hold equal gradients.
    """
    if sizes:
        ddp = training.wrap(bucket_cap_mb_list=bucket_caps_mb(sizes))
    else:
        ddp = training.wrap()
    sums = list[float]()
    for _ in range(WARMUP):
        training.iterate(lambda: sums.append(training.gradient_sum()))
    after = everyones([sums[-2]])  # what backward left
    if not np.isfinite(after).all() or (after != after[0]).any():
        raise UserError(
            "training: gradients are not finite and the same on all ranks: not timed"
        )
    log: Any = ddp._get_ddp_logging_data()
    buckets = log.get("rebuilt_bucket_sizes", "").replace(",", " ").split()
    tensors = log.get("rebuilt_per_bucket_param_indices", "").split(",")
    return ddp, [int(text) for text in buckets], [len(text.split()) for text in tensors]


class _Block:
    """One plan: a copy of the network, wrapped and warmed up, that trains in every round."""

    def __init__(
        self,
        me: Rank,
        settings: TrainingSettings,
        network: nn.Module,
        spec: str,
        retries: Retries,
    ) -> None:
        self.me, self.settings, self.spec, self.retries = me, settings, spec, retries
        self.asked = settings.plans[spec]
        how = settings.network, settings.batch, me.device, PRECISION
        self.training = known(*how, model=copy.deepcopy(network), rank=me.rank)
        self.training.accumulate = settings.accumulate
        wanted = () if spec == OWN_PLAN else self.asked
        self.model, self.buckets, tensors = imposed(self.training, wanted)
        self.synchronize = clock.synchronizer(me.device)
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
            accumulate=settings.accumulate,
        )

    def measure(self, repeat: int) -> dict[str, pd.DataFrame]:
        """Return rows of this round; in the first also of the buckets, which may be all there is."""
        seconds, compute_s, used = self._undisturbed()
        tables = {}
        if repeat == 0:
            sizes = [("asked", self.asked), ("rebuilt", self.buckets)]
            rows = [
                pd.DataFrame({"bytes": each, "source": source})
                for source, each in sizes
            ]
            buckets = pd.concat(rows).rename_axis("bucket").reset_index()
            tables = {
                "buckets": buckets.assign(case=self.case.key),
                "timeline": self._profile(),
            }
            if self.asked and list(self.asked) != self.buckets:
                made = f"asked {self.asked}, DDP made {self.buckets}"
                self.me.say(f"plan {self.spec} is not measured: {made}")
                return tables
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
                "others": used.others,
                "disturbed": used.disturbed,
            }
        )
        turn = f"{self.settings.network}, plan {self.spec}, round {repeat + 1}"
        iteration, alone = map(format_seconds, (float(np.median(seconds)), compute_s))
        self.me.say(f"{turn}: {iteration} an iteration, compute alone {alone}")
        return tables

    def _profile(self) -> pd.DataFrame:
        """Return spans of one iteration as this rank saw it; all ranks profile, so all are equally slow."""
        phases, inside = iter((FORWARD, BACKWARD, UPDATE)), ExitStack()

        def mark() -> None:
            self.synchronize()
            inside.close()
            if phase := next(phases, ""):
                inside.enter_context(record_function(phase))

        dist.barrier()
        trace = clock.chrome_trace(lambda: self.training.iterate(mark), self.me.device)
        seen = timeline(parse_kineto(trace, "profile of an iteration"), self.buckets)
        return pd.DataFrame({"case": [self.case.key], "repeat": 0}).merge(
            seen.to_frame(), "cross"
        )

    def _undisturbed(self) -> tuple[Floats, float, Usage]:
        """Return seconds of iterations, median seconds of those without exchange around, how cores were used.

        A disturbed turn is taken again, as long as the job may: then it stands as it is, marked.
        """
        while True:
            watch = Watch(self.me.rank)
            before = self._alone()
            seconds = self._timed()
            around = np.append(before, self._alone())
            used = usage_of_all(watch.usage())
            if not self.retries.again(used):
                return seconds, float(np.median(around)), used

    def _alone(self) -> Floats:
        """Return seconds of iterations that exchange no gradients."""
        with self.model.no_sync():
            return self._timed()

    def _timed(self) -> Floats:
        """Return seconds of each iteration, of the slowest rank."""
        n = self.settings.iterations
        exactly = Budget(0, n, n, max_s=float("inf"), relative_halfwidth=0.0)
        dist.barrier()
        return slowest(
            clock.measure(self.training.iterate, exactly, synchronize=self.synchronize)
        )
