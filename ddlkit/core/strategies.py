"""The parts of one training iteration, and which of them a framework hides.

Layers are in forward order, and all times are of one iteration, as in dag IV.

References
----------
dag : S. Shi et al., "A DAG Model of Synchronous Stochastic Gradient Descent in
    Distributed Deep Learning", 2018.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ddlkit.core.cost import MessageCost
from ddlkit.core.errors import UserError
from ddlkit.core.workload import Floats, Workload


@dataclass(frozen=True, eq=False)
class IterationTimes:
    """The times of the parts of one iteration (dag Tab I), with L layers.

    Attributes
    ----------
    io_s : float
        t_io: seconds to read a batch.
    h2d_s : float
        t_h2d: seconds to copy a batch from the host to the GPU.
    forward_s : ndarray, shape (L,)
        t_f^(l): seconds of forward of each layer.
    backward_s : ndarray, shape (L,)
        t_b^(l): seconds of backward of each layer.
    communication_s : ndarray, shape (L,)
        t_c^(l): seconds to exchange the gradient of each layer, 0 on a single GPU.
    update_s : float
        t_u: seconds of the update.
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
        """Return the times of a workload whose tensors are layers, each sent alone.

        Parameters
        ----------
        workload : Workload
            What one iteration computes, in ready order.
        cost : MessageCost
            The time of a message of a given size.
        io_s : float, optional
            Seconds to read a batch.
        h2d_s : float, optional
            Seconds to copy a batch to the GPU.

        Returns
        -------
        IterationTimes
            A workload does not divide its forward pass between layers, so all of it
            counts as forward of the first layer.
        """
        # A workload is in ready order, the last layer first. Here layers are in forward
        # order.
        backward_s = workload.backward_s[::-1]
        forward_s = np.zeros_like(backward_s)
        forward_s[0] = workload.forward_s
        communication_s = np.asarray(cost(workload.bytes[::-1]))
        return cls(
            io_s=io_s,
            h2d_s=h2d_s,
            forward_s=forward_s,
            backward_s=backward_s,
            communication_s=communication_s,
            update_s=workload.update_s,
        )

    @property
    def fetch_s(self) -> float:
        """Return t_io + t_h2d, the seconds to read a batch and copy it to the GPU."""
        return self.io_s + self.h2d_s

    @property
    def gpu_s(self) -> float:
        """Return t_f + t_b, the seconds of forward and backward of all layers."""
        return float(np.sum(self.forward_s) + np.sum(self.backward_s))


@dataclass(frozen=True)
class Strategy:
    """What a framework hides behind computing (dag IV-C, V-C).

    Each field adds edges to the task graph, or leaves them out.

    Attributes
    ----------
    copies_ahead : bool
        Whether a copy to the GPU does not wait for the update before it.
    sends_during_backward : bool
        Whether the gradient of a layer is sent as soon as it is ready. Otherwise it is
        sent after the whole backward pass.
    decodes_on_cpu : bool
        Whether samples are read compressed, and decoded by a processor.
    reads_ahead : bool
        Whether a read does not wait for the update before it.
    one_buffer : bool
        Whether a read waits for the copy before it. dag Eq 3 needs this edge, which
        Fig 1 of the paper does not have.
    batches_ahead : int
        How many batches are fetched ahead of the one that trains, 0 for as many as the
        disk can read.
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
"""A strategy that hides nothing (dag Eqs 1 and 2)."""

# By dag IV-C, only Caffe-MPI copies the next batch while an iteration computes. CNTK is
# taken to send after backward. By dag V-C, CNTK and TensorFlow decode on the CPU.
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
"""The strategies of the frameworks that the paper measures (dag V-C)."""


def strategy(framework: str) -> Strategy:
    """Return the strategy of a framework.

    Parameters
    ----------
    framework : str
        A name in `STRATEGIES`, in upper or lower case.

    Returns
    -------
    Strategy
        What the framework hides behind computing.

    Raises
    ------
    UserError
        If the strategy of the framework is not known.

    Examples
    --------
    >>> strategy("caffe-mpi").copies_ahead
    True
    """
    for name, strategy_of_name in STRATEGIES.items():
        if name.lower() == framework.lower():
            return strategy_of_name
    raise UserError(
        f"unknown strategy {framework!r}: use one of {', '.join(STRATEGIES)}"
    )
