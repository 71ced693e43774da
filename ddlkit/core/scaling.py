"""How the step of data-parallel training grows with the number of nodes.

The laws here extrapolate measured times to more nodes. They need no model of the network. A step is
predicted from one step on few nodes and one on more, and a collective from its table on some number
of nodes. Weak scaling is assumed, so each GPU computes the same number of samples on any number of
nodes. The evidence for each law stands in its docstring. It was public data, and the laws were
chosen with these data in sight.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike

from ddlkit.core.collective import find_collective
from ddlkit.core.workload import Floats

GROWTH = 0.5
"""What nodes add to the square of a step grows as this power of their number (`step_s`)."""
LEAST_LOSS = 0.01
"""A loss below this share of a step is not known, so the upper limit assumes it."""
LOSS_SHARE = 0.20
"""The share of its predicted loss by which a step may differ, at the anchor itself.

Each doubling of the nodes adds as much to it."""
STEP_SHARE = 0.05
"""The share of a step by which the step may differ, whatever its loss is."""
NOMINAL = 0.90
"""The share of steps that the interval should contain."""
MOST_TIMES = 10.0
"""The most times the largest measured number of nodes for which a step is predicted."""
MOST_TIMES_OF_COLLECTIVE = {
    "all_reduce": 16.0,
    "all_gather": 4.0,
    "reduce_scatter": 4.0,
}
"""The most times the nodes of a table for which each collective is predicted."""
MOST_TIMES_OF_SIZE = 4.0
"""The most times the largest size of a table up to which its times are continued.

