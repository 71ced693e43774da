"""The kinds of points that a file may ask for: those of the library, and those of the workbook alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial, wraps
from itertools import product
from pathlib import Path
from typing import Any

import torch

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.jobs.clock import Budget
from ddlkit.jobs.vitals import TRIES
from ddlkit.measure import parts, training
from ddlkit.measure.needs import TRAININGS, Needs
from ddlkit.measure.parts import Here, Networks, Ranks, ranks_in_lab
from ddlkit.measure.session import Point, Tables
from ddlkit.model.fits import table_cost
from ddlkit.store import machine
from workbook.record import (
    contention,
    convergence,
    needs,
    replay,
    selection,
    sharing_training,
    speed,
)
from workbook.record import estimators as cost_models
from workbook.record.campaigns import CAMPAIGN, Grid
from workbook.record.trained import Trained, recorded

KINDS: dict[str, tuple[str, Callable[..., Any]]] = {CAMPAIGN: (CAMPAIGN, Grid)}
"""By kind, the part that its points belong to, such as "layers", and the function that makes the points.

The function takes a `Here` and the keys of a file as its arguments.
"""


def kind(part: str, needed: Needs[Any]) -> Callable[[Any], Any]:
    """Return a decorator that registers a function in `KINDS`, by the function's own name.

    This name is the kind. The function makes points, each a measurement with tables of its own.

    Parameters
    ----------
    part : str
        The part of a suite to which the points of this kind belong, such as "layers".
    needed : Needs
        What these points need of a machine. In place of a point that this machine cannot measure,
        the registered function yields a point that says why.
    """

    def register(make: Callable[..., Iterator[Point]]) -> Any:
        @wraps(make)
        def make_available(here: Here, *arguments: Any, **keys: Any) -> Iterator[Point]:
            for point in make(here, *arguments, **keys):
                # The point itself or, if it cannot be measured here, one that says why.
                yield needed.offer(point, here.on_gpu)

        KINDS[make.__name__] = (part, make_available)
        return make_available

    return register


for _part, _make in (
    ("layers", parts.layers),
    ("collectives", parts.collectives),
    ("slowdown", parts.slowdowns),
    ("copies", parts.memory_copies),
):
    KINDS[_make.__name__] = (_part, _make)


@kind("drift", needs.DRIFT)
def drift(here: Here, moment: str, side: int, size: Sequence[int]) -> Iterator[Point]:
    """Yield the point that shows whether the machine changes its speed during a session.

    A ``moment`` of "start" puts the point before all other points, and "end" after them. The point
    times a product of matrices with ``side`` rows, and a copy of ``size`` bytes. ``size`` is a
    sequence, as a file may give several sizes elsewhere, and has one number here. Raises UserError
    if it has several.
    """
    if len(size) > 1:
        raise UserError("size: drift takes one size, as 64MiB")
    (copy_bytes,) = size
    measure = partial(speed.measure_drift, moment, here.device, side, copy_bytes)
    name = f"s{here.session}-{moment}"
    estimate_s = needs.DRIFT.seconds(here.device, side, copy_bytes, speed.DRIFT_BUDGET)
    yield Point("drift", name, measure, estimate_s)


@kind("peaks", needs.MATRIX_PRODUCTS)
def matrix_products(
    here: Here, precisions: Sequence[str], sides: Sequence[int], budget: Budget
) -> Iterator[Point]:
    """Yield the point that times products of square matrices, at each precision with each side.

    ``budget`` says how long each product is measured.
    """
    measure = partial(speed.measure_peaks, here.device, precisions, sides, budget)
    estimate_s = needs.MATRIX_PRODUCTS.seconds(
        here.device, len(precisions), sides, budget
    )
    yield Point("peaks", here.device, measure, estimate_s)


@kind("input", needs.INPUT_ALONE)
def input_alone(
    here: Here, budget: Budget, width: int, height: int, batch: int, side: int
) -> Iterator[Point]:
    """Yield the point that times reading and decoding of pictures while nothing is trained.

    Files hold pictures of ``width`` x ``height``, which are decoded to ``side`` x ``side``.
    ``batch`` pictures are read or decoded at a time. ``budget`` says how long reading and decoding
    are each measured.
    """
    shape = (width, height)
    measure = partial(speed.measure_inputs, here.out, shape, batch, side, budget)
    yield Point(
        "input",
        f"alone-{here.device}",
        measure,
        estimate_s=needs.INPUT_ALONE.seconds(budget),
        tables=["inputs"],
        folder="input",
    )


@kind("estimators", needs.COST_MODELS)
def cost_models_of_torch(here: Here) -> Iterator[Point]:
    """Yield the estimates of the installed PyTorch's own cost models, named by its version."""
    name = f"torch-{torch.__version__.partition('+')[0]}"
    estimate_s = needs.COST_MODELS.seconds()
    yield Point("estimators", name, cost_models.measure_estimators, estimate_s)


@kind("selection", needs.SELECTIONS)
def selections(here: Here, brief: bool = False) -> Iterator[Point]:
    """Yield selections of the largest elements, by the number of elements."""
    for name, measure, estimate_s in selection.cases(here.device, brief):
        yield Point("selection", name, measure, estimate_s)


