"""What limits training here and elsewhere, what each kind of task matters, and which upgrade pays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ddlkit.core import plan as plans
from ddlkit.core.cost import MessageCost
from ddlkit.core.fit import fit
from ddlkit.core.plan import FusionPlan
from ddlkit.core.timeline import KINDS
from ddlkit.core.workload import Workload
from ddlkit.formats import save_profile
from ddlkit.formats.inputs import read_inputs
from ddlkit.papers.dag import STRATEGIES, IterationTimes
from ddlkit.papers.dag.tasks import Schedule, TaskGraph, schedule
from ddlkit.papers.dag.training import Gpus, changed, s_sgd
from ddlkit.report.clusters import abci, overlap, rules
from ddlkit.report.figures import dag
from ddlkit.report.source import Source

ITERATIONS = 6
LINE = "alpha_beta:medians"
"""A message's cost, a line where the bytes are; one by relative error is too cheap for a bucket of 25 MB."""
TESLA = 128
"""Images a V100 of ABCI takes at a time, in mixed precision."""


@dataclass(frozen=True, eq=False)
class Setting:
    """Training somewhere: what an iteration consists of, on which GPUs, ``batch`` samples each.

    stands_for : GPUs that each drawn one stands for, where all are alike and wait for nothing but messages
    """

    times: IterationTimes
    plan: FusionPlan
    gpus: Gpus
    batch: int
    decode_s: float = 0.0
    stands_for: int = 1
    strategy: str = "Caffe-MPI"

    def graph(self) -> TaskGraph:
        """Its tasks, for as many iterations as tell what limits."""
        chosen = replace(STRATEGIES[self.strategy], decodes_on_cpu=True)
        how: dict[str, Any] = {
            "plan": self.plan,
            "iterations": ITERATIONS,
            "decode_s": self.decode_s,
        }
        return s_sgd(self.times, chosen, self.gpus, **how)

    def samples_per_s(self, found: Schedule) -> float:
        """What all GPUs together train on, by a schedule of the setting."""
        return self.gpus.n * self.stands_for * self.batch / found.period_s


def ours(
    recording: Source, network: str, link: str, workers: int, inputs: Path, more: int = 1
) -> Setting:
    """The network on machines of one rank each, at the ring that its measured all-reduces make, and pictures
    read and decoded as measured in ``inputs``; on ``more`` times as many machines.

    Raises UserError as `Source` does, and where such messages were not measured.
    """
    profile = recording.profile(network)
    rows = recording.table("collectives")
    wanted = {"link": link, "ranks": workers, "collective": "all_reduce"}
    rows = rows[(rows[[*wanted]] == pd.Series(wanted)).all(axis=1)]
    labels: dict[str, Any] = {"workers": workers, "algorithm": "ring"}
    cost: MessageCost = fit(LINE, rows["bytes"], rows["seconds"], draws=0, **labels).cost
    n = workers * more
    cost = cost if n == workers else cost.at_workers(n)
    known = read_inputs(inputs, profile.batch)
    found = _sent(profile.workload(), cost, n, profile.batch, known["io_s"])
    times = replace(found.times, forward_s=profile.forward_s)
    return replace(found, times=times, decode_s=known["decode_s"])


def own_files(
    recording: Source, network: str, link: str, workers: int, folder: Path
) -> dict[str, Any]:
    """A layer profile and message times as files of one's own, which have no stamp, in a folder.

    Returns what ``ddlkit predict`` calls them: profile, collectives, ranks.
    """
    files = {"profile": folder / "profile.csv", "collectives": folder / "messages.csv"}
    save_profile(recording.profile(network), files["profile"])
    rows = recording.table("collectives")
    wanted = {"link": link, "ranks": workers, "collective": "all_reduce"}
    rows = rows[(rows[[*wanted]] == pd.Series(wanted)).all(axis=1)]
    rows[["bytes", "seconds"]].to_csv(files["collectives"], index=False)
    return {**files, "ranks": workers}


