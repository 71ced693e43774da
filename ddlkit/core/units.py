"""Units: parse what people write once, at the edge, and print it readably; GB is 1000^3 bytes, GiB 1024^3."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from ddlkit.core.errors import UserError

KB, MB, GB = 1000, 1000**2, 1000**3
KIB, MIB, GIB = 1024, 1024**2, 1024**3

LEAST, MOST = 1e-30, 1e30
"""Between these lies every time, rate and number of FLOP that somebody means, with room to multiply."""
MOST_WHOLE = 10**14
"""Of bytes, elements and counts in a file: a hundred terabytes. Sums of many thousands fit 64 bits."""

_NUMBER = re.compile(r"^\s*([0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)\s*([A-Za-zµ/]*)\s*$")

BYTES = {
    "": 1,
    "B": 1,
    "KB": KB,
    "MB": MB,
    "GB": GB,
    "KIB": KIB,
    "MIB": MIB,
    "GIB": GIB,
}
_BITS_PER_S = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "ns": 1e-9}
_SECONDS |= {"m": 60.0, "h": 3600.0}


def _parsed(text: str, what: str, example: str, units: Mapping[str, float]) -> float:
    """Return the number times its unit's factor."""
    match = _NUMBER.match(text)
    if not match:
        raise UserError(
            f"{what} {text!r} is not a number with a unit: write for example {example}"
        )
    value, unit = float(match[1]), match[2]
    if value > MOST_WHOLE:
        raise UserError(f"{what} {text!r} is too large: write for example {example}")
    if unit not in units:
        *most, last = filter(None, units)
        raise UserError(
            f"{what} {text!r} has unit {unit!r}: use {', '.join(most)} or {last}"
        )
    return value * units[unit]


def parse_bytes(text: str) -> int:
    """Return whole bytes. Raises UserError for an unknown unit; bits ("25Mb") are refused, not guessed.

    >>> parse_bytes("25MB"), parse_bytes("1 KiB")
    (25000000, 1024)
    """
    spelled = text if text.rstrip().endswith("b") else text.upper()
    return round(_parsed(spelled, "size", "25MB or 64MiB", BYTES))


_ELEMENT_BYTES = {
    "fp32": 4,
    "float32": 4,
    "fp16": 2,
    "float16": 2,
    "bf16": 2,
    "bfloat16": 2,
}
_ELEMENT_BYTES["fp8"] = 1


def parse_element_bytes(text: str) -> int:
    """Return bytes of one number, by ``"2"`` or ``"bf16"``. Raises UserError."""
    number = int(text) if text.isdecimal() and len(text) < 3 else 0
    n_bytes = number or _ELEMENT_BYTES.get(text.lower(), 0)
    if not 1 <= n_bytes <= 8:
        names = ", ".join(_ELEMENT_BYTES)
        raise UserError(
            f"{text!r} is no number of bytes from 1 to 8: use one, or {names}"
        )
    return n_bytes


def parse_bits_per_s(text: str) -> float:
    """Return bits per second of ``"1gbit"``, ``"25 Gbit/s"`` or ``"200mbit"``. Raises UserError."""
    spelled = text.lower().rstrip().removesuffix("/s")
    rate = _parsed(spelled, "rate", "1gbit or 200mbit", _BITS_PER_S)
    if rate <= 0:
        raise UserError(f"rate {text!r} must be above zero")
    return rate


def parse_seconds(text: str) -> float:
    """Return seconds of ``"8m"``, ``"250ms"`` or ``"8m30s"``. Raises UserError.

    >>> parse_seconds("8m30s")
    510.0
    """
    if len(parts := re.split(r"(?<=[hms])(?=[0-9])", text)) > 1:
        return sum(map(parse_seconds, parts))
    return _parsed(text, "time", "8m or 90s", _SECONDS)


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
