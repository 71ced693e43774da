"""What a lab is asked to be: its ranks and rates, and what emulated links do to packets besides.

Read from the command line or a campaign, written into the link's name, from which `core.lablink` reads
them back: "emulated:500mbit-delay2ms-loss0.001".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ddlkit.core.errors import UserError
from ddlkit.core.units import parse_seconds

ENGINES = ("tbf", "emulated")
MIN_RATE_BITS_PER_S, MAX_RATE_BITS_PER_S = 1e6, 1e11
MAX_DELAY_S = 10.0
MAX_RANKS = 64
CONGESTION = ("reno", "cubic", "bbr")
GONE = {
    "change": "links no longer change: take the lab down, and make one with the other rate",
    "rank_rate": "all links have one rate: --ranks-per-node gives nodes a link of their own",
    "rank_delay": "all links have one delay: give --delay",
    "queue": "nothing is dropped for want of room any more: --loss drops frames",
    "burst": "emulated links save nothing up: --engine tbf does",
    "framing": "emulated links count 38 bytes around a packet, as a wire: --engine tbf counts 14",
}
"""Options that emulated links had, and what to do in place of each."""


@dataclass(frozen=True)
class Conditions:
    """What an emulated link does besides its rate.

    delay_s : on each of the two links that a packet passes: a round trip takes four of them
    jitter_s : the delay of each packet differs from it by up to so much, in order between two ranks
    loss : share of all 1,500-byte frames that are lost on their way, drawn from ``seed``
    background : share of every link that others' traffic takes, all the time
    congestion : control of TCP's

    Raises UserError for what cannot be.
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    background: float = 0.0
    congestion: str = CONGESTION[0]
    seed: int = 0

    def __post_init__(self) -> None:
        _check("delay", self.delay_s, MAX_DELAY_S)
        _check("jitter", self.jitter_s, self.delay_s, "is at most the delay")
        _check("loss", self.loss, 0.5)
        _check("background", self.background, 0.95)
        if self.congestion not in CONGESTION:
            raise UserError(f"congestion control {self.congestion!r}: use {', '.join(CONGESTION)}")

    @property
    def name(self) -> str:
        """As it appears in the names of links and files, after the rate.

        >>> Conditions(delay_s=2e-3, jitter_s=2e-4, loss=1e-3).name
        'delay2ms-jitter0.2ms-loss0.001'
        """
        parts = [f"delay{_ms(self.delay_s)}"]
        parts += [f"jitter{_ms(self.jitter_s)}"] if self.jitter_s else []
        parts += [f"loss{self.loss:g}"] if self.loss else []
        parts += [f"background{self.background:g}"] if self.background else []
        parts += [self.congestion] if self.congestion != CONGESTION[0] else []
        parts += [f"seed{self.seed}"] if self.seed else []
        return "-".join(parts)


def rate_text(bits_per_s: float) -> str:
    """Write a rate as ``core.units.parse_bits_per_s`` reads it: ``"1gbit"``, ``"200mbit"``."""
    unit, size = next((u, s) for u, s in (("gbit", 1e9), ("mbit", 1e6)) if bits_per_s >= s)
    return f"{bits_per_s / size:.6g}{unit}"


def check_rate(rate_bits_per_s: float) -> None:
    """Raise UserError for a rate out of range."""
    if not MIN_RATE_BITS_PER_S <= rate_bits_per_s <= MAX_RATE_BITS_PER_S:
        complaint = f"lab rate {rate_bits_per_s:g} bit/s is not between 1mbit and 100gbit"
        raise UserError(f"{complaint}: write it with its unit, for example 1gbit")


def parse(given: Mapping[str, Any]) -> Conditions:
    """Read conditions as a command or a file describes them, in text.

    >>> parse({"delay": "2ms", "loss": "0.1%"}).name
    'delay2ms-loss0.001'

    Raises UserError for what cannot be, and for options that links no longer have.
    """
    for name in given:
        if name in GONE:
            raise UserError(f"--{name.replace('_', '-')}: {GONE[name]}")
    return Conditions(**{_READ[name][0]: _READ[name][1](text) for name, text in given.items()})


