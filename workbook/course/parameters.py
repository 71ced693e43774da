"""The allowed values of the parameters of notebooks.

`validate` checks parameters before anything is computed.
"""

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

Given = Mapping[str, Any]
"""The parameters of a notebook by name."""


def _all_reduces(given: Given) -> Any:
    """Return the rows of timed all-reduces in the tables that the parameter ``data`` names."""
    rows = source.open_source(given["data"]).table("collectives")
    return rows[rows["collective"] == "all_reduce"]


def _networks(given: Given) -> Collection[str]:
    return source.open_source(given["data"]).networks()


def _links(given: Given) -> Collection[str]:
    return sorted(_all_reduces(given)["link"].unique())


def _workers(given: Given) -> Collection[int]:
    rows = _all_reduces(given)
    return list(rows[rows["link"] == given["link"]]["ranks"].unique())


FORMS_OF_COST = (*(f"alpha_beta:{line}" for line in LINES), *SIMPLE_FIRST, AUTO)
CHOICES: dict[str, Callable[[Given], Collection[Any]]] = {
    "network": _networks,
    "link": _links,
    "workers": _workers,
    "form": lambda _: FORMS_OF_COST,
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
"""The allowed values of each parameter, which may depend on the parameters before it.

If a parameter is a list, they are the allowed items."""


def validate(**given: Any) -> None:
    """Check the parameters of a notebook, and prepare what the notebook shows.

    From then on the notebook shows tables with the workbook's heads and units. If its numbers
    are not those of the recording in the text, a banner says so.

    Parameters
    ----------
    **given : object
        The parameters by name. Those without an entry in CHOICES are not checked. Some
        entries depend on other parameters, which must be given, too: the links depend on
        ``data``, and the numbers of workers on ``data`` and ``link``.

    Raises
    ------
    UserError
        If a parameter has a value that is not allowed.
    """
    show_tables()
    _say_whose_tables(str(given.get("data", "")))
    # Checks go in the order of CHOICES, in which a parameter stands after those on which its
    # allowed values depend.
    for name in CHOICES:
        if name not in given:
            continue
        value = given[name]
        # Each entry is a function that returns the allowed values of a parameter.
        allowed = [*CHOICES[name](given)]
        items = value if isinstance(value, list) else [value]
        # An empty list is refused, because a notebook would have nothing to show.
        if not items or not all(item in allowed for item in items):
            # The error is one line, with at most 60 characters of the value and at most 50 of
            # the allowed values, so that it does not fill the page.
            shown = " ".join(repr(value).split())
            listed = ", ".join(map(str, allowed[:50]))
            raise UserError(f"{name} is {shown:.60}: give one of {listed}")


def _say_whose_tables(data: str) -> None:
    """Show a banner if the numbers are not those of the recording in the text.

    ``data`` is the parameter of this name: a directory of tables or the name of a recorded
    machine.
    """
    # Without ``data``, the tables are those of the recording that the text speaks of.
    if not data or data == source.TEACHING:
        return
    words = (
        f"The numbers and figures on this page are made from {escape(data)}. "
        f"The text speaks of the recording {source.TEACHING}."
    )
    style = "border: 2px dashed; padding: 0.5em"
    show(f'<div class="banner" style="{style}">{words}</div>')
