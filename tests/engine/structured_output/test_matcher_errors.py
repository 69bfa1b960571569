"""What a matcher says after a token that was refused, by every combination of constraints, and how
reasoning begins and ends by its own tokens."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from sglcore.engine.structured_output.grammar_cache import Grammars, open_backend
from sglcore.engine.structured_output.grammar_vocabulary import Vocabulary
from sglcore.engine.structured_output.grammar_xgrammar import XgrammarMatcher
from sglcore.engine.tokenizers.text_codec import TextCodec
from sglcore.sampling.grammar_spec import Grammar, Repetition, Thinking, TokenRules
from sglcore.schedule.request import Matcher

EOS = 2
END = "</think>"
FORM = Grammar("regex", "fox( fox)*")
THINKING, RULES = Thinking(END, END), TokenRules((), ("foxes",))
AGAIN = Repetition(0.8, 1.75, 2, -1, ())
COMBINED: dict[str, tuple[Thinking | None, TokenRules | None, Repetition | None]] = {
    "a form alone": (None, None, None),
    "reasoning": (THINKING, None, None),
    "words that may not come": (None, RULES, None),
    "what repeats": (None, None, AGAIN),
    "all of them": (THINKING, RULES, AGAIN),
}


@cache
def marked() -> Tokenizer:
    """Return the demo's tokenizer with single tokens for the marks of reasoning."""
    made = Tokenizer.from_str(TextCodec(Path(str(files("sglcore") / "assets" / "demo"))).tokenizer.to_str())
    made.add_tokens([AddedToken(text, special=False) for text in ("<think>", END)])
    return made


@cache
def grammars(name: str) -> Grammars:
    return Grammars(open_backend(name, Vocabulary(marked(), marked().get_vocab_size(), (EOS,))))


def ids(text: str) -> list[int]:
    return marked().encode(text, add_special_tokens=False).ids


