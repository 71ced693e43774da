"""osf Figure 1: an iteration with and without overlapping communication."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from ddlkit.core.iteration import Iteration
from ddlkit.core.plan import none, single
from ddlkit.core.timeline import Timeline
from workbook import plots
from workbook.common import claims, source
from workbook.common.claims import Result, check, claimed
from workbook.osf import cluster, settings
from workbook.osf.cluster import REPLACED, PaperSetting


def modelled(setting: PaperSetting) -> dict[str, Timeline]:
    """Return the timelines of VGG-16 with replaced layers, a message for each layer.

    In the first timeline all communication follows the computation, and in the second
    it overlaps with the backward pass.
    """
    workload = cluster.workload(REPLACED, setting.compute_s(REPLACED), "layer")
    cost = setting.cost()
    after_computation = Iteration(workload, single(workload), cost)
    overlapped = Iteration(workload, none(workload), cost)
    return {
        "after computation (CSF)": after_computation.timeline(),
        "overlapped (OSF)": overlapped.timeline(),
    }


def draw() -> tuple[Figure, pd.DataFrame, float]:
    """Draw both timelines.

    Returns
    -------
    figure : Figure
        The figure.
    spans : DataFrame
        The spans that it shows, by the column ``model``.
    ratio : float
        The backward pass over the forward pass, as osf Eq 4 has it.
    """
    timelines = modelled(settings.setting())
    ratio = claimed("osf-eq4-backward")
    exposed_ms = [
        1e3 * timeline.exposed_communication_s() for timeline in timelines.values()
    ]
    title = (
        "By the model, overlap shortens exposed communication from "
        f"{exposed_ms[0]:.0f} ms to {exposed_ms[1]:.1f} ms"
    )
    figure, spans = plots.timelines(timelines, "model", title)
    return figure, spans.assign(paper_backward_over_forward=ratio), ratio


@check("osf-eq4-backward")
def _backward_over_forward() -> Result:
    """Return the backward over the forward pass, of every network recorded alone."""
    layers = source.everywhere("layers").query("ranks == 1")
    recording = ["network", "place", "precision"]
    sums_s = layers.groupby(recording)[["forward_s", "backward_s"]].sum()
    ratios = sums_s["backward_s"] / sums_s["forward_s"]

    is_in_table_2 = ratios.index.isin(cluster.measured_names(), level=0)
    ranges = []
    for name, of_network in ratios[is_in_table_2].groupby("network"):
        ranges.append(f"{name} {of_network.min():.3g} to {of_network.max():.3g}")
    lowest = ratios.idxmin()[0]
    highest = ratios.idxmax()[0]
    note = (
        f"{lowest} the least, {highest} the most; of Table 2 {', '.join(ranges)}; "
        "one rank on CPUs, two machines, fp32 and bf16; in operations 2 "
        "(sharing-backward-flop)"
    )
    return claims.measured(ratios, note, "recorded")
