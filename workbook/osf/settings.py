"""The settings that the osf paper leaves open, and which of them fit its statements.

The paper does not state compute times, the overhead of a message, the timeout of the
fusion buffer, or whether a message carries a layer or a tensor. All combinations are
scanned. *Compatible* settings give VGG-16 its stated scaling factor of 0.25, and agree
with the most of the other statements.

References
----------
osf : T. Liu et al., "Modeling and Optimizing the Scaling Performance in Distributed
    Deep Learning Training", WWW 2022.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, reduce
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from ddlkit.core.plan import FusionPlan
from ddlkit.core.units import GB, MB
from ddlkit.core.workload import Floats, Workload
from workbook.common import claims, networks
from workbook.common.claims import Result, load_claims
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
FUSED_NUMBERS = ("sf", "update", "share")
"""The numbers of `_fused_numbers`, which are computed for each size of the buffer."""


# -- what a setting gives ------------------------------------------------------------


@dataclass(frozen=True)
class Grid:
    """Settings to scan: every unit with every combination of the times in ``free``.

    The unit, of UNITS, is what a message carries if nothing is fused.

    Attributes
    ----------
    points : int
        How many values are scanned of each time but the timeout.
    """

    points: int = 61

    @cached_property
    def free(self) -> dict[str, Floats]:
        """Return the values of each time that the paper leaves open, in seconds.

        The names are fields of `PaperSetting`, in the order of the grid's axes. The first axis
        of the grid is that of UNITS, which are no times and have no entry here.
        """
        compute_s = np.geomspace(0.01, 3.0, self.points)
        # The last timeout never ends a wait, as if the buffer had none.
        timeout_s = np.append(np.geomspace(1e-4, 0.1, 10), math.inf)
        return {
            "timeout_s": timeout_s,
            "overhead_s": np.geomspace(1e-5, 1e-2, self.points),
            "resnet101_s": compute_s,
            "vgg16_s": compute_s,
        }

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the number of units, and of the values of each time in ``free``."""
        return (len(UNITS), *(len(scanned) for scanned in self.free.values()))

    def setting(self, index: Sequence[int]) -> PaperSetting:
        """Return the setting at one place of the grid.

        Parameters
        ----------
        index : sequence of int, length 5
            The place on each axis: of the unit in UNITS, and of each time in ``free``.
        """
        unit_place, *time_places = index
        times_s = {}
        for (name, scanned), place in zip(self.free.items(), time_places, strict=True):
            times_s[name] = float(scanned[place])
        return PaperSetting(
            resnet101_s=times_s["resnet101_s"],
            vgg16_s=times_s["vgg16_s"],
            overhead_s=times_s["overhead_s"],
            timeout_s=times_s["timeout_s"],
            unit=UNITS[unit_place],
        )


