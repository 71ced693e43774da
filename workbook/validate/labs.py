"""How far a measured cost reaches: between its sizes, and in other labs.

A lab is a link and a number of ranks. Each lab is left out in turn and predicted from
the others. The rules were stated before anything was computed (2026-11-22). The truth
are the medians of the sizes of a lab. What decides the time of a message is read from
the time of its bytes, at the rate of the link less framing, against the median of the
smallest size. The start-up decides if the bytes take less than half of that median, the
bytes decide if they take more than twice as long, and between these is the knee. A lab
is well predicted if the median of the absolute errors of all sizes is at most 3%.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ddlkit.core.lab_links import FRAMING_BYTES, read_link, wire_s_per_byte
from workbook.validate.rings import GlooRing, RingLab, held_out_rings, ring_labs

WELL = 0.03
"""The largest median of the absolute errors of a lab that counts as well predicted."""
ECHO_BYTES = 28 + FRAMING_BYTES
"""Bytes around the payload of an echo: the headers of IP and ICMP, and the framing."""


def waking(echoes: pd.DataFrame) -> float:
    """Return how many seconds a round trip takes longer for each second of a link's delay.

    Ranks sleep while a link delays a message, and wake the later the longer they slept.

    Parameters
    ----------
    echoes : DataFrame
        Measured round trips over the links of labs (``link``): a payload of ``bytes`` and
        its echo take ``seconds``.

    Returns
    -------
    float
        The slope of a straight line through all links with a delay. Each link is a point: x is
        its delay, and y is what is left of the seconds of an echo without its four delays and
        the time of its bytes. The part of y that is equal on all links is the intercept.
    """
    # Only echoes that are sent one at a time.
    single = echoes[(echoes["operation"] == "echo") & (echoes["at_once"] == 1)]
    medians = single.groupby(["link", "ranks"])[["seconds", "bytes"]].median()
    medians = medians.reset_index()
    links = medians["link"].map(read_link)
    delay_s = links.map(lambda link: link.delay_s)
    rate_bits_per_s = links.map(lambda link: link.rate_bits_per_s)
    # On its way, and again on its way back, an echo passes the links of both ranks. Each of the
    # four passages takes a delay, and the time of the payload and of the ECHO_BYTES around it
    # (headers and framing), of 8 bits each.
    bytes_s = 8 * 4 * (medians["bytes"] + ECHO_BYTES) / rate_bits_per_s
    beyond_s = medians["seconds"] - 4 * delay_s - bytes_s
    has_delay = delay_s > 0
    slope, _ = np.polyfit(delay_s[has_delay], beyond_s[has_delay], 1)
    return float(slope)


def held_out(collectives: pd.DataFrame, cores: int, wake_up: float) -> pd.DataFrame:
    """Predict each lab from all other labs of its kind.

    Parameters
    ----------
    collectives : DataFrame
        Measured collectives of all labs.
    cores : int
        The number of cores of the machine. The software of a rank is expected to take one
        of them. Only the predictions of links without a delay depend on this number, because
        ranks that sleep during a delay leave the cores to others.
    wake_up : float
        The slope that `waking` returns: how many seconds longer a round trip takes for each
        second of a link's delay, because ranks that sleep must wake. Only the predictions of
        links with a delay depend on it.

    Returns
    -------
    DataFrame
        One row for each lab and size. The columns are ``kind`` (of the link), ``link``,
        ``ranks``, ``decides`` (what decides the time of a message: its "start-up", its
        "bytes", or both, "knee"), ``bytes``, ``measured_s``, ``predicted_s`` and
        ``error``, which is relative.
    """
    all_labs = ring_labs(collectives)
    tables = []
    # Links without a delay are limited by a token bucket (tbf). Links with a delay are emulated by
    # a process.
    for kind, wake_up_of_kind in (("tbf", None), ("emulated", wake_up)):
        has_delay = wake_up_of_kind is not None
        labs = [lab for lab in all_labs if lab.kind == (kind, has_delay)]
        rings = held_out_rings(labs, cores, wake_up_of_kind)
        # A single lab has no others, so that there are no rings, and the loop makes no row.
        for lab, ring in zip(labs, rings, strict=False):
            tables.append(_errors(kind, lab, ring))
    return pd.concat(tables, ignore_index=True)


def _errors(kind: str, lab: RingLab, ring: GlooRing) -> pd.DataFrame:
    """Return the rows of one lab in the table of `held_out`, one for each size.

    ``kind`` is that of the link, and ``ring`` predicts the lab from all others.
    """
    predicted_s = ring(lab.bytes)
    return pd.DataFrame(
        {
            "kind": kind,
            "link": lab.link,
            "ranks": lab.workers,
            # Whether the start-up or the bytes decide the time of a message of this size.
            "decides": _what_decides(lab),
            "bytes": lab.bytes,
            "measured_s": lab.seconds,
            "predicted_s": predicted_s,
            "error": predicted_s / lab.seconds - 1,
        }
    )


def _what_decides(lab: RingLab) -> NDArray[np.str_]:
    """Return what decides the time of a message of each size of a lab, shape (n,).

    The "start-up" or the "bytes" decide if they take more than twice as long as the other.
    Otherwise both do ("knee").
    """
    # Sizes ascend, and the smallest message is nearly all start-up.
    smallest_s = lab.seconds[0]
    # The rate that the name of the link states, and the share of it that framing leaves. The time
    # of the bytes follows from these, and not from measured times.
    link = lab.named
    s_per_byte = wire_s_per_byte(
        "all_reduce", lab.workers, link.rate_bits_per_s, link.framing
    )
    bytes_s = lab.bytes * s_per_byte
    conditions = [bytes_s < smallest_s / 2, bytes_s > 2 * smallest_s]
    return np.select(conditions, ["start-up", "bytes"], "knee")
