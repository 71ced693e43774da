"""Labels that launchers, containers and loggers put before the lines of a log: here they are removed."""

from __future__ import annotations

import re
from collections.abc import Iterator

# Labels of mpirun (--tag-output, --timestamp-output, -prepend-rank), and colours, stand inside a line, too;
# before it any number of quotes, bars, time stamps, those of srun -l, Ray, containers, loggers and hosts.
_INSIDE = re.compile(
    r"(?:\[[^\]\s]{0,99}\]|\w{3} \w{3} [ \d]\d [\d:]{8} \d{4})?<std(?:out|err)>:|\[\d+\](?=\s)|\x1b\[[\d;]*m"
)
_BEFORE = re.compile(
    r"(?:\s*(?:[>|]|[\d.]{1,15}:(?=\s)|\([^()]{0,99}\bpid=\d+[^()]{0,99}\)|\[[^\[\]]*\]:?|(?:stdout F|INFO)\s"
    r"|[A-Za-z](?:[\w.-]*:(?=\s)|[\w.-]{0,99}\d\s{0,9}\|)"
    r"|(?:\d{4}-\d\d-\d\d[T ])?\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?(?=\s)))*\s*"
)


def unlabelled(text: str) -> Iterator[str]:
    """Yield the lines of a log without labels.

    >>> list(unlabelled("n1: [1,0]<stdout>:# nThread 1\\n2026-05-01T10:00:00Z 1024 256"))
    ['# nThread 1', '1024 256']
    """
    for line in text.splitlines():
        yield _BEFORE.sub("", _INSIDE.sub("", line), count=1)
