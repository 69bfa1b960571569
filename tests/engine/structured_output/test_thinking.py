"""Reasoning before a grammar: free up to its end mark, constrained after it, and ended by force
when its budget is used up."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer

from sglcore.engine.start import embedded_model
from sglcore.engine.structured_output.grammar_cache import Compiling, Grammars, open_backend
from sglcore.engine.structured_output.grammar_vocabulary import Vocabulary
from sglcore.sampling.grammar_spec import Grammar, Thinking
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.request import Matcher, Request
from sglcore.schedule.token_masks import fill_along
from sglcore.serving.replicas.ipc import pack_params, unpack_params
from tests.engine.constrained import Constrained, Sample

EOS = (2, 5)
END = "</think>"
SCHEMA = {
    "type": "object",
    "properties": {"a": {"enum": ["x", "yes"]}},
    "required": ["a"],
    "additionalProperties": False,
}
BOUND = Grammar("json_schema", json.dumps(SCHEMA))


@pytest.fixture(scope="module")
def plain() -> Tokenizer:
    """A tokenizer that spells the marks with several tokens; the last of them may contain text
    after the mark."""
    return Tokenizer.from_file(str(embedded_model() / "tokenizer.json"))


@pytest.fixture(scope="module")
def marked(plain: Tokenizer) -> Tokenizer:
    """A tokenizer with single tokens for the marks."""
    made = Tokenizer.from_str(plain.to_str())
    made.add_tokens([AddedToken(text, special=False) for text in ("<think>", END)])
    return made


@pytest.fixture(scope="module", params=["llguidance", "xgrammar"])
def name(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(request.param, reason=f"{request.param} is not installed")
    return request.param


def compiled(name: str, tokenizer: Tokenizer, grammar: Grammar | None, thinking: Thinking) -> Compiling:
    vocabulary = Vocabulary(tokenizer, tokenizer.get_vocab_size(), EOS)
    return Grammars(open_backend(name, vocabulary)).compile(grammar, thinking)


def started(name: str, tokenizer: Tokenizer, grammar: Grammar | None, thinking: Thinking) -> Matcher:
    return compiled(name, tokenizer, grammar, thinking).start()


def mask(matcher: Matcher, tokenizer: Tokenizer) -> list[int]:
    words = np.zeros(-(-tokenizer.get_vocab_size() // 32), np.int32)
    matcher.fill(words)
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[: tokenizer.get_vocab_size()]).tolist()


def drawn(matcher: Matcher, tokenizer: Tokenizer, seed: int, *, most: int = 200) -> list[int]:
    """Draw some tokens at random, the end mark, and tokens at random until the output may end."""
    rng, ids = np.random.default_rng(seed), list[int]()
    mark = tokenizer.encode(END, add_special_tokens=False).ids
    planned = [*rng.choice(mask(matcher, tokenizer), 2 + seed).tolist(), *mark]
    while planned or len(ids) < most:
        allowed = mask(matcher, tokenizer)
        if set(allowed) & set(EOS):
            break
        ids.append(planned.pop(0) if planned else int(rng.choice(allowed)))
        assert ids[-1] in allowed and matcher.accept(ids[-1]), (matcher.error, ids)
    return ids


@pytest.mark.parametrize("spelled", ["plain", "marked"])
def test_reasoning_is_free_and_what_follows_its_mark_is_bound(
    name: str, spelled: str, request: pytest.FixtureRequest
) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(spelled)
    matcher = started(name, tokenizer, BOUND, Thinking(END, END))
    assert len(mask(matcher, tokenizer)) == tokenizer.get_vocab_size() - len(EOS)
    for seed in range(6):
        matcher = started(name, tokenizer, BOUND, Thinking(END, END))
        text = tokenizer.decode(drawn(matcher, tokenizer, seed), skip_special_tokens=False)
        _, found, answer = text.partition(END)
        assert found and json.loads(answer)["a"] in ("x", "yes"), text


def test_a_token_that_ends_the_mark_and_goes_on_is_barred_where_it_would_hide_the_answer(plain: Tokenizer) -> None:
    crossing = Tokenizer.from_str(plain.to_str())
    crossing.add_tokens([AddedToken(">{", special=False), AddedToken(">\n", special=False)])
    hiding, blank = crossing.token_to_id(">{"), crossing.token_to_id(">\n")
    matcher = started("llguidance", crossing, BOUND, Thinking(END, END))
    assert hiding in mask(matcher, crossing)
    for token in crossing.encode("Hm.</think", add_special_tokens=False).ids:
        assert matcher.accept(token)
    allowed = mask(matcher, crossing)
    assert hiding not in allowed and blank in allowed and len(allowed) > 2000
    assert matcher.accept(blank) and len(mask(matcher, crossing)) < 100


@pytest.mark.parametrize("budget", [0, 1, 7])
@pytest.mark.parametrize("grammar", [BOUND, None])
def test_after_its_budget_reasoning_is_closed_by_force(
    name: str, plain: Tokenizer, budget: int, grammar: Grammar | None
) -> None:
    closing = plain.encode(f"Enough.{END}", add_special_tokens=False).ids
    filler = plain.encode("z", add_special_tokens=False).ids[0]
    matcher = started(name, plain, grammar, Thinking(END, f"Enough.{END}", budget=budget))
    for _ in range(budget):
        assert matcher.accept(filler)
    for token in closing:
        assert mask(matcher, plain) == [token]
        assert not matcher.accept(filler) and matcher.accept(token)
    after = mask(matcher, plain)
    assert len(after) == plain.get_vocab_size() if grammar is None else filler not in after


def test_it_may_begin_by_its_own_token_or_not_at_all(name: str, marked: Tokenizer) -> None:
    begin, end, brace = marked.encode(f"<think>{END}{{", add_special_tokens=False).ids
    thinking = Thinking(END, END, "<think>", budget=3)
    matcher = started(name, marked, BOUND, thinking)
    first = mask(matcher, marked)
    assert begin in first and len(first) < 50
    assert matcher.accept(begin) and len(mask(matcher, marked)) == marked.get_vocab_size() - len(EOS)
    assert matcher.accept(end) and begin not in mask(matcher, marked)
    matcher = started(name, marked, BOUND, thinking)
    assert matcher.accept(brace) and begin not in mask(matcher, marked)


def test_where_the_output_may_end_inside_its_reasoning_the_end_tokens_are_free(name: str, plain: Tokenizer) -> None:
    matcher = started(name, plain, BOUND, Thinking(END, END, may_stop=True))
    assert set(EOS) <= set(mask(matcher, plain))


def test_taking_tokens_back_leaves_a_matcher_as_one_that_never_had_them(name: str, marked: Tokenizer) -> None:
    thinking = Thinking(END, END, "<think>", budget=6)
    for seed in range(6):
        rng, kept = np.random.default_rng(seed), list[int]()
        matcher = started(name, marked, BOUND, thinking)
        whole = [marked.token_to_id("<think>"), *drawn(started(name, marked, BOUND, Thinking(END, END)), marked, seed)]
        for token in whole[: 6 + seed]:
            ahead = 0
            while ahead < rng.integers(4) and (allowed := [each for each in mask(matcher, marked) if each not in EOS]):
                ahead += matcher.accept(int(rng.choice(allowed)))
            matcher.rollback(ahead)
            fresh = started(name, marked, BOUND, thinking)
            assert all(fresh.accept(each) for each in kept)
            assert mask(matcher, marked) == mask(fresh, marked) and not matcher.error
            if token in mask(matcher, marked):
                kept.append(token)
                assert matcher.accept(token)


@pytest.mark.parametrize("spelled", ["plain", "marked"])
def test_a_mark_is_not_joined_from_tokens_that_were_taken_back(
    name: str, spelled: str, request: pytest.FixtureRequest
) -> None:
    """The first tokens of the mark, or all of them, are accepted and then rolled back. The tokens
    that come next neither complete the mark nor follow it."""
    tokenizer: Tokenizer = request.getfixturevalue(spelled)
    mark, filler = (tokenizer.encode(text, add_special_tokens=False).ids for text in (END, "z"))
    rules = compiled(name, tokenizer, BOUND, Thinking(END, END))
    for cut in range(1, len(mark) + 1):
        for kept in (0, 20):
            matcher, fresh = rules.start(), rules.start()
            assert all(each.accept(token) for each in (matcher, fresh) for token in filler * kept)
            assert all(matcher.accept(token) for token in mark[:cut])
            matcher.rollback(cut)
            for token in (*mark[cut:], *filler):
                assert mask(matcher, tokenizer) == mask(fresh, tokenizer), (cut, kept)
                assert matcher.accept(token) == fresh.accept(token)
            assert len(mask(matcher, tokenizer)) > 2000


def test_masks_stand_along_proposals_over_the_end_of_reasoning(name: str, marked: Tokenizer) -> None:
    request = Request("r", np.array([1, 2], np.int32), SamplingParams(), stop_ids=frozenset(EOS))
    request.matcher = started(name, marked, BOUND, Thinking(END, END))
    request.drafts = marked.encode(f"z{END}{{z", add_special_tokens=False).ids
    words = np.zeros((5, -(-marked.get_vocab_size() // 32)), np.int32)
    assert fill_along(request, words, []) == 4
    again = np.zeros((1, words.shape[1]), np.int32)
    assert fill_along(request, again, []) == 1 and (again[0] == words[0]).all()
    sizes = [int(np.unpackbits(row.view(np.uint8)).sum()) for row in words[:4]]
    assert sizes[0] == sizes[1] > 2000 > max(sizes[2:]) > 0


@pytest.fixture(scope="module")
def model() -> Iterator[Constrained]:
    with Constrained(dtype="float32", overlap=True) as started:
        yield started


def test_proposals_change_no_text_that_thinks_first(model: Constrained) -> None:
    thinking = [Thinking(END, END, budget=budget) for budget in (0, 5, 40)]
    samples = [Sample(grammar, seed, 90, each) for seed, each in enumerate(thinking) for grammar in (BOUND, None)]
    with Constrained(dtype="float32", speculative="ngram", draft_tokens=4) as proposing:
        for temperature in (0.0, 1.0):
            wanted = model.run(samples, logprobs=0, temperature=temperature)
            found = proposing.run(samples, logprobs=0, temperature=temperature)
            assert [answer.tokens for answer in found] == [answer.tokens for answer in wanted]
            for one, other in zip(found, wanted, strict=True):
                np.testing.assert_allclose(one.logprobs, other.logprobs, atol=2e-4, rtol=0)
    for sample, answer in zip(samples, wanted, strict=True):
        thought, found, rest = answer.text.partition(END)
        assert found and sample.thinking is not None and sample.thinking.budget is not None
        assert len(model.codec.encode(thought, special=False)) <= sample.thinking.budget + 1
        if sample.grammar is not None:
            assert answer.finish == "stop" and json.loads(rest)["a"] in ("x", "yes")


def test_it_crosses_to_the_engine_with_the_other_parameters() -> None:
    params = SamplingParams(grammar=BOUND, thinking=Thinking(END, f"!{END}", "<think>", 4, may_stop=True))
    assert unpack_params(pack_params(params)) == params


def test_a_mark_that_begins_as_it_ends_is_followed_from_its_longest_beginning(plain: Tokenizer) -> None:
    mark = "abab"
    crossing = Tokenizer.from_str(plain.to_str())
    crossing.add_tokens([AddedToken("b!", special=False), AddedToken("bab!", special=False)])
    short, long = crossing.token_to_id("b!"), crossing.token_to_id("bab!")
    for text, barred in (("x aba", {short, long}), ("x a", {long}), ("x ab", set[int]())):
        matcher = started("llguidance", crossing, BOUND, Thinking(mark, mark))
        for letter in text:
            assert matcher.accept(crossing.encode(letter, add_special_tokens=False).ids[-1])
        assert {short, long} - set(mask(matcher, crossing)) == barred, text
