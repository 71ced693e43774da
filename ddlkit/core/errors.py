"""What a user should know: the one exception that a mistake raises, and findings in a file."""

from __future__ import annotations

import reprlib
from typing import NamedTuple

MOST_CHARACTERS = 900  # of a line that says what is wrong: a person reads no more


class UserError(Exception):
    """A mistake that the user can mend: one printable line that says what, where and what to do."""

    def __str__(self) -> str:
        return one_line(super().__str__())


def one_line(text: str, most: int = MOST_CHARACTERS) -> str:
    """Return the text, what cannot be printed escaped, without its middle if longer than ``most``.

    >>> one_line("two\\nlines")
    'two\\\\nlines'
    """
    head, tail = 2 * most // 3, most // 4  # the rest is for what is said of the middle
    kept = (text,) if len(text) <= most else (text[:head], text[-tail:])
    hidden = {letter for letter in text if not letter.isprintable()}
    escapes = {
        ord(letter): letter.encode("unicode_escape").decode() for letter in hidden
    }
    escaped = [part.translate(escapes) for part in kept]
    if len(escaped) == 1 and len(escaped[0]) <= most:
        return escaped[0]
    return f"{escaped[0][:head]} ... ({len(text)} characters) ... {escaped[-1][-tail:]}"


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 3, 60, 60, 40
shown = _SHORT.repr
"""A value as an error shows it: short, whatever it is."""


class Finding(NamedTuple):
    """What the user of a file should know beside its numbers: of what kind, on which layers, the facts."""

    what: str
    layers: tuple[str, ...]
    text: str
