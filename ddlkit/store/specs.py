"""What makers say of their devices: data/specs/devices.csv, each value with its source."""

from __future__ import annotations

import functools

from ddlkit.store import files
from ddlkit.store.paths import DATA
from ddlkit.store.sheet import Column, Schema, read_sheet

_DEVICES = Schema(
    "devices",
    (
        Column("device", "str", "named"),
        Column("quantity", "str", "named"),
        Column("value", "float", "positive"),
        Column("source", "str", "named"),
    ),
    key=("device", "quantity"),
)


@functools.cache
def _specs() -> dict[tuple[str, str], float]:
    path = DATA / "specs" / "devices.csv"
    frame = _DEVICES.frame(read_sheet(files.text_of(files.read(path), path), str(path)))
    return {
        (name, quantity): value
        for names, quantity, value in zip(
            frame["device"], frame["quantity"], frame["value"], strict=True
        )
        for name in names.split("|")
    }


def datasheet(device: str, quantity: str) -> float:
    """The maker's value, in the unit that the quantity is named by; 0 where none is known.

    device : as nvidia-smi names it. quantity : {fp32,tf32,bf16,fp16}_flops_per_s (dense, without
    sparsity; on tensor cores where the precision has them) or memory_bytes_per_s.

    Raises UserError when data/specs/devices.csv is damaged or missing.
    """
    return _specs().get((device, quantity), 0.0)
