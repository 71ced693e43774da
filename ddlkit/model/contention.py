"""How much compute and messages slow each other down, and what DDP's buckets cost.

Both are measured where compute is real (``ddlkit measure slowdown``). A replay, which
sleeps for its compute times, has neither.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from ddlkit.core.errors import UserError
from ddlkit.core.workload import Floats

NOTHING = "nothing"
"""In the column ``beside`` of a table ``slowdown``: timed alone."""

MESSAGES = "messages"
"""In the column ``beside`` of a table ``slowdown``: timed while messages travelled."""

COMPUTE = "compute"
"""In the column ``beside`` of a table ``slowdown``: timed while a network computed."""

BUCKETS = "buckets"
"""In the column ``beside`` of a table ``slowdown``: timed with unsent buckets of DDP."""

SLOWDOWN_KEY = ["network", "batch", "ranks", "link"]
"""The columns whose values identify one contention."""

DRAWS = 200
"""How many times rounds are resampled by default."""


@dataclass(frozen=True, eq=False)
class Contention:
    """Slowdowns of compute and of messages by the size of a message.

    Between two sizes a slowdown is linear in the logarithm of the size. Beyond the
    measured sizes it is the slowdown of the nearest one.

    Attributes
    ----------
    bytes : ndarray, shape (k,)
        The measured sizes of messages in bytes, increasing.
    slowdowns : ndarray, shape (2, k)
        How much longer compute takes while such a message is under way, and how much
        longer such a message takes while something is computed. 0.1 is a tenth longer.
        Both are medians over the rounds of the measurement.
    draws : ndarray, shape (B, 2, k)
        Both slowdowns, as B bootstrap resamples of the rounds of the measurement give
        them.
    copy_s_per_byte : float
        Seconds per byte to copy a gradient into its bucket or out of it; 0 if copies
        were not timed.
    bucket_s : float
        Seconds that each bucket costs compute besides its bytes.
    is_measured : bool
        Whether the slowdowns were measured. Otherwise they are assumed to be none.
    """

    bytes: Floats
    slowdowns: Floats
    draws: Floats
    copy_s_per_byte: float = 0.0
    bucket_s: float = 0.0
    is_measured: bool = True

    @classmethod
    def of(cls, rows: pd.DataFrame, draws: int = DRAWS) -> Contention:
        """Return the contention that a table ``slowdown`` shows.

        Parameters
        ----------
        rows : DataFrame
            Rows of a table ``slowdown``, all of one network, batch, number of ranks and
            link.
        draws : int, optional
            How many times to resample the rounds.

        Returns
        -------
        Contention
            The medians over rounds. A negative slowdown counts as none.

        Raises
        ------
        UserError
            If the rows are of several networks, batches, numbers of ranks or links.

        Notes
        -----
        Each ratio compares times of one round, so that slow changes of the machine
        cancel. Compute is the backward pass, because messages are under way during
        backward.
        """
        settings = rows[SLOWDOWN_KEY].drop_duplicates()
        if len(settings) != 1:
            raise UserError(
                f"slowdown: {len(settings)} settings of network, batch, ranks and link: "
                "give the rows of one network, batch, number of ranks and link"
            )
        # The times with both going on over the times alone, shape (2, k, rounds), where k
        # is the number of sizes.
        sizes, ratios = _ratios(rows)
        # A ratio of 1.1 is a slowdown of 0.1.
        return cls(
            bytes=sizes,
            slowdowns=np.maximum(0.0, np.median(ratios, axis=-1) - 1),
            draws=np.maximum(0.0, _medians_of_resamples(ratios, draws) - 1),
            copy_s_per_byte=_copy_s_per_byte(rows),
            bucket_s=_bucket_s(rows),
        )

    @classmethod
    def none(cls) -> Contention:
        """Return a contention without any slowdown.

        Returns
        -------
        Contention
            No slowdown at any size, which was assumed and not measured.
        """
        # The slowdown of the only size counts for every size.
        return cls(
            bytes=np.ones(1),
            slowdowns=np.zeros((2, 1)),
            draws=np.zeros((1, 2, 1)),
            is_measured=False,
        )

    def copying(self, copy_s_per_byte: float) -> Contention:
        """Return the contention with another time of copies.

        Parameters
        ----------
        copy_s_per_byte : float
            Seconds per byte to copy a gradient.

        Returns
        -------
        Contention
            The same slowdowns and the given copies.
        """
        return replace(self, copy_s_per_byte=copy_s_per_byte)

    def of_messages(self, n_bytes: ArrayLike, drawn: int = 0) -> Floats:
        """Return the slowdowns of compute by messages, and of messages by compute.

        Parameters
        ----------
        n_bytes : array_like, shape (G,)
            The sizes of the messages in bytes.
        drawn : int, optional
            How many of ``draws`` to take at random. By default (0), ``slowdowns`` are taken
            instead, the medians over the rounds of the measurement.

        Returns
        -------
        ndarray, shape (2, G) or (2, drawn, G)
            How much longer compute takes while each message is under way, and how much
            longer each message takes while something is computed.

        Examples
        --------
        Messages of 10 KB slow compute down by 0.2, and those of 1 MB by 0.4. Below the
        first size 0.2 holds. The logarithm of 100 KB lies in the middle between those of
        the two sizes:

        >>> slowdowns = np.array([[0.2, 0.4], [0.0, 0.0]])
        >>> measured = Contention(np.array([1e4, 1e6]), slowdowns, slowdowns[None])
        >>> np.round(measured.of_messages([1e3, 1e5])[0], 2).tolist()
        [0.2, 0.3]
        """
        values = self.slowdowns
        if drawn:
            # Any of the B draws may be chosen several times, as ``drawn`` can exceed B. The
            # fixed seed makes the choice the same for all plans.
            chosen = np.random.default_rng(1).integers(0, len(self.draws), drawn)
            # From the shape (drawn, 2, k) to (2, drawn, k).
            values = np.moveaxis(self.draws[chosen], 1, 0)
        log_sizes = np.log(np.asarray(n_bytes, float))
        return _interpolated(log_sizes, np.log(self.bytes), values)


def _interpolated(at: Floats, points: Floats, values: Floats) -> Floats:
    """Return values between some points, linearly interpolated.

    Parameters
    ----------
    at : ndarray, shape (G,)
        Where to interpolate. Beyond the points, the value of the nearest one holds.
    points : ndarray, shape (k,)
        Where the values are known, increasing.
    values : ndarray, shape (..., k)
        The values. All rows are interpolated at once, and `np.interp` takes one row only.

    Returns
    -------
    ndarray, shape (..., G)
        A new array.
    """
    if len(points) == 1:
        # There is nothing to interpolate: the one value of a row holds everywhere.
        return np.broadcast_to(values, (*values.shape[:-1], len(at))).copy()
    # The indices of the points to the left and to the right of each place. A place outside
    # the points takes the first or the last two of them.
    right = np.clip(np.searchsorted(points, at), 1, len(points) - 1)
    left = right - 1
    gap = points[right] - points[left]
    # Outside the points, the clipped share gives the value of the nearest one.
    share = np.clip((at - points[left]) / gap, 0.0, 1.0)
    return np.asarray(values[..., left] * (1 - share) + values[..., right] * share)


def _medians_of_resamples(ratios: Floats, draws: int) -> Floats:
    """Return the medians over bootstrap resamples of the rounds, shape (draws, 2, k).

    ``ratios``, shape (2, k, rounds), has two ratios of times for each of k sizes in each
    round. Each draw takes as many rounds as there are, at random and with repeats, the same
    ones for all ratios.
    """
    rounds = ratios.shape[-1]
    resampled = np.random.default_rng(0).integers(0, rounds, (draws, rounds))
    # The median reduces the shape (2, k, draws, rounds) to (2, k, draws).
    medians = np.median(ratios[..., resampled], axis=-1)
    return medians.transpose(2, 0, 1)


def _ratios(rows: pd.DataFrame) -> tuple[Floats, Floats]:
    """Return how many times as long compute and messages take while both go on.

    Parameters
    ----------
    rows : DataFrame
        Rows of a table ``slowdown``, all of one network, batch, number of ranks and
        link.

    Returns
    -------
    sizes : ndarray, shape (k,)
        The sizes of the messages in bytes.
    ratios : ndarray, shape (2, k, rounds)
        The time of compute during messages, divided by its time alone, and then the time of
        messages during compute, divided by their time alone.
    """
    # The mean time of each quantity in each round. The quantities are "backward", which
    # is the compute, and "message". The column "beside" says what went on at the same time.
    # Below, `seconds[quantity, beside]` are the times with some values of these two columns,
    # by the other three: the size of a message, the number of messages, and the round.
    key = ["quantity", "beside", "bytes", "messages", "repeat"]
    seconds = rows.groupby(key)["seconds"].mean()
    # Compute that was timed alone has 0 bytes and 0 messages in all rounds, so only the
    # round is left in its index.
    compute_alone = seconds["backward", NOTHING].droplevel(["bytes", "messages"])
    # Tables with a row for each size and a column for each round. The number of messages,
    # which follows from the size, is left out.
    compute_during_messages = _by_size_and_round(seconds["backward", MESSAGES])
    message_during_compute = _by_size_and_round(seconds["message", COMPUTE])
    message_alone = _by_size_and_round(seconds["message", NOTHING])
    rounds = compute_during_messages.columns
    # Compute alone is the same for every size, so each row of the table is divided by it,
    # round by round, in the order of the table's columns.
    ratios = np.stack(
        [
            compute_during_messages / compute_alone[rounds].to_numpy(),
            message_during_compute / message_alone,
        ]
    )
    return compute_during_messages.index.to_numpy(float), ratios


def _by_size_and_round(seconds: pd.Series[float]) -> pd.DataFrame:
    """Return times with a row for each size of messages and a column for each round.

    ``seconds`` has an index of the size, the number of messages and the round. The number of
    messages does not distinguish the times.
    """
    return seconds.droplevel("messages").unstack("repeat")


def _copy_s_per_byte(rows: pd.DataFrame) -> float:
    """Return seconds per byte to copy gradients, 0 if copies were not timed.

    ``rows`` are those of a table ``slowdown``.
    """
    copies = rows[rows["quantity"] == "copy"]
    if copies.empty:
        return 0.0
    return float((copies["seconds"] / copies["bytes"]).median())


def _bucket_s(rows: pd.DataFrame) -> float:
    """Return the seconds that a bucket costs compute, 0 if some round shows no cost.

    The result is also 0 if buckets were not timed. ``rows`` are those of a table ``slowdown``, all
    of one network, batch, number of ranks and link.
    """
    # DDP was timed with one bucket, and with as many buckets as there are gradients.
    # The buckets were not sent, so iterations differ only in the number of buckets,
    # which is in the column "messages". The column "repeat" has the round. An iteration
    # has a row for each of its phases, whose times are added.
    iterations_s = rows[rows["beside"] == BUCKETS].pivot_table(
        values="seconds", index="messages", columns="repeat", aggfunc="sum"
    )
    # If fewer than two numbers of buckets were timed, the cost of a bucket is not known.
    if len(iterations_s) < 2:
        return 0.0
    # The index is sorted by the number of buckets. Each column is a round.
    fewest, most = iterations_s.index[[0, -1]]
    longer_s = iterations_s.loc[most] - iterations_s.loc[fewest]
    bucket_s_by_round = longer_s / (most - fewest)
    # If some rounds show no cost, the cost of the others may be noise.
    in_every_round = bucket_s_by_round.min() > 0
    return float(bucket_s_by_round.median()) if in_every_round else 0.0
