"""How the sharing paper's figures are shown: names that a reader knows, and headings that say what is found.

The numbers are those of `sharing_measured` and `sharing_paper`; a figure's CSV keeps their names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from ddlkit import store
from ddlkit.core.timeline import Timeline
from ddlkit.report.figures import sharing_measured, sharing_paper
from ddlkit.report.figures.sharing_measured import Recording
from ddlkit.report.panels import Panel
from ddlkit.report.papers.sharing import BATCHES, DEFAULT

SIMULATED = "V100S, simulated"
PAPER = {
    "V100S": "V100S, by the model",
    "paper": "Paper, two V100S",
    "paper, 25 MB": "Paper, 25 MB",
    "paper, fig 4": "Paper, figure 4",
    "paper, fig 8": "Paper, figure 8",
    SIMULATED: "V100S, by the model",
}
_LINK = re.compile(r"(?:lab|emulated):(\d+)([mg])bit(?:-delay(\d+)ms)?")


def place(name: str) -> str:
    """Return where a panel's numbers are from.

    >>> place("lab:4gbit"), place("here, emulated:1gbit-delay2ms"), place("stand-in, 10 GB/s")
    ('Processor, 4 Gbit/s', 'Processor, 1 Gbit/s, 2 ms', 'Stand-in, 10 GB/s')
    """
    link = name.removeprefix("here, ")
    if found := _LINK.fullmatch(link):
        delay = f", {found[3]} ms" if found[3] else ""
        return f"Processor, {found[1]} {found[2].upper()}bit/s{delay}"
    return PAPER.get(name, link[:1].upper() + link[1:])


def configuration(name: Any) -> Any:
    """Return a configuration in short; threads of gloo are free on any core where nothing else is said.

    >>> configuration("t1-free-idle+t2-free-raised"), configuration("free-idle"), configuration("2x256")
    ('t1 idle + t2 raised', 'idle', '2x256')
    """
    if not isinstance(name, str):
        return name
    return re.sub("-free|^free-", "", name).replace("-", " ").replace("+", " + ")


def case(name: Any) -> Any:
    """Return a network, or a batch, or both, a kernel or a part of a configuration, as it is spelled.

    >>> case("resnet18_64, 8"), case("average_pooling"), case("relu"), case("free-idle")
    ('ResNet-18, 64 px, 8', 'average pooling', 'ReLU', 'idle')
    """
    if not isinstance(name, str) or name.startswith(("free-", "own-", "one-")):
        return configuration(name)
    first, comma, rest = name.partition(", ")
    shown = store.network_title(first).replace("_", " ")
    return f"{'ReLU' if shown == 'relu' else shown}{comma}{rest}"


def named(panels: Mapping[str, Panel]) -> dict[str, Panel]:
    """Return the same panels, rows and columns in the words of readers."""
    shown = {}
    for name, panel in panels.items():
        default = panel.default and (case(panel.default[0]), configuration(panel.default[1]))
        grid, lower, upper = (
            table if table is None else table.rename(index=case, columns=configuration)
            for table in (panel.grid, panel.lower, panel.upper)
        )
        shown[name] = Panel(grid, default, lower, upper, panel.neutral)
    return shown


def across(paper: Mapping[str, Panel]) -> dict[str, Panel]:
    """Return grids of blocks and threads as one: a row each, a column a configuration."""
    grid = pd.DataFrame({name: panel.grid.stack() for name, panel in paper.items()}).T
    grid.columns = [f"{blocks}x{threads}" for blocks, threads in grid.columns]
    return {"paper": Panel(grid, (None, DEFAULT), neutral=1.0)}


def gains(panels: Mapping[str, Panel], between: str = ": ") -> dict[str, str]:
    """Return by panel how many gains lie beyond their intervals, and how many by luck; the paper's best."""
    found = {}
    for name, panel in panels.items():
        best = panel.grid.max(axis=1)
        if panel.lower is not None and panel.upper is not None:
            better, worse = int((panel.lower > 0).sum().sum()), int((panel.upper < 0).sum().sum())
            n = int(panel.grid.notna().sum().sum())
            says = f"{better} of {n} better, {worse} worse"
            says += f" ({0.025 * n:.1f} each by luck)" if between == ": " else ""
        elif panel.default and panel.default[0] is None:
            kept = int((panel.grid.idxmax(axis=1) == panel.default[1]).sum())
            ends = f"{best.min():.1f}% to {best.max():.1f}%"
            says = f"best gains {ends}, default best in {kept} of {len(best)} rows"
        else:
            blocks, threads = panel.grid.stack().idxmax()
            says = f"up to +{best.max():.1f}% ({blocks}x{threads})"
        found[name] = f"{place(name)}{between}{says}"
    return found


