"""pytorch: what torch 2.13.0's own functions said when they were called, beside what its source states."""

from __future__ import annotations

from functools import cache, partial

import numpy as np
import pandas as pd

from ddlkit.core.errors import UserError
from ddlkit.core.units import GIB
from workbook.common import source
from workbook.common.claims import CHECKS, Result, check, counted, paper_table
from workbook.pytorch.equations import VERSION, Group, nccl_s, saturation_bytes

KEYS = ["estimator", "quantity", "what", "device", "ranks", "bytes"]


@cache
def recorded(version: str = VERSION) -> pd.Series:
    """Return what the functions of a torch said, by KEYS as one text, in SI units or bytes."""
    for machine in source.recordings("estimators").values():
        rows = machine.table("estimators").query("torch == @version")
        if len(rows):
            return rows.set_index(rows[KEYS].astype(str).agg(" ".join, axis=1))[
                "estimate"
            ]
    raise UserError(
        f"no estimators of torch {version} are recorded: run python -m workbook record estimators"
    )


def _called(pairs: pd.DataFrame) -> Result:
    """Judge recorded numbers over others, or over a unit alone."""
    over = np.array([recorded()[key] if key else 1.0 for key in pairs["over"]])
    of = recorded()[pairs["of"]].to_numpy()
    each = "; ".join(
        f"{a:.4g} over {b:.4g}" for a, b in zip(of, over * pairs["unit"], strict=True)
    )
    return counted(of / over / pairs["unit"], f"by calling torch {VERSION}: {each}")


_PAIRS = paper_table("pytorch", "called", keep_default_na=False)
CHECKS |= {
    str(claim): partial(_called, pairs) for claim, pairs in _PAIRS.groupby("claim")
}


@check("pytorch-saturation")
def _saturation() -> Result:
    groups = [Group(name, 8) for name in ("V100", "A100", "H100")]
    sizes = [np.array([saturation_bytes(each, "all_gather"), GIB]) for each in groups]
    rates = [
        n / nccl_s(n, each, "all_gather") for n, each in zip(sizes, groups, strict=True)
    ]
    return counted(
        [rate[0] / rate[1] for rate in rates], "Eqs 2 and 4, which equal its functions"
    )
