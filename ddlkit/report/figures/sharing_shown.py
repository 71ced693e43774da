"""How the sharing paper's figures are shown: names that a reader knows, and headings that say what is found.

The numbers are those of `sharing_panels` and `sharing_gpu`; what is written into a figure's CSV keeps their
names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from ddlkit import store
from ddlkit.core.timeline import Timeline
from ddlkit.report import panels as of_panels
from ddlkit.report.claims import prose
from ddlkit.report.figures import (
    sharing_grid,
    sharing_joint,
    sharing_measured,
    sharing_panels,
    sharing_predicted,
    sharing_uneven,
)
from ddlkit.report.figures.sharing_panels import Recording
from ddlkit.report.panels import Panel
from ddlkit.report.papers.sharing import BATCHES, DEFAULT, throughput

PAPER = {
    "V100S": "V100S, by the model",
    "paper": "Paper, two V100S",
    "paper, 25 MB": "Paper, 25 MB",
    "paper, fig 4": "Paper, figure 4",
    "paper, fig 8": "Paper, figure 8",
    "V100S, simulated": "V100S, by the model",
}
_LINK = re.compile(r"(?:lab|emulated):(\d+)([mg])bit(?:-delay(\d+)ms)?")


def place(name: str) -> str:
    """Where a panel's numbers are from.

    >>> place("lab:4gbit"), place("here, emulated:1gbit-delay2ms"), place("stand-in, 10 GB/s")
    ('Processor, 4 Gbit/s', 'Processor, 1 Gbit/s, 2 ms', 'Stand-in, 10 GB/s')
    """
    link = name.removeprefix("here, ")
    if found := _LINK.fullmatch(link):
        delay = f", {found[3]} ms" if found[3] else ""
        return f"Processor, {found[1]} {found[2].upper()}bit/s{delay}"
    return PAPER.get(name, link[:1].upper() + link[1:])


def configuration(name: Any) -> str:
    """A configuration in short; threads of gloo are free on any core where nothing else is said.

    >>> configuration("t1-free-idle+t2-free-raised"), configuration("free-idle"), configuration("2x256")
    ('t1 idle + t2 raised', 'idle', '2x256')
    """
    return re.sub("-free|^free-", "", str(name)).replace("-", " ").replace("+", " + ")


def case(name: str) -> str:
    """A network, or a batch, or both, a kernel or a part of a configuration, as it is spelled.

    >>> case("resnet18_64, 8"), case("average_pooling"), case("relu"), case("free-idle")
    ('ResNet-18, 64 px, 8', 'average pooling', 'ReLU', 'idle')
    """
    if name.startswith(("free-", "own-", "one-")):
        return configuration(name)
    first, comma, rest = name.partition(", ")
    shown = store.network_title(first).replace("_", " ")
    return f"{'ReLU' if shown == 'relu' else shown}{comma}{rest}"


def named(panels: Mapping[str, Panel]) -> dict[str, Panel]:
    """The same panels, rows and columns in the words of readers."""

    def shown(grid: pd.DataFrame | None) -> Any:
        return None if grid is None else grid.rename(index=_of(case), columns=_of(configuration))

    found = {}
    for name, one in panels.items():
        default = one.default and (_of(case)(one.default[0]), _of(configuration)(one.default[1]))
        grids = {part: shown(getattr(one, part)) for part in ("grid", *of_panels.ENDS)}
        found[name] = one._replace(default=default, **grids)
    return found


def _of(word: Callable[[str], str]) -> Callable[[Any], Any]:
    return lambda name: word(name) if isinstance(name, str) else name


def across(paper: Mapping[str, Panel]) -> dict[str, Panel]:
    """Grids of blocks and threads as one: a row each, a column a configuration."""
    rows = {name: one.grid.stack() for name, one in paper.items()}
    grid = pd.DataFrame(rows).T
    grid.columns = [f"{blocks}x{threads}" for blocks, threads in grid.columns]
    return {"paper": Panel(grid, (None, DEFAULT), neutral=1.0)}


# -- what is found in a panel ------------------------------------------------------------------


def _least_most(values: pd.Series) -> str:
    return f"{values.min():.2f}{_where(values.idxmin())} to {values.max():.2f}{_where(values.idxmax())}"


def _where(end: Any) -> str:
    """A kernel, or blocks and threads, in brackets; nothing for a cell that takes too many words."""
    if isinstance(end, tuple):
        return f" ({end[0]}x{end[1]})" if isinstance(end[0], int | np.integer) else ""
    return f" ({end})"


def extremes(panels: Mapping[str, Panel]) -> dict[str, str]:
    """By panel its least and its largest number."""
    return {
        name: f"{place(name)}:\n{_least_most(one.grid.stack())}" for name, one in panels.items()
    }


def beside_default(panels: Mapping[str, Panel]) -> dict[str, str]:
    """By panel the least and the largest number in the frame of the default, where it has one."""
    found = {}
    for name, one in panels.items():
        told = f": default {_least_most(one.grid[one.default[1]])}" if one.default else ""
        found[name] = place(name) + told
    return found


def gains(panels: Mapping[str, Panel], between: str = ": ") -> dict[str, str]:
    """By panel how many gains lie beyond their intervals, and how many by luck; of the paper, the best."""
    found, counted = {}, of_panels.judged(panels)
    for name, one in panels.items():
        best = one.grid.max(axis=1)
        if name in counted:
            worse, better, unsure = counted[name]
            n = worse + better + unsure
            says = f"{better} of {n} better, {worse} worse"
            says += f" ({0.025 * n:.1f} each by luck)" if between == ": " else ""
        elif one.default and one.default[0] is None:
            kept = int((one.grid.idxmax(axis=1) == one.default[1]).sum())
            ends = f"{best.min():.1f}% to {best.max():.1f}%"
            says = f"best gains {ends}, default best in {kept} of {len(best)} rows"
        else:
            says = f"up to +{best.max():.1f}%{_where(one.grid.stack().idxmax())}"
        found[name] = f"{place(name)}{between}{says}"
    return found


# -- parts of an iteration ---------------------------------------------------------------------


def pairs(parts: Mapping[str, pd.DataFrame]) -> dict[str, tuple[pd.DataFrame, str]]:
    """For `plots.paired_bars`: by heading the bars, both of a pair under one name, and which is which.

    A heading says in how many cases what was chosen makes the iteration shorter than the default.
    """
    found = {}
    for name, bars in parts.items():
        halves = [str(one).split(", ", 1) for one in bars.index]
        chosen = [configuration(one[1].removeprefix("best: ")) for one in halves[1::2]]
        names = [f"{_short(one[0])} {way}" for one, way in zip(halves[::2], chosen, strict=True)]
        shown = bars.set_axis(np.repeat(names, 2))
        shown = shown.rename(columns={"computation only": "compute only"})
        default_s, chosen_s = bars.sum(axis=1).to_numpy().reshape(-1, 2).T
        other = default_s != chosen_s
        won = f"best wins {int((chosen_s < default_s).sum())} of {int(other.sum())}"
        best = "the paper's best" if name == "V100S, simulated" else "best of other rounds"
        found[f"{place(name)}: {won}"] = shown, f"left: default; right: {best}"
    return found


def _short(name: str) -> str:
    """A network without what its pictures are, or a batch."""
    whole = f"batch {name}" if name.isdigit() else case(name)
    return re.sub(r", \d+ px$| of .*| 1\.1$", "", whole)


def saved() -> pd.DataFrame:
    """By batch of ResNet-18, what the paper's best saves of an iteration: milliseconds.

    Columns: printed (in the text), figure 8 (from its throughputs), model (of that figure, by its model).
    """
    told = {
        int(key.rpartition("-")[2]): value
        for key, value in prose("sharing").items()
        if "fig06-saved" in key
    }
    rows = {}
    for batch in BATCHES:
        own, best = throughput().loc["ResNet-18", batch], sharing_grid.best("ResNet-18", batch)
        cases = {name: ("ResNet-18", batch, name) for name in (DEFAULT, best)}
        took_s = sharing_grid.breakdown(cases).sum(axis=1)
        printed = batch / own[DEFAULT] - batch / own[best]
        rows[batch] = printed, took_s[DEFAULT] - took_s[best]
    found = 1e3 * pd.DataFrame.from_dict(rows, orient="index", columns=["figure 8", "model"])
    return pd.DataFrame({"printed": told}).join(found, how="outer").rename_axis("batch")


def missed(saved_ms: pd.DataFrame) -> str:
    """How much of what figure 8 saves the model has, and how far that figure lies from the text."""
    off = (saved_ms["figure 8"] / saved_ms["printed"] - 1).dropna().iloc[0]
    model = saved_ms["model"].sum() / saved_ms["figure 8"].sum()
    return f"Model: {model:.0%} of what figure 8 saves;\nfigure 8: {off:+.0%} beside the text"


def with_saved(parts: Mapping[str, pd.DataFrame], saved_ms: pd.DataFrame) -> pd.DataFrame:
    """What figure 6 is drawn of: its bars, in the paper's best ones what they save, and a row of its text."""
    bars = pd.concat(parts, names=["where", "case"]).reset_index()
    of_best = {f"{batch}, {sharing_grid.best('ResNet-18', batch)}": batch for batch in BATCHES}
    batch = bars["case"].map(of_best).where(bars["where"] == "V100S, simulated")
    both = bars.join(saved_ms.add_prefix("saved ").add_suffix(" [ms]"), on=batch)
    rest = saved_ms[~saved_ms.index.isin(BATCHES)]["printed"]
    more = {
        "where": "paper",
        "case": [f"{one}, best" for one in rest.index],
        "saved printed [ms]": rest,
    }
    return pd.concat(
        [both.drop(columns="key_0", errors="ignore"), pd.DataFrame(more)], ignore_index=True
    )


