"""The settings that the dag paper leaves open, and which of them fit its statements.

All combinations of the scanned numbers are compared with the paper's statements. The
*compatible* settings agree with the most statements, and claims are judged by them.

References
----------
dag : S. Shi, Q. Wang, X. Chu and B. Li, "A DAG Model of Synchronous Stochastic Gradient
    Descent in Distributed Deep Learning", 2018.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from typing import ClassVar

import numpy as np
import pandas as pd

from ddlkit.core.workload import Floats, Ints
from workbook.common import claims
from workbook.common.claims import Result, load_claims
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

_NFS = CLUSTERS["K80"].storage_bytes_per_s
_DISK = CLUSTERS["V100"].storage_bytes_per_s
# The scanned numbers by field of `Setting`, which says what each is.
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
    """Every combination of the scanned numbers.

    Attributes
    ----------
    free : mapping of str to ndarray
        The scanned numbers by field of `Setting`.
    shape : tuple of int
        How many numbers of each field are scanned.

    Notes
    -----
    A first grid agreed with half of the paper's statements. ``varies`` and
    ``gold_faster`` were added then, and MXNet is no longer slower on Ethernet.
    """

    free: ClassVar[Mapping[str, Floats]] = {
        name: np.asarray(values) for name, values in _SCANNED.items()
    }
    shape: ClassVar[tuple[int, ...]] = tuple(
        len(values) for values in _SCANNED.values()
    )

    def settings(self) -> Setting:
        """Return all settings at once, each field an array along its own axis."""
        axes = np.ix_(*self.free.values())
        return Setting(**dict(zip(self.free, axes, strict=True)))

    def at(self, places: Ints) -> Setting:
        """Return the settings at some places of the grid.

        Parameters
        ----------
        places : ndarray of int, shape (s, axes)
            A row for each of s settings: its index on each axis of the grid. An axis has the
            scanned numbers of one field.

        Returns
        -------
        Setting
            Its fields have shape (s,).
        """
        fields = {}
        indices_by_axis = np.asarray(places).T
        for (name, scanned), indices in zip(
            self.free.items(), indices_by_axis, strict=True
        ):
            fields[name] = scanned[indices]
        return Setting(**fields)


@lru_cache(maxsize=1)
def setting_search() -> SettingSearch:
    """Return which of the paper's statements hold in which settings of the grid.

    Each statement is a claim. It holds if its quantity is in the interval that claims.csv
    accepts.
    """
    accepted = {claim.id: claim.accepted for claim in load_claims()}
    stated = []
    for statement, claim_id in STATEMENTS.items():
        low, high = accepted[claim_id]
        # The interval may be in %, but a quantity is a plain number. The factor is then 0.01.
        factor = unit(claim_id)
        stated.append(Stated(statement, factor * low, factor * high))
    grid = Grid()
    return settle(stated, grid, quantities(grid.settings()))


@lru_cache(maxsize=1)
def compatible() -> Setting:
    """Return all settings that agree with the most statements, the most central first.

    Returns
    -------
    Setting
        Its fields have shape (s,). The first setting has the efficiencies that are
        nearest to their medians over all of these settings.
    """
    search = setting_search()
    settings = search.grid.at(np.argwhere(search.most()))
    # An efficiency that does not depend on all fields may be a number. The zeros give
    # each of them the shape (s,).
    zeros = 0 * settings.varies
    # Axes are the bars of Figs 2 and 3, and the settings.
    by_bar = np.array([zeros + value for value in efficiencies(settings).values()])
    medians = np.median(by_bar, axis=1, keepdims=True)
    # The distance of a setting is the sum over the bars of |log(efficiency / median)|.
    distances = np.abs(np.log(by_bar / medians)).sum(axis=0)
    # Settings at the same distance keep their order on the grid.
    order = np.argsort(distances, kind="stable")
    return Setting(**{name: values[order] for name, values in vars(settings).items()})


def central() -> Setting:
    """Return the most central of the compatible settings, whose fields are numbers."""
    fields = vars(compatible())
    return Setting(**{name: float(values[0]) for name, values in fields.items()})


def of_each(cases: pd.DataFrame, which: str, level: int = 0) -> pd.DataFrame:
    """Return the least or the largest number of each network, or of each framework.

    Parameters
    ----------
    cases : DataFrame
        A row for each setting, and a column for each pair of a network and a framework.
    which : {"min", "max"}
        Whether to return the least or the largest.
    level : {0, 1}, optional
        The level of the columns that remains: 0 for networks, 1 for frameworks.

    Returns
    -------
    DataFrame
        A row for each setting, and a column for each network or framework.
    """
    # Only rows can be grouped, so that the columns become rows in between.
    return cases.T.groupby(level=level, sort=False).agg(which).T


def by_model(
    statement: str,
    claim: str,
    cases: Callable[[Setting], pd.DataFrame] | None = None,
    *,
    cases_decide: bool = True,
) -> Result:
    """Return a result that is judged by the settings which meet most other statements.

    A statement is what the paper says of a quantity, such as an efficiency. A setting has a
    number for each field that the paper leaves open, and determines all quantities. The
    statement of the claim must not choose the settings that judge it, so that only the others
    do.

    There are three outcomes. Without ``cases``, the quantity alone is judged. With ``cases``
    that do not decide, the ranges of the cases are only added to its note. With ``cases`` that
    decide, there are two readings: the mean, which is the quantity, and each case.

    Parameters
    ----------
    statement : str
        The name of the statement whose quantity the claim is about.
    claim : str
        The id of the claim, whose unit the result has.
    cases : callable, optional
        A function that takes settings and returns the quantity of each case, such as a
        network: a row for each setting, and a column for each case. It is given if the
        statement's own quantity is a mean over cases. By default there are no cases.
    cases_decide : bool, optional
        Whether the paper's sentence may fairly be read as one on each case.

    Returns
    -------
    Result
        The values of the quantity, in the unit of the claim.
    """
    search = setting_search()
    # A quantity is a plain number. If the claim is in %, the scale is 100, otherwise 1.
    scale = 1 / unit(claim)
    of_quantity = claims.by_model(search, statement, scale)
    if cases is None:
        return of_quantity
    # The same settings as `claims.by_model` chooses.
    places = np.argwhere(search.most_others(statement))
    # The numbers of the cases in these settings. They have the unit of the claim, because no
    # claim on several cases is in %.
    of_settings = cases(search.grid.at(places))
    note = _ranges_in_words(of_settings)
    if not cases_decide:
        return replace(of_quantity, note=note)

    # The quantity is the mean over the cases. Both readings show its values, but "each" is
    # judged by the cases.
    each = replace(of_quantity, judge=partial(_judge_each, of_settings))
    return claims.by_readings({"the mean": of_quantity, "each": each}, note)


def _judge_each(of_settings: pd.DataFrame, low: float, high: float) -> claims.Verdict:
    """Return the verdict on a claim which is read as one on each case.

    Parameters
    ----------
    of_settings : DataFrame
        The numbers, with a row for each setting and a column for each case.
    low, high : float
        The least and the largest number that the claim accepts.
    """
    # A setting agrees with the claim if all of its cases are accepted.
    is_accepted = (low <= of_settings) & (of_settings <= high)
    share = float(is_accepted.all(axis=1).mean())
    text = f"in {share:.0%} of the {len(of_settings):,} settings"
    return claims.Verdict(claims.by_share(share), text)


def _ranges_in_words(cases: pd.DataFrame) -> str:
    """Return the range of the numbers of each case, for a note.

    ``cases`` has a row for each setting that meets the most statements, not counting the
    statement that the claim is about. A column is a case such as "AlexNet". Columns such as
    ("AlexNet", "K80") and ("AlexNet", "V100") are one case, "AlexNet".
    """
    ranges = []
    # After the transposition there is a row for each column.
    for name, rows in cases.T.groupby(level=0, sort=False):
        values = rows.to_numpy()
        ranges.append(f"{name} {values.min():.4g} to {values.max():.4g}")
    return f"in settings that meet the most others, case by case: {', '.join(ranges)}"
