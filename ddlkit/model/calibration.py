"""From measured collectives to a calibration: costs of messages, noise and links.

A calibration says three things about the messages between some workers over a link:
what a message of a given size costs, how far the time of a single message differs from
that cost, and what messages that are under way together share.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

from ddlkit.core.case import Case
from ddlkit.core.collective import STEPS
from ddlkit.core.cost import AlphaBeta, MessageCost, Samples
from ddlkit.core.errors import UserError
from ddlkit.core.fit import Fit, fit
from ddlkit.core.iteration import PLAIN
from ddlkit.core.lab_links import FRAMING, is_lab, read_link, wire_s_per_byte
from ddlkit.core.link import Link
from ddlkit.core.sparse import Selecting, SparseGather
from ddlkit.core.workload import Floats
from ddlkit.model.contention import SLOWDOWN_KEY, Contention

UNFITTED = "alpha_beta:wire"
"""The name of a line that is not fitted to the times of all messages.

Its start-up is the time of the smallest message. Its slope is how long a byte of a message
occupies the link at its rate, less the share of the rate that framing takes.
"""

STOLEN_LIMIT = 0.02
"""The largest share of the cores that the machine's host may take during a sample."""

OTHERS_LIMIT = 0.1
"""The largest share of the cores that other programs may take during a sample."""

TRAINING = "training"
"""The kind of a case whose compute is done, and not slept as in a replay."""

LINK = ["link", "ranks", "collective"]
"""The columns whose values identify one calibration."""


@dataclass(frozen=True, eq=False)
class Communication:
    """What is known of messages between some workers.

    Together with a workload, this is all that a prediction needs.

    Attributes
    ----------
    cost : MessageCost
        The time of a message of a given size.
    draws : sequence of MessageCost
        Costs that were fitted to bootstrap resamples. Without them a prediction has no
        interval.
    link : Link
        What messages share beyond their cost.
    noise : Noise, optional
        How single messages differ from the cost, if that is known.
    costs_by_form : mapping of str to MessageCost
        Costs of other forms by the name of the form, fitted to the same samples.
    contention : Contention, optional
        How much messages and compute slow each other down, where compute is real and
        this is known.
    is_assumed_ring : bool
        Whether messages between so many workers were not measured, so that the cost is that of a
        ring whose links are all like the measured ones.
    """

    cost: MessageCost
    draws: Sequence[MessageCost] = ()
    link: Link = PLAIN
    noise: Noise | None = None
    costs_by_form: Mapping[str, MessageCost] = field(default_factory=dict)
    contention: Contention | None = None
    is_assumed_ring: bool = False

    def sparse(
        self, density: float, selecting: Selecting | None = None
    ) -> Communication:
        """Return the communication if only the largest elements of gradients are sent.

        Parameters
        ----------
        density : float
            The share of the elements that is sent, above 0 and at most 1.
        selecting : Selecting, optional
            The time to select these elements, if a prediction shall add it to compute.

        Returns
        -------
        Communication
            The same messages with costs of sparse gathers, in which each worker gathers
            the selected elements of all others. If all elements are sent and no time of
            selection is given, this is ``self``.

        Raises
        ------
        UserError
            If the cost is not the cost of an all-gather with a known number of workers,
            or if the density is not above 0 and at most 1.
        """
        if density == 1.0 and selecting is None:
            return self

        def gathered(dense: MessageCost) -> SparseGather:
            """Return the cost of a sparse message, by the cost of a dense all-gather."""
            return SparseGather(dense, density, selecting=selecting)

        draws = [gathered(draw) for draw in self.draws]
        costs_by_form = {
            form: gathered(dense) for form, dense in self.costs_by_form.items()
        }
        return replace(
            self, cost=gathered(self.cost), draws=draws, costs_by_form=costs_by_form
        )