def printed_of_figure7() -> pd.DataFrame:
    """`sharing_grid.printed` of figure 7: columns paper and model (ms), shown (a name), case (of a bar)."""
    told = sharing_grid.printed()
    told = told[told["batch"] != sharing_panels.RESNET[1]]
    alone = prose("sharing")["fig07-alexnet-computation-only"]  # of either configuration
    either = told[(told["network"] == "AlexNet") & (told["quantity"] == "computation")].copy()
    cases = {row.Index: (row.network, row.batch, row.configuration) for row in either.itertuples()}
    model_ms = 1e3 * sharing_grid.breakdown(cases)["computation only"]
    either = either.assign(quantity="computation-only", printed_ms=alone, model_ms=model_ms)
    either["error"] = either["model_ms"] / alone - 1
    told = pd.concat([either, told], ignore_index=True)
    role = np.where(told["configuration"] == DEFAULT, "default", "best")
    names = (
        told["network"].map(store.network_title) + ", " + role + ": " + told["quantity"].map(SHORT)
    )
    bars = told["network"] + ", " + told["configuration"]
    return told.rename(columns={"printed_ms": "paper", "model_ms": "model"}).assign(
        shown=names, case=bars
    )


SHORT = {
    "computation": "compute",
    "communication": "messages",
    "computation-only": "compute only",
    "communication-only": "messages only",
    "overlap": "both",
}
"""What the text gives of a bar."""


