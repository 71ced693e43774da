"""osf Figure 8: scaling factor of VGG-16, as published and with its dense layers replaced."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

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


# -- numbers -------------------------------------------------------------------------------------


def modelled(setting: PaperSetting) -> pd.DataFrame:
    """Return the factor of VGG-16, as it is and replaced, from 1 to 32 workers without fusion."""

    def factors(network: str, workers: int) -> dict[str, float]:
        if workers == 1:
            return {"OSF": 1.0, "CSF": 1.0}
        workload, cost = setting.workload(network), setting.cost(workers)
        return {
            "OSF": predict(workload, none(workload), cost).scaling_factor,
            "CSF": csf_of(workload, cost),
        }

    frame = tidy(factors, {"network": ("VGG16", REPLACED), "workers": WORKER_COUNTS})
    printed = {
        "VGG16": claimed("osf-fig08-before"),
        REPLACED: claimed("osf-fig08-after"),
    }
    return frame.assign(
        paper=frame["network"].map(printed).where(frame["workers"] == WORKERS)
    )


def in_lab(lab: Lab) -> pd.DataFrame:
    """Return scaling factors (osf Eq 1) of VGG-16, as it is and replaced, without fusion."""
    rows = []
    for case in lab.cases():
        if case.plan == "none" and case.network in ("vgg16", "vgg16_replaced"):
            rounds, workload = lab.rounds(case), lab.workload(case)
            messages = lab.calibration.of_case(case)
            measured = rounds["factor"].mean()
            model = predict(
                workload, plan_of(case), messages.cost, messages.link
            ).scaling_factor
            rows.append(
                {
                    "network": osf_name(case.network),
                    "workers": case.workers,
                    "measured": measured,
                    "repeatability": mean_difference(rounds["factor"]),
                    "model": model,
                    "csf": csf_of(workload, messages.cost),
                    "error": model / measured - 1,
                    "processor_limited": bool(rounds["processor_limited"].any()),
                }
            )
    return pd.DataFrame(rows).sort_values(["network", "workers"], ignore_index=True)


def numbers() -> pd.DataFrame:
    """Return factors of VGG-16 as published and replaced, beside what two places of the text print."""
    frame = graded(modelled(settings.setting()), *in_labs(in_lab, REGIMES_VGG))
    stated = printed_at(frame, claimed("osf-fig08-intro"), network=REPLACED)
    return frame.assign(paper_section_1=stated.where(frame["paper"].notna()))


# -- drawing -------------------------------------------------------------------------------------


def draw(frame: pd.DataFrame) -> Figure:
    """Draw factors by workers: the cluster by model, and both labs, measured and by model."""
    lab = frame[frame["grade"] == "lab"].rename(columns={"model": "OSF", "csf": "CSF"})
    lab = lab.melt(
        ["network", "workers", "look", "measured"], ["OSF", "CSF"], "quantity", "model"
    )
    every = pd.concat([frame[frame["grade"] == "model"].fillna({"look": ""}), lab])
    end = rows_of(frame, network=REPLACED, workers=WORKERS).set_index("quantity")
    said = (
        f"With replaced layers the scaling factor of {WORKERS} workers is "
        f"{end['model']['OSF']:.2f} by the "
        f"model; the paper states {end['paper'].iloc[0]:g} and "
        f"{end['paper_section_1'].iloc[0]:g}"
    )
    with plots.sheet(said, columns=3, height=3.4, sharey=True) as (figure, axes):
        for ax, (mark, place) in zip(axes, PLACES.items(), strict=True):
            rows = rows_of(every, look=mark)
            wide = rows.pivot(
                index="workers", columns=["network", "quantity"], values="model"
            )
            wide = wide[[(n, q) for n in ("VGG16", REPLACED) for q in ("OSF", "CSF")]]
            wide.columns = [
                f"{quantity}:of {network_title(network)}" for network, quantity in wide
            ]
            plots.lines(
                ax, wide, xlabel="workers", ylabel="scaling factor", log="x", legend=""
            )
            x, printed = rows["workers"], "paper, Section"
            plots.points(ax, x, rows["paper"], "paper", label=f"{printed} 4.1")
            plots.points(
                ax, x, rows["paper_section_1"], "paper", label=f"{printed} 1", size=4
            )
            plots.points(ax, x, rows["measured"], "measured")
            ax.set_xticks(wide.index, wide.index)
            ax.set_ylim(0, 1.05)
            ax.label_outer()
            ax.set_title(place)
    return figure


# -- claims --------------------------------------------------------------------------------------


@check("osf-fig08-before", "VGG-16: scaling factor")
@check("osf-fig08-after", "VGG-16 replaced: scaling factor")
@check("osf-fig08-intro", "VGG-16 replaced: scaling factor")
def _by_fused_networks(quantity: str) -> Result:
    """Judge by all readings of which networks Fig 8 has with a buffer."""
    buffers = {
        "neither": (0, 0),
        "the replaced": (0, 100 * MB),
        "both": (100 * MB, 100 * MB),
    }
    readings = {f"{which} fused": (WORKERS, of) for which, of in buffers.items()}
    return settings.by_readings(readings, quantity)
