"""What osf's figures are made from: the paper's cluster in the setting that fits, and the lab's campaign."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pandas as pd

from ddlkit.core.case import Case
from ddlkit.core.timeline import COLUMNS, Timeline
from ddlkit.core.units import GB, KB, MB
from ddlkit.core.workload import Workload
from ddlkit.model.calibration import Calibration
from ddlkit.papers.osf import cluster
from ddlkit.report.claims import claimed
from ddlkit.report.source import open_campaign

TWO = ("ResNet101", "VGG16")
WORKER_COUNTS = (1, 2, 4, 8, 16, 32)
BUFFERS = tuple(m * u for u in (KB, MB) for m in (1, 3, 10, 30, 100, 300)) + (GB,)
ANCHOR = "VGG-16: scaling factor"


def stated() -> tuple[cluster.Stated, ...]:
    """What osf states of its cluster, from osf_stated.csv beside this module.

    Most are numbers, each with the tolerance of its claim; of the others the text says what is higher.
    """
    table = Path(__file__).with_name("osf_stated.csv")
    rows = pd.read_csv(table, comment="#").itertuples()
    return tuple(
        cluster.Stated(row.statement, row.least, row.most)
        if pd.isna(row.claim)
        else cluster.Stated.about(row.statement, claimed(row.claim) * row.unit, row.tolerance)
        for row in rows
    )


@lru_cache(maxsize=1)
def setting_search() -> cluster.SettingSearch:
    """All settings of the default grid against ``stated()``."""
    return cluster.search(stated())


@lru_cache(maxsize=1)
def setting() -> cluster.PaperSetting:
    """The setting of the figures: VGG-16 at its 0.25, and of the rest as much as fits together."""
    found = setting_search()
    return found.grid.setting(found.best_index(ANCHOR))


@dataclass(frozen=True)
class Lab:
    """What the campaign recorded: iterations, spans, compute by its hash, and fitted costs."""

    runs: pd.DataFrame
    spans: pd.DataFrame
    workloads: Mapping[str, Workload]
    calibration: Calibration

    @classmethod
    def load(cls, campaign: str = "campaign-osf") -> Lab:
        """The recorded campaign. Raises UserError where there is none."""
        found = open_campaign(name=campaign)
        own = found.alone
        calibration = Calibration.of(own.table("collectives"))
        return cls(own.table("runs"), own.table("timeline"), found.workloads(), calibration)

    def cases(self, *, negotiated: bool) -> list[Case]:
        """The cases with or without a negotiation, in the order of the recording."""
        rows = self.runs.drop_duplicates("case").to_dict("records")
        return [case for case in map(Case.from_row, rows) if case.negotiated == negotiated]

    def workload(self, case: Case) -> Workload:
        """What a rank of usual speed computes."""
        return self.workloads[case.profile_sha256].scaled(case.dilation)

    def timelines(self, case: Case) -> Iterator[Timeline]:
        """One per repeat."""
        mine = self.spans[self.spans["case"] == case.key]
        for _, rows in mine.groupby("repeat"):
            yield Timeline(**{name: rows[name].to_numpy() for name in COLUMNS})


def buffer_name(size: float) -> str:
    """A buffer as a label, decimal as the paper's seem to be, "none" without one.

    >>> buffer_name(25_000_000), buffer_name(0)
    ('25 MB', 'none')
    """
    for unit, factor in (("GB", GB), ("MB", MB), ("KB", KB)):
        if size >= factor:
            return f"{size / factor:g} {unit}"
    return f"{size:g} B" if size else "none"
