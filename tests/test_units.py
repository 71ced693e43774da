"""Units: what is printed can be parsed again, and wrong units are refused, not guessed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddlkit.core import units
from ddlkit.core.errors import UserError


@given(st.integers(0, 2**40), st.floats(1e-8, 1e4))
def test_bytes_and_times_print_and_parse_back(n: int, seconds: float) -> None:
    assert units.parse_bytes(units.format_bytes(n)) == pytest.approx(n, rel=1e-3, abs=0.5)
    assert units.parse_seconds(units.format_seconds(seconds)) == pytest.approx(seconds, rel=1e-2)


def test_decimal_and_binary_prefixes_differ() -> None:
    assert (units.parse_bytes("25MB"), units.parse_bytes("25 MiB")) == (25_000_000, 26_214_400)
    assert units.parse_bits_per_s("25 Gbit/s") == 25e9
    assert units.parse_seconds("8m") == 480


def test_wrong_sizes_and_rates_are_refused() -> None:
    for size in ("25Mb", "25 parsecs", "MB", "", "-1MB", "1e", "nan"):
        with pytest.raises(UserError, match="size"):
            units.parse_bytes(size)
    for rate in ("1GB", "0gbit", "fast", "1"):
        with pytest.raises(UserError, match="rate"):
            units.parse_bits_per_s(rate)
