"""What one batch costs before training sees it, from a table of `ddlkit measure input`."""

from __future__ import annotations

from pathlib import Path

from ddlkit import store
from ddlkit.core.errors import UserError

QUANTITIES = {"io_s": "read", "decode_s": "decode", "h2d_s": "h2d"}
"""Task of training's graph -> quantity of the table."""
BEST = ("cold files", "one core", "pinned")
"""Of several ways that were measured the one that training takes: a file a picture, pinned memory."""


def read_inputs(path: Path, batch: int) -> dict[str, float]:
    """Median seconds of io_s, decode_s and h2d_s for ``batch`` pictures, as far as they were measured.

    A picture takes its part of the measured batch. Of pictures stored in two forms it is the JPEG's: what
    is stored raw is not decoded. Raises UserError for a table of something else, or of none of the three.
    """
    rows = store.load_table(path, "inputs")
    rows = rows[(rows["ranks"] == 1) | (rows["quantity"] == "decode")]
    rows = rows[rows["how"].isin(BEST) & (rows["stored"] != "raw")]
    each_s = (rows["seconds"] / rows["batch"]).groupby(rows["quantity"]).median()
    known = {name: batch * float(each_s[of]) for name, of in QUANTITIES.items() if of in each_s}
    if not known:
        raise UserError(
            f"{path}: tells of no reading, decoding or copying: give inputs-alone-*.csv"
        )
    return known
