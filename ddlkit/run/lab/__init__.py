"""The shaped-network lab: real collectives between ranks in Linux network namespaces. Here: what is asked.

A lab's ranks, rates, and what emulated links do to packets besides, are written into the link's name, from
which `core.link` reads them back: "emulated:500mbit-delay2ms-loss0.001".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ddlkit.core.errors import UserError
from ddlkit.core.units import parse_seconds

ENGINES = ("tbf", "emulated")
MIN_RATE_BITS_PER_S, MAX_RATE_BITS_PER_S = 1e6, 1e11
MAX_RANKS = 64


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
        for field, most in {"delay_s": 10.0, "loss": 0.5, "background": 0.95}.items():
            if not 0 <= getattr(self, field) <= most:
                name = field.removesuffix("_s")
                wrong = f"{name} {getattr(self, field):g}"
                raise UserError(f"{wrong}: {name} lies between 0 and {most:g}")
        if not 0 <= self.jitter_s <= self.delay_s:
            raise UserError(f"jitter {self.jitter_s:g}: jitter is at most the delay")

    @property
    def name(self) -> str:
        """Return it as in the names of links and files, after the rate: "delay2ms-loss0.001"."""
        parts = {
            f"delay{_ms(self.delay_s)}": True,
            f"jitter{_ms(self.jitter_s)}": self.jitter_s,
            f"loss{self.loss:g}": self.loss,
            f"background{self.background:g}": self.background,
        }
        return "-".join(part for part, there in parts.items() if there)


def _ms(seconds: float) -> str:
    """Write to the nanosecond, without an exponent, whose sign would read as a dash between names."""
    return f"{seconds * 1e3:.6f}".rstrip("0").rstrip(".") + "ms"


def rate_text(bits_per_s: float) -> str:
    """Write a rate as ``core.units.parse_bits_per_s`` reads it: ``"1gbit"``, ``"200mbit"``."""
    unit, size = ("gbit", 1e9) if bits_per_s >= 1e9 else ("mbit", 1e6)
    return f"{bits_per_s / size:.6g}{unit}"


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
    read: dict[str, Callable[[str], float]] = {"delay": parse_seconds, "jitter": parse_seconds}
    values = {name: read.get(name, parse_share)(text) for name, text in given.items()}
    return Conditions(**{f"{name}_s" if name in read else name: x for name, x in values.items()})


@dataclass(frozen=True)
class LabShape:
    """A lab that is not up yet: ``workers`` links of ``rate_bits_per_s`` both ways.

    ranks_per_node : with more than one, that many ranks in a row form a node and share one link of
        that rate; inside the node each rank's own is shaped to ``intra_rate_bits_per_s``
    conditions : of emulated links; None: those of tbf, which have a rate and nothing else

    Raises UserError for a rate or a number of ranks out of range, and for nodes over emulated links.
    """

    workers: int
    rate_bits_per_s: float
    ranks_per_node: int = 1
    intra_rate_bits_per_s: float = 0.0
    conditions: Conditions | None = None

    def __post_init__(self) -> None:
        per_node, intra = self.ranks_per_node, self.intra_rate_bits_per_s
        lowest, highest = MIN_RATE_BITS_PER_S, MAX_RATE_BITS_PER_S
        rates = [self.rate_bits_per_s, *([intra] if intra else [])]
        checks = {
            f"a lab of {self.workers} ranks is not possible: 1 to {MAX_RANKS} are": 1
            <= self.workers
            <= MAX_RANKS,
            f"nodes of {per_node} ranks cannot hold {self.workers}: choose a number that divides it": (
                per_node > 0 and self.workers % per_node == 0
            ),
            f"nodes of {per_node} ranks with an intra rate of {intra:g} bit/s: several need one, for "
            "example 10gbit, one has none": (per_node > 1) == bool(intra),
            "ranks that share a node's link need the engine tbf: leave emulated out": per_node == 1
            or not self.conditions,
            f"lab rates {rates} bit/s are not between 1mbit and 100gbit: write them with their unit, for "
            "example 1gbit": all(lowest <= rate <= highest for rate in rates),
        }
        for complaint, right in checks.items():
            if not right:
                raise UserError(complaint)

    @classmethod
    def from_dict(cls, described: dict[str, Any]) -> LabShape:
        """Make the shape that `dataclasses.asdict` and JSON have made a dictionary of."""
        conditions = described.get("conditions")
        return cls(**{**described, "conditions": Conditions(**conditions) if conditions else None})

    @property
    def own_rate_bits_per_s(self) -> float:
        """Return the rate of each rank's own link."""
        return self.intra_rate_bits_per_s or self.rate_bits_per_s

    @property
    def nodes(self) -> range:
        """Return the numbers of the nodes that ranks share; none where each rank has a link of its own."""
        return range(self.workers // self.ranks_per_node if self.ranks_per_node > 1 else 0)

    @property
    def link(self) -> str:
        """Return the link as it appears in tables: "lab:1gbit", "emulated:1gbit-delay2ms"."""
        name = self.name.partition("-")[2]
        return name.replace("-", ":", 1) if self.conditions else f"lab:{name}"

    @property
    def name(self) -> str:
        """Return it as in file names: "p16-1gbit-g4-10gbit", "p4-emulated-500mbit-delay2ms"."""
        names = [f"p{self.workers}", *(["emulated"] if self.conditions else [])]
        names.append(rate_text(self.rate_bits_per_s))
        if self.nodes:
            names += [f"g{self.ranks_per_node}", rate_text(self.intra_rate_bits_per_s)]
        return "-".join([*names, *([self.conditions.name] if self.conditions else [])])
