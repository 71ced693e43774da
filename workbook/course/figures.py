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
    """Draw the share of a machine's peak rate that a training step of each network reaches.

    Parameters
    ----------
    steps : DataFrame
        Rows of `workbook.validate.compare.kernel_shares` that are training steps of networks
        on one machine. Their ``kernel`` is such as "step of ResNet-18", and their ``share``
        is between 0 and 1.

    Returns
    -------
    Figure
        A row for each network, with a marker for each precision.
    """
    networks = steps["kernel"].str.removeprefix("step of ")
    shares = steps.assign(network=networks)
    # The table has a row for each network and a column for each precision.
    percent = 100 * shares.pivot_table(
        values="share", index="network", columns="precision", sort=False
    )
    figure, ax = plots.canvas(height=2.4)
    label = "rate of a training step [% of the peak rate]"
    plots.dots(ax, percent.index, percent, label=label, legend="")
    ax.set_xlim(0, 100)
    # In place of a legend, the name of each precision stands above the marker of the first
    # network, in the same colour.
    for line in ax.get_lines():
        name = str(line.get_label())
        # The line at 0 is no precision, and is left out.
        if name in percent:
            share_of_first = percent[name].iloc[0]
            # Rows lie at 0, 1 and so on, downwards. The text is a quarter of a row above 0.
            text = ax.text(share_of_first, -0.25, name, ha="center", va="bottom")
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
        Two timelines on one time axis. The time at which each step ends is marked, and so
        is exposed communication, which compute does not hide.
    spans : DataFrame
        The spans of both timelines, with the name of the plan ("ddp" or "exact") in the
        column ``plan``.
    """
    workload = example.profiled
    cost = example.cost
    timelines = {}
    headings = {}
    for spec, title in COMPARED.items():
        plan = make_plan(spec, workload, cost)
        timelines[spec] = Iteration(workload, plan, cost).timeline()
        # A plan lists where the gradients of each message end.
        headings[spec] = f"{title}: {len(plan.ends)} messages"
    figure, axes = plots.canvas(rows=2, height=3.6)
    plots.gantt(axes, {headings[spec]: timelines[spec] for spec in COMPARED})
    default_s = timelines["ddp"].duration_s
    best_s = timelines["exact"].duration_s
    # The default's step is the longer one. Seconds times ``scale`` are times in ``unit``.
    scale, unit = time_unit(default_s)
    for ax, timeline in zip(axes, timelines.values(), strict=True):
        # `gantt` writes times above a timeline, at the right. They are removed, because they
        # are marked in the timeline.
        ax.set_title("", loc="right")
        # The axis is 14% longer than the longer step, so that the text at its end has room.
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
    """Draw a line at the time ``end`` in ``unit``, at which a step ends, and write the time."""
    ax.axvline(end, color=INK, linewidth=1.2)
    # Compute is in row 0 and communication in row 1. The text stands between the rows, and
    # begins with a space that parts it from the line.
    time = ax.text(end, 0.5, f" {end:.0f} {unit}", ha="left", va="center")
    time.set(fontsize=10, fontweight="bold")


def _mark_exposed(ax: Axes, timeline: Timeline, scale: float, unit: str) -> None:
    """Outline the times at which compute waits for communication.

    A wait is a gap between two spans of compute, and is drawn in the row of compute. Seconds
    times ``scale`` are times in ``unit``.
    """
    edge = look("all_reduce").color
    # Each row has the start and the end of a span of compute. Layers that are computed one
    # right after the other are a single span. As in `gantt`, the timeline starts at 0.
    computing = scale * (timeline.spans(COMPUTE) - timeline.start_s.min())
    # A wait begins at the end of each span but the last, and ends at the start of the next.
    wait_begins = computing[:-1, 1]
    wait_ends = computing[1:, 0]
    for begin, end in zip(wait_begins, wait_ends, strict=True):
        # The bars of compute are 0.72 high, and their middle is at 0.
        outline = ax.broken_barh([(begin, end - begin)], (-0.36, 0.72))
        outline.set(facecolor="white", edgecolor=edge, linestyle="--", linewidth=1.2)
        text = f"exposed\n{end - begin:.0f} {unit}"
        label = ax.text((begin + end) / 2, 0, text, ha="center", va="center")
        label.set(color=edge, fontsize=9)
