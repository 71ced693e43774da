"""sharing: arithmetic of Zhong and Qu, Resource Sharing: its two displayed equations, its prose."""

from __future__ import annotations


def gain(throughput: float, default_throughput: float) -> float:
    """Return relative improvement over the default configuration (sharing Tab 2, Fig 8)."""
    return throughput / default_throughput - 1


def gain_range(throughput: float, default_throughput: float) -> tuple[float, float]:
    """Return least and largest `gain` (0.1 is 10%) of two throughputs, each rounded to a whole number."""
    least = gain(throughput - 0.5, default_throughput + 0.5)
    return least, gain(throughput + 0.5, default_throughput - 0.5)


def iteration_s(batch: int, images_per_s: float) -> float:
    """Return iteration time behind a throughput: batch size over images per second (sharing 4.4.2)."""
    return batch / images_per_s


def model_intensity(forward_flops: float, parameters: float) -> float:
    """sharing 4.4.1, first equation: I = C / D.

    Symbols: C = forward_flops of one image, D = parameters; Tab 2 counts 2 FLOP per multiply-add.

    >>> round(model_intensity(forward_flops=8.2e9, parameters=25.6e6))  # ResNet-50
    320
    """
    return forward_flops / parameters


def compute_to_communication(
    batch: int, forward_flops: float, parameters: float
) -> float:
    """sharing 4.4.1, second equation: 3 B C / (2 D), FLOP per parameter; B = batch, C and D as the first."""
    return 3 * batch * forward_flops / (2 * parameters)


def vit_flops() -> float:
    """Return FLOP of a forward pass of ViT-Base/16 on one image, 2 a multiply-add (sharing Tab 2, column C).

    Per layer and token: query, key, value and projection 4 width^2, two MLP products 2 width mlp, and 2
    tokens width for the scores and their application.
    """
    patches, pixels, width, mlp = (224 // 16) ** 2, 3 * 16 * 16, 768, 3072
    tokens = patches + 1
    layer = tokens * (4 * width * width + 2 * width * mlp + 2 * tokens * width)
    return 2.0 * (patches * pixels * width + 12 * layer + width * 1000)
