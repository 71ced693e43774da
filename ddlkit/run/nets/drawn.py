"""Two small data sets that are drawn, not downloaded; the same seed draws the same.

Pictures are of 24 classes: one of six shapes filled with one of four textures; all else is chance. Of a text
can be learned: which word may follow; number, over a relative clause if there is one; the topic, which lasts
for some sentences; and which verb a noun prefers.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Pattern = Callable[[Floats, Floats], NDArray[np.bool_]]
Random = np.random.Generator

# -- pictures ----------------------------------------------------------------------------------

SIDE = 56
NOISE = 0.06  # standard deviation; brightness goes from 0 to 1

SHAPES: dict[str, Pattern] = {
    "disc": lambda u, v: np.hypot(u, v) < 0.9,
    "square": lambda u, v: np.maximum(abs(u), abs(v)) < 0.8,
    "triangle": lambda u, v: (v > -0.5) & (v < 1 - np.sqrt(3) * abs(u)),
    "cross": lambda u, v: (np.minimum(abs(u), abs(v)) < 0.3) & (np.maximum(abs(u), abs(v)) < 1),
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


def draw_pictures(count: int, seed: int) -> Pictures:
    """Return ``count`` pictures in random order, equally many of each class, give or take one."""
    random = np.random.default_rng(seed)
    labels = random.permutation(np.arange(count) % len(CLASSES)).astype(np.int64)
    return np.stack([_picture(int(label), random) for label in labels]), labels


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
    filled = np.where(bright, colour, colour * random.uniform(0, 0.4))
    np.copyto(image, filled, where=inside)


def _turned(x: Floats, y: Floats, angle: float) -> tuple[Floats, Floats]:
    return x * np.cos(angle) + y * np.sin(angle), y * np.cos(angle) - x * np.sin(angle)


# -- sentences ---------------------------------------------------------------------------------

TOPICS, NOUNS, VERBS = 8, 8, 4
STAYS = 0.9  # that the next sentence has the same topic
DESCRIBED, CLAUSE, OBJECT = 0.4, 0.2, 0.7  # a noun has an adjective, a clause; a verb an object
PREFERRED = 0.7  # that a verb is the one that its noun prefers

DETERMINERS = (("the", "a", "this"), ("the", "some", "these"))  # of one, of several
ADJECTIVES = [
    *("old", "new", "big", "small", "red", "blue", "fast", "slow"),
    *("warm", "cold", "high", "low", "soft", "hard", "near", "far"),
]
WORDS = (
    *(".", "that", "the", "a", "this", "some", "these"),
    *ADJECTIVES,
    *(f"noun{t}.{n}{end}" for t in range(TOPICS) for n in range(NOUNS) for end in ("", "s")),
    *(f"verb{t}.{n}{end}" for t in range(TOPICS) for n in range(VERBS) for end in ("s", "")),
)
"""The vocabulary: nouns and verbs by topic, number within it, and form."""
_PLACE = {word: place for place, word in enumerate(WORDS)}
_NOUN, _VERB = _PLACE["noun0.0"], _PLACE["verb0.0s"]
_ZIPF = 1 / np.arange(1, NOUNS + 1)


def draw_text(count: int, seed: int) -> NDArray[np.int64]:
    """Return the first ``count`` words, as places in WORDS, of the text of that seed."""
    random = np.random.default_rng(seed)
    words: list[int] = []
    topic = int(random.integers(TOPICS))
    while len(words) < count:
        if random.random() > STAYS:
            topic = int(random.integers(TOPICS))
        words += [*_clause(topic, random), _PLACE["."]]
    return np.array(words[:count], dtype=np.int64)


def _clause(topic: int, random: Random) -> Iterator[int]:
    """Yield subject, verb and perhaps an object."""
    noun, several = yield from _phrase(topic, random)
    if random.random() < CLAUSE:
        yield _PLACE["that"]
        yield _verb(topic, noun, several, random)
        yield from _phrase(topic, random)
    yield _verb(topic, noun, several, random)
    if random.random() < OBJECT:
        yield from _phrase(topic, random)


def _phrase(topic: int, random: Random) -> Generator[int, None, tuple[int, int]]:
    """Yield determiner, perhaps an adjective, and a noun; return which noun, and whether it is several."""
    several, noun = int(random.integers(2)), int(random.choice(NOUNS, p=_ZIPF / _ZIPF.sum()))
    yield _PLACE[DETERMINERS[several][int(random.integers(3))]]
    if random.random() < DESCRIBED:
        yield _PLACE[ADJECTIVES[int(random.integers(len(ADJECTIVES)))]]
    yield _NOUN + 2 * (topic * NOUNS + noun) + several
    return noun, several


def _verb(topic: int, noun: int, several: int, random: Random) -> int:
    preferred = random.random() < PREFERRED
    number = noun % VERBS if preferred else int(random.integers(VERBS))
    return _VERB + 2 * (topic * VERBS + number) + several
