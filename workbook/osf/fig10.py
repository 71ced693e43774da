"""osf Figure 10: errors of a linear and of a piecewise cost for each tensor of a network."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddlkit.core.errors import UserError
from ddlkit.core.fit import fit, unseen_errors
from ddlkit.core.units import KB, format_bytes
from ddlkit.model.calibration import undisturbed
from workbook import plots
from workbook.common import claims, networks, source
from workbook.common.claims import Result, check, prose
from workbook.osf import equations as osf
from workbook.osf.frames import rows_of
from workbook.osf.lab import OTHER_LINES
from workbook.plots.style import FAINT, SOFT, look

MODELS = (
    *("ring_all_reduce", "alpha_beta:medians", "alpha_beta"),
    *("piecewise:BDP", "piecewise", "segments", "table"),
)
"""Costs from samples: osf Eq 7 from both ends, a line through the medians, another by relative error,
osf Eq 18 with its threshold at the bandwidth-delay product, or where it fits best, linear pieces, a table."""
LINE_MODELS, EQ18_MODELS = list(MODELS[:3]), list(MODELS[3:5])
DRAWN = {"alpha_beta:medians": "straight line", "piecewise:BDP": "Eq 18"}
"""What is drawn of MODELS, and its name: the two forms of which osf claims something."""
LINK = ["link", "ranks"]
LINK_TITLES = {"lab:1gbit": "1 Gbit/s", "lab:500mbit": "500 Mbit/s"}
"""How links are spelled in a heading; others by their own name."""
TICKS = [256 << 5 * step for step in range(4)]
"""Message sizes in bytes that are named on the axis."""


# -- numbers -------------------------------------------------------------------------------------


def numbers(
    collectives: pd.DataFrame,
    tensors: pd.DataFrame,
    network: str,
    models: Sequence[str] = MODELS,
) -> pd.DataFrame:
    """Return the error of each of ``models`` at each size that the network's tensors have, over each link.

    collectives : samples to make costs from; tensors : of another run, predicted, each size unseen
    ``tensors`` of the result counts them; ``repeated`` is the two runs' relative difference
    """
    before = {place: rows for place, rows in _all_reduces(collectives)}
    frames = [
        _errors(before[place], rows, models).assign(
            **dict(zip(LINK, place, strict=True))
        )
        for place, rows in _all_reduces(tensors[tensors["network"] == network])
        if place in before
    ]
    if not frames:
        raise UserError(
            f"no link with all-reduces of {network}: those of v0.2-studies have them"
        )
    frame = pd.concat(frames, ignore_index=True)
    counts = pd.Series(networks.parameters(network)).mul(4).value_counts()
    frame.insert(0, "tensors", counts.reindex(frame["bytes"]).to_numpy())
    return frame.assign(paper_bandwidth_delay_bytes=KB * prose("osf")["fig10-bdp"])


def _all_reduces(samples: pd.DataFrame) -> Any:
    """Return all-reduces by link and ranks, without those that the machine's host disturbed."""
    return undisturbed(samples[samples["collective"] == "all_reduce"]).groupby(LINK)


def _errors(
    seen: pd.DataFrame, rows: pd.DataFrame, models: Sequence[str]
) -> pd.DataFrame:
    """Return errors of every model made from ``seen``, at the sizes of ``rows``."""
    workers, columns = int(seen["ranks"].iloc[0]), ["bytes", "seconds"]
    samples, unseen = (tuple(part[columns].to_numpy(float).T) for part in (seen, rows))
    threshold = osf.bandwidth_delay_bytes(
        osf.ring_from_ends(samples[0], samples[1], workers)
    )
    before, measured = (
        part.groupby("bytes")["seconds"].median() for part in (seen, rows)
    )
    repeated = (before.reindex(measured.index) / measured - 1).to_numpy()

    def made(model: str, sizes: Any, seconds: Any) -> Any:
        if model == "ring_all_reduce":
            return osf.ring_from_ends(sizes, seconds, workers)
        form = model.replace("BDP", f"{threshold:.0f}")
        return fit(
            form, sizes, seconds, workers=workers, algorithm="ring", draws=0
        ).cost

    frames = []
    for model in models:
        sizes, errors = unseen_errors(partial(made, model), samples, unseen)
        frame = pd.DataFrame({"model": model, "bytes": sizes.astype(int)})
        frame["measured_s"] = measured.to_numpy()
        frame["model_s"] = (1 + errors) * measured.to_numpy()
        frames.append(frame.assign(error=errors, repeated=repeated))
    return pd.concat(frames, ignore_index=True).assign(bandwidth_delay_bytes=threshold)


