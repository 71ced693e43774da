"""The running example as predicted from layers and messages of this machine."""

from __future__ import annotations

from ddlkit.core.iteration import predict
from ddlkit.core.workload import Workload
from ddlkit.model import Calibration, make_plan
from ddlkit.model.calibration import Communication
from workbook.common.source import Source
from workbook.common.specs import link_title, network_title
from workbook.course.example import LINK, NETWORK, WORKERS, Example

DEFAULT = "ddp"
BEST = "exact"
COLLECTIVE = "all_reduce"
NOTHING = (
    f"The layers of {network_title(NETWORK)} or the times of all-reduces were not measured on this "
    "machine. Run ./reproduce.sh, which measures both and runs this notebook again."
)


def compare(running: Example, here: Source) -> tuple[str, None]:
    """Predict a step of the running example's network on this machine.

    Parameters
    ----------
    running : Example
        The running example, which comes from the recording.
    here : Source
        The tables of this machine, which may be none. The link and the workers are those of
        the running example, if they were measured, or else the first ones that were, in the
        alphabetical order of links.

    Returns
    -------
    sentence : str
        The compute time, the step under PyTorch's default and under the best plan, and
        the gain, followed by the two steps of the recording. If this machine lacks the
        layers of the network or times of all-reduces, how to measure them.
    figure : None
        Two steps need no figure, but `workbook.plots.on_this_machine` takes one or None.
    """
    # If one of these tables is missing, the functions below would raise an error.
    if not (here.has("layers") and here.has("collectives")):
        return NOTHING, None
    messages = _messages(here)
    if NETWORK not in here.networks() or messages is None:
        return NOTHING, None
    link, workers, communication = messages
    workload = here.profile(NETWORK).workload()
    default_s = _step_s(workload, communication, DEFAULT)
    best_s = _step_s(workload, communication, BEST)
    recorded_default_ms = 1e3 * running.iteration_s(DEFAULT)
    recorded_best_ms = 1e3 * running.iteration_s(BEST)
    # The link and the workers of the recording are named only if those of this machine differ.
    if (link, workers) == (LINK, WORKERS):
        recorded_where = ""
    else:
        recorded_where = f", among {WORKERS} workers over {link_title(LINK)}"
    sentence = (
        f"For {network_title(NETWORK)} among {workers} workers over {link_title(link)}, with "
        f"layers and messages as measured here, compute takes {1e3 * workload.compute_s:.0f} "
        f"ms. A step is predicted to take {1e3 * default_s:.0f} ms with PyTorch's default "
        f"buckets and {1e3 * best_s:.0f} ms with the best ones, a gain of "
        f"{1 - best_s / default_s:.1%}. From the recording, "
        f"{recorded_default_ms:.0f} and {recorded_best_ms:.0f} ms are predicted{recorded_where}."
    )
    return sentence, None


def _messages(here: Source) -> tuple[str, int, Communication] | None:
    """Return the link, the workers and what is known of their messages.

    The link and the workers are those of the running example, if they were measured here, or
    else the first ones that were, in the alphabetical order of links. The result is None if no
    all-reduce was measured.
    """
    # Without draws, costs have no intervals, which a predicted step does not need.
    calibration = Calibration.of(here.table("collectives"), draws=0)
    # Each key of the calibration is a link, a number of workers and a collective.
    measured = []
    for key in calibration.known:
        _, _, collective = key
        if collective == COLLECTIVE:
            measured.append(key)
    if not measured:
        return None
    running = (LINK, WORKERS, COLLECTIVE)
    chosen = measured[0]
    if running in measured:
        chosen = running
    link, workers, _ = chosen
    return link, workers, calibration.between(link, workers)


def _step_s(workload: Workload, communication: Communication, plan: str) -> float:
    """Return the predicted step in seconds under a plan."""
    buckets = make_plan(plan, workload, communication.cost)
    return float(predict(workload, buckets, communication.cost).iteration_s)
