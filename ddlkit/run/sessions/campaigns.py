"""Campaigns: cases replayed in labs, each lab calibrated before and after, and what models say before that.

While a lab is replayed, every iteration is appended at once to a hidden directory there, so that a kill
loses only the one in flight; the next session puts what it finds there into the tables, and goes on.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch

from ddlkit import machine, store
from ddlkit.core.case import Case
from ddlkit.core.cost import AlphaBeta, MessageCost
from ddlkit.core.errors import UserError
from ddlkit.core.fit import fit
from ddlkit.core.iteration import predict
from ddlkit.core.link import way_s, wire_s_per_byte
from ddlkit.core.sparse import ELEMENT_BYTES, SelectionTimes, SparseGather, selected
from ddlkit.core.units import KIB
from ddlkit.core.workload import LayerProfile
from ddlkit.model import Calibration, forecast_case, predictor
from ddlkit.run import vitals
from ddlkit.run.clock import Budget
from ddlkit.run.lab import ENGINES, Conditions
from ddlkit.run.lab.network import Lab, LabShape
from ddlkit.run.lab.replay import (
    MESSAGES_PER_SAMPLE,
    PlannedCase,
    calibrate,
    plan_case,
    read_replayed,
    replay,
)
from ddlkit.run.measure.collectives import CollectivesSettings, messages_at, whole_size
from ddlkit.run.measure.layers import layer_tables
from ddlkit.run.measure.selection import measure_selection
from ddlkit.run.nets import registry
from ddlkit.run.sessions import CAMPAIGN, Origin, Point, Tables, say, table_path

MOST_ITERATIONS = 20_000
"""Of a campaign: each takes seconds; more are a slip in a grid, which is the product of its lists."""
BEFORE, AFTER = 0, 1
MOMENTS = ("before", "after")  # the replays: sessions of a lab's calibration
PARTIAL, CASES = ".partial", "cases.json"
PREDICTED = "cases"  # the name of the table of predictions
DIGITS = 12  # of its hash, in the runs that it predicted
AROUND_S = 0.1  # of an iteration, in which recordings are exchanged
SAMPLE_S = 0.25  # that the messages of a sample take together, on a link with a delay
LAUNCH_S = 3.0  # a lab up, ranks met, and down again
ALPHA_S = 6e-5  # of a message, per worker squared, until a lab has been calibrated
SELECTION_S = 1e-8  # of an element, until it was measured
SELECTION_SIZES = (1_000, 10_000, 100_000, 1_000_000, 3_000_000, 10_000_000, 30_000_000)
SELECTION_BUDGET = Budget(warmup=1, min_repeats=3, max_repeats=15, max_s=0.5)
# Powers of two KiB at which labs are calibrated, up to the largest message; seconds for each; how long
# networks are measured that were not yet. Dense: doubling sizes where messages are cut into segments.
EXTENTS = {
    "quick": (range(0, 20, 2), 0.15, Budget(1, 3, 20, 2.0)),
    "dense": ((0, 2, 4, 6, 8, 10, 11, 12, 14), 0.3, Budget(2, 10, 60, 10.0)),
    "full": (range(20), 1.0, Budget(2, 10, 60, 20.0)),
}


class Request(NamedTuple):
    """A case whose lab has not been calibrated yet, so that its plan and its dilation are open."""

    network: str
    batch: int
    plan: str
    density: float
    straggler: float

    @property
    def collective(self) -> str:
        """Return what its gradients are sent by: sparse ones are gathered."""
        return "all_gather" if self.density < 1 else "all_reduce"


@dataclass(frozen=True)
class Grid:
    """Cases of a campaign: the product of its lists. Raises UserError for what cannot be.

    networks, plans, density, stragglers : of a case, as its fields are
    workers, rates : of a lab
    engines : tbf, or emulated links, which alone have delays and losses
    rounds : repeats of each case; calibration : how long labs are calibrated, one of EXTENTS
    name : of the directory below the session's in which tables lie, campaign-NAME; "": the session's own
    """

    networks: Sequence[tuple[str, int]]
    workers: Sequence[int]
    rates: Sequence[float]
    plans: Sequence[str]

    engines: Sequence[str] = (ENGINES[0],)
    delays: Sequence[float] = (0.0,)
    losses: Sequence[float] = (0.0,)
    density: Sequence[float] = (1.0,)
    stragglers: Sequence[float] = (1.0,)
    rounds: int = 2
    calibration: str = "full"
    name: str = ""

    def __post_init__(self) -> None:
        lists = [value for value in vars(self).values() if isinstance(value, (list, tuple))]
        cases = math.prod(map(len, lists))
        if cases * self.rounds > MOST_ITERATIONS:
            raise UserError(
                f"{cases} cases, the product of its lists: {cases * self.rounds} iterations with their "
                f"rounds, at most {MOST_ITERATIONS}: shorten a list, or ask for fewer rounds"
            )
        for name, _ in self.networks:
            registry.find(name)
        list(self.shapes())  # each can be

    def shapes(self) -> Iterator[LabShape]:
        """Yield its labs. Raises UserError for one that cannot be."""
        emulated = (self.delays, self.losses)
        every: list[Any] = list(itertools.starmap(Conditions, itertools.product(*emulated)))
        if ENGINES[0] in self.engines and every != [Conditions()]:
            raise UserError("delays and the like: only links of engines: emulated have these")
        for workers, rate, engine in itertools.product(self.workers, self.rates, self.engines):
            if workers < 2:
                raise UserError("workers: one worker alone sends nothing: use at least 2")
            for conditions in every if engine != ENGINES[0] else [None]:
                yield LabShape(workers, rate, conditions)

    def requests(self) -> Iterator[Request]:
        """Yield what it asks of each of its labs."""
        given: Any = (self.plans, self.density, self.stragglers)
        for (name, batch), *rest in itertools.product(self.networks, *given):
            yield Request(name, batch, *rest)


def labs_of(grids: Sequence[Grid], out: Path, file: str, device: str) -> list[LabPoints]:
    """Return a campaign's labs, each with all that its grids ask. Raises UserError where they disagree."""
    if len({(grid.calibration, grid.name) for grid in grids}) > 1:
        raise UserError(f"{file}: calibration, name: must be the same in all its grids")
    labs: dict[LabShape, dict[Request, int]] = {}
    for grid in grids:
        for shape, request in itertools.product(grid.shapes(), list(grid.requests())):
            asked = labs.setdefault(shape, {})
            asked[request] = max(grid.rounds, asked.get(request, 0))
    folder = f"{CAMPAIGN}-{grids[0].name}" if grids[0].name else ""
    extent = grids[0].calibration
    return [LabPoints(*lab, extent, out, folder, file, device) for lab in labs.items()]