def parse_share(text: str) -> float:
    """Read a share, ``"0.1%"`` or ``"0.001"``. Raises UserError.

    >>> parse_share("0.1%"), parse_share("0.02")
    (0.001, 0.02)
    """
    percent = text.strip().endswith("%")
    try:
        # By the digits as written: 0.1 / 100 would differ from 0.001.
        return float(f"{text.strip().removesuffix('%')}e-2" if percent else text)
    except ValueError:
        raise UserError(f"{text!r} is not a share: write for example 0.1% or 0.001") from None


def parse_background(text: str) -> float:
    """Read the share that others take all the time, ``"40%"``. Raises UserError, also for turns."""
    if ":" in text:
        raise UserError(f"background {text!r}: others no longer take turns, write a load as 40%")
    return parse_share(text)


_READ: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "delay": ("delay_s", parse_seconds),
    "jitter": ("jitter_s", parse_seconds),
    "loss": ("loss", parse_share),
    "background": ("background", parse_background),
    "congestion": ("congestion", str),
    "seed": ("seed", int),
}


def _ms(seconds: float) -> str:
    """To the nanosecond, without an exponent, whose sign would read as a dash between names."""
    return f"{seconds * 1e3:.6f}".rstrip("0").rstrip(".") + "ms"


def _check(what: str, value: float, high: float, why: str = "") -> None:
    if not 0 <= value <= high:
        raise UserError(f"{what} {value:g}: {what} {why or f'lies between 0 and {high:g}'}")


# -- a whole lab ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class LabShape:
    """A lab that is not up yet: ``workers`` links of ``rate_bits_per_s`` both ways.

    ranks_per_node : with more than one, that many ranks in a row form a node and share one link of
        that rate; inside the node each rank's own is shaped to ``intra_rate_bits_per_s``
    conditions : of emulated links; None: those of tbf, which have a rate and nothing else

    Raises UserError for a rate or a number of ranks out of range.
    """

    workers: int
    rate_bits_per_s: float
    ranks_per_node: int = 1
    intra_rate_bits_per_s: float = 0.0
    conditions: Conditions | None = None

    def __post_init__(self) -> None:
        per_node, intra = self.ranks_per_node, self.intra_rate_bits_per_s
        if not 1 <= self.workers <= MAX_RANKS:
            raise UserError(f"a lab of {self.workers} ranks is not possible: 1 to {MAX_RANKS} are")
        if per_node < 1 or self.workers % per_node:
            complaint = f"nodes of {per_node} ranks cannot hold {self.workers}"
            raise UserError(f"{complaint}: choose a number that divides it")
        if (per_node > 1) != bool(intra):
            complaint = f"nodes of {per_node} ranks with an intra rate of {intra:g} bit/s"
            raise UserError(f"{complaint}: several need one, for example 10gbit, one has none")
        for rate in (self.rate_bits_per_s, self.own_rate_bits_per_s):
            check_rate(rate)

    @classmethod
    def from_dict(cls, described: dict[str, Any]) -> LabShape:
        """Make the shape that `dataclasses.asdict` and JSON have made a dictionary of."""
        conditions = described.get("conditions")
        return cls(**{**described, "conditions": Conditions(**conditions) if conditions else None})

    @property
    def own_rate_bits_per_s(self) -> float:
        """Rate of each rank's own link."""
        return self.intra_rate_bits_per_s or self.rate_bits_per_s

    @property
    def link(self) -> str:
        """The link as it appears in tables: "lab:1gbit", "emulated:1gbit-delay2ms"."""
        if not self.conditions:
            return f"lab:{self.name.partition('-')[2]}"
        return self.name.partition("-")[2].replace("-", ":", 1)

    @property
    def name(self) -> str:
        """As it appears in file names.

        >>> LabShape(16, 1e9, ranks_per_node=4, intra_rate_bits_per_s=1e10).name
        'p16-1gbit-g4-10gbit'
        >>> LabShape(4, 5e8, conditions=Conditions(delay_s=2e-3)).name
        'p4-emulated-500mbit-delay2ms'
        """
        names = [f"p{self.workers}", *(["emulated"] if self.conditions else [])]
        names.append(rate_text(self.rate_bits_per_s))
        if self.nodes:
            names += [f"g{self.ranks_per_node}", rate_text(self.intra_rate_bits_per_s)]
        return "-".join([*names, *([self.conditions.name] if self.conditions else [])])

    @property
    def nodes(self) -> range:
        """Numbers of the nodes that ranks share; none where each rank has a link of its own."""
        return range(self.workers // self.ranks_per_node if self.ranks_per_node > 1 else 0)
