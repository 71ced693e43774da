"""The lab: real collectives between Linux network namespaces, over limited links.

This module says which lab is asked for. The name of the link holds the rate of a lab
and what emulated links do besides, as in "emulated:500mbit-delay2ms-loss0.001".
`read_link` of `ddlkit.core` reads that name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddlkit.core.errors import UserError
from ddlkit.core.units import parse_seconds

ENGINES = ("tbf", "emulated")
"""What limits rates: the kernel's token buckets, or a process of this library."""
MAX_RANKS = 64
"""The most ranks of a lab."""
LEAST_RATE_BITS_PER_S = 1e6
"""The lowest rate of a lab's links, in bit/s."""
MOST_RATE_BITS_PER_S = 1e11
"""The highest rate of a lab's links, in bit/s."""
MOST_DELAY_S = 10.0
"""The longest delay of an emulated link."""
MOST_LOSS = 0.5
"""The largest share of frames that emulated links lose."""


@dataclass(frozen=True)
class Conditions:
    """What an emulated link does besides limiting the rate.

    Attributes
    ----------
    delay_s : float
        The delay of each of the two links that a packet passes, in seconds. A packet
        and its answer together are delayed four times.
    loss : float
        The share of all frames, of at most 1,500 bytes, that are lost on their way.

    Raises
    ------
    UserError
        If the delay is not between 0 and `MOST_DELAY_S`, or the loss not between 0 and
        `MOST_LOSS`.

    Examples
    --------
    >>> Conditions(delay_s=0.002, loss=0.001).name
    'delay2ms-loss0.001'
    """

    delay_s: float = 0.0
    loss: float = 0.0

    def __post_init__(self) -> None:
        # NaN is in no range, so that it is refused, too.
        if not 0 <= self.delay_s <= MOST_DELAY_S:
            raise UserError(f"the delay of a link must be from 0 to {MOST_DELAY_S:g} s")
        if not 0 <= self.loss <= MOST_LOSS:
            raise UserError(f"the loss of a link must be from 0% to {MOST_LOSS:.0%}")

    @property
    def name(self) -> str:
        """Return the conditions as they stand in the names of links and files.

        The delay is always stated, and the loss only if there is one.
        """
        # Milliseconds with six decimals, to the nanosecond, without zeros at the end: "2"
        # and "0.5". The format has no exponent, whose sign would look like the dash between
        # two parts of a name.
        delay_ms = f"{self.delay_s * 1e3:.6f}".rstrip("0").rstrip(".")
        name = f"delay{delay_ms}ms"
        if self.loss:
            # Nine decimals, so that the smallest losses have no exponent, either.
            loss = f"{self.loss:.9f}".rstrip("0")
            name += f"-loss{loss}"
        return name


def parse_share(text: str) -> float:
    """Return the share that a text states.

    Parameters
    ----------
    text : str
        A number, or a number with a percent sign.

    Returns
    -------
    float
        The share. Whether it lies between 0 and 1 is not checked.

    Raises
    ------
    UserError
        If the text is neither.

    Examples
    --------
    >>> parse_share("0.1%"), parse_share("0.001")
    (0.001, 0.001)
    """
    try:
        # "0.7%" is read as "0.7e-2", the number 0.007. A division by 100 would round once
        # more: 0.7 / 100 is 0.006999999999999999.
        return float(text.strip().replace("%", "e-2"))
    except ValueError:
        raise UserError(
            f"{text!r} is not a share: write for example 0.1% or 0.001"
        ) from None


def parse(texts: Mapping[str, str]) -> Conditions:
    """Read conditions as a command or a file describes them.

    Parameters
    ----------
    texts : mapping of str to str
        The texts of ``"delay"`` and ``"loss"``. A text that is missing stands for 0.

    Returns
    -------
    Conditions

    Raises
    ------
    UserError
        If a text cannot be read, or if a value is outside the limits of `Conditions`.

    Examples
    --------
    >>> parse({"delay": "2ms", "loss": "0.1%"})
    Conditions(delay_s=0.002, loss=0.001)
    """
    delay_s = parse_seconds(texts.get("delay", "0s"))
    loss = parse_share(texts.get("loss", "0"))
    return Conditions(delay_s, loss)


