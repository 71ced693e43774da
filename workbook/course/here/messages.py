"""All-reduces timed on this machine, compared with those of the recording."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ddlkit.core.fit import fit, held_out_errors
from ddlkit.core.units import format_bytes
from ddlkit.model.calibration import undisturbed
from workbook import plots
from workbook.common.source import Source
from workbook.plots.style import Style, add_legend, time_unit

FORMS = ("alpha_beta:medians", "alpha_beta", "piecewise", "table")
"""The cost forms that are fitted to the recorded messages and drawn."""
MEASURED_HERE = Style("measured here, median", "#7a3b9a", "X")
"""How the messages timed on this machine look."""
NOTHING = (
    "No all-reduce was timed on this machine. "
    "Run ./reproduce.sh, which times all-reduces and runs this notebook again."
)


@dataclass(frozen=True)
class Timed:
    """All-reduces over one link, and what the sentence says of them.

    Attributes
    ----------
    sizes, seconds : ndarray of shape (n,)
        The size of each timed message in bytes, and its time.
    medians : Series
        The median time of each size, in seconds.
    """

    sizes: np.ndarray
    seconds: np.ndarray
    medians: pd.Series

    @classmethod
    def of(cls, rows: pd.DataFrame) -> Timed:
        """Return the messages of a table ``collectives`` that has one link."""
        return cls(
            sizes=rows["bytes"].to_numpy(float),
            seconds=rows["seconds"].to_numpy(float),
            medians=rows.groupby("bytes")["seconds"].median(),
        )

    @property
    def seconds_per_byte(self) -> float:
        """The slope of the line through the medians, which large messages determine."""
        line = fit("alpha_beta:medians", self.sizes, self.seconds, draws=0).cost
        return float(line.beta_s_per_byte)

    @property
    def held_out_error(self) -> float | None:
        """The median error of a table at held-out sizes, or None for less than three sizes."""
        _, errors, _ = held_out_errors("table", self.sizes, self.seconds)
        return float(np.median(np.abs(errors))) if errors.size else None


def compare(
    recording: Source, here: Source, link: str, workers: int
) -> tuple[str, Figure | None]:
    """Compare the all-reduces timed on this machine with those of the recording.

    If this machine has no messages over ``link`` among so many ``workers``, the first
    link is compared that both have, for example loopback. Samples that other programs
    disturbed are left out, unless a size has no others.

    Parameters
    ----------
    recording : Source
        The tables that the lesson is made from.
    here : Source
        The tables of this machine, which may be none.
    link : str
        The link to compare, if it was measured on this machine.
    workers : int
        The number of workers on it.

    Returns
    -------
    sentence : str
        The number of messages, the start-up, the time of a byte, and the error of a
        table.
    figure : Figure or None
        The recorded messages with the forms fitted to them, and the medians of this
        machine. None if nothing can be compared.
    """
    recorded_links = _by_link(recording)
    links_here = _by_link(here)
    common = [place for place in links_here if place in recorded_links]
    if not common:
        return NOTHING, None
    wanted = (link, workers)
    place = wanted if wanted in common else common[0]
    recorded = recorded_links[place]
    measured = links_here[place]
    return _sentence(place, measured, recorded), _figure(place, measured, recorded)


def _by_link(tables: Source) -> dict[tuple[str, int], Timed]:
    """Return the all-reduces by link and number of workers.

    A line needs two sizes, so that a link with one size is left out.
    """
    if not tables.has("collectives"):
        return {}
    rows = undisturbed(tables.table("collectives"))
    # Only messages that were alone on the link are compared.
    rows = rows[(rows["collective"] == "all_reduce") & (rows["in_flight"] == 1)]
    timed = {}
    for (link, ranks), of_link in rows.groupby(["link", "ranks"]):
        if of_link["bytes"].nunique() > 1:
            timed[str(link), int(ranks)] = Timed.of(of_link)
    return timed


def _sentence(place: tuple[str, int], measured: Timed, recorded: Timed) -> str:
    """Return start-ups, times of a byte and errors, here and in the recording.

    ``place`` is the link and the number of workers.
    """
    link, workers = place
    # No smaller size can be in both. The start-up is left out if not even this one is.
    smallest = max(measured.medians.index.min(), recorded.medians.index.min())
    parts = [
        f"{len(measured.seconds)} all-reduces among {workers} workers over {link} were "
        f"timed on this machine, and {len(recorded.seconds)} in the recording."
    ]
    if smallest in measured.medians and smallest in recorded.medians:
        parts.append(
            f"The start-up, which is the time of {format_bytes(smallest)}, is "
            f"{1e3 * measured.medians[smallest]:.2f} ms here and "
            f"{1e3 * recorded.medians[smallest]:.2f} ms in the recording."
        )
    parts.append(
        f"A byte takes {1e9 * measured.seconds_per_byte:.2f} ns here and "
        f"{1e9 * recorded.seconds_per_byte:.2f} ns in the recording."
    )
    if measured.held_out_error is not None and recorded.held_out_error is not None:
        parts.append(
            "The median error of a table at held-out sizes is "
            f"{measured.held_out_error:.1%} here and {recorded.held_out_error:.1%} in "
            "the recording."
        )
    return " ".join(parts)


def _figure(place: tuple[str, int], measured: Timed, recorded: Timed) -> Figure:
    """Draw the recorded messages with the fitted forms, and the medians measured here.

    ``place`` is the link and the number of workers.
    """
    link, workers = place
    fits = {
        form: fit(form, recorded.sizes, recorded.seconds, draws=0) for form in FORMS
    }
    figure, ax = plots.canvas(height=3.6)
    plots.cost_fit(ax, fits)
    ax.lines[0].set_label("recorded, median")  # cost_fit draws the medians first
    scale, _ = time_unit(recorded.medians)  # cost_fit draws in this unit
    sizes = measured.medians.index
    plots.points(ax, sizes, scale * measured.medians, MEASURED_HERE, size=5)
    add_legend(ax, "inside")
    plots.heading(ax, f"{workers} workers over {link}; the forms fit the recording")
    return figure