def quantities(
    grid: Grid, of_fig4: int = WORKERS, of_fig8: Sequence[int] = (0, 0)
) -> dict[str, Floats]:
    """Return the quantities of the paper's statements, computed for every setting.

    Parameters
    ----------
    grid : Grid
        The settings.
    of_fig4 : int, optional
        The number of workers of Fig 4a, which is not stated.
    of_fig8 : sequence of int, length 2, optional
        The buffers in bytes of Fig 8, for VGG-16 and for VGG-16 with replaced layers.
        They are not stated either. 0 is no fusion.

    Returns
    -------
    dict of str to ndarray
        By name of the quantity, an array that broadcasts to ``grid.shape``.
    """
    # What `_over_grid` returns for each network. In it, "sf_<bytes>" is the scaling factor with
    # a buffer of that size, "sf_0" the one without a buffer, and "csf" that without overlap.
    by_network = {
        network: _over_grid(network, grid, WORKERS) for network in (*FIVE, REPLACED)
    }
    resnet = by_network["ResNet101"]
    vgg = by_network["VGG16"]
    fig4 = _over_grid("ResNet101", grid, of_fig4)

    # Scaling factors without a buffer, with 100 MB and with 1 GB.
    resnet_0, resnet_100_mb, resnet_1_gb = _factors(resnet)
    vgg_0, vgg_100_mb, vgg_1_gb = _factors(vgg)
    # "update_<bytes>" is the time from the first gradient to the end of all messages, and
    # "share_<bytes>" the share of this time in which the link is busy.
    communication_growth = vgg[f"update_{GB}"] / vgg["update_0"] - 1
    return {
        "VGG-16: scaling factor": vgg[f"sf_{of_fig8[0]}"],
        "VGG-16 replaced: scaling factor": by_network[REPLACED][f"sf_{of_fig8[1]}"],
        "VGG-16: change of the factor with 100 MB": vgg_100_mb / vgg_0 - 1,
        "VGG-16: share of one layer": _largest_share(grid),
        "VGG-16: loss of the factor with 1 GB": 1 - vgg_1_gb / vgg_0,
        "VGG-16: growth of communication time with 1 GB": communication_growth,
        "ResNet-101: gain of the factor with 1 GB": resnet_1_gb / resnet_0 - 1,
        "ResNet-101: gain of the factor with 100 MB": resnet_100_mb / resnet_0 - 1,
        "ResNet-101: gain of 100 MB over 1 GB": resnet_100_mb / resnet_1_gb - 1,
        "ResNet-101: ALLREDUCE share": resnet["share_0"],
        **_csf_errors_by_buffer(fig4),
        **_csf_errors_by_network([by_network[network] for network in FIVE]),
    }


def _csf_errors_by_buffer(numbers: dict[str, Floats]) -> dict[str, Floats]:
    """Return the quantities about CSF's error for ResNet-101 with the buffers of Fig 4.

    The error of CSF is its relative error against the overlapping model. ``numbers`` are what
    `_over_grid` returns for ResNet-101.
    """
    errors = [numbers["csf"] / numbers[f"sf_{size}"] - 1 for size in BUFFERS]
    error_1_kb, error_1_mb, error_100_mb, error_1_gb = errors
    return {
        "ResNet-101: largest size of CSF's error, any buffer": np.max(
            np.abs(errors), axis=0
        ),
        # The paper says that CSF is above the factor with 1 KB and with 1 MB, and below it with
        # 100 MB and with 1 GB. Both buffers of a pair must meet this, so that the worse one
        # counts: the lower error of the first pair, and the higher one of the second.
        "ResNet-101: CSF's error with 1 KB and with 1 MB": np.minimum(
            error_1_kb, error_1_mb
        ),
        "ResNet-101: CSF's error with 100 MB and with 1 GB": np.maximum(
            error_100_mb, error_1_gb
        ),
    }


def _csf_errors_by_network(
    of_five: Sequence[dict[str, Floats]],
) -> dict[str, Floats]:
    """Return the quantities about CSF's error for all five networks without a buffer.

    The error of CSF is its relative error against the overlapping model. ``of_five`` has what
    `_over_grid` returns for each network of FIVE.
    """
    errors = [numbers["csf"] / numbers["sf_0"] - 1 for numbers in of_five]
    # The grid has an axis for the compute times of the ResNets and one for those of the VGGs. The
    # errors of a network have length 1 on the axis of the other family, and broadcast. `reduce`
    # combines two arrays at a time, which takes less memory than a stack of all five on the grid.
    error_sizes = [np.abs(error) for error in errors]
    smallest_size = reduce(np.minimum, error_sizes)
    largest_size = reduce(np.maximum, error_sizes)
    # The first three of the five networks are ResNets. The paper says that CSF is above the
    # factor of all three, so that the least error counts, with its sign.
    least_resnet_error = reduce(np.minimum, errors[:3])
    return {
        "five networks: smallest size of CSF's error, no buffer": smallest_size,
        "five networks: largest size of CSF's error, no buffer": largest_size,
        "three ResNets: CSF's error, no buffer": least_resnet_error,
    }


def _factors(numbers: dict[str, Floats]) -> tuple[Floats, Floats, Floats]:
    """Return the scaling factors without a buffer, with 100 MB, and with 1 GB."""
    return numbers["sf_0"], numbers[f"sf_{100 * MB}"], numbers[f"sf_{GB}"]


