"""The labs of a campaign: what is measured in each, and what models say of its cases before that.

The points of a lab are its calibration (one session before the replays and one after them, so that the
machine's drift is known), tables ``collectives-<lab>-<collective>``, and between them all replays, tables
``runs-<lab>`` and ``timeline-<lab>``. While a lab is being replayed, every iteration is appended at once to
a hidden directory there, so that a kill loses only the one in flight; the next session puts what it finds
there into the tables, and goes on.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch

from ddlkit import machine, store
from ddlkit.core.case import AXES, Case
from ddlkit.core.cost import AlphaBeta, MessageCost
from ddlkit.core.errors import UserError
from ddlkit.core.fit import fit
from ddlkit.core.iteration import predict
from ddlkit.core.link import way_s, wire_s_per_byte
from ddlkit.core.sparse import ELEMENT_BYTES, SelectionTimes, SparseGather, selected
from ddlkit.core.units import KIB
from ddlkit.core.workload import LayerProfile
from ddlkit.model import Calibration, forecast_case, predictor
from ddlkit.model.calibration import POOLED, pooled
from ddlkit.model.rings import LAW, TABLE, by_law
from ddlkit.run import vitals
from ddlkit.run.clock import Budget
from ddlkit.run.lab.network import Lab, LabShape
from ddlkit.run.lab.replay import MESSAGES_PER_SAMPLE, calibrate, replay
from ddlkit.run.lab.script import PlannedCase, plan_case, read_replayed
from ddlkit.run.measure.collectives import messages_at, whole_size
from ddlkit.run.measure.selection import measure_selection
from ddlkit.run.nets import registry
from ddlkit.run.sessions.kinds import Here, best_device, layers_by_ranks
from ddlkit.run.sessions.session import Origin, Point, Tables, say, table_path

BEFORE, AFTER = 0, 1
MOMENTS = ("before", "after")
"""Sessions of a lab's calibration, about the replays."""
PARTIAL, CASES = ".partial", "cases.json"
PREDICTED = "cases"
"""The name of the table of predictions."""
SAID_BY = 12
"""Hex digits of its hash, in the runs that it predicted."""
AROUND_S = 0.1  # of an iteration, in which recordings are exchanged
SAMPLE_S = 0.25  # that the messages of a sample take together, on a link with a delay
LAUNCH_S = 3.0  # a lab up, ranks met, and down again
ALPHA_S = 6e-5  # of a message, per worker squared, until a lab has been calibrated
SELECTION_S = 1e-8  # of an element, until it was measured
SELECTION_SIZES = (1_000, 10_000, 100_000, 1_000_000, 3_000_000, 10_000_000, 30_000_000)


class Extent(NamedTuple):
    """How long labs are calibrated, and networks measured that were not yet.

    sizes : of a calibration, up to the largest message, which is added
    layers : for each network; messages : for each size, in each of both sessions
    """

    sizes: tuple[int, ...]
    layers: Budget
    messages: Budget


def _extent(powers: Iterable[int], layers: Budget, messages_s: float) -> Extent:
    messages = Budget(warmup=1, min_repeats=2, max_repeats=30, max_s=messages_s)
    return Extent(tuple(KIB << power for power in powers), layers, messages)


EXTENTS = {
    "quick": _extent(range(0, 20, 2), Budget(1, 3, 20, 2.0), 0.15),
    # Few samples, and doubling sizes where messages are cut into segments.
    "dense": _extent((0, 2, 4, 6, 8, 10, 11, 12, 14), Budget(2, 10, 60, 10.0), 0.3),
    "full": _extent(range(20), Budget(2, 10, 60, 20.0), 1.0),
}


class Request(NamedTuple):
    """A case whose lab has not been calibrated yet, so that its link, its plan and its dilation are open.

    case : as far as it is known; its ``plan`` is what a planner is called by
    compute_s, startup_s : as those of `Grid`
    """

    case: Case
    compute_s: float | None
    startup_s: float | None


