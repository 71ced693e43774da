"""Campaigns: cases replayed in labs, each lab calibrated before and after, and predicted before that.

Iterations are appended to a hidden directory: a kill loses the one in flight, and the next session goes on.
A lab's come into its tables when all are there.
"""

from __future__ import annotations

import functools
import itertools
import math
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch

from ddlkit import store
from ddlkit.core.case import Case
from ddlkit.core.collective import of_gradients
from ddlkit.core.cost import AlphaBeta, MessageCost
from ddlkit.core.errors import UserError
from ddlkit.core.lab_links import one_way_delay_s, wire_s_per_byte
from ddlkit.core.sparse import ELEMENT_BYTES, SelectionTimes, SparseGather, selected
from ddlkit.core.units import KIB
from ddlkit.jobs import vitals
from ddlkit.jobs.clock import Budget
from ddlkit.lab import ENGINES, Conditions
from ddlkit.lab.network import Lab, LabShape
from ddlkit.measure import networks as known_networks
from ddlkit.measure.collectives import CollectivesSettings, messages_at, missing_sizes
from ddlkit.measure.layers import layer_tables
from ddlkit.measure.session import (
    Origin,
    Point,
    Tables,
    all_or_partial,
    table_path,
)
from ddlkit.model import Calibration, forecast_case
from ddlkit.model.fits import table_cost
from ddlkit.model.predictor import Forecast
from ddlkit.store import machine
from workbook.record import zoo as zoo
from workbook.record.replay import (
    MESSAGES_PER_SAMPLE,
    PlannedCase,
    calibrate,
    plan_case,
    replay,
)
from workbook.record.selection import measure_selection
from workbook.validate import rivals

CAMPAIGN = "campaign"
MOST_ITERATIONS = 20_000  # each takes seconds: more are a slip in a grid
BEFORE, AFTER = 0, 1
MOMENTS = ("before", "after")  # the replays: sessions of a lab's calibration
PARTIAL = ".partial"
DIGITS = 12  # of the predictions' hash, in the runs that they predicted
AROUND_S = 0.1  # of an iteration, in which recordings are exchanged
SAMPLE_S = 0.25  # that the messages of a sample take together, on a link with a delay
LAUNCH_S = 3.0  # a lab up, ranks met, and down again
ALPHA_S = 6e-5  # of a message, per worker squared, until a lab has been calibrated
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
    def sparse(self) -> bool:
        """Return whether its case will be sparse, as `Case.sparse`."""
        return self.density < 1

    @property
    def collective(self) -> str:
        """Return what its gradients are sent by."""
        return of_gradients(sparse=self.sparse)


@dataclass(frozen=True)
class Grid:
    """Cases of a campaign: the product of its lists. Raises UserError for what cannot be.

    rates to losses : of labs; only emulated links have delays and losses; rounds : repeats of each case
    name : tables lie in campaign-NAME below the session's directory, without one in that itself
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
        lists = [
            value for value in vars(self).values() if isinstance(value, (list, tuple))
        ]
        cases = math.prod(map(len, lists))
        if cases * self.rounds > MOST_ITERATIONS:
            asked = (
                f"{cases} cases, the product of its lists, of {self.rounds} rounds each"
            )
            raise UserError(
                f"{asked}: at most {MOST_ITERATIONS} iterations: shorten a list"
            )
        for name, _ in self.networks:
            known_networks.find(name)
        list(self.shapes())  # each can be

    def shapes(self) -> Iterator[LabShape]:
        """Yield its labs. Raises UserError for one that cannot be."""
        emulated = (self.delays, self.losses)
        every: list[Any] = list(
            itertools.starmap(Conditions, itertools.product(*emulated))
        )
        if ENGINES[0] in self.engines and every != [Conditions()]:
            raise UserError(
                "delays and the like: only links of engines: emulated have these"
            )
        for workers, rate, engine in itertools.product(
            self.workers, self.rates, self.engines
        ):
            if workers < 2:
                raise UserError(
                    "workers: one worker alone sends nothing: use at least 2"
                )
            for conditions in every if engine != ENGINES[0] else [None]:
                yield LabShape(workers, rate, conditions)


def labs_of(
    grids: Sequence[Grid], out: Path, file: str, device: str
) -> list[LabPoints]:
    """Return a campaign's labs, each with all that its grids ask. Raises UserError where they disagree."""
    if len({(grid.calibration, grid.name) for grid in grids}) > 1:
        raise UserError(f"{file}: calibration, name: must be the same in all its grids")
    labs: dict[LabShape, dict[Request, int]] = {}
    for grid in grids:
        lists: Any = (
            grid.shapes(),
            grid.networks,
            grid.plans,
            grid.density,
            grid.stragglers,
        )
        for shape, network, *rest in itertools.product(*lists):
            rounds, request = labs.setdefault(shape, {}), Request(*network, *rest)
            rounds[request] = max(grid.rounds, rounds.get(request, 0))
    folder = f"{CAMPAIGN}-{grids[0].name}" if grids[0].name else ""
    return [
        LabPoints(*lab, grids[0].calibration, out, folder, device)
        for lab in labs.items()
    ]