def refuse_impossible_rate(rate_bits_per_s: float) -> None:
    """Refuse a rate that the links of no lab have.

    Parameters
    ----------
    rate_bits_per_s : float
        The rate in bit/s.

    Raises
    ------
    UserError
        If the rate is not between `LEAST_RATE_BITS_PER_S` and `MOST_RATE_BITS_PER_S`.
    """
    # NaN is in no range, so that it is refused, too.
    if not LEAST_RATE_BITS_PER_S <= rate_bits_per_s <= MOST_RATE_BITS_PER_S:
        least = _named_rate(LEAST_RATE_BITS_PER_S)
        most = _named_rate(MOST_RATE_BITS_PER_S)
        raise UserError(f"the rate of a link must be from {least} to {most}")


def _named_rate(rate_bits_per_s: float) -> str:
    """Return a rate as names have it, with up to six digits, as in "1gbit" or "500mbit"."""
    if rate_bits_per_s >= 1e9:
        return f"{rate_bits_per_s / 1e9:.6g}gbit"
    return f"{rate_bits_per_s / 1e6:.6g}mbit"


@dataclass(frozen=True)
class LabShape:
    """A lab that is not up yet.

    Attributes
    ----------
    workers : int
        How many ranks there are. Each has a link of its own.
    rate_bits_per_s : float
        The rate of each link, both ways, in bit/s.
    conditions : Conditions, optional
        What emulated links do besides. Without conditions the kernel's token buckets
        limit the rate.

    Raises
    ------
    UserError
        If there are fewer than 1 or more than `MAX_RANKS` ranks, or if the rate is not
        between 1 Mbit/s and 100 Gbit/s.

    Examples
    --------
    >>> LabShape(16, 1e9).link, LabShape(4, 5e8, Conditions(delay_s=0.002)).name
    ('lab:1gbit', 'p4-emulated-500mbit-delay2ms')
    """

    workers: int
    rate_bits_per_s: float
    conditions: Conditions | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= MAX_RANKS:
            raise UserError(
                f"a lab of {self.workers} ranks is not possible: use 1 to {MAX_RANKS}"
            )
        refuse_impossible_rate(self.rate_bits_per_s)

    @classmethod
    def from_dict(cls, described: dict[str, Any]) -> LabShape:
        """Return a shape that was written as JSON.

        Parameters
        ----------
        described : dict
            The result of `dataclasses.asdict` for a shape. Its conditions are a dict, or
            None if the shape has none.

        Returns
        -------
        LabShape

        Raises
        ------
        KeyError or TypeError
            If a field is missing, or has a value of another type.
        UserError
            If such a shape is not possible.
        """
        conditions = None
        if described["conditions"]:
            conditions = Conditions(**described["conditions"])
        return cls(
            workers=described["workers"],
            rate_bits_per_s=described["rate_bits_per_s"],
            conditions=conditions,
        )

    @property
    def link(self) -> str:
        """Return the name of the link in tables, such as "emulated:1gbit-delay2ms".

        With conditions the link is emulated. Without conditions the token buckets of
        the kernel limit the rate, and the name begins with "lab", as in "lab:1gbit".
        The rate has up to six significant digits.
        """
        rate = _named_rate(self.rate_bits_per_s)
        if self.conditions:
            return f"emulated:{rate}-{self.conditions.name}"
        return f"lab:{rate}"

    @property
    def name(self) -> str:
        """Return the name of the lab in file names, such as "p16-1gbit"."""
        # File names have no colon: "lab:1gbit" becomes "1gbit", and "emulated:1gbit-..."
        # becomes "emulated-1gbit-...".
        link = self.link.removeprefix("lab:").replace(":", "-")
        return f"p{self.workers}-{link}"
