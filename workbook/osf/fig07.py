"""osf Figure 7: communication time by phase against the fusion buffer."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from ddlkit.core.units import GB
from workbook.common.claims import check, claimed
from workbook.common.source import REGIMES, REGIMES_VGG
from workbook.osf import phases, settings
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
        The numbers of the cluster that the paper does not state.

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
        buffer. The column ``look`` says over which link a row was measured: "measured" (cheap)
        or "regime" (expensive), as the keys of `workbook.osf.lab.LABS`.
    """
    rows_by_look = {"measured": _cheap(), "regime": _expensive()}
    named = []
    for look, rows in rows_by_look.items():
        buffer = rows["buffer_bytes"].map(buffer_name)
        named.append(rows.assign(buffer=buffer, look=look))
    return named


def _cheap() -> pd.DataFrame:
    """Return the rows of `phases.in_lab` for four workers over the cheap link.

    The rows are by size of the buffer, the order in which the figure draws the bars of a panel.
    """
    # All of the campaign LAB is over the cheap link. `phases.in_lab` returns its cases with a
    # negotiation of the order of messages, which are of the networks TWO alone.
    rows = phases.in_lab(Lab.load(LAB))
    # A stable sort keeps the phases of a case in their order.
    return rows[rows["workers"] == 4].sort_values("buffer_bytes", kind="stable")


def _expensive() -> pd.DataFrame:
    """Return the rows of `phases.in_lab` for four workers over the expensive link.

    The rows of a network are by size of the buffer, the order in which the figure draws the
    bars of the network's panel.
    """
    # The replays with expensive start-ups are in two campaigns, without a negotiation. The
    # campaigns also have ResNet-50, and VGG-16 with replaced layers, which are not shown.
    tables = []
    for campaign in (REGIMES, REGIMES_VGG):
        tables.append(phases.in_lab(Lab.load(campaign), negotiated=False))
    rows = pd.concat(tables, ignore_index=True)
    is_shown = rows["network"].isin(TWO) & (rows["workers"] == 4)
    # A stable sort keeps the phases of a case in their order.
    return rows[is_shown].sort_values(["network", "buffer_bytes"], kind="stable")


def numbers() -> pd.DataFrame:
    """Return the communication time by phase and buffer, on the cluster and in the lab.

    Returns
    -------
    DataFrame
        A row for each case and phase. The rows of `modelled` in the best setting come first.
        They have modelled times in ``seconds``, and the ``grade`` "model". The rows of
        `in_labs` follow, with modelled times in ``model_s``, measured times in
        ``measured_s``, and the ``grade`` "lab". Their ``look`` is the key of their link,
        "measured" for cheap start-ups and "regime" for expensive ones. ``slowest`` is by
        which factor the slowest worker computes longer, 1 if all are equally fast.

        ``seconds_over_unfused``, ``model_over_unfused`` and ``measured_over_unfused`` are
        these times divided by the time of all communication of the case without a buffer.
        ``paper_over_unfused`` is what the paper prints for this ratio, for all
        communication of VGG-16 with 1 GB.
    """
    frame = graded(modelled(settings.setting()), *in_labs())
    # Rows that differ only in their buffer and phase are a group. The number of workers is not
    # part of the key, because it is the same in all rows of the cluster, and in all rows of the
    # lab. In rows of the cluster, ``look`` is NaN, which is replaced because groups whose key is
    # NaN would be left out.
    names = ("grade", "look", "network", "slowest")
    all_but_buffer = [frame[name].fillna("") for name in names]
    for column in ("seconds", "model_s", "measured_s"):
        # Times with a buffer become NaN, which the sum over a group leaves out. The sum is thus
        # the time of all phases without a buffer.
        unfused_s = frame[column].where(frame["buffer_bytes"] == 0)
        total_unfused_s = unfused_s.groupby(all_but_buffer).transform("sum")
        name = column.removesuffix("_s")
        frame[f"{name}_over_unfused"] = frame[column] / total_unfused_s
    ratio = 1 + claimed("osf-fig07-vgg16") / 100
    printed = printed_at(frame, ratio, network="VGG16", buffer_bytes=GB)
    # Rows of the cluster and of the link with expensive start-ups keep the printed number. It
    # is not drawn next to the link with cheap start-ups ("measured"), because start-ups on the
    # cluster are more expensive.
    return frame.assign(paper_over_unfused=printed.where(frame["look"] != "measured"))


def draw(frame: pd.DataFrame) -> Figure:
    """Draw the times of the phases in % of the communication time without a buffer.

    All workers are equally fast. The cluster is modelled. The lab is modelled and measured.

    Parameters
    ----------
    frame : DataFrame
        What `numbers` returned.
    """
    frame = frame[frame["slowest"] == 1]
    # A row of the lab has its modelled time, divided by that without a buffer, in
    # ``model_over_unfused``. A row of the cluster has it in ``seconds_over_unfused``.
    model = frame["model_over_unfused"].fillna(frame["seconds_over_unfused"])
    # PLACES has the headings of panels. ``look`` is the key of a link of the lab, and NaN for
    # the cluster, whose key is "".
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
    return phases.draw(
        named,
        bar_name="buffer",
        label="communication [% of no buffer]",
        title=title,
    )