def campaign(labs: Sequence[LabPoints], predict: bool) -> Iterator[Point]:
    """Yield all points, lab by lab; to predict, no replays, and yet sessions of a lab far apart."""
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
        yield Point("predicted", "cases", measure, estimate_s, folder=labs[0].folder)


def predicted_cases(labs: Sequence[LabPoints]) -> pd.DataFrame:
    """Return what models say of every case, before the first of them is replayed. Raises UserError after."""
    for lab in labs:
        if lab.saved("runs") or lab.unsaved.exists():
            raise UserError(
                f"a prediction comes before its runs: {lab.shape.name} has some"
            )
    return pd.concat([lab.predicted() for lab in labs], ignore_index=True)


def said(
    case: Case, ours: Forecast, times: Mapping[str, tuple[float, float]]
) -> pd.DataFrame:
    """Return rows of a table ``predicted``, of one case: iteration and exposed by each model."""
    cells = [(model, "iteration", seconds) for model, (seconds, _) in times.items()]
    cells += [(model, "exposed", seconds) for model, (_, seconds) in times.items()]
    ends = zip(("lower", "upper"), ours.paired_s or (), strict=False)
    cells += [(rivals.OURS, end, seconds) for end, seconds in ends]
    frame = pd.DataFrame(cells, columns=["model", "quantity", "seconds"]).dropna()
    return frame.assign(case=case.key, cost="", drift="")


def predicted_by(path: Path, cases: Iterable[Case]) -> str:
    """Return how the hash begins of the table that predicted all cases; "" without. Raises UserError."""
    if not store.has_table(path):
        return ""
    there = set(store.load_table(path)["case"])
    for case in cases:
        if case.key not in there:
            lacks = (
                f"case {case.key}, {case.network} under {case.plan} over {case.link}"
            )
            advice = "name another file, and predict before its runs"
            raise UserError(f"{path}: says nothing of {lacks}: {advice}")
    return str(store.load_stamp(path)["sha256"])[:DIGITS]


def guessed_cost(shape: LabShape, collective: str) -> MessageCost:
    """Return the wire at its rate, and a start-up that grows with the workers."""
    beta = wire_s_per_byte(collective, shape.workers, shape.rate_bits_per_s)
    alpha_s = ALPHA_S * shape.workers**2 + 4 * shape.workers * one_way_delay_s(
        shape.link
    )
    return AlphaBeta(
        alpha_s, beta, collective=collective, workers=shape.workers, algorithm="ring"
    )


@functools.cache
def gradient_bytes(network: str) -> int:
    """Return bytes of all of a network's gradients."""
    with torch.device("meta"):  # sizes alone: weights would take seconds to draw
        elements = (
            tensor.numel() for tensor in known_networks.build(network).parameters()
        )
        return ELEMENT_BYTES * sum(elements)


