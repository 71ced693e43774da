"""The rendered tables: nothing printed is lost, differences are what they say."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import pytest

from test_networks import size
from workbook.common.claims import paper_table
from workbook.common.specs import network_named
from workbook.dag import tables as dag
from workbook.omgs import tables as omgs
from workbook.osf import tables as osf
from workbook.sharing import tables as sharing

TABLES = {
    **{("osf", 2): osf.table2, ("osf", 3): osf.table3, ("sharing", 1): sharing.table1},
    **{("dag", 4): dag.table4, ("dag", 6): dag.table6},
    **{("omgs", 5): omgs.table5, ("omgs", 6): omgs.table6},
}


@pytest.mark.parametrize(("paper", "number"), TABLES)
def test_a_rendered_table_holds_all_that_was_printed(paper: str, number: int) -> None:
    printed, shown = paper_table(paper, f"tab0{number}"), TABLES[paper, number]()
    pd.testing.assert_frame_equal(shown[list(printed.columns)], printed)
    for column in [name for name in shown if f"{name}_computed" in shown]:
        expected = shown[f"{column}_computed"] / shown[column] - 1
        difference = shown[f"{column}_difference"]
        pd.testing.assert_series_equal(
            difference, expected, check_names=False, obj=column
        )


def test_tables_of_osf_and_dag_differ_by_known_amounts() -> None:
    networks = osf.table2().set_index("network")
    assert networks["layers_difference"].eq(0).all()
    assert networks["size_mb_difference"].abs().max() < 0.006
    assert networks["tensors_computed"].tolist() == [161, 314, 467, 32, 38]
    assert osf.table3()["size_mb_difference"].dropna().abs().max() < 0.005
    assert dag.table6()["size_bytes_difference"].dropna().eq(0).all()
    millions = dag.table4().set_index("network")["parameters_millions_difference"]
    assert millions.abs().tolist() == pytest.approx([0.016, 0.868, 0.065], abs=5e-4)


def test_sharing_tables_follow_from_figure_8_and_counts() -> None:
    table = sharing.table2()
    assert len(table) == 28
    named = zip(table["best"], table["best_from_fig08"], strict=True)
    assert all(printed in computed.split(" = ") for printed, computed in named)
    printed = paper_table("sharing", "tab02").set_index("network")
    for batch, rows in table.set_index("network").groupby("batch"):
        assert rows["best"].equals(
            printed.loc[rows.index, f"best_{batch}"].rename("best")
        )
        assert (
            rows["gain_percent"] == printed.loc[rows.index, f"gain_{batch}_percent"]
        ).all()
    counted = np.array([size(network_named(network)) for network in printed.index])
    millions = counted[:, 0] / 1e6
    assert printed["parameters_millions"].tolist() == pytest.approx(millions, rel=0.005)
    gflop = pd.Series(counted[:, 2] / 1e9, printed.index)
    off = (gflop / printed["gflop"] - 1).abs() > 0.03
    assert printed.index[off].tolist() == ["ViT-Base/16"]
    table = sharing.table1().set_index("kernel")
    assert table.index[table["flops_computed"].notna()].tolist() == [
        "Convolution",
        "Linear",
    ]
    elements = math.prod(sharing.SHAPE)
    # A 7x7 convolution of stride 2 does 49 x 64 multiply-adds for a quarter of its inputs' number.
    assert table.loc["Convolution", "flops_computed"] == 2 * 49 * 64 * elements / 4
    assert table.loc["Linear", "flops_computed"] == 2 * 64 * elements


def test_omgs_tables_are_counted_exactly_and_within_rounding_but_for_one() -> None:
    messages, times = omgs.table5(), omgs.table6().set_index("model")
    for column in ("topk", "lags", "mgs"):
        assert (messages[f"{column}_difference"] == 0).all()
    for column in ("s1", "s2"):
        least, most = times[f"{column}_least"] - 5e-4, times[f"{column}_most"] + 5e-4
        outside = times.index[~times[column].between(least, most)].tolist()
        assert outside == (["LSTM-PTB"] if column == "s2" else [])