@dataclass(frozen=True)
class Calibration:
    """Costs, noise and links of recorded collectives.

    Attributes
    ----------
    known : mapping of (str, int, str) to Communication
        What is known of messages, by link, number of workers and collective.
    contention : mapping of (str, int, int, str) to Contention
        How much messages and compute slow each other down, by network, batch, number of
        ranks and link.
    """

    known: Mapping[tuple[str, int, str], Communication]
    contention: Mapping[tuple[str, int, int, str], Contention] = field(
        default_factory=dict
    )

    @classmethod
    def of(
        cls,
        collectives: pd.DataFrame,
        form: str = "table",
        draws: int = 200,
        also: Collection[str] = (),
        slowdown: pd.DataFrame | None = None,
    ) -> Calibration:
        """Fit a cost to each link, number of ranks and collective of a table.

        Parameters
        ----------
        collectives : DataFrame
            Rows of a table ``collectives``. Samples during which other programs took
            many cores are left out, unless all samples of their size are like that.
        form : str, optional
            The form of the costs, as `ddlkit.core.fit.fit` takes it.
        draws : int, optional
            How many bootstrap resamples each cost is also fitted to.
        also : collection of str, optional
            Other forms to fit to the same samples for comparison, without draws. The
            form `UNFITTED` needs the rate of the link, and is left out for links whose
            rate is not known.
        slowdown : DataFrame, optional
            Rows of a table ``slowdown``. With them, predictions of real training, but
            not those of replays, take into account how much messages and compute slow
            each other down.

        Returns
        -------
        Calibration
            One `Communication` for each link, number of ranks and collective.

        Raises
        ------
        UserError
            If the table has collectives whose algorithm was carried out by sending its
            steps one by one. Training calls the collectives of a library, which can take
            other times.

        Examples
        --------
        Nine repeats of two sizes, between two ranks:

        >>> rows = pd.DataFrame({"bytes": [1e3, 1e6], "seconds": [0.001, 0.009]})
        >>> rows = pd.concat([rows] * 9, ignore_index=True)
        >>> rows = rows.assign(link="lab:1gbit", link_bits_per_s=1e9, ranks=2)
        >>> rows = rows.assign(collective="all_reduce", algorithm="ring", session=0)
        >>> rows = rows.assign(in_flight=1, messages_per_sample=1, stolen=0.0)
        >>> messages = Calibration.of(rows, draws=10).between("lab:1gbit", workers=2)
        >>> round(messages.cost(1e6), 6), len(messages.draws)
        (0.009, 10)
        """
        _refuse_stepped(collectives)
        known = {}
        # `undisturbed` leaves out samples during which other programs took many cores. Each
        # group has the rows of one link, one number of ranks and one collective.
        for (link, ranks, collective), rows in undisturbed(collectives).groupby(LINK):
            key = (str(link), int(ranks), str(collective))
            known[key] = _calibrated(rows, form, draws, also)
        contention: dict[tuple[str, int, int, str], Contention] = {}
        if slowdown is not None:
            for slowdown_key, rows in slowdown.groupby(SLOWDOWN_KEY):
                # A prediction chooses among the draws of a contention, so it needs at
                # least one, also if costs have none.
                contention[slowdown_key] = Contention.of(rows, max(1, draws))
        return cls(known, contention)

    def without_burst_tokens(self) -> Calibration:
        """Return the calibration for links that save up no tokens while they rest.

        A lab's link is limited by a token bucket, whose tokens let a burst of bytes
        through at once after a rest (`ddlkit.core.link`).
        """
        # ``software`` is how many messages can use the processor at once, which has nothing
        # to do with tokens. Of the other values of a link, only the burst and the time of a
        # byte are set in a calibration, and both belong to the token bucket.
        without_tokens = {
            key: replace(messages, link=Link(software=messages.link.software))
            for key, messages in self.known.items()
        }
        return replace(self, known=without_tokens)

    def between(
        self,
        link: str,
        workers: int,
        collective: str = "all_reduce",
        in_flight: int = 1,
    ) -> Communication:
        """Return what is known of the messages between some workers over a link.

        Parameters
        ----------
        link : str
            The name of the link, as it stands in the table ``collectives``.
        workers : int
            The number of workers.
        collective : str, optional
            The collective that a message is.
        in_flight : int, optional
            How many messages may be under way at once.

        Returns
        -------
        Communication
            Cost, draws, noise and link of these messages.

        Raises
        ------
        UserError
            If such messages were not calibrated.
        """
        key = (link, workers, collective)
        if key not in self.known:
            missing = _in_words(link, workers, collective)
            calibrated = "; ".join(_in_words(*other) for other in self.known)
            raise UserError(f"no calibration for {missing}: there is {calibrated}")
        communication = self.known[key]
        link_of_messages = replace(communication.link, in_flight=in_flight)
        return replace(communication, link=link_of_messages)

    def of_case(self, case: Case) -> Communication:
        """Return what is known of the messages of a case.

        Parameters
        ----------
        case : Case
            What identifies a measured iteration: its network, plan, link and so on.

        Returns
        -------
        Communication
            What is known of the messages. A sparse case has costs of sparse gathers. A
            case of real training has a contention if the contention of its network,
            batch, workers and link was measured.

        Raises
        ------
        UserError
            If messages over the link of the case were not calibrated.
        """
        messages = self.between(
            case.link, case.workers, case.collective, case.in_flight
        )
        # Only real training has a contention. A replay sleeps for its compute times, which messages
        # do not lengthen.
        if case.kind == TRAINING:
            slowdown_key = (case.network, case.batch, case.workers, case.link)
            # None stands for a contention that was not measured.
            messages = replace(messages, contention=self.contention.get(slowdown_key))
        if case.sparse:
            # No `selecting` is given, because the workload of a case includes the time to
            # select the elements that are sent.
            return messages.sparse(case.density)
        return messages


