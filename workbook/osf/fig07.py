"""osf Figure 7: communication time by phase against the fusion buffer."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from ddlkit.core.units import GB
from workbook.common.claims import check, claimed
from workbook.common.source import REGIMES, REGIMES_VGG
from workbook.osf import by_buffer, phases, settings
from workbook.osf.cluster import BUFFERS, TWO, WORKERS, PaperSetting
from workbook.osf.frames import printed_at
from workbook.osf.lab import LAB, PLACES, Lab, buffer_name, graded
from workbook.osf.phases import SLOW_RANK

check("osf-fig07-vgg16", "VGG-16: growth of communication time with 1 GB", 100)(
    settings.by_model
)


def modelled(setting: PaperSetting) -> pd.DataFrame:
    """Return the communication time by phase and buffer, at 32 workers.

    Parameters
    ----------
    setting : PaperSetting
        What the paper leaves out of its cluster.

    Returns
    -------
    DataFrame
        A row for each network, buffer (0 bytes is no fusion), factor of the ``slowest``
        worker and phase, as `phases.shares` returns them.
    """

    def seconds(network: str, buffer_bytes: int, slowest: float) -> dict[str, float]:
        return phases.modelled(setting, network, slowest, WORKERS, buffer_bytes)

    cases = {
        "network": TWO,
        "buffer_bytes": (0, *BUFFERS),
        "slowest": (1.0, SLOW_RANK),
    }
    return phases.shares(seconds, cases)


def in_labs() -> list[pd.DataFrame]:
    """Return the communication time by phase of four workers, for each link of the lab.

    Returns
    -------
    list of DataFrame
        The rows of `phases.in_lab`, first over the link with cheap start-ups and then over
        the one with expensive start-ups. The column ``buffer`` names the size of the
        buffer, and ``look`` is the key of the link in `workbook.osf.lab.LABS`.
    """
    # This campaign has no networks but TWO.
    cheap = phases.in_lab(Lab.load(LAB))
    # Bars are drawn in the order of the rows, here that of the buffers. A stable sort keeps the
    # phases of a case in their order.
    cheap = cheap[cheap["workers"] == 4].sort_values("buffer_bytes", kind="stable")

    # The replays with expensive start-ups are in two campaigns, without a negotiation. These
    # also have ResNet-50, and VGG-16 with replaced layers.
    regimes = []
    for campaign in (REGIMES, REGIMES_VGG):
        regimes.append(phases.in_lab(Lab.load(campaign), negotiated=False))
    regime = pd.concat(regimes, ignore_index=True)
    is_shown = regime["network"].isin(TWO) & (regime["workers"] == 4)
    regime = regime[is_shown].sort_values(by_buffer.KEYS, kind="stable")

    labs = {"measured": cheap, "regime": regime}
    named = []
    for point_look, lab in labs.items():
        buffer = lab["buffer_bytes"].map(buffer_name)
        named.append(lab.assign(buffer=buffer, look=point_look))
    return named


def numbers() -> pd.DataFrame:
    """Return the communication time by phase and buffer, on the cluster and in the lab.

    Returns
    -------
    DataFrame
        The rows of `modelled` in the best setting, which have modelled times in
        ``seconds``, and then those of `in_labs`, which have modelled times in ``model_s``
        and measured times in ``measured_s``. The columns ``seconds_over_unfused``,
        ``model_over_unfused`` and ``measured_over_unfused`` have these times over the time
        of all communication of the case without a buffer. ``paper_over_unfused`` is this
        ratio for all communication of VGG-16 with 1 GB, as the paper prints it. The column
        ``grade`` is "model" or "lab".
    """
    frame = graded(modelled(settings.setting()), *in_labs())
    # In rows of the cluster, ``look`` is NaN. Groups whose key is NaN would be left out.
    case = [frame[name].fillna("") for name in ("grade", "look", "network", "slowest")]
    for column in ("seconds", "model_s", "measured_s"):
        unfused_s = frame[column].where(frame["buffer_bytes"] == 0)
        total_unfused_s = unfused_s.groupby(case).transform("sum")
        name = column.removesuffix("_s")
        frame[f"{name}_over_unfused"] = frame[column] / total_unfused_s
    growth = 1 + claimed("osf-fig07-vgg16") / 100
    printed = printed_at(frame, growth, network="VGG16", buffer_bytes=GB)
    # The paper's number is not drawn next to the link with cheap start-ups ("measured"),
    # because start-ups on the cluster are more expensive.
    return frame.assign(paper_over_unfused=printed.where(frame["look"] != "measured"))


def draw(frame: pd.DataFrame) -> Figure:
    """Draw the phases of equally fast workers over all communication without a buffer.

    The cluster is modelled. The lab is modelled and measured.

    Parameters
    ----------
    frame : DataFrame
        What `numbers` returned.
    """
    frame = frame[frame["slowest"] == 1]
    # Modelled times are in two columns: in ``model_s`` of the lab, which has measured times,
    # too, and in ``seconds`` of the cluster, where nothing was measured.
    model = frame["model_over_unfused"].fillna(frame["seconds_over_unfused"])
    # Only rows of the lab have a key of PLACES in ``look``. The key of the cluster is "".
    place = frame["look"].fillna("").map(PLACES)
    named = frame.assign(
        model=model,
        measured=frame["measured_over_unfused"],
        paper=frame["paper_over_unfused"],
        bar=frame["buffer_bytes"].map(buffer_name),
        place=place,
    )
    title = (
        "A buffer of 1 GB adds WAIT; it shortens communication only of ResNet-101, on "
        "the cluster and with expensive start-ups"
    )
    return phases.draw(named, "buffer", "communication [% of no buffer]", title)
