"""How busy this machine's cores were, and how much of their time its host gave to other machines.

A virtual machine's clock goes on while another one has its cores: times then depend on the neighbours.
Linux counts such moments ("steal"), so a disturbed measurement can be noticed and taken again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import psutil

LIMIT = 0.9
"""Above this share of all cores in use, the processor rather than the link may set the pace."""
STOLEN_LIMIT = 0.02
"""Above this share of all cores' time taken by the host, a measurement is taken again."""
TRIES = 3
"""How often at most in a campaign; the last one stays, and is marked."""


@dataclass(frozen=True)
class Usage:
    """Shares of all cores' time between two readings. busy : not idle, stolen included."""

    busy: float
    stolen: float

    @property
    def limited(self) -> bool:
        """Whether the processor, not the link, may have set the pace."""
        return self.busy >= LIMIT or self.disturbed

    @property
    def disturbed(self) -> bool:
        """Whether the host took more than STOLEN_LIMIT."""
        return self.stolen > STOLEN_LIMIT


def reading() -> Any:
    """What `usage` compares; takes some 20 us."""
    return psutil.cpu_times()


def usage(before: Any, after: Any) -> Usage:
    """What happened between two readings.

    The kernel already counts guests in user time; a core that waits for a disk is idle.
    """
    names = [name for name in before._fields if not name.startswith("guest")]
    spent = {name: getattr(after, name) - getattr(before, name) for name in names}
    total_s = sum(spent.values())
    if total_s <= 0:
        return Usage(0.0, 0.0)
    idle_s = spent["idle"] + spent.get("iowait", 0.0)
    return Usage(1.0 - idle_s / total_s, max(0.0, spent.get("steal", 0.0)) / total_s)