def _largest_share(grid: Grid) -> Floats:
    """Return the share of VGG-16's largest layer in all communication time (osf Eq 7).

    Nothing is fused. The array broadcasts to ``grid.shape``.
    """
    # The numbers of parameters in the tensors of each of L layers.
    layers = [layer.tensors for layer in networks.layers("VGG16")]
    # The parameters are float32.
    layer_bytes = np.array([4.0 * sum(tensors) for tensors in layers])
    # The time of the bytes of each layer, without overheads.
    sent_s = update_s(layer_bytes, WORKERS, NETWORK_BYTES_PER_S)
    largest = np.argmax(sent_s)
    shares = []
    for unit in UNITS:
        # How many messages, each with its overhead, a layer has.
        messages = np.array(
            [len(tensors) if unit == "tensor" else 1 for tensors in layers]
        )
        # Shape (overheads, L).
        overheads_s = np.multiply.outer(grid.free["overhead_s"], messages)
        layer_s = sent_s + overheads_s
        shares.append(layer_s[:, largest] / layer_s.sum(axis=1))
    # The shares have the axes of units and overheads. The grid also has, between them, that of
    # timeouts, and at the end those of two compute times. The shares depend on none of these.
    return np.array(shares)[:, None, :, None, None]


def _capacities(network: str) -> tuple[int, ...]:
    """Return the sizes in bytes of the fusion buffers of a network, first 0, no buffer."""
    # The paper's statements speak of buffers for three networks only. VGG-16 with replaced layers
    # (REPLACED) has a buffer of 100 MB by some readings of Fig 8, and else none.
    buffered = {"ResNet101": BUFFERS, "VGG16": BUFFERS, REPLACED: (100 * MB,)}
    return 0, *buffered.get(network, ())


class _MessageTimes(NamedTuple):
    """The times of the grid that concern messages and the fusion buffer.

    Attributes
    ----------
    timeouts_s : ndarray, shape (W,)
        How long the buffer waits for the next tensor, in seconds.
    overheads_s : ndarray, shape (D,)
        The overhead of a message, in seconds.
    s_per_byte : float
        The time of each byte of a message, in seconds.
    """

    timeouts_s: Floats
    overheads_s: Floats
    s_per_byte: float


def _message_times(grid: Grid, workers: int) -> _MessageTimes:
    """Return the times of the grid that concern messages, for a number of workers."""
    # The grid has the overhead of a message between WORKERS workers. It grows with the steps of
    # the ring, which are one fewer than the workers.
    overheads_s = grid.free["overhead_s"] * (workers - 1) / (WORKERS - 1)
    s_per_byte = float(update_s(1.0, workers, NETWORK_BYTES_PER_S))
    return _MessageTimes(grid.free["timeout_s"], overheads_s, s_per_byte)


def _compute_times_s(network: str, grid: Grid) -> Floats:
    """Return the compute times of a network over the grid, in seconds.

    The grid has compute times of VGG-16 and of ResNet-101, one network of each family. Those of
    another network are in proportion to its FLOP.
    """
    reference = reference_network(network)
    reference_time = "vgg16_s" if reference == "VGG16" else "resnet101_s"
    ratio = network_flops(network) / network_flops(reference)
    return ratio * grid.free[reference_time]


