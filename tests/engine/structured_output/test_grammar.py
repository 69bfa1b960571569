"""Texts that the embedded model draws under grammars: a text that ends by itself matches its
grammar, other requests in the batch change nothing, and no schedule changes a token."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from random import Random

import jsonschema
import numpy as np
import pytest

from sglcore.sampling.grammar_spec import Grammar, GrammarError
from tests.engine.constrained import Constrained, Sample
from tests.engine.schemas import random_schema

SCHEMAS = 200
FREE = 16


@pytest.fixture(scope="module")
def model() -> Iterator[Constrained]:
    with Constrained(dtype="float32", overlap=True) as started:
        yield started


@pytest.fixture(scope="module")
def cases(model: Constrained) -> list[tuple[Grammar, dict]]:
    """Return random schemas that the backend can enforce."""
    found: list[tuple[Grammar, dict]] = []
    seed = 0
    while len(found) < SCHEMAS:
        schema = random_schema(Random(seed))
        grammar = Grammar("json_schema", json.dumps(schema))
        seed += 1
        try:
            model.grammars.compile(grammar).start()
        except GrammarError:
            continue
        found.append((grammar, schema))
    assert seed < 1.05 * SCHEMAS, "nearly every one can be"
    return found


def test_outputs_of_200_random_schemas_validate_and_the_free_requests_among_them_are_as_without(
    model: Constrained, cases: list[tuple[Grammar, dict]]
) -> None:
    samples = [Sample(grammar, seed) for seed, (grammar, _) in enumerate(cases)]
    free = [Sample(None, 1000 + seed, 20 + 3 * seed) for seed in range(FREE)]
    mixed = [*samples, *free]
    Random(1).shuffle(mixed)
    answers = dict(zip(mixed, model.run(mixed), strict=True))
    ended = 0
    for sample, (_, schema) in zip(samples, cases, strict=True):
        answer = answers[sample]
        assert answer.finish in ("stop", "length"), answer.error
        if answer.finish == "stop":
            ended += 1
            jsonschema.Draft202012Validator(schema).validate(json.loads(answer.text))
    assert ended >= 0.9 * SCHEMAS
    assert [answers[sample].tokens for sample in free] == [answer.tokens for answer in model.run(free)]


def test_alone_and_without_overlap_a_constrained_request_has_the_same_tokens(
    model: Constrained, cases: list[tuple[Grammar, dict]]
) -> None:
    samples = [Sample(grammar, seed, 40) for seed, (grammar, _) in enumerate(cases[:12])]
    together = model.run(samples)
    assert [model.run([sample])[0].tokens for sample in samples[:4]] == [answer.tokens for answer in together[:4]]
    assert model.run([*samples[6:], Sample(), *samples[:6]], overlap=False)[7:] == together[:6]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_match_their_regular_expressions(model: Constrained, temperature: float) -> None:
    patterns = (
        "(yes|no|perhaps)",
        "[A-Z][a-z]{2,8}( [a-z]{1,6}){3}\\.",
        "\\d{3}-\\d{4}",
        "[äöü]{4}",
        "(a|bc)*d",
        "<\\|user\\|>|<\\|end\\|>!",
    )
    samples = [Sample(Grammar("regex", pattern), seed) for pattern in patterns for seed in range(4)]
    for sample, answer in zip(samples, model.run(samples, temperature=temperature), strict=True):
        assert sample.grammar is not None and answer.finish == "stop"
        assert re.fullmatch(sample.grammar.text, answer.text), answer


def test_texts_follow_grammars_of_both_notations(model: Constrained) -> None:
    lark = Grammar("lark", 'start: sum\nsum: NUMBER ("+" (NUMBER | "(" sum ")"))*\nNUMBER: /[1-9][0-9]{0,2}/')
    ebnf = Grammar("ebnf", 'root ::= term ("+" term)*\nterm ::= [1-9] | "(" root ")"')
    for answer in model.run([Sample(grammar, seed, 80) for grammar in (lark, ebnf) for seed in range(8)]):
        assert not answer.error
        if answer.finish == "stop":
            assert re.fullmatch(r"[\d+()]+", answer.text) and eval(answer.text) > 0


def test_a_json_object_is_an_object_whatever_is_in_it(model: Constrained) -> None:
    ends = list(model.run([Sample(Grammar("json_object"), seed) for seed in range(16)]))
    objects = [json.loads(answer.text) for answer in ends if answer.finish == "stop"]
    assert len(objects) >= 8 and all(isinstance(value, dict) for value in objects)


def test_an_output_ends_by_the_end_of_sequence_token_and_only_where_its_grammar_may_end(model: Constrained) -> None:
    (answer,) = model.run([Sample(Grammar("regex", "abc"))], logit_bias=dict.fromkeys(model.eos_ids, 90.0))
    assert answer.finish == "stop" and answer.text == "abc" and answer.tokens[-1] in model.eos_ids
    (answer,) = model.run([Sample(Grammar("regex", "(abc)+"))], logit_bias=dict.fromkeys(model.eos_ids, 90.0))
    assert answer.text == "abc"


def test_a_token_outside_the_grammar_is_not_drawn_however_likely(model: Constrained) -> None:
    wanted = model.codec.encode("z", special=False)[0]
    (answer,) = model.run([Sample(Grammar("regex", "[a-y]{5}"))], logit_bias={wanted: 1e9})
    assert re.fullmatch("[a-y]{5}", answer.text)


RECORD = {
    "type": "object",
    "properties": {"name": {"enum": ["north", "south"]}, "is_open": {"type": "boolean"}, "count": {"type": "integer"}},
    "required": ["name", "is_open", "count"],
    "additionalProperties": False,
}
REPEATING = (
    Grammar("json_schema", json.dumps({"type": "array", "items": RECORD, "minItems": 6, "maxItems": 9})),
    Grammar("regex", "(one two three four five six\\. ){7}"),
    Grammar("regex", "(the lily|the lilac|a rose)( and (the lily|the lilac|a rose)){12}"),
)
"""Grammars with repetitive outputs, so that n-gram drafts are often accepted."""


def test_proposals_beside_grammars_change_no_text_and_save_steps(model: Constrained) -> None:
    samples = [Sample(grammar, seed, 110) for seed, grammar in enumerate([*REPEATING, None, *REPEATING])]
    with Constrained(dtype="float32", speculative="ngram", draft_tokens=4) as proposing:
        for temperature in (0.0, 1.0):
            wanted = model.run(samples, logprobs=0, temperature=temperature)
            found = proposing.run(samples, logprobs=0, temperature=temperature)
            assert [answer.tokens for answer in found] == [answer.tokens for answer in wanted]
            assert [answer.finish for answer in found] == [answer.finish for answer in wanted]
            for one, other in zip(found, wanted, strict=True):
                np.testing.assert_allclose(one.logprobs, other.logprobs, atol=2e-4, rtol=0)
        for sample in samples[: len(REPEATING)]:
            (answer,) = proposing.run([sample], temperature=0.0)
            assert len(answer.tokens) > 1.5 * proposing.steps, (sample, proposing.steps)