def pairs(parts: Mapping[str, pd.DataFrame]) -> dict[str, tuple[pd.DataFrame, str]]:
    """Return for `plots.paired_bars` by heading the bars, both of a pair under one name, and which is which.

    A heading says in how many cases what was chosen makes the iteration shorter than the default.
    """
    found = {}
    for name, bars in parts.items():
        names = []
        for label in bars.index[1::2]:
            what, chosen = label.split(", ", 1)
            what = f"batch {what}" if what.isdigit() else case(what)
            short = re.sub(r", \d+ px$| of .*| 1\.1$", "", what)
            names.append(f"{short} {configuration(chosen.removeprefix('best: '))}")
        shown = bars.set_axis(np.repeat(names, 2))
        shown = shown.rename(columns={"computation only": "compute only"})
        default_s, chosen_s = bars.sum(axis=1).to_numpy().reshape(-1, 2).T
        won = (
            f"best wins {int((chosen_s < default_s).sum())} of {int((default_s != chosen_s).sum())}"
        )
        best = "the paper's best" if name == SIMULATED else "best of other rounds"
        found[f"{place(name)}: {won}"] = shown, f"left: default; right: {best}"
    return found


def missed(saved_ms: pd.DataFrame) -> str:
    """Return how much of what figure 8 saves the model has, and how far that figure lies from the text."""
    off = (saved_ms["figure 8"] / saved_ms["printed"] - 1).dropna().iloc[0]
    model = saved_ms["model"].sum() / saved_ms["figure 8"].sum()
    return f"Model: {model:.0%} of what figure 8 saves;\nfigure 8: {off:+.0%} beside the text"


def with_saved(parts: Mapping[str, pd.DataFrame], saved_ms: pd.DataFrame) -> pd.DataFrame:
    """Return what figure 6 is drawn of: bars, in the paper's best ones what they save, a row of its text."""
    bars = pd.concat(parts, names=["where", "case"]).reset_index()
    best = {f"{batch}, {sharing_paper.best('ResNet-18', batch)}": batch for batch in BATCHES}
    batches = bars["case"].map(best).where(bars["where"] == SIMULATED)
    columns = saved_ms.add_prefix("saved ").add_suffix(" [ms]")
    both = pd.concat([bars, columns.reindex(batches).reset_index(drop=True)], axis=1)
    rest = saved_ms[~saved_ms.index.isin(BATCHES)]["printed"]
    more = {"where": "paper", "case": [f"{batch}, best" for batch in rest.index]}
    return pd.concat([both, pd.DataFrame(more | {"saved printed [ms]": rest})], ignore_index=True)


def with_printed(parts: Mapping[str, pd.DataFrame], printed: pd.DataFrame) -> pd.DataFrame:
    """Return what figure 7 is drawn of: bars, with the times that the text prints of the paper's."""
    bars = pd.concat(parts, names=["where", "case"]).reset_index()
    cases = printed["network"] + ", " + printed["configuration"]
    wide = printed.assign(case=cases).pivot(index="case", columns="quantity", values="paper")
    wide = wide.add_prefix("printed ").add_suffix(" [ms]")
    of_paper = bars["case"].where(bars["where"] == SIMULATED)
    return pd.concat([bars, wide.reindex(of_paper).reset_index(drop=True)], axis=1)


def bar_names(printed: pd.DataFrame) -> list[str]:
    """Return what each time that the text prints of figure 7 is of."""
    short = {"computation": "compute", "communication": "messages", "overlap": "both"}
    short |= {f"{name}-only": f"{word} only" for name, word in short.items()}
    role = np.where(printed["configuration"] == DEFAULT, "default", "best")
    titles = printed["network"].map(store.network_title)
    return list(titles + ", " + role + ": " + printed["quantity"].map(short))


def controls(here: Recording | None) -> pd.DataFrame:
    """Return figure 1 in short: what limits resources, by level; a row for all that fared alike."""
    table = sharing_measured.figure1(here)
    table = table.reindex(
        columns=["level", "control", "outcome", "reason", "read_back"], fill_value=""
    )
    names = table["control"]
    asked = "NCCL_MIN_CTAS|NCCL_MAX_CTAS|NCCL_NTHREADS"
    table = table[~names.str.startswith("NCCL_") | names.str.contains(asked)]
    rows = []
    for (level, outcome, reason, back), group in table.groupby(
        ["level", "outcome", "reason", "read_back"], sort=False
    )["control"]:
        why = "" if reason in ("", "none") else f": {reason.partition(':')[0]}"
        rows.append((level, ", ".join(group), outcome + why, back))
    return pd.DataFrame(rows, columns=["level", "what limits it", "in this recording", "read back"])


def timelines(groups: Mapping[str, Mapping[str, Timeline]]) -> list[dict[str, Timeline]]:
    """Return of figure 5's groups the paper's and the last link's, named for readers."""
    drawn = [*groups.values()][:1] + [*groups.values()][1:][-1:]
    found = []
    for group in drawn:
        parts = {name: re.split(", (?=default|best|starved)|: ", name) for name in group}
        found.append(
            {
                f"{place(where)}, {role}: {configuration(way)}": group[name]
                for name, (where, role, way) in parts.items()
            }
        )
    return found
