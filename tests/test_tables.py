"""The rendered tables: nothing printed is lost, differences are what they say, symbols have names."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import pandas as pd
import pytest

from ddlkit.report.claims import paper_table, symbols
from ddlkit.report.papers import dag, omgs, osf, sharing
from test_tables_sharing_omgs import sharing_networks


def sharing_table_2() -> pd.DataFrame:
    """As printed: one row per network, what belongs to batch sizes side by side."""
    by_batch = sharing.table2().pivot(index="network", columns="batch")
    best = {f"best_{batch}": by_batch["best"][batch] for batch in sharing.BATCHES}
    gain = {f"gain_{batch}_percent": by_batch["gain_percent"][batch] for batch in sharing.BATCHES}
    return sharing_networks().join(pd.DataFrame(best | gain), on="network")


TABLES = {
    **{("osf", n): getattr(osf, f"table{n}") for n in (2, 3)},
    **{("sharing", 1): sharing.table1, ("sharing", 2): sharing_table_2},
    **{("dag", n): getattr(dag, f"table{n}") for n in (4, 6)},
    **{("omgs", n): getattr(omgs, f"table{n}") for n in (5, 6)},
}
SYMBOLS = (("osf", "tab01"), ("dag", "tab01"), ("omgs", "tab02"))


@pytest.mark.parametrize(("paper", "number"), TABLES)
def test_a_rendered_table_holds_all_that_was_printed(paper: str, number: int) -> None:
    printed, shown = paper_table(paper, f"tab0{number}"), TABLES[paper, number]()
    pd.testing.assert_frame_equal(shown[list(printed.columns)], printed)
    for column in [name for name in shown if f"{name}_computed" in shown]:
        expected = shown[f"{column}_computed"] / shown[column] - 1
        pd.testing.assert_series_equal(
            shown[f"{column}_difference"], expected, check_names=False, obj=column
        )


@pytest.mark.parametrize(("paper", "name"), SYMBOLS)
def test_every_symbol_names_something_that_exists(paper: str, name: str) -> None:
    shown, printed = symbols(paper, name), paper_table(paper, name)
    pd.testing.assert_frame_equal(shown[list(printed.columns)], printed)
    assert shown["symbol"].tolist() == paper_table(paper, "symbols")["symbol"].tolist()
    assert shown["meaning"].str.len().min() > 3
    for name in shown["ddlkit"]:
        match = re.fullmatch(r"([\w.]+)(?:\((\w+)\))?", name)
        assert match, name
        path, parameter = match.groups()
        room, module, *attributes = path.split(".")
        found: Any = importlib.import_module(f"ddlkit.{room}.{module}")
        for attribute in attributes:
            known = getattr(found, "__dataclass_fields__", {})
            assert hasattr(found, attribute) or attribute in known, name
            found = getattr(found, attribute, None)
        if parameter:
            assert parameter in inspect.signature(found).parameters, name


def test_known_differences() -> None:
    networks = osf.table2().set_index("network")
    assert networks["layers_difference"].eq(0).all()
    assert networks["size_mb_difference"].abs().max() < 0.006
    assert networks["tensors_computed"].tolist() == [161, 314, 467, 32, 38]
    assert osf.table3()["size_mb_difference"].dropna().abs().max() < 0.005
    assert dag.table6()["size_bytes_difference"].dropna().eq(0).all()
    millions = dag.table4().set_index("network")["parameters_millions_difference"]
    assert millions.abs().tolist() == pytest.approx([0.016, 0.868, 0.065], abs=5e-4)
