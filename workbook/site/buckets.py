"""The page on which a reader moves the ends of buckets: a toy, and recorded networks, as JSON."""

from __future__ import annotations

from typing import Any

from ddlkit.core.cost import AlphaBeta
from ddlkit.core.fit import fit
from ddlkit.core.plan import FusionPlan, ddp, none
from ddlkit.core.units import MIB
from ddlkit.core.workload import Workload
from workbook.common import source

NETWORKS = ("googlenet", "resnet18", "resnet50")
MESSAGES = "collective == 'all_reduce' and link == 'lab:1gbit' and ranks == 4"
COLOURED = ("forward", "backward", "update", "all_reduce", "all_gather")
"""Whose colours the page needs: neighbouring buckets have those of the two collectives."""


def cases() -> dict[str, dict[str, Any]]:
    """Return by name a network's layers in ready order, a line for its messages, and a plan to begin with."""
    # Notebook 00's three layers and line, with 100 MiB for its 100 bytes.
    toy = Workload.from_arrays(3.0, [2.0] * 3, [100 * MIB] * 3)
    line = AlphaBeta(alpha_s=0.5, beta_s_per_byte=0.02 / MIB)
    about = "Three equal layers: forward takes 3 s, backward 2 s a layer, one gradient 0.5 s + 2 s to send."
    given = {"toy": _case(none(toy), toy, line, about)}
    machine = source.default_recording().name
    recording = source.open_source(machine)
    rows = recording.table("collectives").query(MESSAGES)
    line = fit("alpha_beta:ends", rows["bytes"], rows["seconds"], draws=0).cost
    for name in NETWORKS:
        profile = recording.profile(name)
        about = (
            f"Layers of {name} at batch {profile.batch} as recorded on {machine}, messages as there "
            "among 4 workers over 1 Gbit/s. Make computing shorter for what a GPU would see."
        )
        given[name] = _case(ddp(profile.workload()), profile.workload(), line, about)
    return given


def _case(
    plan: FusionPlan, workload: Workload, line: AlphaBeta, about: str
) -> dict[str, Any]:
    return {
        "forward_s": workload.forward_s,
        "backward_s": workload.backward_s.tolist(),
        "bytes": workload.bytes.tolist(),
        "names": list(workload.tensor),
        "update_s": workload.update_s,
        "wire": {"alpha_s": line.alpha_s, "beta_s_per_byte": line.beta_s_per_byte},
        "ends": list(plan.ends),
        "about": about,
    }