They are continued along the line through the two largest sizes. The all-reduces of Perlmutter and
of ABCI were cut at each size of 4 MiB or more. At 4 times this size, the line then errs by 7%, 7%
and 10% (medians). At 8 times it errs by up to 11%. Where tables were cut at smaller sizes too, it
errs by 10 to 13% at 4 times, and by up to 61% at 8 times.
"""

QUIET_NODES = 32
"""Up to this many nodes the factor of a bad day is the smaller one of `bad_day_factor`."""


# -- steps ---------------------------------------------------------------------------


def step_s(smallest_s: ArrayLike, anchor_s: ArrayLike, ratio: ArrayLike) -> Floats:
    """Return the step of a training on more nodes than were measured.

    Parameters
    ----------
    smallest_s : array_like
        The seconds of a step on the smallest measured placement, such as one GPU.
    anchor_s : array_like
        The seconds of a step on the anchor, the largest measured number of GPUs.
    ratio : array_like
        The number of nodes to predict for, divided by the number of nodes of the anchor.

    Returns
    -------
    ndarray
        Seconds, in the broadcast shape of the arguments. At a ratio of 1 this is
        ``anchor_s``, and it never falls as the ratio rises.

    Notes
    -----
    With T1 for ``smallest_s``, Tm for ``anchor_s`` and n/m for the ratio, the law is

        T(n)^2 = T1^2 + (Tm^2 - T1^2) sqrt(n/m).

    As long as the loss T(n) - T1 is a small share of a step, it grows as the square root of n/m.
    The more of the step it is, the more slowly it grows, in the end as the fourth root. A step that
    is mostly loss is mostly the time of messages, which grows slowly with the number of nodes. If
    the anchor shows no loss, the step stays as it is. Nothing is fitted.

    The evidence is eleven sets of public curves:

    * 2 sets: the mean and the median step of a weather model on GH200 GPUs.
    * 2 sets: ResNet-50 on A100 GPUs, and on V100 GPUs.
    * 6 sets: each of six networks of Pollux on T4 GPUs.
    * 1 set: three networks on K80 GPUs.

    Steps were predicted for 2 to 10 times the nodes of an anchor of at least two nodes. The table
    has the medians over the sets of the median error of each set. The first column is for all
    anchors, and the second one for those whose loss is at most 35% of their step:

        law                                          all anchors    small losses
        this law                                        8.6%            6.2%
        the step stays as it is                        10.8%            7.3%
        the loss grows as the root of the nodes         8.9%            6.0%

    The law is not better everywhere. For the weather model's mean step it errs by 7.3%, where
    an unchanged step errs by 5.3%, and for one network of Pollux both err by 15%. The powers were
    chosen with these curves in sight. The optimum is flat: a power of 0.6 in place of the square
    root does about as well.

    Examples
    --------
    >>> step_s(1.0, 1.1, [1, 2, 8]).round(3).tolist()
    [1.1, 1.139, 1.263]
    >>> float(step_s(1.0, 0.99, 8))  # no loss was measured
    0.99
    """
    smallest_squared = np.square(np.asarray(smallest_s, float))
    anchor_squared = np.square(np.asarray(anchor_s, float))
    # The power GROWTH of the law is 1/2, hence the square root in the notes.
    growth = np.power(np.asarray(ratio, float), GROWTH)
    # If the anchor shows no loss, nothing is added that could grow.
    added = np.maximum(anchor_squared - smallest_squared, 0.0)
    # Written as a change of the anchor, so that a ratio of 1 gives it back.
    return np.sqrt(anchor_squared + added * (growth - 1))


def step_interval_s(
    smallest_s: ArrayLike,
    anchor_s: ArrayLike,
    ratio: ArrayLike,
    slowest_s: ArrayLike | None = None,
    jobs_s: tuple[float, float] | None = None,
) -> tuple[Floats, Floats]:
    """Return the interval of a step that `step_s` predicts.

    Parameters
    ----------
    smallest_s : array_like
        The seconds of a step on the smallest measured placement, such as one GPU. The loss of a
        step is how much longer it is than this one.
    anchor_s : array_like
        The seconds of a step on the anchor, the largest measured number of GPUs.
    ratio : array_like
        The number of nodes to predict for, divided by the number of nodes of the anchor.
    slowest_s : array_like, optional
        The seconds of the slowest step that was measured on as many GPUs as the anchor has, or on
        fewer. By default this is the anchor's step.
    jobs_s : pair of float, optional
        The mean steps of the fastest and of the slowest job on the anchor, in seconds. A job is one
        run of the training. If one job alone measured the anchor, the caller estimates both.

    Returns
    -------
    lower_s, upper_s : ndarray
        Seconds, in the broadcast shape of the arguments. The prediction of `step_s` lies between
        them.

    Notes
    -----
    The interval should contain 90% of measured mean steps of a job. By its rule, the loss may
    differ from the predicted loss by a fifth, and by another fifth for each doubling of the nodes.
    Both limits are then moved outwards by 5%.

    The lower limit may fall as the nodes rise, although a step does not, because less is known far
    from the anchor. It may also lie below the anchor's step, because jobs scatter: 24% of the
    steps on which the rule was chosen were shorter than the anchor's. If the lower limit were at
    least the anchor's step less the 3% by which another job may differ, the intervals would
    contain 78% of these steps instead of 91%.

    Fewer GPUs are not slower than more, so a slower step on fewer GPUs casts doubt on the
    anchor. The upper limit then takes that step for the anchor's. It also assumes a loss of at
    least 1% at the anchor, because a smaller one cannot be told from none.

    The interval contains what `step_s` predicts from the anchor's fastest job and from its slowest
    one, so it is never narrower than these jobs are apart.

    docs/studies.md has the criterion by which this rule was chosen. On the sets named in
    `step_s`, such intervals contain 91% of 3,207 steps, and 87 to 100% of the steps of
    each source or network. The rule was chosen with these steps in sight.

    Examples
    --------
    >>> lower_s, upper_s = step_interval_s(1.0, 1.1, 8)
    >>> round(float(lower_s), 3), round(float(upper_s), 3)
    (1.0, 1.546)
    >>> float(step_interval_s(1.0, 1.1, 8, slowest_s=1.2)[1].round(3))
    1.992
    """
    smallest_s = np.asarray(smallest_s, float)
    anchor_s = np.asarray(anchor_s, float)
    predicted_s = step_s(smallest_s, anchor_s, ratio)
    # On fewer nodes than the anchor has, each halving counts as a doubling.
    doublings = np.abs(np.log2(np.asarray(ratio, float)))
    share = LOSS_SHARE * (1 + doublings)
    # A prediction from an anchor that is faster than the smallest placement has no loss.
    loss_s = np.maximum(predicted_s - smallest_s, 0.0)
    # Far from the anchor, the share exceeds 1. For the lower limit it counts as 1, because a loss
    # is at least 0: more nodes make no step shorter than ``smallest_s``.
    lower_s = predicted_s - np.minimum(share, 1.0) * loss_s
    lower_s = (1 - STEP_SHARE) * lower_s

    # For the upper limit, the anchor's step counts as at least the slowest step on no more GPUs,
    # and as at least a step with the smallest loss that can be told from none.
    slow_anchor_s = np.maximum(anchor_s, (1 + LEAST_LOSS) * smallest_s)
    if slowest_s is not None:
        slow_anchor_s = np.maximum(slow_anchor_s, np.asarray(slowest_s, float))
    slow_predicted_s = step_s(smallest_s, slow_anchor_s, ratio)
    upper_s = slow_predicted_s + share * (slow_predicted_s - smallest_s)
    upper_s = (1 + STEP_SHARE) * upper_s
    if jobs_s is not None:
        # The interval is never narrower than the anchor's jobs are apart.
        fastest_job_s, slowest_job_s = jobs_s
        lower_s = np.minimum(lower_s, step_s(smallest_s, fastest_job_s, ratio))
        upper_s = np.maximum(upper_s, step_s(smallest_s, slowest_job_s, ratio))
    return lower_s, upper_s


def interpolated_step_s(
    smaller_s: float,
    larger_s: float,
    smaller: tuple[int, int],
    larger: tuple[int, int],
    target: tuple[int, int],
) -> float:
    """Return the step on a count of GPUs and nodes between two measured counts.

    A count is a pair: a number of GPUs, and a number of nodes.

    Parameters
    ----------
    smaller_s, larger_s : float
        The seconds of a step on the two measured counts.
    smaller, larger : tuple of int
        The numbers of GPUs and of nodes of these counts.
    target : tuple of int
        The numbers of GPUs and of nodes of the count to interpolate. They must satisfy

            smaller nodes <= target nodes <= larger nodes,
            target GPUs <= larger GPUs, and
            smaller GPUs <= target GPUs if smaller nodes = target nodes.

        So a smaller count with fewer nodes than the target may have more GPUs. An example is 16
        GPUs on 1 node for a target of 4 GPUs on 2 nodes.

    Returns
    -------
    float
        Seconds, between the two measured steps.

    Notes
    -----
    By the law of `step_s`, the square of a step is linear in the square root of the nodes. This
    law could not tell apart two counts that differ in their GPUs only. So the geometric mean of
    GPUs and nodes, which grows with either, takes the place of the nodes. The square root of this
    mean is the position of a count.

    Examples
    --------
    >>> round(interpolated_step_s(1.0, 1.1, (4, 1), (64, 16), (16, 4)), 3)
    1.034
    """
    # Both are distances from the position of the smaller count.
    to_target = _position(target) - _position(smaller)
    to_larger = _position(larger) - _position(smaller)
    # If the larger count does not have the larger position, its step is taken.
    weight = 1.0
    if to_larger > 0:
        # If the smaller count has more GPUs, the target may have the smaller position, as in the
        # example in the docstring: 4 * 2 is less than 16 * 1. It then gets the step of the
        # smaller count.
        weight = min(1.0, max(0.0, to_target / to_larger))
    # The square of a step is linear in the position.
    square = smaller_s**2 + weight * (larger_s**2 - smaller_s**2)
    return math.sqrt(square)


def _position(count: tuple[int, int]) -> float:
    """Return where a number of GPUs and of nodes lies on the axis of an interpolation."""
    # The square of a step is linear in the nodes to the power GROWTH. The mean of GPUs and
    # nodes stands for the nodes.
    gpus, nodes = count
    geometric_mean = math.sqrt(gpus * nodes)
    return geometric_mean**GROWTH


def interpolated_interval_s(
    smaller_s: tuple[float, float],
    larger_s: tuple[float, float],
    predicted_s: tuple[float, float],
) -> tuple[float, float]:
    """Return the interval of a step that `interpolated_step_s` returns.

    Parameters
    ----------
    smaller_s, larger_s : pair of float
        The mean steps of the fastest and the slowest job on each of two measured counts of GPUs
        and nodes, in seconds. A job is one run of the training.
    predicted_s : pair of float
        The interval of `step_interval_s` with the larger count as the anchor.

    Returns
    -------
    lower_s, upper_s : float
        Seconds.

    Notes
    -----
    The interval reaches from the fastest job of both counts to the slowest one, because more nodes
    do not shorten a step. It has 5% more on either side, as in `step_interval_s`. If a measured
    step were wrong, this interval could be too narrow, so it is widened until it also contains
    ``predicted_s``.

    On the sets named in `step_s`, each count of several nodes but the largest was left out in turn,
    and interpolated between its neighbours: 84% of 1,027 such steps lie in their interval.

    Examples
    --------
    >>> lower_s, upper_s = interpolated_interval_s((1.0, 1.0), (1.1, 1.2), (0.99, 1.3))
    >>> round(lower_s, 3), round(upper_s, 3)
    (0.95, 1.3)
    """
    lower_s = (1 - STEP_SHARE) * min(*smaller_s, *larger_s)
    upper_s = (1 + STEP_SHARE) * max(*smaller_s, *larger_s)
    predicted_lower_s, predicted_upper_s = predicted_s
    return min(lower_s, predicted_lower_s), max(upper_s, predicted_upper_s)


def _unchanged_s(
    one_s: Floats, anchor_s: Floats, nodes: Floats, anchor_nodes: float
) -> Floats:
    # The product is 0. It gives the result the shape that the other laws give it.
    return anchor_s + 0 * one_s * nodes


def _log2_s(
    one_s: Floats, anchor_s: Floats, nodes: Floats, anchor_nodes: float
) -> Floats:
    # On one node the logarithm is 0, so it is counted from half a node.
    doublings = 1 + np.log2(nodes)
    return one_s + (anchor_s - one_s) * doublings / (1 + np.log2(anchor_nodes))


def _root_s(
    one_s: Floats, anchor_s: Floats, nodes: Floats, anchor_nodes: float
) -> Floats:
    return one_s + (anchor_s - one_s) * np.sqrt(nodes / anchor_nodes)


def _linear_s(
    one_s: Floats, anchor_s: Floats, nodes: Floats, anchor_nodes: float
) -> Floats:
    return one_s + (anchor_s - one_s) * nodes / anchor_nodes


RIVALS: dict[str, Callable[[Floats, Floats, Floats, float], Floats]] = {
    "unchanged": _unchanged_s,
    "log2": _log2_s,
    "root": _root_s,
    "linear": _linear_s,
}
"""Other laws of a step, by name.