def decided(frame: pd.DataFrame) -> pd.DataFrame:
    """Return per link and side of the BDP if the best line and Eq 18 differ by more than the two runs."""
    small = (frame["bytes"] < frame["bandwidth_delay_bytes"]).map(
        {True: "small", False: "large"}
    )
    sides = frame.assign(
        side=small, error=frame["error"].abs(), apart=frame["repeated"].abs()
    )
    rows: list[dict[str, Any]] = []
    for (link, ranks, side), mine in sides.groupby([*LINK, "side"], sort=False):
        each = (
            mine.loc[mine.index.repeat(mine["tensors"])]
            .groupby("model")["error"]
            .median()
        )
        line, curve = (each[models].idxmin() for models in (LINE_MODELS, EQ18_MODELS))
        runs_differ = mine["apart"].median()
        rows.append(
            {
                "link": link,
                "ranks": ranks,
                "tensors": side,
                "runs_differ": runs_differ,
                "line": line,
                "line_error": each[line],
                "eq18": curve,
                "eq18_error": each[curve],
                "decided": abs(each[line] - each[curve]) > runs_differ,
            }
        )
    return pd.DataFrame(rows)


# -- drawing -------------------------------------------------------------------------------------


def draw(frame: pd.DataFrame) -> Figure:
    """Draw the errors of the forms DRAWN by message size, a panel for each link."""
    sides = decided(frame)
    clear = sides[sides["decided"]]
    better = clear["eq18_error"] < clear["line_error"]
    said = f"Eq 18 is closer than the best line in {better.sum()} of {len(sides)} comparisons"
    said += f" and farther in {(~better).sum()}" if (~better).any() else ""
    said += "; the others are undecided" if len(clear) < len(sides) else ""
    links = sides.groupby(LINK, sort=False)
    with plots.sheet(
        said, columns=len(links), height=3.5, sharey=True, squeeze=False
    ) as (figure, axes):
        for ax, ((link, ranks), outcomes) in zip(axes.flat, links, strict=True):
            rows = rows_of(frame, link=link, ranks=ranks)
            _draw_link(ax, rows)
            name = LINK_TITLES.get(str(link), str(link))
            ax.set_title(f"{name}, {ranks} ranks\n{_closer(outcomes)}")
            ax.label_outer()
        axes[0, 0].set_ylabel("error on the held-out size [%]")
    return figure


def _draw_link(ax: Axes, rows: pd.DataFrame) -> None:
    """Draw one link's errors, how far two runs differ, and both bandwidth-delay products."""
    errors = 100 * rows.pivot(index="bytes", columns="model", values="error")[[*DRAWN]]
    apart = 100 * rows.groupby("bytes")["repeated"].first().abs().dropna()
    ax.fill_between(
        apart.index, -apart, apart, color=FAINT, label="difference of two runs"
    )
    plots.lines(ax, errors, xlabel="message size", ylabel="", log="b", legend="")
    for line, name in zip(ax.get_lines(), DRAWN.values(), strict=True):
        line.set_label(name)
    ax.set_xticks(TICKS, [format_bytes(size) for size in TICKS])
    ours, printed = (
        rows[f"{whose}bandwidth_delay_bytes"].iloc[0] for whose in ("", "paper_")
    )
    ax.axvline(ours, color=SOFT, label="BDP of the link")
    color = look("paper").color
    name = f"paper: BDP of {printed / KB:g} KB"
    ax.axvline(printed, color=color, linestyle=":", label=name)


def _closer(outcomes: pd.DataFrame) -> str:
    """Return which form is closer on which side of a link's bandwidth-delay product."""
    names = {"small": "below", "large": "above"}
    found = [
        f"{'Eq 18' if side.eq18_error < side.line_error else 'line'} closer "
        f"{names[side.tensors]} the BDP"
        for side in outcomes.itertuples()
        if side.decided
    ]
    return ", ".join(found) or "undecided"


# -- claims --------------------------------------------------------------------------------------

LINES = [LINE_MODELS[0], *OTHER_LINES]
BENT = "piecewise:BDP"


@check("osf-fig10-small", "bytes < bandwidth_delay_bytes")
@check("osf-fig10-all", "bytes > 0")
def _linear_over_piecewise(which: str) -> Result:
    """Return each of four honest lines' median error over osf Eq 18's, of every link."""
    rows = _cost_errors().query(which).eval("apart = abs(repeated)")
    medians = rows.groupby(["link", "model"])["error"].median().unstack()
    ratios = medians[LINES].div(medians[BENT], axis=0)
    apart = (rows.groupby("link")["apart"].agg(name) for name in ("median", "max"))
    listed = (
        f"{link} {', '.join(f'{x:.2g}' for x in row)}"
        for link, *row in ratios.itertuples()
    )
    each = "; ".join(map("{} (runs {:.1%} apart, up to {:.1%})".format, listed, *apart))
    note = f"medians; n links, lines by both ends, medians, relative error, least squares: {each}"
    return claims.measured(ratios.stack(), note, "recorded", n=len(ratios))


@cache
def _cost_errors() -> pd.DataFrame:
    """Return, per link, a row per tensor of ResNet-101 and cost, with |error|; of the last machine."""
    of_link: dict[str, pd.DataFrame] = {}
    for recording in source.recordings("tensors").values():
        tables = recording.table("collectives"), recording.table("tensors")
        rows = numbers(*tables, "ResNet101", [*LINES, BENT])
        rows = rows.loc[rows.index.repeat(rows["tensors"])].eval("error = abs(error)")
        of_link |= dict([*rows.groupby("link")])
    return pd.concat(of_link.values())
