"""A law for gloo's ring all-reduce over links with a delay.

The law is fitted to all labs of a machine together, and predicts other labs.

It was read in gloo's source (allreduce.cc and tcp/pair.cc, of 2025) and confirmed by
measured times. Each step of the ring is cut into segments, at least two, of at most
1 MiB. Two segments are under way at once. A rank starts a segment when both of the
segment before the last one are done. It then tells its neighbour that it is ready, and
sends as soon as its other neighbour is ready. A small message therefore pays one round
trip r for each pair of segments.

If the bytes of a segment take x seconds, a pair of segments takes T seconds, of which
the link is busy for 2x. Ranks are not in step, so that the notice of readiness may
reach the link at any time of these. Then the link is free, on average, x seconds later:

    T = r + x + (2x / T) x    or    T = ((r + x) + sqrt((r + x)^2 + 8 x^2)) / 2
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from ddlkit.core.lab_links import LinkConditions, read_link
from ddlkit.core.workload import Floats, Ints
from ddlkit.model.calibration import undisturbed

EQUAL = re.compile(r"lab:[\w.]+bit|emulated:[\w.]+bit-delay[\d.]+ms(-burst[\d.]+ms)?")
"""Names of labs whose links are all equal."""
SCATTER = 0.03
"""The relative error of a lab's median, which weighs measurements against priors."""
SEGMENT_BYTES = 2**20
"""The largest size of a segment."""
UNDER_WAY = 2
"""How many segments are sent at once. A step has at least so many."""


@dataclass(frozen=True)
class GlooRing:
    """The time of gloo's all-reduce, as a function of the bytes of a message.

    All fields can be arrays.

    Attributes
    ----------
    software_s : float or ndarray
        Seconds of software in a round trip, if each rank has a core. With too few cores
        it takes ``workers * core_share`` times as long.
    link_s_per_byte, delay_s, burst_s : float or ndarray
        The time of a byte, the delay, and the seconds of bytes that a burst lets pass,
        of each link. A round trip passes four delays.
    workers : int or ndarray
        The number of ranks.
    core_share : float or ndarray
        The share of all cores that the software of one rank takes while it runs. With 0,
        ranks never wait for a core.

    Examples
    --------
    >>> ring = GlooRing(1e-4, 8e-9, workers=4)
    >>> round(ring(8), 6), round(GlooRing(1e-4, 8e-9, workers=4, delay_s=1e-3)(8), 6)
    (0.0006, 0.0246)
    """

    software_s: float | Floats
    link_s_per_byte: float | Floats
    workers: int | Ints
    delay_s: float | Floats = 0.0
    burst_s: float | Floats = 0.0
    core_share: float | Floats = 0.0

    def __call__(self, n_bytes: ArrayLike) -> Any:
        """Return the seconds of an all-reduce, a float for a single size.

        An all-reduce has two halves, which take equally long: the ranks add their
        parts, and then they pass the sums on. Each half has a step fewer than there are
        ranks. A step sends one part of the message, which is cut into segments.
        """
        sizes = np.asarray(n_bytes, float)
        ranks = self.workers
        # The segments of the whole message. gloo keeps two of them (UNDER_WAY) under way at once,
        # so that each of the parts, one for each rank, has at least two.
        least_segments = UNDER_WAY * ranks
        all_segments = np.maximum(np.ceil(sizes / SEGMENT_BYTES), least_segments)
        segments_per_step = np.ceil(all_segments / ranks)
        segment_s = sizes / (segments_per_step * ranks) * self.link_s_per_byte
        round_trip_s = self._round_trip_s

        # The segments that a rank sends in one half, two at once.
        segments = (ranks - 1) * segments_per_step
        pairs = np.ceil(segments / 2)
        # Each pair but the last takes a round trip, the bytes of one segment, and a mean wait for
        # the busy link.
        pair_s = _pair_s(round_trip_s, segment_s)
        # The last pair, which may have a single segment, takes a round trip and the bytes of
        # its segments.
        last_segments = np.where(segments % 2, 1, 2)
        pairs_s = (pairs - 1) * pair_s + round_trip_s + segment_s * last_segments
        # In each pair the link rests once, while the segments wait for a round trip. Meanwhile a
        # token bucket saves up a burst of bytes, which later pass at once and save ``burst_s``.
        with_bursts_s = pairs_s - pairs * self.burst_s
        # However much bursts save, a half is never shorter than all of its bytes at the rate of
        # the link, or than all of its round trips.
        least_s = np.maximum(segments * segment_s, pairs * round_trip_s)
        # Both halves.
        seconds = 2 * np.maximum(least_s, with_bursts_s)
        if np.ndim(seconds) == 0:
            return float(seconds)
        return seconds

    @property
    def _round_trip_s(self) -> Any:
        """Return the seconds of a round trip without any bytes of the message."""
        # Software takes longer if all ranks together need more than all cores.
        waiting_for_cores = np.maximum(1.0, self.workers * self.core_share)
        return 4 * self.delay_s + self.software_s * waiting_for_cores


