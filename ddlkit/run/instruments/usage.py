"""Whether what was measured tells of a link, or of the processor: the marks that runs and samples carry.

An iteration is marked ``processor_limited``, and reported apart from those that a link limits, where one of
these holds, for the rank that fared worst:

* the cores were busy for BUSY_LIMIT of the time from its first message to its last: then they may set the
  pace. Over the whole iteration, in which ranks mostly sleep, that would not show;
* ``late``: more than LATE_LIMIT of the packets that crossed an emulated link left its process later than
  they were due (`ddlkit.run.lab.tunnel.LATE_S`), or the process itself was busy for BUSY_LIMIT: then the
  link was not what it was asked to be;
* the host took more than STOLEN_LIMIT of the cores. Such an iteration is taken again, up to TRIES times.

A case is marked where one of its iterations is. A calibration is not: it says what messages cost with the
cores as they are; only what the host disturbed is left out of it (`ddlkit.model.calibration.undisturbed`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import psutil

from ddlkit.model.calibration import STOLEN_LIMIT

LATE_LIMIT = 0.05
"""Share of packets."""
BUSY_LIMIT = 0.9
"""Share of all cores' time; of an emulated link's process, of one core's."""
TRIES = 3
"""How often an iteration is taken in a campaign, at most; the last one stays, and is marked."""


@dataclass(frozen=True)
class Usage:
    """Shares of all cores' time between two readings. busy : not idle, stolen included.

    late : share of packets that an emulated link's process carried later than they were due

    A virtual machine's clock goes on while another one has its cores: times then depend on the
    neighbours. Linux counts such moments ("steal"), so a disturbed measurement can be taken again.
    """

    busy: float
    stolen: float
    late: float = 0.0

    @property
    def limited(self) -> bool:
        """Whether the processor, not the link, may have set the pace: the mark ``processor_limited``."""
        return self.busy >= BUSY_LIMIT or self.late > LATE_LIMIT or self.disturbed

    @property
    def disturbed(self) -> bool:
        """Whether the host took more than STOLEN_LIMIT."""
        return self.stolen > STOLEN_LIMIT


def processor_times() -> Any:
    """What `processor_usage` compares; takes some 20 us."""
    return psutil.cpu_times()


def processor_usage(before: Any, after: Any) -> Usage:
    """What happened between two readings.

    The kernel already counts guests in user time; a core that waits for a disk is idle. So is one for us that
    others use who are nice, as they leave it when they are asked to, unless we are nice ourselves.
    """
    names = [name for name in before._fields if not name.startswith("guest")]
    spent = {name: getattr(after, name) - getattr(before, name) for name in names}
    total_s = sum(spent.values())
    if total_s <= 0:
        return Usage(0.0, 0.0)
    ours = ("idle", "iowait") if os.nice(0) > 0 else ("idle", "iowait", "nice")
    idle_s = sum(spent.get(name, 0.0) for name in ours)
    return Usage(1.0 - idle_s / total_s, max(0.0, spent.get("steal", 0.0)) / total_s)
