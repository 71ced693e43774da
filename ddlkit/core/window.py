"""TCP that takes loss for congestion, played out round trip by round trip under random loss.

The square-root law is what a long flow gets in the mean. A ring is not that: each of its steps waits for
the slowest of its links, whose windows differ by chance; a packet that is lost near a step's end costs a
round trip more; and a burst is there only when its last frame is. Windows are kept from step to step, and
from message to message.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ddlkit.core.workload import Floats

BURST = 45
"""Packets that Linux hands to a link as one."""


@dataclass(frozen=True)
class Control:
    """Additive increase, multiplicative decrease.

    kept : of the window, in packets, when any is lost; gained : a round trip without loss. Both of cubic on
        short ways, where it grows as fast as reno in the mean (RFC 9438, section 4.3)
    least : packets that a window never falls below
    """

    kept: float = 0.7
    gained: float = 3 * (1 - 0.7) / (1 + 0.7)
    least: float = 2.0


CUBIC = Control()
RENO = Control(0.5, 1.0)


@dataclass(eq=False)
class Windows:
    """The windows of several connections, in each of several trials.

    packets : (..., P) they may have under way
    """

    packets: Floats
    loss: float
    round_trip_s: float
    packet_s: float  # on the link
    control: Control = CUBIC

    def send(self, packets: int, chance: np.random.Generator) -> Floats:
        """(..., P) seconds until so many packets have arrived by each connection."""
        left, took_s = np.full(self.packets.shape, float(packets)), np.zeros(self.packets.shape)
        while np.any(left > 0):
            under_way = np.minimum(np.floor(self.packets), left)
            round_s = self.round_trip_s + np.minimum(under_way, BURST) * self.packet_s
            round_s = np.maximum(round_s, under_way * self.packet_s)
            lost = chance.binomial(under_way.astype(np.int64), self.loss)
            busy = left > 0
            # The last burst is there after one way; the round trip is what the next one waits for.
            ends = busy & (under_way >= left) & (lost == 0)
            took_s += np.where(ends, under_way * self.packet_s, np.where(busy, round_s, 0.0))
            left -= under_way - lost
            cut = np.maximum(self.packets * self.control.kept, self.control.least)
            grown = self.packets + self.control.gained
            self.packets = np.where(busy, np.where(lost > 0, cut, grown), self.packets)
        return took_s

    def step(self, packets: int, chance: np.random.Generator) -> Floats:
        """(...,) seconds of a ring's step: that of the slowest connection."""
        return np.asarray(self.send(packets, chance).max(axis=-1))
