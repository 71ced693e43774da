"""Timelines: what every stream does when, and when gradients become ready."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from ddlkit.core import units
from ddlkit.core.errors import UserError
from ddlkit.core.timeline import COMMUNICATION, KINDS, Timeline
from ddlkit.core.workload import Workload
from ddlkit.report.plots.axes import legend, time_unit
from ddlkit.report.plots.theme import SOFT, look, looks, theme

NUMBERED = 12  # messages that carry the number of their group


@theme()
def gantt(
    axes: Axes | np.ndarray,
    timelines: Mapping[str, Timeline],
    *,
    rank: int = 0,
    iteration: int | None = None,
) -> None:
    """One rank's spans as bars, a row per stream; timelines under each other on one time axis.

    timelines : heading -> spans, of which ``iteration`` selects one (default: all), one per axes

    Above each stands how long it is and its exposed communication. Up to 12 messages carry their group's
    number. Raises UserError when nothing is selected.
    """
    chosen = {name: _chosen(timeline, rank, iteration) for name, timeline in timelines.items()}
    longest_s = max(spans.duration_s for spans in chosen.values())
    scale, unit = time_unit(longest_s)
    panels = np.atleast_1d(np.asarray(axes, dtype=object))
    for ax, (name, spans) in zip(panels, chosen.items(), strict=True):
        _bars(ax, spans, scale)
        ax.set_xlim(0, longest_s * scale * 1.005)
        total, exposed = spans.duration_s * scale, spans.exposed_communication_s() * scale
        text = f"{total:.3g} {unit}, exposed communication {exposed:.3g} {unit}"
        ax.set_title(text, loc="right", fontweight="normal", fontsize=7.5, color=SOFT)
        ax.set_title(name)
        ax.tick_params(axis="x", labelbottom=ax is panels[-1])
    panels[-1].set_xlabel(f"time [{unit}]")
    kinds = [k for k in KINDS if any(np.any(spans.kind == k) for spans in chosen.values())]
    patches = [
        Patch(facecolor=style.color, edgecolor="white", hatch=style.hatch, label=style.label)
        for style in looks(kinds)
    ]
    panels[0].legend(handles=patches, loc="upper left", bbox_to_anchor=(1.0, 1.0))


@theme()
def layer_profile(ax: Axes, workloads: Mapping[str, Workload]) -> None:
    """How gradients become ready: their share against time, from the start of the iteration.

    The flat beginning is the forward pass, its end is marked; a high step is a large tensor; a
    climb close to the end leaves little to hide its communication behind.
    """
    scale, unit = time_unit([workload.ready_s[-1] for workload in workloads.values()])
    for style, workload in zip(looks(list(workloads)), workloads.values(), strict=True):
        time = np.concatenate([[0.0, workload.forward_s], workload.ready_s]) * scale
        ready = np.concatenate([[0.0, 0.0], np.cumsum(workload.bytes)])
        label = f"{style.label}, {units.format_bytes(ready[-1])}"
        share = 100 * ready / ready[-1]
        ax.step(time, share, where="post", color=style.color, linestyle=style.line, label=label)
        ax.plot([time[1]], [0], "|", color=style.color, markersize=9, clip_on=False)
    ax.set_xlabel(f"time from the start of the iteration [{unit}]")
    ax.set_ylabel("gradients ready [% of bytes]")
    ax.set_xlim(left=0)
    ax.set_ylim(0, 105)
    legend(ax, "inside")


def _chosen(timeline: Timeline, rank: int, iteration: int | None) -> Timeline:
    """The spans of one rank, of one iteration or all. Raises UserError when there is none."""
    mask = timeline.rank == rank
    if iteration is not None:
        mask &= timeline.iteration == iteration
    spans = timeline.select(mask)
    if not spans.n:
        raise UserError(f"no span of rank {rank}, iteration {iteration} to draw")
    return spans


def _bars(ax: Axes, spans: Timeline, scale: float) -> None:
    """Draw spans on the axes from time zero; number the messages if they are few and wide enough."""
    streams = list(dict.fromkeys(spans.stream.tolist()))
    lefts = (spans.start_s - spans.start_s.min()) * scale
    widths = (spans.end_s - spans.start_s) * scale
    rows = np.array([streams.index(stream) for stream in spans.stream.tolist()])
    for kind, row in dict.fromkeys(zip(spans.kind.tolist(), rows.tolist(), strict=True)):
        here, style = (spans.kind == kind) & (rows == row), look(kind)
        ax.broken_barh(
            np.column_stack([lefts[here], widths[here]]).tolist(),
            (row - 0.36, 0.72),
            facecolor=style.color,
            edgecolor="white" if here.sum() <= 60 else "none",
            linewidth=0.4,
            hatch=style.hatch,
        )
    messages = np.flatnonzero(np.isin(spans.kind, COMMUNICATION))
    wide = messages[widths[messages] > 0.03 * spans.duration_s * scale]
    box = {"facecolor": "white", "edgecolor": "none", "pad": 1, "alpha": 0.85}
    for k in wide if len(messages) <= NUMBERED else ():
        middle, group = lefts[k] + widths[k] / 2, str(spans.group[k])
        ax.text(middle, rows[k], group, ha="center", va="center", fontsize=7, bbox=box)
    ax.set_yticks(range(len(streams)), streams)
    ax.set_ylim(len(streams) - 0.5, -0.5)
    ax.tick_params(axis="y", length=0)
    ax.spines["left"].set_visible(False)
    ax.grid(True, axis="x")
    ax.grid(False, axis="y")
