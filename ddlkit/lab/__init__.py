"""The shaped-network lab: what is asked of it, which the link's name says, and `core.link` reads back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddlkit.core.errors import UserError
from ddlkit.core.units import parse_seconds

ENGINES = ("tbf", "emulated")
MAX_RANKS = 64
MOST_DELAY_S, MOST_LOSS = 10.0, 0.5


@dataclass(frozen=True)
class Conditions:
    """What an emulated link does besides its rate; raises UserError for what cannot be.

    delay_s : on each of the two links that a packet passes: a round trip takes four of them
    loss : share of all 1,500-byte frames that are lost on their way
    """

    delay_s: float = 0.0
    loss: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.delay_s <= MOST_DELAY_S:
            raise UserError(
                f"delay {self.delay_s:g}: lies between 0 and {MOST_DELAY_S:g} s"
            )
        if not 0 <= self.loss <= MOST_LOSS:
            raise UserError(f"loss {self.loss:g}: lies between 0 and {MOST_LOSS:g}")

    @property
    def name(self) -> str:
        """Return it as in the names of links and files, after the rate: "delay2ms-loss0.001"."""
        # To the nanosecond, without an exponent, whose sign would read as a dash between names.
        delay = f"{self.delay_s * 1e3:.6f}".rstrip("0").rstrip(".")
        return f"delay{delay}ms" + (f"-loss{self.loss:g}" if self.loss else "")


def parse_share(text: str) -> float:
    """Read a share, ``"0.1%"`` or ``"0.001"``. Raises UserError."""
    try:  # by the digits as written: 0.1 / 100 would differ from 0.001
        return float(text.strip().replace("%", "e-2"))
    except ValueError:
        raise UserError(
            f"{text!r} is not a share: write for example 0.1% or 0.001"
        ) from None


def parse(given: Mapping[str, str]) -> Conditions:
    """Read conditions as a command or a file describes them: {"delay": "2ms", "loss": "0.1%"}."""
    delay, loss = given.get("delay", "0s"), given.get("loss", "0")
    return Conditions(parse_seconds(delay), parse_share(loss))


@dataclass(frozen=True)
class LabShape:
    """A lab that is not up yet: ``workers`` links, both ways; conditions : None for tbf. Raises UserError."""

    workers: int
    rate_bits_per_s: float
    conditions: Conditions | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= MAX_RANKS:
            raise UserError(
                f"a lab of {self.workers} ranks is not possible: 1 to {MAX_RANKS} are"
            )
        if not 1e6 <= (rate := self.rate_bits_per_s) <= 1e11:
            complaint = f"lab rate {rate:g} bit/s is not between 1mbit and 100gbit"
            raise UserError(f"{complaint}: write it with its unit, for example 1gbit")

    @classmethod
    def from_dict(cls, described: dict[str, Any]) -> LabShape:
        """Make the shape that `dataclasses.asdict` and JSON have made a dictionary of."""
        conditions = described["conditions"]
        return cls(
            workers=described["workers"],
            rate_bits_per_s=described["rate_bits_per_s"],
            conditions=conditions and Conditions(**conditions),
        )

    @property
    def link(self) -> str:
        """Return the link as it appears in tables: "lab:1gbit", "emulated:1gbit-delay2ms"."""
        unit, size = ("gbit", 1e9) if self.rate_bits_per_s >= 1e9 else ("mbit", 1e6)
        rate = f"{self.rate_bits_per_s / size:.6g}{unit}"
        return (
            f"emulated:{rate}-{self.conditions.name}"
            if self.conditions
            else f"lab:{rate}"
        )

    @property
    def name(self) -> str:
        """Return it as in file names: "p16-1gbit", "p4-emulated-500mbit-delay2ms"."""
        return f"p{self.workers}-{self.link.removeprefix('lab:').replace(':', '-')}"
