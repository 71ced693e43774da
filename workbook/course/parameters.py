"""What a notebook's parameters may be: `validate` checks them before anything is computed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from html import escape
from typing import Any

from ddlkit.core.errors import UserError
from ddlkit.core.fit import AUTO, SIMPLE_FIRST
from ddlkit.core.pieces import LINES
from ddlkit.core.strategies import STRATEGIES
from workbook.common import papers, source
from workbook.osf.factors import FORMULAS
from workbook.plots.shown import show, show_tables
from workbook.pytorch.curves import logs
from workbook.validate.clusters import dense_tables, pollux


def _messages(given: Mapping[str, Any]) -> Any:
    rows = source.open_source(given["data"]).table("collectives")
    return rows[rows["collective"] == "all_reduce"]


CHOICES: dict[str, Callable[[Mapping[str, Any]], Collection[Any]]] = {
    "network": lambda given: source.open_source(given["data"]).networks(),
    "link": lambda given: sorted(_messages(given)["link"].unique()),
    "workers": lambda given: (
        _messages(given).query("link == @given['link']")["ranks"].unique()
    ),
    "form": lambda _: (*(f"alpha_beta:{how}" for how in LINES), *SIMPLE_FIRST, AUTO),
    "formulas": lambda _: FORMULAS,
    "framework": lambda _: STRATEGIES,
    "chosen": lambda _: pollux.NETWORKS,
    "table": lambda _: dense_tables(),
    "log": lambda _: logs(),
    "papers": lambda _: papers.PAPERS,
    "instances": lambda _: range(1, 100_001),
    "layers": lambda _: range(1, 21),
    "gpus": lambda _: range(1, 17),
}
"""By parameter, what it may be, which may depend on those before it; of a list, what each may be."""


def validate(**given: Any) -> None:
    """Check a notebook's parameters, and let tables show as ours from then on. Raises UserError."""
    show_tables()
    _say_whose_tables(str(given.get("data", "")))
    for name in filter(given.__contains__, CHOICES):
        value, allowed = given[name], [*CHOICES[name](given)]
        values = value if isinstance(value, list) else [value]
        if not values or not all(item in allowed for item in values):
            listed = ", ".join(map(str, allowed[:50]))
            raise UserError(
                f"{name} is {' '.join(repr(value).split()):.60}: give one of {listed}"
            )


def _say_whose_tables(data: str) -> None:
    """Show a banner where the numbers are not those that the text speaks of."""
    if data and data != source.TEACHING:
        words = (
            f"The numbers and figures on this page are made from {escape(data)}. "
            f"The text speaks of the recording {source.TEACHING}."
        )
        show(
            f'<div class="banner" style="border: 2px dashed; padding: 0.5em">{words}</div>'
        )