def _sent(work: Workload, cost: MessageCost, ranks: int, batch: int, io_s: float = 0.0) -> Setting:
    """PyTorch's buckets of a workload, at a cost; one of so many ranks that are alike is drawn."""
    plan = plans.ddp(work)
    sent_s = np.asarray(cost(plan.group_bytes(work)))[::-1]
    times = replace(IterationTimes.of_workload(work, cost, io_s), communication_s=sent_s)
    return Setting(times, plan, Gpus(), batch, stands_for=ranks)


def theirs() -> dict[str, Setting]:
    """Other people's clusters: dag's K80 by its Table VI, and ABCI's V100 by its logs, on 4 and 128 GPUs.

    ABCI's logs say that nobody waits for pictures, not what reading them takes: it is left out.
    """
    times, plan = dag.mended(dag.table6()).training()
    shared = Gpus(machines=4, per_machine=4, shared_disk=True)
    found = {"dag's K80, AlexNet": Setting(times, plan, shared, 1024)}
    compute = rules.rows("abci-step-amp").compute
    alone_s = compute.groupby(["batch", "amp"])["iteration_s"].median()[TESLA, True]
    work = overlap.resnet50().scaled(alone_s / overlap.resnet50().compute_s)
    for ranks in (4, 128):
        found[f"ABCI, {ranks} V100"] = _sent(work, abci.costs()["V100", ranks], ranks, TESLA)
    return found


def limits(settings: Mapping[str, Setting]) -> pd.DataFrame:
    """A row a setting: gpus, iteration_s, samples_per_s, limited_by, each resource's share of the path."""
    rows = []
    for name, one in settings.items():
        found = schedule(one.graph())
        shares = found.limits()
        told = {"gpus": one.gpus.n * one.stands_for, "iteration_s": found.period_s}
        rate = {"samples_per_s": one.samples_per_s(found), "limited_by": next(iter(shares))}
        rows.append({"setting": name, **told, **rate, **shares})
    return pd.DataFrame(rows).fillna(0.0)


def sensitivity(setting: Setting, factor: float = 2.0) -> pd.DataFrame:
    """A row a kind of task, that which matters most first: iteration_s, faster_s and slower_s by ``factor``.

    total_s : of all its tasks of one GPU and iteration
    """
    graph, rows = setting.graph(), []
    iteration_s = schedule(graph).period_s
    for code in np.unique(graph.kind):
        kind, its = KINDS[code], (graph.kind == code) & (graph.iteration == 0)
        if not (total_s := float(graph.duration_s[its & (graph.rank <= 0)].sum())):
            continue
        changes = {"faster_s": 1 / factor, "slower_s": factor}
        told = {
            name: schedule(changed(graph, [(kind, by)])).period_s for name, by in changes.items()
        }
        rows.append({"kind": kind, "total_s": total_s, "iteration_s": iteration_s, **told})
    table = pd.DataFrame(rows)
    matters = (table["slower_s"] - table["faster_s"]).sort_values(ascending=False, kind="stable")
    return table.loc[matters.index].reset_index(drop=True)


def upgrades(
    setting: Setting,
    changes: Mapping[str, Sequence[tuple[str, float]]],
    others: Mapping[str, Setting],
) -> pd.DataFrame:
    """A row as it is, a change of task times, another setting: iteration_s, samples_per_s, gain, limits."""
    played = {"as it is": (setting, schedule(setting.graph()))}
    for name, change in changes.items():
        played[name] = setting, schedule(changed(setting.graph(), change))
    for name, other in others.items():
        played[name] = other, schedule(other.graph())
    rates = {name: one.samples_per_s(found) for name, (one, found) in played.items()}
    rows = [
        {"upgrade": name, "iteration_s": found.period_s, "samples_per_s": rates[name],
         "gain": rates[name] / rates["as it is"], "limited_by": next(iter(found.limits()))}
        for name, (_, found) in played.items()
    ]  # fmt: skip
    return pd.DataFrame(rows)
