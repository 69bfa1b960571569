"""A request's grammar specification: which ones are refused before compilation."""

from __future__ import annotations

import copy
import pickle

import pytest

from sglcore.sampling.grammar_spec import MAX_GRAMMAR_TEXT, Grammar, GrammarError
from sglcore.sampling.params import SamplingError, SamplingParams


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("xml", "<a/>", "wanted one of json_schema, json_object, regex, lark, ebnf"),
        ("regex", "", "a regex grammar with no text; wanted one"),
        ("json_object", "{}", "wanted none: give a json_schema"),
        ("json_schema", "{", "the schema is not JSON"),
        ("json_schema", "[" * 100_000, "the schema is not JSON"),
        ("json_schema", "[1]", "a JSON list"),
        (
            "regex",
            "a" * (MAX_GRAMMAR_TEXT + 1),
            f"{MAX_GRAMMAR_TEXT + 1} characters; wanted at most {MAX_GRAMMAR_TEXT}",
        ),
        ("lark", b"start: x", "the grammar is bytes; wanted text"),
    ],
)
def test_what_is_no_grammar_is_refused_with_what_was_wanted(kind: str, text: str, said: str) -> None:
    with pytest.raises(GrammarError) as caught:
        Grammar(kind, text)  # pyright: ignore[reportArgumentType]
    assert said in str(caught.value) and len(str(caught.value)) < 300


def test_a_text_of_the_greatest_length_is_taken() -> None:
    assert len(Grammar("regex", "a" * MAX_GRAMMAR_TEXT).text) == MAX_GRAMMAR_TEXT


@pytest.mark.parametrize("schema", ["{}", "true", '{"type": "object"}'])
def test_a_schema_is_an_object_or_a_flag(schema: str) -> None:
    assert Grammar("json_schema", schema).text == schema


@pytest.mark.parametrize("other", [{"min_tokens": 1}, {"ignore_eos": True}])
def test_what_keeps_an_output_from_ending_does_not_go_with_a_grammar(other: dict) -> None:
    (name,) = other
    with pytest.raises(SamplingError, match=f"{name}.*with a grammar"):
        SamplingParams(grammar=Grammar("regex", "a"), **other)
    with pytest.raises(SamplingError, match=r"grammar: found .*wanted a Grammar"):
        SamplingParams(grammar="a+")  # pyright: ignore[reportArgumentType]


def test_parameters_with_a_grammar_are_values() -> None:
    params = SamplingParams(grammar=Grammar("regex", "a+"), n=3)
    assert pickle.loads(pickle.dumps(params)) == params == copy.deepcopy(params)
    assert hash(params) == hash(SamplingParams(grammar=Grammar("regex", "a+"), n=3))
    assert params != SamplingParams(grammar=Grammar("lark", "a+"), n=3)
