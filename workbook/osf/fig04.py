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
    """Return the scaling factors of two networks by the size of the fusion buffer.

    Parameters
    ----------
    setting : PaperSetting
        The numbers of the cluster that the paper does not state.

    Returns
    -------
    DataFrame
        A row for each ``network``, ``buffer_bytes`` and ``quantity``, with the scaling
        factor in ``model``. The quantities are "simulated", "CSF", and OSF_fusion by the
        equations as printed ("OSF printed") and as repaired ("OSF repaired").
    """
    cost = setting.cost()

    def factors(network: str, buffer_bytes: int) -> dict[str, float]:
        """Return the scaling factors with a buffer on the cluster, by quantity."""
        workload = setting.workload(network)
        sizes, backward_s = osf.of_workload(workload)
        # The arguments of both calls of `osf_fused`. With ``literal``, it computes the equations
        # as they are printed, and otherwise as they are repaired.
        arguments = (
            workload.forward_s,
            sizes,
            backward_s,
            cost,
            buffer_bytes,
            setting.timeout_s,
        )
        return {
            "simulated": by_buffer.modelled(setting, network, buffer_bytes)["SF"],
            # CSF has one message whatever the buffer is.
            "CSF": csf_of(workload, cost),
            "OSF printed": osf.osf_fused(*arguments, literal=True),
            "OSF repaired": osf.osf_fused(*arguments, literal=False),
        }

    return tidy(factors, {"network": TWO, "buffer_bytes": BUFFERS})


def numbers() -> pd.DataFrame:
    """Return the factors by the size of the buffer, modelled and measured.

    Returns
    -------
    DataFrame
        The rows of `modelled` in the best setting, with their ranges over all compatible
        settings, and then those of `by_buffer.in_lab`. The column ``grade`` ("model" or
        "lab") tells them apart. For ResNet-101 the paper prints the largest relative error
        of each formula, which is ``paper_error``. Its rows of CSF also have the range of
        scaling factors, ``paper_low`` to ``paper_high``, from which CSF in ``model`` differs
        by at most this error.
    """
    model = settings.over(modelled, keys=[*by_buffer.KEYS, "quantity"])
    frame = graded(model, *in_labs(by_buffer.in_lab))
    # The claims of the printed errors, by formula.
    claims = {"CSF": "osf-fig04a-csf", "OSF printed": "osf-fig04a-osf"}
    for formula, claim in claims.items():
        is_formula = frame["quantity"] == formula
        is_stated = (frame["network"] == "ResNet101") & is_formula
        frame.loc[is_stated, "paper_error"] = claimed(claim) / 100
    # A number in the rows of CSF on ResNet-101 alone. In all other rows it is NaN, and so are
    # ``paper_low`` and ``paper_high``.
    csf_error = frame["paper_error"].where(frame["quantity"] == "CSF")
    # In the rows of CSF, ``model`` is CSF. If CSF is too large by the relative error e, it is
    # (1 + e) times the scaling factor, which is thus CSF / (1 + e). If CSF is too small by e,
    # the factor is CSF / (1 - e).
    return frame.assign(
        paper_low=frame["model"] / (1 + csf_error),
        paper_high=frame["model"] / (1 - csf_error),
    )


def draw(frame: pd.DataFrame, formulas: Sequence[str]) -> Figure:
    """Draw the simulated and the measured factors, and those by some formulas.

    Parameters
    ----------
    frame : DataFrame
        What `numbers` returned.
    formulas : sequence of str
        The formulas that are drawn, as the column ``quantity`` has them.
    """
    resnet = rows_of(frame, network="ResNet101")
    # Rows of the lab have no quantity, and are left out.
    by_quantity = resnet.pivot_table(
        values="model", index="buffer_bytes", columns="quantity"
    )
    # The first row is the smallest buffer, 1 KB.
    gains = by_quantity.max() / by_quantity.iloc[0] - 1
    title = (
        f"On ResNet-101 the best buffer gains {gains['simulated']:.0%} over a buffer of "
        f"1 KB in simulation, but {gains['OSF printed']:.0%} by the printed equations"
    )
    return by_buffer.draw(frame, ["simulated", *formulas], title)


# -- claims --------------------------------------------------------------------------


@check("osf-fig04a-above", "ResNet-101: CSF's error with 1 KB and with 1 MB", 1, 1)
@check("osf-fig04a-below", "ResNet-101: CSF's error with 100 MB and with 1 GB", 1, 1)
@check("osf-fig04a-csf", "ResNet-101: largest size of CSF's error, any buffer", 100)
def _by_number_of_gpus(quantity: str, scale: float, offset: float = 0) -> Result:
    """Return a result by both numbers of GPUs that Figure 4a may have.

    The paper does not state the number. It matters, because a start-up grows with the N - 1
    steps of a ring.

    Parameters
    ----------
    quantity : str
        The name of the quantity that the claim is about, one of `settings.quantities`.
    scale, offset : float
        The number of the claim is ``offset + scale * quantity``.
    """
    # Section 3.2 states 32 GPUs (WORKERS) for Figure 3, which may hold for Figure 4a, too. With
    # 16, the modelled error of CSF comes near the printed one.
    readings = {}
    for n_gpus in (WORKERS, 16):
        # The positional arguments of `settings.setting_search`, here only the number of workers
        # of Figure 4a.
        readings[f"{n_gpus} GPUs"] = (n_gpus,)
    return settings.by_readings(readings, quantity, scale, offset)


@check("osf-fig04b-unchanged")
def _unchanged() -> Result:
    note = by_buffer.replayed_gain("VGG16", "100 MB", REGIMES_VGG)
    return settings.by_model("VGG-16: change of the factor with 100 MB", 1, 1, note)
