"""What a user should know: the one exception that a mistake raises, and findings in a file."""

from __future__ import annotations

from typing import NamedTuple


class UserError(Exception):
    """A mistake that the user can mend: one line saying what, where and what to do.

    The command line prints it without a traceback and exits with status 2.
    """


class Finding(NamedTuple):
    """What the user of a file should know beside its numbers: of what kind, on which layers, the facts."""

    what: str
    layers: tuple[str, ...]
    text: str
