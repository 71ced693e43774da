"""osf Figure 8: scaling factor of VGG-16, as published and with replaced layers."""

from __future__ import annotations

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddlkit.core.case import Case
from ddlkit.core.iteration import predict
from ddlkit.core.plan import none
from ddlkit.core.units import MB
from ddlkit.model.predictor import plan_of
from workbook import plots
from workbook.common.claims import Result, check, claimed
from workbook.common.source import REGIMES_VGG
from workbook.common.specs import network_title
from workbook.osf import settings
from workbook.osf.cluster import REPLACED, WORKERS, PaperSetting, osf_name
from workbook.osf.factors import csf_of
from workbook.osf.frames import printed_at, rows_of, tidy
from workbook.osf.lab import PLACES, Lab, graded, in_labs
from workbook.validate.accuracy import mean_difference

WORKER_COUNTS = (1, 2, 4, 8, 16, 32)


# -- numbers -------------------------------------------------------------------------


def modelled(setting: PaperSetting) -> pd.DataFrame:
    """Return the scaling factors of VGG-16 by the number of workers, without fusion.

    Parameters
    ----------
    setting : PaperSetting
        The numbers of the cluster that the paper does not state.

    Returns
    -------
    DataFrame
        A row for each ``network``, number of ``workers`` and ``quantity``. The networks are
        VGG-16 as published and with replaced layers. The quantities are the scaling factors
        "OSF", with overlap, and "CSF", in which nothing overlaps. ``model`` is the modelled
        factor. ``paper`` is the measured scaling factor that Section 4.1 prints for the
        network with 32 workers. Both quantities have it in their rows of 32 workers.
    """

    def factors(network: str, workers: int) -> dict[str, float]:
        """Return the scaling factors of a network on the cluster, with and without overlap."""
        if workers == 1:
            # One worker sends nothing.
            return {"OSF": 1.0, "CSF": 1.0}
        workload = setting.workload(network)
        cost = setting.cost(workers)
        unfused_plan = none(workload)
        return {
            "OSF": predict(workload, unfused_plan, cost).scaling_factor,
            "CSF": csf_of(workload, cost),
        }

    frame = tidy(factors, {"network": ("VGG16", REPLACED), "workers": WORKER_COUNTS})
    printed = {
        "VGG16": claimed("osf-fig08-before"),
        REPLACED: claimed("osf-fig08-after"),
    }
    of_network = frame["network"].map(printed)
    # The printed factors are those of 32 workers.
    return frame.assign(paper=of_network.where(frame["workers"] == WORKERS))


def in_lab(lab: Lab) -> pd.DataFrame:
    """Return the scaling factors of VGG-16 that a campaign measured without fusion.

    The ranks do not negotiate the order of messages.

    Parameters
    ----------
    lab : Lab
        The campaign.

    Returns
    -------
    DataFrame
        A row for each case of VGG-16, as published and replaced, as `_case_in_lab`
        describes it.
    """
    rows = []
    for case in lab.cases():
        if case.plan == "none" and case.network in ("vgg16", "vgg16_replaced"):
            rows.append(_case_in_lab(lab, case))
    return pd.DataFrame(rows).sort_values(["network", "workers"], ignore_index=True)


def _case_in_lab(lab: Lab, case: Case) -> dict[str, Any]:
    """Return the row of `in_lab` for one case.

    ``measured`` is the mean scaling factor of the repeated iterations (osf Eq 1), and
    ``repeatability`` is the mean absolute difference between the factors of two iterations.
    ``model`` and ``csf`` are predictions with and without overlap, and ``error`` is the relative
    error of ``model``. ``processor_limited`` says whether the processor may have slowed an
    iteration.
    """
    workload = lab.workload(case)
    communication = lab.calibration.of_case(case)
    prediction = predict(
        workload, plan_of(case), communication.cost, communication.link
    )
    model = prediction.scaling_factor
    rounds = lab.rounds(case)
    measured = rounds["factor"].mean()
    return {
        "network": osf_name(case.network),
        "workers": case.workers,
        "measured": measured,
        "repeatability": mean_difference(rounds["factor"]),
        "model": model,
        "csf": csf_of(workload, communication.cost),
        "error": model / measured - 1,
        "processor_limited": bool(rounds["processor_limited"].any()),
    }


def numbers() -> pd.DataFrame:
    """Return the scaling factors of VGG-16, modelled, measured and printed.

    Returns
    -------
    DataFrame
        The rows of `modelled` in the best setting, and then those of `in_lab`. The
        column ``grade`` ("model" or "lab") tells them apart. In rows of the lab, ``look``
        is the key of their link in PLACES. ``paper`` has the factors of 32 workers that
        Section 4.1 prints. For the replaced layers Section 1 prints another factor of 32
        workers, which is in ``paper_section_1``.
    """
    frame = graded(modelled(settings.setting()), *in_labs(in_lab, REGIMES_VGG))
    printed = printed_at(frame, claimed("osf-fig08-intro"), network=REPLACED)
    # The factor of Section 1, too, is of 32 workers on the cluster. `modelled` puts a number into
    # ``paper`` only in the rows of 32 workers.
    return frame.assign(paper_section_1=printed.where(frame["paper"].notna()))


