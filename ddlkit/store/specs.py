"""What makers and authors say of their devices and networks: data/specs, each value with its source."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from ddlkit.store import files
from ddlkit.store.paths import DATA
from ddlkit.store.sheet import Column, Schema, read_sheet

if TYPE_CHECKING:
    from pandas import DataFrame

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
_NETWORKS = Schema(
    "networks",
    (
        Column("name", "str", "named"),
        Column("parameters", "int", "positive"),
        Column("parameters_within", "int", "non_negative"),
        Column("tensors", "int", "positive"),
        Column("printed_gops", "float", "non_negative"),
        Column("flops_per_op", "int", "positive"),
        Column("forward_gflops", "float", "non_negative"),
        Column("sample", "str", "named"),
        Column("source", "str", "named"),
    ),
    key=("name",),
)


def _read(schema: Schema) -> DataFrame:
    path = DATA / "specs" / f"{schema.name}.csv"
    return schema.frame(read_sheet(files.text_of(files.read(path), path), str(path)))


@functools.cache
def _datasheets() -> dict[tuple[str, str], float]:
    frame = _read(_DEVICES)
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
    return _datasheets().get((device, quantity), 0.0)


def published_networks() -> DataFrame:
    """What is published of each network's size, one row a network; 0 where nothing is.

    parameters_within : how far the true number may lie off the printed one, rounded as it is
    tensors : that hold parameters
    printed_gops, flops_per_op, forward_gflops : 1e9 operations of the forward pass on one ``sample``
        as printed, how many FLOP the source means by one (2 where it counts multiply-adds), and their
        product; 1 multiply-add is 2 FLOP everywhere here

    Raises UserError when data/specs/networks.csv is damaged or missing.
    """
    return _read(_NETWORKS)


def measured_peaks(peaks: DataFrame) -> dict[tuple[str, str], float]:
    """(device, precision) -> FLOP/s of the fastest product in a table ``peaks``.

    The fastest of all samples, not a median: what else runs can only make a product slower, and a peak
    is what the device can do.
    """
    rate = 2.0 * peaks["side"].astype(float) ** 3 / peaks["seconds"]
    best: dict[tuple[str, str], float] = (
        rate.groupby([peaks["device"], peaks["precision"]]).max().to_dict()
    )
    return best
