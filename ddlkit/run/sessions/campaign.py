"""A campaign: a grid of Cases replayed in one lab after the other, each calibrated first; it resumes.

Tables go to a directory of the campaign's own, point by point as `ddlkit.run.sessions.session` saves them:
``collectives-<lab>-<collective>`` (the calibration, one session before the replays and one after them, so
that the machine's drift is known), ``runs-<lab>`` and ``timeline-<lab>``. While a lab
is being replayed, every iteration is appended at once to a hidden directory there, so that a kill loses
only the one in flight; the next session puts what it finds there into the tables, and goes on.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from numpy.typing import ArrayLike, NDArray

from ddlkit import store
from ddlkit.core.bandwidth import wire_s_per_byte
from ddlkit.core.case import Case
from ddlkit.core.cost import AlphaBeta, MessageCost
from ddlkit.core.errors import UserError
from ddlkit.core.fit import fit
from ddlkit.core.iteration import predict
from ddlkit.core.sparse import (
    ELEMENT_BYTES,
    SelectionTimes,
    SparseGather,
    group_selection_s,
    selected,
    with_selection,
)
from ddlkit.core.units import KIB
from ddlkit.core.workload import LayerProfile
from ddlkit.run.instruments import processor
from ddlkit.run.instruments.clock import Budget
from ddlkit.run.lab import network
from ddlkit.run.lab.network import Lab, LabShape
from ddlkit.run.lab.recording import read_replayed
from ddlkit.run.lab.replay import MESSAGES_PER_SAMPLE, calibrate, replay
from ddlkit.run.lab.script import PlannedCase, plan_case
from ddlkit.run.measure.collectives import messages_at, whole_size
from ddlkit.run.measure.selection import measure_selection
from ddlkit.run.nets import registry as networks
from ddlkit.run.sessions.grid import Campaign, Wish, read
from ddlkit.run.sessions.quick import LENGTHS, layers_point
from ddlkit.run.sessions.session import Point, Tables

# Sizes of a calibration, up to the largest message, which is added.
CALIBRATED = {
    "quick": tuple(KIB << power for power in range(0, 20, 2)),
    "full": tuple(KIB << power for power in range(20)),  # 1 KiB .. 512 MiB
}
# What the processor limits, not the link: with several in flight, only these.
SOFTWARE_SIZES = (KIB, 4 * KIB, 16 * KIB)
BEFORE, AFTER = 0, 1  # sessions of a calibration
SESSIONS = 2
QUICK = store.ROOT / "examples" / "campaign_quick.yml"  # what `ddlkit measure` adds
PARTIAL, CASES = ".partial", "cases.json"
SELECTION_SIZES = (1_000, 10_000, 100_000, 1_000_000, 3_000_000, 10_000_000, 30_000_000)
SELECTION_BUDGET = Budget(warmup=1, min_repeats=3, max_repeats=15, max_s=0.5)

# What is guessed until a lab has been calibrated, for the time that it will take only.
ALPHA_S = 6e-5  # of a message, per worker squared: all of them share the cores
LAUNCH_S = 3.0  # a lab up, ranks met, and down again
AROUND_S = 0.1  # an iteration: recordings exchanged
CHECK_S_PER_BYTE = 8e-10  # of values, before and after they travel
SELECTION_S = 1e-8  # an element


def default_out(campaign: Campaign) -> Path:
    """Where a campaign's tables lie unless the user says otherwise."""
    words = campaign.name.lower().replace("_", "-").removeprefix("campaign").strip("-")
    return store.recorded_dir() / "-".join(["campaign", *words.split()])


def run(file: Path, out: Path | None = None) -> Path:
    """Measure what of the campaign in ``file`` is not measured yet; returns the directory.

    Raises UserError for a wrong file, where no lab is possible, and when a measurement fails; what was
    measured before is kept.
    """
    campaign = read(file)
    out = (out or default_out(campaign)).resolve()
    if reason := network.available():
        raise UserError(f"no campaign here: {reason}")
    with store.Lock(out / ".lock"):
        for left in sorted((out / PARTIAL).glob("*")):
            _absorb(out, left)
        session = _Session(campaign, out)
        session.say_estimate()
        for number in range(len(session.labs)):
            session.measure(number)
        session.say_result()
    return out


