"""What a disturbance makes of an iteration, from the undisturbed lab's calibration and what is known of it.

No run takes part: bytes take longer by the share of the rate that is left, and the rest by stated laws.

* A ring sends all bytes over every link, so the slowest link's share is everybody's.
* Loss: TCP that takes loss for congestion keeps sqrt(3/2) / sqrt(p) packets in flight (Mathis, Semke, Mahdavi
  and Ott, "The macroscopic behavior of the TCP congestion avoidance algorithm", 1997), and cubic on short
  ways as much; bbr keeps its rate and sends again what is lost. And no sender is told that the last packet
  of a transfer is lost: a timer does, after 0.2 s where that was the only one, else after two round trips.
* Jitter: a rank goes on when its neighbour's part is there, so of several delays the longest counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from ddlkit.core.errors import UserError
from ddlkit.core.iteration import Iteration
from ddlkit.core.pace import Pace, in_turns
from ddlkit.core.plan import FusionPlan
from ddlkit.core.schedule import Schedule
from ddlkit.core.window import CUBIC, RENO, Windows
from ddlkit.core.workload import Floats, Workload, straggler_factors
from ddlkit.model.calibration import Communication

MSS_BYTES, FRAME_BYTES = 1448, 1538
"""Of a full packet: what it carries, and what that takes on the wire."""
TIMEOUT_S = 0.2
"""Least time after which Linux sends again what nobody has asked for."""
BY_LINK = 1 / 16
"""Of the largest calibrated size: from there on bytes decide, and a straight line is laid."""
DRAWS = 200
OTHER_SEED = 10**6
"""Further on than any case's: what is foretold must not be what the runs have drawn."""
LOSS_BASED = ("reno", "cubic")


@dataclass(frozen=True)
class Disturbance:
    """What is known of a disturbance before anything is measured under it.

    at_s, shares : of the slowest link's rate, from when on in the iteration
    load, on_s, off_s : traffic of others, as a share of the rate; without a rest it is constant
    loss, round_trip_s, rate_bits_per_s, congestion : share of packets, and over which link with which control
    jitter_s : by up to which each link's delay differs from packet to packet
    straggler, spread : as of a Case
    """

    at_s: tuple[float, ...] = (0.0,)
    shares: tuple[float, ...] = (1.0,)
    load: float = 0.0
    on_s: float = 0.0
    off_s: float = 0.0
    loss: float = 0.0
    round_trip_s: float = 0.0
    rate_bits_per_s: float = math.inf
    congestion: str = LOSS_BASED[0]
    jitter_s: float = 0.0
    straggler: float = 1.0
    spread: float = 0.0

    @property
    def windowed(self) -> bool:
        """Whether TCP takes losses that there are for congestion."""
        return bool(self.loss) and self.congestion in LOSS_BASED

    @property
    def carried(self) -> float:
        """Share of the link's rate that TCP makes use of, losses considered."""
        return carried_share(self.loss, self.round_trip_s, self.rate_bits_per_s, self.congestion)


def carried_share(
    loss: float, round_trip_s: float, rate_bits_per_s: float, congestion: str
) -> float:
    """Share of a link's rate that TCP carries under random loss, by the square-root law or bbr's.

    >>> round(carried_share(0.01, 2e-3, 5e8, "cubic"), 3), carried_share(0.01, 2e-3, 5e8, "bbr")
    (0.151, 0.99)
    """
    if not loss:
        return 1.0
    kept = 1 - loss
    if congestion not in LOSS_BASED:
        return kept
    window_bits = math.sqrt(1.5 / loss) * FRAME_BYTES * 8
    return min(kept, window_bits / round_trip_s / rate_bits_per_s)


@dataclass(frozen=True, eq=False)
class Foretold:
    """What iterations under a disturbance should take.

    seconds : (n,) single iterations as they may come, in no order
    """

    seconds: Floats

    @property
    def median_s(self) -> float:
        """What is predicted."""
        return float(np.median(self.seconds))

    @property
    def interval_s(self) -> tuple[float, float]:
        """Where 95% of single iterations should lie."""
        lower_s, upper_s = np.quantile(self.seconds, [0.025, 0.975])
        return float(lower_s), float(upper_s)


def wire_s_per_byte(communication: Communication) -> float:
    """For which the busiest link is busy with a byte of a message: the slope where bytes decide.

    Of the line of least relative squares through the calibrated sizes from BY_LINK of the largest on.
    Raises UserError where the sizes are not known.
    """
    if communication.noise is None:
        raise UserError("wire: the calibration does not say at which sizes it was measured")
    sizes = communication.noise.bytes
    large = sizes[sizes >= BY_LINK * sizes[-1]]
    if len(large) < 2:
        raise UserError("wire: calibrate at least two sizes within 16 of the largest")
    seconds = communication.cost(large)
    rows = np.stack([np.ones_like(large), large], axis=1) / seconds[:, None]
    return float(np.linalg.lstsq(rows, np.ones_like(large), rcond=None)[0][1])


