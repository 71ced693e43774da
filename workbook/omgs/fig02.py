"""omgs Figure 2: what selecting gradients costs, and what an all-gather costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddlkit.core.cost import MessageCost
from ddlkit.core.fit import Fit
from ddlkit.core.workload import Floats
from workbook import plots
from workbook.common.claims import claimed, paper_table
from workbook.plots.style import time_unit

DENSITY = 0.001
"""The density of Figure 2a."""
NODES = 16
"""The number of nodes of Figure 2b."""


def draw(
    selecting: Mapping[str, Fit],
    gathering: Sequence[Fit[MessageCost]],
    measured: pd.DataFrame,
) -> tuple[Figure, pd.DataFrame, tuple[float, float]]:
    """Draw measured selections and all-gathers with the costs of the authors' code.

    Parameters
    ----------
    selecting : mapping of str to Fit
        The fits of a selection by their form, such as "log", made from the samples at
        DENSITY.
    gathering : sequence of Fit
        The fits of an all-gather, each of another form. All have the same samples.
    measured : DataFrame
        Samples of selections at all densities, with the columns ``elements``, ``density``
        and ``seconds`` of a machine's table ``selection``.

    Returns
    -------
    figure : Figure
        A panel of selections, and a panel of all-gathers.
    numbers : DataFrame
        The medians of the samples. At seven sizes also the selections by the printed gamma
        and the all-gathers by the code.
    alpha_beta : (float, float)
        The alpha (s) and the beta (s/byte) of the code for as many nodes as ``gathering``
        has ranks, or for NODES if the code has none for these.
    """
    # The numbers of the code by their id. The alpha and the beta have one for each number
    # of nodes.
    code = paper_table("omgs", "code").set_index("id")["value"].astype(float)
    # All fits have the same ranks and samples, so that the first one stands for them.
    gather = gathering[0]
    nodes = _nodes_in(code, gather.cost.workers)
    # The range is the paper's. The sizes are numbers of elements in the panel of
    # selections, and bytes in that of all-gathers.
    sizes = np.geomspace(1e3, 1e6, 7).round()
    # The printed gamma, times d log2 d as in the code. Eq 10 has the density rho as a further
    # factor.
    no_density_s = claimed("omgs-gamma") * sizes * np.log2(sizes)
    # The all-gathers by the code, by the number of nodes. If ``nodes`` is NODES, the dict has one
    # entry, and one line is drawn.
    gather_s = {}
    for n in (nodes, NODES):
        gather_s[n] = code[f"alpha-{n}"] + code[f"beta-{n}"] * sizes

    figure, axes = plots.canvas(columns=2, height=3.8)
    selections_ax, gathers_ax = axes
    selections_s = {
        "paper:γ, without ρ": no_density_s,
        "paper:γ, with ρ (Eq 10)": DENSITY * no_density_s,
    }
    gathers_s = {f"paper:code, {n} nodes": times_s for n, times_s in gather_s.items()}
    heading = f"torch.topk at a density of {DENSITY:g}"
    _draw_costs(selections_ax, pd.DataFrame(selections_s, sizes), selecting, heading)
    fits = {fit.form: fit for fit in gathering}
    heading = f"all-gather among {gather.cost.workers} ranks"
    _draw_costs(gathers_ax, pd.DataFrame(gathers_s, sizes), fits, heading)
    plots.title(
        figure,
        "Above a million elements, selecting takes longer than both fitted forms say",
    )

    numbers = _numbers(measured, gather, sizes, no_density_s, gather_s)
    alpha_beta = (float(code[f"alpha-{nodes}"]), float(code[f"beta-{nodes}"]))
    return figure, numbers, alpha_beta


def _nodes_in(code: pd.Series, ranks: int | None) -> int:
    """Return the number of nodes at which the code's all-gather is drawn next to the measured one.

    Each measured rank counts as a node. The result is ``ranks``, the number of measured ranks,
    if ``code`` has an alpha for as many nodes, as in "alpha-16". Otherwise it is NODES. It is
    NODES, too, if ``ranks`` is None because the measurement does not say it.
    """
    if ranks is None or f"alpha-{ranks}" not in code:
        return NODES
    return ranks


def _draw_costs(
    ax: Axes, stated_s: pd.DataFrame, fits: Mapping[str, Fit], heading: str
) -> None:
    """Draw the costs by the paper or its code as lines, and fits with their samples.

    Parameters
    ----------
    ax : Axes
        Where the costs are drawn.
    stated_s : DataFrame
        The costs by the paper or its code in seconds: a row for each size, and a column for
        each line.
    fits : mapping of str to Fit
        The fits by their form.
    heading : str
        The heading of the panel.
    """
    # `plots.cost_fit` draws times in the unit that suits the medians of the samples, which
    # all fits share. Seconds times ``scale`` are times in this unit.
    any_fit = next(iter(fits.values()))
    medians_s = pd.Series(any_fit.seconds).groupby(np.asarray(any_fit.sizes)).median()
    scale, _ = time_unit(medians_s)
    plots.lines(ax, scale * stated_s, xlabel="", ylabel="", legend="")
    plots.cost_fit(ax, dict(fits))
    # The axis is logarithmic, so that 30 times its end leaves some room above the lines,
    # which is for the legend.
    ax.set_ylim(top=30 * ax.get_ylim()[1])
    plots.heading(ax, heading)


def _numbers(
    measured: pd.DataFrame,
    gather: Fit[MessageCost],
    sizes: Floats,
    no_density_s: Floats,
    gather_s: Mapping[int, Floats],
) -> pd.DataFrame:
    """Return what the figure's CSV holds.

    Parameters
    ----------
    measured : DataFrame
        Samples of selections, with the columns ``elements``, ``density`` and ``seconds``.
    gather : Fit
        A fit of an all-gather, with its samples.
    sizes : ndarray, shape (s,)
        The sizes at which ``no_density_s`` and ``gather_s`` were computed: elements of
        selections, and bytes of all-gathers.
    no_density_s : ndarray, shape (s,)
        The selections by the printed gamma, but without the density, which is a factor in
        Eq 10 and not in the code, in seconds.
    gather_s : mapping of int to ndarray, shape (s,)
        The all-gathers by the code, by the number of nodes, in seconds.

    Returns
    -------
    DataFrame
        Rows of four kinds: medians of measured selections, medians of measured
        all-gathers, selections by the printed gamma ("paper_s" is Eq 10), and all-gathers by
        the code. A row is NaN in the columns of the other kinds.
    """
    selections = measured.groupby(["elements", "density"])["seconds"].median()
    gathers = pd.Series(gather.seconds).groupby(gather.sizes).median()
    by_printed_gamma = {
        "paper_no_density_s": no_density_s,
        "paper_s": DENSITY * no_density_s,
    }
    gathers_by_code = {f"code_{n}_s": times_s for n, times_s in gather_s.items()}
    kinds = [
        selections.reset_index(),
        gathers.rename("gather_s").rename_axis("bytes").reset_index(),
        pd.DataFrame({"elements": sizes, **by_printed_gamma}),
        pd.DataFrame({"bytes": sizes, **gathers_by_code}),
    ]
    rows = pd.concat(kinds, ignore_index=True)
    # Int64 keeps whole numbers beside missing ones.
    return rows.astype({"elements": "Int64", "bytes": "Int64"})
