"""A user's own model: its layers, and all else that an advice on its buckets needs.

The model is measured alone, or in each rank that torchrun, Slurm or
`ddlkit.jobs.launch` started. An advice needs four tables: ``layers`` and ``samples``
say what an iteration computes, ``collectives`` what messages take, and ``slowdown`` how
much both slow each other down. The best plans are then tried on real iterations, in
table ``trials``.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from pandas import DataFrame
from torch.nn.parallel import DistributedDataParallel

from ddlkit import store
from ddlkit.core.errors import UserError, one_line
from ddlkit.core.units import KIB, MIB, format_seconds
from ddlkit.core.workload import LayerProfile
from ddlkit.jobs import clock
from ddlkit.jobs import rank as peers
from ddlkit.jobs.clock import Budget
from ddlkit.jobs.rank import Floats, Rank, Tables, everyones, job, joined, slowest
from ddlkit.jobs.vitals import Retries, Watch
from ddlkit.measure.collectives import (
    NCCL_MESSAGES,
    CollectivesSettings,
    collectives_job,
    whole_size,
)
from ddlkit.measure.given import DDP_OPTIONS, Training, load, missing_gradients
from ddlkit.measure.layers import compute_on, profile_training
from ddlkit.measure.session import Origin, table_path
from ddlkit.measure.slowdown import send_nothing, slowdown_rounds
from ddlkit.measure.training import other_than_predicted, wrap_and_rebuild
from ddlkit.model import Calibration
from ddlkit.model.advice import DEFAULT, Advice, is_decided, measured_gain
from ddlkit.model.contention import Contention
from ddlkit.model.predictor import scatter_of

GLOO_MESSAGES = 4
"""How many messages a sample has with gloo: a choice, not measured. `NCCL_MESSAGES` is the
number for NCCL, for which 4 would mostly show how the ranks begin."""
MEETING_S = 300.0
"""Seconds until all ranks must have built the model."""
ITERATIONS_TO_REBUILD = 3
"""Iterations after which DDP reports the buckets that it has rebuilt."""
LEAST_HOOKED = 0.97
"""Iterations with hooks that take less than this share of the time of the others show that
times scatter."""
TOO_LATE = 0.9
"""If the first gradient is ready after this share of backward, little can overlap."""


# -- the layers of a model -------------------------------------------------------------


def measure_model(
    user_model: str, accumulate: int, out: Path | str, budget: Budget
) -> dict[str, Any]:
    """Measure the layers of a user's model and save them.

    Parameters
    ----------
    user_model : str
        The model, as `ddlkit.measure.given.load` takes it.
    accumulate : int
        How many batches an iteration has.
    out : Path
        Where tables ``layers`` and ``samples`` are saved, by rank 0.
    budget : Budget
        How long to measure.

    Returns
    -------
    dict
        What to show of the result: names, numbers, medians in seconds, whether DDP's
        buckets have the order of the profile ("order", in words) and the path of table
        ``layers`` ("profile"). It is empty on all ranks but rank 0.

    Raises
    ------
    UserError
        If the model cannot be loaded or trained, if ranks have different models, and
        if the ranks do not meet.
    """
    # What a user should know of the model and its times besides the numbers.
    notes: list[str] = []
    # `joined` makes this process one of the ranks of the job, or the only rank. An empty
    # precision leaves the settings that the user's own code has made.
    with joined(MEETING_S) as me, compute_on(user_model, me.device, precision=""):
        training = loaded_together(user_model, accumulate, me, notes)
        longest = format_seconds(budget.max_s)
        # Each repeat has two iterations: one with hooks and one without.
        me.say(
            f"timing iterations of {training.network}: {2 * budget.warmup} to warm up, then at "
            f"least {2 * budget.min_repeats}, and more for at most {longest}"
        )
        tables, profile = layers_of(training, budget, me)
        me.say(
            "comparing the order of gradients with that of DDP, which takes a few iterations"
        )
        # The comparison wraps the model in DDP with default buckets, and trains until DDP
        # has rebuilt them. It returns in words whether DDP's order is that of the profile.
        # `other_than_predicted` then looks at the rebuilt buckets.
        order = order_compared_with_ddp(training, profile)
        notes += other_than_predicted(training, profile)
    # Only rank 0 saves tables and shows the result.
    if me.rank != 0:
        return {}
    notes += remarks(training, profile)
    if accumulate > 1:
        notes.append(
            f"of an iteration of {accumulate} batches, backward_s is the last backward "
            "pass, and forward_s is all that comes before it"
        )
    facts = _facts_to_show(profile, tables["samples"], me.world_size)
    # Timing layers cannot make an iteration shorter. If it seems to, times scatter.
    notes += _note_on_scatter(facts["timing_overhead_factor"])
    for note in notes:
        me.say(note)
    # Each table is saved with a file that says where its rows come from. This file repeats
    # all notes.
    origin = Origin(remark="; ".join([*notes, f"order: {order}"]))
    name = f"{profile.network}-b{profile.batch}-r{me.world_size}"
    for schema, rows in tables.items():
        origin.save(table_path(Path(out), schema, name), rows, schema)
    return {
        **facts,
        "order": order,
        "profile": str(table_path(Path(out), "layers", name)),
    }


def _note_on_scatter(timing_overhead_factor: float) -> list[str]:
    """Return a note if iterations with hooks seem to be clearly shorter than without.

    ``timing_overhead_factor`` is the duration of an iteration with hooks divided by that of
    one without. Hooks time single layers, which cannot make an iteration shorter. So a factor
    clearly below 1 shows that the times scatter. For any other factor the list is empty.
    """
    # By chance the factor may be a little less than 1.
    if timing_overhead_factor >= LEAST_HOOKED:
        return []
    return [
        f"iterations in which layers were timed took {timing_overhead_factor:.2f} times as long "
        "as the other iterations, although timing layers cannot make an iteration "
        "shorter. The times scatter too much: measure longer with --budget, on a machine "
        "that does nothing else"
    ]


def _facts_to_show(
    profile: LayerProfile, samples: DataFrame, ranks: int
) -> dict[str, Any]:
    """Return what was profiled, its size, and the times of an iteration in seconds.

    ``samples`` is the table ``samples`` that was measured with the profile. It has a row
    for each repeat (column ``sample``) of each quantity. The times are medians over the
    repeats. ``timing_overhead_factor`` is the duration of an iteration in which layers
    are timed, divided by that of one in which they are not.
    """
    median_s = samples.groupby("quantity")["seconds"].median()
    # A row of `pairs` has the seconds of all quantities in one repeat, in which an iteration
    # with hooks follows one without. Drift of the machine is nearly the same in both, so
    # their ratio is formed for each repeat.
    pairs = samples.pivot(index="sample", columns="quantity", values="seconds")
    factors = pairs["hooked_iteration"] / pairs["unhooked_iteration"]
    return {
        "network": profile.network,
        "device": profile.device,
        # All rows have the same precision.
        "precision": samples["precision"].iloc[0],
        "ranks": ranks,
        "tensors": len(profile.tensor),
        "gradient_bytes": int(profile.gradient_bytes.sum()),
        "forward_s": float(median_s["forward"]),
        "backward_s": float(median_s["backward"]),
        "update_s": float(median_s["update"]),
        "timing_overhead_factor": factors.median(),
    }


def layers_of(
    training: Training, budget: Budget, me: Rank
) -> tuple[Tables, LayerProfile]:
    """Measure the layers of any model in training, on all ranks at once.

    Parameters
    ----------
    training : Training
        The model in training.
    budget : Budget
        How long to measure.
    me : Rank
        This rank.

    Returns
    -------
    tables : mapping of str to DataFrame
        Tables ``samples`` and ``layers``.
    profile : LayerProfile
        The profile that ``layers`` holds.
    """
    precision = training.precision
    profile, samples = profile_training(training, precision, budget, me)
    layers = store.profile_frame(profile, precision, me.world_size, me.torch_threads)
    return {"samples": samples, "layers": layers}, profile


def loaded_together(
    user_model: str, accumulate: int, me: Rank, notes: list[str]
) -> Training:
    """Return a user's model in training, after every rank has loaded and tried it.

    Parameters
    ----------
    user_model : str
        The model, as `ddlkit.measure.given.load` takes it.
    accumulate : int
        How many batches an iteration has. The network's name says so if there are
        several.
    me : Rank
        This rank.
    notes : list of str
        A list to which remarks on the model are appended.

    Returns
    -------
    Training
        The model in training. A compiled model is wrapped in DDP.

    Raises
    ------
    UserError
        If the model cannot be loaded or trained, here or in another rank, and if ranks
        have different models.
    """
    failure: Exception | None = None
    own_summary: list[int]
    try:
        training = _loaded_and_tried(user_model, accumulate, me, notes)
        own_summary = _summary(training)
    except Exception as error:
        # A rank that fails still takes part in the exchange below. Otherwise the others
        # would wait for it until a timeout.
        failure = error
        own_summary = _NO_MODEL
    # A row for each rank.
    summaries = everyones(own_summary).tolist()
    if failure:
        raise failure
    # A rank whose own model is good raises an error here if another rank has failed,
    # because `_NO_MODEL` differs from the summary of every model.
    _refuse_different_models(summaries, user_model)
    return training


def _loaded_and_tried(
    user_model: str, accumulate: int, me: Rank, notes: list[str]
) -> Training:
    """Return a user's model in training on this rank, after a first iteration of it.

    The arguments and the result are those of `loaded_together`. Raises an error if the
    model cannot be loaded or trained.
    """
    training = load(user_model, me.device, notes)
    if training.compiled:
        # In DDP the compiler breaks a model's graph where the buckets end. So a compiled
        # model is profiled inside DDP, with breaks as in training.
        wrap_alone(training)
    # A first forward and backward pass, of one batch, shows whether the model can be
    # trained.
    me.say(f"trying one forward and backward pass of {training.network}")
    training.try_out()
    # From now on an iteration has `accumulate` batches. If these are several, the name says
    # so, as in "net-k4" for 4, because tables are named by it.
    training.accumulate = accumulate
    if accumulate > 1:
        training.network += f"-k{accumulate}"
    return training


def _refuse_different_models(summaries: list[list[float]], user_model: str) -> None:
    """Raise UserError if the model of a rank differs from that of rank 0.

    ``summaries`` has what `_summary` returns on each rank, in the order of ranks.
    ``user_model`` is the model as the user names it.
    """
    summary_of_rank_0, *other_summaries = summaries
    for rank, summary in enumerate(other_summaries, start=1):
        if summary != summary_of_rank_0:
            text_of_rank_0 = f"rank 0's has {_in_words(summary_of_rank_0)}"
            text_of_rank = f"rank {rank}'s has {_in_words(summary)}"
            raise UserError(
                f"{user_model}: models differ between ranks: {text_of_rank_0}, "
                f"{text_of_rank}; build the same on each"
            )


_NO_MODEL = [-1, 0, 0]
"""The summary of a rank whose model failed. No digest is negative."""


def _summary(training: Training) -> list[int]:
    """Return what must be equal on all ranks, as three numbers.

    These are a hash of the names, shapes and types of the trained tensors, the number
    of tensors, and the number of elements.
    """
    trained = training.trained()
    text = repr([(name, p.shape, p.dtype) for name, p in trained.items()])
    # Ranks exchange float64 numbers, which hold integers up to 2**53 exactly. So the hash
    # is cut to 12 hexadecimal digits, which are 48 bits.
    digest = int(hashlib.sha256(text.encode()).hexdigest()[:12], 16)
    elements = sum(p.numel() for p in trained.values())
    return [digest, len(trained), elements]


def _in_words(summary: Sequence[float]) -> str:
    """Return a result of `_summary` in words, without the hash.

    The numbers are floats, because ranks exchange floats.
    """
    _digest, tensors, elements = summary
    return f"{tensors:.0f} tensors of {elements:.0f} elements"


def wrap_alone(training: Training) -> None:
    """Wrap a model in a DDP of one process, which sends nothing.

    A compiled model is profiled inside such a DDP, because the compiler breaks its graph where
    the buckets of DDP end. For other models such a DDP shows in which order gradients become
    ready under DDP.

    Parameters
    ----------
    training : Training
        The model in training, which is changed.
    """
    # By default all ranks would have to make every group together. With local
    # synchronization each rank makes its own. Nothing is sent, so gloo is enough for a
    # model on a GPU, too.
    group = dist.new_group(
        [dist.get_rank()], backend="gloo", use_local_synchronization=True
    )
    ddp = training.wrap(process_group=group)
    # By default DDP runs an all-reduce of each bucket, even in a group of one process.
    send_nothing(ddp)


def order_compared_with_ddp(training: Training, profile: LayerProfile) -> str:
    """Compare the order in which gradients become ready with DDP's own.

    DDP notes in which order gradients become ready, and rebuilds its buckets in that
    order.

    Parameters
    ----------
    training : Training
        The model in training, which is changed: it is wrapped in DDP if it is not yet, and
        trained for some iterations.
    profile : LayerProfile
        The profile of its layers.

    Returns
    -------
    str
        In a few words whether DDP has the order of the profile, or why this was not
        compared.
    """
    why_not_comparable = _let_ddp_rebuild_buckets(training, profile)
    if why_not_comparable:
        return f"not compared: {why_not_comparable}"
    n_differing = _count_at_other_places(training, profile)
    if n_differing:
        return (
            f"{n_differing} of {len(profile.tensor)} gradients become ready under DDP at "
            "another place in the order than in the layer profile, from which the predictions "
            "are made"
        )
    return (
        "gradients become ready under DDP in the order of the layer profile, from which the "
        "predictions are made"
    )


def _let_ddp_rebuild_buckets(training: Training, profile: LayerProfile) -> str:
    """Train a model under DDP until DDP has rebuilt its buckets.

    The model is wrapped in a DDP of one process if no DDP wraps it yet. ``profile`` is the
    profile of its layers.

    Returns
    -------
    str
        Why DDP cannot rebuild the buckets of this model, or "" if it has.
    """
    # Only tensors that get a gradient are in a profile.
    if len(training.trained()) > len(profile.tensor):
        return (
            "some parameters get no gradient, so that DDP needs "
            "find_unused_parameters=True and rebuilds no buckets"
        )
    try:
        # A compiled model was wrapped in DDP when it was loaded.
        if not training.ddp:
            wrap_alone(training)
        for _ in range(ITERATIONS_TO_REBUILD):
            training.iterate()
    except RuntimeError as error:
        # DDP raises this error for a model that it cannot train, such as one that uses a
        # parameter in several reentrant checkpoints.
        return f"DDP fails: {one_line(str(error), most=200)}"
    # `Training.wrap` puts the model into a module that notes whether the loss calls it.
    ddp: Any = training.ddp
    if not ddp.module.called:
        return "loss() does not call the model itself, as DDP needs"
    return ""


def _count_at_other_places(training: Training, profile: LayerProfile) -> int:
    """Return how many gradients have another place in DDP's order than in a profile.

    A place is a position in the order in which the gradients of one type become ready. A
    bucket holds tensors of one type, and the buckets of each type are filled on their own.
    So the order of gradients of different types does not matter. ``training`` must be in a
    DDP that has rebuilt its buckets.
    """
    trained = training.trained()

    def type_of(name: str) -> str:
        return str(trained[name].dtype)

    # A profile has tensors in forward order. Gradients become ready in reverse order.
    ready = profile.tensor[::-1]
    # `sorted` puts tensors of one type together, and keeps their order.
    profiled_order = sorted(ready, key=type_of)
    ddp_order = sorted(_order_in_rebuilt_buckets(training), key=type_of)
    # Every tensor that DDP did not log counts as differing. If DDP logged none, `zip`
    # yields no pair, and all tensors differ.
    n_differing = len(profiled_order) - len(ddp_order)
    for profiled, logged_by_ddp in zip(profiled_order, ddp_order, strict=False):
        if profiled != logged_by_ddp:
            n_differing += 1
    return n_differing


def _order_in_rebuilt_buckets(training: Training) -> list[str]:
    """Return the names of the tensors in the buckets that DDP has rebuilt, in order.

    The list is empty if DDP has rebuilt no buckets.
    """
    ddp: Any = training.ddp
    # DDP logs the parameters of each bucket in one text, as in "5 4 3,2 1 0". The numbers
    # are positions in the order of definition.
    log = ddp._get_ddp_logging_data()
    logged = log.get("rebuilt_per_bucket_param_indices", "")
    positions = [int(word) for word in logged.replace(",", " ").split()]
    names = [*training.trained()]
    return [names[position] for position in positions]


def remarks(training: Training, profile: LayerProfile) -> Iterator[str]:
    """Yield what a user should know of a profile besides its numbers.

    Parameters
    ----------
    training : Training
        The model in training.
    profile : LayerProfile
        Its profile.

    Yields
    ------
    str
        A remark.
    """
    if training.backwards:
        yield (
            f"loss() runs backward itself, times: {training.backwards}; a gradient "
            "counts as ready when it becomes ready for the last time, and forward is "
            "all that precedes the last backward"
        )
    if training.compiled:
        # Layers of a compiled model are not seen, so the row of the first tensor has the time
        # of the whole forward pass.
        yield (
            "compiled: profiled inside DDP in one process; forward is one time, "
            "which the first tensor has"
        )
    missing = [name for name in training.trained() if name not in profile.tensor]
    if missing:
        examples = ", ".join(missing[:3])
        yield f"{len(missing)} tensors get no gradient and have no row: {examples}"
    # The last tensor in forward order has the first gradient that is ready. Its
    # `backward_s` is the time from the start of backward until then. Messages can only
    # overlap with what follows.
    share = profile.backward_s[-1] / profile.backward_s.sum()
    if share > TOO_LATE:
        yield (
            f"the first gradient is ready only after {share:.0%} of backward: nothing "
            "can overlap"
        )


# -- advice ----------------------------------------------------------------------------

DDP_TAKES_LISTS = "bucket_cap_mb_list" in DDP_OPTIONS
"""Whether this torch (2.11 and later) lets a user choose the size of each bucket."""
SIZES = (4 * KIB, 64 * KIB, 512 * KIB, 2 * MIB, 8 * MIB, 32 * MIB)
"""Bytes of the messages that are measured, besides one of all gradients."""
START_UP_BYTES = 64 * KIB
"""The size of a message whose time is nearly all start-up latency."""
FOR_LAYERS = 0.2
"""The share of the measuring time that table ``layers`` gets."""
FOR_MESSAGES = 0.4
"""The share of the measuring time that table ``collectives`` gets."""
FOR_SLOWDOWN = 0.3
"""The share of the measuring time that table ``slowdown`` gets."""
MIN_ITERATIONS = 40.0
"""Iterations that must fit into the time for ``slowdown``.

