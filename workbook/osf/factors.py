"""The scaling factor of a workload without fusion, by each of the paper's formulas."""

from __future__ import annotations

from ddlkit.core.cost import MessageCost
from ddlkit.core.iteration import Iteration, no_overlap
from ddlkit.core.plan import single
from ddlkit.core.workload import Workload
from workbook.osf import equations as osf

FORMULAS = ("CSF", "OSF printed", "OSF repaired")


def csf_of(workload: Workload, cost: MessageCost) -> float:
    """Return the factor when everything is sent as one message after computation (osf Eq 2)."""
    return no_overlap(Iteration(workload, single(workload), cost)).scaling_factor


def by_formulas(workload: Workload, cost: MessageCost) -> dict[str, float]:
    """Return the scaling factor without fusion by each of FORMULAS (osf Eqs 2, 3, 8 to 10)."""
    sent_s = cost(workload.bytes[::-1]).tolist()
    times = workload.forward_s, workload.backward_s[::-1].tolist(), sent_s
    alone_s = workload.compute_s - workload.update_s
    printed, repaired = (
        workload.compute_s
        / (alone_s / osf.osf(*times, first=first) + workload.update_s)
        for first in (1, 0)
    )
    return {
        "CSF": csf_of(workload, cost),
        "OSF printed": printed,
        "OSF repaired": repaired,
    }
