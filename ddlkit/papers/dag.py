"""dag: arithmetic of Shi et al., A DAG Model of Synchronous SGD (2018)."""

from __future__ import annotations


def iteration_tasks(layers: int, gpus: int) -> dict[str, int]:
    """Tasks of one S-SGD iteration by kind: the nodes of dag Fig 1 (Section IV-B).

    Every GPU reads and copies its batch and runs forward and backward layer by layer; each layer
    is aggregated once for all GPUs; one task updates the model.
    """
    return {
        "io": gpus,
        "h2d": gpus,
        "forward": layers * gpus,
        "backward": layers * gpus,
        "allreduce": layers,
        "update": 1,
    }


def communication_efficiency(n_bytes: float, seconds: float, bytes_per_s: float) -> float:
    """Share of the link's rate at which ``n_bytes`` of gradients were exchanged (dag V-C)."""
    return n_bytes / seconds / bytes_per_s