def _in_words(link: str, workers: int, collective: str) -> str:
    return f"{collective} over {link} with {workers} ranks"


def _refuse_stepped(collectives: pd.DataFrame) -> None:
    """Raise UserError if some collectives were sent step by step.

    A recording can send the steps of an algorithm one by one. Training uses the
    collectives of a library, which can take other times.
    """
    # Names of such algorithms begin with STEPS.
    stepped = collectives["algorithm"].astype(str).str.startswith(STEPS)
    if stepped.any():
        algorithm = collectives.loc[stepped, "algorithm"].iloc[0]
        raise UserError(
            f"collectives: rows of algorithm {algorithm!r} cannot calibrate training: "
            "give rows of the library's own messages"
        )


# -- the cost of a message -------------------------------------------------------------


class _MessageKind(NamedTuple):
    """For which messages a cost holds.

    Attributes
    ----------
    collective : str
        The name of the collective.
    workers : int
        Between how many ranks it is.
    algorithm : str
        How the collective is carried out, as "ring".
    """

    collective: str
    workers: int
    algorithm: str


def _message_kind(rows: pd.DataFrame) -> _MessageKind:
    """Return for which messages a cost holds that is fitted to ``rows``.

    All rows are of one collective and one number of ranks on one link.
    """
    # The first row stands for all. `Calibration.of` groups the rows by link, ranks and
    # collective. The algorithm is the same in all rows of a recording, and is not checked.
    first = rows.iloc[0]
    return _MessageKind(
        str(first["collective"]), int(first["ranks"]), str(first["algorithm"])
    )


def _calibrated(
    rows: pd.DataFrame, form: str, draws: int, also: Collection[str]
) -> Communication:
    """Return what the rows of one collective on one link show of its messages.

    ``form`` is the form of the cost, ``draws`` is how many times it is fitted to resampled
    rows, and ``also`` are other forms that are fitted for comparison.
    """
    # The cost is the time of a message while no other message is under way. Rows with
    # several messages in flight only serve `shared_link`, which says what messages share.
    alone = rows[rows["in_flight"] == 1]
    fitted = _fitted(alone, form, draws)
    noise = Noise.of(
        n_bytes=alone["bytes"],
        seconds=alone["seconds"],
        session=alone["session"],
        messages_per_sample=alone["messages_per_sample"],
    )
    return Communication(
        cost=fitted.cost,
        draws=fitted.draws,
        link=shared_link(rows),
        noise=noise,
        costs_by_form=_costs_by_form(alone, also),
    )


