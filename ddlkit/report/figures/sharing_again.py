"""The sharing paper's grid foretold from one session, and measured steadily enough to judge an error of 2%.

Three times: cells, models, statistics and goals were written down in examples/sharing_again.yml before that
grid was recorded; those of the next ones, which mend faults that it had shown, in examples/sharing_met.yml
and examples/sharing_steady.yml. Each cell is foretold from a base: an iteration of its network without
messages.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from ddlkit.core.workload import Workload
from ddlkit.model.predictor import make_plan
from ddlkit.report.figures import sharing_predicted as predicted
from ddlkit.report.figures.sharing_measured import CELL, default_of
from ddlkit.report.figures.sharing_sure import Pairs, Rounds, Sure, sure
from ddlkit.report.source import Source

BLOCK = ["network", "batch", "link"]
KEYS = [*CELL, "configuration"]
MODELS = {
    "paced": "slowdowns as measured with kernels",
    "posted": "the same, and the first bucket posted when the base says",
    "networks": "slowdowns as measured with the network itself",
    "none": "no slowdown",
    "no_overlap": "the base, then communication",
    "perfect_overlap": "the longer of the two",
}
SCALES = np.linspace(0.5, 2.0, 7)
"""Of a base that is the median of many, at which iterations are played; between them they are straight."""
DRAWS = 2000
MARGIN = 0.003
"""By which "posted" must have the smaller median error on networks that are not held out, to be judged."""
Key = tuple[str, int, str, str, str]
"""Of a cell: its KEYS."""


@dataclass(frozen=True, eq=False)
class Teller:
    """What one session knows of messages, kernels, copies and layers, and foretells from it."""

    source: Source

    @cached_property
    def layers(self) -> dict[tuple[str, int], Workload]:
        """Layers alone, by network and batch."""
        return predicted.workloads(self.source)

    @cached_property
    def copied(self) -> dict[str, float]:
        """By network, what DDP's buckets take for each byte, each way."""
        return predicted.copies(self.source.table("sharing_copies"))

    @cached_property
    def known(self) -> dict[str, predicted.Known]:
        """What each configuration costs, takes and loses: by kernels (""), and by network as the kernel."""
        messages = self.source.table("sharing_messages")
        kernels = self.source.table("sharing_kernels")
        parts = kernels["kernel"].str.partition(":")
        network = parts[0].where(parts[1] == ":", "")
        return {
            str(name): predicted.known_resources(messages, own, paced=True)
            for name, own in kernels.groupby(network)
        }

    def said_s(self, key: Key, base_s: float, model: str, post_s: float = np.nan) -> float:
        """A cell's iteration from its base, by one of MODELS; NaN where that knows nothing of it.

        post_s : when in the base the last rank has posted its first bucket
        """
        network, batch, plan, link, configuration = key
        by, work = network if model == "networks" else "", self.layers[network, batch]
        each_s = self.copied.get(network, 0.0)
        if model == "posted":
            stretched = posted(work, make_plan(plan, work).ends[0], post_s, base_s, each_s)
            if stretched is None:
                return np.nan
            work = stretched
        else:
            work = work.scaled((base_s - 2 * each_s * float(work.bytes.sum())) / work.compute_s)
        told = predicted.shared(work, plan, configuration, link, self.known.get(by, {}))
        if told is None:
            return np.nan
        if model.endswith("overlap"):
            sizes = told.plan.group_bytes(work).tolist()
            sent_s = sum(float(way.cost(n)) for way, n in zip(told.given, sizes, strict=True))
            return base_s + sent_s if model == "no_overlap" else max(base_s, sent_s)
        told = replace(told, copy_s_per_byte=each_s)
        return (predicted.scaled(told, 0.0, 0.0) if model == "none" else told).iteration_s


def posted(
    work: Workload, first: int, post_s: float, base_s: float, each_s: float
) -> Workload | None:
    """Layers that take as long as a base in all, and until it posts its first bucket, each part stretched.

    first : gradients of that bucket; each_s : to copy a byte into a bucket, or out of it, which layers lack

    None where a part has no time left, or ``post_s`` is NaN: the last rank's post may come after the end of
    the mean rank's iteration, where the others began and ended late.
    """
    into_s = each_s * work.bytes
    early_s = work.forward_s + float(work.backward_s[:first].sum())
    early = (post_s - into_s[:first].sum()) / early_s
    late = (base_s - post_s - into_s[first:].sum() - into_s.sum()) / (work.compute_s - early_s)
    if not (early > 0 and late > 0):
        return None
    return replace(
        work,
        forward_s=early * work.forward_s,
        backward_s=np.where(np.arange(work.n) < first, early, late) * work.backward_s,
        update_s=late * work.update_s,
    )


