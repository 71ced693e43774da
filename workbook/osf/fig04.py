"""osf Figure 4: errors of the formulas CSF and OSF with a fusion buffer."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.figure import Figure

from workbook.common.claims import Result, check, claimed
from workbook.common.source import REGIMES_VGG
from workbook.osf import by_buffer, settings
from workbook.osf import equations as osf
from workbook.osf.by_buffer import BUFFERS
from workbook.osf.cluster import TWO, WORKERS, PaperSetting
from workbook.osf.factors import csf_of
from workbook.osf.frames import rows_of, tidy
from workbook.osf.lab import graded, in_labs


def modelled(setting: PaperSetting) -> pd.DataFrame:
    """Return the factor against the buffer: simulated, CSF, OSF_fusion as printed and repaired."""
    cost = setting.cost()

    def factors(network: str, size: int) -> dict[str, float]:
        workload = setting.workload(network)
        tensors, backward_s = osf.of_workload(workload)
        case = workload.forward_s, tensors, backward_s, cost, size, setting.timeout_s
        return {
            "simulated": by_buffer.modelled(setting, network, size)["SF"],
            "CSF": csf_of(workload, cost),
            "OSF printed": osf.osf_fused(*case, literal=True),
            "OSF repaired": osf.osf_fused(*case, literal=False),
        }

    return tidy(factors, {"network": TWO, "buffer_bytes": BUFFERS})


def numbers() -> pd.DataFrame:
    """Return factors against the buffer, beside the largest errors that are printed of ResNet-101."""
    model = settings.over(modelled, [*by_buffer.KEYS, "quantity"])
    frame = graded(model, *in_labs(by_buffer.in_lab))
    for name, claim in (("CSF", "osf-fig04a-csf"), ("OSF printed", "osf-fig04a-osf")):
        rows = (frame["network"] == "ResNet101") & (frame["quantity"] == name)
        frame.loc[rows, "paper_error"] = claimed(claim) / 100
    of_csf = frame["paper_error"].where(frame["quantity"] == "CSF")
    return frame.assign(
        paper_low=frame["model"] / (1 + of_csf),
        paper_high=frame["model"] / (1 - of_csf),
    )


def draw(frame: pd.DataFrame, formulas: Sequence[str]) -> Figure:
    """Draw simulated, the formulas, measured; what the printed error leaves around CSF."""
    wide = rows_of(frame, network="ResNet101").pivot_table(
        "model", "buffer_bytes", "quantity"
    )
    gains = wide[["simulated", "OSF printed"]].max() / wide.iloc[0] - 1
    said = (
        "On ResNet-101 the best buffer gains {simulated:.0%} over a buffer of 1 KB in "
        "simulation, but {OSF printed:.0%} by the printed equations"
    ).format(**gains)
    return by_buffer.draw(frame, ["simulated", *formulas], said)


# -- claims --------------------------------------------------------------------------------------


@check("osf-fig04a-above", "ResNet-101: CSF's error with 1 KB and with 1 MB", 1, 1)
@check("osf-fig04a-below", "ResNet-101: CSF's error with 100 MB and with 1 GB", 1, 1)
@check("osf-fig04a-csf", "ResNet-101: largest size of CSF's error, any buffer", 100)
def _by_either_size(quantity: str, scale: float, offset: float = 0) -> Result:
    """Judge by both readings of how many GPUs Fig 4 is of; start-ups are in proportion to N - 1."""
    readings = {f"{n} GPUs": (n,) for n in (WORKERS, 16)}
    return settings.by_readings(readings, quantity, scale, offset)


@check("osf-fig04b-unchanged")
def _unchanged() -> Result:
    note = by_buffer.replayed_gain("VGG16", "100 MB", REGIMES_VGG)
    return settings.by_model("VGG-16: change of the factor with 100 MB", 1, 1, note)
