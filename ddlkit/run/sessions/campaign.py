"""A campaign: a grid of cases replayed in one lab after the other, each calibrated first; it resumes.

The points of a lab are its calibration (one session before the replays and one after them, so that the
machine's drift is known), tables ``collectives-<lab>-<collective>``, and between them all replays, tables
``runs-<lab>`` and ``timeline-<lab>``. While a lab is being replayed, every iteration is appended at once to
a hidden directory there, so that a kill loses only the one in flight; the next session puts what it finds
there into the tables, and goes on.

A campaign may be foretold: both calibrations of every lab come first, then one table ``predicted-cases`` with
what every model says of every case. Each run says by which table it was foretold.
"""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from ddlkit import store
from ddlkit.core.case import AXES, Case
from ddlkit.core.cost import AlphaBeta, MessageCost
from ddlkit.core.errors import UserError
from ddlkit.core.lablink import way_s
from ddlkit.core.link import wire_s_per_byte
from ddlkit.core.sparse import ELEMENT_BYTES, SelectionTimes, SparseGather, selected
from ddlkit.core.units import KIB
from ddlkit.core.workload import LayerProfile
from ddlkit.model import Calibration, Communication, forecast
from ddlkit.model.predictor import computed
from ddlkit.run.instruments import vitals
from ddlkit.run.instruments.clock import Budget
from ddlkit.run.lab.network import Lab, LabShape
from ddlkit.run.lab.replay import MESSAGES_PER_SAMPLE, calibrate, replay
from ddlkit.run.lab.script import PlannedCase, plan_case, read_replayed
from ddlkit.run.measure.collectives import messages_at, whole_size
from ddlkit.run.measure.selection import measure_selection
from ddlkit.run.nets import registry
from ddlkit.run.sessions.foretelling import carried_from, foretell
from ddlkit.run.sessions.kinds import best_device, layers_point, table_cost
from ddlkit.run.sessions.reader import Campaign, CaseRequest
from ddlkit.run.sessions.session import Origin, Point, Tables, say, table_path


@dataclass(frozen=True)
class Extent:
    """How long a campaign's labs are calibrated, and networks measured that were not yet.

    sizes : of a calibration, up to the largest message, which is added
    layers : for each network; messages : for each size, both sessions together
    """

    sizes: tuple[int, ...]
    layers: Budget
    messages: Budget


EXTENTS = {
    "quick": Extent(
        sizes=tuple(KIB << power for power in range(0, 20, 2)),
        layers=Budget(warmup=1, min_repeats=3, max_repeats=20, max_s=2.0),
        messages=Budget(warmup=1, min_repeats=2, max_repeats=30, max_s=0.3),
    ),
    # Few samples, and doubling sizes where messages are cut into segments.
    "dense": Extent(
        sizes=tuple(KIB << power for power in (0, 2, 4, 6, 8, 10, 11, 12, 14)),
        layers=Budget(warmup=2, min_repeats=10, max_repeats=60, max_s=10.0),
        messages=Budget(warmup=1, min_repeats=4, max_repeats=30, max_s=0.6),
    ),
    "medium": Extent(
        sizes=tuple(KIB << power for power in range(0, 20, 2)),
        layers=Budget(warmup=2, min_repeats=10, max_repeats=60, max_s=10.0),
        messages=Budget(warmup=1, min_repeats=6, max_repeats=40, max_s=1.0),
    ),
    "full": Extent(
        sizes=tuple(KIB << power for power in range(20)),  # 1 KiB .. 512 MiB
        layers=Budget(warmup=2, min_repeats=10, max_repeats=60, max_s=20.0),
        messages=Budget(warmup=1, min_repeats=5, max_repeats=60, max_s=2.0),
    ),
}
# What the processor limits, not the link: with several in flight, only these.
SOFTWARE_SIZES = (KIB, 4 * KIB, 16 * KIB)
BEFORE, AFTER = 0, 1  # sessions of a calibration
MOMENTS = ("before", "after")
PARTIAL, CASES = ".partial", "cases.json"
PREDICTED = "cases"  # the name of the table of predictions
SAID_BY = 12  # hex digits of its hash, in the runs that it foretold
SAMPLE_S = (
    0.25  # no sample shall hold more messages than take about so long, on a link with a delay
)
SELECTION_SIZES = (1_000, 10_000, 100_000, 1_000_000, 3_000_000, 10_000_000, 30_000_000)
SELECTION_BUDGET = Budget(warmup=1, min_repeats=3, max_repeats=15, max_s=0.5)

