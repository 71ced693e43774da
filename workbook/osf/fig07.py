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
    """Return communication time by phase at 32 workers, all equal and one slower."""

    def seconds(network: str, size: int, slowest: float) -> dict[str, float]:
        return phases.modelled(setting, network, slowest, WORKERS, size)

    sizes = (0, *BUFFERS)
    cases = {"network": TWO, "buffer_bytes": sizes, "slowest": (1.0, SLOW_RANK)}
    return phases.shares(seconds, cases)


def in_labs() -> list[pd.DataFrame]:
    """Return communication time by phase of four workers, over the lab's link and in the regime."""
    slow = [
        phases.in_lab(Lab.load(name), negotiated=False)
        for name in (REGIMES, REGIMES_VGG)
    ]
    regime = pd.concat(slow, ignore_index=True)
    regime = regime[regime["network"].isin(TWO)]
    labs = {"measured": phases.in_lab(Lab.load(LAB)), "regime": regime}
    order = {"measured": ["buffer_bytes"], "regime": by_buffer.KEYS}
    return [
        lab[lab["workers"] == 4]
        .sort_values(order[mark], kind="stable")
        .assign(buffer=lab["buffer_bytes"].map(buffer_name), look=mark)
        for mark, lab in labs.items()
    ]


def numbers() -> pd.DataFrame:
    """Return communication time by phase and buffer, also over what it takes without, as printed."""
    frame = graded(modelled(settings.setting()), *in_labs())
    case = [frame[name].fillna("") for name in ("grade", "look", "network", "slowest")]
    for column in ("seconds", "model_s", "measured_s"):
        unfused = frame[column].where(frame["buffer_bytes"] == 0)
        whole = unfused.groupby(case).transform("sum")
        frame[f"{column.removesuffix('_s')}_over_unfused"] = frame[column] / whole
    grown = 1 + claimed("osf-fig07-vgg16") / 100
    stated = printed_at(frame, grown, network="VGG16", buffer_bytes=GB)
    return frame.assign(paper_over_unfused=stated.where(frame["look"] != "measured"))


def draw(frame: pd.DataFrame) -> Figure:
    """Draw equal workers over the time without a buffer: the cluster by model; the lab, also measured."""
    frame = frame[frame["slowest"] == 1]
    over = {
        name: frame[f"{name}_over_unfused"] for name in ("model", "measured", "paper")
    }
    over["model"] = over["model"].fillna(frame["seconds_over_unfused"])
    bars = frame["buffer_bytes"].map(buffer_name)
    places = frame["look"].fillna("").map(PLACES)
    said = (
        "A buffer of 1 GB adds WAIT; it shortens communication only of ResNet-101, on the "
        "cluster and with expensive start-ups"
    )
    named = frame.assign(**over, bar=bars, place=places)
    return phases.draw(named, "buffer", "communication [% of no buffer]", said)
