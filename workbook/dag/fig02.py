"""dag Fig 2: speedups of one server's GPUs over one of them, and what Section V-C says of that."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from ddlkit.core.taskgraph import Gpus
from workbook.common.claims import Result, check, claimed, counted, own
from workbook.dag import settings, speedups
from workbook.dag.cluster import CLOCK_HZ, LIKE_RESNET, OPERATIONS, PER_MACHINE
from workbook.dag.statements import DECODERS, OF_FIG02, slower, unit

SIZES = [Gpus(1, 1), Gpus(1, 2), Gpus(1, PER_MACHINE)]


def modelled() -> pd.DataFrame:
    """Return a row a bar: the speedup over one GPU at the central setting, and over all compatible ones."""
    return speedups.modelled(2, SIZES)


def numbers() -> pd.DataFrame:
    """Return the `modelled` bars; paper : what its text has in numbers, else NaN.

    That is the most of a K80 server's, but where it has JPEG decoded.
    """
    frame = modelled()
    decoded = (frame["network"] == "AlexNet") & frame["framework"].isin(DECODERS)
    whole = frame["gpus"] == PER_MACHINE
    told = (frame["cluster"] == "K80") & whole & ~decoded
    most = PER_MACHINE * unit("dag-fig02-efficiency") * claimed("dag-fig02-efficiency")
    return frame.assign(paper=np.where(told, most, np.nan))


def draw(frame: pd.DataFrame) -> Figure:
    """Draw `numbers`."""
    return speedups.draw_bars(frame, "one GPU")


@check(
    "dag-v100-speed",
    "0.243 s over 0.0625 s, ResNet-50's: no other backward is of both",
)
def _v100_speed(note: str) -> Result:
    return own(LIKE_RESNET, note)


@check("dag-k80-peak", "K80", 875e6)
@check("dag-v100-peak", "V100", 1530e6)
def _peak(gpu: str, boost_hz: float) -> Result:
    stated = OPERATIONS[gpu] * CLOCK_HZ[gpu] / 1e12
    note = f"at the data sheet's boost, which is off; {stated:.3g} TFLOP/s at Section V-A's clock"
    return counted(OPERATIONS[gpu] * boost_hz / 1e12, note)


def _cases(claim: str) -> pd.DataFrame | None:
    """Return the cases behind a claim's mean in the compatible settings, if it is one."""
    if claim == "dag-fig02-k80-over-v100":
        efficiency = settings.compatible_efficiencies()[2]
        return settings.of_each(efficiency["K80"] / efficiency["V100"], "min")
    if claim == "dag-fig02-messages":
        waits = pd.DataFrame(slower(settings.compatible(), "sending"))
        return settings.of_each(waits, "min", level=1)
    return None


def _stated(statement: str, claim: str) -> Result:
    return settings.by_model(statement, claim, _cases(claim))


for _statement, _claim in OF_FIG02.items():
    check(_claim, _statement, _claim)(_stated)