# What is guessed until a lab has been calibrated, for the time that it will take only.
ALPHA_S = 6e-5  # of a message, per worker squared: all of them share the cores
LAUNCH_S = 3.0  # a lab up, ranks met, and down again
AROUND_S = 0.1  # an iteration: recordings exchanged
CHECK_S_PER_BYTE = 8e-10  # of values, before and after they travel
SELECTION_S = 1e-8  # an element


def campaign_points(
    campaign: Campaign, out: Path, folder: str = "", *, predict: bool = False
) -> list[Point]:
    """All points of a campaign, lab by lab, whose tables lie in ``folder`` of ``out``.

    predict : only what predictions are made of, each lab calibrated twice, and then the predictions

    Raises UserError for an unknown network and a plan that a network cannot have.
    """
    for requests in campaign.labs.values():
        for request in requests:
            try:
                registry.find(request.case.network)
            except UserError as error:
                raise UserError(f"{campaign.file}: networks: {error}") from None
    inputs = _Inputs(campaign, out, folder)
    labs = [_LabPoints(shape, requests, inputs) for shape, requests in campaign.labs.items()]
    points: dict[str, Point] = {}
    for lab in labs:
        own = lab.calibrations(BEFORE) if predict else lab.points()
        for point in (*inputs.points(lab.requests), *own):
            points.setdefault(point.key, point)
    if predict:
        again = [point for lab in labs for point in lab.calibrations(AFTER)]
        return [*points.values(), *again, _predicted_point(labs, inputs)]
    for number, lab in enumerate(labs):
        lab.afterwards_s = sum(later.estimate_s for later in labs[number + 1 :])
    return list(points.values())


