"""dag's graph against real training on pictures: parts measured on their own, and what they predict.

Fixed before any training on pictures was recorded: parts are medians; a prediction is the time between
updates in the middle of the schedule; a case's error is that over the median measured iteration, less 1; the
mean of their absolute values, as dag V-D has it, should be no larger than the largest that dag prints, MOST.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path

import numpy as np
import pandas as pd

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.core.fit import fit
from ddlkit.core.strategies import STRATEGIES, IterationTimes, Strategy
from ddlkit.core.taskgraph import Gpus, s_sgd, schedule
from ddlkit.core.workload import Floats
from workbook.common import places

MOST = 0.094
"""AlexNet's mean error in dag V-D."""
ENDS, ITERATIONS = 5, 20
"""Of a schedule: iterations at either end that do not count, and all of them."""
CASE = ["network", "batch", "ranks", "link", "stored", "ahead", "sends"]


class Parts:
    """What was measured on its own for a network between some ranks, and the runs that it should predict."""

    def __init__(self, pipelines: Path) -> None:
        layers, inputs, collectives = (
            pipelines.with_name(pipelines.name.replace("pipelines", kind, 1))
            for kind in ("layers", "inputs", "collectives")
        )
        self.runs = store.load_table(pipelines, "pipelines")
        self.cores = int(store.load_stamp(pipelines)["machine"]["cpu"]["cores"])
        self.ranks = int(self.runs["ranks"].iloc[0])
        self.profile = store.read_profile(layers)
        self.inputs = store.load_table(inputs, "inputs")
        self._sent = store.load_table(collectives, "collectives")

    def input_s(self, quantity: str, stored: str, ranks: int) -> float:
        """Return median seconds of a batch. Raises UserError where that was not measured."""
        rows = self.inputs.query(
            "quantity == @quantity and stored == @stored and ranks == @ranks"
        )
        if rows.empty:
            what = f"no {quantity} of {stored} by {ranks} ranks"
            raise UserError(f"inputs: {what}: measure input again")
        return float(rows["seconds"].median())

    @cached_property
    def sent_s(self) -> Floats:
        """Return (n,) seconds of each tensor's message, in forward order; nothing of one rank."""
        rows, tensors = self._sent, self.profile.gradient_bytes
        if self.ranks == 1:
            return np.zeros(len(tensors))
        table = fit(
            "table",
            rows["bytes"],
            rows["seconds"],
            draws=0,
            workers=self.ranks,
            algorithm=rows["algorithm"].iloc[0],
        )
        return np.asarray(table.cost(tensors))

    def times(self, stored: str) -> IterationTimes:
        """Return dag Tab I of an iteration; the update is counted with forward, as computing (errata 2)."""
        profile, sent_s = self.profile, self.sent_s
        at_layer_1 = np.append(profile.update_s, np.zeros(len(sent_s) - 1))
        forward_s = profile.forward_s + at_layer_1
        whole_s = float(forward_s.sum() + profile.backward_s.sum())
        drift = self.input_s("compute", stored, self.ranks) / whole_s
        io_s = self.input_s("read", stored, 1)
        return IterationTimes(
            io_s, 0.0, drift * forward_s, drift * profile.backward_s, sent_s
        )

    def predicted_s(self, stored: str, ahead: int, sends: str) -> float:
        """Return the mean seconds between updates of a case's schedule, one disk for all ranks."""
        strategy = Strategy(
            copies_ahead=ahead > 0,
            reads_ahead=ahead > 0,
            decodes_on_cpu=True,
            sends_during_backward=sends == "during",
            batches_ahead=ahead,
        )
        decoding = "own" if self.cores >= 2 * self.ranks else "trains"
        gpus = Gpus(1, self.ranks, decoding=decoding)
        decode_s, times = self.input_s("decode", stored, self.ranks), self.times(stored)
        graph = s_sgd(times, strategy, gpus, iterations=ITERATIONS, decode_s=decode_s)
        # At the ends loaders get ahead, and run out.
        ends_s = schedule(graph).iteration_ends_s[ENDS:-ENDS]
        return float(np.diff(ends_s).mean())


def parts(place: Path | None = None) -> dict[str, Parts]:
    """Return all that was measured of training with pictures in a folder, else the first recorded one."""
    machines = sorted(
        places.RECORDED.glob("*"), key=lambda at: (at != places.recorded_dir(), at)
    )
    for folder in [place] if place else [machine / "input" for machine in machines]:
        if tables := store.list_tables(folder, "pipelines-*.csv"):
            return {path.stem.partition("-")[2]: Parts(path) for path in tables}
    where = place or places.RECORDED
    raise UserError(
        f"no training with pictures in {where}: run ddlkit measure input --out mine"
    )


def predictions(measured: Mapping[str, Parts]) -> pd.DataFrame:
    """Return a row a case: measured_s (median), predicted_s, and error, the second over the first less 1."""
    tables = []
    for part in measured.values():
        cases = part.runs.groupby(CASE, sort=False)["iteration_s"].median()
        rows = cases.rename("measured_s").reset_index()
        settings = rows[["stored", "ahead", "sends"]].itertuples(index=False)
        tables.append(
            rows.assign(predicted_s=[part.predicted_s(*case) for case in settings])
        )
    return pd.concat(tables, ignore_index=True).eval(
        "error = predicted_s / measured_s - 1"
    )


def by_framework(table: pd.DataFrame) -> pd.Series:
    """Return mean absolute error by framework: of cases of several ranks that read and send as it does."""
    ahead = table[(table["ranks"] > 1) & (table["ahead"] == table["ahead"].max())]
    means = (
        ahead["error"]
        .abs()
        .groupby([ahead["stored"] == "jpeg", ahead["sends"] == "during"])
    )
    does = {
        name: (s.decodes_on_cpu, s.sends_during_backward)
        for name, s in STRATEGIES.items()
    }
    return pd.Series(
        {name: means.mean().get(edges, np.nan) for name, edges in does.items()}
    )