def _pair_s(round_trip_s: Any, segment_s: Any) -> Any:
    """Return the seconds that a ring takes for two segments, which are under way at once.

    Each of the two takes T seconds, at the same time as the other. With the seconds r of a round
    trip and x of the bytes of a segment, which may be arrays,

        T = r + x + (2x / T) x    or    T^2 - (r + x) T - 2 x^2 = 0.

    A segment is sent once its receiver has sent notice that it is ready. The last term of T is
    the mean wait of this notice for its link, which is busy with two segments, one after the
    other, for 2x of the T seconds. Ranks are not in step, so that the notice may come at any time
    of the T seconds. It finds the link busy with the probability 2x / T, and then waits for half
    of the 2x seconds on average.
    """
    first_s = round_trip_s + segment_s
    return (first_s + np.sqrt(first_s**2 + 8 * segment_s**2)) / 2


class RingLab(NamedTuple):
    """The calibration of one lab.

    Attributes
    ----------
    link : str
        The name of the link.
    workers : int
        The number of ranks.
    bytes, seconds : ndarray, shape (n,)
        Sizes of messages, and the median time of each.
    """

    link: str
    workers: int
    bytes: Floats
    seconds: Floats

    @property
    def named(self) -> LinkConditions:
        """Return the rate and the delay that the name of the link says."""
        return read_link(self.link)

    @property
    def kind(self) -> tuple[str, bool]:
        """Return what emulates the link, and whether the link has a delay."""
        return self.named.engine, self.named.delay_s > 0


def ring_labs(rows: pd.DataFrame) -> list[RingLab]:
    """Return the labs in which gloo's own all-reduce was timed, by link and number of ranks.

    Parameters
    ----------
    rows : DataFrame
        A table of measured collectives. Only labs with equal links and one message in
        flight count. Samples that other programs disturbed are left out.
    """
    # gloo's own algorithm is "ring". One whose steps our own code sent has a longer name, which
    # begins with "steps:".
    rows = rows.query(
        "collective == 'all_reduce' and algorithm == 'ring' and in_flight == 1"
    )
    # The names of labs whose links are all equal match EQUAL.
    rows = undisturbed(rows[rows["link"].str.fullmatch(EQUAL)])
    labs = []
    for (link, ranks), lab in rows.groupby(["link", "ranks"]):
        # The sizes ascend, because `groupby` sorts them.
        medians = lab.groupby("bytes")["seconds"].median()
        sizes = medians.index.to_numpy(float)
        labs.append(RingLab(str(link), int(ranks), sizes, medians.to_numpy()))
    return labs


class _Samples(NamedTuple):
    """The medians of all labs, one row each, with what is known of the link of each row.

    Every field is an ndarray of shape (n,). ``weights`` let each lab count alike,
    however many sizes it has.
    """

    bytes: Floats
    seconds: Floats
    weights: Floats
    link_s_per_byte: Floats
    workers: Ints
    delay_s: Floats
    burst_s: Floats


def _samples(labs: Sequence[RingLab], waking: float | None) -> _Samples:
    """Return the medians of all labs in one table, whose rows follow the labs and their sizes.

    ``waking`` is how many seconds longer a round trip takes for each second of a link's
    delay, because ranks sleep during the delay and must wake, or None if ranks do not sleep.
    """
    # The number of rows of each lab.
    counts = [lab.bytes.size for lab in labs]
    sizes = np.concatenate([lab.bytes for lab in labs])
    # Errors are squared after they are weighted. With these weights, the squares of a lab's
    # weights add up to the same sum for every lab, and the mean square of all weights is 1.
    lab_weights = np.repeat([count**-0.5 for count in counts], counts)
    mean_count = sizes.size / len(labs)
    # What is known of each link is read off rings before the fit. `ring_of` takes logarithms of
    # three constants, here 0. Of these constants, only the factor on the time of a byte matters
    # to the four fields that are read, and it is 1 here.
    unfitted = np.zeros(3)
    rings = [ring_of(unfitted, lab.named, lab.workers, waking) for lab in labs]
    return _Samples(
        bytes=sizes,
        seconds=np.concatenate([lab.seconds for lab in labs]),
        weights=lab_weights * np.sqrt(mean_count),
        link_s_per_byte=np.repeat([ring.link_s_per_byte for ring in rings], counts),
        workers=np.repeat([ring.workers for ring in rings], counts),
        delay_s=np.repeat([ring.delay_s for ring in rings], counts),
        burst_s=np.repeat([ring.burst_s for ring in rings], counts),
    )


