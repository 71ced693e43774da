"""Counting the FLOP of a forward pass, 2 per multiply-add, alike on every device."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

Shape = tuple[int, ...]


def _attention(query: Shape, key: Shape, value: Shape, *_: object, **__: object) -> int:
    flops: int = sdpa_flop_count(query, key, value)
    return flops


def _recurrence(inputs: Shape, weights: Sequence[Shape]) -> int:
    """Each weight matrix is applied once to every sample of every time step."""
    return 2 * math.prod(inputs[:2]) * sum(math.prod(w) for w in weights if len(w) == 2)


def _rnn_of_cpu(inputs: Shape, w_inputs: Shape, w_states: Shape, *_: object, **__: object) -> int:
    return _recurrence(inputs, (w_inputs, w_states))


def _rnn_of_cuda(inputs: Shape, weights: Sequence[Shape], *_: object, **__: object) -> int:
    return _recurrence(inputs, weights)


# torch has no formula for these kernels, and counts 0: the same work must count alike everywhere.
_FORMULAS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten.mkldnn_rnn_layer: _rnn_of_cpu,
    torch.ops.aten._cudnn_rnn: _rnn_of_cuda,
}


def counter() -> Any:
    """A context in which the FLOP of every operation add up; ask it with ``get_total_flops``."""
    return FlopCounterMode(display=False, custom_mapping=_FORMULAS)