def with_printed(parts: Mapping[str, pd.DataFrame], told: pd.DataFrame) -> pd.DataFrame:
    """What figure 7 is drawn of: its bars, with the times that the text prints of the paper's."""
    bars = pd.concat(parts, names=["where", "case"]).reset_index()
    wide = told.pivot(index="case", columns="quantity", values="paper")
    paper = bars["case"].where(bars["where"] == "V100S, simulated")
    both = bars.join(wide.add_prefix("printed ").add_suffix(" [ms]"), on=paper.rename("of"))
    return both.drop(columns="of", errors="ignore").drop(columns="key_0", errors="ignore")


# -- figures 1 and 5, and two tables -----------------------------------------------------------


def controls(here: Recording | None) -> pd.DataFrame:
    """Figure 1 in short: what limits resources, by level; a row for all that fared alike."""
    table = sharing_panels.figure1(here).assign(reason=lambda rows: rows.get("reason", "none"))
    table["read_back"] = table.get("read_back", pd.Series("", table.index))
    names = table["control"]
    others = names.str.startswith("NCCL_") & ~names.str.contains("|".join(sharing_panels.ASKED))
    rows = []
    alike = table[~others].groupby(["level", "outcome", "reason", "read_back"], sort=False)
    for (level, outcome, reason, back), own in alike["control"]:
        why = "" if reason == "none" else f": {reason.partition(':')[0]}"
        rows.append((level, ", ".join(own), outcome + why, back))
    return pd.DataFrame(rows, columns=["level", "what limits it", "in this recording", "read back"])


def timelines(groups: Mapping[str, Mapping[str, Timeline]]) -> list[dict[str, Timeline]]:
    """Of figure 5's groups the paper's and the last link's, at most six panels, named for readers."""
    drawn = [*groups.values()][:1] + [*groups.values()][1:][-1:]
    found = []
    for group in drawn:
        named = {}
        for name, one in group.items():
            where, _, rest = name.partition(", ")
            role, _, way = rest.partition(": ")
            named[f"{place(where)}, {role}: {configuration(way)}"] = one
        found.append(named)
    return found


def _done_s(one: Timeline) -> float:
    """When rank 0 has computed its gradients."""
    return float(one.select(one.rank == 0).spans(["forward", "backward"])[-1, 1])


