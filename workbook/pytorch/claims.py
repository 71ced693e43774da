"""The checks of pytorch's claims, by estimates that torch's own functions returned.

They are compared with the statements of the source of torch 2.13.0. Importing this module
registers all checks.
"""

from __future__ import annotations

from functools import cache, partial

import numpy as np
import pandas as pd

from ddlkit.core.errors import UserError
from ddlkit.core.units import GIB
from workbook.common import source
from workbook.common.claims import CHECKS, Result, check, counted, paper_table
from workbook.pytorch.equations import VERSION, Group, nccl_s, saturation_bytes

# The columns that tell estimates apart.
KEYS = ["estimator", "quantity", "what", "device", "ranks", "bytes"]


@cache
def recorded(version: str = VERSION) -> pd.Series:
    """Return the recorded estimates of torch's own functions.

    Parameters
    ----------
    version : str, optional
        The version of torch.

    Returns
    -------
    Series
        Estimates in SI units or bytes, as the first machine with this version recorded
        them. A label has the values of KEYS with spaces between them, such as
        "nccl priced_bytes all_reduce H100 8 4194304".

    Raises
    ------
    UserError
        If no estimates of this version are recorded.
    """
    for machine in source.recordings("estimators").values():
        rows = machine.table("estimators").query("torch == @version")
        if len(rows):
            labels = rows[KEYS].astype(str).agg(" ".join, axis=1)
            return rows.set_index(labels)["estimate"]
    raise UserError(
        f"no estimators of torch {version} are recorded: "
        "run python -m workbook record estimators"
    )


def _called(pairs: pd.DataFrame) -> Result:
    """Return the ratios of recorded estimates that a claim is about.

    Parameters
    ----------
    pairs : DataFrame
        A row for each ratio. ``of`` is the label of an estimate in `recorded`. It is divided
        by the estimate with the label ``over``, unless this is "", and then by the number
        ``unit``.
    """
    estimates = recorded()
    numerators = estimates[pairs["of"]].to_numpy()
    denominators = np.array(
        [estimates[label] if label else 1.0 for label in pairs["over"]]
    )
    # Everything by which a numerator is divided, as the note shows it.
    divisors = denominators * pairs["unit"]
    ratios = [
        f"{numerator:.4g} over {divisor:.4g}"
        for numerator, divisor in zip(numerators, divisors, strict=True)
    ]
    note = f"by calling torch {VERSION}: {'; '.join(ratios)}"
    return counted(numerators / denominators / pairs["unit"], note)


_PAIRS = paper_table("pytorch", "called", keep_default_na=False)
CHECKS |= {
    str(claim): partial(_called, pairs) for claim, pairs in _PAIRS.groupby("claim")
}


@check("pytorch-saturation")
def _saturation() -> Result:
    """Return the share of the bandwidth of 1 GiB that an all-gather of the saturating size reaches.

    At the saturating size, torch says, an all-gather reaches 90% of the bandwidth. There is a
    share for eight GPUs of each kind that the claim names.
    """
    ratios = []
    for device in ("V100", "A100", "H100"):
        group = Group(device, 8)
        sizes = np.array([saturation_bytes(group, "all_gather"), GIB])
        bytes_per_s = sizes / nccl_s(sizes, group, "all_gather")
        saturated_bytes_per_s, full_bytes_per_s = bytes_per_s
        ratios.append(saturated_bytes_per_s / full_bytes_per_s)
    note = "by Eqs 2 and 4, which return the same numbers as the functions of torch"
    return counted(ratios, note)
