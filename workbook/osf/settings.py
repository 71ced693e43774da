"""The settings that the paper leaves out, scanned: which of them fit what it states.

*Compatible* settings have VGG-16 at its 0.25, and agree with most of the other statements.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ddlkit.core.units import GB, MB
from ddlkit.core.workload import Floats
from workbook.common import claims, networks
from workbook.common.claims import Outcome, Result, Verdict, load_claims
from workbook.common.settings import SettingSearch, Stated, settle
from workbook.osf.cluster import (
    BUFFERS,
    FIVE,
    NETWORK_BYTES_PER_S,
    REPLACED,
    UNITS,
    WORKERS,
    PaperSetting,
    fused,
    fused_iteration_s,
    network_flops,
    reference_network,
    workload,
)
from workbook.osf.equations import update_s

ANCHOR = "VGG-16: scaling factor"
"""The statement that every compatible setting agrees with."""


# -- what a setting gives ------------------------------------------------------------------------


@dataclass(frozen=True)
class Grid:
    """Settings to scan: every unit with every combination of the times in ``free``.

    points : how many values are scanned of each time but the timeout
    """

    points: int = 61

    @cached_property
    def free(self) -> dict[str, Floats]:
        """Return the scanned times by field of `PaperSetting`.

        They are in the order of the grid's axes after that of the units.
        """
        compute_s = np.geomspace(0.01, 3.0, self.points)
        timeout_s = np.append(np.geomspace(1e-4, 0.1, 10), math.inf)
        times = {
            "timeout_s": timeout_s,
            "overhead_s": np.geomspace(1e-5, 1e-2, self.points),
        }
        return {**times, "resnet101_s": compute_s, "vgg16_s": compute_s}

    @property
    def shape(self) -> tuple[int, ...]:
        """Return counts of units, timeouts, overheads, compute times of ResNet-101 and VGG-16."""
        return (len(UNITS), *(len(scanned) for scanned in self.free.values()))

    def setting(self, index: Sequence[int]) -> PaperSetting:
        """Return the setting at one place of the grid, given in the order of ``shape``."""
        places = zip(self.free.items(), index[1:], strict=True)
        times_s = {name: float(scanned[place]) for (name, scanned), place in places}
        return PaperSetting(
            resnet101_s=times_s["resnet101_s"],
            vgg16_s=times_s["vgg16_s"],
            overhead_s=times_s["overhead_s"],
            timeout_s=times_s["timeout_s"],
            unit=UNITS[index[0]],
        )


def quantities(
    grid: Grid, of_fig4: int = WORKERS, of_fig8: Sequence[int] = (0, 0)
) -> dict[str, Floats]:
    """Return what the paper states, computed for every setting.

    Each array broadcasts to ``grid.shape``.

    of_fig4 : workers of Fig 4a, which are not stated
    of_fig8 : buffers of Fig 8, of VGG-16 and replaced, which are not stated either
    """
    one = {network: _family(network, grid, WORKERS) for network in (*FIVE, REPLACED)}
    resnet = one["ResNet101"]
    vgg = one["VGG16"]
    fig4 = _family("ResNet101", grid, of_fig4)
    errors = [one[network]["csf"] / one[network]["sf_0"] - 1 for network in FIVE]
    sizes = np.abs(np.stack(np.broadcast_arrays(*errors)))
    against = [fig4["csf"] / fig4[f"sf_{size}"] - 1 for size in BUFFERS]
    return {
        "VGG-16: scaling factor": vgg[f"sf_{of_fig8[0]}"],
        "VGG-16 replaced: scaling factor": one[REPLACED][f"sf_{of_fig8[1]}"],
        "VGG-16: change of the factor with 100 MB": vgg[f"sf_{100 * MB}"] / vgg["sf_0"]
        - 1,
        "VGG-16: share of one layer": _largest_share(grid),
        "VGG-16: loss of the factor with 1 GB": 1 - vgg[f"sf_{GB}"] / vgg["sf_0"],
        "VGG-16: growth of communication time with 1 GB": vgg[f"update_{GB}"]
        / vgg["update_0"]
        - 1,
        "ResNet-101: gain of the factor with 1 GB": resnet[f"sf_{GB}"] / resnet["sf_0"]
        - 1,
        "ResNet-101: gain of the factor with 100 MB": resnet[f"sf_{100 * MB}"]
        / resnet["sf_0"]
        - 1,
        "ResNet-101: gain of 100 MB over 1 GB": resnet[f"sf_{100 * MB}"]
        / resnet[f"sf_{GB}"]
        - 1,
        "ResNet-101: ALLREDUCE share": resnet["share_0"],
        "ResNet-101: largest size of CSF's error, any buffer": np.max(
            np.abs(np.stack(against)), axis=0
        ),
        "ResNet-101: CSF's error with 1 KB and with 1 MB": np.minimum(
            against[0], against[1]
        ),
        "ResNet-101: CSF's error with 100 MB and with 1 GB": np.maximum(
            against[2], against[3]
        ),
        "five networks: smallest size of CSF's error, no buffer": sizes.min(axis=0),
        "five networks: largest size of CSF's error, no buffer": sizes.max(axis=0),
        "three ResNets: CSF's error, no buffer": np.min(np.stack(errors[:3]), axis=0),
    }


def _largest_share(grid: Grid) -> Floats:
    """Return the share of VGG-16's largest layer in what all messages take (osf Eq 7)."""
    layers = [layer.tensors for layer in networks.layers("VGG16")]
    sent_s = update_s(
        np.array([4.0 * sum(of) for of in layers]), WORKERS, NETWORK_BYTES_PER_S
    )
    shares = []
    for unit in UNITS:
        messages = np.array(
            [len(tensors) if unit == "tensor" else 1 for tensors in layers]
        )
        each_s = sent_s + np.multiply.outer(grid.free["overhead_s"], messages)
        shares.append(each_s[:, np.argmax(sent_s)] / each_s.sum(axis=1))
    return np.array(shares)[:, None, :, None, None]


