"""What grammars are compiled for, and to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from tokenizers import Tokenizer

from sglcore.schedule.request import Matcher


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What a mask is about: the tokenizer's tokens, `size` logits (ids beyond the tokenizer's are never allowed), and the
    ids that end an output."""

    tokenizer: Tokenizer
    size: int
    eos_ids: tuple[int, ...]


class CompiledGrammar(Protocol):
    """A grammar ready to be followed, by any number of samples."""

    def start(self) -> Matcher:
        """A matcher at the beginning, independent of all others."""
        ...