def estimate(file: Path, out: Path | None = None) -> str:
    """How many cases the campaign in ``file`` has, lab by lab, and how long what is missing will take."""
    campaign = read(file)
    labs = _Session(campaign, (out or default_out(campaign)).resolve()).labs
    rows = [
        f"{lab.setting.name:<24} {len(lab.asked):>4} cases x {campaign.rounds}"
        f"  calibration {lab.calibration_s:>5.0f} s  replay {lab.replay_s:>6.0f} s"
        for lab in labs
    ]
    total_s = sum(lab.calibration_s + lab.replay_s for lab in labs)
    cases = sum(len(lab.asked) for lab in labs)
    return "\n".join([*rows, f"in all {cases} cases, about {total_s / 60:.0f} min to measure"])


@dataclass(frozen=True)
class _Lab:
    """A lab of the campaign as it is expected to be: by its calibration if there is one, else by guess."""

    setting: LabShape
    asked: Sequence[PlannedCase]
    calibration_s: float
    replay_s: float


class _Session:
    """One call of `run`: profiles and selection times at hand, and what each lab is expected to need."""

    def __init__(self, campaign: Campaign, out: Path) -> None:
        self.campaign, self.out = campaign, out
        for wish in (wish for wishes in campaign.labs.values() for wish in wishes):
            try:
                networks.find(wish.network)
            except UserError as error:
                raise UserError(f"{campaign.file}: networks: {error}") from None
        self.guessed: dict[tuple[str, int], LayerProfile] = {}
        self.labs = [self._expected(setting) for setting in campaign.labs]

    # -- measuring -------------------------------------------------------------------------

    def measure(self, number: int) -> None:
        """Calibrate a lab and replay what is missing in it."""
        setting = self.labs[number].setting
        wishes = self.campaign.labs[setting]
        for point in self._inputs(setting, wishes):
            self._take(point)
        self._replay(number, self._asked(setting, wishes))
        for point in self._calibrations(setting, wishes, AFTER):
            self._take(point)

    def _take(self, point: Point) -> None:
        _say(f"{point.what} {point.name}")
        point.save(self.out, point.measure(self.out), append=True)

    def _replay(self, number: int, asked: Sequence[PlannedCase]) -> None:
        setting = self.labs[number].setting
        point = _runs_point(setting)
        missing = self._missing(point, asked)
        if not missing:
            _say(f"{setting.name}: already replayed")
            return
        incomplete = {key for key, _ in missing}
        wanted = [one for one in asked if one.case.key in incomplete]
        _say(f"{setting.name}: {len(missing)} iterations of {len(wanted)} cases to replay")
        left = self.out / PARTIAL / setting.name
        left.mkdir(parents=True, exist_ok=True)
        store.atomic_write_text(
            left / CASES, json.dumps([asdict(one.case) for one in wanted]) + "\n"
        )
        later = self.labs[number + 1 :]
        try:
            with Lab(setting) as lab:
                # How many are in flight is settled when ranks are started.
                for in_flight in dict.fromkeys(one.case.in_flight for one in wanted):
                    alike = [one for one in wanted if one.case.in_flight == in_flight]
                    replay(
                        lab,
                        setting.workers,
                        alike,
                        self.campaign.rounds,
                        selection=self._selection,
                        timeline_rounds=_timeline_rounds(alike, self.campaign.rounds),
                        done=_saved(point.path(self.out, "runs")),
                        tries=processor.TRIES,
                        afterwards_s=sum(one.calibration_s + one.replay_s for one in later),
                        out=left,
                    )
        finally:
            _absorb(self.out, left)

    def _inputs(self, setting: LabShape, wishes: Sequence[Wish]) -> Iterator[Point]:
        """What must still be measured before the cases of a lab are known."""
        length = LENGTHS[self.campaign.calibration]
        for name, batch in dict.fromkeys((wish.network, wish.batch) for wish in wishes):
            if self._profile_path(name, batch) is None:
                yield layers_point(name, batch, 1, length)
        if self.campaign.selection == "recorded":
            for density in sorted({wish.density for wish in wishes} - {1.0}):
                point = _selection_point(density)
                if not point.done(self.out):
                    yield point
        yield from self._calibrations(setting, wishes, BEFORE)

    def _calibrations(
        self, setting: LabShape, wishes: Sequence[Wish], session: int
    ) -> Iterator[Point]:
        """What that session of a lab's calibration still lacks, collective by collective."""
        for collective in dict.fromkeys(map(_collective, wishes)):
            largest = max(
                self._largest_bytes(setting, wish)
                for wish in wishes
                if _collective(wish) == collective
            )
            sizes = CALIBRATED[self.campaign.calibration]
            needed = [*(size for size in sizes if size < largest), largest]
            mine = [wish for wish in wishes if _collective(wish) == collective]
            for in_flight in sorted({1, *(wish.in_flight for wish in mine)}):
                here = _Calibrated(setting, collective, session, in_flight)
                there = self._calibrated(here)
                wanted = needed if in_flight == 1 else SOFTWARE_SIZES
                missing = [n for n in wanted if whole_size(n, setting.workers) not in there]
                if missing:
                    yield _calibration_point(here, self._budget, missing)

    def _calibrated(self, here: _Calibrated) -> set[int]:
        """The sizes that are measured already, which stay as they are."""
        path = here.path(self.out)
        if not path.exists():
            return set()
        rows = store.load_table(path, "collectives")
        return set(rows["bytes"][rows["session"] == here.session])

    @property
    def _budget(self) -> Budget:
        """For each size, in each session."""
        whole = LENGTHS[self.campaign.calibration].messages
        least = max(2, whole.min_repeats // SESSIONS)  # one alone would not scatter
        return replace(whole, min_repeats=least, max_s=whole.max_s / SESSIONS)

    def _largest_bytes(self, setting: LabShape, wish: Wish) -> int:
        """Of a message that carries all of a network, as the calibration counts it."""
        n_bytes = int(self._profile(wish.network, wish.batch).gradient_bytes.sum())
        if wish.density == 1:
            return n_bytes
        kept = selected(-(-n_bytes // ELEMENT_BYTES), wish.density)
        return setting.workers * ELEMENT_BYTES * kept

    def _missing(self, point: Point, asked: Sequence[PlannedCase]) -> list[tuple[str, int]]:
        """(case's key, repeat) of what is not in the tables."""
        saved = _saved(point.path(self.out, "runs"))
        rounds = range(self.campaign.rounds)
        wanted = [(one.case.key, repeat) for repeat in rounds for one in asked]
        return [pair for pair in wanted if pair not in saved]

    # -- what is asked ---------------------------------------------------------------------

    def _asked(self, setting: LabShape, wishes: Sequence[Wish]) -> list[PlannedCase]:
        """Distinct cases: of plans that come out the same for a network, the first."""
        found: dict[tuple[object, ...], PlannedCase] = {}
        place = Lab(setting)
        for wish in wishes:
            profile = self._profile(wish.network, wish.batch)
            cost = self._cost(setting, wish)
            waited = wish.density < 1 and self.campaign.selection == "recorded"
            times = self._selection_times(wish.density) if waited else None
            try:
                one = plan_case(
                    profile,
                    wish.plan,
                    cost,
                    place,
                    density=wish.density,
                    straggler=wish.straggler,
                    compute_s=wish.compute_s,
                    negotiated=wish.negotiated,
                    in_flight=wish.in_flight,
                    selection_sha256=times.sha256 if times else "",
                )
            except UserError as error:
                raise UserError(f"{self.campaign.file}: plans: {wish.network}: {error}") from None
            # Plans that come out as the same groups are one case, whatever they are called.
            found.setdefault((replace(wish, plan=""), one.plan.ends), one)
        return list(found.values())

    def _profile_path(self, name: str, batch: int) -> Path | None:
        """The recorded profile: the campaign's own, or this machine's."""
        for directory in (self.out, store.recorded_dir()):
            path = directory / f"layers-{name}-b{batch}-r1.csv"
            if path.exists():
                return path
        return None

    def _profile(self, name: str, batch: int) -> LayerProfile:
        path = self._profile_path(name, batch)
        if path is not None:
            return store.read_profile(path)
        if (name, batch) not in self.guessed:
            self.guessed[name, batch] = _guessed_profile(name, batch)
        return self.guessed[name, batch]

    def _cost(self, setting: LabShape, wish: Wish) -> MessageCost:
        """By the calibration before the replays, or until there is one by guess.

        The one after them must not count: it would change the plans of what is replayed already.
        """
        collective = _collective(wish)
        path = _Calibrated(setting, collective, BEFORE).path(self.out)
        if path.exists():
            rows = store.load_table(path, "collectives")
            rows = rows[rows["session"] == BEFORE]
            cost = fit(
                "table",
                rows["bytes"],
                rows["seconds"],
                collective=collective,
                workers=setting.workers,
                algorithm=rows["algorithm"].iloc[0],
                draws=0,
            ).cost
        else:
            cost = _guessed_cost(setting, collective)
        return SparseGather(cost, wish.density) if wish.density < 1 else cost

    def _selection(self, elements: ArrayLike, density: float) -> NDArray[np.float64]:
        """Seconds to select, as recorded for the campaign."""
        return self._selection_times(density)(elements, density)

    def _selection_times(self, density: float) -> SelectionTimes:
        path = _selection_point(density).path(self.out, "selection")
        if path.exists():
            return store.read_selection_times(path, density)
        sizes = np.array(SELECTION_SIZES, dtype=float)
        return SelectionTimes(sizes, sizes * SELECTION_S, density)

    # -- how long --------------------------------------------------------------------------

    def _expected(self, setting: LabShape) -> _Lab:
        wishes = self.campaign.labs[setting]
        asked = self._asked(setting, wishes)
        missing = self._missing(_runs_point(setting), asked)
        by_key = {one.case.key: self._iteration_s(setting, one) for one in asked}
        points = [*self._inputs(setting, wishes), *self._calibrations(setting, wishes, AFTER)]
        calibration_s = sum(point.estimate_s for point in points)
        replay_s = sum(by_key[key] for key, _ in missing) + LAUNCH_S * bool(missing)
        return _Lab(setting, asked, calibration_s, replay_s)

    def _iteration_s(self, setting: LabShape, one: PlannedCase) -> float:
        case, workload, plan = one.case, one.workload, one.plan
        wish = Wish(case.network, case.batch, case.plan, case.density, case.straggler)
        slow = workload.scaled(case.dilation * case.straggler)
        if case.density < 1:
            seconds = group_selection_s(
                workload, plan, case.density, self._selection_times(case.density)
            )
            slow = with_selection(slow, plan, case.dilation * case.straggler * seconds)
        around_s = AROUND_S + CHECK_S_PER_BYTE * float(workload.bytes.sum()) * setting.workers
        return predict(slow, plan, self._cost(setting, wish)).iteration_s + around_s

    def say_estimate(self) -> None:
        """What is to be done, on standard error."""
        cases = sum(len(lab.asked) for lab in self.labs)
        total_s = sum(lab.calibration_s + lab.replay_s for lab in self.labs)
        _say(
            f"campaign {self.campaign.name}: {cases} cases in {len(self.labs)} labs, "
            f"{self.campaign.rounds} rounds; about {total_s / 60:.1f} min to go"
        )

    def say_result(self) -> None:
        """What is there, and how much of it the processor limited."""
        paths = [_runs_point(lab.setting).path(self.out, "runs") for lab in self.labs]
        runs = pd.concat([store.load_table(path, "runs") for path in paths], ignore_index=True)
        limited = runs[runs["processor_limited"]]
        _say(
            f"campaign {self.campaign.name}: {runs['case'].nunique()} cases, {len(runs)} iterations; "
            f"{len(limited)} of them, of {limited['case'].nunique()} cases, limited by the processor"
        )


def _say(line: str) -> None:
    print(f"ddlkit: {time.strftime('%H:%M:%S')} {line}", file=sys.stderr, flush=True)


def _collective(wish: Wish) -> str:
    return "all_gather" if wish.density < 1 else "all_reduce"


# -- points ------------------------------------------------------------------------------------


def _runs_point(setting: LabShape) -> Point:
    def nothing(_: Path) -> Tables:
        raise AssertionError("replays are saved as they come")

    return Point("replay", setting.name, ["runs", "timeline"], nothing)


@dataclass(frozen=True)
class _Calibrated:
    """What a calibration is of: one session of one collective in a lab, so many messages at once."""

    setting: LabShape
    collective: str
    session: int
    in_flight: int = 1

    @property
    def name(self) -> str:
        """As it appears in file names."""
        lanes = f"-lanes{self.in_flight}" if self.in_flight > 1 else ""
        return f"{self.setting.name}-{self.collective}{lanes}"

    def path(self, out: Path) -> Path:
        """Its table, in which both sessions are."""
        return out / f"collectives-{self.name}.csv"


def _calibration_point(here: _Calibrated, budget: Budget, sizes: Sequence[int]) -> Point:
    setting = here.setting
    guess = _guessed_cost(setting, here.collective)
    check_s = CHECK_S_PER_BYTE * sum(sizes) * setting.workers**2  # each rank makes all shares
    estimate_s = LAUNCH_S + check_s + sum(_calibration_s(guess, size, budget) for size in sizes)

    def measure(_: Path) -> Tables:
        with Lab(setting) as lab:
            rows = calibrate(
                lab,
                sizes,
                collectives=[here.collective],
                budget=budget,
                in_flight=here.in_flight,
                tries=processor.TRIES,
                timeout_s=120 + 3 * processor.TRIES * estimate_s,
            )
            return {"collectives": rows.assign(session=here.session)}

    return Point("collectives", here.name, ["collectives"], measure, estimate_s)


def _calibration_s(guess: MessageCost, size: int, budget: Budget) -> float:
    """Time for the samples of one size, of which each holds several messages."""
    sample_s = messages_at(size, MESSAGES_PER_SAMPLE) * guess(size)
    samples = max(budget.min_repeats, min(budget.max_repeats, budget.max_s / sample_s))
    return float((budget.warmup + samples) * sample_s)


def _selection_point(density: float) -> Point:
    def measure(_: Path) -> Tables:
        frames = [
            measure_selection(
                "cpu",
                size,
                densities=[density],
                distributions=["normal"],
                budget=SELECTION_BUDGET,
            )
            for size in SELECTION_SIZES
        ]
        return {"selection": pd.concat(frames, ignore_index=True)}

    return Point("selection", f"rho{density:g}", ["selection"], measure, 30.0, ["selection"])


# -- what is being replayed --------------------------------------------------------------------


def _timeline_rounds(wanted: Sequence[PlannedCase], rounds: int) -> int:
    """All, where something is read off the spans: that must be measured more than once, too."""
    return rounds if any(one.case.negotiated for one in wanted) else 1


def _saved(path: Path) -> set[tuple[str, int]]:
    """(case's key, repeat) of the rows of a table, which need not be there."""
    if not path.exists():
        return set()
    rows = store.load_table(path)
    return set(zip(rows["case"], rows["repeat"], strict=True))


def _absorb(out: Path, left: Path) -> None:
    """Put what a replay left, be it complete or not, into the tables of its lab."""
    cases = left / CASES
    if not cases.exists():
        shutil.rmtree(left, ignore_errors=True)
        return
    described = [Case.from_row(row) for row in json.loads(cases.read_text())]
    point = Point("replay", left.name, ["runs", "timeline"], lambda _: {})
    try:
        found = read_replayed(left, described)
    except UserError:  # not one iteration
        shutil.rmtree(left)
        return
    stragglers = {case.key: case.workers - 1 for case in described if case.straggler > 1}
    shown = found.timeline["rank"].isin([0]) | (
        found.timeline["rank"] == found.timeline["case"].map(stragglers)
    )
    # Runs come last: only what stands there counts as measured.
    for table, frame in (("timeline", found.timeline[shown]), ("runs", found.runs)):
        saved = _saved(point.path(out, table))
        new = [pair not in saved for pair in zip(frame["case"], frame["repeat"], strict=True)]
        if any(new):
            point.save(out, {table: frame[new]}, append=True)
    shutil.rmtree(left)


# -- guesses, for the time that something will take ----------------------------------------------


def _guessed_cost(setting: LabShape, collective: str) -> MessageCost:
    """The wire at its rate, and a start-up that grows with the workers."""
    beta = wire_s_per_byte(collective, setting.workers, setting.rate_bits_per_s)
    alpha_s = ALPHA_S * setting.workers**2
    return AlphaBeta(
        alpha_s, beta, collective=collective, workers=setting.workers, algorithm="ring"
    )


def _guessed_profile(name: str, batch: int) -> LayerProfile:
    """A network's tensors, backward time in proportion to their size: its speed does not matter here."""
    with torch.device("meta"):  # sizes alone: weights would take seconds to draw
        tensors = dict(networks.build(name).named_parameters())
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
