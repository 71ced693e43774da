"""sharing Fig 6: the parts of an iteration of ResNet-18 by batch, and what the best saves."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from workbook import plots
from workbook.common.claims import Result, check, own, prose
from workbook.sharing import implied, model
from workbook.sharing.parts import Bars, measured_parts, pairs
from workbook.sharing.printed import BATCHES, DEFAULT, RESNET, throughput
from workbook.sharing.recordings import OURS, Tables, by_link
from workbook.sharing.shown import SIMULATED


def bars(tables: Tables) -> Bars:
    """Return parts of an iteration by batch: simulated, and of each link as measured."""
    simulated = model.with_best({str(batch): (RESNET[0], batch) for batch in BATCHES})
    return {SIMULATED: simulated} | measured(tables)


def measured(tables: Tables) -> dict[str, pd.DataFrame]:
    """Return bars of each link."""
    every: dict[str, pd.DataFrame] = {}
    for link, rows in by_link(tables, "iterations"):
        every |= measured_parts(link, rows[rows["network"].isin(OURS)], "batch")
    return every


def saved_ms() -> pd.DataFrame:
    """Return by batch what the paper's best saves of an iteration.

    It is what the text prints, what figure 8 says, and what the model says.
    """
    every = prose("sharing").items()
    texts = {int(key.rpartition("-")[2]): n for key, n in every if "fig06-saved" in key}
    rows = {}
    for batch in BATCHES:
        images = throughput().loc["ResNet-18", batch]
        took_s = model.with_best({"": ("ResNet-18", batch)})
        figure8_s = batch / images[DEFAULT] - batch / images.max()
        rows[batch] = figure8_s, took_s.iloc[0].sum() - took_s.iloc[1].sum()
    saved_s = pd.DataFrame.from_dict(
        rows, orient="index", columns=["figure 8", "model"]
    )
    return (
        pd.DataFrame({"printed": texts})
        .join(1e3 * saved_s, how="outer")
        .rename_axis("batch")
    )


def numbers(tables: Tables) -> pd.DataFrame:
    """Return what the figure's CSV holds: bars, and what the best saves.

    That stands beside the paper's best ones, and in a row for what the text alone has.
    """
    table = pd.concat(bars(tables), names=["where", "case"]).reset_index()
    saved = saved_ms()
    best = {f"{batch}, {model.best('ResNet-18', batch)}": batch for batch in BATCHES}
    batches = table["case"].map(best).where(table["where"] == SIMULATED)
    columns = saved.add_prefix("saved ").add_suffix(" [ms]")
    both = pd.concat([table, columns.reindex(batches).reset_index(drop=True)], axis=1)
    rest = saved[~saved.index.isin(BATCHES)]["printed"]
    more = {"where": "paper", "case": [f"{batch}, best" for batch in rest.index]}
    return pd.concat(
        [both, pd.DataFrame(more | {"saved printed [ms]": rest})], ignore_index=True
    )


def draw(tables: Tables) -> Figure:
    """Draw a panel of bars each for the model and the links, and what the best saves."""
    saved = saved_ms()
    figure, ax = plots.paired_bars(pairs(bars(tables)), label="iteration")
    plots.points(
        ax, saved.index, saved["printed"], "line_medians", label="paper's text"
    )
    lines = saved[["figure 8", "model"]].rename(columns={"figure 8": "paper:Fig 8"})
    plots.lines(ax, lines, xlabel="batch", ylabel="saved by the best [ms]", log="x")
    share = saved["model"].sum() / saved["figure 8"].sum()
    plots.heading(
        ax,
        f"Over all batch sizes, the best saves by the model {share:.0%} of what figure 8 shows\n",
    )
    return figure


# -- claims --------------------------------------------------------------------------------------


@check("sharing-fig06-gain-falls")
def _gain_falls() -> Result:
    each = [implied.gain("ResNet-18", batch) for batch in BATCHES]
    middles = ", ".join(f"{(result.low + result.high) / 2:.1f}%" for result in each)
    ends = each[-1].low / each[0].high, each[-1].high / each[0].low
    note = f"from Fig 8: batch 128 over 16; batches 16 to 128 gain {middles}"
    return own([ends], note)


@check("sharing-fig06-batch16")
def _saved_time() -> Result:
    """What the best saves by figure 8, each iteration off by what AlexNet's profile is."""
    text, ratios = prose("sharing"), list[float]()
    default, best = (
        implied.iteration_ms("ResNet-18", 16, which) for which in ("default", "best")
    )
    for which in ("default", "best"):
        keys = (
            f"fig07-alexnet-{part}"
            for part in ("computation-only", f"communication-{which}")
        )
        profiled_ms = sum(text[key] for key in keys) + np.array([1, -1])
        ratios += [*(profiled_ms / implied.iteration_ms("AlexNet", 64, which))]
    factor = np.array([min(ratios), max(ratios)])
    saved = " to ".join(f"{each:.2f}" for each in default - best[::-1])
    note = (
        f"from Fig 8 ({saved} ms), iterations {factor[0]:.3f} to {factor[1]:.3f} of it, "
        "as AlexNet's at batch 64"
    )
    return own([default * factor - (best * factor)[::-1]], note)


@check("sharing-fig06-constant")
def _saved_is_constant() -> Result:
    text = prose("sharing")
    note = (
        "milliseconds at 256 over those at 16, both printed beside it; "
        "Fig 8's grow by more (erratum 7)"
    )
    return own(text["fig06-saved-256"] / text["fig06-saved-16"], note)
