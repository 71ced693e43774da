"""What an emulated link does to packets: its delay, jitter and loss, what shares it, and how that changes.

Read from the command line or a campaign, written into the link's name, from which `core.lablink` reads
them back: "emulated:500mbit-delay2ms-loss0.001".
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ddlkit.core.errors import UserError
from ddlkit.core.lablink import FRAMING_BYTES
from ddlkit.core.units import parse_bits_per_s, parse_bytes, parse_seconds

ENGINES = ("tbf", "emulated")
MIN_RATE_BITS_PER_S, MAX_RATE_BITS_PER_S = 1e6, 1e11
MAX_DELAY_S = 10.0
QUEUE_BYTES = 64 * 1024**2  # above what TCP keeps in flight, so that nothing is dropped unasked
MIN_QUEUE_BYTES = 128 * 1024  # two of the largest packets
MAX_FRAMING_BYTES = 1000
CONGESTION = ("reno", "cubic", "bbr")


@dataclass(frozen=True)
class Background:
    """Traffic of others, which takes ``load`` of every link before our packets get any.

    on_s, off_s : how long it lasts and rests, in turns; without a rest it is constant
    """

    load: float
    on_s: float = 0.0
    off_s: float = 0.0

    def __post_init__(self) -> None:
        _check("background", self.load, 0.0, 0.95)
        if not (0 <= self.on_s < math.inf and 0 <= self.off_s < math.inf):
            raise UserError("background traffic lasts and rests for finite times")
        if self.off_s and not self.on_s:
            raise UserError("background traffic that rests must also last: write 40%:100ms/300ms")

    @property
    def period_s(self) -> float:
        """Of one turn; 0 where it is constant."""
        return self.on_s + self.off_s if self.off_s else 0.0


@dataclass(frozen=True)
class Change:
    """From ``at_s`` on, links do something else; what is None stays as it is.

    at_s : counted from when the link starts, or from when a running link hears of the change
    ranks : whose links; () all
    """

    at_s: float
    rate_bits_per_s: float | None = None
    delay_s: float | None = None
    loss: float | None = None
    ranks: tuple[int, ...] = ()
    jitter_s: float | None = None
    background: Background | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.at_s < math.inf:
            raise UserError(f"a change at {self.at_s:g} s: 0 s or later is possible")
        if all(getattr(self, name) is None for name, _ in _CHANGED.values()):
            raise UserError(
                f"the change at {self.at_s:g} s changes nothing: give {', '.join(_CHANGED)}"
            )
        check_rate(self.rate_bits_per_s)
        for name in ("delay", "jitter"):
            _check(name, getattr(self, f"{name}_s"), 0.0, MAX_DELAY_S)
        _check("loss", self.loss, 0.0, 0.5)


@dataclass(frozen=True)
class Conditions:
    """What an emulated link does besides its rate.

    delay_s : on each of the two links that a packet passes: a round trip takes four of them
    jitter_s : the delay of each packet differs from it by up to so much, in order between two ranks, but is
        never below zero where a change has made it shorter
    loss : share of all 1,500-byte frames that are lost on their way, drawn from ``seed``
    rates, delays : (rank, bits per second) and (rank, seconds) of ranks whose links are not as the others
    changes : in the order of their times
    queue_bytes : what may wait for a link; what comes beyond is dropped
    burst_s : what a rested link may send at once, in seconds of its rate, as tbf's does; a wire has none
    congestion : control of TCP's
    framing_bytes : counted around each frame's packet: as on a wire; tbf counts 14

    Raises UserError for what cannot be, and for changes out of order.
    """

    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    seed: int = 0
    rates: tuple[tuple[int, float], ...] = ()
    delays: tuple[tuple[int, float], ...] = ()
    changes: tuple[Change, ...] = ()
    background: Background = field(default_factory=lambda: Background(0.0))
    queue_bytes: int = QUEUE_BYTES
    burst_s: float = 0.0
    congestion: str = CONGESTION[0]
    framing_bytes: int = FRAMING_BYTES

    def __post_init__(self) -> None:
        _check("delay", self.delay_s, 0.0, MAX_DELAY_S)
        _check("jitter", self.jitter_s, 0.0, self.delay_s, "is at most the delay")
        _check("loss", self.loss, 0.0, 0.5)
        for _, rate_bits_per_s in self.rates:
            check_rate(rate_bits_per_s)
        for _, delay_s in self.delays:
            _check("delay", delay_s, self.jitter_s, MAX_DELAY_S)
        _check("burst", self.burst_s, 0.0, MAX_DELAY_S)
        _check("framing", self.framing_bytes, 0, MAX_FRAMING_BYTES)
        check_order(self.changes)
        if self.queue_bytes < MIN_QUEUE_BYTES:
            raise UserError(f"a queue of {self.queue_bytes} bytes: at least {MIN_QUEUE_BYTES}")
        if self.congestion not in CONGESTION:
            raise UserError(f"congestion control {self.congestion!r}: use {', '.join(CONGESTION)}")

    @classmethod
    def from_dict(cls, described: Mapping[str, Any]) -> Conditions:
        """What `dataclasses.asdict` and JSON have made of one."""
        pairs = {name: tuple(map(tuple, described[name])) for name in ("rates", "delays")}
        changes = tuple(map(read_change, described["changes"]))
        background = Background(**described["background"])
        return cls(**{**described, **pairs, "changes": changes, "background": background})

    def check_ranks(self, ranks: int) -> None:
        """Raise UserError for a rank that a lab of so many does not have."""
        named = [rank for rank, _ in (*self.rates, *self.delays)]
        named += [rank for change in self.changes for rank in change.ranks]
        for rank in named:
            if not 0 <= rank < ranks:
                raise UserError(f"no link of rank {rank}: a lab of {ranks} has 0 to {ranks - 1}")

    @property
    def name(self) -> str:
        """As it appears in the names of links and files, after the rate.

        >>> Conditions(delay_s=2e-3, jitter_s=2e-4, loss=1e-3).name
        'delay2ms-jitter0.2ms-loss0.001'
        """
        parts = [f"delay{_ms(self.delay_s)}"]
        parts += [f"jitter{_ms(self.jitter_s)}"] if self.jitter_s else []
        parts += [f"loss{self.loss:g}"] if self.loss else []
        parts += [f"rank{rank}.{rate_text(rate)}" for rank, rate in self.rates]
        parts += [f"rank{rank}.{_ms(delay)}" for rank, delay in self.delays]
        share = self.background
        if share.load:
            turns = f".{_ms(share.on_s)}.{_ms(share.off_s)}" if share.off_s else ""
            parts.append(f"background{share.load:g}{turns}")
        parts += [f"burst{_ms(self.burst_s)}"] if self.burst_s else []
        parts += [f"framing{self.framing_bytes}"] if self.framing_bytes != FRAMING_BYTES else []
        parts += [self.congestion] if self.congestion != CONGESTION[0] else []
        parts += [f"queue{self.queue_bytes}"] if self.queue_bytes != QUEUE_BYTES else []
        parts += [f"seed{self.seed}"] if self.seed else []
        if self.changes:
            said = json.dumps([asdict(change) for change in self.changes]).encode()
            parts.append(f"changes{hashlib.sha256(said).hexdigest()[:8]}")
        return "-".join(parts)


def rate_text(bits_per_s: float) -> str:
    """``"1gbit"``, ``"200mbit"``: as ``core.units.parse_bits_per_s`` reads it."""
    unit, size = next((u, s) for u, s in (("gbit", 1e9), ("mbit", 1e6)) if bits_per_s >= s)
    return f"{bits_per_s / size:.6g}{unit}"


def check_rate(rate_bits_per_s: float | None) -> None:
    """Raise UserError for a rate out of range; None is no rate."""
    if rate_bits_per_s is None or MIN_RATE_BITS_PER_S <= rate_bits_per_s <= MAX_RATE_BITS_PER_S:
        return
    complaint = f"lab rate {rate_bits_per_s:g} bit/s is not between 1mbit and 100gbit"
    raise UserError(f"{complaint}: write it with its unit, for example 1gbit")


def check_order(changes: tuple[Change, ...]) -> None:
    """Raise UserError for a change before the one that it stands behind."""
    for before, after in zip(changes, changes[1:], strict=False):
        if after.at_s < before.at_s:
            complaint = f"a change at {after.at_s:g} s stands behind one at {before.at_s:g} s"
            raise UserError(f"{complaint}: write the changes in the order of their times")


def parse(given: Mapping[str, Any]) -> Conditions:
    """Conditions as a command or a file describes them, in text. Raises UserError.

    >>> parse({"delay": "2ms", "loss": "0.1%", "rank_rate": ["1=250mbit"]}).name
    'delay2ms-loss0.001-rank1.250mbit'
    """
    known = {name: (home, read) for name, (home, read) in _PARSED.items() if name in given}
    return Conditions(**{home: read(given[name]) for name, (home, read) in known.items()})


def parse_share(text: str) -> float:
    """``"0.1%"`` or ``"0.001"`` as a share. Raises UserError.

    >>> parse_share("0.1%"), parse_share("0.02")
    (0.001, 0.02)
    """
    percent = text.strip().endswith("%")
    try:
        # By the digits as written: 0.1 / 100 would differ from 0.001.
        return float(f"{text.strip().removesuffix('%')}e-2" if percent else text)
    except ValueError:
        raise UserError(f"{text!r} is not a share: write for example 0.1% or 0.001") from None


def parse_background(text: str) -> Background:
    """``"40%"``, all the time, or ``"80%:100ms/300ms"``, on and off in turns. Raises UserError."""
    load, separator, turns = text.partition(":")
    on, slash, off = turns.partition("/")
    if separator and not (on and slash and off):
        raise UserError(f"background {text!r}: write for example 40% or 80%:100ms/300ms")
    times = (parse_seconds(on), parse_seconds(off)) if separator else (0.0, 0.0)
    return Background(parse_share(load), *times)


def parse_change(text: str) -> Change:
    """``"5s:rate=250mbit,rank=1"``: what changes when, and for which rank. Raises UserError.

    >>> change = parse_change("5s:delay=4ms,loss=1%")
    >>> change.at_s, change.delay_s, change.loss
    (5.0, 0.004, 0.01)
    """
    at, _, said = text.partition(":")
    values: dict[str, Any] = {}
    for part in said.split(","):
        name, _, value = part.partition("=")
        if name == "rank" and value.isdecimal():
            values["ranks"] = (*values.get("ranks", ()), int(value))
        elif name in _CHANGED and value:
            field_name, parse = _CHANGED[name]
            values[field_name] = parse(value)
        else:
            raise UserError(f"change {text!r}: write for example 5s:rate=250mbit,rank=1")
    return Change(parse_seconds(at), **values)


def parse_changes(text: str) -> tuple[Change, ...]:
    """Changes one after the other: ``"0s:rate=250mbit;0.3s:loss=1%"``; none in an empty text.

    Raises UserError for one that is wrong, and for changes out of order.
    """
    changes = tuple(map(parse_change, filter(None, text.split(";"))))
    check_order(changes)
    return changes


_CHANGED: dict[str, tuple[str, Callable[[str], Any]]] = {
    "rate": ("rate_bits_per_s", parse_bits_per_s),
    "delay": ("delay_s", parse_seconds),
    "loss": ("loss", parse_share),
    "jitter": ("jitter_s", parse_seconds),
    "background": ("background", parse_background),
}


def parse_of_rank(text: str, parse: Any) -> tuple[int, float]:
    """``"1=250mbit"``: a rank and what its link has. Raises UserError."""
    rank, separator, value = text.partition("=")
    if not (separator and rank.isdecimal()):
        raise UserError(f"{text!r}: write the rank and its value, for example 1=250mbit")
    return int(rank), parse(value)


_PARSED: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "delay": ("delay_s", parse_seconds),
    "jitter": ("jitter_s", parse_seconds),
    "loss": ("loss", parse_share),
    "background": ("background", parse_background),
    "rank_rate": ("rates", lambda all_: tuple(parse_of_rank(t, parse_bits_per_s) for t in all_)),
    "rank_delay": ("delays", lambda all_: tuple(parse_of_rank(t, parse_seconds) for t in all_)),
    "change": ("changes", tuple),
    "queue": ("queue_bytes", parse_bytes),
    "burst": ("burst_s", parse_seconds),
    "congestion": ("congestion", str),
    "framing": ("framing_bytes", int),
    "seed": ("seed", int),
}


def read_change(described: Mapping[str, Any]) -> Change:
    """What `dataclasses.asdict` and JSON have made of one."""
    share = described.get("background")
    nested = {"ranks": tuple(described["ranks"]), "background": share and Background(**share)}
    return Change(**{**described, **nested})


def _ms(seconds: float) -> str:
    """To the nanosecond, without an exponent, whose sign would read as a dash between names."""
    return f"{seconds * 1e3:.6f}".rstrip("0").rstrip(".") + "ms"


def _check(what: str, value: float | None, low: float, high: float, why: str = "") -> None:
    if value is not None and not low <= value <= high:
        reason = why or f"lies between {low:g} and {high:g}"
        raise UserError(f"{what} {value:g}: {what} {reason}")