def _residuals(
    values: Floats, samples: _Samples, log_share_prior: float, waits_for_cores: bool
) -> Floats:
    """Return the residuals whose squares the fit makes small.

    Parameters
    ----------
    values : ndarray, shape (..., 3)
        Logarithms of the three constants, as `fit_rings` returns them.
    samples : _Samples
        The n medians of all labs.
    log_share_prior : float
        The expected logarithm of the share of all cores that the software of one rank takes.
    waits_for_cores : bool
        Whether the software of ranks waits for cores.

    Returns
    -------
    ndarray, shape (..., n + 1)
        Weighted logarithmic errors divided by SCATTER, and last the distance of the logarithm
        of the share from its prior. The prior is needed because labs with the same number of
        ranks do not determine the share. A share that differs from the prior by a factor e
        counts as much as one error of SCATTER.
    """
    # One array for each constant, of shape (..., 1), which broadcasts over the n medians.
    by_constant = np.moveaxis(np.exp(values), -1, 0)
    software_s, byte_factor, share = by_constant[..., None]
    ring = GlooRing(
        software_s=software_s,
        link_s_per_byte=byte_factor * samples.link_s_per_byte,
        workers=samples.workers,
        delay_s=samples.delay_s,
        burst_s=samples.burst_s,
        # With a share of 0, no software waits for a core.
        core_share=share * waits_for_cores,
    )
    log_errors = np.log(ring(samples.bytes) / samples.seconds)
    weighted = log_errors * samples.weights / SCATTER
    # The last of the three values, with its axis kept.
    log_share = values[..., 2:]
    return np.concatenate([weighted, log_share - log_share_prior], axis=-1)


def fit_rings(
    labs: Sequence[RingLab], cores: int, waking: float | None = None
) -> Floats:
    """Fit the three constants of the law for gloo's all-reduce to several labs together.

    Parameters
    ----------
    labs : sequence of RingLab
        The labs, of which each counts alike.
    cores : int
        The number of cores of the machine.
    waking : float, optional
        How many seconds longer a round trip takes for each second of the delay of a link,
        because ranks sleep while a message is delayed, and wake the later the longer they
        slept. Ranks that sleep leave the cores to others, so that no software waits for a
        core. By default ranks neither sleep nor wake, and their software waits for cores.

    Returns
    -------
    ndarray, shape (3,)
        Logarithms of the seconds of software in a round trip, of the factor by which bytes
        take longer than at the rate of the link, and of the share of all cores that the
        software of one rank takes.
    """
    from scipy.optimize import least_squares

    samples = _samples(labs, waking)
    # The software of one rank is expected to take one core.
    log_share_prior = -np.log(cores)

    def residuals(values: Floats) -> Floats:
        """Return what the fit makes small, shape (..., n + 1).

        There is an error for the median time of each size of each lab, n in all, and one for
        the prior of the share.
        """
        return _residuals(values, samples, log_share_prior, waking is None)

    # The fit only starts from this value, so that the first lab stands for all.
    log_software = _log_software(labs[0])
    # The bounds of the three logarithms, which are choices.
    least = np.array(
        (
            -20.0,  # 2 ns of software in a round trip
            -0.5,  # bytes that are faster than the rate of the link by the factor e^0.5
            -6.0,  # a rank that takes 1/400 of all cores
        )
    )
    most = np.array(
        (
            0.0,  # 1 s of software in a round trip
            0.5,  # bytes that are slower than the rate of the link by the factor e^0.5
            0.0,  # a rank that takes all cores
        )
    )
    fits = []
    # The law has a bend at the share of cores from which ranks wait for cores. The fit starts
    # from the share of the prior and from an eighth of it, to try both sides of the bend.
    for log_share in (log_share_prior, log_share_prior - np.log(8)):
        # The middle constant is the factor on the time of bytes, at first 1.
        start = np.array((log_software, 0.0, log_share))
        # With many cores, an eighth of the prior is below the least share.
        start = np.clip(start, least, most)
        fit = least_squares(
            residuals,
            start,
            partial(_central_differences, residuals),
            bounds=(least, most),
            # Large errors count less than by their squares.
            loss="soft_l1",
        )
        fits.append(fit)
    # The attribute cost is what the fit makes small, and x are the values.
    return np.asarray(min(fits, key=lambda fit: fit.cost).x)


