"""Real training of one network in one place: its plans, its cases and their predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pandas as pd

from ddlkit import store
from ddlkit.core.case import Case
from ddlkit.core.errors import UserError
from ddlkit.core.plan import FusionPlan
from ddlkit.core.workload import LayerProfile
from ddlkit.measure.session import table_path
from ddlkit.model import Calibration, forecast_case, make_plan, predictor
from ddlkit.model.calibration import TRAINING
from ddlkit.model.fits import table_cost
from workbook.record.campaigns import predicted_by, prediction_rows
from workbook.validate import rivals

COLLECTIVE = "all_reduce"


def recorded(out: Path, schema: str, name: str) -> Path:
    """Return the path of a table that an earlier measurement of the session has left in ``out``.

    Raises UserError if the table is missing.
    """
    path = table_path(out, schema, name)
    if not store.has_table(path):
        raise UserError(
            f"{path} is missing: run ddlkit measure {schema} --out {out} first"
        )
    return path


@dataclass(frozen=True)
class Trained:
    """A network in training in a place, which means on some ranks with some link between them.

    The messages of the place, and the layers of the network on as many ranks, must have been
    measured before.

    Attributes
    ----------
    out : Path
        The directory of the tables.
    messages : str
        The name of the place's table of collectives.
    key : str
        The name of the table of slowdown, which the network and the batch have in this place.
    network, batch, ranks, device
        What is trained, and where.
    plans : sequence of str
        The names of the plans.
    accumulate : int
        How many batches are computed for each exchange.
    """

    out: Path
    messages: str
    key: str
    network: str
    batch: int
    ranks: int
    device: str
    plans: Sequence[str]
    accumulate: int = 1

    @property
    def _profile_name(self) -> str:
        """The name of the tables of layers and samples, which ``ranks`` ranks measured at the same time."""
        return f"{self.network}-b{self.batch}-r{self.ranks}"

    @cached_property
    def profile(self) -> LayerProfile:
        """The layers of the network, measured by ``ranks`` ranks at the same time."""
        return store.read_profile(recorded(self.out, "layers", self._profile_name))

    @cached_property
    def collectives(self) -> pd.DataFrame:
        """The rows of table ``collectives`` of the place, of all-reduces."""
        rows = store.load_table(recorded(self.out, "collectives", self.messages))
        return rows[rows["collective"] == COLLECTIVE]

    @cached_property
    def planned(self) -> dict[str, FusionPlan]:
        """The distinct plans by their names. Of plans with the same groups, the first is kept.

        The plans are made from the measured layers and the measured times of messages.
        """
        # The times of computing all batches between two exchanges.
        workload = self.profile.workload().accumulated(self.accumulate)
        cost = table_cost(self.collectives, self.ranks)
        distinct = {}
        # Two plans have the same groups if their groups have the same ends.
        seen_ends = set()
        for spec in self.plans:
            plan = make_plan(spec, workload, cost)
            if plan.ends not in seen_ends:
                seen_ends.add(plan.ends)
                distinct[spec] = plan
        return distinct

    def group_bytes(self) -> dict[str, Sequence[int]]:
        """Return the bytes of each message in the order of sending, by the name of the plan."""
        workload = self.profile.workload()
        return {
            spec: plan.group_bytes(workload).tolist()
            for spec, plan in self.planned.items()
        }

    def cases(self) -> list[Case]:
        """Return a case for each plan: what identifies its measured iterations.

        If DDP makes other buckets than a plan asks for, the later measurement leaves its case out.
        """
        # All rows are of one place, and so of one link.
        first = self.collectives.iloc[0]
        return [
            Case(
                kind=TRAINING,
                network=self.network,
                device=self.device,
                batch=self.batch,
                workers=self.ranks,
                link=str(first["link"]),
                link_bits_per_s=float(first["link_bits_per_s"]),
                collective=COLLECTIVE,
                plan=spec,
                ends=";".join(map(str, plan.ends)),
                profile_sha256=self.profile.sha256,
                accumulate=self.accumulate,
            )
            for spec, plan in self.planned.items()
        ]

    def predicted(self) -> pd.DataFrame:
        """Return the rows of table ``predicted`` of all cases, by our model and by each rival model.

        The predictions use the collectives, the layers and the samples that were measured in the
        place. If it has a table of slowdown, they also use how much messages and compute slow each
        other down.
        """
        slowdown = None
        slowdown_path = table_path(self.out, "slowdown", self.key)
        if store.has_table(slowdown_path):
            slowdown = store.load_table(slowdown_path)
        # Our model has a cost of its own. Rival models have costs of other forms, such as a straight line.
        calibration = Calibration.of(
            self.collectives, also=rivals.TRIAL_COSTS, slowdown=slowdown
        )
        samples = recorded(self.out, "samples", self._profile_name)
        # How much the computing times of iterations differ,
        # which widens the interval of our forecast.
        scatter = predictor.scatter_of(store.load_table(samples))
        workloads = {self.profile.sha256: self.profile.workload()}
        frames = []
        for case in self.cases():
            ours = forecast_case(case, workloads, calibration, compute_scatter=scatter)
            # By the name of its form, each cost of the messages over this link.
            rival_costs = calibration.of_case(case).costs_by_form
            # What all models, ours and the rivals, predict for a case that really trains.
            predicted_s = rivals.real_times(ours, rival_costs)
            frames.append(prediction_rows(case, ours, predicted_s))
        return pd.concat(frames, ignore_index=True)

    def predicted_by(self) -> str:
        """Return the first digits of the hash of the table that predicted all cases.

        The result is empty if there is no such table. Raises UserError if the table lacks a case.
        """
        return predicted_by(table_path(self.out, "predicted", "cases"), self.cases())


def predicted_trainings(
    asked: Sequence[tuple[str, Trained]], out: Path
) -> pd.DataFrame:
    """Return table ``predicted`` of all cases of several trainings, before these are measured.

    Parameters
    ----------
    asked : sequence of (str, Trained)
        For each training that asks for predictions, the name of its table of runs, and the training.
    out : Path
        The directory of the tables.

    Raises
    ------
    UserError
        If one of the trainings has runs already.
    """
    for name, _ in asked:
        path = table_path(out, "runs", name)
        # A table of runs shows that the training was measured already.
        if store.has_table(path):
            raise UserError(f"a prediction comes before its runs: {path} is there")
    return pd.concat([trained.predicted() for _, trained in asked], ignore_index=True)
