"""What one training iteration consists of, and which of its parts a framework hides behind computing.

Layers are in forward order, and all times are of one iteration, as in dag IV.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ddlkit.core.cost import MessageCost
from ddlkit.core.errors import UserError
from ddlkit.core.workload import Floats, Workload


@dataclass(frozen=True, eq=False)
class IterationTimes:
    """What one iteration consists of (dag Tab I), in seconds.

    Symbols: t_io = io_s, t_h2d = h2d_s, t_f^(l) = forward_s, t_b^(l) = backward_s,
    t_c^(l) = communication_s, t_u = update_s. Those of layers are (L,); communication is 0 on a single GPU.
    """

    io_s: float
    h2d_s: float
    forward_s: Floats
    backward_s: Floats
    communication_s: Floats
    update_s: float = 0.0

    @classmethod
    def of_workload(
        cls,
        workload: Workload,
        cost: MessageCost,
        io_s: float = 0.0,
        h2d_s: float = 0.0,
    ) -> IterationTimes:
        """Return a workload's tensors as layers, each sent alone at ``cost``; forward stands at layer 1."""
        backward_s = workload.backward_s[::-1]
        forward_s = np.zeros_like(backward_s)
        forward_s[0] = workload.forward_s
        sent_s = np.asarray(cost(workload.bytes[::-1]))
        return cls(io_s, h2d_s, forward_s, backward_s, sent_s, workload.update_s)

    @property
    def fetch_s(self) -> float:
        """Return t_io + t_h2d."""
        return self.io_s + self.h2d_s

    @property
    def gpu_s(self) -> float:
        """Return t_f + t_b."""
        return float(np.sum(self.forward_s) + np.sum(self.backward_s))


@dataclass(frozen=True)
class Strategy:
    """What a framework hides behind computing (dag IV-C, V-C): which edges the task graph has.

    copies_ahead : a batch is copied to the GPU before the update that it follows
    sends_during_backward : a layer's gradient is sent as soon as it is ready, not after the whole backward
    decodes_on_cpu : the samples are read compressed and are decoded by a processor
    reads_ahead : a read does not wait for the update before it
    one_buffer : a read waits for the copy before it, as dag Eq 3 needs and its Fig 1 does not say (errata 3)
    batches_ahead : so many batches are fetched beside the one that trains; 0: as many as the disk can
    """

    copies_ahead: bool
    sends_during_backward: bool
    decodes_on_cpu: bool
    reads_ahead: bool = True
    one_buffer: bool = False
    batches_ahead: int = 0


ONE_AFTER_THE_OTHER = Strategy(
    copies_ahead=False,
    sends_during_backward=False,
    decodes_on_cpu=False,
    reads_ahead=False,
)
"""Nothing is hidden behind anything (dag Eqs 1 and 2)."""
STRATEGIES = {
    "Caffe-MPI": Strategy(
        copies_ahead=True, sends_during_backward=True, decodes_on_cpu=False
    ),
    "CNTK": Strategy(
        copies_ahead=False, sends_during_backward=False, decodes_on_cpu=True
    ),
    "MXNet": Strategy(
        copies_ahead=False, sends_during_backward=True, decodes_on_cpu=False
    ),
    "TensorFlow": Strategy(
        copies_ahead=False, sends_during_backward=True, decodes_on_cpu=True
    ),
}


def strategy(framework: str) -> Strategy:
    """Return a framework's entry in STRATEGIES, in any spelling. Raises UserError for another one."""
    for name, edges in STRATEGIES.items():
        if name.lower() == framework.lower():
            return edges
    raise UserError(
        f"no strategy of {framework!r} is known: use one of {', '.join(STRATEGIES)}"
    )
