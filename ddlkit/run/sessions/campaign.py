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

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import pandas as pd

from ddlkit import store
from ddlkit.core.case import AXES, Case
from ddlkit.core.errors import UserError
from ddlkit.model import forecast
from ddlkit.model.predictor import computed
from ddlkit.run.instruments import usage
from ddlkit.run.lab.network import Lab, LabShape
from ddlkit.run.lab.replay import replay
from ddlkit.run.lab.script import PlannedCase, plan_case, read_replayed
from ddlkit.run.nets import registry
from ddlkit.run.sessions.campaign_inputs import Inputs
from ddlkit.run.sessions.foretelling import carried_from, foretell
from ddlkit.run.sessions.lab_calibration import (
    AFTER,
    BEFORE,
    CHECK_S_PER_BYTE,
    LAUNCH_S,
    LabCalibration,
    read_rows,
)
from ddlkit.run.sessions.reader import Campaign, CaseRequest
from ddlkit.run.sessions.session import Origin, Point, Tables, say

PARTIAL, CASES = ".partial", "cases.json"
PREDICTED = "cases"
"""The name of the table of predictions."""
SAID_BY = 12
"""Hex digits of its hash, in the runs that it foretold."""
AROUND_S = 0.1
"""Of an iteration, in which recordings are exchanged."""


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
    inputs = Inputs(campaign, out, folder)
    labs = [_LabPoints(shape, requests, inputs) for shape, requests in campaign.labs.items()]
    points: dict[str, Point] = {}
    for lab in labs:
        own = lab.calibration.points(BEFORE) if predict else lab.points()
        for point in (*inputs.points(lab.requests), *own):
            points.setdefault(point.key, point)
    if predict:
        again = [point for lab in labs for point in lab.calibration.points(AFTER)]
        return [*points.values(), *again, _predicted_point(labs, inputs)]
    for number, lab in enumerate(labs):
        lab.afterwards_s = sum(later.estimate_s for later in labs[number + 1 :])
    return list(points.values())


def _predicted_point(labs: Sequence[_LabPoints], inputs: Inputs) -> Point:
    """What every model says of every case, before the first of them is replayed."""

    def measure() -> pd.DataFrame:
        if there := [lab.shape.name for lab in labs if store.has_table(lab.path("runs"))]:
            raise UserError(f"a prediction comes before its runs: there are some of {there[0]}")
        say("every calibration is there: predicting")
        together = pd.concat(lab.calibration.rows() for lab in labs)
        return pd.concat([lab.predicted(together) for lab in labs], ignore_index=True)

    return Point("predicted", PREDICTED, measure, 1.0 * len(labs), folder=inputs.folder)


class _LabPoints:
    """The points of one lab of a campaign.

    estimate_s : of all of them; afterwards_s : what comes after this lab, for the progress lines
    """

    def __init__(self, shape: LabShape, requests: Sequence[CaseRequest], inputs: Inputs) -> None:
        self.shape, self.requests, self.inputs = shape, requests, inputs
        self.calibration = LabCalibration(shape, requests, inputs)
        self.estimate_s = self.afterwards_s = 0.0

    def points(self) -> list[Point]:
        """Calibration, replays, calibration; or both calibrations first."""
        before, after = (list(self.calibration.points(session)) for session in (BEFORE, AFTER))
        found = [*before, self._replay_point(), *after]
        if self.inputs.campaign.calibrated == "before":
            found = [*before, *after, self._replay_point()]
        self.estimate_s = sum(point.estimate_s for point in found)
        return found

    def path(self, schema: str) -> Path:
        """Where a table of the lab's replays lies."""
        return self.inputs.path(schema, self.shape.name)

    # -- predictions -----------------------------------------------------------------------

    def predicted(self, together: pd.DataFrame | None) -> pd.DataFrame:
        """What models say of each case: rows of a table ``predicted``; ``together`` as for `foretell`."""
        carried = carried_from(self.inputs.directory.resolve(), self.shape)
        cost, times = self.inputs.campaign.cost, self.inputs.selection_times
        rows = self.calibration.rows()
        return foretell(self.planned(), rows, cost, carried, times, together)

    def _foretold(self) -> str:
        """How the hash begins of the table that foretold all cases; "" where none was written.

        Raises UserError for a case that it does not have.
        """
        path = self.inputs.path("predicted", PREDICTED)
        if not store.has_table(path):
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
                self.calibration.cost(asked),
                Lab(self.shape),
                compute_s=self._compute_s(request),
                selection_sha256=inputs.selection_times(asked.density).sha256 if waited else "",
                **{name: getattr(asked, name) for name in AXES},
            )
        except UserError as error:
            where = f"{inputs.campaign.file}: plans: {asked.network}"
            raise UserError(f"{where}: {error}") from None

    def _compute_s(self, request: CaseRequest) -> float | None:
        """What an iteration computes in this lab: as much longer than asked as its sparse messages take.

        Dense messages, too, are beside what is computed with sparse ones. Raises UserError without these.
        """
        if request.compute_s is None or request.startup_s is None:
            return request.compute_s
        sparse = [one.case for one in self.requests if one.case.collective == "all_gather"]
        if not sparse:
            raise UserError("startups are those of sparse messages: ask this lab for a density < 1")
        return request.compute_s * self.calibration.cost(sparse[0]).startup_s() / request.startup_s

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
            replay(
                lab,
                self.shape.workers,
                wanted,
                rounds,
                selection=lambda n, density: self.inputs.selection_times(density)(n, density),
                done=every.difference(missing),
                tries=usage.TRIES,
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
        foreseen = forecast(workload, one.plan, self.calibration.communication(case))
        check_s = CHECK_S_PER_BYTE * float(one.workload.bytes.sum()) * self.shape.workers
        return foreseen.prediction.iteration_s + AROUND_S + check_s


def _saved(path: Path) -> set[tuple[str, int]]:
    """(case's key, repeat) of the rows of a table, which need not be there."""
    rows = read_rows(path)
    return set() if rows is None else set(zip(rows["case"], rows["repeat"], strict=True))