def campaign(labs: Sequence[LabPoints], predict: bool) -> Iterator[Point]:
    """Yield all points, lab by lab; to predict, only what predictions are made of, and then these."""
    for lab in labs:
        yield from lab.inputs()
        yield from lab.calibrations(BEFORE)
        if not predict:
            yield lab.replay_point()
            yield from lab.calibrations(AFTER)
    if predict:
        for lab in labs:
            yield from lab.calibrations(AFTER)
        measure, estimate_s = partial(predicted_cases, labs), 1.0 * len(labs)
        yield Point("predicted", PREDICTED, measure, estimate_s, folder=labs[0].folder)


# -- costs and profiles, measured or guessed -----------------------------------------------------


def table_cost(rows: pd.DataFrame, workers: int) -> MessageCost:
    """Return the cost of one collective, by its rows of a table ``collectives``."""
    labels = {name: rows[name].iloc[0] for name in ("collective", "algorithm")}
    return fit("table", rows["bytes"], rows["seconds"], workers=workers, draws=0, **labels).cost


def guessed_cost(shape: LabShape, collective: str) -> MessageCost:
    """Return the wire at its rate, and a start-up that grows with the workers."""
    beta = wire_s_per_byte(collective, shape.workers, shape.rate_bits_per_s)
    alpha_s = ALPHA_S * shape.workers**2 + 4 * shape.workers * way_s(shape.link)
    return AlphaBeta(alpha_s, beta, collective=collective, workers=shape.workers, algorithm="ring")


@functools.cache
def guessed_profile(name: str, batch: int) -> LayerProfile:
    """Return a network's tensors, backward time in proportion to their size: its speed does not matter."""
    with torch.device("meta"):  # sizes alone: weights would take seconds to draw
        tensors = dict(registry.build(name).named_parameters())
    sizes = np.array([tensor.numel() for tensor in tensors.values()])
    return LayerProfile(
        network=name,
        device="cpu",
        batch=batch,
        tensor=tuple(tensors),
        layer=tuple(tensors),
        parameters=sizes,
        gradient_bytes=4 * sizes,
        forward_s=0.1 * sizes / sizes.sum(),
        backward_s=0.2 * sizes / sizes.sum(),
        flops=np.zeros(len(sizes)),
    )


