"""Labels that launchers, containers and loggers put before the lines of a log."""

from __future__ import annotations

import re
from collections.abc import Iterator

# What may stand anywhere in a line.
_INSIDE = re.compile(
    "|".join(
        (
            # mpirun: --tag-output, --timestamp-output
            r"(?:\[[^\]\s]{0,99}\]|\w{3} \w{3} [ \d]\d [\d:]{8} \d{4})?"
            r"<std(?:out|err)>:",
            # mpirun: -prepend-rank
            r"\[\d+\](?=\s)",
            # colours of a terminal
            r"\x1b\[[\d;]*m",
        )
    )
)
# What may stand before a line, in any number and order.
_LABEL = "|".join(
    (
        # quotes of mail, bars of Markdown
        r"[>|]",
        # srun -l, and addresses of hosts
        r"[\d.]{1,15}:(?=\s)",
        # Ray
        r"\([^()]{0,99}\bpid=\d+[^()]{0,99}\)",
        # anything in brackets, such as [host] or [time]
        r"\[[^\[\]]*\]:?",
        # Kubernetes, and Python's logging
        r"(?:stdout F|INFO)\s",
        # names of hosts, and services of Docker Compose
        r"[A-Za-z](?:[\w.-]*:(?=\s)|[\w.-]{0,99}\d\s{0,9}\|)",
        # time stamps
        r"(?:\d{4}-\d\d-\d\d[T ])?\d\d:\d\d:\d\d(?:[.,]\d+)?"
        r"(?:Z|[+-]\d\d:?\d\d)?(?=\s)",
    )
)
_BEFORE = re.compile(rf"(?:\s*(?:{_LABEL}))*\s*")


def unlabelled(text: str) -> Iterator[str]:
    r"""Yield the lines of a log without what launchers and loggers add to them.

    Such labels are, for example, the rank, the host or the time. A few kinds of labels
    may stand anywhere in a line, and all others only before it.

    Parameters
    ----------
    text : str
        The log.

    Yields
    ------
    str
        A line without its labels.

    Examples
    --------
    >>> list(unlabelled("n1: [1,0]<stdout>:# nThread 1\n2026-05-01T10:00:00Z 1024 256"))
    ['# nThread 1', '1024 256']
    """
    for line in text.splitlines():
        without_labels_inside = _INSIDE.sub("", line)
        # This pattern matches at the start of every line, if only the empty text. With
        # count=1, nothing behind that first match is removed.
        yield _BEFORE.sub("", without_labels_inside, count=1)
