"""What osf's figures are made from: the paper's cluster in the setting that fits, and the lab's campaign."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
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
VISIBLE = 0.01
"""Relative difference below which two bars of a picture cannot be told apart."""


def stated() -> tuple[cluster.Stated, ...]:
    """What osf states of its cluster, each with the tolerance of its claim; "higher" is by 1% or more."""
    about = {
        ANCHOR: ("osf-fig08-before", 1.0, 0.10),
        "VGG-16 replaced: scaling factor": ("osf-fig08-after", 1.0, 0.05),
        "VGG-16: loss at 1 GB": ("osf-fig06-vgg16", 0.01, 0.25),
        "VGG-16: communication at 1 GB": ("osf-fig07-vgg16", 0.01, 0.25),
        "ResNet-101: gain at 1 GB": ("osf-fig06-resnet101", 0.01, 0.25),
        "ResNet-101: ALLREDUCE share": ("osf-fig05-allreduce", 0.01, 0.10),
        "ResNet-101: largest CSF error": ("osf-fig04a-csf", 0.01, 0.25),
        "five: smallest CSF error": ("osf-fig03-csf-min", 0.01, 0.25),
        "five: largest CSF error": ("osf-fig03-csf-max", 0.01, 0.25),
    }
    ordered = {
        "VGG-16: change up to 100 MB": (-0.05, 0.05),
        "ResNet-101: 100 MB over 1 GB": (VISIBLE, math.inf),
        "ResNet-101: CSF above at 1 KB, 1 MB": (VISIBLE, math.inf),
        "ResNet-101: CSF below at 100 MB, 1 GB": (-math.inf, -VISIBLE),
        "ResNets: CSF above SF": (VISIBLE, math.inf),
    }
    values = [
        cluster.Stated.about(name, claimed(claim) * unit, tolerance)
        for name, (claim, unit, tolerance) in about.items()
    ]
    return (*values, *(cluster.Stated(name, *limits) for name, limits in ordered.items()))


@lru_cache(maxsize=1)
def setting_search() -> cluster.SettingSearch:
    """All settings of the default grid against ``stated()``."""
    return cluster.search(stated())


@lru_cache(maxsize=1)
def setting() -> cluster.PaperSetting:
    """The setting of the figures: VGG-16 at its 0.25, and of the rest as much as fits together."""
    return setting_search().best(ANCHOR)


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


def mean_difference(values: pd.Series) -> float:
    """Repeatability: how far two repeats of one case differ, in the mean; NaN for a single one."""
    found = values.to_numpy()
    apart = np.abs(found[:, None] - found)[np.triu_indices(len(found), 1)]
    return float(apart.mean()) if len(apart) else float("nan")


def buffer_name(size: float) -> str:
    """A buffer as a label, decimal as the paper's seem to be, "none" without one.

    >>> buffer_name(25_000_000), buffer_name(0)
    ('25 MB', 'none')
    """
    for unit, factor in (("GB", GB), ("MB", MB), ("KB", KB)):
        if size >= factor:
            return f"{size / factor:g} {unit}"
    return f"{size:g} B" if size else "none"
