"""Rules in addition to a grammar: each passes to the grammar what concerns it, and reports its
errors."""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from sglcore.engine.structured_output.grammar_vocabulary import Vocabulary
from sglcore.engine.structured_output.repetition_penalty import RepetitionMatcher, RepetitionRules
from sglcore.engine.structured_output.thinking import ThinkingGrammar
from sglcore.engine.structured_output.token_rules import RuledTokens
from sglcore.engine.tokenizers.text_codec import TextCodec
from sglcore.sampling.grammar_spec import Repetition, Thinking, TokenRules
from sglcore.schedule.request import Ints, Matcher

CODEC = TextCodec(Path(str(files("sglcore") / "assets" / "demo")))
SIZE = CODEC.tokenizer.get_vocab_size()
VOCABULARY = Vocabulary(CODEC.tokenizer, SIZE, (2,))
SCRIPT = CODEC.encode("The fox ran. The fox ran. The fox sat", special=False)
OVER = "the script is over"
MARK = "</think>"


class Script:
    """A grammar of one text, which fails after its end."""

    def __init__(self) -> None:
        self.place = 0

    def start(self) -> Script:
        return Script()

    @property
    def error(self) -> str:
        return OVER if self.place == len(SCRIPT) else ""

    def accept(self, token_id: int) -> bool:
        is_next = not self.error and token_id == SCRIPT[self.place]
        self.place += is_next
        return is_next

    def rollback(self, count: int) -> None:
        self.place -= count

    def fill(self, words: Ints) -> None:
        bits = np.zeros(32 * len(words), np.uint8)
        bits[SCRIPT[self.place : self.place + 1]] = 1
        words.view(np.uint8)[:] = np.packbits(bits, bitorder="little")


def ruled() -> Matcher:
    return RuledTokens(TokenRules((), ("xylophones",)), VOCABULARY, Script(), has_end=True).start()


def less_repetitive() -> RepetitionMatcher:
    return RepetitionRules(Repetition(1.0, 2.0, 2, -1, ()), VOCABULARY, Script()).start(np.zeros(0, np.int32))


def after_thought() -> Matcher:
    matcher = ThinkingGrammar(Thinking(MARK, MARK, budget=0), VOCABULARY, Script()).start()
    assert all(matcher.accept(token) for token in CODEC.encode(MARK, special=False))
    return matcher


def allowed(matcher: Matcher) -> list[int]:
    words = np.full(-(-SIZE // 32), -1, np.int32)
    matcher.fill(words)
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()


@pytest.mark.parametrize("start", [ruled, less_repetitive, after_thought])
def test_a_grammar_is_followed_into_its_error_and_back(start: Callable[[], Matcher]) -> None:
    matcher = start()
    for place, token in enumerate(SCRIPT):
        assert allowed(matcher) == [token] and not matcher.error, place
        assert not matcher.accept(token + 1) and matcher.accept(token)
    assert allowed(matcher) == [] and matcher.error == OVER
    for count in (1, 3, 5):
        matcher.rollback(count)
        assert allowed(matcher) == [SCRIPT[-count]] and not matcher.error
        assert all(matcher.accept(token) for token in SCRIPT[-count:]) and matcher.error == OVER


def test_a_token_that_a_grammar_refuses_is_no_part_of_a_repetition() -> None:
    refusing, plain = less_repetitive(), less_repetitive()
    for token in SCRIPT[:-1]:
        assert not refusing.accept(SCRIPT[-1])
        assert refusing.accept(token) and plain.accept(token)
    for found, wanted in zip(refusing.change(), plain.change(), strict=True):
        assert found.tolist() == wanted.tolist() != []


def test_a_bad_word_without_tokens_forbids_nothing() -> None:
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    matcher = RuledTokens(TokenRules((), (" ", "b")), Vocabulary(words, 3, (0,)), None).start()
    assert [token for token in range(3) if matcher.accept(token)] == [0, 1]
