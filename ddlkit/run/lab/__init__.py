"""The shaped-network lab: real collectives between ranks in Linux network namespaces. Here: what is asked.

The link's name holds a lab's rate and what emulated links do besides: "emulated:500mbit-delay2ms-loss0.001";
`core.link` reads it back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddlkit.core.errors import UserError
from ddlkit.core.units import parse_seconds

ENGINES = ("tbf", "emulated")
MAX_RANKS = 64
_LARGEST = {"delay_s": 10.0, "loss": 0.5, "background": 0.95}


@dataclass(frozen=True)
class Conditions:
    """What an emulated link does besides its rate; raises UserError for what cannot be.

    delay_s : on each of the two links that a packet passes: a round trip takes four of them
    jitter_s : the delay of each packet differs from it by up to so much, in order between two ranks
    loss : share of all 1,500-byte frames that are lost on their way
    background : share of every link that others' traffic takes, all the time
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    background: float = 0.0

    def __post_init__(self) -> None:
        for field, most in _LARGEST.items():
            name, value = field.removesuffix("_s"), getattr(self, field)
            if not 0 <= value <= most:
                raise UserError(f"{name} {value:g}: {name} lies between 0 and {most:g}")
        if not 0 <= self.jitter_s <= self.delay_s:
            raise UserError(f"jitter {self.jitter_s:g}: jitter is at most the delay")

    @property
    def name(self) -> str:
        """Return it as in the names of links and files, after the rate: "delay2ms-loss0.001"."""
        parts = [f"delay{_ms(self.delay_s)}"]
        parts += [f"jitter{_ms(self.jitter_s)}"] if self.jitter_s else []
        shares = {"loss": self.loss, "background": self.background}
        return "-".join([*parts, *(f"{name}{share:g}" for name, share in shares.items() if share)])


def _ms(seconds: float) -> str:
    """Write to the nanosecond, without an exponent, whose sign would read as a dash between names."""
    return f"{seconds * 1e3:.6f}".rstrip("0").rstrip(".") + "ms"


def parse_share(text: str) -> float:
    """Read a share, ``"0.1%"`` or ``"0.001"``. Raises UserError."""
    percent = text.strip().endswith("%")
    try:
        # By the digits as written: 0.1 / 100 would differ from 0.001.
        return float(f"{text.strip().removesuffix('%')}e-2" if percent else text)
    except ValueError:
        raise UserError(f"{text!r} is not a share: write for example 0.1% or 0.001") from None


def parse(given: Mapping[str, str]) -> Conditions:
    """Read conditions as a command or a file describes them: {"delay": "2ms", "loss": "0.1%"}."""
    times = {f"{name}_s": parse_seconds(given[name]) for name in given.keys() & {"delay", "jitter"}}
    shares = {name: parse_share(given[name]) for name in given.keys() & {"loss", "background"}}
    return Conditions(**times, **shares)


@dataclass(frozen=True)
class LabShape:
    """A lab that is not up yet: ``workers`` links, each both ways. Raises UserError for what cannot be.

    conditions : of emulated links; None: those of tbf, which have a rate and nothing else
    """

    workers: int
    rate_bits_per_s: float
    conditions: Conditions | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.workers <= MAX_RANKS:
            raise UserError(f"a lab of {self.workers} ranks is not possible: 1 to {MAX_RANKS} are")
        if not 1e6 <= (rate := self.rate_bits_per_s) <= 1e11:
            complaint = f"lab rate {rate:g} bit/s is not between 1mbit and 100gbit"
            raise UserError(f"{complaint}: write it with its unit, for example 1gbit")

    @classmethod
    def from_dict(cls, described: dict[str, Any]) -> LabShape:
        """Make the shape that `dataclasses.asdict` and JSON have made a dictionary of."""
        conditions = described["conditions"]
        return cls(**{**described, "conditions": conditions and Conditions(**conditions)})

    @property
    def link(self) -> str:
        """Return the link as it appears in tables: "lab:1gbit", "emulated:1gbit-delay2ms"."""
        unit, size = ("gbit", 1e9) if self.rate_bits_per_s >= 1e9 else ("mbit", 1e6)
        rate = f"{self.rate_bits_per_s / size:.6g}{unit}"
        return f"emulated:{rate}-{self.conditions.name}" if self.conditions else f"lab:{rate}"

    @property
    def name(self) -> str:
        """Return it as in file names: "p16-1gbit", "p4-emulated-500mbit-delay2ms"."""
        return f"p{self.workers}-{self.link.removeprefix('lab:').replace(':', '-')}"