@kind("contention", needs.KERNELS)
def kernels_beside_messages(
    here: Here, brief: bool = False, copies: bool = False
) -> Iterator[Point]:
    """Yield kernels next to the stand-in of communication, or next to a copy engine."""
    for name, measure, estimate_s in contention.cases(brief, copies):
        yield Point("contention", name, measure, estimate_s)


@kind("sharing", needs.TRAINING_BESIDE)
def training_beside_messages(
    here: Here, networks: Networks, budget: Budget, brief: bool = False
) -> Iterator[Point]:
    """Yield a point for each network, which trains next to the stand-in.

    The stand-in is a kernel that sends the gradients as NCCL would. A point compares settings of
    how gradients are sent, and only few with ``brief``. ``budget`` says how long all settings are
    measured.
    """
    compared = sharing_training.sharing_settings(brief)
    for name, batch in networks:
        measure = partial(
            sharing_training.measure_sharing, name, batch, compared, budget
        )
        # A round has an iteration by each setting, and one more whose messages have no bytes.
        n_settings = 1 + len(compared)
        estimate_s = needs.TRAINING_BESIDE.seconds(budget, name, batch, n_settings)
        # A network may need a package of its own, and the decorator does not know the network. The
        # point is therefore offered or refused here already.
        point = Point("sharing", f"{name}-b{batch}-fp32", measure, estimate_s)
        yield needs.TRAINING_BESIDE.offer(point, here.on_gpu, network=name)


@kind("convergence", needs.CONVERGENCES)
def convergences(
    here: Here,
    epochs: int,
    seeds: Sequence[int],
    training_images: int = convergence.Recipe.training_images,
    held_out_images: int = convergence.Recipe.held_out_images,
) -> Iterator[Point]:
    """Yield points of dense training to convergence (osf Fig 9), one for each seed and network.

    All networks of a seed come before the next seed. ``training_images`` are trained on, and
    ``held_out_images`` only serve to evaluate.
    """
    recipe = convergence.Recipe(
        epochs=epochs, training_images=training_images, held_out_images=held_out_images
    )
    for seed, name in product(seeds, convergence.NETWORKS):
        measure = partial(
            convergence.train,
            name,
            seed,
            recipe,
            device=here.device,
            threads=machine.cores(),
        )
        key = f"{name}-e{epochs}-s{seed}"
        yield Point("convergence", key, measure, needs.CONVERGENCES.seconds(epochs))


@kind("convergence", needs.SPARSE_CONVERGENCES)
def sparse_convergences(
    here: Here,
    seeds: Sequence[int],
    epochs: int = 0,
    training_images: int = convergence.Recipe.training_images,
    held_out_images: int = convergence.Recipe.held_out_images,
) -> Iterator[Point]:
    """Yield points of sparsified training to convergence (omgs Fig 3), seed by seed.

    There is a point for each network and each of its plans, among them dense training. Each point
    runs on one core of the processor. ``epochs`` above 0 replace the number of epochs of each
    network's own recipe.
    """
    for seed, name in product(seeds, convergence.TASKS):
        _, own_recipe = convergence.TASKS[name]
        recipe = replace(
            own_recipe,
            epochs=epochs or own_recipe.epochs,
            training_images=training_images,
            held_out_images=held_out_images,
        )
        for method in convergence.plans(name):
            yield Point(
                "convergence",
                # Names of methods that have the same plan are joined by "+". The name of the point
                # has "-" in place of each "+".
                f"{name}-{method.replace('+', '-')}-e{recipe.epochs}-s{seed}",
                partial(convergence.train_sparse, name, method, seed, recipe),
                estimate_s=needs.SPARSE_CONVERGENCES.seconds(recipe.epochs),
                tables=["sparse_convergence"],
            )


@kind("training", TRAININGS)
def trainings(
    here: Here,
    networks: Networks,
    repeats: int,
    iterations: int,
    ranks: Sequence[int] = (),
    rate: Sequence[float] = (0.0,),
    delay: Sequence[float] = (0.0,),
    plans: Sequence[str] = (training.OWN_PLAN,),
    accumulate: int = 1,
    predict: bool = False,
) -> Iterator[Point]:
    """Yield training on several ranks under plans, which say which gradients share a message.

    Plans are made from the layers and messages that were measured in the same place: between as
    many ranks, on the same link. Only training outside a lab whose only plan is
    `training.OWN_PLAN`, DDP's own rule, does not need these tables.

    Parameters
    ----------
    here, networks, repeats, iterations, ranks, accumulate
        As of `ddlkit.measure.parts.trainings`.
    rate : sequence of float, optional
        Rates in bit/s of the links of a lab, an artificial network on this machine; 0 for no lab.
    delay : sequence of float, optional
        Delays of a lab's links in seconds.
    plans : sequence of str, optional
        Names of plans. By default the only one is DDP's own rule.
    predict : bool, optional
        Whether models predict all cases of these points before the first of them is measured.

    Yields
    ------
    Point
        A point for each number of ranks, rate, delay and network.
    """
    only_own_rule = [*plans] == [training.OWN_PLAN]
    for case in parts.training_cases(here, networks, ranks, rate, delay):
        if only_own_rule and not case.in_lab:
            yield parts.training_by_own_rule(
                here, case, repeats, iterations, accumulate
            )
            continue
        trained = _trained(here, case, plans, accumulate)
        key = f"training-{case.network}-{case.place}"
        # The plans need tables that earlier points of the session measure. They are therefore made
        # when this point is measured.
        make_settings = partial(_planned_settings, trained, repeats, iterations)
        estimate_s = parts.expected_training_s(
            here, case, len(plans), repeats, iterations, accumulate
        )
        yield parts.training_point(
            here,
            case,
            key,
            make_settings,
            estimate_s,
            # What `predicted_trainings` takes: the name of the table of runs, and the training.
            predicted=(key, trained) if predict else None,
        )


