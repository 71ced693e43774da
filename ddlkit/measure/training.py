"""Training iterations: data-parallel under an imposed bucket plan, and of one process that shares its GPU.

Beside the stand-in (sharing Fig 4 to 8, Tab 2) gradients travel as DistributedDataParallel sends them: in
buckets by its rule, each once its last gradient is ready and all before it have left; the update waits for
them. For every bucket the stand-in moves what each rank of an all-reduce sends: bucket bytes x 2 (n - 1) / n
of n ranks that are not there. The paper's proposal, to give the last message more (5), is a policy here.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

from ddlkit.core.case import Case
from ddlkit.core.collective import COLLECTIVES
from ddlkit.core.errors import UserError
from ddlkit.core.plan import ddp
from ddlkit.core.units import format_seconds
from ddlkit.core.workload import Workload
from ddlkit.formats.export import bucket_caps_mb
from ddlkit.formats.kineto import BACKWARD, FORWARD, UPDATE, parse_kineto, timeline
from ddlkit.jobs import clock
from ddlkit.jobs.clock import Budget, Marks
from ddlkit.jobs.rank import Floats, Rank, Tables, everyones, job, slowest, usage_of_all
from ddlkit.jobs.vitals import Retries, Usage, Watch
from ddlkit.measure.given import DDP_OPTIONS, Training, known
from ddlkit.measure.layers import compute_on
from ddlkit.measure.session import Unavailable
from ddlkit.store import machine
from workbook.record import zoo as networks
from workbook.record.standin import TICK_S, Footprint, GpuStandIn, read_message

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
    how: dict[str, Any] = {"bucket_cap_mb_list": bucket_caps_mb(sizes)} if sizes else {}
    ddp = training.wrap(**how)
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


# -- of one process, beside messages of its own gradients ----------------------------------------


@dataclass(frozen=True)
class Setting:
    """How gradients are sent: footprint : of every message, or all but the ``last``; ranks : emulated."""

    footprint: Footprint
    last: Footprint | None = None
    ranks: int = 2

    @property
    def policy(self) -> str:
        """Return its name in tables."""
        return f"last_{self.last.blocks}x{self.last.threads}" if self.last else "same"


# Messages of no chunks: what the host spends on each is not what sharing costs.
EMPTY = Setting(Footprint(1, 64), ranks=1)
RATES = (0.0, 10e9)
# (blocks, threads): corners of the paper's grid, its default of NCCL, and what NCCL takes today.
GRID = ((1, 64), (1, 512), (2, 256), (4, 64), (4, 512), (16, 512))


def sharing_settings(brief: bool) -> list[Setting]:
    """Return equal footprints, the last with more, and more ranks; ``brief``: few."""
    least, most = (
        [Footprint(*shape, rate) for rate in RATES] for shape in (GRID[0], GRID[-1])
    )
    equal = itertools.product(RATES, GRID[: 1 if brief else None])
    alike = (Setting(Footprint(*shape, rate)) for rate, shape in equal)
    return [*alike, *map(Setting, least, most), Setting(least[-1], ranks=8)]


def chunks_of_messages(sizes: Sequence[float], round_bytes: Sequence[int]) -> list[int]:
    """Return each block's chunks of each message; what exceeds one is credited to the next."""
    ends = np.cumsum(sizes)
    chunks, sent = [], 0
    for end, each in zip(ends, round_bytes, strict=True):
        chunks.append(max(0, int(np.ceil((end - sent) / each))))
        sent += chunks[-1] * each
    return chunks


class Run:
    """One repeat, and what is sent in it: by which footprint, chunks of each block, and what a kernel wrote.

    marks : start, ends of forward, backward, waiting and update
    """

    def __init__(
        self, sizes: Sequence[int], setting: Setting, stand_in: GpuStandIn
    ) -> None:
        self.footprints = [setting.footprint] * (len(sizes) - 1)
        self.footprints.append(setting.last or setting.footprint)
        each = [at.blocks * stand_in.chunk_bytes(at.threads) for at in self.footprints]
        # One rank alone sends nothing: 0 bytes.
        all_reduce = COLLECTIVES["all_reduce"]
        sent = [all_reduce.wire_bytes(setting.ranks, size) for size in sizes]
        self.chunks = chunks_of_messages(sent, each)
        self.n_bytes = int(np.dot(self.chunks, each))
        self.records = [
            stand_in.record(footprint.blocks) for footprint in self.footprints
        ]
        self.marks = Marks(self.records[0].device)

    def seen(self) -> dict[str, float]:
        """Return columns of what marks and records say. Raises UserError where a message is not whole."""
        spans_s, sent = zip(*map(read_message, self.records), strict=True)
        whole = np.multiply(self.chunks, [at.blocks for at in self.footprints])
        if list(sent) != whole.tolist():
            raise UserError(
                f"stand-in as {self.footprints[-1]}: sent {sum(sent)} of {whole.sum()} chunks "
                "in the time that a message may take; ask for a higher rate"
            )
        communication_s = max(TICK_S, sum(spans_s))
        _, _, backward_s, waited_s, _ = self.marks.seconds().tolist()
        exposed_s = waited_s - backward_s
        return {
            "bytes": self.n_bytes,
            "bytes_per_s": self.n_bytes / communication_s,
            "communication_s": communication_s,
            "exposed_communication_s": exposed_s,
            "overlap_share": max(0.0, 1 - exposed_s / communication_s),
        }