@lru_cache(maxsize=8)
def _family(network: str, grid: Grid, workers: int) -> dict[str, Floats]:
    """Return SF by buffer, CSF, T_update and its busy share, over the grid.

    The arrays are 1 wide along the axis of the other family's compute time.
    """
    reference = reference_network(network)
    slope = float(update_s(1.0, workers, NETWORK_BYTES_PER_S))
    times = grid.free["vgg16_s" if reference == "VGG16" else "resnet101_s"]
    timeouts_s = grid.free["timeout_s"]
    overheads_s = grid.free["overhead_s"] * (workers - 1) / (WORKERS - 1)
    ratio = network_flops(network) / network_flops(reference)
    buffered = {"ResNet101": BUFFERS, "VGG16": BUFFERS, REPLACED: (100 * MB,)}
    capacities = 0, *buffered.get(network, ())
    shape = len(UNITS), len(timeouts_s), len(overheads_s), len(times)
    names = [f"{what}_{c}" for c in capacities for what in ("sf", "update", "share")]
    found = {name: np.empty(shape) for name in (*names, "csf")}
    for (u, unit), (t, compute_s) in product(
        enumerate(UNITS), enumerate(ratio * times)
    ):
        sending_s = slope * workload(network, compute_s, unit).bytes.sum()
        found["csf"][u, :, :, t] = compute_s / (compute_s + (overheads_s + sending_s))
        for capacity in capacities:
            for k, timeout_s in enumerate(timeouts_s if capacity else timeouts_s[:1]):
                place = (u, k if capacity else slice(None), slice(None), t)
                work, plan, waited = fused(
                    network, compute_s, capacity, timeout_s, unit
                )
                taken = fused_iteration_s(work, plan, waited, overheads_s, slope)
                update = taken - work.ready_s[0]
                found[f"sf_{capacity}"][place] = compute_s / taken
                found[f"update_{capacity}"][place] = update
                busy = len(plan.ends) * overheads_s + sending_s
                found[f"share_{capacity}"][place] = busy / update
    other = -2 if reference == "VGG16" else -1
    return {name: np.expand_dims(values, other) for name, values in found.items()}


# -- what the paper states, and the settings that agree ------------------------------------------


def stated() -> tuple[Stated, ...]:
    """Return what osf states of its cluster: claims, by the quantities that stated.csv names."""
    listed = {claim.id: claim for claim in load_claims()}
    table = pd.read_csv(Path(__file__).with_name("stated.csv"), comment="#")
    intervals = []
    for row in table.itertuples():
        low, high = (row.offset + row.unit * end for end in listed[row.claim].accepted)
        intervals.append(Stated(row.statement, low, high))
    return tuple(intervals)


@lru_cache(maxsize=4)
def setting_search(
    of_fig4: int = WORKERS, of_fig8: tuple[int, int] = (0, 0)
) -> SettingSearch:
    """Return all settings of the default grid against ``stated()``, by a reading of Figs 4a and 8."""
    grid = Grid()
    return settle(stated(), grid, quantities(grid, of_fig4, of_fig8))


@lru_cache(maxsize=1)
def compatible() -> tuple[PaperSetting, ...]:
    """Return every setting that agrees with as many statements as that of the figures, the best first."""
    search = setting_search()
    mask = search.most(ANCHOR)
    order = np.argsort(search.miss[mask], kind="stable")
    return tuple(map(search.grid.setting, np.argwhere(mask)[order]))


def setting() -> PaperSetting:
    """Return the setting of the figures."""
    return compatible()[0]


def over(
    modelled: Callable[[PaperSetting], pd.DataFrame],
    keys: Sequence[str],
    values: Sequence[str] = ("model",),
    unit: str = "",
) -> pd.DataFrame:
    """Return a figure's numbers at the best compatible setting, with their range over all of them.

    keys : columns that name a row; values : columns that get a ``_low`` and a ``_high``
    unit : if given, only settings in which a message is of this unit
    """
    settings = [each for each in compatible() if unit in ("", each.unit)]
    every = pd.concat(map(modelled, settings))
    by_row = every.groupby(list(keys), sort=False)[list(values)]
    low = by_row.min().add_suffix("_low")
    high = by_row.max().add_suffix("_high")
    return modelled(settings[0]).join(low, on=list(keys)).join(high, on=list(keys))


# -- claims judged by the settings ---------------------------------------------------------------


def by_model(
    quantity: str, scale: float = 1, offset: float = 0, note: str = ""
) -> Result:
    """Judge a quantity by the settings that meet the most other statements."""
    return claims.by_model(setting_search(), quantity, scale, offset, note)


def by_readings(
    readings: Mapping[str, Any], quantity: str, scale: float = 1, offset: float = 0
) -> Result:
    """Judge a quantity by each of several readings of the paper: all must agree.

    readings : arguments of `setting_search`, by what they mean
    """
    read = {
        name: claims.by_model(setting_search(*how), quantity, scale, offset)
        for name, how in readings.items()
    }

    def judge(low: float, high: float) -> Verdict:
        by = {name: one.judge(low, high) for name, one in read.items() if one.judge}
        note = "; ".join(
            f"{name}, {one.outcome}: {one.note}" for name, one in by.items()
        )
        outcomes = {one.outcome for one in by.values()}
        alike = len(outcomes) == 1
        return Verdict(outcomes.pop() if alike else Outcome.UNDECIDED, note)

    spans = np.concatenate([one.spans for one in read.values()])
    return replace(claims.modelled(spans, ""), judge=judge)