def allowed(matcher: Matcher) -> list[int]:
    size = marked().get_vocab_size()
    words = np.full(-(-size // 32), 0x55555555, np.int32)
    matcher.fill(words)
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[:size]).tolist()


@pytest.mark.parametrize("name", ["llguidance", "xgrammar"])
@pytest.mark.parametrize("kind", COMBINED)
def test_a_token_that_was_refused_is_forgotten_with_a_rollback_of_none(kind: str, name: str) -> None:
    pytest.importorskip(name, reason=f"{name} is not installed")
    thinking, rules, repetition = COMBINED[kind]
    matcher = grammars(name).compile(FORM, thinking, rules, repetition).start()
    before = [*ids(f"a dog{END}" if thinking else ""), *ids("fox fox")]
    assert all(matcher.accept(token) for token in before)
    wanted = allowed(matcher)
    assert EOS in wanted and 3 < len(wanted) < 100
    for wrong in (ids("dog")[0], ids(" dog")[0]):
        assert not matcher.accept(wrong)
        matcher.rollback(0)
        assert not matcher.error and allowed(matcher) == wanted
    assert matcher.accept(ids(" fox")[0]) and not matcher.error


@pytest.mark.parametrize("kind", COMBINED)
def test_without_a_form_every_token_may_come_whatever_the_mask_held_before(kind: str) -> None:
    thinking, rules, repetition = COMBINED[kind]
    if thinking is rules is repetition is None:
        return
    matcher = grammars("llguidance").compile(None, thinking, rules, repetition).start()
    free = marked().get_vocab_size() - bool(thinking)
    assert len(allowed(matcher)) == free and (EOS in allowed(matcher)) is not bool(thinking)
    assert matcher.accept(ids("fox")[0])
    assert all(matcher.accept(token) for token in ids(END)) and EOS in allowed(matcher)
    assert len(allowed(matcher)) == marked().get_vocab_size()


@pytest.mark.parametrize("budget", [0, 1, 3])
def test_the_budget_of_reasoning_counts_from_the_token_that_begins_it(budget: int) -> None:
    begin, end = ids("<think>")[0], ids(END)[0]
    matcher = grammars("llguidance").compile(FORM, Thinking(END, f"!{END}", "<think>", budget)).start()
    assert begin in allowed(matcher) and end not in allowed(matcher)
    closing = ids(f"!{END}")
    for _ in range(2):
        assert matcher.accept(begin)
        for _ in range(budget):
            assert len(allowed(matcher)) > 2000 and matcher.accept(begin)
        for token in closing:
            assert allowed(matcher) == [token] and not matcher.accept(ids("a")[0]) and matcher.accept(token)
        assert begin not in allowed(matcher) and ids("fox")[0] in allowed(matcher)
        matcher.rollback(1 + budget + len(closing))
    assert matcher.accept(ids("fox")[0]) and begin not in allowed(matcher) and not matcher.accept(begin)


def test_the_end_of_reasoning_within_its_budget_begins_the_answer() -> None:
    matcher = grammars("llguidance").compile(FORM, Thinking(END, f"!{END}", budget=2)).start()
    assert matcher.accept(ids("a")[0]) and len(allowed(matcher)) > 2000
    assert matcher.accept(ids(END)[0]) and ids("fox")[0] in allowed(matcher) and len(allowed(matcher)) < 100
    matcher.rollback(1)
    assert matcher.accept(ids("a")[0]) and allowed(matcher) == [ids("!")[0]]


@pytest.mark.parametrize("name", ["llguidance", "xgrammar"])
@pytest.mark.parametrize("text", ["{}", "true", '{"title": "anything"}'])
@pytest.mark.parametrize("value", ["1", '"a"', "null", "[1, {}]", '{"a": [true]}'])
def test_a_schema_that_forbids_nothing_takes_every_value(name: str, text: str, value: str) -> None:
    pytest.importorskip(name, reason=f"{name} is not installed")
    matcher = grammars(name).compile(Grammar("json_schema", text)).start()
    assert all(matcher.accept(token) for token in ids(value)), value
    assert EOS in allowed(matcher)


@pytest.mark.parametrize("name", ["llguidance", "xgrammar"])
@pytest.mark.parametrize(("text", "special", "is_text"), [("tool", False, True), ("tool", True, False)])
def test_an_added_token_is_text_unless_it_is_special(name: str, text: str, special: bool, is_text: bool) -> None:
    pytest.importorskip(name, reason=f"{name} is not installed")
    extended = Tokenizer.from_str(marked().to_str())
    extended.add_tokens([AddedToken(f"{text} {text}", special=special, normalized=False)])
    added = extended.token_to_id(f"{text} {text}")
    assert added is not None
    backend = open_backend(name, Vocabulary(extended, extended.get_vocab_size(), (EOS,)))
    words = np.zeros(-(-extended.get_vocab_size() // 32), np.int32)
    backend.compile(Grammar("regex", "[a-z ]{0,99}")).start().fill(words)
    assert bool(words.view(np.uint32)[added >> 5] >> (added & 31) & 1) is is_text


def test_a_library_that_fails_leaves_its_reason_and_an_empty_mask_until_tokens_are_taken_back() -> None:
    said = "[12:34:56] /src/matcher.cc:99: it gave\n up"
    taken = list[int]()

    def fails(*_: Any) -> bool:
        raise RuntimeError(said)

    broken = SimpleNamespace(accept_token=fails, fill_next_token_bitmask=fails, rollback=taken.append)
    for use in ("accept", "fill"):
        matcher, words = XgrammarMatcher(broken), np.full(3, -1, np.int32)
        if use == "accept":
            assert matcher.accept(5) is False
        else:
            matcher.fill(words)
            assert not words.any()
        assert matcher.error == "it gave up"
        matcher.fill(words)
        assert not words.any() and matcher.error == "it gave up"
        matcher.rollback(2)
        assert matcher.error == ""
    assert taken == [2, 2]
