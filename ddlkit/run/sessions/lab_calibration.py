"""A campaign's lab, calibrated in two sessions: their points, and what a message costs by what is there."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd

from ddlkit import store
from ddlkit.core.case import Case
from ddlkit.core.cost import AlphaBeta, MessageCost
from ddlkit.core.lablink import way_s
from ddlkit.core.link import wire_s_per_byte
from ddlkit.core.sparse import SparseGather
from ddlkit.core.units import KIB
from ddlkit.model import Calibration, Communication
from ddlkit.run.instruments import usage
from ddlkit.run.instruments.clock import Budget
from ddlkit.run.lab.network import Lab, LabShape
from ddlkit.run.lab.replay import MESSAGES_PER_SAMPLE, calibrate
from ddlkit.run.measure.collectives import messages_at, whole_size
from ddlkit.run.sessions.campaign_inputs import Inputs
from ddlkit.run.sessions.kinds import table_cost
from ddlkit.run.sessions.reader import CaseRequest
from ddlkit.run.sessions.session import Point

SOFTWARE_SIZES = (KIB, 4 * KIB, 16 * KIB)
"""What the processor limits, not the link: with several in flight, only these."""
BEFORE, AFTER = 0, 1
"""Sessions of a calibration, about the replays."""
MOMENTS = ("before", "after")
SAMPLE_S = 0.25
"""No sample shall hold more messages than take about so long, on a link with a delay."""

# What is guessed until a lab has been calibrated, for the time that it will take only.
ALPHA_S = 6e-5  # of a message, per worker squared: all of them share the cores
LAUNCH_S = 3.0  # a lab up, ranks met, and down again
CHECK_S_PER_BYTE = 8e-10  # of values, before and after they travel


class LabCalibration:
    """The calibration of one lab of a campaign."""

    def __init__(self, shape: LabShape, requests: Sequence[CaseRequest], inputs: Inputs) -> None:
        self.shape, self.requests, self.inputs = shape, requests, inputs

    @property
    def collectives(self) -> tuple[str, ...]:
        """Those that are asked of the lab, in the file's order."""
        return tuple(dict.fromkeys(request.case.collective for request in self.requests))

    def _path(self, name: str) -> Path:
        return self.inputs.path("collectives", self.shape.name + name)

    def points(self, session: int) -> Iterator[Point]:
        """One session of the lab's calibration, collective by collective."""
        for collective in self.collectives:
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
            rows = read_rows(self._path(name))
            there = set() if rows is None else set(rows["bytes"][rows["session"] == session])
            return [n for n in wanted if whole_size(n, self.shape.workers) not in there]

        def measure() -> pd.DataFrame:
            with Lab(self.shape) as lab:
                rows = calibrate(
                    lab,
                    missing(),
                    collectives=[collective],
                    budget=self._budget,
                    messages_per_sample=self._messages_per_sample(collective),
                    tries=usage.TRIES,
                    timeout_s=120 + 3 * usage.TRIES * estimate_s,
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
        message_s = float(guessed_cost(self.shape, collective)(1))
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
        guess, budget = guessed_cost(self.shape, collective), self._budget
        # Each rank makes the shares of all.
        seconds = LAUNCH_S + CHECK_S_PER_BYTE * sum(sizes) * self.shape.workers**2
        for size in sizes:
            sample_s = messages_at(size, self._messages_per_sample(collective)) * guess(size)
            samples = max(budget.min_repeats, min(budget.max_repeats, budget.max_s / sample_s))
            seconds += float((budget.warmup + samples) * sample_s)
        return seconds

    # -- what a message costs --------------------------------------------------------------

    def cost(self, case: Case) -> MessageCost:
        """By the calibration before the replays, or until there is one by guess.

        The one after them must not count: it would change the plans of what is replayed already.
        """
        rows = read_rows(self._path(f"-{case.collective}"))
        cost = guessed_cost(self.shape, case.collective)
        if rows is not None:
            cost = table_cost(rows[rows["session"] == BEFORE], self.shape.workers)
        if case.density == 1:
            return cost
        waited = self.inputs.campaign.selection == "recorded"
        selecting = self.inputs.selection_times(case.density) if waited else None
        return SparseGather(cost, case.density, selecting=selecting)

    def communication(self, case: Case) -> Communication:
        """By all that was measured of the lab, or until there is anything by guess."""
        if (case.link, case.workers, case.collective) in self._measured.known:
            return self._measured.of_case(case)
        return Communication(guessed_cost(self.shape, case.collective)).sparse(case.density)

    @functools.cached_property
    def _measured(self) -> Calibration:
        rows = self.rows()
        return Calibration({}) if rows.empty else Calibration.of(rows, draws=0)

    def rows(self) -> pd.DataFrame:
        """All rows of the lab's calibration that are there, of all its collectives."""
        one_by_one = [self._path(f"-{name}") for name in self.collectives]
        there = [path for path in one_by_one if store.has_table(path)]
        several = [
            more
            for path in there
            for more in store.list_tables(path.parent, f"{path.stem}-lanes*.csv")
        ]
        frames = [*map(store.load_table, [*there, *several])]
        return pd.concat(frames) if frames else pd.DataFrame()


def read_rows(path: Path) -> pd.DataFrame | None:
    """Of a table that need not be there yet."""
    return store.load_table(path) if store.has_table(path) else None


def guessed_cost(shape: LabShape, collective: str) -> MessageCost:
    """The wire at its rate, and a start-up that grows with the workers."""
    beta = wire_s_per_byte(collective, shape.workers, shape.rate_bits_per_s)
    alpha_s = ALPHA_S * shape.workers**2 + 4 * shape.workers * way_s(shape.link)
    return AlphaBeta(alpha_s, beta, collective=collective, workers=shape.workers, algorithm="ring")
