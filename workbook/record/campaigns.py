"""Campaigns: cases that are replayed in labs, and can be predicted before that.

Each lab is calibrated before and after its replays. The iterations of a replay are appended to a file in a
hidden directory, so that a kill loses only the iteration in flight and the next session goes on. They enter
the tables of the lab when all of them are complete.
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
from ddlkit.core.errors import UserError, shown
from ddlkit.core.lab_links import one_way_delay_s, wire_s_per_byte
from ddlkit.core.sparse import ELEMENT_BYTES, SelectionTimes, SparseGather, selected
from ddlkit.core.units import KIB
from ddlkit.core.workload import LayerProfile
from ddlkit.jobs import vitals
from ddlkit.jobs.clock import Budget
from ddlkit.lab import ENGINES, MAX_RANKS, Conditions
from ddlkit.lab.network import Lab, LabShape
from ddlkit.measure import networks as known_networks
from ddlkit.measure.collectives import CollectivesSettings, messages_at, missing_sizes
from ddlkit.measure.layers import layer_tables
from ddlkit.measure.needs import LAYERS, batch_s, starting_s
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
from workbook.record import needs
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
MOST_ITERATIONS = 20_000
"""The most iterations of a grid. Each takes seconds, so that a larger number is a slip in the file."""
BEFORE = 0
"""The number of the calibration session before a lab's replays."""
AFTER = 1
"""The number of the calibration session after a lab's replays."""
MOMENTS = ("before", "after")
"""The names of the calibration sessions, by their numbers."""
PARTIAL = ".partial"
"""The name of the hidden directory of iterations that are not in a table yet."""
DIGITS = 12
"""How many digits of the predictions' hash stand in the runs that they predicted."""
SAMPLE_S = 0.25
"""The seconds that all messages of a calibration's sample take, on a link with a delay."""
ALPHA_S = 6e-5
"""A guessed start-up in seconds per worker squared, until a lab has been calibrated.

It gives 0.24 ms for two workers and 0.96 ms for four. A message of 1 KiB takes 0.2 ms and 1.0 ms
in notebook 01."""
SELECTION_SIZES = (1_000, 10_000, 100_000, 1_000_000, 3_000_000, 10_000_000, 30_000_000)
SELECTION_BUDGET = Budget(warmup=1, min_repeats=3, max_repeats=15, max_s=0.5)


class Extent(NamedTuple):
    """How thoroughly a campaign measures.

    Attributes
    ----------
    powers : sequence of int
        Labs are calibrated at 2 to these powers KiB, up to the largest message.
    max_s : float
        The most seconds that are spent on each size.
    profile_budget : Budget
        How long a network without a profile is measured.
    """

    powers: Sequence[int]
    max_s: float
    profile_budget: Budget


EXTENTS = {
    "quick": Extent(range(0, 20, 2), 0.15, Budget(1, 3, 20, 2.0)),
    # The sizes from 1 MiB to 4 MiB double, because messages of these sizes are cut into segments.
    "dense": Extent((0, 2, 4, 6, 8, 10, 11, 12, 14), 0.3, Budget(2, 10, 60, 10.0)),
    "full": Extent(range(20), 1.0, Budget(2, 10, 60, 20.0)),
}


AGAIN_WITH_MORE_TIME = (
    "run the same command again, with a longer --budget if it has one"
)
"""What to do about a measurement that others need, but that was left out or failed."""


class Request(NamedTuple):
    """A case that a file asks for, before its plan is made.

    The plan and the dilation, by which replayed compute is stretched, follow from the calibration
    of the lab.
    """

    network: str
    batch: int
    plan: str
    density: float
    straggler: float

    @property
    def sparse(self) -> bool:
        """Return whether the case will be sparse, as `Case.sparse` does."""
        return self.density < 1

    @property
    def collective(self) -> str:
        """Return the name of the collective that sends the gradients."""
        return of_gradients(sparse=self.sparse)


