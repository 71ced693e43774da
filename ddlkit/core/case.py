"""The key of every prediction and every measurement: what was asked, not what came out."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any

NAMED = {"check": "named"}
POSITIVE = {"check": "positive"}
NON_NEGATIVE = {"check": "non_negative"}
CAME_LATER = {"later": True}
"""What a field's values must be, and whether earlier recordings lack it: its default then held."""


@dataclass(frozen=True)
class Case:
    """One question that a model and a measurement both answer; they are joined by ``key``.

    kind : "replay" (recorded compute, real collectives) or "training" (both real)
    profile_sha256, selection_sha256 : of the layer profile, and of selection times waited out, "" if none
    link_bits_per_s : 0 when the link is not shaped; ends : of groups in ready order, "3;40;161"
    density : share of gradients sent; dilation : factor on compute times; straggler : on the slowest rank's
    negotiated : whether a coordinator says when each message may leave (osf Section 3.3)
    changes : of the link in each iteration: "0s:rate=250mbit;0.3s:loss=1%"
    accumulate : batches whose gradients are sent once, with those of the last
    """

    kind: str = field(metadata=NAMED)
    network: str = field(metadata=NAMED)
    device: str = field(metadata=NAMED)
    batch: int = field(metadata=POSITIVE)
    workers: int = field(metadata=POSITIVE)
    link: str = field(metadata=NAMED)
    link_bits_per_s: float = field(metadata=NON_NEGATIVE)
    collective: str = field(metadata=NAMED)
    plan: str = field(metadata=NAMED)
    ends: str
    density: float = field(default=1.0, metadata=POSITIVE)
    dilation: float = field(default=1.0, metadata=POSITIVE)
    seed: int = 0
    profile_sha256: str = ""
    straggler: float = field(default=1.0, metadata=POSITIVE | CAME_LATER)
    selection_sha256: str = field(default="", metadata=CAME_LATER)
    negotiated: bool = field(default=False, metadata=CAME_LATER)
    in_flight: int = field(default=1, metadata=POSITIVE | CAME_LATER)
    straggler_spread: float = field(default=0.0, metadata=NON_NEGATIVE | CAME_LATER)
    changes: str = field(default="", metadata=CAME_LATER)
    accumulate: int = field(default=1, metadata=POSITIVE | CAME_LATER)

    @property
    def key(self) -> str:
        """Return 12 hex digits of the SHA-256 of all fields; of those that came later, where they differ."""
        of_key = {
            k: v for k, v in asdict(self).items() if k not in _LATER or v != _LATER[k]
        }
        return hashlib.sha256(json.dumps(of_key, sort_keys=True).encode()).hexdigest()[
            :12
        ]

    @property
    def sparse(self) -> bool:
        """Return whether only the largest gradients are sent, after they have been selected."""
        return self.density < 1

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Case:
        """Return the case that a row of the runs table belongs to (other columns are ignored)."""
        return cls(**{f.name: _TYPES[str(f.type)](row[f.name]) for f in fields(cls)})


_TYPES = {"str": str, "int": int, "float": float, "bool": bool}
_LATER = {f.name: f.default for f in fields(Case) if f.metadata.get("later")}
CASE_COLUMNS: tuple[str, ...] = tuple(f.name for f in fields(Case))
