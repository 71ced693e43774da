"""Iterations of data-parallel training, under a bucket plan or under DDP's own rule."""

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
from ddlkit.core.lab_links import is_lab
from ddlkit.core.plan import make_plan
from ddlkit.core.units import format_bytes, format_seconds
from ddlkit.core.workload import LayerProfile
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

PRECISION = "fp32"
"""The precision of training, and of the profiles that predict it.

It is set explicitly because CUDA's convolutions would use TF32 by default."""
OWN_PLAN = "ddp"
"""The plan under which nothing is imposed: DistributedDataParallel's own rule."""
COPIES = Budget(warmup=2, min_repeats=20, max_repeats=20, max_s=float("inf"))
"""Twenty copies, however long they take, so that all ranks make equally many."""
WARMUP = 3
"""Iterations until DDP reports the buckets that it has rebuilt.

DDP learns the order of gradients in the first iteration, rebuilds its buckets in that
order in the second, and reports them in the third."""


@dataclass(frozen=True)
class TrainingSettings:
    """The settings of the job.

    Attributes
    ----------
    network, batch : str, int
        The name of the network, and its batch size on each rank.
    plans : mapping of str to sequence of int
        The bytes of each bucket by plan, in the order in which gradients become ready.
        Under the plan ``"ddp"``, DDP chooses its buckets itself. The sizes of this plan are
        those that are predicted, with which DDP's are compared, or none.
    repeats : int
        How many rounds there are. Each round trains under every plan.
    iterations : int
        How many iterations a round has of each plan.
    profile_sha256 : str
        The hash of the profile that made the plans; empty if no profile did.
    accumulate : int
        How many batches an iteration has, whose gradients are sent once.
    predicted : str
        The first digits of the hash of the table that predicted these cases; empty if
        none did.

    Raises
    ------
    UserError
        If a plan is to be imposed and this torch cannot do that.
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
        imposed_plans = set(self.plans) - {OWN_PLAN}
        if imposed_plans and "bucket_cap_mb_list" not in DDP_OPTIONS:
            advice = f"torch 2.11 or later, or measure the plan {OWN_PLAN!r} only"
            raise UserError(
                f"torch {torch.__version__} cannot impose a bucket plan: "
                f"install {advice}"
            )


@job(TrainingSettings, "runs", "buckets", "timeline")
def training_job(me: Rank, settings: TrainingSettings) -> Iterator[Tables]:
    """Train under every plan in each round.

    If DDP makes other buckets than a plan asks for, the plan is left out after the first
    round. A round that other programs disturb is repeated, but not on a GPU, whose kernels
    hardly suffer from what others do on the cores.

    Parameters
    ----------
    me : Rank
        This rank.
    settings : TrainingSettings
        The network and its plans.

    Yields
    ------
    mapping of str to DataFrame
        New rows of three tables.

        ``runs`` has a row per iteration, of the slowest rank. Just before and just after
        the iterations of a round, other iterations run that exchange nothing between
        ranks, and ``compute_s`` is the median of these. ``exposed_communication_s`` is
        ``iteration_s`` less ``compute_s``, and includes copies of gradients into and
        out of buckets. ``copy_s_per_byte`` is the time of such a copy alone.
        ``predicted`` names the table of predictions that were made for these cases: it has
        the first digits of the table's hash, and is empty without such a table.

        ``buckets`` has the bytes that were asked for and those that DDP made.

        ``timeline`` has one profiled iteration per plan, as rank 0 saw it.

    Raises
    ------
    UserError
        If memory runs out, if DDP makes other buckets than asked for under every plan, and if
        more ranks than there are cores train on the cores in a lab, which joins ranks on this
        machine by links of a limited rate.
    """
    _refuse_shared_cores(me)
    with compute_on(f"training of {settings.network}", me.device, PRECISION):
        # `Training.wrap` keeps DDP from sending the first weights of rank 0 to the other
        # ranks. The seed makes the first weights of all ranks equal.
        torch.manual_seed(0)
        network = networks.build(settings.network).to(me.device)
        labels = {
            "copy_s_per_byte": copy_s_per_byte(me, network),
            "precision": PRECISION,
            "predicted": settings.predicted,
        }
        retries = Retries.on(me.device.type, me.say)
        training_by_plan = {
            plan: _PlannedTraining(me, settings, network, plan, retries)
            for plan in settings.plans
        }
        for repeat in range(settings.repeats):
            # A copy of the keys, because the loop removes some.
            for plan in list(training_by_plan):
                tables = training_by_plan[plan].measure(repeat)
                # Without table ``runs``, DDP made other buckets than the plan asks for.
                if "runs" in tables:
                    tables["runs"] = tables["runs"].assign(**labels)
                else:
                    del training_by_plan[plan]
                yield tables
            if not training_by_plan:
                raise UserError(
                    "training: DDP made other buckets than asked for under every plan"
                )


def _refuse_shared_cores(me: Rank) -> None:
    """Raise UserError if a lab has more ranks than cores, and they train on the cores.

    A lab joins ranks on this machine by links of a limited rate. The name of a link says
    whether it belongs to a lab.
    """
    cores = machine.cores()
    computes_on_core_in_lab = me.device.type == "cpu" and is_lab(me.link)
    if computes_on_core_in_lab and me.world_size > cores:
        raise UserError(
            f"training: {me.world_size} ranks on {cores} cores would take turns, "
            "which nothing predicts: use fewer"
        )


def copy_s_per_byte(me: Rank, network: nn.Module) -> float:
    """Time copies of all gradients of a network into one buffer, and return the median.

    Parameters
    ----------
    me : Rank
        This rank.
    network : Module
        The network.

    Returns
    -------
    float
        Seconds per byte, of the slowest rank.
    """
    sizes = [p.nbytes for p in network.parameters() if p.requires_grad]
    # Gradients may have several types. A copy only moves their bytes.
    as_bytes: Any = {"dtype": torch.uint8, "device": me.device}
    gradients = [torch.zeros(size, **as_bytes) for size in sizes]
    whole = torch.empty(sum(sizes), **as_bytes)

    def copy_all() -> None:
        # `split` returns views of the buffer, one for each gradient.
        for view, gradient in zip(whole.split(sizes), gradients, strict=True):
            view.copy_(gradient)

    # All ranks copy at the same time, as in training, and share the memory's bandwidth.
    seconds = clock.measure_on(me.device, copy_all, COPIES, setup=dist.barrier)
    # The buffer has elements of one byte, so its length is its size in bytes.
    return float(np.median(slowest(seconds))) / len(whole)


def wrap_and_rebuild(
    training: Training, sizes: Sequence[int] = ()
) -> tuple[DistributedDataParallel, list[int], list[int]]:
    """Wrap a training in DDP, train until DDP has rebuilt its buckets, and return them.

    Parameters
    ----------
    training : Training
        The model in training, which is changed.
    sizes : sequence of int, optional
        The bytes of each bucket to ask for, in the order in which gradients become
        ready. Without sizes, DDP's own rule applies.

    Returns
    -------
    ddp : DistributedDataParallel
        The wrapped model.
    buckets : list of int
        The bytes of each bucket that DDP made.
    tensors : list of int
        How many tensors each bucket holds. The list is empty if DDP has rebuilt no
        buckets.

    Raises
    ------
    UserError
        Unless all ranks hold equal, finite gradients afterwards.
    """
    if sizes:
        # DDP closes a bucket as soon as it has the size of its cap. So each cap is the size
        # of the wanted bucket, in MiB.
        ddp = training.wrap(bucket_cap_mb_list=bucket_caps_mb(sizes))
    else:
        ddp = training.wrap()
    # `iterate` calls back at each of its marks: the start of the iteration, the start
    # and the end of the backward pass, and the end.
    sums_at_marks: list[float] = []
    for _ in range(WARMUP):
        training.iterate(lambda: sums_at_marks.append(training.gradient_sum()))
    # The last mark of the last iteration comes after gradients are cleared. At the mark
    # before it, the backward pass has just ended, and DDP has averaged the gradients.
    _refuse_different_gradients(gradient_sum=sums_at_marks[-2])
    return ddp, rebuilt_bytes(ddp), _rebuilt_tensor_counts(ddp)


def _refuse_different_gradients(gradient_sum: float) -> None:
    """Raise UserError unless all ranks hold equal, finite gradients.

    ``gradient_sum`` is the sum of this rank's gradients after DDP has averaged them. All
    ranks call this function.
    """
    sums_of_ranks = everyones([gradient_sum])  # shape (ranks, 1)
    # All ranks have got the same averaged gradients, so even the sums of these must be equal
    # to the last bit.
    differs = (sums_of_ranks != sums_of_ranks[0]).any()
    if differs or not np.isfinite(sums_of_ranks).all():
        raise UserError(
            "training: gradients are not finite and the same on all ranks: not timed"
        )


def rebuilt_bytes(ddp: DistributedDataParallel) -> list[int]:
    """Return the sizes of the buckets that DDP has rebuilt.

    Parameters
    ----------
    ddp : DistributedDataParallel
        A wrapped model that was trained for `WARMUP` iterations.

    Returns
    -------
    list of int
        Bytes of each bucket, in the order in which DDP sends them. The list is empty if
        DDP has rebuilt none.
    """
    log: Any = ddp._get_ddp_logging_data()
    # DDP logs all sizes in one text, separated by commas.
    sizes_text = log.get("rebuilt_bucket_sizes", "").replace(",", " ")
    return [int(size) for size in sizes_text.split()]


def _rebuilt_tensor_counts(ddp: DistributedDataParallel) -> list[int]:
    """Return how many tensors each bucket that DDP has rebuilt holds.

    The list is empty if DDP has rebuilt no buckets.
    """
    # DDP logs the indices of the tensors of each bucket in one text, as in "5 4 3,2 1 0".
    # Blanks separate tensors, and commas separate buckets.
    log: Any = ddp._get_ddp_logging_data()
    indices_by_bucket = log.get("rebuilt_per_bucket_param_indices", "").split(",")
    # The text is empty if DDP has rebuilt no buckets.
    return [len(indices.split()) for indices in indices_by_bucket if indices]


def other_than_predicted(training: Training, profile: LayerProfile) -> list[str]:
    """Compare the buckets that are predicted for DDP with those that DDP made.

    Parameters
    ----------
    training : Training
        The model in training, wrapped in DDP with the default buckets and trained until
        they were rebuilt.
    profile : LayerProfile
        The profile of its layers, from which the buckets are predicted.

    Returns
    -------
    list of str
        A line that says how they differ. The list is empty if they are equal, and if
        DDP has rebuilt no buckets.
    """
    # A training that is not wrapped in DDP has no buckets to compare.
    bucket_bytes = rebuilt_bytes(training.ddp) if training.ddp else []
    work = profile.workload()
    predicted_bytes = make_plan(OWN_PLAN, work).group_bytes(work).tolist()
    if not bucket_bytes or bucket_bytes == predicted_bytes:
        return []
    return [
        f"DDP made {_buckets_in_words(bucket_bytes)}, but "
        f"{_buckets_in_words(predicted_bytes)} are predicted: do not rely on plans for "
        "this model"
    ]


def _buckets_in_words(sizes: Sequence[int]) -> str:
    """Return in words the number of buckets and the sizes of the first four."""
    first = ", ".join(format_bytes(size) for size in sizes[:4])
    more = ", ..." if len(sizes) > 4 else ""
    plural = "" if len(sizes) == 1 else "s"
    return f"{len(sizes)} bucket{plural} ({first}{more})"


class _PlannedTraining:
    """Training under one plan: a copy of the network, wrapped in DDP and warmed up.

    Parameters
    ----------
    me : Rank
        This rank.
    settings : TrainingSettings
        The settings of the job.
    network : Module
        The network, which is copied and stays as it is.
    plan : str
        The name of the plan, a key of ``settings.plans``.
    retries : Retries
        How often the job may still repeat a disturbed measurement. All plans share it.

    Attributes
    ----------
    asked_bytes : sequence of int
        The bytes of each bucket of the plan. For DDP's own rule these are predicted, or
        there are none.
    bucket_bytes : list of int
        The bytes of each bucket that DDP made.
    case : Case
        What was measured, as rows of table ``runs`` name it.
    """

    def __init__(
        self,
        me: Rank,
        settings: TrainingSettings,
        network: nn.Module,
        plan: str,
        retries: Retries,
    ) -> None:
        self.me = me
        self.settings = settings
        self.plan = plan
        self.retries = retries
        self.asked_bytes = settings.plans[plan]
        # `known` returns a training of the network: its model, the loss on one random batch,
        # and an optimizer. Plans are trained in turn, and DDP changes the model that it
        # wraps, so each plan has a copy of the model. The number of the rank makes the
        # batches of ranks differ, and thus their gradients.
        self.training = known(
            settings.network,
            settings.batch,
            me.device,
            PRECISION,
            model=copy.deepcopy(network),
            rank=me.rank,
        )
        self.training.accumulate = settings.accumulate
        # The sizes of DDP's own rule are a prediction, which is compared with what DDP
        # makes. If they were imposed, the rule would not be tried.
        imposed_bytes = () if plan == OWN_PLAN else self.asked_bytes
        # `wrap_and_rebuild` also warms the training up: it runs iterations until DDP has
        # rebuilt its buckets.
        self.ddp, self.bucket_bytes, tensor_counts = wrap_and_rebuild(
            self.training, imposed_bytes
        )
        # Waits for what was given to a GPU. On a processor it does nothing.
        self.synchronize = clock.synchronizer(me.device)
        self.case = self._case(tensor_counts)

    def _case(self, tensor_counts: Sequence[int]) -> Case:
        """Return what is measured, as rows of table ``runs`` name it.

        ``tensor_counts`` is how many tensors each bucket holds that DDP made.
        """
        # The case describes a plan by the number of tensors up to the end of each bucket,
        # which is the cumulative sum of the numbers of tensors in buckets.
        ends = np.cumsum(tensor_counts)
        return Case(
            kind="training",
            network=self.settings.network,
            device=self.me.device.type,
            batch=self.settings.batch,
            workers=self.me.world_size,
            link=self.me.link,
            link_bits_per_s=self.me.link_bits_per_s,
            collective="all_reduce",
            plan=self.plan,
            ends=";".join(str(int(end)) for end in ends),
            profile_sha256=self.settings.profile_sha256,
            accumulate=self.settings.accumulate,
        )

    def measure(self, repeat: int) -> dict[str, pd.DataFrame]:
        """Return the tables of round number ``repeat``, from 0.

        Table ``runs`` has the iterations. The first round also has tables ``buckets`` and
        ``timeline``. If DDP made other buckets than the plan asks for, the first round
        has no table ``runs``, by which the caller knows that the plan is to be left out.
        """
        # Seconds of each iteration, the median iteration without exchange between ranks, and
        # how busy the machine was.
        seconds, compute_s, usage = self._measure_undisturbed()
        tables = {}
        if repeat == 0:
            tables["buckets"] = self._bucket_table()
            tables["timeline"] = self._profile()
            # DDP's own rule may have no sizes, and then there is nothing to compare.
            if self.asked_bytes and [*self.asked_bytes] != self.bucket_bytes:
                asked_and_made = (
                    f"asked {self.asked_bytes}, DDP made {self.bucket_bytes}"
                )
                self.me.say(f"plan {self.plan} is not measured: {asked_and_made}")
                return tables
        tables["runs"] = self._rows_of_round(repeat, seconds, compute_s, usage)
        round_name = (
            f"{self.settings.network}, plan {self.plan}, round {repeat + 1} of "
            f"{self.settings.repeats}"
        )
        iteration = format_seconds(float(np.median(seconds)))
        alone = format_seconds(compute_s)
        self.me.say(f"{round_name}: {iteration} an iteration, compute alone {alone}")
        return tables

    def _rows_of_round(
        self, repeat: int, seconds: Floats, compute_s: float, usage: Usage
    ) -> pd.DataFrame:
        """Return the rows of table ``runs`` for round number ``repeat``, one per iteration.

        ``seconds`` are those of each iteration. ``compute_s`` is the median iteration in
        which ranks exchange nothing, and ``usage`` says how busy the machine was.
        """
        return pd.DataFrame(
            {
                **asdict(self.case),
                "case": self.case.key,
                "origin": "measured",
                "repeat": repeat,
                "iteration": np.arange(len(seconds)),
                "iteration_s": seconds,
                "compute_s": compute_s,
                "exposed_communication_s": seconds - compute_s,
                "processor_load": usage.busy,
                # Whether the processor, and not the link, may have set the pace.
                "processor_limited": usage.limited,
                # The shares of the cores' time that other virtual machines took, and that
                # other programs spent in user code.
                "stolen": usage.stolen,
                "others": usage.others,
                # Whether one of these two shares is above its limit.
                "disturbed": usage.disturbed,
            }
        )

    def _bucket_table(self) -> pd.DataFrame:
        """Return a row for each bucket that was asked for and for each that DDP made.

        The column ``bucket`` numbers the buckets asked for from 0, and those made also from
        0.
        """
        asked = pd.DataFrame({"bytes": self.asked_bytes, "source": "asked"})
        rebuilt = pd.DataFrame({"bytes": self.bucket_bytes, "source": "rebuilt"})
        # Each of the two frames numbers its rows from 0. `concat` keeps these numbers, which
        # then become the column ``bucket``.
        buckets = pd.concat([asked, rebuilt]).rename_axis("bucket").reset_index()
        return buckets.assign(case=self.case.key)

    def _profile(self) -> pd.DataFrame:
        """Return table ``timeline``: the spans of one iteration, as this rank saw it.

        The profiler slows an iteration down. All ranks profile, so all are equally
        slow.
        """
        # The phases that have not begun yet.
        phases = iter((FORWARD, BACKWARD, UPDATE))
        # Holds the open span of the phase that is under way, and `close` ends this span.
        open_span = ExitStack()

        def mark() -> None:
            """End the span of the phase that ends here, and begin that of the next."""
            # The span of a phase also covers the work that the phase has given to a GPU.
            self.synchronize()
            # At the first mark no span is open, and `close` does nothing.
            open_span.close()
            # At the last mark no phase is left.
            phase = next(phases, "")
            if phase:
                open_span.enter_context(record_function(phase))

        dist.barrier()
        # `iterate` calls `mark` at four points: the start of the iteration, before and
        # after the backward pass, and at the end.
        trace = clock.chrome_trace(lambda: self.training.iterate(mark), self.me.device)
        events = parse_kineto(trace, "profile of an iteration")
        # The k-th message of the iteration sends the k-th bucket, and gets its size.
        spans = timeline(events, self.bucket_bytes)
        # Only the first round, number 0, is profiled. The cross product with a table of
        # one row adds the labels to every span.
        labels = pd.DataFrame({"case": [self.case.key], "repeat": 0})
        return labels.merge(spans.to_frame(), how="cross")

    def _measure_undisturbed(self) -> tuple[Floats, float, Usage]:
        """Time some iterations, and as many without exchange before and after them.

        If other programs disturb any of these iterations, all are timed again, as long as
        ``retries`` allows it. The times of the last try are returned in any case, and the
        usage says whether they were disturbed.

        Returns
        -------
        seconds : ndarray
            Seconds of each iteration, of the slowest rank.
        compute_s : float
            The median of the iterations without exchange, in seconds.
        usage : Usage
            How busy the machine was in the meantime, from what all ranks saw.
        """
        while True:
            watch = Watch(self.me.rank)  # notes how busy the machine is from now on
            # Iterations without exchange run before and after those with exchange, so that
            # drift of the machine affects both alike.
            alone_before = self._timed_without_exchange()
            seconds = self._timed()
            alone_after = self._timed_without_exchange()
            usage = usage_of_all(watch.usage())
            # `again` is false if nothing disturbed the times, or if no repeat is left.
            if not self.retries.again(usage):
                compute_s = float(np.median(np.append(alone_before, alone_after)))
                return seconds, compute_s, usage

    def _timed_without_exchange(self) -> Floats:
        """Do the same as `_timed`, but exchange no gradients between ranks."""
        with self.ddp.no_sync():
            return self._timed()

    def _timed(self) -> Floats:
        """Train for ``settings.iterations``, and return the seconds of each iteration.

        The seconds are those of the slowest rank.
        """
        count = self.settings.iterations
        # All ranks have to do equally many iterations, because they exchange gradients in
        # each. So neither time nor a narrow interval ends the loop early.
        exactly_count = Budget(
            warmup=0,
            min_repeats=count,
            max_repeats=count,
            max_s=float("inf"),
            relative_halfwidth=0.0,
        )
        dist.barrier()
        # Because of `host_counts`, the seconds include those in which a GPU waits for the host,
        # as it does in a user's training.
        seconds = clock.measure_on(
            self.me.device, self.training.iterate, exactly_count, host_counts=True
        )
        return slowest(seconds)