@dataclass(frozen=True)
class Grid:
    """The cases of a campaign, which are the product of all lists of this grid.

    Attributes
    ----------
    networks : sequence of (str, int)
        Names of networks, each with the samples of its batch.
    workers : sequence of int
        Numbers of workers of a lab.
    rates : sequence of float
        Rates of a lab's links in bit/s.
    plans : sequence of str
        Names of plans.
    engines : sequence of str
        How a lab makes its links, of `ENGINES`.
    delays, losses : sequence of float
        Delays in seconds and shares of lost packets. Only emulated links have them.
    density : sequence of float
        Shares of the gradients that are sent.
    stragglers : sequence of float
        Factors by which the last worker computes more slowly.
    rounds : int
        How often each case is repeated.
    calibration : str
        How thoroughly labs are calibrated, of `EXTENTS`.
    name : str
        The tables lie in the folder campaign-NAME of the session's directory. Without a name they lie in the
        directory itself.

    Raises
    ------
    UserError
        For an unknown network, a lab that cannot exist, and too many iterations.
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
        # All fields are lists but the rounds, the calibration and the name.
        lists = [
            value for value in vars(self).values() if isinstance(value, (list, tuple))
        ]
        n_cases = math.prod(len(values) for values in lists)
        if n_cases * self.rounds > MOST_ITERATIONS:
            raise UserError(
                f"{_counted(n_cases, 'case')}, the product of its lists, of "
                f"{_counted(self.rounds, 'round')} each: at most {MOST_ITERATIONS} iterations: "
                "lower rounds, or shorten a list"
            )
        for name, _ in self.networks:
            # Raises for an unknown network.
            known_networks.find(name)
        # Raises for a lab that cannot exist. `shapes` is a generator, of which `list` reads all.
        list(self.shapes())

    def shapes(self) -> Iterator[LabShape]:
        """Yield the shapes of all labs, one for each combination of workers, rate and engine.

        The engine is what makes the lab's links. For the engine "emulated" there is a lab for each
        delay with each loss. Raises UserError for a lab that cannot exist.
        """
        conditions_of_emulated = [
            Conditions(delay_s, loss)
            for delay_s, loss in itertools.product(self.delays, self.losses)
        ]
        # The links of the first engine, which is the token bucket of the Linux kernel, can have no
        # delay and no loss.
        by_key = {"delays": self.delays, "losses": self.losses}
        keys = [key for key, values in by_key.items() if any(values)]
        if ENGINES[0] in self.engines and keys:
            raise UserError(
                f"{', '.join(keys)}: links of the engine {ENGINES[0]} have none: write engines: "
                "emulated alone"
            )
        labs = itertools.product(self.workers, self.rates, self.engines)
        for workers, rate_bits_per_s, engine in labs:
            # One worker alone sends nothing.
            if not 2 <= workers <= MAX_RANKS:
                raise UserError(
                    f"workers: {workers} in a lab: use 2 to {MAX_RANKS} workers"
                )
            if engine == ENGINES[0]:
                # A lab without conditions has the links of this engine.
                yield LabShape(workers, rate_bits_per_s, None)
                continue
            for conditions in conditions_of_emulated:
                yield LabShape(workers, rate_bits_per_s, conditions)

    def requests(self) -> Iterator[Request]:
        """Yield the requests that each lab of this grid gets, which are the same for all labs."""
        combinations = itertools.product(
            self.networks, self.plans, self.density, self.stragglers
        )
        for network_and_batch, plan, density, straggler in combinations:
            network, batch = network_and_batch
            yield Request(network, batch, plan, density, straggler)


def _counted(n: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless it is one."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def labs_of(
    grids: Sequence[Grid], out: Path, file: str, device: str
) -> list[LabPoints]:
    """Return the labs of a campaign, each with the requests of all grids that ask for it.

    Parameters
    ----------
    grids : sequence of Grid
        The grids of the campaign.
    out : Path
        The directory of the session.
    file : str
        The file of the campaign, as an error names it.
    device : str
        The device on which networks are measured, "cpu" or "cuda".

    Returns
    -------
    list of LabPoints
        One element for each shape of lab. If several grids make the same request of a lab, the lab
        has the request once, with the largest of their numbers of rounds.

    Raises
    ------
    UserError
        If the grids have different calibrations or names.
    """
    # Grids that ask for the same lab share its tables. They must therefore agree on the calibration
    # of the lab, and on the name, from which the folder of the tables follows.
    for key in ("calibration", "name"):
        # By a dictionary, each value counts once, in the order of the file.
        values = [*dict.fromkeys(getattr(grid, key) for grid in grids)]
        if len(values) > 1:
            listed = " and ".join(shown(value) for value in values)
            raise UserError(
                f"{file}: {key}: {listed}: write the same for all its points"
            )
    # By the shape of the lab, the number of rounds of each request.
    asked_by_lab: dict[LabShape, dict[Request, int]] = {}
    for grid in grids:
        for shape, request in itertools.product(grid.shapes(), grid.requests()):
            asked = asked_by_lab.setdefault(shape, {})
            asked[request] = max(grid.rounds, asked.get(request, 0))
    extent = grids[0].calibration
    folder = f"{CAMPAIGN}-{grids[0].name}" if grids[0].name else ""
    return [
        LabPoints(shape, asked, extent, out, folder, device)
        for shape, asked in asked_by_lab.items()
    ]


def campaign(labs: Sequence[LabPoints], predict: bool) -> Iterator[Point]:
    """Yield all points of a campaign, which are its separate measurements, lab by lab.

    Each lab is calibrated before and after its replays. If the cases are only predicted, the second
    calibrations begin once all labs have had their first one, so that the two calibrations of a lab
    lie far apart in time. The last point then predicts all cases.

    Parameters
    ----------
    labs : sequence of LabPoints
        The labs.
    predict : bool
        Whether the cases are only predicted, and not replayed.
    """
    for lab in labs:
        yield from lab.inputs()
        yield from lab.calibrations(BEFORE)
        if not predict:
            yield lab.replay_point()
            yield from lab.calibrations(AFTER)
    if predict:
        for lab in labs:
            yield from lab.calibrations(AFTER)
        measure = partial(predicted_cases, labs)
        # `seconds` takes a number of cases. Here, all cases of a lab together count as one.
        estimate_s = needs.PREDICTED.seconds(len(labs))
        # All labs of a campaign have the same folder.
        yield Point("predicted", "cases", measure, estimate_s, folder=labs[0].folder)


def predicted_cases(labs: Sequence[LabPoints]) -> pd.DataFrame:
    """Return table ``predicted`` of all cases. Raises UserError once any of them has been replayed."""
    for lab in labs:
        # Runs are in the table once a replay is complete,
        # and before that in the directory ``unsaved``.
        if lab.saved("runs") or lab.unsaved.exists():
            raise UserError(
                f"a prediction comes before its runs: {lab.shape.name} has some"
            )
    return pd.concat([lab.predicted() for lab in labs], ignore_index=True)


def prediction_rows(
    case: Case, ours: Forecast, predicted_s: Mapping[str, tuple[float, float]]
) -> pd.DataFrame:
    """Return the rows of table ``predicted`` of one case.

    Parameters
    ----------
    case : Case
        The case.
    ours : Forecast
        The forecast of this project's model. The ends of its ``paired_interval_s`` become the rows
        "lower" and "upper". This interval of the iteration leaves out how compute has changed since
        its profile. A forecast may have none.
    predicted_s : mapping
        By model, ours among them, the predicted seconds of the iteration and of its exposed communication.

    Returns
    -------
    DataFrame
        A row for each ``model`` and ``quantity`` ("iteration", "exposed", "lower" or "upper"), with
        its ``seconds`` and the key of the ``case``.
    """
    rows = []
    for model, (iteration_s, _) in predicted_s.items():
        rows.append((model, "iteration", iteration_s))
    for model, (_, exposed_s) in predicted_s.items():
        rows.append((model, "exposed", exposed_s))
    if ours.paired_interval_s:
        lower_s, upper_s = ours.paired_interval_s
        rows.append((rivals.OURS, "lower", lower_s))
        rows.append((rivals.OURS, "upper", upper_s))
    # A model that does not predict a quantity gives NaN, and has no row.
    table = pd.DataFrame(rows, columns=["model", "quantity", "seconds"]).dropna()
    # The table has two more columns, which are always empty here. An empty ``cost`` says that the
    # cost of messages is the table of their measured times. An empty ``drift`` says that the drift
    # of a link, which is how its sessions differ, was estimated from the sessions of this link
    # alone.
    return table.assign(case=case.key, cost="", drift="")


def predicted_by(path: Path, cases: Iterable[Case]) -> str:
    """Return the first `DIGITS` digits of the hash of the table that predicted all cases.

    The table ``runs`` holds these digits, which show that the predictions came first. The result is
    empty if there is no such table. Raises UserError if the table lacks a case.

    Parameters
    ----------
    path : Path
        The path of the table ``predicted``, which need not exist.
    cases : iterable of Case
        The cases that are about to be replayed.
    """
    if not store.has_table(path):
        return ""
    predicted_keys = set(store.load_table(path)["case"])
    for case in cases:
        if case.key not in predicted_keys:
            raise UserError(
                f"{path}: says nothing of case {case.key}, {case.network} under "
                f"{case.plan} over {case.link}: name another file, and predict before "
                "its runs"
            )
    # The stamp of a table says how it was made, and has the hash of its rows.
    return str(store.load_stamp(path)["sha256"])[:DIGITS]


def guessed_cost(shape: LabShape, collective: str) -> MessageCost:
    """Return a cost of messages for a lab that has not been calibrated.

    Bytes travel at the rate of the link. The start-up of a message grows with the delay of the link
    and with the square of the number of workers. The square is a guess: more workers take more
    steps, and share the cores of one machine. The cost only decides how many messages a sample of a
    calibration has, and how long measurements are expected to take.
    """
    s_per_byte = wire_s_per_byte(collective, shape.workers, shape.rate_bits_per_s)
    software_s = ALPHA_S * shape.workers**2
    # A ring of N workers has about 2 N steps, each of which takes a round trip.
    steps = 2 * shape.workers
    round_trip_s = 2 * one_way_delay_s(shape.link)
    alpha_s = software_s + steps * round_trip_s
    return AlphaBeta(
        alpha_s,
        s_per_byte,
        collective=collective,
        workers=shape.workers,
        algorithm="ring",
    )


@functools.cache
def gradient_bytes(network: str) -> int:
    """Return the bytes of all gradients of a network."""
    # Only sizes are needed. On the meta device, tensors have a shape and no values, so that no
    # weights are drawn, which would take seconds.
    with torch.device("meta"):
        parameters = known_networks.build(network).parameters()
        return ELEMENT_BYTES * sum(tensor.numel() for tensor in parameters)


@dataclass(frozen=True)
class LabPoints:
    """One lab of a campaign, which makes the points, or measurements, of this lab.

    Attributes
    ----------
    shape : LabShape
        The lab.
    asked : mapping of Request to int
        How many rounds of each request are asked for, in the order of the file.
    extent : str
        A key of `EXTENTS`, which says how thoroughly the lab is calibrated.
    out : Path
        The directory of the session.
    folder : str
        The folder of the campaign's tables within ``out``.
    device : str
        The device on which networks are measured, "cpu" or "cuda".
    """

    shape: LabShape
    asked: Mapping[Request, int]
    extent: str
    out: Path
    folder: str
    device: str

    # -- tables ------------------------------------------------------------------------

    def path(self, schema: str, name: str = "") -> Path:
        """Return the path of a table of the campaign, by default the one named after the lab."""
        return table_path(self.out / self.folder, schema, name or self.shape.name)

    def rows(self, schema: str, name: str = "") -> pd.DataFrame:
        """Return the rows of a table, or no rows if the table does not exist yet."""
        path = self.path(schema, name)
        if not store.has_table(path):
            # The columns that the callers read, of the tables of calibrations and of replays.
            return pd.DataFrame(columns=["session", "case", "repeat"])
        return store.load_table(path)

    def calibration_rows(self, collective: str) -> pd.DataFrame:
        """Return the rows of table ``collectives`` of one collective in this lab."""
        return self.rows("collectives", f"{self.shape.name}-{collective}")

    def saved(self, schema: str) -> set[tuple[str, int]]:
        """Return the pairs (key of the case, repeat) that a table of the lab holds."""
        rows = self.rows(schema)
        return set(zip(rows["case"], rows["repeat"], strict=True))

    @property
    def unsaved(self) -> Path:
        """Return the directory in which a replay collects iterations until its tables are written."""
        return self.out / self.folder / PARTIAL / self.shape.name

    @property
    def collectives(self) -> list[str]:
        """Return the distinct collectives of the requests, in the order of the file."""
        return list(dict.fromkeys(request.collective for request in self.asked))

    # -- profiles and selection --------------------------------------------------------

    def inputs(self) -> Iterator[Point]:
        """Yield points for what must be known before a case is planned: profiles and selection times."""
        networks = [(request.network, request.batch) for request in self.asked]
        for name, batch in dict.fromkeys(networks):
            yield self._profile_point(name, batch)
        densities = {request.density for request in self.asked if request.sparse}
        for density in sorted(densities):
            yield self._selection_point(density)

    def _profile_point(self, network: str, batch: int) -> Point:
        """Return the point that measures the layers of a network on one rank."""
        budget = EXTENTS[self.extent].profile_budget
        iteration_s = batch_s(network, batch, self.device, machine.cores())
        start_s = starting_s(network, self.device, ranks=1)
        measure = partial(
            layer_tables,
            network,
            batch,
            self.device,
            "fp32",
            budget,
            threads=machine.cores(),
        )
        return Point(
            "layers",
            # The ending "-r1" stands for one rank.
            f"{network}-b{batch}-r1",
            measure,
            estimate_s=LAYERS.seconds(budget, iteration_s, start_s),
            tables=["layers", "samples"],
            folder=self.folder,
        )

    def _selection_point(self, density: float) -> Point:
        """Return the point that times the selection of the largest elements on the processor.

        The ``density`` is the share of the elements that is selected, from tensors of each size in
        `SELECTION_SIZES`.
        """
        measure_size = partial(
            measure_selection, "cpu", densities=[density], budget=SELECTION_BUDGET
        )
        # `map` is lazy. Each size is measured when `all_or_partial`, which concatenates the frames,
        # asks for its rows. If a size fails, the rows of the sizes before it are kept.
        frames = map(measure_size, SELECTION_SIZES)
        estimates_s = [
            needs.SELECTIONS.seconds(SELECTION_BUDGET, "cpu", size, densities=1)
            for size in SELECTION_SIZES
        ]
        return Point(
            "selection",
            f"rho{density:g}",
            partial(all_or_partial, "selection", frames),
            estimate_s=sum(estimates_s),
            folder=self.folder,
        )

    def selection_times(self, density: float) -> SelectionTimes:
        """Return the seconds of selecting at a density, as `_selection_point` recorded them."""
        return store.read_selection_times(
            self.path("selection", f"rho{density:g}"), density
        )

    # -- calibration -------------------------------------------------------------------

    def _largest_bytes(self, request: Request) -> int:
        """Return the bytes of a request's largest message, as a calibration counts them.

        The largest message has all gradients or, for a sparse request, the values of all selected
        elements.
        """
        n_bytes = gradient_bytes(request.network)
        if not request.sparse:
            return n_bytes
        n_selected = selected(n_bytes // ELEMENT_BYTES, request.density)
        # The size of an all-gather is that of all ranks together. The indices are not added,
        # because they go in a message of their own, with as many bytes.
        return self.shape.workers * ELEMENT_BYTES * n_selected

    def calibrations(self, session: int) -> Iterator[Point]:
        """Yield a point for each collective of one calibration session, `BEFORE` or `AFTER`.

        Both sessions add to the same tables. Their points differ in the ``moment``. The function
        ``left`` of a point returns the sizes that the session has still to measure.
        """
        for collective in self.collectives:
            # The calibration measures the cost of messages. Until then a guess has to do.
            cost = guessed_cost(self.shape, collective)
            sizes = self._calibration_sizes(collective)
            settings = self._calibration_settings(collective, sizes, cost)
            estimate_s = self._calibration_estimate_s(settings, cost)
            yield Point(
                "collectives",
                f"{self.shape.name}-{collective}",
                partial(self._calibrate, session, settings, estimate_s),
                estimate_s,
                folder=self.folder,
                moment=MOMENTS[session],
                left=partial(self._uncalibrated, session, settings),
            )

    def _calibration_sizes(self, collective: str) -> list[int]:
        """Return the sizes in bytes of the messages of a calibration, in rising order.

        These are the sizes of the extent that are smaller than the largest message of any request
        that uses the collective, and the size of this message.
        """
        largest = max(
            self._largest_bytes(request)
            for request in self.asked
            if request.collective == collective
        )
        sizes = [KIB << power for power in EXTENTS[self.extent].powers]
        return [*(size for size in sizes if size < largest), largest]

    def _calibration_settings(
        self, collective: str, sizes: Sequence[int], cost: MessageCost
    ) -> CollectivesSettings:
        """Return the settings of a calibration.

        Parameters
        ----------
        collective : str
            The collective that is measured.
        sizes : sequence of int
            The bytes of its messages.
        cost : MessageCost
            The expected cost of a message.
        """
        # A sample has as many messages as a replay posts at once.
        messages = MESSAGES_PER_SAMPLE
        if one_way_delay_s(self.shape.link):
            # On a link with a delay, `MESSAGES_PER_SAMPLE` messages could take minutes. A sample has
            # only as many of the smallest messages as fit into `SAMPLE_S`, but at least one.
            smallest_s = float(cost(1))
            messages = int(np.clip(SAMPLE_S / smallest_s, 1, MESSAGES_PER_SAMPLE))
        budget = Budget(
            warmup=1,
            min_repeats=2,
            max_repeats=30,
            max_s=EXTENTS[self.extent].max_s,
        )
        return CollectivesSettings(
            [collective],
            sizes,
            budget,
            messages_per_sample=messages,
            tries=vitals.TRIES,
        )

    def _calibration_estimate_s(
        self, settings: CollectivesSettings, cost: MessageCost
    ) -> float:
        """Return the seconds that a calibration is expected to take, if messages have this cost."""
        # The messages of a sample follow one another. A sample of large messages has fewer of them,
        # as `messages_at` says.
        samples_s = [
            messages_at(size, settings.messages_per_sample) * float(cost(size))
            for size in settings.sizes
        ]
        size_budget_s = EXTENTS[self.extent].max_s
        return needs.CALIBRATION.seconds(samples_s, size_budget_s)

    def _uncalibrated(
        self, session: int, settings: CollectivesSettings
    ) -> Sequence[int]:
        """Return the sizes in bytes that a calibration session has not measured yet.

        The session is `BEFORE` or `AFTER` the replays.
        """
        # A calibration measures one collective.
        (collective,) = settings.collectives
        rows = self.calibration_rows(collective)
        rows = rows[rows["session"] == session]
        return missing_sizes(rows, collective, settings.sizes, self.shape.workers)

    def _calibrate(
        self, session: int, settings: CollectivesSettings, estimate_s: float
    ) -> pd.DataFrame:
        """Measure the sizes that a calibration session has not measured yet. Return rows of ``collectives``.

        Parameters
        ----------
        session : int
            `BEFORE` or `AFTER` the replays.
        settings : CollectivesSettings
            What the whole session measures.
        estimate_s : float
            How long the whole session is expected to take, in seconds.
        """
        # An interrupted session goes on with the sizes that it has left.
        settings = replace(settings, sizes=self._uncalibrated(session, settings))
        # Two minutes to start the ranks, and three times as long as all tries are expected to take.
        # Only a calibration that hangs takes longer.
        timeout_s = 120 + 3 * vitals.TRIES * estimate_s
        with Lab(self.shape) as lab:
            rows = calibrate(lab, settings, timeout_s)
        return rows.assign(session=session)

    # -- cases -------------------------------------------------------------------------

    def _profile(self, request: Request) -> LayerProfile:
        """Return the layers of a request's network, as measured for the campaign on one rank.

        Raises UserError if the table is missing.
        """
        # The ending "-r1" stands for one rank.
        path = self.path("layers", f"{request.network}-b{request.batch}-r1")
        if not store.has_table(path):
            # A campaign measures the layers before its runs. Runs without layers are thus those
            # of an earlier campaign whose layers are missing.
            if self.saved("runs"):
                raise UserError(
                    f"{path.parent}: holds runs of an earlier campaign without the layers that "
                    f"were measured for it ({path.name}), so that it cannot be continued: name "
                    "another directory by --out"
                )
            # The measurement was left out, because it would have taken too long, or it failed.
            raise UserError(
                f"the layers of {request.network} at batch size {request.batch} were not measured: "
                f"{AGAIN_WITH_MORE_TIME}"
            )
        return store.read_profile(path)

    def _plan(self, request: Request) -> PlannedCase:
        """Return the case of a request, with its plan.

        The plan follows from the profile of the network and from the calibration before the
        replays. Raises UserError if there is no profile.
        """
        profile = self._profile(request)
        rows = self.calibration_rows(request.collective)
        # The session after the replays must not count. With it, the plans could become others than
        # those that were replayed.
        before = rows[rows["session"] == BEFORE]
        if before.empty:
            # The calibration was left out, because it would have taken too long, or it failed.
            raise UserError(
                f"no {request.collective} was measured before the replays: {AGAIN_WITH_MORE_TIME}"
            )
        cost = table_cost(before, self.shape.workers)
        # A dense case selects nothing, so that it has no hash of selection times.
        selection_sha256 = ""
        if request.sparse:
            selecting = self.selection_times(request.density)
            # By this hash, a forecast of the case finds the selection times.
            selection_sha256 = selecting.sha256
            # A group of gradients costs the selection of its largest elements, and the exchange of
            # their values and indices.
            cost = SparseGather(cost, request.density, selecting=selecting)
        return plan_case(
            profile,
            request.plan,
            cost,
            Lab(self.shape),
            density=request.density,
            straggler=request.straggler,
            selection_sha256=selection_sha256,
        )

    def planned(self) -> dict[PlannedCase, int]:
        """Return the distinct cases, each with the number of its rounds.

        Requests that differ only in the name of the plan may get plans with the same groups. Only
        the first of these is a case, with the largest number of rounds of any of them.
        """
        distinct: dict[object, tuple[PlannedCase, int]] = {}
        for request, rounds in self.asked.items():
            case = self._plan(request)
            # Two requests are the same case if they agree in all but the name of the plan, and
            # their plans have the same groups.
            key = (request._replace(plan=""), case.plan.ends)
            first_case, most_rounds = distinct.get(key, (case, 0))
            distinct[key] = (first_case, max(rounds, most_rounds))
        return dict(distinct.values())

    # -- replays -----------------------------------------------------------------------

    def _missing(self) -> list[tuple[PlannedCase, int]]:
        """Return the iterations that are not in the table of runs, round by round.

        An iteration is a planned case and its ``repeat``, the number of its round from 0 on.
        """
        rounds_by_case = self.planned()
        saved = self.saved("runs")
        missing = []
        for repeat in range(max(rounds_by_case.values())):
            for planned, rounds in rounds_by_case.items():
                if repeat < rounds and (planned.case.key, repeat) not in saved:
                    missing.append((planned, repeat))
        return missing

    def _left(self) -> Sequence[object]:
        """Return a list with an element for each iteration that is left to replay.

        An iteration is a round of a case. What the elements are does not matter, because only their
        number is used.
        """
        if self.saved("runs"):
            return self._missing()
        # Before the first run, the lab may not be calibrated yet, so that the cases cannot be
        # planned. All requests then count, even if some of their plans turn out to be the same.
        return [
            request for request, rounds in self.asked.items() for _ in range(rounds)
        ]

    def replay_point(self) -> Point:
        """Return the point that replays all cases of the lab.

        Replayed compute is dilated, or stretched, so that an iteration computes as long as one
        message with all gradients takes. The largest such message of the lab therefore gives the
        estimate.
        """
        n_left = len(self._left())
        largest = max(self.asked, key=self._largest_bytes)
        cost = guessed_cost(self.shape, largest.collective)
        message_s = float(cost(self._largest_bytes(largest)))
        return Point(
            "replay",
            self.shape.name,
            self._replay,
            estimate_s=needs.CAMPAIGN.seconds(n_left, message_s),
            tables=["runs", "timeline"],
            folder=self.folder,
            note=f"at most {_counted(n_left, 'iteration')} of {_counted(len(self.asked), 'case')}",
            left=self._left,
        )

    def _replay(self) -> Tables:
        """Replay the missing iterations and append them to the tables of the lab.

        The result, the tables that the session is to save, is empty.
        """
        # Comes first, because it raises if there are predictions that lack a case, whose replay
        # would be in vain.
        predictions_hash = self._predicted_by()
        # Each missing iteration is a `PlannedCase` and the number of its round, from 0 on.
        missing = self._missing()
        # Each case once, in the order in which it first comes.
        cases = list(dict.fromkeys(planned for planned, _ in missing))
        rounds = 1 + max(repeat for _, repeat in missing)
        # `replay` plays all rounds of all cases except for the iterations that are ``done``. These
        # are all that are not missing: those in the table, and those that are not asked for because
        # their case has fewer rounds than others.
        case_keys = [planned.case.key for planned in cases]
        every_iteration = set(itertools.product(case_keys, range(rounds)))
        missing_iterations = {(planned.case.key, repeat) for planned, repeat in missing}
        done = every_iteration - missing_iterations
        self.unsaved.mkdir(parents=True, exist_ok=True)
        with Lab(self.shape) as lab:
            played = replay(
                lab,
                self.shape.workers,
                cases,
                rounds,
                selection=self._selection_s,
                done=done,
                tries=vitals.TRIES,
                out=self.unsaved,
            )
        self._save_new("timeline", _recorded_ranks(played.timeline, cases))
        # The runs are saved after the spans, because an iteration counts as measured once its run
        # is saved.
        runs = played.runs.assign(predicted=predictions_hash)
        self._save_new("runs", runs)
        # The tables now hold all iterations that were collected here.
        shutil.rmtree(self.unsaved)
        return {}

    def _selection_s(self, elements: Any, density: float) -> Any:
        """Return the recorded seconds of selecting a share of so many elements.

        ``elements`` is a number or an array, whose shape the result has.
        """
        return self.selection_times(density)(elements, density)

    def _save_new(self, schema: str, rows: pd.DataFrame) -> None:
        """Append those rows to a table of the lab whose iterations the table does not hold yet.

        A replay that was killed between its two tables has left rows in one of them.
        """
        saved = self.saved(schema)
        iterations = zip(rows["case"], rows["repeat"], strict=True)
        is_new = [iteration not in saved for iteration in iterations]
        if any(is_new):
            # `Origin` describes this session in the stamp of the table.
            Origin().save(self.path(schema), rows[is_new], schema, append=True)

    # -- predictions -------------------------------------------------------------------

    def _predicted_by(self) -> str:
        """Return the first digits of the hash of the table that predicted all cases, as `predicted_by`."""
        cases = [planned.case for planned in self.planned()]
        return predicted_by(self.path("predicted", "cases"), cases)

    def predicted(self) -> pd.DataFrame:
        """Return the rows of table ``predicted`` of all cases of the lab, by our model and by each rival."""
        rows = [self.calibration_rows(collective) for collective in self.collectives]
        # Our model has a cost of its own. Rival models have costs of other forms, such as a straight line.
        calibration = Calibration.of(pd.concat(rows), also=rivals.TRIAL_COSTS)
        frames = []
        for case, workload, _plan in self.planned():
            # `forecast_case` looks up the workload and the
            # selection times by the hashes in the case.
            workloads = {case.profile_sha256: workload}
            selecting = {}
            if case.sparse:
                selecting[case.selection_sha256] = self.selection_times(case.density)
            ours = forecast_case(case, workloads, calibration, selecting)
            # By the name of its form, each cost of the messages over this link.
            rival_costs = calibration.of_case(case).costs_by_form
            predicted_s = rivals.predicted_times(ours, rival_costs)
            frames.append(prediction_rows(case, ours, predicted_s))
        return pd.concat(frames, ignore_index=True)


def _recorded_ranks(
    timeline: pd.DataFrame, cases: Iterable[PlannedCase]
) -> pd.DataFrame:
    """Return the rows of ``timeline`` that are recorded: those of rank 0 and of the straggler.

    The straggler is the last rank of a case whose last worker computes more slowly than the others.
    """
    # The rank of the straggler, by the key of the case.
    straggler_ranks = {
        planned.case.key: planned.case.workers - 1
        for planned in cases
        if planned.case.straggler > 1
    }
    is_first = timeline["rank"] == 0
    # A case without a straggler gives NaN here, which equals no rank.
    is_straggler = timeline["rank"] == timeline["case"].map(straggler_ranks)
    return timeline[is_first | is_straggler]
