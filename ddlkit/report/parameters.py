"""What a notebook's parameters may be: each is checked against what is at hand before anything is computed.

The first cell behind them says ``parameters.validate("03_predicting_a_step", globals())``. That ends a wrong
one with one line that lists what may be given, instead of with whatever it breaks later on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
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

Given = Mapping[str, Any]
"""A notebook's parameters by name."""


@dataclass(frozen=True)
class OneOf:
    """A value from a list, which may hang on the parameters before it; or several, a list of one and more."""

    choices: Callable[[Given], Iterable[Any]]
    several: bool = False

    def known(self, given: Given) -> list[Any]:
        """What may be given."""
        return list(self.choices(given))

    def told(self, known: list[Any]) -> str:
        """That, in words."""
        return f"{'some' if self.several else 'one'} of {', '.join(map(str, known))}"

    def holds(self, value: Any, known: list[Any]) -> bool:
        """Whether it is one of them, or such a list without repeats."""
        if not self.several:
            return not isinstance(value, bool) and value in known
        if not isinstance(value, list | tuple) or not value:
            return False
        return all(one in known for one in value) and len(set(value)) == len(value)

    def others(self, value: Any, known: list[Any]) -> list[Any]:
        """Other values that hold."""
        every = [[one] for one in known] if self.several else known
        return [one for one in every if one != value]


@dataclass(frozen=True)
class Number:
    """A number from ``least`` to ``most``, both included."""

    least: float
    most: float
    whole: bool = False

    def known(self, given: Given) -> list[Any]:
        """No list: it hangs on nothing else."""
        return []

    def told(self, known: list[Any]) -> str:
        """What may be given, in words."""
        return f"a{' whole' * self.whole} number from {self.least:,} to {self.most:,}"

    def holds(self, value: Any, known: list[Any]) -> bool:
        """Whether it is such a number."""
        kinds = int if self.whole else int | float
        return (
            isinstance(value, kinds)
            and not isinstance(value, bool)
            and math.isfinite(value)
            and self.least <= value <= self.most
        )

    def others(self, value: Any, known: list[Any]) -> list[Any]:
        """Other values that hold."""
        return [one for one in (self.least, self.most) if one != value]


@dataclass(frozen=True)
class Place:
    """Where tables are: empty, a directory that holds a file like ``pattern``, or a recorded machine's name.

    recorded : such directories, or machines, that are recorded
    machines : whether a machine's name is understood
    """

    pattern: str
    recorded: Callable[[], Iterable[Path]]
    machines: bool = False

    def known(self, given: Given) -> list[Any]:
        """Names, or directories, of what is recorded."""
        return [path.name if self.machines else str(path) for path in sorted(self.recorded())]

    def told(self, known: list[Any]) -> str:
        """What may be given, in words."""
        names = f", or one of {', '.join(known)}" if self.machines else ""
        return f"empty, or a directory with {self.pattern}{names}"

    def holds(self, value: Any, known: list[Any]) -> bool:
        """Whether there is such a place."""
        if not isinstance(value, str) or "\0" in value:
            return False
        if not value or value in known:
            return True
        try:
            return any(
                store.list_tables(place, self.pattern)
                for place in (Path(value), store.ROOT / value)
            )
        except OSError:  # longer than a name may be, or not to be read
            return False

    def others(self, value: Any, known: list[Any]) -> list[Any]:
        """Other values that hold."""
        return known


Rule = OneOf | Number | Place


def _campaign(name: str, pattern: str = "runs-*.csv") -> Place:
    return Place(pattern, lambda: store.RECORDED.glob(f"*/{name}"))


def _networks(given: Given) -> list[str]:
    return source.open_source(given["data"]).networks()


def _links(given: Given) -> list[str]:
    rows = source.open_source(given["data"]).table("collectives")
    return sorted(rows.loc[rows["collective"] == "all_reduce", "link"].unique())


def _workers(given: Given) -> list[int]:
    rows = source.open_source(given["data"]).table("collectives")
    here = (rows["link"] == given["link"]) & (rows["collective"] == "all_reduce")
    return sorted(rows.loc[here, "ranks"].unique().tolist())


def _dense_tables(given: Given) -> list[str]:
    return [one.table for one in vidur.tables()]


TABLES = Place("*-*.csv", store.list_recorded, machines=True)
NETWORK, LINK, WORKERS = OneOf(_networks), OneOf(_links), OneOf(_workers)
FITTED = (*(f"alpha_beta:{how}" for how in LINES), *SIMPLE_FIRST)
FORM = OneOf(lambda given: (*FITTED, AUTO))
SEED = Number(0, 10**9, whole=True)

RULES: dict[str, dict[str, Rule]] = {
    "00_a_step_on_paper": {"data": TABLES, "network": NETWORK, "link": LINK, "workers": WORKERS},
    "01_gradients_and_messages": {
        "data": TABLES,
        "network": NETWORK,
        "link": LINK,
        "workers": WORKERS,
    },
    "02_fitting_costs": {"data": TABLES, "link": LINK, "workers": WORKERS},
    "03_predicting_a_step": {"data": TABLES, "network": NETWORK, "link": LINK, "workers": WORKERS},
    "04_choosing_buckets": {
        "data": TABLES,
        "network": NETWORK,
        "link": LINK,
        "workers": WORKERS,
        "instances": Number(1, 100_000, whole=True),
        "seed": SEED,
    },
    "05_is_it_true": {"data": TABLES, "form": FORM},
    "06_scaling_factor": {
        "formulas": OneOf(lambda given: osf_scaling.FORMULAS, several=True),
        "data": TABLES,
    },
    "07_where_time_goes": {"slow_rank": Number(1.01, 10)},
    "08_training_as_a_graph": {
        "layers": Number(1, 20, whole=True),
        "gpus": Number(1, 16, whole=True),
        "framework": OneOf(lambda given: STRATEGIES),
    },
    "09_sparse_gradients": {
        "instances": Number(1, 100_000, whole=True),
        "seed": SEED,
        "recorded": _campaign(source.OMGS),
    },
    "10_contention": {"data": TABLES},
    "11_where_it_breaks": {
        "first": _campaign(source.LINKS, "predicted-*.csv"),
        "last": _campaign(source.LINKS_FOURTH, "predicted-*.csv"),
    },
    "12_real_gpus": {"chosen": OneOf(lambda given: pollux.NETWORKS), "table": OneOf(_dense_tables)},
    "13_your_own_cluster": {
        "data": TABLES,
        "network": NETWORK,
        "link": LINK,
        "workers": WORKERS,
    },
    "14_tables_and_verdicts": {"papers": OneOf(lambda given: papers.load(), several=True)},
}
"""By notebook, its parameters in their order."""


def validate(notebook: str, names: Mapping[str, Any]) -> None:
    """Check a notebook's parameters; ``names`` is its globals(). Nothing is printed when all is well.

    Tables are shown as the workbook shows them from then on.
    Raises UserError for the first one that is something else, and for a notebook without parameters here.
    """
    if notebook not in RULES:
        raise UserError(f"no parameters of {notebook} are known: use one of {', '.join(RULES)}")
    show_tables()
    given: dict[str, Any] = {}
    for name, rule in RULES[notebook].items():
        value, choices = names[name], rule.known(given)
        if not rule.holds(value, choices):
            shown = repr(value) if len(repr(value)) <= 60 else f"{repr(value)[:60]}..."
            allowed = rule.told(choices)
            raise UserError(f"{notebook}: {name} is {' '.join(shown.split())}: give {allowed}")
        given[name] = value
