"""The task graph of the dag paper against real training on pictures.

The parts of an iteration are measured on their own, and the graph predicts the
iteration from them. The comparison was fixed before any training on pictures was
recorded:

- each part is a median,
- the prediction is the mean time between updates in the middle of a schedule,
- the error of a case is the prediction divided by the median measured iteration, less 1,
- the mean absolute error, as in Section V-D, should not exceed the largest mean that
  the paper prints, MOST.
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
"""AlexNet's mean error in Section V-D of the dag paper."""
ITERATIONS = 20
"""The iterations of a schedule."""
ENDS = 5
"""How many iterations at either end of a schedule do not count."""
CASE = ["network", "batch", "ranks", "link", "stored", "ahead", "sends"]
"""The columns that name a case of training."""


class Parts:
    """What was measured for one network between some ranks.

    Parameters
    ----------
    pipelines : Path
        The table of the runs that should be predicted, pipelines-<name>.csv. The tables
        layers-, inputs- and collectives-<name>.csv in its folder have the parts.

    Attributes
    ----------
    runs : DataFrame
        A row for each measured iteration of each case.
    cores : int
        The processor cores of the machine.
    ranks : int
        The ranks that trained together.
    profile : LayerProfile
        The computation of each layer.
    inputs : DataFrame
        The time of each part of the input, such as reading and decoding a batch.
    """

    def __init__(self, pipelines: Path) -> None:
        self.runs = store.load_table(pipelines, "pipelines")
        # The stamp of a table says where and how it was recorded.
        machine = store.load_stamp(pipelines)["machine"]
        self.cores = int(machine["cpu"]["cores"])
        # All runs of a table have the same ranks.
        self.ranks = int(self.runs["ranks"].iloc[0])

        layers = _neighbour(pipelines, "layers")
        inputs = _neighbour(pipelines, "inputs")
        collectives = _neighbour(pipelines, "collectives")
        self.profile = store.read_profile(layers)
        self.inputs = store.load_table(inputs, "inputs")
        self._collectives = store.load_table(collectives, "collectives")

    def input_s(self, quantity: str, stored: str, ranks: int) -> float:
        """Return the median time of reading or another part of an iteration, in seconds.

        Parameters
        ----------
        quantity : str
            The part, such as "read", "decode" or "compute", each of one batch.
        stored : str
            How the pictures are stored, such as "jpeg".
        ranks : int
            How many ranks did the part at once when it was measured.

        Raises
        ------
        UserError
            If the part was not measured with these pictures and ranks.
        """
        inputs = self.inputs
        is_part = (inputs["quantity"] == quantity) & (inputs["stored"] == stored)
        rows = inputs[is_part & (inputs["ranks"] == ranks)]
        if rows.empty:
            missing = f"no {quantity} of {stored} by {ranks} ranks"
            raise UserError(f"inputs: {missing}: measure input again")
        return float(rows["seconds"].median())

    @cached_property
    def sent_s(self) -> Floats:
        """Return the time of each tensor's message in seconds, shape (n,).

        The tensors are in forward order. One rank alone sends nothing, so that its times
        are 0.
        """
        tensor_bytes = self.profile.gradient_bytes
        if self.ranks == 1:
            return np.zeros(len(tensor_bytes))
        rows = self._collectives
        # The form "table" interpolates between the measured sizes.
        table = fit(
            "table",
            rows["bytes"],
            rows["seconds"],
            # Random draws give intervals, which are not needed here.
            draws=0,
            workers=self.ranks,
            # All messages were sent by the same algorithm.
            algorithm=rows["algorithm"].iloc[0],
        )
        return np.asarray(table.cost(tensor_bytes))

    def times(self, stored: str) -> IterationTimes:
        """Return the parts of one iteration, as Table I of the dag paper lists them.

        The update counts as computation of the first layer's forward pass (errata 2).

        Parameters
        ----------
        stored : str
            How the pictures are stored, such as "jpeg".
        """
        profile = self.profile
        sent_s = self.sent_s
        # The update is added to the first layer, and nothing to the others.
        update_s = np.append(profile.update_s, np.zeros(len(sent_s) - 1))
        forward_s = profile.forward_s + update_s
        profiled_s = float(forward_s.sum() + profile.backward_s.sum())
        # The profile gives each layer's share of the computation. The whole computation was
        # measured again with the input, by all ranks at once, because the speed of the
        # machine may have changed in between.
        drift = self.input_s("compute", stored, self.ranks) / profiled_s
        return IterationTimes(
            # In the task graph the ranks share a disk and wait for each other's reads. The
            # time of reads by several ranks at once has this wait, too, and would count it
            # twice.
            io_s=self.input_s("read", stored, ranks=1),
            # The networks train on CPUs, so that no batch is copied to a GPU.
            h2d_s=0.0,
            forward_s=drift * forward_s,
            backward_s=drift * profile.backward_s,
            communication_s=sent_s,
        )

    def predicted_s(self, stored: str, ahead: int, sends: str) -> float:
        """Return the mean time between updates in the schedule of a case, in seconds.

        Parameters
        ----------
        stored : str
            How the pictures are stored, such as "jpeg".
        ahead : int
            How many batches a loader prepares ahead of time. With 0 it prepares a batch
            after the update.
        sends : {"during", "after"}
            Whether messages are sent during or after the backward pass.
        """
        # A loader that prepares batches ahead of time does not wait for the update.
        prepares_ahead = ahead > 0
        strategy = Strategy(
            copies_ahead=prepares_ahead,
            reads_ahead=prepares_ahead,
            # Pictures that are not JPEG are converted to numbers, which counts as decoding.
            decodes_on_cpu=True,
            sends_during_backward=sends == "during",
            batches_ahead=ahead,
        )
        # With two cores for each rank a loader has a core of its own. Otherwise
        # decoding takes the core that trains.
        has_own_core = self.cores >= 2 * self.ranks
        decoding = "own" if has_own_core else "trains"
        # Each rank takes the place of a GPU. All are on one machine and read the same disk.
        gpus = Gpus(machines=1, per_machine=self.ranks, decoding=decoding)
        graph = s_sgd(
            self.times(stored),
            strategy,
            gpus,
            iterations=ITERATIONS,
            decode_s=self.input_s("decode", stored, self.ranks),
        )
        # Loaders get ahead in the first iterations, and have nothing to do in the last, so
        # that both are unlike the iterations in the middle.
        ends_s = schedule(graph).iteration_ends_s[ENDS:-ENDS]
        return float(np.diff(ends_s).mean())


