"""What the rendered tables of sharing and omgs compute."""

from __future__ import annotations

import math

import pandas as pd

from ddlkit.papers.sharing import model_intensity
from ddlkit.report.claims import paper_table, recomputed
from ddlkit.report.papers import omgs, sharing
from ddlkit.run.nets import registry
from ddlkit.store import network_named


def sharing_networks() -> pd.DataFrame:
    """Size, FLOP and intensity of sharing's seven networks, as printed and of the zoo's."""
    printed = paper_table("sharing", "tab02")
    sizes = [registry.size(network_named(network)) for network in printed["network"]]
    return recomputed(
        printed[["network", "parameters_millions", "gflop", "intensity"]],
        parameters_millions=[size.parameters / 1e6 for size in sizes],
        gflop=[size.forward_flops / 1e9 for size in sizes],
        intensity=[model_intensity(s.forward_flops, s.parameters) for s in sizes],
    )


def test_sharing_table_2_follows_from_figure_8() -> None:
    table = sharing.table2()
    assert len(table) == 28
    named = zip(table["best"], table["best_from_fig08"], strict=True)
    assert all(printed in computed.split(" = ") for printed, computed in named)


def test_sharing_table_2_counts_as_the_zoo_but_for_vit() -> None:
    table = sharing_networks().set_index("network")
    assert (table["parameters_millions_difference"].abs() < 0.005).all()
    off = table["gflop_difference"].abs() > 0.03
    assert table.index[off].tolist() == ["ViT-Base/16"]


def test_sharing_table_1_counts_what_is_defined() -> None:
    table = sharing.table1().set_index("kernel")
    assert table["bytes_computed"].notna().all()
    assert table.index[table["flops_computed"].notna()].tolist() == ["Convolution", "Linear"]
    elements = math.prod(sharing.SHAPE)
    # A 7x7 convolution of stride 2 does 49 x 64 multiply-adds for a quarter of its inputs' number.
    assert table.loc["Convolution", "flops_computed"] == 2 * 49 * 64 * elements / 4
    assert table.loc["Linear", "flops_computed"] == 2 * 64 * elements


def test_omgs_table_5_is_counted_exactly() -> None:
    table = omgs.table5()
    for column in ("topk", "lags", "mgs"):
        assert (table[f"{column}_difference"] == 0).all()


def test_omgs_table_6_is_within_rounding_but_for_one() -> None:
    table = omgs.table6().set_index("model")
    for column in ("s1", "s2"):
        inside = table[column].between(
            table[f"{column}_least"] - 5e-4, table[f"{column}_most"] + 5e-4
        )
        assert table.index[~inside].tolist() == (["LSTM-PTB"] if column == "s2" else [])
