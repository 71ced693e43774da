"""osf: equations of Liu et al., Modeling and Optimizing the Scaling Performance (WWW 2022)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ddlkit.core.errors import UserError

Floats = NDArray[np.float64]

VGG_CONVOLUTIONS = {"VGG16": (2, 2, 3, 3, 3), "VGG19": (2, 2, 4, 4, 4)}
RESNET_BLOCKS = {"ResNet50": (3, 4, 6, 3), "ResNet101": (3, 4, 23, 3), "ResNet152": (3, 8, 36, 3)}


def scaling_factor(alone_s: float, together_s: float, workers: int) -> float:
    """osf Eq 1: SF = T_1 / (T_N N); any unit of time, as long as both share it."""
    return alone_s / (together_s * workers)


def csf(compute_s: float, communication_s: float) -> float:
    """osf Eq 2: the scaling factor when communication (T_comm) follows all computation (T_comp)."""
    return compute_s / (compute_s + communication_s)


def utilisation(forward_flops: float, compute_s: float, flops_per_s: float) -> float:
    """osf Eq 5 solved for c: the share of a device's peak rate that an iteration reaches.

    Symbols: M C summed over layers = forward_flops (of the whole mini-batch, 2 FLOP a multiply-add),
    T_comp = compute_s (forward and backward, Eq 4: three times the forward FLOP), pi = flops_per_s.
    """
    return 3 * forward_flops / (compute_s * flops_per_s)


def update_s(
    n_bytes: ArrayLike,
    workers: int,
    bytes_per_s: float,
    *,
    adds_per_s: float = math.inf,
    bytes_per_parameter: int = 4,
    overhead_s: float = 0.0,
) -> Floats:
    """osf Eq 7: time of a ring all-reduce of ``n_bytes`` (any shape), element by element.

    Symbols: D = n_bytes, N = workers, beta = bytes_per_s, pi = adds_per_s,
    s = bytes_per_parameter, delta = overhead_s.
    """
    share = (workers - 1) / workers
    per_byte = 2 * share / bytes_per_s + share / (adds_per_s * bytes_per_parameter)
    return per_byte * np.asarray(n_bytes, dtype=float) + overhead_s


def update_start_s(backward_s: Sequence[float], sent_s: Sequence[float], first: int = 1) -> Floats:
    """osf Eq 8: (n,) start of every layer's update, counted from the end of layer n's backward.

    Symbols: t_backward = backward_s, t_update(D) = sent_s, both (n,) in forward order. The sum over
    the backward times starts at j = i + ``first``: 1 as printed, 0 as its prose and Eq 15 have it.
    """
    n = len(backward_s)
    start = np.zeros(n)
    for i in range(n - 2, -1, -1):
        computed = math.fsum(backward_s[i + first : n - 1])
        start[i] = max(start[i + 1] + sent_s[i + 1], computed)
    return start


def osf(
    forward_s: float, backward_s: Sequence[float], sent_s: Sequence[float], first: int = 1
) -> float:
    """osf Eqs 3, 8-10: T_comp / (T_comp + T_update - T_overlap); ``first`` as in update_start_s."""
    compute = forward_s + math.fsum(backward_s)
    updated = update_start_s(backward_s, sent_s, first)[0] + sent_s[0]
    return compute / (compute + updated - math.fsum(backward_s[:-1]))


def largest_fusion_gain(constant_sf: float, saved_overhead: float = 0.0) -> float:
    """Upper bound on T_constant / T_other - 1 over all fusion plans, under osf Eqs 4, 7 and 11.

    Every plan sends the same bytes. Another plan hides at most the backward pass, 2/3 T_comp
    (Eq 4), saves at most ``saved_overhead`` = (k - 1) delta / T_comp (Eq 7, k messages of the
    constant plan), and never takes less than T_comp. ``constant_sf`` is the constant plan's
    scaling factor, T_comp / T_constant (Eq 11).
    """
    if not 0 < constant_sf <= 1:
        raise UserError(f"scaling factor is {constant_sf}: must be above 0 and at most 1")
    constant = 1 / constant_sf
    return constant / max(1.0, constant - 2 / 3 - saved_overhead) - 1


def largest_scaling_loss(communication_growth: float) -> float:
    """Upper bound on the relative loss of SF when communication grows by a factor 1 + growth.

    osf Eq 3: no iteration grows by more than its communication, so SF falls by at most
    1 - 1 / (1 + growth).
    """
    return 1 - 1 / (1 + communication_growth)


def table2_parameters(network: str) -> tuple[int, ...]:
    """Elements of every parameter tensor of a network of osf Tab 2, in forward order.

    Counted from the architectures as published (torchvision's agree), 1000 classes. A convolution
    of VGG has a weight and a bias; one of ResNet has a weight and batch norm's two tensors.
    """
    if network in VGG_CONVOLUTIONS:
        return _vgg(VGG_CONVOLUTIONS[network])
    if network in RESNET_BLOCKS:
        return _resnet(RESNET_BLOCKS[network])
    known = ", ".join((*VGG_CONVOLUTIONS, *RESNET_BLOCKS))
    raise UserError(f"osf Tab 2 has no network {network!r}: use one of {known}")


def _vgg(convolutions: Sequence[int]) -> tuple[int, ...]:
    sizes, inputs = [], 3
    for width, count in zip((64, 128, 256, 512, 512), convolutions, strict=True):
        for _ in range(count):
            sizes += [9 * inputs * width, width]
            inputs = width
    for inputs, width in ((512 * 7 * 7, 4096), (4096, 4096), (4096, 1000)):
        sizes += [inputs * width, width]
    return tuple(sizes)


def _resnet(blocks: Sequence[int]) -> tuple[int, ...]:
    sizes, inputs = [3 * 49 * 64, 64, 64], 64
    for width, count in zip((64, 128, 256, 512), blocks, strict=True):
        for block in range(count):
            for weights, outputs in (
                (inputs * width, width),
                (9 * width * width, width),
                (width * 4 * width, 4 * width),
            ):
                sizes += [weights, outputs, outputs]
            if block == 0:
                sizes += [inputs * 4 * width, 4 * width, 4 * width]
            inputs = 4 * width
    return (*sizes, inputs * 1000, 1000)
