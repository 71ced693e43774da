"""Messages that share a link, several at a time, over one that saves up tokens.

A message needs time of the processor, for the software that sends the message, and time
of the link, for its bytes. Messages are admitted in their order, as soon as they
are ready and fewer than the allowed number are under way. Those that move bytes share
the rate of the link equally.

A link whose rate a *token bucket* limits saves up tokens while nothing moves. A token
lets a byte through at once. At most a burst of tokens is saved.

Messages and computation may slow each other down while both go on. Work then advances
more slowly than the clock: at 1 / (1 + slowdown) of its pace.

Sizes in bytes are those of collectives, as `ddlkit.core.collective` defines them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ddlkit.core.cost import MessageCost
from ddlkit.core.errors import UserError

# Notebooks import this name from here.
from ddlkit.core.lab_links import FRAMING as FRAMING
from ddlkit.core.workload import Floats

LARGE_BYTES = 1e9
"""The size of a message so large that the rounding to whole elements does not count."""


class Parts(NamedTuple):
    """The processor time and the link time of messages, for each message alone.

    Attributes
    ----------
    software_s : ndarray, shape (..., G)
        Seconds of the processor. Leading axes are scenarios.
    wire_s : ndarray, shape (..., G)
        Seconds of the link.
    """

    software_s: Floats
    wire_s: Floats


@dataclass(frozen=True, eq=False)
class Link:
    """A link, and all that messages share on it.

    Parameters
    ----------
    in_flight : int, optional
        How many messages may be under way at once. They are admitted in their order.
    software : float, optional
        How many messages can use the processor at once without slowing each other down,
        1 or more. More messages than this share the processor equally.
    burst_s : float, optional
        The most tokens that a link collects while it rests, counted in the seconds of
        link time that they spare messages. 0 is a link without a token bucket. With a burst, the
        software of a message runs while its bytes wait for tokens. Without a burst, the
        software runs after the bytes have moved.
    wire_s_per_byte : float, optional
        Seconds of the link for a byte of a message. Only a link with a burst needs it.
    slowdown : float or ndarray, shape (..., G), optional
        How much longer compute takes while a message is under way: 0.1 is a tenth
        longer. Of several messages under way the largest slowdown counts. An array has
        one value for each message, or one for each scenario and message.
    message_slowdown : float or ndarray, shape (..., G), optional
        How much longer a message takes while something is computed, that is, until the
        last message is ready.

    Raises
    ------
    UserError
        If fewer than one message may be in flight.

    Examples
    --------
    Two messages that are ready at once and need the link for 2 s each, one after the
    other, and together:

    >>> messages = Parts(software_s=np.zeros(2), wire_s=np.array([2.0, 2.0]))
    >>> Link().play([0.0, 0.0], messages)[1].tolist()
    [2.0, 4.0]
    >>> Link(in_flight=2).play([0.0, 0.0], messages)[1].tolist()
    [4.0, 4.0]
    """

    in_flight: int = 1
    software: float = math.inf
    burst_s: float = 0.0
    wire_s_per_byte: float = 0.0
    slowdown: float | Floats = 0.0
    message_slowdown: float | Floats = 0.0

    def __post_init__(self) -> None:
        if self.in_flight < 1:
            raise UserError(f"{self.in_flight} messages in flight: use at least 1")

    @property
    def plain(self) -> bool:
        """Return whether each message takes what it costs, one after the other.

        Nothing is shared then: one message is under way at a time, the link saves up no
        tokens, and messages and compute do not slow each other down.
        """
        return self.in_flight == 1 and not self.burst_s and not self.slows

    @property
    def slows(self) -> bool:
        """Return whether messages slow compute down, or compute slows messages down."""
        return bool(np.any(self.slowdown) or np.any(self.message_slowdown))

    def parts(self, cost: MessageCost, n_bytes: ArrayLike) -> Parts:
        """Return the processor time and the link time of messages.

        Parameters
        ----------
        cost : MessageCost
            The measured time of a message by its size.
        n_bytes : array_like, shape (G,)
            The sizes of the messages.

        Returns
        -------
        Parts
            Seconds by message. They are chosen such that `play` gives each message the time
            of ``cost`` if equal messages follow one another without a pause, as they do when
            they are measured.
        """
        # On a link that saves up tokens, a message needs the processor and the link together.
        if self.burst_s:
            return self._overlapping_parts(cost, n_bytes)
        # Otherwise it needs one after the other. The start-up is software, and the rest of the
        # cost is link time.
        cost_s = np.asarray(cost(n_bytes))
        # A measured time can be below the start-up. The whole time is software then.
        software_s = np.minimum(_startup_s(cost), cost_s)
        return Parts(software_s, cost_s - software_s)

    def _overlapping_parts(self, cost: MessageCost, n_bytes: ArrayLike) -> Parts:
        """Return the parts of messages on a link with a token bucket, as `parts` does.

        Notes
        -----
        On such a link the software of a message overlaps with its bytes. In a row of equal
        messages, the measured cost of a message is therefore its processor time or its link
        time, whichever is longer, and does not show the other one.

        For small messages the processor time is longer, and for large ones the link time. The
        processor time of a small message is the start-up of the cost. So the limit between the
        two is the size whose bytes occupy the link for as long as the start-up takes. Below
        the limit, the cost is the processor time, and the link time follows from the rate.
        Above the limit, the cost is the link time. The processor time does not show there, and
        is taken to be that of the limit, the largest size that shows it.
        """
        cost_s = np.asarray(cost(n_bytes))
        startup_s = _startup_s(cost)
        # The link time by the rate alone. It decides on which side of the limit of the
        # notes a message is.
        by_rate_s = self.wire_s_per_byte * cost.sent_bytes(n_bytes)
        limited_by_link = by_rate_s > startup_s
        # The same limit in bytes of a message, for its cost below. A message can send more or
        # fewer bytes than it has, for example if only the largest gradients are sent. The ratio is that of a
        # large message, where rounding to whole elements is negligible.
        sent_per_byte = float(cost.sent_bytes(LARGE_BYTES)) / LARGE_BYTES
        limit_bytes = startup_s / (self.wire_s_per_byte * sent_per_byte)
        # Above the limit, the processor time is the cost of a message of the limit. A measured
        # cost need not grow with the size, so a larger message may cost less. The processor
        # cannot be busy for longer than this message takes, hence the minimum.
        software_above_limit_s = np.minimum(cost_s, cost(limit_bytes))
        # The link time of `Parts` is the time that the bytes need without tokens. A measured
        # cost is shorter. It is the mean over a row of messages that began with a full bucket,
        # whose tokens saved the row ``burst_s`` of link time in all. Above the limit, where the
        # cost is link time, the share that each message saved is therefore added again.
        saved_s = self.burst_s / cost.messages_per_sample(n_bytes)
        wire_above_limit_s = cost_s + saved_s
        # Below the limit, the cost is the processor time, and the link time is by the rate.
        return Parts(
            software_s=np.where(limited_by_link, software_above_limit_s, cost_s),
            wire_s=np.where(limited_by_link, wire_above_limit_s, by_rate_s),
        )

    def play(self, ready_s: ArrayLike, parts: Parts) -> tuple[Floats, Floats]:
        """Return when each message starts and ends.

        Parameters
        ----------
        ready_s : array_like, shape (..., G)
            When each message would be ready if no message slowed compute down, in
            seconds.
        parts : Parts
            The processor time and the link time of each message.

        Returns
        -------
        starts_s, ends_s : ndarray, shape (..., G)
            In seconds.

        Raises
        ------
        UserError
            If several messages may be in flight, and a time is not finite.
        """
        # The times and slowdowns of every message, each of shape (..., G), in the order
        # in which `_Simulation` takes them.
        inputs = np.broadcast_arrays(
            np.asarray(ready_s, dtype=float),
            parts.software_s,
            parts.wire_s,
            self.slowdown,
            self.message_slowdown,
        )
        if self.in_flight == 1:
            would_be_ready_s, software_s, wire_s, slowdown, message_slowdown = inputs
            return one_by_one(
                would_be_ready_s,
                software_s,
                wire_s,
                burst_s=self.burst_s,
                slowdown=slowdown,
                message_slowdown=message_slowdown,
            )
        # A time that is not finite would leave the simulation without a next event, and it
        # would not end.
        if not all(np.isfinite(values).all() for values in inputs):
            raise UserError("messages on a link: every time must be finite")
        return self._simulated(inputs)

    def _simulated(self, inputs: Sequence[Floats]) -> tuple[Floats, Floats]:
        """Return when each message starts and ends, by a simulation of each scenario.

        ``inputs`` has the times and slowdowns of every message, each of shape (..., G), in
        the order in which `_Simulation` takes them. The results have this shape, too.
        """
        starts_s = np.empty(inputs[0].shape)
        ends_s = np.empty(inputs[0].shape)
        # The last axis is the one of messages. All axes before it are scenarios.
        for scenario in np.ndindex(ends_s.shape[:-1]):
            # The simulation reads element by element, which is faster in lists.
            inputs_of_scenario = [values[scenario].tolist() for values in inputs]
            simulation = _Simulation(self, *inputs_of_scenario)
            starts_s[scenario], ends_s[scenario] = simulation.run()
        return starts_s, ends_s

    def computed_s(self, work_s: Floats, starts_s: Floats, ends_s: Floats) -> Floats:
        """Return when amounts of compute are done if messages slow compute down.

        Parameters
        ----------
        work_s : ndarray, shape (n,)
            Amounts of compute since time 0, in seconds without messages.
        starts_s, ends_s : ndarray, shape (G,)
            When each message starts and ends, in seconds.

        Returns
        -------
        ndarray, shape (n,)
            When each amount is done, in seconds.
        """
        # This is for a link of one scenario, whose slowdown is a number or has the shape (G,).
        # The pace of compute changes only at a knot, where a message starts or ends.
        knots_s = np.unique(np.concatenate([[0.0], starts_s, ends_s]))
        # One row for each knot, one column for each message. Of several messages under
        # way the largest slowdown counts, and without any message there is none.
        under_way = (starts_s <= knots_s[:, None]) & (knots_s[:, None] < ends_s)
        slowdown = np.where(under_way, self.slowdown, 0.0).max(axis=1, initial=0.0)
        pace = 1 / (1 + slowdown)
        # How much has been computed at each knot. The pace of a knot holds until the next
        # knot. No knot follows the last one, so its pace is left out here.
        done_s = np.concatenate([[0.0], np.cumsum(pace[:-1] * np.diff(knots_s))])
        # For each amount the last knot at which no more than this amount was done. The rest
        # of the amount is done at the pace of this knot.
        knot = np.searchsorted(done_s, work_s, side="right") - 1
        rest_s = work_s - done_s[knot]
        return np.asarray(knots_s[knot] + rest_s / pace[knot])


def _startup_s(cost: MessageCost) -> float:
    """Return the start-up time of a cost in seconds.

    A fitted line can have a negative start-up, which counts as none.
    """
    return max(0.0, cost.startup_s())


class _Demand(NamedTuple):
    """The link time or the processor time that a message under way still needs.

    Attributes
    ----------
    left_s : dict of int to float
        The time that each message under way still needs, in seconds for the message
        alone. `advance` counts down the entry of this message, in place.
    message : int
        The message.
    factor : float
        How many times as long the message takes now as alone, because it shares the
        link or the processor and may be slowed down by compute.
    """

    left_s: dict[int, float]
    message: int
    factor: float

    @property
    def until_done_s(self) -> float:
        """Return seconds until this demand is met if nothing changes before."""
        return self.left_s[self.message] * self.factor

    def advance(self, step_s: float) -> None:
        """Subtract the work of ``step_s`` seconds from ``left_s``, in place."""
        # A demand that is met in this step becomes exactly 0. A difference could leave
        # a rounding error.
        if self.until_done_s > step_s:
            self.left_s[self.message] -= step_s / self.factor
        else:
            self.left_s[self.message] = 0.0


class _Simulation:
    """The messages of one scenario that share a link, played from event to event.

    An event is the moment at which a message is admitted, has moved its bytes, or has
    done its software, or at which compute ends. Between two events everything advances
    at a constant pace. Lists have one value for each message. An element of ``ready_s`` is
    an amount of compute: a message is ready when ``computed_s`` has reached it. ``wire_s``
    and ``software_s`` are the times of the link and of the processor that a message takes
    alone. ``slowdown`` is how much longer compute takes while the message is under way (0.1
    is a tenth), and ``message_slowdown`` how much longer the message takes beside compute.

    A link with a token bucket saves up tokens while it rests, and each token later lets a
    byte pass at once.
    """

    def __init__(
        self,
        link: Link,
        ready_s: list[float],
        software_s: list[float],
        wire_s: list[float],
        slowdown: list[float],
        message_slowdown: list[float],
    ) -> None:
        self.link = link
        self.ready_s = ready_s
        self.software_s = software_s
        self.wire_s = wire_s
        self.slowdown = slowdown
        self.message_slowdown = message_slowdown
        self.starts_s = [0.0] * len(ready_s)
        self.ends_s = [0.0] * len(ready_s)

        self.now_s = 0.0
        self.admitted = 0  # how many messages were admitted, in their order
        # The tokens in the link's token bucket. Tokens let bytes pass at once, and are
        # counted in the seconds of link time that these bytes skip. The link has rested
        # before the first message, so the bucket begins full. Without a token bucket,
        # ``burst_s`` is 0.
        self.tokens_s = link.burst_s
        # How much has been computed, and how much must be until the last message is ready.
        # While messages slow compute down, ``computed_s`` grows more slowly than ``now_s``.
        self.computed_s = 0.0
        self.all_computed_s = max(ready_s, default=0.0)
        # The link time and the processor time that each message under way still needs.
        self.wire_left_s: dict[int, float] = {}
        self.software_left_s: dict[int, float] = {}
        # Whether any message slows compute down, and whether compute slows any message down.
        # If not, the loop over events skips the search for such messages.
        self.any_slows_compute = any(slowdown)
        self.any_is_slowed = any(message_slowdown)

    def run(self) -> tuple[list[float], list[float]]:
        """Return when each message starts and ends, in seconds."""
        # Time advances only when no message can end or be admitted at this moment. The
        # loop ends when all messages are admitted and none is under way. The keys of
        # ``wire_left_s`` are the messages under way.
        while self.admitted < len(self.ready_s) or self.wire_left_s:
            self._end_finished()
            if (
                self._may_admit_next()
                and self.ready_s[self.admitted] <= self.computed_s
            ):
                self._admit_next()
            else:
                self._advance()
        return self.starts_s, self.ends_s

    def _may_admit_next(self) -> bool:
        """Return whether a message is left to admit, and fewer than allowed are under way."""
        if self.admitted == len(self.ready_s):
            return False
        return len(self.wire_left_s) < self.link.in_flight

    def _end_finished(self) -> None:
        """End the messages that need neither the link nor the processor any more."""
        wire_left_s = self.wire_left_s
        software_left_s = self.software_left_s
        # `_Demand.advance` sets a demand that is met to exactly 0. `_admit_next` leaves exactly
        # 0 of link time to a message all of whose bytes pass at once, by tokens that the link
        # has saved up. So no rounding error can be left.
        finished = [k for k in wire_left_s if wire_left_s[k] == software_left_s[k] == 0]
        for k in finished:
            self.ends_s[k] = self.now_s
            del wire_left_s[k]
            del software_left_s[k]

    def _admit_next(self) -> None:
        """Start the next message, and spend the collected tokens on its link time."""
        k = self.admitted
        # A link with a token bucket collects tokens while it rests. Bytes for which there
        # are tokens pass at once, so the message skips their link time.
        skipped_s = min(self.tokens_s, self.wire_s[k])
        self.tokens_s -= skipped_s
        self.starts_s[k] = self.now_s
        self.wire_left_s[k] = self.wire_s[k] - skipped_s
        self.software_left_s[k] = self.software_s[k]
        self.admitted += 1

    def _advance(self) -> None:
        """Advance the clock, the compute and the messages to the next event."""
        compute_factor = self._compute_factor()
        compute_slows_messages = self._compute_slows_messages()
        # Next, the time until each kind of event, if nothing else happens before. It is
        # infinite if there is no such event. The first kind: a message has moved its
        # bytes, or has done its software.
        demands = self._demands(compute_slows_messages)
        until_done_s = [demand.until_done_s for demand in demands]
        # The second kind: the next message is ready.
        until_ready_s = math.inf
        if self._may_admit_next():
            compute_left_s = self.ready_s[self.admitted] - self.computed_s
            until_ready_s = compute_left_s * compute_factor
        # The third kind: compute ends. This is an event only if compute slows a message down
        # now, which then advances faster afterwards.
        until_computed_s = math.inf
        if compute_slows_messages:
            compute_left_s = self.all_computed_s - self.computed_s
            until_computed_s = compute_left_s * compute_factor
        step_s = min([*until_done_s, until_computed_s, until_ready_s])
        if math.isinf(step_s):
            return  # there is no further event, since the last message has just ended

        # The token bucket of a link fills only while no bytes move. Tokens let bytes pass at
        # once, and are counted here in the seconds that these bytes would take on the link. A
        # second without bytes therefore adds a second.
        if not any(self.wire_left_s.values()):
            self.tokens_s = min(self.link.burst_s, self.tokens_s + step_s)
        for demand in demands:
            demand.advance(step_s)
        self.now_s += step_s
        # At an event of compute, take the exact amount that belongs to the event. A sum
        # could miss it by a rounding error.
        if until_computed_s <= step_s:
            self.computed_s = self.all_computed_s
        elif until_ready_s <= step_s:
            self.computed_s = self.ready_s[self.admitted]
        else:
            self.computed_s += step_s / compute_factor

    def _compute_factor(self) -> float:
        """Return how many times as long compute takes at this moment as without messages."""
        if not self.any_slows_compute:
            return 1.0
        # Of several messages under way the largest slowdown counts.
        return 1.0 + max((self.slowdown[k] for k in self.wire_left_s), default=0.0)

    def _compute_slows_messages(self) -> bool:
        """Return whether compute goes on at this moment, and slows a message down."""
        if not self.any_is_slowed or self.computed_s >= self.all_computed_s:
            return False
        return any(self.message_slowdown[k] for k in self.wire_left_s)

    def _demands(self, compute_slows_messages: bool) -> list[_Demand]:
        """Return what the messages under way still need of the link and the processor.

        ``compute_slows_messages`` says whether compute slows messages down at this moment.
        """
        # Both have an entry for each message under way, by the number of the message.
        wire_left_s = self.wire_left_s
        software_left_s = self.software_left_s
        # How many times as long each message takes because of compute.
        factor = dict.fromkeys(wire_left_s, 1.0)
        if compute_slows_messages:
            factor = {k: 1.0 + self.message_slowdown[k] for k in wire_left_s}
        # The messages that move bytes, and those whose software runs. On a link with a token
        # bucket, the software of a message runs while its bytes wait for tokens. On any other
        # link (``burst_s`` is 0), it runs after the bytes have moved.
        software_overlaps = self.link.burst_s > 0
        moving = []
        working = []
        for k in wire_left_s:
            if wire_left_s[k]:
                moving.append(k)
            if software_left_s[k] and (software_overlaps or not wire_left_s[k]):
                working.append(k)
        # Messages that move bytes share the link equally. ``link.software`` messages can use
        # the processor at once. More messages than that share it equally.
        link_factor = len(moving)
        processor_factor = max(1.0, len(working) / self.link.software)
        on_link = [_Demand(wire_left_s, k, link_factor * factor[k]) for k in moving]
        on_processor = [
            _Demand(software_left_s, k, processor_factor * factor[k]) for k in working
        ]
        return on_link + on_processor


def one_by_one(
    ready_s: Floats,
    software_s: Floats,
    wire_s: Floats,
    burst_s: float = 0.0,
    slowdown: ArrayLike = 0.0,
    message_slowdown: ArrayLike = 0.0,
) -> tuple[Floats, Floats]:
    """Return when messages start and end if one is under way at a time.

    All scenarios are computed at once, message by message. A link with a token bucket
    saves up tokens while nothing moves. A token later lets a byte through at once. Tokens
    are counted in the seconds of link time that they save.

    Parameters
    ----------
    ready_s : ndarray, shape (..., G)
        When each message would be ready if no message slowed compute down, in seconds.
        Leading axes are scenarios, such as draws of all times.
    software_s, wire_s : ndarray, shape (..., G)
        The processor time and the link time of each message, in seconds.
    burst_s : float, optional
        The most tokens that a rested link has saved, in seconds of link time. It is 0 for a
        link without a token bucket.
    slowdown, message_slowdown : array_like, shape (G,) or (..., G), optional
        How much longer compute takes while a message is under way, and how much longer
        a message takes while something is computed: 0.1 is a tenth longer.

    Returns
    -------
    starts_s, ends_s : ndarray, shape (..., G)
        When each message starts and ends, in seconds.
    """
    scenarios = ready_s.shape[:-1]
    compute_slowdowns = np.broadcast_to(slowdown, ready_s.shape)
    message_slowdowns = np.broadcast_to(message_slowdown, ready_s.shape)
    slows_compute = compute_slowdowns.any()
    slows_messages = message_slowdowns.any()
    starts_s = np.empty(ready_s.shape)
    ends_s = np.empty(ready_s.shape)
    # The amount of compute after which the last message is ready.
    all_computed_s = ready_s.max(axis=-1, initial=0.0)
    link_free_s = np.zeros(scenarios)
    # A link that has rested begins with all tokens that it can save.
    tokens_s = np.full(scenarios, burst_s)
    # By how much messages have delayed compute so far. Amounts of compute are in seconds
    # without such delays, so at time t the amount t - late_s has been computed.
    late_s = np.zeros(scenarios)
    for k in range(ready_s.shape[-1]):
        # Of message k: the link time of its bytes, and its two slowdowns, by scenario.
        bytes_s = wire_s[..., k]
        slowdown_of_compute = compute_slowdowns[..., k]
        slowdown_of_message = message_slowdowns[..., k]

        # A message starts when it is ready and the message before it has ended.
        start_s = np.maximum(link_free_s, ready_s[..., k] + late_s)
        # The link may be busy until after the end of compute. Nothing is left then.
        computed_s = start_s - late_s
        compute_left_s = np.maximum(0.0, all_computed_s - computed_s)

        # The link has rested since the last message ended, and has saved up tokens. They
        # let bytes of this message through at once.
        tokens_s = np.minimum(burst_s, tokens_s + start_s - link_free_s)
        on_link_s = np.maximum(0.0, bytes_s - tokens_s)

        # How long the message takes while nothing is computed. On a link with a token bucket,
        # software runs while bytes wait for tokens (see `Link`).
        alone_s = _alone_s(software_s[..., k], on_link_s, software_overlaps=burst_s > 0)
        # How long the message takes beside compute, and by how much compute delays its bytes.
        took_s = alone_s
        bytes_delayed_s: Floats | float = 0.0
        if slows_messages:
            took_s = overlapped_s(
                alone_s, compute_left_s, slowdown_of_compute, slowdown_of_message
            )
            slowed_on_link_s = overlapped_s(
                on_link_s, compute_left_s, slowdown_of_compute, slowdown_of_message
            )
            bytes_delayed_s = slowed_on_link_s - on_link_s
        # The tokens after the message are those before it, plus those that the link earns
        # meanwhile, minus those that the message spends.
        # - Earned: took_s - bytes_delayed_s, a second of tokens for each second that the message
        #   is under way, but none for the seconds by which compute delays the bytes.
        # - Spent: bytes_s. All bytes spend tokens, because those that move on the link spend
        #   theirs as soon as they are earned.
        # The result is never negative, because what is earned is at least on_link_s, the tokens
        # that were missing.
        tokens_s = np.minimum(burst_s, tokens_s + took_s - bytes_s - bytes_delayed_s)

        # The message also delays all later compute.
        if slows_compute:
            delay_s = _compute_delay_s(took_s, compute_left_s, slowdown_of_compute)
            late_s = late_s + delay_s
        link_free_s = start_s + took_s
        starts_s[..., k] = start_s
        ends_s[..., k] = link_free_s
    return starts_s, ends_s


def _alone_s(
    software_s: Floats, on_link_s: Floats, *, software_overlaps: bool
) -> Floats:
    """Return how long a message takes while nothing is computed.

    Each array has an element for each scenario, such as a draw of all times. ``software_s``
    is the processor time of the message. ``on_link_s`` is the link time of its bytes, except
    those that pass at once because a link with a token bucket has saved up tokens for them.
    On such a link software overlaps: it runs while the other bytes wait for tokens, so the
    longer of both times counts. On any other link, the software runs after the bytes have
    moved.
    """
    if software_overlaps:
        return np.maximum(on_link_s, software_s)
    return software_s + on_link_s


def _compute_delay_s(
    took_s: Floats, compute_left_s: Floats, slowdown: Floats
) -> Floats:
    """Return by how many seconds a message delays all later compute, for each scenario.

    ``took_s`` is how long the message is under way, and ``compute_left_s`` how much is
    still to be computed when it starts. ``slowdown`` is how much longer compute takes
    meanwhile.
    """
    # Compute advances at the pace 1 / (1 + slowdown) meanwhile. Each second of compute takes
    # 1 + slowdown seconds, so it delays later compute by ``slowdown`` seconds.
    work_during_message_s = np.minimum(compute_left_s, took_s / (1 + slowdown))
    return slowdown * work_during_message_s


def overlapped_s(
    alone_s: Floats, compute_left_s: Floats, slowdown: Floats, message_slowdown: Floats
) -> Floats:
    """Return the time of a message that starts while something is still computed.

    Parameters
    ----------
    alone_s : ndarray
        The time of the message while nothing is computed, in seconds. It may have any
        shape, with a value for each scenario. The shapes of all arguments are broadcast.
    compute_left_s : ndarray
        How much is still to be computed, in seconds without messages.
    slowdown, message_slowdown : ndarray
        How much longer compute takes while the message is sent, and how much longer
        the message takes while something is computed: 0.1 is a tenth longer.

    Returns
    -------
    ndarray
        Seconds from the start of the message to its end.

    Examples
    --------
    A message of 3 s starts 2 s before compute ends. Until then it takes twice as long,
    so 1 s of it is sent. The other 2 s follow after compute:

    >>> alone_s = np.array(3.0)
    >>> float(overlapped_s(alone_s, np.array(2.0), np.array(0.0), np.array(1.0)))
    4.0
    """
    # Compute ends ``until_computed_s`` after the message has started, unless the message
    # ends before. Until then, both slow each other down. After that, the rest of the
    # message is as fast as it is alone.
    until_computed_s = compute_left_s * (1 + slowdown)
    during_compute_s = np.minimum(alone_s * (1 + message_slowdown), until_computed_s)
    # How much of the message is sent by then, in seconds of the message alone.
    alone_until_computed_s = until_computed_s / (1 + message_slowdown)
    after_compute_s = np.maximum(0.0, alone_s - alone_until_computed_s)
    return np.asarray(during_compute_s + after_compute_s)
