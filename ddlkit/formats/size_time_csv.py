"""A user's own CSV of message times.

Its columns are bytes and seconds, and any of `KEYS`, which distinguish message times.
"""

from __future__ import annotations

import numpy as np

from ddlkit.formats.contract import KEYS, MessageOptions, MessageTimes
from ddlkit.store.sheet import SCHEMAS, Column, Schema, read_sheet

_BYTES = Column("bytes", "int", "positive")
_SECONDS = Column("seconds", "float", "positive")

# A message of this size is slower than this rate only if its time is not in seconds.
_LARGE_BYTES = 65536
_SLOWEST_BYTES_PER_S = 1e4


def matches(text: str) -> bool:
    r"""Return whether the first line of a file has a column ``bytes`` or ``seconds``.

    If only one of them is there, `read` reports that the other is missing.

    Examples
    --------
    >>> matches("bytes,seconds\n1024,2e-5\n"), matches("size,time\n1024,20\n")
    (True, False)
    """
    first_line, _, _ = text.strip().partition("\n")
    names = {name.strip() for name in first_line.split(",")}
    return "bytes" in names or "seconds" in names


def read(text: str, file: str, options: MessageOptions) -> MessageTimes:
    """Return the message times of a file.

    Parameters
    ----------
    text : str
        The content of the file.
    file : str
        The file, as errors name it.
    options : MessageOptions
        No place and no table, which only a log has.

    Returns
    -------
    MessageTimes
        All rows, with those columns of `KEYS` that the file has.

    Raises
    ------
    UserError
        If the file is wrong, or if its times seem not to be in seconds.
    """
    sheet = read_sheet(text, file)
    keys = [
        column
        for column in SCHEMAS["collectives"].columns
        if column.name in KEYS and column.name in sheet.header
    ]
    schema = Schema("message times", (_BYTES, _SECONDS, *keys))
    frame = schema.frame(sheet, exact=False)
    bytes_per_s = (frame["bytes"] / frame["seconds"]).to_numpy()
    is_large = frame["bytes"].to_numpy() >= _LARGE_BYTES
    is_too_slow = is_large & (bytes_per_s < _SLOWEST_BYTES_PER_S)
    if is_too_slow.any():
        row = int(np.argmax(is_too_slow))
        problem = f"{bytes_per_s[row]:.3g} bytes a second, slower than any link"
        sheet.fail(row, "seconds", f"{problem}: not seconds? convert them")
    options.refuse_those_of_a_log(file)
    return MessageTimes("csv", frame)
