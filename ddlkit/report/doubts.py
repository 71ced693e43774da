"""What should be known of a forecast beside its numbers: where profile and cost do not fit together."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from ddlkit.core.cost import MessageCost, Table
from ddlkit.core.errors import UserError, shown
from ddlkit.core.units import format_bytes

_BETWEEN = {"nccl": "GPUs", "nccl-tests": "GPUs", "gloo": "processors"}
"""What the programs that time messages send them between."""


class Measured(NamedTuple):
    """What is known of the messages that a cost was fitted to; None: not known.

    from_bytes, to_bytes : least and largest size; between : "GPUs" or "processors"; on_device : their name
    """

    from_bytes: float | None = None
    to_bytes: float | None = None
    between: str | None = None
    on_device: str | None = None

    @classmethod
    def of(cls, sizes: ArrayLike, *said: str | None) -> Measured:
        """Of messages of those sizes (n,), by what is said of them: backend or program.

        >>> Measured.of([1024, 4096], "nccl")
        Measured(from_bytes=1024.0, to_bytes=4096.0, between='GPUs', on_device=None)
        """
        known = {_BETWEEN[name] for name in said if name in _BETWEEN}
        sizes = np.asarray(sizes, dtype=float)
        return cls(float(sizes.min()), float(sizes.max()), *(known if len(known) == 1 else ()))

    @classmethod
    def read(cls, description: Mapping[str, Any], cost: MessageCost) -> Measured:
        """As ``ddlkit fit --json`` wrote it; of a table by hand, its own sizes; else nothing is known."""
        fitted = description.get("fit", {})
        found = cls(**{name: fitted.get(name) for name in cls._fields})
        sizes, said = found[:2], found[2:]
        numbers = all(one is None or isinstance(one, (int, float)) and one > 0 for one in sizes)
        if not numbers or not all(one is None or isinstance(one, str) for one in said):
            raise UserError(
                f"the cost's fit says {shown(tuple(found))}: from and to bytes must be above zero, "
                "between and on_device names: fit again"
            )
        if found.from_bytes is None and isinstance(cost, Table):
            found = cls.of(cost.bytes)._replace(between=found.between)
        return found


def _model(device: str) -> str:
    """Of a GPU's name the word that tells its model, "" where none does.

    >>> _model("NVIDIA A100-SXM4-40GB"), _model("H100"), _model("cpu")
    ('A100', 'H100', '')
    """
    words = re.split(r"[\W_]+", device)
    return next((word.upper() for word in words if re.search(r"\d", word)), "")


def doubts(device: str, cost: MessageCost, measured: Measured, n_bytes: ArrayLike) -> Iterator[str]:
    """What does not fit together, a line each.

    device : of the profile, "cpu" or a GPU's name; n_bytes : (G,) sizes of the messages that are predicted
    """
    if cost.collective != "all_reduce" and not cost.selects:
        yield f"the cost is of {cost.collective}, gradients are sent by all_reduce: fit one of that"
    computed = "" if device in ("", "unknown") else "processors" if device == "cpu" else "GPUs"
    if computed and measured.between not in (None, computed):
        yield (
            f"the profile is of {computed} ({device}), the messages were timed between "
            f"{measured.between}: measure both on the same devices"
        )
    elif _model(device) and _model(measured.on_device or "") not in ("", _model(device)):
        yield (
            f"the profile is of {device}, the messages were timed between {measured.on_device}: measure "
            "both on the same devices"
        )
    if measured.from_bytes is None or measured.to_bytes is None:
        return
    sizes = np.asarray(n_bytes, dtype=float)
    outside = sizes[(sizes < measured.from_bytes) | (sizes > measured.to_bytes)]
    if outside.size:
        low, high = (format_bytes(size) for size in (outside.min(), outside.max()))
        sent = low if low == high else f"{low} to {high}"
        fitted = f"{format_bytes(measured.from_bytes)} to {format_bytes(measured.to_bytes)}"
        yield (
            f"{outside.size} of {sizes.size} messages ({sent}) are outside the sizes that were "
            f"measured ({fitted}): their time is extrapolated, measure such sizes too"
        )
