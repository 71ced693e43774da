"""omgs: equations and algorithms of Shi et al., Merged Gradient Sparsification (INFOCOM 2020).

    iteration.py   Eqs 1-11: timelines of SGD, TopK-SGD and LAGS-SGD, and what selecting and sending cost
    merging.py     Eqs 12-25: what merging a layer changes, and the rule of Theorem 1
    algorithms.py  Algorithm 1 (which layers to merge) and Algorithm 2 (what is sent when)
    optimality.py  the best of all mergings, and how near Algorithm 1 comes to it
    counts.py      messages of MGS-SGD (Tab V), from the networks' tensors

Layers are numbered 1 to L as in the paper; arrays hold them in that (forward) order, layer l at index
l - 1. Where the paper prints something that cannot be meant, ``literal=True`` gives what it prints.
"""

from ddlkit.papers.omgs.algorithms import (
    REPAIRS,
    find_merged_layers,
    messages,
    never_sent,
)
from ddlkit.papers.omgs.counts import (
    cifar_vgg16_parameters,
    merge_up_to,
    ptb_lstm_parameters,
    send_from,
)
from ddlkit.papers.omgs.iteration import (
    all_gather_s,
    backward_start_s,
    communication_start_s,
    exposed_s,
    lags_iteration_s,
    largest_gamma,
    selection_s,
    selection_start_s,
    sgd_iteration_s,
    sgd_step,
    topk_iteration_s,
)
from ddlkit.papers.omgs.merging import (
    Candidate,
    Instance,
    combinations,
    merge,
    merge_by_theorem,
    merged_iteration_s,
    objective_s,
    selection_penalty_s,
)
from ddlkit.papers.omgs.optimality import Audit, audit, optimal, random_instances

__all__ = [
    "REPAIRS",
    "Audit",
    "Candidate",
    "Instance",
    "all_gather_s",
    "audit",
    "backward_start_s",
    "cifar_vgg16_parameters",
    "combinations",
    "communication_start_s",
    "exposed_s",
    "find_merged_layers",
    "lags_iteration_s",
    "largest_gamma",
    "merge",
    "merge_by_theorem",
    "merge_up_to",
    "merged_iteration_s",
    "messages",
    "never_sent",
    "objective_s",
    "optimal",
    "ptb_lstm_parameters",
    "random_instances",
    "selection_penalty_s",
    "selection_s",
    "selection_start_s",
    "send_from",
    "sgd_iteration_s",
    "sgd_step",
    "topk_iteration_s",
]