def _selections(density: float) -> pd.DataFrame:
    measure = partial(measure_selection, densities=[density], budget=SELECTION_BUDGET)
    return pd.concat([measure("cpu", n) for n in SELECTION_SIZES], ignore_index=True)


# -- one lab -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LabPoints:
    """One lab of a campaign, and what is asked of it, in the file's order, each with its rounds."""

    shape: LabShape
    asked: Mapping[Request, int]
    extent: str
    out: Path
    folder: str
    file: str
    device: str

    def path(self, schema: str, name: str = "") -> Path:
        """Return where a table of the campaign lies; by default, the lab's own."""
        return table_path(self.out / self.folder, schema, name or self.shape.name)

    def rows(self, schema: str, name: str = "") -> pd.DataFrame | None:
        """Return the rows of a table that need not be there yet."""
        path = self.path(schema, name)
        return store.load_table(path) if store.has_table(path) else None

    @property
    def kinds(self) -> list[str]:
        """Return its collectives."""
        return list(dict.fromkeys(request.collective for request in self.asked))

    def inputs(self) -> Iterator[Point]:
        """Yield what must be measured before its cases are known: profiles, and times of selection."""
        budget, tables = EXTENTS[self.extent][2], ["layers", "samples"]
        for name, batch in dict.fromkeys((asked.network, asked.batch) for asked in self.asked):
            how = (name, batch, self.device, "fp32", budget, machine.cores())
            measure, estimate_s = partial(layer_tables, *how), 2 + budget.max_s
            yield Point("layers", f"{name}-b{batch}-r1", measure, estimate_s, tables, self.folder)
        for density in sorted({request.density for request in self.asked} - {1.0}):
            select = partial(_selections, density)
            yield Point("selection", f"rho{density:g}", select, 30.0, folder=self.folder)

    def profile(self, request: Request) -> LayerProfile:
        """Return the recorded profile; until there is one, the network's tensors with guessed times."""
        path = self.path("layers", f"{request.network}-b{request.batch}-r1")
        if store.has_table(path):
            return store.read_profile(path)
        return guessed_profile(request.network, request.batch)

    def selection_times(self, density: float) -> SelectionTimes:
        """Return seconds to select, as recorded for the campaign; until then, as guessed."""
        path = self.path("selection", f"rho{density:g}")
        if store.has_table(path):
            return store.read_selection_times(path, density)
        sizes = np.array(SELECTION_SIZES, dtype=float)
        return SelectionTimes(sizes, np.array([density]), sizes[None] * SELECTION_S)

    def calibrations(self, session: int) -> Iterator[Point]:
        """Yield one session of the lab's calibration, collective by collective."""
        for collective in self.kinds:
            cases = [asked for asked in self.asked if asked.collective == collective]
            largest = max(self._largest_bytes(request) for request in cases)
            sizes = [KIB << power for power in EXTENTS[self.extent][0] if KIB << power < largest]
            yield self._calibration(session, collective, [*sizes, largest])

    def _largest_bytes(self, request: Request) -> int:
        """Return bytes of a message that carries all of a network, as the calibration counts it."""
        n_bytes = int(self.profile(request).gradient_bytes.sum())
        if request.density == 1:
            return n_bytes
        elements = selected(-(-n_bytes // ELEMENT_BYTES), request.density)
        return self.shape.workers * ELEMENT_BYTES * elements

    def _calibration(self, session: int, collective: str, wanted: Sequence[int]) -> Point:
        """Return one session; its rows are added to the table of both."""
        name = f"{self.shape.name}-{collective}"
        budget = Budget(warmup=1, min_repeats=2, max_repeats=30, max_s=EXTENTS[self.extent][1])
        cost, each = guessed_cost(self.shape, collective), MESSAGES_PER_SAMPLE
        if way_s(self.shape.link):  # else a link saves as many up as a replay posts at once
            each = int(np.clip(SAMPLE_S / float(cost(1)), 1, MESSAGES_PER_SAMPLE))

        def missing() -> list[int]:
            """Sizes that were not measured yet; the others stay as they are."""
            rows = self.rows("collectives", name)
            there = set() if rows is None else set(rows["bytes"][rows["session"] == session])
            return [n for n in wanted if whole_size(n, self.shape.workers) not in there]

        samples_s = [messages_at(size, each) * float(cost(size)) for size in missing()]
        least = budget.warmup + budget.min_repeats
        estimate_s = sum(max(least * seconds, budget.max_s) for seconds in samples_s)

        def measure() -> pd.DataFrame:
            settings = CollectivesSettings([collective], missing(), budget, each, vitals.TRIES)
            with Lab(self.shape) as lab:
                rows = calibrate(lab, settings, 120 + 3 * vitals.TRIES * estimate_s)
            return rows.assign(session=session)

        estimate_s += LAUNCH_S * bool(samples_s)
        where: dict[str, Any] = {"folder": self.folder, "moment": MOMENTS[session]}
        return Point(
            "collectives", name, measure, estimate_s, is_done=lambda: not missing(), **where
        )

    def cost(self, collective: str, density: float) -> MessageCost:
        """Return what a message costs by the calibration before the replays; until there is one, by guess."""
        rows = self.rows("collectives", f"{self.shape.name}-{collective}")
        cost = guessed_cost(self.shape, collective)
        if rows is not None:
            # The one after them would change the plans of what is replayed already.
            cost = table_cost(rows[rows["session"] == BEFORE], self.shape.workers)
        if density == 1:
            return cost
        return SparseGather(cost, density, selecting=self.selection_times(density))

    def calibration_rows(self) -> pd.DataFrame:
        """Return all rows of the lab's calibration, of all its collectives."""
        return pd.concat(
            [self.rows("collectives", f"{self.shape.name}-{kind}") for kind in self.kinds]
        )

    def planned(self) -> dict[PlannedCase, int]:
        """Return distinct cases with their rounds: of plans that come out the same, the first."""
        distinct: dict[object, PlannedCase] = {}
        rounds: dict[PlannedCase, int] = {}
        for request, count in self.asked.items():
            density, cost = request.density, self.cost(request.collective, request.density)
            how: dict[str, Any] = {"density": density, "straggler": request.straggler}
            if density < 1:
                how["selection_sha256"] = self.selection_times(density).sha256
            try:
                case = plan_case(self.profile(request), request.plan, cost, Lab(self.shape), **how)
            except UserError as error:
                raise UserError(f"{self.file}: plans: {request.network}: {error}") from None
            first = distinct.setdefault((request._replace(plan=""), case.plan.ends), case)
            rounds[first] = max(count, rounds.get(first, 0))
        return rounds

    def _missing(self) -> list[tuple[PlannedCase, int]]:
        """Return (case, repeat) of what is not in the tables, round by round."""
        planned, saved = self.planned(), self._saved("runs")
        turns = range(max(planned.values()))
        return [
            (case, turn)
            for turn, (case, rounds) in itertools.product(turns, planned.items())
            if turn < rounds and (case.case.key, turn) not in saved
        ]

    def _saved(self, schema: str) -> set[tuple[str, int]]:
        """Return (case's key, repeat) of the rows of a table, which need not be there."""
        rows = self.rows(schema)
        return set() if rows is None else set(zip(rows["case"], rows["repeat"], strict=True))

    @property
    def _left(self) -> Path:
        """Return where a replay leaves what it has, until it is in the tables."""
        return self.out / self.folder / PARTIAL / self.shape.name

    def replay_point(self) -> Point:
        """Return the point of all its replays; what is measured is saved as it comes."""
        planned, missing = self.planned(), self._missing()
        estimate_s = AROUND_S * len(missing) + LAUNCH_S * bool(missing)
        for case, _ in missing:
            workload = case.workload.scaled(case.case.dilation)
            cost = self.cost(case.case.collective, case.case.density)
            estimate_s += predict(workload, case.plan, cost).iteration_s
        return Point(
            "replay",
            self.shape.name,
            self._replay,
            estimate_s,
            ["runs", "timeline"],
            self.folder,
            note=f"{len(missing)} iterations of {len(planned)} cases",
            is_done=lambda: not self._left.exists() and not self._missing(),
        )

    def _replay(self) -> Tables:
        """Replay what is missing; it is saved as it comes, so nothing is returned."""
        self._predicted_by()  # a case that is not predicted shall not be played in vain
        self._absorb()
        if missing := self._missing():
            self._left.mkdir(parents=True)
            wanted, rounds = list(dict(missing)), 1 + max(turn for _, turn in missing)
            every = {(case.case.key, turn) for case in wanted for turn in range(rounds)}
            asked = {(case.case.key, turn) for case, turn in missing}
            how: dict[str, Any] = {"tries": vitals.TRIES, "out": self._left}
            how["selection"] = lambda n, density: self.selection_times(density)(n, density)
            described = json.dumps([asdict(case.case) for case in wanted])
            store.atomic_write_text(self._left / CASES, described + "\n")
            try:
                with Lab(self.shape) as lab:
                    replay(lab, self.shape.workers, wanted, rounds, done=every - asked, **how)
            finally:
                self._absorb()
        runs = store.load_table(self.path("runs"))
        limited = int(runs["processor_limited"].sum())
        say(f"{self.shape.name}: {limited} of {len(runs)} iterations limited by the processor")
        return {}

    def _absorb(self) -> None:
        """Put what a replay left, be it complete or not, into the tables."""
        cases = self._left / CASES
        described = json.loads(cases.read_text()) if cases.exists() else []
        asked = [Case.from_row(row) for row in described]
        try:
            played = read_replayed(self._left, asked)
        except UserError:  # not one iteration
            shutil.rmtree(self._left, ignore_errors=True)
            return
        stragglers = {case.key: case.workers - 1 for case in asked if case.straggler > 1}
        rank, slowest = played.timeline["rank"], played.timeline["case"].map(stragglers)
        shown = played.timeline[(rank == 0) | (rank == slowest)]
        runs = played.runs.assign(predicted=self._predicted_by())
        # Runs come last: only what stands there counts as measured.
        for schema, frame in (("timeline", shown), ("runs", runs)):
            saved = self._saved(schema)
            new = [pair not in saved for pair in zip(frame["case"], frame["repeat"], strict=True)]
            if any(new):
                Origin().save(self.path(schema), frame[new], schema, append=True)
        shutil.rmtree(self._left)

    def _predicted_by(self) -> str:
        """Return how the hash begins of the table that predicted all cases; "" without. Raises UserError."""
        path = self.path("predicted", PREDICTED)
        if not store.has_table(path):
            return ""
        there = set(store.load_table(path)["case"])
        for case in (planned.case for planned in self.planned()):
            if case.key not in there:
                raise UserError(
                    f"{path}: says nothing of case {case.key}, {case.network} under {case.plan} in "
                    f"{self.shape.name}: name another file, and predict before its runs"
                )
        return str(store.load_stamp(path)["sha256"])[:DIGITS]

    def predicted(self) -> pd.DataFrame:
        """Return rows of a table ``predicted``: what each model says of each case of the lab."""
        calibration = Calibration.of(self.calibration_rows(), also=predictor.TRIAL_COSTS)
        frames = []
        for case, workload in ((planned.case, planned.workload) for planned in self.planned()):
            selecting = {case.selection_sha256: self.selection_times(case.density)}
            workloads = {case.profile_sha256: workload}
            ours = forecast_case(case, workloads, calibration, selecting)
            times = predictor.predicted_times(ours, calibration.of_case(case).others)
            rows = [
                (model, quantity, seconds)
                for model, both in times.items()
                for quantity, seconds in zip(("iteration", "exposed"), both, strict=True)
                if np.isfinite(seconds)
            ]
            ends = zip(("lower", "upper"), ours.interval_s or (), strict=False)
            rows += [(predictor.OURS, end, seconds) for end, seconds in ends]
            frame = pd.DataFrame(rows, columns=["model", "quantity", "seconds"])
            frames.append(frame.assign(case=case.key, cost="", drift=""))
        return pd.concat(frames, ignore_index=True)


def predicted_cases(labs: Sequence[LabPoints]) -> pd.DataFrame:
    """Return what models say of every case, before the first of them is replayed. Raises UserError after."""
    for lab in labs:
        if store.has_table(lab.path("runs")):
            raise UserError(
                f"a prediction comes before its runs: there are some of {lab.shape.name}"
            )
    say("every calibration is there: predicting")
    return pd.concat([lab.predicted() for lab in labs], ignore_index=True)
