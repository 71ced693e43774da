"""The key of every prediction and every measurement: what was asked, not what came out."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any, NamedTuple, get_type_hints


class Axis(NamedTuple):
    """How a campaign's file may vary a field of Case.

    key : what stands in the file; low, high : range of a number, both included
    """

    key: str
    low: float = 1
    high: float = float("inf")


def _later(default: object, axis: Axis | None = None) -> Any:
    """A field that recordings of earlier versions lack: they hold its default."""
    return field(default=default, metadata={"later": True, "axis": axis})


@dataclass(frozen=True)
class Case:
    """One question that a model and a measurement both answer; they are joined by ``key``.

    kind : "replay" (recorded compute, real collectives) or "training" (both real)
    network, device, batch : whose compute; profile_sha256 : hash of the layer profile, "" if none
    workers, link, link_bits_per_s : who communicates over what; 0 when the link is not shaped
    collective, plan, ends : what is sent; ``ends`` are the plan's group ends in ready order, "3;40;161"
    density : share of gradients sent (1 = dense); dilation : factor on compute times; seed
    straggler : factor on the compute of the slowest rank (1 = all are alike)
    selection_sha256 : hash of the selection times that were waited out, "" where selection was real
    negotiated : whether a coordinator says when each message may leave (osf Section 3.3)
    in_flight : how many collectives may be under way at once
    """

    kind: str
    network: str
    device: str
    batch: int
    workers: int
    link: str
    link_bits_per_s: float
    collective: str
    plan: str
    ends: str
    density: float = field(default=1.0, metadata={"axis": Axis("density", 1e-6, 1.0)})
    dilation: float = 1.0
    seed: int = 0
    profile_sha256: str = ""
    straggler: float = _later(1.0, Axis("stragglers", 1.0, 100.0))
    selection_sha256: str = _later("")
    negotiated: bool = _later(False, Axis("negotiated"))
    in_flight: int = _later(1, Axis("in_flight"))

    @property
    def key(self) -> str:
        """12 hex digits of the SHA-256 of all fields; those of LATER only where they say something.

        So a case keeps the key that it had before there were such fields.
        """
        said = {k: v for k, v in asdict(self).items() if k not in LATER or v != LATER[k]}
        return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:12]

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Case:
        """The case that a row of the runs table belongs to (other columns are ignored)."""
        return cls(**{name: kind(row[name]) for name, kind in CASE_TYPES.items()})


CASE_TYPES: dict[str, type] = get_type_hints(Case)
"""int, float, bool or str by field."""

LATER: dict[str, object] = {f.name: f.default for f in fields(Case) if f.metadata.get("later")}
"""Fields that recordings of earlier versions lack, and what holds for those."""

AXES: dict[str, Axis] = {f.name: axis for f in fields(Case) if (axis := f.metadata.get("axis"))}
"""Fields that a campaign may vary."""

CASE_COLUMNS: tuple[str, ...] = tuple(CASE_TYPES)