def _trained(
    here: Here, case: parts.TrainingCase, plans: Sequence[str], accumulate: int
) -> Trained:
    """Return the training of a case, whose plans follow from tables of the case's place.

    The place is the ranks and the link between them. ``accumulate`` batches are computed for each
    exchange.
    """
    n_ranks = case.members.count
    # The name of the place's table of collectives.
    if case.in_lab:
        messages = f"lab-{case.place}"
    else:
        # For the place "p2-loopback", the table is "loopback-p2".
        link = case.place.partition("-")[2]
        messages = f"{link}-p{n_ranks}"
    return Trained(
        out=here.out,
        messages=messages,
        key=f"{case.network}-b{case.batch}-{case.place}",
        network=case.network,
        batch=case.batch,
        ranks=n_ranks,
        device=here.device,
        plans=plans,
        accumulate=accumulate,
    )


def _planned_settings(
    trained: Trained, repeats: int, iterations: int
) -> training.TrainingSettings:
    """Return the settings of training, with the plans that follow from measured tables.

    Raises UserError if the layers and messages have not been measured.
    """
    return training.TrainingSettings(
        network=trained.network,
        batch=trained.batch,
        plans=trained.group_bytes(),
        repeats=repeats,
        iterations=iterations,
        profile_sha256=trained.profile.sha256,
        accumulate=trained.accumulate,
        predicted=trained.predicted_by(),
    )


@kind("replay", needs.REPLAYS)
def replays(
    here: Here,
    networks: Networks,
    ranks: Sequence[int],
    rate: Sequence[float],
    plans: Sequence[str],
    rounds: int,
) -> Iterator[Point]:
    """Yield a point for each number of ranks and each rate of a lab's links, in bit/s.

    A point replays the recorded compute of all networks, with real messages, for ``rounds`` rounds.
    Each network is replayed under at most `needs.DISTINCT_PLANS` plans.
    """
    n_cases = len(networks) * needs.DISTINCT_PLANS
    estimate_s = needs.REPLAYS.seconds(n_cases, rounds)
    for count, rate_bits_per_s in product(ranks, rate):
        members, lab_name = ranks_in_lab(count, rate_bits_per_s)
        measure = partial(
            _replayed, here.out, networks, plans, rounds, members, lab_name
        )
        yield Point(
            "replay",
            f"replay-{lab_name.removeprefix('lab-')}",
            measure,
            estimate_s=estimate_s,
            tables=["runs", "timeline"],
        )


def _replayed(
    out: Path,
    networks: Networks,
    plans: Sequence[str],
    rounds: int,
    members: Ranks,
    lab_name: str,
) -> Tables:
    """Replay networks under plans in a lab.

    Parameters
    ----------
    out : Path
        The directory of the session, with the layers of the networks and the messages of the lab.
    networks : sequence of (str, int)
        Names and batch sizes.
    plans : sequence of str
        Names of plans. For each network, at most `needs.DISTINCT_PLANS` of those that differ in
        their groups are replayed. The expected duration of the point assumes this limit.
    rounds : int
        How often each case is replayed.
    members : Ranks
        The ranks, which are in the lab.
    lab_name : str
        The name of the lab's table of collectives.

    Returns
    -------
    dict of DataFrame
        Tables ``runs``, and ``timeline`` with the spans of rank 0 only.
    """
    collectives = store.load_table(recorded(out, "collectives", lab_name))
    all_reduces = collectives[collectives["collective"] == "all_reduce"]
    cost = table_cost(all_reduces, members.count)
    cases: list[replay.PlannedCase] = []
    # The place is the lab, which is set up here and taken down at the end.
    with members.place() as lab:
        for name, batch in networks:
            profile = store.read_profile(recorded(out, "layers", f"{name}-b{batch}-r1"))
            # By the ends of a plan's groups, its case. Plans with the same groups give the same
            # messages, so that only the last one of them is replayed.
            distinct = {}
            for spec in plans:
                case = replay.plan_case(profile, spec, cost, lab)
                distinct[case.plan.ends] = case
            cases += [*distinct.values()][: needs.DISTINCT_PLANS]
        played = replay.replay(lab, members.count, cases, rounds, tries=TRIES)
    is_first_rank = played.timeline["rank"] == 0
    return {"runs": played.runs, "timeline": played.timeline[is_first_rank]}
