"""Sizes, rates and times as people write them, and as they are printed.

Texts are parsed once, where they enter. All other code has numbers in base units.
Decimal prefixes are powers of 1000, so GB is 1000**3 bytes. Binary prefixes are powers
of 1024, so GiB is 1024**3 bytes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping

from ddlkit.core.errors import UserError

KB = 1000
MB = 1000**2
GB = 1000**3
KIB = 1024
MIB = 1024**2
GIB = 1024**3

LEAST = 1e-30
"""The least time, rate or number of operations that somebody can mean."""
MOST = 1e30
"""The largest one. Products of such numbers stay far from the limits of a float."""
MOST_WHOLE = 10**14
"""The most bytes, elements or counts in a file. Sums of many thousands fit 64 bits. In a text
with a unit, this is the largest number before the unit."""

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
"""The factor of each unit of a size, in capital letters."""
_BITS_PER_S = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_SECONDS = {
    "": 1.0,
    "s": 1.0,
    "ms": 1e-3,
    "us": 1e-6,
    "µs": 1e-6,
    "ns": 1e-9,
    "m": 60.0,
    "h": 3600.0,
}
_ROUNDS_TO_1 = 0.9995
"""From this number on, three digits round up to 1."""
_ELEMENT_BYTES = {
    "fp32": 4,
    "float32": 4,
    "fp16": 2,
    "float16": 2,
    "bf16": 2,
    "bfloat16": 2,
    "fp8": 1,
}
_NUMBER_AND_UNIT = re.compile(
    r"^\s*([0-9]*\.?[0-9]+(?:[eE][-+]?[0-9]+)?)\s*([A-Za-zµ/]*)\s*$"
)


def _parsed(
    text: str,
    what: str,
    example: str,
    units: Mapping[str, float],
    spelled: Callable[[str], str] = str,
) -> float:
    """Return a number times the factor of its unit.

    Parameters
    ----------
    text : str
        A number and a unit.
    what : str
        What the number is, such as "size", for errors.
    example : str
        Numbers with their units as they may be written, for errors.
    units : mapping of str to float
        The factor of each unit.
    spelled : callable, optional
        Takes a unit as it was written, and returns it as ``units`` spells it. By default
        a unit must be written as in ``units``.

    Returns
    -------
    float
        The value in base units, such as bytes or seconds.

    Raises
    ------
    UserError
        If there is no number, if the number before the unit is above MOST_WHOLE, or if
        the unit is unknown.
    """
    match = _NUMBER_AND_UNIT.match(text)
    # A text that is a number behind a minus is a negative number.
    unsigned_text = text.strip().removeprefix("-")
    if not match and _NUMBER_AND_UNIT.match(unsigned_text):
        raise UserError(f"{what} {text!r} must not be negative")
    if not match:
        raise UserError(
            f"{what} {text!r} is not a number with a unit: write for example {example}"
        )
    number_text, written_unit = match.groups()
    number = float(number_text)
    unit = spelled(written_unit)
    if number > MOST_WHOLE:
        raise UserError(f"{what} {text!r} is too large: write for example {example}")
    if unit not in units:
        # The error does not list the empty unit of a number without a unit. It prints binary
        # prefixes with a small i, and BYTES has them in capital letters.
        known_units = [known.replace("IB", "iB") for known in units if known]
        *others, last = known_units
        fault = f"has unit {written_unit!r}" if written_unit else "has no unit"
        raise UserError(f"{what} {text!r} {fault}: use {', '.join(others)} or {last}")
    return number * units[unit]


def parse_bytes(text: str, example: str = "25MB or 64MiB") -> int:
    """Return a size in whole bytes.

    Parameters
    ----------
    text : str
        A number with a unit of `BYTES`, or without a unit. Letters may be capital or
        small, but a small b at the end stands for bits.
    example : str, optional
        A size, or a few, that the error for text without a number suggests.

    Returns
    -------
    int

    Raises
    ------
    UserError
        If this is not a size. Bits ("25Mb") are refused, because their writer may mean
        bytes.

    Examples
    --------
    >>> parse_bytes("25MB"), parse_bytes("1 KiB")
    (25000000, 1024)
    """
    size = _parsed(
        text,
        what="size",
        example=example,
        units=BYTES,
        spelled=_unit_of_bytes,
    )
    return round(size)


def _unit_of_bytes(unit: str) -> str:
    """Return a unit of sizes in capital letters, as `BYTES` spells it.

    A small b at the end stands for bits. Such a unit is returned as it is, and is unknown.
    """
    if unit.endswith("b"):
        return unit
    return unit.upper()


def is_small_number(text: str) -> bool:
    """Return whether a size is a number below 1024 without a unit.

    Nobody wants a bucket of so few bytes. Whoever writes 25 for a bucket means 25 MB.

    Parameters
    ----------
    text : str
        The size as it was written.

    Returns
    -------
    bool
        False for 0, and for text that is not a number.

    Examples
    --------
    >>> is_small_number("25"), is_small_number("25B"), is_small_number("26214400")
    (True, False, False)
    """
    is_number = re.fullmatch(r"[0-9]*\.?[0-9]+", text) is not None
    return is_number and 0 < float(text) < KIB


def parse_element_bytes(text: str) -> int:
    """Return the bytes of one number.

    Parameters
    ----------
    text : str
        The bytes, as "2", or a type, as "bf16".

    Returns
    -------
    int

    Raises
    ------
    UserError
        If this is neither a number from 1 to 8 nor a known type.

    Examples
    --------
    >>> parse_element_bytes("2"), parse_element_bytes("fp32")
    (2, 4)
    """
    # A longer number is out of range, and `int` refuses thousands of digits.
    if text.isdecimal() and len(text) < 3:
        n_bytes = int(text)
    else:
        # 0 stands for an unknown type, and is refused below.
        n_bytes = _ELEMENT_BYTES.get(text.lower(), 0)
    if not 1 <= n_bytes <= 8:
        raise UserError(
            f"{text!r} is not a number of bytes from 1 to 8: use one, "
            f"or {', '.join(_ELEMENT_BYTES)}"
        )
    return n_bytes


def parse_bits_per_s(text: str) -> float:
    """Return a rate in bits per second.

    Parameters
    ----------
    text : str
        A number with a unit of bits, also per second: "1gbit", "25 Gbit/s".

    Returns
    -------
    float

    Raises
    ------
    UserError
        If this is not a rate above zero.

    Examples
    --------
    >>> parse_bits_per_s("25 Gbit/s")
    25000000000.0
    """
    rate = _parsed(
        text,
        what="rate",
        example="1gbit or 200mbit",
        units=_BITS_PER_S,
        spelled=_unit_of_bits,
    )
    if rate <= 0:
        raise UserError(f"rate {text!r} must be above zero")
    return rate


def _unit_of_bits(unit: str) -> str:
    """Return a unit of rates in small letters and without "/s", as `_BITS_PER_S` spells it."""
    return unit.lower().removesuffix("/s")


def parse_seconds(text: str, example: str = "2ms, 90s or 8m30s") -> float:
    """Return a time in seconds.

    Parameters
    ----------
    text : str
        A number with a unit, as "250ms", or several of them in hours, minutes and
        seconds, as "8m30s". Without a unit the number is in seconds.
    example : str, optional
        A time, or a few, that the error for text without a number suggests.

    Returns
    -------
    float

    Raises
    ------
    UserError
        If this is not a time.

    Examples
    --------
    >>> parse_seconds("8m30s")
    510.0
    """
    # Cut between each h, m or s and the digit that follows it: "8m30s" has the terms
    # "8m" and "30s". The expression matches the empty text between the two.
    terms = re.split(r"(?<=[hms])(?=[0-9])", text)
    if len(terms) > 1:
        return sum(parse_seconds(term, example) for term in terms)
    return _parsed(text, what="time", example=example, units=_SECONDS)


def format_bytes(n_bytes: float) -> str:
    """Return a size with the binary prefix that keeps the number readable.

    Examples
    --------
    >>> format_bytes(65536)
    '64 KiB'
    """
    for unit, size in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(n_bytes) >= size:
            return f"{n_bytes / size:.4g} {unit}"
    return f"{n_bytes:.4g} B"


def format_seconds(seconds: float) -> str:
    """Return a time with the prefix that keeps the number readable.

    Examples
    --------
    >>> format_seconds(0.00123)
    '1.23 ms'
    >>> format_seconds(0.9999), format_seconds(12345.6)
    ('1 s', '12346 s')
    """
    # No prefix makes zero, infinity or NaN more readable.
    if seconds == 0 or not math.isfinite(seconds):
        return f"{seconds:g} s"
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        # A time that three digits round up to the next unit has that unit: 0.9999 s are
        # written as 1 s, and not as 1e+03 ms.
        if abs(seconds) >= _ROUNDS_TO_1 * size:
            return f"{_three_digits(seconds / size)} {unit}"
    # All shorter times are in nanoseconds.
    return f"{seconds / 1e-9:.3g} ns"


def _three_digits(number: float) -> str:
    """Return a number with three digits, or as a whole number if that has more digits.

    Numbers of a million or more have an exponent.
    """
    if 1000 * _ROUNDS_TO_1 <= abs(number) < 1e6:
        return f"{number:.0f}"
    return f"{number:.3g}"
