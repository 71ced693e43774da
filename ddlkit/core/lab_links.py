"""The links of a lab: their names, and how many bytes they carry.

A lab is a set of network namespaces on one machine, with a link between them whose rate
is limited. The name of a link stands in tables, so that a measurement says under which
conditions it was made. There are two kinds:

* ``lab:1gbit``: the kernel limits the rate with a token bucket (tbf).
* ``emulated:500mbit-delay2ms-loss0.001``: packets pass through a process that limits
  the rate, delays packets and drops a share of them.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from ddlkit.core.collective import find_collective
from ddlkit.core.errors import UserError
from ddlkit.core.units import KIB, parse_bits_per_s, parse_seconds

PACKET_BYTES = 1500
"""The most bytes of an IP packet in an Ethernet frame."""
PAYLOAD_BYTES = 1448
"""The bytes of a message in a full packet, behind the headers of IP and TCP."""
FRAMING_BYTES = 38
"""The bytes around each packet on a wire: header, checksum, preamble and gap."""
TBF_FRAMING_BYTES = 14
"""The bytes around each packet that the kernel's token bucket counts: the header."""
FRAMING = PAYLOAD_BYTES / (PACKET_BYTES + TBF_FRAMING_BYTES)
"""The share of the bytes that a token bucket counts which can be a message's own."""


def burst_bytes(rate_bits_per_s: float) -> int:
    """Return how many bytes the token bucket of a lab's link can save.

    The bucket has 128 KiB for each Gbit/s of the rate, and 16 KiB at least. With a
    smaller bucket the rate of the link is wrong by a factor of two.
    """
    return max(16 * KIB, round(128 * KIB / 1e9 * rate_bits_per_s))


def wire_s_per_byte(
    collective: str, ranks: int, rate_bits_per_s: float, framing: float = FRAMING
) -> float:
    """Return the seconds for which a byte of a message keeps the link of each rank busy.

    Parameters
    ----------
    collective : str
        The name of the collective.
    ranks : int
        Between how many ranks.
    rate_bits_per_s : float
        The rate of each rank's link, each way.
    framing : float, optional
        The share of the link's bytes that are the message's own, not headers.

    Returns
    -------
    float
        Seconds per byte.

    Raises
    ------
    UserError
        If the collective is unknown.
    """
    # The bus factor is the number of bytes on a link for each byte of a message.
    bus_factor = find_collective(collective).bus_factor(ranks)
    message_bits_per_s = rate_bits_per_s * framing
    # A byte has 8 bits.
    return bus_factor * 8 / message_bits_per_s


class LinkConditions(NamedTuple):
    """The conditions that the name of a lab's link states.

    Attributes
    ----------
    engine : {"tbf", "emulated"}
        What limits the rate: the token bucket of the kernel, or a process of ddlkit.
    rate_bits_per_s : float
        The rate of each rank's link, each way.
    delay_s : float
        The delay of a packet on the link of its sender, and again on the link of its
        receiver, in seconds.
    burst_s : float
        The most tokens that the link saves, in seconds of its rate.
    framing_bytes : int
        The bytes around each packet that count towards the rate.
    """

    engine: str
    rate_bits_per_s: float
    delay_s: float
    burst_s: float
    framing_bytes: int

    @property
    def framing(self) -> float:
        """Return the share of the link's bytes that can be a message's own."""
        return PAYLOAD_BYTES / (PACKET_BYTES + self.framing_bytes)


def is_lab(link: str) -> bool:
    """Return whether a link is one of a lab, by its name, such as "lab:1gbit"."""
    return link.startswith(("lab:", "emulated:"))


def read_link(link: str) -> LinkConditions:
    """Return the conditions that the name of a lab's link states.

    Parameters
    ----------
    link : str
        The name, as it stands in tables.

    Returns
    -------
    LinkConditions
        What limits the rate, the rate, the delay, the burst, and the framing, that is, the
        bytes around each packet.

    Raises
    ------
    UserError
        If the link does not belong to a lab, or if its rate, a time or its framing cannot be
        read.

    Examples
    --------
    >>> read_link("emulated:500mbit-delay2ms-loss0.001")[:3]
    ('emulated', 500000000.0, 0.002)
    """
    if not is_lab(link):
        raise UserError(
            f"{link!r} is not a link of a lab: such a link is named as lab:1gbit or "
            "emulated:1gbit-delay2ms"
        )
    kind, _, conditions = link.partition(":")
    # The rate comes first. Each further condition follows a dash.
    rate, _, _ = conditions.partition("-")
    rate_bits_per_s = parse_bits_per_s(rate)
    # The kernel limits a "lab:" link with a token bucket (tbf). Its name states neither delay
    # nor burst.
    if kind == "lab":
        return _tbf_conditions(rate_bits_per_s)
    return _emulated_conditions(link, rate_bits_per_s)


def _tbf_conditions(rate_bits_per_s: float) -> LinkConditions:
    """Return the conditions of a "lab:" link, whose rate the kernel limits.

    The kernel uses a token bucket, called tbf. The name of such a link states no delay, and
    the burst follows from the rate.
    """
    burst_bits = 8 * burst_bytes(rate_bits_per_s)
    return LinkConditions(
        engine="tbf",
        rate_bits_per_s=rate_bits_per_s,
        delay_s=0.0,
        burst_s=burst_bits / rate_bits_per_s,
        framing_bytes=TBF_FRAMING_BYTES,
    )


def _emulated_conditions(link: str, rate_bits_per_s: float) -> LinkConditions:
    """Return the conditions of an "emulated:" link, whose rate a process of ddlkit limits.

    ``link`` is its name. A condition that the name leaves out has its default. Raises
    UserError if a condition in the name cannot be read.
    """
    framing = _condition(link, "framing", default=str(FRAMING_BYTES))
    if not framing.isdecimal():
        raise UserError(
            f"link {link!r}: the framing {framing!r} is not a whole number of bytes"
        )
    return LinkConditions(
        engine="emulated",
        rate_bits_per_s=rate_bits_per_s,
        delay_s=parse_seconds(_condition(link, "delay", default="0s")),
        burst_s=parse_seconds(_condition(link, "burst", default="0s")),
        framing_bytes=int(framing),
    )


def _condition(link: str, name: str, default: str) -> str:
    """Return the text after a word in a link's name: "2ms" for "delay" in "-delay2ms".

    ``name`` is the word. ``default`` is returned if the link's name lacks it.
    """
    match = re.search(rf"-{name}([0-9][^-]*)", link)
    return match[1] if match else default


def ranks_per_node(link: str) -> int:
    """Return how many ranks share the link of a node, by the link's name.

    "lab:500mbit-g4-2gbit" stands for 500 Mbit/s between nodes of four ranks, and 2 Gbit/s
    within a node. Without such a part in the name, a node has one rank.

    Examples
    --------
    >>> ranks_per_node("emulated:200mbit-g4-1gbit"), ranks_per_node("lab:1gbit")
    (4, 1)
    """
    group = re.search(r"-g([0-9]+)-", link)
    return int(group[1]) if group else 1


def one_way_delay_s(link: str) -> float:
    """Return the delay of a packet from rank to rank in seconds, by the link's name.

    A packet is delayed on the link of its sender and on the link of its receiver. The
    delay is 0 for links that are not emulated.
    """
    if not link.startswith("emulated:"):
        return 0.0
    return 2 * read_link(link).delay_s
