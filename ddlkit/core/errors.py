"""The one exception that a user's mistake raises."""

from __future__ import annotations


class UserError(Exception):
    """A mistake that the user can mend: one line saying what, where and what to do.

    The command line prints it without a traceback and exits with status 2.
    """
