"""What each grammar library enforces of what it takes, and which keywords and tokens it refuses."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from jsonschema_specifications import REGISTRY
from tokenizers import AddedToken, Tokenizer

from sglcore.engine.structured_output.grammar_cache import GrammarBackend
from sglcore.engine.structured_output.grammar_llguidance import MAX_EBNF
from sglcore.sampling.grammar_spec import Grammar, GrammarError, GrammarKind
from tests.engine.grammar_keywords import CASES, ITEM
from tests.engine.structured_output.test_grammar_backends import (
    EOS,
    SIZE,
    allowed,
    backend,
    name,
    opened,
    takes,
    tokenizer,
)

__all__ = ["backend", "name", "tokenizer"]


def object_of(**more: Any) -> Grammar:
    return Grammar("json_schema", json.dumps({"type": "object", "properties": {"a": ITEM}, **more}))


@pytest.fixture(scope="module")
def xgrammar(tokenizer: Tokenizer) -> GrammarBackend:
    pytest.importorskip("xgrammar", reason="xgrammar is not installed")
    return opened("xgrammar", tokenizer).backend


@pytest.fixture(scope="module")
def llguidance(tokenizer: Tokenizer) -> GrammarBackend:
    return opened("llguidance", tokenizer).backend


def refusal(backend: GrammarBackend, grammar: Grammar) -> str:
    """Return why a grammar is refused; empty if it is compiled."""
    try:
        backend.compile(grammar)
    except GrammarError as error:
        return str(error)
    return ""


def of_schema(backend: GrammarBackend, schema: Any) -> str:
    return refusal(backend, Grammar("json_schema", json.dumps(schema)))


@pytest.mark.parametrize(
    "text",
    ['{"a":1}', '{"a": 1}', '{\n  "a": 1\n}', '{ "a" : 1 }', '{"a":\n' + " " * 32 + "1}", '{"a": 1, "b": []}', "{}"],
)
def test_json_may_be_laid_out_as_usual_and_have_what_its_schema_does_not_forbid(
    backend: GrammarBackend, tokenizer: Tokenizer, text: str
) -> None:
    assert takes(backend, object_of(), text, tokenizer)
    assert takes(backend, Grammar("json_object"), text, tokenizer)


@pytest.mark.parametrize("text", ['{"a":' + " " * 34 + "1}", '{"a":\n' + " " * 33 + "1}", "[1]", "1"])
def test_blanks_are_bounded_and_an_object_is_one(backend: GrammarBackend, tokenizer: Tokenizer, text: str) -> None:
    assert not takes(backend, object_of(), text, tokenizer)
    assert not takes(backend, Grammar("json_object"), text, tokenizer)


def test_a_vocabulary_smaller_than_the_tokenizers_is_kept_to(name: str, tokenizer: Tokenizer) -> None:
    matcher = opened(name, tokenizer, 1000).backend.compile(Grammar("regex", "[a-z ]*")).start()
    assert 300 < max(allowed(matcher, 1000)) < 1000


def test_after_an_end_token_no_other_follows_until_it_is_taken_back(
    backend: GrammarBackend, tokenizer: Tokenizer
) -> None:
    matcher = backend.compile(Grammar("regex", "a")).start()
    assert matcher.accept(tokenizer.encode("a", add_special_tokens=False).ids[0]) and matcher.accept(EOS[1])
    assert set(allowed(matcher)) <= set(EOS)
    matcher.rollback(1)
    assert not matcher.error and allowed(matcher) == list(EOS)


@pytest.mark.parametrize(
    ("kind", "text"),
    [("regex", "("), ("ebnf", 'root ::= "a'), ("lark", "start: missing"), ("json_schema", '{"type": "nonsense"}')],
)
def test_a_refusal_is_one_line_without_the_librarys_own_source(
    backend: GrammarBackend, kind: GrammarKind, text: str
) -> None:
    found = refusal(backend, Grammar(kind, text))
    assert found.startswith(f"this {kind} ") and not any(each in found for each in ("\n", ".cc:", ".rs:"))


def test_xgrammar_refuses_the_cases_that_it_does_not_enforce_and_takes_all_others(xgrammar: GrammarBackend) -> None:
    words = ("not", "if", "else", "contains", "Contains", "uniqueItems", "oneOf", "allOf", "patternProp", "propertyN")
    words += ("dependent", "dependencies", "unevaluated", "additionalItems", "items list", "untyped", "not described")
    words += ("format regex", "format unknown", "dynamicRef", "recursiveRef", "guidance", "anchor")
    words += ("pattern and maxLength", "anyOf beside", "$ref and more")
    found = {case for case, (schema, _, _) in CASES.items() if of_schema(xgrammar, schema)}
    assert found == {case for case in CASES if any(word in case for word in words)}


@pytest.mark.parametrize("place", ["2019-09", "2020-12"])
def test_xgrammar_takes_notes_beside_any_keyword(place: str, xgrammar: GrammarBackend) -> None:
    """The keywords are those of the vocabulary of annotations of JSON Schema."""
    found = REGISTRY[f"https://json-schema.org/draft/{place}/meta/meta-data"].contents
    notes = set(found["properties"]) | {"$comment"}  # type: ignore[reportArgumentType,reportIndexIssue]
    assert len(notes) > 7
    for note in notes:
        assert not of_schema(xgrammar, {"enum": ["a"], note: [] if note == "examples" else "x"}), note
    more = {"$schema": "x", "$id": "http://a.b/c", "$defs": {"x": ITEM}, "definitions": {"x": ITEM}}
    assert not of_schema(xgrammar, {"enum": ["a"], **more})


TYPED: dict[str, dict[str, Any]] = {
    "string": {"format": "date", "maxLength": 3, "minLength": 1, "pattern": "^a$"},
    "number": {"exclusiveMaximum": 3, "exclusiveMinimum": 1, "maximum": 3, "minimum": 1, "multipleOf": 2},
    "array": {"items": ITEM, "maxItems": 3, "minItems": 1, "prefixItems": [ITEM]},
    "object": {
        **{"additionalProperties": False, "maxProperties": 3, "minProperties": 1},
        **{"properties": {"a": ITEM}, "required": ["a"]},
    },
}


@pytest.mark.parametrize("keyword", [keyword for keywords in TYPED.values() for keyword in keywords])
def test_xgrammar_takes_a_keyword_with_its_type_alone(keyword: str, xgrammar: GrammarBackend) -> None:
    own = next(kind for kind, keywords in TYPED.items() if keyword in keywords)
    value = TYPED[own][keyword]
    more = {"properties": {"a": ITEM}} if keyword == "required" else {}
    assert keyword == "multipleOf" or not of_schema(xgrammar, {"type": own, keyword: value, **more})
    for node in ({}, *({"type": kind} for kind in (*TYPED, "integer") if kind != own)):
        takes_integer = own == "number" and node.get("type") == "integer"
        found = of_schema(xgrammar, {"items": {**node, keyword: value}, "type": "array"})
        assert takes_integer or f"{keyword!r} without its type at #/items" in found, node
        assert not takes_integer or not found, node


@pytest.mark.parametrize(
    "alone",
    [{"$ref": "#/$defs/x"}, {"anyOf": [ITEM]}, {"const": 1}, {"enum": [1, 2]}],
    ids=lambda each: next(iter(each)),
)
def test_xgrammar_takes_these_keywords_without_others_that_it_would_ignore(
    alone: dict[str, Any], xgrammar: GrammarBackend
) -> None:
    defs = {"$defs": {"x": ITEM}}
    assert not of_schema(xgrammar, {**alone, **defs, "type": "integer", "title": "t"})
    (keyword,) = alone
    for other in ({"minimum": 1}, {"const": 1}, {"items": ITEM}):
        if keyword not in other:
            found = of_schema(xgrammar, {**alone, **defs, "type": "integer", **other})
            assert "at #, which the grammar backend xgrammar does not enforce" in found and repr(keyword) in found


def test_xgrammar_refuses_what_it_does_not_enforce_within_a_tag(
    xgrammar: GrammarBackend, llguidance: GrammarBackend
) -> None:
    def tags(schema: Any) -> Grammar:
        tag = {"begin": "<b>", "schema": schema, "end": "</b>"}
        found = [{**tag, "begin": "<a>", "schema": ITEM}, tag]
        return Grammar("structural_tag", json.dumps({"structures": found, "triggers": ["<a", "<b"]}))

    strict = tags({"type": "array", "items": ITEM, "uniqueItems": True})
    assert "'uniqueItems' at #" in refusal(xgrammar, strict) and not refusal(llguidance, strict)
    assert not refusal(xgrammar, tags({"type": "array", "items": ITEM}))
    assert "x-guidance" in refusal(llguidance, tags({"x-guidance": {}}))


@pytest.mark.parametrize("spare", [0, 1])
def test_an_ebnf_may_be_as_long_as_the_limit(spare: int, llguidance: GrammarBackend) -> None:
    text = 'root ::= "a"'
    found = refusal(llguidance, Grammar("ebnf", text + " " * (MAX_EBNF - len(text) + spare)))
    assert found == (
        f"this ebnf has {MAX_EBNF + 1} characters; wanted at most {MAX_EBNF}; write it as a lark grammar"
        if spare
        else ""
    )


def test_what_the_library_would_ignore_within_a_lark_grammar_is_refused_by_name(llguidance: GrammarBackend) -> None:
    schema = {"type": "string", "format": "foo", "x-guidance": {"lenient": True}}
    found = refusal(llguidance, Grammar("lark", f"start: %json {json.dumps(schema)}"))
    assert found == "this lark cannot be fully enforced: Unknown format: foo"


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_refusal_names_the_last_origin_before_the_rule_that_is_refused(
    place: int, llguidance: GrammarBackend
) -> None:
    rules = ['"x"'] * 3
    rules[place] = '%json {"type": "integer", "minimum": 5, "maximum": 3}'
    first, second, third = rules
    text = f"start: a b c\na: {first}\n//: the second\nb: {second}\n//: the third\nc: {third}\n//: the fourth\nd: a"
    found = refusal(llguidance, Grammar("lark", text))
    origin = ("this lark", "the second", "the third")[place]
    assert found.startswith(f"{origin} cannot be enforced: ") and "no value satisfies the schema: minimum (5)" in found


@pytest.mark.parametrize(
    ("text", "special", "is_mark"),
    [("[INST]", True, True), ("a mark", True, True), ("<think>", False, True), ("tool", False, False)]
    + [("<a> b", False, False), ("b <a>", False, False)],
)
def test_added_tokens_are_marks_that_no_free_text_has_or_words_like_others(
    text: str, special: bool, is_mark: bool, tokenizer: Tokenizer
) -> None:
    extended = Tokenizer.from_str(tokenizer.to_str())
    extended.add_tokens([AddedToken(text, special=special, normalized=False)])
    added = extended.token_to_id(text)
    compiled = opened("llguidance", extended).backend.compile
    free = compiled(Grammar("regex", "(.|\\n)*")).start()
    assert (added in allowed(free)) is not is_mark and max(allowed(free)) < extended.get_vocab_size() <= SIZE
    barred = {added} if is_mark else set[int]()
    bound, ids = compiled(Grammar("regex", re.escape(text).replace("\\ ", " "))).start(), list[int]()
    while not set(choice := [each for each in allowed(bound) if each not in barred]) & set(EOS):
        ids.append(max(choice, key=lambda token: len(extended.decode([token]))))
        assert bound.accept(ids[-1])
    assert extended.decode(ids) == text


def test_the_first_reason_of_a_compiler_that_gives_up_is_kept(llguidance: GrammarBackend, tokenizer: Tokenizer) -> None:
    matcher = llguidance.compile(Grammar("ebnf", 'root ::= ("x" | "y") c\nc ::= "zq" c')).start()
    y, z = (tokenizer.encode(text, add_special_tokens=False).ids[-1] for text in "yz")
    assert y in allowed(matcher) and matcher.accept(y) and z in allowed(matcher)
    assert not matcher.accept(z) and "ways to read the text at one place" in matcher.error
    first = matcher.error
    assert not matcher.accept(y) and allowed(matcher) == [] and matcher.error == first


@pytest.mark.parametrize("text", ["<think>", "<|user|>"])
def test_a_lark_grammar_may_name_a_mark_which_is_then_one_token(text: str, tokenizer: Tokenizer) -> None:
    extended = Tokenizer.from_str(tokenizer.to_str())
    extended.add_tokens([AddedToken("<think>", special=False)])
    matcher = opened("llguidance", extended).backend.compile(Grammar("lark", f'start: {text} "x"')).start()
    (mark,) = allowed(matcher)
    assert mark == extended.token_to_id(text) and matcher.accept(mark)
    assert "x" in {extended.decode([token]) for token in allowed(matcher)}
