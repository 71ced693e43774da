"""What should be known of a forecast beside its numbers: where profile and cost do not fit together."""

from __future__ import annotations

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
    """What is known of the messages that a cost was fitted to; ``between`` is "GPUs" or "processors"."""

    from_bytes: float | None = None
    to_bytes: float | None = None
    between: str | None = None

    @classmethod
    def of(cls, sizes: ArrayLike, *programs: str | None) -> Measured:
        """Return what is known of messages of those sizes (n,), timed by those backends or programs.

        >>> Measured.of([1024, 4096], "nccl")
        Measured(from_bytes=1024.0, to_bytes=4096.0, between='GPUs')
        """
        between = {_BETWEEN[name] for name in programs if name in _BETWEEN}
        where = between.pop() if len(between) == 1 else None
        return cls(float(np.min(sizes)), float(np.max(sizes)), where)

    @classmethod
    def read(cls, description: Mapping[str, Any], cost: MessageCost) -> Measured:
        """Return what ``ddlkit fit --json`` wrote; of a table by hand, its own sizes; else nothing."""
        given = cls(*(description.get("fit", {}).get(name) for name in cls._fields))
        are_sizes = all(n is None or isinstance(n, (int, float)) and n > 0 for n in given[:2])
        if not are_sizes or not isinstance(given.between, str | None):
            raise UserError(
                f"the cost's fit says {shown(tuple(given))}: from and to bytes must be above zero, "
                "between a name: fit again"
            )
        if given.from_bytes is None and isinstance(cost, Table):
            return cls.of(cost.bytes)._replace(between=given.between)
        return given


def doubts(device: str, cost: MessageCost, measured: Measured, n_bytes: ArrayLike) -> Iterator[str]:
    """Yield what does not fit together, a line each.

    device : of the profile, "cpu" or a GPU's name; n_bytes : (G,) sizes of the messages that are predicted
    """
    if cost.collective != "all_reduce" and not cost.selects:
        yield f"the cost is of {cost.collective}, gradients are sent by all_reduce: fit one of that"
    computed = "processors" if device == "cpu" else "GPUs"
    if device not in ("", "unknown") and measured.between not in (None, computed):
        yield (
            f"the profile is of {computed} ({device}), the messages were timed between "
            f"{measured.between}: measure both on the same devices"
        )
    if measured.from_bytes is None or measured.to_bytes is None:
        return
    sizes = np.asarray(n_bytes, dtype=float)
    outside = sizes[(sizes < measured.from_bytes) | (sizes > measured.to_bytes)]
    if outside.size:
        sent = " to ".join(dict.fromkeys(map(format_bytes, (outside.min(), outside.max()))))
        fitted = f"{format_bytes(measured.from_bytes)} to {format_bytes(measured.to_bytes)}"
        yield (
            f"{outside.size} of {sizes.size} messages ({sent}) are outside the sizes that were "
            f"measured ({fitted}): their time is extrapolated, measure such sizes too"
        )
