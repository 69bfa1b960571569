"""What an engine takes: prompts of text or token ids, parameters of its vocabulary, and names that
no other request has."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from sglcore.core.ledger import Row
from sglcore.engine.core import Engine, check_ids, cut_tokens, read_prompt
from sglcore.engine.start import embedded_model
from sglcore.engine.structured_output.grammar_vocabulary import Vocabulary
from sglcore.engine.tokenizers.text_codec import TextError
from sglcore.sampling.grammar_spec import Grammar, TokenRules
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.request_errors import RequestError
from tests.engine.test_ended_requests import TOKEN, ConstantWorker
from tests.schedule.fake_worker import make_limits

CODEC: Any = None
"""Token ids need no codec."""


@pytest.mark.parametrize("prompt", [[3, 4], (3, 4), np.array([3, 4], np.int32), [np.int64(3), 4], range(3, 5)])
def test_whole_numbers_of_any_sequence_are_token_ids(prompt: Any) -> None:
    assert read_prompt(CODEC, prompt) == [3, 4]


@pytest.mark.parametrize(
    "prompt",
    [[True, 3], [3, np.bool_(True)], b"text", bytearray(b"text"), memoryview(b"text"), {3: 4}, {3, 4}, [3.0], ["a"], 7],
    ids=["truth", "numpy-truth", "bytes", "bytearray", "memoryview", "dict", "set", "fraction", "letters", "number"],
)
def test_what_is_neither_text_nor_token_ids_is_refused(prompt: Any) -> None:
    with pytest.raises(TextError, match="wanted text, or a list of token ids"):
        read_prompt(CODEC, prompt)


@pytest.mark.parametrize("field", ["logit_bias", "stop_token_ids", "allowed_token_ids"])
def test_ids_of_parameters_are_those_of_the_vocabulary(field: str) -> None:
    def given(token_id: int) -> SamplingParams:
        if field == "allowed_token_ids":
            return SamplingParams(token_rules=TokenRules(allowed=(3, token_id)))
        values: Any = {3: 1.0, token_id: 1.0} if field == "logit_bias" else (3, token_id)
        return SamplingParams(**{field: values})

    check_ids(given(99), 100)
    with pytest.raises(TextError, match=f"{field} has the token id 100; wanted 0..99") as told:
        check_ids(given(100), 100)
    assert told.value.field == field


@pytest.mark.parametrize(
    ("asked", "prompt", "context", "left"),
    [(10, 6, 16, None), (11, 6, 16, 10), (1, 16, 16, 0), (None, 6, 16, None), (16, 1, 16, 15)],
)
def test_tokens_are_cut_where_the_context_has_fewer_than_are_asked_for(
    asked: int | None, prompt: int, context: int, left: int | None
) -> None:
    assert cut_tokens(SamplingParams(max_tokens=asked), prompt, context) == left


def test_requests_without_a_name_get_one_that_none_has() -> None:
    engine = Engine(ConstantWorker(make_limits(max_model_len=32)), embedded_model())
    few = SamplingParams(max_tokens=100, seed=4)
    names = [engine.add([1, 2], few, name).request_id for name in ("request-0", None, "", "request-3", None)]
    assert names == ["request-0", "request-1", "request-2", "request-3", "request-4"]
    for name in names:
        with pytest.raises(TextError, match=f"request id '{name}' is in use"):
            engine.add([1, 2], few, name)
    output = engine.add([1, 2, 3], few)
    assert (output.max_tokens, output.outputs[0].seed) == (29, 4)
    while engine.has_work:
        engine.step()
    assert len(output.outputs[0].token_ids) == 29 and output.outputs[0].finish_reason == "length"
    assert engine.add([1, 2], few, "request-0").request_id == "request-0", "an ended request gives its name back"
    engine.close()
    with pytest.raises(TextError, match="this engine is closed"):
        engine.add([1, 2], few)


def test_parts_of_a_schema_that_are_not_enforced_are_warned_of_where_the_request_is_added() -> None:
    worker = ConstantWorker(make_limits(takes_masks=True))
    engine = Engine(worker, embedded_model())
    schema = json.dumps({"type": "array", "items": {"type": "string"}, "uniqueItems": True})
    with pytest.warns(UserWarning, match="not held to #/uniqueItems of its schema"):
        engine.add([1, 2], SamplingParams(grammar=Grammar("json_schema", schema)))
    engine.close()


@pytest.mark.parametrize("prompt", [[], [1] * 33])
def test_a_refused_request_does_not_keep_its_name(prompt: list[int]) -> None:
    engine = Engine(ConstantWorker(make_limits(max_model_len=32)), embedded_model())
    for _ in range(2):
        with pytest.raises(RequestError):
            engine.add(prompt, SamplingParams(), "again")
    assert not engine.has_work
    assert engine.add([1, 2], SamplingParams(), "again").request_id == "again"
    engine.close()


@pytest.mark.parametrize("seed", [0, 7, 2**64 - 1, None])
def test_a_request_has_the_seed_that_it_names_or_a_new_one(seed: int | None) -> None:
    engine = Engine(ConstantWorker(make_limits()), embedded_model())
    found = [engine.add([1, 2], SamplingParams(seed=seed, n=2)).outputs for _ in range(2)]
    seeds = [sample.seed for samples in found for sample in samples]
    assert len(set(seeds)) == (1 if seed is not None else 2) and seed in (None, seeds[0])
    engine.close()


@pytest.mark.parametrize("overlap", [False, True])
def test_tokens_end_where_the_text_has_ended_at_a_stop_string(overlap: bool) -> None:
    """At most one step more runs, which was submitted before the text was known."""
    engine = Engine(ConstantWorker(make_limits(vocab_size=2147)), embedded_model(), overlap=overlap)
    stop = engine.codec.decode([TOKEN] * 2)
    output = engine.add([1, 2], SamplingParams(max_tokens=40, stop=(stop,)))
    steps = 0
    while engine.has_work:
        engine.step()
        steps += 1
    assert output.outputs[0].stop_cause == stop and steps <= 4
    engine.scheduler.audit()
    engine.close()


def test_the_grammar_library_is_told_all_ends_of_a_text_and_the_ledger_which_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []
    row = Row("grammar", "auto", "some", "it is installed")

    def open_grammars(backend: str, vocabulary: Vocabulary) -> Any:
        asked.append((backend, vocabulary.size, vocabulary.eos_ids))
        return "grammars", row

    monkeypatch.setattr("sglcore.engine.core.open_grammars", open_grammars)
    rows: list[Row] = []
    for record in (rows.append, None):
        worker = ConstantWorker(make_limits(vocab_size=2147))
        engine = Engine(worker, embedded_model(), grammar_backend="some", record=record)
        engine.eos_ids = frozenset((9, 2, 5))
        grammars: Any = engine._open_grammars()
        assert grammars == "grammars"
        engine.close()
    assert asked == [("some", 2147, (2, 5, 9))] * 2 and rows == [row]