def _costs_by_form(
    rows: pd.DataFrame, forms: Collection[str]
) -> dict[str, MessageCost]:
    """Return the cost of each form for messages that were sent one at a time.

    ``rows`` are of one collective on one link. The form `UNFITTED` is left out if the link
    has no limit.
    """
    # Only the cost itself is used, so there are no draws, which are fits to bootstrap resamples.
    costs_by_form = {
        form: _fitted(rows, form, draws=0).cost for form in forms if form != UNFITTED
    }
    # The form UNFITTED is no fit, but the straight line that follows from the rate of the link. It
    # needs a link with a limit. A link without one has the rate 0 in tables.
    if UNFITTED in forms and rows["link_bits_per_s"].all():
        costs_by_form[UNFITTED] = _unfitted(rows)
    return costs_by_form


def _fitted(rows: pd.DataFrame, form: str, draws: int) -> Fit[MessageCost]:
    """Return the fit of a form of cost to messages that were sent one at a time.

    ``rows`` are of one collective on one link. The fit has ``draws`` fits to bootstrap
    resamples.
    """
    # A row is a sample: the mean time of several messages that were sent back to back.
    # Means of more messages scatter less. The number of messages is the same for all samples
    # of a size.
    messages_by_size = rows.groupby("bytes")["messages_per_sample"].first()
    samples = Samples(
        bytes=messages_by_size.index.to_numpy(float),
        messages=messages_by_size.to_numpy(float),
    )
    kind = _message_kind(rows)
    return fit(
        form,
        rows["bytes"],
        rows["seconds"],
        draws,
        collective=kind.collective,
        workers=kind.workers,
        algorithm=kind.algorithm,
        samples=samples,
    )


def _unfitted(rows: pd.DataFrame) -> AlphaBeta:
    """Return the cost of the name `UNFITTED`, a line that is not fitted to all messages.

    Predictions with it are compared with those of fitted costs. Its start-up is the median
    time of the smallest messages. Its slope is how long a byte of a message occupies the link
    at its rate. The slope allows for headers of packets, and for how many bytes the collective
    sends for each byte of its message. ``rows`` are of one collective on one link.
    """
    # All rows are of one link, so that the first row has its name and its rate.
    kind = _message_kind(rows)
    rate_bits_per_s = float(rows["link_bits_per_s"].iloc[0])
    framing = _framing(str(rows["link"].iloc[0]))
    is_smallest = rows["bytes"] == rows["bytes"].min()
    return AlphaBeta(
        alpha_s=float(rows["seconds"][is_smallest].median()),
        beta_s_per_byte=wire_s_per_byte(
            kind.collective, kind.workers, rate_bits_per_s, framing
        ),
        collective=kind.collective,
        workers=kind.workers,
        algorithm=kind.algorithm,
    )


# -- what messages share ---------------------------------------------------------------


def shared_link(samples: pd.DataFrame) -> Link:
    """Return what messages of one collective over a link share.

    Parameters
    ----------
    samples : DataFrame
        Rows of a table ``collectives``, all of one link, number of ranks and
        collective.

    Returns
    -------
    Link
        How many messages can use the processor at once. For a lab's link whose rate is
        limited by a token bucket, according to the name of the link, also the burst of
        the bucket and the time of a byte.
    """
    # The first row stands for all, which are of one link.
    first = samples.iloc[0]
    name = str(first["link"])
    rate_bits_per_s = float(first["link_bits_per_s"])
    messages_at_once = software_at_once(samples)
    burst_s = 0.0
    # Only a lab's link whose rate is limited has a burst, which its name states. A link without a
    # limit has the rate 0 in tables.
    if is_lab(name) and rate_bits_per_s:
        burst_s = read_link(name).burst_s
    # Without a burst, the fitted cost of a message says how long its bytes use the link.
    if not burst_s:
        return Link(software=messages_at_once)
    # With a burst, saved tokens let bytes pass faster, so that the fitted cost does not say how
    # long bytes use the link. The time of a byte then follows from the rate, and from the headers
    # of packets.
    wire_s = wire_s_per_byte(
        str(first["collective"]), int(first["ranks"]), rate_bits_per_s, _framing(name)
    )
    return Link(software=messages_at_once, burst_s=burst_s, wire_s_per_byte=wire_s)


