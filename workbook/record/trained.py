"""Real training of one network in one place: its plans and cases, and what models say of them before."""

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
    """Return a table that other points gave. Raises UserError where it is not there."""
    path = table_path(out, schema, name)
    if not store.has_table(path):
        raise UserError(
            f"{path} is missing: run ddlkit measure {schema} --out {out} first"
        )
    return path


@dataclass(frozen=True)
class Trained:
    """A network on some ranks of a place whose messages and layers were measured, under ``plans``.

    messages : what its table of collectives is called; key : network, batch, ranks and link, of others
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

    @cached_property
    def profile(self) -> LayerProfile:
        """Its layers, measured by so many ranks at the same time."""
        return store.read_profile(
            recorded(self.out, "layers", f"{self.network}-b{self.batch}-r{self.ranks}")
        )

    @cached_property
    def collectives(self) -> pd.DataFrame:
        """Rows of what messages take there."""
        rows = store.load_table(recorded(self.out, "collectives", self.messages))
        return rows[rows["collective"] == COLLECTIVE]

    @cached_property
    def planned(self) -> dict[str, FusionPlan]:
        """Its plans by their names; of those that come out the same, the first."""
        workload = self.profile.workload().accumulated(self.accumulate)
        cost = table_cost(self.collectives, self.ranks)
        made = {spec: make_plan(spec, workload, cost) for spec in self.plans}
        first = {plan.ends: spec for spec, plan in reversed(made.items())}
        return {spec: plan for spec, plan in made.items() if first[plan.ends] == spec}

    def group_bytes(self) -> dict[str, Sequence[int]]:
        """Return bytes of each message by plan."""
        workload = self.profile.workload()
        return {
            spec: plan.group_bytes(workload).tolist()
            for spec, plan in self.planned.items()
        }

    def cases(self) -> list[Case]:
        """Return what will be measured, if DDP makes the buckets that are asked of it."""
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
        """Return rows of a table ``predicted``, by all that was measured of the place before."""
        beside = table_path(self.out, "slowdown", self.key)
        slowdown = store.load_table(beside) if store.has_table(beside) else None
        calibration = Calibration.of(
            self.collectives, also=rivals.TRIAL_COSTS, slowdown=slowdown
        )
        samples = recorded(
            self.out, "samples", f"{self.network}-b{self.batch}-r{self.ranks}"
        )
        scatter = predictor.scatter_of(store.load_table(samples))
        frames = []
        for case in self.cases():
            workloads = {case.profile_sha256: self.profile.workload()}
            ours = forecast_case(case, workloads, calibration, compute_scatter=scatter)
            times = rivals.real_times(ours, calibration.of_case(case).others)
            frames.append(prediction_rows(case, ours, times))
        return pd.concat(frames, ignore_index=True)

    def predicted_by(self) -> str:
        """Return how the hash begins of the table that predicted its cases; "" without. Raises UserError."""
        return predicted_by(table_path(self.out, "predicted", "cases"), self.cases())


def predicted_trainings(
    asked: Sequence[tuple[str, Trained]], out: Path
) -> pd.DataFrame:
    """Return what models say of every case, before the first of them ran. Raises UserError after."""
    for name, _ in asked:
        if store.has_table(path := table_path(out, "runs", name)):
            raise UserError(f"a prediction comes before its runs: {path} is there")
    return pd.concat([trained.predicted() for _, trained in asked], ignore_index=True)
