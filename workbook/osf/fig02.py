"""osf Figure 2: when it saves time to wait for another tensor, and when it does not."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from ddlkit.core.cost import AlphaBeta
from ddlkit.core.iteration import Iteration
from ddlkit.core.timeline import Timeline
from ddlkit.core.units import MB
from ddlkit.core.workload import Workload
from ddlkit.model import make_plan
from workbook import plots
from workbook.common.claims import prose
from workbook.osf.cluster import NETWORK_BYTES_PER_S, WORKERS
from workbook.osf.equations import update_s

CONDITIONS = {
    "one by one": "each tensor is sent alone",
    "fused in pairs": "both pairs of tensors are fused",
    "only the first pair": "only the first pair of tensors is fused",
}
"""What each plan of `modelled` does, as a sentence says it."""


def modelled() -> tuple[Workload, AlphaBeta, dict[str, Timeline]]:
    """Return an example in which it saves time to wait for one tensor, and not for another.

    The paper draws the example without numbers. They are chosen here so that it saves time to
    wait for the second of four equal tensors, and costs time to wait for the last one.

    Returns
    -------
    workload : Workload
        The iteration with four tensors, in the order in which they become ready.
    cost : AlphaBeta
        The time of a message.
    timelines : dict of str to Timeline
        The iteration with each of three plans, by the names that CONDITIONS has for them.
    """
    workload = Workload.from_arrays(
        forward_s=2e-3,
        backward_s=(2e-3, 2e-3, 9e-3, 5e-3),
        n_bytes=[4 * MB] * 4,
    )
    # `update_s` is the time of a ring all-reduce (osf Eq 7), here of one byte on the paper's
    # network.
    s_per_byte = float(update_s(1.0, WORKERS, NETWORK_BYTES_PER_S))
    # The start-up of 4 ms is chosen, as the numbers above. Like the time of a byte, it is that of a
    # whole all-reduce. ``workers`` and ``algorithm`` only describe the all-reduce, and do not
    # change these times.
    cost = AlphaBeta(4e-3, s_per_byte, workers=WORKERS, algorithm="ring")
    # "cuts:2" ends a message after the second tensor, and "cuts:2,3" also after the third. The
    # last message ends with the last tensor.
    specs = {
        "one by one": "none",
        "fused in pairs": "cuts:2",
        "only the first pair": "cuts:2,3",
    }
    timelines = {}
    for name, spec in specs.items():
        plan = make_plan(spec, workload, cost)
        timelines[name] = Iteration(workload, plan, cost).timeline()
    return workload, cost, timelines


def draw() -> tuple[Figure, pd.DataFrame]:
    """Draw the timelines of `modelled`.

    Returns
    -------
    figure : Figure
        The figure.
    spans : DataFrame
        The spans that it shows. The column ``plan`` names the timeline of a span. The
        buffer in the paper's example holds ``paper_buffer_tensors`` tensors.
    """
    _workload, _cost, timelines = modelled()
    shortest = min(timelines, key=lambda name: timelines[name].duration_s)
    title = (
        f"The iteration is shortest, {1e3 * timelines[shortest].duration_s:.1f} ms, if "
        f"{CONDITIONS[shortest]}"
    )
    figure, spans = plots.timelines(timelines, "plan", title)
    buffer_tensors = int(prose("osf")["fig02-buffer"])
    return figure, spans.assign(paper_buffer_tensors=buffer_tensors)