# The cache has one entry for each network, and one for each number of workers of Fig 4a that is
# tried.
@lru_cache(maxsize=16)
def _over_grid(network: str, grid: Grid, workers: int) -> dict[str, Floats]:
    """Return the scaling factors and the communication of one network over the grid.

    Parameters
    ----------
    network : str
        The network.
    grid : Grid
        The settings.
    workers : int
        The number of workers.

    Returns
    -------
    dict of str to ndarray
        ``csf`` is the scaling factor if one message follows all computation. For each
        buffer, ``sf_<bytes>`` is the scaling factor, ``update_<bytes>`` the time from
        the first gradient to the end of all messages in seconds, and ``share_<bytes>``
        the share of this time in which the link is busy. A buffer of 0 bytes is no fusion.

        Each array has the five axes of the grid: units, timeouts, overheads, compute times of
        ResNet-101, and compute times of VGG-16. For a ResNet the axis of VGG-16 has length 1, and
        for a VGG the axis of ResNet-101, because the compute time of the other family does not
        matter.
    """
    capacities = _capacities(network)
    compute_times_s = _compute_times_s(network, grid)
    times = _message_times(grid, workers)

    # The axes are units, timeouts, overheads, and the compute times of this network.
    shape = (
        len(UNITS),
        len(times.timeouts_s),
        len(times.overheads_s),
        len(compute_times_s),
    )
    arrays = {"csf": np.empty(shape)}
    for capacity in capacities:
        for name in FUSED_NUMBERS:
            arrays[f"{name}_{capacity}"] = np.empty(shape)

    # ``u`` is the place of a unit on the first axis, and ``t`` that of a compute time on the last.
    units = enumerate(UNITS)
    for (u, unit), (t, compute_s) in product(units, enumerate(compute_times_s)):
        # The time of all bytes of an iteration, without overheads.
        sent_s = times.s_per_byte * workload(network, compute_s, unit).bytes.sum()
        one_message_s = times.overheads_s + sent_s
        # One message has no timeout, so that all timeouts have the same factors.
        arrays["csf"][u, :, :, t] = compute_s / (compute_s + one_message_s)
        for capacity in capacities:
            numbers = _with_buffer(network, compute_s, unit, capacity, times)
            for name, by_timeout_and_overhead in numbers.items():
                # Without fusion, there is only one timeout, and its values go to all timeouts.
                arrays[f"{name}_{capacity}"][u, :, :, t] = by_timeout_and_overhead

    # The compute times of the other family get an axis of length 1, at their place in the grid.
    other_axis = 3 if reference_network(network) == "VGG16" else 4
    return {name: np.expand_dims(values, other_axis) for name, values in arrays.items()}


def _with_buffer(
    network: str, compute_s: float, unit: str, capacity: int, times: _MessageTimes
) -> dict[str, Floats]:
    """Return the FUSED_NUMBERS of a network with one buffer, by timeout and overhead.

    Parameters
    ----------
    network : str
        The network.
    compute_s : float
        Its compute time in seconds.
    unit : {"tensor", "layer"}
        What a message carries if nothing is fused.
    capacity : int
        The size of the buffer in bytes, or 0 for no fusion.
    times : _MessageTimes
        The W timeouts, the D overheads, and the time of a byte.

    Returns
    -------
    dict of str to ndarray, shape (W, D)
        Without fusion the timeout does not matter, and the shape is (1, D).
    """
    timeouts_s = times.timeouts_s if capacity > 0 else times.timeouts_s[:1]
    by_timeout = []
    for timeout_s in timeouts_s:
        # ``waited_s`` has the time that each message of the plan waits in vain for one more
        # tensor, until the timeout.
        work, plan, waited_s = fused(network, compute_s, capacity, timeout_s, unit)
        numbers = _fused_numbers(
            work, plan, waited_s, compute_s, times.overheads_s, times.s_per_byte
        )
        by_timeout.append(numbers)
    arrays = {}
    for name in FUSED_NUMBERS:
        arrays[name] = np.array([numbers[name] for numbers in by_timeout])
    return arrays


def _fused_numbers(
    work: Workload,
    plan: FusionPlan,
    waited_s: Floats,
    compute_s: float,
    overheads_s: Floats,
    s_per_byte: float,
) -> dict[str, Floats]:
    """Return the scaling factor and the communication of a network by one plan.

    Parameters
    ----------
    work, plan, waited_s
        What `workbook.osf.cluster.fused` returns.
    compute_s : float
        The compute time T_comp of the iteration, in seconds.
    overheads_s : ndarray, shape (D,)
        Values of the overhead of a message, in seconds.
    s_per_byte : float
        The time of each byte of a message, in seconds.

    Returns
    -------
    dict of str to ndarray, shape (D,)
        For each overhead, "sf" is the scaling factor, "update" the time from the first
        gradient to the end of all messages in seconds, and "share" the share of this time
        in which the link is busy.
    """
    # Shape (D,), as the overheads.
    iteration_s = fused_iteration_s(work, plan, waited_s, overheads_s, s_per_byte)
    first_gradient_s = work.ready_s[0]
    updating_s = iteration_s - first_gradient_s
    busy_s = len(plan.ends) * overheads_s + s_per_byte * work.bytes.sum()
    return {
        "sf": compute_s / iteration_s,
        "update": updating_s,
        "share": busy_s / updating_s,
    }