def starved(groups: Sequence[Mapping[str, Timeline]]) -> str:
    """Where the starved configuration, the last of each group, computes soonest and ends latest."""
    where = []
    for group in groups:
        every = [*group.values()]
        done, whole = ([of(one) for one in every] for of in (_done_s, lambda one: one.duration_s))
        if done[-1] == min(done) and whole[-1] == max(whole):
            where.append(next(iter(group)).rpartition(", ")[0])
    says = "Starved messages: compute is done first, the iteration last"
    return f"{says} ({' and '.join(where)})" if where else "Timelines of three configurations"


def printed_parts() -> pd.DataFrame:
    """What the text gives of figure 5c, as rows of a timeline: messages begin so as to overlap so long."""
    told = {
        key: value / 1e3 for key, value in prose("sharing").items() if key.startswith("fig05c-")
    }
    compute_s, sent_s, both_s = (
        told[f"fig05c-{name}"] for name in ("computation", "communication", "overlap")
    )
    begin_s = compute_s - both_s
    ends = {
        "computation": (0.0, compute_s),
        "communication": (begin_s, begin_s + sent_s),
        "overlap": (begin_s, compute_s),
    }
    rows = pd.DataFrame.from_dict(ends, orient="index", columns=["start_s", "end_s"])
    same = {
        "rank": 0,
        "iteration": 0,
        "group": -1,
        "origin": "printed",
        "bytes": 0,
        "case": "paper: 1x64",
    }
    rows = rows.assign(task=rows.index, kind=rows.index, stream=rows.index, **same)
    return rows.assign(printed_s=rows["end_s"] - rows["start_s"])


def spans(groups: Mapping[str, Mapping[str, Timeline]]) -> pd.DataFrame:
    """What figure 5 is drawn of, every link's timelines, and `printed_parts`."""
    each = [
        one.to_frame().assign(case=name) for group in groups.values() for name, one in group.items()
    ]
    return pd.concat([*each, printed_parts()])


def training(here: Recording | None) -> pd.DataFrame:
    """Real training of held-out networks, predicted: a row a recording (the first, the last) and model.

    Columns: recording, model, cases, mean, median, largest; empty where no training was recorded with all
    that a prediction needs.
    """
    tables = {}
    if here is not None and here.has("messages", "kernels", "iterations") and here.known:
        models = ["none", "term", "no_overlap"]
        off = here.cells[models].div(here.cells["measured_s"], axis=0) - 1
        tables["first"] = here.cells[["held_out"]].join(off)
    if here is not None and here.steady is not None:
        tables["final"] = here.steady.cells.rename(columns={"paced": "term"})
    rows = []
    for name, cells in tables.items():
        for model in ("none", "term", "no_overlap"):
            off = cells.loc[cells["held_out"], model].dropna()
            ends = off.mean(), off.abs().median(), off.abs().max()
            rows.append((name, model.replace("_", " "), len(off), *ends))
    columns = ["recording", "model", "cases", "mean error", "median error", "largest error"]
    return pd.DataFrame(rows, columns=columns).set_index(["recording", "model"])


def plans(here: Recording | None) -> pd.DataFrame:
    """What was planned and then trained: predicted and measured gains over the default; empty without any."""
    rows = []
    trained = here.beside("joint") if here is not None else None
    if trained is not None:
        for taken, own in sharing_joint.judged(trained).groupby("taken", sort=False):
            medians = own["foretold"].median(), own["measured"].median()
            counts = (own["gains"] == "yes").sum(), own["as_foretold"].sum()
            rows.append((PLANNED[str(taken)], len(own), *medians, *counts))
    uneven = here.beside("uneven") if here is not None and here.steady is not None else None
    if here is not None and here.steady is not None and uneven is not None:
        resnet = sharing_predicted.workloads(uneven)[sharing_uneven.NETWORK]
        trained_so, teller = uneven.rounds("sharing_iterations"), here.steady.teller
        found = sharing_uneven.orders(trained_so, resnet, teller.known[""], teller.copied)
        found = found[found["configuration"] == sharing_measured.default_of(trained_so)]
        for row in found.itertuples():
            gains = 1 / row.foretold - 1, 1 / row.measured - 1
            inside = row.lower <= row.foretold <= row.upper
            rows.append((PLANNED[row.order], 1, *gains, int(row.upper < 1), int(inside)))
    columns = [
        "planned",
        "cases",
        "predicted gain",
        "measured gain",
        "cases that gain",
        "as predicted",
    ]
    return pd.DataFrame(rows, columns=columns).set_index("planned")


PLANNED = {
    "buckets": "buckets",
    "resources": "configurations: hidden, last",
    "both": "both",
    "falling": "large buckets first",
    "rising": "small buckets first",
}
"""What each part of a plan is called, and each order of unequal buckets."""
