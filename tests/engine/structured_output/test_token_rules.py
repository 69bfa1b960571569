"""Allowed tokens and forbidden words: a matcher accepts exactly the tokens of its mask."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from sglcore.engine.structured_output.grammar_cache import open_grammars
from sglcore.engine.structured_output.grammar_llguidance import Llguidance
from sglcore.engine.structured_output.grammar_vocabulary import Vocabulary
from sglcore.engine.structured_output.token_rules import RuledTokens
from sglcore.engine.tokenizers.text_codec import TextCodec
from sglcore.sampling.grammar_spec import Grammar, GrammarError, Thinking, TokenRules
from sglcore.schedule.request import Matcher

CODEC = TextCodec(Path(str(files("sglcore") / "assets" / "demo")))
SIZE = CODEC.tokenizer.get_vocab_size(with_added_tokens=True)
LONG = "xylophones"


EOS = 2
VOCABULARY = Vocabulary(CODEC.tokenizer, SIZE, (EOS,))


def ids(text: str) -> list[int]:
    return CODEC.encode(text, special=False)


def started(rules: TokenRules, form: str | None = None) -> Matcher:
    """Start a matcher of the rules, with a regular expression as grammar if `form` is given."""
    inner = None if form is None else Llguidance(VOCABULARY).compile(Grammar("regex", form))
    return RuledTokens(rules, VOCABULARY, inner, has_end=form is not None).start()


def allowed(matcher: Matcher) -> set[int]:
    words = np.zeros(-(-SIZE // 32), np.int32)
    matcher.fill(words)
    return {token for token in range(SIZE) if words.view(np.uint32)[token >> 5] >> (token & 31) & 1}


def taken(matcher: Matcher) -> set[int]:
    found: set[int] = set()
    for token in range(SIZE):
        if matcher.accept(token):
            found.add(token)
            matcher.rollback(1)
    return found


@pytest.mark.parametrize("begin", [[], ids(LONG)[:-1], ids("the " + LONG)[:-1], ids(LONG)[:1]])
@pytest.mark.parametrize("rules", [TokenRules((), (LONG, "a")), TokenRules(tuple(ids(LONG) + ids(" a")), (LONG, " a"))])
def test_the_mask_is_what_is_taken_after_any_beginning(rules: TokenRules, begin: list[int]) -> None:
    matcher = started(rules)
    assert all(matcher.accept(token) for token in begin if not rules.allowed or token in rules.allowed)
    assert allowed(matcher) == taken(matcher)
    before = allowed(matcher)
    matcher.rollback(0)
    assert allowed(matcher) == before


def test_a_word_of_several_tokens_loses_its_last_one_alone() -> None:
    *begin, last = ids(LONG)
    assert begin, "the test wants a word of several tokens"
    matcher = started(TokenRules((), (LONG,)))
    assert last in allowed(matcher)
    assert all(matcher.accept(token) for token in begin)
    assert not matcher.accept(last) and last not in allowed(matcher)
    assert matcher.accept(begin[0]) and last in allowed(matcher)
    matcher.rollback(1)
    assert not matcher.accept(last)


@pytest.mark.parametrize("before", ["", " ", "the", "the "])
@pytest.mark.parametrize("word", [LONG, "fox", "a", "\u00e9", "two words"])
def test_a_word_may_come_neither_at_once_nor_behind_a_space(word: str, before: str) -> None:
    known, spelled = (ids(before), ids(word)) if not before.endswith(" ") else (ids(before[:-1]), ids(" " + word))
    *begin, last = spelled
    matcher = started(TokenRules((), (word,)))
    assert all(matcher.accept(token) for token in (*known, *begin))
    assert last not in allowed(matcher) and not matcher.accept(last)


def test_beside_a_form_both_hold_and_the_form_says_where_the_end_is() -> None:
    word = ids("fox")
    matcher = started(TokenRules((*word, *ids("cat")), ()), "fox|dog")
    for place, token in enumerate(word):
        assert allowed(matcher) == {token} and matcher.accept(token), place
    assert allowed(matcher) == {EOS} and not matcher.error


def test_where_no_token_is_left_that_is_told_until_tokens_are_taken_back() -> None:
    first = ids("fox")[0]
    matcher = started(TokenRules((first,), ()), "fox|dog")
    assert allowed(matcher) == {first} and matcher.accept(first)
    assert allowed(matcher) == set() and "leave no token" in matcher.error
    matcher.rollback(1)
    assert allowed(matcher) == {first} and not matcher.error


@pytest.mark.parametrize(
    ("rules", "form"),
    [
        (TokenRules(tuple(ids("cat")), ()), "fox|dog"),
        (TokenRules(tuple(ids(" a")), (" a",)), None),
    ],
)
def test_rules_that_leave_no_token_to_begin_with_are_refused(rules: TokenRules, form: str | None) -> None:
    with pytest.raises(GrammarError, match="allowed_token_ids and bad_words leave no token"):
        started(rules, form)


def test_an_engine_lets_a_form_end_where_its_end_token_is_not_among_those_that_alone_may_come() -> None:
    """Without a grammar, which would say where the end is, only the allowed tokens may come."""
    grammars, _ = open_grammars("llguidance", VOCABULARY)
    assert grammars is not None
    word = ids("fox")
    rules = TokenRules(tuple(word), ())
    matcher = grammars.compile(Grammar("regex", "fox"), None, rules).start()
    assert all(matcher.accept(token) for token in word) and allowed(matcher) == {EOS}
    assert allowed(grammars.compile(None, None, rules).start()) == set(word)
    grammars.close()


def test_after_reasoning_without_a_form_only_the_allowed_tokens_may_come() -> None:
    grammars, _ = open_grammars("llguidance", VOCABULARY)
    assert grammars is not None
    mark = ids("</think>")
    rules = TokenRules((*mark, *ids("fox")), ())
    matcher = grammars.compile(None, Thinking("</think>", "</think>", may_stop=True), rules).start()
    assert allowed(matcher) == set(rules.allowed)
    assert all(matcher.accept(token) for token in mark)
    assert allowed(matcher) == taken(matcher) == set(rules.allowed)
    grammars.close()


@pytest.mark.parametrize(
    "rules",
    [
        TokenRules(tuple({*ids("fox"), *ids("fox fox"), *ids("o")}), ()),
        TokenRules(tuple({*ids("fox"), *ids("fox fox")}), ("fox fox fox",)),
        TokenRules((), ("foxes", "fox fox fox")),
    ],
)
def test_beside_a_form_too_the_mask_is_what_is_taken(rules: TokenRules) -> None:
    matcher = started(rules, "fox( fox)*")
    tried = {EOS, *ids("fox fox"), *ids("of dog a"), *range(0, SIZE, 101)}
    for token in (*ids("fox fox"), None):
        found = allowed(matcher)
        assert not matcher.error
        for each in tried | found:
            is_taken = matcher.accept(each)
            assert is_taken is (each in found), each
            matcher.rollback(int(is_taken))
        assert token is None or matcher.accept(token)
    assert EOS in allowed(matcher)


def test_tokens_that_one_of_two_rules_refuses_count_for_neither() -> None:
    first, second = ids("fox"), ids(" fox")
    matcher = started(TokenRules((), ("fox fox fox",)), "fox( fox){1,9}")
    assert len(first) > 0 and all(matcher.accept(token) for token in (*first, *second))
    *begin, last = second
    for _ in range(3):
        assert all(matcher.accept(token) for token in begin)
        assert not matcher.accept(last) and last not in allowed(matcher)
        matcher.rollback(len(begin))
    assert not matcher.accept(ids("dog")[0])
    matcher.rollback(0)
    assert EOS in allowed(matcher)
    matcher.rollback(len(second))
    assert all(matcher.accept(token) for token in second) and EOS in allowed(matcher)


def test_matchers_of_the_same_rules_go_their_own_ways() -> None:
    *begin, last = ids(LONG)
    rules = RuledTokens(TokenRules((), (LONG,)), VOCABULARY, None)
    first, second = rules.start(), rules.start()
    assert all(first.accept(token) for token in begin)
    assert last not in allowed(first) and last in allowed(second) and last in allowed(rules.start())
    assert second.accept(begin[0]) and not first.accept(last) and second.accept(last)


@pytest.mark.parametrize("size", [33, 64, 65])
def test_masks_have_the_bits_of_the_models_vocabulary(size: int) -> None:
    listed = (0, 31, 32, size - 1)
    words = Tokenizer(models.WordLevel({f"w{token}": token for token in range(size)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    vocabulary = Vocabulary(words, size, (5,))
    rules = RuledTokens(TokenRules(listed, ("w31", f"w{size - 1}")), vocabulary, None)
    found = np.zeros(-(-size // 32), np.int32)
    rules.start().fill(found)
    assert np.flatnonzero(np.unpackbits(found.view(np.uint8), bitorder="little")).tolist() == [0, 32][: 1 + (size > 33)]
    free = RuledTokens(TokenRules((), ("w31", "w32")), vocabulary, None).start()
    assert [token for token in range(size) if not free.accept(token)] == [31, 32]
