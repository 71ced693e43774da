"""Fig 2 of the dag paper: the speedup of one machine's GPUs over one GPU.

The claims are those of Section V-C.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ddlkit.core.taskgraph import Gpus
from workbook.common.claims import Result, by_readings, check, claimed, counted, own
from workbook.dag import settings, speedups
from workbook.dag.cluster import (
    CLOCK_HZ,
    LIKE_PEAKS,
    LIKE_RESNET,
    OPERATIONS,
    PER_MACHINE,
    Setting,
)
from workbook.dag.statements import DECODERS, OF_FIG02, efficiencies, slower, unit

SIZES = [Gpus(1, 1), Gpus(1, 2), Gpus(1, PER_MACHINE)]
"""The GPUs of each bar. Speedups are over the first."""


def modelled() -> pd.DataFrame:
    """Return the speedup of each bar by the model, as `speedups.modelled`."""
    return speedups.modelled(2, SIZES)


def numbers() -> pd.DataFrame:
    """Return the speedup of each bar by the model and, where stated, by the paper.

    The text states only the best efficiency on a K80 machine, "up to 95%" of a linear
    speedup. The column ``paper`` has the speedup at this efficiency for every bar of which
    the text says so: four K80, except frameworks that decode JPEG images on AlexNet. Other
    bars have NaN.
    """
    frame = modelled()
    decodes = frame["framework"].isin(DECODERS)
    limited_by_decoding = (frame["network"] == "AlexNet") & decodes
    is_k80_machine = (frame["cluster"] == "K80") & (frame["gpus"] == PER_MACHINE)
    is_stated = is_k80_machine & ~limited_by_decoding
    claim = "dag-fig02-efficiency"
    # The claim is in %, so that `unit` returns 0.01.
    best_efficiency = unit(claim) * claimed(claim)
    printed_speedup = PER_MACHINE * best_efficiency
    return frame.assign(paper=np.where(is_stated, printed_speedup, np.nan))


def draw(frame: pd.DataFrame) -> Figure:
    """Draw the speedups, a panel for each cluster and network.

    Parameters
    ----------
    frame : DataFrame
        What `numbers` returned.
    """
    return speedups.draw_bars(frame, "one GPU")


@check("dag-v100-speed")
def _v100_speed() -> Result:
    """Return how much faster than a K80 a V100 computes, by two readings of the paper.

    The paper's sentence names no network. It is read as one on ResNet-50, whose times the
    paper states, and as one on another network. The ratio of another network may be
    anything between that of ResNet-50 and that of the peak rates.
    """
    # A number is one value, and a pair is a range.
    readings = {
        "ResNet-50": own(LIKE_RESNET, "0.243 s over 0.0625 s"),
        "another network": own(
            [(LIKE_RESNET, LIKE_PEAKS)],
            f"up to {LIKE_PEAKS:.3g}, the ratio of the peaks",
        ),
    }
    return by_readings(readings)


@check("dag-k80-peak", "K80", 875e6)
@check("dag-v100-peak", "V100", 1530e6)
def _peak(gpu: str, boost_hz: float) -> Result:
    tflops_at_stated_clock = OPERATIONS[gpu] * CLOCK_HZ[gpu] / 1e12
    note = (
        f"at the data sheet's boost, which is off; {tflops_at_stated_clock:.3g} TFLOP/s "
        "at Section V-A's clock"
    )
    return counted(OPERATIONS[gpu] * boost_hz / 1e12, note)


def _k80_over_v100(of: Setting) -> pd.DataFrame:
    """Return the least efficiency on K80 divided by that on V100 GPUs, by network."""
    # The first level of the columns is the figure.
    efficiency = pd.DataFrame(efficiencies(of))[2]
    return settings.of_each(efficiency["K80"] / efficiency["V100"], "min")


def _slower_by_sending(of: Setting) -> pd.DataFrame:
    """Return by which factor messages lengthen an iteration at least, by framework."""
    return settings.of_each(pd.DataFrame(slower(of, "sending")), "min", level=1)


CASES = {
    "dag-fig02-k80-over-v100": _k80_over_v100,
    "dag-fig02-messages": _slower_by_sending,
}
"""The cases of which a claim may have the mean, as `settings.by_model` takes them."""


def _judge_statement(statement: str, claim: str) -> Result:
    return settings.by_model(statement, claim, CASES.get(claim))


for _statement, _claim in OF_FIG02.items():
    check(_claim, _statement, _claim)(_judge_statement)
