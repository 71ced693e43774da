"""osf Figure 5: communication time by phase and number of workers."""

from __future__ import annotations

from functools import cache

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from workbook.common import claims
from workbook.common.claims import Result, check, claimed
from workbook.osf import phases, settings
from workbook.osf.cluster import TWO, WORKERS, PaperSetting
from workbook.osf.frames import printed_at, rows_of
from workbook.osf.lab import LAB, PLACES, STRETCHED, Lab, buffer_name, graded

WORKER_COUNTS = (2, 4, 8, 16, 32)


def modelled(setting: PaperSetting, slow_rank: float) -> pd.DataFrame:
    """Return the communication time by phase and number of workers, without fusion.

    Parameters
    ----------
    setting : PaperSetting
        The setting of the cluster.
    slow_rank : float
        By which factor the slowest worker computes longer in the cases that have one.
        In all other cases the workers are equally fast.

    Returns
    -------
    DataFrame
        A row for each network, number of workers, factor of the ``slowest`` worker and
        phase. `phases.shares` gives the ``seconds`` of the phase, and ``model``, its share
        of all communication. ``paper`` is the same share where the paper prints it, which
        is for ALLREDUCE on ResNet-101 with 32 workers that are equally fast. A share is 0.1
        for 10%.
    """

    def seconds(network: str, workers: int, slowest: float) -> dict[str, float]:
        return phases.modelled(setting, network, slowest, workers)

    cases = {"network": TWO, "workers": WORKER_COUNTS, "slowest": (1.0, slow_rank)}
    frame = phases.shares(seconds, cases)
    # The claim is in %. The column is NaN in all rows but those with these values.
    printed = printed_at(
        frame,
        claimed("osf-fig05-allreduce") / 100,
        network="ResNet101",
        workers=WORKERS,
        slowest=1.0,
        phase="ALLREDUCE",
    )
    return frame.assign(paper=printed)


def numbers(slow_rank: float) -> pd.DataFrame:
    """Return the communication time by phase on the cluster (modelled) and in the lab.

    Parameters
    ----------
    slow_rank : float
        By which factor the slowest worker computes longer in the modelled cases that have
        one.

    Returns
    -------
    DataFrame
        The rows of `modelled` in the best setting, and then those of `phases.in_lab`
        without a buffer. The column ``grade``, which is "model" or "lab", tells them
        apart.
    """
    model = modelled(settings.setting(), slow_rank)
    # A buffer of 0 bytes is no fusion.
    without_buffer = rows_of(phases.in_lab(Lab.load(LAB)), buffer_bytes=0)
    return graded(model, without_buffer)


def draw(frame: pd.DataFrame) -> Figure:
    """Draw the share of each phase in the communication time, in three rows of panels.

    From top to bottom, these are the cluster with workers that are equally fast, the cluster
    with a slower worker, and the lab, modelled and measured.

    Parameters
    ----------
    frame : DataFrame
        What `numbers` returned.
    """
    is_lab = frame["grade"] == "lab"
    is_slow = frame["slowest"] > 1
    # PLACES has the headings of panels. Its key "" is the cluster, and "measured" is the link of
    # the campaign LAB.
    on_cluster = PLACES[""] + np.where(is_slow, ", one slower", ", equal workers")
    place = np.where(is_lab, PLACES["measured"], on_cluster)
    # All cases of a network in the lab share a panel, so that the name of a bar says which of
    # them have a slower worker.
    bar = frame["workers"].astype(str) + np.where(is_lab & is_slow, " slow", "")
    # Panels and bars are drawn in the order of the rows. In descending order, the grade
    # "model" comes before "lab".
    named = frame.assign(place=place, bar=bar).sort_values(
        ["grade", "slowest", "workers"], ascending=[False, True, True]
    )
    # Two workers of which one is slower, on the cluster and in the lab, for both networks.
    two_slow = rows_of(frame[is_slow], phase="NEGOTIATE", workers=2)
    title = (
        "By the model, if one of two workers is slower, NEGOTIATE takes up to "
        f"{two_slow['model'].max():.0%} of the communication time"
    )
    return phases.draw(named, "workers", "share of communication [%]", title)


# -- claims --------------------------------------------------------------------------


