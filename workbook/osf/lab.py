"""The rate-limited lab: what a campaign recorded there, as several figures need it.

In the *regime* start-ups and bytes weigh against compute as in the setting that an earlier
search found best.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache

import pandas as pd

from ddlkit.core.case import Case
from ddlkit.core.timeline import Timeline
from ddlkit.core.units import parse_bytes
from ddlkit.core.workload import Workload
from ddlkit.model.calibration import Calibration
from workbook.common import places
from workbook.common.source import REGIMES, open_campaign, open_source
from workbook.osf.cluster import osf_name
from workbook.osf.equations import of_timeline

LAB = "campaign-osf"
"""The campaign at 1 Gbit/s."""
STRETCHED = (
    "1 Gbit/s, layer times stretched to an earlier best setting's "
    "(ResNet-101 4.7, VGG-16 2.7 times)"
)
"""How notes describe that campaign."""
EQ7 = "alpha_beta:ends"
"""osf Eq 7: a line, its delta measured on the smallest message."""
OTHER_LINES = "alpha_beta:medians", "alpha_beta", "alpha_beta:least_squares"
"""Lines through the medians, by relative error, and by least squares."""
LABS = {"measured": "cheap start-ups", "regime": "expensive start-ups"}
"""The labs' links, by the look of their points."""
PLACES = {
    "": "cluster (model)",
    **{mark: f"lab, {links}" for mark, links in LABS.items()},
}
"""Headings of the cluster and of the labs, by the look of their points."""


@dataclass(frozen=True)
class Lab:
    """What a campaign recorded: iterations, spans, compute by its hash, and fitted costs."""

    runs: pd.DataFrame
    spans: pd.DataFrame
    workloads: Mapping[str, Workload]
    calibration: Calibration

    @classmethod
    @lru_cache(maxsize=6)  # fitting its costs takes longer than whatever asks for it
    def load(cls, campaign: str = LAB) -> Lab:
        """Return a campaign, or what a machine's suite replayed, read once. Raises UserError for none."""
        whole = (places.RECORDED / campaign).is_dir()
        opened = open_source(campaign) if whole else open_campaign(name=campaign)
        alone = opened.alone
        calibration = Calibration.of(
            alone.table("collectives"), also=(EQ7, *OTHER_LINES)
        )
        return cls(
            alone.table("runs"),
            alone.table("timeline"),
            opened.workloads(),
            calibration,
        )

    def cases(self, *, negotiated: bool = False, plain: bool = False) -> list[Case]:
        """Return cases with or without a negotiation.

        plain : only those of equal workers, dense gradients and one message in flight
        """
        rows = self.runs.drop_duplicates("case").to_dict("records")
        cases = [
            case for case in map(Case.from_row, rows) if case.negotiated == negotiated
        ]
        return [
            c
            for c in cases
            if not plain or c.density == c.straggler == c.in_flight == 1
        ]

    def workload(self, case: Case) -> Workload:
        """Return what a rank of usual speed computes."""
        return self.workloads[case.profile_sha256].scaled(case.dilation)

    def rounds(self, case: Case) -> pd.DataFrame:
        """Return the iterations of a case by their round, each with its scaling factor (osf Eq 1)."""
        runs = self.runs[self.runs["case"] == case.key].set_index("repeat")
        return runs.assign(factor=runs["compute_s"] / runs["iteration_s"])

    def phases(self, case: Case, first: str = "ALLREDUCE") -> pd.DataFrame:
        """Return seconds of each phase on rank 0, one row per repeat.

        first : the phase that counts where two happen at once
        """
        repeats = self.spans[self.spans["case"] == case.key].groupby("repeat")
        timelines = [Timeline.from_columns(rows) for _, rows in repeats]
        return pd.DataFrame([of_timeline(spans, first=first) for spans in timelines])


def buffer_of(case: Case) -> tuple[str, int] | None:
    """Return the network as osf writes it and the buffer's bytes, 0 without one.

    None for another plan.
    """
    kind, _, size = case.plan.partition(":")
    if kind not in ("none", "buffer"):
        return None
    return osf_name(case.network), parse_bytes(size) if size else 0


def buffer_name(size: float) -> str:
    """Return a buffer as a label, decimal as the paper's seem to be, "none" without one."""
    units = {"GB": 1e9, "MB": 1e6, "KB": 1e3, "B": 1.0}
    return next(
        (f"{size / unit:g} {name}" for name, unit in units.items() if size >= unit),
        "none",
    )


def in_labs(
    of: Callable[[Lab], pd.DataFrame], regime: str = REGIMES
) -> list[pd.DataFrame]:
    """Return numbers over the lab's link and in the regime; ``look``: a name of LABS."""
    names = zip(LABS, (LAB, regime), strict=True)
    return [of(Lab.load(campaign)).assign(look=mark) for mark, campaign in names]


def graded(model: pd.DataFrame, *labs: pd.DataFrame) -> pd.DataFrame:
    """Return rows of the model and of the lab, each named by its grade, one below the other."""
    rows = [model.assign(grade="model"), *(lab.assign(grade="lab") for lab in labs)]
    return pd.concat(rows, ignore_index=True)