def _neighbour(pipelines: Path, kind: str) -> Path:
    """Return the table of another kind that was recorded with a table of pipelines."""
    return pipelines.with_name(pipelines.name.replace("pipelines", kind, 1))


def parts(folder: Path | None = None) -> dict[str, Parts]:
    """Return all that was measured of training on pictures.

    Parameters
    ----------
    folder : Path, optional
        The folder of the tables. By default it is that of the first recorded machine that
        has such tables. The machine that runs this code is tried first.

    Returns
    -------
    dict of str to Parts
        By the name that follows "pipelines-" in the name of the table.

    Raises
    ------
    UserError
        If there is no such table.
    """
    folders = [folder] if folder else _recorded_folders()
    for candidate in folders:
        tables = store.list_tables(candidate, "pipelines-*.csv")
        if tables:
            # The name of a table is pipelines-<name>.csv.
            return {path.stem.partition("-")[2]: Parts(path) for path in tables}
    where = folder or places.RECORDED
    raise UserError(
        f"no training with pictures in {where}: run ddlkit measure input --out mine"
    )


def _recorded_folders() -> list[Path]:
    """Return where each recorded machine may have tables, this machine first."""
    this_machine = places.recorded_dir()
    machines = sorted(places.RECORDED.glob("*"))
    # The sort is stable, and False comes before True.
    machines.sort(key=lambda machine: machine != this_machine)
    return [machine / "input" for machine in machines]


def predictions(measured: Mapping[str, Parts]) -> pd.DataFrame:
    """Return the predicted and the measured iteration of each case.

    Parameters
    ----------
    measured : mapping of str to Parts
        What `parts` returned.

    Returns
    -------
    DataFrame
        A row for each case, with the columns of CASE. ``measured_s`` is the median of
        its iterations and ``predicted_s`` the prediction, both in seconds. ``error`` is
        ``predicted_s`` divided by ``measured_s``, less 1.
    """
    tables = []
    for part in measured.values():
        table = _measured_cases(part)
        table["predicted_s"] = [
            part.predicted_s(row.stored, row.ahead, row.sends)
            for row in table.itertuples()
        ]
        tables.append(table)
    cases = pd.concat(tables, ignore_index=True)
    return cases.assign(error=cases["predicted_s"] / cases["measured_s"] - 1)


def measured_cases(measured: Mapping[str, Parts]) -> pd.DataFrame:
    """Return the measured iteration of each case, without a prediction.

    Parameters
    ----------
    measured : mapping of str to Parts
        What `parts` returned.

    Returns
    -------
    DataFrame
        A row for each case, with the columns of CASE. ``measured_s`` is the median of its
        iterations in seconds.
    """
    tables = [_measured_cases(part) for part in measured.values()]
    return pd.concat(tables, ignore_index=True)


def _measured_cases(part: Parts) -> pd.DataFrame:
    """Return the rows of `measured_cases` for one network and number of ranks."""
    medians_s = part.runs.groupby(CASE, sort=False)["iteration_s"].median()
    return medians_s.rename("measured_s").reset_index()


def by_framework(table: pd.DataFrame) -> pd.Series:
    """Return the mean absolute error of the cases that work as each framework does.

    Parameters
    ----------
    table : DataFrame
        What `predictions` returned.

    Returns
    -------
    Series
        The mean by the name of the framework, NaN if no case decodes and sends as the
        framework does. Only cases of several ranks count whose loader prepares the most
        batches ahead of time.
    """
    # One rank has no messages.
    several_ranks = table["ranks"] > 1
    # All frameworks read ahead of time.
    furthest_ahead = table["ahead"] == table["ahead"].max()
    cases = table[several_ranks & furthest_ahead]
    decodes = cases["stored"] == "jpeg"
    sends_during = cases["sends"] == "during"
    # By whether cases decode, and whether they send during the backward pass.
    means = cases["error"].abs().groupby([decodes, sends_during]).mean()
    by_name = {}
    for name, strategy in STRATEGIES.items():
        works_as = (strategy.decodes_on_cpu, strategy.sends_during_backward)
        by_name[name] = means.get(works_as, np.nan)
    return pd.Series(by_name)
