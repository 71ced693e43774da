"""Tables I to VI of `dag`."""

from __future__ import annotations

import pandas as pd

from ddlkit.papers import networks
from ddlkit.report.claims import paper_table
from ddlkit.report.tables import recomputed


def table4() -> pd.DataFrame:
    """dag Tab IV: three networks, counted from their architectures.

    Added: gflop_computed, FLOP of a forward pass on one image (2 a multiply-add) / 1e9.
    """
    frame = paper_table("dag", "tab04")
    names = frame["network"]
    millions = [sum(networks.parameters(name)) / 1e6 for name in names]
    frame = recomputed(frame, "parameters_millions", millions)
    return frame.assign(gflop_computed=[2 * networks.multiply_adds(name) / 1e9 for name in names])


def table6() -> pd.DataFrame:
    """dag Tab VI: one iteration of AlexNet, layer by layer.

    size_bytes: of Caffe's AlexNet in float32. Added for layers with parameters: forward FLOP of the
    batch over the printed forward time, and bytes over the printed communication time.
    """
    frame = paper_table("dag", "tab06")
    layers = iter(networks.layers("AlexNet"))
    batch = int(paper_table("dag", "tab04").set_index("network")["batch"]["AlexNet"])
    of_rows = [next(layers) if size else networks.Layer((), 0) for size in frame["size_bytes"]]
    flops = pd.Series([2.0 * batch * layer.multiply_adds for layer in of_rows])
    rates = {
        "forward_flops_per_s_computed": 1e6 * flops.where(flops > 0) / frame["forward_us"],
        "communication_bytes_per_s_computed": 1e6
        * frame["size_bytes"].where(flops > 0)
        / frame["communication_us"],
    }
    counted = [4 * sum(layer.tensors) for layer in of_rows]
    return recomputed(frame, "size_bytes", counted).assign(**rates)


def table6_totals() -> pd.DataFrame:
    """What dag Tab VI adds up to: quantity, value, unit; the data layer is no computation."""
    frame = table6()
    computed = frame[frame["name"] != "data"]
    forward_s, backward_s, sent_s = (
        float(computed[f"{name}_us"].sum()) / 1e6
        for name in ("forward", "backward", "communication")
    )
    convolutions = computed["name"].str.startswith("conv")
    shortened_s = forward_s - 0.9e-6 * float(computed["forward_us"][convolutions].sum())
    rates = computed["forward_flops_per_s_computed"] * computed["forward_us"] / 1e6
    flops = float(rates.sum())
    rows = [
        ("forward", forward_s, "s"),
        ("backward", backward_s, "s"),
        ("communication", sent_s, "s"),
        ("parameters", float(frame["size_bytes"].sum()) / 4, "1"),
        ("backward over forward", backward_s / forward_s, "1"),
        ("forward rate", flops / forward_s, "FLOP/s"),
        ("backward over forward, convolutions' forward / 10", backward_s / shortened_s, "1"),
        ("forward rate, convolutions' forward / 10", flops / shortened_s, "FLOP/s"),
    ]
    return pd.DataFrame(rows, columns=["quantity", "value", "unit"])