@dataclass(frozen=True)
class LabPoints:
    """One lab of a campaign, and what is asked of it, in the file's order, each with its rounds."""

    shape: LabShape
    asked: Mapping[Request, int]
    extent: str
    out: Path
    folder: str
    device: str

    def path(self, schema: str, name: str = "") -> Path:
        """Return where a table of the campaign lies; by default, the lab's own."""
        return table_path(self.out / self.folder, schema, name or self.shape.name)

    def rows(self, schema: str, name: str = "") -> pd.DataFrame:
        """Return the rows of a table, none where it is not there yet."""
        path = self.path(schema, name)
        if not store.has_table(path):
            return pd.DataFrame(columns=["session", "case", "repeat"])
        return store.load_table(path)

    def inputs(self) -> Iterator[Point]:
        """Yield what must be measured before its cases are known: profiles, and times of selection."""
        budget, tables = EXTENTS[self.extent][2], ["layers", "samples"]
        for name, batch in dict.fromkeys(
            (asked.network, asked.batch) for asked in self.asked
        ):
            how = (name, batch, self.device, "fp32", budget, machine.cores())
            measure, estimate_s = partial(layer_tables, *how), 2 + budget.max_s
            yield Point(
                "layers",
                f"{name}-b{batch}-r1",
                measure,
                estimate_s,
                tables,
                self.folder,
            )
        for density in sorted({asked.density for asked in self.asked if asked.sparse}):
            select = partial(
                measure_selection, densities=[density], budget=SELECTION_BUDGET
            )
            frames = map(partial(select, "cpu"), SELECTION_SIZES)
            measure = partial(all_or_partial, "selection", frames)
            yield Point(
                "selection", f"rho{density:g}", measure, 30.0, folder=self.folder
            )

    def _largest_bytes(self, request: Request) -> int:
        """Return bytes of a message that carries all of a network, as the calibration counts it."""
        n_bytes = gradient_bytes(request.network)
        if not request.sparse:
            return n_bytes
        elements = selected(n_bytes // ELEMENT_BYTES, request.density)
        return self.shape.workers * ELEMENT_BYTES * elements

    def calibrations(self, session: int) -> Iterator[Point]:
        """Yield one session of the lab's calibration, collective by collective; both add to one table."""
        powers, max_s, _ = EXTENTS[self.extent]
        budget = Budget(warmup=1, min_repeats=2, max_repeats=30, max_s=max_s)
        for collective in dict.fromkeys(request.collective for request in self.asked):
            cases = [
                request for request in self.asked if request.collective == collective
            ]
            largest = max(map(self._largest_bytes, cases))
            sizes = [
                *(KIB << power for power in powers if KIB << power < largest),
                largest,
            ]
            cost, each = guessed_cost(self.shape, collective), MESSAGES_PER_SAMPLE
            if one_way_delay_s(
                self.shape.link
            ):  # else a link saves as many up as a replay posts at once
                each = int(np.clip(SAMPLE_S / float(cost(1)), 1, MESSAGES_PER_SAMPLE))
            samples_s = [messages_at(size, each) * float(cost(size)) for size in sizes]
            estimate_s = LAUNCH_S + sum(
                max(3 * seconds, max_s) for seconds in samples_s
            )
            settings = CollectivesSettings(
                [collective], sizes, budget, each, vitals.TRIES
            )
            yield Point(
                "collectives",
                f"{self.shape.name}-{collective}",
                partial(self._calibrate, session, settings, estimate_s),
                estimate_s,
                folder=self.folder,
                moment=MOMENTS[session],
                left=partial(self._uncalibrated, session, settings),
            )

    def _uncalibrated(
        self, session: int, settings: CollectivesSettings
    ) -> Sequence[int]:
        """Return the sizes that a session's rows lack."""
        (collective,) = settings.collectives
        rows = self.rows("collectives", f"{self.shape.name}-{collective}")
        rows = rows[rows["session"] == session]
        return missing_sizes(rows, collective, settings.sizes, self.shape.workers)

    def _calibrate(
        self, session: int, settings: CollectivesSettings, estimate_s: float
    ) -> pd.DataFrame:
        settings = replace(settings, sizes=self._uncalibrated(session, settings))
        with Lab(self.shape) as lab:
            rows = calibrate(lab, settings, 120 + 3 * vitals.TRIES * estimate_s)
        return rows.assign(session=session)

    def selection_times(self, density: float) -> SelectionTimes:
        """Return seconds to select, as recorded for the campaign."""
        return store.read_selection_times(
            self.path("selection", f"rho{density:g}"), density
        )

    def _plan(self, request: Request) -> PlannedCase:
        """Return the case by its profile, and by the calibration before the replays alone."""
        profile = self.path("layers", f"{request.network}-b{request.batch}-r1")
        rows = self.rows("collectives", f"{self.shape.name}-{request.collective}")
        # The session after the replays would change the plans of what is replayed already.
        cost = table_cost(rows[rows["session"] == BEFORE], self.shape.workers)
        selection_sha256 = ""
        if request.sparse:
            selecting = self.selection_times(request.density)
            selection_sha256 = selecting.sha256
            cost = SparseGather(cost, request.density, selecting=selecting)
        return plan_case(
            store.read_profile(profile),
            request.plan,
            cost,
            Lab(self.shape),
            density=request.density,
            straggler=request.straggler,
            selection_sha256=selection_sha256,
        )

    def planned(self) -> dict[PlannedCase, int]:
        """Return distinct cases with their rounds: of plans that come out the same, the first."""
        distinct: dict[object, tuple[PlannedCase, int]] = {}
        for request, rounds in self.asked.items():
            case = self._plan(request)
            key = request._replace(plan=""), case.plan.ends
            first, most = distinct.get(key, (case, 0))
            distinct[key] = first, max(rounds, most)
        return dict(distinct.values())

    def _missing(self) -> list[tuple[PlannedCase, int]]:
        """Return (case, repeat) of what is not in the tables, round by round."""
        planned, saved = self.planned(), self.saved("runs")
        turns = itertools.product(range(max(planned.values())), planned.items())
        return [
            (case, turn)
            for turn, (case, rounds) in turns
            if turn < rounds and (case.case.key, turn) not in saved
        ]

    def saved(self, schema: str) -> set[tuple[str, int]]:
        """Return (case's key, repeat) of the rows of a table."""
        rows = self.rows(schema)
        return set(zip(rows["case"], rows["repeat"], strict=True))

    @property
    def unsaved(self) -> Path:
        """Return where a replay leaves what it has, until all of it is in the tables."""
        return self.out / self.folder / PARTIAL / self.shape.name

    def _left(self) -> Sequence[object]:
        """Return what is left to replay: at first all that is asked, even if plans come out the same."""
        if self.saved("runs"):
            return self._missing()
        return [
            request for request, rounds in self.asked.items() for _ in range(rounds)
        ]

    def replay_point(self) -> Point:
        """Return the point of all its replays, which compute as long as one message of everything takes."""
        left = len(self._left())
        largest = max(self.asked, key=self._largest_bytes)
        message_s = guessed_cost(self.shape, largest.collective)(
            self._largest_bytes(largest)
        )
        return Point(
            "replay",
            self.shape.name,
            self._replay,
            LAUNCH_S * bool(left) + left * (AROUND_S + 2 * float(message_s)),
            ["runs", "timeline"],
            self.folder,
            note=f"at most {left} iterations of {len(self.asked)} cases",
            left=self._left,
        )

    def _replay(self) -> Tables:
        """Replay what is missing, and save it: nothing is returned."""
        predicted = (
            self._predicted_by()
        )  # a case that is not predicted shall not be played in vain
        missing = self._missing()
        wanted, rounds = list(dict(missing)), 1 + max(turn for _, turn in missing)
        every = {(case.case.key, turn) for case in wanted for turn in range(rounds)}
        done = every - {(case.case.key, turn) for case, turn in missing}
        self.unsaved.mkdir(parents=True, exist_ok=True)
        with Lab(self.shape) as lab:
            played = replay(
                lab,
                self.shape.workers,
                wanted,
                rounds,
                selection=lambda n, density: self.selection_times(density)(n, density),
                done=done,
                tries=vitals.TRIES,
                out=self.unsaved,
            )
        stragglers = {
            c.case.key: c.case.workers - 1 for c in wanted if c.case.straggler > 1
        }
        rank, slowest = played.timeline["rank"], played.timeline["case"].map(stragglers)
        shown = played.timeline[(rank == 0) | (rank == slowest)]
        # Runs come last: only what stands there counts as measured.
        for schema, frame in (
            ("timeline", shown),
            ("runs", played.runs.assign(predicted=predicted)),
        ):
            saved = self.saved(schema)
            new = [
                pair not in saved
                for pair in zip(frame["case"], frame["repeat"], strict=True)
            ]
            if any(new):
                Origin().save(self.path(schema), frame[new], schema, append=True)
        shutil.rmtree(self.unsaved)
        return {}

    def _predicted_by(self) -> str:
        cases = [planned.case for planned in self.planned()]
        return predicted_by(self.path("predicted", "cases"), cases)

    def predicted(self) -> pd.DataFrame:
        """Return rows of a table ``predicted``: what each model says of each case of the lab."""
        kinds = dict.fromkeys(request.collective for request in self.asked)
        rows = [self.rows("collectives", f"{self.shape.name}-{kind}") for kind in kinds]
        calibration = Calibration.of(pd.concat(rows), also=rivals.TRIAL_COSTS)
        frames = []
        for case, workload, _ in self.planned():
            workloads, selecting = {case.profile_sha256: workload}, {}
            if case.sparse:
                selecting[case.selection_sha256] = self.selection_times(case.density)
            ours = forecast_case(case, workloads, calibration, selecting)
            times = rivals.predicted_times(ours, calibration.of_case(case).others)
            frames.append(said(case, ours, times))
        return pd.concat(frames, ignore_index=True)
