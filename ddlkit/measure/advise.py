"""Any model that a user's file gives: its layers, and all else that an advice on its buckets needs.

Alone, or in each rank that torchrun, Slurm or our launcher started.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ddlkit import store
from ddlkit.core.errors import UserError, one_line
from ddlkit.core.units import KIB, MIB, format_seconds
from ddlkit.core.workload import LayerProfile
from ddlkit.jobs import clock
from ddlkit.jobs import rank as peers
from ddlkit.jobs.clock import Budget
from ddlkit.jobs.rank import Floats, Rank, Tables, everyones, job, joined, slowest
from ddlkit.jobs.vitals import Retries, Watch
from ddlkit.measure.collectives import CollectivesSettings, collectives_job, whole_size
from ddlkit.measure.given import DDP_OPTIONS, Training, load
from ddlkit.measure.layers import compute_on, profile_training
from ddlkit.measure.session import Origin, table_path
from ddlkit.measure.slowdown import answered, slowed
from ddlkit.measure.training import imposed
from ddlkit.model import Calibration
from ddlkit.model.advice import DEFAULT, Advice
from ddlkit.model.contention import Contention
from ddlkit.model.predictor import scatter_of

MEETING_S = 300.0  # until all ranks have built the model
REBUILT = 3  # iterations after which DDP reports its rebuilt buckets
LATE = 0.9  # a first gradient that is ready at this share of backward leaves nothing to overlap


def measure_model(
    given: str, accumulate: int, out: Path, budget: Budget
) -> dict[str, Any]:
    """Measure the layers of what `load` takes, save them, and return what to show, on rank 0.

    accumulate : calls of the loss in an iteration. All ranks measure at the same time (`joined`). Raises
    UserError as `loaded_together`.
    """
    notes = list[str]()
    with joined(MEETING_S) as me, compute_on(given, me.device, ""):
        training = loaded_together(given, accumulate, me, notes)
        tables, profile = layers_of(training, budget, me)
        order = order_beside_ddp(training, profile)
    if me.rank:
        return {}
    notes += remarks(training, profile)
    for note in notes:
        me.say(note)
    origin = Origin(remark="; ".join([*notes, f"order: {order}"]))
    name, samples = (
        f"{profile.network}-b{profile.batch}-r{me.world_size}",
        tables["samples"],
    )
    for schema, rows in tables.items():
        origin.save(path := table_path(out, schema, name), rows, schema)
    median = samples.groupby("quantity")["seconds"].median()
    pairs = samples.pivot(
        index="sample", columns="quantity", values="seconds"
    )  # drift meets both
    return {
        **{"network": profile.network, "device": profile.device},
        **{"precision": samples["precision"].iloc[0]},
        **{"ranks": me.world_size, "tensors": len(profile.tensor)},
        "gradient_bytes": int(profile.gradient_bytes.sum()),
        **{
            f"{phase}_s": float(median[phase])
            for phase in ("forward", "backward", "update")
        },
        "hooked_over_unhooked": (
            pairs["hooked_iteration"] / pairs["unhooked_iteration"]
        ).median(),
        "order": order,
        "profile": str(path),
    }


def layers_of(
    training: Training, budget: Budget, me: Rank
) -> tuple[Tables, LayerProfile]:
    """Return tables ``samples`` and ``layers`` of any training, and its profile, by all ranks at once."""
    profile, samples = profile_training(training, training.precision, budget, me)
    how = training.precision, me.world_size, me.torch_threads
    return {"samples": samples, "layers": store.profile_frame(profile, *how)}, profile


def loaded_together(
    given: str, accumulate: int, me: Rank, notes: list[str]
) -> Training:
    """Return what a user gives, tried out in every rank; what is compiled, inside DDP.

    accumulate : calls of its loss in an iteration, of which its name tells. Raises UserError as `load` and
    `Training.try_out`, and where another rank cannot, or has another model.
    """
    failure: Exception | None = None
    try:
        training = load(given, me.device, notes)
        if training.compiled:
            wrap_alone(training)
        training.try_out()
        training.accumulate = accumulate
        training.network += f"-k{accumulate}" * (accumulate > 1)
        trained = training.trained()
        text = repr([(name, p.shape, p.dtype) for name, p in trained.items()])
        digest = int(
            hashlib.sha256(text.encode()).hexdigest()[:12], 16
        )  # which a float64 holds
        mine = [digest, len(trained), sum(p.numel() for p in trained.values())]
    except Exception as error:
        failure, mine = error, [-1, 0, 0]
    first, *others = everyones(mine).tolist()
    if failure:
        raise failure
    for rank, other in enumerate(others, 1):
        if other != first:
            has = "rank {}'s has {:.0f} tensors of {:.0f} elements"
            both = f"{has.format(0, *first[1:])}, {has.format(rank, *other[1:])}"
            raise UserError(
                f"{given}: models differ between ranks: {both}; build the same on each"
            )
    return training


def wrap_alone(training: Training) -> None:
    """Wrap as `Training.wrap`, for a process alone: nothing is sent."""
    only_me: Any = {"backend": "gloo", "use_local_synchronization": True}
    ddp = training.wrap(process_group=dist.new_group([dist.get_rank()], **only_me))
    ddp.register_comm_hook(None, lambda _, bucket: answered(bucket.buffer()))


def order_beside_ddp(training: Training, profile: LayerProfile) -> str:
    """Return how the order in which gradients become ready compares to that in which DDP rebuilds buckets."""
    trained, ready = training.trained(), profile.tensor[::-1]
    if len(trained) > len(ready):
        return "not rebuilt by DDP, which needs find_unused_parameters"
    try:
        if not training.ddp:
            wrap_alone(training)
        for _ in range(REBUILT):
            training.iterate()
    except RuntimeError as error:
        return f"not compared: DDP fails: {one_line(str(error), 200)}"
    ddp: Any = training.ddp
    if not ddp.module.called:
        return "not compared: loss() does not call the model itself, as DDP needs"
    numbers = ddp._get_ddp_logging_data().get("rebuilt_per_bucket_param_indices", "")
    rebuilt = [[*trained][int(number)] for number in numbers.replace(",", " ").split()]
    # A bucket has one type, and those of each close by themselves.
    ours, theirs = (
        sorted(names, key=lambda n: str(trained[n].dtype)) for names in (ready, rebuilt)
    )
    other = (
        sum(a != b for a, b in zip(ours, theirs, strict=False))
        + len(ours)
        - len(theirs)
    )
    return (
        f"other than DDP's in {other} of {len(ours)} tensors"
        if other
        else "as DDP rebuilds"
    )


def remarks(training: Training, profile: LayerProfile) -> Iterator[str]:
    """Yield what a user should know of the profile beside its numbers."""
    if training.backwards:
        yield (
            f"loss() runs backward itself, times: {training.backwards}; a gradient counts as ready when it "
            "becomes so for the last time, and forward is all before the last backward"
        )
    if training.compiled:
        yield "compiled: profiled inside DDP in one process; forward is one time, of the first tensor"
    if missing := [name for name in training.trained() if name not in profile.tensor]:
        yield f"{len(missing)} tensors get no gradient and have no row: {', '.join(missing[:3])}"
    if (share := profile.backward_s[-1] / profile.backward_s.sum()) > LATE:
        yield f"gradients are ready after {share:.0%} of backward: nothing can overlap"


# -- advice ---------------------------------------------------------------------------------------

LISTS = "bucket_cap_mb_list" in DDP_OPTIONS  # torch 2.11 and later
SIZES = (4 * KIB, 64 * KIB, 512 * KIB, 2 * MIB, 8 * MIB, 32 * MIB)
FOR_LAYERS, FOR_MESSAGES, FOR_SLOWDOWN = (
    0.2,
    0.4,
    0.3,
)  # shares of the time to measure in
LEAST = 40.0  # iterations in the last of these, below which it says nothing
WHOLES = 20.0  # messages of all gradients in the last two, if each size is sent as rarely as may be
ROUNDS, FEWEST, TRIED = 10, 6, 2
EACH, MOST = (
    Budget(0, 3, 3, math.inf, 0.0),
    20,
)  # iterations of a plan in a round, three at least
MEASURED = ("layers", "collectives", "slowdown")


@dataclass(frozen=True)
class AdviseSettings:
    """Whose training, as `load` takes it, and seconds to measure in, and to confirm in."""

    model: str
    accumulate: int = 1
    measure_s: float = 180.0
    confirm_s: float = 180.0


@job(AdviseSettings, "layers", "samples", "collectives", "slowdown", "trials")
def advise_job(me: Rank, settings: AdviseSettings) -> Iterator[Tables]:
    """Measure what is not there yet, layers first; then train in turn by the default and the best plans.

    Raises UserError where there is too little time, and for training whose buckets cannot be chosen.
    """
    notes, begun_s = list[str](), time.monotonic()
    with compute_on(settings.model, me.device, ""):
        training = loaded_together(settings.model, settings.accumulate, me, notes)
        _refuse(training, settings)
        if training.precision != "fp32":
            notes.append(
                "messages are timed as fp32 of as many bytes; other sums may take longer"
            )
        whole = training.gradient_bytes
        sizes = [size for size in SIZES if size < whole] + [
            whole_size(whole, me.world_size)
        ]
        for what, there in zip(
            MEASURED, everyones(_there(me, training))[0], strict=True
        ):
            if there:
                continue
            spare_s = (
                settings.confirm_s + settings.measure_s - (time.monotonic() - begun_s)
            )
            me.say(f"{what}; about {format_seconds(max(1.0, spare_s))} left")
            if what == "layers":
                budget = Budget(1, 4, 200, FOR_LAYERS * settings.measure_s)
                tables, profile = layers_of(training, budget, me)
                notes += [*remarks(training, profile)]
                notes.append(f"order: {order_beside_ddp(training, profile)}")
                yield tables
            elif what == "collectives":
                each = Budget(1, 4, 100, FOR_MESSAGES * settings.measure_s / len(sizes))
                how = CollectivesSettings(("all_reduce",), sizes, each, 4)
                yield from collectives_job.part(me, how)
            else:
                beside = sorted(
                    {min(SIZES[1], whole), whole // 8 // 4 * 4 or whole, whole}
                )
                yield from slowed(
                    me, training, beside, FOR_SLOWDOWN * settings.measure_s, 3
                )
        for note in notes:
            me.say(note)
        yield from trial(me, training, _plans(me, training), settings.confirm_s)


def _there(me: Rank, training: Training) -> list[float]:
    """Return which tables a run before left on rank 0: none, if they are of another model."""
    paths = [me.out / f"{name}.csv" for name in MEASURED]
    if me.rank or not store.has_table(paths[0]):
        return [0.0] * len(paths)
    profile = store.read_profile(paths[0])
    sizes = dict(zip(profile.tensor, profile.parameters.tolist(), strict=True))
    same = sizes == {name: p.numel() for name, p in training.trained().items()}
    same &= profile.network == training.network
    return [float(same and store.has_table(path)) for path in paths]


def _refuse(training: Training, settings: AdviseSettings) -> None:
    """Raise UserError for training of which DDP would not make the buckets, or too little time."""
    if (times := training.backwards) > 1:
        advice = "let it run one batch, and give --accumulate"
        raise UserError(
            f"{settings.model}: loss() runs backward {times} times: {advice}"
        )
    ready = set[str]()
    with training.watched(lambda _: None, ready.add):
        training.iterate()
    if missing := training.trained().keys() - ready:
        what = f"{len(missing)} tensors get no gradient, as {min(missing)}"
        advice = "freeze them: with find_unused_parameters DDP makes buckets of its own"
        raise UserError(f"{settings.model}: {what}: {advice}")
    whole = torch.zeros(training.gradient_bytes // 4, device=training.device)
    synchronize = clock.synchronizer(training.device)
    iteration_s, message_s = (
        float(np.median(slowest(clock.measure(action, EACH, synchronize=synchronize))))
        for action in (training.iterate, lambda: dist.all_reduce(whole))
    )
    needed_s = LEAST * iteration_s / FOR_SLOWDOWN
    needed_s = max(needed_s, WHOLES * message_s / (FOR_MESSAGES + FOR_SLOWDOWN))
    if needed_s > settings.measure_s:
        minutes = math.ceil(needed_s / 6) / 10
        took = "an iteration takes {}, a message of all gradients {}"
        said = took.format(*map(format_seconds, (iteration_s, message_s)))
        raise UserError(
            f"--minutes {settings.measure_s / 60:g}: {said}: give {minutes:g} or more"
        )


def read_advice(out: Path, of: str = "") -> Advice:
    """Return the advice by the tables that a job left in a directory; of : behind each name."""
    names = ("collectives", "slowdown", "samples")
    rows, slowdown, samples = (
        store.load_table(out / f"{name}{of}.csv", name) for name in names
    )
    at = str(rows["link"].iloc[0]), int(rows["ranks"].iloc[0])
    known = replace(
        Calibration.of(rows).between(*at), contention=Contention.of(slowdown)
    )
    # Accumulated batches are in the profile: an iteration is what was measured.
    work = store.read_profile(out / f"layers{of}.csv").workload()
    return Advice.of(work, known, scatter_of(samples), LISTS)


def _plans(me: Rank, training: Training) -> dict[str, list[int]]:
    """Return bytes of buckets by plan, named on rank 0, who finds them; none for the default."""
    names, told = [*map(str, range(TRIED))], np.zeros((TRIED, len(training.trained())))
    if me.rank == 0:
        others = [
            option for option in read_advice(me.out).ranked if option.name != DEFAULT
        ]
        for place, option in enumerate(others[: TRIED * LISTS]):
            sizes = option.iteration.group_bytes
            names[place], told[place, : len(sizes)] = option.name, sizes
    rows = zip(names, everyones(told)[0], strict=True)
    return {DEFAULT: []} | {
        name: [int(n) for n in row if n] for name, row in rows if row.any()
    }


def trial(
    me: Rank, training: Training, plans: Mapping[str, Sequence[int]], max_s: float
) -> Iterator[Tables]:
    """Yield table ``trials``, round by round: real iterations under each plan in turn, of the slowest rank.

    plans : bytes of buckets, none for the default; one of which DDP makes others is left out, and said so.
    Ends after ROUNDS, or ``max_s`` but for FEWEST; a disturbed round is made again.
    """
    wrapped, begun_s = {}, time.monotonic()
    for name, sizes in plans.items():
        ddp, made, _ = imposed(training, sizes)
        if sizes and made != [*sizes]:
            asked = f"asked for {len(sizes)} buckets, DDP made {len(made)}"
            me.say(f"plan {name} is not tried: {asked}")
        else:
            wrapped[name] = ddp
    synchronize = clock.synchronizer(me.device)
    once = clock.measure(training.iterate, EACH, synchronize=synchronize)
    one_s = float(np.median(slowest(once)))
    count = int(
        np.clip(max_s / (ROUNDS * len(wrapped) * one_s) - 1, EACH.min_repeats, MOST)
    )
    each = replace(EACH, warmup=1, min_repeats=count, max_repeats=count)
    retries, repeat = Retries(), 0
    while repeat < ROUNDS:
        if repeat >= FEWEST and not peers.agree_all(time.monotonic() - begun_s < max_s):
            return me.say(f"{repeat} rounds of {ROUNDS} fitted: the interval is wider")
        watch, seconds = Watch(me.rank), dict[str, Floats]()
        for name in [*wrapped][
            :: -1 if repeat % 2 else 1
        ]:  # so drift within a round cancels
            training.use(wrapped[name])
            dist.barrier()
            seconds[name] = slowest(
                clock.measure(training.iterate, each, synchronize=synchronize)
            )
        if retries.again(peers.usage_of_all(watch.usage())):
            continue
        me.say(
            f"round {repeat + 1} of {ROUNDS}, {count} iterations each of {len(wrapped)} plans"
        )
        of = {"network": training.network, "ranks": me.world_size, "link": me.link}
        yield {"trials": clock.rows_by("policy", seconds, of | {"repeat": repeat})}
        repeat += 1