def _shares_in_lab(phase: str, first: str) -> pd.Series:
    """Return the measured share of a phase in the lab's cases with equally fast workers.

    Parameters
    ----------
    phase : str
        The phase whose share of the communication time is returned.
    first : {"ALLREDUCE", "NEGOTIATE"}
        The phase that counts where phases overlap. The paper does not say which one
        counts.

    Returns
    -------
    Series
        The shares, 0.1 for 10%, by number of workers, size of the buffer in bytes (0 is no
        buffer), and network.
    """
    # ``slowest`` is the factor by which the slowest worker computes longer. It is 1 if all
    # workers are equally fast.
    rows = rows_of(_phases_in_lab(first), slowest=1, phase=phase)
    return rows.set_index(["workers", "buffer_bytes", "network"])["measured"]


@cache
def _phases_in_lab(first: str) -> pd.DataFrame:
    """Return `phases.in_lab` of the campaign LAB, where the phase ``first`` counts first.

    The table is cached, because all claims about it share it.
    """
    return phases.in_lab(Lab.load(), first=first)


def _vgg16_over_resnet101(shares: pd.Series) -> pd.Series:
    """Return the share of VGG-16 divided by that of ResNet-101, if both were recorded."""
    by_network = shares.unstack("network")
    return (by_network["VGG16"] / by_network["ResNet101"]).dropna()


@check("osf-fig05-vgg16")
def _allreduce_of_vgg16() -> Result:
    """Return the share of ALLREDUCE of VGG-16, divided by that of ResNet-101, in all pairs.

    A pair is a case of each network with the same number of workers and the same buffer. The
    paper does not say which phase counts where ALLREDUCE and NEGOTIATE overlap, so that each
    pair has two ratios: one if ALLREDUCE counts, and one if NEGOTIATE counts.
    """
    # Both are shares of ALLREDUCE. ``first`` is the phase that counts where phases overlap.
    allreduce_first = _shares_in_lab("ALLREDUCE", first="ALLREDUCE")
    negotiate_first = _shares_in_lab("ALLREDUCE", first="NEGOTIATE")
    ratios = _vgg16_over_resnet101(allreduce_first)
    other_ratios = _vgg16_over_resnet101(negotiate_first)

    pairs = []
    for (workers, buffer_bytes), ratio in ratios.items():
        pairs.append(f"{ratio:.5g} ({workers}, {buffer_name(buffer_bytes)})")
    # The shares of both networks in the pair with the least ratio.
    least_pair = allreduce_first.unstack("network").loc[ratios.idxmin()]
    # The note says that both shares are above a bound, which is printed in % with two decimals.
    # Half of the last digit, 0.005%, is subtracted, because rounding may raise a number by this
    # much. The printed bound is thus never above the lower share.
    lower_bound = least_pair.min() - 5e-5
    note = (
        "all negotiated pairs (equal workers, buffer), ALLREDUCE first: "
        f"{', '.join(pairs)}; both above {lower_bound:.2%} in the least; "
        f"NEGOTIATE first {other_ratios.min():.3g} or more; {STRETCHED}"
    )
    # Both lists of ratios are of the same four pairs, which are the n of the result.
    return claims.measured([*ratios, *other_ratios], note, "replayed", n=4)


@check("osf-fig05-negotiate")
def _negotiation() -> Result:
    """Return the share of NEGOTIATE in %, in all cases with equally fast workers.

    The paper does not say which phase counts where NEGOTIATE and ALLREDUCE overlap. By one
    reading it is ALLREDUCE, and by the other NEGOTIATE.
    """
    # Both are shares of NEGOTIATE. ``first`` is the phase that counts where phases overlap.
    allreduce_first = 100 * _shares_in_lab("NEGOTIATE", first="ALLREDUCE")
    negotiate_first = 100 * _shares_in_lab("NEGOTIATE", first="NEGOTIATE")
    ranges = []
    for network, percent in negotiate_first.groupby("network"):
        ranges.append(f"{network} {percent.min():.2g} to {percent.max():.3g}")
    note = (
        f"ALLREDUCE first, at most {allreduce_first.max():.3g}; NEGOTIATE first, "
        f"{', '.join(ranges)}; 2 to 8 equal workers, VGG-16 up to 4, buffers from none "
        f"to 1 GB, {STRETCHED}"
    )
    by_first = {
        "ALLREDUCE first": claims.measured(allreduce_first, "", "replayed"),
        "NEGOTIATE first": claims.measured(negotiate_first, "", "replayed"),
    }
    return claims.by_readings(by_first, note)
