"""osf: equations of Liu et al., Modeling and Optimizing the Scaling Performance (WWW 2022).

    messages   Eqs 7, 18: what one all-reduce takes
    scaling    Eqs 1-6, 8-10: scaling factors without tensor fusion
    fusion     Eqs 11-17: tensor fusion, as printed and repaired
    bounds     what Eqs 3, 4, 7 and 11 allow at most
    planners   adaFusion and MG-WFBP as planners of ddlkit.core.plan
    breakdown  Section 3.3: NEGOTIATE, ALLREDUCE, WAIT and MISC, simulated
    audit      every planner against the best plan, over random instances and settings
    cluster    the paper's cluster: which of its unstated settings agree with the numbers it states

Layers are in forward order everywhere: index 0 is the paper's layer 1.
"""

from ddlkit.papers.networks import RESNET_BLOCKS, VGG_CONVOLUTIONS
from ddlkit.papers.networks import parameters as table2_parameters
from ddlkit.papers.osf.bounds import (
    largest_fusion_gain,
    largest_scaling_loss,
    least_iteration_s,
    least_overhead_for_gain,
)
from ddlkit.papers.osf.fusion import (
    adafusion_messages,
    buffered_bytes,
    fused_start_s,
    fusing_pays,
    osf_fused,
    sent_bytes,
    wait_s,
)
from ddlkit.papers.osf.messages import (
    bandwidth_delay_bytes,
    piecewise_update,
    ring_from_ends,
    update_s,
)
from ddlkit.papers.osf.planners import adafusion, mg_wfbp
from ddlkit.papers.osf.scaling import (
    backward_s,
    compute_s,
    csf,
    osf,
    overlap_s,
    scaling_factor,
    update_start_s,
    utilisation,
)

__all__ = [
    "RESNET_BLOCKS",
    "VGG_CONVOLUTIONS",
    "adafusion",
    "adafusion_messages",
    "backward_s",
    "bandwidth_delay_bytes",
    "buffered_bytes",
    "compute_s",
    "csf",
    "fused_start_s",
    "fusing_pays",
    "largest_fusion_gain",
    "largest_scaling_loss",
    "least_iteration_s",
    "least_overhead_for_gain",
    "mg_wfbp",
    "osf",
    "osf_fused",
    "overlap_s",
    "piecewise_update",
    "ring_from_ends",
    "scaling_factor",
    "sent_bytes",
    "table2_parameters",
    "update_s",
    "update_start_s",
    "utilisation",
    "wait_s",
]