def _framing(link: str) -> float:
    """Return the share of the bytes on a link that is payload, and not headers of packets.

    The name of a lab's link tells this share. For any other link, `FRAMING` is assumed.
    """
    return read_link(link).framing if is_lab(link) else FRAMING


def software_at_once(samples: pd.DataFrame) -> float:
    """Return how many messages can use the processor at once without delay.

    To send a message takes time of the link, and also time of the processor, which runs
    the software that sends it (see `ddlkit.core.link`).

    Parameters
    ----------
    samples : DataFrame
        Rows of a table ``collectives``, all of one link, number of ranks and
        collective.

    Returns
    -------
    float
        At least 1, or infinity, which is no limit, if no messages were timed with several
        in flight.

    Notes
    -----
    The speed-up of several messages in flight over one at a time shows how much of the
    software runs in parallel. The times also contain time of the link, which is not
    subtracted. Each number of messages in flight has a median speed-up over sizes, and the
    result is the largest of these. With too few messages in flight, the speed-up is smaller
    than the processor allows.
    """
    # One row for each size, one column for each number of messages in flight. The times
    # are means per message, also with several in flight.
    medians_s = samples.groupby(["bytes", "in_flight"])["seconds"].median().unstack()
    # The columns are named by the number of messages in flight. Column 1 has the times of
    # messages one at a time.
    one_at_a_time_s = medians_s[1]
    several_at_once_s = medians_s.drop(columns=1)
    if several_at_once_s.empty:
        return math.inf
    # `rdiv` divides the time of one at a time by each column.
    speedups = several_at_once_s.rdiv(one_at_a_time_s, axis=0)
    # The median of each column, over sizes, and then the largest of these.
    largest_median_speedup = float(speedups.median().max())
    # One message can always use the processor. Only scatter makes a speed-up less than
    # 1.
    return float(np.clip(largest_median_speedup, 1.0, None))


def are_disturbed(collectives: pd.DataFrame) -> pd.Series:
    """Return whether something else used the cores during each sample of messages.

    Parameters
    ----------
    collectives : DataFrame
        Rows of a table ``collectives``.

    Returns
    -------
    Series of bool
        For each row, whether the host took more than `STOLEN_LIMIT` of the cores, or other
        programs more than `OTHERS_LIMIT`.
    """
    disturbed = collectives["stolen"].gt(STOLEN_LIMIT)
    # Older tables do not record what other programs took.
    if "others" in collectives:
        disturbed |= collectives["others"].gt(OTHERS_LIMIT)
    return disturbed


def undisturbed(collectives: pd.DataFrame) -> pd.DataFrame:
    """Return the samples of messages during which little else used the cores.

    Parameters
    ----------
    collectives : DataFrame
        Rows of a table ``collectives``.

    Returns
    -------
    DataFrame
        The rows of two ranks or more, without those that `are_disturbed` marks. If all
        samples of a size were disturbed, they are kept, because otherwise nothing would be
        known of this size.
    """
    # One rank alone sends nothing over a link.
    collectives = collectives[collectives["ranks"] > 1]
    disturbed = are_disturbed(collectives)
    # Samples with the same values in all these columns are repeats of one another.
    repeat_key = [collectives[name] for name in (*LINK, "in_flight", "bytes")]
    # For each sample, whether all repeats of it were disturbed.
    all_repeats_disturbed = disturbed.groupby(repeat_key).transform("all")
    return collectives[~disturbed | all_repeats_disturbed]


# -- the noise of messages -------------------------------------------------------------

NEIGHBOURS = 4.0
"""Sizes up to this many times smaller or larger inform the drift of one size."""

