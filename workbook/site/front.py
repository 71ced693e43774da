"""What the front page shows of the page of buckets: one network under PyTorch's default and at its best."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ddlkit.core.cost import AlphaBeta
from ddlkit.core.iteration import Iteration
from ddlkit.core.plan import make_plan
from ddlkit.core.workload import Workload
from ddlkit.show import png
from ddlkit.store.files import atomic_write
from workbook import plots
from workbook.site import buckets

NETWORK = "googlenet"
"""The network on which the page of buckets is opened."""


def steps() -> dict[str, Iteration]:
    """Return the step of the network under the plans ``ddp`` and ``exact``, as the page of buckets has it."""
    case = buckets.cases()[NETWORK]
    workload = Workload.from_arrays(
        case["forward_s"],
        case["backward_s"],
        case["bytes"],
        update_s=case["update_s"],
    )
    wire = case["wire"]
    cost = AlphaBeta(wire["alpha_s"], wire["beta_s_per_byte"])
    return {
        planner: Iteration(workload, make_plan(planner, workload, cost), cost)
        for planner in ("ddp", "exact")
    }


def draw(path: Path) -> dict[str, Any]:
    """Draw both steps over one axis of time into a PNG; return their seconds, and the share gained."""
    both = steps()
    default_s = both["ddp"].prediction.iteration_s
    best_s = both["exact"].prediction.iteration_s
    titles = {
        f"PyTorch's default buckets: {1e3 * default_s:.0f} ms": both["ddp"].timeline(),
        f"The best buckets: {1e3 * best_s:.0f} ms": both["exact"].timeline(),
    }
    figure, axes = plots.canvas(rows=2, height=3.2)
    plots.gantt(axes, titles)
    atomic_write(path, png(figure))
    return {
        "default_s": default_s,
        "best_s": best_s,
        "share": 1 - best_s / default_s,
    }