class _Inputs:
    """What the cases of a campaign are made of: profiles, and times of selection.

    directory : in which the campaign's tables lie
    """

    def __init__(self, campaign: Campaign, out: Path, folder: str) -> None:
        self.campaign, self.folder, self.directory = campaign, folder, out / folder
        self.extent = EXTENTS[campaign.calibration]

    def points(self, requests: Sequence[CaseRequest]) -> Iterator[Point]:
        """What must be measured before the cases of these requests are known."""
        for name, batch in dict.fromkeys((r.case.network, r.case.batch) for r in requests):
            if self._profile_path(name, batch) != store.recorded_dir() / _profile_file(name, batch):
                how = {"device": best_device(), "folder": self.folder}
                yield layers_point(name, batch, 1, self.extent.layers, **how)
        if self.campaign.selection == "recorded":
            for density in sorted({request.case.density for request in requests} - {1.0}):
                measure = partial(_selections, density)
                yield Point("selection", f"rho{density:g}", measure, 30.0, folder=self.folder)

    def profile(self, name: str, batch: int) -> LayerProfile:
        """The recorded profile; until there is one, the network's tensors with guessed times."""
        path = self._profile_path(name, batch)
        return _guessed_profile(name, batch) if path is None else store.read_profile(path)

    def _profile_path(self, name: str, batch: int) -> Path | None:
        """The recorded profile: the campaign's own, or this machine's."""
        directories = (self.directory, store.recorded_dir())
        paths = [directory / _profile_file(name, batch) for directory in directories]
        return next((path for path in paths if path.exists()), None)

    def selection_times(self, density: float) -> SelectionTimes:
        """Seconds to select, as recorded for the campaign; until then, as guessed."""
        path = table_path(self.directory, "selection", f"rho{density:g}")
        if path.exists():
            return store.read_selection_times(path, density)
        sizes = np.array(SELECTION_SIZES, dtype=float)
        return SelectionTimes(sizes, np.array([density]), sizes * SELECTION_S)

    def largest_bytes(self, case: Case, workers: int) -> int:
        """Of a message that carries all of a network, as the calibration counts it."""
        n_bytes = int(self.profile(case.network, case.batch).gradient_bytes.sum())
        if case.density == 1:
            return n_bytes
        kept = selected(-(-n_bytes // ELEMENT_BYTES), case.density)
        return workers * ELEMENT_BYTES * kept


def _predicted_point(labs: Sequence[_LabPoints], inputs: _Inputs) -> Point:
    """What every model says of every case, before the first of them is replayed."""

    def measure() -> pd.DataFrame:
        if there := [lab.shape.name for lab in labs if lab.path("runs").exists()]:
            raise UserError(f"a prediction comes before its runs: there are some of {there[0]}")
        say("every calibration is there: predicting")
        return pd.concat([lab.predicted() for lab in labs], ignore_index=True)

    return Point("predicted", PREDICTED, measure, 1.0 * len(labs), folder=inputs.folder)


class _LabPoints:
    """The points of one lab of a campaign.

    estimate_s : of all of them; afterwards_s : what comes after this lab, for the progress lines
    """

    def __init__(self, shape: LabShape, requests: Sequence[CaseRequest], inputs: _Inputs) -> None:
        self.shape, self.requests, self.inputs = shape, requests, inputs
        self.estimate_s = self.afterwards_s = 0.0

    def points(self) -> list[Point]:
        """Calibration, replays, calibration; or both calibrations first."""
        before, after = (list(self.calibrations(session)) for session in (BEFORE, AFTER))
        found = [*before, self._replay_point(), *after]
        if self.inputs.campaign.calibrated == "before":
            found = [*before, *after, self._replay_point()]
        self.estimate_s = sum(point.estimate_s for point in found)
        return found

    def path(self, schema: str, more: str = "") -> Path:
        """Where a table of the lab lies."""
        return table_path(self.inputs.directory, schema, self.shape.name + more)

    # -- calibration -----------------------------------------------------------------------

    def calibrations(self, session: int) -> Iterator[Point]:
        """One session of the lab's calibration, collective by collective."""
        for collective in dict.fromkeys(request.case.collective for request in self.requests):
            mine = [one.case for one in self.requests if one.case.collective == collective]
            largest = max(self.inputs.largest_bytes(case, self.shape.workers) for case in mine)
            sizes = [*(size for size in self.inputs.extent.sizes if size < largest), largest]
            for in_flight in sorted({1, *(case.in_flight for case in mine)}):
                wanted = sizes if in_flight == 1 else SOFTWARE_SIZES
                yield self._calibration(session, collective, in_flight, wanted)

    def _calibration(
        self, session: int, collective: str, in_flight: int, wanted: Sequence[int]
    ) -> Point:
        """One session; its rows are added to the table of both."""
        suffix = f"-lanes{in_flight}" if in_flight > 1 else ""
        name = f"-{collective}{suffix}"

        def missing() -> list[int]:
            """Sizes that were not measured yet; the others stay as they are."""
            rows = _rows(self.path("collectives", name))
            there = set() if rows is None else set(rows["bytes"][rows["session"] == session])
            return [n for n in wanted if whole_size(n, self.shape.workers) not in there]

        def measure() -> pd.DataFrame:
            with Lab(self.shape) as lab:
                rows = calibrate(
                    lab,
                    missing(),
                    collectives=[collective],
                    budget=self._budget,
                    in_flight=in_flight,
                    messages_per_sample=self._messages_per_sample(collective),
                    tries=vitals.TRIES,
                    timeout_s=120 + 3 * vitals.TRIES * estimate_s,
                )
                return rows.assign(session=session)

        estimate_s = self._calibration_s(collective, missing())
        return Point(
            "collectives",
            self.shape.name + name,
            measure,
            estimate_s,
            folder=self.inputs.folder,
            moment=MOMENTS[session],
            is_done=lambda: not missing(),
        )

    def _messages_per_sample(self, collective: str) -> int:
        """As many as a replay posts at once; fewer where each waits for a link that saves nothing."""
        if not way_s(self.shape.link):
            return MESSAGES_PER_SAMPLE
        message_s = float(_guessed_cost(self.shape, collective)(1))
        return int(np.clip(SAMPLE_S / message_s, 1, MESSAGES_PER_SAMPLE))

    @property
    def _budget(self) -> Budget:
        """For each size, in each session."""
        whole = self.inputs.extent.messages
        least = max(2, whole.min_repeats // len(MOMENTS))  # one alone would not scatter
        return replace(whole, min_repeats=least, max_s=whole.max_s / len(MOMENTS))

    def _calibration_s(self, collective: str, sizes: Sequence[int]) -> float:
        """About how long a calibration of these sizes takes; a sample holds several messages."""
        if not sizes:
            return 0.0
        guess, budget = _guessed_cost(self.shape, collective), self._budget
        # Each rank makes the shares of all.
        seconds = LAUNCH_S + CHECK_S_PER_BYTE * sum(sizes) * self.shape.workers**2
        for size in sizes:
            sample_s = messages_at(size, self._messages_per_sample(collective)) * guess(size)
            samples = max(budget.min_repeats, min(budget.max_repeats, budget.max_s / sample_s))
            seconds += float((budget.warmup + samples) * sample_s)
        return seconds

    # -- predictions -----------------------------------------------------------------------

    def predicted(self) -> pd.DataFrame:
        """What models say of each case: rows of a table ``predicted``."""
        carried = carried_from(self.inputs.directory.resolve(), self.shape)
        cost, times = self.inputs.campaign.cost, self.inputs.selection_times
        return foretell(self.planned(), self._calibrated(), cost, carried, times)

    def _foretold(self) -> str:
        """How the hash begins of the table that foretold all cases; "" where none was written.

        Raises UserError for a case that it does not have.
        """
        path = table_path(self.inputs.directory, "predicted", PREDICTED)
        if not path.exists():
            return ""
        known = set(store.load_table(path)["case"])
        for one in self.planned():
            if one.case.key not in known:
                raise UserError(
                    f"{path}: says nothing of case {one.case.key}, {one.case.network} under "
                    f"{one.case.plan} in {self.shape.name}: name another file, and predict before its runs"
                )
        return str(store.load_stamp(path)["sha256"])[:SAID_BY]

    # -- replays ---------------------------------------------------------------------------

    def planned(self) -> list[PlannedCase]:
        """Distinct cases: of plans that come out the same for a network, the first."""
        found: dict[tuple[CaseRequest, tuple[int, ...]], PlannedCase] = {}
        for request in self.requests:
            one = self._planned(request)
            nameless = request._replace(case=replace(request.case, plan=""))
            found.setdefault((nameless, one.plan.ends), one)
        return list(found.values())

    def _planned(self, request: CaseRequest) -> PlannedCase:
        asked, inputs = request.case, self.inputs
        waited = asked.density < 1 and inputs.campaign.selection == "recorded"
        try:
            return plan_case(
                inputs.profile(asked.network, asked.batch),
                asked.plan,
                self._cost(asked),
                Lab(self.shape),
                compute_s=self._compute_s(request),
                selection_sha256=inputs.selection_times(asked.density).sha256 if waited else "",
                **{name: getattr(asked, name) for name in AXES},
            )
        except UserError as error:
            where = f"{inputs.campaign.file}: plans: {asked.network}"
            raise UserError(f"{where}: {error}") from None

    def _cost(self, case: Case) -> MessageCost:
        """By the calibration before the replays, or until there is one by guess.

        The one after them must not count: it would change the plans of what is replayed already.
        """
        rows = _rows(self.path("collectives", f"-{case.collective}"))
        cost = _guessed_cost(self.shape, case.collective)
        if rows is not None:
            cost = table_cost(rows[rows["session"] == BEFORE], self.shape.workers)
        if case.density == 1:
            return cost
        waited = self.inputs.campaign.selection == "recorded"
        selecting = self.inputs.selection_times(case.density) if waited else None
        return SparseGather(cost, case.density, selecting=selecting)

    def _compute_s(self, request: CaseRequest) -> float | None:
        """What an iteration computes in this lab: as much longer than asked as its sparse messages take.

        Dense messages, too, are beside what is computed with sparse ones. Raises UserError without these.
        """
        if request.compute_s is None or request.startup_s is None:
            return request.compute_s
        sparse = [one.case for one in self.requests if one.case.collective == "all_gather"]
        if not sparse:
            raise UserError("startups are those of sparse messages: ask this lab for a density < 1")
        return request.compute_s * self._cost(sparse[0]).startup_s() / request.startup_s

    def rounds(self, planned: Sequence[PlannedCase]) -> dict[str, int]:
        """How often each case is replayed, by its key; those that are repeated are spread over the lab's."""
        campaign = self.inputs.campaign
        count = min(campaign.repeated[self.shape], len(planned))
        chosen = {len(planned) * k // count for k in range(count)}
        more = max(campaign.rounds, campaign.repeat.rounds)
        return {
            one.case.key: more if number in chosen else campaign.rounds
            for number, one in enumerate(planned)
        }

    def _missing(self, planned: Sequence[PlannedCase]) -> list[tuple[str, int]]:
        """(case's key, repeat) of what is not in the tables."""
        saved, rounds = _saved(self.path("runs")), self.rounds(planned)
        turns = range(max(rounds.values()))
        wanted = [(key, repeat) for repeat in turns for key in rounds if repeat < rounds[key]]
        return [pair for pair in wanted if pair not in saved]

    @property
    def _left(self) -> Path:
        """Where a replay leaves what it has, until it is in the tables."""
        return self.inputs.directory / PARTIAL / self.shape.name

    def _replay_point(self) -> Point:
        planned = self.planned()
        missing = self._missing(planned)
        by_key = {one.case.key: self.iteration_s(one) for one in planned}
        return Point(
            "replay",
            self.shape.name,
            self._replay,
            sum(by_key[key] for key, _ in missing) + LAUNCH_S * bool(missing),
            ["runs", "timeline"],
            self.inputs.folder,
            note=f"{len(missing)} iterations of {len(planned)} cases",
            is_done=lambda: not self._left.exists() and not self._missing(self.planned()),
        )

    def _replay(self) -> Tables:
        """Replay what is missing; it is saved as it comes, so nothing is returned."""
        self._foretold()  # a case that is not foretold shall not be played in vain
        self._absorb()
        planned = self.planned()
        missing = self._missing(planned)
        incomplete = {key for key, _ in missing}
        wanted = [one for one in planned if one.case.key in incomplete]
        if wanted:
            self._left.mkdir(parents=True)
            described = json.dumps([asdict(one.case) for one in wanted])
            store.atomic_write_text(self._left / CASES, described + "\n")
            try:
                self._play(wanted, missing)
            finally:
                self._absorb()
        runs = store.load_table(self.path("runs"))
        limited = int(runs["processor_limited"].sum())
        say(f"{self.shape.name}: {limited} of {len(runs)} iterations limited by the processor")
        return {}

    def _play(self, wanted: Sequence[PlannedCase], missing: Sequence[tuple[str, int]]) -> None:
        rounds = 1 + max(repeat for _, repeat in missing)
        every = {(one.case.key, repeat) for one in wanted for repeat in range(rounds)}
        with Lab(self.shape) as lab:
            # How many are in flight is settled when ranks are started.
            for in_flight in dict.fromkeys(one.case.in_flight for one in wanted):
                alike = [one for one in wanted if one.case.in_flight == in_flight]
                replay(
                    lab,
                    self.shape.workers,
                    alike,
                    rounds,
                    selection=lambda n, density: self.inputs.selection_times(density)(n, density),
                    done=every.difference(missing),
                    tries=vitals.TRIES,
                    afterwards_s=self.afterwards_s,
                    out=self._left,
                )

    def _absorb(self) -> None:
        """Put what a replay left, be it complete or not, into the tables."""
        cases = self._left / CASES
        described = json.loads(cases.read_text()) if cases.exists() else []
        asked = [Case.from_row(row) for row in described]
        try:
            found = read_replayed(self._left, asked)
        except UserError:  # not one iteration
            shutil.rmtree(self._left, ignore_errors=True)
            return
        stragglers = {case.key: case.workers - 1 for case in asked if case.straggler > 1}
        rank, slowest = found.timeline["rank"], found.timeline["case"].map(stragglers)
        shown = found.timeline[(rank == 0) | (rank == slowest)]
        foretold = self._foretold()
        # Runs come last: only what stands there counts as measured.
        for schema, frame in (("timeline", shown), ("runs", found.runs)):
            path = self.path(schema)
            saved = _saved(path)
            new = [pair not in saved for pair in zip(frame["case"], frame["repeat"], strict=True)]
            if any(new):
                added = frame[new].assign(**({"predicted": foretold} if schema == "runs" else {}))
                Origin().save(path, added, schema, append=True)
        shutil.rmtree(self._left)

    # -- how long an iteration takes -------------------------------------------------------

    def iteration_s(self, one: PlannedCase) -> float:
        """About how long an iteration occupies the lab: the forecast, and what is around it."""
        case = one.case
        workload = computed(
            case,
            {case.profile_sha256: one.workload},
            {case.selection_sha256: self.inputs.selection_times(case.density)},
        )
        foreseen = forecast(workload, one.plan, self._communication(case))
        check_s = CHECK_S_PER_BYTE * float(one.workload.bytes.sum()) * self.shape.workers
        return foreseen.prediction.iteration_s + AROUND_S + check_s

    def _communication(self, case: Case) -> Communication:
        """By all that was measured of the lab, or until there is anything by guess."""
        if (case.link, case.workers, case.collective) in self._measured.known:
            return self._measured.of_case(case)
        return Communication(_guessed_cost(self.shape, case.collective)).sparse(case.density)

    @functools.cached_property
    def _measured(self) -> Calibration:
        rows = self._calibrated()
        return Calibration({}) if rows.empty else Calibration.of(rows, draws=0)

    def _calibrated(self) -> pd.DataFrame:
        """All rows of the lab's calibration that are there, of all its collectives."""
        collectives = dict.fromkeys(request.case.collective for request in self.requests)
        one_by_one = [self.path("collectives", f"-{name}") for name in collectives]
        there = [path for path in one_by_one if path.exists()]
        several = [more for path in there for more in path.parent.glob(f"{path.stem}-lanes*.csv")]
        frames = [*map(store.load_table, [*there, *several])]
        return pd.concat(frames) if frames else pd.DataFrame()


def _selections(density: float) -> pd.DataFrame:
    measure = partial(measure_selection, densities=[density], distributions=["normal"])
    frames = [measure("cpu", size, budget=SELECTION_BUDGET) for size in SELECTION_SIZES]
    return pd.concat(frames, ignore_index=True)


# -- what is in the tables, and on the way there -------------------------------------------------


def _rows(path: Path) -> pd.DataFrame | None:
    return store.load_table(path) if path.exists() else None


def _profile_file(name: str, batch: int) -> str:
    return f"layers-{name}-b{batch}-r1.csv"


def _saved(path: Path) -> set[tuple[str, int]]:
    """(case's key, repeat) of the rows of a table, which need not be there."""
    rows = _rows(path)
    return set() if rows is None else set(zip(rows["case"], rows["repeat"], strict=True))


# -- guesses, for the time that something will take ----------------------------------------------


def _guessed_cost(shape: LabShape, collective: str) -> MessageCost:
    """The wire at its rate, and a start-up that grows with the workers."""
    beta = wire_s_per_byte(collective, shape.workers, shape.rate_bits_per_s)
    alpha_s = ALPHA_S * shape.workers**2 + 4 * shape.workers * way_s(shape.link)
    return AlphaBeta(alpha_s, beta, collective=collective, workers=shape.workers, algorithm="ring")


@functools.cache
def _guessed_profile(name: str, batch: int) -> LayerProfile:
    """A network's tensors, backward time in proportion to their size: its speed does not matter here."""
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