PRIOR_BYTES = (1e4, 1e5, 1e6, 1e7)
"""The sizes of the messages for which `PRIOR_DRIFT` states a drift."""

PRIOR_DRIFT = (0.021, 0.012, 0.0096, 0.0059)
"""The drift between sessions by size, for a calibration that has a single session.

It is the median deviation between the two sessions of each recorded lab, divided by the
square root of two. Between these sizes it is linear in the logarithm of the size.
"""

PRIOR_DEGREES = 30.0
"""The degrees of freedom behind `PRIOR_DRIFT`."""


@dataclass(frozen=True, eq=False)
class Noise:
    """How messages of one collective over one link differ from their cost.

    Single messages scatter about the median of their size. All messages of a session
    drift together, because the machine of one session is not quite that of the next.

    Attributes
    ----------
    bytes : ndarray, shape (s,)
        The measured sizes in bytes, increasing.
    ratios : tuple of ndarray, length s
        The times of single messages of each size, divided by their mean. The mean of these ratios
        is 1, so that drawn iterations lie around the predicted one, however many messages an
        iteration has.
    drift : ndarray, shape (s,)
        The standard deviation of the logarithm of a session's median.
    degrees : ndarray, shape (s,)
        The degrees of freedom behind ``drift``.
    """

    bytes: Floats
    ratios: tuple[Floats, ...]
    drift: Floats
    degrees: Floats

    @classmethod
    def of(
        cls,
        n_bytes: ArrayLike,
        seconds: ArrayLike,
        session: ArrayLike = 0,
        messages_per_sample: ArrayLike = 1,
    ) -> Noise:
        """Return the noise that n samples show.

        The samples of a session need not include every size.

        Parameters
        ----------
        n_bytes : array_like, shape (n,)
            The size of the messages of each sample, in bytes.
        seconds : array_like, shape (n,)
            The time of each sample, which is the mean of its messages.
        session : array_like, shape (n,), optional
            The number of the session in which each sample was taken. By default all
            are of one session.
        messages_per_sample : array_like, shape (n,), optional
            How many back-to-back messages each sample averages.

        Returns
        -------
        Noise
            If there is a single session, its drift is estimated from its two halves and
            from `PRIOR_DRIFT`.
        """
        # A number that holds for all samples is repeated for each of them.
        columns = np.broadcast_arrays(n_bytes, seconds, session, messages_per_sample)
        bytes_column, seconds_column, session_column, messages_column = columns
        rows = pd.DataFrame(
            {
                "bytes": np.ravel(bytes_column),
                "seconds": np.ravel(seconds_column),
                "session": np.ravel(session_column),
                "messages": np.ravel(messages_column),
            }
        )
        # `factors` draws ratios at random positions. The rows are sorted so that, with
        # one seed, the draws do not depend on how the sessions alternate in the table.
        rows = rows.sort_values("session", kind="stable")
        ratios = _ratios(rows)
        medians_s = _medians_by_session_s(rows)
        sizes = medians_s.columns.to_numpy(float)
        drift, degrees = _measured_drift(sizes, np.log(medians_s.to_numpy()))
        if rows["session"].nunique() == 1:
            # Here the drift is that between the halves of the session, which take the place of
            # sessions in `medians_s`. Halves differ less than sessions do, so the usual
            # deviation between sessions is added. It is independent of that between halves, so
            # that the squares of both add up.
            prior = np.interp(np.log(sizes), np.log(PRIOR_BYTES), PRIOR_DRIFT)
            drift = np.hypot(drift, prior)
            degrees = np.full(len(sizes), PRIOR_DEGREES)
        return cls(sizes, ratios, drift, degrees)

    def factors(
        self, n_bytes: ArrayLike, draws: int, seed: int = 0, scatter: bool = True
    ) -> Floats:
        """Return factors by which the times of messages differ from their cost.

        Parameters
        ----------
        n_bytes : array_like, shape (k,)
            The sizes of the messages in bytes.
        draws : int
            How many scenarios to draw.
        seed : int, optional
            The seed of the random numbers.
        scatter : bool, optional
            Whether single messages scatter. Without scatter, messages only drift.

        Returns
        -------
        ndarray, shape (draws, k)
            A factor for each message in each scenario.

        Notes
        -----
        The factor of message k in draw b is

            exp(drift[k] * t[b, k]) * ratio[b, k],

        where t[b, k] is a quantile of Student's t distribution with the degrees of
        freedom of message k. All messages of a draw have the quantile of the same random
        probability, so they drift together. ratio[b, k] is drawn from the measured ratios.
        A message has the drift, the degrees of freedom and the ratios of the measured
        size that is nearest to its own size, in logarithms.
        """
        # `scipy.stats` has the same function, but takes three times as long to import.
        from scipy.special import stdtrit as student_quantile

        # For each message, the index of the measured size that is nearest to its own.
        nearest = self._nearest(n_bytes)
        random = np.random.default_rng(seed)
        # Each draw has one random probability, which is the same for all its messages.
        probability = random.uniform(size=(draws, 1))
        # A deviation that is estimated from few sessions is itself uncertain. Student's
        # t allows for that. With a normal distribution intervals would be too narrow.
        # The shape (draws, 1) of the probability becomes (draws, k).
        t = student_quantile(self.degrees[nearest], probability)
        factors = np.exp(t * self.drift[nearest])
        if not scatter:
            return factors
        # Each message of a draw takes a random one of the ratios of its nearest size. The
        # columns of all messages with the same nearest size are drawn together.
        for index in np.unique(nearest):
            columns = nearest == index
            shape = (draws, int(columns.sum()))
            factors[:, columns] *= random.choice(self.ratios[index], shape)
        return factors

    def _nearest(self, n_bytes: ArrayLike) -> np.ndarray:
        """Return for each of some sizes the index of the nearest measured size, shape (k,).

        ``n_bytes`` are the sizes in bytes, shape (k,). Distances are those of logarithms.
        """
        # A size of 0 has no logarithm. Clipping changes no nearest size.
        inside = np.clip(np.asarray(n_bytes, float), self.bytes[0], self.bytes[-1])
        # One row for each measured size, one column for each of the given sizes.
        distance = np.abs(np.log(self.bytes)[:, None] - np.log(inside))
        return distance.argmin(axis=0)


