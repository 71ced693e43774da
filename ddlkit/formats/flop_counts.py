"""FLOP counts by tensor, from a CSV of one's own; times in proportion to them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ddlkit.core.errors import Finding, UserError
from ddlkit.core.workload import LayerProfile
from ddlkit.formats.contract import ImportOptions, ReadProfile
from ddlkit.store.sheet import Column, Schema, Sheet, read_sheet

FLOPS = Schema(
    "FLOP counts",
    (
        Column("tensor", "str", "named"),
        Column("layer", "str", default=""),
        Column("parameters", "int", "positive"),
        Column("flops", "float", "non_negative"),
        Column("batch", "int", "positive", default="1"),  # whose FLOP are counted
    ),
    key=("tensor",),
)


class Tensor(NamedTuple):
    """A tensor, and the forward FLOP of one sample whose backward comes before its gradient."""

    name: str
    layer: str
    elements: int
    flops: float


def counted(
    network: str, batch: int, tensors: list[Tensor], rate: tuple[float, float] | float
) -> LayerProfile:
    """Return a profile whose times are in proportion to FLOP.

    rate : peak FLOP/s and the share of it that is reached, or seconds of forward and backward of the batch
    """
    name, layer, elements, flops = zip(*tensors, strict=True)
    peak, share = (
        rate if isinstance(rate, tuple) else (3 * batch * sum(flops) / rate, 1.0)
    )
    of = (network, batch, name, np.array(elements), np.array(flops))
    return LayerProfile.from_flops(
        *of, layer=layer, peak_flops_per_s=peak, utilisation=share
    )


def matches(text: str) -> bool:
    """Return whether the first line has the columns of FLOP counts.

    >>> matches("tensor,parameters,flops\\nconv,10,1e9\\n")
    True
    """
    names = {name.strip() for name in text.partition("\n")[0].split(",")}
    return {"tensor", "parameters", "flops"} <= names


def read(text: str, file: str, options: ImportOptions) -> ReadProfile:
    """Return the tensors as a profile at that batch and rate."""
    tensors = read_flops(read_sheet(text, file))
    return profile_of(tensors, options.network or "", file, options)


def read_flops(sheet: Sheet) -> list[Tensor]:
    """Return the tensors of a table of FLOP counts, a row each."""
    return [
        Tensor(
            row.tensor, row.layer or row.tensor, row.parameters, row.flops / row.batch
        )
        for row in FLOPS.frame(sheet, exact=False).itertuples()
    ]


def profile_of(
    tensors: list[Tensor], network: str, file: str, options: ImportOptions
) -> ReadProfile:
    """Return tensors with FLOP, wherever these are from, as a profile; and how much they are together."""
    profile = counted(network, options.batch or 1, tensors, _rate(options, file))
    total = sum(tensor.flops for tensor in tensors)
    text = (
        f"{total:.4g} forward FLOP a sample, three times that with backward; no update"
    )
    return ReadProfile(profile, (Finding("flops", (), text),))


def _rate(options: ImportOptions, file: str) -> tuple[float, float] | float:
    """Return peak rate and utilisation, or the seconds of the batch, whichever is said."""
    peak, share, compute_s = options.peak, options.utilisation, options.compute_s
    if compute_s is None and peak is not None and share is not None:
        return peak, share
    if compute_s is None or (peak, share) != (None, None) or not 0 < compute_s < np.inf:
        rates = "--peak (FLOP/s) and --utilisation (0..1) together, or --compute-s (above 0) alone"
        raise UserError(f"{file}: counts become times by a rate: say {rates}")
    return compute_s