# -- what the paper states, and the settings that agree ------------------------------


def stated() -> tuple[Stated, ...]:
    """Return the statements of osf about its cluster.

    Each statement is a claim of claims.csv. Its interval is that of the numbers which the claim
    accepts, in the unit of the statement's quantity (`quantities`).
    """
    claims_by_id = {claim.id: claim for claim in load_claims()}
    statements = []
    for row in _stated_table().itertuples():
        # For example, 40% becomes 0.4 by a unit of 0.01, and a ratio of 1.01 becomes a gain of
        # 0.01 by an offset of -1. An end may be infinite.
        ends = claims_by_id[row.claim].accepted
        low, high = (row.offset + row.unit * end for end in ends)
        statements.append(Stated(row.statement, low, high))
    return tuple(statements)


def _stated_table() -> pd.DataFrame:
    """Return stated.csv, a row for each statement. Cells without a text are ""."""
    path = Path(__file__).with_name("stated.csv")
    return pd.read_csv(path, comment="#", keep_default_na=False)


def table_of_statements(search: SettingSearch) -> pd.DataFrame:
    """Return the statements in words, next to the values of their quantities.

    Parameters
    ----------
    search : SettingSearch
        The result of `setting_search`.

    Returns
    -------
    DataFrame
        A row for each statement: what the paper says, which values are accepted, the
        value in the best setting and whether it is accepted, and the share of all settings
        whose value is accepted.
    """
    paper_values = {claim.id: claim.value for claim in load_claims()}
    # The best setting must agree with ANCHOR, as all compatible settings do.
    computed = search.residuals(search.best_index(ANCHOR)).set_index("statement")
    # In which share of all settings each statement holds.
    shares = search.alone().set_index("statement")["settings"]
    rows = []
    for row in _stated_table().itertuples():
        best = computed.loc[row.statement]
        # The value of the claim in the unit of the statement's quantity. A unit of 0.01 turns 40%
        # into 0.4, and an offset of -1 turns a ratio of 1.01 into a gain of 0.01. Where the paper
        # prints no number, the column ``says`` has its words, and they are shown instead.
        number = f"{row.offset + row.unit * paper_values[row.claim]:g}"
        rows.append(
            {
                "statement": row.shown,
                "the paper says": row.says or number,
                "accepted values (with our tolerance)": _interval_in_words(
                    best["low"], best["high"]
                ),
                "value in the best setting": best["computed"],
                "accepted there": "yes" if best["holds"] else "no",
                "share of all settings with an accepted value": shares[row.statement],
            }
        )
    return pd.DataFrame(rows)


def _interval_in_words(low: float, high: float) -> str:
    """Return an interval as a table shows it. One of its ends may be infinite."""
    if math.isinf(high):
        return f"{low:.4g} or more"
    if math.isinf(low):
        return f"{high:.4g} or less"
    return f"{low:.4g} to {high:.4g}"


def setting_search(
    of_fig4: int = WORKERS, of_fig8: tuple[int, int] = (0, 0)
) -> SettingSearch:
    """Return which statements of `stated` hold in which settings of the default grid.

    Parameters
    ----------
    of_fig4 : int, optional
        The number of workers of Fig 4a, which is not stated.
    of_fig8 : (int, int), optional
        The buffers in bytes of Fig 8, for VGG-16 and for VGG-16 with replaced layers.
        They are not stated either. 0 is no fusion.
    """
    # The cached function gets all arguments by position, so that each combination is one entry
    # of its cache.
    return _setting_search(of_fig4, of_fig8)


