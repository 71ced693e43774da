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
        the running example, if they were measured, or else the first that were.

    Returns
    -------
    sentence : str
        The compute time, the step under PyTorch's default and under the best plan, and
        the gain, followed by the two steps of the recording.
    figure : None
        Two steps need no figure.
    """
    if not (here.has("layers") and here.has("collectives")):
        return NOTHING, None
    messages = _messages(here)
    if NETWORK not in here.networks() or messages is None:
        return NOTHING, None
    link, workers, communication = messages
    workload = here.profile(NETWORK).workload()
    default_s = _step_s(workload, communication, DEFAULT)
    best_s = _step_s(workload, communication, BEST)
    recorded = [1e3 * running.iteration_s(plan) for plan in (DEFAULT, BEST)]
    over = f"over {link_title(link)}"
    # The link of the recording is only named if the prediction here has another one.
    if (link, workers) == (LINK, WORKERS):
        recorded_over = ""
    else:
        recorded_over = f", among {WORKERS} workers over {link_title(LINK)}"
    sentence = (
        f"For {network_title(NETWORK)} among {workers} workers {over}, with layers and messages as "
        f"measured here, compute takes {1e3 * workload.compute_s:.0f} ms. A step is predicted to take "
        f"{1e3 * default_s:.0f} ms with PyTorch's default buckets and {1e3 * best_s:.0f} ms with the "
        f"best ones, a gain of {1 - best_s / default_s:.1%}. From the recording, {recorded[0]:.0f} "
        f"and {recorded[1]:.0f} ms are predicted{recorded_over}."
    )
    return sentence, None


def _messages(here: Source) -> tuple[str, int, Communication] | None:
    """Return the link, the workers and the messages of the prediction.

    The link and the workers are those of the running example, if they were measured here, or
    else the first that were. The result is None if no all-reduce was measured.
    """
    # Without draws, costs have no intervals, which a predicted step does not need.
    calibration = Calibration.of(here.table("collectives"), draws=0)
    # A key is a link, a number of workers and a collective.
    measured = [key for key in calibration.known if key[2] == COLLECTIVE]
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