# -- drawing -------------------------------------------------------------------------


def draw(frame: pd.DataFrame) -> Figure:
    """Draw the factors by the number of workers, on the cluster and in the labs.

    Parameters
    ----------
    frame : DataFrame
        What `numbers` returned.
    """
    # Only the cluster has as many as WORKERS workers. REPLACED is VGG-16 with replaced layers.
    # Its rows of OSF and of CSF have the same printed numbers, so that the title takes the first.
    all_workers = rows_of(frame, network=REPLACED, workers=WORKERS)
    all_workers = all_workers.set_index("quantity")
    title = (
        f"With replaced layers the scaling factor of {WORKERS} workers is "
        f"{all_workers['model']['OSF']:.2f} by the model; the paper states "
        f"{all_workers['paper'].iloc[0]:g} and "
        f"{all_workers['paper_section_1'].iloc[0]:g}"
    )
    rows = _row_per_quantity(frame)
    # A panel for each of PLACES: the cluster, and both links of the lab. The column ``look`` of
    # a row has the key of its place, which is also the look of the points measured there.
    sheet = plots.sheet(title, columns=3, height=3.4, sharey=True)
    with sheet as (figure, axes):
        for ax, (key, heading) in zip(axes, PLACES.items(), strict=True):
            _draw_panel(ax, rows_of(rows, look=key))
            ax.set_title(heading)
    return figure


def _row_per_quantity(frame: pd.DataFrame) -> pd.DataFrame:
    """Return the rows of ``frame``, split so that each has one modelled scaling factor.

    ``frame`` is what `numbers` returned. A row of the cluster, whose ``grade`` is "model", has
    one factor already, which is in ``model`` and whose name is in ``quantity``. A row of the
    lab has two, OSF in ``model`` and CSF in ``csf``, and becomes two rows. In rows of the
    cluster, ``look`` becomes "", which is their key in PLACES.
    """
    cluster = frame[frame["grade"] == "model"].fillna({"look": ""})
    lab = frame[frame["grade"] == "lab"]
    lab = lab.rename(columns={"model": "OSF", "csf": "CSF"}).melt(
        id_vars=["network", "workers", "look", "measured"],
        value_vars=["OSF", "CSF"],
        var_name="quantity",
        value_name="model",
    )
    return pd.concat([cluster, lab])


def _draw_panel(ax: Axes, rows: pd.DataFrame) -> None:
    """Draw modelled factors as lines, and measured and printed factors as points.

    ``rows`` are those of `_row_per_quantity` that have the same key of PLACES in their
    column ``look``: the rows of the cluster, or those of one link of the lab.
    """
    workers = rows["workers"]
    by_quantity = rows.pivot(
        index="workers", columns=["network", "quantity"], values="model"
    )
    lines = {}
    # VGG-16 as published and with replaced layers.
    for network in ("VGG16", REPLACED):
        for quantity in ("OSF", "CSF"):
            # The part of the name before the colon sets the style of the line. The part
            # after it is added to the label.
            name = f"{quantity}:of {network_title(network)}"
            lines[name] = by_quantity[network, quantity]
    plots.lines(
        ax,
        pd.DataFrame(lines),
        xlabel="workers",
        ylabel="scaling factor",
        log="x",
        # The figure has one legend, which is below all panels.
        legend="",
    )
    # Rows without a measured or printed factor are NaN, which draws no point.
    plots.points(ax, workers, rows["paper"], "paper", label="paper, Section 4.1")
    plots.points(
        ax,
        workers,
        rows["paper_section_1"],
        "paper",
        label="paper, Section 1",
        size=4,
    )
    plots.points(ax, workers, rows["measured"], "measured")
    # A tick at each number of workers, with the number as its label.
    ax.set_xticks(by_quantity.index, by_quantity.index)
    ax.set_ylim(0, 1.05)
    ax.label_outer()


# -- claims --------------------------------------------------------------------------


@check("osf-fig08-before", "VGG-16: scaling factor")
@check("osf-fig08-after", "VGG-16 replaced: scaling factor")
@check("osf-fig08-intro", "VGG-16 replaced: scaling factor")
def _by_fused_networks(quantity: str) -> Result:
    """Return a result by all readings of which networks of Figure 8 have a fusion buffer.

    The paper does not say which of them have one.

    Parameters
    ----------
    quantity : str
        The name of the scaling factor that the claim is about, one of `settings.quantities`.
    """
    # By reading, the buffers of VGG-16 and of VGG-16 with replaced layers. 0 is no fusion, and
    # 100 MB is the constant buffer of Section 4.2.
    buffer_bytes = {
        "neither": (0, 0),
        "the replaced": (0, 100 * MB),
        "both": (100 * MB, 100 * MB),
    }
    # The arguments of `settings.setting_search` for each reading: the workers of Figure 4 and
    # the buffers of Figure 8.
    readings = {}
    for networks, of_fig8 in buffer_bytes.items():
        readings[f"{networks} fused"] = (WORKERS, of_fig8)
    return settings.by_readings(readings, quantity)
