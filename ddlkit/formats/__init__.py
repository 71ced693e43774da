"""Files of other programs, read into the workbook's own types."""

from __future__ import annotations

from typing import NamedTuple


class Finding(NamedTuple):
    """What the user of a file should know beside its numbers: of what kind, on which layers, the facts."""

    what: str
    layers: tuple[str, ...]
    text: str
