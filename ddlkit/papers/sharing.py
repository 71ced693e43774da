"""sharing: arithmetic of Zhong and Qu, Resource Sharing between Computation and Communication."""

from __future__ import annotations


def gain(throughput: float, default_throughput: float) -> float:
    """Relative improvement over the default configuration (sharing Tab 2, Fig 8)."""
    return throughput / default_throughput - 1


def iteration_s(batch: int, images_per_s: float) -> float:
    """Iteration time behind a throughput: batch size over images per second (sharing 4.4.2)."""
    return batch / images_per_s


def vit_flops(
    image: int = 224,
    patch: int = 16,
    width: int = 768,
    layers: int = 12,
    mlp: int = 3072,
    classes: int = 1000,
) -> float:
    """FLOP of a forward pass of ViT on one image, 2 per multiply-add (sharing Tab 2, column C).

    Matrix products only. Per layer and token: query, key, value and projection 4 width^2, two MLP
    products 2 width mlp, and 2 tokens width for the scores and their application.
    """
    patches = (image // patch) ** 2
    tokens = patches + 1
    embed = patches * 3 * patch * patch * width
    layer = tokens * (4 * width * width + 2 * width * mlp + 2 * tokens * width)
    return 2.0 * (embed + layers * layer + width * classes)
