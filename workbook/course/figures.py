"""Figures of the lessons: wb-machines, and wb-default-costs of the running example."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddlkit.core.iteration import Iteration
from ddlkit.core.timeline import COMPUTE, Timeline
from ddlkit.model import make_plan
from workbook import plots
from workbook.course.example import Example
from workbook.plots.style import INK, look, time_unit

# -- wb-machines ---------------------------------------------------------------------


def steps_over_peak(steps: pd.DataFrame) -> Figure:
    """Draw the share of a machine's peak that a training step of each network reaches.

    Parameters
    ----------
    steps : DataFrame
        Rows of `compare.kernel_shares` that are steps of networks on one machine.
    """
    networks = steps["kernel"].str.removeprefix("step of ")
    shares = steps.assign(network=networks)
    percent = 100 * shares.pivot_table("share", "network", "precision", sort=False)
    figure, ax = plots.canvas(height=2.4)
    label = "rate of a training step [% of the peak rate]"
    plots.dots(ax, percent.index, percent, label=label, legend="")
    ax.set_xlim(0, 100)
    # The name of each precision is written above its first marker, in its colour.
    for line in ax.get_lines():
        name = str(line.get_label())
        if name in percent:
            first = percent[name].iloc[0]
            text = ax.text(first, -0.25, name, ha="center", va="bottom")
            text.set_color(line.get_color())
    least = steps["share"].min()
    most = steps["share"].max()
    plots.title(
        figure,
        f"A training step reaches {least:.0%} to {most:.0%} of the machine's peak rate",
    )
    return figure


# -- wb-default-costs ----------------------------------------------------------------

COMPARED = {"ddp": "PyTorch's default buckets", "exact": "The best plan"}
"""The plans that are compared, and the headings of their panels."""


def default_costs(example: Example) -> tuple[Figure, pd.DataFrame]:
    """Draw a step of the running example under PyTorch's default buckets and under the best plan.

    Parameters
    ----------
    example : Example
        The running example, as `workbook.course.example.load` returns it.

    Returns
    -------
    figure : Figure
        Two timelines on one time axis. The time at which each step ends and the
        communication that compute does not hide are marked.
    spans : DataFrame
        The spans of both timelines, by ``plan``.
    """
    workload = example.profiled
    cost = example.cost
    timelines = {}
    headings = {}
    for spec, name in COMPARED.items():
        plan = make_plan(spec, workload, cost)
        timelines[spec] = Iteration(workload, plan, cost).timeline()
        headings[spec] = f"{name}: {len(plan.ends)} messages"
    figure, axes = plots.canvas(rows=2, height=3.6)
    plots.gantt(axes, {headings[spec]: timelines[spec] for spec in COMPARED})
    default_s = timelines["ddp"].duration_s
    best_s = timelines["exact"].duration_s
    scale, unit = time_unit(default_s)
    for ax, timeline in zip(axes, timelines.values(), strict=True):
        # The times that `gantt` writes above a timeline are marked in it instead. The axis is 14%
        # longer than the longer step, so that the text at the end of this step has room.
        ax.set_title("", loc="right")
        ax.set_xlim(0, 1.14 * scale * default_s)
        _mark_end(ax, scale * timeline.duration_s, unit)
        _mark_exposed(ax, timeline, scale, unit)
    plots.title(
        figure,
        f"PyTorch's default buckets cost {1 - best_s / default_s:.0%} of this step, which "
        f"takes {scale * default_s:.0f} {unit} instead of {scale * best_s:.0f} {unit}",
    )
    spans = [timelines[spec].to_frame().assign(plan=spec) for spec in COMPARED]
    return figure, pd.concat(spans)


def _mark_end(ax: Axes, end: float, unit: str) -> None:
    """Draw the line at which a step ends, with its time."""
    ax.axvline(end, color=INK, linewidth=1.2)
    time = ax.text(end, 0.5, f" {end:.0f} {unit}", ha="left", va="center")
    time.set(fontsize=10, fontweight="bold")


def _mark_exposed(ax: Axes, timeline: Timeline, scale: float, unit: str) -> None:
    """Outline the times at which compute waits for communication, in the row of compute.

    These are the gaps between its spans. A time in seconds is multiplied by ``scale`` to be in
    ``unit``.
    """
    edge = look("all_reduce").color
    computing = scale * (timeline.spans(COMPUTE) - timeline.start_s.min())
    for begin, end in zip(computing[:-1, 1], computing[1:, 0], strict=True):
        outline = ax.broken_barh([(begin, end - begin)], (-0.36, 0.72))
        outline.set(facecolor="white", edgecolor=edge, linestyle="--", linewidth=1.2)
        text = f"exposed\n{end - begin:.0f} {unit}"
        waits = ax.text((begin + end) / 2, 0, text, ha="center", va="center")
        waits.set(color=edge, fontsize=9)
