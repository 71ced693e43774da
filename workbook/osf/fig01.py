"""osf Figure 1: one iteration with and without overlap of computing and sending."""

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
    """Return replaced VGG-16 by layer: all communication after computation, and overlapped."""
    workload = cluster.workload(REPLACED, setting.compute_s(REPLACED), "layer")
    plans = {
        "after computation (CSF)": single(workload),
        "overlapped (OSF)": none(workload),
    }
    cost = setting.cost()
    return {
        name: Iteration(workload, plan, cost).timeline() for name, plan in plans.items()
    }


def draw() -> tuple[Figure, pd.DataFrame, float]:
    """Return the figure with its spans, and how many times its forward backward takes by Eq 4."""
    drawn = modelled(settings.setting())
    printed = claimed("osf-eq4-backward")
    exposed = [1e3 * timeline.exposed_communication_s() for timeline in drawn.values()]
    said = (
        f"By the model, overlap shortens exposed communication from {exposed[0]:.0f} ms "
        f"to {exposed[1]:.1f} ms"
    )
    figure, spans = plots.timelines(drawn, "model", said)
    return figure, spans.assign(paper_backward_over_forward=printed), printed


@check("osf-eq4-backward")
def _backward_over_forward() -> Result:
    alone = source.everywhere("layers").query("ranks == 1")
    place = ["network", "place", "precision"]
    sums = alone.groupby(place)[["forward_s", "backward_s"]].sum()
    ratios = sums["backward_s"] / sums["forward_s"]
    in_table_2 = ratios.index.isin(cluster.measured_names(), level=0)
    each = ", ".join(
        f"{name} {of.min():.3g} to {of.max():.3g}"
        for name, of in ratios[in_table_2].groupby("network")
    )
    ends = f"{ratios.idxmin()[0]} the least, {ratios.idxmax()[0]} the most; of Table 2 {each}"
    note = f"{ends}; one rank on CPUs, two machines, fp32 and bf16; in operations 2 (sharing-backward-flop)"
    return claims.measured(ratios, note, "recorded")
