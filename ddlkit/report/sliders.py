"""The toy of notebook 00 with its four numbers to move: sliders in JupyterLab, a figure everywhere else.

The figure is drawn always; sliders need ipywidgets, and somebody at the notebook.
"""

from __future__ import annotations

import os
import sys

from ddlkit.core.cost import AlphaBeta
from ddlkit.core.iteration import Iteration
from ddlkit.core.plan import buffer, exact
from ddlkit.core.workload import Workload
from ddlkit.report import outputs, plots

LAYERS, N_BYTES = 3, 100
RANGES: dict[str, tuple[str, float, float, float, float]] = {
    "alpha_s": ("alpha [s]", 0.5, 0, 3, 0.1),
    "beta_s_per_byte": ("beta [s/B]", 0.02, 0, 0.1, 0.005),
    "compute": ("compute [x]", 1.0, 0.25, 4, 0.25),
    "buffer_bytes": ("buffer [B]", N_BYTES, N_BYTES, N_BYTES * LAYERS, N_BYTES),
}
"""Of each slider: what it is called, where it stands at first, its least and greatest value, its step."""


def toy(alpha_s: float, beta_s_per_byte: float, compute: float, buffer_bytes: int) -> Iteration:
    """Three equal layers, forward 3 s, backward 2 s a layer, each times ``compute``; gradients of 100 bytes.

    A message is sent when its gradients would exceed ``buffer_bytes`` with the next one, or at the end.

    >>> toy(0.5, 0.02, 1.0, 100).prediction.iteration_s, toy(0.5, 0.02, 1.0, 300).prediction.iteration_s
    (12.5, 15.5)
    """
    work = Workload.from_arrays(3.0 * compute, [2.0 * compute] * LAYERS, [N_BYTES] * LAYERS)
    return Iteration(work, buffer(work, buffer_bytes), AlphaBeta(alpha_s, beta_s_per_byte))


def told(alpha_s: float, beta_s_per_byte: float, compute: float, buffer_bytes: int) -> str:
    """A setting of the sliders in a sentence, beside the best of all plans."""
    here = toy(alpha_s, beta_s_per_byte, compute, buffer_bytes)
    best = Iteration(here.workload, exact(here.workload, here.cost), here.cost).prediction
    return (
        f"iteration {here.prediction.iteration_s:.2f} s, exposed "
        f"{here.prediction.exposed_communication_s:.2f} s; by the best plan {best.iteration_s:.2f} s"
    )


def draw(alpha_s: float, beta_s_per_byte: float, compute: float, buffer_bytes: int) -> None:
    """What is shown while a slider moves: the timeline, and `told`."""
    import matplotlib.pyplot as plt
    from IPython.display import display

    setting = (alpha_s, beta_s_per_byte, compute, buffer_bytes)
    figure, ax = plots.canvas(height=1.9)
    plots.gantt(ax, {"toy": toy(*setting).timeline()})
    plt.close(figure)
    display(figure)
    print(told(*setting))


def show() -> None:
    """Sliders, or one line that says where they are."""
    if outputs.REPORTS_VARIABLE in os.environ or "IPython" not in sys.modules:
        print(
            "In JupyterLab four sliders stand here; without it, buckets.html of the site can be moved."
        )
        return
    try:
        import ipywidgets
    except ImportError:
        print("Four sliders would stand here: pip install ipywidgets, and run this cell again.")
        return
    sliders = {
        name: (ipywidgets.IntSlider if isinstance(value, int) else ipywidgets.FloatSlider)(
            value=value, min=low, max=high, step=step, description=said
        )
        for name, (said, value, low, high, step) in RANGES.items()
    }
    ipywidgets.interact(draw, **sliders)
