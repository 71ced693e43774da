"""FLOP counts by tensor, from a user's own CSV, as layer profiles.

The time of a tensor is in proportion to its FLOP.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from ddlkit.core.errors import Finding, UserError
from ddlkit.core.workload import LayerProfile
from ddlkit.formats.contract import ImportOptions, ReadProfile
from ddlkit.store.sheet import Column, Schema, Sheet, read_sheet

REQUIRED = ("tensor", "parameters", "flops")
"""Columns that a table of FLOP counts must have."""

FLOPS = Schema(
    "FLOP counts",
    (
        Column("tensor", "str", "named"),
        Column("layer", "str", default=""),
        Column("parameters", "int", "positive"),
        Column("flops", "float", "non_negative"),
        # The number of samples whose FLOP are counted.
        Column("batch", "int", "positive", default="1"),
    ),
    key=("tensor",),
)


class Tensor(NamedTuple):
    """A parameter tensor with its FLOP.

    Attributes
    ----------
    name : str
        The tensor.
    layer : str
        The layer that has the tensor.
    elements : int
        Its number of parameters.
    flops : float
        FLOP of one sample in forward, of those operations whose backward comes before
        the gradient of the tensor is ready.
    """

    name: str
    layer: str
    elements: int
    flops: float


def matches(text: str) -> bool:
    r"""Return whether the first line of a file has the columns of FLOP counts.

    Examples
    --------
    >>> matches("tensor,parameters,flops\nconv,10,1e9\n")
    True
    """
    first_line, _, _ = text.partition("\n")
    names = {name.strip() for name in first_line.split(",")}
    return set(REQUIRED) <= names


def read(text: str, file: str, options: ImportOptions) -> ReadProfile:
    """Return the FLOP counts of a file as a profile.

    The options ``network`` and ``batch`` are added to the profile. FLOP become times
    either by the rate of the device (the options ``peak`` and ``utilisation``) or by the
    time of a batch (``compute_s``). The result also has a finding, which is a remark for
    the user: the FLOP of one sample.

    `ddlkit.formats.contract` describes arguments, result and errors.
    """
    tensors = read_flops(read_sheet(text, file))
    return profile_of(tensors, options.network or "", file, options)


def read_flops(sheet: Sheet) -> list[Tensor]:
    """Return the tensors of a table of FLOP counts.

    Parameters
    ----------
    sheet : Sheet
        The cells of the table.

    Returns
    -------
    list of Tensor
        One for each row, with the FLOP of one sample. A tensor without a cell in the column
        ``layer`` is its own layer.

    Raises
    ------
    UserError
        If the table is wrong.
    """
    # The table counts the FLOP of ``batch`` samples. `exact=False` marks a user's own file,
    # which may have other columns. They are ignored.
    return [
        Tensor(
            name=row.tensor,
            layer=row.layer or row.tensor,
            elements=row.parameters,
            flops=row.flops / row.batch,
        )
        for row in FLOPS.frame(sheet, exact=False).itertuples()
    ]


def profile_of(
    tensors: list[Tensor], network: str, file: str, options: ImportOptions
) -> ReadProfile:
    """Return a layer profile whose times are in proportion to the FLOP of its tensors.

    Parameters
    ----------
    tensors : list of Tensor
        The tensors, in forward order.
    network : str
        The name of the network, "" if it is not known.
    file : str
        The file, as errors name it.
    options : ImportOptions
        The batch size, 1 by default, and the source of times: ``peak`` and
        ``utilisation``, or ``compute_s``, the time of a batch.

    Returns
    -------
    ReadProfile
        The profile, and a finding, which is a remark for the user: the FLOP of one sample.

    Raises
    ------
    UserError
        If no tensor has any FLOP, if the options have no source of times or two, or if one
        of them is out of range.
    """
    batch = options.batch or 1
    # A list of tensors becomes one tuple for each field.
    names, layers, elements, flops = zip(*tensors, strict=True)
    if not any(flops):
        raise UserError(
            f"{file}: no tensor has any FLOP: count them, or measure the layers"
        )
    # ``flops`` are those of forward for one sample. Backward has two products of matrices for
    # each one of forward, so an iteration has three times the FLOP of forward.
    batch_flops = 3 * batch * sum(flops)
    # If the options have the time of a batch, its FLOP divided by this time are the rate.
    peak_flops_per_s, utilisation = _rate(options, file, batch_flops)
    profile = LayerProfile.from_flops(
        network,
        batch,
        names,
        np.array(elements),
        np.array(flops),
        layer=layers,
        peak_flops_per_s=peak_flops_per_s,
        utilisation=utilisation,
    )
    text = (
        f"{sum(flops):.4g} forward FLOP a sample, "
        "three times as many with the backward pass; the update takes no time"
    )
    return ReadProfile(profile, (Finding("flops", text=text),))


def _rate(options: ImportOptions, file: str, batch_flops: float) -> tuple[float, float]:
    """Return the peak rate in FLOP/s and the share of it that is reached.

    If the options have the time of a batch instead, the rate is ``batch_flops`` divided by
    that time, and the share is 1. Raises UserError unless the options have either both the
    rate and the share, or the time alone.
    """
    missing = missing_for_times(options)
    if missing:
        raise UserError(f"{file}: has FLOP counts and no times: give {missing}")
    peak = options.peak
    utilisation = options.utilisation
    compute_s = options.compute_s
    if compute_s is None:
        # Neither is None, because nothing is missing.
        assert peak is not None
        assert utilisation is not None
        _refuse_wrong_rate(peak, utilisation)
        return peak, utilisation
    if peak is not None or utilisation is not None:
        raise UserError(
            f"--compute-s {compute_s:g}: is a time, and --peak and --utilisation are "
            "another source of times: give --compute-s alone, or --peak with --utilisation"
        )
    if not 0 < compute_s < math.inf:
        raise UserError(f"--compute-s {compute_s:g}: must be finite and above zero")
    return batch_flops / compute_s, 1.0


def missing_for_times(options: ImportOptions) -> str:
    """Return which options must be given in addition to turn FLOP into times.

    Parameters
    ----------
    options : ImportOptions
        What the user has given.

    Returns
    -------
    str
        The options in words, "" if none is missing.

    Examples
    --------
    >>> missing_for_times(ImportOptions(peak=1e12))
    '--utilisation as well'
    """
    if options.compute_s is not None:
        return ""
    if options.peak is None and options.utilisation is None:
        return "--compute-s, or --peak (FLOP/s) with --utilisation"
    if options.utilisation is None:
        return "--utilisation as well"
    if options.peak is None:
        return "--peak (FLOP/s) as well"
    return ""


def _refuse_wrong_rate(peak_flops_per_s: float, utilisation: float) -> None:
    """Raise UserError if --peak is not above zero, or if --utilisation is no share."""
    if not 0 < peak_flops_per_s < math.inf:
        raise UserError(
            f"--peak {peak_flops_per_s:g}: must be finite and above zero FLOP per second"
        )
    if not 0 < utilisation <= 1:
        raise UserError(f"--utilisation {utilisation:g}: must be above 0 and at most 1")
