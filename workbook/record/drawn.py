"""A small data set, drawn from a seed: pictures of 24 classes, one of six shapes in one of four textures."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

Floats = NDArray[np.float64]
Pattern = Callable[[Floats, Floats], NDArray[np.bool_]]
Random = np.random.Generator

SIDE = 56
MEAN, SPREAD = 0.35, 0.3  # about those of bytes / 255
NOISE = 0.06  # standard deviation; brightness goes from 0 to 1

SHAPES: dict[str, Pattern] = {
    "disc": lambda u, v: np.hypot(u, v) < 0.9,
    "square": lambda u, v: np.maximum(abs(u), abs(v)) < 0.8,
    "triangle": lambda u, v: (v > -0.5) & (v < 1 - np.sqrt(3) * abs(u)),
    "cross": lambda u, v: (
        (np.minimum(abs(u), abs(v)) < 0.3) & (np.maximum(abs(u), abs(v)) < 1)
    ),
    "ring": lambda u, v: (np.hypot(u, v) < 1) & (np.hypot(u, v) > 0.55),
    "star": lambda u, v: np.hypot(u, v) < 0.62 + 0.38 * np.cos(5 * np.arctan2(v, u)),
}
"""Which points belong to a shape of radius about 1 around the origin."""

TEXTURES: dict[str, Pattern] = {
    "plain": lambda p, q: np.ones_like(p, dtype=bool),
    "stripes": lambda p, q: np.sin(p) > 0,
    "checks": lambda p, q: np.sin(p) * np.sin(q) > 0,
    "dots": lambda p, q: np.cos(p) + np.cos(q) > 0.7,
}
"""Which points have the first of a texture's two colours; it repeats every 2 pi."""

CLASSES = tuple(f"{shape}, {texture}" for shape in SHAPES for texture in TEXTURES)


Pictures = tuple[NDArray[np.uint8], NDArray[np.int64]]
"""(n, 3, SIDE, SIDE) bytes, and (n,) indexes into CLASSES."""


@lru_cache(maxsize=4)
def draw_pictures(count: int, seed: int) -> Pictures:
    """Return ``count`` pictures in random order, equally many of each class, give or take one."""
    random = np.random.default_rng(seed)
    labels = random.permutation(np.arange(count) % len(CLASSES)).astype(np.int64)
    return np.stack([_picture(int(label), random) for label in labels]), labels


def sha256(count: int) -> str:
    """Return the hash of so many pictures to train on, and their labels."""
    return hashlib.sha256(
        b"".join(each.tobytes() for each in draw_pictures(count, 0))
    ).hexdigest()


def examples(
    count: int, held_out: bool, side: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return inputs and labels to train on, or that no training sees; averaged down to a side."""
    pictures, labels = map(torch.from_numpy, draw_pictures(count, int(held_out)))
    images = (pictures.float() / 255 - MEAN) / SPREAD
    if side:
        images = nn.functional.adaptive_avg_pool2d(images, side)
    return images.contiguous(memory_format=torch.channels_last), labels


def _picture(label: int, random: Random) -> NDArray[np.uint8]:
    """Return (3, SIDE, SIDE) bytes of one picture of a class."""
    axis = (np.arange(SIDE) + 0.5) / SIDE * 2 - 1
    y, x = np.meshgrid(axis, axis, indexing="ij")
    tilt = random.uniform(-0.15, 0.15, (2, 3, 1, 1))
    image = random.uniform(0, 0.3, (3, 1, 1)) + tilt[0] * x + tilt[1] * y
    other = int(random.integers(len(SHAPES))), int(random.integers(len(TEXTURES)))
    _put(image, (x, y), other, (0.12, 0.2), 0.9, random)
    _put(image, (x, y), divmod(label, len(TEXTURES)), (0.45, 0.75), 0.3, random)
    image += NOISE * random.standard_normal(image.shape)
    return np.clip(image * 255, 0, 255).astype(np.uint8)


def _put(
    image: Floats,
    points: tuple[Floats, Floats],
    kind: tuple[int, int],
    radius: tuple[float, float],
    place: float,
    random: Random,
) -> None:
    """Draw a (shape, texture) into the image, at most ``place`` off the middle, its radius in between."""
    (x, y), (shape, texture) = points, kind
    size, (right, down) = random.uniform(*radius), random.uniform(-place, place, 2)
    u, v = _turned(x - right, y - down, random.uniform(0, 2 * np.pi))
    inside = list(SHAPES.values())[shape](u / size, v / size)
    p, q = _turned(x, y, random.uniform(0, 2 * np.pi))
    waves, (first, second) = random.uniform(9, 16), random.uniform(0, 2 * np.pi, 2)
    bright = list(TEXTURES.values())[texture](waves * p + first, waves * q + second)
    colour = random.uniform(0.5, 1, (3, 1, 1))
    np.copyto(
        image, np.where(bright, colour, colour * random.uniform(0, 0.4)), where=inside
    )


def _turned(x: Floats, y: Floats, angle: float) -> tuple[Floats, Floats]:
    return x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)
