"""The networks and the costs of messages of the page on which a reader moves buckets."""

from __future__ import annotations

from typing import Any

from ddlkit.core.cost import AlphaBeta, Table
from ddlkit.core.fit import fit
from ddlkit.core.plan import FusionPlan, ddp, none
from ddlkit.core.units import MIB
from ddlkit.core.workload import Workload
from ddlkit.model import Calibration
from workbook.common import source
from workbook.common.source import Source
from workbook.common.specs import network_title
from workbook.course import example

NETWORKS = (example.NETWORK, "resnet18", "resnet50")
"""The recorded networks of the page. The first one is shown when the page opens."""
LINE_FORM = "alpha_beta:ends"
"""The form of the line: through the medians of the smallest and the largest message."""
COLOURED = ("forward", "backward", "update", "all_reduce", "all_gather")
"""The roles whose colours the page needs.

Neighbouring buckets have the colours of the two collectives."""


def cases() -> dict[str, dict[str, Any]]:
    """Return what the page shows, by the name of the network.

    Returns
    -------
    dict
        For each network:

        forward_s, update_s
            The forward pass and the update in seconds.
        names, bytes, backward_s
            The name, the bytes and the backward pass in seconds of each gradient, in
            ready order.
        wire
            The cost of a message: ``alpha_s`` and ``beta_s_per_byte`` of a line, which the
            sliders of the page change. Recorded networks also have a ``table`` of the
            measured ``bytes`` and ``seconds``. These times hold while the sliders stay where
            they start, whose alpha and beta the table has, too.
        ends
            The plan with which the page opens, as running totals: for each message, the number
            of gradients in it and in all messages before it. Messages take gradients in ready
            order. The plan is PyTorch's default for the recorded networks, and one message per
            gradient for the network "toy".
        about
            What the page says of the network.
    """
    recording = source.open_source()
    collectives = recording.table("collectives")
    # All-reduces over the link and among the workers of the running example.
    messages = collectives[
        (collectives["collective"] == "all_reduce")
        & (collectives["link"] == example.LINK)
        & (collectives["ranks"] == example.WORKERS)
    ]
    # The page takes the time of a message from the table of measured medians. Its sliders
    # start at the alpha and beta of the line. If a reader raises alpha by 1 ms, the page adds
    # 1 ms to each time that it takes from the table, and for beta likewise. No uncertainty is
    # shown, so that nothing is drawn for it (draws=0).
    line = fit(LINE_FORM, messages["bytes"], messages["seconds"], draws=0).cost
    calibration = Calibration.of(collectives, draws=0)
    measured = calibration.between(example.LINK, example.WORKERS).cost
    # By default, a calibration has a table of the measured medians, and no line.
    assert isinstance(measured, Table)
    shown = {name: _recorded_case(recording, name, line, measured) for name in NETWORKS}
    shown["toy"] = _toy_case()
    return shown


def _recorded_case(
    recording: Source, name: str, line: AlphaBeta, measured: Table
) -> dict[str, Any]:
    """Return a recorded network, with its default plan and both costs of messages.

    Parameters
    ----------
    recording : Source
        The tables that teach.
    name : str
        The name of the network.
    line : AlphaBeta
        The line fitted to message times, at which the sliders of the page start.
    measured : Table
        The measured medians, from which the page takes the time of a message.
    """
    profile = recording.profile(name)
    workload = profile.workload()
    about = (
        f"The layers of {network_title(name)} at batch size {profile.batch} and messages "
        f"among {example.WORKERS} workers over 1 Gbit/s, both as recorded on "
        f"{source.TEACHING}. "
        "A GPU would compute faster: make computing shorter to see the effect."
    )
    default_plan = ddp(workload)
    case = _case(default_plan, workload, line, about)
    # `_case` has put the line into the wire, where the sliders change it. This second copy stays
    # as it is. The page adds the difference between the two lines to the measured times.
    case["wire"]["table"] = {
        "bytes": measured.bytes.tolist(),
        "seconds": measured.seconds.tolist(),
        "alpha_s": line.alpha_s,
        "beta_s_per_byte": line.beta_s_per_byte,
    }
    return case


def _toy_case() -> dict[str, Any]:
    """Return the network of notebook 00, which has three equal layers, and its cost of messages.

    A gradient has 100 bytes in the notebook, and 100 MiB here. The page shows sizes in MiB, and
    its slider does not reach the notebook's cost of 0.02 s per byte. Here 0.02 s is the cost of a
    MiB, so that the message of a gradient takes 2.5 s in both.
    """
    workload = Workload.from_arrays(3.0, [2.0] * 3, [100 * MIB] * 3)
    line = AlphaBeta(alpha_s=0.5, beta_s_per_byte=0.02 / MIB)
    about = (
        "Three equal layers. Forward takes 3 s, backward takes 2 s for each layer, and the "
        "message of one gradient takes 0.5 s + 2 s."
    )
    one_message_per_gradient = none(workload)
    return _case(one_message_per_gradient, workload, line, about)


def cost_of(case: dict[str, Any]) -> AlphaBeta | Table:
    """Return the cost of messages with which the page opens one of `cases`.

    It is the measured table of a recorded network, and the line of the toy network.
    """
    wire = case["wire"]
    if "table" in wire:
        return Table(wire["table"]["bytes"], wire["table"]["seconds"])
    return AlphaBeta(wire["alpha_s"], wire["beta_s_per_byte"])


def _case(
    plan: FusionPlan, workload: Workload, line: AlphaBeta, about: str
) -> dict[str, Any]:
    """Return a network, its plan and its cost as the script of the page reads them.

    `cases` describes the result.
    """
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