def _ratios(rows: pd.DataFrame) -> tuple[Floats, ...]:
    """Return the times of single messages divided by their mean, an array for each size.

    ``rows`` has a row for each sample, with the columns "bytes", "seconds", "session"
    and "messages", the number of messages whose mean the sample is.
    """
    # Times are divided by the median of their session, so that the drift between
    # sessions does not count here.
    in_session = rows.groupby(["session", "bytes"])["seconds"]
    relative = rows["seconds"] / in_session.transform("median")
    # The mean of several messages scatters less than one message does, by the square
    # root of their number.
    of_one_message = 1 + (relative - 1) * np.sqrt(rows["messages"])
    # Scaled up in this way, a short time may become negative. It then counts as zero.
    by_size = of_one_message.clip(lower=0.0).groupby(rows["bytes"])
    return tuple(ratio.to_numpy() / ratio.mean() for _, ratio in by_size)


def _medians_by_session_s(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the median times in seconds, a row for each session and a column for each size.

    The drift between sessions is estimated from the differences between the rows. A single
    session would have one row only, so its first and second half take the place of sessions.
    ``rows`` has a row for each sample, in the order of measurement, with the columns
    "bytes", "seconds" and "session". A median is missing where a session lacks a size.
    """
    if rows["session"].nunique() > 1:
        session_or_half = rows["session"]
    else:
        session_or_half = _halves(rows)
    by_size = rows["seconds"].groupby([session_or_half, rows["bytes"]])
    return by_size.median().unstack()


def _halves(rows: pd.DataFrame) -> pd.Series[int]:
    """Return 0 for samples in the first half of their session, and 1 for the others.

    The samples of each size are halved by themselves. ``rows`` has a row for each
    sample, with the columns "bytes", "seconds" and "session".
    """
    in_session = rows.groupby(["session", "bytes"])["seconds"]
    # The position of each sample among those of its session and size, from 0.
    position = in_session.cumcount()
    # A position below half of the number of samples gives 0.
    return position * 2 // in_session.transform("size")


def _measured_drift(sizes: Floats, log_medians: Floats) -> tuple[Floats, Floats]:
    """Return by how much the times of a new session will differ from the measured ones.

    This difference is called drift. The variance between sessions is estimated for each
    size, and averaged over sizes that are close together.

    Parameters
    ----------
    sizes : ndarray, shape (s,)
        The measured sizes in bytes.
    log_medians : ndarray, shape (sessions, s)
        Logarithms of the median times, NaN where a session lacks a size.

    Returns
    -------
    drift : ndarray, shape (s,)
        For each size, the standard deviation by which the logarithm of the median of a new
        session differs from the mean of the measured sessions. Its square is averaged over the
        size and its neighbours, without sizes that fewer than two sessions have. If none of
        these is left, it is averaged over all sizes that several sessions have.
    degrees : ndarray, shape (s,)
        The degrees of freedom behind each standard deviation.
    """
    # How many sessions have each size, and which sizes are in several sessions.
    n_sessions = np.isfinite(log_medians).sum(axis=0)
    in_several = n_sessions > 1
    if not in_several.any():
        # No drift is known. Without a drift any number of degrees of freedom will do.
        return np.zeros(len(sizes)), np.ones(len(sizes))

    # The difference between a new session and the mean of n others has the variance of
    # a session, plus 1 / n of this variance for the mean.
    variance = np.zeros(len(sizes))
    # One value for each size that several sessions have. Missing medians are left out.
    between_sessions = np.nanvar(log_medians[:, in_several], axis=0, ddof=1)
    variance[in_several] = between_sessions * (1 + 1 / n_sessions[in_several])
    # n sessions of a size give n - 1 degrees of freedom.
    size_degrees = np.maximum(0, n_sessions - 1)

    # A few sessions say little about one size alone, so its variance is averaged with those
    # of neighbouring sizes, and their degrees of freedom add up. In row i, the matrix (s, s)
    # has the neighbours of size i, itself included, that several sessions have.
    is_neighbour = _neighbours(sizes) & in_several
    has_neighbours = is_neighbour.any(axis=1)
    local_variance = _mean_of_chosen(is_neighbour, variance)
    local_degrees = is_neighbour @ size_degrees

    # A size without neighbours takes the average of all sizes that several sessions have.
    mean_variance = variance[in_several].mean()
    all_degrees = size_degrees[in_several].sum()
    drift = np.sqrt(np.where(has_neighbours, local_variance, mean_variance))
    degrees = np.where(has_neighbours, local_degrees, all_degrees).astype(float)
    return drift, degrees


def _mean_of_chosen(is_chosen: np.ndarray, values: Floats) -> Floats:
    """Return for each row of a matrix the mean of the values that it chooses, shape (s,).

    ``is_chosen``, shape (s, s) of bool, says in row i which of ``values``, shape (s,), are
    averaged. The result is 0 for a row that chooses none.
    """
    n_chosen = is_chosen.sum(axis=1)
    mean: Floats = np.divide(
        (is_chosen * values).sum(axis=1),
        n_chosen,
        where=n_chosen > 0,
        out=np.zeros(len(values)),
    )
    return mean


def _neighbours(sizes: Floats) -> np.ndarray:
    """Return which sizes are close together, as a matrix of bool of shape (s, s).

    Row i says which sizes are neighbours of size i. A size is also its own neighbour.
    """
    log_sizes = np.log(sizes)
    # The distances of all pairs, from the shapes (s, 1) and (s,).
    distance = np.abs(log_sizes[:, None] - log_sizes)
    # Because of the small term, rounding does not exclude a size that is exactly
    # NEIGHBOURS times as large.
    return distance <= np.log(NEIGHBOURS) * (1 + 1e-9)
