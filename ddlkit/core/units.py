"""Units: parse what people write once, at the edge, and print it back readably.

Decimal prefixes are powers of 1000 (GB = 1e9 bytes), binary ones powers of 1024 (GiB = 2**30).
Inside the package every quantity is in bytes, bits per second, seconds or FLOP.
"""

from __future__ import annotations

import math
import re

from ddlkit.core.errors import UserError

KB, MB, GB = 1000, 1000**2, 1000**3
KIB, MIB, GIB = 1024, 1024**2, 1024**3

LEAST, MOST = 1e-30, 1e30
"""Between these lies every time, rate and number of FLOP that somebody means, with room to multiply; below
and beyond, arithmetic ends at 0 or at infinity."""
MOST_WHOLE = 10**14
"""Of bytes, elements and counts in a file: a hundred terabytes. Sums of many thousands fit 64 bits."""

_NUMBER = re.compile(r"^\s*([0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)\s*([A-Za-zµ/]*)\s*$")

BYTES = {"": 1, "B": 1, "KB": KB, "MB": MB, "GB": GB, "KIB": KIB, "MIB": MIB, "GIB": GIB}
_BITS_PER_S = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_SECONDS |= {"m": 60.0, "h": 3600.0}


def _split(text: str, what: str, example: str) -> tuple[float, str]:
    match = _NUMBER.match(text)
    if not match:
        raise UserError(f"{what} {text!r} is not a number with a unit: write for example {example}")
    value = float(match.group(1))
    if value > MOST_WHOLE:
        raise UserError(f"{what} {text!r} is too large: write for example {example}")
    return value, match.group(2)


def parse_bytes(text: str) -> int:
    """Return whole bytes. Raises UserError for an unknown unit; bits ("25Mb") are refused, not guessed.

    >>> parse_bytes("25MB"), parse_bytes("1 KiB")
    (25000000, 1024)
    """
    value, unit = _split(text, "size", "25MB or 64MiB")
    factor = None if unit.endswith("b") else BYTES.get(unit.upper())
    if factor is None:
        raise UserError(f"size {text!r} has unit {unit!r}: use B, KB, MB, GB, KiB, MiB or GiB")
    return round(value * factor)


_ELEMENT_BYTES = {"fp32": 4, "float32": 4, "fp16": 2, "float16": 2, "bf16": 2, "bfloat16": 2}
_ELEMENT_BYTES["fp8"] = 1


def parse_element_bytes(text: str) -> int:
    """Return bytes of one number, by ``"2"`` or ``"bf16"``. Raises UserError."""
    number = int(text) if text.isdecimal() and len(text) < 3 else 0
    n_bytes = number or _ELEMENT_BYTES.get(text.lower(), 0)
    if not 1 <= n_bytes <= 8:
        known = ", ".join(_ELEMENT_BYTES)
        raise UserError(f"{text!r} is no number of bytes from 1 to 8: use one, or {known}")
    return n_bytes


def parse_bits_per_s(text: str) -> float:
    """Return bits per second of ``"1gbit"``, ``"25 Gbit/s"`` or ``"200mbit"``. Raises UserError."""
    value, unit = _split(text, "rate", "1gbit or 200mbit")
    factor = _BITS_PER_S.get(unit.lower().removesuffix("/s"))
    if factor is None:
        raise UserError(f"rate {text!r} has unit {unit!r}: use bit, kbit, mbit or gbit")
    if value <= 0:
        raise UserError(f"rate {text!r} must be above zero")
    return value * factor


def parse_seconds(text: str) -> float:
    """Return seconds of ``"8m"``, ``"250ms"`` or ``"8m30s"``. Raises UserError.

    >>> parse_seconds("8m30s")
    510.0
    """
    if len(parts := re.split(r"(?<=[hms])(?=[0-9])", text)) > 1:
        return sum(map(parse_seconds, parts))
    value, unit = _split(text, "time", "8m or 90s")
    factor = _SECONDS.get(unit)
    if factor is None:
        raise UserError(f"time {text!r} has unit {unit!r}: use ns, us, ms, s, m or h")
    return value * factor


def format_bytes(n_bytes: float) -> str:
    """Return bytes with the binary prefix that keeps the number between 1 and 1024: ``"64 KiB"``."""
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(n_bytes) >= size:
            return f"{n_bytes / size:.4g} {unit}"
    return f"{n_bytes:.4g} B"


def format_seconds(seconds: float) -> str:
    """Return seconds with the prefix that keeps the number readable: ``"1.23 ms"``."""
    if seconds == 0 or not math.isfinite(seconds):
        return f"{seconds:g} s"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if abs(seconds) >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"