Its three rounds of three sizes of messages have about as many."""
MIN_WHOLE_MESSAGES = 20.0
"""Messages of all gradients that must fit into the time for ``collectives`` and
``slowdown``."""
LOOKS = (6, 12, 24, 48, 96)
"""The numbers of rounds after which a trial looks whether it is decided.

The first is also the least number of rounds, and the last the greatest. Fewer than 6 rounds
have no interval, so at least 6 are run even if time is up. Each look is one more chance to
be wrong, so there are few of them."""
PLANNED_ROUNDS = 10
"""Rounds that are to fill the time. The number of iterations in a round follows from it."""
PLANS_TRIED = 2
"""Plans that are tried besides the default."""
THREE_TIMES = Budget(
    warmup=0, min_repeats=3, max_repeats=3, max_s=math.inf, relative_halfwidth=0.0
)
"""Exactly three repeats."""
MIN_ITERATIONS_PER_ROUND = 3
"""The fewest iterations of a plan in a round."""
MAX_ITERATIONS_PER_ROUND = 20
"""The most iterations of a plan in a round."""
MEASURED = ("layers", "collectives", "slowdown")
"""What is measured before a trial, in this order."""


@dataclass(frozen=True)
class AdviseSettings:
    """The settings of the job.

    Attributes
    ----------
    model : str
        The model, as `ddlkit.measure.given.load` takes it.
    accumulate : int
        How many batches an iteration has.
    measure_s : float
        Seconds in which layers and messages are measured.
    confirm_s : float
        Seconds in which plans are tried; 0 for no trial.
    """

    model: str
    accumulate: int = 1
    measure_s: float = 180.0
    confirm_s: float = 180.0


@job(AdviseSettings, "layers", "samples", "collectives", "slowdown", "trials")
def advise_job(me: Rank, settings: AdviseSettings) -> Iterator[Tables]:
    """Measure the tables that are missing, then try the default and the best plans.

    A plan says which gradients share a bucket of DDP. Nothing is tried if
    ``settings.confirm_s`` is 0, or if no plan but the default can be tried.

    Parameters
    ----------
    me : Rank
        This rank. Tables that an earlier call left in its ``out`` are used.
    settings : AdviseSettings
        The model and how long to measure.

    Yields
    ------
    mapping of str to DataFrame
        Tables by their schema.

    Raises
    ------
    UserError
        If the model cannot be loaded or trained on any rank, if ``settings.measure_s`` is
        too short, and if DDP would not send exactly the buckets of a plan: the loss runs
        backward several times, or a parameter gets no gradient.
    """
    notes: list[str] = []
    begun_s = time.monotonic()
    # An empty precision leaves the settings that the user's own code has made.
    with compute_on(settings.model, me.device, precision=""):
        training = loaded_together(settings.model, settings.accumulate, me, notes)
        _refuse_other_buckets_than_given(training, settings.model)
        # Only rank 0 has tables, so all ranks take the answer of rank 0. This is row 0
        # of the answers of all ranks.
        present = everyones(_measured_before(me, training))[0]
        if all(present):
            me.say("all tables are there already, so that --minutes has no effect")
        else:
            _refuse_too_little_time(training, settings)
        if training.precision != "fp32":
            notes.append(
                "messages are timed as fp32 of as many bytes; other sums may take longer"
            )
        for schema, is_present in zip(MEASURED, present, strict=True):
            if is_present:
                me.say(
                    f"the table {schema} is there already: give another --out to measure anew"
                )
                continue
            left_s = settings.measure_s - (time.monotonic() - begun_s)
            me.say(f"measuring {schema}; {_time_left(left_s)}")
            yield from _measure_table(schema, me, training, settings, notes)
        for note in notes:
            me.say(note)
        if settings.confirm_s > 0:
            plans = _plans_to_try(me, training)
            yield from trial(me, training, plans, settings.confirm_s)


def _time_left(left_s: float) -> str:
    """Return in words how much is left of the time in which all tables are measured."""
    # Less than a second counts as none. Each table gets a few repeats all the same.
    if left_s < 1:
        return "the time of --minutes is over, so that only a few repeats are timed"
    return f"{left_s:.0f} s of --minutes are left for measuring"


def _remove_trials(me: Rank) -> None:
    """Remove the table of an earlier trial and its stamp. Only rank 0 has tables."""
    if me.rank == 0:
        (me.out / "trials.csv").unlink(missing_ok=True)
        (me.out / "trials.json").unlink(missing_ok=True)


def _measure_table(
    schema: str,
    me: Rank,
    training: Training,
    settings: AdviseSettings,
    notes: list[str],
) -> Iterator[Tables]:
    """Measure a table of `MEASURED` within its share of the time, and yield its rows.

    Parameters
    ----------
    schema : str
        The name of the table, one of `MEASURED`.
    me : Rank
        This rank. All ranks measure together.
    training : Training
        The user's model in training, whose layers or messages are measured.
    settings : AdviseSettings
        How long all tables together may take, ``measure_s``.
    notes : list of str
        The list to which what a user should know of the layers is appended.

    Yields
    ------
    mapping of str to DataFrame
        New rows, by the name of their table. Each item adds to the items before it. Table
        ``layers`` comes in one item, together with table ``samples``. Table
        ``collectives`` comes in one item, too, because only all-reduces are measured. Table
        ``slowdown`` has an item for each round.
    """
    if schema == "layers":
        max_s = FOR_LAYERS * settings.measure_s
        yield _measure_layers(me, training, max_s, notes)
    elif schema == "collectives":
        max_s = FOR_MESSAGES * settings.measure_s
        yield from _measure_messages(me, training, max_s)
    else:  # table ``slowdown``
        yield from slowdown_rounds(
            me,
            training,
            sizes=_sizes_for_slowdown(training.gradient_bytes),
            max_s=FOR_SLOWDOWN * settings.measure_s,
            # The time is long enough for three rounds, as `_refuse_too_little_time` ensures.
            # `_measure_layers` and `_measure_messages` choose their fewest repeats themselves.
            min_repeats=3,
        )


def _measure_layers(
    me: Rank, training: Training, max_s: float, notes: list[str]
) -> Tables:
    """Measure the layers of a training for ``max_s``, and append remarks to ``notes``."""
    budget = Budget(warmup=1, min_repeats=4, max_repeats=200, max_s=max_s)
    tables, profile = layers_of(training, budget, me)
    notes += remarks(training, profile)
    # The comparison wraps the model in DDP with default buckets, and trains until DDP
    # has rebuilt them. `other_than_predicted` then looks at the rebuilt buckets.
    notes.append(f"order: {order_compared_with_ddp(training, profile)}")
    notes += other_than_predicted(training, profile)
    return tables


def _measure_messages(me: Rank, training: Training, max_s: float) -> Iterator[Tables]:
    """Measure all-reduces as large as the buckets of a training may be, for ``max_s``."""
    sizes = message_sizes(training.gradient_bytes, me.world_size)
    settings = CollectivesSettings(
        collectives=("all_reduce",),
        sizes=sizes,
        budget=Budget(
            warmup=1, min_repeats=4, max_repeats=100, max_s=max_s / len(sizes)
        ),
        # A single small message would mostly show how far apart ranks begin. So a sample
        # is the mean of several messages that follow one another.
        messages_per_sample=NCCL_MESSAGES if me.backend == "nccl" else GLOO_MESSAGES,
    )
    # This process is a rank already, so it calls the job's `part` instead of launching the
    # job.
    yield from collectives_job.part(me, settings)


def _sizes_for_slowdown(all_bytes: int) -> list[int]:
    """Return the sizes in bytes of the messages for table ``slowdown``, in order.

    The smallest is nearly all start-up latency. The next is an eighth of all gradients,
    as large as a bucket of a plan may be. The largest is that of all gradients, which
    have ``all_bytes``. For a tiny model some of these are equal, and listed once.
    """
    start_up = min(START_UP_BYTES, all_bytes)
    # Messages have whole elements of 4 bytes. Fewer than 8 elements have no eighth, and
    # the size of all gradients takes its place.
    elements = all_bytes // 4
    eighth = 4 * (elements // 8) or all_bytes
    return sorted({start_up, eighth, all_bytes})


def message_sizes(all_bytes: int, world_size: int) -> list[int]:
    """Return the sizes of the messages whose times an advice needs, in bytes.

    Parameters
    ----------
    all_bytes : int
        The size of all gradients together.
    world_size : int
        How many ranks there are.

    Returns
    -------
    list of int
        At least two sizes, because no cost can be fitted to the times of a single size.

    Examples
    --------
    >>> message_sizes(100_000, 2), message_sizes(32, 2)
    ([4096, 65536, 100000], [32, 4096])
    """
    sizes = [size for size in SIZES if size < all_bytes]
    # The size of all gradients is rounded up so that all ranks hold equally many elements.
    sizes.append(whole_size(all_bytes, world_size))
    # A tiny model has no size of SIZES below its own. The next one above is added.
    if len(sizes) == 1:
        sizes.append(next(size for size in SIZES if size > sizes[0]))
    return sizes


def _measured_before(me: Rank, training: Training) -> list[float]:
    """Return 1.0 for each table of `MEASURED` that an earlier call left, 0.0 for others.

    These are numbers, because ranks exchange numbers only. Only rank 0 has tables, so
    all other ranks return 0.0. Tables of another model, of another number of ranks or of
    another link do not count.
    """
    none_measured = [0.0] * len(MEASURED)
    # Only table ``layers`` names the tensors of the model. Without it, nothing shows
    # whether the other tables belong to this model.
    if me.rank != 0 or not _is_between_these_ranks(me, "layers"):
        return none_measured
    profile = store.read_profile(me.out / "layers.csv")
    profiled = dict(zip(profile.tensor, profile.parameters.tolist(), strict=True))
    trained = {name: p.numel() for name, p in training.trained().items()}
    # The name of the network also says how many batches an iteration has.
    if profiled != trained or profile.network != training.network:
        return none_measured
    # A precision such as "bf16+fp32" says that gradients have several types, which DDP puts
    # into different buckets. The tables of earlier versions do not say which tensor has
    # which type, so they cannot be used then.
    if "+" in training.precision and not profile.dtype:
        return none_measured
    return [float(_is_between_these_ranks(me, schema)) for schema in MEASURED]


def _is_between_these_ranks(me: Rank, schema: str) -> bool:
    """Return whether there is a table of as many ranks as this job has, over the same link."""
    path = me.out / f"{schema}.csv"
    if not store.has_table(path):
        return False
    rows = store.load_table(path, schema)
    # The layers are timed while nothing is sent, so that their table has no link.
    has_link = "link" not in rows or (rows["link"] == me.link).all()
    return bool(has_link and (rows["ranks"] == me.world_size).all())


def _refuse_other_buckets_than_given(training: Training, model: str) -> None:
    """Raise UserError if DDP would not send exactly the buckets that it is given.

    ``model`` is the model as the user names it, for the error message. All ranks call
    this function, which runs an iteration.
    """
    # DDP sends its buckets in each backward pass. With several passes in an iteration it
    # would send them several times. The number is 0 if loss() returns the loss, on which
    # backward is then run once.
    backward_passes = training.backwards
    if backward_passes > 1:
        remedy = "let it run one batch, and give --accumulate"
        raise UserError(
            f"{model}: loss() runs backward {backward_passes} times: {remedy}"
        )
    # DDP waits for every gradient of a bucket, unless it looks for unused parameters. So this
    # call runs an iteration, and returns the tensors that get no gradient in it.
    without_gradient = training.without_gradient()
    if without_gradient:
        raise UserError(
            f"{model}: {missing_gradients(sorted(without_gradient))} (with "
            "find_unused_parameters DDP makes other buckets, which are not covered)"
        )


def _refuse_too_little_time(training: Training, settings: AdviseSettings) -> None:
    """Raise UserError if the time for measuring is too short for the tables.

    All ranks call this function, which times an iteration and a message between them.
    """
    bytes_per_element = 4  # of float32
    n_elements = training.gradient_bytes // bytes_per_element
    all_gradients = torch.zeros(n_elements, device=training.device)
    iteration_s = _median_s(training, training.iterate)
    message_s = _median_s(training, lambda: dist.all_reduce(all_gradients))
    needed_s = _least_measure_s(iteration_s, message_s)
    if needed_s <= settings.measure_s:
        return
    iteration = f"an iteration takes {format_seconds(iteration_s)}"
    message = f"a message of all gradients {format_seconds(message_s)}"
    # Both times are written with a unit, which the option takes, because a time that is too
    # short is a small part of a minute.
    raise UserError(
        f"--minutes {settings.measure_s:g}s: too short, because {iteration} and {message}: "
        f"give --minutes {math.ceil(needed_s)}s or more"
    )


def _least_measure_s(iteration_s: float, message_s: float) -> float:
    """Return the least seconds for measuring all tables.

    ``iteration_s`` is how long an iteration takes, and ``message_s`` is how long a message
    of all gradients takes. Each table gets only a share of the seconds for measuring, so the
    time that a table needs is divided by its share.
    """
    # Table ``slowdown`` times whole iterations. So does table ``layers``, but it needs
    # fewer of them.
    for_iterations_s = MIN_ITERATIONS * iteration_s / FOR_SLOWDOWN
    # Tables ``collectives`` and ``slowdown`` both send messages of all gradients, together
    # at least `MIN_WHOLE_MESSAGES`.
    for_messages_s = MIN_WHOLE_MESSAGES * message_s / (FOR_MESSAGES + FOR_SLOWDOWN)
    # Table ``slowdown`` sends messages while it times iterations. So its share counts for
    # both, and the larger number of seconds is enough for both.
    return max(for_iterations_s, for_messages_s)


def _median_s(training: Training, action: Callable[[], object]) -> float:
    """Run an action three times on all ranks, and return its median in seconds.

    Each of the three times is that of the rank that takes longest. The action must be the
    same on all ranks, because it may send messages. The times include those in which a GPU
    waits for the host, as it does in a user's training.
    """
    seconds = clock.measure_on(training.device, action, THREE_TIMES, host_counts=True)
    return float(np.median(slowest(seconds)))


def read_advice(out: Path, suffix: str = "") -> Advice:
    """Return the advice that follows from the tables in a directory.

    Parameters
    ----------
    out : Path
        The directory in which `advise_job` left its tables.
    suffix : str, optional
        The text between the schema and ``.csv`` in the names of all four files. With
        ``"-a"`` the layers are read from ``layers-a.csv``.

    Returns
    -------
    Advice
        The plans, ranked by the iteration that each is predicted to have.

    Raises
    ------
    UserError
        If a table is missing or damaged.
    """
    messages = store.load_table(out / f"collectives{suffix}.csv", "collectives")
    slowdown = store.load_table(out / f"slowdown{suffix}.csv", "slowdown")
    samples = store.load_table(out / f"samples{suffix}.csv", "samples")
    # All rows have one link and one number of ranks, because one job left them.
    link = str(messages["link"].iloc[0])
    ranks = int(messages["ranks"].iloc[0])
    # What messages between these ranks cost, fitted to their times.
    calibrated = Calibration.of(messages).between(link, ranks)
    # Contention is by how much compute and messages slow each other down.
    with_contention = replace(calibrated, contention=Contention.of(slowdown))
    # The times of the profile are already those of whole iterations, with all batches that
    # gradients are accumulated over. So `workload` is not told to accumulate any.
    work = store.read_profile(out / f"layers{suffix}.csv").workload()
    # The times of iterations of one rank alone, each divided by their median.
    scatter = scatter_of(samples)
    # If this torch takes no lists of bucket sizes, only a bucket cap can be advised.
    return Advice.of(work, with_contention, scatter, lists=DDP_TAKES_LISTS)


def _plans_to_try(me: Rank, training: Training) -> dict[str, list[int]]:
    """Return the bytes of each bucket by plan: DDP's default, and the best plans.

    The default, which comes first, has an empty list. The best plans follow, the one
    with the shortest predicted iteration first. Only the default is returned if this torch
    does not let a user choose buckets. Only rank 0 has the tables from which the best plans
    follow, and sends the bytes of their buckets to all other ranks. There the plans have
    numbers for names. Nobody sees these, because only rank 0 saves rows and prints.
    """
    names = [str(number) for number in range(PLANS_TRIED)]
    # A row for each plan, because ranks exchange arrays of one shape. No plan has more
    # buckets than tensors, and 0 stands for no bucket.
    sizes = np.zeros((PLANS_TRIED, len(training.trained())))
    if me.rank == 0 and DDP_TAKES_LISTS:
        ranked = read_advice(me.out).ranked
        best = [option for option in ranked if option.name != DEFAULT][:PLANS_TRIED]
        for number, option in enumerate(best):
            # The bytes of each group of gradients that shares a bucket.
            group_bytes = option.iteration.group_bytes
            names[number] = option.name
            sizes[number, : len(group_bytes)] = group_bytes
    plans: dict[str, list[int]] = {DEFAULT: []}
    sizes_of_rank_0 = everyones(sizes)[0]
    for name, row in zip(names, sizes_of_rank_0, strict=True):
        # A row without buckets stands for a plan that does not exist.
        if row.any():
            plans[name] = [int(n_bytes) for n_bytes in row if n_bytes]
    return plans


def trial(
    me: Rank, training: Training, plans: Mapping[str, Sequence[int]], max_s: float
) -> Iterator[Tables]:
    """Train under each plan in turn, round by round.

    A round trains for some iterations under every plan. A plan is left out if DDP makes other
    buckets for it, and there is no trial if only the default is left. The trial ends as soon
    as one of these holds:

    * The number of rounds is one of `LOOKS`, and the gain of the best plan over the default
      is decided (`ddlkit.model.advice.is_decided`). The best plan is the first one after the
      default.
    * ``max_s`` is over, and there are as many rounds as the first of `LOOKS`.
    * There are as many rounds as the last of `LOOKS`.

    A round that other programs disturb is repeated, but not on a GPU, whose kernels hardly
    suffer from what others do on the cores.

    Parameters
    ----------
    me : Rank
        This rank.
    training : Training
        The model in training.
    plans : mapping of str to sequence of int
        The bytes of each bucket by plan, the default first, then the plan that may be
        advised. The default has no bytes.
    max_s : float
        Seconds in which to train.

    Yields
    ------
    mapping of str to DataFrame
        Table ``trials``: seconds of each iteration, of the slowest rank.
    """
    ends_s = time.monotonic() + max_s
    # If nothing can be tried now, an earlier trial must not be taken for the one of
    # this call.
    _remove_trials(me)
    ddp_by_plan = _wrapped_by_plan(me, training, plans)
    # The plans that are left besides the default, the best one first.
    candidates = [plan for plan in ddp_by_plan if plan != DEFAULT]
    if not candidates:
        me.say("only PyTorch's default is left, so nothing is tried")
        return
    # This iteration uses the plan that was wrapped last. The duration only serves to
    # choose the number of iterations in a round.
    iteration_s = _median_s(training, training.iterate)
    count = _iterations_per_round(max_s, len(ddp_by_plan), iteration_s)
    # Wrapping the model and the iterations so far have taken some of the time.
    left_s = max(0.0, ends_s - time.monotonic())
    me.say(
        f"trying the plans {', '.join(ddp_by_plan)} in turn: at least {LOOKS[0]} rounds of "
        f"{count} iterations of each plan, for about {left_s:.0f} s, or less if the result is "
        "clear earlier"
    )
    labels = {"network": training.network, "ranks": me.world_size, "link": me.link}
    # The median iteration of each round so far, by plan.
    medians_s: dict[str, list[float]] = {plan: [] for plan in ddp_by_plan}
    rounds = _undisturbed_rounds(me, training, ddp_by_plan, count, ends_s)
    for repeat, seconds in enumerate(rounds):
        # The table calls a plan a policy.
        rows = clock.rows_by("policy", seconds, {**labels, "repeat": repeat})
        yield {"trials": rows}
        for plan, iterations_s in seconds.items():
            medians_s[plan].append(float(np.median(iterations_s)))
        n_rounds = repeat + 1
        # All ranks have the same times, those of the slowest rank, and decide alike.
        if n_rounds in LOOKS and is_decided(measured_gain(medians_s, candidates[0])):
            me.say(
                f"the trial ends after {n_rounds} rounds, because further rounds could "
                "hardly change the advice"
            )
            return


def _undisturbed_rounds(
    me: Rank,
    training: Training,
    ddp_by_plan: Mapping[str, DistributedDataParallel],
    count: int,
    ends_s: float,
) -> Iterator[dict[str, Floats]]:
    """Train under each plan in turn, and yield the seconds of each round's iterations.

    The number of rounds lies between the first and the last number in `LOOKS`, the numbers
    of rounds after which `trial` judges the plans. Within these bounds, no round starts after
    ``ends_s``, a time of `time.monotonic`. A round that other programs disturb is run again
    and not yielded, as long as `Retries` allows.

    Parameters
    ----------
    me : Rank
        This rank.
    training : Training
        The model in training.
    ddp_by_plan : mapping of str to DistributedDataParallel
        The training in DDP with the buckets of each plan.
    count : int
        How many iterations a round has under each plan.
    ends_s : float
        When the time of the trial is over.

    Yields
    ------
    dict of str to ndarray, shape (count,)
        Seconds of each iteration of a round, of the slowest rank, by plan.
    """
    retries = Retries.on(me.device.type, me.say)
    pace = clock.Pace()
    n_rounds = 0
    while n_rounds < LOOKS[-1]:
        # Each round needs all ranks, and their clocks differ. So they decide together: the
        # trial goes on only while every rank has time.
        in_time = time.monotonic() < ends_s
        if n_rounds >= LOOKS[0] and not peers.agree_all(in_time):
            me.say(
                f"the trial ends after {n_rounds} rounds, because the time of "
                "--confirm-minutes is over"
            )
            return
        watch = Watch(me.rank)  # notes how busy the machine is during the round
        round_begun_s = time.monotonic()
        # Every other round is in reverse order, so that drift within rounds cancels.
        order = [*ddp_by_plan]
        if n_rounds % 2:
            order.reverse()
        seconds = _train_in_turn(training, ddp_by_plan, order, count)
        # `again` pauses if the round was disturbed, and the round is then repeated.
        if retries.again(peers.usage_of_all(watch.usage())):
            continue
        n_rounds += 1
        now_s = time.monotonic()
        # If the time is over and the fewest rounds are done, the next line says that the trial
        # ends. So there is no line of progress then.
        goes_on = n_rounds < LOOKS[0] or now_s < ends_s
        if goes_on and pace.due():
            me.say(_rounds_in_words(n_rounds, now_s - round_begun_s, ends_s - now_s))
        yield seconds
    # If the last round has decided the trial, the caller asks for no further one. Then this is
    # not reached.
    me.say(
        f"the trial ends after {n_rounds} rounds, the most of a trial, without a decision: a "
        "longer --confirm-minutes does not change that"
    )


def _rounds_in_words(n_rounds: int, round_s: float, left_s: float) -> str:
    """Return in words how many rounds of a trial are done, and how long it takes at most.

    ``round_s`` is how long the last round took. ``left_s`` is how much of the time of the trial
    is left, and is below zero if the time is over before the fewest rounds are done.
    """
    # A trial first looks at its plans after `LOOKS[0]` rounds, and does not end before.
    fewest = LOOKS[0]
    fewest_left_s = (fewest - n_rounds) * round_s
    most_left_s = max(left_s, fewest_left_s, 0.0)
    done = f"{n_rounds} rounds are done"
    if n_rounds < fewest:
        done = f"{n_rounds} of at least {fewest} rounds are done"
    if left_s > 0:
        return f"{done}; at most about {most_left_s:.0f} s are left"
    return (
        f"{done}; the time of --confirm-minutes is over, so the trial ends after {fewest} rounds, "
        f"in about {most_left_s:.0f} s"
    )


def _iterations_per_round(max_s: float, n_plans: int, iteration_s: float) -> int:
    """Return how many iterations each plan has in a round of a trial of ``max_s``.

    `PLANNED_ROUNDS` rounds then take about ``max_s``, if an iteration takes ``iteration_s``
    under each of ``n_plans`` plans, and unless a bound on the number of iterations applies.
    """
    # In each round every plan has one more iteration, which warms up. That is why 1 is
    # subtracted from the number of iterations that fit into the time.
    fitting = max_s / (PLANNED_ROUNDS * n_plans * iteration_s) - 1
    return int(np.clip(fitting, MIN_ITERATIONS_PER_ROUND, MAX_ITERATIONS_PER_ROUND))


def _train_in_turn(
    training: Training,
    ddp_by_plan: Mapping[str, DistributedDataParallel],
    order: Sequence[str],
    count: int,
) -> dict[str, Floats]:
    """Train for ``count`` iterations under each plan, and return their seconds by plan.

    ``order`` has the names of the plans in the order in which they are trained under.
    The seconds of an iteration are those of the slowest rank.
    """
    # All ranks must do equally many iterations, because they exchange gradients in each. Like
    # `THREE_TIMES`, this budget lets no rank stop early.
    budget = replace(THREE_TIMES, warmup=1, min_repeats=count, max_repeats=count)
    seconds: dict[str, Floats] = {}
    for plan in order:
        training.use(ddp_by_plan[plan])
        # All ranks begin together, so that none waits for another in its first message.
        dist.barrier()
        # With `host_counts`, the times include those in which a GPU waits for the host, as it
        # does in a user's training.
        own_s = clock.measure_on(
            training.device, training.iterate, budget, host_counts=True
        )
        seconds[plan] = slowest(own_s)
    return seconds


def _wrapped_by_plan(
    me: Rank, training: Training, plans: Mapping[str, Sequence[int]]
) -> dict[str, DistributedDataParallel]:
    """Return the training in DDP with the buckets of each plan, by plan.

    ``plans`` has the bytes of each bucket by plan. DDP's default is a plan without bytes,
    for which DDP applies its own rule. Any other plan is left out if DDP makes other buckets
    than the plan has.
    """
    ddp_by_plan = {}
    for plan, sizes in plans.items():
        ddp, buckets, _tensor_counts = wrap_and_rebuild(training, sizes)
        # The default has no sizes, and cannot differ from them. The message states only the
        # numbers of buckets, which may be equal although the sizes differ.
        if sizes and buckets != [*sizes]:
            counts = f"asked for {len(sizes)} buckets, DDP made {len(buckets)}"
            me.say(f"plan {plan} is not tried: {counts}")
        else:
            ddp_by_plan[plan] = ddp
    return ddp_by_plan