@dataclass(frozen=True, eq=False)
class Grid:
    """Training under configurations, cell by cell and round by round.

    whole : (repeat, KEYS) iterations; base : likewise what they are foretold from, of the same columns
    paired : whether a round is foretold from its own base; else each cell from all of its plan and block
    post : as base, until its first bucket is posted; None where that was not noted
    """

    teller: Teller
    whole: pd.DataFrame
    base: pd.DataFrame
    paired: bool
    post: pd.DataFrame | None = None

    @cached_property
    def cells(self) -> pd.DataFrame:
        """KEYS, medians measured_s and base_s, held_out, and MODELS: foretold over measured, less 1."""
        rows = []
        for key in self.whole.columns:
            drawn = {model: self.rounds(key, model) for model in MODELS}
            row = {
                **dict(zip(KEYS, key, strict=True)),
                "held_out": key[0] not in predicted.FITTED_ON,
            }
            row |= {"measured_s": self.whole[key].median(), "base_s": np.median(self._base_s(key))}
            rows.append(row | {model: one.error() for model, one in drawn.items()})
        return pd.DataFrame(rows).dropna(subset="paced")

    def rounds(self, key: Key, model: str) -> Rounds | Pairs:
        """A cell's rounds, and what a model says of them."""
        measured_s, base_s = self.whole[key].dropna().to_numpy(), self._base_s(key)
        if self.paired:
            nowhere = np.full(len(base_s), np.nan)
            post_s = nowhere if self.post is None else self.post[key].dropna().to_numpy()
            each = zip(base_s[:, 0].tolist(), post_s.tolist(), strict=True)
            said = [self.teller.said_s(key, base, model, post) for base, post in each]
            return Pairs(measured_s, np.array(said))
        at_s = SCALES * float(np.median(base_s))
        said_s = np.array([self.teller.said_s(key, one, model) for one in at_s.tolist()])
        return Rounds(measured_s, base_s, at_s, said_s)

    def _base_s(self, key: Key) -> NDArray[np.float64]:
        """(rounds, samples) of what a cell is foretold from."""
        base = self.base[[key]] if self.paired else self.base[key[:-1]]
        return base.dropna(how="all").to_numpy()

    def sure(self, model: str = "paced", held_out: bool = True) -> Sure:
        """How sure the errors of a model are, on held-out networks or on all."""
        cells = self.cells[self.cells["held_out"] | (not held_out)].dropna(subset=model)
        blocks = [own[KEYS] for _, own in cells.groupby(BLOCK, sort=False)]
        keys = [block.itertuples(index=False, name=None) for block in blocks]
        return sure([[self.rounds(key, model) for key in block] for block in keys])

    @cached_property
    def choices(self) -> pd.DataFrame:
        """A row for each configuration of the held-out cells: KEYS, took, odd, even, and what MODELS say.

        All are iterations over a base. What was measured (took: of all rounds, then of the odd and the even
        ones) is over the base of its own rounds, and what is foretold from one base for the whole cell: its
        own would tell when the machine was slow.
        """
        cells: dict[tuple[Any, ...], list[Key]] = {}
        for key in self.whole.columns:
            if key[0] not in predicted.FITTED_ON:
                cells.setdefault(key[:-1], []).append(key)
        rows = []
        for keys in cells.values():
            bases_s = [self._base_s(key).mean(axis=1) for key in keys]
            base_s = float(np.median(np.concatenate(bases_s)))
            for key, own_s in zip(keys, bases_s, strict=True):
                each = self.whole[key].dropna().to_numpy() / own_s
                took = {"took": each, "odd": each[1::2], "even": each[::2]}
                medians = {name: np.median(rounds) for name, rounds in took.items()}
                told = {name: self.teller.said_s(key, base_s, name) / base_s for name in MODELS}
                rows.append(dict(zip(KEYS, key, strict=True)) | medians | told)
        return pd.DataFrame(rows)

    def regrets(self) -> pd.DataFrame:
        """By who chooses a configuration of each of these cells, what it loses to the best one there.

        The best is that of one half of the rounds, and both are judged in the other half; the mean of both
        ways. So luck makes none the best, and a loss can be below zero.

        Columns: chooser (the default, or one of MODELS that speaks of all), cells, mean, largest; more: mean
        over the default's, with lower and upper, its 95% interval by cells that are drawn anew, as if cells
        of one network had nothing in common.
        """
        rows = self.choices
        keys = [rows[key] for key in CELL]
        best = {half: rows[half].groupby(keys, sort=False).idxmin() for half in ("odd", "even")}
        chosen = {"default": rows.index[rows["configuration"] == default_of(rows)]}
        for name in MODELS:
            if rows[name].notna().all():
                chosen[name] = rows[name].groupby(keys, sort=False).idxmin()
        lost = {
            who: np.mean(
                [_over(rows["even"], one, best["odd"]), _over(rows["odd"], one, best["even"])],
                axis=0,
            )
            for who, one in chosen.items()
        }
        drawn = np.random.default_rng(0).integers(0, len(best["odd"]), (DRAWS, len(best["odd"])))
        table = []
        for chooser, loses in lost.items():
            more = loses - lost["default"]
            lower, upper = np.quantile(more[drawn].mean(axis=1), [0.025, 0.975])
            table.append((chooser, len(more), loses.mean(), loses.max(), more.mean(), lower, upper))
        columns = ["chooser", "cells", "mean", "largest", "more", "lower", "upper"]
        return pd.DataFrame(table, columns=columns)

    def gains(self) -> pd.DataFrame:
        """Of the same rows but the default's what was gained over that: KEYS, took, and what MODELS say."""
        rows = self.choices
        is_default = rows["configuration"] == default_of(rows)
        values = ["took", *MODELS]
        default = rows[CELL].merge(rows.loc[is_default, [*CELL, *values]], on=CELL, how="left")
        gains = default[values] / rows[values] - 1
        return pd.concat([rows[KEYS], gains], axis=1)[~is_default].reset_index(drop=True)


