"""The page on which a reader moves the ends of buckets: what it is given, as JSON.

A toy that can be worked out on paper, and recorded networks beside a line laid through recorded messages.
"""

from __future__ import annotations

from typing import Any

from ddlkit.core.cost import AlphaBeta
from ddlkit.core.fit import fit
from ddlkit.core.plan import ddp, none
from ddlkit.core.units import MIB
from ddlkit.core.workload import Workload
from ddlkit.report import source

NETWORKS = ("googlenet", "resnet18", "resnet50")
LINK, WORKERS = "lab:1gbit", 4
COLOURED = ("forward", "backward", "update", "all_reduce", "all_gather")
"""Whose colours the page needs: neighbouring buckets have those of the two collectives."""


def cases() -> dict[str, dict[str, Any]]:
    """Return by name a network's layers in ready order, a line for its messages, and a plan to begin with.

    Keys: forward_s, backward_s, bytes, names, update_s, wire (alpha_s, beta_s_per_byte), ends, about.
    """
    # Notebook 00's three layers and line, with 100 MiB for its 100 bytes.
    workload = Workload.from_arrays(3.0, [2.0] * 3, [100 * MIB] * 3)
    wire = AlphaBeta(alpha_s=0.5, beta_s_per_byte=0.02 / MIB)
    about = "Three equal layers: forward takes 3 s, backward 2 s a layer, one gradient 0.5 s + 2 s to send."
    given = {"toy": _case(workload, wire, none(workload).ends, about)}
    machine = source.default_recording().name
    recording = source.open_source(machine)
    rows = recording.table("collectives")
    rows = rows[(rows.link == LINK) & (rows.ranks == WORKERS) & (rows.collective == "all_reduce")]
    wire = fit("alpha_beta:ends", rows["bytes"], rows["seconds"], draws=0).cost
    for name in NETWORKS:
        profile = recording.profile(name)
        workload = profile.workload()
        about = (
            f"Layers of {name} at batch {profile.batch} as recorded on {machine}, messages as there "
            f"among {WORKERS} workers over 1 Gbit/s. Make computing shorter for what a GPU would see."
        )
        given[name] = _case(workload, wire, ddp(workload).ends, about)
    return given


def _case(workload: Workload, wire: AlphaBeta, ends: tuple[int, ...], about: str) -> dict[str, Any]:
    return {
        "forward_s": workload.forward_s,
        "backward_s": workload.backward_s.tolist(),
        "bytes": workload.bytes.tolist(),
        "names": list(workload.tensor),
        "update_s": workload.update_s,
        "wire": {"alpha_s": wire.alpha_s, "beta_s_per_byte": wire.beta_s_per_byte},
        "ends": list(ends),
        "about": about,
    }
