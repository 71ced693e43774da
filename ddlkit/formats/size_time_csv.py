"""A user's own CSV of message times: columns bytes and seconds, and what else tells the rows apart."""

from __future__ import annotations

import numpy as np

from ddlkit.formats.contract import KEYS, MessageOptions, MessageTimes
from ddlkit.store.sheet import SCHEMAS, Column, Schema, read_sheet

_MESSAGES = (Column("bytes", "int", "positive"), Column("seconds", "float", "positive"))


def matches(text: str) -> bool:
    """Return whether the first line names one of the two columns; of the other, `read` says that it lacks.

    >>> matches("bytes,seconds\\n1024,2e-5\\n"), matches("size,time\\n1024,20\\n")
    (True, False)
    """
    head = text.strip().partition("\n")[0]
    return bool({"bytes", "seconds"} & {name.strip() for name in head.split(",")})


def read(text: str, file: str, options: MessageOptions) -> MessageTimes:
    """Return the rows as they are, with those columns of KEYS that the file has."""
    sheet = read_sheet(text, file)
    there = {*KEYS} & {*sheet.header}
    keys = [column for column in SCHEMAS["collectives"].columns if column.name in there]
    frame = Schema("message times", (*_MESSAGES, *keys)).frame(sheet, exact=False)
    rate = frame["bytes"] / frame["seconds"]
    for row in np.flatnonzero((frame["bytes"] >= 65536) & (rate < 1e4))[:1]:
        problem = f"{rate[row]:.3g} bytes a second, slower than any link: not seconds? convert them"
        sheet.fail(int(row), "seconds", problem)
    options.refuse_those_of_a_log(file)
    return MessageTimes("csv", frame)
