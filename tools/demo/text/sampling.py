"""Seeded choices for all writers, and the rule that keeps test examples out of the training
text."""

import random
import zlib
from collections.abc import Sequence
from typing import Literal, TypeVar

from .words import BOYS, GIRLS, PEOPLE

Split = Literal["train", "test"]
Item = TypeVar("Item")

ONSETS = ("B", "D", "K", "L", "M", "N", "P", "R", "S", "T", "V", "Z", "J", "F", "Br", "Tr", "Kl", "Dr")
VOWELS = ("a", "e", "i", "o", "u", "ai", "ee")
ENDINGS = ("n", "l", "s", "ra", "na", "lo", "ko", "mi", "ta", "x", "ck", "rin", "dor", "")


def held_out(key: str) -> bool:
    """Return whether the example `key` belongs to the test split: one in ten, by checksum, the same
    on every machine."""
    return zlib.crc32(key.encode()) % 10 == 0


def say(rng: random.Random, choices: Sequence[str], **words: object) -> str:
    """One of `choices`, with its fields filled in."""
    return rng.choice(choices).format(**words)


def two(rng: random.Random, choices: Sequence[Item]) -> tuple[Item, Item]:
    """Two different members of `choices`."""
    first, second = rng.sample(choices, 2)
    return first, second


def length(rng: random.Random, most: int) -> int:
    """Return how many entries a page has: mostly one, so that greedy sampling stops after the
    first; otherwise two to `most`."""
    return 1 if rng.random() < 0.6 else rng.randint(2, most)


def pronouns(name: str) -> dict[str, str]:
    """The pronouns of a person of this world, as format fields."""
    if name in GIRLS:
        return {"he": "she", "He": "She", "him": "her", "his": "her", "His": "Her", "child": "girl"}
    if name in BOYS:
        return {"he": "he", "He": "He", "him": "him", "his": "his", "His": "His", "child": "boy"}
    return {"he": "they", "He": "They", "him": "them", "his": "their", "His": "Their", "child": "child"}


def any_name(rng: random.Random, invented: float = 0.3) -> str:
    """A name; with probability `invented` one made of syllables, so that copying a name is learnt
    in general."""
    if rng.random() >= invented:
        return rng.choice(PEOPLE)
    return rng.choice(ONSETS) + rng.choice(VOWELS) + rng.choice(ENDINGS)


def a(noun: str) -> str:
    """The noun with its indefinite article."""
    return f"an {noun}" if noun[0] in "aeiou" or noun == "honest" else f"a {noun}"