def table_cost(rows: pd.DataFrame, workers: int) -> MessageCost:
    """Return the cost of one collective, by its rows of a table ``collectives``."""
    labels = {name: rows[name].iloc[0] for name in ("collective", "algorithm")}
    return fit("table", rows["bytes"], rows["seconds"], workers=workers, draws=0, **labels).cost


class Inputs:
    """What the cases of a campaign are made of: profiles, and times of selection, recorded or guessed.

    extent : how long it measures
    folder : in which its tables lie, inside ``out``; file : the campaign's, for what is wrong with it
    """

    def __init__(self, extent: Extent, out: Path, folder: str, file: str) -> None:
        self.extent, self.folder, self.file = extent, folder, file
        self.directory = out / folder

    def path(self, schema: str, name: str) -> Path:
        """Return where a table of the campaign lies."""
        return table_path(self.directory, schema, name)

    def rows(self, schema: str, name: str) -> pd.DataFrame | None:
        """Return the rows of a table that need not be there yet."""
        path = self.path(schema, name)
        return store.load_table(path) if store.has_table(path) else None

    def points(self, requests: Iterable[Request]) -> Iterator[Point]:
        """Yield what must be measured before the cases of these requests are known."""
        cases = [request.case for request in requests]
        here = Here(best_device(), 0, self.directory)
        for network in dict.fromkeys((case.network, case.batch) for case in cases):
            if self._profile_path(*network) not in self._profile_paths(*network)[1:]:
                for point in layers_by_ranks(here, [network], 1, self.extent.layers):
                    yield replace(point, folder=self.folder)
        for density in sorted({case.density for case in cases} - {1.0}):
            measure = partial(_selections, density)
            yield Point("selection", f"rho{density:g}", measure, 30.0, folder=self.folder)

    def profile(self, name: str, batch: int) -> LayerProfile:
        """Return the recorded profile; until there is one, the network's tensors with guessed times."""
        path = self._profile_path(name, batch)
        return guessed_profile(name, batch) if path is None else store.read_profile(path)

    def _profile_paths(self, name: str, batch: int) -> list[Path]:
        """Return where the profile may be recorded: the campaign's own, and this machine's."""
        places = (self.directory, store.recorded_dir())
        return [table_path(place, "layers", f"{name}-b{batch}-r1") for place in places]

    def _profile_path(self, name: str, batch: int) -> Path | None:
        return next(filter(store.has_table, self._profile_paths(name, batch)), None)

    def selection_times(self, density: float) -> SelectionTimes:
        """Return seconds to select, as recorded for the campaign; until then, as guessed."""
        path = self.path("selection", f"rho{density:g}")
        if store.has_table(path):
            return store.read_selection_times(path, density)
        sizes = np.array(SELECTION_SIZES, dtype=float)
        return SelectionTimes(sizes, np.array([density]), sizes * SELECTION_S)

    def largest_bytes(self, case: Case, workers: int) -> int:
        """Return bytes of a message that carries all of a network, as the calibration counts it."""
        n_bytes = int(self.profile(case.network, case.batch).gradient_bytes.sum())
        if case.density == 1:
            return n_bytes
        return workers * ELEMENT_BYTES * selected(-(-n_bytes // ELEMENT_BYTES), case.density)


def _selections(density: float) -> pd.DataFrame:
    budget = Budget(warmup=1, min_repeats=3, max_repeats=15, max_s=0.5)
    measure = partial(measure_selection, densities=[density])
    return pd.concat([measure("cpu", n, budget=budget) for n in SELECTION_SIZES], ignore_index=True)


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


def guessed_cost(shape: LabShape, collective: str) -> MessageCost:
    """Return the wire at its rate, and a start-up that grows with the workers."""
    beta = wire_s_per_byte(collective, shape.workers, shape.rate_bits_per_s)
    alpha_s = ALPHA_S * shape.workers**2 + 4 * shape.workers * way_s(shape.link)
    return AlphaBeta(alpha_s, beta, collective=collective, workers=shape.workers, algorithm="ring")


class LabPoints:
    """The points of one lab of a campaign.

    asked : of the lab, in the file's order, each with its rounds
    """

    def __init__(self, shape: LabShape, asked: Mapping[Request, int], inputs: Inputs) -> None:
        self.shape, self.asked, self.inputs = shape, asked, inputs

    # -- calibration -----------------------------------------------------------------------

    def calibrations(self, session: int) -> Iterator[Point]:
        """Yield one session of the lab's calibration, collective by collective."""
        for collective in dict.fromkeys(request.case.collective for request in self.asked):
            cases = [asked.case for asked in self.asked if asked.case.collective == collective]
            largest = max(self.inputs.largest_bytes(case, self.shape.workers) for case in cases)
            sizes = [*(size for size in self.inputs.extent.sizes if size < largest), largest]
            yield self._calibration(session, collective, sizes)

    def _calibration(self, session: int, collective: str, wanted: Sequence[int]) -> Point:
        """Return one session; its rows are added to the table of both."""
        name, budget = f"{self.shape.name}-{collective}", self.inputs.extent.messages
        cost, each = guessed_cost(self.shape, collective), MESSAGES_PER_SAMPLE
        if way_s(self.shape.link):  # else a link saves as many up as a replay posts at once
            each = int(np.clip(SAMPLE_S / float(cost(1)), 1, MESSAGES_PER_SAMPLE))

        def missing() -> list[int]:
            """Sizes that were not measured yet; the others stay as they are."""
            rows = self.inputs.rows("collectives", name)
            there = set() if rows is None else set(rows["bytes"][rows["session"] == session])
            return [n for n in wanted if whole_size(n, self.shape.workers) not in there]

        samples_s = [messages_at(size, each) * float(cost(size)) for size in missing()]
        least = budget.warmup + budget.min_repeats
        estimate_s = sum(max(least * seconds, budget.max_s) for seconds in samples_s)

        def measure() -> pd.DataFrame:
            with Lab(self.shape) as lab:
                rows = calibrate(
                    lab,
                    missing(),
                    collectives=[collective],
                    budget=budget,
                    messages_per_sample=each,
                    tries=vitals.TRIES,
                    timeout_s=120 + 3 * vitals.TRIES * estimate_s,
                )
            return rows.assign(session=session)

        return Point(
            "collectives",
            name,
            measure,
            estimate_s + LAUNCH_S * bool(samples_s),
            folder=self.inputs.folder,
            moment=MOMENTS[session],
            is_done=lambda: not missing(),
        )

    def cost(self, case: Case) -> MessageCost:
        """Return what a message costs by the calibration before the replays; until there is one, by guess.

        The one after them must not count: it would change the plans of what is replayed already.
        """
        rows = self.inputs.rows("collectives", f"{self.shape.name}-{case.collective}")
        cost = guessed_cost(self.shape, case.collective)
        if rows is not None:
            cost = table_cost(rows[rows["session"] == BEFORE], self.shape.workers)
        if case.density == 1:
            return cost
        selecting = self.inputs.selection_times(case.density)
        return SparseGather(cost, case.density, selecting=selecting)

    def collectives(self) -> pd.DataFrame:
        """Return all rows of the lab's calibration, of all its collectives."""
        kinds = dict.fromkeys(request.case.collective for request in self.asked)
        names = [f"{self.shape.name}-{collective}" for collective in kinds]
        return pd.concat([self.inputs.rows("collectives", name) for name in names])

    # -- replays ---------------------------------------------------------------------------

    def planned(self) -> dict[PlannedCase, int]:
        """Return distinct cases with their rounds: of plans that come out the same, the first."""
        distinct: dict[tuple[Request, tuple[int, ...]], PlannedCase] = {}
        rounds: dict[PlannedCase, int] = {}
        for request, count in self.asked.items():
            planned = self._planned(request)
            nameless = request._replace(case=replace(request.case, plan=""))
            first = distinct.setdefault((nameless, planned.plan.ends), planned)
            rounds[first] = max(count, rounds.get(first, 0))
        return rounds

    def _planned(self, request: Request) -> PlannedCase:
        case, inputs = request.case, self.inputs
        sha256 = inputs.selection_times(case.density).sha256 if case.density < 1 else ""
        try:
            return plan_case(
                inputs.profile(case.network, case.batch),
                case.plan,
                self.cost(case),
                Lab(self.shape),
                compute_s=self._compute_s(request),
                selection_sha256=sha256,
                **{name: getattr(case, name) for name in AXES},
            )
        except UserError as error:
            raise UserError(f"{inputs.file}: plans: {case.network}: {error}") from None

    def _compute_s(self, request: Request) -> float | None:
        """Return what an iteration computes in this lab: as much longer than asked as its sparse messages.

        Dense messages, too, are beside what is computed with sparse ones. Raises UserError without these.
        """
        if request.compute_s is None or request.startup_s is None:
            return request.compute_s
        sparse = [other.case for other in self.asked if other.case.collective == "all_gather"]
        if not sparse:
            raise UserError("startups are those of sparse messages: ask this lab for a density < 1")
        return request.compute_s * self.cost(sparse[0]).startup_s() / request.startup_s

    def _missing(self, planned: Mapping[PlannedCase, int]) -> list[tuple[PlannedCase, int]]:
        """Return (case, repeat) of what is not in the tables, round by round."""
        saved, most = self._saved("runs"), max(planned.values())
        wanted = [(one, turn) for turn in range(most) for one, n in planned.items() if turn < n]
        return [(one, turn) for one, turn in wanted if (one.case.key, turn) not in saved]

    def _saved(self, schema: str) -> set[tuple[str, int]]:
        """Return (case's key, repeat) of the rows of a table, which need not be there."""
        rows = self.inputs.rows(schema, self.shape.name)
        return set() if rows is None else set(zip(rows["case"], rows["repeat"], strict=True))

    @property
    def _left(self) -> Path:
        """Where a replay leaves what it has, until it is in the tables."""
        return self.inputs.directory / PARTIAL / self.shape.name

    def replay_point(self) -> Point:
        """Return the point of all its replays; what is measured is saved as it comes."""
        planned = self.planned()
        missing = self._missing(planned)
        estimate_s = AROUND_S * len(missing) + LAUNCH_S * bool(missing)
        for one, _ in missing:
            workload = one.workload.scaled(one.case.dilation)
            estimate_s += predict(workload, one.plan, self.cost(one.case)).iteration_s
        return Point(
            "replay",
            self.shape.name,
            self._replay,
            estimate_s,
            ["runs", "timeline"],
            self.inputs.folder,
            note=f"{len(missing)} iterations of {len(planned)} cases",
            is_done=lambda: not self._left.exists() and not self._missing(self.planned()),
        )

    def _replay(self) -> Tables:
        """Replay what is missing; it is saved as it comes, so nothing is returned."""
        self._predicted_by()  # a case that is not predicted shall not be played in vain
        self._absorb()
        if missing := self._missing(self.planned()):
            self._left.mkdir(parents=True)
            described = json.dumps([asdict(one.case) for one in dict.fromkeys(dict(missing))])
            store.atomic_write_text(self._left / CASES, described + "\n")
            try:
                self._play(missing)
            finally:
                self._absorb()
        runs = store.load_table(self.inputs.path("runs", self.shape.name))
        limited = int(runs["processor_limited"].sum())
        say(f"{self.shape.name}: {limited} of {len(runs)} iterations limited by the processor")
        return {}

    def _play(self, missing: Sequence[tuple[PlannedCase, int]]) -> None:
        wanted, rounds = list(dict(missing)), 1 + max(turn for _, turn in missing)
        every = {(one.case.key, turn) for one in wanted for turn in range(rounds)}
        with Lab(self.shape) as lab:
            replay(
                lab,
                self.shape.workers,
                wanted,
                rounds,
                selection=lambda n, density: self.inputs.selection_times(density)(n, density),
                done=every - {(one.case.key, turn) for one, turn in missing},
                tries=vitals.TRIES,
                out=self._left,
            )

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
                path = self.inputs.path(schema, self.shape.name)
                Origin().save(path, frame[new], schema, append=True)
        shutil.rmtree(self._left)

    # -- predictions -----------------------------------------------------------------------

    def _predicted_by(self) -> str:
        """Return how the hash begins of the table that predicted all cases; "" where none was written.

        Raises UserError for a case that it does not have.
        """
        path = self.inputs.path("predicted", PREDICTED)
        if not store.has_table(path):
            return ""
        there = set(store.load_table(path)["case"])
        for case in (one.case for one in self.planned()):
            if case.key not in there:
                raise UserError(
                    f"{path}: says nothing of case {case.key}, {case.network} under {case.plan} in "
                    f"{self.shape.name}: name another file, and predict before its runs"
                )
        return str(store.load_stamp(path)["sha256"])[:SAID_BY]

    def predicted(self, together: pd.DataFrame) -> pd.DataFrame:
        """Return what models say of each case: rows of a table ``predicted``.

        together : rows of all labs of the campaign, which tell together how sessions drift

        `predictor.OURS` is by the law over emulated links, and `predictor.MEASURED` then ours by the table.
        """
        rows = self.collectives()
        table = pooled(Calibration.of(rows, also=predictor.TRIAL_COSTS), together)
        ours, frames = by_law(table, rows, machine.cores()), []
        for case, workload in ((one.case, one.workload) for one in self.planned()):
            lab = case.link, case.workers, case.collective
            by, costs = {predictor.OURS: ours}, {predictor.OURS: TABLE}
            if ours.known[lab] is not table.known[lab]:
                by |= {predictor.MEASURED: table}
                costs = {predictor.OURS: LAW, predictor.MEASURED: TABLE}
            times = {case.selection_sha256: self.inputs.selection_times(case.density)}
            told = {
                model: forecast_case(case, {case.profile_sha256: workload}, calibration, times)
                for model, calibration in by.items()
            }
            said = predictor.predicted_times(told[predictor.OURS], ours.of_case(case).others)
            said |= {model: predictor.times(cast.prediction) for model, cast in told.items()}
            frame = _said_rows(said, {model: cast.interval_s for model, cast in told.items()})
            frame["cost"] = frame["model"].map(costs).fillna("")
            frame["drift"] = frame["model"].map(dict.fromkeys(costs, POOLED)).fillna("")
            frames.append(frame.assign(case=case.key))
        return pd.concat(frames, ignore_index=True)


def predicted_cases(labs: Sequence[LabPoints]) -> pd.DataFrame:
    """Return what models say of every case, before the first of them is replayed. Raises UserError after."""
    for lab in labs:
        if store.has_table(lab.inputs.path("runs", lab.shape.name)):
            raise UserError(
                f"a prediction comes before its runs: there are some of {lab.shape.name}"
            )
    say("every calibration is there: predicting")
    together = pd.concat([lab.collectives() for lab in labs])
    return pd.concat([lab.predicted(together) for lab in labs], ignore_index=True)


def _said_rows(
    said: Mapping[str, tuple[float, float]],
    intervals: Mapping[str, tuple[float, float] | None],
) -> pd.DataFrame:
    """Return rows of a table ``predicted``, without the case: what models say, where they do."""
    rows = [
        (model, quantity, seconds)
        for model, times in said.items()
        for quantity, seconds in zip(("iteration", "exposed"), times, strict=True)
        if np.isfinite(seconds)
    ]
    for model, ends in intervals.items():
        rows += [(model, end, at) for end, at in zip(("lower", "upper"), ends or (), strict=False)]
    return pd.DataFrame(rows, columns=["model", "quantity", "seconds"])
