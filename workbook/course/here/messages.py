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
    """Timed all-reduces among one number of workers over one link, and numbers about them.

    Attributes
    ----------
    sizes, seconds : ndarray of shape (n,)
        The size of each timed message in bytes, and its time in seconds.
    medians : Series
        The median time in seconds, by the size in bytes.
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
        """The median error of a table at held-out sizes, or None for less than three sizes.

        The error is absolute and relative to the measured time. The smallest and the largest
        size are never held out.
        """
        errors = held_out_errors("table", self.sizes, self.seconds).errors
        return float(np.median(np.abs(errors))) if errors.size else None


def compare(
    recording: Source, here: Source, link: str, workers: int
) -> tuple[str, Figure | None]:
    """Compare the all-reduces timed on this machine with those of the recording.

    All-reduces over ``link`` among ``workers`` are compared, if they were timed on both
    machines. Otherwise those of the first other link and number of workers are compared for
    which both machines have times, for example loopback. Samples that other programs disturbed
    are left out, unless a size has no others.

    Parameters
    ----------
    recording : Source
        The tables that the lesson is made from.
    here : Source
        The tables of this machine, which may be none.
    link : str
        The name of the link.
    workers : int
        The number of workers.

    Returns
    -------
    sentence : str
        The number of messages, the start-up, the time of a byte, and the error of a
        table of costs.
    figure : Figure or None
        The recorded messages with the forms fitted to them, and the medians of this
        machine. None if nothing can be compared.
    """
    # A key of these tables is a link and a number of workers.
    recorded_by_key = _by_link(recording)
    measured_by_key = _by_link(here)
    common = [key for key in measured_by_key if key in recorded_by_key]
    if not common:
        return NOTHING, None
    wanted = (link, workers)
    key = wanted if wanted in common else common[0]
    recorded = recorded_by_key[key]
    measured = measured_by_key[key]
    return _sentence(key, measured, recorded), _figure(key, measured, recorded)


def _by_link(tables: Source) -> dict[tuple[str, int], Timed]:
    """Return the timed all-reduces by link and number of workers, as far as they are compared.

    The comparison needs a line through the times, and a line needs two sizes. All-reduces of a
    single size are therefore left out. The result is empty if nothing was timed.
    """
    if not tables.has("collectives"):
        return {}
    # Samples that other programs disturbed are dropped, unless a size has no others.
    rows = undisturbed(tables.table("collectives"))
    # Only messages that were alone on the link are compared.
    rows = rows[(rows["collective"] == "all_reduce") & (rows["in_flight"] == 1)]
    timed = {}
    for (link, ranks), of_link in rows.groupby(["link", "ranks"]):
        if of_link["bytes"].nunique() > 1:
            timed[str(link), int(ranks)] = Timed.of(of_link)
    return timed


def _sentence(key: tuple[str, int], measured: Timed, recorded: Timed) -> str:
    """Return start-ups, times of a byte and errors in words, here and in the recording.

    ``key`` is the link and the number of workers. ``measured`` is from this machine.
    """
    link, workers = key
    parts = [
        f"{len(measured.seconds)} all-reduces among {workers} workers over {link} were "
        f"timed on this machine, and {len(recorded.seconds)} in the recording."
    ]
    # The start-up is compared at the smallest size that both machines can have, which is the
    # larger of their two smallest sizes. If one machine lacks this size, the start-up is left
    # out.
    smallest = max(measured.medians.index.min(), recorded.medians.index.min())
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
    # If a machine has less than three sizes, it has no such error, and nothing is said of it.
    if measured.held_out_error is not None and recorded.held_out_error is not None:
        parts.append(
            "The median error of a table at held-out sizes is "
            f"{measured.held_out_error:.1%} here and {recorded.held_out_error:.1%} in "
            "the recording."
        )
    return " ".join(parts)


def _figure(key: tuple[str, int], measured: Timed, recorded: Timed) -> Figure:
    """Draw the recorded messages with the fitted forms, and the medians measured here.

    ``key`` is the link and the number of workers. ``measured`` is from this machine.
    """
    link, workers = key
    # Without draws, the fits have no intervals, and lines are drawn alone.
    fits = {
        form: fit(form, recorded.sizes, recorded.seconds, draws=0) for form in FORMS
    }
    figure, ax = plots.canvas(height=3.6)
    plots.cost_fit(ax, fits)
    # `cost_fit` draws the medians of the recording first, and labels them "measured". The new
    # label tells them from those that are measured here.
    ax.lines[0].set_label("recorded, median")
    # `cost_fit` draws times in the unit that suits the recorded medians. Seconds times
    # ``scale`` are times in this unit.
    scale, _ = time_unit(recorded.medians)
    sizes = measured.medians.index
    plots.points(ax, sizes, scale * measured.medians, MEASURED_HERE, size=5)
    add_legend(ax, "inside")
    plots.heading(ax, f"{workers} workers over {link}; the forms fit the recording")
    return figure
