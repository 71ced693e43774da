"""osf Figure 5: communication time by phase and number of workers."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from workbook.common import claims
from workbook.common.claims import Result, check, claimed
from workbook.osf import phases, settings
from workbook.osf.cluster import TWO, WORKERS, PaperSetting
from workbook.osf.frames import printed_at, rows_of
from workbook.osf.lab import LAB, PLACES, STRETCHED, Lab, buffer_name, graded

WORKER_COUNTS = (2, 4, 8, 16, 32)


def modelled(setting: PaperSetting, slow_rank: float) -> pd.DataFrame:
    """Return communication time by phase without fusion, all workers equal and one slower."""

    def seconds(network: str, workers: int, slowest: float) -> dict[str, float]:
        return phases.modelled(setting, network, slowest, workers)

    cases = {"network": TWO, "workers": WORKER_COUNTS, "slowest": (1.0, slow_rank)}
    frame = phases.shares(seconds, cases)
    printed = printed_at(
        frame,
        claimed("osf-fig05-allreduce") / 100,
        network="ResNet101",
        workers=WORKERS,
        slowest=1.0,
        phase="ALLREDUCE",
    )
    return frame.assign(paper=printed)


def numbers(slow_rank: float) -> pd.DataFrame:
    """Return communication time by phase: the cluster by model, the printed share, the lab."""
    model = modelled(settings.setting(), slow_rank)
    return graded(model, rows_of(phases.in_lab(Lab.load(LAB)), buffer_bytes=0))


def draw(frame: pd.DataFrame) -> Figure:
    """Draw shares: the cluster with equal workers and with a slower one, the lab beside its model."""
    lab, slow = frame["grade"] == "lab", frame["slowest"] > 1
    cluster = PLACES[""] + np.where(slow, ", one slower", ", equal workers")
    bars = frame["workers"].astype(str) + np.where(lab & slow, " slow", "")
    named = frame.assign(place=np.where(lab, PLACES["measured"], cluster), bar=bars)
    named = named.sort_values(
        ["grade", "slowest", "workers"], ascending=[False, True, True]
    )
    negotiating = rows_of(frame[slow], phase="NEGOTIATE", workers=2)["model"].max()
    said = (
        f"By the model, if one of two workers is slower, NEGOTIATE takes up to "
        f"{negotiating:.0%} of the "
        "communication time"
    )
    return phases.draw(named, "workers", "share of communication [%]", said)


# -- claims --------------------------------------------------------------------------------------


def _shares(phase: str) -> list[pd.Series]:
    """Return a phase's share in the lab with equal workers, read in two ways.

    Where two phases happen at once ALLREDUCE counts, or NEGOTIATE: it is not stated.
    """
    keys = ["workers", "buffer_bytes", "network"]
    wanted = f"slowest == 1 and phase == {phase!r}"
    found = []
    for first in ("ALLREDUCE", "NEGOTIATE"):
        rows = phases.in_lab(Lab.load(), first=first).query(wanted)
        found.append(rows.set_index(keys)["measured"])
    return found


@check("osf-fig05-vgg16")
def _busier_link() -> Result:
    wide, negotiating = (each.unstack("network") for each in _shares("ALLREDUCE"))
    ratios, others = (
        (each["VGG16"] / each["ResNet101"]).dropna() for each in (wide, negotiating)
    )
    pairs = ratios.rename(buffer_name, level=1).items()
    each = ", ".join(f"{ratio:.5g} ({n}, {size})" for (n, size), ratio in pairs)
    full = f"both above {wide.loc[ratios.idxmin()].min() - 5e-5:.2%} in the least"
    note = (
        f"all negotiated pairs (equal workers, buffer), ALLREDUCE first: {each}; {full}; "
        f"NEGOTIATE first {others.min():.3g} or more; {STRETCHED}"
    )
    return claims.measured([*ratios, *others], note, "replayed", 4)


@check("osf-fig05-negotiate")
def _negotiation() -> Result:
    exposed, whole = (100 * each for each in _shares("NEGOTIATE"))
    each = ", ".join(
        f"{name} {of.min():.2g} to {of.max():.3g}"
        for name, of in whole.groupby("network")
    )
    note = (
        f"ALLREDUCE first, at most {exposed.max():.3g}; NEGOTIATE first, {each}; 2 to 8 "
        f"equal workers, VGG-16 up to 4, buffers from none to 1 GB, {STRETCHED}"
    )
    return claims.measured([*exposed, *whole], note, "replayed", n=len(exposed))
