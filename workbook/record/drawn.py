"""A small data set, drawn from a seed. Its 24 classes are six shapes in four textures each."""

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
"""The side of a picture in pixels."""
# About the mean and the standard deviation of bytes / 255.
MEAN = 0.35
SPREAD = 0.3
NOISE = 0.06
"""The standard deviation of noise. Brightness goes from 0 to 1."""

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
"""Which points (u, v) belong to a shape with a radius of about 1 around the origin."""

TEXTURES: dict[str, Pattern] = {
    "plain": lambda p, q: np.ones_like(p, dtype=bool),
    "stripes": lambda p, q: np.sin(p) > 0,
    "checks": lambda p, q: np.sin(p) * np.sin(q) > 0,
    "dots": lambda p, q: np.cos(p) + np.cos(q) > 0.7,
}
"""Which points (p, q) have the first of a texture's two colours. A texture repeats every 2 pi."""

CLASSES = tuple(f"{shape}, {texture}" for shape in SHAPES for texture in TEXTURES)


Pictures = tuple[NDArray[np.uint8], NDArray[np.int64]]
"""(n, 3, SIDE, SIDE) bytes, and (n,) indexes into CLASSES."""


@lru_cache(maxsize=4)
def draw_pictures(count: int, seed: int) -> Pictures:
    """Draw ``count`` pictures in random order, and return them with their labels, as `Pictures`.

    The numbers of pictures of two classes differ by one at most. The same seed gives the same
    pictures.
    """
    random = np.random.default_rng(seed)
    labels = random.permutation(np.arange(count) % len(CLASSES)).astype(np.int64)
    pictures = [_picture(int(label), random) for label in labels]
    return np.stack(pictures), labels


def sha256(count: int) -> str:
    """Return the hash of ``count`` pictures to train on and their labels."""
    # Pictures to train on have seed 0, the second argument, as in `examples`.
    pictures, labels = draw_pictures(count, 0)
    return hashlib.sha256(pictures.tobytes() + labels.tobytes()).hexdigest()


def examples(
    count: int, held_out: bool, side: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return images with a mean of about 0 and a deviation of about 1, and their labels.

    Parameters
    ----------
    count : int
        The number of images.
    held_out : bool
        Whether the images are those that no training sees.
    side : int, optional
        The side to which images are averaged down, in pixels. By default they keep `SIDE`.

    Returns
    -------
    images : Tensor, shape (count, 3, side, side)
        The images.
    labels : Tensor, shape (count,)
        Positions in `CLASSES`.
    """
    # Pictures to train on have seed 0. Seed 1 draws other pictures, which are held out.
    seed = int(held_out)
    pictures, labels = map(torch.from_numpy, draw_pictures(count, seed))
    # Bytes from 0 to 255 are scaled to 1, and then normalised.
    images = (pictures.float() / 255 - MEAN) / SPREAD
    if side:
        images = nn.functional.adaptive_avg_pool2d(images, side)
    return images.contiguous(memory_format=torch.channels_last), labels


def _picture(label: int, random: Random) -> NDArray[np.uint8]:
    """Draw one picture of a class and return its bytes, shape (3, SIDE, SIDE).

    The ``label`` is the position of the class in `CLASSES`.
    """
    # The middles of the pixels, from -1 to 1.
    axis = (np.arange(SIDE) + 0.5) / SIDE * 2 - 1
    y, x = np.meshgrid(axis, axis, indexing="ij")
    # How much each of the three colours changes along x, and then along y.
    tilt = random.uniform(-0.15, 0.15, (2, 3, 1, 1))
    # The background is a dark colour that changes evenly along both axes.
    image = random.uniform(0, 0.3, (3, 1, 1)) + tilt[0] * x + tilt[1] * y
    # A small shape of any class is drawn to distract. The shape of the label is drawn over it, is
    # larger and lies nearer to the middle.
    distracting_shape = int(random.integers(len(SHAPES)))
    distracting_texture = int(random.integers(len(TEXTURES)))
    _draw_shape(
        image,
        (x, y),
        distracting_shape,
        distracting_texture,
        radii=(0.12, 0.2),
        farthest=0.9,
        random=random,
    )
    # Classes are numbered by shape and then by texture.
    shape, texture = divmod(label, len(TEXTURES))
    _draw_shape(
        image,
        (x, y),
        shape,
        texture,
        radii=(0.45, 0.75),
        farthest=0.3,
        random=random,
    )
    image += NOISE * random.standard_normal(image.shape)
    # Brightness from 0 to 1 becomes bytes. Noise may exceed this range.
    return np.clip(image * 255, 0, 255).astype(np.uint8)


def _draw_shape(
    image: Floats,
    points: tuple[Floats, Floats],
    shape: int,
    texture: int,
    *,
    radii: tuple[float, float],
    farthest: float,
    random: Random,
) -> None:
    """Draw a shape into an image, at a random place, angle and size.

    Random numbers must be drawn in the order below, so that a seed always gives the same picture.

    Parameters
    ----------
    image : ndarray, shape (3, SIDE, SIDE)
        The image, which is changed.
    points : (ndarray, ndarray), shape (SIDE, SIDE) each
        The x and y of each pixel, from -1 to 1.
    shape, texture : int
        Positions in `SHAPES` and `TEXTURES`.
    radii : (float, float)
        The least and the largest radius, in the units of ``points``.
    farthest : float
        How far the middle of the shape may lie from that of the image, in x and in y.
    random : Generator
        The source of random numbers.
    """
    x, y = points
    radius = random.uniform(*radii)
    right, down = random.uniform(-farthest, farthest, 2)
    # The coordinates u and v of the shape have their origin in its middle, and turned axes.
    u, v = _turned(x - right, y - down, random.uniform(0, 2 * np.pi))
    is_in_shape = list(SHAPES.values())[shape](u / radius, v / radius)
    # The texture is turned by another angle.
    p, q = _turned(x, y, random.uniform(0, 2 * np.pi))
    # The texture has a period of 2 pi, and the side of the image is 2. The texture therefore
    # repeats ``waves`` / pi times across the image, which is about 3 to 5 times.
    waves = random.uniform(9, 16)
    p_phase, q_phase = random.uniform(0, 2 * np.pi, 2)
    has_first_colour = list(TEXTURES.values())[texture](
        waves * p + p_phase, waves * q + q_phase
    )
    # The second colour is a darker shade of the first.
    first_colour = random.uniform(0.5, 1, (3, 1, 1))
    second_colour = first_colour * random.uniform(0, 0.4)
    colours = np.where(has_first_colour, first_colour, second_colour)
    np.copyto(image, colours, where=is_in_shape)


def _turned(x: Floats, y: Floats, angle: float) -> tuple[Floats, Floats]:
    """Return the coordinates of points (x, y) in axes that are turned by an angle in radians."""
    turned_x = x * np.cos(angle) + y * np.sin(angle)
    turned_y = y * np.cos(angle) - x * np.sin(angle)
    return turned_x, turned_y
