"""What a reader tells about a file beside its numbers."""

from __future__ import annotations

from typing import NamedTuple


class Finding(NamedTuple):
    """Something that the user of a file should know: of what kind, on which layers, and the facts."""

    what: str
    layers: tuple[str, ...]
    text: str
