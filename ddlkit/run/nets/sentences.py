"""A text that a grammar draws: sentences about a topic, with verbs that agree, some with a clause inside.

A sentence is a subject, a verb, mostly an object, and a full stop. Nouns and verbs are those of a topic,
which lasts for some sentences. What can be learned: which word may follow; number, over a relative clause if
there is one; the topic; and which verb a noun prefers. The same seed draws the same text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

TOPICS, NOUNS, VERBS = 8, 8, 4
STAYS = 0.9  # that the next sentence has the same topic
DESCRIBED, CLAUSE, OBJECT = 0.4, 0.2, 0.7  # a noun has an adjective, a clause; a verb an object
PREFERRED = 0.7  # that a verb is the one that its noun prefers

DETERMINERS = (("the", "a", "this"), ("the", "some", "these"))  # of one, of several
ADJECTIVES = [
    *("old", "new", "big", "small", "red", "blue", "fast", "slow"),
    *("warm", "cold", "high", "low", "soft", "hard", "near", "far"),
]


def _forms(kind: str, count: int, plural: tuple[str, str]) -> list[str]:
    """Words by topic, number within it, and form."""
    numbers = ((topic, number) for topic in range(TOPICS) for number in range(count))
    return [f"{kind}{topic}.{number}{end}" for topic, number in numbers for end in plural]


WORDS = (
    *(".", "that", "the", "a", "this", "some", "these"),
    *ADJECTIVES,
    *_forms("noun", NOUNS, ("", "s")),
    *_forms("verb", VERBS, ("s", "")),
)
"""The vocabulary."""
_PLACE = {word: place for place, word in enumerate(WORDS)}
_NOUN, _VERB = _PLACE["noun0.0"], _PLACE["verb0.0s"]
_ZIPF = 1 / np.arange(1, NOUNS + 1)


@dataclass(frozen=True)
class Text:
    """words : (n,) places in WORDS."""

    words: NDArray[np.int64]

    @property
    def sha256(self) -> str:
        """Hash of all words."""
        return hashlib.sha256(self.words.tobytes()).hexdigest()

    def sequences(self, steps: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(n, steps) words, one sequence after the other, and the word after each."""
        count = (len(self.words) - 1) // steps
        words, following = self.words[: count * steps], self.words[1 : count * steps + 1]
        return words.reshape(count, steps), following.reshape(count, steps)


def draw(count: int, seed: int) -> Text:
    """The first ``count`` words of the text of that seed."""
    random = np.random.default_rng(seed)
    words: list[int] = []
    topic = int(random.integers(TOPICS))
    while len(words) < count:
        if random.random() > STAYS:
            topic = int(random.integers(TOPICS))
        words += [*_clause(topic, random), _PLACE["."]]
    return Text(np.array(words[:count], dtype=np.int64))


def _clause(topic: int, random: np.random.Generator) -> Iterator[int]:
    """Yield subject, verb and perhaps an object."""
    several, noun = _noun(random)
    yield from _phrase(topic, noun, several, random)
    if random.random() < CLAUSE:
        yield _PLACE["that"]
        yield _verb(topic, noun, several, random)
        yield from _object(topic, random)
    yield _verb(topic, noun, several, random)
    if random.random() < OBJECT:
        yield from _object(topic, random)


def _noun(random: np.random.Generator) -> tuple[int, int]:
    return int(random.integers(2)), int(random.choice(NOUNS, p=_ZIPF / _ZIPF.sum()))


def _object(topic: int, random: np.random.Generator) -> Iterator[int]:
    several, noun = _noun(random)
    yield from _phrase(topic, noun, several, random)


def _phrase(topic: int, noun: int, several: int, random: np.random.Generator) -> Iterator[int]:
    yield _PLACE[DETERMINERS[several][int(random.integers(3))]]
    if random.random() < DESCRIBED:
        yield _PLACE[ADJECTIVES[int(random.integers(len(ADJECTIVES)))]]
    yield _NOUN + 2 * (topic * NOUNS + noun) + several


def _verb(topic: int, noun: int, several: int, random: np.random.Generator) -> int:
    preferred = random.random() < PREFERRED
    number = noun % VERBS if preferred else int(random.integers(VERBS))
    return _VERB + 2 * (topic * VERBS + number) + several