def foretell(
    workload: Workload,
    plan: FusionPlan,
    communication: Communication,
    disturbance: Disturbance,
    draws: int = DRAWS,
    seed: int = 0,
    *,
    windows: bool = False,
) -> Foretold:
    """Iterations under a disturbance, (``draws``,) as they may come.

    workload : of a rank that is not slow, dilated; communication : of the undisturbed lab, with its draws

    windows : play TCP's windows out in place of the square-root law: mended after the first recording

    Each is of one draw of the cost, of single messages' noise, and of whatever the disturbance leaves to
    chance: when others' traffic begins its turn, what is lost, how late packets are, how slow the straggler.
    Raises UserError for a calibration without draws or noise.
    """
    if not communication.draws or communication.noise is None:
        raise UserError("a disturbance needs the calibration's draws and noise: fit it with draws")
    chance = np.random.default_rng(seed)
    iteration = Iteration(workload, plan, communication.cost)
    sizes = iteration.group_bytes
    costs = [communication.draws[k % len(communication.draws)] for k in range(draws)]
    noise = communication.noise.factors(sizes, draws, seed)
    alone_s = np.array([cost(sizes) for cost in costs]) * noise
    alone_s += _lost_s(disturbance, communication, sizes, chance, draws)
    alone_s += _jittered_s(disturbance, communication, chance, alone_s.shape)
    wire_s = np.minimum(alone_s, wire_s_per_byte(communication) * sizes)
    if windows and disturbance.windowed:
        alone_s += _windows_s(disturbance, communication, sizes, chance, draws) - wire_s
        wire_s, disturbance = np.zeros_like(wire_s), replace(disturbance, loss=0.0)
    how = (disturbance.straggler, disturbance.spread, seed + OTHER_SEED)
    slower = straggler_factors(*how, range(draws))
    ends_s = np.empty(draws)
    for k, slow in enumerate(slower):
        ready_s = slow * iteration.ready_s
        pace = _pace(disturbance, chance, float(ready_s[-1] + alone_s[k].sum()))
        ends_s[k] = pace.ends(ready_s, alone_s[k], wire_s[k])[-1]
    return Foretold(ends_s + slower * workload.update_s)


def _pace(disturbance: Disturbance, chance: np.random.Generator, undisturbed_s: float) -> Pace:
    """What share of the rate an iteration gets, and when; others' turns begin at any time."""
    carried, low = disturbance.carried, 1 - disturbance.load
    if not disturbance.off_s:
        return Pace(disturbance.at_s, tuple(carried * low * one for one in disturbance.shares))
    if disturbance.shares != (1.0,):
        raise UserError("a disturbance changes the rate or has others take turns, not both")
    period_s = disturbance.on_s + disturbance.off_s
    until_s = undisturbed_s / (carried * low) + period_s
    phase_s = float(chance.uniform(0, period_s))
    turns = in_turns(low, disturbance.on_s, disturbance.off_s, phase_s, until_s)
    return replace(turns, shares=tuple(carried * share for share in turns.shares))


def _ring(communication: Communication) -> Schedule:
    """The steps of a message."""
    return Schedule.of("ring", int(communication.cost.workers or 1))


def _lost_s(
    disturbance: Disturbance,
    communication: Communication,
    sizes: ArrayLike,
    chance: np.random.Generator,
    draws: int,
) -> Floats:
    """(draws, G) that messages wait for timers: of each transfer the last packet may be lost."""
    ring, part = _ring(communication), np.asarray(sizes) / int(communication.cost.workers or 1)
    wait_s = np.where(part <= MSS_BYTES, TIMEOUT_S, 2 * disturbance.round_trip_s)
    expected = disturbance.loss * sum(map(len, ring.steps))
    return np.asarray(chance.poisson(expected, (draws, len(wait_s))) * wait_s)


def _windows_s(
    disturbance: Disturbance,
    communication: Communication,
    sizes: ArrayLike,
    chance: np.random.Generator,
    draws: int,
) -> Floats:
    """(draws, G) that the bytes of messages take, one message after the other, by windows that lose packets.

    A round trip takes what a step of the smallest message does: a ring of gloo asks before it sends.
    """
    ring, sent = _ring(communication), np.ceil(np.asarray(sizes) / _ring(communication).ranks)
    packet_s = FRAME_BYTES * 8 / disturbance.rate_bits_per_s
    round_trip_s = max(disturbance.round_trip_s, communication.cost.startup_s() / len(ring.steps))
    control = RENO if disturbance.congestion == "reno" else CUBIC
    begin = np.full((draws, ring.ranks), math.sqrt(1.5 / disturbance.loss))
    all_of = Windows(begin, disturbance.loss, round_trip_s, packet_s, control)
    taken = [
        sum(all_of.step(math.ceil(part / MSS_BYTES), chance) for _ in ring.steps)
        for part in sent.tolist()
    ]
    return np.stack(taken, axis=-1)


def _jittered_s(
    disturbance: Disturbance,
    communication: Communication,
    chance: np.random.Generator,
    shape: tuple[int, ...],
) -> Floats:
    """(*shape) by which messages are later, or earlier, than with delays that are all alike."""
    ring = _ring(communication)
    late_s = np.zeros((*shape, ring.ranks))
    for step in ring.steps if disturbance.jitter_s else ():
        after_s = late_s.copy()
        for one in step:
            ways_s = chance.uniform(-disturbance.jitter_s, disturbance.jitter_s, (2, *shape))
            arrived_s = late_s[..., one.sender] + ways_s.sum(axis=0)
            after_s[..., one.receiver] = np.maximum(after_s[..., one.receiver], arrived_s)
        late_s = after_s
    return np.asarray(late_s.max(axis=-1))
