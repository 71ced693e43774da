"""The key by which predictions and measurements are joined.

A case states what is asked, such as a network, a link and a plan. It never contains a
result.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any

# `ddlkit.store.sheet` reads the metadata of fields when it checks the table of runs.
NAMED = {"check": "named"}
"""The metadata of a field that must be a name, and not empty."""
POSITIVE = {"check": "positive"}
"""The metadata of a field that must be above zero."""
NON_NEGATIVE = {"check": "non_negative"}
"""The metadata of a field that must not be below zero."""
CAME_LATER = {"later": True}
"""The metadata of a later field, whose default holds for earlier recordings."""


@dataclass(frozen=True)
class Case:
    """One question that a model and a measurement both answer.

    Parameters
    ----------
    kind : {"replay", "training"}
        A replay sleeps for the recorded compute times and runs real collectives. In a
        training both are real.
    network, device : str
        The names of the network and of the device.
    batch : int
        The samples in a batch of one device.
    workers : int
        The number of ranks.
    link : str
        The name of the link.
    link_bits_per_s : float
        The rate to which the link is limited, 0 if it is not limited.
    collective : str
        The collective that exchanges gradients.
    plan : str
        The name of the plan.
    ends : str
        The ends of the plan's groups in ready order, as in "3;40;161".
    density : float
        The share of the gradients that is sent.
    dilation : float
        The factor on the compute times of all ranks, 1 for the recorded times.
    seed : int
        The seed of all that is drawn at random.
    profile_sha256 : str
        The hash of the layer profile, "" if there is none.
    straggler : float
        The further factor on the compute times of the slowest rank, 1 if all ranks
        compute equally fast.
    selection_sha256 : str
        The hash of the times for which a replay sleeps to select gradients, "" if there
        are none.
    negotiated : bool
        Whether a coordinator decides when each message may leave (osf Section 3.3).
    in_flight : int
        How many messages may be under way at once.
    straggler_spread : float
        How much the factor of the slowest rank varies from one iteration to the next.
    changes : str
        Changes of the link in each iteration, as in "0s:rate=250mbit;0.3s:loss=1%"; ""
        if the link stays as it is.
    accumulate : int
        The batches whose gradients are sent once, with the gradients of the last batch.
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
        """Return the 12 hexadecimal digits that identify the case.

        They are the first digits of the SHA-256 of all fields. A field that was added
        later counts only if it differs from its default, so that the keys of earlier
        recordings stay as they are.
        """
        values = {}
        for name, value in asdict(self).items():
            came_later = name in _LATER_DEFAULTS
            if not came_later or value != _LATER_DEFAULTS[name]:
                values[name] = value
        text = json.dumps(values, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def sparse(self) -> bool:
        """Return whether only the largest gradients are selected and sent."""
        return self.density < 1

    @classmethod
    def from_row(cls, row: dict[str, Any]) -> Case:
        """Return the case to which a row of the table of runs belongs.

        Parameters
        ----------
        row : dict
            The values of the row by column, as `ddlkit.store.load_table` reads them. They
            are not the texts of a CSV, of which "False" would count as true. Columns that
            are no fields of a case are ignored.

        Returns
        -------
        Case
            The case, each value in the type of its field.
        """
        values = {}
        for column in fields(cls):
            # Annotations are text in this module, such as "int".
            as_type = _TYPES[str(column.type)]
            values[column.name] = as_type(row[column.name])
        return cls(**values)


_TYPES: dict[str, type] = {"str": str, "int": int, "float": float, "bool": bool}
"""The type of each annotation of a field."""
_LATER_DEFAULTS = {
    column.name: column.default
    for column in fields(Case)
    if column.metadata.get("later")
}
"""The default of each field that was added after the first recordings."""
CASE_COLUMNS: tuple[str, ...] = tuple(column.name for column in fields(Case))
"""The names of all fields, in order."""