def _central_differences(
    function: Callable[[Floats], Floats], values: Floats
) -> Floats:
    """Return the derivatives of the n residuals by three logarithms, shape (n, 3).

    ``values``, shape (3,), are the logarithms of the constants of the law. ``function`` returns
    their residuals. For values of shape (3, 3), it returns a row of residuals for each row.
    """
    # Added to a logarithm, this changes each constant by the same small share, whatever its unit.
    step = 1e-5
    # Each row changes one constant alone.
    changes = step * np.eye(3)
    differences = function(values + changes) - function(values - changes)
    return np.asarray(differences.T / (2 * step))


def _log_software(lab: RingLab) -> float:
    """Return the logarithm of the seconds of software in a round trip, estimated from a lab.

    The estimate takes the smallest message of the lab to be nothing but a round trip for each
    step of the ring. A round trip is its software and four delays, because it passes the links
    of both ranks, there and back.
    """
    steps = 2 * (lab.workers - 1)
    # The sizes of a lab ascend, so that the first time is that of the smallest.
    round_trip_s = float(lab.seconds[0]) / steps
    software_s = round_trip_s - 4 * lab.named.delay_s
    # The delays alone may be longer than the measured time. The least value, a choice, keeps
    # the logarithm finite.
    return float(np.log(max(2e-5, software_s)))


def ring_of(
    values: Floats, named: LinkConditions, workers: int, waking: float | None = None
) -> GlooRing:
    """Return the law for the all-reduce of one lab.

    Parameters
    ----------
    values : ndarray, shape (3,)
        Logarithms of the constants, as `fit_rings` returns them.
    named : LinkConditions
        The rate, the delay and the burst that the name of the link states.
    workers : int
        The number of ranks.
    waking : float, optional
        As for `fit_rings`: how many seconds longer a round trip takes for each second of the
        delay of a link, because ranks sleep during the delay and must wake. While they sleep
        they leave the cores to others, so that none waits for a core. By default ranks do not
        sleep, and wait for cores.
    """
    # The seconds of software in a round trip, the factor by which a byte takes longer than the
    # rate of the link says, and the share of all cores that the software of one rank takes.
    software_s, byte_factor, share = np.exp(values).tolist()
    # A round trip passes the links of both ranks, there and back, and so has four delays of a
    # link. Waking lengthens the round trip by ``waking`` times one delay, of which each of the
    # four delays gets a quarter.
    waking_per_delay = (waking or 0.0) / 4
    return GlooRing(
        software_s=software_s,
        # 8 bits a byte. Framing is the share of the rate that is left for bytes of messages.
        link_s_per_byte=byte_factor * 8 / (named.rate_bits_per_s * named.framing),
        workers=workers,
        delay_s=named.delay_s * (1 + waking_per_delay),
        burst_s=named.burst_s,
        # If ranks sleep, no software waits for a core.
        core_share=share if waking is None else 0.0,
    )


def held_out_rings(
    labs: Sequence[RingLab], cores: int, waking: float | None = None
) -> list[GlooRing]:
    """Return the law for the all-reduce of each lab, as fitted to all other labs.

    Parameters
    ----------
    labs : sequence of RingLab
        The labs. A single lab has no others, so that the list is empty.
    cores : int
        The number of cores of the machine.
    waking : float, optional
        As for `fit_rings`: how many seconds longer a round trip takes for each second of the
        delay of a link, because ranks sleep during the delay and must wake. By default ranks
        do not sleep, and no time of waking is added.
    """
    if len(labs) < 2:
        return []
    rings = []
    for lab in labs:
        others = [other for other in labs if other is not lab]
        values = fit_rings(others, cores, waking)
        rings.append(ring_of(values, lab.named, lab.workers, waking))
    return rings
