"""The mixture: the categories of documents, their weights, and how a seed selects a document."""

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import MappingProxyType

from . import arithmetic, facts, functions, letters, records, stories
from .chat import BOS, END, Dialogue, dialogue, long_dialogue, render
from .sampling import Split


@dataclass(frozen=True, slots=True)
class Document:
    """One document: its category and its whole text, special tokens included."""

    category: str
    text: str


def plain(text: str) -> str:
    """Return the text of a document that is not a dialogue, with its special tokens."""
    return f"{BOS}{text}{END}"


def chatted(found: Dialogue) -> str:
    """The text of a dialogue."""
    return render(found.messages())


CATEGORIES: MappingProxyType[str, tuple[int, Callable[[random.Random, Split], str]]] = MappingProxyType(
    {
        "story": (12, lambda rng, split: plain(stories.story(rng))),
        "chat": (50, lambda rng, split: chatted(dialogue(rng, split))),
        "arithmetic": (30, lambda rng, split: plain(arithmetic.sheet(rng, split))),
        "json": (8, lambda rng, split: plain(records.page(rng))),
        "python": (6, lambda rng, split: plain(functions.module(rng))),
        "letters": (5, lambda rng, split: plain(letters.letter(rng))),
        "facts": (10, lambda rng, split: plain(facts.statements(rng, split))),
    }
)


def document(seed: int, index: int, split: Split = "train", category: str | None = None) -> Document:
    """The document number `index` of a seed; the same arguments give the same text on every
    machine."""
    rng = random.Random(f"{split}:{seed}:{index}")
    if category is None:
        category = rng.choices(tuple(CATEGORIES), tuple(weight for weight, _ in CATEGORIES.values()))[0]
    return Document(category, CATEGORIES[category][1](rng, split))


def long_document(seed: int, index: int, split: Split = "train") -> Document:
    """A document of several hundred tokens, which teaches the positions up to 1,024."""
    rng = random.Random(f"long:{split}:{seed}:{index}")
    if rng.random() < 0.5:
        return Document("story", plain(stories.long_story(rng)))
    return Document("chat", chatted(long_dialogue(rng, split)))


def documents(seed: int, count: int, split: Split = "train") -> Iterator[Document]:
    """The first `count` documents of a seed."""
    return (document(seed, index, split) for index in range(count))
