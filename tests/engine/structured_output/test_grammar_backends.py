"""Grammar backends: every keyword of a schema is enforced or refused by name; vocabularies; the
cache; errors."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from threading import Event
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from sglcore.config.engine_config import EngineConfig
from sglcore.config.settings import settings_of
from sglcore.core.errors import ConfigError
from sglcore.engine.start import embedded_model
from sglcore.engine.structured_output.grammar_cache import BACKENDS, GrammarBackend, Grammars, open_grammars
from sglcore.engine.structured_output.grammar_llguidance import Llguidance
from sglcore.engine.structured_output.grammar_vocabulary import Vocabulary
from sglcore.engine.structured_output.guidance_schema import left_out_of
from sglcore.engine.token_engine import TokenEngine
from sglcore.sampling.grammar_spec import (
    Grammar,
    GrammarBusy,
    GrammarError,
    GrammarKind,
    Repetition,
    Thinking,
    TokenRules,
)
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.request import Matcher
from sglcore.schedule.request_errors import RequestError
from tests.engine.grammar_keywords import CASES
from tests.schedule.fake_worker import FakeWorker, make_limits

SIZE = 2200
"""More logits than the embedded tokenizer has tokens."""

EOS = (2, 5)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(embedded_model() / "tokenizer.json"))


@pytest.fixture(scope="module", params=["llguidance", "xgrammar"])
def name(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(request.param, reason=f"{request.param} is not installed")
    return request.param


@pytest.fixture(scope="module")
def backend(name: str, tokenizer: Tokenizer) -> GrammarBackend:
    return opened(name, tokenizer).backend


def opened(name: str, tokenizer: Tokenizer, size: int = SIZE) -> Grammars:
    """Return grammars compiled by a backend."""
    grammars, row = open_grammars(name, Vocabulary(tokenizer, size, EOS))
    assert grammars is not None and row.effective == grammars.backend.name
    return grammars


def allowed(matcher: Matcher, size: int = SIZE) -> list[int]:
    """Return the tokens that may follow."""
    words = np.full(-(-size // 32), -1, dtype=np.int32)
    matcher.fill(words)
    return np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[:size]).tolist()


def takes(backend: GrammarBackend, grammar: Grammar, text: str, tokenizer: Tokenizer) -> bool:
    """Whether a whole text may be the output."""
    matcher = backend.compile(grammar).start()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    return all(matcher.accept(token) for token in ids) and set(EOS) <= set(allowed(matcher))


NARROWER = MappingProxyType({"xgrammar": {"const", "pattern within"}})
"""Cases where a backend forbids a value that the schema allows; its outputs are still valid."""


def test_each_keyword_of_a_schema_is_enforced_or_refused(backend: GrammarBackend, tokenizer: Tokenizer) -> None:
    enforced = 0
    for name, (schema, good, bad) in CASES.items():
        grammar = Grammar("json_schema", json.dumps(schema))
        try:
            backend.compile(grammar)
        except GrammarError:
            continue
        if backend.name == "llguidance" and left_out_of(grammar):
            continue  # tests/engine/structured_output/test_schema_loosening.py
        enforced += 1
        assert not [value for value in bad if takes(backend, grammar, json.dumps(value), tokenizer)], name
        if name not in NARROWER.get(backend.name, ()):
            assert all(takes(backend, grammar, json.dumps(value), tokenizer) for value in good), name
    assert enforced >= 30


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"anyOf": [{"x-guidance": {}}]}, "'x-guidance' at #/anyOf/0"),
        ({"$defs": {"x": {"$anchor": "b"}}}, "'$anchor' at #/$defs/x"),
        ({"type": "number", "exclusiveMinimum": 2, "maximum": 2.5}, "between 2 and 2.5"),
        ({"allOf": [{"type": "number", "exclusiveMaximum": -1}, {"minimum": -1.5}]}, "between -1.5 and -1"),
        ({"$ref": "https://example.org/schema"}, "example.org"),
        (False, "false"),
    ],
)
def test_a_refusal_names_what_it_is_about(schema: Any, named: str, tokenizer: Tokenizer) -> None:
    with pytest.raises(GrammarError) as caught:
        opened("llguidance", tokenizer).backend.compile(Grammar("json_schema", json.dumps(schema)))
    assert named in str(caught.value) and "\n" not in str(caught.value)


def test_names_of_properties_and_literals_are_no_keywords(backend: GrammarBackend, tokenizer: Tokenizer) -> None:
    names = {"not": {"type": "integer"}, "$anchor": {"enum": [{"uniqueItems": 1}]}}
    schema = {"type": "object", "properties": names, "required": list(names), "additionalProperties": False}
    value = json.dumps({"not": 1, "$anchor": {"uniqueItems": 1}}, separators=(",", ":"))
    assert takes(backend, Grammar("json_schema", json.dumps(schema)), value, tokenizer)


def test_a_thousand_properties_may_be_left_out(tokenizer: Tokenizer) -> None:
    backend = opened("llguidance", tokenizer).backend
    schema = {"type": "object", "properties": {f"p{n}": {"type": "integer"} for n in range(1000)}}
    grammar = Grammar("json_schema", json.dumps({**schema, "additionalProperties": False}))
    for value, is_taken in (({}, True), ({"p0": 1, "p999": 2}, True), ({"p1000": 1}, False), ({"p5": "a"}, False)):
        assert takes(backend, grammar, json.dumps(value, separators=(",", ":")), tokenizer) is is_taken, value


BAD = (
    Grammar("regex", "("),
    Grammar("regex", "(?=a)b"),
    Grammar("lark", "start: missing"),
    Grammar("ebnf", 'root ::= "a'),
    Grammar("json_schema", '{"type": "nonsense"}'),
    Grammar("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}'),
)


@pytest.mark.parametrize("grammar", BAD, ids=lambda grammar: f"{grammar.kind} {grammar.text}")
def test_what_can_not_be_read_is_an_error_that_says_why(grammar: Grammar, tokenizer: Tokenizer) -> None:
    with pytest.raises(GrammarError, match=grammar.kind):
        opened("auto", tokenizer).backend.compile(grammar)


CHAIN = 5000
CHAINS = (
    Grammar("lark", "start: r0\n" + "".join(f'r{i}: "x" r{i + 1}\n' for i in range(CHAIN)) + f'r{CHAIN}: "z"'),
    Grammar("lark", "start: T0\n" + "".join(f'T{i}: "x" T{i + 1}\n' for i in range(CHAIN)) + f'T{CHAIN}: "z"'),
    Grammar(
        "json_schema",
        json.dumps(
            {
                "$ref": "#/$defs/d0",
                "$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(CHAIN)} | {f"d{CHAIN}": {"const": 1}},
            }
        ),
    ),
)


SELF = '{"$ref": "#"}'


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("ebnf", 'root ::= root "a"', "no text completes it, because a rule or a $ref only refers to itself"),
        ("json_schema", SELF, "no text completes it, because a rule or a $ref only refers to itself"),
        ("ebnf", 'root ::= "a" root', "there are more than 50000 ways to read the text at one place"),
        (
            "json_schema",
            '{"$ref": "http://x.org/y"}',
            "$ref to another document, 'http://x.org/y', which is not fetched",
        ),
        ("json_schema", '{"$ref": "#/x"}', "$ref to '#/x', which is not in the schema"),
        (
            "json_schema",
            '{"minimum": 5, "maximum": 2, "type": "integer"}',
            "no value satisfies the schema: minimum (5) is",
        ),
        (
            "json_schema",
            '{"type": "string", "pattern": "\\\\p{Foo}"}',
            "invalid regex '\\p{Foo}': Unicode property not found",
        ),
        ("regex", "(?=a)b", 'invalid regex "(?=a)b": look-around, including look-ahead'),
        ("regex", "\\ba", "look-around, such as \\b, is not supported"),
    ],
)
def test_a_refusal_speaks_of_the_grammar_and_not_of_the_librarys_parser(
    kind: GrammarKind, text: str, said: str, tokenizer: Tokenizer
) -> None:
    with pytest.raises(GrammarError) as refused:
        Llguidance(Vocabulary(tokenizer, SIZE, EOS)).compile(Grammar(kind, text))
    assert said in str(refused.value)
    assert not re.search("Extension|Unsatisfiable|registry|parse error|Too many|coerce", str(refused.value))


@pytest.mark.parametrize("grammar", CHAINS, ids=("rules", "terminals", "references"))
def test_a_long_chain_of_rules_does_not_overrun_the_compilers_stack(grammar: Grammar, tokenizer: Tokenizer) -> None:
    assert allowed(opened("auto", tokenizer).compile(grammar).start())


def test_an_ebnf_that_would_take_long_to_translate_is_refused_with_the_limit(tokenizer: Tokenizer) -> None:
    long = Grammar("ebnf", "root ::= " + " ".join(['"a"'] * 5000))
    with pytest.raises(GrammarError, match=r"this ebnf has 20008 characters; wanted at most 16384"):
        opened("auto", tokenizer).backend.compile(long)


def test_a_mask_has_neither_special_tokens_nor_ids_beyond_the_tokenizers(
    backend: GrammarBackend, tokenizer: Tokenizer
) -> None:
    special = {token for token, added in tokenizer.get_added_tokens_decoder().items() if added.special}
    anything = backend.compile(Grammar("regex", "(.|\\n)*" if backend.name == "llguidance" else "[^\\x00]*"))
    found = set(allowed(anything.start()))
    assert found & special == set(EOS)
    assert max(found) < tokenizer.get_vocab_size() and len(found) > 1500
    only_stops = anything = backend.compile(Grammar("regex", "a")).start()
    assert only_stops.accept(tokenizer.encode("a", add_special_tokens=False).ids[0])
    assert allowed(only_stops) == list(EOS)


@pytest.mark.parametrize(
    ("kind", "text", "wanted"),
    [
        ("regex", r"<\|user\|>", "<|user|>"),
        ("regex", r"a<\|end\|>b", "a<|end|>b"),
        ("json_schema", '{"enum": ["<|end|>"]}', '"<|end|>"'),
        ("json_schema", '{"const": {"<|assistant|>": "<think>"}}', '{"<|assistant|>":"<think>"}'),
        ("lark", 'start: "<think>" "x"', "<think>x"),
    ],
)
def test_text_of_added_tokens_is_spelled_with_ordinary_ones(
    name: str, tokenizer: Tokenizer, kind: GrammarKind, text: str, wanted: str
) -> None:
    extended = Tokenizer.from_str(tokenizer.to_str())
    extended.add_tokens([AddedToken("<think>", special=False)])
    compiled = opened(name, extended).backend.compile(Grammar(kind, text))
    for seed in range(4):
        rng, matcher, ids = np.random.default_rng(seed), compiled.start(), list[int]()
        while not set(choice := allowed(matcher)) & set(EOS):
            ids.append(int(rng.choice(choice)))
            assert matcher.accept(ids[-1]), (matcher.error, ids)
        assert "".join(extended.decode(ids).split()) == wanted


def test_a_unigram_models_marks_are_spelled_too() -> None:
    pieces = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0), *((f"<0x{byte:02X}>", -9.0) for byte in range(256))]
    tokenizer = Tokenizer(models.Unigram([*pieces, *((each, -3.0) for each in "ab<>/s")], 0, byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in ("<s>", "</s>")])
    matcher = opened("llguidance", tokenizer).backend.compile(Grammar("regex", "a<s>b")).start()
    ids: list[int] = []
    while not set(choice := allowed(matcher)) & set(EOS):
        ids.append(choice[0])
        assert matcher.accept(ids[-1])
    assert tokenizer.decode(ids) == "a<s>b"


def test_a_vocabulary_smaller_than_the_tokenizers_is_kept_to(tokenizer: Tokenizer) -> None:
    matcher = opened("auto", tokenizer, 1000).backend.compile(Grammar("regex", ".*")).start()
    assert 300 < max(allowed(matcher, 1000)) < 1000


def sentencepiece() -> Tokenizer:
    """A tokenizer like SentencePiece's: blanks are written as U+2581, and missing characters fall
    back to bytes."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["<turn>", "<end>", "\u2581", *'abcdefgh"{}[]:,0123456789', '{"', '":', "ab", "\u2581ab", "\u25811"]
    merges = [("{", '"'), ('"', ":"), ("a", "b"), ("\u2581", "ab"), ("\u2581", "1")]
    vocabulary = {piece: place for place, piece in enumerate(pieces)}
    made = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    made.add_special_tokens([AddedToken(text, special=True) for text in ("<unk>", "<s>", "</s>", "<turn>", "<end>")])
    return made


def test_a_vocabulary_of_sentencepiece_is_read_with_its_blanks_and_bytes() -> None:
    tokenizer = sentencepiece()
    size = tokenizer.get_vocab_size() + 3
    vocabulary = Vocabulary(tokenizer, size, (2,))
    grammars, _ = open_grammars("auto", vocabulary)
    assert grammars is not None
    schema = {
        "type": "object",
        "properties": {"ab": {"const": "ü 1"}},
        "required": ["ab"],
        "additionalProperties": False,
    }
    compiled = grammars.backend.compile(Grammar("json_schema", json.dumps(schema)))
    for seed in range(20):
        rng, matcher, ids = np.random.default_rng(seed), compiled.start(), [1]
        while (choice := allowed(matcher, size)) != [2]:
            assert max(choice) < tokenizer.get_vocab_size() and len(ids) < 400
            ids.append(int(rng.choice([token for token in choice if token != 2])))
            assert matcher.accept(ids[-1])
        assert json.loads(tokenizer.decode(ids)) == {"ab": "ü 1"}


def test_an_engine_whose_device_takes_no_masks_refuses_a_grammar_when_it_is_added(tokenizer: Tokenizer) -> None:
    worker = FakeWorker(make_limits(takes_masks=False))
    engine = TokenEngine(worker, frozenset(EOS), open_grammars=lambda: opened("auto", tokenizer))
    with pytest.raises(RequestError, match="takes no masks"):
        engine.add("r", [1, 2], SamplingParams(grammar=Grammar("regex", "a")), 0)
    assert not engine.has_work


def test_matchers_of_one_grammar_go_their_own_ways(backend: GrammarBackend, tokenizer: Tokenizer) -> None:
    compiled = backend.compile(Grammar("regex", "ab*c"))
    a, b, c = (tokenizer.encode(text, add_special_tokens=False).ids[0] for text in "abc")
    first, second = compiled.start(), compiled.start()
    assert first.accept(a) and first.accept(c) and not first.accept(b)
    assert second.accept(a) and second.accept(b) and not second.error
    assert allowed(first)[:1] != [b] and c in allowed(second)
    assert a in allowed(compiled.start())


class Fake:
    """A backend with a `compile` that the test gives."""

    name = "fake"
    vocabulary: Vocabulary

    def __init__(self, compile: Callable[[Grammar], Any]) -> None:
        self._compile = compile
        self.texts: list[str] = []

    def compile(self, grammar: Grammar) -> Any:
        self.texts.append(grammar.text)
        return self._compile(grammar)


class Startable:
    def start(self) -> str:
        return "started"


def test_a_grammar_is_compiled_once_and_the_oldest_is_forgotten() -> None:
    backend = Fake(lambda grammar: Startable())
    grammars = Grammars(backend, kept=2)
    for text in ("a", "b", "a", "c", "a", "b"):
        assert grammars.compile(Grammar("regex", text)).start() == "started"
    assert backend.texts == ["a", "b", "c", "b"]
    grammars.close()


DRY = Repetition(0.8, 1.75, 2, -1, ())


def test_each_part_of_what_is_asked_for_makes_it_another() -> None:
    """A compiled grammar is not reused for a request that differs in any part."""
    grammars = Grammars(Fake(lambda grammar: Startable()))
    parts = {
        "grammar": (Grammar("regex", "a"), Grammar("regex", "b"), Grammar("ebnf", "a"), None),
        "thinking": (None, Thinking("e", "e"), Thinking("e", "e", budget=1), Thinking("f", "f"), Thinking("e", "fe")),
        "rules": (None, TokenRules((1,), ()), TokenRules((), ("a",)), TokenRules((1,), ("a",))),
        "repetition": (None, DRY, replace(DRY, last_n=5), replace(DRY, base=3.0), replace(DRY, breakers=("a",))),
    }
    asked = [
        {**{name: values[0] for name, values in parts.items()}, changed: value}
        for changed, values in parts.items()
        for value in values[1:]
    ]
    futures = [grammars.compile(**each)._future for each in asked]  # pyright: ignore[reportArgumentType]
    assert len({id(future) for future in futures}) == len(asked)
    assert [grammars.compile(**each)._future for each in asked] == futures  # pyright: ignore[reportArgumentType]
    grammars.close()


def test_asking_does_not_wait_and_all_who_asked_get_what_was_compiled_once() -> None:
    go = Event()

    def compile(grammar: Grammar) -> Startable:
        assert go.wait(20)
        return Startable()

    grammars = Grammars(Fake(compile))
    compiling, again = (grammars.compile(Grammar("regex", "a")) for _ in range(2))
    assert not compiling.is_done and not compiling.wait(0)
    go.set()
    assert compiling.wait() and again.wait() and compiling.start() == again.start() == "started"
    grammars.close()


def test_what_waits_too_long_is_refused_for_now_and_says_how_long_and_others_go_on() -> None:
    go = Event()

    def compile(grammar: Grammar) -> Startable:
        assert grammar.text != "slow" or go.wait(20)
        return Startable()

    grammars = Grammars(Fake(compile), seconds=0.05)
    with pytest.raises(GrammarBusy, match=r"waited 0.05 s for other grammars to compile; try again later"):
        grammars.compile(Grammar("regex", "slow")).start()
    grammars = Grammars(grammars.backend)
    assert grammars.compile(Grammar("regex", "quick")).start() == "started"
    go.set()


def test_a_backend_that_fails_in_its_own_way_is_an_error_of_that_grammar() -> None:
    def compile(grammar: Grammar) -> Any:
        raise ZeroDivisionError("inside")

    compiling = Grammars(Fake(compile)).compile(Grammar("lark", "x"))
    with pytest.raises(GrammarError, match="fake failed on this lark: ZeroDivisionError: inside"):
        compiling.start()


def test_the_ledger_says_which_backend_and_why(tokenizer: Tokenizer) -> None:
    vocabulary = Vocabulary(tokenizer, SIZE, EOS)
    rows = {name: open_grammars(name, vocabulary)[1] for name in ("auto", "llguidance", "off")}
    assert [row.effective for row in rows.values()] == ["llguidance", "llguidance", "off"]
    assert "every device" in rows["auto"].reason and not any(row.downgrade for row in rows.values())
    assert open_grammars("off", vocabulary)[0] is None
    assert set(settings_of(EngineConfig)["grammar_backend"].choices) == {"auto", "off", *BACKENDS}


def test_without_an_end_of_sequence_token_grammars_are_off_or_refused_by_name(tokenizer: Tokenizer) -> None:
    vocabulary = Vocabulary(tokenizer, SIZE, ())
    grammars, row = open_grammars("auto", vocabulary)
    assert grammars is None and "end-of-sequence" in row.reason
    with pytest.raises(ConfigError, match="end-of-sequence"):
        open_grammars("llguidance", vocabulary)


def test_a_parser_that_gives_up_leaves_a_reason_and_an_empty_mask(tokenizer: Tokenizer) -> None:
    matcher = opened("auto", tokenizer).backend.compile(Grammar("regex", "abc")).start()
    assert not matcher.accept(tokenizer.encode("z", add_special_tokens=False).ids[0])
    assert allowed(matcher) == [] and matcher.error


def test_taking_tokens_back_leaves_a_matcher_as_one_that_never_had_them(
    backend: GrammarBackend, tokenizer: Tokenizer
) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "array", "items": {"type": "boolean"}}},
        "additionalProperties": False,
    }
    compiled = backend.compile(Grammar("json_schema", json.dumps(schema)))
    for seed in range(8):
        rng, matcher, kept = np.random.default_rng(seed), compiled.start(), list[int]()
        for _ in range(20):
            ahead = 0
            for _ in range(rng.integers(4)):
                if not matcher.accept(int(rng.choice(allowed(matcher)))):
                    break
                ahead += 1
            if rng.integers(2):
                # A refused token, or one after the end, is rolled back too.
                matcher.accept(SIZE - 1)
                allowed(matcher)
            matcher.rollback(ahead)
            fresh = compiled.start()
            assert all(fresh.accept(token) for token in kept)
            choice = allowed(matcher)
            assert choice == allowed(fresh) and not matcher.error, (seed, kept)
            if set(choice) <= set(EOS):
                break
            kept.append(int(rng.choice([token for token in choice if token not in EOS])))
            assert matcher.accept(kept[-1])


