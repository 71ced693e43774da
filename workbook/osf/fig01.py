"""osf Figure 1: an iteration with and without overlapping communication."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from ddlkit.core.iteration import Iteration
from ddlkit.core.plan import none, single
from ddlkit.core.timeline import Timeline
from workbook import plots
from workbook.common import claims, networks, source
from workbook.common.claims import Result, check, claimed
from workbook.osf import cluster, settings
from workbook.osf.cluster import REPLACED, PaperSetting


def modelled(setting: PaperSetting) -> dict[str, Timeline]:
    """Return two timelines of one iteration of VGG-16 with replaced layers.

    In the first timeline, all gradients are one message, which is ready only when the
    backward pass has ended. In the second one, each layer has a message of its own, which
    is sent during the backward pass.

    Parameters
    ----------
    setting : PaperSetting
        The numbers of the cluster that the paper does not state.

    Returns
    -------
    dict of str to Timeline
        The timelines by the name that the figure gives them, first that of CSF.
    """
    compute_s = setting.compute_s(REPLACED)
    # Messages carry layers, as in the paper's figure, whatever the setting says of them.
    workload = cluster.workload(REPLACED, compute_s, unit="layer")
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
        The spans that it shows. The column ``model`` names the timeline of a span, and
        ``paper_backward_over_forward`` repeats ``ratio``.
    ratio : float
        The ratio of the backward time to the forward time that osf Eq 4 states.
    """
    timelines = modelled(settings.setting())
    ratio = claimed("osf-eq4-backward")
    # Exposed communication is that during which nothing is computed.
    without_overlap_ms, overlapped_ms = [
        1e3 * timeline.exposed_communication_s() for timeline in timelines.values()
    ]
    title = (
        "By the model, overlap shortens exposed communication from "
        f"{without_overlap_ms:.0f} ms to {overlapped_ms:.1f} ms"
    )
    figure, spans = plots.timelines(timelines, "model", title)
    return figure, spans.assign(paper_backward_over_forward=ratio), ratio


@check("osf-eq4-backward")
def _backward_over_forward() -> Result:
    """Return the backward pass divided by the forward pass, in time and in operations.

    The paper calls the ratio one of time complexity, but applies it to times. Operations and
    times are thus its two readings.
    """
    # The layer times of all recordings in which one rank had its device to itself.
    layers = source.everywhere("layers").query("ranks == 1")
    ratios = _recorded_ratios(layers)
    in_operations = claims.counted(
        [_operations_ratio(network) for network in cluster.FIVE], "matrix products"
    )
    readings = {
        "in time": claims.measured(ratios, "", "recorded"),
        "in operations": in_operations,
    }
    note = _ratios_in_words(ratios)
    gpus = sorted(layers.loc[layers["device"] == "cuda", "machine"].unique())
    if gpus:
        note += f"; one rank on a GPU, too: {', '.join(gpus)}"
    return claims.by_readings(readings, note)


def _recorded_ratios(layers: pd.DataFrame) -> pd.Series:
    """Return the backward time divided by the forward time, by network and recording.

    ``layers`` are rows of the table ``layers``. The first level of the index is the network.
    """
    # The layers are summed for each network in each recording, whose directory is ``place``. The
    # batch is a key, because a recording of a GPU has a network at several batches.
    recording = ["network", "place", "precision", "device", "batch"]
    sums_s = layers.groupby(recording)[["forward_s", "backward_s"]].sum()
    return sums_s["backward_s"] / sums_s["forward_s"]


def _ratios_in_words(ratios: pd.Series) -> str:
    """Return the networks with the extreme ratios, and the ranges of those of Table 2.

    ``ratios`` are those of backward over forward time that `_recorded_ratios` returns. The
    returned words end with the ratio in operations, which the claim sharing-backward-flop is
    about.
    """
    is_in_table_2 = ratios.index.isin(cluster.measured_names(), level="network")
    ranges = []
    for name, of_network in ratios[is_in_table_2].groupby("network"):
        ranges.append(f"{name} {of_network.min():.3g} to {of_network.max():.3g}")
    # The network is the first value of the key of a ratio.
    lowest, *_ = ratios.idxmin()
    highest, *_ = ratios.idxmax()
    return (
        f"{lowest} the least, {highest} the most; of Table 2 {', '.join(ranges)}; "
        "one rank on CPUs, two machines, fp32 and bf16; in operations 2 "
        "(sharing-backward-flop)"
    )


def _operations_ratio(network: str) -> float:
    """Return the operations of a backward pass, divided by those of the forward pass.

    A layer computes the gradient of its weights and that of its input, each at the cost of its
    forward pass. The first layer does not need the gradient of its input, the image.
    """
    layers = networks.layers(network)
    forward = sum(layer.multiply_adds for layer in layers)
    backward = 2 * forward - layers[0].multiply_adds
    return backward / forward