def _over(took: pd.Series, one: Any, other: Any) -> NDArray[np.float64]:
    """What rows of one index lose to those of another."""
    return np.asarray(took.loc[one].to_numpy() / took.loc[other].to_numpy() - 1)


def unsent(source: Source) -> Grid:
    """Of the slowest rank, from iterations whose buckets nobody sends; medians of both, each by itself."""
    whole = _rounds(source.rounds("sharing_iterations"), "iteration_s")
    base = _rounds(source.rounds("sharing_unsent"), "bucketed_s")
    return Grid(Teller(source), whole, base, paired=False)


def met(source: Source, trained: Source, slowest: bool = False, paired: bool = True) -> Grid:
    """Of all ranks, from the iterations just before in which they meet for one number; round by round.

    slowest : of the slowest rank instead; paired : as of a `Grid`. Both as of `unsent`, one fault each
    """
    periods = trained.rounds("sharing_periods")
    whole = trained.rounds("sharing_iterations") if slowest else periods
    base = _rounds(periods, "empty_s")
    return Grid(Teller(source), _rounds(whole, "iteration_s"), base, paired)


def steady(source: Source) -> Grid:
    """Of all ranks, from iterations just before and just after in which they meet for one number."""
    periods = source.rounds("sharing_periods")
    whole = _rounds(periods, "iteration_s")
    base, post = (_rounds(_around(periods, one), one) for one in ("empty_s", "first_post_s"))
    return Grid(Teller(source), whole, base, paired=True, post=post)


def chosen(grid: Grid) -> str:
    """Which is judged, "paced" or "posted", by networks that are not held out, where both speak."""
    own = grid.cells.loc[~grid.cells["held_out"], ["paced", "posted"]]
    medians = own.dropna().abs().median()
    return "posted" if medians["paced"] - medians["posted"] >= MARGIN else "paced"


def _rounds(table: pd.DataFrame, column: str) -> pd.DataFrame:
    """(repeat, KEYS): the mean of a round's iterations."""
    means = table.groupby(["repeat", *KEYS], sort=False)[column].mean()
    return means.unstack(KEYS).sort_index(axis=1)


def _around(periods: pd.DataFrame, column: str) -> pd.DataFrame:
    """The column as the mean of a configuration's and the next one's of its round; the last has its own."""
    after = periods.groupby([*CELL, "repeat"], sort=False)[column].shift(-1)
    mean = (periods[column] + after.fillna(periods[column])) / 2
    return periods.assign(**{column: mean})


def errors(cells: pd.DataFrame) -> pd.DataFrame:
    """One row a model that speaks of any cells, over these: signed mean, median and largest error."""
    rows = []
    for name, says in MODELS.items():
        off = cells[name].dropna()
        if off.empty:
            continue
        rows.append((name, says, len(off), off.mean(), off.abs().median(), off.abs().max()))
    return pd.DataFrame(rows, columns=["model", "what", "cells", "mean", "median", "largest"])
