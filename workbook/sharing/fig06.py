"""sharing Fig 6: the parts of an iteration of ResNet-18 by batch, and what the best saves."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from workbook import plots
from workbook.common.claims import Result, by_readings, check, own, prose
from workbook.sharing import implied, model
from workbook.sharing.parts import Bars, measured_parts, pairs
from workbook.sharing.printed import BATCHES, DEFAULT, RESNET, throughput
from workbook.sharing.recordings import OURS, Tables, by_link
from workbook.sharing.shown import SIMULATED

NETWORK, _ = RESNET


def bars(tables: Tables) -> Bars:
    """Return the parts of ResNet-18's iteration by batch, simulated and measured on each link.

    Parameters
    ----------
    tables : Tables
        What a machine measured, as `recordings.recorded` returns it.

    Returns
    -------
    Bars
        A table for the simulation and for each link, with two rows for each batch: the
        default, then the best configuration.
    """
    cases = {str(batch): (NETWORK, batch) for batch in BATCHES}
    return {SIMULATED: model.with_best(cases), **measured(tables)}


def measured(tables: Tables) -> dict[str, pd.DataFrame]:
    """Return the bars of each link, with a case for each batch.

    Parameters
    ----------
    tables : Tables
        What a machine measured, as `recordings.recorded` returns it.

    Returns
    -------
    dict of str to DataFrame
        `Bars` of the links that have any, by names such as "here, lab:1gbit".
    """
    by_place: dict[str, pd.DataFrame] = {}
    for link, rows in by_link(tables, "iterations"):
        # OURS are names of ResNet-18.
        resnet = rows[rows["network"].isin(OURS)]
        # A link adds its own entry, or none if it has fewer than two batches.
        by_place |= measured_parts(link, resnet, by="batch")
    return by_place


def saved_ms() -> pd.DataFrame:
    """Return what the best configuration of the paper saves of an iteration.

    Returns
    -------
    DataFrame
        Milliseconds by batch: as the text prints them (``printed``), by the throughputs
        of ``figure 8``, and by the ``model``. The text prints batches 16 and 256, of which
        figure 8 lacks 256. What is lacking is NaN.
    """
    # An id such as "fig06-saved-16" ends with the batch.
    prefix = "fig06-saved-"
    printed_ms = {
        int(key.removeprefix(prefix)): ms
        for key, ms in prose("sharing").items()
        if key.startswith(prefix)
    }
    saved_s = {}
    for batch in BATCHES:
        images_per_s = throughput().loc[NETWORK, batch]
        default_s = batch / images_per_s[DEFAULT]
        best_s = batch / images_per_s.max()
        # There is only one case, whose label is not used.
        parts_s = model.with_best({"": (NETWORK, batch)})
        # The parts of a row add up to an iteration. The first row is the default, and the second
        # the best.
        iterations_s = parts_s.sum(axis=1)
        by_model_s = iterations_s.iloc[0] - iterations_s.iloc[1]
        saved_s[batch] = (default_s - best_s, by_model_s)
    computed_s = pd.DataFrame.from_dict(
        saved_s, orient="index", columns=["figure 8", "model"]
    )
    table = pd.DataFrame({"printed": printed_ms}).join(1e3 * computed_s, how="outer")
    return table.rename_axis("batch")


def numbers(tables: Tables) -> pd.DataFrame:
    """Return what the figure's CSV holds.

    Parameters
    ----------
    tables : Tables
        What a machine measured, as `recordings.recorded` returns it.

    Returns
    -------
    DataFrame
        A row for each bar, with ``where``, ``case`` and its parts in seconds. The
        simulated bars of the best configuration also have the columns of `saved_ms`, such
        as "saved model [ms]". The last rows are of batches that only the text has.
    """
    table = pd.concat(bars(tables), names=["where", "case"]).reset_index()
    # What the best configuration saves of an iteration, in ms. The index is the batch.
    saved_by_batch = saved_ms()
    # The names of cases are as in `model.with_best`, such as "16, 1x256".
    batch_of_best = {
        f"{batch}, {model.best(NETWORK, batch)}": batch for batch in BATCHES
    }
    is_simulated = table["where"] == SIMULATED
    # The batch is NaN for all bars but the simulated ones of the best configuration.
    batches = table["case"].map(batch_of_best).where(is_simulated)
    renamed = saved_by_batch.add_prefix("saved ").add_suffix(" [ms]")
    # `reindex` returns one row for each bar, in the order of ``table``: what is saved at the
    # bar's batch, or NaN if the batch is NaN.
    saved_of_bars = renamed.reindex(batches).reset_index(drop=True)
    with_saved = pd.concat([table, saved_of_bars], axis=1)
    is_only_text = ~saved_by_batch.index.isin(BATCHES)
    only_text = saved_by_batch[is_only_text]["printed"]
    text_rows = pd.DataFrame(
        {
            "where": "paper",
            "case": [f"{batch}, best" for batch in only_text.index],
            "saved printed [ms]": only_text,
        }
    )
    return pd.concat([with_saved, text_rows], ignore_index=True)


def draw(tables: Tables) -> Figure:
    """Draw a panel of bars for the model and for each link, and what the best saves.

    The last panel has lines of what the best configuration saves by figure 8 and by the
    model, and points of what the text prints.

    Parameters
    ----------
    tables : Tables
        What a machine measured, as `recordings.recorded` returns it.
    """
    saved = saved_ms()
    # ``ax`` are empty axes below the panels of bars.
    figure, ax = plots.paired_bars(pairs(bars(tables)), label="iteration")
    # Names such as "line_medians" and "paper" select a colour and a marker. The numbers of the
    # text are from the paper, too, but look different from the line of figure 8.
    plots.points(
        ax, saved.index, saved["printed"], "line_medians", label="paper's text"
    )
    # What follows the colon is only for the legend.
    lines = saved[["figure 8", "model"]].rename(columns={"figure 8": "paper:Fig 8"})
    plots.lines(ax, lines, xlabel="batch", ylabel="saved by the best [ms]", log="x")
    share = saved["model"].sum() / saved["figure 8"].sum()
    # The line break at the end lifts the heading above the legend, which stands on the axes.
    plots.heading(
        ax,
        f"Summed over batch sizes, the model saves {share:.0%} of what figure 8 shows\n",
    )
    return figure


# -- claims --------------------------------------------------------------------------


@check("sharing-fig06-gain-falls")
def _gain_falls() -> Result:
    """Return the gain of the best configuration at batch 128 divided by that at batch 16.

    Each gain is a range, within the rounding of figure 8, and so is the ratio.
    """
    gains = [implied.gain(NETWORK, batch) for batch in BATCHES]
    middles = ", ".join(f"{(gain.low + gain.high) / 2:.1f}%" for gain in gains)
    smallest_batch = gains[0]
    largest_batch = gains[-1]
    least = largest_batch.low / smallest_batch.high
    most = largest_batch.high / smallest_batch.low
    note = f"from Fig 8: batch 128 over 16; batches 16 to 128 gain {middles}"
    return own([(least, most)], note)


@check("sharing-fig06-batch16")
def _saved_time() -> Result:
    """Return what the best configuration saves at batch 16, in milliseconds, in two readings.

    One reading takes the iterations of figure 8. However, the printed time is from a profile, in
    which an iteration may be longer or shorter than in figure 8. The other reading therefore
    multiplies the iterations of figure 8 by a factor: the iteration of a profile divided by that
    of figure 8. This factor is known of AlexNet only, the one network of which the text prints
    times that add up to an iteration.
    """
    # Each of AlexNet's two configurations gives a range of factors. The factor of either
    # configuration of ResNet-18 may lie anywhere from the least of these factors to the largest.
    factors = [*_factors_of_alexnet("default"), *_factors_of_alexnet("best")]
    least_factor = min(factors)
    largest_factor = max(factors)
    # The shortest and the longest iterations that figure 8 allows.
    shortest_default_ms, longest_default_ms = implied.iteration_ms(
        NETWORK, 16, "default"
    )
    shortest_best_ms, longest_best_ms = implied.iteration_ms(NETWORK, 16, "best")
    # The least that is saved is the shortest default less the longest best.
    saved_ms_by_fig08 = [
        shortest_default_ms - longest_best_ms,
        longest_default_ms - shortest_best_ms,
    ]
    # The default and the best may have different factors. The least is saved if the default has
    # the least factor and the best the largest one.
    saved_ms_by_profile = [
        shortest_default_ms * least_factor - longest_best_ms * largest_factor,
        longest_default_ms * largest_factor - shortest_best_ms * least_factor,
    ]
    saved = " to ".join(f"{ms:.2f}" for ms in saved_ms_by_fig08)
    note = (
        f"from Fig 8 ({saved} ms), iterations {least_factor:.3f} to "
        f"{largest_factor:.3f} of it, as AlexNet's at batch 64"
    )
    readings = {
        "iterations of Fig 8": own([saved_ms_by_fig08], ""),
        "those of a profile": own([saved_ms_by_profile], ""),
    }
    return by_readings(readings, note)


def _factors_of_alexnet(configuration: str) -> tuple[float, float]:
    """Return AlexNet's iteration in the printed profile divided by its iteration in figure 8.

    The batch is 64, that of figure 7.

    Parameters
    ----------
    configuration : {"default", "best"}
        The configuration.

    Returns
    -------
    least, largest : float
        The ends of the ratios that the rounding of the printed numbers allows.
    """
    text = prose("sharing")
    # The time in which nothing is sent. The text prints a single one for both configurations.
    computation_only_ms = text["fig07-alexnet-computation-only"]
    # All communication, also that which overlaps with computation.
    communication_ms = text[f"fig07-alexnet-communication-{configuration}"]
    # At any moment of an iteration either something is sent or nothing is.
    profile_ms = computation_only_ms + communication_ms
    # Each of the two times was rounded to a whole millisecond and may be off by half of one, so
    # that their sum may be off by a whole one.
    off_ms = 1
    shortest_ms, longest_ms = implied.iteration_ms("AlexNet", 64, configuration)
    return (profile_ms - off_ms) / longest_ms, (profile_ms + off_ms) / shortest_ms


@check("sharing-fig06-constant")
def _saved_is_constant() -> Result:
    """Return the time saved at batch 256 divided by that at batch 16, as the text prints them."""
    text = prose("sharing")
    small_ms = text["fig06-saved-16"]
    large_ms = text["fig06-saved-256"]
    note = (
        f"{large_ms} ms at batch 256 over {small_ms} ms at 16, as printed; Fig 8's grow "
        "by more (erratum 7)"
    )
    return own(large_ms / small_ms, note)
