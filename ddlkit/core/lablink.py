"""What the name of a lab's link says of it: "lab:1gbit", "emulated:500mbit-delay2ms-loss0.001".

"lab" is a link that the kernel's token bucket shapes, "emulated" one of our own making. They count what
goes around the bytes of a message differently: the bucket 14 bytes a packet and 52 of TCP and IP, a wire
24 more, for preamble, check sum and gap. An emulated link may count as the bucket does: "-framing14".
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ddlkit.core.errors import UserError
from ddlkit.core.link import TBF_FRAMING_BYTES, burst_s
from ddlkit.core.units import parse_bits_per_s, parse_seconds

FRAMING_BYTES = 38
"""Around each packet of up to 1,500 bytes, as Ethernet on a wire has them."""
WIRE_FRAMING = 1448 / (1500 + FRAMING_BYTES)
"""TCP payload in a full Ethernet frame as it occupies a wire, and an emulated link."""
_PARTS = {"delay": "0s", "jitter": "0s", "loss": "0", "burst": "0s", "framing": f"{FRAMING_BYTES}"}


class Named(NamedTuple):
    """What the name of a link says.

    engine : "tbf" or "emulated"; delay_s, jitter_s : of each link, one way; loss : share of frames
    burst_s : most that a rested link may send at once, in seconds of its rate
    framing_bytes : counted around each packet
    """

    engine: str
    rate_bits_per_s: float
    delay_s: float
    jitter_s: float
    loss: float
    burst_s: float = 0.0
    framing_bytes: int = FRAMING_BYTES

    @property
    def framing(self) -> float:
        """Return the share of what the link carries that is a message's own bytes."""
        return 1448 / (1500 + self.framing_bytes)


def is_lab(link: str) -> bool:
    """Return whether the link is one of a lab, by its name."""
    return link.startswith(("lab:", "emulated:"))


def read_link(link: str) -> Named:
    """Return what the name of a lab's link says, as it stands in tables; UserError for other links.

    >>> read_link("emulated:500mbit-delay2ms-loss0.001")[:5]
    ('emulated', 500000000.0, 0.002, 0.0, 0.001)
    >>> read_link("lab:1gbit").engine
    'tbf'
    """
    if not is_lab(link):
        raise UserError(f"{link!r} is no lab's link: they are called as lab:1gbit")
    engine, _, rest = link.partition(":")
    rate, *parts = rest.split("-")
    bits_per_s = parse_bits_per_s(rate)
    if engine == "lab":
        return Named("tbf", bits_per_s, 0.0, 0.0, 0.0, burst_s(bits_per_s), TBF_FRAMING_BYTES)
    matches = (re.fullmatch(rf"({'|'.join(_PARTS)})([0-9].*)", part) for part in parts)
    texts = _PARTS | {match[1]: match[2] for match in matches if match}
    delay_s, jitter_s, saved_s = (parse_seconds(texts[n]) for n in ("delay", "jitter", "burst"))
    loss, framing_bytes = float(texts["loss"]), int(texts["framing"])
    return Named(engine, bits_per_s, delay_s, jitter_s, loss, saved_s, framing_bytes)


def ranks_per_node(link: str) -> int:
    """Return how many ranks share the link of a node, by its name; 1 where each has its own.

    >>> ranks_per_node("emulated:200mbit-g4-1gbit-delay0.5ms"), ranks_per_node("lab:1gbit")
    (4, 1)
    """
    group = re.search(r"-g([0-9]+)-", link)
    return int(group[1]) if group else 1


def way_s(link: str) -> float:
    """Return a packet's delay in seconds from rank to rank, by the link's name; 0 for other links.

    >>> way_s("emulated:500mbit-delay2ms"), way_s("loopback")
    (0.004, 0.0)
    """
    return 2 * read_link(link).delay_s if link.startswith("emulated:") else 0.0