@lru_cache(maxsize=4)
def _setting_search(of_fig4: int, of_fig8: tuple[int, int]) -> SettingSearch:
    """Return the search of `setting_search`, which is cached."""
    grid = Grid()
    return settle(stated(), grid, quantities(grid, of_fig4, of_fig8))


@lru_cache(maxsize=1)
def compatible() -> tuple[PaperSetting, ...]:
    """Return every compatible setting, the best compromise first.

    A compatible setting agrees with ANCHOR, and with as many other statements as any setting
    that agrees with ANCHOR. The best compromise misses the remaining statements by the least.
    """
    search = setting_search()
    is_compatible = search.most(ANCHOR)
    # By the sum of the distances from all statements. Ties stay in the order of the grid.
    order = np.argsort(search.miss[is_compatible], kind="stable")
    places = np.argwhere(is_compatible)[order]
    return tuple(search.grid.setting(place) for place in places)


def setting() -> PaperSetting:
    """Return the setting of the figures, the best of the compatible ones."""
    return compatible()[0]


def over(
    modelled: Callable[[PaperSetting], pd.DataFrame],
    keys: Sequence[str],
    values: Sequence[str] = ("model",),
    unit: str = "",
) -> pd.DataFrame:
    """Return a figure's numbers at the best setting, with ranges over compatible settings.

    Parameters
    ----------
    modelled : callable
        Takes a setting, and returns the table of the figure's numbers at this setting.
    keys : sequence of str
        The columns of this table whose values together name a row.
    values : sequence of str, optional
        The columns whose range is returned.
    unit : {"", "tensor", "layer"}, optional
        If given, only settings count in which an unfused message carries this unit.

    Returns
    -------
    DataFrame
        The table at the best of these settings. For each of ``values`` there are two more
        columns, with the endings ``_low`` and ``_high``: its range over these settings.
    """
    # The best setting comes first. Those of one unit stay in this order.
    settings = list(compatible())
    if unit:
        settings = [setting for setting in settings if setting.unit == unit]
    of_all_settings = pd.concat([modelled(setting) for setting in settings])
    # Each group has one row of the figure's table, once for each setting.
    by_row = of_all_settings.groupby(list(keys), sort=False)[list(values)]
    low = by_row.min().add_suffix("_low")
    high = by_row.max().add_suffix("_high")
    return modelled(settings[0]).join(low, on=list(keys)).join(high, on=list(keys))


# -- claims judged by the settings ---------------------------------------------------


def by_model(
    quantity: str, scale: float = 1, offset: float = 0, note: str = ""
) -> Result:
    """Return a result that is judged by the settings which meet the other statements.

    Parameters
    ----------
    quantity : str
        The name of the quantity that the claim is about, one of `quantities`.
    scale, offset : float, optional
        The number of the claim is ``offset + scale * quantity``.
    note : str, optional
        A remark on the quantity.

    Returns
    -------
    Result
        The values of the quantity in the settings that meet the most statements, apart from
        the one about this quantity.
    """
    return claims.by_model(setting_search(), quantity, scale, offset, note)


def by_readings(
    readings: Mapping[str, Any], quantity: str, scale: float = 1, offset: float = 0
) -> Result:
    """Return a result on which all of several readings of the paper must agree.

    Parameters
    ----------
    readings : mapping of str to tuple
        By reading in words, the positional arguments of `setting_search`: the workers of
        Fig 4a and, if needed, the buffers of Fig 8.
    quantity : str
        The name of the quantity that the claim is about, one of `quantities`.
    scale, offset : float, optional
        The number of the claim is ``offset + scale * quantity``.

    Returns
    -------
    Result
        The values under all readings, each judged as by `by_model`. The claim is undecided
        if the readings disagree.
    """
    results = {}
    for reading, arguments in readings.items():
        search = setting_search(*arguments)
        results[reading] = claims.by_model(search, quantity, scale, offset)
    return claims.by_readings(results)
