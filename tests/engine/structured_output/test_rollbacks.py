"""After a rollback of any number of tokens, every matcher, wrapped or not, equals one that never
saw them."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sglcore.engine.structured_output.grammar_cache import Grammars, open_grammars
from sglcore.engine.structured_output.grammar_vocabulary import Vocabulary
from sglcore.engine.structured_output.repetition_penalty import KEPT_STEPS, RepetitionMatcher
from sglcore.engine.tokenizers.text_codec import TextCodec
from sglcore.sampling.grammar_spec import Grammar, Repetition, Thinking, TokenRules
from sglcore.schedule.request import Matcher

CODEC = TextCodec(Path(str(files("sglcore") / "assets" / "demo")))
SIZE = CODEC.tokenizer.get_vocab_size(with_added_tokens=True)
COUNTS = (1, 2, KEPT_STEPS - 1, KEPT_STEPS, KEPT_STEPS + 1, 33, 65, 110)
"""Numbers of tokens to roll back: fewer than the kept steps, equal, and more; over a hundred cross
the end mark of the reasoning and its grammar."""
TEXT = "Once upon a time there was a fox. " * 6
FORM = Grammar("regex", r'\{"a": "[a-zA-Z. ]{0,900}"\}')
TAGS = Grammar("ebnf", 'root ::= "[" ([a-z] | [A-Z] | [. ])* "]"')


@cache
def grammars(backend: str):
    """Open the grammars of a library."""
    found, _ = open_grammars(backend, Vocabulary(CODEC.tokenizer, SIZE, (2,)))
    assert found is not None
    return found


def spelled(text: str) -> list[int]:
    return CODEC.encode(text, special=False)


THINKING = Thinking("</think>", "</think>")
KINDS = {
    "a form": (FORM, None, None, '{"a": "' + TEXT + TEXT + '"}'),
    "a grammar": (TAGS, None, None, "[" + TEXT + TEXT + "]"),
    "reasoning": (None, THINKING, None, TEXT + "</think>" + TEXT + TEXT),
    "reasoning before a form": (FORM, THINKING, None, TEXT + '</think>{"a": "' + TEXT + '"}'),
    "words that may not come": (None, None, TokenRules((), ("xylophones", "foxes")), TEXT + TEXT + TEXT),
    "words that may not come in a form": (FORM, None, TokenRules((), ("xylophones",)), '{"a": "' + TEXT + TEXT + '"}'),
}


def state(matcher: Matcher) -> tuple[bytes, str]:
    """Return the token mask now, and the error."""
    words = np.zeros(-(-SIZE // 32), np.int32)
    matcher.fill(words)
    return words.tobytes(), matcher.error


@pytest.mark.parametrize("backend", ["llguidance", "xgrammar"])
@pytest.mark.parametrize("kind", list(KINDS))
def test_tokens_that_are_taken_back_leave_no_trace(backend: str, kind: str) -> None:
    pytest.importorskip(backend, reason=f"{backend} is not installed")
    grammar, thinking, rules, text = KINDS[kind]
    compiled = grammars(backend).compile(grammar, thinking, rules)
    ids = spelled(text)
    fresh, states = compiled.start(), []
    for token in ids:
        states.append(state(fresh))
        assert fresh.accept(token), kind
    states.append(state(fresh))
    matcher, place = compiled.start(), 0
    assert len(ids) > max(COUNTS)
    for count in (*COUNTS, *COUNTS[::-1]):
        while place < len(ids):
            assert matcher.accept(ids[place])
            place += 1
        matcher.rollback(count)
        place -= count
        assert state(matcher) == states[place], count
        for _ in range(min(3, count)):
            assert matcher.accept(ids[place])
            place += 1
        assert state(matcher) == states[place], count
    matcher.rollback(place)
    assert state(matcher) == states[0]


class GivesUp:
    """A grammar with matchers that give up at the second token."""

    error = ""

    def __init__(self) -> None:
        self.count = 0

    def start(self) -> Any:
        return GivesUp()

    def accept(self, token_id: int) -> bool:
        self.count += 1
        self.error = "it gave up" if self.count > 1 else ""
        return True

    def rollback(self, count: int) -> None:
        self.count, self.error = self.count - count, ""

    def fill(self, words: np.ndarray) -> None:
        words[:] = 0 if self.error else -1


WORDS = TokenRules((), ("xylophones",))
AGAIN = Repetition(0.8, 1.75, 1, -1, ("\n",))
HOLDERS: dict[str, tuple[Thinking | None, TokenRules | None, Repetition | None, str]] = {
    "reasoning": (THINKING, None, None, "Well.</think>"),
    "words that may not come": (None, WORDS, None, ""),
    "what repeats": (None, None, AGAIN, ""),
    "all of them": (THINKING, WORDS, AGAIN, "Well.</think>"),
}


@pytest.mark.parametrize("kind", list(HOLDERS))
def test_what_holds_a_matcher_tells_why_that_gave_up_until_tokens_are_taken_back(kind: str) -> None:
    thinking, rules, repetition, before = HOLDERS[kind]
    backend: Any = SimpleNamespace(
        name="fake", vocabulary=Vocabulary(CODEC.tokenizer, SIZE, (2,)), compile=lambda grammar: GivesUp()
    )
    made = Grammars(backend)
    matcher = made.compile(FORM, thinking, rules, repetition).start()
    assert all(matcher.accept(token) for token in (*spelled(before), *spelled("fox")[:1]))
    assert not matcher.error and np.frombuffer(state(matcher)[0], np.int32).any()
    assert matcher.accept(spelled("dog")[0]) and matcher.error == "it gave up"
    assert state(matcher) == (bytes(len(state(matcher)[0])), "it gave up")
    matcher.rollback(1)
    assert not matcher.error and np.frombuffer(state(matcher)[0], np.int32).any()
    made.close()


def test_what_repeats_is_found_anew_however_much_is_taken_back_over_a_form() -> None:
    """A repetition penalty with a grammar: both have their former state."""
    asked = Repetition(0.8, 1.75, 1, -1, ("\n",))
    compiled = grammars("llguidance").compile(FORM, None, None, asked)
    ids = spelled('{"a": "' + TEXT + TEXT + '"}')
    prompt = np.array(spelled(TEXT), np.int32)

    def started() -> RepetitionMatcher:
        found = compiled.start_after(prompt).matcher
        assert isinstance(found, RepetitionMatcher)
        return found

    def seen(matcher: RepetitionMatcher):
        found, lost = matcher.change()
        return state(matcher), found.tolist(), lost.tolist()

    fresh, states = started(), []
    for token in ids:
        states.append(seen(fresh))
        assert fresh.accept(token)
    assert sum(bool(found) for _, found, _ in states) > 100
    matcher, place = started(), 0
    for count in COUNTS:
        while place < len(ids):
            assert matcher.accept(ids[place])
            place += 1
        matcher.rollback(count)
        place -= count
        assert seen(matcher) == states[place], count
