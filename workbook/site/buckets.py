"""The page on which a reader moves the ends of buckets: its networks, and what their messages cost."""

from __future__ import annotations

from typing import Any

from ddlkit.core.cost import AlphaBeta, Table
from ddlkit.core.fit import fit
from ddlkit.core.plan import FusionPlan, ddp, none
from ddlkit.core.units import MIB
from ddlkit.core.workload import Workload
from ddlkit.model import Calibration
from workbook.common import source
from workbook.common.specs import network_title
from workbook.course import example

NETWORKS = (example.NETWORK, "resnet18", "resnet50")
"""The recorded networks of the page. The first one is shown when the page opens."""
COLOURED = ("forward", "backward", "update", "all_reduce", "all_gather")
"""The roles whose colours the page needs. Neighbouring buckets have the colours of the two collectives."""


def cases() -> dict[str, dict[str, Any]]:
    """Return what the page is given, by the name of the network.

    Returns
    -------
    dict
        For each network its layers in ready order, the cost of its messages, and the plan that the page
        opens with: PyTorch's default for the recorded networks, one message per gradient for the toy.
    """
    recording = source.open_source()
    messages = recording.table("collectives").query(
        "collective == 'all_reduce' and link == @example.LINK and ranks == @example.WORKERS"
    )
    line = fit("alpha_beta:ends", messages["bytes"], messages["seconds"], draws=0).cost
    calibration = Calibration.of(recording.table("collectives"), draws=0)
    measured = calibration.between(example.LINK, example.WORKERS).cost
    assert isinstance(measured, Table)  # the form that a calibration has by default
    given: dict[str, dict[str, Any]] = {}
    for name in NETWORKS:
        profile = recording.profile(name)
        workload = profile.workload()
        about = (
            f"The layers of {network_title(name)} at batch size {profile.batch} and messages among "
            f"{example.WORKERS} workers over 1 Gbit/s, both as recorded on {source.TEACHING}. "
            "A GPU would compute faster: make computing shorter to see the effect."
        )
        given[name] = _case(ddp(workload), workload, line, about)
        given[name]["wire"]["table"] = {
            "bytes": measured.bytes.tolist(),
            "seconds": measured.seconds.tolist(),
            "alpha_s": line.alpha_s,
            "beta_s_per_byte": line.beta_s_per_byte,
        }
    # The three layers and the line of notebook 00, with 100 MiB in place of its 100 bytes.
    toy = Workload.from_arrays(3.0, [2.0] * 3, [100 * MIB] * 3)
    line = AlphaBeta(alpha_s=0.5, beta_s_per_byte=0.02 / MIB)
    about = (
        "Three equal layers. Forward takes 3 s, backward takes 2 s for each layer, and the message "
        "of one gradient takes 0.5 s + 2 s."
    )
    given["toy"] = _case(none(toy), toy, line, about)
    return given


def cost_of(case: dict[str, Any]) -> AlphaBeta | Table:
    """Return the cost of messages with which the page opens a case."""
    wire = case["wire"]
    if "table" in wire:
        return Table(wire["table"]["bytes"], wire["table"]["seconds"])
    return AlphaBeta(wire["alpha_s"], wire["beta_s_per_byte"])


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
