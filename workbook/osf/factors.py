"""The scaling factor of a workload without fusion, by each of the paper's formulas."""

from __future__ import annotations

from ddlkit.core.cost import MessageCost
from ddlkit.core.iteration import Iteration, no_overlap
from ddlkit.core.plan import single
from ddlkit.core.workload import Workload
from workbook.osf import equations as osf

FORMULAS = ("CSF", "OSF printed", "OSF repaired")


def csf_of(workload: Workload, cost: MessageCost) -> float:
    """Return the scaling factor if one message follows all computation (osf Eq 2)."""
    return no_overlap(Iteration(workload, single(workload), cost)).scaling_factor


def by_formulas(workload: Workload, cost: MessageCost) -> dict[str, float]:
    """Return the factor without fusion by each of FORMULAS (osf Eqs 2, 3, 8-10)."""
    return {
        "CSF": csf_of(workload, cost),
        "OSF printed": _osf_of(workload, cost, first=1),
        "OSF repaired": _osf_of(workload, cost, first=0),
    }


def _osf_of(workload: Workload, cost: MessageCost, first: int) -> float:
    """Return the scaling factor OSF by one of two readings of osf Eq 8.

    The sum of Eq 8 begins at j = i + ``first``: 1 as printed, or 0 as its prose has it.
    """
    # Both lists are in forward order, as in the equations.
    sizes, backward_s = osf.of_workload(workload)
    sent_s = cost(sizes).tolist()
    factor = osf.osf(workload.forward_s, backward_s, sent_s, first=first)
    # The paper leaves out the update of the weights, which is added here. An iteration of one
    # worker and of all workers gets longer by this time.
    paper_compute_s = workload.compute_s - workload.update_s
    iteration_s = paper_compute_s / factor + workload.update_s
    return workload.compute_s / iteration_s
