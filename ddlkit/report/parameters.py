"""What a notebook's parameters may be: each is checked against what is at hand before anything is computed.

The first cell behind them says ``parameters.validate("03_predicting_a_step", globals())``: a wrong one ends
it with one line that lists what may be given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddlkit import papers, store
from ddlkit.core.errors import UserError
from ddlkit.core.fit import AUTO, SIMPLE_FIRST
from ddlkit.core.pieces import LINES
from ddlkit.papers.dag import STRATEGIES
from ddlkit.report import source
from ddlkit.report.clusters import pollux, vidur
from ddlkit.report.figures import osf_scaling
from ddlkit.report.plots.shown import show_tables

Rule = Callable[[Any, Mapping[str, Any]], str]
"""Of a value and the parameters before it: what may be given where the value may not, else nothing."""


def one_of(choices: Callable[[Mapping[str, Any]], Iterable[Any]], many: bool = False) -> Rule:
    """Return the rule of a value, or of ``many``, from a list that may depend on the parameters before it."""

    def rule(value: Any, given: Mapping[str, Any]) -> str:
        allowed, values = list(choices(given)), value if many else [value]
        holds = isinstance(values, list | tuple) and len(values) > 0
        holds = holds and all(item in allowed and values.count(item) == 1 for item in values)
        holds = holds and not isinstance(value, bool)
        return "" if holds else f"{'some' if many else 'one'} of {', '.join(map(str, allowed))}"

    return rule


def number(least: float, most: float, kind: Any = int) -> Rule:
    """Return the rule of a number from ``least`` to ``most``, both included."""

    def rule(value: Any, _: Mapping[str, Any]) -> str:
        is_number = isinstance(value, kind) and not isinstance(value, bool)
        words = f"a{' whole' * (kind is int)} number from {least:,} to {most:,}"
        return "" if is_number and least <= value <= most else words

    return rule


def place(pattern: str, machines: bool = False) -> Rule:
    """Return the rule of a place: empty, a directory with a file like ``pattern``, or a recorded machine."""

    def rule(value: Any, _: Mapping[str, Any]) -> str:
        names = [path.name for path in store.list_recorded()] if machines else []
        holds = value in ("", *names)
        if isinstance(value, str) and not holds:
            with suppress(OSError, ValueError):  # longer than a name may be, or not to be read
                folders = (Path(value), store.ROOT / value)
                holds = any(store.list_tables(folder, pattern) for folder in folders)
        words = f"empty, or a directory with {pattern}{', or one of ' * machines}{', '.join(names)}"
        return "" if holds else words

    return rule


def _messages(given: Mapping[str, Any], link: str = "") -> Any:
    """Return the all-reduces of the chosen tables, those over one link if it is given."""
    rows = source.open_source(given["data"]).table("collectives")
    return rows[(rows["collective"] == "all_reduce") & (rows["link"].eq(link) | (link == ""))]


TABLES, RUNS, PREDICTED = place("*-*.csv", True), place("runs-*.csv"), place("predicted-*.csv")
MESSAGES = {
    "data": TABLES,
    "link": one_of(lambda given: sorted(_messages(given)["link"].unique())),
    "workers": one_of(lambda given: _messages(given, given["link"])["ranks"].unique().tolist()),
}
NETWORK = {"network": one_of(lambda given: source.open_source(given["data"]).networks())}
CASE = {"data": TABLES} | NETWORK | MESSAGES
FORMS = (*(f"alpha_beta:{how}" for how in LINES), *SIMPLE_FIRST, AUTO)
DRAWN = {"instances": number(1, 100_000), "seed": number(0, 10**9)}
CHAIN = {"layers": number(1, 20), "gpus": number(1, 16)}

RULES: dict[str, dict[str, Rule]] = {
    "00_a_step_on_paper": CASE,
    "01_gradients_and_messages": CASE,
    "02_fitting_costs": MESSAGES,
    "03_predicting_a_step": CASE,
    "04_choosing_buckets": CASE | DRAWN,
    "05_is_it_true": {"data": TABLES, "form": one_of(lambda given: FORMS)},
    "06_scaling_factor": {
        "formulas": one_of(lambda _: osf_scaling.FORMULAS, many=True),
        "data": TABLES,
    },
    "07_where_time_goes": {"slow_rank": number(1.01, 10, int | float)},
    "08_training_as_a_graph": CHAIN | {"framework": one_of(lambda given: STRATEGIES)},
    "09_sparse_gradients": DRAWN | {"recorded": RUNS},
    "10_contention": {"data": TABLES},
    "11_where_it_breaks": {"first": PREDICTED, "last": PREDICTED},
    "12_real_gpus": {
        "chosen": one_of(lambda given: pollux.NETWORKS),
        "table": one_of(lambda given: vidur.tables()),
    },
    "13_your_own_cluster": CASE,
    "14_tables_and_verdicts": {"papers": one_of(lambda _: papers.load(), many=True)},
}
"""By notebook, its parameters in their order."""


def validate(notebook: str, names: Mapping[str, Any]) -> None:
    """Check a notebook's parameters, ``names`` being its globals(); from then on tables show as ours do.

    Raises UserError for the first one that is something else.
    """
    show_tables()
    given: dict[str, Any] = {}
    for name, rule in RULES[notebook].items():
        given[name] = names[name]
        if allowed := rule(names[name], given):
            shown = " ".join(repr(names[name]).split())
            shown = shown if len(shown) <= 60 else f"{shown[:60]}..."
            raise UserError(f"{notebook}: {name} is {shown}: give {allowed}")