Each takes the seconds of a step on one GPU and on the anchor, the numbers of nodes to
predict for, and the number of nodes of the anchor."""


def rival_step_s(
    law: str,
    one_s: ArrayLike,
    anchor_s: ArrayLike,
    nodes: ArrayLike,
    anchor_nodes: float,
) -> Floats:
    """Return a step on more nodes by a law that `step_s` is compared with.

    Parameters
    ----------
    law : {"unchanged", "log2", "root", "linear"}
        How the loss grows with the number of nodes n: not at all, as 1 + log2(n), as the square
        root of n, or as n.
    one_s : array_like
        The seconds of a step on the smallest measured placement, such as one GPU. The loss is how
        much longer a step is than this one.
    anchor_s : array_like
        The seconds of a step on the anchor, the largest measured number of GPUs.
    nodes : array_like
        The numbers of nodes to predict for.
    anchor_nodes : float
        The number of nodes of the anchor.

    Returns
    -------
    ndarray
        Seconds, in the broadcast shape of the arguments.

    Notes
    -----
    With T1 for ``one_s``, Tm for ``anchor_s`` on m nodes, and g for the function of the law,

        T(n) = T1 + (Tm - T1) g(n) / g(m).

    Examples
    --------
    >>> [float(rival_step_s(law, 1.0, 1.1, 16, 4).round(3)) for law in RIVALS]
    [1.1, 1.167, 1.2, 1.4]
    """
    # RIVALS has a function of these four arguments for each law.
    return RIVALS[law](
        np.asarray(one_s, float),
        np.asarray(anchor_s, float),
        np.asarray(nodes, float),
        anchor_nodes,
    )


def expected_maximum_s(steps_s: ArrayLike, ranks: int) -> float:
    """Return the expected step of the slowest rank, if ranks differ by chance alone.

    Parameters
    ----------
    steps_s : array_like, shape (k,)
        The seconds of steps of one rank that waits for nobody.
    ranks : int
        The number of ranks, each of which draws a step at random.

    Returns
    -------
    float
        Seconds. It cannot exceed the longest of the steps, so it is too low if there are many more
        ranks than steps.

    Notes
    -----
    Each of N ``ranks`` draws one of the k steps. The i-th smallest step is the largest one drawn
    with the probability (i/k)^N - ((i-1)/k)^N.

    Examples
    --------
    >>> expected_maximum_s([1.0, 1.0, 2.0, 2.0], ranks=1)
    1.5
    >>> expected_maximum_s([1.0, 1.0, 2.0, 2.0], ranks=2)
    1.75
    """
    sorted_s = np.sort(np.asarray(steps_s, float))
    # These are i/k for i from 0 to k.
    shares_up_to = np.arange(len(sorted_s) + 1) / len(sorted_s)
    probabilities = np.diff(shares_up_to**ranks)
    return float(probabilities @ sorted_s)


# -- collectives ---------------------------------------------------------------------


def all_reduce_s(
    anchor_s: ArrayLike,
    n_bytes: ArrayLike,
    best_bytes_per_s: float,
    anchor: tuple[int, int],
    target: tuple[int, int],
) -> Floats:
    """Return the times of all-reduces on more nodes than a table has.

    Parameters
    ----------
    anchor_s : array_like, shape (n,)
        The seconds of each size on the anchor, the largest number of nodes in the table.
    n_bytes : array_like, shape (n,)
        The sizes in bytes.
    best_bytes_per_s : float
        The largest bus bandwidth in the table, over all sizes and all counts of at least two nodes.
    anchor : tuple of int
        The numbers of nodes and of ranks of the anchor, which has at least two nodes.
    target : tuple of int
        The numbers of nodes and of ranks to predict for.

    Returns
    -------
    ndarray, shape (n,)
        Seconds.

    Notes
    -----
    A time has two parts. The first is the time of the bytes at the best bus bandwidth. This
    bandwidth is taken to be the same on any number of nodes. The second is the rest of the measured
    time, which grows as the logarithm of the number of nodes. The rest is not negative, because no
    time of the anchor belongs to a larger bus bandwidth than the best one of the table.

    On Perlmutter (A100, one to four GPUs on each of 2 to 128 nodes), all-reduces of 1 to 64 MiB are
    predicted with a median error of 5.5% at 4 times the nodes of the anchor and of 9.5% at 16
    times. If the times of the anchor are left unchanged, the errors are 27% and 47%. On ABCI, whose
    tables end at 32 MiB, the errors of the prediction are 16 to 20% and 30%: a table should reach
    sizes at which the bus bandwidth grows no more.

    Examples
    --------
    Of 5 ms between 16 ranks, the bytes take 3.15 ms. Between 256 ranks they take 3.34 ms, and the
    rest of 1.85 ms takes log2(64) / log2(4) = 3 times as long:

    >>> times_s = all_reduce_s([5e-3], [2**25], 20e9, anchor=(4, 16), target=(64, 256))
    >>> times_s.round(5).tolist()
    [0.00891]
    """
    nodes, ranks = anchor
    target_nodes, target_ranks = target
    sizes = np.asarray(n_bytes, float)
    # The bus factor is the number of bytes on the link of a rank for each byte of the size. The
    # bus bandwidth is the rate of these bytes.
    bus_factor = find_collective("all_reduce").bus_factor
    bytes_at_anchor_s = sizes * bus_factor(ranks) / best_bytes_per_s
    bytes_at_target_s = sizes * bus_factor(target_ranks) / best_bytes_per_s
    rest_s = np.asarray(anchor_s, float) - bytes_at_anchor_s
    return bytes_at_target_s + rest_s * math.log2(target_nodes) / math.log2(nodes)


def gathered_s(
    sizes: ArrayLike,
    seconds: ArrayLike,
    n_bytes: ArrayLike,
    ratio: float,
) -> Floats:
    """Return the times of all-gathers or reduce-scatters on more nodes than a table has.

    Parameters
    ----------
    sizes : array_like, shape (k,)
        The sizes in the table of the anchor, in bytes of the whole buffer and in ascending order.
    seconds : array_like, shape (k,)
        Their times.
    n_bytes : array_like, shape (n,)
        The sizes to predict for, in bytes of the whole buffer.
    ratio : float
        The number of nodes to predict for, divided by the number of nodes of the anchor.

    Returns
    -------
    ndarray, shape (n,)
        Seconds. The result is NaN where the size divided by the ratio lies outside the sizes in the
        table.

    Notes
    -----
    Each rank has a shard of the buffer, an equal share of its bytes. A rank sends its shard around
    a ring, so the time for shards of a given size grows in proportion to the number of ranks. A
    buffer of S bytes on r times the nodes has shards as large as those of a buffer of S/r bytes on
    the anchor, and takes r times as long.

    On Perlmutter, buffers of 1 to 64 MiB are predicted with a median error of 4 to 5% at 4
    times the nodes and of 8 to 15% at 16 times, if the table has small enough sizes. If the times
    of the anchor are left unchanged, the errors are 50% and 76%.

    Examples
    --------
    >>> gathered_s([2**20, 2**22], [1e-3, 3e-3], [2**22, 2**20], ratio=4).round(6).tolist()
    [0.004, nan]
    """
    # The sizes whose shards on the anchor are as large as those of ``n_bytes`` on the target.
    sizes_on_anchor = np.asarray(n_bytes, float) / ratio
    # Logarithms are interpolated, because sizes and times span orders of magnitude.
    log_seconds = np.interp(
        np.log(sizes_on_anchor),
        np.log(np.asarray(sizes, float)),
        np.log(np.asarray(seconds, float)),
        left=np.nan,
        right=np.nan,
    )
    return ratio * np.exp(log_seconds)


def bad_day_factor(nodes: int) -> float:
    """Return how much longer messages may take on a shared network with other traffic.

    Parameters
    ----------
    nodes : int
        The number of nodes.

    Returns
    -------
    float
        A factor on the times of messages that were measured on another day.

    Notes
    -----
    Jobs with the same all-reduces on one shared network differed by up to 2.3 times on up to 32
    nodes, and by up to 4 times beyond. The GPUs of one node do not use this network, so that their
    factor is 1.

    Examples
    --------
    >>> bad_day_factor(1), bad_day_factor(8), bad_day_factor(100)
    (1.0, 2.3, 4.0)
    """
    if nodes == 1:
        return 1.0
    return 2.3 if nodes <= QUIET_NODES else 4.0