RUNS_ON = Grammar("ebnf", 'root ::= ("x" | "y") c\nc ::= "zq" c')
"""A grammar that starts correctly; the compiler gives up at the token after the first, for one of
the two alternatives."""


def test_a_compiler_that_gives_up_after_a_token_that_it_allowed_says_why(tokenizer: Tokenizer) -> None:
    compiled = opened("llguidance", tokenizer).backend.compile(RUNS_ON)
    matcher = compiled.start()
    y, z = (tokenizer.encode(text, add_special_tokens=False).ids[-1] for text in "yz")
    assert y in allowed(matcher) and matcher.accept(y) and z in allowed(matcher)
    assert not matcher.accept(z) and "ways to read the text at one place" in matcher.error
    matcher.rollback(0)
    assert not matcher.error and z in allowed(matcher)
    other = compiled.start()
    assert not other.accept(z) and not other.error, "the mask forbids it, so who drew it is at fault"


@pytest.mark.parametrize("count, is_served", [(1000, True), (1600, False)])
def test_as_many_properties_may_be_left_out_as_are_followed_in_time_and_more_are_refused(
    tokenizer: Tokenizer, count: int, is_served: bool
) -> None:
    schema = {"type": "object", "properties": {f"p{number}": {"type": "integer"} for number in range(count)}}
    backend = opened("llguidance", tokenizer).backend
    grammar = Grammar("json_schema", json.dumps(schema))
    if is_served:
        assert takes(backend, grammar, '{"p7": 1, "p999": 2}', tokenizer)
    else:
        with pytest.raises(GrammarError, match="Current row has .* items; max is 6000"):
            backend.compile(grammar)