class SendingTraining:
    """A network in training whose gradients a stand-in sends; sizes : (buckets,) bytes, as they leave."""

    def __init__(self, training: Training, stand_in: GpuStandIn) -> None:
        self.training, self.stand_in = training, stand_in
        ready: list[str] = []
        with training.watched(lambda _: None, ready.append):
            training.iterate()
        named = dict(training.model.named_parameters())
        n_bytes = [named[tensor].nbytes for tensor in ready]
        plan = ddp(workload := Workload.from_arrays(0, [0] * len(ready), n_bytes))
        self.sizes: list[int] = plan.group_bytes(workload).tolist()
        parts = [ready[part] for part in plan.slices]
        self._bucket = {tensor: k for k, part in enumerate(parts) for tensor in part}
        self._tensors = [len(part) for part in parts]

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """Have gradients leave when they are ready, and the update wait for them."""
        handle = self.training.optimizer.register_step_pre_hook(self._wait)
        with self.training.watched(lambda _: None, self._ready):
            yield
        handle.remove()

    def iterate(self, setting: Setting) -> Run:
        """Do one iteration, within `hooked`."""
        self._missing, self._next = list(self._tensors), 0
        self._run = Run(self.sizes, setting, self.stand_in)
        self.training.iterate(self._run.marks.mark)
        return self._run

    def _ready(self, tensor: str) -> None:
        """Send, in the order of the buckets, whatever is whole now that this gradient is ready."""
        self._missing[self._bucket[tensor]] -= 1
        run = self._run
        while self._next < len(self._missing) and not self._missing[self._next]:
            message = (
                run.footprints[self._next],
                run.chunks[self._next],
                run.records[self._next],
            )
            self.stand_in.send(*message)
            self._next += 1

    def _wait(self, *_: object) -> None:
        self.stand_in.join()
        self._run.marks.mark()


def measure_sharing(
    device: str, network: str, batch: int, compared: Sequence[Setting], budget: Budget
) -> pd.DataFrame:
    """Return table ``sharing``: one network's iterations without messages, and with them by each setting.

    ``seconds`` are the device's own: of quantity "compute" with messages of no bytes (as many, so that the
    host issues the same), of "iteration" with them.
    communication_s : in which messages were under way; exposed_communication_s : from the end of backward to
        the update; overlap_share : of communication_s, what is not exposed
    """
    if device == "cpu":
        raise Unavailable("no stand-in: needs a GPU")
    with compute_on(f"{network} at batch {batch} beside the stand-in", device) as place:
        sending = SendingTraining(known(network, batch, place, PRECISION), GpuStandIn())
        rows = measure_sending(sending, compared, budget)
    return rows.assign(
        network=network, device=place.type, batch=batch, precision=PRECISION
    )


def measure_sending(
    sending: SendingTraining, compared: Sequence[Setting], budget: Budget
) -> pd.DataFrame:
    """Return the same rows of a training that is ready, which they do not name."""
    runs: dict[Setting, list[Run]] = {setting: [] for setting in (EMPTY, *compared)}

    def once(setting: Setting) -> Marks:
        runs[setting].append(sending.iterate(setting))
        return runs[setting][-1].marks

    with sending.hooked():
        actions = {setting: partial(once, setting) for setting in runs}
        wait = clock.synchronizer(sending.training.device)
        samples = clock.measure_interleaved(actions, budget, synchronize=wait)
    frames = []
    for setting, seconds in samples.items():
        columns = {
            "quantity": "compute",
            "ranks": setting.ranks,
            "policy": "none",
            **_NONE,
        }
        if setting != EMPTY:
            taken = sending.stand_in.columns(setting.footprint)
            columns |= {name: taken[name] for name in taken.keys() & columns}
            seen = pd.DataFrame([run.seen() for run in runs[setting][-len(seconds) :]])
            columns |= {"quantity": "iteration", "policy": setting.policy, **seen}
            columns |= {"buckets": len(sending.sizes)}
        frames.append(clock.sample_rows(columns, seconds))
    return pd.concat(frames, ignore_index=True)


_NONE: dict[str, Any] = {
    **dict.fromkeys(("blocks", "threads", "taken_threads", "buckets", "bytes"), 0),
    **dict.fromkeys(("bytes_per_s_asked", "bytes_per_s", "communication_s"), 0.0),
    **dict.fromkeys(("exposed_communication_s", "overlap_share"), 0.0),
}
