"""The one exception that a mistake of the user raises, and findings in a file."""

from __future__ import annotations

import reprlib
from typing import NamedTuple

MOST_CHARACTERS = 900
"""The most characters of an error: nobody reads more."""


class UserError(Exception):
    """A mistake that the user can mend.

    The text is one printable line that says what is wrong, where, and what to do.

    Examples
    --------
    >>> print(UserError("mine.csv, line 3: bytes is -1: must be above zero"))
    mine.csv, line 3: bytes is -1: must be above zero
    """

    def __str__(self) -> str:
        return one_line(super().__str__())


def one_line(text: str, most: int = MOST_CHARACTERS) -> str:
    r"""Return a text as one printable line that is not too long.

    Parameters
    ----------
    text : str
        Any text.
    most : int, optional
        The most characters of a text that is kept whole. The middle of a longer text is
        left out.

    Returns
    -------
    str
        The text, in which characters that cannot be printed are escaped. The note about
        the characters left out can make the line longer than a small ``most``.

    Examples
    --------
    >>> one_line("two\nlines")
    'two\\nlines'
    >>> one_line("a" * 100, most=12)
    'aaaaaaaa ... (100 characters) ... aaa'
    """
    # The characters that are kept at the head and at the tail of a long text. The rest of
    # the line, a twelfth, is for the note about what is left out.
    n_head = 2 * most // 3
    n_tail = most // 4
    # `str.translate` takes characters by their number.
    unprintable = {letter for letter in text if not letter.isprintable()}
    escapes = {
        ord(letter): letter.encode("unicode_escape").decode() for letter in unprintable
    }
    # Escapes make a text longer, so a text that is short enough may become too long.
    if len(text) <= most:
        escaped = text.translate(escapes)
        if len(escaped) <= most:
            return escaped
    # From here on the escaped text is longer than ``most``, so its head and its tail do not
    # overlap. The text is cut before it is escaped, so that not all of a very long text is
    # escaped.
    escaped_head = text[:n_head].translate(escapes)
    escaped_tail = text[-n_tail:].translate(escapes)
    # Escapes make the two ends longer, so they are cut again.
    head = escaped_head[:n_head]
    tail = escaped_tail[-n_tail:]
    return f"{head} ... ({len(text)} characters) ... {tail}"


# A value may be a whole file. It must leave room in the line for what is wrong with it.
_SHORT = reprlib.Repr()
_SHORT.maxlevel = 3
_SHORT.maxstring = 60
_SHORT.maxother = 60
_SHORT.maxlong = 40
shown = _SHORT.repr
"""Return a value as an error shows it, which is short for any value."""


class Finding(NamedTuple):
    """Something that the user of a file should know, apart from its numbers.

    Attributes
    ----------
    what : str
        The kind of finding.
    text : str
        The facts, in words.
    layers : tuple of str, optional
        The layers that the finding is about. By default it is not about single layers.
    """

    what: str
    text: str
    layers: tuple[str, ...] = ()
