"""Echoes without a network: what they may be asked for, and which packet answers which."""

from __future__ import annotations

import pytest

from ddlkit.core.errors import UserError
from ddlkit.run.measure import echoes
from ddlkit.run.measure.echoes import ANSWERED, ASKED, EchoesSettings


@pytest.mark.parametrize(
    ("count", "n_bytes"), [(0, 1024), (30, 1024), (20, 1022), (20, 0), (20, 1404)]
)
def test_what_cannot_be_asked_is_refused_in_one_line(count: int, n_bytes: int) -> None:
    with pytest.raises(UserError, match=f"echoes: {count} of {n_bytes} B: give") as raised:
        EchoesSettings(count, n_bytes)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("kind", "whose", "number", "answers"),
    [
        (ANSWERED, 3, 7, True),
        (ASKED, 3, 7, False),
        (ANSWERED, 2, 7, False),
        (ANSWERED, 3, 6, False),
    ],
)
def test_an_answer_is_known_by_whose_and_which_it_is(
    kind: int, whose: int, number: int, answers: bool
) -> None:
    """A raw socket hears all: others' answers, late ones, and requests to itself."""
    packet = bytes(echoes.IP_HEADER_BYTES) + echoes._HEAD.pack(kind, 0, 0, whose, number) + b"data"
    assert echoes._answers(packet, 3, 7) is answers
