"""Training that reads its pictures beside what dag's graph says of it, from parts measured on their own.

Fixed before anything was recorded: a prediction is the time between updates in the middle of the schedule,
where loaders are as far ahead as they will be; the parts are medians; a case's error is predicted over the
median measured iteration, less 1, both over all rounds, in each of which parts and runs took turns; a
network's is the mean of their absolute values over its cases, as dag V-D has it; and it should be no larger
than the largest that dag prints, MOST.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ddlkit import store
from ddlkit.core.errors import UserError
from ddlkit.core.fit import fit
from ddlkit.papers.dag import STRATEGIES, IterationTimes, Strategy
from ddlkit.papers.dag.tasks import Floats, Schedule, TaskGraph, schedule
from ddlkit.papers.dag.training import Gpus, s_sgd

FOLDER = "input"
"""Where a session leaves what it measures of the input, in its directory."""
PRINTED = {"AlexNet": 0.094, "GoogleNet": 0.047, "ResNet-50": 0.046}
"""Average errors of predictions (dag V-D)."""
MOST = max(PRINTED.values())
"""What a network's mean error should not exceed; set on 2026-11-22, before the recording."""
ENDS, ITERATIONS = 5, 20
CASE = ["network", "batch", "ranks", "link", "stored", "ahead", "sends"]


def recorded() -> Path:
    """Inputs as they were recorded, on this machine or on the first that has them. Raises UserError."""
    own = store.recorded_dir()
    for machine in sorted(store.RECORDED.glob("*"), key=lambda place: (place != own, place)):
        if store.list_tables(machine / FOLDER):
            return machine / FOLDER
    raise UserError(f"no measured input in {store.RECORDED}: run ddlkit measure input --out mine")


def strategy_of(ahead: int, sends: str) -> Strategy:
    """What a case hides: ``ahead`` batches made beside training, and gradients sent during backward."""
    return Strategy(
        copies_ahead=ahead > 0,
        sends_during_backward=sends == "during",
        decodes_on_cpu=True,
        reads_ahead=ahead > 0,
        batches_ahead=ahead,
    )


class Parts:
    """What was measured on its own for one network between some ranks, and the runs that it should predict.

    runs : table ``pipelines``; cores : of the machine
    """

    def __init__(self, runs_file: Path) -> None:
        named = {
            kind: runs_file.with_name(runs_file.name.replace("pipelines", kind, 1))
            for kind in _PARTS
        }
        self.runs = store.load_table(runs_file, "pipelines")
        self.cores = int(store.load_stamp(runs_file)["machine"]["cpu"]["cores"])
        self.ranks = int(self.runs["ranks"].iloc[0])
        self.profile = store.read_profile(named["layers"])
        self.inputs = store.load_table(named["inputs"], "inputs")
        self._sent = store.load_table(named["collectives"], "collectives")

    def input_s(self, quantity: str, stored: str, ranks: int) -> float:
        """Median seconds of a batch. Raises UserError where that was not measured."""
        wanted = {"quantity": quantity, "stored": stored, "ranks": ranks}
        chosen = (self.inputs[[*wanted]] == pd.Series(wanted)).all(axis=1)
        if not chosen.any():
            raise UserError(
                f"inputs: no {quantity} of {stored} by {ranks} ranks: measure input again"
            )
        return float(self.inputs["seconds"][chosen].median())

    @cached_property
    def sent_s(self) -> Floats:
        """(n,) what the message of each tensor takes, in forward order; nothing of one rank."""
        rows, tensors = self._sent, self.profile.gradient_bytes
        if self.ranks == 1:
            return np.zeros(len(tensors))
        how: dict[str, Any] = {"workers": self.ranks, "algorithm": str(rows["algorithm"].iloc[0])}
        return np.asarray(
            fit("table", rows["bytes"], rows["seconds"], draws=0, **how).cost(tensors)
        )

    def times(self, stored: str) -> IterationTimes:
        """dag Tab I of an iteration; the update is counted with forward, as computing (errata 2).

        Layers have the profile's shares of what computing took between the runs.
        """
        profile, sent_s = self.profile, self.sent_s
        forward_s = profile.forward_s + np.append(profile.update_s, np.zeros(len(sent_s) - 1))
        whole_s = float(forward_s.sum() + profile.backward_s.sum())
        drift = self.input_s("compute", stored, self.ranks) / whole_s
        io_s = self.input_s("read", stored, 1)
        return IterationTimes(io_s, 0.0, drift * forward_s, drift * profile.backward_s, sent_s)

    def graph(self, stored: str, ahead: int, sends: str) -> TaskGraph:
        """Return the graph of a case: one disk for all ranks, decoding on the core that trains.

        Unless there are two cores for each rank: then each decodes on its own.
        """
        decoding = "own" if self.cores >= 2 * self.ranks else "trains"
        gpus = Gpus(1, self.ranks, decoding=decoding)
        decode_s = self.input_s("decode", stored, self.ranks)
        how = strategy_of(ahead, sends)
        return s_sgd(self.times(stored), how, gpus, iterations=ITERATIONS, decode_s=decode_s)


_PARTS = ("layers", "inputs", "collectives")


def steady_s(found: Schedule) -> float:
    """Return the mean time between updates, without the first ENDS, while loaders get ahead, and the last.

    Towards the end nothing is left to be fetched beside training.
    """
    ends_s = found.iteration_ends_s[ENDS:-ENDS]
    return float(ends_s[-1] - ends_s[0]) / (len(ends_s) - 1)


def parts(place: Path) -> dict[str, Parts]:
    """All that was measured of training with pictures in ``place``, by name of the table.

    Raises UserError where there is none.
    """
    files = store.list_tables(place, "pipelines-*.csv")
    if not files:
        raise UserError(f"no training with pictures in {place}: run ddlkit measure input")
    return {path.stem.partition("-")[2]: Parts(path) for path in files}


def predictions(found: Mapping[str, Parts]) -> pd.DataFrame:
    """Return a row a case: measured_s (median), predicted_s, and error, the second over the first less 1."""
    rows = []
    for part in found.values():
        for key, runs in part.runs.groupby(CASE, sort=False):
            case = dict(zip(CASE, key, strict=True))
            graph = part.graph(case["stored"], case["ahead"], case["sends"])
            predicted_s = steady_s(schedule(graph))
            measured_s = float(runs["iteration_s"].median())
            seconds = {"measured_s": measured_s, "predicted_s": predicted_s}
            rows.append({**case, **seconds, "error": predicted_s / measured_s - 1})
    return pd.DataFrame(rows)


def by_framework(table: pd.DataFrame) -> pd.Series:
    """Mean absolute error by framework: of the cases of several ranks that do what it does, all ahead.

    It reads JPEG or what needs no decoding, and sends during backward or after it. Nothing is copied to a
    device here: two that differ by when they copy are one.
    """
    ahead = table[(table["ranks"] > 1) & (table["ahead"] == table["ahead"].max())]
    found = {}
    for name, one in STRATEGIES.items():
        does = ahead["stored"].eq("jpeg") == one.decodes_on_cpu
        does &= ahead["sends"].eq("during") == one.sends_during_backward
        found[name] = float(ahead.loc[does, "error"].abs().mean())
    return pd.Series(found)
