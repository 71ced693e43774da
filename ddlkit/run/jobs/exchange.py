"""Numbers of all ranks, exchanged as float64 tensors: nothing is pickled."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# The later names of two calls: the earlier ones warn where both exist.
gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
scatter_single = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def everyones(values: Sequence[float] | Floats) -> Floats:
    """``values`` (any shape) of every rank, stacked: (world_size, ...). All ranks must call it alike."""
    home = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
    mine = torch.as_tensor(np.asarray(values, dtype=np.float64)).to(home)
    flat = torch.empty(dist.get_world_size() * mine.numel(), dtype=mine.dtype, device=home)
    gather_single(flat, mine.reshape(-1).contiguous())
    stacked: Floats = flat.cpu().numpy().reshape(dist.get_world_size(), *mine.shape)
    return stacked


def slowest(values: Sequence[float] | Floats) -> Floats:
    """Elementwise maximum of ``values`` (any shape) over all ranks."""
    largest: Floats = everyones(values).max(axis=0)
    return largest


def agree_any(flag: bool) -> bool:
    """Whether any rank says yes: the same answer on all of them."""
    return bool(slowest([float(flag)])[0])


def agree_all(flag: bool) -> bool:
    """Whether every rank says yes: the same answer on all of them.

    A measurement ends so: while one rank still measures, the others must take part.
    """
    return not agree_any(not flag)
