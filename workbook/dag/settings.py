"""dag's unstated settings: a grid of them, those that meet the most statements, and claims judged by them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache, lru_cache
from typing import ClassVar

import numpy as np
import pandas as pd

from ddlkit.core.workload import Floats, Ints
from workbook.common import claims
from workbook.common.claims import Outcome, Result, load_claims
from workbook.common.settings import SettingSearch, Stated, settle
from workbook.dag.cluster import (
    ALEXNET_BACKWARD_S,
    CLUSTERS,
    LIKE_PEAKS,
    LIKE_RESNET,
    MACHINES,
    MEMORY_BYTES_PER_S,
    Setting,
    like_resnet_s,
)
from workbook.dag.statements import STATEMENTS, efficiencies, quantities, unit

_NFS, _DISK = (CLUSTERS[name].storage_bytes_per_s for name in ("K80", "V100"))
_SCANNED = {
    "stored_bytes": (3 * 224.0**2, 3 * 256.0**2, 4 * 3 * 224.0**2),  # bytes, or floats
    "nfs_bytes_per_s": (_NFS, MACHINES * _NFS, MACHINES * MEMORY_BYTES_PER_S),
    "disk_bytes_per_s": (
        _DISK,
        np.sqrt(_DISK * MEMORY_BYTES_PER_S),
        MEMORY_BYTES_PER_S,
    ),
    "decoded_per_s": (500.0, 1000.0, 2000.0, 8000.0),
    "gold_faster": (1.0, 2.0),
    "copy_s": (1e-5, 1.6e-4),  # 150 KB at 15 GB/s to 602 KB at 3.8 GB/s
    "alexnet_backward_s": np.geomspace(
        like_resnet_s("K80", "AlexNet"), ALEXNET_BACKWARD_S, 3
    ),
    "alexnet_speedup": np.geomspace(LIKE_RESNET, LIKE_PEAKS, 3),
    "googlenet_rate": (0.7, 1.0),
    "ethernet_start": (0.0, 1.0),
    "infiniband_start": (0.0, 1.0),
    "inside_share": (0.1, 0.3, 1.0),
    "inside_start_s": (1e-5, 1e-4, 3e-4, 1e-3),
    "mxnet_slower": (1.0, 2.0, 4.0),
    "grpc_slower": (1.0, 3.0, 8.0),
    "varies": (0.0, 0.02, 0.05, 0.1),
}


class Grid:
    """Every combination of ``free``, the scanned numbers by field of `Setting`; shape : how many of each.

    A first grid, without ``varies`` and ``gold_faster`` and with MXNet slower on Ethernet too, agreed with
    half of what the paper states; these were added then.
    """

    free: ClassVar[Mapping[str, Floats]] = {
        name: np.asarray(v) for name, v in _SCANNED.items()
    }
    shape: ClassVar[tuple[int, ...]] = tuple(
        len(values) for values in _SCANNED.values()
    )

    def settings(self) -> Setting:
        """Return all at once: each field an array along its own axis."""
        return Setting(**dict(zip(self.free, np.ix_(*self.free.values()), strict=True)))

    def at(self, places: Ints) -> Setting:
        """Return those at (s, axes) places of the grid: each field (s,)."""
        columns = zip(self.free.items(), np.asarray(places).T, strict=True)
        return Setting(**{name: values[where] for (name, values), where in columns})


@lru_cache(maxsize=1)
def setting_search() -> SettingSearch:
    """Return all settings of the grid against the statements, as intervals that claims.csv accepts."""
    accepted = {claim.id: claim.accepted for claim in load_claims()}
    stated = tuple(
        Stated(name, *(unit(claim) * end for end in accepted[claim]))
        for name, claim in STATEMENTS.items()
    )
    grid = Grid()
    return settle(stated, grid, quantities(grid.settings()))


@lru_cache(maxsize=1)
def compatible() -> Setting:
    """Return all settings that agree with the most statements, each field (s,), nearest to medians first."""
    search = setting_search()
    settings = search.grid.at(np.argwhere(search.most()))
    every = efficiencies(settings).values()
    drawn = np.array([settings.varies * 0 + efficiency for efficiency in every])
    off = np.abs(np.log(drawn / np.median(drawn, axis=1, keepdims=True))).sum(axis=0)
    order = np.argsort(off, kind="stable")
    return Setting(**{name: values[order] for name, values in vars(settings).items()})


def central() -> Setting:
    """Return the most central of the compatible settings, in numbers."""
    return Setting(
        **{name: float(values[0]) for name, values in vars(compatible()).items()}
    )


@cache
def compatible_efficiencies() -> pd.DataFrame:
    """Return the `efficiencies` of all compatible settings: a row a setting, a column a bar."""
    return pd.DataFrame(efficiencies(compatible()))


def of_each(cases: pd.DataFrame, which: str, level: int = 0) -> pd.DataFrame:
    """Return the "min" or "max" of each network, or with level 1 of each framework."""
    return cases.T.groupby(level=level, sort=False).agg(which).T


def by_model(
    statement: str,
    claim: str,
    cases: pd.DataFrame | None = None,
    *,
    judged_one_by_one: bool = True,
) -> Result:
    """Return a statement's quantity in the settings that meet the most other statements, which judge it.

    cases : what the quantity is the mean of, in the compatible settings: a row a setting. A claim that the
        mean meets is undecided where its cases do, each by itself, in less than half of these settings
    judged_one_by_one : whether the cases count, too; else they stand in the note alone
    """
    search, scale = setting_search(), 1 / unit(claim)
    if cases is None:
        return claims.by_model(search, statement, scale)
    mean = claims.by_model(search, statement, scale, note=_spans(cases))

    def judge(low: float, high: float) -> claims.Verdict:
        assert mean.judge
        outcome, note = mean.judge(low, high)
        every = float(((low <= cases) & (cases <= high)).all(axis=1).mean())
        if outcome is Outcome.COMPATIBLE and every < 0.5:
            outcome = Outcome.UNDECIDED
        return claims.Verdict(
            outcome, f"{note}; of each in {every:.0%} of the {len(cases)}"
        )

    return replace(mean, judge=judge) if judged_one_by_one else mean


def _spans(cases: pd.DataFrame) -> str:
    """Return between what all columns lie, by the first level of their names."""
    spans = []
    for name, rows in cases.T.groupby(level=0, sort=False):
        values = rows.to_numpy()
        spans.append(f"{name} {values.min():.4g} to {values.max():.4g}")
    return f"in settings that meet the most, case by case: {', '.join(spans)}"
